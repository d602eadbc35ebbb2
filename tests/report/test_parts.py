"""The parts of a report, each against a plain computation of the same thing."""

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.factories import GAUSSIAN, make_attack_result, make_release

from privot.audit.result import AttackResult, load_attack_results
from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.privacy.guarantee import Guarantee
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Fixed, Full, Poisson, Shards
from privot.report.charts import attack_power_chart, epsilon_chart
from privot.report.formatting import (
    clean_text,
    format_number,
    format_percent,
    format_rounded_down,
    format_rounded_up,
)
from privot.report.html import describe_sampling, format_number_or_text
from privot.report.privacy_curves import (
    CURVE_FALSE_POSITIVE_RATES,
    cache_cost,
    compute_epsilon_by_step,
    compute_max_tpr_curve,
)
from privot.report.statement import build_statement
from privot.report.utility import find_published_results, load_published_results

SAMPLED = Plan(
    (Stage("warm up", "sum", 20.0), Stage("steps", "sum", 3.0, 60, Poisson(0.02))),
    Neighbours.ADD_REMOVE,
)


# Words


@given(st.text(max_size=100))
def test_clean_text_is_one_short_line_of_visible_characters(text):
    cleaned = clean_text(text, 40)
    assert 0 < len(cleaned) <= 40
    assert "\n" not in cleaned
    assert all(letter.isprintable() or letter in "\u200c\u200d" for letter in cleaned)
    assert clean_text(cleaned, 40) == cleaned


@given(st.floats(1e-12, 1e12))
def test_claims_are_rounded_up_and_measurements_down(value):
    up = float(format_rounded_up(value).replace(",", ""))
    down = float(format_rounded_down(value).replace(",", ""))
    assert value * 0.9989 <= down <= value * (1 + 1e-9)
    assert value * (1 - 1e-9) <= up <= value * 1.0011


@given(st.floats(1e-15, 1))
def test_claimed_percentages_are_rounded_up_and_lower_bounds_down(value):
    down = format_percent(value, rounding="down")
    assert float(format_percent(value).rstrip(" %")) >= 100 * value * (1 - 1e-8)
    assert float(down.rstrip(" %")) <= 100 * value * (1 + 1e-9)
    assert (down == "100 %") is (value * (1 + 1e-9) >= 1)


def test_numbers_without_end_and_without_a_value_have_words():
    huge = 10**400
    for shown in (format_number(huge), format_number_or_text(huge), format_rounded_up(huge)):
        assert shown == "more than 1e300"
    values = (-huge, 10**20, math.inf, math.nan, True, None)
    words = ["less than -1e300", "1e20", "infinite", "unknown", "true", "(none)"]
    assert [format_number(value) for value in values] == words


def test_every_sampler_has_words():
    words = {
        Full(): "all",
        Poisson(0.01): "each with probability 0.01",
        Fixed(50, 60000): "50 of 60,000, without replacement",
        Shards(1000): "one secret shard of 1,000",
    }
    for sampler, text in words.items():
        fields = {"kind": type(sampler).__name__.lower(), **vars(sampler)}
        assert describe_sampling(fields) == text
    assert describe_sampling({"kind": "odd"}) == '{"kind": "odd"}'


def test_the_statement_names_a_weak_promise_and_declared_class_sizes():
    claim = Guarantee.from_plan(GAUSSIAN, 1e-5)
    one_stage = Plan((Stage("means", "sum", 0.3),), Neighbours.REPLACE)
    for guarantee, weak in ((claim, False), (Guarantee.from_plan(one_stage, 1e-5), True)):
        promise = build_statement(guarantee, Spec((1, 8, 8), 2))["promise"]
        assert any("promises little" in line for line in promise) is weak
    for sizes, keeps in ((None, False), ((2, 2), True)):
        neighbours = build_statement(claim, Spec((1, 8, 8), 2, 4, sizes))["neighbours"]
        assert ("keeps the label" in neighbours) is keeps


# Spending


PLANS = pytest.mark.parametrize("plan", [GAUSSIAN, SAMPLED], ids=["gauss", "pld"])


@pytest.mark.usefixtures("coarse_accounting")
@PLANS
def test_the_curve_is_the_certificate_at_every_rate(plan):
    curve = compute_max_tpr_curve(cache_cost(plan.cost()))
    plain = plan.cost()
    for position in (0, 17, 40):
        power = plain.max_tpr(CURVE_FALSE_POSITIVE_RATES[position])
        assert curve["tpr"][position] == pytest.approx(power, rel=1e-5)
    assert (curve["fpr"][0], curve["tpr"][-1]) == (1e-4, 1)
    assert curve["tpr"] == sorted(curve["tpr"])


@pytest.mark.usefixtures("coarse_accounting")
@PLANS
def test_epsilon_grows_to_the_claim(plan):
    claim = Guarantee.from_plan(plan, 1e-5)
    steps = compute_epsilon_by_step(plan, claim)
    counts = [row["steps"] for row in steps]
    epsilons = [row["epsilon"] for row in steps]
    assert (counts, epsilons) == (sorted(set(counts)), sorted(epsilons))
    assert [steps[0]["stage"], steps[-1]["stage"]] == [stage.name for stage in plan.stages]
    assert (counts[0], counts[-1]) == (1, sum(stage.steps for stage in plan.stages))
    first = replace(plan, stages=plan.stages[:1]).cost().epsilon(1e-5)
    assert epsilons[0] == pytest.approx(first, rel=1e-5)
    assert epsilons[-1] == pytest.approx(claim.epsilon)
    middle = len(steps) // 2
    second = replace(plan.stages[1], steps=counts[middle] - 1)
    part = replace(plan, stages=(plan.stages[0], second))
    assert epsilons[middle] == pytest.approx(part.cost().epsilon(1e-5), rel=1e-3)
    assert str(epsilon_chart(steps)).count("<circle") == len(steps)


@pytest.mark.parametrize("num_stages", [1, 2, 5, 12, 40])
def test_few_accounts_are_made_however_long_the_plan(num_stages, monkeypatch):
    stages = tuple(Stage(f"s{number}", "sum", 50.0, 1000) for number in range(num_stages))
    plan = Plan(stages, Neighbours.REPLACE)
    claim = Guarantee.from_plan(plan, 1e-5)
    calls = []
    cost = Plan.cost
    monkeypatch.setattr(
        Plan, "cost", lambda self, coarse=False: calls.append(1) or cost(self, coarse)
    )
    steps = compute_epsilon_by_step(plan, claim)
    assert len(calls) < len(steps) <= 12
    assert steps[-1]["steps"] == 1000 * num_stages


def test_one_step_needs_no_account():
    plan = Plan((Stage("means", "sum", 3.0),), Neighbours.REPLACE)
    assert compute_epsilon_by_step(plan, Guarantee.from_plan(plan, 1e-5)) == []


# Attacks

OPTIONAL = {
    "auc": 0.53,
    "perfect_attack_tpr_lower": (0.8, 0.9),
    "roc_curve": ((0.01, 1.0), (0.02, 1.0)),
    "controls_summary": "finds all of a control",
    "warning": "few shadows",
    "verdict": "proves little",
    "verdict_refutes_guarantee": True,
}


def test_an_attack_comes_back_from_json(tmp_path):
    plain = make_attack_result()
    whole = replace(plain, **OPTIONAL)
    short = {key: value for key, value in asdict(plain).items() if key not in OPTIONAL}
    path = tmp_path / "attacks.json"
    path.write_text(json.dumps({"attacks": [asdict(plain), asdict(whole), short]}))
    assert load_attack_results(path) == [plain, whole, plain]


@pytest.mark.parametrize(
    "other",
    [
        {"method": "mean"},
        {"settings": {"noise_multiplier": 1.0}},
        {"claimed": 2.0},
        {"claimed": None},
        {"claimed": "1"},
    ],
)
def test_an_audit_stands_beside_a_release_of_its_own_method_alone(tmp_path, other):
    settings = {"noise_multiplier": None}
    release = make_release(settings=settings)
    claimed = release.guarantee.epsilon * 1.0001
    audited = {"method": "handmade", "settings": settings, "claimed": claimed}
    audit = AttackResult("audit", (), (), (), 0.95, True, verdict="proves nothing")
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps({"audited": audited, "attacks": [asdict(audit)]}))
    assert load_attack_results(path, release) == [audit]
    path.write_text(json.dumps({"audited": audited | other, "attacks": [asdict(audit)]}))
    with pytest.raises(ReleaseError, match="audit"):
        load_attack_results(path, release)
    with pytest.raises(ReleaseError, match="1 to 200 numbers"):  # neither rates nor a verdict
        replace(audit, verdict="")


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": 3},
        {"publishable": 1},
        {"publishable": "no"},
        {"fpr": [0.1]},
        {"fpr": [True, 0.1]},
        {"tpr": ["0.1", 0.2]},
        {"tpr": [0.1, 1.5]},
        {"tpr_lower": [0.5, 0.5]},
        {"tpr_lower": 0.1},
        {"confidence": 1},
        {"confidence": None},
        {"extra": 1},
        {"fpr": [], "tpr": [], "tpr_lower": []},
        {"auc": 1.5},
        {"auc": "0.5"},
        {"perfect_attack_tpr_lower": [0.5]},
        {"perfect_attack_tpr_lower": [0.5, 2.0]},
        {"roc_curve": [[0.5], []]},
        {"roc_curve": 3},
        {"controls_summary": 1},
        {"verdict_refutes_guarantee": 0},
        {"verdict": None},
        {"tpr": [math.nan, 0.2]},
        {"fpr": [0.1] * 201, "tpr": [0.1] * 201, "tpr_lower": [0.1] * 201},
    ],
)
def test_an_attack_of_the_wrong_kind_is_refused(wrong):
    assert AttackResult.from_json(asdict(make_attack_result())) == make_attack_result()
    with pytest.raises(ReleaseError, match="attack"):
        AttackResult.from_json({**asdict(make_attack_result()), **wrong})


@pytest.mark.parametrize("inside", ["", "[]", '{"attacks": 3}', '{"attacks": [{}]}', "\x00"])
def test_a_file_that_holds_no_attacks_is_refused(tmp_path, inside):
    (tmp_path / "attacks.json").write_text(inside)
    with pytest.raises(ReleaseError, match="attack"):
        load_attack_results(tmp_path / "attacks.json")


def test_a_measured_rate_of_zero_accuses_nobody_and_is_drawn_on_the_edge():
    with pytest.raises(ReleaseError, match="Give an upper bound of the false-positive rate"):
        make_attack_result(fpr=(0.0, 0.1))
    attack = make_attack_result(fpr=(0.0, 0.1), lower=(0.0, 0.08))
    assert attack.exceeds_bound(lambda rate: rate) == (False, False)
    certain = make_attack_result(fpr=(0.0, 1.0), tpr=(0.0, 1.0), lower=(0.0, 1.0))
    facts = {**asdict(certain), "exceeds_max_tpr": [False, False]}
    assert "nan" not in str(attack_power_chart(None, [facts]))


# Published figures


def test_published_figures_are_shares_and_scores():
    published = load_published_results()
    assert {row["data"] for row in published["figures"]} == {"mnist", "fashion-mnist", "celeba"}
    for row in [*published["figures"], *published["real"]]:
        assert row["source"]
        assert ("delta not known" in row["source"]) is (row["data"] == "celeba")
        for name, value in row["figures"].items():
            assert 0 < value <= 1 if name.endswith("accuracy") else 0 < value < 500
    [best] = [
        row["figures"]
        for row in published["figures"]
        if (row["data"], row["source"], row["method"]) == ("mnist", "GS-WGAN, Table 1", "GS-WGAN")
    ]
    assert (best["is"], best["fid"]) == (9.23, 61.34)
    assert (best["mlp_accuracy"], best["cnn_accuracy"]) == (0.79, 0.8)
    assert (best["avg_accuracy"], best["calibrated_accuracy"]) == (0.6, 0.69)


@pytest.mark.parametrize(
    ("epsilon", "closest"),
    [(0.01, 0.2), (0.4, 0.2), (0.5, 1), (3, 1), (4, 10), (1e4, 10), (math.inf, math.inf)],
)
def test_the_closest_epsilon_is_shown(epsilon, closest):
    rows = find_published_results("mnist", epsilon, ["cnn_accuracy"])
    assert {row["epsilon"] for row in rows} == {closest}


def test_nothing_stands_beside_what_nobody_published():
    for query in (("scans", 1.0, ["fid"]), ("mnist", 1.0, ["mine"]), ("mnist", None, ["fid"])):
        assert find_published_results(*query) == []
