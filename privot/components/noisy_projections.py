"""Noisy points of all records, and the quantiles of their projections.

This is the query of the sliced flow and the sliced generator in mode "records".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from privot.components.latent_space import LatentSpace
from privot.components.transforms import ImageTransform
from privot.privacy.gate import Gate
from privot.runtime import Progress, Streams
from privot.transport.sliced import random_orthogonal_frames
from privot.transport.sorting import sort_rows

MAX_QUANTILES = 1000  # quantiles of each direction


def encode_record(
    image: Tensor,
    label: Tensor,
    space: ImageTransform | LatentSpace,
    radius: float,
    label_norm: float,
    classes: int,
) -> Tensor:
    """Encode a record as a point in the ball, followed by its scaled one-hot label.

    Args:
        image: One image [channels, height, width].
        label: Its label [].
        space: The space of the points.
        radius: Radius of the ball to which the point is clipped.
        label_norm: Length of the label vector; 0 leaves the label out.
        classes: Number of classes.

    Returns:
        The point [dim] or [dim + classes].
    """
    point = space.encode_image(image)
    point = point / (point.norm() / radius).clamp(min=1)
    label_vector = label_norm * (
        label == torch.arange(classes if label_norm else 0, device=point.device)
    ).to(point.dtype)
    return torch.cat([point, label_vector])


def encode_labels(labels: Tensor, label_norm: float, classes: int) -> Tensor:
    """Return scaled one-hot labels, the label part of `encode_record`.

    Args:
        labels: Labels [count].
        label_norm: Length of a label vector.
        classes: Number of classes.

    Returns:
        Label vectors [count, classes], or [count, 0] if `label_norm` is 0.

    >>> encode_labels(torch.tensor([1]), 0.5, 2)
    tensor([[0.0000, 0.5000]])
    """
    return label_norm * one_hot(labels, classes)[:, : classes if label_norm else 0]


def compute_block_quantiles(values: Tensor, num_blocks: int) -> Tensor:
    """Sort each column and average equal blocks of consecutive order statistics.

    The last n mod num_blocks order statistics are left out.

    Args:
        values: Values [n, slices].
        num_blocks: Number of blocks.

    Returns:
        Block means in rising order [slices, num_blocks].

    >>> compute_block_quantiles(torch.tensor([[3.0], [1.0], [2.0], [6.0]]), 2)
    tensor([[1.5000, 4.5000]])
    """
    order_statistics = sort_rows(values.mT.contiguous())
    block_size = order_statistics.shape[1] // num_blocks
    blocks = order_statistics[:, : block_size * num_blocks].unflatten(1, (num_blocks, block_size))
    return blocks.mean(2)


@dataclass(frozen=True, kw_only=True)
class NoisyProjections:
    """Quantiles of the records' noisy projections along a frame.

    Attributes:
        frame: Orthonormal bases [num_bases, dim, dim].
        targets: Quantiles in rising order [num_bases, dim, quantiles].
        noise_std: Standard deviation of the noise along every direction.
    """

    frame: Tensor
    targets: Tensor
    noise_std: float

    def add_matching_noise(self, points: Tensor, rng: torch.Generator) -> Tensor:
        """Add as much noise to points as the records have.

        Both point clouds are then smoothed alike and can be compared. This noise is no part of the
        privacy guarantee.
        """
        return points + self.noise_std * torch.randn(
            points.shape, generator=rng, device=points.device
        )


def query_noisy_projections(
    gate: Gate,
    space: ImageTransform | LatentSpace,
    *,
    radius: float,
    label_norm: float,
    num_bases: int,
    streams: Streams,
    progress: Progress,
) -> NoisyProjections:
    """Query every record's noisy point once and compute quantiles of the points along a frame.

    The projections of a noisy point along a tight frame carry exactly the information of the
    point, so the number of directions costs no privacy.

    Args:
        gate: The gate in front of the records, with a stage "records".
        space: The space of the points.
        radius: Radius of the ball that holds the points.
        label_norm: Length of a label vector; 0 leaves labels out.
        num_bases: Number of orthonormal bases of the frame.
        streams: Public random streams.
        progress: Shows the progress.

    Returns:
        The frame, the quantiles and the noise.
    """
    clip_norm = math.hypot(radius, label_norm)
    progress("querying the records' points", 0, 1)
    points = gate.rows(
        "records",
        encode_record,
        space,
        radius,
        label_norm,
        gate.spec.num_classes,
        clip_norm=clip_norm,
    ).float()
    progress("querying the records' points", 1, 1)
    dim = points.shape[1]
    frame = (
        random_orthogonal_frames(dim, num_bases, streams.make_rng("frame"))
        .float()
        .to(points.device)
        .view(num_bases, dim, dim)
    )
    num_quantiles = min(len(points), MAX_QUANTILES)
    targets = torch.stack(
        [compute_block_quantiles(points @ basis.T, num_quantiles) for basis in frame]
    )
    noise_multiplier = next(
        stage.noise_multiplier for stage in gate.plan.stages if stage.name == "records"
    )
    # Replacing a record moves its point by at most 2 * clip_norm.
    return NoisyProjections(
        frame=frame, targets=targets, noise_std=2 * clip_norm * noise_multiplier
    )
