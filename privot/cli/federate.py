"""The group of commands for a federation, and what they share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privot.cli.app import CONTEXT_SETTINGS, app
from privot.cli.console import (
    err_console,
    print_guarantee,
    print_json,
    print_line,
    print_warning,
)
from privot.cli.options import (
    ConfigFile,
    Device,
    EpsilonOptions,
    Seed,
    SettingOverrides,
)
from privot.cli.parsing import parse_settings
from privot.errors import SettingError
from privot.progress import Progress, format_duration, show_progress_bar

if TYPE_CHECKING:
    from privot.data.spec import Spec
    from privot.federated import Server, Terms
    from privot.federated.flower.server_app import Traffic
    from privot.runtime import Runtime

FEDERATED_METHOD = "federated-gs-wgan"
MAX_PRINTED_OFFENSES = 20

federate_app = typer.Typer(
    help="Train a generator across clients that trust nobody.",
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings=CONTEXT_SETTINGS,
)
app.add_typer(federate_app, name="federate")

OutputFolder = Annotated[
    Path, typer.Option(help="Folder of the release; an unfinished run is in FOLDER.run.")
]


@dataclass(frozen=True)
class FederatedMethodOptions:
    """Settings of the federated method."""

    rounds: Annotated[
        int | None, typer.Option(min=1, help="Number of rounds; the same as --set rounds=.")
    ] = None
    overrides: SettingOverrides = None
    config: ConfigFile = None

    def parse(self) -> dict[str, Any]:
        """Parse the settings."""
        settings = parse_settings(self.config, self.overrides)
        if self.rounds is None:
            return settings
        if str(settings.get("rounds", self.rounds)) != str(self.rounds):
            raise SettingError("Give --rounds or --set rounds=, not both.")
        return settings | {"rounds": self.rounds}


@dataclass(frozen=True)
class ServerRunOptions:
    """How the server of a run works."""

    transcript: Annotated[
        Path | None,
        typer.Option(
            help="File for every message that the server sends or receives, to attack it later."
        ),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Resume a run that stopped.")] = False
    seed: Seed = 0
    device: Device = "auto"

    def open_server(
        self,
        terms: Terms,
        client_names: list[str],
        out: Path,
        runtime: Runtime,
        progress: Progress,
    ) -> Server:
        """Start or resume the server.

        Args:
            terms: The terms of the run.
            client_names: The clients.
            out: Folder of the release.
            runtime: Where to compute.
            progress: Receives the progress of the start.

        Returns:
            The server.
        """
        from privot.federated.session import open_server

        return open_server(
            terms,
            client_names,
            out,
            seed=self.seed,
            runtime=runtime,
            transcript_path=self.transcript,
            resume=self.resume,
            progress=progress,
        )


def build_federation_terms(
    settings: dict[str, Any], spec: Spec, num_clients: int, budget: EpsilonOptions
) -> Terms:
    """Build the terms of a run, and print warnings about them.

    Args:
        settings: Settings of the method.
        spec: Shape and classes of the data.
        num_clients: Number of clients.
        budget: The privacy budget of a client.

    Returns:
        The terms.
    """
    from privot.data.spec import Spec
    from privot.federated.session import build_terms
    from privot.methods import make_method
    from privot.synthesis.run_warnings import collect_warnings

    public_spec = Spec(spec.shape, spec.num_classes, num_clients=num_clients)
    privacy_budget = budget.parse(make_method(FEDERATED_METHOD, settings))
    terms = build_terms(settings, public_spec, privacy_budget, budget.allow_large_delta)
    for text in collect_warnings(public_spec, terms.plan(), budget.delta, {}):
        print_warning(text)
    return terms


def run_and_report(
    run_rounds: Callable[[Progress], tuple[Server, Traffic]], out: Path, delta: float, as_json: bool
) -> None:
    """Run a federation, write its release and print the result.

    Args:
        run_rounds: Runs all rounds, and returns the server and the traffic.
        out: Folder of the release.
        delta: Delta at which the guarantee is stated.
        as_json: Print JSON instead of text.
    """
    from privot.federated.session import write_federated_release

    start = time.perf_counter()
    with show_progress_bar(err_console) as progress:
        server, traffic = run_rounds(progress)
    release = write_federated_release(server, out, delta)
    counts = Counter(
        (offense.client_name, offense.reason, offense.disqualifying) for offense in server.offenses
    )
    offenses = [
        {"client": name, "reason": reason, "disqualifying": disqualifying, "times": times}
        for (name, reason, disqualifying), times in counts.items()
    ]
    facts: dict[str, Any] = {
        "release": str(out),
        "guarantee": asdict(release.guarantee),
        "rounds": server.round,
        "clients": len(server.active),
        "answers": server.num_answers,
        "bytes_per_answer": traffic.bytes_per_answer,
        "offenses": offenses,
        "seconds": time.perf_counter() - start,
    }
    if as_json:
        return print_json(facts)
    print_line(
        f"release    {out}: {server.round} rounds, {server.num_answers} answers of "
        f"{len(server.client_names)} clients  ({format_duration(facts['seconds'])})"
    )
    print_line(
        f"traffic    {traffic.bytes_per_answer:,.0f} bytes for each client and round, in both "
        "directions"
    )
    print_guarantee(facts["guarantee"])
    for offense in offenses[:MAX_PRINTED_OFFENSES]:
        print_warning(f"{offense['client']}: {offense['reason']} ({offense['times']} times)")
