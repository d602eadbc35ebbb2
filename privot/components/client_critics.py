"""The clients' side: critics trained on the records of one client each, queried through a gate.

The code is the same for one client behind its own gate on another machine, and for a simulation of
all clients behind one gate.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from privot.components.critic_gradients import input_gradient, unit_input_gradient
from privot.components.critic_training import (
    CRITIC_STEPS_PER_WARMUP_ROUND,
    CriticState,
    train_critic,
)
from privot.components.federated_settings import FederatedSettings
from privot.components.sharded_critics import ShardedCritics
from privot.nets.functional_critic import Critic
from privot.privacy.gate import Gate
from privot.runtime import Progress, Streams, ignore_progress


def train_on_received(
    images: Tensor,
    labels: Tensor,
    state: CriticState,
    critic: Critic,
    fakes: Tensor,
    client_rows: Tensor,
    *training_inputs: Any,
) -> CriticState:
    """Train a critic against the images that its client received, and note the client's classes.

    Args:
        images: Records of the shard [size, channels, height, width].
        labels: Their labels [size].
        state: State of the critic, with the index of its client.
        critic: Architecture of the critic.
        fakes: Generated images [clients of this round, classes, count, channels, height, width].
        client_rows: Row of `fakes` for each client [num_clients].
        training_inputs: Further arguments of `train_critic`.

    Returns:
        The new state.
    """
    seen_classes = (labels[:, None] == torch.arange(critic.classes, device=labels.device)).any(0)
    received = fakes[client_rows[state["client"][None]]][0]
    trained = train_critic(images, labels, state, critic, received, *training_inputs)
    return trained | {"seen_classes": seen_classes}


def masked_gradient(
    state: CriticState,
    image: Tensor,
    label: Tensor,
    normalize_gradients: bool,
    mask_missing_classes: bool,
    **gradient_kwargs: Any,
) -> Tensor:
    """Compute the input gradient of an image, zero if the critic has no record of its class.

    Args:
        state: State of the critic.
        image: One image [channels, height, width].
        label: Its label [].
        normalize_gradients: Whether to scale the gradient to norm 1.
        mask_missing_classes: Whether to return 0 for classes without a record.
        gradient_kwargs: Further arguments of `input_gradient`.

    Returns:
        The gradient [channels, rows, columns].
    """
    compute_gradient = unit_input_gradient if normalize_gradients else input_gradient
    gradient = compute_gradient(state, image, label, **gradient_kwargs)
    return gradient * state["seen_classes"][label[None]] if mask_missing_classes else gradient


def build_shared_init_rng() -> torch.Generator:
    """Return the generator of the critics' initial weights, which are the same in every run."""
    return Streams(0).make_rng("an owner's critic")


class ClientCritics:
    """The critics of all clients behind a gate.

    Args:
        gate: The gate in front of the records.
        settings: Settings of the federation.
        streams: Public random streams.
        progress: Shows the progress.
        is_warmed_up: Whether the critics were warmed up before. None: decided by whether queries
            were made before.
    """

    def __init__(
        self,
        gate: Gate,
        settings: FederatedSettings,
        streams: Streams,
        progress: Progress = ignore_progress,
        is_warmed_up: bool | None = None,
    ):
        self.gate = gate
        self.settings = settings
        self.num_clients = gate.spec.num_clients or 1
        self.total_queries = gate.plan.stages[0].steps
        num_remaining = gate.count_remaining_queries(settings.stage)
        # A resumed process uses a fresh stream.
        rng = streams.make_rng(
            f"lessons of owners, {num_remaining} left", streams.runtime.torch_device
        )
        # The initial weights are the same in every run, so that clients need not exchange them.
        self.critics = ShardedCritics(
            gate,
            build_shared_init_rng(),
            rng,
            self.num_clients * settings.critics_per_client,
            settings.critic_channels,
            settings.critic_batch_size,
            settings.critic_learning_rate,
            settings.frequency_fraction,
            settings.window_size,
            settings.records_per_critic,
            settings.max_shift,
        )
        client = torch.arange(self.num_clients).repeat_interleave(settings.critics_per_client)
        seen_classes = torch.zeros(len(client), gate.spec.num_classes, dtype=torch.bool)
        if is_warmed_up is None:
            is_warmed_up = num_remaining < self.total_queries
        self.critics.initialize(
            0 if is_warmed_up else settings.warmup_rounds,
            progress,
            client=client,
            seen_classes=seen_classes,
        )

    def query_gradients(
        self, client_indices: Sequence[int], images: Tensor, turn_index: int | None = None
    ) -> Tensor:
        """Train the critics of some clients on received images and query gradients at these images.

        Args:
            client_indices: Indices of the clients.
            images: Generated images as uint8 [clients, classes, count, channels, height, width].
            turn_index: How often these clients were queried before. None: computed from the
                number of remaining queries.

        Returns:
            Noisy gradients in DCT coefficients, as float64
            [clients, classes, count, channels, rows, columns].
        """
        num_queried, classes, count = images.shape[:3]
        if turn_index is None:
            num_remaining = self.gate.count_remaining_queries(self.settings.stage)
            turn_index = (self.total_queries - num_remaining) // (classes * count)
        fakes = images.float() / 255
        clients = torch.tensor(client_indices)
        self._train_critics(clients, fakes, turn_index)
        query = functools.partial(
            masked_gradient,
            normalize_gradients=self.settings.normalize_gradients,
            mask_missing_classes=self.settings.mask_missing_classes,
            **self.critics.gradient_kwargs,
        )
        labels = torch.arange(classes, device=fakes.device).repeat_interleave(count)
        all_clients = list(client_indices) == list(range(self.num_clients))
        gradients = self.gate.query_clients(
            self.settings.stage,
            query,
            fakes.flatten(1, 2),
            labels.expand(num_queried, -1),
            clip_norm=1.0,
            client_indices=None if all_clients else clients,
        )
        return gradients.unflatten(1, (classes, count))

    def _train_critics(self, clients: Tensor, fakes: Tensor, turn_index: int) -> None:
        """Train the critics of some clients, each against the images that its client received."""
        settings = self.settings
        client_rows = (
            torch.zeros(self.num_clients, dtype=torch.int64)
            .index_copy_(0, clients, torch.arange(len(clients)))
            .to(fakes.device, non_blocking=True)
        )
        training_inputs = self.critics.draw_training_inputs(
            fakes.shape[2],
            settings.critic_steps,
            CRITIC_STEPS_PER_WARMUP_ROUND * settings.warmup_rounds
            + turn_index * settings.critic_steps,
        )
        # privacy: which critics are trained depends only on which clients are queried, and the
        # server knows that.
        critic_of_client = torch.arange(settings.critics_per_client)
        critic_indices = clients[:, None] * settings.critics_per_client + critic_of_client
        self.gate.update_shards(
            train_on_received,
            self.critics.critic,
            fakes,
            client_rows,
            *training_inputs,
            shard_indices=critic_indices.flatten(),
            records_per_step=settings.critic_batch_size,
        )
