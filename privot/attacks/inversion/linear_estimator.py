r"""The best linear estimate of an image from noisy gradients, learned from simulated clients.

Let F [samples, features] be the gradients of simulated clients before noise, and Y [samples,
pixels] the difference of their images and the mean image. The estimate from a gradient a is

    a F^T (F F^T + ridge)^-1 Y,

which for a ridge of samples * noise² is the linear least squares estimate under that noise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# ridges that are tried, as fractions of the kernel's mean diagonal
RIDGE_FRACTIONS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
VALIDATION_DIVISOR = 5  # a fifth of the simulated clients choose the ridge


class LinearEstimator:
    """Estimates images of each class from gradients, one linear map for all classes.

    Args:
        images: Images of the simulated clients [clients, count, c, h, w].
        labels: [clients, count].
        class_means: Mean image of each class [classes, c, h, w].
    """

    def __init__(self, images: Tensor, labels: Tensor, class_means: Tensor):
        self.device = images.device
        self.class_means = class_means.to(self.device)
        class_indices = torch.arange(len(class_means), device=self.device)
        is_of_class = (labels[:, None] == class_indices[:, None]).float()
        counts = is_of_class.sum(2)  # is_of_class is [clients, classes, count]
        client_means = (
            torch.einsum("skn,sn...->sk...", is_of_class, images)
            / counts.clamp(min=1)[:, :, None, None, None]
        )
        self.has_class = counts > 0
        self.mean_offsets = (client_means - self.class_means).flatten(2).double()

    def estimate_images(
        self,
        observed_gradients: Tensor,
        simulated_gradients: Tensor,
        noise_std: float,
        generator: torch.Generator,
    ) -> Tensor:
        """Estimate the difference between a client's images and the class means.

        The ridge follows from the noise, or is a fraction of the kernel's diagonal: whichever gives
        the smallest error on a fifth of the simulated clients, with noise.

        Args:
            observed_gradients: [rounds, classes, rows, ...] of the client, with noise.
            simulated_gradients: [clients, rounds, classes, rows, ...], without noise.
            noise_std: Standard deviation of the noise.
            generator: Random generator of the noise for the choice of the ridge.

        Returns:
            [classes, c, h, w].
        """
        features = simulated_gradients.to(self.device).transpose(1, 2).flatten(2).double()
        weight = self.has_class[:, :, None]
        mean_features = (features * weight).sum(0) / weight.sum(0).clamp(min=1)
        features = features - mean_features  # [clients, classes, features]
        observation = (
            observed_gradients.to(self.device).transpose(0, 1).flatten(1).double() - mean_features
        )
        num_validation = max(1, len(features) // VALIDATION_DIVISOR)
        predict = self._fit_ridge(features[num_validation:], slice(num_validation, None))
        has_class = self.has_class[:num_validation]
        validation_features = features[:num_validation]
        noise = torch.randn(validation_features.shape, generator=generator, dtype=torch.float64).to(
            self.device
        )
        noisy_features = (validation_features + noise_std * noise)[has_class]
        targets = self.mean_offsets[:num_validation][has_class]
        errors = {
            ridge: float((predict(noisy_features, ridge) - targets).square().mean())
            for ridge in self._list_ridges(features, noise_std)
        }
        best_ridge = min(errors, key=lambda ridge: errors[ridge])
        estimate = self._fit_ridge(features, slice(None))(observation, best_ridge)
        return estimate.view_as(self.class_means).float().cpu()

    def _list_ridges(self, features: Tensor, noise_std: float) -> list[float]:
        mean_diagonal = float(features.square().sum(2).mean())
        ridges = [fraction * mean_diagonal for fraction in RIDGE_FRACTIONS]
        if noise_std:
            ridges.append(int(self.has_class.sum()) * noise_std**2)
        return ridges

    def _fit_ridge(self, features: Tensor, clients: slice) -> Callable[[Tensor, float], Tensor]:
        """Build the function from gradients [n, features] and a ridge to images [n, pixels].

        Args:
            features: Gradients of the clients [clients, classes, features].
            clients: Their indices.

        Returns:
            The function a, ridge -> a F^T (F F^T + ridge)^-1 Y.
        """
        samples = features[self.has_class[clients]]  # F [samples, features]
        targets = self.mean_offsets[clients][self.has_class[clients]]  # Y [samples, pixels]
        kernel = samples @ samples.T
        identity = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)

        def predict(gradients: Tensor, ridge: float) -> Tensor:
            return (gradients @ samples.T) @ torch.linalg.solve(kernel + ridge * identity, targets)

        return predict
