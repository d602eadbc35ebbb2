"""The public side of DP-Sinkhorn: a generator and its training by noisy transport gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from privot.components.dct import dct_basis
from privot.components.sinkhorn_queries import (
    NORM_EPSILON,
    compute_attraction,
    compute_labeled_cost,
    group_by_class,
    project_low_frequencies,
)
from privot.components.sinkhorn_settings import SinkhornSettings
from privot.data.spec import Spec
from privot.nets.ema import EmaTrainer, cosine_warmup
from privot.runtime import Streams
from privot.runtime.cuda_graphs import GraphedStep
from privot.transport.sinkhorn import (
    entropic_transport_cost,
    solve_potentials,
    squared_euclidean_cost,
)

# Distance between images of 784 pixels in [-1, 1] of one class, on MNIST and similar data.
TYPICAL_CLASS_DISTANCE = 16.0
ADAM_BETAS = (0.9, 0.999)


class SinkhornTrainer:
    """A generator with its optimizer and the current batch of images to query.

    On a GPU a step is one CUDA graph, so everything that changes from step to step is in buffers.

    Args:
        settings: The settings.
        net: The generator.
        spec: Spec of the data.
        streams: Public random streams and checkpoints.
        is_resumed: Whether to load the checkpoint.

    Attributes:
        images: Current images [count, channels, height, width]; their classes take turns.
        labels: Their labels [count].
        points: Their DCT coefficients [count, dim].
        potentials: Potentials of the points by class [classes, count / classes].
        repulsion: Gradient that drives the points apart [count, dim].
    """

    def __init__(
        self,
        settings: SinkhornSettings,
        net: nn.Module,
        spec: Spec,
        streams: Streams,
        is_resumed: bool = False,
    ):
        device = streams.runtime.torch_device
        self.settings = settings
        self.classes = spec.num_classes
        self.clip_norm, self.blur = settings.scale_to_image(spec)
        # Weight of the squared high frequencies, which are zero in y. The loss has 2 |x - y| near
        # the typical distance, or 2 |x - y|^2 with the paper's cost.
        self.high_frequency_weight = (
            1 / (TYPICAL_CLASS_DISTANCE * math.sqrt(spec.num_features / 784))
            if settings.clip_unit == "record"
            else 2.0
        )
        self.generator_trainer = EmaTrainer(
            net, settings.learning_rate, ADAM_BETAS, settings.ema_decay
        )
        row_basis, column_basis = (
            dct_basis(side, num_frequencies)
            for side, num_frequencies in zip(
                spec.shape[1:], settings.count_frequencies(spec), strict=True
            )
        )
        self.basis = torch.kron(row_basis, column_basis).to(device)
        count = spec.num_classes * -(-settings.batch_size // spec.num_classes)
        self.labels = torch.arange(count, device=device) % spec.num_classes
        self.num_fresh = round(settings.fresh_fraction * count)
        if is_resumed:
            self.generator_trainer.restore(streams.load_checkpoint("training"))
        # A resumed run uses a fresh stream, since the first latents of its stream were used before.
        self.rng = streams.make_rng(f"codes {self.generator_trainer.steps}", device)
        self.latents = torch.empty(count, settings.latent_dim, device=device)
        num_comparisons = 2 if settings.clip_unit == "record" else 1
        self.comparison_latents = torch.empty(
            num_comparisons, count, settings.latent_dim, device=device
        )
        self.images = torch.empty(count, *spec.shape, device=device)
        self.points = torch.zeros(count, spec.shape[0] * self.basis.shape[1], device=device)
        self.noisy_gradient = torch.zeros_like(self.points)
        self.repulsion = torch.zeros_like(self.points)
        self.potentials = torch.zeros(spec.num_classes, count // spec.num_classes, device=device)
        net.train()
        self._draw_batch()
        self._graphed_step = GraphedStep(self._update, device, self.rng)

    def train_step(self, step: int, noisy_gradient: Tensor) -> None:
        """Take one Adam step along the gradient of the current points and draw a new batch.

        Args:
            step: Number of the step, from 0.
            noisy_gradient: Noisy gradient with respect to `points` [count, dim].
        """
        self.noisy_gradient.copy_(noisy_gradient)
        self.generator_trainer.prepare_step(
            cosine_warmup(self.settings.learning_rate, step, self.settings.steps)
        )
        self._graphed_step()

    def finalize_generator(self) -> nn.Module:
        """Return the generator with averaged weights."""
        return self.generator_trainer.recalibrate(
            lambda net: net(self.latents.normal_(generator=self.rng), self.labels)
        )

    def _update(self) -> None:
        """Compute the loss whose gradient is the query result, take a step and draw a new batch."""
        settings = self.settings
        count = len(self.labels)
        images = self.generator_trainer.net(self.latents, self.labels)
        points = project_low_frequencies(images, self.basis)
        loss = 2 / math.sqrt(count) * (points * (self.noisy_gradient - self.repulsion)).sum()
        if settings.clip_unit == "batch" and self.num_fresh:
            loss = loss - self._self_transport_cost(points)
        # High frequencies are not queried, and nothing else bounds them. They are pulled to zero,
        # as by records without high frequencies.
        loss = loss + self.high_frequency_weight / count * (
            (2 * images - 1).square().sum() - points.square().sum()
        )
        loss.backward()
        self.generator_trainer.apply_step()
        self._draw_batch()

    def _self_transport_cost(self, points: Tensor) -> Tensor:
        """Compute W(X, X') where a fraction of X' is generated anew, with the paper's cost."""
        settings = self.settings
        fresh_images = self.generator_trainer.net(self.comparison_latents[0], self.labels)
        fresh_points = project_low_frequencies(fresh_images[: self.num_fresh], self.basis)
        cost = compute_labeled_cost(
            points,
            torch.cat([fresh_points, points[self.num_fresh :]]),
            self.labels,
            self.labels,
            self.basis,
            settings.label_distance,
            settings.l1_weight,
        )
        return entropic_transport_cost(cost, self.blur, num_iterations=settings.sinkhorn_iterations)

    def _draw_batch(self) -> None:
        """Draw latents and generate their images, with batch norm in training mode.

        With ``clip_unit=record`` it also computes the potentials and the repulsion of the points.
        """
        for latents in (self.latents, self.comparison_latents):
            latents.normal_(generator=self.rng)
        with torch.no_grad():
            self.images.copy_(self.generator_trainer.net(self.latents, self.labels))
            self.points.copy_(project_low_frequencies(self.images, self.basis))
            if self.settings.clip_unit == "record":
                self._update_repulsion()

    def _update_repulsion(self) -> None:
        """Compute the potentials and the repulsion of the points.

        The potentials solve the transport to other generated points of the same class. They are
        those to the records once generator and records have one distribution; before that they are
        an approximation. The repulsion is the gradient of generated points in the place of records,
        clipped like records. Whatever the potentials are, it cancels the records' attraction on
        average where both distributions agree. For that, these generated points must differ from
        the ones that the potentials were solved for.
        """
        points, fitted_points, other_points = (
            group_by_class(values, self.classes)
            for values in (
                self.points,
                *(
                    project_low_frequencies(
                        self.generator_trainer.net(latents, self.labels), self.basis
                    )
                    for latents in self.comparison_latents
                ),
            )
        )
        cost = (squared_euclidean_cost(points, fitted_points) + NORM_EPSILON).sqrt()
        self.potentials.copy_(
            solve_potentials(cost, self.blur, num_iterations=self.settings.sinkhorn_iterations).f
        )
        # Gradients of each of the other points [classes, others, count, dim].
        gradients = compute_attraction(
            other_points, points[:, None], self.potentials[:, None], self.blur
        )
        norms = torch.linalg.vector_norm(gradients, dim=(2, 3), keepdim=True)
        means = (gradients * (self.clip_norm / norms.clamp(min=self.clip_norm))).mean(1)
        scale = self.settings.fresh_fraction * math.sqrt(len(self.labels)) / self.classes
        self.repulsion.copy_(means.transpose(0, 1).flatten(0, 1) * scale)
