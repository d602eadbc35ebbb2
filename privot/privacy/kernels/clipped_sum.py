"""The sum of clipped and rounded rows in one pass over memory, where torch's functions make four. Imported only where there is Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# of the tile that one program holds
COLUMNS = 256
ROWS = 16


@triton.jit
def _add(parts, factor, out, rows, numbers, width: tl.constexpr, height: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(0) * width + tl.arange(0, width)
    there = column < numbers
    total = tl.zeros([width], tl.float64)
    for start in range(0, rows, height):
        row = start + tl.arange(0, height)
        by = tl.load(factor + row, mask=row < rows, other=0.0)[:, None]
        value = tl.load(
            parts + row.to(tl.int64)[:, None] * numbers + column[None, :],
            mask=(row < rows)[:, None] & there[None, :],
            other=0.0,
        )
        value = (
            tl.where(by == 0, 0.0, value.to(tl.float64)) * by
        )  # of a row that is not finite nothing may come through
        total += tl.sum(tl.where(value < 0, tl.ceil(value), tl.floor(value)), 0)
    tl.store(out + column, total, mask=there)


def steps_summed(parts: Tensor, factor: Tensor) -> Tensor:
    """Float32 parts [rows, numbers] times float64 factors [rows], each product cut to a whole number, added over the rows: [numbers].

    Sums of whole numbers below 2^53 are exact, so this is to the bit what any other order gives.
    """
    parts = parts.contiguous()
    out = torch.empty(parts.shape[1], dtype=torch.float64, device=parts.device)
    _add[(triton.cdiv(parts.shape[1], COLUMNS),)](
        parts, factor, out, *parts.shape, COLUMNS, ROWS, num_warps=4
    )
    return out
