"""The catalogue: what is said of a dataset without reading it, what is searched where, and what is downloaded."""

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
def require_split(data_file):
    """Skip, and say so, unless one of the files of a split is there."""

    def require(source, split):
        names = [file["path"] for file in load_catalog()[source][split].get("files", [])] or [split]
        found = (name for name in names if files.find_data_file(source, name))
        data_file(source, next(found, names[0]))

    return require


BUILT_IN = [
    (source, split)
    for source in load_catalog()
    for split in ("train", "test")
    if source != "digits"
]


@pytest.mark.parametrize(("source", "split"), BUILT_IN)
def test_built_in_data_is_as_described(source, split, require_split):
    require_split(source, split)
    dataset = load_dataset(source, split)
    spec = describe_dataset(source, split)
    assert isinstance(dataset, Sensitive)
    assert dataset.spec == spec
    assert dataset._count_records() == spec.size
    assert dataset.name == (source if split == "train" else f"{source}/test")
    images, labels = dataset._read_records(slice(0, 500))
    assert images.shape[1:] == spec.shape
    assert 0 <= images.min() < 0.1
    assert 0.9 < images.max() <= 1
    assert labels.max() < spec.num_classes
    if (source, split) == ("femnist", "test"):
        assert images.mean() < 0.3  # white on black


@pytest.mark.parametrize(
    ("source", "mean", "std"), [("mnist", 0.1307, 0.3081), ("fashion-mnist", 0.2860, 0.3530)]
)
def test_the_images_are_the_published_ones(source, mean, std, require_split):
    require_split(source, "train")
    dataset = load_dataset(source, public=True)
    assert isinstance(dataset, Public)
    images = dataset.records().images
    assert images.mean().item() == pytest.approx(mean, abs=1e-4)
    assert images.std().item() == pytest.approx(std, abs=1e-4)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("fashion-mnist", True), ("svhn", False), ("mnist", None), ("cifar10", None)],
)
def test_whether_images_may_be_flipped_is_declared(source, expected, tmp_path):
    assert describe_dataset(source).flip_invariant is expected
    np.savez(tmp_path / "own.npz", x=np.zeros((4, 8, 8), np.uint8), y=np.arange(4) % 2)
    own = load_dataset(tmp_path / "own.npz", flip_invariant=expected)
    assert own.spec.flip_invariant is expected


def test_digits_are_embedded_and_their_splits_are_disjoint():
    train, test = (load_dataset("digits", split, public=True) for split in ("train", "test"))
    sizes = tuple(describe_dataset("digits", split).size for split in ("train", "test"))
    assert (len(train), len(test)) == sizes == (1438, 359)
    train_images, test_images = (
        {image.numpy().tobytes() for image in split.records().images} for split in (train, test)
    )
    assert train_images.isdisjoint(test_images)


def test_the_catalogue_is_sound():
    for source, entry in load_catalog().items():
        for split in ("train", "test"):
            spec = describe_dataset(source, split)
            assert spec.size
            assert spec.shape == tuple(entry["shape"])
            for file in entry[split].get("files", []):
                assert ("sha256" in file) == ("labels" in file)
                assert "sha256" not in file or entry["url"].startswith("http")


def test_describe_reads_no_record(monkeypatch, tmp_path):
    for name in ("read_idx", "read_npz", "read_parquet", "read_folder"):
        monkeypatch.setattr(f"privot.data.readers.{name}", None)
    for module in ("parquet", "image_folder"):
        monkeypatch.setattr(f"privot.data.{module}.decode_image", None)
    for source in load_catalog():
        assert describe_dataset(source).size
    assert describe_dataset(__file__, shape=(1, 8, 8), num_classes=3).size is None
    declared = {"shape": (1, 4, 4), "class_sizes": (5, 7)}
    spec = describe_dataset(__file__, **declared)
    assert (spec.size, spec.num_classes, spec.class_sizes) == (12, 2, (5, 7))
    assert describe_dataset(__file__, **declared, size=12, num_classes=2) == spec


def test_describe_of_a_path_needs_declarations():
    for declared in ({}, {"shape": (1, 8, 8)}, {"num_classes": 3}):
        with pytest.raises(SettingError, match="--shape"):
            describe_dataset(__file__, **declared)
    with pytest.raises(DataError, match="no such file"):
        describe_dataset("nothing.npz", shape=(1, 8, 8), num_classes=3)


@pytest.mark.parametrize("wrong", [{"shape": (1, 28, 28)}, {"num_classes": 9}, {"resize": 16}])
def test_a_built_in_keeps_its_shape_and_classes(wrong):
    with pytest.raises(SettingError):
        load_dataset("digits", **wrong)
    digits = load_dataset("digits", shape=(1, 8, 8), num_classes=10)
    assert digits.spec == describe_dataset("digits")


def test_a_split_is_train_or_test():
    for look in (load_dataset, describe_dataset):
        with pytest.raises(SettingError, match="train or test"):
            look("digits", "validation")


def test_a_missing_dataset_says_where_to_put_it(empty_data_folders):
    with pytest.raises(DataError) as error:
        load_dataset("mnist")
    assert str(error.value) == (
        "mnist: not found. Pass --download to fetch it, or put train-images-idx3-ubyte.gz into "
        f"{empty_data_folders}/data/mnist (PRIVOT_DATA names the folder)."
    )
    with pytest.raises(DataError, match=r"^svhn: not found\. Put train.npz into"):
        load_dataset("svhn", download=True)  # without a checksum nothing is downloaded


def test_folders_are_searched_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVOT_DATA", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert files.list_data_folders()[:2] == [tmp_path / "a", tmp_path / "b" / "privot"]
    monkeypatch.delenv("PRIVOT_DATA")
    assert files.list_data_folders()[0] == tmp_path / "b" / "privot"


@pytest.fixture
def tiny_mnist(monkeypatch):
    """Stand-ins for the files of MNIST, with a catalogue that has their checksums."""
    contents = {}
    for name, array in (
        ("train-images-idx3-ubyte.gz", np.zeros((10, 28, 28), np.uint8)),
        ("train-labels-idx1-ubyte.gz", np.arange(10, dtype=np.uint8)),
    ):
        head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        contents[name] = gzip.compress(head + array.tobytes())
    sums = [hashlib.sha256(contents[name]).hexdigest() for name in sorted(contents)]
    entry = {"path": "train-images-idx3-ubyte.gz", "sha256": sums[0], "labels": sums[1]}
    stub = {"mnist": {**load_catalog()["mnist"], "train": {"size": 10, "files": [entry]}}}
    for module in (catalog, loading):
        monkeypatch.setattr(module, "load_catalog", lambda: stub)
    return contents


def test_download_is_checked_by_checksum_and_done_once(empty_data_folders, monkeypatch, tiny_mnist):
    urls = []

    def retrieve(url, known_hash, fname, path):
        urls.append(url)
        assert url == load_catalog()["mnist"]["url"] + fname
        assert known_hash == "sha256:" + hashlib.sha256(tiny_mnist[fname]).hexdigest()
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / fname).write_bytes(tiny_mnist[fname])

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(DataError, match="--download"):
        load_dataset("mnist")
    assert urls == []  # never without being asked
    for _ in range(2):
        assert load_dataset("mnist", download=True)._count_records() == 10
        assert len(urls) == 2


@pytest.mark.usefixtures("empty_data_folders", "tiny_mnist")
@pytest.mark.parametrize(
    "failure", [OSError("no network"), ValueError("wrong sum"), ConnectionError(), RuntimeError()]
)
def test_a_failed_download_is_one_line(monkeypatch, failure):
    def retrieve(*_, **__):
        raise failure

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(DataError, match=f"{type(failure).__name__}.*by hand"):
        load_dataset("mnist", download=True)


def test_a_file_of_another_size_is_refused(empty_data_folders, tiny_mnist):
    loading.load_catalog()["mnist"]["train"]["size"] = 11
    folder = empty_data_folders / "cache" / "mnist"
    folder.mkdir(parents=True)
    for name, content in tiny_mnist.items():
        (folder / name).write_bytes(content)
    with pytest.raises(DataError, match="declared size"):
        load_dataset("mnist")


def test_femnist_has_its_writers(require_split):
    require_split("femnist", "train")
    dataset = load_dataset("femnist")
    assert dataset.spec.num_clients == describe_dataset("femnist").num_clients == 300
    counts = np.bincount(dataset._client_ids)
    assert (len(counts), counts.min(), counts.max(), counts.sum()) == (300, 2, 319, 41258)
    # for the gate to partition
    assert load_dataset("femnist", num_clients=3000)._client_ids is None


def test_any_data_can_be_partitioned_to_clients():
    dataset = load_dataset("digits", num_clients=5)
    assert dataset.spec.num_clients == describe_dataset("digits", num_clients=5).num_clients == 5
    assert dataset._assign_clients(np.arange(1438))[:7].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert load_dataset("digits").spec.num_clients is None
    with pytest.raises(DataError, match="clients"):
        load_dataset("digits", num_clients=2000)
