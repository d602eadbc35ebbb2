"""The training loop: what a recipe asks for is what happens, step by step, and the same seed gives the same network."""

import dataclasses

import pytest
import torch
from support.ensembles import extract_convnet
from torch import nn
from torch.testing import assert_close

from privot.nets import LeNet, training
from privot.nets.augment import AUGMENTATIONS
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.ensemble import Ensemble
from privot.nets.training import Classifier, Recipe, train_classifier, train_ensemble
from privot.nets.training_run import TrainingRun
from privot.runtime import cuda_graphs

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: a captured step has nothing to be compared with",
)


class Linear(nn.Sequential):
    """The smallest classifier there is."""

    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_data(count=24, shape=(1, 6, 5), classes=3):
    return torch.rand(count, *shape, generator=seeded()), torch.arange(count) % classes


def make_ensemble(nets=3, shape=(1, 8, 8), classes=3):
    return Ensemble(nets, shape, classes, width=4, generator=seeded())


def make_run(recipe, count=24, shape=(1, 6, 5), black=0.0):
    images, labels = make_data(count, shape)
    torch.manual_seed(0)
    return TrainingRun(Linear(shape, 3), images, labels, recipe, black)


def train(recipe, data=None, build=Linear, **more):
    images, labels = data or make_data()
    return train_classifier(build, images, labels, 3, recipe, CPU, **more)


def set_step(run, step):
    run.step = run.graphed_step.step = step


def copy_weights(net):
    return [weights.detach().clone() for weights in net.parameters()]


def standardise(images):
    return (images - images.mean()) / images.std()


@pytest.fixture
def batches(monkeypatch):
    """The images, labels and rate of every step."""
    seen = []
    step = TrainingRun.step

    def watch(self):
        labels = self.labels[self.crop_params[:, 0]].clone()
        seen.append((self._load_batch().clone(), labels, self.optimizer.param_groups[0]["lr"]))
        step(self)

    monkeypatch.setattr(TrainingRun, "step", watch)
    return seen


def same(one, two):
    weights = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in weights)


def test_the_rate_drops_after_the_epochs_named(batches):
    train(Recipe(6, 0.5, batch_size=12, lr_milestones=(2, 5)))
    assert [rate for *_, rate in batches] == pytest.approx([0.5] * 4 + [0.05] * 6 + [0.005] * 2)


def test_every_epoch_sees_every_record_once_in_another_order(batches):
    images, labels = make_data()
    train(Recipe(2, 0.1, batch_size=8))
    assert len(batches) == 6
    orders = [torch.cat([batch[0] for batch in batches[start : start + 3]]) for start in (0, 3)]
    expected = standardise(images).flatten(1)
    for order in orders:
        assert torch.equal(order.flatten(1).sort(0).values, expected.sort(0).values)
    assert not torch.equal(*orders)
    for batch, batch_labels, _ in batches:  # and every image with its own label
        for image, label in zip(batch, batch_labels, strict=True):
            assert labels[(expected == image.flatten()).all(1)].tolist() == [label]


def test_crops_are_those_of_the_padded_image():
    black = -0.7
    run = make_run(Recipe(1, 0.1, batch_size=9, max_shift=2), shape=(3, 6, 5), black=black)
    images, _ = make_data(shape=(3, 6, 5))
    padded = nn.functional.pad(images, (2, 2, 2, 2), value=black)
    shifts = [(down, right) for down in (0, 2, 4) for right in (0, 1, 4)]
    run.crop_params.copy_(torch.tensor([[n, *shift, 0] for n, shift in enumerate(shifts)]))
    batch = run._load_batch()
    for n, (down, right) in enumerate(shifts):
        assert torch.equal(batch[n], padded[n, :, down : down + 6, right : right + 5])
    # Moved to the right by one, black at the edge.
    assert torch.equal(batch[4][:, :, 1:], images[4][:, :, :4])
    assert (batch[4][:, :, 0] == black).all()


def test_flips_are_left_to_right_and_after_the_crop():
    run = make_run(Recipe(1, 0.1, batch_size=4, max_shift=1, horizontal_flip=True))
    images, _ = make_data()
    run.crop_params.copy_(torch.tensor([[3, 1, 1, 0], [3, 1, 1, 1], [5, 0, 2, 0], [5, 0, 2, 1]]))
    plain, mirrored, cropped, both = run._load_batch()
    assert torch.equal(plain, images[3])
    assert torch.equal(mirrored, images[3].flip(-1))
    assert torch.equal(both, cropped.flip(-1))


@pytest.mark.parametrize("is_augmented", [False, True])
def test_crops_and_flips_are_drawn_evenly_and_only_if_asked(is_augmented):
    more = {"max_shift": 1, "horizontal_flip": True} if is_augmented else {}
    run = make_run(Recipe(1, 0.1, batch_size=1, **more), count=900)
    draws = []
    set_step(run, lambda: draws.append(run.crop_params[0].clone()))
    run.run_epoch(seeded())
    draws = torch.stack(draws)
    assert draws[:, 0].unique().numel() == 900
    if not is_augmented:
        assert draws[:, 1:].count_nonzero() == 0
        return
    for column, kinds in ((1, 3), (2, 3), (3, 2)):
        counts = draws[:, column].bincount(minlength=kinds)
        assert len(counts) == kinds
        assert (counts - 900 / kinds).abs().max() < 4 * (900 / kinds) ** 0.5


def test_black_is_zero_before_standardisation(batches):
    images, _ = make_data()
    train(Recipe(1, 0.1, batch_size=24, max_shift=3))
    values = (batches[0][0] * images.std() + images.mean()).flatten().tolist()
    pixels = {round(value, 4) for value in images.flatten().tolist()}
    edges = [value for value in values if round(value, 4) not in pixels]
    assert edges
    assert max(map(abs, edges)) < 1e-4


@pytest.mark.parametrize("ema_decay", [0.0, 0.5])
def test_the_average_is_the_exponential_one_if_one_is_asked_for(ema_decay):
    """With the usual warm-up, min(decay, (1 + t) / (10 + t)); and it holds on to no graph of the steps."""
    run = make_run(Recipe(3, 0.5, batch_size=6, ema_decay=ema_decay))
    average = copy_weights(run.net)
    steps = []
    step = run.step
    set_step(run, lambda: (step(), steps.append(copy_weights(run.net))))
    for _ in range(3):
        run.run_epoch(seeded())
    assert len(steps) == 12
    for turn, weights in enumerate(steps, 1):
        decay = min(ema_decay, (1 + turn) / (10 + turn))
        pairs = zip(average, weights, strict=True)
        average = [decay * old + (1 - decay) * new for old, new in pairs]
    run.apply_ema()
    for weights, expected, last in zip(run.net.parameters(), average, steps[-1], strict=True):
        assert torch.allclose(weights, expected, atol=1e-6)
        assert torch.allclose(weights, last, atol=1e-3) == (ema_decay == 0)
    assert not any(weights.requires_grad for weights in run.ema_parameters or ())


@pytest.mark.parametrize("adam", [False, True])
def test_a_step_is_that_of_the_optimiser_named(adam):
    images, labels = make_data()
    trained = train(
        Recipe(4, 0.1, batch_size=24, use_adam=adam, momentum=0.8, weight_decay=0.01), seed=3
    )
    net = training.initialize_weights(Linear((1, 6, 5), 3), seeded(3))
    optimizer = (
        torch.optim.Adam(net.parameters(), 0.1, weight_decay=0.01)
        if adam
        else torch.optim.SGD(net.parameters(), 0.1, 0.8, weight_decay=0.01)
    )
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(standardise(images)), labels).backward()
        optimizer.step()
    for one, two in zip(trained.net.parameters(), net.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize(
    ("count", "batch", "steps"), [(3, 128, 1), (24, 24, 1), (24, 10, 2), (25, 8, 3), (2, 1, 2)]
)
def test_a_set_smaller_than_a_batch_is_one_and_a_rest_waits_for_the_next_order(
    batches, count, batch, steps
):
    train(Recipe(1, 0.1, batch_size=batch), make_data(count))
    assert [len(labels) for _, labels, _ in batches] == [min(count, batch)] * steps


def test_the_same_seed_replays_and_another_does_not():
    data = make_data(30, (1, 8, 8))
    recipe = Recipe(2, 0.05, batch_size=8, max_shift=1, horizontal_flip=True, ema_decay=0.9)
    one, two, other = (train(recipe, data, LeNet, seed=seed) for seed in (4, 4, 5))
    assert same(one.net, two.net)
    assert not same(one.net, other.net)
    torch.manual_seed(123)  # nor does the global generator matter
    assert same(one.net, train(recipe, data, LeNet, seed=4).net)


def test_images_are_standardised_at_test_time_as_in_training():
    images, labels = make_data(12, (1, 8, 8))
    images = images * 0.2
    trained = train(Recipe(1, 0.01), (images, labels), ConvNet)
    assert (trained.mean, trained.std) == pytest.approx((images.mean().item(), images.std().item()))
    assert not trained.net.training
    standard = standardise(images)
    with torch.no_grad():
        scores = trained.net(standard)
        assert torch.allclose(trained.predict_proba(images), scores.softmax(1), atol=1e-5)
        assert torch.equal(trained.predict(images), scores.argmax(1))
        assert torch.allclose(trained.features(images), trained.net.features(standard), atol=1e-5)
        many, _ = make_data(2100, (1, 2, 2))  # classified in chunks
        classifier = Classifier(Linear((1, 2, 2), 3), 0.3, 2.0, CPU)
        assert torch.equal(classifier.predict(many), classifier.net((many - 0.3) / 2).argmax(1))


def test_constant_images_do_not_divide_by_zero():
    trained = train(Recipe(1, 0.1), (torch.full((8, 1, 2, 2), 0.5), torch.arange(8) % 2))
    assert trained.predict_proba(torch.rand(3, 1, 2, 2)).isfinite().all()


def test_half_precision_is_for_devices_that_have_it():
    """On a CPU it would be emulated, a hundred times as slow; the numbers are those of full precision."""
    images, labels = make_data(16, (1, 8, 8))
    full, half = (
        train(Recipe(2, 0.05, half_precision=half), (images, labels), LeNet).predict_proba(images)
        for half in (False, True)
    )
    assert torch.allclose(full, half, atol=1e-6)


def test_progress_counts_epochs_under_the_stage_named():
    steps = []
    train(Recipe(3, 0.1), progress=lambda *step: steps.append(step), stage="here")
    assert steps == [("here", epoch, 3) for epoch in (0, 1, 2, 3)]


def test_a_recipe_says_all_of_itself():
    augmented = {"max_shift": 4, "horizontal_flip": True, "ema_decay": 0.999}
    assert (
        str(Recipe(50, 0.1, batch_size=64, weight_decay=1e-4, lr_milestones=(20, 40), **augmented))
        == "50 epochs, batch 64, SGD 0.1 momentum 0.9, weight decay 0.0001, "
        "rate x0.1 after epochs 20, 40, crops of +-4, flips, EMA 0.999"
    )
    assert str(Recipe(1, 1e-3, use_adam=True)) == "1 epochs, batch 128, Adam 0.001"
    assert (
        str(Recipe(9, 0.1, even_batches=True, augmentations=("crop", "rotate"), num_repeats=5))
        == "9 epochs, batch 128, SGD 0.1 momentum 0.9, augmented by crop/rotate, 5 trainings"
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
    data = make_data(22, (1, 8, 8))
    nets = make_ensemble()
    singles = [TrainingRun(extract_convnet(nets, index), *data, recipe) for index in range(3)]
    together = TrainingRun(nets, *data, recipe)
    step = together.step

    def list_params(run):
        return (run.crop_params, *run.augment_params)

    def step_all():
        for index, single in enumerate(singles):
            for own, shared in zip(list_params(single), list_params(together), strict=True):
                own.copy_(shared.split(together.batch_size)[index])
            single.set_learning_rate(together.optimizer.param_groups[0]["lr"])
            single.step()
        step()

    set_step(together, step_all)
    together.run(seeded(1), training.ignore_progress, "")
    for index, single in enumerate(singles):
        net = extract_convnet(nets, index)
        for name, weights in single.net.named_parameters():
            assert_close(net.get_parameter(name), weights, rtol=1e-3, atol=1e-5)
        first = extract_convnet(make_ensemble(), index).head.weight
        assert not torch.allclose(net.head.weight, first, atol=1e-3)
    assert not torch.allclose(nets.head_weight[0], nets.head_weight[1], atol=1e-3)


def test_no_two_nets_nor_steps_share_a_draw():
    recipe = Recipe(1, 0.1, batch_size=6, augmentations=("rotate",))
    run = TrainingRun(make_ensemble(4), *make_data(24, (1, 8, 8)), recipe)
    orders = []
    affines = []

    def watch():
        orders.append(run.crop_params[:, 0].view(4, 6).clone())
        affines.append(run.augment_params.affine.clone())

    set_step(run, watch)
    run.run_epoch(seeded())
    orders = torch.cat(orders, 1)  # [nets, epoch]
    assert [sorted(order.tolist()) for order in orders] == [list(range(24))] * 4
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert torch.cat(affines)[:, 0, 0].unique().numel() == 4 * 24


def test_the_nets_of_a_method_learn_its_set_in_place():
    """Bright against dark halves: chance is a half. What they see lies in [-1, 1]."""
    images = 0.3 * torch.rand(40, 1, 8, 8, generator=seeded())
    labels = torch.arange(40) % 2
    images[labels == 1, :, :4] += 0.7
    nets = make_ensemble(classes=2)
    inputs = []
    steps = []
    nets.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    recipe = Recipe(20, 0.05, batch_size=16, even_batches=True)
    train_ensemble(nets, images, labels, recipe, seeded(1), progress=lambda *x: steps.append(x))
    pixels = torch.cat([x.flatten() for x in inputs])
    assert pixels.min().item() == pytest.approx(2 * images.min().item() - 1)
    assert pixels.max().item() == pytest.approx(2 * images.max().item() - 1)
    with torch.no_grad():
        assert ((nets(2 * images - 1).argmax(2) == labels).double().mean(1) > 0.9).all()
    assert steps[-1] == ("training the nets", 20, 20)


def test_repeats_are_an_ensemble_of_convnets():
    data = make_data(30, (1, 8, 8))
    images, _ = data
    trained = train(Recipe(1, 0.01, num_repeats=2), data, ConvNet)
    assert trained.predict(images).shape == (2, 30)
    assert trained.features(images).shape == (2, 30, trained.net.num_features)
    probabilities = trained.predict_proba(images)
    assert_close(probabilities.sum(2), torch.ones(2, 30))
    assert not torch.allclose(*probabilities, atol=1e-3)
    standard = (images - trained.mean) / trained.std
    for index in range(2):
        scores = trained.net(standard, trained.net.select(torch.tensor([index])))[0]
        assert_close(probabilities[index], scores.softmax(1), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="ConvNets"):
        train(Recipe(1, 0.01, num_repeats=2), data, LeNet)


# Augmentation, batches and labels


@pytest.mark.parametrize(
    ("operation", "moves"), [("rotate", False), ("crop", True), ("color", True), ("cutout", True)]
)
def test_a_net_sees_images_augmented_by_the_operations_named_and_no_others(operation, moves):
    """A round blob in the middle stays as it is when turned, and under nothing else; a bar does not stay."""
    x = torch.arange(16) - 7.5
    blob = (-(x[:, None] ** 2 + x**2) / 12).exp().expand(24, 1, 16, 16)
    bar = (x.abs() < 1.5).float().expand(24, 1, 16, 16)
    recipe = Recipe(1, 0.1, batch_size=24, augmentations=(operation,))
    for images, is_changed in ((blob, moves), (bar, True)):
        net = nn.Sequential(nn.Flatten(), nn.Linear(256, 3))
        inputs = []
        net.register_forward_pre_hook(lambda _, given, inputs=inputs: inputs.append(given[0]))
        TrainingRun(net, images, torch.arange(24) % 3, recipe).run_epoch(seeded())
        gaps = (inputs[0] - images).abs().amax((1, 2, 3))
        assert (gaps > 0.05).double().mean() > 0.4 if is_changed else (gaps < 0.05).all()
        assert len(inputs[0].unique(dim=0)) > 3  # every image has numbers of its own


@pytest.mark.parametrize(
    ("count", "batch", "sizes"),
    [(3, 128, [3]), (24, 24, [24]), (10, 8, [5, 5]), (25, 8, [7] * 4), (5, 1, [1] * 5)],
)
def test_even_batches_hold_every_image_each_epoch(batches, count, batch, sizes):
    """What is left of an epoch makes no small batch but makes all of them smaller; a few images come twice to fill the last."""
    images, labels = make_data(count)
    train(Recipe(2, 0.1, batch_size=batch, even_batches=True), (images, labels))
    assert [len(batch_labels) for _, batch_labels, _ in batches] == sizes * 2
    expected = standardise(images).flatten(1)
    for start in (0, len(sizes)):
        epoch = torch.cat([batch[0] for batch in batches[start : start + len(sizes)]]).flatten(1)
        times = (epoch[:, None] == expected).all(2).sum(0)
        assert set(times.tolist()) <= {1, 2}
        assert times.sum() == sum(sizes)


def test_soft_labels_are_learned_as_they_are():
    images, labels = make_data(24, (1, 8, 8))
    soft = torch.rand(24, 3, generator=seeded(5)).softmax(1)
    recipe = Recipe(400, 0.1, batch_size=24)
    # More weights than images: what is asked for can be reached.
    assert_close(train(recipe, (images, soft)).predict_proba(images), soft, rtol=0, atol=0.05)
    hard = nn.functional.one_hot(labels, 3).float()
    recipe = dataclasses.replace(recipe, epochs=100)
    one, two = (train(recipe, (images, given)).predict_proba(images) for given in (labels, hard))
    assert (one.amax(1) > 0.9).all()
    assert_close(one, two)


@on_gpu
@pytest.mark.parametrize("adam", [False, True])
def test_a_captured_step_does_what_an_eager_one_does(monkeypatch, adam):
    images, labels = make_data(64, (1, 8, 8))
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
    cuda = torch.device("cuda")
    captured = train_classifier(LeNet, images, labels, 3, recipe, cuda, seed=2)
    monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", 10**9)
    eager = train_classifier(LeNet, images, labels, 3, recipe, cuda, seed=2)
    assert torch.allclose(captured.predict_proba(images), eager.predict_proba(images), atol=1e-3)


@on_gpu
def test_a_captured_step_of_many_nets_does_what_an_eager_one_does(monkeypatch):
    images, labels = (tensor.cuda() for tensor in make_data(70, (1, 28, 28)))
    soft = nn.functional.one_hot(labels, 3) * 0.7 + 0.1
    recipe = Recipe(
        4, 0.01, batch_size=40, lr_milestones=(2,), even_batches=True, augmentations=AUGMENTATIONS
    )
    scores = []
    for warmup_calls in (cuda_graphs.WARMUP_CALLS, 10**9):
        monkeypatch.setattr(cuda_graphs, "WARMUP_CALLS", warmup_calls)
        nets = make_ensemble(3, (1, 28, 28)).cuda()
        train_ensemble(nets, images, soft, recipe, seeded(1))
        scores.append(nets(images))
    assert_close(*scores, rtol=1e-3, atol=1e-3)
