"""Defenses that send less of a gradient: pruning and quantization. They have no guarantee."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from privot.attacks.inversion.problem import Problem
from privot.attacks.inversion.problem_checks import TensorDict
from privot.errors import SettingError


@dataclass(frozen=True)
class PruningDefense:
    """Set the smallest entries of each tensor of the mean gradient to 0.

    An attacker sees which entries they are, and knows that they are smaller than all entries that
    were sent.

    Attributes:
        prune_fraction: Share of the entries that are set to 0.
    """

    prune_fraction: float
    objective: ClassVar[str] = "squared"
    noise_std: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.prune_fraction < 1:
            raise SettingError(
                f"prune_fraction={self.prune_fraction}: a share from 0 to below 1 is needed."
            )

    def apply_without_noise(self, image_gradients: TensorDict) -> TensorDict:
        return {
            name: self._zero_smallest(gradient)
            for name, gradient in _average_gradients(image_gradients).items()
        }

    def _zero_smallest(self, entries: Tensor) -> Tensor:
        sizes = entries.flatten(1).detach().abs()
        num_pruned = int(self.prune_fraction * sizes.shape[1])
        if not num_pruned:
            return entries
        largest_pruned = sizes.sort(1).values[:, num_pruned - 1 : num_pruned]
        return entries * (sizes > largest_pruned).view(entries.shape)

    def __call__(
        self, image_gradients: TensorDict, generator: torch.Generator | None = None
    ) -> TensorDict:
        return self.apply_without_noise(image_gradients)

    def adapt_problem(self, problem: Problem) -> Problem:
        """Let an entry that is 0 match any value up to the smallest entry that is not 0."""
        slack = {}
        for name, update in problem.update.items():
            smallest = torch.where(update == 0, torch.inf, update.abs()).flatten(1).amin(1)
            smallest = torch.where(smallest.isfinite(), smallest, 0.0)
            slack[name] = torch.where(update == 0, _expand_like(smallest, update), 0.0)
        return replace(problem, slack=slack)


@dataclass(frozen=True)
class QuantizationDefense:
    """Round the entries of the mean gradient to a few bits.

    The values are evenly spaced between minus and plus the largest entry of the tensor; with one
    bit they are the sign times the mean absolute entry. An attacker knows the cell of each entry.

    Attributes:
        bits: Bits for each entry, 1 to 32.
    """

    bits: int
    objective: ClassVar[str] = "squared"
    noise_std: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 32:
            raise SettingError(f"bits={self.bits}: a number from 1 to 32 is needed.")

    def apply_without_noise(self, image_gradients: TensorDict) -> TensorDict:
        """Average without rounding.

        Rounding has no derivative. The Cramér-Rao bound counts it as noise: see
        `compute_rounding_std`.
        """
        return _average_gradients(image_gradients)

    def __call__(
        self, image_gradients: TensorDict, generator: torch.Generator | None = None
    ) -> TensorDict:
        return {
            name: self._quantize(gradient)
            for name, gradient in self.apply_without_noise(image_gradients).items()
        }

    def _quantize(self, entries: Tensor) -> Tensor:
        if self.bits == 1:
            return entries.sign() * _expand_like(entries.flatten(1).abs().mean(1), entries)
        step = _expand_like(self._compute_step_size(entries), entries)
        return (entries / step).round() * step

    def _compute_step_size(self, entries: Tensor) -> Tensor:
        """Compute the step [N]; rounding the entries does not change it."""
        return entries.flatten(1).abs().amax(1).clamp(min=1e-30) / (2 ** (self.bits - 1) - 1)

    def adapt_problem(self, problem: Problem) -> Problem:
        """Let an entry match any value in its cell; with one bit cells are unbounded."""
        if self.bits == 1:
            return problem
        slack = {
            name: _expand_like(self._compute_step_size(update) / 2, update).expand_as(update)
            for name, update in problem.update.items()
        }
        return replace(problem, slack=slack)

    def compute_rounding_std(self, update: TensorDict) -> TensorDict:
        """Compute the standard deviation {name: [N]} of rounding: step / sqrt(12)."""
        return {
            name: self._compute_step_size(gradient) / 12**0.5 for name, gradient in update.items()
        }


def _average_gradients(image_gradients: TensorDict) -> TensorDict:
    """Average gradients {name: [N, batch, ...]} over the batch."""
    return {name: gradient.mean(1) for name, gradient in image_gradients.items()}


def _expand_like(values: Tensor, reference: Tensor) -> Tensor:
    """Reshape [N] to [N, 1, ...], with the number of axes of ``reference``."""
    return values.view(-1, *(1 for _ in reference.shape[1:]))
