"""Optimize images until their class means of features, by many networks, match given targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from privot.components.dct import LearnableImages
from privot.nets.augment import AugmentParams, apply_augmentations
from privot.nets.ensemble import Ensemble, FrozenEnsemble
from privot.runtime.cuda_graphs import GraphedStep

MIN_NORM = 1e-6  # features shorter than this are not scaled to norm 1


def compute_unit_features(
    nets: Ensemble,
    weights: dict[str, Tensor],
    images: Tensor,
    augment_params: AugmentParams,
    center: Tensor | None,
) -> Tensor:
    r"""Compute centered features of unit norm by each of k networks.

    :math:`u_k(x) = (f_k(a_k(x)) - m_k) / |f_k(a_k(x)) - m_k|` with network :math:`f_k`, its
    augmentation :math:`a_k` and its center :math:`m_k`.

    Args:
        nets: The networks.
        weights: Weights of k networks.
        images: Images [count, channels, height, width] in [0, 1].
        augment_params: One augmentation of each network.
        center: Centers [k, num_features]. None returns the features :math:`f_k(a_k(x))` themselves.

    Returns:
        Features [k, count, num_features].
    """
    num_nets = len(weights["head_bias"])
    count = len(images)
    repeated_params = AugmentParams(
        *(values.repeat_interleave(count, 0) for values in augment_params)
    )
    augmented = apply_augmentations(images.repeat(num_nets, 1, 1, 1), repeated_params)
    augmented = augmented.unflatten(0, (num_nets, count))
    compute_dtype = weights.get("conv0", weights["head_bias"]).dtype
    features = nets.extract_features((2 * augmented - 1).to(compute_dtype), weights)
    if center is None:
        return features
    centered = features - center[:, None]
    return centered / centered.norm(dim=2, keepdim=True).clamp(min=MIN_NORM)


@dataclass
class MatchingRound:
    """Target class means of one round of features.

    A feature is a network (networks take turns) with one augmentation, one center and one target.
    """

    nets: Ensemble
    augment_params: AugmentParams  # [num_features, ...]
    center: Tensor  # [num_features, feature_dim]
    target: Tensor  # target class means [num_features, num_classes, feature_dim]
    weight: float  # weight of the round in the loss

    def __post_init__(self) -> None:
        self.frozen_nets = FrozenEnsemble(self.nets)

    def squared_distance(self, images: Tensor, indices: Tensor) -> Tensor:
        """Compute the mean squared distance between class means of features and their targets.

        Args:
            images: Images sorted by class, as many of each class.
            indices: Indices of the features to use.

        Returns:
            The mean over the features of the squared distance, summed over classes: [].
        """
        features = compute_unit_features(
            self.nets,
            self.frozen_nets[indices % self.nets.num_nets],
            images,
            self.augment_params.select(indices),
            self.center[indices],
        )
        class_means = features.unflatten(1, (self.target.shape[1], -1)).mean(2)
        return (class_means - self.target[indices]).square().sum() / len(indices)


def match_features(
    images: Tensor,
    rounds: list[MatchingRound],
    *,
    steps: int,
    nets_per_step: int,
    learning_rate: float,
    frequency_fraction: float,
    generator: torch.Generator,
    progress: Callable[[int, int], None],
) -> Tensor:
    """Optimize images toward the targets of all rounds, by Adam with cosine annealing.

    Args:
        images: Initial images in [0, 1], sorted by class, as many of each class.
        rounds: Features and their targets.
        steps: Number of optimizer steps.
        nets_per_step: Features of each round in one step.
        learning_rate: Initial learning rate of Adam; it falls to 0.
        frequency_fraction: Fraction of the DCT coefficients of each side that are optimized.
        generator: Random generator on the CPU, which chooses the features of each step.
        progress: Called with (step, steps) from time to time.

    Returns:
        The optimized images, in [0, 1].
    """
    device = images.device
    learnable_images = LearnableImages(images, frequency_fraction)
    current_rate = torch.zeros((), device=device)
    optimizer = torch.optim.Adam(
        [learnable_images.learnable],
        lr=current_rate,
        fused=True,
        capturable=device.type == "cuda",
    )
    schedules = [
        _schedule_features(len(matching_round.center), nets_per_step, steps, generator).to(device)
        for matching_round in rounds
    ]
    current_indices = [schedule[0].clone() for schedule in schedules]
    total_weight = sum(matching_round.weight for matching_round in rounds)

    def take_step() -> None:
        current_images = learnable_images.to_images()
        loss = torch.zeros((), device=device)
        for matching_round, indices in zip(rounds, current_indices, strict=True):
            loss = loss + matching_round.squared_distance(current_images, indices) * (
                matching_round.weight / total_weight
            )
        (learnable_images.learnable.grad,) = torch.autograd.grad(loss, learnable_images.learnable)
        optimizer.step()
        learnable_images.clamp_pixels()

    graphed_step = GraphedStep(take_step, device)
    for step in range(steps):
        current_rate.fill_(learning_rate * (1 + math.cos(math.pi * step / steps)) / 2)
        for indices, schedule in zip(current_indices, schedules, strict=True):
            indices.copy_(schedule[step])
        graphed_step()
        if step % 25 == 24 or step + 1 == steps:
            progress(step + 1, steps)
    with torch.no_grad():
        return learnable_images.to_images().clamp(0, 1)


def _schedule_features(
    num_features: int, features_per_step: int, steps: int, generator: torch.Generator
) -> Tensor:
    """Choose different features at random for each step: [steps, features_per_step]."""
    return torch.rand(steps, num_features, generator=generator).argsort(1)[:, :features_per_step]
