"""Adam for many problems side by side; each entry has its own step anyway, so this is Adam on one large tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# the paper's
FIRST = 0.9
SECOND = 0.999
TINY = 1e-8
FALLS = (
    3 / 8,
    5 / 8,
    7 / 8,
)  # of all steps: there a falling rate is divided by 10 (Inverting Gradients)


@dataclass
class Adam:
    """``steps`` of it at ``rate``, which ``falls`` if so wished; ``signed`` takes the sign of the slope, as Inverting Gradients does."""

    rate: float = 0.1
    steps: int = 500
    falls: bool = False
    signed: bool = False
    low: Tensor | None = None  # a box [D]
    high: Tensor | None = None
    done: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    def step(self, x: Tensor, value: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """The next x [n, D], and which searches still move, bool [n]: those whose slopes are finite.

        >>> adam, x = Adam(), torch.ones(1, 2)
        >>> for _ in range(100): x, _ = adam.step(x, (x**2).sum(1), 2 * x)
        >>> bool(x.abs().max() < 0.1)
        True
        """
        moving = slope.isfinite().all(1)
        slope = slope.sign() if self.signed else slope
        mean, square = (self.state.get(name, torch.zeros_like(x)) for name in ("mean", "square"))
        mean = mean.lerp(slope, 1 - FIRST)
        square = square.lerp(slope.square(), 1 - SECOND)
        self.state = {"mean": mean, "square": square}
        self.done = self.done + 1
        rate = self.rate * 0.1 ** (
            sum(self.done > fall * self.steps for fall in FALLS) if self.falls else 0
        )
        step = (mean / (1 - FIRST**self.done)) / ((square / (1 - SECOND**self.done)).sqrt() + TINY)
        ahead = torch.where(moving[:, None], x - rate * step, x)
        return (ahead if self.low is None else ahead.clamp(self.low, self.high)), moving

    def keep(self, which: Tensor) -> None:
        """Go on with these searches alone."""
        self.state = {name: each[which] for name, each in self.state.items()}
