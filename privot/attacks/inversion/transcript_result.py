"""The result of an attack on the transcript of a federated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from privot.attacks.inversion.transcript import ClientTranscript
from privot.attacks.inversion.transcript_settings import TranscriptAttackSettings
from privot.federated.messages import Terms

# the attacks
MEAN_IMAGE = "mean image"
SUMMED_GRADIENTS = "summed gradients"
LINEAR_ESTIMATE = "linear estimate"
# the controls
RAW_INPUT_GRADIENT = "raw input gradient"
RAW_WEIGHT_GRADIENT = "raw weight gradient"
SENSITIVITY = 2  # two gradients of norm 1 differ by at most 2
MIN_PSNR_GAIN = 1.0  # a smaller gain over the mean image, in decibels, does not count as a leak


def compute_noise_std(terms: Terms) -> float:
    """Compute the standard deviation of the noise that clients add to each gradient value."""
    return SENSITIVITY * float(terms.settings.noise_multiplier or 0.0)


@dataclass(frozen=True)
class TranscriptResult:
    """What the gradients in a transcript reveal.

    Attributes:
        transcript_attack: The settings.
        transcript: What the client received and sent.
        tiers: {name: figures}.
        reconstructions: {name: images [count, c, h, w]}.
        true_images: [count, c, h, w].
        publishable: Whether all records are public.
    """

    transcript_attack: TranscriptAttackSettings
    transcript: ClientTranscript
    tiers: dict[str, Any]
    reconstructions: dict[str, Tensor]
    true_images: Tensor
    publishable: bool

    @property
    def title(self) -> str:
        """What was attacked."""
        rounds = len(self.transcript.values)
        num_values = self.transcript.values[0].numel()
        return (
            f"what {self.transcript.client_name} sent in {rounds} rounds, {num_values} noisy "
            "values each"
        )

    @property
    def best_attack(self) -> str:
        """The attack on the transcript with the highest PSNR."""
        return max((SUMMED_GRADIENTS, LINEAR_ESTIMATE), key=lambda name: self.tiers[name]["psnr"])

    @property
    def psnr_gain(self) -> float:
        """PSNR of the best attack minus that of the mean image, in decibels."""
        return float(self.tiers[self.best_attack]["psnr"] - self.tiers[MEAN_IMAGE]["psnr"])

    @property
    def summary(self) -> str:
        """The result in one line."""
        control = (
            f"a raw weight gradient would give {self.tiers[RAW_WEIGHT_GRADIENT]['psnr']:.1f} dB"
        )
        figures = (
            f"{self.tiers[self.best_attack]['psnr']:.1f} dB, {self.psnr_gain:+.2f} dB over the "
            "mean image"
        )
        if self.psnr_gain > MIN_PSNR_GAIN:
            return f"these gradients leak the images: {self.best_attack}, {figures}; {control}"
        return (
            f"no attack exceeds the mean image by {MIN_PSNR_GAIN:g} dB, which is no proof of "
            f"safety (best: {figures}); {control}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything except the images."""
        terms = self.transcript.terms
        return {
            "inversion": asdict(self.transcript_attack)
            | {"model": "critic", "num_victims": len(self.true_images)},
            "title": self.title,
            "tiers": self.tiers,
            "defense": {
                "clip_norm": 1.0,
                "noise_multiplier": terms.settings.noise_multiplier,
                "noise_std": compute_noise_std(terms),
            },
            "guarantee": None,
            "plan": terms.plan().to_json(),
            "client": self.transcript.client_name,
            "run": terms.run_id,
            "rounds": len(self.transcript.values),
            "bytes_down": self.transcript.traffic_bytes[0],
            "bytes_up": self.transcript.traffic_bytes[1],
            "worst_tier": self.best_attack,
            "psnr_gain": self.psnr_gain,
            "summary": self.summary,
            "publishable": self.publishable,
        }

    def stack_snapshots(self, num_rows: int = 8) -> Tensor:
        """Stack images [columns, rows, c, h, w]: one column for each attack, then the truth."""
        num_rows = min(num_rows, len(self.reconstructions[RAW_WEIGHT_GRADIENT]))
        columns = [*self.reconstructions.values(), self.true_images]
        return torch.stack([images[:num_rows] for images in columns])

    def list_column_titles(self) -> Sequence[str]:
        """List the titles of the columns of `stack_snapshots`."""
        return [*self.reconstructions, "true"]
