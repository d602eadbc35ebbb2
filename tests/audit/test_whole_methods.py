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

CHEAP = (
    "merf",
    "sliced-flow",
    "sliced-generator",
)  # a run takes 10 to 30 ms; of the others 50 to 200
PRIVATE = [
    name
    for name in sorted(list_methods())
    if method_for(name).plan(Spec(SHAPE, CLASSES, 8, (4, 4), num_clients=4)).stages
]
GAUSSIAN = "analytic Gaussian"


def runs_for(name):
    """A side: 1,000 could prove 5.60 at most, 300 could prove 4.39."""
    return 1000 if name in CHEAP else 300


def bound(inside, outside, confidence=0.95, gaussian=False):
    """By the threshold 0, at which both worlds are equally likely: fixed before anything is seen."""
    return audit_many_runs(
        inside, outside, DELTA, confidence, threshold=0.0, assume_gaussian=gaussian
    )


def test_every_method_is_audited_or_has_nothing_to_audit():
    for name in set(list_methods()) - set(PRIVATE):
        method = make_method(name)
        assert is_local(method) or not method.guarantee_summary.startswith("(epsilon"), (
            f"{name} makes a promise that is not audited here"
        )


@pytest.mark.parametrize("name", PRIVATE)
def test_the_adversary_sees(name):
    """In a few runs without the noise: the ratio is not 0 for want of a canary that matters."""
    inside, outside, plan = scores(name, 4, share=0.0, epsilon=None)
    # No draw of a run may hold the canary, or its place, once in 400: three such of four are no chance. Such a run tells nothing.
    left_out = 2 if any(not isinstance(stage.sampling, Full) for stage in plan.stages) else 0
    assert (inside <= 0).sum() <= left_out, (
        "runs with the canary were not recognised though no noise hides it"
    )
    assert (outside >= 0).sum() <= left_out, "runs without the canary were not recognised"
    assert (outside <= 0).all(), "a run without the canary was taken for one with it"


@functools.cache
def audited(name, share):
    return scores(name, runs_for(name), share)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PRIVATE)
def test_the_claim_is_never_broken(name, trust):
    inside, outside, plan = audited(name, 1.0)
    claim = Guarantee.from_plan(plan, DELTA)
    gaussian = claim.accountant == GAUSSIAN
    # Of a dozen audits of tight claims at 95 % one would fail by chance every other time.
    found = judge(bound(inside, outside, 1 - 1e-7, gaussian), claim)
    plain = bound(inside, outside)
    assert found.status == "holds", f"{name}: {found.summary}"
    assert plain.epsilon <= claim.epsilon, (
        f"{name}: proved {plain.epsilon:.2f} of a claim of {claim.epsilon:.2f}"
    )
    told = f"{name}: {max(found.lower_bound, plain.epsilon):.2f} proved of 4 claimed, {len(inside):,} runs a side"
    trust("G7", "audits of whole methods under their claim", 1, of=1, note=told)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PRIVATE)
def test_without_noise_four_is_proved(name, trust):
    inside, outside, _ = audited(name, 0.0)
    found = bound(inside, outside)
    assert found.epsilon >= 4.0, (
        f"{name}: {found.epsilon:.2f} of {found.ceiling:.2f} that these runs could prove"
    )
    told = f"{name}: {found.epsilon:.2f} of at most {found.ceiling:.2f}"
    trust("G7", "controls without noise that prove 4 or more", 1, of=1, note=told)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE)
def test_the_whole_plan_is_spent_and_costs_what_is_claimed(name):
    """The audit is of epsilon 4, and a run asks all that the plan has: `scores` fails otherwise."""
    _, plan, _ = claimed(name)
    assert 3.9 < plan.cost().epsilon(DELTA) <= 4.0
