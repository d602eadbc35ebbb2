r"""How well can the best attack do? The Cramér-Rao bound, computed without running an attack.

The bound follows from the Jacobian J = d(update)/d(image) at the true image, which the data owner
has. From an update u(x) + N(0, s^2) an unbiased estimate of the image has covariance at least
s^2 H^{-1} with H = J^T J (Cramér-Rao). For small s the least-squares attack reaches it, with a mean
squared error of s^2 mean(1 / l_i) over the eigenvalues l_i of H. An attacker who knows the bounds
of a pixel does better, by least squares within them (`solve_box_least_squares`). H is computed from
products J^T (J v); J itself is never stored. Labels count as known. A prior over images (a
generative model, smoothness) can beat both, so this is no proof of privacy; only the accountant
gives one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from privot.attacks.inversion.box_least_squares import solve_box_least_squares
from privot.attacks.inversion.fisher_information import compute_fisher_information
from privot.attacks.inversion.problem import Problem
from privot.attacks.inversion.problem_checks import TensorDict
from privot.errors import DataError

# Smaller eigenvalues, relative to the largest, are rounding: the update does not depend on that
# direction.
RANK_TOLERANCE = 1e-12
MAX_NOISE_VALUES = 16_000  # noise values in all, so that larger images use fewer samples
MIN_NOISE_SAMPLES = 4
MAX_NOISE_SAMPLES = 32
NOISE_SEARCH_STEPS = 4


@dataclass(frozen=True)
class CramerRaoBound:
    """The bound for N victims with n pixel values each.

    A map of ``variance`` or ``null_space_fraction`` over the pixels shows where the leak is.

    Attributes:
        images: The true images [N, n].
        fisher_information: H [N, n, n].
        eigenvalues: Eigenvalues of H [N, n], ascending.
        variance: [N, n], smallest variance of each value at noise 1, in the directions on which the
            update depends.
        null_space_fraction: [N, n], share of each value (0 to 1) on which the update does not
            depend.
        unit_noise_errors: [N, n, samples], errors of the estimate for samples of noise 1.
        null_space_error: [N, n], error of the estimate in the directions on which the update does
            not depend, where the attacker guesses mid-gray.
        bounds: Smallest and largest value of a pixel.
    """

    images: Tensor
    fisher_information: Tensor
    eigenvalues: Tensor
    variance: Tensor
    null_space_fraction: Tensor
    unit_noise_errors: Tensor
    null_space_error: Tensor
    bounds: tuple[float, float] = (0.0, 1.0)

    @property
    def rank(self) -> Tensor:
        """[N], in how many of n directions the update depends on the image."""
        return (self.eigenvalues > RANK_TOLERANCE * self.eigenvalues[:, -1:]).sum(1)

    def predict_unbiased_mse(self, noise_std: float | Tensor) -> Tensor:
        """Compute the Cramér-Rao bound s^2 mean(1 / l_i) [N]; infinite without full rank.

        ``noise_std`` is a number, or one for each victim [N].
        """
        has_full_rank = self.null_space_fraction.sum(1) < 0.5
        return torch.where(has_full_rank, noise_std**2 * self.variance.mean(1), torch.inf)

    def predict_mse(self, noise_std: float | Tensor) -> Tensor:
        """Predict the error [N] of least squares within the bounds, or of mid-gray if smaller.

        An attacker who knows more about images than the bounds does better.
        """
        noise_std = torch.as_tensor(
            noise_std, dtype=self.images.dtype, device=self.images.device
        ).view(-1, 1, 1)
        truth = self.images[..., None]
        unconstrained = (
            truth + noise_std * self.unit_noise_errors + self.null_space_error[..., None]
        )
        # float32, since the error is needed to two digits only
        estimate = solve_box_least_squares(
            self.fisher_information.float(),
            unconstrained.float(),
            self.bounds,
            inverse_diagonal=self.variance,
        )
        return torch.minimum((estimate - truth).square().mean((1, 2)), self._compute_gray_mse())

    def predict_psnr(self, noise_std: float | Tensor) -> Tensor:
        """Predict the PSNR [N] in decibels; the peak is the width of the bounds."""
        return convert_mse_to_psnr(self.predict_mse(noise_std) / self._squared_width)

    def find_noise_std(self, target_psnr: float) -> Tensor:
        """Find the noise [N] that limits this attack to a PSNR, to half a decibel.

        It is 0 where the update has too little information anyway, and infinite where mid-gray is
        as good. The largest value is enough for all victims.
        """
        # from the Cramér-Rao bound; the bounds on pixels need more noise
        noise_std = (10 ** (-target_psnr / 10) * self._squared_width / self.variance.mean(1)).sqrt()
        # The error grows like s^2 at first and slower later, so the steps approach the root.
        for _ in range(NOISE_SEARCH_STEPS):
            excess = (self.predict_psnr(noise_std) - target_psnr).clamp(-20, 20)
            noise_std = noise_std * 10 ** (excess / 20)
        null_space_psnr = convert_mse_to_psnr(
            self.null_space_error.square().mean(1) / self._squared_width
        )
        gray_psnr = convert_mse_to_psnr(self._compute_gray_mse() / self._squared_width)
        noise_std = torch.where(gray_psnr >= target_psnr, torch.inf, noise_std)
        return torch.where(null_space_psnr <= target_psnr, 0.0, noise_std)

    @property
    def _squared_width(self) -> float:
        return (self.bounds[1] - self.bounds[0]) ** 2

    def _compute_gray_mse(self) -> Tensor:
        return (self.images - sum(self.bounds) / 2).square().mean(1)


def compute_cramer_rao_bound(
    problem: Problem,
    images: Tensor,
    labels: Tensor,
    defense: Any = None,
    *,
    relative_noise_std: TensorDict | None = None,
    chunk_size: int = 0,
    seed: int = 0,
) -> CramerRaoBound:
    """Compute the bound for the updates that these images give.

    All images behind one update are unknown together, so n = batch * c * h * w. Computed in
    float64, since H squares the condition number.

    Args:
        problem: Model, weights and shapes.
        images: The true images [N, batch, c, h, w].
        labels: The true labels [N, batch].
        defense: What the clients do before they send, without its noise; see
            `privot.attacks.inversion.defenses`.
        relative_noise_std: {name: [N]}, how noisy each tensor is where they differ. Noise is then
            measured in units of it.
        chunk_size: Products J^T J v at a time. 0: chosen by the device.
        seed: Seed of the samples of noise.

    Returns:
        The bound.

    Raises:
        DataError: Images or labels do not fit the problem.
        SettingError: The defense has no differentiable part.
    """
    if (
        images.shape[:2] != (problem.num_victims, problem.batch_size)
        or labels.shape[:2] != images.shape[:2]
    ):
        raise DataError(
            f"images {list(images.shape)}: give the {problem.num_victims} x {problem.batch_size} "
            "images behind the updates, and their labels."
        )
    flat_images = images.double().flatten(1)
    information = compute_fisher_information(
        problem,
        images,
        labels,
        defense,
        relative_noise_std=relative_noise_std,
        chunk_size=chunk_size,
    )
    analyses = [
        _analyze_information(victim_information, victim_image, problem.bounds, seed + victim)
        for victim, (victim_information, victim_image) in enumerate(
            zip(information.split(1), flat_images.split(1), strict=True)
        )
    ]
    eigenvalues, variance, null_space_fraction, unit_noise_errors, null_space_error = (
        torch.cat(values) for values in zip(*analyses, strict=True)
    )
    return CramerRaoBound(
        flat_images,
        information,
        eigenvalues,
        variance,
        null_space_fraction,
        unit_noise_errors,
        null_space_error,
        problem.bounds,
    )


def convert_mse_to_psnr(mse: Tensor) -> Tensor:
    """Convert a mean squared error to the PSNR in decibels, with peak 1.

    >>> convert_mse_to_psnr(torch.tensor(0.01))
    tensor(20.)
    """
    return -10 * mse.log10()


def _analyze_information(
    fisher_information: Tensor, images: Tensor, bounds: tuple[float, float], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute what follows from H.

    Args:
        fisher_information: H [N, n, n].
        images: The true images [N, n].
        bounds: Smallest and largest value of a pixel.
        seed: Seed of the samples of noise.

    Returns:
        eigenvalues, variance, null_space_fraction, unit_noise_errors and null_space_error; see
        `CramerRaoBound`.
    """
    eigenvalues, eigenvectors = torch.linalg.eigh(fisher_information)
    is_observable = eigenvalues > RANK_TOLERANCE * eigenvalues[:, -1:]
    inverse_root = torch.where(is_observable, eigenvalues, 1.0).rsqrt() * is_observable  # [N, n]
    variance, null_space_fraction = (
        torch.einsum("nij,nj->ni", eigenvectors.square(), values)
        for values in (inverse_root.square(), (~is_observable).to(eigenvalues))
    )
    generator = torch.Generator().manual_seed(seed)
    num_samples = min(
        max(MAX_NOISE_VALUES // images.shape[1], MIN_NOISE_SAMPLES), MAX_NOISE_SAMPLES
    )
    noise = torch.randn(*images.shape, num_samples, dtype=torch.float64, generator=generator).to(
        images.device
    )
    errors = eigenvectors @ (inverse_root[..., None] * noise)
    # Their mean square is known exactly.
    mean_square = errors.square().sum(1).mean(1)
    errors = errors * (variance.sum(1) / mean_square).sqrt()[:, None, None]
    gray_offset = sum(bounds) / 2 - images
    null_space_offset = torch.einsum("nji,nj->ni", eigenvectors, gray_offset) * ~is_observable
    null_space_error = torch.einsum("nij,nj->ni", eigenvectors, null_space_offset)
    return eigenvalues, variance, null_space_fraction, errors, null_space_error
