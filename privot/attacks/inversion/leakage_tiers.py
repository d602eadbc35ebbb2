"""Run the attacks of a leakage check one after another, and remember the best reconstruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from privot.attacks.inversion.leakage_result import TierResult
from privot.attacks.inversion.problem import Reconstruction
from privot.attacks.inversion.scoring import score_reconstruction
from privot.errors import PrivotError


@dataclass
class TierRunner:
    """Runs attacks and stores their results and the best reconstruction.

    Attributes:
        images: The true images [1, b, c, h, w].
        labels: The true labels [1, b].
        bounds: Smallest and largest value of a pixel.
        threshold: Mean squared error below which an image counts as leaked.
        results: Results of the tiers so far.
        best: The reconstruction with the smallest error so far, or None.
        best_mse: Error of ``best``.
    """

    images: Tensor
    labels: Tensor
    bounds: tuple[float, float]
    threshold: float
    results: list[TierResult] = field(default_factory=list)
    best: Reconstruction | None = None
    best_mse: float | None = None

    def run(self, name: str, reconstruct: Callable[[], Reconstruction]) -> None:
        """Run one attack; where it does not apply its error message becomes the note."""
        try:
            reconstruction = reconstruct()
        except PrivotError as error:
            self.results.append(TierResult(name, None, str(error)))
            return
        scores = score_reconstruction(
            reconstruction, self.images, self.labels, self.threshold, bounds=self.bounds
        )
        ssim = float(scores.ssim[0, scores.mse[0].argmin()])
        mse = float(scores.nearest_mse[0].min())
        residual = float(reconstruction.residual[0])
        self.results.append(TierResult(name, mse, f"SSIM {ssim:.3f}, residual {residual:.1e}"))
        if self.best_mse is None or mse < self.best_mse:
            self.best_mse = mse
            self.best = reconstruction
