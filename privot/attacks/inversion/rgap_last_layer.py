"""R-GAP at the last layer: the norm of dL/dz, and the input of the layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from privot.attacks.inversion.layer_chain import ChainLayer
from privot.attacks.inversion.problem import Problem
from privot.attacks.inversion.problem_checks import TensorDict

# of the search for the norm of dL/dz where there is no bias
NUM_GRID_POINTS = 400
BISECTION_STEPS = 60


class ChainState(NamedTuple):
    """The state of the attack after a layer.

    Attributes:
        layer_input: x [N, d], the input of the layer.
        output_gradient: dL/dz [N, ...] of the layer.
        labels: [N, 1].
        residual: [N], share of the equations so far that is not satisfied; NaN where this candidate
            does not exist.
        alternative_scale: [N], a factor by which ``layer_input`` may be multiplied and fits equally
            well, or NaN.
    """

    layer_input: Tensor
    output_gradient: Tensor
    labels: Tensor
    residual: Tensor
    alternative_scale: Tensor


def is_homogeneous(layers: list[ChainLayer]) -> bool:
    """Whether the input c x gives c times the logits for all c > 0.

    Then no layer can distinguish x with dL/dz from c x with dL/dz / c.
    """
    probe = torch.tensor([-2.0, -1.0, 1.0, 2.0], dtype=torch.float64)
    nonlinearity = [
        layer.activation_inverse(probe * 0.4)[0] * 2 - layer.activation_inverse(probe * 0.8)[0]
        for layer in layers
    ]
    has_no_bias = all(layer.module.bias is None for layer in layers)
    return has_no_bias and not torch.stack(nonlinearity).any()


def solve_last_layer(
    layer: ChainLayer, weights: TensorDict, problem: Problem, scale_is_unknown: bool
) -> list[ChainState]:
    """List the possible inputs of the last layer.

    Args:
        layer: The last layer.
        weights: {name: [N, ...]}.
        problem: The updates.
        scale_is_unknown: Whether the model is homogeneous, see `is_homogeneous`.

    Returns:
        One candidate with a bias, and up to eight without.
    """
    weight_gradient = problem.update[f"{layer.name}.weight"]  # dL/dz x^T [N, classes, d]
    if layer.module.bias is not None:
        output_gradient = problem.update[f"{layer.name}.bias"]
        if output_gradient.shape[1] > 1:
            labels = output_gradient.argmin(1, keepdim=True)
        else:
            labels = (output_gradient < 0).long()
        x = divide_outer_product(weight_gradient, output_gradient)
        return [ChainState(x, output_gradient, labels, x[:, 0] * 0, x[:, 0] * torch.nan)]
    # The direction of dL/dz without its sign and norm, and x times that norm.
    direction = torch.linalg.eigh(weight_gradient @ weight_gradient.mT).eigenvectors[..., -1]
    scaled_input = torch.einsum("nkd,nk->nd", weight_gradient, direction)
    scaled_logits = torch.einsum("nkd,nd->nk", weights[f"{layer.name}.weight"], scaled_input)
    # With a softmax |dL/dz| is largest at the label.
    likeliest = direction.abs().argmax(1, keepdim=True)
    label_candidates = [likeliest]
    if weight_gradient.shape[1] <= 2:
        label_candidates = [torch.full_like(likeliest, label) for label in range(2)]
    candidates = []
    for labels in label_candidates:
        for sign in (1.0, -1.0):
            norms = _find_gradient_norms(problem, sign * scaled_logits, sign * direction, labels)
            for norm in norms[:1] if scale_is_unknown else norms:
                alternative = norm / norms[1] if scale_is_unknown else norm * torch.nan
                candidates.append(
                    ChainState(
                        sign * scaled_input / norm[:, None],
                        sign * norm[:, None] * direction,
                        labels,
                        norm * 0,
                        alternative,
                    )
                )
    existing = [candidate for candidate in candidates if candidate.residual.isfinite().any()]
    return existing or candidates[:1]


def divide_outer_product(weight_gradient: Tensor, output_gradient: Tensor) -> Tensor:
    """Solve for x [N, d] with dL/dz x^T nearest to dL/dW [N, k, d], for dL/dz [N, k]."""
    return torch.einsum(
        "nkd,nk->nd", weight_gradient, output_gradient
    ) / output_gradient.square().sum(1, keepdim=True)


def _find_gradient_norms(
    problem: Problem, logits: Tensor, direction: Tensor, labels: Tensor
) -> Tensor:
    r"""Find the norms s > 0 of dL/dz: the roots of <dL/dz(logits / s), direction> = s.

    For the logistic loss it is R-GAP's -m / (1 + exp m) = <dL/dW, W>, which has two roots when the
    image is classified correctly.

    Args:
        problem: The loss.
        logits: [N, classes], times s.
        direction: Unit vectors [N, classes].
        labels: [N, 1].

    Returns:
        The two largest roots [2, N], NaN where there are fewer.
    """
    compute_output_gradient = vmap(
        vmap(grad(lambda z, y: problem.loss_fn(z[None], y)), in_dims=(0, None))
    )

    def compute_excess(log_norm: Tensor) -> Tensor:  # [N, points] -> [N, points]
        norm = log_norm.exp()
        output_gradient = compute_output_gradient(logits[:, None] / norm[..., None], labels)
        return torch.einsum("npk,nk->np", output_gradient, direction) - norm

    grid = torch.linspace(-30.0, 8.0, NUM_GRID_POINTS, dtype=logits.dtype, device=logits.device)
    grid = grid.expand(len(logits), -1)
    excess = compute_excess(grid)
    has_root = (excess[:, 1:] > 0) != (excess[:, :-1] > 0)
    interval_or_none = torch.where(
        has_root, torch.arange(NUM_GRID_POINTS - 1, device=grid.device), -1
    )
    interval = interval_or_none.topk(2, dim=1).values  # [N, 2]
    low = grid.gather(1, interval.clamp(min=0))
    high = grid.gather(1, interval.clamp(min=0) + 1)
    is_rising = excess.gather(1, interval.clamp(min=0)) < 0
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        is_below_root = (compute_excess(middle) < 0) == is_rising
        low = torch.where(is_below_root, middle, low)
        high = torch.where(is_below_root, high, middle)
    return torch.where(interval >= 0, low.exp(), torch.nan).T
