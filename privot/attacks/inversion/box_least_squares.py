"""Least squares with bounds on each variable, for an attacker who knows the range of a pixel."""

from __future__ import annotations

import torch
from torch import Tensor

# accurate to 1 % with the right penalty; LeNets have condition numbers of 4e5 (gray) to 1e7 (color)
ADMM_STEPS = 100
OVER_RELAXATION = 1.6  # the usual value (Boyd et al. 2011, section 3.4.3)


def solve_box_least_squares(
    hessian: Tensor,
    unconstrained_solution: Tensor,
    bounds: tuple[float, float],
    steps: int = ADMM_STEPS,
    inverse_diagonal: Tensor | None = None,
) -> Tensor:
    r"""Minimize (x - a)^T H (x - a) over x within bounds, by ADMM.

    One step updates an estimate x = a + r (H + r)^{-1} (z - u - a), its copy z within the bounds,
    and u, the sum of their differences. The penalty r is the harmonic mean of the eigenvalues of H.
    Projected gradients would need tens of thousands of steps at a condition number of 10^7.

    Args:
        hessian: H [N, n, n].
        unconstrained_solution: a [N, n, k], k right-hand sides.
        bounds: Smallest and largest value.
        steps: Steps of ADMM.
        inverse_diagonal: The diagonal [N, n] of H^{-1}, from which the penalty follows. None: 0.1.

    Returns:
        x [N, n, k].

    >>> hessian = torch.tensor([[[1.0, 0.9], [0.9, 1.0]]])
    >>> solution = torch.tensor([[[2.0], [0.5]]])
    >>> solve_box_least_squares(hessian, solution, (0.0, 1.0)).flatten()
    tensor([1., 1.])
    """
    diagonal = hessian.diagonal(dim1=1, dim2=2)
    # With x = scale * y the constraints on y are still bounds.
    scale = torch.maximum(diagonal, 1e-12 * diagonal.amax(1, keepdim=True)).rsqrt()[..., None]
    if inverse_diagonal is None:
        penalty = torch.full_like(diagonal[:, 0], 0.1)
    else:
        penalty = 1 / (diagonal.double() * inverse_diagonal).mean(1).clamp(1.0, 1e5)
    penalty = penalty.to(hessian)[:, None, None]
    identity = torch.eye(hessian.shape[1], dtype=hessian.dtype, device=hessian.device)
    inverse = penalty * invert_matrices(scale * hessian * scale.mT + penalty * identity)
    target = unconstrained_solution / scale
    low = bounds[0] / scale
    high = bounds[1] / scale
    copy = torch.minimum(torch.maximum(target, low), high)
    dual = torch.zeros_like(copy)
    for _ in range(steps):
        estimate = (
            OVER_RELAXATION * (target + inverse @ (copy - dual - target))
            + (1 - OVER_RELAXATION) * copy
        )
        copy = torch.minimum(torch.maximum(estimate + dual, low), high)
        dual = dual + estimate - copy
    return copy * scale


def invert_matrices(matrices: Tensor) -> Tensor:
    """Invert matrices [N, n, n] one after another.

    On a GPU the batched routine is made for small matrices, and warns on standard output.

    >>> invert_matrices(torch.eye(2)[None] * 4)
    tensor([[[0.2500, 0.0000],
             [0.0000, 0.2500]]])
    """
    return torch.stack([torch.linalg.inv(matrix) for matrix in matrices])
