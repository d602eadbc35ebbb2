"""One attack on one release: its controls first, then scores of members and others, then what these prove.

Attacks that compare with shadows need them prepared, of the same method and settings, on members and others together (`shadows_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2_contingency

from privot.attacks import ATTACKS
from privot.attacks.controls import Power, power
from privot.attacks.membership import gan_leaks, lira, nearest, rmia, tracing
from privot.attacks.observing import classifier_width, observe
from privot.attacks.prepared import Prepared, digest
from privot.attacks.preparing import victims
from privot.attacks.shadows import Shadows
from privot.audit import Advantage, Points, Verdict, advantage, judge, roc, tpr_at
from privot.data.records import Public, Records, Sensitive
from privot.data.spec import Spec
from privot.errors import DataError, PrivotError, SettingError
from privot.measures.subject import Subject, refuse_overlap, same_names
from privot.release import Guarantee, Release
from privot.runtime import Progress, Runtime, silent

Box = Sensitive | Public
RATES = (1e-3, 1e-2, 1e-1)  # false-positive rates at which true positives are stated
SAMPLES = 5000  # of a generator
STRANGE = 1e-3  # a p-value of equal class shares under which a caution is said
STATISTIC = {"lira": "confidence", "lira-offline": "confidence", "lira-pixels": "pixels", "lira-features": "features"}
ENOUGH = 32  # shadows, under which LiRA on all of them comes out under chance: one fewer is left on a member's own side
ASIDE = 0.2  # of the others are set aside as a population where an attack needs one and none is given


@dataclass(frozen=True)
class Tried:
    """What an attack found. ``power`` is its proof of power; ``verdict`` holds rates, the ``judged``, against the release's certificate.

    Against a certificate false-positive rates must be known, not only measured: then ``judged`` are other points than ``points``.
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
    caution: str = ""

    def to_json(self) -> dict[str, Any]:
        """With ``attacks``, as the report reads it."""
        return {"attacks": [asdict(self.judged.attack(self.title))], **asdict(self)}


def together(members: Box, others: Box, sizes: bool = False) -> Box:
    """Members and, after them, others, as one box of candidates; public if both are. ``sizes``: those of its classes are declared."""
    if members.spec.shape != others.spec.shape or members.spec.classes != others.spec.classes:
        raise SettingError("members and others must be images of one shape with the same classes")
    same_names("the members", members.spec.class_names, "the others", others.spec.class_names)
    boxes = members, others
    if members._images.dtype == others._images.dtype:
        images = np.concatenate([each._images for each in boxes])
    else:  # bytes to 255 beside numbers to 1
        images = np.concatenate([each._take(slice(None)).images.numpy() for each in boxes])
    labels = np.concatenate([each._labels for each in boxes])
    counts = tuple(np.bincount(labels, minlength=members.spec.classes).tolist()) if sizes else None
    names = members.spec.class_names
    spec = Spec(members.spec.shape, members.spec.classes, len(labels), counts, class_names=names, mirror=members.spec.mirror)
    return (Public if isinstance(members, Public) and isinstance(others, Public) else Sensitive)(images, labels, spec, name="candidates")


def shadows_of(release: Release, members: Box, others: Box, folder: Path, count: int, **more: Any) -> Shadows:
    """Shadows as the release was made: its method, settings and epsilon, each on a random half of members and others together."""
    method, settings = release.facts.get("method"), dict(release.facts.get("settings") or {})
    if not isinstance(method, str):
        raise SettingError("the release does not say which method made it, so no shadow can be made like it")
    epsilon = None
    if settings.get("noise") is None and (release.facts.get("plan") or {}).get("stages"):  # noise that a budget set
        epsilon = release.guarantee.epsilon if isinstance(release.guarantee, Guarantee) else math.inf
    box = together(members, others, release.spec.class_sizes is not None)
    return Shadows(folder=folder, box=box, method=method, settings=settings, epsilon=epsilon, count=count, **more)


def compared(
    method: str, settings: dict[str, Any], epsilon: float | None, members: Box, others: Box, folder: Path, count: int, **more: Any
) -> Shadows:  # fmt: skip
    """Shadows of a method where no release is attacked: each is the victim once (`left_out`)."""
    box = together(members, others, members.spec.class_sizes is not None)
    return Shadows(folder=folder, box=box, method=method, settings=settings, epsilon=epsilon, count=count, **more)


def proved(name: str, release: Release | None, population: Box | None = None) -> Power:
    """An attack's proof of power; what cannot be tried on a release (or, without one, on a method) is refused, before any work is done."""
    if name not in ATTACKS:
        raise SettingError(f"no attack {name!r}: there are {', '.join(ATTACKS)}")
    needs = ATTACKS[name].needs
    if release is None and "shadows" not in needs:
        raise SettingError(f"{name} attacks a release: make one first")
    if release is None and "population" in needs:
        raise SettingError(f"{name} compares with records that nobody learned, and here all candidates were: attack a release, or use lira")
    if release and ("generator" in needs or "weights" in needs) and release.product.kind == "set":
        raise SettingError(f"{name} needs a generator, and this release is a set: try nearest-pixels, tracing or loss")
    if population is not None and ("population" not in needs or "shadows" in needs):
        why = "takes it from the non-members, whom all shadows have looked at" if "shadows" in needs else "needs none"
        raise SettingError(f"population: {name} {why}; leave it out")
    proof = power(name)
    if not proof.passed:
        raise PrivotError(f"the attack does not pass its controls here: {proof.sentence}")
    return proof


def left_out(name: str, prepared: Prepared, confidence: float = 0.95, seed: int = 0) -> Tried:
    """Every shadow is the victim once, with the others as its shadows; rates are those of one victim, drawn by the seed, the AUC of all.

    Candidates of one victim are counted as independent trials; pairs of victims and candidates cannot be.
    """
    proof, members = proved(name, None), prepared.members()
    scores = lira.leave_one_out(prepared.observed(STATISTIC[name]), members, offline=name == "lira-offline")
    victim = int(torch.randint(len(members), (), generator=torch.Generator().manual_seed(seed)))
    own = members[victim]
    sides = scores[victim, own], scores[victim, ~own]
    found = concluded(name, proof, *sides, prepared.release(victim), confidence, seed, prepared.publishable)
    few = f"of {len(members)} shadows the AUC comes out under 0.5 where nothing leaks: {ENOUGH} and more are needed to see a small leak"
    mean = float(np.mean([roc(each[mine], each[~mine]).auc for each, mine in zip(scores, members, strict=True)]))
    return replace(found, auc=mean, caution=few if len(members) < ENOUGH else "")


def attempt(
    name: str, release: Release, members: Box, others: Box, *, population: Box | None = None, prepared: Prepared | None = None,
    references: Sequence[Release] = (), candidates: int | None = None, epochs: int = 300, seed: int = 0, confidence: float = 0.95,
    runtime: Runtime | None = None, progress: Progress = silent,
) -> Tried:  # fmt: skip
    """Attack a release with known ``members`` (what it was made from) and ``others``.

    An attack that does not pass its own controls is not tried at all. Where one needs records that nobody learned and no ``population`` is
    given, a fifth of the others is set aside for that. ``references`` are releases made from yet other records: what is near them as well
    says nothing, and their mean score is taken off (calibration). ``candidates``: so many of each side alone, drawn by the seed.
    """
    progress("controls", 0, 1)
    proof, needs, runtime = proved(name, release, population), ATTACKS[name].needs, runtime or Runtime()
    progress("controls", 1, 1)
    if candidates is not None and "shadows" in needs:
        raise SettingError(f"candidates: {name} has those of its shadows; leave it out")
    if references and {"shadows", "model", "population"} & {*needs}:
        raise SettingError(f"references: {name} needs none; they are for attacks that look at released images alone")
    for each in references:
        if (each.spec.shape, each.spec.classes) != (release.spec.shape, release.spec.classes) or each.digest == release.digest:
            raise SettingError("a reference must be another release than the one attacked, of the same kind of images and classes")
        proved(name, each, population)
    boxes = {"members": members, "non-members": others} | ({} if population is None else {"the population": population})
    _fitting(boxes, release)
    first = members._count()
    if "shadows" in needs:
        if prepared is None:
            raise SettingError(f"{name} compares with shadows: prepare them first (`shadows_of`)")
        both = together(members, others)
        if prepared.plan["candidates"]["digest"] != digest(both):
            raise SettingError(f"{prepared.folder}: its shadows are of other candidates")
        # a classifier as theirs
        target = _Target(name, release, runtime, seed, prepared.plan["epochs"], progress, prepared.plan["samples"])
        scores = target.against(prepared, both, first)
    else:
        inside, outside = (box._take(_some(box, candidates, seed)) for box in (members, others))
        first = len(inside.labels)
        aside, known = _population(population, outside, seed) if "population" in needs else (None, outside)
        # In one go: scores that look at the mean of the candidates must not see members and others about different means.
        whole = Records(*(torch.cat(each) for each in zip(inside, known, strict=True)))
        scores = _Target(name, release, runtime, seed, epochs, progress).scores(whole, aside)
        if references:
            theirs = [_Target(name, each, runtime, seed, epochs, progress).scores(whole, aside) for each in references]
            scores = nearest.calibrated(scores, np.stack(theirs))
    found = scores[:first], scores[first:][~np.isnan(scores[first:])]
    public = all(isinstance(box, Public) for box in boxes.values())
    told = concluded(name, proof, *found, release, confidence, seed, public)
    title = f"{told.title}, calibrated by {len(references)} of other records" if references else told.title
    return replace(told, title=title, caution=_shifted(members, others))


def _some(box: Box, count: int | None, seed: int) -> slice | torch.Tensor:
    if count is None or count >= box._count():
        return slice(None)
    if count < 1:
        raise SettingError(f"candidates={count}: at least 1 of each side is needed")
    return torch.randperm(box._count(), generator=torch.Generator().manual_seed(seed))[:count]


def _shifted(members: Box, others: Box) -> str:
    """Words where classes have other shares among members than among others: what tells the sides apart is then not membership alone."""
    counts = np.stack([np.bincount(each._labels, minlength=each.spec.classes) for each in (members, others)])
    if chi2_contingency(counts[:, counts.any(0)]).pvalue > STRANGE:
        return ""
    return "class shares differ between members and non-members by more than chance: rates may tell the split, not membership"


def _fitting(boxes: dict[str, Box], release: Release) -> None:
    """Refuse records that are not of the release's kind, and a record on two sides: it would hide what leaks."""
    for name, box in boxes.items():
        if (box.spec.shape, box.spec.classes) != (release.spec.shape, release.spec.classes):
            theirs, ours = (f"{'x'.join(map(str, spec.shape))} with {spec.classes} classes" for spec in (box.spec, release.spec))
            raise SettingError(f"{name}: images of {theirs}, but the release has {ours}")
        same_names(name, box.spec.class_names, "the release", release.spec.class_names)
    for (one, first), (two, second) in combinations(boxes.items(), 2):
        try:
            refuse_overlap(second, first, one)
        except DataError:
            raise SettingError(f"{one} and {two} share records: each must be on one side alone") from None


def concluded(
    name: str, proof: Power, inside: np.ndarray, outside: np.ndarray, release: Release, confidence: float, seed: int, public: bool,
) -> Tried:  # fmt: skip
    """From scores to what they prove."""
    points = tpr_at(inside, outside, RATES, confidence, publishable=public)
    certain = isinstance(release.guarantee, Guarantee)  # then the false-positive rate must be known, not only measured
    judged = tpr_at(inside, outside, RATES, confidence, certain, public) if certain else points
    gain, verdict = advantage(inside, outside, seed, publishable=public), judge(judged, release.guarantee)
    return Tried(name, ATTACKS[name].title, proof, roc(inside, outside).auc, gain, points, judged, verdict, public)


def _population(given: Box | None, others: Records, seed: int) -> tuple[Records, Records]:
    """Records that nobody learned, and the others that are left: given ones, or a fifth of the others, set aside."""
    if given is not None:
        return given._take(slice(None)), others
    order = torch.randperm(len(others.labels), generator=torch.Generator().manual_seed(seed))
    first, rest = order.split([round(ASIDE * len(order)), len(order) - round(ASIDE * len(order))])
    return Records(others.images[first], others.labels[first]), Records(others.images[rest], others.labels[rest])


class _Target:
    """A release as an attacker holds it."""

    def __init__(
        self, name: str, release: Release, runtime: Runtime, seed: int, epochs: int, progress: Progress, samples: int = SAMPLES
    ):  # fmt: skip
        self.name, self.release, self.runtime, self.progress = name, release, runtime, progress
        self.seed, self.epochs, self.samples = seed, epochs, samples
        shown, device = Subject.sampled(release, "the release", samples, seed), runtime.target
        self.images, self.labels = shown.images.to(device), shown.labels.to(device)

    def scores(self, candidates: Records, population: Records | None) -> np.ndarray:
        """Of each candidate."""
        images, labels = candidates
        mine: dict[str, Any] = {"labels": labels, "released_labels": self.labels}
        ways: dict[str, Callable[[], np.ndarray]] = {
            "loss": lambda: self._observed("loss", candidates),
            "nearest-pixels": lambda: nearest.nearest(images, self.images, **mine),
            "nearest-features": lambda: nearest.nearest(images, self.images, "features", **mine),
            "nearest-lpips": lambda: nearest.nearest(images, self.images, "lpips", **mine),
            "real-start": lambda: nearest.cosine(images, self.images, **mine),
            "tracing": lambda: self._traced(candidates, population),
            "gan-leaks-full": lambda: gan_leaks.full_black_box(images, self.images, labels=labels, generated_labels=self.labels),
            "gan-leaks-partial": lambda: gan_leaks.partial_black_box(self.release.product, images, labels, **self._here()),
            "gan-leaks-white": lambda: gan_leaks.white_box(self.release.product, images, labels, **self._here()),
        }
        return ways[self.name]()

    def against(self, prepared: Prepared, candidates: Box, first_other: int) -> np.ndarray:
        """Of each candidate, compared with shadows; others that serve as a population have no score (NaN)."""
        members = prepared.members()
        if self.name != "rmia":
            what = STATISTIC[self.name]
            return lira.lira(self._observed(what, candidates), prepared.observed(what), members, offline=self.name == "lira-offline")
        own, seen = self._observed("loss", candidates), prepared.observed("loss")
        order = torch.randperm(len(own) - first_other, generator=torch.Generator().manual_seed(self.seed)).numpy()
        aside = first_other + order[: max(1, round(ASIDE * len(order)))]
        scores = rmia.rmia(own, seen, members, own[aside], seen[:, aside], members[:, aside])
        scores[aside] = np.nan
        return scores

    def _observed(self, what: str, candidates: Records | Box) -> np.ndarray:
        """By a classifier trained on the release, as a shadow's is."""
        box = candidates
        if isinstance(box, Records):
            spec = Spec(self.release.spec.shape, self.release.spec.classes, mirror=self.release.spec.mirror)
            box = Sensitive(box.images.numpy(), box.labels.numpy(), spec)
        if not hasattr(self, "_victims"):
            self._victims = victims([self.release], [self.seed], box.spec, self.epochs, self.samples, self.runtime, self.progress)
        return observe(self._victims, box, (what,), self.runtime)[what][0]

    def _traced(self, candidates: Records, population: Records | None) -> np.ndarray:
        assert population is not None
        width = classifier_width(self.release.spec)
        return tracing.trace(*candidates, self.images, self.labels, *population, width=width, seed=self.seed)

    def _here(self) -> dict[str, Any]:
        return {"seed": self.seed, "device": self.runtime.target, "progress": self.progress}
