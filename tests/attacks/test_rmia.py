"""RMIA against a slow reading of its definition, and with as few as one reference."""

import numpy as np
import pytest
import torch
from support.overfit_nets import score_digits_with_overfit_nets

from privot.attacks.membership import rmia as module
from privot.attacks.membership.lira import balanced_membership
from privot.attacks.membership.loss import negative_loss
from privot.attacks.membership.rmia import rmia, rmia_leave_one_out
from privot.audit import compute_roc
from privot.errors import SettingError


def slow(victim, references, members, z, z_references, offline, a, gamma):
    """Pair by pair, as the paper has it."""

    def usual(column, inside):
        without = column[~inside].mean()
        if offline or not inside.any():
            return 0.5 * ((1 + a) * without + 1 - a)
        return 0.5 * (column[inside].mean() + without)

    nobody = np.zeros(len(references), bool)
    x_ratio = [p / usual(references[:, place], members[:, place]) for place, p in enumerate(victim)]
    z_ratio = [p / usual(z_references[:, place], nobody) for place, p in enumerate(z)]
    return np.array([np.mean([x / each > gamma for each in z_ratio]) for x in x_ratio])


@pytest.fixture
def seen():
    rng = np.random.default_rng(0)
    members = balanced_membership(50, 6, torch.Generator().manual_seed(0))
    return rng.uniform(0.05, 1, (6, 50)), members, rng.uniform(0.05, 1, (6, 30))


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 1.3])
def test_rmia_equals_the_slow_reference(seen, offline, gamma):
    p, members, z = seen
    wanted = slow(p[0], p[1:], members[1:], z[0], z[1:], offline, 0.4, gamma)
    found = rmia(
        np.log(p[0]),
        np.log(p[1:]),
        members[1:],
        np.log(z[0]),
        np.log(z[1:]),
        offline=offline,
        a=0.4,
        gamma=gamma,
    )
    np.testing.assert_allclose(found, wanted)
    assert 0 < found.mean() < 1


@pytest.mark.parametrize("offline", [False, True])
def test_leave_one_out_equals_the_slow_loop(seen, offline, monkeypatch):
    p, members, z = (np.log(each) if each.dtype == float else each for each in seen)
    found = rmia_leave_one_out(p, members, z, offline=offline, gamma=1.1)
    rest = [
        (np.delete(p, each, 0), np.delete(members, each, 0), z[each], np.delete(z, each, 0))
        for each in range(6)
    ]
    np.testing.assert_allclose(
        found,
        [
            rmia(own, *others, offline=offline, gamma=1.1)
            for own, others in zip(p, rest, strict=True)
        ],
    )
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 20)
    np.testing.assert_allclose(rmia_leave_one_out(p, members, z, offline=offline, gamma=1.1), found)


@pytest.fixture(scope="module")
def models(one_thread):
    return score_digits_with_overfit_nets(200, 400, 16, 150, wrong=1 / 3)


@pytest.mark.parametrize("references", [1, 2, 4])
@pytest.mark.parametrize("offline", [False, True])
def test_few_references_are_enough(models, references, offline):
    logits, labels, members = models
    log_p = negative_loss(logits, labels).numpy()
    count = references
    own = log_p[:, : members.shape[1]]
    z = log_p[:, members.shape[1] :]
    chosen = members[1 : 1 + count]
    usable = (~chosen).any(0) if offline else np.ones(members.shape[1], bool)
    scores = rmia(
        own[0][usable],
        own[1 : 1 + count][:, usable],
        chosen[:, usable],
        z[0],
        z[1 : 1 + count],
        offline=offline,
        gamma=1.0,
    )
    inside = members[0][usable]
    found, plain = (
        compute_roc(each[inside], each[~inside]).auc for each in (scores, own[0][usable])
    )
    print(f"{references} references, offline {offline}: AUC {found:.3f}, loss {plain:.3f}")
    assert found > 0.8


def test_what_cannot_be_is_refused(seen):
    p = np.log(seen[0])
    members = seen[1]
    z = np.log(seen[2])
    with pytest.raises(SettingError, match="no reference"):
        rmia(p[0], p[1:], np.ones_like(members[1:]), z[0], z[1:], offline=True)
    with pytest.raises(SettingError, match="gamma"):
        rmia_leave_one_out(p, members, z, gamma=0)
    with pytest.raises(SettingError, match="at most 0"):
        rmia_leave_one_out(-p, members, z)
    with pytest.raises(SettingError, match="a=0"):
        rmia_leave_one_out(p, members, z, a=0)


def test_a_ratio_must_be_larger_not_equal():
    half_sure = np.log([0.5])
    assert rmia(
        half_sure,
        half_sure[None],
        np.zeros((1, 1), bool),
        half_sure,
        half_sure[None],
        offline=True,
        gamma=1.0,
    ).tolist() == [0.0]
