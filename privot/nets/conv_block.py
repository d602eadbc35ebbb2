"""The block of a ConvNet: convolution, instance norm, ReLU, average pooling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d, group_norm, pad

HALF = (torch.bfloat16, torch.float16)


@cache
def precision(device: torch.device) -> torch.dtype:
    """In which nets are quickest: bfloat16 on a GPU that computes with it, else float32."""
    return (
        torch.bfloat16
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        else torch.float32
    )


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


def half(device: torch.device) -> AbstractContextManager[Any]:
    """Half precision where it is quicker, for what is differentiated at most once.

    Weights may change between captured steps, so none is cached.
    """
    return (
        torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
        if precision(device) in HALF
        else nullcontext()
    )


def block(
    x: Tensor, conv: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, padding: int
) -> Tensor:
    """Images or maps [count, channels, height, width] to [count, width, height' / 2, width' / 2].

    Half precision on a GPU takes the fused way, which can be differentiated once; everything else takes PyTorch's own steps.

    >>> x, ones = torch.rand(2, 1, 8, 8), torch.ones(4)
    >>> block(x, torch.rand(4, 1, 3, 3), ones, ones, ones, padding=1).shape
    torch.Size([2, 4, 4, 4])
    """
    if x.is_cuda and (quick := _computed(x)) in HALF and _triton():
        from privot.nets.kernels import conv_norm_relu_pool, norm_relu_pool

        x = x.to(quick)
        conv = conv.to(quick)
        if conv_norm_relu_pool.begins(x, conv, gain, padding):
            return conv_norm_relu_pool.first_block(x, conv, gain, shift, padding)
        x, conv = _filled(x, conv)
        maps = conv2d(
            x, conv, None, padding=padding
        )  # without the bias: the norm takes it away again
        if norm_relu_pool.suits(maps):
            return norm_relu_pool.norm_relu_pool(maps, gain, shift)
    else:
        maps = conv2d(x, conv, bias.to(conv.dtype), padding=padding)
    with torch.autocast(
        maps.device.type, enabled=False
    ):  # autocast would widen the maps, and twice the memory is twice the time
        return avg_pool2d(
            group_norm(maps, maps.shape[1], gain.to(maps.dtype), shift.to(maps.dtype)).relu(), 2
        )


def _computed(x: Tensor) -> torch.dtype:
    """The precision that convolutions of ``x`` will have."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _filled(x: Tensor, conv: Tensor) -> tuple[Tensor, Tensor]:
    """Black channels up to a multiple of 8, and weights with channels last: what the matrix units of a GPU can read as it lies."""
    missing = -conv.shape[1] % 8
    if missing:
        x, conv = (pad(each, (0, 0, 0, 0, 0, missing)) for each in (x, conv))
    return x, conv.contiguous(memory_format=torch.channels_last)
