"""The whole story once, on the embedded digits: release, samples, use, proof, report."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from privot import report
from privot.data import load
from privot.errors import SettingError
from privot.measures import Subject, measure
from privot.privacy.plan import Budget
from privot.progress import Progress
from privot.release import verify
from privot.release.export import write
from privot.runtime import threads
from privot.synthesis import synthesize

# Chosen for time: twice the width or the steps moved the accuracy by no more than another run does.
SETTINGS = {"per_class": 10, "width": 16, "steps": 100}
CLASSIFIERS = (
    "logistic",
    "mlp",
)  # no convolutional one: 50 epochs on 100 images are too few steps to judge it by
MARK = "made-by-privot-demo"  # only a folder with this file in it is ever replaced


def run(
    out: Path, epsilon: float, progress: Progress, notice: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Make, sample, measure and verify a release of the digits; returns what was found and where it lies."""
    budget = Budget(epsilon)
    if out.exists() and not (out / MARK).exists():
        raise SettingError(
            f"{out} is there already and was not made by the demo: name another folder with --out"
        )
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()
    with threads(1):
        release = synthesize(
            "digits",
            budget=budget,
            settings=SETTINGS,
            out=out / "release",
            ledger=out / "ledger.jsonl",
            progress=progress,
            notice=notice,
        )
        count = len(release.product.tensors["labels"])  # the set itself, none of its images twice
        write(*release.sample(count), out / "samples.png", release.spec.classes)
        subject = Subject.sampled(release, "digits", count)
        test = load("digits", "test", public=True)
        readings = measure(subject, test, CLASSIFIERS, progress=progress)
    checked = verify(out / "release")
    report.write(release, out / "report", name="digits", readings=readings)
    files = {
        "release": out / "release",
        "samples": out / "samples.png",
        "report": out / "report" / "report.html",
        "ledger": out / "ledger.jsonl",
    }
    return {
        "guarantee": asdict(release.guarantee),
        "readings": [asdict(each) for each in readings],
        "verified_epsilon": checked.get("epsilon_from_events"),
        "files": {what: str(where) for what, where in files.items()},
    }
