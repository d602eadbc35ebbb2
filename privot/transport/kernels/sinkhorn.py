r"""Half a Sinkhorn iteration as one Triton kernel.

It computes :math:`f_i = \log m - \log \sum_j e^{g_j - c_{ij}}` for a cost c over the temperature.
The kernel reads the cost once and writes one vector. With so little to write, exponentials cost
nothing beside the reading, so everything is done with logarithms, and nothing can leave the range
of the numbers. A cost of a thousand by a thousand stays in the cache from one half iteration to the
next. What remains is the launches, so a run of iterations is one CUDA graph.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from privot.runtime.cuda_graphs import capture_graph
from privot.transport.sinkhorn_iterations import IterationResult, summarize_iterations

TILE_ROWS = 4
BLOCK_COLUMNS = 1024
NUM_WARPS = 8
MIN_VALUE = -1e30  # stands for minus infinity, whose differences are NaN


@triton.jit
def _update_potential_kernel(
    cost,
    other_potential,
    potential,
    errors,
    n,
    m,
    log_m,
    rows: tl.constexpr,
    block: tl.constexpr,
    min_value: tl.constexpr,
    errors_only: tl.constexpr,
):
    """Update the potential of some rows, or compute how far it is from its update."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    row_exists = row < n
    largest = tl.full([rows], min_value, tl.float32)
    total = tl.zeros([rows], tl.float32)
    for start in range(0, m, block):
        column = start + tl.arange(0, block)
        mask = row_exists[:, None] & (column < m)[None, :]
        value = tl.load(other_potential + column, mask=column < m, other=0.0)[None, :] - tl.load(
            cost + row.to(tl.int64)[:, None] * m + column[None, :], mask=mask, other=0.0
        )
        value = tl.where(mask, value, min_value)
        new_largest = tl.maximum(largest, tl.max(value, 1))
        block_sum = tl.sum(tl.exp(value - new_largest[:, None]), 1)
        total = total * tl.exp(largest - new_largest) + block_sum
        largest = new_largest
    updated = log_m - largest - tl.log(total)
    if errors_only:  # the relative error of the row's weight before the update
        present = tl.load(potential + row, mask=row_exists, other=0.0)
        tl.store(errors + row, tl.abs(tl.exp(present - updated) - 1.0), mask=row_exists)
    else:
        tl.store(potential + row, updated, mask=row_exists)


def update_potential(
    cost: Tensor, other_potential: Tensor, potential: Tensor, errors: Tensor | None = None
) -> None:
    """Update one potential in place, or compute its errors.

    All tensors are contiguous and in float32.

    Args:
        cost: The cost over the temperature, [n, m].
        other_potential: The potential of the columns, [m].
        potential: The potential of the rows, [n], which is overwritten.
        errors: If given, [n]: the relative errors of the rows' weights are written here, and
            ``potential`` stays as it is.
    """
    n, m = cost.shape
    _update_potential_kernel[(triton.cdiv(n, TILE_ROWS),)](
        cost,
        other_potential,
        potential,
        potential if errors is None else errors,
        n,
        m,
        math.log(m),
        rows=TILE_ROWS,
        block=BLOCK_COLUMNS,
        min_value=MIN_VALUE,
        errors_only=errors is not None,
        num_warps=NUM_WARPS,
    )


class FusedIteration:
    """Iterations by kernels. The potentials that `run` returns are overwritten by the next run.

    Args:
        cost: The cost over the temperature, [n, m].
    """

    def __init__(self, cost: Tensor):
        n, m = cost.shape
        self.cost = cost.contiguous()
        self.cost_t = cost.T.contiguous()
        self.f = cost.new_zeros(n)
        self.g = cost.new_zeros(m)
        self.errors = cost.new_zeros(n)

    def iterate(self, num_iterations: int) -> None:
        """Update both potentials this many times."""
        for _ in range(num_iterations):
            update_potential(self.cost, self.g, self.f)
            update_potential(self.cost_t, self.f, self.g)

    def compute_marginal_error(self) -> Tensor:
        """Return the largest relative error of a row's weight, on the device."""
        update_potential(self.cost, self.g, self.f, self.errors)
        return self.errors.amax()

    def run(self, g: Tensor, num_iterations: int) -> IterationResult:
        self.g.copy_(g)
        self.iterate(num_iterations)
        return summarize_iterations(self.f, self.g, self.compute_marginal_error())


class GraphedIteration:
    """A run of `FusedIteration` as one CUDA graph, since launches take most of the time.

    There is one for each shape. It must not be called inside another capture.

    Args:
        shape: Shape of the cost, [n, m].
        device: The GPU.
        num_iterations: Iterations of the captured run.
    """

    cache: dict[tuple[Any, ...], GraphedIteration] = {}  # noqa: RUF012 (shared on purpose)

    @classmethod
    def for_shape(
        cls, shape: torch.Size, device: torch.device, num_iterations: int
    ) -> GraphedIteration:
        """Return the graph for a shape; captures it at the first call.

        Args:
            shape: Shape of the cost, [n, m].
            device: The GPU.
            num_iterations: Iterations of the captured run.

        Returns:
            The graph, which all callers with this shape share.
        """
        key = (tuple(shape), device, num_iterations)
        if key not in cls.cache:
            cls.cache[key] = cls(shape, device, num_iterations)
        return cls.cache[key]

    def __init__(self, shape: torch.Size, device: torch.device, num_iterations: int):
        self.iteration = FusedIteration(torch.zeros(shape, device=device))
        self.num_iterations = num_iterations
        self.graph = torch.cuda.CUDAGraph()
        self.initial_g = torch.zeros_like(self.iteration.g)
        self.iteration.run(self.initial_g, num_iterations)  # compiles the kernels
        torch.cuda.synchronize(device)
        with capture_graph(self.graph):
            self.result = self.iteration.run(self.initial_g, num_iterations)

    def set_cost(self, cost: Tensor) -> GraphedIteration:
        """Copy a cost over the temperature into the buffers, and return this object."""
        self.iteration.cost.copy_(cost)
        self.iteration.cost_t.copy_(cost.T)
        return self

    def run(self, g: Tensor, num_iterations: int) -> IterationResult:
        """Replay the graph, or run fewer iterations without it.

        The result belongs to the caller.
        """
        if num_iterations == self.num_iterations:
            self.initial_g.copy_(g)
            self.graph.replay()
            result = self.result
        else:
            result = self.iteration.run(g, num_iterations)
        return IterationResult(*(values.clone() for values in result))
