"""Settings of what the sliced methods ask, and where their records are points: fixed transforms, or the codes of an auto-encoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.components.latent_space import (
    STAGE,
    Coded,
    drawn_scenes,
    lesson_stage,
    taught,
    taught_in_public,
)
from privot.components.noisy_projections import Noisy, ask_points
from privot.components.sliced_statistics import TILT, Asked, ask, counted, sized, stages
from privot.components.transforms import GREY, KINDS, Space, space
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.nets import initialise
from privot.nets.autoencoders import ConvAutoencoder
from privot.nets.dp_networks import Autoencoder
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan, Stage
from privot.runtime import Progress, Streams

LESSON_CALLS = 500  # of tensor operators, in a lesson of an auto-encoder
LEARNED = ("public", "private")
SCENES = "scenes"  # pictures drawn by code, in the place of a public data set
# of a lesson: so many public pictures, or one part in so many of the private records
BATCH = 250
PART = 20
# hidden numbers and cosines a side of the private auto-encoder: small, since noise grows with its weights
DRAWING = 128
WAVES = 14


@dataclass(frozen=True, kw_only=True)
class Sliced:
    """Settings of what is asked, which the flow and the generator share. ``noise`` fixes the multiplier; without it the budget does."""

    name: ClassVar[str]
    trusts: ClassVar[str] = "the data owner"
    modes: ClassVar[tuple[str, ...]] = ("blocks", "records")

    noise: float | None = None
    mode: str = "blocks"  # moments and sorted blocks of each class; "records": every record's noisy point; of the flow also "resampled"
    labelled: bool = True  # False, as in the papers, where the mode is not blocks: labels are then given out in turn and mean nothing
    hold: float = 0.5  # length of a label beside the radius, where the mode is not blocks
    space: str = "cosines"  # or "wavelets", "haar"; or learned: "public", "private"
    waves: int = 12  # of each side
    lean: float = 0.5  # weight of fine parts before the ball cuts, see `space`
    reach: float = 0.32  # radius of the ball, for each root of the pixels
    grey: float | None = None  # None: by the channels, see GREY
    bases: int = 32  # directions are bases * waves² * channels, or bases * inner
    patch: int = 4  # pixels a side of the cells that every second basis looks at; 0: all bases are of the whole space
    blocks: int = 10  # order statistics are averaged in so many runs; fewer, at small budgets, carry less noise
    share: float = 0.6  # of the budget, as mu², for the moments; the rest is for the blocks
    inner: int = 16  # numbers of a code, in a learned space
    public: str = SCENES  # what an auto-encoder learns from in space=public: a data set's name or path, or pictures drawn by code
    lessons: int = 2000  # steps of an auto-encoder; in space=private, answers
    lesson_size: int | None = (
        None  # pictures of a lesson; None: 250 public ones, a twentieth of the private ones
    )
    lesson_rate: float = 3e-3  # of Adam, falling to zero
    lesson_share: float = 0.5  # of the budget, as mu², for the lessons in space=private
    lesson_bound: float = 1.0  # of a record's gradient in space=private

    def __post_init__(self) -> None:
        if self.mode not in self.modes:
            raise SettingError(f"{self.name}.mode={self.mode!r}: {', '.join(self.modes)}")
        if not self.labelled and self.mode == "blocks":
            raise SettingError(
                f"{self.name}.labelled=False: blocks are of classes; for data without labels declare one class"
            )
        if not 0 < self.hold <= 10:
            raise SettingError(f"{self.name}.hold={self.hold}: above 0 and at most 10 is needed")
        if self.space not in (*KINDS, *LEARNED):
            raise SettingError(f"{self.name}.space={self.space!r}: {', '.join((*KINDS, *LEARNED))}")
        counted(self, "waves", "bases", "blocks", "inner", "lessons")
        if (
            self.inner < 2
            or not self.public
            or (self.lesson_size is not None and self.lesson_size < 1)
        ):
            raise SettingError(
                f"{self.name}: inner >= 2, a name for public, and lesson_size >= 1 are needed"
            )
        if not (0 <= self.patch <= 64 and 0 <= self.lean <= 2 and 0 < self.share < 1):
            raise SettingError(
                f"{self.name}: 0 <= patch <= 64, 0 <= lean <= 2 and 0 < share < 1 are needed"
            )
        if not (
            0 < self.lesson_rate < 1 and 0 < self.lesson_share < 1 and 0 < self.lesson_bound < 1e9
        ):
            raise SettingError(
                f"{self.name}: 0 < lesson_rate < 1, 0 < lesson_share < 1 and lesson_bound > 0 are needed"
            )
        if not 0 < self.reach <= 10 or not 0 <= (self.grey or 0) <= 1:
            raise SettingError(
                f"{self.name}: reach={self.reach} above 0 and at most 10, and 0 <= grey <= 1, are needed"
            )
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise SettingError(
                f"{self.name}.noise={self.noise}: a multiplier of 0 or more is needed"
            )

    @property
    def aside(self) -> str:
        """The public data that must be at hand, if any."""
        return self.public if self.space == "public" and self.public != SCENES else ""

    @property
    def learned(self) -> bool:
        return self.space in LEARNED

    def dim(self, spec: Spec) -> int:
        """Numbers of a point."""
        return (
            self.inner
            if self.learned
            else spec.shape[0] * math.prod(min(self.waves, side) for side in spec.shape[1:])
        )

    def radius(self, spec: Spec) -> float:
        """Of the ball that holds the points."""
        return math.sqrt(self.inner) if self.learned else self.reach * math.sqrt(spec.pixels)

    def held(self, spec: Spec) -> float:
        """Length of a label's corner; 0: there is none."""
        return self.hold * self.radius(spec) if self.labelled else 0.0

    def declared(self, spec: Spec) -> None:
        """Refuse a spec that does not declare what the mode needs."""
        if self.mode == "blocks":
            sized(spec, self.blocks)
        elif spec.size is None:
            raise SettingError(
                f"{self.name}: mode={self.mode} needs the number of records, declared as public (--public-size)"
            )

    def questions(self, spec: Spec) -> tuple[Stage, ...]:
        """All stages of modes blocks and records."""
        self.declared(spec)
        first, noise = self.opening(spec)
        return (
            *first,
            *(
                stages(noise, self.share)
                if self.mode == "blocks"
                else (Stage("records", "rows", noise),)
            ),
        )

    def signal(self, spec: Spec, plan: Plan) -> float | None:
        """Of a class's mean, beside its noise; none without noise. It has .6 of the radius, seen on MNIST."""
        noise = 2 * next(stage.noise for stage in plan.stages if stage.name != STAGE)
        records = min(spec.class_sizes) if spec.class_sizes else (spec.size or 0) / spec.classes
        gain = TILT * records if self.mode == "blocks" else math.sqrt(max(records, 1))
        return (
            0.6 * gain / (noise * math.sqrt(self.dim(spec))) if noise else None
        )  # noise is taken over all directions of the space

    def opening(self, spec: Spec) -> tuple[tuple[Stage, ...], float]:
        """What is asked before the points: the lessons of a private auto-encoder; and the multiplier that the rest has together."""
        noise = 1.0 if self.noise is None else self.noise
        if self.space != "private":
            return (), noise
        if spec.size is None:
            raise SettingError(
                f"{self.name}: space=private needs the number of records, declared as public (--public-size)"
            )
        drawn = self.lesson_size or max(1, spec.size // PART)
        if drawn > spec.size:
            raise SettingError(
                f"{self.name}.lesson_size={drawn}: at most as many as there are records, {spec.size}"
            )
        return (
            lesson_stage(noise, self.lesson_share, self.lessons, drawn, spec.size),
        ), noise / math.sqrt(1 - self.lesson_share)

    def opening_work(self, spec: Spec) -> float:
        """Floating-point operations of the lessons, roughly."""
        if self.space == "private":
            waves = spec.shape[0] * math.prod(min(WAVES, side) for side in spec.shape[1:])
            return (
                12.0
                * self.lessons
                * (self.lesson_size or (spec.size or 0) / PART)
                * DRAWING
                * waves
            )
        return (
            4e4 * self.lessons * (self.lesson_size or BATCH) * spec.pixels if self.learned else 0.0
        )  # 3e4 to 5e4 a pixel, counted

    def opening_calls(self) -> int:
        """Count the calls of tensor operators in the lessons."""
        return LESSON_CALLS * self.lessons if self.learned else 0

    def here(self, spec: Spec) -> Space:
        """Where records are points, by a fixed transform."""
        return space(
            self.space,
            spec.shape,
            self.waves,
            self.lean,
            GREY[spec.shape[0]] if self.grey is None else self.grey,
        )

    def placed(self, gate: Gate, streams: Streams, progress: Progress) -> Space | Coded:
        """Where records are points; an auto-encoder learns here, from public pictures or by the answers of its stage."""
        if not self.learned:
            return self.here(gate.spec).to(streams.runtime.target)
        net = self.untaught(gate.spec)
        how = {
            "lessons": self.lessons,
            "rate": self.lesson_rate,
            "streams": streams,
            "progress": progress,
        }
        initialise(net, streams.generator("autoencoder"))
        if self.space == "private":
            return Coded.of(taught(gate, net, bound=self.lesson_bound, **how), self.inner)  # type: ignore[arg-type]
        batch = self.lesson_size or BATCH
        images = (
            drawn_scenes(gate.spec.shape, self.lessons * batch, streams)
            if self.public == SCENES
            else streams.aside
        )
        if images is None:
            raise SettingError(f"{self.name}: the public data {self.public!r} is not at hand")
        return Coded.of(taught_in_public(net, images, batch=batch, **how), self.inner)  # type: ignore[arg-type]

    def untaught(self, spec: Spec) -> torch.nn.Module:
        """The auto-encoder before it learns anything."""
        private = self.space == "private"
        return (
            Autoencoder(spec.shape, self.inner, DRAWING, WAVES)
            if private
            else ConvAutoencoder(spec.shape, self.inner)
        )

    def found(self, kept: dict[str, Tensor], spec: Spec, device: torch.device) -> Space | Coded:
        """The space of a release, which keeps a decoder where one was learned."""
        if not self.learned:
            return self.here(spec).to(device)
        net: Any = self.untaught(spec)
        own = {
            name.removeprefix(DECODER): each.float()
            for name, each in kept.items()
            if name.startswith(DECODER)
        }
        if {name: each.shape for name, each in own.items()} != {
            name: each.shape for name, each in net.decoder.state_dict().items()
        }:
            raise ReleaseError(
                "the release does not hold the decoder that its settings ask for: was it made with keep=false?"
            )
        net.decoder.load_state_dict(own)
        return Coded.of(net.to(device), self.inner)

    def asked(self, gate: Gate, here: Space | Coded, streams: Streams, progress: Progress) -> Asked:
        """The moments and the sorted blocks."""
        how: dict[str, Any] = {key: getattr(self, key) for key in ("bases", "patch", "blocks")}
        return ask(
            gate, here, **how, radius=self.radius(gate.spec), streams=streams, progress=progress
        )

    def noisy_points(
        self, gate: Gate, here: Space | Coded, streams: Streams, progress: Progress
    ) -> Noisy:
        """Every record's point."""
        how: dict[str, Any] = {
            "radius": self.radius(gate.spec),
            "hold": self.held(gate.spec),
            "bases": self.bases,
        }
        return ask_points(gate, here, **how, streams=streams, progress=progress)


DECODER = "decoder."


def to_keep(here: Space | Coded) -> dict[str, Tensor]:
    """What a release needs to turn points of the space into images later: a decoder, where one was learned."""
    return (
        {}
        if isinstance(here, Space)
        else {DECODER + name: each for name, each in here.decoder.state_dict().items()}
    )
