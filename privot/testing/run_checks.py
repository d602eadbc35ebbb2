"""What a run of a method does: its release, its charge, replay and resume."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from privot.errors import BudgetError
from privot.methods import Method
from privot.privacy.answers import stores_results
from privot.privacy.gate import Gate
from privot.privacy.guarantee import NoGuarantee
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget
from privot.release import Release
from privot.release.verify import verify
from privot.runtime import Streams
from privot.testing.checked_method import CheckedMethod, require, synthesize_tiny
from privot.testing.recorder import get_array_order, pin_results, record_run
from privot.testing.tiny_data import (
    NUM_CLASSES,
    SHAPE,
    choose_spec,
    has_no_mechanism,
    is_local,
    make_records,
    seal_records,
)


def check_release(case: CheckedMethod) -> None:
    """A run makes a valid release, whose guarantee is what the ledger was charged."""
    method = case.make()
    ledger = Ledger(case.folder / "tiny.jsonl")
    reports: list[tuple[int, int, float]] = []

    def report_progress(stage: str, step: int, total: int, **facts: Any) -> None:
        """Note a progress report.

        Args:
            stage: What the run is doing.
            step: The number of finished steps.
            total: The number of steps.
            facts: More facts of the report.
        """
        reports.append((step, total, facts["epsilon"]))

    release = synthesize_tiny(
        method, out=case.folder / "out", ledger=ledger, progress=report_progress
    )
    stored = Release.load(case.folder / "out")
    require(not (case.folder / "out.run").exists(), "the folder of the run is still there")
    require(stored.guarantee == release.guarantee, "the stored guarantee differs")
    settings = json.loads(json.dumps(dataclasses.asdict(method)))  # type: ignore[call-overload]
    require(stored.metadata["settings"] == settings, "the manifest has other settings")
    _check_samples(release, stored)
    require(reports, "the run reports no progress")
    require(all(0 <= step <= total for step, total, _ in reports), "progress passes its end")
    guarantee = release.guarantee
    if isinstance(guarantee, NoGuarantee):
        require(guarantee.reason, "NoGuarantee gives no reason")
        require(has_no_mechanism(method), "a method with queries made no guarantee")
        return
    epsilon = guarantee.epsilon
    proved = verify(case.folder / "out")["epsilon_from_events"]
    require(math.isclose(proved, epsilon), f"events prove {proved}, the release says {epsilon}")
    spent = ledger.compute_spent_cost().epsilon(guarantee.delta)
    charged = 0.0 if is_local(method) else epsilon
    require(math.isclose(spent, charged), f"the ledger was charged {spent} for {charged}")
    reported = max(report[2] for report in reports)
    require(reported <= epsilon * (1 + 1e-9), f"progress reports epsilon {reported}")
    if not is_local(method):
        _check_second_charge(case, method, Ledger(ledger.path), spent)


def _check_samples(release: Release, stored: Release) -> None:
    """Require finite images of all classes, the same from the release and from its files."""
    images, labels = release.sample(2 * NUM_CLASSES)
    other_images, other_labels = stored.sample(2 * NUM_CLASSES)
    is_same = torch.equal(images, other_images) and torch.equal(labels, other_labels)
    require(is_same, "the stored release gives other samples")
    require(images.shape == (2 * NUM_CLASSES, *SHAPE), "samples have another shape")
    require(set(labels.tolist()) == set(range(NUM_CLASSES)), "a class is missing")
    require(images.isfinite().all(), "samples are not finite")
    require(images.min() >= 0 and images.max() <= 1, "samples leave the range [0, 1]")


def _check_second_charge(case: CheckedMethod, method: Method, ledger: Ledger, spent: float) -> None:
    """Require that a limit just above the first run refuses a second one and writes nothing.

    Args:
        case: The method under test.
        method: The method.
        ledger: The ledger of the first run.
        spent: The epsilon of the first run.
    """
    ledger.set_limit(Budget(spent * 1.01))
    entries = ledger.entries()
    try:
        synthesize_tiny(method, ledger=ledger)
    except BudgetError:
        require(ledger.entries() == entries, "a refused run changed the ledger")
        return
    raise AssertionError("a second run passes a limit for one")


def check_declared_sizes(case: CheckedMethod) -> None:
    """A run with declared class sizes does not fail after it was charged."""
    labels = make_records()[1]
    class_sizes = tuple(int((labels == label).sum()) for label in range(NUM_CLASSES))
    method = case.make()
    spec = dataclasses.replace(choose_spec(method), size=len(labels), class_sizes=class_sizes)
    release = synthesize_tiny(method, spec, ledger=case.folder / "ledger.jsonl")
    require(release.sample(NUM_CLASSES)[0].isfinite().all(), "samples are not finite")


def check_replay(case: CheckedMethod) -> None:
    """Equal query results give the same release bit by bit, whenever checkpoints are saved."""
    method = case.make()
    if not method.plan(choose_spec(method)).stages:
        return
    dataset = seal_records(*make_records(), choose_spec(method))
    folder = case.folder / "run"
    first = record_run(method, dataset, folder)
    require(first.release, f"the run made no release: {first.events[-4:]}")
    for is_due in (True, False):
        with mock.patch.object(Streams, "is_checkpoint_due", lambda *_, due=is_due: due):
            again = record_run(method, dataset, folder, results=first.results)
        require(again.release == first.release, "a replay makes another release")
    other = record_run(method, dataset, folder)
    require(other.release != first.release, "the release does not depend on the noise")


class _Interruption(KeyboardInterrupt):
    """The check interrupts a run."""


def check_resume(case: CheckedMethod) -> None:
    """A run that was interrupted anywhere can be resumed for one charge.

    The release is the same, unless the gate does not store the results of a stage: then the results
    after the last checkpoint are lost.
    """
    method = case.make()
    stages = method.plan(choose_spec(method)).stages
    if not stages:
        return
    results: dict[tuple[str, int], Tensor] = {}
    whole, num_reports = _run_with_interruption(case, method, results, None)
    charge = whole.compute_spent_cost().epsilon(1e-5)
    expected = _read_tensors(case.folder / "out")
    for position in sorted({0, num_reports // 2, num_reports - 1}):
        ledger, _ = _run_with_interruption(case, method, results, position)
        tensors = _read_tensors(case.folder / "out")
        is_same = all(torch.equal(tensors[name], expected[name]) for name in expected)
        is_lossless = all(map(stores_results, stages))
        require(
            is_same or not is_lossless,
            f"resumed after progress report {position}, the release differs",
        )
        spent = ledger.compute_spent_cost().epsilon(1e-5)
        require(math.isclose(spent, charge), f"a resumed run is charged {spent}, not {charge}")


def _read_tensors(out: Path) -> Mapping[str, Tensor]:
    """Read the tensors of a release."""
    return Release.load(out).artifact.tensors


def _run_with_interruption(
    case: CheckedMethod,
    method: Method,
    results: dict[tuple[str, int], Tensor],
    position: int | None,
) -> tuple[Ledger, int]:
    """Run a method, interrupt it once, and resume it.

    Args:
        case: The method under test.
        method: The method.
        results: Query results by stage and step, filled by the first run.
        position: The index of the progress report at which it is interrupted; None: never.

    Returns:
        The ledger, and the number of progress reports.
    """
    name = f"resume-{position}.jsonl"
    ledger = Ledger(case.folder / name)
    num_reports = 0

    def report_progress(stage: str, step: int, total: int, **facts: Any) -> None:
        """Note a progress report.

        Args:
            stage: What the run is doing.
            step: The number of finished steps.
            total: The number of steps.
            facts: More facts of the report.
        """
        nonlocal num_reports
        num_reports += 1
        if num_reports - 1 == position:
            raise _Interruption

    def run(resume: bool) -> None:
        with mock.patch.object(Streams, "is_checkpoint_due", return_value=True):
            synthesize_tiny(
                method,
                out=case.folder / "out",
                ledger=ledger,
                resume=resume,
                seed=3,
                progress=report_progress,
            )

    order = torch.from_numpy(get_array_order(seal_records(*make_records(), choose_spec(method))))
    _remove_folder(case.folder / "out")
    with (
        pin_results(results),
        mock.patch.object(Gate, "_get_secret_order", return_value=order),
    ):
        try:
            run(resume=False)
        except _Interruption:
            run(resume=(case.folder / "out.run").exists())
    return ledger, num_reports


def _remove_folder(folder: Path) -> None:
    """Remove a folder and what lies in it, if it exists."""
    for path in sorted(folder.rglob("*"), reverse=True) if folder.exists() else ():
        path.rmdir() if path.is_dir() else path.unlink()
    if folder.exists():
        folder.rmdir()
