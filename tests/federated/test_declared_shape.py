"""What one owner holds: not every class, and folders that are known by their names."""

import functools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from privot.data.client_data import load_client_data
from privot.data.loading import load_dataset
from privot.data.spec import Spec
from privot.errors import DataError, SettingError
from privot.privacy.client_partition import client_partition


@pytest.mark.parametrize("name", ["records.npz", "classes"])
def test_an_owner_may_lack_a_class(tmp_path, name):
    path = Path(tmp_path / name)
    if name == "classes":
        for each in ("cat", "dog"):
            (path / each).mkdir(parents=True)
            Image.new("L", (4, 4), 255 * (each == "dog")).save(path / each / "1.png")
        own = functools.partial(load_client_data, path, shape=(1, 4, 4))
        assert own(num_classes=2).spec == Spec((1, 4, 4), 2)
        with pytest.raises(DataError, match="2 classes by their folders, and 3 are declared"):
            own(num_classes=3)
        box = own(class_names=("dog", "bird", "cat"))
        assert (box.spec.num_classes, sorted(box._labels.tolist())) == (3, [0, 2])
        assert box._images[box._labels == 0].min() == 255  # the dog is the white one
        with pytest.raises(DataError, match="class 'cat' is not one of the known"):
            own(class_names=("dog", "bird"))
        with pytest.raises(DataError, match="3 classes by their folders, and 2 are declared"):
            own(class_names=("dog", "bird", "cat"), num_classes=2)
    else:
        np.savez(path, x=np.zeros((2, 4, 4), np.uint8), y=np.array([0, 2]))
        own = functools.partial(load_client_data, path, shape=(1, 4, 4))
        assert own(num_classes=5).spec.num_classes == 5
        with pytest.raises(DataError, match="no class folders"):
            own(class_names=("cat", "dog"))
        with pytest.raises(DataError, match=r"records\.npz: labels"):
            own(num_classes=2)
    for less in ({}, {"shape": (1, 4, 4)}, {"num_classes": 2}, {"class_names": ("cat", "dog")}):
        with pytest.raises(
            SettingError, match=r"declare --shape .* and --classes or --class-names"
        ):
            load_client_data(path, **less)


def test_an_owner_beyond_the_last_is_refused(ledger):
    box = load_dataset("digits", num_clients=3)
    for wrong in (-1, 3):
        with pytest.raises(SettingError, match="there are 3, counted from 0"):
            client_partition(box, wrong, ledger)
