"""Training of one critic on one shard, as functions of tensors.

`Gate.update_shards` vectorizes them over shards. All randomness is public. Records are addressed by
fractions of the shard, because the size of a shard may be secret.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad

from privot.nets.flat_weights import adam_step
from privot.nets.functional_critic import Critic
from privot.nets.tiny_generator import TinyGenerator

CriticState = dict[str, Tensor]
CRITIC_STEPS_PER_WARMUP_ROUND = 5  # critic steps for one step of the tiny generator, as in WGAN-GP
TINY_GENERATOR_RATE_FACTOR = 10  # learning rate of a tiny generator over that of its critic
MAX_SHIFT_DIVISOR = 14  # images are moved by at most this fraction of a side


def init_state(
    critic: Critic,
    tiny_generator: TinyGenerator,
    num_critics: int,
    rng: torch.Generator,
    identical: bool,
) -> CriticState:
    """Initialize critics, their tiny generators and the Adam moments of both.

    Args:
        critic: Architecture of the critics.
        tiny_generator: Architecture of the generators for warm-up.
        num_critics: Number of critics.
        rng: Public random generator.
        identical: Whether all critics start with the same weights.

    Returns:
        Tensors [num_critics, ...] by name.
    """
    num_draws = 1 if identical else num_critics
    weights, left_vectors = (
        values.expand(num_critics, -1) for values in critic.init_weights(num_draws, rng)
    )
    generator_weights = tiny_generator.init_weights(num_draws, rng).expand(num_critics, -1)
    return {
        "weights": weights,
        "adam_mean": torch.zeros_like(weights),
        "adam_square": torch.zeros_like(weights),
        "left_vectors": left_vectors,
        "tiny_generator": generator_weights,
        "tiny_generator_mean": torch.zeros_like(generator_weights),
        "tiny_generator_square": torch.zeros_like(generator_weights),
    }


def train_critic(
    images: Tensor,
    labels: Tensor,
    state: CriticState,
    critic: Critic,
    fakes: Tensor,
    record_fractions: Tensor,
    fake_indices: Tensor,
    mix_weights: Tensor,
    start_step: Tensor,
    learning_rate: float,
    shifts: Tensor | None = None,
) -> CriticState:
    """Train a shard's critic for some steps against public generated images.

    Args:
        images: Records of the shard [size, channels, height, width].
        labels: Their labels [size].
        state: State of the critic.
        critic: Its architecture.
        fakes: Generated images [classes, count, channels, height, width].
        record_fractions: Which records to use, as fractions of the shard [steps, batch] in [0, 1).
        fake_indices: Which generated images of the same labels to use [steps, batch].
        mix_weights: Weights of the interpolation in the gradient penalty [steps, batch] in [0, 1).
        start_step: Number of steps that the critic has been trained for [].
        learning_rate: Learning rate of Adam.
        shifts: Pixels by which real and generated images are moved [steps, 2, batch, 2], or None.

    Returns:
        The new state.
    """
    for step in range(len(record_fractions)):
        indices = (record_fractions[step] * len(labels)).long()
        real = translate(images[indices], shifts, step, 0)
        fake = translate(fakes[labels[indices], fake_indices[step]], shifts, step, 1)
        state = _update_critic(
            state,
            critic,
            real,
            fake,
            labels[indices],
            mix_weights[step],
            start_step + step + 1,
            learning_rate,
        )
    return state


def warm_up(
    images: Tensor,
    labels: Tensor,
    state: CriticState,
    critic: Critic,
    tiny_generator: TinyGenerator,
    record_fractions: Tensor,
    latents: Tensor,
    mix_weights: Tensor,
    round_index: Tensor,
    learning_rate: float,
    shifts: Tensor | None = None,
) -> CriticState:
    """Train a shard's critic against its own tiny generator, and that generator for one step.

    Args:
        images: Records of the shard [size, channels, height, width].
        labels: Their labels [size].
        state: State of the critic and of its tiny generator.
        critic: Architecture of the critic.
        tiny_generator: Architecture of the tiny generator.
        record_fractions: Which records to use, as fractions of the shard [steps, batch] in [0, 1).
        latents: Latent vectors of the tiny generator [steps, batch, latent_dim].
        mix_weights: Weights of the interpolation in the gradient penalty [steps, batch] in [0, 1).
        round_index: Number of warm-up rounds before this one [].
        learning_rate: Learning rate of Adam, for the critic.
        shifts: Pixels by which real and generated images are moved [steps, 2, batch, 2], or None.

    Returns:
        The new state.
    """
    for step in range(len(record_fractions)):
        indices = (record_fractions[step] * len(labels)).long()
        fake = tiny_generator.generate(state["tiny_generator"], latents[step], labels[indices])
        state = _update_critic(
            state,
            critic,
            translate(images[indices], shifts, step, 0),
            translate(fake, shifts, step, 1),
            labels[indices],
            mix_weights[step],
            round_index * len(record_fractions) + step + 1,
            learning_rate,
        )

    def generator_loss(weights: Tensor) -> Tensor:
        fake = tiny_generator.generate(weights, latents[0], labels[indices])
        return -critic.score(state["weights"], state["left_vectors"], fake, labels[indices]).mean()

    names = ("tiny_generator", "tiny_generator_mean", "tiny_generator_square")
    updated = adam_step(
        state["tiny_generator"],
        grad(generator_loss)(state["tiny_generator"]),
        state["tiny_generator_mean"],
        state["tiny_generator_square"],
        round_index + 1,
        TINY_GENERATOR_RATE_FACTOR * learning_rate,
    )
    return state | dict(zip(names, updated, strict=True))


def limit_shift(max_shift: int, shape: tuple[int, int, int]) -> int:
    """Limit `max_shift` pixels to a fourteenth of the shorter side of an image."""
    return min(max_shift, min(shape[1:]) // MAX_SHIFT_DIVISOR)


def translate(images: Tensor, shifts: Tensor | None, step: int, source: int) -> Tensor:
    """Move each image by its own shift and fill the border with black.

    This augmentation is for critics of few records, which would otherwise memorize them.

    Args:
        images: Images [batch, channels, height, width].
        shifts: Pixels down and to the right [steps, sources, batch, 2], or None for no shift.
        step: Index into `shifts`.
        source: Index into `shifts`: 0 for real images, 1 for generated images.

    Returns:
        The moved images.

    >>> shifts = torch.tensor([[[[1, 0]]]])
    >>> translate(torch.eye(3)[None, None], shifts, 0, 0)[0, 0]
    tensor([[0., 0., 0.],
            [1., 0., 0.],
            [0., 1., 0.]])
    """
    if shifts is None:
        return images
    count, channels, height, width = images.shape
    step_shifts = shifts[step, source]
    rows, columns = (
        torch.arange(size, device=step_shifts.device) - step_shifts[:, axis, None]
        for axis, size in enumerate((height, width))
    )
    is_inside = ((rows >= 0) & (rows < height))[:, None, :, None] & (
        (columns >= 0) & (columns < width)
    )[:, None, None, :]
    row_index = rows.clamp(0, height - 1)[:, None, :, None].expand(count, channels, height, width)
    column_index = columns.clamp(0, width - 1)[:, None, None, :].expand(
        count, channels, height, width
    )
    return images.gather(2, row_index).gather(3, column_index) * is_inside


def _update_critic(
    state: CriticState,
    critic: Critic,
    real: Tensor,
    fake: Tensor,
    labels: Tensor,
    mix_weights: Tensor,
    step: Tensor,
    learning_rate: float,
) -> CriticState:
    """Take one Adam step of the critic's loss; `step` counts from 1."""
    left_vectors = critic.power_iterate(state["weights"], state["left_vectors"])
    gradient = grad(critic.loss)(state["weights"], left_vectors, real, fake, labels, mix_weights)
    weights, mean, square = adam_step(
        state["weights"], gradient, state["adam_mean"], state["adam_square"], step, learning_rate
    )
    return state | {
        "weights": weights,
        "adam_mean": mean,
        "adam_square": square,
        "left_vectors": left_vectors,
    }
