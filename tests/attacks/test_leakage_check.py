"""One call on a model of one's own finds what leaks, and never calls a failed attack safe."""

import json
from functools import cache

import pytest
import torch
from support.seeding import seed_generator
from torch import nn
from torch.nn import functional as F

from privot.attacks.inversion import check_leakage
from privot.attacks.inversion.problem import Reconstruction
from privot.attacks.inversion.scoring import score_reconstruction
from privot.data import load_dataset
from privot.errors import DataError, SettingError

pytestmark = pytest.mark.usefixtures("one_thread")


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.last = nn.Linear(512, 10)

    def forward(self, x):
        return self.last(torch.sigmoid(self.first(x)).flatten(1))


@cache
def build_own():
    torch.manual_seed(0)
    return Own()


def load_digits(count=1, start=0):
    images, labels = load_dataset("digits", public=True).records()
    return images[start : start + count], labels[start : start + count]


def compute_update(net, batch, factor=1.0, noise=0.0):
    generator = seed_generator()
    gradients = torch.autograd.grad(F.cross_entropy(net(batch[0]), batch[1]), [*net.parameters()])
    return {
        name: factor * gradient + noise * torch.randn(gradient.shape, generator=generator)
        for (name, _), gradient in zip(net.named_parameters(), gradients, strict=True)
    }


def check(net, batch, factor=1.0, noise=0.0, psnrs=(), **more):
    update = compute_update(net, batch, factor, noise)
    how = {"restarts": 0, "target_psnrs": psnrs, "is_defended": noise > 0, **more}
    result = check_leakage(net, F.cross_entropy, batch, update, **how)
    return result, {tier.name: tier for tier in result.tiers}


# a gradient, and the step of a client with it
@pytest.mark.parametrize("factor", [1.0, pytest.param(-0.01, marks=pytest.mark.slow)])
def test_an_update_as_it_is_leaks_all(factor):
    batch = load_digits()
    result, tiers = check(build_own(), batch, factor, psnrs=(15,))
    assert result.is_leaking
    assert result.label_accuracy == 1
    assert result.gradient_cosine == pytest.approx(1 if factor > 0 else -1, abs=1e-5)
    assert result.gradient_scale == pytest.approx(factor, rel=1e-4)
    assert tiers["closed form"].mse < 1e-8
    assert result.noise_std == 0
    assert result.noise_std_for_psnr[15] > 1e-4
    assert (result.images - batch[0]).abs().max() < 1e-3
    assert "leaks" in result.summary
    json.dumps(result.to_json())


def test_the_noise_that_was_said_to_stop_it_stops_it():
    batch = load_digits()
    needed = check(build_own(), batch, psnrs=(10,))[0].noise_std_for_psnr[10]
    result, tiers = check(build_own(), batch, noise=needed, threshold=1e-2)
    assert result.noise_std == pytest.approx(needed, rel=0.1)
    assert not result.is_leaking
    assert abs(result.tiers[0].psnr - 10) < 2
    assert all(tier.mse is None or tier.psnr < 13 for tier in result.tiers)
    assert "Gauss-Newton" in tiers
    assert result.label_accuracy == 1  # labels outlive the image
    assert "no proof" in result.summary


@pytest.mark.slow
def test_under_a_little_noise_the_best_attack_is_as_good_as_predicted():
    result, tiers = check(build_own(), load_digits(), noise=1e-5)
    assert result.is_leaking
    # one draw on 64 values; means: test_cramer_rao
    assert abs(tiers["Gauss-Newton"].psnr - tiers["cramer_rao_bound"].psnr) < 4


@pytest.mark.slow
def test_a_model_that_is_no_chain_still_gets_its_certificate():
    torch.manual_seed(0)
    layers = (nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *layers)
    result, tiers = check(net, load_digits())
    assert tiers["closed form"].mse is None
    assert "optimizing" in tiers["closed form"].note
    assert "rank" in tiers["cramer_rao_bound"].note
    assert result.worst_tier is not None


def test_a_batch_behind_a_relu_and_batch_norm_with_running_statistics():
    torch.manual_seed(0)
    layers = (nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    result, tiers = check(nn.Sequential(nn.Flatten(), *layers), load_digits(3))
    assert tiers["closed form"].mse < 1e-8
    assert result.images.shape == (3, 1, 8, 8)
    layers = (nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10))
    _, tiers = check(nn.Sequential(nn.Conv2d(1, 4, 3), *layers).eval(), load_digits())
    assert tiers["cramer_rao_bound"].mse is not None


def test_updates_and_batches_that_do_not_fit_are_refused():
    net = build_own()
    images, labels = batch = load_digits()
    update = compute_update(net, batch)
    torch.manual_seed(7)
    for model, given, sent, words in (
        (Own(), batch, update, r"does not fit.*is_defended=True"),
        (net, load_digits(1, 5), update, r"does not fit.*is_defended=True"),
        (net, batch, {**update, "last.bias": None}, r"last\.bias is missing"),
        (net, batch, {name: value / 0 for name, value in update.items()}, "not finite"),
        (net, batch, {name: value * 0 for name, value in update.items()}, "0 everywhere"),
        (net, (images, labels + 10), update, "Labels"),
        (net, (images[0], labels), update, r"images \[b, c, h, w\]"),
        (net, (images / 0, labels), update, "not finite"),
    ):
        present = {name: value for name, value in sent.items() if value is not None}
        with pytest.raises(DataError, match=words):
            check_leakage(model, F.cross_entropy, given, present)
    noisy = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    with pytest.raises(SettingError, match=r"eval\(\)"):
        check(noisy, batch)


# Scores


def score(guess, labels, images, true_labels=None, **more):
    count = torch.zeros(len(guess))
    reconstruction = Reconstruction(guess, labels, count.long(), count)
    true_labels = labels if true_labels is None else true_labels
    return score_reconstruction(reconstruction, images, true_labels, **more)


def test_a_batch_is_matched_and_labels_are_scored_apart():
    images, labels = load_digits(6)
    images = images.view(2, 3, 1, 8, 8)
    labels = labels.view(2, 3)
    mixed = images[:, [2, 0, 1]].clone()
    mixed[1] = 0.5
    result = score(mixed, labels.flip(1), images, labels)
    assert result.matching[0].tolist() == [1, 2, 0]
    assert result.mse[0].max() == 0
    assert result.psnr[0].isinf().all()
    assert result.label_accuracy.tolist() == [1, 1]
    assert result.leak_rate == 0.5
    assert result.leak_rate_low < 0.05
    assert result.leak_rate_high > 0.95
    assert result.to_json()["label_accuracy"] == 1


def test_values_out_of_bounds_are_clamped_and_other_bounds_are_normalized():
    images, labels = (part[None] for part in load_digits(1))
    bold = torch.where(images > 0.5, images + 3, images - 3)
    assert score(bold, labels, images.round()).mse.max() < 1e-12
    wide = score(images * 2 - 0.8, labels, images * 2 - 1, bounds=(-1.0, 1.0))
    assert torch.allclose(wide.mse, score(images + 0.1, labels, images).mse, atol=1e-6)
    assert score(images * torch.nan, labels, images).mse.isfinite().all()
    with pytest.raises(DataError, match="same N and batch"):
        score(images[:, :, :, 1:], labels, images)


def test_an_exact_copy_leaks_whatever_it_is_matched_with():
    """The assignment of least total error may match the copy of one image with another."""

    def paint(*values):
        images = torch.tensor(values).view(1, 2, 1, 1, 1).expand(1, 2, 1, 11, 11).clone()
        images[0, :, :, 0] = 0.0
        return images

    images = paint(0.5, 1.0)
    guess = paint(0.5, 0.45)
    result = score(guess, torch.zeros(1, 2).long(), images)
    assert result.nearest_mse[0, 0] == 0
    assert result.leak_rate == 1.0
