"""The two alternating steps of gradient matching: move the set, and train the network on it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privot.baselines.augmentation_buffer import AugmentationBuffer
from privot.baselines.condensation import ClassPool, PixelOptimizer
from privot.data.spec import Spec
from privot.nets.augment import AugmentParams, apply_augmentations
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.conv_block import autocast_half
from privot.nets.generators.conv import initialize_weights
from privot.runtime import Streams
from privot.runtime.cuda_graphs import GraphedStep

NET_LEARNING_RATE = 0.01  # of the network's plain gradient steps
NET_BATCH_SIZE = 256  # most images in one of them
NORM_EPSILON = 1e-6  # for rows that are 0, as in the papers' code


def compute_row_cosine_distance(real: list[Tensor], synthetic: list[Tensor]) -> Tensor:
    """Compute 1 - cosine of each output row, summed over the rows of all tensors."""
    total = torch.zeros((), device=real[0].device)
    for real_gradient, synthetic_gradient in zip(real, synthetic, strict=True):
        real_rows = real_gradient.flatten(1)
        synthetic_rows = synthetic_gradient.flatten(1)
        inner_product = (real_rows * synthetic_rows).sum(1)
        norm_product = real_rows.norm(dim=1) * synthetic_rows.norm(dim=1)
        total = total + (1 - inner_product / (norm_product + NORM_EPSILON)).sum()
    return total


def compute_class_gradient(
    net: nn.Module, real_images: Tensor, weights: Tensor, synthetic_images: Tensor, label: Tensor
) -> Tensor:
    """Compute the gradient of the distance with respect to the synthetic images of one class.

    Biases and norms, which have one dimension, are not compared.

    Args:
        net: The network.
        real_images: Real images of the class [batch, ...].
        weights: Their weights [batch], whose sum is 1.
        synthetic_images: Input of the network [images_per_class, ...].
        label: The class, a scalar.

    Returns:
        The gradient [images_per_class, ...].
    """
    parameters = [parameter for parameter in net.parameters() if parameter.ndim > 1]
    with autocast_half(real_images.device):
        losses = cross_entropy(net(real_images), label.expand(len(real_images)), reduction="none")
    # Outside autocast, which would round the losses to half precision.
    real = torch.autograd.grad(losses.float() @ weights, parameters)
    loss = cross_entropy(net(synthetic_images), label.expand(len(synthetic_images)))
    synthetic = torch.autograd.grad(loss, parameters, create_graph=True)
    distance = compute_row_cosine_distance(list(real), list(synthetic))
    return torch.autograd.grad(distance, synthetic_images)[0]


class MatchingRun:
    """The set and the current network. On a GPU each of the two steps is one CUDA graph.

    Args:
        spec: Shape and number of classes.
        pool: The records.
        pixels: The set.
        labels: Labels of the set [count].
        streams: Public random streams.
        batch_per_class: Records of a class in a step.
        augment: Whether images are augmented.
        net_width: Channels of each block of the network.
        net_depth: Number of blocks.
    """

    def __init__(
        self,
        spec: Spec,
        pool: ClassPool,
        pixels: PixelOptimizer,
        labels: Tensor,
        streams: Streams,
        *,
        batch_per_class: int,
        augment: bool,
        net_width: int,
        net_depth: int,
    ):
        device = streams.runtime.torch_device
        self.pool = pool
        self.pixels = pixels
        self.labels = labels
        self.batch_per_class = batch_per_class
        self.class_indices = torch.arange(spec.num_classes, device=device)
        self.rng = streams.make_rng("draws", device)
        self.net = ConvNet(spec.shape, spec.num_classes, net_width, net_depth).to(device)
        self.matching_augmentations: AugmentationBuffer | None = None
        self.training_augmentations: AugmentationBuffer | None = None
        if augment:
            self.matching_augmentations = AugmentationBuffer(
                spec.num_classes, spec, streams.make_rng("siamese", device), device
            )
            self.training_augmentations = AugmentationBuffer(
                len(labels), spec, streams.make_rng("augment", device), device
            )
        # Batches of an epoch have equal size: 500 images are two batches of 250.
        self.num_batches = math.ceil(len(labels) / NET_BATCH_SIZE)
        self._graphed_match = GraphedStep(self._match_step, device, self.rng)
        self._graphed_training = GraphedStep(self._train_epoch, device, self.rng)

    def reset_net(self) -> None:
        """Replace the network by a new random one."""
        initialize_weights(self.net, self.rng)
        for module in self.net.modules():
            if isinstance(module, nn.GroupNorm):
                module.reset_parameters()

    def match_gradients(self) -> None:
        """Move the set one step toward the gradients of the data."""
        if self.matching_augmentations:
            self.matching_augmentations.refill_if_empty()
        self._graphed_match()

    def train_net(self) -> None:
        """Train the network on the set for one epoch."""
        if self.training_augmentations:
            self.training_augmentations.refill_if_empty()
        self._graphed_training()

    def _match_step(self) -> None:
        real, weights = self.pool.sample(self.batch_per_class, self.rng)
        params = self.matching_augmentations.next_params() if self.matching_augmentations else None
        images = self.pixels.pixels.detach().unflatten(0, (len(self.class_indices), -1))
        # Class by class, with plain convolutions: a batch of one class occupies a GPU, and in one
        # graph kernel launches are cheap.
        classes = zip(real, weights, images, self.class_indices, strict=True)
        self.pixels.apply_gradient(
            torch.cat([self._compute_class_gradient(*batch, params) for batch in classes])
        )

    def _compute_class_gradient(
        self,
        real: Tensor,
        weights: Tensor,
        images: Tensor,
        label: Tensor,
        params: AugmentParams | None,
    ) -> Tensor:
        """Compute the gradient with respect to the pixels of one class.

        Args:
            real: Real images of the class [batch, ...].
            weights: Their weights [batch].
            images: Images of the set [images_per_class, ...].
            label: The class, a scalar.
            params: Augmentations by class, shared by real and synthetic images, or None.

        Returns:
            The gradient [images_per_class, ...].
        """
        images = images.clone().requires_grad_()
        if params is None:
            return compute_class_gradient(self.net, real, weights, images, label)
        augmented_real, augmented_images = (
            apply_augmentations(batch, params.select(label.expand(len(batch))))
            for batch in (real, images)
        )
        output_gradient = compute_class_gradient(
            self.net, augmented_real, weights, augmented_images, label
        )
        (gradient,) = torch.autograd.grad(augmented_images, images, output_gradient)
        return gradient

    def _train_epoch(self) -> None:
        images = self.pixels.pixels.detach()
        if self.training_augmentations:
            images = apply_augmentations(images, self.training_augmentations.next_params())
        order = torch.rand(len(images), generator=self.rng, device=images.device).argsort()
        batch_size = len(images) // self.num_batches
        parameters = list(self.net.parameters())
        for indices in order[: batch_size * self.num_batches].split(batch_size):
            with autocast_half(images.device):
                loss = cross_entropy(self.net(images[indices]), self.labels[indices])
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=NET_LEARNING_RATE)
