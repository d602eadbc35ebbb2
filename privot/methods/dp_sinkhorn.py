r"""DP-Sinkhorn: a generator trained by noisy transport gradients, without a critic.

**Released** at each step: the gradient of the transport cost between a fixed number of generated
images and a Poisson sample of the records, with respect to the low frequencies of the generated
images, with Gaussian noise.
**Bound** ``clip_unit=record``: the gradient is a sum over records, each clipped, so one record
changes it by ``clip_norm``. ``clip_unit=batch`` (the paper): the whole gradient is clipped to one
ball, so one record changes it by twice ``clip_norm``.
**Cost** ``steps`` Poisson-sampled Gaussian events, add or remove one record. The repulsion between
generated images uses no record and is added outside, without noise.
**Departs** from the paper: records are clipped one by one, against public potentials, and their
cost is the distance, not its square; the number of generated images is fixed; classes have equal
mass; high frequencies are not queried and held at zero; far fewer steps. Reasons, and the paper's
own way: docs/methods/dp-sinkhorn.md.
**Notation** generated points X with labels, records Y, X' = X with a fraction ``fresh_fraction``
generated anew; loss 2 W(X, Y) - W(X, X').
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.components.sinkhorn_queries import (
    compute_record_gradient,
    compute_transport_gradient,
    group_by_class,
)
from privot.components.sinkhorn_settings import SinkhornSettings
from privot.components.sinkhorn_trainer import SinkhornTrainer
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets import GENERATORS, flops_per_image, initialize_weights
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

CALLS_PER_STEP = 4000  # calls of tensor operators in a step


@dataclass(frozen=True, kw_only=True)
class DPSinkhorn(SinkhornSettings):
    """DP-Sinkhorn; its settings are those of `SinkhornSettings`.

    >>> method = DPSinkhorn(noise_multiplier=1.1, clip_unit="batch", sample_rate=0.01)
    >>> method.plan(Spec((1, 28, 28), 10)).stages[0].sampling
    Poisson(sample_rate=0.01)
    """

    name: ClassVar[str] = "dp-sinkhorn"
    title: ClassVar[str] = "DP-Sinkhorn: a generator from noisy transport gradients"
    trusted_party: ClassVar[str] = "the data owner"
    guarantee_summary: ClassVar[str] = "(epsilon, delta), many Gaussian queries on Poisson samples"
    citation: ClassVar[str] = """@inproceedings{cao2021dpsinkhorn,
  title     = {Don't Generate Me: Training Differentially Private Generative Models with {Sinkhorn}
               Divergence},
  author    = {Cao, Tianshi and Bie, Alex and Vahdat, Arash and Fidler, Sanja and Kreis, Karsten},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2021}
}"""

    # Settings that are reduced in this order on a CPU, down to these values; see
    # `privot.synthesis.cost`. Those of the second table follow if the first is not enough.
    cpu_minimums: ClassVar[dict[str, int]] = {"steps": 300}
    last_resort_cpu_minimums: ClassVar[dict[str, int]] = {
        "generator_channels": 8,
        "batch_size": 50,
    }

    def plan(self, spec: Spec) -> Plan:
        if self.clip_unit == "record" and not spec.size:
            raise SettingError(
                "dp-sinkhorn.clip_unit=record needs the number of records, which it divides by. "
                "Declare it as public by --public-size, or set dp-sinkhorn.clip_unit=batch."
            )
        operation = "sum" if self.clip_unit == "record" else "query_sample"
        noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        stage = Stage(
            "transport_gradient",
            operation,
            noise_multiplier,
            self.steps,
            Poisson(self.sample_rate),
        )
        return Plan((stage,), Neighbours.ADD_REMOVE)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        noise_multiplier = plan.stages[0].noise_multiplier
        num_coefficients = spec.shape[0] * math.prod(self.count_frequencies(spec))
        # If every record had the same gradient: the norm of the sum of all query results over the
        # noise in the directions of the class means.
        signal_per_step = self.sample_rate * (spec.size or 0) if self.clip_unit == "record" else 0.5
        signal_to_noise = (
            math.sqrt(self.steps)
            * signal_per_step
            / (noise_multiplier * math.sqrt(spec.num_classes * num_coefficients))
            if noise_multiplier
            else None
        )
        compared_records = (
            self.sample_rate * (spec.size or 0) / spec.num_classes
            if self.clip_unit == "record"
            else self.max_sample_size
        )
        pair_flops = (
            compared_records * self.batch_size * num_coefficients * (3 + 3 * bool(self.l1_weight))
        )
        # A step has three passes over a batch, one over the next batch and two over the batches
        # that it is compared with.
        generator_flops = (
            self.batch_size
            * (4 + 2)
            * flops_per_image("DcganGenerator", self.generator_config(spec))
        )
        return {
            "signal_to_noise_of_class_means": signal_to_noise,
            "floating_point_operations": self.steps * (2 * pair_flops + generator_flops),
            "operator_calls": self.steps * CALLS_PER_STEP,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Train a generator on noisy transport gradients.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The generator.
        """
        spec = gate.spec
        config = self.generator_config(spec)
        net = initialize_weights(
            GENERATORS["DcganGenerator"](**config), streams.make_rng("weights")
        ).to(streams.runtime.torch_device)
        first_step = self.steps - gate.count_remaining_queries("transport_gradient")
        # If the gate stores its results, it repeats them from the first, and training starts anew.
        trainer = SinkhornTrainer(self, net, spec, streams, is_resumed=first_step > 0)
        query = (
            self._query_record_gradients
            if self.clip_unit == "record"
            else self._query_batch_gradient
        )
        for step in range(first_step, self.steps):
            trainer.train_step(step, query(gate, trainer))
            if streams.is_checkpoint_due(step, self.steps):
                streams.save_checkpoint("training", trainer.generator_trainer.state_dict())
                streams.save_preview(trainer.images[: 10 * spec.num_classes], spec.num_classes)
            if step % 25 == 24 or step + 1 == self.steps:
                progress("training the generator", step + 1, self.steps)
        return Artifact.from_generator("DcganGenerator", config, trainer.finalize_generator())

    def _query_batch_gradient(self, gate: Gate, trainer: SinkhornTrainer) -> Tensor:
        """Query the transport gradient of a sample, clipped as a whole: [count, dim]."""
        return gate.query_sample(
            "transport_gradient",
            compute_transport_gradient,
            trainer.points,
            trainer.labels,
            trainer.basis,
            gate.spec.num_classes,
            self.max_sample_size,
            self.label_distance,
            self.l1_weight,
            trainer.blur,
            self.sinkhorn_iterations,
            clip_norm=trainer.clip_norm,
            shape=tuple(trainer.points.shape),
        )

    def _query_record_gradients(self, gate: Gate, trainer: SinkhornTrainer) -> Tensor:
        """Query the transport gradient as a sum over records: [count, dim].

        The sum of each class is divided by the expected number of its records in a sample.
        """
        spec = gate.spec
        sums = gate.sum(
            "transport_gradient",
            compute_record_gradient,
            group_by_class(trainer.points, spec.num_classes),
            trainer.potentials,
            trainer.basis,
            trainer.blur,
            clip_norm=trainer.clip_norm,
            per_class=True,
        )
        mean_size = (spec.size or 0) / spec.num_classes
        class_sizes = spec.class_sizes or (mean_size,) * spec.num_classes
        expected_counts = torch.tensor(
            [max(1.0, self.sample_rate * size) for size in class_sizes],
            dtype=sums.dtype,
            device=sums.device,
        )
        means = sums / expected_counts.view(-1, 1, 1)
        scale = math.sqrt(len(trainer.labels)) / spec.num_classes
        return means.transpose(0, 1).flatten(0, 1) * scale


METHOD = DPSinkhorn
