"""Plans: what they refuse, how they are calibrated to a wall, and that the wall is never passed."""

import json
import math

import dp_accounting as dpa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from privot.errors import PlanError, SettingError
from privot.privacy.accounting import Neighbours
from privot.privacy.plan import AttackPowerTarget, Budget, Plan, Stage
from privot.privacy.sampling import Fixed, Full, Poisson, Shards

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours


def stages(least=1):
    one = st.tuples(st.floats(0.01, 100), st.integers(1, 10**6))
    return st.lists(one, min_size=least, max_size=4).map(
        lambda numbers: tuple(
            Stage(f"s{place}", "sum", noise, steps) for place, (noise, steps) in enumerate(numbers)
        )
    )


def walls():
    budget = st.builds(Budget, st.floats(1e-3, 200), st.floats(1e-12, 0.1))
    rates = st.tuples(st.floats(1e-5, 0.99), st.floats(1e-5, 0.99)).filter(
        lambda pair: abs(pair[0] - pair[1]) > 1e-3
    )
    return st.one_of(budget, rates.map(lambda pair: AttackPowerTarget(max(pair), min(pair))))


def check_calibration(parts, wall, relation):
    plan = Plan(parts, relation)
    fitted = plan.calibrate(wall)
    assert wall.allows(fitted.cost())
    assert not wall.allows(fitted.scale_noise(1 - 1e-6).cost())  # tight
    ratios = [
        now.noise_multiplier / before.noise_multiplier
        for now, before in zip(fitted.stages, plan.stages, strict=True)
    ]
    assert max(ratios) <= min(ratios) * (1 + 1e-12)
    assert [(each.name, each.steps, each.sampling) for each in fitted.stages] == [
        (each.name, each.steps, each.sampling) for each in parts
    ]


@settings(max_examples=25)
@given(stages(), walls(), st.sampled_from([ADD_REMOVE, REPLACE]))
def test_calibration_never_passes_the_wall_and_is_tight(parts, wall, relation):
    check_calibration(parts, wall, relation)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=3000)
@given(stages(), walls(), st.sampled_from([ADD_REMOVE, REPLACE]))
def test_three_thousand_calibrations(parts, wall, relation):
    check_calibration(parts, wall, relation)


@pytest.mark.parametrize(
    ("sampler", "steps", "wall"),
    [
        (Shards(20), 100, Budget(1.0)),
        pytest.param(Fixed(1, 50), 1000, Budget(8.0, 1e-6), marks=pytest.mark.slow),
        pytest.param(Poisson(0.00427), 14_040, Budget(1.0), marks=pytest.mark.slow),
        pytest.param(Poisson(0.1), 20, AttackPowerTarget(0.2, 0.05), marks=pytest.mark.slow),
    ],
)
def test_calibration_of_sampled_stages(sampler, steps, wall):
    fitted = Plan(
        (Stage("it", "sum", 1.0, steps, sampler), Stage("once", "sum", 10.0)), sampler.neighbours[0]
    ).calibrate(wall)
    assert wall.allows(fitted.cost())
    assert not wall.allows(fitted.scale_noise(1 - 3e-4).cost())
    assert fitted.stages[1].noise_multiplier == pytest.approx(
        10 * fitted.stages[0].noise_multiplier
    )


def test_recorded_calibration():
    """One Gaussian at epsilon 1, delta 1e-5: 3.7306 (analytic; the classical formula asks for 4.84)."""
    assert Plan((Stage("it", "sum", 1.0),), REPLACE).calibrate(Budget(1.0)).stages[
        0
    ].noise_multiplier == pytest.approx(3.7306, abs=1e-4)


def test_the_two_walls_agree():
    """mu of a Gaussian is ppf(tpr) - ppf(fpr), whichever way the wall is said."""
    fitted = Plan((Stage("it", "sum", 5.0, 7),), LOCAL).calibrate(AttackPowerTarget(0.05, 0.01))
    assert fitted.cost().mu == pytest.approx(norm.ppf(0.05) - norm.ppf(0.01), rel=1e-9)
    assert fitted.cost().max_tpr(0.01) <= 0.05


@settings(max_examples=30)
@given(stages(0))
def test_spending_on_top_of_a_wall_is_refused(parts):
    """What a calibrated plan leaves is less than one more look."""
    plan = Plan((*parts, Stage("more", "sum", 1.0)), REPLACE).calibrate(Budget(1.0))
    again = Plan((*plan.stages, Stage("again", "sum", 100.0)), REPLACE)
    assert not Budget(1.0).allows(again.cost())


def test_no_privacy_is_no_noise():
    fitted = Plan((Stage("a", "sum", 3.0), Stage("b", "sum", 4.0)), REPLACE).calibrate(
        Budget(math.inf)
    )
    assert [stage.noise_multiplier for stage in fitted.stages] == [0, 0]
    assert fitted.event() == dpa.ComposedDpEvent([dpa.NonPrivateDpEvent()] * 2)
    assert not Budget(1e308).allows(fitted.cost())
    assert not AttackPowerTarget(0.99, 0.98).allows(fitted.cost())


def test_impossible_walls_are_named():
    with pytest.raises(SettingError, match="larger epsilon"):
        Plan((Stage("a", "sum", 0.0), Stage("b", "sum", 1.0)), REPLACE).calibrate(
            Budget(1.0)
        )  # no factor helps a stage without noise
    with pytest.raises(SettingError, match="larger epsilon"):
        Plan((Stage("a", "sum", 1e-9, 10**9),), REPLACE).calibrate(Budget(0.001, 1e-12))


def test_a_wall_far_away_ends_the_search():
    wall = Budget(1e16)  # even a millionth of the noise stays inside
    assert wall.allows(Plan((Stage("a", "sum", 1.0),), REPLACE).calibrate(wall).cost())


def test_a_plan_without_stages_costs_nothing():
    plan = Plan((), REPLACE)
    assert plan.cost().epsilon(1e-9) == 0
    assert plan.calibrate(Budget(1.0)) == plan
    assert Plan.from_json(plan.to_json()) == plan


# The event is the plan


def test_event_says_what_will_run():
    one = Stage("a", "sum", 2.0)
    many = Stage("b", "query_random_shards", 3.0, 5, Shards(10))
    assert Plan((one,), REPLACE).event() == dpa.GaussianDpEvent(2.0)
    drawn = dpa.SampledWithoutReplacementDpEvent(10, 1, dpa.GaussianDpEvent(3.0))
    assert Plan((one, many), REPLACE).event() == dpa.ComposedDpEvent(
        [dpa.GaussianDpEvent(2.0), dpa.SelfComposedDpEvent(drawn, 5)]
    )


SAMPLERS = st.sampled_from([Full(), Poisson(0.25), Poisson(1), Fixed(2, 9), Shards(7)])


@given(stages(0), SAMPLERS)
def test_json_round_trip(parts, sampler):
    plan = Plan((*parts, Stage("sampled", "query_sample", 1.0, 3, sampler)), sampler.neighbours[0])
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.event() == plan.event()


GOOD = {
    "neighbours": "replace",
    "stages": [
        {
            "name": "a",
            "operation": "sum",
            "noise_multiplier": 1.0,
            "steps": 1,
            "sampling": {"kind": "full"},
        }
    ],
}


def edited(**fields):
    return {**GOOD, "stages": [{**GOOD["stages"][0], **fields}]}


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "plan",
        [],
        {},
        {"stages": []},
        {**GOOD, "neighbours": "friends"},
        {**GOOD, "stages": 3},
        {**GOOD, "stages": [None]},
        {**GOOD, "stages": GOOD["stages"] * 2},
        edited(noise_multiplier="1"),
        edited(noise_multiplier=-1.0),
        edited(noise_multiplier=math.nan),
        edited(noise_multiplier=math.inf),
        edited(noise_multiplier=1e-200),
        edited(noise_multiplier=None),
        edited(steps=0),
        edited(steps=-1),
        edited(steps=1.5),
        edited(steps="3"),
        edited(extra=1),
        edited(name=[1]),
        edited(sampling=None),
        edited(sampling={}),
        edited(sampling={"kind": "shuffle"}),
        edited(sampling={"kind": []}),
        edited(sampling={"kind": "full", "sample_rate": 0.1}),
        edited(sampling={"kind": "poisson", "sample_rate": 0.1}),
        edited(sampling={"kind": "shards", "num_shards": 2.5}),
        edited(sampling={"kind": "shards", "num_shards": 0}),
        edited(sampling={"kind": "fixed", "sample_size": 1.5, "dataset_size": 3}),
        edited(sampling={"kind": "fixed", "sample_size": 5, "dataset_size": 3}),
        edited(sampling={"kind": "fixed", "sample_size": 1}),
    ],
)
def test_bad_json_is_refused(value):
    with pytest.raises(PlanError):
        Plan.from_json(value)


def test_good_json_is_not():
    assert Plan.from_json(GOOD) == Plan((Stage("a", "sum", 1.0),), REPLACE)


@pytest.mark.parametrize("relation", Neighbours)
@pytest.mark.parametrize("sampler", [Full(), Poisson(0.1), Fixed(1, 9), Shards(3)])
def test_a_sampler_runs_under_its_own_relations_alone(sampler, relation):
    parts = (Stage("it", "sum", 1.0, 1, sampler),)
    if relation in sampler.neighbours:
        assert Plan(parts, relation).cost().epsilon(1e-5) > 0
    else:
        with pytest.raises(PlanError, match="no proof"):
            Plan(parts, relation)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_noise(bad):
    with pytest.raises(PlanError, match="multiplier"):
        Stage("it", "sum", bad)


@pytest.mark.parametrize("steps", [0, -5])
def test_bad_steps(steps):
    with pytest.raises(PlanError, match="at least 1"):
        Stage("it", "sum", 1.0, steps)


# Walls


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [(0, 1e-5), (-1, 1e-5), (math.nan, 1e-5), (1, 0), (1, 1), (1, -1e-5), (1, math.nan)],
)
def test_bad_budgets(epsilon, delta):
    with pytest.raises(SettingError):
        Budget(epsilon, delta)


@pytest.mark.parametrize(
    ("tpr", "fpr"), [(0.01, 0.05), (0.05, 0.05), (0.5, 0), (1, 0.1), (math.nan, 0.1)]
)
def test_bad_risks(tpr, fpr):
    with pytest.raises(SettingError, match="max-tpr"):
        AttackPowerTarget(tpr, fpr)


def test_risk_carries_its_delta():
    assert AttackPowerTarget(0.05, 0.01, 1e-6).delta == 1e-6
    with pytest.raises(SettingError, match="delta"):
        AttackPowerTarget(0.05, 0.01, 0.0)
