"""A block is convolution, instance norm, ReLU and average pooling, by whichever way it is computed."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch.nn.functional import avg_pool2d, conv2d, group_norm

from privot.nets.conv_block import _pad_channels, apply_conv_block

pytestmark = pytest.mark.usefixtures("one_thread")

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: the fused way is for half precision on one alone",
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def parts(count=3, channels=2, width=6, side=(10, 8), dtype=torch.float64):
    """Images, weights, bias, gain and shift of a block."""
    sizes = [(count, channels, *side), (width, channels, 3, 3), *[(width,)] * 3]
    return [
        torch.randn(size, generator=seeded(number), dtype=dtype)
        for number, size in enumerate(sizes)
    ]


def plainly(x, conv, bias, gain, shift, padding):
    maps = conv2d(x, conv, bias, padding=padding)
    return avg_pool2d(group_norm(maps, maps.shape[1], gain, shift).relu(), 2)


@pytest.mark.parametrize(
    ("padding", "side"), [(1, (10, 8)), (3, (28, 28)), (1, (8, 8)), (1, (7, 9)), (1, (2, 2))]
)
def test_a_block_is_its_plain_composition_in_value_and_gradient(padding, side):
    given = [each.requires_grad_() for each in parts(side=side)]
    found, wanted = (way(*given, padding=padding) for way in (apply_conv_block, plainly))
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(found.shape, generator=seeded(9), dtype=torch.float64)
    for one, two in zip(
        *(torch.autograd.grad((each * weights).sum(), given) for each in (found, wanted)),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


def test_each_map_is_normalised_alone():
    """Written out by hand for one map, so that a norm over the batch or over channels would show."""
    x, conv, bias, gain, shift = parts()
    maps = conv2d(x, conv, bias, padding=1)[1, 4]
    normal = (maps - maps.mean()) / (maps.var(correction=0) + 1e-5).sqrt()
    lit = (normal * gain[4] + shift[4]).clamp(min=0)
    torch.testing.assert_close(
        apply_conv_block(x, conv, bias, gain, shift, 1)[1, 4],
        lit.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).mean((1, 3)),
    )


@pytest.mark.parametrize("channels", [1, 3, 8, 12])
def test_black_channels_change_no_map(channels):
    x, conv, *_ = parts(channels=channels)
    wide, filled = _pad_channels(x, conv)
    assert filled.shape[1] == wide.shape[1]
    assert filled.shape[1] % 8 == 0
    torch.testing.assert_close(conv2d(wide, filled, padding=1), conv2d(x, conv, padding=1))


def test_half_precision_takes_weights_of_full_precision_beside_it():
    x, conv, *rest = parts(
        dtype=torch.float32
    )  # as frozen nets have them: convolutions in half precision, the rest in full
    found = apply_conv_block(x.bfloat16(), conv.bfloat16(), *rest, padding=1)
    torch.testing.assert_close(
        found.float(), apply_conv_block(x, conv, *rest, padding=1), rtol=0.05, atol=0.05
    )


def test_half_precision_stays_half_and_near():
    given = parts(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = apply_conv_block(*given, padding=1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), plainly(*given, 1), rtol=0.05, atol=0.05)


# The fused way

SUITED = [(16, (8, 8)), (64, (16, 32)), (128, (32, 32)), (256, (4, 4)), (8, (2, 2))]


def maps_for(width, side, count=5):
    x = (
        (torch.randn(count, width, *side, generator=seeded(), dtype=torch.float64) * 2 + 0.5)
        .cuda()
        .bfloat16()
    )
    gain, shift = (
        1 + 0.3 * torch.randn(width, generator=seeded(seed), dtype=torch.float64).cuda()
        for seed in (1, 2)
    )
    return x.contiguous(memory_format=torch.channels_last), gain.float(), shift.float() - 1


def in_double(x, gain, shift):
    return avg_pool2d(group_norm(x.double(), x.shape[1], gain.double(), shift.double()).relu(), 2)


def near(found, wanted, within):
    """By their norms: single entries of half precision are off by more."""
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= within * wanted.norm()


@gpu
@pytest.mark.parametrize(("width", "side"), SUITED)
def test_fused_values_and_gradients_are_those_of_double_precision(width, side):
    from privot.nets.kernels import norm_relu_pool

    x, gain, shift = given = maps_for(width, side)
    assert norm_relu_pool.supports_norm_relu_pool(x)
    exact = [each.double().requires_grad_() for each in given]
    for each in given:
        each.requires_grad_()
    found = norm_relu_pool.norm_relu_pool(x, gain, shift)
    wanted = in_double(*exact)
    near(found, wanted, 0.004)  # bfloat16 has 8 bits
    weights = torch.randn(wanted.shape, generator=seeded(3), dtype=torch.float64).cuda()
    slopes = torch.autograd.grad((found * weights.bfloat16()).sum(dtype=torch.float32), given)
    exact_slopes = torch.autograd.grad((wanted * weights.bfloat16().double()).sum(), exact)
    for one, two in zip(slopes, exact_slopes, strict=True):
        near(one, two, 0.01)


@gpu
def test_fused_gradients_of_the_maps_alone():
    """As when images are optimised by frozen nets: gain and shift want none."""
    from privot.nets.kernels import norm_relu_pool

    x, gain, shift = maps_for(64, (16, 16))
    (slope,) = torch.autograd.grad(
        norm_relu_pool.norm_relu_pool(x.requires_grad_(), gain, shift).float().square().sum(), x
    )
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(in_double(exact, gain, shift).square().sum(), exact)
    near(slope, wanted, 0.02)


@gpu
@pytest.mark.parametrize(
    ("channels", "side", "padding", "width"),
    [(1, 28, 3, 128), (3, 32, 1, 128), (3, 16, 1, 48), (1, 8, 1, 16)],
)
def test_the_first_block_is_near_double_precision(channels, side, padding, width):
    from privot.nets.kernels import conv_norm_relu_pool

    x, conv, *rest = [
        each.cuda()
        for each in parts(
            count=70, channels=channels, width=width, side=(side, side), dtype=torch.float32
        )
    ]
    x = x.bfloat16()
    conv = conv.bfloat16()
    assert conv_norm_relu_pool.supports_conv_norm_relu_pool(x, conv, rest[1], padding)
    found = apply_conv_block(x.requires_grad_(), conv, *rest, padding=padding)
    exact = x.detach().double().requires_grad_()
    wanted = plainly(exact, conv.double(), *(each.double() for each in rest), padding)
    near(found, wanted, 0.004)
    (slope,), (goal,) = (
        torch.autograd.grad(each.float().pow(2).sum(), of)
        for each, of in ((found, x), (wanted, exact))
    )
    near(slope, goal.double(), 0.03)
    x = x.detach()
    many = torch.func.vmap(
        lambda each: apply_conv_block(each[None], conv, *rest, padding=padding)[0]
    )(x)
    assert torch.equal(many, found)


@gpu
def test_fused_under_vmap_is_a_larger_batch():
    from privot.nets.kernels import norm_relu_pool

    x, gain, shift = maps_for(32, (8, 8), count=6)
    found = torch.func.vmap(lambda each: norm_relu_pool.norm_relu_pool(each[None], gain, shift)[0])(
        x
    )
    assert torch.equal(found, norm_relu_pool.norm_relu_pool(x, gain, shift))
    with pytest.raises(NotImplementedError):
        torch.func.vmap(lambda each: norm_relu_pool.norm_relu_pool(x, each, shift))(
            gain.expand(3, -1)
        )


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
def test_widths_and_sides_that_do_not_suit_take_the_plain_way(monkeypatch, width, side, suits):
    from privot.nets.kernels import norm_relu_pool

    taken = []
    real = norm_relu_pool.norm_relu_pool
    monkeypatch.setattr(
        norm_relu_pool, "norm_relu_pool", lambda *given: taken.append(1) or real(*given)
    )
    given = [
        each.cuda().requires_grad_()
        for each in parts(channels=3, width=width, side=side, dtype=torch.float32)
    ]
    with torch.autocast("cuda", torch.bfloat16):
        found = apply_conv_block(*given, padding=1)
    assert bool(taken) == suits
    near(found, plainly(*(each.double() for each in given), 1), 0.02)
    taken.clear()
    near(
        apply_conv_block(*given, padding=1), plainly(*(each.double() for each in given), 1), 1e-3
    )  # TF32 may be on
    assert not taken  # full precision never takes the fused way


@gpu
def test_a_block_in_half_precision_on_a_gpu_is_near_the_plain_one():
    given = [
        each.cuda().requires_grad_()
        for each in parts(count=8, channels=3, width=32, side=(32, 32), dtype=torch.float32)
    ]
    exact = [each.detach().double().requires_grad_() for each in given]
    with torch.autocast("cuda", torch.bfloat16):
        found = apply_conv_block(*given, padding=1)
    wanted = plainly(*exact, 1)
    near(found, wanted, 0.01)
    chosen = [0, 1, 3, 4]  # a bias before a norm has no slope
    some, other = ([each[place] for place in chosen] for each in (given, exact))
    for one, two in zip(
        torch.autograd.grad(found.float().square().sum(), some),
        torch.autograd.grad(wanted.square().sum(), other),
        strict=True,
    ):
        near(one, two, 0.08)  # rounding alone, at the same places, is 0.048 for the pixels


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


@pytest.mark.skipif(
    find_spec("triton") is None, reason="no Triton here to interpret the fused steps"
)
def test_the_fused_steps_are_right_in_tritons_interpreter():
    """Without a GPU, and so in full precision; the kernels are the same."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.stdout == "right\n", done.stderr
