"""Adam for many searches at once; its steps are elementwise, so one large tensor is enough."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# as in the paper
BETA1 = 0.9
BETA2 = 0.999
ADAM_EPSILON = 1e-8
# shares of all steps after which a decaying rate is divided by 10 (Inverting Gradients)
DECAY_MILESTONES = (3 / 8, 5 / 8, 7 / 8)


@dataclass
class BatchedAdam:
    """Adam for n searches in D dimensions.

    Attributes:
        learning_rate: Step size.
        steps: Number of steps, for the decay.
        decay_learning_rate: Whether the rate is divided by 10 at each of `DECAY_MILESTONES`.
        use_gradient_sign: Whether only the sign of the gradient is used (Inverting Gradients).
        low: Lower bounds [D], or None.
        high: Upper bounds [D], or None.
        step_count: Steps so far.
        state: Running means ``mean`` and ``square`` [n, D] of the gradient and its square.
    """

    learning_rate: float = 0.1
    steps: int = 500
    decay_learning_rate: bool = False
    use_gradient_sign: bool = False
    low: Tensor | None = None
    high: Tensor | None = None
    step_count: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    def step(self, x: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Make one step.

        Args:
            x: Points [n, D].
            value: Value of the objective [n]; not used.
            gradient: Gradient of the objective with respect to x [n, D].

        Returns:
            The next points [n, D], and bool [n]: whether the gradient is finite, so that the search
            can continue.

        >>> adam, x = BatchedAdam(), torch.ones(1, 2)
        >>> for _ in range(100): x, _ = adam.step(x, (x**2).sum(1), 2 * x)
        >>> bool(x.abs().max() < 0.1)
        True
        """
        is_finite = gradient.isfinite().all(1)
        gradient = gradient.sign() if self.use_gradient_sign else gradient
        mean, square = (self.state.get(name, torch.zeros_like(x)) for name in ("mean", "square"))
        mean = mean.lerp(gradient, 1 - BETA1)
        square = square.lerp(gradient.square(), 1 - BETA2)
        self.state = {"mean": mean, "square": square}
        self.step_count = self.step_count + 1
        num_decays = 0
        if self.decay_learning_rate:
            num_decays = sum(self.step_count > share * self.steps for share in DECAY_MILESTONES)
        rate = self.learning_rate * 0.1**num_decays
        step = (mean / (1 - BETA1**self.step_count)) / (
            (square / (1 - BETA2**self.step_count)).sqrt() + ADAM_EPSILON
        )
        next_x = torch.where(is_finite[:, None], x - rate * step, x)
        if self.low is not None:
            next_x = next_x.clamp(self.low, self.high)
        return next_x, is_finite

    def select(self, indices: Tensor) -> None:
        """Continue with the searches of these indices only."""
        self.state = {name: value[indices] for name, value in self.state.items()}
