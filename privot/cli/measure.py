"""Verbs that judge: measure, compare, report."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from privot.cli.options import (
    AllowLargeDelta,
    Delta,
    Device,
    Download,
    IsPublic,
    Json,
    Label,
    LedgerFile,
    Resize,
    Seed,
    app,
    declared,
    emit,
    err_console,
    out_console,
    plain,
    say,
    say_caution,
    say_guarantee,
)
from privot.errors import ReleaseError, SettingError
from privot.io import writable
from privot.progress import Progress, jsonable, progress_bar

if TYPE_CHECKING:
    from privot.measures.result import Reading

Test = Annotated[str, typer.Option(help="Real data to test on; of a built-in name its test split.")]
Train = Annotated[
    str | None,
    typer.Option(help="Real training data: for the inception score, and to compare features with."),
]
Only = Annotated[
    str,
    typer.Option(
        help="Measures, with commas: fid, kid, precision, is, domain, sliced, thirteen, cnn, ... or default."
    ),
]
Count = Annotated[int, typer.Option(min=2, help="Samples of each output.")]
Weights = Annotated[
    Path | None, typer.Option(help="A safetensors file of the 2015 Inception network.")
]


def _measured(
    sources: Sequence[str],
    test: str,
    train: str | None,
    only: str,
    count: int,
    public: bool,
    ceiling: Path | None,
    weights: Path | None,
    device: str,
    seed: int,
    label: str,
    resize: int | None,
    download: bool,
) -> list[tuple[Any, list[Reading]]]:
    """Each source with its readings; all names are checked before the first is measured."""
    from privot.data import load
    from privot.measures import Subject, Workbench
    from privot.measures.evaluator import chosen
    from privot.measures.result import read
    from privot.runtime import Runtime

    names = chosen([each.strip() for each in only.split(",")])
    runtime = Runtime(device)
    known = read(ceiling) if ceiling else []
    subjects = [
        Subject.of(each, count, seed, public=public, class_names=_names(test)) for each in sources
    ]
    more: Any = {"label": label, "resize": resize, "download": download, "public": public}
    facts = declared(test, next((each for each in subjects if each.class_names), subjects[0]))
    if len(subjects) > 1:  # of which each may know fewer classes
        facts = {key: value for key, value in facts.items() if key == "class_names"}
    box = load(test, "test", **facts, **more)
    real = load(train, **more) if train else None
    with progress_bar(err_console) as progress:
        bench = Workbench(
            box,
            real,
            weights=weights,
            runtime=runtime,
            seed=seed,
            progress=progress,
            notice=say_caution,
        )
        found = []
        for subject in subjects:
            bench.progress = _named(progress, subject.name) if len(subjects) > 1 else progress
            found.append((subject, bench.measure(subject, names, known)))
        return found


def _names(test: str) -> tuple[str, ...] | None:
    """Of a built-in's classes, by which class folders of foreign output are known."""
    from privot.data import catalogue, describe

    return describe(test).class_names if test in catalogue() else None


def _named(progress: Progress, name: str) -> Progress:
    def show(stage: str, step: int, of: int, **facts: Any) -> None:
        progress(f"{plain(name)}: {stage}", step, of, **facts)

    return show


def _paid(
    source: str,
    test: str,
    only: str,
    count: int,
    public: bool,
    pay: float,
    delta: float,
    ledger: Path | None,
    device: str,
    seed: int,
    label: str,
    resize: int | None,
    download: bool,
) -> tuple[Any, list[Reading]]:
    """Accuracies of networks, through the gate of the test set."""
    from privot.data import Sensitive, load
    from privot.measures import Subject
    from privot.measures.private_accuracy import paid_accuracy
    from privot.privacy.plan import Budget
    from privot.runtime import Runtime

    names = ("cnn",) if only == "default" else tuple(each.strip() for each in only.split(","))
    subject = Subject.of(source, count, seed, class_names=_names(test))
    budget = Budget(pay, delta)
    if public:
        raise SettingError("--pay buys numbers on sensitive data; on public data they are free")
    box = load(
        test, "test", **declared(test, subject), label=label, resize=resize, download=download
    )
    assert isinstance(box, Sensitive)
    with progress_bar(err_console) as progress:
        found = paid_accuracy(
            subject,
            box,
            budget,
            names,
            ledger=ledger,
            runtime=Runtime(device),
            seed=seed,
            progress=progress,
        )
    return subject, found


def _json(subject: Any, readings: Sequence[Reading]) -> dict[str, Any]:
    made = subject.release.digest if subject.release else None
    return jsonable(
        {"subject": subject.name, "release": made, "readings": [asdict(each) for each in readings]}
    )


@app.command()
def measure(
    subject: Annotated[
        str,
        typer.Argument(
            help="A release, or foreign output: a folder of class folders, .npz (x, y), .parquet."
        ),
    ],
    test: Test,
    train: Train = None,
    only: Only = "default",
    count: Count = 60_000,
    public: IsPublic = False,
    ceiling: Annotated[
        Path | None, typer.Option(help="Readings of real data, for the calibrated accuracy.")
    ] = None,
    weights: Weights = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the readings here, for `privot report`.")
    ] = None,
    pay: Annotated[
        float | None,
        typer.Option(help="Buy publishable accuracies on sensitive test data, for this epsilon."),
    ] = None,
    delta: Delta = 1e-5,
    ledger: LedgerFile = None,
    device: Device = "auto",
    seed: Seed = 0,
    label: Label = "label",
    resize: Resize = None,
    download: Download = False,
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """How good the images are: features against real data, classifiers trained on them and tested on real data."""
    if pay is not None and (train or ceiling or weights):
        raise SettingError(
            "--pay counts hits on the test data alone: --train, --ceiling and --weights have no part in it"
        )
    if pay is not None:
        from privot.synthesis.preflight import check_delta

        check_delta(delta, allowed=allow_large_delta)
    with _held(out) as keep:
        if pay is None:
            [(found, readings)] = _measured(
                [subject],
                test,
                train,
                only,
                count,
                public,
                ceiling,
                weights,
                device,
                seed,
                label,
                resize,
                download,
            )
        else:
            found, readings = _paid(
                subject,
                test,
                only,
                count,
                public,
                pay,
                delta,
                ledger,
                device,
                seed,
                label,
                resize,
                download,
            )
        _show(
            found, readings, as_json
        )  # first of all: what was paid for is seen, whatever the disk does next
        keep(
            json.dumps(_json(found, readings), indent=1), all(each.publishable for each in readings)
        )


@contextmanager
def _held(out: Path | None) -> Iterator[Callable[[str, bool], None]]:
    """A file that can be written when the work is done: what stands against it is said before. What is not public is the user's alone."""
    if out is None:
        yield lambda text, public: None
        return
    if os.path.lexists(out):
        raise SettingError(f"--out {out} is there already: name another file, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    try:
        part.touch()

        def keep(text: str, public: bool) -> None:
            if not public:
                part.chmod(0o600)
            part.write_text(text)
            part.replace(out)

        yield keep
    finally:
        part.unlink(missing_ok=True)


def _show(subject: Any, readings: Sequence[Reading], as_json: bool) -> None:
    if as_json:
        return emit(_json(subject, readings))
    table = Table(
        Column("measure", no_wrap=True),
        Column("value", no_wrap=True),
        "samples",
        "real records",
        "publish",
    )
    for each in readings:
        value = f"{each.value:.4g}" + ("" if math.isnan(each.error) else f" ±{each.error:.2g}")
        table.add_row(
            each.name,
            value,
            f"{each.samples}",
            f"{each.count} of {plain(each.reference)}",
            "yes" if each.publishable else "internal",
        )
    out_console.print(table, soft_wrap=False)
    for ruler in dict.fromkeys(each.ruler for each in readings if each.ruler):
        say(f"{', '.join(each.name for each in readings if each.ruler == ruler)}: {ruler}")


@app.command()
def compare(
    subjects: Annotated[list[str], typer.Argument(help="Releases and foreign outputs.")],
    test: Test,
    train: Train = None,
    only: Only = "default",
    count: Count = 60_000,
    public: IsPublic = False,
    ceiling: Annotated[
        Path | None, typer.Option(help="Readings of real data, for the calibrated accuracy.")
    ] = None,
    weights: Weights = None,
    out: Annotated[Path, typer.Option(help="A folder for the page.")] = Path("comparison"),
    device: Device = "auto",
    seed: Seed = 0,
    label: Label = "label",
    resize: Resize = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """The same measures for several outputs, ours or foreign, on one page."""
    from privot.release import Release
    from privot.report import compare as write
    from privot.report import comparison
    from privot.report import output_folder as folder
    from privot.report.privacy_curves import recorded

    writable(folder.check(out, comparison.FILES, "comparison.json"))
    for each in subjects:  # a claim that nothing proves is refused before the work
        if (Path(each) / "manifest.json").exists():
            recorded(Release.load(each), plain(each))
    found = _measured(
        subjects,
        test,
        train,
        only,
        count,
        public,
        ceiling,
        weights,
        device,
        seed,
        label,
        resize,
        download,
    )
    page = write(found, out)
    if as_json:
        return emit({"page": str(page), "subjects": [_json(*each) for each in found]})
    names = list(dict.fromkeys(each.name for _, readings in found for each in readings))
    table = Table(Column("measure", no_wrap=True), *(plain(subject.name) for subject, _ in found))
    for name in names:
        cells = [
            next((f"{each.value:.4g}" for each in readings if each.name == name), "")
            for _, readings in found
        ]
        table.add_row(name, *cells)
    out_console.print(table, soft_wrap=False)
    say(f"page       {page}")


@app.command()
def report(
    release: Annotated[Path, typer.Argument(help="Folder of a release.")],
    out: Annotated[Path, typer.Option(help="A folder for the report.")] = Path("report"),
    readings: Annotated[
        list[Path] | None,
        typer.Option(help="Files that `privot measure --out` wrote; may be repeated."),
    ] = None,
    attacks: Annotated[
        list[Path] | None,
        typer.Option(help="More files of attacks than `privot attack` left; repeatable."),
    ] = None,
    internal: Annotated[
        bool, typer.Option("--internal", help="Also the owner's own face, not for publication.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(help="The owner's records, for nearest neighbours; with --internal."),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="The data set's ledger, for its history; with --internal.")
    ] = None,
    label: Label = "label",
    resize: Resize = None,
    as_json: Json = False,
) -> None:
    """One page that a data owner can sign: samples, promise, proof, use. Exit code 3 if an attack beats the certificate."""
    from privot.audit.result import read as read_attacks
    from privot.data import load
    from privot.measures.result import read
    from privot.privacy.ledger import Ledger
    from privot.release import Release
    from privot.report import Owner, write

    if (data or ledger) and not internal:
        raise SettingError(
            "--data and --ledger are the owner's own: ask for the internal face with --internal"
        )
    if ledger and not ledger.exists():
        raise ReleaseError(f"{ledger}: no such ledger")
    loaded = Release.load(release)
    measured = [each for path in readings or [] for each in read(path, loaded)]
    own = release.resolve()
    beside = [
        own / "attacks",
        own.with_name(f"{own.name}.attacks"),
    ]  # where `privot attack` leaves its results
    found = [
        *(attacks or []),
        *(path for folder in beside for path in sorted(folder.glob("*.json"))),
    ]
    tried = [each for path in found for each in read_attacks(path, loaded)]
    box = load(data, **declared(data, loaded.spec), label=label, resize=resize) if data else None
    owner = Owner(box, Ledger(ledger) if ledger else None) if internal else None
    done = write(
        loaded, out, name=release.resolve().name, readings=measured, attacks=tried, owner=owner
    )
    if as_json:
        emit(
            {
                "files": [str(each) for each in done.files],
                "broken": done.broken,
                "left_out": done.left_out,
            }
        )
    else:
        for path in done.files:
            say(f"{path}")
        if not done.broken:
            say_guarantee(asdict(loaded.guarantee))
        if done.left_out:
            say_caution(
                f"{done.left_out} numbers are not publishable and were left out: --internal shows them to the owner"
            )
    if done.broken:
        say(
            "privot: implementation broken: a measured attack lies above the certified curve; do not publish",
            err_console,
            "red",
        )
        sys.exit(3)
