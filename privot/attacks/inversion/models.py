"""The nets that the papers attack: LeNet of DLG and iDLG, CNN6 of R-GAP; and fresh weights for many of them at once."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

LENET_REACH = 0.5  # of DLG: every weight and bias ~ U(-0.5, 0.5)


def lenet(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """LeNet of Zhu et al. (2019): three convolutions of 12 filters with sigmoids, strides 2, 2, 1, no pooling, biases everywhere.

    >>> sum(each.numel() for each in lenet((1, 28, 28), 10).parameters()), sum(each.numel() for each in lenet((3, 32, 32), 10).parameters())
    (13426, 15826)
    """
    layers: dict[str, nn.Module] = {}
    channels = shape[0]
    for number, stride in enumerate((2, 2, 1), 1):
        layers |= {
            f"conv{number}": nn.Conv2d(channels, 12, 5, stride, 2),
            f"sigmoid{number}": nn.Sigmoid(),
        }
        channels = 12
    return _ended(layers, shape, classes, bias=True)


def cnn6(shape: tuple[int, int, int], classes: int = 1) -> nn.Sequential:
    """CNN6 of Zhu and Blaschko (2021): six convolutions without biases, LeakyReLU 0.2; one logit for the `logistic` loss, or classes.

    >>> cnn6((3, 32, 32))(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 1])
    """
    layers: dict[str, nn.Module] = {}
    channels = shape[0]
    for number, (out, side, pad, stride) in enumerate(
        ((12, 4, 2, 2), (36, 3, 1, 2), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 1, 2), (128, 3, 1, 1)),
        1,
    ):
        layers |= {
            f"conv{number}": nn.Conv2d(channels, out, side, stride, pad, bias=False),
            f"leaky{number}": nn.LeakyReLU(0.2),
        }
        channels = out
    return _ended(layers, shape, classes, bias=False)


def _ended(
    layers: dict[str, nn.Module], shape: tuple[int, int, int], classes: int, bias: bool
) -> nn.Sequential:
    with torch.no_grad():
        width = nn.Sequential(*layers.values())(torch.zeros(1, *shape)).numel()
    return nn.Sequential(
        OrderedDict(layers | {"flat": nn.Flatten(), "dense": nn.Linear(width, classes, bias=bias)})
    )


def logistic(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Mean of log(1 + e^{-t u}) over one logit u [batch, 1] an image; t = 1 for label 1, -1 for 0; or probabilities of both [batch, 2].

    >>> logistic(torch.zeros(1, 1), torch.tensor([1]))
    tensor(0.6931)
    """
    chance = labels[:, 1] if labels.ndim == 2 else labels.to(logits.dtype)
    return functional.binary_cross_entropy_with_logits(logits[:, 0], chance)


def drawn(
    net: nn.Module, count: int, generator: torch.Generator, reach: float | None = None
) -> dict[str, Tensor]:
    """Weights {name: [count, ...]} of so many fresh nets: U(-reach, reach), or within 1/sqrt(inputs of a neuron), PyTorch's own choice.

    >>> {name: list(each.shape) for name, each in drawn(nn.Linear(2, 3), 5, torch.Generator()).items()}
    {'weight': [5, 3, 2], 'bias': [5, 3]}
    """
    fans = {
        f"{name}.".lstrip("."): each.weight[0].numel()
        for name, each in net.named_modules()
        if isinstance(each, nn.Conv2d | nn.Linear)
    }
    found = {}
    for name, each in net.named_parameters():
        fan = fans.get(
            name.removesuffix("weight").removesuffix("bias"),
            each[0].numel() if each.ndim > 1 else each.numel(),
        )
        size = reach if reach is not None else 1 / math.sqrt(fan)
        found[name] = (
            torch.rand(count, *each.shape, generator=generator, device=generator.device) * 2 - 1
        ) * size
    return found


Made = tuple[
    Callable[..., nn.Sequential], Callable[[Tensor, Tensor], Tensor], float | None
]  # net, its loss, reach of fresh weights
NETS: dict[str, Made] = {
    "lenet": (lenet, functional.cross_entropy, LENET_REACH),
    "cnn6": (cnn6, logistic, None),
}
