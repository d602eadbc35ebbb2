"""Controls: an attack must find members in a release that leaks, and nothing in one that cannot.

An AUC of 0.52 may mean a private release or a broken attack. So every attack first runs on a
*leaky* control, where it must reach its required AUC, and on a *null* control, where it must not
beat chance at 99 % confidence (one seed in a hundred does so by chance). A control is a release: of
the members, or of records that are no candidates. It is attacked by the same code as any other
release (`AttackTarget`). Both are made of the embedded digits, a public data set, in seconds and
deterministically by a seed.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy.stats import hypergeom

from privot.attacks.membership.candidates import concatenate
from privot.attacks.membership.control_data import (
    DIGITS_SPEC,
    ControlData,
    build_blurred_set,
    build_memorizing_artifact,
    build_shifted_set,
    draw_digits,
    draw_mislabeled_digits,
)
from privot.attacks.membership.registry import ATTACKS
from privot.attacks.membership.target import AttackTarget, MembershipScores
from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.runner import prepare_shadows
from privot.attacks.shadows.store import ShadowStore
from privot.audit.roc import compute_roc
from privot.data.dataset import Public, Records
from privot.errors import SettingError
from privot.privacy.guarantee import NoGuarantee
from privot.release import Release
from privot.release.artifact import Artifact
from privot.runtime import Runtime, use_threads

NULL_CONFIDENCE = 0.99
# Shadows and epochs of classifiers that memorize their training set in seconds.
NUM_CONTROL_SHADOWS = 8
CONTROL_EPOCHS = 150
CPU_RUNTIME = Runtime("cpu")


@dataclass(frozen=True)
class ControlResult:
    """Result of the controls of an attack.

    Attributes:
        name: Name of the attack.
        leaky_auc: AUC on the leaky control.
        null_auc: AUC on the null control.
        null_p_value: Probability of so good a result on the null control by chance.
        required_auc: AUC that the leaky control must reach.
        passed: Whether the leaky control reached it and the null control did not beat chance.
        summary: The result as a sentence.
        publishable: Whether the result may be published; controls are public data.
    """

    name: str
    leaky_auc: float
    null_auc: float
    null_p_value: float
    required_auc: float
    passed: bool
    summary: str
    publishable: bool = True


@cache
def run_controls(name: str, seed: int = 0) -> ControlResult:
    """Run both controls of an attack, once in a process.

    Args:
        name: Name of the attack.
        seed: Seed of the controls.

    Returns:
        The result.

    Raises:
        SettingError: If there is no such attack.

    >>> run_controls("nearest-pixels").passed
    True
    """
    if name not in CONTROLS:
        raise SettingError(f"no attack {name!r}. Choose one of {', '.join(CONTROLS)}.")
    control, required_auc = CONTROLS[name]
    with use_threads(1):  # more threads slow such small nets down
        leaky_scores, null_scores = (control.score(name, leaky, seed) for leaky in (True, False))
    leaky_auc = compute_roc(*leaky_scores).auc
    null_auc = compute_roc(*null_scores).auc
    p_value = compute_null_p_value(*null_scores)
    passed = leaky_auc >= required_auc and p_value > 1 - NULL_CONFIDENCE
    summary = (
        f"{name}: AUC {leaky_auc:.3f} on a release that leaks (at least {required_auc:g} is "
        f"required), {null_auc:.3f} on one that cannot leak (by chance with probability "
        f"{p_value:.2g}): {'the attack works' if passed else 'DO NOT TRUST ITS RESULTS'}"
    )
    return ControlResult(name, leaky_auc, null_auc, p_value, required_auc, passed, summary)


def compute_null_p_value(members: np.ndarray, nonmembers: np.ndarray, seed: int = 0) -> float:
    """Compute the exact p-value of "members score higher".

    The upper half of the scores is guessed to be members, so the number of right guesses is
    hypergeometric. Ties are broken at random. No threshold is tuned, and nothing is asymptotic.

    Args:
        members: Scores of members.
        nonmembers: Scores of non-members.
        seed: Seed that breaks ties.

    Returns:
        The p-value.

    >>> compute_null_p_value(np.arange(10.0) + 10, np.arange(10.0)) < 1e-5
    True
    """
    scores = np.concatenate([members, nonmembers])
    count = len(scores)
    rng = np.random.default_rng(seed)
    upper_half = np.lexsort((rng.random(count), -scores))[: count // 2]
    num_correct = (upper_half < len(members)).sum()
    return float(hypergeom.sf(num_correct - 1, count, len(members), count // 2))


@dataclass(frozen=True)
class Control:
    """A leaky release and the candidates that attacks must separate with it.

    Attributes:
        build_artifact: Makes a release of records, by a seed.
        draw_data: Draws the candidates, by a seed.
        epochs: Training epochs of classifiers.
    """

    build_artifact: Callable[[Records, int], Artifact]
    draw_data: Callable[[int], ControlData] = draw_digits
    epochs: int = 1

    def score(self, name: str, leaky: bool, seed: int) -> MembershipScores:
        """Score the candidates with an attack.

        Args:
            name: Name of the attack.
            leaky: Whether the release is made of the members, or else of unrelated records.
            seed: Seed of the control.

        Returns:
            The scores.
        """
        data = self.draw_data(seed)
        needs = ATTACKS[name].needs
        shadow_store = _prepare_control_shadows(self, seed) if "shadows" in needs else None
        population = None
        if "population" in needs and shadow_store is None:
            population = _to_public_dataset(data.population)
        return _build_target(self, leaky, seed).score(
            name,
            _to_public_dataset(data.members),
            _to_public_dataset(data.nonmembers),
            population=population,
            shadow_store=shadow_store,
        )


@cache
def _build_target(control: Control, leaky: bool, seed: int) -> AttackTarget:
    """Build the target once for all attacks of a control, so that its classifier is trained once.

    Args:
        control: The control.
        leaky: Whether the release is made of the members.
        seed: Seed of the control.

    Returns:
        The target; its gradient search does without the weights of LPIPS.
    """
    data = control.draw_data(seed)
    records = data.members if leaky else data.unrelated_records
    release = _build_leaky_release(control.build_artifact(records, seed))
    return AttackTarget(release, CPU_RUNTIME, seed=seed, epochs=control.epochs, lpips_weight=0)


@cache
def _prepare_control_shadows(control: Control, seed: int) -> ShadowStore:
    """Prepare shadows of a control, each of which leaks its half of the candidates.

    They are in a folder like other shadows, until the process ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="privot-controls-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    data = control.draw_data(seed)
    dataset = concatenate(_to_public_dataset(data.members), _to_public_dataset(data.nonmembers))
    config = ShadowConfig(
        folder=folder,
        dataset=dataset,
        method="real-subset",
        num_shadows=NUM_CONTROL_SHADOWS,
        seed=seed + 1,
        epochs=control.epochs,
    )
    images, labels = dataset._read_records(slice(None))
    rng = np.random.default_rng(seed)
    with config.open_store() as store:
        membership = store.load_membership()
        set_size = membership.sum(1).max()
        for shadow_index, is_member in enumerate(membership):
            # Sets of a batch have one size, so some records are repeated. They are chosen at
            # random, or a classifier would learn the first records better.
            half = np.resize(rng.permutation(np.flatnonzero(is_member)), set_size)
            artifact = control.build_artifact(
                Records(images[half], labels[half]), seed + 1 + shadow_index
            )
            _build_leaky_release(artifact).save(store.release_path(shadow_index))
    return prepare_shadows(config, CPU_RUNTIME)


def _to_public_dataset(records: Records) -> Public:
    return Public(records.images.numpy(), records.labels.numpy(), DIGITS_SPEC)


def _build_leaky_release(artifact: Artifact) -> Release:
    return Release(artifact, NoGuarantee("it is made to leak"), DIGITS_SPEC, {})


CLASSIFIER_CONTROL = Control(build_blurred_set, draw_mislabeled_digits, CONTROL_EPOCHS)
SET_CONTROL = Control(build_blurred_set)
GENERATOR_CONTROL = Control(build_memorizing_artifact)

# The control of each attack and its required AUC, which every seed of 0 to 7 exceeded by a margin.
CONTROLS: dict[str, tuple[Control, float]] = {
    "loss": (CLASSIFIER_CONTROL, 0.8),
    "lira": (CLASSIFIER_CONTROL, 0.9),
    "lira-offline": (CLASSIFIER_CONTROL, 0.9),
    "lira-pixels": (SET_CONTROL, 0.99),
    "lira-features": (SET_CONTROL, 0.99),
    "rmia": (CLASSIFIER_CONTROL, 0.8),
    "nearest-pixels": (SET_CONTROL, 0.99),
    "nearest-features": (SET_CONTROL, 0.99),
    "nearest-lpips": (SET_CONTROL, 0.99),
    "real-start": (Control(build_shifted_set), 0.99),
    "tracing": (SET_CONTROL, 0.75),
    "gan-leaks-full": (GENERATOR_CONTROL, 0.95),
    "gan-leaks-partial": (GENERATOR_CONTROL, 0.98),
    "gan-leaks-white": (GENERATOR_CONTROL, 0.98),
}
