"""Kernel ridge regression from a small support set, differentiable in its images and labels, with the kernels of wide networks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from privot.baselines.ntk import tangent_kernel
from privot.nets.conv_block import half
from privot.nets.ensemble import Ensemble


def coefficients(kernel: Tensor, labels: Tensor, ridge: float) -> Tensor:
    """Solve (K + ridge · trace(K)/n · I) a = labels by Cholesky: [n, n] and [n, classes] to [n, classes], in double precision.

    The check that the factor exists would stop a GPU at each call; a ridge far above rounding (1e-16 n) makes it needless.
    """
    kernel = kernel.double()
    kernel = kernel + ridge * kernel.diagonal().mean() * torch.eye(
        len(kernel), dtype=kernel.dtype, device=kernel.device
    )
    factor, _ = torch.linalg.cholesky_ex(kernel)
    half = torch.linalg.solve_triangular(factor, labels.double(), upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


class DenseKernel:
    """The tangent kernel of a dense network of ``depth`` hidden layers, exact."""

    def __init__(self, depth: int):
        self.depth = depth

    def renew(self, generator: torch.Generator) -> None:
        """Nothing in it is random."""

    def predict(self, support: Tensor, labels: Tensor, images: Tensor, ridge: float) -> Tensor:
        """Regression from the support set [n, ...] with labels [n, classes] at images [m, ...]: [m, classes]."""
        support = support.double()
        images = images.double()
        solved = coefficients(tangent_kernel(support, support, self.depth), labels, ridge)
        return tangent_kernel(images, support, self.depth) @ solved


class FeatureKernel:
    """Mean over random ConvNets of the inner products of their last features, a sample of the conjugate kernel of the wide network.

    Without trained layers, it is what a last linear layer on random features would learn. ``renew`` draws other networks.

    >>> nets = Ensemble(2, (1, 8, 8), 2, width=4, generator=torch.Generator().manual_seed(0))
    >>> images, labels = torch.rand(3, 1, 8, 8), torch.eye(3)
    >>> FeatureKernel(nets).predict(images, labels, images, ridge=1e-6).argmax(1)
    tensor([0, 1, 2])
    """

    def __init__(self, nets: Ensemble, portion: int = 1000):
        self.nets = nets.requires_grad_(False)
        self.portion = portion

    def renew(self, generator: torch.Generator) -> None:
        """Fresh convolutions, drawn on the networks' device by PyTorch's usual law."""
        for block in range(self.nets.blocks):
            convolution = self.nets.get_parameter(f"conv{block}")
            reach = 1 / math.sqrt(convolution[0, 0].numel())
            for name in ("conv", "bias"):
                self.nets.get_parameter(f"{name}{block}").uniform_(
                    -reach, reach, generator=generator
                )

    def predict(self, support: Tensor, labels: Tensor, images: Tensor, ridge: float) -> Tensor:
        """As `DenseKernel.predict`; gradients reach the support set, not the images.

        K a = F_images (F_support' a): the weights in the bracket are found in double precision, so that rounding of the features
        alone (which gives another kernel, but still a kernel) is all the error there is.
        """
        # One net at a time: dense convolutions are quicker than grouped ones, and hold less.
        alone = [
            {name: value[each : each + 1] for name, value in self.nets.named_parameters()}
            for each in range(self.nets.nets)
        ]
        with half(support.device):
            features = torch.stack(
                [self.nets.features(support, each)[0] for each in alone]
            ).double()  # [nets, n, numbers]
        solved = coefficients((features @ features.mT).sum(0), labels, ridge)
        weights = (features.mT @ solved).float()  # [nets, numbers, classes]
        parts = []
        for part in images.split(self.portion):
            total = weights.new_zeros(len(part), weights.shape[2])
            for each, weight in zip(alone, weights, strict=True):
                with torch.no_grad(), half(part.device):
                    seen = self.nets.features(part, each)[0]
                total = total + seen.float() @ weight
            parts.append(total)
        return torch.cat(parts)
