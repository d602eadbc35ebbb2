r"""R-GAP (Zhu and Blaschko 2021): the image behind one update in closed form, layer by layer.

Two sets of equations are linear in the input x of a layer z = W x + b: z itself, which follows from
the layer above by inverting its function, and the gradient dL/dW, once dL/dz is known. They are
solved together by least squares in float64, from the last layer to the first. With biases dL/dz of
the last layer is known exactly (it is dL/db); without, its norm is a root of one equation. The
attack needs no initial image, no label and no optimization. Noise is amplified from layer to layer,
so a failure does not show that other attacks fail.
"""

from __future__ import annotations

import torch
from torch import Tensor

from privot.attacks.inversion.conv_inversion import (
    backpropagate_conv,
    compute_output_size,
    solve_conv_input,
)
from privot.attacks.inversion.layer_chain import ChainLayer, extract_layer_chain
from privot.attacks.inversion.problem import Problem, Reconstruction, compute_victim_gradients
from privot.attacks.inversion.problem_checks import TensorDict
from privot.attacks.inversion.rgap_last_layer import (
    ChainState,
    divide_outer_product,
    is_homogeneous,
    solve_last_layer,
)
from privot.errors import SettingError

BOUNDS_TOLERANCE = 1e-3  # mean squared distance from the bounds that rounding may cause


def reconstruct_by_rgap(problem: Problem) -> Reconstruction:
    """Reconstruct one image [N, 1, c, h, w] for each victim.

    Convolutions are solved victim by victim, each a dense system of the layer's size.

    Args:
        problem: Updates with one image behind each.

    Returns:
        The reconstruction. Its residual is that of `compute_relative_residual`.

    Raises:
        SettingError: More than one image is behind an update, or the model is no plain chain.
    """
    if problem.batch_size != 1:
        raise SettingError(
            f"{problem.batch_size} images are behind an update, but this attack is for one. "
            "Use reconstruct_by_spear or an optimizing attack."
        )
    layers = extract_layer_chain(problem.model, problem.shape)
    exact = problem.to_float64()
    weights = {
        name: weight.expand(problem.num_victims, *weight.shape)
        if problem.has_shared_weights
        else weight
        for name, weight in exact.weights.items()
    }
    candidates = solve_last_layer(layers[-1], weights, exact, is_homogeneous(layers))
    for layer_above, layer in zip(layers[:0:-1], layers[-2::-1], strict=True):
        # Wrong candidates do not fit the first layer below them, so one is left after it.
        solutions = [
            _solve_next_layer(layer_above, layer, weights, exact.update, candidate)
            for candidate in candidates
        ]
        candidates = [_select_best_fit(solutions)]
    solution = _select_best_fit(candidates)
    images = _choose_within_bounds(solution, problem.bounds).view(-1, 1, *problem.shape)
    return Reconstruction(
        images.to(problem.reference_tensor.dtype),
        solution.labels,
        torch.ones(len(images), dtype=torch.long, device=images.device),
        compute_relative_residual(exact, images, solution.labels),
    )


def compute_relative_residual(problem: Problem, images: Tensor, labels: Tensor) -> Tensor:
    """Compute |g(x, y) - g|^2 / |g|^2 of each victim, which an attacker can observe.

    Args:
        problem: The updates g.
        images: x [N, batch, c, h, w].
        labels: y [N, batch].

    Returns:
        [N].
    """
    gradients = compute_victim_gradients(problem, images, labels)
    squared_distance = torch.stack(
        [
            (gradients[name] - observation).square().flatten(1).sum(1)
            for name, observation in problem.update.items()
        ]
    ).sum(0)
    squared_norm = torch.stack(
        [observation.square().flatten(1).sum(1) for observation in problem.update.values()]
    ).sum(0)
    return squared_distance / squared_norm


def _select_best_fit(candidates: list[ChainState]) -> ChainState:
    """Select for each victim the candidate with the smallest residual."""
    residuals = torch.stack([candidate.residual for candidate in candidates])  # [candidates, N]
    best = residuals.nan_to_num(nan=torch.inf).argmin(0)
    victims = torch.arange(residuals.shape[1], device=residuals.device)
    return ChainState(
        *(torch.stack(values)[best, victims] for values in zip(*candidates, strict=True))
    )


def _choose_within_bounds(solution: ChainState, bounds: tuple[float, float]) -> Tensor:
    """Choose between two images that fit equally well, [N, d].

    The brighter of those within the bounds, or the one that is closer to the bounds.
    """
    scaled_input = solution.layer_input * solution.alternative_scale[:, None]
    images = torch.stack([solution.layer_input, scaled_input]).nan_to_num(nan=0.0)  # [2, N, d]
    excess = (images - images.clamp(*bounds)).square().mean(2)
    rank = torch.where(excess < BOUNDS_TOLERANCE, -images.square().mean(2), excess)
    is_second = (rank[1] < rank[0]) & solution.alternative_scale.isfinite()
    return torch.where(is_second[:, None], images[1], images[0])


def _solve_next_layer(
    layer_above: ChainLayer,
    layer: ChainLayer,
    weights: TensorDict,
    update: TensorDict,
    state: ChainState,
) -> ChainState:
    """Invert the function below ``layer_above``, and solve for the input of ``layer``.

    Args:
        layer_above: The layer whose input is known.
        layer: The layer below it.
        weights: {name: [N, ...]}.
        update: {name: [N, ...]}.
        state: State of ``layer_above``.

    Returns:
        The state of ``layer``.
    """
    weight = weights[f"{layer.name}.weight"]
    weight_above = weights[f"{layer_above.name}.weight"]
    if weight_above.ndim == 3:
        activation_gradient = torch.einsum("nkd,nk->nd", weight_above, state.output_gradient)
    else:
        activation_gradient = backpropagate_conv(layer_above, weight_above, state.output_gradient)
    if weight.ndim == 3:
        return _solve_linear_layer(layer, weights, update, state, activation_gradient)
    bias = weights.get(f"{layer.name}.bias")
    activation = state.layer_input.view(-1, weight.shape[1], *compute_output_size(layer))
    pre_activation, derivative, is_known = layer.activation_inverse(activation)
    output_gradient = activation_gradient.reshape(pre_activation.shape) * derivative
    # An error of x is an error of z divided by the derivative, so equations where the function is
    # nearly constant get a small weight.
    largest_derivative = derivative.flatten(1).amax(1).view(-1, 1, 1, 1)
    equation_weights = is_known * (derivative / largest_derivative).square()
    if bias is not None:
        pre_activation = pre_activation - bias[..., None, None]
    nan = torch.full_like(weight[0, 0, 0, 0, 0], torch.nan)
    victims = zip(
        state.residual.isfinite().tolist(),
        weight,
        update[f"{layer.name}.weight"],
        pre_activation,
        output_gradient,
        equation_weights,
        strict=True,
    )
    solutions = [
        solve_conv_input(layer, *equations) if exists else (nan.expand(layer.input_shape), nan)
        for exists, *equations in victims
    ]
    x, residual = (torch.stack(values) for values in zip(*solutions, strict=True))
    return ChainState(
        x.flatten(1),
        output_gradient,
        state.labels,
        state.residual + residual,
        state.alternative_scale,
    )


def _solve_linear_layer(
    layer: ChainLayer,
    weights: TensorDict,
    update: TensorDict,
    state: ChainState,
    activation_gradient: Tensor,
) -> ChainState:
    """Solve for the input of a linear layer.

    Args:
        layer: The layer.
        weights: {name: [N, ...]}.
        update: {name: [N, ...]}.
        state: State of the layer above.
        activation_gradient: Gradient with respect to the input of the layer above [N, ...].

    Returns:
        The state of ``layer``.
    """
    bias = weights.get(f"{layer.name}.bias")
    pre_activation, derivative, is_known = layer.activation_inverse(state.layer_input)
    if bias is None:
        output_gradient = activation_gradient.flatten(1) * derivative
    else:
        output_gradient = update[f"{layer.name}.bias"]
    x = divide_outer_product(update[f"{layer.name}.weight"], output_gradient)
    output = torch.einsum("nkd,nd->nk", weights[f"{layer.name}.weight"], x)
    output = output + (0 if bias is None else bias)
    squared_distance = ((output - pre_activation) * is_known).square().sum(1)
    squared_norm = (pre_activation * is_known).square().sum(1)
    return ChainState(
        x,
        output_gradient,
        state.labels,
        state.residual + squared_distance / squared_norm,
        state.alternative_scale,
    )
