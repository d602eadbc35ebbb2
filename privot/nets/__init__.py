"""Networks that several methods share. A release names one of these and its arguments, so that loading runs no foreign code."""

from privot.nets.convolutional import ConvGenerator, initialise
from privot.nets.deep_convolutional import DeepConvGenerator
from privot.nets.dense import DenseGenerator
from privot.nets.lenet import LeNet

NETS = {"ConvGenerator": ConvGenerator, "DeepConvGenerator": DeepConvGenerator, "DenseGenerator": DenseGenerator}

__all__ = ["NETS", "ConvGenerator", "DeepConvGenerator", "DenseGenerator", "LeNet", "initialise"]
