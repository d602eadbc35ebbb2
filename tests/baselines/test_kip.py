"""KIP: its kernels are those of networks, its set predicts records it has not seen, and it says that it protects nobody."""

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from privot.baselines import kip_run
from privot.baselines.condensation import ClassPool, initialize_images, standardize_images
from privot.baselines.kernel_ridge import (
    ConvFeatureRegression,
    DenseNtkRegression,
    solve_kernel_ridge,
)
from privot.baselines.kip import KernelInducingPoints
from privot.baselines.kip_run import center_labels, project_to_simplex
from privot.baselines.ntk import BIAS_VARIANCE, WEIGHT_VARIANCE, compute_neural_tangent_kernel
from privot.baselines.zca import ZcaWhitening
from privot.data import load_dataset
from privot.data.dataset import Records, Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.methods import make_method
from privot.nets.ensemble import Ensemble
from privot.privacy.guarantee import NoGuarantee
from privot.runtime import Runtime, Streams, ignore_progress
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = {"kernel": "dense", "images_per_class": 2, "steps": 60, "batch_size": 500, "augment": False}
FEATURES = {
    "images_per_class": 2,
    "steps": 60,
    "batch_size": 200,
    "net_width": 16,
    "num_networks": 4,
    "learning_rate": 0.1,
    "augment": False,
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", public=True).records(), load_dataset(
        "digits", "test", public=True
    ).records()


@pytest.fixture
def make_set(tmp_path):
    def made(**settings):
        return synthesize(
            "digits",
            KernelInducingPoints(**settings),
            ledger=tmp_path / "digits.jsonl",
            runtime=Runtime("cpu"),
        )

    return made


def accuracy(kernel, images, labels, test):
    """Of kernel ridge regression from a set on images that nobody has trained on."""
    guesses = kernel.predict(
        standardize_images(images), center_labels(labels, 10), standardize_images(test.images), 1e-6
    )
    return (guesses.argmax(1) == test.labels).float().mean().item()


# The kernels


def finite_network(size, width, depth, generator):
    """Parameters, all N(0, 1), of a dense network in the tangent parameterisation."""
    sizes = [size, *[width] * depth, 1]
    return [
        (
            torch.randn(new, old, generator=generator, dtype=torch.float64),
            torch.randn(new, generator=generator, dtype=torch.float64),
        )
        for old, new in pairwise(sizes)
    ]


def forward(layers, x):
    for place, (weight, bias) in enumerate(layers):
        x = x.relu() if place else x
        x = (
            math.sqrt(WEIGHT_VARIANCE / weight.shape[1]) * (weight @ x)
            + math.sqrt(BIAS_VARIANCE) * bias
        )
    return x[0]


@pytest.mark.parametrize("depth", [1, 3])
def test_the_dense_kernel_is_that_of_wide_networks(depth):
    images = torch.randn(4, 6, generator=seeded(), dtype=torch.float64)
    images[1] = -images[0]  # the far end of the angles
    total = torch.zeros(4, 4, dtype=torch.float64)
    rounds = 30
    generator = seeded(1)
    for _ in range(rounds):
        layers = finite_network(6, 400, depth, generator)
        flat = [each.requires_grad_() for layer in layers for each in layer]
        slopes = [
            torch.cat([part.flatten() for part in torch.autograd.grad(forward(layers, x), flat)])
            for x in images
        ]
        total += torch.stack(slopes) @ torch.stack(slopes).T / rounds
    exact = compute_neural_tangent_kernel(images, images, depth)
    # 30 networks of width 400: a standard error near 1/sqrt(30 * 400) of the diagonal a layer
    assert (total - exact).abs().max() < 0.06 * exact.diagonal().mean()


def test_one_hidden_layer_by_hand():
    # Images so large that the biases hardly count: x·y (pi - angle)/pi from below, and the arc-cosine kernel of the layer itself.
    x = torch.tensor([[1e3, 0.0]], dtype=torch.float64)
    y = torch.tensor([[1e3, 1e3]], dtype=torch.float64)
    # 2 x·y / 2
    below = 1e6
    angle = math.pi / 4
    layer = math.sqrt(2) * 1e6 * (math.sin(angle) + (math.pi - angle) * math.cos(angle)) / math.pi
    assert compute_neural_tangent_kernel(x, y, 1).item() == pytest.approx(
        below * (math.pi - angle) / math.pi + layer, rel=1e-4
    )


def test_gradients_pass_where_an_image_meets_itself():
    images = torch.randn(3, 5, generator=seeded(), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: compute_neural_tangent_kernel(x, x, 2), images)


def test_coefficients_solve_the_ridge_system():
    root = torch.randn(20, 20, generator=seeded(), dtype=torch.float64)
    kernel = root @ root.T
    labels = torch.randn(20, 3, generator=seeded(1), dtype=torch.float64)
    ridged = kernel + 1e-3 * kernel.trace() / 20 * torch.eye(20)
    torch.testing.assert_close(ridged @ solve_kernel_ridge(kernel, labels, 1e-3), labels)


def test_features_regress_as_their_kernel_does(digits):
    """Against the plain formula K(T,X) (K(X,X) + ridge)^-1 y, gradient included; portions change nothing."""
    records, test = digits
    nets = Ensemble(3, (1, 8, 8), 10, width=6, generator=seeded()).double()
    kernel = ConvFeatureRegression(nets, chunk_size=7)
    kernel.resample(seeded(5))
    support = records.images[:12].double()
    labels = center_labels(records.labels[:12], 10)
    images = test.images[:20].double()

    def plainly(x):
        own, other = (torch.cat(list(nets.features(each)), 1) for each in (x, images))
        square = own @ own.T
        ridged = square + 1e-4 * square.diagonal().mean() * torch.eye(12)
        return other @ own.T @ torch.linalg.inv(ridged) @ labels.double()

    first = support.clone().requires_grad_()
    second = support.clone().requires_grad_()
    found = kernel.predict(first, labels, images, 1e-4)
    wanted = plainly(second)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-4)
    (one,) = torch.autograd.grad(found.square().sum(), first)
    (two,) = torch.autograd.grad(wanted.square().sum(), second)
    torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)


def test_renewed_networks_are_others_of_the_same_law():
    kernel = ConvFeatureRegression(Ensemble(2, (1, 8, 8), 10, width=64, generator=seeded()))
    before = {name: value.clone() for name, value in kernel.nets.named_parameters()}
    kernel.resample(seeded(1))
    for name in ("conv0", "bias0", "conv1", "bias1"):
        now = kernel.nets.get_parameter(name)
        assert not torch.equal(now, before[name])
        assert now.std().item() == pytest.approx(before[name].std().item(), rel=0.2)
        assert now.abs().max().item() == pytest.approx(before[name].abs().max().item(), rel=0.1)


# Whitening and labels


def test_whitening_evens_out_and_comes_back(digits):
    images = standardize_images(digits[0].images)
    white = ZcaWhitening(images)
    seen = white(images)
    torch.testing.assert_close(white.inverse_transform(seen), images, rtol=0, atol=1e-4)
    old, new = (torch.cov(each.flatten(1).T.double(), correction=0) for each in (images, seen))
    spread = torch.linalg.eigvalsh(old)
    wanted = spread / (
        spread + 0.1 * old.trace() / 64
    )  # of each direction, by the ridge's definition
    torch.testing.assert_close(torch.linalg.eigvalsh(new), wanted.sort().values, rtol=0, atol=1e-4)


def test_probabilities_are_the_nearest():
    labels = torch.randn(5, 4, generator=seeded(), dtype=torch.float64)
    found = project_to_simplex(labels)
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones(5, dtype=torch.float64))
    away = (found - labels - 0.25).norm(dim=1)
    generator = seeded(1)
    for _ in range(200):
        other = torch.rand(5, 4, generator=generator, dtype=torch.float64) ** 3
        other /= other.sum(1, keepdim=True)
        assert ((other - labels - 0.25).norm(dim=1) >= away - 1e-6).all()
    torch.testing.assert_close(project_to_simplex(center_labels(torch.arange(4), 4)), torch.eye(4))


# The set


@pytest.mark.parametrize(
    ("settings", "least"), [(DENSE, 0.9), (FEATURES, 0.75), ({**FEATURES, "zca": True}, None)]
)
def test_the_set_predicts_images_it_has_not_seen(settings, least, make_set, digits):
    records, test = digits
    release = make_set(**settings)
    images = release.artifact.tensors["images"]
    labels = release.artifact.tensors["labels"]
    begun, _ = initialize_images(records, release.spec, 2, "random", Streams(0).make_rng("start"))
    kernel = (
        DenseNtkRegression(3)
        if "kernel" in settings
        else ConvFeatureRegression(Ensemble(16, (1, 8, 8), 10, width=32, generator=seeded(9)))
    )
    before, after = (accuracy(kernel, each, labels, test) for each in (begun, images))
    assert labels.tolist() == [each // 2 for each in range(20)]
    assert 0 <= images.min() <= images.max() <= 1
    assert before < 0.3
    assert after > (least or before + 0.2)


def descended(records, **settings):
    method = KernelInducingPoints(**{**DENSE, **settings})
    spec = Spec((1, 8, 8), 10)
    streams = Streams(0, Runtime("cpu"))
    white = ZcaWhitening(standardize_images(records.images)) if method.zca else None
    begun, labels = method._initialize_set(records, white, method.images_per_class, spec, streams)
    return method._optimize_set(
        begun, labels, ClassPool(records, 10), white, spec, streams, ignore_progress
    )


@pytest.fixture
def asked(monkeypatch):
    """What the dense kernel was asked at each step: the set, its labels, the records, the ridge."""
    calls = []

    def spied(kernel, support, labels, images, ridge, real=DenseNtkRegression.predict):
        calls.append((support.detach().clone(), labels.detach().clone(), images, ridge))
        return real(kernel, support, labels, images, ridge)

    monkeypatch.setattr(DenseNtkRegression, "predict", spied)
    return calls


@pytest.mark.parametrize("zca", [False, True])
def test_the_kernel_sees_set_and_records_alike(zca, asked, digits):
    """Both standardised, or both whitened, and regressed with the ridge that was asked for."""
    records = digits[0]
    white = ZcaWhitening(standardize_images(records.images)) if zca else lambda images: images
    descended(
        records, steps=2, batch_size=2000, zca=zca, init="real", ridge=3e-3
    )  # more than there are: every record is seen
    begun, _ = initialize_images(
        records, Spec((1, 8, 8), 10), 2, "real", Streams(0).make_rng("start")
    )
    torch.testing.assert_close(asked[0][0], white(standardize_images(begun)), rtol=0, atol=1e-4)
    for _, _, seen, ridge in asked:
        assert ridge == 3e-3
        nearest = (
            torch.cdist(
                white(standardize_images(records.images)).flatten(1).double(),
                seen.flatten(1).double(),
            )
            .min(1)
            .values
        )
        assert nearest.max() < 1e-3


@pytest.mark.parametrize("zca", [False, True])
def test_what_is_fitted_is_what_can_be_released(zca, asked, digits):
    """At every step the set is images between black and white, and learned labels are probabilities; a wild rate makes it bind."""
    white = ZcaWhitening(standardize_images(digits[0].images)) if zca else None
    images, soft = descended(digits[0], steps=6, learning_rate=1.0, zca=zca, learn_labels=True)
    black = torch.zeros(1, 1, 8, 8)
    low, high = (standardize_images(black + level).flatten()[0] for level in (0, 1))
    held = []
    for support, labels, _, _ in asked:
        pixels = white.inverse_transform(support) if white else support
        assert low - 1e-3 <= pixels.min() <= pixels.max() <= high + 1e-3
        held.append(((pixels < low + 1e-3) | (pixels > high - 1e-3)).float().mean())
        assert labels.min() >= -0.1 - 1e-6
        torch.testing.assert_close(labels.sum(1), torch.zeros(20), rtol=0, atol=1e-5)
    assert held[-1] > 0.3
    assert 0 <= images.min() <= images.max() <= 1
    assert not torch.equal(soft, asked[0][1])


NO_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: half precision, at the size of CIFAR-10 images, is for one",
)


@pytest.mark.parametrize(
    ("device", "side", "width", "zca"),
    [("cpu", 8, 8, False), ("cpu", 8, 8, True), pytest.param("cuda", 32, 128, False, marks=NO_GPU)],
)
def test_a_few_steps_tell_bands_apart(device, side, width, zca):
    """Three classes with a bright band each, at three heights: a set from noise that predicts them, with all defaults but the size."""
    labels = torch.arange(60, device=device) % 3
    band = torch.eye(4, device=device)[labels].repeat_interleave(side // 4, 1)[:, None, :, None]
    images = 0.5 * band + 0.5 * torch.rand(60, 3, side, side, generator=seeded()).to(device)
    records = Records(images, labels)
    spec = Spec((3, side, side), 3)
    streams = Streams(0, Runtime(device))
    method = KernelInducingPoints(
        images_per_class=2, steps=40, batch_size=60, num_networks=2, net_width=width, zca=zca
    )
    white = ZcaWhitening(standardize_images(images)) if zca else None
    begun, known = method._initialize_set(records, white, 2, spec, streams)
    made, soft = method._optimize_set(
        begun, known, ClassPool(records, 3), white, spec, streams, ignore_progress
    )
    shown = white or (lambda x: x)
    kernel = ConvFeatureRegression(
        Ensemble(4, spec.shape, 3, width=width, generator=seeded(9)).to(device)
    )
    before, after = (
        (
            kernel.predict(
                shown(standardize_images(each)), soft, shown(standardize_images(images)), 1e-6
            )
            - center_labels(labels, 3)
        )
        .square()
        .mean()
        .item()
        for each in (begun, made)
    )
    assert made.isfinite().all()
    assert after < 0.75 * before


def test_whitened_noise_is_noise_where_the_steps_are_made(digits):
    records = digits[0]
    spec = Spec((1, 8, 8), 10)
    streams = Streams(0, Runtime("cpu"))
    white = ZcaWhitening(standardize_images(records.images))
    begun, labels = KernelInducingPoints(zca=True)._initialize_set(
        records, white, 20, spec, streams
    )
    plain, same = initialize_images(records, spec, 20, "random", streams.make_rng("start"))
    assert torch.equal(labels, same)
    assert 0 <= begun.min() < begun.max() <= 1
    # About 1 less what is cut off at black and white; noise in pixels is 2.4 here, most of it where digits do not differ.
    assert 0.7 < white(standardize_images(begun)).std() < 1.1
    assert white(standardize_images(plain)).std() > 2
    real, _ = KernelInducingPoints(zca=True, init="real")._initialize_set(
        records, white, 2, spec, streams
    )
    assert torch.equal(
        real, initialize_images(records, spec, 2, "real", streams.make_rng("start"))[0]
    )


@pytest.mark.parametrize(("per_class", "usual"), [(2, 0.04), (50, 0.1)])
def test_the_usual_rate_is_that_of_the_size(per_class, usual, digits):
    # Adam's first step is the rate itself, in standardised pixels, wherever there is a slope.
    images, _ = descended(digits[0], images_per_class=per_class, steps=1)
    begun, _ = initialize_images(
        digits[0], Spec((1, 8, 8), 10), per_class, "random", Streams(0).make_rng("start")
    )
    moved = (standardize_images(images) - standardize_images(begun)).abs()
    assert moved[(begun > 0.1) & (begun < 0.9)].median() == pytest.approx(usual, rel=0.01)


def test_learned_labels_lower_the_loss(digits):
    records = digits[0]
    losses = []
    for learned in (False, True):
        images, soft = descended(records, learn_labels=learned, steps=150)
        guesses = DenseNtkRegression(3).predict(
            standardize_images(images), soft, standardize_images(records.images), 1e-6
        )
        losses.append((guesses - center_labels(records.labels, 10)).square().mean().item())
    assert losses[1] < 0.95 * losses[0]


def test_learned_labels_are_released_as_probabilities(make_set):
    release = make_set(**{**DENSE, "steps": 20}, learn_labels=True)
    soft = release.artifact.tensors["soft_labels"]
    labels = release.artifact.tensors["labels"]
    assert release.artifact.is_consistent_with(release.spec)
    assert soft.argmax(1).eq(labels).float().mean() > 0.5  # they began as the hard ones
    assert not torch.equal(soft, torch.eye(10)[labels])
    assert "soft_labels" not in make_set(**{**DENSE, "steps": 1}).artifact.tensors


def test_augmentation_changes_both_sides_alike(digits, monkeypatch):
    seen = []

    def spied(images, drawn, real=kip_run.apply_augmentations):
        seen.append((len(images), drawn))
        return real(images, drawn)

    monkeypatch.setattr(kip_run, "apply_augmentations", spied)
    plain, _ = descended(digits[0], steps=6)
    assert seen == []
    changed, _ = descended(digits[0], steps=6, augment=True)
    assert not torch.equal(plain, changed)
    assert [count for count, _ in seen] == [20, 500] * 6
    for (_, own), (_, other) in zip(seen[::2], seen[1::2], strict=True):
        for each, same in zip(own, other, strict=True):
            assert each.unique(dim=0).shape[0] == 1
            assert torch.equal(each[0], same[0])
    assert (
        len(
            {
                tuple(drawn.affine[0].flatten().tolist()) + tuple(drawn.cutout[0].tolist())
                for _, drawn in seen
            }
        )
        > 1
    )


def test_classes_count_alike_however_rare(digits):
    """Nine tenths of class 0 taken out: its images still get their share of the loss."""
    records = digits[0]
    kept = torch.cat(
        [(records.labels != 0).nonzero().flatten(), (records.labels == 0).nonzero().flatten()[:14]]
    )
    images, soft = descended(Records(records.images[kept], records.labels[kept]))
    guesses = (
        DenseNtkRegression(3)
        .predict(standardize_images(images), soft, standardize_images(records.images), 1e-6)
        .argmax(1)
    )
    assert (guesses[records.labels == 0] == 0).float().mean() > 0.8


def test_ratio_counts_of_the_class(make_set):
    images = make_set(kernel="dense", ratio=0.01, steps=1, batch_size=100).artifact.tensors[
        "images"
    ]
    assert len(images) == 10 * round(0.01 * 1438 / 10)


# What it says of itself


def test_it_promises_nothing(make_set, digits):
    release = make_set(**{**DENSE, "steps": 1})
    assert isinstance(release.guarantee, NoGuarantee)
    assert "no mechanism" in release.guarantee.reason
    assert "real" not in release.guarantee.reason
    real = make_set(**{**DENSE, "steps": 5}, init="real")
    assert "real images" in real.guarantee.reason
    near = (
        torch.cdist(real.artifact.tensors["images"].flatten(1), digits[0].images.flatten(1))
        .min(1)
        .values
    )
    apart = torch.cdist(digits[1].images.flatten(1), digits[0].images.flatten(1)).min(1).values
    assert near.median() < 0.5 * apart.median()  # what its reason says: they remain visible


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kernel", "convolutional"),
        ("init", "noise"),
        ("ridge", 1e-14),
        ("ridge", math.nan),
        ("learning_rate", 0),
        ("steps", 0),
        ("num_networks", 0),
        ("batch_size", 0),
        ("ratio", 2.0),
    ],
)
def test_bad_settings_are_errors(key, value):
    with pytest.raises(SettingError, match=f"kernel-points.{key}"):
        make_method("kernel-points", {key: value})


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: the features are in half precision on one alone",
)
def test_half_precision_predicts_as_double_does():
    """On a GPU against float64 on the CPU, at the size of CIFAR-10 images: predictions, and the gradient that moves the set."""
    nets = Ensemble(2, (3, 32, 32), 10, width=128, generator=seeded())
    support, images = (
        standardize_images(torch.rand(count, 3, 32, 32, generator=seeded(count)))
        for count in (20, 40)
    )
    labels = center_labels(torch.arange(20) % 10, 10)
    found = []
    for device, kind in (("cpu", torch.float64), ("cuda", torch.float32)):
        kernel = ConvFeatureRegression(copy.deepcopy(nets).to(device, kind))
        own = support.to(device, kind).requires_grad_()
        guesses = kernel.predict(own, labels.to(device), images.to(device, kind), 1e-3)
        (slope,) = torch.autograd.grad(guesses.square().sum(), own)
        found.append((guesses.detach().double().cpu(), slope.double().cpu()))
    for exact, half in zip(*found, strict=True):
        # bfloat16 has 8 binary digits, 0.4 % a number; autocast on a CPU is off by 0.7 % in predictions and 6 % in the gradient
        assert (half - exact).norm() < (0.03 if exact.ndim == 2 else 0.2) * exact.norm()


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: it is the one to be compared with the CPU"
)
def test_a_gpu_moves_the_set_as_the_cpu_does():
    shape = (3, 32, 32)
    spec = Spec((3, 32, 32), 3)
    records = Records(torch.rand(60, *shape, generator=seeded()), torch.arange(60) % 3)
    made = []
    for device in ("cpu", "cuda"):
        there = Records(*(each.to(device) for each in records))
        streams = Streams(0, Runtime(device))
        method = KernelInducingPoints(
            kernel="dense", images_per_class=2, steps=5, batch_size=60, augment=False
        )
        begun, labels = method._initialize_set(there, None, 2, spec, streams)
        made.append(
            method._optimize_set(
                begun, labels, ClassPool(there, 3), None, spec, streams, ignore_progress
            )[0].cpu()
        )
    assert (made[0] - begun.cpu()).abs().max() > 0.01
    # A dense kernel has nothing random, and with all records in each batch their order is all that differs. Adam's first steps are the
    # sign of a slope, so a slope near 0 may go the other way: a few pixels.
    assert ((made[0] - made[1]).abs() > 1e-3).float().mean() < 0.02


def test_images_without_any_spread_do_no_harm(tmp_path):
    images = np.zeros((6, 1, 8, 8), np.float32)  # nothing to tell apart, nothing to whiten
    box = Sensitive(images, np.arange(6) % 2, Spec((1, 8, 8), 2), name="black")
    for more in ({"kernel": "dense"}, {"zca": True}):
        release = synthesize(
            box,
            KernelInducingPoints(images_per_class=1, steps=2, batch_size=4, net_width=4, **more),
            ledger=tmp_path / "b.jsonl",
        )
        assert release.artifact.tensors["images"].isfinite().all()
