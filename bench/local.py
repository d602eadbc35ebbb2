"""Local privacy: how well clean laws come back from noised records. Markdown rows for bench/RESULTS.md.

python bench/local.py half-disk            W2 to clean points, by loss, batch and strength; the debiased divergence beside them (15 minutes)
python bench/local.py categories           total variation of shares: k-RR and unary encoding, beside the unbiased estimator
python bench/local.py rate                 error against the number of records over two decades, with its slope
python bench/local.py mnist                noised MNIST (PRIVOT_DATA), one row: epsilon 348.4 is the paper's Laplace noise, 4.5 on [-1, 1],
                                           so 2.25 on [0, 1]. For an honest epsilon:
                                           --channel gaussian --radius 2 --centre .2 --space pooled:4 --epsilon 10 --net dense
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
from torch import Tensor, nn

from privot.data import load_dataset
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

PLANE = Laplace.calibrate(5.0, space=Projection(shape=(2,)), low=-1.0, high=1.0)


def half_disk(count: int, seed: int) -> Tensor:
    points = 2 * torch.rand(5 * count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return points[(points.norm(dim=1) < 1) & (points[:, 0] >= 0)][:count]


def distance(x: Tensor, y: Tensor) -> float:
    """The exact W2 of equally many points."""
    from scipy.optimize import linear_sum_assignment

    cost = torch.cdist(x.double(), y.double()).square().numpy()
    return math.sqrt(cost[linear_sum_assignment(cost)].mean())


def debiased(values: Tensor, steps: int, batch: int, seed: int) -> Tensor:
    """The trap: what the debiased divergence learns, same cost and temperature, with a net that may leave the domain.

    Of W(x, y) - W(x, x) / 2 - W(y, y) / 2 the last does not depend on x.
    """
    draws = torch.Generator().manual_seed(seed)
    net = TabularGenerator((1, 1, 2), 1, [[2, -6.0, 6.0]], latent_dim=16)
    for each in net.modules():
        if isinstance(each, nn.Linear):
            nn.init.xavier_uniform_(each.weight, generator=draws)
            nn.init.zeros_(each.bias)
    labels = torch.zeros(batch, dtype=torch.int64)
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 1e-3 * (1 + math.cos(math.pi * step / steps))
        x = net.generate_relaxed(torch.randn(batch, net.latent_dim, generator=draws), labels)
        y = values[torch.randint(len(values), (batch,), generator=draws)]
        lost = (
            entropic_loss(l1_cost(x, y), PLANE.scale, tolerance=1e-4)
            - entropic_loss(l1_cost(x, x), PLANE.scale, tolerance=1e-4) / 2
        )
        lost.backward()
        optimiser.step()
        optimiser.zero_grad()
    with torch.no_grad():
        return net.generate_relaxed(
            torch.randn(2000, net.latent_dim, generator=draws), torch.zeros(2000, dtype=torch.int64)
        )


def on_the_half_disk(device: str, seeds: int) -> None:
    """One row a setting, a figure a seed: records, noise and training are drawn anew for each."""
    print(f"| {seeds} seeds | W2 to clean | residual over noise | s |\n|---|---|---|---|")
    rows: list[tuple[str, bool, dict[str, Any]]] = [
        ("two clean sets", False, {}),
        ("what was sent", False, {}),
    ]
    rows += [
        (f"{loss}, batch {batch}", False, {"loss": loss, "batch_size": batch})
        for batch in (256, 64, 1000)
        for loss in ("eot", "nll")
    ]
    rows += [
        (f"eot, strength {times:g}", False, {"regularization": times}) for times in (0.25, 0.5, 2.0)
    ]
    rows += [
        (f"eot, strength {times:g}, may leave the domain", True, {"regularization": times})
        for times in (0.1, 0.5)
    ]
    rows += [("debiased (not offered), may leave the domain", True, {})]
    for name, roomy, settings in rows:
        far = []
        told = []
        start = time.perf_counter()
        for seed in range(seeds):
            fresh = half_disk(2000, seed + 100)
            values = PLANE.privatize(half_disk(20_000, seed))
            if settings:
                channel = dataclasses.replace(PLANE, low=-6.0, high=6.0) if roomy else PLANE
                box = PrivatizedDataset(
                    values, channel, Spec((1, 1, 2), 1, len(values)), "half disk"
                )
                made = synthesize(
                    box,
                    "entropic-gan",
                    settings={"steps": 1500, **settings},
                    seed=seed,
                    runtime=Runtime(device),
                )
                told.append(made.metadata["diagnostics"]["over_noise"])
                points = made.sample(2000)[0].flatten(1)
            elif roomy:
                points = debiased(values, 1500, 256, seed)
            else:
                points = values[:2000] if "sent" in name else half_disk(2000, seed + 200)
            far.append(distance(points, fresh))
        figures = ["; ".join(f"{each:.3f}" for each in found) for found in (far, told)]
        print(
            f"| {name} | {' | '.join(figures)} | {(time.perf_counter() - start) / seeds:.0f} |",
            flush=True,
        )


def unbiased(channel: Any, answers: Tensor) -> Tensor:
    """The textbook estimate of shares: frequencies less what false answers add, over what true ones add."""
    if isinstance(channel, UnaryEncoding):
        return (answers.double().mean(0) - channel.false_positive_rate) / (
            1 - channel.false_negative_rate - channel.false_positive_rate
        )
    counts = torch.bincount(answers[:, 0].long(), minlength=channel.num_categories).double()
    return (counts / len(answers) - channel.lie) / (1 - channel.num_categories * channel.lie)


def of_categories(count: int) -> None:
    print(
        f"{count:,} records\n\n| channel | TV, shares | TV, exact answers | TV, unbiased estimate | TV, as sent |\n|---|---|---|---|---|"
    )
    channels = [
        RandomizedResponse.calibrate(epsilon, num_categories=8) for epsilon in (0.5, 1.0, 3.0)
    ]
    for channel in [
        *channels,
        *(UnaryEncoding.calibrate(epsilon, num_categories=5) for epsilon in (1.0, 3.0)),
    ]:
        size = channel.num_categories
        truth = torch.softmax(torch.linspace(0, 2, size).double(), 0)
        answers = channel.privatize(apportion_labels(truth, count)[:, None].float())
        raw = (
            answers.double().mean(0)
            if isinstance(channel, UnaryEncoding)
            else torch.bincount(answers[:, 0].long(), minlength=size).double()
        )
        exact = fitted(channel, truth)
        found = [
            estimate_frequencies(channel, answers),
            exact,
            unbiased(channel, answers),
            raw / raw.sum(),
        ]
        figures = " | ".join(f"{total(each, truth):.1e}" for each in found)
        print(
            f"| {channel.name}, k = {size}, epsilon {channel.epsilon:g} | {figures} |", flush=True
        )


def total(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().sum() / 2)


def fitted(channel: Any, truth: Tensor) -> Tensor:
    """Shares from the exact law of the answers, by the likelihood: what is left is the error of the optimiser."""
    size = channel.num_categories
    answers = (
        torch.cartesian_prod(*[torch.arange(2.0)] * size)
        if isinstance(channel, UnaryEncoding)
        else torch.arange(float(size))[:, None]
    )
    kernel = (-channel.compute_cost_matrix(torch.eye(size).double(), answers.double())).exp()
    weights = truth @ kernel
    share = torch.full_like(truth, 1 / size)
    for _ in range(20_000):
        share = share * (kernel @ (weights / (share @ kernel)))
    return share


def rates(repeats: int) -> None:
    """Against the number of records n: how far the empirical objective is from the true one, and the learned law from the truth."""
    channel = RandomizedResponse.calibrate(1.0, num_categories=8)
    truth = torch.softmax(torch.linspace(0, 2, 8).double(), 0)
    law = (
        truth
        @ (
            -channel.compute_cost_matrix(torch.eye(8).double(), torch.arange(8.0).double()[:, None])
        ).exp()
    )
    sizes = [1000, 3000, 10_000, 30_000, 100_000]
    rows = []
    for size in sizes:
        found = []
        for _ in range(repeats):
            answers = channel.privatize(apportion_labels(truth, size)[:, None].float())
            counts = torch.bincount(answers[:, 0].long(), minlength=8).double() / size
            share = estimate_frequencies(channel, answers)
            mine = (
                share
                @ (
                    -channel.compute_cost_matrix(
                        torch.eye(8).double(), torch.arange(8.0).double()[:, None]
                    )
                ).exp()
            )
            found.append(
                (
                    abs(float(((counts - law) * law.log()).sum())),
                    total(share, truth),
                    float((law * (law / mine).log()).sum()),
                )
            )
        rows.append(torch.tensor(found).square().mean(0).sqrt())
        print(f"| {size:,} | " + " | ".join(f"{each:.2e}" for each in rows[-1]) + " |", flush=True)
    logs = torch.stack(rows).double().log()
    at = torch.tensor(sizes).double().log()
    slopes = ((at - at.mean())[:, None] * (logs - logs.mean(0))).sum(0) / (
        at - at.mean()
    ).square().sum()
    print("| slope | " + " | ".join(f"{each:.2f}" for each in slopes) + " |")


def on_mnist(given: argparse.Namespace) -> None:
    """Privatize with labels, learn, look, and measure: FID, and a CNN trained on samples alone."""
    clean = load_dataset(given.data)
    kind, _, size = given.space.partition(":")
    where = {"space": kind, "size": int(size or 0), "radius": given.radius, "centre": given.centre}
    channel = build_image_channel(
        clean.spec, given.channel, given.epsilon, labels_epsilon=given.labels, **where
    )
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    sent = privatize(clean, channel, ledger=out / "ledger.jsonl")
    print(
        f"privatized in {time.perf_counter() - start:.0f} s, epsilon {channel.epsilon:.4g}",
        flush=True,
    )
    settings = {
        "batch_size": given.batch,
        "steps": given.steps,
        "generator": given.net,
        "loss": given.loss,
        "latent_dim": 64,
        "hidden_dim": 512,
        "learning_rate": 1e-3,
    }
    start = time.perf_counter()
    name = f"{given.channel}-{given.epsilon:g}-{given.space.replace(':', '')}-{given.loss}"
    made = synthesize(sent, "entropic-gan", settings=settings, runtime=Runtime(given.device))
    took = time.perf_counter() - start
    render_image_grid(made.sample(100)[0], clean.spec.num_classes).save(out / f"{name}.png")
    made.save(out / name)
    told = made.metadata["diagnostics"]
    row = {
        "epsilon": channel.epsilon,
        "space": given.space,
        "seconds": took,
        "residual_over_noise": told["over_noise"],
    }
    if given.measure:
        subject = Samples.from_release(made, name, 60_000 if given.device != "cpu" else 10_000)
        readings = measure(
            subject,
            load_dataset(given.data, "test", public=True),
            given.measure.split(","),
            runtime=Runtime(given.device),
        )
        row |= {each.name: each.value for each in readings}
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("half-disk", "categories", "rate", "mnist"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--channel", default="laplace")
    parser.add_argument("--epsilon", type=float, default=784 / 2.25)
    parser.add_argument("--labels", type=float, default=4.0)
    parser.add_argument("--space", default="plain")
    parser.add_argument("--radius", type=float)
    parser.add_argument("--centre", type=float)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--net", default="conv")
    parser.add_argument("--loss", default="eot")
    parser.add_argument("--measure", default="", help="such as fid,cnn")
    parser.add_argument("--out", default="build/local")
    given = parser.parse_args()
    if given.what == "half-disk":
        on_the_half_disk(given.device, given.seeds)
    elif given.what == "categories":
        of_categories(given.count)
    elif given.what == "rate":
        print(
            "| n | objective, off by | total variation of shares | excess risk (KL of the noised laws) |\n|---|---|---|---|"
        )
        rates(given.num_repeats)
    else:
        on_mnist(given)


if __name__ == "__main__":
    main()
