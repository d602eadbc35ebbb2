"""The verdict: what breaks a claim, what cannot, and a sentence that always tells the ceiling."""

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
PLAN = Plan((Stage("it", "sum", NOISE),), Neighbours.ADD_REMOVE)
BOUND = EpsilonBound(0.7, 0.95, 5.6, "1000 runs a side", 1000, DELTA)


@pytest.fixture(scope="module")
def claim():
    return Guarantee.from_plan(PLAN, DELTA)


def worlds(noise, count, seed=0):
    """The statistic of the best attack on one Gaussian answer, with the record and without."""
    return np.random.default_rng(seed).normal([[1 / noise], [0.0]], 1, (2, count))


def test_sentences(claim):
    assert (
        judge(BOUND, claim).summary
        == "proves epsilon of at least 0.7 at 95 %; these trials could prove 5.6 at most; claimed 1"
    )
    assert judge(replace(BOUND, epsilon=2.71828), claim).summary == (
        "proves epsilon of at least 2.718 at 95 %; these trials could prove 5.6 at most; claimed 1: the claim is broken"
    )
    assert judge(replace(BOUND, epsilon=0.0, ceiling=0.8), claim).summary == (
        "proves epsilon of at least 0 at 95 %; these trials could prove 0.8 at most; claimed 1, so they could not have refuted it"
    )
    assert judge(replace(BOUND, confidence=1 - 1e-6), NoGuarantee("no mechanism")).summary == (
        "proves epsilon of at least 0.7 at 99.9999 %; these trials could prove 5.6 at most; nothing is claimed (no mechanism)"
    )


def test_statuses(claim):
    holds = judge(BOUND, claim)
    broken = judge(replace(BOUND, epsilon=claim.epsilon + 1e-3), claim)
    free = judge(BOUND, NoGuarantee("why"))
    assert [each.status for each in (holds, broken, free)] == ["holds", "broken", "no claim"]
    assert [each.is_broken for each in (holds, broken, free)] == [False, True, False]
    assert judge(replace(BOUND, epsilon=claim.epsilon), claim).status == "holds"
    assert judge(BOUND, replace(claim, epsilon=float("inf"))).status == "no claim"
    assert (free.claimed, free.is_inconclusive, holds.is_inconclusive) == (None, False, False)
    assert judge(replace(BOUND, ceiling=0.9), claim).is_inconclusive
    assert [
        judge(replace(BOUND, publishable=each), claim).publishable for each in (True, False)
    ] == [True, False]


def test_a_bound_judges_only_what_was_claimed(claim):
    with pytest.raises(SettingError, match="delta"):
        judge(replace(BOUND, delta=0.0), claim)  # the claim says nothing about a smaller delta
    assert judge(replace(BOUND, delta=0.01, epsilon=3.0), claim).is_broken
    assert judge(replace(BOUND, mu=0.2), claim).status == "holds"
    with pytest.raises(SettingError, match="Gaussian"):
        judge(replace(BOUND, mu=0.2), replace(claim, accountant="PLD, grid 0.0001"))


def test_an_honest_mechanism_holds_and_a_loud_one_is_broken(claim):
    """By each kind of audit. A third of the noise is caught by the Gaussian reading, a tenth by all."""
    coins = np.random.default_rng(1).random(2000) < 0.5

    def audits(noise):
        with_it, without = worlds(noise, 2000)
        yield audit_many_runs(with_it, without, DELTA, assume_gaussian=True)
        yield audit_many_runs(with_it, without, DELTA)
        yield audit_one_run(np.random.default_rng(2).normal(coins / noise, 1), coins, DELTA, 500)
        yield estimate_tpr_at_fpr(with_it, without, fprs=(0.001, 0.01, 0.1), certify_fpr=True)

    assert [judge(each, claim).status for each in audits(NOISE)] == ["holds"] * 4
    assert judge(next(audits(NOISE / 3)), claim).is_broken
    assert [judge(each, claim).status for each in audits(NOISE / 10)] == ["broken"] * 4


def test_rates_are_judged_by_the_stated_power(claim):
    """The wall of a risk: no attack above this true-positive rate at that false-positive rate."""
    found = judge(
        estimate_tpr_at_fpr(*worlds(NOISE, 20_000), fprs=(0.001, 0.01, 0.1), certify_fpr=True),
        claim,
    )
    assert found.quantity == f"true-positive rate at false-positive rate {0.1:g}"
    assert found.claimed == claim.max_tpr["0.1"]
    assert 0.1 < found.lower_bound < found.claimed < 0.99 < found.ceiling
    assert found.summary.startswith("proves a true-positive rate of at least 0.1")
    perfect = judge(estimate_tpr_at_fpr(np.ones(20_000), np.zeros(20_000)), claim)
    assert perfect.is_broken
    few = judge(estimate_tpr_at_fpr(np.ones(20), np.zeros(20)), claim)
    assert (few.status, few.ceiling, few.is_inconclusive) == ("holds", 0.0, True)
    assert "could prove 0 at most" in few.summary
    assert (
        judge(estimate_tpr_at_fpr(np.ones(20), np.zeros(20)), NoGuarantee("why")).status
        == "no claim"
    )


def test_verdicts_and_bounds_come_back_from_json(claim):
    for bound in (BOUND, audit_many_runs(*worlds(1.0, 200), DELTA, assume_gaussian=True)):
        assert EpsilonBound.from_json(json.loads(json.dumps(asdict(bound)))) == bound
    for verdict in (judge(BOUND, claim), judge(BOUND, NoGuarantee("why"))):
        assert Verdict.from_json(json.loads(json.dumps(asdict(verdict)))) == verdict
    for change in ({"claimed": "1"}, {"status": 1}, {"lower_bound": None}, {"else": 1}):
        with pytest.raises(ReleaseError, match="not a valid Verdict"):
            Verdict.from_json(asdict(judge(BOUND, claim)) | change)
    with pytest.raises(ReleaseError, match="not a valid Verdict"):
        Verdict.from_json([1])
