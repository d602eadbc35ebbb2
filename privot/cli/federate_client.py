"""The command of a client of a real federation: federate client."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privot.cli.client_progress import ClientMonitor
from privot.cli.console import err_console, print_json, print_line, print_warning
from privot.cli.federate import federate_app
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import (
    AllowLargeDelta,
    Delta,
    Device,
    Json,
    LabelColumn,
    LedgerFile,
    NumClasses,
    Repair,
    Resize,
    Shape,
)
from privot.cli.parsing import parse_class_names, parse_partition, parse_shape
from privot.errors import SettingError
from privot.progress import show_progress_bar

if TYPE_CHECKING:
    from privot.data import Sensitive
    from privot.federated import Client
    from privot.privacy.ledger import Ledger

UNITS = ("client", "record")


@dataclass(frozen=True)
class ClientConnectionOptions:
    """How a client reaches the server."""

    server_address: Annotated[str, typer.Option("--server", help="HOST:PORT of the server.")]
    ca_certificate: Annotated[
        Path,
        typer.Option(
            "--ca", help="Certificate of the authority that signed the server's certificate."
        ),
    ]
    private_key: Annotated[Path, typer.Option("--key", help="Private key of this client.")]
    idle_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without a message after which the client ends.")
    ] = 3600.0


@dataclass(frozen=True)
class ClientDataOptions:
    """The records of a client, with declared shape and classes."""

    source: Annotated[
        str,
        typer.Option(
            "--data",
            help="This client's records: .npz, .parquet, IDX or a folder with a folder for each "
            "class.",
        ),
    ]
    partition: Annotated[
        str | None,
        typer.Option(help="For trials: only partition I of N of the data, such as 0/5."),
    ] = None
    shape: Shape = None
    num_classes: NumClasses = None
    class_names: Annotated[
        str | None,
        typer.Option(
            help="Names of all class folders in the agreed order, with commas; this client may "
            "lack some."
        ),
    ] = None
    label_column: LabelColumn = "label"
    resize: Resize = None
    repair: Repair = False

    def open_dataset(self, ledger_file: Path | None) -> tuple[Sensitive, str, Ledger]:
        """Load this client's records and open the ledger that counts them.

        Args:
            ledger_file: The ledger that the user named, if any.

        Returns:
            The records, the name of the dataset whose spending is reported, and the ledger.
        """
        from privot.data.client_data import load_client_data
        from privot.privacy.ledger_lookup import open_ledger

        arguments: dict[str, Any] = {
            "shape": parse_shape(self.shape),
            "num_classes": self.num_classes,
            "label_column": self.label_column,
            "resize": self.resize,
            "repair": self.repair,
        }
        class_names = parse_class_names(self.class_names)
        if self.partition is not None:
            if class_names:
                raise SettingError("--class-names does not work with --partition. Leave one out.")
            return self._open_partition(self.partition, arguments, ledger_file)
        dataset = load_client_data(self.source, class_names=class_names, **arguments)
        return dataset, dataset.name, open_ledger(dataset.name, ledger_file)

    def _open_partition(
        self, partition: str, arguments: dict[str, Any], ledger_file: Path | None
    ) -> tuple[Sensitive, str, Ledger]:
        """Load one partition of a dataset.

        Args:
            partition: Its index and the number of partitions, such as 0/5.
            arguments: Keyword arguments for `load_dataset`.
            ledger_file: The ledger that the user named, if any.

        Returns:
            The partition, the name of the whole dataset, and the ledger of the partition.
        """
        from privot.data import load_catalog, load_dataset
        from privot.privacy.client_partition import client_partition
        from privot.privacy.ledger_lookup import ledger_path, open_ledger, open_part_ledger

        is_declared = arguments["shape"] is not None and arguments["num_classes"] is not None
        if self.source not in load_catalog() and not is_declared:
            raise SettingError(
                f"{self.source}: declare --shape (such as 1x28x28) and --classes, as all clients "
                "agreed."
            )
        index, count = parse_partition(partition)
        dataset: Any = load_dataset(self.source, num_clients=count, **arguments)
        records = client_partition(dataset, index, open_ledger(dataset.name))
        ledger = open_part_ledger(
            dataset.name,
            (index, dataset.spec.num_clients),
            ledger_file or ledger_path(records.name),
        )
        return records, dataset.name, ledger


@federate_app.command("client")
@expand_option_groups
def _client_command(
    connection: ClientConnectionOptions,
    data_options: ClientDataOptions,
    epsilon: Annotated[float, typer.Option(help="Largest epsilon of a run for this client.")],
    delta: Delta = 1e-5,
    unit: Annotated[
        str,
        typer.Option(
            help="What terms must protect: client (all its records), or record, which is weaker."
        ),
    ] = "client",
    ledger_file: LedgerFile = None,
    run_folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            help="Folder of this run's files, a new one for each run; LEDGER.run if not given.",
        ),
    ] = None,
    device: Device = "auto",
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """Take part in a real federation; only private gradients leave this client.

    Data, gate, ledger and critic stay here. The command ends with the run.
    """
    from privot.federated import Client, ClientPolicy
    from privot.privacy.guarantee import check_delta
    from privot.privacy.plan import Budget
    from privot.runtime import Runtime

    if unit not in UNITS:
        raise SettingError(f"--unit {unit} is invalid. Choose {' or '.join(UNITS)}.")
    check_delta(delta, allow_large_delta=allow_large_delta)
    dataset, source, ledger = data_options.open_dataset(ledger_file)
    folder = run_folder or ledger.path.with_name(ledger.path.name + ".run")
    folder.mkdir(parents=True, exist_ok=True)
    refusals: list[str] = []

    def report_refusal(text: str) -> None:
        refusals.append(text)
        print_warning(text)

    client = Client(
        dataset,
        Budget(epsilon, delta),
        ledger,
        folder,
        Runtime(device),
        ClientPolicy(unit=unit),
        on_warning=report_refusal,
    )
    num_rounds = _answer_until_done(
        client, connection, delta, folder / "supernode.log", report_refusal
    )
    facts = _summarize_run(client, source, ledger, delta)
    facts |= {"rounds": num_rounds, "refusals": refusals}
    if as_json:
        return print_json(facts)
    _print_summary(facts, client, source, ledger)


def _answer_until_done(
    client: Client,
    connection: ClientConnectionOptions,
    delta: float,
    log_path: Path,
    report_refusal: Any,
) -> int:
    """Answer the server's messages until the client is no longer needed.

    Args:
        client: The client.
        connection: How to reach the server.
        delta: Delta at which the cost of the terms is printed.
        log_path: File for Flower's output.
        report_refusal: Receives why an answer failed.

    Returns:
        The number of answered rounds.

    Raises:
        SettingError: The client left the run, or refused its terms.
    """
    from privot.federated.flower.client_app import build_client_app
    from privot.federated.flower.supernode import (
        RESEND_WINDOW_SECONDS,
        NoMessageError,
        run_client_node,
    )

    with show_progress_bar(err_console) as progress:
        monitor = ClientMonitor(client, progress, delta)
        client_app = build_client_app(
            lambda context: monitor,
            lambda error: report_refusal(f"An answer failed ({type(error).__name__})."),
        )
        idle_timeout = connection.idle_timeout
        if monitor.awaits_resend:
            idle_timeout = min(idle_timeout, RESEND_WINDOW_SECONDS)
        with suppress(NoMessageError) if monitor.awaits_resend else nullcontext():
            run_client_node(
                client_app,
                connection.server_address,
                connection.ca_certificate,
                connection.private_key,
                log_path,
                idle_timeout=idle_timeout,
                is_needed=monitor.is_needed,
            )
    if monitor.end_reason:
        raise SettingError(monitor.end_reason)
    return monitor.num_answered_rounds


def _summarize_run(client: Client, source: str, ledger: Ledger, delta: float) -> dict[str, Any]:
    """Summarize the run and what the ledger counts.

    Args:
        client: The client.
        source: Name of the dataset.
        ledger: Its ledger.
        delta: Delta of the epsilons.

    Returns:
        The facts for the JSON output.
    """
    from privot.privacy.shard_checkpoint import list_shard_checkpoints
    from privot.release.ledger_summary import summarize_spending

    terms = client.agreed_terms
    return {
        "run_id": terms.run_id if terms else None,
        "ledger": str(ledger.path),
        **summarize_spending(source, ledger, delta),
        "delta": delta,
        "checkpoints": [str(path) for path in list_shard_checkpoints(ledger).values()],
    }


def _print_summary(facts: dict[str, Any], client: Client, source: str, ledger: Ledger) -> None:
    """Print what the client answered and what its ledger counts.

    Args:
        facts: The facts of the JSON output.
        client: The client.
        source: Name of the dataset.
        ledger: Its ledger.
    """
    from privot.privacy.shard_checkpoint import describe_leftover_checkpoints
    from privot.release.ledger_summary import describe_spending

    terms = client.agreed_terms
    if terms:
        print_line(f"answered   {facts['rounds']} of {terms.settings.rounds} rounds")
    else:
        print_line("answered   nothing; the client agreed to no terms")
    spending = describe_spending(source, ledger, facts)
    print_line(f"ledger     {spending}, at delta {facts['delta']:g}")
    for text in describe_leftover_checkpoints(ledger):
        print_warning(text)
