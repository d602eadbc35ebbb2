"""Spec, Sensitive and Public: what is declared, what is sealed, what is mended."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch

from privot.data import Public, Sensitive, Spec
from privot.errors import DataError

SPEC = Spec((1, 4, 4), 2)
IMAGES = np.random.default_rng(0).random((6, 1, 4, 4), np.float32)
LABELS = np.arange(6) % 2


def test_spec_goes_through_json():
    spec = Spec((3, 5, 6), 2, 7, (3, 4), ("cat", "dog"))
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.num_features == 90
    assert (spec.to_json()["shape"], spec.to_json()["class_names"]) == (
        [3, 5, 6],
        ["cat", "dog"],
    )  # lists, as JSON has them


def test_spec_takes_the_whole_numbers_of_numpy_and_gives_python_ones():
    spec = Spec(tuple(np.array([1, 4, 4])), np.int64(2), np.int32(6), tuple(np.array([3, 3])))
    assert json.loads(json.dumps(spec.to_json()))["class_sizes"] == [3, 3]
    assert spec == Spec((1, 4, 4), 2, 6, (3, 3))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"shape": (2, 4, 4)}, "shape"),
        ({"shape": (1, 0, 4)}, "shape"),
        ({"shape": (1, 4097, 4)}, "shape"),
        ({"shape": (4, 4)}, "shape"),
        ({"shape": (1.0, 4, 4)}, "shape"),
        ({"shape": None}, "shape"),
        ({"shape": "abc"}, "shape"),
        ({"num_classes": 0}, "classes"),
        ({"num_classes": 100_001}, "classes"),
        ({"num_classes": 2.5}, "counts"),
        ({"num_classes": None}, "counts"),
        ({"size": 0}, "at least one record"),
        ({"size": -1}, "at least one record"),
        ({"size": 1.5}, "counts"),
        ({"class_sizes": (1,)}, "class_sizes"),
        ({"class_sizes": (1, -1)}, "class_sizes"),
        ({"class_sizes": (1, 0.5)}, "counts"),
        ({"class_names": ("a",)}, "class_names"),
    ],
)
def test_spec_refuses(wrong, field):
    with pytest.raises(DataError, match=field):
        Spec(**{"shape": (1, 4, 4), "num_classes": 2, **wrong})
    with pytest.raises(DataError):
        Spec.from_json({"shape": [1, 4, 4], "num_classes": 2, **wrong})


@pytest.mark.parametrize(
    "value",
    [None, 3, [], {}, {"shape": [1, 4, 4]}, {"shape": [1, 4, 4], "num_classes": 2, "more": 1}],
)
def test_spec_from_anything_else(value):
    with pytest.raises(DataError):
        Spec.from_json(value)


SEALS = {
    "len": len,
    "index": lambda box: box[0],
    "slice": lambda box: box[:2],
    "iter": iter,
    "list": list,
    "next": lambda box: next(iter(box)),
    "bool": bool,
    "if": lambda box: 1 if box else 0,
    "in": lambda box: 1.0 in box,
    "reversed": reversed,
    "sorted": sorted,
    "unpack": lambda box: (*box,),
    "pickle": pickle.dumps,
    "pickle 0": lambda box: pickle.dumps(box, 0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "asarray": np.asarray,
    "array of floats": lambda box: np.array(box, float),
    "stack": lambda box: np.stack([box]),
    "as_tensor": torch.as_tensor,
    "tensor": torch.tensor,
    "vars": vars,
    "json": json.dumps,
    "getstate": lambda box: box.__getstate__(),
    "reduce": lambda box: box.__reduce__(),
    "assign": lambda box: setattr(box, "peek", 1),
    "memoryview": memoryview,
    "bytes": bytes,
}


@pytest.mark.parametrize("way", SEALS)
def test_sensitive_is_sealed(way):
    box = Sensitive(IMAGES, LABELS, SPEC, name="scans")
    with pytest.raises((TypeError, AttributeError)):
        SEALS[way](box)


def test_the_words_of_a_box_are_public_facts():
    box = Sensitive(IMAGES, LABELS, SPEC, name="/home/ann/scans.npz")
    other = Sensitive(1 - IMAGES[:4], 1 - LABELS[:4], SPEC, name="elsewhere")
    for say in (repr, str, "{}".format, lambda each: f"{each!r:>100}"):
        assert say(box) == say(other)
        assert "Spec(shape=(1, 4, 4), num_classes=2, size=None" in say(box)
    assert not [
        name for name in dir(box) if not name.startswith("_") and name not in ("name", "spec")
    ]


def test_public_opens():
    box = Public(IMAGES, LABELS, SPEC)
    images, labels = box.records()
    assert len(box) == 6
    assert np.array_equal(images.numpy(), IMAGES)
    assert labels.tolist() == LABELS.tolist()
    assert repr(box).startswith("Public(Spec(")


def test_bytes_become_zero_to_one():
    images = (np.arange(6 * 16) % 256).astype(np.uint8).reshape(6, 1, 4, 4)
    found = Public(images, LABELS, SPEC).records().images
    assert found.dtype == torch.float32
    assert torch.equal((found * 255).round().byte(), torch.from_numpy(images))


WRONG = {
    "shape": (IMAGES[:, :, :3], LABELS, "shape"),
    "no images": (IMAGES[:0], LABELS[:0], "shape"),
    "flat": (IMAGES[0, 0, 0], LABELS, "shape"),
    "number": (3.0, LABELS, "shape"),
    "labels short": (IMAGES, LABELS[:5], "labels"),
    "labels float": (IMAGES, LABELS * 1.0, "labels"),
    "labels square": (IMAGES, LABELS[:, None], "labels"),
    "labels negative": (IMAGES, LABELS - 1, "labels"),
    "label 2": (IMAGES, LABELS + 1, "labels"),
    "nan": (np.where(np.arange(6)[:, None, None, None] == 4, np.nan, IMAGES), LABELS, "record 4"),
    "infinite": (
        np.where(np.arange(6)[:, None, None, None] == 5, np.inf, IMAGES),
        LABELS,
        "record 5",
    ),
    "dark": (IMAGES - 0.5, LABELS, "0 to 1"),
    "bright": (IMAGES * 9, LABELS, "0 to 1"),
    "int": (IMAGES.astype(int), LABELS, "uint8"),
    "bool": (IMAGES > 0.5, LABELS, "uint8"),
    "words": (IMAGES.astype(str), LABELS, "uint8"),
    "objects": (IMAGES.astype(object), LABELS, "uint8"),
}


@pytest.mark.parametrize("kind", [Sensitive, Public])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_records_are_refused(name, kind):
    images, labels, field = WRONG[name]
    with pytest.raises(DataError, match=field):
        kind(images, labels, SPEC)


def test_a_mask_does_not_hide_a_record_from_the_check():
    hidden = np.ma.masked_invalid(np.where(np.arange(6)[:, None, None, None] == 4, np.nan, IMAGES))
    with pytest.raises(DataError, match="record 4"):
        Sensitive(hidden, LABELS, SPEC)


def test_declared_sizes_are_held():
    Sensitive(IMAGES, LABELS, Spec((1, 4, 4), 2, 6, (3, 3)))
    with pytest.raises(DataError, match="size"):
        Sensitive(IMAGES, LABELS, Spec((1, 4, 4), 2, 7))
    with pytest.raises(DataError, match="class_sizes"):
        Sensitive(IMAGES, LABELS, Spec((1, 4, 4), 2, 6, (2, 4)))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble])
def test_repair_mends_record_by_record(kind):
    images = IMAGES.astype(kind)
    images[1, 0, 0, 0] = np.nan
    images[2, 0, 3, 3] = -np.inf
    images[3] = images[3] * 9 - 4
    images[4] = np.finfo(kind).max
    found = Public(images, LABELS, SPEC, repair=True).records().images.numpy()
    assert (found[1:3] == 0).all()  # a record that is not finite turns black as a whole
    assert np.array_equal(found[3], np.clip(images[3], 0, 1).astype(np.float32))
    assert (found[4] == 1).all()
    assert np.array_equal(found[[0, 5]], images[[0, 5]].astype(np.float32))
    assert np.isnan(images[1, 0, 0, 0])  # the owner's array is left alone


def test_repair_changes_nothing_else():
    """A repaired record may not depend on any other record, or neighbours would be further apart than one record."""
    images = IMAGES.copy()
    images[0] = np.nan
    sick, well = (
        Public(each, LABELS, SPEC, repair=True).records().images for each in (images, IMAGES)
    )
    assert torch.equal(sick[1:], well[1:])
    with pytest.raises(DataError, match="labels"):
        Public(images, LABELS - 1, SPEC, repair=True)


def test_the_check_goes_in_portions(monkeypatch):
    monkeypatch.setattr("privot.data.dataset.CHECK_CHUNK_SIZE", 4)
    images = IMAGES.copy()
    images[5] = np.nan
    with pytest.raises(DataError, match="record 5"):
        Sensitive(images, LABELS, SPEC)
    assert (Public(images, LABELS, SPEC, repair=True).records().images[5] == 0).all()


def test_records_may_stay_on_disk(tmp_path):
    np.save(tmp_path / "x.npy", IMAGES)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    box = Public(mapped, LABELS, SPEC)
    assert np.shares_memory(box._images, mapped)
    assert np.array_equal(box.records().images.numpy(), IMAGES)
    assert torch.equal(box._read_records(torch.tensor([4, 1])).labels, torch.tensor([0, 1]))


def test_what_is_taken_is_a_copy():
    """Even the secret side must not be able to change the box by writing to what it was handed."""
    box = Sensitive(np.zeros((3, 1, 2, 2), np.uint8), np.array([0, 1, 0]), Spec((1, 2, 2), 2))
    taken = box._read_records(slice(None))
    taken.labels.fill_(1)
    taken.images.fill_(1)
    assert box._read_records(slice(None)).labels.tolist() == [0, 1, 0]
    assert box._read_records(slice(None)).images.sum() == 0
