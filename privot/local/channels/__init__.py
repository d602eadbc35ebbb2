"""One file a channel: what a client does to its record before anything leaves, what that proves, and what the server must know of it."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, Protocol

from torch import Tensor

from privot.errors import SettingError, refusing
from privot.local.channels.composite import Mixed
from privot.local.channels.gaussian import Gaussian
from privot.local.channels.laplace import Laplace
from privot.local.channels.projection import Space
from privot.local.channels.randomized_response import RandomizedResponse
from privot.local.channels.unary_encoding import OptimizedUnary, Unary
from privot.privacy.noise import Secret
from privot.privacy.plan import Plan

__all__ = [
    "Channel",
    "Gaussian",
    "Laplace",
    "Mixed",
    "OptimizedUnary",
    "RandomizedResponse",
    "Space",
    "Unary",
    "channel_from",
    "known",
]


class Channel(Protocol):
    """The contract. Fields are public; `privatize` runs on the client, `cost` on the server.

    A record has ``columns`` numbers (a category is one: its number), a generated point ``dim`` (a category is the vector of its
    probabilities), an answer ``width``. ``temperature`` is the lambda of entropic transport for which ``exp(-cost / temperature)`` is
    the law of an answer, up to a factor that does not depend on the point.
    """

    name: ClassVar[str]

    @property
    def epsilon(self) -> float: ...
    @property
    def delta(self) -> float: ...
    @property
    def temperature(self) -> float: ...
    @property
    def columns(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def width(self) -> int: ...

    def plan(self) -> Plan:
        """The events of one record's trip, under ``local`` neighbours."""

    def privatize(self, records: Tensor, secret: Secret | None = None) -> Tensor:
        """[n, columns] to [n, width]."""

    def points(self, records: Tensor) -> Tensor:
        """Records [n, columns] as points [n, dim]."""

    def cost(self, x: Tensor, y: Tensor) -> Tensor:
        """[..., n, dim] and [..., m, width] to [..., n, m]; differentiable in x."""

    def residual(self) -> float:
        """The average cost of a record and its own answer; what transport should come to where the law was found."""

    def holds(self, y: Tensor) -> bool:
        """Whether answers [n, width] can be of this channel."""

    def at(self, epsilon: float) -> Channel:
        """The same with another epsilon."""

    def signal(self, count: int) -> float:
        """A predicted signal to noise of ``count`` records; under 1 they cannot tell much."""

    def parameters(self) -> dict[str, Any]:
        """Plain data, without epsilon: that is computed again from these."""


CHANNELS: dict[str, Any] = {
    kind.name: kind
    for kind in (Laplace, Gaussian, RandomizedResponse, Unary, OptimizedUnary, Mixed)
}


def channel_from(value: Any) -> Channel:
    """The channel that a file describes."""
    with refusing(SettingError, "not a channel"):
        plain = dict(value)
        made: Channel = known(plain.pop("channel")).from_parameters(plain)
        return made


def known(name: Any) -> Any:
    """The kind of a channel by its name, or a refusal that suggests the nearest."""
    if name in CHANNELS:
        return CHANNELS[name]
    near = difflib.get_close_matches(str(name), CHANNELS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(CHANNELS)}"
    raise SettingError(f"no channel {str(name)[:40]!r}; {hint}")
