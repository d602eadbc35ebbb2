r"""Anderson acceleration of a fixed-point iteration (Anderson 1965; type II).

An iteration takes :math:`x` to :math:`G(x)`; its residual is :math:`G(x) - x`. Near its end a
sequence is nearly linear, so the affine combination of the last iterates with the smallest residual
is close to the fixed point:

.. math:: x' = \sum_i a_i G(x_i), \quad a = \arg\min_{\sum a = 1} |\sum_i a_i (G(x_i) - x_i)|^2.

This removes as many slowly converging directions as iterates are stored. Only inner products of
residuals are copied to the host, in the same transfer as the convergence check.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MEMORY = 8  # iterates stored beside the newest
RIDGE = (
    1e-13  # relative to residuals of norm 1; residuals that differ by rounding count as parallel
)


class AndersonAcceleration:
    """The last iterates of a sequence of tensors, each treated as one vector.

    Args:
        start: The first tensor; gives shape, precision and device.
        memory: Number of iterates stored beside the newest.

    >>> acceleration = AndersonAcceleration(x := torch.tensor([1.0, 1.0]))
    >>> for _ in range(3):
    ...     y = torch.tensor([0.9, 0.5]) * x
    ...     _ = acceleration.record(x, y)
    ...     x = y
    >>> acceleration.extrapolate().abs() < 1e-6
    tensor([True, True])
    """

    def __init__(self, start: Tensor, memory: int = MEMORY):
        self.iterates, self.residuals = start.new_zeros(
            2, memory + 1, start.numel(), dtype=torch.float64
        )
        self.gram_matrix = np.zeros((memory + 1, memory + 1))
        self.num_stored = 0
        self.template = start

    def record(self, before: Tensor, after: Tensor, *scalars: Tensor) -> list[float]:
        """Store one iterate and copy scalars to the host.

        Args:
            before: The iterate :math:`x`.
            after: The next one, :math:`G(x)`.
            scalars: Scalars on the device.

        Returns:
            The scalars. The host waits for the device.
        """
        slot = self.num_stored % len(self.iterates)
        self.iterates[slot].copy_(after.flatten())
        torch.sub(self.iterates[slot], before.flatten(), out=self.residuals[slot])
        inner_products = self.residuals @ self.residuals[slot]
        on_host = torch.cat(
            [inner_products, *(scalar.double().view(1) for scalar in scalars)]
        ).tolist()
        row = on_host[: len(self.iterates)]
        self.gram_matrix[slot] = row
        self.gram_matrix[:, slot] = row
        self.num_stored += 1
        return on_host[len(self.iterates) :]

    def reset(self) -> None:
        """Forget all iterates."""
        self.num_stored = 0
        # The values may be NaN, and NaN times 0 is NaN.
        self.iterates.zero_()
        self.residuals.zero_()

    def extrapolate(self) -> Tensor | None:
        """Return the combination of the stored iterates with the smallest residual.

        None means that there are fewer than two iterates or that their system has no solution.
        """
        if self.num_stored < 2:
            return None
        count = min(self.num_stored, len(self.iterates))
        gram = self.gram_matrix[:count, :count]
        with np.errstate(all="ignore"):  # non-finite coefficients are rejected below
            scale = 1 / np.sqrt(gram.diagonal())
            normalized = gram * scale * scale[:, None] + RIDGE * np.eye(count)
            try:
                coefficients = scale * np.linalg.solve(normalized, scale)
            except np.linalg.LinAlgError:
                return None
            coefficients /= coefficients.sum()
        if not np.isfinite(coefficients).all():
            return None
        weights = torch.from_numpy(coefficients).to(self.iterates.device)
        combination = weights @ self.iterates[:count]
        return combination.to(self.template.dtype).view(self.template.shape)
