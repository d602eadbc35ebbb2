"""The server's end: sends to named owners through Flower's grid, collects what comes back in time, and lets a `Server` judge it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from privot.errors import ReleaseError
from privot.federated.flower.codec import said, wrapped
from privot.federated.server import Server
from privot.runtime import Progress, silent

# seconds between two looks for replies, at least; and in units of what a look takes, if many are waited for
LOOK = 0.1
REST = 4.0
SELDOM = 5.0  # seconds after which a round that lasts counts its answers aloud
LIVE = 3600.0  # seconds for which Flower keeps a message that nobody fetched, beyond those that we wait
AWAY = 10.0  # seconds of a round for which a node that is not online is waited for, once nobody else is
SILENT = 3  # times that a round is asked in vain before the run is stopped


class Post:
    """The way from names to nodes and back. ``stopped`` says whether somebody wants the run to end."""

    def __init__(
        self, grid: Grid, nodes: dict[str, int], stopped: Callable[[], bool] = lambda: False
    ):
        self.grid = grid
        self.nodes = nodes
        self.stopped = stopped

    def exchange(
        self, letters: dict[str, bytes], seconds: float, away: float | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """Send each to its name; yield (name, reply) as they come, until all came or the time is up. Who failed or is late is left out.

        ``away``: how long, at most, only nodes that are not online are waited for; all the time, if not given.
        """
        kept = {name: wrapped(raw) for name, raw in letters.items()}
        for name, message in self.send(kept, "query", seconds, away):
            if (raw := said(message)) is not None:
                yield name, raw

    def send(
        self, contents: dict[str, RecordDict], kind: str, seconds: float, away: float | None = None
    ) -> Iterator[tuple[str, Message]]:
        """The same with Flower's own messages."""
        waiting: dict[str, str] = {}  # number of Flower's message to name
        unsent = dict(contents)
        begun = time.monotonic()
        while unsent or waiting:
            if self.stopped():
                raise ReleaseError(
                    "stopped; what owners have answered is kept: go on with --resume"
                )
            online = (
                set(self.grid.get_node_ids()) if unsent else set()
            )  # Flower takes no message for a node that is away
            for name in [name for name in unsent if self.nodes[name] in online]:
                # A node may reply to any message whose number it knows, and that number is a digest: the word in it that only this
                # message has keeps one owner from speaking for another.
                message = Message(
                    unsent[name],
                    self.nodes[name],
                    kind,
                    group_id=secrets.token_hex(16),
                    ttl=seconds + LIVE,
                )
                if number := next(iter(self.grid.push_messages([message])), None):
                    waiting[number] = name
                    del unsent[name]
            looked = time.monotonic()
            replies = self.grid.pull_messages(list(waiting)) if waiting else ()
            took = time.monotonic() - looked
            for message in replies:
                if name := waiting.pop(message.metadata.reply_to_message_id, ""):
                    yield name, message
            passed = time.monotonic() - begun
            if passed > seconds or (not waiting and away is not None and passed > away):
                return
            if unsent or waiting:
                time.sleep(max(LOOK, REST * took))


@dataclass
class Traffic:
    """Bytes of requests and of what came back, over all owners, and how many answers counted."""

    sent: int = 0
    seen: int = 0
    answers: int = 0

    @property
    def each(self) -> float:
        """Bytes for one owner in one round, both ways."""
        return (self.sent + self.seen) / max(self.answers, 1)


class NotAgreedError(ReleaseError):
    """No owner agreed to the terms of a run that has not begun, so that no owner was charged."""


def conduct(
    server: Server, post: Post, *, join: float, patience: float, progress: Progress = silent
) -> Traffic:
    """A whole run: consent within ``join`` seconds, then rounds of at most ``patience`` each, with whoever is there.

    Flower ends a run in which every client failed as if all were well. Here a round that nobody answers is asked again, and then stops the
    run, which can go on later from there.
    """
    for name, raw in post.exchange(server.offers(), join):
        server.accept(name, raw)
        progress("consent", len(server.living), len(server.names))
    if not server.living:
        raise (NotAgreedError if server.round == 0 else ReleaseError)(
            _why(server, "no owner has agreed to the terms")
        )
    tries = 0
    rounds = server.terms.settings.rounds
    traffic = Traffic()
    away = join  # after a restart of the server its nodes need a while to find their way back
    while not server.done:
        asked = server.ask()
        count = 0
        begun = time.monotonic()
        spoken = begun
        for name, raw in post.exchange(asked, patience, away):
            counted = server.take(name, raw) is None
            count = count + counted
            traffic.answers = traffic.answers + counted
            traffic.sent = traffic.sent + len(asked[name])
            traffic.seen = traffic.seen + len(raw)
            if time.monotonic() - spoken > SELDOM:
                spoken = time.monotonic()
                progress("answers in this round", count, len(asked))
        if spoken > begun:
            progress("answers in this round", count, len(asked))
        tries = 0 if count else tries + 1
        away = AWAY
        if asked and not count and server.living and tries < SILENT:
            continue
        if asked and not count:
            raise ReleaseError(
                _why(
                    server,
                    f"no owner has answered in round {server.round}; go on with --resume when they are back",
                )
            )
        server.close()
        progress("rounds", server.round, rounds, owners=len(server.living), answered=count)
    return traffic


def _why(server: Server, what: str) -> str:
    """With the first few reasons that were given."""
    said = dict.fromkeys(f"{each.name}: {each.reason}" for each in server.offences)
    return what + (f" ({'; '.join(list(said)[:3])})" if said else "")
