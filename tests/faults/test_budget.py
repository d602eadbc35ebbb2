"""The budget is a limit: whatever is asked, in whatever order, no more is spent; the query that would pass it is refused, not rounded."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from faults.crash_scenarios import Walk, make_dataset, raise_if_read
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from privot.data.dataset import Sensitive
from privot.errors import BudgetError
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget, Plan, Stage
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


def compute_epsilon_independently(granted, delta):
    """What the plans cost together, by a formula of its own: under mixed relations an add/remove answer counts at half its noise."""
    mixed = len({plan.neighbours for plan in granted}) > 1
    terms = [
        (stage.noise_multiplier * (0.5 if mixed and plan.neighbours is ADD_REMOVE else 1.0), stage)
        for plan in granted
        for stage in plan.stages
    ]
    if any(noise == 0 for noise, _ in terms):
        return math.inf
    mu = math.sqrt(sum(stage.steps / noise**2 for noise, stage in terms))
    return dpa.get_epsilon_gaussian(1 / mu, delta) if mu else 0.0


def check_limit(folder, budget, asked):
    ledger = Ledger(folder / "x.jsonl")
    ledger.path.unlink(missing_ok=True)
    ledger._head_path.unlink(missing_ok=True)
    ledger.set_limit(budget)
    granted = []
    for plan in asked:
        before = ledger.path.read_bytes()
        try:
            ledger.reserve(plan, "m")
            granted.append(plan)
        except BudgetError:
            assert ledger.path.read_bytes() == before, "a refusal leaves no line"
            wanted = compute_epsilon_independently([*granted, plan], budget.delta)
            assert wanted > budget.epsilon * (1 - 1e-9), "refused although it would have fitted"
        assert ledger.compute_spent_cost().epsilon(budget.delta) <= budget.epsilon
    spent = compute_epsilon_independently(granted, budget.delta)
    assert spent <= budget.epsilon * (1 + 1e-9)
    assert len(Ledger(ledger.path).entries()) == 1 + len(granted)


@pytest.mark.parametrize("examples", [20, pytest.param(1860, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_never_more_than_the_limit(examples, tmp_path, trust):
    asked = []

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(budget=budgets, plans=st.lists(plans, min_size=1 if examples < 100 else 5, max_size=8))
    def check(budget, plans):
        check_limit(tmp_path, budget, plans)
        asked.append(len(plans))

    check()
    count = sum(asked)
    trust("B3", "random plans under a random limit, none beyond it", count, of=count)


def test_the_last_query_is_refused_not_rounded(ledger):
    # The limit is exactly what two runs cost: both go, and no third one, however cheap.
    plan = Plan((Stage("s", "sum", 7.0),), REPLACE)
    both = Plan((*plan.stages, Stage("t", "sum", 7.0)), REPLACE)
    ledger.set_limit(Budget(ledger.compute_spent_cost(extra_plan=both).epsilon(1e-5)))
    ledger.reserve(plan, "one")
    ledger.reserve(plan, "two")
    assert ledger.compute_spent_cost().epsilon(1e-5) == pytest.approx(
        dpa.get_epsilon_gaussian(7.0 / math.sqrt(2), 1e-5), rel=1e-9
    )
    with pytest.raises(BudgetError):
        ledger.reserve(Plan((Stage("s", "sum", 1e5),), REPLACE), "three")
    assert len(ledger.entries()) == 3


@pytest.mark.usefixtures("coarse_accounting")
def test_a_sampled_run_meets_the_same_limit(ledger):
    plan = Plan((Stage("s", "sum", 2.0, 20, Poisson(0.1)),), ADD_REMOVE)
    ledger.set_limit(Budget(plan.cost().epsilon(1e-5) * 1.05))
    ledger.reserve(plan, "one")
    with pytest.raises(BudgetError):
        ledger.reserve(plan, "two")
    assert len(ledger.entries()) == 2


# The same limit, seen from a run


def test_a_refused_run_leaves_nothing(tmp_path, ledger, monkeypatch):
    # At the gate, too: another run may spend what was left between the look at the ledger and the first query.
    plan = Walk().plan(None)
    folder = tmp_path / "run"
    gate = Gate(make_dataset(), plan, ledger, Budget(5.0), method="walk", folder=folder)
    ledger.set_limit(Budget(0.1))
    lines = ledger.path.read_bytes()
    monkeypatch.setattr(Sensitive, "_read_records", raise_if_read)
    with pytest.raises(BudgetError):
        gate.sum("walk", lambda image, label: image.flatten(), clip_norm=1.0)
    with pytest.raises(BudgetError):
        synthesize(make_dataset(), Walk(), out=tmp_path / "out", ledger=ledger)
    assert ledger.path.read_bytes() == lines
    assert [entry["kind"] for entry in ledger.entries()] == ["budget"]
    assert not folder.exists()
    assert not list(tmp_path.glob("out*"))


def test_a_stage_has_no_more_steps_than_its_plan(ledger, monkeypatch):
    gate = Gate(make_dataset(), Walk(steps=2).plan(None), ledger, Budget(5.0), method="walk")
    query = {"query": lambda image, label: image.flatten(), "clip_norm": 1.0}
    assert not np.array_equal(gate.sum("walk", **query), gate.sum("walk", **query))
    lines = ledger.entries()
    monkeypatch.setattr(Sensitive, "_read_records", raise_if_read)
    with pytest.raises(BudgetError, match="used up"):
        gate.sum("walk", **query)
    assert ledger.entries() == lines


def test_a_sweep_is_the_sum_of_its_runs(ledger):
    for _ in range(4):
        synthesize(make_dataset(), Walk(), ledger=ledger)
    noise = Walk().noise_multiplier / math.sqrt(4 * Walk().steps)
    assert ledger.compute_spent_cost().epsilon(1e-5) == pytest.approx(
        dpa.get_epsilon_gaussian(noise, 1e-5), rel=1e-6
    )
