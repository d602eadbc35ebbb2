"""Nearest-neighbour search between images, in pixels, in random features or by LPIPS.

Each metric embeds images into vectors whose Euclidean distance it is, so that all pairs of images
are compared by matrix products: ``pixels`` is the image itself; ``features`` are features of random
ConvNets (a kernel that condensation methods match); ``lpips`` are features of AlexNet, scaled so
that the *squared* distance is LPIPS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from privot.errors import SettingError
from privot.measures.image_similarity import load_lpips_network, prepare_for_lpips
from privot.nets.ensemble import Ensemble

DISTANCE_METRICS = ("pixels", "features", "lpips")
# The random ConvNets of ``features``: their mean kernel matters, and it converges with few of them.
NUM_RANDOM_NETS = 4
NET_WIDTH = 32
# Images on either side of one matrix of distances.
QUERY_BATCH_SIZE = 1024
REFERENCE_BATCH_SIZE = 1024
# Embedded references stay on the device between query batches up to this size: 1 GiB of float32.
MAX_CACHED_ELEMENTS = 2**28

EmbeddingFunction = Callable[[Tensor], Tensor]


class NearestNeighbours(NamedTuple):
    """The nearest neighbours of each image, the nearest first.

    Attributes:
        indices: Indices of the reference images, int64 [images, neighbours].
        distances: Their distances, float64 [images, neighbours].
    """

    indices: Tensor
    distances: Tensor


def build_embedding(
    metric: str, shape: tuple[int, int, int], device: torch.device, seed: int = 0
) -> EmbeddingFunction:
    """Build the embedding of a metric.

    Args:
        metric: ``pixels``, ``features`` or ``lpips``.
        shape: Channels, height and width of the images.
        device: Where the images are.
        seed: Seed of the random ConvNets.

    Returns:
        A function of images [count, *shape] in [0, 1] that gives float32 vectors [count, d].

    Raises:
        SettingError: If the metric is unknown.

    >>> build_embedding("pixels", (1, 2, 2), torch.device("cpu"))(torch.ones(3, 1, 2, 2)).shape
    torch.Size([3, 4])
    """
    if metric == "pixels":
        return lambda images: images.float().flatten(1)
    if metric == "features":
        rng = torch.Generator().manual_seed(seed)
        nets = Ensemble(NUM_RANDOM_NETS, shape, 1, NET_WIDTH, generator=rng)
        nets = nets.to(device).requires_grad_(False)
        return lambda images: (
            nets.features(2 * images.float() - 1).transpose(0, 1).flatten(1)
            / math.sqrt(NUM_RANDOM_NETS)
        )
    if metric == "lpips":
        return build_lpips_embedding(device)
    raise SettingError(f"metric={metric!r}: choose one of {', '.join(DISTANCE_METRICS)}")


def build_lpips_embedding(device: torch.device) -> EmbeddingFunction:
    """Build an embedding whose squared Euclidean distance is LPIPS. It is differentiable.

    Raises:
        DataError: If the weights of LPIPS are missing; see `privot.measures.image_similarity`.
    """
    net = load_lpips_network(device)

    def embed_images(images: Tensor) -> Tensor:
        maps = net.net((prepare_for_lpips(images) - net.shift) / net.scale)
        # LPIPS sums w_c (f_c - g_c)^2 over channels and averages over positions; w_c >= 0.
        layers = [
            (
                features
                / (features.norm(dim=1, keepdim=True) + 1e-10)
                * (head.clamp(min=0) / features[0, 0].numel()).sqrt()
            ).flatten(1)
            for features, head in zip(maps, net.heads, strict=True)
        ]
        return torch.cat(layers, 1)

    return embed_images


def search_nearest_neighbours(
    images: Tensor,
    reference: Tensor,
    num_neighbours: int = 1,
    metric: str = "pixels",
    *,
    labels: Tensor | None = None,
    reference_labels: Tensor | None = None,
    seed: int = 0,
) -> NearestNeighbours:
    """Find the nearest reference images of each image.

    The search runs in batches where ``reference`` is. It ranks by matrix products and then computes
    distances from differences, so a copy has distance 0.

    Args:
        images: Queries, [n, channels, height, width] in [0, 1], on any device.
        reference: Images to search, [m, channels, height, width].
        num_neighbours: Neighbours of each image.
        metric: ``pixels``, ``features`` or ``lpips``.
        labels: Classes of the images, [n]. With labels, neighbours are of the image's own class.
        reference_labels: Classes of the reference images, [m].
        seed: Seed of the random ConvNets of ``features``.

    Returns:
        Indices and distances on the CPU. The distance is L2, and for ``lpips`` LPIPS itself.

    Raises:
        SettingError: If shapes do not fit or there are too few reference images.

    >>> points = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1)
    >>> search_nearest_neighbours(points[:1] + 0.9, points, 2).indices.tolist()
    [[2, 1]]
    """
    if (
        images.ndim != 4
        or reference.ndim != 4
        or images.shape[1:] != reference.shape[1:]
        or not len(images)
    ):
        raise SettingError(
            f"images {list(images.shape)} and reference {list(reference.shape)}: give two sets of "
            "images of one shape"
        )
    check_label_pair(labels, reference_labels)
    shape = (images.shape[1], images.shape[2], images.shape[3])
    embed = build_embedding(metric, shape, reference.device, seed)
    if labels is None or reference_labels is None:
        nearest = _search_batched(images, reference, num_neighbours, embed)
    else:
        nearest = _search_by_class(
            images, labels, reference, reference_labels, num_neighbours, embed
        )
    if metric == "lpips":
        return NearestNeighbours(nearest.indices, nearest.distances**2)
    return nearest


def check_label_pair(labels: Tensor | None, reference_labels: Tensor | None) -> None:
    """Raise a SettingError if labels are given for one side only."""
    if (labels is None) != (reference_labels is None):
        raise SettingError("labels: give the labels of both sides or of neither")


def _search_by_class(
    images: Tensor,
    labels: Tensor,
    reference: Tensor,
    reference_labels: Tensor,
    num_neighbours: int,
    embed: EmbeddingFunction,
) -> NearestNeighbours:
    """Search among the reference images of the image's own class.

    Args:
        images: Queries, [n, channels, height, width].
        labels: Their classes, [n].
        reference: Images to search, [m, channels, height, width].
        reference_labels: Their classes, [m].
        num_neighbours: Neighbours of each image.
        embed: The embedding of the metric.

    Returns:
        Indices and distances in the space of the embedding.
    """
    labels = labels.cpu()
    reference_labels = reference_labels.cpu()
    nearest = NearestNeighbours(
        torch.zeros(len(images), num_neighbours, dtype=torch.int64),
        torch.zeros(len(images), num_neighbours, dtype=torch.float64),
    )
    for label in labels.unique():
        queries = (labels == label).nonzero().flatten()
        searched = (reference_labels == label).nonzero().flatten()
        if len(searched) < num_neighbours:
            raise SettingError(
                f"class {int(label)} has {len(searched)} images to compare with, but "
                f"{num_neighbours} are needed"
            )
        in_class = _search_batched(
            images[queries.to(images.device)],
            reference[searched.to(reference.device)],
            num_neighbours,
            embed,
        )
        nearest.indices[queries] = searched[in_class.indices]
        nearest.distances[queries] = in_class.distances
    return nearest


@torch.no_grad()
def _search_batched(
    images: Tensor, reference: Tensor, num_neighbours: int, embed: EmbeddingFunction
) -> NearestNeighbours:
    """Search all reference images, in batches.

    Args:
        images: Queries, [n, channels, height, width].
        reference: Images to search, [m, channels, height, width].
        num_neighbours: Neighbours of each image.
        embed: The embedding of the metric.

    Returns:
        Indices and distances in the space of the embedding, on the CPU.
    """
    if not 1 <= num_neighbours <= len(reference):
        raise SettingError(
            f"num_neighbours={num_neighbours}: there are {len(reference)} reference images. Give a "
            f"number from 1 to {len(reference)}."
        )
    device = reference.device
    cache: dict[int, Tensor] = {}
    indices = []
    distances = []
    for query_batch in images.split(QUERY_BATCH_SIZE):
        query = embed(query_batch.to(device))
        best_distances = torch.full(
            (len(query), num_neighbours), torch.inf, dtype=torch.float64, device=device
        )
        best_indices = torch.zeros(len(query), num_neighbours, dtype=torch.int64, device=device)
        for batch_index, reference_batch in enumerate(reference.split(REFERENCE_BATCH_SIZE)):
            embedded = cache[batch_index] if batch_index in cache else embed(reference_batch)
            if embedded[0].numel() * len(reference) <= MAX_CACHED_ELEMENTS:
                cache[batch_index] = embedded
            # The squared distance without |query|^2, which is the same for all references.
            ranking = torch.addmm(embedded.square().sum(1), query, embedded.T, beta=1, alpha=-2)
            nearest = ranking.topk(min(num_neighbours, len(embedded)), largest=False).indices
            exact = torch.stack(
                [
                    vector_norm(query - embedded[index], dim=1, dtype=torch.float64)
                    for index in nearest.unbind(1)
                ],
                1,
            )
            best_distances, order = torch.cat([best_distances, exact], 1).topk(
                num_neighbours, largest=False
            )
            best_indices = torch.cat(
                [best_indices, nearest + batch_index * REFERENCE_BATCH_SIZE], 1
            ).gather(1, order)
        indices.append(best_indices.cpu())
        distances.append(best_distances.cpu())
    return NearestNeighbours(torch.cat(indices), torch.cat(distances))
