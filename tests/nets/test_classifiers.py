"""The classifiers that measure: the layouts of their papers, on images of any size, with features where they are asked for."""

import pytest
import torch
from torch import nn

from privot.nets.classifiers.convnet import ConvNet
from privot.nets.classifiers.lenet import LeNet
from privot.nets.classifiers.resnet import ResNet18
from privot.nets.classifiers.vgg import VGG11

pytestmark = pytest.mark.usefixtures("one_thread")


def size(net):
    return sum(each.numel() for each in net.parameters())


@pytest.mark.parametrize("build", [LeNet, ConvNet, VGG11, ResNet18])
@pytest.mark.parametrize(
    "shape", [(1, 8, 8), (1, 28, 28), (3, 30, 31), (3, 32, 32), (1, 29, 40), (3, 5, 9)]
)
def test_images_of_any_size_get_a_logit_a_class(build, shape):
    net = build(shape, 7).eval()
    with torch.no_grad():
        found = net(torch.rand(2, *shape))
        assert found.shape == (2, 7)
        assert found.isfinite().all()
        if build in (ConvNet, VGG11):
            assert torch.allclose(
                net.head(net.features(torch.ones(2, *shape))), net(torch.ones(2, *shape))
            )


@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_tiny_images_get_fewer_blocks(side):
    net = ConvNet((1, side, side), 3)
    assert net(torch.rand(2, 1, side, side)).shape == (2, 3)
    assert sum(isinstance(each, nn.Conv2d) for each in net.convs) == (1 if side == 4 else 0)


def test_sizes_are_those_of_the_papers():
    assert size(LeNet((1, 28, 28), 10)) == 61_706  # LeNet-5
    assert (
        size(ConvNet((1, 28, 28), 10)) == 317_706
    )  # ConvNet3 of the condensation papers: 320,010 in colour
    assert (
        size(VGG11((3, 32, 32), 10)) == 9_231_114 - 2752
    )  # VGG11-BN, whose convolutions need no bias before a batch norm
    assert size(ResNet18((3, 32, 32), 10)) == 11_173_962  # with a 3x3 stem


def test_a_convnet_normalises_each_image_alone():
    net = ConvNet((1, 8, 8), 3).eval()
    images = torch.rand(4, 1, 8, 8)
    with torch.no_grad():
        assert torch.allclose(net(images)[:1], net(images[:1]), atol=1e-6)
    assert all(
        each.num_groups == each.num_channels
        for each in net.modules()
        if isinstance(each, nn.GroupNorm)
    )


def test_a_shortcut_is_the_input_itself_where_the_size_stays():
    blocks = [each for each in ResNet18((1, 8, 8), 2).layers if hasattr(each, "shortcut")]
    assert [isinstance(each.shortcut, nn.Identity) for each in blocks] == [
        True,
        True,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    block = blocks[0].eval()
    images = torch.rand(1, 64, 4, 4)
    for each in block.body.parameters():
        nn.init.zeros_(each)
    assert torch.allclose(block(images), images, atol=1e-6)
