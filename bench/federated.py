"""Federated GS-WGAN on FEMNIST: quality against user-level epsilon.

There are 300 clients (writers) or 3,000 simulated ones, with and without public pretraining.

    python bench/federated.py --epsilon inf 599 59.9 10 --clients 300 3000 --pretrain off glyphs
    python bench/federated.py --prior --real     the pretraining alone (no client), and real images
    python bench/federated.py --epsilon 59.9 --set generator_learning_rate=1e-4 --tag slow
    python bench/federated.py --noise            gradients and noise by user-level epsilon, no data
    python bench/federated.py --table            print the table and draw the chart of stored rows

A row is a JSON file and an image (8 samples of each class) in bench/federated/; a stored row is not
run again. IS is by a classifier trained on the training images. FID is against the test images,
on which nothing was trained. The class accuracy is the share of samples to which that classifier
gives their label. Labels have the frequencies of the test images, most of which are digits; results
whose name ends with _even have equally many labels of each class. To simulate 3,000 clients, the
gate divides the records among them. Ledgers are thrown away: this is a benchmark on public data.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from environment import (
    describe_environment,
    load_public,
    make_parser,
    parse_settings,
    print_header,
    print_row,
    write_json,
)
from torch import Tensor

import privot
from privot.components.federated_settings import FederatedSettings
from privot.components.server_generator import ServerGenerator
from privot.data import Public, Sensitive, Spec
from privot.federated.messages import Answer, Request, pack_message
from privot.io import to_jsonable
from privot.measures import Evaluator, MetricResult, Samples
from privot.measures.inception_score import inception_score
from privot.methods import make_method
from privot.privacy.guarantee import Guarantee
from privot.privacy.plan import Budget, Plan
from privot.release.artifact import Artifact
from privot.runtime import Runtime, Streams
from privot.runtime.preview import render_image_grid

HERE = Path(__file__).parent
METHOD = "federated-gs-wgan"
DELTA = 1.15e-3
# Gradients in 8 x 8 frequencies of the middle 16 x 16 pixels, where FEMNIST has 99 % of its ink:
# elsewhere a query returns only noise.
SETTINGS = {
    "window_size": 16,
    "frequency_fraction": 0.5,
    "rounds": 500,
    "clients_per_round": 60,
    "critic_steps": 10,
    "warmup_rounds": 40,
    "critic_learning_rate": 3e-4,
}
# Chosen, not tuned: between two turns of a client its critic should change more (critic_steps *
# critic_learning_rate) than the generator (rounds * generator_learning_rate).
PRETRAIN_SETTINGS = {
    "off": {"generator_learning_rate": 6e-4},  # a generator without pretraining has more to learn
    "glyphs": {"generator_learning_rate": 1e-4, "pretrain_steps": 4000},
}
# With 3,000 clients each has 14 records, with 300 it has 138.
MANY_CLIENTS = 1000
MANY_CLIENTS_SETTINGS = {
    "records_per_critic": 16,
    "clients_per_round": 300,
    "rounds": 200,
    "critic_steps": 16,
    "warmup_rounds": 16,
}
NO_NOISE_POSITION = 6000  # position on the epsilon axis of runs without noise
PUBLISHED = (
    ("Fed-Avg GAN, published", "1e7", "-", "10.88", "218.24", "-", "-", "-", "3.94e7", "-"),
    ("Fed-GS-WGAN, published", "599", "-", "11.25", "60.76", "-", "-", "-", "1.5e5", "-"),
)


def choose_settings(
    num_clients: int, pretrain: str, data: str, overrides: dict[str, str]
) -> dict[str, Any]:
    """Choose the settings of a run.

    Args:
        num_clients: Number of clients.
        pretrain: The setting `pretrain`.
        data: Name of the dataset.
        overrides: Settings that replace the chosen ones.

    Returns:
        The settings.
    """
    settings = {**SETTINGS, **PRETRAIN_SETTINGS[pretrain], "pretrain": pretrain}
    if num_clients > MANY_CLIENTS:
        settings |= MANY_CLIENTS_SETTINGS
    if data != "femnist":
        settings["window_size"] = 0
    return settings | overrides


def print_noise() -> None:
    """Print the number of gradients over the squared noise, which limits what can be learned.

    Under user-level privacy it depends only on epsilon and the number of clients.
    """
    print_header(
        "epsilon",
        "mu of a client",
        "noise multiplier of each of 6,200 gradients",
        "gradients / noise², 300 clients",
        "3,000 clients",
    )
    plan = make_method(METHOD, SETTINGS).plan(Spec((1, 28, 28), 62, num_clients=300))
    for epsilon in (599, 59.9, 30, 10, 3, 1):
        stage = plan.calibrate(Budget(epsilon, DELTA)).stages[0]
        assert stage.noise_multiplier is not None
        signal = stage.steps / stage.noise_multiplier**2
        print_row(
            epsilon,
            f"{signal**0.5:.2f}",
            f"{stage.noise_multiplier:.2f}",
            f"{300 * signal / 1000:.2f} thousand",
            f"{3 * signal:.1f} thousand",
        )


@functools.cache
def load_evaluators(data: str, device: str) -> tuple[Evaluator, Evaluator]:
    """Build two evaluators: one of the test images alone, one with the classifier for IS."""
    train = load_public(data)
    test = load_public(data, "test")
    runtime = Runtime(device)
    return (
        Evaluator(test, runtime=runtime, on_warning=print),
        Evaluator(test, train, runtime=runtime, on_warning=print),
    )


def measure_class_accuracy(
    evaluator: Evaluator, images: Tensor, labels: Tensor, reference_size: int
) -> MetricResult:
    """Measure the share of images to which the classifier of IS gives their label."""
    classifier, protocol = evaluator._score_classifier
    correct = (classifier.predict(images) == labels).double()
    return MetricResult(
        "class_accuracy",
        correct.mean().item(),
        correct.std().item() / len(correct) ** 0.5,
        len(correct),
        evaluator.test_data.name,
        reference_size,
        True,
        protocol,
    )


def measure_images(
    images: Tensor, labels: Tensor, metrics: tuple[str, ...], options: argparse.Namespace
) -> list[MetricResult]:
    """Measure labelled images by some metrics."""
    evaluator, evaluator_with_training = load_evaluators(options.data, options.device)
    num_classes = evaluator.test_data.spec.num_classes
    samples = Samples("samples", images, labels, num_classes, publishable=True)
    results = []
    for metric in metrics:
        if metric == "class_accuracy":
            results.append(measure_class_accuracy(evaluator_with_training, images, labels, 0))
        else:
            chosen = evaluator_with_training if metric == "is" else evaluator
            results += chosen.measure(samples, [metric])
    return results


def measure_artifact(artifact: Artifact, spec: Spec, options: argparse.Namespace) -> dict[str, Any]:
    """Measure samples with the label frequencies of the test images, and with even labels."""
    test = load_evaluators(options.data, options.device)[0].test_data
    assert isinstance(test, Public)
    test_labels = test.records().labels
    rng = torch.Generator().manual_seed(options.seed)
    natural_labels = test_labels[torch.randint(len(test_labels), (options.count,), generator=rng)]
    even_labels = torch.arange(options.count) % spec.num_classes
    device = Runtime(options.device).torch_device
    results: dict[str, Any] = {}
    for suffix, wanted in (("", natural_labels), ("_even", even_labels)):
        images, labels = artifact.sample(
            spec, options.count, wanted, seed=options.seed + 1, device=device
        )
        results |= {
            f"{result.name}{suffix}": to_jsonable(asdict(result))
            for result in measure_images(images, labels, options.only, options)
        }
    return results


def save_row(name: str, row: dict[str, Any], images: Tensor | None, folder: Path) -> None:
    """Store a row and its image grid, and print the figures."""
    if images is not None:
        folder.mkdir(parents=True, exist_ok=True)
        columns = 8 if len(images) < 100 else 16
        render_image_grid(images, columns).save(folder / f"{name}.png")
    write_json(folder / f"{name}.json", to_jsonable(row) | describe_environment())
    figures = {key: round(float(result["value"]), 3) for key, result in row["results"].items()}
    print(f"{name}: {row['seconds']:.0f} s, {figures}", flush=True)


class StageClock:
    """Measures the seconds of each stage from the progress reports."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, stage: str, step: int, total: int, **facts: Any) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.last = now
        if step % max(1, total // 10) == 0:
            print(f"  {stage} {step}/{total}, {self.seconds[stage]:.0f} s", flush=True)


def sample_each_class(artifact: Artifact, spec: Spec, device: str) -> Tensor:
    """Sample eight images of each class; a grid row has one class, or two if there are many."""
    order = torch.arange(spec.num_classes)
    if spec.num_classes > 20:
        half = -(-spec.num_classes // 2)
        order = torch.stack([order[:half], order[spec.num_classes - half :]], 1).flatten()
    labels = order.repeat_interleave(8)
    torch_device = Runtime(device).torch_device
    return artifact.sample(spec, len(labels), labels, seed=8, device=torch_device)[0]


def count_message_bytes(settings: FederatedSettings, spec: Spec) -> int:
    """Count the bytes of a request to one client and of its answer."""
    batch_shape = (spec.num_classes, settings.batch_per_class)
    run_id = "0" * 32
    images = torch.zeros(*batch_shape, *spec.shape, dtype=torch.uint8)
    gradients = torch.zeros(*batch_shape, *settings.compute_gradient_shape(spec))
    request = pack_message(Request(run_id, 0, images))
    return len(request) + len(pack_message(Answer(run_id, 0, gradients)))


def load_clients(data: str, num_clients: int) -> Sensitive:
    """Load a dataset that belongs to clients. FEMNIST has 300 writers of its own."""
    if data == "femnist" and num_clients == 300:
        dataset = privot.load(data)
    else:
        dataset = privot.load(data, num_clients=num_clients)
    assert isinstance(dataset, Sensitive)
    return dataset


def run_federation(
    num_clients: int, epsilon: float, pretrain: str, options: argparse.Namespace
) -> None:
    """Train, measure and store one row."""
    tag = f"-{options.tag}" if options.tag else ""
    name = f"{options.data}-{num_clients}-{pretrain}-eps{epsilon:g}{tag}"
    if (options.out / f"{name}.json").exists():
        print(f"{name} is stored already.")
        return
    dataset = load_clients(options.data, num_clients)
    settings = choose_settings(num_clients, pretrain, options.data, options.set)
    method = make_method(METHOD, settings)
    assert isinstance(method, FederatedSettings)
    clock = StageClock()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        release = privot.synthesize(
            dataset,
            method,
            Budget(epsilon, DELTA),
            ledger=f"{folder}/ledger.jsonl",
            seed=options.seed,
            progress=clock,
            runtime=Runtime(options.device, options.microbatch),
        )
    seconds = time.perf_counter() - start
    stage = Plan.from_json(release.metadata["plan"]).stages[0]
    guarantee = release.guarantee
    row = {
        "data": options.data,
        "clients": num_clients,
        "pretrain": pretrain,
        "requested_epsilon": epsilon,
        "delta": DELTA,
        "seed": options.seed,
        "seconds": seconds,
        "epsilon": guarantee.epsilon if isinstance(guarantee, Guarantee) else None,
        "guarantee": asdict(guarantee),
        "noise_multiplier": stage.noise_multiplier,
        "gradients_per_client": stage.steps,
        "settings": release.metadata["settings"],
        "bytes_per_client_and_round": count_message_bytes(method, dataset.spec),
        "stages": clock.seconds,
        "results": measure_artifact(release.artifact, dataset.spec, options),
    }
    images = sample_each_class(release.artifact, dataset.spec, options.device)
    save_row(name, row, images, options.out)


def measure_prior(options: argparse.Namespace) -> None:
    """Measure the pretrained generator before any client is queried."""
    num_clients = options.clients[0]
    spec = load_clients(options.data, num_clients).spec
    settings = choose_settings(num_clients, "glyphs", options.data, options.set)
    method = make_method(METHOD, settings)
    assert isinstance(method, FederatedSettings)
    start = time.perf_counter()
    streams = Streams(options.seed, Runtime(options.device))
    artifact = ServerGenerator(method, spec, streams, StageClock()).export_artifact()
    row = {
        "data": options.data,
        "clients": 0,
        "pretrain": "glyphs",
        "requested_epsilon": 0.0,
        "epsilon": 0.0,
        "seconds": time.perf_counter() - start,
        "results": measure_artifact(artifact, spec, options),
    }
    name = f"{options.data}-prior" + (f"-{options.tag}" if options.tag else "")
    save_row(name, row, sample_each_class(artifact, spec, options.device), options.out)


def measure_real(options: argparse.Namespace) -> None:
    """Measure real images as a check of the evaluators.

    FID is of training images. IS and the class accuracy are of test images, because their
    classifier was trained on the training images.
    """
    train = load_public(options.data)
    test = load_public(options.data, "test")
    rng = torch.Generator().manual_seed(options.seed)
    chosen = torch.randperm(len(train), generator=rng)[: options.count]
    start = time.perf_counter()
    metrics = tuple(name for name in options.only if name not in ("is", "class_accuracy"))
    images, labels = train.records()
    results = measure_images(images[chosen], labels[chosen], metrics, options)
    evaluator = load_evaluators(options.data, options.device)[1]
    images, labels = test.records()
    if "class_accuracy" in options.only:
        results.append(measure_class_accuracy(evaluator, images, labels, len(train)))
    if "is" in options.only:
        classifier, protocol = evaluator._score_classifier
        rng = torch.Generator().manual_seed(options.seed)
        score, standard_error = inception_score(classifier.predict_proba(images), rng)
        facts = (len(labels), options.data, len(train), True, protocol)
        results.append(MetricResult("is", score, standard_error, *facts))
    row = {
        "data": options.data,
        "clients": 0,
        "pretrain": "real",
        "requested_epsilon": None,
        "epsilon": None,
        "seconds": time.perf_counter() - start,
        "results": {result.name: to_jsonable(asdict(result)) for result in results},
    }
    save_row(f"{options.data}-real", row, None, options.out)


def print_table(folder: Path) -> None:
    """Print the stored rows as a Markdown table, and draw the chart."""
    rows = sorted(
        (json.loads(path.read_text()) | {"name": path.stem} for path in folder.glob("*.json")),
        key=lambda row: str(row["name"]),
    )
    print_header(
        "row",
        "epsilon",
        "noise multiplier",
        "IS",
        "FID",
        "class accuracy",
        "IS, even labels",
        "FID, even labels",
        "bytes a client and round",
        "seconds",
    )
    for row in rows:
        values = {key: f"{float(result['value']):.2f}" for key, result in row["results"].items()}
        keys = ("is", "fid", "class_accuracy", "is_even", "fid_even")
        print_row(
            row["name"],
            "-" if row["epsilon"] is None else f"{row['epsilon']:.1f}",
            f"{row.get('noise_multiplier', 0):.2f}",
            *(values.get(key, "-") for key in keys),
            f"{row.get('bytes_per_client_and_round', 0):.3g}",
            f"{row['seconds']:.0f}",
        )
    for cells in PUBLISHED:
        print_row(*cells)
    draw_chart(rows, folder / "curve.png")


def draw_chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw IS and FID against user-level epsilon."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, key, published in zip(axes, ("is", "fid"), (11.25, 60.76), strict=True):
        curves: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for row in rows:
            if key not in row["results"]:
                continue
            value = row["results"][key]["value"]
            if row["clients"]:
                points = curves.setdefault((row["clients"], row["pretrain"]), [])
                points.append((row["epsilon"] or NO_NOISE_POSITION, value))
            else:
                style = ":" if row["pretrain"] == "real" else "--"
                axis.axhline(value, lw=0.8, ls=style, color="k", label=row["name"])
        for (num_clients, pretrain), points in sorted(curves.items()):
            axis.plot(
                *zip(*sorted(points), strict=True),
                "o-",
                color=f"C{2 * (num_clients > MANY_CLIENTS) + (pretrain == 'off')}",
                label=f"{num_clients} clients, pretrain={pretrain}",
            )
        axis.plot([599], [published], "x", color="r", label="published")
        axis.set(xscale="log", xlabel="user-level epsilon at delta 1.15e-3", ylabel=key.upper())
        axis.set_xticks([10, 59.9, 599, NO_NOISE_POSITION], ["10", "59.9", "599", "no noise"])
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--data", default="femnist", help="or digits or mnist, divided among the clients"
    )
    parser.add_argument(
        "--epsilon", nargs="*", type=float, default=[], help="user-level epsilons; inf: no noise"
    )
    parser.add_argument("--clients", nargs="+", type=int, default=[300])
    parser.add_argument("--pretrain", nargs="+", choices=PRETRAIN_SETTINGS, default=["glyphs"])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings")
    parser.add_argument(
        "--only", nargs="+", default=["is", "fid", "class_accuracy"], help="metrics"
    )
    parser.add_argument("--count", type=int, default=12_000, help="number of measured images")
    parser.add_argument("--tag", default="", help="suffix of the names of the rows")
    parser.add_argument("--out", type=Path, default=HERE / "federated", help="folder of the rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--microbatch", type=int, help="records processed at a time during synthesis"
    )
    for flag, text in (
        ("prior", "measure the pretrained generator, without clients"),
        ("real", "measure real images"),
        ("noise", "print gradients and noise by epsilon"),
        ("table", "print the table of the stored rows"),
    ):
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    options = parser.parse_args()
    options.set = parse_settings(options.set)
    options.only = tuple(options.only)
    if options.noise:
        print_noise()
    if options.real:
        measure_real(options)
    if options.prior:
        measure_prior(options)
    for num_clients in options.clients:
        for pretrain in options.pretrain:
            for epsilon in options.epsilon:
                run_federation(num_clients, epsilon, pretrain, options)
    if options.table:
        print_table(options.out)


if __name__ == "__main__":
    main()
