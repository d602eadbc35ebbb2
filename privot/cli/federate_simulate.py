"""The command that runs a federation on one machine: federate simulate."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privot.cli.federate import (
    FederatedMethodOptions,
    OutputFolder,
    ServerRunOptions,
    build_federation_terms,
    federate_app,
    run_and_report,
)
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import EpsilonOptions, Json
from privot.progress import Progress

if TYPE_CHECKING:
    from privot.federated import Server
    from privot.federated.flower.server_app import Traffic

BUDGET_ROUNDING = 1 + 1e-9


@federate_app.command("simulate")
@expand_option_groups
def _simulate_command(
    *,
    data: Annotated[
        str,
        typer.Option(
            help="femnist (partitioned by writer), or other data, which is partitioned at random."
        ),
    ],
    num_clients: Annotated[int, typer.Option("--clients", min=1, help="Number of clients.")] = 5,
    out: OutputFolder,
    budget: EpsilonOptions,
    method_options: FederatedMethodOptions,
    run_options: ServerRunOptions,
    num_workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            help="Number of clients that work at the same time; by default up to one per core.",
        ),
    ] = None,
    ledger_folder: Annotated[
        Path | None, typer.Option("--ledger", help="Folder for the clients' ledgers.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a whole federation on this machine; each client has its own gate, ledger and critic."""
    from privot.federated.flower.simulation import (
        ClientSimulation,
        build_client_names,
        load_partitioned_dataset,
        simulate_federation,
    )
    from privot.federated.session import get_federation_folder
    from privot.privacy.ledger_lookup import open_ledger
    from privot.privacy.plan import Budget
    from privot.runtime import Runtime

    settings = method_options.parse()
    runtime = Runtime(run_options.device)
    # The workers start in other folders.
    source = str(Path(data).resolve()) if Path(data).exists() else data
    dataset = load_partitioned_dataset(source, num_clients)
    terms = build_federation_terms(settings, dataset.spec, num_clients, budget)
    run_folder = get_federation_folder(out)
    is_resumed = run_options.resume and (run_folder / "run.json").exists()
    if not is_resumed:  # a resumed run is charged already
        open_ledger(dataset.name).check_limit(
            terms.plan(), num_clients=dataset.spec.num_clients or 1
        )
    # Every simulated client allows the cost of the terms, despite rounding. Its ledger can still
    # refuse.
    client_epsilon = float(terms.plan().cost().epsilon(budget.delta)) * BUDGET_ROUNDING
    simulation = ClientSimulation(
        source,
        num_clients,
        Budget(client_epsilon, budget.delta),
        run_folder.resolve() / "clients",
        ledger_folder and ledger_folder.resolve(),
        run_options.device,
        terms.settings.unit,
    )

    def run_rounds(progress: Progress) -> tuple[Server, Traffic]:
        client_names = list(build_client_names(num_clients))
        server = run_options.open_server(terms, client_names, out, runtime, progress)
        return server, simulate_federation(
            simulation, server, num_workers=num_workers, progress=progress
        )

    with _remove_folder_without_consent(run_folder):
        run_and_report(run_rounds, out, budget.delta, as_json)


@contextmanager
def _remove_folder_without_consent(run_folder: Path) -> Iterator[None]:
    """Remove the folder of a run whose terms every client refused; nothing was charged."""
    from privot.federated.flower.server_app import NoConsentError

    try:
        yield
    except NoConsentError:
        shutil.rmtree(run_folder, ignore_errors=True)
        raise
