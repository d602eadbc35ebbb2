"""What the condensation methods share: where a set starts, draws of real images by class, augmentation, steps that repeat.

None of them has a mechanism: everything here runs on opened records, and what comes of it carries ``NoGuarantee``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.data.dataset import Records
from privot.data.spec import Spec
from privot.errors import DataError, ReleaseError, SettingError
from privot.nets.augment import Drawn, draw, operations
from privot.privacy.plan import Neighbours, Plan

OPENED = "no mechanism: the published set is an exact function of the records"
VISIBLE = "; initialised from real images, which remain visible in the result"
# Mean and standard deviation by channels, public constants for every data set: near those of CIFAR-10 (.47, .20) for colour, between
# those of MNIST (.13, .31) and Fashion-MNIST (.29, .35) for grey. So the papers' rates, made for standardised pixels, hold here.
STANDARD = {1: (0.2, 0.33), 3: (0.47, 0.2)}
AHEAD = 100_000  # augmentations drawn at a time; 5 MB
MOMENTUM = 0.5  # of the pixels, in DC, DSA and DM alike


def reason(init: str) -> str:
    """Why a condensed set has no guarantee.

    >>> reason("random")
    'no mechanism: the published set is an exact function of the records'
    """
    return OPENED + (VISIBLE if init == "real" else "")


def start(
    records: Records, spec: Spec, per_class: int, init: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Images in [0, 1] and labels to begin with, ``per_class`` of each class, classes in order: [classes * per_class, ...].

    "random" is N(0, 1) in standardised pixels (see `STANDARD`), cut to [0, 1]: it has seen no record. "real" is random real images of
    each class, none twice. ``generator`` is on the CPU; the images are where the records are.

    >>> records = Records(torch.rand(6, 1, 8, 8), torch.arange(6) % 2)
    >>> images, labels = start(records, Spec((1, 8, 8), 2), 3, "real", torch.Generator().manual_seed(0))
    >>> images.shape, labels.tolist()
    (torch.Size([6, 1, 8, 8]), [0, 0, 0, 1, 1, 1])
    """
    device = records.images.device
    labels = torch.arange(spec.classes, device=device).repeat_interleave(per_class)
    if init == "random":
        mean, std = STANDARD[spec.shape[0]]
        noise = torch.randn(len(labels), *spec.shape, generator=generator)
        return (mean + std * noise).clamp(0, 1).to(device), labels
    known = records.labels.cpu()
    chosen = []
    for label in range(spec.classes):
        places = (known == label).nonzero().flatten()
        if len(places) < per_class:
            raise DataError(
                f"class {label} has fewer records than the {per_class} real images of each class that are wanted"
            )
        chosen.append(places[torch.randperm(len(places), generator=generator)[:per_class]])
    return records.images[torch.cat(chosen).to(device)].clone(), labels


def counted(per_class: int, ratio: float | None, size: int, classes: int) -> int:
    """Images of each class: ``per_class``, or ``ratio`` of the mean class size of all ``size`` records, at least one.

    >>> [counted(50, ratio, 50_000, 10) for ratio in (None, 0.002, 0.01, 0.02)]
    [50, 10, 50, 100]
    """
    return per_class if ratio is None else max(1, round(ratio * size / classes))


def at_least_one(method: Any, *keys: str) -> None:
    """Refuse these settings below 1; one that is not there, or None, is left alone."""
    for key in keys:
        if (value := getattr(method, key, None)) is not None and value < 1:
            raise SettingError(f"{method.name}.{key}={value}: at least 1 is needed")


@dataclass(frozen=True, kw_only=True)
class Condensed:
    """What a method that condenses opened records has anyway: how many images, and a plan without a mechanism.

    A method adds ``init`` ("random" or "real"), and of iterations, steps, batch, nets, width, depth, rate and the like what it needs.
    """

    name: ClassVar[str]
    trusts: ClassVar[str] = "everyone who sees the set"
    promise: ClassVar[str] = "none: no mechanism, the set is an exact function of the records"

    per_class: int = 50
    ratio: float | None = None  # of the mean class size, in place of ``per_class``

    def __post_init__(self) -> None:
        at_least_one(
            self,
            "per_class",
            "iterations",
            "steps",
            "batch",
            "nets",
            "width",
            "depth",
            "outer",
            "inner",
        )
        if self.ratio is not None and not 0 < self.ratio <= 1:
            raise SettingError(
                f"{self.name}.ratio={self.ratio}: a part of each class, above 0 and at most 1, is needed"
            )
        if (init := self._init()) not in ("random", "real"):
            raise SettingError(f"{self.name}.init={init!r}: random or real")
        if (rate := getattr(self, "rate", None)) is not None and not 0 < rate < math.inf:
            raise SettingError(f"{self.name}.rate={rate}: a number above 0 is needed")

    def plan(self, spec: Spec) -> Plan:
        """No stages. Refuses, where class sizes are declared, what `start` would refuse after the records were opened."""
        if spec.class_sizes is not None:
            wanted = (
                counted(self.per_class, self.ratio, sum(spec.class_sizes), spec.classes)
                if self._init() == "real"
                else 1
            )
            if (least := min(spec.class_sizes)) < wanted:
                raise SettingError(
                    f"{self.name}: {wanted} records of each class are needed, but class_sizes declares {least}"
                )
        return Plan((), Neighbours.REPLACE)

    def images(self, spec: Spec) -> int | None:
        """Of each class, as far as that is known before the records are opened."""
        return (
            None
            if self.ratio is not None and spec.size is None
            else counted(self.per_class, self.ratio, spec.size or 0, spec.classes)
        )

    def _init(self) -> str:
        return getattr(self, "init", "random")


def standardised(images: Tensor) -> Tensor:
    """[0, 1] to the pixels in which the papers optimise."""
    mean, std = STANDARD[images.shape[1]]
    return (images - mean) / std


def bounds(spec: Spec) -> tuple[float, float]:
    """Where black and white lie in standardised pixels."""
    mean, std = STANDARD[spec.shape[0]]
    return -mean / std, (1 - mean) / std


def finished(images: Tensor) -> Tensor:
    """Standardised pixels back to [0, 1]."""
    mean, std = STANDARD[images.shape[1]]
    if not images.isfinite().all():
        raise ReleaseError(
            "the set has values that are not finite: its optimisation diverged; try a lower rate"
        )
    return (images.detach() * std + mean).clamp(0, 1)


class Pixels:
    """The set while it is optimised: standardised pixels, kept between black and white, by gradient steps with momentum."""

    def __init__(self, images: Tensor, spec: Spec, rate: float):
        self.free = standardised(images).requires_grad_()
        self.rate = rate
        (self.black, self.white) = bounds(spec)
        self.speed = torch.zeros_like(self.free)

    def descend(self, gradient: Tensor) -> None:
        with torch.no_grad():
            self.speed.mul_(MOMENTUM).add_(gradient)
            self.free.sub_(self.speed, alpha=self.rate).clamp_(self.black, self.white)


class Pool:
    """The records by class, on their device, for draws of as many from each class without a word to the host."""

    def __init__(self, records: Records, classes: int):
        counts = torch.bincount(records.labels, minlength=classes)
        if not counts.min():
            raise DataError(
                f"class {int(counts.argmin())} has no records: there is nothing to condense"
            )
        order = records.labels.argsort(stable=True)
        column = torch.arange(int(counts.max()), device=counts.device)
        # [classes, largest]
        self.images = records.images
        self.there = column < counts[:, None]
        self.places = order[
            ((counts.cumsum(0) - counts)[:, None] + column).clamp(max=len(order) - 1)
        ]

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Standardised images [classes, batch, ...] and weights [classes, batch] that add up to 1 in each class.

        Drawn without repetition. A class with fewer records gives all of them, and the rest of its row has weight 0.
        """
        keys = torch.rand(
            self.there.shape, generator=generator, device=self.there.device
        ).masked_fill(~self.there, -1)
        first = keys.topk(min(batch, keys.shape[1]), sorted=False).indices
        weight = self.there.gather(1, first).float()
        images = standardised(self.images[self.places.gather(1, first).flatten()])
        return images.unflatten(0, first.shape), weight / weight.sum(1, keepdim=True)


class Augmentations:
    """Differentiable augmentations drawn ahead in bulk: ``ready`` on the host before each step, ``take`` as part of the step."""

    def __init__(self, count: int, spec: Spec, generator: torch.Generator, device: torch.device):
        self.count = count
        self.sides = spec.shape[1:]
        self.generator = generator
        self.operations = operations(spec.mirrored)
        self.rounds = max(1, AHEAD // count)
        self.used = 0
        self.row = torch.arange(count, device=device)
        self.turn = torch.zeros((), dtype=torch.int64, device=device)
        self.drawn = self._draw().to(device)

    def _draw(self) -> Drawn:
        return draw(self.rounds * self.count, self.sides, self.generator, self.operations)

    def ready(self) -> None:
        """Make sure that the next ``take`` finds fresh numbers."""
        if self.used == self.rounds:
            for old, new in zip(self.drawn, self._draw(), strict=True):
                old.copy_(new)
            self.turn.zero_()
            self.used = 0
        self.used += 1

    def take(self) -> Drawn:
        """The next ``count``; where they lie is counted on the device, so that a captured step goes on by itself."""
        chosen = self.drawn.chosen(self.turn * self.count + self.row)
        self.turn.add_(1)
        return chosen
