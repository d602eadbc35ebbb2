"""Networks that several methods share, and how they are trained.

A release stores the name of one class of `GENERATORS` and its arguments. Loading a release
therefore runs no code that comes with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from privot.nets.autoencoders import ConvAutoencoder, ConvAutoencoderGenerator
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.classifiers.lenet import LeNet
from privot.nets.classifiers.resnet import ResNet18
from privot.nets.classifiers.vgg import VGG11
from privot.nets.dp_autoencoder import Autoencoder, AutoencoderGenerator
from privot.nets.dp_critic import PrivateCritic
from privot.nets.ema import EmaTrainer
from privot.nets.ensemble import Ensemble, FrozenEnsemble
from privot.nets.functional_critic import Critic
from privot.nets.generators.conv import ConvGenerator, initialize_weights
from privot.nets.generators.dcgan import DcganGenerator, ProjectionCritic
from privot.nets.generators.dense import DenseGenerator, generator_config
from privot.nets.generators.residual import ResidualGenerator
from privot.nets.generators.tabular import TabularGenerator
from privot.nets.tiny_generator import TinyGenerator
from privot.nets.training import Classifier, Recipe, train_classifier, train_ensemble

# Every generator class that a release may name.
GENERATORS: dict[str, type[nn.Module]] = {
    "AutoencoderGenerator": AutoencoderGenerator,
    "ConvAutoencoderGenerator": ConvAutoencoderGenerator,
    "ConvGenerator": ConvGenerator,
    "DcganGenerator": DcganGenerator,
    "DenseGenerator": DenseGenerator,
    "ResidualGenerator": ResidualGenerator,
    "TabularGenerator": TabularGenerator,
}


def flops_per_image(name: str, arguments: dict[str, Any]) -> int:
    """Count the floating-point operations that a generator needs for one image.

    The network runs on the meta device: only shapes are computed.

    Args:
        name: Name of the generator class in `GENERATORS`.
        arguments: Arguments of its constructor.

    Returns:
        The number of floating-point operations.

    >>> arguments = {"shape": [1, 28, 28], "classes": 10, "latent_dim": 16, "channels": 64}
    >>> flops_per_image("DcganGenerator", arguments)
    232766464
    """
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        generator = GENERATORS[name](**arguments).eval()
        generator(torch.zeros(1, arguments["latent_dim"]), torch.zeros(1, dtype=torch.int64))
    return counter.get_total_flops()


__all__ = [
    "GENERATORS",
    "VGG11",
    "Autoencoder",
    "AutoencoderGenerator",
    "Classifier",
    "ConvAutoencoder",
    "ConvAutoencoderGenerator",
    "ConvGenerator",
    "ConvNet",
    "Critic",
    "DcganGenerator",
    "DenseGenerator",
    "EmaTrainer",
    "Ensemble",
    "FrozenEnsemble",
    "LeNet",
    "PrivateCritic",
    "ProjectionCritic",
    "Recipe",
    "ResNet18",
    "ResidualGenerator",
    "TabularGenerator",
    "TinyGenerator",
    "flops_per_image",
    "generator_config",
    "initialize_weights",
    "train_classifier",
    "train_ensemble",
]
