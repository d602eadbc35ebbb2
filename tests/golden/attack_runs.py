"""Audits of scores and of methods, and membership attacks."""

import dataclasses
import json
from unittest import mock

import numpy as np
import torch
from golden.core import CPU, bag, golden, numbers
from golden.inputs import digits, normal, public_digits, rng, uniform
from golden.net_runs import make_random_lpips
from support.factories import NO_GUARANTEE, make_release
from support.tiny_settings import choose_tiny_settings

from privot import audit
from privot.attacks.membership import (
    checks,
    control_data,
    controls,
    gan_leaks,
    lira,
    loss,
    method_shadows,
    nearest,
    rmia,
    runner,
)
from privot.attacks.membership.blind_baseline import run_blind_baseline
from privot.attacks.membership.registry import ATTACKS
from privot.attacks.shadows.observe import OBSERVATIONS
from privot.attacks.shadows.runner import prepare_shadows
from privot.audit import canaries, many_runs, one_run
from privot.audit.roc import count_above, find_thresholds
from privot.audit.runner import EpsilonAudit
from privot.data import Spec
from privot.data.dataset import Records
from privot.measures import nearest as nearest_measure
from privot.nets import GENERATORS, initialize_weights
from privot.release import Release
from privot.release.artifact import Artifact


def draw_scores():
    draws = np.random.default_rng(3)
    return draws.normal(1.0, 1.0, 300), draws.normal(0.0, 1.0, 400).round(2)


@golden("audit/curve")
def run_curve(folder):
    members, others = draw_scores()
    curve = audit.compute_roc(members, others)
    yield "curve", [curve.fpr, curve.tpr, curve.auc, curve.max_advantage()]
    yield "read", [curve.measured_tpr_at([0.001, 0.01, 0.1]), list(curve.sample_log_spaced(20))]
    yield "advantage", numbers(audit.estimate_advantage(members, others, seed=2))
    pairs = [(members[::2], others), (members[1::2], others)]
    yield "mean", numbers(audit.bootstrap_mean_auc(pairs))
    cuts = find_thresholds(members, others)
    yield "cuts", [cuts, count_above(members, cuts)]


@golden("audit/rates")
def run_rates(folder):
    members, others = draw_scores()
    hits = np.arange(0, 50, 7)
    bounds = (audit.clopper_pearson_lower, audit.clopper_pearson_upper)
    yield "bounds", [bound(hits, 50, 0.05) for bound in bounds]
    given = (members, others, (0.01, 0.1, 0.3), 0.9)
    yield "points", [numbers(audit.estimate_tpr_at_fpr(*given, way)) for way in (False, True)]
    estimate = audit.estimate_tpr_at_fpr(members, others, (0.1,))
    yield "attack", numbers(estimate.to_attack_result("some", auc=0.7))


@golden("audit/bounds")
def run_bounds(folder):
    scores = draw_scores()
    ways = [{"threshold": 0.5}, {}, {"assume_gaussian": True}, {"confidence": 0.8, "seed": 4}]
    counts = np.arange(1, 40, 6), np.arange(0, 14, 2), 50, 60, 1e-5, 0.05
    yield "many runs", [numbers(audit.audit_many_runs(*scores, 1e-5, **way)) for way in ways]
    yield "epsilon", [audit.compute_gaussian_epsilon(mu, 1e-5) for mu in (0.1, 1.0, 3.0)]
    refuted = (many_runs.compute_refuted_epsilon, many_runs.compute_refuted_mu)
    yield "counts", [function(*counts) for function in refuted]


@golden("audit/one-run")
def run_one_run(folder):
    coins = np.random.default_rng(5).random(120) < 0.5
    scores = coins + np.random.default_rng(6).normal(0, 0.6, 120)
    guesses = (40, (20, 10), [(10, 10), (30, 30)])
    ways = {"plain": audit.audit_one_run, "gaussian": audit.audit_one_run_gaussian}
    for name, function in ways.items():
        yield name, [numbers(function(scores, coins, 1e-5, guess)) for guess in guesses]
    given = (30, 40, 120)
    epsilons = (0.0, 1.0, 2.0)
    yield "chance", [one_run.compute_guess_p_value(*given, epsilon, 1e-4) for epsilon in epsilons]
    law = (lambda tpr: tpr / np.e, 0.05)
    yield "refuted", [one_run.is_tradeoff_refuted(120, 40, hits, *law) for hits in (20, 30, 40)]


@golden("audit/verdict")
def run_verdict(folder):
    members, others = draw_scores()
    rates = (0.001, 0.01, 0.1)
    for name, guarantee in (("proved", make_release().guarantee), ("none", NO_GUARANTEE)):
        estimates = [
            audit.audit_many_runs(members, others, 1e-5, threshold=0.5),
            audit.estimate_tpr_at_fpr(members, others, rates, certify_fpr=True),
            audit.estimate_tpr_at_fpr(members + 9, others, rates, certify_fpr=True),
        ]
        verdicts = [audit.judge(estimate, guarantee) for estimate in estimates]
        yield name, [[*numbers(v), v.is_broken, v.is_inconclusive] for v in verdicts]


# Membership attacks


def draw_few(seed):
    """Some of those that the controls of attacks ask about."""
    sides = control_data.draw_digits(seed)
    return control_data.ControlData(*(Records(s.images[:40], s.labels[:40]) for s in sides))


def draw_fewer(seed):
    """A few of two classes."""
    sides = []
    for side in control_data.draw_digits(seed):
        indices = (side.labels < 2).nonzero().flatten()[:6]
        sides.append(Records(side.images[indices], side.labels[indices]))
    return control_data.ControlData(*sides)


BLURRED = controls.Control(control_data.build_blurred_set, draw_few)
MISLABELLED = controls.Control(
    control_data.build_blurred_set, control_data.draw_mislabeled_digits, 10
)
MEMORIZED = controls.Control(control_data.build_memorizing_artifact, draw_fewer)
CONTROLS = {
    "loss": MISLABELLED,
    "lira": MISLABELLED,
    "lira-offline": MISLABELLED,
    "rmia": MISLABELLED,
    "nearest-lpips": controls.Control(control_data.build_blurred_set, draw_fewer),
    "real-start": controls.Control(control_data.build_shifted_set, draw_few),
    "tracing": controls.Control(control_data.build_blurred_set),
    "gan-leaks-full": controls.Control(control_data.build_memorizing_artifact, draw_few),
    "gan-leaks-partial": MEMORIZED,
    "gan-leaks-white": MEMORIZED,
}


@golden("attack", ATTACKS)
def run_membership_attack(name, folder):
    """An attack on a small control that leaks, and on one that cannot."""
    control = CONTROLS.get(name, BLURRED)
    with mock.patch.object(nearest_measure, "load_lpips_network", make_random_lpips):
        yield "leaky", list(control.score(name, True, 0))
        yield "null", list(control.score(name, False, 0))


@golden("attack/functions")
def run_attack_functions(folder):
    """The functions of the attacks, with options that no other run takes."""
    draws = np.random.default_rng(1)
    members = lira.balanced_membership(12, 8, rng(2))
    scores = members + draws.normal(size=members.shape)
    twice = np.stack([scores, scores + draws.normal(size=scores.shape)], 2)
    logs = -np.abs(scores) - 0.01
    population = -np.abs(draws.normal(size=(8, 9))) - 0.01
    outputs = (normal(3, 7, 4, seed=1), torch.arange(7) % 4)
    images = uniform(9, 1, 8, 8, seed=3)
    others = uniform(5, 1, 8, 8, seed=4)
    ways = [{}, {"offline": True}, {"pool_variance": False}, {"use_median": True}]
    yield "halves", members
    yield "lira", [lira.lira_leave_one_out(scores, members, **way) for way in ways]
    yield "twice", [lira.lira_leave_one_out(twice, members, **way) for way in ways]
    yield "one", [lira.lira(scores[0], scores[1:], members[1:], **way) for way in ways]
    sides = (logs[0], logs[1:], members[1:], population[0], population[1:])
    single = rmia.rmia(*sides, offline=True, a=0.5, gamma=1.2)
    yield "rmia", [rmia.rmia_leave_one_out(logs, members, population), single]
    yield "loss", [loss.logit_scaled_confidence(*outputs), loss.negative_loss(*outputs)]
    yield "neighbours", list(nearest_measure.search_nearest_neighbours(images, others, 3))
    references = ((scores[1:],), (scores[1:], members[1:]))
    yield "calibrated", [nearest.calibrate_scores(scores[0], *given) for given in references]
    yield "cosine", nearest.score_largest_cosine(images, others)


@golden("attack/searches")
def run_gan_leaks(folder):
    """GAN-Leaks on a real generator, with few steps."""
    arguments = {"shape": [1, 8, 8], "classes": 10, "latent_dim": 4, "hidden_dim": 8, "channels": 4}
    net = initialize_weights(GENERATORS["ConvGenerator"](**arguments), rng(0))
    artifact = Artifact.from_generator("ConvGenerator", arguments, net)
    samples = artifact.build_generator()(normal(9, 4), torch.arange(9)).detach()
    records = digits(5)
    black = {"num_rounds": 3, "num_children": 2}
    yield "partial", gan_leaks.score_partial_black_box(artifact, *records, **black)
    white = {"steps": 3, "restarts": 2, "lpips_weight": 0}
    yield "white", gan_leaks.score_white_box(artifact, *records, **white)
    yield "full", gan_leaks.score_full_black_box(records[0], samples)


@golden("attack/blind")
def run_blind(folder):
    images, labels = digits(60, 60)
    for name, factor in (("alike", 1.0), ("apart", 0.8)):
        others = Records(factor * images, labels)
        yield name, list(run_blind_baseline(Records(*digits(60)), others, 10))


@golden("attack/canaries", canaries.CANARY_KINDS)
def run_canaries(kind, folder):
    images, labels = digits(10)
    needs_records = kind in canaries.IN_DISTRIBUTION_KINDS
    given = {"images": images, "labels": labels} if needs_records else {}
    sets = [canaries.generate_canaries(kind, Spec((1, 8, 8), 10), 5, rng(4), **given)]
    if not given:
        sets.append(canaries.generate_canaries(kind, Spec((3, 6, 5), 4), 3, rng(5)))
    return {"made": list(map(list, sets)), "coins": canaries.flip_fair_coins(20)}


@golden("attack/power")
def run_power(folder):
    """The controls of one attack as they are, on digits."""
    yield "power", numbers(controls.run_controls.__wrapped__("nearest-pixels"))
    yield "digits", [list(split) for split in control_data.load_digit_splits(0)]
    yield "mislabelled", [list(side) for side in control_data.draw_mislabeled_digits(1)]
    yield "chance", [controls.compute_null_p_value(*draw_scores(), seed=seed) for seed in (0, 1)]


def skip_controls():
    """An attack's proof of power is taken as given."""
    rest = (0.99, 0.5, 0.4, 0.9, True, "")
    return mock.patch.object(
        checks, "run_controls", lambda name: controls.ControlResult(name, *rest)
    )


@golden("attack/attempt")
def run_attempt(folder):
    """Whole attacks on releases, to the verdict."""
    sides = (public_digits(40), public_digits(50, 40))
    images, labels = digits(40)
    claim = make_release(classes=10, names=None)
    artifact = Artifact.from_images(images, labels)
    release = Release(artifact, claim.guarantee, sides[0].spec, claim.metadata)
    noisy = Artifact.from_images(uniform(40, 1, 8, 8), labels)
    noise = dataclasses.replace(release, artifact=noisy)
    options = runner.AttackOptions(epochs=2)
    cases = {
        "nearest": ("real-start", release, {"references": [noise], "options": options}),
        "tracing": ("tracing", release, {"population": public_digits(30, 90), "options": options}),
        "loss": ("loss", noise, {"options": runner.AttackOptions(epochs=2, num_candidates=20)}),
    }
    with skip_controls():
        for label, (name, subject, more) in cases.items():
            attack = runner.run_attack(name, subject, *sides, runtime=CPU, **more)
            yield label, [numbers(attack), numbers(attack.to_json())]


MATCHING = {"images_per_class": 1, "steps": 2, "batch_per_class": 8, "net_width": 4}
SHADOWED = {
    "real-subset": {"images_per_class": 1},
    "distribution-matching": MATCHING | {"learning_rate": 1.0},
    "merf": choose_tiny_settings("merf"),
}


@golden("attack/shadows", SHADOWED)
def run_shadows(name, folder):
    """Shadows of a method, and LiRA with each of them as the victim."""
    given = (SHADOWED[name], None, public_digits(60), public_digits(60, 60), folder / "shadows", 4)
    more = {"seed": 3, "epochs": 1, "num_samples": 20, "shadows_per_batch": 3}
    shadows = prepare_shadows(method_shadows.shadows_for_method(name, *given, **more), CPU)
    with skip_controls():
        result = runner.leave_one_out_attack("lira-pixels", shadows)
    yield "members", shadows.load_membership()
    yield "observed", [np.array(shadows.load_observation(kind)) for kind in OBSERVATIONS]
    facts = ("records", "accuracy_in", "accuracy_out")
    yield "facts", [shadows.load_fact(fact) for fact in facts]
    releases = [shadows.load_release(index) for index in range(4)]
    yield "releases", [bag(release.artifact.tensors.values()) for release in releases]
    yield "left out", numbers(result)


NEAREST = {"canary_kind": "mislabelled", "canary_score": "nearest"}
AUDITS = {
    "runs": ("merf", {"runs_per_side": 4}),
    "gaussian": ("merf", NEAREST | {"runs_per_side": 4, "assume_gaussian": True}),
    "canaries": ("merf", {"num_canaries": 6, "canary_kind": "orthogonal"}),
    "open": ("real-subset", {"runs_per_side": 4, "canary_kind": "clean"}),
}
MERF = {"num_features": 16, "steps": 2, "batch_per_class": 4, "hidden_dim": 8}
AUDITED = {
    "merf": {"epsilon": 5.0, "settings": MERF | {"neighbours": "add-remove"}},
    "real-subset": {"settings": {"images_per_class": 2}},
}


@golden("attack/epsilon", AUDITS)
def run_epsilon_audit(label, folder):
    """The lower bound on epsilon by runs with and without planted records."""
    name, options = AUDITS[label]
    more = {"folder": folder / "audit", "dataset": public_digits(60), "method": name}
    yield "verdict", numbers(EpsilonAudit(**more, **AUDITED[name], **options).run(CPU))
    lines = (folder / "audit" / "runs.jsonl").read_text().splitlines()
    yield "runs", numbers(list(map(json.loads, lines)))
