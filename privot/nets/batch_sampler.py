"""The random numbers of a training: which images each batch has, and how each is augmented."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from privot.nets import augment
from privot.nets.recipe import Recipe

# Epochs whose random numbers are drawn at once where each net has a generator of its own: many
# small draws would take long.
PREFETCH_EPOCHS = 10


class BatchSampler:
    """Draws the random numbers of one epoch at a time, on the CPU.

    Args:
        recipe: How the nets are trained.
        num_images: Images of a net.
        num_nets: Number of nets. Each has its own batches.
        resolution: Height and width of the images.

    Attributes:
        batch_size: Images in each batch of a net.
    """

    def __init__(self, recipe: Recipe, num_images: int, num_nets: int, resolution: tuple[int, int]):
        self.recipe = recipe
        self.num_images = num_images
        self.num_nets = num_nets
        self.resolution = resolution
        # The published protocols end an epoch with a smaller batch. A CUDA graph has one batch
        # size, so 500 images become 2 batches of 250 instead of 256 and 244.
        self.batch_size = (
            -(-num_images // recipe.steps_per_epoch(num_images))
            if recipe.even_batches
            else min(recipe.batch_size, num_images)
        )
        # The random numbers of the next epochs, where each net has a generator of its own.
        self.prefetched: list[list[Tensor]] = []

    def sample_epoch(self, generator: torch.Generator | Sequence[torch.Generator]) -> list[Tensor]:
        """Draw the random numbers of the next epoch.

        Args:
            generator: Source of the random numbers: one for all nets, or one for each net.

        Returns:
            Crops, int64 [steps, nets, batch_size, 4]: index of the image, shift down, shift right,
            flipped. With augmentations, the fields of `augment.AugmentParams` follow, each
            [steps, nets, batch_size, ...].
        """
        if isinstance(generator, torch.Generator):
            return self._draw(self.num_nets, generator)
        if not self.prefetched:
            per_net = [self._draw(1, own_generator, PREFETCH_EPOCHS) for own_generator in generator]
            merged = [torch.cat(tensors, 1) for tensors in zip(*per_net, strict=True)]
            per_epoch = zip(*(tensor.chunk(PREFETCH_EPOCHS) for tensor in merged), strict=True)
            self.prefetched = [list(epoch) for epoch in per_epoch]
        return self.prefetched.pop(0)

    def _draw(self, num_nets: int, generator: torch.Generator, num_epochs: int = 1) -> list[Tensor]:
        """Draw the random numbers of some nets and epochs.

        Args:
            num_nets: Number of nets.
            generator: Source of the random numbers.
            num_epochs: Number of epochs.

        Returns:
            As `sample_epoch`, each [epochs * steps, nets, batch_size, ...].
        """
        recipe = self.recipe
        steps_per_epoch = recipe.steps_per_epoch(self.num_images)
        batches = (num_epochs * steps_per_epoch, num_nets, self.batch_size)
        crops = torch.empty(*batches, 4, dtype=torch.int64)
        for epoch in crops.split(steps_per_epoch):
            for net in range(num_nets):
                order = torch.randperm(self.num_images, generator=generator)
                # Even batches may need a few images more; these are the first of the order again.
                filled = torch.cat([order, order])[: steps_per_epoch * self.batch_size]
                epoch[:, net, :, 0] = filled.view(steps_per_epoch, self.batch_size)
        num_shifts = 2 * recipe.max_shift + 1
        crops[..., 1:3] = torch.randint(0, num_shifts, (*batches, 2), generator=generator)
        num_flips = 2 if recipe.horizontal_flip else 1
        crops[..., 3] = torch.randint(0, num_flips, batches, generator=generator)
        if not recipe.augmentations:
            return [crops]
        augmentations = augment.sample_augment_params(
            batches[0] * batches[1] * batches[2], self.resolution, generator, recipe.augmentations
        )
        return [crops, *(values.unflatten(0, batches) for values in augmentations)]
