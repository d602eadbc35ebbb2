"""The sum of clipped and rounded rows in one pass over memory, where torch needs four.

Import this module only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The tile that one program reads at a time, and the rows that it adds up.
BLOCK_COLUMNS = 256
BLOCK_ROWS = 16
ROWS_PER_PROGRAM = 128


@triton.jit
def _sum_products_kernel(  # type: ignore[no-untyped-def]
    values,
    factors,
    out,
    num_rows,
    num_columns,
    block_columns: tl.constexpr,
    block_rows: tl.constexpr,
    rows_per_program: tl.constexpr,
):
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    in_columns = column < num_columns
    total = tl.zeros([block_columns], tl.float64)
    for start in range(0, rows_per_program, block_rows):
        row = tl.program_id(1) * rows_per_program + start + tl.arange(0, block_rows)
        in_rows = row < num_rows
        factor = tl.load(factors + row, mask=in_rows, other=0.0)[:, None]
        value = tl.load(
            values + row.to(tl.int64)[:, None] * num_columns + column[None, :],
            mask=in_rows[:, None] & in_columns[None, :],
            other=0.0,
        )
        # privacy: nothing may come through of a row that is not finite, whose factor is 0.
        value = tl.where(factor == 0, 0.0, value.to(tl.float64)) * factor
        total += tl.sum(tl.where(value < 0, tl.ceil(value), tl.floor(value)), 0)
    tl.atomic_add(out + column, total, mask=in_columns)  # exact, so the order does not matter


def sum_truncated_products(rows: Tensor, factors: Tensor) -> Tensor:
    """Multiply each row by its factor, truncate to integers, and add up the rows.

    Sums of integers below 2^53 are exact, so the result is the same bit for bit in any order.

    Args:
        rows: float32 [rows, dim].
        factors: float64 [rows].

    Returns:
        float64 [dim].
    """
    rows = rows.contiguous()
    num_rows, num_columns = rows.shape
    out = torch.zeros(num_columns, dtype=torch.float64, device=rows.device)
    programs = triton.cdiv(num_columns, BLOCK_COLUMNS), triton.cdiv(num_rows, ROWS_PER_PROGRAM)
    _sum_products_kernel[programs](
        rows,
        factors,
        out,
        num_rows,
        num_columns,
        BLOCK_COLUMNS,
        BLOCK_ROWS,
        ROWS_PER_PROGRAM,
        num_warps=4,
    )
    return out
