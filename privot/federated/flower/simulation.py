"""A federation on one machine: Flower's simulation, where Ray workers play the owners, each with its own gate, ledger and folder."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from privot.data import Sensitive, load
from privot.data.partition import held_by
from privot.errors import DataError, ReleaseError, SettingError
from privot.federated.client import Owner, Policy
from privot.federated.flower.client_app import Replies, client_app
from privot.federated.flower.server_app import Post, Traffic, conduct
from privot.federated.server import Server
from privot.privacy.ledger_lookup import LinkedLedger, ledger_path, open_ledger, open_part_ledger
from privot.privacy.plan import Wall
from privot.runtime import Progress, Runtime, silent

JOIN = 300.0  # seconds until all workers have started and said yes
FEW = 4  # owners for whom a worker more, which takes ten seconds to start, is not worth it
WORKER = 5e8  # bytes of a worker before it plays anybody: what it imports, and Ray
ROUND = 3600.0  # seconds of a round: on one machine nobody is away, only slow


@dataclass(frozen=True)
class Cast:
    """Who plays the owners: plain data, so that any worker can make any of them. What an owner keeps lies on disk between messages."""

    source: str
    owners: int
    wall: Wall
    folder: Path  # of the owners' traces
    ledgers: Path | None  # None: where ledgers lie unless another place is named
    device: str
    unit: str

    def owner(self, number: int) -> Owner:
        """One of them."""
        whole = dealt(self.source, self.owners)
        part = held_by(whole, number, open_ledger(whole.name))
        ledger = self.ledger(number, part.name)
        return Owner(
            part,
            self.wall,
            ledger,
            self.folder / f"owner-{number}",
            Runtime(self.device),
            Policy(unit=self.unit),
        )

    def ledger(self, number: int, name: str) -> LinkedLedger:
        """Find the ledger of an owner's part.

        privacy: the owners hold disjoint parts of one data set, so its own ledger is charged one
        owner's plan for all of them (parallel composition, see `Ledger.reserve_part`), before the
        first record of a part is read.

        Args:
            number: The number of the owner, from 0.
            name: The name of its part.

        Returns:
            The part's ledger, linked to the data set's own ledger.
        """
        box = dealt(self.source, self.owners)
        path = self.ledgers / f"owner-{number}.jsonl" if self.ledgers else ledger_path(name)
        return open_part_ledger(box.name, (number, box.spec.owners or 1), path)

    def over(self) -> None:
        """The run is: owners who missed their last turn forget what their critics know, too."""
        for number in range(self.owners):
            if (self.folder / f"owner-{number}" / "warm").exists():
                self.owner(number).leave()


@cache  # a worker plays many owners
def dealt(source: str, owners: int) -> Sensitive:
    """All records with their known owners, as far as these are needed; else for `held_by` to deal to so many."""
    box = load(source)
    if (box.spec.owners or 0) < owners:
        box = load(source, owners=owners)
    if not isinstance(box, Sensitive):
        raise DataError(f"{source}: records are needed")
    return box


def simulate(
    cast: Cast,
    server: Server,
    *,
    workers: int | None = None,
    progress: Progress = silent,
    patience: float = ROUND,
    join: float = JOIN,
) -> Traffic:
    """Play the whole run of ``server``, whose owners are called as `names` says: ``workers`` at a time, or up to one a core."""
    if server.names != names(cast.owners):
        raise SettingError("a simulation has owners of its own: name them by simulation.names")
    failures: list[BaseException] = []
    traffic: list[Traffic] = []
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        try:
            post = Post(grid, _placed(grid, cast.owners, stopped, join), stopped)
            traffic.append(conduct(server, post, join=join, patience=patience, progress=progress))
            cast.over()
        except BaseException as error:
            failures.append(error)

    def owner_of(context: Context) -> Replies:
        return cast.owner(int(context.node_config["partition-id"]))

    count = (
        min(workers, cast.owners)
        if workers
        else _workers(cast.owners, server.terms.settings.memory(server.terms.spec))
    )
    share = 1.0 / count if Runtime(cast.device).target.type == "cuda" else 0.0
    with _quiet(), _guarded(), _interrupted() as stopped:
        run_simulation(
            app,
            client_app(owner_of),
            cast.owners,
            backend_config={
                "init_args": {"num_cpus": count, "log_to_driver": False, "logging_level": "error"},
                "client_resources": {"num_cpus": 1, "num_gpus": share},
            },
        )
    if failures:
        raise failures[0]
    return traffic[0]


def _workers(owners: int, each: float) -> int:
    """Up to one a core, not one for a few owners, and as many as fit into half of the memory with an owner of ``each`` bytes in play."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, owners // FEW, int(memory / 2 / (WORKER + each))))


def names(owners: int) -> tuple[str, ...]:
    """What simulated owners are called."""
    return tuple(f"owner {number}" for number in range(owners))


def _placed(grid: Grid, owners: int, stopped: Callable[[], bool], seconds: float) -> dict[str, int]:
    """Which node plays which owner. Flower numbers nodes anew each time, and a run that goes on must find the same owners."""
    while len(found := list(grid.get_node_ids())) < owners:
        threading.Event().wait(0.1)
        if stopped():
            raise ReleaseError("stopped before anything was asked")
    post = Post(grid, {str(node): node for node in found}, stopped)
    hello = RecordDict({"place": ConfigRecord({"number": -1})})
    said = dict(post.send({str(node): hello for node in found}, "query.place", seconds))
    if failed := [name for name in post.nodes if name not in said or said[name].has_error()]:
        raise ReleaseError(
            f"{len(failed)} of {owners} simulated owners did not start; is there memory for as many workers?"
        )
    return {
        f"owner {int(message.content['place']['number'])}": post.nodes[name]
        for name, message in said.items()
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Flower and Ray say on the terminal what our own progress says better; and Flower leaves a path behind in the environment."""
    logger = logging.getLogger("flwr")
    before = os.environ.get("PYTHONPATH")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.pop("PYTHONPATH", None)
        if before is not None:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Ray listens on every address of the machine, and whoever reaches it could run code in it; so it asks for a word that only we know."""
    from ray._raylet import AuthenticationTokenLoader, Config

    def read() -> None:  # Ray read its settings when it was imported, perhaps before
        AuthenticationTokenLoader.instance().reset_cache()
        Config.initialize("")

    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    read()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        read()


@contextlib.contextmanager
def _interrupted() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: Flower's simulation would hang on it, so it is only noted, and the run ends after the message at hand."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
