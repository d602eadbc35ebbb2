"""The Inception network of 2015-12-05, by which FID is defined: up to its 2048 pooled features, and its 1008 logits where at hand.

Blocks are tables; names are those of the usual weight files. Batch norms are folded into the convolutions when weights are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d

SIDE = 299
FEATURES = 2048
LOGITS = 1008
Unit = tuple[
    str, int, tuple[int, int], int
]  # name, outputs, kernel, stride; a stride of 1 keeps the size
Chain = tuple[Unit, ...]

WIDE = (1, 7)
TALL = (7, 1)
ONE = (1, 1)
THREE = (3, 3)
FIVE = (5, 5)


def _first(pooled: int) -> tuple[Chain, ...]:
    return (
        (("branch1x1", 64, ONE, 1),),
        (("branch5x5_1", 48, ONE, 1), ("branch5x5_2", 64, FIVE, 1)),
        (
            ("branch3x3dbl_1", 64, ONE, 1),
            ("branch3x3dbl_2", 96, THREE, 1),
            ("branch3x3dbl_3", 96, THREE, 1),
        ),
        (("branch_pool", pooled, ONE, 1),),
    )


def _second(width: int) -> tuple[Chain, ...]:
    double = tuple(
        (f"branch7x7dbl_{i}", width, kernel, 1)
        for i, kernel in enumerate((ONE, TALL, WIDE, TALL), 1)
    )
    return (
        (("branch1x1", 192, ONE, 1),),
        (
            ("branch7x7_1", width, ONE, 1),
            ("branch7x7_2", width, WIDE, 1),
            ("branch7x7_3", 192, TALL, 1),
        ),
        (*double, ("branch7x7dbl_5", 192, WIDE, 1)),
        (("branch_pool", 192, ONE, 1),),
    )


DOWN = (
    (("branch3x3", 384, THREE, 2),),
    (
        ("branch3x3dbl_1", 64, ONE, 1),
        ("branch3x3dbl_2", 96, THREE, 1),
        ("branch3x3dbl_3", 96, THREE, 2),
    ),
)
DOWN_AGAIN = (
    (("branch3x3_1", 192, ONE, 1), ("branch3x3_2", 320, THREE, 2)),
    (
        ("branch7x7x3_1", 192, ONE, 1),
        ("branch7x7x3_2", 192, WIDE, 1),
        ("branch7x7x3_3", 192, TALL, 1),
        ("branch7x7x3_4", 192, THREE, 2),
    ),
)
LAST = (  # names that end in a and b are a fork: both take what lies before them
    (("branch1x1", 320, ONE, 1),),
    (
        ("branch3x3_1", 384, ONE, 1),
        ("branch3x3_2a", 384, (1, 3), 1),
        ("branch3x3_2b", 384, (3, 1), 1),
    ),
    (
        ("branch3x3dbl_1", 448, ONE, 1),
        ("branch3x3dbl_2", 384, THREE, 1),
        ("branch3x3dbl_3a", 384, (1, 3), 1),
        ("branch3x3dbl_3b", 384, (3, 1), 1),
    ),
    (("branch_pool", 192, ONE, 1),),
)


class Convolution(nn.Module):
    """A convolution with its batch norm folded in, then ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int], stride: int = 1):
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if stride == 1 else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).relu_()


class Mixed(nn.Module):
    """Chains side by side. The chain ``branch_pool`` sees the pooled input; a block that halves the size passes the pooled input on."""

    def __init__(self, inputs: int, chains: tuple[Chain, ...], pool: str):
        super().__init__()
        self.chains = chains
        self.pool = pool
        self.outputs = 0 if pool != "down" else inputs
        for chain in chains:
            before = inputs
            for name, outputs, kernel, stride in chain:
                self.add_module(name, Convolution(before, outputs, kernel, stride))
                if not name.endswith("a"):
                    before = outputs
                self.outputs += outputs if name == chain[-1][0] or name.endswith("a") else 0

    def forward(self, images: Tensor) -> Tensor:
        parts = []
        for chain in self.chains:
            value = images
            if chain[0][0] == "branch_pool":
                value = (
                    max_pool2d(images, 3, 1, 1)
                    if self.pool == "max"
                    else avg_pool2d(images, 3, 1, 1, count_include_pad=False)
                )
            for name, *_ in chain:
                if name.endswith("a"):
                    parts.append(self.get_submodule(name)(value))
                else:
                    value = self.get_submodule(name)(value)
            parts.append(value)
        if self.pool == "down":
            parts.append(max_pool2d(images, 3, 2))
        return torch.cat(parts, 1)


class Inception(nn.Module):
    """Images in, features [count, 2048] out.

    Images [count, 1 or 3, height, width] in [0, 1] are rounded to 8 bits, brought to 299 x 299 by the bilinear rule of that network's
    own graph (no half-pixel shift) and scaled by (x - 128) / 128.

    >>> Inception().features(torch.zeros(1, 1, 28, 28)).shape
    torch.Size([1, 2048])
    """

    def __init__(self, logits: bool = False):
        super().__init__()
        stem = (
            ("1a_3x3", 32, 3, 2, 0),
            ("2a_3x3", 32, 3, 1, 0),
            ("2b_3x3", 64, 3, 1, 1),
            ("3b_1x1", 80, 1, 1, 0),
            ("4a_3x3", 192, 3, 1, 0),
        )
        before = 3
        names = []
        for name, outputs, side, stride, padding in stem:
            unit = Convolution(before, outputs, (side, side), stride)
            unit.conv.padding = (padding, padding)
            names.append(self._add(f"Conv2d_{name}", unit))
            before = outputs
        blocks = (
            ("5b", _first(32), "mean"),
            ("5c", _first(64), "mean"),
            ("5d", _first(64), "mean"),
            ("6a", DOWN, "down"),
            ("6b", _second(128), "mean"),
            ("6c", _second(160), "mean"),
            ("6d", _second(160), "mean"),
            ("6e", _second(192), "mean"),
            ("7a", DOWN_AGAIN, "down"),
            ("7b", LAST, "mean"),
            ("7c", LAST, "max"),
        )
        for name, chains, pool in blocks:
            mixed = Mixed(before, chains, pool)
            names.append(self._add(f"Mixed_{name}", mixed))
            before = mixed.outputs
        self.names = names
        if logits:
            self.fc = nn.Linear(FEATURES, LOGITS)

    def _add(self, name: str, module: nn.Module) -> str:
        self.add_module(name, module)
        return name

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor]) -> Inception:
        """The network with weights under their usual names, batch norms apart (epsilon 0.001); raises KeyError where one is missing."""
        net = cls(logits="fc.weight" in weights)
        folded = {}
        for name in net.state_dict():
            if name.startswith("fc."):
                folded[name] = weights[name].float()
                continue
            unit = name.removesuffix(".conv.weight").removesuffix(".conv.bias")
            part = name.rsplit(".", 1)[1]
            norm = {
                key: weights[f"{unit}.bn.{key}"].double()
                for key in ("weight", "bias", "running_mean", "running_var")
            }
            scale = norm["weight"] / (norm["running_var"] + 1e-3).sqrt()
            if part == "weight":
                folded[name] = (weights[name].double() * scale.view(-1, 1, 1, 1)).float()
            else:
                folded[name] = (norm["bias"] - norm["running_mean"] * scale).float()
        net.load_state_dict(folded)
        return net.eval()

    def features(self, images: Tensor) -> Tensor:
        pixels = (images.clamp(0, 1) * 255).round_()
        value = (
            (resized(pixels, SIDE).sub_(128).div_(128))
            .expand(-1, 3, -1, -1)
            .contiguous(memory_format=torch.channels_last)
        )
        for name in self.names:
            value = self.get_submodule(name)(value)
            if name in ("Conv2d_2b_3x3", "Conv2d_4a_3x3"):
                value = max_pool2d(value, 3, 2)
        return value.mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images)


def resized(images: Tensor, side: int) -> Tensor:
    """Bilinear, with the corner of pixel i at i * (old / new), as the network's own graph does it: [..., side, side].

    >>> resized(torch.tensor([[[[0.0, 1.0]]]]), 4)[0, 0, 0]
    tensor([0.0000, 0.5000, 1.0000, 1.0000])
    """
    tall, wide = (_lerp(length, side, images) for length in images.shape[-2:])
    return tall @ images @ wide.T


def _lerp(old: int, new: int, like: Tensor) -> Tensor:
    place = torch.arange(new, dtype=torch.float64) * (old / new)
    low = place.floor().long().clamp(max=old - 1)
    matrix = torch.zeros(new, old, dtype=torch.float64)
    matrix[torch.arange(new), low] += 1 - (place - low)
    matrix[torch.arange(new), (low + 1).clamp(max=old - 1)] += place - low
    return matrix.to(like)
