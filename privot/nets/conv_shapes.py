"""The sizes of a ConvNet before it is built."""

from __future__ import annotations

import math
from dataclasses import dataclass

TEXTURED = 48  # channels; of random nets any are as good as others


@dataclass(frozen=True)
class Outline:
    """Of a ConvNet for images of ``shape``: ``depth`` blocks of ``width`` channels, or as many as small images allow.

    >>> net = Outline((3, 32, 32), 128, 3)
    >>> net.blocks, net.numbers, net.work
    (3, 2048, 101449728)
    """

    shape: tuple[int, int, int]
    width: int = 128
    depth: int = 3

    @property
    def pad(self) -> int:
        """Of the first convolution: 28-pixel images become 32."""
        return 3 if tuple(self.shape[1:]) == (28, 28) else 1

    @property
    def sides(self) -> tuple[int, int]:
        """Of the first maps."""
        height, width = (side + 2 * self.pad - 2 for side in self.shape[1:])
        return height, width

    @property
    def blocks(self) -> int:
        """Each halves the sides; 2 are left at least."""
        return max(0, min(self.depth, int(math.log2(min(self.sides))) - 1))

    @property
    def numbers(self) -> int:
        """Features before the last layer."""
        return (self.width if self.blocks else self.shape[0]) * math.prod(
            side >> self.blocks for side in self.sides
        )

    @property
    def textures(self) -> tuple[int, int]:
        """After how many blocks, of the last, products of channels are taken, and between how many channels."""
        return min(2, self.blocks), min(TEXTURED, self.width)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Of the blocks, by name: their shapes."""
        found: dict[str, tuple[int, ...]] = {}
        for number in range(self.blocks):
            found[f"conv{number}"] = (self.width, self.width if number else self.shape[0], 3, 3)
            found |= {f"{name}{number}": (self.width,) for name in ("bias", "gain", "shift")}
        return found

    @property
    def elements(self) -> int:
        """Elements of all maps of one image."""
        return self.width * sum(
            math.prod(side >> number for side in self.sides) for number in range(self.blocks)
        )

    @property
    def work(self) -> int:
        """Floating-point operations of one image's way: those of the convolutions."""
        sizes = [
            math.prod(shape) for name, shape in self.parameters.items() if name.startswith("conv")
        ]
        return sum(
            2 * size * math.prod(side >> number for side in self.sides)
            for number, size in enumerate(sizes)
        )
