r"""The best linear guess of an image from noisy answers, learned from owners that the attacker made up.

With answers F [samples, numbers] of shadows, before noise, and what they hold beyond the mean Y [samples, pixels], an answer a tells

    a F^T (F F^T + ridge)^-1 Y,

which for a ridge of samples * noise² is the linear least squares estimate under that noise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SHARES = (
    1e-6,
    1e-5,
    1e-4,
    1e-3,
    1e-2,
    0.1,
    1.0,
    10.0,
    100.0,
)  # of a kernel's mean diagonal, tried as its ridge


class Shadows:
    """Imitated owners: what they hold of each class beyond its mean, of images [shadows, held, c, h, w] and labels [shadows, held]."""

    def __init__(self, images: Tensor, labels: Tensor, means: Tensor):
        self.device = images.device
        every = torch.arange(len(means), device=self.device)
        means = means.to(self.device)
        marks = (labels[:, None] == every[:, None]).float()  # [shadows, classes, held]
        counts = marks.sum(2)
        own = (
            torch.einsum("skn,sn...->sk...", marks, images)
            / counts.clamp(min=1)[:, :, None, None, None]
        )
        self.there = counts > 0
        self.wanted = (own - means).flatten(2).double()
        self.means = means

    def learned(
        self, heard: Tensor, slopes: Tensor, deviation: float, generator: torch.Generator
    ) -> Tensor:
        """What answers [rounds, classes, rows, ...] with noise say beyond the means, [classes, c, h, w], as ``slopes`` of shadows tell it.

        The estimate is linear in all answers of a class, one for all classes; its ridge is the noise or a multiple of the kernel's
        diagonal, whichever did best on a fifth of the shadows, with noise.
        """
        known = (
            slopes.to(self.device).transpose(1, 2).flatten(2).double()
        )  # [shadows, classes, numbers]
        weight = self.there[:, :, None]
        middle = (known * weight).sum(0) / weight.sum(0).clamp(min=1)
        known = known - middle
        said = heard.to(self.device).transpose(0, 1).flatten(1).double() - middle
        last = max(1, len(known) // 5)
        fit = self._fitted(known[last:], slice(last, None))
        tried = self.there[:last]
        noise = torch.randn(known[:last].shape, generator=generator, dtype=torch.float64).to(
            self.device
        )
        errors = {}
        for ridge in self._ridges(known, deviation):
            guess = fit((known[:last] + deviation * noise)[tried], ridge)
            errors[ridge] = float((guess - self.wanted[:last][tried]).square().mean())
        best = min(errors, key=lambda ridge: errors[ridge])
        return self._fitted(known, slice(None))(said, best).view_as(self.means).float().cpu()

    def _ridges(self, known: Tensor, deviation: float) -> list[float]:
        size = float(known.square().sum(2).mean())
        count = int(self.there.sum())
        return [share * size for share in SHARES] + ([count * deviation**2] if deviation else [])

    def _fitted(self, known: Tensor, which: slice) -> Callable[[Tensor, float], Tensor]:
        """The function from answers [n, numbers] and a ridge to images [n, pixels]: a F^T (F F^T + ridge)^-1 Y."""
        # [samples, numbers], [samples, pixels]
        rows = known[self.there[which]]
        truth = self.wanted[which][self.there[which]]
        kernel = rows @ rows.T
        unit = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
        return lambda said, ridge: (
            (said @ rows.T) @ torch.linalg.solve(kernel + ridge * unit, truth)
        )
