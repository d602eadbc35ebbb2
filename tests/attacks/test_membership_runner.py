"""One attack on one release: members of what leaks are found, a certificate that is true stands, one that is false is called so."""

import json
import math
from dataclasses import asdict, replace
from functools import cache

import numpy as np
import pytest
import torch

from privot.attacks.membership import attack_report, checks, lira, runner, target
from privot.attacks.membership.attack_report import apply_blind_baseline, build_attack_report
from privot.attacks.membership.blind_baseline import BlindScores, run_blind_baseline
from privot.attacks.membership.candidates import concatenate
from privot.attacks.membership.controls import ControlResult
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
TINY = {
    "images_per_class": 2,
    "num_random_nets": 4,
    "nets_per_round": 2,
    "net_width": 4,
    "steps": 4,
    "net_train_epochs": 1,
}


@cache
def everyone():
    images, labels = (each.numpy() for each in load_dataset("digits", public=True).records())
    mixed = np.random.default_rng(5).permutation(len(labels))
    turns = np.array(
        [(labels[mixed[:place]] == labels[each]).sum() for place, each in enumerate(mixed)]
    )
    order = mixed[np.lexsort((labels[mixed], turns))]
    return images[order], labels[order]


def digits(begin, end, kind=Sensitive, wrong=0.0, spec=SPEC):
    """Some of the digits in an order of their own, in which classes take turns; of a share of any ten the labels change hands."""
    images, labels = everyone()
    rng = np.random.default_rng(6)
    labels = labels.copy()
    for ten in np.arange(len(labels) // 10 * 10).reshape(-1, 10):
        chosen = rng.permutation(ten)[: round(10 * wrong)]
        labels[chosen] = np.roll(labels[chosen], 1)
    return kind(images[begin:end], labels[begin:end], spec, name="some digits")


def published(box, guarantee=None, **facts):
    """A release that repeats records."""
    images, labels = box._read_records(slice(None))
    return Release(
        Artifact.from_images(images, labels),
        guarantee or NoGuarantee("these are real records"),
        SPEC,
        facts,
    )


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """Of the first 600 digits, at epsilon 1."""
    return synthesize(
        digits(0, 600),
        "private-set",
        1.0,
        settings=TINY,
        ledger=tmp_path_factory.mktemp("book") / "ledger.jsonl",
    )


def tried(name, release, members=(0, 100), others=(600, 1000), kind=Sensitive, **more):
    return run_attack(
        name, release, digits(*members, kind), digits(*others, kind), runtime=CPU, **more
    )


@pytest.mark.parametrize(
    ("name", "auc"),
    [("nearest-pixels", 0.99), ("nearest-features", 0.99), ("real-start", 0.99), ("tracing", 0.65)],
)
def test_those_who_are_published_are_found_and_nobody_in_a_private_set(name, auc, private):
    found = tried(name, published(digits(0, 100)))
    assert found.auc > auc
    assert found.control.passed
    assert found.verdict.status == "no claim"
    assert found.verdict.lower_bound > (0.8 if name != "tracing" else 0)
    held = tried(name, private, (0, 600))
    assert held.verdict.status == "holds"
    assert held.verdict.claimed == pytest.approx(
        private.guarantee.max_tpr[held.verdict.quantity.split()[-1]]
    )
    assert not held.verdict.is_inconclusive  # so many others would have seen more
    assert abs(held.auc - 0.5) < 0.1
    assert (
        AttackResult.from_json(json.loads(json.dumps(held.to_json()))["attacks"][0]).name
        == ATTACKS[name].title
    )


def test_report_and_verdict_look_at_the_same_points(private):
    """Two tests of one set of scores at 95 % each would accuse one honest release in ten."""
    found = tried("nearest-pixels", private, (0, 600))
    shown = AttackResult.from_json(json.loads(json.dumps(found.to_json()))["attacks"][0])
    assert shown.fpr == attack_report.REPORTED_FPRS
    assert shown.tpr_lower == tuple(each.tpr_lower_bound for each in found.verdict_points.points)
    assert all(each.fpr_upper_bound <= each.target_fpr for each in found.verdict_points.points)
    unclaimed = tried("nearest-pixels", published(digits(0, 100)))
    assert unclaimed.verdict_points == unclaimed.operating_points


def test_what_is_near_references_too_says_nothing():
    """Faint images are near all that is released, whoever was a member."""
    images, labels = everyone()
    images = images * np.random.default_rng(0).uniform(0.2, 1, (len(images), 1, 1, 1)).astype(
        np.float32
    )

    def made(begin, end, fade=1.0):
        return Release(
            Artifact.from_images(
                fade * torch.from_numpy(images[begin:end]), torch.from_numpy(labels[begin:end])
            ),
            NONE,
            SPEC,
            {},
        )

    sides = [
        Sensitive(images[begin:end], labels[begin:end], SPEC)
        for begin, end in ((0, 100), (600, 1000))
    ]
    # what it shows is no copy
    spoiled = made(0, 100, 0.8)
    others = [made(1000, 1100), made(1100, 1200)]
    plain, better = (
        run_attack("nearest-pixels", spoiled, *sides, references=each, runtime=CPU)
        for each in ((), others)
    )
    assert better.auc > plain.auc + 0.02
    assert better.title == "nearest released image in pixels, calibrated by 2 of other records"
    with pytest.raises(SettingError, match="another release"):
        tried("nearest-pixels", spoiled, references=[spoiled])
    with pytest.raises(SettingError, match="needs none"):
        tried("tracing", spoiled, references=others)


def test_some_of_the_candidates_are_enough():
    found = tried(
        "nearest-pixels", published(digits(0, 100)), options=AttackOptions(num_candidates=50)
    )
    assert (found.operating_points.num_members, found.operating_points.num_nonmembers) == (50, 50)
    assert found.auc > 0.99
    assert (
        tried(
            "nearest-pixels", published(digits(0, 100)), options=AttackOptions(num_candidates=10**6)
        ).operating_points.num_nonmembers
        == 400
    )


def test_the_loss_of_what_was_learned_by_heart():
    members = digits(0, 60, wrong=2 / 3)
    others = digits(600, 800, wrong=2 / 3)
    found = run_attack(
        "loss", published(members), members, others, options=AttackOptions(epochs=120), runtime=CPU
    )
    assert found.auc > 0.7
    assert found.advantage.value > 0.3
    assert found.operating_points.num_nonmembers == 200
    nothing = run_attack(
        "loss",
        published(digits(1000, 1060, wrong=2 / 3)),
        members,
        others,
        options=AttackOptions(epochs=120),
        runtime=CPU,
    )
    assert abs(nothing.auc - 0.5) < 0.1


def test_a_false_certificate_is_broken():
    cost = Plan((Stage("all", "sum", 37.0),), Neighbours.ADD_REMOVE)
    claim = Guarantee.from_plan(cost, 1e-5)
    assert claim.epsilon < 0.1
    found = tried("nearest-pixels", published(digits(0, 100), claim))
    assert found.verdict.is_broken
    assert "the claim is broken" in found.verdict.summary
    honest = tried("nearest-pixels", published(digits(1000, 1100), claim))  # of nobody here
    assert honest.verdict.status == "holds"
    few = tried(
        "nearest-pixels", published(digits(0, 100), claim), others=(600, 630)
    )  # too few to know a rate of 0.1
    assert few.verdict.is_inconclusive


def test_members_and_others_are_scored_about_one_mean():
    """Each side about a mean of its own would tell 20 records, two of a class, from 600 wherever nobody is."""
    images, labels = load_dataset("digits", public=True).records()
    of_nobody = published(digits(1200, 1300))
    aucs = []
    for turn in range(8):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(turn))
        places = torch.cat([order[labels[:1000][order] == label][:2] for label in range(10)])
        rest = order[~torch.isin(order, places)][:600]
        boxes = [
            Sensitive(images[each].numpy(), labels[each].numpy(), SPEC) for each in (rest, places)
        ]
        aucs.append(run_attack("real-start", of_nobody, *boxes, runtime=CPU).auc)
    assert abs(np.mean(aucs) - 0.5) < 0.08  # 0.19 with two means


def test_scores_go_to_the_side_they_belong_to():
    """Others that are in the release are found, members that are not stay below."""
    found = tried("nearest-pixels", published(digits(600, 1000)))
    assert found.auc < 0.01


def test_a_population_of_ones_own_leaves_all_others_to_judge():
    leaky = published(digits(0, 100))
    aside = tried("tracing", leaky)
    assert aside.operating_points.num_nonmembers == 320  # a fifth is set aside
    own = tried("tracing", leaky, kind=Public, population=digits(1000, 1400))
    assert own.operating_points.num_nonmembers == 400
    assert own.auc > 0.8
    assert not own.publishable  # the population is not public


def test_what_may_be_published():
    leaky = published(digits(0, 100))
    for kind, public in ((Sensitive, False), (Public, True)):
        found = tried("nearest-pixels", leaky, kind=kind)
        assert {
            found.publishable,
            found.operating_points.publishable,
            found.advantage.publishable,
            found.verdict.publishable,
        } == {public}
        assert found.to_json()["attacks"][0]["publishable"] is public
    mixed = run_attack(
        "nearest-pixels", leaky, digits(0, 100, Public), digits(600, 1000), runtime=CPU
    )
    assert not mixed.publishable


def test_an_attack_that_fails_its_controls_is_not_tried(monkeypatch):
    broken = ControlResult("nearest-pixels", 0.5, 0.5, 0.5, 0.99, False, "it does not work")
    monkeypatch.setattr(checks, "run_controls", lambda name: broken)
    monkeypatch.setattr(runner, "AttackTarget", lambda *_, **__: pytest.fail("it was tried"))
    with pytest.raises(PrivotError, match="controls here: it does not work"):
        tried("nearest-pixels", published(digits(0, 100)))


def test_what_cannot_be_tried_is_refused(private, tmp_path):
    leaky = published(digits(0, 100))
    other = Sensitive(np.zeros((20, 1, 4, 4)), np.arange(20) % 10, Spec((1, 4, 4), 10))
    for words, given in {
        "no attack 'guess'": ("guess", leaky, digits(0, 100), digits(600, 700)),
        "is a set": ("gan-leaks-white", leaky, digits(0, 100), digits(600, 700)),
        "compares with shadows": ("lira", leaky, digits(0, 100), digits(600, 700)),
        "members: images of 1x4x4": ("nearest-pixels", leaky, other, digits(600, 700)),
        "non-members: images of 1x4x4": ("tracing", leaky, digits(0, 100), other),
        "members and non-members share records": (
            "nearest-pixels",
            leaky,
            digits(0, 100),
            digits(90, 700),
        ),
    }.items():
        with pytest.raises(SettingError, match=words):
            run_attack(*given)
    with pytest.raises(SettingError, match="needs none"):
        tried("nearest-pixels", leaky, population=digits(1000, 1100))
    with pytest.raises(SettingError, match="the population share"):
        tried("tracing", leaky, population=digits(50, 250))
    with pytest.raises(SettingError, match="non-members and the population share"):
        tried("tracing", leaky, population=digits(900, 1300))
    with pytest.raises(SettingError, match="same classes"):
        concatenate(digits(0, 10), digits(20, 30, spec=replace(SPEC, num_classes=11)))
    with pytest.raises(SettingError, match="does not name the method"):
        shadows_for_release(leaky, digits(0, 10), digits(20, 30), tmp_path, 2)


def test_bytes_and_numbers_come_together():
    box = digits(0, 30)
    coarse = Sensitive((box._images * 255).round().astype(np.uint8), box._labels, SPEC)
    both = concatenate(coarse, digits(30, 60))
    assert both._read_records(slice(None)).images.numpy() == pytest.approx(
        np.concatenate([box._images, digits(30, 60)._images]), abs=1 / 255
    )
    assert both._count_records() == both.spec.size == 60
    assert concatenate(coarse, coarse)._images.dtype == np.uint8
    assert isinstance(both, Sensitive)
    assert isinstance(concatenate(digits(0, 5, Public), digits(5, 9, Public)), Public)


# With shadows


@pytest.fixture(scope="module")
def against(tmp_path_factory):
    """A release that repeats its 100 members, and shadows that repeat 40 of theirs."""
    members, others = (digits(*each, wrong=2 / 3) for each in ((0, 100), (600, 700)))
    folder = tmp_path_factory.mktemp("shadows")
    release = published(members, method="real-subset", settings={"images_per_class": 4})
    prepared = prepare_shadows(
        shadows_for_release(release, members, others, folder / "here", 8, epochs=80), CPU
    )
    return release, members, others, prepared


def test_shadows_are_as_the_release(against, private, tmp_path):
    _, members, others, prepared = against
    assert prepared.plan["method"] == "real-subset"
    assert prepared.plan["settings"]["images_per_class"] == 4
    assert prepared.plan["candidates"]["size"] == 200
    assert not prepared.publishable
    of_private = shadows_for_release(private, members, others, tmp_path, 2)
    assert of_private.epsilon == pytest.approx(1.0, rel=1e-6)
    assert of_private.settings["num_random_nets"] == 4
    loud = Release(
        private.artifact,
        NoGuarantee("no noise was added: the budget was infinite"),
        SPEC,
        private.metadata,
    )
    assert (
        shadows_for_release(loud, members, others, tmp_path, 2).describe_plan()["epsilon"] == "inf"
    )
    fixed = Release(
        private.artifact,
        private.guarantee,
        SPEC,
        {**private.metadata, "settings": {**private.metadata["settings"], "noise_multiplier": 3.0}},
    )
    assert shadows_for_release(fixed, members, others, tmp_path, 2).epsilon is None


@pytest.mark.parametrize(
    ("name", "others"), [("lira", 100), ("lira-offline", 100), ("rmia", 80)]
)  # of 100, 20 are rmia's population
def test_an_attack_with_shadows(against, name, others):
    release, members, unseen, prepared = against
    found = run_attack(name, release, members, unseen, shadow_store=prepared, runtime=CPU)
    assert found.auc > 0.65
    assert (found.operating_points.num_members, found.operating_points.num_nonmembers) == (
        100,
        others,
    )
    assert not found.publishable
    with pytest.raises(SettingError, match=r"population: .* Leave it out"):
        run_attack(
            name, release, members, unseen, shadow_store=prepared, population=digits(1000, 1100)
        )


def test_the_victim_learns_as_its_shadows_do(against, monkeypatch):
    """Whatever else is said: comparing unlike classifiers compares nothing."""
    release, members, others, prepared = against
    seen = []
    real = target.train_on_releases
    monkeypatch.setattr(
        target, "train_on_releases", lambda *given: seen.append(given[3]) or real(*given)
    )
    run_attack(
        "lira",
        release,
        members,
        others,
        shadow_store=prepared,
        options=AttackOptions(epochs=5),
        runtime=CPU,
    )
    assert seen == [80]


def test_shadows_of_other_candidates_are_refused(against):
    release, members, others, prepared = against
    for strange in (digits(700, 800, wrong=2 / 3), digits(700, 750)):  # as many, and fewer
        with pytest.raises(SettingError, match="other candidates"):
            run_attack("lira", release, members, strange, shadow_store=prepared, runtime=CPU)
    with pytest.raises(SettingError, match="other candidates"):
        run_attack("lira", release, others, members, shadow_store=prepared, runtime=CPU)


def test_without_a_release_each_shadow_is_the_victim_once(tmp_path):
    boxes = digits(0, 100, Public, 1 / 3), digits(600, 700, Public, 1 / 3)
    prepared = prepare_shadows(
        shadows_for_method(
            "real-subset", {"images_per_class": 4}, None, *boxes, tmp_path / "shadows", 6, epochs=40
        ),
        CPU,
    )
    found = leave_one_out_attack("lira", prepared, seed=3)
    members = prepared.load_membership()
    scores = lira.lira_leave_one_out(prepared.load_observation("confidence"), members)
    each = [compute_roc(row[own], row[~own]).auc for row, own in zip(scores, members, strict=True)]
    assert found.auc == pytest.approx(np.mean(each))
    assert len(set(each)) > 1
    victim = int(torch.randint(6, (), generator=torch.Generator().manual_seed(3)))
    assert (
        found.operating_points.num_members + found.operating_points.num_nonmembers == 200
    )  # candidates of one victim, not 6 times as many
    level = np.sort(scores[victim, ~members[victim]])[::-1][int(0.1 * (~members[victim]).sum())]
    assert found.operating_points.points[2].tpr == (scores[victim, members[victim]] > level).mean()
    assert found.verdict.status == "no claim"
    assert found.publishable
    with pytest.raises(SettingError, match="Attack a release"):
        leave_one_out_attack("rmia", prepared)
    with pytest.raises(SettingError, match="Synthesize one first"):
        leave_one_out_attack("tracing", prepared)


def test_sides_of_other_class_shares_are_told(private):
    """A release of nobody tells such sides apart, so nothing that it shows is membership."""
    assert tried("nearest-pixels", private, (0, 600)).warning == ""
    images, labels = everyone()
    odd = np.flatnonzero((labels % 2 == 1) | (np.arange(len(labels)) % 3 == 0))
    odd = odd[odd >= 600][:300]
    found = run_attack(
        "nearest-pixels",
        private,
        digits(0, 600),
        Sensitive(images[odd], labels[odd], SPEC),
        runtime=CPU,
    )
    assert "class shares differ" in found.warning
    shifted = Sensitive(np.roll(images[600:1400], 1, -1), labels[600:1400], SPEC)
    assert (
        "separated without the release"
        in run_attack("nearest-pixels", private, digits(0, 600), shifted, runtime=CPU).warning
    )


def test_variety_is_what_two_images_of_a_class_differ():
    images, labels = digits(0, 200)._read_records(slice(None))
    for fade in (1.0, 0.5, 0.0):
        made = Release(Artifact.from_images(fade * images, labels), NONE, SPEC, {})
        assert AttackTarget(made, CPU).measure_diversity(digits(0, 200)) == pytest.approx(fade)
    means = torch.stack([images[labels == each].mean(0) for each in range(10)])
    for wanted in (
        labels,
        torch.arange(10),
    ):  # classes differ, images of a class do not; one alone has nothing to differ from
        assert (
            AttackTarget(
                Release(Artifact.from_images(means[wanted], wanted), NONE, SPEC, {}), CPU
            ).measure_diversity(digits(0, 200))
            < 1e-6
        )
    alone = Release(Artifact.from_images(images, labels), NONE, SPEC, {})
    assert AttackTarget(alone, CPU).measure_diversity(digits(600, 610)) == math.inf


@pytest.mark.parametrize("name", ["gan-leaks-full", "tracing"])
def test_a_generator_that_collapsed_is_told(name):
    """An AUC of chance means little where a generator draws one image of each class."""
    sizes = {"shape": (1, 8, 8), "classes": 10, "latent_dim": 5, "hidden_dim": 64}

    def made(apart):
        """Random drawings, of which codes change more or less."""
        net = initialize_weights(DenseGenerator(**sizes), torch.Generator().manual_seed(0)).eval()
        with torch.no_grad():
            net.layers[0].weight[:, : net.latent_dim] *= apart
            net.layers[-1].weight *= 5
        return Release(Artifact.from_generator("DenseGenerator", sizes, net), NONE, SPEC, {})

    assert "collapsed" in tried(name, made(0.01)).warning
    assert tried(name, made(5.0)).warning == ""


def test_sides_that_look_different_refute_nothing(private):
    """Non-members are negatives: every attack finds the members, and whoever never saw the release does, too."""
    images, labels = everyone()
    negatives = Sensitive(images.max() - images[600:1400], labels[600:1400], SPEC)
    found = run_attack("nearest-pixels", private, digits(0, 600), negatives, runtime=CPU)
    assert found.auc > 0.6  # 0.80 to 0.99, by the noise of the release
    assert found.blind_auc > 0.99
    assert found.verdict.status == "no verdict"
    assert not found.verdict.is_broken
    assert "without access to the release" in found.verdict.summary
    [shown] = found.to_json()["attacks"]
    assert shown["fpr"] == shown["tpr_lower"] == ()
    assert not shown["verdict_refutes_guarantee"]
    fair = run_attack("nearest-pixels", private, digits(0, 600), digits(600, 1400), runtime=CPU)
    scores = MembershipScores(
        np.linspace(1, 2, 600), np.linspace(0, 1, 800)
    )  # what a leak would give
    leaks = build_attack_report("nearest-pixels", fair.control, scores, private, 0.95, 0, False)
    unseen = run_blind_baseline(
        *(box._read_records(slice(None)) for box in (digits(0, 600), digits(600, 1400))), 10
    )
    assert leaks.verdict.is_broken
    assert apply_blind_baseline(
        leaks, unseen, private
    ).verdict.is_broken  # sides are alike: it stands
    apart = BlindScores(
        np.linspace(0.5, 2, 600), np.linspace(0, 1, 800), 0.0
    )  # finds two thirds of the members without the release
    some = MembershipScores(np.linspace(0.6, 2, 600), np.linspace(0, 1, 800))
    for claim, told, status in (
        (0.1, some, "no verdict"),
        (0.1, scores, "broken"),
        (2.0, scores, "no verdict"),
    ):
        tight = replace(
            private,
            guarantee=Guarantee.from_plan(
                Plan((Stage("one", "sum", 4 / claim),), Neighbours.ADD_REMOVE), 1e-5
            ),
        )
        assert (
            apply_blind_baseline(
                build_attack_report("nearest-pixels", fair.control, told, tight, 0.95, 0, False),
                apart,
                tight,
            ).verdict.status
            == status
        )


def test_shadows_have_as_many_owners_as_the_release(tmp_path):
    box = load_dataset("digits", public=True, num_clients=5)
    others = load_dataset("digits", "test", public=True)
    release = Release(
        Artifact.from_images(torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64)),
        NONE,
        box.spec,
        {"method": "real-subset"},
    )
    for shadows in (
        shadows_for_release(release, box, others, tmp_path, 4),
        shadows_for_method("real-subset", {}, None, box, others, tmp_path, 4),
    ):
        assert shadows.dataset.spec.num_clients == 5
        assert shadows.dataset._client_ids is None  # for the gate to deal


def test_what_was_found_survives_json(private):
    found = tried("nearest-pixels", private, (0, 600))
    text = json.loads(json.dumps(found.to_json()))
    assert text["verdict"] == asdict(found.verdict)
    assert text["control"]["summary"] == found.control.summary
    assert math.isclose(text["auc"], found.auc)
