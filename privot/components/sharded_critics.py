"""Many critics, each trained on its own shard of the records, behind the gate.

Critics are trained on a public schedule, each on its own shard and on public images. No critic
receives anything from another critic, or learns which critic was queried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from privot.components.critic_gradients import build_gradient_basis
from privot.components.critic_training import (
    CRITIC_STEPS_PER_WARMUP_ROUND,
    init_state,
    limit_shift,
    train_critic,
    warm_up,
)
from privot.nets.functional_critic import Critic
from privot.nets.tiny_generator import TinyGenerator
from privot.privacy.gate import Gate
from privot.runtime import Progress

GS_WGAN_CITATION = """@inproceedings{chen2020gswgan,
  title     = {{GS-WGAN}: A Gradient-Sanitized Approach for Learning Differentially Private
               Generators},
  author    = {Chen, Dingfan and Orekondy, Tribhuvanesh and Fritz, Mario},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2020}
}"""


@dataclass
class ShardedCritics:
    """A group of critics on shards behind a gate.

    Attributes:
        gate: The gate in front of the records.
        init_rng: Random generator of the critics' initial weights.
        rng: Random generator of all training inputs, on the gate's device.
        num_critics: Number of critics, one for each shard.
        channels: Channels of a critic's first feature maps.
        batch_size: Records of a shard in a critic step.
        learning_rate: Learning rate of the critics' Adam.
        frequency_fraction: Fraction of the DCT coefficients of each side in a gradient.
        window_size: Pixels in the middle of each side that gradients cover; 0: all.
        records_per_critic: Records of a client in each shard, if shards belong to clients
            (see `Gate.split_into_shards`); 0: shards are parts of one data set.
        max_shift: Largest random shift of the critics' inputs, in pixels.
    """

    gate: Gate
    init_rng: torch.Generator
    rng: torch.Generator
    num_critics: int
    channels: int
    batch_size: int
    learning_rate: float
    frequency_fraction: float
    window_size: int = 0
    records_per_critic: int = 0
    max_shift: int = 0

    def __post_init__(self) -> None:
        spec = self.gate.spec
        device = self.rng.device
        self.critic = Critic(spec.shape, spec.num_classes, self.channels)
        self.tiny_generator = TinyGenerator(spec.shape, spec.num_classes)
        row_basis, column_basis = (
            build_gradient_basis(side, self.frequency_fraction, self.window_size).to(device)
            for side in spec.shape[1:]
        )
        self.gradient_kwargs: dict[str, Any] = {
            "critic": self.critic,
            "row_basis": row_basis,
            "column_basis": column_basis,
        }
        self.max_shift = limit_shift(self.max_shift, spec.shape)

    def initialize(self, warmup_rounds: int, progress: Progress, **extra_state: Tensor) -> None:
        """Split the records into shards and warm up every critic against its own tiny generator.

        Args:
            warmup_rounds: Number of rounds, each of five critic steps and one generator step.
            progress: Shows the progress.
            extra_state: Further tensors [num_critics, ...] of the critics' states.
        """
        # Clients cannot exchange weights, so their critics all start with the same public weights.
        # Their gradients at an image then agree more.
        state = init_state(
            self.critic,
            self.tiny_generator,
            self.num_critics,
            self.init_rng,
            identical=self.records_per_critic > 0,
        )
        self.gate.split_into_shards(self.num_critics, state | extra_state, self.records_per_critic)
        for warmup_round in range(warmup_rounds):
            latents = torch.randn(
                CRITIC_STEPS_PER_WARMUP_ROUND,
                self.batch_size,
                self.tiny_generator.latent_dim,
                generator=self.rng,
                device=self.rng.device,
            )
            self.gate.update_shards(
                warm_up,
                self.critic,
                self.tiny_generator,
                self._draw_uniform(CRITIC_STEPS_PER_WARMUP_ROUND),
                latents,
                self._draw_uniform(CRITIC_STEPS_PER_WARMUP_ROUND),
                self._to_tensor(warmup_round),
                self.learning_rate,
                self._draw_shifts(CRITIC_STEPS_PER_WARMUP_ROUND),
                records_per_step=self.batch_size,
            )
            progress("warming up the critics", warmup_round + 1, warmup_rounds)

    def train(self, fakes: Tensor, critic_indices: Tensor, steps: int, start_step: int) -> None:
        """Train some critics on their shards and on generated images.

        Args:
            fakes: Generated images [classes, count, channels, height, width].
            critic_indices: Indices of the critics, on the CPU.
            steps: Steps of each critic.
            start_step: Number of steps that these critics have been trained for.
        """
        self.gate.update_shards(
            train_critic,
            self.critic,
            fakes,
            *self.draw_training_inputs(fakes.shape[1], steps, start_step),
            shard_indices=critic_indices,
            records_per_step=self.batch_size,
        )

    def draw_training_inputs(self, num_fakes: int, steps: int, start_step: int) -> tuple[Any, ...]:
        """Draw the random inputs of `train_critic`.

        Args:
            num_fakes: Generated images of each class.
            steps: Steps of each critic.
            start_step: Number of steps that the critics have been trained for.

        Returns:
            The arguments of `train_critic` from `record_fractions` on.
        """
        fake_indices = torch.randint(
            num_fakes, (steps, self.batch_size), generator=self.rng, device=self.rng.device
        )
        return (
            self._draw_uniform(steps),
            fake_indices,
            self._draw_uniform(steps),
            self._to_tensor(start_step),
            self.learning_rate,
            self._draw_shifts(steps),
        )

    def to_pixels(self, gradients: Tensor) -> Tensor:
        """Turn DCT coefficients [..., rows, columns] into pixels [..., height, width]."""
        return (
            self.gradient_kwargs["row_basis"]
            @ gradients.float()
            @ self.gradient_kwargs["column_basis"].T
        )

    def _draw_uniform(self, steps: int) -> Tensor:
        return torch.rand(steps, self.batch_size, generator=self.rng, device=self.rng.device)

    def _draw_shifts(self, steps: int) -> Tensor | None:
        """Draw pixel shifts of real and generated images [steps, 2, batch, 2], None without any."""
        if not self.max_shift:
            return None
        size = (steps, 2, self.batch_size, 2)
        return torch.randint(
            -self.max_shift, self.max_shift + 1, size, generator=self.rng, device=self.rng.device
        )

    def _to_tensor(self, value: int) -> Tensor:
        return torch.tensor(float(value), device=self.rng.device)
