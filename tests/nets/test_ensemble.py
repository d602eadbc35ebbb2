"""Many nets as one computation are the same nets one by one."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from privot.nets.convnet import ConvNet
from privot.nets.ensemble import Ensemble


def alone(nets, place):
    """The ConvNet with the weights of one net of the ensemble."""
    net = ConvNet(nets.shape, nets.classes, width=nets.width)
    state = {}
    for block in range(nets.blocks):
        for layer, names in ((4 * block, ("conv", "bias")), (4 * block + 1, ("gain", "shift"))):
            state |= {
                f"layers.{layer}.{part}": getattr(nets, f"{name}{block}")[place]
                for part, name in zip(("weight", "bias"), names, strict=True)
            }
    net.load_state_dict(state | {"head.weight": nets.head[place].T, "head.bias": nets.tail[place, 0]})
    return net


def made(shape=(1, 28, 28), count=3, seed=0):
    return Ensemble(count, shape, 5, width=4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (3, 64, 64), (1, 12, 20)])
def test_each_net_is_the_convnet_with_its_weights(shape):
    nets, images = made(shape), torch.rand(6, *shape, generator=torch.Generator().manual_seed(1))
    own = torch.rand(3, 6, *shape, generator=torch.Generator().manual_seed(2))
    for place in range(3):
        net = alone(nets, place)
        torch.testing.assert_close(nets(images)[place], net(images), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(nets(own)[place], net(own[place]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(nets.features(own)[place], net.features(own[place]), rtol=1e-4, atol=1e-5)


def test_each_net_learns_as_if_alone():
    nets, images, labels = made(), torch.rand(6, 1, 28, 28), torch.arange(6) % 5
    cross_entropy(nets(images).flatten(0, 1), labels.repeat(3), reduction="sum").backward()
    for place in range(3):
        net = alone(nets, place)
        cross_entropy(net(images), labels, reduction="sum").backward()
        torch.testing.assert_close(nets.conv0.grad[place], net.layers[0].weight.grad, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(nets.head.grad[place], net.head.weight.grad.T, rtol=1e-3, atol=1e-5)


def test_some_of_the_nets_can_be_called():
    nets, images, some = made(), torch.rand(4, 1, 28, 28), torch.tensor([2, 0])
    torch.testing.assert_close(nets(images, nets.chosen(some)), nets(images)[some])
    torch.testing.assert_close(nets.features(images, nets.chosen(some)), nets.features(images)[some])


def test_the_seed_decides_and_nets_differ():
    torch.testing.assert_close(made().conv1, made().conv1, rtol=0, atol=0)
    assert not torch.equal(made().conv1, made(seed=1).conv1)
    assert not torch.equal(made().conv1[0], made().conv1[1])


def test_the_first_weights_have_the_usual_law():
    """Uniform within one over the root of the inputs, as PyTorch draws them; norms begin as the identity."""
    nets = Ensemble(20, (3, 32, 32), 10, width=32, generator=torch.Generator().manual_seed(0))
    for weights, inputs in ((nets.conv0, 27), (nets.conv1, 288), (nets.bias1, 288), (nets.head, 512), (nets.tail, 512)):
        assert weights.abs().max().item() <= inputs**-0.5
        assert weights.std().item() == pytest.approx((3 * inputs) ** -0.5, rel=0.1)
        assert weights.mean().item() == pytest.approx(0, abs=0.2 * inputs**-0.5)
    assert (nets.gain0 == 1).all()
    assert (nets.shift0 == 0).all()
