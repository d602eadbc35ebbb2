"""What a plan proves: its certified curve, and epsilon as it grows step by step."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from privot.errors import PlanError, ReleaseError, refusing
from privot.privacy.accounting import Cost
from privot.privacy.plan import Plan
from privot.release import Guarantee, NoGuarantee, Release, proved
from privot.report.formatting import clean

# at most so many accounts a page and points a stage: a sampled stage takes a second each
ACCOUNTS = 12
INSIDE = 6
RATES = tuple(float(f"{rate:.4g}") for rate in np.geomspace(1e-4, 1, 41))


def recorded(release: Release, name: str = "the release") -> Plan | None:
    """The plan of a release, checked as `verify` checks it; without a guarantee there may be none. Else there is no page to sign."""
    try:
        with refusing(ReleaseError, f"{name}: its guarantee is not sound"):
            plan, _ = proved(release, name)
    except PlanError:
        if isinstance(release.guarantee, NoGuarantee):
            return None
        raise ReleaseError(f"{name}: no plan is recorded that could prove its guarantee") from None
    if isinstance(release.guarantee, Guarantee) and not math.isfinite(release.guarantee.epsilon):
        raise ReleaseError(f"{name}: an infinite epsilon is no guarantee")
    return plan


def remembering(cost: Cost) -> Cost:
    """The same cost, which computes each answer once: a curve asks for the same privacy profile at every rate."""
    known: dict[bytes, Any] = {}

    def delta(eps: Any) -> Any:
        key = np.asarray(eps).tobytes()
        if key not in known:
            known[key] = cost.delta(eps)
        return known[key]

    return dataclasses.replace(cost, delta=delta, epsilon=functools.cache(cost.epsilon))


def curve(cost: Cost) -> dict[str, list[float]]:
    """The certified power of any attack, from a false-positive rate of 1e-4 to 1."""
    return {"fpr": list(RATES), "tpr": [cost.tpr(rate) for rate in RATES]}


def by_step(plan: Plan, claim: Guarantee) -> list[dict[str, Any]]:
    """Epsilon at the guarantee's delta after each stage, and at some points inside long ones: ``{"stage", "steps", "epsilon"}``.

    ``steps`` counts from the start of the plan. Nothing is computed for a plan of one step.
    """
    if sum(stage.steps for stage in plan.stages) < 2:
        return []
    points = _points(plan)
    found: list[dict[str, Any]] = [
        {
            "stage": clean(plan.stages[-1].name),
            "steps": sum(stage.steps for stage in plan.stages),
            "epsilon": claim.epsilon,
        }
    ]
    for stage, steps in reversed(points[:-1]):
        part = (*plan.stages[:stage], dataclasses.replace(plan.stages[stage], steps=steps))
        spent = float(dataclasses.replace(plan, stages=part).cost().epsilon(claim.delta))
        before = sum(each.steps for each in plan.stages[:stage])
        # The first steps are part of all that follow, so they never cost more, whatever a coarser grid says.
        found.append(
            {
                "stage": clean(plan.stages[stage].name),
                "steps": before + steps,
                "epsilon": min(spent, found[-1]["epsilon"]),
            }
        )
    return found[::-1]


def _points(plan: Plan) -> list[tuple[int, int]]:
    """(stage, steps inside it), the last of each stage among them while there are few enough."""
    inside = max(1, min(INSIDE, ACCOUNTS // len(plan.stages)))
    points = []
    for place, stage in enumerate(plan.stages):
        marks = {-(-stage.steps * turn // inside) for turn in range(1, inside + 1)}
        points += [(place, steps) for steps in sorted(marks)]
    if len(points) > ACCOUNTS:
        keep = np.linspace(0, len(points) - 1, ACCOUNTS).round().astype(int)
        points = [points[place] for place in keep]
    return points
