"""The dense generator: a smooth one begins, and stays, where its pixels can still be taught."""

import pytest
import torch

from privot.nets import DenseGenerator, initialise
from privot.nets.generators.dense import cosines, described

SHAPE = (3, 32, 32)


def drawn(net, count=256):
    codes = torch.randn(
        count, net.code, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    with torch.no_grad():
        return net(codes, torch.arange(count) % net.classes)


def begun(smooth):
    made = DenseGenerator(SHAPE, classes=2, code=8, hidden=64, waves=12, smooth=smooth).double()
    return initialise(made, torch.Generator().manual_seed(0)).train()


def at_an_end(images):
    """Of each picture how many of its values are black or white: [count]."""
    return ((images < 0.01) | (images > 0.99)).double().mean((1, 2, 3))


def test_a_smooth_net_begins_where_a_sigmoid_has_a_slope():
    assert at_an_end(drawn(begun(True))).max() < 0.1
    assert at_an_end(drawn(begun(False))).mean() > 0.2


def test_a_smooth_net_draws_the_same_waves_smaller_by_their_frequency():
    nets = [begun(each) for each in (False, True)]
    for net in nets:
        net.layers[-1].weight.data.mul_(
            0.05
        )  # or a rough one's pixels are white to the last digit, and say no more what they were of
    rough, smooth = (drawn(net).logit() for net in nets)
    waves = cosines(32, 12).double() / 32
    rough, smooth = (waves.T @ each @ waves for each in (rough, smooth))
    square = torch.arange(12)[:, None].square() + torch.arange(12).square()
    torch.testing.assert_close(smooth, rough / (1 + square), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("channels", "smooth"), [(1, False), (3, True)])
def test_colour_is_drawn_smoothly(channels, smooth):
    name, arguments = described("dense", (channels, 8, 8), 2, code=3, hidden=8, waves=4)
    assert (name, arguments["smooth"]) == ("DenseGenerator", smooth)
    assert described("conv", (channels, 8, 8), 2, code=3, hidden=8, waves=4)[0] == "ConvGenerator"
