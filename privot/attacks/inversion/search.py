r"""Search for images whose gradient equals the observed gradient, for all victims in lock-step.

    min_x  distance(dL/dW (x, y), g) + weight * TV(x),

by Adam or L-BFGS. The result of each victim is the iterate with the smallest observable residual.
A victim that has stopped leaves the computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from privot.attacks.inversion.batched_adam import BatchedAdam
from privot.attacks.inversion.batched_lbfgs import BatchedLbfgs
from privot.attacks.inversion.objectives import OBJECTIVES
from privot.attacks.inversion.problem import Problem
from privot.attacks.inversion.search_evaluation import (
    SearchEvaluation,
    compute_guessed_gradients,
    count_pixels,
    extract_images,
    extract_label_logits,
)
from privot.attacks.inversion.search_phase import SearchPhase
from privot.attacks.inversion.wasserstein_variants import GradientCritics
from privot.progress import Progress, ignore_progress

CHECK_INTERVAL = 20  # evaluations between two checks by the host, so that a GPU need not wait
SHRINK_FRACTION = 0.75  # stopped victims are removed when fewer than this share is active
# (evaluation, indices of victims [n], their images [n, batch, c, h, w])
SearchCallback = Callable[[int, Tensor, Tensor], None]


@dataclass
class ImageSearch:
    """The state of the search for n victims.

    Attributes:
        problem: The updates of the n victims.
        labels: [n, batch], or None where labels are searched for.
        x: [n, D], the pixels and, where ``labels`` is None, the logits of the labels after them.
        residual: [n], of x.
        steps: [n], evaluations so far.
    """

    problem: Problem
    labels: Tensor | None
    x: Tensor
    residual: Tensor
    steps: Tensor

    @classmethod
    def initialize(
        cls,
        problem: Problem,
        labels: Tensor | None,
        generator: torch.Generator,
        x: Tensor | None = None,
    ) -> ImageSearch:
        """Start from noise, N(0, 1) in every entry, as DLG does.

        Args:
            problem: The updates of n victims.
            labels: [n, batch], or None to search for them.
            generator: Random generator of the noise.
            x: The start [n, D] in place of noise.

        Returns:
            The search before its first step.
        """
        num_entries = count_pixels(problem)
        if labels is None:
            num_entries += problem.batch_size * problem.classes
        if x is None:
            x = torch.randn(problem.num_victims, num_entries, generator=generator).to(
                problem.reference_tensor
            )
        return cls(
            problem,
            labels,
            x,
            x.new_full((len(x),), torch.inf),
            torch.zeros(len(x), dtype=torch.long, device=x.device),
        )

    def decode_labels(self, x: Tensor) -> Tensor:
        """Labels [n, batch] of x [n, D]: the largest logit where labels are searched for."""
        if self.labels is not None:
            return self.labels
        return extract_label_logits(self.problem, x).argmax(2)

    def run_phase(
        self,
        phase: SearchPhase,
        generator: torch.Generator,
        callback: SearchCallback | None = None,
        progress: Progress = ignore_progress,
    ) -> ImageSearch:
        """Minimize the objective of one phase, starting from x.

        Args:
            phase: Objective, optimizer and number of steps.
            generator: Random generator of learned critics.
            callback: Called at every evaluation, or None.
            progress: Shows the progress.

        Returns:
            The search with the best iterate of this phase as x.
        """
        problem = self.problem
        labels = self.labels
        x = self.x
        victims = torch.arange(len(x), device=x.device)
        is_active = torch.ones(len(x), dtype=torch.bool, device=x.device)
        best_x = x.clone()
        best_residual = torch.full_like(self.residual, torch.inf)
        steps = torch.zeros_like(self.steps)
        optimizer = _build_optimizer(phase, problem, x)
        critics = None
        if OBJECTIVES[phase.objective].uses_critic:
            critics = GradientCritics.initialize(problem.update, generator)
        evaluate = SearchEvaluation(problem, phase, labels is None)
        for step in range(phase.steps):
            if critics is not None:
                critics.train_critics(compute_guessed_gradients(problem, x, labels), problem.update)
            value, residual, gradient = evaluate(
                problem, x, labels, critics.weights if critics else None
            )
            is_better = is_active & (residual < best_residual[victims])
            best_x[victims] = torch.where(is_better[:, None], x, best_x[victims])
            best_residual[victims] = torch.where(is_better, residual, best_residual[victims])
            steps[victims] += is_active
            if callback is not None:
                callback(step + 1, victims, extract_images(problem, x))
            next_x, is_moving = optimizer.step(x, value, gradient)
            is_active = is_active & is_moving & (residual > phase.tolerance)
            x = torch.where(is_active[:, None], next_x, x)
            if (step + 1) % CHECK_INTERVAL:
                continue
            num_active = int(is_active.sum())
            progress("inversion", step + 1, phase.steps)
            if not num_active:
                break
            if num_active < SHRINK_FRACTION * len(x):
                remaining = is_active.nonzero()[:, 0]
                problem = problem.select(remaining)
                x = x[remaining]
                victims = victims[remaining]
                is_active = is_active[remaining]
                labels = None if labels is None else labels[remaining]
                optimizer.select(remaining)
                if critics is not None:
                    critics.select(remaining)
        progress("inversion", phase.steps, phase.steps)
        return ImageSearch(self.problem, self.labels, best_x, best_residual, self.steps + steps)


def _build_optimizer(phase: SearchPhase, problem: Problem, x: Tensor) -> BatchedAdam | BatchedLbfgs:
    """Build the optimizer of a phase; logits of labels have no bounds.

    Args:
        phase: The optimizer and its settings.
        problem: The bounds of a pixel.
        x: Points [n, D].

    Returns:
        The optimizer before its first step.
    """
    bounds: dict[str, Any] = {}
    if phase.clamp_to_bounds:
        num_pixels = count_pixels(problem)
        num_logits = x.shape[1] - num_pixels
        for name, pixel_bound, logit_bound in (
            ("low", problem.bounds[0], -torch.inf),
            ("high", problem.bounds[1], torch.inf),
        ):
            bounds[name] = torch.cat(
                [x.new_full((num_pixels,), pixel_bound), x.new_full((num_logits,), logit_bound)]
            )
    if phase.optimizer == "adam":
        return BatchedAdam(
            phase.learning_rate,
            phase.steps,
            phase.decay_learning_rate,
            phase.use_gradient_sign,
            **bounds,
        )
    return BatchedLbfgs(
        phase.learning_rate,
        use_line_search=phase.optimizer == "lbfgs-search",
        tolerance=1e-3 * phase.tolerance,
        **bounds,
    )
