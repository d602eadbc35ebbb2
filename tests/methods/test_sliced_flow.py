"""The sliced flow: its spaces, what its answers are and cost, and particles that meet them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.method_inputs import make_blobs, make_gate, make_rng, measure_agreement
from support.tiny_settings import seal_records

from privot.components import block_quantiles
from privot.components.flow_snapshots import SNAPSHOTS_KEY
from privot.components.latent_space import (
    LatentSpace,
    generate_synthetic_images,
    train_on_public,
)
from privot.components.noisy_projections import compute_block_quantiles, encode_record
from privot.components.particle_flow import build_flow_schedule, compute_quantile_gaps
from privot.components.sliced_moments import denoise_spectrum
from privot.components.sliced_statistics import (
    compute_normal_block_means,
    compute_record_moments,
    denoise_quantiles,
    draw_tight_frame,
    estimate_gaussians,
    random_orthogonal_frames,
)
from privot.components.transforms import TRANSFORMS, build_image_transform, build_side_basis
from privot.data import load_dataset
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.methods.sliced_flow import SlicedFlow
from privot.methods.sliced_generator import SlicedGenerator
from privot.nets import initialize_weights
from privot.nets.autoencoders import ConvAutoencoder
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.runtime import Runtime, Streams, ignore_progress
from privot.synthesis import resize, synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 8, 8)
CPU = Runtime("cpu")
TINY = {
    "num_frequencies": 4,
    "num_bases": 2,
    "patch_size": 2,
    "num_blocks": 5,
    "images_per_class": 12,
    "steps": 12,
    "gray_level": 0.5,
}
LEARNED = {
    "autoencoder_dim": 4,
    "num_bases": 4,
    "num_blocks": 10,
    "autoencoder_steps": 120,
    "autoencoder_batch_size": 50,
    "autoencoder_learning_rate": 0.01,
}
PAPER = {"sample_size": 200, "clip_ratio": 10.0, "label_norm": 1.0, "noise_multiplier": 0.0}


def make_spec(count):
    return Spec(SHAPE, 2, count, (count // 2, count // 2))


def fit(method, count, streams=None):
    """What the method makes of so many blobs."""
    spec = make_spec(count)
    artifact = method.fit(
        make_gate(method.plan(spec), *make_blobs(count), spec),
        streams or Streams(0, CPU),
        ignore_progress,
    )
    assert artifact.is_consistent_with(spec)
    return artifact


def synthesize_blobs(tmp_path, method, count=60):
    dataset = seal_records(*make_blobs(count), make_spec(count))
    return synthesize(dataset, method, ledger=tmp_path / "ledger.jsonl", runtime=CPU)


# Spaces


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("side", [7, 8, 12, 28])
def test_transforms_are_orthonormal_and_coarsest_first(kind, side):
    columns = build_side_basis(kind, side, side)
    torch.testing.assert_close(columns.T @ columns, torch.eye(side), atol=1e-5, rtol=0)
    if side % 2 == 0:  # what is even lies in the coarsest alone
        flat = torch.ones(side) / math.sqrt(side)
        few = side if kind == "cosines" else 2 ** int(math.log2(side & -side))
        assert (columns[:, : side // few].T @ flat).norm() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_point_keeps_its_length_and_comes_back(kind):
    space = build_image_transform(kind, (3, 8, 8), 8, gray_level=0.5)
    images = torch.rand(5, 3, 8, 8, generator=make_rng())
    points = space.encode_image(images)
    lengths = (images - 0.5).flatten(1).norm(dim=1)
    torch.testing.assert_close(points.norm(dim=1), lengths, rtol=1e-5, atol=0)
    torch.testing.assert_close(space.decode_point(points, 3), images, atol=1e-5, rtol=0)
    weighted = build_image_transform("cosines", SHAPE, 6, fine_weight=1.0)
    points = torch.randn(4, 36, generator=make_rng())
    again = weighted.encode_image(weighted.decode_point(points, 1))
    torch.testing.assert_close(again, points, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("channels", "frequencies", "patch"), [(1, 4, 2), (1, 5, 3), (3, 4, 3), (1, 4, 0)]
)
def test_the_frame_is_tight(channels, frequencies, patch):
    space = build_image_transform("cosines", (channels, 8, 8), frequencies)
    frame = draw_tight_frame(space, channels, 4, patch, make_rng())
    for basis in frame:
        identity = torch.eye(len(basis), dtype=torch.float64)
        torch.testing.assert_close(basis @ basis.T, identity, atol=1e-12, rtol=0)
    # in cosines a local direction is no axis
    assert (frame.abs() > 1e-9).all()


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 64, 64), (1, 7, 9), (1, 1, 5), (3, 40, 33)])
def test_autoencoders_fit_every_shape(shape):
    assert ConvAutoencoder(shape, 6, channels=4)(torch.rand(2, *shape)).shape == (2, *shape)


def test_an_autoencoder_learns_from_public_images():
    assert generate_synthetic_images(SHAPE, 100, Streams(0, CPU)).shape == (2000, *SHAPE)
    images = torch.from_numpy(make_blobs()[0])
    net = initialize_weights(ConvAutoencoder(SHAPE, 4, channels=8), make_rng())
    given = {"steps": 120, "batch_size": 50, "learning_rate": 0.01, "progress": ignore_progress}
    space = LatentSpace.from_autoencoder(
        train_on_public(net, images, **given, streams=Streams(0, CPU)), 4
    )
    points = space.encode_image(images)
    torch.testing.assert_close(points.norm(dim=1), torch.full((400,), 2.0))
    error = (space.decode_point(points, 1) - images).square().mean()
    assert error < 0.5 * images.var(0).mean()
    assert space.encode_image(images[:6].view(2, 3, *SHAPE)).shape == (2, 3, 4)
    assert space.decode_point(points.view(4, 100, 4), 1).shape == (4, 100, *SHAPE)


# What a record contributes


class LoudEncoder(torch.nn.Module):
    """Its codes lie far outside of any ball."""

    def forward(self, images):
        return 1000 * (images.flatten(1)[:, :4] - 0.5)


@pytest.mark.parametrize(
    "space",
    [
        build_image_transform("cosines", SHAPE, 4, fine_weight=0.5),
        LatentSpace(LoudEncoder(), {}, torch.nn.Identity(), 4),
    ],
    ids=["cosines", "loud encoder"],
)
def test_a_record_stays_within_its_ball(space):
    extremes = [np.ones((1, *SHAPE), np.float32), np.zeros((1, *SHAPE), np.float32)]
    images = torch.from_numpy(np.concatenate([make_blobs(40)[0], *extremes]))
    for radius in (0.1, 1.0, 100.0):
        parts = torch.func.vmap(compute_record_moments, in_dims=(0, 0, None, None))(
            images, torch.zeros(42), space, radius
        )
        assert parts.norm(dim=1).max() <= 1 + 1e-6
    codes = torch.func.vmap(encode_record, in_dims=(0, 0, None, None, None, None))(
        images, torch.arange(42) % 2, space, 0.1, 0.05, 2
    )
    assert codes.norm(dim=1).max() <= math.hypot(0.1, 0.05) + 1e-6


# The price


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_both_answers_are_one_gaussian(share):
    plan = SlicedFlow(noise_multiplier=3.7306, moments_share=share).plan(make_spec(200))
    assert plan.neighbours is Neighbours.REPLACE
    assert plan.cost().epsilon(1e-5) == pytest.approx(1.0, abs=1e-3)
    assert 1 / plan.stages[0].noise_multiplier ** 2 == pytest.approx(share / 3.7306**2)


def test_what_the_released_code_of_the_paper_really_costs():
    """One release is counted at epsilon 5; noise is drawn anew at each of 1,500 steps."""
    multiplier = math.sqrt(2 * math.log(1.25 / 0.5e-5)) / 5
    once, real = (
        Plan((Stage("projections", "rows", multiplier, steps),), Neighbours.REPLACE)
        for steps in (1, 1500)
    )
    assert once.cost().epsilon(1e-5) < 5
    assert real.cost().epsilon(1e-5) == pytest.approx(919, abs=1)


def test_records_under_the_local_relation():
    method = SlicedFlow(mode="records", neighbours="local", noise_multiplier=1.0)
    plan = method.plan(Spec(SHAPE, 2, 10))
    assert plan.neighbours is Neighbours.LOCAL
    assert plan.stages[0].operation == "rows"


@pytest.mark.parametrize("mode", ["blocks", "records", "resampled"])
def test_the_training_of_a_private_autoencoder_is_in_the_plan(mode):
    spec = make_spec(2000)
    given = {"noise_multiplier": 2.0, "autoencoder_steps": 20}
    public, private = (
        SlicedFlow(**given, mode=mode, steps=20, space=space).plan(spec)
        for space in ("public", "private")
    )
    training, *rest = private.stages
    assert [stage.name for stage in rest] == [stage.name for stage in public.stages]
    assert private.neighbours is public.neighbours is Neighbours.REPLACE
    assert (training.name, training.operation, training.steps) == ("autoencoder", "sum", 20)
    assert (training.sampling.sample_size, training.sampling.dataset_size) == (100, 2000)
    if mode == "blocks":
        assert SlicedGenerator(**given, space="private").plan(spec) == private


def test_the_training_of_a_private_autoencoder_is_in_the_price():
    """The whole costs about what one answer would; what is charged is the exact price."""
    spec = Spec((1, 28, 28), 10, 60_000, (6000,) * 10)
    public, private = (
        SlicedFlow(noise_multiplier=1.0, space=space).plan(spec) for space in ("public", "private")
    )
    whole = private.cost().epsilon(1e-5)
    rest = Plan(private.stages[1:], private.neighbours).cost().epsilon(1e-5)
    assert rest < 0.75 * whole
    assert whole == pytest.approx(public.cost().epsilon(1e-5), rel=0.15)


# What is made of the answers


def test_without_noise_moments_are_those_of_the_classes():
    space = build_image_transform("cosines", SHAPE, 4, gray_level=0.2)
    images, labels = map(torch.from_numpy, make_blobs(60))
    points = space.encode_image(images)
    parts = torch.func.vmap(compute_record_moments, in_dims=(0, 0, None, None))(
        images, torch.zeros(60), space, 9.0
    ).double()
    averages = torch.stack([parts[labels == label].mean(0) for label in (0, 1)])
    means, covariances = estimate_gaussians(averages, torch.zeros(2), 9.0)
    for label in (0, 1):
        own = points[labels == label].double()
        torch.testing.assert_close(means[label], own.mean(0), atol=1e-5, rtol=0)
        expected = torch.cov(own.T, correction=0)
        torch.testing.assert_close(covariances[label], expected, atol=1e-4, rtol=0)


def test_a_denoised_spectrum_keeps_what_stands_out_of_the_noise():
    axis = torch.randn(80, generator=make_rng(), dtype=torch.float64)
    axis = axis / axis.norm()
    noise = torch.randn(80, 80, generator=make_rng(1), dtype=torch.float64)
    noise = (noise + noise.T) / math.sqrt(2)
    denoised = denoise_spectrum(
        40 * torch.outer(axis, axis) + noise, torch.tensor(1.0, dtype=torch.float64)
    )
    assert axis @ denoised @ axis == pytest.approx(40, rel=0.1)
    assert torch.linalg.matrix_rank(denoised, atol=1e-6) <= 2
    assert denoise_spectrum(noise, torch.tensor(1.1, dtype=torch.float64)).norm() == 0


def test_denoised_quantiles_follow_the_answer_as_far_as_its_noise_lets_them():
    isotonic = block_quantiles.isotonic_regression
    expected = compute_normal_block_means(10).expand(3, 200, 10).clone()
    real = expected + 0.2 * expected**2
    exact = denoise_quantiles(real, expected, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(exact, isotonic(real))
    noisy = real + 3 * torch.randn(real.shape, generator=make_rng(), dtype=torch.float64)
    denoised = denoise_quantiles(noisy, expected, torch.full((3,), 3.0, dtype=torch.float64))
    assert (denoised.diff(dim=2) >= -1e-9).all()
    error = (denoised - real).square().mean()
    assert error < 0.15 * (isotonic(noisy) - real).square().mean()


def test_a_schedule_takes_all_bases_alike_and_ends_calmly():
    schedule = build_flow_schedule(5, 30, 0.8, Streams(0))
    assert sorted(basis for basis, _ in schedule) == sorted([*range(5)] * 6)
    paces = [pace for _, pace in schedule]
    assert paces[0] == 0.8
    assert paces == sorted(paces, reverse=True)
    assert 0 < paces[-1] < 0.1


def test_gaps_vanish_where_particles_have_the_quantiles():
    images, labels = map(torch.from_numpy, make_blobs(40))
    space = build_image_transform("cosines", SHAPE, 4)
    points = torch.func.vmap(encode_record, in_dims=(0, 0, None, None, None, None))(
        images, labels, space, 9.0, 1.0, 2
    )
    frame = random_orthogonal_frames(18, 1, make_rng()).float()
    own = compute_block_quantiles(points @ frame.T, 8)
    records = SimpleNamespace(images=images, labels=labels)
    given = records, space, 9.0, 1.0, 2, frame
    assert compute_quantile_gaps(*given, own).abs().max() == 0
    assert compute_quantile_gaps(*given, own - 1).mean() == pytest.approx(1)


# Particles


@pytest.mark.parametrize("settings", [{}, {"space": "wavelets"}, {"diffusion": 1e-4}])
def test_particles_meet_the_quantiles_of_their_class(settings):
    more = {"num_frequencies": 6, "num_bases": 8, "patch_size": 3, "num_blocks": 20}
    method = SlicedFlow(**more, noise_multiplier=0.0, images_per_class=100, steps=80, **settings)
    tensors = fit(method, 400).tensors
    assert measure_agreement(tensors["images"], tensors["labels"]) > 0.97
    images, labels = map(torch.from_numpy, make_blobs())
    space = build_image_transform(method.space, SHAPE, 6, method.fine_weight)
    for label in (0, 1):
        mine = space.encode_image(tensors["images"][tensors["labels"] == label])
        real = space.encode_image(images[labels == label])
        gaps = compute_block_quantiles(mine, 10) - compute_block_quantiles(real, 10)
        # of the variance; clamped pixels are part of it
        assert gaps.square().mean() < 0.07 * real.var(0).mean()


@pytest.mark.parametrize("mode", ["records", "resampled"])
@pytest.mark.parametrize("labeled", [True, False])
def test_modes_of_the_paper_meet_the_records(mode, labeled):
    more = {"gray_level": None, "steps": 150, "images_per_class": 60, "num_blocks": 20}
    method = SlicedFlow(**TINY | PAPER | more | {"num_bases": 6}, mode=mode, labeled=labeled)
    tensors = fit(method, 200).tensors
    space = build_image_transform("cosines", SHAPE, 4)
    points = space.encode_image(torch.from_numpy(make_blobs(200)[0]))
    coarse = space.decode_point(points, 1).clamp(0, 1)  # the records, as the space has them
    assert (tensors["images"].mean(0) - coarse.mean(0)).abs().max() < 0.15
    agreement = measure_agreement(tensors["images"], tensors["labels"])
    assert agreement > 0.9 if labeled else abs(agreement - 0.5) < 0.25


def test_smoothing_undoes_the_noise_of_the_records():
    """Particles that get the same noise end narrower than the noisy points."""
    more = {"images_per_class": 200, "steps": 60, "num_frequencies": 2, "num_bases": 4}
    method = SlicedFlow(
        **TINY | more,
        mode="records",
        labeled=False,
        noise_multiplier=0.15,
        relative_radius=0.5,
    )
    space = build_image_transform("cosines", SHAPE, 2, fine_weight=0.5, gray_level=0.5)
    spread, real = (
        space.encode_image(images).var(0).mean()
        for images in (fit(method, 400).tensors["images"], torch.from_numpy(make_blobs()[0]))
    )
    noise_std = 2 * 0.15 * 0.5 * 8
    assert spread < real + noise_std**2 / 2


@pytest.fixture(scope="module")
def public_streams(tmp_path_factory):
    """With public images, and a folder that has the autoencoder once it is trained."""
    images = torch.from_numpy(make_blobs(600)[0][400:])
    return Streams(0, CPU, tmp_path_factory.mktemp("run"), images)


@pytest.mark.parametrize(
    ("mode", "least"), [("blocks", 0.9), ("records", 0.75), ("resampled", 0.75)]
)
def test_particles_in_a_learned_space_follow_their_label(public_streams, mode, least):
    method = SlicedFlow(
        **LEARNED | PAPER,
        space="public",
        public_data="blobs",
        mode=mode,
        images_per_class=50,
        steps=60,
    )
    tensors = fit(method, 400, public_streams).tensors
    assert measure_agreement(tensors["images"], tensors["labels"]) > least


def test_a_generator_draws_with_the_decoder_of_the_learned_space(public_streams):
    method = SlicedGenerator(
        **LEARNED,
        space="public",
        public_data="blobs",
        noise_multiplier=0.0,
        latent_dim=4,
        hidden_dim=32,
        batch_per_class=40,
        steps=120,
        learning_rate=0.01,
    )
    artifact = fit(method, 400, public_streams)
    assert measure_agreement(*artifact.sample(make_spec(400), 200)) > 0.9
    for name, value in public_streams.load_checkpoint("autoencoder").items():
        assert "decoder" not in name or torch.equal(artifact.tensors[name], value)


@pytest.mark.parametrize("mode", ["blocks", "records", "resampled"])
def test_snapshots_begin_at_the_start_and_end_at_the_release(mode):
    given = {"mode": mode, "sample_size": 40, "noise_multiplier": 0.5}
    artifact = fit(SlicedFlow(**TINY | {"steps": 60}, **given), 60)
    snapshots = artifact.resize_state[SNAPSHOTS_KEY].float()
    assert snapshots.shape == (8, 2, *SHAPE)
    torch.testing.assert_close(snapshots[-1], artifact.tensors["images"][::12], atol=1e-3, rtol=0)
    assert (snapshots[0] - snapshots[-1]).abs().max() > 0.05
    assert fit(SlicedFlow(**TINY, **given, keep_answers=False), 60).resize_state == {}


# Releases


def test_another_size_costs_nothing_and_needs_the_stored_answers(tmp_path):
    release = synthesize_blobs(tmp_path, SlicedFlow(**TINY, noise_multiplier=1.0))
    larger = resize(release, 20, runtime=CPU)
    assert larger.artifact.tensors["images"].shape == (40, *SHAPE)
    assert larger.guarantee == release.guarantee
    same, original = (
        result.artifact.tensors["images"] for result in (resize(release, 12, runtime=CPU), release)
    )
    torch.testing.assert_close(same, original, atol=1e-4, rtol=0)
    bare = SlicedFlow(**TINY, noise_multiplier=1.0, keep_answers=False)
    with pytest.raises(ReleaseError):
        resize(synthesize_blobs(tmp_path, bare), 20)
    other = SlicedFlow(**TINY | {"num_bases": 3})
    with pytest.raises(ReleaseError, match="another size"):
        other.regenerate(release.artifact, release.spec, Streams(0), ignore_progress)


def test_a_release_of_a_learned_space_has_the_decoder_and_names_the_public_data(tmp_path):
    public = make_blobs(160)[0][60:].transpose(0, 2, 3, 1)
    np.savez(tmp_path / "open.npz", x=public, y=np.arange(100) % 2)
    method = SlicedFlow(
        **TINY | LEARNED | {"autoencoder_steps": 20, "public_data": str(tmp_path / "open.npz")},
        noise_multiplier=1.0,
        space="public",
    )
    release = synthesize_blobs(tmp_path, method)
    assert release.metadata["public_data"]["count"] == 100
    assert len(release.metadata["public_data"]["sha256"]) == 64
    assert resize(release, 20, runtime=CPU).artifact.tensors["images"].shape == (40, *SHAPE)
    same = resize(release, 12, runtime=CPU).sample(24)[0]
    torch.testing.assert_close(same, release.sample(24)[0], atol=1e-4, rtol=0)
    tensors = release.artifact.tensors
    bare = {name: tensors[name] for name in tensors if "decoder.output_conv" not in name}
    with pytest.raises(ReleaseError, match="decoder"):
        method.regenerate(
            type(release.artifact)("set", bare), release.spec, Streams(0), ignore_progress
        )


def test_rejects_public_data_that_is_missing():
    method = SlicedFlow(**LEARNED, space="public", public_data="blobs", noise_multiplier=1.0)
    with pytest.raises(SettingError, match="blobs"):
        fit(method, 40)


def test_rejects_the_sensitive_data_as_public_data_before_any_charge(tmp_path):
    images, labels = make_blobs(60)
    file = tmp_path / "same.npz"
    np.savez(file, x=images.transpose(0, 2, 3, 1), y=labels)
    method = SlicedFlow(**TINY, noise_multiplier=1.0, space="public", public_data=str(file))
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(SettingError, match="itself"):
        synthesize(load_dataset(file, public_classes=True), method, ledger=ledger)
    assert not ledger.exists()
