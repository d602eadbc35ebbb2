"""From a name or a path to a box: built-ins by the catalogue, anything else by its ending."""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from privot.data import readers
from privot.data.dataset import CHECKED, Public, Sensitive
from privot.data.spec import LARGEST, Spec
from privot.errors import DataError, SettingError
from privot.io import fetch, find, home


@cache
def catalogue() -> dict[str, Any]:
    """The built-in data sets."""
    return tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text())


def describe(
    source: str,
    split: str = "train",
    *,
    shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    owners: int | None = None,
    size: int | None = None,
    class_sizes: tuple[int, ...] | None = None,
) -> Spec:
    """What is public about a data set, without reading a record of it; ``size`` and ``class_sizes`` if declared. ``owners``: see `load`.

    >>> describe("mnist").size
    60000
    """
    if class_sizes:
        size = size or sum(class_sizes)
        classes = len(class_sizes) if classes is None else classes
    if entry := catalogue().get(source):
        if split not in ("train", "test"):
            raise SettingError(f"split={split!r}: train or test")
        part = entry[split]
        found: dict[str, Any] = next(
            (each for each in part.get("files", []) if find(source, each["path"])), {}
        )
        if shape not in (None, tuple(entry["shape"])) or classes not in (None, entry["classes"]):
            known = "x".join(map(str, entry["shape"]))
            raise SettingError(
                f"{source} has {known} pixels and {entry['classes']} classes, not those declared: declare these, or none"
            )
        facts = {key: entry.get(key) for key in ("shape", "classes", "class_names", "mirror")}
        counts = {"size": size or found.get("size", part["size"]), "class_sizes": class_sizes}
        return Spec.from_json(facts | counts | {"owners": owners or part.get("owners")})
    existing(source)
    if shape is None or classes is None:
        raise SettingError(
            f"{source}: no record is read for this, so declare --shape (such as 1x28x28) and --classes"
        )
    return Spec(shape, classes, size, class_sizes, owners=owners)


def load(
    source: str | Path,
    split: str = "train",
    *,
    public: bool = False,
    shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    public_size: bool = False,
    label: str = "label",
    resize: int | None = None,
    repair: bool = False,
    download: bool = False,
    mirror: bool | None = None,
    public_classes: bool = False,
    owners: int | None = None,
    class_names: tuple[str, ...] | None = None,
) -> Sensitive | Public:
    """Read a built-in data set (``digits``, ``mnist``, ...) or a path (IDX, .npz, folder of class folders, .parquet) into a box.

    Shape and number of classes become public facts; if they are declared here, the records must agree. The size of a path's
    data is secret unless ``public_size``, and how many records a class has unless ``public_classes``. ``mirror`` of a built-in is
    known (see `Spec`). ``owners`` has the gate deal the records to so many, in a secret order; of femnist the writers are known.
    ``class_names`` in their order (or none: ``()``), where classes have numbers already: class folders are then the same ones.

    >>> load("digits").spec.shape
    (1, 8, 8)
    """
    source = str(source)
    name = source if split == "train" else f"{source}/{split}"
    known = (
        describe(source, split, shape=shape, classes=classes, owners=owners)
        if source in catalogue()
        else None
    )
    if resize is not None and (known or not 1 <= resize <= LARGEST):
        raise SettingError(
            f"resize={resize}: 1 to {LARGEST} pixels a side, and built-in data sets are not resized"
        )
    if known:
        arrays = _builtin(source, split, download)
    else:
        name = str(existing(source).resolve())
        arrays = _read(Path(source), label=label, resize=resize)
        arrays = _named(arrays, class_names, classes, source)
    usable(arrays, source, repair)
    counted = (
        classes
        if classes is not None
        else len(arrays.names)
        if arrays.names
        else int(arrays.labels.max()) + 1
    )
    try:
        size = len(arrays.images) if public_size else None
        spec = known or Spec(
            shape or arrays.images.shape[1:],
            counted,
            size,
            class_names=arrays.names,
            mirror=mirror,
            owners=owners,
        )
        if public_classes:
            sizes = tuple(np.bincount(arrays.labels, minlength=spec.classes).tolist())
            spec = dataclasses.replace(spec, size=len(arrays.images), class_sizes=sizes)
        held = None if owners else arrays.owners
        box = (Public if public else Sensitive)(
            arrays.images, arrays.labels, spec, repair=repair, name=name, owners=held
        )
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
    if len(missing := np.flatnonzero(np.bincount(box._labels, minlength=spec.classes) == 0)):
        mend = "number them from 0 without gaps (numpy.unique(labels, return_inverse=True)[1]), or leave out empty classes"
        which = repr(spec.class_names[missing[0]]) if spec.class_names else missing[0]
        raise DataError(
            f"{source}: class {which} has no records" + ("" if spec.class_names else f"; {mend}")
        )
    return box


def _named(
    arrays: readers.Arrays, known: tuple[str, ...] | None, classes: int | None, source: str
) -> readers.Arrays:
    """Class folders by their names, not by their place among those that are there; names that are but the numbers 0, 1, 2, ... are none."""
    names = arrays.names
    if not names:
        return arrays
    plain = all(each.isdecimal() for each in names) and [int(each) for each in names] == list(
        range(len(names))
    )
    if known is None or (plain and known and not any(each.isdecimal() for each in known)):
        return arrays._replace(names=None) if plain else arrays
    if not known:
        if not all(
            each.isdecimal() for each in names
        ):  # names on one side alone: there is nothing to hold them against
            return arrays
        known = tuple(map(str, range(classes or len(names))))
        names = tuple(str(int(each)) for each in names)
    if strange := [each for each in names if each not in known]:
        raise DataError(
            f"{source}: class {strange[0]!r} is none of those that are known here: {', '.join(known)[:200]}"
        )
    labels = np.array([known.index(each) for each in names])[arrays.labels]
    return arrays._replace(
        labels=labels, names=known if known != tuple(map(str, range(len(known)))) else None
    )


def _fits(images: np.ndarray) -> bool:
    """Whether a repair would clip no more than half of the images: it is for those that stray."""
    strays = 0
    for start in range(0, len(images) if images.dtype.kind == "f" else 0, CHECKED):
        part = images[start : start + CHECKED]
        strays += int(((part < 0) | (part > 1)).any(axis=tuple(range(1, part.ndim))).sum())
    return 2 * strays <= len(images)


def usable(arrays: readers.Arrays, source: Any, repair: bool) -> None:
    """Refuse what no declaration can mend, and say what does: labels that are no whole numbers, a repair of images of another scale."""
    labels = arrays.labels
    if labels.size == 0:
        raise DataError(f"{source}: there are no labels in it")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        mend = "number the classes 0, 1, 2, ... (numpy.unique(labels, return_inverse=True)[1])"
        if labels.ndim == 2 and labels.shape[1] > 1:
            mend = "if each row has one number for each class (one-hot), take labels.argmax(1)"
        elif labels.ndim == 2:
            mend = "take its only column: labels[:, 0]"
        raise DataError(
            f"{source}: labels are {labels.dtype} {list(labels.shape)}, and a whole number for each image is needed: {mend}"
        )
    if repair and not _fits(arrays.images):
        raise DataError(
            f"{source}: most images go outside 0 to 1, so they are of another scale, and --repair would spoil them: divide by 255 if they "
            "go to 255, or save them as uint8"
        )


def existing(source: str) -> Path:
    """A file or folder that is there, or a refusal that suggests the nearest built-in."""
    if not (
        os.path.isfile(source) or os.path.isdir(source)
    ):  # of the pathlib twins one raises when a name is too long
        near = difflib.get_close_matches(source, catalogue(), 1)
        hint = (
            f"; did you mean {near[0]!r}?"
            if near
            else f" and no built-in data set ({', '.join(catalogue())})"
        )
        raise DataError(f"{source}: no such file or folder{hint}")
    return Path(source)


def _read(
    path: Path, label: str = "label", where: Any = None, resize: int | None = None, **held: str
) -> readers.Arrays:
    if path.is_dir():
        return readers.read_folder(path, resize)
    if path.suffix == ".parquet":
        return readers.read_parquet(path, label, where, resize)
    if resize:
        raise SettingError(
            f"resize={resize}: only a folder or a parquet of encoded images is resized, not {path.name}"
        )
    if path.suffix == ".npz":
        return readers.read_npz(path, where, **held)
    if path.suffix == ".safetensors":
        raise DataError(
            f"{path}: privatized records, not images: privot synthesize learns from them"
        )
    if "idx3" in path.name:
        return readers.read_idx_pair(path)
    raise DataError(
        f"{path}: unknown format; an IDX images file, .npz, .parquet or a folder of class folders is read"
    )


def _builtin(source: str, split: str, download: bool) -> readers.Arrays:
    if source == "digits":
        return _digits(split)
    known = catalogue()[source][split]["files"]
    for entry in known:
        path = find(source, entry["path"])
        if not path and download and "sha256" in entry:
            labels = readers.labels_beside(entry["path"])
            path = fetch(
                source,
                catalogue()[source]["url"],
                {labels: entry["labels"], entry["path"]: entry["sha256"]},
            )
        if path:
            where = tuple(entry["where"]) if "where" in entry else None
            arrays = _read(
                path,
                entry.get("label", "label"),
                where,
                **{key: entry[key] for key in ("owner", "whole") if key in entry},
            )
            return arrays._replace(images=255 - arrays.images) if entry.get("invert") else arrays
    how = "pass --download to fetch it, or " if "sha256" in known[0] else ""
    raise DataError(
        f"{source}: not found; {how}put {known[0]['path']} into {home(source)} (PRIVOT_DATA names the folder)"
    )


def _digits(split: str) -> readers.Arrays:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    chosen = (np.arange(len(labels)) % 5 == 4) == (split == "test")
    return readers.Arrays(
        (images[chosen] / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels[chosen]
    )
