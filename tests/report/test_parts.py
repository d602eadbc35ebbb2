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


@given(st.text(max_size=300))
def test_clean_text_is_one_short_line_of_visible_characters(text):
    said = clean_text(text, 40)
    assert 0 < len(said) <= 40
    assert "\n" not in said
    assert all(each.isprintable() or each in "\u200c\u200d" for each in said)
    assert clean_text(said, 40) == said


@given(st.floats(1e-12, 1e12))
def test_a_claim_is_never_rounded_down(value):
    shown = float(format_rounded_up(value).replace(",", ""))
    assert shown >= value * (1 - 1e-9)
    assert shown <= value * 1.0011


@given(st.floats(1e-15, 1))
def test_a_percentage_is_never_rounded_down(value):
    assert float(format_percent(value).rstrip(" %")) >= 100 * value * (1 - 1e-8)


@given(st.floats(1e-12, 1e12))
def test_what_was_measured_is_never_rounded_up(value):
    shown = float(format_rounded_down(value).replace(",", ""))
    assert value * 0.9989 <= shown <= value * (1 + 1e-9)


@given(st.floats(1e-12, 1))
def test_a_lower_bound_is_never_rounded_up(value):
    assert float(format_percent(value, rounding="down").rstrip(" %")) <= 100 * value * (1 + 1e-9)
    assert (format_percent(value, rounding="down") == "100 %") is (value * (1 + 1e-9) >= 1)


def test_whole_numbers_without_end_are_shown():
    assert [
        format_number(10**400),
        format_number(-(10**400)),
        format_number_or_text(10**400),
        format_rounded_up(10**400),
    ] == [
        f"{more} than {sign}1e300"
        for more, sign in (
            ("more", ""),
            ("less", "-"),
            ("more", ""),
            ("more", ""),
        )
    ]
    assert format_number(10**20) == "1e20"


def test_numbers_that_are_none_are_said_so():
    assert [format_number(each) for each in (math.inf, math.nan, True, None)] == [
        "infinite",
        "unknown",
        "true",
        "(none)",
    ]


def test_every_sampler_has_words():
    kinds = (Full(), Poisson(0.01), Fixed(50, 60000), Shards(1000))
    said = [
        describe_sampling({"kind": type(each).__name__.lower(), **vars(each)}) for each in kinds
    ]
    assert said == [
        "all",
        "each with probability 0.01",
        "50 of 60,000, without replacement",
        "one secret shard of 1,000",
    ]
    assert describe_sampling({"kind": "odd"}) == '{"kind": "odd"}'


def test_a_large_epsilon_is_called_what_it_is():
    plan = Plan((Stage("means", "sum", 0.3),), Neighbours.REPLACE)
    for claim, weak in (
        (Guarantee.from_plan(plan, 1e-5), True),
        (Guarantee.from_plan(GAUSSIAN, 1e-5), False),
    ):
        assert (
            any(
                "promises little" in each
                for each in build_statement(claim, Spec((1, 8, 8), 2))["promise"]
            )
            is weak
        )


def test_declared_class_sizes_keep_the_label():
    claim = Guarantee.from_plan(GAUSSIAN, 1e-5)
    assert "keeps the label" in build_statement(claim, Spec((1, 8, 8), 2, 4, (2, 2)))["neighbours"]
    assert "keeps the label" not in build_statement(claim, Spec((1, 8, 8), 2, 4))["neighbours"]


# Spending


@pytest.mark.parametrize("plan", [GAUSSIAN, SAMPLED], ids=["gauss", "pld"])
def test_the_curve_is_the_certificate_at_every_rate(plan):
    drawn = compute_max_tpr_curve(cache_cost(plan.cost()))
    plain = plan.cost()
    for place in (0, 17, 40):
        assert drawn["tpr"][place] == pytest.approx(
            plain.max_tpr(CURVE_FALSE_POSITIVE_RATES[place]), rel=1e-5
        )
    assert drawn["fpr"][0] == 1e-4
    assert drawn["tpr"][-1] == 1
    assert drawn["tpr"] == sorted(drawn["tpr"])


@pytest.mark.parametrize("plan", [GAUSSIAN, SAMPLED], ids=["gauss", "pld"])
def test_epsilon_grows_to_the_claim(plan):
    claim = Guarantee.from_plan(plan, 1e-5)
    steps = compute_epsilon_by_step(plan, claim)
    assert [each["steps"] for each in steps] == sorted({each["steps"] for each in steps})
    assert [each["epsilon"] for each in steps] == sorted(each["epsilon"] for each in steps)
    assert steps[-1] == {
        "stage": plan.stages[-1].name,
        "steps": sum(each.steps for each in plan.stages),
        "epsilon": pytest.approx(claim.epsilon),
    }
    first = replace(plan, stages=plan.stages[:1]).cost().epsilon(1e-5)
    assert steps[0] == {
        "stage": plan.stages[0].name,
        "steps": 1,
        "epsilon": pytest.approx(first, rel=1e-5),
    }
    half = steps[len(steps) // 2]
    part = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], steps=half["steps"] - 1)))
    assert half["epsilon"] == pytest.approx(part.cost().epsilon(1e-5), rel=1e-3)
    assert str(epsilon_chart(steps)).count("<circle") == len(steps)


@pytest.mark.parametrize("stages", [1, 2, 5, 12, 40])
def test_few_accounts_are_made_however_long_the_plan(stages, monkeypatch):
    plan = Plan(
        tuple(Stage(f"s{place}", "sum", 50.0, 1000) for place in range(stages)), Neighbours.REPLACE
    )
    claim = Guarantee.from_plan(plan, 1e-5)
    asked = []
    cost = Plan.cost
    monkeypatch.setattr(
        Plan, "cost", lambda self, coarse=False: asked.append(1) or cost(self, coarse)
    )
    steps = compute_epsilon_by_step(plan, claim)
    assert len(asked) < len(steps) <= 12
    assert steps[-1]["steps"] == 1000 * stages


def test_one_step_needs_no_account():
    plan = Plan((Stage("means", "sum", 3.0),), Neighbours.REPLACE)
    assert compute_epsilon_by_step(plan, Guarantee.from_plan(plan, 1e-5)) == []


# Attacks

TOLD = {
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
    whole = replace(make_attack_result(), **TOLD)
    (tmp_path / "attacks.json").write_text(json.dumps({"attacks": [asdict(plain), asdict(whole)]}))
    assert load_attack_results(tmp_path / "attacks.json") == [plain, whole]
    short = {key: each for key, each in asdict(plain).items() if key not in TOLD}
    (tmp_path / "attacks.json").write_text(json.dumps({"attacks": [short]}))
    assert load_attack_results(tmp_path / "attacks.json") == [plain]


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
    release = make_release(settings={"noise_multiplier": None})
    audited = {
        "method": "handmade",
        "settings": {"noise_multiplier": None},
        "claimed": release.guarantee.epsilon * 1.0001,
    }
    found = AttackResult("audit", (), (), (), 0.95, True, verdict="proves nothing")
    (tmp_path / "verdict.json").write_text(
        json.dumps({"audited": audited, "attacks": [asdict(found)]})
    )
    assert load_attack_results(tmp_path / "verdict.json", release) == [found]
    (tmp_path / "verdict.json").write_text(
        json.dumps({"audited": audited | other, "attacks": [asdict(found)]})
    )
    with pytest.raises(ReleaseError, match="audit"):
        load_attack_results(tmp_path / "verdict.json", release)
    with pytest.raises(ReleaseError, match="1 to 200 numbers"):  # neither rates nor a verdict
        replace(found, verdict="")


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


def test_a_measured_rate_of_zero_accuses_nobody():
    with pytest.raises(ReleaseError, match="Give an upper bound of the false-positive rate"):
        make_attack_result(fpr=(0.0, 0.1))
    assert make_attack_result(fpr=(0.0, 0.1), lower=(0.0, 0.08)).exceeds_bound(
        lambda rate: rate
    ) == (
        False,
        False,
    )


def test_rates_of_zero_are_drawn_on_the_edge():
    found = {
        **asdict(make_attack_result(fpr=(0.0, 1.0), tpr=(0.0, 1.0), lower=(0.0, 1.0))),
        "exceeds_max_tpr": [False, False],
    }
    assert "nan" not in str(attack_power_chart(None, [found]))


# Published figures


def test_published_figures_are_shares_and_scores():
    known = load_published_results()
    assert {row["data"] for row in known["figures"]} == {"mnist", "fashion-mnist", "celeba"}
    for row in [*known["figures"], *known["real"]]:
        assert row["source"]
        assert ("delta not known" in row["source"]) is (row["data"] == "celeba")
        for name, value in row["figures"].items():
            assert 0 < value <= 1 if name.endswith("accuracy") else 0 < value < 500
    best = {
        row["method"]: row["figures"]
        for row in known["figures"]
        if (row["data"], row["source"]) == ("mnist", "GS-WGAN, Table 1")
    }
    assert best["GS-WGAN"] == {
        "is": 9.23,
        "fid": 61.34,
        "mlp_accuracy": 0.79,
        "cnn_accuracy": 0.8,
        "avg_accuracy": 0.6,
        "calibrated_accuracy": 0.69,
    }


@pytest.mark.parametrize(
    ("epsilon", "closest"),
    [(0.01, 0.2), (0.4, 0.2), (0.5, 1), (3, 1), (4, 10), (1e4, 10), (math.inf, math.inf)],
)
def test_the_closest_epsilon_is_shown(epsilon, closest):
    assert {
        row["epsilon"] for row in find_published_results("mnist", epsilon, ["cnn_accuracy"])
    } == {closest}


def test_nothing_stands_beside_what_nobody_published():
    assert (
        find_published_results("scans", 1.0, ["fid"])
        == find_published_results("mnist", 1.0, ["my_measure"])
        == find_published_results("mnist", None, ["fid"])
        == []
    )
