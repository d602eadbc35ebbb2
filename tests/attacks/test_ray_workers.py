"""Shadows on a real Ray cluster, of this host alone."""

import numpy as np
import pytest

from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.runner import prepare_shadows
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.runtime import Runtime

CPU = Runtime("cpu")


def few(folder):
    images = np.random.default_rng(0).random((60, 1, 8, 8), np.float32)
    box = Sensitive(images, np.arange(60) % 3, Spec((1, 8, 8), 3), name="box")
    settings = {
        "images_per_class": 2,
        "steps": 4,
        "batch_per_class": 8,
        "net_width": 4,
        "learning_rate": 1.0,
    }
    return ShadowConfig(
        folder=folder, dataset=box, settings=settings, num_shadows=6, shadows_per_batch=2, epochs=2
    )


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_cluster_prepares_the_same(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'privot[ray]'")
    prepare_shadows(few(tmp_path / "here"), CPU)
    words = []
    prepare_shadows(
        few(tmp_path / "cluster"), CPU, lambda *word, **facts: words.append(word), use_ray=True
    )
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
        prepare_shadows(few(tmp_path), CPU, use_ray=True)
