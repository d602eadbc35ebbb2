"""Small released sets on real data: accuracy of ConvNets trained on them, seconds and memory.

The accuracy is the mean of 5 trainings, with their deviation.

    python bench/sets.py --method private-set --data mnist fashion-mnist cifar10 --epsilon 1 10 \\
        --per-class 50 [--set key=value]
    python bench/sets.py --data mnist --resize 10 200      other sizes of the same release, at no
                                                           cost in privacy
    python bench/sets.py --method distribution-matching --data cifar10 --per-class 10 50
    python bench/sets.py --method kernel-points --data fashion-mnist --half --set ratio=0.002

Prints one Markdown row for each run; with --out also writes the row as JSON and an image of the
set. Methods without a mechanism take no epsilon. With --half a method gets a random half of the
training images, always the same, as in Dong et al. (2022); a ratio is then of that half, and
"images a class" is the size of the set. The data must be in the folder PRIVOT_DATA. Each run has a
throw-away ledger: this is a benchmark on public data.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from environment import (
    describe_environment,
    format_environment,
    load_public,
    make_parser,
    parse_settings,
    print_header,
    print_row,
    select_records,
)

import privot
from privot.data.dataset import Public, Sensitive
from privot.measures import measure_downstream
from privot.methods import make_method
from privot.privacy.guarantee import Guarantee
from privot.release.export import write_samples
from privot.runtime import Runtime

HALF_SEED = 2022  # public, and the same for every method and run
COLUMNS = (
    "data",
    "method",
    "epsilon",
    "images a class",
    "settings",
    "seed",
    "ConvNet %",
    "with soft labels %",
    "training",
    "memory",
    "measurement",
)


def load_half(data: str) -> Sensitive:
    """Load a random half of the training images."""
    dataset = load_public(data)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(HALF_SEED))
    half: Sensitive = select_records(
        Sensitive, dataset, order[: len(order) // 2], f"half of {data}"
    )
    return half


def load_sensitive(data: str) -> Sensitive:
    """Load a training set as sensitive data."""
    dataset = privot.load(data)
    assert isinstance(dataset, Sensitive)
    return dataset


class ResourceClock:
    """Measures seconds and GPU memory since its construction, and may print the stages."""

    def __init__(self, runtime: Runtime, is_verbose: bool):
        self.start = time.perf_counter()
        self.is_verbose = is_verbose
        self.is_cuda = runtime.torch_device.type == "cuda"
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def report_progress(self, stage: str, step: int, total: int, **facts: object) -> None:
        if self.is_verbose and step == total:
            print(f"    {time.perf_counter() - self.start:6.1f} s  {stage}", flush=True)

    def read(self) -> dict[str, float]:
        """Return seconds and gibibytes."""
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.is_cuda else 0.0
        return {"seconds": time.perf_counter() - self.start, "gibibytes": memory}


def measure_set(
    release: privot.Release,
    facts: dict[str, Any],
    test: Public,
    clock: ResourceClock,
    runtime: Runtime,
    out: Path | None,
) -> None:
    """Train on the set and print its row.

    Args:
        release: The released set.
        facts: What the row states about the run.
        test: The test data.
        clock: The clock of the synthesis.
        runtime: Device of the trainings.
        out: Folder of the row and an image of the set; None: nothing is written.
    """
    cost = clock.read()
    tensors = release.artifact.tensors
    seed = facts["seed"]
    guarantee = release.guarantee
    epsilon = guarantee.epsilon if isinstance(guarantee, Guarantee) else None
    num_classes = test.spec.num_classes
    images_per_class = len(tensors["labels"]) // num_classes
    label_kinds = [None, tensors["soft_labels"]] if "soft_labels" in tensors else [None]
    results = [
        measure_downstream(
            tensors["images"],
            tensors["labels"],
            test,
            ("convnet",),
            soft_labels=soft_labels,
            runtime=runtime,
            seed=seed,
        )[0]
        for soft_labels in label_kinds
    ]
    hard_result = results[0]
    environment = describe_environment()
    row = (
        facts
        | cost
        | {
            "epsilon": epsilon,
            "images_per_class": images_per_class,
            "accuracy": hard_result.value,
            "standard_error": hard_result.standard_error,
            "soft_label_accuracies": [result.value for result in results[1:]],
            "protocol": hard_result.protocol,
            "measurement_seconds": hard_result.seconds,
        }
        | environment
    )
    epsilon_text = "-" if epsilon is None else f"{epsilon:.4g}"
    settings = " ".join(f"{key}={value}" for key, value in facts["settings"].items())
    records = facts["data"] + ", half" * (facts["records"] != "all")
    accuracies = [
        f"{100 * result.value:.2f} ± {100 * (result.standard_error or 0):.2f}" for result in results
    ]
    print_row(
        records,
        facts["method"],
        epsilon_text,
        f"{images_per_class}{' (same release)' * ('resized' in facts)}",
        settings or "default",
        seed,
        *[*accuracies, "-"][:2],
        f"{cost['seconds']:.0f} s",
        f"{cost['gibibytes']:.1f} GiB",
        f"{hard_result.seconds:.0f} s",
    )
    if out:
        parts = [records.replace(", ", "-"), facts["method"]]
        parts += [epsilon_text] if epsilon else []
        parts += [str(images_per_class)]
        parts += [f"seed{seed}"] if seed else []
        name = "-".join(parts)
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
        write_samples(*release.sample(10 * num_classes), out / f"{name}.png", num_classes)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--method", default="private-set")
    parser.add_argument("--data", nargs="+", default=["mnist"])
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0])
    parser.add_argument("--per-class", nargs="+", type=int, default=[50], help="images per class")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings")
    parser.add_argument(
        "--resize",
        nargs="*",
        default=[],
        metavar="COUNT[,KEY=VALUE]",
        help="other sizes of the same release, in images per class",
    )
    parser.add_argument(
        "--half", action="store_true", help="use a random half of the training images"
    )
    parser.add_argument("--out", type=Path, help="folder of rows and images")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--stages", action="store_true", help="print the end of each stage")
    options = parser.parse_args()
    settings = parse_settings(options.set)
    runtime = Runtime(options.device)
    print(f"\n{format_environment()}\n")
    print_header(*COLUMNS)
    plan = make_method(options.method, settings).plan(load_sensitive(options.data[0]).spec)
    # A ratio determines the size of the set.
    counts = options.per_class[:1] if "ratio" in settings else options.per_class
    runs = [
        (data, epsilon, count, seed)
        for data in options.data
        for epsilon in (options.epsilon if plan.stages else [None])
        for count in counts
        for seed in options.seeds
    ]
    for data, epsilon, count, seed in runs:
        dataset = load_half(data) if options.half else load_sensitive(data)
        test = load_public(data, "test")
        clock = ResourceClock(runtime, options.stages)
        with tempfile.TemporaryDirectory() as folder:
            release = privot.synthesize(
                dataset,
                options.method,
                epsilon,
                settings={**settings, "images_per_class": count},
                ledger=f"{folder}/ledger.jsonl",
                seed=seed,
                runtime=runtime,
                progress=clock.report_progress,
            )
        facts = {
            "data": data,
            "method": options.method,
            "seed": seed,
            "records": f"a random half, seed {HALF_SEED}" if options.half else "all",
            "settings": settings,
        }
        measure_set(release, facts, test, clock, runtime, options.out)
        for size in options.resize:
            new_count, *pairs = size.split(",")
            new_settings = parse_settings(pairs)
            clock = ResourceClock(runtime, options.stages)
            resized = privot.resize(
                release,
                int(new_count),
                settings=new_settings,
                runtime=runtime,
                progress=clock.report_progress,
            )
            new_facts = facts | {"settings": settings | new_settings, "resized": True}
            measure_set(resized, new_facts, test, clock, runtime, options.out)


if __name__ == "__main__":
    main()
