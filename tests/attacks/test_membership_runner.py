"""One attack on one release: leaks are found, true certificates hold, false ones are refuted."""

import json
import math
from dataclasses import asdict, replace
from functools import cache

import numpy as np
import pytest
import torch
from support.seeding import seed_generator

from privot.attacks.membership import attack_report, checks, lira, runner, target
from privot.attacks.membership.attack_report import apply_blind_baseline, build_attack_report
from privot.attacks.membership.blind_baseline import BlindScores, run_blind_baseline
from privot.attacks.membership.candidates import concatenate
from privot.attacks.membership.controls import ControlResult, run_controls
from privot.attacks.membership.method_shadows import shadows_for_method, shadows_for_release
from privot.attacks.membership.registry import ATTACKS
from privot.attacks.membership.runner import AttackOptions, leave_one_out_attack, run_attack
from privot.attacks.membership.target import AttackTarget, MembershipScores
from privot.attacks.shadows.runner import prepare_shadows
from privot.audit import compute_roc
from privot.audit.result import AttackResult
from privot.data import load_dataset
from privot.data.dataset import Public, Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotError, SettingError
from privot.nets import DenseGenerator, initialize_weights
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.release import Release
from privot.release.artifact import Artifact
from privot.runtime import Runtime
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = Runtime("cpu")
SPEC = Spec((1, 8, 8), 10)
NONE = NoGuarantee("these are real records")
REAL_SUBSET = {"images_per_class": 4}
TINY = {"images_per_class": 2, "num_random_nets": 4, "nets_per_round": 2}
TINY |= {"net_width": 4, "steps": 4, "net_train_epochs": 1}


@pytest.fixture(autouse=True, scope="module")
def quick_controls():
    """The controls of the cheapest attack run; test_controls.py runs all."""

    def run_quickly(name):
        if name == "nearest-pixels":
            return run_controls(name)
        return ControlResult(name, 1.0, 0.5, 0.5, 0.8, True, "the attack works")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "run_controls", run_quickly)
        yield


@cache
def load_mixed():
    """The digits in an order of their own, in which classes take turns."""
    images, labels = (part.numpy() for part in load_dataset("digits", public=True).records())
    mixed = np.random.default_rng(5).permutation(len(labels))
    own = labels[mixed]
    turns = [(own[:index] == label).sum() for index, label in enumerate(own)]
    order = mixed[np.lexsort((own, turns))]
    return images[order], labels[order]


@cache
def load_digits(start, end, kind=Sensitive, wrong=0.0, spec=SPEC):
    """Some of the digits; of a share of any ten the labels are exchanged."""
    images, labels = load_mixed()
    rng = np.random.default_rng(6)
    labels = labels.copy()
    for ten in np.arange(len(labels) // 10 * 10).reshape(-1, 10):
        chosen = rng.permutation(ten)[: round(10 * wrong)]
        labels[chosen] = np.roll(labels[chosen], 1)
    return kind(images[start:end], labels[start:end], spec, name="some digits")


def seal(images, labels):
    return Sensitive(images, labels, SPEC)


def make_release(images, labels, guarantee=NONE, **facts):
    return Release(Artifact.from_images(images, labels), guarantee, SPEC, facts)


def publish(dataset, guarantee=NONE, **facts):
    """A release that repeats records."""
    return make_release(*dataset._read_records(slice(None)), guarantee, **facts)


def claim_noise(multiplier):
    plan = Plan((Stage("all", "sum", multiplier),), Neighbours.ADD_REMOVE)
    return Guarantee.from_plan(plan, 1e-5)


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """Of the first 600 digits, at epsilon 1."""
    ledger = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    return synthesize(load_digits(0, 600), "private-set", 1.0, settings=TINY, ledger=ledger)


@pytest.fixture(scope="module")
def leaky():
    """The first 100 digits."""
    return publish(load_digits(0, 100))


def attack(name, release, members=(0, 100), others=(600, 1000), kind=Sensitive, **more):
    sides = (
        load_digits(*side, kind) if isinstance(side, tuple) else side for side in (members, others)
    )
    return run_attack(name, release, *sides, runtime=CPU, **more)


@pytest.mark.parametrize(
    ("name", "auc"),
    [("nearest-pixels", 0.99), ("real-start", 0.99), ("tracing", 0.65)],
)
def test_members_that_are_published_are_found_and_nobody_in_a_private_set(
    name, auc, leaky, private
):
    result = attack(name, leaky)
    assert result.auc > auc
    assert result.control.passed
    assert result.verdict.status == "no claim"
    assert result.verdict.lower_bound > (0.8 if name != "tracing" else 0)
    result = attack(name, private, (0, 600))
    verdict = result.verdict
    assert (verdict.status, result.warning) == ("holds", "")
    assert verdict.claimed == pytest.approx(private.guarantee.max_tpr[verdict.quantity.split()[-1]])
    assert not verdict.is_inconclusive  # so many others would have seen more
    assert abs(result.auc - 0.5) < 0.1
    facts = json.loads(json.dumps(result.to_json()))
    assert facts["verdict"] == asdict(verdict)
    assert facts["control"]["summary"] == result.control.summary
    assert math.isclose(facts["auc"], result.auc)
    # Two tests of one set of scores at 95 % each would accuse one honest release in ten.
    shown = AttackResult.from_json(facts["attacks"][0])
    points = result.verdict_points.points
    assert (shown.name, shown.fpr) == (ATTACKS[name].title, attack_report.REPORTED_FPRS)
    assert shown.tpr_lower == tuple(point.tpr_lower_bound for point in points)
    assert all(point.fpr_upper_bound <= point.target_fpr for point in points)


def test_images_that_are_near_references_too_say_nothing(leaky):
    """Faint images are near all that is released, whoever was a member."""
    images, labels = load_mixed()
    fade = np.random.default_rng(0).uniform(0.2, 1, (len(images), 1, 1, 1))
    images = torch.from_numpy(images * fade.astype(np.float32))
    labels = torch.from_numpy(labels)
    faded = make_release(0.8 * images[:100], labels[:100])  # what it shows is no copy
    references = [
        make_release(images[part], labels[part]) for part in (slice(1000, 1100), slice(1100, 1200))
    ]
    sides = [
        seal(images[part].numpy(), labels[part].numpy()) for part in (slice(100), slice(600, 1000))
    ]
    plain, better = (
        attack("nearest-pixels", faded, *sides, references=given) for given in ((), references)
    )
    assert better.auc > plain.auc + 0.02
    assert better.title == "nearest released image in pixels, calibrated by 2 of other records"
    with pytest.raises(SettingError, match="another release"):
        attack("nearest-pixels", faded, references=[faded])
    with pytest.raises(SettingError, match="needs none"):
        attack("tracing", faded, references=references)


def test_some_of_the_candidates_are_enough_and_scores_go_to_the_right_side(leaky):
    result = attack("nearest-pixels", leaky, options=AttackOptions(num_candidates=50))
    points = result.operating_points
    assert (points.num_members, points.num_nonmembers) == (50, 50)
    assert result.auc > 0.99
    result = attack("nearest-pixels", leaky, options=AttackOptions(num_candidates=10**6))
    assert result.operating_points.num_nonmembers == 400
    assert result.verdict_points == result.operating_points  # no claim
    assert attack("nearest-pixels", publish(load_digits(600, 1000))).auc < 0.01


def test_the_loss_of_what_was_memorized():
    members = load_digits(0, 60, wrong=2 / 3)
    others = load_digits(600, 800, wrong=2 / 3)
    result, nothing = (
        attack("loss", publish(dataset), members, others, options=AttackOptions(epochs=120))
        for dataset in (members, load_digits(1000, 1060, wrong=2 / 3))
    )
    assert result.auc > 0.7
    assert result.advantage.value > 0.3
    assert result.operating_points.num_nonmembers == 200
    assert abs(nothing.auc - 0.5) < 0.1


def test_a_false_certificate_is_refuted():
    claim = claim_noise(37.0)
    assert claim.epsilon < 0.1
    result = attack("nearest-pixels", publish(load_digits(0, 100), claim))
    assert result.verdict.is_broken
    assert "the claim is broken" in result.verdict.summary
    honest = attack("nearest-pixels", publish(load_digits(1000, 1100), claim))  # of nobody here
    assert honest.verdict.status == "holds"
    few = attack("nearest-pixels", publish(load_digits(0, 100), claim), others=(600, 630))
    assert few.verdict.is_inconclusive  # too few to know a rate of 0.1


def test_members_and_others_are_scored_about_one_mean():
    """With separate means a side of 20 records would differ from one of 600 by its mean alone."""
    images, labels = (part[:1000] for part in load_dataset("digits", public=True).records())
    release = publish(load_digits(1200, 1300))
    aucs = []
    for seed in range(8):
        order = torch.randperm(1000, generator=seed_generator(seed))
        few = torch.cat([order[labels[order] == label][:2] for label in range(10)])
        many = order[~torch.isin(order, few)][:600]
        sides = [seal(images[which].numpy(), labels[which].numpy()) for which in (many, few)]
        aucs.append(attack("real-start", release, *sides).auc)
    assert abs(np.mean(aucs) - 0.5) < 0.08  # 0.19 with two means


def test_a_separate_population_leaves_all_others_to_judge(leaky):
    default = attack("tracing", leaky)
    assert default.operating_points.num_nonmembers == 320  # a fifth is set aside
    separate = attack("tracing", leaky, kind=Public, population=load_digits(1000, 1400))
    assert separate.operating_points.num_nonmembers == 400
    assert separate.auc > 0.8
    assert not separate.publishable  # the population is not public


def test_results_of_public_candidates_alone_may_be_published(leaky):
    for kind, is_public in ((Sensitive, False), (Public, True)):
        result = attack("nearest-pixels", leaky, kind=kind)
        parts = (result, result.operating_points, result.advantage, result.verdict)
        assert {part.publishable for part in parts} == {is_public}
        assert result.to_json()["attacks"][0]["publishable"] is is_public
    assert not attack("nearest-pixels", leaky, load_digits(0, 100, Public)).publishable


def test_an_attack_that_fails_its_controls_does_not_run(leaky, monkeypatch):
    broken = ControlResult("nearest-pixels", 0.5, 0.5, 0.5, 0.99, False, "it does not work")
    monkeypatch.setattr(checks, "run_controls", lambda name: broken)
    monkeypatch.setattr(runner, "AttackTarget", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(PrivotError, match="controls here: it does not work"):
        attack("nearest-pixels", leaky)


SMALL = Sensitive(np.zeros((20, 1, 4, 4)), np.arange(20) % 10, Spec((1, 4, 4), 10))


@pytest.mark.parametrize(
    ("words", "name", "given"),
    [
        ("no attack 'guess'", "guess", {}),
        ("is a set", "gan-leaks-white", {}),
        ("compares with shadows", "lira", {}),
        ("members: images of 1x4x4", "nearest-pixels", {"members": SMALL}),
        ("non-members: images of 1x4x4", "tracing", {"others": SMALL}),
        ("members and non-members share records", "nearest-pixels", {"others": (90, 700)}),
        ("needs none", "nearest-pixels", {"population": load_digits(1000, 1100)}),
        ("the population share", "tracing", {"population": load_digits(50, 250)}),
        ("non-members and the population share", "tracing", {"population": load_digits(900, 1300)}),
    ],
)
def test_attacks_that_cannot_run_are_refused(leaky, words, name, given):
    with pytest.raises(SettingError, match=words):
        attack(name, leaky, **given)


def test_bytes_and_floats_are_concatenated():
    dataset = load_digits(0, 30)
    images = (dataset._images * 255).round().astype(np.uint8)
    coarse = seal(images, dataset._labels)
    both = concatenate(coarse, load_digits(30, 60))
    expected = np.concatenate([dataset._images, load_digits(30, 60)._images])
    assert both._read_records(slice(None)).images.numpy() == pytest.approx(expected, abs=1 / 255)
    assert both._count_records() == both.spec.size == 60
    assert concatenate(coarse, coarse)._images.dtype == np.uint8
    assert isinstance(both, Sensitive)
    assert isinstance(concatenate(load_digits(0, 5, Public), load_digits(5, 9, Public)), Public)
    with pytest.raises(SettingError, match="same classes"):
        concatenate(load_digits(0, 10), load_digits(20, 30, spec=replace(SPEC, num_classes=11)))


# With shadows


@pytest.fixture(scope="module")
def shadowed(tmp_path_factory):
    """A release that repeats its 100 members, and shadows that repeat 40 of theirs."""
    sides = [load_digits(*side, wrong=2 / 3) for side in ((0, 100), (600, 700))]
    folder = tmp_path_factory.mktemp("shadows") / "here"
    release = publish(sides[0], method="real-subset", settings=REAL_SUBSET)
    return (
        release,
        sides,
        prepare_shadows(shadows_for_release(release, *sides, folder, 8, epochs=80), CPU),
    )


def test_shadows_are_made_as_the_release(shadowed, private, leaky, tmp_path):
    _, sides, prepared = shadowed
    plan = prepared.plan
    assert (plan["method"], plan["settings"]["images_per_class"]) == ("real-subset", 4)
    assert plan["candidates"]["size"] == 200
    assert not prepared.publishable

    def configure(release):
        return shadows_for_release(release, *sides, tmp_path, 2)

    config = configure(private)
    assert config.epsilon == pytest.approx(1.0, rel=1e-6)
    assert config.settings["num_random_nets"] == 4
    metadata = private.metadata
    no_noise = NoGuarantee("no noise was added: the budget was infinite")
    loud = Release(private.artifact, no_noise, SPEC, metadata)
    assert configure(loud).describe_plan()["epsilon"] == "inf"
    fixed = metadata | {"settings": metadata["settings"] | {"noise_multiplier": 3.0}}
    fixed_release = Release(private.artifact, private.guarantee, SPEC, fixed)
    assert configure(fixed_release).epsilon is None
    with pytest.raises(SettingError, match="does not name the method"):
        configure(leaky)


@pytest.mark.parametrize(
    ("name", "others"), [("lira", 100), ("lira-offline", 100), ("rmia", 80)]
)  # of 100, 20 are rmia's population
def test_an_attack_with_shadows(shadowed, name, others):
    release, sides, prepared = shadowed
    result = attack(name, release, *sides, shadow_store=prepared)
    assert result.auc > 0.65
    points = result.operating_points
    assert (points.num_members, points.num_nonmembers) == (100, others)
    assert not result.publishable
    with pytest.raises(SettingError, match=r"population: .* Leave it out"):
        attack(name, release, *sides, shadow_store=prepared, population=load_digits(1000, 1100))


def test_the_victim_trains_as_its_shadows_do(shadowed, monkeypatch):
    """Whatever else is asked: comparing unlike classifiers compares nothing."""
    release, sides, prepared = shadowed
    epochs = []
    train = target.train_on_releases

    def spy(*given):
        epochs.append(given[3])
        return train(*given)

    monkeypatch.setattr(target, "train_on_releases", spy)
    attack("lira", release, *sides, shadow_store=prepared, options=AttackOptions(epochs=5))
    assert epochs == [80]


def test_shadows_of_other_candidates_are_refused(shadowed):
    release, (members, others), prepared = shadowed
    as_many = load_digits(700, 800, wrong=2 / 3)
    for sides in ((members, as_many), (members, load_digits(700, 750)), (others, members)):
        with pytest.raises(SettingError, match="other candidates"):
            attack("lira", release, *sides, shadow_store=prepared)


def test_without_a_release_every_shadow_is_the_victim_once(tmp_path):
    sides = load_digits(0, 100, Public, 1 / 3), load_digits(600, 700, Public, 1 / 3)
    config = shadows_for_method(
        "real-subset", REAL_SUBSET, None, *sides, tmp_path / "s", 6, epochs=40
    )
    prepared = prepare_shadows(config, CPU)
    result = leave_one_out_attack("lira", prepared, seed=3)
    members = prepared.load_membership()
    scores = lira.lira_leave_one_out(prepared.load_observation("confidence"), members)
    aucs = [compute_roc(row[own], row[~own]).auc for row, own in zip(scores, members, strict=True)]
    assert result.auc == pytest.approx(np.mean(aucs))
    assert len(set(aucs)) > 1
    victim = int(torch.randint(6, (), generator=seed_generator(3)))
    points = result.operating_points
    assert points.num_members + points.num_nonmembers == 200  # of one victim, not 6 times as many
    inside = scores[victim, members[victim]]
    outside = np.sort(scores[victim, ~members[victim]])[::-1]
    threshold = outside[int(0.1 * len(outside))]
    assert points.points[2].tpr == (inside > threshold).mean()
    assert result.verdict.status == "no claim"
    assert result.publishable
    for name, words in (("rmia", "Attack a release"), ("tracing", "Synthesize one first")):
        with pytest.raises(SettingError, match=words):
            leave_one_out_attack(name, prepared)


# Sides that differ, and generators that collapsed


def test_a_warning_names_sides_of_other_class_shares_or_looks(private):
    """A release of nobody separates such sides, so nothing that it shows is membership."""
    images, labels = load_mixed()
    odd = np.flatnonzero((labels % 2 == 1) | (np.arange(len(labels)) % 3 == 0))
    odd = odd[odd >= 600][:300]
    result = attack("nearest-pixels", private, (0, 600), seal(images[odd], labels[odd]))
    assert "class shares differ" in result.warning
    shifted = seal(np.roll(images[600:1400], 1, -1), labels[600:1400])
    result = attack("nearest-pixels", private, (0, 600), shifted)
    assert "separated without the release" in result.warning


def test_diversity_is_what_two_images_of_a_class_differ():
    dataset = load_digits(0, 200)
    images, labels = dataset._read_records(slice(None))

    def measure(images, labels, dataset=dataset):
        return AttackTarget(make_release(images, labels), CPU).measure_diversity(dataset)

    for fade in (1.0, 0.5, 0.0):
        assert measure(fade * images, labels) == pytest.approx(fade)
    means = torch.stack([images[labels == label].mean(0) for label in range(10)])
    for which in (labels, torch.arange(10)):  # images of a class are equal, or there is one
        assert measure(means[which], which) < 1e-6
    assert measure(images, labels, load_digits(600, 610)) == math.inf


@pytest.mark.parametrize(
    "name", ["gan-leaks-full", pytest.param("tracing", marks=pytest.mark.slow)]
)
def test_a_collapsed_generator_is_named(name):
    """An AUC of chance means little where a generator draws one image of each class."""
    sizes = {"shape": (1, 8, 8), "classes": 10, "latent_dim": 5, "hidden_dim": 64}
    for spread, words in ((0.01, "collapsed"), (5.0, "")):  # how far codes change its images
        net = initialize_weights(DenseGenerator(**sizes), seed_generator()).eval()
        with torch.no_grad():
            net.layers[0].weight[:, : net.latent_dim] *= spread
            net.layers[-1].weight *= 5
        artifact = Artifact.from_generator("DenseGenerator", sizes, net)
        warning = attack(name, Release(artifact, NONE, SPEC, {})).warning
        assert words in warning if words else warning == ""


def test_sides_that_look_different_refute_nothing(private):
    """Non-members are negatives: whoever never saw the release finds the members, too."""
    images, labels = load_mixed()
    negatives = seal(images.max() - images[600:1400], labels[600:1400])
    result = attack("nearest-pixels", private, (0, 600), negatives)
    assert result.auc > 0.6  # 0.80 to 0.99, by the noise of the release
    assert result.blind_auc > 0.99
    assert result.verdict.status == "no verdict"
    assert not result.verdict.is_broken
    assert "without access to the release" in result.verdict.summary
    [shown] = result.to_json()["attacks"]
    assert shown["fpr"] == shown["tpr_lower"] == ()
    assert not shown["verdict_refutes_guarantee"]


def test_a_claim_is_broken_only_beyond_what_a_blind_attacker_finds(private):
    control = run_controls("nearest-pixels")

    def judge(scores, blind, release):
        report = build_attack_report("nearest-pixels", control, scores, release, 0.95, 0, False)
        return apply_blind_baseline(report, blind, release).verdict.status

    others = np.linspace(0, 1, 800)
    full = MembershipScores(np.linspace(1, 2, 600), others)  # what a leak would give
    some = MembershipScores(np.linspace(0.6, 2, 600), others)
    sides = (load_digits(*side)._read_records(slice(None)) for side in ((0, 600), (600, 1400)))
    alike = run_blind_baseline(*sides, 10)
    assert judge(full, alike, private) == "broken"
    # finds two thirds of the members without the release
    apart = BlindScores(np.linspace(0.5, 2, 600), others, 0.0)
    for noise, scores, status in (
        (40.0, some, "no verdict"),
        (40.0, full, "broken"),
        (2.0, full, "no verdict"),
    ):
        assert judge(scores, apart, replace(private, guarantee=claim_noise(noise))) == status


def test_shadows_have_as_many_clients_as_the_release(tmp_path):
    dataset = load_dataset("digits", public=True, num_clients=5)
    others = load_dataset("digits", "test", public=True)
    artifact = Artifact.from_images(torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64))
    release = Release(artifact, NONE, dataset.spec, {"method": "real-subset"})
    sides = (dataset, others, tmp_path, 4)
    of_method = shadows_for_method("real-subset", {}, None, *sides)
    for config in (shadows_for_release(release, *sides), of_method):
        assert config.dataset.spec.num_clients == 5
        assert config.dataset._client_ids is None  # for the gate to deal
