"""Every method on the built-in digits with default settings, on a CPU.

States wall, processor and predicted seconds, and the accuracy.

    python bench/digits.py --folder F                    run the methods without a result in F
    python bench/digits.py --folder F --only merf --limit 600 --set steps=500
    python bench/digits.py --folder F --table            print the results as Markdown

Each method runs in a process of its own, as `privot synthesize digits --method NAME` with a ledger
that is thrown away. Wall and processor seconds are those of that process, with its start and
imports. A run that takes longer than --limit is stopped, and its result says so. Accuracy is that
of a small CNN (LeNet) and of logistic regression, trained on samples of the release and tested on
the test split of the digits. With --holdout N, every N-th training image is held out and is the
test set instead of the test split: use this to choose settings.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import (
    format_environment,
    load_public,
    make_parser,
    select_records,
    write_json,
)

from privot.data import Public
from privot.measures import measure_downstream
from privot.methods import list_methods
from privot.release import Release
from privot.runtime import Runtime, use_threads

NUM_SAMPLES = 1438  # the number of records; of a released set all images are used
EPSILON = "1"
NUM_CLIENTS = "20"
METHODS_WITHOUT_BUDGET = (
    "conditional-gan",
    "distribution-matching",
    "gradient-matching",
    "kernel-points",
    "real-subset",
)
DECLARATIONS = {
    "sliced-flow": ["--public-classes"],
    "sliced-generator": ["--public-classes"],
    "federated-average-gan": ["--clients", NUM_CLIENTS],
    "federated-gs-wgan": ["--clients", NUM_CLIENTS],
}
# Local privacy of images needs a large epsilon.
PRIVATIZE_OPTIONS = ["--epsilon", "40", "--labels-epsilon", "5"]


def build_command(*arguments: str) -> list[str]:
    """Build the command line of a privot command."""
    return [sys.executable, "-m", "privot", *arguments]


def time_command(arguments: list[str], limit: float) -> tuple[float, float, int | None, str]:
    """Run a command and measure its seconds.

    Args:
        arguments: The command line.
        limit: Wall seconds after which the command is stopped.

    Returns:
        Wall seconds, processor seconds, the exit status (None: stopped), and the end of its output.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    try:
        process = subprocess.run(arguments, capture_output=True, text=True, timeout=limit)
        status = process.returncode
        output = process.stderr[-2000:]
    except subprocess.TimeoutExpired as error:
        status = None
        output = (error.stderr or b"").decode(errors="replace")[-2000:]
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, processor, status, output


def choose_data(holdout: int, folder: Path) -> tuple[str, Public]:
    """Choose the training data and the test data.

    Args:
        holdout: 0 for the test split; N to hold out every N-th training image.
        folder: Where the training images are written if some are held out.

    Returns:
        The name or path of the training data, and the test data.
    """
    if not holdout:
        return "digits", load_public("digits", "test")
    dataset = load_public("digits")
    images, labels = (values.cpu().numpy() for values in dataset.records())
    is_held_out = np.arange(len(labels)) % holdout == 0
    path = folder / "digits-part.npz"
    np.savez(path, images=images[~is_held_out], labels=labels[~is_held_out])
    return str(path), select_records(Public, dataset, is_held_out, "held out")


def measure_method(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one method and measure its release.

    Args:
        name: The name of the method.
        options: The command line of this benchmark.

    Returns:
        The result, ready for JSON.
    """
    settings = [argument for pair in options.set for argument in ("--set", pair)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data, test = choose_data(options.holdout, folder)
        common = ["--ledger", str(folder / "ledger.jsonl")]
        if name == "entropic-gan":
            privatized = str(folder / "privatized.safetensors")
            subprocess.run(
                build_command("privatize", data, "--out", privatized, *PRIVATIZE_OPTIONS, *common),
                check=True,
                capture_output=True,
            )
            data = privatized
            common = []
        budget = (
            []
            if name in METHODS_WITHOUT_BUDGET or name == "entropic-gan"
            else ["--epsilon", options.epsilon]
        )
        public_facts = []
        if options.holdout and name != "entropic-gan":
            public_facts = ["--classes", "10", "--public-size"]
        chosen = ["--method", name, *budget, *settings, "--device", "cpu"]
        out = folder / "release"
        declarations = DECLARATIONS.get(name, [])
        wall, processor, status, output = time_command(
            build_command(
                "synthesize",
                data,
                *chosen,
                "--out",
                str(out),
                *common,
                *declarations,
                *public_facts,
            ),
            options.limit,
        )
        result = {
            "method": name,
            "set": options.set,
            "wall_seconds": round(wall, 1),
            "processor_seconds": round(processor, 1),
            "status": "stopped" if status is None else "done" if status == 0 else "failed",
            "output": output if status else "",
            "predicted_seconds": predict_seconds(name, chosen, data, declarations, options),
            "settings": {},
        }
        if status == 0:
            release = Release.load(out)
            tensors = release.artifact.tensors
            count = len(tensors["labels"]) if "labels" in tensors else NUM_SAMPLES
            with use_threads(1):  # networks this small are slower on several threads
                results = measure_downstream(
                    *release.sample(count), test, ("logistic", "cnn"), runtime=Runtime("cpu")
                )
            result |= {metric.name: round(100 * metric.value, 1) for metric in results}
            result["settings"] = release.metadata["settings"]
        return result


def predict_seconds(
    name: str, chosen: list[str], data: str, declarations: list[str], options: argparse.Namespace
) -> float | None:
    """Read the predicted seconds of the same run from `privot plan`; None without a prediction."""
    shape: list[str] = []
    if options.holdout and name != "entropic-gan":
        with np.load(data) as arrays:
            shape = ["--classes", "10", "--shape", "1x8x8", "--size", str(len(arrays["labels"]))]
    clients = declarations if "--clients" in declarations else []
    if "--public-classes" in declarations:
        if options.holdout:
            return None
        labels = load_public("digits").records().labels
        shape = ["--class-sizes", ",".join(map(str, torch.bincount(labels).tolist()))]
    process = subprocess.run(
        build_command("plan", data, *chosen, *clients, *shape, "--json"),
        capture_output=True,
        text=True,
    )
    if process.returncode:
        return None
    seconds = json.loads(process.stdout)["forecast"].get("predicted_seconds")
    return None if seconds is None else round(float(seconds), 1)


def format_table(folder: Path) -> str:
    """Format the results in a folder as a Markdown table."""
    lines = [
        "| method | wall s | processor s | predicted s | logistic % | CNN % |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        mark = {"stopped": "> ", "failed": "failed after "}.get(result["status"], "")
        keys = ("processor_seconds", "predicted_seconds", "logistic_accuracy", "cnn_accuracy")
        figures = (result.get(key) for key in keys)
        cells = [
            " ".join([result["method"], *result["set"]]),
            f"{mark}{result['wall_seconds']:g}",
            *("-" if figure is None else f"{figure:g}" for figure in figures),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder of the results, a JSON file for each run"
    )
    parser.add_argument("--only", nargs="+", default=list(list_methods()), help="methods")
    parser.add_argument("--epsilon", default=EPSILON)
    parser.add_argument("--limit", type=float, default=600.0, help="largest wall seconds of a run")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings")
    parser.add_argument(
        "--holdout", type=int, default=0, help="test on every N-th training image, held out"
    )
    parser.add_argument(
        "--table", action="store_true", help="print the stored results, run nothing"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.table:
        print(f"{format_environment()}\n")
        print(format_table(options.folder))
        return
    for name in options.only:
        path = options.folder / ("-".join([name, *options.set]).replace("/", "_") + ".json")
        if path.exists():
            continue
        result = measure_method(name, options)
        write_json(path, result)
        print({key: value for key, value in result.items() if key != "settings"}, flush=True)


if __name__ == "__main__":
    main()
