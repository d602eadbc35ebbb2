"""Canaries: records that are planted to measure what a release reveals of the most exposed ones.

See Aerni, Zhang and Tramer 2024.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from privot.components.dead_leaves import generate_dead_leaves
from privot.data.dataset import Records
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets.generators.dense import scaled_dct_basis

# Kinds that are made of the data owner's records, and as secret as these.
IN_DISTRIBUTION_KINDS = ("clean", "mislabelled")
# Kinds that do not depend on the data.
OUT_OF_DISTRIBUTION_KINDS = ("blank", "noise", "dead-leaves", "orthogonal")
CANARY_KINDS = IN_DISTRIBUTION_KINDS + OUT_OF_DISTRIBUTION_KINDS


def generate_canaries(
    kind: str,
    spec: Spec,
    count: int,
    generator: torch.Generator,
    images: Tensor | None = None,
    labels: Tensor | None = None,
) -> Records:
    """Generate canaries on the CPU, deterministically by the random generator.

    Labels of out-of-distribution canaries are uniform at random.

    Args:
        kind: ``clean``: given records. ``mislabelled``: given records with another label.
            ``blank``: images of one colour each. ``noise``: uniform pixels. ``dead-leaves``:
            synthetic images of overlapping shapes. ``orthogonal``: products of cosines, orthogonal
            in pairs about mid-grey and scaled to fill [0, 1], so that they move a mean far and no
            two are alike.
        spec: Shape and number of classes.
        count: Number of canaries.
        generator: Source of randomness.
        images: Images that ``clean`` and ``mislabelled`` canaries are made of.
        labels: Labels of these images.

    Returns:
        The canaries.

    Raises:
        SettingError: If the kind is unknown, or so many canaries of it cannot be made.

    >>> made = generate_canaries("blank", Spec((1, 8, 8), 10), 3, torch.Generator().manual_seed(0))
    >>> made.images.shape, made.images.flatten(1).std(1).tolist()
    (torch.Size([3, 1, 8, 8]), [0.0, 0.0, 0.0])
    """
    if kind not in CANARY_KINDS or count < 1:
        raise SettingError(
            f"canaries: {count} of kind {kind!r}. Give at least 1, of kind "
            f"{', '.join(CANARY_KINDS)}."
        )
    if kind in IN_DISTRIBUTION_KINDS:
        return _choose_from_records(kind, spec, count, generator, images, labels)
    generate = {
        "blank": _generate_blank,
        "noise": _generate_noise,
        "dead-leaves": _generate_dead_leaves,
        "orthogonal": _generate_orthogonal,
    }[kind]
    return Records(
        generate(spec, count, generator),
        torch.randint(0, spec.num_classes, (count,), generator=generator),
    )


def flip_fair_coins(count: int) -> np.ndarray:
    """Decide by fair, independent coins which canaries one run includes: bool [count].

    The coins are random numbers of the operating system. The confidence of an audit in one run is
    over these coins, so nobody may know or choose them.
    """
    return np.frombuffer(os.urandom(count), np.uint8) < 128


def _choose_from_records(
    kind: str,
    spec: Spec,
    count: int,
    generator: torch.Generator,
    images: Tensor | None,
    labels: Tensor | None,
) -> Records:
    """Choose records at random, for ``mislabelled`` with another label.

    Args:
        kind: ``clean`` or ``mislabelled``.
        spec: Shape and number of classes.
        count: Number of canaries.
        generator: Source of randomness.
        images: Images to choose from.
        labels: Their labels.

    Returns:
        The canaries.
    """
    if (
        images is None
        or labels is None
        or len(images) < count
        or images.shape[1:] != spec.shape
        or len(labels) != len(images)
    ):
        raise SettingError(
            f"{kind} canaries are made of records. Give at least {count} images of shape "
            f"{list(spec.shape)} with labels."
        )
    if kind == "mislabelled" and spec.num_classes < 2:
        raise SettingError("mislabelled canaries need at least 2 classes")
    chosen = torch.randperm(len(images), generator=generator)[:count].to(images.device)
    canary_labels = labels.to(images.device)[chosen].cpu()
    if kind == "mislabelled":
        shift = torch.randint(1, spec.num_classes, (count,), generator=generator)
        canary_labels = canary_labels + shift
    return Records(images[chosen].cpu().float(), canary_labels % spec.num_classes)


def _generate_blank(spec: Spec, count: int, generator: torch.Generator) -> Tensor:
    """Generate images of one random colour each."""
    colours = torch.rand(count, spec.shape[0], 1, 1, generator=generator)
    return colours.expand(count, *spec.shape).contiguous()


def _generate_noise(spec: Spec, count: int, generator: torch.Generator) -> Tensor:
    """Generate images of uniform random pixels."""
    return torch.rand(count, *spec.shape, generator=generator)


def _generate_dead_leaves(spec: Spec, count: int, generator: torch.Generator) -> Tensor:
    """Generate dead-leaves images, each of a class of its own."""
    return generate_dead_leaves(count, 1, spec.shape, generator, torch.device("cpu"))[0]


def _generate_orthogonal(spec: Spec, count: int, generator: torch.Generator) -> Tensor:
    """Generate products of cosines along channels, rows and columns, scaled to fill [0, 1]."""
    if count > spec.num_features:
        raise SettingError(
            f"count={count}: images of {spec.num_features} values have at most so many "
            "orthogonal canaries"
        )
    indices = torch.randperm(spec.num_features, generator=generator)[:count]
    # Rows of each [size, size] basis are cosines.
    channel_basis, row_basis, column_basis = (scaled_dct_basis(size, size).T for size in spec.shape)
    channels = channel_basis[indices // (spec.shape[1] * spec.shape[2])]
    rows = row_basis[indices // spec.shape[2] % spec.shape[1]]
    columns = column_basis[indices % spec.shape[2]]
    cosines = channels[:, :, None, None] * rows[:, None, :, None] * columns[:, None, None, :]
    return 0.5 + 0.5 * cosines / cosines.abs().amax((1, 2, 3), keepdim=True)
