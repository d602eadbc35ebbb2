"""Many nets as one computation are the same nets one by one."""

import pytest
import torch
from torch.nn.functional import avg_pool2d, conv2d, cross_entropy, group_norm
from torch.utils.flop_counter import FlopCounterMode

from privot.nets.classifiers.convnet import ConvNet
from privot.nets.ensemble import Ensemble, FrozenEnsemble


def alone(nets, place):
    """The ConvNet with the weights of one net of the ensemble."""
    net = ConvNet(nets.shapes.shape, nets.classes, nets.shapes.width)
    state = {}
    for number in range(nets.num_blocks):
        for layer, names in (("convs", ("conv", "bias")), ("norms", ("gain", "shift"))):
            state |= {
                f"{layer}.{number}.{part}": getattr(nets, f"{name}{number}")[place]
                for part, name in zip(("weight", "bias"), names, strict=True)
            }
    net.load_state_dict(
        state | {"head.weight": nets.head_weight[place].T, "head.bias": nets.head_bias[place, 0]}
    )
    return net


def made(shape=(1, 28, 28), count=3, seed=0):
    return Ensemble(count, shape, 5, width=4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (3, 64, 64), (1, 12, 20)])
def test_each_net_is_the_convnet_with_its_weights(shape):
    nets = made(shape)
    images = torch.rand(6, *shape, generator=torch.Generator().manual_seed(1))
    own = torch.rand(3, 6, *shape, generator=torch.Generator().manual_seed(2))
    for place in range(3):
        net = alone(nets, place)
        torch.testing.assert_close(nets(images)[place], net(images), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(nets(own)[place], net(own[place]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            nets.features(own)[place], net.features(own[place]), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("shape", "width"), [((3, 32, 32), 64), ((1, 28, 28), 4), ((1, 8, 8), 6), ((3, 3, 3), 4)]
)
def test_what_is_seen_with_textures_is_features_and_products_of_channels(shape, width):
    nets = Ensemble(
        2, shape, 5, width, texture_norm=0.7, generator=torch.Generator().manual_seed(0)
    ).requires_grad_(False)
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(1))
    found = nets.extract_features(images, dict(nets.named_parameters()))
    assert found.shape == (2, 3, nets.num_extracted_features)
    for place in range(2):
        x = images
        maps = []
        for number in range(nets.num_blocks):
            conv, bias, gain, shift = (
                nets.get_parameter(f"{name}{number}")[place]
                for name in ("conv", "bias", "gain", "shift")
            )
            x = conv2d(x, conv, bias, padding=nets.shapes.padding if number == 0 else 1)
            x = avg_pool2d(group_norm(x, width, gain, shift).relu(), 2)
            maps.append(x)
        for image in range(3):
            wanted = [nets.features(images)[place, image]]
            for each in maps[-2:]:
                some = [channel.flatten() for channel in each[image, :48]]
                wanted.append(
                    torch.stack([one @ two for turn, one in enumerate(some) for two in some[turn:]])
                )
            weighted = [
                (0.7 if turn else 1.0) * part / part.norm() for turn, part in enumerate(wanted)
            ]
            torch.testing.assert_close(
                found[place, image], torch.cat(weighted), rtol=1e-3, atol=1e-5
            )


def test_each_net_learns_as_if_alone():
    nets = made()
    images = torch.rand(6, 1, 28, 28)
    labels = torch.arange(6) % 5
    cross_entropy(nets(images).flatten(0, 1), labels.repeat(3), reduction="sum").backward()
    for place in range(3):
        net = alone(nets, place)
        cross_entropy(net(images), labels, reduction="sum").backward()
        torch.testing.assert_close(
            nets.conv0.grad[place], net.convs[0].weight.grad, rtol=1e-3, atol=1e-5
        )
        torch.testing.assert_close(
            nets.head_weight.grad[place], net.head.weight.grad.T, rtol=1e-3, atol=1e-5
        )


def test_some_of_the_nets_can_be_called():
    nets = made()
    images = torch.rand(4, 1, 28, 28)
    some = torch.tensor([2, 0])
    torch.testing.assert_close(nets(images, nets.select(some)), nets(images)[some])
    torch.testing.assert_close(
        nets.features(images, nets.select(some)), nets.features(images)[some]
    )


def test_the_seed_decides_and_nets_differ():
    torch.testing.assert_close(made().conv1, made().conv1, rtol=0, atol=0)
    assert not torch.equal(made().conv1, made(seed=1).conv1)
    assert not torch.equal(made().conv1[0], made().conv1[1])


def test_the_first_weights_have_the_usual_law():
    """Uniform within one over the root of the inputs, as PyTorch draws them; norms begin as the identity."""
    nets = Ensemble(20, (3, 32, 32), 10, width=32, generator=torch.Generator().manual_seed(0))
    for weights, inputs in (
        (nets.conv0, 27),
        (nets.conv1, 288),
        (nets.bias1, 288),
        (nets.head_weight, 512),
        (nets.head_bias, 512),
    ):
        assert weights.abs().max().item() <= inputs**-0.5
        assert weights.std().item() == pytest.approx((3 * inputs) ** -0.5, rel=0.1)
        assert weights.mean().item() == pytest.approx(0, abs=0.2 * inputs**-0.5)
    assert (nets.gain0 == 1).all()
    assert (nets.shift0 == 0).all()


def test_shared_images_are_each_nets_own_images():
    nets = made((1, 8, 8))
    images = torch.rand(5, 1, 8, 8)
    assert torch.equal(nets(images), nets(images.expand(3, *images.shape)))


def test_every_block_can_be_asked_for():
    nets = made()
    images = torch.rand(3, 6, 1, 28, 28)
    walk = alone(nets, 1)
    maps = []
    x = images[1]
    for conv, norm in zip(walk.convs, walk.norms, strict=True):
        x = avg_pool2d(norm(conv(x)).relu(), 2)
        maps.append(x)
    assert [each.shape[-1] for each in maps] == [16, 8, 4]
    for side in (1, 2, 4):
        for level, wanted in zip(
            nets.pool_block_features(images, max_side=side), maps, strict=True
        ):
            blocks = wanted.unflatten(3, (side, -1)).unflatten(2, (side, -1)).mean((3, 5))
            torch.testing.assert_close(level[1], blocks.flatten(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        nets.pool_block_features(images, max_side=9)[-1], nets.features(images)
    )  # no more places than there are
    some = nets.select(torch.tensor([2, 1]))
    torch.testing.assert_close(
        nets.pool_block_features(images[:2], some, max_side=2)[0][1],
        nets.pool_block_features(images[1], max_side=2)[0][1],
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("last", [False, True])
def test_half_precision_and_channels_last_change_roundings_alone(last):
    nets = made((3, 32, 32))
    images = torch.rand(3, 6, 3, 32, 32)
    wanted = nets(images).detach()
    shown = images
    if last:
        shown = torch.stack([each.contiguous(memory_format=torch.channels_last) for each in images])
    with torch.autocast("cpu", torch.bfloat16):
        found = nets(shown)
        maps = nets.pool_block_features(shown, max_side=4)
    assert {each.dtype for each in maps} == {torch.bfloat16}
    torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)
    found.float().square().sum().backward()
    assert all(
        each.grad.dtype == torch.float32 and each.grad.isfinite().all()
        for each in nets.parameters()
    )


def test_images_too_small_for_a_block_are_features_themselves():
    nets = made((1, 3, 3))
    images = torch.rand(4, 1, 3, 3)
    torch.testing.assert_close(nets.features(images), images.flatten(1).expand(3, 4, 9))
    torch.testing.assert_close(nets(images)[2], alone(nets, 2)(images))


def test_a_query_of_one_record_can_ask_for_features():
    """The gate maps a query over records; each then sees one image, which all nets share or each has augmented its own way."""
    nets = made()
    images = torch.rand(5, 1, 28, 28)
    weights = nets.select(torch.arange(3))
    found = torch.func.vmap(lambda image: nets.features(image[None], weights)[:, 0])(images)
    torch.testing.assert_close(found.transpose(0, 1), nets.features(images), rtol=1e-4, atol=1e-5)
    found = torch.func.vmap(
        lambda image: nets.pool_block_features(image.expand(3, 1, 1, 28, 28), weights, max_side=2)[
            1
        ][:, 0]
    )(images)
    torch.testing.assert_close(
        found.transpose(0, 1), nets.pool_block_features(images, max_side=2)[1], rtol=1e-4, atol=1e-5
    )


# Nets that no longer change, nets that go on from others, and what a net costs


@pytest.mark.parametrize(
    "index", [slice(None), slice(1, 3), torch.tensor([2, 0]), torch.tensor([1, 1])]
)
def test_frozen_nets_see_what_they_saw(index):
    nets = made((3, 32, 32))
    images = torch.rand(4, 3, 32, 32)
    weights = FrozenEnsemble(nets)[index]
    torch.testing.assert_close(
        nets.features(images, weights), nets.features(images)[index], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(nets(images, weights), nets(images)[index], rtol=1e-4, atol=1e-5)
    assert {name: value.shape[1:] for name, value in weights.items()} == {
        name: each.shape[1:] for name, each in nets.named_parameters()
    }
    assert not any(each.requires_grad for each in weights.values())


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: frozen nets are in half precision on one alone",
)
def test_frozen_nets_on_a_gpu_differ_by_the_rounding_of_half_precision():
    nets = Ensemble(3, (3, 32, 32), 5, width=64, generator=torch.Generator().manual_seed(0)).cuda()
    images = torch.rand(8, 3, 32, 32).cuda()
    weights = FrozenEnsemble(nets)[:]
    assert weights["conv0"].dtype == torch.bfloat16
    found = nets.features(images.bfloat16(), weights).float()
    wanted = nets.double().features(images.double()).float()
    assert ((found - wanted).norm(dim=2) < 0.03 * wanted.norm(dim=2)).all()


def test_followers_take_over_blocks_in_turn_and_keep_their_last_layer():
    first = made(count=2)
    second = made(count=5, seed=1)
    heads = second.head_weight.clone(), second.head_bias.clone()
    images = torch.rand(4, 1, 28, 28)
    second.copy_blocks_from(first)
    wanted = first.features(images)
    for place in range(5):
        torch.testing.assert_close(
            second.features(images)[place], wanted[place % 2], rtol=1e-4, atol=1e-5
        )
    assert torch.equal(second.head_weight, heads[0])
    assert torch.equal(second.head_bias, heads[1])
    with torch.no_grad():
        second.conv0.add_(1)  # what they learn from here on is their own
    torch.testing.assert_close(first.features(images), wanted)


def test_nets_may_follow_some_that_told_other_classes_apart():
    first = Ensemble(2, (1, 28, 28), 100, width=4, generator=torch.Generator().manual_seed(0))
    second = made(count=3)
    second.copy_blocks_from(first)
    assert torch.equal(second.conv2, first.conv2[[0, 1, 0]])


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (1, 12, 20)])
def test_work_is_what_a_profiler_counts(shape):
    nets = made(shape)
    with FlopCounterMode(display=False) as counted:
        nets.features(torch.rand(7, *shape))
    assert nets.shapes.flops == counted.get_total_flops() / (3 * 7)
