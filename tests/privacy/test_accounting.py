"""Events in, epsilon out: recorded values, closed forms, and never less than a brute-force integral."""

import itertools
import math

import dp_accounting as dpa
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.integrate import quad
from scipy.stats import norm

from privot.errors import PlanError
from privot.privacy import accounting
from privot.privacy.accounting import (
    Neighbours,
    PrivacyCost,
    compute_privacy_cost,
    compute_renyi_cost,
    sum_pure_epsilons,
)
from privot.privacy.plan import Plan, Stage
from privot.privacy.pure_epsilon import randomized_response_event
from privot.privacy.sampling import Fixed, Poisson, Shards
from privot.privacy.subsampled_gaussian import poisson_pld

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
DELTA = 1e-5


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def repeat(count, event):
    return dpa.SelfComposedDpEvent(event, count)


def compose(*events):
    return dpa.ComposedDpEvent(list(events))


def gaussian_cost(noise):
    return compute_privacy_cost(dpa.GaussianDpEvent(noise), REPLACE)


def sampled_cost(sampler, noise, steps=1):
    return compute_privacy_cost(repeat(steps, sampler.event(noise)), sampler.neighbours[0])


# Recorded values


@pytest.mark.parametrize(
    ("sampler", "noise", "steps", "epsilon", "within"),
    [
        (Poisson(0.00427), 1.1, 14_040, 2.380, 0.01),  # of dp_accounting's PLD; PRV gives 2.390
        slow(Poisson(0.001), 1.07, 640_000, 4.118, 0.01),  # PRV 4.125
        (Shards(1000), 1.07, 640_000, 5.5, 0.05),  # GS-WGAN with a draw for each row
        slow(Shards(1000), 0.82, 640_000, 10.0, 0.3),
        slow(Shards(1000), 0.85, 640_000, 9.05, 0.1),
        slow(Poisson(0.01), 0.5, 1000, 13.36, 0.01),
        slow(Poisson(0.05), 0.3, 1000, 262.6, 0.3),
    ],
)
def test_recorded_values(sampler, noise, steps, epsilon, within):
    cost = sampled_cost(sampler, noise, steps)
    assert cost.epsilon(DELTA) == pytest.approx(epsilon, abs=within)
    assert cost.accountant.startswith("PLD")


def test_a_shared_draw_is_one_event(coarse_accounting):
    """GS-WGAN as published: 32 rows share a critic, one answer at noise / sqrt(32), not 32."""
    shared = sampled_cost(Shards(1000), 1.07 / math.sqrt(32), 20_000).epsilon(DELTA)
    assert shared == pytest.approx(346.7, abs=2)


# Closed forms


def exact_delta(mu, epsilon):
    """The Gaussian's privacy profile in 60 digits."""
    with mpmath.workdps(60):
        half = mpmath.mpf(mu) / 2
        ratio = mpmath.mpf(epsilon) / mpmath.mpf(mu)
        return mpmath.ncdf(half - ratio) - mpmath.exp(epsilon) * mpmath.ncdf(-half - ratio)


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
    cost = gaussian_cost(noise)
    truth = exact_epsilon(1 / noise, delta)
    assert cost.accountant == "analytic Gaussian"
    assert cost.epsilon(delta) == pytest.approx(truth, rel=1e-9, abs=1e-9)
    for epsilon in (0.0, 0.3, truth, 2 * truth + 1):
        expected = float(exact_delta(1 / noise, epsilon))
        assert float(cost.delta(epsilon)) == pytest.approx(expected, rel=1e-6, abs=1e-15)
    trust("G4", "closed forms met to 1e-9", 1, of=1)


def test_the_classical_formula_is_not_used():
    """At epsilon 10 its noise, sqrt(2 log(1.25/delta))/epsilon, has 2.3 times the claimed delta."""
    cost = gaussian_cost(math.sqrt(2 * math.log(1.25 / DELTA)) / 10)
    assert float(cost.delta(10.0)) == pytest.approx(2.3 * DELTA, rel=0.05)
    assert cost.epsilon(DELTA) > 10


def test_gaussians_add_up_in_squares():
    inner = compose(dpa.GaussianDpEvent(1.0), repeat(5, dpa.GaussianDpEvent(4.0)))
    several = compose(repeat(3, dpa.GaussianDpEvent(2.0)), repeat(2, inner))
    mu = math.sqrt(3 / 4 + 2 * (1 + 5 / 16))
    for neighbours in Neighbours:
        cost = compute_privacy_cost(several, neighbours)
        assert cost.mu == pytest.approx(mu, rel=1e-15)
        assert cost.epsilon(DELTA) == pytest.approx(exact_epsilon(mu, DELTA), rel=1e-9)


def test_nothing_costs_nothing_and_no_noise_has_no_epsilon():
    nothing = compute_privacy_cost(compose(), REPLACE)
    assert nothing.epsilon(1e-12) == 0
    assert nothing.delta(np.array([0.0, 1.0])).tolist() == [0, 0]
    assert nothing.max_tpr(0.1) == pytest.approx(0.1)
    bare = compose(dpa.GaussianDpEvent(9.0), repeat(3, dpa.NonPrivateDpEvent()))
    cost = compute_privacy_cost(bare, ADD_REMOVE)
    assert cost.epsilon(0.5) == math.inf
    assert cost.delta(np.array([0.0, 1e9])).tolist() == [1, 1]
    assert cost.max_tpr(0.001) == 1.0
    assert cost.accountant == "no privacy"


# Brute force


X = np.linspace(-12, 40, 104_001)
TWO_STEPS = np.linspace(-9, 9, 1501)
TWO_STEPS_AREA = (TWO_STEPS[1] - TWO_STEPS[0]) ** 2
EPSILONS = [-1.0, -0.2, 0.0, 0.1, 0.5, 1.0, 2.0, 4.0]


def bell(center, x=X):
    return norm.pdf(x - center)


def mix(rate, center, other, x=X):
    return (1 - rate) * bell(other, x) + rate * bell(center, x)


def integrate_delta(p, q, epsilon, step=X[1] - X[0]):
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * step)


def integrate_two_steps(first, second, epsilon):
    """Both steps lean the same way, or each its own; a step is a pair (p, q)."""
    p, q = (np.multiply.outer(first[side], second[side]) for side in (0, 1))
    return integrate_delta(p, q, epsilon, TWO_STEPS_AREA)


def mix_worst_pair(rate, shift, others):
    """A changed record at either end of the ball, drawn with the rate, the other draws anywhere."""
    return mix(rate, -shift / 2, others), mix(rate, shift / 2, others)


@pytest.mark.parametrize(
    ("rate", "noise"),
    [
        *itertools.product([1e-4, 0.06, 0.5, 0.999, 1.0], [1.0, 20.0]),
        *(slow(rate, 0.3) for rate in (1e-4, 0.06, 0.5, 0.999, 1.0)),
    ],
)
def test_poisson_draws_are_priced_as_dp_accounting_does(rate, noise):
    """Its own distribution, made without a loop over the grid: alone and composed."""
    theirs = pld.from_gaussian_mechanism(
        noise, value_discretization_interval=1e-2, sampling_prob=rate
    )
    ours = poisson_pld(rate, noise, 1e-2)
    eps = np.linspace(-2, 5, 50)
    for one, other in ((ours, theirs), (ours.self_compose(200), theirs.self_compose(200))):
        expected = other.get_delta_for_epsilon(eps)
        assert one.get_delta_for_epsilon(eps) == pytest.approx(expected, rel=1e-9, abs=1e-12)


one_step = pytest.mark.parametrize(
    ("rate", "noise"), [(0.5, 1.0), (0.1, 0.7), (0.01, 0.5), (0.2, 3.0), (1.0, 1.0)]
)


@one_step
def test_one_poisson_step_against_the_integral(rate, noise):
    cost = sampled_cost(Poisson(rate), noise)
    without = bell(0)
    drawn = mix(rate, 1 / noise, 0)
    for epsilon in EPSILONS:
        truth = max(
            integrate_delta(without, drawn, epsilon), integrate_delta(drawn, without, epsilon)
        )
        assert truth - 1e-7 <= float(cost.delta(epsilon)) <= truth + 1e-4


@one_step
def test_one_replaced_step_against_the_integral(rate, noise):
    """Wherever in the ball the other draws lie; and somewhere the bound is reached."""
    size = round(1 / rate)
    cost = sampled_cost(Shards(size) if noise > 0.9 else Fixed(1, size), noise)
    pairs = [mix_worst_pair(rate, 1 / noise, at / noise) for at in (-0.5, -0.25, 0.1, 0.5)]
    for epsilon in EPSILONS:
        truth = max(integrate_delta(*pair, epsilon) for p, q in pairs for pair in ((p, q), (q, p)))
        assert truth - 1e-7 <= float(cost.delta(epsilon)) <= truth + 1e-4


@pytest.mark.parametrize(
    ("sampler", "noise"), [(Poisson(0.2), 0.8), (Shards(5), 0.8), (Fixed(1, 2), 1.5)]
)
def test_two_steps_against_the_integral(sampler, noise):
    """A one-sided distribution would miss steps that lean their own way."""
    rate = 0.5 if isinstance(sampler, Fixed) else 0.2
    low = bell(-0.5 / noise, TWO_STEPS)
    mixed = mix(rate, 0.5 / noise, -0.5 / noise, TWO_STEPS)
    ways = [(mixed, low), (low, mixed)]
    cost = sampled_cost(sampler, noise, 2)
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        for first, second in itertools.product(ways, ways):
            if sampler == Poisson(0.2) and first is not second:
                continue  # the record is in all the datasets of one side, or in none
            truth = integrate_two_steps(first, second, epsilon)
            assert truth <= float(cost.delta(epsilon)) + 1e-7


@pytest.mark.parametrize(
    ("rate", "noise"), [(0.5, 1.0), slow(0.1, 0.7), slow(1.0, 1.0), slow(0.01, 0.5)]
)
def test_poisson_draws_under_replace_against_the_integral(rate, noise):
    """A record at either end of its ball or at its middle: alone, and two steps together."""
    once, twice = (
        Plan((Stage("it", "sum", noise, steps, Poisson(rate)),), ADD_REMOVE)
        .under_replace_one()
        .cost()
        for steps in (1, 2)
    )
    ends = [mix(rate, end / noise, 0) for end in (-1, 0, 1)]
    for p, q in itertools.permutations(ends, 2):
        for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0):
            assert integrate_delta(p, q, epsilon) <= float(once.delta(epsilon)) + 1e-9
    low, high = (mix(rate, end / noise, 0, TWO_STEPS) for end in (-1, 1))
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        for first, second in itertools.product([(low, high), (high, low)], repeat=2):
            truth = integrate_two_steps(first, second, epsilon)
            assert truth <= float(twice.delta(epsilon)) + 3e-6  # of the integral


def test_what_a_wrong_claim_would_hide():
    """Poisson draws under replace need half the noise; sums of shards are not amplified at all."""
    claimed = float(sampled_cost(Fixed(1, 2), 1.0).delta(1.0))
    assert integrate_delta(*mix_worst_pair(0.5, 2.0, others=0.0), 1.0) > 1.5 * claimed
    # Sums of other shards may lie anywhere, so that the answer tells which shard was drawn.
    claimed = float(sampled_cost(Shards(10), 1.0).delta(1.0))
    assert integrate_delta(*mix_worst_pair(0.1, 1.0, others=30.0), 1.0) > 10 * claimed


@pytest.mark.parametrize(
    ("drawn", "size", "noise", "steps"), [slow(1, 100, 1.0, 300), (10, 20, 4.0, 30)]
)
def test_without_replacement_lies_between_its_neighbours(drawn, size, noise, steps):
    """Above the one-sided Poisson pair, one of its worst cases, and below Renyi's bound."""
    ours = sampled_cost(Fixed(drawn, size), noise, steps).epsilon(DELTA)
    poisson = repeat(steps, Poisson(drawn / size).event(noise))
    accountant = PLDAccountant(dpa.NeighboringRelation.ADD_OR_REMOVE_ONE).compose(poisson)
    renyi = compute_renyi_cost(repeat(steps, Fixed(drawn, size).event(noise)), REPLACE)
    assert accountant.get_epsilon(DELTA) - 1e-3 <= ours <= renyi.epsilon(DELTA) * 1.001


@pytest.mark.parametrize(
    ("sampler", "steps", "mu"),
    [
        (Shards(1), 20_000, 1.0),
        (Poisson(1.0), 640_000, 0.8),
        slow(Fixed(7, 7), 3, 1.0),
        slow(Poisson(1), 3, 1.0),
        slow(Shards(1), 1, 2.0),
        slow(Poisson(1.0), 1, 2.0),
        slow(Poisson(1.0), 20_000, 1.0),
        slow(Shards(1), 640_000, 0.8),
    ],
)
def test_long_compositions_against_the_closed_form(sampler, steps, mu):
    """A draw of everything has a closed form: rounding of many steps must not make it optimistic."""
    noise = math.sqrt(steps) / mu
    cost = sampled_cost(sampler, noise, steps)
    exact = compute_privacy_cost(repeat(steps, dpa.GaussianDpEvent(noise)), REPLACE)
    assert cost.accountant.startswith("PLD")
    for delta in (1e-3, 1e-5, 1e-10, 1e-12, 1e-14):
        assert cost.epsilon(delta) >= exact.epsilon(delta) - 1e-9
        assert delta < 1e-6 or cost.epsilon(delta) <= exact.epsilon(delta) + 0.01
    assert cost.epsilon(1e-16) == math.inf  # finer than the arithmetic: no claim
    epsilons = np.linspace(0, mu * mu / 2 + 9 * mu, 50)
    assert (cost.delta(epsilons) >= exact.delta(epsilons)).all()


def test_delta_and_epsilon_allow_for_the_same_rounding():
    """Where arithmetic may lose half of delta, an epsilon that forgot it would have half as much again."""
    cost = sampled_cost(Poisson(1.0), math.sqrt(20_000), 20_000)
    lost = 2.0**-52 * 21_000
    assert cost.epsilon(lost) == math.inf
    assert cost.delta(np.array([cost.epsilon(2 * lost)]))[0] == pytest.approx(2 * lost, rel=0.05)


# Grids and other accountants


def list_events(count):
    noises = (0.8, 1.0, 1.5, 2.5, 6.0)
    rates = (0.001, 0.01, 0.1, 0.5)
    events = list(itertools.product(noises, rates, (1, 30, 300)))
    return events[:: len(events) // count]


def check_against_dp_accounting(noise, rate, steps):
    event = compose(repeat(steps, Poisson(rate).event(noise)), dpa.GaussianDpEvent(3.0))
    ours = compute_privacy_cost(event, ADD_REMOVE).epsilon(DELTA)
    accountant = PLDAccountant(dpa.NeighboringRelation.ADD_OR_REMOVE_ONE).compose(event)
    theirs = accountant.get_epsilon(DELTA)
    assert theirs - 1e-3 <= ours <= theirs * 1.02
    assert ours <= compute_renyi_cost(event, ADD_REMOVE).epsilon(DELTA) + 0.01  # Renyi is looser


@pytest.mark.parametrize(("noise", "rate", "steps"), list_events(1))
def test_against_dp_accounting(noise, rate, steps):
    check_against_dp_accounting(noise, rate, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "rate", "steps"), list_events(60))
def test_sixty_events_against_dp_accounting(trust, noise, rate, steps):
    check_against_dp_accounting(noise, rate, steps)
    what = "events that cost no less than by another accountant, and at most 2 % more"
    trust("G4", what, 1, of=1)


def test_coarser_grids_only_cost_more(monkeypatch):
    epsilons = []
    for grid in (1e-4, 1e-3, 1e-2):
        monkeypatch.setattr(accounting, "GRID_STEPS", (grid,))
        epsilons.append(sampled_cost(Shards(20), 1.0, 200).epsilon(DELTA))
    assert epsilons == sorted(epsilons)
    assert epsilons[1] == pytest.approx(epsilons[0], rel=0.01)


def estimate_grid_points(sampled, mu, grid):
    """20 deviations of a composed loss, and twice the range of one step, by quadrature."""
    variance = mu**2
    width = 0.0
    for rate, noise, count in sampled:
        shift = 1 / noise

        def density(x, rate=rate, shift=shift):
            return mix(rate, shift, 0, x)

        def loss(x, rate=rate, shift=shift):
            return math.log(1 - rate + rate * math.exp(shift * x - shift**2 / 2))

        reach = {"a": -10, "b": shift + 10, "points": [0, shift], "limit": 200}
        mean = quad(lambda x: density(x) * loss(x), **reach)[0]
        square = quad(lambda x, mean=mean: density(x) * (loss(x) - mean) ** 2, **reach)[0]
        variance += count * square
        width = max(width, loss(shift + 10) - loss(-10))
    return (20 * math.sqrt(variance) + 2 * width) / grid


@pytest.mark.parametrize(
    ("sampled", "mu"),
    [
        ([(0.1, 0.7, 40)], 0.0),
        ([(0.3, 2.0, 5), (0.02, 0.5, 300)], 1.7),
        ([(1.0, 1.5, 3)], 0.4),
        ([(0.5, 0.3, 1)], 3.0),
    ],
)
def test_the_finest_grid_that_fits_is_taken(monkeypatch, sampled, mu):
    """So every machine certifies the same number: whether a grid fits is decided beforehand."""
    monkeypatch.setattr(accounting, "GRID_STEPS", (0.25, 1.0))
    fine, rough = (estimate_grid_points(sampled, mu, grid) for grid in (0.25, 1.0))
    for most, expected in (
        (fine * 1.001, 0.25),
        (fine * 0.999, 1.0),
        (rough * 1.001, 1.0),
        (rough * 0.999, None),
    ):
        monkeypatch.setattr(accounting, "MAX_GRID_POINTS", most)
        assert accounting._choose_grid_step(sampled, mu) == expected


def test_renyi_takes_over_and_says_so(monkeypatch, coarse_accounting):
    tiny = sampled_cost(Shards(10), 0.02, 500)
    assert tiny.accountant.startswith("Renyi")
    assert 1e5 < tiny.epsilon(DELTA) < math.inf
    assert tiny.max_tpr(0.01) == 1.0
    for sampler in (Poisson(0.1), Fixed(2, 20)):
        fine = sampled_cost(sampler, 2.0, 20)
        with monkeypatch.context() as patch:
            patch.setattr(accounting, "MAX_GRID_POINTS", 10)
            rough = sampled_cost(sampler, 2.0, 20)
        assert rough.accountant.startswith("Renyi")
        event = repeat(20, sampler.event(2.0))
        renyi = compute_renyi_cost(event, sampler.neighbours[0])
        assert rough.epsilon(DELTA) == renyi.epsilon(DELTA) >= fine.epsilon(DELTA)
        assert float(rough.delta(2.0)) >= float(fine.delta(2.0))
        assert rough.max_tpr(0.01) >= fine.max_tpr(0.01)


def test_gaussians_beside_sampled_answers_and_hardly_any_noise_are_counted(coarse_accounting):
    both = compute_privacy_cost(
        compose(Poisson(0.1).event(2.0), dpa.GaussianDpEvent(0.5)), ADD_REMOVE
    ).epsilon(DELTA)
    assert 5 < gaussian_cost(0.5).epsilon(DELTA) < both < gaussian_cost(0.45).epsilon(DELTA)
    # Losses of over 600 are not told apart: what is claimed of them is nothing.
    everything = sampled_cost(Fixed(5, 5), 0.03)
    assert everything.epsilon(DELTA) >= gaussian_cost(0.03).epsilon(DELTA)


# Pure epsilons


def test_pure_epsilons_are_added_and_never_under_the_exact_price():
    coin = dpa.RandomizedResponseDpEvent(0.5, 4)
    leaves = [(dpa.LaplaceDpEvent(1.0), 1), (dpa.LaplaceDpEvent(0.5), 3), (coin, 1)]
    total = 1 + 3 * 2 + math.log((0.5 + 0.125) / 0.125)  # the true answer against another
    assert sum_pure_epsilons(leaves) == pytest.approx(total, rel=1e-12)
    several = compose(*(repeat(count, leaf) for leaf, count in leaves))
    ours = compute_privacy_cost(several, LOCAL)
    assert ours.accountant == "pure epsilons added"
    assert ours.epsilon(0.0) == ours.epsilon(DELTA) == pytest.approx(total, rel=1e-12)
    exact = pld.from_laplace_mechanism(1.0).compose(pld.from_randomized_response(0.5, 4))
    exact = exact.compose(pld.from_laplace_mechanism(0.5).self_compose(3))
    for epsilon in (0.0, 1.0, 3.0, 4.5, 8.0):  # its grid is pessimistic by 1e-4
        assert ours.delta(epsilon) >= exact.get_delta_for_epsilon(epsilon) - 1e-4
    power = min(math.exp(total) * 0.01, 1 - math.exp(-total) * 0.99)
    assert ours.max_tpr(0.01) == pytest.approx(power, rel=1e-6)


def test_pure_epsilons_on_top_of_gaussians():
    both = compute_privacy_cost(compose(dpa.GaussianDpEvent(2.0), dpa.LaplaceDpEvent(0.5)), LOCAL)
    alone = gaussian_cost(2.0)
    assert both.accountant == "analytic Gaussian, pure epsilons added"
    assert both.epsilon(DELTA) == pytest.approx(alone.epsilon(DELTA) + 2.0)
    exact = pld.from_gaussian_mechanism(2.0).compose(pld.from_laplace_mechanism(0.5))
    assert both.delta(2.5) >= exact.get_delta_for_epsilon(2.5) - 1e-6
    assert both.max_tpr(0.1) >= alone.max_tpr(0.1)


def test_renyi_of_no_delta_is_the_sum_or_nothing():
    laplace = dpa.LaplaceDpEvent(0.5)
    mixed = compose(laplace, dpa.GaussianDpEvent(1.0))
    assert compute_renyi_cost(repeat(3, laplace), LOCAL).epsilon(0.0) == pytest.approx(6.0)
    assert compute_renyi_cost(mixed, LOCAL).epsilon(0.0) == math.inf


def test_a_response_has_its_epsilon_or_none():
    for epsilon in (0.1, 1.0, 30.0, 600.0):
        leaves = [(randomized_response_event(1 / epsilon), 1)]
        assert sum_pure_epsilons(leaves) == pytest.approx(epsilon, rel=1e-9)
    for epsilon in (700.0, 700.5, 1e6):
        assert randomized_response_event(1 / epsilon) == dpa.NonPrivateDpEvent()


# Attack power


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_power_of_a_gaussian(mu):
    """In closed form; the bound from the profile alone, as of other events, is never below it."""
    exact = accounting._gaussian_cost(mu)
    generic = PrivacyCost("", exact.delta, exact.epsilon)
    for rate in (1e-4, 0.01, 0.1, 0.5, 0.9):
        power = norm.sf(norm.isf(rate) - mu)
        assert exact.max_tpr(rate) == pytest.approx(power)
        assert power - 1e-12 <= generic.max_tpr(rate) <= power + 1e-3


def test_power_of_a_sampled_step():
    """Neyman and Pearson's test of drawn against not drawn reaches the bound and never passes it."""
    cost = sampled_cost(Poisson(0.3), 0.7)
    without = bell(0)
    drawn = mix(0.3, 1 / 0.7, 0)
    step = X[1] - X[0]
    for rate in (0.001, 0.1):
        best = 0.0
        for null, other in ((without, drawn), (drawn, without)):
            order = np.argsort(-(other + 1e-300) / (null + 1e-300))
            cut = np.searchsorted(np.cumsum(null[order]) * step, rate)
            best = max(best, float(other[order][:cut].sum() * step))
        # The bound is for both directions at once, so not quite reached.
        assert best - 1e-3 <= cost.max_tpr(rate) <= best + 0.02


# What has no proof


@pytest.mark.parametrize(
    ("event", "neighbours"),
    [
        (Poisson(0.1).event(1.0), REPLACE),
        (Poisson(0.1).event(1.0), LOCAL),
        (Fixed(1, 10).event(1.0), ADD_REMOVE),
        (Fixed(1, 10).event(1.0), LOCAL),
        (Shards(10).event(1.0), ADD_REMOVE),
        (dpa.PoissonSampledDpEvent(0.1, dpa.LaplaceDpEvent(1.0)), ADD_REMOVE),
        (dpa.PoissonSampledDpEvent(0.1, repeat(3, dpa.GaussianDpEvent(1.0))), ADD_REMOVE),
        (dpa.PoissonSampledDpEvent(0.1, dpa.NonPrivateDpEvent()), ADD_REMOVE),
        (compose(dpa.GaussianDpEvent(1.0), dpa.UnsupportedDpEvent()), REPLACE),
        (dpa.ZCDpEvent(1.0), REPLACE),
        (repeat(2, dpa.ZCDpEvent(1.0)), REPLACE),
        (dpa.UnsupportedDpEvent(), REPLACE),
    ],
)
def test_pairs_without_proof_are_refused(event, neighbours):
    with pytest.raises(PlanError, match="no accounting"):
        compute_privacy_cost(event, neighbours)
