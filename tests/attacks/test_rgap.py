"""The closed form: images where it claims to find them, doubt where not, or a refusal."""

from functools import cache

import pytest
import torch
from support.seeding import seed_generator
from torch import nn
from torch.nn import functional as F

from privot.attacks.inversion import activation_inverses as inverses
from privot.attacks.inversion.layer_chain import extract_layer_chain
from privot.attacks.inversion.models import (
    LENET_INIT_BOUND,
    cnn6,
    compute_logistic_loss,
    lenet,
    sample_initial_weights,
)
from privot.attacks.inversion.problem import Problem
from privot.attacks.inversion.rgap import reconstruct_by_rgap
from privot.attacks.inversion.scoring import score_reconstruction
from privot.attacks.inversion.spear import reconstruct_by_spear
from privot.data import load_dataset
from privot.errors import DataError, SettingError

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (1, 8, 8)
FLAT = nn.Flatten()


@cache
def load_digits():
    return load_dataset("digits", public=True).records()


def make_problem(net, loss=F.cross_entropy, count=3, batch=1, dtype=torch.float32, classes=10):
    """Digits behind one net."""
    images, labels = (part[: count * batch] for part in load_digits())
    images = images.to(dtype).view(count, batch, *SHAPE)
    labels = labels.view(count, batch) % classes
    return Problem.from_images(net.to(dtype), loss, images, labels), images, labels


def make_lenet_problem(count, init_bound=0.5):
    """Digits behind a LeNet each."""
    net = lenet(SHAPE, 10)
    _, images, labels = make_problem(net, count=count)
    weights = sample_initial_weights(net, count, seed_generator(), init_bound)
    return Problem.from_images(net, F.cross_entropy, images, labels, weights), images, labels


def add_noise(problem, std):
    generator = seed_generator(1)
    for value in problem.update.values():
        value.add_(std * torch.randn(value.shape, generator=generator))


def check_solved(problem, images, labels, bound):
    result = reconstruct_by_rgap(problem)
    assert (result.images - images).square().flatten(1).mean(1).max() < bound
    assert result.labels.equal(labels)
    return result


def test_lenet_with_a_net_for_each_victim():
    result = check_solved(*make_lenet_problem(4, LENET_INIT_BOUND), 1e-6)
    assert result.residual.max() < 1e-6


def test_cnn6_has_no_biases_one_logit_and_one_root_or_two():
    net = cnn6(SHAPE).double()
    images, labels = make_problem(lenet(SHAPE, 10), count=4, dtype=torch.float64, classes=2)[1:]
    weights = sample_initial_weights(net, 4, seed_generator(1))
    weights = {name: weight.double() for name, weight in weights.items()}
    problem = Problem.from_images(net, compute_logistic_loss, images, labels, weights)
    is_right = []
    for victim in range(4):
        own = {name: weight[victim] for name, weight in weights.items()}
        logit = torch.func.functional_call(net, own, images[victim])
        is_right.append(bool((logit[0, 0] > 0) == labels[victim, 0]))
    assert len(set(is_right)) == 2  # one root, and two
    check_solved(problem, images, labels, 1e-3)


@pytest.mark.parametrize("classes", [2, 10])
def test_a_softmax_without_biases(classes):
    torch.manual_seed(3)
    first = nn.Conv2d(1, 8, 3, 1, 1, bias=False)
    net = nn.Sequential(first, nn.Sigmoid(), FLAT, nn.Linear(512, classes, bias=False))
    check_solved(*make_problem(net, classes=classes, dtype=torch.float64), 1e-12)


class Own(nn.Module):
    """A model as users write them."""

    def __init__(self, activation):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Linear(512, 40)
        self.last = nn.Linear(40, 10)
        self.activation = activation
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.activation(self.first(x)).view(x.size(0), -1)
        return self.last(self.drop(self.activation(self.second(x))))


@pytest.mark.parametrize(
    "activation", [torch.tanh, F.leaky_relu, nn.ELU(), nn.Softplus(2.0), torch.sigmoid]
)
def test_a_model_of_one_s_own_with_one_net_for_all(activation):
    torch.manual_seed(0)
    check_solved(*make_problem(Own(activation).eval(), dtype=torch.float64), 1e-9)


def test_what_follows_the_last_layer_is_a_part_of_the_loss():
    torch.manual_seed(0)
    layers = (nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 10), nn.LogSoftmax(1))
    check_solved(*make_problem(nn.Sequential(FLAT, *layers), F.nll_loss), 1e-9)


def test_clipping_changes_nothing_and_a_failed_attack_says_so():
    problem, images, labels = make_lenet_problem(3)
    add_noise(noisy := make_lenet_problem(3)[0], 0.1)
    result = reconstruct_by_rgap(noisy)
    assert result.images.isfinite().all()
    assert (result.images - images).square().flatten(1).mean(1).min() > 1e-2
    assert result.residual.min() > 1e-4  # against 1e-9 without noise
    for value in problem.update.values():
        value.mul_(0.01)
    check_solved(problem, images, labels, 1e-6)


@pytest.mark.parametrize(
    ("activation", "inverse"),
    [
        (torch.sigmoid, inverses.invert_sigmoid),
        (torch.tanh, inverses.invert_tanh),
        (F.elu, inverses.build_elu_inverse()),
        (lambda z: F.elu(z, 0.5), inverses.build_elu_inverse(0.5)),
        (F.softplus, inverses.build_softplus_inverse()),
        (lambda z: F.leaky_relu(z, 0.2), inverses.build_leaky_relu_inverse(0.2)),
        (F.relu, inverses.build_leaky_relu_inverse(0.0)),
    ],
)
def test_activations_are_inverted(activation, inverse):
    z = torch.linspace(-4, 4, 101, dtype=torch.float64)
    expected = torch.func.vmap(torch.func.grad(activation))(z)
    before, gradient, defined = inverse(activation(z))
    defined = defined.bool()
    assert torch.allclose(before[defined], z[defined], atol=1e-9)
    is_equal = torch.allclose(gradient, expected, atol=1e-9)
    assert is_equal or bool((expected - gradient)[z == 0].any())
    assert defined.all() or activation is F.relu


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.last(x + torch.tanh(self.first(x)))


class Branching(Residual):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


LAST = nn.Linear(64, 10)
NO_CHAINS = {
    "MaxPool2d.*optimizing attack": nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), FLAT, nn.Linear(36, 10)
    ),
    "GELU.*optimizing attack": nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GELU(), FLAT, nn.Linear(144, 10)
    ),
    "padding given by name.*optimizing attack": nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same"), FLAT, nn.Linear(256, 10)
    ),
    "has no bias.*optimizing attack": nn.Sequential(
        FLAT, nn.Linear(64, 10, bias=False), nn.LogSoftmax(1)
    ),
    "start and end with a layer.*optimizing attack": nn.Sequential(nn.Sigmoid(), FLAT, LAST),
    "branches": Residual(),
    "graph": Branching(),
}


@pytest.mark.parametrize("words", NO_CHAINS)
def test_nets_that_are_no_chain_are_refused(words):
    with pytest.raises(SettingError, match=words):
        extract_layer_chain(NO_CHAINS[words], SHAPE)


def test_the_attacks_name_what_they_need():
    problem, _, _ = make_problem(lenet(SHAPE, 10), count=1, batch=2)
    with pytest.raises(SettingError, match="reconstruct_by_spear"):
        reconstruct_by_rgap(problem)
    bare = nn.Sequential(FLAT, nn.Linear(64, 20, bias=False), nn.ReLU(), nn.Linear(20, 10))
    for wrong in (problem, make_problem(bare, count=1, batch=2)[0]):
        with pytest.raises(SettingError, match="ReLU"):
            reconstruct_by_spear(wrong)


# Batches


def make_batches(count, batch):
    torch.manual_seed(0)
    net = nn.Sequential(FLAT, nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 10))
    return make_problem(net, count=count, batch=batch)


@pytest.mark.parametrize("batch", [1, 2, 6])
def test_a_whole_batch_behind_a_relu_is_solved(batch):
    problem, images, labels = make_batches(2, batch)
    result = reconstruct_by_spear(problem)
    score = score_reconstruction(result, images, labels)
    assert score.mse.max() < 1e-8
    assert result.residual.max() == 0  # the proof that the attacker has
    assert score.leak_rate == 1


def test_a_batch_with_noise_is_not_proved():
    problem, images, labels = make_batches(1, 4)
    add_noise(problem, 1e-2)
    result = reconstruct_by_spear(problem, max_rounds=4)
    assert result.residual.min() > 0.01
    assert score_reconstruction(result, images, labels).mse.min() > 1e-3


# The papers' own data


@pytest.mark.parametrize(
    ("data", "architecture"),
    [
        ("mnist", "lenet"),
        pytest.param("cifar10", "lenet", marks=pytest.mark.slow),
        pytest.param("mnist", "cnn6", marks=pytest.mark.slow),
        pytest.param("cifar10", "cnn6", marks=pytest.mark.slow),
    ],
)
def test_the_table_of_the_paper(data, architecture):
    """Table 3 of Wang et al. has MSE 0.0012 and 0.0048 (LeNet), 0.0068 and 0.0258 (CNN6)."""
    try:
        images, labels = (
            part[:2, None] for part in load_dataset(data, "test", public=True).records()
        )
    except DataError as error:
        pytest.skip(str(error))
    shape = images.shape[2:]
    is_lenet = architecture == "lenet"
    net = lenet(shape, 10) if is_lenet else cnn6(shape)
    loss = F.cross_entropy if is_lenet else compute_logistic_loss
    labels = labels if is_lenet else labels % 2
    seed = seed_generator()
    weights = sample_initial_weights(net, 2, seed, 0.5 if is_lenet else None)
    problem = Problem.from_images(net, loss, images, labels, weights)
    check_solved(problem, images, labels, 1e-6 if is_lenet else 1e-3)
