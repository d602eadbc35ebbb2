"""The guarantee of a release: what the events of its plan prove, and what that permits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from privot.errors import SettingError
from privot.privacy import accounting
from privot.privacy.plan import Plan
from privot.progress import round_up

CERTIFICATE_FPRS = (0.001, 0.01, 0.1)  # false-positive rates at which `max_tpr` is stated
LARGE_DELTA = 1e-3  # a larger delta is refused unless the caller accepts it
LARGE_EPSILON = 10.0  # a larger epsilon causes a warning


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-differential privacy of one unit.

    Attributes:
        epsilon: Epsilon at ``delta``, by the tightest accountant that applies.
        delta: Probability outside the guarantee.
        neighbours: The relation between neighbouring data sets, such as ``replace``.
        accountant: The name of the accountant.
        renyi_epsilon: Epsilon of the same events by the looser Renyi accountant, as a check.
        max_tpr: The highest true-positive rate of any membership attack, by false-positive rate.
        unit: What one unit of privacy is, such as one record.
    """

    epsilon: float
    delta: float
    neighbours: str
    accountant: str
    renyi_epsilon: float
    max_tpr: dict[str, float]
    unit: str = "one record"

    @classmethod
    def from_plan(cls, plan: Plan, delta: float) -> Guarantee:
        """Compute what the events of a plan prove at ``delta``."""
        cost = plan.cost()
        renyi_cost = accounting.compute_renyi_cost(plan.event(), plan.neighbours)
        return cls(
            epsilon=float(cost.epsilon(delta)),
            delta=delta,
            neighbours=str(plan.neighbours),
            accountant=cost.accountant,
            renyi_epsilon=float(renyi_cost.epsilon(delta)),
            max_tpr={f"{fpr:g}": cost.max_tpr(fpr) for fpr in CERTIFICATE_FPRS},
            unit=plan.neighbours.privacy_unit,
        )


@dataclass(frozen=True)
class NoGuarantee:
    """The certificate of a release without a proof.

    Attributes:
        reason: Why there is no guarantee.
    """

    reason: str


def check_delta(
    delta: float, num_units: int | None = None, allow_large_delta: bool = False
) -> None:
    """Refuse a delta so large that it allows whole records to be published.

    Args:
        delta: Probability outside the guarantee.
        num_units: The declared number of records, or of clients where everything that one client
            holds is protected. A delta below 1/num_units is always allowed. None: not public.
        allow_large_delta: Whether the caller accepts a large delta.

    Raises:
        SettingError: If the delta is above 1e-3 and neither of the other arguments allows it.
    """
    if delta <= LARGE_DELTA or allow_large_delta or (num_units and delta < 1 / num_units):
        return
    bound = (
        f"1/{num_units} = {1 / num_units:.2g}" if num_units else "one over the number of records"
    )
    raise SettingError(
        f"delta={delta:g}: a delta above {LARGE_DELTA:g} allows whole records to be published. "
        f"Give a delta well under {bound}, such as 1e-5, "
        "or pass --allow-large-delta (allow_large_delta=True)."
    )


def warn_if_weak_guarantee(plan: Plan, delta: float) -> str:
    """State what a large epsilon permits.

    Args:
        plan: The plan that will run.
        delta: The delta at which its epsilon is stated.

    Returns:
        One sentence if epsilon is finite and above 10, else an empty text.
    """
    if not plan.stages or any(stage.noise_multiplier == 0 for stage in plan.stages):
        return ""
    cost = plan.cost()
    epsilon = float(cost.epsilon(delta))
    if not LARGE_EPSILON < epsilon < math.inf:
        return ""
    percent = round_up(100 * cost.max_tpr(0.01), 3)
    return (
        f"epsilon {round_up(epsilon)} is a weak guarantee: an attack with 1 % false positives may "
        f"identify {percent} % of the members. Epsilon 1 to {LARGE_EPSILON:g} is usual."
    )
