"""Every attack passes its leaky and its null control; with a bug on its way it does not."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.stats import hypergeom
from support.seeding import seed_generator

from privot.attacks.membership import checks, controls, lira, rmia, target
from privot.attacks.membership.candidates import concatenate
from privot.attacks.membership.control_data import NUM_MEMORIZED, load_digit_splits
from privot.attacks.membership.controls import compute_null_p_value, run_controls
from privot.attacks.membership.registry import ATTACKS
from privot.attacks.shadows import observe, train
from privot.attacks.shadows.store import ShadowStore
from privot.audit import compute_roc
from privot.data.dataset import Records
from privot.errors import DataError, PrivotError, SettingError
from privot.release import Release
from privot.release.artifact import Artifact

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSIFIERS = controls.CLASSIFIER_CONTROL
ALONE = [name for name, attack in ATTACKS.items() if "shadows" not in attack.needs]
OF_MODELS = [name for name, attack in ATTACKS.items() if "model" in attack.needs]
OBSERVING = [name for name, attack in ATTACKS.items() if {"model", "shadows"} & {*attack.needs}]
TWO_SIDED = ["lira", "lira-pixels", "lira-features"]


LONG = {*OF_MODELS, "tracing", "gan-leaks-white", "gan-leaks-partial"}


def mark_slow(name, *given):
    return pytest.param(*given, name, marks=[pytest.mark.slow] * (name in LONG))


@pytest.fixture(scope="module", autouse=True)
def trained_once():
    """Classifiers of the same releases: a bug that comes after them costs no training."""
    trained = {}
    real = train.train_on_releases

    def look_up(releases, seeds, spec, epochs, *more):
        key = (*(release.digest for release in releases), *seeds, epochs)
        if key not in trained:
            trained[key] = real(releases, seeds, spec, epochs, *more)
        return trained[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_on_releases", look_up)
        patch.setattr(target, "train_on_releases", look_up)
        yield


def run_healthy(name):
    try:
        return run_controls(name)
    except DataError as error:
        assert "lpips" in ATTACKS[name].needs
        pytest.skip(str(error))


@pytest.mark.parametrize("name", [mark_slow(name) for name in ATTACKS])
def test_the_attack_reaches_its_power_and_finds_nothing_in_nothing(name):
    result = run_healthy(name)
    assert result.passed, result.summary
    assert result.leaky_auc >= result.required_auc >= 0.75
    assert result.null_p_value > 0.01
    assert result.publishable  # digits are public
    assert "the attack works" in result.summary


def test_controls_follow_from_the_seed():
    one = run_controls("gan-leaks-full", 3)
    assert one == run_controls.__wrapped__("gan-leaks-full", 3)
    assert one.leaky_auc != run_controls("gan-leaks-full", 4).leaky_auc
    with pytest.raises(SettingError, match="no attack 'guess'"):
        run_controls("guess")


def find_members(prepared, images):
    """Who is shown by the release of which shadow, blurred as it is: bool [shadows, candidates]."""
    rows = []
    for shadow in range(controls.NUM_CONTROL_SHADOWS):
        shown = prepared.load_release(shadow).artifact.tensors["images"].flatten(1)
        nearest = torch.cdist(shown, images.flatten(1)).argmin(1)
        rows.append(np.isin(np.arange(len(images)), nearest))
    return np.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "what"), [("lira-offline", "confidence"), ("rmia", "loss")])
def test_scores_compare_what_was_prepared(name, what):
    """Power shows little of it: a mean over shadows hardly depends on who was in which."""
    scores = np.concatenate(CLASSIFIERS.score(name, True, 0))
    prepared = controls._prepare_control_shadows(CLASSIFIERS, 0)
    dataset = concatenate(*map(controls._to_public_dataset, CLASSIFIERS.draw_data(0)[:2]))
    own = controls._build_target(CLASSIFIERS, True, 0)._observe(what, dataset)
    theirs = prepared.load_observation(what)
    members = find_members(prepared, dataset.records().images)
    if name == "lira-offline":
        expected = lira.lira(own, theirs, members, offline=True)
    else:  # a fifth of the others is its population
        half = NUM_MEMORIZED // 2
        order = torch.randperm(half, generator=seed_generator()).numpy()
        aside = half + order[:5]
        population = (own[aside], theirs[:, aside], members[:, aside])
        expected = np.delete(rmia.rmia(own, theirs, members, *population), aside)
    np.testing.assert_allclose(scores, expected)


# Planted bugs, on the way that releases and controls go alike: each is a function of a patch


def rerun_preparation(patch):
    """Targets are built and shadows are prepared again, with the bug."""
    for name in ("_build_target", "_prepare_control_shadows"):
        patch.setattr(controls, name, cache(getattr(controls, name).__wrapped__))


def shift_classes(patch):
    patch.setattr(target, "Records", lambda images, labels: Records(images, (labels + 1) % 10))


def roll_candidates(patch):
    def roll(*parts):
        return Records(*(part.roll(len(part) // 4, 0) for part in parts))

    patch.setattr(target, "Records", roll)


def permute_observations(*modules):
    def permute(*given):
        values = observe.observe(*given)
        rng = np.random.default_rng
        return {what: rng(0).permutation(rows, 1) for what, rows in values.items()}

    def plant(patch):
        rerun_preparation(patch)
        for module in modules:
            patch.setattr(module, "observe", permute)

    return plant


def ask_for_labels(change):
    real = observe.logit_scaled_confidence

    def plant(patch):
        rerun_preparation(patch)
        patch.setattr(
            observe, "logit_scaled_confidence", lambda logits, labels: real(logits, change(labels))
        )

    return plant


def change_store(method, change):
    real = getattr(ShadowStore, method)
    return lambda patch: patch.setattr(
        ShadowStore, method, lambda self, *given: change(real(self, *given))
    )


def change_scores(change):
    def plant(patch):
        for name in ("nearest-pixels", "gan-leaks-full", "lira-pixels"):
            attack = ATTACKS[name]

            def wrong(*given, real=attack.function, **more):
                return change(real(*given, **more))

            patch.setitem(ATTACKS, name, attack._replace(function=wrong))

    return plant


BLIND = ["nearest-pixels", "gan-leaks-full", "lira-pixels"]
ORDERED = ["loss", "nearest-pixels", "nearest-features", "real-start", "gan-leaks-full"]
SHIFTED = [name for name in ALONE if name not in ("nearest-lpips", "gan-leaks-partial")]  # long
# Other attacks than TWO_SIDED take nearly the same mean over shadows, whoever was in which.
BUGS = {
    "labels of the next class": (shift_classes, SHIFTED),
    "candidates in another order": (roll_candidates, ORDERED),
    "observations of the victim permuted": (permute_observations(target), OBSERVING),
    "observations of all permuted": (permute_observations(target, train), OBSERVING),
    "observations of shadows permuted": (permute_observations(train), TWO_SIDED),
    "asked for the next class": (ask_for_labels(lambda labels: (labels + 1) % 10), OF_MODELS),
    "asked for the next record": (ask_for_labels(lambda labels: labels.roll(1)), OF_MODELS),
    "members inverted": (change_store("load_membership", np.logical_not), TWO_SIDED),
    "members of the next candidate": (
        change_store("load_membership", lambda members: np.roll(members, 1, 1)),
        TWO_SIDED,
    ),
    "members of the next shadow": (
        change_store("load_membership", lambda members: np.roll(members, 1, 0)),
        TWO_SIDED,
    ),
    "observations of the next shadow": (
        change_store("load_observation", lambda values: np.roll(values, 1, 0)),
        TWO_SIDED,
    ),
    "blind": (change_scores(lambda s: np.random.default_rng(0).normal(size=len(s))), BLIND),
    "upside down": (change_scores(np.negative), BLIND),
    "members first": (change_scores(lambda scores: np.arange(len(scores))[::-1]), BLIND),
}


@pytest.mark.parametrize(
    ("bug", "name"), [mark_slow(name, bug) for bug, (_, names) in BUGS.items() for name in names]
)
def test_an_attack_with_a_planted_bug_fails_its_controls(bug, name, monkeypatch):
    run_healthy(name)
    BUGS[bug][0](monkeypatch)
    result = run_controls.__wrapped__(name)
    assert not result.passed, result.summary
    assert "DO NOT TRUST" in result.summary


@pytest.mark.slow
def test_training_on_shifted_labels_is_seen(monkeypatch):
    rerun_preparation(monkeypatch)

    def shift(release):
        tensors = release.artifact.tensors
        artifact = Artifact.from_images(tensors["images"], (tensors["labels"] + 1) % 10)
        return Release(artifact, release.guarantee, release.spec, release.metadata)

    real = target.train_on_releases
    monkeypatch.setattr(
        target,
        "train_on_releases",
        lambda releases, *given: real(list(map(shift, releases)), *given),
    )
    assert compute_roc(*CLASSIFIERS.score("loss", True, 0)).auc < 0.5


@pytest.mark.parametrize("name", [mark_slow(name) for name in ("lira", "rmia", "lira-pixels")])
def test_exchanged_sides_are_seen(name, monkeypatch):
    run_healthy(name)
    real = target.concatenate
    monkeypatch.setattr(target, "concatenate", lambda members, others: real(others, members))
    with pytest.raises(SettingError, match="other candidates"):
        run_controls.__wrapped__(name)


def test_with_a_bug_nothing_is_attacked(monkeypatch):
    monkeypatch.setattr(checks, "run_controls", run_controls.__wrapped__)
    shift_classes(monkeypatch)
    release = controls._build_target(controls.CONTROLS["nearest-pixels"][0], True, 0).release
    with pytest.raises(PrivotError, match="does not pass its controls"):
        checks.check_attack("nearest-pixels", release)


# The p-value and the registry


def test_the_p_value_is_exact_and_ties_are_worth_nothing():
    # All ways to choose 4 members of 8 are equally likely, so P(p <= t) = t for every value of p.
    scores = 8.0 * np.arange(8)
    p_values = np.array(
        [
            compute_null_p_value(scores[[*members]], np.delete(scores, members))
            for members in combinations(range(8), 4)
        ]
    )
    for right in range(5):
        level = hypergeom.sf(right - 1, 8, 4, 4)
        assert np.mean(p_values <= level + 1e-12) == pytest.approx(level)
    assert compute_null_p_value(np.zeros(100), np.zeros(100)) > 0.01
    assert compute_null_p_value(np.ones(100), np.zeros(100)) < 1e-20


def test_the_registry_separates_attacks_of_one_function():
    assert set(ATTACKS) == set(controls.CONTROLS)
    (images, _), (others, _), _ = load_digit_splits(0)
    names = ("nearest-pixels", "nearest-features")
    one, two = (ATTACKS[name].function(images[:5], others) for name in names)
    assert not np.allclose(one, two)
    values = np.array([[1.0], [1.2], [3.0], [3.2]])
    members = np.array([[False], [False], [True], [True]])
    online, offline = (
        ATTACKS[name].function(np.array([9.0]), values, members)
        for name in ("lira", "lira-offline")
    )
    assert offline[0] == pytest.approx((9 - 1.1) / np.std([1, 1.2], ddof=1))
    assert online[0] != offline[0]
