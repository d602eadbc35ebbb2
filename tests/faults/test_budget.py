"""The budget is a wall: whatever is asked, in whatever order, no more is spent; the ask that would pass it is refused, not rounded."""

import math
import os

import dp_accounting as dpa
import numpy as np
import pytest
from faults.crash_scenarios import Walk, make_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from privot.data.dataset import Sensitive
from privot.errors import BudgetError
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import AttackPowerTarget, Budget, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.synthesis import synthesize

ADD_REMOVE = Neighbours.ADD_REMOVE
REPLACE = Neighbours.REPLACE

noises = st.floats(0.3, 300.0) | st.sampled_from([0.0, 1.0, 1e6])
stages = st.lists(st.tuples(noises, st.integers(1, 50)), min_size=1, max_size=3)
plans = st.builds(
    lambda parts, relation: Plan(
        tuple(Stage(f"s{n}", "sum", noise, steps) for n, (noise, steps) in enumerate(parts)),
        relation,
    ),
    stages,
    st.sampled_from([ADD_REMOVE, REPLACE]),
)
budgets = st.builds(Budget, st.floats(0.01, 20.0), st.sampled_from([1e-3, 1e-5, 1e-8]))


def independently(granted, delta):
    """What the plans cost together, by a formula of its own: under mixed relations an add/remove answer counts at half its noise."""
    mixed = len({plan.neighbours for plan in granted}) > 1
    halved = [0.5 if mixed and plan.neighbours is ADD_REMOVE else 1.0 for plan in granted]
    terms = [
        (stage.noise_multiplier * half, stage.steps)
        for plan, half in zip(granted, halved, strict=True)
        for stage in plan.stages
    ]
    if any(noise == 0 for noise, _ in terms):
        return math.inf
    mu = math.sqrt(sum(steps / noise**2 for noise, steps in terms))
    return dpa.get_epsilon_gaussian(1 / mu, delta) if mu else 0.0


def wall_holds(folder, budget, asked):
    book = Ledger(folder / "x.jsonl")
    book.path.unlink(missing_ok=True)
    book._head_path.unlink(missing_ok=True)
    book.set_limit(budget)
    granted = []
    for plan in asked:
        before = book.path.read_bytes()
        try:
            book.reserve(plan, "m")
            granted.append(plan)
        except BudgetError:
            assert book.path.read_bytes() == before, "a refusal leaves no line"
            assert independently([*granted, plan], budget.delta) > budget.epsilon * (1 - 1e-9), (
                "refused although it would have fitted"
            )
        assert book.compute_spent_cost().epsilon(budget.delta) <= budget.epsilon
    assert independently(granted, budget.delta) <= budget.epsilon * (1 + 1e-9)
    assert len(Ledger(book.path).entries()) == 1 + len(granted)


LENIENT = [HealthCheck.too_slow]  # the folder is emptied by each example


@pytest.mark.parametrize("examples", [40, pytest.param(1860, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_never_more_than_the_wall(examples, tmp_path, monkeypatch, trust):
    monkeypatch.setattr(
        os, "fsync", lambda file: None
    )  # that lines are durable is shown elsewhere, and takes most of the time
    asked = []

    @settings(max_examples=examples, suppress_health_check=LENIENT)
    @given(budget=budgets, plans=st.lists(plans, min_size=1 if examples < 100 else 5, max_size=8))
    def holds(budget, plans):
        wall_holds(tmp_path, budget, plans)
        asked.append(len(plans))

    holds()
    trust(
        "B3",
        "random plans asked for under a random wall, none beyond it",
        sum(asked),
        of=sum(asked),
    )


@settings(max_examples=20)
@given(budget=budgets, parts=stages, relation=st.sampled_from([ADD_REMOVE, REPLACE]))
def test_a_calibrated_plan_fits_and_a_little_less_noise_does_not(budget, parts, relation):
    plan = Plan(
        tuple(
            Stage(f"s{n}", "sum", noise if 0 < noise < 1e3 else 1.0, steps)
            for n, (noise, steps) in enumerate(parts)
        ),
        relation,
    ).calibrate(budget)
    assert budget.allows(plan.cost())
    assert not budget.allows(plan.scale_noise(1 - 1e-6).cost())


def test_the_last_ask_is_refused_not_rounded(ledger):
    # The wall is exactly what two runs cost: both go, and no third one, however cheap.
    plan = Plan((Stage("s", "sum", 7.0),), REPLACE)
    both = dpa.get_epsilon_gaussian(7.0 / math.sqrt(2), 1e-5)
    ledger.set_limit(
        Budget(
            ledger.compute_spent_cost(
                extra_plan=Plan((*plan.stages, Stage("t", "sum", 7.0)), REPLACE)
            ).epsilon(1e-5)
        )
    )
    ledger.reserve(plan, "one")
    ledger.reserve(plan, "two")
    assert ledger.compute_spent_cost().epsilon(1e-5) == pytest.approx(both, rel=1e-9)
    with pytest.raises(BudgetError):
        ledger.reserve(Plan((Stage("s", "sum", 1e5),), REPLACE), "three")
    assert len(ledger.entries()) == 3


def test_a_sampled_run_meets_the_same_wall(ledger):
    plan = Plan((Stage("s", "sum", 2.0, 20, Poisson(0.1)),), ADD_REMOVE)
    ledger.set_limit(Budget(plan.cost().epsilon(1e-5) * 1.05))
    ledger.reserve(plan, "one")
    with pytest.raises(BudgetError):
        ledger.reserve(plan, "two")
    assert len(ledger.entries()) == 2


# The same wall, seen from a run


def never(*args):
    raise AssertionError("a record was read")


@pytest.mark.parametrize("wall", [Budget(0.5), AttackPowerTarget(0.02, 0.01)])
def test_a_plan_above_its_budget_opens_no_gate(wall, ledger):
    plan = Plan((Stage("s", "sum", 1.0),), REPLACE)
    with pytest.raises(BudgetError, match="costs more"):
        Gate(make_dataset(), plan, ledger, wall)
    assert ledger.entries() == []


def test_a_refused_run_leaves_nothing(tmp_path, ledger, monkeypatch):
    ledger.set_limit(Budget(0.1))
    lines = ledger.path.read_bytes()
    monkeypatch.setattr(Sensitive, "_read_records", never)
    with pytest.raises(BudgetError):
        synthesize(make_dataset(), Walk(), out=tmp_path / "out", ledger=ledger)
    assert ledger.path.read_bytes() == lines
    assert not list(tmp_path.glob("out*"))


def test_the_wall_is_asked_again_at_the_gate(tmp_path, ledger, monkeypatch):
    # Another run may spend what was left between the look at the ledger and the first ask.
    door = Gate(
        make_dataset(),
        Walk().plan(None),
        ledger,
        Budget(5.0),
        method="walk",
        folder=tmp_path / "run",
    )
    ledger.set_limit(Budget(0.1))
    monkeypatch.setattr(Sensitive, "_read_records", never)
    with pytest.raises(BudgetError):
        door.sum("walk", lambda image, label: image.flatten(), clip_norm=1.0)
    assert [each["kind"] for each in ledger.entries()] == ["budget"]
    assert not (tmp_path / "run").exists()


def test_a_stage_has_no_more_steps_than_its_plan(ledger, monkeypatch):
    door = Gate(make_dataset(), Walk(steps=2).plan(None), ledger, Budget(5.0), method="walk")
    ask = {"query": lambda image, label: image.flatten(), "clip_norm": 1.0}
    first = door.sum("walk", **ask)
    second = door.sum("walk", **ask)
    assert not np.array_equal(first, second)
    lines = ledger.entries()
    monkeypatch.setattr(Sensitive, "_read_records", never)
    with pytest.raises(BudgetError, match="used up"):
        door.sum("walk", **ask)
    assert ledger.entries() == lines


def test_a_sweep_is_the_sum_of_its_runs(ledger):
    for _ in range(4):
        synthesize(make_dataset(), Walk(), ledger=ledger)
    noise = Walk().noise_multiplier
    steps = Walk().steps
    assert ledger.compute_spent_cost().epsilon(1e-5) == pytest.approx(
        dpa.get_epsilon_gaussian(noise / math.sqrt(4 * steps), 1e-5), rel=1e-6
    )
