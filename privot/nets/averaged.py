"""A generator in training: its weights, their running mean, and the optimiser, as one thing that can be kept and taken up again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SETTLING = 20  # batches over which the running mean's batch-norm statistics are taken anew, at the end


class Averaged:
    """``net`` learns by Adam; ``mean`` follows it and is what is released. Early steps weigh less, as the first drawings are noise.

    >>> pair = Averaged(nn.Linear(2, 1), rate=0.1, betas=(0.0, 0.9), average=0.999)
    >>> pair.net(torch.ones(1, 2)).sum().backward()
    >>> pair.step()
    >>> pair.steps
    1
    """

    def __init__(self, net: nn.Module, rate: float, betas: tuple[float, float], average: float):
        self.net, self.mean, self.average, self.steps = net, copy.deepcopy(net), average, 0
        self.optimiser = torch.optim.Adam(net.parameters(), lr=rate, betas=betas)

    def step(self) -> None:
        """By the gradients that lie in the net; they are cleared."""
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        keep = min(self.average, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            for kept, new in zip(self.mean.parameters(), self.net.parameters(), strict=True):
                kept.lerp_(new, 1 - keep)
        self.steps += 1

    def kept(self) -> dict[str, Tensor]:
        """All of it as tensors by name."""
        state = {f"net.{key}": value for key, value in self.net.state_dict().items()}
        state |= {f"mean.{key}": value for key, value in self.mean.state_dict().items()}
        for place, parts in self.optimiser.state_dict()["state"].items():
            state |= {f"adam.{place}.{key}": value for key, value in parts.items()}
        return state | {"steps": torch.tensor(self.steps)}

    def restore(self, state: dict[str, Tensor] | None) -> bool:
        """Take up what `kept` gave, if there is anything."""
        if state is None:
            return False
        for part, holder in (("net.", self.net), ("mean.", self.mean)):
            holder.load_state_dict({key.removeprefix(part): value for key, value in state.items() if key.startswith(part)})
        adam: dict[str, Any] = {**self.optimiser.state_dict(), "state": {}}
        for _, place, name in (key.split(".") for key in state if key.startswith("adam.")):
            adam["state"].setdefault(int(place), {})[name] = state[f"adam.{place}.{name}"]
        self.optimiser.load_state_dict(adam)
        self.steps = int(state["steps"])
        return True

    def settled(self, draw: Callable[[nn.Module], Any]) -> nn.Module:
        """The mean. Batch norm's statistics belong to other weights than these: they are taken anew, over what ``draw`` makes of it."""
        norms = [each for each in self.mean.modules() if isinstance(each, nn.BatchNorm2d)]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        self.mean.train()
        with torch.no_grad():
            for _ in range(SETTLING if norms else 0):
                draw(self.mean)
        return self.mean.eval()
