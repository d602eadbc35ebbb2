"""Defenses: how far a record moves what is sent, what it costs, what a knowing attacker sees."""

import math
from functools import cache

import dp_accounting as dpa
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from support.seeding import seed_generator
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
def build_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Sigmoid(), nn.Linear(12, 10)).double()


@cache
def load_batch(count=2, size=4):
    images, labels = (
        part[: count * size] for part in load_dataset("digits", public=True).records()
    )
    return images.double().view(count, size, 1, 8, 8), labels.view(count, size)


def compute_gradients(images, labels):
    """Gradients of each image alone {name: [N, batch, ...]}."""
    gradients = {}

    def spy(update, generator):
        gradients.update(update)
        return {name: value.mean(1) for name, value in update.items()}

    Problem.from_images(build_net(), F.cross_entropy, images, labels, defense=spy)
    return gradients


def flatten(update):
    return torch.cat([value.flatten(1) for value in update.values()], 1)


# One record more or less


class ClippedTogether(ClippingDefense):
    """A planted bug: the mean is clipped, so that another record changes the share of all."""

    def apply_without_noise(self, update):
        total = {name: value.sum(1) for name, value in update.items()}
        factor = (self.clip_norm * 3 / flatten(total).norm(dim=1)).clamp(max=1.0) / self.batch_size
        return {name: torch.einsum("n...,n->n...", value, factor) for name, value in total.items()}


def measure_sensitivity(defense):
    """How far what is sent without noise moves when a record goes, in bounds: at most 1."""
    moves = []
    for scale in (1e-3, 1.0, 100.0):
        gradients = {
            name: value * scale for name, value in compute_gradients(*load_batch()).items()
        }

        def send(which, gradients=gradients):
            rows = {name: value[:, which] for name, value in gradients.items()}
            return flatten(defense.apply_without_noise(rows))

        moves.append(send([0]))
        for gone in range(4):
            rest = [record for record in range(4) if record != gone]
            moves.append(send(slice(None)) - send(rest))
    return float(torch.cat(moves).norm(dim=1).max() * defense.batch_size / defense.clip_norm)


def test_one_record_moves_the_sum_by_the_bound_at_most():
    assert 0.99 < measure_sensitivity(ClippingDefense(0.5, batch_size=4)) < 1 + 1e-9
    assert measure_sensitivity(ClippedTogether(0.5, batch_size=4)) > 1.2  # the test sees it


def test_the_sum_is_what_the_gate_answers(ledger):
    images, labels = (part.flatten(0, 1) for part in load_batch())
    spec = Spec((1, 8, 8), 10, len(labels))
    dataset = Sensitive(images.float().numpy(), labels.numpy(), spec)
    own = {name: weight.detach().float() for name, weight in build_net().named_parameters()}

    def compute_gradient(image, label):
        def loss(weights):
            logits = torch.func.functional_call(build_net(), weights, (image[None],))
            return F.cross_entropy(logits, label[None])

        gradient = torch.func.grad(loss)(own)
        return torch.cat([gradient[name].flatten() for name in own])

    free = Plan((Stage("gradients", "sum", 0.0),), Neighbours.ADD_REMOVE)
    gate = Gate(dataset, free, ledger, Budget(math.inf))
    answer = gate.sum("gradients", compute_gradient, clip_norm=0.5)
    gradients = compute_gradients(images[None], labels[None])
    ours = flatten(ClippingDefense(0.5, batch_size=8).apply_without_noise(gradients))[0] * 8
    assert torch.allclose(answer, ours.to(answer.dtype), atol=1e-5)
    records = flatten({name: value[0] for name, value in gradients.items()})
    assert records.norm(dim=1).max() > 0.5  # it was clipped


@pytest.mark.parametrize("seed", [None, 3])
def test_noise_has_the_size_that_is_declared(seed):
    generator = None if seed is None else seed_generator(seed)
    zero = {"w": torch.zeros(2, 100, 200)}
    noisy = add_update_noise(zero, 0.3, generator)["w"]
    assert abs(float(noisy.std()) / 0.3 - 1) < 0.03
    assert abs(float(noisy.mean())) < 0.01
    assert not noisy.equal(add_update_noise(zero, 0.3, generator)["w"])
    defense = ClippingDefense(2.0, noise_multiplier=1.5, batch_size=10)
    sent = defense({"w": torch.zeros(1, 4, 40_000)}, generator)["w"]
    assert abs(float(sent.std()) / defense.noise_std - 1) < 0.03
    assert defense.noise_std == pytest.approx(0.3)


# What it costs


def test_the_epsilon_is_that_of_an_accountant(coarse_accounting):
    guarantee = derive_defense_guarantee(ClippingDefense(1.0, noise_multiplier=1.0), TRAINING)
    assert isinstance(guarantee, Guarantee)
    assert guarantee.neighbours == "add-remove"
    step = dpa.PoissonSampledDpEvent(256 / 60_000, dpa.GaussianDpEvent(1.0))
    accountant = PLDAccountant(dpa.NeighboringRelation.ADD_OR_REMOVE_ONE)
    theirs = accountant.compose(dpa.SelfComposedDpEvent(step, 100)).get_epsilon(1e-5)
    assert theirs * 0.99 < guarantee.epsilon < theirs * 1.2
    assert guarantee.epsilon <= guarantee.renyi_epsilon


def test_clipping_with_noise_alone_has_an_epsilon(coarse_accounting):
    for defense in (
        None,
        NoiseDefense(10.0),
        ClippingDefense(1.0),
        PruningDefense(0.5),
        QuantizationDefense(8),
        build_defense(noise_scale=10.0, prune_fraction=0.9),
    ):
        assert isinstance(derive_defense_guarantee(defense, TRAINING), NoGuarantee)
    many = build_defense(noise_scale=1.0, clip_norm=1.0, prune_fraction=0.5, bits=8)
    guarantee = derive_defense_guarantee(many, TRAINING)
    # rounding, pruning and scale are nobody's business
    assert guarantee == derive_defense_guarantee(
        ClippingDefense(3.0, 1.0, batch_size=256), TRAINING
    )
    assert derive_defense_guarantee(ClippingDefense(1.0, 2.0), TRAINING).epsilon < guarantee.epsilon


# What an attacker who knows of it knows


@pytest.mark.parametrize(
    "defense",
    [PruningDefense(0.3), PruningDefense(0.95), QuantizationDefense(2), QuantizationDefense(8)],
)
def test_at_the_truth_nothing_is_left_to_explain(defense):
    images, labels = load_batch()
    plain = Problem.from_images(build_net(), F.cross_entropy, images, labels, defense=defense)
    aware = defense.adapt_problem(plain)

    def measure_gap(problem, images):
        gradients = compute_victim_gradients(plain, images, labels)
        parts = (gradients, problem.update, problem.compare_mask, problem.slack)
        gaps = []
        for victim in range(2):
            rows = [part and {name: part[name][victim] for name in part} for part in parts]
            row = discard_uninformative_gaps(*rows)
            gaps += [(row[name] - plain.update[name][victim]).abs().max() for name in row]
        return float(max(gaps))

    assert measure_gap(plain, images) > 1e-4
    assert measure_gap(aware, images) < 1e-12
    assert measure_gap(aware, 1 - images) > 1e-4  # and something elsewhere


def test_pruning_and_quantization_by_hand():
    update = {"w": torch.tensor([[[4.0, -3.0, 2.0, -1.0]]])}
    for defense, expected in {
        PruningDefense(0.5): [4.0, -3.0, 0.0, 0.0],
        PruningDefense(0.0): [4.0, -3.0, 2.0, -1.0],
        QuantizationDefense(1): [2.5, -2.5, 2.5, -2.5],
        # -1, 0 or 1 times the largest; 0.5 is rounded to even
        QuantizationDefense(2): [4.0, -4.0, 0.0, 0.0],
    }.items():
        assert defense(update)["w"].tolist() == [expected]
    assert torch.allclose(QuantizationDefense(16)(update)["w"], update["w"][:, 0], atol=1e-3)
    assert QuantizationDefense(8)({"w": torch.zeros(1, 1, 3)})["w"].tolist() == [[0.0, 0.0, 0.0]]


def test_defenses_are_chained():
    settings = {"noise_scale": 0.1, "clip_norm": 1.0, "prune_fraction": 0.5, "bits": 8}
    defense = build_defense(**settings, batch_size=4)
    parts = (ClippingDefense(1.0, 0.1, 4), PruningDefense(0.5), QuantizationDefense(8))
    assert defense == Pipeline(parts)
    assert defense.objective == "cosine"
    assert defense.noise_std == pytest.approx(0.025)
    sent = defense(compute_gradients(*load_batch()), seed_generator())
    for value in sent.values():
        assert float((value == 0).float().mean()) == pytest.approx(0.5, abs=0.3)
    assert build_defense() is None


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (NoiseDefense, (-1.0,), "needed"),
        (NoiseDefense, (math.nan,), "needed"),
        (ClippingDefense, (0.0,), "needed"),
        (ClippingDefense, (1.0, -1.0), "needed"),
        (PruningDefense, (1.0,), "needed"),
        (QuantizationDefense, (0,), "needed"),
        (DpSgdRun, (10, 11, 1), "batch"),
        (DpSgdRun, (10, 0, 1), "batch"),
        (DpSgdRun, (10, 5, 0), "batch"),
    ],
)
def test_settings_out_of_range_are_refused(kind, settings, words):
    with pytest.raises(SettingError, match=words):
        kind(*settings)
