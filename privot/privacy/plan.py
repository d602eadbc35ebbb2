"""Plan, Budget, Neighbours: public numbers, and the event they amount to. Nothing here has seen a record."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import dp_accounting as dpa

from privot.errors import PlanError, SettingError, refusing
from privot.privacy import accounting
from privot.privacy.accounting import Cost, Neighbours
from privot.privacy.sampling import SAMPLERS, Fixed, Full, Poisson, Sampling


@dataclass(frozen=True)
class Budget:
    """(epsilon, delta). An infinite epsilon asks for no privacy at all, and the release will say so.

    >>> Budget(1.0).delta
    1e-05
    """

    epsilon: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise SettingError(f"epsilon={self.epsilon:g}: give a number above 0, such as 1")
        if not 0 < self.delta < 1:
            raise SettingError(
                f"delta={self.delta:g}: give a probability well under 1/size, such as 1e-5"
            )

    def allows(self, cost: Cost) -> bool:
        return cost.epsilon(self.delta) <= self.epsilon


@dataclass(frozen=True)
class Risk:
    """The same wall said as attack power: no membership attack may exceed ``tpr`` at false-positive rate ``fpr``.

    >>> Risk(tpr=0.05, fpr=0.01).delta
    1e-05
    """

    tpr: float
    fpr: float
    delta: float = 1e-5  # at which the epsilon of the certificate is stated

    def __post_init__(self) -> None:
        if not 0 < self.fpr < self.tpr < 1:
            raise SettingError(
                f"max-tpr {self.tpr:g}@{self.fpr:g}: 0 < false-positive rate < true-positive rate < 1 is needed"
            )
        Budget(1.0, self.delta)

    def allows(self, cost: Cost) -> bool:
        return cost.tpr(self.fpr) <= self.tpr


Wall = Budget | Risk  # says whether a cost is still inside


FINE = 2**30  # of which a rate of draws becomes a whole number, rounded up
LAWS = {"laplace": dpa.LaplaceDpEvent, "response": accounting.response}


@dataclass(frozen=True)
class Stage:
    """``steps`` answers of one kind: a gate verb, a sampler and a noise multiplier (standard deviation over sensitivity).

    ``law`` is that of the noise: ``gaussian``; ``laplace``, of which the multiplier is scale over sensitivity; or ``response``, for a
    channel that is no addition, where it is one over its epsilon.
    """

    name: str
    verb: str
    noise: float
    steps: int = 1
    sampling: Sampling = Full()  # noqa: RUF009 (frozen, without fields)
    law: str = "gaussian"

    def __post_init__(self) -> None:
        if not (self.noise == 0 or 1e-30 < self.noise < 1e30):
            raise PlanError(f"noise={self.noise}: a multiplier of 0 or more is needed")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise PlanError(f"steps={self.steps}: a whole number of at least 1 is needed")
        if self.law != "gaussian" and (self.law not in LAWS or self.sampling != Full()):
            raise PlanError(
                f"stage {self.name}: noise of the law {self.law} has no proof on such draws"
            )

    def event(self) -> dpa.DpEvent:
        if self.noise == 0:  # a draw without noise is the records themselves
            return dpa.NonPrivateDpEvent()
        one = (
            self.sampling.event(self.noise)
            if self.law == "gaussian"
            else LAWS[self.law](self.noise)
        )
        return one if self.steps == 1 else dpa.SelfComposedDpEvent(one, self.steps)


@dataclass(frozen=True)
class Plan:
    """All that a run may ask of the gate, and the relation under which it is counted.

    >>> plan = Plan((Stage("means", "sum", noise=5.0),), Neighbours.REPLACE)
    >>> round(plan.cost().epsilon(1e-5), 3)
    0.726
    >>> round(plan.calibrated(Budget(1.0)).stages[0].noise, 3)
    3.731
    """

    stages: tuple[Stage, ...]
    neighbours: Neighbours

    def __post_init__(self) -> None:
        for stage in self.stages:
            if self.neighbours not in stage.sampling.neighbours:
                kind = type(stage.sampling).__name__
                raise PlanError(
                    f"stage {stage.name}: {kind} sampling has no proof under {self.neighbours} neighbours"
                )
        if len({stage.name for stage in self.stages}) < len(self.stages):
            raise PlanError("two stages of a plan have the same name")

    def event(self) -> dpa.DpEvent:
        events = [stage.event() for stage in self.stages]
        return events[0] if len(events) == 1 else dpa.ComposedDpEvent(events)

    def cost(self, roughly: bool = False) -> Cost:
        return accounting.cost(self.event(), self.neighbours, roughly)

    def scaled(self, factor: float) -> Plan:
        """The same plan with every noise multiplied."""
        return dataclasses.replace(
            self,
            stages=tuple(
                dataclasses.replace(stage, noise=stage.noise * factor) for stage in self.stages
            ),
        )

    def replaced(self) -> Plan:
        """The plan counted under replace-one.

        privacy: an add/remove Gaussian with multiplier z is a replace-one Gaussian with z/2 (remove, then add), and one on a Poisson draw
        is no more than one with z/2 on a draw without replacement of the same rate: see docs/methods/sampling.md. To replace a record is
        one way to replace what its owner holds, so a client's plan stays.
        """
        if self.neighbours is not Neighbours.ADD_REMOVE:
            return dataclasses.replace(self, neighbours=Neighbours.REPLACE)
        stages = [
            dataclasses.replace(stage, sampling=Fixed(math.ceil(stage.sampling.rate * FINE), FINE))
            if isinstance(stage.sampling, Poisson)
            else stage
            for stage in self.scaled(0.5).stages
        ]
        return Plan(tuple(stages), Neighbours.REPLACE)

    def calibrated(self, wall: Wall) -> Plan:
        """The least noise, in this plan's proportions, that stays inside the wall; found from outside, never rounded inwards."""
        if isinstance(wall, Budget) and wall.epsilon == math.inf:
            return self.scaled(0.0)
        if (
            self.cost(roughly=True).mu is not None
        ):  # a Gaussian costs microseconds to judge, a PLD a second
            return self.scaled(self._least(wall, 1.0, 2.0, 1 + 1e-10))
        near = self._least(
            wall, 1.0, 2.0, 1.001, roughly=True
        )  # not far above what the fine grid allows
        return self.scaled(self._least(wall, near, 1.001, 1 + 1e-4))

    def _least(
        self, wall: Wall, start: float, stride: float, within: float, roughly: bool = False
    ) -> float:
        """The least factor on all noise that the wall allows, sought from ``start`` in growing strides, then halved."""

        def allowed(factor: float) -> bool:
            return wall.allows(self.scaled(factor).cost(roughly))

        inside = outside = start
        step = stride
        while not allowed(inside):
            inside, outside, step = inside * step, inside, min(2.0, step * step)
            if inside > 1e12:
                raise SettingError("no amount of noise fits this budget: ask for a larger epsilon")
        if inside == outside:  # allowed where it began, so less may do
            outside = start / stride
            while outside > 1e-6 and allowed(outside):
                inside = outside
                outside = outside / step
                step = min(2.0, step * step)
        while inside / outside > within:
            middle = math.sqrt(inside * outside)
            inside, outside = (middle, outside) if allowed(middle) else (inside, middle)
        return inside

    def to_json(self) -> dict[str, Any]:
        """Plain data for the manifest; `from_json` gives the same plan back."""
        kinds = [
            {"kind": type(stage.sampling).__name__.lower(), **vars(stage.sampling)}
            for stage in self.stages
        ]
        stages = [
            {**vars(stage), "sampling": kind}
            for stage, kind in zip(self.stages, kinds, strict=True)
        ]
        for each in stages:
            if each["law"] == "gaussian":  # of older plans nothing else is said
                del each["law"]
        return {"neighbours": str(self.neighbours), "stages": stages}

    @classmethod
    def from_json(cls, value: Any) -> Plan:
        with refusing(PlanError, "not a plan"):
            stages = []
            for each in value["stages"]:
                sampling = dict(each["sampling"])
                stages.append(
                    Stage(**{**each, "sampling": SAMPLERS[sampling.pop("kind")](**sampling)})
                )
            return cls(tuple(stages), Neighbours(value["neighbours"]))
