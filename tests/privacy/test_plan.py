"""Plans: what they refuse, how they are calibrated to a budget, and that it is never exceeded."""

import json
import math

import dp_accounting as dpa
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from privot.errors import PlanError, SettingError
from privot.privacy.accounting import Neighbours, PrivacyCost
from privot.privacy.plan import AttackPowerTarget, Budget, Plan, Stage
from privot.privacy.sampling import Fixed, Full, Poisson, Shards

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
TARGETS = st.one_of(
    st.builds(Budget, st.floats(1e-3, 200), st.floats(1e-12, 0.1)),
    st.tuples(st.floats(1e-5, 0.99), st.floats(1e-5, 0.99))
    .filter(lambda rates: abs(rates[0] - rates[1]) > 1e-3)
    .map(lambda rates: AttackPowerTarget(max(rates), min(rates))),
)


def draw_stages(least=1):
    numbers = st.tuples(st.floats(0.01, 100), st.integers(1, 10**6))
    return st.lists(numbers, min_size=least, max_size=4).map(
        lambda stages: tuple(
            Stage(f"s{index}", "sum", noise, steps) for index, (noise, steps) in enumerate(stages)
        )
    )


def check_calibration(stages, target, neighbours):
    fitted = Plan(stages, neighbours).calibrate(target)
    assert target.allows(fitted.cost())
    assert not target.allows(fitted.scale_noise(1 - 1e-6).cost())  # tight
    ratio = fitted.stages[0].noise_multiplier / stages[0].noise_multiplier
    for now, before in zip(fitted.stages, stages, strict=True):
        assert now.noise_multiplier == pytest.approx(ratio * before.noise_multiplier, rel=1e-12)
        assert (now.name, now.steps, now.sampling) == (before.name, before.steps, before.sampling)


calibrations = given(draw_stages(), TARGETS, st.sampled_from([ADD_REMOVE, REPLACE]))


@settings(max_examples=10)
@calibrations
def test_calibration_never_exceeds_the_budget_and_is_tight(stages, target, neighbours):
    check_calibration(stages, target, neighbours)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=1000)
@calibrations
def test_a_thousand_calibrations(stages, target, neighbours):
    check_calibration(stages, target, neighbours)


def check_sampled_calibration(sampler, steps, target):
    stages = (Stage("it", "sum", 1.0, steps, sampler), Stage("once", "sum", 10.0))
    fitted = Plan(stages, sampler.neighbours[0]).calibrate(target)
    assert target.allows(fitted.cost())
    assert not target.allows(fitted.scale_noise(1 - 3e-4).cost())
    multipliers = [stage.noise_multiplier for stage in fitted.stages]
    assert multipliers[1] == pytest.approx(10 * multipliers[0])


def test_calibration_of_a_sampled_stage(coarse_accounting):
    check_sampled_calibration(Shards(20), 100, Budget(1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "steps", "target"),
    [
        (Shards(20), 100, Budget(1.0)),
        (Fixed(1, 50), 1000, Budget(8.0, 1e-6)),
        (Poisson(0.00427), 14_040, Budget(1.0)),
        (Poisson(0.1), 20, AttackPowerTarget(0.2, 0.05)),
    ],
)
def test_calibration_of_sampled_stages_on_fine_grids(sampler, steps, target):
    check_sampled_calibration(sampler, steps, target)


def test_recorded_calibrations():
    """Epsilon 1, delta 1e-5: 3.7306, where the classical formula asks for 4.84; and a known mu."""
    fitted = Plan((Stage("it", "sum", 1.0),), REPLACE).calibrate(Budget(1.0))
    assert fitted.stages[0].noise_multiplier == pytest.approx(3.7306, abs=1e-4)
    fitted = Plan((Stage("it", "sum", 5.0, 7),), LOCAL).calibrate(AttackPowerTarget(0.05, 0.01))
    assert fitted.cost().mu == pytest.approx(norm.ppf(0.05) - norm.ppf(0.01), rel=1e-9)
    assert fitted.cost().max_tpr(0.01) <= 0.05


@settings(max_examples=8)
@given(draw_stages(0))
def test_spending_on_top_of_a_budget_is_refused(stages):
    """What a calibrated plan leaves is less than one more query."""
    plan = Plan((*stages, Stage("more", "sum", 1.0)), REPLACE).calibrate(Budget(1.0))
    again = Plan((*plan.stages, Stage("again", "sum", 100.0)), REPLACE)
    assert not Budget(1.0).allows(again.cost())


def test_a_budget_allows_what_costs_as_much_to_the_last_bit():
    cost = PrivacyCost("it", np.ones_like, lambda delta: 1.0, 1.0)
    assert Budget(1.0).allows(cost)
    assert not Budget(math.nextafter(1.0, 0)).allows(cost)
    power = cost.max_tpr(0.1)
    assert AttackPowerTarget(power, 0.1).allows(cost)
    assert not AttackPowerTarget(math.nextafter(power, 0), 0.1).allows(cost)


def test_no_privacy_is_no_noise():
    plan = Plan((Stage("a", "sum", 3.0), Stage("b", "sum", 4.0)), REPLACE)
    fitted = plan.calibrate(Budget(math.inf))
    assert [stage.noise_multiplier for stage in fitted.stages] == [0, 0]
    assert fitted.event() == dpa.ComposedDpEvent([dpa.NonPrivateDpEvent()] * 2)
    assert not Budget(1e308).allows(fitted.cost())
    assert not AttackPowerTarget(0.99, 0.98).allows(fitted.cost())


@pytest.mark.parametrize(
    ("stages", "budget"),
    [
        ((Stage("a", "sum", 0.0), Stage("b", "sum", 1.0)), Budget(1.0)),  # no factor helps 0
        ((Stage("a", "sum", 1e-9, 10**9),), Budget(0.001, 1e-12)),
    ],
)
def test_budgets_that_no_noise_meets_are_refused(stages, budget):
    with pytest.raises(SettingError, match="larger epsilon"):
        Plan(stages, REPLACE).calibrate(budget)


def test_a_budget_far_away_ends_the_search_and_no_stages_cost_nothing():
    target = Budget(1e16)  # even a millionth of the noise is allowed
    assert target.allows(Plan((Stage("a", "sum", 1.0),), REPLACE).calibrate(target).cost())
    empty = Plan((), REPLACE)
    assert empty.cost().epsilon(1e-9) == 0
    assert empty.calibrate(Budget(1.0)) == empty


# The event is the plan


def test_event_says_what_will_run():
    first = Stage("a", "sum", 2.0)
    second = Stage("b", "query_random_shards", 3.0, 5, Shards(10))
    assert Plan((first,), REPLACE).event() == dpa.GaussianDpEvent(2.0)
    drawn = dpa.SampledWithoutReplacementDpEvent(10, 1, dpa.GaussianDpEvent(3.0))
    assert Plan((first, second), REPLACE).event() == dpa.ComposedDpEvent(
        [dpa.GaussianDpEvent(2.0), dpa.SelfComposedDpEvent(drawn, 5)]
    )


def test_runs_of_two_relations_are_added_up_under_replace():
    stage = Stage("it", "sum", 3.0, 2)
    halved = Stage("it", "sum", 1.5, 2)
    assert Plan((stage,), ADD_REMOVE).under_replace_one() == Plan((halved,), REPLACE)
    assert Plan((stage,), CLIENT).under_replace_one() == Plan((stage,), REPLACE)
    for rate, drawn in ((0.5, 2**29), (1e-12, 1), (1.0, 2**30), (0.3, math.ceil(0.3 * 2**30))):
        sampled = Stage("more", "sum", 1.0, 7, Poisson(rate))
        plan = Plan((stage, sampled), ADD_REMOVE).under_replace_one()
        fixed = Stage("more", "sum", 0.5, 7, Fixed(drawn, 2**30))  # never of a smaller rate
        assert plan == Plan((halved, fixed), REPLACE)
    assert plan.cost(coarse=True).epsilon(1e-5) < math.inf


SAMPLERS = st.sampled_from([Full(), Poisson(0.25), Poisson(1), Fixed(2, 9), Shards(7)])


@given(draw_stages(0), SAMPLERS)
def test_json_round_trip(stages, sampler):
    sampled = Stage("sampled", "query_sample", 1.0, 3, sampler)
    plan = Plan((*stages, sampled), sampler.neighbours[0])
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.event() == plan.event()


STAGE = {
    "name": "a",
    "operation": "sum",
    "noise_multiplier": 1.0,
    "steps": 1,
    "sampling": {"kind": "full"},
}
GOOD = {"neighbours": "replace", "stages": [STAGE]}


@pytest.mark.parametrize(
    "value",
    [
        *(None, 3, "plan", [], {}, {"stages": []}),
        *({**GOOD, "stages": stages} for stages in (3, [None], [STAGE, STAGE])),
        {**GOOD, "neighbours": "friends"},
    ],
)
def test_json_that_is_no_plan_is_refused(value):
    assert Plan.from_json(GOOD) == Plan((Stage("a", "sum", 1.0),), REPLACE)
    with pytest.raises(PlanError):
        Plan.from_json(value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("noise_multiplier", bad) for bad in ("1", -1.0, math.nan, math.inf, 1e-200, None)),
        *(("steps", bad) for bad in (0, -1, 1.5, "3")),
        ("extra", 1),
        ("name", [1]),
        ("sampling", None),
        ("sampling", {}),
        ("sampling", {"kind": "shuffle"}),
        ("sampling", {"kind": []}),
        ("sampling", {"kind": "full", "sample_rate": 0.1}),
        ("sampling", {"kind": "poisson", "sample_rate": 0.1}),
        ("sampling", {"kind": "shards", "num_shards": 2.5}),
        ("sampling", {"kind": "shards", "num_shards": 0}),
        ("sampling", {"kind": "fixed", "sample_size": 1.5, "dataset_size": 3}),
        ("sampling", {"kind": "fixed", "sample_size": 5, "dataset_size": 3}),
        ("sampling", {"kind": "fixed", "sample_size": 1}),
    ],
)
def test_a_bad_field_of_a_stage_is_refused(field, value):
    with pytest.raises(PlanError):
        Plan.from_json({**GOOD, "stages": [{**STAGE, field: value}]})


@pytest.mark.parametrize("neighbours", Neighbours)
@pytest.mark.parametrize("sampler", [Full(), Poisson(0.1), Fixed(1, 9), Shards(3)])
def test_a_sampler_runs_under_its_own_relations_alone(sampler, neighbours):
    stages = (Stage("it", "sum", 1.0, 1, sampler),)
    if neighbours in sampler.neighbours:
        assert Plan(stages, neighbours).cost(coarse=True).epsilon(1e-5) > 0
    else:
        with pytest.raises(PlanError, match="no proof"):
            Plan(stages, neighbours)


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        *(((noise,), "multiplier") for noise in (-1.0, math.nan, math.inf, 1e-30, 1e30)),
        *(((1.0, steps), "at least 1") for steps in (0, -5)),
        ((1.0, 1, Poisson(0.5), "laplace"), "no proof"),
        ((1.0, 1, Full(), "lucky"), "no proof"),
    ],
)
def test_stages_without_a_number_or_a_proof_are_refused(numbers, match):
    with pytest.raises(PlanError, match=match):
        Stage("it", "sum", *numbers)


@pytest.mark.parametrize(
    ("target", "numbers", "match"),
    [
        *((Budget, (epsilon, 1e-5), "epsilon") for epsilon in (0, -1, math.nan)),
        *((Budget, (1, delta), "delta") for delta in (0, 1, -1e-5, math.nan)),
        (AttackPowerTarget, (0.01, 0.05), "max-tpr"),
        (AttackPowerTarget, (0.05, 0.05), "max-tpr"),
        (AttackPowerTarget, (0.5, 0), "max-tpr"),
        (AttackPowerTarget, (1, 0.1), "max-tpr"),
        (AttackPowerTarget, (math.nan, 0.1), "max-tpr"),
        (AttackPowerTarget, (0.05, 0.01, 0.0), "delta"),
    ],
)
def test_targets_that_are_no_limit_are_refused(target, numbers, match):
    with pytest.raises(SettingError, match=match):
        target(*numbers)
