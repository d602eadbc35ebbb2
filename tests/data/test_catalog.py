"""The catalogue: what is said of a data set without reading it, what is found where, and what is fetched."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pooch
import pytest

from privot import io as files
from privot.data import (
    Public,
    Sensitive,
    catalog,
    describe_dataset,
    load_catalog,
    load_dataset,
    loading,
)
from privot.errors import DataError, SettingError


@pytest.fixture
def split_at_hand(data_file):
    """Skip, and say so, unless one of the files of a split is there."""

    def check(source, split):
        names = [each["path"] for each in load_catalog()[source][split].get("files", [])] or [split]
        data_file(
            source, next((name for name in names if files.find_data_file(source, name)), names[0])
        )

    return check


BUILT_IN = [
    (source, split)
    for source in load_catalog()
    for split in ("train", "test")
    if source != "digits"
]


@pytest.mark.parametrize(("source", "split"), BUILT_IN)
def test_built_in(source, split, split_at_hand):
    split_at_hand(source, split)
    box = load_dataset(source, split)
    told = describe_dataset(source, split)
    assert isinstance(box, Sensitive)
    assert box.spec == told
    assert box._count_records() == told.size
    assert box.name == (source if split == "train" else f"{source}/test")
    images, labels = box._read_records(slice(0, 500))
    assert images.shape[1:] == told.shape
    assert 0 <= images.min() < 0.1
    assert 0.9 < images.max() <= 1
    assert labels.max() < told.num_classes


@pytest.mark.parametrize(
    ("source", "mean", "deviation"), [("mnist", 0.1307, 0.3081), ("fashion-mnist", 0.2860, 0.3530)]
)
def test_the_pictures_are_the_published_ones(source, mean, deviation, split_at_hand):
    split_at_hand(source, "train")
    box = load_dataset(source, public=True)
    assert isinstance(box, Public)
    images = box.records().images
    assert images.mean().item() == pytest.approx(mean, abs=1e-4)
    assert images.std().item() == pytest.approx(deviation, abs=1e-4)


def test_what_may_be_mirrored_is_declared(tmp_path):
    assert describe_dataset("fashion-mnist").flip_invariant is True
    assert describe_dataset("svhn").flip_invariant is False  # colour, but digits
    assert (
        describe_dataset("mnist").flip_invariant
        is describe_dataset("cifar10").flip_invariant
        is None
    )
    np.savez(tmp_path / "own.npz", x=np.zeros((4, 8, 8), np.uint8), y=np.arange(4) % 2)
    assert [
        load_dataset(tmp_path / "own.npz", flip_invariant=each).spec.flip_invariant
        for each in (None, True, False)
    ] == [None, True, False]


def test_femnist_is_white_on_black(split_at_hand):
    split_at_hand("femnist", "test")
    assert load_dataset("femnist", "test")._read_records(slice(0, 500)).images.mean() < 0.3


def test_digits_are_embedded_and_their_splits_are_apart():
    train, test = (load_dataset("digits", split, public=True) for split in ("train", "test"))
    assert (
        (len(train), len(test))
        == (describe_dataset("digits").size, describe_dataset("digits", "test").size)
        == (1438, 359)
    )
    seen = {each.numpy().tobytes() for each in train.records().images}
    assert sum(each.numpy().tobytes() in seen for each in test.records().images) == 0


def test_the_catalogue_is_sound():
    for source, entry in load_catalog().items():
        for split in ("train", "test"):
            spec = describe_dataset(source, split)
            assert spec.size
            assert spec.shape == tuple(entry["shape"])
            for file in entry[split].get("files", []):
                assert ("sha256" in file) == ("labels" in file)
                assert "sha256" not in file or entry["url"].startswith("http")


def test_describe_reads_no_record(monkeypatch):
    for name in ("read_idx", "read_npz", "read_parquet", "read_folder"):
        monkeypatch.setattr(f"privot.data.readers.{name}", None)
    for module in ("parquet", "image_folder"):
        monkeypatch.setattr(f"privot.data.{module}.decode_image", None)
    for source in load_catalog():
        assert describe_dataset(source).size
    assert describe_dataset(__file__, shape=(1, 8, 8), num_classes=3).size is None


def test_describe_of_a_path_needs_declarations():
    for declared in ({}, {"shape": (1, 8, 8)}, {"num_classes": 3}):
        with pytest.raises(SettingError, match="--shape"):
            describe_dataset(__file__, **declared)
    with pytest.raises(DataError, match="no such file"):
        describe_dataset("nothing.npz", shape=(1, 8, 8), num_classes=3)


@pytest.mark.parametrize("wrong", [{"shape": (1, 28, 28)}, {"num_classes": 9}, {"resize": 16}])
def test_a_built_in_is_what_it_is(wrong):
    with pytest.raises(SettingError):
        load_dataset("digits", **wrong)
    assert load_dataset("digits", shape=(1, 8, 8), num_classes=10).spec == describe_dataset(
        "digits"
    )


def test_a_split_is_train_or_test():
    for look in (load_dataset, describe_dataset):
        with pytest.raises(SettingError, match="train or test"):
            look("digits", "validation")


def test_a_missing_data_set_says_where_to_put_it(empty_data_folders):
    with pytest.raises(DataError) as told:
        load_dataset("mnist")
    assert str(told.value) == (
        f"mnist: not found. Pass --download to fetch it, or put train-images-idx3-ubyte.gz into {empty_data_folders}/data/mnist "
        "(PRIVOT_DATA names the folder)."
    )
    with pytest.raises(DataError, match=r"^svhn: not found\. Put train.npz into"):
        load_dataset("svhn", download=True)  # without a checksum nothing is fetched


def test_folders_are_looked_through_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVOT_DATA", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert files.list_data_folders()[:2] == [tmp_path / "a", tmp_path / "b" / "privot"]
    monkeypatch.delenv("PRIVOT_DATA")
    assert files.list_data_folders()[0] == tmp_path / "b" / "privot"


def tiny_mnist(monkeypatch):
    """Stand-ins for the files of MNIST, with a catalogue that knows them."""
    images = np.zeros((10, 28, 28), np.uint8)
    labels = np.arange(10, dtype=np.uint8)
    files = {}
    for name, array in (
        ("train-images-idx3-ubyte.gz", images),
        ("train-labels-idx1-ubyte.gz", labels),
    ):
        files[name] = gzip.compress(
            bytes([0, 0, 8, array.ndim])
            + struct.pack(f">{array.ndim}I", *array.shape)
            + array.tobytes()
        )
    sums = [hashlib.sha256(files[name]).hexdigest() for name in sorted(files)]
    entry = {"path": "train-images-idx3-ubyte.gz", "sha256": sums[0], "labels": sums[1]}
    known = {"mnist": {**load_catalog()["mnist"], "train": {"size": 10, "files": [entry]}}}
    for module in (catalog, loading):
        monkeypatch.setattr(module, "load_catalog", lambda: known)
    return files


def test_download_fetches_by_checksum_and_only_once(empty_data_folders, monkeypatch):
    files = tiny_mnist(monkeypatch)
    asked = []

    def retrieve(url, known_hash, fname, path):
        asked.append(url)
        assert url == load_catalog()["mnist"]["url"] + fname
        assert known_hash == "sha256:" + hashlib.sha256(files[fname]).hexdigest()
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / fname).write_bytes(files[fname])

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(DataError, match="--download"):
        load_dataset("mnist")
    assert asked == []  # never unasked
    assert load_dataset("mnist", download=True).spec.size == 10
    assert len(asked) == 2
    assert load_dataset("mnist", download=True)._count_records() == 10
    assert len(asked) == 2


@pytest.mark.parametrize(
    "failure", [OSError("no network"), ValueError("wrong sum"), ConnectionError(), RuntimeError()]
)
def test_a_failed_download_is_one_line(empty_data_folders, monkeypatch, failure):
    tiny_mnist(monkeypatch)

    def retrieve(*_, **__):
        raise failure

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(DataError, match=f"{type(failure).__name__}.*by hand"):
        load_dataset("mnist", download=True)


def test_a_file_of_another_size_is_refused(empty_data_folders, monkeypatch):
    files = tiny_mnist(monkeypatch)
    loading.load_catalog()["mnist"]["train"]["size"] = 11
    (empty_data_folders / "cache" / "mnist").mkdir(parents=True)
    for name, data in files.items():
        (empty_data_folders / "cache" / "mnist" / name).write_bytes(data)
    with pytest.raises(DataError, match="declared size"):
        load_dataset("mnist")


def test_femnist_has_its_writers(split_at_hand):
    split_at_hand("femnist", "train")
    box = load_dataset("femnist")
    assert box.spec.num_clients == describe_dataset("femnist").num_clients == 300
    many = np.bincount(box._client_ids)
    assert (len(many), many.min(), many.max(), many.sum()) == (300, 2, 319, 41258)
    assert load_dataset("femnist", num_clients=3000)._client_ids is None  # for the gate to deal


def test_any_data_can_be_dealt_to_owners():
    box = load_dataset("digits", num_clients=5)
    assert box.spec.num_clients == describe_dataset("digits", num_clients=5).num_clients == 5
    assert box._assign_clients(np.arange(1438))[:7].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert load_dataset("digits").spec.num_clients is None
    with pytest.raises(DataError, match="clients"):
        load_dataset("digits", num_clients=2000)
