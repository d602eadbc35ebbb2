"""One attack on one release: its controls first, then scores of members and others, then what these prove.

Attacks that compare with shadows need them prepared, of the same method and settings, on members and others together (`shadows_of`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2_contingency

from privot.attacks.membership import lira
from privot.attacks.membership.blind_baseline import Unseen, blind
from privot.attacks.membership.controls import Power, power
from privot.attacks.membership.registry import ATTACKS
from privot.attacks.membership.target import SAMPLES, STATISTIC, Box, Scores, Target, some, together
from privot.attacks.shadows.config import Shadows
from privot.attacks.shadows.store import Prepared
from privot.audit import (
    Advantage,
    Interval,
    Points,
    Verdict,
    advantage,
    judge,
    mean_auc,
    roc,
    tpr_at,
)
from privot.audit.verdict import NO_VERDICT
from privot.data.dataset import Public
from privot.errors import DataError, PrivotError, SettingError
from privot.measures.samples import refuse_overlap, same_names
from privot.release import Guarantee, Release
from privot.runtime import Progress, Runtime, silent

RATES = (1e-3, 1e-2, 1e-1)  # false-positive rates at which true positives are stated
DRAWN = 60  # points of the curve in the report
FLAT = 0.3  # how much images of a class differ in a release, of what non-members do, under which a caution is said: it has collapsed
STRANGE = 1e-3  # a p-value of sides that look alike, under which a caution is said
UNSEEN = 10_000  # of each side, for one who never saw the release
ENOUGH = 32  # shadows, under which LiRA on all of them comes out under chance: one fewer is left on a member's own side


@dataclass(frozen=True)
class Tried:
    """What an attack found. ``power`` is its proof of power; ``verdict`` holds rates, the ``judged``, against the release's certificate.

    Against a certificate false-positive rates must be known, not only measured: then ``judged`` are other points than ``points``.
    ``curve`` is the measured ROC (fpr, tpr) on log axes; of several victims, of the one that is judged, and ``auc`` is the mean of all,
    with its ``spread`` over them. ``blind`` is the AUC of one who never saw the release.
    """

    name: str
    title: str
    power: Power
    auc: float
    advantage: Advantage
    points: Points
    judged: Points
    verdict: Verdict
    publishable: bool
    curve: tuple[tuple[float, ...], tuple[float, ...]]
    blind: float | None = None
    spread: Interval | None = None
    caution: str = ""

    def to_json(self) -> dict[str, Any]:
        """With ``attacks``, as the report reads it."""
        words = {
            "control": self.power.sentence,
            "caution": self.caution,
            "verdict": self.verdict.sentence,
        }
        told = self.judged.attack(self.title, auc=self.auc, curve=self.curve, **words)
        if self.verdict.status == NO_VERDICT:  # rates that accuse nobody
            told = replace(told, fpr=(), tpr=(), lower=(), ceiling=())
        return {"attacks": [asdict(told)], **asdict(self)}


def shadows_of(
    release: Release, members: Box, others: Box, folder: Path, count: int, **more: Any
) -> Shadows:
    """Shadows as the release was made: its method, settings and epsilon, each on a random half of members and others together."""
    method = release.facts.get("method")
    settings = dict(release.facts.get("settings") or {})
    if not isinstance(method, str):
        raise SettingError(
            "the release does not say which method made it, so no shadow can be made like it"
        )
    epsilon = None
    if settings.get("noise") is None and (release.facts.get("plan") or {}).get(
        "stages"
    ):  # noise that a budget set
        epsilon = (
            release.guarantee.epsilon if isinstance(release.guarantee, Guarantee) else math.inf
        )
    box = together(members, others, release.spec.class_sizes is not None, release.spec.owners)
    sources = _sensitive_names(members, others)
    return Shadows(
        folder=folder,
        box=box,
        method=method,
        settings=settings,
        epsilon=epsilon,
        count=count,
        sources=sources,
        **more,
    )


def compared(
    method: str,
    settings: dict[str, Any],
    epsilon: float | None,
    members: Box,
    others: Box,
    folder: Path,
    count: int,
    **more: Any,
) -> Shadows:
    """Shadows of a method where no release is attacked: each is the victim once (`left_out`)."""
    box = together(members, others, members.spec.class_sizes is not None, members.spec.owners)
    sources = _sensitive_names(members, others)
    return Shadows(
        folder=folder,
        box=box,
        method=method,
        settings=settings,
        epsilon=epsilon,
        count=count,
        sources=sources,
        **more,
    )


def _sensitive_names(*data: Box) -> tuple[str, ...]:
    """The names of the sensitive data sets among these, whose ledgers list the shadows."""
    return tuple(each.name for each in data if not isinstance(each, Public))


def proved(name: str, release: Release | None, population: Box | None = None) -> Power:
    """An attack's proof of power; what cannot be tried on a release (or, without one, on a method) is refused, before any work is done."""
    if name not in ATTACKS:
        raise SettingError(f"no attack {name!r}: there are {', '.join(ATTACKS)}")
    needs = ATTACKS[name].needs
    if release is None and "shadows" not in needs:
        raise SettingError(f"{name} attacks a release: make one first")
    if release is None and "population" in needs:
        raise SettingError(
            f"{name} compares with records that nobody learned, and here all candidates were: attack a release, or use lira"
        )
    if release and ("generator" in needs or "weights" in needs) and release.product.kind == "set":
        raise SettingError(
            f"{name} needs a generator, and this release is a set: try nearest-pixels, tracing or loss"
        )
    if population is not None and ("population" not in needs or "shadows" in needs):
        why = (
            "takes it from the non-members, whom all shadows have looked at"
            if "shadows" in needs
            else "needs none"
        )
        raise SettingError(f"population: {name} {why}; leave it out")
    proof = power(name)
    if not proof.passed:
        raise PrivotError(f"the attack does not pass its controls here: {proof.sentence}")
    return proof


def left_out(name: str, prepared: Prepared, confidence: float = 0.95, seed: int = 0) -> Tried:
    """Every shadow is the victim once, with the others as its shadows; rates are those of one victim, drawn by the seed, the AUC of all.

    Candidates of one victim are counted as independent trials; pairs of victims and candidates cannot be.
    """
    proof = proved(name, None)
    members = prepared.members()
    scores = lira.leave_one_out(
        prepared.observed(STATISTIC[name]), members, offline=name == "lira-offline"
    )
    victim = int(torch.randint(len(members), (), generator=torch.Generator().manual_seed(seed)))
    own = members[victim]
    sides = Scores(scores[victim, own], scores[victim, ~own])
    found = concluded(
        name, proof, sides, prepared.release(victim), confidence, seed, prepared.publishable
    )
    few = f"of {len(members)} shadows the AUC comes out under 0.5 where nothing leaks: {ENOUGH} and more are needed to see a small leak"
    mean = mean_auc(
        [(each[mine], each[~mine]) for each, mine in zip(scores, members, strict=True)],
        confidence,
        seed,
    )
    return replace(found, auc=mean.value, spread=mean, caution=few if len(members) < ENOUGH else "")


def attempt(
    name: str,
    release: Release,
    members: Box,
    others: Box,
    *,
    population: Box | None = None,
    prepared: Prepared | None = None,
    references: Sequence[Release] = (),
    candidates: int | None = None,
    epochs: int = 300,
    seed: int = 0,
    confidence: float = 0.95,
    runtime: Runtime | None = None,
    progress: Progress = silent,
) -> Tried:
    """Attack a release with known ``members`` (what it was made from) and ``others``.

    An attack that does not pass its own controls is not tried at all. Where one needs records that nobody learned and no ``population`` is
    given, a fifth of the others is set aside for that. ``references`` are releases made from yet other records: what is near them as well
    says nothing, and their mean score is taken off (calibration). ``candidates``: so many of each side alone, drawn by the seed.
    """
    progress("controls", 0, 1)
    proof = proved(name, release, population)
    needs = ATTACKS[name].needs
    runtime = runtime or Runtime()
    progress("controls", 1, 1)
    if candidates is not None and "shadows" in needs:
        raise SettingError(f"candidates: {name} has those of its shadows; leave it out")
    if references and {"shadows", "model", "population"} & {*needs}:
        raise SettingError(
            f"references: {name} needs none; they are for attacks that look at released images alone"
        )
    for each in references:
        if (each.spec.shape, each.spec.classes) != (
            release.spec.shape,
            release.spec.classes,
        ) or each.digest == release.digest:
            raise SettingError(
                "a reference must be another release than the one attacked, of the same kind of images and classes"
            )
        proved(name, each, population)
    boxes = {"members": members, "non-members": others} | (
        {} if population is None else {"the population": population}
    )
    _fitting(boxes, release)
    # a classifier as theirs, where there are shadows
    plan = (
        prepared.plan
        if prepared is not None and "shadows" in needs
        else {"epochs": epochs, "samples": SAMPLES}
    )
    alike: Any = {
        "seed": seed,
        "epochs": plan["epochs"],
        "samples": plan["samples"],
        "progress": progress,
    }
    target = Target(release, runtime, **alike)
    known = [Target(each, runtime, **alike) for each in references]
    found = target.told(
        name,
        members,
        others,
        population=population,
        prepared=prepared,
        references=known,
        candidates=candidates,
    )
    public = all(isinstance(box, Public) for box in boxes.values())
    told = concluded(name, proof, found, release, confidence, seed, public)
    title = (
        f"{told.title}, calibrated by {len(references)} of other records"
        if references
        else told.title
    )
    progress("beside one who never saw it", 0, 1)
    inside, outside = (each._take(some(each, UNSEEN, seed)) for each in (members, others))
    unseen = blind(inside, outside, release.spec.classes, seed)
    progress("beside one who never saw it", 1, 1)
    caution = "; ".join(
        filter(None, [_shifted(members, others, unseen), _collapsed(target, others)])
    )
    return beside(replace(told, title=title, caution=caution), unseen, release)


def _shifted(members: Box, others: Box, unseen: Unseen) -> str:
    """Words where sides differ in their classes or in their looks: what tells them apart is then not membership alone."""
    counts = np.stack(
        [np.bincount(each._labels, minlength=each.spec.classes) for each in (members, others)]
    )
    if chi2_contingency(counts[:, counts.any(0)]).pvalue < STRANGE:
        return "class shares differ between members and non-members by more than chance: rates may tell the split, not membership"
    if unseen.chance < STRANGE:
        return "members and non-members can be told apart without the release: rates may tell the split, not membership"
    return ""


def _collapsed(target: Target, others: Box) -> str:
    """Words where a generator draws little else than one image of a class: nobody is found in what is not drawn."""
    if target.release.product.kind != "generator" or not (share := target.variety(others)) < FLAT:
        return ""
    return (
        f"the generator has collapsed: two of its images of a class differ {100 * share:.0f} % as much as two non-members. "
        "That few are found in it says little of how it was trained"
    )


def beside(told: Tried, unseen: Unseen, release: Release) -> Tried:
    r"""An attack beside one that never saw the release (`blind`).

    Where even that one passes the certificate, which bounds what a *release* can tell, passing it proves nothing. Who knows how members
    look finds a share B of them unseen; with the release, which may tell of each as much as it claims, :math:`e^\epsilon B+\delta` at
    most. What passes that stands, as far as our blind rule is as good as any.
    """
    sides = (unseen.members, unseen.others)
    claim = release.guarantee
    auc = roc(*sides).auc
    told = replace(told, blind=auc)
    if not told.verdict.broken or not isinstance(claim, Guarantee):
        return told
    if not judge(tpr_at(*sides, RATES, told.judged.confidence, certain=True), claim).broken:
        return told
    alone = tpr_at(*sides, RATES, told.judged.confidence).points
    if any(
        mine.lowest_tpr > math.exp(min(claim.epsilon, 700)) * each.highest_tpr + claim.delta
        for mine, each in zip(told.judged.points, alone, strict=True)
    ):
        return told
    why = f"no verdict: who never saw the release does so too, with an AUC of {auc:.3f}; take both sides from one random split"
    return replace(
        told,
        verdict=replace(
            told.verdict, status=NO_VERDICT, sentence=f"{told.verdict.sentence}; {why}"
        ),
    )


def _fitting(boxes: dict[str, Box], release: Release) -> None:
    """Refuse records that are not of the release's kind, and a record on two sides: it would hide what leaks."""
    for name, box in boxes.items():
        if (box.spec.shape, box.spec.classes) != (release.spec.shape, release.spec.classes):
            theirs, ours = (
                f"{'x'.join(map(str, spec.shape))} with {spec.classes} classes"
                for spec in (box.spec, release.spec)
            )
            raise SettingError(f"{name}: images of {theirs}, but the release has {ours}")
        same_names(name, box.spec.class_names, "the release", release.spec.class_names)
    for (one, first), (two, second) in combinations(boxes.items(), 2):
        try:
            refuse_overlap(second, first, one)
        except DataError:
            raise SettingError(
                f"{one} and {two} share records: each must be on one side alone"
            ) from None


def concluded(
    name: str,
    proof: Power,
    found: Scores,
    release: Release,
    confidence: float,
    seed: int,
    public: bool,
) -> Tried:
    """From scores to what they prove."""
    points = tpr_at(*found, RATES, confidence, publishable=public)
    certain = isinstance(
        release.guarantee, Guarantee
    )  # then the false-positive rate must be known, not only measured
    judged = tpr_at(*found, RATES, confidence, certain, public) if certain else points
    gain = advantage(*found, seed, publishable=public)
    verdict = judge(judged, release.guarantee)
    curve = roc(*found)
    fpr, tpr = (tuple(each.tolist()) for each in curve.logarithmic(DRAWN))
    return Tried(
        name,
        ATTACKS[name].title,
        proof,
        curve.auc,
        gain,
        points,
        judged,
        verdict,
        public,
        (fpr, tpr),
    )
