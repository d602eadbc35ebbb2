r"""The sliced-Wasserstein flow: particles moved along directions to noisy quantiles of the data.

**Released** mode blocks (ours): once, for each class, its moments and, for each direction, sums of
sorted blocks of projections. Mode records (DPSWflow): once, every record's point. Mode resampled
(DPSWflow-r): at each step, the gaps between the quantiles of a fresh sample and those of the
particles. In space private, before that: noisy sums of an autoencoder's gradients.
**Bound** blocks: vectors of norm 1 for the moments, 2 radius sqrt(num_bases) for the blocks, by
telescoping and a tight frame; records: one row changes, by 2 clip norms; resampled: the query
result is clipped as a whole, 2 clip norms; gradients: each is clipped. The gate clips every one of
them itself.
**Cost** blocks: two full-batch Gaussian queries, together one; records: one; resampled, and the
steps of an autoencoder: an event a step, on samples of fixed size.
**Departs** from the paper: noise is drawn once where one query is counted, and samples are drawn
afresh where sampling is counted; fixed transforms, or autoencoders trained in public or at a cost;
no failure probability; in mode blocks, sorting before the noise.
**Notation** z = point of a record, Theta a tight frame of ``num_bases`` orthonormal bases, m =
``num_blocks`` blocks of s = n // m order statistics each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.components.flow_snapshots import SNAPSHOTS_KEY, FlowSnapshots
from privot.components.latent_space import LatentSpace, match_sampled_noise
from privot.components.noisy_projections import encode_labels
from privot.components.particle_flow import (
    ParticleFlow,
    flow_to_records,
    flow_to_samples,
    run_sliced_flow,
)
from privot.components.sliced_method import DECODER_PREFIX, SlicedMethod, export_decoder
from privot.components.sliced_statistics import SlicedStatistics
from privot.components.transforms import ImageTransform
from privot.components.validation import require_choice, require_count, require_range
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Fixed
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

CALLS_PER_STEP = 100  # calls of tensor operators in a step of the flow
SORTING_PASSES = 6  # elementwise passes that take as long as sorting a projection
INITIAL_SPREAD = 0.3  # norm of initial particles over the radius, in modes records and resampled


@dataclass(frozen=True, kw_only=True)
class SlicedFlow(SlicedMethod):
    """Settings of the sliced flow.

    >>> spec = Spec((1, 28, 28), 10, 60_000, (6000,) * 10)
    >>> round(SlicedFlow(noise_multiplier=3.7306).plan(spec).cost().epsilon(1e-5), 3)
    1.0
    """

    name: ClassVar[str] = "sliced-flow"
    title: ClassVar[str] = (
        "Sliced-Wasserstein flow: particles moved to noisy quantiles (DPSWflow, and sorted blocks)"
    )
    guarantee_summary: ClassVar[str] = (
        "(epsilon, delta), all queries together one Gaussian; resampled: an event a step"
    )
    citation: ClassVar[str] = """@article{sebag2025dpswflow,
  title   = {Differentially Private Gradient Flow based on the Sliced Wasserstein Distance},
  author  = {Sebag, I. and Pydi, M. S. and Franceschi, J.-Y. and Rakotomamonjy, A. and
             Gartrell, M. and Atif, J. and Allauzen, A.},
  journal = {Transactions on Machine Learning Research},
  year    = {2025}
}"""

    supported_modes: ClassVar[tuple[str, ...]] = ("blocks", "records", "resampled")
    # Settings that may change when a crashed run is resumed, since no query depends on them.
    adjustable_on_resume: ClassVar[tuple[str, ...]] = ("keep_answers",)

    # Settings that are reduced in this order on a CPU, down to these values; see
    # `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {"steps": 100, "images_per_class": 250}

    neighbours: str = "replace"  # or "local" (mode records): every record is released by itself
    images_per_class: int = 1000  # images of each class; other numbers can be made later for free
    steps: int = 200  # steps of the flow; in mode resampled, queries
    step_size: float = 0.5  # initial step size, a fraction of the distance to the target
    diffusion: float = 0.0  # factor of the noise of the paper's SDE, no part of the guarantee
    sample_size: int = 250  # records in a sample, in mode resampled
    clip_ratio: float = 0.5  # largest norm of a query result over the radius, in mode resampled
    keep_answers: bool = True  # store the quantiles (for sets of other sizes) and snapshots

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "neighbours", ("replace", "local"))
        if self.neighbours == "local" and self.mode != "records":
            raise SettingError(
                "sliced-flow.neighbours=local needs sliced-flow.mode=records. "
                "Change one of the two."
            )
        if self.neighbours == "local" and self.space == "private":
            raise SettingError(
                "sliced-flow.neighbours=local does not fit sliced-flow.space=private, whose "
                "autoencoder needs sums over records. Choose another space."
            )
        require_count(self, "images_per_class", "steps", "sample_size")
        if self.mode == "resampled" and self.num_blocks > self.sample_size:
            raise SettingError(
                f"sliced-flow.num_blocks={self.num_blocks} is more than the {self.sample_size} "
                "records of a sample. Lower num_blocks or raise sample_size."
            )
        require_range(self, "step_size", above=0, maximum=1)
        require_range(self, "diffusion", minimum=0, maximum=100)
        require_range(self, "clip_ratio", above=0, maximum=10)

    def plan(self, spec: Spec) -> Plan:
        neighbours = Neighbours(self.neighbours)
        if self.mode != "resampled":
            return Plan(self.build_stages(spec), neighbours)
        self.validate_spec(spec)
        assert spec.size is not None
        autoencoder_stages, noise_multiplier = self.plan_autoencoder(spec)
        if autoencoder_stages:
            noise_multiplier = match_sampled_noise(
                noise_multiplier, self.steps, self.sample_size / spec.size
            )
        stage = Stage(
            "quantile_gaps",
            "query_sample",
            noise_multiplier,
            self.steps,
            Fixed(self.sample_size, spec.size),
        )
        return Plan((*autoencoder_stages, stage), neighbours)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        dim = self.dim(spec)
        num_images = self.images_per_class * spec.num_classes
        flops = 4 * dim * dim * (
            self.steps * num_images + self.num_bases * (spec.size or 0)
        ) + self.count_autoencoder_operations(spec)
        return {
            "images": num_images,
            "signal_to_noise_per_class": self.predict_signal_to_noise(spec, plan)
            if self.mode != "resampled"
            else None,
            "floating_point_operations": flops,
            "elementwise_operations": SORTING_PASSES * self.steps * num_images * dim,
            "operator_calls": CALLS_PER_STEP * self.steps + self.count_autoencoder_calls(),
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Query sliced statistics of the records, and move particles to match them.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The particles as images.
        """
        spec = gate.spec
        space = self.prepare_space(gate, streams, progress)
        if self.mode == "blocks":
            statistics = self.query_statistics(gate, space, streams, progress)
            return self._flow_images(statistics, space, spec, streams, progress)
        flow = ParticleFlow(
            dim=self.dim(spec),
            particles_per_class=self.images_per_class,
            steps=self.steps,
            step_size=self.step_size,
            diffusion=self.diffusion,
            snapshots=FlowSnapshots(self.steps),
            streams=streams,
            progress=progress,
        )
        points, labels = self._initialize_particles(spec, streams)
        if self.mode == "records":
            projections = self.query_projections(gate, space, streams, progress)
            points = flow_to_records(flow, points, projections)
        else:
            points = flow_to_samples(
                flow,
                points,
                gate,
                space,
                radius=self.radius(spec),
                label_norm=self.compute_label_norm(spec),
                num_blocks=self.num_blocks,
                clip_norm=self.clip_ratio * self.radius(spec),
            )
        tensors = flow.snapshots.export_images(space, spec.shape[0]) if self.keep_answers else {}
        return self._build_artifact(points[:, : self.dim(spec)], labels, space, spec, tensors)

    def regenerate(
        self, artifact: Artifact, spec: Spec, streams: Streams, progress: Progress
    ) -> Artifact:
        """Make a set of another size from the stored query results, at no privacy cost.

        Args:
            artifact: The artifact of an earlier run.
            spec: Spec of the data.
            streams: Public random streams.
            progress: Shows the progress.

        Returns:
            A set of `images_per_class` images of each class.

        Raises:
            ReleaseError: The artifact lacks the query results.
        """
        dim = self.dim(spec)
        classes = spec.num_classes
        device = streams.runtime.torch_device
        expected_shapes = {
            "means": (classes, dim),
            "covariance_roots": (classes, dim, dim),
            "frame": (self.num_bases, dim, dim),
            "targets": (classes, self.num_bases, dim, self.num_blocks),
        }
        tensors = {
            name: value
            for name, value in artifact.resize_state.items()
            if name != SNAPSHOTS_KEY and not name.startswith(DECODER_PREFIX)
        }
        if {name: tuple(value.shape) for name, value in tensors.items()} != expected_shapes:
            raise ReleaseError(
                "The release lacks the query results that a set of another size needs. "
                "Make the release again with keep_answers=true."
            )
        statistics = SlicedStatistics(
            **{name: value.float().to(device) for name, value in tensors.items()}
        )
        space = self.restore_space(artifact.resize_state, spec, device)
        return self._flow_images(statistics, space, spec, streams, progress)

    def _flow_images(
        self,
        statistics: SlicedStatistics,
        space: ImageTransform | LatentSpace,
        spec: Spec,
        streams: Streams,
        progress: Progress,
    ) -> Artifact:
        """Sample particles from the Gaussian of each class and run the flow of mode blocks.

        Args:
            statistics: The initial Gaussians, the frame and the target quantiles.
            space: The space of the points.
            spec: Spec of the data.
            streams: Public random streams.
            progress: Shows the progress.

        Returns:
            The set, with the statistics and snapshots if `keep_answers`.
        """
        snapshots = FlowSnapshots(self.steps)
        points = run_sliced_flow(
            statistics.sample_points(self.images_per_class, streams.make_rng("start")),
            statistics,
            steps=self.steps,
            step_size=self.step_size,
            diffusion=self.diffusion,
            snapshots=snapshots,
            streams=streams,
            progress=progress,
        )
        labels = torch.arange(spec.num_classes).repeat_interleave(self.images_per_class)
        tensors = (
            {
                **statistics.to_tensors(),
                **export_decoder(space),
                **snapshots.export_images(space, spec.shape[0]),
            }
            if self.keep_answers
            else {}
        )
        return self._build_artifact(points.flatten(0, 1), labels, space, spec, tensors)

    def _build_artifact(
        self,
        points: Tensor,
        labels: Tensor,
        space: ImageTransform | LatentSpace,
        spec: Spec,
        tensors: dict[str, Tensor],
    ) -> Artifact:
        """Decode particles to a set of images.

        Args:
            points: Particles [count, dim].
            labels: Their labels [count].
            space: The space of the points.
            spec: Spec of the data.
            tensors: Tensors to store for sets of other sizes.

        Returns:
            The set.
        """
        images = space.decode_point(points, spec.shape[0]).clamp(0, 1)
        return Artifact.from_images(images, labels, resize_state=tensors)

    def _initialize_particles(self, spec: Spec, streams: Streams) -> tuple[Tensor, Tensor]:
        """Draw particles around the gray level, for the modes records and resampled.

        Args:
            spec: Spec of the data.
            streams: Public random streams.

        Returns:
            Points followed by label vectors [count, dim (+ classes)], and labels [count].
        """
        labels = torch.arange(spec.num_classes).repeat_interleave(self.images_per_class)
        dim = self.dim(spec)
        noise = torch.randn(len(labels), dim, generator=streams.make_rng("start"))
        points = INITIAL_SPREAD * self.radius(spec) / math.sqrt(dim) * noise
        label_vectors = encode_labels(labels, self.compute_label_norm(spec), spec.num_classes)
        particles = torch.cat([points, label_vectors], 1)
        return particles.to(streams.runtime.torch_device), labels


METHOD = SlicedFlow
