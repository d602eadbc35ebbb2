"""Every method on the embedded digits with default settings, on a CPU: seconds, forecast and accuracy.

    python bench/digits.py --folder F                    run every method that has no result in F yet
    python bench/digits.py --folder F --only merf --limit 600 --set steps=500
    python bench/digits.py --folder F --table            print the results as Markdown

Each method runs in a process of its own, as `privot synthesize digits --method NAME` with a ledger that
is thrown away. Wall and processor seconds are those of that process, start and imports included. A run
that passes --limit is stopped, and its result says so. Accuracy is that of a small CNN (LeNet) and of
logistic regression, trained on samples of the release and tested on the test split of the digits.
With --judge N, every N-th training image is held out and judges in place of the test split: use this to
choose settings.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import commit, hardware

import privot
from privot.data import Public
from privot.measures import measure_downstream
from privot.methods import list_methods
from privot.release import Release
from privot.runtime import Runtime, use_threads

SAMPLES = 1438  # as many as there are records; of a set all images are taken
EPSILON = "1"
OWNERS = "20"
OPEN = (
    "conditional-gan",
    "distribution-matching",
    "gradient-matching",
    "kernel-points",
    "real-subset",
)
EXTRA = {
    "sliced-flow": ["--public-classes"],
    "sliced-generator": ["--public-classes"],
    "federated-average-gan": ["--owners", OWNERS],
    "federated-gs-wgan": ["--owners", OWNERS],
}
PRIVATIZE = [
    "--epsilon",
    "40",
    "--labels-epsilon",
    "5",
]  # local privacy of images needs a large epsilon


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "privot", *arguments]


def seconds_of(arguments: list[str], limit: float) -> tuple[float, float, int | None, str]:
    """Run a command.

    Args:
        arguments: The command line.
        limit: Wall seconds after which the command is stopped.

    Returns:
        Wall seconds, processor seconds, the exit status (None: stopped), and the end of its output.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=limit)
        status = done.returncode
        said = done.stderr[-2000:]
    except subprocess.TimeoutExpired as stopped:
        status = None
        said = (stopped.stderr or b"").decode(errors="replace")[-2000:]
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, processor, status, said


def split(judge: int, folder: Path) -> tuple[str, Public]:
    """Choose the training data and the data that judges.

    Args:
        judge: 0 for the test split; N to hold out every N-th training image.
        folder: Where the training images are written if some are held out.

    Returns:
        The name or path of the training data, and the images that judge.
    """
    if not judge:
        test = privot.load("digits", "test", public=True)
        assert isinstance(test, Public)
        return "digits", test
    box = privot.load("digits", public=True)
    assert isinstance(box, Public)
    images, labels = (each.cpu().numpy() for each in box.records())
    held = np.arange(len(labels)) % judge == 0
    np.savez(path := folder / "digits-part.npz", images=images[~held], labels=labels[~held])
    spec = dataclasses.replace(box.spec, size=int(held.sum()), class_sizes=None)
    return str(path), Public(images[held], labels[held], spec, name="held out", repair=True)


def measure(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Run one method and measure its release.

    Args:
        name: The name of the method.
        asked: The command line of this benchmark.

    Returns:
        The result, ready for JSON.
    """
    settings = [part for each in asked.set for part in ("--set", each)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data, test = split(asked.judge, folder)
        common = ["--ledger", str(folder / "ledger.jsonl")]
        if name == "entropic-gan":
            sent = str(folder / "sent.safetensors")
            subprocess.run(
                command("privatize", data, "--out", sent, *PRIVATIZE, *common),
                check=True,
                capture_output=True,
            )
            data = sent
            common = []
        budget = [] if name in OPEN or name == "entropic-gan" else ["--epsilon", asked.epsilon]
        whole = (
            ["--classes", "10", "--public-size"] if asked.judge and name != "entropic-gan" else []
        )
        chosen = ["--method", name, *budget, *settings, "--device", "cpu"]
        out = folder / "release"
        owners = EXTRA.get(name, [])
        wall, processor, status, said = seconds_of(
            command("synthesize", data, *chosen, "--out", str(out), *common, *owners, *whole),
            asked.limit,
        )
        result = {
            "method": name,
            "set": asked.set,
            "wall_seconds": round(wall, 1),
            "processor_seconds": round(processor, 1),
            "status": "stopped" if status is None else "done" if status == 0 else "failed",
            "said": said if status else "",
            "predicted_seconds": predicted(name, chosen, data, owners, asked),
            "settings": {},
        }
        if status == 0:
            release = Release.load(out)
            count = (
                len(release.artifact.tensors["labels"])
                if "labels" in release.artifact.tensors
                else SAMPLES
            )
            with use_threads(1):  # nets so small are slower on several
                readings = measure_downstream(
                    *release.sample(count), test, ("logistic", "cnn"), runtime=Runtime("cpu")
                )
            result |= {each.name: round(100 * each.value, 1) for each in readings}
            result["settings"] = release.metadata["settings"]
        return result


def predicted(
    name: str, chosen: list[str], data: str, owners: list[str], asked: argparse.Namespace
) -> float | None:
    """Read the predicted seconds of the same run from `privot plan`; None where it says nothing."""
    declared: list[str] = []
    if asked.judge and name != "entropic-gan":
        with np.load(data) as part:
            declared = ["--classes", "10", "--shape", "1x8x8", "--size", str(len(part["labels"]))]
    dealt = owners if "--owners" in owners else []
    if "--public-classes" in owners:
        if asked.judge:
            return None
        labels = privot.load("digits", public=True).records()[1]  # type: ignore[union-attr]
        declared = ["--class-sizes", ",".join(map(str, torch.bincount(labels).tolist()))]
    done = subprocess.run(
        command("plan", data, *chosen, *dealt, *declared, "--json"), capture_output=True, text=True
    )
    if done.returncode:
        return None
    seconds = json.loads(done.stdout)["forecast"].get("predicted_seconds")
    return None if seconds is None else round(float(seconds), 1)


def table(folder: Path) -> str:
    """Format the results in a folder as a Markdown table."""
    lines = [
        "| method | wall s | processor s | predicted s | logistic % | CNN % |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.json")):
        each = json.loads(path.read_text())
        mark = {"stopped": "> ", "failed": "failed after "}.get(each["status"], "")
        name = " ".join([each["method"], *each["set"]])
        figures = [
            each.get(key) for key in ("predicted_seconds", "logistic_accuracy", "cnn_accuracy")
        ]
        told = " | ".join("-" if figure is None else f"{figure:g}" for figure in figures)
        lines.append(
            f"| {name} | {mark}{each['wall_seconds']:g} | {each['processor_seconds']:g} | {told} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="of the results, one JSON file a method"
    )
    parser.add_argument("--only", nargs="+", default=list(list_methods()), help="methods")
    parser.add_argument("--epsilon", default=EPSILON)
    parser.add_argument("--limit", type=float, default=600.0, help="wall seconds of a run at most")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--judge", type=int, default=0, help="hold out every N-th training image and judge by these"
    )
    parser.add_argument("--table", action="store_true", help="print the results and end")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.table:
        print(
            f"{datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, commit {commit()}\n"
        )
        print(table(asked.folder))
        return
    for name in asked.only:
        path = asked.folder / ("-".join([name, *asked.set]).replace("/", "_") + ".json")
        if path.exists():
            continue
        result = measure(name, asked)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1))
        os.replace(part, path)
        print({key: value for key, value in result.items() if key != "settings"}, flush=True)


if __name__ == "__main__":
    main()
