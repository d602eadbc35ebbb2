"""Shapes and sizes of a ConvNet, computed before it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Channels of a texture feature. Which channels of a random network are taken makes no difference.
MAX_TEXTURE_CHANNELS = 48


@dataclass(frozen=True)
class ConvNetShapes:
    """Shapes of a ConvNet: blocks of 3x3 convolution, norm, ReLU and pooling, then a dense layer.

    Args:
        shape: Channels, height and width of the images.
        width: Channels of every block.
        depth: Number of blocks; small images allow fewer.

    >>> shapes = ConvNetShapes((3, 32, 32), 128, 3)
    >>> shapes.num_blocks, shapes.num_features, shapes.flops
    (3, 2048, 101449728)
    """

    shape: tuple[int, int, int]
    width: int = 128
    depth: int = 3

    @property
    def padding(self) -> int:
        """Padding of the first convolution: it takes 28-pixel images to 32."""
        return 3 if tuple(self.shape[1:]) == (28, 28) else 1

    @property
    def map_sides(self) -> tuple[int, int]:
        """Height and width of the first maps."""
        height, width = (side + 2 * self.padding - 2 for side in self.shape[1:])
        return height, width

    @property
    def num_blocks(self) -> int:
        """Number of blocks. Each halves the sides, and at least 2 pixels remain."""
        return max(0, min(self.depth, int(math.log2(min(self.map_sides))) - 1))

    @property
    def num_features(self) -> int:
        """Inputs of the last layer."""
        channels = self.width if self.num_blocks else self.shape[0]
        return channels * math.prod(side >> self.num_blocks for side in self.map_sides)

    @property
    def texture_layout(self) -> tuple[int, int]:
        """How many of the last blocks give texture features, and from how many channels each."""
        return min(2, self.num_blocks), min(MAX_TEXTURE_CHANNELS, self.width)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of all blocks, by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for block in range(self.num_blocks):
            in_channels = self.width if block else self.shape[0]
            shapes[f"conv{block}"] = (self.width, in_channels, 3, 3)
            shapes |= {f"{name}{block}": (self.width,) for name in ("bias", "gain", "shift")}
        return shapes

    @property
    def num_activations(self) -> int:
        """Elements of all maps of one image."""
        return self.width * sum(self._map_size(block) for block in range(self.num_blocks))

    @property
    def flops(self) -> int:
        """Floating-point operations of all convolutions for one image."""
        shapes = self.parameter_shapes
        return sum(
            2 * math.prod(shapes[f"conv{block}"]) * self._map_size(block)
            for block in range(self.num_blocks)
        )

    def _map_size(self, block: int) -> int:
        """Return the positions of a block's map before its pooling."""
        return math.prod(side >> block for side in self.map_sides)
