"""Moving images until their mean features, class by class and by many nets, meet given ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from privot.components.dct import Canvas
from privot.nets.augment import Drawn, apply
from privot.nets.ensemble import Ensemble, Frozen
from privot.runtime.graphed_step import Repeated


def unit(
    nets: Ensemble, weights: dict[str, Tensor], images: Tensor, drawn: Drawn, centre: Tensor | None
) -> Tensor:
    r"""Unit features by each of k nets: [k, count, seen_numbers], of images [count, channels, height, width].

    :math:`u_k(x) = (f_k(a_k(x)) - m_k) / |f_k(a_k(x)) - m_k|` with net, augmentation and centre; without a centre, f_k(a_k(x)) as it is.
    """
    k = len(weights["tail"])
    count = len(images)
    repeated = Drawn(*(each.repeat_interleave(count, 0) for each in drawn))
    seen = apply(images.repeat(k, 1, 1, 1), repeated).unflatten(0, (k, count))
    found = nets.seen((2 * seen - 1).to(weights.get("conv0", weights["tail"]).dtype), weights)
    if centre is None:
        return found
    away = found - centre[:, None]
    return away / away.norm(dim=2, keepdim=True).clamp(min=1e-6)


@dataclass
class Round:
    """Features and where their class means should be: each has a net (in turn), an augmentation, a centre and a target."""

    nets: Ensemble
    drawn: Drawn  # [features, ...]
    centre: Tensor  # [features, numbers]
    target: Tensor  # [features, classes, numbers]
    share: float  # the weight of the round

    def __post_init__(self) -> None:
        self.frozen = Frozen(self.nets)

    def away(self, images: Tensor, some: Tensor) -> Tensor:
        """Mean squared distance, over the features ``some``, of the images' class means from their targets; classes in order, even."""
        found = unit(
            self.nets,
            self.frozen[some % self.nets.nets],
            images,
            self.drawn.chosen(some),
            self.centre[some],
        )
        mean = found.unflatten(1, (self.target.shape[1], -1)).mean(2)
        return (mean - self.target[some]).square().sum() / len(some)


def match(
    images: Tensor,
    rounds: list[Round],
    *,
    steps: int,
    at_once: int,
    rate: float,
    detail: float,
    generator: torch.Generator,
    progress: Callable[[int, int], None],
) -> Tensor:
    """Move images in [0, 1] by Adam, at a rate that falls as a cosine, toward all targets: ``at_once`` features of each round at a step."""
    device = images.device
    canvas = Canvas(images, detail)
    now_rate = torch.zeros((), device=device)
    optimiser = torch.optim.Adam(
        [canvas.free], lr=now_rate, fused=True, capturable=device.type == "cuda"
    )
    turns = [
        _turns(len(part.centre), min(at_once, len(part.centre)), steps, generator).to(device)
        for part in rounds
    ]
    now = [each[0].clone() for each in turns]
    total = sum(part.share for part in rounds)

    def step() -> None:
        shown = canvas.shown()
        loss = torch.zeros((), device=device)
        for part, some in zip(rounds, now, strict=True):
            loss = loss + part.away(shown, some) * (part.share / total)
        (canvas.free.grad,) = torch.autograd.grad(loss, canvas.free)
        optimiser.step()
        canvas.bound()

    repeated = Repeated(step, device)
    for turn in range(steps):
        now_rate.fill_(rate * (1 + math.cos(math.pi * turn / steps)) / 2)
        for some, each in zip(now, turns, strict=True):
            some.copy_(each[turn])
        repeated()
        if turn % 25 == 24 or turn + 1 == steps:
            progress(turn + 1, steps)
    with torch.no_grad():
        return canvas.shown().clamp(0, 1)


def _turns(count: int, some: int, steps: int, generator: torch.Generator) -> Tensor:
    """Which features are looked at in each step, none twice in one: [steps, some]."""
    return torch.rand(steps, count, generator=generator).argsort(1)[:, :some]
