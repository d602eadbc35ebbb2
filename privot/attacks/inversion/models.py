"""The models that the papers attack, LeNet of DLG and iDLG and CNN6 of R-GAP, and their weights."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

LENET_INIT_BOUND = 0.5  # of DLG: every weight and bias ~ U(-0.5, 0.5)
LENET_STRIDES = (2, 2, 1)
LENET_CHANNELS = 12
# (output channels, kernel size, padding, stride)
CNN6_LAYERS = (
    (12, 4, 2, 2),
    (36, 3, 1, 2),
    (36, 3, 1, 1),
    (36, 3, 1, 1),
    (64, 3, 1, 2),
    (128, 3, 1, 1),
)


def lenet(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Build LeNet of Zhu et al. (2019): three convolutions with sigmoids and biases, no pooling.

    >>> sum(parameter.numel() for parameter in lenet((1, 28, 28), 10).parameters())
    13426
    >>> sum(parameter.numel() for parameter in lenet((3, 32, 32), 10).parameters())
    15826
    """
    layers: dict[str, nn.Module] = {}
    channels = shape[0]
    for number, stride in enumerate(LENET_STRIDES, 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, LENET_CHANNELS, 5, stride, 2)
        layers[f"sigmoid{number}"] = nn.Sigmoid()
        channels = LENET_CHANNELS
    return _append_classifier(layers, shape, classes, bias=True)


def cnn6(shape: tuple[int, int, int], classes: int = 1) -> nn.Sequential:
    """Build CNN6 of Zhu and Blaschko (2021): six convolutions with LeakyReLU 0.2, without biases.

    One class gives one logit, for `compute_logistic_loss`.

    >>> cnn6((3, 32, 32))(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 1])
    """
    layers: dict[str, nn.Module] = {}
    channels = shape[0]
    for number, (out_channels, kernel_size, padding, stride) in enumerate(CNN6_LAYERS, 1):
        layers[f"conv{number}"] = nn.Conv2d(
            channels, out_channels, kernel_size, stride, padding, bias=False
        )
        layers[f"leaky{number}"] = nn.LeakyReLU(0.2)
        channels = out_channels
    return _append_classifier(layers, shape, classes, bias=False)


def _append_classifier(
    layers: dict[str, nn.Module], shape: tuple[int, int, int], classes: int, bias: bool
) -> nn.Sequential:
    """Append a linear layer.

    Args:
        layers: The layers before it, by name.
        shape: (channels, height, width) of an image.
        classes: Outputs of the linear layer.
        bias: Whether it has a bias.

    Returns:
        The model.
    """
    with torch.no_grad():
        num_features = nn.Sequential(*layers.values())(torch.zeros(1, *shape)).numel()
    dense = nn.Linear(num_features, classes, bias=bias)
    return nn.Sequential(OrderedDict(layers | {"flat": nn.Flatten(), "dense": dense}))


def compute_logistic_loss(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Compute the mean of log(1 + e^{-t u}) over logits u [batch, 1].

    t is 1 for label 1, and -1 for label 0. Labels are [batch], or probabilities [batch, 2] of both.

    >>> compute_logistic_loss(torch.zeros(1, 1), torch.tensor([1]))
    tensor(0.6931)
    """
    probability = labels[:, 1] if labels.ndim == 2 else labels.to(logits.dtype)
    return functional.binary_cross_entropy_with_logits(logits[:, 0], probability)


def sample_initial_weights(
    model: nn.Module, count: int, generator: torch.Generator, init_bound: float | None = None
) -> dict[str, Tensor]:
    """Sample the weights of untrained models from U(-b, b).

    Args:
        model: The architecture.
        count: Number of models.
        generator: Random generator of the random numbers.
        init_bound: b. None: 1/sqrt(inputs of a neuron), as PyTorch does.

    Returns:
        {name: [count, ...]}.

    >>> weights = sample_initial_weights(nn.Linear(2, 3), 5, torch.Generator())
    >>> {name: list(weight.shape) for name, weight in weights.items()}
    {'weight': [5, 3, 2], 'bias': [5, 3]}
    """
    fan_ins = {
        f"{name}.".lstrip("."): module.weight[0].numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    }
    weights = {}
    for name, parameter in model.named_parameters():
        fan_in = fan_ins.get(
            name.removesuffix("weight").removesuffix("bias"),
            parameter[0].numel() if parameter.ndim > 1 else parameter.numel(),
        )
        bound = init_bound if init_bound is not None else 1 / math.sqrt(fan_in)
        uniform = torch.rand(count, *parameter.shape, generator=generator, device=generator.device)
        weights[name] = (uniform * 2 - 1) * bound
    return weights


# the model, its loss, and the bound of its initial weights
ModelEntry = tuple[Callable[..., nn.Sequential], Callable[[Tensor, Tensor], Tensor], float | None]
INVERSION_MODELS: dict[str, ModelEntry] = {
    "lenet": (lenet, functional.cross_entropy, LENET_INIT_BOUND),
    "cnn6": (cnn6, compute_logistic_loss, None),
}
