"""The command that measures several outputs alike: compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from privot.cli.app import app
from privot.cli.console import escape_unprintable, out_console, print_json, print_line
from privot.cli.measure_outputs import MeasureOptions, measure_sources, results_to_json
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import Json
from privot.io import check_writable


@app.command("compare")
@expand_option_groups
def _compare_command(
    sources: Annotated[list[str], typer.Argument(help="Releases and other outputs.")],
    options: MeasureOptions,
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("comparison"),
    as_json: Json = False,
) -> None:
    """Measure several outputs alike and write one page."""
    from privot.release import Release
    from privot.report import compare as write_comparison
    from privot.report import comparison, output_folder
    from privot.report.privacy_curves import verify_recorded_plan

    check_writable(output_folder.check_replaceable_directory(out, comparison.COMPARISON_FORMAT))
    for source in sources:  # a guarantee that the plan does not prove is refused before the work
        if (Path(source) / "manifest.json").exists():
            verify_recorded_plan(Release.load(source), escape_unprintable(source))
    measured = measure_sources(sources, options)
    page = write_comparison(measured, out)
    if as_json:
        outputs = [results_to_json(samples, results) for samples, results in measured]
        return print_json({"page": str(page), "outputs": outputs})
    names = dict.fromkeys(result.name for _, results in measured for result in results)
    table = Table(
        Column("metric", no_wrap=True),
        *(escape_unprintable(samples.name) for samples, _ in measured),
    )
    for name in names:
        values = [
            next((f"{result.value:.4g}" for result in results if result.name == name), "")
            for _, results in measured
        ]
        table.add_row(name, *values)
    out_console.print(table, soft_wrap=False)
    print_line(f"page       {page}")
