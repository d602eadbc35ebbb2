"""Measures outputs on real data, as the commands measure and compare do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privot.cli.console import err_console, escape_unprintable, print_warning
from privot.cli.options import Device, Download, IsPublic, LabelColumn, Resize, Seed
from privot.cli.parsing import reuse_declarations, split_words
from privot.io import to_jsonable
from privot.progress import Progress, show_progress_bar

if TYPE_CHECKING:
    from privot.measures import Samples
    from privot.measures.result import MetricResult

    MeasuredSamples = tuple[Samples, list[MetricResult]]


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured, and on which real data."""

    test_data: Annotated[
        str,
        typer.Option("--test", help="Real test data; of a built-in dataset its test split."),
    ]
    training_data: Annotated[
        str | None,
        typer.Option(
            "--train", help="Real training data, for the inception score and to compare features."
        ),
    ] = None
    metrics: Annotated[
        str,
        typer.Option(
            "--only",
            help="Metrics with commas: default, fid, kid, precision, is, domain, sliced, gs_wgan, "
            "cnn, ...",
        ),
    ] = "default"
    num_samples: Annotated[
        int, typer.Option("--count", min=2, help="Number of samples of each output.")
    ] = 60_000
    is_public: IsPublic = False
    real_data_results: Annotated[
        Path | None,
        typer.Option(help="Results of real training data, for the calibrated accuracy."),
    ] = None
    inception_weights: Annotated[
        Path | None,
        typer.Option("--weights", help="A safetensors file of the 2015 Inception network."),
    ] = None
    device: Device = "auto"
    seed: Seed = 0
    label_column: LabelColumn = "label"
    resize: Resize = None
    download: Download = False

    def to_reading_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for `load_dataset`."""
        return {
            "label_column": self.label_column,
            "resize": self.resize,
            "download": self.download,
        }


def measure_sources(sources: Sequence[str], options: MeasureOptions) -> list[MeasuredSamples]:
    """Measure outputs; all names are checked before the first measurement.

    Args:
        sources: The outputs.
        options: What is measured.

    Returns:
        The samples and the results of each output.
    """
    from privot.data import load_dataset
    from privot.measures import Evaluator
    from privot.measures.metric_names import expand_metrics
    from privot.measures.result import load_metric_results
    from privot.runtime import Runtime

    metrics = expand_metrics(split_words(options.metrics))
    runtime = Runtime(options.device)
    real_data_results = (
        load_metric_results(options.real_data_results) if options.real_data_results else []
    )
    outputs = [load_samples(source, options, options.is_public) for source in sources]
    arguments: Any = options.to_reading_arguments() | {"public": options.is_public}
    declarations = _reuse_output_declarations(options.test_data, outputs)
    test_data = load_dataset(options.test_data, "test", **declarations, **arguments)
    training_data = (
        load_dataset(options.training_data, **arguments) if options.training_data else None
    )
    with show_progress_bar(err_console) as progress:
        evaluator = Evaluator(
            test_data,
            training_data,
            inception_weights=options.inception_weights,
            runtime=runtime,
            seed=options.seed,
            progress=progress,
            on_warning=print_warning,
        )
        measured = []
        for samples in outputs:
            if len(outputs) > 1:
                evaluator.progress = _prefix_progress(progress, samples.name)
            measured.append((samples, evaluator.measure(samples, metrics, real_data_results)))
        return measured


def load_samples(source: str, options: MeasureOptions, is_publishable: bool) -> Samples:
    """Load the samples of an output.

    Args:
        source: The output.
        options: How many samples; and the test data, which may name the classes.
        is_publishable: Whether results about output of other software may be published.

    Returns:
        The samples.
    """
    from privot.data import describe_dataset, load_catalog
    from privot.measures import Samples

    # A built-in dataset names the class folders of other software's output.
    is_builtin = options.test_data in load_catalog()
    class_names = describe_dataset(options.test_data).class_names if is_builtin else None
    return Samples.from_source(
        source,
        options.num_samples,
        options.seed,
        publishable=is_publishable,
        class_names=class_names,
    )


def _reuse_output_declarations(test_data: str, outputs: list[Samples]) -> dict[str, Any]:
    """Apply what is declared about outputs to a file of test data."""
    with_names = (samples for samples in outputs if samples.class_names)
    declarations = reuse_declarations(test_data, next(with_names, outputs[0]))
    if len(outputs) > 1:  # each output may have only some of the classes
        declarations = {key: value for key, value in declarations.items() if key == "class_names"}
    return declarations


def _prefix_progress(progress: Progress, prefix: str) -> Progress:
    """Put the name of an output before the stages of a progress."""

    def _report_progress(stage: str, step: int, total: int, **facts: Any) -> None:
        progress(f"{escape_unprintable(prefix)}: {stage}", step, total, **facts)

    return _report_progress


def results_to_json(samples: Samples, results: Sequence[MetricResult]) -> dict[str, Any]:
    """Return the results of an output as JSON values, in the form that `privot report` reads."""
    return to_jsonable(
        {
            "source": samples.name,
            "release": samples.release.digest if samples.release else None,
            "results": [asdict(result) for result in results],
        }
    )
