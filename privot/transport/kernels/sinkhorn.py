r"""A half sweep of entropic transport as one kernel for a GPU: :math:`f_i = \log m - \log \sum_j e^{g_j - c_{ij}}`, c over the temperature.

It reads the cost once and writes a vector; with so little to write, exponents cost nothing beside the reading, so that everything is done
with logarithms and nothing can pass the range of the numbers. A thousand by a thousand costs lie in the cache from one half sweep to the
next; what is left is the launching, and a CUDA graph holds a stride of it. Imported only where there is Triton.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from privot.runtime.cuda_graphs import capture
from privot.transport.sinkhorn_iterations import Stride, rounding, value

ROWS = 4
BLOCK = 1024
WARPS = 8
LOW = -1e30  # in the place of minus infinity, whose differences are not numbers


@triton.jit
def _answer(
    cost,
    given,
    found,
    errors,
    n,
    m,
    log_m,
    rows: tl.constexpr,
    block: tl.constexpr,
    low: tl.constexpr,
    compare: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    real = row < n
    top = tl.full([rows], low, tl.float32)
    total = tl.zeros([rows], tl.float32)
    for start in range(0, m, block):
        place = start + tl.arange(0, block)
        here = real[:, None] & (place < m)[None, :]
        value = tl.load(given + place, mask=place < m, other=0.0)[None, :] - tl.load(
            cost + row.to(tl.int64)[:, None] * m + place[None, :], mask=here, other=0.0
        )
        value = tl.where(here, value, low)
        higher = tl.maximum(top, tl.max(value, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(value - higher[:, None]), 1)
        top = higher
    fresh = log_m - top - tl.log(total)
    if compare:  # how far the weight of a row was off before
        old = tl.load(found + row, mask=real, other=0.0)
        tl.store(errors + row, tl.abs(tl.exp(old - fresh) - 1.0), mask=real)
    else:
        tl.store(found + row, fresh, mask=real)


def answer(cost: Tensor, given: Tensor, found: Tensor, errors: Tensor | None = None) -> None:
    """Writes into ``found`` [n] the best answer to ``given`` [m] for ``cost`` [n, m], all float32 and contiguous.

    With ``errors`` [n] nothing is written there; instead, how far ``found`` is off.
    """
    n, m = cost.shape
    _answer[(triton.cdiv(n, ROWS),)](
        cost,
        given,
        found,
        found if errors is None else errors,
        n,
        m,
        math.log(m),
        rows=ROWS,
        block=BLOCK,
        low=LOW,
        compare=errors is not None,
        num_warps=WARPS,
    )


class Sweeping:
    """Potentials of one cost [n, m] over the temperature; what a stride returns is overwritten by the next."""

    def __init__(self, cost: Tensor):
        self.cost = cost.contiguous()
        self.turned = cost.T.contiguous()
        self.first, self.second, self.errors = (
            cost.new_zeros(size) for size in (*cost.shape, len(cost))
        )

    def sweep(self, times: int) -> None:
        for _ in range(times):
            answer(self.cost, self.second, self.first)
            answer(self.turned, self.first, self.second)

    def error(self) -> Tensor:
        answer(self.cost, self.second, self.first, self.errors)
        return self.errors.amax()

    def stride(self, second: Tensor, times: int) -> Stride:
        self.second.copy_(second)
        self.sweep(times)
        return Stride(
            self.first,
            self.second,
            self.error(),
            rounding(self.first, self.second),
            value(self.first, self.second),
        )


class Strides:
    """`Sweeping` on fixed buffers, a stride with its copies and its error in one CUDA graph: launches cost more than what they do.

    One is kept for each shape; it must not be called inside another capture.
    """

    known: dict[tuple[Any, ...], Strides] = {}  # noqa: RUF012 (shared on purpose)

    @classmethod
    def of(cls, shape: torch.Size, device: torch.device, stride: int) -> Strides:
        key = (tuple(shape), device, stride)
        if key not in cls.known:
            cls.known[key] = cls(shape, device, stride)
        return cls.known[key]

    def __init__(self, shape: torch.Size, device: torch.device, stride: int):
        self.state = Sweeping(torch.zeros(shape, device=device))
        self.times = stride
        self.graph = torch.cuda.CUDAGraph()
        self.start = torch.zeros_like(self.state.second)
        self.state.stride(self.start, stride)  # kernels are compiled before the capture
        torch.cuda.synchronize(device)
        with capture(self.graph):
            self.end = self.state.stride(self.start, stride)

    def begin(self, cost: Tensor) -> Strides:
        self.state.cost.copy_(cost)
        self.state.turned.copy_(cost.T)
        return self

    def stride(self, second: Tensor, times: int) -> Stride:
        """A whole stride, or the rest of one; the potentials are the caller's to keep."""
        if times == self.times:
            self.start.copy_(second)
            self.graph.replay()
        end = self.end if times == self.times else self.state.stride(second, times)
        return Stride(*(each.clone() for each in end))
