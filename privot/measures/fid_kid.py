r"""Distances between two sets of features: Fréchet (FID) and kernel (KID), through torchmetrics.

.. math:: FID = \|m_1-m_2\|^2 + tr(S_1+S_2-2(S_1S_2)^{1/2})
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from privot.errors import SettingError

HALVES = 5  # random half samples, from which error and bias are read


class Frechet(NamedTuple):
    """``value``, its standard ``error`` over samples, and the ``bias`` by which so few samples raise it (already in the value)."""

    value: float
    error: float
    bias: float


class _Features(nn.Module):
    """Passes features on: torchmetrics takes them where it expects a network."""

    def __init__(self, count: int):
        super().__init__()
        self.num_features = count

    def forward(self, features: Tensor) -> Tensor:
        return features


def frechet(real: Tensor, fake: Tensor, generator: torch.Generator) -> Frechet:
    """FID of features real [n, d] and fake [m, d].

    The value is torchmetrics'. Random half samples of the fake set spread as the value itself would over fresh samples
    (:math:`1/(m/2)-1/m=1/m`), and lie above it by as much as the value lies above that of an endless sample, since the bias goes as 1/m.
    With fewer samples than features it goes slower, and a small real set adds its own: ``bias`` is then too low.

    >>> points = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    >>> round(frechet(points, points + 1, torch.Generator()).value, 3)
    3.0
    """
    if min(len(real), len(fake)) < 2:
        raise SettingError("FID: at least two images on each side are needed")
    metric = (
        torchmetrics("fid")
        .FrechetInceptionDistance(feature=_Features(real.shape[1]))
        .to(real.device)
        .set_dtype(torch.float64)
    )
    for features, is_real in ((real, True), (fake, False)):
        for part in features.split(10_000):
            metric.update(part.double(), real=is_real)
    value = float(metric.compute())
    middle, spread = _moments(real)
    root = _root(spread)
    halves = []
    for _ in range(HALVES):
        chosen = torch.randperm(len(fake), generator=generator)[: max(2, len(fake) // 2)].to(
            fake.device
        )
        halves.append(_from_moments(middle, spread, root, *_moments(fake[chosen])))
    spreads = torch.tensor(halves, dtype=torch.float64)
    return Frechet(value, spreads.std().item(), spreads.mean().item() - value)


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    features = features.double()
    middle = features.mean(0)
    return middle, (features - middle).T @ (features - middle) / (len(features) - 1)


def _root(spread: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(spread)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def _from_moments(
    middle: Tensor, spread: Tensor, root: Tensor, other: Tensor, other_spread: Tensor
) -> float:
    cross = torch.linalg.eigvalsh(root @ other_spread @ root).clamp(min=0).sqrt().sum()
    return float(
        (middle - other).square().sum() + spread.trace() + other_spread.trace() - 2 * cross
    )


def kernel(
    real: Tensor, fake: Tensor, generator: torch.Generator, subsets: int = 100, size: int = 1000
) -> tuple[float, float]:
    """KID (unbiased squared MMD, cubic kernel) of features [n, d] and [m, d], by torchmetrics' kernel: value and standard error.

    The mean over ``subsets`` random subsets of ``size``, at most half of the smaller set. Subsets of s out of m spread as
    :math:`1/s-1/m`, fresh samples as 1/m: from the one the other is read, and the chance in the subsets is added (NaN under 3 samples, of
    which no half can be taken).
    """
    kid = torchmetrics("kid")
    least = min(len(real), len(fake))
    size = max(2, min(size, least // 2))
    found = []
    for _ in range(subsets):
        left, right = (
            each[torch.randperm(len(each), generator=generator)[:size].to(each.device)]
            for each in (real, fake)
        )
        found.append(float(kid.poly_mmd(left.double(), right.double())))
    values = torch.tensor(found, dtype=torch.float64)
    return values.mean().item(), values.std().item() * (
        1 / (least / size - 1) + 1 / subsets
    ) ** 0.5 if least > size else math.nan


def torchmetrics(name: str) -> Any:
    """A part of that optional package."""
    from importlib import import_module

    try:
        return import_module(f"torchmetrics.image.{name}")
    except ImportError:
        raise SettingError("FID and KID need an extra: pip install 'privot[measures]'") from None
