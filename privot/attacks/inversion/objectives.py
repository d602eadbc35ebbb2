r"""How far a guessed gradient g' is from the observed g: what an attack makes small. Each is of one victim, {name: [...]} both.

WDLG (Wang et al. 2023) is the Kantorovich-Rubinstein dual  sup_{|f|_L <= 1} f(g') - f(g). A client sends one gradient, so both measures
are single points, the best critic is linear, f(z) = <z, (g' - g) / |g' - g|>, and the dual is  |g' - g|_2  exactly: `norm`. Readings that
take entries or rows for the points lose their positions, or keep them in part; see ``keeps`` and docs/inversion.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
TINY = 1e-14  # under roots: a norm has no slope at 0
SLICES = 256  # projections of `sliced`
# of `index_value`: how many spreads of the values two neighbours are apart, and angles of its slices
NEAR = 1.0
ANGLES = 8


def flat(tensors: Tensors) -> Tensor:
    """All entries in one vector."""
    return torch.cat([each.flatten() for each in tensors.values()])


def squared(found: Tensors, seen: Tensors) -> Tensor:
    """DLG: |g' - g|².

    >>> squared({"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])})
    tensor(25.)
    """
    return torch.stack([(found[name] - seen[name]).square().sum() for name in seen]).sum()


def norm(found: Tensors, seen: Tensors) -> Tensor:
    """WDLG as it reads: |g' - g|.

    >>> norm({"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])})
    tensor(5.)
    """
    return (squared(found, seen) + TINY).sqrt()


def by_layer(found: Tensors, seen: Tensors) -> Tensor:
    """A critic for each tensor: the sum of |g'_t - g_t|."""
    return torch.stack(
        [((found[name] - seen[name]).square().sum() + TINY).sqrt() for name in seen]
    ).sum()


def absolute(found: Tensors, seen: Tensors) -> Tensor:
    """A linear critic with clipped weights: the sum of |g'_i - g_i|."""
    return torch.stack(
        [((found[name] - seen[name]).square() + TINY).sqrt().sum() for name in seen]
    ).sum()


def cosine(found: Tensors, seen: Tensors) -> Tensor:
    """Inverting Gradients (Geiping et al. 2020): 1 - cos(g', g), which knows no scale, so clipping changes nothing.

    >>> cosine({"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])})
    tensor(1.)
    """
    one = flat(found)
    two = flat(seen)
    return 1 - one @ two / ((one @ one + TINY).sqrt() * (two @ two + TINY).sqrt())


def ordered(found: Tensors, seen: Tensors) -> Tensor:
    """Points are the entries of a tensor without their index: W_2² between sorted values, summed over tensors.

    Blind to any permutation within a tensor, hence to where a pixel is:

    >>> ordered({"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 3.0])})
    tensor(0.)
    """
    gaps = [
        (found[name].flatten().sort().values - seen[name].flatten().sort().values).square().sum()
        for name in seen
    ]
    return torch.stack(gaps).sum()


def sliced(found: Tensors, seen: Tensors) -> Tensor:
    """Points are the rows (filters) of a tensor: W_2² along `SLICES` fixed directions, a mean; blind to a permutation of the filters."""
    gaps = []
    for name in seen:
        one, two = (
            each[name].flatten(1) if each[name].ndim > 1 else each[name][:, None]
            for each in (found, seen)
        )
        along = _directions(one.shape[1], one)
        gaps.append(
            ((one @ along).sort(0).values - (two @ along).sort(0).values).square().sum()
            * (one.shape[1] / SLICES)
        )
    return torch.stack(gaps).sum()


def index_value(found: Tensors, seen: Tensors, near: float = NEAR) -> Tensor:
    r"""Points are (near * spread * index, value) of a tensor's entries in the plane: sliced W_2² over `ANGLES` angles, summed over tensors.

    One knob between two worlds: with a large ``near`` every entry is paired with itself and this is `squared`, with 0 it is `ordered`.

    >>> one, two = {"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 3.0])}
    >>> [round(float(index_value(one, two, near)), 3) for near in (0.0, 1e6)]
    [0.0, 8.0]
    """
    angles = (torch.arange(ANGLES) + 0.5) * (math.pi / ANGLES)
    gaps = []
    for name in seen:
        one = found[name].flatten()
        two = seen[name].flatten()
        across = angles.cos().to(one)
        up = angles.sin().to(one)
        spread = two.std(correction=0).detach()
        place = near * spread * torch.arange(len(one), dtype=one.dtype, device=one.device)
        rows = [
            (across[:, None] * place + up[:, None] * each).sort(1).indices
            for each in (one.detach(), two)
        ]
        where = [
            place[each] for each in rows
        ]  # values and places apart: their sum would lose digits far from the first index
        gap = across[:, None] * (where[0] - where[1]) + up[:, None] * (one[rows[0]] - two[rows[1]])
        gaps.append(2 * gap.square().sum(1).mean())  # twice, as the mean of sin² is a half
    return torch.stack(gaps).sum()


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute step between neighbouring pixels [..., h, w], down plus across.

    >>> total_variation(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    tensor(1.)
    """
    return images.diff(dim=-2).abs().mean() + images.diff(dim=-1).abs().mean()


def _directions(size: int, like: Tensor) -> Tensor:
    """Fixed directions [size, SLICES] of about unit length, the same for every victim; made of cosines, as no chance may enter a vmap."""
    row = torch.arange(1, size + 1, dtype=torch.float64)
    column = torch.arange(1, SLICES + 1, dtype=torch.float64)
    mixed = (
        torch.frac(torch.outer(row * math.sqrt(2), column * math.sqrt(3)) * 43.758) - 0.5
    )  # uniform enough on [-0.5, 0.5]
    return (mixed / mixed.norm(dim=0)).to(like)


class Objective(NamedTuple):
    """``keeps`` says what of the positions in the gradient it compares: all, some or none; with none it cannot reconstruct.

    ``residual`` is the observable by which iterates are compared and an attack stops, once under ``enough``. Where it is ``learned``, a
    critic (`privot.attacks.inversion.learned_distance`) stands for the distance.
    """

    title: str
    distance: Callable[[Tensors, Tensors], Tensor]
    keeps: str
    residual: Callable[[Tensors, Tensors], Tensor] = squared
    enough: float = 1e-6  # of the published code
    learned: bool = False


OBJECTIVES = {
    "squared": Objective("squared distance (DLG)", squared, "all"),
    "norm": Objective("W1 between two single points, the norm (WDLG)", norm, "all"),
    "by-layer": Objective("W1 with a critic a tensor", by_layer, "all"),
    "absolute": Objective("W1 with a linear critic of clipped weights", absolute, "all"),
    "cosine": Objective("cosine", cosine, "all", cosine, 1e-9),
    "index-value": Objective("sliced W2 over (index, value)", index_value, "some"),
    "sliced": Objective("sliced W2 over filters", sliced, "some", sliced),
    "sorted": Objective("W2 over entries without index", ordered, "none", ordered),
    "critic": Objective("learned critic over filters (WGAN-GP)", norm, "none", learned=True),
}
