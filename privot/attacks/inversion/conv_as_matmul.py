"""Convolutions as products with patches: many small nets side by side become batched products of matrices.

A vmap over nets turns `conv2d` into one with a group for each net, whose second derivatives no library has tuned. Inside `Patches` any
module's 2-D convolution is the same sum written as a product, W [out, in * k * k] @ patches [in * k * k, places].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Patches(TorchFunctionMode):
    """Inside it, plain 2-D convolutions are products with patches; others (groups, padding by name) stay as they are.

    >>> x, w = torch.rand(2, 3, 8, 8), torch.rand(4, 3, 3, 3)
    >>> with Patches(): y = functional.conv2d(x, w, stride=2, padding=1)
    >>> torch.allclose(y, functional.conv2d(x, w, stride=2, padding=1), atol=1e-5)
    True
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every call of torch comes through here."""
        if func is functional.conv2d:
            return product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As `torch.nn.functional.conv2d`, whose names the arguments have."""
    if groups != 1 or isinstance(padding, str) or input.ndim != 4:
        return functional.conv2d(input, weight, bias, stride, padding, dilation, groups)
    stride, padding, dilation = (
        each if isinstance(each, tuple) else (each, each) for each in (stride, padding, dilation)
    )
    sides = [
        (
            input.shape[2 + axis]
            + 2 * padding[axis]
            - dilation[axis] * (weight.shape[2 + axis] - 1)
            - 1
        )
        // stride[axis]
        + 1
        for axis in (0, 1)
    ]
    patches = functional.unfold(input, weight.shape[2:], dilation, padding, stride)
    found = torch.matmul(weight.flatten(1), patches)  # [batch, out, places]
    return (found if bias is None else found + bias[:, None]).unflatten(2, sides)
