"""One attack on one release: members of what leaks are found, a certificate that is true stands, one that is false is called so."""

import json
import math
from dataclasses import asdict, replace
from functools import cache

import numpy as np
import pytest
import torch

from privot.attacks.membership import lira, runner, target
from privot.attacks.membership.blind_baseline import Unseen, blind
from privot.attacks.membership.controls import Power
from privot.attacks.membership.registry import ATTACKS
from privot.attacks.membership.runner import (
    attempt,
    beside,
    compared,
    concluded,
    left_out,
    shadows_of,
)
from privot.attacks.membership.target import Scores, Target, together
from privot.audit import roc
from privot.audit.result import Attack
from privot.data import load
from privot.data.dataset import Public, Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotError, SettingError
from privot.nets import DenseGenerator, initialise
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.release import Guarantee, NoGuarantee, Release
from privot.release.artifact import Product
from privot.runtime import Runtime
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = Runtime("cpu")
SPEC = Spec((1, 8, 8), 10)
NONE = NoGuarantee("these are real records")
TINY = {"per_class": 2, "nets": 4, "trained": 2, "width": 4, "steps": 4, "lessons": 1}


@cache
def everyone():
    images, labels = (each.numpy() for each in load("digits", public=True).records())
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
    images, labels = box._take(slice(None))
    return Release(
        Product.set(images, labels), guarantee or NoGuarantee("these are real records"), SPEC, facts
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
    return attempt(
        name, release, digits(*members, kind), digits(*others, kind), runtime=CPU, **more
    )


@pytest.mark.parametrize(
    ("name", "auc"),
    [("nearest-pixels", 0.99), ("nearest-features", 0.99), ("real-start", 0.99), ("tracing", 0.65)],
)
def test_those_who_are_published_are_found_and_nobody_in_a_private_set(name, auc, private):
    found = tried(name, published(digits(0, 100)))
    assert found.auc > auc
    assert found.power.passed
    assert found.verdict.status == "no claim"
    assert found.verdict.proved > (0.8 if name != "tracing" else 0)
    held = tried(name, private, (0, 600))
    assert held.verdict.status == "holds"
    assert held.verdict.claimed == pytest.approx(
        private.guarantee.max_tpr[held.verdict.wall.split()[-1]]
    )
    assert not held.verdict.blind  # so many others would have seen more
    assert abs(held.auc - 0.5) < 0.1
    assert (
        Attack.from_json(json.loads(json.dumps(held.to_json()))["attacks"][0]).name
        == ATTACKS[name].title
    )


def test_report_and_verdict_look_at_the_same_points(private):
    """Two tests of one set of scores at 95 % each would accuse one honest release in ten."""
    found = tried("nearest-pixels", private, (0, 600))
    shown = Attack.from_json(json.loads(json.dumps(found.to_json()))["attacks"][0])
    assert shown.fpr == runner.RATES
    assert shown.lower == tuple(each.lowest_tpr for each in found.judged.points)
    assert all(each.highest_fpr <= each.level for each in found.judged.points)
    unclaimed = tried("nearest-pixels", published(digits(0, 100)))
    assert unclaimed.judged == unclaimed.points


def test_what_is_near_references_too_says_nothing():
    """Faint images are near all that is released, whoever was a member."""
    images, labels = everyone()
    images = images * np.random.default_rng(0).uniform(0.2, 1, (len(images), 1, 1, 1)).astype(
        np.float32
    )

    def made(begin, end, fade=1.0):
        return Release(
            Product.set(
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
        attempt("nearest-pixels", spoiled, *sides, references=each, runtime=CPU)
        for each in ((), others)
    )
    assert better.auc > plain.auc + 0.02
    assert better.title == "nearest released image in pixels, calibrated by 2 of other records"
    with pytest.raises(SettingError, match="another release"):
        tried("nearest-pixels", spoiled, references=[spoiled])
    with pytest.raises(SettingError, match="needs none"):
        tried("tracing", spoiled, references=others)


def test_some_of_the_candidates_are_enough():
    found = tried("nearest-pixels", published(digits(0, 100)), candidates=50)
    assert (found.points.members, found.points.others) == (50, 50)
    assert found.auc > 0.99
    assert tried("nearest-pixels", published(digits(0, 100)), candidates=10**6).points.others == 400


def test_the_loss_of_what_was_learned_by_heart():
    members = digits(0, 60, wrong=2 / 3)
    others = digits(600, 800, wrong=2 / 3)
    found = attempt("loss", published(members), members, others, epochs=120, runtime=CPU)
    assert found.auc > 0.7
    assert found.advantage.value > 0.3
    assert found.points.others == 200
    nothing = attempt(
        "loss", published(digits(1000, 1060, wrong=2 / 3)), members, others, epochs=120, runtime=CPU
    )
    assert abs(nothing.auc - 0.5) < 0.1


def test_a_false_certificate_is_broken():
    cost = Plan((Stage("all", "sum", 37.0),), Neighbours.ADD_REMOVE)
    claim = Guarantee.of(cost, 1e-5)
    assert claim.epsilon < 0.1
    found = tried("nearest-pixels", published(digits(0, 100), claim))
    assert found.verdict.broken
    assert "the claim is broken" in found.verdict.sentence
    honest = tried("nearest-pixels", published(digits(1000, 1100), claim))  # of nobody here
    assert honest.verdict.status == "holds"
    few = tried(
        "nearest-pixels", published(digits(0, 100), claim), others=(600, 630)
    )  # too few to know a rate of 0.1
    assert few.verdict.blind


def test_members_and_others_are_scored_about_one_mean():
    """Each side about a mean of its own would tell 20 records, two of a class, from 600 wherever nobody is."""
    images, labels = load("digits", public=True).records()
    of_nobody = published(digits(1200, 1300))
    aucs = []
    for turn in range(8):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(turn))
        places = torch.cat([order[labels[:1000][order] == label][:2] for label in range(10)])
        rest = order[~torch.isin(order, places)][:600]
        boxes = [
            Sensitive(images[each].numpy(), labels[each].numpy(), SPEC) for each in (rest, places)
        ]
        aucs.append(attempt("real-start", of_nobody, *boxes, runtime=CPU).auc)
    assert abs(np.mean(aucs) - 0.5) < 0.08  # 0.19 with two means


def test_scores_go_to_the_side_they_belong_to():
    """Others that are in the release are found, members that are not stay below."""
    found = tried("nearest-pixels", published(digits(600, 1000)))
    assert found.auc < 0.01


def test_a_population_of_ones_own_leaves_all_others_to_judge():
    leaky = published(digits(0, 100))
    aside = tried("tracing", leaky)
    assert aside.points.others == 320  # a fifth is set aside
    own = tried("tracing", leaky, kind=Public, population=digits(1000, 1400))
    assert own.points.others == 400
    assert own.auc > 0.8
    assert not own.publishable  # the population is not public


def test_what_may_be_published():
    leaky = published(digits(0, 100))
    for kind, public in ((Sensitive, False), (Public, True)):
        found = tried("nearest-pixels", leaky, kind=kind)
        assert {
            found.publishable,
            found.points.publishable,
            found.advantage.publishable,
            found.verdict.publishable,
        } == {public}
        assert found.to_json()["attacks"][0]["publishable"] is public
    mixed = attempt("nearest-pixels", leaky, digits(0, 100, Public), digits(600, 1000), runtime=CPU)
    assert not mixed.publishable


def test_an_attack_that_fails_its_controls_is_not_tried(monkeypatch):
    broken = Power("nearest-pixels", 0.5, 0.5, 0.5, 0.99, False, "it does not work")
    monkeypatch.setattr(runner, "power", lambda name: broken)
    monkeypatch.setattr(runner, "Target", lambda *_, **__: pytest.fail("it was tried"))
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
            attempt(*given)
    with pytest.raises(SettingError, match="needs none"):
        tried("nearest-pixels", leaky, population=digits(1000, 1100))
    with pytest.raises(SettingError, match="the population share"):
        tried("tracing", leaky, population=digits(50, 250))
    with pytest.raises(SettingError, match="non-members and the population share"):
        tried("tracing", leaky, population=digits(900, 1300))
    with pytest.raises(SettingError, match="same classes"):
        together(digits(0, 10), digits(20, 30, spec=replace(SPEC, classes=11)))
    with pytest.raises(SettingError, match="does not say which method"):
        shadows_of(leaky, digits(0, 10), digits(20, 30), tmp_path, 2)


def test_bytes_and_numbers_come_together():
    box = digits(0, 30)
    coarse = Sensitive((box._images * 255).round().astype(np.uint8), box._labels, SPEC)
    both = together(coarse, digits(30, 60))
    assert both._take(slice(None)).images.numpy() == pytest.approx(
        np.concatenate([box._images, digits(30, 60)._images]), abs=1 / 255
    )
    assert both._count() == both.spec.size == 60
    assert together(coarse, coarse)._images.dtype == np.uint8
    assert isinstance(both, Sensitive)
    assert isinstance(together(digits(0, 5, Public), digits(5, 9, Public)), Public)


# With shadows


@pytest.fixture(scope="module")
def against(tmp_path_factory):
    """A release that repeats its 100 members, and shadows that repeat 40 of theirs."""
    members, others = (digits(*each, wrong=2 / 3) for each in ((0, 100), (600, 700)))
    folder = tmp_path_factory.mktemp("shadows")
    release = published(members, method="real-subset", settings={"per_class": 4})
    prepared = shadows_of(release, members, others, folder / "here", 8, epochs=80).prepare(CPU)
    return release, members, others, prepared


def test_shadows_are_as_the_release(against, private, tmp_path):
    _, members, others, prepared = against
    assert prepared.plan["method"] == "real-subset"
    assert prepared.plan["settings"]["per_class"] == 4
    assert prepared.plan["candidates"]["size"] == 200
    assert not prepared.publishable
    of_private = shadows_of(private, members, others, tmp_path, 2)
    assert of_private.epsilon == pytest.approx(1.0, rel=1e-6)
    assert of_private.settings["nets"] == 4
    loud = Release(
        private.product,
        NoGuarantee("no noise was added: the budget was infinite"),
        SPEC,
        private.facts,
    )
    assert shadows_of(loud, members, others, tmp_path, 2).plan()["epsilon"] == "inf"
    fixed = Release(
        private.product,
        private.guarantee,
        SPEC,
        {**private.facts, "settings": {**private.facts["settings"], "noise": 3.0}},
    )
    assert shadows_of(fixed, members, others, tmp_path, 2).epsilon is None


@pytest.mark.parametrize(
    ("name", "others"), [("lira", 100), ("lira-offline", 100), ("rmia", 80)]
)  # of 100, 20 are rmia's population
def test_an_attack_with_shadows(against, name, others):
    release, members, unseen, prepared = against
    found = attempt(name, release, members, unseen, prepared=prepared, runtime=CPU)
    assert found.auc > 0.65
    assert (found.points.members, found.points.others) == (100, others)
    assert not found.publishable
    with pytest.raises(SettingError, match=r"population: .*; leave it out"):
        attempt(name, release, members, unseen, prepared=prepared, population=digits(1000, 1100))


def test_the_victim_learns_as_its_shadows_do(against, monkeypatch):
    """Whatever else is said: comparing unlike classifiers compares nothing."""
    release, members, others, prepared = against
    seen = []
    real = target.victims
    monkeypatch.setattr(target, "victims", lambda *given: seen.append(given[3]) or real(*given))
    attempt("lira", release, members, others, prepared=prepared, epochs=5, runtime=CPU)
    assert seen == [80]


def test_shadows_of_other_candidates_are_refused(against):
    release, members, others, prepared = against
    for strange in (digits(700, 800, wrong=2 / 3), digits(700, 750)):  # as many, and fewer
        with pytest.raises(SettingError, match="other candidates"):
            attempt("lira", release, members, strange, prepared=prepared, runtime=CPU)
    with pytest.raises(SettingError, match="other candidates"):
        attempt("lira", release, others, members, prepared=prepared, runtime=CPU)


def test_without_a_release_each_shadow_is_the_victim_once(tmp_path):
    boxes = digits(0, 100, Public, 1 / 3), digits(600, 700, Public, 1 / 3)
    prepared = compared(
        "real-subset", {"per_class": 4}, None, *boxes, tmp_path / "shadows", 6, epochs=40
    ).prepare(CPU)
    found = left_out("lira", prepared, seed=3)
    members = prepared.members()
    scores = lira.leave_one_out(prepared.observed("confidence"), members)
    each = [roc(row[own], row[~own]).auc for row, own in zip(scores, members, strict=True)]
    assert found.auc == pytest.approx(np.mean(each))
    assert len(set(each)) > 1
    victim = int(torch.randint(6, (), generator=torch.Generator().manual_seed(3)))
    assert (
        found.points.members + found.points.others == 200
    )  # candidates of one victim, not 6 times as many
    level = np.sort(scores[victim, ~members[victim]])[::-1][int(0.1 * (~members[victim]).sum())]
    assert found.points.points[2].tpr == (scores[victim, members[victim]] > level).mean()
    assert found.verdict.status == "no claim"
    assert found.publishable
    with pytest.raises(SettingError, match="attack a release"):
        left_out("rmia", prepared)
    with pytest.raises(SettingError, match="make one first"):
        left_out("tracing", prepared)


def test_sides_of_other_class_shares_are_told(private):
    """A release of nobody tells such sides apart, so nothing that it shows is membership."""
    assert tried("nearest-pixels", private, (0, 600)).caution == ""
    images, labels = everyone()
    odd = np.flatnonzero((labels % 2 == 1) | (np.arange(len(labels)) % 3 == 0))
    odd = odd[odd >= 600][:300]
    found = attempt(
        "nearest-pixels",
        private,
        digits(0, 600),
        Sensitive(images[odd], labels[odd], SPEC),
        runtime=CPU,
    )
    assert "class shares differ" in found.caution
    shifted = Sensitive(np.roll(images[600:1400], 1, -1), labels[600:1400], SPEC)
    assert (
        "told apart without the release"
        in attempt("nearest-pixels", private, digits(0, 600), shifted, runtime=CPU).caution
    )


def test_variety_is_what_two_images_of_a_class_differ():
    images, labels = digits(0, 200)._take(slice(None))
    for fade in (1.0, 0.5, 0.0):
        made = Release(Product.set(fade * images, labels), NONE, SPEC, {})
        assert Target(made, CPU).variety(digits(0, 200)) == pytest.approx(fade)
    means = torch.stack([images[labels == each].mean(0) for each in range(10)])
    for wanted in (
        labels,
        torch.arange(10),
    ):  # classes differ, images of a class do not; one alone has nothing to differ from
        assert (
            Target(Release(Product.set(means[wanted], wanted), NONE, SPEC, {}), CPU).variety(
                digits(0, 200)
            )
            < 1e-6
        )
    alone = Release(Product.set(images, labels), NONE, SPEC, {})
    assert Target(alone, CPU).variety(digits(600, 610)) == math.inf


@pytest.mark.parametrize("name", ["gan-leaks-full", "tracing"])
def test_a_generator_that_collapsed_is_told(name):
    """An AUC of chance means little where a generator draws one image of each class."""
    sizes = {"shape": (1, 8, 8), "classes": 10, "code": 5, "hidden": 64}

    def made(apart):
        """Random drawings, of which codes change more or less."""
        net = initialise(DenseGenerator(**sizes), torch.Generator().manual_seed(0)).eval()
        with torch.no_grad():
            net.layers[0].weight[:, : net.code] *= apart
            net.layers[-1].weight *= 5
        return Release(Product.generator("DenseGenerator", sizes, net), NONE, SPEC, {})

    assert "collapsed" in tried(name, made(0.01)).caution
    assert tried(name, made(5.0)).caution == ""


def test_sides_that_look_different_refute_nothing(private):
    """Non-members are negatives: every attack finds the members, and whoever never saw the release does, too."""
    images, labels = everyone()
    negatives = Sensitive(images.max() - images[600:1400], labels[600:1400], SPEC)
    found = attempt("nearest-pixels", private, digits(0, 600), negatives, runtime=CPU)
    assert found.auc > 0.6  # 0.80 to 0.99, by the noise of the release
    assert found.blind > 0.99
    assert found.verdict.status == "no verdict"
    assert not found.verdict.broken
    assert "who never saw the release" in found.verdict.sentence
    [shown] = found.to_json()["attacks"]
    assert shown["fpr"] == shown["lower"] == ()
    assert not shown["refuted"]
    fair = attempt("nearest-pixels", private, digits(0, 600), digits(600, 1400), runtime=CPU)
    scores = Scores(np.linspace(1, 2, 600), np.linspace(0, 1, 800))  # what a leak would give
    leaks = concluded("nearest-pixels", fair.power, scores, private, 0.95, 0, False)
    unseen = blind(*(box._take(slice(None)) for box in (digits(0, 600), digits(600, 1400))), 10)
    assert leaks.verdict.broken
    assert beside(leaks, unseen, private).verdict.broken  # sides are alike: it stands
    apart = Unseen(
        np.linspace(0.5, 2, 600), np.linspace(0, 1, 800), 0.0
    )  # finds two thirds of the members without the release
    some = Scores(np.linspace(0.6, 2, 600), np.linspace(0, 1, 800))
    for claim, told, status in (
        (0.1, some, "no verdict"),
        (0.1, scores, "broken"),
        (2.0, scores, "no verdict"),
    ):
        tight = replace(
            private,
            guarantee=Guarantee.of(
                Plan((Stage("one", "sum", 4 / claim),), Neighbours.ADD_REMOVE), 1e-5
            ),
        )
        assert (
            beside(
                concluded("nearest-pixels", fair.power, told, tight, 0.95, 0, False), apart, tight
            ).verdict.status
            == status
        )


def test_shadows_have_as_many_owners_as_the_release(tmp_path):
    box = load("digits", public=True, owners=5)
    others = load("digits", "test", public=True)
    release = Release(
        Product.set(torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64)),
        NONE,
        box.spec,
        {"method": "real-subset"},
    )
    for shadows in (
        shadows_of(release, box, others, tmp_path, 4),
        compared("real-subset", {}, None, box, others, tmp_path, 4),
    ):
        assert shadows.box.spec.owners == 5
        assert shadows.box._owners is None  # for the gate to deal


def test_what_was_found_survives_json(private):
    found = tried("nearest-pixels", private, (0, 600))
    text = json.loads(json.dumps(found.to_json()))
    assert text["verdict"] == asdict(found.verdict)
    assert text["power"]["sentence"] == found.power.sentence
    assert math.isclose(text["auc"], found.auc)
