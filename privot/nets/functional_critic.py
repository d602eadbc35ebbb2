"""Critics and throw-away generators as plain functions of one flat vector of weights, so that a thousand of them can lie side by side.

Every function is of one network; ``torch.func.vmap`` makes it one of many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import interpolate, leaky_relu, normalize

from privot.nets.vmap_conv import TRITON, convolve

STILL = 1e-12  # under a root, so that its slope at zero is finite


def _pieces(flat: Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {
        name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def _drawn(count: int, shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> Tensor:
    """Uniform, by the number of inputs of each layer, PyTorch's usual law; biases start at 0: [count, numbers]."""
    reach = [
        math.sqrt(1 / math.prod(shape[1:])) if len(shape) > 1 else 0.0 for shape in shapes.values()
    ]
    scale = torch.cat(
        [
            torch.full((math.prod(shape),), each)
            for each, shape in zip(reach, shapes.values(), strict=True)
        ]
    )
    return (2 * torch.rand(count, len(scale), generator=generator) - 1) * scale


@dataclass(frozen=True)
class Critic:
    """An image and its label to one score: 5x5 convolutions of stride 2, then a dense part plus a projection on the label.

    Convolutions are divided by their largest singular value (spectral norm), found by power iteration: ``along`` holds its left vectors.
    The dense part and the projection start at 0 and are free: a critic that is new has no slope, and the first it gets is toward the data.

    >>> critic = Critic((1, 28, 28), classes=10, width=8)
    >>> weights, along = critic.begin(3, torch.Generator().manual_seed(0))
    >>> images, labels = torch.rand(3, 2, 1, 28, 28), torch.zeros(3, 2, dtype=torch.int64)
    >>> torch.func.vmap(critic.score)(weights, along, images, labels).shape
    torch.Size([3, 2])
    """

    shape: tuple[int, int, int]
    classes: int
    width: int = 64

    @property
    def sides(self) -> list[tuple[int, int]]:
        """Of the image and of the maps after each convolution; no side falls under 3 unless the image's does."""
        count = max(1, int(math.log2(min(self.shape[1:]) / 3.5))) if min(self.shape[1:]) > 3 else 1
        halved = accumulate(
            range(count),
            lambda side, _: ((side[0] + 1) // 2, (side[1] + 1) // 2),
            initial=self.shape[1:],
        )
        return [(height, width) for height, width in halved]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        channels = [self.shape[0], *(self.width * 2**each for each in range(len(self.sides) - 1))]
        found: dict[str, tuple[int, ...]] = {}
        for place, (old, new) in enumerate(pairwise(channels)):
            found |= {f"conv{place}": (new, old, 5, 5), f"bias{place}": (new,)}
        numbers = channels[-1] * math.prod(self.sides[-1])
        return {**found, "dense": (1, numbers), "level": (1,), "label": (self.classes, numbers)}

    @property
    def work(self) -> int:
        """Floating-point operations of one image's way."""
        convs = [math.prod(shape) for name, shape in self.shapes.items() if name.startswith("conv")]
        return sum(
            2 * size * math.prod(side) for size, side in zip(convs, self.sides[1:], strict=True)
        )

    def begin(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Weights [count, numbers] and the vectors of their norms [count, rows], both random."""
        weights = _drawn(count, self.shapes, generator)
        weights[
            :,
            sum(
                math.prod(self.shapes[name])
                for name in self.shapes
                if name.startswith(("conv", "bias"))
            ) :,
        ] = 0
        return weights, torch.randn(
            count, sum(shape[0] for shape in self._matrices().values()), generator=generator
        )

    def _matrices(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self.shapes.items() if name.startswith("conv")}

    def turned(self, weights: Tensor, along: Tensor) -> Tensor:
        """One step of power iteration on every convolution."""
        parts = _pieces(weights, self.shapes)
        lefts = along.split([shape[0] for shape in self._matrices().values()])
        found = []
        for name, left in zip(self._matrices(), lefts, strict=True):
            matrix = parts[name].flatten(1)
            found.append(normalize(matrix @ normalize(matrix.T @ left, dim=0), dim=0))
        return torch.cat(found)

    def score(self, weights: Tensor, along: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        """[batch] of images [batch, ...] in [0, 1]."""
        return self._judge(self._normed(weights, along), images, labels)

    def _normed(self, weights: Tensor, along: Tensor) -> dict[str, Tensor]:
        """The parts, with convolutions of norm 1."""
        parts = _pieces(weights, self.shapes)
        lefts = along.split([shape[0] for shape in self._matrices().values()])
        for name, left in zip(self._matrices(), lefts, strict=True):
            matrix = parts[name].flatten(1)
            right = normalize(matrix.detach().T @ left, dim=0)
            parts[name] = parts[name] / (normalize(left, dim=0) @ matrix @ right + STILL)
        return parts

    def _judge(self, parts: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        x = 2 * images - 1
        for place in range(len(self.sides) - 1):
            x = leaky_relu(convolve(x, parts[f"conv{place}"], parts[f"bias{place}"], 2, 2), 0.1)
        x = x.flatten(1)
        return x @ parts["dense"][0] + parts["level"] + (x * parts["label"][labels]).sum(1)

    def loss(
        self,
        weights: Tensor,
        along: Tensor,
        real: Tensor,
        fake: Tensor,
        labels: Tensor,
        mix: Tensor,
    ) -> Tensor:
        r"""WGAN-GP: :math:`E D(fake) - E D(real) + 10 E(|\nabla D(mid)| - 1)^2 + 0.001 E D(real)^2`, all of the same labels.

        ``mid`` lies between real and fake images, by ``mix`` [batch].
        """
        parts = self._normed(
            weights, along
        )  # once for both ways: it passes over all weights many times
        scores = self._judge(parts, torch.cat([real, fake]), labels.repeat(2))
        mid = torch.lerp(fake, real, mix.view(-1, 1, 1, 1))
        slope = grad(lambda x: self._judge(parts, x, labels).sum())(mid)
        steep = (slope.flatten(1).square().sum(1) + STILL).sqrt()
        gap = scores[len(labels) :].mean() - scores[: len(labels)].mean()
        return (
            gap + 10 * (steep - 1).square().mean() + 0.001 * scores[: len(labels)].square().mean()
        )


@dataclass(frozen=True)
class Sketch:
    """A small generator, to be thrown away: a dense layer to a plane, then two rounds of (upsample, 3x3 convolution).

    >>> sketch = Sketch((1, 28, 28), classes=10)
    >>> weights = sketch.begin(1, torch.Generator().manual_seed(0))[0]
    >>> sketch.draw(weights, torch.zeros(2, sketch.code), torch.tensor([3, 7])).shape
    torch.Size([2, 1, 28, 28])
    """

    shape: tuple[int, int, int]
    classes: int
    code: int = 16
    width: int = 16

    @property
    def plane(self) -> tuple[int, int, int]:
        return 2 * self.width, math.ceil(self.shape[1] / 4), math.ceil(self.shape[2] / 4)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "dense": (math.prod(self.plane), self.code + self.classes),
            "level": (math.prod(self.plane),),
            "conv0": (self.width, 2 * self.width, 3, 3),
            "bias0": (self.width,),
            "conv1": (self.shape[0], self.width, 3, 3),
            "bias1": (self.shape[0],),
        }

    def begin(self, count: int, generator: torch.Generator) -> Tensor:
        return _drawn(count, self.shapes, generator)

    def draw(self, weights: Tensor, codes: Tensor, labels: Tensor) -> Tensor:
        """Images in [0, 1], [batch, ...]."""
        parts = _pieces(weights, self.shapes)
        known = torch.eye(self.classes, dtype=codes.dtype, device=codes.device)[labels]
        x = torch.cat([codes, known], 1) @ parts["dense"].T + parts["level"]
        x = interpolate(leaky_relu(x, 0.1).view(-1, *self.plane), scale_factor=2)
        x = interpolate(
            leaky_relu(convolve(x, parts["conv0"], parts["bias0"], padding=1), 0.1), scale_factor=2
        )
        return convolve(x, parts["conv1"], parts["bias1"], padding=1)[
            :, :, : self.shape[1], : self.shape[2]
        ].sigmoid()


def adam(
    weights: Tensor, slope: Tensor, mean: Tensor, square: Tensor, step: Tensor, rate: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One step with betas 0.5 and 0.9, as WGAN-GP has it; ``step`` counts from 1."""
    if TRITON and weights.is_cuda and weights.dtype == torch.float32:
        from privot.nets.kernels.adam import Adam

        return Adam.apply(weights, slope, mean, square, 1 - 0.5**step, 1 - 0.9**step, rate)
    mean = torch.lerp(slope, mean, 0.5)
    square = torch.lerp(slope.square(), square, 0.9)
    away = (mean / (1 - 0.5**step)) / ((square / (1 - 0.9**step)).sqrt() + 1e-8)
    return weights - rate * away, mean, square
