"""DP-MERF on real data: accuracy of a LeNet trained on 60,000 samples, and seconds.

    python bench/merf.py --data mnist fashion-mnist --epsilon 1 --seeds 0 1 2 [--set generator=conv]

Prints one Markdown row for each run. The data must be in the folder PRIVOT_DATA. Each run has a
throw-away ledger: this is a benchmark on public data.
"""

from __future__ import annotations

import tempfile
import time

from environment import (
    format_environment,
    load_public,
    make_parser,
    parse_settings,
    print_header,
    print_row,
)

import privot
from privot.data import Sensitive
from privot.measures import measure_downstream
from privot.runtime import Runtime


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", nargs="+", default=["mnist", "fashion-mnist"])
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    print(f"\n{format_environment()}\n")
    print_header("data", "epsilon", "settings", "seed", "CNN accuracy %", "training", "CNN")
    runtime = Runtime(options.device)
    runs = [
        (data, epsilon, seed)
        for data in options.data
        for epsilon in options.epsilon
        for seed in options.seeds
    ]
    for data, epsilon, seed in runs:
        train = privot.load(data)
        assert isinstance(train, Sensitive)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            release = privot.synthesize(
                train,
                "merf",
                epsilon,
                settings=parse_settings(options.set),
                ledger=f"{folder}/ledger.jsonl",
                seed=seed,
                runtime=runtime,
            )
            seconds = time.perf_counter() - start
        images, labels = release.sample(60_000, seed=seed, device=runtime.torch_device)
        test = load_public(data, "test")
        [result] = measure_downstream(images, labels, test, ("cnn",), runtime=runtime, seed=seed)
        print_row(
            data,
            f"{epsilon:g}",
            " ".join(options.set) or "default",
            seed,
            f"{100 * result.value:.1f}",
            f"{seconds:.1f} s",
            f"{result.seconds:.1f} s",
        )


if __name__ == "__main__":
    main()
