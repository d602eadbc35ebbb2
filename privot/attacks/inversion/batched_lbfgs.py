r"""L-BFGS for many problems in lock-step: one evaluation serves all problems.

With H the inverse Hessian that the last ``history_size`` pairs s = x' - x, y = g' - g imply, a step
is  x <- x - t H g. As in `torch.optim.LBFGS` there is no line search (t = learning rate), which is
what DLG and iDLG used. With ``use_line_search`` a problem whose value did not decrease enough
(Armijo) returns to its last point and tries a shorter step at the next evaluation, while the other
problems continue.

The usual recursion computes H g in two loops of 2 * history_size small steps. This file uses the
compact form (Byrd, Nocedal and Schnabel 1994): with the pairs as columns of S and Y, R the upper
triangle of S^T Y, D its diagonal and c the scale,

    H g = c g + S t - c Y u,   u = R^-1 S^T g,   t = R^-T ((D + c Y^T Y) u - c Y^T g),

a few products for all problems at once. R is small and solved in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MIN_CURVATURE = 1e-10  # a pair with a smaller <s, y> is not used, as in torch
ARMIJO = 1e-4  # share of the predicted decrease that a step must achieve
MIN_STEP_LENGTH = 1e-8  # a shorter step ends the search


@dataclass
class BatchedLbfgs:
    """L-BFGS for n searches in D dimensions.

    Attributes:
        learning_rate: Step length.
        history_size: Pairs that are stored.
        use_line_search: Whether steps are shortened until they satisfy the Armijo condition.
        tolerance: a smaller decrease, to first order, ends a search.
        low: Lower bounds [D], or None; steps end at the bounds.
        high: Upper bounds [D], or None.
        num_pairs: Pairs so far; the next pair replaces index ``num_pairs % history_size``.
        correction_pairs: s and y [n, history, D]; sy and yy [n, history, history], all inner
            products <s_i, y_j> and <y_i, y_j>.
        accepted_point: x, gradient and direction [n, D]; value, directional_derivative,
            step_length and scale [n] of the last accepted point.
    """

    learning_rate: float = 1.0
    history_size: int = 100
    use_line_search: bool = False
    tolerance: float = 1e-9
    low: Tensor | None = None
    high: Tensor | None = None
    num_pairs: int = 0
    correction_pairs: dict[str, Tensor] = field(default_factory=dict)
    accepted_point: dict[str, Tensor] = field(default_factory=dict)

    def step(self, x: Tensor, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Make one step.

        Args:
            x: Points [n, D].
            value: Value of the objective [n].
            gradient: Gradient of the objective with respect to x [n, D].

        Returns:
            The next points [n, D], and bool [n]: which searches still move.

        >>> search, x = BatchedLbfgs(), torch.tensor([[3.0, 1.0], [0.0, -2.0]])
        >>> weights = torch.tensor([1.0, 5.0])
        >>> for _ in range(20): x, _ = search.step(x, x**2 @ weights, 2 * x * weights)
        >>> bool(x.abs().max() < 1e-3)
        True
        """
        if not self.accepted_point:
            step_length = self.learning_rate * (1 / gradient.abs().sum(1)).clamp(max=1)
            self.accepted_point = {
                "x": x,
                "gradient": gradient,
                "value": value,
                "scale": torch.ones_like(value),
            }
            all_accepted = torch.ones_like(value, dtype=torch.bool)
            return self._take_step(-gradient, step_length, all_accepted)
        last = self.accepted_point
        step_length = last["step_length"]
        derivative = last["directional_derivative"]
        is_accepted = torch.ones_like(value, dtype=torch.bool)
        if self.use_line_search:
            is_accepted = value <= last["value"] + ARMIJO * step_length * derivative
        displacement = x - last["x"]
        gradient_change = gradient - last["gradient"]
        curvature = (displacement * gradient_change).sum(1)
        is_used = is_accepted & (curvature > MIN_CURVATURE)
        scale = torch.where(is_used, curvature / gradient_change.square().sum(1), last["scale"])
        # A pair that is not used may not be finite; zeros have no effect.
        self._store_pair(
            torch.where(is_used[:, None], displacement, 0),
            torch.where(is_used[:, None], gradient_change, 0),
        )
        self.accepted_point = last | {
            "x": torch.where(is_accepted[:, None], x, last["x"]),
            "gradient": torch.where(is_accepted[:, None], gradient, last["gradient"]),
            "value": torch.where(is_accepted, value, last["value"]),
            "scale": scale,
        }
        # The minimum of the parabola through both values gives the next length to try, limited to
        # 0.1 to 0.5 of the last one.
        minimum = (
            -derivative
            * step_length.square()
            / (2 * (value - last["value"] - step_length * derivative))
        )
        shorter_length = torch.where(minimum.isfinite(), minimum, 0).clamp(
            0.1 * step_length, 0.5 * step_length
        )
        direction = self._compute_direction(self.accepted_point["gradient"])
        if self.use_line_search:
            direction = torch.where(is_accepted[:, None], direction, last["direction"])
        full_length = torch.full_like(step_length, self.learning_rate)
        return self._take_step(
            direction, torch.where(is_accepted, full_length, shorter_length), is_accepted
        )

    def select(self, indices: Tensor) -> None:
        """Continue with the searches of these indices only."""
        self.correction_pairs = {
            name: value[indices] for name, value in self.correction_pairs.items()
        }
        self.accepted_point = {name: value[indices] for name, value in self.accepted_point.items()}

    def _store_pair(self, displacement: Tensor, gradient_change: Tensor) -> None:
        """Store a pair [n, D] in place of the oldest."""
        num_searches, num_dimensions = displacement.shape
        if not self.correction_pairs:
            vectors = displacement.new_zeros(num_searches, self.history_size, num_dimensions)
            products = torch.zeros(
                num_searches,
                self.history_size,
                self.history_size,
                dtype=torch.float64,
                device=displacement.device,
            )
            self.correction_pairs = {
                "s": vectors,
                "y": vectors.clone(),
                "sy": products,
                "yy": products.clone(),
            }
        pairs = self.correction_pairs
        index = self.num_pairs % self.history_size
        pairs["s"][:, index] = displacement
        pairs["y"][:, index] = gradient_change
        y_products = (pairs["y"] @ torch.stack([displacement, gradient_change], 2)).double()
        pairs["sy"][:, :, index] = (pairs["s"] @ gradient_change[:, :, None])[..., 0].double()
        pairs["sy"][:, index] = y_products[..., 0]  # y_products is [n, history, 2]
        pairs["yy"][:, :, index] = pairs["yy"][:, index] = y_products[..., 1]
        self.num_pairs += 1

    def _compute_direction(self, gradient: Tensor) -> Tensor:
        """Compute -H g [n, D] of gradients g [n, D]."""
        pairs = self.correction_pairs
        scale = self.accepted_point["scale"]
        num_stored = min(self.num_pairs, self.history_size)
        first_pair = self.num_pairs - num_stored
        oldest_first = (
            torch.arange(num_stored, device=gradient.device) + first_pair
        ) % self.history_size
        s_y, y_y = (pairs[name][:, oldest_first][:, :, oldest_first] for name in ("sy", "yy"))
        diagonal = s_y.diagonal(dim1=1, dim2=2)
        # R, with 1 on the diagonal where a pair is not used
        triangle = s_y.triu() + torch.diag_embed((diagonal == 0).to(s_y))
        s_g, y_g = (
            (pairs[name] @ gradient[:, :, None])[:, oldest_first].double() for name in ("s", "y")
        )
        wide_scale = scale.double()[:, None, None]
        u = torch.linalg.solve_triangular(triangle, s_g, upper=True)
        t = torch.linalg.solve_triangular(
            triangle.mT, diagonal[..., None] * u + wide_scale * (y_y @ u - y_g), upper=False
        )
        coefficients = torch.zeros(
            2, len(gradient), self.history_size, 1, dtype=gradient.dtype, device=gradient.device
        )
        coefficients[:, :, oldest_first] = torch.stack([t, wide_scale * u]).to(gradient.dtype)
        return (
            -scale[:, None] * gradient
            - (coefficients[0].mT @ pairs["s"])[:, 0]
            + (coefficients[1].mT @ pairs["y"])[:, 0]
        )

    def _take_step(
        self, direction: Tensor, step_length: Tensor, is_accepted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Move from the last accepted point.

        Args:
            direction: [n, D].
            step_length: [n].
            is_accepted: bool [n], whether the point before was accepted.

        Returns:
            The next points [n, D], and bool [n]: which searches still move.
        """
        derivative = (direction * self.accepted_point["gradient"]).sum(1)
        is_moving = (derivative <= -self.tolerance) & (
            is_accepted | (step_length > MIN_STEP_LENGTH)
        )
        self.accepted_point |= {
            "direction": direction,
            "directional_derivative": derivative,
            "step_length": step_length,
        }
        x = self.accepted_point["x"]
        next_x = torch.where(is_moving[:, None], x + step_length[:, None] * direction, x)
        if self.low is not None:
            next_x = next_x.clamp(self.low, self.high)
        return next_x, is_moving
