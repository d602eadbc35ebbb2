"""A block is convolution, instance norm, ReLU and average pooling, by whichever way it is computed."""

from importlib.util import find_spec

import pytest
import torch
from support.triton_interpreter import run_interpreted
from torch.nn.functional import avg_pool2d, conv2d, group_norm
from torch.testing import assert_close

from privot.nets.conv_block import _pad_channels, apply_conv_block

pytestmark = pytest.mark.usefixtures("one_thread")

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: the fused way is for half precision on one alone",
)


def randn(*size, seed=0, dtype=torch.float64):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_block(count=3, channels=2, width=6, side=(10, 8), dtype=torch.float64):
    """Images, weights, bias, gain and shift of a block."""
    sizes = [(count, channels, *side), (width, channels, 3, 3), *[(width,)] * 3]
    return [randn(*size, seed=seed, dtype=dtype) for seed, size in enumerate(sizes)]


def pool_norm(maps, gain, shift):
    return avg_pool2d(group_norm(maps, maps.shape[1], gain, shift).relu(), 2)


def apply_plainly(x, conv, bias, gain, shift, padding):
    return pool_norm(conv2d(x, conv, bias, padding=padding), gain, shift)


@pytest.mark.parametrize(
    ("padding", "side"), [(1, (10, 8)), (3, (28, 28)), (1, (8, 8)), (1, (7, 9)), (1, (2, 2))]
)
def test_a_block_is_its_plain_composition_in_value_and_gradient(padding, side):
    given = [tensor.requires_grad_() for tensor in make_block(side=side)]
    values = [block(*given, padding=padding) for block in (apply_conv_block, apply_plainly)]
    assert_close(*values)
    weights = randn(*values[0].shape, seed=9)
    gradients = [torch.autograd.grad((value * weights).sum(), given) for value in values]
    assert_close(*gradients)


def test_every_map_is_normalised_alone():
    """Written out by hand for one map, so that a norm over the batch or over channels would show."""
    x, conv, bias, gain, shift = make_block()
    maps = conv2d(x, conv, bias, padding=1)[1, 4]
    normal = (maps - maps.mean()) / (maps.var(correction=0) + 1e-5).sqrt()
    active = (normal * gain[4] + shift[4]).clamp(min=0)
    pooled = active.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).mean((1, 3))
    assert_close(apply_conv_block(x, conv, bias, gain, shift, 1)[1, 4], pooled)


@pytest.mark.parametrize("channels", [1, 3, 8, 12])
def test_black_channels_change_no_map(channels):
    x, conv, *_ = make_block(channels=channels)
    padded_x, padded_conv = _pad_channels(x, conv)
    assert padded_conv.shape[1] == padded_x.shape[1]
    assert padded_conv.shape[1] % 8 == 0
    assert_close(conv2d(padded_x, padded_conv, padding=1), conv2d(x, conv, padding=1))


def test_half_precision_stays_half_and_near_also_beside_weights_of_full_precision():
    given = make_block(dtype=torch.float32)
    x, conv, *rest = given
    expected = apply_plainly(*given, 1)
    frozen = apply_conv_block(x.bfloat16(), conv.bfloat16(), *rest, padding=1)
    with torch.autocast("cpu", torch.bfloat16):
        half = apply_conv_block(*given, padding=1)
    assert half.dtype == torch.bfloat16
    for value in (half, frozen):
        assert_close(value.float(), expected, rtol=0.05, atol=0.05)


# The fused way

SUITED = [(16, (8, 8)), (64, (16, 32)), (128, (32, 32)), (256, (4, 4)), (8, (2, 2))]


@pytest.fixture
def fused():
    return pytest.importorskip("privot.nets.kernels.norm_relu_pool")


def make_maps(width, side, count=5):
    x = (randn(count, width, *side) * 2 + 0.5).cuda().bfloat16()
    gain, shift = (1 + 0.3 * randn(width, seed=seed).cuda() for seed in (1, 2))
    return x.contiguous(memory_format=torch.channels_last), gain.float(), shift.float() - 1


def to_double(tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def near(result, expected, within):
    """By their norms: single entries of half precision are off by more."""
    assert result.shape == expected.shape
    assert (result.double() - expected).norm() <= within * expected.norm()


@gpu
@pytest.mark.parametrize(("width", "side"), SUITED)
def test_fused_values_and_gradients_are_those_of_double_precision(fused, width, side):
    given = [tensor.requires_grad_() for tensor in make_maps(width, side)]
    assert fused.supports_norm_relu_pool(given[0])
    exact = to_double(given)
    value = fused.norm_relu_pool(*given)
    expected = pool_norm(*exact)
    near(value, expected, 0.004)  # bfloat16 has 8 bits
    weights = randn(*expected.shape, seed=3).cuda().bfloat16()
    gradients = torch.autograd.grad((value * weights).sum(dtype=torch.float32), given)
    exact_gradients = torch.autograd.grad((expected * weights.double()).sum(), exact)
    for one, two in zip(gradients, exact_gradients, strict=True):
        near(one, two, 0.01)


@gpu
def test_fused_gradients_of_the_maps_alone(fused):
    """As when images are optimised by frozen nets: gain and shift want none."""
    x, gain, shift = make_maps(64, (16, 16))
    value = fused.norm_relu_pool(x.requires_grad_(), gain, shift)
    (gradient,) = torch.autograd.grad(value.float().square().sum(), x)
    exact, *rest = to_double((x, gain, shift))
    (expected,) = torch.autograd.grad(pool_norm(exact, *rest).square().sum(), exact)
    near(gradient, expected, 0.02)


@gpu
@pytest.mark.parametrize(
    ("channels", "side", "padding", "width"),
    [(1, 28, 3, 128), (3, 32, 1, 128), (3, 16, 1, 48), (1, 8, 1, 16)],
)
def test_the_first_block_is_near_double_precision(channels, side, padding, width):
    from privot.nets.kernels.conv_norm_relu_pool import supports_conv_norm_relu_pool

    block = make_block(70, channels, width, (side, side), torch.float32)
    x, conv, *rest = (tensor.cuda() for tensor in block)
    x = x.bfloat16()
    conv = conv.bfloat16()
    assert supports_conv_norm_relu_pool(x, conv, rest[1], padding)
    value = apply_conv_block(x.requires_grad_(), conv, *rest, padding=padding)
    exact, *others = to_double((x, conv, *rest))
    expected = apply_plainly(exact, *others, padding)
    near(value, expected, 0.004)
    (gradient,) = torch.autograd.grad(value.float().pow(2).sum(), x)
    (exact_gradient,) = torch.autograd.grad(expected.float().pow(2).sum(), exact)
    near(gradient, exact_gradient.double(), 0.03)
    many = torch.func.vmap(
        lambda image: apply_conv_block(image[None], conv, *rest, padding=padding)[0]
    )(x.detach())
    assert torch.equal(many, value)


@gpu
def test_fused_under_vmap_is_a_larger_batch(fused):
    x, gain, shift = make_maps(32, (8, 8), count=6)
    many = torch.func.vmap(lambda image: fused.norm_relu_pool(image[None], gain, shift)[0])(x)
    assert torch.equal(many, fused.norm_relu_pool(x, gain, shift))
    with pytest.raises(NotImplementedError):
        torch.func.vmap(lambda gain: fused.norm_relu_pool(x, gain, shift))(gain.expand(3, -1))


@gpu
@pytest.mark.parametrize(
    ("width", "side", "suits"),
    [
        (64, (32, 32), True),
        (64, (28, 28), False),
        (64, (12, 16), False),
        (12, (8, 8), False),
        (4, (8, 8), False),
        (24, (8, 8), False),
    ],
)
def test_widths_and_sides_that_do_not_suit_take_the_plain_way(
    fused, monkeypatch, width, side, suits
):
    calls = []
    real = fused.norm_relu_pool
    monkeypatch.setattr(fused, "norm_relu_pool", lambda *given: calls.append(1) or real(*given))
    block = make_block(channels=3, width=width, side=side, dtype=torch.float32)
    given = [tensor.cuda().requires_grad_() for tensor in block]
    expected = apply_plainly(*to_double(given), 1)
    with torch.autocast("cuda", torch.bfloat16):
        near(apply_conv_block(*given, padding=1), expected, 0.02)
    assert bool(calls) == suits
    calls.clear()
    near(apply_conv_block(*given, padding=1), expected, 1e-3)  # TF32 may be on
    assert not calls  # full precision never takes the fused way


@gpu
def test_a_block_in_half_precision_on_a_gpu_is_near_the_plain_one():
    block = make_block(8, 3, 32, (32, 32), torch.float32)
    given = [tensor.cuda().requires_grad_() for tensor in block]
    exact = to_double(given)
    with torch.autocast("cuda", torch.bfloat16):
        value = apply_conv_block(*given, padding=1)
    expected = apply_plainly(*exact, 1)
    near(value, expected, 0.01)
    del given[2], exact[2]  # a bias before a norm has no gradient
    for one, two in zip(
        torch.autograd.grad(value.float().square().sum(), given),
        torch.autograd.grad(expected.square().sum(), exact),
        strict=True,
    ):
        near(one, two, 0.08)  # rounding alone is 0.048 for the pixels


INTERPRETED = """
import torch
from torch.nn.functional import avg_pool2d, conv2d, group_norm
from privot.nets.kernels.conv_norm_relu_pool import (
    conv_norm_relu_pool,
    supports_conv_norm_relu_pool,
)
from privot.nets.kernels.norm_relu_pool import norm_relu_pool, supports_norm_relu_pool

def plainly(maps, gain, shift):
    return avg_pool2d(group_norm(maps, maps.shape[1], gain, shift).relu(), 2)

blocks = ((1, 28, 3, 32), (3, 32, 1, 16), (1, 8, 1, 16), (3, 16, 1, 64), (2, 8, 1, 48))
for inputs, side, pad, width in blocks:
    sizes = ((3, inputs, side, side), (width, inputs, 3, 3), (width,), (width,))
    x, conv, gain, shift = (torch.randn(size) for size in sizes)
    fused = lambda images: conv_norm_relu_pool(images, conv, gain, shift, pad)
    assert supports_conv_norm_relu_pool(x, conv, gain, pad)
    wanted = plainly(conv2d(x, conv, padding=pad), gain, shift)
    torch.testing.assert_close(fused(x), wanted, rtol=1e-4, atol=1e-4)
    many = torch.func.vmap(lambda image: fused(image[None])[0])(x)
    torch.testing.assert_close(many, wanted, rtol=1e-4, atol=1e-4)
    weights, x = torch.randn_like(wanted), x.requires_grad_()
    ways = fused(x), plainly(conv2d(x, conv, padding=pad), gain, shift)
    one, two = (torch.autograd.grad((way * weights).sum(), x)[0] for way in ways)
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
    assert not supports_conv_norm_relu_pool(x, conv.requires_grad_(), gain, pad)
for width, side in ((16, 8), (8, 16), (64, 4), (32, 2)):
    sizes = ((3, width, side, side), (width,), (width,))
    given = [torch.randn(size).requires_grad_() for size in sizes]
    assert supports_norm_relu_pool(given[0])
    ways = norm_relu_pool(*given), plainly(*given)
    weights = torch.randn_like(ways[1])
    results = ([way, *torch.autograd.grad((way * weights).sum(), given)] for way in ways)
    for one, two in zip(*results):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
for shape in ((1, 8, 6, 8), (1, 48, 8, 8), (1, 8, 128, 8)):
    assert not supports_norm_relu_pool(torch.zeros(shape))
print("right")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here to interpret the kernels")
def test_the_fused_steps_are_right_in_triton_s_interpreter():
    run_interpreted(INTERPRETED)
