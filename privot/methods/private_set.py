r"""The private set: a few images per class that match noisy class means of network features.

**Released** the class sums of the images; then, in rounds, class sums of unit features by random
networks, by networks pretrained on synthetic images, and by networks trained on the set so far;
with the first a noisy count of each class unless sizes are declared.
**Bound** a record's vector in each query has norm at most 1 (k unit vectors over sqrt(k)), and the
gate clips it to 1.
**Cost** full-batch Gaussian queries, whose squared mu add up to that of one. Networks, centers,
images and labels are post-processing.
**Departs** from published private condensation: one full-batch query for each network instead of
thousands of sampled steps; features are centered by public images and scaled to norm 1; further
rounds use networks trained on the results of the first queries.
**Notation** u_k(x) = (f_k(a_k(x)) - m_k) / |f_k(a_k(x)) - m_k| with network f_k, its one
augmentation a_k and center m_k. A share is a share of mu². The loss is the sum over rounds of share
* mean over networks of |mean u_k(S_c) - noisy mean u_k(T_c)|², over classes c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from privot.components.dead_leaves import generate_dead_leaves
from privot.components.feature_matching import MatchingRound, match_features
from privot.components.private_set_forecast import forecast_private_set
from privot.components.private_set_nets import (
    build_random_nets,
    pretrain_nets,
    train_nets_on_set,
)
from privot.components.private_set_queries import (
    query_class_means,
    query_features,
    run_dummy_query,
)
from privot.components.private_set_settings import (
    DEFAULT_FREQUENCY_FRACTION,
    DEFAULT_INIT_FROM_SYNTHETIC,
    PrivateSetSettings,
    count_queries,
)
from privot.components.private_set_storage import export_rounds, restore_rounds
from privot.data.spec import Spec
from privot.nets.ensemble import Ensemble
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

# Standard deviation of the initial noise, and factor of the initial synthetic images.
INITIAL_NOISE_STD = 0.3
INITIAL_SYNTHETIC_FACTOR = 0.5


@dataclass(frozen=True, kw_only=True)
class PrivateSet(PrivateSetSettings):
    """The private set; its settings are those of `PrivateSetSettings`.

    >>> plan = PrivateSet(noise_multiplier=3.7306).plan(Spec((1, 28, 28), 10))
    >>> [(stage.name, stage.steps) for stage in plan.stages], round(plan.cost().epsilon(1e-5), 3)
    ([('means', 1), ('random', 15), ('trained1', 4)], 1.0)
    """

    name: ClassVar[str] = "private-set"
    title: ClassVar[str] = "Private set: a few images per class that train a classifier"
    trusted_party: ClassVar[str] = "the data owner"
    guarantee_summary: ClassVar[str] = "(epsilon, delta), all queries together one Gaussian"
    citation: ClassVar[str] = """@software{privot2026privateset,
  title   = {The private set: dataset condensation with a proof},
  author  = {{The Privot authors}},
  year    = {2026},
  note    = {Part of Privot, a toolkit for private synthetic data by optimal transport}
}
@inproceedings{zhao2023dm,
  title     = {Dataset Condensation with Distribution Matching},
  author    = {Zhao, Bo and Bilen, Hakan},
  booktitle = {IEEE/CVF Winter Conference on Applications of Computer Vision},
  year      = {2023}
}"""

    # Settings that may change when a crashed run is resumed, since no query so far depends on them.
    adjustable_on_resume: ClassVar[tuple[str, ...]] = (
        "steps",
        "nets_per_step",
        "learning_rate",
        "net_train_epochs",
        "soft_label_weight",
        "keep_answers",
    )

    # Settings that are reduced in this order on a CPU, down to these values; see
    # `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {
        "net_width": 16,
        "steps": 50,
        "pretrain_epochs": 2,
        "num_pretrained_nets": 4,
        "num_random_nets": 20,
        "net_train_epochs": 25,
        "nets_per_round": 5,
        "nets_per_step": 1,
    }

    # By number of channels. How it was measured: docs/methods/private-set.md.
    cpu_accuracy_notes: ClassVar[dict[int, str]] = {
        3: "the accuracy of these settings was not measured; the defaults, which take about 20 "
        "minutes, reach 39 % on CIFAR-10 at epsilon 1, and those of a GPU 55 %"
    }

    def plan(self, spec: Spec) -> Plan:
        noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        means_share = self.get_budget_shares(spec)[0]
        stages = [Stage("means", "sum", noise_multiplier / math.sqrt(means_share))]
        for round_name, (num_features, budget_share) in self.plan_rounds(spec).items():
            queries = count_queries(num_features)
            stages.append(
                Stage(
                    round_name,
                    "sum",
                    noise_multiplier * math.sqrt(queries / budget_share),
                    queries,
                )
            )
        return Plan(tuple(stages), Neighbours(self.neighbours))

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        return forecast_private_set(self, spec, plan)

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Query class means and features of the records, and fit a few images per class to them.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The condensed images.
        """
        spec = gate.spec
        device = streams.runtime.torch_device
        run_dummy_query(self, spec, streams)
        # Pretraining takes long, so it comes before the first charge.
        pretrained_nets = (
            pretrain_nets(self, spec, streams, progress)
            if self.get_budget_shares(spec)[2]
            else None
        )
        means, class_sizes = query_class_means(gate, device)
        images, labels = self._initialize_set(means, streams)
        rounds: dict[str, MatchingRound] = {}
        for round_name in self.plan_rounds(spec):
            nets: Ensemble | None
            if round_name == "random":
                nets = build_random_nets(self, spec, streams).to(device)
            elif round_name == "pretrained":
                nets = pretrained_nets
            else:
                images = self._optimize_images(
                    images, rounds, spec, streams, f"before {round_name}", progress
                )
                nets = train_nets_on_set(
                    self, images, labels, pretrained_nets, spec, streams, round_name, progress
                )
            assert nets is not None
            rounds[round_name] = query_features(
                self,
                gate,
                round_name,
                nets.requires_grad_(False),
                images,
                class_sizes,
                streams,
                progress,
            )
        images = self._optimize_images(images, rounds, spec, streams, "last", progress)
        soft_labels = self._compute_soft_labels(images, labels, spec, streams, progress)
        resize_state = export_rounds(means, rounds) if self.keep_answers else {}
        return Artifact.from_images(images, labels, soft_labels, resize_state)

    def regenerate(
        self, artifact: Artifact, spec: Spec, streams: Streams, progress: Progress
    ) -> Artifact:
        """Make a set of another size from the stored query results, at no privacy cost.

        Args:
            artifact: The artifact of an earlier run.
            spec: Spec of the data.
            streams: Public random streams, with the seed of that run.
            progress: Shows the progress.

        Returns:
            A set of `images_per_class` images of each class.
        """
        means, rounds = restore_rounds(self, artifact.resize_state, spec, streams)
        images, labels = self._initialize_set(means, streams)
        images = self._optimize_images(images, rounds, spec, streams, "again", progress)
        soft_labels = self._compute_soft_labels(images, labels, spec, streams, progress)
        return Artifact.from_images(images, labels, soft_labels, artifact.resize_state)

    def _initialize_set(self, means: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        """Initialize the images around the noisy class means.

        Args:
            means: Noisy class means [classes, channels, height, width].
            streams: Public random streams.

        Returns:
            Images in [0, 1], sorted by class, and their labels.
        """
        labels = torch.arange(len(means), device=means.device).repeat_interleave(
            self.images_per_class
        )
        rng = streams.make_rng("start")
        channels, height, width = means.shape[1:]
        init_from_synthetic = (
            DEFAULT_INIT_FROM_SYNTHETIC[channels]
            if self.init_from_synthetic is None
            else self.init_from_synthetic
        )
        if init_from_synthetic:  # each class has a synthetic class of its own
            synthetic, _ = generate_dead_leaves(
                len(means), self.images_per_class, (channels, height, width), rng, means.device
            )
            offsets = INITIAL_SYNTHETIC_FACTOR * (synthetic - synthetic.mean(0))
        else:
            noise = torch.randn(len(labels), channels, height, width, generator=rng)
            offsets = INITIAL_NOISE_STD * noise.to(means.device)
        return (means[labels] + offsets).clamp(0, 1), labels

    def _optimize_images(
        self,
        images: Tensor,
        rounds: dict[str, MatchingRound],
        spec: Spec,
        streams: Streams,
        stage_name: str,
        progress: Progress,
    ) -> Tensor:
        """Optimize the images toward the targets of all rounds so far.

        Args:
            images: Images in [0, 1], sorted by class.
            rounds: The rounds by name.
            spec: Spec of the data.
            streams: Public random streams and checkpoints.
            stage_name: Name of this optimization, which fixes the random numbers.
            progress: Shows the progress.

        Returns:
            The optimized images.
        """

        def optimize() -> dict[str, Tensor]:
            optimized = match_features(
                images,
                list(rounds.values()),
                steps=self.resolve_setting(spec, "steps"),
                nets_per_step=self.nets_per_step,
                learning_rate=self.learning_rate,
                frequency_fraction=self.frequency_fraction
                or DEFAULT_FREQUENCY_FRACTION[spec.shape[0]],
                generator=streams.make_rng(stage_name),
                progress=lambda step, steps: progress(
                    f"optimizing the set ({stage_name})", step, steps
                ),
            )
            return {"images": optimized}

        return streams.compute_once(stage_name, optimize)["images"]

    def _compute_soft_labels(
        self, images: Tensor, labels: Tensor, spec: Spec, streams: Streams, progress: Progress
    ) -> Tensor | None:
        """Mix labels with predictions of networks that were trained on the other half of the set.

        Args:
            images: Images of the set.
            labels: Their labels.
            spec: Spec of the data.
            streams: Public random streams and checkpoints.
            progress: Shows the progress.

        Returns:
            Probabilities [count, classes], or None without soft labels.
        """
        if not self.soft_label_weight or self.images_per_class < 2:
            return None
        soft_labels = one_hot(labels, spec.num_classes).float() * (1 - self.soft_label_weight)
        for half in range(2):
            nets = train_nets_on_set(
                self,
                images[half::2],
                labels[half::2],
                None,
                spec,
                streams,
                f"soft{half}",
                progress,
            ).requires_grad_(False)
            logits = nets(2 * images[1 - half :: 2] - 1)
            soft_labels[1 - half :: 2] += self.soft_label_weight * logits.softmax(2).mean(0)
        return soft_labels / soft_labels.sum(1, keepdim=True)


METHOD = PrivateSet
