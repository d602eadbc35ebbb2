"""Convolutions of many networks side by side are torch's, and so are all their derivatives, one by one and under vmap."""

from importlib.util import find_spec

import pytest
import torch
from support.triton_interpreter import run_interpreted
from torch.func import grad, vmap
from torch.nn.functional import conv2d

from privot.components.critic_gradients import compute_clipped_gradients
from privot.components.critic_training import warm_up
from privot.nets import functional_critic, tiny_generator
from privot.nets.functional_critic import Critic
from privot.nets.tiny_generator import TinyGenerator
from privot.nets.vmap_conv import Conv, ConvInputGrad, ConvWeightGrad, batched_conv, convolve

pytestmark = pytest.mark.usefixtures("one_thread")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


def test_on_a_cpu_it_is_torch_s_to_the_bit():
    x, w, b = draw(2, 3, 6, 5).float(), draw(4, 3, 5, 5, seed=1).float(), draw(4, seed=2).float()
    assert torch.equal(convolve(x, w, b, 2, 2), conv2d(x, w, b, 2, 2))


@pytest.mark.parametrize(
    ("side", "stride", "padding"), [(5, 2, 2), (3, 1, 1), (4, 3, 1), (1, 2, 0)]
)
def test_the_operations_are_those_of_each_network_alone(side, stride, padding):
    x = draw(3, 2, 2, 6, 5)
    w = draw(3, 4, 2, side, side, seed=1)
    y = Conv.apply(x, w, stride, padding)
    dy = draw(*y.shape, seed=2)
    results = (
        y,
        ConvInputGrad.apply(dy, w, 6, 5, stride, padding),
        ConvWeightGrad.apply(x, dy, side, stride, padding),
    )
    for index in range(3):
        image, weight = (given[index].clone().requires_grad_() for given in (x, w))
        plain = conv2d(image, weight, None, stride, padding)
        expected = plain, *torch.autograd.grad((plain * dy[index]).sum(), (image, weight))
        for result, one in zip(results, expected, strict=True):
            near(result[index], one)


@pytest.mark.parametrize("operation", [Conv, ConvInputGrad, ConvWeightGrad])
def test_every_operation_has_right_gradients_twice(operation):
    x = draw(2, 1, 1, 4, 3)
    w = draw(2, 2, 1, 3, 3, seed=1)
    dy = draw(2, 1, 2, 2, 2, seed=2)
    given, more = {
        Conv: ((x, w), ()),
        ConvInputGrad: ((dy, w), (4, 3)),
        ConvWeightGrad: ((x, dy), (3,)),
    }[operation]
    given = [tensor.requires_grad_() for tensor in given]
    assert torch.autograd.gradcheck(lambda *some: operation.apply(*some, *more, 2, 1), given)
    assert torch.autograd.gradgradcheck(lambda *some: operation.apply(*some, *more, 2, 1), given)


@pytest.mark.parametrize("dims", [(0, 0), (2, 1), (0, None), (1, None), (None, 0), (None, 2)])
@pytest.mark.parametrize("operation", [Conv, ConvInputGrad, ConvWeightGrad])
def test_under_vmap_it_is_each_alone(operation, dims):
    shapes = {"x": (2, 3, 2, 4, 5), "w": (2, 4, 2, 3, 3), "dy": (2, 3, 4, 2, 3)}
    names, more = {
        Conv: (("x", "w"), ()),
        ConvInputGrad: (("dy", "w"), (4, 5)),
        ConvWeightGrad: (("x", "dy"), (3,)),
    }[operation]
    batches = [
        draw(*(() if dim is None else (3,)), *shapes[name], seed=seed)
        for seed, (name, dim) in enumerate(zip(names, dims, strict=True))
    ]
    pairs = list(zip(batches, dims, strict=True))
    given = [batch if dim is None else batch.movedim(0, dim) for batch, dim in pairs]
    results = vmap(lambda *some: operation.apply(*some, *more, 2, 1), in_dims=dims)(*given)
    for index in range(3):
        alone = (batch if dim is None else batch[index] for batch, dim in pairs)
        near(results[index], operation.apply(*alone, *more, 2, 1))


def make_shard(count=3, width=3, shape=(2, 9, 8), batch=4):
    """The same things that a gate would give: critics, tiny generators and states in double precision."""
    critic = Critic(shape, 3, width)
    generator = TinyGenerator(shape, 3, channels=2)
    weights, left_vectors = (
        tensor.double() for tensor in critic.init_weights(count, torch.Generator().manual_seed(0))
    )
    weights = weights + 0.1 * draw(*weights.shape)
    tiny = generator.init_weights(count, torch.Generator().manual_seed(1)).double()
    state = {
        "weights": weights,
        "left_vectors": left_vectors,
        "adam_mean": 0 * weights,
        "adam_square": 0 * weights,
        "tiny_generator_mean": 0 * tiny,
        "tiny_generator_square": 0 * tiny,
        "tiny_generator": tiny,
    }
    images = draw(count, 5, *shape, seed=3).sigmoid()
    labels = torch.arange(5 * count).view(count, 5) % 3
    codes = draw(2, batch, generator.latent_dim, seed=4)
    mix = draw(2, batch, seed=5).sigmoid()
    draws = draw(2, batch, seed=6).sigmoid()
    given = (critic, generator, draws, codes, mix, torch.tensor(0.0), 1e-3)
    return images, labels, state, given


def run_both_ways(monkeypatch, run):
    """With the batched operations, and with torch's own convolutions."""
    plain = run()
    for networks in (functional_critic, tiny_generator):
        monkeypatch.setattr(networks, "convolve", batched_conv)
    return run(), plain


def test_critics_and_tiny_generators_learn_the_same(monkeypatch):
    """A gradient of a gradient, under vmap."""
    images, labels, state, given = make_shard()
    train = vmap(warm_up, in_dims=(0, 0, 0, *(None for _ in given)))
    result, expected = run_both_ways(monkeypatch, lambda: train(images, labels, state, *given))
    for name, value in expected.items():
        near(result[name], value)
        assert not torch.equal(value, state[name])


def test_gradients_of_many_images_by_many_critics(monkeypatch):
    """Nested vmaps: the inner one shares its critic's weights."""
    _, _, state, (critic, *_) = make_shard()
    images = draw(4, 2, 9, 8, seed=7).sigmoid()
    labels = torch.arange(4) % 3
    bases = {"row_basis": draw(9, 3, seed=8), "column_basis": draw(8, 2, seed=9)}
    query = vmap(
        lambda one: compute_clipped_gradients(one, images, labels, critic=critic, **bases),
        chunk_size=2,
    )
    near(*run_both_ways(monkeypatch, lambda: query(state)))


def test_one_critic_alone(monkeypatch):
    images, labels, state, (critic, _, _, _, mix, *_) = make_shard(count=1)
    given = state["left_vectors"][0], images[0, :4], images[0, 1:], labels[0, :4], mix[0]
    near(*run_both_ways(monkeypatch, lambda: grad(critic.loss)(state["weights"][0], *given)))


INTERPRETED = """
import torch
from torch.func import grad, vmap
from privot.nets import functional_critic, vmap_conv
from privot.nets.flat_weights import adam_step
from privot.nets.kernels import batched_conv as kernels
from privot.nets.kernels.adam import FusedAdamStep
from privot.nets.vmap_conv import Conv, ConvInputGrad, ConvWeightGrad

def near(found, wanted):
    assert found.shape == wanted.shape
    gap = (found - wanted).abs().max()
    assert gap <= 1e-5 * wanted.abs().max(), gap / wanted.abs().max()

def fused(x, w, dy, size, side, how):
    return (
        kernels.conv_forward(x, w, *how),
        kernels.conv_input_grad(dy, w, *size, *how),
        kernels.conv_weight_grad(x, dy, side, *how),
    )

cases = (
    (2, 8, 1, 6, 32, 5, 2, 2),
    (2, 1, 64, 3, 64, 3, 2, 1),
    (2, 1, 32, 2, 160, 3, 2, 1),
    (2, 3, 3, 9, 20, 5, 2, 2),
    (2, 1, 32, 6, 16, 3, 1, 1),
    (2, 2, 16, 7, 1, 3, 1, 1),
    (2, 2, 2, 1, 3, 5, 2, 2),
    (2, 2, 2, 6, 3, 1, 2, 0),
    (2, 1, 3, 7, 4, 4, 3, 1),
)
kernels.SPLIT_SUM_MIN_IMAGES = 8
for nets, n, channels, height, outs, side, *how in cases:
    x = torch.randn(nets, n, channels, height, height + 1)
    w = torch.randn(nets, outs, channels, side, side)
    y = Conv.apply(x, w, *how)
    dy, size = torch.randn_like(y), (height, height + 1)
    dx = ConvInputGrad.apply(dy, w, *size, *how)
    wanted = y, dx, ConvWeightGrad.apply(x, dy, side, *how)
    together = fused(x, w, dy, size, side, how)
    for result, expected in zip(together, wanted):
        near(result, expected)
    x, w, dy = (tensor[1:] for tensor in (x, w, dy))
    alone = fused(x, w, dy, size, side, how)
    assert all(torch.equal(one[0], many[1]) for one, many in zip(alone, together))
    kernels.WEIGHT_TRANSPOSE_MIN_IMAGES = 8 - kernels.WEIGHT_TRANSPOSE_MIN_IMAGES
    near(kernels.conv_input_grad(dy, w, *size, *how)[0], wanted[1][1])
    shared, w = x.expand(3, *x.shape[1:]), torch.randn(3, outs, channels, side, side)
near(kernels.conv_forward(shared, w, *how), Conv.apply(shared, w, *how))

given, age = torch.randn(4, 3, 700), torch.tensor(3.0)
given[3] **= 2
wanted = adam_step(*given, age, 0.01)
corrections = 1 - 0.5**age, 1 - 0.9**age
found = vmap(lambda *one: FusedAdamStep.apply(*one, *corrections, 0.01))(*given)
assert all(torch.allclose(one, two, rtol=1e-5, atol=1e-6) for one, two in zip(found, wanted))

critic = functional_critic.Critic((1, 8, 8), 3, 16)
weights, left_vectors = critic.init_weights(2, torch.Generator().manual_seed(0))
weights += 0.1 * torch.randn(weights.shape)
images = torch.rand(2, 3, 1, 8, 8), torch.rand(2, 3, 1, 8, 8)
given = weights, left_vectors, *images, torch.randint(3, (2, 3)), torch.rand(2, 3)
wanted = vmap(grad(critic.loss))(*given)
functional_critic.convolve = vmap_conv.batched_conv
vmap_conv._select_kernels = lambda *_: kernels
near(vmap(grad(critic.loss))(*given), wanted)
print("right")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here to interpret the kernels")
def test_the_kernels_are_right_in_triton_s_interpreter():
    run_interpreted(INTERPRETED)
