"""Federated GS-WGAN on FEMNIST: quality against user-level epsilon, for 300 writers and 3,000 simulated owners, with and without a prior.

    python bench/federated.py --epsilon inf 599 59.9 10 --owners 300 3000 --start nothing glyphs --device cuda
    python bench/federated.py --prior --real                   the prior alone, which asks nobody; and the rulers' own check
    python bench/federated.py --epsilon 59.9 --start glyphs --set learning_rate=1e-4 rounds=400 --tag slow
    python bench/federated.py --noise                          what a user-level epsilon leaves of the slopes; takes no data
    python bench/federated.py --table                          the table and the chart, from the rows at hand

A row is a JSON file and a picture (8 images of each class) in bench/federated/, and is not made twice. IS is by a classifier that was
trained on the training images; FID is against the test images, on which nothing was trained; "read" is the share of images that this
classifier takes for what they should show. Labels are drawn as they come in the test images, where most are digits; names with _even are
of as many labels of each class. 3,000 owners are simulated: record i is dealt to owner i mod 3,000. Ledgers are thrown away: this is a
benchmark on public data.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from environment import commit, hardware
from torch import Tensor

import privot
from privot.components.server_generator import ServerGenerator
from privot.data import Public, Spec
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
# Slopes in 8 x 8 frequencies of the middle 16 x 16 pixels, where FEMNIST has 99 % of its ink: what is asked elsewhere is noise.
SETTINGS = {
    "window_size": 16,
    "frequency_fraction": 0.5,
    "rounds": 500,
    "clients_per_round": 60,
    "critic_steps": 10,
    "warmup_rounds": 40,
    "critic_learning_rate": 3e-4,
}
# Chosen, not tuned: between two turns of an owner a critic should come further (lessons x critic_rate) than the generator (rounds x rate).
STARTING = {
    "nothing": {"generator_learning_rate": 6e-4},
    "glyphs": {"generator_learning_rate": 1e-4, "pretrain_steps": 4000},
}  # who begins with nothing has a longer way
MANY = {
    "records_per_critic": 16,
    "clients_per_round": 300,
    "rounds": 200,
    "critic_steps": 16,
    "warmup_rounds": 16,
}  # of 3,000 each has 14 records, of 300 138
FREE = 6000  # where runs without noise stand on the axis of epsilon
PAPER = (
    "| Fed-Avg GAN, published | 1e7 | - | 10.88 | 218.24 | - | - | - | 3.94e7 | - |",
    "| Fed-GS-WGAN, published | 599 | - | 11.25 | 60.76 | - | - | - | 1.5e5 | - |",
)


def settings(owners: int, start: str, data: str, more: dict[str, str]) -> dict[str, Any]:
    """Of a run; those of ``more`` go before."""
    chosen = {**SETTINGS, **STARTING[start], **(MANY if owners > 1000 else {}), "pretrain": start}
    if data != "femnist":
        chosen["window"] = 0
    return chosen | more


def noises() -> None:
    """Slopes over squared noise is what the generator can learn from; under user-level privacy it depends on epsilon and owners alone."""
    print(
        "| epsilon | mu of an owner | noise of each of 6,200 slopes | slopes / noise², 300 owners | 3,000 owners |\n"
        + "|---" * 5
        + "|"
    )
    plan = make_method(METHOD, SETTINGS).plan(Spec((1, 28, 28), 62, num_clients=300))
    for epsilon in (599, 59.9, 30, 10, 3, 1):
        stage = plan.calibrate(Budget(epsilon, DELTA)).stages[0]
        each = stage.steps / stage.noise_multiplier**2
        print(
            f"| {epsilon} | {each**0.5:.2f} | {stage.noise_multiplier:.2f} | {300 * each / 1000:.2f} thousand | {3 * each:.1f} thousand |"
        )


@functools.cache
def rulers(data: str, device: str) -> tuple[Evaluator, Evaluator]:
    """Features are held against the test images alone; the judge of the inception score learned from the training images."""
    train = privot.load(data, public=True)
    test = privot.load(data, "test", public=True)
    return Evaluator(test, runtime=Runtime(device), on_warning=print), Evaluator(
        test, train, runtime=Runtime(device), on_warning=print
    )


def judged(
    name: str, images: Tensor, labels: Tensor, only: tuple[str, ...], asked: argparse.Namespace
) -> list[MetricResult]:
    held, with_train = rulers(asked.data, asked.device)
    subject = Samples(name, images, labels, held.test_data.spec.num_classes, publishable=True)
    found = [
        reading
        for each in only
        if each != "read"
        for reading in (with_train if each == "is" else held).measure(subject, [each])
    ]
    if "read" in only:
        judge, text = with_train._score_classifier
        right = (judge.predict(images) == labels).double()
        found.append(
            MetricResult(
                "read",
                right.mean().item(),
                right.std().item() / len(right) ** 0.5,
                len(right),
                held.test_data.name,
                0,
                True,
                text,
            )
        )
    return found


def measured(product: Artifact, spec: Spec, asked: argparse.Namespace) -> dict[str, Any]:
    """All readings of what was made, by name: with labels as they come in the test images, and (_even) with as many of each."""
    test = rulers(asked.data, asked.device)[0].test_data
    assert isinstance(test, Public)
    come = test.records().labels
    come = come[
        torch.randint(
            len(come), (asked.count,), generator=torch.Generator().manual_seed(asked.seed)
        )
    ]
    target = Runtime(asked.device).torch_device
    found = {}
    for end, labels in (("", come), ("_even", torch.arange(asked.count) % spec.num_classes)):
        images, labels = product.sample(
            spec, asked.count, labels, seed=asked.seed + 1, device=target
        )
        found |= {
            f"{each.name}{end}": to_jsonable(asdict(each))
            for each in judged("drawn", images, labels, asked.only, asked)
        }
    return found


def keep(name: str, row: dict[str, Any], shown: Tensor | None, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    where = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": hardware(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    if shown is not None:
        render_image_grid(shown, 8 if len(shown) < 100 else 16).save(out / f"{name}.png")
    (part := out / f"{name}.part").write_text(json.dumps(to_jsonable(row) | where, indent=1))
    part.replace(out / f"{name}.json")
    figures = {key: round(each["value"], 3) for key, each in row["readings"].items()}
    print(f"{name}: {row['seconds']:.0f} s, {figures}", flush=True)


class Clock:
    """Seconds of each stage, as the progress tells of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, stage: str, step: int, of: int, **more: Any) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.last = now
        if step % max(1, of // 10) == 0:
            print(f"  {stage} {step}/{of}, {self.seconds[stage]:.0f} s", flush=True)


def eight(product: Artifact, spec: Spec, device: str) -> Tensor:
    """Eight images of each class; of 62 classes two stand side by side in a row, so that a screen holds them."""
    labels = torch.arange(spec.num_classes)
    half = -(-spec.num_classes // 2)
    order = (
        torch.stack([labels[:half], labels[spec.num_classes - half :]], 1).flatten()
        if spec.num_classes > 20
        else labels
    )
    return product.sample(
        spec,
        8 * len(order),
        order.repeat_interleave(8),
        seed=8,
        device=Runtime(device).torch_device,
    )[0]


def wired(maker: Any, spec: Spec) -> int:
    """Bytes of one owner's question and answer, as the wire carries them."""
    rows = (spec.num_classes, maker.rows)
    run = "0" * 32
    images = torch.zeros(*rows, *spec.shape, dtype=torch.uint8)
    values = torch.zeros(*rows, *maker.numbers(spec))
    return len(pack_message(Request(run, 0, images))) + len(pack_message(Answer(run, 0, values)))


def trained(owners: int, epsilon: float, start: str, asked: argparse.Namespace) -> None:
    name = f"{asked.data}-{owners}-{start}-eps{epsilon:g}" + (f"-{asked.tag}" if asked.tag else "")
    if (asked.out / f"{name}.json").exists():
        return print(f"{name}: there already")
    box = privot.load(
        asked.data, **({} if asked.data == "femnist" and owners == 300 else {"owners": owners})
    )
    maker = make_method(METHOD, settings(owners, start, asked.data, asked.set))
    clock = Clock()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        release = privot.synthesize(
            box,
            maker,
            Budget(epsilon, DELTA),
            ledger=f"{folder}/ledger.jsonl",
            seed=asked.seed,
            progress=clock,
            runtime=Runtime(asked.device, asked.microbatch_size),
        )
    took = time.perf_counter() - begin
    plan = Plan.from_json(release.metadata["plan"])
    certified = release.guarantee
    row = {
        "data": asked.data,
        "owners": owners,
        "start": start,
        "asked": epsilon,
        "delta": DELTA,
        "seed": asked.seed,
        "seconds": took,
        "epsilon": certified.epsilon if isinstance(certified, Guarantee) else None,
        "guarantee": asdict(certified),
        "noise": plan.stages[0].noise_multiplier,
        "slopes_of_an_owner": plan.stages[0].steps,
        "settings": release.metadata["settings"],
        "bytes_of_an_owner_and_round": wired(maker, box.spec),
        "stages": clock.seconds,
        "readings": measured(release.artifact, box.spec, asked),
    }
    keep(name, row, eight(release.artifact, box.spec, asked.device), asked.out)


def prior(asked: argparse.Namespace) -> None:
    """What the generator draws before anybody was asked: all of its rounds without a slope."""
    spec = privot.load(asked.data, owners=asked.owners[0]).spec
    begin = time.perf_counter()
    drawing = ServerGenerator(
        make_method(METHOD, settings(asked.owners[0], "glyphs", asked.data, asked.set)),
        spec,
        Streams(asked.seed, Runtime(asked.device)),
        Clock(),
    )
    product = drawing.export_artifact()
    took = time.perf_counter() - begin
    row = {
        "data": asked.data,
        "owners": 0,
        "start": "glyphs",
        "asked": 0.0,
        "epsilon": 0.0,
        "seconds": took,
    }
    name = f"{asked.data}-prior" + (f"-{asked.tag}" if asked.tag else "")
    keep(
        name,
        row | {"readings": measured(product, spec, asked)},
        eight(product, spec, asked.device),
        asked.out,
    )


def real(asked: argparse.Namespace) -> None:
    """Training images under the ruler of FID; what the judge learned from it would flatter, so IS and "read" are of the test images."""
    train, test = (
        privot.load(asked.data, part, public=True).records() for part in ("train", "test")
    )
    some = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(asked.seed))[
        : asked.count
    ]
    begin = time.perf_counter()
    (_, with_train) = rulers(asked.data, asked.device)
    found = judged(
        "real",
        train.images[some],
        train.labels[some],
        tuple(each for each in asked.only if each not in ("is", "read")),
        asked,
    )
    if {"is", "read"} & {*asked.only}:
        judge, text = with_train._score_classifier
        facts = (len(test.labels), asked.data, 0, True, text)
        right = (judge.predict(test.images) == test.labels).double()
        found.append(
            MetricResult(
                "read", right.mean().item(), right.std().item() / len(right) ** 0.5, *facts
            )
        )
        score = inception_score(
            judge.predict_proba(test.images), torch.Generator().manual_seed(asked.seed)
        )
        found.append(MetricResult("is", *score, *facts))
    row = {
        "data": asked.data,
        "owners": 0,
        "start": "real",
        "asked": None,
        "epsilon": None,
        "seconds": time.perf_counter() - begin,
    }
    keep(
        f"{asked.data}-real",
        row | {"readings": {each.name: to_jsonable(asdict(each)) for each in found}},
        None,
        asked.out,
    )


def table(out: Path) -> None:
    rows = sorted(
        (json.loads(path.read_text()) | {"name": path.stem} for path in out.glob("*.json")),
        key=lambda row: row["name"],
    )
    print(
        "| row | epsilon | noise | IS | FID | read | IS, even labels | FID, even labels | bytes an owner and round | seconds |\n"
        + "|---" * 10
        + "|"
    )
    for row in rows:
        values = {key: f"{each['value']:.2f}" for key, each in row["readings"].items()}
        cells = [
            row["name"],
            "-" if row["epsilon"] is None else f"{row['epsilon']:.1f}",
            f"{row.get('noise', 0):.2f}",
        ]
        cells += [values.get(key, "-") for key in ("is", "fid", "read", "is_even", "fid_even")]
        print(
            "| "
            + " | ".join(
                [
                    *cells,
                    f"{row.get('bytes_of_an_owner_and_round', 0):.3g}",
                    f"{row['seconds']:.0f}",
                ]
            )
            + " |"
        )
    print("\n".join(PAPER))
    chart(rows, out / "curve.png")


def chart(rows: list[dict[str, Any]], place: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, key, published in zip(axes, ("is", "fid"), (11.25, 60.76), strict=True):
        lines: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for row in rows:
            if row["owners"] and key in row["readings"]:
                lines.setdefault((row["owners"], row["start"]), []).append(
                    (row["epsilon"] or FREE, row["readings"][key]["value"])
                )
            elif key in row["readings"]:
                axis.axhline(
                    row["readings"][key]["value"],
                    lw=0.8,
                    ls=":" if row["start"] == "real" else "--",
                    color="k",
                    label=row["name"],
                )
        for (owners, start), points in sorted(lines.items()):
            axis.plot(
                *zip(*sorted(points), strict=True),
                "o-",
                color=f"C{2 * (owners > 1000) + (start == 'nothing')}",
                label=f"{owners} owners, start: {start}",
            )
        axis.plot([599], [published], "x", color="r", label="published")
        axis.set(xscale="log", xlabel="user-level epsilon at delta 1.15e-3", ylabel=key.upper())
        axis.set_xticks([10, 59.9, 599, FREE], ["10", "59.9", "599", "no noise"])
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(place, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="femnist", help="or digits or mnist, dealt to the owners in turn"
    )
    parser.add_argument("--epsilon", nargs="*", type=float, default=[])
    parser.add_argument("--owners", nargs="+", type=int, default=[300])
    parser.add_argument("--start", nargs="+", choices=STARTING, default=["glyphs"])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--only", nargs="+", default=["is", "fid", "read"])
    parser.add_argument("--count", type=int, default=12_000, help="images that are measured")
    parser.add_argument("--tag", default="", help="put behind the names of the rows")
    parser.add_argument("--out", type=Path, default=HERE / "federated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--microbatch", type=int)
    for flag, text in (
        ("prior", "the prior alone"),
        ("real", "real images"),
        ("noise", "noise by epsilon"),
        ("table", "rows at hand"),
    ):
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    asked = parser.parse_args()
    asked.set = dict(each.split("=", 1) for each in asked.set)
    asked.only = tuple(asked.only)
    if asked.noise:
        noises()
    if asked.real:
        real(asked)
    if asked.prior:
        prior(asked)
    for owners in asked.owners:
        for start in asked.start:
            for epsilon in asked.epsilon:
                trained(owners, epsilon, start, asked)
    if asked.table:
        table(asked.out)


if __name__ == "__main__":
    main()
