r"""Least squares within a box: what an attacker who knows the range of a pixel makes of the estimate that ignores it."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 100  # enough to 1 % where the pull is right; LeNets have conditions of 4e5 (grey) to 1e7 (colour)
RELAX = 1.6  # as is usual (Boyd et al. 2011, 3.4.3)


def boxed(
    information: Tensor,
    aim: Tensor,
    bounds: tuple[float, float],
    steps: int = STEPS,
    variance: Tensor | None = None,
) -> Tensor:
    r"""min (x - aim)^T H (x - aim) over bounds, H = ``information`` [N, n, n], for each column of ``aim`` [N, n, draws].

    Alternating directions: an estimate x = aim + r (H + r)^{-1} (z - u - aim), its copy z in the box, and u, the sum of what parts them.
    The pull r is the harmonic mean of H's eigenvalues, told by ``variance``, the diagonal [N, n] of H^{-1} where that is at hand.
    Projected gradients would need tens of thousands of steps where H has a condition of 10^7.

    >>> boxed(torch.tensor([[[1.0, 0.9], [0.9, 1.0]]]), torch.tensor([[[2.0], [0.5]]]), (0.0, 1.0)).flatten()
    tensor([1., 1.])
    """
    ones = information.diagonal(dim1=1, dim2=2)
    scale = torch.maximum(ones, 1e-12 * ones.amax(1, keepdim=True)).rsqrt()[
        ..., None
    ]  # x = scale * y: the box stays a box
    unit = torch.eye(information.shape[1], dtype=information.dtype, device=information.device)
    pull = (
        1 / (ones.double() * variance).mean(1).clamp(1.0, 1e5)
        if variance is not None
        else torch.full_like(ones[:, 0], 0.1)
    )
    pull = pull.to(information)[:, None, None]
    inverse = pull * inverses(scale * information * scale.mT + pull * unit)
    aim = aim / scale
    low = bounds[0] / scale
    high = bounds[1] / scale
    copy = torch.minimum(torch.maximum(aim, low), high)
    parted = torch.zeros_like(copy)
    for _ in range(steps):
        estimate = RELAX * (aim + inverse @ (copy - parted - aim)) + (1 - RELAX) * copy
        copy = torch.minimum(torch.maximum(estimate + parted, low), high)
        parted = parted + estimate - copy
    return copy * scale


def inverses(matrices: Tensor) -> Tensor:
    """[N, n, n] one after another: on a GPU the routine for many at once is made for small ones, and says so on standard output.

    >>> inverses(torch.eye(2)[None] * 4)
    tensor([[[0.2500, 0.0000],
             [0.0000, 0.2500]]])
    """
    return torch.stack([torch.linalg.inv(each) for each in matrices])
