"""Audits of whole methods on worst-case data: what the best adversary proves is below the claim.

That the adversary sees the records is the check ``audit`` of `privot.testing.check_method`.
"""

import pytest
from support.tiny_settings import (
    AUDIT_SETTINGS,
    choose_spec,
    choose_tiny_settings,
    has_no_mechanism,
    is_local,
)

from privot.audit import audit_many_runs, judge
from privot.methods import list_methods, make_method
from privot.privacy.guarantee import Guarantee
from privot.testing.distinguisher import DELTA, score_runs

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")


def make_audited_method(name):
    """The method with settings so small that a run takes milliseconds; the budget fixes its noise."""
    settings = {**choose_tiny_settings(name), **AUDIT_SETTINGS.get(name, {})}
    return make_method(name, {**settings, "noise_multiplier": None})


WITH_A_QUERY = [
    name
    for name in sorted(list_methods())
    if make_method(name, choose_tiny_settings(name))
    .plan(choose_spec(make_method(name, choose_tiny_settings(name))))
    .stages
]
every_private_method = pytest.mark.parametrize("name", WITH_A_QUERY)


def bound_epsilon(scores, confidence=0.95, gaussian=False):
    """By the threshold 0, at which both datasets are equally likely: fixed before any run."""
    return audit_many_runs(*scores, DELTA, confidence, threshold=0.0, assume_gaussian=gaussian)


def test_every_method_is_audited_or_has_nothing_to_audit():
    for name in set(list_methods()) - set(WITH_A_QUERY):
        method = make_method(name, choose_tiny_settings(name))
        assert is_local(method) or has_no_mechanism(method)
        assert is_local(method) or not method.guarantee_summary.startswith("(epsilon"), name


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every_private_method
def test_the_claim_is_never_broken(name, trust):
    # 1,000 runs a side could prove 5.60 at most, 220 could prove 4.08; these have quick runs.
    num_runs = 1000 if name in ("merf", "sliced-flow", "sliced-generator") else 220
    *scores, plan = score_runs(make_audited_method(name), num_runs)
    claim = Guarantee.from_plan(plan, DELTA)
    assert 3.9 < claim.epsilon <= 4.0
    # Of a dozen audits of tight claims at 95 % one would fail by chance every other time.
    is_gaussian = claim.accountant == "analytic Gaussian"
    verdict = judge(bound_epsilon(scores, 1 - 1e-7, is_gaussian), claim)
    assert verdict.status == "holds", f"{name}: {verdict.summary}"
    plain = bound_epsilon(scores)
    assert plain.epsilon <= claim.epsilon, f"{name}: {plain.epsilon:.2f} of {claim.epsilon:.2f}"
    proved = max(verdict.lower_bound, plain.epsilon)
    note = f"{name}: {proved:.2f} proved of 4 claimed, {num_runs:,} runs a side"
    trust("G7", "audits of whole methods under their claim", 1, of=1, note=note)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every_private_method
def test_without_noise_four_is_proved(name, trust):
    num_runs = 220  # runs a side that could prove 4.08 at most
    bound = bound_epsilon(score_runs(make_audited_method(name), num_runs, noise_share=0.0)[:2])
    note = f"{name}: {bound.epsilon:.2f} of at most {bound.ceiling:.2f}"
    assert bound.epsilon >= 4.0, note
    trust("G7", "controls without noise that prove 4 or more", 1, of=1, note=note)
