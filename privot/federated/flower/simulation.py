"""A federation on one machine: Flower's simulation, in which Ray workers run the clients."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from privot.data import Sensitive, load_dataset
from privot.errors import DataError, ReleaseError, SettingError
from privot.federated.client import Client
from privot.federated.client_folder import ClientFolder
from privot.federated.client_policy import ClientPolicy
from privot.federated.flower.client_app import MessageResponder, build_client_app
from privot.federated.flower.server_app import ClientMessenger, Traffic, run_federation
from privot.federated.flower.simulation_guards import (
    catch_interrupts,
    require_ray_token,
    silence_flower,
)
from privot.federated.server import Server
from privot.privacy.client_partition import client_partition
from privot.privacy.ledger_lookup import LinkedLedger, ledger_path, open_ledger, open_part_ledger
from privot.privacy.plan import PrivacyTarget
from privot.runtime import Progress, Runtime, ignore_progress

JOIN_TIMEOUT_SECONDS = 300.0  # time in which all workers start and agree
ROUND_TIMEOUT_SECONDS = 3600.0  # on one machine a client can be slow but not offline
MIN_CLIENTS_PER_WORKER = 4  # a worker takes ten seconds to start, so it should run several clients
WORKER_BYTES = 5e8  # memory of a worker without a client: its imports and Ray


@dataclass(frozen=True)
class ClientSimulation:
    """Describes the simulated clients, so that any worker can build any of them.

    The state of a client is on the disk between messages.

    Attributes:
        source: Name or path of the dataset.
        num_clients: Number of clients.
        budget: The largest cost of a run for each client.
        folder: Folder of the clients' run files.
        ledger_folder: Folder of the clients' ledgers; None for their usual place.
        device: Where the clients compute.
        unit: The privacy unit that the clients accept, see `ClientPolicy`.
    """

    source: str
    num_clients: int
    budget: PrivacyTarget
    folder: Path
    ledger_folder: Path | None
    device: str
    unit: str

    def build_client(self, client_index: int) -> Client:
        """Build one of the clients."""
        dataset = load_partitioned_dataset(self.source, self.num_clients)
        partition = client_partition(dataset, client_index, open_ledger(dataset.name))
        return Client(
            partition,
            self.budget,
            self.open_client_ledger(client_index, partition.name),
            self._get_client_folder(client_index),
            Runtime(self.device),
            ClientPolicy(unit=self.unit),
        )

    def open_client_ledger(self, client_index: int, partition_name: str) -> LinkedLedger:
        """Open the ledger of a client's partition.

        privacy: The clients hold disjoint partitions of one dataset. By parallel composition the
        dataset's own ledger is charged one client's plan for all of them (see
        `Ledger.reserve_part`), before the first record of a partition is read.

        Args:
            client_index: The index of the client, from 0.
            partition_name: The name of its partition.

        Returns:
            The partition's ledger, linked to the dataset's own ledger.
        """
        dataset = load_partitioned_dataset(self.source, self.num_clients)
        path = (
            self.ledger_folder / f"client-{client_index}.jsonl"
            if self.ledger_folder
            else ledger_path(partition_name)
        )
        return open_part_ledger(dataset.name, (client_index, dataset.spec.num_clients or 1), path)

    def end_unfinished_clients(self) -> None:
        """Remove the critics of clients that missed their last turn, after the end of a run."""
        for client_index in range(self.num_clients):
            if ClientFolder(self._get_client_folder(client_index)).is_warmed_up:
                self.build_client(client_index).leave()

    def _get_client_folder(self, client_index: int) -> Path:
        return self.folder / f"client-{client_index}"


@cache  # a worker runs several clients
def load_partitioned_dataset(source: str, num_clients: int) -> Sensitive:
    """Load a dataset with its known clients if there are enough, or with a random partition."""
    dataset = load_dataset(source)
    if (dataset.spec.num_clients or 0) < num_clients:
        dataset = load_dataset(source, num_clients=num_clients)
    if not isinstance(dataset, Sensitive):
        raise DataError(f"{source}: a dataset of records is needed.")
    return dataset


def simulate_federation(
    simulation: ClientSimulation,
    server: Server,
    *,
    num_workers: int | None = None,
    progress: Progress = ignore_progress,
    round_timeout: float = ROUND_TIMEOUT_SECONDS,
    join_timeout: float = JOIN_TIMEOUT_SECONDS,
) -> Traffic:
    """Run the whole federation of a server with simulated clients.

    Args:
        simulation: The clients.
        server: The server; its clients have the names of `build_client_names`.
        num_workers: Number of clients that work at the same time; None: up to one for each core.
        progress: Receives the progress.
        round_timeout: Largest duration of a round in seconds.
        join_timeout: Seconds in which the workers start and agree.

    Returns:
        The traffic of the run.
    """
    if server.client_names != build_client_names(simulation.num_clients):
        raise SettingError("The server needs the client names that build_client_names returns.")
    failures: list[BaseException] = []
    traffic: list[Traffic] = []
    app = ServerApp()

    @app.main()
    def run_server(grid: Grid, context: Context) -> None:
        try:
            node_ids = _map_clients_to_nodes(
                grid, simulation.num_clients, should_stop, join_timeout
            )
            messenger = ClientMessenger(grid, node_ids, should_stop)
            traffic.append(
                run_federation(
                    server,
                    messenger,
                    join_timeout=join_timeout,
                    round_timeout=round_timeout,
                    progress=progress,
                )
            )
            simulation.end_unfinished_clients()
        except BaseException as error:
            failures.append(error)

    def get_client(context: Context) -> MessageResponder:
        return simulation.build_client(int(context.node_config["partition-id"]))

    if num_workers:
        num_workers = min(num_workers, simulation.num_clients)
    else:
        client_bytes = server.terms.settings.estimate_memory(server.terms.spec)
        num_workers = _choose_num_workers(simulation.num_clients, client_bytes)
    with silence_flower(), require_ray_token(), catch_interrupts() as should_stop:
        run_simulation(
            app,
            build_client_app(get_client),
            simulation.num_clients,
            backend_config=_build_backend_config(num_workers, simulation.device),
        )
    if failures:
        raise failures[0]
    return traffic[0]


def _build_backend_config(num_workers: int, device: str) -> dict[str, Any]:
    """Build the configuration of Ray for a number of workers that share one device."""
    uses_gpu = Runtime(device).torch_device.type == "cuda"
    return {
        "init_args": {"num_cpus": num_workers, "log_to_driver": False, "logging_level": "error"},
        "client_resources": {"num_cpus": 1, "num_gpus": 1.0 / num_workers if uses_gpu else 0.0},
    }


def _choose_num_workers(num_clients: int, client_bytes: float) -> int:
    """Choose a number of workers that fits the cores, the clients and half of the memory.

    Args:
        num_clients: Number of simulated clients.
        client_bytes: Memory of one client at work.

    Returns:
        At least 1.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_workers = min(
        os.cpu_count() or 1,
        num_clients // MIN_CLIENTS_PER_WORKER,
        int(memory_bytes / 2 / (WORKER_BYTES + client_bytes)),
    )
    return max(1, num_workers)


def build_client_names(num_clients: int) -> tuple[str, ...]:
    """Build the names of simulated clients."""
    return tuple(_build_client_name(index) for index in range(num_clients))


def _build_client_name(client_index: int) -> str:
    return f"client {client_index}"


def _map_clients_to_nodes(
    grid: Grid, num_clients: int, should_stop: Callable[[], bool], timeout: float
) -> dict[str, int]:
    """Find out which Flower node runs which client.

    Flower gives the nodes new ids at every start, and a resumed run must find the same clients.

    Args:
        grid: Flower's grid.
        num_clients: Number of simulated clients.
        should_stop: Returns whether the user wants to stop the run.
        timeout: Seconds in which the nodes reply.

    Returns:
        Client name -> id of its node.
    """
    while len(node_ids := list(grid.get_node_ids())) < num_clients:
        threading.Event().wait(0.1)
        if should_stop():
            raise ReleaseError("The run was stopped before the first query.")
    messenger = ClientMessenger(grid, {str(node_id): node_id for node_id in node_ids}, should_stop)
    question = RecordDict({"partition_id": ConfigRecord({"number": -1})})
    records = dict.fromkeys(messenger.node_ids, question)
    replies = dict(messenger.exchange_records(records, "query.partition_id", timeout))
    num_failed = sum(
        name not in replies or replies[name].has_error() for name in messenger.node_ids
    )
    if num_failed:
        raise ReleaseError(
            f"{num_failed} of {num_clients} simulated clients did not start. "
            "If memory is short, use fewer workers."
        )
    return {
        _build_client_name(int(reply.content["partition_id"]["number"])): messenger.node_ids[name]
        for name, reply in replies.items()
    }
