"""The verdict: what breaks a claim, what cannot, and a sentence that always states the ceiling."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from privot.audit import (
    EpsilonBound,
    Verdict,
    audit_many_runs,
    audit_one_run,
    estimate_tpr_at_fpr,
    judge,
)
from privot.errors import ReleaseError, SettingError
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.privacy.plan import Neighbours, Plan, Stage

DELTA = 1e-5
NOISE = 3.7307  # epsilon 1, from below: what is claimed is shown rounded up
CLAIM = Guarantee.from_plan(Plan((Stage("it", "sum", NOISE),), Neighbours.ADD_REMOVE), DELTA)
NO_CLAIM = NoGuarantee("no mechanism")
BOUND = EpsilonBound(0.7, 0.95, 5.6, "1000 runs a side", 1000, DELTA)


def draw_worlds(noise, count):
    """The statistic of the best attack on one Gaussian answer, with the record and without."""
    return np.random.default_rng(0).normal([[1 / noise], [0.0]], 1, (2, count))


@pytest.mark.parametrize(
    ("change", "claim", "status", "sentence"),
    [
        ({}, CLAIM, "holds", "0.7 at 95 %; these trials could prove 5.6 at most; claimed 1"),
        (
            {"epsilon": 2.71828},
            CLAIM,
            "broken",
            "2.718 at 95 %; these trials could prove 5.6 at most; claimed 1: the claim is broken",
        ),
        (
            {"epsilon": 0.0, "ceiling": 0.8},
            CLAIM,
            "holds",
            "0 at 95 %; these trials could prove 0.8 at most; claimed 1, so they could not have refuted it",
        ),
        (
            {"confidence": 1 - 1e-6},
            NO_CLAIM,
            "no claim",
            "0.7 at 99.9999 %; these trials could prove 5.6 at most; nothing is claimed (no mechanism)",
        ),
    ],
)
def test_sentences(change, claim, status, sentence):
    verdict = judge(replace(BOUND, **change), claim)
    assert verdict.summary == f"proves epsilon of at least {sentence}"
    assert (verdict.status, verdict.is_broken) == (status, status == "broken")
    assert verdict.is_inconclusive == ("could not have" in sentence)
    assert Verdict.from_json(json.loads(json.dumps(asdict(verdict)))) == verdict


def test_a_claim_is_broken_above_it_alone():
    assert judge(replace(BOUND, epsilon=CLAIM.epsilon), CLAIM).status == "holds"
    assert judge(replace(BOUND, epsilon=CLAIM.epsilon + 1e-3), CLAIM).is_broken
    assert judge(BOUND, replace(CLAIM, epsilon=float("inf"))).status == "no claim"
    assert judge(BOUND, NO_CLAIM).claimed is None
    assert judge(replace(BOUND, ceiling=0.9), CLAIM).is_inconclusive
    for publishable in (True, False):
        assert judge(replace(BOUND, publishable=publishable), CLAIM).publishable is publishable


def test_a_bound_judges_only_what_was_claimed():
    with pytest.raises(SettingError, match="delta"):
        judge(replace(BOUND, delta=0.0), CLAIM)  # the claim says nothing about a smaller delta
    assert judge(replace(BOUND, delta=0.01, epsilon=3.0), CLAIM).is_broken
    assert judge(replace(BOUND, mu=0.2), CLAIM).status == "holds"
    with pytest.raises(SettingError, match="Gaussian"):
        judge(replace(BOUND, mu=0.2), replace(CLAIM, accountant="PLD, grid 0.0001"))


def test_an_honest_mechanism_holds_and_a_loud_one_is_broken():
    """By each kind of audit. A third of the noise is caught by the Gaussian reading, a tenth by all."""
    coins = np.random.default_rng(1).random(2000) < 0.5

    def judge_all(noise):
        worlds = draw_worlds(noise, 2000)
        one_run = np.random.default_rng(2).normal(coins / noise, 1)
        bounds = (
            audit_many_runs(*worlds, DELTA, assume_gaussian=True),
            audit_many_runs(*worlds, DELTA),
            audit_one_run(one_run, coins, DELTA, 500),
            estimate_tpr_at_fpr(*worlds, fprs=(0.001, 0.01, 0.1), certify_fpr=True),
        )
        return [judge(bound, CLAIM).status for bound in bounds]

    assert judge_all(NOISE) == ["holds"] * 4
    assert judge_all(NOISE / 3)[0] == "broken"
    assert judge_all(NOISE / 10) == ["broken"] * 4


def test_rates_are_judged_by_the_stated_power():
    """The bound of a risk: no attack above this true-positive rate at that false-positive rate."""
    worlds = draw_worlds(NOISE, 20_000)
    honest = judge(estimate_tpr_at_fpr(*worlds, fprs=(0.001, 0.01, 0.1), certify_fpr=True), CLAIM)
    assert honest.quantity == f"true-positive rate at false-positive rate {0.1:g}"
    assert honest.claimed == CLAIM.max_tpr["0.1"]
    assert 0.1 < honest.lower_bound < honest.claimed < 0.99 < honest.ceiling
    assert honest.summary.startswith("proves a true-positive rate of at least 0.1")
    assert judge(estimate_tpr_at_fpr(np.ones(20_000), np.zeros(20_000)), CLAIM).is_broken
    rates = estimate_tpr_at_fpr(np.ones(20), np.zeros(20))
    few = judge(rates, CLAIM)
    assert (few.status, few.ceiling, few.is_inconclusive) == ("holds", 0.0, True)
    assert "could prove 0 at most" in few.summary
    assert judge(rates, NO_CLAIM).status == "no claim"


def test_bounds_come_back_from_json_and_damaged_verdicts_do_not():
    for bound in (BOUND, audit_many_runs(*draw_worlds(1.0, 200), DELTA, assume_gaussian=True)):
        assert EpsilonBound.from_json(json.loads(json.dumps(asdict(bound)))) == bound
    sound = asdict(judge(BOUND, CLAIM))
    changes = ({"claimed": "1"}, {"status": 1}, {"lower_bound": None}, {"else": 1})
    for value in ([1], *(sound | change for change in changes)):
        with pytest.raises(ReleaseError, match="not a valid Verdict"):
            Verdict.from_json(value)
