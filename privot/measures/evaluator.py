"""All measures of one output through one pipeline: the same ruler for every method."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from privot.data.dataset import Public, Sensitive
from privot.errors import DataError, SettingError
from privot.measures.classical import CLASSICAL
from privot.measures.downstream import CLASSIFIERS, THIRTEEN, downstream
from privot.measures.feature_extractors import Ruler, domain, inception
from privot.measures.fid_kid import frechet, kernel, torchmetrics
from privot.measures.inception_score import inception_score, judge
from privot.measures.precision_recall import precision_recall
from privot.measures.result import Reading
from privot.measures.samples import Subject, matching, refuse_overlap, trained_on
from privot.measures.wasserstein import exact_wasserstein, sliced_wasserstein
from privot.nets.training import Classifier
from privot.runtime import Progress, Runtime, silent

FEATURES = ("fid", "kid", "precision")  # precision brings recall, density and coverage
OTHERS = ("is", "imagenet_is", "domain", "sliced", "exact")
GROUPS = {"thirteen": THIRTEEN, "default": (*FEATURES, "sliced", "logistic", "mlp", "cnn")}
FEW = 10_000  # samples under which FID is noticeably too high
ON_CPU = 1000  # images through Inception on a CPU, at about 0.2 s each
NEAR = 10_000  # points of each side in precision and recall, whose work grows with the square
# points and directions of a sliced one
MANY = 60_000
SLICES = 500
DENSE = 2000  # points of each side in an exact Wasserstein distance


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Names of measures with groups spelt out; an unknown one is refused, and the nearest suggested.

    >>> chosen(["fid", "cnn"])
    ('fid', 'cnn')
    """
    known = (*FEATURES, *OTHERS, *CLASSIFIERS, *GROUPS)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f": {', '.join(known)}"
            raise SettingError(f"no measure {name!r}{hint}")
    return tuple(dict.fromkeys(each for name in names for each in GROUPS.get(name, (name,))))


def measure(
    subject: Subject,
    test: Sensitive | Public,
    only: Sequence[str] = ("default",),
    *,
    train: Sensitive | Public | None = None,
    ceiling: Sequence[Reading] = (),
    weights: Path | None = None,
    runtime: Runtime | None = None,
    seed: int = 0,
    progress: Progress = silent,
    notice: Callable[[str], None] = lambda text: None,
) -> list[Reading]:
    """Measure one output against real data; see `Workbench` for several.

    >>> from privot.data import load
    >>> [reading] = measure(Subject.of("digits", 500), load("digits", "test", public=True), ["logistic"])
    >>> reading.name, reading.samples, reading.publishable
    ('logistic_accuracy', 500, True)
    """
    bench = Workbench(
        test,
        train,
        weights=weights,
        runtime=runtime or Runtime(),
        seed=seed,
        progress=progress,
        notice=notice,
    )
    return bench.measure(subject, only, ceiling)


@dataclass
class Workbench:
    """Real data and rulers, for any number of outputs; what depends on the real data alone is computed once.

    Classifiers are tested on ``test``. Features are compared with ``train`` where it is given, as GS-WGAN's table does, else with
    ``test``; the judge of the inception score is trained on ``train``. Numbers are publishable if both are public, and so is the subject.
    """

    test: Sensitive | Public
    train: Sensitive | Public | None = None
    _: KW_ONLY
    weights: Path | None = None
    runtime: Runtime = field(default_factory=Runtime)
    seed: int = 0
    progress: Progress = silent
    notice: Callable[[str], None] = lambda text: None
    _kept: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def measure(
        self, subject: Subject, only: Sequence[str] = ("default",), ceiling: Sequence[Reading] = ()
    ) -> list[Reading]:
        """Readings of the measures ``only``; ``ceiling`` holds those of real data, for the calibrated accuracy."""
        names = chosen(only)
        matching(subject, self.test)
        if "is" in names and self.train is None:
            raise SettingError(
                "is: the judge of the inception score is trained on real data; name it with --train"
            )
        for trained in (self.train, trained_on(subject), subject.images):
            if trained is not None:
                refuse_overlap(
                    self.test,
                    trained,
                    "the released images" if trained is subject.images else "the training data",
                )
        self._ready(names)
        readings = self._features(subject, names)
        if "is" in names:
            readings.append(self._score(subject))
        if "imagenet_is" in names:
            readings.append(self._imagenet_score(subject))
        readings += self._transport(subject, names)
        classifiers = [name for name in names if name in CLASSIFIERS]
        if classifiers:
            readings += downstream(
                subject.images,
                subject.labels,
                self.test,
                classifiers,
                soft=subject.soft,
                ceiling=ceiling,
                runtime=self.runtime,
                seed=self.seed,
                progress=self.progress,
            )
        # Both real sets decide what is refused, and what the images were made of is in every number.
        public = subject.public and all(
            isinstance(each, Public) for each in (self.test, self.train) if each is not None
        )
        return [replace(each, publishable=each.publishable and public) for each in readings]

    def _ready(self, names: Sequence[str]) -> None:
        """What is missing is said before an hour is spent."""
        if {"fid", "kid", "domain"} & set(names):
            torchmetrics("fid")
        if "exact" in names:
            exact_wasserstein(torch.zeros(1, 1), torch.zeros(1, 1))
        if "xgboost" in names:
            CLASSICAL["xgboost"](0)
        if "imagenet_is" in names and self._inception.probabilities is None:
            raise DataError(
                "imagenet_is: these Inception weights hold no logits; docs/measures.md says how to make a file that does"
            )

    # What depends on the real data alone

    @property
    def _real(self) -> Sensitive | Public:
        return self.test if self.train is None else self.train

    @cached_property
    def _inception(self) -> Ruler:
        return inception(self.runtime.target, self.weights)

    @cached_property
    def _domain(self) -> Ruler:
        return domain(self._real, self.runtime.target, self.seed, self.progress)

    @cached_property
    def _judge(self) -> tuple[Classifier, str]:
        assert self.train is not None
        return judge(self.train, self.runtime.target, self.seed, self.progress)

    def _of_real(self, ruler: Ruler) -> Tensor:
        """Features of the real records."""
        if ruler.text not in self._kept:
            counted = (
                isinstance(self._real, Public) or self._real.spec.size is not None
            )  # else nobody may watch them being counted
            images = self._real._take(self._cut(ruler, self._real._count())).images
            self._kept[ruler.text] = ruler.features(images, self.progress if counted else silent)
        return self._kept[ruler.text]

    def _cut(self, ruler: Ruler, count: int) -> Tensor:
        return self._some(
            count, ON_CPU if self.runtime.target.type != "cuda" and not ruler.prefix else count
        )

    def _some(self, count: int, most: int) -> Tensor:
        """Places of at most so many, at random, since files are often sorted by class."""
        return (
            torch.randperm(count, generator=self._generator())[:most]
            if count > most
            else torch.arange(count)
        )

    def _rulers(self, names: Sequence[str]) -> list[Ruler]:
        rulers = []
        wanted = any(name in FEATURES for name in names)
        if wanted:
            try:
                rulers.append(self._inception)
            except DataError as error:
                if self.weights is not None:
                    raise
                self.notice(f"{error}; the domain_ numbers of a small network are given instead")
        return [*rulers, self._domain] if "domain" in names or (wanted and not rulers) else rulers

    # The measures

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _reading(
        self,
        name: str,
        value: float,
        error: float,
        samples: int,
        ruler: str,
        start: float,
        **more: Any,
    ) -> Reading:
        """Against the real data, all its records unless told otherwise."""
        public = more.pop("public", True) and isinstance(self._real, Public)
        count = more.pop("count", None) or self._real._count()
        return Reading(
            name,
            value,
            error,
            samples,
            self._real.name,
            count,
            public,
            ruler,
            seconds=time.perf_counter() - start,
            **more,
        )

    def _features(self, subject: Subject, names: Sequence[str]) -> list[Reading]:
        """FID, KID, precision and recall by each ruler."""
        found: list[Reading] = []
        for ruler in self._rulers(names):
            start = time.perf_counter()
            domestic = bool(ruler.prefix)
            real = self._of_real(ruler)
            fake = ruler.features(
                subject.images[self._cut(ruler, len(subject.images))], self.progress
            )
            facts: dict[str, Any] = {"count": len(real), "public": ruler.public}
            if "fid" in names or domestic:
                value = frechet(real, fake, self._generator())
                label = "domain_fd" if domestic else "fid"
                few = f"so few images ({len(fake)} samples) raise it"
                warning = ""
                if min(len(real), len(fake)) < FEW:
                    warning = (
                        f"{few}: at least about {value.bias:.2g} of the value is due to that alone"
                    )
                if isinstance(self._real, Public) and warning:
                    self.notice(f"{label}: {warning}")
                elif (
                    len(fake) < FEW
                ):  # by how much, and how many records there are, is for the reading alone
                    self.notice(f"{label}: {few}")
                found.append(
                    self._reading(
                        label,
                        value.value,
                        value.error,
                        len(fake),
                        ruler.text,
                        start,
                        better="lower",
                        warning=warning,
                        **facts,
                    )
                )
            start = time.perf_counter()
            if "kid" in names or domestic:
                distance, error = kernel(real, fake, self._generator())
                label = "domain_kd" if domestic else "kid"
                found.append(
                    self._reading(
                        label,
                        distance,
                        error,
                        len(fake),
                        ruler.text,
                        start,
                        better="lower",
                        **facts,
                    )
                )
            start = time.perf_counter()
            if "precision" in names or domestic:
                near, far = (
                    each[self._some(len(each), NEAR).to(each.device)] for each in (real, fake)
                )
                quality = precision_recall(near, far)
                facts["count"] = len(near)
                for place, name in enumerate(("precision", "recall", "density", "coverage")):
                    text = f"{ruler.text}, k=3"
                    found.append(
                        self._reading(
                            ruler.prefix + name,
                            quality[place],
                            quality[place + 4],
                            len(far),
                            text,
                            start,
                            **facts,
                        )
                    )
        return found

    def _score(self, subject: Subject) -> Reading:
        """The inception score by a judge trained on the real training set."""
        start = time.perf_counter()
        classifier, text = self._judge
        value, error = inception_score(classifier.probabilities(subject.images), self._generator())
        return self._reading("is", value, error, len(subject.images), text, start)

    def _imagenet_score(self, subject: Subject) -> Reading:
        """The inception score by ImageNet's classes; it says little about digits."""
        start = time.perf_counter()
        ruler = self._inception
        assert ruler.probabilities is not None
        images = subject.images[self._cut(ruler, len(subject.images))]
        value, error = inception_score(
            ruler.probabilities(images, self.progress), self._generator()
        )
        took = time.perf_counter() - start
        return Reading(
            "imagenet_is",
            value,
            error,
            len(images),
            "ImageNet",
            0,
            True,
            f"1008 classes of {ruler.text}",
            seconds=took,
        )

    def _transport(self, subject: Subject, names: Sequence[str]) -> list[Reading]:
        """Wasserstein distances between pixels."""
        found = []
        for name in (each for each in ("sliced", "exact") if each in names):
            start = time.perf_counter()
            most = DENSE if name == "exact" else MANY
            real, fake = (
                each[self._some(len(each), most)].flatten(1).to(self.runtime.target)
                for each in (self._real._take(slice(None)).images, subject.images)
            )
            if name == "sliced":
                (value, error) = sliced_wasserstein(real, fake, SLICES, self._generator())
                ruler = f"pixels, {SLICES} directions, order 2"
            else:
                value = exact_wasserstein(real.cpu(), fake.cpu()).value
                ruler = "pixels, order 2"
                error = math.nan  # the programme is exact, the samples are not
            label = f"{name}_wasserstein"
            found.append(
                self._reading(
                    label, value, error, len(fake), ruler, start, better="lower", count=len(real)
                )
            )
        return found
