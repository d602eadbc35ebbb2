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

from privot.attacks.inversion.defense_guarantee import DpSgdRun, derive_defense_guarantee
from privot.attacks.inversion.defenses import (
    ClippingDefense,
    NoiseDefense,
    Pipeline,
    PruningDefense,
    QuantizationDefense,
    add_update_noise,
    build_defense,
)
from privot.attacks.inversion.problem import Problem, compute_victim_gradients
from privot.attacks.inversion.search_evaluation import discard_uninformative_gaps
from privot.data import load_dataset
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.privacy.gate import Gate
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.privacy.plan import Budget, Neighbours, Plan, Stage

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = DpSgdRun(dataset_size=60_000, batch_size=256, steps=100)


@cache
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Sigmoid(), nn.Linear(12, 10)).double()


@cache
def batch(count=2, size=4):
    images, labels = (
        each[: count * size] for each in load_dataset("digits", public=True).records()
    )
    return images.double().view(count, size, 1, 8, 8), labels.view(count, size)


def apart(images, labels):
    """Gradients of each image alone {name: [N, batch, ...]}."""
    kept = {}

    def keep(each, generator):
        kept.update(each)
        return {name: found.mean(1) for name, found in each.items()}

    Problem.from_images(net(), F.cross_entropy, images, labels, defense=keep)
    return kept


def length(update):
    return torch.cat([each.flatten(1) for each in update.values()], 1).norm(dim=1)


# One record more or less


class ClippedTogether(ClippingDefense):
    """A planted bug: the mean is clipped, not each record, so that another record changes the share of all."""

    def apply_without_noise(self, each):
        mean = {name: found.sum(1) for name, found in each.items()}
        factor = (self.clip_norm * 3 / length(mean)).clamp(max=1.0)
        return {
            name: torch.einsum("n...,n->n...", found, factor) / self.batch_size
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
            one = defence.apply_without_noise(each)
            two = defence.apply_without_noise(rest)
            found.append(
                length({name: one[name] - two[name] for name in one}).max()
                * defence.batch_size
                / defence.clip_norm
            )
        lone = {name: value[:, :1] for name, value in each.items()}
        found.append(
            length(defence.apply_without_noise(lone)).max() * defence.batch_size / defence.clip_norm
        )
    return float(max(found))


def test_one_record_moves_the_sum_by_the_bound_at_most():
    assert 0.99 < moved(ClippingDefense(0.5, batch_size=4)) < 1 + 1e-9
    assert moved(ClippedTogether(0.5, batch_size=4)) > 1.2  # the test sees it


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
    answer = Gate(box, free, ledger, Budget(math.inf)).sum("gradients", gradient, clip_norm=0.5)
    ours = ClippingDefense(0.5, batch_size=8).apply_without_noise(apart(images[None], labels[None]))
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
    noisy = add_update_noise(zero, 0.3, source)["w"]
    assert abs(float(noisy.std()) / 0.3 - 1) < 0.03
    assert abs(float(noisy.mean())) < 0.01
    assert not noisy.equal(add_update_noise(zero, 0.3, source)["w"])
    defence = ClippingDefense(2.0, noise_multiplier=1.5, batch_size=10)
    sent = defence({"w": torch.zeros(1, 4, 40_000)}, source)["w"]
    assert abs(float(sent.std()) / defence.noise_std - 1) < 0.03
    assert defence.noise_std == pytest.approx(0.3)


# What it costs


def test_the_epsilon_is_the_accountant_s(coarse_accounting):
    found = derive_defense_guarantee(ClippingDefense(1.0, noise_multiplier=1.0), TRAINING)
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


def test_what_has_an_epsilon_and_what_does_not(coarse_accounting):
    for defence in (
        None,
        NoiseDefense(10.0),
        ClippingDefense(1.0),
        PruningDefense(0.5),
        QuantizationDefense(8),
        build_defense(noise_scale=10.0, prune_fraction=0.9),
    ):
        assert isinstance(derive_defense_guarantee(defence, TRAINING), NoGuarantee)
    after = derive_defense_guarantee(
        build_defense(noise_scale=1.0, clip_norm=1.0, prune_fraction=0.5, bits=8), TRAINING
    )
    assert after == derive_defense_guarantee(
        ClippingDefense(3.0, 1.0, batch_size=256), TRAINING
    )  # rounding, pruning and scale are nobody's business
    assert derive_defense_guarantee(ClippingDefense(1.0, 2.0), TRAINING).epsilon < after.epsilon


@pytest.mark.parametrize("settings", [(10, 11, 1), (10, 0, 1), (10, 5, 0)])
def test_runs_that_cannot_be(settings):
    with pytest.raises(SettingError, match="batch"):
        DpSgdRun(*settings)


# What an attacker who knows of it knows


@pytest.mark.parametrize(
    "defence",
    [PruningDefense(0.3), PruningDefense(0.95), QuantizationDefense(2), QuantizationDefense(8)],
)
def test_at_the_truth_nothing_is_left_to_explain(defence):
    images, labels = batch()
    plain = Problem.from_images(net(), F.cross_entropy, images, labels, defense=defence)
    known = defence.adapt_problem(plain)
    true = compute_victim_gradients(plain, images, labels)

    def left(problem):
        rows = [
            discard_uninformative_gaps(
                *(
                    {n: v[i] for n, v in d.items()} if d else None
                    for d in (true, problem.update, problem.compare_mask, problem.slack)
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
    elsewhere = compute_victim_gradients(plain, 1 - images, labels)
    true.update(elsewhere)
    assert left(known) > 1e-4  # and something elsewhere


def test_pruned_and_quantised():
    each = {"w": torch.tensor([[[4.0, -3.0, 2.0, -1.0]]])}
    assert PruningDefense(0.5)(each)["w"].tolist() == [[4.0, -3.0, 0.0, 0.0]]
    assert PruningDefense(0.0)(each)["w"].tolist() == [[4.0, -3.0, 2.0, -1.0]]
    assert QuantizationDefense(1)(each)["w"].tolist() == [[2.5, -2.5, 2.5, -2.5]]
    assert QuantizationDefense(2)(each)["w"].tolist() == [
        [4.0, -4.0, 0.0, 0.0]
    ]  # -1, 0 or 1 times the largest; 0.5 is rounded to even
    assert torch.allclose(QuantizationDefense(16)(each)["w"], each["w"][:, 0], atol=1e-3)
    assert QuantizationDefense(8)({"w": torch.zeros(1, 1, 3)})["w"].tolist() == [[0.0, 0.0, 0.0]]


def test_several():
    defence = build_defense(
        noise_scale=0.1, clip_norm=1.0, prune_fraction=0.5, bits=8, batch_size=4
    )
    assert defence == Pipeline(
        (ClippingDefense(1.0, 0.1, 4), PruningDefense(0.5), QuantizationDefense(8))
    )
    assert defence.objective == "cosine"
    assert defence.noise_std == pytest.approx(0.025)
    sent = defence(apart(*batch()), torch.Generator().manual_seed(0))
    assert all(
        np.isclose(float((each == 0).float().mean()), 0.5, atol=0.3) for each in sent.values()
    )
    assert build_defense() is None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (NoiseDefense, (-1.0,)),
        (NoiseDefense, (math.nan,)),
        (ClippingDefense, (0.0,)),
        (ClippingDefense, (1.0, -1.0)),
        (PruningDefense, (1.0,)),
        (QuantizationDefense, (0,)),
    ],
)
def test_settings_out_of_range(kind, settings):
    with pytest.raises(SettingError, match="needed"):
        kind(*settings)
