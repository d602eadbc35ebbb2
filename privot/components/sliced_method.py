"""The space and the queries of the sliced flow and the sliced generator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from privot.components.latent_space import (
    LatentSpace,
    build_autoencoder_stage,
    generate_synthetic_images,
    train_on_public,
    train_privately,
)
from privot.components.noisy_projections import NoisyProjections, query_noisy_projections
from privot.components.sliced_settings import SYNTHETIC_IMAGES, SlicedSettings
from privot.components.sliced_statistics import (
    SlicedStatistics,
    build_sliced_stages,
    query_sliced_statistics,
)
from privot.components.transforms import GRAY_LEVELS, ImageTransform, build_image_transform
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.nets import initialize_weights
from privot.nets.autoencoders import ConvAutoencoder
from privot.nets.dp_autoencoder import Autoencoder
from privot.privacy.gate import Gate
from privot.privacy.plan import Stage
from privot.runtime import Progress, Streams

CALLS_PER_AUTOENCODER_STEP = 500  # calls of tensor operators in a step of an autoencoder
FLOPS_PER_PIXEL = 4e4  # of a public training step: 3e4 to 5e4 were counted
PUBLIC_BATCH_SIZE = 250  # public images in a training step
PRIVATE_BATCH_DIVISOR = 20  # the private records over those in a training step
# The private autoencoder is small, since noise grows with the number of its weights.
AUTOENCODER_HIDDEN_DIM = 128
AUTOENCODER_NUM_FREQUENCIES = 14  # DCT coefficients per side
DECODER_PREFIX = "decoder."  # of the decoder's weights in a release


def export_decoder(space: ImageTransform | LatentSpace) -> dict[str, Tensor]:
    """Return the decoder's weights for a release; nothing if the space is a fixed transform."""
    if isinstance(space, ImageTransform):
        return {}
    return {DECODER_PREFIX + name: value for name, value in space.decoder.state_dict().items()}


@dataclass(frozen=True, kw_only=True)
class SlicedMethod(SlicedSettings):
    """A method with these settings, its stages and its space. It adds no settings."""

    def build_stages(self, spec: Spec) -> tuple[Stage, ...]:
        """Build all stages of the modes blocks and records."""
        self.validate_spec(spec)
        autoencoder_stages, noise_multiplier = self.plan_autoencoder(spec)
        if self.mode == "blocks":
            return *autoencoder_stages, *build_sliced_stages(noise_multiplier, self.moments_share)
        return *autoencoder_stages, Stage("records", "rows", noise_multiplier)

    def plan_autoencoder(self, spec: Spec) -> tuple[tuple[Stage, ...], float]:
        """Plan the training of a private autoencoder.

        Returns:
            The stage of the autoencoder, if there is one, and the noise multiplier of all other
            stages together.

        Raises:
            SettingError: The number of records is not declared, or smaller than a training batch.
        """
        noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        if self.space != "private":
            return (), noise_multiplier
        if spec.size is None:
            raise SettingError(
                f"{self.name}.space=private needs the number of records. "
                "Declare it as public by --public-size."
            )
        sample_size = self.autoencoder_batch_size or max(1, spec.size // PRIVATE_BATCH_DIVISOR)
        if sample_size > spec.size:
            raise SettingError(
                f"{self.name}.autoencoder_batch_size={sample_size} is more than the {spec.size} "
                f"records. Set it to {spec.size} or less."
            )
        stage = build_autoencoder_stage(
            noise_multiplier,
            self.autoencoder_share,
            self.autoencoder_steps,
            sample_size,
            spec.size,
        )
        return (stage,), noise_multiplier / math.sqrt(1 - self.autoencoder_share)

    def count_autoencoder_operations(self, spec: Spec) -> float:
        """Estimate the floating-point operations of the autoencoder's training."""
        if self.space == "private":
            num_coefficients = spec.shape[0] * math.prod(
                min(AUTOENCODER_NUM_FREQUENCIES, side) for side in spec.shape[1:]
            )
            return (
                12.0
                * self.autoencoder_steps
                * (self.autoencoder_batch_size or (spec.size or 0) / PRIVATE_BATCH_DIVISOR)
                * AUTOENCODER_HIDDEN_DIM
                * num_coefficients
            )
        if not self.has_learned_space:
            return 0.0
        batch_size = self.autoencoder_batch_size or PUBLIC_BATCH_SIZE
        return FLOPS_PER_PIXEL * self.autoencoder_steps * batch_size * spec.num_features

    def count_autoencoder_calls(self) -> int:
        """Count the calls of tensor operators in the autoencoder's training."""
        return CALLS_PER_AUTOENCODER_STEP * self.autoencoder_steps if self.has_learned_space else 0

    def build_transform(self, spec: Spec) -> ImageTransform:
        """Build the fixed transform to the space."""
        return build_image_transform(
            self.space,
            spec.shape,
            self.num_frequencies,
            self.fine_weight,
            GRAY_LEVELS[spec.shape[0]] if self.gray_level is None else self.gray_level,
        )

    def prepare_space(
        self, gate: Gate, streams: Streams, progress: Progress
    ) -> ImageTransform | LatentSpace:
        """Build the space; in a learned space, train its autoencoder.

        Args:
            gate: The gate in front of the records, which only space=private queries.
            streams: Public random streams, checkpoints and public images.
            progress: Shows the progress.

        Returns:
            The space.

        Raises:
            SettingError: The public images are missing.
        """
        if not self.has_learned_space:
            return self.build_transform(gate.spec).to(streams.runtime.torch_device)
        net: Any = self.build_autoencoder(gate.spec)
        training: dict[str, Any] = {
            "steps": self.autoencoder_steps,
            "learning_rate": self.autoencoder_learning_rate,
            "streams": streams,
            "progress": progress,
        }
        initialize_weights(net, streams.make_rng("autoencoder"))
        if self.space == "private":
            net = train_privately(gate, net, clip_norm=self.autoencoder_clip_norm, **training)
            return LatentSpace.from_autoencoder(net, self.autoencoder_dim)
        batch_size = self.autoencoder_batch_size or PUBLIC_BATCH_SIZE
        images = (
            generate_synthetic_images(gate.spec.shape, self.autoencoder_steps * batch_size, streams)
            if self.public_data == SYNTHETIC_IMAGES
            else streams.public_images
        )
        if images is None:
            raise SettingError(
                f"{self.name}: the public data {self.public_data!r} is not loaded. Run the method "
                "by privot.synthesize, which loads it."
            )
        net = train_on_public(net, images, batch_size=batch_size, **training)
        return LatentSpace.from_autoencoder(net, self.autoencoder_dim)

    def build_autoencoder(self, spec: Spec) -> torch.nn.Module:
        """Build the untrained autoencoder of a learned space."""
        if self.space == "private":
            return Autoencoder(
                spec.shape,
                self.autoencoder_dim,
                AUTOENCODER_HIDDEN_DIM,
                AUTOENCODER_NUM_FREQUENCIES,
            )
        return ConvAutoencoder(spec.shape, self.autoencoder_dim)

    def restore_space(
        self, tensors: dict[str, Tensor], spec: Spec, device: torch.device
    ) -> ImageTransform | LatentSpace:
        """Restore the space of a release, which stores the decoder of a learned space.

        Args:
            tensors: Tensors of the release, by name.
            spec: Spec of the data.
            device: Device of the space.

        Returns:
            The space; the encoder of a learned space is not trained.

        Raises:
            ReleaseError: The release has no decoder, or one of another shape.
        """
        if not self.has_learned_space:
            return self.build_transform(spec).to(device)
        net: Any = self.build_autoencoder(spec)
        weights = {
            name.removeprefix(DECODER_PREFIX): value.float()
            for name, value in tensors.items()
            if name.startswith(DECODER_PREFIX)
        }
        expected_shapes = {name: value.shape for name, value in net.decoder.state_dict().items()}
        if {name: value.shape for name, value in weights.items()} != expected_shapes:
            raise ReleaseError(
                "The release lacks the decoder that its settings need. "
                "Make the release again with keep_answers=true."
            )
        net.decoder.load_state_dict(weights)
        return LatentSpace.from_autoencoder(net.to(device), self.autoencoder_dim)

    def query_statistics(
        self, gate: Gate, space: ImageTransform | LatentSpace, streams: Streams, progress: Progress
    ) -> SlicedStatistics:
        """Query the moments and the sorted blocks.

        Args:
            gate: The gate in front of the records.
            space: The space of the points.
            streams: Public random streams.
            progress: Shows the progress.

        Returns:
            The denoised statistics.
        """
        return query_sliced_statistics(
            gate,
            space,
            num_bases=self.num_bases,
            patch_size=self.patch_size,
            num_blocks=self.num_blocks,
            radius=self.radius(gate.spec),
            streams=streams,
            progress=progress,
        )

    def query_projections(
        self, gate: Gate, space: ImageTransform | LatentSpace, streams: Streams, progress: Progress
    ) -> NoisyProjections:
        """Query every record's noisy point.

        Args:
            gate: The gate in front of the records.
            space: The space of the points.
            streams: Public random streams.
            progress: Shows the progress.

        Returns:
            Quantiles of the projections of the noisy points.
        """
        return query_noisy_projections(
            gate,
            space,
            radius=self.radius(gate.spec),
            label_norm=self.compute_label_norm(gate.spec),
            num_bases=self.num_bases,
            streams=streams,
            progress=progress,
        )
