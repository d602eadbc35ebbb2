"""Defences: how far one record moves what is sent, what it costs over a run, and that an attacker who knows of them loses nothing by it."""

import math
from functools import cache

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from torch import nn
from torch.nn import functional as F

from privot.attacks.inversion.defense_guarantee import Training, promise
from privot.attacks.inversion.defenses import (
    Clipped,
    Noise,
    Pruned,
    Quantised,
    Several,
    added,
    made,
)
from privot.attacks.inversion.problem import Problem, gradients
from privot.attacks.inversion.search import compared
from privot.data import load
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.privacy.gate import Gate
from privot.privacy.plan import Budget, Neighbours, Plan, Stage
from privot.release import Guarantee, NoGuarantee

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = Training(size=60_000, batch=256, steps=100)


@cache
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Sigmoid(), nn.Linear(12, 10)).double()


@cache
def batch(count=2, size=4):
    images, labels = (each[: count * size] for each in load("digits", public=True).records())
    return images.double().view(count, size, 1, 8, 8), labels.view(count, size)


def apart(images, labels):
    """Gradients of each image alone {name: [N, batch, ...]}."""
    kept = {}

    def keep(each, generator):
        kept.update(each)
        return {name: found.mean(1) for name, found in each.items()}

    Problem.of(net(), F.cross_entropy, images, labels, defence=keep)
    return kept


def length(update):
    return torch.cat([each.flatten(1) for each in update.values()], 1).norm(dim=1)


# One record more or less


class ClippedTogether(Clipped):
    """A planted bug: the mean is clipped, not each record, so that another record changes the share of all."""

    def expected(self, each):
        mean = {name: found.sum(1) for name, found in each.items()}
        factor = (self.bound * 3 / length(mean)).clamp(max=1.0)
        return {
            name: torch.einsum("n...,n->n...", found, factor) / self.batch
            for name, found in mean.items()
        }


def moved(defence):
    """How far what is sent without noise moves when a record goes, in bounds: at most 1 is promised."""
    found = []
    for scale in (1e-3, 1.0, 100.0):
        each = {name: value * scale for name, value in apart(*batch()).items()}
        for gone in range(4):
            rest = {
                name: torch.cat([value[:, :gone], value[:, gone + 1 :]], 1)
                for name, value in each.items()
            }
            one = defence.expected(each)
            two = defence.expected(rest)
            found.append(
                length({name: one[name] - two[name] for name in one}).max()
                * defence.batch
                / defence.bound
            )
        lone = {name: value[:, :1] for name, value in each.items()}
        found.append(length(defence.expected(lone)).max() * defence.batch / defence.bound)
    return float(max(found))


def test_one_record_moves_the_sum_by_the_bound_at_most():
    assert 0.99 < moved(Clipped(0.5, batch=4)) < 1 + 1e-9
    assert moved(ClippedTogether(0.5, batch=4)) > 1.2  # the test sees it


def test_the_sum_is_what_the_gate_answers(ledger):
    images, labels = batch()
    images = images.flatten(0, 1)
    labels = labels.flatten()
    box = Sensitive(images.float().numpy(), labels.numpy(), Spec((1, 8, 8), 10, len(labels)))
    names = [name for name, _ in net().named_parameters()]
    own = {name: each.detach().float() for name, each in net().named_parameters()}

    def gradient(image, label):
        def loss(weights):
            return F.cross_entropy(
                torch.func.functional_call(net(), weights, (image[None],)), label[None]
            )

        found = torch.func.grad(loss)(own)
        return torch.cat([found[name].flatten() for name in names])

    free = Plan((Stage("gradients", "sum", 0.0),), Neighbours.ADD_REMOVE)
    answer = Gate(box, free, ledger, Budget(math.inf)).sum("gradients", gradient, bound=0.5)
    ours = Clipped(0.5, batch=8).expected(apart(images[None], labels[None]))
    ours = torch.cat([ours[name].flatten() for name in names]) * 8
    assert torch.allclose(answer, ours, atol=1e-5)
    assert (
        length({name: each[0] for name, each in apart(images[None], labels[None]).items()}).max()
        > 0.5
    )  # it was clipped


@pytest.mark.parametrize("generator", [None, 3])
def test_noise_has_the_size_that_is_said(generator):
    source = None if generator is None else torch.Generator().manual_seed(generator)
    zero = {"w": torch.zeros(2, 100, 200)}
    noisy = added(zero, 0.3, source)["w"]
    assert abs(float(noisy.std()) / 0.3 - 1) < 0.03
    assert abs(float(noisy.mean())) < 0.01
    assert not noisy.equal(added(zero, 0.3, source)["w"])
    defence = Clipped(2.0, noise=1.5, batch=10)
    sent = defence({"w": torch.zeros(1, 4, 40_000)}, source)["w"]
    assert abs(float(sent.std()) / defence.noise_std - 1) < 0.03
    assert defence.noise_std == pytest.approx(0.3)


# What it costs


def test_the_epsilon_is_the_accountant_s(coarse_prices):
    found = promise(Clipped(1.0, noise=1.0), TRAINING)
    assert isinstance(found, Guarantee)
    assert found.neighbours == "add-remove"
    event = dpa.SelfComposedDpEvent(
        dpa.PoissonSampledDpEvent(256 / 60_000, dpa.GaussianDpEvent(1.0)), 100
    )
    theirs = (
        PLDAccountant(dpa.NeighboringRelation.ADD_OR_REMOVE_ONE).compose(event).get_epsilon(1e-5)
    )
    assert theirs * 0.99 < found.epsilon < theirs * 1.2
    assert found.epsilon <= found.renyi_epsilon


def test_what_has_an_epsilon_and_what_does_not(coarse_prices):
    for defence in (
        None,
        Noise(10.0),
        Clipped(1.0),
        Pruned(0.5),
        Quantised(8),
        made(noise=10.0, prune=0.9),
    ):
        assert isinstance(promise(defence, TRAINING), NoGuarantee)
    after = promise(made(noise=1.0, clip=1.0, prune=0.5, bits=8), TRAINING)
    assert after == promise(
        Clipped(3.0, 1.0, batch=256), TRAINING
    )  # rounding, pruning and scale are nobody's business
    assert promise(Clipped(1.0, 2.0), TRAINING).epsilon < after.epsilon


@pytest.mark.parametrize("settings", [(10, 11, 1), (10, 0, 1), (10, 5, 0)])
def test_runs_that_cannot_be(settings):
    with pytest.raises(SettingError, match="batch"):
        Training(*settings)


# What an attacker who knows of it knows


@pytest.mark.parametrize("defence", [Pruned(0.3), Pruned(0.95), Quantised(2), Quantised(8)])
def test_at_the_truth_nothing_is_left_to_explain(defence):
    images, labels = batch()
    plain = Problem.of(net(), F.cross_entropy, images, labels, defence=defence)
    known = defence.adapted(plain)
    true = gradients(plain, images, labels)

    def left(problem):
        rows = [
            compared(
                *(
                    {n: v[i] for n, v in d.items()} if d else None
                    for d in (true, problem.update, problem.known, problem.slack)
                )
            )
            for i in range(2)
        ]
        return max(
            float((row[name] - plain.update[name][i]).abs().max())
            for i, row in enumerate(rows)
            for name in row
        )

    assert left(plain) > 1e-4
    assert left(known) < 1e-12
    elsewhere = gradients(plain, 1 - images, labels)
    true.update(elsewhere)
    assert left(known) > 1e-4  # and something elsewhere


def test_pruned_and_quantised():
    each = {"w": torch.tensor([[[4.0, -3.0, 2.0, -1.0]]])}
    assert Pruned(0.5)(each)["w"].tolist() == [[4.0, -3.0, 0.0, 0.0]]
    assert Pruned(0.0)(each)["w"].tolist() == [[4.0, -3.0, 2.0, -1.0]]
    assert Quantised(1)(each)["w"].tolist() == [[2.5, -2.5, 2.5, -2.5]]
    assert Quantised(2)(each)["w"].tolist() == [
        [4.0, -4.0, 0.0, 0.0]
    ]  # -1, 0 or 1 times the largest; 0.5 is rounded to even
    assert torch.allclose(Quantised(16)(each)["w"], each["w"][:, 0], atol=1e-3)
    assert Quantised(8)({"w": torch.zeros(1, 1, 3)})["w"].tolist() == [[0.0, 0.0, 0.0]]


def test_several():
    defence = made(noise=0.1, clip=1.0, prune=0.5, bits=8, batch=4)
    assert defence == Several((Clipped(1.0, 0.1, 4), Pruned(0.5), Quantised(8)))
    assert defence.objective == "cosine"
    assert defence.noise_std == pytest.approx(0.025)
    sent = defence(apart(*batch()), torch.Generator().manual_seed(0))
    assert all(
        np.isclose(float((each == 0).float().mean()), 0.5, atol=0.3) for each in sent.values()
    )
    assert made() is None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Noise, (-1.0,)),
        (Noise, (math.nan,)),
        (Clipped, (0.0,)),
        (Clipped, (1.0, -1.0)),
        (Pruned, (1.0,)),
        (Quantised, (0,)),
    ],
)
def test_settings_out_of_range(kind, settings):
    with pytest.raises(SettingError, match="needed"):
        kind(*settings)
