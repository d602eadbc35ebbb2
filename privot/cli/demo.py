"""Every step once, on the embedded digits: release, samples, accuracy, verification, report."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from privot import report
from privot.data import load_dataset
from privot.errors import SettingError
from privot.measures import Samples, measure
from privot.privacy.plan import Budget
from privot.progress import Progress
from privot.release.export import write_samples
from privot.release.verify import verify
from privot.runtime import use_threads
from privot.synthesis import synthesize

# Chosen for speed. Twice the width or the steps changed the accuracy by less than the difference
# between two runs.
DEMO_SETTINGS = {"images_per_class": 10, "net_width": 16, "steps": 100}
# No convolutional network: 50 epochs on 100 images are too few steps to train one.
DEMO_CLASSIFIERS = ("logistic", "mlp")
DEMO_MARKER = "made-by-privot-demo"  # only a folder with this file is ever replaced


def run_demo(
    out: Path, epsilon: float, progress: Progress, on_warning: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Make, sample, measure and verify a release of the digits, and write a report.

    Args:
        out: Folder for the results; an earlier demo in it is replaced.
        epsilon: Epsilon of the privacy budget.
        progress: Receives the progress.
        on_warning: Receives warnings about the run.

    Returns:
        Guarantee, results, the recomputed epsilon and the paths of the files.

    Raises:
        SettingError: The folder exists and has no demo in it.
    """
    budget = Budget(epsilon)
    if out.exists() and not (out / DEMO_MARKER).exists():
        raise SettingError(
            f"{out} already exists and has no demo in it. Choose another folder with --out."
        )
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / DEMO_MARKER).touch()
    with use_threads(1):
        release = synthesize(
            "digits",
            budget=budget,
            settings=DEMO_SETTINGS,
            out=out / "release",
            ledger=out / "ledger.jsonl",
            progress=progress,
            on_warning=on_warning,
        )
        num_images = len(release.artifact.tensors["labels"])  # the whole set, each image once
        write_samples(*release.sample(num_images), out / "samples.png", release.spec.num_classes)
        samples = Samples.from_release(release, "digits", num_images)
        test_data = load_dataset("digits", "test", public=True)
        results = measure(samples, test_data, DEMO_CLASSIFIERS, progress=progress)
    verified = verify(out / "release")
    report.write_report(release, out / "report", name="digits", results=results)
    files = {
        "release": out / "release",
        "samples": out / "samples.png",
        "report": out / "report" / "report.html",
        "ledger": out / "ledger.jsonl",
    }
    return {
        "guarantee": asdict(release.guarantee),
        "results": [asdict(result) for result in results],
        "verified_epsilon": verified.get("epsilon_from_events"),
        "files": {name: str(path) for name, path in files.items()},
    }
