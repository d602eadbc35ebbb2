"""The dense generator: a smooth one begins, and stays, where its pixels can still be taught."""

import pytest
import torch

from privot.nets import DenseGenerator, initialize_weights
from privot.nets.generators.dense import generator_config, scaled_dct_basis

SHAPE = (3, 32, 32)


def drawn(net, count=256):
    codes = torch.randn(
        count, net.latent_dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    with torch.no_grad():
        return net(codes, torch.arange(count) % net.classes)


def begun(smooth):
    made = DenseGenerator(
        SHAPE, classes=2, latent_dim=8, hidden_dim=64, num_frequencies=12, smooth=smooth
    ).double()
    return initialize_weights(made, torch.Generator().manual_seed(0)).train()


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
    waves = scaled_dct_basis(32, 12).double() / 32
    rough, smooth = (waves.T @ each @ waves for each in (rough, smooth))
    square = torch.arange(12)[:, None].square() + torch.arange(12).square()
    torch.testing.assert_close(smooth, rough / (1 + square), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("channels", "smooth"), [(1, False), (3, True)])
def test_colour_is_drawn_smoothly(channels, smooth):
    name, arguments = generator_config(
        "dense", (channels, 8, 8), 2, latent_dim=3, hidden_dim=8, num_frequencies=4
    )
    assert (name, arguments["smooth"]) == ("DenseGenerator", smooth)
    assert (
        generator_config(
            "conv", (channels, 8, 8), 2, latent_dim=3, hidden_dim=8, num_frequencies=4
        )[0]
        == "ConvGenerator"
    )
