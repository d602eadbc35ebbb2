r"""Compare settings without test images: train on 5/6 of the training images, measure on the rest.

    python bench/trials.py mnist gs-wgan@10 --settings \
        "steps=4000 batch_size=512 generator_learning_rate=3e-4" "normalize_gradients=true"
    python bench/trials.py mnist gs-wgan@inf gs-wgan@1 --latent-scale 1 .6 --only is fid cnn \
        --out trials

Prints one Markdown row for each release and latent scale. Without --settings a method has its
default settings. FID is against the images that were trained on. With --out the releases are stored
there, each with a sheet of samples. Each row is one run, so differences of a point may be chance.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from environment import (
    commit,
    hardware,
    load_public,
    make_parser,
    parse_settings,
    print_header,
    print_row,
    select_records,
)
from table1 import get_result_name

import privot
from privot.data import Public, Sensitive
from privot.measures import Evaluator, Samples
from privot.privacy.guarantee import Guarantee
from privot.release.export import write_samples
from privot.runtime import Runtime

NUM_SAMPLES = 10_000
HOLDOUT = 6  # one training image of so many is held out


def split_training_set(data: str) -> tuple[Sensitive, Public, Public]:
    """Split the training set: what is trained on, the same as a reference, what is held out."""
    dataset = load_public(data)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(5))
    held_out, remaining = order.split([len(order) // HOLDOUT, len(order) - len(order) // HOLDOUT])
    return (
        select_records(Sensitive, dataset, remaining, "trained on"),
        select_records(Public, dataset, remaining, "the same"),
        select_records(Public, dataset, held_out, "held out"),
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("data", help="a dataset, such as mnist")
    parser.add_argument("methods", nargs="+", help="METHOD@EPSILON, such as gs-wgan@10")
    parser.add_argument(
        "--settings", nargs="+", default=[""], help='each trial as one argument: "KEY=VALUE ..."'
    )
    parser.add_argument(
        "--latent-scale",
        nargs="+",
        type=float,
        default=[1.0],
        help="factors on the latent vectors of a generator",
    )
    parser.add_argument("--only", nargs="+", default=["is", "fid", "cnn"], help="metrics")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--microbatch", type=int, help="records processed at a time during synthesis"
    )
    parser.add_argument("--out", type=Path, help="folder in which the releases are stored")
    options = parser.parse_args()
    train, reference, held_out = split_training_set(options.data)
    device = Runtime(options.device).torch_device
    evaluator = Evaluator(held_out, reference, runtime=Runtime(options.device), seed=options.seed)
    print(
        f"{hardware()}, commit {commit()}; {options.data}, seed {options.seed}, "
        f"{NUM_SAMPLES:,} samples\n"
    )
    print_header("method", "settings", "epsilon", "latent scale", *options.only, "seconds")
    for run in options.methods:
        method, epsilon = run.split("@")
        for index, trial in enumerate(options.settings):
            start = time.perf_counter()
            out = options.out and options.out / f"{options.data}-{method}-{epsilon}-{index}"
            with tempfile.TemporaryDirectory() as folder:
                release = privot.synthesize(
                    train,
                    method,
                    float(epsilon),
                    settings=parse_settings(trial.split()),
                    ledger=f"{folder}/ledger.jsonl",
                    seed=options.seed,
                    runtime=Runtime(options.device, options.microbatch),
                    out=out,
                )
            seconds = time.perf_counter() - start
            guarantee = release.guarantee
            proved = f"{guarantee.epsilon:.3g}" if isinstance(guarantee, Guarantee) else "none"
            if out:
                write_samples(*release.sample(100), out.with_suffix(".png"), 10)
            for latent_scale in options.latent_scale:
                samples = Samples.from_release(
                    release, method, NUM_SAMPLES, options.seed, device, latent_scale
                )
                values = {
                    result.name: f"{result.value:.4g}"
                    for result in evaluator.measure(samples, options.only)
                }
                print_row(
                    method,
                    trial or "default",
                    proved,
                    f"{latent_scale:g}",
                    *(values.get(get_result_name(metric), "-") for metric in options.only),
                    f"{seconds:.0f}",
                )


if __name__ == "__main__":
    main()
