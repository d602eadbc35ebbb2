r"""The sliced generator (DPSWgen): a network trained to have the noisy quantiles of the data.

**Released** what the sliced flow releases in the same mode. Blocks (ours): once, for each class,
its moments and, for each direction of a tight frame, sums of sorted blocks of projections. Records:
once, every record's point. In space private, before that: noisy sums of an autoencoder's gradients.
**Bound** blocks: vectors of norm 1 for the moments; 2 radius sqrt(num_bases) for the blocks,
because a replaced record moves a sorted vector by |theta v| in L1 and a tight frame is equally long
for every v; records: one row changes, by 2 clip norms; gradients: each is clipped.
**Cost** blocks: two full-batch Gaussian queries, together one; records: one; and an event for each
step of a private autoencoder. All training of the generator is post-processing.
**Departs** from the paper: one query in place of noisy projections of every batch; sorting before
the noise; classes; fixed transforms, or autoencoders trained in public or at a cost; no failure
probability.
**Notation** as in sliced-flow; the loss is the mean over classes, directions of one basis and ranks
of (theta G(latent) - target quantile)².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.components.latent_space import LatentSpace
from privot.components.noisy_projections import NoisyProjections, encode_labels
from privot.components.particle_flow import draw_basis_order
from privot.components.sliced_method import (
    AUTOENCODER_HIDDEN_DIM,
    AUTOENCODER_NUM_FREQUENCIES,
    SlicedMethod,
)
from privot.components.sliced_statistics import SlicedStatistics
from privot.components.transforms import ImageTransform
from privot.components.validation import require_choice, require_count, require_range
from privot.data.spec import Spec
from privot.nets import GENERATORS, initialize_weights
from privot.nets.ema import EmaTrainer, cosine_warmup
from privot.nets.generators.dense import generator_config
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams
from privot.transport.sliced import sliced_target_loss

CALLS_PER_STEP = 1200  # calls of tensor operators in a generator step
SORTING_PASSES = 50  # elementwise passes that take as long as sorting a projection
ADAM_BETAS = (0.9, 0.99)  # of the generator's Adam


@dataclass(frozen=True, kw_only=True)
class SlicedGenerator(SlicedMethod):
    """Settings of the sliced generator.

    >>> spec = Spec((1, 28, 28), 10, 60_000, (6000,) * 10)
    >>> round(SlicedGenerator(noise_multiplier=3.7306).plan(spec).cost().epsilon(1e-5), 3)
    1.0
    """

    name: ClassVar[str] = "sliced-generator"
    title: ClassVar[str] = (
        "Sliced-Wasserstein generator: a network fitted to noisy quantiles (DPSWgen)"
    )
    guarantee_summary: ClassVar[str] = "(epsilon, delta), all queries together one Gaussian"
    citation: ClassVar[str] = """@inproceedings{rakotomamonjy2021dpswd,
  title     = {Differentially Private Sliced {Wasserstein} Distance},
  author    = {Rakotomamonjy, Alain and Ralaivola, Liva},
  booktitle = {International Conference on Machine Learning},
  year      = {2021}
}
@article{sebag2025dpswflow,
  title   = {Differentially Private Gradient Flow based on the Sliced {Wasserstein} Distance},
  author  = {Sebag, I. and Pydi, M. S. and Franceschi, J.-Y. and Rakotomamonjy, A. and
             Gartrell, M. and Atif, J. and Allauzen, A.},
  journal = {Transactions on Machine Learning Research},
  year    = {2025}
}"""

    # Settings that may change when a crashed run is resumed, since no query depends on them.
    adjustable_on_resume: ClassVar[tuple[str, ...]] = (
        "generator",
        "latent_dim",
        "hidden_dim",
        "steps",
        "batch_per_class",
        "learning_rate",
        "ema_decay",
    )

    # Settings that are reduced in this order on a CPU, down to these values; see
    # `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {"batch_per_class": 50, "steps": 500}

    generator: str = "dense"  # "dense" or "conv"; ignored in a learned space, which has a decoder
    latent_dim: int = 16  # dimension of the generator's latent vectors
    hidden_dim: int = 256  # units of the generator's hidden layers
    steps: int = 2000  # training steps of the generator
    batch_per_class: int = 100  # generated images of each class in a step; they give the quantiles
    learning_rate: float = 3e-3  # largest learning rate of Adam
    ema_decay: float = 0.99  # decay per step of the averaged weights, which are released

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "generator", ("dense", "conv"))
        require_count(self, "latent_dim", "hidden_dim", "steps")
        require_range(self, "batch_per_class", minimum=2)
        require_range(self, "learning_rate", above=0, below=1)
        require_range(self, "ema_decay", minimum=0, below=1)

    def plan(self, spec: Spec) -> Plan:
        return Plan(self.build_stages(spec), Neighbours.REPLACE)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        dim = self.dim(spec)
        num_generated = self.steps * self.batch_per_class * spec.num_classes
        flops = 4 * num_generated * dim * (
            dim + spec.num_features + self.hidden_dim
        ) + self.count_autoencoder_operations(spec)
        return {
            "signal_to_noise_per_class": self.predict_signal_to_noise(spec, plan),
            "floating_point_operations": flops,
            "elementwise_operations": SORTING_PASSES * num_generated * dim,
            "operator_calls": CALLS_PER_STEP * self.steps + self.count_autoencoder_calls(),
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Query sliced statistics of the records, and train a generator to match them.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The generator.
        """
        spec = gate.spec
        device = streams.runtime.torch_device
        space = self.prepare_space(gate, streams, progress)
        query = self.query_statistics if self.mode == "blocks" else self.query_projections
        statistics = query(gate, space, streams, progress)
        generator_class, config = self._configure_generator(spec)
        net: Any = initialize_weights(
            GENERATORS[generator_class](**config), streams.make_rng("weights")
        )
        net = net.to(device).train()
        if isinstance(space, LatentSpace):
            net.decoder.load_state_dict(space.decoder.state_dict())
            net.decoder.requires_grad_(False)
        trainer = EmaTrainer(net, self.learning_rate, ADAM_BETAS, self.ema_decay)
        self._train_generator(trainer, statistics, space, spec, streams, progress)
        rng = streams.make_rng("settling", device)
        labels = self._balanced_labels(spec, device)

        def generate(ema_net: Any) -> Tensor:
            latents = torch.randn(len(labels), self.latent_dim, generator=rng, device=device)
            return ema_net(latents, labels)

        return Artifact.from_generator(generator_class, config, trainer.recalibrate(generate))

    def _balanced_labels(self, spec: Spec, device: torch.device) -> Tensor:
        """Return the labels of a batch, sorted by class."""
        return torch.arange(spec.num_classes, device=device).repeat_interleave(self.batch_per_class)

    def _train_generator(
        self,
        trainer: EmaTrainer,
        statistics: SlicedStatistics | NoisyProjections,
        space: ImageTransform | LatentSpace,
        spec: Spec,
        streams: Streams,
        progress: Progress,
    ) -> None:
        """Train the generator on the quantiles along one basis in each step.

        Args:
            trainer: The generator with its optimizer.
            statistics: The frame and the target quantiles.
            space: The space of the points.
            spec: Spec of the data.
            streams: Public random streams.
            progress: Shows the progress.
        """
        net: Any = trainer.net
        device = statistics.frame.device
        labels = self._balanced_labels(spec, device)
        latent_rng = streams.make_rng("codes", device)
        noise_rng = streams.make_rng("smoothing", device)
        label_vectors = encode_labels(labels, self.compute_label_norm(spec), spec.num_classes)
        order = draw_basis_order(len(statistics.frame), self.steps, streams)
        for step, basis in enumerate(order):
            latents = torch.randn(len(labels), self.latent_dim, generator=latent_rng, device=device)
            # In a learned space the generator's points need not be decoded and encoded again.
            points = (
                net.generate_latents(latents, labels)
                if isinstance(space, LatentSpace)
                else space.encode_image(net(latents, labels))
            )
            if isinstance(statistics, SlicedStatistics):
                points = points.unflatten(0, (spec.num_classes, self.batch_per_class))
                targets = statistics.targets[:, basis]
            else:  # all classes together, each point followed by its label vector
                points = statistics.add_matching_noise(
                    torch.cat([points, label_vectors], 1), noise_rng
                )
                targets = statistics.targets[basis]
            sliced_target_loss(points, statistics.frame[basis], targets).sum().backward()
            trainer.prepare_step(cosine_warmup(self.learning_rate, step, self.steps))
            trainer.apply_step()
            if step % 25 == 24 or step + 1 == self.steps:
                progress("training the generator", step + 1, self.steps)

    def _configure_generator(self, spec: Spec) -> tuple[str, dict[str, Any]]:
        """Return the class and the arguments of the generator."""
        if not self.has_learned_space:
            return generator_config(
                self.generator,
                spec.shape,
                spec.num_classes,
                latent_dim=self.latent_dim,
                hidden_dim=self.hidden_dim,
                num_frequencies=self.num_frequencies,
            )
        config = {
            "shape": list(spec.shape),
            "classes": spec.num_classes,
            "latent_dim": self.latent_dim,
            "hidden_dim": self.hidden_dim,
            "autoencoder_dim": self.autoencoder_dim,
        }
        if self.space == "public":
            return "ConvAutoencoderGenerator", config
        return "AutoencoderGenerator", {
            **config,
            "autoencoder_hidden_dim": AUTOENCODER_HIDDEN_DIM,
            "num_frequencies": AUTOENCODER_NUM_FREQUENCIES,
        }


METHOD = SlicedGenerator
