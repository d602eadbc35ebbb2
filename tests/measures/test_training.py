"""The training loop: what a recipe asks for is what happens, step by step, and the same seed gives the same network."""

import dataclasses

import pytest
import torch
from torch import nn

from privot.measures import training
from privot.measures.training import Classifier, Recipe, _Run, train
from privot.nets import LeNet
from privot.nets.convnet import ConvNet

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


def run(recipe, count=24, shape=(1, 6, 5), black=0.0, classes=3):
    images, labels = some(count, shape, classes)
    torch.manual_seed(0)
    return _Run(Linear(shape, classes), images, labels, recipe, black)


@pytest.fixture
def batches(monkeypatch):
    """The images, labels and rate of every step."""
    seen, step = [], _Run.step

    def spy(self):
        seen.append((self._images().clone(), self.labels[self.draw[:, 0]].clone(), self.optimiser.param_groups[0]["lr"]))
        step(self)

    monkeypatch.setattr(_Run, "step", spy)
    return seen


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_the_rate_drops_after_the_epochs_named(batches):
    train(Linear, *some(), 3, Recipe(6, 0.5, batch=12, drops=(2, 5)), CPU)
    assert [rate for *_, rate in batches] == pytest.approx([0.5] * 4 + [0.05] * 6 + [0.005] * 2)


def test_every_epoch_sees_every_record_once_in_another_order(batches):
    images, labels = some()
    train(Linear, images, labels, 3, Recipe(2, 0.1, batch=8), CPU)
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
    it, black = run(Recipe(1, 0.1, batch=9, shift=2), shape=(3, 6, 5), black=-0.7), -0.7
    images, _ = some(shape=(3, 6, 5))
    padded = nn.functional.pad(images, (2, 2, 2, 2), value=black)
    draws = torch.tensor([[place, down, right, 0] for place, (down, right) in enumerate((a, b) for a in (0, 2, 4) for b in (0, 1, 4))])
    it.draw.copy_(draws)
    for found, (which, down, right, _) in zip(it._images(), draws.tolist(), strict=True):
        assert torch.equal(found, padded[which, :, down : down + 6, right : right + 5])
    assert torch.equal(it._images()[4][:, :, 1:], images[4][:, :, :4])  # moved to the right by one, black at the rim
    assert (it._images()[4][:, :, 0] == black).all()


def test_flips_are_left_to_right_and_after_the_crop():
    it = run(Recipe(1, 0.1, batch=4, shift=1, flip=True), shape=(1, 6, 5))
    images, _ = some()
    draws = torch.tensor([[3, 1, 1, 0], [3, 1, 1, 1], [5, 0, 2, 0], [5, 0, 2, 1]])
    it.draw.copy_(draws)
    plain, mirrored, cropped, both = it._images()
    assert torch.equal(plain, images[3])
    assert torch.equal(mirrored, images[3].flip(-1))
    assert torch.equal(both, cropped.flip(-1))


def test_crops_and_flips_are_drawn_evenly_and_only_if_asked():
    drawn = {}
    for recipe in (Recipe(1, 0.1, batch=1, shift=1, flip=True), Recipe(1, 0.1, batch=1)):
        it, seen = run(recipe, count=900), []
        it.step = lambda it=it, seen=seen: seen.append(it.draw[0].clone())
        it.epoch(seeded())
        drawn[recipe.flip] = torch.stack(seen)
    for column, kinds in ((1, 3), (2, 3), (3, 2)):
        counts = drawn[True][:, column].bincount(minlength=kinds)
        assert len(counts) == kinds
        assert (counts - 900 / kinds).abs().max() < 4 * (900 / kinds) ** 0.5
    assert drawn[False][:, 1:].count_nonzero() == 0
    assert drawn[False][:, 0].unique().numel() == 900


def test_black_is_zero_before_standardisation(batches):
    images, labels = some(classes=2)
    train(Linear, images, labels, 2, Recipe(1, 0.1, batch=24, shift=3), CPU)
    mean, std = images.mean(), images.std()
    corners = batches[0][0] * std + mean
    known = {round(value, 4) for value in images.flatten().tolist()}
    rims = [value for value in corners.flatten().tolist() if round(value, 4) not in known]
    assert rims
    assert max(map(abs, rims)) < 1e-4


def test_the_average_is_the_exponential_one():
    """With the usual warm-up, min(decay, (1 + t) / (10 + t)); and it holds on to no graph of the steps."""
    it = run(Recipe(3, 0.5, batch=6, average=0.5))
    start, seen = [each.detach().clone() for each in it.net.parameters()], []
    step = it.step
    it.step = lambda: (step(), seen.append([each.detach().clone() for each in it.net.parameters()]))
    for _ in range(3):
        it.epoch(seeded())
    assert len(seen) == 12
    assert not any(each.requires_grad for each in it.mean)
    wanted = start
    for turn, weights in enumerate(seen, 1):
        keep = min(0.5, (1 + turn) / (10 + turn))
        wanted = [keep * old + (1 - keep) * new for old, new in zip(wanted, weights, strict=True)]
    it.finish()
    for found, value, last in zip(it.net.parameters(), wanted, seen[-1], strict=True):
        assert torch.allclose(found, value, atol=1e-6)
        assert not torch.allclose(found, last, atol=1e-3)


def test_without_an_average_the_last_weights_stay():
    it = run(Recipe(1, 0.5, batch=6))
    it.epoch(seeded())
    before = [each.detach().clone() for each in it.net.parameters()]
    it.finish()
    assert all(torch.equal(*each) for each in zip(before, it.net.parameters(), strict=True))


@pytest.mark.parametrize("adam", [False, True])
def test_a_step_is_that_of_the_optimiser_named(adam):
    recipe = Recipe(1, 0.1, batch=24, adam=adam, momentum=0.8, decay=0.01)
    images, labels = some()
    found = train(Linear, images, labels, 3, dataclasses.replace(recipe, epochs=4), CPU, seed=3).net
    generator = seeded(3)
    net = training.initialise(Linear((1, 6, 5), 3), generator)
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


@pytest.mark.parametrize(("count", "batch", "steps"), [(3, 128, 1), (24, 24, 1), (24, 10, 2), (25, 8, 3), (2, 1, 2)])
def test_a_set_smaller_than_a_batch_is_one_and_a_rest_waits_for_the_next_order(batches, count, batch, steps):
    train(Linear, *some(count), 3, Recipe(1, 0.1, batch=batch), CPU)
    assert [len(labels) for _, labels, _ in batches] == [min(count, batch)] * steps


def test_the_same_seed_replays_and_another_does_not():
    images, labels = some(30, (1, 8, 8))
    recipe = Recipe(2, 0.05, batch=8, shift=1, flip=True, average=0.9)
    one, two, other = (train(LeNet, images, labels, 3, recipe, CPU, seed=seed) for seed in (4, 4, 5))
    assert same(one.net, two.net)
    assert not same(one.net, other.net)
    torch.manual_seed(123)  # nor does the global stream have a say
    assert same(one.net, train(LeNet, images, labels, 3, recipe, CPU, seed=4).net)


def test_images_are_standardised_at_test_time_as_in_training():
    images, labels = some(12, (1, 8, 8))
    made = train(ConvNet, images * 0.2, labels, 3, Recipe(1, 0.01), CPU)
    mean, std = (images * 0.2).mean().item(), (images * 0.2).std().item()
    assert (made.mean, made.std) == pytest.approx((mean, std))
    assert not made.net.training
    with torch.no_grad():
        wanted = made.net((images - mean) / std)
        assert torch.allclose(made.probabilities(images), wanted.softmax(1), atol=1e-5)
        assert torch.equal(made.guesses(images), wanted.argmax(1))
        assert torch.allclose(made.features(images), made.net.features((images - mean) / std), atol=1e-5)
    assert torch.allclose(made.probabilities(images).sum(1), torch.ones(12), atol=1e-5)


def test_many_images_are_classified_in_portions():
    images, _ = some(2100, (1, 2, 2))
    made = Classifier(Linear((1, 2, 2), 3), 0.3, 2.0, CPU)
    with torch.no_grad():
        assert torch.equal(made.guesses(images), made.net((images - 0.3) / 2).argmax(1))


def test_constant_images_do_not_divide_by_zero():
    made = train(Linear, torch.full((8, 1, 2, 2), 0.5), torch.arange(8) % 2, 2, Recipe(1, 0.1), CPU)
    assert made.probabilities(torch.rand(3, 1, 2, 2)).isfinite().all()


def test_half_precision_is_for_devices_that_have_it():
    """On a CPU it would be emulated, a hundred times as slow; the numbers are those of full precision."""
    images, labels = some(16, (1, 8, 8))
    full, half = (train(LeNet, images, labels, 3, Recipe(2, 0.05, half=half), CPU).probabilities(images) for half in (False, True))
    assert torch.allclose(full, half, atol=1e-6)


def test_progress_counts_epochs_under_the_stage_named():
    seen = []
    train(Linear, *some(), 3, Recipe(3, 0.1), CPU, progress=lambda *step, **facts: seen.append((step, facts)), stage="here")
    assert seen == [(("here", epoch, 3), {}) for epoch in (1, 2, 3)]


def test_a_recipe_says_all_of_itself():
    text = str(Recipe(50, 0.1, batch=64, decay=1e-4, drops=(20, 40), shift=4, flip=True, average=0.999))
    assert text == "50 epochs, batch 64, SGD 0.1 momentum 0.9, decay 0.0001, x0.1 after 20, 40, crops of +-4, flips, average 0.999"
    assert str(Recipe(1, 1e-3, adam=True)) == "1 epochs, batch 128, Adam 0.001"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: a captured step has nothing to be compared with")
@pytest.mark.parametrize("adam", [False, True])
def test_a_captured_step_does_what_an_eager_one_does(monkeypatch, adam):
    images, labels = some(64, (1, 8, 8))
    recipe = Recipe(6, 0.01, batch=16, adam=adam, drops=(3,), shift=1, flip=True, average=0.9)
    captured = train(LeNet, images, labels, 3, recipe, torch.device("cuda"), seed=2)
    monkeypatch.setattr(training, "WARM", 10**9)
    eager = train(LeNet, images, labels, 3, recipe, torch.device("cuda"), seed=2)
    assert torch.allclose(captured.probabilities(images), eager.probabilities(images), atol=1e-3)
