"""Gradient inversion: attacks, defences, bounds and whole experiments."""

import dataclasses
import functools

import torch
from golden.core import CPU, golden, numbers
from golden.inputs import (
    coarse_accounting,
    digits,
    normal,
    public_digits,
    rng,
    sensitive_digits,
    uniform,
)
from support.federation import ROOMY, play, serving, terms
from torch import nn

from privot.attacks import inversion
from privot.attacks.inversion import defenses, models, spear
from privot.attacks.inversion import labels as label_recovery
from privot.attacks.inversion.attacks import INVERSION_ATTACKS
from privot.attacks.inversion.box_least_squares import solve_box_least_squares
from privot.attacks.inversion.defense_guarantee import DpSgdRun, derive_defense_guarantee
from privot.attacks.inversion.experiment import InversionExperiment
from privot.attacks.inversion.gauss_newton import refine_by_gauss_newton
from privot.attacks.inversion.objectives import OBJECTIVES, compute_total_variation
from privot.attacks.inversion.problem import Problem, Reconstruction
from privot.attacks.inversion.rgap import reconstruct_by_rgap
from privot.attacks.inversion.scoring import compute_label_overlap, match_images
from privot.attacks.inversion.transcript import read_client_transcript
from privot.attacks.inversion.transcript_attack import TranscriptAttack
from privot.federated import Client
from privot.nets import initialize_weights
from privot.privacy.ledger import Ledger

LOSS = nn.functional.cross_entropy


def make_problem(count=2, batch=1, **more):
    """Updates of fresh LeNets on digits, and the images and labels behind them."""
    images, labels = (part.unflatten(0, (count, batch)) for part in digits(count * batch))
    net = models.lenet((1, 8, 8), 10)
    weights = models.sample_initial_weights(net, count, rng(3), models.LENET_INIT_BOUND)
    return Problem.from_images(net, LOSS, images, labels, weights, **more), images, labels


def shorten_attack(name, steps=4):
    """A named attack with so many steps in each phase."""
    attack = INVERSION_ATTACKS[name]
    phases = tuple(dataclasses.replace(phase, steps=steps) for phase in attack.phases)
    return dataclasses.replace(attack, phases=phases)


def list_parts(result):
    trace = [[step, images] for step, images in result.trace or ()]
    return [result.images, result.labels, result.steps, result.residual, trace]


@golden("inversion", INVERSION_ATTACKS)
def run_inversion(name, folder):
    more = {"restarts": 1, "trace_steps": (1, 3)}
    result = inversion.invert(make_problem()[0], shorten_attack(name), **more)
    return {"found": list_parts(result)}


@golden("inversion/optimisers")
def run_optimizers(folder):
    problem, _, labels = make_problem(3, 2)
    attack = shorten_attack("wdlg", 5)
    invert = functools.partial(inversion.invert, problem, labels=labels)
    yield "adam", list_parts(invert(attack.replace_optimizer("adam", 5)))
    yield "search", list_parts(invert(attack.replace_optimizer("lbfgs-search", 5, 0.5)))
    yield "portions", list_parts(invert(attack, chunk_size=2, trace_steps=(2,)))


@golden("inversion/objectives")
def run_objectives(folder):
    one = {"a": normal(4, 3, 2, seed=1).requires_grad_(), "b": normal(4, seed=2).requires_grad_()}
    two = {"a": normal(4, 3, 2, seed=3), "b": normal(4, seed=4)}
    for index, objective in enumerate(OBJECTIVES.values()):
        loss = objective.distance(one, two)
        gradients = torch.autograd.grad(loss, list(one.values()))
        yield f"{index}", [loss, objective.residual(one, two), *gradients]
    yield "variation", compute_total_variation(uniform(2, 5, 5))


@golden("inversion/closed-form")
def run_closed_form(folder):
    images, labels = digits(2)
    net = models.cnn6((1, 8, 8)).double()
    start = models.sample_initial_weights(net, 2, rng(1))
    weights = {name: weight.double() for name, weight in start.items()}
    batch = (images.double()[:, None], labels[:, None] % 2)
    other = Problem.from_images(net, models.compute_logistic_loss, *batch, weights)
    yield "lenet", list_parts(reconstruct_by_rgap(make_problem()[0]))
    yield "cnn6", list_parts(reconstruct_by_rgap(other))


@golden("inversion/relu-batch")
def run_relu_batch(folder):
    images, labels = digits(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10)).double()
    start = models.sample_initial_weights(net, 1, rng(2))
    weights = {name: weight[0].double() for name, weight in start.items()}
    problem = Problem.from_images(net, LOSS, images.double()[None], labels[None], weights)
    result = spear.reconstruct_by_spear(problem, max_rounds=2)
    # Eight decimals, since the last ones depend on where in memory a tensor lies.
    rounded = result.images.double().round(decimals=8) + 0.0
    return {"found": [rounded, result.labels, result.steps, result.residual]}


@golden("inversion/labels")
def run_labels(folder):
    images, labels = digits(8)
    yield "one", label_recovery.recover_labels(make_problem(4)[0])
    yield "many", label_recovery.recover_labels(make_problem(2, 4)[0])
    for name, bias in (("with", True), ("without", False)):
        last = nn.Linear(9, 10, bias=bias)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.Sigmoid(), last)
        start = models.sample_initial_weights(net, 1, rng(2))
        weights = {key: weight[0] for key, weight in start.items()}
        problem = Problem.from_images(net, LOSS, images[None], labels[None], weights)
        layer = label_recovery.find_last_linear(net, 10)
        errors = label_recovery.compute_mean_logit_gradient(problem, *layer)
        yield name, [label_recovery.recover_labels(problem), errors]


@golden("inversion/certificate")
def run_cramer_rao_bound(folder):
    problem, images, labels = make_problem()
    cases = {"plain": None, "clipped": defenses.ClippingDefense(0.5, 1.0)}
    cases["pruned"] = defenses.PruningDefense(0.5)
    for name, defense in cases.items():
        bound = inversion.compute_cramer_rao_bound(problem, images, labels, defense)
        spectrum = [bound.eigenvalues, bound.variance, bound.null_space_fraction]
        yield name, [*spectrum, bound.unit_noise_errors, bound.null_space_error, bound.rank]
        errors = [bound.predict_mse(0.01), bound.predict_psnr(0.1), bound.predict_unbiased_mse(0.1)]
        yield f"{name} errors", [*errors, bound.find_noise_std(15)]
    square = normal(2, 6, 6, seed=1)
    target = normal(2, 6, 3, seed=2)
    yield "boxed", solve_box_least_squares(square @ square.mT, target, (0.0, 1.0))


DEFENSES = {
    "noise": {"noise_scale": 0.1},
    "clipped": {"noise_scale": 0.5, "clip_norm": 1.0, "batch_size": 3},
    "pruned": {"prune_fraction": 0.6},
    "rounded": {"bits": 4},
    "signs": {"bits": 1},
}
DEFENSES["several"] = DEFENSES["clipped"] | {"clip_norm": 2.0, "prune_fraction": 0.3, "bits": 6}


@golden("inversion/defences")
def run_defenses(folder):
    update = {"a": normal(2, 3, 4, 5, seed=1), "b": normal(2, 3, 4, seed=2)}
    built = {name: defenses.build_defense(**given) for name, given in DEFENSES.items()}
    for name, defense in built.items():
        sent = [defense(update, rng(3)), defense(update), defense.apply_without_noise(update)]
        yield name, [[list(tensors.values()) for tensors in sent], defense.noise_std]
    for name in ("pruned", "rounded"):
        problem, *_ = make_problem(defense=built[name])
        yield f"{name} slack", list(built[name].adapt_problem(problem).slack.values())
    firsts = {name: part[:, 0] for name, part in update.items()}
    yield "spread", list(built["rounded"].compute_rounding_std(firsts).values())


@golden("inversion/promises")
def run_defense_guarantee(folder):
    defense = defenses.ClippingDefense(1.0, 1.5)
    with coarse_accounting():
        return {"clipped": numbers(derive_defense_guarantee(defense, DpSgdRun(1000, 50, 20)))}


@golden("inversion/refining")
def run_gauss_newton(folder):
    problem, images, labels = make_problem(defense=defenses.NoiseDefense(1e-3), generator=rng(4))
    near = (images + 0.05 * normal(*images.shape)).clamp(0, 1)
    start = Reconstruction(near, labels, torch.ones(2, dtype=torch.long), torch.ones(2))
    return {"refined": list_parts(refine_by_gauss_newton(problem, start, steps=1))}


@golden("inversion/judging")
def run_scoring(folder):
    images, labels = (part.unflatten(0, (2, 3)) for part in digits(6))
    guess = images.flip(1) + 0.1 * normal(*images.shape)
    result = Reconstruction(guess, labels.flip(1), torch.ones(2), torch.ones(2))
    score = inversion.score_reconstruction(result, images, labels, 0.02)
    errors = [score.mse, score.nearest_mse, score.psnr, score.ssim]
    yield "judged", [*errors, score.label_accuracy, score.matching]
    yield "rates", [score.leak_rate, score.leak_rate_low, score.leak_rate_high]
    yield "json", numbers(score.to_json())
    yield "matched", match_images(uniform(3, 4, 4))
    pair = torch.tensor([[3, 3, 5]]), torch.tensor([[5, 3, 4]])
    yield "overlap", compute_label_overlap(*pair)


@golden("inversion/audit")
def run_leakage_check(folder):
    """All tiers on an update of a model of one's own: as it is, and with noise."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(256, 10)]
    net = initialize_weights(nn.Sequential(*layers), rng(1))
    batch = digits(1)
    gradients = torch.autograd.grad(LOSS(net(batch[0]), batch[1]), list(net.parameters()))
    names = [name for name, _ in net.named_parameters()]
    more = {"attack": shorten_attack("hybrid"), "restarts": 0, "target_psnrs": (15,)}
    for label, noise in (("plain", 0.0), ("noisy", 1e-3)):
        sent = [2 * grad + noise * normal(*grad.shape, seed=7) for grad in gradients]
        update = dict(zip(names, sent, strict=True))
        leak = inversion.check_leakage(net, LOSS, batch, update, **more, is_defended=bool(noise))
        facts = [leak.gradient_cosine, leak.gradient_scale, leak.noise_std, leak.label_accuracy]
        tiers = [[tier.mse, tier.psnr] for tier in leak.tiers]
        yield label, [*facts, tiers, leak.images, numbers(leak.noise_std_for_psnr)]


DEFENDED = {"noise_scale": 0.1, "clip_norm": 1.0, "bits": 8, "training": DpSgdRun(1000, 50, 20)}
EXPERIMENTS = {
    "plain": {"attack": "idlg", "num_checked": 1},
    "defended": {"attack": "wdlg", **DEFENDED},
    "cnn6": {"model": "cnn6", "attack": "hybrid", "optimizer": "adam"},
    "batch": {"attack": "dlg", "batch_size": 2, "prune_fraction": 0.3},
}


@golden("inversion/experiment")
def run_experiment(folder):
    for name, given in EXPERIMENTS.items():
        settings = {"num_victims": 2, "steps": 3, "num_checked": 0, **given}
        with coarse_accounting():
            result = InversionExperiment(**settings).run(public_digits(30), CPU)
            facts = result.to_json()
        facts["tiers"]["search"] = facts["tiers"]["search"] | {"seconds": 0.0}
        yield name, [list_parts(result.reconstruction), numbers(facts), result.stack_snapshots()]


@golden("inversion/wire")
def run_transcript_attack(folder):
    """What the record of a federated run tells of an owner's images."""
    dataset = sensitive_digits(12, name="ward 0")
    agreed = terms(owners=1, rounds=2, records_per_critic=6)
    server = serving(agreed, ["ward 0"], transcript_path=folder / "wire")
    client = Client(dataset, ROOMY, Ledger(folder / "ward.jsonl"), folder / "run", CPU)
    play(server, {"ward 0": client})
    transcript = read_client_transcript(folder / "wire")
    # With L-BFGS the attack would take its full steps there.
    more = {"num_checked": 1, "attack": shorten_attack("idlg").replace_optimizer("adam", 4)}
    attack = TranscriptAttack(num_images=6, num_simulated_clients=5, **more)
    result = attack.run(transcript, dataset, public_digits(60, 30), CPU)
    yield "heard", [transcript.images, transcript.values, len(transcript.values)]
    yield "pictures", list(result.reconstructions.values())
    yield "tiers", numbers(result.tiers)
    yield "gain", result.psnr_gain
