r"""Tracing by means (Homer et al. 2008; Dwork et al. 2015): does a released mean lean towards the candidate?

A condensed set repeats the mean features of its records, and each record moved that mean by its own part. With random ConvNets psi and the
mean m_c of psi over class c of another population,

    score(x) = mean over psi of (psi(x) - m_c)' A (mean psi(S_c) - m_c) / d,

d the number of features. A = I is the tracing of the papers; A = (Sigma + ridge tr(Sigma)/d I)^-1, with the covariance Sigma of the
population about its class means, is the likelihood ratio's direction and tells far more where few features carry most of the variance.
If S_c has the mean of n records, members stand out by about sqrt(d_eff / n) deviations, and A makes d_eff large.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from privot.errors import SettingError
from privot.nets.conv_block import half
from privot.nets.ensemble import Ensemble

NETS = 32  # random ConvNets: what more of them add is small beside the chance in who was a member
RIDGE = 0.1  # of the mean variance
ROWS = 1024  # images at a time


@torch.no_grad()
def trace(
    candidates: Tensor,
    labels: Tensor,
    released: Tensor,
    released_labels: Tensor,
    population: Tensor,
    population_labels: Tensor,
    *,
    nets: int = NETS,
    width: int = 128,
    ridge: float | None = RIDGE,
    seed: int = 0,
) -> np.ndarray:
    """Scores [candidates] of images [count, channels, height, width] in [0, 1] against a released set, computed where that lies.

    ``population`` gives m_c and Sigma: records of another population, or the sets of shadows put together; every class of the candidates
    must occur in it and in the set. ``ridge`` None takes A = I. A net at a time, so memory holds one net's features of a portion.

    >>> images, labels = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    >>> scores = trace(images[:20], labels[:20], images[:10], labels[:10], images[20:], labels[20:], nets=4, width=8)
    >>> bool(scores[:10].mean() > scores[10:].mean())
    True
    """
    device = released.device
    classes = int(max(each.max() for each in (labels, released_labels, population_labels))) + 1
    for name, theirs in (("released set", released_labels), ("population", population_labels)):
        if missing := sorted(set(labels.unique().tolist()) - set(theirs.unique().tolist())):
            raise SettingError(f"class {missing[0]} has no image in the {name}")
    shape = (released.shape[1], released.shape[2], released.shape[3])
    generator = torch.Generator().manual_seed(seed)
    scores = torch.zeros(len(candidates), dtype=torch.float64, device=device)
    own = labels.to(device)
    for _ in range(nets):
        net = Ensemble(1, shape, 1, width, generator=generator).to(device)
        centre, spread = _moments(net, population, population_labels, classes, ridge is not None)
        lean = _moments(net, released, released_labels, classes, False)[0] - centre
        if ridge is not None:
            spread.diagonal().add_(ridge * spread.diagonal().mean())
            lean = torch.linalg.solve(spread, lean.T).T
        for start in range(0, len(candidates), ROWS):
            part = candidates[start : start + ROWS].to(device)
            where = own[start : start + ROWS]
            scores[start : start + ROWS] += (
                (_features(net, part) - centre[where]) * lean[where]
            ).mean(1)
    return (scores / nets).cpu().numpy()


def _features(net: Ensemble, images: Tensor) -> Tensor:
    """Float64 [count, numbers]: half precision is enough for the maps of a random net, not for sums over many of them."""
    with half(images.device):
        return net.features(2 * images.float() - 1)[0].double()


def _moments(
    net: Ensemble, images: Tensor, labels: Tensor, classes: int, spread: bool
) -> tuple[Tensor, Tensor]:
    """Class means [classes, numbers], 0 of a class without images, and the covariance about them [numbers, numbers], where wanted."""
    device = net.get_parameter("tail").device
    summed, product = (
        torch.zeros(rows, net.numbers, dtype=torch.float64, device=device)
        for rows in (classes, net.numbers if spread else 0)
    )
    for part, own in zip(images.split(ROWS), labels.split(ROWS), strict=True):
        features = _features(net, part.to(device))
        summed.index_add_(0, own.to(device), features)
        if spread:
            product += features.T @ features
    means = summed / torch.bincount(labels.to(device), minlength=classes).clamp(min=1)[:, None]
    return means, (product - summed.T @ means) / len(labels) if spread else product
