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

Loss = Callable[..., Tensor]  # (net as a function of batches, image [1, ...], label [1]) to a number


def gradient(image: Tensor, label: Tensor, net: nn.Module, weights: dict[str, Tensor], loss: Loss, also: Tensor | None) -> Tensor:
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


def descend(gate: Gate, stage: str, net: nn.Module, loss: Loss, optimiser: Any, *, bound: float, also: Tensor | None = None) -> None:
    """One answer of the stage, and one step of the optimiser along it.

    The answer is a sum, not a mean: how many records there are may be secret, and Adam goes as far for a gradient as for a multiple of it.
    """
    answer = gate.sum(stage, gradient, net, weights(net), loss, also, bound=bound).float()
    parameters = list(net.parameters())
    for parameter, part in zip(parameters, answer.split([each.numel() for each in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    optimiser.step()


def kept(**parts: Any) -> dict[str, Tensor]:
    """Nets and optimisers as tensors by name, to be stored; numbers become tensors.

    >>> net = nn.Linear(2, 1)
    >>> sorted(kept(net=net, step=3))
    ['net.bias', 'net.weight', 'step']
    """
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            found |= {f"{name}.{key}": value.detach().clone() for key, value in part.state_dict().items()}
        elif isinstance(part, torch.optim.Optimizer):
            states = part.state_dict()["state"]
            found |= {f"{name}.{place}.{key}": value.clone() for place, state in states.items() for key, value in state.items()}
        else:
            found[name] = torch.as_tensor(part)
    return found


def take_up(found: dict[str, Tensor], **parts: Any) -> None:
    """Put what `kept` gave back into nets and optimisers of the same kinds.

    >>> one, other = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> take_up(kept(net=one), net=other)
    >>> torch.equal(one.weight, other.weight)
    True
    """
    for name, part in parts.items():
        own = {key.removeprefix(f"{name}."): value for key, value in found.items() if key.startswith(f"{name}.")}
        if isinstance(part, nn.Module):
            part.load_state_dict(own)
            continue
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in own.items():
            place, _, field = key.partition(".")
            states.setdefault(int(place), {})[field] = value.cpu() if field == "step" else value  # Adam counts on the host
        part.load_state_dict({"state": states, "param_groups": part.state_dict()["param_groups"]})
