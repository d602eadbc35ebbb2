"""What a client may do to its gradients before it sends them, and how an attacker adapts to it.

For experiments. A defense turns the gradients of single images {name: [N, batch, ...]} into
updates {name: [N, ...]}. Of these defenses only noise after clipping (`ClippingDefense`) has an
epsilon (see `derive_defense_guarantee`); the others are here because they are used in practice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from privot.attacks.inversion.compression_defenses import PruningDefense, QuantizationDefense
from privot.attacks.inversion.problem import Problem
from privot.attacks.inversion.problem_checks import TensorDict
from privot.errors import SettingError
from privot.privacy.noise import SecretRandom

MAX_SCALE = 1e30  # larger values of noise and clip norms are refused


class GradientDefense(Protocol):
    """The interface of a defense."""

    @property
    def objective(self) -> str:
        """The objective that an attacker who knows the defense minimizes."""

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each entry of the update."""

    def apply_without_noise(self, image_gradients: TensorDict) -> TensorDict:
        """Compute the updates {name: [N, ...]} without noise, differentiably."""

    def __call__(
        self, image_gradients: TensorDict, generator: torch.Generator | None = None
    ) -> TensorDict:
        """Compute the updates {name: [N, ...]} of gradients {name: [N, batch, ...]}."""

    def adapt_problem(self, problem: Problem) -> Problem:
        """Add to a problem what an attacker who knows the defense can read off the updates."""


@dataclass(frozen=True)
class NoiseDefense:
    """Gaussian noise on each entry of the mean gradient.

    Nothing limits the size of the gradient, so there is no guarantee.

    Attributes:
        noise_std: Standard deviation of the noise.

    >>> NoiseDefense(0.0)({"w": torch.ones(1, 2, 3)})
    {'w': tensor([[1., 1., 1.]])}
    """

    noise_std: float
    objective: ClassVar[str] = "squared"

    def __post_init__(self) -> None:
        if not 0 <= self.noise_std < MAX_SCALE:
            raise SettingError(
                f"noise_std={self.noise_std}: a standard deviation of at least 0 is needed."
            )

    def apply_without_noise(self, image_gradients: TensorDict) -> TensorDict:
        return {name: gradient.mean(1) for name, gradient in image_gradients.items()}

    def __call__(
        self, image_gradients: TensorDict, generator: torch.Generator | None = None
    ) -> TensorDict:
        return add_update_noise(
            self.apply_without_noise(image_gradients), self.noise_std, generator
        )

    def adapt_problem(self, problem: Problem) -> Problem:
        return problem


@dataclass(frozen=True)
class ClippingDefense:
    r"""DP-SGD (Abadi et al. 2016): clip the gradient of each image, sum, add noise, and divide.

    The noise on the sum is N(0, (noise_multiplier * clip_norm)^2). The attacker does not know how
    much was clipped, so an adaptive attacker compares directions.

    Attributes:
        clip_norm: Largest L2 norm of one image's gradient.
        noise_multiplier: 0 is clipping only, which for one image changes the scale and is no
            defense.
        batch_size: Number by which the sum is divided.
    """

    clip_norm: float
    noise_multiplier: float = 0.0
    batch_size: int = 1
    objective: ClassVar[str] = "cosine"

    def __post_init__(self) -> None:
        if (
            not 0 < self.clip_norm < MAX_SCALE
            or not 0 <= self.noise_multiplier < MAX_SCALE
            or self.batch_size < 1
        ):
            raise SettingError(
                f"clip_norm={self.clip_norm}, noise_multiplier={self.noise_multiplier}, "
                f"batch_size={self.batch_size}: a norm above 0, a multiplier of at least 0 and a "
                "batch of at least 1 are needed."
            )

    @property
    def noise_std(self) -> float:
        """On each entry of the update: noise_multiplier * clip_norm / batch_size."""
        return self.noise_multiplier * self.clip_norm / self.batch_size

    def apply_without_noise(self, image_gradients: TensorDict) -> TensorDict:
        """Divide the clipped sum by the planned batch size.

        privacy: the divisor does not depend on the size of the batch that was sampled.
        """
        squared_norms = torch.stack(
            [gradient.flatten(2).square().sum(2) for gradient in image_gradients.values()]
        ).sum(0)
        norms = squared_norms.clamp(min=1e-60).sqrt()  # [N, batch]
        factors = (self.clip_norm / norms).clamp(max=1.0)
        return {
            name: torch.einsum("nb...,nb->n...", gradient, factors) / self.batch_size
            for name, gradient in image_gradients.items()
        }

    def __call__(
        self, image_gradients: TensorDict, generator: torch.Generator | None = None
    ) -> TensorDict:
        return add_update_noise(
            self.apply_without_noise(image_gradients), self.noise_std, generator
        )

    def adapt_problem(self, problem: Problem) -> Problem:
        return problem


@dataclass(frozen=True)
class Pipeline:
    """Several defenses, one after another.

    Attributes:
        defenses: The first gets the gradients of single images, the others the update before them.
    """

    defenses: tuple[GradientDefense, ...]

    @property
    def objective(self) -> str:
        is_cosine = any(defense.objective == "cosine" for defense in self.defenses)
        return "cosine" if is_cosine else "squared"

    @property
    def noise_std(self) -> float:
        """Standard deviation of the sum of all noise."""
        return sum(defense.noise_std**2 for defense in self.defenses) ** 0.5

    def apply_without_noise(self, image_gradients: TensorDict) -> TensorDict:
        for defense in self.defenses:
            update = defense.apply_without_noise(image_gradients)
            image_gradients = {name: gradient[:, None] for name, gradient in update.items()}
        return {name: gradient[:, 0] for name, gradient in image_gradients.items()}

    def __call__(
        self, image_gradients: TensorDict, generator: torch.Generator | None = None
    ) -> TensorDict:
        for defense in self.defenses:
            update = defense(image_gradients, generator)
            image_gradients = {name: gradient[:, None] for name, gradient in update.items()}
        return {name: gradient[:, 0] for name, gradient in image_gradients.items()}

    def adapt_problem(self, problem: Problem) -> Problem:
        """Adapt to the last defense, which determined the entries that were sent."""
        return self.defenses[-1].adapt_problem(problem)


def build_defense(
    *,
    noise_scale: float = 0.0,
    clip_norm: float | None = None,
    prune_fraction: float = 0.0,
    bits: int | None = None,
    batch_size: int = 1,
) -> GradientDefense | None:
    """Build the defense that clips and adds noise, then prunes, then quantizes, as requested.

    Args:
        noise_scale: With ``clip_norm`` the noise multiplier, so that the standard deviation on the
            clipped sum is noise_scale * clip_norm; without ``clip_norm`` the standard deviation
            itself, on each entry of the mean gradient.
        clip_norm: Largest L2 norm of one image's gradient. None: no clipping.
        prune_fraction: Share of the entries that are set to 0.
        bits: Bits for each entry. None: no rounding.
        batch_size: Number by which the clipped sum is divided.

    Returns:
        The defense, or None where nothing is requested.

    >>> build_defense(noise_scale=0.5, clip_norm=1.0)
    ClippingDefense(clip_norm=1.0, noise_multiplier=0.5, batch_size=1)
    """
    defenses: list[GradientDefense] = []
    if clip_norm is not None:
        defenses.append(ClippingDefense(clip_norm, noise_scale, batch_size))
    elif noise_scale:
        defenses.append(NoiseDefense(noise_scale))
    if prune_fraction:
        defenses.append(PruningDefense(prune_fraction))
    if bits is not None:
        defenses.append(QuantizationDefense(bits))
    if len(defenses) > 1:
        return Pipeline(tuple(defenses))
    return defenses[0] if defenses else None


def add_update_noise(
    update: TensorDict, noise_std: float, generator: torch.Generator | None
) -> TensorDict:
    """Add Gaussian noise to each entry.

    Args:
        update: {name: [N, ...]}.
        noise_std: Standard deviation.
        generator: Random generator for repeatable experiments. None: secret random numbers.

    Returns:
        The noisy update; without noise the update itself.
    """
    if not noise_std:
        return update
    secret = SecretRandom()
    noisy_update = {}
    for name, gradient in update.items():
        if generator is None:
            noise = secret.normal(tuple(gradient.shape), gradient.device)
        else:
            noise = torch.randn(
                gradient.shape, generator=generator, dtype=torch.float64, device=generator.device
            )
        noisy = gradient.double() + noise_std * noise.to(gradient.device)
        noisy_update[name] = noisy.to(gradient.dtype)
    return noisy_update
