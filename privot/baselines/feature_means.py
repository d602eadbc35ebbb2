"""Mean features of classes in random networks, which distribution matching (DM) compares."""

from __future__ import annotations

import torch
from torch import Tensor

from privot.data.spec import Spec
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.conv_block import choose_compute_dtype

# From noise, more steps than these do not move the images further, so the learning rate decreases.
FULL_RATE_STEPS = 2500
LARGE_SET = 50  # images per class above which real images need a larger rate


def build_random_net(spec: Spec, net_width: int, net_depth: int, device: torch.device) -> ConvNet:
    """Build a ConvNet that is never trained; on a GPU in bfloat16.

    Args:
        spec: Shape and number of classes.
        net_width: Channels of each block.
        net_depth: Number of blocks.
        device: Where to compute.

    Returns:
        The network.
    """
    net = ConvNet(spec.shape, spec.num_classes, net_width, net_depth)
    net.to(device).requires_grad_(False)
    if choose_compute_dtype(device) is torch.bfloat16:
        net.to(torch.bfloat16)
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net


def extract_features(net: ConvNet, images: Tensor, chunk_size: int) -> Tensor:
    """Extract features in chunks.

    Args:
        net: The network.
        images: Standardized images [count, ...].
        chunk_size: Images at a time.

    Returns:
        Features [count, features], in float32 in any precision of the network.
    """
    images = images.to(net.head.weight.dtype)
    return torch.cat([net.features(chunk) for chunk in images.split(chunk_size)]).float()


def compute_class_means(net: ConvNet, images: Tensor, weights: Tensor, chunk_size: int) -> Tensor:
    """Compute the weighted mean features of each class.

    Args:
        net: The network.
        images: Standardized images [classes * batch, ...].
        weights: Weights [classes, batch].
        chunk_size: Images at a time.

    Returns:
        Means [classes, features].
    """
    features = extract_features(net, images, chunk_size).view(*weights.shape, -1)
    return (weights[:, None] @ features).squeeze(1)


def compute_class_mean_distance(
    net: ConvNet, real: Tensor, weights: Tensor, images: Tensor, chunk_size: int
) -> Tensor:
    """Compute the squared distance of the class means, summed over classes.

    Args:
        net: The network.
        real: Standardized records [classes * batch, ...], constants.
        weights: Their weights [classes, batch].
        images: Standardized images of the set [classes * images_per_class, ...].
        chunk_size: Records at a time.

    Returns:
        The distance, a scalar.
    """
    with torch.no_grad():
        target_means = compute_class_means(net, real, weights, chunk_size)
    num_classes = len(weights)
    equal_weights = weights.new_full(
        (num_classes, len(images) // num_classes), num_classes / len(images)
    )
    set_means = compute_class_means(net, images, equal_weights, len(images))
    return (target_means - set_means).square().sum()


def choose_dm_learning_rate(init: str, images_per_class: int, steps: int) -> float:
    """Choose the learning rate of DM.

    Args:
        init: "real" for 1, or 10 above 50 images per class (Zhao and Bilen); "random" for the
            images per class (Dong et al.), less in long runs.
        images_per_class: Images of each class.
        steps: Number of steps.

    Returns:
        The learning rate.

    >>> choose_dm_learning_rate("random", 40, 1000), choose_dm_learning_rate("random", 40, 20_000)
    (40.0, 5.0)
    >>> choose_dm_learning_rate("real", 50, 20_000), choose_dm_learning_rate("real", 100, 20_000)
    (1.0, 10.0)
    """
    if init == "random":
        return images_per_class * min(1.0, FULL_RATE_STEPS / steps)
    return 1.0 if images_per_class <= LARGE_SET else 10.0
