"""What every method must keep to, as checks that any method can run."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import BudgetError, PrivotError, SettingError
from privot.methods import Method, _get_type_hints, _parse_setting
from privot.privacy import accounting
from privot.privacy.answers import stores_results
from privot.privacy.gate import Gate
from privot.privacy.guarantee import NoGuarantee
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget, Plan
from privot.release import Release
from privot.release.verify import verify
from privot.runtime import Runtime, Streams, use_threads
from privot.synthesis import synthesize
from privot.synthesis.preflight import resolve_plan
from privot.testing.distinguisher import score_runs
from privot.testing.fake_device import FAKE_DEVICE, simulate_second_device
from privot.testing.neighbours import find_leaks
from privot.testing.outside_view import watch_system_calls
from privot.testing.recorder import get_secret_order, pin_results, record_run
from privot.testing.tiny_data import (
    NUM_CLASSES,
    SHAPE,
    choose_epsilon,
    choose_spec,
    choose_tiny_settings,
    has_no_mechanism,
    is_local,
    make_method_input,
    make_records,
    seal_records,
)

HEADINGS = ("Released", "Bound", "Cost", "Departs", "Notation")
_TEXT_FACTS = ("name", "title", "trusted_party", "guarantee_summary")
_NUM_AUDIT_RUNS = 4
_CPU = Runtime("cpu")


def require(condition: object, problem: str) -> None:
    """Raise AssertionError with this problem unless the condition holds."""
    if not condition:
        raise AssertionError(problem)


@dataclasses.dataclass(frozen=True)
class CheckedMethod:
    """A method under test.

    Attributes:
        method_class: The class of the method.
        settings: Settings with which it is quick on the tiny dataset.
        audit_settings: Settings that differ for the audit, whose runs are many and tiny.
        folder: An empty folder for the runs of one check.
    """

    method_class: type[Method]
    settings: Mapping[str, Any]
    audit_settings: Mapping[str, Any]
    folder: Path

    def build(self, **changes: Any) -> Method:
        """Build the method with its tiny settings, but for the changes."""
        return self.method_class(**{**self.settings, **changes})

    def build_budgeted(self, **changes: Any) -> Method:
        """Build the method without a fixed noise, so that the budget decides."""
        if "noise_multiplier" in self.settings:
            changes = {"noise_multiplier": None, **changes}
        return self.build(**changes)


# Declaration


def check_declaration(case: CheckedMethod) -> None:
    """The class is frozen, keyword-only, and says what it is, whom to trust and whom to cite."""
    method_class = case.method_class
    require(dataclasses.is_dataclass(method_class), "the class is no dataclass")
    parameters: Any = method_class.__dataclass_params__  # type: ignore[attr-defined]
    require(parameters.frozen, "the dataclass is not frozen")
    fields = [field for field in dataclasses.fields(method_class) if field.init]  # type: ignore[arg-type]
    require(all(field.kw_only for field in fields), "settings must be keyword-only")
    for fact in _TEXT_FACTS:
        text = getattr(method_class, fact, None)
        is_line = isinstance(text, str) and text and "\n" not in text
        require(is_line, f"{fact} must be one line of text")
        require(fact not in {field.name for field in fields}, f"{fact} must be no setting")
    for function, names in (("plan", ["self", "spec"]), ("fit", ["self", "gate", "streams"])):
        given = list(inspect.signature(getattr(method_class, function)).parameters)
        require(given[: len(names)] == names, f"{function} has other parameters: {given}")
    docstring = inspect.getmodule(method_class).__doc__ or ""
    parts = re.split(r"^\*\*(\w+)\*\*", docstring, flags=re.MULTILINE)[1:]
    require(tuple(parts[::2]) == HEADINGS, f"the module docstring needs {', '.join(HEADINGS)}")
    require(all(text.strip() for text in parts[1::2]), "a heading of the docstring has no text")
    _check_citation(method_class.citation)


def _check_citation(citation: str) -> None:
    """Require BibTeX entries with title, author and year."""
    for entry in re.split(r"\n(?=@)", citation.strip()):
        is_entry = re.match(r"@\w+\{[^\s,{}]+,\n", entry) and entry.endswith("}")
        require(is_entry, "the citation is no BibTeX")
        require(entry.count("{") == entry.count("}"), "the citation has an open brace")
        for field in ("title", "author", "year"):
            line = rf"^\s*{field}\s*=\s*\{{[^=]+\}},?$"
            require(re.search(line, entry, re.MULTILINE), f"the citation has no {field}")


# Settings


def check_settings(case: CheckedMethod) -> None:
    """Settings survive a manifest and a command line, and unusable values are SettingErrors."""
    hints = _get_type_hints(case.method_class)
    for method in (case.method_class(), case.build()):
        settings = dataclasses.asdict(method)  # type: ignore[call-overload]
        words = {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for name, value in settings.items()
        }
        for source in (json.loads(json.dumps(settings)), words):
            values = {
                name: _parse_setting(name, value, hints[name]) for name, value in source.items()
            }
            require(case.method_class(**values) == method, "settings do not survive as text")
    spec = choose_spec(case.build())
    for name, value, is_unusable in _list_bad_values(case):
        try:
            method = case.build(**{name: value})
            method.plan(spec)
        except PrivotError:
            continue
        except Exception as error:
            problem = f"{name}={value} raises {type(error).__name__}, not SettingError: {error}"
            raise AssertionError(problem) from error
        require(not is_unusable, f"{name}={value} is accepted")


def _list_bad_values(case: CheckedMethod) -> Iterator[tuple[str, Any, bool]]:
    """List values out of range for each numeric setting: (name, value, whether it must fail)."""
    for field in dataclasses.fields(case.method_class):  # type: ignore[arg-type]
        hint = _get_type_hints(case.method_class)[field.name]
        if hint in (int, int | None):
            yield field.name, -1, True
            yield field.name, 0, False
        elif hint in (float, float | None):
            yield field.name, math.nan, True
            yield field.name, -1.0, True
            yield field.name, math.inf, False
            yield field.name, 0.0, False


# Plan


def check_plan(case: CheckedMethod) -> None:
    """Planning reads nothing, gives the same plan each time, and keeps to the budget."""
    method = case.build()
    spec = choose_spec(method)
    first = method.plan(spec)
    method.forecast(spec, first)  # imports of the first use

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("planning touched a record or a file")

    with (
        mock.patch.object(Sensitive, "_read_records", refuse),
        mock.patch.object(Sensitive, "_count_records", refuse),
        mock.patch.object(Sensitive, "_shard_record_indices", refuse),
        mock.patch("builtins.open", refuse),
        mock.patch("io.open", refuse),
        watch_system_calls() as system_calls,
    ):
        plan = method.plan(spec)
        forecast = method.forecast(spec, plan)
    require(not system_calls, f"planning opened files or connections: {system_calls}")
    require(plan == first, "two plans of one method differ")
    require(Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan, "no JSON of the plan")
    json.dumps(forecast)
    method = case.build_budgeted()
    if has_no_mechanism(method):
        try:
            resolve_plan(spec, method, Budget(2.0))
        except SettingError:
            return
        raise AssertionError("a method without noise accepts a budget")
    if not is_local(method):
        plan, budget = resolve_plan(choose_spec(method), method, Budget(2.0))
        epsilon = plan.cost().epsilon(budget.delta)
        require(1.98 < epsilon <= 2.0, f"a budget of 2 gives a plan of {epsilon}")


# Release and ledger


def _synthesize(method: Method, spec: Spec | None = None, **options: Any) -> Release:
    """Run a method on the tiny dataset.

    Args:
        method: The method.
        spec: What is declared; the least that the method needs by default.
        options: More arguments of `privot.synthesize`.

    Returns:
        The release.
    """
    dataset = make_method_input(method, *make_records(), spec or choose_spec(method))
    options = {"runtime": _CPU, "on_warning": _ignore_warning, **options}
    return synthesize(dataset, method, choose_epsilon(method), **options)


def _ignore_warning(text: str) -> None:
    """Ignore warnings about the quality of tiny runs."""


def check_release(case: CheckedMethod) -> None:
    """A run makes a valid release, whose guarantee is what the ledger was charged."""
    method = case.build()
    ledger = Ledger(case.folder / "tiny.jsonl")
    reports: list[tuple[int, int, float]] = []

    def report_progress(stage: str, step: int, total: int, **facts: Any) -> None:
        reports.append((step, total, facts["epsilon"]))

    release = _synthesize(method, out=case.folder / "out", ledger=ledger, progress=report_progress)
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
        _synthesize(method, ledger=ledger)
    except BudgetError:
        require(ledger.entries() == entries, "a refused run changed the ledger")
        return
    raise AssertionError("a second run passes a limit for one")


def check_declared_sizes(case: CheckedMethod) -> None:
    """A run with declared class sizes does not fail after it was charged."""
    labels = make_records()[1]
    class_sizes = tuple(int((labels == label).sum()) for label in range(NUM_CLASSES))
    method = case.build()
    spec = dataclasses.replace(choose_spec(method), size=len(labels), class_sizes=class_sizes)
    release = _synthesize(method, spec, ledger=case.folder / "ledger.jsonl")
    require(release.sample(NUM_CLASSES)[0].isfinite().all(), "samples are not finite")


# Replay and resume


def check_replay(case: CheckedMethod) -> None:
    """Equal query results give the same release bit by bit, whenever checkpoints are saved."""
    method = case.build()
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
    method = case.build()
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
        nonlocal num_reports
        num_reports += 1
        if num_reports - 1 == position:
            raise _Interruption

    def run(resume: bool) -> None:
        with mock.patch.object(Streams, "is_checkpoint_due", return_value=True):
            _synthesize(
                method,
                out=case.folder / "out",
                ledger=ledger,
                resume=resume,
                seed=3,
                progress=report_progress,
            )

    order = torch.from_numpy(get_secret_order(seal_records(*make_records(), choose_spec(method))))
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


# Privacy


def check_neighbours(case: CheckedMethod) -> None:
    """Nothing around the gate depends on the records; true values keep to their sensitivity."""
    method = case.build()
    if has_no_mechanism(method):
        return
    leaks = find_leaks(method, make_records(), choose_spec(method), case.folder / "run")
    leak = next(leaks, None)
    require(leak is None, f"the run shows more than its query results: {leak}")


def check_audit(case: CheckedMethod) -> None:
    """Without its noise the best adversary recognises every run: the audit can see the records.

    This is the control of an audit, and takes a few runs. `privot.testing.score_runs` with many
    runs and the full noise gives the scores for `privot.audit.audit_many_runs`.
    """
    method = case.build()
    if not method.plan(choose_spec(method)).stages:
        return
    method = case.build(**{**case.audit_settings, "noise_multiplier": 2.0})
    inside, outside, plan = score_runs(method, _NUM_AUDIT_RUNS, noise_share=0.0, epsilon=None)
    is_sampled = any(type(stage.sampling).__name__ != "Full" for stage in plan.stages)
    # A run in which the canary is never drawn tells nothing. Two of four are no chance.
    num_allowed = 2 if is_sampled else 0
    require((inside <= 0).sum() <= num_allowed, "runs with the canary are not recognised")
    require((outside >= 0).sum() <= num_allowed, "runs without the canary are not recognised")
    require((outside <= 0).all(), "a run without the canary is taken for one with it")


def check_devices(case: CheckedMethod) -> None:
    """No tensor of a GPU meets one of the CPU, on a second device that the CPU simulates."""
    method = case.build()
    dataset = make_method_input(method, *make_records(), choose_spec(method))
    options: dict[str, Any] = {
        "ledger": case.folder / "ledger.jsonl",
        "on_warning": _ignore_warning,
    }
    with simulate_second_device():
        release = synthesize(dataset, method, choose_epsilon(method), **options)
        images, _ = release.sample(6, device=FAKE_DEVICE)
    require(images.shape == (6, *SHAPE), "samples have another shape")


METHOD_CHECKS: dict[str, Callable[[CheckedMethod], None]] = {
    "declaration": check_declaration,
    "settings": check_settings,
    "plan": check_plan,
    "release": check_release,
    "declared-sizes": check_declared_sizes,
    "replay": check_replay,
    "resume": check_resume,
    "neighbours": check_neighbours,
    "audit": check_audit,
    "devices": check_devices,
}


@contextmanager
def _use_coarse_accounting() -> Iterator[None]:
    """Price sampled plans on the coarsest grid: never optimistic, and 30 times as quick."""
    with mock.patch.object(accounting, "GRID_STEPS", accounting.GRID_STEPS[-1:]):
        yield


def check_method(
    method_class: type[Method],
    settings: Mapping[str, Any] | None = None,
    *,
    audit_settings: Mapping[str, Any] | None = None,
    only: Iterable[str] | None = None,
) -> list[str]:
    """Check a method, from this package or from outside, on a tiny dataset.

    The checks need a CPU and some seconds to a minute. They cover what the class declares, unusable
    settings, the plan and its budget, the release and its charge, replay, resume after an
    interruption, leaks around the gate on a dozen other datasets, the control of an audit, and
    tensors of two devices in one operation.

    >>> from privot import list_methods
    >>> from privot.testing import check_method
    >>> check_method(list_methods()["merf"], only=["declaration", "settings"])
    ['declaration', 'settings']

    Args:
        method_class: The class of the method.
        settings: Settings with which it is quick on 47 images of 8x8 pixels, beside those that
            `privot.testing.choose_tiny_settings` chooses.
        audit_settings: Settings that differ for the audit, on eight images.
        only: Names of `METHOD_CHECKS`; all by default.

    Returns:
        The names of the checks that passed.

    Raises:
        AssertionError: If the method fails a check. The message names the check and the problem.
        SettingError: If a setting or a check is unknown.
    """
    names = list(only or METHOD_CHECKS)
    for name in names:
        if name not in METHOD_CHECKS:
            raise SettingError(
                f"There is no check {name!r}. Choose from {', '.join(METHOD_CHECKS)}."
            )
    tiny_settings = {**choose_tiny_settings(method_class), **(settings or {})}
    for name in names:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict("os.environ", PRIVOT_HOME=folder),
            _use_coarse_accounting(),
            use_threads(1),
        ):
            path = Path(folder).resolve()
            case = CheckedMethod(method_class, tiny_settings, audit_settings or {}, path)
            try:
                METHOD_CHECKS[name](case)
            except AssertionError as error:
                raise AssertionError(f"{method_class.name}, check {name!r}: {error}") from error
    return names
