"""The target of an attack: a release as an attacker has it, and the scores that an attack gives.

Releases and controls are attacked by the same code, so a control tests the attack that is run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from privot.attacks.membership import nearest
from privot.attacks.membership.candidates import (
    POPULATION_FRACTION,
    AnyDataset,
    compute_within_class_variance,
    concatenate,
    split_population,
    subsample_indices,
)
from privot.attacks.membership.registry import ATTACKS
from privot.attacks.shadows.observe import TrainedModels, choose_classifier_width, observe
from privot.attacks.shadows.store import ShadowStore
from privot.attacks.shadows.train import train_on_releases
from privot.data.dataset import Records, Sensitive
from privot.data.fingerprint import hash_dataset
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.measures.samples import Samples
from privot.progress import Progress, ignore_progress
from privot.release import Release
from privot.runtime import Runtime

NUM_SAMPLES = 5000  # images that a generator samples
ATTACK_OBSERVATION = {
    "lira": "confidence",
    "lira-offline": "confidence",
    "lira-pixels": "pixels",
    "lira-features": "features",
}
DIVERSITY_SAMPLES = 200  # images of a generator whose diversity is measured


class MembershipScores(NamedTuple):
    """Scores of an attack.

    Attributes:
        members: Scores of candidates that were in the training data.
        nonmembers: Scores of candidates that were not.
    """

    members: np.ndarray
    nonmembers: np.ndarray


class AttackTarget:
    """A release under attack."""

    def __init__(
        self,
        release: Release,
        runtime: Runtime,
        *,
        seed: int = 0,
        epochs: int = 300,
        num_samples: int = NUM_SAMPLES,
        lpips_weight: float | None = None,
        progress: Progress = ignore_progress,
    ):
        """Initialize the target; nothing is computed yet.

        Args:
            release: The release.
            runtime: Device and chunk sizes.
            seed: Seed of all random choices of attacks.
            epochs: Training epochs of the classifier that some attacks need.
            num_samples: Images that a generator samples.
            lpips_weight: Weight of LPIPS in a gradient search, see `gan_leaks.score_white_box`.
            progress: Called with the progress of training and searches.
        """
        self.release = release
        self.runtime = runtime
        self.seed = seed
        self.epochs = epochs
        self.num_samples = num_samples
        self.lpips_weight = lpips_weight
        self.progress = progress
        self._models: TrainedModels | None = None

    @cached_property
    def release_samples(self) -> Samples:
        """Images of the release, sampled on the device. Searches of a generator need none."""
        return Samples.from_release(
            self.release, "the release", self.num_samples, self.seed, self.runtime.torch_device
        )

    def measure_diversity(self, nonmembers: AnyDataset) -> float:
        """Measure how different two released images of one class are.

        Args:
            nonmembers: Non-members to compare with.

        Returns:
            Root mean squared distance of two released images of a class, divided by that of two
            non-members of a class.
        """
        samples = Samples.from_release(
            self.release,
            "the release",
            max(DIVERSITY_SAMPLES, 4 * self.release.spec.num_classes),
            self.seed,
            self.runtime.torch_device,
        )
        chosen = subsample_indices(nonmembers, 10 * DIVERSITY_SAMPLES, self.seed)
        records = nonmembers._read_records(chosen)
        released_variance = compute_within_class_variance(samples.images, samples.labels)
        variance = compute_within_class_variance(records.images, records.labels)
        return math.sqrt(released_variance / variance) if variance else math.inf

    def score(
        self,
        name: str,
        members: AnyDataset,
        nonmembers: AnyDataset,
        *,
        population: AnyDataset | None = None,
        shadow_store: ShadowStore | None = None,
        references: Sequence[AttackTarget] = (),
        num_candidates: int | None = None,
    ) -> MembershipScores:
        """Score candidates with one attack; see `privot.attacks.membership.runner.run_attack`.

        Args:
            name: Name of the attack.
            members: Members.
            nonmembers: Non-members. Those that serve as a population get no score.
            population: Records that no model was trained on.
            shadow_store: Prepared shadows of the candidates.
            references: Releases of other records, whose mean score is subtracted.
            num_candidates: Candidates of each side; None: all.

        Returns:
            The scores.

        Raises:
            SettingError: If the shadows are missing or of other candidates.
        """
        if "shadows" in ATTACKS[name].needs:
            num_members = members._count_records()
            scores = self._score_with_shadows(
                name, shadow_store, concatenate(members, nonmembers), num_members
            )
        else:
            member_records, nonmember_records = (
                side._read_records(subsample_indices(side, num_candidates, self.seed))
                for side in (members, nonmembers)
            )
            num_members = len(member_records.labels)
            population_records = None
            if "population" in ATTACKS[name].needs:
                population_records, nonmember_records = split_population(
                    population, nonmember_records, self.seed
                )
            # One call for both sides: a score may depend on the mean of the candidates, which must
            # be the same for members and non-members.
            candidates = Records(
                *(torch.cat(side) for side in zip(member_records, nonmember_records, strict=True))
            )
            scores = self._score_without_shadows(name, candidates, population_records)
            if references:
                reference_scores = [
                    reference._score_without_shadows(name, candidates, population_records)
                    for reference in references
                ]
                scores = nearest.calibrate_scores(scores, np.stack(reference_scores))
        nonmember_scores = scores[num_members:]
        return MembershipScores(scores[:num_members], nonmember_scores[~np.isnan(nonmember_scores)])

    def _score_without_shadows(
        self, name: str, candidates: Records, population: Records | None
    ) -> np.ndarray:
        """Score candidates with this release only.

        Args:
            name: Name of the attack.
            candidates: The candidates.
            population: Records that no model was trained on, if the attack needs them.

        Returns:
            Scores, [candidates].
        """
        images, labels = candidates
        _, needs, function = ATTACKS[name]
        spec = self.release.spec
        if "model" in needs:
            candidate_spec = Spec(spec.shape, spec.num_classes, flip_invariant=spec.flip_invariant)
            dataset = Sensitive(images.numpy(), labels.numpy(), candidate_spec)
            return self._observe("loss", dataset)
        device = self.runtime.torch_device
        search_options = {"seed": self.seed, "device": device, "progress": self.progress}
        if "weights" in needs:
            return function(
                self.release.artifact,
                images,
                labels,
                lpips_weight=self.lpips_weight,
                **search_options,
            )
        if "generator" in needs:
            return function(self.release.artifact, images, labels, **search_options)
        released = self.release_samples.images.to(device)
        released_labels = self.release_samples.labels.to(device)
        if population is not None:
            return function(
                images,
                labels,
                released,
                released_labels,
                *population,
                net_width=choose_classifier_width(spec),
                seed=self.seed,
            )
        return function(images, released, labels=labels, released_labels=released_labels)

    def _score_with_shadows(
        self,
        name: str,
        shadow_store: ShadowStore | None,
        candidates: AnyDataset,
        num_members: int,
    ) -> np.ndarray:
        """Score candidates by comparison with shadows.

        Args:
            name: Name of the attack.
            shadow_store: Prepared shadows.
            candidates: The candidates, members first.
            num_members: Number of members.

        Returns:
            Scores, [candidates]; NaN for non-members that serve as a population.
        """
        if shadow_store is None:
            raise SettingError(
                f"{name} compares with shadows. Prepare them first (`shadows_for_release` and "
                "`prepare_shadows`)."
            )
        if shadow_store.plan["candidates"]["digest"] != hash_dataset(candidates):
            raise SettingError(
                f"{shadow_store.folder}: its shadows are of other candidates. Choose another "
                "folder."
            )
        membership = shadow_store.load_membership()
        function = ATTACKS[name].function
        observation_name = ATTACK_OBSERVATION.get(name, "loss")
        observation = self._observe(observation_name, candidates)
        shadow_observations = shadow_store.load_observation(observation_name)
        if "population" not in ATTACKS[name].needs:
            return function(observation, shadow_observations, membership)
        order = torch.randperm(
            len(observation) - num_members, generator=torch.Generator().manual_seed(self.seed)
        ).numpy()
        population_size = max(1, round(POPULATION_FRACTION * len(order)))
        population = num_members + order[:population_size]
        scores = function(
            observation,
            shadow_observations,
            membership,
            observation[population],
            shadow_observations[:, population],
            membership[:, population],
        )
        scores[population] = np.nan
        return scores

    def _observe(self, observation: str, candidates: AnyDataset) -> np.ndarray:
        """Observe candidates under a classifier that is trained as those of shadows are."""
        if self._models is None:
            self._models = train_on_releases(
                [self.release],
                [self.seed],
                candidates.spec,
                self.epochs,
                self.num_samples,
                self.runtime,
                self.progress,
            )
        return observe(self._models, candidates, (observation,), self.runtime)[observation][0]
