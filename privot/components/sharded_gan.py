"""A generator that learns from what critics on shards tell of it: what GS-WGAN and G-PATE share. They differ in what they ask."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.components.pretraining import BATCH, begun, fits
from privot.components.sharded_critics import Critics
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets import NETS, drawing, initialise
from privot.nets.ema import Averaged
from privot.nets.functional_critic import Critic
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Product
from privot.runtime import Progress, Streams

KINDS = {"residual": "ResidualGenerator", "dcgan": "DeepConvGenerator"}
CALLS = 1500  # of tensor operators, in a lesson of critics or a step of the generator
MAPPED = 12  # floating-point operations of a small critic for each element of its maps
RECORDS = 50  # of a critic, at least, where their number is declared: what the published 1,000 critics have of CIFAR-10
SHOWN = 32  # generated images of a class that critics learn from at a time


@dataclass(frozen=True, kw_only=True)
class Adversarial(ABC):
    """Settings of the critics and the generator. ``noise`` fixes a multiplier; without it the budget does."""

    name: ClassVar[str]
    trusts: ClassVar[str] = "the data owner"
    stage: ClassVar[str]

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {
        "channels": 16,
        "width": 8,
        "warm": 10,
        "steps": 100,
        "critics": 25,
        "lessons": 1,
        "batch": 32,
        "critic_batch": 8,
    }

    noise: float | None = None
    critics: int = 1000
    steps: int = 1000  # of the generator: few and large ones, since a step has its price on a GPU however small it is
    batch: int = 1024  # generated images in each
    block: int = 200  # critics that learn between two of them, in turn
    lessons: int = 2  # steps of each then
    warm: int = 60  # rounds of five steps before, against throw-away generators
    critic_batch: int = 32  # records of a shard in a step
    width: int = 32  # channels of a critic's first maps; GS-WGAN has 64
    shift: int = 0  # pixels by which what a critic learns from is moved at random, up to a fourteenth of a side
    detail: float = 0.5  # part of the frequencies of each side in which slopes are asked
    kind: str = "dcgan"  # or "residual"
    code: int = 16
    channels: int = 64  # of the generator
    rate: float = 6e-4  # of Adam, for the generator
    critic_rate: float = 1e-4
    average: float = 0.995  # of the generator's weights over the steps
    start: str = "nothing"  # or "glyphs": characters of public fonts, which the generator learns to draw before it asks anybody
    practice: int = 2000  # steps of that

    def __post_init__(self) -> None:
        for key in (
            "critics",
            "steps",
            "batch",
            "block",
            "lessons",
            "critic_batch",
            "width",
            "code",
            "channels",
            "practice",
        ):
            if getattr(self, key) < 1:
                raise SettingError(f"{self.name}.{key}={getattr(self, key)}: at least 1 is needed")
        if self.kind not in KINDS:
            raise SettingError(f"{self.name}.kind={self.kind!r}: {' or '.join(KINDS)}")
        if (
            not 0 < self.rate < 1
            or not 0 < self.critic_rate < 1
            or not 0 <= self.average < 1
            or not 0 < self.detail <= 1
        ):
            raise SettingError(
                f"{self.name}: 0 < rate < 1, 0 < critic_rate < 1, 0 <= average < 1 and 0 < detail <= 1 are needed"
            )
        if self.warm < 0 or self.shift < 0:
            raise SettingError(f"{self.name}: warm >= 0 and shift >= 0 are needed")
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise SettingError(
                f"{self.name}.noise={self.noise}: a multiplier of 0 or more is needed"
            )

    def suited(self, spec: Spec) -> None:
        """Refuse, before anything is begun, a start that knows nothing of such data, or more critics than the records that are declared."""
        fits(self.name, self.start, spec)
        if spec.size is not None and spec.size < self.critics:
            raise SettingError(
                f"{self.name}.critics={self.critics}: each needs a record at least, and there are {spec.size}; set fewer"
            )

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        critic = Critic(spec.shape, spec.classes, self.width)
        learnt = (
            self.steps * min(self.block, self.critics) * self.lessons + 5 * self.warm * self.critics
        )
        # A row goes forward and back; in a critic's step two images do, and one twice over.
        passes = 3.0 * self.rows() + 14.0 * learnt * self.critic_batch
        drawn = (
            3.0
            * (self.steps * self.batch + self.practised)
            * drawing(KINDS[self.kind], self._arguments(spec))
        )
        return {
            "records_of_a_critic": None if spec.size is None else spec.size // self.critics,
            "floating_point_operations": critic.work * passes + drawn,
            "elementwise_operations": critic.work * passes / MAPPED,
            "operator_calls": CALLS * (self.steps * (1 + self.lessons) + 5 * self.warm),
        }

    @classmethod
    def suitable(cls, spec: Spec) -> dict[str, Any]:
        """Return as many critics as the declared records can teach, at most the default."""
        if spec.size is None or spec.size >= RECORDS * cls.critics:
            return {}
        return {"critics": max(1, spec.size // RECORDS)}

    def _arguments(self, spec: Spec) -> dict[str, Any]:
        return {
            "shape": list(spec.shape),
            "classes": spec.classes,
            "code": self.code,
            "width": self.channels,
        }

    @property
    def practised(self) -> int:
        """Images that the generator draws before it asks anybody."""
        return 0 if self.start == "nothing" else self.practice * BATCH

    def rows(self) -> int:
        """Slopes that critics compute for the generator."""
        return self.steps * self.batch

    @abstractmethod
    def ask(
        self, gate: Gate, team: Critics, images: Tensor, labels: Tensor, draws: torch.Generator
    ) -> Tensor:
        """Where images [batch, ...] should go, noisy, in low frequencies: [batch, channels, rows, columns]."""

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        device = streams.runtime.target
        arguments = self._arguments(spec)
        net = initialise(NETS[KINDS[self.kind]](**arguments), streams.generator("weights")).to(
            device
        )
        pair = Averaged(
            begun(net, self.start, self.practice, spec, streams, progress),
            self.rate,
            (0.5, 0.9),
            self.average,
        )
        whole = gate.plan.stages[0].steps
        # A short run's answers are kept, and come again from the first: then it begins anew. Else it goes on, with fresh public draws.
        resumed = gate.left(self.stage) < whole and pair.restore(streams.stored("generator"))
        draws = streams.generator(f"draws {gate.left(self.stage)}", device)
        team = Critics(
            gate,
            streams.generator("critics"),
            draws,
            self.critics,
            self.width,
            self.critic_batch,
            self.critic_rate,
            self.detail,
            shift=self.shift,
        )
        team.begin(0 if resumed else self.warm, progress)
        block = min(self.block, self.critics)
        each = whole // self.steps
        shown = torch.arange(spec.classes, device=device).repeat_interleave(SHOWN)

        def drawn(net: Any, labels: Tensor) -> Tensor:
            return net(torch.randn(len(labels), self.code, generator=draws, device=device), labels)

        while (left := gate.left(self.stage)) >= each:
            step = (whole - left) // each
            with torch.no_grad():
                fakes = drawn(net, shown).unflatten(0, (spec.classes, SHOWN))
            # privacy: which critics learn depends on the step alone, never on who was asked.
            some = (
                step * block + torch.arange(block)
            ) % self.critics  # on the host, where their number is known
            team.learn(
                fakes,
                some,
                self.lessons,
                5 * self.warm + step * block // self.critics * self.lessons,
            )
            labels = torch.randint(spec.classes, (self.batch,), generator=draws, device=device)
            images = drawn(net, labels)
            images.backward(
                -team.pixels(self.ask(gate, team, images.detach(), labels, draws)) / self.batch
            )
            pair.step()
            progress("training the generator", step + 1, self.steps)
            if streams.due(step, self.steps):
                gate.store()  # before the generator: a run that finds one does not warm up its critics again
                streams.store("generator", pair.kept())
                streams.show(fakes[:, :10].flatten(0, 1), 10)
        return Product.generator(
            KINDS[self.kind], arguments, pair.settled(lambda mean: drawn(mean, shown))
        )
