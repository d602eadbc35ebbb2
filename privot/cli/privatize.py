"""The command of a client with local differential privacy: privatize."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privot.cli.app import app
from privot.cli.console import print_guarantee, print_json, print_line, print_warning
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import AllowLargeDelta, Data, DatasetOptions, Json, LedgerFile
from privot.errors import SettingError

if TYPE_CHECKING:
    from privot.data import Sensitive
    from privot.local.channels import Channel

MAX_PROJECTION_DIGITS = 5


@dataclass(frozen=True)
class ImageChannelOptions:
    """The channel of images and their labels."""

    epsilon: Annotated[
        float | None, typer.Option(help="Epsilon of each image; not for a table.")
    ] = None
    channel: Annotated[str, typer.Option(help="Noise of the channel: laplace or gaussian.")] = (
        "laplace"
    )
    delta: Annotated[
        float, typer.Option(help="Delta of a gaussian channel; far below 1 / number of records.")
    ] = 1e-5
    labels_epsilon: Annotated[
        float | None,
        typer.Option(help="Send labels too, by randomized response with this additional epsilon."),
    ] = None
    projection: Annotated[
        str,
        typer.Option(
            help="Space of the noise: identity, pooled:SIDE or dct:SIDE, such as pooled:7."
        ),
    ] = "identity"
    radius: Annotated[
        float | None,
        typer.Option(
            help="Scale records into a ball of this radius: less noise, but bright ones fade."
        ),
    ] = None
    center: Annotated[
        float | None,
        typer.Option(help="Center of that ball as a gray level; by default the middle."),
    ] = None


@dataclass(frozen=True)
class TableOptions:
    """The channels of a table."""

    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            help="Channel of columns as COLUMNS=CHANNEL:EPSILON:DOMAIN, such as 0-1=laplace:4:-1:1 "
            "or 2=unary:1:5; may be repeated.",
        ),
    ] = None
    no_header: Annotated[
        bool,
        typer.Option("--no-header", help="The first line of a .csv file is a record, not names."),
    ] = False


@app.command("privatize")
@expand_option_groups
def _privatize_command(
    source: Data,
    out: Annotated[Path, typer.Option(help="The file that may leave: .safetensors.")],
    image_options: ImageChannelOptions,
    table_options: TableOptions,
    dataset_options: DatasetOptions,
    ledger: LedgerFile = None,
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """Add noise to every record before it leaves the client.

    The file states its channel. The number of records becomes public.
    """
    from privot.local.dataset import check_new_privatized_path
    from privot.local.privatize import compute_channel_guarantee
    from privot.local.privatize import privatize as privatize_dataset

    _check_options(image_options, table_options)
    check_new_privatized_path(out)
    dataset, channel = (
        _open_table(source, table_options, image_options.delta)
        if image_options.epsilon is None
        else _open_images(source, dataset_options, image_options)
    )
    warnings: list[str] = []

    def report_warning(text: str) -> None:
        warnings.append(text)
        print_warning(text)  # at once, while nothing is spent

    privatized = privatize_dataset(
        dataset,
        channel,
        out=out,
        ledger=ledger,
        on_warning=report_warning,
        allow_large_delta=allow_large_delta,
    )
    guarantee = asdict(compute_channel_guarantee(channel))
    if as_json:
        return print_json(
            {
                "file": str(out),
                "records": len(privatized),
                "channel": channel.to_json(),
                "guarantee": guarantee,
                "labels": privatized.has_labels,
                "warnings": warnings,
            }
        )
    labels = "with" if privatized.has_labels else "without"
    print_line(
        f"file       {out}: {len(privatized):,} records, {channel.output_dim:,} values each, "
        f"{labels} labels"
    )
    print_guarantee(guarantee)
    print_line(
        "next       privot synthesize FILE --method entropic-gan, where the file is received"
    )


def _check_options(image_options: ImageChannelOptions, table_options: TableOptions) -> None:
    """Raise unless the options describe images or a table, and the projection is well-formed."""
    from privot.local.channels import get_channel_class

    _parse_projection(image_options.projection)
    if (image_options.epsilon is None) == (not table_options.columns):
        raise SettingError("Give --epsilon for images, or --column for each column of a table.")
    get_channel_class(image_options.channel)


def _parse_projection(text: str) -> tuple[str, int]:
    """Parse a projection.

    >>> _parse_projection("pooled:7"), _parse_projection("identity")
    (('pooled', 7), ('identity', 0))
    """
    kind, _, side = text.partition(":")
    if kind == "identity":
        is_valid = not side
    else:
        is_valid = side.isdecimal() and len(side) <= MAX_PROJECTION_DIGITS
    if not is_valid:
        raise SettingError(
            f"--projection {text!r} is invalid. Write identity, pooled:SIDE or dct:SIDE, such as "
            "pooled:7."
        )
    return kind, int(side or 0)


def _open_table(source: str, options: TableOptions, delta: float) -> tuple[Sensitive, Channel]:
    """Read a table and build its channel.

    Args:
        source: Path of the table.
        options: The channels of its columns.
        delta: Delta of gaussian channels.

    Returns:
        The table and the channel.
    """
    from privot.data.tabular import read_table
    from privot.local.schema import parse_table_channel

    table = read_table(source, has_header=not options.no_header)
    return table, parse_table_channel(options.columns or [], table.spec.num_features, delta)


def _open_images(
    source: str, dataset_options: DatasetOptions, options: ImageChannelOptions
) -> tuple[Sensitive, Channel]:
    """Read images and build their channel.

    Args:
        source: Name or path of the images.
        dataset_options: How to read them.
        options: The channel.

    Returns:
        The images and the channel.
    """
    from privot.data import load_dataset
    from privot.local.privatize import build_image_channel

    assert options.epsilon is not None
    dataset = load_dataset(source, **dataset_options.to_arguments(), public_size=True)
    kind, side = _parse_projection(options.projection)
    channel = build_image_channel(
        dataset.spec,
        options.channel,
        options.epsilon,
        options.delta,
        labels_epsilon=options.labels_epsilon,
        projection_kind=kind,
        projection_side=side,
        radius=options.radius,
        center=options.center,
    )
    return dataset, channel  # type: ignore[return-value]
