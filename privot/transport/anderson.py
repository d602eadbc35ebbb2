r"""Where a sequence of fixed-point steps is going, from its last few (Anderson 1965; type II).

A step takes :math:`x` to :math:`G(x)`; its gap is :math:`G(x) - x`. Of all affine mixtures of the last steps the one with the least gap is
nearly where they lead, since near its end a sequence is nearly linear:

.. math:: x' = \sum_i a_i G(x_i), \quad a = \arg\min_{\sum a = 1} |\sum_i a_i (G(x_i) - x_i)|^2.

This removes as many slow directions as steps are kept. Only inner products of gaps come to the host, in the one transfer in which it also
learns how far the sequence has got.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DEPTH = 8  # steps that are kept beside the newest
RIDGE = 1e-13  # of gaps of length 1: what is parallel but for rounding is not told apart


class Extrapolation:
    """The last steps of a sequence of tensors like ``start``, which are one vector here.

    >>> steps = Extrapolation(x := torch.tensor([1.0, 1.0]))
    >>> for _ in range(3):
    ...     y = torch.tensor([0.9, 0.5]) * x
    ...     _ = steps.look(x, y)
    ...     x = y
    >>> steps.ahead().abs() < 1e-6
    tensor([True, True])
    """

    def __init__(self, start: Tensor, depth: int = DEPTH):
        self.ends, self.gaps = start.new_zeros(2, depth + 1, start.numel(), dtype=torch.float64)
        self.products = np.zeros((depth + 1, depth + 1))
        self.kept = 0
        self.like = start

    def look(self, before: Tensor, end: Tensor, *numbers: Tensor) -> list[float]:
        """Keeps a step, and brings ``numbers`` to the host."""
        place = self.kept % len(self.ends)
        self.ends[place].copy_(end.flatten())
        torch.sub(self.ends[place], before.flatten(), out=self.gaps[place])
        told = torch.cat(
            [self.gaps @ self.gaps[place], *(each.double().view(1) for each in numbers)]
        ).tolist()  # the host waits here
        row = told[: len(self.ends)]
        self.products[place] = row
        self.products[:, place] = row
        self.kept += 1
        return told[len(self.ends) :]

    def forget(self) -> None:
        self.kept = 0
        self.ends.zero_()  # they may not have been numbers
        self.gaps.zero_()

    def ahead(self) -> Tensor | None:
        """The mixture, or None where there are fewer than two steps or they do not tell."""
        if self.kept < 2:
            return None
        count = min(self.kept, len(self.ends))
        table = self.products[:count, :count]
        with np.errstate(all="ignore"):  # what is no number is found below
            scale = 1 / np.sqrt(table.diagonal())
            try:
                parts = scale * np.linalg.solve(
                    table * scale * scale[:, None] + RIDGE * np.eye(count), scale
                )
            except np.linalg.LinAlgError:
                return None
            parts /= parts.sum()
        if not np.isfinite(parts).all():
            return None
        weights = torch.from_numpy(parts).to(self.ends.device)
        return (weights @ self.ends[:count]).to(self.like.dtype).view(self.like.shape)
