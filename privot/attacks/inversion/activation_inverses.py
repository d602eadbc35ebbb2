"""Inverses of the functions between two layers of a chain."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# From values a after the function to: the values z before it, its derivative there, and a mask of
# the entries where both are known.
ActivationInverse = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
RANGE_MARGIN = 1e-15  # values of a bounded function are clamped to this distance inside its range


def invert_sigmoid(activation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute z = log(a / (1 - a)), with derivative a (1 - a).

    >>> [round(float(value), 4) for value in invert_sigmoid(torch.tensor(0.75))]
    [1.0986, 0.1875, 1.0]
    """
    activation = activation.clamp(RANGE_MARGIN, 1 - RANGE_MARGIN)
    return _mark_all_known(activation.logit(), activation * (1 - activation))


def invert_tanh(activation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute z = artanh(a), with derivative 1 - a^2."""
    activation = activation.clamp(RANGE_MARGIN - 1, 1 - RANGE_MARGIN)
    return _mark_all_known(activation.atanh(), 1 - activation * activation)


def build_leaky_relu_inverse(negative_slope: float = 0.01) -> ActivationInverse:
    """Build the inverse of a leaky ReLU; with 0 of a ReLU, whose z is known only where a > 0."""

    def invert_leaky_relu(activation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if negative_slope == 0:
            is_positive = (activation > 0).to(activation)
            return activation * is_positive, is_positive, is_positive
        return _mark_all_known(
            torch.where(activation > 0, activation, activation / negative_slope),
            torch.where(activation > 0, 1.0, negative_slope).to(activation),
        )

    return invert_leaky_relu


def build_elu_inverse(alpha: float = 1.0) -> ActivationInverse:
    """Build the inverse of an ELU: below 0 it is log(1 + a / alpha), with derivative a + alpha."""

    def invert_elu(activation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        negative_part = activation.clamp(max=0).clamp(min=alpha * (RANGE_MARGIN - 1))
        return _mark_all_known(
            torch.where(activation > 0, activation, torch.log1p(negative_part / alpha)),
            torch.where(activation > 0, torch.ones_like(activation), negative_part + alpha),
        )

    return invert_elu


def build_softplus_inverse(beta: float = 1.0) -> ActivationInverse:
    """Build z = a + log(1 - exp(-beta a)) / beta, with derivative 1 - exp(-beta a)."""

    def invert_softplus(activation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        activation = activation.clamp(min=RANGE_MARGIN)
        derivative = -torch.expm1(-beta * activation)
        return _mark_all_known(activation + derivative.log() / beta, derivative)

    return invert_softplus


def invert_identity(activation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return z = a, for two layers without a function between them."""
    return _mark_all_known(activation, torch.ones_like(activation))


def is_reshape_or_identity(node: Any, module: nn.Module | None) -> bool:
    """Whether a node of a traced graph changes nothing except perhaps the shape."""
    if module is not None:
        return isinstance(module, (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout2d))
    return node.target in (
        "flatten",
        "view",
        "reshape",
        "contiguous",
        torch.flatten,
        torch.reshape,
        functional.dropout,
    )


def find_activation_inverse(node: Any, module: nn.Module | None) -> ActivationInverse | None:
    """Find the inverse of an elementwise function, given as a module, a function or a method."""
    match module:
        case nn.Sigmoid():
            return invert_sigmoid
        case nn.Tanh():
            return invert_tanh
        case nn.ReLU():
            return build_leaky_relu_inverse(0.0)
        case nn.LeakyReLU():
            return build_leaky_relu_inverse(module.negative_slope)
        case nn.ELU():
            return build_elu_inverse(module.alpha)
        case nn.Softplus():
            return build_softplus_inverse(module.beta)
        case None:
            return _find_function_inverse(node)
    return None


def _find_function_inverse(node: Any) -> ActivationInverse | None:
    if node.target in ("sigmoid", torch.sigmoid, functional.sigmoid):
        return invert_sigmoid
    if node.target in ("tanh", torch.tanh, functional.tanh):
        return invert_tanh
    if node.target in ("relu", torch.relu, functional.relu):
        return build_leaky_relu_inverse(0.0)
    if node.target is functional.leaky_relu:
        positional = node.args[1] if len(node.args) > 1 else 0.01
        return build_leaky_relu_inverse(float(node.kwargs.get("negative_slope", positional)))
    if node.target is operator.pos:
        return invert_identity
    return None


def _mark_all_known(pre_activation: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return pre_activation, derivative, torch.ones_like(pre_activation)
