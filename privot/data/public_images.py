"""Public pictures beside the sensitive ones, for a method to learn from before it asks anything."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from privot.data.dataset import Public, Sensitive
from privot.data.loading import load
from privot.errors import SettingError


def aside(source: str, box: Sensitive) -> tuple[Tensor, dict[str, Any]]:
    """Images of a public data set (a built-in's train split, or a path) as the sensitive ones are, [count, *shape], and what they were.

    Sides are fitted, colours become grey or grey is taken thrice. The sensitive data itself is refused, by its name or resolved path.
    The facts, with the digest of the public pictures, go into the manifest.
    """
    found = load(source, public=True)
    assert isinstance(found, Public)
    # privacy: names alone are compared, and they are public. A comparison of the records would answer, free of charge, whether the
    # public file holds them. What is called public is the owner's word: see docs/promise.md.
    if found.name == box.name:
        raise SettingError(
            f"public={source}: this is the sensitive data itself; name data that is public"
        )
    images = found.records().images
    facts = {"name": source, "sha256": digest(found), "count": len(images)}
    channels, *sides = box.spec.shape
    if images.shape[1] != channels:
        images = (
            images.mean(1, keepdim=True) if channels == 1 else images.expand(-1, channels, -1, -1)
        )
    if list(images.shape[2:]) != sides:
        images = torch.cat(
            [
                interpolate(part, sides, mode="bilinear", antialias=True)
                for part in images.split(1000)
            ]
        ).clamp(0, 1)
    return images.contiguous(), facts


def digest(box: Sensitive | Public) -> str:
    """SHA-256 of the images as bytes, whether they are stored as bytes or as floats."""
    made = hashlib.sha256(repr(box._images.shape).encode())
    for start in range(0, len(box._images), 1000):
        part = box._images[start : start + 1000]
        made.update(
            (part if part.dtype == np.uint8 else (255 * part).round().astype(np.uint8)).tobytes()
        )
    return made.hexdigest()
