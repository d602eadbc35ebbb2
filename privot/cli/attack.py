"""Verbs that attack: attack, audit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from privot.cli.options import (
    Config,
    Dealt,
    Device,
    Download,
    IsPublic,
    Json,
    Label,
    Microbatch,
    PublicClasses,
    Resize,
    Seed,
    Sets,
    app,
    declared,
    emit,
    err_console,
    out_console,
    plain,
    resumable,
    say,
    say_caution,
    to_settings,
)
from privot.errors import SettingError
from privot.io import writable
from privot.progress import jsonable, progress_bar, round_down, round_up

SHADOWS = 64
Confidence = Annotated[float, typer.Option(help="Of every bound.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes on this host that prepare shadows.")]
OnRay = Annotated[
    bool,
    typer.Option("--ray", help="Prepare shadows on a Ray cluster (RAY_ADDRESS, or this host)."),
]


@app.command()
def attacks(as_json: Json = False) -> None:
    """Which attacks there are, and what each needs."""
    from privot.attacks.membership.registry import ATTACKS

    rows = [
        {"name": name, "title": each.title, "needs": list(each.needs)}
        for name, each in ATTACKS.items()
    ]
    if as_json:
        return emit(rows)
    table = Table("attack", "what it is", "needs")
    for row in rows:
        table.add_row(str(row["name"]), str(row["title"]), ", ".join(row["needs"]))
    out_console.print(table, soft_wrap=False)


@app.command()
def attack(
    name: Annotated[str, typer.Argument(help="See `privot attacks`.")],
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a release; or, for attacks with shadows, the name of a method."
        ),
    ],
    members: Annotated[str, typer.Option(help="Records that the release was made from.")],
    nonmembers: Annotated[
        str,
        typer.Option(help="Records that it was not made from; of a built-in name its test split."),
    ],
    population: Annotated[
        str | None,
        typer.Option(
            help="Yet other records that nobody learned; else a fifth of the non-members."
        ),
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(help="A release of yet other records: what is near it too says nothing."),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(min=1, help="So many of each side, drawn by the seed; all if not given."),
    ] = None,
    shadows: Annotated[
        int | None, typer.Option(min=2, help="To compare with, an even number; 64 if not given.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where shadows are, or will be; TARGET.shadows if not given. What was broken off goes on there."
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Of a private method's shadows, where a method is named.")
    ] = None,
    sets: Sets = None,
    config: Config = None,
    epochs: Annotated[int, typer.Option(min=1, help="Of classifiers.")] = 300,
    confidence: Confidence = 0.95,
    workers: Workers = 1,
    ray: OnRay = False,
    public: IsPublic = False,
    public_classes: PublicClasses = False,
    device: Device = "auto",
    microbatch: Microbatch = None,
    seed: Seed = 0,
    label: Label = "label",
    resize: Resize = None,
    download: Download = False,
    owners: Dealt = None,
    as_json: Json = False,
) -> None:
    """Tell members from others by a release. Exit code 3 if that beats its certificate, 4 if the two can be told apart without it.

    The attack first proves its power on controls. Results go beside the release, into RELEASE.attacks, which is the owner's own; where all
    data is public, into RELEASE/attacks. `privot report` reads both.
    """
    from privot.attacks.membership.registry import ATTACKS
    from privot.attacks.membership.runner import attempt, compared, left_out, proved, shadows_of
    from privot.audit.roc import chance
    from privot.data import load
    from privot.methods import methods
    from privot.release import Release
    from privot.runtime import Runtime

    if name not in ATTACKS:
        raise SettingError(f"no attack {name!r}: there are {', '.join(ATTACKS)}")
    runtime = Runtime(device, microbatch)
    compares = "shadows" in ATTACKS[name].needs
    path = Path(target)
    made = Path(target, "manifest.json").exists()
    if not made and not (compares and target in methods()):
        raise SettingError(
            f"{target}: no release is there"
            + ("; nor is it a method" if compares else f"; {name} attacks a release")
        )
    if made and (epsilon is not None or sets or config or public_classes or owners):
        raise SettingError(
            "--epsilon, --set, --config, --public-classes, --owners are of a method: a release says itself how it was made"
        )
    if not compares and (shadows or folder or ray or workers > 1):
        raise SettingError(
            f"--shadows, --folder, --workers and --ray: {name} compares with no shadows; leave them out"
        )
    chance(confidence, "--confidence")
    release = Release.load(path) if made else None
    references = [Release.load(Path(each)) for each in reference or ()]
    base = path.resolve() if made else path
    folder = folder or base.with_name(f"{base.name}.shadows")
    out = (
        folder
        if not release
        else path / "attacks"
        if public
        else base.with_name(f"{base.name}.attacks")
    )
    writable(out / name)  # said before the work
    more: Any = {"label": label, "resize": resize, "download": download, "public": public}
    known = release.spec if release else None
    inside = load(
        members, **declared(members, known), **more, public_classes=public_classes, owners=owners
    )
    known = known or inside.spec
    outside = load(nonmembers, "test", **declared(nonmembers, known), **more)
    others = load(population, "test", **declared(population, known), **more) if population else None
    with progress_bar(err_console) as progress:
        prepared = None
        if compares:
            proved(name, release, others)  # before the long work
            given: dict[str, Any] = {"epochs": epochs, "seed": seed}
            if release:
                planned = shadows_of(release, inside, outside, folder, shadows or SHADOWS, **given)
            else:
                planned = compared(
                    target,
                    to_settings(config, sets),
                    epsilon,
                    inside,
                    outside,
                    folder,
                    shadows or SHADOWS,
                    **given,
                )
            with resumable(folder):
                prepared = planned.prepare(runtime, progress, workers=workers, ray=ray)
        if release:
            found = attempt(
                name,
                release,
                inside,
                outside,
                population=others,
                prepared=prepared,
                references=references,
                candidates=candidates,
                epochs=epochs,
                seed=seed,
                confidence=confidence,
                runtime=runtime,
                progress=progress,
            )
        else:
            assert prepared
            found = left_out(name, prepared, confidence, seed)
    out.mkdir(exist_ok=True, mode=0o755 if found.publishable else 0o700)
    _write(
        out / f"{name}.json",
        {"release": release.digest if release else None, **found.to_json()},
        found.publishable,
    )
    _show(found, out / f"{name}.json", as_json)


def _write(path: Path, value: dict[str, Any], publishable: bool) -> None:
    from privot.attacks.shadows.store import write

    write(
        path,
        (json.dumps(jsonable(value), indent=1) + "\n").encode(),
        0o644 if publishable else 0o600,
    )


def _show(found: Any, path: Path, as_json: bool) -> None:
    if as_json:
        emit({**found.to_json(), "file": str(path)})
    else:
        say(found.power.sentence)
        table = Table("false positives", "true positives", "at least", "at most", "false alarms")
        for point in found.points.points:
            rates = [f"{100 * each:.3g} %" for each in (point.level, point.tpr)]
            rates += [
                f"{round_down(100 * point.lowest_tpr, 3)} %",
                f"{round_up(100 * point.highest_tpr, 3)} %",
            ]
            table.add_row(*rates, f"{point.alarms}{' (few)' if point.few else ''}")
        out_console.print(table, soft_wrap=False)
        over = found.spread
        say(
            f"AUC        {found.auc:.4f}"
            + (
                f", {over.low:.4f} to {over.high:.4f}, the mean over {over.count} victims"
                if over
                else ""
            )
        )
        if found.blind is not None:
            say(f"unseen     {found.blind:.4f}, the AUC of one who never saw the release")
        say(f"advantage  {100 * found.advantage.value:.2f} % +- {100 * found.advantage.error:.2f}")
        say(f"verdict    {found.verdict.sentence}")
        say(f"file       {plain(path)}")
        if found.caution:
            say_caution(found.caution)
        if not found.publishable:
            say_caution("sensitive records had a part in these numbers: they are the owner's own")
    _broken(found.verdict)


def _broken(verdict: Any) -> None:
    from privot.audit.verdict import NO_VERDICT

    if verdict.broken:
        say(
            "privot: implementation broken: more was proved than the certificate allows; do not publish",
            err_console,
            "red",
        )
        sys.exit(3)
    if verdict.status == NO_VERDICT:
        say(
            "privot: no verdict: members and non-members differ by more than that; take both from one random split",
            err_console,
            "red",
        )
        sys.exit(4)


@app.command()
def audit(
    method: Annotated[str, typer.Argument(help="See `privot methods`.")],
    data: Annotated[
        str, typer.Option(help="A built-in name or a path: the records that every run has.")
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the runs are kept; METHOD.audit if not given. What was broken off goes on there."
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Claimed by every run; inf for none.")
    ] = None,
    runs: Annotated[
        int, typer.Option(min=4, help="With the planted record, and as many without.")
    ] = 100,
    canaries: Annotated[
        int,
        typer.Option(
            min=0, help="So many planted records in one single run, instead of many runs."
        ),
    ] = 0,
    kind: Annotated[
        str,
        typer.Option(
            help="Of planted records: blank, noise, scenes, orthogonal, mislabelled, clean."
        ),
    ] = "blank",
    score: Annotated[
        str, typer.Option(help="What of a release is looked at: mean or nearest.")
    ] = "mean",
    gaussian: Annotated[
        bool,
        typer.Option(
            "--gaussian", help="Read the runs as of a Gaussian mechanism: proves far more of one."
        ),
    ] = False,
    sets: Sets = None,
    config: Config = None,
    confidence: Confidence = 0.95,
    public: IsPublic = False,
    public_classes: PublicClasses = False,
    device: Device = "auto",
    microbatch: Microbatch = None,
    seed: Seed = 0,
    label: Label = "label",
    resize: Resize = None,
    download: Download = False,
    owners: Dealt = None,
    as_json: Json = False,
) -> None:
    """Whole runs with and without a planted record: what do they prove about epsilon? Exit code 3 if more than was claimed."""
    from privot.audit.runner import Audit
    from privot.data import load
    from privot.runtime import Runtime

    folder = folder or Path(f"{method}.audit")
    box = load(
        data,
        label=label,
        resize=resize,
        download=download,
        public=public,
        public_classes=public_classes,
        owners=owners,
    )
    planned = Audit(
        folder=folder,
        box=box,
        method=method,
        settings=to_settings(config, sets),
        epsilon=epsilon,
        runs=runs,
        canaries=canaries,
        kind=kind,
        score=score,
        confidence=confidence,
        gaussian=gaussian,
        seed=seed,
    )
    with progress_bar(err_console) as progress, resumable(folder):
        verdict = planned.run(Runtime(device, microbatch), progress)
    told = planned.to_json()
    _write(folder / "verdict.json", told, verdict.publishable)
    if as_json:
        emit({**told, "folder": str(folder)})
    else:
        say(f"{verdict.status}: {verdict.sentence}")
        say(
            f"file: {plain(folder / 'verdict.json')}, for `privot report RELEASE --attacks` of a release made likewise"
        )
        if not verdict.publishable:
            say_caution("sensitive records had a part in these numbers: they are the owner's own")
    _broken(verdict)
