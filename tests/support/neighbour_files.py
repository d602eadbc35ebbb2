"""Data sets as files, one way for each reader, and neighbouring data sets made by changing the files.

A data set is a list of entries (name, image, label). A folder has one PNG for each, ``<label>/<name>.png``; the other formats have
one row for each, in the order of the names. So a name decides where a reader finds a record, as it does for a data owner.
"""

import dataclasses
import io

import numpy as np
from PIL import Image

from privot.data.dataset import Sensitive
from privot.data.readers import read_arrays

READERS = ("folder", "idx", "npz", "parquet")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One record of a data set of files: its name, an image uint8 [height, width], a label."""

    name: str
    image: np.ndarray
    label: int


def make_entries(images, labels):
    """Entries named 0000, 0001, ... of images uint8 [count, height, width]."""
    return [
        Entry(f"{place:04d}", image, int(label))
        for place, (image, label) in enumerate(zip(images, labels, strict=True))
    ]


def _edited(entries, place, **change):
    return [
        dataclasses.replace(each, **change) if number == place else each
        for number, each in enumerate(entries)
    ]


def _moved(entries, place=1):
    """To the next class: the file goes to another folder, or the row gets another label."""
    classes = max(each.label for each in entries) + 1
    return _edited(entries, place, label=(entries[place].label + 1) % classes)


def _swapped(entries, one=0, other=4):
    return [
        dataclasses.replace(
            each, name={one: entries[other].name, other: entries[one].name}.get(number, each.name)
        )
        for number, each in enumerate(entries)
    ]


def _replaced(entries):
    """One record leaves, and another one, of another class and with another name, comes."""
    return _edited(_edited(_moved(entries, 2), 2, name="zzz"), 2, image=255 - entries[2].image)


# How a data set of files becomes its neighbour: (relation, the change of the entries). With "same" no record is another one.
CHANGES = {
    "one renamed": ("same", lambda entries: _edited(entries, 0, name="zzz")),
    "two swapped": ("same", _swapped),
    "one moved to another class": ("replace", _moved),
    "one changed": ("replace", lambda entries: _edited(entries, 3, image=255 - entries[3].image)),
    "one replaced": ("replace", _replaced),
    "one added first": (
        "add-remove",
        lambda entries: [
            *entries,
            dataclasses.replace(entries[5], name="----", image=255 - entries[5].image),
        ],
    ),
    "one added last": (
        "add-remove",
        lambda entries: [
            *entries,
            dataclasses.replace(entries[5], name="zzz", image=255 - entries[5].image),
        ],
    ),
    "one removed": ("add-remove", lambda entries: entries[:1] + entries[2:]),
}


def write_entries(reader, path, entries):
    """Write entries for a reader, and give what is to be read."""
    rows = sorted(entries, key=lambda each: each.name)
    if reader == "folder":
        for each in rows:
            (path / str(each.label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(each.image).save(path / str(each.label) / f"{each.name}.png")
        return path
    path.mkdir(parents=True)
    images = np.stack([each.image for each in rows])
    labels = np.array([each.label for each in rows])
    if reader == "idx":
        for name, array in (
            ("images-idx3-ubyte", images),
            ("labels-idx1-ubyte", labels.astype(np.uint8)),
        ):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (path / name).write_bytes(head + array.tobytes())
        return path / "images-idx3-ubyte"
    if reader == "npz":
        np.savez(path / "data.npz", x=images, y=labels)
        return path / "data.npz"
    import pyarrow
    from pyarrow import parquet

    encoded = [io.BytesIO() for _ in rows]
    for each, stream in zip(rows, encoded, strict=True):
        Image.fromarray(each.image).save(stream, "PNG")
    parquet.write_table(
        pyarrow.table({"image": [each.getvalue() for each in encoded], "label": labels}),
        path / "data.parquet",
    )
    return path / "data.parquet"


def read_entries(source, spec, name="files"):
    """What a reader makes of it, sealed, as it was declared."""
    arrays = read_arrays(source)
    return Sensitive(arrays.images, arrays.labels, spec, name=name)


def _contents(box):
    """Every record as bytes, in the order in which the reader found it."""
    return [
        image.tobytes() + bytes([label])
        for image, label in zip(box._images, box._labels, strict=True)
    ]


def coupled_orders(first, second):
    """Secret orders of two data sets, as likely as any others, under which all equal records have equal positions.

    Records that are in one of them alone get the same position, or the last one where the other data set has no record for it.
    """
    here = _contents(first)
    there = _contents(second)
    places = {}
    for place, content in enumerate(there):
        places.setdefault(content, []).append(place)
    partners = [places[content].pop() if places.get(content) else None for content in here]
    alone = [place for place, each in enumerate(partners) if each is None]
    strangers = sorted(place for each in places.values() for place in each)
    common = [place for place, each in enumerate(partners) if each is not None]
    rng = np.random.default_rng(len(here))
    common = rng.permutation(common).tolist()
    left = list(common)
    right = [partners[place] for place in common]
    if alone and strangers:  # one record in the place of another: at any position
        where = int(rng.integers(len(common) + 1))
        left[where:where] = alone
        right[where:where] = strangers
    else:
        left = left + alone
        right = right + strangers
    return np.array(left), np.array(right)
