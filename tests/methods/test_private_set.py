"""The private set: what a record contributes, what answers are and cost, images that are of use."""

import dataclasses
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from support.method_inputs import make_gate, make_rng
from torch.nn.functional import avg_pool2d, conv2d, group_norm, pad

from privot.components import private_set_nets, private_set_queries
from privot.components.feature_matching import MatchingRound, compute_unit_features
from privot.components.private_set_nets import build_set_nets
from privot.components.private_set_queries import (
    MAX_RELATIVE_NORM,
    clip_and_count_image,
    compute_record_features,
    query_class_means,
    query_features,
)
from privot.components.private_set_settings import DEFAULT_BUDGET_SHARES, MIN_NETS_PER_QUERY
from privot.components.private_set_storage import restore_rounds
from privot.data import load_dataset
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.methods import private_set
from privot.methods.private_set import PrivateSet
from privot.nets.augment import apply_augmentations, sample_augment_params
from privot.nets.ensemble import Ensemble, FrozenEnsemble
from privot.privacy import secret_side as secret_side_module
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget
from privot.release import Release
from privot.release.verify import verify
from privot.runtime import Runtime, Streams, ignore_progress
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

GREY = (1, 8, 8)
COLOUR = (3, 8, 8)
CLASSES = 3
SPEC = Spec(GREY, CLASSES)
SIZES = (5, 7, 4)
LABELS = np.repeat(np.arange(CLASSES), SIZES)
COUNTS = torch.tensor(SIZES, dtype=torch.float64)
STREAMS = Streams(0, Runtime("cpu"))
CPU = torch.device("cpu")
TINY = {
    "images_per_class": 2,
    "num_random_nets": 3,
    "num_pretrained_nets": 2,
    "nets_per_round": 2,
    "net_width": 4,
    "steps": 2,
    "net_train_epochs": 1,
    "noise_multiplier": 2.0,
}
EXACT = TINY | {"noise_multiplier": 0.0}


def make_images(shape=GREY, bright=1.0):
    return np.random.default_rng(0).random((len(LABELS), *shape), np.float32) * bright


def make_set_gate(method, spec=SPEC, images=None, labels=LABELS, **more):
    images = make_images(spec.shape) if images is None else images
    return make_gate(method.plan(spec), images, labels, spec, chunk=17, **more)


def fit(method, spec=SPEC, streams=STREAMS):
    artifact = method.fit(make_set_gate(method, spec), streams, ignore_progress)
    assert artifact.is_consistent_with(spec)
    return artifact


def watch_sums(monkeypatch):
    """The arguments and results of all sums that are asked of a gate."""
    sums = []
    real = Gate.sum

    def watched(gate, *given, **how):
        answer = real(gate, *given, **how)
        sums.append((given, how, answer))
        return answer

    monkeypatch.setattr(Gate, "sum", watched)
    return sums


@pytest.fixture
def small_pretraining(monkeypatch):
    monkeypatch.setattr(private_set_nets, "NUM_SYNTHETIC_CLASSES", 3)
    monkeypatch.setattr(private_set_nets, "SYNTHETIC_PER_CLASS", 4)


# What a record contributes


def make_public_part(shape=GREY, count=3, texture=0.0):
    """Networks, weights, augmentations and centers, as a record is given them in a run."""
    nets = Ensemble(
        count, shape, CLASSES, width=4, texture_norm=texture, generator=make_rng()
    ).requires_grad_(False)
    weights = FrozenEnsemble(nets)[:]
    augmentations = sample_augment_params(count, shape[1:], make_rng(1))
    images = torch.rand(6, *shape, generator=make_rng(2))
    center = compute_unit_features(nets, weights, images, augmentations, None).mean(1)
    return nets, weights, augmentations, center


def make_extreme_images(shape, count=1000):
    """Random ones, flat, of one pixel, of the largest contrast, at a rounding's distance."""
    rng = np.random.default_rng(3)
    diagonals = np.arange(shape[1])[:, None] + np.arange(shape[2])
    size = math.prod(shape)
    kinds = [
        lambda: np.zeros(shape),
        lambda: np.ones(shape),
        lambda: np.full(shape, rng.random()),
        lambda: np.full(shape, 1e-40),
        lambda: np.eye(1, size, rng.integers(size)).reshape(shape),
        lambda: 1 - np.eye(1, size, rng.integers(size)).reshape(shape),
        lambda: np.broadcast_to(diagonals % 2, shape),
        lambda: np.broadcast_to(diagonals < rng.integers(2, 14), shape),
        lambda: rng.integers(2, size=shape),
        lambda: rng.random(shape),
        lambda: rng.random(shape) ** 20,
        lambda: np.full(shape, 0.5) + 1e-7 * rng.random(shape),
    ]
    images = np.stack([kinds[turn % len(kinds)]() for turn in range(count)])
    return torch.from_numpy(images.astype(np.float32))


def map_records(query, images, *public):
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    in_dims = (0, 0, *(None for _ in public))
    return torch.func.vmap(query, in_dims=in_dims)(images, labels, *public)


@pytest.mark.parametrize("shape", [GREY, COLOUR])
def test_a_part_is_never_longer_than_one_and_most_are_as_long(shape):
    """Before any clip, so that the clip is a guard and not a loss."""
    images = make_extreme_images(shape)
    reach = MAX_RELATIVE_NORM * math.sqrt(math.prod(shape))
    for share in (0.0, 0.1):
        norms = map_records(clip_and_count_image, images, reach, share).double().norm(dim=1)
        assert 0.999 < norms.max() <= 1 + 1e-6
        assert norms.min() >= share * (1 - 1e-6)
    for count, texture in ((1, 0.0), (3, 0.0), (10, 0.0), (3, 0.7)):
        public = make_public_part(shape, count, texture)
        norms = map_records(compute_record_features, images, *public).double().norm(dim=1)
        assert norms.max() <= 1 + 1e-6
        assert norms.median() > 0.999
    # a center that is the record itself leaves no direction
    nets, weights, augmentations, _ = public
    center = compute_unit_features(nets, weights, images[9:10], augmentations, None)[:, 0]
    alone = map_records(compute_record_features, images[9:10], nets, weights, augmentations, center)
    assert alone.norm() <= 1 + 1e-6


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
        ),
    ],
)
@pytest.mark.parametrize("texture", [0.0, 0.7])
@pytest.mark.parametrize(
    ("shape", "width", "count"),
    [((1, 8, 8), 16, 37), ((1, 28, 28), 128, 24), ((3, 32, 32), 32, 33)],
)
def test_a_part_depends_on_its_record_alone(shape, width, count, texture, device):
    """To the bit: removing a record from a chunk moves all that follow."""
    rng = make_rng()
    count = count * 100 if device == "cuda" else count
    nets = Ensemble(3, shape, 10, width, texture_norm=texture, generator=rng)
    nets = nets.to(device).requires_grad_(False)
    augmentations = sample_augment_params(3, shape[1:], rng).to(torch.device(device))
    images = torch.rand(count, *shape, generator=rng).to(device)
    weights = FrozenEnsemble(nets)[:]
    center = compute_unit_features(nets, weights, images[:8], augmentations, None).mean(1)
    black = torch.zeros_like(images[:1])
    # as the gate does
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        whole, removed, replaced = (
            map_records(compute_record_features, chunk, nets, weights, augmentations, center)
            for chunk in (
                images,
                torch.cat([images[:3], images[4:], black]),
                torch.cat([images[:3], black, images[4:]]),
            )
        )
    others = torch.cat([whole[:3], whole[4:]])
    assert torch.equal(others, removed[:-1])
    assert torch.equal(others, torch.cat([replaced[:3], replaced[4:]]))


# The price


@pytest.mark.parametrize("shape", [GREY, COLOUR, (1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize(
    "shares",
    [
        None,
        (0.05, 0.95, 0.0),
        (0.25, 0.25, 0.25, 0.25),
        (0.1, 0.2, 0.3, 0.2, 0.1, 0.1),
        (0.1, 0.0, 0.4, 0.5),
    ],
)
@pytest.mark.parametrize("nets", [None, 13, 200])
def test_all_answers_together_cost_one_gaussian(shape, shares, nets):
    spec = Spec(shape, 10)
    for noise in (0.5, 3.7306):
        method = PrivateSet(
            noise_multiplier=noise,
            budget_shares=shares,
            num_random_nets=nets,
            nets_per_round=nets,
            num_pretrained_nets=nets or 20,
            augmentations=3,
        )
        plan = method.plan(spec)
        assert plan.cost().mu == pytest.approx(1 / noise, rel=1e-12)
        paid = [stage.steps / stage.noise_multiplier**2 * noise**2 for stage in plan.stages]
        assert paid == pytest.approx([share for share in method.get_budget_shares(spec) if share])
    assert plan.cost().epsilon(1e-5) == pytest.approx(1.0, abs=1e-4)
    plan = PrivateSet(budget_shares=shares, num_random_nets=nets).plan(spec)
    assert 1 - 1e-6 < plan.calibrate(Budget(1.0)).cost().epsilon(1e-5) <= 1.0


@pytest.mark.parametrize(("shape", "nets"), [(GREY, 13), (COLOUR, 10), (GREY, 21)])
@pytest.mark.usefixtures("small_pretraining")
def test_the_gate_is_asked_for_what_the_plan_says_and_no_more(monkeypatch, shape, nets):
    counts = {"num_random_nets": nets, "num_pretrained_nets": nets, "nets_per_round": nets}
    method = PrivateSet(**TINY | counts)
    spec = Spec(shape, CLASSES)
    gate = make_set_gate(method, spec)
    sums = watch_sums(monkeypatch)
    method.fit(gate, STREAMS, ignore_progress)
    assert all(how == {"clip_norm": 1.0, "per_class": True} for _, how, _ in sums)
    assert gate._completed_steps == {stage.name: stage.steps for stage in gate.plan.stages}
    assert [stage.name for stage in gate.plan.stages[1:]] == list(method.plan_rounds(spec))
    for name in method.plan_rounds(spec):
        groups = [len(given[-1]) for given, _, _ in sums if given[0] == name]
        assert sum(groups) == nets
        assert max(groups) <= MIN_NETS_PER_QUERY


def test_settings_by_rule_follow_shape_and_channels():
    grey, mnist, colour = (
        PrivateSet().plan(Spec(shape, 10)).stages for shape in (GREY, (1, 28, 28), (3, 32, 32))
    )
    assert [stage.name for stage in grey] == ["means", "random", "trained1"]
    assert [stage.name for stage in colour] == ["means", "pretrained", "trained1"]
    assert mnist[1].steps > grey[1].steps
    assert all(sum(shares) == pytest.approx(1) for shares in DEFAULT_BUDGET_SHARES.values())


# What the answers are


def test_without_noise_means_are_the_class_means_and_only_declared_sizes_are_free(monkeypatch):
    """An image that is too bright is scaled down to norm 12/28 of 8."""
    method = PrivateSet(**EXACT)
    images = make_images(bright=0.3)
    scaled = torch.from_numpy(images.copy())
    images[0] = 1.0
    scaled[0] = MAX_RELATIVE_NORM
    sums = watch_sums(monkeypatch)
    for spec in (Spec(GREY, CLASSES, 16, SIZES), SPEC):
        means, counts = query_class_means(make_set_gate(method, spec, images), CPU)
        torch.testing.assert_close(counts, COUNTS, rtol=1e-5, atol=1e-5)
        for label in range(CLASSES):
            expected = scaled[label == LABELS].mean(0)
            torch.testing.assert_close(means[label], expected, rtol=1e-4, atol=1e-5)
    declared, counted = (given[3] for given, *_ in sums)
    assert declared == 0 < counted
    part = clip_and_count_image(
        torch.from_numpy(images[0]), torch.tensor(0), sums[1][0][2], counted
    )
    assert part[-1] == pytest.approx(counted)
    assert part.norm() <= 1


def test_a_noisy_count_is_used_and_never_divides_by_nothing():
    method = PrivateSet(**TINY | {"noise_multiplier": 30.0})
    for seed in range(6):
        means, counts = query_class_means(make_set_gate(method, insecure_seed=seed), CPU)
        assert (counts >= 1).all()
        assert not torch.equal(counts, COUNTS)
        assert means.isfinite().all()


@pytest.mark.parametrize(
    "spec",
    [Spec((1, 2, 2), CLASSES), Spec((3, 5, 9), CLASSES), Spec(GREY, CLASSES, 12, (5, 7, 0))],
)
@pytest.mark.usefixtures("small_pretraining")
def test_odd_shapes_and_a_class_declared_empty_do_not_fail_after_the_run_was_paid_for(spec):
    count = spec.size or len(LABELS)
    method = PrivateSet(**TINY)
    gate = make_set_gate(method, spec, make_images(spec.shape)[:count], LABELS[:count])
    artifact = method.fit(gate, STREAMS, ignore_progress)
    assert artifact.is_consistent_with(spec)
    assert artifact.tensors["images"].isfinite().all()


def compute_features_slowly(weights, index, image, augmentations, padding):
    """Features of one image by one network, block by block."""
    x = 2 * apply_augmentations(image[None], augmentations.select(torch.tensor([index]))) - 1
    for number in range(sum(name.startswith("conv") for name in weights)):
        conv, bias, gain, shift = (
            weights[f"{part}{number}"][index] for part in ("conv", "bias", "gain", "shift")
        )
        x = conv2d(pad(x, (padding,) * 4), conv, bias)
        x = avg_pool2d(group_norm(x, len(gain), gain, shift).relu(), 2)
        padding = 1
    return x.flatten()


@pytest.mark.parametrize(
    ("shape", "stage", "views"),
    [(GREY, "random", 1), (COLOUR, "trained1", 4), ((1, 28, 28), "random", 1)],
)
def test_without_noise_targets_are_mean_unit_features_record_by_record(shape, stage, views):
    """Of 12 features, by 12 networks or by 3 with four augmentations each."""
    counts = {"num_random_nets": 12, "nets_per_round": 12 // views, "augmentations": views}
    method = PrivateSet(**EXACT | counts, texture_norm=0.0)
    spec = Spec(shape, CLASSES)
    images = torch.from_numpy(make_images(shape))
    nets = build_set_nets(method, 12 // views, spec, make_rng()).requires_grad_(False)
    shown = torch.rand(6, *shape, generator=make_rng(1))
    gate = make_set_gate(method, spec, images)
    result = query_features(method, gate, stage, nets, shown, COUNTS, STREAMS, ignore_progress)
    assert result.target.shape == (12, CLASSES, nets.num_features)
    compute = partial(
        compute_features_slowly,
        nets.select(torch.arange(12) % nets.num_nets),
        augmentations=result.augment_params,
        padding=3 if shape[1] == 28 else 1,
    )
    for index in (0, 7, 11):
        center = torch.stack([compute(index, image) for image in shown]).mean(0)
        torch.testing.assert_close(result.center[index], center, rtol=1e-3, atol=1e-4)
        offsets = torch.stack([compute(index, image) for image in images]) - center
        units = offsets / offsets.norm(dim=1, keepdim=True)
        for label in range(CLASSES):
            expected = units[label == LABELS].mean(0)
            torch.testing.assert_close(result.target[index, label], expected, rtol=1e-3, atol=1e-4)
    drawn = torch.cat([values.flatten(1) for values in result.augment_params], 1)
    assert len(drawn.unique(dim=0)) > 6  # every feature has its own augmentation


def test_the_loss_falls_and_a_set_that_meets_its_targets_stays():
    """Targets are those of a goal without noise, so that its distance to them is zero."""
    method = PrivateSet(**TINY | {"images_per_class": 4, "steps": 40}, learning_rate=0.05)
    goal, start = (torch.rand(12, *GREY, generator=make_rng(seed)) for seed in (0, 1))
    nets, weights, augmentations, center = make_public_part()

    def compute_class_features(images):
        features = compute_unit_features(nets, weights, images, augmentations, center)
        return features.unflatten(1, (CLASSES, -1)).mean(2)

    def optimize(images):
        return method._optimize_images(images, rounds, SPEC, STREAMS, "here", ignore_progress)

    target = compute_class_features(goal)
    rounds = {"random": MatchingRound(nets, augmentations, center, target, 1.0)}
    moved = optimize(start)
    initial, final, stayed = (
        (compute_class_features(images) - target).square().sum().item()
        for images in (start, moved, optimize(goal))
    )
    assert final < 0.3 * initial
    assert stayed < 0.02 * initial
    assert 0 <= moved.min() <= moved.max() <= 1
    assert torch.equal(optimize(start), moved)


# The set


QUICK = {
    "soft_label_weight": 0.5,
    "images_per_class": 5,
    "num_random_nets": 10,
    "nets_per_round": 4,
    "net_width": 12,
    "steps": 40,
    "net_train_epochs": 5,
}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A set of digits at a large epsilon, and what its optimization began from."""
    starts = []
    initialize = PrivateSet._initialize_set
    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PrivateSet,
            "_initialize_set",
            lambda *given: starts.append(initialize(*given)) or starts[-1],
        )
        given = {"out": folder / "out", "ledger": folder / "x.jsonl", "runtime": Runtime("cpu")}
        synthesize("digits", PrivateSet(**QUICK), 50.0, **given)
    verify(folder / "out")
    return Release.load(folder / "out"), starts[0]


def score_on_digits(images, labels):
    """The accuracy on held-out digits of logistic regression on these images alone."""
    test = load_dataset("digits", "test", public=True).records()
    model = LogisticRegression(max_iter=2000).fit(images.flatten(1).numpy(), labels.numpy())
    return model.score(test.images.flatten(1).numpy(), test.labels.numpy())


def test_a_classifier_learns_digits_from_the_set_and_more_than_from_its_start(released):
    release, start = released
    tensors = release.artifact.tensors
    score = score_on_digits(tensors["images"], tensors["labels"])
    assert score > 0.85
    assert score > score_on_digits(*start) + 0.01  # by 0.043, give or take 0.005
    soft = tensors["soft_labels"]  # probabilities that leave half to the label
    assert release.artifact.is_consistent_with(release.spec)
    torch.testing.assert_close(soft.sum(1), torch.ones(len(soft)))
    assert soft.min() >= 0
    assert 0.5 - 1e-6 <= soft[torch.arange(len(soft)), tensors["labels"]].min() < 1 - 1e-3


@pytest.mark.parametrize(("count", "weight"), [(1, 0.5), (2, 0.0)])
def test_one_image_of_a_class_has_no_soft_labels_nor_has_a_weight_of_zero(count, weight):
    method = PrivateSet(**TINY | {"images_per_class": count}, soft_label_weight=weight)
    assert "soft_labels" not in fit(method).tensors


def test_a_start_from_scenes_lies_around_the_class_means():
    means = torch.rand(CLASSES, *COLOUR, generator=make_rng()) / 4 + 0.375
    (scenes, labels), (noise, _) = (
        PrivateSet(images_per_class=40, init_from_synthetic=synthetic)._initialize_set(
            means, STREAMS
        )
        for synthetic in (True, False)
    )
    colours = torch.stack([scenes[labels == label].mean((0, 2, 3)) for label in range(CLASSES)])
    torch.testing.assert_close(colours.mean(0), means.mean((0, 2, 3)), rtol=0, atol=0.05)
    # scenes have areas, noise has none
    roughness, of_noise = (
        (images - means[labels]).diff(dim=3).abs().mean() for images in (scenes, noise)
    )
    assert roughness < of_noise / 2


# fewer than were released, and more
@pytest.mark.parametrize("count", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_another_size_is_made_without_a_gate(released, count):
    release = released[0]
    method = PrivateSet(**QUICK | {"images_per_class": count})
    other = method.regenerate(release.artifact, release.spec, STREAMS, ignore_progress)
    assert other.is_consistent_with(release.spec)
    assert other.tensors["labels"].bincount().tolist() == [count] * 10
    assert score_on_digits(other.tensors["images"], other.tensors["labels"]) > 0.8
    stored = release.artifact.resize_state
    assert other.resize_state.keys() == stored.keys()  # so that a third can be made of it
    assert all(torch.equal(value, stored[name]) for name, value in other.resize_state.items())


@pytest.mark.parametrize("texture", [0.0, 0.7])
@pytest.mark.usefixtures("small_pretraining")
def test_what_is_stored_is_what_was_answered_in_half_precision(monkeypatch, texture):
    shares = (0.05, 0.2, 0.15, 0.3, 0.3)
    method = PrivateSet(**TINY, texture_norm=texture, budget_shares=shares)
    spec = Spec(COLOUR, CLASSES)
    rounds = {}
    query = private_set.query_features

    def watched(settings, gate, stage, *more):
        rounds[stage] = query(settings, gate, stage, *more)
        return rounds[stage]

    monkeypatch.setattr(private_set, "query_features", watched)
    _, restored = restore_rounds(method, fit(method, spec).resize_state, spec, STREAMS)
    assert list(restored) == list(rounds) == ["random", "pretrained", "trained1", "trained2"]
    images = torch.rand(4, *COLOUR, generator=make_rng())
    for name, answered in rounds.items():
        stored = restored[name]
        assert stored.weight == answered.weight
        torch.testing.assert_close(stored.target, answered.target, rtol=1e-3, atol=1e-3)
        pairs = zip(stored.augment_params, answered.augment_params, strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
        one, two = (
            compute_unit_features(
                part.nets, FrozenEnsemble(part.nets)[:], images, part.augment_params, part.center
            )
            for part in (stored, answered)
        )
        torch.testing.assert_close(one, two, rtol=0, atol=0.02)


def test_rejects_another_size_of_what_was_not_stored_or_does_not_match():
    bare = PrivateSet(**TINY, keep_answers=False)
    method = dataclasses.replace(bare, keep_answers=True)
    artifact = fit(bare)
    stored = fit(method)
    assert artifact.resize_state == {}
    narrow = dataclasses.replace(method, net_width=5)
    for regenerating, source, seed, words in (
        (bare, artifact, 0, "keep_answers"),
        (method, stored, 1, "random networks"),  # another seed draws other networks
        (narrow, stored, 0, "keep_answers"),
    ):
        streams = Streams(seed, Runtime("cpu"))
        with pytest.raises(ReleaseError, match=words):
            regenerating.regenerate(source, SPEC, streams, ignore_progress)


# After a crash


@pytest.fixture
def run(tmp_path):
    """A release of one data set into one folder."""
    dataset = Sensitive(make_images(), LABELS, SPEC, name="tiny")
    given = {"out": tmp_path / "out", "ledger": tmp_path / "x.jsonl", "runtime": Runtime("cpu")}
    return lambda more=None, **how: synthesize(
        dataset, PrivateSet(**TINY | (more or {})), **given, **how
    )


def kill(run, monkeypatch, owner, name, more=None):
    """Start a run that is killed where it calls a function."""

    def killed(*given, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            run(more)


def test_a_run_killed_after_the_random_round_repeats_no_answer(run, tmp_path, monkeypatch):
    more = {"num_random_nets": 13}
    noise_calls = []
    add_noise = secret_side_module.add_noise
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda *given: noise_calls.append(1) or add_noise(*given)
    )
    kill(run, monkeypatch, private_set, "train_nets_on_set", more)
    assert len(noise_calls) == 3  # the means, and two groups of random networks
    stored = sorted(file.stem for file in (tmp_path / "out.run").glob("*-?.safetensors"))
    assert stored == ["means-0", "random-0", "random-1"]
    sums = watch_sums(monkeypatch)
    release = run(more, resume=True)
    assert len(noise_calls) == len(sums) == 4  # and the trained networks
    epsilon = verify(tmp_path / "out")["epsilon_from_events"]
    assert epsilon == pytest.approx(release.guarantee.epsilon)
    # What was released is of the answers before the crash: 13 networks are asked in 7 and 6.
    means, first = sums[0][2], sums[1][2]
    counts = (means[:, -1] / 0.1).clamp(min=1)
    expected = (first * math.sqrt(7) / counts[:, None]).view(CLASSES, 7, -1).transpose(0, 1)
    target = release.artifact.resize_state["random.target"].float()
    torch.testing.assert_close(target[:7], expected.float(), rtol=2e-3, atol=1e-3)


def test_a_resumed_run_has_its_trained_networks_and_refuses_what_does_not_fit(
    run, tmp_path, monkeypatch
):
    """On a GPU a training does not repeat to the bit. Here it never does."""
    trained = []
    seeds = itertools.count()

    def train_differently(nets, *given, **more):
        with torch.no_grad():
            nets.conv0.add_(0.1 * torch.randn(nets.conv0.shape, generator=make_rng(next(seeds))))
        trained.append(nets.conv0.detach().clone())

    monkeypatch.setattr(private_set_nets, "train_ensemble", train_differently)
    kill(run, monkeypatch, PrivateSet, "_compute_soft_labels")
    with pytest.raises(ReleaseError, match="other settings"):
        run({"images_per_class": 3}, resume=True)
    (file,) = (tmp_path / "out.run").glob("trained1.public.*.safetensors")
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ReleaseError, match="altered"):
        run(resume=True)
    file.write_bytes(raw)
    release = run({"nets_per_step": 1}, resume=True)  # no answer depends on it
    assert release.metadata["settings"]["nets_per_step"] == 1
    assert len(trained) == 1
    assert torch.equal(release.artifact.resize_state["trained1.conv0"], trained[0].half())


def test_what_cannot_run_fails_before_anything_is_charged(run, tmp_path, monkeypatch):
    def fail(*given):
        raise MemoryError

    monkeypatch.setattr(private_set_queries, "compute_record_features", fail)
    with pytest.raises(MemoryError):
        run()
    assert Ledger(tmp_path / "x.jsonl").compute_spent_cost().epsilon(1e-5) == 0


def test_a_training_that_diverged_loses_no_answer(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        diverged = {"means": torch.tensor([math.nan])}
        patch.setattr(private_set, "export_rounds", lambda *given: diverged)
        with pytest.raises(ReleaseError, match=r"not finite.*--resume"):
            run()
    assert not (tmp_path / "out").exists()
    run(resume=True)
    verify(tmp_path / "out")
