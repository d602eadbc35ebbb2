"""KIP: its kernels are those of networks, its set predicts records it has not seen, and it says that it protects nobody."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from support.fit_baselines import fit_images, fit_on_records, make_generator

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
from privot.data.dataset import Records
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.methods import make_method
from privot.nets.ensemble import Ensemble
from privot.runtime import Runtime, Streams, ignore_progress

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = Spec((1, 8, 8), 10)
DENSE = {"kernel": "dense", "images_per_class": 2, "steps": 60, "batch_size": 500, "augment": False}
FEATURES = {
    **DENSE,
    "kernel": "features",
    "steps": 40,
    "batch_size": 200,
    "net_width": 16,
    "num_networks": 4,
    "learning_rate": 0.1,
}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", public=True).records()


@pytest.fixture(scope="module")
def unseen_digits():
    return load_dataset("digits", "test", public=True).records()


def start_from(records, init="random", per_class=2):
    return initialize_images(records, SPEC, per_class, init, Streams(0).make_rng("start"))[0]


def fit_digits(records, **settings):
    return fit_images(KernelInducingPoints(**{**DENSE, **settings}), records, SPEC)


def predict(kernel, images, soft_labels, others):
    support, queries = (standardize_images(part) for part in (images, others))
    return kernel.predict(support, soft_labels, queries, 1e-6)


def flat_distances(images, others):
    return torch.cdist(images.flatten(1), others.flatten(1)).min(1).values


# The kernels


def make_finite_network(size, width, depth, generator):
    """Parameters, all N(0, 1), of a dense network in the tangent parameterization."""
    layers = []
    for inputs, outputs in pairwise([size, *[width] * depth, 1]):
        for shape in ((outputs, inputs), (outputs,)):
            layers.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return [parameter.requires_grad_() for parameter in layers]


def forward(parameters, x):
    for layer, (weight, bias) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
        x = x.relu() if layer else x
        scale = math.sqrt(WEIGHT_VARIANCE / weight.shape[1])
        x = scale * (weight @ x) + math.sqrt(BIAS_VARIANCE) * bias
    return x[0]


def test_the_dense_kernel_is_that_of_wide_networks():
    images = torch.randn(4, 6, generator=make_generator(), dtype=torch.float64)
    images[1] = -images[0]  # the largest angle
    mean = torch.zeros(4, 4, dtype=torch.float64)
    generator = make_generator(1)
    for _ in range(30):
        parameters = make_finite_network(6, 400, 3, generator)
        gradients = torch.stack(
            [
                torch.cat(
                    [g.flatten() for g in torch.autograd.grad(forward(parameters, x), parameters)]
                )
                for x in images
            ]
        )
        mean += gradients @ gradients.T / 30
    exact = compute_neural_tangent_kernel(images, images, 3)
    # 30 networks of width 400: a standard error near 1/sqrt(30 * 400) of the diagonal a layer
    assert (mean - exact).abs().max() < 0.06 * exact.diagonal().mean()


def test_one_hidden_layer_by_hand():
    # Images so large that the biases hardly count: x·y (pi - angle)/pi from below, and the arc-cosine kernel of the layer itself.
    x = torch.tensor([[1e3, 0.0]], dtype=torch.float64)
    y = torch.tensor([[1e3, 1e3]], dtype=torch.float64)
    angle = math.pi / 4
    below = 1e6 * (math.pi - angle) / math.pi
    layer = math.sqrt(2) * 1e6 * (math.sin(angle) + (math.pi - angle) * math.cos(angle)) / math.pi
    found = compute_neural_tangent_kernel(x, y, 1).item()
    assert found == pytest.approx(below + layer, rel=1e-4)


def test_gradients_pass_where_an_image_meets_itself():
    images = torch.randn(3, 5, generator=make_generator(), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: compute_neural_tangent_kernel(x, x, 2), images)


def test_coefficients_solve_the_ridge_system():
    root = torch.randn(20, 20, generator=make_generator(), dtype=torch.float64)
    kernel = root @ root.T
    labels = torch.randn(20, 3, generator=make_generator(1), dtype=torch.float64)
    ridged = kernel + 1e-3 * kernel.trace() / 20 * torch.eye(20)
    torch.testing.assert_close(ridged @ solve_kernel_ridge(kernel, labels, 1e-3), labels)


def test_features_regress_as_their_kernel_does(digits):
    """Against K(T,X) (K(X,X) + ridge)^-1 y, gradient included; chunks change nothing."""
    nets = Ensemble(3, (1, 8, 8), 10, width=6, generator=make_generator()).double()
    kernel = ConvFeatureRegression(nets, chunk_size=7)
    kernel.resample(make_generator(5))
    labels = center_labels(digits.labels[:12], 10)
    images = digits.images[20:40].double()

    def predict_by_formula(x):
        own, other = (torch.cat(list(nets.features(each)), 1) for each in (x, images))
        square = own @ own.T
        ridged = square + 1e-4 * square.diagonal().mean() * torch.eye(12)
        return other @ own.T @ torch.linalg.inv(ridged) @ labels.double()

    first, second = (digits.images[:12].double().requires_grad_() for _ in range(2))
    found = kernel.predict(first, labels, images, 1e-4)
    expected = predict_by_formula(second)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-2, atol=1e-3)


def test_resampled_networks_are_others_of_the_same_law():
    kernel = ConvFeatureRegression(Ensemble(2, (1, 8, 8), 10, width=64, generator=make_generator()))
    before = {name: value.clone() for name, value in kernel.nets.named_parameters()}
    kernel.resample(make_generator(1))
    for name in ("conv0", "bias0", "conv1", "bias1"):
        now = kernel.nets.get_parameter(name)
        assert not torch.equal(now, before[name])
        assert now.std().item() == pytest.approx(before[name].std().item(), rel=0.2)
        assert now.abs().max().item() == pytest.approx(before[name].abs().max().item(), rel=0.1)


# Whitening and labels


def test_whitening_evens_out_and_is_inverted(digits):
    images = standardize_images(digits.images)
    whitening = ZcaWhitening(images)
    white = whitening(images)
    torch.testing.assert_close(whitening.inverse_transform(white), images, rtol=0, atol=1e-4)
    old, new = (torch.cov(each.flatten(1).T.double(), correction=0) for each in (images, white))
    variances = torch.linalg.eigvalsh(old)
    expected = variances / (variances + 0.1 * old.trace() / 64)  # by the ridge's definition
    torch.testing.assert_close(
        torch.linalg.eigvalsh(new), expected.sort().values, rtol=0, atol=1e-4
    )


def test_probabilities_are_the_nearest():
    labels = torch.randn(5, 4, generator=make_generator(), dtype=torch.float64)
    found = project_to_simplex(labels)
    assert (found >= 0).all()
    torch.testing.assert_close(found.sum(1), torch.ones(5, dtype=torch.float64))
    others = torch.rand(200, 5, 4, generator=make_generator(1), dtype=torch.float64) ** 3
    others /= others.sum(2, keepdim=True)
    nearest = (found - labels - 0.25).norm(dim=1)
    assert ((others - labels - 0.25).norm(dim=2) >= nearest - 1e-6).all()
    torch.testing.assert_close(project_to_simplex(center_labels(torch.arange(4), 4)), torch.eye(4))


# The set


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        (DENSE, 0.9),
        (FEATURES, 0.75),
        pytest.param({**FEATURES, "zca": True}, None, marks=pytest.mark.slow),
    ],
)
def test_the_set_predicts_images_it_has_not_seen(settings, least, digits, unseen_digits):
    artifact, _ = fit_on_records(KernelInducingPoints(**settings), digits, SPEC)
    labels = artifact.tensors["labels"]
    kernel = DenseNtkRegression(3)
    if settings["kernel"] == "features":
        nets = Ensemble(16, (1, 8, 8), 10, width=32, generator=make_generator(9))
        kernel = ConvFeatureRegression(nets)
    before, after = (
        predict(kernel, images, center_labels(labels, 10), unseen_digits.images)
        .argmax(1)
        .eq(unseen_digits.labels)
        .float()
        .mean()
        for images in (start_from(digits), artifact.tensors["images"])
    )
    assert labels.tolist() == [number // 2 for number in range(20)]
    assert before < 0.3
    assert after > (least or before + 0.2)


@pytest.fixture
def queries(monkeypatch):
    """What the dense kernel was given at each step: the set, its labels, the records, the ridge."""
    calls = []

    def record_call(kernel, support, labels, images, ridge, real=DenseNtkRegression.predict):
        calls.append((support.detach().clone(), labels.detach().clone(), images, ridge))
        return real(kernel, support, labels, images, ridge)

    monkeypatch.setattr(DenseNtkRegression, "predict", record_call)
    return calls


@pytest.mark.parametrize("zca", [False, True])
def test_the_kernel_sees_set_and_records_alike(zca, queries, digits):
    """Both standardized, or both whitened, and regressed with the ridge that was asked for."""
    whitening = ZcaWhitening(standardize_images(digits.images)) if zca else lambda images: images
    # more than there are: every record is seen
    fit_digits(digits, steps=2, batch_size=2000, zca=zca, init="real", ridge=3e-3)
    expected = whitening(standardize_images(start_from(digits, "real")))
    torch.testing.assert_close(queries[0][0], expected, rtol=0, atol=1e-4)
    records = whitening(standardize_images(digits.images)).double()
    for _, _, seen, ridge in queries:
        assert ridge == 3e-3
        assert flat_distances(records, seen.double()).max() < 1e-3


@pytest.mark.parametrize("zca", [False, True])
def test_every_step_keeps_to_what_can_be_released(zca, queries, digits):
    """Images between black and white, and learned labels that are probabilities; a large rate makes it bind."""
    whitening = ZcaWhitening(standardize_images(digits.images)) if zca else None
    settings = {**DENSE, "steps": 6, "learning_rate": 1.0, "zca": zca, "learn_labels": True}
    artifact, _ = fit_on_records(KernelInducingPoints(**settings), digits, SPEC)
    low, high = (
        standardize_images(torch.full((1, 1, 8, 8), value)).flatten()[0] for value in (0.0, 1.0)
    )
    for support, labels, _, _ in queries:
        pixels = whitening.inverse_transform(support) if zca else support
        assert low - 1e-3 <= pixels.min() <= pixels.max() <= high + 1e-3
        assert labels.min() >= -0.1 - 1e-6
        torch.testing.assert_close(labels.sum(1), torch.zeros(20), rtol=0, atol=1e-5)
    assert ((pixels < low + 1e-3) | (pixels > high - 1e-3)).float().mean() > 0.3
    images, hard, soft = (artifact.tensors[name] for name in ("images", "labels", "soft_labels"))
    assert artifact.is_consistent_with(SPEC)
    assert 0 <= images.min() <= images.max() <= 1
    assert not torch.equal(soft, torch.eye(10)[hard])


def test_whitened_noise_is_noise_where_the_steps_are_made(digits):
    streams = Streams(0, Runtime("cpu"))
    whitening = ZcaWhitening(standardize_images(digits.images))

    def initialize(init):
        method = KernelInducingPoints(zca=True, init=init)
        return method._initialize_set(digits, whitening, 20, SPEC, streams)[0]

    noise = initialize("random")
    assert 0 <= noise.min() < noise.max() <= 1
    # About 1 less what is cut off at black and white; noise in pixels is 2.4 here, most of it where digits do not differ.
    assert 0.7 < whitening(standardize_images(noise)).std() < 1.1
    assert whitening(standardize_images(start_from(digits, per_class=20))).std() > 2
    assert torch.equal(initialize("real"), start_from(digits, "real", 20))


@pytest.mark.parametrize(("per_class", "rate"), [(2, 0.04), (50, 0.1)])
def test_the_default_rate_is_that_of_the_size(per_class, rate, digits):
    # Adam's first step is the rate itself, in standardized pixels, wherever there is a gradient.
    images = fit_digits(digits, images_per_class=per_class, steps=1)
    start = start_from(digits, per_class=per_class)
    moved = (standardize_images(images) - standardize_images(start)).abs()
    assert moved[(start > 0.1) & (start < 0.9)].median() == pytest.approx(rate, rel=0.01)


def test_learned_labels_lower_the_loss(digits):
    records = Records(digits.images[:500], digits.labels[:500])
    streams = Streams(0, Runtime("cpu"))
    losses = []
    for learn in (False, True):
        method = KernelInducingPoints(**{**DENSE, "learn_labels": learn, "steps": 50})
        start, labels = method._initialize_set(records, None, 2, SPEC, streams)
        images, soft = method._optimize_set(
            start, labels, ClassPool(records, 10), None, SPEC, streams, ignore_progress
        )
        errors = predict(DenseNtkRegression(3), images, soft, records.images)
        losses.append((errors - center_labels(records.labels, 10)).square().mean().item())
    assert losses[1] < 0.95 * losses[0]
    assert soft.argmax(1).eq(torch.arange(20) // 2).float().mean() > 0.5  # they began as those


def test_augmentation_changes_both_sides_alike(digits, monkeypatch):
    calls = []

    def record_call(images, params, real=kip_run.apply_augmentations):
        calls.append((len(images), params))
        return real(images, params)

    monkeypatch.setattr(kip_run, "apply_augmentations", record_call)
    plain = fit_digits(digits, steps=6)
    assert calls == []
    assert not torch.equal(plain, fit_digits(digits, steps=6, augment=True))
    assert [count for count, _ in calls] == [20, 500] * 6
    for (_, own), (_, other) in zip(calls[::2], calls[1::2], strict=True):
        for one, same in zip(own, other, strict=True):
            assert one.unique(dim=0).shape[0] == 1
            assert torch.equal(one[0], same[0])
    assert len({str((params.affine[0], params.cutout[0])) for _, params in calls}) > 1


def test_classes_count_alike_however_rare(digits):
    """Nine tenths of class 0 taken out: its images still get their share of the loss."""
    is_zero = digits.labels == 0
    kept = torch.cat([(~is_zero).nonzero().flatten(), is_zero.nonzero().flatten()[:14]])
    images = fit_digits(Records(digits.images[kept], digits.labels[kept]))
    labels = center_labels(torch.arange(20) // 2, 10)
    guesses = predict(DenseNtkRegression(3), images, labels, digits.images[is_zero]).argmax(1)
    assert (guesses == 0).float().mean() > 0.8


def test_real_images_remain_visible_and_the_reason_says_so(digits, unseen_digits):
    _, reason = fit_on_records(KernelInducingPoints(**{**DENSE, "steps": 1}), digits, SPEC)
    assert "no mechanism" in reason
    assert "real" not in reason
    method = KernelInducingPoints(**{**DENSE, "steps": 5}, init="real")
    artifact, reason = fit_on_records(method, digits, SPEC)
    assert "real images" in reason
    near = flat_distances(artifact.tensors["images"], digits.images).median()
    assert near < 0.5 * flat_distances(unseen_digits.images, digits.images).median()


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


@pytest.mark.parametrize("settings", [{"kernel": "dense"}, {"zca": True}])
def test_images_without_any_variance_do_no_harm(settings):
    black = Records(torch.zeros(6, 1, 8, 8), torch.arange(6) % 2)
    method = KernelInducingPoints(
        images_per_class=1, steps=2, batch_size=4, net_width=4, **settings
    )
    assert fit_images(method, black, Spec((1, 8, 8), 2)).isfinite().all()


@NO_GPU
def test_half_precision_predicts_as_double_does():
    """On a GPU against float64 on the CPU, at the size of CIFAR-10 images: predictions, and the gradient that moves the set."""
    nets = Ensemble(2, (3, 32, 32), 10, width=128, generator=make_generator())
    support, images = (
        standardize_images(torch.rand(count, 3, 32, 32, generator=make_generator(count)))
        for count in (20, 40)
    )
    labels = center_labels(torch.arange(20) % 10, 10)
    results = []
    for device, kind in (("cpu", torch.float64), ("cuda", torch.float32)):
        kernel = ConvFeatureRegression(copy.deepcopy(nets).to(device, kind))
        own = support.to(device, kind).requires_grad_()
        guesses = kernel.predict(own, labels.to(device), images.to(device, kind), 1e-3)
        guesses.square().sum().backward()
        results.append((guesses.detach().double().cpu(), own.grad.double().cpu()))
    for exact, half in zip(*results, strict=True):
        # bfloat16 has 8 binary digits, 0.4 % a number; autocast on a CPU is off by 0.7 % in predictions and 6 % in the gradient
        assert (half - exact).norm() < (0.03 if exact.ndim == 2 else 0.2) * exact.norm()
