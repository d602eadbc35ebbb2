"""A generator of records: a few numbers, categories, or both; points in the plane are such records too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class RecordGenerator(nn.Module):
    """Code and label to a record of ``shape``, whose numbers lie in its ``columns`` from left to right.

    ``columns`` are runs: [count, low, high] for numbers of this range, [categories] for one category. `points` gives a category as the
    probabilities of its values, which can be differentiated; `forward` draws it from them, by the last part of the code, and gives its
    number. Codes are standard Gaussian, [batch, code].

    >>> net = RecordGenerator((1, 1, 3), classes=1, columns=[[2, -1.0, 1.0], [5]])
    >>> codes, labels = torch.zeros(4, net.code), torch.zeros(4, dtype=torch.int64)
    >>> net.points(codes, labels).shape, net(codes, labels).shape
    (torch.Size([4, 7]), torch.Size([4, 1, 1, 3]))
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        columns: Sequence[Sequence[float]],
        code: int = 8,
        hidden: int = 128,
        layers: int = 3,
    ):
        super().__init__()
        self.shape = (shape[0], shape[1], shape[2])
        self.classes = classes
        self.columns = [tuple(each) for each in columns]
        self.sizes = [int(each[0]) for each in columns]
        self.chance = sum(int(each[0]) for each in columns if len(each) == 1)
        self.latent = code
        self.code = code + self.chance
        widths = [code + (classes if classes > 1 else 0), *[hidden] * (layers - 1), sum(self.sizes)]
        made: list[nn.Module] = []
        for old, new in pairwise(widths):
            made += [nn.Linear(old, new), nn.SiLU()]
        self.layers = nn.Sequential(*made[:-1])

    def points(self, codes: Tensor, labels: Tensor) -> Tensor:
        """[batch, code] and [batch] to [batch, dim]."""
        return torch.cat([each for each, _ in self._parts(codes, labels)], 1)

    def forward(self, codes: Tensor, labels: Tensor) -> Tensor:
        found = []
        chances = codes[:, self.latent :]
        for point, size in self._parts(codes, labels):
            if size:
                # the largest of logarithms with Gumbel noise is a draw from the probabilities
                even = torch.special.ndtr(chances[:, :size].double())
                chances = chances[:, size:]
                gumbel = -(-even.clamp(1e-300, 1 - 1e-16).log()).log()
                found.append(
                    (point.double().clamp(min=1e-300).log() + gumbel)
                    .argmax(1, keepdim=True)
                    .to(point)
                )
            else:
                found.append(point)
        return torch.cat(found, 1).view(-1, *self.shape)

    def _parts(self, codes: Tensor, labels: Tensor) -> list[tuple[Tensor, int]]:
        """Each run of columns, and of how many categories it is the probabilities (0: numbers)."""
        latent = codes[:, : self.latent]
        if self.classes > 1:
            latent = torch.cat([latent, nn.functional.one_hot(labels, self.classes).to(codes)], 1)
        runs = zip(self.layers(latent).split(self.sizes, 1), self.columns, strict=True)
        return [
            (raw.softmax(1), int(each[0])) if len(each) == 1 else (within(raw, *each[1:]), 0)
            for raw, each in runs
        ]


def within(raw: Tensor, low: float, high: float) -> Tensor:
    """Any number to one in [low, high]."""
    return low + (high - low) * raw.sigmoid()
