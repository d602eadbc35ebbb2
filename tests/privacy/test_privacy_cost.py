"""Numbers on which a price hangs: where a grid ends, what a wall lets through to the last bit, and what pure epsilons add."""

import math
import os
from decimal import Decimal
from fractions import Fraction

import dp_accounting as dpa
import numpy as np
import pytest
import torch
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
from privot.privacy.noise import SecretRandom, bernoulli_bits, choose_grid, probability_bits
from privot.privacy.plan import AttackPowerTarget, Budget, Plan, Stage
from privot.privacy.pure_epsilon import randomized_response_event
from privot.privacy.sampling import Fixed, Poisson

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours


def points(sampled, mu, grid):
    """The width that a composed loss is judged to have: 20 deviations of it, and twice the range of one step, by quadrature."""
    variance = mu**2
    width = 0.0
    for rate, noise, count in sampled:
        shift = 1 / noise

        def density(x, rate=rate, shift=shift):
            return (1 - rate) * norm.pdf(x) + rate * norm.pdf(x - shift)

        def loss(x, rate=rate, shift=shift):
            return math.log(1 - rate + rate * math.exp(shift * x - shift**2 / 2))

        reach = {"a": -10, "b": shift + 10, "points": [0, shift], "limit": 200}
        mean = quad(lambda x: density(x) * loss(x), **reach)[0]
        variance += (
            count * quad(lambda x, mean=mean: density(x) * (loss(x) - mean) ** 2, **reach)[0]
        )
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
    """So every machine certifies the same number: a grid fits if its points, known beforehand, are fewer than the most."""
    monkeypatch.setattr(accounting, "GRID_STEPS", (0.25, 1.0))
    fine, rough = (points(sampled, mu, grid) for grid in (0.25, 1.0))
    for most, wanted in (
        (fine * 1.001, 0.25),
        (fine * 0.999, 1.0),
        (rough * 1.001, 1.0),
        (rough * 0.999, None),
    ):
        monkeypatch.setattr(accounting, "MAX_GRID_POINTS", most)
        assert accounting._choose_grid_step(sampled, mu) == wanted


def test_hardly_any_noise_on_all_records_claims_no_less_than_a_gaussian(coarse_accounting):
    """Losses of over 600 are not told apart: what is claimed of them is nothing."""
    found = compute_privacy_cost(Fixed(5, 5).event(0.03), REPLACE)
    assert found.epsilon(1e-5) >= compute_privacy_cost(dpa.GaussianDpEvent(0.03), REPLACE).epsilon(
        1e-5
    )


def test_a_gaussian_beside_sampled_answers_is_counted(coarse_accounting):
    both = dpa.ComposedDpEvent([Poisson(0.1).event(2.0), dpa.GaussianDpEvent(0.5)])
    assert (
        compute_privacy_cost(both, ADD_REMOVE).epsilon(1e-5)
        > compute_privacy_cost(dpa.GaussianDpEvent(0.5), ADD_REMOVE).epsilon(1e-5)
        > 5
    )
    assert compute_privacy_cost(both, ADD_REMOVE).epsilon(1e-5) < compute_privacy_cost(
        dpa.GaussianDpEvent(0.45), ADD_REMOVE
    ).epsilon(1e-5)


def test_pure_epsilons_are_added_whatever_they_come_from():
    laplace = dpa.LaplaceDpEvent(0.5)
    coin = dpa.RandomizedResponseDpEvent(0.2, 4)
    several = dpa.ComposedDpEvent([dpa.SelfComposedDpEvent(laplace, 3), coin])
    whole = 3 * 2 + math.log(
        (0.8 + 0.05) / 0.05
    )  # the answer that is true against one of the others
    assert sum_pure_epsilons([(laplace, 3), (coin, 1)]) == pytest.approx(whole, rel=1e-12)
    assert compute_privacy_cost(several, LOCAL).epsilon(0.0) == pytest.approx(whole, rel=1e-12)
    assert compute_privacy_cost(several, LOCAL).accountant == "pure epsilons added"
    beside = compute_privacy_cost(dpa.ComposedDpEvent([several, dpa.GaussianDpEvent(1.0)]), LOCAL)
    assert beside.accountant == "analytic Gaussian, pure epsilons added"
    assert beside.epsilon(1e-5) == pytest.approx(
        whole + compute_privacy_cost(dpa.GaussianDpEvent(1.0), LOCAL).epsilon(1e-5)
    )


def test_renyi_of_no_delta_is_the_sum_or_nothing():
    laplace = dpa.LaplaceDpEvent(0.5)
    assert compute_renyi_cost(dpa.SelfComposedDpEvent(laplace, 3), LOCAL).epsilon(
        0.0
    ) == pytest.approx(6.0)
    assert (
        compute_renyi_cost(dpa.ComposedDpEvent([laplace, dpa.GaussianDpEvent(1.0)]), LOCAL).epsilon(
            0.0
        )
        == math.inf
    )


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 30.0, 600.0])
def test_a_response_has_its_epsilon(epsilon):
    assert sum_pure_epsilons([(randomized_response_event(1 / epsilon), 1)]) == pytest.approx(
        epsilon, rel=1e-9
    )


@pytest.mark.parametrize("epsilon", [700.0, 700.5, 1e6])
def test_a_response_without_a_number_is_none(epsilon):
    assert randomized_response_event(1 / epsilon) == dpa.NonPrivateDpEvent()


def test_a_wall_lets_through_what_costs_as_much():
    price = PrivacyCost("it", np.ones_like, lambda delta: 1.0, 1.0)
    assert Budget(1.0).allows(price)
    assert not Budget(math.nextafter(1.0, 0)).allows(price)
    power = price.max_tpr(0.1)
    assert AttackPowerTarget(power, 0.1).allows(price)
    assert not AttackPowerTarget(math.nextafter(power, 0), 0.1).allows(price)


@pytest.mark.parametrize("noise", [1e-30, 1e30])
def test_noise_whose_square_has_no_number_is_refused(noise):
    with pytest.raises(PlanError, match="multiplier"):
        Stage("it", "sum", noise)


def test_runs_of_two_relations_are_added_up_under_replace():
    plan = Plan((Stage("it", "sum", 3.0, 2),), ADD_REMOVE)
    assert plan.under_replace_one() == Plan((Stage("it", "sum", 1.5, 2),), REPLACE)
    assert Plan(plan.stages, CLIENT).under_replace_one() == Plan(plan.stages, REPLACE)
    for rate, drawn in (
        (0.5, 2**29),
        (1e-12, 1),
        (1.0, 2**30),
        (0.3, math.ceil(0.3 * 2**30)),
    ):  # never a smaller rate
        more = Plan(
            (*plan.stages, Stage("more", "sum", 1.0, 7, Poisson(rate))), ADD_REMOVE
        ).under_replace_one()
        assert more == Plan(
            (Stage("it", "sum", 1.5, 2), Stage("more", "sum", 0.5, 7, Fixed(drawn, 2**30))), REPLACE
        )
    assert more.cost().epsilon(1e-5) < math.inf


def test_a_draw_with_certainty_takes_every_record(monkeypatch):
    monkeypatch.setattr(
        os, "urandom", lambda count: b"\xff" * count
    )  # a uniform of 1, the largest there is
    assert Poisson(1.0).draw(3, SecretRandom()).tolist() == [0, 1, 2]


# Coins and digits


@pytest.mark.parametrize(
    "share",
    [
        Decimal(1) / 3,
        Decimal("0.9999999999999999999999999999999"),
        Decimal("1e-40"),
        Decimal(0),
        Decimal("0.5"),
    ],
)
def test_digits_are_those_of_the_chance(share):
    byte, *words = probability_bits(share)
    whole = Fraction(byte, 2**8) + sum(
        Fraction(word, 2 ** (8 + 63 * place)) for place, word in enumerate(words, 1)
    )
    assert 0 <= Fraction(share) - whole < Fraction(1, 2**197)
    assert byte < 2**8
    assert all(0 <= word < 2**63 for word in words)


@pytest.mark.parametrize("power", [-60, -3, 0, 2, 6])
def test_a_chance_is_that_of_a_binary_digit(power):
    byte, first, *_ = bernoulli_bits(power)
    assert (byte + first / 2**63) / 2**8 == pytest.approx(1 / (1 + math.exp(2.0**power)), rel=1e-14)


class Told(SecretRandom):
    """Bytes that are known beforehand, the same for every flip."""

    def __init__(self, *told):
        super().__init__()
        self._told = list(told)

    def _random_bytes(self, count):
        return bytearray(self._told.pop(0)(count))


def word(value):
    return lambda count: value.to_bytes(8, "little") * (count // 8)


def test_digits_are_compared_until_they_differ():
    words = (100, 2**62 + 5, 7, 2**63 - 1)
    for byte, heads in ((99, True), (101, False)):
        assert (
            Told(lambda count, byte=byte: bytes([byte]) * count, *[word(0)] * 3)
            .bernoulli(words, 2)
            .tolist()
            == [heads] * 2
        )
    for place in (1, 2, 3):
        for step, heads in ((-1, True), (1, False)):
            if (value := words[place] + step) < 2**63:
                drawn = [
                    *words[1:place],
                    value,
                    *[0 if heads is False else 2**63 - 1] * (3 - place),
                ]
                assert (
                    Told(lambda count: b"\x64" * count, *map(word, drawn))
                    .bernoulli(words, 1)
                    .item()
                    is heads
                )
    same = Told(lambda count: b"\x64" * count, *map(word, words[1:])).bernoulli(words, 1)
    assert not same.item(), "what equals the chance to the last digit is not below it"
    high = Told(
        lambda count: b"\x64" * count, *[word(each + 2**63) for each in (words[1] - 1, 0, 0)]
    ).bernoulli(words, 1)
    assert high.item(), "the bit above the 63 says nothing"


def test_the_sides_of_laplace_noise_are_equally_likely():
    """All 256 bytes for the coin of the side, after digits that are all zero: half of the values on either side of -1/2."""
    digits = [lambda count: b"\xff" * count, *[lambda count: b""] * 3] * (5 + 7)
    values = Told(*digits, lambda count: bytes(range(256)), word(0)).discrete_laplace((256,), 5)
    assert values.tolist() == [0] * 128 + [-1] * 128


def test_digits_of_laplace_noise_are_powers_of_two():
    def bytes_of(byte):
        return lambda count: bytes([byte]) * count

    for place in range(5 + 3):  # of the digits above, heads begin with a byte of zero, as tails may
        digits = [
            told
            for digit in range(12)
            for told in (bytes_of(0 if digit == place else 255), *[word(0)] * 3)
        ]
        assert Told(*digits, bytes_of(0), word(0)).discrete_laplace((1,), 5).item() == 2**place
    assert (
        Told(*[bytes_of(0)] * 48, bytes_of(0), word(0)).discrete_laplace((1,), 5).item()
        == 2**12 - 1
    )


def test_recorded_grids():
    """2^-24 of the smaller scale, but never under 2^-30 of the larger."""
    assert [choose_grid(1.0, 1.0), choose_grid(1.0, 0.3), choose_grid(5.0, 0.0)] == [
        2.0**-24,
        2.0**-26,
        2.0**-22,
    ]
    assert [choose_grid(1.0, 2.0**20), choose_grid(2.0**20, 1.0), choose_grid(1.0, 2.0**6)] == [
        2.0**-10,
        2.0**-10,
        2.0**-24,
    ]


def test_seeds_are_marked_and_streams_go_on():
    assert not torch.equal(SecretRandom(3).normal((4,)), SecretRandom(4).normal((4,)))
    one = SecretRandom(3)
    assert not torch.equal(one.normal((4,)), one.normal((4,)))
