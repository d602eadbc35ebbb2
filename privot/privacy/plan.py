"""Plans and budgets: public numbers, and the events they amount to. Nothing here reads a record."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import dp_accounting as dpa

from privot.errors import PlanError, SettingError, reraise_as
from privot.privacy import accounting
from privot.privacy.accounting import Neighbours, PrivacyCost
from privot.privacy.pure_epsilon import randomized_response_event
from privot.privacy.sampling import SAMPLERS, Fixed, Full, Poisson, Sampling


@dataclass(frozen=True)
class Budget:
    """A limit (epsilon, delta). An infinite epsilon asks for no privacy, and the release says so.

    >>> Budget(1.0).delta
    1e-05
    """

    epsilon: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise SettingError(f"epsilon={self.epsilon:g}: give a number above 0, such as 1.")
        if not 0 < self.delta < 1:
            raise SettingError(
                f"delta={self.delta:g}: give a probability well below 1/size, such as 1e-5."
            )

    def allows(self, cost: PrivacyCost) -> bool:
        """Whether a cost is within the limit."""
        return cost.epsilon(self.delta) <= self.epsilon


@dataclass(frozen=True)
class AttackPowerTarget:
    """A limit on membership attacks: at most ``tpr`` at false-positive rate ``fpr``.

    >>> AttackPowerTarget(tpr=0.05, fpr=0.01).delta
    1e-05
    """

    tpr: float
    fpr: float
    delta: float = 1e-5  # at which the epsilon of the certificate is stated

    def __post_init__(self) -> None:
        if not 0 < self.fpr < self.tpr < 1:
            raise SettingError(
                f"max-tpr {self.tpr:g}@{self.fpr:g}: "
                "0 < false-positive rate < true-positive rate < 1 is needed."
            )
        Budget(1.0, self.delta)

    def allows(self, cost: PrivacyCost) -> bool:
        """Whether a cost is within the limit."""
        return cost.max_tpr(self.fpr) <= self.tpr


PrivacyTarget = Budget | AttackPowerTarget


SAMPLE_RATE_DENOMINATOR = 2**30  # a sample rate becomes a fraction of it, rounded up
MAX_NOISE_SCALE = 1e12  # the search for the least noise gives up beyond
MIN_NOISE_SCALE = 1e-6
EVENTS_BY_MECHANISM = {
    "laplace": dpa.LaplaceDpEvent,
    "randomized_response": randomized_response_event,
}


@dataclass(frozen=True)
class Stage:
    """A number of queries of one kind.

    Attributes:
        name: The name by which a method refers to the stage.
        operation: The operation of the gate.
        noise_multiplier: Standard deviation over sensitivity. For ``laplace`` it is scale over
            sensitivity, for ``randomized_response`` one over the epsilon of the channel.
        steps: How many queries.
        sampling: How the records of a query are drawn.
        mechanism: ``gaussian``, ``laplace`` or ``randomized_response``.
    """

    name: str
    operation: str
    noise_multiplier: float
    steps: int = 1
    sampling: Sampling = Full()  # noqa: RUF009 (frozen, without fields)
    mechanism: str = "gaussian"

    def __post_init__(self) -> None:
        if not (self.noise_multiplier == 0 or 1e-30 < self.noise_multiplier < 1e30):
            raise PlanError(
                f"noise_multiplier={self.noise_multiplier}: a multiplier of 0 or more is needed."
            )
        if not isinstance(self.steps, int) or self.steps < 1:
            raise PlanError(f"steps={self.steps}: an integer of at least 1 is needed.")
        if self.mechanism != "gaussian" and (
            self.mechanism not in EVENTS_BY_MECHANISM or self.sampling != Full()
        ):
            raise PlanError(
                f"Stage {self.name}: the mechanism {self.mechanism} has no proof with "
                f"{type(self.sampling).__name__} sampling."
            )

    def event(self) -> dpa.DpEvent:
        """Give the event of all queries of the stage."""
        if self.noise_multiplier == 0:  # without noise, a sample is the records themselves
            return dpa.NonPrivateDpEvent()
        if self.mechanism == "gaussian":
            event = self.sampling.event(self.noise_multiplier)
        else:
            event = EVENTS_BY_MECHANISM[self.mechanism](self.noise_multiplier)
        return event if self.steps == 1 else dpa.SelfComposedDpEvent(event, self.steps)


@dataclass(frozen=True)
class Plan:
    """All that a run may query, and the relation under which it is counted.

    >>> plan = Plan((Stage("means", "sum", noise_multiplier=5.0),), Neighbours.REPLACE)
    >>> round(plan.cost().epsilon(1e-5), 3)
    0.726
    >>> round(plan.calibrate(Budget(1.0)).stages[0].noise_multiplier, 3)
    3.731
    """

    stages: tuple[Stage, ...]
    neighbours: Neighbours

    def __post_init__(self) -> None:
        for stage in self.stages:
            if self.neighbours not in stage.sampling.neighbours:
                raise PlanError(
                    f"Stage {stage.name}: {type(stage.sampling).__name__} sampling has no proof "
                    f"under {self.neighbours} neighbours."
                )
        if len({stage.name for stage in self.stages}) < len(self.stages):
            raise PlanError("Two stages of a plan have the same name.")

    def event(self) -> dpa.DpEvent:
        """Give the event of all stages."""
        events = [stage.event() for stage in self.stages]
        return events[0] if len(events) == 1 else dpa.ComposedDpEvent(events)

    def cost(self, coarse: bool = False) -> PrivacyCost:
        """Compute the cost; ``coarse``: on a coarser grid, which is faster and never optimistic."""
        return accounting.compute_privacy_cost(self.event(), self.neighbours, coarse)

    def scale_noise(self, factor: float) -> Plan:
        """Give the plan with every noise multiplier multiplied by a factor."""
        return dataclasses.replace(
            self,
            stages=tuple(
                dataclasses.replace(stage, noise_multiplier=stage.noise_multiplier * factor)
                for stage in self.stages
            ),
        )

    def under_replace_one(self) -> Plan:
        """Give a plan under replace-one whose cost bounds the cost of this plan.

        privacy: an add/remove Gaussian with multiplier z is a replace-one Gaussian with z/2 (remove
        a record, then add one). On a Poisson sample, it is no more than one with z/2 on a sample
        without replacement of the same rate: see docs/methods/sampling.md. Replacing a record is
        one way to replace what its client has, so a plan under ``client`` keeps its noise.
        """
        if self.neighbours is not Neighbours.ADD_REMOVE:
            return dataclasses.replace(self, neighbours=Neighbours.REPLACE)
        stages = [
            dataclasses.replace(
                stage,
                sampling=Fixed(
                    math.ceil(stage.sampling.sample_rate * SAMPLE_RATE_DENOMINATOR),
                    SAMPLE_RATE_DENOMINATOR,
                ),
            )
            if isinstance(stage.sampling, Poisson)
            else stage
            for stage in self.scale_noise(0.5).stages
        ]
        return Plan(tuple(stages), Neighbours.REPLACE)

    def calibrate(self, privacy_target: PrivacyTarget) -> Plan:
        """Give the least noise, in the proportions of this plan, that the target allows.

        The search ends on the allowed side, so the result never exceeds the target.

        Raises:
            SettingError: If no amount of noise is enough.
        """
        if isinstance(privacy_target, Budget) and privacy_target.epsilon == math.inf:
            return self.scale_noise(0.0)
        if self.cost(coarse=True).mu is not None:
            # The cost of a Gaussian takes microseconds, that of a PLD a second.
            return self.scale_noise(self._find_least_scale(privacy_target, 1.0, 2.0, 1 + 1e-10))
        # The result on the coarse grid is slightly above the one on the fine grid.
        near = self._find_least_scale(privacy_target, 1.0, 2.0, 1.001, coarse=True)
        return self.scale_noise(self._find_least_scale(privacy_target, near, 1.001, 1 + 1e-4))

    def _find_least_scale(
        self,
        privacy_target: PrivacyTarget,
        initial_scale: float,
        growth_factor: float,
        tolerance: float,
        coarse: bool = False,
    ) -> float:
        """Find the least factor on all noise that the target allows.

        Args:
            privacy_target: The limit.
            initial_scale: Where the search starts.
            growth_factor: The first step of the search, which grows up to 2.
            tolerance: The largest ratio of the result to a factor that is not allowed.
            coarse: Whether to use the coarse grid.

        Returns:
            A factor that is allowed.
        """

        def is_allowed(scale: float) -> bool:
            return privacy_target.allows(self.scale_noise(scale).cost(coarse))

        allowed = refused = initial_scale
        step = growth_factor
        while not is_allowed(allowed):
            refused = allowed
            allowed = allowed * step
            step = min(2.0, step * step)
            if allowed > MAX_NOISE_SCALE:
                raise SettingError("No amount of noise fits this budget. Choose a larger epsilon.")
        if allowed == refused:  # the initial scale is allowed, so a smaller one may be
            refused = initial_scale / growth_factor
            while refused > MIN_NOISE_SCALE and is_allowed(refused):
                allowed = refused
                refused = refused / step
                step = min(2.0, step * step)
        while allowed / refused > tolerance:
            middle = math.sqrt(allowed * refused)
            if is_allowed(middle):
                allowed = middle
            else:
                refused = middle
        return allowed

    def to_json(self) -> dict[str, Any]:
        """Give plain data for a manifest; `from_json` gives the same plan back."""
        stages = []
        for stage in self.stages:
            kind = type(stage.sampling).__name__.lower()
            entry = {**vars(stage), "sampling": {"kind": kind, **vars(stage.sampling)}}
            if entry["mechanism"] == "gaussian":  # the default
                del entry["mechanism"]
            stages.append(entry)
        return {"neighbours": str(self.neighbours), "stages": stages}

    @classmethod
    def from_json(cls, value: Any) -> Plan:
        """Read what `to_json` gave.

        Raises:
            PlanError: If the value is not a plan.
        """
        with reraise_as(PlanError, "This is not a plan."):
            stages = []
            for entry in value["stages"]:
                sampling = dict(entry["sampling"])
                sampler = SAMPLERS[sampling.pop("kind")](**sampling)
                stages.append(Stage(**{**entry, "sampling": sampler}))
            return cls(tuple(stages), Neighbours(value["neighbours"]))
