"""The columns of GS-WGAN's table for every method: IS, FID, MLP, CNN, Avg and Calibrated accuracy, on MNIST and Fashion-MNIST.

    python bench/table1.py                      every row that is not there yet, then the table and the chart
    python bench/table1.py --rows mnist/real mnist/merf@1
    python bench/table1.py --only is fid cnn    some columns first; the next call adds the others
    python bench/table1.py --table              only the table, from the rows at hand
    python bench/table1.py --rows mnist/gs-wgan@10#1    another seed: the table then states the mean, and below it the deviation
    python bench/table1.py --rows mnist/gs-wgan@10~.6#1    the same release with a smaller latent_scale, a row of its own
    python bench/table1.py --rows mnist/gs-wgan+pretrain=glyphs+warmup_rounds=20@10    other settings than the method's own, rows of their own, too

A row is a file in bench/table1/; a measure that is in it is not taken again. The data and the Inception weights must be at hand
(PRIVOT_DATA). The real row is the ruler's own check: IS and accuracies of the training set, FID between its two halves.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import tempfile
import time
import tomllib
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from environment import commit, hardware

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
SETS = ("mnist", "fashion-mnist")
EPSILONS = ("10", "1", "0.2")
QUICK = ("is", "fid", "kid", "precision", "sliced", "cnn")
SLOW = ("adaboost", "gbm")
ALL = (*QUICK, *(name for name in GS_WGAN_CLASSIFIERS if name not in ("cnn", *SLOW)), *SLOW)
MOST = 10  # seeds that are looked for
BEGIN = "<!-- table1 -->"
END = "<!-- /table1 -->"


def rows() -> list[str]:
    ways = [
        f"{name}@{eps}"
        for name, kind in list_methods().items()
        for eps in (("inf",) if kind.guarantee_summary.startswith("none") else EPSILONS)
    ]
    return [f"{data}/{what}" for data in SETS for what in ("real", *ways)]


def file_of(row: str) -> Path:
    return ROWS / f"{re.sub('[/@+=]', '-', row).replace('~', '-spread').replace('#', '-seed')}.json"


def whole(row: str) -> str:
    """The row of the same release with latent_scale 1."""
    return re.sub("~[^#]*", "", row)


def spread_of(row: str) -> float:
    return float(row.split("~")[1].split("#")[0]) if "~" in row else 1.0


def taken(row: str) -> dict[str, Any]:
    return (
        json.loads(file_of(row).read_text())
        if file_of(row).exists()
        else {"row": row, "readings": []}
    )


def keep(row: str, readings: list[MetricResult], **facts: Any) -> None:
    known = taken(row)
    where = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": hardware(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    known["readings"] += [to_jsonable(asdict(each)) | where for each in readings]
    ROWS.mkdir(exist_ok=True)
    part = file_of(row).with_suffix(".part")
    part.write_text(json.dumps(known | facts, indent=1))
    part.replace(file_of(row))


def name_of(measure: str) -> str:
    return (
        f"{measure}_accuracy"
        if measure in GS_WGAN_CLASSIFIERS
        else "sliced_wasserstein"
        if measure == "sliced"
        else measure
    )


def say(stage: str, step: int, of: int, **more: Any) -> None:
    if step == of:
        print(f"  {stage} {step}/{of}", flush=True)


@functools.cache
def bench(data: str, half: bool, seed: int, device: str) -> Evaluator:
    train = privot.load(data, public=True)
    test = privot.load(data, "test", public=True)
    assert isinstance(train, Public)
    reference = halves(train)[1] if half else train
    return Evaluator(
        test, reference, runtime=Runtime(device), seed=seed, progress=say, on_warning=print
    )


def declared(data: str, method: str, settings: dict[str, str]) -> Sensitive:
    """The training set, with the sizes of its classes declared public for a method that asks for them."""
    box = privot.load(data)
    try:
        make_method(method, settings).plan(box.spec)
    except SettingError:
        box = privot.load(data, public_classes=True)
    assert isinstance(box, Sensitive)
    return box


def released(row: str, seed: int, runtime: Runtime) -> tuple[Release, dict[str, Any]]:
    """The row's release: made once, so that all its columns are of one and the same."""
    data, what = whole(row).split("#")[0].split("/")
    way, epsilon = what.split("@")
    method, *pairs = way.split("+")
    settings = dict(pair.split("=", 1) for pair in pairs)
    place = file_of(whole(row)).with_suffix("")
    if place.exists():
        release = Release.load(place)
        return release, {
            "guarantee": to_jsonable(asdict(release.guarantee)),
            "seed": release.metadata["seed"],
        }
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        release = privot.synthesize(
            declared(data, method, settings),
            method,
            float(epsilon),
            settings=settings,
            ledger=f"{folder}/ledger.jsonl",
            seed=seed,
            runtime=runtime,
        )
        release.save(place)  # not before it is whole: a run that is cut off is begun anew
    facts = {
        "training_seconds": time.perf_counter() - start,
        "guarantee": to_jsonable(asdict(release.guarantee)),
        "seed": seed,
    }
    return release, facts


def run(
    row: str, only: tuple[str, ...], seed: int, device: str, microbatch: int | None = None
) -> None:
    """Take the measures that the row lacks. Releases of all seeds by one ruler: its judge takes as long as a release."""
    own = int(row.split("#")[1]) if "#" in row else seed
    have = {each["name"] for each in taken(row)["readings"]}
    missing = [each for each in only if name_of(each) not in have]
    data, what = whole(row).split("#")[0].split("/")
    if what == "real":
        features = [each for each in missing if each in ("fid", "kid", "precision", "sliced")]
        if features:
            first = halves(privot.load(data, public=True))[0]
            keep(row, bench(data, True, seed, device).measure(first, features))
        missing = [each for each in missing if each not in features]
    if missing:
        facts: dict[str, Any] = {}
        if what == "real":
            subject = Samples.from_source(data, 60_000)
        else:
            if (have or taken(whole(row))["readings"]) and not file_of(whole(row)).with_suffix(
                ""
            ).exists():
                raise SystemExit(
                    f"{row}: its release is gone, and new columns must be of the same one: remove {file_of(whole(row))} to start it anew"
                )
            release, facts = released(row, own, Runtime(device, microbatch))
            subject = Samples.from_release(
                release, row, 60_000, own, Runtime(device).torch_device, spread_of(row)
            )
        for group in (
            QUICK,
            ALL[len(QUICK) : -len(SLOW)],
            SLOW,
        ):  # what is measured is kept, should the next group be cut off
            if wanted := [each for each in missing if each in group]:
                keep(row, bench(data, False, seed, device).measure(subject, wanted), **facts)


def halves(train: Public) -> tuple[Samples, Public]:
    """Two random halves of a training set that share no record."""
    images, labels = train.records()
    one, two = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).chunk(2)
    spec = privot.Spec(train.spec.shape, train.spec.num_classes)
    return Samples("half", images[one], labels[one], spec.num_classes, publishable=True), Public(
        images[two], labels[two], spec, name=f"{train.name}, other half"
    )


def seeds(row: str) -> list[str]:
    """The row and its other seeds, as far as they were run."""
    return [row, *(f"{row}#{seed}" for seed in range(1, MOST) if file_of(f"{row}#{seed}").exists())]


def ways(what: str) -> list[str]:
    """Such as gs-wgan@10 itself, then gs-wgan@10~.6, gs-wgan+warmup_rounds=20@10 and whatever else of it is at hand by spread or settings."""
    known = {
        json.loads(path.read_text())["row"].split("/")[1].split("#")[0]
        for path in ROWS.glob("*.json")
    }
    return [
        what,
        *sorted(
            each for each in known if each != what and re.sub("[+][^@]*", "", whole(each)) == what
        ),
    ]


def values(row: str) -> dict[str, float]:
    """Measured values of a row, each the mean over the seeds that have it."""
    found = [one(each) for each in seeds(row)]
    return {
        name: mean(each[name] for each in found if name in each)
        for name in dict.fromkeys(name for each in found for name in each)
    }


def one(row: str) -> dict[str, float]:
    """Measured values of one release, with the averages, where their parts are there."""
    found = {each["name"]: float(each["value"]) for each in taken(row)["readings"]}
    real = {
        each["name"]: float(each["value"])
        for each in taken(f"{row.split('/')[0]}/real")["readings"]
    }
    parts = [f"{name}_accuracy" for name in GS_WGAN_CLASSIFIERS]
    if set(parts) <= set(found):
        found["avg_accuracy"] = sum(found[part] for part in parts) / len(parts)
        if set(parts) <= set(real):
            found["calibrated_accuracy"] = sum(found[part] / real[part] for part in parts) / len(
                parts
            )
    return found


COLUMNS = {
    "is": "{:.2f}",
    "fid": "{:.1f}",
    "mlp_accuracy": "{:.3f}",
    "cnn_accuracy": "{:.3f}",
    "avg_accuracy": "{:.3f}",
    "calibrated_accuracy": "{:.0%}",
}


def line(name: str, epsilon: str, found: list[dict[str, float]], source: str) -> str:
    cells = [
        COLUMNS[key].format(each[key]) if key in each else "-" for each in found for key in COLUMNS
    ]
    return "| " + " | ".join([name, epsilon, *cells, source]) + " |"


def table() -> str:
    heads = [
        f"{data[0].upper()}: {name}"
        for data in SETS
        for name in ("IS", "FID", "MLP", "CNN", "Avg", "Calib")
    ]
    text = [
        "| method | epsilon | " + " | ".join(heads) + " | source |",
        "|" + "---|" * (len(heads) + 3),
    ]
    published = tomllib.loads(
        (Path(privot.__file__).parent / "report" / "published_results.toml").read_text()
    )
    text.append(line("real data", "-", [values(f"{data}/real") for data in SETS], "**privot**"))
    said = [
        next(
            each["figures"]
            for each in published["real"]
            if each["data"] == data and each["source"].startswith("GS-WGAN")
        )
        for data in SETS
    ]
    text.append(line("real data", "-", said, "GS-WGAN, Table 1"))
    for epsilon in EPSILONS:
        for name in list_methods():
            for what in ways(f"{name}@{epsilon}"):
                found = [values(f"{data}/{what}") for data in SETS]
                if any(found):
                    text.append(
                        line(
                            what.replace(f"@{epsilon}", "")
                            .replace("~", ", spread ")
                            .replace("+", ", "),
                            epsilon,
                            found,
                            "**privot**",
                        )
                    )
        others: dict[tuple[str, str], list[dict[str, float]]] = {}
        for each in published["figures"]:
            if float(each["epsilon"]) == float(epsilon) and each["data"] in SETS:
                others.setdefault((each["method"], each["source"]), [{}, {}])[
                    SETS.index(each["data"])
                ] = each["figures"]
        text += [line(method, epsilon, found, source) for (method, source), found in others.items()]
    return "\n".join(text)


def deviations() -> str:
    """Mean and deviation over seeds, where there are several."""
    text = ["| row | seeds | IS | FID | MLP | CNN | training |", "|---|---|---|---|---|---|---|"]
    for row in [
        f"{data}/{each}" for data, what in (row.split("/") for row in rows()) for each in ways(what)
    ]:
        if len(each := seeds(row)) > 1:
            found = [one(seed) for seed in each]
            cells = []
            for key, form in (
                ("is", "{:.2f}"),
                ("fid", "{:.1f}"),
                ("mlp_accuracy", "{:.3f}"),
                ("cnn_accuracy", "{:.3f}"),
            ):
                known = [value[key] for value in found if key in value]
                cells.append(
                    f"{form.format(mean(known))} ± {form.format(stdev(known))}"
                    if len(known) > 1
                    else "-"
                )
            took = [
                taken(seed)["training_seconds"]
                for seed in each
                if "training_seconds" in taken(seed)
            ]
            text.append(
                f"| {row} | {len(each)} | {' | '.join(cells)} | {f'{mean(took):.0f} s' if took else '-'} |"
            )
    return "\n".join(text) if len(text) > 2 else ""


def chart() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    published = tomllib.loads(
        (Path(privot.__file__).parent / "report" / "published_results.toml").read_text()
    )["figures"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, data in zip(axes, SETS, strict=True):
        others: dict[str, list[tuple[float, float]]] = {}
        for each in published:
            if (
                each["data"] == data
                and "cnn_accuracy" in each["figures"]
                and float(each["epsilon"]) < 100
            ):
                others.setdefault(
                    f"{each['method']} ({each['source'].split(',')[0].split(':')[0]})", []
                ).append((float(each["epsilon"]), each["figures"]["cnn_accuracy"]))
        for points in others.values():
            axis.plot(
                *zip(*sorted(points), strict=True), "o-", color="0.75", ms=3, lw=0.8, zorder=1
            )
        for name in list_methods():
            points = [
                (float(eps), values(f"{data}/{name}@{eps}").get("cnn_accuracy")) for eps in EPSILONS
            ]
            known = sorted((eps, value) for eps, value in points if value is not None)
            if known:
                axis.plot(*zip(*known, strict=True), "o-", label=f"privot {name}", zorder=2)
        ceiling = values(f"{data}/real").get("cnn_accuracy")
        if ceiling:
            axis.axhline(ceiling, color="k", lw=0.8, ls=":", label="real data")
        axis.set(
            xscale="log", title=data, xlabel="epsilon (as claimed by each source)", ylim=(0, 1)
        )
        axis.legend(loc="lower right", fontsize=8)
    axes[0].set_ylabel("accuracy of a CNN trained on samples")
    figure.text(
        0.5,
        0.005,
        "grey: published figures, by their own rulers and accounting",
        ha="center",
        fontsize=8,
        color="0.4",
    )
    figure.tight_layout()
    figure.savefig(CHART, dpi=110)


NOTE = """Accuracies are shares of the 10,000 real test images, Avg the mean over 13 classifiers, Calib the mean ratio to the real row.
Rows in bold are measured here, by one pipeline, one release each (seed 0) or the mean of several; the others are published
figures, by their own rulers, and their epsilon is what the source claims: GS-WGAN's 10 is about 300 by a sound account of its
code. Our classical classifiers see 8-bit images, which raises Avg against the papers' way (floats): `bench/rounding.py` measures
by how much. FID is against the 60,000 training images; in the real row, between two halves of them. DP-MERF's settings were
chosen by CNN accuracy on the same test images (see above)."""


def write() -> None:
    measured = [each for row in rows() for each in taken(row)["readings"]]
    runs = sorted({(each["date"], each["hardware"], each["commit"]) for each in measured})
    where = f"Measured: {'; '.join(', '.join(each) for each in runs)} (`dirty`: with changes that the next commits hold)."
    several = (
        f"Over several seeds, each a release of its own:\n\n{found}\n\n"
        if (found := deviations())
        else ""
    )
    text = f"{BEGIN}\n\n{table()}\n\n{NOTE}\n\n{several}{where}\n\n![privacy against utility](table1.png)\n\n{END}"
    page = RESULTS.read_text() if RESULTS.exists() else ""
    if BEGIN in page:
        page = page[: page.index(BEGIN)] + text + page[page.index(END) + len(END) :]
    else:
        page += f"\n## GS-WGAN's table (`make bench-table1`)\n\n{text}\n"
    RESULTS.write_text(page)
    chart()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", nargs="+", default=None, help="such as mnist/real fashion-mnist/merf@1"
    )
    parser.add_argument("--only", nargs="+", default=ALL, choices=ALL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--microbatch", type=int, help="records at a time while a release is made")
    parser.add_argument("--table", action="store_true", help="take no measure")
    asked = parser.parse_args()
    for row in [] if asked.table else asked.rows or rows():
        start = time.perf_counter()
        run(row, tuple(asked.only), asked.seed, asked.device, asked.microbatch)
        print(f"{row}: {time.perf_counter() - start:.0f} s", flush=True)
    write()


if __name__ == "__main__":
    main()
