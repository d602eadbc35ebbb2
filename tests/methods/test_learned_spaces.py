"""Learned spaces: codes are cut by the gate whatever an encoder gives, lessons are paid for or public, and a decoder draws particles."""

import math

import numpy as np
import pytest
import torch
from methods.test_sliced_flow import (
    CLASSES,
    SHAPE,
    TINY,
    blobs,
    block_sums,
    gate_for,
    seeded,
    spec_of,
)
from scipy.stats import beta, norm
from support.fakes import planted_clip
from support.tiny_settings import seal_records

from privot.components.dp_sgd import compute_per_example_gradient, detach_weights
from privot.components.flow_snapshots import SNAPSHOTS_KEY
from privot.components.latent_space import (
    LatentSpace,
    generate_synthetic_images,
    reconstruction_loss,
    train_on_public,
)
from privot.components.sliced_statistics import compute_record_moments, draw_tight_frame
from privot.data import load_dataset
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.methods import make_method
from privot.methods.sliced_flow import SlicedFlow
from privot.methods.sliced_generator import SlicedGenerator
from privot.nets import initialize_weights
from privot.nets.autoencoders import ConvAutoencoder
from privot.nets.dp_autoencoder import Autoencoder
from privot.privacy import accounting
from privot.privacy import clipping as clipping_module
from privot.privacy import secret_side as secret_side_module
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Full
from privot.runtime import Runtime, Streams, ignore_progress
from privot.synthesis import resize, synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

CODE = 4
LEARN = {
    "autoencoder_dim": CODE,
    "num_bases": 4,
    "num_blocks": 10,
    "autoencoder_steps": 120,
    "autoencoder_batch_size": 50,
    "autoencoder_learning_rate": 0.01,
}


class Loud(torch.nn.Module):
    """An encoder whose codes lie far outside any ball: the first numbers of an image, a thousand times as large."""

    def forward(self, images):
        return 1000 * (images.flatten(1)[:, :CODE] - 0.5)


def loud():
    return LatentSpace(Loud(), {}, torch.nn.Identity(), CODE)


def unpriced(monkeypatch):
    """Prices of sampled answers take a second each, and are not what most of these are about."""
    monkeypatch.setattr(
        accounting,
        "compute_privacy_cost",
        lambda event, neighbours, coarse=False: accounting._gaussian_cost(1.0),
    )


# The bounds


def test_the_ball_is_the_gates_not_the_encoders():
    """Records at two far ends, one crosses: block sums move by the bound and no more, though codes are a thousand times too long."""
    frame = draw_tight_frame(loud(), 1, 3, 0, seeded())
    radius = 2.0
    images = np.stack([np.full(SHAPE, turn % 2, np.float32) for turn in range(20)])
    labels = np.repeat([0, 1], 10)
    other = images.copy()
    other[0] = 1 - other[0]
    apart = (block_sums(each, labels, loud(), frame, 2, radius) for each in (images, other))
    assert 0.99 < torch.dist(*apart) / (2 * radius * math.sqrt(3)) <= 1
    parts = torch.func.vmap(compute_record_moments, in_dims=(0, 0, None, None))(
        torch.from_numpy(images), torch.from_numpy(labels), loud(), radius
    )
    assert parts.norm(dim=1).max() <= 1 + 1e-6


def test_an_encoder_that_is_believed_is_seen(monkeypatch):
    monkeypatch.setattr(clipping_module, "clip_rows", planted_clip())
    frame = draw_tight_frame(loud(), 1, 3, 0, seeded())
    images = np.stack([np.full(SHAPE, turn % 2, np.float32) for turn in range(20)])
    labels = np.repeat([0, 1], 10)
    other = images.copy()
    other[0] = 1 - other[0]
    apart = (block_sums(each, labels, loud(), frame, 2, 2.0) for each in (images, other))
    assert torch.dist(*apart) > 100 * 2 * 2.0 * math.sqrt(3)


def lesson_gate(images, labels, noise, asks):
    """A gate for lessons on all records, and what they ask: sums of gradients of a net that stands still."""
    method = SlicedFlow(
        **{**TINY, "num_blocks": 2},
        space="private",
        autoencoder_dim=CODE,
        noise_multiplier=1.0,
        autoencoder_steps=asks,
        autoencoder_batch_size=len(labels),
    )
    gate = gate_for(method, images, labels)
    net = initialize_weights(Autoencoder(SHAPE, CODE, 8, 4), seeded())
    gate._stages["autoencoder"] = Stage("autoencoder", "sum", noise, asks, Full())
    # a small bound, so that every gradient is cut
    return [
        gate.sum(
            "autoencoder",
            compute_per_example_gradient,
            net,
            detach_weights(net),
            reconstruction_loss,
            None,
            clip_norm=0.01,
        )
        for _ in range(asks)
    ]


def audited(noise, runs=300):
    """How often a threshold tells neighbours apart by one lesson, and how often the claim allows it."""
    images = np.stack([np.full(SHAPE, turn % 2, np.float32) for turn in range(8)])
    labels = np.arange(8) // 4
    other = images.copy()
    other[0] = 1
    clean = [lesson_gate(each, labels, 0.0, 1)[0] for each in (images, other)]
    way = clean[1] - clean[0]
    assert way.norm() <= 0.02 * (1 + 1e-9)
    way = way / way.norm()
    middle = (clean[0] + clean[1]) / 2
    ones = [
        sum(float((each - middle) @ way) > 0 for each in lesson_gate(data, labels, noise, runs))
        for data in (other, images)
    ]
    low = beta.ppf(1e-4, ones[0], runs - ones[0] + 1)
    high = beta.ppf(1 - 1e-4, ones[1] + 1, runs - ones[1])
    return low, norm.cdf(norm.ppf(high) + 1 / noise)


@pytest.mark.slow
def test_an_audit_of_lessons_finds_what_is_claimed_and_a_third_of_the_noise(monkeypatch):
    found, allowed = audited(noise=0.7)
    assert found <= allowed
    honest = secret_side_module.add_noise
    monkeypatch.setattr(
        secret_side_module,
        "add_noise",
        lambda total, noise_std, *more: honest(total, noise_std / 3, *more),
    )
    found, allowed = audited(noise=0.7)
    assert found > allowed


# The price


@pytest.mark.parametrize("mode", ["blocks", "records", "resampled"])
def test_lessons_are_in_the_plan(mode):
    spec = Spec(SHAPE, 2, 2000, (1000, 1000))
    given = {"noise_multiplier": 2.0, "mode": mode, "steps": 20}
    plain, paid = (
        SlicedFlow(**given, space=space, autoencoder_steps=20).plan(spec)
        for space in ("public", "private")
    )
    assert [stage.name for stage in paid.stages] == [
        "autoencoder",
        *(stage.name for stage in plain.stages),
    ]
    assert paid.neighbours is plain.neighbours is Neighbours.REPLACE
    lessons = paid.stages[0]
    assert (
        lessons.operation,
        lessons.steps,
        lessons.sampling.sample_size,
        lessons.sampling.dataset_size,
    ) == (
        "sum",
        20,
        100,
        2000,
    )
    if mode == "blocks":
        assert (
            SlicedGenerator(noise_multiplier=2.0, space="private", autoencoder_steps=20).plan(spec)
            == paid
        )


def test_lessons_are_in_the_price():
    """Shares are of mu², roughly, so that the whole costs about what one answer would; what is charged is the exact price of the events."""
    spec = Spec((1, 28, 28), 10, 60_000, (6000,) * 10)
    one, paid = (
        SlicedFlow(noise_multiplier=1.0, space=space).plan(spec) for space in ("public", "private")
    )
    whole = paid.cost().epsilon(1e-5)
    rest = Plan(paid.stages[1:], paid.neighbours).cost().epsilon(1e-5)
    assert rest < 0.75 * whole
    assert whole == pytest.approx(one.cost().epsilon(1e-5), rel=0.15)


@pytest.mark.parametrize(
    ("wrong", "spec", "words"),
    [
        (
            {"space": "private", "autoencoder_batch_size": 300},
            Spec(SHAPE, 2, 200, (100, 100)),
            "autoencoder_batch_size=300",
        ),
        ({"space": "private", "mode": "records"}, Spec(SHAPE, 2), "needs the number of records"),
        (
            {"space": "private", "mode": "records", "neighbours": "local"},
            Spec(SHAPE, 2, 200),
            "local",
        ),
        ({"autoencoder_dim": 1}, Spec(SHAPE, 2, 200, (100, 100)), "autoencoder_dim"),
        ({"public_data": ""}, Spec(SHAPE, 2, 200, (100, 100)), "public_data"),
        ({"autoencoder_share": 1.0}, Spec(SHAPE, 2, 200, (100, 100)), "autoencoder_share"),
    ],
)
def test_what_cannot_be_is_refused(wrong, spec, words):
    with pytest.raises(SettingError, match=words):
        make_method("sliced-flow", wrong).plan(spec)


# Learning


def test_an_autoencoder_learns_from_public_pictures():
    images = torch.from_numpy(blobs()[0])
    net = initialize_weights(ConvAutoencoder(SHAPE, CODE, channels=8), seeded())
    how = {"steps": 120, "batch_size": 50, "learning_rate": 0.01, "progress": ignore_progress}
    here = LatentSpace.from_autoencoder(
        train_on_public(net, images, **how, streams=Streams(0, Runtime("cpu"))), CODE
    )
    codes = here.encode_image(images)
    torch.testing.assert_close(codes.norm(dim=1), torch.full((400,), math.sqrt(CODE)))
    assert (here.decode_point(codes, 1) - images).square().mean() < 0.5 * images.var(0).mean()
    assert here.encode_image(images[:6].view(2, 3, *SHAPE)).shape == (2, 3, CODE)
    assert here.decode_point(codes.view(4, 100, CODE), 1).shape == (4, 100, *SHAPE)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 64, 64), (1, 7, 9), (1, 1, 5), (3, 40, 33)])
def test_autoencoders_fit_every_shape(shape):
    net = ConvAutoencoder(shape, 6, channels=4)
    assert net(torch.rand(2, *shape)).shape == (2, *shape)


def test_scenes_are_drawn_to_the_shape():
    found = generate_synthetic_images((1, 8, 8), 100, Streams(0, Runtime("cpu")))
    assert found.shape == (2000, 1, 8, 8)


def agree(found, own):
    """How many pictures are bright on the side of their label."""
    return (
        ((found[..., 4:].sum((1, 2, 3)) > found[..., :4].sum((1, 2, 3))).long() == own)
        .float()
        .mean()
    )


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """With public pictures at hand, and a folder that keeps the auto-encoder: it learns once."""
    return Streams(
        0, Runtime("cpu"), tmp_path_factory.mktemp("run"), torch.from_numpy(blobs(600)[0][400:])
    )


@pytest.mark.parametrize(
    ("mode", "least"), [("blocks", 0.9), ("records", 0.75), ("resampled", 0.75)]
)
def test_particles_in_a_learned_space_follow_their_label(streams, mode, least):
    images, labels = blobs()
    method = SlicedFlow(
        **LEARN,
        space="public",
        public_data="blobs",
        mode=mode,
        noise_multiplier=0.0,
        images_per_class=50,
        steps=60,
        sample_size=200,
        clip_ratio=10.0,
        label_norm=1.0,
    )
    made = method.fit(gate_for(method, images, labels), streams, ignore_progress)
    assert agree(made.tensors["images"], made.tensors["labels"]) > least
    assert made.is_consistent_with(spec_of(labels))


def test_a_generator_draws_with_the_decoder_that_was_taught(streams):
    images, labels = blobs()
    method = SlicedGenerator(
        **LEARN,
        space="public",
        public_data="blobs",
        noise_multiplier=0.0,
        latent_dim=4,
        hidden_dim=32,
        batch_per_class=40,
        steps=120,
        learning_rate=0.01,
    )
    made = method.fit(gate_for(method, images, labels), streams, ignore_progress)
    assert agree(*made.sample(spec_of(labels), 200)) > 0.9
    assert made.is_consistent_with(spec_of(labels))
    for name, value in streams.load_checkpoint("autoencoder").items():
        assert "decoder" not in name or torch.equal(made.tensors[name], value)


def test_public_data_that_is_not_at_hand_is_said():
    method = SlicedFlow(**LEARN, space="public", public_data="blobs", noise_multiplier=1.0)
    with pytest.raises(SettingError, match="blobs"):
        method.fit(gate_for(method, *blobs(40)), Streams(0, Runtime("cpu")), ignore_progress)


# Releases


def test_a_release_keeps_the_decoder_and_says_what_was_public(tmp_path):
    images, labels = blobs(60)
    np.savez(
        tmp_path / "open.npz", x=blobs(160)[0][60:].transpose(0, 2, 3, 1), y=np.arange(100) % 2
    )
    given = {
        **TINY,
        **LEARN,
        "autoencoder_steps": 20,
        "noise_multiplier": 1.0,
        "space": "public",
        "public_data": str(tmp_path / "open.npz"),
    }
    box = seal_records(images, labels, spec_of(labels))
    book = {"ledger": tmp_path / "book.jsonl", "runtime": Runtime("cpu")}
    release = synthesize(box, SlicedFlow(**given), **book)
    assert release.metadata["public_data"]["count"] == 100
    assert len(release.metadata["public_data"]["sha256"]) == 64
    larger = resize(release, 20, runtime=Runtime("cpu"))
    assert larger.artifact.tensors["images"].shape == (20 * CLASSES, *SHAPE)
    torch.testing.assert_close(
        resize(release, 12, runtime=Runtime("cpu")).sample(24)[0],
        release.sample(24)[0],
        atol=1e-4,
        rtol=0,
    )
    bare = {
        name: value
        for name, value in release.artifact.tensors.items()
        if "decoder.output_conv" not in name
    }
    with pytest.raises(ReleaseError, match="decoder"):
        SlicedFlow(**given).regenerate(
            type(release.artifact)("set", bare), release.spec, Streams(0), ignore_progress
        )


def test_the_sensitive_data_itself_is_refused_before_any_charge(tmp_path):
    images, labels = blobs(60)
    np.savez(tmp_path / "same.npz", x=images.transpose(0, 2, 3, 1), y=labels)
    method = SlicedFlow(
        **TINY, noise_multiplier=1.0, space="public", public_data=str(tmp_path / "same.npz")
    )
    with pytest.raises(SettingError, match="itself"):
        synthesize(
            load_dataset(tmp_path / "same.npz", public_classes=True),
            method,
            ledger=tmp_path / "book.jsonl",
        )
    assert not (tmp_path / "book.jsonl").exists()


@pytest.mark.parametrize("space", ["public", "private"])
def test_a_run_that_was_killed_goes_on_with_its_encoder(tmp_path, monkeypatch, space):
    images, labels = blobs(60)
    unpriced(monkeypatch)
    fresh = []
    real = secret_side_module.add_noise
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda *given: fresh.append(1) or real(*given)
    )
    method = SlicedFlow(
        **{**TINY, "num_bases": 4},
        space=space,
        autoencoder_dim=CODE,
        autoencoder_steps=6,
        autoencoder_batch_size=20,
        noise_multiplier=2.0,
    )
    box = seal_records(images, labels, spec_of(labels))
    given = {"out": tmp_path / "out", "ledger": tmp_path / "book.jsonl", "runtime": Runtime("cpu")}

    def kill(stage, step, of, **facts):
        if stage == "moving the particles":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(box, method, **given, progress=kill)
    asked = len(fresh)
    assert asked == 2 + 6 * (space == "private")
    release = synthesize(box, method, **given, resume=True)
    assert len(fresh) == asked
    assert release.sample(4)[0].isfinite().all()


# The strip


@pytest.mark.parametrize("mode", ["blocks", "records", "resampled"])
def test_the_strip_begins_at_the_start_and_ends_at_the_release(mode):
    images, labels = blobs(60)
    method = SlicedFlow(**{**TINY, "steps": 60}, mode=mode, sample_size=40, noise_multiplier=0.5)
    made = method.fit(gate_for(method, images, labels), Streams(0, Runtime("cpu")), ignore_progress)
    strip = made.resize_state[SNAPSHOTS_KEY].float()
    assert strip.shape == (8, CLASSES, *SHAPE)
    torch.testing.assert_close(
        strip[-1], made.tensors["images"][:: method.images_per_class], atol=1e-3, rtol=0
    )
    assert (strip[0] - strip[-1]).abs().max() > 0.05
    bare = SlicedFlow(**TINY, mode=mode, sample_size=40, noise_multiplier=0.5, keep_answers=False)
    assert (
        bare.fit(
            gate_for(bare, images, labels), Streams(0, Runtime("cpu")), ignore_progress
        ).resize_state
        == {}
    )
