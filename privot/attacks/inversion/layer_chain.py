"""Read a model as a chain of linear layers, each followed by an invertible function.

The closed-form attacks work on such chains only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from privot.attacks.inversion.activation_inverses import (
    ActivationInverse,
    find_activation_inverse,
    invert_identity,
    is_reshape_or_identity,
)
from privot.errors import SettingError

USE_OTHER_ATTACK = (
    "The closed form needs a plain chain of convolutions and linear layers. "
    "Use an optimizing attack."
)


@dataclass(frozen=True)
class ChainLayer:
    """A convolution or linear layer and the inverse of the function after it.

    Attributes:
        name: The parameters are ``name``.weight and perhaps ``name``.bias.
        module: The layer.
        input_shape: Shape of its input for one record.
        activation_inverse: Inverse of the function between this layer and the next.
    """

    name: str
    module: nn.Conv2d | nn.Linear
    input_shape: tuple[int, ...]
    activation_inverse: ActivationInverse


def extract_layer_chain(model: nn.Module, input_shape: tuple[int, ...]) -> list[ChainLayer]:
    """List the layers of a model for images of ``input_shape``, first to last.

    Raises:
        SettingError: The model is not such a chain; the message says where.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 3))
    >>> [(layer.name, layer.input_shape) for layer in extract_layer_chain(net, (1, 4, 4))]
    [('0', (1, 4, 4)), ('3', (8,))]
    """
    graph = _trace_model(model, input_shape)
    node: Any = next(node for node in graph.nodes if node.op == "output").args[0]
    layers: list[ChainLayer] = []
    activation_inverse: ActivationInverse = invert_identity
    ends_with_function = False
    while node.op != "placeholder":
        parents = [parent for parent in node.all_input_nodes if "tensor_meta" in parent.meta]
        if len(parents) != 1:
            raise SettingError(
                f"{node.name}: {len(parents)} branches meet here. {USE_OTHER_ATTACK}"
            )
        module = model.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            _check_supported(module, node.target)
            shape = tuple(parents[0].meta["tensor_meta"].shape[1:])
            layers.insert(0, ChainLayer(node.target, module, shape, activation_inverse))
            activation_inverse = invert_identity
        elif not is_reshape_or_identity(node, module):
            # A function after the last layer is a part of the loss.
            inverse = find_activation_inverse(node, module) if layers else invert_identity
            ends_with_function = ends_with_function or not layers
            if inverse is None or activation_inverse is not invert_identity:
                function = type(module).__name__ if module else "this function"
                raise SettingError(
                    f"{node.name}: {function} cannot be inverted here. {USE_OTHER_ATTACK}"
                )
            activation_inverse = inverse
        node = parents[0]
    if (
        not layers
        or activation_inverse is not invert_identity
        or not isinstance(layers[-1].module, nn.Linear)
    ):
        raise SettingError(
            "The model must start and end with a layer, and the last layer must be linear. "
            + USE_OTHER_ATTACK
        )
    if ends_with_function and layers[-1].module.bias is None:
        raise SettingError(
            f"{layers[-1].name}: a function follows the last layer, which has no bias. "
            + USE_OTHER_ATTACK
        )
    return layers


def _trace_model(model: nn.Module, input_shape: tuple[int, ...]) -> fx.Graph:
    """Trace a model into a graph whose nodes know their shapes."""
    try:
        traced = fx.symbolic_trace(model)
    except Exception as error:
        raise SettingError(
            f"The model cannot be read as a graph ({type(error).__name__}). {USE_OTHER_ATTACK}"
        ) from None
    parameter = next(model.parameters())
    image = torch.zeros(1, *input_shape, dtype=parameter.dtype, device=parameter.device)
    ShapeProp(traced).propagate(image)
    return traced.graph


def _check_supported(module: nn.Conv2d | nn.Linear, name: str) -> None:
    if isinstance(module, nn.Conv2d) and (
        module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str)
    ):
        raise SettingError(
            f"{name}: a convolution with groups, or with padding given by name. {USE_OTHER_ATTACK}"
        )
