r"""Other readings of WDLG, for the comparison with the L2 distance.

The paper leaves open what the points of the two measures are. The distances of this file take
single entries, filters, or (index, value) pairs of a gradient for the points, give each tensor its
own critic, or train the critic:

    max_f  mean f(rows of g') - mean f(rows of g) - 10 (|grad f| - 1)²,

a small network f over the rows of each tensor, trained by WGAN-GP between two steps of the images,
which then decrease the same difference. Rows are a set: f cannot tell which filter a row belongs
to, and a critic that lags behind makes the descent unstable. The paper's algorithm reads like this,
so it is measured; it does not reconstruct. The distances that ignore positions do not reconstruct
either, or only small images. See docs/inversion.md for the figures.

All distances are of one victim; gradients are {name: [...]}.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import grad, vmap

from privot.attacks.inversion.batched_adam import BatchedAdam
from privot.attacks.inversion.gradient_distances import NORM_EPSILON
from privot.attacks.inversion.problem_checks import TensorDict

NUM_SLICES = 256  # projections of the sliced distance
# of the (index, value) distance: distance of two neighbors in units of the values' standard
# deviation, and angles of its slices
INDEX_WEIGHT = 1.0
NUM_ANGLES = 8
# WGAN-GP with a small network
CRITIC_HIDDEN_DIM = 32
CRITIC_STEPS = 5
CRITIC_LEARNING_RATE = 1e-3
GRADIENT_PENALTY = 10.0


def compute_layerwise_gradient_distance(
    guessed_gradient: TensorDict, observed_gradient: TensorDict
) -> Tensor:
    """Compute the sum over tensors of |g'_t - g_t|: one critic for each tensor."""
    return torch.stack(
        [
            (
                (guessed_gradient[name] - observed_gradient[name]).square().sum() + NORM_EPSILON
            ).sqrt()
            for name in observed_gradient
        ]
    ).sum()


def compute_l1_gradient_distance(
    guessed_gradient: TensorDict, observed_gradient: TensorDict
) -> Tensor:
    """Compute the sum over entries of |g'_i - g_i|: a linear critic with clipped weights."""
    return torch.stack(
        [
            ((guessed_gradient[name] - observed_gradient[name]).square() + NORM_EPSILON)
            .sqrt()
            .sum()
            for name in observed_gradient
        ]
    ).sum()


def compute_sorted_gradient_distance(
    guessed_gradient: TensorDict, observed_gradient: TensorDict
) -> Tensor:
    """Compute W_2² between the sorted entries of each tensor, summed over tensors.

    It does not change under a permutation of the entries, so it ignores where a pixel is:

    >>> guess, observation = {"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 3.0])}
    >>> compute_sorted_gradient_distance(guess, observation)
    tensor(0.)
    """
    gaps = [
        (
            guessed_gradient[name].flatten().sort().values
            - observed_gradient[name].flatten().sort().values
        )
        .square()
        .sum()
        for name in observed_gradient
    ]
    return torch.stack(gaps).sum()


def compute_sliced_gradient_distance(
    guessed_gradient: TensorDict, observed_gradient: TensorDict
) -> Tensor:
    """Compute the mean W_2² of a tensor's filters along `NUM_SLICES` fixed directions.

    The sum over tensors; it does not change under a permutation of the filters.
    """
    gaps = []
    for name in observed_gradient:
        guess = flatten_filters(guessed_gradient[name])
        observation = flatten_filters(observed_gradient[name])
        num_features = guess.shape[1]
        directions = _build_slice_directions(num_features, guess)
        gaps.append(
            ((guess @ directions).sort(0).values - (observation @ directions).sort(0).values)
            .square()
            .sum()
            * (num_features / NUM_SLICES)
        )
    return torch.stack(gaps).sum()


def compute_index_value_distance(
    guessed_gradient: TensorDict, observed_gradient: TensorDict, index_weight: float = INDEX_WEIGHT
) -> Tensor:
    r"""Compute the sliced W_2² between points (index_weight * std * index, value) in the plane.

    With a large weight every entry is matched with itself, which gives the squared distance; with
    weight 0 the entries are sorted.

    Args:
        guessed_gradient: {name: [...]}.
        observed_gradient: {name: [...]}.
        index_weight: Distance of two neighbors, in standard deviations of the observed values.

    Returns:
        The sum over tensors, over `NUM_ANGLES` angles.

    >>> guess, observation = {"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 3.0])}
    >>> for weight in (0.0, 1e6):
    ...     print(round(float(compute_index_value_distance(guess, observation, weight)), 3))
    0.0
    8.0
    """
    angles = (torch.arange(NUM_ANGLES) + 0.5) * (math.pi / NUM_ANGLES)
    gaps = []
    for name in observed_gradient:
        guess = guessed_gradient[name].flatten()
        observation = observed_gradient[name].flatten()
        cosine = angles.cos().to(guess)[:, None]
        sine = angles.sin().to(guess)[:, None]
        std = observation.std(correction=0).detach()
        positions = (
            index_weight * std * torch.arange(len(guess), dtype=guess.dtype, device=guess.device)
        )
        guess_order, observation_order = (
            (cosine * positions + sine * values).sort(1).indices
            for values in (guess.detach(), observation)
        )
        # Positions and values are subtracted separately: their sum would lose digits at large
        # indices.
        gap = cosine * (positions[guess_order] - positions[observation_order]) + sine * (
            guess[guess_order] - observation[observation_order]
        )
        gaps.append(2 * gap.square().sum(1).mean())  # twice, since the mean of sin² is 1/2
    return torch.stack(gaps).sum()


def flatten_filters(tensor: Tensor) -> Tensor:
    """Reshape a tensor to [filters, features]; a vector has one feature."""
    return tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]


def score_filters(critic: TensorDict, name: str, filters: Tensor) -> Tensor:
    """Compute the critic f of each filter.

    Args:
        critic: Weights of the critics of all tensors.
        name: Name of the tensor.
        filters: [filters, features].

    Returns:
        Scores [filters].
    """
    hidden = torch.tanh(filters @ critic[f"{name}/in"] + critic[f"{name}/shift"])
    return hidden @ critic[f"{name}/out"]


def compute_critic_distance(
    critic: TensorDict, guessed_gradient: TensorDict, observed_gradient: TensorDict
) -> Tensor:
    """Compute the dual: the sum over tensors of mean f(rows of g') - mean f(rows of g).

    Args:
        critic: Weights of the critics of all tensors.
        guessed_gradient: {name: [...]}.
        observed_gradient: {name: [...]}.

    Returns:
        A scalar.
    """
    differences = [
        score_filters(critic, name, flatten_filters(guessed_gradient[name])).mean()
        - score_filters(critic, name, flatten_filters(observed_gradient[name])).mean()
        for name in observed_gradient
    ]
    return torch.stack(differences).sum()


def compute_gradient_critic_loss(
    critic: TensorDict,
    guessed_gradient: TensorDict,
    observed_gradient: TensorDict,
    mixing_weight: Tensor,
) -> Tensor:
    """Compute what a critic minimizes, with the gradient penalty at points between both sides.

    Args:
        critic: Weights of the critics of all tensors.
        guessed_gradient: {name: [...]}.
        observed_gradient: {name: [...]}.
        mixing_weight: Where between both sides the penalty is evaluated, in [0, 1].

    Returns:
        A scalar.
    """
    penalties = []
    for name in observed_gradient:
        mixtures = flatten_filters(guessed_gradient[name]) * mixing_weight + flatten_filters(
            observed_gradient[name]
        ) * (1 - mixing_weight)
        gradients = grad(lambda rows, name=name: score_filters(critic, name, rows).sum())(mixtures)
        norms = (gradients.square().sum(1) + 1e-12).sqrt()
        penalties.append((norms - 1).square().mean())
    return GRADIENT_PENALTY * torch.stack(penalties).sum() - compute_critic_distance(
        critic, guessed_gradient, observed_gradient
    )


@dataclass
class GradientCritics:
    """The learned critics of n victims.

    Attributes:
        weights: {"tensor/part": [n, ...]}.
        generator: Random generator of the mixtures in the gradient penalty.
        optimizers: One Adam for each entry of ``weights``.
    """

    weights: TensorDict
    generator: torch.Generator
    optimizers: dict[str, BatchedAdam] = field(default_factory=dict)

    @classmethod
    def initialize(cls, update: TensorDict, generator: torch.Generator) -> GradientCritics:
        """Build untrained critics for updates {name: [n, ...]}."""
        weights = {}
        for name, gradient in update.items():
            num_features = gradient[0].flatten(1).shape[1] if gradient.ndim > 2 else 1
            for part, size, fan_in in (
                ("in", (num_features, CRITIC_HIDDEN_DIM), num_features),
                ("shift", (CRITIC_HIDDEN_DIM,), CRITIC_HIDDEN_DIM),
                ("out", (CRITIC_HIDDEN_DIM,), CRITIC_HIDDEN_DIM),
            ):
                noise = torch.randn(len(gradient), *size, generator=generator) / math.sqrt(fan_in)
                weights[f"{name}/{part}"] = (noise * (part != "shift")).to(gradient)
        return cls(
            weights, generator, {name: BatchedAdam(CRITIC_LEARNING_RATE) for name in weights}
        )

    def train_critics(self, guessed_gradients: TensorDict, observed_gradients: TensorDict) -> None:
        """Train every critic for `CRITIC_STEPS` steps on its victim's guess and update."""
        reference = next(iter(observed_gradients.values()))
        for _ in range(CRITIC_STEPS):
            mixing_weight = torch.rand(1, generator=self.generator).to(reference)
            gradients = vmap(grad(compute_gradient_critic_loss), in_dims=(0, 0, 0, None))(
                self.weights, guessed_gradients, observed_gradients, mixing_weight
            )
            for name, weight in self.weights.items():
                new_weight, _ = self.optimizers[name].step(
                    weight.flatten(1), mixing_weight, gradients[name].flatten(1)
                )
                self.weights[name] = new_weight.view_as(weight)

    def select(self, indices: Tensor) -> None:
        """Continue with the victims of these indices only."""
        self.weights = {name: weight[indices] for name, weight in self.weights.items()}
        for adam in self.optimizers.values():
            adam.select(indices)


def _build_slice_directions(num_features: int, reference: Tensor) -> Tensor:
    """Build fixed directions [num_features, NUM_SLICES] of unit length, equal for every victim.

    They are quasi-random, since random numbers cannot be used under a vmap.
    """
    row = torch.arange(1, num_features + 1, dtype=torch.float64)
    column = torch.arange(1, NUM_SLICES + 1, dtype=torch.float64)
    phases = torch.outer(row * math.sqrt(2), column * math.sqrt(3)) * 43.758
    entries = torch.frac(phases) - 0.5  # nearly uniform on [-0.5, 0.5]
    return (entries / entries.norm(dim=0)).to(reference)
