r"""Conditional GAN without privacy: the baseline for private and condensed data.

**Released** a generator that was trained on the records themselves.
**Bound** none: the critic reads every record without limit, and the generator learns from the
critic.
**Cost** infinite: the records are read without the gate, and the release carries `NoGuarantee`.
**Departs** from the papers, which do not fix the networks: a critic with label projection and a
penalty on its input gradient at the records (R1, Mescheder et al. 2018); the released generator is
the running mean of the trained one. Nothing was tuned on a test set.
**Notation** critic D(x, y), generator G(z, y), z ~ N(0, I), s(t) = log(1 + e^t). D minimizes
E s(-D(x, y)) + E s(D(G(z, y), y)) + penalty/2 E |\nabla_x D(x, y)|^2, G minimizes
E s(-D(G(z, y), y)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from privot.baselines.condensation import Records
from privot.components.method_base import MethodBase
from privot.components.validation import require_positive, require_range
from privot.data.spec import Spec
from privot.nets import GENERATORS, initialize_weights
from privot.nets.conv_block import autocast_half
from privot.nets.ema import RECALIBRATION_BATCHES, EmaTrainer
from privot.nets.generators.dcgan import ProjectionCritic, count_doublings, gradient_penalty
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams
from privot.runtime.cuda_graphs import GraphedStep

GENERATOR_NAME = "DcganGenerator"
ADAM_BETAS = (0.0, 0.99)  # momentum makes generator and critic oscillate
CALLS_PER_STEP = 700  # tensor operators in a step of one of the two networks
STEPS_PER_REPORT = 25
NO_GUARANTEE_REASON = (
    "no mechanism: the generator was trained on the records themselves, without clipping or noise, "
    "and can reproduce some of them"
)


@dataclass(frozen=True, kw_only=True)
class ConditionalGAN(MethodBase):
    """Settings of the conditional GAN.

    It has no guarantee: every record may be visible in what it generates.

    >>> ConditionalGAN().plan(Spec((1, 28, 28), 10)).stages
    ()
    """

    name: ClassVar[str] = "conditional-gan"
    title: ClassVar[str] = "Conditional GAN, a baseline (no privacy)"
    trusted_party: ClassVar[str] = "everyone who sees the generator"
    guarantee_summary: ClassVar[str] = (
        "none: no mechanism, the generator was trained on the records themselves"
    )
    citation: ClassVar[str] = """@article{mirza2014conditional,
  title   = {Conditional Generative Adversarial Nets},
  author  = {Mirza, Mehdi and Osindero, Simon},
  journal = {arXiv preprint arXiv:1411.1784},
  year    = {2014}
}
@inproceedings{miyato2018projection,
  title     = {{cGANs} with Projection Discriminator},
  author    = {Miyato, Takeru and Koyama, Masanori},
  booktitle = {International Conference on Learning Representations},
  year      = {2018}
}
@inproceedings{mescheder2018which,
  title     = {Which Training Methods for {GANs} do actually Converge?},
  author    = {Mescheder, Lars and Geiger, Andreas and Nowozin, Sebastian},
  booktitle = {International Conference on Machine Learning},
  year      = {2018}
}"""

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {"base_channels": 8, "steps": 500, "batch_size": 32}

    latent_dim: int = 64
    # Channels of both networks at full resolution; each halving of the sides doubles them.
    base_channels: int = 64
    steps: int = 20_000  # of the generator
    critic_steps: int = 1  # for each of them
    batch_size: int = 128
    learning_rate: float = 2e-4  # of Adam, for both networks
    gradient_penalty: float = 10.0  # weight of the penalty on the critic's input gradient
    ema_decay: float = 0.999  # of the generator's weights over the steps

    def __post_init__(self) -> None:
        require_positive(self, "latent_dim", "base_channels", "steps", "critic_steps")
        require_range(self, "batch_size", minimum=2)  # batch norm needs 2
        require_range(self, "learning_rate", above=0, below=1)
        require_range(self, "ema_decay", minimum=0, below=1)
        require_range(self, "gradient_penalty", minimum=0, below=math.inf)

    def plan(self, spec: Spec) -> Plan:
        return Plan((), Neighbours.REPLACE)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        # Every resolution has the same product of pixels and pairs of channels: pixels decrease by
        # 4 where channels double. At each, the generator has a 3x3 convolution from twice as many
        # channels, and the critic a 3x3 of its own channels and, at a quarter of the pixels, a 4x4
        # to twice as many.
        num_levels = count_doublings(*spec.shape[1:])
        num_pixels = spec.shape[1] * spec.shape[2]
        image_layer = 9 * self.base_channels * spec.num_features
        critic_flops = 2 * (17 * num_levels * self.base_channels**2 * num_pixels + image_layer)
        latent_layer = (
            (self.latent_dim + spec.num_classes) * self.base_channels * num_pixels / 2**num_levels
        )
        generator_flops = 2 * (
            18 * num_levels * self.base_channels**2 * num_pixels + image_layer + latent_layer
        )
        # Forward and backward are 3 passes. The critic is trained on two images, one of them
        # generated, and on its input gradient at the other (1 pass to the image, 2 back from
        # there). Then the generator is trained through the critic: forward, and backward to the
        # image.
        critic_passes = 6 + 3 * (self.gradient_penalty > 0)
        step_flops = (
            self.critic_steps * (critic_passes * critic_flops + generator_flops)
            + 3 * generator_flops
            + 2 * critic_flops
        )
        total = self.batch_size * (
            self.steps * step_flops + RECALIBRATION_BATCHES * generator_flops
        )
        num_calls = self.steps * (self.critic_steps + 1) * CALLS_PER_STEP
        return {"floating_point_operations": total, "operator_calls": num_calls}

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Train a critic and a generator on the records.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The generator.
        """
        spec = gate.spec
        device = streams.runtime.torch_device
        records = gate.read_without_guarantee(NO_GUARANTEE_REASON)
        arguments = {
            "shape": list(spec.shape),
            "classes": spec.num_classes,
            "latent_dim": self.latent_dim,
            "channels": self.base_channels,
        }
        generator = initialize_weights(
            GENERATORS[GENERATOR_NAME](**arguments), streams.make_rng("weights")
        ).to(device)
        critic = initialize_weights(
            ProjectionCritic(spec.shape, spec.num_classes, self.base_channels),
            streams.make_rng("critic"),
        ).to(device)
        for net in (generator, critic):  # the layout of a GPU's matrix units
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        rng = streams.make_rng("draws", records.images.device)
        trainer = _GanTrainer(self, generator, critic, records, rng)
        return Artifact.from_generator(GENERATOR_NAME, arguments, trainer.train(progress))


class _GanTrainer:
    """Trains the two networks. On a GPU one step, sampling included, is one CUDA graph.

    Args:
        method: The settings.
        generator: The generator.
        critic: The critic.
        records: The records.
        rng: Random generator on the records' device.
    """

    def __init__(
        self,
        method: ConditionalGAN,
        generator: nn.Module,
        critic: nn.Module,
        records: Records,
        rng: torch.Generator,
    ):
        self.method = method
        self.critic = critic
        self.records = records
        self.rng = rng
        self.device = records.images.device
        on_gpu = self.device.type == "cuda"
        self.trainer = EmaTrainer(generator, method.learning_rate, ADAM_BETAS, method.ema_decay)
        self.critic_optimizer = torch.optim.Adam(
            critic.parameters(),
            lr=method.learning_rate,
            betas=ADAM_BETAS,
            capturable=on_gpu,
            fused=on_gpu,
        )

    def train(self, progress: Progress) -> nn.Module:
        """Run all steps, and return the running mean of the generator."""
        self.trainer.net.train()
        self.critic.train()
        graphed_step = GraphedStep(self._train_step, self.device, self.rng)
        steps = self.method.steps
        for step in range(steps):
            self.trainer.prepare_step()
            graphed_step()
            if (step + 1) % STEPS_PER_REPORT == 0 or step + 1 == steps:
                progress("training the pair", step + 1, steps)
        return self.trainer.recalibrate(lambda net: self._generate(net, self._sample_labels()))

    def _train_step(self) -> None:
        for _ in range(self.method.critic_steps):
            self._train_critic()
        labels = self._sample_labels()
        self.critic.requires_grad_(False)
        with autocast_half(self.device):
            scores = self.critic(self._generate(self.trainer.net, labels), labels).float()
        softplus(-scores).mean().backward()
        self.trainer.apply_step()
        self.critic.requires_grad_(True)

    def _train_critic(self) -> None:
        penalty_weight = self.method.gradient_penalty
        indices = self._sample_indices()
        real = self.records.images[indices].requires_grad_(penalty_weight > 0)
        fake_labels = self._sample_labels()
        with autocast_half(self.device):
            with torch.no_grad():
                fake = self._generate(self.trainer.net, fake_labels)
            real_scores = self.critic(real, self.records.labels[indices]).float()
            fake_scores = self.critic(fake, fake_labels).float()
        loss = softplus(-real_scores).mean() + softplus(fake_scores).mean()
        if penalty_weight:
            loss = loss + penalty_weight / 2 * gradient_penalty(real_scores, real)
        self.critic_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.critic_optimizer.step()

    def _sample_indices(self) -> Tensor:
        return torch.randint(
            len(self.records.labels),
            (self.method.batch_size,),
            generator=self.rng,
            device=self.device,
        )

    def _sample_labels(self) -> Tensor:
        """Sample labels with the frequencies of the records."""
        return self.records.labels[self._sample_indices()]

    def _generate(self, net: nn.Module, labels: Tensor) -> Tensor:
        latents = torch.randn(
            self.method.batch_size, self.method.latent_dim, generator=self.rng, device=self.device
        )
        return net(latents, labels)


METHOD = ConditionalGAN
