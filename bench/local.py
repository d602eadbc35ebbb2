"""Local privacy: how well the distribution of clean records is learned from privatized ones.

    python bench/local.py half-disk      W2 to clean points, by loss, batch and regularization,
                                         with the debiased divergence as a comparison (15 minutes)
    python bench/local.py categories     total variation of category shares: k-RR and unary
                                         encoding, compared with the unbiased estimator
    python bench/local.py rate           error against the number of records over two decades, and
                                         the slope of a straight line through it on log axes
    python bench/local.py mnist          privatized MNIST (PRIVOT_DATA), one row; epsilon 348.4 is
                                         the paper's Laplace noise: 4.5 on [-1, 1], 2.25 on [0, 1]

An epsilon that protects an image: mnist --channel gaussian --radius 2 --center .2
--projection pooled:4 --epsilon 10 --generator dense. Prints Markdown rows for bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from environment import load_public, make_parser, print_header, print_row
from torch import Tensor, nn

from privot.data import Sensitive, load_dataset
from privot.data.spec import Spec
from privot.local.channels import Laplace, Projection, RandomizedResponse, UnaryEncoding
from privot.local.dataset import PrivatizedDataset
from privot.local.frequency_estimation import apportion_labels, estimate_frequencies
from privot.local.privatize import build_image_channel, privatize
from privot.measures.evaluator import measure
from privot.measures.samples import Samples
from privot.nets.generators.tabular import TabularGenerator
from privot.runtime import Runtime
from privot.runtime.preview import render_image_grid
from privot.synthesis import synthesize
from privot.transport.costs import l1_cost
from privot.transport.entropic import entropic_loss

CategoryChannel = RandomizedResponse | UnaryEncoding

PLANE_CHANNEL = Laplace.calibrate(5.0, projection=Projection(shape=(2,)), low=-1.0, high=1.0)
NUM_POINTS = 2000  # of each side of a distance
NUM_RECORDS = 20_000
WIDE_DOMAIN = (-6.0, 6.0)


def sample_half_disk(count: int, seed: int) -> Tensor:
    """Sample points of the half disk: [count, 2]."""
    points = 2 * torch.rand(5 * count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return points[(points.norm(dim=1) < 1) & (points[:, 0] >= 0)][:count]


def compute_w2(x: Tensor, y: Tensor) -> float:
    """Compute the exact 2-Wasserstein distance of equally many points."""
    from scipy.optimize import linear_sum_assignment

    cost = torch.cdist(x.double(), y.double()).square().numpy()
    return math.sqrt(cost[linear_sum_assignment(cost)].mean())


def train_debiased(outputs: Tensor, steps: int, batch_size: int, seed: int) -> Tensor:
    """Train a generator by the debiased divergence, which learns the wrong distribution.

    Cost and temperature are those of the method; the generator may leave the domain. Of the
    divergence W(x, y) - W(x, x) / 2 - W(y, y) / 2 the last term does not depend on x.

    Args:
        outputs: Privatized points [n, 2].
        steps: Training steps.
        batch_size: Points in a step.
        seed: Seed of weights and batches.

    Returns:
        Generated points [`NUM_POINTS`, 2].
    """
    rng = torch.Generator().manual_seed(seed)
    net = TabularGenerator((1, 1, 2), 1, [[2, *WIDE_DOMAIN]], latent_dim=16)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=rng)
            nn.init.zeros_(module.bias)

    def generate(count: int) -> Tensor:
        latents = torch.randn(count, net.latent_dim, generator=rng)
        return net.generate_relaxed(latents, torch.zeros(count, dtype=torch.int64))

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return entropic_loss(l1_cost(x, y), PLANE_CHANNEL.scale, tolerance=1e-4)

    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + math.cos(math.pi * step / steps))
        x = generate(batch_size)
        y = outputs[torch.randint(len(outputs), (batch_size,), generator=rng)]
        (compute_loss(x, y) - compute_loss(x, x) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return generate(NUM_POINTS)


def run_half_disk(device: str, num_seeds: int) -> None:
    """Print one row for each setting. Records, noise and training are new for each seed."""
    print_header(f"{num_seeds} seeds", "W2 to clean", "residual over noise", "s")
    cases: list[tuple[str, bool, dict[str, Any]]] = [
        ("two clean sets", False, {}),
        ("privatized points", False, {}),
    ]
    cases += [
        (f"{loss}, batch {batch_size}", False, {"loss": loss, "batch_size": batch_size})
        for batch_size in (256, 64, 1000)
        for loss in ("eot", "nll")
    ]
    cases += [
        (f"eot, regularization {factor:g}", False, {"regularization": factor})
        for factor in (0.25, 0.5, 2.0)
    ]
    cases += [
        (f"eot, regularization {factor:g}, wide domain", True, {"regularization": factor})
        for factor in (0.1, 0.5)
    ]
    cases += [("debiased (not offered), wide domain", True, {})]
    low, high = WIDE_DOMAIN
    wide_channel = dataclasses.replace(PLANE_CHANNEL, low=low, high=high)
    for name, is_wide, settings in cases:
        distances = []
        residuals = []
        start = time.perf_counter()
        for seed in range(num_seeds):
            outputs = PLANE_CHANNEL.privatize(sample_half_disk(NUM_RECORDS, seed))
            if settings:
                channel = wide_channel if is_wide else PLANE_CHANNEL
                spec = Spec((1, 1, 2), 1, len(outputs))
                release = synthesize(
                    PrivatizedDataset(outputs, channel, spec, "half disk"),
                    "entropic-gan",
                    settings={"steps": 1500, **settings},
                    seed=seed,
                    runtime=Runtime(device),
                )
                residuals.append(release.metadata["diagnostics"]["over_noise"])
                points = release.sample(NUM_POINTS)[0].flatten(1)
            elif is_wide:
                points = train_debiased(outputs, 1500, 256, seed)
            elif name == "privatized points":
                points = outputs[:NUM_POINTS]
            else:
                points = sample_half_disk(NUM_POINTS, seed + 200)
            distances.append(compute_w2(points, sample_half_disk(NUM_POINTS, seed + 100)))
        figures = ("; ".join(f"{x:.3f}" for x in values) for values in (distances, residuals))
        print_row(name, *figures, f"{(time.perf_counter() - start) / num_seeds:.0f}")


def count_categories(channel: CategoryChannel, outputs: Tensor) -> Tensor:
    """Compute how often each category is in the outputs, as shares of the records."""
    if isinstance(channel, UnaryEncoding):
        return outputs.double().mean(0)
    counts = torch.bincount(outputs[:, 0].long(), minlength=channel.num_categories)
    return counts.double() / len(outputs)


def estimate_unbiased(channel: CategoryChannel, outputs: Tensor) -> Tensor:
    """Estimate category shares by the textbook: (frequency - p_false) / (p_true - p_false)."""
    if isinstance(channel, UnaryEncoding):
        false_probability = channel.false_positive_rate
        true_probability = 1 - channel.false_negative_rate
    else:
        false_probability = channel.wrong_category_probability
        true_probability = 1 - (channel.num_categories - 1) * false_probability
    frequencies = count_categories(channel, outputs)
    return (frequencies - false_probability) / (true_probability - false_probability)


def run_categories(num_records: int) -> None:
    """Print the total variation of several estimates for each channel."""
    print(f"{num_records:,} records\n")
    print_header(
        "channel", "TV, shares", "TV, exact outputs", "TV, unbiased estimate", "TV, privatized"
    )
    channels: list[CategoryChannel] = [
        RandomizedResponse.calibrate(epsilon, num_categories=8) for epsilon in (0.5, 1.0, 3.0)
    ]
    channels += [UnaryEncoding.calibrate(epsilon, num_categories=5) for epsilon in (1.0, 3.0)]
    for channel in channels:
        shares = make_shares(channel.num_categories)
        outputs = channel.privatize(apportion_labels(shares, num_records)[:, None].float())
        frequencies = count_categories(channel, outputs)
        estimates = (
            estimate_frequencies(channel, outputs),
            fit_exact_outputs(channel, shares),
            estimate_unbiased(channel, outputs),
            frequencies / frequencies.sum(),
        )
        print_row(
            f"{channel.name}, k = {channel.num_categories}, epsilon {channel.epsilon:g}",
            *(f"{compute_total_variation(estimate, shares):.1e}" for estimate in estimates),
        )


def make_shares(num_categories: int) -> Tensor:
    """Make the true shares of the categories."""
    return torch.softmax(torch.linspace(0, 2, num_categories).double(), 0)


def compute_total_variation(p: Tensor, q: Tensor) -> float:
    """Compute the total variation of two distributions."""
    return float((p - q).abs().sum() / 2)


def compute_output_probabilities(channel: CategoryChannel, outputs: Tensor) -> Tensor:
    """Compute the probability of each output given each category: [categories, outputs]."""
    categories = torch.eye(channel.num_categories).double()
    return (-channel.compute_cost_matrix(categories, outputs.double())).exp()


def fit_exact_outputs(channel: CategoryChannel, shares: Tensor) -> Tensor:
    """Fit shares to the exact distribution of the outputs: only the optimizer's error is left."""
    size = channel.num_categories
    if isinstance(channel, UnaryEncoding):
        outputs = torch.cartesian_prod(*[torch.arange(2.0)] * size)
    else:
        outputs = torch.arange(float(size))[:, None]
    kernel = compute_output_probabilities(channel, outputs)
    weights = shares @ kernel
    estimate = torch.full_like(shares, 1 / size)
    for _ in range(20_000):
        estimate = estimate * (kernel @ (weights / (estimate @ kernel)))
    return estimate


def run_rates(repeats: int) -> None:
    """Print errors by number of records n, as root mean squares over repetitions."""
    print_header(
        "n",
        "error of the objective",
        "total variation of shares",
        "excess risk (KL of the output distributions)",
    )
    size = 8
    channel = RandomizedResponse.calibrate(1.0, num_categories=size)
    shares = make_shares(size)
    kernel = compute_output_probabilities(channel, torch.arange(float(size))[:, None])
    truth = shares @ kernel
    sizes = [1000, 3000, 10_000, 30_000, 100_000]
    rows = []
    for num_records in sizes:
        errors = []
        for _ in range(repeats):
            outputs = channel.privatize(apportion_labels(shares, num_records)[:, None].float())
            frequencies = count_categories(channel, outputs)
            estimate = estimate_frequencies(channel, outputs)
            objective_error = abs(float(((frequencies - truth) * truth.log()).sum()))
            excess_risk = float((truth * (truth / (estimate @ kernel)).log()).sum())
            total_variation = compute_total_variation(estimate, shares)
            errors.append((objective_error, total_variation, excess_risk))
        rows.append(torch.tensor(errors).square().mean(0).sqrt())
        print_row(f"{num_records:,}", *(f"{error:.2e}" for error in rows[-1]))
    y = torch.stack(rows).double().log()
    x = torch.tensor(sizes).double().log()
    centered = x - x.mean()
    slopes = (centered[:, None] * (y - y.mean(0))).sum(0) / centered.square().sum()
    print_row("slope", *(f"{slope:.2f}" for slope in slopes))


def run_mnist(options: argparse.Namespace) -> None:
    """Privatize images with labels, train, and print FID and the accuracy of a CNN."""
    dataset = load_dataset(options.data)
    assert isinstance(dataset, Sensitive)
    kind, _, side = options.projection.partition(":")
    channel = build_image_channel(
        dataset.spec,
        options.channel,
        options.epsilon,
        labels_epsilon=options.labels_epsilon,
        projection_kind=kind,
        projection_side=int(side or 0),
        radius=options.radius,
        center=options.center,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    privatized = privatize(dataset, channel, ledger=options.out / "ledger.jsonl")
    seconds = time.perf_counter() - start
    print(f"privatized in {seconds:.0f} s, epsilon {channel.epsilon:.4g}", flush=True)
    settings = {
        "batch_size": options.batch_size,
        "steps": options.steps,
        "generator": options.generator,
        "loss": options.loss,
        "latent_dim": 64,
        "hidden_dim": 512,
        "learning_rate": 1e-3,
    }
    projection = options.projection.replace(":", "")
    name = f"{options.channel}-{options.epsilon:g}-{projection}-{options.loss}"
    runtime = Runtime(options.device)
    start = time.perf_counter()
    release = synthesize(privatized, "entropic-gan", settings=settings, runtime=runtime)
    seconds = time.perf_counter() - start
    images = release.sample(100)[0]
    render_image_grid(images, dataset.spec.num_classes).save(options.out / f"{name}.png")
    release.save(options.out / name)
    row = {
        "epsilon": channel.epsilon,
        "projection": options.projection,
        "seconds": seconds,
        "residual_over_noise": release.metadata["diagnostics"]["over_noise"],
    }
    if options.measure:
        num_samples = 10_000 if options.device == "cpu" else 60_000
        results = measure(
            Samples.from_release(release, name, num_samples),
            load_public(options.data, "test"),
            options.measure.split(","),
            runtime=runtime,
        )
        row |= {result.name: result.value for result in results}
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("part", choices=("half-disk", "categories", "rate", "mnist"))
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--num-records", type=int, default=100_000, help="categories: number of records"
    )
    parser.add_argument("--repeats", type=int, default=60, help="rate: runs of each size")
    parser.add_argument("--seeds", type=int, default=3, help="half-disk: number of seeds")
    mnist = parser.add_argument_group("options of mnist")
    mnist.add_argument("--data", default="mnist")
    mnist.add_argument("--channel", default="laplace", help="laplace or gaussian")
    mnist.add_argument("--epsilon", type=float, default=784 / 2.25, help="epsilon of an image")
    mnist.add_argument("--labels-epsilon", type=float, default=4.0, help="epsilon of a label")
    mnist.add_argument("--projection", default="identity", help="identity, pooled:SIDE or dct:SIDE")
    mnist.add_argument("--radius", type=float, help="radius of the ball of projected images")
    mnist.add_argument("--center", type=float, help="gray level of the center of that ball")
    mnist.add_argument("--batch-size", type=int, default=1000)
    mnist.add_argument("--steps", type=int, default=20_000)
    mnist.add_argument("--generator", default="conv", help="conv or dense")
    mnist.add_argument("--loss", default="eot", help="eot or nll")
    mnist.add_argument("--measure", default="", help="metrics, such as fid,cnn")
    mnist.add_argument("--out", type=Path, default=Path("build/local"))
    options = parser.parse_args()
    if options.part == "half-disk":
        run_half_disk(options.device, options.seeds)
    elif options.part == "categories":
        run_categories(options.num_records)
    elif options.part == "rate":
        run_rates(options.repeats)
    else:
        run_mnist(options)


if __name__ == "__main__":
    main()
