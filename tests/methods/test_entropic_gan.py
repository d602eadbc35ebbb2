"""The entropic GAN: clean distributions from privatized records, and what it says of its fit."""

import math

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from support.method_inputs import make_rng
from support.tiny_settings import choose_spec, make_records, seal_records

from privot.data.spec import Spec
from privot.errors import PrivotError, SettingError
from privot.local.channels import (
    Composite,
    Gaussian,
    Laplace,
    Projection,
    RandomizedResponse,
    UnaryEncoding,
)
from privot.local.dataset import PrivatizedDataset
from privot.local.frequency_estimation import (
    apportion_labels,
    describe_residual,
    estimate_frequencies,
)
from privot.local.privatize import build_image_channel, privatize
from privot.methods import make_method
from privot.methods.entropic_gan import EntropicGAN
from privot.nets.generators.dense import scaled_dct_basis
from privot.nets.generators.tabular import TabularGenerator
from privot.privacy.noise import SecretRandom
from privot.release import Release
from privot.release.verify import verify
from privot.runtime import Runtime
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = Runtime("cpu")
QUICK = {
    "batch_size": 128,
    "steps": 150,
    "learning_rate": 0.008,
    "ema_decay": 0.98,
    "latent_dim": 4,
    "hidden_dim": 64,
}
PLANE = Laplace.calibrate(5.0, projection=Projection(shape=(2,)), low=-1.0, high=1.0)
BELL = Gaussian.calibrate(12.0, 1e-4, projection=Projection(shape=(2,)), low=-1.0, high=1.0)


def sample_half_disk(count, seed):
    points = 2 * torch.rand(5 * count, 2, generator=make_rng(seed)) - 1
    return points[(points.norm(dim=1) < 1) & (points[:, 0] >= 0)][:count]


def measure_w2(x, y):
    cost = torch.cdist(x.double(), y.double()).square().numpy()
    return math.sqrt(cost[linear_sum_assignment(cost)].mean())


def privatize_rows(channel, rows, classes=1, shape=None):
    values = channel.privatize(rows, SecretRandom(0))
    spec = Spec(shape or (1, 1, channel.record_dim), classes, len(values))
    return PrivatizedDataset(values, channel, spec, "sent")


def learn(dataset, **settings):
    return synthesize(dataset, EntropicGAN(**QUICK | settings), runtime=CPU)


@pytest.mark.parametrize(
    ("loss", "channel"),
    [
        ("eot", PLANE),
        pytest.param("nll", PLANE, marks=pytest.mark.slow),
        pytest.param("eot", BELL, marks=pytest.mark.slow),
    ],
    ids=["eot", "nll", "gaussian"],
)
def test_a_half_disk_is_recovered_from_its_noise(loss, channel):
    dataset = privatize_rows(channel, sample_half_disk(10_000, 0))
    clean = sample_half_disk(600, 1)
    release = learn(dataset, loss=loss, steps=200)
    samples = release.sample(600)[0].flatten(1)
    noisy = measure_w2(dataset.values[:600], clean)
    assert noisy > 0.9
    assert measure_w2(samples, clean) < 0.2 * noisy
    assert samples.abs().max() <= 1  # the domain of the channel
    tolerance = 0.06 if channel is PLANE else 0.15
    assert release.metadata["diagnostics"]["over_noise"] == pytest.approx(1, abs=tolerance)


def test_a_wrong_strength_learns_some_of_the_noise_and_the_residual_shows_it():
    dataset = privatize_rows(PLANE, sample_half_disk(10_000, 0))
    release = learn(dataset, regularization=0.25, steps=100)
    distance = measure_w2(release.sample(600)[0].flatten(1), sample_half_disk(600, 1))
    assert distance > 0.35
    diagnostics = release.metadata["diagnostics"]
    assert diagnostics["over_noise"] < 0.9
    assert "learned some of the noise" in diagnostics["meaning"]


@pytest.mark.parametrize(
    ("ratio", "meaning"),
    [
        (1.2, "misses"),
        (0.8, "learned some of the noise"),
        (1.02, "distribution of the noise"),
    ],
)
def test_words_say_what_the_residual_means(ratio, meaning):
    assert meaning in describe_residual(ratio, 1.0, 0.01, 0.0)["meaning"]


@pytest.mark.parametrize(
    "channel",
    [
        RandomizedResponse.calibrate(3.0, num_categories=8),
        pytest.param(UnaryEncoding.calibrate(3.0, num_categories=5), marks=pytest.mark.slow),
    ],
    ids=["rr", "unary"],
)
def test_shares_of_categories_are_recovered(channel):
    count = channel.num_categories
    truth = torch.softmax(torch.linspace(0, 2, count), 0)
    dataset = privatize_rows(channel, apportion_labels(truth, 40_000)[:, None].float())
    estimate = estimate_frequencies(channel, dataset.values)
    assert (estimate - truth).abs().sum() / 2 < 0.02
    samples = learn(dataset, steps=100).sample(20_000)[0].flatten().long()
    shares = torch.bincount(samples, minlength=count) / 20_000
    assert (shares - truth).abs().sum() / 2 < 0.06


def test_shares_are_exact_for_answers_in_their_expected_proportions():
    channel = RandomizedResponse.calibrate(1.0, num_categories=8)
    truth = torch.softmax(torch.linspace(0, 2, 8).double(), 0)
    answers = torch.arange(8.0)
    law = (-channel.compute_cost_matrix(torch.eye(8).double(), answers.double()[:, None])).exp()
    counts = (1e5 * truth @ law).round().long()
    estimate = estimate_frequencies(channel, answers.repeat_interleave(counts)[:, None])
    assert (estimate - truth).abs().sum() / 2 < 1e-4


def test_samples_follow_labels_from_a_channel_of_their_own():
    rng = make_rng()
    labels = (torch.rand(20_000, generator=rng) < 0.3).long()
    means = torch.where(labels == 1, 0.85, 0.15)[:, None]
    values = means + 0.05 * torch.randn(20_000, 1, generator=rng)
    numbers = Laplace.calibrate(3.0, projection=Projection(shape=(1,)))
    channel = Composite(parts=(numbers, RandomizedResponse.calibrate(2.0, num_categories=2)))
    rows = torch.cat([values, labels[:, None]], 1)
    release = learn(privatize_rows(channel, rows, 2, (1, 1, 1)), loss="nll")
    samples, own = release.sample(1000)
    own_means = [float(samples[own == label].mean()) for label in (0, 1)]
    assert own_means == pytest.approx([0.15, 0.85], abs=0.1)
    assert release.guarantee.epsilon == pytest.approx(5.0)


def test_mixed_records_keep_the_dependence_of_their_fields():
    rng = make_rng(1)
    kind = torch.randint(3, (20_000, 1), generator=rng)
    values = kind / 2 + 0.05 * torch.randn(20_000, 1, generator=rng)
    numbers = Laplace.calibrate(4.0, projection=Projection(shape=(1,)))
    channel = Composite(parts=(numbers, RandomizedResponse.calibrate(3.0, num_categories=3)))
    dataset = privatize_rows(channel, torch.cat([values, kind], 1))
    samples = learn(dataset, loss="nll").sample(3000)[0].flatten(1)
    assert set(samples[:, 1].unique().tolist()) <= {0.0, 1.0, 2.0}
    means = [float(samples[samples[:, 1] == category, 0].mean()) for category in range(3)]
    assert means == pytest.approx([0.0, 0.5, 1.0], abs=0.15)


def seal_images():
    images, labels = make_records()
    return seal_records(images, labels, Spec((1, 8, 8), 3, len(labels)))


@pytest.mark.parametrize(("net", "name"), [("conv", "laplace"), ("dense", "gaussian")])
def test_images_from_a_file_to_a_certificate(tmp_path, net, name):
    dataset = seal_images()
    channel = build_image_channel(
        dataset.spec, name, 50.0, labels_epsilon=4.0, projection_kind="pooled", projection_side=2
    )
    file = tmp_path / "sent.safetensors"
    privatize(dataset, channel, out=file, ledger=tmp_path / "ledger.jsonl")
    shown = []
    settings = {
        "batch_size": 8,
        "steps": 6,
        "latent_dim": 4,
        "hidden_dim": 8,
        "generator_channels": 4,
        "generator": net,
    }
    release = synthesize(
        file,
        "entropic-gan",
        settings=settings,
        out=tmp_path / "out",
        runtime=CPU,
        progress=lambda *_, **facts: shown.append(facts),
    )
    assert release.sample(6)[0].shape == (6, 1, 8, 8)
    assert verify(tmp_path / "out")["epsilon_from_events"] == pytest.approx(channel.epsilon)
    assert release.guarantee.neighbours == "local"
    assert release.guarantee.epsilon == pytest.approx(54.0, rel=1e-3)
    assert any("residual" in facts for facts in shown)
    stored = Release.load(tmp_path / "out").metadata["diagnostics"]
    assert stored["meaning"] == release.metadata["diagnostics"]["meaning"]
    assert 0 < stored["over_noise"] < 10


@pytest.mark.parametrize(
    ("kind", "size", "asked", "used"),
    [("pooled", 4, None, 2), ("dct", 3, None, 3), ("identity", 0, None, 8), ("pooled", 4, 5, 5)],
)
def test_the_dense_net_draws_no_finer_than_what_was_sent(tmp_path, kind, size, asked, used):
    dataset = seal_images()
    channel = build_image_channel(
        dataset.spec, "gaussian", 20.0, projection_kind=kind, projection_side=size
    )
    release = learn(
        privatize(dataset, channel, ledger=tmp_path / "ledger.jsonl"),
        generator="dense",
        steps=2,
        batch_size=8,
        num_frequencies=asked,
    )
    # before the net's last step, which makes pixels of them
    logits = release.sample(5)[0].double().clamp(1e-9, 1 - 1e-9).logit()
    basis = scaled_dct_basis(8, 8).double() / math.sqrt(8)
    coefficients = basis.T @ logits @ basis
    low = coefficients[..., :used, :used].abs().amax((0, 1))
    assert low.min() > 1e-2
    coefficients[..., :used, :used] = 0
    assert coefficients.abs().max() < 1e-2


def test_categories_are_drawn_from_their_probabilities():
    net = TabularGenerator((1, 1, 1), 1, [[3]], latent_dim=1, hidden_dim=4)
    probabilities = torch.tensor([0.7, 0.2, 0.1])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        net.layers[-1].bias.copy_(probabilities.log())
        latents = torch.randn(50_000, net.latent_dim, generator=make_rng())
        drawn = net(latents, torch.zeros(50_000, dtype=torch.int64)).flatten().long()
    shares = torch.bincount(drawn, minlength=3) / 50_000
    torch.testing.assert_close(shares, probabilities, atol=0.01, rtol=0)


def test_rejects_a_sealed_dataset(tmp_path):
    method = make_method("entropic-gan", {"steps": 2, "batch_size": 4})
    dataset = seal_records(*make_records(), choose_spec(method))
    with pytest.raises(PrivotError, match="privot privatize"):
        synthesize(dataset, method, ledger=tmp_path / "ledger.jsonl")


def test_rejects_points_for_a_generator_of_images():
    with pytest.raises(SettingError, match="generator=records"):
        learn(privatize_rows(PLANE, sample_half_disk(50, 0)), generator="conv")


def test_a_killed_run_resumes(tmp_path):
    file = tmp_path / "sent.safetensors"
    privatize_rows(PLANE, sample_half_disk(500, 0)).save(file)
    given = {"out": tmp_path / "out", "runtime": CPU}
    method = EntropicGAN(batch_size=16, steps=40, hidden_dim=8)
    shown = []

    def kill(stage, step, of, **facts):
        if step == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(file, method, **given, progress=kill)
    release = synthesize(
        file, method, **given, resume=True, progress=lambda *where, **_: shown.append(where[1])
    )
    assert min(shown) > 20
    assert release.sample(4)[0].isfinite().all()
