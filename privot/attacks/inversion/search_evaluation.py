"""Evaluate the objective of a search and its gradient with respect to the images, for all victims.

A point of a search is a vector x [D]: the pixels of the victim's images and, where labels are
searched for, the logits of the labels after them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from privot.attacks.inversion.conv_as_matmul import ConvAsMatmul
from privot.attacks.inversion.objectives import OBJECTIVES, compute_total_variation
from privot.attacks.inversion.problem import Problem, compute_victim_gradients
from privot.attacks.inversion.problem_checks import TensorDict
from privot.attacks.inversion.search_phase import SearchPhase
from privot.attacks.inversion.wasserstein_variants import compute_critic_distance


def count_pixels(problem: Problem) -> int:
    """Number of pixel values behind one update."""
    channels, height, width = problem.shape
    return problem.batch_size * channels * height * width


def extract_images(problem: Problem, x: Tensor) -> Tensor:
    """Images [..., batch, c, h, w] of points x [..., D]."""
    return x[..., : count_pixels(problem)].unflatten(-1, (problem.batch_size, *problem.shape))


def extract_label_logits(problem: Problem, x: Tensor) -> Tensor:
    """Logits [..., batch, classes] of the labels of points x [..., D]."""
    logits = x[..., -problem.batch_size * problem.classes :]
    return logits.unflatten(-1, (problem.batch_size, problem.classes))


def compute_guessed_gradients(problem: Problem, x: Tensor, labels: Tensor | None) -> TensorDict:
    """Compute the updates that the points would give, without a graph.

    Args:
        problem: The model and its weights.
        x: Points [n, D].
        labels: [n, batch], or None where x holds their logits.

    Returns:
        {name: [n, ...]}.
    """
    with torch.no_grad():
        return compute_victim_gradients(
            problem,
            extract_images(problem, x),
            extract_label_logits(problem, x).softmax(-1) if labels is None else labels,
        )


def discard_uninformative_gaps(
    guessed_gradient: TensorDict,
    observed_gradient: TensorDict,
    compare_mask: TensorDict | None,
    slack: TensorDict | None,
) -> TensorDict:
    """Replace entries that the attacker must not compare by what was observed.

    Args:
        guessed_gradient: {name: [...]} of one victim.
        observed_gradient: {name: [...]}.
        compare_mask: {name: bool [...]}, the entries to compare; see `Problem`.
        slack: {name: [...]}, the distance up to which entries count as equal.

    Returns:
        {name: [...]}, the changed guess.
    """
    if slack is not None:
        gaps = {
            name: guessed_gradient[name] - observed_gradient[name] for name in observed_gradient
        }
        guessed_gradient = {
            name: observed_gradient[name] + gap.sign() * (gap.abs() - slack[name]).relu()
            for name, gap in gaps.items()
        }
    if compare_mask is None:
        return guessed_gradient
    return {
        name: torch.where(compare_mask[name], guessed_gradient[name], observed_gradient[name])
        for name in observed_gradient
    }


class SearchEvaluation:
    """The objective of a phase as a function of the points of all victims.

    Args:
        problem: Model, loss and shapes. The victims may be others at each call.
        phase: The objective and the weight of total variation.
        optimize_labels: Whether points hold logits of labels.
    """

    def __init__(self, problem: Problem, phase: SearchPhase, optimize_labels: bool):
        self.problem = problem
        self.objective = OBJECTIVES[phase.objective]
        self.total_variation_weight = phase.total_variation_weight
        self.optimize_labels = optimize_labels

    def __call__(
        self, problem: Problem, x: Tensor, labels: Tensor | None, critic: TensorDict | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate all victims.

        Args:
            problem: The victims that are still searched for.
            x: Their points [n, D].
            labels: [n, batch], or None.
            critic: Weights {name: [n, ...]} of learned critics, or None.

        Returns:
            Values [n], residuals [n], and gradients of the values with respect to x [n, D].
        """
        arguments = (
            x,
            labels,
            problem.weights,
            problem.update,
            problem.compare_mask,
            problem.slack,
            critic,
        )
        axes = tuple(
            None
            if argument is None or (argument is problem.weights and problem.has_shared_weights)
            else 0
            for argument in arguments
        )
        with ConvAsMatmul(), torch.no_grad():
            gradients, (values, residuals) = vmap(
                grad_and_value(self._evaluate_victim, has_aux=True), in_dims=axes
            )(*arguments)
        return values, residuals, gradients

    def _evaluate_victim(
        self,
        x: Tensor,
        labels: Any,
        weights: TensorDict,
        observed_gradient: TensorDict,
        compare_mask: Any,
        slack: Any,
        critic: Any,
    ) -> tuple[Tensor, Tensor]:
        """Evaluate one victim; for a vmap.

        Args:
            x: The point [D].
            labels: [batch], or None where x holds their logits.
            weights: {name: [...]} of the model.
            observed_gradient: {name: [...]}, the update.
            compare_mask: See `Problem`.
            slack: See `Problem`.
            critic: Weights {name: [...]} of a learned critic, or None.

        Returns:
            The value of the objective, and the residual without a graph.
        """
        images = extract_images(self.problem, x)
        if self.optimize_labels:
            labels = extract_label_logits(self.problem, x).softmax(-1)
        guessed_gradient = discard_uninformative_gaps(
            self.problem.compute_gradient(weights, images, labels),
            observed_gradient,
            compare_mask,
            slack,
        )
        if critic is None:
            value = self.objective.distance(guessed_gradient, observed_gradient)
        else:
            value = compute_critic_distance(critic, guessed_gradient, observed_gradient)
        if self.objective.residual is self.objective.distance:
            residual = value.detach()
        else:
            residual = self.objective.residual(guessed_gradient, observed_gradient).detach()
        if self.total_variation_weight:
            value = value + self.total_variation_weight * compute_total_variation(images)
        return value, residual
