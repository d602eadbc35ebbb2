"""One run of the training loop. On a GPU its step is captured as one CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privot.nets import augment
from privot.nets.batch_sampler import BatchSampler
from privot.nets.conv_block import autocast_half
from privot.nets.ensemble import Ensemble
from privot.nets.recipe import Recipe
from privot.runtime.cuda_graphs import GraphedStep


class TrainingRun:
    """Trains a network, or all nets of an ensemble: static buffers and a step that reads them.

    The buffers have rows for each net of an ensemble, [nets * batch_size, ...].

    Args:
        net: The network or ensemble, in training mode.
        images: Images [count, channels, height, width], or [nets, count, ...] with images for
            each net.
        labels: Labels [count], soft labels [count, classes], or either with a leading [nets].
        recipe: How to train.
        pad_value: Value of the pixels outside an image.
        signed: Whether the network gets images as 2x - 1.
    """

    def __init__(
        self,
        net: nn.Module,
        images: Tensor,
        labels: Tensor,
        recipe: Recipe,
        pad_value: float = 0.0,
        signed: bool = False,
    ):
        self.net = net
        self.recipe = recipe
        self.device = images.device
        self.signed = signed
        self.num_images = images.shape[-4]
        self.num_nets = net.num_nets if isinstance(net, Ensemble) else 1
        self.has_separate_data = images.ndim == 5
        if self.has_separate_data:  # the images of all nets, one net after another
            images = images.flatten(0, 1)
            labels = labels.flatten(0, 1)
        pad = recipe.max_shift
        padding = (pad, pad, pad, pad)
        self.images = nn.functional.pad(images, padding, value=pad_value) if pad else images
        self.labels = labels
        self.height, self.width = images.shape[2:]
        self.sampler = BatchSampler(
            recipe, self.num_images, self.num_nets, (self.height, self.width)
        )
        self.batch_size = self.sampler.batch_size
        self.parameters: list[Any] = list(net.parameters())
        self.optimizer = _build_optimizer(self.parameters, recipe, self.device)
        self.ema_parameters = (
            [parameter.detach().clone() for parameter in self.parameters]
            if recipe.ema_decay
            else []
        )
        self.current_decay = torch.zeros((), device=self.device)
        self.step_count = 0
        self._allocate_buffers()
        self.graphed_step = GraphedStep(self.step, self.device)

    def _allocate_buffers(self) -> None:
        """Allocate the random numbers of one step, which each replay of the graph reads."""
        rows = self.num_nets * self.batch_size
        # index of the image, shift down, shift right, flipped
        self.crop_params = torch.zeros(rows, 4, dtype=torch.int64, device=self.device)
        self.augment_params: augment.AugmentParams | tuple[()] = ()
        if self.recipe.augmentations:
            placeholder = augment.sample_augment_params(
                rows, 1, torch.Generator(), self.recipe.augmentations
            )
            self.augment_params = placeholder.to(self.device)

    def run(
        self,
        generator: torch.Generator | Sequence[torch.Generator],
        progress: Callable[[str, int, int], None],
        stage: str,
    ) -> None:
        """Train for all epochs of the recipe.

        Args:
            generator: Source of the random numbers: one for all nets, or one for each net.
            progress: Receives the stage, the number of finished epochs and that of all epochs.
            stage: Name of the stage for `progress`.
        """
        recipe = self.recipe
        progress(stage, 0, recipe.epochs)
        for epoch in range(recipe.epochs):
            num_drops = sum(epoch >= milestone for milestone in recipe.lr_milestones)
            self.set_learning_rate(recipe.learning_rate * 0.1**num_drops)
            self.run_epoch(generator)
            progress(stage, epoch + 1, recipe.epochs)
        self.apply_ema()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Change the learning rate, which is part of the graph: the step is captured again."""
        if self.optimizer.param_groups[0]["lr"] != learning_rate:
            self.optimizer.param_groups[0]["lr"] = learning_rate
            # The gradients lie in the memory of the old graph.
            self.optimizer.zero_grad(set_to_none=True)
            self.graphed_step = GraphedStep(self.step, self.device)

    def run_epoch(self, generator: torch.Generator | Sequence[torch.Generator]) -> None:
        """Train for one epoch in a new order.

        The random numbers of the epoch are drawn at once, before the device needs them.
        """
        random_numbers = self.sampler.sample_epoch(generator)
        if self.has_separate_data:
            random_numbers[0][..., 0] += self.num_images * torch.arange(self.num_nets)[:, None]
        rows = len(self.crop_params)
        steps = zip(
            *(self._to_device(values.flatten(0, 2)).split(rows) for values in random_numbers),
            strict=True,
        )
        for step_values in steps:
            buffers = (self.crop_params, *self.augment_params)
            for buffer, values in zip(buffers, step_values, strict=True):
                buffer.copy_(values)
            self.step_count += 1
            warmup_decay = (1 + self.step_count) / (10 + self.step_count)
            self.current_decay.fill_(min(self.recipe.ema_decay, warmup_decay))
            self.graphed_step()

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Copy to the device; from pinned memory, so that neither side waits for the other."""
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def step(self) -> None:
        """Train on the batch that the buffers describe."""
        self.optimizer.zero_grad(set_to_none=True)
        images = self._load_batch()
        labels = self.labels[self.crop_params[:, 0]]
        if isinstance(self.net, Ensemble):
            self._backward_each_net(self.net, images, labels)
        else:
            with self._autocast():
                loss = cross_entropy(self.net(images), labels)
            loss.backward()
        self.optimizer.step()
        if self.ema_parameters:
            with torch.no_grad():
                torch._foreach_mul_(self.ema_parameters, self.current_decay)
                torch._foreach_add_(
                    self.ema_parameters, torch._foreach_mul(self.parameters, 1 - self.current_decay)
                )

    def _backward_each_net(self, nets: Ensemble, images: Tensor, labels: Tensor) -> None:
        """Compute the gradients net by net.

        Convolutions stay dense, and memory holds the maps of one net.

        Args:
            nets: The ensemble.
            images: Images of all nets, [nets * batch_size, channels, height, width].
            labels: Labels of all nets, [nets * batch_size, ...].
        """
        gradients = []
        batches = zip(images.split(self.batch_size), labels.split(self.batch_size), strict=True)
        for index, (net_images, net_labels) in enumerate(batches):
            weights = {
                name: value.detach()[index : index + 1].requires_grad_()
                for name, value in nets.named_parameters()
            }
            with self._autocast():
                loss = cross_entropy(nets(net_images[None], weights)[0], net_labels)
            gradients.append(
                torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
            )
        for parameter, per_net in zip(self.parameters, zip(*gradients, strict=True), strict=True):
            parameter.grad = torch.cat(per_net)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.recipe.half_precision:
            return autocast_half(self.device)
        return contextlib.nullcontext()

    def _load_batch(self) -> Tensor:
        """Return the images of this step: cropped, flipped and augmented.

        They are [nets * batch_size, channels, height, width].
        """
        if self.recipe.max_shift or self.recipe.horizontal_flip:
            images = self._crop()
        else:
            images = self.images[self.crop_params[:, 0]]
        if self.augment_params:
            params = augment.AugmentParams(*self.augment_params)
            images = augment.apply_augmentations(images, params)
        return 2 * images - 1 if self.signed else images

    def _crop(self) -> Tensor:
        indices, down, right, flipped = self.crop_params.unbind(1)
        rows = down[:, None] + torch.arange(self.height, device=self.device)
        across = torch.arange(self.width, device=self.device)
        columns = right[:, None] + torch.where(
            flipped[:, None] > 0, self.width - 1 - across, across
        )
        channels = torch.arange(self.images.shape[1], device=self.device)
        return self.images[
            indices[:, None, None, None],
            channels[None, :, None, None],
            rows[:, None, :, None],
            columns[:, None, None, :],
        ]

    def apply_ema(self) -> None:
        """Replace the weights by their average, if the recipe averages them."""
        if self.ema_parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.ema_parameters)


def _build_optimizer(parameters: list[Any], recipe: Recipe, device: torch.device) -> Any:
    """Build Adam or SGD with the settings of the recipe."""
    if recipe.use_adam:
        return torch.optim.Adam(
            parameters,
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            capturable=device.type == "cuda",
        )
    return torch.optim.SGD(
        parameters,
        lr=recipe.learning_rate,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )
