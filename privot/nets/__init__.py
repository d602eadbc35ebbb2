"""Networks that several methods share. A release names one of these and its arguments, so that loading runs no foreign code."""

from privot.nets.convolutional import ConvGenerator, initialise
from privot.nets.deep_convolutional import DeepConvGenerator
from privot.nets.dense import DenseGenerator
from privot.nets.lenet import LeNet
from privot.nets.private_critic import DecodedGenerator
from privot.nets.residual import ResidualGenerator

NETS = {
    "ConvGenerator": ConvGenerator,
    "DecodedGenerator": DecodedGenerator,
    "DeepConvGenerator": DeepConvGenerator,
    "DenseGenerator": DenseGenerator,
    "ResidualGenerator": ResidualGenerator,
}

__all__ = ["NETS", "ConvGenerator", "DecodedGenerator", "DeepConvGenerator", "DenseGenerator", "LeNet", "ResidualGenerator", "initialise"]
