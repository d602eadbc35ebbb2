"""Sums of blocks of sorted projections, for `Gate.sorted_blocks`."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bound_block_sums(frame: Tensor, radius: float, grid: float) -> float:
    """Bound by how much, in norm, the removal of one record moves the sums of blocks.

    Args:
        frame: Directions, float64 [slices, dim].
        radius: The largest norm of a mapped record.
        grid: The grid step of projections.

    Returns:
        The bound.
    """
    norm = radius * float(torch.linalg.matrix_norm(frame, 2)) * (1 + 1e-9)
    # privacy: rounding toward zero is monotone, so sorting still telescopes. It adds at most one
    # grid step per slice.
    return norm + grid * math.sqrt(len(frame)) / 2


def split_by_class(points: Tensor, labels: Tensor, num_classes: int) -> list[Tensor]:
    """Split points by their class.

    Args:
        points: [records, dim].
        labels: The class of each record, [records].
        num_classes: The number of classes.

    Returns:
        [size, dim] for each class.
    """
    return [points[labels == label] for label in range(num_classes)]


def sum_sorted_blocks(
    points_by_class: list[Tensor], frame: Tensor, num_blocks: int, grid: float
) -> Tensor:
    """Sort the projections of each class on each direction, and add up blocks of them.

    Args:
        points_by_class: float64 [size, dim] for each class.
        frame: Directions, float64 [slices, dim].
        num_blocks: Blocks of each class; records beyond a multiple of it are left out.
        grid: The grid step of projections.

    Returns:
        Integers in steps of the grid, float64 [classes, slices, num_blocks].
    """
    block_sums = []
    for points in points_by_class:
        block_size = len(points) // num_blocks
        order_statistics = (points @ frame.T / grid).trunc_().sort(0).values
        blocks = order_statistics[: block_size * num_blocks].view(num_blocks, block_size, -1)
        block_sums.append(blocks.sum(1).T)
    return torch.stack(block_sums)
