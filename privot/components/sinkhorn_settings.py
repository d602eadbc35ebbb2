"""Settings of DP-Sinkhorn, and the lengths that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from privot.components.method_base import MethodBase
from privot.components.validation import (
    require_choice,
    require_noise_multiplier,
    require_positive,
    require_range,
)
from privot.data.spec import Spec
from privot.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class SinkhornSettings(MethodBase):
    """Settings of the query and of the generator. Lengths are those of images of 784 pixels."""

    name: ClassVar[str]

    noise_multiplier: float | None = None  # noise over sensitivity; None: calibrated to the budget
    clip_unit: str = "record"  # what is clipped: each "record" or, as in the paper, the "batch"
    # Probability of each record to be in a step: 3,000 of 60,000 records. With clip_unit=batch
    # 0.005 is better; the paper has 50 of 60,000.
    sample_rate: float = 0.05
    steps: int = 5000  # steps; with clip_unit=batch 40,000 or more; the paper has millions
    batch_size: int = 200  # generated images in a step, rounded up to a multiple of the classes
    max_sample_size: int = 400  # largest number of sampled records to use, with clip_unit=batch
    # Largest norm. None: 1 with clip_unit=record, which no gradient exceeds; 20 with
    # clip_unit=batch, for the root mean square of the images' gradients.
    clip_norm: float | None = None
    frequency_fraction: float = 0.5  # fraction of the DCT coefficients of each side in a query
    blur: float = 5.0  # transport regularization, a distance; images of a class are 16 apart
    sinkhorn_iterations: int = 20  # Sinkhorn iterations of each transport problem
    l1_weight: float = 0.0  # weight of L1 beside squared L2, with clip_unit=batch; paper: 1 or 3
    label_distance: float = 15.0  # distance of labels over sqrt(2), with clip_unit=batch
    fresh_fraction: float = 1.0  # fraction of X' generated anew: 1 removes all bias; paper: 0.2
    latent_dim: int = 16  # dimension of the generator's latent vectors
    generator_channels: int = 32  # channels of the generator's last feature maps
    learning_rate: float = 5e-4  # largest learning rate of Adam; it falls to 0
    ema_decay: float = 0.999  # decay per step of the generator's averaged weights

    def __post_init__(self) -> None:
        require_choice(self, "clip_unit", ("record", "batch"))
        require_positive(
            self,
            "steps",
            "max_sample_size",
            "latent_dim",
            "generator_channels",
            "sinkhorn_iterations",
        )
        require_range(self, "batch_size", minimum=2)  # batch norm needs two images
        require_range(
            self, "sample_rate", "frequency_fraction", "learning_rate", above=0, maximum=1
        )
        require_range(self, "clip_norm", "blur", above=0, below=math.inf)
        require_range(self, "l1_weight", "label_distance", minimum=0, below=math.inf)
        if self.clip_unit == "record" and self.l1_weight:
            raise SettingError(
                f"{self.name}.l1_weight={self.l1_weight} needs {self.name}.clip_unit=batch, since "
                "the cost of clip_unit=record is the L2 distance. Change one of the two."
            )
        require_range(self, "fresh_fraction", minimum=0, maximum=1)
        require_range(self, "ema_decay", minimum=0, below=1)
        require_noise_multiplier(self)

    def scale_to_image(self, spec: Spec) -> tuple[float, float]:
        """Scale lengths to the size of the images: they grow with the side.

        Returns:
            The clip norm and the blur. With clip_unit=batch the blur is squared, as the cost is.
        """
        scale = math.sqrt(spec.num_features / 784)
        if self.clip_unit == "record":
            return self.clip_norm or 1.0, self.blur * scale
        return (self.clip_norm or 20.0) * scale, (self.blur * scale) ** 2

    def count_frequencies(self, spec: Spec) -> tuple[int, int]:
        """Return the number of DCT coefficients of the height and of the width."""
        height, width = (max(1, round(self.frequency_fraction * side)) for side in spec.shape[1:])
        return height, width

    def generator_config(self, spec: Spec) -> dict[str, Any]:
        """Return the arguments of the generator."""
        return {
            "shape": list(spec.shape),
            "classes": spec.num_classes,
            "latent_dim": self.latent_dim,
            "channels": self.generator_channels,
        }
