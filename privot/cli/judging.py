"""Verbs that judge a release: measure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from privot.cli.terminal import Device, Download, Json, Label, Resize, Seed, app, emit, err_console, out_console
from privot.show import progress_bar, seconds


@app.command()
def measure(
    release: Annotated[Path, typer.Argument(help="Folder of a release.")],
    test: Annotated[str, typer.Option(help="Real data to test on; of a built-in name its test split.")],
    only: Annotated[str, typer.Option(help="Of logistic, mlp, cnn.")] = "logistic,mlp,cnn",
    count: Annotated[int, typer.Option(help="Samples to train on.")] = 60_000,
    public_test: Annotated[bool, typer.Option("--public-test", help="The test data is public, so the numbers may be published.")] = False,
    device: Device = "auto", seed: Seed = 0, label: Label = "label", resize: Resize = None,
    download: Download = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Train classifiers on samples, test them on real data."""
    from dataclasses import asdict

    from privot.data import load
    from privot.measures import downstream
    from privot.release import Release
    from privot.runtime import Runtime

    loaded, names = Release.load(release), tuple(each.strip() for each in only.split(","))
    box = load(test, "test", public=public_test, classes=loaded.spec.classes, label=label, resize=resize, download=download)
    images, labels = loaded.sample(count, seed=seed)
    with progress_bar(err_console) as progress:
        readings = downstream(images, labels, box, names, runtime=Runtime(device), seed=seed, progress=progress)
    if as_json:
        return emit([asdict(each) for each in readings])
    table = Table("measure", "value", "error", "test images", "publishable", "time")
    for each in readings:
        row = (each.name, f"{each.value:.4f}", f"±{each.error:.4f}", f"{each.count}")
        table.add_row(*row, "yes" if each.publishable else "no: internal", seconds(each.seconds))
    out_console.print(table, soft_wrap=False)
