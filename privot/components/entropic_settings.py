"""Settings of the entropic GAN, and the generator that fits a channel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from privot.components.method_base import MethodBase
from privot.components.validation import require_choice, require_positive, require_range
from privot.data.spec import Spec
from privot.errors import SettingError

MIN_IMAGE_SIDE = 8  # pixels; smaller records are treated as numbers, not as images
DEFAULT_NUM_FREQUENCIES = 20  # DCT coefficients per side of the dense generator
DEBIAS_ERROR = (
    "entropic-gan.debias=true is not supported. The debiased divergence is least where generated "
    "records are as noisy as the channel's outputs, so the generator would learn the noise; the "
    "bias of entropic transport is what removes it. Set entropic-gan.debias=false."
)


@dataclass(frozen=True, kw_only=True)
class EntropicSettings(MethodBase):
    """Settings of the entropic GAN.

    >>> EntropicSettings(debias=True)
    Traceback (most recent call last):
    privot.errors.SettingError: entropic-gan.debias=true is not supported. The debiased ...
    """

    name: ClassVar[str] = "entropic-gan"

    loss: str = "eot"  # "eot" or "nll", its one-sided half: faster, as good where noise is strong
    batch_size: int = 256  # generated records and outputs in a step; strong noise needs more
    steps: int = 3000  # training steps
    # "records" for numbers and categories, "dense" or "conv" for images; "auto" chooses conv for
    # images and records for everything else.
    generator: str = "auto"
    latent_dim: int = 16  # dimension of the generator's latent vectors
    hidden_dim: int = 128  # units of the hidden layers of the generators records and dense
    # DCT coefficients per side of the dense generator. None: as many values per side as were sent,
    # 20 if the channel sends all pixels.
    num_frequencies: int | None = None
    generator_channels: int = 32  # channels of the last feature maps of the generator conv
    learning_rate: float | None = None  # largest rate of Adam; None: 2e-3, for images 5e-4
    ema_decay: float = 0.995  # decay per step of the generator's averaged weights
    # Regularization over the channel's temperature. With any value but 1 the generator learns
    # another distribution, see docs/local.md.
    regularization: float = 1.0
    debias: bool = False  # not supported: the generator would learn the noise

    def __post_init__(self) -> None:
        if self.debias:
            raise SettingError(DEBIAS_ERROR)
        require_choice(self, "loss", ("eot", "nll"))
        require_choice(self, "generator", ("auto", "records", "dense", "conv"))
        require_positive(
            self, "steps", "latent_dim", "hidden_dim", "generator_channels", "num_frequencies"
        )
        require_range(self, "batch_size", minimum=2)
        require_range(self, "learning_rate", above=0, below=1)
        require_range(self, "ema_decay", minimum=0, below=1)
        require_range(self, "regularization", above=0, below=math.inf)

    def choose_generator(self, spec: Spec) -> str:
        """Choose "records", "dense" or "conv" by the setting and by the shape of a record."""
        if self.generator != "auto":
            return self.generator
        return "conv" if min(spec.shape[1:]) >= MIN_IMAGE_SIDE else "records"


def configure_generator(
    settings: EntropicSettings, spec: Spec, channel: Any, has_labels: bool
) -> tuple[str, dict[str, Any]]:
    """Choose the generator for the records of a channel.

    Args:
        settings: The settings.
        spec: Spec of the data.
        channel: The channel of the clients.
        has_labels: Whether the last part of the channel is for labels. They are an input of the
            generator and not part of its output.

    Returns:
        The class and the arguments of the generator.

    Raises:
        SettingError: The generator is for images, and the channel is not.
    """
    generator = settings.choose_generator(spec)
    shared = {
        "shape": list(spec.shape),
        "classes": spec.num_classes,
        "latent_dim": settings.latent_dim,
    }
    parts = list(getattr(channel, "parts", (channel,)))[: -1 if has_labels else None]
    if generator != "records" and (
        len(parts) > 1
        or getattr(parts[0], "domain", None) != (0.0, 1.0)
        or parts[0].record_dim != spec.num_features
    ):
        raise SettingError(
            f"entropic-gan.generator={generator} needs images: one channel with values in 0 to 1. "
            "Set entropic-gan.generator=records for these records."
        )
    if generator == "conv":
        return "DcganGenerator", {**shared, "channels": settings.generator_channels}
    if generator == "dense":
        # Coefficients finer than the outputs do not affect the loss, so they would be random.
        projection = parts[0].projection
        num_frequencies = settings.num_frequencies or (
            DEFAULT_NUM_FREQUENCIES
            if projection.kind == "identity"
            else max(projection.output_shape[1:])
        )
        return "DenseGenerator", {
            **shared,
            "hidden_dim": settings.hidden_dim,
            "num_frequencies": num_frequencies,
        }
    columns = [
        [part.num_categories]
        if hasattr(part, "num_categories")
        else [part.record_dim, *part.domain]
        for part in parts
    ]
    return "TabularGenerator", {**shared, "hidden_dim": settings.hidden_dim, "columns": columns}
