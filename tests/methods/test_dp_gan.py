"""The DP-GAN and its private gradient steps: a record moves an answer by no more than its bound, nothing is asked twice, and it learns."""

import itertools
import math

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from scipy.stats import beta
from support.fakes import FreePlan, NullLedger, planted_clip
from torch.nn.functional import conv2d

from privot.components.dp_sgd import (
    compute_per_example_gradient,
    detach_weights,
    dp_sgd_step,
    flatten_tensors,
)
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.methods import dp_gan, make_method
from privot.methods.dp_gan import DPGAN, record_critic_loss
from privot.nets import initialize_weights
from privot.nets.dp_critic import PrivateCritic, convolve_as_matmul
from privot.nets.ema import collect_state, restore_state
from privot.privacy import accounting
from privot.privacy import clipping as clipping_module
from privot.privacy import secret_side as secret_side_module
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.runtime import Runtime, Streams, ignore_progress
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")

SHAPE = (1, 8, 8)
CLASSES = 3
SPEC = Spec(SHAPE, CLASSES)
TINY = {
    "critic_channels": 4,
    "generator_channels": 4,
    "latent_dim": 4,
    "batch_size": 8,
    "balance_interval": 4,
    "sample_rate": 0.3,
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def critic(shape=SHAPE, width=4, seed=0, scale=1.0):
    net = initialize_weights(PrivateCritic(shape, CLASSES, width), seeded(seed))
    with torch.no_grad():
        for each in net.parameters():
            each *= scale
    return net


def parts(net, images, labels, also=None):
    """Of many records, as the gate takes them: [records, numbers]."""
    return torch.func.vmap(compute_per_example_gradient, in_dims=(0, 0, *(None,) * 4))(
        images, labels, net, detach_weights(net), record_critic_loss, also
    )


def gate_for(images, labels, noise, rate):
    plan = FreePlan((Stage("critic", "sum", noise, 10**6, Poisson(rate)),), Neighbours.ADD_REMOVE)
    return Gate(
        Sensitive(images, labels, SPEC),
        plan,
        NullLedger(),
        NullLedger(),
        runtime=Runtime("cpu", microbatch_size=16),
    )


# The network and its gradients


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 7, 10), (2, 8, 5)])
def test_a_matrix_product_is_the_convolution(shape):
    layer = initialize_weights(torch.nn.Linear(16 * shape[0], 5), seeded())
    images = torch.rand(3, *shape, generator=seeded(1))
    # A window of 4x4 is 2x2 squares of 2x2 pixels: [out, square down, square across, in, down, across].
    kernel = (
        layer.weight.view(5, 2, 2, shape[0], 2, 2)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(5, shape[0], 4, 4)
    )
    padded = torch.nn.functional.pad(images, (1, 2, 1, 2))
    wanted = conv2d(padded, kernel, layer.bias, stride=2)[
        :, :, : math.ceil(shape[1] / 2), : math.ceil(shape[2] / 2)
    ]
    torch.testing.assert_close(convolve_as_matmul(images, layer), wanted)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 2, 2), (1, 6, 6), (3, 8, 12), (1, 28, 28), (3, 32, 32)]
)
def test_any_size_and_colour_and_the_label_matters(shape):
    net = critic(shape, 2)
    image = torch.rand(1, *shape, generator=seeded())
    scores = net(image.expand(CLASSES, *shape), torch.arange(CLASSES))
    assert scores.shape == (CLASSES,)
    assert len(set(scores.tolist())) == CLASSES


def test_a_part_is_the_gradient_of_its_record_alone():
    net = critic()
    images = torch.rand(5, *SHAPE, generator=seeded(1))
    labels = torch.tensor([0, 1, 2, 2, 0])
    also = torch.randn(sum(each.numel() for each in net.parameters()), generator=seeded(2))
    found = parts(net, images, labels, also)
    for image, label, part in zip(images, labels, found, strict=True):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            net(image[None], label[None]), torch.ones(1)
        )
        torch.testing.assert_close(
            part, flatten_tensors(torch.autograd.grad(loss, list(net.parameters()))) + also
        )


def test_without_noise_and_clip_a_step_is_the_plain_step():
    """The critic's loss is that of the two sides, each by its mean: no batch size is known, and none is needed."""
    images = np.random.default_rng(0).random((9, *SHAPE), np.float32)
    labels = np.arange(9) % CLASSES
    one = critic()
    other = critic()
    drawn = torch.rand(4, *SHAPE, generator=seeded(5))
    fakes = (drawn, torch.arange(4) % CLASSES)
    also = flatten_tensors(
        torch.autograd.grad(
            torch.nn.functional.softplus(one(*fakes)).mean(), list(one.parameters())
        )
    )
    dp_sgd_step(
        gate_for(images, labels, 0.0, 1.0),
        "critic",
        one,
        record_critic_loss,
        torch.optim.SGD(one.parameters(), 0.1 / 9),
        clip_norm=50,
        public_gradient=also,
    )
    plain = torch.nn.functional.softplus
    loss = (
        plain(-other(torch.from_numpy(images), torch.from_numpy(labels))).mean()
        + plain(other(*fakes)).mean()
    )
    loss.backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    torch.testing.assert_close(
        flatten_tensors(one.parameters()), flatten_tensors(other.parameters()), rtol=1e-4, atol=1e-5
    )


# The bound


def extremes(count):
    rng = np.random.default_rng(3)
    kinds = [
        lambda: np.zeros(SHAPE),
        lambda: np.ones(SHAPE),
        lambda: rng.integers(2, size=SHAPE),
        lambda: rng.random(SHAPE),
        lambda: np.eye(1, 64, rng.integers(64)).reshape(SHAPE),
        lambda: np.full(SHAPE, rng.random()),
    ]
    return np.stack([kinds[turn % len(kinds)]() for turn in range(count)]).astype(np.float32)


@pytest.mark.parametrize(
    ("scale", "bound"), [(1.0, 1.0), (4.0, 0.1), (30.0, 1.0), (1e-3, 1e-3), (1e6, 1.0)]
)
@pytest.mark.usefixtures("array_order")
def test_neighbours_answers_are_no_farther_apart_than_the_bound(scale, bound):
    """With small, large and bursting weights, with a public vector that points anywhere, for records that go for the bound."""
    rng = np.random.default_rng(4)
    net = critic(scale=scale)
    largest = 0.0
    numbers = sum(each.numel() for each in net.parameters())
    gate = gate_for(extremes(12), np.arange(12) % CLASSES, 0.0, 1.0)
    for turn, odd in enumerate(extremes(24)):
        images = extremes(12)
        labels = np.arange(12) % CLASSES
        where = int(rng.integers(12))
        images[where] = odd
        labels[where] = turn % CLASSES
        also = torch.randn(numbers, generator=seeded(turn)) * bound * (turn % 3)
        answers = []
        for kept_ones in (np.arange(12), np.delete(np.arange(12), where)):
            gate._dataset = Sensitive(images[kept_ones], labels[kept_ones], SPEC)
            answers.append(
                gate.sum(
                    "critic",
                    compute_per_example_gradient,
                    net,
                    detach_weights(net),
                    record_critic_loss,
                    also,
                    clip_norm=bound,
                )
            )
        largest = max(largest, float((answers[0] - answers[1]).norm()))
    assert largest <= bound * (1 + 1e-9)
    assert largest > 0.99 * bound  # so the bound is met: half the noise would not do


def spied_on(threshold=0.5, asks=300, noise=0.5, rate=0.9):
    """What the best attacker sees: answers with one record and without, along its own part; a low TPR and a high FPR for them.

    The other data set has a record of no gradient in its place, since a data set has one at least: the critic is sure of it.
    """
    net = critic(width=1, scale=30.0)
    image = extremes(2)[1:]
    label = np.array([1])
    seen = []
    with torch.no_grad():
        net.output.bias[2] = -1e6
        net.output.bias[3] = 1e6
    part = parts(net, torch.from_numpy(image), torch.from_numpy(label))[0].double()
    part = part / part.norm()
    for there in (label, np.array([2])):
        gate = gate_for(image, there, noise, rate)
        gate._infer_query_shape = lambda *given: (
            part.shape
        )  # as the black image would tell; hundreds of asks need not try it again
        answers = [
            gate.sum(
                "critic",
                compute_per_example_gradient,
                net,
                detach_weights(net),
                record_critic_loss,
                None,
                clip_norm=1.0,
            )
            for _ in range(asks)
        ]
        seen.append(int((torch.stack(answers) @ part > threshold).sum()))
    return beta.ppf(1e-4, seen[0], asks - seen[0] + 1), beta.ppf(
        1 - 1e-4, seen[1] + 1, asks - seen[1]
    )


def claimed(fpr, noise=0.5, rate=0.9):
    return (
        Plan((Stage("critic", "sum", noise, 1, Poisson(rate)),), Neighbours.ADD_REMOVE)
        .cost()
        .max_tpr(fpr)
    )


def test_an_audit_finds_no_more_than_is_claimed():
    tpr, fpr = spied_on()
    assert tpr <= claimed(fpr)


@pytest.mark.parametrize(
    ("bug", "threshold"),
    [("a third of the noise", 0.5), pytest.param("no clip", 2.0, marks=pytest.mark.slow)],
)
def test_the_audit_catches_a_planted_bug(monkeypatch, bug, threshold):
    if bug == "a third of the noise":
        honest = secret_side_module.add_noise
        monkeypatch.setattr(
            secret_side_module,
            "add_noise",
            lambda total, noise_std, *more: honest(total, noise_std / 3, *more),
        )
    else:
        monkeypatch.setattr(clipping_module, "clip_rows", planted_clip())
    tpr, fpr = spied_on(threshold)
    assert tpr > claimed(fpr)


# The game


def blobs(count=400):
    """A bright square of 3 x 3 somewhere in the left half for label 0, in the right one for label 1."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) % 2
    images = np.zeros((count, 1, 8, 8), np.float32)
    for image, label in zip(images, labels, strict=True):
        top = rng.integers(1, 4)
        left = rng.integers(0, 2) + 4 * label
        image[0, top : top + 3, left : left + 3] = rng.uniform(0.6, 1)
    return images, labels


def test_samples_follow_their_label_under_noise():
    method = DPGAN(
        critic_channels=8,
        generator_channels=8,
        latent_dim=8,
        batch_size=32,
        steps=150,
        noise_multiplier=0.5,
        critic_learning_rate=2e-3,
        generator_learning_rate=2e-3,
        ema_decay=0.9,
    )
    spec = Spec((1, 8, 8), 2)
    plan = FreePlan(
        (Stage("critic", "sum", 0.5, method.steps, Poisson(0.2)),), Neighbours.ADD_REMOVE
    )
    gate = Gate(
        Sensitive(*blobs(), spec),
        plan,
        NullLedger(),
        NullLedger(),
        runtime=Runtime("cpu", microbatch_size=100),
    )
    images, labels = method.fit(gate, Streams(0, Runtime("cpu")), ignore_progress).sample(spec, 200)
    assert gate.count_remaining_queries("critic") == 0
    right = images[..., 4:].sum((1, 2, 3))
    left = images[..., :4].sum((1, 2, 3))
    assert ((right > left).long() == labels).float().mean() > 0.9
    assert images.sum((1, 2, 3)).mean().item() == pytest.approx(
        blobs()[0].sum((1, 2, 3)).mean(), rel=0.5
    )  # it begins at four times that


class Answering:
    """A gate that answers zero: what happens then is a matter of the public side alone."""

    def __init__(self, steps, spec=SPEC):
        self.spec = spec
        self.steps = steps
        self.asked = 0

    def count_remaining_queries(self, name):
        return self.steps - self.asked

    def sum(self, name, query, net, *public, clip_norm):
        self.asked += 1
        return torch.zeros(sum(each.numel() for each in net.parameters()), dtype=torch.float64)


@pytest.mark.parametrize(("beaten", "paces"), [(1.0, [1, 2, 4]), (0.0, [1])])
def test_the_pace_doubles_while_the_generator_is_ahead(monkeypatch, beaten, paces):
    """Judged on drawn images, every few steps of the generator."""
    turns = []
    whole = dp_gan._GanTraining._train_generator

    def watched(game):
        turns.append((game.critic_steps, gate.asked))
        whole(game)

    monkeypatch.setattr(dp_gan._GanTraining, "_train_generator", watched)
    # A critic that is always sure of itself (its score is below 0 for all) is never beaten, unless being right is being beaten.
    below = critic()
    with torch.no_grad():
        below.output.bias.fill_(-50)
    gate = Answering(4 + 8 + 16)
    method = DPGAN(**TINY, noise_multiplier=1.0, steps=4 + 8 + 16, balance_threshold=beaten)
    monkeypatch.setattr(
        dp_gan,
        "initialize_weights",
        lambda net, generator: (
            below if isinstance(net, PrivateCritic) else initialize_weights(net, generator)
        ),
    )
    method.fit(gate, Streams(0, Runtime("cpu")), ignore_progress)
    assert sorted({pace for pace, _ in turns}) == paces
    for (_, before), (pace, after) in itertools.pairwise(turns):
        assert after - before == pace


def test_labels_are_drawn_as_often_as_is_declared():
    for sizes, wanted in (((100, 300, 0), (0.25, 0.75, 0.0)), (None, (1 / 3, 1 / 3, 1 / 3))):
        spec = Spec(SHAPE, CLASSES, sum(sizes) if sizes else None, sizes)
        method = DPGAN(**{**TINY, "batch_size": 6000}, noise_multiplier=1.0)
        game = dp_gan._GanTraining(
            method,
            dp_gan.GENERATORS["DcganGenerator"](SHAPE, CLASSES, 4, 2),
            critic(),
            spec,
            torch.device("cpu"),
        )
        game.rng = seeded()
        labels = game._generate_batch(lambda codes, labels: labels)[1]
        assert labels.bincount(minlength=CLASSES).div(6000).tolist() == pytest.approx(
            wanted, abs=0.03
        )


# After a crash


@pytest.mark.parametrize(
    "steps", [80, 30]
)  # answers of up to 64 steps are kept; of more, the state now and then
def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch, steps):
    box = Sensitive(*blobs(40), Spec((1, 8, 8), 2), name="blobs")
    ledger = Ledger(tmp_path / "blobs.jsonl")
    method = DPGAN(**TINY, noise_multiplier=3.0, steps=steps)
    fresh = []
    real = secret_side_module.add_noise
    taken = []
    monkeypatch.setattr(
        accounting,
        "compute_privacy_cost",
        lambda event, neighbours, roughly=False: accounting._gaussian_cost(1.0),
    )
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda *given: fresh.append(1) or real(*given)
    )
    monkeypatch.setattr(
        dp_gan,
        "restore_state",
        lambda found, **parts: taken.append(int(found["step"])) or restore_state(found, **parts),
    )

    def kill(stage, step, of, **facts):
        if step == 25:
            raise KeyboardInterrupt

    given = {"out": tmp_path / "out", "ledger": ledger, "runtime": Runtime("cpu", 32)}
    with pytest.raises(KeyboardInterrupt):
        synthesize(box, method, **given, progress=kill)
    assert len(fresh) == 25
    release = synthesize(box, method, **given, resume=True)
    assert len(fresh) == steps
    assert taken == ([24] if steps == 80 else [])
    lines = ledger.entries()
    assert [each["kind"] for each in lines].count("reserve") == 1
    assert release.sample(4)[0].isfinite().all()


def test_what_was_kept_is_taken_up_as_it_was():
    def pair(seed):
        net = critic(seed=seed)
        return net, torch.optim.Adam(net.parameters(), 0.01)

    def go(net, optimiser):
        for turn in range(3):
            optimiser.zero_grad()
            net(
                torch.rand(2, *SHAPE, generator=seeded(turn)), torch.tensor([0, 1])
            ).sum().backward()
            optimiser.step()
        return flatten_tensors(net.parameters())

    one, adam = pair(0)
    go(one, adam)
    other, eve = pair(1)
    restore_state(collect_state(net=one, adam=adam, step=7), net=other, adam=eve)
    assert torch.equal(go(one, adam), go(other, eve))


# Settings and price


@pytest.mark.parametrize(
    "wrong",
    [
        {"sample_rate": 0},
        {"sample_rate": 1.5},
        {"clip_norm": 0},
        {"steps": 0},
        {"batch_size": 1},
        {"critic_steps": 0},
        {"noise_multiplier": -1.0},
        {"balance_threshold": 2},
        {"ema_decay": 1},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        make_method("dp-gan", wrong)


def test_the_price_is_that_of_sampled_answers():
    plan = DPGAN(steps=200, sample_rate=0.05, noise_multiplier=3.0).plan(Spec((1, 28, 28), 10))
    assert plan.event() == dpa.SelfComposedDpEvent(
        dpa.PoissonSampledDpEvent(0.05, dpa.GaussianDpEvent(3.0)), 200
    )
    assert plan.neighbours is Neighbours.ADD_REMOVE
    assert [stage.operation for stage in plan.stages] == ["sum"]
