"""The client's verb: privatize."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from privot.cli.options import (
    AllowLargeDelta,
    Classes,
    Data,
    Download,
    Json,
    Label,
    LedgerFile,
    Repair,
    Resize,
    Shape,
    app,
    emit,
    say,
    say_caution,
    say_guarantee,
    to_shape,
)
from privot.errors import SettingError


@app.command()
def privatize(
    data: Data,
    out: Annotated[Path, typer.Option(help="The file that may leave: .safetensors.")],
    epsilon: Annotated[float | None, typer.Option(help="Of each record's values.")] = None,
    channel: Annotated[str, typer.Option(help="laplace or gaussian.")] = "laplace",
    delta: Annotated[float, typer.Option(help="Of a gaussian channel; well under 1/size.")] = 1e-5,
    labels_epsilon: Annotated[
        float | None,
        typer.Option(help="Send labels too, by randomized response, at this epsilon more."),
    ] = None,
    space: Annotated[
        str,
        typer.Option(
            help="Where noise is added: plain, pooled:SIDE or waves:COUNT, such as pooled:7."
        ),
    ] = "plain",
    radius: Annotated[
        float | None,
        typer.Option(
            help="Scale records into a ball of this radius: less noise, brighter ones fade."
        ),
    ] = None,
    centre: Annotated[
        float | None, typer.Option(help="Of that ball, as a grey value; the middle if not given.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="A table: COLUMNS=CHANNEL:EPSILON:DOMAIN, such as 0-1=laplace:4:-1:1 or 2=unary:1:5; repeated."
        ),
    ] = None,
    ledger: LedgerFile = None,
    shape: Shape = None,
    classes: Classes = None,
    label: Label = "label",
    resize: Resize = None,
    repair: Repair = False,
    download: Download = False,
    no_header: Annotated[
        bool,
        typer.Option(
            "--no-header", help="The first line of a .csv is a record, not the columns' names."
        ),
    ] = False,
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """On the client: add noise to every record. What leaves is a file that says how; the number of records becomes public."""
    from dataclasses import asdict

    from privot.data import Sensitive, load
    from privot.data.tabular import read_table
    from privot.local.channels import Channel, known
    from privot.local.dataset import fresh
    from privot.local.privatize import certificate, channel_for
    from privot.local.privatize import privatize as run
    from privot.local.schema import channel_of

    kind, _, size = space.partition(":")
    if not (size.isdecimal() and len(size) < 6) if kind != "plain" else size:
        raise SettingError(
            f"--space {space!r}: write plain, pooled:SIDE or waves:COUNT, such as pooled:7"
        )
    if (epsilon is None) == (not column):
        raise SettingError("give --epsilon for images, or --column for each column of a table")
    known(channel)
    fresh(out)
    if epsilon is None:
        box: Sensitive = read_table(data, header=not no_header)
        made: Channel = channel_of(column or [], box.spec.pixels, delta)
    else:
        box = load(  # type: ignore[assignment]
            data,
            shape=to_shape(shape),
            classes=classes,
            label=label,
            resize=resize,
            repair=repair,
            download=download,
            public_size=True,
        )
        made = channel_for(
            box.spec,
            channel,
            epsilon,
            delta,
            labels_epsilon=labels_epsilon,
            space=kind,
            size=int(size or 0),
            radius=radius,
            centre=centre,
        )
    cautions: list[str] = []

    def notice(text: str) -> None:
        cautions.append(text)
        say_caution(text)  # nothing is spent yet

    sent = run(
        box, made, out=out, ledger=ledger, notice=notice, allow_large_delta=allow_large_delta
    )
    claim = asdict(certificate(made))
    if as_json:
        facts = {
            "file": str(out),
            "records": len(sent),
            "channel": made.parameters(),
            "guarantee": claim,
            "labels": sent.labelled,
        }
        return emit({**facts, "cautions": cautions})
    say(
        f"file       {out}: {len(sent):,} records, {made.width:,} numbers each, {'with' if sent.labelled else 'without'} labels"
    )
    say_guarantee(claim)
    say("next       privot synthesize FILE --method entropic-gan, wherever that file went")
