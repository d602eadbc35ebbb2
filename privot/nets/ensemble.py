"""Many small ConvNets as one computation: their channels lie side by side, and convolutions run in groups."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d, group_norm


class Ensemble(nn.Module):
    """``nets`` ConvNets (see `ConvNet`: same blocks, same initial law), each with weights of its own.

    Images are [count, channels, height, width], the same for all nets, or [nets, count, ...], each net's own. The numbers of one net
    depend on nothing of another, so each trains as it would alone.

    >>> nets = Ensemble(4, (1, 28, 28), 10, width=8, generator=torch.Generator().manual_seed(0))
    >>> nets.features(torch.zeros(2, 1, 28, 28)).shape, nets(torch.zeros(4, 2, 1, 28, 28)).shape
    (torch.Size([4, 2, 128]), torch.Size([4, 2, 10]))
    """

    def __init__(
        self, nets: int, shape: tuple[int, int, int], classes: int, width: int = 128, depth: int = 3, *,
        generator: torch.Generator,
    ):  # fmt: skip
        super().__init__()
        channels, height, across = shape
        self.nets, self.shape, self.classes, self.width = nets, tuple(shape), classes, width
        self.pad = 3 if (height, across) == (28, 28) else 1
        sides = [side + 2 * (self.pad - 1) for side in (height, across)]
        self.blocks = min(depth, int(math.log2(min(sides))) - 1)
        for block in range(self.blocks):
            reach = 1 / math.sqrt(channels * 9)
            self._add(f"conv{block}", (nets, width, channels, 3, 3), reach, generator)
            self._add(f"bias{block}", (nets, width), reach, generator)
            self.register_parameter(f"gain{block}", nn.Parameter(torch.ones(nets, width)))
            self.register_parameter(f"shift{block}", nn.Parameter(torch.zeros(nets, width)))
            channels, sides = width, [side // 2 for side in sides]
        self.numbers = channels * math.prod(sides)
        self._add("head", (nets, self.numbers, classes), 1 / math.sqrt(self.numbers), generator)
        self._add("tail", (nets, 1, classes), 1 / math.sqrt(self.numbers), generator)

    def _add(self, name: str, shape: tuple[int, ...], reach: float, generator: torch.Generator) -> None:
        self.register_parameter(name, nn.Parameter((2 * torch.rand(shape, generator=generator) - 1) * reach))

    def chosen(self, index: Tensor) -> dict[str, Tensor]:
        """Parameters of some of the nets, for `torch.func.functional_call` or `features`."""
        return {name: value[index] for name, value in self.named_parameters()}

    def features(self, images: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
        """What lies before the last layer: [nets, count, numbers]."""
        known = weights or dict(self.named_parameters())
        nets = len(known["tail"])
        shared = images.ndim == 4
        x = images if shared else images.transpose(0, 1).flatten(1, 2)
        for block in range(self.blocks):
            groups = 1 if shared and block == 0 else nets
            pad = self.pad if block == 0 else 1
            x = conv2d(x, known[f"conv{block}"].flatten(0, 1), known[f"bias{block}"].flatten(), padding=pad, groups=groups)
            x = group_norm(x, x.shape[1], known[f"gain{block}"].flatten(), known[f"shift{block}"].flatten()).relu()
            x = avg_pool2d(x, 2)
        return x.unflatten(1, (nets, -1)).flatten(2).transpose(0, 1)

    def forward(self, images: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Logits [nets, count, classes]."""
        known = weights or dict(self.named_parameters())
        return self.features(images, known) @ known["head"] + known["tail"]
