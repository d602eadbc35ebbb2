"""The classifiers that measure: the layouts of their papers, on images of any size, with features where they are asked for."""

import pytest
import torch
from torch import nn

from privot.nets.classifiers.convnet import ConvNet
from privot.nets.classifiers.lenet import LeNet
from privot.nets.classifiers.resnet import ResNet18
from privot.nets.classifiers.vgg import VGG11

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("build", [LeNet, ConvNet, VGG11, ResNet18])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 30, 31), (1, 29, 40), (3, 5, 9)])
def test_images_of_any_size_get_a_logit_a_class(build, shape):
    net = build(shape, 7).eval()
    images = torch.rand(2, *shape)
    with torch.no_grad():
        logits = net(images)
        assert logits.shape == (2, 7)
        assert logits.isfinite().all()
        if build in (ConvNet, VGG11):
            assert torch.allclose(net.head(net.features(images)), logits)


@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_tiny_images_get_fewer_blocks(side):
    net = ConvNet((1, side, side), 3)
    assert net(torch.rand(2, 1, side, side)).shape == (2, 3)
    assert sum(isinstance(layer, nn.Conv2d) for layer in net.convs) == (side == 4)


@pytest.mark.parametrize(
    ("build", "shape", "count"),
    [
        (LeNet, (1, 28, 28), 61_706),  # LeNet-5
        (ConvNet, (1, 28, 28), 317_706),  # ConvNet3 of the condensation papers: 320,010 in colour
        (VGG11, (3, 32, 32), 9_231_114 - 2752),  # VGG11-BN without biases before a batch norm
        (ResNet18, (3, 32, 32), 11_173_962),  # with a 3x3 stem
    ],
)
def test_sizes_are_those_of_the_papers(build, shape, count):
    assert sum(weights.numel() for weights in build(shape, 10).parameters()) == count


def test_a_convnet_normalises_each_image_alone():
    net = ConvNet((1, 8, 8), 3).eval()
    images = torch.rand(4, 1, 8, 8)
    with torch.no_grad():
        assert torch.allclose(net(images)[:1], net(images[:1]), atol=1e-6)
    norms = [layer for layer in net.modules() if isinstance(layer, nn.GroupNorm)]
    assert all(norm.num_groups == norm.num_channels for norm in norms)


def test_a_shortcut_is_the_input_itself_where_the_size_stays():
    blocks = [layer for layer in ResNet18((1, 8, 8), 2).layers if hasattr(layer, "shortcut")]
    is_identity = [isinstance(block.shortcut, nn.Identity) for block in blocks]
    assert is_identity == [True, True, *[False, True] * 3]
    block = blocks[0].eval()
    images = torch.rand(1, 64, 4, 4)
    for weights in block.body.parameters():
        nn.init.zeros_(weights)
    assert torch.allclose(block(images), images, atol=1e-6)
