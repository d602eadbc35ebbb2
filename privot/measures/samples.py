"""What is measured: released images and labels, ours or foreign; and the check that the test data was not trained on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from privot.data.dataset import Public, Sensitive
from privot.data.loading import catalogue, load
from privot.errors import DataError, SettingError
from privot.release import Guarantee, NoGuarantee, Release

OVERLAP = 0.01  # of the test records; benchmarks hold a few twins across their splits


@dataclass(frozen=True)
class Subject:
    """Images [count, channels, height, width] in [0, 1] with labels [count]; ``release`` is None for foreign output.

    ``public``: numbers about it may be published, since a guarantee covers it or all that went into it is public anyway.
    ``soft``: the soft labels of a released set that has them, [count, classes], each beside its image.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: int
    class_names: tuple[str, ...] | None = None
    release: Release | None = None
    public: bool = False
    soft: Tensor | None = None

    @property
    def guarantee(self) -> Guarantee | NoGuarantee | None:
        return self.release.guarantee if self.release else None

    @property
    def mirror(self) -> bool | None:
        return self.release.spec.mirror if self.release else None

    @classmethod
    def sampled(
        cls,
        release: Release,
        name: str,
        count: int,
        seed: int = 0,
        device: str | torch.device = "cpu",
        spread: float = 1.0,
    ) -> Subject:
        """Samples of a release. A set of no more than ``count`` images is measured as it is, none of them twice, in its own order."""
        product = release.product
        spec = release.spec
        public = isinstance(release.guarantee, Guarantee) and not release.facts.get("purpose")
        if product.kind == "set" and len(product.tensors["labels"]) <= count and spread == 1:
            drawn = (product.tensors["images"], product.tensors["labels"])
            soft = product.tensors.get("soft")
        else:
            drawn = release.sample(count, seed=seed, device=device, spread=spread)
            soft = product.tensors.get("soft") if product.kind == "set" else None
            soft = None if soft is None else soft[product.places(drawn[1])]
        return cls(name, *drawn, spec.classes, spec.class_names, release, public, soft)

    @classmethod
    def of(
        cls,
        source: str,
        count: int,
        seed: int = 0,
        classes: int | None = None,
        public: bool = False,
        class_names: tuple[str, ...] | None = None,
    ) -> Subject:
        """Samples of a release folder, or foreign output: a folder of class folders, .npz with x and y, .parquet, a built-in's train split.

        Foreign output is cut to ``count`` images, drawn by ``seed``; that numbers about it are ``public`` is for the caller to say, and
        under which ``class_names`` its class folders have their numbers.
        """
        path = Path(source)
        known = source in catalogue()
        if (path / "manifest.json").exists():
            return cls.sampled(Release.load(path), path.resolve().name, count, seed)
        box = load(source, public=True, classes=None if known else classes, class_names=class_names)
        assert isinstance(box, Public)
        records = box.records()
        if len(records.labels) > count:
            chosen = torch.randperm(
                len(records.labels), generator=torch.Generator().manual_seed(seed)
            )[:count]
            records = type(records)(records.images[chosen], records.labels[chosen])
        name = source if known else path.resolve().name if path.is_dir() else path.resolve().stem
        return cls(name, *records, box.spec.classes, box.spec.class_names, public=public or known)


def refuse_overlap(
    test: Sensitive | Public, trained: Sensitive | Public | Tensor, what: str
) -> None:
    """Refuse a test set of which records, by content, were trained on: its numbers would be no test at all.

    >>> digits = load("digits", public=True)
    >>> refuse_overlap(load("digits", "test", public=True), digits, "the training data")
    >>> refuse_overlap(digits, digits, "the training data")
    Traceback (most recent call last):
    privot.errors.DataError: the test data overlaps the training data: test on records that were not trained on
    """
    seen = _digests(trained if isinstance(trained, Tensor) else trained._take(slice(None)).images)
    tested = _digests(test._take(slice(None)).images)
    if sum(each in seen for each in tested) > OVERLAP * len(tested):
        raise DataError(f"the test data overlaps {what}: test on records that were not trained on")


def _digests(images: Tensor) -> set[bytes]:
    """Of the 8-bit pixels of each image."""
    pixels = (images.clamp(0, 1) * 255).round().byte().flatten(1).numpy()
    return {hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in pixels}


def matching(subject: Subject, test: Sensitive | Public) -> None:
    """Refuse a test set of other images or classes."""
    if tuple(subject.images.shape[1:]) != test.spec.shape or subject.classes > test.spec.classes:
        ours, theirs = (
            "x".join(map(str, shape)) for shape in (subject.images.shape[1:], test.spec.shape)
        )
        known = f"{theirs} and {test.spec.classes} classes"
        raise SettingError(
            f"{subject.name} has images of {ours} and {subject.classes} classes, the test data of {known}"
        )
    same_names(subject.name, subject.class_names, "the test data", test.spec.class_names)


def same_names(
    one: str, names: tuple[str, ...] | None, other: str, others: tuple[str, ...] | None
) -> None:
    """Refuse class names, where both know any, of which one stands for another number here than there."""
    for place, (name, known) in enumerate(zip(names or (), others or (), strict=False)):
        if name != known:
            raise SettingError(
                f"class {place} is {name!r} in {one}, but {known!r} in {other}: the same classes, named alike, are needed"
            )


def trained_on(subject: Subject) -> Sensitive | Public | None:
    """The data a release was trained on, where that is a built-in and at hand."""
    name = subject.release.facts.get("data") if subject.release else None
    if not isinstance(name, str) or name not in catalogue():
        return None
    try:
        return load(name)
    except DataError:
        return None
