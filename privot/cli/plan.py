"""Commands before a run: methods, plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from privot.cli.app import app
from privot.cli.console import (
    escape_unprintable,
    format_guarantee_lines,
    out_console,
    print_json,
    print_warning,
)
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import (
    DEFAULT_METHOD,
    BudgetOptions,
    Data,
    Device,
    Json,
    MethodName,
    NumClasses,
    NumClients,
    SettingsOptions,
    Shape,
)
from privot.cli.parsing import parse_class_sizes, parse_shape
from privot.progress import format_duration


@dataclass(frozen=True)
class SpecOptions:
    """Declared facts about a dataset of which no record is read."""

    shape: Shape = None
    num_classes: NumClasses = None
    size: Annotated[int | None, typer.Option(min=1, help="Declared number of records.")] = None
    class_sizes: Annotated[
        str | None,
        typer.Option(help="Declared number of records of each class, such as 200,150,3."),
    ] = None
    num_clients: NumClients = None

    def to_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for `describe_dataset`."""
        return {
            "shape": parse_shape(self.shape),
            "num_classes": self.num_classes,
            "num_clients": self.num_clients,
            "size": self.size,
            "class_sizes": parse_class_sizes(self.class_sizes),
        }


@app.command("methods")
def _methods_command(as_json: Json = False) -> None:
    """List the methods, whom they trust and what they guarantee."""
    from privot.methods import list_methods

    rows = [
        {
            "name": name,
            "title": method.title,
            "trusts": method.trusted_party,
            "promise": method.guarantee_summary,
        }
        for name, method in list_methods().items()
    ]
    if as_json:
        return print_json(rows)
    table = Table(Column("method", no_wrap=True), "description")
    for row in rows:
        description = f"{row['title']}\ntrusts: {row['trusts']}\nguarantee: {row['promise']}"
        table.add_row(row["name"], description, end_section=True)
    out_console.print(table, soft_wrap=False)


@app.command("plan")
@expand_option_groups
def _plan_command(
    *,
    source: Data,
    method_name: MethodName = DEFAULT_METHOD,
    budget: BudgetOptions,
    settings: SettingsOptions,
    declared: SpecOptions,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Predict epsilon, quality and time of a run.

    Reads no record and spends nothing.
    """
    from privot.data import describe_dataset
    from privot.local.dataset import PrivatizedDataset, is_privatized
    from privot.methods import make_method
    from privot.runtime import Runtime
    from privot.synthesis.cost import configure_method
    from privot.synthesis.preflight import plan_run

    overrides = settings.parse()
    make_method(method_name, overrides)  # refuses unknown settings
    data = (
        PrivatizedDataset.load(source)  # privatized records are public
        if is_privatized(source)
        else describe_dataset(source, **declared.to_arguments())
    )
    spec = data.spec if isinstance(data, PrivatizedDataset) else data
    method = configure_method(method_name, overrides, spec, Runtime(device).torch_device)
    facts = plan_run(data, method, budget.parse(method), device, budget.allow_large_delta)
    if as_json:
        return print_json(facts)
    shape = "x".join(map(str, spec.shape))
    size = spec.size or "not public"
    table = Table(show_header=False)
    table.add_row(
        "data", f"{escape_unprintable(source)}: {spec.num_classes} classes, {shape}, size {size}"
    )
    _add_plan_rows(table, facts)
    out_console.print(table, soft_wrap=False)
    for text in facts["warnings"]:
        print_warning(text)


def _add_plan_rows(table: Table, facts: dict[str, Any]) -> None:
    """Add stages, guarantee, settings and forecast to a table."""
    for stage in facts["plan"]["stages"]:
        table.add_row(
            f"stage {stage['name']}",
            f"{stage['operation']}, {stage['steps']} step(s), "
            f"noise multiplier {stage['noise_multiplier']:.4g}",
        )
    table.add_row("guarantee", "\n".join(format_guarantee_lines(facts["guarantee"])))
    settings = [f"{key}={value}" for key, value in facts["settings"].items() if value is not None]
    table.add_row("settings", ", ".join(settings))
    for key, value in facts["forecast"].items():
        if key == "predicted_seconds" and value is not None:
            table.add_row("predicted time", format_duration(value))
        elif value is not None and key != "shorter_run":  # a warning states the shorter run
            is_number = isinstance(value, (int, float))
            table.add_row(key.replace("_", " "), f"{value:.3g}" if is_number else str(value))
