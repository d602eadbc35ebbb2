"""What a client may do to its gradients before it sends them, for experiments; and what an attacker who knows of it does about it.

A defence takes the gradient of each image by itself {name: [N, batch, ...]} to updates {name: [N, ...]}. ``expected`` is what it sends
without its noise, ``noise_std`` that noise on each entry. ``adapted`` gives the attacker what can be read off an update, ``objective``
names what to compare by then. Only `Clipped` noise has an epsilon (`promise`); the rest is here because people rely on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from privot.attacks.inversion.problem import Problem, Tensors
from privot.errors import SettingError
from privot.privacy.noise import Secret


class Defended(Protocol):
    """All that the defences below have in common."""

    @property
    def objective(self) -> str: ...
    @property
    def noise_std(self) -> float: ...
    def expected(self, each: Tensors) -> Tensors: ...
    def __call__(self, each: Tensors, generator: torch.Generator | None = None) -> Tensors: ...
    def adapted(self, problem: Problem) -> Problem: ...


@dataclass(frozen=True)
class Noise:
    """Gaussian noise of ``noise_std`` on each entry of the mean gradient, as it is. Nothing bounds the gradient, so nothing is promised.

    >>> Noise(0.0)({"w": torch.ones(1, 2, 3)})
    {'w': tensor([[1., 1., 1.]])}
    """

    noise_std: float
    objective: ClassVar[str] = "squared"

    def __post_init__(self) -> None:
        if not 0 <= self.noise_std < 1e30:
            raise SettingError(
                f"noise={self.noise_std}: a standard deviation of 0 or more is needed"
            )

    def expected(self, each: Tensors) -> Tensors:
        return {name: found.mean(1) for name, found in each.items()}

    def __call__(self, each: Tensors, generator: torch.Generator | None = None) -> Tensors:
        return added(self.expected(each), self.noise_std, generator)

    def adapted(self, problem: Problem) -> Problem:
        return problem


@dataclass(frozen=True)
class Clipped:
    r"""DP-SGD (Abadi et al. 2016): each image's gradient clipped to ``bound`` in norm, the sum plus N(0, (noise bound)^2), over ``batch``.

    ``noise`` is a multiplier; 0 is clipping alone, which for one image is a change of scale and no defence. How much was clipped is not
    known to the attacker, so he compares directions.
    """

    bound: float
    noise: float = 0.0
    batch: int = 1
    objective: ClassVar[str] = "cosine"

    def __post_init__(self) -> None:
        if not 0 < self.bound < 1e30 or not 0 <= self.noise < 1e30 or self.batch < 1:
            raise SettingError(
                f"clip={self.bound}, noise={self.noise}, batch={self.batch}: over 0, not under 0, and at least 1 are needed"
            )

    @property
    def noise_std(self) -> float:
        """On each entry of the update: noise * bound / batch."""
        return self.noise * self.bound / self.batch

    def expected(self, each: Tensors) -> Tensors:
        """The clipped sum over the batch that was planned for, which privacy needs to be the same whatever was drawn."""
        norms = (
            torch.stack([found.flatten(2).square().sum(2) for found in each.values()])
            .sum(0)
            .clamp(min=1e-60)
            .sqrt()
        )  # [N, batch]
        factors = (self.bound / norms).clamp(max=1.0)
        return {
            name: torch.einsum("nb...,nb->n...", found, factors) / self.batch
            for name, found in each.items()
        }

    def __call__(self, each: Tensors, generator: torch.Generator | None = None) -> Tensors:
        return added(self.expected(each), self.noise_std, generator)

    def adapted(self, problem: Problem) -> Problem:
        return problem


@dataclass(frozen=True)
class Pruned:
    """The ``share`` of smallest entries of each tensor of the mean gradient set to 0.

    An attacker sees which they are, and knows of them that they are smaller than all that was sent.
    """

    share: float
    objective: ClassVar[str] = "squared"
    noise_std: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise SettingError(f"prune={self.share}: a share in [0, 1) is needed")

    def expected(self, each: Tensors) -> Tensors:
        return {name: self._pruned(found.mean(1)) for name, found in each.items()}

    def _pruned(self, entries: Tensor) -> Tensor:
        sizes = entries.flatten(1).detach().abs()
        gone = int(self.share * sizes.shape[1])
        if not gone:
            return entries
        edge = sizes.sort(1).values[:, gone - 1 : gone]  # the largest that goes
        return entries * (sizes > edge).view(entries.shape)

    def __call__(self, each: Tensors, generator: torch.Generator | None = None) -> Tensors:
        return self.expected(each)

    def adapted(self, problem: Problem) -> Problem:
        """Entries that are 0 count as met by anything up to the smallest that is not."""
        slack = {}
        for name, each in problem.update.items():
            kept = torch.where(each == 0, torch.inf, each.abs()).flatten(1).amin(1)
            kept = torch.where(kept.isfinite(), kept, 0.0).view(-1, *(1 for _ in each.shape[1:]))
            slack[name] = torch.where(each == 0, kept, 0.0)
        return replace(problem, slack=slack)


@dataclass(frozen=True)
class Quantised:
    """Entries of the mean gradient rounded to ``bits`` bits, evenly between minus and plus the largest of their tensor.

    With one bit: the sign, times the mean size. An attacker knows the cell that each entry was in.
    """

    bits: int
    objective: ClassVar[str] = "squared"
    noise_std: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 32:
            raise SettingError(f"bits={self.bits}: 1 to 32 are needed")

    def expected(self, each: Tensors) -> Tensors:
        """The entries themselves: rounding has no slope, and for the certificate counts as noise (`spread`)."""
        return {name: found.mean(1) for name, found in each.items()}

    def __call__(self, each: Tensors, generator: torch.Generator | None = None) -> Tensors:
        return {name: self._rounded(found) for name, found in self.expected(each).items()}

    def _rounded(self, entries: Tensor) -> Tensor:
        if self.bits == 1:
            return entries.sign() * _along(entries.flatten(1).abs().mean(1), entries)
        step = _along(self._step(entries), entries)
        return (entries / step).round() * step

    def _step(self, entries: Tensor) -> Tensor:
        """[N], the same of the entries and of what is left of them."""
        return entries.flatten(1).abs().amax(1).clamp(min=1e-30) / (2 ** (self.bits - 1) - 1)

    def adapted(self, problem: Problem) -> Problem:
        if self.bits == 1:  # a cell without an end
            return problem
        return replace(
            problem,
            slack={
                name: _along(self._step(each) / 2, each).expand_as(each)
                for name, each in problem.update.items()
            },
        )

    def spread(self, update: Tensors) -> Tensors:
        """{name: [N]}, the standard deviation of rounding: step / sqrt(12)."""
        return {name: self._step(each) / 12**0.5 for name, each in update.items()}


@dataclass(frozen=True)
class Several:
    """One after another; the first has the images apart, the rest their update."""

    parts: tuple[Defended, ...]

    @property
    def objective(self) -> str:
        return "cosine" if any(part.objective == "cosine" for part in self.parts) else "squared"

    @property
    def noise_std(self) -> float:
        """Of all that add some."""
        return sum(part.noise_std**2 for part in self.parts) ** 0.5

    def expected(self, each: Tensors) -> Tensors:
        for part in self.parts:
            each = {name: found[:, None] for name, found in part.expected(each).items()}
        return {name: found[:, 0] for name, found in each.items()}

    def __call__(self, each: Tensors, generator: torch.Generator | None = None) -> Tensors:
        for part in self.parts:
            each = {name: found[:, None] for name, found in part(each, generator).items()}
        return {name: found[:, 0] for name, found in each.items()}

    def adapted(self, problem: Problem) -> Problem:
        """By the last, whose marks are on the update."""
        return self.parts[-1].adapted(problem)


def made(
    *,
    noise: float = 0.0,
    clip: float | None = None,
    prune: float = 0.0,
    bits: int | None = None,
    batch: int = 1,
) -> Defended | None:
    """Clip and noise, then prune, then quantise: as much as is asked for. ``noise`` is a multiplier with a ``clip``, else absolute.

    >>> made(noise=0.5, clip=1.0, bits=8)
    Several(parts=(Clipped(bound=1.0, noise=0.5, batch=1), Quantised(bits=8)))
    """
    parts: list[Defended] = []
    if clip is not None:
        parts.append(Clipped(clip, noise, batch))
    elif noise:
        parts.append(Noise(noise))
    if prune:
        parts.append(Pruned(prune))
    if bits is not None:
        parts.append(Quantised(bits))
    return Several(tuple(parts)) if len(parts) > 1 else parts[0] if parts else None


def added(update: Tensors, noise_std: float, generator: torch.Generator | None) -> Tensors:
    """Gaussian noise on each entry: secret, or of a generator for an experiment that can be repeated."""
    if not noise_std:
        return update
    secret = Secret()
    found = {}
    for name, each in update.items():
        if generator is None:
            drawn = secret.normal(tuple(each.shape), each.device)
        else:
            drawn = torch.randn(
                each.shape, generator=generator, dtype=torch.float64, device=generator.device
            )
        found[name] = (each.double() + noise_std * drawn.to(each.device)).to(each.dtype)
    return found


def _along(value: Tensor, like: Tensor) -> Tensor:
    """[N] as [N, 1, ...]."""
    return value.view(-1, *(1 for _ in like.shape[1:]))
