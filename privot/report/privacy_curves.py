"""What a plan proves: the certified attack power, and epsilon by step."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from privot.errors import PlanError, ReleaseError, reraise_as
from privot.privacy.accounting import PrivacyCost
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.privacy.plan import Plan
from privot.release import Release
from privot.release.verify import recompute_guarantee
from privot.report.formatting import clean_text

# Computations of epsilon for a page. One takes about a second for a stage with sampling.
MAX_ACCOUNTED_POINTS = 12
MAX_POINTS_PER_STAGE = 6
CURVE_FALSE_POSITIVE_RATES = tuple(float(f"{rate:.4g}") for rate in np.geomspace(1e-4, 1, 41))


def verify_recorded_plan(release: Release, name: str = "the release") -> Plan | None:
    """Verify the plan of a release as `verify` does. No page is written for an unproven guarantee.

    Args:
        release: The release.
        name: Its name, for error messages.

    Returns:
        The plan; None if none is recorded and the release has no guarantee.

    Raises:
        ReleaseError: The plan does not prove the guarantee.
    """
    try:
        with reraise_as(ReleaseError, f"{name}: its guarantee is not valid"):
            plan, _ = recompute_guarantee(release, name)
    except PlanError:
        if isinstance(release.guarantee, NoGuarantee):
            return None
        raise ReleaseError(f"{name}: it records no plan that could prove its guarantee.") from None
    if isinstance(release.guarantee, Guarantee) and not math.isfinite(release.guarantee.epsilon):
        raise ReleaseError(f"{name}: an infinite epsilon is no guarantee.")
    return plan


def cache_cost(cost: PrivacyCost) -> PrivacyCost:
    """Cache the privacy profile of a cost. A curve needs the same values at every rate."""
    deltas: dict[bytes, Any] = {}

    def compute_delta(epsilon: Any) -> Any:
        key = np.asarray(epsilon).tobytes()
        if key not in deltas:
            deltas[key] = cost.delta(epsilon)
        return deltas[key]

    return dataclasses.replace(cost, delta=compute_delta, epsilon=functools.cache(cost.epsilon))


def compute_max_tpr_curve(cost: PrivacyCost) -> dict[str, list[float]]:
    """Compute the certified true-positive rates at false-positive rates from 1e-4 to 1."""
    return {
        "fpr": list(CURVE_FALSE_POSITIVE_RATES),
        "tpr": [cost.max_tpr(rate) for rate in CURVE_FALSE_POSITIVE_RATES],
    }


def compute_epsilon_by_step(plan: Plan, guarantee: Guarantee) -> list[dict[str, Any]]:
    """Compute epsilon at the delta of the guarantee, after each stage and inside long stages.

    Args:
        plan: The plan.
        guarantee: Its guarantee, which is the last point.

    Returns:
        Points with ``stage``, ``steps`` since the start of the plan, and ``epsilon``; none for a
        plan of one step.
    """
    if sum(stage.steps for stage in plan.stages) < 2:
        return []
    points = _choose_accounting_points(plan)
    epsilons: list[dict[str, Any]] = [
        {
            "stage": clean_text(plan.stages[-1].name),
            "steps": sum(stage.steps for stage in plan.stages),
            "epsilon": guarantee.epsilon,
        }
    ]
    for stage_index, steps in reversed(points[:-1]):
        last_stage = dataclasses.replace(plan.stages[stage_index], steps=steps)
        partial_plan = dataclasses.replace(plan, stages=(*plan.stages[:stage_index], last_stage))
        epsilon = float(partial_plan.cost().epsilon(guarantee.delta))
        steps_before = sum(stage.steps for stage in plan.stages[:stage_index])
        # The first steps are part of all later ones, so they never cost more. On a coarser grid,
        # the accountant may say otherwise; the minimum corrects this.
        epsilons.append(
            {
                "stage": clean_text(plan.stages[stage_index].name),
                "steps": steps_before + steps,
                "epsilon": min(epsilon, epsilons[-1]["epsilon"]),
            }
        )
    return epsilons[::-1]


def _choose_accounting_points(plan: Plan) -> list[tuple[int, int]]:
    """Choose at which steps epsilon is computed.

    Returns:
        Stage index and steps inside the stage; the end of each stage, if there are few stages.
    """
    points_per_stage = max(1, min(MAX_POINTS_PER_STAGE, MAX_ACCOUNTED_POINTS // len(plan.stages)))
    points = []
    for stage_index, stage in enumerate(plan.stages):
        steps_in_stage = {
            -(-stage.steps * point // points_per_stage) for point in range(1, points_per_stage + 1)
        }
        points += [(stage_index, steps) for steps in sorted(steps_in_stage)]
    if len(points) > MAX_ACCOUNTED_POINTS:
        indices = np.linspace(0, len(points) - 1, MAX_ACCOUNTED_POINTS).round().astype(int)
        points = [points[index] for index in indices]
    return points
