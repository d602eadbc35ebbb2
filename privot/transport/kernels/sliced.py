r"""What is left to go along each slice, by counting instead of sorting, for a GPU.

A row's values fall into equal bins. A value with :math:`b` points in the bins below, :math:`c` in its own, and a share :math:`u` of its bin
to its left has about rank :math:`b + u (c - 1)`, exactly so where it is alone, and its target is the quantile there. A value is read three
times and written once; a radix sort with its indices moves several times as much. Counts are whole numbers, so that the order of adding
does not matter and a run repeats to the bit. Imported only where there is Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BINS = 4096  # of a row; ten thousand points of a bell leave some seven in the fullest
BLOCK = 2048  # values that a program holds at a time


@triton.jit
def bin_of(value, least, steep, bins: tl.constexpr):
    """Where a value lies, counted in bins, and its bin.

    The least is in the middle of the first bin, so that a row of equal values has middle ranks; what is not a number stays in the row too.
    """
    where = (value - least) * steep + 0.5
    return where, tl.minimum(tl.maximum(where.to(tl.int32), 0), bins - 1)


@triton.jit
def _count(values, ends, counts, length, bins: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    low = tl.full([block], float("inf"), tl.float32)
    high = tl.full([block], float("-inf"), tl.float32)
    for start in range(0, length, block):
        place = start + tl.arange(0, block)
        here = place < length
        value = tl.load(values + row * length + place, mask=here, other=0.0)
        low = tl.minimum(low, tl.where(here, value, float("inf")))
        high = tl.maximum(high, tl.where(here, value, float("-inf")))
    least = tl.min(low, 0)
    most = tl.max(high, 0)
    steep = (bins - 1) / tl.maximum(most - least, 1e-30)
    tl.store(ends + 2 * row, least)
    tl.store(ends + 2 * row + 1, steep)
    for start in range(0, length, block):
        place = start + tl.arange(0, block)
        here = place < length
        _, bin = bin_of(
            tl.load(values + row * length + place, mask=here, other=0.0), least, steep, bins
        )
        tl.atomic_add(
            counts + row * bins + bin, tl.full([block], 1, tl.int32), mask=here, sem="relaxed"
        )


@triton.jit
def _left(
    values, ends, upto, targets, gaps, length, parts, bins: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    here = place < length
    value = tl.load(values + row * length + place, mask=here, other=0.0)
    where, bin = bin_of(value, tl.load(ends + 2 * row), tl.load(ends + 2 * row + 1), bins)
    above = tl.load(upto + row * bins + bin, mask=here, other=0)
    below = tl.load(upto + row * bins + bin - 1, mask=here & (bin > 0), other=0)
    share = tl.minimum(tl.maximum(where - bin, 0.0), 1.0)
    # the middles of the parts, as in sliced.stretch
    at = (below + share * (above - below - 1) + 0.5) * (parts / length) - 0.5
    first = tl.minimum(tl.maximum(at.to(tl.int32), 0), tl.maximum(parts - 2, 0))
    one = tl.load(targets + row * parts + first, mask=here, other=0.0)
    two = tl.load(targets + row * parts + tl.minimum(first + 1, parts - 1), mask=here, other=0.0)
    tl.store(gaps + row * length + place, one + (at - first) * (two - one) - value, mask=here)


def counted(projected: Tensor, targets: Tensor) -> Tensor:
    """Target less projection, for ``projected`` [..., slices, n] and ascending ``targets`` [..., slices, m], float32: [..., slices, n]."""
    values = projected.contiguous()
    wanted = targets.to(projected).expand(*projected.shape[:-1], -1).contiguous()
    length = values.shape[-1]
    rows = values.numel() // values.shape[-1]
    counts = torch.zeros(rows, BINS, dtype=torch.int32, device=values.device)
    ends = values.new_empty(rows, 2)
    gaps = torch.empty_like(values)
    _count[(rows,)](values, ends, counts, length, bins=BINS, block=BLOCK, num_warps=8)
    upto = counts.cumsum(-1, dtype=torch.int32)
    _left[(rows, triton.cdiv(length, BLOCK))](
        values,
        ends,
        upto,
        wanted,
        gaps,
        length,
        wanted.shape[-1],
        bins=BINS,
        block=BLOCK,
        num_warps=8,
    )
    return gaps
