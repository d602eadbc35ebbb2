"""Pictures drawn by code, from which a net can learn to see before it has seen any data.

Each kind of scene has its own colours, shapes, sizes, directions and stripes; a picture is a pile of such shapes on a ramp of colour
("dead leaves"). They owe nothing to any data set, so nets trained to tell the kinds apart are public and cost no privacy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAVES = 24  # shapes in a picture
COLOURS = 4  # of a kind of scene


def scenes(
    kinds: int,
    each: int,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """``each`` pictures of ``kinds`` kinds of scenes: images [kinds * each, *shape] in [0, 1] and their kinds.

    >>> images, kind = scenes(3, 2, (3, 16, 16), torch.Generator().manual_seed(0), torch.device("cpu"))
    >>> images.shape, kind.tolist()
    (torch.Size([6, 3, 16, 16]), [0, 0, 1, 1, 2, 2])
    """

    def random(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator).to(device)

    kind = torch.arange(kinds, device=device).repeat_interleave(each)
    count = kinds * each
    colours = random(kinds, COLOURS, 3)
    roundness = torch.tensor([1.0, 2.0, 8.0], device=device)[(random(kinds) * 3).long()]
    size = 0.08 + 0.35 * random(kinds)
    thinness = 0.3 + 0.7 * random(kinds)
    angle = math.pi * random(kinds)
    spread = random(kinds)
    stripes = 10 * random(kinds)
    slant = math.pi * random(kinds)
    contrast = 0.5 * random(kinds) * (random(kinds) < 0.6)

    def of(values: Tensor) -> Tensor:
        return values[kind].view(-1, 1, 1)

    def jitter(reach: float, *size: int) -> Tensor:
        return reach * (random(count, *size) - 0.5)

    across = torch.linspace(-1, 1, shape[2], device=device).view(1, 1, -1)
    down = torch.linspace(-1, 1, shape[1], device=device).view(1, -1, 1)
    images = colours[kind, 0].view(-1, 3, 1, 1) + jitter(0.3, 3, 1, 1)
    images = images + jitter(0.5, 3, 1, 1) * across[:, None] + jitter(0.5, 3, 1, 1) * down[:, None]
    for _ in range(LEAVES):
        right = across - 2 * random(count, 1, 1) + 1
        low = down - 2 * random(count, 1, 1) + 1
        long = of(size) * (0.3 + 2 * random(count, 1, 1) * random(count, 1, 1))
        turn = of(angle) + of(spread) * jitter(math.pi, 1, 1)
        along = (right * turn.cos() + low * turn.sin()) / long
        beside = (low * turn.cos() - right * turn.sin()) / (long * of(thinness))
        inside = (
            along.abs().clamp(max=9) ** of(roundness) + beside.abs().clamp(max=9) ** of(roundness)
            < 1
        )
        tone = colours[kind, (COLOURS * random(count)).long()].view(-1, 3, 1, 1) + jitter(
            0.2, 3, 1, 1
        )
        lean = of(slant) + jitter(0.3, 1, 1)
        wave = torch.sin(
            math.pi * of(stripes) * (across * lean.cos() + down * lean.sin())
            + 2 * math.pi * random(count, 1, 1)
        )
        tone = tone + (of(contrast) * wave)[:, None] * (0.5 + 0.5 * random(count, 3, 1, 1))
        images = torch.where(inside[:, None], tone, images)
    images = images.clamp(0, 1)
    return (images if shape[0] == 3 else images.mean(1, keepdim=True)), kind
