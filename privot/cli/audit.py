"""The command that audits a method: audit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from privot.cli.app import app
from privot.cli.attack_output import exit_if_refuted, print_secrecy_warning, write_result_file
from privot.cli.console import (
    err_console,
    escape_unprintable,
    explain_interrupt,
    print_json,
    print_line,
)
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import (
    AttackDataOptions,
    ComputeOptions,
    Confidence,
    Json,
    ReadOptions,
    Seed,
    SettingsOptions,
)
from privot.progress import show_progress_bar


@dataclass(frozen=True)
class CanaryOptions:
    """The canaries of an audit, and how runs are scored."""

    runs_per_side: Annotated[
        int,
        typer.Option("--runs", min=4, help="Number of runs with the canary, and of runs without."),
    ] = 100
    num_canaries: Annotated[
        int,
        typer.Option(
            "--canaries", min=0, help="Number of canaries in one single run, instead of many runs."
        ),
    ] = 0
    canary_kind: Annotated[
        str,
        typer.Option(
            "--kind",
            help="Kind of canaries: blank, noise, dead-leaves, orthogonal, mislabelled or clean.",
        ),
    ] = "blank"
    canary_score: Annotated[
        str, typer.Option("--score", help="What is measured on a release: mean or nearest.")
    ] = "mean"
    assume_gaussian: Annotated[
        bool,
        typer.Option(
            "--gaussian", help="Assume a Gaussian mechanism, for which a far tighter bound holds."
        ),
    ] = False


@app.command("audit")
@expand_option_groups
def _audit_command(
    *,
    method: Annotated[str, typer.Argument(help="Name of the method; see `privot methods`.")],
    source: Annotated[
        str,
        typer.Option("--data", help="A built-in name or a path: the records that every run has."),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs, METHOD.audit if not given; work is resumed."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Epsilon that every run claims; inf for no guarantee.")
    ] = None,
    canaries: CanaryOptions,
    confidence: Confidence = 0.95,
    settings: SettingsOptions,
    data_options: AttackDataOptions,
    read_options: ReadOptions,
    seed: Seed = 0,
    compute: ComputeOptions,
    as_json: Json = False,
) -> None:
    """Bound epsilon from below by runs with and without a canary.

    Exit code 3 if the bound is above the claimed epsilon.
    """
    from privot.audit.runner import EpsilonAudit
    from privot.data import load_dataset

    folder = folder or Path(f"{method}.audit")
    dataset = load_dataset(
        source,
        **read_options.to_arguments(),
        public=data_options.is_public,
        public_classes=data_options.public_class_sizes,
        num_clients=data_options.num_clients,
    )
    epsilon_audit = EpsilonAudit(
        folder=folder,
        dataset=dataset,
        method=method,
        settings=settings.parse(),
        epsilon=epsilon,
        runs_per_side=canaries.runs_per_side,
        num_canaries=canaries.num_canaries,
        canary_kind=canaries.canary_kind,
        canary_score=canaries.canary_score,
        confidence=confidence,
        assume_gaussian=canaries.assume_gaussian,
        seed=seed,
    )
    with show_progress_bar(err_console) as progress, explain_interrupt(folder):
        verdict = epsilon_audit.run(compute.build_runtime(), progress)
    content = epsilon_audit.to_json()
    path = folder / "verdict.json"
    write_result_file(path, content, verdict.publishable)
    if as_json:
        print_json({**content, "folder": str(folder)})
    else:
        print_line(f"{verdict.status}: {verdict.summary}")
        print_line(
            f"file: {escape_unprintable(path)}, for `privot report RELEASE --attacks` of a release "
            "with the same method and settings"
        )
        if not verdict.publishable:
            print_secrecy_warning()
    exit_if_refuted(verdict)
