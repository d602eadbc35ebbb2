"""Events in, epsilon out: recorded values, closed forms, and never less than what a brute-force integral shows."""

import itertools
import math

import dp_accounting as dpa
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.stats import norm

from privot.errors import PlanError
from privot.privacy import accounting
from privot.privacy.accounting import (
    Neighbours,
    PrivacyCost,
    compute_privacy_cost,
    compute_renyi_cost,
)
from privot.privacy.plan import Plan, Stage
from privot.privacy.sampling import Fixed, Full, Poisson, Shards
from privot.privacy.subsampled_gaussian import poisson_pld

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
DELTA = 1e-5


def times(count, event):
    return dpa.SelfComposedDpEvent(event, count)


def all_of(*events):
    return dpa.ComposedDpEvent(list(events))


# Recorded values


@pytest.mark.parametrize(
    ("sampler", "noise", "steps", "epsilon", "within"),
    [
        (
            Poisson(0.00427),
            1.1,
            14_040,
            2.380,
            0.01,
        ),  # recorded with dp_accounting's PLD, Opacus' PRV gives 2.390
        (Poisson(0.001), 1.07, 640_000, 4.118, 0.01),  # PRV 4.125
        (Shards(1000), 1.07, 640_000, 5.5, 0.05),  # GS-WGAN with a draw for each row
        (Shards(1000), 0.82, 640_000, 10.0, 0.3),
        (Shards(1000), 0.85, 640_000, 9.05, 0.1),
        pytest.param(Poisson(0.01), 0.5, 1000, 13.36, 0.01, marks=pytest.mark.slow),
        pytest.param(Poisson(0.05), 0.3, 1000, 262.6, 0.3, marks=pytest.mark.slow),
    ],
)
def test_recorded_values(sampler, noise, steps, epsilon, within):
    found = compute_privacy_cost(times(steps, sampler.event(noise)), sampler.neighbours[0])
    assert found.epsilon(DELTA) == pytest.approx(epsilon, abs=within)
    assert found.accountant.startswith("PLD")


def test_a_shared_draw_is_one_event():
    """GS-WGAN as published: 32 rows share one drawn critic, which is one answer at noise / sqrt(32), not 32 amplified ones."""
    shared = compute_privacy_cost(
        times(20_000, Shards(1000).event(1.07 / math.sqrt(32))), REPLACE
    ).epsilon(DELTA)
    assert shared >= 290
    assert shared == pytest.approx(346.7, abs=2)


def test_one_step_more_costs_more():
    found = [
        compute_privacy_cost(times(steps, Poisson(0.01).event(1.0)), ADD_REMOVE).epsilon(DELTA)
        for steps in (99, 100, 101)
    ]
    assert found[0] < found[1] < found[2]


# Closed forms


def exact_delta(mu, epsilon):
    """The Gaussian's privacy profile in 60 digits."""
    with mpmath.workdps(60):
        mu = mpmath.mpf(mu)
        epsilon = mpmath.mpf(epsilon)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(
            -mu / 2 - epsilon / mu
        )


def exact_epsilon(mu, delta):
    if exact_delta(mu, 0) <= delta:
        return 0.0
    low = mpmath.mpf(0)
    high = mpmath.mpf(mu * mu / 2 + 60 * mu + 1)
    with mpmath.workdps(60):
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if exact_delta(mu, middle) > delta else (low, middle)
        return float(high)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-10])
@pytest.mark.parametrize("noise", [0.05, 0.25, 1.0, 3.7, 50.0])
def test_gaussians_in_closed_form(trust, noise, delta):
    found = compute_privacy_cost(dpa.GaussianDpEvent(noise), REPLACE)
    truth = exact_epsilon(1 / noise, delta)
    assert found.accountant == "analytic Gaussian"
    assert found.epsilon(delta) == pytest.approx(truth, rel=1e-9, abs=1e-9)
    for epsilon in (0.0, 0.3, truth, 2 * truth + 1):
        assert float(found.delta(epsilon)) == pytest.approx(
            float(exact_delta(1 / noise, epsilon)), rel=1e-6, abs=1e-15
        )
    trust("G4", "closed forms met to 1e-9", 1, of=1)


def test_the_classical_formula_is_not_used():
    """It says that noise sqrt(2 log(1.25/delta))/epsilon is enough; at epsilon 10 the true delta is 2.3 times the claim."""
    found = compute_privacy_cost(
        dpa.GaussianDpEvent(math.sqrt(2 * math.log(1.25 / DELTA)) / 10), REPLACE
    )
    assert float(found.delta(10.0)) == pytest.approx(2.3 * DELTA, rel=0.05)
    assert found.epsilon(DELTA) > 10


def test_gaussians_add_up_in_squares():
    several = all_of(
        times(3, dpa.GaussianDpEvent(2.0)),
        times(2, all_of(dpa.GaussianDpEvent(1.0), times(5, dpa.GaussianDpEvent(4.0)))),
    )
    mu = math.sqrt(3 / 4 + 2 * (1 + 5 / 16))
    for relation in Neighbours:
        found = compute_privacy_cost(several, relation)
        assert found.mu == pytest.approx(mu, rel=1e-15)
        assert found.epsilon(DELTA) == pytest.approx(exact_epsilon(mu, DELTA), rel=1e-9)


def test_nothing_asked_costs_nothing():
    found = compute_privacy_cost(all_of(), REPLACE)
    assert found.epsilon(1e-12) == 0
    assert found.delta(np.array([0.0, 1.0])).tolist() == [0, 0]
    assert found.max_tpr(0.1) == pytest.approx(0.1)


def test_no_noise_has_no_epsilon():
    found = compute_privacy_cost(
        all_of(dpa.GaussianDpEvent(9.0), times(3, dpa.NonPrivateDpEvent())), ADD_REMOVE
    )
    assert found.epsilon(0.5) == math.inf
    assert found.delta(np.array([0.0, 1e9])).tolist() == [1, 1]
    assert found.max_tpr(0.001) == 1.0
    assert found.accountant == "no privacy"


# Brute force


X = np.linspace(-12, 40, 104_001)


def bell(centre, x=X):
    return norm.pdf(x - centre)


def hockey(p, q, epsilon, step=X[1] - X[0]):
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * step)


def mixtures(rate, shift, others):
    """The worst pair of one answer: a changed record at either end of the ball, drawn with the rate, the other draws anywhere."""
    a = bell(others)
    here = bell(-shift / 2)
    there = bell(shift / 2)
    return (1 - rate) * a + rate * here, (1 - rate) * a + rate * there


GRID = [-1.0, -0.2, 0.0, 0.1, 0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("rate", [1e-4, 0.06, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("noise", [0.3, 1.0, 20.0])
def test_poisson_draws_are_priced_as_dp_accounting_does(rate, noise):
    """Its own distribution, made without a loop over the grid: alone and composed."""
    theirs = pld.from_gaussian_mechanism(
        noise, value_discretization_interval=1e-2, sampling_prob=rate
    )
    ours = poisson_pld(rate, noise, 1e-2)
    eps = np.linspace(-2, 5, 50)
    for one, other in ((ours, theirs), (ours.self_compose(200), theirs.self_compose(200))):
        assert one.get_delta_for_epsilon(eps) == pytest.approx(
            other.get_delta_for_epsilon(eps), rel=1e-9, abs=1e-12
        )


@pytest.mark.parametrize(
    ("rate", "noise"), [(0.5, 1.0), (0.1, 0.7), (0.01, 0.5), (0.2, 3.0), (1.0, 1.0)]
)
def test_one_poisson_step_against_the_integral(rate, noise):
    found = compute_privacy_cost(Poisson(rate).event(noise), ADD_REMOVE)
    without = bell(0)
    drawn = (1 - rate) * bell(0) + rate * bell(1 / noise)
    for epsilon in GRID:
        truth = max(hockey(without, drawn, epsilon), hockey(drawn, without, epsilon))
        assert truth - 1e-7 <= float(found.delta(epsilon)) <= truth + 1e-4


@pytest.mark.parametrize(
    ("rate", "noise"), [(0.5, 1.0), (0.1, 0.7), (0.01, 0.5), (0.2, 3.0), (1.0, 1.0)]
)
def test_one_replaced_step_against_the_integral(rate, noise):
    """Wherever in the ball the other draws lie; and for some place of theirs the bound is reached."""
    drawn = Shards(round(1 / rate)) if noise > 0.9 else Fixed(1, round(1 / rate))
    found = compute_privacy_cost(drawn.event(noise), REPLACE)
    for epsilon in GRID:
        truth = 0.0
        for place in (-0.5, -0.25, 0.1, 0.5):
            p, q = mixtures(rate, 1 / noise, place / noise)
            truth = max(truth, hockey(p, q, epsilon), hockey(q, p, epsilon))
        assert truth - 1e-7 <= float(found.delta(epsilon)) <= truth + 1e-4


@pytest.mark.parametrize(
    ("sampler", "noise"), [(Poisson(0.2), 0.8), (Shards(5), 0.8), (Fixed(1, 2), 1.5)]
)
def test_two_steps_against_the_integral(sampler, noise):
    """Both steps lean the same way, or each its own: a one-sided distribution would miss the second."""
    x = np.linspace(-9, 9, 1501)
    rate = 0.5 if isinstance(sampler, Fixed) else 0.2
    low = bell(-0.5 / noise, x)
    high = bell(0.5 / noise, x)
    mixed = (1 - rate) * low + rate * high
    relation = sampler.neighbours[0]
    ways = [(mixed, low), (low, mixed)]
    found = compute_privacy_cost(times(2, sampler.event(noise)), relation)
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        claimed = float(found.delta(epsilon))
        for first, second in itertools.product(ways, ways):
            if relation is ADD_REMOVE and first is not second:
                continue  # the record is in all the data sets of one side, or in none
            p, q = (np.multiply.outer(first[each], second[each]) for each in (0, 1))
            assert hockey(p, q, epsilon, (x[1] - x[0]) ** 2) <= claimed + 1e-7


@pytest.mark.parametrize(
    ("rate", "noise"),
    [(0.5, 1.0), (0.1, 0.7), (1.0, 1.0), pytest.param(0.01, 0.5, marks=pytest.mark.slow)],
)
def test_poisson_draws_under_replace_against_the_integral(rate, noise):
    """A record at one end of its ball, at its middle or at the other end, and the draws without it: alone, and two steps together."""
    found = (
        Plan((Stage("it", "sum", noise, 1, Poisson(rate)),), ADD_REMOVE).under_replace_one().cost()
    )
    ends = [(1 - rate) * bell(0) + rate * bell(end / noise) for end in (-1, 0, 1)]
    for p, q in itertools.permutations(ends, 2):
        for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0):
            assert hockey(p, q, epsilon) <= float(found.delta(epsilon)) + 1e-9
    x = np.linspace(-9, 9, 1501)
    low, high = ((1 - rate) * bell(0, x) + rate * bell(end / noise, x) for end in (-1, 1))
    twice = (
        Plan((Stage("it", "sum", noise, 2, Poisson(rate)),), ADD_REMOVE).under_replace_one().cost()
    )
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        for first, second in itertools.product([(low, high), (high, low)], repeat=2):
            p, q = (np.multiply.outer(first[each], second[each]) for each in (0, 1))
            assert (
                hockey(p, q, epsilon, (x[1] - x[0]) ** 2) <= float(twice.delta(epsilon)) + 3e-6
            )  # of the integral


def test_half_the_noise_is_needed_for_poisson_draws_under_replace():
    """With the multiplier of add-remove the claim would be broken: the planted mistake."""
    noise = 1.0
    rate = 0.5
    wrong = compute_privacy_cost(Fixed(1, 2).event(noise), REPLACE)
    p, q = mixtures(rate, 2 / noise, others=0.0)
    assert hockey(p, q, 1.0) > 1.5 * float(wrong.delta(1.0))


def test_why_sums_of_shards_are_refused():
    """Sums of other shards may lie anywhere: the answer then tells which shard was drawn, and nothing is amplified."""
    rate = 0.1
    noise = 1.0
    epsilon = 1.0
    claimed = float(compute_privacy_cost(Shards(10).event(noise), REPLACE).delta(epsilon))
    p, q = mixtures(rate, 1 / noise, others=30.0)
    assert hockey(p, q, epsilon) > 10 * claimed


def test_without_replacement_lies_between_its_neighbours():
    """Above the one-sided Poisson pair, which is one of its worst cases, and below Renyi's bound for the same event."""
    for drawn, size, noise, steps in ((1, 100, 1.0, 300), (10, 20, 4.0, 30)):
        event = times(steps, Fixed(drawn, size).event(noise))
        ours = compute_privacy_cost(event, REPLACE).epsilon(DELTA)
        accountant = PLDAccountant(dpa.NeighboringRelation.ADD_OR_REMOVE_ONE)
        one_sided = accountant.compose(
            times(steps, Poisson(drawn / size).event(noise))
        ).get_epsilon(DELTA)
        assert one_sided - 1e-3 <= ours <= compute_renyi_cost(event, REPLACE).epsilon(DELTA) * 1.001


@pytest.mark.parametrize(
    ("steps", "mu"), [pytest.param(1, 2.0, marks=pytest.mark.slow), (20_000, 1.0), (640_000, 0.8)]
)
@pytest.mark.parametrize("sampler", [Shards(1), Poisson(1.0)])
def test_long_compositions_against_the_closed_form(sampler, steps, mu):
    """A draw of everything takes the way of the PLD, and has a closed form: rounding of 640,000 steps must not make it optimistic."""
    noise = math.sqrt(steps) / mu
    found, exact = (
        compute_privacy_cost(times(steps, event), sampler.neighbours[0])
        for event in (sampler.event(noise), dpa.GaussianDpEvent(noise))
    )
    assert found.accountant.startswith("PLD")
    for delta in (1e-3, 1e-5, 1e-10, 1e-12, 1e-14):
        assert found.epsilon(delta) >= exact.epsilon(delta) - 1e-9
        assert delta < 1e-6 or found.epsilon(delta) <= exact.epsilon(delta) + 0.01
    assert found.epsilon(1e-16) == math.inf  # finer than the arithmetic: no claim
    epsilons = np.linspace(0, mu * mu / 2 + 9 * mu, 50)
    assert (found.delta(epsilons) >= exact.delta(epsilons)).all()


def test_delta_and_epsilon_allow_for_the_same_rounding():
    """Where what arithmetic may lose is half of delta, an epsilon that forgot it would have half as much delta again."""
    found = compute_privacy_cost(times(20_000, Poisson(1.0).event(math.sqrt(20_000))), ADD_REMOVE)
    lost = 2.0**-52 * 21_000
    assert found.epsilon(lost) == math.inf
    assert found.delta(np.array([found.epsilon(2 * lost)]))[0] == pytest.approx(2 * lost, rel=0.05)


def test_drawing_everything_is_no_draw():
    for sampler in (Fixed(7, 7), Shards(1), Poisson(1.0), Poisson(1)):
        found = compute_privacy_cost(times(3, sampler.event(1.5)), sampler.neighbours[0]).epsilon(
            DELTA
        )
        assert found == pytest.approx(
            compute_privacy_cost(times(3, dpa.GaussianDpEvent(1.5)), REPLACE).epsilon(DELTA),
            abs=0.002,
        )


# Other accountants


def grid_of_events(count):
    noises = (0.8, 1.0, 1.5, 2.5, 6.0)
    rates = (0.001, 0.01, 0.1, 0.5)
    steps = (1, 30, 300)
    return [(Poisson(q), z, k) for z, q, k in itertools.product(noises, rates, steps)][
        :: 60 // count
    ]


def check_against_dp_accounting(sampler, noise, steps):
    event = all_of(times(steps, sampler.event(noise)), dpa.GaussianDpEvent(3.0))
    ours = compute_privacy_cost(event, ADD_REMOVE).epsilon(DELTA)
    accountant = PLDAccountant(dpa.NeighboringRelation.ADD_OR_REMOVE_ONE)
    theirs = accountant.compose(event).get_epsilon(DELTA)
    assert theirs - 1e-3 <= ours <= theirs * 1.02
    assert ours <= compute_renyi_cost(event, ADD_REMOVE).epsilon(DELTA) + 0.01  # Renyi is looser


@pytest.mark.parametrize(("sampler", "noise", "steps"), grid_of_events(4))
def test_against_dp_accounting(sampler, noise, steps):
    check_against_dp_accounting(sampler, noise, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "noise", "steps"), grid_of_events(60))
def test_sixty_events_against_dp_accounting(trust, sampler, noise, steps):
    check_against_dp_accounting(sampler, noise, steps)
    trust(
        "G4", "events that cost no less than by another accountant, and at most 2 % more", 1, of=1
    )


def test_coarser_grids_only_cost_more(monkeypatch):
    event = times(200, Shards(20).event(1.0))
    found = []
    for grid in (1e-4, 1e-3, 1e-2):
        monkeypatch.setattr(accounting, "GRID_STEPS", (grid,))
        found.append(compute_privacy_cost(event, REPLACE).epsilon(DELTA))
    assert found[0] <= found[1] <= found[2]
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_renyi_takes_over_and_says_so(monkeypatch):
    tiny = compute_privacy_cost(times(500, Shards(10).event(0.02)), REPLACE)
    assert tiny.accountant.startswith("Renyi")
    assert 1e5 < tiny.epsilon(DELTA) < math.inf
    assert tiny.max_tpr(0.01) == 1.0
    for sampler in (Poisson(0.1), Fixed(2, 20)):
        event = times(20, sampler.event(2.0))
        relation = sampler.neighbours[0]
        fine = compute_privacy_cost(event, relation)
        with monkeypatch.context() as patch:
            patch.setattr(accounting, "MAX_GRID_POINTS", 10)
            rough = compute_privacy_cost(event, relation)
        assert rough.accountant.startswith("Renyi")
        assert (
            rough.epsilon(DELTA)
            == compute_renyi_cost(event, relation).epsilon(DELTA)
            >= fine.epsilon(DELTA)
        )
        assert float(rough.delta(2.0)) >= float(fine.delta(2.0))
        assert rough.max_tpr(0.01) >= fine.max_tpr(0.01)


# Attack power


def test_power_of_a_gaussian():
    """In closed form; and the bound from the profile alone, which other events get, is never below and close."""
    for mu in (0.1, 1.0, 3.0):
        exact = accounting._gaussian_cost(mu)
        generic = PrivacyCost("", exact.delta, exact.epsilon)
        for rate in (1e-4, 0.01, 0.1, 0.5, 0.9):
            assert exact.max_tpr(rate) == pytest.approx(norm.sf(norm.isf(rate) - mu))
            assert (
                exact.max_tpr(rate) - 1e-12 <= generic.max_tpr(rate) <= exact.max_tpr(rate) + 1e-3
            )


def test_power_of_a_sampled_step():
    """Neyman and Pearson's test of drawn against not drawn reaches the bound and never passes it."""
    found = compute_privacy_cost(Poisson(0.3).event(0.7), ADD_REMOVE)
    without = bell(0)
    drawn = 0.7 * bell(0) + 0.3 * bell(1 / 0.7)
    step = X[1] - X[0]
    for rate in (0.001, 0.1):
        best = 0.0
        for null, other in ((without, drawn), (drawn, without)):
            order = np.argsort(-(other + 1e-300) / (null + 1e-300))
            place = np.searchsorted(np.cumsum(null[order]) * step, rate)
            best = max(best, float(other[order][:place].sum() * step))
        assert (
            best - 1e-3 <= found.max_tpr(rate) <= best + 0.02
        )  # the bound is for both directions at once, so not quite reached


@pytest.mark.parametrize("event", [dpa.GaussianDpEvent(1.3), times(50, Shards(10).event(1.3))])
def test_power_rises_with_the_rate_and_the_steps(event):
    found = compute_privacy_cost(event, REPLACE)
    rates = (0, 1e-3, 0.01, 0.5)
    powers = [found.max_tpr(rate) for rate in rates]
    assert powers == sorted(powers)
    assert all(rate <= power <= 1 for power, rate in zip(powers, rates, strict=True))
    assert compute_privacy_cost(times(2, event), REPLACE).max_tpr(0.01) > powers[2]


# What has no proof


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (Poisson(0.1).event(1.0), REPLACE),
        (Poisson(0.1).event(1.0), LOCAL),
        (Fixed(1, 10).event(1.0), ADD_REMOVE),
        (Fixed(1, 10).event(1.0), LOCAL),
        (Shards(10).event(1.0), ADD_REMOVE),
        (dpa.PoissonSampledDpEvent(0.1, dpa.LaplaceDpEvent(1.0)), ADD_REMOVE),
        (dpa.PoissonSampledDpEvent(0.1, times(3, dpa.GaussianDpEvent(1.0))), ADD_REMOVE),
        (dpa.PoissonSampledDpEvent(0.1, dpa.NonPrivateDpEvent()), ADD_REMOVE),
        (all_of(dpa.GaussianDpEvent(1.0), dpa.UnsupportedDpEvent()), REPLACE),
    ],
)
def test_pairs_without_proof_are_refused(event, relation):
    with pytest.raises(PlanError, match="no accounting"):
        compute_privacy_cost(event, relation)


@pytest.mark.parametrize(
    "event", [dpa.ZCDpEvent(1.0), dpa.UnsupportedDpEvent(), times(2, dpa.ZCDpEvent(1.0))]
)
def test_events_without_accounting(event):
    with pytest.raises(PlanError, match="no accounting"):
        compute_privacy_cost(event, REPLACE)


def test_full_is_the_only_local_draw():
    assert compute_privacy_cost(times(4, Full().event(2.0)), LOCAL).mu == 1.0
