"""Parameters of differentiable augmentations, sampled ahead for many steps at once."""

from __future__ import annotations

import torch

from privot.data.spec import Spec
from privot.nets.augment import AugmentParams, list_augmentations, sample_augment_params

AUGMENTATIONS_PER_REFILL = 100_000  # parameters sampled at a time, about 5 MB


class AugmentationBuffer:
    """A buffer of augmentation parameters on the device of the step that uses them.

    `refill_if_empty` runs on the host before each step, `next_params` is a part of the step.

    Args:
        num_params: Parameters for one step.
        spec: Size of the images, and whether they may be mirrored.
        rng: Public random generator.
        device: Where the step runs.
    """

    def __init__(self, num_params: int, spec: Spec, rng: torch.Generator, device: torch.device):
        self.num_params = num_params
        self.image_size = spec.shape[1:]
        self.rng = rng
        self.operations = list_augmentations(spec.is_flip_invariant)
        self.num_steps = max(1, AUGMENTATIONS_PER_REFILL // num_params)
        self.num_used_steps = 0
        self.row_indices = torch.arange(num_params, device=device)
        self.step_index = torch.zeros((), dtype=torch.int64, device=device)
        self.params = self._sample_params().to(device)

    def discard(self) -> None:
        """Make the next `refill_if_empty` sample new parameters."""
        self.num_used_steps = self.num_steps

    def refill_if_empty(self) -> None:
        """Ensure that the next `next_params` returns unused parameters."""
        if self.num_used_steps == self.num_steps:
            for old, new in zip(self.params, self._sample_params(), strict=True):
                old.copy_(new)
            self.step_index.zero_()
            self.num_used_steps = 0
        self.num_used_steps += 1

    def next_params(self) -> AugmentParams:
        """Return the next ``num_params`` parameters.

        Their position is counted on the device, so that a captured step advances by itself.
        """
        params = self.params.select(self.step_index * self.num_params + self.row_indices)
        self.step_index.add_(1)
        return params

    def _sample_params(self) -> AugmentParams:
        return sample_augment_params(
            self.num_steps * self.num_params, self.image_size, self.rng, self.operations
        )
