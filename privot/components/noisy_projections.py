"""Every record's noisy point, once: what the sliced flow and the sliced generator ask in mode records, and its quantiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from privot.components.latent_space import Coded
from privot.components.transforms import Space
from privot.privacy.gate import Gate
from privot.runtime import Progress, Streams
from privot.transport.sliced import haar
from privot.transport.sorting import ordered

QUANTILES = 1000  # of noisy projections, kept of each direction


def encoded(
    image: Tensor, label: Tensor, space: Space | Coded, radius: float, hold: float, classes: int
) -> Tensor:
    """A record as a point in the ball, and its label as a corner of length ``hold`` beside it, if that is above 0: [dim (+ classes)]."""
    point = space.point(image)
    point = point / (point.norm() / radius).clamp(min=1)
    corner = hold * (label == torch.arange(classes if hold else 0, device=point.device)).to(
        point.dtype
    )
    return torch.cat([point, corner])


def corners(labels: Tensor, hold: float, classes: int) -> Tensor:
    """What stands beside the points of these labels: [count, classes], or [count, 0] where ``hold`` is 0.

    >>> corners(torch.tensor([1]), 0.5, 2)
    tensor([[0.0000, 0.5000]])
    """
    return hold * one_hot(labels, classes)[:, : classes if hold else 0]


def quantiles(values: Tensor, blocks: int) -> Tensor:
    """Columns [n, slices] sorted and averaged in ``blocks`` even runs, the last n mod blocks left out: [slices, blocks].

    >>> quantiles(torch.tensor([[3.0], [1.0], [2.0], [6.0]]), 2)
    tensor([[1.5000, 4.5000]])
    """
    order = ordered(values.mT.contiguous())
    run = order.shape[1] // blocks
    return order[:, : run * blocks].unflatten(1, (blocks, run)).mean(2)


@dataclass(frozen=True, kw_only=True)
class Noisy:
    """``frame`` [bases, dim, dim], the ascending quantiles of noisy projections along it, ``targets`` [bases, dim, quantiles], and the
    deviation of their noise along every direction.
    """

    frame: Tensor
    targets: Tensor
    noise_std: float

    def smoothed(self, points: Tensor, generator: torch.Generator) -> Tensor:
        """Points with as much noise as the records' have, so that clouds are compared that are smoothed alike. It buys no privacy."""
        return points + self.noise_std * torch.randn(
            points.shape, generator=generator, device=points.device
        )


def ask_points(
    gate: Gate,
    here: Space | Coded,
    *,
    radius: float,
    hold: float,
    bases: int,
    streams: Streams,
    progress: Progress,
) -> Noisy:
    """The question, and quantiles of the answer along a frame.

    A tight frame's noisy projections say neither more nor less than the noisy point, so that directions are free afterwards.
    """
    bound = math.hypot(radius, hold)
    progress("reading the records' points", 0, 1)
    rows = gate.rows("records", encoded, here, radius, hold, gate.spec.classes, bound=bound).float()
    progress("reading the records' points", 1, 1)
    dim = rows.shape[1]
    frame = (
        haar(dim, bases, streams.generator("frame")).float().to(rows.device).view(bases, dim, dim)
    )
    targets = torch.stack([quantiles(rows @ basis.T, min(len(rows), QUANTILES)) for basis in frame])
    noise = next(stage.noise for stage in gate.plan.stages if stage.name == "records")
    return Noisy(frame=frame, targets=targets, noise_std=2 * bound * noise)
