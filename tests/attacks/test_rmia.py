"""RMIA against a slow reading of its definition, and with as few as one reference."""

import numpy as np
import pytest
from support.overfit_nets import score_digits_with_overfit_nets
from support.seeding import seed_generator

from privot.attacks.membership import rmia as module
from privot.attacks.membership.lira import balanced_membership
from privot.attacks.membership.loss import negative_loss
from privot.attacks.membership.rmia import rmia, rmia_leave_one_out
from privot.audit import compute_roc
from privot.errors import SettingError


def compute_slowly(victim, references, members, z, z_references, offline, a, gamma):
    """Pair by pair, as the paper has it."""

    def average(column, inside):
        without = column[~inside].mean()
        if offline or not inside.any():
            return 0.5 * ((1 + a) * without + 1 - a)
        return 0.5 * (column[inside].mean() + without)

    nobody = np.zeros(len(references), bool)
    columns = zip(victim, references.T, members.T, strict=True)
    x_ratios = [p / average(column, inside) for p, column, inside in columns]
    z_ratios = [p / average(column, nobody) for p, column in zip(z, z_references.T, strict=True)]
    return np.array([np.mean([x / ratio > gamma for ratio in z_ratios]) for x in x_ratios])


@pytest.fixture
def observed():
    """Probabilities of 50 candidates and 30 others by 6 models, and who is a member."""
    rng = np.random.default_rng(0)
    members = balanced_membership(50, 6, seed_generator())
    return rng.uniform(0.05, 1, (6, 50)), members, rng.uniform(0.05, 1, (6, 30))


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 1.3])
def test_rmia_equals_the_slow_reference(observed, offline, gamma):
    p, members, z = observed
    expected = compute_slowly(p[0], p[1:], members[1:], z[0], z[1:], offline, 0.4, gamma)
    logs = (np.log(p[0]), np.log(p[1:]), members[1:], np.log(z[0]), np.log(z[1:]))
    scores = rmia(*logs, offline=offline, a=0.4, gamma=gamma)
    np.testing.assert_allclose(scores, expected)
    assert 0 < scores.mean() < 1


@pytest.mark.parametrize("offline", [False, True])
def test_leave_one_out_equals_the_slow_loop(observed, offline, monkeypatch):
    p, members, z = observed
    p = np.log(p)
    z = np.log(z)
    how = {"offline": offline, "gamma": 1.1}
    slow = []
    for victim in range(6):
        rest, inside, z_rest = (np.delete(rows, victim, 0) for rows in (p, members, z))
        slow.append(rmia(p[victim], rest, inside, z[victim], z_rest, **how))
    np.testing.assert_allclose(rmia_leave_one_out(p, members, z, **how), slow)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 20)
    np.testing.assert_allclose(rmia_leave_one_out(p, members, z, **how), slow)


@pytest.fixture(scope="module")
def models(one_thread):
    logits, labels, members = score_digits_with_overfit_nets(200, 400, 16, 150, wrong=1 / 3)
    return negative_loss(logits, labels).numpy(), members


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("offline", [False, True])
def test_few_references_are_enough(models, count, offline):
    log_p, members = models
    p = log_p[: 1 + count, :200]
    z = log_p[: 1 + count, 200:]
    chosen = members[1 : 1 + count]
    usable = (~chosen).any(0) if offline else np.ones(200, bool)
    references = (p[1:, usable], chosen[:, usable])
    scores = rmia(p[0][usable], *references, z[0], z[1:], offline=offline, gamma=1.0)
    inside = members[0][usable]
    assert compute_roc(scores[inside], scores[~inside]).auc > 0.8


def test_wrong_settings_are_refused(observed):
    p, members, z = observed
    p = np.log(p)
    z = np.log(z)
    everyone = np.ones_like(members[1:])
    for words, act in {
        "no reference": lambda: rmia(p[0], p[1:], everyone, z[0], z[1:], offline=True),
        "gamma": lambda: rmia_leave_one_out(p, members, z, gamma=0),
        "at most 0": lambda: rmia_leave_one_out(-p, members, z),
        "a=0": lambda: rmia_leave_one_out(p, members, z, a=0),
    }.items():
        with pytest.raises(SettingError, match=words):
            act()


def test_a_ratio_must_be_larger_not_equal():
    half = np.log([0.5])
    nobody = np.zeros((1, 1), bool)
    assert rmia(half, half[None], nobody, half, half[None], offline=True, gamma=1.0).tolist() == [0]
