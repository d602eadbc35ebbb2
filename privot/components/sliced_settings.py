"""Settings that the sliced flow and the sliced generator share, and sizes that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from privot.components.latent_space import AUTOENCODER_STAGE
from privot.components.method_base import MethodBase
from privot.components.sliced_moments import MEAN_NORM_SHARE
from privot.components.sliced_statistics import require_class_sizes
from privot.components.transforms import TRANSFORMS
from privot.components.validation import (
    require_choice,
    require_count,
    require_noise_multiplier,
    require_positive,
    require_range,
)
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.privacy.plan import Plan

LEARNED_SPACES = ("public", "private")
SYNTHETIC_IMAGES = (
    "synthetic"  # value of `public_data` for dead-leaves images instead of a data set
)
TYPICAL_MEAN_NORM = 0.6  # norm of a class mean over the radius, as on MNIST


@dataclass(frozen=True, kw_only=True)
class SlicedSettings(MethodBase):
    """Settings of the queries.

    The number of directions is num_bases * num_frequencies² * channels in a fixed space, and
    num_bases * autoencoder_dim in a learned one.
    """

    name: ClassVar[str]
    trusted_party: ClassVar[str] = "the data owner"
    supported_modes: ClassVar[tuple[str, ...]] = ("blocks", "records")

    noise_multiplier: float | None = None  # noise over sensitivity; None: calibrated to the budget
    # "blocks": moments and sorted blocks of each class; "records": every record's noisy point;
    # "resampled" (flow only): quantiles of a fresh sample in each step.
    mode: str = "blocks"
    # False, as in the papers and not in mode blocks: labels are assigned in turn and mean nothing.
    labeled: bool = True
    label_norm: float = 0.5  # length of a label vector over the radius, in modes other than blocks
    space: str = "cosines"  # fixed: "cosines", "wavelets", "haar"; learned: "public", "private"
    num_frequencies: int = 12  # coefficients of each side, in a fixed space
    fine_weight: float = 0.5  # exponent of the weights of fine coefficients before clipping
    relative_radius: float = 0.32  # radius of the ball over the root of the number of pixel values
    gray_level: float | None = None  # subtracted from each pixel; None: .2 for gray, .45 for color
    num_bases: int = 32  # orthonormal bases
    patch_size: int = 4  # pixels a side of the cells of every second basis; 0: no such bases
    num_blocks: int = 10  # blocks of order statistics; at small budgets fewer have less noise
    moments_share: float = 0.6  # share of mu² for the moments; the rest is for the blocks
    autoencoder_dim: int = 16  # dimension of a latent vector, in a learned space
    public_data: str = SYNTHETIC_IMAGES  # training data of space=public: name, path or "synthetic"
    autoencoder_steps: int = 2000  # training steps of the autoencoder; in space=private, queries
    # Images in a training step. None: 250 public images, or a twentieth of the private records.
    autoencoder_batch_size: int | None = None
    autoencoder_learning_rate: float = 3e-3  # initial learning rate of the autoencoder's Adam
    autoencoder_share: float = 0.5  # share of mu² for the autoencoder, in space=private
    autoencoder_clip_norm: float = 1.0  # largest norm of a record's gradient, in space=private

    def __post_init__(self) -> None:
        require_choice(self, "mode", self.supported_modes)
        if not self.labeled and self.mode == "blocks":
            raise SettingError(
                f"{self.name}.labeled=False does not fit mode=blocks, which sorts by class. "
                "For data without labels declare one class."
            )
        require_choice(self, "space", (*TRANSFORMS, *LEARNED_SPACES))
        if not self.public_data:
            raise SettingError(
                f"{self.name}.public_data is empty. Give the name or path of public images, or "
                f"{SYNTHETIC_IMAGES}."
            )
        require_count(self, "num_frequencies", "num_bases", "num_blocks", "autoencoder_steps")
        require_range(self, "autoencoder_dim", minimum=2, maximum=100_000)
        require_positive(self, "autoencoder_batch_size")
        require_range(self, "label_norm", "relative_radius", above=0, maximum=10)
        require_range(self, "patch_size", minimum=0, maximum=64)
        require_range(self, "fine_weight", minimum=0, maximum=2)
        require_range(self, "gray_level", minimum=0, maximum=1)
        require_range(
            self,
            "moments_share",
            "autoencoder_share",
            "autoencoder_learning_rate",
            above=0,
            below=1,
        )
        require_range(self, "autoencoder_clip_norm", above=0, below=1e9)
        require_noise_multiplier(self)

    @property
    def public_source(self) -> str:
        """Name or path of the public data that must be loaded; empty if there is none."""
        needs_data = self.space == "public" and self.public_data != SYNTHETIC_IMAGES
        return self.public_data if needs_data else ""

    @property
    def has_learned_space(self) -> bool:
        """Whether points are latent vectors of an autoencoder."""
        return self.space in LEARNED_SPACES

    def dim(self, spec: Spec) -> int:
        """Return the dimension of a point."""
        if self.has_learned_space:
            return self.autoencoder_dim
        return spec.shape[0] * math.prod(min(self.num_frequencies, side) for side in spec.shape[1:])

    def radius(self, spec: Spec) -> float:
        """Return the radius of the ball that holds the points."""
        if self.has_learned_space:
            return math.sqrt(self.autoencoder_dim)
        return self.relative_radius * math.sqrt(spec.num_features)

    def compute_label_norm(self, spec: Spec) -> float:
        """Return the length of a label vector; 0 if labels are not used."""
        return self.label_norm * self.radius(spec) if self.labeled else 0.0

    def validate_spec(self, spec: Spec) -> None:
        """Check that the spec declares what the mode needs.

        Raises:
            SettingError: Class sizes, or the number of records, are missing.
        """
        if self.mode == "blocks":
            require_class_sizes(spec, self.num_blocks)
        elif spec.size is None:
            raise SettingError(
                f"{self.name}.mode={self.mode} needs the number of records. "
                "Declare it as public by --public-size."
            )

    def predict_signal_to_noise(self, spec: Spec, plan: Plan) -> float | None:
        """Predict the norm of a class mean over its noise, which is counted in all directions.

        Returns:
            The ratio, or None without noise.
        """
        noise_std = 2 * next(
            stage.noise_multiplier for stage in plan.stages if stage.name != AUTOENCODER_STAGE
        )
        if not noise_std:
            return None
        num_records = (
            min(spec.class_sizes) if spec.class_sizes else (spec.size or 0) / spec.num_classes
        )
        gain = (
            MEAN_NORM_SHARE * num_records
            if self.mode == "blocks"
            else math.sqrt(max(num_records, 1))
        )
        return TYPICAL_MEAN_NORM * gain / (noise_std * math.sqrt(self.dim(spec)))
