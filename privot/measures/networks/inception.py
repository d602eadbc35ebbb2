"""The Inception network of 2015-12-05, which defines FID.

It gives 2048 pooled features, and 1008 logits if the weights have them. Blocks are listed in
tables, with the names of the usual weight files. Loading folds batch norms into the convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, max_pool2d

INPUT_SIDE = 299
NUM_FEATURES = 2048
NUM_LOGITS = 1008
BATCH_NORM_EPSILON = 1e-3
# Name, output channels, kernel size, stride. A stride of 1 preserves the size.
ConvSpec = tuple[str, int, tuple[int, int], int]
Branch = tuple[ConvSpec, ...]  # convolutions in sequence

KERNEL_1X7 = (1, 7)
KERNEL_7X1 = (7, 1)
KERNEL_1X1 = (1, 1)
KERNEL_3X3 = (3, 3)
KERNEL_5X5 = (5, 5)


def _inception_a(pool_channels: int) -> tuple[Branch, ...]:
    return (
        (("branch1x1", 64, KERNEL_1X1, 1),),
        (("branch5x5_1", 48, KERNEL_1X1, 1), ("branch5x5_2", 64, KERNEL_5X5, 1)),
        (
            ("branch3x3dbl_1", 64, KERNEL_1X1, 1),
            ("branch3x3dbl_2", 96, KERNEL_3X3, 1),
            ("branch3x3dbl_3", 96, KERNEL_3X3, 1),
        ),
        (("branch_pool", pool_channels, KERNEL_1X1, 1),),
    )


def _inception_c(channels: int) -> tuple[Branch, ...]:
    double = tuple(
        (f"branch7x7dbl_{i}", channels, kernel, 1)
        for i, kernel in enumerate((KERNEL_1X1, KERNEL_7X1, KERNEL_1X7, KERNEL_7X1), 1)
    )
    return (
        (("branch1x1", 192, KERNEL_1X1, 1),),
        (
            ("branch7x7_1", channels, KERNEL_1X1, 1),
            ("branch7x7_2", channels, KERNEL_1X7, 1),
            ("branch7x7_3", 192, KERNEL_7X1, 1),
        ),
        (*double, ("branch7x7dbl_5", 192, KERNEL_1X7, 1)),
        (("branch_pool", 192, KERNEL_1X1, 1),),
    )


INCEPTION_B = (
    (("branch3x3", 384, KERNEL_3X3, 2),),
    (
        ("branch3x3dbl_1", 64, KERNEL_1X1, 1),
        ("branch3x3dbl_2", 96, KERNEL_3X3, 1),
        ("branch3x3dbl_3", 96, KERNEL_3X3, 2),
    ),
)
INCEPTION_D = (
    (("branch3x3_1", 192, KERNEL_1X1, 1), ("branch3x3_2", 320, KERNEL_3X3, 2)),
    (
        ("branch7x7x3_1", 192, KERNEL_1X1, 1),
        ("branch7x7x3_2", 192, KERNEL_1X7, 1),
        ("branch7x7x3_3", 192, KERNEL_7X1, 1),
        ("branch7x7x3_4", 192, KERNEL_3X3, 2),
    ),
)
# Convolutions whose names end in a and b are parallel: both take the output before them.
INCEPTION_E = (
    (("branch1x1", 320, KERNEL_1X1, 1),),
    (
        ("branch3x3_1", 384, KERNEL_1X1, 1),
        ("branch3x3_2a", 384, (1, 3), 1),
        ("branch3x3_2b", 384, (3, 1), 1),
    ),
    (
        ("branch3x3dbl_1", 448, KERNEL_1X1, 1),
        ("branch3x3dbl_2", 384, KERNEL_3X3, 1),
        ("branch3x3dbl_3a", 384, (1, 3), 1),
        ("branch3x3dbl_3b", 384, (3, 1), 1),
    ),
    (("branch_pool", 192, KERNEL_1X1, 1),),
)


class ConvReLU(nn.Module):
    """A convolution, into which its batch norm is folded, followed by ReLU.

    Args:
        in_channels: Input channels.
        out_channels: Output channels.
        kernel_size: Height and width of the kernel.
        stride: Stride; only a stride of 1 is padded.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: tuple[int, int], stride: int = 1
    ):
        super().__init__()
        padding = (kernel_size[0] // 2, kernel_size[1] // 2) if stride == 1 else (0, 0)
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).relu_()


class InceptionBlock(nn.Module):
    """Parallel branches whose outputs are concatenated.

    The branch ``branch_pool`` takes the pooled input. A block that halves the size also outputs the
    max-pooled input.

    Args:
        in_channels: Input channels.
        branches: The branches.
        pool: "mean" or "max" pooling before ``branch_pool``, or "down" to halve the size.
    """

    def __init__(self, in_channels: int, branches: tuple[Branch, ...], pool: str):
        super().__init__()
        self.branches = branches
        self.pool = pool
        self.out_channels = 0 if pool != "down" else in_channels
        for branch in branches:
            channels = in_channels
            for name, out_channels, kernel_size, stride in branch:
                self.add_module(name, ConvReLU(channels, out_channels, kernel_size, stride))
                is_parallel = name.endswith("a")
                if not is_parallel:
                    channels = out_channels
                if is_parallel or name == branch[-1][0]:
                    self.out_channels += out_channels

    def forward(self, images: Tensor) -> Tensor:
        outputs = []
        for branch in self.branches:
            maps = images
            if branch[0][0] == "branch_pool":
                if self.pool == "max":
                    maps = max_pool2d(images, 3, 1, 1)
                else:
                    maps = avg_pool2d(images, 3, 1, 1, count_include_pad=False)
            for name, *_ in branch:
                if name.endswith("a"):
                    outputs.append(self.get_submodule(name)(maps))
                else:
                    maps = self.get_submodule(name)(maps)
            outputs.append(maps)
        if self.pool == "down":
            outputs.append(max_pool2d(images, 3, 2))
        return torch.cat(outputs, 1)


class Inception(nn.Module):
    """Maps images [count, 1 or 3, height, width] in [0, 1] to features [count, 2048].

    Images are rounded to 8 bits, resized to 299 x 299 by the bilinear rule of that network's own
    graph (no half-pixel shift) and scaled by (x - 128) / 128.

    Args:
        logits: Whether the network has the last layer, ``fc``.

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
        channels = 3
        self.block_names: list[str] = []
        for name, out_channels, side, stride, padding in stem:
            layer = ConvReLU(channels, out_channels, (side, side), stride)
            layer.conv.padding = (padding, padding)
            self._add_block(f"Conv2d_{name}", layer)
            channels = out_channels
        blocks = (
            ("5b", _inception_a(32), "mean"),
            ("5c", _inception_a(64), "mean"),
            ("5d", _inception_a(64), "mean"),
            ("6a", INCEPTION_B, "down"),
            ("6b", _inception_c(128), "mean"),
            ("6c", _inception_c(160), "mean"),
            ("6d", _inception_c(160), "mean"),
            ("6e", _inception_c(192), "mean"),
            ("7a", INCEPTION_D, "down"),
            ("7b", INCEPTION_E, "mean"),
            ("7c", INCEPTION_E, "max"),
        )
        for name, branches, pool in blocks:
            block = InceptionBlock(channels, branches, pool)
            self._add_block(f"Mixed_{name}", block)
            channels = block.out_channels
        if logits:
            self.fc = nn.Linear(NUM_FEATURES, NUM_LOGITS)

    def _add_block(self, name: str, block: nn.Module) -> None:
        self.add_module(name, block)
        self.block_names.append(name)

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor]) -> Inception:
        """Build the network from weights under their usual names, with separate batch norms.

        Raises:
            KeyError: A weight is missing.
        """
        net = cls(logits="fc.weight" in weights)
        state = {}
        for name in net.state_dict():
            if name.startswith("fc."):
                state[name] = weights[name].float()
                continue
            layer, _, parameter = name.rsplit(".", 2)  # layer.conv.parameter
            norm = {
                key: weights[f"{layer}.bn.{key}"].double()
                for key in ("weight", "bias", "running_mean", "running_var")
            }
            scale = norm["weight"] / (norm["running_var"] + BATCH_NORM_EPSILON).sqrt()
            if parameter == "weight":
                state[name] = (weights[name].double() * scale.view(-1, 1, 1, 1)).float()
            else:
                state[name] = (norm["bias"] - norm["running_mean"] * scale).float()
        net.load_state_dict(state)
        return net.eval()

    def features(self, images: Tensor) -> Tensor:
        """Compute the pooled features [count, 2048] of images in [0, 1]."""
        pixels = (images.clamp(0, 1) * 255).round_()
        scaled = resize_like_tensorflow(pixels, INPUT_SIDE).sub_(128).div_(128)
        maps = scaled.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)
        for name in self.block_names:
            maps = self.get_submodule(name)(maps)
            if name in ("Conv2d_2b_3x3", "Conv2d_4a_3x3"):
                maps = max_pool2d(maps, 3, 2)
        return maps.mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images)


def resize_like_tensorflow(images: Tensor, side: int) -> Tensor:
    """Resize images bilinearly as the network's own graph does, to [..., side, side].

    Pixel i of the output has its corner at ``i * (old_side / side)`` of the input.

    >>> resize_like_tensorflow(torch.tensor([[[[0.0, 1.0]]]]), 4)[0, 0, 0]
    tensor([0.0000, 0.5000, 1.0000, 1.0000])
    """
    rows, columns = (_interpolation_matrix(length, side, images) for length in images.shape[-2:])
    return rows @ images @ columns.T


def _interpolation_matrix(in_length: int, out_length: int, like: Tensor) -> Tensor:
    """Build the matrix of linear interpolation along one axis.

    Args:
        in_length: Pixels of the input.
        out_length: Pixels of the output.
        like: Gives dtype and device.

    Returns:
        The matrix [out_length, in_length].
    """
    positions = torch.arange(out_length, dtype=torch.float64) * (in_length / out_length)
    lower = positions.floor().long().clamp(max=in_length - 1)
    upper = (lower + 1).clamp(max=in_length - 1)
    rows = torch.arange(out_length)
    matrix = torch.zeros(out_length, in_length, dtype=torch.float64)
    matrix[rows, lower] += 1 - (positions - lower)
    matrix[rows, upper] += positions - lower
    return matrix.to(like)
