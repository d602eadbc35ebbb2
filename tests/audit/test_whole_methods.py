"""Whole methods on worst-case data: what the best adversary proves stays under the claim; without the noise it sees everything."""

import functools

import pytest
from support.neighbour_distinguisher import CLASSES, DELTA, SHAPE, claimed, method_for, scores
from support.tiny_settings import is_local

from privot.audit import audit_many_runs, judge
from privot.data.spec import Spec
from privot.methods import list_methods, make_method
from privot.privacy.guarantee import Guarantee
from privot.privacy.sampling import Full

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")

SPEC = Spec(SHAPE, CLASSES, 8, (4, 4), num_clients=4)
PRIVATE = [name for name in sorted(list_methods()) if method_for(name).plan(SPEC).stages]
every_private_method = pytest.mark.parametrize("name", PRIVATE)


@functools.cache
def score_runs(name, share):
    """1,000 runs a side could prove 5.60 at most, 300 could prove 4.39: of these methods a run takes 10 to 30 ms, of the others 50 to 200."""
    return scores(name, 1000 if name in ("merf", "sliced-flow", "sliced-generator") else 300, share)


def bound_epsilon(inside, outside, confidence=0.95, gaussian=False):
    """By the threshold 0, at which both worlds are equally likely: fixed before anything is seen."""
    options = {"threshold": 0.0, "assume_gaussian": gaussian}
    return audit_many_runs(inside, outside, DELTA, confidence, **options)


def test_every_method_is_audited_or_has_nothing_to_audit():
    for name in set(list_methods()) - set(PRIVATE):
        method = make_method(name)
        assert is_local(method) or not method.guarantee_summary.startswith("(epsilon"), name


@every_private_method
def test_the_adversary_sees(name):
    """In a few runs without the noise: the ratio is not 0 for want of a canary that matters."""
    inside, outside, plan = scores(name, 2, share=0.0, epsilon=None)
    # No sample of a run may hold the canary, once in 400: two such of two are no chance. Such a run says nothing.
    left_out = 1 if any(not isinstance(stage.sampling, Full) for stage in plan.stages) else 0
    assert (inside <= 0).sum() <= left_out, "the canary was missed though no noise hides it"
    assert (outside >= 0).sum() <= left_out, "runs without the canary were not recognized"
    assert (outside <= 0).all(), "a run without the canary was taken for one with it"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every_private_method
def test_the_claim_is_never_broken(name, trust):
    inside, outside, plan = score_runs(name, 1.0)
    claim = Guarantee.from_plan(plan, DELTA)
    # Of a dozen audits of tight claims at 95 % one would fail by chance every other time.
    is_gaussian = claim.accountant == "analytic Gaussian"
    verdict = judge(bound_epsilon(inside, outside, 1 - 1e-7, is_gaussian), claim)
    assert verdict.status == "holds", f"{name}: {verdict.summary}"
    plain = bound_epsilon(inside, outside)
    assert plain.epsilon <= claim.epsilon, f"{name}: {plain.epsilon:.2f} of {claim.epsilon:.2f}"
    proved = max(verdict.lower_bound, plain.epsilon)
    note = f"{name}: {proved:.2f} proved of 4 claimed, {len(inside):,} runs a side"
    trust("G7", "audits of whole methods under their claim", 1, of=1, note=note)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every_private_method
def test_without_noise_four_is_proved(name, trust):
    bound = bound_epsilon(*score_runs(name, 0.0)[:2])
    note = f"{name}: {bound.epsilon:.2f} of at most {bound.ceiling:.2f}"
    assert bound.epsilon >= 4.0, note
    trust("G7", "controls without noise that prove 4 or more", 1, of=1, note=note)


@pytest.mark.slow
@every_private_method
def test_the_whole_plan_is_spent_and_costs_what_is_claimed(name):
    """The audit is of epsilon 4, and a run asks all that the plan has: `scores` fails otherwise."""
    _, plan, _ = claimed(name)
    assert 3.9 < plan.cost().epsilon(DELTA) <= 4.0
