"""The command that writes a page about a release: report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privot.cli.app import app
from privot.cli.console import (
    exit_if_broken,
    print_guarantee,
    print_json,
    print_line,
    print_warning,
)
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import Json, LabelColumn, ReleaseFolder, Resize
from privot.cli.parsing import reuse_declarations
from privot.errors import ReleaseError, SettingError

if TYPE_CHECKING:
    from privot.release import Release
    from privot.report import OwnerInputs


@dataclass(frozen=True)
class InternalReportOptions:
    """What the internal report of the data owner contains."""

    internal: Annotated[
        bool,
        typer.Option("--internal", help="Also write the internal report of the data owner."),
    ] = False
    data: Annotated[
        str | None,
        typer.Option(help="The data owner's records, for nearest neighbours; with --internal."),
    ] = None
    ledger: Annotated[
        Path | None, typer.Option(help="The dataset's ledger, for its history; with --internal.")
    ] = None
    label_column: LabelColumn = "label"
    resize: Resize = None


@app.command("report")
@expand_option_groups
def _report_command(
    *,
    release: ReleaseFolder,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("report"),
    results: Annotated[
        list[Path] | None,
        typer.Option(help="A file that `privot measure --out` wrote; may be repeated."),
    ] = None,
    attacks: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of attack results besides those that `privot attack` wrote; may be "
            "repeated."
        ),
    ] = None,
    internal_options: InternalReportOptions,
    as_json: Json = False,
) -> None:
    """Write a page about a release that a data owner can sign.

    The page shows samples, guarantee, proof and utility. Exit code 3 if an attack refutes the
    certificate.
    """
    from privot.audit.result import load_attack_results
    from privot.measures.result import load_metric_results
    from privot.release import Release
    from privot.report import write_report

    _check_internal_options(internal_options)
    loaded = Release.load(release)
    metric_results = [
        result for path in results or [] for result in load_metric_results(path, loaded)
    ]
    attack_files = [*(attacks or []), *_find_attack_files(release.resolve())]
    attack_results = [
        result for path in attack_files for result in load_attack_results(path, loaded)
    ]
    files = write_report(
        loaded,
        out,
        name=release.resolve().name,
        results=metric_results,
        attacks=attack_results,
        owner_inputs=_load_owner_inputs(internal_options, loaded),
    )
    if as_json:
        print_json(
            {
                "files": [str(path) for path in files.paths],
                "broken": files.guarantee_refuted,
                "left_out": files.num_left_out,
            }
        )
    else:
        for path in files.paths:
            print_line(f"{path}")
        if not files.guarantee_refuted:
            print_guarantee(asdict(loaded.guarantee))
        if files.num_left_out:
            print_warning(
                f"Left out {files.num_left_out} result(s) that are not publishable. --internal "
                "shows them to the data owner."
            )
    exit_if_broken(files.guarantee_refuted)


def _check_internal_options(options: InternalReportOptions) -> None:
    """Raise if the inputs of the internal report are given without it, or are missing."""
    if (options.data or options.ledger) and not options.internal:
        raise SettingError(
            "--data and --ledger are for the internal report of the data owner. Add --internal."
        )
    if options.ledger and not options.ledger.exists():
        raise ReleaseError(f"The ledger {options.ledger} does not exist.")


def _find_attack_files(release_folder: Path) -> list[Path]:
    """Find the files that `privot attack` wrote for a release."""
    folders = (
        release_folder / "attacks",
        release_folder.with_name(f"{release_folder.name}.attacks"),
    )
    return [path for folder in folders for path in sorted(folder.glob("*.json"))]


def _load_owner_inputs(options: InternalReportOptions, release: Release) -> OwnerInputs | None:
    """Load the inputs of the internal report; None if it is not wanted."""
    from privot.data import load_dataset
    from privot.privacy.ledger import Ledger
    from privot.report import OwnerInputs

    if not options.internal:
        return None
    dataset = None
    if options.data:
        dataset = load_dataset(
            options.data,
            **reuse_declarations(options.data, release.spec),
            label_column=options.label_column,
            resize=options.resize,
        )
    return OwnerInputs(dataset, Ledger(options.ledger) if options.ledger else None)
