r"""The sliced-Wasserstein flow: particles pushed, direction by direction, onto the noisy quantiles of the data.

**Released** mode blocks (ours): per class its moments and, per direction, sums of sorted runs of projections, once. Mode records
(DPSWflow): every record's point, once. Mode resampled (DPSWflow-r): at each step, how far a fresh draw's quantiles are from the particles'.
**Bound** blocks: parts of norm 1 for the moments, 2 radius sqrt(bases) for the blocks, by telescoping and a tight frame; records: one
row changes, 2 bound; resampled: the answer is clipped as a whole, 2 bound. The gate cuts every point, part and answer itself.
**Cost** blocks: two full-batch Gaussian answers, together one; records: one; resampled: an event a step, on a fixed-size draw.
**Departs** from the paper: noise is drawn once where one release is counted, and batches afresh where sampling is counted; fixed
transforms in place of an auto-encoder that saw private data; no failure probability; in mode blocks, sorting before the noise.
**Notation** z = point of a record, Theta a tight frame of ``bases`` orthonormal bases, m blocks of s = n // m order statistics each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.families.slices import TILT, Asked, Sliced, counted, flow, schedule, sized, stages
from privot.families.spaces import Space
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Fixed
from privot.product import Product
from privot.runtime import Progress, Streams
from privot.transport.sliced import assigned, haar, pushed
from privot.transport.sorting import ordered

MODES = ("blocks", "records", "resampled")
QUANTILES = 1000  # of noisy projections, kept of each direction in mode records
START = 0.3  # of the radius: how far particles start from the grey, in modes records and resampled


def encoded(image: Tensor, label: Tensor, space: Space, radius: float, hold: float, classes: int) -> Tensor:
    """A record as a point in the ball, and its label as a corner of length ``hold`` beside it, if that is above 0: [dim (+ classes)]."""
    point = space.point(image)
    point = point / (point.norm() / radius).clamp(min=1)
    corner = hold * (label == torch.arange(classes if hold else 0, device=point.device)).to(point.dtype)
    return torch.cat([point, corner])


def gaps(records: Any, space: Space, radius: float, hold: float, classes: int, frame: Tensor, known: Tensor) -> Tensor:
    """Of a whole draw: its quantiles along the frame, less the particles' ``known`` [slices, blocks]: [slices, blocks]."""
    each = torch.func.vmap(encoded, in_dims=(0, 0, None, None, None, None))
    points = each(records.images, records.labels, space, radius, hold, classes)
    return quantiles(points @ frame.T, known.shape[1]) - known


def quantiles(values: Tensor, blocks: int) -> Tensor:
    """Columns [n, slices] sorted and averaged in ``blocks`` even runs, the last n mod blocks left out: [slices, blocks].

    >>> quantiles(torch.tensor([[3.0], [1.0], [2.0], [6.0]]), 2)
    tensor([[1.5000, 4.5000]])
    """
    order = ordered(values.mT.contiguous())
    run = order.shape[1] // blocks
    return order[:, : run * blocks].unflatten(1, (blocks, run)).mean(2)


@dataclass(frozen=True, kw_only=True)
class SlicedFlow(Sliced):
    """Settings of the sliced flow. ``noise`` fixes the multiplier; without it the budget does.

    >>> spec = Spec((1, 28, 28), 10, 60_000, (6000,) * 10)
    >>> SlicedFlow(noise=3.7306).plan(spec).cost().epsilon(1e-5).__round__(3)
    1.0
    """

    name: ClassVar[str] = "sliced-flow"
    title: ClassVar[str] = "Sliced-Wasserstein flow: particles moved onto noisy quantiles (DPSWflow, and sorted blocks)"
    promise: ClassVar[str] = "(epsilon, delta), all answers together one Gaussian; resampled: an event a step"
    citation: ClassVar[str] = """@article{sebag2025dpswflow,
  title   = {Differentially Private Gradient Flow based on the Sliced Wasserstein Distance},
  author  = {Sebag, I. and Pydi, M. S. and Franceschi, J.-Y. and Rakotomamonjy, A. and Gartrell, M. and Atif, J. and Allauzen, A.},
  journal = {Transactions on Machine Learning Research},
  year    = {2025}
}"""

    # Settings that may change when a crashed run goes on: nothing asked so far depends on them.
    free: ClassVar[tuple[str, ...]] = ("keep",)

    mode: str = "blocks"  # or "records", "resampled"
    neighbours: str = "replace"  # or "local", where every record is released by itself
    labelled: bool = True  # False, as in the paper, in modes records and resampled: labels are then given out in turn and mean nothing
    per_class: int = 1000  # images; others can be had later at no cost
    steps: int = 200  # of the flow; in mode resampled, answers
    rate: float = 0.5
    wiener: float = 0.0  # of the paper's SDE: noise that smooths and buys nothing
    hold: float = 0.5  # length of a label beside the radius, in modes records and resampled
    drawn: int = 250  # records of a draw, in mode resampled
    clip: float = 0.5  # length of an answer beside the radius, in mode resampled
    keep: bool = True  # the quantiles, in the release, so that sets of other sizes can be made of them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise SettingError(f"sliced-flow.mode={self.mode!r}: {', '.join(MODES)}")
        if self.neighbours not in ("replace", "local") or (self.neighbours == "local" and self.mode != "records"):
            raise SettingError(f"sliced-flow.neighbours={self.neighbours!r}: replace, or local with mode=records")
        if not self.labelled and self.mode == "blocks":
            raise SettingError("sliced-flow.labelled=False: blocks are of classes; for data without labels declare one class")
        counted(self, "per_class", "steps", "drawn")
        if self.mode == "resampled" and self.blocks > self.drawn:
            raise SettingError(f"sliced-flow.blocks={self.blocks}: at most as many as records of a draw, {self.drawn}")
        if not (0 < self.rate <= 1 and 0 <= self.wiener <= 100 and 0 < self.hold <= 10 and 0 < self.clip <= 10):
            raise SettingError("sliced-flow: 0 < rate <= 1, 0 <= wiener <= 100, 0 < hold <= 10 and 0 < clip <= 10 are needed")

    def plan(self, spec: Spec) -> Plan:
        noise, relation = 1.0 if self.noise is None else self.noise, Neighbours(self.neighbours)
        if self.mode == "blocks":
            sized(spec, self.blocks)
            return Plan(stages(noise, self.share), relation)
        if spec.size is None:
            raise SettingError(f"sliced-flow: mode={self.mode} needs the number of records, declared as public (--public-size)")
        if self.mode == "records":
            return Plan((Stage("records", "rows", noise),), relation)
        return Plan((Stage("gaps", "answer", noise, self.steps, Fixed(self.drawn, spec.size)),), relation)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        dim, images, noise = self._dim(spec), self.per_class * spec.classes, 2 * plan.stages[0].noise
        records = min(spec.class_sizes) if spec.class_sizes else (spec.size or 0) / spec.classes
        # A class's mean has .6 of the radius, seen on MNIST; noise on it is taken over all directions of the space.
        spread = math.sqrt(dim) / (TILT * records if self.mode == "blocks" else math.sqrt(max(records, 1)))
        ratio = 0.6 / (noise * spread) if noise and self.mode != "resampled" else None
        work = 4 * dim * dim * (self.steps * images + self.bases * (spec.size or 0))
        return {"images": images, "signal_to_noise_per_class": ratio, "floating_point_operations": work}

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        if self.mode == "blocks":
            return self._pictures(self.asked(gate, streams, progress), spec, streams, progress)
        points, labels = self._particles(spec, streams)
        move = self._onto_records if self.mode == "records" else self._onto_draws
        points = move(gate, points, streams, progress)
        return self._shown(points[:, : self._dim(spec)], labels, spec)

    def again(self, made: Product, spec: Spec, streams: Streams, progress: Progress) -> Product:
        """A set of ``per_class`` images from what an earlier run kept: no record is asked, so it costs nothing."""
        dim, classes, kept = self._dim(spec), spec.classes, made.kept
        shapes = {"means": (classes, dim), "roots": (classes, dim, dim), "frame": (self.bases, dim, dim)}
        shapes["targets"] = (classes, self.bases, dim, self.blocks)
        if {name: tuple(value.shape) for name, value in kept.items()} != shapes:
            raise ReleaseError("the release does not hold what a set of another size needs: was it made with keep=false?")
        known = {name: value.float().to(streams.runtime.target) for name, value in kept.items()}
        return self._pictures(Asked(**known), spec, streams, progress)

    # What is free

    def _dim(self, spec: Spec) -> int:
        return spec.shape[0] * min(self.waves, spec.shape[1]) * min(self.waves, spec.shape[2])

    def _pictures(self, made: Asked, spec: Spec, streams: Streams, progress: Progress) -> Product:
        """Of each class as many particles as asked for, from its Gaussian along the flow."""
        points, how = (
            made.drawn(self.per_class, streams.generator("start")),
            {"steps": self.steps, "rate": self.rate, "wiener": self.wiener},
        )
        points = flow(points, made, **how, streams=streams, progress=progress)  # type: ignore[arg-type]
        labels = torch.arange(spec.classes).repeat_interleave(self.per_class)
        return self._shown(points.flatten(0, 1), labels, spec, made.tensors() if self.keep else {})

    def _shown(self, points: Tensor, labels: Tensor, spec: Spec, kept: dict[str, Tensor] | None = None) -> Product:
        images = self.here(spec).to(points.device).image(points, spec.shape[0]).clamp(0, 1)
        return Product.set(images, labels, kept=kept)

    # The two mechanisms of the paper

    def _hold(self, spec: Spec) -> float:
        return self.hold * self.radius(spec) if self.labelled else 0.0

    def _particles(self, spec: Spec, streams: Streams) -> tuple[Tensor, Tensor]:
        """Particles around the grey, each with the corner of its label, and the labels: [count, dim (+ classes)], [count]."""
        labels = torch.arange(spec.classes).repeat_interleave(self.per_class)
        noise = torch.randn(len(labels), dim := self._dim(spec), generator=streams.generator("start"))
        points = START * self.radius(spec) / math.sqrt(dim) * noise
        corners = self._hold(spec) * one_hot(labels, spec.classes)[:, : spec.classes * self.labelled]
        return torch.cat([points, corners], 1).to(streams.runtime.target), labels

    def _stirred(self, moved: Tensor, before: Tensor, pace: float, spec: Spec, noise: torch.Generator) -> Tensor:
        """With the Wiener term; labels stay where they were."""
        if self.wiener:
            moved = moved + math.sqrt(2 * pace * self.wiener) * torch.randn(moved.shape, generator=noise, device=moved.device)
        return torch.cat([moved[:, : self._dim(spec)], before[:, self._dim(spec) :]], 1)

    def _onto_records(self, gate: Gate, points: Tensor, streams: Streams, progress: Progress) -> Tensor:
        """Every record's noisy point, once; then the flow between smoothed clouds: particles get as much noise as the records did.

        A tight frame's noisy projections say neither more nor less than the noisy point, so that directions are free afterwards.
        """
        spec, radius, hold, device, dim = gate.spec, self.radius(gate.spec), self._hold(gate.spec), points.device, points.shape[1]
        bound, fresh = math.hypot(radius, hold), streams.generator("smoothing", device)
        progress("reading the records' points", 0, 1)
        rows = gate.rows("records", encoded, self.here(spec).to(device), radius, hold, spec.classes, bound=bound).float()
        progress("reading the records' points", 1, 1)
        noise_std = 2 * bound * gate.plan.stages[0].noise
        frame = haar(dim, self.bases, streams.generator("frame")).float().to(device).view(self.bases, dim, dim)
        targets = torch.stack([quantiles(rows @ basis.T, min(len(rows), QUANTILES)) for basis in frame])
        for turn, (basis, pace) in enumerate(schedule(self.bases, self.steps, self.rate, streams)):
            smoothed = frame[basis] @ points.mT
            smoothed += noise_std * torch.randn(smoothed.shape, generator=fresh, device=device)
            moved = pushed(points, assigned(smoothed, targets[basis]).sub_(smoothed), frame[basis], pace)
            points = self._stirred(moved, points, pace, spec, fresh)
            if turn % 10 == 9 or turn + 1 == self.steps:
                progress("moving the particles", turn + 1, self.steps)
        return points

    def _onto_draws(self, gate: Gate, points: Tensor, streams: Streams, progress: Progress) -> Tensor:
        """At each step a fresh draw and a fresh basis; the clipped, noisy gaps between its quantiles and the particles' move these."""
        spec, radius, hold, device = gate.spec, self.radius(gate.spec), self._hold(gate.spec), points.device
        here, bound = self.here(spec).to(device), self.clip * radius
        first = self.steps - gate.left("gaps")  # what a crash has used up is gone
        if first and (found := streams.stored("particles")) is not None:
            points = found["points"]
        for turn in range(first, self.steps):
            draws = streams.generator(f"step {turn}")  # of its own, so that a run that goes on draws what it would have drawn
            frame = haar(points.shape[1], 1, draws).float().to(device)
            projected = frame @ points.mT
            known = quantiles(projected.mT, self.blocks)
            asked = (here, radius, hold, spec.classes, frame, known)
            answer = gate.answer("gaps", gaps, *asked, bound=bound, shape=tuple(known.shape)).float()
            pace = self.rate * (1 - turn / self.steps)
            moved = pushed(points, assigned(projected, answer), frame, pace)
            points = self._stirred(moved, points, pace, spec, streams.generator(f"wiener {turn}", device))
            if streams.due(turn, self.steps):
                streams.store("particles", {"points": points})
            if turn % 10 == 9 or turn + 1 == self.steps:
                progress("moving the particles", turn + 1, self.steps)
        return points


METHOD = SlicedFlow
