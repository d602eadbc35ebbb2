r"""L-BFGS for many problems in lock-step: every evaluation is one for all of them, and each goes its own way.

With H the inverse Hessian that the last ``history`` pairs s = x' - x, y = g' - g imply, a step is  x <- x - t H g. As `torch.optim.LBFGS`
there is no line search (t = rate), which is what DLG and iDLG ran. With ``backtrack`` a problem whose value did not fall enough (Armijo)
goes back and tries a shorter step at the next evaluation, while the others go on.

H g is not found by the usual two loops over the pairs, 2 history small steps one after another, but in the compact form (Byrd, Nocedal and
Schnabel 1994): with the pairs as columns of S and Y, R the upper triangle of S^T Y, D its diagonal and c the scale,

    H g = c g + S t - c Y u,   u = R^-1 S^T g,   t = R^-T ((D + c Y^T Y) u - c Y^T g),

a few products for all problems at once. R is small and solved in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

CURVED = 1e-10  # a pair with a smaller <s, y> teaches nothing (as torch has it)
ARMIJO = 1e-4  # share of the promised fall that a step must give
SHORTEST = 1e-8  # a step so short goes nowhere


@dataclass
class Lbfgs:
    """The state of n searches in D dimensions; `step` takes values [n] and slopes [n, D] at x [n, D] and says where to look next."""

    rate: float = 1.0
    history: int = 100
    backtrack: bool = False
    tolerance: float = 1e-9  # a fall so small, to first order, ends a search
    low: Tensor | None = None  # a box [D]; steps end at its walls
    high: Tensor | None = None
    done: int = 0  # pairs so far; the next one goes to place done % history
    pairs: dict[str, Tensor] = field(
        default_factory=dict
    )  # s, y [n, history, D]; sy, yy [n, history, history], all <s_i, y_j>, <y_i, y_j>
    at: dict[str, Tensor] = field(
        default_factory=dict
    )  # x, slope, way [n, D]; value, fall, length, scale [n] of the last accepted point

    def step(self, x: Tensor, value: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """The next x [n, D], and which searches still move, bool [n].

        >>> search, x = Lbfgs(), torch.tensor([[3.0, 1.0], [0.0, -2.0]])
        >>> for _ in range(20): x, _ = search.step(x, (x**2 @ torch.tensor([1.0, 5.0])), 2 * x * torch.tensor([1.0, 5.0]))
        >>> bool(x.abs().max() < 1e-3)
        True
        """
        if not self.at:
            length = self.rate * (1 / slope.abs().sum(1)).clamp(max=1)
            self.at = {"x": x, "slope": slope, "value": value, "scale": torch.ones_like(value)}
            return self._go(-slope, length, torch.ones_like(value, dtype=torch.bool))
        at = self.at
        accepted = torch.ones_like(value, dtype=torch.bool)
        if self.backtrack:
            accepted = value <= at["value"] + ARMIJO * at["length"] * at["fall"]
        moved = x - at["x"]
        bent = slope - at["slope"]
        curve = (moved * bent).sum(1)
        good = accepted & (curve > CURVED)
        scale = torch.where(good, curve / bent.square().sum(1), at["scale"])
        rows = good[
            :, None
        ]  # a pair that is not taken may hold what is not finite; as zeros it teaches nothing
        self._learn(torch.where(rows, moved, 0), torch.where(rows, bent, 0))
        kept = accepted[:, None]
        fresh = {"x": torch.where(kept, x, at["x"]), "slope": torch.where(kept, slope, at["slope"])}
        self.at = at | fresh | {"value": torch.where(accepted, value, at["value"]), "scale": scale}
        # A parabola through what was seen says how far to go back; within a tenth and a half of the last length.
        fall = at["fall"]
        length = at["length"]
        bottom = -fall * length.square() / (2 * (value - at["value"] - length * fall))
        shorter = torch.where(bottom.isfinite(), bottom, 0).clamp(0.1 * length, 0.5 * length)
        way = self._way(self.at["slope"])
        if self.backtrack:
            way = torch.where(kept, way, at["way"])
        return self._go(
            way, torch.where(accepted, torch.full_like(length, self.rate), shorter), accepted
        )

    def _learn(self, moved: Tensor, bent: Tensor) -> None:
        """A pair [n, D] more, in the place of the oldest."""
        if not self.pairs:
            empty = moved.new_zeros(len(moved), self.history, moved.shape[1])
            small = torch.zeros(
                len(moved), self.history, self.history, dtype=torch.float64, device=moved.device
            )
            self.pairs = {"s": empty, "y": empty.clone(), "sy": small, "yy": small.clone()}
        pairs = self.pairs
        place = self.done % self.history
        pairs["s"][:, place] = moved
        pairs["y"][:, place] = bent
        both = (pairs["y"] @ torch.stack([moved, bent], 2)).double()  # [n, history, 2]
        pairs["sy"][:, :, place] = (pairs["s"] @ bent[:, :, None])[..., 0].double()
        pairs["sy"][:, place] = both[..., 0]
        pairs["yy"][:, :, place] = pairs["yy"][:, place] = both[..., 1]
        self.done += 1

    def _way(self, slope: Tensor) -> Tensor:
        """-H slope [n, D]."""
        pairs = self.pairs
        scale = self.at["scale"]
        count = min(self.done, self.history)
        age = (
            torch.arange(count, device=slope.device) + (self.done - count)
        ) % self.history  # places, the oldest first
        table, inner = (pairs[name][:, age][:, :, age] for name in ("sy", "yy"))
        diagonal = table.diagonal(dim1=1, dim2=2)
        whole = table.triu() + torch.diag_embed(
            (diagonal == 0).to(table)
        )  # R, with 1 where there is no pair
        along, bend = (
            (pairs[name] @ slope[:, :, None])[:, age].double() for name in ("s", "y")
        )  # S^T g, Y^T g
        wide = scale.double()[:, None, None]
        u = torch.linalg.solve_triangular(whole, along, upper=True)
        t = torch.linalg.solve_triangular(
            whole.mT, diagonal[..., None] * u + wide * (inner @ u - bend), upper=False
        )
        back = torch.zeros(2, len(slope), self.history, 1, dtype=slope.dtype, device=slope.device)
        back[:, :, age] = torch.stack([t, wide * u]).to(slope.dtype)
        return (
            -scale[:, None] * slope
            - (back[0].mT @ pairs["s"])[:, 0]
            + (back[1].mT @ pairs["y"])[:, 0]
        )

    def _go(self, way: Tensor, length: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        fall = (way * self.at["slope"]).sum(1)
        moving = (fall <= -self.tolerance) & (accepted | (length > SHORTEST))
        self.at |= {"way": way, "fall": fall, "length": length}
        ahead = torch.where(moving[:, None], self.at["x"] + length[:, None] * way, self.at["x"])
        return (ahead if self.low is None else ahead.clamp(self.low, self.high)), moving

    def keep(self, which: Tensor) -> None:
        """Go on with these searches alone."""
        self.pairs = {name: each[which] for name, each in self.pairs.items()}
        self.at = {name: each[which] for name, each in self.at.items()}
