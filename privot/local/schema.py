"""Parse the channel of a table from a few words for each column."""

from __future__ import annotations

from collections.abc import Sequence

from privot.errors import SettingError
from privot.local.channels import Channel, Composite, Projection, get_channel_class
from privot.local.channels.additive import AdditiveNoiseChannel
from privot.local.channels.categorical import CategoricalChannel

COLUMN_SYNTAX = (
    "write it as COLUMNS=laplace:EPSILON:LOW:HIGH or COLUMN=randomized-response:EPSILON:CATEGORIES,"
    " such as 0-1=laplace:4:-1:1."
)


def parse_table_channel(
    column_specs: Sequence[str], num_columns: int, delta: float = 1e-5
) -> Channel:
    """Build the channel of a table from the channels of its columns.

    >>> channel = parse_table_channel(["0-1=laplace:4:-1:1", "2=unary:1:5"], 3)
    >>> channel.record_dim, channel.output_dim, round(channel.epsilon, 9)
    (3, 7, 5.0)

    Args:
        column_specs: The columns and their channels, from left to right; each column once.
        num_columns: Number of columns of the table.
        delta: Delta of Gaussian channels.

    Returns:
        The channel of a whole record.

    Raises:
        SettingError: If a text cannot be read, or a column has no channel or several.
    """
    parts: list[Channel] = []
    next_column = 0
    for column_spec in column_specs:
        first, last, part = _parse_column_spec(column_spec, delta)
        if first != next_column or last < first:
            raise SettingError(
                f"--column {column_spec!r}: the next column is {next_column}. Name each of the "
                f"{num_columns} columns once, from left to right."
            )
        parts.append(part)
        next_column = last + 1
    if next_column != num_columns:
        raise SettingError(
            f"The table has {num_columns} columns, but channels were given for {next_column}. "
            "Give every column a channel: none may leave without noise."
        )
    return parts[0] if len(parts) == 1 else Composite(parts=tuple(parts))


def _parse_column_spec(column_spec: str, delta: float) -> tuple[int, int, Channel]:
    """Parse the first column, the last column and their channel."""
    columns, _, description = column_spec.partition("=")
    channel_name, *numbers = description.split(":")
    bounds = columns.split("-") if "-" in columns else (columns, columns)
    try:
        first, last = (int(bound) for bound in bounds)
        epsilon, *domain = map(float, numbers)
    except ValueError:
        raise SettingError(f"--column {column_spec!r}: {COLUMN_SYNTAX}") from None
    channel_class = get_channel_class(channel_name)
    if not 0 < epsilon < float("inf"):
        raise SettingError(
            f"--column {column_spec!r}: epsilon {epsilon:g}: give a number above 0, such as 1."
        )
    channel: Channel
    if issubclass(channel_class, AdditiveNoiseChannel) and len(domain) == 2 and last >= first:
        projection = Projection(shape=(last - first + 1,))
        low, high = domain
        channel = channel_class.calibrate(epsilon, delta, projection=projection, low=low, high=high)
        return first, last, channel
    if (
        issubclass(channel_class, CategoricalChannel)
        and len(domain) == 1
        and domain[0].is_integer()
        and first == last
    ):
        return first, last, channel_class.calibrate(epsilon, num_categories=int(domain[0]))
    raise SettingError(f"--column {column_spec!r}: {COLUMN_SYNTAX}")
