"""Networks that several methods share. A release names one of these and its arguments, so that loading runs no foreign code."""

from privot.nets.convolutional import ConvGenerator, initialise
from privot.nets.dense import DenseGenerator
from privot.nets.lenet import LeNet

NETS = {"ConvGenerator": ConvGenerator, "DenseGenerator": DenseGenerator}

__all__ = ["NETS", "ConvGenerator", "DenseGenerator", "LeNet", "initialise"]
