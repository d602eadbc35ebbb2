"""The sliced methods compared with DP-MERF: FID and CNN accuracy of every mode.

Datasets are MNIST, Fashion-MNIST and CelebA; epsilon goes from infinity to 1.

    python bench/table2.py                              run missing rows, then print the table
    python bench/table2.py --rows mnist/blocks@10 mnist/merf@1
    python bench/table2.py --rows mnist                 all rows that start so
    python bench/table2.py --table                      print the table of the stored rows only
    python bench/table2.py --list                       print the names of the rows

A row is a file in bench/table2/; a stored row is not run again. The table is printed as Markdown.
FID is that of the paper's code: 10,000 samples against the 10,000 test images, with black borders
up to 32 pixels. The CelebA subset has 659 test images, too few for an FID, so its rows are against
the 14,283 training images, at 64 pixels. CNN is the accuracy of a LeNet trained on 60,000 images,
of the last epoch, on the test images. Epsilon infinity means no noise and no guarantee. The data
and the Inception weights must be in the folder PRIVOT_DATA.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from environment import (
    describe_environment,
    load_public,
    make_parser,
    print_header,
    print_row,
    write_json,
)
from torch import Tensor
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
FID_SAMPLES = 10_000
ACCURACY_SAMPLES = 60_000
FID_SIDE = 32
PUBLIC_DATA = {"mnist": "femnist", "fashion-mnist": "femnist", "celeba": "cifar10"}
PUBLIC_SPACE = {"space": "public", "autoencoder_steps": 10_000}
FEW_FREQUENCIES = {"num_frequencies": 4}  # for modes that add noise to every record
# Method and settings of each configuration. Public autoencoders have 8 or 32 dimensions; the
# latent space of the paper has 8 to 48.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("sliced-flow", {}),
    "blocks-public": ("sliced-flow", {**PUBLIC_SPACE, "autoencoder_dim": 32}),
    "blocks-private": ("sliced-flow", {"space": "private"}),
    "records": ("sliced-flow", {"mode": "records", **FEW_FREQUENCIES}),
    "records-public": ("sliced-flow", {"mode": "records", **PUBLIC_SPACE, "autoencoder_dim": 8}),
    "resampled": ("sliced-flow", {"mode": "resampled", "sample_size": 1000, **FEW_FREQUENCIES}),
    "resampled-public": (
        "sliced-flow",
        {"mode": "resampled", "sample_size": 1000, **PUBLIC_SPACE, "autoencoder_dim": 8},
    ),
    "generator": ("sliced-generator", {"generator": "conv"}),
    "generator-public": ("sliced-generator", {**PUBLIC_SPACE, "autoencoder_dim": 32}),
    "generator-records": (
        "sliced-generator",
        {"mode": "records", "generator": "conv", **FEW_FREQUENCIES},
    ),
    "generator-records-public": (
        "sliced-generator",
        {"mode": "records", **PUBLIC_SPACE, "autoencoder_dim": 8},
    ),
    "merf": ("merf", {}),
}


def list_rows() -> list[str]:
    """List the names of all rows."""
    return [
        f"{data}/{run}"
        for data, epsilons in EPSILONS.items()
        for run in (
            *(["real"] if data != "celeba" else []),
            *(f"{name}@{epsilon}" for epsilon in epsilons for name in CONFIGURATIONS),
        )
    ]


def get_path(row: str) -> Path:
    """Return the file of a row."""
    return ROWS / f"{row.replace('/', '-').replace('@', '-')}.json"


def print_progress(stage: str, step: int, total: int, **facts: Any) -> None:
    """Print the end of each stage."""
    if step == total:
        print(f"  {stage} {step}/{total}", flush=True)


def pad_images(images: Tensor) -> Tensor:
    """Pad images smaller than `FID_SIDE` with black borders."""
    room = [max(0, FID_SIDE - side) for side in images.shape[2:]]
    return pad(images, (room[1] // 2, room[1] - room[1] // 2, room[0] // 2, room[0] - room[0] // 2))


@functools.cache
def load_evaluators(data: str, device: str) -> tuple[Evaluator, Evaluator]:
    """Build the evaluators of FID and of accuracy."""
    test = load_public(data, "test")
    reference = load_public(data) if data == "celeba" else test
    images, labels = reference.records()
    padded = pad_images(images)
    channels, height, width = padded.shape[1:]
    spec = privot.Spec((channels, height, width), reference.spec.num_classes)
    padded_reference = Public(
        (padded * 255).round().byte().numpy(),
        labels.numpy(),
        spec,
        name=f"{reference.name}, {height} px",
    )
    fid_evaluator, accuracy_evaluator = (
        Evaluator(dataset, runtime=Runtime(device), progress=print_progress, on_warning=print)
        for dataset in (padded_reference, test)
    )
    return fid_evaluator, accuracy_evaluator


def synthesize_row(row: str, device: str) -> tuple[Samples, dict[str, Any]]:
    """Make the samples that a row measures, and the facts about them."""
    data, run = row.split("/")
    num_samples = FID_SAMPLES if data == "celeba" else ACCURACY_SAMPLES
    if run == "real":
        images, labels = load_public(data).records()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        num_classes = int(labels.max()) + 1
        return Samples(row, images[order], labels[order], num_classes, publishable=True), {}
    configuration, epsilon = run.split("@")
    method, configured = CONFIGURATIONS[configuration]
    settings = dict(configured)
    dataset = privot.load(data, public_classes=True)
    assert isinstance(dataset, Sensitive)
    if settings.get("space") == "public":
        settings["public_data"] = PUBLIC_DATA[data]
    if method == "sliced-flow":
        settings["images_per_class"] = num_samples // dataset.spec.num_classes
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        release = privot.synthesize(
            dataset,
            method,
            float(epsilon),
            settings=settings,
            ledger=f"{folder}/ledger.jsonl",
            runtime=Runtime(device),
            progress=print_progress,
        )
    guarantee = release.guarantee
    facts = {
        "seconds": time.perf_counter() - start,
        "settings": settings,
        "method": method,
        "guarantee": to_jsonable(
            {"kind": type(guarantee).__name__, **dataclasses.asdict(guarantee)}
        ),
    }
    images, labels = release.sample(num_samples, device=Runtime(device).torch_device)
    return Samples(row, images, labels, dataset.spec.num_classes, publishable=True), facts


def measure_row(row: str, device: str) -> None:
    """Synthesize, measure and store a row that is not stored."""
    if get_path(row).exists():
        return
    samples, facts = synthesize_row(row, device)
    data = row.split("/")[0]
    fid_evaluator, accuracy_evaluator = load_evaluators(data, device)
    padded_samples = dataclasses.replace(
        samples,
        images=pad_images(samples.images[:FID_SAMPLES]),
        labels=samples.labels[:FID_SAMPLES],
    )
    results = fid_evaluator.measure(padded_samples, ["fid"])
    if data != "celeba":
        results += accuracy_evaluator.measure(samples, ["cnn"])
    stored = {"row": row, **facts, **describe_environment()}
    stored["results"] = [to_jsonable(dataclasses.asdict(result)) for result in results]
    write_json(get_path(row), stored)


def print_stored_row(row: str) -> None:
    """Print a stored row as a row of the table."""
    stored = json.loads(get_path(row).read_text())
    values = {result["name"]: float(result["value"]) for result in stored["results"]}
    data, run = row.split("/")
    configuration, _, epsilon = run.partition("@")
    print_row(
        data,
        configuration,
        epsilon or "-",
        f"{values['fid']:.1f}" if "fid" in values else "-",
        f"{values['cnn_accuracy']:.3f}" if "cnn_accuracy" in values else "-",
        f"{stored['seconds']:.0f} s" if "seconds" in stored else "-",
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--rows",
        nargs="+",
        default=[""],
        help="rows, datasets, or rows without their epsilon; default: all",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    options = parser.parse_args()
    chosen = [
        row
        for row in list_rows()
        if any(name in ("", row, row.split("/")[0], row.split("@")[0]) for name in options.rows)
    ]
    if options.list or not chosen:
        print("\n".join(chosen or list_rows()))
        return
    for row in [] if options.table else chosen:
        start = time.perf_counter()
        measure_row(row, options.device)
        print(f"{row}: {time.perf_counter() - start:.0f} s", flush=True)
    print()
    print_header("data", "configuration", "epsilon", "FID", "CNN", "training")
    for row in chosen:
        if get_path(row).exists():
            print_stored_row(row)


if __name__ == "__main__":
    main()
