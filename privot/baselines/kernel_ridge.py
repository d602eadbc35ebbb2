"""Kernel ridge regression from a small support set, with the kernels of wide networks.

It is differentiable in the images and labels of the support set.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from privot.baselines.ntk import compute_neural_tangent_kernel
from privot.nets.conv_block import autocast_half
from privot.nets.ensemble import Ensemble


def solve_kernel_ridge(kernel: Tensor, labels: Tensor, ridge: float) -> Tensor:
    """Solve (K + ridge * trace(K)/n * I) a = labels by Cholesky, in float64.

    It does not check that the factor exists, since the check would synchronize with a GPU. A ridge
    far above rounding (1e-16 n) guarantees it.

    Args:
        kernel: K [n, n].
        labels: Labels [n, classes].
        ridge: Share of the mean diagonal that is added to the diagonal.

    Returns:
        a [n, classes].
    """
    kernel = kernel.double()
    identity = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
    kernel = kernel + ridge * kernel.diagonal().mean() * identity
    factor, _ = torch.linalg.cholesky_ex(kernel)
    half_solution = torch.linalg.solve_triangular(factor, labels.double(), upper=False)
    return torch.linalg.solve_triangular(factor.mT, half_solution, upper=True)


class DenseNtkRegression:
    """Regression with the exact tangent kernel of a dense network.

    Args:
        depth: Number of hidden layers.
    """

    def __init__(self, depth: int):
        self.depth = depth

    def resample(self, generator: torch.Generator) -> None:
        """Do nothing: the kernel is not random."""

    def predict(self, support: Tensor, labels: Tensor, images: Tensor, ridge: float) -> Tensor:
        """Predict labels from a support set.

        Args:
            support: Images of the support set [n, ...].
            labels: Their labels [n, classes].
            images: Images to predict [m, ...].
            ridge: See `solve_kernel_ridge`.

        Returns:
            Predictions [m, classes].
        """
        support = support.double()
        images = images.double()
        support_kernel = compute_neural_tangent_kernel(support, support, self.depth)
        coefficients = solve_kernel_ridge(support_kernel, labels, ridge)
        return compute_neural_tangent_kernel(images, support, self.depth) @ coefficients


class ConvFeatureRegression:
    """Regression with the mean inner product of the last features of random ConvNets.

    The kernel is a sample of the conjugate kernel of the wide network. It gives what a last linear
    layer on random features would learn.

    Args:
        nets: The random networks.
        chunk_size: Images at a time.

    >>> nets = Ensemble(2, (1, 8, 8), 2, width=4, generator=torch.Generator().manual_seed(0))
    >>> images, labels = torch.rand(3, 1, 8, 8), torch.eye(3)
    >>> regression = ConvFeatureRegression(nets)
    >>> regression.predict(images, labels, images, ridge=1e-6).argmax(1)
    tensor([0, 1, 2])
    """

    def __init__(self, nets: Ensemble, chunk_size: int = 1000):
        self.nets = nets.requires_grad_(False)
        self.chunk_size = chunk_size

    def resample(self, generator: torch.Generator) -> None:
        """Sample new convolutions on the networks' device, from PyTorch's usual distribution."""
        for block in range(self.nets.num_blocks):
            convolution = self.nets.get_parameter(f"conv{block}")
            limit = 1 / math.sqrt(convolution[0, 0].numel())
            for name in ("conv", "bias"):
                parameter = self.nets.get_parameter(f"{name}{block}")
                parameter.uniform_(-limit, limit, generator=generator)

    def predict(self, support: Tensor, labels: Tensor, images: Tensor, ridge: float) -> Tensor:
        """Predict labels from a support set; gradients reach the support set only.

        K a = F_images (F_support^T a). The weights in parentheses are computed in float64, so the
        only error is the rounding of the features, which gives another kernel, but still a kernel.

        Args:
            support: Images of the support set [n, ...].
            labels: Their labels [n, classes].
            images: Images to predict [m, ...].
            ridge: See `solve_kernel_ridge`.

        Returns:
            Predictions [m, classes].
        """
        # One network at a time: dense convolutions are faster than grouped ones, and need less
        # memory.
        net_weights = [
            {name: value[net : net + 1] for name, value in self.nets.named_parameters()}
            for net in range(self.nets.num_nets)
        ]
        with autocast_half(support.device):
            features = torch.stack(
                [self.nets.features(support, weights)[0] for weights in net_weights]
            ).double()  # [nets, n, features]
        coefficients = solve_kernel_ridge((features @ features.mT).sum(0), labels, ridge)
        head_weights = (features.mT @ coefficients).float()  # [nets, features, classes]
        predictions = []
        for chunk in images.split(self.chunk_size):
            total = head_weights.new_zeros(len(chunk), head_weights.shape[2])
            for weights, head_weight in zip(net_weights, head_weights, strict=True):
                with torch.no_grad(), autocast_half(chunk.device):
                    chunk_features = self.nets.features(chunk, weights)[0]
                total = total + chunk_features.float() @ head_weight
            predictions.append(total)
        return torch.cat(predictions)
