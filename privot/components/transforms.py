r"""Fixed transforms: an image as a short vector and back, at no cost, since nothing of them was learned.

A space is linear: :math:`z = w \odot D^T C(x - g) A` with orthonormal columns in D and A (cosines or wavelets of each side, the coarsest
first), a public grey g, brightness and two differences of colours C, and weights w that share the ball out over the frequencies. Without
weights it is orthonormal.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from privot.components.dct import cosines
from privot.errors import SettingError

GREY = {
    1: 0.2,
    3: 0.45,
}  # subtracted from every pixel, by channels: a guess that no data was asked for
KINDS = ("cosines", "wavelets", "haar")
FILTERS = {
    "haar": [math.sqrt(0.5), math.sqrt(0.5)],
    "wavelets": [
        (1 + 3**0.5) / 32**0.5,
        (3 + 3**0.5) / 32**0.5,
        (3 - 3**0.5) / 32**0.5,
        (1 - 3**0.5) / 32**0.5,
    ],  # Daubechies' four
}


class Space(NamedTuple):
    """``down`` [height, p], ``across`` [width, q], ``weight`` [p, q], ``grey``, ``colours`` [channels, channels]; points have
    channels * p * q numbers.

    >>> here = space("cosines", (1, 8, 8), 8)
    >>> image = torch.rand(1, 8, 8)
    >>> torch.allclose(here.image(here.point(image), 1), image, atol=1e-6)
    True
    """

    down: Tensor
    across: Tensor
    weight: Tensor
    grey: float
    colours: Tensor

    def dim(self, channels: int) -> int:
        """Numbers of a point."""
        return channels * self.weight.numel()

    def point(self, image: Tensor) -> Tensor:
        """[..., channels, height, width] to [..., dim]."""
        seen = (self.colours @ (image - self.grey).flatten(-2)).view(image.shape)
        return (self.down.T @ seen @ self.across * self.weight).flatten(-3)

    def image(self, point: Tensor, channels: int) -> Tensor:
        """[..., dim] to [..., channels, height, width]; it may leave [0, 1]."""
        waves = point.unflatten(-1, (channels, *self.weight.shape)) / self.weight
        seen = self.down @ waves @ self.across.T
        return (self.colours.T @ seen.flatten(-2)).view(seen.shape) + self.grey

    def small(self) -> Tensor:
        """What a point's numbers are as a small picture of p x q pixels, by cosines of p and q: an orthonormal [p * q, p * q].

        >>> small = space("cosines", (1, 8, 8), 4).small()
        >>> torch.allclose(small.T @ small, torch.eye(16), atol=1e-6)
        True
        """
        high, wide = self.weight.shape
        return torch.kron(cosines(high, high), cosines(wide, wide)).to(self.weight)

    def to(self, device: torch.device) -> Space:
        return Space(
            self.down.to(device),
            self.across.to(device),
            self.weight.to(device),
            self.grey,
            self.colours.to(device),
        )


def space(
    kind: str, shape: tuple[int, int, int], waves: int, lean: float = 0.0, grey: float = 0.0
) -> Space:
    r"""The ``waves`` coarsest cosines or wavelets of each side.

    ``lean`` > 0 makes fine parts longer before the ball cuts, so that noise reaches them less: :math:`w_f \propto (1+|f|^2)^{lean/2}`, and
    weights are scaled so that a picture whose parts fall off as :math:`1/|f|` keeps its length.
    """
    if kind not in KINDS:
        raise SettingError(f"space={kind!r}: {', '.join(KINDS)}")
    down, across = (one_side(kind, side, min(waves, side)) for side in shape[1:])
    square = (
        torch.arange(down.shape[1])[:, None].square() + torch.arange(across.shape[1]).square() + 1.0
    )
    weight = square.pow(lean / 2)
    usual = 1 / square
    return Space(
        down,
        across,
        weight / ((weight.square() * usual).sum() / usual.sum()).sqrt(),
        grey,
        opponents(shape[0]),
    )


def opponents(channels: int) -> Tensor:
    """Red, green and blue as brightness and two differences, which in pictures of the world go together little: orthonormal [3, 3].

    What is put back without correlations, and noise, would else come as colours of all kinds. Grey stays as it is, [1, 1].

    >>> torch.allclose(opponents(3) @ opponents(3).T, torch.eye(3), atol=1e-6)
    True
    """
    if channels == 1:
        return torch.ones(1, 1)
    return torch.nn.functional.normalize(
        torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]]), dim=1
    )


def one_side(kind: str, side: int, count: int) -> Tensor:
    """Orthonormal columns, the coarsest first: [side, count].

    >>> columns = one_side("wavelets", 12, 5)
    >>> torch.allclose(columns.T @ columns, torch.eye(5), atol=1e-6)
    True
    """
    if kind == "cosines":
        return cosines(side, count)
    columns = torch.eye(side, dtype=torch.float64)
    coarse = side
    taps = torch.tensor(FILTERS[kind], dtype=torch.float64)
    while (
        coarse % 2 == 0
    ):  # sums and differences of neighbours, then of the sums, for as long as they pair up; sides are rings
        low, high = torch.zeros(2, coarse, coarse // 2, dtype=torch.float64)
        for place in range(coarse // 2):
            for turn, tap in enumerate(taps):
                low[(2 * place + turn) % coarse, place] += tap
                high[(2 * place + turn) % coarse, place] += (-1) ** turn * taps[-1 - turn]
        columns[:, :coarse] = columns[:, :coarse] @ torch.cat([low, high], 1)
        coarse //= 2
    return columns[:, :count].float()
