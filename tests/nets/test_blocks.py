"""A block is convolution, instance norm, ReLU and average pooling, by whichever way it is computed."""

import pytest
import torch
from torch.nn.functional import avg_pool2d, conv2d, group_norm

from privot.nets.blocks import _filled, block

pytestmark = pytest.mark.usefixtures("one_thread")

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the fused way is for half precision on one alone")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def parts(count=3, channels=2, width=6, side=(10, 8), dtype=torch.float64):
    """Images, weights, bias, gain and shift of a block."""
    sizes = [(count, channels, *side), (width, channels, 3, 3), *[(width,)] * 3]
    return [torch.randn(size, generator=seeded(number), dtype=dtype) for number, size in enumerate(sizes)]


def plainly(x, conv, bias, gain, shift, padding):
    maps = conv2d(x, conv, bias, padding=padding)
    return avg_pool2d(group_norm(maps, maps.shape[1], gain, shift).relu(), 2)


@pytest.mark.parametrize(("padding", "side"), [(1, (10, 8)), (3, (28, 28)), (1, (8, 8)), (1, (7, 9)), (1, (2, 2))])
def test_a_block_is_its_plain_composition_in_value_and_gradient(padding, side):
    given = [each.requires_grad_() for each in parts(side=side)]
    found, wanted = (way(*given, padding=padding) for way in (block, plainly))
    torch.testing.assert_close(found, wanted)
    weights = torch.randn(found.shape, generator=seeded(9), dtype=torch.float64)
    for one, two in zip(*(torch.autograd.grad((each * weights).sum(), given) for each in (found, wanted)), strict=True):
        torch.testing.assert_close(one, two)


def test_each_map_is_normalised_alone():
    """Written out by hand for one map, so that a norm over the batch or over channels would show."""
    x, conv, bias, gain, shift = parts()
    maps = conv2d(x, conv, bias, padding=1)[1, 4]
    normal = (maps - maps.mean()) / (maps.var(correction=0) + 1e-5).sqrt()
    lit = (normal * gain[4] + shift[4]).clamp(min=0)
    torch.testing.assert_close(block(x, conv, bias, gain, shift, 1)[1, 4], lit.unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).mean((1, 3)))


@pytest.mark.parametrize("channels", [1, 3, 8, 12])
def test_black_channels_change_no_map(channels):
    x, conv, *_ = parts(channels=channels)
    wide, filled = _filled(x, conv)
    assert filled.shape[1] == wide.shape[1]
    assert filled.shape[1] % 8 == 0
    torch.testing.assert_close(conv2d(wide, filled, padding=1), conv2d(x, conv, padding=1))


def test_half_precision_takes_weights_of_full_precision_beside_it():
    x, conv, *rest = parts(dtype=torch.float32)  # as frozen nets have them: convolutions in half precision, the rest in full
    found = block(x.bfloat16(), conv.bfloat16(), *rest, padding=1)
    torch.testing.assert_close(found.float(), block(x, conv, *rest, padding=1), rtol=0.05, atol=0.05)


def test_half_precision_stays_half_and_near():
    given = parts(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = block(*given, padding=1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), plainly(*given, 1), rtol=0.05, atol=0.05)


# The fused way

SUITED = [(16, (8, 8)), (64, (16, 32)), (128, (32, 32)), (256, (4, 4)), (8, (2, 2))]


def maps_for(width, side, count=5):
    x = (torch.randn(count, width, *side, generator=seeded(), dtype=torch.float64) * 2 + 0.5).cuda().bfloat16()
    gain, shift = (1 + 0.3 * torch.randn(width, generator=seeded(seed), dtype=torch.float64).cuda() for seed in (1, 2))
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
    from privot.nets import fused

    x, gain, shift = given = maps_for(width, side)
    assert fused.suits(x)
    exact = [each.double().requires_grad_() for each in given]
    for each in given:
        each.requires_grad_()
    found, wanted = fused.norm_relu_pool(x, gain, shift), in_double(*exact)
    near(found, wanted, 0.004)  # bfloat16 has 8 bits
    weights = torch.randn(wanted.shape, generator=seeded(3), dtype=torch.float64).cuda()
    slopes = torch.autograd.grad((found * weights.bfloat16()).sum(dtype=torch.float32), given)
    exact_slopes = torch.autograd.grad((wanted * weights.bfloat16().double()).sum(), exact)
    for one, two in zip(slopes, exact_slopes, strict=True):
        near(one, two, 0.01)


@gpu
def test_fused_gradients_of_the_maps_alone():
    """As when images are optimised by frozen nets: gain and shift want none."""
    from privot.nets import fused

    x, gain, shift = maps_for(64, (16, 16))
    (slope,) = torch.autograd.grad(fused.norm_relu_pool(x.requires_grad_(), gain, shift).float().square().sum(), x)
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(in_double(exact, gain, shift).square().sum(), exact)
    near(slope, wanted, 0.02)


@gpu
def test_fused_under_vmap_is_a_larger_batch():
    from privot.nets import fused

    x, gain, shift = maps_for(32, (8, 8), count=6)
    found = torch.func.vmap(lambda each: fused.norm_relu_pool(each[None], gain, shift)[0])(x)
    assert torch.equal(found, fused.norm_relu_pool(x, gain, shift))
    with pytest.raises(NotImplementedError):
        torch.func.vmap(lambda each: fused.norm_relu_pool(x, each, shift))(gain.expand(3, -1))


@gpu
@pytest.mark.parametrize(
    ("width", "side", "suits"),
    [(64, (32, 32), True), (64, (28, 28), False), (64, (12, 16), False), (12, (8, 8), False), (4, (8, 8), False), (24, (8, 8), False)],
)
def test_widths_and_sides_that_do_not_suit_take_the_plain_way(monkeypatch, width, side, suits):
    from privot.nets import fused

    taken, real = [], fused.norm_relu_pool
    monkeypatch.setattr(fused, "norm_relu_pool", lambda *given: taken.append(1) or real(*given))
    given = [each.cuda() for each in parts(channels=3, width=width, side=side, dtype=torch.float32)]
    with torch.autocast("cuda", torch.bfloat16):
        found = block(*given, padding=1)
    assert bool(taken) == suits
    near(found, plainly(*(each.double() for each in given), 1), 0.02)
    taken.clear()
    near(block(*given, padding=1), plainly(*(each.double() for each in given), 1), 1e-3)  # TF32 may be on
    assert not taken  # full precision never takes the fused way


@gpu
def test_a_block_in_half_precision_on_a_gpu_is_near_the_plain_one():
    given = [each.cuda().requires_grad_() for each in parts(count=8, channels=3, width=32, side=(32, 32), dtype=torch.float32)]
    exact = [each.detach().double().requires_grad_() for each in given]
    with torch.autocast("cuda", torch.bfloat16):
        found = block(*given, padding=1)
    wanted = plainly(*exact, 1)
    near(found, wanted, 0.01)
    chosen = [0, 1, 3, 4]  # a bias before a norm has no slope
    some, other = ([each[place] for place in chosen] for each in (given, exact))
    for one, two in zip(
        torch.autograd.grad(found.float().square().sum(), some), torch.autograd.grad(wanted.square().sum(), other), strict=True
    ):
        near(one, two, 0.03)
