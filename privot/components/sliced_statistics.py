r"""Moments and sorted blocks of slices: what the sliced flow and the sliced generator ask for, and what is made of the answers.

Two Gaussian answers, which together are one. *moments*: per class the sums of z and z zᵀ. *blocks*: per class and direction theta of a
tight frame, the n projections sorted and added up in m runs of s = n // m neighbours. Moments say where a class lies and how it
spreads, with far less noise than slices do; slices say what no Gaussian has. All that is not a query is free.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from privot.components.dct import cosines
from privot.components.flow_snapshots import Strip
from privot.components.latent_space import Coded
from privot.components.transforms import Space
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.privacy.gate import Gate
from privot.privacy.plan import Stage
from privot.runtime import Progress, Streams
from privot.transport.sliced import haar, step
from privot.transport.sorting import monotone

TILT = 0.5  # of a part's length goes to the mean, the rest to second moments, which have more to say and more numbers to say it in
SHAPES = 8  # of quantile functions, as powers of Gaussian quantiles: place, spread, skew, ...; what is left counts as fine detail
CALM = 0.02  # the rate at which a flow ends


def counted(settings: Any, *keys: str) -> None:
    """Refuse settings that count something and are not 1 to 100,000."""
    for key in keys:
        if not 1 <= getattr(settings, key) <= 100_000:
            raise SettingError(
                f"{settings.name}.{key}={getattr(settings, key)}: 1 to 100,000 is needed"
            )


def moments(image: Tensor, label: Tensor, space: Space | Coded, radius: float) -> Tensor:
    """A record's part of the moments, of norm at most 1: its point and the upper half of its outer product: [dim + dim (dim + 1) / 2]."""
    point = space.point(image) / radius
    point = point / point.norm().clamp(min=1)
    row, column = torch.triu_indices(len(point), len(point), device=point.device)
    square = (
        point[row] * point[column] * torch.where(row == column, 1.0, math.sqrt(2))
    )  # as long as the whole product
    return torch.cat([TILT * point, math.sqrt(1 - TILT**2) * square])


def point(image: Tensor, label: Tensor, space: Space | Coded) -> Tensor:
    """A record in the space: [dim]. The gate cuts it to the radius."""
    return space.point(image)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """``means`` [classes, dim] and ``roots`` [classes, dim, dim] of a Gaussian start; ``frame`` [bases, dim, dim] and the ascending
    quantiles along it, ``targets`` [classes, bases, dim, blocks].
    """

    means: Tensor
    roots: Tensor
    frame: Tensor
    targets: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return asdict(self)

    def drawn(self, count: int, generator: torch.Generator) -> Tensor:
        """Points of the Gaussian start: [classes, count, dim]."""
        noise = torch.randn(len(self.means), count, self.means.shape[1], generator=generator).to(
            self.means
        )
        return self.means[:, None] + noise @ self.roots.mT


def stages(noise: float, share: float) -> tuple[Stage, Stage]:
    """The moments get ``share`` of mu², the blocks the rest: together one Gaussian answer of multiplier ``noise``."""
    return Stage("moments", "sum", noise / math.sqrt(share)), Stage(
        "blocks", "sorted_blocks", noise / math.sqrt(1 - share)
    )


def sized(spec: Spec, blocks: int) -> tuple[int, ...]:
    """The declared class sizes, or words that say what to declare."""
    if spec.class_sizes is None:
        raise SettingError(
            "blocks of order statistics need the number of records of each class, declared as public (--public-classes; --class-sizes "
            "100,120,... for privot plan; Spec(..., class_sizes=...)); mode=records needs the size alone"
        )
    if min(spec.class_sizes) < blocks:
        raise SettingError(
            f"blocks={blocks}: the smallest class has {min(spec.class_sizes)} records, and a block needs one at least"
        )
    return spec.class_sizes


def ask(
    gate: Gate,
    here: Space | Coded,
    *,
    bases: int,
    patch: int,
    blocks: int,
    radius: float,
    streams: Streams,
    progress: Progress,
) -> Asked:
    """Both questions, and the repair of their answers."""
    device = streams.runtime.target
    channels = gate.spec.shape[0]
    sizes = sized(gate.spec, blocks)
    dim = here.dim(channels)
    counts = torch.tensor(sizes, device=device)
    patch = patch if isinstance(here, Space) else 0  # the numbers of a code have no neighbours
    frame = tight_frame(here, channels, bases, patch, streams.generator("frame"))
    noise = {each.name: 2 * each.noise for each in gate.plan.stages}
    here = here.to(device)
    progress("asking for moments", 0, 2)
    answer = gate.sum("moments", moments, here, radius, bound=1.0, per_class=True)
    means, spreads = gaussians(answer / counts[:, None], noise["moments"] / counts, radius)
    progress("asking for sorted blocks", 1, 2)
    found = gate.sorted_blocks(
        "blocks", point, here, frame=frame.flatten(0, 1), blocks=blocks, radius=radius
    )
    progress("asking for sorted blocks", 2, 2)
    along = frame.to(device)
    widths = torch.einsum("bkd,cde,bke->cbk", along, spreads, along).clamp(min=0).sqrt()
    expected = torch.einsum("bkd,cd->cbk", along, means)[..., None] + widths[
        ..., None
    ] * normal_blocks(blocks).to(device)
    noise_std = noise["blocks"] * radius * math.sqrt(bases) / (counts // blocks)
    found = found.double().unflatten(1, (bases, dim))
    targets = torch.empty_like(found)
    kinds = 1 + bool(patch)
    for kind in range(min(kinds, bases)):  # local and global bases see shapes of another size
        seen = slice(kind, None, kinds)
        repair = repaired(found[:, seen].flatten(1, 2), expected[:, seen].flatten(1, 2), noise_std)
        targets[:, seen] = repair.unflatten(1, (-1, dim))
    values, vectors = torch.linalg.eigh(spreads)
    roots = vectors * values.clamp(min=0).sqrt()[:, None]
    return Asked(
        means=means.float(),
        roots=roots.float(),
        frame=frame.float().to(device),
        targets=targets.float(),
    )


def gaussians(averages: Tensor, noise_std: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    r"""Class averages of `moments`, noisy by ``noise_std`` [classes], to means [classes, dim] and covariances [classes, dim, dim].

    What classes have in common, and how each differs from it, is cleaned by its eigenvalues, see `spikes`. What these leave out of the
    common variance of a coordinate is put back, without its correlations: a class that varies too little teaches too little.
    """
    classes = len(averages)
    dim = math.isqrt(2 * averages.shape[1])
    dim = next(
        each
        for each in (dim - 2, dim - 1, dim)
        if each + each * (each + 1) // 2 == averages.shape[1]
    )
    means = averages[:, :dim] * (radius / TILT)
    half = averages[:, dim:] * (radius**2 / math.sqrt(1 - TILT**2))
    row, column = torch.triu_indices(dim, dim, device=averages.device)
    squares = averages.new_zeros(classes, dim, dim)
    squares[:, row, column] = half * torch.where(row == column, 0.5, math.sqrt(0.5))
    spreads = squares + squares.mT - means[:, :, None] * means[:, None]
    noise = (
        noise_std * radius**2 / math.sqrt(2 * (1 - TILT**2))
    ).square()  # of a number off the diagonal
    common = spreads.mean(0)
    of_common = noise.sum() / classes**2
    own = (noise * (1 - 2 / classes) + of_common).clamp(min=0)
    found = spikes(common, of_common.sqrt()) + spikes(spreads - common, own.sqrt())
    return means, found + torch.diag_embed(
        (common.diagonal() - found.diagonal(dim1=1, dim2=2)).clamp(min=0) * bool(noise.any())
    )


def spikes(matrix: Tensor, noise_std: Tensor) -> Tensor:
    r"""A symmetric matrix [..., d, d] without its noise: eigenvalues inside the noise's half circle :math:`2\sigma\sqrt d` are dropped.

    One outside was pushed out by the noise to :math:`\lambda+\sigma^2 d/\lambda`, and is put back.
    """
    values, vectors = torch.linalg.eigh(matrix)
    edge = 2 * noise_std[..., None] * math.sqrt(matrix.shape[-1])
    back = (values + values.sign() * (values.square() - edge.square()).clamp(min=0).sqrt()) / 2
    return (vectors * torch.where(values.abs() >= edge, back, 0.0)[..., None, :]) @ vectors.mT


def tight_frame(
    here: Space | Coded, channels: int, bases: int, patch: int, generator: torch.Generator
) -> Tensor:
    r"""``bases`` orthonormal bases of the space, in float64: [bases, dim, dim].

    Every second one, if ``patch`` > 0, is local: the point is seen as a small picture, cut into cells of patch x patch pixels (at a random
    place, as on a torus), and each cell gets a random basis of its own. Projections of few pixels are far from Gaussian, so they tell
    more than random directions of the whole space do; the frame stays tight, :math:`\Theta^T\Theta = bases \cdot I`.
    """
    made = haar(dim := here.dim(channels), bases, generator).view(bases, dim, dim)
    if not patch or isinstance(here, Coded):
        return made
    high, wide = here.weight.shape
    places = torch.arange(dim).view(channels, high, wide)
    left, _, right = torch.linalg.svd(
        here.small().double().cpu()
    )  # the frame is drawn on the CPU, wherever points are made
    small = torch.block_diag(*[left @ right] * channels)  # orthonormal to the last digit
    for which in range(1, bases, 2):
        shift = torch.randint(max(high, wide), (2,), generator=generator).tolist()
        rolled = places.roll(shift, (1, 2))
        basis = torch.zeros(dim, dim, dtype=torch.float64)
        for top in range(0, high, patch):
            for side in range(0, wide, patch):
                cell = rolled[:, top : top + patch, side : side + patch].flatten()
                basis[cell[:, None], cell] = haar(len(cell), 1, generator)
        made[which] = basis @ small
    return made


def repaired(blocks: Tensor, expected: Tensor, noise_std: Tensor) -> Tensor:
    r"""Noisy block means [classes, slices, m] with noise [classes], beside what the moments make expect, to ascending quantiles.

    Differences are written in orthonormal shapes of quantile functions (place, spread, skew, ...). What all classes have in common in
    a shape, and how each differs from it, is shrunk by :math:`1-\sigma^2/e`, e its mean energy over slices. Then rows are made to ascend.
    """
    classes = len(blocks)
    noise = noise_std.square()[:, None]
    shapes = quantile_shapes(blocks.shape[2]).to(blocks)
    parts = (blocks - expected) @ shapes
    common = parts.mean(0)
    own = parts - common
    of_common = noise.sum() / classes**2

    def shrink(parts: Tensor, noise: Tensor) -> Tensor:
        energy = parts.square().mean(-2, keepdim=True)
        return parts * ((energy - noise[..., None]) / energy.clamp(min=1e-30)).clamp(0, 1)

    cleaned = shrink(common, of_common[None]) + shrink(
        own, (noise * (1 - 2 / classes) + of_common).clamp(min=0)
    )
    return monotone(expected + cleaned @ shapes.T)


def quantile_shapes(blocks: int) -> Tensor:
    """Orthonormal [blocks, blocks]: powers of Gaussian quantiles first, then what is left, in cosines.

    >>> shapes = quantile_shapes(20)
    >>> torch.allclose(shapes.T @ shapes, torch.eye(20, dtype=shapes.dtype), atol=1e-9)
    True
    """
    quantile = torch.special.ndtri((torch.arange(blocks, dtype=torch.float64) + 0.5) / blocks)
    powers = quantile[:, None] ** torch.arange(min(SHAPES, blocks))
    return torch.linalg.qr(
        torch.cat([powers / powers.norm(dim=0), cosines(blocks, blocks).double()], 1)
    ).Q


def normal_blocks(blocks: int) -> Tensor:
    """Means of a standard Gaussian over equal parts of its mass: [blocks], in float64.

    >>> normal_blocks(2).round(decimals=3).tolist()
    [-0.798, 0.798]
    """
    density = torch.exp(
        -torch.special.ndtri(torch.arange(blocks + 1, dtype=torch.float64) / blocks).square() / 2
    ) / math.sqrt(2 * math.pi)
    return blocks * (density[:-1] - density[1:])


def flow(
    points: Tensor,
    made: Asked,
    *,
    steps: int,
    rate: float,
    wiener: float,
    strip: Strip,
    streams: Streams,
    progress: Progress,
) -> Tensor:
    """Points [classes, n, dim] moved until their quantiles along all bases are the targets: one basis a step, ever more gently.

    ``wiener`` adds the noise of the paper's SDE, sqrt(2 pace wiener) a step; it buys no privacy. The strip sees one point a class.
    """
    noise = streams.generator("wiener", points.device)
    strip.see(0, points[:, 0])
    for turn, (basis, pace) in enumerate(schedule(len(made.frame), steps, rate, streams)):
        points = step(points, made.frame[basis], made.targets[:, basis], pace)
        if wiener:
            points = points + math.sqrt(2 * pace * wiener) * torch.randn(
                points.shape, generator=noise, device=points.device
            )
        strip.see(turn + 1, points[:, 0])
        if turn % 10 == 9 or turn + 1 == steps:
            progress("moving the particles", turn + 1, steps)
    return points


def schedule(bases: int, steps: int, rate: float, streams: Streams) -> list[tuple[Any, float]]:
    """Of each step a basis, each equally often, and a pace: ``rate`` for a third, then falling: what bases disagree on averages out."""
    turns = streams.generator("turns")
    calm = steps // 3
    order = torch.cat(
        [torch.randperm(bases, generator=turns) for _ in range(-(-steps // bases))]
    ).tolist()
    return [
        (
            basis,
            rate
            if turn < calm
            else CALM + max(rate - CALM, 0) * (1 - (turn - calm) / (steps - calm)) ** 2,
        )
        for turn, basis in enumerate(order[:steps])
    ]
