"""What the condensation methods share: initial images, batches by class, and pixel updates.

These methods have no privacy mechanism: they read the records, and their releases carry
``NoGuarantee``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from privot.components.method_base import MethodBase
from privot.components.validation import require_positive, require_range

# Baselines import the class from here: of all methods' files only this one may see `data`.
from privot.data.dataset import Records as Records
from privot.data.spec import Spec
from privot.errors import DataError, ReleaseError, SettingError
from privot.privacy.plan import Neighbours, Plan

NO_MECHANISM = "no mechanism: the published set is an exact function of the records"
REAL_INIT_WARNING = "; initialised from real images, which remain visible in the result"
# Mean and standard deviation of the pixels by number of channels, public constants for every data
# set. They are close to those of CIFAR-10 (.47, .20) for color, and between those of MNIST
# (.13, .31) and Fashion-MNIST (.29, .35) for gray. So the papers' learning rates, made for
# standardized pixels, apply here.
PIXEL_STATS = {1: (0.2, 0.33), 3: (0.47, 0.2)}
MOMENTUM = 0.5  # of the pixels, in DC, DSA and DM


def explain_no_guarantee(init: str) -> str:
    """Explain why a condensed set has no guarantee.

    >>> explain_no_guarantee("random")
    'no mechanism: the published set is an exact function of the records'
    """
    return NO_MECHANISM + (REAL_INIT_WARNING if init == "real" else "")


def initialize_images(
    records: Records, spec: Spec, images_per_class: int, init: str, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Choose the initial images of a set, classes in order.

    Args:
        records: The records.
        spec: Shape and number of classes.
        images_per_class: Images of each class.
        init: "random" for N(0, 1) in standardized pixels (see `PIXEL_STATS`), clamped to [0, 1],
            which does not depend on the records; or "real" for random records of each class, none
            twice.
        rng: Random generator on the CPU.

    Returns:
        Images in [0, 1] [classes * images_per_class, ...] and labels, on the records' device.

    Raises:
        DataError: A class has too few records.

    >>> records = Records(torch.rand(6, 1, 8, 8), torch.arange(6) % 2)
    >>> rng = torch.Generator().manual_seed(0)
    >>> images, labels = initialize_images(records, Spec((1, 8, 8), 2), 3, "real", rng)
    >>> images.shape, labels.tolist()
    (torch.Size([6, 1, 8, 8]), [0, 0, 0, 1, 1, 1])
    """
    device = records.images.device
    labels = torch.arange(spec.num_classes, device=device).repeat_interleave(images_per_class)
    if init == "random":
        mean, std = PIXEL_STATS[spec.shape[0]]
        noise = torch.randn(len(labels), *spec.shape, generator=rng)
        return (mean + std * noise).clamp(0, 1).to(device), labels
    record_labels = records.labels.cpu()
    chosen_indices = []
    for label in range(spec.num_classes):
        indices = (record_labels == label).nonzero().flatten()
        if len(indices) < images_per_class:
            raise DataError(
                f"class {label} has fewer records than the {images_per_class} real images per "
                "class. Reduce images_per_class, or use init=random."
            )
        chosen_indices.append(
            indices[torch.randperm(len(indices), generator=rng)[:images_per_class]]
        )
    return records.images[torch.cat(chosen_indices).to(device)].clone(), labels


def count_images_per_class(
    images_per_class: int, ratio: float | None, size: int, classes: int
) -> int:
    """Compute the number of images of each class.

    Args:
        images_per_class: Used where there is no ratio.
        ratio: Share of the mean class size, or None.
        size: Number of records.
        classes: Number of classes.

    Returns:
        The number, at least 1.

    >>> [count_images_per_class(50, ratio, 50_000, 10) for ratio in (None, 0.002, 0.01, 0.02)]
    [50, 10, 50, 100]
    """
    return images_per_class if ratio is None else max(1, round(ratio * size / classes))


@dataclass(frozen=True, kw_only=True)
class CondensationMethod(MethodBase):
    """Settings and plan that all condensation methods share.

    A subclass adds ``init`` ("random" or "real") and those of the settings checked below that it
    needs.
    """

    name: ClassVar[str]
    trusted_party: ClassVar[str] = "everyone who sees the set"
    guarantee_summary: ClassVar[str] = (
        "none: no mechanism, the set is an exact function of the records"
    )

    images_per_class: int = 50
    ratio: float | None = None  # share of the mean class size, in place of ``images_per_class``

    def __post_init__(self) -> None:
        require_positive(
            self,
            "images_per_class",
            "steps",
            "batch_size",
            "batch_per_class",
            "num_networks",
            "net_width",
            "net_depth",
            "outer_steps",
            "inner_steps",
        )
        require_range(self, "ratio", above=0, maximum=1)
        require_range(self, "learning_rate", above=0, below=math.inf)
        if (init := self._get_init()) not in ("random", "real"):
            raise SettingError(f"{self.name}.init={init!r} is unknown. Choose random or real.")

    def plan(self, spec: Spec) -> Plan:
        """Return a plan without stages.

        Raises:
            SettingError: Declared class sizes show that a class has too few records.
        """
        if spec.class_sizes is not None:
            num_needed = 1
            if self._get_init() == "real":
                num_needed = count_images_per_class(
                    self.images_per_class, self.ratio, sum(spec.class_sizes), spec.num_classes
                )
            if (smallest := min(spec.class_sizes)) < num_needed:
                raise SettingError(
                    f"{self.name}: {num_needed} records of each class are needed, but class_sizes "
                    f"declares {smallest}. Reduce images_per_class, or leave out the class."
                )
        return Plan((), Neighbours.REPLACE)

    def predict_images_per_class(self, spec: Spec) -> int | None:
        """Predict the images of each class; None where it depends on an undeclared size."""
        if self.ratio is not None and spec.size is None:
            return None
        return count_images_per_class(
            self.images_per_class, self.ratio, spec.size or 0, spec.num_classes
        )

    def _get_init(self) -> str:
        return getattr(self, "init", "random")


def standardize_images(images: Tensor) -> Tensor:
    """Convert pixels in [0, 1] to the standardized pixels that the papers optimize."""
    mean, std = PIXEL_STATS[images.shape[1]]
    return (images - mean) / std


def unstandardize_images(images: Tensor) -> Tensor:
    """Convert standardized pixels to [0, 1].

    Raises:
        ReleaseError: A value is not finite.
    """
    mean, std = PIXEL_STATS[images.shape[1]]
    if not images.isfinite().all():
        raise ReleaseError(
            "The optimization of the set diverged: some values are not finite. Use a lower "
            "learning_rate."
        )
    return (images.detach() * std + mean).clamp(0, 1)


def compute_pixel_range(spec: Spec) -> tuple[float, float]:
    """Compute the standardized values of black and white."""
    mean, std = PIXEL_STATS[spec.shape[0]]
    return -mean / std, (1 - mean) / std


class PixelOptimizer:
    """Gradient descent with momentum on the standardized pixels of a set.

    Pixels stay between black and white.

    Args:
        images: Initial images in [0, 1] [count, ...].
        spec: Shape of the images.
        learning_rate: Step size.
    """

    def __init__(self, images: Tensor, spec: Spec, learning_rate: float):
        self.pixels = standardize_images(images).requires_grad_()
        self.learning_rate = learning_rate
        (self.min_value, self.max_value) = compute_pixel_range(spec)
        self.momentum_buffer = torch.zeros_like(self.pixels)

    def apply_gradient(self, gradient: Tensor) -> None:
        """Make one step along a gradient with respect to the pixels [count, ...]."""
        with torch.no_grad():
            self.momentum_buffer.mul_(MOMENTUM).add_(gradient)
            self.pixels.sub_(self.momentum_buffer, alpha=self.learning_rate).clamp_(
                self.min_value, self.max_value
            )


class ClassPool:
    """The records by class on their device, for samples that do not synchronize with the host.

    Args:
        records: The records.
        classes: Number of classes.

    Attributes:
        images: All images [count, ...].
        record_indices: Indices of the records of each class [classes, largest class].
        is_record: Which entries of ``record_indices`` are valid [classes, largest class].
    """

    def __init__(self, records: Records, classes: int):
        counts = torch.bincount(records.labels, minlength=classes)
        if not counts.min():
            raise DataError(
                f"class {int(counts.argmin())} has no records, so it cannot be condensed. Leave "
                "out the class."
            )
        order = records.labels.argsort(stable=True)
        column = torch.arange(int(counts.max()), device=counts.device)
        first_index = counts.cumsum(0) - counts
        self.images = records.images
        self.is_record = column < counts[:, None]
        self.record_indices = order[(first_index[:, None] + column).clamp(max=len(order) - 1)]

    def sample(self, batch_per_class: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample records of each class without replacement.

        A class with fewer records gives all of them; the rest of its row has weight 0.

        Args:
            batch_per_class: Records of each class.
            rng: Random generator on the records' device.

        Returns:
            Standardized images [classes, batch, ...] and weights [classes, batch], whose sum in
            each class is 1.
        """
        keys = torch.rand(
            self.is_record.shape, generator=rng, device=self.is_record.device
        ).masked_fill(~self.is_record, -1)
        columns = keys.topk(min(batch_per_class, keys.shape[1]), sorted=False).indices
        weights = self.is_record.gather(1, columns).float()
        indices = self.record_indices.gather(1, columns)
        images = standardize_images(self.images[indices.flatten()])
        return images.unflatten(0, columns.shape), weights / weights.sum(1, keepdim=True)
