"""The sliced flow: answers keep to their bounds and reach them, an audit finds planted bugs, quantiles are met, a crash costs nothing."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta, norm
from support.fakes import FreePlan, NullLedger, planted_clip
from support.tiny_settings import seal_records

from privot.components import block_quantiles, sliced_statistics
from privot.components.noisy_projections import compute_block_quantiles, encode_record
from privot.components.particle_flow import build_flow_schedule, compute_quantile_gaps
from privot.components.sliced_moments import denoise_spectrum
from privot.components.sliced_statistics import (
    compute_normal_block_means,
    compute_record_moments,
    denoise_quantiles,
    draw_tight_frame,
    encode_point,
    estimate_gaussians,
    query_sliced_statistics,
)
from privot.components.transforms import TRANSFORMS, build_image_transform, build_side_basis
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.methods import make_method
from privot.methods.sliced_flow import SlicedFlow
from privot.privacy import accounting
from privot.privacy import clipping as clipping_module
from privot.privacy import secret_side as secret_side_module
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.runtime import Runtime, Streams, ignore_progress
from privot.synthesis import resize, synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 8, 8)
CLASSES = 2
TINY = {
    "num_frequencies": 4,
    "num_bases": 2,
    "patch_size": 2,
    "num_blocks": 5,
    "images_per_class": 12,
    "steps": 12,
    "gray_level": 0.5,
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def blobs(count=400):
    """A bright square of 3 x 3 somewhere in the left half for label 0, in the right one for label 1."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) % 2
    images = np.zeros((count, *SHAPE), np.float32)
    for image, label in zip(images, labels, strict=True):
        top = rng.integers(1, 4)
        left = rng.integers(0, 2) + 4 * label
        image[0, top : top + 3, left : left + 3] = rng.uniform(0.6, 1)
    return images, labels


def spec_of(labels):
    return Spec(SHAPE, CLASSES, len(labels), tuple(np.bincount(labels, minlength=CLASSES).tolist()))


def gate_for(method, images, labels, spec=None):
    spec = spec or spec_of(labels)
    plan = method.plan(spec)
    plan = FreePlan(plan.stages, plan.neighbours)
    return Gate(
        Sensitive(images, labels, spec),
        plan,
        NullLedger(),
        NullLedger(),
        runtime=Runtime("cpu", microbatch_size=64),
    )


def block_sums(images, labels, here, frame, blocks, radius, noise=0.0):
    """The real query through the real gate, as sums: [classes, slices, blocks]."""
    gate = gate_for(
        SlicedFlow(**{**TINY, "num_blocks": blocks}, noise_multiplier=noise), images, labels
    )
    answer = gate.sorted_blocks(
        "blocks", encode_point, here, frame=frame.flatten(0, 1), num_blocks=blocks, clip_norm=radius
    )
    return answer * torch.tensor([size // blocks for size in gate.spec.class_sizes]).view(-1, 1, 1)


# Spaces


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("side", [7, 8, 12, 28])
def test_transforms_are_orthonormal_and_coarsest_first(kind, side):
    columns = build_side_basis(kind, side, side)
    torch.testing.assert_close(columns.T @ columns, torch.eye(side), atol=1e-5, rtol=0)
    if side % 2 == 0:
        flat = torch.ones(side) / math.sqrt(side)
        few = side if kind == "cosines" else 2 ** int(math.log2(side & -side))
        assert (columns[:, : side // few].T @ flat).norm() == pytest.approx(
            1, abs=1e-5
        )  # what is even lies in the coarsest alone


def test_a_point_keeps_its_length_and_comes_back():
    for kind in TRANSFORMS:
        here = build_image_transform(kind, (3, 8, 8), 8, gray_level=0.5)
        image = torch.rand(5, 3, 8, 8, generator=seeded())
        assert here.encode_image(image).norm(dim=1).tolist() == pytest.approx(
            (image - 0.5).flatten(1).norm(dim=1).tolist(), rel=1e-5
        )
        torch.testing.assert_close(
            here.decode_point(here.encode_image(image), 3), image, atol=1e-5, rtol=0
        )
    leaning = build_image_transform("cosines", (1, 8, 8), 6, fine_weight=1.0)
    point = torch.randn(4, 36, generator=seeded())
    torch.testing.assert_close(
        leaning.encode_image(leaning.decode_point(point, 1)), point, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    ("channels", "waves", "patch"), [(1, 4, 2), (1, 5, 3), (3, 4, 3), (1, 4, 0)]
)
def test_the_frame_is_tight(channels, waves, patch):
    frame = draw_tight_frame(
        build_image_transform("cosines", (channels, 8, 8), waves), channels, 4, patch, seeded()
    )
    for basis in frame:
        torch.testing.assert_close(
            basis @ basis.T, torch.eye(len(basis), dtype=torch.float64), atol=1e-12, rtol=0
        )
    near = (frame.abs() > 1e-9).double().mean((1, 2))
    assert near.min() == 1  # in cosines a local direction is no axis


# The bounds


def test_poles_reach_the_bound_of_sorted_blocks():
    """All others at both ends of a diameter: a record that crosses moves one order statistic of every slice, by the whole way."""
    here = build_image_transform("cosines", SHAPE, 8, gray_level=0.5)
    radius = 1.5
    frame = draw_tight_frame(here, 1, 3, 3, seeded())
    for seed in range(6):
        side = np.sign(np.random.default_rng(seed).standard_normal(SHAPE)).astype(np.float32) * 0.4
        for blocks in (1, 4, 10):
            images = np.stack([0.5 + side, 0.5 - side] * 10)
            labels = np.repeat([0, 1], [14, 6]) if blocks < 5 else np.repeat([0, 1], [10, 10])
            other = images.copy()
            other[2] = 1 - other[2]
            apart = block_sums(images, labels, here, frame, blocks, radius) - block_sums(
                other, labels, here, frame, blocks, radius
            )
            assert 0.99 < apart.norm() / (2 * radius * math.sqrt(3)) <= 1


@pytest.mark.parametrize("turns", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_random_neighbours_stay_within_the_bound(turns):
    rng = np.random.default_rng(1)
    here = build_image_transform("wavelets", SHAPE, 4, fine_weight=0.5, gray_level=0.3)
    radius = 1.0
    frame = draw_tight_frame(here, 1, 2, 2, seeded())
    largest = 0.0
    for turn in range(turns):  # each is compared with two others
        images = rng.random((12, *SHAPE), np.float32) ** rng.integers(1, 9)
        labels = np.arange(12) % 2
        if turn % 3 == 0:
            images = images.round()
        mine = block_sums(images, labels, here, frame, 3, radius)
        for odd in (rng.integers(2, size=SHAPE), 1 - images[0]):
            other = images.copy()
            other[rng.integers(12)] = odd
            largest = max(
                largest,
                float((mine - block_sums(other, labels, here, frame, 3, radius)).norm())
                / (2 * radius * math.sqrt(2)),
            )
    assert 0.2 < largest <= 1


def test_a_clip_that_is_gone_is_seen(monkeypatch):
    here = (known := build_image_transform("cosines", SHAPE, 4, gray_level=0.5))
    frame = draw_tight_frame(known, 1, 2, 2, seeded())
    monkeypatch.setattr(clipping_module, "clip_rows", planted_clip())
    images = np.stack([np.full(SHAPE, turn % 2, np.float32) for turn in range(12)])
    labels = np.repeat([0, 1], 6)
    other = images.copy()
    other[0] = 1
    apart = block_sums(images, labels, here, frame, 2, 1.0) - block_sums(
        other, labels, here, frame, 2, 1.0
    )
    assert apart.norm() > 2 * math.sqrt(2) * 1.5


def test_moments_keep_to_norm_one():
    here = build_image_transform("cosines", SHAPE, 4, fine_weight=0.5)
    images = torch.from_numpy(
        np.concatenate(
            [blobs(40)[0], np.ones((1, *SHAPE), np.float32), np.zeros((1, *SHAPE), np.float32)]
        )
    )
    for radius in (0.1, 1.0, 100.0):
        parts = torch.func.vmap(compute_record_moments, in_dims=(0, 0, None, None))(
            images, torch.zeros(42), here, radius
        )
        assert parts.norm(dim=1).max() <= 1 + 1e-6
    codes = torch.func.vmap(encode_record, in_dims=(0, 0, None, None, None, None))(
        images, torch.arange(42) % 2, here, 0.1, 0.05, 2
    )
    assert codes.norm(dim=1).max() <= math.hypot(0.1, 0.05) + 1e-6


def audited(noise, runs=700):
    """How often a threshold tells neighbours apart, and how often the claim allows it."""
    here = build_image_transform("cosines", SHAPE, 4, gray_level=0.5)
    radius = 1.0
    seen = []
    frame = draw_tight_frame(here, 1, 2, 2, seeded())
    images = np.stack([np.full(SHAPE, turn % 2, np.float32) for turn in range(8)])
    labels = np.arange(8) // 4
    other = images.copy()
    other[0] = 1
    sums = [block_sums(each, labels, here, frame, 2, radius) for each in (images, other)]
    along = (sums[1] - sums[0]) / (sums[1] - sums[0]).norm()
    middle = ((sums[0] + sums[1]) / 2 * along).sum()
    multiplier = (
        SlicedFlow(**{**TINY, "num_blocks": 2}, noise_multiplier=noise)
        .plan(spec_of(labels))
        .stages[1]
        .noise_multiplier
    )
    for each in (other, images):
        gate = gate_for(
            SlicedFlow(**{**TINY, "num_blocks": 2}, noise_multiplier=noise), each, labels
        )
        gate._infer_query_shape = lambda *given: (16,)
        gate._stages["blocks"] = Stage("blocks", "sorted_blocks", multiplier, runs)
        asks = {"frame": frame.flatten(0, 1), "num_blocks": 2, "clip_norm": radius}
        found = (
            torch.stack(
                [gate.sorted_blocks("blocks", encode_point, here, **asks) for _ in range(runs)]
            )
            * 2
        )
        seen.append(int(((found * along).sum((1, 2, 3)) > middle).sum()))
    low = beta.ppf(1e-4, seen[0], runs - seen[0] + 1)
    high = beta.ppf(1 - 1e-4, seen[1] + 1, runs - seen[1])
    return low, norm.cdf(norm.ppf(high) + 1 / multiplier)


def test_an_audit_finds_what_is_claimed_and_half_the_noise(monkeypatch):
    found, allowed = audited(noise=0.6)
    assert found <= allowed
    honest = secret_side_module.add_noise
    monkeypatch.setattr(
        secret_side_module,
        "add_noise",
        lambda total, noise_std, *more: honest(total, noise_std / 2, *more),
    )
    found, allowed = audited(noise=0.6)
    assert found > allowed


# The price


def test_both_answers_are_one_gaussian():
    for share in (0.2, 0.6):
        plan = SlicedFlow(noise_multiplier=3.7306, moments_share=share).plan(
            Spec(SHAPE, 2, 200, (100, 100))
        )
        assert plan.neighbours is Neighbours.REPLACE
        assert plan.cost().epsilon(1e-5) == pytest.approx(1.0, abs=1e-3)
        assert 1 / plan.stages[0].noise_multiplier ** 2 == pytest.approx(share / 3.7306**2)


def test_what_the_released_code_of_the_paper_really_costs():
    """One release is counted at epsilon 5 by the classic formula; noise is drawn anew at each of 1,500 steps."""
    multiplier = math.sqrt(2 * math.log(1.25 / 0.5e-5)) / 5
    once = Plan((Stage("projections", "rows", multiplier),), Neighbours.REPLACE)
    real = Plan((Stage("projections", "rows", multiplier, 1500),), Neighbours.REPLACE)
    assert once.cost().epsilon(1e-5) < 5
    assert real.cost().epsilon(1e-5) == pytest.approx(919, abs=1)


@pytest.mark.parametrize(
    ("settings", "spec", "words"),
    [
        ({}, Spec(SHAPE, 2, 10), "class_sizes"),
        ({"num_blocks": 9}, Spec(SHAPE, 2, 16, (8, 8)), "num_blocks=9"),
        ({"mode": "records"}, Spec(SHAPE, 2), "needs the number of records"),
        ({"mode": "resampled"}, Spec(SHAPE, 2), "needs the number of records"),
    ],
)
def test_what_must_be_declared_is_said(settings, spec, words):
    with pytest.raises(SettingError, match=words):
        make_method("sliced-flow", settings).plan(spec)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "none"},
        {"space": "none"},
        {"neighbours": "local"},
        {"labeled": False},
        {"moments_share": 1.0},
        {"relative_radius": 0.0},
        {"step_size": 0.0},
        {"num_frequencies": 0},
        {"noise_multiplier": -1.0},
        {"diffusion": -1.0},
        {"clip_ratio": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        make_method("sliced-flow", wrong)


# What is made of the answers


def test_without_noise_moments_are_those_of_the_classes():
    here = build_image_transform("cosines", SHAPE, 4, gray_level=0.2)
    radius = 9.0
    images, labels = blobs(60)
    points = here.encode_image(torch.from_numpy(images))
    parts = torch.func.vmap(compute_record_moments, in_dims=(0, 0, None, None))(
        torch.from_numpy(images), torch.zeros(60), here, radius
    ).double()
    averages = torch.stack([parts[labels == each].mean(0) for each in (0, 1)])
    means, spreads = estimate_gaussians(averages, torch.zeros(2), radius)
    for label in (0, 1):
        own = points[labels == label].double()
        torch.testing.assert_close(means[label], own.mean(0), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            spreads[label], torch.cov(own.T, correction=0), atol=1e-4, rtol=0
        )


def test_spikes_stand_out_of_noise():
    way = torch.nn.functional.normalize(
        torch.randn(80, generator=seeded(), dtype=torch.float64), dim=0
    )
    noise = torch.randn(80, 80, generator=seeded(1), dtype=torch.float64)
    noise = (noise + noise.T) / math.sqrt(2)
    found = denoise_spectrum(
        40 * torch.outer(way, way) + noise, torch.tensor(1.0, dtype=torch.float64)
    )
    assert way @ found @ way == pytest.approx(40, rel=0.1)
    assert torch.linalg.matrix_rank(found, atol=1e-6) <= 2
    assert denoise_spectrum(noise, torch.tensor(1.1, dtype=torch.float64)).norm() == 0


def test_repair_trusts_the_answer_as_far_as_its_noise_lets_it():
    expected = compute_normal_block_means(10).expand(3, 200, 10).clone()
    real = expected + 0.2 * expected**2
    torch.testing.assert_close(
        denoise_quantiles(real, expected, torch.zeros(3, dtype=torch.float64)),
        block_quantiles.isotonic_regression(real),
    )
    noisy = real + 3 * torch.randn(real.shape, generator=seeded(), dtype=torch.float64)
    found = denoise_quantiles(noisy, expected, torch.full((3,), 3.0, dtype=torch.float64))
    assert (found.diff(dim=2) >= -1e-9).all()
    assert (found - real).square().mean() < 0.15 * (
        block_quantiles.isotonic_regression(noisy) - real
    ).square().mean()


def test_a_schedule_takes_all_bases_alike_and_ends_calmly():
    found = build_flow_schedule(5, 30, 0.8, Streams(0))
    assert sorted(basis for basis, _ in found) == sorted(list(range(5)) * 6)
    paces = [pace for _, pace in found]
    assert paces[0] == 0.8
    assert paces == sorted(paces, reverse=True)
    assert 0 < paces[-1] < 0.1


@pytest.mark.parametrize("settings", [{}, {"space": "wavelets"}, {"diffusion": 1e-4}])
def test_particles_meet_the_quantiles_of_their_class(settings):
    images, labels = blobs()
    method = SlicedFlow(
        noise_multiplier=0.0,
        num_frequencies=6,
        num_bases=8,
        patch_size=3,
        num_blocks=20,
        images_per_class=100,
        steps=80,
        **settings,
    )
    made = method.fit(gate_for(method, images, labels), Streams(0, Runtime("cpu")), ignore_progress)
    found = made.tensors["images"]
    own = made.tensors["labels"]
    right = found[..., 4:].sum((1, 2, 3))
    left = found[..., :4].sum((1, 2, 3))
    assert ((right > left).long() == own).float().mean() > 0.97
    here = build_image_transform(method.space, SHAPE, 6, method.fine_weight)
    for label in (0, 1):
        mine, real = (
            here.encode_image(each)
            for each in (found[own == label], torch.from_numpy(images[labels == label]))
        )
        far = (
            compute_block_quantiles(mine, 10) - compute_block_quantiles(real, 10)
        ).square().mean() / real.var(0).mean()
        assert far < 0.07  # of the variance; clamped pixels are part of it


def test_another_size_costs_nothing_and_asks_nothing(tmp_path):
    images, labels = blobs(60)
    method = SlicedFlow(**TINY, noise_multiplier=1.0)
    release = synthesize(
        seal_records(images, labels, spec_of(labels)),
        method,
        ledger=tmp_path / "book.jsonl",
        runtime=Runtime("cpu"),
    )
    larger = resize(release, 20, runtime=Runtime("cpu"))
    assert larger.artifact.tensors["images"].shape == (40, *SHAPE)
    assert larger.guarantee == release.guarantee
    same = resize(release, 12, runtime=Runtime("cpu"))
    torch.testing.assert_close(
        same.artifact.tensors["images"], release.artifact.tensors["images"], atol=1e-4, rtol=0
    )
    bare = synthesize(
        seal_records(images, labels, spec_of(labels)),
        SlicedFlow(**TINY, noise_multiplier=1.0, keep_answers=False),
        ledger=tmp_path / "book.jsonl",
        runtime=Runtime("cpu"),
    )
    with pytest.raises(ReleaseError):
        resize(bare, 20)
    with pytest.raises(ReleaseError, match="another size"):
        SlicedFlow(**{**TINY, "num_bases": 3}).regenerate(
            release.artifact, release.spec, Streams(0), ignore_progress
        )


# The mechanisms of the paper


@pytest.mark.parametrize("mode", ["records", "resampled"])
@pytest.mark.parametrize("labelled", [True, False])
def test_modes_of_the_paper_find_the_records(mode, labelled):
    images, labels = blobs(200)
    method = SlicedFlow(
        **{
            **TINY,
            "gray_level": None,
            "steps": 150,
            "images_per_class": 60,
            "num_blocks": 20,
            "num_bases": 6,
        },
        mode=mode,
        labeled=labelled,
        noise_multiplier=0.0,
        sample_size=200,
        clip_ratio=10.0,
        label_norm=1.0,
    )
    made = method.fit(gate_for(method, images, labels), Streams(0, Runtime("cpu")), ignore_progress)
    found = made.tensors["images"]
    own = made.tensors["labels"]
    here = build_image_transform("cosines", SHAPE, 4)
    coarse = here.decode_point(here.encode_image(torch.from_numpy(images)), 1).clamp(
        0, 1
    )  # the records, as the space has them
    assert (found.mean(0) - coarse.mean(0)).abs().max() < 0.15
    agree = (
        ((found[..., 4:].sum((1, 2, 3)) > found[..., :4].sum((1, 2, 3))).long() == own)
        .float()
        .mean()
    )
    assert agree > 0.9 if labelled else abs(agree - 0.5) < 0.25
    assert made.is_consistent_with(spec_of(labels))


def test_records_under_the_local_relation():
    plan = SlicedFlow(mode="records", neighbours="local", noise_multiplier=1.0).plan(
        Spec(SHAPE, 2, 10)
    )
    assert plan.neighbours is Neighbours.LOCAL
    assert plan.stages[0].operation == "rows"


def test_smoothing_undoes_the_noise_of_the_records():
    """Particles that get the same noise end narrower than the noisy points; without it they would be as wide."""
    images, labels = blobs(400)
    method = SlicedFlow(
        **{**TINY, "images_per_class": 200, "steps": 60, "num_frequencies": 2, "num_bases": 4},
        mode="records",
        labeled=False,
        noise_multiplier=0.15,
        relative_radius=0.5,
    )
    made = method.fit(gate_for(method, images, labels), Streams(0, Runtime("cpu")), ignore_progress)
    here = build_image_transform("cosines", SHAPE, 2, fine_weight=0.5, gray_level=0.5)
    spread = here.encode_image(made.tensors["images"]).var(0).mean()
    noise_std = 2 * 0.15 * 0.5 * 8
    real = here.encode_image(torch.from_numpy(images)).var(0).mean()
    assert spread < real + noise_std**2 / 2


def test_gaps_vanish_where_particles_have_the_quantiles():
    images, labels = (torch.from_numpy(each) for each in blobs(40))
    here = build_image_transform("cosines", SHAPE, 4)
    records = type("Drawn", (), {"images": images, "labels": labels})
    points = torch.func.vmap(encode_record, in_dims=(0, 0, None, None, None, None))(
        images, labels, here, 9.0, 1.0, 2
    )
    frame = sliced_statistics.random_orthogonal_frames(18, 1, seeded()).float()
    known = compute_block_quantiles(points @ frame.T, 8)
    assert compute_quantile_gaps(records, here, 9.0, 1.0, 2, frame, known).abs().max() == 0
    assert compute_quantile_gaps(
        records, here, 9.0, 1.0, 2, frame, known - 1
    ).mean() == pytest.approx(1)


@pytest.mark.parametrize("steps", [40, 80])
def test_a_resampled_run_that_was_killed_goes_on(tmp_path, monkeypatch, steps):
    images, labels = blobs(60)
    box = seal_records(images, labels, Spec(SHAPE, 2, 60))
    ledger = Ledger(tmp_path / "blobs.jsonl")
    fresh = []
    real = secret_side_module.add_noise
    monkeypatch.setattr(
        accounting,
        "compute_privacy_cost",
        lambda event, neighbours, coarse=False: accounting._gaussian_cost(1.0),
    )
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda *given: fresh.append(1) or real(*given)
    )
    method = SlicedFlow(
        **{**TINY, "steps": steps}, mode="resampled", noise_multiplier=2.0, sample_size=20
    )

    def kill(stage, step, of, **facts):
        if step == 30:
            raise KeyboardInterrupt

    given = {"out": tmp_path / "out", "ledger": ledger, "runtime": Runtime("cpu")}
    with pytest.raises(KeyboardInterrupt):
        synthesize(box, method, **given, progress=kill)
    assert len(fresh) == 30
    release = synthesize(box, method, **given, resume=True)
    assert len(fresh) == steps
    assert [each["kind"] for each in ledger.entries()].count("reserve") == 1
    assert release.sample(4)[0].isfinite().all()


def test_the_question_is_asked_of_every_stage_once():
    images, labels = blobs(60)
    method = SlicedFlow(**TINY, noise_multiplier=1.0)
    shown = []
    gate = gate_for(method, images, labels)
    here = build_image_transform("cosines", SHAPE, 4)
    made = query_sliced_statistics(
        gate,
        here,
        num_bases=2,
        patch_size=2,
        num_blocks=5,
        radius=3.0,
        streams=Streams(0, Runtime("cpu")),
        progress=lambda *given: shown.append(given),
    )
    assert gate.count_remaining_queries("moments") == gate.count_remaining_queries("blocks") == 0
    assert made.targets.shape == (2, 2, 16, 5)
    assert shown
