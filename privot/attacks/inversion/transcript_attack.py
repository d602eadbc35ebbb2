r"""Do the gradients that a client sent in a federated run reveal its images?

Attacks on the transcript, which contains what the server received. For each class c, from all
gradients a_c of the client for images of that class:

    summed     m_c + s * (sum of a_c, as pixels), with the one s that is best for the true images:
               no attacker does better on this line;
    linear     m_c + A a_c, the linear least squares estimate, learned from simulated clients that
               hold other records.

m_c is the mean of held-out images of the class, which anyone has without the transcript. Two
controls attack gradients that are not sanitized: the linear estimate from raw input gradients, and
the search for an image from the critic's raw weight gradient, as in plain federated learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from privot.attacks.inversion.attacks import resolve_inversion_attack
from privot.attacks.inversion.critic_inversion import invert_critic_gradient
from privot.attacks.inversion.linear_estimator import LinearEstimator
from privot.attacks.inversion.problem import Reconstruction
from privot.attacks.inversion.scoring import score_reconstruction
from privot.attacks.inversion.simulated_clients import simulate_clients
from privot.attacks.inversion.transcript import ClientTranscript
from privot.attacks.inversion.transcript_result import (
    LINEAR_ESTIMATE,
    MEAN_IMAGE,
    RAW_INPUT_GRADIENT,
    RAW_WEIGHT_GRADIENT,
    SUMMED_GRADIENTS,
    TranscriptResult,
    compute_noise_std,
)
from privot.attacks.inversion.transcript_settings import TranscriptAttackSettings
from privot.attacks.inversion.transcript_statistics import (
    clip_input_gradients,
    compute_mean_images,
    fit_gradient_scale,
    sample_same_labels,
    transform_to_pixels,
)
from privot.components.critic_training import CriticState
from privot.data.dataset import Public, Records, Sensitive
from privot.errors import DataError
from privot.federated.messages import Terms
from privot.progress import Progress, ignore_progress
from privot.runtime import Runtime


@dataclass(frozen=True)
class TranscriptAttack(TranscriptAttackSettings):
    """An attack on what one client sent.

    See `TranscriptAttackSettings` for the settings.
    """

    def run(
        self,
        transcript: ClientTranscript,
        dataset: Sensitive | Public,
        holdout_dataset: Sensitive | Public,
        runtime: Runtime | None = None,
        progress: Progress = ignore_progress,
    ) -> TranscriptResult:
        """Run all attacks.

        Args:
            transcript: What the client received and sent.
            dataset: The records of the client.
            holdout_dataset: Records of others.
            runtime: Where to compute.
            progress: Shows the progress.

        Returns:
            The figures and the images of all attacks.

        Raises:
            DataError: The records do not fit the terms of the run.
        """
        terms = transcript.terms
        for records_of in (dataset, holdout_dataset):
            _check_fits_terms(records_of, terms)
        device = (runtime or Runtime()).torch_device
        generator = torch.Generator().manual_seed(self.seed)
        records = dataset._read_records(slice(None))
        holdout_records = holdout_dataset._read_records(slice(None))
        class_means, has_class = compute_mean_images(holdout_records, terms.num_classes)
        if not has_class[records.labels].any():
            raise DataError(
                "The held-out records have no record of any class that the client has. Give other "
                "held-out records."
            )
        simulation = self._simulate_clients(
            transcript, records, holdout_records, class_means, generator, device, progress
        )
        true_records = self._select_scored_records(records, has_class, generator)
        gradient_sums = transform_to_pixels(terms, transcript.values.sum((0, 2)))
        scale = fit_gradient_scale(true_records, class_means, gradient_sums)
        estimator = simulation.estimator
        estimates = {
            MEAN_IMAGE: class_means,
            SUMMED_GRADIENTS: class_means + scale * gradient_sums,
            LINEAR_ESTIMATE: class_means
            + estimator.estimate_images(
                transcript.values,
                clip_input_gradients(terms, simulation.gradients),
                compute_noise_std(terms),
                generator,
            ),
            RAW_INPUT_GRADIENT: class_means
            + estimator.estimate_images(
                simulation.client_gradients, simulation.gradients, 0.0, generator
            ),
        }
        tiers: dict[str, Any] = {"labels": {"label_accuracy": 1.0, "given": True}}
        reconstructions = {}
        for name, class_images in estimates.items():
            reconstructions[name] = class_images[true_records.labels].clamp(0, 1)
            tiers[name] = self._score_images(reconstructions[name], true_records)
        checked_records = Records(
            true_records.images[: self.num_checked], true_records.labels[: self.num_checked]
        )
        found_images = invert_critic_gradient(
            terms,
            {name: values[0] for name, values in simulation.state.items()},
            checked_records,
            resolve_inversion_attack(self.attack),
            device,
            self.seed,
            progress,
        )
        tiers[RAW_WEIGHT_GRADIENT] = self._score_images(found_images, checked_records)
        reconstructions[RAW_WEIGHT_GRADIENT] = found_images
        is_public = isinstance(dataset, Public) and isinstance(holdout_dataset, Public)
        return TranscriptResult(
            self, transcript, tiers, reconstructions, true_records.images, is_public
        )

    def _simulate_clients(
        self,
        transcript: ClientTranscript,
        records: Records,
        holdout_records: Records,
        class_means: Tensor,
        generator: torch.Generator,
        device: torch.device,
        progress: Progress,
    ) -> _Simulation:
        """Simulate clients with held-out records, and a client with the true records.

        Args:
            transcript: What the client received.
            records: Records of the client.
            holdout_records: Records of others, from which simulated clients get records with the
                client's labels.
            class_means: [classes, c, h, w].
            generator: Random generator of all random numbers.
            device: Where to compute.
            progress: Shows the progress.

        Returns:
            The gradients of the simulated clients, and the linear estimator.
        """
        terms = transcript.terms
        num_records = min(
            len(records.labels), terms.settings.records_per_critic, len(holdout_records.labels)
        )
        order = torch.randperm(len(records.labels), generator=generator)
        target_labels = records.labels[order[:num_records]]
        indices = torch.stack(
            [
                sample_same_labels(holdout_records, target_labels, generator)
                for _ in range(self.num_simulated_clients)
            ]
        )  # [clients, num_records]
        images = holdout_records.images[indices].to(device)
        labels = holdout_records.labels[indices].to(device)
        gradients, state = simulate_clients(
            terms, transcript.images, images, labels, generator, progress
        )
        spread = torch.arange(num_records) * len(records.labels) // num_records
        client_gradients, _ = simulate_clients(
            terms,
            transcript.images,
            records.images[spread][None].to(device),
            records.labels[spread][None].to(device),
            generator,
        )
        estimator = LinearEstimator(images, labels, class_means)
        return _Simulation(estimator, gradients, client_gradients[0], state)

    def _select_scored_records(
        self, records: Records, has_class: Tensor, generator: torch.Generator
    ) -> Records:
        """Select random records whose class has a held-out record.

        Args:
            records: Records of the client.
            has_class: bool [classes].
            generator: Random generator of the selection.

        Returns:
            At most ``num_images`` records.
        """
        scorable = has_class[records.labels].nonzero().flatten()
        order = torch.randperm(len(scorable), generator=generator)
        selection = scorable[order[: self.num_images].sort().values]
        return Records(records.images[selection], records.labels[selection])

    def _score_images(self, images: Tensor, true_records: Records) -> dict[str, Any]:
        """Score images [count, c, h, w] against the true records."""
        ones = torch.ones(len(images))
        reconstruction = Reconstruction(
            images[:, None], true_records.labels[:, None], ones.long(), ones
        )
        return score_reconstruction(
            reconstruction,
            true_records.images[:, None],
            true_records.labels[:, None],
            self.threshold,
        ).to_json()


@dataclass(frozen=True)
class _Simulation:
    """Gradients of simulated clients.

    Attributes:
        estimator: Learned from the held-out records.
        gradients: Raw input gradients of clients with held-out records [clients, rounds, ...].
        client_gradients: Gradients of a client with the true records [rounds, ...].
        state: State of the critics with held-out records.
    """

    estimator: LinearEstimator
    gradients: Tensor
    client_gradients: Tensor
    state: CriticState


def _check_fits_terms(dataset: Sensitive | Public, terms: Terms) -> None:
    if (dataset.spec.shape, dataset.spec.num_classes) != (terms.shape, terms.num_classes):
        raise DataError(
            f"The run is about images {list(terms.shape)} in {terms.num_classes} classes, but "
            f"{dataset.name} has images {list(dataset.spec.shape)} in {dataset.spec.num_classes} "
            "classes. Give the records that were used in the run."
        )
