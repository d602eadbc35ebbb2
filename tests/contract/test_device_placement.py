"""Every method computes on one device: where there is no GPU, tensors that say that they lie elsewhere may not meet those of the CPU."""

import pytest
import torch
from support.fake_device import Away, Mixed, elsewhere
from support.tiny_settings import (
    NUM_CLASSES,
    SHAPE,
    choose_spec,
    choose_tiny_settings,
    make_method_input,
    make_records,
    seal_records,
)

from privot import synthesize
from privot.attacks.inversion.attacks import INVERSION_ATTACKS, invert
from privot.attacks.inversion.defenses import NoiseDefense
from privot.attacks.inversion.models import INVERSION_MODELS, sample_initial_weights
from privot.attacks.inversion.problem import Problem
from privot.attacks.inversion.scoring import score_reconstruction
from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.runner import prepare_shadows
from privot.data import Public, Spec
from privot.measures import Evaluator, Samples
from privot.methods import list_methods, make_method
from privot.runtime import Runtime

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")

MORE = {  # settings that take another way through a method
    "sliced-flow": (
        {"mode": "records"},
        {"mode": "resampled", "sample_size": 12},
        {"space": "public"},
        {"space": "private"},
    ),
    "sliced-generator": (
        {"generator": "conv"},
        {"mode": "records"},
        {"space": "public"},
        {"space": "private"},
    ),
    "gs-wgan": ({"routing": "step"}, {"normalize_gradients": True}),
    "merf": ({"generator": "conv"},),
    "kernel-points": ({"zca": True}, {"init": "real"}),
    "distribution-matching": ({"init": "real"},),
    "entropic-gan": ({"loss": "nll"},),
}
LESS = {
    "gradient-matching": {"num_networks": 1, "outer_steps": 1, "inner_steps": 1},
    "conditional-gan": {"steps": 2},
}
WAYS = [pytest.param(name, {}, id=name) for name in sorted(list_methods())] + [
    pytest.param(name, more, id="-".join([name, *map(str, more.values())]), marks=pytest.mark.slow)
    for name in MORE
    for more in MORE[name]
]


@pytest.mark.parametrize(("name", "more"), WAYS)
def test_a_method_does_not_mix_devices(name, more, tmp_path, monkeypatch):
    method = make_method(name, {**choose_tiny_settings(name), **LESS.get(name, {}), **more})
    images, labels = make_records()
    box = make_method_input(method, images, labels, choose_spec(method))
    with elsewhere(monkeypatch):
        release = synthesize(
            box, method, ledger=tmp_path / "ledger.jsonl", out=tmp_path / "release"
        )
        drawn = release.sample(6, device=torch.device("meta"))
    assert drawn[0].shape == (6, 1, 8, 8)
    assert (tmp_path / "release" / "manifest.json").exists()


def test_what_is_mixed_is_seen(monkeypatch):
    with elsewhere(monkeypatch):
        there = torch.ones(3, device="meta")
        here = torch.ones(3)
        assert isinstance(there, Away)
        assert torch.equal((2 * there + torch.tensor(1.0)).cpu(), torch.full((3,), 3.0))
        for mix in (
            lambda: there + here,
            lambda: here[there.long()],
            lambda: there @ here,
            lambda: torch.cat([there, here]),
        ):
            with pytest.raises(Mixed):
                mix()
        with pytest.raises(Mixed):
            torch.randn(3, generator=torch.Generator(), device="meta")
        assert there[torch.tensor([0, 2])].shape == (2,)  # a GPU takes indices from the CPU, too


def test_shadows_do_not_mix_devices(tmp_path, monkeypatch):
    images, labels = make_records()
    box = seal_records(images, labels, Spec(SHAPE, NUM_CLASSES))
    small = {
        "images_per_class": 2,
        "steps": 2,
        "batch_per_class": 4,
        "net_width": 4,
        "learning_rate": 1.0,
    }
    with elsewhere(monkeypatch):
        prepare_shadows(
            ShadowConfig(
                folder=tmp_path / "shadows",
                dataset=box,
                settings=small,
                num_shadows=4,
                shadows_per_batch=2,
                epochs=1,
            )
        )
    assert len(list((tmp_path / "shadows").glob("shadow-*.npz"))) == 4


@pytest.mark.parametrize("attack", ["dlg", "hybrid", "cosine", "wdlg-sliced"])
def test_inversion_does_not_mix_devices(attack, monkeypatch):
    with elsewhere(monkeypatch):
        here = torch.device("meta")
        make_net, loss, reach = INVERSION_MODELS["lenet"]
        net = make_net((1, 8, 8), 3).to(here)
        images = torch.rand(2, 1, 1, 8, 8).to(here)
        labels = torch.tensor([[0], [2]], device=here)
        weights = {
            name: each.to(here)
            for name, each in sample_initial_weights(
                net, 2, torch.Generator().manual_seed(0), reach
            ).items()
        }
        problem = Problem.from_images(
            net,
            loss,
            images,
            labels,
            weights,
            NoiseDefense(1e-3),
            generator=torch.Generator().manual_seed(0),
        )
        chosen = INVERSION_ATTACKS[attack]
        found = invert(problem, chosen.replace_optimizer(chosen.phases[0].optimizer, 2), restarts=1)
        assert score_reconstruction(found, images, labels, 1e-2).mse.shape == (2, 1)


def test_measures_do_not_mix_devices(monkeypatch):
    images, labels = (torch.from_numpy(each[:16]) for each in make_records())
    spec = Spec(SHAPE, NUM_CLASSES)
    test, train = (
        Public(images[which].numpy(), labels[which].numpy(), spec, name="tiny")
        for which in (slice(8), slice(8, None))
    )
    with elsewhere(monkeypatch):
        bench = Evaluator(test, train, runtime=Runtime("auto"), on_warning=lambda text: None)
        found = bench.measure(
            Samples("drawn", images.flip(2), labels, NUM_CLASSES, publishable=True),
            ["sliced", "precision"],
        )
    # Without the weights of a standard network, features are of the domain.
    assert {each.name.removeprefix("domain_") for each in found} >= {"precision", "recall"}
