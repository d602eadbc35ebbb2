r"""The sliced-Wasserstein flow: particles pushed, direction by direction, onto the noisy quantiles of the data.

**Released** mode blocks (ours): per class its moments and, per direction, sums of sorted runs of projections, once. Mode records
(DPSWflow): every record's point, once. Mode resampled (DPSWflow-r): at each step, how far a fresh draw's quantiles are from the particles'.
In space private, before that, noisy sums of an auto-encoder's gradients.
**Bound** blocks: parts of norm 1 for the moments, 2 radius sqrt(bases) for the blocks, by telescoping and a tight frame; records: one
row changes, 2 bound; resampled: the answer is clipped as a whole, 2 bound; gradients: each clipped. The gate cuts every one of them itself.
**Cost** blocks: two full-batch Gaussian answers, together one; records: one; resampled, and an auto-encoder's lessons: an event a step, on
draws of fixed size.
**Departs** from the paper: noise is drawn once where one release is counted, and batches afresh where sampling is counted; fixed
transforms, or auto-encoders that learn in public or pay; no failure probability; in mode blocks, sorting before the noise.
**Notation** z = point of a record, Theta a tight frame of ``bases`` orthonormal bases, m blocks of s = n // m order statistics each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.components.flow_snapshots import STRIP, Strip
from privot.components.latent_space import Coded, sampled_noise
from privot.components.noisy_projections import corners, encoded, quantiles
from privot.components.sliced_settings import DECODER, Sliced, to_keep
from privot.components.sliced_statistics import Asked, counted, flow, schedule
from privot.components.transforms import Space
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Fixed
from privot.release.artifact import Product
from privot.runtime import Progress, Streams
from privot.transport.sliced import assigned, haar, pushed

CALLS = 100  # of tensor operators, in a step of the flow
SORTING = 6  # element-wise passes that sorting a projection is worth
START = 0.3  # of the radius: how far particles start from the grey, in modes records and resampled


def gaps(
    records: Any,
    space: Space | Coded,
    radius: float,
    hold: float,
    classes: int,
    frame: Tensor,
    known: Tensor,
) -> Tensor:
    """Of a whole draw: its quantiles along the frame, less the particles' ``known`` [slices, blocks]: [slices, blocks]."""
    each = torch.func.vmap(encoded, in_dims=(0, 0, None, None, None, None))
    points = each(records.images, records.labels, space, radius, hold, classes)
    return quantiles(points @ frame.T, known.shape[1]) - known


@dataclass(frozen=True, kw_only=True)
class SlicedFlow(Sliced):
    """Settings of the sliced flow. ``noise`` fixes the multiplier; without it the budget does.

    >>> spec = Spec((1, 28, 28), 10, 60_000, (6000,) * 10)
    >>> SlicedFlow(noise=3.7306).plan(spec).cost().epsilon(1e-5).__round__(3)
    1.0
    """

    name: ClassVar[str] = "sliced-flow"
    title: ClassVar[str] = (
        "Sliced-Wasserstein flow: particles moved onto noisy quantiles (DPSWflow, and sorted blocks)"
    )
    promise: ClassVar[str] = (
        "(epsilon, delta), all answers together one Gaussian; resampled: an event a step"
    )
    citation: ClassVar[str] = """@article{sebag2025dpswflow,
  title   = {Differentially Private Gradient Flow based on the Sliced Wasserstein Distance},
  author  = {Sebag, I. and Pydi, M. S. and Franceschi, J.-Y. and Rakotomamonjy, A. and Gartrell, M. and Atif, J. and Allauzen, A.},
  journal = {Transactions on Machine Learning Research},
  year    = {2025}
}"""

    modes: ClassVar[tuple[str, ...]] = ("blocks", "records", "resampled")
    # Settings that may change when a crashed run goes on: nothing asked so far depends on them.
    free: ClassVar[tuple[str, ...]] = ("keep",)

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {"steps": 100, "per_class": 250}

    neighbours: str = "replace"  # or "local", where every record is released by itself
    per_class: int = 1000  # images; others can be had later at no cost
    steps: int = 200  # of the flow; in mode resampled, answers
    rate: float = 0.5
    wiener: float = 0.0  # of the paper's SDE: noise that smooths and buys nothing
    drawn: int = 250  # records of a draw, in mode resampled
    clip: float = 0.5  # length of an answer beside the radius, in mode resampled
    keep: bool = True  # the quantiles, so that sets of other sizes can be made of them, and pictures of the way there

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbours not in ("replace", "local") or (
            self.neighbours == "local" and self.mode != "records"
        ):
            raise SettingError(
                f"sliced-flow.neighbours={self.neighbours!r}: replace, or local with mode=records"
            )
        if self.neighbours == "local" and self.space == "private":
            raise SettingError(
                "sliced-flow.neighbours=local: space=private's lessons are sums over records, and nobody adds them up there"
            )
        counted(self, "per_class", "steps", "drawn")
        if self.mode == "resampled" and self.blocks > self.drawn:
            raise SettingError(
                f"sliced-flow.blocks={self.blocks}: at most as many as records of a draw, {self.drawn}"
            )
        if not (0 < self.rate <= 1 and 0 <= self.wiener <= 100 and 0 < self.clip <= 10):
            raise SettingError(
                "sliced-flow: 0 < rate <= 1, 0 <= wiener <= 100 and 0 < clip <= 10 are needed"
            )

    def plan(self, spec: Spec) -> Plan:
        relation = Neighbours(self.neighbours)
        if self.mode != "resampled":
            return Plan(self.questions(spec), relation)
        self.declared(spec)
        assert spec.size is not None
        first, noise = self.opening(spec)
        if not first:
            return Plan(
                (Stage("gaps", "answer", noise, self.steps, Fixed(self.drawn, spec.size)),),
                relation,
            )
        each = Stage(
            "gaps",
            "answer",
            sampled_noise(noise, self.steps, self.drawn / spec.size),
            self.steps,
            Fixed(self.drawn, spec.size),
        )
        return Plan((*first, each), relation)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        dim = self.dim(spec)
        images = self.per_class * spec.classes
        ratio = self.signal(spec, plan) if self.mode != "resampled" else None
        work = 4 * dim * dim * (
            self.steps * images + self.bases * (spec.size or 0)
        ) + self.opening_work(spec)
        return {
            "images": images,
            "signal_to_noise_per_class": ratio,
            "floating_point_operations": work,
            "elementwise_operations": SORTING * self.steps * images * dim,
            "operator_calls": CALLS * self.steps + self.opening_calls(),
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        here = self.placed(gate, streams, progress)
        strip = Strip(self.steps)
        if self.mode == "blocks":
            return self._pictures(
                self.asked(gate, here, streams, progress), here, spec, streams, progress
            )
        points, labels = self._particles(spec, streams)
        move = self._onto_records if self.mode == "records" else self._onto_draws
        points = move(gate, here, points, strip, streams, progress)[:, : self.dim(spec)]
        return self._shown(
            points, labels, here, spec, strip.kept(here, spec.shape[0]) if self.keep else {}
        )

    def again(self, made: Product, spec: Spec, streams: Streams, progress: Progress) -> Product:
        """A set of ``per_class`` images from what an earlier run kept: no record is asked, so it costs nothing."""
        dim = self.dim(spec)
        classes = spec.classes
        device = streams.runtime.target
        shapes = {
            "means": (classes, dim),
            "roots": (classes, dim, dim),
            "frame": (self.bases, dim, dim),
        }
        shapes["targets"] = (classes, self.bases, dim, self.blocks)
        found = {
            name: value
            for name, value in made.kept.items()
            if name != STRIP and not name.startswith(DECODER)
        }
        if {name: tuple(value.shape) for name, value in found.items()} != shapes:
            raise ReleaseError(
                "the release does not hold what a set of another size needs: was it made with keep=false?"
            )
        known = Asked(**{name: value.float().to(device) for name, value in found.items()})
        return self._pictures(known, self.found(made.kept, spec, device), spec, streams, progress)

    # What is free

    def _pictures(
        self, made: Asked, here: Space | Coded, spec: Spec, streams: Streams, progress: Progress
    ) -> Product:
        """Of each class as many particles as asked for, from its Gaussian along the flow."""
        points = made.drawn(self.per_class, streams.generator("start"))
        strip = Strip(self.steps)
        how: dict[str, Any] = {
            "steps": self.steps,
            "rate": self.rate,
            "wiener": self.wiener,
            "strip": strip,
        }
        points = flow(points, made, **how, streams=streams, progress=progress)
        labels = torch.arange(spec.classes).repeat_interleave(self.per_class)
        kept = (
            {**made.tensors(), **to_keep(here), **strip.kept(here, spec.shape[0])}
            if self.keep
            else {}
        )
        return self._shown(points.flatten(0, 1), labels, here, spec, kept)

    def _shown(
        self,
        points: Tensor,
        labels: Tensor,
        here: Space | Coded,
        spec: Spec,
        kept: dict[str, Tensor],
    ) -> Product:
        return Product.set(here.image(points, spec.shape[0]).clamp(0, 1), labels, kept=kept)

    # The two mechanisms of the paper

    def _particles(self, spec: Spec, streams: Streams) -> tuple[Tensor, Tensor]:
        """Particles around the grey, each with the corner of its label, and the labels: [count, dim (+ classes)], [count]."""
        labels = torch.arange(spec.classes).repeat_interleave(self.per_class)
        noise = torch.randn(
            len(labels), dim := self.dim(spec), generator=streams.generator("start")
        )
        points = START * self.radius(spec) / math.sqrt(dim) * noise
        return torch.cat([points, corners(labels, self.held(spec), spec.classes)], 1).to(
            streams.runtime.target
        ), labels

    def _some(self, points: Tensor, spec: Spec) -> Tensor:
        """One particle of each label, without the label: [classes, dim]."""
        return points[:: self.per_class, : self.dim(spec)]

    def _stirred(
        self, moved: Tensor, before: Tensor, pace: float, spec: Spec, noise: torch.Generator
    ) -> Tensor:
        """With the Wiener term; labels stay where they were."""
        if self.wiener:
            moved = moved + math.sqrt(2 * pace * self.wiener) * torch.randn(
                moved.shape, generator=noise, device=moved.device
            )
        return torch.cat([moved[:, : self.dim(spec)], before[:, self.dim(spec) :]], 1)

    def _onto_records(
        self,
        gate: Gate,
        here: Space | Coded,
        points: Tensor,
        strip: Strip,
        streams: Streams,
        progress: Progress,
    ) -> Tensor:
        """Every record's noisy point, once; then the flow between smoothed clouds: particles get as much noise as the records did."""
        made = self.noisy_points(gate, here, streams, progress)
        spec = gate.spec
        fresh = streams.generator("smoothing", points.device)
        strip.see(0, self._some(points, spec))
        for turn, (basis, pace) in enumerate(schedule(self.bases, self.steps, self.rate, streams)):
            smoothed = made.frame[basis] @ made.smoothed(points, fresh).mT
            moved = pushed(
                points,
                assigned(smoothed, made.targets[basis]).sub_(smoothed),
                made.frame[basis],
                pace,
            )
            points = self._stirred(moved, points, pace, spec, fresh)
            strip.see(turn + 1, self._some(points, spec))
            if turn % 10 == 9 or turn + 1 == self.steps:
                progress("moving the particles", turn + 1, self.steps)
        return points

    def _onto_draws(
        self,
        gate: Gate,
        here: Space | Coded,
        points: Tensor,
        strip: Strip,
        streams: Streams,
        progress: Progress,
    ) -> Tensor:
        """At each step a fresh draw and a fresh basis; the clipped, noisy gaps between its quantiles and the particles' move these."""
        spec = gate.spec
        radius = self.radius(gate.spec)
        hold = self.held(gate.spec)
        device = points.device
        bound = self.clip * radius
        first = self.steps - gate.left("gaps")  # what a crash has used up is gone
        if first and (found := streams.stored("particles")) is not None:
            points = found["points"]
        strip.see(first, self._some(points, spec))  # of a run that goes on, what is left of the way
        for turn in range(first, self.steps):
            draws = streams.generator(
                f"step {turn}"
            )  # of its own, so that a run that goes on draws what it would have drawn
            frame = haar(points.shape[1], 1, draws).float().to(device)
            projected = frame @ points.mT
            known = quantiles(projected.mT, self.blocks)
            asked = (here, radius, hold, spec.classes, frame, known)
            answer = gate.answer(
                "gaps", gaps, *asked, bound=bound, shape=tuple(known.shape)
            ).float()
            pace = self.rate * (1 - turn / self.steps)
            moved = pushed(points, assigned(projected, answer), frame, pace)
            points = self._stirred(
                moved, points, pace, spec, streams.generator(f"wiener {turn}", device)
            )
            strip.see(turn + 1, self._some(points, spec))
            if streams.due(turn, self.steps):
                streams.store("particles", {"points": points})
            if turn % 10 == 9 or turn + 1 == self.steps:
                progress("moving the particles", turn + 1, self.steps)
        return points


METHOD = SlicedFlow
