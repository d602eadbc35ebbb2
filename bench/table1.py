"""GS-WGAN's table for every method on MNIST and Fashion-MNIST.

Its columns are IS, FID, and the MLP, CNN, average and calibrated accuracy.

    python bench/table1.py                      measure missing rows, then write table and chart
    python bench/table1.py --rows mnist/real mnist/merf@1
    python bench/table1.py --only is fid cnn    some metrics; the next call adds the others
    python bench/table1.py --table              write table and chart from the stored rows only

Names of rows:

    mnist/gs-wgan@10                            the method's default settings, epsilon 10, seed 0
    mnist/gs-wgan@10#1                          seed 1; the table states the mean over the seeds
    mnist/gs-wgan@10~.6#1                       the same release, sampled with latent scale 0.6
    mnist/gs-wgan+pretrain=glyphs+warmup_rounds=20@10     other settings

A row is a file in bench/table1/. A metric that is in the file is not measured again. The data and
the Inception weights must be in the folder PRIVOT_DATA. The row `real` checks the evaluator: IS and
accuracies of the training set, FID between its two halves.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
import textwrap
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from environment import describe_environment, load_public, make_parser, write_json

import privot
from privot.data import Public, Sensitive
from privot.errors import SettingError
from privot.io import to_jsonable
from privot.measures import Evaluator, MetricResult, Samples
from privot.measures.downstream import GS_WGAN_CLASSIFIERS
from privot.methods import list_methods, make_method
from privot.release import Release
from privot.runtime import Runtime

HERE = Path(__file__).parent
ROWS = HERE / "table1"
RESULTS = HERE / "RESULTS.md"
CHART = HERE / "table1.png"
DATASETS = ("mnist", "fashion-mnist")
EPSILONS = ("10", "1", "0.2")
FEATURE_METRICS = ("fid", "kid", "precision", "sliced")
QUICK = ("is", *FEATURE_METRICS, "cnn")
SLOW = ("adaboost", "gbm")
OTHER = tuple(name for name in GS_WGAN_CLASSIFIERS if name not in ("cnn", *SLOW))
METRICS = (*QUICK, *OTHER, *SLOW)
MAX_SEEDS = 10
NUM_SAMPLES = 60_000
BEGIN = "<!-- table1 -->"
END = "<!-- /table1 -->"
COLUMNS = {
    "is": "{:.2f}",
    "fid": "{:.1f}",
    "mlp_accuracy": "{:.3f}",
    "cnn_accuracy": "{:.3f}",
    "avg_accuracy": "{:.3f}",
    "calibrated_accuracy": "{:.0%}",
}
DEVIATION_COLUMNS = ("is", "fid", "mlp_accuracy", "cnn_accuracy")
NOTE = """Accuracies are shares of the 10,000 real test images. Avg is the mean over 13 classifiers,
Calib the mean ratio to the real row. Rows in bold are measured here, by one pipeline: one release
each (seed 0) or the mean of several. The others are published figures, by their own protocols, and
their epsilon is what the source claims. GS-WGAN's 10 is about 300 by a correct analysis of its
code. Our classical classifiers use 8-bit images, which raises Avg compared with the papers
(floats); `bench/rounding.py` measures by how much. FID is against the 60,000 training images; in
the real row, between two halves of them. DP-MERF's settings were chosen by CNN accuracy on the same
test images (see above)."""


def list_default_rows() -> list[str]:
    """List the rows of all methods with default settings, and of real data."""
    runs = [
        f"{name}@{epsilon}"
        for name, method_class in list_methods().items()
        for epsilon in (("inf",) if method_class.guarantee_summary.startswith("none") else EPSILONS)
    ]
    return [f"{data}/{run}" for data in DATASETS for run in ("real", *runs)]


def get_path(row: str) -> Path:
    """Return the file of a row."""
    name = re.sub("[/@+=]", "-", row).replace("~", "-latent_scale").replace("#", "-seed")
    return ROWS / f"{name}.json"


def get_release_path(row: str) -> Path:
    """Return the folder of a row's release."""
    return get_path(remove_latent_scale(row)).with_suffix("")


def remove_latent_scale(row: str) -> str:
    """Return the row of the same release with latent scale 1."""
    return re.sub("~[^#]*", "", row)


def parse_latent_scale(row: str) -> float:
    """Return the latent scale of a row."""
    return float(row.split("~")[1].split("#")[0]) if "~" in row else 1.0


def load_row(row: str) -> dict[str, Any]:
    """Load a stored row, or an empty one."""
    path = get_path(row)
    return json.loads(path.read_text()) if path.exists() else {"row": row, "results": []}


def save_results(row: str, results: list[MetricResult], **facts: Any) -> None:
    """Add results and facts to the file of a row."""
    stored = load_row(row)
    environment = describe_environment()
    stored["results"] += [to_jsonable(asdict(result)) | environment for result in results]
    write_json(get_path(row), stored | facts)


def get_result_name(metric: str) -> str:
    """Return the name of a metric's result."""
    if metric in GS_WGAN_CLASSIFIERS:
        return f"{metric}_accuracy"
    return "sliced_wasserstein" if metric == "sliced" else metric


def print_progress(stage: str, step: int, total: int, **facts: Any) -> None:
    """Print the end of each stage."""
    if step == total:
        print(f"  {stage} {step}/{total}", flush=True)


@functools.cache
def load_evaluator(data: str, against_half: bool, seed: int, device: str) -> Evaluator:
    """Build the evaluator of a dataset; rows share it, because its classifier takes long to train.

    Args:
        data: Name of the dataset.
        against_half: Whether the second half of the training images is the reference.
        seed: Seed of the metrics.
        device: Name of the device.

    Returns:
        The evaluator.
    """
    train = load_public(data)
    test = load_public(data, "test")
    reference = split_in_half(train)[1] if against_half else train
    return Evaluator(
        test,
        reference,
        runtime=Runtime(device),
        seed=seed,
        progress=print_progress,
        on_warning=print,
    )


def load_training_set(data: str, method: str, settings: dict[str, str]) -> Sensitive:
    """Load the training set. Class sizes are declared public if the method needs them."""
    dataset = privot.load(data)
    try:
        make_method(method, settings).plan(dataset.spec)
    except SettingError:
        dataset = privot.load(data, public_classes=True)
    assert isinstance(dataset, Sensitive)
    return dataset


def load_or_synthesize(row: str, seed: int, runtime: Runtime) -> tuple[Release, dict[str, Any]]:
    """Load the release of a row, or synthesize and store it, so that all columns share one release.

    Args:
        row: Name of the row.
        seed: Seed of the synthesis.
        runtime: Device and microbatch.

    Returns:
        The release, and facts about it for the row's file.
    """
    data, run = remove_latent_scale(row).split("#")[0].split("/")
    configuration, epsilon = run.split("@")
    method, *pairs = configuration.split("+")
    settings = dict(pair.split("=", 1) for pair in pairs)
    path = get_release_path(row)
    if path.exists():
        release = Release.load(path)
        guarantee = to_jsonable(asdict(release.guarantee))
        return release, {"guarantee": guarantee, "seed": release.metadata["seed"]}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        release = privot.synthesize(
            load_training_set(data, method, settings),
            method,
            float(epsilon),
            settings=settings,
            ledger=f"{folder}/ledger.jsonl",
            seed=seed,
            runtime=runtime,
        )
        release.save(path)
    facts = {
        "training_seconds": time.perf_counter() - start,
        "guarantee": to_jsonable(asdict(release.guarantee)),
        "seed": seed,
    }
    return release, facts


def list_missing(row: str, metrics: tuple[str, ...]) -> list[str]:
    """List the metrics that the file of a row lacks."""
    stored = {result["name"] for result in load_row(row)["results"]}
    return [metric for metric in metrics if get_result_name(metric) not in stored]


def measure_row(
    row: str, metrics: tuple[str, ...], seed: int, device: str, microbatch: int | None = None
) -> None:
    """Measure the metrics that a row lacks.

    Args:
        row: Name of the row.
        metrics: The wanted metrics.
        seed: Seed of the evaluator, and of a release whose row states none.
        device: Name of the device.
        microbatch: Records processed at a time during synthesis.
    """
    missing = list_missing(row, metrics)
    data, run = remove_latent_scale(row).split("#")[0].split("/")
    if run == "real":
        feature_metrics = [metric for metric in missing if metric in FEATURE_METRICS]
        if feature_metrics:
            train = load_public(data)
            evaluator = load_evaluator(data, True, seed, device)
            save_results(row, evaluator.measure(split_in_half(train)[0], feature_metrics))
        missing = [metric for metric in missing if metric not in feature_metrics]
    if not missing:
        return
    facts: dict[str, Any] = {}
    if run == "real":
        samples = Samples.from_source(data, NUM_SAMPLES)
    else:
        is_stored = load_row(row)["results"] or load_row(remove_latent_scale(row))["results"]
        if is_stored and not get_release_path(row).exists():
            raise SystemExit(
                f"{row}: its release is missing, and new metrics must be of the same release. "
                f"Remove {get_path(remove_latent_scale(row))} to start again."
            )
        release_seed = int(row.split("#")[1]) if "#" in row else seed
        release, facts = load_or_synthesize(row, release_seed, Runtime(device, microbatch))
        samples = Samples.from_release(
            release,
            row,
            NUM_SAMPLES,
            release_seed,
            Runtime(device).torch_device,
            parse_latent_scale(row),
        )
    # Results are stored group by group, so that an interrupted run keeps them.
    for group in (QUICK, OTHER, SLOW):
        if wanted := [metric for metric in missing if metric in group]:
            evaluator = load_evaluator(data, False, seed, device)
            save_results(row, evaluator.measure(samples, wanted), **facts)


def split_in_half(train: Public) -> tuple[Samples, Public]:
    """Split a training set at random into two halves that share no record."""
    images, labels = train.records()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, second = order.chunk(2)
    spec = privot.Spec(train.spec.shape, train.spec.num_classes)
    samples = Samples("half", images[first], labels[first], spec.num_classes, publishable=True)
    return samples, Public(images[second], labels[second], spec, name=f"{train.name}, other half")


def list_seeds(row: str) -> list[str]:
    """List a row and its other seeds that are stored."""
    others = [f"{row}#{seed}" for seed in range(1, MAX_SEEDS)]
    return [row, *(other for other in others if get_path(other).exists())]


def list_variants(run: str) -> list[str]:
    """List a run such as gs-wgan@10, and its stored variants by settings or latent scale."""
    stored = {
        json.loads(path.read_text())["row"].split("/")[1].split("#")[0]
        for path in ROWS.glob("*.json")
    }
    variants = sorted(
        name
        for name in stored
        if name != run and re.sub("[+][^@]*", "", remove_latent_scale(name)) == run
    )
    return [run, *variants]


def average_seeds(row: str) -> dict[str, float]:
    """Average each value of a row over the seeds that have it."""
    seeds = [load_values(seed) for seed in list_seeds(row)]
    names = dict.fromkeys(name for values in seeds for name in values)
    return {name: mean(values[name] for values in seeds if name in values) for name in names}


def load_values(row: str) -> dict[str, float]:
    """Load the values of one release, with the average accuracies if all classifiers are there."""
    values, real = (
        {result["name"]: float(result["value"]) for result in load_row(name)["results"]}
        for name in (row, f"{row.split('/')[0]}/real")
    )
    accuracies = [f"{name}_accuracy" for name in GS_WGAN_CLASSIFIERS]
    count = len(accuracies)
    if set(accuracies) <= set(values):
        values["avg_accuracy"] = sum(values[name] for name in accuracies) / count
        if set(accuracies) <= set(real):
            ratios = [values[name] / real[name] for name in accuracies]
            values["calibrated_accuracy"] = sum(ratios) / count
    return values


def load_published() -> Any:
    """Load the published figures."""
    path = Path(privot.__file__).parent / "report" / "published_results.toml"
    return tomllib.loads(path.read_text())


def format_line(name: str, epsilon: str, values: list[dict[str, float]], source: str) -> str:
    """Format one line of the table, with the values of each dataset."""
    cells = [
        COLUMNS[key].format(figures[key]) if key in figures else "-"
        for figures in values
        for key in COLUMNS
    ]
    return "| " + " | ".join([name, epsilon, *cells, source]) + " |"


def format_variant(run: str, epsilon: str) -> str:
    """Format the name of a run for the table."""
    return run.replace(f"@{epsilon}", "").replace("~", ", latent scale ").replace("+", ", ")


def format_table() -> str:
    """Format the stored rows and the published figures as a Markdown table."""
    heads = [
        f"{data[0].upper()}: {name}"
        for data in DATASETS
        for name in ("IS", "FID", "MLP", "CNN", "Avg", "Calib")
    ]
    lines = [
        "| method | epsilon | " + " | ".join(heads) + " | source |",
        "|" + "---|" * (len(heads) + 3),
    ]
    published = load_published()
    real = [average_seeds(f"{data}/real") for data in DATASETS]
    lines.append(format_line("real data", "-", real, "**privot**"))
    published_real = [
        next(
            entry["figures"]
            for entry in published["real"]
            if entry["data"] == data and entry["source"].startswith("GS-WGAN")
        )
        for data in DATASETS
    ]
    lines.append(format_line("real data", "-", published_real, "GS-WGAN, Table 1"))
    for epsilon in EPSILONS:
        for name in list_methods():
            for run in list_variants(f"{name}@{epsilon}"):
                values = [average_seeds(f"{data}/{run}") for data in DATASETS]
                if any(values):
                    label = format_variant(run, epsilon)
                    lines.append(format_line(label, epsilon, values, "**privot**"))
        others: dict[tuple[str, str], list[dict[str, float]]] = {}
        for entry in published["figures"]:
            if float(entry["epsilon"]) == float(epsilon) and entry["data"] in DATASETS:
                pair = others.setdefault((entry["method"], entry["source"]), [{}, {}])
                pair[DATASETS.index(entry["data"])] = entry["figures"]
        lines += [
            format_line(method, epsilon, values, source)
            for (method, source), values in others.items()
        ]
    return "\n".join(lines)


def format_deviations() -> str:
    """Format mean and standard deviation of the rows that have several seeds; "" without any."""
    lines = ["| row | seeds | IS | FID | MLP | CNN | training |", "|---|---|---|---|---|---|---|"]
    rows = [
        f"{data}/{variant}"
        for data, run in (row.split("/") for row in list_default_rows())
        for variant in list_variants(run)
    ]
    for row in rows:
        seeds = list_seeds(row)
        if len(seeds) == 1:
            continue
        seed_values = [load_values(seed) for seed in seeds]
        cells = []
        for key in DEVIATION_COLUMNS:
            figures = [values[key] for values in seed_values if key in values]
            style = COLUMNS[key]
            cells.append(
                f"{style.format(mean(figures))} ± {style.format(stdev(figures))}"
                if len(figures) > 1
                else "-"
            )
        seconds = [
            load_row(seed)["training_seconds"]
            for seed in seeds
            if "training_seconds" in load_row(seed)
        ]
        duration = f"{mean(seconds):.0f} s" if seconds else "-"
        lines.append(f"| {row} | {len(seeds)} | {' | '.join(cells)} | {duration} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def draw_chart() -> None:
    """Draw CNN accuracy against epsilon, with the published figures in gray."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    published = load_published()["figures"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, data in zip(axes, DATASETS, strict=True):
        others: dict[str, list[tuple[float, float]]] = {}
        for entry in published:
            accuracy = entry["figures"].get("cnn_accuracy")
            if entry["data"] == data and accuracy is not None and float(entry["epsilon"]) < 100:
                source = entry["source"].split(",")[0].split(":")[0]
                points = others.setdefault(f"{entry['method']} ({source})", [])
                points.append((float(entry["epsilon"]), accuracy))
        for points in others.values():
            axis.plot(
                *zip(*sorted(points), strict=True), "o-", color="0.75", ms=3, lw=0.8, zorder=1
            )
        for name in list_methods():
            accuracies = {
                float(epsilon): average_seeds(f"{data}/{name}@{epsilon}").get("cnn_accuracy")
                for epsilon in EPSILONS
            }
            measured = sorted((x, y) for x, y in accuracies.items() if y is not None)
            if measured:
                axis.plot(*zip(*measured, strict=True), "o-", label=f"privot {name}", zorder=2)
        ceiling = average_seeds(f"{data}/real").get("cnn_accuracy")
        if ceiling:
            axis.axhline(ceiling, color="k", lw=0.8, ls=":", label="real data")
        axis.set(
            xscale="log", title=data, xlabel="epsilon (as claimed by each source)", ylim=(0, 1)
        )
        axis.legend(loc="lower right", fontsize=8)
    axes[0].set_ylabel("accuracy of a CNN trained on samples")
    caption = "gray: published figures, by their own protocols and accounting"
    figure.text(0.5, 0.005, caption, ha="center", fontsize=8, color="0.4")
    figure.tight_layout()
    figure.savefig(CHART, dpi=110)


def wrap(text: str) -> str:
    """Wrap text at 100 columns."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def write_results() -> None:
    """Rewrite the section of bench/RESULTS.md, and the chart."""
    measured = [result for row in list_default_rows() for result in load_row(row)["results"]]
    runs = sorted({(entry["date"], entry["hardware"], entry["commit"]) for entry in measured})
    parts = [format_table(), wrap(NOTE)]
    if deviations := format_deviations():
        parts.append(f"Several seeds, each a release of its own:\n\n{deviations}")
    environments = "; ".join(", ".join(run) for run in runs)
    note = "(`dirty`: with changes that the next commits hold)"
    parts.append(wrap(f"Measured: {environments} {note}."))
    parts.append("![privacy against utility](table1.png)")
    text = "\n\n".join([BEGIN, *parts, END])
    page = RESULTS.read_text() if RESULTS.exists() else ""
    if BEGIN in page:
        page = page[: page.index(BEGIN)] + text + page[page.index(END) + len(END) :]
    else:
        page += f"\n## GS-WGAN's table (`make bench-table1`)\n\n{text}\n"
    RESULTS.write_text(page)
    draw_chart()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", nargs="+", help="names of rows; default: all default settings")
    parser.add_argument("--only", nargs="+", default=METRICS, choices=METRICS, help="metrics")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--microbatch", type=int, help="records processed at a time during synthesis"
    )
    parser.add_argument("--table", action="store_true", help="write the table, measure nothing")
    options = parser.parse_args()
    for row in [] if options.table else options.rows or list_default_rows():
        start = time.perf_counter()
        measure_row(row, tuple(options.only), options.seed, options.device, options.microbatch)
        print(f"{row}: {time.perf_counter() - start:.0f} s", flush=True)
    write_results()


if __name__ == "__main__":
    main()
