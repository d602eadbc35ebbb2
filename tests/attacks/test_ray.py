"""Shadows on a real Ray cluster, of this host alone."""

import numpy as np
import pytest

from privot.attacks.shadows.config import Shadows
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.runtime import Runtime

CPU = Runtime("cpu")


def few(folder):
    images = np.random.default_rng(0).random((60, 1, 8, 8), np.float32)
    box = Sensitive(images, np.arange(60) % 3, Spec((1, 8, 8), 3), name="box")
    settings = {"per_class": 2, "iterations": 4, "batch": 8, "width": 4, "rate": 1.0}
    return Shadows(folder=folder, box=box, settings=settings, count=6, at_once=2, epochs=2)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_cluster_prepares_the_same(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'privot[ray]'")
    few(tmp_path / "here").prepare(CPU)
    words = []
    few(tmp_path / "cluster").prepare(CPU, lambda *word, **facts: words.append(word), ray=True)
    here, cluster = (
        {each.name: each.read_bytes() for each in (tmp_path / name).glob("shadow*")}
        for name in ("here", "cluster")
    )
    assert len(here) == 6
    assert here == cluster
    assert words[-1] == ("shadows", 6, 6)
    assert not (tmp_path / "cluster" / "candidates.safetensors").exists()


def test_without_ray_one_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(SettingError, match="Ray is not installed"):
        few(tmp_path).prepare(CPU, ray=True)
