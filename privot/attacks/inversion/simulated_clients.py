"""Simulate clients of a federated run: critics trained on the attacker's records.

The simulated critics get the very images that a real client was sent. Everything that a client
computes is public except its records and its random numbers. So a simulated client, which has
random numbers of its own, returns what some other client would have returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from privot.components.client_critics import build_shared_init_rng
from privot.components.critic_gradients import build_gradient_basis, input_gradient
from privot.components.critic_training import (
    CRITIC_STEPS_PER_WARMUP_ROUND,
    CriticState,
    init_state,
    limit_shift,
    train_critic,
    warm_up,
)
from privot.federated.messages import Terms
from privot.nets.functional_critic import Critic
from privot.nets.tiny_generator import TinyGenerator
from privot.progress import Progress, ignore_progress


def simulate_clients(
    terms: Terms,
    requests: Tensor,
    images: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    progress: Progress = ignore_progress,
) -> tuple[Tensor, CriticState]:
    """Compute the input gradients that clients with other records would compute.

    Where the privacy unit is the record, a client has several critics; here it has one critic on
    all its records, which knows more.

    Args:
        terms: Terms of the run.
        requests: Images that the real client was sent, uint8 [rounds, classes, rows, c, h, w].
        images: Records of the simulated clients [clients, count, c, h, w].
        labels: [clients, count].
        generator: Random generator of all random numbers.
        progress: Shows the progress.

    Returns:
        Input gradients before clipping and noise [clients, rounds, classes, rows, c, h', w'], and
        the state of the critics at the end.
    """
    critics = _SimulatedCritics(terms, images, labels, generator)
    for warmup_round in range(terms.settings.warmup_rounds):
        progress("warming up simulated clients", warmup_round, terms.settings.warmup_rounds)
        critics.warm_up(warmup_round)
    gradients = []
    for round_index, request in enumerate(requests):
        progress("simulating clients", round_index, len(requests))
        fakes = request.to(images.device).float() / 255
        critics.train_round(fakes, round_index)
        gradients.append(critics.compute_input_gradients(fakes).cpu())
    progress("simulating clients", len(requests), len(requests))
    return torch.stack(gradients, 1), critics.state


class _SimulatedCritics:
    """The critics of all simulated clients, one each.

    Args:
        terms: Terms of the run.
        images: [clients, count, c, h, w].
        labels: [clients, count].
        generator: Random generator of all random numbers.
    """

    def __init__(self, terms: Terms, images: Tensor, labels: Tensor, generator: torch.Generator):
        self.terms = terms
        self.settings = terms.settings
        self.images = images
        self.labels = labels
        self.generator = generator
        self.device = images.device
        self.num_clients = len(images)
        self.batch_size = self.settings.critic_batch_size
        self.max_shift = limit_shift(self.settings.max_shift, terms.shape)
        self.critic = Critic(terms.shape, terms.num_classes, self.settings.critic_channels)
        self.tiny_generator = TinyGenerator(terms.shape, terms.num_classes)
        # The initial weights are public and the same for all clients.
        initial_state = init_state(
            self.critic,
            self.tiny_generator,
            self.num_clients,
            build_shared_init_rng(),
            identical=True,
        )
        self.state = {name: value.to(self.device) for name, value in initial_state.items()}

    def warm_up(self, warmup_round: int) -> None:
        """Train the critics against their tiny generators for one round."""
        steps = CRITIC_STEPS_PER_WARMUP_ROUND
        latents = torch.randn(
            self.num_clients,
            steps,
            self.batch_size,
            self.tiny_generator.latent_dim,
            generator=self.generator,
        ).to(self.device)
        self._train(warm_up, self.tiny_generator, latents, warmup_round)

    def train_round(self, fakes: Tensor, round_index: int) -> None:
        """Train the critics against the images [classes, rows, c, h, w] of one round."""
        steps = self.settings.critic_steps
        fake_indices = torch.randint(
            fakes.shape[1], (self.num_clients, steps, self.batch_size), generator=self.generator
        ).to(self.device)
        num_warmup_steps = CRITIC_STEPS_PER_WARMUP_ROUND * self.settings.warmup_rounds
        self._train(train_critic, fakes, fake_indices, num_warmup_steps + round_index * steps)

    def compute_input_gradients(self, fakes: Tensor) -> Tensor:
        """Compute input gradients [clients, classes, rows, c, h', w'] of [classes, rows, ...]."""
        row_basis, column_basis = (
            build_gradient_basis(
                side, self.settings.frequency_fraction, self.settings.window_size
            ).to(self.device)
            for side in self.terms.shape[1:]
        )
        labels = torch.arange(self.terms.num_classes, device=self.device).repeat_interleave(
            fakes.shape[1]
        )
        compute_gradients = vmap(
            functools.partial(
                input_gradient,
                critic=self.critic,
                row_basis=row_basis,
                column_basis=column_basis,
            ),
            in_dims=(None, 0, 0),
        )
        gradients = vmap(compute_gradients, in_dims=(0, None, None))(
            self.state, fakes.flatten(0, 1), labels
        )
        return gradients.unflatten(1, fakes.shape[:2])

    def _train(
        self,
        train_step: Callable[..., CriticState],
        fake_source: Any,
        fake_draws: Tensor,
        first_step: int,
    ) -> None:
        """Train every critic with random numbers of its own, as real clients do.

        Args:
            train_step: `train_critic` or `warm_up`.
            fake_source: The generated images, or the tiny generator.
            fake_draws: Indices or latents [clients, steps, batch, ...].
            first_step: Steps, or warm-up rounds, before.
        """
        steps = fake_draws.shape[1]
        record_fractions = self._sample_uniform(steps)
        mix_weights = self._sample_uniform(steps)
        shifts = None
        if self.max_shift:
            shifts = torch.randint(
                -self.max_shift,
                self.max_shift + 1,
                (self.num_clients, steps, 2, self.batch_size, 2),
                generator=self.generator,
            ).to(self.device)
        shift_axis = None if shifts is None else 0
        axes = (0, 0, 0, None, None, 0, 0, 0, None, None, shift_axis)
        self.state = vmap(train_step, in_dims=axes)(
            self.images,
            self.labels,
            self.state,
            self.critic,
            fake_source,
            record_fractions,
            fake_draws,
            mix_weights,
            torch.tensor(float(first_step), device=self.device),
            self.settings.critic_learning_rate,
            shifts,
        )

    def _sample_uniform(self, steps: int) -> Tensor:
        return torch.rand(self.num_clients, steps, self.batch_size, generator=self.generator).to(
            self.device
        )
