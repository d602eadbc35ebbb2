"""What one owner declares of its data: not every class, and folders that are named after classes."""

import functools

import numpy as np
import pytest
from PIL import Image

from privot.data.client_data import load_client_data
from privot.data.loading import load_dataset
from privot.data.spec import Spec
from privot.errors import DataError, SettingError
from privot.privacy.client_partition import client_partition


def test_an_owner_may_lack_a_class_folder(tmp_path):
    for name, brightness in (("cat", 0), ("dog", 255)):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4), brightness).save(tmp_path / name / "1.png")
    load = functools.partial(load_client_data, tmp_path, shape=(1, 4, 4))
    assert load(num_classes=2).spec == Spec((1, 4, 4), 2)
    dataset = load(class_names=("dog", "bird", "cat"))
    assert (dataset.spec.num_classes, sorted(dataset._labels.tolist())) == (3, [0, 2])
    assert dataset._images[dataset._labels == 0].min() == 255  # the dog is the white one
    for declared, words in (
        ({"num_classes": 3}, "2 classes by their folders, and 3 are declared"),
        ({"class_names": ("dog", "bird")}, "class 'cat' is not one of the known"),
        (
            {"class_names": ("dog", "bird", "cat"), "num_classes": 2},
            "3 classes by their folders, and 2 are declared",
        ),
    ):
        with pytest.raises(DataError, match=words):
            load(**declared)


def test_an_owner_may_lack_a_class_in_its_file(tmp_path):
    path = tmp_path / "records.npz"
    np.savez(path, x=np.zeros((2, 4, 4), np.uint8), y=np.array([0, 2]))
    load = functools.partial(load_client_data, path, shape=(1, 4, 4))
    assert load(num_classes=5).spec.num_classes == 5
    with pytest.raises(DataError, match="no class folders"):
        load(class_names=("cat", "dog"))
    with pytest.raises(DataError, match=r"records\.npz: labels"):
        load(num_classes=2)
    for less in ({}, {"shape": (1, 4, 4)}, {"num_classes": 2}, {"class_names": ("cat", "dog")}):
        with pytest.raises(
            SettingError, match=r"declare --shape .* and --classes or --class-names"
        ):
            load_client_data(path, **less)


def test_an_owner_beyond_the_last_is_refused(ledger):
    dataset = load_dataset("digits", num_clients=3)
    for number in (-1, 3):
        with pytest.raises(SettingError, match="there are 3, counted from 0"):
            client_partition(dataset, number, ledger)
