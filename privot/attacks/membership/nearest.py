"""How near a released image lies: distances between images under three rulers, and the attacks on a released set that follow.

Every ruler maps images to numbers between which the distance is Euclidean, so that all pairs are matrix products:
``pixels`` the image itself; ``features`` random ConvNets (a kernel in which condensation matches); ``lpips`` AlexNet's features, scaled so
that the *squared* distance is LPIPS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import normalize

from privot.errors import SettingError
from privot.measures.image_similarity import network, prepared
from privot.nets.ensemble import Ensemble

RULERS = ("pixels", "features", "lpips")
# random ConvNets of ``features``: their mean kernel is what counts, and it settles soon
NETS = 4
WIDTH = 32
# images on either side of one table of distances
QUERIES = 1024
ROWS = 1024
KEPT = 2**28  # numbers of the reference that stay on the device between portions of queries: 1 GiB

Ruler = Callable[[Tensor], Tensor]


class Neighbours(NamedTuple):
    """``places`` int64 and ``distances`` float64, [images, count], the nearest first."""

    places: Tensor
    distances: Tensor


def ruler(name: str, shape: tuple[int, int, int], device: torch.device, seed: int = 0) -> Ruler:
    """Images [count, *shape] in [0, 1] on the device to numbers [count, d], float32.

    >>> ruler("pixels", (1, 2, 2), torch.device("cpu"))(torch.ones(3, 1, 2, 2)).shape
    torch.Size([3, 4])
    """
    if name == "pixels":
        return lambda images: images.float().flatten(1)
    if name == "features":
        nets = (
            Ensemble(NETS, shape, 1, WIDTH, generator=torch.Generator().manual_seed(seed))
            .to(device)
            .requires_grad_(False)
        )
        return lambda images: (
            nets.features(2 * images.float() - 1).transpose(0, 1).flatten(1) / math.sqrt(NETS)
        )
    if name == "lpips":
        return perceptual(device)
    raise SettingError(f"metric={name!r}: there are {', '.join(RULERS)}")


def perceptual(device: torch.device) -> Ruler:
    """Numbers [count, d] whose squared distance is LPIPS; can be differentiated. Needs the weights, see `privot.measures.image_similarity`."""
    net = network(device)

    def numbers(images: Tensor) -> Tensor:
        maps = net.net((prepared(images) - net.shift) / net.scale)
        # LPIPS sums w_c (f_c - g_c)² over channels and takes the mean over places; its weights are not negative.
        parts = [
            (
                each
                / (each.norm(dim=1, keepdim=True) + 1e-10)
                * (head.clamp(min=0) / each[0, 0].numel()).sqrt()
            ).flatten(1)
            for each, head in zip(maps, net.heads, strict=True)
        ]
        return torch.cat(parts, 1)

    return numbers


def neighbours(
    images: Tensor,
    reference: Tensor,
    count: int = 1,
    metric: str = "pixels",
    *,
    labels: Tensor | None = None,
    reference_labels: Tensor | None = None,
    seed: int = 0,
) -> Neighbours:
    """The ``count`` nearest of ``reference`` [m, channels, height, width] to each of ``images`` [n, ...], places and distances.

    With labels of both, among those of the same class alone. Distances are L2, or LPIPS itself for ``lpips``. Computed where
    ``reference`` lies, in portions; the images may lie elsewhere. Places are found by matrix products, the distances then taken from the
    differences, so that a copy has distance 0.

    >>> points = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1)
    >>> neighbours(points[:1] + 0.9, points, 2).places.tolist()
    [[2, 1]]
    """
    if (
        images.ndim != 4
        or reference.ndim != 4
        or images.shape[1:] != reference.shape[1:]
        or not len(images)
    ):
        raise SettingError(
            f"images {list(images.shape)} and reference {list(reference.shape)}: two sets of images of one shape are needed"
        )
    if (labels is None) != (reference_labels is None):
        raise SettingError("labels: of both sides, or of neither")
    measure = ruler(
        metric, (images.shape[1], images.shape[2], images.shape[3]), reference.device, seed
    )
    if labels is None or reference_labels is None:
        found = _search(images, reference, count, measure)
    else:
        labels = labels.cpu()
        own = reference_labels.cpu()
        found = Neighbours(
            torch.zeros(len(images), count, dtype=torch.int64),
            torch.zeros(len(images), count, dtype=torch.float64),
        )
        for label in labels.unique():
            here = (labels == label).nonzero().flatten()
            there = (own == label).nonzero().flatten()
            if len(there) < count:
                raise SettingError(
                    f"class {int(label)} has {len(there)} images to compare with, {count} are needed"
                )
            places, distances = _search(
                images[here.to(images.device)],
                reference[there.to(reference.device)],
                count,
                measure,
            )
            found.places[here] = there[places]
            found.distances[here] = distances
    return Neighbours(found.places, found.distances**2) if metric == "lpips" else found


@torch.no_grad()
def _search(images: Tensor, reference: Tensor, count: int, measure: Ruler) -> Neighbours:
    """On the CPU, places and L2 distances."""
    if not 1 <= count <= len(reference):
        raise SettingError(
            f"count={count}: 1 to {len(reference)} images of the reference can be nearest"
        )
    device = reference.device
    kept: dict[int, Tensor] = {}
    places = []
    distances = []
    for part in images.split(QUERIES):
        query = measure(part.to(device))
        best = torch.full((len(query), count), torch.inf, dtype=torch.float64, device=device)
        where = torch.zeros(len(query), count, dtype=torch.int64, device=device)
        for number, rows in enumerate(reference.split(ROWS)):
            known = kept[number] if number in kept else measure(rows)
            if known[0].numel() * len(reference) <= KEPT:
                kept[number] = known
            apart = torch.addmm(
                known.square().sum(1), query, known.T, beta=1, alpha=-2
            )  # less |query|², the same for all
            near = apart.topk(min(count, len(known)), largest=False).indices
            exact = torch.stack(
                [
                    vector_norm(query - known[each], dim=1, dtype=torch.float64)
                    for each in near.unbind(1)
                ],
                1,
            )
            best, order = torch.cat([best, exact], 1).topk(count, largest=False)
            where = torch.cat([where, near + number * ROWS], 1).gather(1, order)
        places.append(where.cpu())
        distances.append(best.cpu())
    return Neighbours(torch.cat(places), torch.cat(distances))


def nearest(
    candidates: Tensor,
    released: Tensor,
    metric: str = "pixels",
    *,
    labels: Tensor | None = None,
    released_labels: Tensor | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Scores [candidates]: minus the distance to the nearest released image, of the same class where labels are given.

    >>> nearest(torch.zeros(1, 1, 2, 2), torch.ones(3, 1, 2, 2)).tolist()
    [-2.0]
    """
    found = neighbours(
        candidates, released, 1, metric, labels=labels, reference_labels=released_labels, seed=seed
    )
    return -found.distances[:, 0].numpy()


def calibrated(
    scores: np.ndarray, shadows: np.ndarray, members: np.ndarray | None = None
) -> np.ndarray:
    """Scores [candidates] less their mean over sets of shadows [shadows, candidates]: mean d(x, S') - d(x, S).

    What is near every set of its kind says nothing. With ``members`` bool [shadows, candidates], shadows that held the candidate are left
    out of its mean.

    >>> calibrated(np.array([-1.0]), np.array([[-2.0], [-4.0]])).tolist()
    [2.0]
    """
    without = np.ones(np.shape(shadows), bool) if members is None else ~np.asarray(members)
    if (
        np.shape(shadows)[1:] != np.shape(scores)
        or without.shape != np.shape(shadows)
        or not without.any(0).all()
    ):
        raise SettingError(
            "shadows: [shadows, candidates], with at least one for each candidate that did not hold it"
        )
    return scores - np.where(without, shadows, 0).sum(0) / without.sum(0)


def cosine(
    candidates: Tensor,
    released: Tensor,
    *,
    labels: Tensor | None = None,
    released_labels: Tensor | None = None,
) -> np.ndarray:
    r"""Scores [candidates]: the largest cosine to a released image, each side about its own mean, of a class where labels are given.

    A set that distribution matching began from real images is s_i = x_i + mean(T) - mean(S_0) (Dong et al. 2022, proposition 4.4): about
    its mean it is those images again. This finds a real start, not the members that were not started from.

    >>> images = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> cosine(images, images.roll(1, 0) + 0.1).round(3).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    if (labels is None) != (released_labels is None):
        raise SettingError("labels: of both sides, or of neither")
    device = released.device
    if labels is None or released_labels is None:
        labels = torch.zeros(len(candidates))
        released_labels = torch.zeros(len(released))
    found = torch.zeros(len(candidates), dtype=torch.float64)
    for label in labels.unique():
        here = (labels == label).nonzero().flatten()
        there = released_labels == label
        if not there.any():
            raise SettingError(f"class {int(label)} has no released image to compare with")
        own = released[there.to(device)].flatten(1).float()
        own = normalize(own - own.mean(0), dim=1) if len(own) > 1 else normalize(own, dim=1)
        mean = sum(
            part.flatten(1).double().sum(0)
            for part in candidates[here.to(candidates.device)].split(QUERIES)
        ) / len(here)
        for part in here.split(QUERIES):
            rows = (
                candidates[part.to(candidates.device)].to(device).flatten(1).float()
                - torch.as_tensor(mean, device=device).float()
            )
            found[part.cpu()] = (normalize(rows, dim=1) @ own.T).max(1).values.double().cpu()
    return found.numpy()
