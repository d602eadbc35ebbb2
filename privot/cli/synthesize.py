"""Verbs that make: methods, plan, synthesize, resize, sample, demo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from privot.cli.options import (
    DEFAULT,
    AllowLargeDelta,
    Classes,
    ClassSizes,
    Config,
    Data,
    Dealt,
    Delta,
    Device,
    Download,
    Epsilon,
    Json,
    Label,
    LedgerFile,
    MaxTpr,
    MethodName,
    Microbatch,
    Mirror,
    PublicClasses,
    PublicSize,
    Repair,
    Resize,
    Seed,
    Sets,
    Shape,
    Size,
    Spread,
    app,
    emit,
    err_console,
    guarantee_lines,
    out_console,
    plain,
    say,
    say_caution,
    say_guarantee,
    to_settings,
    to_shape,
    to_sizes,
    to_wall,
)
from privot.errors import SettingError
from privot.progress import progress_bar, round_up, seconds


@app.command()
def methods(as_json: Json = False) -> None:
    """What there is, whom it trusts, what it promises."""
    from privot.methods import methods as found

    rows = [
        {"name": name, "title": kind.title, "trusts": kind.trusts, "promise": kind.promise}
        for name, kind in found().items()
    ]
    if as_json:
        return emit(rows)
    table = Table("method", "what it is", "trusts", "promises")
    for row in rows:
        table.add_row(*row.values())
    out_console.print(table, soft_wrap=False)


@app.command()
def plan(
    data: Data,
    method: MethodName = DEFAULT,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    max_tpr: MaxTpr = None,
    sets: Sets = None,
    config: Config = None,
    device: Device = "auto",
    shape: Shape = None,
    classes: Classes = None,
    size: Size = None,
    class_sizes: ClassSizes = None,
    owners: Dealt = None,
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """Preflight: plan, events, epsilon, predicted quality and time. Reads no record, spends nothing."""
    from privot.data import describe
    from privot.local.dataset import Privatized, is_privatized
    from privot.methods import make
    from privot.runtime import Runtime
    from privot.synthesis.cost import fit_settings
    from privot.synthesis.preflight import preflight

    given = to_settings(config, sets)
    make(method, given)  # refuses settings that the method does not have
    sent = Privatized.load(data) if is_privatized(data) else None  # no record: these are public
    declared = {
        "shape": to_shape(shape),
        "classes": classes,
        "owners": owners,
        "size": size,
        "class_sizes": to_sizes(class_sizes),
    }
    spec = sent.spec if sent else describe(data, **declared)  # type: ignore[arg-type]
    maker = fit_settings(method, given, spec, Runtime(device).target)
    facts = preflight(
        sent or spec, maker, to_wall(epsilon, delta, max_tpr, maker), device, allow_large_delta
    )
    if as_json:
        return emit(facts)
    table = Table(show_header=False)
    table.add_row(
        "data",
        f"{plain(data)}: {spec.classes} classes, {'x'.join(map(str, spec.shape))}, size {spec.size or 'not public'}",
    )
    for stage in facts["plan"]["stages"]:
        table.add_row(
            f"stage {stage['name']}",
            f"{stage['verb']}, {stage['steps']} step(s), noise {stage['noise']:.4g}",
        )
    table.add_row("guarantee", "\n".join(guarantee_lines(facts["guarantee"])))
    chosen = ", ".join(
        f"{key}={value}" for key, value in facts["settings"].items() if value is not None
    )
    table.add_row("settings", chosen)
    for key, value in facts["forecast"].items():
        if value is not None and key != "shorter_run":  # the caution says it
            said = (
                seconds(value)
                if key == "predicted_seconds"
                else f"{value:.3g}"
                if isinstance(value, (int, float))
                else str(value)
            )
            table.add_row(
                key.replace("_", " ").replace("predicted seconds", "predicted time"), said
            )
    out_console.print(table, soft_wrap=False)
    for caution in facts["cautions"]:
        say_caution(caution)


@app.command()
def synthesize(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder of the release.")] = Path("release"),
    method: MethodName = DEFAULT,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    max_tpr: MaxTpr = None,
    sets: Sets = None,
    config: Config = None,
    device: Device = "auto",
    microbatch: Microbatch = None,
    seed: Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that stopped.")
    ] = False,
    ledger: LedgerFile = None,
    shape: Shape = None,
    classes: Classes = None,
    label: Label = "label",
    resize: Resize = None,
    repair: Repair = False,
    public_size: PublicSize = False,
    public_classes: PublicClasses = False,
    mirror: Mirror = None,
    download: Download = False,
    owners: Dealt = None,
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """Train on sensitive data and write a release with its certificate."""
    import time
    from dataclasses import asdict

    from privot.methods import make
    from privot.privacy.ledger_lookup import open_ledger, spending_sentence
    from privot.runtime import Runtime
    from privot.synthesis import synthesize as run
    from privot.synthesis.inputs import load

    given = to_settings(config, sets)
    maker = make(method, given)  # refuses settings that the method does not have
    wall = to_wall(epsilon, delta, max_tpr, maker)
    runtime = Runtime(device, microbatch)
    if os.path.lexists(out):
        raise SettingError(f"--out {out} is there already: name another folder, or remove it")
    box = load(
        data,
        shape=to_shape(shape),
        classes=classes,
        label=label,
        resize=resize,
        repair=repair,
        public_size=public_size,
        mirror=mirror,
        download=download,
        public_classes=public_classes,
        owners=owners,
    )
    start = time.perf_counter()
    cautions = []

    def notice(text: str) -> None:
        cautions.append(text)
        say_caution(text)  # at once: nothing is spent yet

    with progress_bar(err_console) as progress:
        release = run(
            box,  # type: ignore[arg-type]
            method,
            wall,
            settings=given,
            out=out,
            ledger=ledger,
            seed=seed,
            runtime=runtime,
            progress=progress,
            resume=resume,
            notice=notice,
            allow_large_delta=allow_large_delta,
        )
    took = time.perf_counter() - start
    result = {
        "release": str(out),
        "guarantee": asdict(release.guarantee),
        "ledger": release.facts["ledger"],
        "seconds": took,
    }
    if as_json:
        return emit({**result, "cautions": cautions})
    say(f"release    {out}  ({seconds(took)})")
    say_guarantee(asdict(release.guarantee))
    if facts := release.facts["ledger"]:
        say(f"ledger     {spending_sentence(box.name, open_ledger(box.name, ledger), facts)}")
    elif "channel" in release.facts:
        say("ledger     nothing is spent here: the clients did, when they privatized")


@app.command()
def resize(
    release: Annotated[
        Path, typer.Argument(help="Folder of a release of images, made with keep=true.")
    ],
    per_class: Annotated[int, typer.Option(min=1, help="Images of each class.")],
    out: Annotated[Path, typer.Option(help="Folder of the new release.")],
    sets: Sets = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Make a set of another size of a release; needs no data and costs nothing."""
    import time
    from dataclasses import asdict

    from privot.runtime import Runtime
    from privot.synthesis import resize as run

    start = time.perf_counter()
    with progress_bar(err_console) as progress:
        made = run(
            release,
            per_class,
            settings=to_settings(None, sets),
            out=out,
            runtime=Runtime(device),
            progress=progress,
        )
    took = time.perf_counter() - start
    count = len(made.product.tensors["labels"])
    if as_json:
        facts = {"release": str(out), "images": count, "from": made.facts["resized"]["from"]}
        return emit({**facts, "guarantee": asdict(made.guarantee), "seconds": took})
    say(f"release    {out}: {count} images, at no cost  ({seconds(took)})")
    say_guarantee(asdict(made.guarantee))


@app.command()
def sample(
    release: Annotated[Path, typer.Argument(help="Folder of a release.")],
    count: Annotated[int, typer.Option(help="How many images, or rows of a table.")] = 100,
    out: Annotated[
        Path,
        typer.Option(
            help=".npz, .png (a grid), .parquet, or a folder of PNGs by class; of a table .npz, .csv or .parquet."
        ),
    ] = Path("samples.npz"),
    spread: Spread = 1.0,
    seed: Seed = 0,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Draw samples from a release; costs nothing. Another device draws the same images, but for their rounding."""
    from privot.release import Release, refuse_internal
    from privot.release.export import ready, table_columns, write, write_table
    from privot.runtime import Runtime

    loaded = Release.load(release)
    where = Runtime(device).target
    refuse_internal(loaded, release)
    columns = table_columns(loaded)
    ready(out, table=columns is not None)
    with progress_bar(err_console) as progress:
        images, labels = loaded.product.sample(
            loaded.spec, count, seed=seed, device=where, spread=spread, progress=progress
        )
    facts: dict[str, Any] = {"out": str(out), "count": count}
    if columns is not None:
        write_table(images, columns, out)
        facts["columns"] = [each.name for each in columns]
        text = f"{count} rows of {len(columns)} columns in {out}"
    else:
        write(images, labels, out, loaded.spec.classes, loaded.spec.class_names)
        text = f"{count} samples in {out}"
    if loaded.product.kind == "set":
        distinct = len(loaded.product.places(labels).unique())
        held = len(loaded.product.tensors["labels"])
        facts |= {"distinct": distinct, "images_in_set": held, "repeated": distinct < count}
        text = f"{count} images in {out}: {distinct} of the {held} images of the set"
        text += (
            ", and images repeat, since a set draws no new ones"
            if distinct < count
            else ", each once"
        )
    if as_json:
        return emit(facts)
    say(text)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="A folder for the results; made anew.")] = Path(
        "privot-demo"
    ),
    epsilon: Annotated[float, typer.Option(help="Privacy budget.")] = 10.0,
    as_json: Json = False,
) -> None:
    """The whole story on the embedded data set, in about a minute."""
    from privot.cli.demo import run

    with progress_bar(err_console) as progress:
        result = run(out, epsilon, progress, say_caution)
    if as_json:
        return emit(result)
    say_guarantee(result["guarantee"])
    for each in result["readings"]:
        say(
            f"{each['name']:<20} {each['value']:.3f} ± {each['error']:.3f} on {each['count']} real test images"
        )
    if result["verified_epsilon"] is not None:
        say(f"verified   epsilon {round_up(result['verified_epsilon'])} recomputed from the events")
    for what, where in result["files"].items():
        say(f"{what:<10} {where}")
