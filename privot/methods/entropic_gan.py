r"""The entropic GAN: a generator of clean records from records that clients noised before sending.

**Released** a generator, made from what the clients sent and nothing else: no record is queried
here, and the gate of a server has none.
**Bound** that of the channel on the client: a clipped domain, and noise that fits it
(docs/methods/channels.md).
**Cost** that of the channel, once for each record and paid by the client. All training is
post-processing.
**Departs** from the paper: the transport is solved until it is exact, and its gradient comes from
the plan and not from unrolled iterations; any channel with a density, not only additive noise; a
one-sided likelihood as a second loss; labels through a channel of their own.
**Notation** y: outputs of the clients, x = G(z): generated records, K(y|x) the channel, c = -t log
K + const with its temperature t; the loss is :math:`\min_P E_P c + t\,KL(P\|P_x P_y)`, which is
least where the x are what the noise was added to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from privot.components.entropic_settings import EntropicSettings
from privot.components.entropic_trainer import EntropicTrainer
from privot.data.spec import Spec
from privot.errors import PlanError
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan
from privot.privacy.protocols import PrivatizedSource
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

NUM_RESIDUAL_BATCHES = 8  # batches over which the residual of the release is averaged
CALLS_PER_STEP = 1500  # calls of tensor operators in a step
SINKHORN_PASSES = 200  # elementwise passes over the cost in the Sinkhorn iterations of a step


@dataclass(frozen=True, kw_only=True)
class EntropicGAN(EntropicSettings):
    """The entropic GAN; its settings are those of `EntropicSettings`.

    >>> EntropicGAN().plan(Spec((1, 28, 28), 10)).neighbours
    <Neighbours.LOCAL: 'local'>
    """

    name: ClassVar[str] = "entropic-gan"
    title: ClassVar[str] = (
        "Entropic GAN: a generator of clean records from records noised by their clients"
    )
    trusted_party: ClassVar[str] = "nobody: records are noised before they are sent"
    guarantee_summary: ClassVar[str] = "local epsilon of the channel, paid by each client once"
    citation: ClassVar[str] = """@article{reshetova2024training,
  title   = {Training Generative Models from Privatized Data via Entropic Optimal Transport},
  author  = {Reshetova, Daria and Chen, Wei-Ning and {\\"O}zg{\\"u}r, Ayfer},
  journal = {IEEE Journal on Selected Areas in Information Theory},
  year    = {2024}
}
@article{rigollet2018entropic,
  title   = {Entropic optimal transport is maximum-likelihood deconvolution},
  author  = {Rigollet, Philippe and Weed, Jonathan},
  journal = {Comptes Rendus Math{\\'e}matique},
  year    = {2018}
}"""
    # Settings that may change when a crashed run is resumed, since no query depends on them.
    adjustable_on_resume: ClassVar[tuple[str, ...]] = ("steps", "learning_rate", "ema_decay")

    # Settings that are reduced in this order on a CPU, down to these values; see
    # `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {
        "generator_channels": 8,
        "steps": 500,
        "batch_size": 64,
    }

    def plan(self, spec: Spec) -> Plan:
        return Plan((), Neighbours.LOCAL)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        generator_flops = (
            18 * self.generator_channels**2 * spec.num_features
            if self.choose_generator(spec) == "conv"
            else self.hidden_dim * (self.hidden_dim + spec.num_features)
        )
        flops = (
            3
            * self.steps
            * self.batch_size
            * (2 * generator_flops + 2 * self.batch_size * spec.num_features)
        )
        return {
            "floating_point_operations": flops,
            "elementwise_operations": SINKHORN_PASSES * self.steps * self.batch_size**2,
            "operator_calls": self.steps * CALLS_PER_STEP,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Train a generator on records that clients privatized.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The generator.
        """
        if not isinstance(gate, PrivatizedSource):
            raise PlanError(
                "entropic-gan needs records that clients privatized, and this data set has clean "
                "records. Privatize them first by privot privatize."
            )
        trainer = EntropicTrainer(self, gate.get_privatized_dataset(), streams)
        for step in range(trainer.generator_trainer.steps, self.steps):
            trainer.train_step(step)
            if streams.is_checkpoint_due(step, self.steps) or step + 1 == self.steps:
                streams.save_checkpoint("training", trainer.generator_trainer.state_dict())
                residual = trainer.measure_residual(1)["over_noise"]
                progress("training the generator", step + 1, self.steps, residual=residual)
            elif step % 25 == 24:
                progress("training the generator", step + 1, self.steps)
        net = trainer.finalize_generator()
        diagnostics = trainer.measure_residual(NUM_RESIDUAL_BATCHES)
        return Artifact.from_generator(
            trainer.generator_class,
            trainer.generator_config,
            net,
            {"diagnostics": diagnostics},
        )


METHOD = EntropicGAN
