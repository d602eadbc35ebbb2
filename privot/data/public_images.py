"""Public images that a method trains on before its first query."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from privot.data.dataset import Public, Sensitive
from privot.data.loading import load_dataset
from privot.errors import SettingError

CHUNK_SIZE = 1000  # images that are resized or hashed at a time


def load_public_images(source: str, dataset: Sensitive) -> tuple[Tensor, dict[str, Any]]:
    """Load the images of a public data set, in the shape of the sensitive ones.

    Sides are resized. Colours become gray, or gray becomes three equal channels.

    Args:
        source: A built-in data set, of which the train split is read, or a path.
        dataset: The sensitive data. It is refused as public data, by its name or resolved path.

    Returns:
        Images, [count, *shape], and the facts for the manifest, with the digest of the images.

    Raises:
        SettingError: If the source is the sensitive data.
    """
    public = load_dataset(source, public=True)
    assert isinstance(public, Public)
    # privacy: only names are compared, and names are public. A comparison of the records would
    # tell, free of charge, whether the public file contains them. That the data is public is the
    # data owner's word: see docs/promise.md.
    if public.name == dataset.name:
        raise SettingError(
            f"public_data={source}: this is the sensitive data itself. Name a public data set."
        )
    images = public.records().images
    facts = {"name": source, "sha256": hash_images(public), "count": len(images)}
    channels, *sides = dataset.spec.shape
    if images.shape[1] != channels:
        images = (
            images.mean(1, keepdim=True) if channels == 1 else images.expand(-1, channels, -1, -1)
        )
    if list(images.shape[2:]) != sides:
        resized = [
            interpolate(chunk, sides, mode="bilinear", antialias=True)
            for chunk in images.split(CHUNK_SIZE)
        ]
        images = torch.cat(resized).clamp(0, 1)
    return images.contiguous(), facts


def hash_images(dataset: Sensitive | Public) -> str:
    """Compute the SHA-256 of images as bytes, whether they are stored as bytes or as floats."""
    digest = hashlib.sha256(repr(dataset._images.shape).encode())
    for start in range(0, len(dataset._images), CHUNK_SIZE):
        chunk = dataset._images[start : start + CHUNK_SIZE]
        if chunk.dtype != np.uint8:
            chunk = (255 * chunk).round().astype(np.uint8)
        digest.update(chunk.tobytes())
    return digest.hexdigest()
