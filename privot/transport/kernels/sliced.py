r"""Triton kernels for the displacements of a sliced flow, by counting instead of sorting.

The values of a row fall into equal bins. Let a value have :math:`b` points in the bins below it,
:math:`c` in its own bin, and lie at the fraction :math:`u` of its bin. Its rank is about
:math:`b + u (c - 1)`, and exactly that where it is alone. Its target is the quantile at this rank.
Each value is read three times and written once; a radix sort with its indices moves several times
as much. Counts are integers, so the order of additions does not matter, and a run repeats to the
bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_BINS = 4096  # of a row; ten thousand Gaussian points put about seven into the fullest bin
BLOCK_VALUES = 2048  # values that a program holds at a time


@triton.jit
def locate_bin(value, minimum, bins_per_unit, bins: tl.constexpr):
    """Return the positions of values in units of bins, and their bins.

    The minimum lies in the middle of the first bin, so a row of equal values has middle ranks. NaN
    also gets a bin of the row.

    Args:
        value: Values of a row.
        minimum: Smallest value of the row.
        bins_per_unit: Bins for a difference of 1.
        bins: Number of bins.

    Returns:
        Positions, and bins from 0 to ``bins`` - 1.
    """
    position = (value - minimum) * bins_per_unit + 0.5
    return position, tl.minimum(tl.maximum(position.to(tl.int32), 0), bins - 1)


@triton.jit
def _histogram_kernel(values, ranges, counts, length, bins: tl.constexpr, block: tl.constexpr):
    """Count the values of one row in each bin; write its minimum and its bins per unit."""
    row = tl.program_id(0).to(tl.int64)
    low = tl.full([block], float("inf"), tl.float32)
    high = tl.full([block], float("-inf"), tl.float32)
    for start in range(0, length, block):
        index = start + tl.arange(0, block)
        mask = index < length
        value = tl.load(values + row * length + index, mask=mask, other=0.0)
        low = tl.minimum(low, tl.where(mask, value, float("inf")))
        high = tl.maximum(high, tl.where(mask, value, float("-inf")))
    minimum = tl.min(low, 0)
    maximum = tl.max(high, 0)
    bins_per_unit = (bins - 1) / tl.maximum(maximum - minimum, 1e-30)
    tl.store(ranges + 2 * row, minimum)
    tl.store(ranges + 2 * row + 1, bins_per_unit)
    for start in range(0, length, block):
        index = start + tl.arange(0, block)
        mask = index < length
        value = tl.load(values + row * length + index, mask=mask, other=0.0)
        _, bin = locate_bin(value, minimum, bins_per_unit, bins)
        ones = tl.full([block], 1, tl.int32)
        tl.atomic_add(counts + row * bins + bin, ones, mask=mask, sem="relaxed")


@triton.jit
def _displacement_kernel(
    values,
    ranges,
    cumulative_counts,
    targets,
    displacements,
    length,
    num_targets,
    bins: tl.constexpr,
    block: tl.constexpr,
):
    """Compute target less value for some values of one row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * block + tl.arange(0, block)
    mask = index < length
    value = tl.load(values + row * length + index, mask=mask, other=0.0)
    minimum = tl.load(ranges + 2 * row)
    bins_per_unit = tl.load(ranges + 2 * row + 1)
    position, bin = locate_bin(value, minimum, bins_per_unit, bins)
    upper_rank = tl.load(cumulative_counts + row * bins + bin, mask=mask, other=0)
    lower_rank = tl.load(cumulative_counts + row * bins + bin - 1, mask=mask & (bin > 0), other=0)
    fraction = tl.minimum(tl.maximum(position - bin, 0.0), 1.0)
    # Midpoints of the intervals, as in sliced.quantile_interpolation.
    rank = lower_rank + fraction * (upper_rank - lower_rank - 1)
    level = (rank + 0.5) * (num_targets / length) - 0.5
    first = tl.minimum(tl.maximum(level.to(tl.int32), 0), tl.maximum(num_targets - 2, 0))
    second = tl.minimum(first + 1, num_targets - 1)
    low = tl.load(targets + row * num_targets + first, mask=mask, other=0.0)
    high = tl.load(targets + row * num_targets + second, mask=mask, other=0.0)
    target = low + (level - first) * (high - low)
    tl.store(displacements + row * length + index, target - value, mask=mask)


def binned_displacements(projected: Tensor, targets: Tensor) -> Tensor:
    """Compute target less projection for all points of all slices, in float32.

    Args:
        projected: Projections, [..., slices, n].
        targets: Ascending quantiles, [..., slices, m].

    Returns:
        Displacements, [..., slices, n].
    """
    values = projected.contiguous()
    quantiles = targets.to(projected).expand(*projected.shape[:-1], -1).contiguous()
    length = values.shape[-1]
    rows = values.numel() // values.shape[-1]
    counts = torch.zeros(rows, NUM_BINS, dtype=torch.int32, device=values.device)
    ranges = values.new_empty(rows, 2)
    displacements = torch.empty_like(values)
    _histogram_kernel[(rows,)](
        values, ranges, counts, length, bins=NUM_BINS, block=BLOCK_VALUES, num_warps=8
    )
    _displacement_kernel[(rows, triton.cdiv(length, BLOCK_VALUES))](
        values,
        ranges,
        counts.cumsum(-1, dtype=torch.int32),
        quantiles,
        displacements,
        length,
        quantiles.shape[-1],
        bins=NUM_BINS,
        block=BLOCK_VALUES,
        num_warps=8,
    )
    return displacements
