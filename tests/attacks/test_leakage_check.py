"""One call on a model of one's own: what does not fit is refused, what leaks is found, and a failed attack is never called safe."""

import json
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from privot.attacks.inversion import check_leakage
from privot.attacks.inversion.problem import Reconstruction
from privot.attacks.inversion.scoring import score_reconstruction
from privot.data import load_dataset
from privot.errors import DataError, SettingError

pytestmark = pytest.mark.usefixtures("one_thread")


class Own(nn.Module):
    def __init__(self, bend=torch.sigmoid):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.last = nn.Linear(512, 10)
        self.bend = bend

    def forward(self, x):
        return self.last(self.bend(self.first(x)).flatten(1))


@cache
def model():
    torch.manual_seed(0)
    return Own()


def digits(count=1, start=0):
    images, labels = load_dataset("digits", public=True).records()
    return images[start : start + count], labels[start : start + count]


def sent(net, batch):
    found = torch.autograd.grad(F.cross_entropy(net(batch[0]), batch[1]), list(net.parameters()))
    return {name: each for (name, _), each in zip(net.named_parameters(), found, strict=True)}


def scaled(update, factor, noise=0.0):
    generator = torch.Generator().manual_seed(0)
    return {
        name: factor * each + noise * torch.randn(each.shape, generator=generator)
        for name, each in update.items()
    }


def tiers(found):
    return {tier.name: tier for tier in found.tiers}


@pytest.mark.parametrize(
    "factor", [1.0, -0.01]
)  # a gradient, and the step that a client made with it
def test_an_update_as_it_is_leaks_all(factor):
    batch = digits()
    found = check_leakage(
        model(),
        F.cross_entropy,
        batch,
        scaled(sent(model(), batch), factor),
        restarts=0,
        target_psnrs=(15,),
    )
    assert found.is_leaking
    assert found.label_accuracy == 1
    assert found.gradient_cosine == pytest.approx(1 if factor > 0 else -1, abs=1e-5)
    assert found.gradient_scale == pytest.approx(factor, rel=1e-4)
    assert tiers(found)["closed form"].mse < 1e-8
    assert found.noise_std == 0
    assert found.noise_std_for_psnr[15] > 1e-4
    assert (found.images - batch[0]).abs().max() < 1e-3
    assert "leaks" in found.summary
    json.dumps(found.to_json())


def test_the_noise_that_was_said_to_stop_it_stops_it():
    batch = digits()
    plain = sent(model(), batch)
    needed = check_leakage(
        model(), F.cross_entropy, batch, plain, restarts=0, target_psnrs=(10,)
    ).noise_std_for_psnr[10]
    found = check_leakage(
        model(),
        F.cross_entropy,
        batch,
        scaled(plain, 1.0, needed),
        restarts=0,
        is_defended=True,
        target_psnrs=(),
        threshold=1e-2,
    )
    assert found.noise_std == pytest.approx(needed, rel=0.1)
    assert not found.is_leaking
    assert abs(found.tiers[0].psnr - 10) < 2
    assert all(tier.mse is None or tier.psnr < 13 for tier in found.tiers)
    assert "Gauss-Newton" in tiers(found)
    assert found.label_accuracy == 1  # labels outlive the image
    assert "no proof" in found.summary


def test_under_a_little_noise_the_best_attack_is_as_good_as_predicted():
    batch = digits()
    found = check_leakage(
        model(),
        F.cross_entropy,
        batch,
        scaled(sent(model(), batch), 1.0, 1e-5),
        restarts=0,
        is_defended=True,
        target_psnrs=(),
    )
    assert found.is_leaking
    assert (
        abs(tiers(found)["Gauss-Newton"].psnr - tiers(found)["cramer_rao_bound"].psnr) < 4
    )  # one draw on 64 values; means: test_certificate


def test_a_model_that_is_no_chain_still_gets_its_certificate():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    batch = digits()
    found = check_leakage(
        net, F.cross_entropy, batch, sent(net, batch), restarts=0, target_psnrs=()
    )
    assert tiers(found)["closed form"].mse is None
    assert "optimizing" in tiers(found)["closed form"].note
    assert "rank" in tiers(found)["cramer_rao_bound"].note
    assert found.worst_tier is not None


def test_a_batch_behind_a_relu():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    batch = digits(3)
    found = check_leakage(
        net, F.cross_entropy, batch, sent(net, batch), restarts=0, target_psnrs=()
    )
    assert tiers(found)["closed form"].mse < 1e-8
    assert found.images.shape == (3, 1, 8, 8)


def test_what_does_not_fit_is_refused():
    batch = digits()
    other = digits(1, 5)
    update = sent(model(), batch)
    torch.manual_seed(7)
    for wrong, given in [(Own(), batch), (model(), other)]:
        with pytest.raises(DataError, match=r"does not fit.*is_defended=True"):
            check_leakage(wrong, F.cross_entropy, given, update)
    with pytest.raises(DataError, match=r"last\.bias is missing"):
        check_leakage(
            model(),
            F.cross_entropy,
            batch,
            {name: each for name, each in update.items() if name != "last.bias"},
        )
    with pytest.raises(DataError, match="not finite"):
        check_leakage(
            model(), F.cross_entropy, batch, {name: each / 0 for name, each in update.items()}
        )
    with pytest.raises(DataError, match="0 everywhere"):
        check_leakage(
            model(), F.cross_entropy, batch, {name: each * 0 for name, each in update.items()}
        )
    with pytest.raises(DataError, match="Labels"):
        check_leakage(model(), F.cross_entropy, (batch[0], batch[1] + 10), update)
    with pytest.raises(DataError, match=r"images \[b, c, h, w\]"):
        check_leakage(model(), F.cross_entropy, (batch[0][0], batch[1]), update)
    with pytest.raises(DataError, match="not finite"):
        check_leakage(model(), F.cross_entropy, (batch[0] / 0, batch[1]), update)
    noisy = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    with pytest.raises(SettingError, match=r"eval\(\)"):
        check_leakage(noisy, F.cross_entropy, batch, sent(noisy, batch))


def test_batch_norm_with_running_statistics():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10)
    ).eval()
    batch = digits()
    found = check_leakage(
        net, F.cross_entropy, batch, sent(net, batch), restarts=0, target_psnrs=()
    )
    assert tiers(found)["cramer_rao_bound"].mse is not None


# Judging


def found_of(images, labels):
    count = torch.zeros(len(images))
    return Reconstruction(images, labels, count.long(), count)


def test_a_batch_is_matched_and_labels_are_judged_apart():
    images, labels = digits(6)
    images = images.view(2, 3, 1, 8, 8)
    labels = labels.view(2, 3)
    mixed = images[:, [2, 0, 1]].clone()
    mixed[1] = 0.5
    seen = score_reconstruction(found_of(mixed, labels.flip(1)), images, labels)
    assert seen.matching[0].tolist() == [1, 2, 0]
    assert seen.mse[0].max() == 0
    assert seen.psnr[0].isinf().all()
    assert seen.label_accuracy.tolist() == [1, 1]
    assert seen.leak_rate == 0.5
    assert seen.leak_rate_low < 0.05
    assert seen.leak_rate_high > 0.95
    assert seen.to_json()["label_accuracy"] == 1


def test_values_outside_the_box_are_clamped_and_other_boxes_are_brought_to_one():
    images, labels = digits(1)
    images = images[None]
    labels = labels[None]
    bold = torch.where(images > 0.5, images + 3, images - 3)
    assert score_reconstruction(found_of(bold, labels), images.round(), labels).mse.max() < 1e-12
    wide = score_reconstruction(
        found_of(images * 2 - 0.8, labels), images * 2 - 1, labels, bounds=(-1.0, 1.0)
    )
    plain = score_reconstruction(found_of(images + 0.1, labels), images, labels)
    assert torch.allclose(wide.mse, plain.mse, atol=1e-6)
    assert (
        score_reconstruction(found_of(images * torch.nan, labels), images, labels)
        .mse.isfinite()
        .all()
    )
    with pytest.raises(DataError, match="same N and batch"):
        score_reconstruction(found_of(images[:, :, :, 1:], labels), images, labels)


def test_an_exact_copy_leaks_whatever_it_is_matched_with():
    """The assignment of least total error gives the copy of one image to another where that helps more."""
    true = torch.tensor([0.5, 1.0])
    found = torch.tensor([0.5, 0.0])
    images, guess = (
        each.view(1, 2, 1, 1, 1).expand(1, 2, 1, 11, 11).clone() for each in (true, found)
    )
    images[0, :, :, 0] = 0.0
    guess[0, :, :, 0] = 0.0
    guess[0, 1, :, 1:] = 0.45
    seen = score_reconstruction(
        Reconstruction(guess, torch.zeros(1, 2, dtype=torch.long), torch.zeros(1), torch.zeros(1)),
        images,
        torch.zeros(1, 2).long(),
    )
    assert seen.nearest_mse[0, 0] == 0
    assert seen.leak_rate == 1.0
