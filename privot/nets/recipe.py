"""The settings of one classifier training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How a classifier is trained.

    >>> print(Recipe(epochs=50, learning_rate=0.02, weight_decay=1e-4, lr_milestones=(40,)))
    50 epochs, batch 128, SGD 0.02 momentum 0.9, weight decay 0.0001, rate x0.1 after epochs 40
    """

    epochs: int
    learning_rate: float
    batch_size: int = 128
    use_adam: bool = False  # Adam instead of SGD
    momentum: float = 0.9  # of SGD
    weight_decay: float = 0.0
    lr_milestones: tuple[int, ...] = ()  # epochs after which the learning rate is divided by 10
    max_shift: int = 0  # random crops from images padded by this many black pixels
    horizontal_flip: bool = False
    ema_decay: float = 0.0  # decay per step of averaged weights; 0: no average
    # bfloat16 on a GPU; CPUs without it would take a hundred times as long
    half_precision: bool = False
    # Batches of one size, at most batch_size, that contain every image in each epoch. Otherwise
    # the images that do not fill a batch are left out of an epoch.
    even_batches: bool = False
    augmentations: tuple[str, ...] = ()  # one for each image and step, see `privot.nets.augment`
    num_repeats: int = 1  # independent trainings on the same images

    def steps_per_epoch(self, num_images: int) -> int:
        """Return the number of steps in an epoch of so many images.

        >>> Recipe(1, 0.1, batch_size=256).steps_per_epoch(500)
        1
        >>> Recipe(1, 0.1, batch_size=256, even_batches=True).steps_per_epoch(500)
        2
        """
        return (
            -(-num_images // self.batch_size)
            if self.even_batches
            else max(1, num_images // self.batch_size)
        )

    def __str__(self) -> str:
        facts = [f"{self.epochs} epochs", f"batch {self.batch_size}"]
        facts.append(
            f"Adam {self.learning_rate:g}"
            if self.use_adam
            else f"SGD {self.learning_rate:g} momentum {self.momentum:g}"
        )
        if self.weight_decay:
            facts.append(f"weight decay {self.weight_decay:g}")
        if self.lr_milestones:
            facts.append(f"rate x0.1 after epochs {', '.join(map(str, self.lr_milestones))}")
        if self.max_shift:
            facts.append(f"crops of +-{self.max_shift}")
        if self.horizontal_flip:
            facts.append("flips")
        if self.ema_decay:
            facts.append(f"EMA {self.ema_decay:g}")
        if self.augmentations:
            facts.append(f"augmented by {'/'.join(self.augmentations)}")
        if self.num_repeats > 1:
            facts.append(f"{self.num_repeats} trainings")
        return ", ".join(facts)
