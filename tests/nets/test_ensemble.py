"""Many nets as one computation are the same nets one by one."""

import pytest
import torch
from support.ensembles import extract_convnet
from torch.nn.functional import avg_pool2d, conv2d, cross_entropy, group_norm
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from privot.nets.ensemble import Ensemble, FrozenEnsemble

NEAR = {"rtol": 1e-4, "atol": 1e-5}
SHAPE = (1, 28, 28)


def make_ensemble(shape=SHAPE, count=3, seed=0, classes=5, **more):
    generator = torch.Generator().manual_seed(seed)
    return Ensemble(count, shape, classes, generator=generator, **{"width": 4, **more})


@pytest.mark.parametrize("shape", [SHAPE, (3, 32, 32), (1, 8, 8), (3, 64, 64), (1, 12, 20)])
def test_every_net_is_the_convnet_with_its_weights(shape):
    nets = make_ensemble(shape)
    images = torch.rand(6, *shape, generator=torch.Generator().manual_seed(1))
    own = torch.rand(3, 6, *shape, generator=torch.Generator().manual_seed(2))
    scores = nets(images)
    for index in range(3):
        net = extract_convnet(nets, index)
        assert_close(scores[index], net(images), **NEAR)
        assert_close(nets(own)[index], net(own[index]), **NEAR)
        assert_close(nets.features(own)[index], net.features(own[index]), **NEAR)
    assert torch.equal(scores, nets(images.expand(3, *images.shape)))  # shared images are theirs
    index = torch.tensor([2, 0])
    assert_close(nets(images, nets.select(index)), scores[index])
    assert_close(nets.features(images, nets.select(index)), nets.features(images)[index])
    with FlopCounterMode(display=False) as counted:
        nets.features(torch.rand(7, *shape))
    assert nets.shapes.flops == counted.get_total_flops() / (3 * 7)


@pytest.mark.parametrize(
    ("shape", "width"), [((3, 32, 32), 64), (SHAPE, 4), ((1, 8, 8), 6), ((3, 3, 3), 4)]
)
def test_textures_are_features_and_products_of_channels(shape, width):
    nets = make_ensemble(shape, 2, width=width, texture_norm=0.7).requires_grad_(False)
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(1))
    extracted = nets.extract_features(images, dict(nets.named_parameters()))
    assert extracted.shape == (2, 3, nets.num_extracted_features)
    for index in range(2):
        x = images
        maps = []
        for block in range(nets.num_blocks):
            conv, bias, gain, shift = (
                nets.get_parameter(f"{name}{block}")[index]
                for name in ("conv", "bias", "gain", "shift")
            )
            x = conv2d(x, conv, bias, padding=1 if block else nets.shapes.padding)
            x = avg_pool2d(group_norm(x, width, gain, shift).relu(), 2)
            maps.append(x)
        for image in range(3):
            features = nets.features(images)[index, image]
            parts = [features / features.norm()]
            for level in maps[-2:]:
                channels = level[image, :48].flatten(1)
                products = (channels @ channels.T)[
                    torch.triu_indices(*[len(channels)] * 2).unbind()
                ]
                parts.append(0.7 * products / products.norm())
            assert_close(extracted[index, image], torch.cat(parts), rtol=1e-3, atol=1e-5)


def test_every_net_learns_as_if_alone():
    nets = make_ensemble()
    images = torch.rand(6, *SHAPE)
    labels = torch.arange(6) % 5
    cross_entropy(nets(images).flatten(0, 1), labels.repeat(3), reduction="sum").backward()
    for index in range(3):
        net = extract_convnet(nets, index)
        cross_entropy(net(images), labels, reduction="sum").backward()
        near = {"rtol": 1e-3, "atol": 1e-5}
        assert_close(nets.conv0.grad[index], net.convs[0].weight.grad, **near)
        assert_close(nets.head_weight.grad[index], net.head.weight.grad.T, **near)


def test_the_first_weights_have_the_usual_law_and_follow_from_the_seed():
    """Uniform within one over the root of the inputs, as PyTorch draws them; norms begin as the identity."""
    nets = make_ensemble((3, 32, 32), 20, classes=10, width=32)
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
    assert torch.equal(make_ensemble().conv1, make_ensemble().conv1)
    assert not torch.equal(make_ensemble().conv1, make_ensemble(seed=1).conv1)
    assert not torch.equal(make_ensemble().conv1[0], make_ensemble().conv1[1])


def test_features_of_every_block_are_means_of_its_maps():
    nets = make_ensemble()
    images = torch.rand(3, 6, *SHAPE)
    net = extract_convnet(nets, 1)
    maps = []
    x = images[1]
    for conv, norm in zip(net.convs, net.norms, strict=True):
        x = avg_pool2d(norm(conv(x)).relu(), 2)
        maps.append(x)
    assert [level.shape[-1] for level in maps] == [16, 8, 4]
    for side in (1, 2, 4):
        for pooled, level in zip(
            nets.pool_block_features(images, max_side=side), maps, strict=True
        ):
            blocks = level.unflatten(3, (side, -1)).unflatten(2, (side, -1)).mean((3, 5))
            assert_close(pooled[1], blocks.flatten(1), **NEAR)
    # No more pixels than there are.
    assert_close(nets.pool_block_features(images, max_side=9)[-1], nets.features(images))
    some = nets.select(torch.tensor([2, 1]))
    one, two = (
        nets.pool_block_features(*given, max_side=2)[0][1]
        for given in ((images[:2], some), (images[1],))
    )
    assert_close(one, two, **NEAR)


@pytest.mark.parametrize("channels_last", [False, True])
def test_half_precision_and_channels_last_change_roundings_alone(channels_last):
    nets = make_ensemble((3, 32, 32))
    images = torch.rand(3, 6, 3, 32, 32)
    expected = nets(images).detach()
    if channels_last:
        images = torch.stack([own.contiguous(memory_format=torch.channels_last) for own in images])
    with torch.autocast("cpu", torch.bfloat16):
        scores = nets(images)
        maps = nets.pool_block_features(images, max_side=4)
    assert {level.dtype for level in maps} == {torch.bfloat16}
    assert_close(scores.float(), expected, rtol=0.05, atol=0.05)
    scores.float().square().sum().backward()
    for weights in nets.parameters():
        assert weights.grad.dtype == torch.float32
        assert weights.grad.isfinite().all()


def test_images_too_small_for_a_block_are_features_themselves():
    nets = make_ensemble((1, 3, 3))
    images = torch.rand(4, 1, 3, 3)
    assert_close(nets.features(images), images.flatten(1).expand(3, 4, 9))
    assert_close(nets(images)[2], extract_convnet(nets, 2)(images))


def test_a_query_of_one_record_can_ask_for_features():
    """The gate maps a query over records; each then sees one image, which all nets share or each has augmented its own way."""
    nets = make_ensemble()
    images = torch.rand(5, *SHAPE)
    weights = nets.select(torch.arange(3))
    features = torch.func.vmap(lambda image: nets.features(image[None], weights)[:, 0])(images)
    assert_close(features.transpose(0, 1), nets.features(images), **NEAR)

    def pool(image):
        own = image.expand(3, 1, *SHAPE)
        return nets.pool_block_features(own, weights, max_side=2)[1][:, 0]

    pooled = torch.func.vmap(pool)(images)
    assert_close(pooled.transpose(0, 1), nets.pool_block_features(images, max_side=2)[1], **NEAR)


# Frozen nets, and nets that start from others


@pytest.mark.parametrize(
    "index", [slice(None), slice(1, 3), torch.tensor([2, 0]), torch.tensor([1, 1])]
)
def test_frozen_nets_give_what_they_gave(index):
    nets = make_ensemble((3, 32, 32))
    images = torch.rand(4, 3, 32, 32)
    weights = FrozenEnsemble(nets)[index]
    assert_close(nets.features(images, weights), nets.features(images)[index], **NEAR)
    assert_close(nets(images, weights), nets(images)[index], **NEAR)
    shapes = {name: value.shape[1:] for name, value in nets.named_parameters()}
    assert {name: value.shape[1:] for name, value in weights.items()} == shapes
    assert not any(value.requires_grad for value in weights.values())


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: frozen nets are in half precision on one alone",
)
def test_frozen_nets_on_a_gpu_differ_by_the_rounding_of_half_precision():
    nets = make_ensemble((3, 32, 32), width=64).cuda()
    images = torch.rand(8, 3, 32, 32).cuda()
    weights = FrozenEnsemble(nets)[:]
    assert weights["conv0"].dtype == torch.bfloat16
    rounded = nets.features(images.bfloat16(), weights).float()
    exact = nets.double().features(images.double()).float()
    assert ((rounded - exact).norm(dim=2) < 0.03 * exact.norm(dim=2)).all()


def test_copied_blocks_are_used_in_turn_and_the_last_layer_stays():
    first = make_ensemble(count=2)
    second = make_ensemble(count=5, seed=1)
    heads = second.head_weight.clone(), second.head_bias.clone()
    images = torch.rand(4, *SHAPE)
    second.copy_blocks_from(first)
    expected = first.features(images)
    assert_close(second.features(images), expected[[0, 1, 0, 1, 0]], **NEAR)
    assert torch.equal(second.head_weight, heads[0])
    assert torch.equal(second.head_bias, heads[1])
    with torch.no_grad():
        second.conv0.add_(1)  # what they learn from here on is their own
    assert_close(first.features(images), expected)
    second.copy_blocks_from(make_ensemble(count=2, classes=100))  # of other classes
    assert torch.equal(second.conv2[:3], first.conv2[[0, 1, 0]])
