"""What one owner holds: its own file, or its part of a data set that was dealt to several."""

from __future__ import annotations

from pathlib import Path

from privot.data.dataset import Sensitive
from privot.data.loading import _named, _read, existing, usable
from privot.data.spec import Spec
from privot.errors import DataError, SettingError
from privot.privacy.ledger import Ledger
from privot.privacy.shard_checkpoint import dealing_order


def held_by(box: Sensitive, owner: int, ledger: Ledger) -> Sensitive:
    """Give the records of one of a dataset's owners, sealed, of unknown number.

    Args:
        box: The whole dataset.
        owner: Which of its owners; the first is 0.
        ledger: The dataset's own ledger. Where the owners are not known, records are dealt by a
            secret order that is kept beside it, so that every owner sees the same partition.

    Returns:
        The part of this owner.

    >>> import tempfile
    >>> from privot.data import load
    >>> part = held_by(load("digits", owners=5), 0, Ledger(tempfile.mkdtemp() + "/digits.jsonl"))
    >>> part.name, part.spec.size
    ('digits/owner 0 of 5', None)
    """
    count = box.spec.owners or 1
    if not 0 <= owner < count:
        raise SettingError(f"owner {owner}: there are {count}, counted from 0")
    owners = box._owners
    if owners is None:
        owners = box._owners_by(dealing_order(ledger, box._count()).numpy())
    own = owners == owner
    spec = Spec(box.spec.shape, box.spec.classes, mirror=box.spec.mirror)
    return Sensitive(
        box._images[own], box._labels[own], spec, name=f"{box.name}/owner {owner} of {count}"
    )


def load_own(
    source: str | Path,
    *,
    shape: tuple[int, int, int] | None = None,
    classes: int | None = None,
    label: str = "label",
    resize: int | None = None,
    repair: bool = False,
    class_names: tuple[str, ...] | None = None,
) -> Sensitive:
    """A path as `load` reads it, but of an owner who need not have a record of every class: how many there are is declared.

    With ``class_names``, in the order that owners agreed on, a class folder has the number of its name in them; some may be missing.

    privacy: shape and classes are declared, never read off the records. A server learns them from the terms that an owner refuses, so
    that they must be facts that the owner chose to make public.
    """
    path = existing(str(source))
    if shape is None or (classes is None and class_names is None):
        raise SettingError(
            f"{source}: declare --shape (such as 1x28x28) and --classes or --class-names, as all owners agreed: a server "
            "can find them out from the terms that are refused, so they are not read off the records"
        )
    if classes is None:
        classes = len(class_names or ())
    arrays = _read(path, label=label, resize=resize)
    usable(arrays, source, repair)
    if class_names is not None:
        if arrays.names is None:
            raise DataError(
                f"{source}: no class folders, so --class-names says nothing of its labels; declare --classes"
            )
        arrays = _named(arrays, class_names, classes, str(source))._replace(names=class_names)
    if arrays.names and len(arrays.names) != classes:
        # Folders are numbered in their order, so one that is not there would give the others its number.
        raise DataError(
            f"{source}: {len(arrays.names)} classes by their folders, and {classes} are declared; are some missing? Give --class-names"
        )
    spec = Spec(shape, classes)
    try:
        return Sensitive(
            arrays.images, arrays.labels, spec, repair=repair, name=str(Path(source).resolve())
        )
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
