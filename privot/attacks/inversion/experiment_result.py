"""The result of an inversion experiment: figures of all tiers, a summary, and images."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from privot.attacks.inversion.defense_guarantee import derive_defense_guarantee
from privot.attacks.inversion.experiment_settings import InversionSettings
from privot.attacks.inversion.leakage_result import CRAMER_RAO_TIER
from privot.attacks.inversion.problem import Reconstruction
from privot.attacks.inversion.scoring import ReconstructionScores
from privot.release import Guarantee

EXACT_MSE = 1e-12
DEFENSE_SETTINGS = ("clip_norm", "noise_scale", "prune_fraction", "bits")


@dataclass(frozen=True)
class InversionResult:
    """The result of an `InversionExperiment`.

    Attributes:
        experiment: The settings.
        title: Title of the attack.
        tiers: {name: figures}.
        reconstruction: Reconstruction of the search.
        scores: Scores of the reconstruction.
        true_images: [N, batch, c, h, w].
        publishable: Whether the images come from public data.
    """

    experiment: InversionSettings
    title: str
    tiers: dict[str, dict[str, Any]]
    reconstruction: Reconstruction
    scores: ReconstructionScores
    true_images: Tensor
    publishable: bool

    @property
    def worst_tier(self) -> str:
        """The tier with the smallest median error."""
        errors = {
            name: figures["median_mse"]
            for name, figures in self.tiers.items()
            if figures.get("median_mse") is not None
        }
        return min(errors, key=lambda name: errors[name])

    @property
    def summary(self) -> str:
        """The result in one line."""
        error = self.tiers[self.worst_tier]["median_mse"]
        if error < EXACT_MSE:
            quality = "exactly"
        else:
            quality = f"with {-10 * torch.tensor(error).log10():.1f} dB in the median"
        labels = f"{100 * self.tiers['labels']['label_accuracy']:.0f} % of the labels"
        if error < self.experiment.threshold:
            if self.worst_tier == CRAMER_RAO_TIER:
                finding = f"the Cramér-Rao bound predicts images {quality}"
            else:
                finding = f"{self.worst_tier} reconstructs images {quality}"
            return f"these updates leak: {finding}; {labels} are recovered"
        return (
            f"no tier has a median MSE below {self.experiment.threshold:g} (best: "
            f"{self.worst_tier}, {quality}), which is no proof of safety; {labels} leak"
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything except the images."""
        experiment = self.experiment
        defense: dict[str, Any] = {
            name: getattr(experiment, name)
            for name in DEFENSE_SETTINGS
            if getattr(experiment, name)
        }
        if experiment.defense is not None:
            defense["noise_std"] = experiment.defense.noise_std
        training = experiment.training and asdict(experiment.training)
        return {
            "inversion": asdict(experiment) | {"training": training},
            "title": self.title,
            "defense": defense,
            "guarantee": self._describe_guarantee(),
            "tiers": self.tiers,
            "worst_tier": self.worst_tier,
            "summary": self.summary,
            "publishable": self.publishable,
        }

    def _describe_guarantee(self) -> dict[str, Any] | None:
        """Describe the guarantee of a run with this defense; None without a run."""
        if self.experiment.training is None:
            return None
        guarantee = derive_defense_guarantee(self.experiment.defense, self.experiment.training)
        if isinstance(guarantee, Guarantee):
            return {
                "kind": "Guarantee",
                "epsilon": guarantee.epsilon,
                "delta": guarantee.delta,
                "neighbours": "add or remove one record",
            }
        return {"kind": type(guarantee).__name__} | asdict(guarantee)

    def stack_snapshots(self, num_rows: int = 8) -> Tensor:
        """Stack images of the first victims [columns, rows, c, h, w].

        One column for each step of the trace, one for the end of the search, and one for the truth.
        """
        trace = [images for _, images in self.reconstruction.trace or ()]
        columns = (*trace, self.reconstruction.images, self.true_images)
        return torch.stack([images[:num_rows, 0].clamp(0, 1) for images in columns])

    def list_column_titles(self) -> list[str]:
        """List the titles of the columns of `stack_snapshots`."""
        return [*(str(step) for step, _ in self.reconstruction.trace or ()), "end", "true"]
