"""Compute convolutions as matrix products with patches, so that many small models are batched.

A vmap over models turns `conv2d` into a convolution with one group for each model, whose second
derivatives no library has optimized. Within `ConvAsMatmul` the 2-D convolution of any module is the
same sum written as a product, W [out, in * k * k] @ patches [in * k * k, positions].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class ConvAsMatmul(TorchFunctionMode):
    """Context in which 2-D convolutions are matrix products.

    Convolutions with groups, or with padding by name, are left as they are.

    >>> images, weight = torch.rand(2, 3, 8, 8), torch.rand(4, 3, 3, 3)
    >>> with ConvAsMatmul(): output = functional.conv2d(images, weight, stride=2, padding=1)
    >>> torch.allclose(output, functional.conv2d(images, weight, stride=2, padding=1), atol=1e-5)
    True
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Replace `conv2d`; torch calls this for each of its functions."""
        if func is functional.conv2d:
            return convolve_by_matmul(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def convolve_by_matmul(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Compute `torch.nn.functional.conv2d` as a matrix product with patches.

    Args:
        input: [batch, in, h, w].
        weight: [out, in, k, k].
        bias: [out], or None.
        stride: Stride, as in `conv2d`.
        padding: Padding, as in `conv2d`.
        dilation: Dilation, as in `conv2d`.
        groups: Number of groups, as in `conv2d`.

    Returns:
        [batch, out, h', w'].
    """
    if groups != 1 or isinstance(padding, str) or input.ndim != 4:
        return functional.conv2d(input, weight, bias, stride, padding, dilation, groups)
    stride, padding, dilation = (
        value if isinstance(value, tuple) else (value, value)
        for value in (stride, padding, dilation)
    )
    output_size = []
    for axis in (0, 1):
        padded_size = input.shape[2 + axis] + 2 * padding[axis]
        kernel_extent = dilation[axis] * (weight.shape[2 + axis] - 1) + 1
        output_size.append((padded_size - kernel_extent) // stride[axis] + 1)
    patches = functional.unfold(input, weight.shape[2:], dilation, padding, stride)
    output = torch.matmul(weight.flatten(1), patches)  # [batch, out, positions]
    return (output if bias is None else output + bias[:, None]).unflatten(2, output_size)
