"""A thousand critics side by side are the same critics one by one, and each is the network that its page says."""

import math

import pytest
import torch
from torch.func import grad, vmap
from torch.nn.functional import conv2d, leaky_relu

from privot.nets.flat_weights import adam_step
from privot.nets.functional_critic import Critic
from privot.nets.tiny_generator import TinyGenerator

SHAPE = (3, 12, 10)
CLASSES = 4


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def team():
    critic = Critic(SHAPE, CLASSES, channels=4)
    weights, along = critic.init_weights(3, seeded())
    assert (weights == 0).any()
    weights = weights + (weights == 0) * 0.1 * torch.randn(
        weights.shape, generator=seeded(5)
    )  # a new one has no slope
    for _ in range(400):
        along = vmap(critic.power_iterate)(weights, along)
    images = torch.rand(3, 5, *SHAPE, generator=seeded(1))
    labels = torch.randint(CLASSES, (3, 5), generator=seeded(2))
    return critic, weights, along, images, labels


def by_hand(critic, weights, images, labels):
    """In double precision, with exact singular values."""
    parts = {}
    at = 0
    for name, shape in critic.parameter_shapes.items():
        part = weights[at : at + math.prod(shape)].double().view(shape)
        at += part.numel()
        parts[name] = (
            part / torch.linalg.matrix_norm(part.flatten(1), 2) if part.ndim == 4 else part
        )
    assert at == len(weights)
    x = 2 * images.double() - 1
    for place in range(sum(name.startswith("conv") for name in parts)):
        x = leaky_relu(
            conv2d(x, parts[f"conv{place}"], parts[f"bias{place}"], stride=2, padding=2), 0.1
        )
    x = x.flatten(1)
    return torch.stack(
        [
            each @ parts["dense"][0]
            + parts["dense_bias"][0]
            + each @ parts["label_projection"][label]
            for each, label in zip(x, labels, strict=True)
        ]
    )


def test_scores_are_those_of_a_network_with_convolutions_of_norm_one(team):
    critic, weights, along, images, labels = team
    found = vmap(critic.score)(weights, along, images, labels)
    for place in range(3):
        torch.testing.assert_close(
            found[place].double(),
            by_hand(critic, weights[place], images[place], labels[place]),
            rtol=1e-3,
            atol=1e-4,
        )


def test_the_loss_s_slope_is_right_through_the_penalty(team):
    """The penalty is itself of a slope: against finite differences, in double precision."""
    critic, weights, along, images, labels = team
    one = weights[0].double()
    left = along[0].double()
    real = images[0].double()
    label = labels[0]
    fake = torch.rand(5, *SHAPE, generator=seeded(3)).double()
    mix = torch.rand(5, generator=seeded(4)).double()

    def loss(w):
        return critic.loss(w, left, real, fake, label, mix)

    slope = grad(loss)(one)
    for seed in range(3):
        # The right vectors of the norms move with the weights: to first order that changes no singular value, if they are exact.
        way = torch.randn(len(one), generator=seeded(seed)).double() * one.abs()
        way = way / way.norm()
        numeric = (loss(one + 1e-5 * way) - loss(one - 1e-5 * way)) / 2e-5
        assert (slope @ way).item() == pytest.approx(numeric.item(), rel=2e-2, abs=1e-4)
    plain = torch.autograd.functional.jacobian(
        lambda x: by_hand(critic, one, x, label).sum(),
        torch.lerp(fake, real, mix.view(-1, 1, 1, 1)),
    )
    scores = by_hand(critic, one, real, label), by_hand(critic, one, fake, label)
    wanted = (
        scores[1].mean()
        - scores[0].mean()
        + 10 * (plain.flatten(1).norm(dim=1) - 1).square().mean()
        + 0.001 * scores[0].square().mean()
    )
    assert loss(one).item() == pytest.approx(wanted.item(), rel=1e-3)


def test_a_new_critic_has_no_slope():
    critic = Critic(SHAPE, CLASSES, channels=4)
    weights, along = critic.init_weights(2, seeded())
    assert (
        vmap(critic.score)(
            weights, along, torch.rand(2, 5, *SHAPE), torch.zeros(2, 5, dtype=torch.int64)
        )
        .abs()
        .max()
        == 0
    )


def test_each_learns_as_if_alone(team):
    critic, weights, along, images, labels = team
    fake = torch.rand(3, 5, *SHAPE, generator=seeded(3))
    mix = torch.rand(3, 5, generator=seeded(4))
    together = vmap(grad(critic.loss))(weights, along, images, fake, labels, mix)
    for place in range(3):
        alone = grad(critic.loss)(
            *(each[place] for each in (weights, along, images, fake, labels, mix))
        )
        torch.testing.assert_close(together[place], alone, rtol=1e-3, atol=1e-5)


def test_adam_is_torch_s():
    start = torch.randn(6, generator=seeded())
    slopes = torch.randn(4, 6, generator=seeded(1))
    weights = start.clone()
    mean = torch.zeros(6)
    square = torch.zeros(6)
    parameter = torch.nn.Parameter(start.clone())
    optimiser = torch.optim.Adam([parameter], lr=0.01, betas=(0.5, 0.9))
    for step, slope in enumerate(slopes):
        weights, mean, square = adam_step(
            weights, slope, mean, square, torch.tensor(step + 1.0), 0.01
        )
        parameter.grad = slope.clone()
        optimiser.step()
    torch.testing.assert_close(weights, parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (3, 64, 64), (1, 3, 5), (1, 1, 1)]
)
def test_any_size_of_image_has_a_critic_and_a_sketch(shape):
    critic = Critic(shape, 3, channels=2)
    sketch = TinyGenerator(shape, 3, channels=2)
    weights, along = critic.init_weights(2, seeded())
    drawn = vmap(sketch.generate, in_dims=(0, None, None))(
        sketch.init_weights(2, seeded()), torch.randn(4, sketch.latent_dim), torch.arange(4) % 3
    )
    assert drawn.shape == (2, 4, *shape)
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    found = vmap(critic.score, in_dims=(0, 0, 0, None))(weights, along, drawn, torch.arange(4) % 3)
    assert found.shape == (2, 4)
    assert found.isfinite().all()
    assert critic.flops > 0


def test_a_sketch_knows_its_label():
    sketch = TinyGenerator((1, 8, 8), 3)
    one, two = (
        sketch.generate(
            sketch.init_weights(1, seeded())[0],
            torch.zeros(1, sketch.latent_dim),
            torch.tensor([each]),
        )
        for each in (0, 1)
    )
    assert not torch.equal(one, two)
