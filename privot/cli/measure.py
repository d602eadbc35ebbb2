"""The command that measures the quality of an output: measure."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from privot.cli.app import app
from privot.cli.console import (
    err_console,
    escape_unprintable,
    out_console,
    print_json,
    print_line,
)
from privot.cli.measure_outputs import (
    MeasureOptions,
    load_samples,
    measure_sources,
    results_to_json,
)
from privot.cli.option_groups import expand_option_groups
from privot.cli.options import AllowLargeDelta, Delta, Json, LedgerFile
from privot.cli.parsing import reuse_declarations, split_words
from privot.errors import SettingError
from privot.progress import show_progress_bar

if TYPE_CHECKING:
    from privot.measures import Samples
    from privot.measures.result import MetricResult
    from privot.report.comparison import MeasuredSamples


@dataclass(frozen=True)
class PrivateAccuracyOptions:
    """Whether publishable accuracies are bought from sensitive test data."""

    accuracy_epsilon: Annotated[
        float | None,
        typer.Option(help="Spend this epsilon of sensitive test data on publishable accuracies."),
    ] = None
    delta: Delta = 1e-5
    ledger: LedgerFile = None
    allow_large_delta: AllowLargeDelta = False


@app.command("measure")
@expand_option_groups
def _measure_command(
    source: Annotated[
        str,
        typer.Argument(
            help="A release, or other output: a folder with a folder for each class, .npz with x "
            "and y, or .parquet."
        ),
    ],
    options: MeasureOptions,
    private_accuracy: PrivateAccuracyOptions,
    out: Annotated[
        Path | None, typer.Option(help="File for the results, which `privot report` reads.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the quality of released images.

    Features are compared with real data, and classifiers are trained on the images and tested on
    real data.
    """
    is_private = private_accuracy.accuracy_epsilon is not None
    if is_private:
        _check_private_options(options, private_accuracy)
    with _reserve_output_file(out) as write_output:
        if is_private:
            samples, results = _measure_private_accuracy(source, options, private_accuracy)
        else:
            [(samples, results)] = measure_sources([source], options)
        # First of all: what was spent is shown even if the disk fails.
        _print_results(samples, results, as_json)
        write_output(
            json.dumps(results_to_json(samples, results), indent=1),
            all(result.publishable for result in results),
        )


def _check_private_options(
    options: MeasureOptions, private_accuracy: PrivateAccuracyOptions
) -> None:
    """Raise if an option does not fit --accuracy-epsilon, or delta is too large."""
    from privot.privacy.guarantee import check_delta

    if options.training_data or options.real_data_results or options.inception_weights:
        raise SettingError(
            "--accuracy-epsilon only uses the test data. Leave out --train, --real-data-results "
            "and --weights."
        )
    check_delta(private_accuracy.delta, allow_large_delta=private_accuracy.allow_large_delta)


def _measure_private_accuracy(
    source: str, options: MeasureOptions, private_accuracy: PrivateAccuracyOptions
) -> MeasuredSamples:
    """Measure accuracies of networks through the gate of the test data.

    Args:
        source: The output.
        options: What is measured.
        private_accuracy: The budget and the ledger of the test data.

    Returns:
        The samples and the results.
    """
    from privot.data import Sensitive, load_dataset
    from privot.measures.private_accuracy import measure_private_accuracy
    from privot.privacy.plan import Budget
    from privot.runtime import Runtime

    assert private_accuracy.accuracy_epsilon is not None
    metrics = ("cnn",) if options.metrics == "default" else split_words(options.metrics)
    samples = load_samples(source, options, False)
    budget = Budget(private_accuracy.accuracy_epsilon, private_accuracy.delta)
    if options.is_public:
        raise SettingError(
            "--accuracy-epsilon is for sensitive data. On public data, leave it out."
        )
    test_data = load_dataset(
        options.test_data,
        "test",
        **reuse_declarations(options.test_data, samples),
        **options.to_reading_arguments(),
    )
    assert isinstance(test_data, Sensitive)
    with show_progress_bar(err_console) as progress:
        results = measure_private_accuracy(
            samples,
            test_data,
            budget,
            metrics,
            ledger=private_accuracy.ledger,
            runtime=Runtime(options.device),
            seed=options.seed,
            progress=progress,
        )
    return samples, results


@contextmanager
def _reserve_output_file(out: Path | None) -> Iterator[Callable[[str, bool], None]]:
    """Check before the work that a file can be written after it.

    Args:
        out: The file; None to write nothing.

    Yields:
        A function of the text and of whether it may be published; if not, only the user can read
        the file.
    """
    if out is None:
        yield lambda text, publishable: None
        return
    if os.path.lexists(out):
        raise SettingError(f"--out {out} already exists. Choose another file or remove it.")
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.name}.part")
    try:
        part.touch()

        def write_output(text: str, publishable: bool) -> None:
            if not publishable:
                part.chmod(0o600)
            part.write_text(text)
            part.replace(out)

        yield write_output
    finally:
        part.unlink(missing_ok=True)


def _print_results(samples: Samples, results: Sequence[MetricResult], as_json: bool) -> None:
    """Print the results of an output.

    Args:
        samples: Its samples.
        results: The results.
        as_json: Print JSON instead of a table.
    """
    if as_json:
        return print_json(results_to_json(samples, results))
    table = Table(
        Column("metric", no_wrap=True),
        Column("value", no_wrap=True),
        "samples",
        "real records",
        "publish",
    )
    for result in results:
        has_error = not math.isnan(result.standard_error)
        error = f" ±{result.standard_error:.2g}" if has_error else ""
        table.add_row(
            result.name,
            f"{result.value:.4g}{error}",
            f"{result.num_samples}",
            f"{result.reference_size} of {escape_unprintable(result.reference)}",
            "yes" if result.publishable else "internal",
        )
    out_console.print(table, soft_wrap=False)
    for protocol in dict.fromkeys(result.protocol for result in results if result.protocol):
        names = [result.name for result in results if result.protocol == protocol]
        print_line(f"{', '.join(names)}: {protocol}")
