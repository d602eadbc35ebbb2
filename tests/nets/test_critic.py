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
    weights, left_vectors = critic.init_weights(3, seeded())
    noise = 0.1 * torch.randn(weights.shape, generator=seeded(5))
    images = torch.rand(3, 5, *SHAPE, generator=seeded(1))
    labels = torch.randint(CLASSES, (3, 5), generator=seeded(2))
    assert (vmap(critic.score)(weights, left_vectors, images, labels) == 0).all()
    assert (weights == 0).any()
    weights = weights + (weights == 0) * noise  # a new one scores all images alike
    for _ in range(400):
        left_vectors = vmap(critic.power_iterate)(weights, left_vectors)
    return critic, weights, left_vectors, images, labels


def score_by_hand(critic, weights, images, labels):
    """In double precision, with exact singular values."""
    sizes = [math.prod(shape) for shape in critic.parameter_shapes.values()]
    parts = {
        name: part.double().view(shape)
        for part, (name, shape) in zip(
            weights.split(sizes), critic.parameter_shapes.items(), strict=True
        )
    }
    x = 2 * images.double() - 1
    for layer in range(sum(name.startswith("conv") for name in parts)):
        conv = parts[f"conv{layer}"]
        conv = conv / torch.linalg.matrix_norm(conv.flatten(1), 2)
        x = leaky_relu(conv2d(x, conv, parts[f"bias{layer}"], stride=2, padding=2), 0.1)
    x = x.flatten(1)
    by_label = (x * parts["label_projection"][labels]).sum(1)
    return x @ parts["dense"][0] + parts["dense_bias"][0] + by_label


def test_scores_are_those_of_a_network_with_convolutions_of_norm_one(team):
    critic, weights, left_vectors, images, labels = team
    scores = vmap(critic.score)(weights, left_vectors, images, labels).double()
    by_hand = [score_by_hand(critic, *one) for one in zip(weights, images, labels, strict=True)]
    torch.testing.assert_close(scores, torch.stack(by_hand), rtol=1e-3, atol=1e-4)


def test_the_gradient_of_the_loss_is_right_through_the_penalty(team):
    """The penalty is itself of a gradient: against finite differences, in double precision."""
    critic, weights, left_vectors, images, labels = team
    one = weights[0].double()
    left = left_vectors[0].double()
    real = images[0].double()
    label = labels[0]
    fake = torch.rand(5, *SHAPE, generator=seeded(3)).double()
    mix = torch.rand(5, generator=seeded(4)).double()

    def loss(weights):
        return critic.loss(weights, left, real, fake, label, mix)

    gradient = grad(loss)(one)
    for seed in range(3):
        # The right vectors of the norms move with the weights: to first order that changes no singular value, if they are exact.
        step = torch.randn(len(one), generator=seeded(seed)).double() * one.abs()
        step = step / step.norm()
        numeric = (loss(one + 1e-5 * step) - loss(one - 1e-5 * step)) / 2e-5
        assert (gradient @ step).item() == pytest.approx(numeric.item(), rel=2e-2, abs=1e-4)
    gradients = torch.autograd.functional.jacobian(
        lambda x: score_by_hand(critic, one, x, label).sum(),
        torch.lerp(fake, real, mix.view(-1, 1, 1, 1)),
    )
    of_real, of_fake = (score_by_hand(critic, one, x, label) for x in (real, fake))
    expected = (
        of_fake.mean()
        - of_real.mean()
        + 10 * (gradients.flatten(1).norm(dim=1) - 1).square().mean()
        + 0.001 * of_real.square().mean()
    )
    assert loss(one).item() == pytest.approx(expected.item(), rel=1e-3)


def test_each_learns_as_if_alone(team):
    critic, weights, left_vectors, images, labels = team
    fake = torch.rand(3, 5, *SHAPE, generator=seeded(3))
    mix = torch.rand(3, 5, generator=seeded(4))
    given = (weights, left_vectors, images, fake, labels, mix)
    together = vmap(grad(critic.loss))(*given)
    alone = torch.stack([grad(critic.loss)(*one) for one in zip(*given, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-5)


def test_adam_is_torch_s():
    weights = torch.randn(6, generator=seeded())
    mean = torch.zeros(6)
    square = torch.zeros(6)
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.Adam([parameter], lr=0.01, betas=(0.5, 0.9))
    for step, gradient in enumerate(torch.randn(4, 6, generator=seeded(1)), 1):
        age = torch.tensor(float(step))
        weights, mean, square = adam_step(weights, gradient, mean, square, age, 0.01)
        parameter.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(weights, parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (3, 64, 64), (1, 3, 5), (1, 1, 1)]
)
def test_any_size_of_image_has_a_critic_and_a_tiny_generator(shape):
    critic = Critic(shape, 3, channels=2)
    generator = TinyGenerator(shape, 3, channels=2)
    weights, left_vectors = critic.init_weights(2, seeded())
    labels = torch.arange(4) % 3
    images = vmap(generator.generate, in_dims=(0, None, None))(
        generator.init_weights(2, seeded()), torch.randn(4, generator.latent_dim), labels
    )
    assert images.shape == (2, 4, *shape)
    assert 0 <= images.min() <= images.max() <= 1
    scores = vmap(critic.score, in_dims=(0, 0, 0, None))(weights, left_vectors, images, labels)
    assert scores.shape == (2, 4)
    assert scores.isfinite().all()
    assert critic.flops > 0


def test_a_tiny_generator_uses_its_label():
    generator = TinyGenerator((1, 8, 8), 3)
    weights = generator.init_weights(1, seeded())[0]
    one, two = generator.generate(
        weights, torch.zeros(2, generator.latent_dim), torch.tensor([0, 1])
    )
    assert not torch.equal(one, two)
