"""A generator trained by gradients of critics on shards: the common part of GS-WGAN and G-PATE.

The two methods differ in how they query the critics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from privot.components.critic_training import CRITIC_STEPS_PER_WARMUP_ROUND
from privot.components.method_base import MethodBase
from privot.components.pretraining import (
    PRETRAIN_BATCH_SIZE,
    pretrain_generator,
    validate_pretrain,
)
from privot.components.sharded_critics import ShardedCritics
from privot.components.validation import (
    require_choice,
    require_noise_multiplier,
    require_positive,
    require_range,
)
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets import GENERATORS, flops_per_image, initialize_weights
from privot.nets.ema import EmaTrainer
from privot.nets.functional_critic import Critic
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

GENERATOR_CLASSES = {"residual": "ResidualGenerator", "dcgan": "DcganGenerator"}
ADAM_BETAS = (0.5, 0.9)  # of the generator's Adam, as in WGAN-GP
CALLS_PER_STEP = 1500  # calls of tensor operators in a critic step or a generator step
OPERATIONS_PER_MAP_ELEMENT = 12  # floating-point operations of a small critic per element of a map
# Suggested number of records of each critic, where the number of records is declared: the published
# 1,000 critics have as many of CIFAR-10.
MIN_RECORDS_PER_CRITIC = 50
FAKES_PER_CLASS = 32  # generated images of each class that critics are trained on at a time


@dataclass(frozen=True, kw_only=True)
class ShardedGan(MethodBase, ABC):
    """Settings and training loop of a generator with critics on shards."""

    name: ClassVar[str]
    trusted_party: ClassVar[str] = "the data owner"
    stage: ClassVar[str]

    # Settings that are reduced in this order on a CPU, down to these values; see
    # `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {
        "generator_channels": 16,
        "critic_channels": 8,
        "warmup_rounds": 10,
        "steps": 100,
        "num_critics": 25,
        "critic_steps": 1,
        "batch_size": 32,
        "critic_batch_size": 8,
    }

    noise_multiplier: float | None = None  # noise over sensitivity; None: calibrated to the budget
    num_critics: int = 1000  # critics, each on its own shard
    steps: int = 1000  # generator steps: few and large, since even a small step takes GPU time
    batch_size: int = 1024  # generated images in a generator step
    critics_per_step: int = 200  # critics trained before each generator step, in turn
    critic_steps: int = 2  # training steps of each of these critics
    warmup_rounds: int = 60  # rounds of five critic steps against tiny generators, at the start
    critic_batch_size: int = 32  # records of a shard in a critic step
    critic_channels: int = 32  # channels of a critic's first feature maps; GS-WGAN has 64
    max_shift: int = 0  # largest random shift of the critics' inputs, in pixels; at most side / 14
    frequency_fraction: float = 0.5  # fraction of the DCT coefficients of each side in a gradient
    generator: str = "dcgan"  # architecture of the generator: "dcgan" or "residual"
    latent_dim: int = 16  # dimension of the generator's latent vectors
    generator_channels: int = 64  # channels of the generator's last feature maps
    generator_learning_rate: float = 6e-4  # learning rate of the generator's Adam
    critic_learning_rate: float = 1e-4  # learning rate of the critics' Adam
    ema_decay: float = 0.995  # decay per step of the generator's averaged weights
    pretrain: str = "off"  # "glyphs": pretrain the generator on characters of public fonts
    pretrain_steps: int = 2000  # pretraining steps

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_critics",
            "steps",
            "batch_size",
            "critics_per_step",
            "critic_steps",
            "critic_batch_size",
            "critic_channels",
            "latent_dim",
            "generator_channels",
            "pretrain_steps",
        )
        require_choice(self, "generator", tuple(GENERATOR_CLASSES))
        require_range(self, "generator_learning_rate", "critic_learning_rate", above=0, below=1)
        require_range(self, "ema_decay", minimum=0, below=1)
        require_range(self, "frequency_fraction", above=0, maximum=1)
        require_range(self, "warmup_rounds", "max_shift", minimum=0)
        require_noise_multiplier(self)

    def validate(self, spec: Spec) -> None:
        """Check, before anything is charged, that the settings fit the data.

        Raises:
            SettingError: The pretraining does not fit the data, or there are more critics than
                declared records.
        """
        validate_pretrain(self.name, self.pretrain, spec)
        if spec.size is not None and spec.size < self.num_critics:
            raise SettingError(
                f"{self.name}.num_critics={self.num_critics} is more than the {spec.size} records, "
                f"and each critic needs a record. Set it to {spec.size} or less."
            )

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        critic = Critic(spec.shape, spec.num_classes, self.critic_channels)
        warmup_steps = CRITIC_STEPS_PER_WARMUP_ROUND * self.warmup_rounds
        total_critic_steps = (
            self.steps * min(self.critics_per_step, self.num_critics) * self.critic_steps
            + warmup_steps * self.num_critics
        )
        # An input gradient is one forward and one backward pass. A critic step has two images and
        # the second derivative at a third one.
        passes = 3.0 * self.count_gradients() + 14.0 * total_critic_steps * self.critic_batch_size
        generator_flops = (
            3.0
            * (self.steps * self.batch_size + self.num_pretrain_images)
            * flops_per_image(GENERATOR_CLASSES[self.generator], self.generator_config(spec))
        )
        return {
            "records_per_critic": None if spec.size is None else spec.size // self.num_critics,
            "floating_point_operations": critic.flops * passes + generator_flops,
            "elementwise_operations": critic.flops * passes / OPERATIONS_PER_MAP_ELEMENT,
            "operator_calls": CALLS_PER_STEP
            * (self.steps * (1 + self.critic_steps) + warmup_steps),
        }

    @classmethod
    def suggest_settings(cls, spec: Spec) -> dict[str, Any]:
        """Suggest at most one critic for every 50 declared records."""
        if spec.size is None or spec.size >= MIN_RECORDS_PER_CRITIC * cls.num_critics:
            return {}
        return {"num_critics": max(1, spec.size // MIN_RECORDS_PER_CRITIC)}

    def generator_config(self, spec: Spec) -> dict[str, Any]:
        """Return the arguments of the generator."""
        return {
            "shape": list(spec.shape),
            "classes": spec.num_classes,
            "latent_dim": self.latent_dim,
            "channels": self.generator_channels,
        }

    @property
    def num_pretrain_images(self) -> int:
        """Number of images that the generator generates in pretraining."""
        return 0 if self.pretrain == "off" else self.pretrain_steps * PRETRAIN_BATCH_SIZE

    def count_gradients(self) -> int:
        """Count the input gradients that critics compute for the generator."""
        return self.steps * self.batch_size

    @abstractmethod
    def query_gradients(
        self,
        gate: Gate,
        critics: ShardedCritics,
        images: Tensor,
        labels: Tensor,
        rng: torch.Generator,
    ) -> Tensor:
        """Query noisy input gradients of generated images.

        Args:
            gate: The gate in front of the records.
            critics: The critics.
            images: Generated images [batch, channels, height, width].
            labels: Their labels [batch].
            rng: Public random generator.

        Returns:
            Gradients in DCT coefficients [batch, channels, rows, columns].
        """

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Train the generator on the noisy gradients of critics that are trained on shards.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The generator.
        """
        training = _ShardedGanTraining(self, gate, streams, progress)
        training.run()
        return Artifact.from_generator(
            GENERATOR_CLASSES[self.generator],
            self.generator_config(gate.spec),
            training.finalize_generator(),
        )


class _ShardedGanTraining:
    """The state of one training run.

    Args:
        method: The settings, and the query of the critics.
        gate: The gate in front of the records.
        streams: Public random streams and checkpoints.
        progress: Shows the progress.
    """

    def __init__(self, method: ShardedGan, gate: Gate, streams: Streams, progress: Progress):
        self.method = method
        self.gate = gate
        self.streams = streams
        self.progress = progress
        spec = gate.spec
        self.device = streams.runtime.torch_device
        self.num_classes = spec.num_classes
        self.total_queries = gate.plan.stages[0].steps
        self.queries_per_step = self.total_queries // method.steps
        generator_class = GENERATORS[GENERATOR_CLASSES[method.generator]]
        net = initialize_weights(
            generator_class(**method.generator_config(spec)), streams.make_rng("weights")
        ).to(self.device)
        self.trainer = EmaTrainer(
            pretrain_generator(
                net, method.pretrain, method.pretrain_steps, spec, streams, progress
            ),
            method.generator_learning_rate,
            ADAM_BETAS,
            method.ema_decay,
        )
        num_remaining = gate.count_remaining_queries(method.stage)
        # If the gate stores its results, it repeats them from the first, and training starts anew.
        # Otherwise training resumes with fresh public draws.
        is_resumed = num_remaining < self.total_queries and self.trainer.restore(
            streams.load_checkpoint("generator")
        )
        self.rng = streams.make_rng(f"draws {num_remaining}", self.device)
        self.critics = ShardedCritics(
            gate,
            streams.make_rng("critics"),
            self.rng,
            method.num_critics,
            method.critic_channels,
            method.critic_batch_size,
            method.critic_learning_rate,
            method.frequency_fraction,
            max_shift=method.max_shift,
        )
        self.critics.initialize(0 if is_resumed else method.warmup_rounds, progress)
        self.balanced_labels = torch.arange(self.num_classes, device=self.device).repeat_interleave(
            FAKES_PER_CLASS
        )

    def run(self) -> None:
        """Alternate critic steps and a generator step until no query is left."""
        method = self.method
        while True:
            num_remaining = self.gate.count_remaining_queries(method.stage)
            if num_remaining < self.queries_per_step:
                return
            step = (self.total_queries - num_remaining) // self.queries_per_step
            with torch.no_grad():
                fakes = self._generate(self.trainer.net, self.balanced_labels).unflatten(
                    0, (self.num_classes, FAKES_PER_CLASS)
                )
            self._train_critics(fakes, step)
            self._train_generator()
            self.progress("training the generator", step + 1, method.steps)
            if self.streams.is_checkpoint_due(step, method.steps):
                # The critics are saved first: a run with a generator checkpoint skips the warm-up.
                self.gate.save_shard_states()
                self.streams.save_checkpoint("generator", self.trainer.state_dict())
                self.streams.save_preview(fakes[:, :10].flatten(0, 1), 10)

    def finalize_generator(self) -> nn.Module:
        """Return the generator with averaged weights."""
        return self.trainer.recalibrate(lambda net: self._generate(net, self.balanced_labels))

    def _generate(self, net: Any, labels: Tensor) -> Tensor:
        latents = torch.randn(
            len(labels), self.method.latent_dim, generator=self.rng, device=self.device
        )
        return net(latents, labels)

    def _train_critics(self, fakes: Tensor, step: int) -> None:
        """Train the critics whose turn it is."""
        method = self.method
        group_size = min(method.critics_per_step, method.num_critics)
        # privacy: which critics are trained depends on the step alone, never on which critic was
        # queried.
        critic_indices = (step * group_size + torch.arange(group_size)) % method.num_critics
        start_step = (
            CRITIC_STEPS_PER_WARMUP_ROUND * method.warmup_rounds
            + step * group_size // method.num_critics * method.critic_steps
        )
        self.critics.train(fakes, critic_indices, method.critic_steps, start_step)

    def _train_generator(self) -> None:
        """Take one generator step along noisy input gradients."""
        batch_size = self.method.batch_size
        labels = torch.randint(
            self.num_classes, (batch_size,), generator=self.rng, device=self.device
        )
        images = self._generate(self.trainer.net, labels)
        gradients = self.method.query_gradients(
            self.gate, self.critics, images.detach(), labels, self.rng
        )
        images.backward(-self.critics.to_pixels(gradients) / batch_size)
        self.trainer.step()
