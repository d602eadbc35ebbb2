"""A step of Adam as one pass over the weights, where torch's functions make ten. Imported only where there is Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # numbers of one program


@triton.jit
def _step(
    weights,
    slope,
    mean,
    square,
    young,
    new,
    out,
    out_mean,
    out_square,
    count,
    rate,
    tile: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    there = at < count
    g = tl.load(slope + at, mask=there)
    m = tl.load(mean + at, mask=there)
    s = tl.load(square + at, mask=there)
    m = m - (m - g) * 0.5
    s = s - (s - g * g) * 0.1
    away = m / tl.load(young) / (tl.sqrt(s / tl.load(new)) + 1e-8)
    tl.store(out + at, tl.load(weights + at, mask=there) - rate * away, mask=there)
    tl.store(out_mean + at, m, mask=there)
    tl.store(out_square + at, s, mask=there)


class Adam(torch.autograd.Function):
    """Weights, slope, mean and square of one shape, and what the means of that age are to be divided by; not differentiable."""

    @staticmethod
    def forward(
        weights: Tensor,
        slope: Tensor,
        mean: Tensor,
        square: Tensor,
        young: Tensor,
        new: Tensor,
        rate: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = [each.contiguous() for each in (weights, slope, mean, square)]
        found = tuple(torch.empty_like(given[0]) for _ in range(3))
        _step[(triton.cdiv(weights.numel(), TILE),)](
            *given, young, new, *found, weights.numel(), rate, TILE, num_warps=4
        )
        return found  # type: ignore[return-value]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], *given: Any
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        if dims[4] is not None or dims[5] is not None:
            raise NotImplementedError("networks side by side are of one age")
        size = info.batch_size
        spread = [
            x.expand(size, *x.shape) if at is None else x.movedim(at, 0)
            for x, at in zip(given[:4], dims[:4], strict=True)
        ]
        return Adam.apply(*spread, *given[4:]), (0, 0, 0)
