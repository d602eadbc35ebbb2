"""Nearest real records, for the data owner: does the release repeat records it was made from?

Shows each synthetic image beside the nearest real ones, by L2 over pixels and by LPIPS, as in the
figure of Dong et al. (2022).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from privot.data.dataset import Public, Sensitive
from privot.errors import DataError, ReleaseError
from privot.measures.image_similarity import LPIPS_MIN_SIDE, l2, load_lpips_network, lpips
from privot.measures.nearest import NearestNeighbours, search_nearest_neighbours
from privot.release import Release
from privot.report.formatting import clean_text
from privot.report.images import encode_data_uri, format_class_name
from privot.runtime import Runtime

NUM_SHOWN_SAMPLES = 20
NUM_COMPARED_SAMPLES = 200
DISTANCE_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 1.0)
# At sides of up to 64 pixels. LPIPS computes 32,000 features per record.
RECORDS_PER_CHUNK = {"pixels": 4096, "lpips": 1024}
# The search ranks by matrix products, which cannot separate a copy from near copies. So this many
# more candidates are compared exactly.
NUM_EXTRA_CANDIDATES = 8
# LPIPS takes 1 to 2 ms per image on a CPU. With more records than this, it only searches a
# shortlist of the records nearest in pixels to each sample.
MAX_FULL_LPIPS_RECORDS = 2000
LPIPS_SHORTLIST_SIZE = 200


def find_nearest_records(
    images: Tensor,
    data: Sensitive | Public,
    num_neighbours: int = 1,
    metric: str = "pixels",
    *,
    candidate_indices: Tensor | None = None,
    excluded_indices: Tensor | None = None,
    device: str | torch.device = "cpu",
) -> NearestNeighbours:
    """Find the records nearest to each image. A copy has L2 distance 0.

    Args:
        images: Images [n, channels, height, width] in [0, 1].
        data: The records, which are read in chunks.
        num_neighbours: Number of records per image.
        metric: "pixels" (L2) or "lpips".
        candidate_indices: Indices [m] of the records that are searched; None for all.
        excluded_indices: Index [n] of one record per image that does not count, such as itself.
        device: Where distances are computed.

    Returns:
        Indices and distances [n, num_neighbours], or fewer if there are fewer records.
    """
    candidates = candidate_indices
    if candidates is None:
        candidates = torch.arange(data._count_records())
    nearest = NearestNeighbours(
        torch.zeros(len(images), 0, dtype=torch.int64),
        torch.zeros(len(images), 0, dtype=torch.float64),
    )
    area = max(LPIPS_MIN_SIDE**2, images.shape[2] * images.shape[3])
    chunk_size = max(1, RECORDS_PER_CHUNK[metric] * LPIPS_MIN_SIDE**2 // area)
    for chunk in candidates.split(chunk_size):
        neighbours = search_nearest_neighbours(
            images,
            data._read_records(chunk, device).images,
            min(num_neighbours + NUM_EXTRA_CANDIDATES, len(chunk)),
            metric,
        )
        indices = chunk[neighbours.indices]
        distances = neighbours.distances
        if excluded_indices is not None:
            distances = distances.masked_fill(indices == excluded_indices[:, None], torch.inf)
        distances, order = torch.cat([nearest.distances, distances], 1).sort(dim=1, stable=True)
        indices = torch.cat([nearest.indices, indices], 1).gather(1, order)
        nearest = NearestNeighbours(indices[:, :num_neighbours], distances[:, :num_neighbours])
    return nearest


def compare_nearest_records(
    release: Release, data: Sensitive | Public, device: str = "auto"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Compare samples of a release with the nearest real records.

    Args:
        release: The release.
        data: The real records.
        device: Where distances are computed.

    Returns:
        Facts: quantiles of the distances from samples to real records and between real records, the
        number of copies, and the shown samples without images. Then the shown samples with images:
        ``{"class", "sample", "real": [{"caption", "record", "l2", "lpips", "image"}, ...]}``.

    Raises:
        ReleaseError: The records have another shape.
    """
    if data.spec.shape != release.spec.shape:
        raise ReleaseError(
            f"The real records are {list(data.spec.shape)} and the released images are "
            f"{list(release.spec.shape)}. Name the data from which the release was made."
        )
    target_device = Runtime(device).torch_device
    images, labels = _sample_images(release)
    nearest = find_nearest_records(images, data, 2, device=target_device)
    real_distances = _measure_real_distances(data, target_device)
    distances = {"sample to real": nearest.distances[:, 0], "real to real": real_distances}
    quantiles = {
        name: [_round_distance(values.quantile(share)) for share in DISTANCE_QUANTILES]
        if len(values)
        else []
        for name, values in distances.items()
    }
    pairs, lpips_facts = _pair_with_records(
        release, images[:NUM_SHOWN_SAMPLES], labels, nearest, data, target_device
    )
    facts = {
        "samples": NUM_COMPARED_SAMPLES,
        "real_records_compared": len(_select_real_records(data)),
        "quantiles": list(DISTANCE_QUANTILES),
        **quantiles,
        "copies": int((nearest.distances[:, 0] == 0).sum()),
        "lpips": lpips_facts,
        "shown": [
            {"class": pair["class"], "real": [_drop_image(record) for record in pair["real"]]}
            for pair in pairs
        ],
    }
    return facts, pairs


def _sample_images(release: Release) -> tuple[Tensor, Tensor]:
    """Sample images and labels, with the classes that the release contains in turn."""
    classes = list(range(release.spec.num_classes))
    if release.artifact.kind == "set":
        classes = sorted(set(release.artifact.tensors["labels"].tolist()))
    labels = [classes[index % len(classes)] for index in range(NUM_COMPARED_SAMPLES)]
    return release.sample(NUM_COMPARED_SAMPLES, torch.tensor(labels))


def _select_real_records(data: Sensitive | Public) -> Tensor:
    """Select indices of at most 200 records at equal intervals."""
    count = data._count_records()
    return torch.arange(0, count, -(-count // NUM_COMPARED_SAMPLES))


def _measure_real_distances(data: Sensitive | Public, device: torch.device) -> Tensor:
    """Measure the L2 distance of some real records to the nearest other record."""
    if data._count_records() < 2:
        return torch.zeros(0)
    indices = _select_real_records(data)
    images = data._read_records(indices).images
    neighbours = find_nearest_records(images, data, excluded_indices=indices, device=device)
    return neighbours.distances[:, 0]


def _pair_with_records(
    release: Release,
    images: Tensor,
    labels: Tensor,
    nearest: NearestNeighbours,
    data: Sensitive | Public,
    device: torch.device,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Put samples beside their nearest records by L2 and by LPIPS.

    Args:
        release: The release, for the names of the classes.
        images: The samples [n, channels, height, width].
        labels: Their labels, at least [n].
        nearest: The two nearest records by L2 of at least these samples.
        data: The real records.
        device: Where LPIPS is computed.

    Returns:
        The samples with their records, and facts about the search by LPIPS.
    """
    # A dataset of one record has no second.
    columns = nearest.indices[: len(images)].unbind(1)
    indices = dict(zip(("nearest by L2", "second"), columns, strict=False))
    lpips_indices, lpips_facts = _find_nearest_by_lpips(images, data, device)
    if lpips_indices is not None:
        indices["nearest by LPIPS"] = lpips_indices
    records = {caption: data._read_records(rows).images for caption, rows in indices.items()}
    l2_distances = {caption: l2(images, real) for caption, real in records.items()}
    lpips_distances = {}
    if lpips_indices is not None:
        lpips_distances = {caption: lpips(images, real) for caption, real in records.items()}
    pairs = []
    for row, image in enumerate(images):
        described_records = []
        for caption, real in records.items():
            record = {
                "caption": caption,
                "record": int(indices[caption][row]),
                "l2": _round_distance(l2_distances[caption][row]),
            }
            if caption in lpips_distances:
                record["lpips"] = _round_distance(lpips_distances[caption][row])
            described_records.append({**record, "image": encode_data_uri(real[row])})
        pairs.append(
            {
                "class": format_class_name(release.spec.class_names, int(labels[row])),
                "sample": encode_data_uri(image),
                "real": described_records,
            }
        )
    return pairs, lpips_facts


def _find_nearest_by_lpips(
    images: Tensor, data: Sensitive | Public, device: torch.device
) -> tuple[Tensor | None, dict[str, Any]]:
    """Find the record nearest to each image by LPIPS.

    Args:
        images: Images [n, channels, height, width].
        data: The real records.
        device: Where LPIPS is computed.

    Returns:
        Index [n] of each record, and how it was searched; None and the reason without weights.
    """
    try:
        load_lpips_network(device)
    except DataError as error:
        return None, {"searched": 0, "why_not": clean_text(str(error), 300)}
    candidates = None
    if data._count_records() > MAX_FULL_LPIPS_RECORDS and device.type == "cpu":
        shortlist = find_nearest_records(images, data, LPIPS_SHORTLIST_SIZE, device=device)
        candidates = shortlist.indices.unique()
    neighbours = find_nearest_records(
        images, data, 1, "lpips", candidate_indices=candidates, device=device
    )
    return neighbours.indices[:, 0], {
        "searched": data._count_records() if candidates is None else len(candidates),
        "nearest_in_pixels": 0 if candidates is None else LPIPS_SHORTLIST_SIZE,
    }


def _round_distance(value: Tensor) -> float:
    """Round to four significant digits. Only a distance of 0, a copy, becomes 0."""
    return float(f"{float(value):.4g}")


def _drop_image(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "image"}
