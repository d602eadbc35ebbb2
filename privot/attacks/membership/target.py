"""A release as an attacker holds it, and what each attack makes of it: scores of members and of others.

Whatever is attacked comes this way, releases (`trying`) and controls alike, so that a control proves the attack that is run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from privot.attacks.membership import nearest
from privot.attacks.membership.registry import ATTACKS
from privot.attacks.shadows.observe import Victims, classifier_width, observe
from privot.attacks.shadows.store import Prepared, digest
from privot.attacks.shadows.train import victims
from privot.data.dataset import Public, Records, Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.measures.samples import Subject, same_names
from privot.release import Release
from privot.runtime import Progress, Runtime, silent

Box = Sensitive | Public
SAMPLES = 5000  # of a generator
STATISTIC = {
    "lira": "confidence",
    "lira-offline": "confidence",
    "lira-pixels": "pixels",
    "lira-features": "features",
}
LOOKED = 200  # images of a generator by which its variety is judged
ASIDE = (
    0.2  # of the others are set aside as a population where an attack needs one and none is given
)


class Scores(NamedTuple):
    """Of candidates that were in the training data, and of others."""

    members: np.ndarray
    others: np.ndarray


def together(members: Box, others: Box, sizes: bool = False, owners: int | None = None) -> Box:
    """Members and, after them, others, as one box of candidates; public if both are. ``sizes``: those of its classes are declared.

    With ``owners`` the gate deals them to so many.
    """
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
    spec = Spec(
        members.spec.shape,
        members.spec.classes,
        len(labels),
        counts,
        class_names=names,
        mirror=members.spec.mirror,
        owners=owners,
    )
    return (Public if isinstance(members, Public) and isinstance(others, Public) else Sensitive)(
        images, labels, spec, name="candidates"
    )


class Target:
    """``epochs`` are those of the classifier trained on it, where an attack needs one; a generator is asked for ``samples`` images.

    ``perceptual`` is the weight of LPIPS in a search by gradients, see `gan_leaks.white_box`.
    """

    def __init__(
        self,
        release: Release,
        runtime: Runtime,
        *,
        seed: int = 0,
        epochs: int = 300,
        samples: int = SAMPLES,
        perceptual: float | None = None,
        progress: Progress = silent,
    ):
        self.release = release
        self.runtime = runtime
        self.seed = seed
        self.epochs = epochs
        self.samples = samples
        self.perceptual = perceptual
        self.progress = progress
        self._trained: Victims | None = None

    @cached_property
    def shown(self) -> Subject:
        """Its images, drawn where they will be looked at; an attack that searches a generator asks for none."""
        return Subject.sampled(
            self.release, "the release", self.samples, self.seed, self.runtime.target
        )

    def variety(self, others: Box) -> float:
        """How far apart two images of one class are that it draws, as a share of what two of the others are."""
        drawn = Subject.sampled(
            self.release,
            "the release",
            max(LOOKED, 4 * self.release.spec.classes),
            self.seed,
            self.runtime.target,
        )
        within = [
            _within(each.images, each.labels)
            for each in (drawn, others._take(some(others, 10 * LOOKED, self.seed)))
        ]
        return math.sqrt(within[0] / within[1]) if within[1] else math.inf

    def told(
        self,
        name: str,
        members: Box,
        others: Box,
        *,
        population: Box | None = None,
        prepared: Prepared | None = None,
        references: Sequence[Target] = (),
        candidates: int | None = None,
    ) -> Scores:
        """What the attack says of members and of others; see `trying.attempt`. Others that serve as a population have no score."""
        if "shadows" in ATTACKS[name].needs:
            first = members._count()
            scores = self._against(name, prepared, together(members, others), first)
        else:
            inside, outside = (
                box._take(some(box, candidates, self.seed)) for box in (members, others)
            )
            first = len(inside.labels)
            aside, known = (
                _population(population, outside, self.seed)
                if "population" in ATTACKS[name].needs
                else (None, outside)
            )
            # In one go: scores that look at the mean of the candidates must not see members and others about different means.
            whole = Records(*(torch.cat(each) for each in zip(inside, known, strict=True)))
            scores = self._alone(name, whole, aside)
            if references:
                scores = nearest.calibrated(
                    scores, np.stack([each._alone(name, whole, aside) for each in references])
                )
        return Scores(scores[:first], scores[first:][~np.isnan(scores[first:])])

    def _alone(self, name: str, candidates: Records, population: Records | None) -> np.ndarray:
        """Of each candidate, by this release and nothing else."""
        (images, labels) = candidates
        (_, needs, function) = ATTACKS[name]
        here = {"seed": self.seed, "device": self.runtime.target, "progress": self.progress}
        if "model" in needs:
            spec = Spec(
                self.release.spec.shape, self.release.spec.classes, mirror=self.release.spec.mirror
            )
            return self._observed("loss", Sensitive(images.numpy(), labels.numpy(), spec))
        if "weights" in needs:
            return function(
                self.release.product, images, labels, perceptual=self.perceptual, **here
            )
        if "generator" in needs:
            return function(self.release.product, images, labels, **here)
        shown, own = (
            each.to(self.runtime.target) for each in (self.shown.images, self.shown.labels)
        )
        if population is not None:
            width = classifier_width(self.release.spec)
            return function(images, labels, shown, own, *population, width=width, seed=self.seed)
        return function(images, shown, labels=labels, released_labels=own)

    def _against(
        self, name: str, prepared: Prepared | None, candidates: Box, first_other: int
    ) -> np.ndarray:
        """Of each candidate, compared with shadows; NaN of others that serve as a population."""
        if prepared is None:
            raise SettingError(f"{name} compares with shadows: prepare them first (`shadows_of`)")
        if prepared.plan["candidates"]["digest"] != digest(candidates):
            raise SettingError(f"{prepared.folder}: its shadows are of other candidates")
        members = prepared.members()
        function = ATTACKS[name].function
        what = STATISTIC.get(name, "loss")
        own = self._observed(what, candidates)
        seen = prepared.observed(what)
        if "population" not in ATTACKS[name].needs:
            return function(own, seen, members)
        order = torch.randperm(
            len(own) - first_other, generator=torch.Generator().manual_seed(self.seed)
        ).numpy()
        aside = first_other + order[: max(1, round(ASIDE * len(order)))]
        scores = function(own, seen, members, own[aside], seen[:, aside], members[:, aside])
        scores[aside] = np.nan
        return scores

    def _observed(self, what: str, candidates: Box) -> np.ndarray:
        """By a classifier trained on the release, as a shadow's is."""
        if self._trained is None:
            own = [self.release]
            spec = candidates.spec
            self._trained = victims(
                own, [self.seed], spec, self.epochs, self.samples, self.runtime, self.progress
            )
        return observe(self._trained, candidates, (what,), self.runtime)[what][0]


def some(box: Box, count: int | None, seed: int) -> slice | Tensor:
    """Places of so many records, drawn by the seed; all, where there are no more."""
    if count is None or count >= box._count():
        return slice(None)
    if count < 1:
        raise SettingError(f"candidates={count}: at least 1 of each side is needed")
    return torch.randperm(box._count(), generator=torch.Generator().manual_seed(seed))[:count]


def _within(images: Tensor, labels: Tensor) -> float:
    """The variance within a class, summed over pixels: half the mean squared distance of two of its images. Classes of one are left out."""
    held = [images[labels == each].flatten(1).double() for each in labels.unique()]
    several = [each for each in held if len(each) > 1]
    return sum(len(each) * each.var(0).sum().item() for each in several) / max(
        1, sum(map(len, several))
    )


def _population(given: Box | None, others: Records, seed: int) -> tuple[Records, Records]:
    """Records that nobody learned, and the others that are left: given ones, or a fifth of the others, set aside."""
    if given is not None:
        return given._take(slice(None)), others
    order = torch.randperm(len(others.labels), generator=torch.Generator().manual_seed(seed))
    first, rest = order.split([round(ASIDE * len(order)), len(order) - round(ASIDE * len(order))])
    return Records(others.images[first], others.labels[first]), Records(
        others.images[rest], others.labels[rest]
    )
