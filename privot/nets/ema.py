"""A generator in training: its weights, their running mean, and the optimiser, as one thing that can be kept and taken up again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

RISING = 100  # steps in which a rate that fades comes up first
SETTLING = (
    20  # batches over which the running mean's batch-norm statistics are taken anew, at the end
)


def faded(rate: float, step: int, steps: int) -> float:
    """A rate that rises over the first steps and then falls to 0 along a cosine.

    >>> [round(faded(1.0, step, 1000), 2) for step in (0, 99, 500, 999)]
    [0.01, 0.98, 0.5, 0.0]
    """
    return rate * min(1, (step + 1) / RISING) * (1 + math.cos(math.pi * step / steps)) / 2


def kept(**parts: Any) -> dict[str, Tensor]:
    """Nets and optimisers as tensors by name, to be stored; numbers become tensors.

    >>> sorted(kept(net=nn.Linear(2, 1), step=3))
    ['net.bias', 'net.weight', 'step']
    """
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            found |= {
                f"{name}.{key}": value.detach().clone() for key, value in part.state_dict().items()
            }
        elif isinstance(part, torch.optim.Optimizer):
            states = part.state_dict()["state"]
            found |= {
                f"{name}.{place}.{key}": value.clone()
                for place, state in states.items()
                for key, value in state.items()
            }
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
        own = {
            key.removeprefix(f"{name}."): value
            for key, value in found.items()
            if key.startswith(f"{name}.")
        }
        if isinstance(part, nn.Module):
            part.load_state_dict(own)
            continue
        states: dict[int, dict[str, Tensor]] = {}
        for key, value in own.items():
            place, _, field = key.partition(".")
            states.setdefault(int(place), {})[field] = value
        rates = [group["lr"] for group in part.param_groups]
        part.load_state_dict({"state": states, "param_groups": part.state_dict()["param_groups"]})
        for group, rate in zip(part.param_groups, rates, strict=True):
            group["lr"] = (
                rate  # loading puts a copy in its place; one that is a tensor, to be changed from outside, must stay itself
            )


class Averaged:
    """``net`` learns by Adam; ``mean`` follows it and is what is released. Early steps weigh less, as the first drawings are noise.

    `follow` may be part of a CUDA graph; then `ahead` is called before each step, outside of it.

    >>> pair = Averaged(nn.Linear(2, 1), rate=0.1, betas=(0.0, 0.9), average=0.999)
    >>> pair.net(torch.ones(1, 2)).sum().backward()
    >>> pair.step()
    >>> pair.steps
    1
    """

    def __init__(self, net: nn.Module, rate: float, betas: tuple[float, float], average: float):
        self.net = net
        self.mean = copy.deepcopy(net)
        self.average = average
        self.steps = 0
        device = next(net.parameters()).device
        on_gpu = device.type == "cuda"
        self.rate = torch.tensor(rate, device=device)
        self.keep = torch.zeros((), device=device)
        self.optimiser = torch.optim.Adam(
            net.parameters(), lr=self.rate, betas=betas, capturable=on_gpu, fused=on_gpu
        )

    def ahead(self, rate: float | None = None) -> None:
        """Before a step: how far the mean will follow, and the rate if it changes. It asks nothing of the device."""
        if rate is not None:
            self.rate.fill_(rate)
        self.keep.fill_(min(self.average, (1 + self.steps) / (10 + self.steps)))
        self.steps += 1

    def follow(self) -> None:
        """A step by the gradients that lie in the net, which are cleared; it can be captured."""
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            for old, new in zip(self.mean.parameters(), self.net.parameters(), strict=True):
                old.lerp_(new, 1 - self.keep)

    def step(self) -> None:
        self.ahead()
        self.follow()

    def kept(self) -> dict[str, Tensor]:
        """All of it as tensors by name."""
        return kept(net=self.net, mean=self.mean, adam=self.optimiser, steps=self.steps)

    def restore(self, found: dict[str, Tensor] | None) -> bool:
        """Take up what `kept` gave, if there is anything."""
        if found is None:
            return False
        take_up(found, net=self.net, mean=self.mean, adam=self.optimiser)
        self.steps = int(found["steps"])
        return True

    def settled(self, draw: Callable[[nn.Module], Any]) -> nn.Module:
        """The mean. Batch norm's statistics belong to other weights than these: they are taken anew, over what ``draw`` makes of it."""
        norms = [
            each
            for each in self.mean.modules()
            if isinstance(each, (nn.BatchNorm1d, nn.BatchNorm2d))
        ]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        self.mean.train()
        with torch.no_grad():
            for _ in range(SETTLING if norms else 0):
                draw(self.mean)
        return self.mean.eval()
