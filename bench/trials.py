r"""Try settings on five sixths of the training images, and measure with the others.

Test images are not used.

    python bench/trials.py mnist gs-wgan@10 --tried \
        "steps=4000 batch_size=512 generator_learning_rate=3e-4" "normalize_gradients=true"
    python bench/trials.py mnist gs-wgan@inf gs-wgan@1 --spread 1 .6 --only is fid cnn --out trials

Prints one Markdown row for each release and latent scale; without settings, the method's own. FID is
against the images that were trained on. With --out the releases are stored there, each with a sheet
of samples. One run each: differences of a point are chance.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from environment import commit, hardware, select_records
from table1 import name_of

import privot
from privot.data import Public, Sensitive
from privot.measures import Evaluator, Samples
from privot.privacy.guarantee import Guarantee
from privot.release.export import write_samples
from privot.runtime import Runtime

# one image in so many is held out
SAMPLES = 10_000
APART = 6


def split(data: str) -> tuple[Sensitive, Public, Public]:
    """What is trained on, the same as a reference, and what judges."""
    dataset = privot.load(data, public=True)
    assert isinstance(dataset, Public)
    order = torch.randperm(len(dataset.records()[1]), generator=torch.Generator().manual_seed(5))
    held = order[: len(order) // APART]
    rest = order[len(order) // APART :]
    return (
        select_records(Sensitive, dataset, rest, "trained on"),
        select_records(Public, dataset, rest, "the same"),
        select_records(Public, dataset, held, "held out"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="such as mnist")
    parser.add_argument("methods", nargs="+", help="such as gs-wgan@10")
    parser.add_argument(
        "--tried", nargs="+", default=[""], help="settings, those of one trial in quotes"
    )
    parser.add_argument(
        "--spread", nargs="+", type=float, default=[1.0], help="of a generator's codes"
    )
    parser.add_argument("--only", nargs="+", default=["is", "fid", "cnn"], help="measures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--microbatch", type=int, help="records at a time while a release is made")
    parser.add_argument("--out", type=Path, help="keep the releases here")
    asked = parser.parse_args()
    train, reference, judge = split(asked.data)
    bench = Evaluator(judge, reference, runtime=Runtime(asked.device), seed=asked.seed)
    print(
        f"{hardware()}, commit {commit()}; {asked.data}, seed {asked.seed}, {SAMPLES:,} samples\n",
        flush=True,
    )
    print(
        "| method | settings | epsilon | spread | "
        + " | ".join(asked.only)
        + " | seconds |\n"
        + "|---" * (5 + len(asked.only))
        + "|"
    )
    for way in asked.methods:
        method, epsilon = way.split("@")
        for number, trial in enumerate(asked.tried):
            settings = dict(each.split("=", 1) for each in trial.split())
            start = time.perf_counter()
            out = asked.out / f"{asked.data}-{method}-{epsilon}-{number}" if asked.out else None
            with tempfile.TemporaryDirectory() as folder:
                release = privot.synthesize(
                    train,
                    method,
                    float(epsilon),
                    settings=settings,
                    ledger=f"{folder}/ledger.jsonl",
                    seed=asked.seed,
                    runtime=Runtime(asked.device, asked.microbatch),
                    out=out,
                )
            took = time.perf_counter() - start
            claim = release.guarantee
            if out:
                write_samples(*release.sample(100), out.with_suffix(".png"), 10)
            for spread in asked.spread:
                subject = Samples.from_release(
                    release, method, SAMPLES, asked.seed, Runtime(asked.device).torch_device, spread
                )
                known = {
                    each.name: f"{each.value:.4g}" for each in bench.measure(subject, asked.only)
                }
                found = [known[name_of(each)] for each in asked.only]
                proved = f"{claim.epsilon:.3g}" if isinstance(claim, Guarantee) else "none"
                print(
                    "| "
                    + " | ".join(
                        [method, trial or "its own", proved, f"{spread:g}", *found, f"{took:.0f}"]
                    )
                    + " |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
