"""Settings of one phase of a search: which objective, which optimizer, how many steps."""

from __future__ import annotations

from dataclasses import dataclass

from privot.attacks.inversion.objectives import OBJECTIVES
from privot.errors import SettingError

OPTIMIZERS = ("adam", "lbfgs", "lbfgs-search")


@dataclass(frozen=True)
class SearchPhase:
    """One phase of a search.

    Attributes:
        objective: a name in `OBJECTIVES`.
        optimizer: adam, lbfgs, or lbfgs-search (L-BFGS with a backtracking line search).
        steps: Evaluations at most.
        learning_rate: Step size.
        use_gradient_sign: Whether Adam uses the sign of the gradient only.
        decay_learning_rate: Whether Adam's rate is divided by 10 three times.
        clamp_to_bounds: Keep pixels within the bounds of the problem.
        total_variation_weight: Weight of the images' total variation in the objective.
        residual_tolerance: a residual that ends the search. None: the published one of the
            objective.
    """

    objective: str = "norm"
    optimizer: str = "lbfgs"
    steps: int = 1000
    learning_rate: float = 1.0
    use_gradient_sign: bool = False
    decay_learning_rate: bool = False
    clamp_to_bounds: bool = False
    total_variation_weight: float = 0.0
    residual_tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise SettingError(
                f"There is no objective {self.objective!r}. Choose one of {', '.join(OBJECTIVES)}."
            )
        if self.optimizer not in OPTIMIZERS:
            raise SettingError(
                f"There is no optimizer {self.optimizer!r}. Choose one of {', '.join(OPTIMIZERS)}."
            )
        if self.steps < 1 or not self.learning_rate > 0 or self.total_variation_weight < 0:
            raise SettingError(
                f"steps={self.steps}, learning_rate={self.learning_rate:g}, "
                f"total_variation_weight={self.total_variation_weight:g}: steps must be at least "
                "1, the rate above 0 and the weight at least 0."
            )
        if OBJECTIVES[self.objective].uses_critic and self.optimizer != "adam":
            raise SettingError(
                "The objective 'critic' changes while it is trained, so it needs adam. L-BFGS "
                "would combine gradients of different objectives."
            )

    @property
    def tolerance(self) -> float:
        """The residual that ends the search."""
        return self.residual_tolerance or OBJECTIVES[self.objective].residual_tolerance
