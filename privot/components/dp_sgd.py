"""Private gradient steps: a net learns from records that it never holds, by noisy sums of their clipped gradients (DP-SGD).

The gate draws records by chance, takes the gradient of each alone, clips it, adds them up and adds noise. What comes back is public, and
so is all that an optimiser makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from privot.privacy.gate import Gate

Loss = Callable[
    ..., Tensor
]  # (net as a function of batches, image [1, ...], label [1]) to a number


def gradient(
    image: Tensor,
    label: Tensor,
    net: nn.Module,
    weights: dict[str, Tensor],
    loss: Loss,
    also: Tensor | None,
) -> Tensor:
    """One record's part: the gradient of its loss in all weights, plus a public vector that is the same for every record: [numbers].

    >>> net = nn.Linear(3, 1)
    >>> part = gradient(torch.ones(3), torch.tensor(0), net, dict(net.named_parameters()), lambda net, x, y: net(x).sum(), None)
    >>> part.tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    def lost(weights: dict[str, Tensor]) -> Tensor:
        return loss(lambda *inputs: functional_call(net, weights, inputs), image[None], label[None])

    found = torch.cat([each.flatten() for each in grad(lost)(weights).values()])
    return found if also is None else found + also


def flat(tensors: Any) -> Tensor:
    """All numbers of the tensors in a row."""
    return torch.cat([each.flatten() for each in tensors])


def weights(net: nn.Module) -> dict[str, Tensor]:
    """The net's weights by name, without a gradient: the very tensors, not copies."""
    return {name: value.detach() for name, value in net.named_parameters()}


def descend(
    gate: Gate,
    stage: str,
    net: nn.Module,
    loss: Loss,
    optimiser: Any,
    *,
    bound: float,
    also: Tensor | None = None,
) -> None:
    """One answer of the stage, and one step of the optimiser along it.

    The answer is a sum, not a mean: how many records there are may be secret, and Adam goes as far for a gradient as for a multiple of it.
    """
    answer = gate.sum(stage, gradient, net, weights(net), loss, also, bound=bound).float()
    parameters = list(net.parameters())
    for parameter, part in zip(
        parameters, answer.split([each.numel() for each in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter)
    optimiser.step()
