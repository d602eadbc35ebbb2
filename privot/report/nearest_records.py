"""Nearest real records, for the owner's eyes: does the release repeat what it was made from?

The figure of Dong et al. (2022): each synthetic image beside the real ones nearest to it, by L2 over pixels and by LPIPS.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from privot.attacks.membership import nearest
from privot.attacks.membership.nearest import Neighbours
from privot.data.dataset import Public, Sensitive
from privot.errors import DataError, ReleaseError
from privot.measures.image_similarity import SIDE, l2, lpips, network
from privot.release import Release
from privot.report.formatting import clean
from privot.report.images import labelled, uri
from privot.runtime import Runtime

# samples in the figure, and in the table
SHOWN = 20
COUNT = 200
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 1.0)
PORTION = {
    "pixels": 4096,
    "lpips": 1024,
}  # records at a time, fewer of images above 64 pixels; LPIPS keeps 32,000 numbers of each
SPARE = 8  # a search ranks by matrix products, which cannot tell a copy from near copies: so many more are compared exactly
# LPIPS takes 1 to 2 ms an image on a CPU: more records than WHOLE are searched among SHORT for each sample
WHOLE = 2000
SHORT = 200


def neighbours(
    images: Tensor,
    data: Sensitive | Public,
    count: int = 1,
    metric: str = "pixels",
    *,
    among: Tensor | None = None,
    itself: Tensor | None = None,
    device: str | torch.device = "cpu",
) -> Neighbours:
    """Places and distances, [images, count] or less wide if there are fewer, of the records nearest to images [n, *shape].

    ``among`` [m] names the records that are looked at, ``itself`` [n] for each image the one that is left out. Records are read in
    portions. A copy has L2 distance 0.
    """
    looked = torch.arange(data._count()) if among is None else among
    best = Neighbours(
        torch.zeros(len(images), 0, dtype=torch.int64),
        torch.zeros(len(images), 0, dtype=torch.float64),
    )
    area = max(SIDE**2, images.shape[2] * images.shape[3])
    for part in looked.split(max(1, PORTION[metric] * SIDE**2 // area)):
        found = nearest.neighbours(
            images, data._take(part, device).images, min(count + SPARE, len(part)), metric
        )
        places = part[found.places]
        distances = found.distances
        if itself is not None:
            distances = distances.masked_fill(places == itself[:, None], torch.inf)
        distances, order = torch.cat([best.distances, distances], 1).sort(dim=1, stable=True)
        best = Neighbours(
            torch.cat([best.places, places], 1).gather(1, order)[:, :count], distances[:, :count]
        )
    return best


def study(
    release: Release, data: Sensitive | Public, device: str = "auto"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Quantiles of nearest distances, sample to real and real to real, and ``SHOWN`` samples with the records nearest to them.

    The samples come twice, without pictures among the facts and with them: ``{"class", "sample", "real": [{"by", "record", "l2",
    "lpips", "image"}, ...]}``.
    """
    if data.spec.shape != release.spec.shape:
        raise ReleaseError(
            f"the real records are {list(data.spec.shape)}, the released ones {list(release.spec.shape)}"
        )
    target = Runtime(device).target
    count = data._count()
    held = list(range(release.spec.classes))
    if release.product.kind == "set":
        held = sorted(set(release.product.tensors["labels"].tolist()))
    images, labels = release.sample(
        COUNT, torch.tensor([held[turn % len(held)] for turn in range(COUNT)])
    )
    near = neighbours(images, data, 2, device=target)
    chosen = torch.arange(0, count, -(-count // COUNT))
    between = (
        neighbours(data._take(chosen).images, data, itself=chosen, device=target).distances[:, 0]
        if count > 1
        else torch.zeros(0)
    )
    rows = {"sample to real": near.distances[:, 0], "real to real": between}
    table = {
        name: [_short(each.quantile(share)) for share in QUANTILES] if len(each) else []
        for name, each in rows.items()
    }

    shown = images[:SHOWN]
    found = dict(
        zip(("nearest by L2", "second"), near.places[:SHOWN].unbind(1), strict=False)
    )  # one record alone has no second
    place, searched = _by_lpips(shown, data, target)
    if place is not None:
        found["nearest by LPIPS"] = place
    beside = [(by, places, data._take(places).images) for by, places in found.items()]
    apart = {
        by: (l2(shown, real), lpips(shown, real) if place is not None else None)
        for by, _, real in beside
    }
    names = release.spec.class_names
    drawn: list[dict[str, Any]] = []
    for turn, image in enumerate(shown):
        records = [
            {
                "by": by,
                "record": int(places[turn]),
                "l2": _short(apart[by][0][turn]),
                **({"lpips": _short(other[turn])} if (other := apart[by][1]) is not None else {}),
                "image": uri(real[turn]),
            }
            for by, places, real in beside
        ]
        drawn.append(
            {"class": labelled(names, int(labels[turn])), "sample": uri(image), "real": records}
        )
    facts = {
        "samples": COUNT,
        "real_records_compared": len(chosen),
        "quantiles": list(QUANTILES),
        **table,
        "copies": int((near.distances[:, 0] == 0).sum()),
        "lpips": searched,
        "shown": [
            {"class": each["class"], "real": [_bare(record) for record in each["real"]]}
            for each in drawn
        ],
    }
    return facts, drawn


def _by_lpips(
    images: Tensor, data: Sensitive | Public, device: torch.device
) -> tuple[Tensor | None, dict[str, Any]]:
    """Place [n] of the record nearest by LPIPS, and how it was searched; None and why not, where its weights are not at hand."""
    try:
        network(device)
    except DataError as error:
        return None, {"searched": 0, "why_not": clean(str(error), 300)}
    among = None
    if data._count() > WHOLE and device.type == "cpu":
        among = neighbours(images, data, SHORT, device=device).places.unique()
    found = neighbours(images, data, 1, "lpips", among=among, device=device).places[:, 0]
    return found, {
        "searched": data._count() if among is None else len(among),
        "nearest_in_pixels": 0 if among is None else SHORT,
    }


def _short(value: Tensor) -> float:
    """Four digits; what is not 0 stays so, for 0 means a copy."""
    return float(f"{float(value):.4g}")


def _bare(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "image"}
