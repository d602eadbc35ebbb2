"""DP-GAN: the private critic and its gradients, and the game of critic and generator."""

import itertools
import math
from types import SimpleNamespace

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from support.method_inputs import make_blobs, make_gate, make_rng, measure_agreement
from torch.nn.functional import binary_cross_entropy_with_logits, conv2d, pad, softplus

from privot.components.dp_sgd import (
    compute_per_example_gradient,
    detach_weights,
    dp_sgd_step,
    flatten_tensors,
)
from privot.data.spec import Spec
from privot.methods import dp_gan
from privot.methods.dp_gan import DPGAN, record_critic_loss
from privot.nets import GENERATORS, initialize_weights
from privot.nets.dp_critic import PrivateCritic, convolve_as_matmul
from privot.nets.ema import collect_state, restore_state
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.runtime import Runtime, Streams, ignore_progress

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 8, 8)
CLASSES = 3
SPEC = Spec(SHAPE, CLASSES)
TINY = {
    "critic_channels": 4,
    "generator_channels": 4,
    "latent_dim": 4,
    "batch_size": 8,
    "balance_interval": 4,
    "noise_multiplier": 1.0,
}


def make_critic(shape=SHAPE, width=4, seed=0):
    return initialize_weights(PrivateCritic(shape, CLASSES, width), make_rng(seed))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 7, 10), (2, 8, 5)])
def test_a_matrix_product_is_the_convolution(shape):
    layer = initialize_weights(torch.nn.Linear(16 * shape[0], 5), make_rng())
    images = torch.rand(3, *shape, generator=make_rng(1))
    # A window of 4x4 is 2x2 squares of 2x2 pixels:
    # [out, square down, square across, in, down, across].
    kernel = layer.weight.view(5, 2, 2, shape[0], 2, 2).permute(0, 3, 1, 4, 2, 5)
    result = conv2d(
        pad(images, (1, 2, 1, 2)), kernel.reshape(5, shape[0], 4, 4), layer.bias, stride=2
    )
    expected = result[:, :, : math.ceil(shape[1] / 2), : math.ceil(shape[2] / 2)]
    torch.testing.assert_close(convolve_as_matmul(images, layer), expected)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 2), (1, 6, 6), (3, 8, 12), (3, 32, 32)])
def test_a_critic_fits_any_shape_and_its_score_depends_on_the_label(shape):
    image = torch.rand(1, *shape, generator=make_rng())
    scores = make_critic(shape, 2)(image.expand(CLASSES, *shape), torch.arange(CLASSES))
    assert scores.shape == (CLASSES,)
    assert len(set(scores.tolist())) == CLASSES


def test_a_part_is_the_gradient_of_its_record_alone():
    net = make_critic()
    images = torch.rand(5, *SHAPE, generator=make_rng(1))
    labels = torch.tensor([0, 1, 2, 2, 0])
    public = torch.randn(
        sum(parameter.numel() for parameter in net.parameters()), generator=make_rng(2)
    )
    parts = torch.func.vmap(compute_per_example_gradient, in_dims=(0, 0, *(None,) * 4))(
        images, labels, net, detach_weights(net), record_critic_loss, public
    )
    for image, label, part in zip(images, labels, parts, strict=True):
        loss = binary_cross_entropy_with_logits(net(image[None], label[None]), torch.ones(1))
        gradient = flatten_tensors(torch.autograd.grad(loss, list(net.parameters())))
        torch.testing.assert_close(part, gradient + public)


def test_without_noise_and_clip_a_step_is_the_plain_step():
    """The loss is that of the two sides, each by its mean; no batch size need be known."""
    images = np.random.default_rng(0).random((9, *SHAPE), np.float32)
    labels = np.arange(9) % CLASSES
    fakes = (torch.rand(4, *SHAPE, generator=make_rng(5)), torch.arange(4) % CLASSES)
    private = make_critic()
    plain = make_critic()
    public_gradient = torch.autograd.grad(
        softplus(private(*fakes)).mean(), list(private.parameters())
    )
    plan = Plan((Stage("critic", "sum", 0.0, 1, Poisson(1.0)),), Neighbours.ADD_REMOVE)
    dp_sgd_step(
        make_gate(plan, images, labels, SPEC),
        "critic",
        private,
        record_critic_loss,
        torch.optim.SGD(private.parameters(), 0.1 / 9),
        clip_norm=50,
        public_gradient=flatten_tensors(public_gradient),
    )
    scores = plain(torch.from_numpy(images), torch.from_numpy(labels))
    (softplus(-scores).mean() + softplus(plain(*fakes)).mean()).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    torch.testing.assert_close(
        flatten_tensors(private.parameters()),
        flatten_tensors(plain.parameters()),
        rtol=1e-4,
        atol=1e-5,
    )


def test_samples_follow_their_label_under_noise():
    method = DPGAN(
        critic_channels=8,
        generator_channels=8,
        latent_dim=8,
        batch_size=32,
        steps=90,
        sample_rate=0.2,
        noise_multiplier=0.5,
        critic_learning_rate=2e-3,
        generator_learning_rate=2e-3,
        ema_decay=0.9,
    )
    spec = Spec(SHAPE, 2)
    gate = make_gate(method.plan(spec), *make_blobs(), spec, chunk=100)
    artifact = method.fit(gate, Streams(0, Runtime("cpu")), ignore_progress)
    images, labels = artifact.sample(spec, 200)
    assert gate.count_remaining_queries("critic") == 0
    assert measure_agreement(images, labels) > 0.9
    brightness = make_blobs()[0].sum((1, 2, 3)).mean()
    # At the start it is four times as much.
    assert images.sum((1, 2, 3)).mean().item() == pytest.approx(brightness, rel=0.5)


class ZeroGate:
    """A gate whose answers are zero, so that all that happens is on the public side."""

    spec = SPEC

    def __init__(self, steps):
        self.steps = steps
        self.asked = 0

    def count_remaining_queries(self, name):
        return self.steps - self.asked

    def sum(self, name, query, net, *public, clip_norm):
        self.asked += 1
        return torch.zeros(
            sum(parameter.numel() for parameter in net.parameters()), dtype=torch.float64
        )


@pytest.mark.parametrize(("threshold", "paces"), [(1.0, [1, 2, 4]), (0.0, [1])])
def test_the_pace_doubles_while_the_generator_is_ahead(monkeypatch, threshold, paces):
    """A critic whose every score is below 0 recognizes all fakes."""
    turns = []
    train_generator = dp_gan._GanTraining._train_generator

    def watched(training):
        turns.append((training.critic_steps, gate.asked))
        train_generator(training)

    def initialize(net, generator):
        return critic if isinstance(net, PrivateCritic) else initialize_weights(net, generator)

    critic = make_critic()
    with torch.no_grad():
        critic.output.bias.fill_(-50)
    monkeypatch.setattr(dp_gan._GanTraining, "_train_generator", watched)
    monkeypatch.setattr(dp_gan, "initialize_weights", initialize)
    gate = ZeroGate(4 + 8 + 16)
    method = DPGAN(**TINY, steps=gate.steps, balance_threshold=threshold)
    method.fit(gate, Streams(0, Runtime("cpu")), ignore_progress)
    assert sorted({pace for pace, _ in turns}) == paces
    assert all(after - before == pace for (_, before), (pace, after) in itertools.pairwise(turns))


@pytest.mark.parametrize(
    ("sizes", "expected"), [((100, 300, 0), (0.25, 0.75, 0.0)), (None, (1 / 3, 1 / 3, 1 / 3))]
)
def test_labels_are_drawn_as_often_as_is_declared(sizes, expected):
    training = dp_gan._GanTraining(
        DPGAN(**TINY | {"batch_size": 6000}),
        GENERATORS["DcganGenerator"](SHAPE, CLASSES, 4, 2),
        make_critic(),
        SimpleNamespace(num_classes=CLASSES, class_sizes=sizes),
        torch.device("cpu"),
    )
    training.rng = make_rng()
    labels = training._generate_batch(lambda codes, labels: labels)[1]
    shares = labels.bincount(minlength=CLASSES) / 6000
    assert shares.tolist() == pytest.approx(expected, abs=0.03)


def test_restored_networks_and_optimizers_go_on_as_they_would_have():
    def make_pair(seed):
        net = make_critic(seed=seed)
        return net, torch.optim.Adam(net.parameters(), 0.01)

    def train(net, optimizer):
        for turn in range(3):
            optimizer.zero_grad()
            images = torch.rand(2, *SHAPE, generator=make_rng(turn))
            net(images, torch.tensor([0, 1])).sum().backward()
            optimizer.step()
        return flatten_tensors(net.parameters())

    net, optimizer = make_pair(0)
    train(net, optimizer)
    other_net, other_optimizer = make_pair(1)
    state = collect_state(net=net, optimizer=optimizer, step=7)
    restore_state(state, net=other_net, optimizer=other_optimizer)
    assert torch.equal(train(net, optimizer), train(other_net, other_optimizer))


def test_the_price_is_that_of_sampled_answers():
    plan = DPGAN(steps=200, sample_rate=0.05, noise_multiplier=3.0).plan(Spec((1, 28, 28), 10))
    sampled = dpa.PoissonSampledDpEvent(0.05, dpa.GaussianDpEvent(3.0))
    assert plan.event() == dpa.SelfComposedDpEvent(sampled, 200)
    assert plan.neighbours is Neighbours.ADD_REMOVE
    assert [stage.operation for stage in plan.stages] == ["sum"]
