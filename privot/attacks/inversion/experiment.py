"""An experiment on your own records: what do updates with this model and defense leak?

The tiers, from the cheapest: label recovery, the Cramér-Rao bound, the closed form, and a search.
The result is the worst of them, since a search that fails does not show that an update is safe.
Reconstructions are as secret as the records.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from privot.attacks.inversion.attacks import invert
from privot.attacks.inversion.cramer_rao import compute_cramer_rao_bound
from privot.attacks.inversion.experiment_result import InversionResult
from privot.attacks.inversion.experiment_settings import InversionSettings
from privot.attacks.inversion.labels import recover_labels
from privot.attacks.inversion.leakage_result import CRAMER_RAO_TIER
from privot.attacks.inversion.models import INVERSION_MODELS, sample_initial_weights
from privot.attacks.inversion.problem import Problem
from privot.attacks.inversion.rgap import reconstruct_by_rgap
from privot.attacks.inversion.scoring import compute_label_overlap, score_reconstruction
from privot.attacks.inversion.spear import reconstruct_by_spear
from privot.data.dataset import Public, Sensitive
from privot.errors import PrivotError, SettingError
from privot.progress import Progress, ignore_progress
from privot.runtime import Runtime

TRACE_STEPS = (1, 10, 20, 50, 100, 200, 400)
TARGET_PSNRS = (20, 15, 10)  # decibels for which the necessary noise is reported


@dataclass(frozen=True)
class InversionExperiment(InversionSettings):
    """An attack on the updates of untrained models, one model for each victim.

    See `InversionSettings` for the settings.
    """

    def build_problem(
        self, dataset: Sensitive | Public, device: torch.device
    ) -> tuple[Problem, Tensor, Tensor, Tensor | None]:
        """Build the updates of random records.

        Args:
            dataset: The records.
            device: Device of all tensors.

        Returns:
            The problem, the images [N, batch, c, h, w] and labels [N, batch] behind it, and the
            labels if the attacker knows them, else None.

        Raises:
            SettingError: There are too few records.
        """
        generator = torch.Generator().manual_seed(self.seed)
        count = self.num_victims * self.batch_size
        if dataset._count_records() < count:
            raise SettingError(
                f"num_victims={self.num_victims}, batch_size={self.batch_size}: {count} records "
                "are needed, but the data set has fewer. Reduce one of the two."
            )
        order = torch.randperm(dataset._count_records(), generator=generator)
        records = dataset._read_records(order[:count].sort().values)
        images = records.images.unflatten(0, (self.num_victims, self.batch_size))
        labels = records.labels.unflatten(0, (self.num_victims, self.batch_size))
        build_model, loss_fn, init_bound = INVERSION_MODELS[self.model]
        num_logits = 1 if self.has_one_logit else dataset.spec.num_classes
        model: nn.Module = build_model(dataset.spec.shape, num_logits).to(device)
        labels = labels % 2 if self.has_one_logit else labels
        weights = {
            name: weight.to(device)
            for name, weight in sample_initial_weights(
                model, self.num_victims, generator, init_bound
            ).items()
        }
        images = images.to(device)
        labels = labels.to(device)
        problem = Problem.from_images(
            model, loss_fn, images, labels, weights, self.defense, generator=generator
        )
        return problem, images, labels, labels if self.has_one_logit else None

    def run(
        self,
        dataset: Sensitive | Public,
        runtime: Runtime | None = None,
        progress: Progress = ignore_progress,
    ) -> InversionResult:
        """Run all tiers.

        Args:
            dataset: The records whose updates are attacked.
            runtime: Where to compute.
            progress: Shows the progress.

        Returns:
            The figures of all tiers and the reconstructions of the search.
        """
        device = (runtime or Runtime()).torch_device
        problem, images, labels, known_labels = self.build_problem(dataset, device)
        label_accuracy = 1.0
        if known_labels is None:
            overlap = compute_label_overlap(recover_labels(problem, self.seed), labels)
            label_accuracy = float(overlap.mean())
        checked = torch.arange(min(self.num_checked, self.num_victims), device=images.device)
        tiers: dict[str, Any] = {
            "labels": {"label_accuracy": label_accuracy, "given": known_labels is not None}
        }
        if len(checked):
            truth = (images[checked], labels[checked])
            progress("Cramér-Rao bound", 0, 1)
            tiers[CRAMER_RAO_TIER] = self._run_cramer_rao(problem.select(checked), *truth)
            progress("Cramér-Rao bound", 1, 1)
            tiers["closed form"] = self._run_exact_attack(problem.select(checked), *truth)
        search = self.configure_attack()
        start = time.perf_counter()
        reconstruction = invert(
            self._adapt_problem(problem),
            search,
            labels=known_labels,
            restarts=self.restarts,
            seed=self.seed,
            trace_steps=TRACE_STEPS,
            progress=progress,
        )
        seconds = time.perf_counter() - start
        scores = score_reconstruction(reconstruction, images, labels, self.threshold)
        tiers["search"] = scores.to_json() | {
            "steps": float(reconstruction.steps.double().mean()),
            "seconds": seconds,
            "objective": search.phases[-1].objective,
        }
        is_public = isinstance(dataset, Public)
        return InversionResult(self, search.title, tiers, reconstruction, scores, images, is_public)

    def _adapt_problem(self, problem: Problem) -> Problem:
        if self.is_adaptive and self.defense is not None:
            return self.defense.adapt_problem(problem)
        return problem

    def _run_cramer_rao(self, problem: Problem, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """Predict the error of the best attack, as the median over the victims.

        Args:
            problem: Some updates.
            images: Behind them [n, batch, c, h, w].
            labels: [n, batch].

        Returns:
            The figures of the tier.
        """
        defense = self.defense
        try:
            bound = compute_cramer_rao_bound(problem, images, labels, defense)
        except PrivotError as error:
            return {"victims": len(images), "refused": str(error)}
        noise_std = 0.0 if defense is None else defense.noise_std
        rank = int(bound.rank.min())
        num_pixels = images[0].numel()
        # Without noise and with full rank the prediction would be an error of 0.
        median_mse = None
        if noise_std or rank < num_pixels:
            median_mse = float(bound.predict_mse(noise_std).median())
        return {
            "victims": len(images),
            "noise_std": noise_std,
            "rank": rank,
            "num_pixels": num_pixels,
            "median_mse": median_mse,
            "noise_std_for_psnr": {
                str(target): float(bound.find_noise_std(target).max()) for target in TARGET_PSNRS
            },
        }

    def _run_exact_attack(self, problem: Problem, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """Run the closed-form attack: R-GAP for one image, SPEAR for a batch.

        Args:
            problem: Some updates.
            images: Behind them [n, batch, c, h, w].
            labels: [n, batch].

        Returns:
            The figures of the tier.
        """
        try:
            if self.batch_size == 1:
                reconstruction = reconstruct_by_rgap(problem)
            else:
                reconstruction = reconstruct_by_spear(problem, seed=self.seed)
        except PrivotError as error:
            return {"victims": len(images), "refused": str(error)}
        return score_reconstruction(reconstruction, images, labels, self.threshold).to_json()
