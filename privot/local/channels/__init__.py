"""Channels of local differential privacy, one file a channel.

A channel states what a client does to its record before anything leaves, what that proves, and what
the server must know of it.
"""

from __future__ import annotations

import difflib
from typing import Any

from privot.errors import SettingError, reraise_as
from privot.local.channels.composite import Composite
from privot.local.channels.gaussian import Gaussian
from privot.local.channels.laplace import Laplace
from privot.local.channels.projection import Projection
from privot.local.channels.protocol import Channel
from privot.local.channels.randomized_response import RandomizedResponse
from privot.local.channels.unary_encoding import OptimizedUnaryEncoding, UnaryEncoding

__all__ = [
    "Channel",
    "Composite",
    "Gaussian",
    "Laplace",
    "OptimizedUnaryEncoding",
    "Projection",
    "RandomizedResponse",
    "UnaryEncoding",
    "channel_from_json",
    "get_channel_class",
]


CHANNELS: dict[str, Any] = {
    channel_class.name: channel_class
    for channel_class in (
        Laplace,
        Gaussian,
        RandomizedResponse,
        UnaryEncoding,
        OptimizedUnaryEncoding,
        Composite,
    )
}


def channel_from_json(parameters: Any) -> Channel:
    """Build the channel that a file describes.

    Raises:
        SettingError: If the description is not valid.
    """
    with reraise_as(SettingError, "not a channel"):
        fields = dict(parameters)
        channel_class = get_channel_class(fields.pop("channel"))
        if channel_class is Composite:
            if any(part["channel"] == Composite.name for part in fields["parts"]):
                raise SettingError("A composite channel cannot be part of another.")
            return Composite(parts=tuple(channel_from_json(part) for part in fields["parts"]))
        channel: Channel = channel_class.from_json(fields)
        return channel


def get_channel_class(name: Any) -> Any:
    """Give the class of a channel by its name.

    Raises:
        SettingError: If there is no such channel; the message suggests the nearest name.
    """
    if name in CHANNELS:
        return CHANNELS[name]
    near = difflib.get_close_matches(str(name), CHANNELS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(CHANNELS)}"
    raise SettingError(f"there is no channel {str(name)[:40]!r}; {hint}")
