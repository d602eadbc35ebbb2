"""Every attack has a leaky and a null control, passes both, and one with a bug anywhere on its way from release to scores does not."""

from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import hypergeom

from privot.attacks.membership import checks, controls, lira, rmia, target
from privot.attacks.membership.candidates import concatenate
from privot.attacks.membership.control_data import NUM_MEMORIZED, load_digit_splits
from privot.attacks.membership.controls import (
    CLASSIFIER_CONTROL,
    CONTROLS,
    compute_null_p_value,
    run_controls,
)
from privot.attacks.membership.registry import ATTACKS
from privot.attacks.shadows import observe, train
from privot.attacks.shadows.store import ShadowStore
from privot.audit import compute_roc
from privot.data.dataset import Records
from privot.errors import DataError, PrivotError, SettingError
from privot.release import Release
from privot.release.artifact import Artifact

pytestmark = pytest.mark.usefixtures("one_thread")
ALONE = [name for name, attack in ATTACKS.items() if "shadows" not in attack.needs]
OF_MODELS = [name for name, attack in ATTACKS.items() if "model" in attack.needs]
TWO_SIDED = ["lira", "lira-pixels", "lira-features"]


@pytest.fixture(scope="module", autouse=True)
def trained_once():
    """Classifiers of the same releases: a bug that comes after them costs no training."""
    known = {}
    real = train.train_on_releases

    def victims(releases, seeds, spec, epochs, *more):
        key = (*(each.digest for each in releases), *seeds, epochs)
        if key not in known:
            known[key] = real(releases, seeds, spec, epochs, *more)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_on_releases", victims)
        patch.setattr(target, "train_on_releases", victims)
        yield


def healthy(name):
    try:
        return run_controls(name)
    except DataError as error:
        assert "lpips" in ATTACKS[name].needs
        pytest.skip(str(error))


def test_every_attack_has_a_control():
    assert set(ATTACKS) == set(CONTROLS)


@pytest.mark.parametrize("name", ATTACKS)
def test_the_attack_reaches_its_power_and_finds_nothing_in_nothing(name):
    found = healthy(name)
    assert found.passed, found.summary
    assert found.leaky_auc >= found.required_auc >= 0.75
    assert found.null_p_value > 0.01
    assert found.publishable  # digits are public
    assert "the attack works" in found.summary
    print(found.summary)


def test_controls_are_by_the_seed():
    assert run_controls.__wrapped__("gan-leaks-full", 3) == run_controls("gan-leaks-full", 3)
    assert (
        run_controls("gan-leaks-full", 3).leaky_auc != run_controls("gan-leaks-full", 4).leaky_auc
    )


def held(prepared, images):
    """Who is shown by the release of which shadow, blurred as it is: bool [shadows, candidates]."""
    shown = [
        prepared.load_release(each).artifact.tensors["images"].flatten(1)
        for each in range(controls.NUM_CONTROL_SHADOWS)
    ]
    return np.stack(
        [
            np.isin(np.arange(len(images)), torch.cdist(each, images.flatten(1)).argmin(1))
            for each in shown
        ]
    )


@pytest.mark.parametrize("name", ["lira-offline", "rmia"])
def test_what_is_compared_is_what_was_prepared(name):
    """Their power tells little of that: each takes much the same mean over shadows, whoever was in which."""
    found = CLASSIFIER_CONTROL.score(name, True, 0)
    half = NUM_MEMORIZED // 2
    prepared = controls._prepare_control_shadows(CLASSIFIER_CONTROL, 0)
    own = controls._build_target(CLASSIFIER_CONTROL, True, 0)
    box = concatenate(*map(controls._to_public_dataset, CLASSIFIER_CONTROL.draw_data(0)[:2]))
    what = "confidence" if name == "lira-offline" else "loss"
    seen = own._observe(what, box)
    theirs = prepared.load_observation(what)
    members = held(prepared, box.records().images)
    if name == "lira-offline":
        wanted = lira.lira(seen, theirs, members, offline=True)
    else:
        aside = (
            half + torch.randperm(half, generator=torch.Generator().manual_seed(0))[:5].numpy()
        )  # a fifth of the others
        wanted = np.delete(
            rmia.rmia(seen, theirs, members, seen[aside], theirs[:, aside], members[:, aside]),
            aside,
        )
    np.testing.assert_allclose(np.concatenate(found), wanted)


# Planted bugs, each on the way that releases and controls go alike


@pytest.fixture
def anew(monkeypatch):
    """Releases are held and shadows are prepared again, with the bug."""
    for name in ("_build_target", "_prepare_control_shadows"):
        monkeypatch.setattr(controls, name, cache(getattr(controls, name).__wrapped__))


def refused(name):
    """Does not pass its controls with the bug."""
    found = run_controls.__wrapped__(name)
    assert not found.passed, found.summary
    assert "DO NOT TRUST" in found.summary


@pytest.mark.parametrize(
    "name", [each for each in ALONE if each not in ("nearest-lpips", "gan-leaks-partial")]
)  # long, and as others
def test_labels_of_the_next_class_are_seen(name, monkeypatch):
    healthy(name)
    monkeypatch.setattr(
        target, "Records", lambda images, labels: Records(images, (labels + 1) % 10)
    )
    refused(name)


@pytest.mark.parametrize(
    "name", ["loss", "nearest-pixels", "nearest-features", "real-start", "gan-leaks-full"]
)
def test_candidates_in_another_order_are_seen(name, monkeypatch):
    healthy(name)
    monkeypatch.setattr(
        target, "Records", lambda *both: Records(*(each.roll(len(each) // 4, 0) for each in both))
    )
    refused(name)


VICTIM = (target,)
SHADOWS = (train,)
ALL = (target, train)
OBSERVED = [
    (name, where)
    for name in ATTACKS
    if {"model", "shadows"} & {*ATTACKS[name].needs}
    for where in (VICTIM, ALL)
]


@pytest.mark.parametrize(("name", "where"), [*OBSERVED, *((name, SHADOWS) for name in TWO_SIDED)])
def test_observations_in_another_order_are_seen(name, where, monkeypatch, anew):
    def mixed(*given):
        return {
            what: np.random.default_rng(0).permutation(each, 1)
            for what, each in observe.observe(*given).items()
        }

    for each in where:
        monkeypatch.setattr(each, "observe", mixed)
    refused(name)


@pytest.mark.parametrize(
    "wrong",
    [lambda labels: (labels + 1) % 10, lambda labels: labels.roll(1)],
    ids=["next class", "next record"],
)
@pytest.mark.parametrize("name", OF_MODELS)
def test_answers_to_shifted_labels_are_seen(name, wrong, monkeypatch, anew):
    real = observe.logit_scaled_confidence
    monkeypatch.setattr(
        observe, "logit_scaled_confidence", lambda logits, labels: real(logits, wrong(labels))
    )
    refused(name)


def test_lessons_in_shifted_labels_are_seen(monkeypatch, anew):
    def shifted(release):
        images = release.artifact.tensors["images"]
        labels = release.artifact.tensors["labels"]
        return Release(
            Artifact.from_images(images, (labels + 1) % 10),
            release.guarantee,
            release.spec,
            release.metadata,
        )

    real = target.train_on_releases
    monkeypatch.setattr(
        target,
        "train_on_releases",
        lambda releases, *given: real([shifted(each) for each in releases], *given),
    )
    assert compute_roc(*CLASSIFIER_CONTROL.score("loss", True, 0)).auc < 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        lambda members: ~members,
        lambda members: np.roll(members, 1, 1),
        lambda members: np.roll(members, 1, 0),
    ],
    ids=["inverted", "of the next candidate", "of the next shadow"],
)
@pytest.mark.parametrize(
    "name", TWO_SIDED
)  # the others take nearly the same mean over shadows, whoever was in which
def test_members_of_other_shadows_are_seen(name, wrong, monkeypatch):
    healthy(name)
    real = ShadowStore.load_membership
    monkeypatch.setattr(ShadowStore, "load_membership", lambda self: wrong(real(self)))
    refused(name)


@pytest.mark.parametrize("name", TWO_SIDED)
def test_observations_of_other_shadows_are_seen(name, monkeypatch):
    healthy(name)
    real = ShadowStore.load_observation
    monkeypatch.setattr(
        ShadowStore, "load_observation", lambda self, what: np.roll(real(self, what), 1, 0)
    )
    refused(name)


@pytest.mark.parametrize("name", ["lira", "rmia", "lira-pixels"])
def test_sides_that_changed_places_are_seen(name, monkeypatch):
    healthy(name)
    real = target.concatenate
    monkeypatch.setattr(target, "concatenate", lambda members, others: real(others, members))
    with pytest.raises(SettingError, match="other candidates"):
        run_controls.__wrapped__(name)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda scores: np.random.default_rng(0).normal(size=len(scores)),
        lambda scores: -scores,
        lambda scores: np.arange(len(scores))[::-1],  # members come first
    ],
    ids=["blind", "upside down", "told the answer"],
)
@pytest.mark.parametrize("name", ["nearest-pixels", "gan-leaks-full", "lira-pixels"])
def test_an_attack_that_is_wrong_in_itself_is_seen(name, wrong, monkeypatch):
    healthy(name)
    attack = ATTACKS[name]
    monkeypatch.setitem(
        ATTACKS,
        name,
        attack._replace(function=lambda *given, **more: wrong(attack.function(*given, **more))),
    )
    refused(name)


def test_with_a_bug_nothing_is_attacked(monkeypatch):
    monkeypatch.setattr(checks, "run_controls", run_controls.__wrapped__)
    monkeypatch.setattr(
        target, "Records", lambda images, labels: Records(images, (labels + 1) % 10)
    )
    with pytest.raises(PrivotError, match="does not pass its controls"):
        checks.check_attack(
            "nearest-pixels", controls._build_target(CONTROLS["nearest-pixels"][0], True, 0).release
        )


# The p-value


def test_the_p_value_is_exact():
    # All ways to choose 4 members of 8 are equally likely: P(p <= t) <= t for each value t that p takes, with equality.
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(4000):
        order = rng.permutation(8.0 * np.arange(8))
        seen.append(compute_null_p_value(order[:4], order[4:]))
    for right in range(5):
        level = hypergeom.sf(right - 1, 8, 4, 4)
        assert np.mean(np.array(seen) <= level + 1e-12) == pytest.approx(level, abs=0.03)


def test_ties_are_worth_nothing():
    assert compute_null_p_value(np.zeros(100), np.zeros(100)) > 0.01
    assert compute_null_p_value(np.ones(100), np.zeros(100)) < 1e-20


def test_an_unknown_attack_is_refused():
    with pytest.raises(SettingError, match="no attack 'guess'"):
        run_controls("guess")


def test_the_register_tells_attacks_of_one_function_apart():
    (images, _), (others, _), _ = load_digit_splits(0)
    one, two = (
        ATTACKS[name].function(images[:5], others)
        for name in ("nearest-pixels", "nearest-features")
    )
    assert not np.allclose(one, two)
    seen = np.array([[1.0], [1.2], [3.0], [3.2]])
    members = np.array([[False], [False], [True], [True]])
    online, offline = (
        ATTACKS[name].function(np.array([9.0]), seen, members) for name in ("lira", "lira-offline")
    )
    assert offline[0] == pytest.approx((9 - 1.1) / np.std([1, 1.2], ddof=1))
    assert online[0] != offline[0]
