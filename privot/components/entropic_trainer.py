"""Training of the entropic GAN on what clients sent through a channel. All of it is public."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from privot.components.entropic_settings import EntropicSettings, configure_generator
from privot.local.frequency_estimation import (
    apportion_labels,
    describe_residual,
    estimate_frequencies,
)
from privot.nets import GENERATORS, initialize_weights
from privot.nets.ema import EmaTrainer, cosine_warmup
from privot.runtime import Streams
from privot.runtime.cuda_graphs import GraphedStep
from privot.transport.entropic import (
    count_sufficient_iterations,
    entropic_loss,
    likelihood_loss,
    solve_sinkhorn,
)

RECORD_LEARNING_RATE = 2e-3  # default for numbers and categories
IMAGE_LEARNING_RATE = 5e-4  # default for images
ADAM_BETAS = (0.5, 0.999)
PLAN_TOLERANCE = 1e-4  # largest relative error of the transport plan's marginals in a step
# Largest number of Sinkhorn iterations in a step. The residual is computed with as many as needed.
MAX_SINKHORN_ITERATIONS = 100


class EntropicTrainer:
    """The generator with its optimizer, and the outputs that clients sent.

    On a GPU a step, random draws included, is one CUDA graph, and the number of Sinkhorn iterations
    follows from epsilon alone. On a CPU the iterations stop when the plan is exact enough.

    Args:
        settings: The settings.
        dataset: The `PrivatizedDataset` of the clients.
        streams: Public random streams and checkpoints.
    """

    def __init__(self, settings: EntropicSettings, dataset: Any, streams: Streams):
        device = streams.runtime.torch_device
        self.settings = settings
        self.channel = dataset.channel
        self.has_labels = dataset.has_labels
        self.device = device
        self.values = dataset.values.to(device)
        self.temperature = settings.regularization * dataset.channel.temperature
        self.generator_class, self.generator_config = configure_generator(
            settings, dataset.spec, dataset.channel, dataset.has_labels
        )
        net = initialize_weights(
            GENERATORS[self.generator_class](**self.generator_config),
            streams.make_rng("weights"),
        )
        self.learning_rate = settings.learning_rate or (
            RECORD_LEARNING_RATE
            if self.generator_class == "TabularGenerator"
            else IMAGE_LEARNING_RATE
        )
        self.generator_trainer = EmaTrainer(
            net.to(device).train(), self.learning_rate, ADAM_BETAS, settings.ema_decay
        )
        self.generator_trainer.restore(streams.load_checkpoint("training"))
        self.classes = dataset.spec.num_classes
        if self.has_labels:  # class frequencies are estimated from the outputs, too
            label_channel = dataset.channel.parts[-1]
            frequencies = estimate_frequencies(
                label_channel, self.values[:, -label_channel.output_dim :]
            )
        else:
            frequencies = torch.full((self.classes,), 1 / self.classes)
        self.labels = apportion_labels(frequencies, settings.batch_size).to(device)
        # A resumed run uses a fresh stream, since the first latents of its stream were used before.
        self.rng = streams.make_rng(f"codes {self.generator_trainer.steps}", device)
        self.sinkhorn_iterations = (
            count_sufficient_iterations(dataset.channel.epsilon) if device.type == "cuda" else None
        )
        self._graphed_step = GraphedStep(self._update, device, self.rng)

    def train_step(self, step: int) -> None:
        """Take one Adam step; `step` counts from 0."""
        self.generator_trainer.prepare_step(
            cosine_warmup(self.learning_rate, step, self.settings.steps)
        )
        self._graphed_step()

    def compute_cost(self, net: Any) -> Tensor:
        """Compute the cost between generated records and sampled outputs: [batch, batch]."""
        size = self.settings.batch_size
        latents = torch.randn(size, net.latent_dim, generator=self.rng, device=self.device)
        indices = torch.randint(len(self.values), (size,), generator=self.rng, device=self.device)
        points = (
            net.generate_relaxed(latents, self.labels)
            if self.generator_class == "TabularGenerator"
            else net(latents, self.labels).flatten(1)
        )
        if self.has_labels:
            points = torch.cat([points, one_hot(self.labels, self.classes).to(points)], 1)
        cost: Tensor = self.channel.compute_cost_matrix(points, self.values[indices])
        return cost

    def _update(self) -> None:
        """Compute the loss and take one step."""
        cost = self.compute_cost(self.generator_trainer.net)
        loss = (
            entropic_loss(
                cost,
                self.temperature,
                self.sinkhorn_iterations,
                PLAN_TOLERANCE,
                MAX_SINKHORN_ITERATIONS,
            )
            if self.settings.loss == "eot"
            else likelihood_loss(cost, self.temperature)
        )
        loss.backward()
        self.generator_trainer.apply_step()

    def measure_residual(self, num_batches: int) -> dict[str, Any]:
        """Compare the cost between outputs and generated records with that of the noise alone.

        No clean record is needed.

        Args:
            num_batches: Number of batches to average over.

        Returns:
            The diagnostics of `describe_residual`.
        """
        batch_costs = []
        max_plan_error = 0.0
        with torch.no_grad():
            for _ in range(num_batches):
                cost = self.compute_cost(self.generator_trainer.ema_net)
                solution = solve_sinkhorn(cost, self.temperature, tolerance=PLAN_TOLERANCE)
                plan = solution.compute_plan(cost / self.temperature)
                batch_costs.append((plan * cost).sum(0) / plan.sum(0))
                max_plan_error = max(max_plan_error, float(solution.marginal_error))
        output_costs = torch.cat(batch_costs).double()
        return describe_residual(
            float(output_costs.mean()),
            self.channel.compute_expected_cost(),
            float(output_costs.std() / math.sqrt(len(output_costs))),
            max_plan_error,
        )

    def finalize_generator(self) -> nn.Module:
        """Return the generator with averaged weights."""
        return self.generator_trainer.recalibrate(self.compute_cost)
