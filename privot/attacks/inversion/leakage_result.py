"""The result of `check_leakage`: what each tier of attacks found on one update."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

CRAMER_RAO_TIER = "cramer_rao_bound"
EXACT_PSNR = 60.0  # decibels, a tenth of a gray level: an exact copy
MAX_PSNR = 200.0  # stands for an error of 0


@dataclass(frozen=True)
class TierResult:
    """What one kind of attack found.

    Attributes:
        name: Name of the tier.
        mse: Smallest mean squared error over the images of the batch, clamped to the bounds; of the
            Cramér-Rao bound the mean over the batch that the best attack is expected to have. None
            where the tier does not apply.
        note: Details, or the reason why the tier does not apply.
    """

    name: str
    mse: float | None
    note: str = ""

    @property
    def psnr(self) -> float | None:
        """The error in decibels; 200 stands for exact."""
        if self.mse is None:
            return None
        decibels = -10 * torch.tensor(self.mse, dtype=torch.float64).log10().item()
        return min(MAX_PSNR, decibels)


@dataclass(frozen=True)
class LeakageCheck:
    """The result of `check_leakage`. All of it is as secret as the batch.

    Attributes:
        gradient_cosine: Cosine of the update and the batch's gradient.
        gradient_scale: Size of the update relative to the gradient.
        noise_std: Standard deviation of the remaining difference, on each entry.
        label_accuracy: Share of the labels that were recovered from the update.
        tiers: Results of the tiers that were tried.
        threshold: Mean squared error below which an image counts as leaked.
        noise_std_for_psnr: {decibels: noise_std}, the noise that would limit the best attack to
            this PSNR.
        images: [batch, c, h, w], the best reconstruction, or None.
    """

    gradient_cosine: float
    gradient_scale: float
    noise_std: float
    label_accuracy: float
    tiers: tuple[TierResult, ...]
    threshold: float
    noise_std_for_psnr: dict[int, float] = field(default_factory=dict)
    images: Tensor | None = None

    @property
    def worst_tier(self) -> TierResult | None:
        """The tier with the smallest error."""
        applicable = [tier for tier in self.tiers if tier.mse is not None]
        return min(applicable, key=lambda tier: tier.mse or 0.0, default=None)

    @property
    def is_leaking(self) -> bool:
        """Whether the error of any tier is below the threshold."""
        return self.worst_tier is not None and (self.worst_tier.mse or 0.0) < self.threshold

    @property
    def summary(self) -> str:
        """The result in one line."""
        labels = f"{100 * self.label_accuracy:.0f} % of the labels can be recovered"
        tier = self.worst_tier
        if tier is None or tier.psnr is None:
            return f"no tier applies to this model, which does not mean that it is safe; {labels}"
        quality = "an exact copy" if tier.psnr >= EXACT_PSNR else f"{tier.psnr:.1f} dB"
        if tier.name == CRAMER_RAO_TIER:
            best = f"the Cramér-Rao bound predicts {quality}"
        else:
            best = f"{tier.name} reaches {quality}"
        if self.is_leaking:
            return f"this update leaks: {best}; {labels}"
        return f"no tier reconstructs an image, which is no proof of safety: {best}; {labels}"

    def to_json(self) -> dict[str, Any]:
        """Return everything except the images."""
        return asdict(replace(self, images=None)) | {
            "tiers": [asdict(tier) | {"psnr": tier.psnr} for tier in self.tiers],
            "is_leaking": self.is_leaking,
            "summary": self.summary,
        }
