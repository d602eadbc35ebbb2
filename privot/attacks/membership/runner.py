"""Whole membership attacks: controls first, then scores of members and non-members, then a verdict.

Attacks that compare with shadows need prepared shadows of the same method and settings, on members
and non-members together. `privot.attacks.membership.method_shadows` configures them, and
`prepare_shadows` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from privot.attacks.membership import lira
from privot.attacks.membership.attack_report import (
    AttackReport,
    apply_blind_baseline,
    build_attack_report,
    describe_warnings,
)
from privot.attacks.membership.blind_baseline import run_blind_baseline
from privot.attacks.membership.candidates import AnyDataset, subsample_indices
from privot.attacks.membership.checks import (
    check_attack,
    check_datasets,
    check_options,
    check_reference,
)
from privot.attacks.membership.registry import ATTACKS
from privot.attacks.membership.target import (
    ATTACK_OBSERVATION,
    NUM_SAMPLES,
    AttackTarget,
    MembershipScores,
)
from privot.attacks.shadows.store import ShadowStore
from privot.audit import bootstrap_mean_auc
from privot.data.dataset import Public
from privot.release import Release
from privot.runtime import Progress, Runtime, ignore_progress

MAX_BLIND_RECORDS = 10_000  # of each side, for the blind baseline
MIN_LIRA_SHADOWS = 32  # with fewer, leave-one-out LiRA is below chance where nothing leaks


@dataclass(frozen=True, kw_only=True)
class AttackOptions:
    """Options that all attacks share.

    Attributes:
        num_candidates: Candidates of each side, chosen at random; None: all.
        epochs: Training epochs of the classifier that some attacks need. With shadows, those of the
            shadows' classifiers are used instead.
        seed: Seed of all random choices.
        confidence: Confidence level of all bounds together.
    """

    num_candidates: int | None = None
    epochs: int = 300
    seed: int = 0
    confidence: float = 0.95


def run_attack(
    name: str,
    release: Release,
    members: AnyDataset,
    nonmembers: AnyDataset,
    *,
    population: AnyDataset | None = None,
    shadow_store: ShadowStore | None = None,
    references: Sequence[Release] = (),
    options: AttackOptions | None = None,
    runtime: Runtime | None = None,
    progress: Progress = ignore_progress,
) -> AttackReport:
    """Run a membership attack on a release and compare the result with its certificate.

    The attack must first pass its controls. Its result is compared with a blind baseline, which has
    no access to the release. Members and non-members should be two sides of one random split.

    Args:
        name: Name of the attack, one of `privot.attacks.membership.registry.ATTACKS`.
        release: The release.
        members: Records that the release was made from.
        nonmembers: Records that it was not made from.
        population: Records that no model was trained on, for attacks that need them. None: a fifth
            of the non-members is used.
        shadow_store: Prepared shadows, for attacks that need them.
        references: Releases made from other records. Their mean score is subtracted, since what is
            near them as well is no evidence of membership (calibration).
        options: Number of candidates, seed and the like.
        runtime: Device and chunk sizes.
        progress: Called with the steps of the attack.

    Returns:
        AUC, advantage and true-positive rates with bounds; the verdict; and warnings. All of it is
        as secret as the records unless ``publishable`` is True.

    Raises:
        SettingError: If the attack does not exist or does not fit the release, an option does not
            fit the attack, or a record is on two sides.
        PrivotError: If the attack does not pass its controls.

    >>> from privot import Public, Spec
    >>> from privot.data import load_dataset
    >>> from privot.privacy.guarantee import NoGuarantee
    >>> from privot.release.artifact import Artifact
    >>> digits = load_dataset("digits", public=True)
    >>> images, labels = digits.records()
    >>> spec = Spec((1, 8, 8), 10)
    >>> members = Public(images[:100].numpy(), labels[:100].numpy(), spec)
    >>> nonmembers = Public(images[100:200].numpy(), labels[100:200].numpy(), spec)
    >>> artifact = Artifact.from_images(images[:100], labels[:100])
    >>> release = Release(artifact, NoGuarantee("these are real records"), spec, {})
    >>> report = run_attack("nearest-pixels", release, members, nonmembers)
    >>> round(report.auc, 3), report.verdict.status
    (1.0, 'no claim')
    """
    options = options or AttackOptions()
    runtime = runtime or Runtime()
    progress("controls", 0, 1)
    control = check_attack(name, release, population)
    progress("controls", 1, 1)
    check_options(name, options.num_candidates, references)
    for reference in references:
        check_reference(reference, release)
        check_attack(name, reference, population)
    datasets = {"members": members, "non-members": nonmembers}
    if population is not None:
        datasets["the population"] = population
    check_datasets(datasets, release)
    target, *reference_targets = _build_targets(
        [release, *references],
        options,
        shadow_store if "shadows" in ATTACKS[name].needs else None,
        runtime,
        progress,
    )
    scores = target.score(
        name,
        members,
        nonmembers,
        population=population,
        shadow_store=shadow_store,
        references=reference_targets,
        num_candidates=options.num_candidates,
    )
    publishable = all(isinstance(dataset, Public) for dataset in datasets.values())
    report = build_attack_report(
        name, control, scores, release, options.confidence, options.seed, publishable
    )
    if references:
        title = f"{report.title}, calibrated by {len(references)} of other records"
        report = replace(report, title=title)
    return _compare_with_blind_baseline(report, target, members, nonmembers, progress)


def _build_targets(
    releases: Sequence[Release],
    options: AttackOptions,
    shadow_store: ShadowStore | None,
    runtime: Runtime,
    progress: Progress,
) -> list[AttackTarget]:
    """Build the targets of an attack.

    Args:
        releases: The attacked release and references.
        options: Epochs and seed.
        shadow_store: Shadows that the release is compared with; its classifier is then trained as
            those of the shadows are.
        runtime: Device and chunk sizes.
        progress: Called with the steps of the attack.

    Returns:
        The targets.
    """
    epochs = options.epochs
    num_samples = NUM_SAMPLES
    if shadow_store is not None:
        epochs = shadow_store.plan["epochs"]
        num_samples = shadow_store.plan["num_samples"]
    return [
        AttackTarget(
            release,
            runtime,
            seed=options.seed,
            epochs=epochs,
            num_samples=num_samples,
            progress=progress,
        )
        for release in releases
    ]


def _compare_with_blind_baseline(
    report: AttackReport,
    target: AttackTarget,
    members: AnyDataset,
    nonmembers: AnyDataset,
    progress: Progress,
) -> AttackReport:
    """Run the blind baseline and add its result and all warnings to a report.

    Args:
        report: The report of the attack.
        target: The attacked release.
        members: Members.
        nonmembers: Non-members.
        progress: Called before and after.

    Returns:
        The complete report.
    """
    progress("blind baseline", 0, 1)
    member_records, nonmember_records = (
        side._read_records(subsample_indices(side, MAX_BLIND_RECORDS, target.seed))
        for side in (members, nonmembers)
    )
    blind_scores = run_blind_baseline(
        member_records, nonmember_records, target.release.spec.num_classes, target.seed
    )
    progress("blind baseline", 1, 1)
    warning = describe_warnings(members, nonmembers, blind_scores, target)
    return apply_blind_baseline(replace(report, warning=warning), blind_scores, target.release)


def leave_one_out_attack(
    name: str, shadow_store: ShadowStore, confidence: float = 0.95, seed: int = 0
) -> AttackReport:
    """Attack a method without a release: each shadow is the target once, compared with the others.

    Rates are those of one target, chosen by the seed; the AUC is the mean over all. Candidates of
    one target count as independent trials. Pairs of targets and candidates cannot.

    Args:
        name: Name of the attack.
        shadow_store: Prepared shadows.
        confidence: Confidence level of all bounds together.
        seed: Seed that chooses the target.

    Returns:
        The report.

    Raises:
        SettingError: If the attack does not compare with shadows, or needs a population.
        PrivotError: If the attack does not pass its controls.
    """
    control = check_attack(name, None)
    membership = shadow_store.load_membership()
    num_shadows = len(membership)
    scores = lira.lira_leave_one_out(
        shadow_store.load_observation(ATTACK_OBSERVATION[name]),
        membership,
        offline=name == "lira-offline",
    )
    target_index = int(
        torch.randint(num_shadows, (), generator=torch.Generator().manual_seed(seed))
    )
    is_member = membership[target_index]
    report = build_attack_report(
        name,
        control,
        MembershipScores(scores[target_index, is_member], scores[target_index, ~is_member]),
        shadow_store.load_release(target_index),
        confidence,
        seed,
        shadow_store.publishable,
    )
    model_scores = [(row[mask], row[~mask]) for row, mask in zip(scores, membership, strict=True)]
    mean_auc = bootstrap_mean_auc(model_scores, confidence, seed)
    warning = ""
    if num_shadows < MIN_LIRA_SHADOWS:
        warning = (
            f"with {num_shadows} shadows the AUC is below 0.5 where nothing leaks: prepare "
            f"{MIN_LIRA_SHADOWS} or more to detect a small leak"
        )
    return replace(report, auc=mean_auc.mean, auc_interval=mean_auc, warning=warning)
