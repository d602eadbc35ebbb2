"""Networks that several methods share. A release names one of these and its arguments, so that loading runs no foreign code."""

from privot.nets.convolutional import ConvGenerator
from privot.nets.lenet import LeNet

NETS = {"ConvGenerator": ConvGenerator}

__all__ = ["NETS", "ConvGenerator", "LeNet"]
