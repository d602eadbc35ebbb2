"""Networks that several methods share. A release names one of these and its arguments, so that loading runs no foreign code."""

from privot.nets.autoencoders import ConvDecodedGenerator
from privot.nets.convolutional import ConvGenerator, initialise
from privot.nets.deep_convolutional import DeepConvGenerator
from privot.nets.dense import DenseGenerator
from privot.nets.lenet import LeNet
from privot.nets.private_critic import DecodedGenerator
from privot.nets.records import RecordGenerator
from privot.nets.residual import ResidualGenerator

NETS = {
    "ConvDecodedGenerator": ConvDecodedGenerator,
    "ConvGenerator": ConvGenerator,
    "DecodedGenerator": DecodedGenerator,
    "DeepConvGenerator": DeepConvGenerator,
    "DenseGenerator": DenseGenerator,
    "RecordGenerator": RecordGenerator,
    "ResidualGenerator": ResidualGenerator,
}

__all__ = [
    "NETS", "ConvDecodedGenerator", "ConvGenerator", "DecodedGenerator", "DeepConvGenerator", "DenseGenerator", "LeNet",
    "RecordGenerator", "ResidualGenerator", "initialise",
]  # fmt: skip
