"""Condensation by matching: means (DM), gradients (DC, DSA), and the real subset that both are held against."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from privot.baselines import augmentation_buffer, gradient_matching
from privot.baselines.augmentation_buffer import AugmentationBuffer
from privot.baselines.condensation import (
    ClassPool,
    PixelOptimizer,
    count_images_per_class,
    initialize_images,
    standardize_images,
)
from privot.baselines.conditional_gan import ConditionalGAN
from privot.baselines.distribution_matching import DistributionMatching
from privot.baselines.gradient_matching import GradientMatching
from privot.baselines.gradient_matching_run import MatchingRun
from privot.baselines.kip import KernelInducingPoints
from privot.baselines.random_subset import RandomSubset
from privot.data.dataset import Records, Sensitive
from privot.data.spec import Spec
from privot.errors import DataError, PrivotError, SettingError
from privot.nets.augment import (
    AUGMENTATIONS,
    apply_augmentations,
    list_augmentations,
    sample_augment_params,
)
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.generators.conv import initialize_weights
from privot.privacy.guarantee import NoGuarantee
from privot.runtime import Runtime, Streams, cuda_graphs, ignore_progress
from privot.synthesis import synthesize
from privot.synthesis.preflight import plan_run

pytestmark = pytest.mark.usefixtures("one_thread")

DIGITS = Spec((1, 8, 8), 10)
SMALL = {"images_per_class": 5, "net_width": 8, "batch_per_class": 64}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def few_digits(which):
    pixels, labels = load_digits(return_X_y=True)
    return Records(
        torch.tensor(pixels[which] / 16, dtype=torch.float32).view(-1, 1, 8, 8),
        torch.tensor(labels[which]),
    )


@pytest.fixture(scope="module")
def digits():
    return few_digits(slice(0, 800))


def tiny(shape=(1, 8, 8), sizes=(7, 4, 9), seed=0):
    """Random records in classes of these sizes, mixed."""
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[
        torch.randperm(sum(sizes), generator=seeded(seed))
    ]
    return Records(torch.rand(sum(sizes), *shape, generator=seeded(seed + 1)), labels)


def condensed(method, records, tmp_path, spec=DIGITS, device="cpu", **more):
    box = Sensitive(records.images.numpy(), records.labels.numpy(), spec, name="box")
    release = synthesize(
        box,
        method,
        ledger=tmp_path / f"{np.random.default_rng().integers(2**60)}.jsonl",
        runtime=Runtime(device),
        **more,
    )
    return release.artifact.tensors["images"], release.artifact.tensors["labels"], release


def fitted(method, records, spec, device="cpu"):
    """The product alone, without a ledger or a release."""
    gate = SimpleNamespace(
        spec=spec,
        read_without_guarantee=lambda reason: Records(*(each.to(device) for each in records)),
    )
    return method.fit(gate, Streams(0, Runtime(device)), ignore_progress)


def mean_distance(images, labels, records, seeds=range(100, 105)):
    """Squared distance of the class means in networks that no run has seen."""
    total = 0.0
    for seed in seeds:
        net = initialize_weights(ConvNet((1, 8, 8), 10, width=16), seeded(seed)).requires_grad_(
            False
        )
        for label in range(10):
            parts = (records.images[records.labels == label], images[labels == label])
            real, made = (net.features(standardize_images(part)).mean(0) for part in parts)
            total += float((real - made).square().sum())
    return total / len(seeds)


# Where a set starts


def test_a_random_start_has_seen_no_record():
    spec = Spec((1, 8, 8), 3)
    one, labels = initialize_images(tiny(seed=1), spec, 4, "random", seeded())
    other, _ = initialize_images(tiny(seed=5), spec, 4, "random", seeded())
    assert torch.equal(one, other)
    assert 0 <= one.min() < one.max() <= 1
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_a_real_start_is_records_of_each_class_none_twice():
    records = tiny()
    images, labels = initialize_images(records, Spec((1, 8, 8), 3), 4, "real", seeded())
    same = (images[:, None] == records.images).flatten(2).all(2)
    assert same.sum(1).tolist() == [1] * 12
    assert torch.equal(records.labels[same.int().argmax(1)], labels)
    assert len(same.int().argmax(1).unique()) == 12
    images.zero_()
    assert records.images.max() > 0  # a copy
    with pytest.raises(DataError, match="class 1 has fewer records than the 5 real images"):
        initialize_images(records, Spec((1, 8, 8), 3), 5, "real", seeded())


def test_a_ratio_is_of_the_mean_class_size(digits, tmp_path):
    assert [count_images_per_class(50, ratio, 60_000, 10) for ratio in (0.002, 0.01, 0.02)] == [
        12,
        60,
        120,
    ]
    assert count_images_per_class(50, 1e-9, 100, 10) == 1
    images, labels, _ = condensed(RandomSubset(ratio=0.05), digits, tmp_path)
    assert torch.bincount(labels).tolist() == [4] * 10
    assert (images.flatten(1)[:, None] == digits.images.flatten(1)).all(2).any(1).all()


# What a step draws


def test_draws_are_of_the_class_and_without_repetition():
    records = tiny(sizes=(7, 4, 30))
    pool = ClassPool(records, 3)
    draws = seeded()
    seen = set()
    for _ in range(40):
        images, weight = pool.sample(6, draws)
        torch.testing.assert_close(weight.sum(1), torch.ones(3))
        assert weight.count_nonzero(1).tolist() == [6, 4, 6]
        for label in range(3):
            real = images[label][weight[label] > 0]
            same = (
                torch.isclose(real[:, None], standardize_images(records.images)).flatten(2).all(2)
            )
            places = same.int().argmax(1)
            assert same.any(1).all()
            assert (records.labels[places] == label).all()
            assert len(set(places.tolist())) == len(places)
            seen |= set(places.tolist())
    assert len(seen) == 41  # every record gets its turn
    with pytest.raises(DataError, match="class 3 has no records"):
        ClassPool(records, 4)


def test_augmentations_drawn_ahead_are_never_used_twice(monkeypatch):
    monkeypatch.setattr(augmentation_buffer, "AUGMENTATIONS_PER_REFILL", 6)
    ahead = AugmentationBuffer(
        3, Spec((1, 8, 12), 3, flip_invariant=True), seeded(), torch.device("cpu")
    )
    fresh = seeded()
    for _ in range(4):
        bulk = sample_augment_params(6, (8, 12), fresh)
        for turn in range(2):
            ahead.refill_if_empty()
            for found, wanted in zip(ahead.next_params(), bulk, strict=True):
                assert torch.equal(found, wanted[3 * turn : 3 * turn + 3])


@pytest.mark.parametrize("kind", [DistributionMatching, GradientMatching, KernelInducingPoints])
@pytest.mark.parametrize(
    ("channels", "mirror", "mirrors"),
    [(1, None, False), (3, None, True), (1, True, True), (3, False, False)],
)
def test_whether_to_mirror_follows_the_rule_or_what_is_declared(
    kind, channels, mirror, mirrors, monkeypatch
):
    asked = []

    def spied(count, sides, generator, operations=AUGMENTATIONS):
        asked.append(operations)
        return sample_augment_params(count, sides, generator, operations)

    monkeypatch.setattr(augmentation_buffer, "sample_augment_params", spied)
    loops = {
        DistributionMatching: {"steps": 1, "batch_per_class": 3},
        GradientMatching: {"num_networks": 1, "batch_per_class": 3},
        KernelInducingPoints: {"steps": 1, "num_networks": 1, "batch_size": 3},
    }[kind]
    fitted(
        kind(images_per_class=1, net_width=2, **loops),
        tiny((channels, 4, 4)),
        Spec((channels, 4, 4), 3, flip_invariant=mirror),
    )
    assert asked
    assert {"flip" in each for each in asked} == {mirrors}
    assert {tuple(each for each in some if each != "flip") for some in asked} == {
        tuple(each for each in AUGMENTATIONS if each != "flip")
    }


# DM


@pytest.mark.parametrize("augment", [False, True])
def test_two_steps_are_the_papers_by_hand(augment):
    """The distance written out in loops, in float64; networks, augmentations and momentum 0.5 as the run has them, no record left out."""
    records = tiny((3, 8, 8), (7, 4, 8))
    spec = Spec((3, 8, 8), 3)
    rate = 0.5
    method = DistributionMatching(
        images_per_class=2,
        steps=2,
        batch_per_class=8,
        net_width=4,
        learning_rate=rate,
        augment=augment,
    )
    found = fitted(method, records, spec).tensors["images"]
    streams = Streams(0, Runtime("cpu"))
    begun, labels = initialize_images(records, spec, 2, "random", streams.make_rng("start"))
    images = standardize_images(begun).double()
    speed = torch.zeros_like(begun, dtype=torch.float64)
    draws = streams.make_rng("draws")
    pool = ClassPool(records, 3)
    net = ConvNet((3, 8, 8), 3, 4)
    changes = sample_augment_params(
        augmentation_buffer.AUGMENTATIONS_PER_REFILL // 3 * 3, (8, 8), streams.make_rng("augment")
    )
    first = standardize_images(begun).double()
    white = (1 - 0.47) / 0.2
    for step in range(2):
        exact = copy.deepcopy(initialize_weights(net, draws)).double()
        pool.sample(8, draws)  # as many random numbers as the run takes; all records are in it
        images.requires_grad_()
        total = 0.0
        for label in range(3):
            sides = [
                standardize_images(records.images[records.labels == label]).double(),
                images[labels == label],
            ]
            if augment:
                sides = [
                    apply_augmentations(
                        side, changes.select(torch.full((len(side),), 3 * step + label))
                    )
                    for side in sides
                ]
            real, made = (exact.features(side).mean(0) for side in sides)
            total = total + (real - made).square().sum()
        speed = 0.5 * speed + torch.autograd.grad(total, images)[0]
        images = (images.detach() - rate * speed).clamp(-0.47 / 0.2, white)
    assert (images - first).abs().median() > 0.01  # there was something to see
    torch.testing.assert_close(standardize_images(found).double(), images, rtol=0, atol=1e-4)


def test_the_usual_rate_reaches_the_pixels():
    # The first step is rate times gradient, and the gradient does not know the rate.
    records = tiny(sizes=(6, 6, 6))
    spec = Spec((1, 8, 8), 3)

    def step(**settings):
        method = DistributionMatching(
            images_per_class=2, steps=1, net_width=4, augment=False, **settings
        )
        begun, _ = initialize_images(records, spec, 2, method.init, Streams(0).make_rng("start"))
        moved = fitted(method, records, spec).tensors["images"] - begun
        return moved[(begun > 0.1) & (begun < 0.9)]

    for init, usual in (("random", 2.0), ("real", 1.0)):
        torch.testing.assert_close(
            step(init=init),
            usual / 1e-1 * step(init=init, learning_rate=1e-1),
            rtol=1e-2,
            atol=1e-5,
        )


def test_dm_matches_means_in_networks_it_has_not_seen(digits, tmp_path):
    begun, labels = initialize_images(digits, DIGITS, 5, "random", seeded())
    images, made, _ = condensed(DistributionMatching(**SMALL, steps=80), digits, tmp_path)
    subset, _, _ = condensed(RandomSubset(images_per_class=5), digits, tmp_path)
    assert torch.equal(made, labels)
    before, after, real = (mean_distance(each, labels, digits) for each in (begun, images, subset))
    assert after < before / 20
    assert after < real  # of which the difference is chance


def test_one_augmentation_serves_real_and_synthetic(tmp_path):
    # A set that is the data has nothing to learn, unless the two sides are augmented apart.
    records = tiny(sizes=(6, 6, 6))
    method = DistributionMatching(images_per_class=6, init="real", steps=20, net_width=8)
    images, _, _ = condensed(method, records, tmp_path, Spec((1, 8, 8), 3))
    begun, _ = initialize_images(
        records, Spec((1, 8, 8), 3), 6, "real", Streams(0).make_rng("start")
    )
    assert (images - begun).abs().max() < 1e-3


def test_an_adversary_who_knows_all_records_but_one_solves_for_it(tmp_path):
    """The argument of docs/methods/distribution-matching.md, in the linear case: images of 2x2 pixels pass a ConvNet unchanged."""
    records = tiny((1, 2, 2), (12, 9))
    spec = Spec((1, 2, 2), 2)
    images, labels, _ = condensed(
        DistributionMatching(images_per_class=3, steps=100, augment=False), records, tmp_path, spec
    )
    victim = int((records.labels == 1).nonzero()[0])
    others = (records.labels == 1) & (torch.arange(21) != victim)
    solved = 9 * images[labels == 1].mean(0) - records.images[others].sum(0)
    assert (solved - records.images[victim]).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("kind", "loops"),
    [
        (DistributionMatching, {"steps": 60, "learning_rate": 5.0}),
        (
            GradientMatching,
            {"num_networks": 3, "outer_steps": 4, "inner_steps": 4, "learning_rate": 1.0},
        ),
    ],
)
def test_a_real_start_stays_visible_and_a_random_one_copies_nobody(kind, loops, digits, tmp_path):
    begun, labels = initialize_images(digits, DIGITS, 5, "real", Streams(0).make_rng("start"))
    real, _, opened = condensed(kind(**SMALL, **loops, init="real"), digits, tmp_path)
    noise, _, closed = condensed(kind(**SMALL, **loops), digits, tmp_path)
    known = digits.images.flatten(1)
    unknown = few_digits(slice(800, 1600)).images.flatten(1)
    nearest = torch.cdist(begun.flatten(1), known).argmin(1)
    assert (torch.cdist(real.flatten(1), known).argmin(1) == nearest).float().mean() > 0.9
    # how near the records are, against as many digits that no run has seen: 1 for a set that has copied nothing
    copied, drawn = (
        torch.cdist(each.flatten(1), known).amin(1).mean()
        / torch.cdist(each.flatten(1), unknown).amin(1).mean()
        for each in (real, noise)
    )
    assert copied < 0.7
    assert drawn > 0.9
    # which is worth saying of a set that has become like its classes, not of the noise that it began as
    means = torch.stack([known[digits.labels == label].mean(0) for label in range(10)])
    speckle, _ = initialize_images(digits, DIGITS, 5, "random", Streams(0).make_rng("start"))
    before, after = (
        torch.cdist(each.flatten(1), means).argmin(1).eq(labels).float().mean()
        for each in (speckle, noise)
    )
    assert before < 0.3
    assert after > 0.6
    assert isinstance(opened.guarantee, NoGuarantee)
    assert "exact function of the records" in opened.guarantee.reason
    assert "real images, which remain visible" in opened.guarantee.reason
    assert "exact function of the records" in closed.guarantee.reason
    assert "visible" not in closed.guarantee.reason


# DC and DSA


def literal_distance(net, records, images, labels, drawn):
    """The papers' distance, written out in loops."""
    total = 0.0
    for label in range(3):
        grads = []
        for each, known in (
            (standardize_images(records.images[records.labels == label]), False),
            (images[labels == label], True),
        ):
            if drawn is not None:
                each = apply_augmentations(each, drawn.select(torch.full((len(each),), label)))
            loss = cross_entropy(net(each), torch.full((len(each),), label))
            grads.append(torch.autograd.grad(loss, list(net.parameters()), create_graph=known))
        for one, other in zip(*grads, strict=True):
            if one.ndim == 1:
                continue
            for row in range(len(one)):
                product = (one[row] * other[row]).sum()
                total = (
                    total
                    + 1
                    - product
                    / (one[row].square().sum().sqrt() * other[row].square().sum().sqrt() + 1e-6)
                )
    return total


def doubled(records, net, drawn):
    """The same in float64."""
    return (
        Records(records.images.double(), records.labels),
        copy.deepcopy(net).double(),
        drawn and type(drawn)(*map(torch.clone, drawn)),
    )


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 8)])
def test_a_step_is_the_papers_gradient(augment, shape):
    # No class has more records than the batch, so that all are drawn, as the reference has it, and rows are filled up with weight 0.
    records = tiny(shape, (7, 4, 8))
    spec = Spec(shape, 3)
    begun, labels = initialize_images(records, spec, 2, "random", seeded(3))
    run = MatchingRun(
        spec,
        ClassPool(records, 3),
        PixelOptimizer(begun, spec, 0.1),
        labels,
        Streams(5, Runtime("cpu")),
        batch_per_class=8,
        augment=augment,
        net_width=3,
        net_depth=3,
    )
    run.reset_net()
    drawn = run.matching_augmentations.params.select(torch.arange(3)) if augment else None
    exact, net, drawn = doubled(records, run.net, drawn)
    images = run.pixels.pixels.detach().double().requires_grad_()
    loss = literal_distance(net, exact, images, labels, drawn)
    (wanted,) = torch.autograd.grad(loss, images)
    run.match_gradients()
    torch.testing.assert_close(
        run.pixels.momentum_buffer.double(),
        wanted,
        rtol=1e-3,
        atol=1e-4 * float(wanted.abs().max()),
    )
    # and by finite differences, which know nothing of double backward
    toward = torch.randn(images.shape, generator=seeded(4), dtype=torch.float64)
    step = 1e-6
    ends = [
        literal_distance(net, exact, images.detach() + sign * step * toward, labels, drawn).detach()
        for sign in (1, -1)
    ]
    assert float(ends[0] - ends[1]) / (2 * step) == pytest.approx(
        float((wanted * toward).sum()), rel=1e-3
    )
    moved = (images.detach().float() - 0.1 * run.pixels.momentum_buffer).clamp(
        run.pixels.min_value, run.pixels.max_value
    )
    torch.testing.assert_close(run.pixels.pixels.detach(), moved)


@pytest.mark.parametrize("augment", [False, True])
def test_the_network_learns_on_the_set_between_the_steps(augment):
    records = tiny()
    spec = Spec((1, 8, 8), 3)
    begun, labels = initialize_images(records, spec, 4, "random", seeded(3))
    run = MatchingRun(
        spec,
        ClassPool(records, 3),
        PixelOptimizer(begun, spec, 0.1),
        labels,
        Streams(5, Runtime("cpu")),
        batch_per_class=256,
        augment=augment,
        net_width=3,
        net_depth=3,
    )
    run.reset_net()
    changes = sample_augment_params(
        augmentation_buffer.AUGMENTATIONS_PER_REFILL // 12 * 12,
        (8, 8),
        Streams(5).make_rng("augment"),
        list_augmentations(flip_invariant=False),
    )
    net = copy.deepcopy(run.net)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    for epoch in range(3):  # one batch an epoch: its order does not matter
        optimiser.zero_grad()
        images = run.pixels.pixels.detach()
        if augment:  # to each image its own
            images = apply_augmentations(images, changes.select(12 * epoch + torch.arange(12)))
        cross_entropy(net(images), labels).backward()
        optimiser.step()
        run.train_net()
    torch.testing.assert_close(dict(run.net.named_parameters()), dict(net.named_parameters()))
    gains = dict(run.net.named_parameters())["norms.0.weight"]
    assert not torch.equal(gains, torch.ones(3))
    run.reset_net()
    assert torch.equal(gains, torch.ones(3))  # nothing of the old network is left


def test_networks_are_fresh_and_learn_between_the_steps_alone(monkeypatch):
    seen = []
    turns = []

    def spied(name):
        real = getattr(MatchingRun, name)

        def called(run):
            turns.append(name)
            if name == "match_gradients":
                seen.append(run.net.convs[0].weight.detach().clone())
            real(run)

        monkeypatch.setattr(MatchingRun, name, called)

    for name in ("match_gradients", "train_net"):
        spied(name)
    method = GradientMatching(
        images_per_class=2,
        num_networks=2,
        outer_steps=3,
        inner_steps=2,
        net_width=2,
        batch_per_class=3,
    )
    fitted(method, tiny(), Spec((1, 8, 8), 3))
    match, train = "match_gradients", "train_net"
    assert turns == [match, train, train, match, train, train, match] * 2
    apart = torch.cdist(torch.stack(seen).flatten(1), torch.stack(seen).flatten(1))
    assert apart[~torch.eye(6, dtype=torch.bool)].min() > 0  # it learns
    assert apart[2, 3] > 10 * apart[0, 2]  # and then another takes its place, far away


def test_loops_are_those_of_the_papers():
    assert [gradient_matching.choose_loop_counts(each) for each in (1, 10, 30, 50, 100)] == [
        (1, 1),
        (10, 50),
        (30, 20),
        (50, 10),
        (50, 10),
    ]


@pytest.mark.parametrize("augment", [False, True])
def test_gradient_matching_helps_networks_it_has_not_seen(augment, digits, tmp_path):
    method = GradientMatching(
        **SMALL, num_networks=3, outer_steps=4, inner_steps=4, learning_rate=1.0, augment=augment
    )
    images, labels, _ = condensed(method, digits, tmp_path)
    begun, _ = initialize_images(digits, DIGITS, 5, "random", Streams(0).make_rng("start"))

    def learned(given):
        """Accuracy on the real digits after some epochs on the set."""
        net = initialize_weights(ConvNet((1, 8, 8), 10, width=16), seeded(50))
        optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for _ in range(60):
            optimiser.zero_grad()
            cross_entropy(net(standardize_images(given)), labels).backward()
            optimiser.step()
        with torch.no_grad():
            return float(
                (net(standardize_images(digits.images)).argmax(1) == digits.labels).float().mean()
            )

    assert learned(images) > learned(begun) + 0.2


# Settings, and the whole way


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"images_per_class": 0}, "images_per_class=0"),
        ({"ratio": 0.0}, "ratio=0.0"),
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"init": "noise"}, "random or real"),
        ({"learning_rate": float("inf")}, "learning_rate=inf"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"batch_per_class": 0}, "batch_per_class=0"),
        ({"net_depth": 0}, "net_depth=0"),
    ],
)
@pytest.mark.parametrize("kind", [DistributionMatching, GradientMatching])
def test_settings_out_of_range(kind, settings, words):
    with pytest.raises(SettingError, match=words):
        kind(**settings)


def test_no_steps_are_out_of_range():
    for kind, setting in ((DistributionMatching, "steps"), (GradientMatching, "num_networks")):
        with pytest.raises(SettingError, match=f"{setting}=0"):
            kind(**{setting: 0})


def test_what_can_be_refused_before_the_records_are_opened_is():
    spec = Spec((1, 8, 8), 3, 20, (7, 4, 9))
    for method in (
        RandomSubset(images_per_class=5),
        RandomSubset(ratio=1.0),
        DistributionMatching(init="real"),
        GradientMatching(init="real"),
    ):
        with pytest.raises(SettingError, match="class_sizes declares 4"):
            method.plan(spec)
    with pytest.raises(SettingError, match="class_sizes declares 0"):
        DistributionMatching().plan(Spec((1, 8, 8), 2, 4, (4, 0)))
    assert (
        DistributionMatching().plan(spec).stages
        == RandomSubset(images_per_class=4).plan(spec).stages
        == ()
    )


@pytest.mark.parametrize("kind", [DistributionMatching, GradientMatching, RandomSubset])
def test_a_forecast_counts_images_and_work(kind):
    spec = Spec((3, 32, 32), 10, 50_000)
    few, many = (
        plan_run(spec, kind(images_per_class=each), None, "cpu")["forecast"] for each in (10, 50)
    )
    assert (few["images"], many["images"]) == (100, 500)
    assert kind(ratio=0.01).forecast(spec, None) == kind(images_per_class=50).forecast(spec, None)
    assert few["floating_point_operations"] <= many["floating_point_operations"]
    assert kind(ratio=0.01).forecast(Spec((3, 32, 32), 10), None).get("images") is None


class Everywhere(ModuleTracker):
    """One sum for all modules: the tracker's own hooks refuse a gradient to what a module was given."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize(
    ("method", "near"),
    [  # what is left out: last layers, small products; the first layer's missing gradient
        (DistributionMatching(images_per_class=5, steps=2, net_width=32, batch_per_class=9), 0.02),
        (
            GradientMatching(
                images_per_class=5,
                num_networks=1,
                outer_steps=2,
                inner_steps=2,
                net_width=64,
                batch_per_class=9,
            ),
            0.1,
        ),
        (
            KernelInducingPoints(
                images_per_class=5, steps=2, net_width=16, num_networks=2, batch_size=27
            ),
            0.05,
        ),
        (KernelInducingPoints(images_per_class=5, steps=2, kernel="dense", batch_size=27), 0.05),
        (ConditionalGAN(steps=3, base_channels=8, batch_size=8), 0.02),
        (
            ConditionalGAN(
                steps=3, base_channels=8, batch_size=8, critic_steps=2, gradient_penalty=0
            ),
            0.02,
        ),
    ],
    ids=["DM", "DSA", "KIP", "KIP-dense", "GAN", "GAN-plain"],
)
def test_the_work_is_what_a_profiler_counts(method, near, shape):
    records = tiny(shape, (9, 9, 9))
    spec = Spec(shape, 3, 27)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = Everywhere()
    with counter:
        fitted(method, records, spec)
    assert method.forecast(spec, None)["floating_point_operations"] == pytest.approx(
        counter.get_total_flops(), rel=near
    )


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 12, 20), (1, 2, 3), (1, 1, 1)])
@pytest.mark.parametrize("kind", [DistributionMatching, GradientMatching])
def test_any_shape_will_do(kind, shape, tmp_path):
    records = tiny(shape)
    loops = (
        {"steps": 2}
        if kind is DistributionMatching
        else {"num_networks": 2, "outer_steps": 2, "inner_steps": 1}
    )
    method = kind(images_per_class=2, net_width=2, batch_per_class=3, **loops)
    images, _, _ = condensed(method, records, tmp_path, Spec(shape, 3))
    again, _, _ = condensed(method, records, tmp_path, Spec(shape, 3))
    other, _, _ = condensed(method, records, tmp_path, Spec(shape, 3), seed=1)
    assert images.shape == (6, *shape)
    assert torch.equal(images, again)  # an exact function of the records and the seed
    assert not torch.equal(images, other)


def test_a_class_without_records_is_refused(tmp_path):
    with pytest.raises(PrivotError, match="class 2 has no records"):
        condensed(
            DistributionMatching(images_per_class=2, steps=1, net_width=2),
            tiny(sizes=(4, 4)),
            tmp_path,
            Spec((1, 8, 8), 3),
        )


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: a step is captured on one alone"
)
@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize(("shape", "width"), [((1, 8, 8), 8), ((3, 32, 32), 128)])
@pytest.mark.parametrize("kind", [DistributionMatching, GradientMatching])
def test_a_captured_step_goes_on_as_the_eager_one(kind, shape, width, augment, monkeypatch):
    records = tiny(shape)
    spec = Spec(shape, 3)
    made = []
    loops = (
        {"steps": 12}
        if kind is DistributionMatching
        else {"num_networks": 3, "outer_steps": 4, "inner_steps": 3}
    )
    for warm in (cuda_graphs.WARMUP_CALLS, 10**9):
        monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", warm)
        method = kind(
            images_per_class=2,
            net_width=width,
            batch_per_class=5,
            learning_rate=0.1,
            augment=augment,
            **loops,
        )
        made.append(fitted(method, records, spec, "cuda").tensors["images"].cpu())
    begun, _ = initialize_images(records, spec, 2, "random", Streams(0).make_rng("start"))
    assert (made[1] - begun).abs().max() > 0.001
    assert (made[0] - made[1]).abs().max() < 0.1 * (
        made[1] - begun
    ).abs().max()  # half precision and the order of sums
