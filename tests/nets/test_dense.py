"""The dense generator: a smooth one begins, and stays, where its pixels can still learn."""

import pytest
import torch

from privot.nets import DenseGenerator, initialize_weights
from privot.nets.generators.dense import generator_config, scaled_dct_basis

SHAPE = (3, 32, 32)


def make_images(net, count=256):
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(count, net.latent_dim, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        return net(codes, torch.arange(count) % net.classes)


@pytest.fixture
def nets():
    """Without and with smoothness, of the same weights."""
    return [
        initialize_weights(
            DenseGenerator(
                SHAPE, 2, latent_dim=8, hidden_dim=64, num_frequencies=12, smooth=smooth
            ).double(),
            torch.Generator().manual_seed(0),
        ).train()
        for smooth in (False, True)
    ]


def test_a_smooth_net_begins_where_a_sigmoid_has_a_gradient(nets):
    rough, smooth = (
        ((images < 0.01) | (images > 0.99)).double().mean((1, 2, 3))
        for images in map(make_images, nets)
    )
    assert smooth.max() < 0.1
    assert rough.mean() > 0.2


def test_a_smooth_net_draws_the_same_cosines_smaller_by_their_frequency(nets):
    for net in nets:  # or a rough one's pixels are white to the last digit
        net.layers[-1].weight.data.mul_(0.05)
    basis = scaled_dct_basis(32, 12).double() / 32
    rough, smooth = (basis.T @ make_images(net).logit() @ basis for net in nets)
    square = torch.arange(12)[:, None].square() + torch.arange(12).square()
    torch.testing.assert_close(smooth, rough / (1 + square), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("channels", "smooth"), [(1, False), (3, True)])
def test_colour_is_drawn_smoothly(channels, smooth):
    sizes = {"latent_dim": 3, "hidden_dim": 8, "num_frequencies": 4}
    name, arguments = generator_config("dense", (channels, 8, 8), 2, **sizes)
    assert (name, arguments["smooth"]) == ("DenseGenerator", smooth)
    assert generator_config("conv", (channels, 8, 8), 2, **sizes)[0] == "ConvGenerator"
