"""The sliced family beside DP-MERF: FID and CNN accuracy of every mode on MNIST, Fashion-MNIST and CelebA, from epsilon infinity to 1.

    python bench/table2.py                              every row that is not there yet, then the table
    python bench/table2.py --rows mnist/blocks@10 mnist/merf@1
    python bench/table2.py --rows mnist                 all rows that begin so
    python bench/table2.py --table                      only the table, from the rows at hand
    python bench/table2.py --list

A row is a file in bench/table2/, a row that is there is not made again; the table is printed as Markdown. FID is that of the paper's code:
10,000 samples against the 10,000 test images, black borders up to 32 pixels. CelebA's subset has 659 test images, too few for
an FID, so its rows are against the 14,283 training images, at 64 pixels. CNN: LeNet on 60,000 images, the accuracy of the last epoch on the
test images. Epsilon infinity is noise 0, without a guarantee. The data and the Inception weights must be at hand (PRIVOT_DATA).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from environment import commit, hardware
from torch.nn.functional import pad

import privot
from privot.data import Public, Sensitive
from privot.io import to_jsonable
from privot.measures import Evaluator, Samples
from privot.runtime import Runtime

ROWS = Path(__file__).parent / "table2"
EPSILONS = {
    "mnist": ("inf", "10", "5", "1"),
    "fashion-mnist": ("inf", "10", "5", "1"),
    "celeba": ("inf", "10"),
}
SAMPLES = 10_000
ACCURACY_SAMPLES = 60_000
SIDE = 32
BESIDE = {
    "mnist": "femnist",
    "fashion-mnist": "femnist",
    "celeba": "cifar10",
}  # public data for an auto-encoder
LEARNED = {"space": "public", "autoencoder_steps": 10_000}
FEW = {"num_frequencies": 4}  # numbers a side of a point, where noise goes on every record
# method and settings of a row; the paper's modes in 16 dimensions, as its latent space has 8 to 48
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("sliced-flow", {}),
    "blocks-public": ("sliced-flow", {**LEARNED, "autoencoder_dim": 32}),
    "blocks-private": ("sliced-flow", {"space": "private"}),
    "records": ("sliced-flow", {"mode": "records", **FEW}),
    "records-public": ("sliced-flow", {"mode": "records", **LEARNED, "autoencoder_dim": 8}),
    "resampled": ("sliced-flow", {"mode": "resampled", "sample_size": 1000, **FEW}),
    "resampled-public": (
        "sliced-flow",
        {"mode": "resampled", "sample_size": 1000, **LEARNED, "autoencoder_dim": 8},
    ),
    "generator": ("sliced-generator", {"generator": "conv"}),
    "generator-public": ("sliced-generator", {**LEARNED, "autoencoder_dim": 32}),
    "generator-records": ("sliced-generator", {"mode": "records", "generator": "conv", **FEW}),
    "generator-records-public": (
        "sliced-generator",
        {"mode": "records", **LEARNED, "autoencoder_dim": 8},
    ),
    "merf": ("merf", {}),
}


def rows() -> list[str]:
    return [
        f"{data}/{what}"
        for data, epsilons in EPSILONS.items()
        for what in (
            *(["real"] if data != "celeba" else []),
            *(f"{way}@{epsilon}" for epsilon in epsilons for way in WAYS),
        )
    ]


def file_of(row: str) -> Path:
    return ROWS / f"{row.replace('/', '-').replace('@', '-')}.json"


def say(stage: str, step: int, of: int, **more: Any) -> None:
    if step == of:
        print(f"  {stage} {step}/{of}", flush=True)


def bordered(images: torch.Tensor) -> torch.Tensor:
    """Black borders up to 32 pixels; larger images stay."""
    room = [max(0, SIDE - side) for side in images.shape[2:]]
    return pad(images, (room[1] // 2, room[1] - room[1] // 2, room[0] // 2, room[0] - room[0] // 2))


@functools.cache
def benches(data: str, device: str) -> tuple[Evaluator, Evaluator]:
    """For FID, and for accuracy."""
    test = privot.load(data, "test", public=True)
    how = {"runtime": Runtime(device), "progress": say, "on_warning": print}
    against = privot.load(data, public=True) if data == "celeba" else test
    assert isinstance(against, Public)
    images, labels = against.records()
    large = bordered(images)
    spec = privot.Spec(tuple(large.shape[1:]), against.spec.num_classes)
    framed = Public(
        (large * 255).round().byte().numpy(),
        labels.numpy(),
        spec,
        name=f"{against.name}, {large.shape[2]} px",
    )
    return Evaluator(framed, **how), Evaluator(test, **how)  # type: ignore[arg-type]


def made(row: str, device: str) -> tuple[Samples, dict[str, Any]]:
    """What the row measures, and how it came about."""
    data, what = row.split("/")
    if what == "real":
        images, labels = privot.load(data, public=True).records()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        return Samples(
            row, images[order], labels[order], int(labels.max()) + 1, publishable=True
        ), {}
    way, epsilon = what.split("@")
    method, settings = WAYS[way]
    box = privot.load(data, public_classes=True)
    assert isinstance(box, Sensitive)
    settings = dict(settings)
    if settings.get("space") == "public":
        settings["public_data"] = BESIDE[data]
    if method == "sliced-flow":
        settings["images_per_class"] = (
            ACCURACY_SAMPLES if data != "celeba" else SAMPLES
        ) // box.spec.num_classes
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        release = privot.synthesize(
            box,
            method,
            float(epsilon),
            settings=settings,
            ledger=f"{folder}/ledger.jsonl",
            runtime=Runtime(device),
            progress=say,
        )
    facts = {
        "seconds": time.perf_counter() - start,
        "settings": settings,
        "method": method,
        "guarantee": to_jsonable(
            {"kind": type(release.guarantee).__name__, **dataclasses.asdict(release.guarantee)}
        ),
    }
    images, labels = release.sample(
        ACCURACY_SAMPLES if data != "celeba" else SAMPLES, device=Runtime(device).torch_device
    )
    return Samples(row, images, labels, box.spec.num_classes, publishable=True), facts


def run(row: str, device: str) -> None:
    if file_of(row).exists():
        return
    subject, facts = made(row, device)
    fid_evaluator, accuracy_evaluator = benches(data := row.split("/")[0], device)
    some = dataclasses.replace(
        subject, images=bordered(subject.images[:SAMPLES]), labels=subject.labels[:SAMPLES]
    )
    readings = fid_evaluator.measure(some, ["fid"])
    readings += accuracy_evaluator.measure(subject, ["cnn"]) if data != "celeba" else []
    where = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": hardware(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    ROWS.mkdir(exist_ok=True)
    part = file_of(row).with_suffix(".part")
    part.write_text(
        json.dumps(
            {
                "row": row,
                **facts,
                **where,
                "readings": [to_jsonable(dataclasses.asdict(each)) for each in readings],
            },
            indent=1,
        )
    )
    part.replace(file_of(row))


def line(row: str) -> str:
    known = json.loads(file_of(row).read_text())
    found = {each["name"]: float(each["value"]) for each in known["readings"]}
    cells = [
        f"{found['fid']:.1f}" if "fid" in found else "-",
        f"{found['cnn_accuracy']:.3f}" if "cnn_accuracy" in found else "-",
    ]
    data, what = row.split("/")
    way, _, epsilon = what.partition("@")
    return (
        "| "
        + " | ".join(
            [
                data,
                way,
                epsilon or "-",
                *cells,
                f"{known['seconds']:.0f} s" if "seconds" in known else "-",
            ]
        )
        + " |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=[""], help="rows, or how they begin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--table", action="store_true", help="make nothing")
    parser.add_argument("--list", action="store_true", help="only the names of the rows")
    asked = parser.parse_args()
    chosen = [
        row
        for row in rows()
        if any(
            row == each or (each in ("", row.split("/")[0], row.split("@")[0]))
            for each in asked.rows
        )
    ]
    if asked.list or not chosen:
        print("\n".join(chosen or rows()))
        return
    for row in [] if asked.table else chosen:
        start = time.perf_counter()
        run(row, asked.device)
        print(f"{row}: {time.perf_counter() - start:.0f} s", flush=True)
    print("\n| data | way | epsilon | FID | CNN | made in |\n|---|---|---|---|---|---|")
    print("\n".join(line(row) for row in chosen if file_of(row).exists()))


if __name__ == "__main__":
    main()
