"""DP-MERF on real data: accuracy of a LeNet trained on 60,000 samples, and seconds. Prints one Markdown row a run.

    python bench/merf.py --data mnist fashion-mnist --epsilon 1 --seeds 0 1 2 [--set generator=conv]

The data must be at hand (PRIVOT_DATA). Each run has a throw-away ledger: this is a benchmark on public data sets.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from datetime import UTC, datetime

import torch
from environment import commit, hardware

import privot
from privot.measures import measure_downstream
from privot.runtime import Runtime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=["mnist", "fashion-mnist"])
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    settings = dict(each.split("=", 1) for each in asked.set)
    print(
        f"\n{datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, commit {commit()}\n",
        flush=True,
    )
    print(
        "| data | epsilon | settings | seed | CNN accuracy | training | CNN |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    runtime = Runtime(asked.device)
    for data in asked.data:
        box = privot.load(data)
        test = privot.load(data, "test", public=True)
        for epsilon in asked.epsilon:
            for seed in asked.seeds:
                with tempfile.TemporaryDirectory() as folder:
                    start = time.perf_counter()
                    release = privot.synthesize(
                        box,
                        "merf",
                        epsilon,
                        settings=settings,
                        ledger=f"{folder}/ledger.jsonl",
                        seed=seed,
                        runtime=runtime,
                    )
                    took = time.perf_counter() - start
                reading = measure_downstream(
                    *release.sample(60_000, seed=seed, device=runtime.torch_device),
                    test,
                    ("cnn",),
                    runtime=runtime,
                    seed=seed,
                )[0]
                words = " ".join(asked.set) or "default"
                accuracy = f"{100 * reading.value:.1f}"
                print(
                    f"| {data} | {epsilon:g} | {words} | {seed} | {accuracy} | {took:.1f} s | {reading.seconds:.1f} s |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
