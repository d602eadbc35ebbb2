"""Nothing mixes tensors of two devices: attacks and measures on a device that the CPU simulates.

Methods are in `test_method_checks.py`.
"""

import pytest
import torch
from support.tiny_settings import (
    NUM_CLASSES,
    SHAPE,
    make_records,
    seal_records,
)

from privot.attacks.inversion.attacks import INVERSION_ATTACKS, invert
from privot.attacks.inversion.defenses import NoiseDefense
from privot.attacks.inversion.models import INVERSION_MODELS, sample_initial_weights
from privot.attacks.inversion.problem import Problem
from privot.attacks.inversion.scoring import score_reconstruction
from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.runner import prepare_shadows
from privot.data import Public, Spec
from privot.measures import Evaluator, Samples
from privot.runtime import Runtime
from privot.testing.fake_device import (
    FakeDeviceTensor,
    MixedDevicesError,
    simulate_second_device,
)

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")


def test_what_is_mixed_is_seen():
    with simulate_second_device():
        fake = torch.ones(3, device="meta")
        cpu_tensor = torch.ones(3)
        assert isinstance(fake, FakeDeviceTensor)
        assert torch.equal((2 * fake + torch.tensor(1.0)).cpu(), torch.full((3,), 3.0))
        for mix in (
            lambda: fake + cpu_tensor,
            lambda: cpu_tensor[fake.long()],
            lambda: fake @ cpu_tensor,
            lambda: torch.cat([fake, cpu_tensor]),
        ):
            with pytest.raises(MixedDevicesError):
                mix()
        with pytest.raises(MixedDevicesError):
            torch.randn(3, generator=torch.Generator(), device="meta")
        assert fake[torch.tensor([0, 2])].shape == (2,)  # a GPU takes indices from the CPU, too


def test_shadows_do_not_mix_devices(tmp_path):
    images, labels = make_records()
    dataset = seal_records(images, labels, Spec(SHAPE, NUM_CLASSES))
    settings = {
        "images_per_class": 2,
        "steps": 2,
        "batch_per_class": 4,
        "net_width": 4,
        "learning_rate": 1.0,
    }
    with simulate_second_device():
        prepare_shadows(
            ShadowConfig(
                folder=tmp_path / "shadows",
                dataset=dataset,
                settings=settings,
                num_shadows=4,
                shadows_per_batch=2,
                epochs=1,
            )
        )
    assert len(list((tmp_path / "shadows").glob("shadow-*.npz"))) == 4


@pytest.mark.parametrize("attack", ["dlg", "hybrid", "cosine", "wdlg-sliced"])
def test_inversion_does_not_mix_devices(attack):
    with simulate_second_device():
        device = torch.device("meta")
        make_net, loss, reach = INVERSION_MODELS["lenet"]
        net = make_net((1, 8, 8), 3).to(device)
        images = torch.rand(2, 1, 1, 8, 8).to(device)
        labels = torch.tensor([[0], [2]], device=device)
        weights = {
            name: each.to(device)
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


def test_measures_do_not_mix_devices():
    images, labels = (torch.from_numpy(each[:16]) for each in make_records())
    spec = Spec(SHAPE, NUM_CLASSES)
    test, train = (
        Public(images[which].numpy(), labels[which].numpy(), spec, name="tiny")
        for which in (slice(8), slice(8, None))
    )
    with simulate_second_device():
        bench = Evaluator(test, train, runtime=Runtime("auto"), on_warning=lambda text: None)
        found = bench.measure(
            Samples("drawn", images.flip(2), labels, NUM_CLASSES, publishable=True),
            ["sliced", "precision"],
        )
    # Without the weights of a standard network, features are of the domain.
    assert {each.name.removeprefix("domain_") for each in found} >= {"precision", "recall"}
