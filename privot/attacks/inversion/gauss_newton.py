r"""Gauss-Newton steps within the bounds of a pixel: the end of an attack on a noisy update.

Near a guess x the update is u(x) + J (x' - x), so least squares in x' is a quadratic problem with
H = J^T J, minimized within the bounds (`solve_box_least_squares`). For Gaussian noise its solution
is the most likely image, and its error is what the Cramér-Rao bound predicts. The true image is not
needed: J is computed at the guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from privot.attacks.inversion.box_least_squares import invert_matrices, solve_box_least_squares
from privot.attacks.inversion.fisher_information import compute_fisher_information
from privot.attacks.inversion.problem import Problem, Reconstruction, compute_victim_gradients

MAX_STEP_HALVINGS = 5  # of a step that does not reduce the residual
RELATIVE_RIDGE = 1e-12  # of the largest diagonal entry


def refine_by_gauss_newton(
    problem: Problem, reconstruction: Reconstruction, steps: int = 3
) -> Reconstruction:
    """Improve a reconstruction by Gauss-Newton steps with step halving.

    Args:
        problem: The updates of N victims.
        reconstruction: Where to start.
        steps: Number of steps.

    Returns:
        The reconstruction with images [N, batch, c, h, w] within the bounds, whose residual [N] is
        the squared residual of the update.
    """
    exact = problem.to_float64()
    low, high = problem.bounds
    observation = torch.cat([gradient.flatten(1) for gradient in exact.update.values()], 1)

    def compute_update(images: Tensor) -> Tensor:
        gradients = compute_victim_gradients(exact, images, reconstruction.labels)
        return torch.cat([gradients[name].flatten(1) for name in exact.update], 1)

    def compute_residual(images: Tensor) -> Tensor:
        return (observation - compute_update(images)).square().sum(1)

    x = reconstruction.images.double().clamp(low, high)
    update, pull_back = _linearize_update(compute_update, x)
    for _ in range(steps):
        hessian = compute_fisher_information(exact, x, reconstruction.labels)
        descent = pull_back(observation - update)[0].flatten(1)[..., None]
        step = _solve_step(hessian, descent, x, problem.bounds)
        residual = (observation - update).square().sum(1)
        length = torch.ones_like(residual)
        for _ in range(MAX_STEP_HALVINGS):
            is_worse = ~(compute_residual(x + _broadcast(length) * step) < residual)
            length = torch.where(is_worse, length / 2, length)
        next_x = x + _broadcast(length) * step
        is_better = compute_residual(next_x) < residual
        x = torch.where(_broadcast(is_better), next_x, x)
        update, pull_back = _linearize_update(compute_update, x)
    return replace(
        reconstruction,
        images=x.to(reconstruction.images.dtype),
        steps=reconstruction.steps + steps,
        residual=(observation - update).square().sum(1).to(reconstruction.residual.dtype),
    )


def _linearize_update(compute_update: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Any]:
    """Return the update at x, and the product of J^T with a vector."""
    result: Any = vjp(compute_update, x)
    return result[0], result[1]


def _solve_step(hessian: Tensor, descent: Tensor, x: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Solve for the step to the minimum of the quadratic problem within the bounds.

    Args:
        hessian: H [N, n, n].
        descent: J^T of the residual [N, n, 1].
        x: The guess [N, batch, c, h, w].
        bounds: Smallest and largest value of a pixel.

    Returns:
        The step [N, batch, c, h, w].
    """
    ridge = (
        RELATIVE_RIDGE
        * hessian.diagonal(dim1=1, dim2=2).amax(1)[:, None, None]
        * torch.eye(hessian.shape[1]).to(hessian)
    )
    inverse = invert_matrices(hessian + ridge)
    unconstrained = x.flatten(1)[..., None] + inverse @ descent
    solution = solve_box_least_squares(
        hessian, unconstrained, bounds, inverse_diagonal=inverse.diagonal(dim1=1, dim2=2)
    )
    return solution[..., 0].view(x.shape) - x


def _broadcast(values: Tensor) -> Tensor:
    """Reshape [N] to [N, 1, 1, 1, 1]."""
    return values.view(-1, 1, 1, 1, 1)
