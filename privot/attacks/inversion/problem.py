"""What an attacker holds: a net, its weights, and the updates of N victims; and what an attack found.

A victim is one client that sent one update, the gradient of the loss on its batch of images, dL/dW (x, y). Tensors of all victims are
stacked along a first axis N, and everything below is one computation for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from privot.attacks.inversion.conv_as_matmul import Patches
from privot.attacks.inversion.problem_checks import (
    Loss,
    Tensors,
    check,
    gradient_of,
    ready,
    trainable,
)
from privot.errors import DataError

__all__ = ["Defence", "Found", "Loss", "Problem", "Tensors", "check", "gradients", "trainable"]


class Defence(Protocol):
    """What a client does to the gradients of its images before it sends their mean."""

    def __call__(self, each: Tensors, generator: torch.Generator | None) -> Tensors:
        """From gradients of single images {name: [N, batch, ...]} to updates {name: [N, ...]}."""


@dataclass(frozen=True)
class Problem:
    """N updates to invert. ``weights`` are {name: [N, ...]}, a net for each victim, or {name: [...]}, one net for all.

    ``batch`` images of ``shape`` (channels, height, width), values within ``bounds``, are behind each update. An attacker who knows the
    defence says so: ``known`` {name: bool [N, ...]} marks entries to compare (pruned ones tell little), ``slack`` {name: [N, ...]} is the
    distance up to which entries count as equal (half a cell of a quantiser).
    """

    net: nn.Module
    loss: Loss
    weights: Tensors
    update: Tensors
    shape: tuple[int, int, int]
    classes: int
    batch: int = 1
    bounds: tuple[float, float] = (0.0, 1.0)
    known: Tensors | None = None
    slack: Tensors | None = None

    def __post_init__(self) -> None:
        check(self.net, self.update)
        if (
            len(
                {
                    each.ndim - dict(self.net.named_parameters())[name].ndim
                    for name, each in self.weights.items()
                }
            )
            != 1
        ):
            raise DataError(
                "weights: all of one net for all victims, or all with a first axis of victims"
            )

    @classmethod
    def of(
        cls,
        net: nn.Module,
        loss: Loss,
        images: Tensor,
        labels: Tensor,
        weights: Tensors | None = None,
        defence: Defence | None = None,
        *,
        classes: int | None = None,
        generator: torch.Generator | None = None,
        **more: Any,
    ) -> Problem:
        """The updates that clients with these ``images`` [N, batch, c, h, w] and ``labels`` [N, batch] would send; for experiments.

        A ``defence`` sees the gradient of each image by itself. ``classes`` is the width of the logits where it is not said.

        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> problem = Problem.of(net, nn.functional.cross_entropy, torch.rand(5, 2, 1, 2, 2), torch.zeros(5, 2, dtype=torch.long))
        >>> problem.count, problem.classes, {name: list(each.shape) for name, each in problem.update.items()}
        (5, 3, {'1.weight': [5, 3, 4], '1.bias': [5, 3]})
        """
        if images.ndim != 5 or labels.shape[:2] != images.shape[:2]:
            raise DataError(
                f"images {list(images.shape)}, labels {list(labels.shape)}: give [N, batch, c, h, w] and [N, batch]"
            )
        ready(net)
        weights = weights if weights is not None else trainable(net)
        width = functional_call(
            net,
            {n: each if _shared(net, weights) else each[0] for n, each in weights.items()},
            (images[0],),
        ).shape[-1]
        classes = classes or max(2, width)
        if labels.dtype == torch.long and not (
            int(labels.min()) >= 0 and int(labels.max()) < classes
        ):
            seen = f"{int(labels.min())} to {int(labels.max())}"
            raise DataError(
                f"labels from {seen}, but the net has {classes} classes: use 0 to {classes - 1}"
            )
        single = images.unsqueeze(2), labels.unsqueeze(2)  # every image as a batch of its own
        shared = _shared(net, weights)
        whole = images.shape[1]
        with torch.no_grad(), Patches():
            if defence is None:
                update = vmap(gradient_of(net, loss), in_dims=(None if shared else 0, 0, 0))(
                    weights, images, labels
                )
            else:
                one = vmap(gradient_of(net, loss), in_dims=(None, 0, 0))
                update = defence(
                    vmap(one, in_dims=(None if shared else 0, 0, 0))(weights, *single), generator
                )
        return cls(net, loss, weights, update, tuple(images.shape[2:]), classes, whole, **more)  # type: ignore[arg-type]

    @property
    def count(self) -> int:
        """N."""
        return len(next(iter(self.update.values())))

    @property
    def shared(self) -> bool:
        """Whether one net is for all."""
        return _shared(self.net, self.weights)

    @property
    def example(self) -> Tensor:
        """A tensor whose device and type all others have."""
        return next(iter(self.update.values()))

    def pick(self, which: Tensor) -> Problem:
        """The victims at these places, in this order; a place may come up many times (restarts)."""

        def some(tensors: Tensors | None) -> Tensors | None:
            return (
                None if tensors is None else {name: each[which] for name, each in tensors.items()}
            )

        kept = self.weights if self.shared else some(self.weights)
        new = object.__new__(Problem)  # checked when it was made
        for name, value in (vars(self) | {"weights": kept, "update": some(self.update)}).items():
            object.__setattr__(new, name, value)
        object.__setattr__(new, "known", some(self.known))
        object.__setattr__(new, "slack", some(self.slack))
        return new

    def guessed(self, weights: Tensors, images: Tensor, labels: Tensor) -> Tensors:
        """The update {name: [...]} that one victim with ``images`` [batch, c, h, w] would send; differentiable, to be put under a vmap."""
        return gradient_of(self.net, self.loss)(weights, images, labels)


@dataclass(frozen=True)
class Found:
    """``images`` [N, batch, c, h, w] with ``labels`` [N, batch] that explain the updates best, after ``steps`` [N] gradient evaluations.

    ``loss`` [N] is what of the update they leave unexplained, in the attack's own units. ``trace`` holds (step, images) on the way, where
    it was asked for.
    """

    images: Tensor
    labels: Tensor
    steps: Tensor
    loss: Tensor
    trace: tuple[tuple[int, Tensor], ...] | None = None


def gradients(problem: Problem, images: Tensor, labels: Tensor) -> Tensors:
    """{name: [N, ...]} of ``images`` [N, batch, c, h, w] and ``labels`` [N, batch] (or [N, batch, classes]); differentiable in both."""
    with Patches():
        return vmap(problem.guessed, in_dims=(None if problem.shared else 0, 0, 0))(
            problem.weights, images, labels
        )


def _shared(net: nn.Module, weights: Tensors) -> bool:
    name, some = next(iter(weights.items()))
    return some.ndim == dict(net.named_parameters())[name].ndim
