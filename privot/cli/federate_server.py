"""The command of the server of a real federation: federate server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privot.cli.console import err_console, print_line
from privot.cli.federate import (
    FederatedMethodOptions,
    OutputFolder,
    ServerRunOptions,
    build_federation_terms,
    federate_app,
    run_and_report,
)
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import EpsilonOptions, Json, NumClasses, Shape
from privot.cli.parsing import parse_shape
from privot.errors import SettingError
from privot.progress import Progress

if TYPE_CHECKING:
    from privot.data.spec import Spec
    from privot.federated import Server
    from privot.federated.flower.server_app import Traffic


@dataclass(frozen=True)
class ServerConnectionOptions:
    """Where the server listens, and who may connect."""

    address: Annotated[str, typer.Option(help="HOST:PORT to listen on, such as 0.0.0.0:8443.")]
    tls_folder: Annotated[
        Path, typer.Option("--tls", help="Folder with ca.crt, server.crt and server.key.")
    ]
    client_keys: Annotated[
        Path,
        typer.Option(help="Public keys of the clients, one per line: type, key, name."),
    ]
    join_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds in which clients can connect and agree.")
    ] = 600.0
    round_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds in which clients can answer in a round.")
    ] = 300.0


@dataclass(frozen=True)
class FederationSpecOptions:
    """Shape and classes of the clients' data."""

    spec_from: Annotated[
        str | None,
        typer.Option(help="A built-in dataset with the same shape and classes."),
    ] = None
    shape: Shape = None
    num_classes: NumClasses = None

    def build_spec(self) -> Spec:
        """Build the declared spec."""
        from privot.data import describe_dataset, load_catalog
        from privot.data.spec import Spec

        shape = parse_shape(self.shape)
        if self.spec_from is not None:
            if self.spec_from not in load_catalog():
                raise SettingError(
                    f"--spec-from {self.spec_from}: choose a built-in dataset "
                    f"({', '.join(load_catalog())}), or declare --shape and --classes."
                )
            return describe_dataset(self.spec_from, shape=shape, num_classes=self.num_classes)
        if shape is None or self.num_classes is None:
            raise SettingError(
                "Declare the clients' data: --shape (such as 1x28x28) and --classes, or "
                "--spec-from a built-in dataset."
            )
        return Spec(shape, self.num_classes)


@federate_app.command("server")
@expand_option_groups
def _server_command(
    connection: ServerConnectionOptions,
    out: OutputFolder,
    spec_options: FederationSpecOptions,
    method_options: FederatedMethodOptions,
    budget: EpsilonOptions,
    run_options: ServerRunOptions,
    as_json: Json = False,
) -> None:
    """Run the server of a real federation; it trains the generator and receives no record."""
    from privot.federated.flower.keys import read_node_keys
    from privot.federated.flower.server_app import run_federation
    from privot.federated.flower.superlink import find_tls_files, open_superlink, split_address
    from privot.federated.session import get_federation_folder
    from privot.federated.validation import compute_max_message_bytes
    from privot.runtime import Runtime

    settings = method_options.parse()
    runtime = Runtime(run_options.device)
    node_keys = read_node_keys(connection.client_keys)
    split_address(connection.address)
    find_tls_files(connection.tls_folder)
    spec = spec_options.build_spec()
    terms = build_federation_terms(settings, spec, len(node_keys), budget)

    def run_rounds(progress: Progress) -> tuple[Server, Traffic]:
        server = run_options.open_server(terms, list(node_keys), out, runtime, progress)
        with open_superlink(
            connection.address,
            connection.tls_folder,
            node_keys,
            get_federation_folder(out) / "superlink.log",
            compute_max_message_bytes(terms),
        ) as messenger:
            print_line(
                f"open       {connection.address} for {len(node_keys)} clients: "
                f"{', '.join(node_keys)}",
                err_console,
            )
            return server, run_federation(
                server,
                messenger,
                join_timeout=connection.join_timeout,
                round_timeout=connection.round_timeout,
                progress=progress,
            )

    run_and_report(run_rounds, out, budget.delta, as_json)
