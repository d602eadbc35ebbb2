"""What a method releases, a generator or a set of images, and how to sample from it.

Everything here is public; nothing here reads sensitive data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.nets import GENERATORS
from privot.progress import Progress, ignore_progress

RESIZE_STATE_PREFIX = "resize_state."  # of the names of tensors that `resize` needs
MAX_SAMPLES = 10_000_000  # of one call
SAMPLE_CHUNK_SIZE = 1000  # images that a generator makes at a time
# Of the sum of an image's soft labels: float32 and a softmax in half precision stay below it.
SOFT_LABEL_TOLERANCE = 1e-3

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and type of each tensor


@dataclass(frozen=True)
class Artifact:
    """A generator (a network by name, its arguments and weights) or a set of images with labels.

    Attributes:
        kind: ``generator`` or ``set``.
        tensors: The weights, or ``images``, ``labels`` and perhaps ``soft_labels``; names with the
            prefix ``resize_state.`` belong to `resize_state`.
        generator_class: The name of the generator in `privot.nets.GENERATORS`.
        generator_config: The arguments of the generator.
        metadata: What the method adds to the manifest; plain data.
    """

    kind: str
    tensors: dict[str, Tensor]
    generator_class: str = ""
    generator_config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_generator(
        cls,
        generator_class: str,
        generator_config: dict[str, Any],
        generator: nn.Module,
        metadata: dict[str, Any] | None = None,
    ) -> Artifact:
        """Make an artifact of a trained generator.

        Args:
            generator_class: The name of the generator in `privot.nets.GENERATORS`.
            generator_config: The arguments that build it.
            generator: The trained network.
            metadata: What the method adds to the manifest.

        Returns:
            The artifact, with copies of the weights on the CPU.
        """
        tensors = {
            name: value.detach().cpu().contiguous()
            for name, value in generator.state_dict().items()
        }
        return cls("generator", tensors, generator_class, generator_config, metadata or {})

    @classmethod
    def from_images(
        cls,
        images: Tensor,
        labels: Tensor,
        soft_labels: Tensor | None = None,
        resize_state: dict[str, Tensor] | None = None,
    ) -> Artifact:
        """Make an artifact of a set of images.

        Args:
            images: Values in [0, 1], [count, channels, height, width].
            labels: Classes, [count].
            soft_labels: Probabilities of the classes, [count, classes].
            resize_state: What the method needs to make a set of another size: query results and
                what was computed from them. All of it is public.

        Returns:
            The artifact, with copies of the tensors on the CPU.
        """
        tensors = {"images": images.float(), "labels": labels.long()}
        if soft_labels is not None:
            tensors["soft_labels"] = soft_labels.float()
        for name, value in (resize_state or {}).items():
            tensors[RESIZE_STATE_PREFIX + name] = value
        copies = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        return cls("set", copies)

    @property
    def resize_state(self) -> dict[str, Tensor]:
        """The tensors that `resize` needs, under the method's own names."""
        return {
            name.removeprefix(RESIZE_STATE_PREFIX): value
            for name, value in self.tensors.items()
            if name.startswith(RESIZE_STATE_PREFIX)
        }

    def is_supported(self) -> bool:
        """Whether this version can build it."""
        return self.kind == "set" or (
            self.kind == "generator" and self.generator_class in GENERATORS
        )

    def sample(
        self,
        spec: Spec,
        num_samples: int,
        labels: Tensor | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        latent_scale: float = 1.0,
        progress: Progress = ignore_progress,
    ) -> tuple[Tensor, Tensor]:
        """Sample images. It reads no data and costs no privacy.

        A set gives its own images and repeats them where it has too few. A generator uses the same
        latents on every device, but each device rounds in its own way.

        Args:
            spec: Shape and classes of the images.
            num_samples: Number of images.
            labels: The class of each image, [num_samples]; None: classes in turn.
            seed: Seed of the latents.
            device: Where a generator runs.
            latent_scale: Standard deviation of the latents, above 0 and at most 1. Smaller values
                give cleaner and less varied images.
            progress: Is called where there is more than one chunk of images.

        Returns:
            Images in [0, 1], [num_samples, channels, height, width], and labels [num_samples], both
            on the CPU.

        Raises:
            ReleaseError: If an argument is out of range, or the generator gives no finite images.
        """
        labels = self._check_sample_arguments(spec, num_samples, labels, latent_scale)
        if self.kind == "set":
            return self.tensors["images"][self.find_sample_indices(labels)], labels
        generator: Any = self.build_generator().to(device)
        latents = latent_scale * torch.randn(
            num_samples, generator.latent_dim, generator=torch.Generator().manual_seed(seed)
        )
        images = torch.empty(num_samples, *spec.shape)
        for start in range(0, num_samples, SAMPLE_CHUNK_SIZE):
            chunk = slice(start, start + SAMPLE_CHUNK_SIZE)
            with torch.no_grad():
                images[chunk] = generator(latents[chunk].to(device), labels[chunk].to(device)).cpu()
            if num_samples > SAMPLE_CHUNK_SIZE:
                progress("sampling", min(start + SAMPLE_CHUNK_SIZE, num_samples), num_samples)
        if not images.isfinite().all():
            raise ReleaseError(
                "The generator gives values that are not finite, because its training diverged. "
                "Train again with a lower learning rate."
            )
        return images, labels

    def _check_sample_arguments(
        self, spec: Spec, num_samples: int, labels: Tensor | None, latent_scale: float
    ) -> Tensor:
        """Refuse arguments of `sample` that are out of range.

        Args:
            spec: Shape and classes of the images.
            num_samples: Number of images.
            labels: The class of each image, [num_samples]; None: classes in turn.
            latent_scale: Standard deviation of the latents.

        Returns:
            The labels, [num_samples].
        """
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise ReleaseError(f"num_samples={num_samples}: give a number from 1 to {MAX_SAMPLES}.")
        if labels is None:
            labels = torch.arange(num_samples) % spec.num_classes
        else:
            labels = torch.as_tensor(labels)
        if len(labels) != num_samples or labels.min() < 0 or labels.max() >= spec.num_classes:
            raise ReleaseError(
                f"labels: give {num_samples} labels from 0 to {spec.num_classes - 1}."
            )
        if not 0 < latent_scale <= 1 or (self.kind == "set" and latent_scale != 1):
            raise ReleaseError(
                f"latent_scale={latent_scale}: give a number above 0 and at most 1 for a "
                "generator. A set has no latents."
            )
        return labels

    def find_sample_indices(self, labels: Tensor) -> Tensor:
        """Find the images of a set that `sample` gives for these labels.

        Args:
            labels: The class of each image, [count]. Images of a class take turns.

        Returns:
            Indices of images of the set, int64 [count].
        """
        indices = torch.zeros(len(labels), dtype=torch.int64)
        for label in labels.unique():
            of_class = (self.tensors["labels"] == label).nonzero().flatten()
            is_wanted = labels == label
            if not len(of_class):
                raise ReleaseError(f"The set has no image of class {label}.")
            indices[is_wanted] = of_class[torch.arange(int(is_wanted.sum())) % len(of_class)]
        return indices

    def build_generator(self) -> nn.Module:
        """Build the generator in evaluation mode, with its weights."""
        generator = GENERATORS[self.generator_class](**self.generator_config)
        generator.load_state_dict(self.tensors)
        return generator.eval()

    def is_consistent_with(self, spec: Spec) -> bool:
        """Whether the tensors are finite and have the shapes that spec and generator demand.

        The generator is built without memory, so that a huge one in a hostile file costs nothing.
        """
        if self.kind == "set":
            return self._is_consistent_set(spec)
        weights = self.tensors.values()
        if not all(value.isfinite().all() for value in weights if value.is_floating_point()):
            return False
        with torch.device("meta"):
            generator: Any = GENERATORS[self.generator_class](**self.generator_config)
        if _describe_layout(self.tensors) != _describe_layout(generator.state_dict()):
            return False
        made_for = (generator.shape, generator.classes)
        return bool(made_for == (spec.shape, spec.num_classes))

    def _is_consistent_set(self, spec: Spec) -> bool:
        """Whether images, labels and soft labels are finite and have the right shapes."""
        checked_for_values = (*self.resize_state.values(), self.tensors["images"])
        if not all(
            value.is_floating_point() and value.isfinite().all() for value in checked_for_values
        ):
            return False
        labels = self.tensors["labels"]
        expected: Layout = {
            "images": ((len(labels), *spec.shape), torch.float32),
            "labels": ((len(labels),), torch.int64),
        }
        soft_labels = self.tensors.get("soft_labels")
        if soft_labels is not None:
            expected["soft_labels"] = ((len(labels), spec.num_classes), torch.float32)
        released = {
            name: value
            for name, value in self.tensors.items()
            if not name.startswith(RESIZE_STATE_PREFIX)
        }
        if (
            _describe_layout(released) != expected
            or int(labels.min()) < 0
            or int(labels.max()) >= spec.num_classes
        ):
            return False
        if soft_labels is None:
            return True
        sum_errors = (soft_labels.double().sum(1) - 1).abs()
        # Comparisons with NaN are false, so values that are not finite fail.
        return bool((soft_labels >= 0).all() and (sum_errors <= SOFT_LABEL_TOLERANCE).all())


def _describe_layout(tensors: dict[str, Tensor]) -> Layout:
    """Give the shape and the type of each tensor."""
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
