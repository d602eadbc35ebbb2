"""Every attack has a leaky and a null control, passes both, and a broken attack does not."""

import numpy as np
import pytest
from scipy.stats import hypergeom

from privot.attacks import ATTACKS, controls
from privot.attacks.controls import CONTROLS, Power, chance, power
from privot.errors import DataError, SettingError


def test_every_attack_has_a_control():
    assert set(ATTACKS) == set(CONTROLS)


@pytest.mark.parametrize("name", ATTACKS)
def test_the_attack_reaches_its_power_and_finds_nothing_in_nothing(name, one_thread):
    try:
        found = power(name)
    except DataError as error:
        assert "lpips" in ATTACKS[name].needs
        pytest.skip(str(error))
    assert found.passed, found.sentence
    assert found.leaky >= found.stated >= 0.75
    assert found.chance > 0.01
    assert found.publishable  # digits are public
    assert "it works" in found.sentence
    print(found.sentence)


def test_controls_are_by_the_seed(one_thread):
    assert power("gan-leaks-full", 3) == power("gan-leaks-full", 3)
    assert power("gan-leaks-full", 3).leaky != power("gan-leaks-full", 4).leaky


@pytest.mark.parametrize(
    "wrong",
    [
        lambda leaky, seed: controls.Scores(np.random.default_rng(seed).normal(size=100), np.random.default_rng(seed + 1).normal(size=100)),
        lambda leaky, seed: controls._nearest("pixels")(leaky, seed)[::-1],  # the sign is wrong
        lambda leaky, seed: controls._nearest("pixels")(True, seed),  # it knows who is a member
    ],
    ids=["blind", "upside down", "told the answer"],
)
def test_a_broken_attack_does_not_pass(monkeypatch, wrong):
    monkeypatch.setitem(CONTROLS, "nearest-pixels", (wrong, 0.9))
    found = power("nearest-pixels")
    assert isinstance(found, Power)
    assert not found.passed
    assert "DO NOT TRUST" in found.sentence


def test_the_p_value_is_exact():
    # All ways to choose 4 members of 8 are equally likely: P(p <= t) <= t for each value t that p takes, with equality.
    rng, seen = np.random.default_rng(0), []
    for _ in range(4000):
        order = rng.permutation(8.0 * np.arange(8))
        seen.append(chance(order[:4], order[4:]))
    for right in range(5):
        level = hypergeom.sf(right - 1, 8, 4, 4)
        assert np.mean(np.array(seen) <= level + 1e-12) == pytest.approx(level, abs=0.03)


def test_ties_are_worth_nothing():
    assert chance(np.zeros(100), np.zeros(100)) > 0.01
    assert chance(np.ones(100), np.zeros(100)) < 1e-20


def test_an_unknown_attack_is_refused():
    with pytest.raises(SettingError, match="no attack 'guess'"):
        power("guess")


def test_the_register_tells_attacks_of_one_function_apart():
    (images, _), (others, _), _ = controls.digits(0)
    one, two = (ATTACKS[name].function(images[:5], others) for name in ("nearest-pixels", "nearest-features"))
    assert not np.allclose(one, two)
    seen, members = np.array([[1.0], [1.2], [3.0], [3.2]]), np.array([[False], [False], [True], [True]])
    online, offline = (ATTACKS[name].function(np.array([9.0]), seen, members) for name in ("lira", "lira-offline"))
    assert offline[0] == pytest.approx((9 - 1.1) / np.std([1, 1.2], ddof=1))
    assert online[0] != offline[0]
