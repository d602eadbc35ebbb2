r"""WDLG with a critic that is learned: for each tensor a small net f over its rows, trained by WGAN-GP between two steps of the images.

    max_f  mean f(rows of g') - mean f(rows of g) - 10 (|grad f| - 1)²,   then g' goes down the same difference.

Rows are a set: f cannot say which filter a row belongs to, and a critic that lags turns descent into a game. It is here because the
paper's algorithm reads like this, and to be measured; it does not reconstruct.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import grad, vmap

from privot.attacks.inversion.batched_adam import Adam

Tensors = dict[str, Tensor]
# WGAN-GP's, with a small net
WIDTH = 32
LESSONS = 5
RATE = 1e-3
PENALTY = 10.0


def rows(each: Tensor) -> Tensor:
    """Filters of a tensor [filters, width]."""
    return each.flatten(1) if each.ndim > 1 else each[:, None]


def score(critic: Tensors, name: str, points: Tensor) -> Tensor:
    """f of each row [filters]."""
    hidden = torch.tanh(points @ critic[f"{name}/in"] + critic[f"{name}/shift"])
    return hidden @ critic[f"{name}/out"]


def difference(critic: Tensors, found: Tensors, seen: Tensors) -> Tensor:
    """The dual of one victim: the sum over tensors of mean f(rows of g') - mean f(rows of g)."""
    each = [
        score(critic, name, rows(found[name])).mean() - score(critic, name, rows(seen[name])).mean()
        for name in seen
    ]
    return torch.stack(each).sum()


def lesson(critic: Tensors, found: Tensors, seen: Tensors, mix: Tensor) -> Tensor:
    """What a critic makes small, with the penalty at points between both sides."""
    tilt = []
    for name in seen:
        between = rows(found[name]) * mix + rows(seen[name]) * (1 - mix)
        slopes = grad(lambda points, name=name: score(critic, name, points).sum())(between)
        tilt.append(((slopes.square().sum(1) + 1e-12).sqrt() - 1).square().mean())
    return PENALTY * torch.stack(tilt).sum() - difference(critic, found, seen)


@dataclass
class Critics:
    """A critic for each of n victims, and their Adam."""

    weights: Tensors
    generator: torch.Generator
    adams: dict[str, Adam] = field(default_factory=dict)

    @classmethod
    def begin(cls, update: Tensors, generator: torch.Generator) -> Critics:
        """Fresh ones for updates {name: [n, ...]}."""
        weights = {}
        for name, each in update.items():
            count = len(each)
            width = each[0].flatten(1).shape[1] if each.ndim > 2 else 1
            for part, size in (("in", (width, WIDTH)), ("shift", (WIDTH,)), ("out", (WIDTH,))):
                fan = width if part == "in" else WIDTH
                drawn = torch.randn(count, *size, generator=generator) / math.sqrt(fan)
                weights[f"{name}/{part}"] = (drawn * (part != "shift")).to(each)
        return cls(weights, generator, {name: Adam(RATE) for name in weights})

    def learn(self, found: Tensors, seen: Tensors) -> None:
        """`LESSONS` steps of every critic on its victim's guess and update."""
        for _ in range(LESSONS):
            mix = torch.rand(1, generator=self.generator).to(next(iter(seen.values())))
            slopes = vmap(grad(lesson), in_dims=(0, 0, 0, None))(self.weights, found, seen, mix)
            for name, each in self.weights.items():
                fresh, _ = self.adams[name].step(each.flatten(1), mix, slopes[name].flatten(1))
                self.weights[name] = fresh.view_as(each)

    def keep(self, which: Tensor) -> None:
        """Go on with these victims alone."""
        self.weights = {name: each[which] for name, each in self.weights.items()}
        for adam in self.adams.values():
            adam.keep(which)
