"""Many small ConvNets with one interface: weights side by side, images shared or each net's own.

The nets take turns with dense convolutions: on a GPU, where their steps are captured as one graph, that is as quick as grouped
convolutions, on a CPU twice as quick, and memory holds the maps of one net however many there are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from privot.nets.conv_block import block, precision
from privot.nets.conv_shapes import Outline


class Ensemble(nn.Module):
    """``nets`` ConvNets (see `ConvNet`: same blocks, same initial law), each with weights of its own.

    Images are [count, channels, height, width], the same for all nets, or [nets, count, ...], each net's own. The numbers of one net
    depend on nothing of another, so each trains as it would alone.

    >>> nets = Ensemble(4, (1, 28, 28), 10, width=8, generator=torch.Generator().manual_seed(0))
    >>> nets.features(torch.zeros(2, 1, 28, 28)).shape, nets(torch.zeros(4, 2, 1, 28, 28)).shape
    (torch.Size([4, 2, 128]), torch.Size([4, 2, 10]))
    """

    def __init__(
        self,
        nets: int,
        shape: tuple[int, int, int],
        classes: int,
        width: int = 128,
        depth: int = 3,
        *,
        texture: float = 0.0,
        generator: torch.Generator,
    ):
        super().__init__()
        self.outline = Outline(shape, width, depth)
        self.nets = nets
        self.classes = classes
        self.blocks = self.outline.blocks
        self.numbers = self.outline.numbers
        self.texture = texture
        for number in range(self.blocks):
            conv = self.outline.parameters[f"conv{number}"]
            for name, sizes in (("conv", conv), ("bias", (width,))):
                self._add(f"{name}{number}", (nets, *sizes), 1 / math.sqrt(conv[1] * 9), generator)
            self.register_parameter(f"gain{number}", nn.Parameter(torch.ones(nets, width)))
            self.register_parameter(f"shift{number}", nn.Parameter(torch.zeros(nets, width)))
        self._add("head", (nets, self.numbers, classes), 1 / math.sqrt(self.numbers), generator)
        self._add("tail", (nets, 1, classes), 1 / math.sqrt(self.numbers), generator)

    def _add(
        self, name: str, shape: tuple[int, ...], reach: float, generator: torch.Generator
    ) -> None:
        self.register_parameter(
            name, nn.Parameter((2 * torch.rand(shape, generator=generator) - 1) * reach)
        )

    def chosen(self, index: Tensor) -> dict[str, Tensor]:
        """Parameters of some of the nets, for `torch.func.functional_call` or `features`."""
        return {name: value[index] for name, value in self.named_parameters()}

    def follow(self, other: Ensemble) -> None:
        """Take over the blocks of another's nets, in turn; the last layer stays."""
        theirs = [place % other.nets for place in range(self.nets)]
        with torch.no_grad():
            for name, value in self.named_parameters():
                if name not in ("head", "tail"):
                    value.copy_(other.get_parameter(name)[theirs])

    def features(self, images: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
        """What lies before the last layer: [nets, count, numbers]."""
        return self._maps(images, weights or dict(self.named_parameters()), slice(-1, None))[
            0
        ].flatten(2)

    @property
    def seen_numbers(self) -> int:
        """Of `seen`."""
        after, channels = self.outline.textures
        return self.numbers + (after * channels * (channels + 1) // 2 if self.texture else 0)

    def seen(self, images: Tensor, weights: dict[str, Tensor]) -> Tensor:
        r"""Features; with textures, these and the textures, each of norm 1, these times ``texture``: [nets, count, seen_numbers].

        A texture is :math:`\sum_p h_i(p) h_j(p)` over the places of a map, for i <= j of its first channels: what occurs together,
        wherever it lies (Gatys et al., 2015).
        """
        if not self.texture:
            return self.features(images, weights).float()
        after, channels = self.outline.textures
        maps = [each.float() for each in self._maps(images, weights, slice(-max(after, 1), None))]
        up = torch.triu_indices(channels, channels, device=images.device)
        parts = [_normal(maps[-1].flatten(2))]
        for each in maps[len(maps) - after :]:
            places = each[:, :, :channels].flatten(3)
            parts.append(self.texture * _normal((places @ places.mT)[..., up[0], up[1]]))
        return torch.cat(parts, 2)

    def layers(
        self, images: Tensor, weights: dict[str, Tensor] | None = None, *, side: int
    ) -> list[Tensor]:
        """What lies after each block, averaged to ``side`` x ``side`` places (or as many as there are): each [nets, count, numbers]."""
        pooled = []
        for maps in self._maps(images, weights or dict(self.named_parameters()), slice(None)):
            places = (min(side, maps.shape[-2]), min(side, maps.shape[-1]))
            pooled.append(
                adaptive_avg_pool2d(maps.flatten(0, 1), places)
                .flatten(1)
                .unflatten(0, maps.shape[:2])
            )
        return pooled

    def _maps(self, images: Tensor, known: dict[str, Tensor], wanted: slice) -> list[Tensor]:
        """What lies after the blocks ``wanted``, each [nets, count, channels, height, width]; without any block, the images."""
        # One unbind of each parameter: its gradient is one stack, where slices would fill the whole tensor once a net.
        parts = (
            dict(zip(known, each, strict=True))
            for each in zip(*(value.unbind() for value in known.values()), strict=True)
        )
        own = images.unbind() if images.ndim == 5 else [images] * len(known["tail"])
        walks = [self._walk(each, part)[wanted] for each, part in zip(own, parts, strict=True)]
        return [torch.stack(level) for level in zip(*walks, strict=True)]

    def _walk(self, x: Tensor, known: dict[str, Tensor]) -> list[Tensor]:
        """What lies after each block of one net, [count, width, height, width]."""
        levels = [] if self.blocks else [x]
        for number in range(self.blocks):
            conv, bias, gain, shift = (
                known[f"{part}{number}"] for part in ("conv", "bias", "gain", "shift")
            )
            x = block(x, conv, bias, gain, shift, self.outline.pad if number == 0 else 1)
            levels.append(x)
        return levels

    def forward(self, images: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Logits [nets, count, classes]."""
        known = weights or dict(self.named_parameters())
        return self.features(images, known) @ known["head"] + known["tail"]


def _normal(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=-1, keepdim=True).clamp(min=1e-6)


class Frozen:
    """The nets of an ensemble once they no longer change, laid out for speed: on a GPU in half precision and channels last.

    Indexing gives the weights of some of them, for `Ensemble.features`; an index may be a tensor on the device.
    """

    def __init__(self, nets: Ensemble):
        self._own = {name: value.detach() for name, value in nets.named_parameters()}
        quick = precision(nets.tail.device)
        for name, value in self._own.items():
            if name.startswith("conv"):
                self._own[name] = value.to(quick).permute(0, 1, 3, 4, 2).contiguous()

    def __getitem__(self, index: Tensor | slice) -> dict[str, Tensor]:
        return {
            name: value[index].permute(0, 1, 4, 2, 3) if value.ndim == 5 else value[index]
            for name, value in self._own.items()
        }
