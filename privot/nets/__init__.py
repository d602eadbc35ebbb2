"""Networks that several methods share. A release names one of these and its arguments, so that loading runs no foreign code."""

from typing import Any

import torch

from privot.nets.autoencoders import ConvDecodedGenerator
from privot.nets.classifiers.lenet import LeNet
from privot.nets.dp_networks import DecodedGenerator
from privot.nets.generators.conv import ConvGenerator, initialise
from privot.nets.generators.dcgan import DeepConvGenerator
from privot.nets.generators.dense import DenseGenerator
from privot.nets.generators.residual import ResidualGenerator
from privot.nets.generators.tabular import RecordGenerator

NETS = {
    "ConvDecodedGenerator": ConvDecodedGenerator,
    "ConvGenerator": ConvGenerator,
    "DecodedGenerator": DecodedGenerator,
    "DeepConvGenerator": DeepConvGenerator,
    "DenseGenerator": DenseGenerator,
    "RecordGenerator": RecordGenerator,
    "ResidualGenerator": ResidualGenerator,
}


def drawing(name: str, arguments: dict[str, Any]) -> int:
    """Floating-point operations of one image that such a generator draws; nothing is computed.

    >>> drawing("DeepConvGenerator", {"shape": [1, 28, 28], "classes": 10, "code": 16, "width": 64})
    232766464
    """
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        NETS[name](**arguments).eval()(
            torch.zeros(1, arguments["code"]), torch.zeros(1, dtype=torch.int64)
        )
    return counter.get_total_flops()


__all__ = [
    "NETS",
    "ConvDecodedGenerator",
    "ConvGenerator",
    "DecodedGenerator",
    "DeepConvGenerator",
    "DenseGenerator",
    "LeNet",
    "RecordGenerator",
    "ResidualGenerator",
    "drawing",
    "initialise",
]
