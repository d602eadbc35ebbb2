"""Nearest real records, for the owner's eyes: does the release repeat what it was made from?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from privot.data.records import Public, Sensitive
from privot.errors import ReleaseError
from privot.release import Release
from privot.report.pictures import labelled, uri

PAIRS, COUNT, PORTION = 20, 200, 4096
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 1.0)


def neighbours(queries: Tensor, data: Sensitive | Public, itself: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Distance [count] and place [count] of the record nearest to each query [count, pixels], by L2 over pixels.

    ``itself`` [count] names for each query the record that is left out. Records are read in portions.
    """
    best, place = torch.full((len(queries),), torch.inf), torch.zeros(len(queries), dtype=torch.int64)
    for start in range(0, data._count(), PORTION):
        images = data._take(slice(start, start + PORTION)).images.flatten(1)
        apart = torch.cdist(queries, images)
        if itself is not None:
            mine = (itself >= start) & (itself < start + len(images))
            apart[mine.nonzero().flatten(), itself[mine] - start] = torch.inf
        found, where = apart.min(1)
        closer = found < best
        best, place = torch.where(closer, found, best), torch.where(closer, where + start, place)
    exact = queries - data._take(place).images.flatten(1)  # the fast product above cannot tell a copy from a near copy
    return exact.norm(dim=1), place


def study(release: Release, data: Sensitive | Public) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Quantiles of nearest distances, sample to real and real to real, and ``PAIRS`` samples with their nearest record."""
    if data.spec.shape != release.spec.shape:
        raise ReleaseError(f"the real records are {list(data.spec.shape)}, the released ones {list(release.spec.shape)}")
    shown = list(range(release.spec.classes))
    if release.product.kind == "set":
        shown = sorted(set(release.product.tensors["labels"].tolist()))
    images, labels = release.sample(COUNT, torch.tensor([shown[turn % len(shown)] for turn in range(COUNT)]))
    distance, place = neighbours(images.flatten(1), data)
    count = data._count()
    chosen = torch.arange(0, count, -(-count // COUNT))
    real = data._take(chosen).images.flatten(1)
    between = neighbours(real, data, itself=chosen)[0] if count > 1 else torch.zeros(0)
    rows = {"sample to real": distance, "real to real": between}
    table = {name: [round(float(each.quantile(share)), 4) for share in QUANTILES] if len(each) else [] for name, each in rows.items()}
    twins = data._take(place[:PAIRS])
    pairs = [
        {
            "sample": uri(images[turn]), "real": uri(twins.images[turn]), "distance": round(float(distance[turn]), 4),
            "class": labelled(release.spec.class_names, int(labels[turn])),
        }
        for turn in range(min(PAIRS, COUNT))
    ]  # fmt: skip
    facts = {"samples": COUNT, "real_records_compared": len(chosen), "quantiles": list(QUANTILES), **table}
    return {**facts, "pairs": [{"class": pair["class"], "distance": pair["distance"]} for pair in pairs]}, pairs
