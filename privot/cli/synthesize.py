"""Commands that write a release: synthesize, resize."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privot.cli.app import app
from privot.cli.console import (
    err_console,
    print_guarantee,
    print_json,
    print_line,
    print_warning,
)
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import (
    DEFAULT_METHOD,
    BudgetOptions,
    ComputeOptions,
    Data,
    DatasetOptions,
    Device,
    Json,
    LedgerFile,
    MethodName,
    PublicFactOptions,
    Seed,
    SettingOverrides,
    SettingsOptions,
)
from privot.cli.parsing import parse_settings
from privot.errors import SettingError
from privot.progress import format_duration, show_progress_bar

if TYPE_CHECKING:
    from privot.release import Release


@app.command("synthesize")
@expand_option_groups
def _synthesize_command(
    *,
    source: Data,
    out: Annotated[Path, typer.Option(help="Folder of the release.")] = Path("release"),
    method_name: MethodName = DEFAULT_METHOD,
    budget: BudgetOptions,
    settings: SettingsOptions,
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a run that stopped.")] = False,
    ledger: LedgerFile = None,
    dataset_options: DatasetOptions,
    public_facts: PublicFactOptions,
    compute: ComputeOptions,
    as_json: Json = False,
) -> None:
    """Train on sensitive data and write a certified release."""
    from privot.methods import make_method
    from privot.synthesis import synthesize as run_synthesis
    from privot.synthesis.inputs import load

    overrides = settings.parse()
    method = make_method(method_name, overrides)  # refuses unknown settings
    privacy_budget = budget.parse(method)
    runtime = compute.build_runtime()
    if os.path.lexists(out):
        raise SettingError(f"--out {out} already exists. Choose another folder or remove it.")
    dataset = load(source, **dataset_options.to_arguments(), **public_facts.to_arguments())
    start = time.perf_counter()
    warnings: list[str] = []

    def report_warning(text: str) -> None:
        warnings.append(text)
        print_warning(text)  # at once, while nothing is spent

    with show_progress_bar(err_console) as progress:
        release = run_synthesis(
            dataset,  # type: ignore[arg-type]
            method_name,
            privacy_budget,
            settings=overrides,
            out=out,
            ledger=ledger,
            seed=seed,
            runtime=runtime,
            progress=progress,
            resume=resume,
            on_warning=report_warning,
            allow_large_delta=budget.allow_large_delta,
        )
    facts = {
        "release": str(out),
        "guarantee": asdict(release.guarantee),
        "ledger": release.metadata["ledger"],
        "seconds": time.perf_counter() - start,
        "warnings": warnings,
    }
    if as_json:
        return print_json(facts)
    print_line(f"release    {out}  ({format_duration(facts['seconds'])})")
    print_guarantee(facts["guarantee"])
    _print_spending(release, dataset.name, ledger)


def _print_spending(release: Release, dataset_name: str, ledger: Path | None) -> None:
    """Print what the ledger of the dataset has spent.

    Args:
        release: The new release.
        dataset_name: Name or path of the dataset.
        ledger: The ledger that the user named, if any.
    """
    from privot.privacy.ledger_lookup import open_ledger
    from privot.release.ledger_summary import describe_spending

    if ledger_facts := release.metadata["ledger"]:
        opened = open_ledger(dataset_name, ledger)
        print_line(f"ledger     {describe_spending(dataset_name, opened, ledger_facts)}")
    elif "channel" in release.metadata:
        print_line("ledger     nothing is spent here; the clients spent when they privatized")


@app.command("resize")
@expand_option_groups
def _resize_command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RELEASE", help="Folder of a release of images that has keep_answers=true."
        ),
    ],
    images_per_class: Annotated[
        int, typer.Option("--images-per-class", min=1, help="Number of images of each class.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the new release.")],
    overrides: SettingOverrides = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Make a set of another size from a release; spends nothing."""
    from privot.runtime import Runtime
    from privot.synthesis import resize as resize_release

    start = time.perf_counter()
    with show_progress_bar(err_console) as progress:
        release = resize_release(
            source,
            images_per_class,
            settings=parse_settings(None, overrides),
            out=out,
            runtime=Runtime(device),
            progress=progress,
        )
    facts: dict[str, Any] = {
        "release": str(out),
        "images": len(release.artifact.tensors["labels"]),
        "from": release.metadata["resized"]["from"],
        "guarantee": asdict(release.guarantee),
        "seconds": time.perf_counter() - start,
    }
    if as_json:
        return print_json(facts)
    duration = format_duration(facts["seconds"])
    print_line(f"release    {out}: {facts['images']} images, nothing spent  ({duration})")
    print_guarantee(facts["guarantee"])
