"""What a server and its owners agree on: the settings of a federation, and what follows from them for everybody alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from privot.components.pretraining import STARTS
from privot.components.sharded_critics import waves
from privot.components.sharded_gan import KINDS
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets.functional_critic import Critic, Sketch

COPIES = 8  # of a critic's weights and of a batch while it learns: Adam's means, slopes, what lies between
MOST = 10**6  # of anything that is counted: settings may come from a stranger


def owners_of(spec: Spec, name: str) -> int:
    """How many owners the data has; a method called ``name`` cannot do without."""
    if spec.owners is None:
        raise SettingError(
            f"{name}: the data has no owners: take a built-in that has, or deal it to N by --owners N or load(..., owners=N)"
        )
    return spec.owners


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Settings of owners' critics and of a server's generator. ``noise`` fixes the multiplier of a slope; without it the budget does.

    >>> Federation().numbers(Spec((1, 28, 28), 62))
    (1, 14, 14)
    """

    name: ClassVar[str] = "federation"
    stage: ClassVar[str] = "slopes"

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {"channels": 16, "width": 8, "warm": 10, "rounds": 50}

    noise: float | None = None
    unit: str = "client"  # or "record"
    critics: int = 20  # of each owner, where the unit is the record
    records: int = (
        320  # of an owner, or of a critic's part of them, that are laid out: see `Sensitive._laid`
    )
    rounds: int = 200
    rows: int = 1  # images of each class that an owner is sent in a round
    cohort: int = 0  # owners asked in a round, in turn; 0: all
    lessons: int = 2  # steps of a critic before it answers
    warm: int = 60  # rounds of five steps before, against throw-away generators
    critic_batch: int = 32
    width: int = 32  # channels of a critic's first maps
    critic_rate: float = 1e-4
    shift: int = 0  # pixels by which what a critic learns from is moved at random, up to a fourteenth of a side
    detail: float = 0.5  # part of the frequencies of each side in which slopes are asked
    window: int = 0  # pixels in the middle of each side, if not all, on which they are asked; see `Drawing._fading`
    full: bool = True  # slopes are brought to norm 1; else only those that are longer
    known: bool = True  # of classes that an owner has no record of, it says nothing but noise
    kind: str = "dcgan"  # or "residual"
    code: int = 16
    channels: int = 64  # of the generator
    rate: float = 6e-4  # of Adam, for the generator
    average: float = 0.995  # of the generator's weights over the rounds
    start: str = "nothing"  # or "glyphs": characters of public fonts, which the generator learns to draw before it asks anybody
    practice: int = 2000  # steps of that

    def __post_init__(self) -> None:
        for key in (
            "critics",
            "records",
            "rounds",
            "rows",
            "lessons",
            "critic_batch",
            "width",
            "code",
            "channels",
            "practice",
        ):
            if not 1 <= getattr(self, key) <= MOST:
                raise SettingError(
                    f"{self.name}.{key}={getattr(self, key)}: a number from 1 to {MOST} is needed"
                )
        for key, known in (
            ("unit", ("client", "record")),
            ("kind", tuple(KINDS)),
            ("start", tuple(STARTS)),
        ):
            if getattr(self, key) not in known:
                raise SettingError(
                    f"{self.name}.{key}={getattr(self, key)!r}: {' or '.join(known)}"
                )
        if not all(0 <= each <= MOST for each in (self.cohort, self.warm, self.window, self.shift)):
            raise SettingError(
                f"{self.name}: cohort, warm, window and shift are numbers from 0 to {MOST}"
            )
        if not (
            0 < self.rate < 1
            and 0 < self.critic_rate < 1
            and 0 <= self.average < 1
            and 0 < self.detail <= 1
        ):
            raise SettingError(
                f"{self.name}: 0 < rate < 1, 0 < critic_rate < 1, 0 <= average < 1 and 0 < detail <= 1 are needed"
            )
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise SettingError(
                f"{self.name}.noise={self.noise}: a multiplier of 0 or more is needed"
            )

    @property
    def parts(self) -> int:
        """Critics of an owner."""
        return self.critics if self.unit == "record" else 1

    def groups(self, owners: int) -> int:
        """Into how many groups owners fall that take turns."""
        return math.ceil(owners / min(self.cohort or owners, owners))

    def asked(self, number: int, owners: int) -> list[int]:
        """The places of those who are asked in round ``number``: a public schedule that gives all as many turns, but for one.

        >>> Federation(cohort=2).asked(0, 5), Federation(cohort=2).asked(2, 5), Federation().asked(7, 3)
        ([0, 1], [4], [0, 1, 2])
        """
        size = min(self.cohort or owners, owners)
        turn = number % self.groups(owners)
        return list(range(turn * size, min((turn + 1) * size, owners)))

    def numbers(self, spec: Spec) -> tuple[int, int, int]:
        """The shape of one slope: (channels, h, w)."""
        h, w = (waves(side, self.detail, self.window).shape[1] for side in spec.shape[1:])
        return spec.shape[0], h, w

    def memory(self, spec: Spec) -> float:
        """Bytes of one owner's critics with what training holds, of records laid out for them, of a batch and of a round's rows; nearly.

        >>> [round(Federation(unit=unit).memory(Spec((1, 28, 28), 62)) / 1e9, 2) for unit in ("client", "record")]
        [0.05, 1.14]
        """
        critic = Critic(spec.shape, spec.classes, self.width)
        sketch = Sketch(spec.shape, spec.classes)
        convolutions = [
            shape[0] for name, shape in critic.shapes.items() if name.startswith("conv")
        ]
        maps = sum(
            width * math.prod(side)
            for width, side in zip(convolutions, critic.sides[1:], strict=True)
        )
        numbers = sum(math.prod(shape) for net in (critic, sketch) for shape in net.shapes.values())
        pixels = math.prod(spec.shape)
        rows = self.rows * spec.classes
        critics = self.parts * (
            COPIES * (numbers + self.critic_batch * (pixels + maps)) + self.records * pixels
        )
        # All rows of a round are answered at once; where each draws its critic, it holds all that this one knows.
        return 4.0 * (
            critics + rows * (COPIES * (pixels + maps) + (4 * numbers if self.parts > 1 else 0))
        )
