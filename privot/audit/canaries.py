"""Canaries: records made to be found, planted to see what a release tells of the most exposed (Aerni, Zhang and Tramèr 2024)."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from privot.components.dead_leaves import scenes
from privot.data.dataset import Records
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets.generators.dense import cosines

GIVEN = (
    "clean",
    "mislabelled",
)  # kinds that are made of the owner's records, and as secret as these
MADE = (
    "blank",
    "noise",
    "scenes",
    "orthogonal",
)  # out of distribution: they owe nothing to the data
KINDS = GIVEN + MADE


def canaries(
    kind: str,
    spec: Spec,
    count: int,
    generator: torch.Generator,
    images: Tensor | None = None,
    labels: Tensor | None = None,
) -> Records:
    """``count`` records of a kind, on the CPU; deterministic by the generator.

    ``clean`` given records; ``mislabelled`` given records with another label; ``blank`` images of one colour each; ``noise`` uniform
    pixels; ``scenes`` pictures drawn by code; ``orthogonal`` waves, of which any two are orthogonal about mid-grey and each reaches black
    and white: made to move a mean far, and no two alike. Labels of those out of distribution are drawn at random.

    >>> made = canaries("blank", Spec((1, 8, 8), 10), 3, torch.Generator().manual_seed(0))
    >>> made.images.shape, made.images.flatten(1).std(1).tolist()
    (torch.Size([3, 1, 8, 8]), [0.0, 0.0, 0.0])
    """
    if kind not in KINDS or count < 1:
        raise SettingError(
            f"canaries: {count} of kind {kind!r}; at least 1 is needed, of {', '.join(KINDS)}"
        )
    if kind in GIVEN:
        if (
            images is None
            or labels is None
            or len(images) < count
            or images.shape[1:] != spec.shape
            or len(labels) != len(images)
        ):
            raise SettingError(
                f"{kind} canaries are made of records: give at least {count} images of shape {list(spec.shape)} and labels"
            )
        if kind == "mislabelled" and spec.classes < 2:
            raise SettingError("mislabelled canaries need at least 2 classes")
        chosen = torch.randperm(len(images), generator=generator)[:count].to(images.device)
        own = labels.to(images.device)[chosen].cpu()
        moved = (
            own + torch.randint(1, spec.classes, (count,), generator=generator)
            if kind == "mislabelled"
            else own
        )
        return Records(images[chosen].cpu().float(), moved % spec.classes)
    made = {"blank": _blank, "noise": _noise, "scenes": _scenes, "orthogonal": _orthogonal}[kind](
        spec, count, generator
    )
    return Records(made, torch.randint(0, spec.classes, (count,), generator=generator))


def coins(count: int) -> np.ndarray:
    """Which canaries are included in one run: fair and independent coins, bool [count], as an audit in one run asks.

    They are the operating system's: its confidence is over them, so nobody may know or choose them.
    """
    return np.frombuffer(os.urandom(count), np.uint8) < 128


def _blank(spec: Spec, count: int, generator: torch.Generator) -> Tensor:
    return (
        torch.rand(count, spec.shape[0], 1, 1, generator=generator)
        .expand(count, *spec.shape)
        .contiguous()
    )


def _noise(spec: Spec, count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, *spec.shape, generator=generator)


def _scenes(spec: Spec, count: int, generator: torch.Generator) -> Tensor:
    return scenes(count, 1, spec.shape, generator, torch.device("cpu"))[
        0
    ]  # each of a kind of its own


def _orthogonal(spec: Spec, count: int, generator: torch.Generator) -> Tensor:
    """Products of cosines along channels, rows and columns: an orthogonal basis whose images are scaled to fill [0, 1]."""
    if count > spec.pixels:
        raise SettingError(
            f"count={count}: images of {spec.pixels} values have no more orthogonal ones than that"
        )
    place = torch.randperm(spec.pixels, generator=generator)[:count]
    bases = [cosines(size, size).T for size in spec.shape]  # each [size, size], a wave a row
    which = (
        place // (spec.shape[1] * spec.shape[2]),
        place // spec.shape[2] % spec.shape[1],
        place % spec.shape[2],
    )
    channels, rows, columns = (basis[own] for basis, own in zip(bases, which, strict=True))
    waves = channels[:, :, None, None] * rows[:, None, :, None] * columns[:, None, None, :]
    return 0.5 + 0.5 * waves / waves.abs().amax((1, 2, 3), keepdim=True)
