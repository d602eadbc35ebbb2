"""Small sets on real data: accuracy of ConvNets trained on them (mean of 5 trainings and its deviation), seconds and memory.

    python bench/sets.py --method private-set --data mnist fashion-mnist cifar10 --epsilon 1 10 --per-class 50 [--set key=value]
    python bench/sets.py --data mnist --also 10 200              sets of other sizes too, of the same release and at no cost
    python bench/sets.py --method distribution-matching --data cifar10 --per-class 10 50
    python bench/sets.py --method kernel-points --data fashion-mnist --half --set ratio=0.002

Prints one Markdown row a run; with --out also writes the row as JSON and a picture of the set. Methods without a mechanism take no
epsilon. --half gives the method a random half of the training images, always the same, as Dong et al. (2022) did; a ratio is then of
that half, and "images a class" is what was really made. The data must be at hand (PRIVOT_DATA). Each run has a throw-away ledger: this
is a benchmark on public data sets.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from environment import commit, hardware

import privot
from privot.data.dataset import Public, Sensitive
from privot.measures import measure_downstream
from privot.methods import make_method
from privot.privacy.guarantee import Guarantee
from privot.release.export import write_samples
from privot.runtime import Runtime

HALF = 2022  # seed of the half: public, and the same for every method and run


def half(data: str) -> Sensitive:
    """Half of the training images, at random."""
    box = privot.load(data, public=True)
    images, labels = box.records()
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(HALF))[
        : len(labels) // 2
    ]
    spec = replace(box.spec, size=len(chosen), class_sizes=None)
    return Sensitive(images[chosen].numpy(), labels[chosen].numpy(), spec, name=f"half of {data}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="private-set")
    parser.add_argument("--data", nargs="+", default=["mnist"])
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0])
    parser.add_argument("--per-class", nargs="+", type=int, default=[50])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--also",
        nargs="*",
        default=[],
        metavar="COUNT[,KEY=VALUE]",
        help="other sizes of the same release",
    )
    parser.add_argument(
        "--half", action="store_true", help="condense a random half of the training images"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--stages", action="store_true", help="say when each stage ends")
    asked = parser.parse_args()
    settings = dict(each.split("=", 1) for each in asked.set)
    runtime = Runtime(asked.device)
    print(
        f"\n{datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, commit {commit()}\n"
    )
    print(
        "| data | method | epsilon | images a class | settings | seed | ConvNet | on soft labels | set | memory | measuring |\n"
        + "|---" * 11
        + "|",
        flush=True,
    )
    private = bool(make_method(asked.method, settings).plan(privot.load(asked.data[0]).spec).stages)
    counts = asked.per_class[:1] if "ratio" in settings else asked.per_class  # a ratio goes before
    runs = [
        (data, epsilon, count, seed)
        for data in asked.data
        for epsilon in (asked.epsilon if private else [None])
        for count in counts
        for seed in asked.seeds
    ]
    for data, epsilon, count, seed in runs:
        box = half(data) if asked.half else privot.load(data)
        test = privot.load(data, "test", public=True)
        clock = Clock(runtime, asked.stages)
        with tempfile.TemporaryDirectory() as folder:
            release = privot.synthesize(
                box,
                asked.method,
                epsilon,
                settings={**settings, "images_per_class": count},
                ledger=f"{folder}/ledger.jsonl",
                seed=seed,
                runtime=runtime,
                progress=clock.report,
            )
        where = {
            "data": data,
            "method": asked.method,
            "seed": seed,
            "records": f"a random half, seed {HALF}" if asked.half else "all",
        }
        judge(release, where | {"settings": settings}, test, clock, runtime, asked.out)
        for other in asked.also:
            size, *changed = other.split(",")
            more = dict(each.split("=", 1) for each in changed)
            clock = Clock(runtime, asked.stages)
            again = privot.resize(
                release, int(size), settings=more, runtime=runtime, progress=clock.report
            )
            judge(
                again,
                where | {"settings": settings | more, "resized": True},
                test,
                clock,
                runtime,
                asked.out,
            )


class Clock:
    """Seconds and memory since it was made; says when a stage ends, if asked to."""

    def __init__(self, runtime: Runtime, aloud: bool):
        self.begin = time.perf_counter()
        self.aloud = aloud
        self.cuda = runtime.torch_device.type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def report(self, stage: str, step: int, of: int, **more: object) -> None:
        if self.aloud and step == of:
            print(f"    {time.perf_counter() - self.begin:6.1f} s  {stage}", flush=True)

    def read(self) -> dict[str, float]:
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.cuda else 0.0
        return {"seconds": time.perf_counter() - self.begin, "gibibytes": memory}


def judge(
    release: privot.Release,
    where: dict[str, Any],
    test: Sensitive | Public,
    clock: Clock,
    runtime: Runtime,
    out: Path | None,
) -> None:
    """Train on the set, print its row, and with ``out`` write the row and a picture."""
    cost = clock.read()
    tensors = release.artifact.tensors
    seed = where["seed"]
    proved = release.guarantee.epsilon if isinstance(release.guarantee, Guarantee) else None
    made = len(tensors["labels"]) // test.spec.num_classes
    hard, *more = [
        measure_downstream(
            tensors["images"],
            tensors["labels"],
            test,
            ("convnet",),
            soft_labels=soft,
            runtime=runtime,
            seed=seed,
        )[0]
        for soft in ((None, tensors["soft_labels"]) if "soft_labels" in tensors else (None,))
    ]
    found = [
        f"{100 * each.value:.2f} ± {100 * (each.standard_error or 0):.2f}" for each in (hard, *more)
    ]
    row = (
        where
        | cost
        | {
            "epsilon": proved,
            "per_class": made,
            "accuracy": hard.value,
            "deviation": hard.standard_error,
            "soft": [each.value for each in more],
            "protocol": hard.protocol,
            "measuring_seconds": hard.seconds,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "hardware": hardware(),
            "commit": commit(),
        }
    )
    claim = "-" if proved is None else f"{proved:.4g}"
    words = " ".join(f"{key}={value}" for key, value in where["settings"].items())
    records = where["data"] + ", half" * (where["records"] != "all")
    size = f"{made}{' (same release)' * ('resized' in where)}"
    print(
        f"| {records} | {where['method']} | {claim} | {size} | {words or 'default'} | {seed} "
        f"| {' | '.join([*found, '-'][:2])} | {cost['seconds']:.0f} s | {cost['gibibytes']:.1f} GiB | {hard.seconds:.0f} s |",
        flush=True,
    )
    if out:
        out.mkdir(parents=True, exist_ok=True)
        parts = [
            records.replace(", ", "-"),
            where["method"],
            *([claim] if proved else []),
            str(made),
            *([f"seed{seed}"] if seed else []),
        ]
        name = "-".join(parts)
        (out / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
        write_samples(
            *release.sample(10 * test.spec.num_classes), out / f"{name}.png", test.spec.num_classes
        )


if __name__ == "__main__":
    main()
