"""Inversion of what a client sent in a federated run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privot.cli.console import err_console
from privot.cli.options import ReadOptions
from privot.errors import SettingError
from privot.progress import show_progress_bar

if TYPE_CHECKING:
    from privot.attacks.inversion.transcript import ClientTranscript
    from privot.attacks.inversion.transcript_attack import TranscriptAttack, TranscriptResult
    from privot.data import Sensitive
    from privot.runtime import Runtime


@dataclass(frozen=True)
class TranscriptOptions:
    """The transcript of a federated run, and what the attacker has besides it."""

    path: Annotated[
        Path | None,
        typer.Option(
            "--transcript",
            help="Attack what a client sent in a federated run: the server's transcript.",
        ),
    ] = None
    client_name: Annotated[
        str | None,
        typer.Option(
            "--client",
            help="The client whose answers are attacked; --data names its records.",
        ),
    ] = None
    holdout_data: Annotated[
        str | None,
        typer.Option(
            "--holdout",
            help="Other records, for the mean image; by default a built-in's test images.",
        ),
    ] = None
    num_simulated_clients: Annotated[
        int,
        typer.Option(
            "--shadows",
            min=5,
            help="Number of clients that the attacker simulates with the held-out records.",
        ),
    ] = 64

    def check(self) -> None:
        """Raise if options are given that need a transcript."""
        if self.path is None and (self.client_name or self.holdout_data):
            raise SettingError(
                "--client and --holdout need --transcript, the transcript of a federated run."
            )


def attack_transcript(
    attack: TranscriptAttack,
    source: str,
    options: TranscriptOptions,
    read_options: ReadOptions,
    runtime: Runtime,
) -> TranscriptResult:
    """Attack the answers of one client.

    Args:
        attack: The attack.
        source: Name or path of the client's records.
        options: The transcript, the client and the held-out records.
        read_options: How to read records.
        runtime: Where to compute.

    Returns:
        The result.
    """
    from privot.attacks.inversion.transcript import read_client_transcript
    from privot.data import load_catalog, load_dataset
    from privot.data.client_data import load_client_data

    assert options.path is not None
    client_transcript = read_client_transcript(options.path, options.client_name)
    arguments: dict[str, Any] = {
        "label_column": read_options.label_column,
        "resize": read_options.resize,
        "shape": client_transcript.terms.shape,
        "num_classes": client_transcript.terms.num_classes,
    }
    is_builtin = source in load_catalog()
    dataset = (
        load_builtin_partition(source, client_transcript, read_options.download)
        if is_builtin
        else load_client_data(source, **arguments)
    )
    holdout_data = options.holdout_data or (source if is_builtin else None)
    if holdout_data is None:
        raise SettingError(
            "--holdout is missing. Give other records or a built-in dataset, for the mean image."
        )
    holdout = (
        load_dataset(holdout_data, "test", download=read_options.download)
        if holdout_data in load_catalog()
        else load_client_data(holdout_data, **arguments)
    )
    with show_progress_bar(err_console) as progress:
        return attack.run(client_transcript, dataset, holdout, runtime, progress)


def load_builtin_partition(
    source: str, client_transcript: ClientTranscript, download: bool
) -> Sensitive:
    """Load the records of a client of a built-in dataset, by the number in the client's name.

    Args:
        source: Name of the built-in dataset.
        client_transcript: What the client sent.
        download: Whether a missing dataset is downloaded.

    Returns:
        The partition of the client.
    """
    from privot.data import describe_dataset, load_dataset
    from privot.privacy.client_partition import client_partition
    from privot.privacy.ledger_lookup import open_ledger

    num_clients = client_transcript.terms.num_clients
    number = re.search(r"[0-9]+$", client_transcript.client_name)
    if number is None:
        raise SettingError(
            f"--data {source}: the partition of client {client_transcript.client_name!r} is "
            "unknown. Give the client's own file, or a client whose name ends in a number."
        )
    has_known_clients = (describe_dataset(source).num_clients or 0) >= num_clients
    dataset: Any = load_dataset(
        source, download=download, num_clients=None if has_known_clients else num_clients
    )
    return client_partition(dataset, int(number[0]), open_ledger(dataset.name))
