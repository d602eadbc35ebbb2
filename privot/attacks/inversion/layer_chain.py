"""A net read as a chain: linear layers with an invertible function after each. The closed form goes down such a chain, and no other."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional

from privot.errors import SettingError

# Of values a after the function: those before it, its slope there, and where both are known.
Undo = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
EDGE = 1e-15  # values of a bounded function are kept so far inside its range


def _everywhere(before: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return before, slope, torch.ones_like(before)


def undo_sigmoid(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z = log(a / (1 - a)), slope a (1 - a).

    >>> [round(float(each), 4) for each in undo_sigmoid(torch.tensor(0.75))]
    [1.0986, 0.1875, 1.0]
    """
    a = a.clamp(EDGE, 1 - EDGE)
    return _everywhere(a.logit(), a * (1 - a))


def undo_tanh(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z = artanh(a), slope 1 - a^2."""
    a = a.clamp(EDGE - 1, 1 - EDGE)
    return _everywhere(a.atanh(), 1 - a * a)


def undo_leaky(slope: float = 0.01) -> Undo:
    """Of a leaky ReLU; with slope 0 of a ReLU, where nothing is known of z but at places with a > 0."""

    def undo(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if slope == 0:
            up = (a > 0).to(a)
            return a * up, up, up
        return _everywhere(torch.where(a > 0, a, a / slope), torch.where(a > 0, 1.0, slope).to(a))

    return undo


def undo_elu(alpha: float = 1.0) -> Undo:
    """z = a, or log(1 + a / alpha) under 0, where the slope is a + alpha."""

    def undo(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low = a.clamp(max=0).clamp(min=alpha * (EDGE - 1))
        return _everywhere(
            torch.where(a > 0, a, torch.log1p(low / alpha)),
            torch.where(a > 0, torch.ones_like(a), low + alpha),
        )

    return undo


def undo_softplus(beta: float = 1.0) -> Undo:
    """z = a + log(1 - exp(-beta a)) / beta, slope 1 - exp(-beta a)."""

    def undo(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = a.clamp(min=EDGE)
        slope = -torch.expm1(-beta * a)
        return _everywhere(a + slope.log() / beta, slope)

    return undo


def undo_nothing(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where no function stands between two layers."""
    return _everywhere(a, torch.ones_like(a))


@dataclass(frozen=True)
class Layer:
    """A convolution or linear map whose parameters are ``name``.weight and perhaps ``name``.bias, from ``shape`` [...] of one record.

    ``undo`` belongs to the function after it, up to the next layer.
    """

    name: str
    module: nn.Conv2d | nn.Linear
    shape: tuple[int, ...]
    undo: Undo


def chain(net: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """The layers of a net for images of ``shape``, first to last; a net that is no such chain is refused in a line that says where.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 3))
    >>> [(each.name, each.shape) for each in chain(net, (1, 4, 4))]
    [('0', (1, 4, 4)), ('3', (8,))]
    """
    mend = "the closed form needs a plain chain of convolutions and linear layers: use an optimising attack"
    try:
        traced = fx.symbolic_trace(net)
    except Exception as error:
        raise SettingError(
            f"the net cannot be read as a graph ({type(error).__name__}): {mend}"
        ) from None
    some = next(net.parameters())
    ShapeProp(traced).propagate(torch.zeros(1, *shape, dtype=some.dtype, device=some.device))
    node: Any = next(each for each in traced.graph.nodes if each.op == "output").args[0]
    layers: list[Layer] = []
    undo: Undo = undo_nothing
    ended = False
    while node.op != "placeholder":
        parents = [each for each in node.all_input_nodes if "tensor_meta" in each.meta]
        if len(parents) != 1:
            raise SettingError(f"{node.name}: {len(parents)} branches meet there; {mend}")
        module = net.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            if isinstance(module, nn.Conv2d) and (
                module.groups != 1
                or module.padding_mode != "zeros"
                or isinstance(module.padding, str)
            ):
                raise SettingError(
                    f"{node.target}: a convolution with groups or padding by name; {mend}"
                )
            layers.insert(
                0, Layer(node.target, module, tuple(parents[0].meta["tensor_meta"].shape[1:]), undo)
            )
            undo = undo_nothing
        elif not _plain(node, module):
            found = (
                _undone(node, module) if layers else undo_nothing
            )  # what follows the last layer is a part of the loss
            ended = ended or not layers
            if found is None or undo is not undo_nothing:
                kind = type(module).__name__ if module else "this function"
                raise SettingError(f"{node.name}: {kind} has no inverse here; {mend}")
            undo = found
        node = parents[0]
    if not layers or undo is not undo_nothing or not isinstance(layers[-1].module, nn.Linear):
        raise SettingError(f"the net must begin and end with a layer, the last one linear; {mend}")
    if ended and layers[-1].module.bias is None:
        raise SettingError(
            f"{layers[-1].name}: a function follows the last layer, which has no bias; {mend}"
        )
    return layers


def _plain(node: Any, module: nn.Module | None) -> bool:
    """Whether a node changes the shape alone, or nothing."""
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


def _undone(node: Any, module: nn.Module | None) -> Undo | None:
    """The inverse of an elementwise function, as a module, a function or a method."""
    match module:
        case nn.Sigmoid():
            return undo_sigmoid
        case nn.Tanh():
            return undo_tanh
        case nn.ReLU():
            return undo_leaky(0.0)
        case nn.LeakyReLU():
            return undo_leaky(module.negative_slope)
        case nn.ELU():
            return undo_elu(module.alpha)
        case nn.Softplus():
            return undo_softplus(module.beta)
        case None:
            if node.target in ("sigmoid", torch.sigmoid, functional.sigmoid):
                return undo_sigmoid
            if node.target in ("tanh", torch.tanh, functional.tanh):
                return undo_tanh
            if node.target in ("relu", torch.relu, functional.relu):
                return undo_leaky(0.0)
            if node.target is functional.leaky_relu:
                given = node.kwargs.get(
                    "negative_slope", node.args[1] if len(node.args) > 1 else 0.01
                )
                return undo_leaky(float(given))
            if node.target is operator.pos:
                return undo_nothing
    return None
