"""A Triton kernel for one step of Adam in one pass over the weights; PyTorch makes ten passes."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMENTS = 1024  # elements of one program


@triton.jit
def _adam_kernel(
    weights,
    gradient,
    first_moment,
    second_moment,
    first_correction,
    second_correction,
    out,
    out_first_moment,
    out_second_moment,
    count,
    learning_rate,
    tile: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    mask = index < count
    g = tl.load(gradient + index, mask=mask)
    m = tl.load(first_moment + index, mask=mask)
    v = tl.load(second_moment + index, mask=mask)
    m = m - (m - g) * 0.5
    v = v - (v - g * g) * 0.1
    update = m / tl.load(first_correction) / (tl.sqrt(v / tl.load(second_correction)) + 1e-8)
    tl.store(out + index, tl.load(weights + index, mask=mask) - learning_rate * update, mask=mask)
    tl.store(out_first_moment + index, m, mask=mask)
    tl.store(out_second_moment + index, v, mask=mask)


class FusedAdamStep(torch.autograd.Function):
    """One step of Adam with betas 0.5 and 0.9; not differentiable, but vmap can map it."""

    @staticmethod
    def forward(
        weights: Tensor,
        gradient: Tensor,
        first_moment: Tensor,
        second_moment: Tensor,
        first_correction: Tensor,
        second_correction: Tensor,
        learning_rate: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply one step.

        Args:
            weights: Flat weights.
            gradient: Their gradient.
            first_moment: Average of the gradients so far.
            second_moment: Average of their squares so far.
            first_correction: What the first moment of this step is divided by, a scalar.
            second_correction: What the second moment of this step is divided by, a scalar.
            learning_rate: Learning rate.

        Returns:
            The new weights and moments, of the same shape.
        """
        inputs = [x.contiguous() for x in (weights, gradient, first_moment, second_moment)]
        outputs = tuple(torch.empty_like(inputs[0]) for _ in range(3))
        _adam_kernel[(triton.cdiv(weights.numel(), TILE_ELEMENTS),)](
            *inputs,
            first_correction,
            second_correction,
            *outputs,
            weights.numel(),
            learning_rate,
            TILE_ELEMENTS,
            num_warps=4,
        )
        return outputs  # type: ignore[return-value]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Mark the results: an Adam step has no gradient.

        Args:
            ctx: The context of autograd.
            inputs: The arguments of `forward`.
            output: What `forward` returned.
        """
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], *args: Any
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        if dims[4] is not None or dims[5] is not None:
            raise NotImplementedError("All networks of one vmap must be at the same step of Adam.")
        size = info.batch_size
        stacked = [
            x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
            for x, axis in zip(args[:4], dims[:4], strict=True)
        ]
        return FusedAdamStep.apply(*stacked, *args[4:]), (0, 0, 0)
