"""The entropic GAN: clean laws from noised records, on planes, categories, mixed records and pictures; what it refuses; and going on."""

import math

import pytest
import torch
from scipy.optimize import linear_sum_assignment
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
from privot.local.server_gate import ServerGate
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

QUICK = {
    "batch_size": 128,
    "steps": 200,
    "learning_rate": 0.008,
    "ema_decay": 0.98,
    "latent_dim": 4,
    "hidden_dim": 64,
}
PLANE = Laplace.calibrate(5.0, projection=Projection(shape=(2,)), low=-1.0, high=1.0)

BELL = Gaussian.calibrate(12.0, 1e-4, projection=Projection(shape=(2,)), low=-1.0, high=1.0)


def half_disk(count, seed):
    points = 2 * torch.rand(5 * count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return points[(points.norm(dim=1) < 1) & (points[:, 0] >= 0)][:count]


def distance(x, y):
    """W2 of equally many points."""
    cost = torch.cdist(x.double(), y.double()).square().numpy()
    return math.sqrt(cost[linear_sum_assignment(cost)].mean())


def sent(channel, rows, classes=1, shape=None):
    values = channel.privatize(rows, SecretRandom(0))
    return PrivatizedDataset(
        values, channel, Spec(shape or (1, 1, channel.record_dim), classes, len(values)), "sent"
    )


def learned(box, **settings):
    return synthesize(box, EntropicGAN(**{**QUICK, **settings}), runtime=Runtime("cpu"))


@pytest.mark.parametrize(
    ("loss", "channel"),
    [
        ("eot", PLANE),
        pytest.param("nll", PLANE, marks=pytest.mark.slow),
        pytest.param("eot", BELL, marks=pytest.mark.slow),
    ],
    ids=["eot", "nll", "gaussian"],
)
def test_a_half_disk_comes_back_from_its_noise(loss, channel):
    box = sent(channel, half_disk(10_000, 0))
    clean = half_disk(600, 1)
    made = learned(box, loss=loss)
    found = made.sample(600)[0].flatten(1)
    noisy = distance(box.values[:600], clean)
    assert noisy > 0.9
    assert distance(found, clean) < 0.2 * noisy
    assert found.abs().max() <= 1  # the domain of the channel
    told = made.metadata["diagnostics"]
    assert told["over_noise"] == pytest.approx(1, abs=0.06 if channel is PLANE else 0.15)


def test_a_wrong_strength_learns_another_law_and_the_residual_tells():
    box = sent(PLANE, half_disk(10_000, 0))
    clean = half_disk(600, 1)
    weak = learned(box, regularization=0.25, steps=100)
    assert distance(weak.sample(600)[0].flatten(1), clean) > 0.35
    told = weak.metadata["diagnostics"]
    assert told["over_noise"] < 0.9
    assert "learned some of the noise" in told["meaning"]


@pytest.mark.parametrize(
    "channel",
    [
        RandomizedResponse.calibrate(3.0, num_categories=8),
        pytest.param(UnaryEncoding.calibrate(3.0, num_categories=5), marks=pytest.mark.slow),
    ],
    ids=["rr", "unary"],
)
def test_shares_of_categories_come_back(channel):
    truth = torch.softmax(torch.linspace(0, 2, channel.num_categories), 0)
    rows = apportion_labels(truth, 40_000)[:, None].float()
    box = sent(channel, rows)
    found = estimate_frequencies(channel, box.values)
    assert (found - truth).abs().sum() / 2 < 0.02
    made = learned(box, steps=100).sample(20_000)[0].flatten().long()
    assert (
        torch.bincount(made, minlength=channel.num_categories) / 20_000 - truth
    ).abs().sum() / 2 < 0.06


def test_shares_are_exact_where_answers_are_all_there_is():
    """Answers in the very proportions of their law: nothing is left to chance, and the truth is the fixed point."""
    channel = RandomizedResponse.calibrate(1.0, num_categories=8)
    truth = torch.softmax(torch.linspace(0, 2, 8).double(), 0)
    law = (
        -channel.compute_cost_matrix(torch.eye(8).double(), torch.arange(8.0).double()[:, None])
    ).exp()
    counts = (1e5 * truth @ law).round().long()
    found = estimate_frequencies(channel, torch.arange(8.0).repeat_interleave(counts)[:, None])
    assert (found - truth).abs().sum() / 2 < 1e-4


def test_labels_through_a_channel_of_their_own_tell_the_generator():
    draws = torch.Generator().manual_seed(0)
    labels = (torch.rand(20_000, generator=draws) < 0.3).long()
    values = torch.where(labels == 1, 0.85, 0.15)[:, None] + 0.05 * torch.randn(
        20_000, 1, generator=draws
    )
    parts = (
        Laplace.calibrate(3.0, projection=Projection(shape=(1,))),
        RandomizedResponse.calibrate(2.0, num_categories=2),
    )
    made = learned(
        sent(Composite(parts=parts), torch.cat([values, labels[:, None]], 1), 2, (1, 1, 1)),
        loss="nll",
    )
    found, own = made.sample(1000)
    means = [float(found[own == label].mean()) for label in (0, 1)]
    assert means[0] == pytest.approx(0.15, abs=0.1)
    assert means[1] == pytest.approx(0.85, abs=0.1)
    assert made.guarantee.epsilon == pytest.approx(5.0)


def test_mixed_records_keep_what_hangs_together():
    draws = torch.Generator().manual_seed(1)
    kind = torch.randint(3, (20_000, 1), generator=draws)
    numbers = kind / 2 + 0.05 * torch.randn(20_000, 1, generator=draws)
    parts = (
        Laplace.calibrate(4.0, projection=Projection(shape=(1,))),
        RandomizedResponse.calibrate(3.0, num_categories=3),
    )
    found = (
        learned(sent(Composite(parts=parts), torch.cat([numbers, kind], 1)), loss="nll")
        .sample(3000)[0]
        .flatten(1)
    )
    assert set(found[:, 1].unique().tolist()) <= {0.0, 1.0, 2.0}
    means = [float(found[found[:, 1] == each, 0].mean()) for each in range(3)]
    assert means == pytest.approx([0.0, 0.5, 1.0], abs=0.15)


@pytest.mark.parametrize(("net", "name"), [("conv", "laplace"), ("dense", "gaussian")])
def test_pictures_from_a_file_to_a_certificate(tmp_path, net, name):
    images, labels = make_records()
    box = seal_records(images, labels, Spec((1, 8, 8), 3, len(labels)))
    channel = build_image_channel(
        box.spec, name, 50.0, labels_epsilon=4.0, projection_kind="pooled", projection_side=2
    )
    privatize(box, channel, out=tmp_path / "sent.safetensors", ledger=tmp_path / "book.jsonl")
    shown = []
    settings = {
        "batch_size": 8,
        "steps": 6,
        "latent_dim": 4,
        "hidden_dim": 8,
        "generator_channels": 4,
        "generator": net,
    }
    made = synthesize(
        tmp_path / "sent.safetensors",
        "entropic-gan",
        settings=settings,
        out=tmp_path / "out",
        runtime=Runtime("cpu"),
        progress=lambda *given, **facts: shown.append(facts),
    )
    assert made.sample(6)[0].shape == (6, 1, 8, 8)
    assert verify(tmp_path / "out")["epsilon_from_events"] == pytest.approx(channel.epsilon)
    assert made.guarantee.neighbours == "local"
    assert made.guarantee.epsilon == pytest.approx(54.0, rel=1e-3)
    assert any("residual" in each for each in shown)
    kept = Release.load(tmp_path / "out").metadata[
        "diagnostics"
    ]  # what it says of itself is in the manifest
    assert kept["meaning"] == made.metadata["diagnostics"]["meaning"]
    assert 0 < kept["over_noise"] < 10


@pytest.mark.parametrize(
    ("kind", "size", "given", "waves"),
    [("pooled", 4, None, 2), ("dct", 3, None, 3), ("identity", 0, None, 8), ("pooled", 4, 5, 5)],
)
def test_the_dense_net_draws_no_finer_than_what_was_sent(tmp_path, kind, size, given, waves):
    images, labels = make_records()
    box = seal_records(images, labels, Spec((1, 8, 8), 3, len(labels)))
    answers = privatize(
        box,
        build_image_channel(box.spec, "gaussian", 20.0, projection_kind=kind, projection_side=size),
        ledger=tmp_path / "book.jsonl",
    )
    drawn = (
        learned(answers, generator="dense", steps=2, batch_size=8, num_frequencies=given)
        .sample(5)[0]
        .double()
    )
    basis = scaled_dct_basis(8, 8).double() / math.sqrt(8)
    found = (
        basis.T @ drawn.clamp(1e-9, 1 - 1e-9).logit() @ basis
    )  # before the net's last step, which makes pixels of them
    finer = torch.cat([found[..., waves:, :].flatten(), found[..., :, waves:].flatten()])
    assert not len(finer) or finer.abs().max() < 1e-2
    assert found[..., :waves, :waves].abs().amax((0, 1)).min() > 1e-2


def test_a_box_of_records_is_refused(tmp_path):
    method = make_method("entropic-gan", {"steps": 2, "batch_size": 4})
    with pytest.raises(PrivotError, match="privot privatize"):
        synthesize(
            seal_records(*make_records(), choose_spec(method)),
            method,
            ledger=tmp_path / "book.jsonl",
        )


def test_points_are_not_taken_for_pictures():
    with pytest.raises(SettingError, match="generator=records"):
        learned(sent(PLANE, half_disk(50, 0)), generator="conv")


def test_debiasing_is_refused_and_says_why():
    with pytest.raises(SettingError, match="learn the noise"):
        make_method("entropic-gan", {"debias": "true"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": "w"},
        {"generator": "none"},
        {"batch_size": 1},
        {"steps": 0},
        {"learning_rate": 1.0},
        {"learning_rate": 0.0},
        {"regularization": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        make_method("entropic-gan", wrong)


def test_a_crashed_run_goes_on(tmp_path):
    box = sent(PLANE, half_disk(500, 0))
    seen = []
    box.save(tmp_path / "sent.safetensors")
    method = EntropicGAN(batch_size=16, steps=60, hidden_dim=8)

    def kill(stage, step, of, **facts):
        if step == 30:
            raise KeyboardInterrupt

    given = {"out": tmp_path / "out", "runtime": Runtime("cpu")}
    with pytest.raises(KeyboardInterrupt):
        synthesize(tmp_path / "sent.safetensors", method, **given, progress=kill)
    made = synthesize(
        tmp_path / "sent.safetensors",
        method,
        **given,
        resume=True,
        progress=lambda stage, step, of, **facts: seen.append(step),
    )
    assert min(seen) > 20
    assert made.sample(4)[0].isfinite().all()


def test_a_run_replays_from_its_file():
    box = sent(PLANE, half_disk(500, 0))
    method = EntropicGAN(batch_size=16, steps=10, hidden_dim=8)
    one, two = (
        synthesize(box, method, runtime=Runtime("cpu"), seed=3).artifact.tensors for _ in range(2)
    )
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_training_touches_nothing_but_what_was_sent():
    """The gate of a server has no way to a record: every other verb is refused."""
    gate = ServerGate(sent(PLANE, half_disk(50, 0)))
    with pytest.raises(PrivotError):
        gate.read_without_guarantee("curious")
    with pytest.raises(PrivotError):
        gate.sum("means", lambda image, label: image, clip_norm=1.0)


def test_words_say_what_the_residual_means():
    assert "misses" in describe_residual(1.2, 1.0, 0.01, 0.0)["meaning"]
    assert "learned some of the noise" in describe_residual(0.8, 1.0, 0.01, 0.0)["meaning"]
    assert "distribution of the noise" in describe_residual(1.02, 1.0, 0.01, 0.0)["meaning"]


def test_categories_are_drawn_from_their_probabilities():
    net = TabularGenerator((1, 1, 1), 1, [[3]], latent_dim=1, hidden_dim=4)
    with torch.no_grad():
        for each in net.parameters():
            each.zero_()
        net.layers[-1].bias.copy_(torch.tensor([0.7, 0.2, 0.1]).log())
        codes = torch.randn(50_000, net.latent_dim, generator=torch.Generator().manual_seed(0))
        drawn = net(codes, torch.zeros(50_000, dtype=torch.int64)).flatten().long()
    assert (torch.bincount(drawn, minlength=3) / 50_000).tolist() == pytest.approx(
        [0.7, 0.2, 0.1], abs=0.01
    )
