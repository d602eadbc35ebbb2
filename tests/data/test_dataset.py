"""Spec, Sensitive and Public: what is declared, what is sealed, what is repaired."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch

from privot.data import Public, Sensitive, Spec
from privot.data.dataset import CHECK_CHUNK_SIZE
from privot.data.spec import MAX_IMAGE_SIDE
from privot.data.tabular import SensitiveTable
from privot.errors import DataError

SPEC = Spec((1, 4, 4), 2)
IMAGES = np.random.default_rng(0).random((6, 1, 4, 4), np.float32)
LABELS = np.arange(6) % 2
IN_RECORD_4 = np.arange(6)[:, None, None, None] == 4


@pytest.mark.parametrize(
    "facts",
    [
        {"shape": (3, 5, 6), "size": 7, "class_sizes": (3, 4), "class_names": ("cat", "dog")},
        {"shape": (1, 1, MAX_IMAGE_SIDE)},
        {"shape": (3, MAX_IMAGE_SIDE, 1)},
        {"num_classes": 100_000},
        {"num_classes": 1, "size": 1},
        {"class_sizes": (0, 3)},
        {"size": 4, "num_clients": 4},
        {"num_clients": 10**9},
        {"num_clients": 1},
        {
            "shape": tuple(np.array([1, 4, 4])),
            "num_classes": np.int64(2),
            "size": np.int32(6),
            "class_sizes": tuple(np.array([3, 3])),
        },
    ],
)
def test_spec_goes_through_json(facts):
    spec = Spec(**{"shape": (1, 4, 4), "num_classes": 2, **facts})
    assert Spec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.num_features == spec.shape[0] * spec.shape[1] * spec.shape[2]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"shape": (2, 4, 4)}, "shape"),
        ({"shape": (4, 4, 4)}, "shape"),
        ({"shape": (0, 4, 4)}, "shape"),
        ({"shape": (1, 0, 4)}, "shape"),
        ({"shape": (1, 4, 0)}, "shape"),
        ({"shape": (1, MAX_IMAGE_SIDE + 1, 4)}, "shape"),
        ({"shape": (1, 4, MAX_IMAGE_SIDE + 1)}, "shape"),
        ({"shape": (4, 4)}, "shape"),
        ({"shape": (1.0, 4, 4)}, "shape"),
        ({"shape": (1, 4, 4.5)}, "shape"),
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
        ({"size": 4, "num_clients": 5}, "clients"),
        ({"num_clients": 10**9 + 1}, "clients"),
        ({"num_clients": 0}, "clients"),
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


@pytest.mark.parametrize(
    ("channels", "declared", "flips"),
    [
        (1, None, False),
        (1, True, True),
        (1, False, False),
        (3, None, True),
        (3, True, True),
        (3, False, False),
    ],
)
def test_color_images_may_be_flipped_unless_declared_otherwise(channels, declared, flips):
    assert Spec((channels, 1, 1), 1, flip_invariant=declared).is_flip_invariant is flips


def test_a_table_is_images_of_one_row_and_one_class():
    assert SensitiveTable(np.zeros((5, 3))).spec == Spec((1, 1, 3), 1, 5)


SEALS = {
    "len": len,
    "index": lambda dataset: dataset[0],
    "slice": lambda dataset: dataset[:2],
    "iter": iter,
    "list": list,
    "next": lambda dataset: next(iter(dataset)),
    "bool": bool,
    "if": lambda dataset: 1 if dataset else 0,
    "in": lambda dataset: 1.0 in dataset,
    "reversed": reversed,
    "sorted": sorted,
    "unpack": lambda dataset: (*dataset,),
    "pickle": pickle.dumps,
    "pickle 0": lambda dataset: pickle.dumps(dataset, 0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "asarray": np.asarray,
    "array of floats": lambda dataset: np.array(dataset, float),
    "stack": lambda dataset: np.stack([dataset]),
    "as_tensor": torch.as_tensor,
    "tensor": torch.tensor,
    "vars": vars,
    "json": json.dumps,
    "getstate": lambda dataset: dataset.__getstate__(),
    "reduce": lambda dataset: dataset.__reduce__(),
    "assign": lambda dataset: setattr(dataset, "peek", 1),
    "memoryview": memoryview,
    "bytes": bytes,
}


@pytest.mark.parametrize("way", SEALS)
def test_sensitive_is_sealed(way):
    with pytest.raises((TypeError, AttributeError)):
        SEALS[way](Sensitive(IMAGES, LABELS, SPEC, name="scans"))


def test_texts_of_sensitive_data_are_public_facts():
    dataset = Sensitive(IMAGES, LABELS, SPEC, name="/home/ann/scans.npz")
    other = Sensitive(1 - IMAGES[:4], 1 - LABELS[:4], SPEC, name="elsewhere")
    for write in (repr, str, "{}".format, "{!r:>100}".format):
        assert write(dataset) == write(other)
        assert "Spec(shape=(1, 4, 4), num_classes=2, size=None" in write(dataset)
    assert {name for name in dir(dataset) if not name.startswith("_")} == {"name", "spec"}


def test_public_data_opens():
    dataset = Public(IMAGES, LABELS, SPEC)
    images, labels = dataset.records()
    assert len(dataset) == 6
    assert np.array_equal(images.numpy(), IMAGES)
    assert labels.tolist() == LABELS.tolist()
    assert repr(dataset).startswith("Public(Spec(")


def test_bytes_become_zero_to_one():
    images = (np.arange(6 * 16) % 256).astype(np.uint8).reshape(6, 1, 4, 4)
    floats = Public(images, LABELS, SPEC).records().images
    assert floats.dtype == torch.float32
    assert torch.equal((floats * 255).round().byte(), torch.from_numpy(images))


@pytest.mark.parametrize("kind", [Sensitive, Public])
@pytest.mark.parametrize(
    ("images", "labels", "field"),
    [
        pytest.param(IMAGES[:, :, :3], LABELS, "shape", id="shape"),
        pytest.param(IMAGES[:0], LABELS[:0], "shape", id="no images"),
        pytest.param(IMAGES[0, 0, 0], LABELS, "shape", id="flat"),
        pytest.param(3.0, LABELS, "shape", id="number"),
        pytest.param(IMAGES, LABELS[:5], "labels", id="labels short"),
        pytest.param(IMAGES, LABELS * 1.0, "labels", id="labels float"),
        pytest.param(IMAGES, LABELS[:, None], "labels", id="labels square"),
        pytest.param(IMAGES, LABELS - 1, "labels", id="labels negative"),
        pytest.param(IMAGES, LABELS + 1, "labels", id="label 2"),
        pytest.param(np.where(IN_RECORD_4, np.nan, IMAGES), LABELS, "record 4", id="nan"),
        pytest.param(np.where(IN_RECORD_4, np.inf, IMAGES), LABELS, "record 4", id="infinite"),
        pytest.param(
            np.ma.masked_invalid(np.where(IN_RECORD_4, np.nan, IMAGES)),
            LABELS,
            "record 4",
            id="masked",
        ),
        pytest.param(IMAGES - 0.5, LABELS, "0 to 1", id="dark"),
        pytest.param(IMAGES * 9, LABELS, "0 to 1", id="bright"),
        pytest.param(IMAGES.astype(int), LABELS, "uint8", id="int"),
        pytest.param(IMAGES > 0.5, LABELS, "uint8", id="bool"),
        pytest.param(IMAGES.astype(str), LABELS, "uint8", id="words"),
        pytest.param(IMAGES.astype(object), LABELS, "uint8", id="objects"),
    ],
)
def test_wrong_records_are_refused(images, labels, field, kind):
    with pytest.raises(DataError, match=field):
        kind(images, labels, SPEC)


def test_declared_sizes_are_held():
    Sensitive(IMAGES, LABELS, Spec((1, 4, 4), 2, 6, (3, 3)))
    with pytest.raises(DataError, match="size"):
        Sensitive(IMAGES, LABELS, Spec((1, 4, 4), 2, 7))
    with pytest.raises(DataError, match="class_sizes"):
        Sensitive(IMAGES, LABELS, Spec((1, 4, 4), 2, 6, (2, 4)))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble])
def test_records_are_repaired_one_by_one(kind):
    """A repaired record may not depend on any other record, or neighbours would be further apart than one record."""
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
    with pytest.raises(DataError, match="labels"):
        Public(images, LABELS - 1, SPEC, repair=True)


@pytest.mark.parametrize("value", [0.0, 1.0, -1e-6, 1 + 1e-6, np.nan])
@pytest.mark.parametrize("index", [0, CHECK_CHUNK_SIZE, CHECK_CHUNK_SIZE + 2])
def test_every_record_of_every_chunk_is_checked_or_repaired(value, index):
    images = np.full((CHECK_CHUNK_SIZE + 3, 1, 1, 1), 0.5)
    images[index] = value
    labels = np.zeros(len(images), int)
    spec = Spec((1, 1, 1), 1)
    if value in (0.0, 1.0):
        Sensitive(images, labels, spec)
    else:
        with pytest.raises(DataError, match=f"record {index}" if np.isnan(value) else "0 to 1"):
            Sensitive(images, labels, spec)
    repaired = Public(images, labels, spec, repair=True).records().images.flatten()
    assert repaired[index] == (0 if np.isnan(value) else min(max(value, 0), 1))
    assert (repaired == 0.5).sum() == CHECK_CHUNK_SIZE + 2


def test_records_may_stay_on_disk(tmp_path):
    np.save(tmp_path / "x.npy", IMAGES)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    dataset = Public(mapped, LABELS, SPEC)
    assert np.shares_memory(dataset._images, mapped)
    assert np.array_equal(dataset.records().images.numpy(), IMAGES)
    assert torch.equal(dataset._read_records(torch.tensor([4, 1])).labels, torch.tensor([0, 1]))


def test_what_is_read_is_a_copy():
    """Even the secret side must not be able to change the dataset by writing to what it was handed."""
    images = np.zeros((3, 1, 2, 2), np.uint8)
    dataset = Sensitive(images, np.array([0, 1, 0]), Spec((1, 2, 2), 2))
    records = dataset._read_records(slice(None))
    records.labels.fill_(1)
    records.images.fill_(1)
    assert dataset._read_records(slice(None)).labels.tolist() == [0, 1, 0]
    assert dataset._read_records(slice(None)).images.sum() == 0
