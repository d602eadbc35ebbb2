"""The training loop: what a recipe asks for is what happens, step by step, and the same seed gives the same network."""

import dataclasses

import pytest
import torch
from nets.test_ensemble import alone
from torch import nn

from privot.nets import LeNet, training
from privot.nets.augment import AUGMENTATIONS
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.ensemble import Ensemble
from privot.nets.training import Classifier, Recipe, train_classifier, train_ensemble
from privot.nets.training_run import TrainingRun
from privot.runtime import cuda_graphs

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


class Linear(nn.Sequential):
    """The smallest classifier there is."""

    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def some(count=24, shape=(1, 6, 5), classes=3, seed=0):
    return torch.rand(count, *shape, generator=seeded(seed)), torch.arange(count) % classes


def small(nets=3, shape=(1, 8, 8), classes=3):
    return Ensemble(nets, shape, classes, width=4, generator=seeded())


def run(recipe, count=24, shape=(1, 6, 5), black=0.0, classes=3):
    images, labels = some(count, shape, classes)
    torch.manual_seed(0)
    return TrainingRun(Linear(shape, classes), images, labels, recipe, black)


def instead(it, step):
    """Have a run do this at each step."""
    it.step = it.graphed_step.step = step


@pytest.fixture
def batches(monkeypatch):
    """The images, labels and rate of every step."""
    seen = []
    step = TrainingRun.step

    def spy(self):
        seen.append(
            (
                self._load_batch().clone(),
                self.labels[self.crop_params[:, 0]].clone(),
                self.optimizer.param_groups[0]["lr"],
            )
        )
        step(self)

    monkeypatch.setattr(TrainingRun, "step", spy)
    return seen


def same(one, two):
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    )


def test_the_rate_drops_after_the_epochs_named(batches):
    train_classifier(Linear, *some(), 3, Recipe(6, 0.5, batch_size=12, lr_milestones=(2, 5)), CPU)
    assert [rate for *_, rate in batches] == pytest.approx([0.5] * 4 + [0.05] * 6 + [0.005] * 2)


def test_every_epoch_sees_every_record_once_in_another_order(batches):
    images, labels = some()
    train_classifier(Linear, images, labels, 3, Recipe(2, 0.1, batch_size=8), CPU)
    assert len(batches) == 6
    orders = [torch.cat([each[0] for each in batches[start : start + 3]]) for start in (0, 3)]
    wanted = ((images - images.mean()) / images.std()).flatten(1)
    for order in orders:
        assert torch.equal(order.flatten(1).sort(0).values, wanted.sort(0).values)
    assert not torch.equal(*orders)
    for pictures, marks, _ in batches:  # and each with its own label
        for picture, mark in zip(pictures, marks, strict=True):
            assert labels[(wanted == picture.flatten()).all(1)].tolist() == [mark]


def test_crops_are_those_of_the_padded_image():
    it = run(Recipe(1, 0.1, batch_size=9, max_shift=2), shape=(3, 6, 5), black=-0.7)
    black = -0.7
    images, _ = some(shape=(3, 6, 5))
    padded = nn.functional.pad(images, (2, 2, 2, 2), value=black)
    draws = torch.tensor(
        [
            [place, down, right, 0]
            for place, (down, right) in enumerate((a, b) for a in (0, 2, 4) for b in (0, 1, 4))
        ]
    )
    it.crop_params.copy_(draws)
    for found, (which, down, right, _) in zip(it._load_batch(), draws.tolist(), strict=True):
        assert torch.equal(found, padded[which, :, down : down + 6, right : right + 5])
    assert torch.equal(
        it._load_batch()[4][:, :, 1:], images[4][:, :, :4]
    )  # moved to the right by one, black at the rim
    assert (it._load_batch()[4][:, :, 0] == black).all()


def test_flips_are_left_to_right_and_after_the_crop():
    it = run(Recipe(1, 0.1, batch_size=4, max_shift=1, horizontal_flip=True), shape=(1, 6, 5))
    images, _ = some()
    draws = torch.tensor([[3, 1, 1, 0], [3, 1, 1, 1], [5, 0, 2, 0], [5, 0, 2, 1]])
    it.crop_params.copy_(draws)
    plain, mirrored, cropped, both = it._load_batch()
    assert torch.equal(plain, images[3])
    assert torch.equal(mirrored, images[3].flip(-1))
    assert torch.equal(both, cropped.flip(-1))


def test_crops_and_flips_are_drawn_evenly_and_only_if_asked():
    drawn = {}
    for recipe in (
        Recipe(1, 0.1, batch_size=1, max_shift=1, horizontal_flip=True),
        Recipe(1, 0.1, batch_size=1),
    ):
        it = run(recipe, count=900)
        seen = []
        instead(it, lambda it=it, seen=seen: seen.append(it.crop_params[0].clone()))
        it.run_epoch(seeded())
        drawn[recipe.horizontal_flip] = torch.stack(seen)
    for column, kinds in ((1, 3), (2, 3), (3, 2)):
        counts = drawn[True][:, column].bincount(minlength=kinds)
        assert len(counts) == kinds
        assert (counts - 900 / kinds).abs().max() < 4 * (900 / kinds) ** 0.5
    assert drawn[False][:, 1:].count_nonzero() == 0
    assert drawn[False][:, 0].unique().numel() == 900


def test_black_is_zero_before_standardisation(batches):
    images, labels = some(classes=2)
    train_classifier(Linear, images, labels, 2, Recipe(1, 0.1, batch_size=24, max_shift=3), CPU)
    mean = images.mean()
    std = images.std()
    corners = batches[0][0] * std + mean
    known = {round(value, 4) for value in images.flatten().tolist()}
    rims = [value for value in corners.flatten().tolist() if round(value, 4) not in known]
    assert rims
    assert max(map(abs, rims)) < 1e-4


def test_the_average_is_the_exponential_one():
    """With the usual warm-up, min(decay, (1 + t) / (10 + t)); and it holds on to no graph of the steps."""
    it = run(Recipe(3, 0.5, batch_size=6, ema_decay=0.5))
    start = [each.detach().clone() for each in it.net.parameters()]
    seen = []
    step = it.step
    instead(
        it, lambda: (step(), seen.append([each.detach().clone() for each in it.net.parameters()]))
    )
    for _ in range(3):
        it.run_epoch(seeded())
    assert len(seen) == 12
    assert not any(each.requires_grad for each in it.ema_parameters)
    wanted = start
    for turn, weights in enumerate(seen, 1):
        keep = min(0.5, (1 + turn) / (10 + turn))
        wanted = [keep * old + (1 - keep) * new for old, new in zip(wanted, weights, strict=True)]
    it.apply_ema()
    for found, value, last in zip(it.net.parameters(), wanted, seen[-1], strict=True):
        assert torch.allclose(found, value, atol=1e-6)
        assert not torch.allclose(found, last, atol=1e-3)


def test_without_an_average_the_last_weights_stay():
    it = run(Recipe(1, 0.5, batch_size=6))
    it.run_epoch(seeded())
    before = [each.detach().clone() for each in it.net.parameters()]
    it.apply_ema()
    assert all(torch.equal(*each) for each in zip(before, it.net.parameters(), strict=True))


@pytest.mark.parametrize("adam", [False, True])
def test_a_step_is_that_of_the_optimiser_named(adam):
    recipe = Recipe(1, 0.1, batch_size=24, use_adam=adam, momentum=0.8, weight_decay=0.01)
    images, labels = some()
    found = train_classifier(
        Linear, images, labels, 3, dataclasses.replace(recipe, epochs=4), CPU, seed=3
    ).net
    generator = seeded(3)
    net = training.initialize_weights(Linear((1, 6, 5), 3), generator)
    rule = (
        torch.optim.Adam(net.parameters(), 0.1, weight_decay=0.01)
        if adam
        else torch.optim.SGD(net.parameters(), 0.1, 0.8, weight_decay=0.01)
    )
    standard = (images - images.mean()) / images.std()
    for _ in range(4):
        rule.zero_grad()
        nn.functional.cross_entropy(net(standard), labels).backward()
        rule.step()
    for one, two in zip(found.parameters(), net.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize(
    ("count", "batch", "steps"), [(3, 128, 1), (24, 24, 1), (24, 10, 2), (25, 8, 3), (2, 1, 2)]
)
def test_a_set_smaller_than_a_batch_is_one_and_a_rest_waits_for_the_next_order(
    batches, count, batch, steps
):
    train_classifier(Linear, *some(count), 3, Recipe(1, 0.1, batch_size=batch), CPU)
    assert [len(labels) for _, labels, _ in batches] == [min(count, batch)] * steps


def test_the_same_seed_replays_and_another_does_not():
    images, labels = some(30, (1, 8, 8))
    recipe = Recipe(2, 0.05, batch_size=8, max_shift=1, horizontal_flip=True, ema_decay=0.9)
    one, two, other = (
        train_classifier(LeNet, images, labels, 3, recipe, CPU, seed=seed) for seed in (4, 4, 5)
    )
    assert same(one.net, two.net)
    assert not same(one.net, other.net)
    torch.manual_seed(123)  # nor does the global stream have a say
    assert same(one.net, train_classifier(LeNet, images, labels, 3, recipe, CPU, seed=4).net)


def test_images_are_standardised_at_test_time_as_in_training():
    images, labels = some(12, (1, 8, 8))
    made = train_classifier(ConvNet, images * 0.2, labels, 3, Recipe(1, 0.01), CPU)
    mean = (images * 0.2).mean().item()
    std = (images * 0.2).std().item()
    assert (made.mean, made.std) == pytest.approx((mean, std))
    assert not made.net.training
    with torch.no_grad():
        wanted = made.net((images - mean) / std)
        assert torch.allclose(made.predict_proba(images), wanted.softmax(1), atol=1e-5)
        assert torch.equal(made.predict(images), wanted.argmax(1))
        assert torch.allclose(
            made.features(images), made.net.features((images - mean) / std), atol=1e-5
        )
    assert torch.allclose(made.predict_proba(images).sum(1), torch.ones(12), atol=1e-5)


def test_many_images_are_classified_in_portions():
    images, _ = some(2100, (1, 2, 2))
    made = Classifier(Linear((1, 2, 2), 3), 0.3, 2.0, CPU)
    with torch.no_grad():
        assert torch.equal(made.predict(images), made.net((images - 0.3) / 2).argmax(1))


def test_constant_images_do_not_divide_by_zero():
    made = train_classifier(
        Linear, torch.full((8, 1, 2, 2), 0.5), torch.arange(8) % 2, 2, Recipe(1, 0.1), CPU
    )
    assert made.predict_proba(torch.rand(3, 1, 2, 2)).isfinite().all()


def test_half_precision_is_for_devices_that_have_it():
    """On a CPU it would be emulated, a hundred times as slow; the numbers are those of full precision."""
    images, labels = some(16, (1, 8, 8))
    full, half = (
        train_classifier(
            LeNet, images, labels, 3, Recipe(2, 0.05, half_precision=half), CPU
        ).predict_proba(images)
        for half in (False, True)
    )
    assert torch.allclose(full, half, atol=1e-6)


def test_progress_counts_epochs_under_the_stage_named():
    seen = []
    train_classifier(
        Linear,
        *some(),
        3,
        Recipe(3, 0.1),
        CPU,
        progress=lambda *step, **facts: seen.append((step, facts)),
        stage="here",
    )
    assert seen == [(("here", epoch, 3), {}) for epoch in (0, 1, 2, 3)]


def test_a_recipe_says_all_of_itself():
    text = str(
        Recipe(
            50,
            0.1,
            batch_size=64,
            weight_decay=1e-4,
            lr_milestones=(20, 40),
            max_shift=4,
            horizontal_flip=True,
            ema_decay=0.999,
        )
    )
    assert (
        text == "50 epochs, batch 64, SGD 0.1 momentum 0.9, weight decay 0.0001, "
        "rate x0.1 after epochs 20, 40, crops of +-4, flips, EMA 0.999"
    )
    assert str(Recipe(1, 1e-3, use_adam=True)) == "1 epochs, batch 128, Adam 0.001"
    text = str(Recipe(9, 0.1, even_batches=True, augmentations=("crop", "rotate"), num_repeats=5))
    assert (
        text == "9 epochs, batch 128, SGD 0.1 momentum 0.9, augmented by crop/rotate, 5 trainings"
    )


# Many nets side by side


def test_nets_side_by_side_train_as_each_would_alone():
    """The same batches and augmentations, given to each ConvNet by itself; what differs is the order of sums."""
    recipe = Recipe(
        5,
        0.05,
        batch_size=8,
        weight_decay=0.01,
        lr_milestones=(3,),
        even_batches=True,
        augmentations=("crop", "rotate", "color"),
    )
    images, labels = some(22, (1, 8, 8))
    nets = small()
    singles = [TrainingRun(alone(nets, place), images, labels, recipe) for place in range(3)]
    together = TrainingRun(nets, images, labels, recipe)
    step = together.step

    def spy():
        for single, *parts in zip(
            singles,
            *(
                each.split(together.batch_size)
                for each in (together.crop_params, *together.augment_params)
            ),
            strict=True,
        ):
            for buffer, part in zip(
                (single.crop_params, *single.augment_params), parts, strict=True
            ):
                buffer.copy_(part)
            single.set_learning_rate(together.optimizer.param_groups[0]["lr"])
            single.step()
        step()

    instead(together, spy)
    together.run(seeded(1), training.ignore_progress, "")
    begun = small()
    for place, single in enumerate(singles):
        found = alone(nets, place)
        first = alone(begun, place)
        for name, value in single.net.named_parameters():
            torch.testing.assert_close(found.get_parameter(name), value, rtol=1e-3, atol=1e-5)
        assert not torch.allclose(found.head.weight, first.head.weight, atol=1e-3)
    assert not torch.allclose(nets.head_weight[0], nets.head_weight[1], atol=1e-3)


def test_no_two_nets_nor_steps_share_a_draw():
    recipe = Recipe(1, 0.1, batch_size=6, augmentations=("rotate",))
    together = TrainingRun(small(4), *some(24, (1, 8, 8)), recipe)
    seen = []
    instead(
        together,
        lambda: seen.append(
            (together.crop_params[:, 0].view(4, 6).clone(), together.augment_params.affine.clone())
        ),
    )
    together.run_epoch(seeded())
    orders = torch.cat([which for which, _ in seen], 1)  # [nets, epoch]
    assert [sorted(order.tolist()) for order in orders] == [list(range(24))] * 4
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert torch.cat([plane for _, plane in seen])[:, 0, 0].unique().numel() == 4 * 24


def test_a_method_s_nets_learn_its_set_in_place():
    """Bright against dark halves: chance is a half. What they see lies in [-1, 1]."""
    images = 0.3 * torch.rand(40, 1, 8, 8, generator=seeded())
    labels = torch.arange(40) % 2
    images[labels == 1, :, :4] += 0.7
    nets = Ensemble(3, (1, 8, 8), 2, width=4, generator=seeded())
    seen = []
    watched = []
    nets.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    train_ensemble(
        nets,
        images,
        labels,
        Recipe(20, 0.05, batch_size=16, even_batches=True),
        seeded(1),
        progress=lambda *step: watched.append(step),
    )
    assert min(each.min().item() for each in seen) == pytest.approx(2 * images.min().item() - 1)
    assert max(each.max().item() for each in seen) == pytest.approx(2 * images.max().item() - 1)
    with torch.no_grad():
        assert ((nets(2 * images - 1).argmax(2) == labels).double().mean(1) > 0.9).all()
    assert watched[-1] == ("training the nets", 20, 20)


def test_repeats_are_an_ensemble_of_convnets():
    images, labels = some(30, (1, 8, 8))
    made = train_classifier(ConvNet, images, labels, 3, Recipe(1, 0.01, num_repeats=2), CPU)
    assert made.predict(images).shape == (2, 30)
    assert made.features(images).shape == (2, 30, made.net.num_features)
    torch.testing.assert_close(made.predict_proba(images).sum(2), torch.ones(2, 30))
    assert not torch.allclose(*made.predict_proba(images), atol=1e-3)
    for place in range(2):
        standard = (images - made.mean) / made.std
        wanted = made.net(standard, made.net.select(torch.tensor([place])))[0].softmax(1)
        torch.testing.assert_close(made.predict_proba(images)[place], wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="ConvNets"):
        train_classifier(LeNet, images, labels, 3, Recipe(1, 0.01, num_repeats=2), CPU)


# Augmentation, batches and labels


@pytest.mark.parametrize(
    ("operation", "moves"), [("rotate", False), ("crop", True), ("color", True), ("cutout", True)]
)
def test_a_net_sees_images_augmented_by_the_operations_named_and_no_others(operation, moves):
    """A round blob in the middle stays as it is when turned, and under nothing else; a bar does not stay."""
    place = torch.arange(16) - 7.5
    blob = (-(place[:, None] ** 2 + place**2) / 12).exp().expand(24, 1, 16, 16)
    bar = (place.abs() < 1.5).float().expand(24, 1, 16, 16)
    for images, changed in ((blob, moves), (bar, True)):
        net = nn.Sequential(nn.Flatten(), nn.Linear(256, 3))
        seen = []
        net.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        TrainingRun(
            net,
            images,
            torch.arange(24) % 3,
            Recipe(1, 0.1, batch_size=24, augmentations=(operation,)),
        ).run_epoch(seeded())
        gaps = (seen[0] - images).abs().amax((1, 2, 3))
        assert (gaps > 0.05).double().mean() > 0.4 if changed else (gaps < 0.05).all()
        assert len(seen[0].unique(dim=0)) > 3  # each image has numbers of its own


@pytest.mark.parametrize(
    ("count", "batch", "sizes"),
    [(3, 128, [3]), (24, 24, [24]), (10, 8, [5, 5]), (25, 8, [7] * 4), (5, 1, [1] * 5)],
)
def test_even_batches_hold_every_image_each_epoch(batches, count, batch, sizes):
    """What is left of an epoch makes no small batch but makes all of them smaller; a few images come twice to fill the last."""
    images, labels = some(count)
    train_classifier(
        Linear, images, labels, 3, Recipe(2, 0.1, batch_size=batch, even_batches=True), CPU
    )
    assert [len(marks) for _, marks, _ in batches] == sizes * 2
    wanted = (images - images.mean()) / images.std()
    for start in (0, len(sizes)):
        shown = torch.cat([each[0] for each in batches[start : start + len(sizes)]])
        times = (shown.flatten(1)[:, None] == wanted.flatten(1)).all(2).sum(0)
        assert set(times.tolist()) <= {1, 2}
        assert times.sum() == sum(sizes)


def test_soft_labels_are_learned_as_they_are():
    images, labels = some(24, (1, 8, 8))
    soft = torch.rand(24, 3, generator=seeded(5)).softmax(1)
    recipe = Recipe(400, 0.1, batch_size=24)
    made = train_classifier(Linear, images, soft, 3, recipe, CPU).predict_proba(images)
    torch.testing.assert_close(
        made, soft, rtol=0, atol=0.05
    )  # more numbers than images: what is asked for can be reached
    sharp = train_classifier(Linear, images, labels, 3, recipe, CPU)
    assert (sharp.predict_proba(images).amax(1) > 0.9).all()
    hard = nn.functional.one_hot(labels, 3).float()
    torch.testing.assert_close(
        train_classifier(Linear, images, hard, 3, recipe, CPU).predict_proba(images),
        sharp.predict_proba(images),
    )


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: a captured step has nothing to be compared with",
)
@pytest.mark.parametrize("adam", [False, True])
def test_a_captured_step_does_what_an_eager_one_does(monkeypatch, adam):
    images, labels = some(64, (1, 8, 8))
    recipe = Recipe(
        6,
        0.01,
        batch_size=16,
        use_adam=adam,
        lr_milestones=(3,),
        max_shift=1,
        horizontal_flip=True,
        ema_decay=0.9,
    )
    captured = train_classifier(LeNet, images, labels, 3, recipe, torch.device("cuda"), seed=2)
    monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", 10**9)
    eager = train_classifier(LeNet, images, labels, 3, recipe, torch.device("cuda"), seed=2)
    assert torch.allclose(captured.predict_proba(images), eager.predict_proba(images), atol=1e-3)


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: a captured step has nothing to be compared with",
)
def test_a_captured_step_of_many_nets_does_what_an_eager_one_does(monkeypatch):
    images, labels = (each.cuda() for each in some(70, (1, 28, 28)))
    soft = nn.functional.one_hot(labels, 3) * 0.7 + 0.1
    recipe = Recipe(
        4, 0.01, batch_size=40, lr_milestones=(2,), even_batches=True, augmentations=AUGMENTATIONS
    )
    found = []
    for warm in (cuda_graphs.WARMUP_CALLS, 10**9):
        monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", warm)
        nets = small(3, (1, 28, 28)).cuda()
        train_ensemble(nets, images, soft, recipe, seeded(1))
        found.append(nets(images))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
