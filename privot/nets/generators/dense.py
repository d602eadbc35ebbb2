"""A conditional image generator of matrix products alone: fast on a CPU, smooth by construction."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def described(
    net: str, shape: tuple[int, int, int], classes: int, *, code: int, hidden: int, waves: int
) -> tuple[str, dict[str, Any]]:
    """A net by its name and its arguments: "dense", matrix products alone, quick on a CPU; or "conv", which wants a GPU.

    >>> described("dense", (3, 32, 32), 10, code=5, hidden=64, waves=8)[1]["smooth"]
    True
    """
    shared = {"shape": list(shape), "classes": classes, "code": code, "hidden": hidden}
    if net == "conv":
        return "ConvGenerator", {**shared, "width": 32}
    return "DenseGenerator", {
        **shared,
        "waves": waves,
        "smooth": shape[0] == 3,
    }  # no gain was seen on grey digits and clothes


class DenseGenerator(nn.Module):
    """Code and one-hot label to an image in [0, 1], drawn in the ``waves`` x ``waves`` lowest cosines of each channel.

    Three dense layers give the coefficients; a fixed orthonormal 2-D cosine basis turns them into pixels, so that neighbouring
    pixels share what was learned and fine-grained noise has no place to go. Codes are standard Gaussian, [batch, code].
    If ``smooth``, the coefficient of frequency f is divided by 1 + |f|²: pictures begin smooth, and grain is learned last. Else hundreds
    of cosines add up to black and white, where a sigmoid has no slope, and some drawings stay there for good.

    >>> net = DenseGenerator((1, 28, 28), classes=10)
    >>> net(torch.zeros(2, net.code), torch.tensor([3, 7])).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        code: int = 5,
        hidden: int = 256,
        waves: int = 20,
        smooth: bool = False,
    ):
        super().__init__()
        self.shape = (shape[0], shape[1], shape[2])
        self.classes = classes
        self.code = code
        self.waves = (min(waves, shape[1]), min(waves, shape[2]))
        self.layers = nn.Sequential(
            nn.Linear(code + classes, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, shape[0] * self.waves[0] * self.waves[1]),
        )
        self.register_buffer("rows", cosines(shape[1], self.waves[0]), persistent=False)
        self.register_buffer("columns", cosines(shape[2], self.waves[1]), persistent=False)
        square = (
            torch.arange(self.waves[0])[:, None].square() + torch.arange(self.waves[1]).square()
        )
        self.register_buffer("falling", 1 / (1.0 + square * bool(smooth)), persistent=False)

    def forward(self, codes: Tensor, labels: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(labels, self.classes).to(codes.dtype)
        waves = self.layers(torch.cat([codes, one_hot], 1)).view(-1, self.shape[0], *self.waves)
        return (self.rows @ (waves * self.falling) @ self.columns.T).sigmoid()


def cosines(size: int, count: int) -> Tensor:
    """The ``count`` lowest vectors of the orthonormal cosine basis of R^size, scaled to unit pixels: [size, count]."""
    place = (torch.arange(size) + 0.5) * math.pi / size
    basis = (place[:, None] * torch.arange(count)).cos() * math.sqrt(2)
    basis[:, 0] = 1
    return basis
