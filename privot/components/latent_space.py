"""Learned spaces: records as latent vectors of an autoencoder.

The autoencoder is trained on public images or by DP-SGD. Its encoder's last layer projects latent
vectors to the sphere of radius sqrt(latent_dim), which helps the decoder. The sensitivity of a
query does not rely on that: the gate clips whatever an encoder returns.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits

from privot.components.dead_leaves import generate_dead_leaves
from privot.components.dp_sgd import detach_weights, dp_sgd_step
from privot.nets.dp_autoencoder import project_to_sphere
from privot.nets.ema import collect_state, restore_state
from privot.privacy.gate import Gate
from privot.privacy.plan import Stage
from privot.privacy.sampling import Fixed
from privot.runtime import Progress, Streams

AUTOENCODER_STAGE = "autoencoder"  # name of the stage, and of the checkpoint
# Standard deviation of the noise on latent vectors in public training. A latent dimension has a
# standard deviation of about 1. The noise is needed because particles lie between latent vectors.
LATENT_NOISE_STD = 0.3
# Synthetic images are generated 2,000 at a time, which bounds the memory.
NUM_SYNTHETIC_CLASSES = 100
SYNTHETIC_PER_CLASS = 20
MAX_SYNTHETIC_ROUNDS = 10
CHUNK_SIZE = 1000  # latent vectors or images in one forward pass


class LatentSpace(NamedTuple):
    """A space whose points are latent vectors of an autoencoder.

    Attributes:
        encoder: The encoder.
        encoder_weights: Its weights by name, so that a query is a function of tensors.
        decoder: The decoder, which returns logits of pixels.
        latent_dim: Dimension of a latent vector.
    """

    encoder: nn.Module
    encoder_weights: dict[str, Tensor]
    decoder: nn.Module
    latent_dim: int

    @classmethod
    def from_autoencoder(cls, autoencoder: Any, latent_dim: int) -> LatentSpace:
        """Build the space of a trained autoencoder and freeze the autoencoder."""
        net = autoencoder.requires_grad_(False)
        return cls(net.encoder, detach_weights(net.encoder), net.decoder, latent_dim)

    def dim(self, channels: int) -> int:
        """Return the dimension of a point."""
        return self.latent_dim

    def encode_image(self, image: Tensor) -> Tensor:
        """Encode images [..., channels, height, width] to latent vectors [..., latent_dim]."""
        latents = functional_call(
            self.encoder, self.encoder_weights, (image.reshape(-1, *image.shape[-3:]),)
        )
        return latents.view(*image.shape[:-3], self.latent_dim)

    def decode_point(self, point: Tensor, channels: int) -> Tensor:
        """Decode points [..., latent_dim] to images [..., channels, height, width] in [0, 1].

        Points are first projected to the sphere on which the decoder was trained.
        """
        with torch.no_grad():
            images = [
                self.decoder(project_to_sphere(chunk)).sigmoid()
                for chunk in point.reshape(-1, self.latent_dim).split(CHUNK_SIZE)
            ]
        return torch.cat(images).view(*point.shape[:-1], *images[0].shape[1:])

    def to(self, device: torch.device) -> LatentSpace:
        """Move the networks to a device."""
        return LatentSpace(
            self.encoder.to(device),
            {name: value.to(device) for name, value in self.encoder_weights.items()},
            self.decoder.to(device),
            self.latent_dim,
        )


def reconstruction_loss(autoencoder: Any, image: Tensor, label: Tensor) -> Tensor:
    """Compute the mean cross-entropy of the reconstructed pixels of a record.

    Args:
        autoencoder: The autoencoder.
        image: The record, [channels, height, width].
        label: Not used; every query of a record gets it.

    Returns:
        The loss, [].
    """
    return binary_cross_entropy_with_logits(autoencoder(image), image)


# Training on private records


def match_sampled_noise(noise_multiplier: float, steps: int, sample_rate: float) -> float:
    r"""Choose the noise of many sampled queries that together cost about as much as one query.

    T queries at sample rate q with noise multiplier :math:`\sigma` have
    :math:`\mu^2 \approx q^2 T (e^{1/\sigma^2} - 1)`. The accountant computes the exact cost.

    Args:
        noise_multiplier: Noise multiplier of the one full-batch query.
        steps: Number of sampled queries.
        sample_rate: Fraction of the records in each sampled query.

    Returns:
        The noise multiplier of each sampled query.

    >>> round(match_sampled_noise(2.0, 100, 0.1), 3)
    2.117
    """
    if not noise_multiplier:
        return 0.0
    return 1 / math.sqrt(math.log1p(1 / (sample_rate**2 * steps * noise_multiplier**2)))


def build_autoencoder_stage(
    noise_multiplier: float, budget_share: float, steps: int, sample_size: int, size: int
) -> Stage:
    """Build the stage of an autoencoder's DP-SGD steps, on samples of fixed size.

    Args:
        noise_multiplier: Noise multiplier of one full-batch query that costs the whole budget.
        budget_share: Share of the budget, as mu², for this stage.
        steps: Number of DP-SGD steps.
        sample_size: Records in a step.
        size: Number of all records.

    Returns:
        The stage.

    >>> round(build_autoencoder_stage(2.0, 0.7, 100, 6000, 60_000).noise_multiplier, 3)
    2.49
    """
    return Stage(
        AUTOENCODER_STAGE,
        "sum",
        match_sampled_noise(noise_multiplier / math.sqrt(budget_share), steps, sample_size / size),
        steps,
        Fixed(sample_size, size),
    )


def train_privately(
    gate: Gate,
    net: Any,
    *,
    steps: int,
    learning_rate: float,
    clip_norm: float,
    streams: Streams,
    progress: Progress,
) -> Any:
    """Train an autoencoder in place by DP-SGD. A resumed run continues from its checkpoint.

    A checkpoint is used only if it is not ahead of the queries that remain, since a gate that
    stores its query results repeats them from the first. The checkpoint of a completed training is
    always used, because stored results of later stages may depend on those very weights.

    Args:
        gate: The gate in front of the records.
        net: The autoencoder.
        steps: Number of DP-SGD steps, one query each.
        learning_rate: Initial learning rate of Adam; it falls to 0 along a cosine.
        clip_norm: Largest L2 norm of one record's gradient.
        streams: Public random streams and checkpoints.
        progress: Shows the progress.

    Returns:
        The same autoencoder, frozen.
    """
    net.to(streams.runtime.torch_device)
    optimizer = torch.optim.Adam(net.parameters(), lr=learning_rate)
    first_step = steps - gate.count_remaining_queries(AUTOENCODER_STAGE)
    checkpoint = streams.load_checkpoint(AUTOENCODER_STAGE)
    if checkpoint is not None:
        checkpoint_step = int(checkpoint["step"])
        if checkpoint_step <= first_step or checkpoint_step == steps:
            restore_state(checkpoint, net=net, optimizer=optimizer)
            first_step = max(first_step, checkpoint_step)
    for step in range(first_step, steps):
        optimizer.param_groups[0]["lr"] = anneal_learning_rate(learning_rate, step, steps)
        dp_sgd_step(
            gate, AUTOENCODER_STAGE, net, reconstruction_loss, optimizer, clip_norm=clip_norm
        )
        if step % 25 == 24 or step + 1 == steps:
            progress("training the autoencoder", step + 1, steps)
        if streams.is_checkpoint_due(step, steps) or step + 1 == steps:
            streams.save_checkpoint(
                AUTOENCODER_STAGE, collect_state(net=net, optimizer=optimizer, step=step + 1)
            )
    return net.requires_grad_(False)


# Training on public images


def train_on_public(
    net: Any,
    images: Tensor,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    streams: Streams,
    progress: Progress,
) -> Any:
    """Train an autoencoder in place on public images. A resumed run loads the trained weights.

    Args:
        net: The autoencoder.
        images: Public images [count, channels, height, width] in [0, 1].
        steps: Number of training steps.
        batch_size: Images in a step.
        learning_rate: Initial learning rate of Adam; it falls to 0 along a cosine.
        streams: Public random streams and checkpoints.
        progress: Shows the progress.

    Returns:
        The same autoencoder, frozen.
    """
    device = streams.runtime.torch_device

    def train() -> dict[str, Tensor]:
        public_images = images.to(device)
        rng = streams.make_rng("lessons", device)

        def sample_images(count: int) -> Tensor:
            indices = torch.randint(len(public_images), (count,), generator=rng, device=device)
            return public_images[indices]

        net.to(device).encoder.standardize_latents(sample_images(CHUNK_SIZE))
        optimizer = torch.optim.Adam(net.parameters(), lr=learning_rate)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = anneal_learning_rate(learning_rate, step, steps)
            batch = sample_images(batch_size)
            latents = net.encoder(batch)
            noise = torch.randn(latents.shape, generator=rng, device=device)
            optimizer.zero_grad(set_to_none=True)
            logits = net.decoder(project_to_sphere(latents + LATENT_NOISE_STD * noise))
            binary_cross_entropy_with_logits(logits, batch).backward()
            optimizer.step()
            if step % 25 == 24 or step + 1 == steps:
                progress("training the autoencoder on public images", step + 1, steps)
        return {name: value.detach() for name, value in net.state_dict().items()}

    net.to(device).load_state_dict(streams.compute_once(AUTOENCODER_STAGE, train))
    return net.requires_grad_(False)


def generate_synthetic_images(
    shape: tuple[int, int, int], max_images: int, streams: Streams
) -> Tensor:
    """Generate dead-leaves images for public training.

    Args:
        shape: Channels, height and width of an image.
        max_images: Approximate upper limit of their number; at least one round is generated.
        streams: Public random streams.

    Returns:
        Images [count, *shape] in [0, 1].
    """
    rng = streams.make_rng("scenes")
    rounds = min(
        MAX_SYNTHETIC_ROUNDS, max(1, max_images // (NUM_SYNTHETIC_CLASSES * SYNTHETIC_PER_CLASS))
    )
    device = streams.runtime.torch_device
    return torch.cat(
        [
            generate_dead_leaves(NUM_SYNTHETIC_CLASSES, SYNTHETIC_PER_CLASS, shape, rng, device)[0]
            for _ in range(rounds)
        ]
    )


def anneal_learning_rate(learning_rate: float, step: int, steps: int) -> float:
    """Return the learning rate of a step: it falls to 0 along half a cosine.

    Args:
        learning_rate: Learning rate of step 0.
        step: The step.
        steps: Number of steps.

    Returns:
        The learning rate of this step.
    """
    return learning_rate * (1 + math.cos(math.pi * step / steps)) / 2
