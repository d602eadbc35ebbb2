"""Fingerprints of data sets, by which a stored run finds out that its records have changed."""

from __future__ import annotations

import hashlib

from privot.data.dataset import CHECK_CHUNK_SIZE, Public, Sensitive


def hash_dataset(dataset: Sensitive | Public) -> str:
    """Compute the SHA-256 of all images, as float32 in [0, 1], and labels of a data set."""
    digest = hashlib.sha256()
    for start in range(0, dataset._count_records(), CHECK_CHUNK_SIZE):
        images, labels = dataset._read_records(slice(start, start + CHECK_CHUNK_SIZE))
        digest.update(images.numpy().tobytes() + labels.numpy().tobytes())
    return digest.hexdigest()
