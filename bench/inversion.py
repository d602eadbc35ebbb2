"""Gradient inversion: the tables of Wang et al. (2023, "WDLG"), the noise curve, speed, and the bound.

Prints Markdown rows; "bound" is the Cramér-Rao bound, compared with attacks.

    python bench/inversion.py table2 --data mnist fashion-mnist svhn cifar100 --images 300
    python bench/inversion.py table3 --images 20 | table4 --images 20 | table5 --images 100
    python bench/inversion.py variants --images 20
    python bench/inversion.py curve --data fashion-mnist svhn cifar100 --images 50 [--clip 1]
    python bench/inversion.py speed --images 300 --alone 3 | bound --images 50
    python bench/inversion.py optimisers --images 100

Each part runs alone; on one CPU thread use --images 8. Records are of the test split (of SVHN the
training split), sampled by the seed; each victim has its own net. Success is a pixel MSE below
--threshold after clamping, with its Clopper-Pearson interval (95 %). "To threshold" counts gradient
evaluations until the true error is first below it, which an attacker cannot observe; "paired" are
medians of ratios over victims that both attacks solved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import commit, hardware
from torch import Tensor

import privot
from privot.attacks.inversion import rgap
from privot.attacks.inversion.attacks import INVERSION_ATTACKS, InversionAttack, invert
from privot.attacks.inversion.cramer_rao import compute_cramer_rao_bound
from privot.attacks.inversion.defense_guarantee import DpSgdRun, derive_defense_guarantee
from privot.attacks.inversion.defenses import ClippingDefense, NoiseDefense
from privot.attacks.inversion.gauss_newton import refine_by_gauss_newton
from privot.attacks.inversion.labels import recover_labels
from privot.attacks.inversion.models import INVERSION_MODELS, sample_initial_weights
from privot.attacks.inversion.problem import Problem, Reconstruction
from privot.attacks.inversion.scoring import ReconstructionScores, score_reconstruction
from privot.attacks.inversion.search_phase import SearchPhase
from privot.privacy.guarantee import Guarantee
from privot.runtime import Runtime
from privot.runtime.preview import render_image_grid

SEED = {  # of Wang et al., Table 2: success of DLG and WDLG
    "mnist": (0.82, 0.86),
    "fashion-mnist": (0.84, 0.88),
    "svhn": (0.79, 0.86),
    "cifar100": (0.76, 0.81),
}
TABLE3 = {  # DLG, R-GAP, WDLG
    ("lenet", "mnist"): (0.0037, 0.0012, 0.0014),
    ("cnn6", "mnist"): (0.015, 0.0068, 0.0057),
    ("lenet", "cifar10"): (0.013, 0.0048, 0.0045),
    ("cnn6", "cifar10"): (0.0513, 0.0258, 0.028),
}
SPLIT = {
    "svhn": "train"
}  # no more of it is in the subset at hand; nets have learned nothing, so either does
NEVER = 10**9
SHOWN = 6  # victims in a picture
NOISES = [1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0, 2.0, 4.0, 10.0]  # of the curve


@dataclass
class Case:
    """Victims with what is behind their updates; ``given`` are labels that the attacker has (one logit tells none)."""

    problem: Problem
    images: Tensor
    labels: Tensor
    given: Tensor | None


def case(
    data: str,
    asked: argparse.Namespace,
    net: str = "lenet",
    batch: int = 1,
    defence: Any = None,
    count: int | None = None,
) -> Case:
    dataset = privot.load(data, SPLIT.get(data, "test"), public=True)
    count = count or asked.images
    assert isinstance(dataset, privot.Public)
    generator = torch.Generator().manual_seed(asked.seed)
    images, labels = dataset.records()
    order = torch.randperm(len(labels), generator=generator)[: count * batch]
    if batch > 1:  # distinct labels in a batch, as the papers have it
        order = torch.cat([_distinct(labels, batch, generator) for _ in range(count)])
    device = Runtime(asked.device).torch_device
    one = net == "cnn6"
    images, labels = (
        each[order].unflatten(0, (count, batch)).to(device)
        for each in (images, labels % 2 if one else labels)
    )
    make, loss, reach = INVERSION_MODELS[net]
    made = make(dataset.spec.shape, 1 if one else dataset.spec.num_classes).to(device)
    weights = {
        name: each.to(device)
        for name, each in sample_initial_weights(made, count, generator, reach).items()
    }
    problem = Problem.from_images(made, loss, images, labels, weights, defence, generator=generator)
    return Case(problem, images, labels, labels if one else None)


def _distinct(labels: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    classes = torch.randperm(int(labels.max()) + 1, generator=generator)[:batch]
    places = [(labels == label).nonzero()[:, 0] for label in classes]
    return torch.stack([each[torch.randint(len(each), (), generator=generator)] for each in places])


@dataclass
class Run:
    found: Reconstruction
    judged: ReconstructionScores
    first: Tensor  # [N], evaluations until the error is under the threshold
    seconds: float

    def cells(self) -> list[str]:
        known = self.first[self.first < NEVER].double()
        return [
            f"{self.judged.leak_rate:.2f} ({self.judged.leak_rate_low:.2f} to {self.judged.leak_rate_high:.2f})",
            f"{float(self.judged.label_accuracy.mean()):.2f}",
            f"{known.median():.0f}" if len(known) else "–",
            f"{self.found.steps.double().mean():.0f}",
            f"{self.judged.mse.median():.2g}",
            f"{self.seconds:.1f}",
        ]


HEAD = ("success", "labels", "to threshold", "steps", "median MSE", "seconds")


def run(each: Case, attack: InversionAttack, asked: argparse.Namespace, restarts: int = 0) -> Run:
    first = torch.full((len(each.images),), NEVER, device=each.images.device)

    def watch(step: int, which: Tensor, images: Tensor) -> None:
        close = (images.clamp(0, 1) - each.images[which]).square().flatten(1).mean(
            1
        ) < asked.threshold
        first[which] = torch.where(close, first[which].clamp(max=step), first[which])

    synchronize(each.images.device)
    start = time.perf_counter()
    found = invert(
        each.problem, attack, labels=each.given, restarts=restarts, seed=asked.seed, callback=watch
    )
    synchronize(each.images.device)
    return Run(
        found,
        score_reconstruction(found, each.images, each.labels, asked.threshold),
        first,
        time.perf_counter() - start,
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def head(*cells: str) -> None:
    print()
    row(*cells)
    row(*("---" for _ in cells))


def paired(one: Run, two: Run) -> str:
    """How many times the evaluations of ``two`` ``one`` needs, the median over victims that both solved."""
    both = (one.first < NEVER) & (two.first < NEVER)
    return (
        f"{(one.first[both] / two.first[both]).median():.2f} ({int(both.sum())} pairs)"
        if both.any()
        else "–"
    )


def settings(colour: bool) -> dict[str, tuple[str, int, float, int]]:
    """Optimiser, evaluations, rate, restarts: the paper's; the published code's; the best found here."""
    many = 4000 if colour else 1000
    short = {} if colour else {"L-BFGS 0.1": ("lbfgs", many, 0.1, 0)}  # too slow for colour
    published = {"Adam 0.1": ("adam", 500, 0.1, 0), "L-BFGS 1": ("lbfgs", many, 1.0, 0)}
    return published | short | {"L-BFGS search": ("lbfgs-search", many, 1.0, 2)}


def table2(asked: argparse.Namespace) -> None:
    head("data", "optimiser", "attack", *HEAD, "paper")
    for data in asked.data:
        each = case(data, asked)
        for name, (optimiser, steps, rate, restarts) in settings(each.images.shape[2] == 3).items():
            if asked.optimiser and not name.lower().startswith(tuple(asked.optimiser)):
                continue
            runs = {}
            for attack in ("dlg", "idlg", "wdlg"):
                runs[attack] = run(
                    each,
                    INVERSION_ATTACKS[attack].replace_optimizer(
                        optimiser, asked.steps or steps, rate
                    ),
                    asked,
                    restarts,
                )
                theirs = dict(zip(("dlg", "wdlg"), SEED.get(data, ()), strict=False)).get(
                    attack, "–"
                )
                row(
                    data,
                    f"{name}, {restarts} restarts" if restarts else name,
                    attack,
                    *runs[attack].cells(),
                    theirs,
                )
            gains = f"DLG/WDLG {paired(runs['dlg'], runs['wdlg'])}, iDLG/WDLG {paired(runs['idlg'], runs['wdlg'])}"
            row(data, name, "paired", gains, *("" for _ in range(len(HEAD))))


def optimisers(asked: argparse.Namespace) -> None:
    """DLG, iDLG and WDLG under each optimiser, and the hybrid."""
    head("data", "optimiser", "attack", *HEAD)
    for data in asked.data:
        each = case(data, asked)
        for optimiser, steps, rate in (
            ("lbfgs", 1000, 1.0),
            ("lbfgs", 1000, 0.1),
            ("lbfgs-search", 1000, 1.0),
            ("adam", 500, 0.1),
        ):
            for attack in ("dlg", "idlg", "wdlg"):
                row(
                    data,
                    f"{optimiser} {rate:g}",
                    attack,
                    *run(
                        each,
                        INVERSION_ATTACKS[attack].replace_optimizer(optimiser, steps, rate),
                        asked,
                    ).cells(),
                )
        row(
            data,
            "Adam, then L-BFGS",
            "hybrid",
            *run(each, INVERSION_ATTACKS["hybrid"], asked).cells(),
        )


def variants(asked: argparse.Namespace) -> None:
    """Which readings of WDLG reconstruct."""
    head("data", "attack", "what it is", *HEAD)
    for data in asked.data:
        each = case(data, asked)
        for name, attack in INVERSION_ATTACKS.items():
            if name.startswith("wdlg") or name == "cosine":
                shown = attack.replace_optimizer(attack.phases[0].optimizer, asked.steps)
                row(data, name, attack.title, *run(each, shown, asked).cells())


def table3(asked: argparse.Namespace) -> None:
    head("net", "data", "attack", "mean MSE", "median MSE", "worst MSE", "seconds", "paper")
    for (net, data), theirs in TABLE3.items():
        if data not in asked.data:
            continue
        each = case(data, asked, net)
        steps = asked.steps or (1000 if each.images.shape[2] == 1 else 4000)
        is_lenet = net == "lenet"
        dlg = partial(_searched, each, "dlg" if is_lenet else "idlg", steps, asked)
        ways: dict[str, Callable[[], tuple[ReconstructionScores, float]]] = {
            "DLG" if is_lenet else "DLG, label known": dlg,
            "R-GAP": partial(_closed, each, asked),
            "WDLG": partial(_searched, each, "wdlg", steps, asked),
        }
        for (name, way), figure in zip(ways.items(), theirs, strict=True):
            judged, took = way()
            row(
                net,
                data,
                name,
                f"{judged.mse.mean():.2g}",
                f"{judged.mse.median():.2g}",
                f"{judged.mse.max():.2g}",
                f"{took:.1f}",
                figure,
            )


def _searched(
    each: Case, attack: str, steps: int, asked: argparse.Namespace
) -> tuple[ReconstructionScores, float]:
    done = run(each, INVERSION_ATTACKS[attack].replace_optimizer("lbfgs-search", steps), asked)
    return done.judged, done.seconds


def _closed(each: Case, asked: argparse.Namespace) -> tuple[ReconstructionScores, float]:
    start = time.perf_counter()
    found = rgap.reconstruct_by_rgap(each.problem)
    synchronize(each.images.device)
    return score_reconstruction(
        found, each.images, each.labels, asked.threshold
    ), time.perf_counter() - start


def table4(asked: argparse.Namespace) -> None:
    head(
        "data",
        "objective",
        "batch",
        "labels",
        "loss",
        "mean MSE",
        "median MSE",
        "images under threshold",
    )
    for data in asked.data:
        for batch in (1, 4):
            each = case(data, asked, batch=batch)
            for name, attack in (("D_DLG", "idlg"), ("D_EM", "wdlg")):
                done = run(
                    each,
                    INVERSION_ATTACKS[attack].replace_optimizer(
                        "lbfgs-search", asked.steps or 4000
                    ),
                    asked,
                )
                cells = (
                    f"{done.found.residual.median():.2g}",
                    f"{done.judged.mse.mean():.2g}",
                    f"{done.judged.mse.median():.2g}",
                )
                share = (done.judged.mse < asked.threshold).double().mean()
                row(
                    data,
                    name,
                    batch,
                    f"{float(done.judged.label_accuracy.mean()):.2f}",
                    *cells,
                    f"{share:.2f}",
                )


def table5(asked: argparse.Namespace) -> None:
    head("data", "attack", "loss", *HEAD)
    for data in asked.data:
        each = case(data, asked)
        for name, attack in (("DLG", "dlg"), ("+ label", "idlg"), ("+ Wasserstein", "wdlg")):
            done = run(
                each,
                INVERSION_ATTACKS[attack].replace_optimizer("lbfgs", asked.steps or 4000),
                asked,
            )
            row(data, name, f"{done.found.residual.median():.2g}", *done.cells())


def curve(asked: argparse.Namespace) -> None:
    """Section 4.5: noise against what is left, next to the epsilon of a training run with that multiplier.

    The same victims at every noise, all of them as one computation; the Cramér-Rao bound is of the first of them.
    """
    training = DpSgdRun(60_000, 256, 1000)
    drawn_as = f"Poisson draws of {training.batch_size} of {training.dataset_size}, delta {training.delta:g}, one record more or less"
    print(f"\nepsilon: {training.steps} steps of DP-SGD, {drawn_as}")
    head(
        "data",
        "clip",
        "noise",
        "std of an entry",
        "rms of an entry",
        "PSNR",
        "SSIM",
        "success",
        "labels",
        f"PSNR, the first {asked.num_checked}",
        "their Cramér-Rao bound",
        "epsilon",
    )
    scales = NOISES if not asked.clip else [each / 10 for each in NOISES[:2]] + NOISES
    defences = [
        ClippingDefense(asked.clip, each) if asked.clip else NoiseDefense(each)
        for each in asked.std or scales
    ]
    for data in asked.data:
        cases = [case(data, asked, defence=each) for each in defences]
        first = cases[0]
        plain = case(data, asked)
        steps = asked.steps or (4000 if asked.clip or first.images.shape[2] == 3 else 1000)
        everyone = torch.arange(asked.images, device=first.images.device).repeat(len(cases))
        update = {
            name: torch.cat([each.problem.update[name] for each in cases])
            for name in first.problem.update
        }
        whole = Case(
            replace(first.problem.select(everyone), update=update),
            first.images[everyone],
            first.labels[everyone],
            None,
        )
        objective = "cosine" if asked.clip else "squared"
        done = run(
            whole,
            InversionAttack(objective, (SearchPhase(objective, "lbfgs-search", steps),)),
            asked,
            restarts=1,
        )
        label_accuracy = (
            (recover_labels(whole.problem) == whole.labels).double().view(len(cases), -1)
        )
        some = torch.arange(min(asked.num_checked, asked.images), device=first.images.device)
        sure = compute_cramer_rao_bound(
            plain.problem.select(some), first.images[some], first.labels[some], defences[0]
        )
        psnr, ssim, mse = (
            each.double().view(len(cases), -1)
            for each in (done.judged.psnr, done.judged.ssim, done.judged.mse)
        )
        for place, defence in enumerate(defences):
            sent = torch.cat([value.flatten() for value in cases[place].problem.update.values()])
            claim = derive_defense_guarantee(defence, training)
            row(
                data,
                asked.clip or "none",
                f"{getattr(defence, 'noise_multiplier', defence.noise_std):g}",
                f"{defence.noise_std:g}",
                f"{sent.square().mean().sqrt():.2g}",
                f"{psnr[place].mean():.1f}",
                f"{ssim[place].mean():.3f}",
                f"{(mse[place] < asked.threshold).double().mean():.2f}",
                f"{label_accuracy[place].mean():.2f}",
                f"{psnr[place][: len(some)].median():.1f}",
                f"{sure.predict_psnr(defence.noise_std).median():.1f}",
                f"{claim.epsilon:.3g}" if isinstance(claim, Guarantee) else "none",
            )
        print(f"{len(everyone)} searches as one: {done.seconds:.0f} s", flush=True)
        if asked.pictures:
            few = min(SHOWN, asked.images)
            strips = [
                first.images[:few],
                *done.found.images.view(len(cases), -1, *first.images.shape[1:])[:, :few],
            ]
            asked.pictures.mkdir(parents=True, exist_ok=True)
            render_image_grid(torch.cat(strips).flatten(0, 1).clamp(0, 1).cpu(), few).save(
                asked.pictures / f"{data}.png"
            )


def speed(asked: argparse.Namespace) -> None:
    head(
        "data",
        "attack",
        "victims",
        "all as one, s",
        "alone, s each",
        "one after another, s (from those)",
        "times as fast",
    )
    for data in asked.data:
        each = case(data, asked)
        attack = INVERSION_ATTACKS["wdlg"].replace_optimizer("lbfgs", asked.steps or 1000)
        run(
            Case(
                each.problem.select(torch.arange(2, device=each.images.device)),
                each.images[:2],
                each.labels[:2],
                None,
            ),
            attack.replace_optimizer("lbfgs", 20),
            asked,
        )
        whole = run(each, attack, asked)
        alone = []
        for place in range(asked.alone):
            only = torch.tensor([place], device=each.images.device)
            alone.append(
                run(
                    Case(each.problem.select(only), each.images[only], each.labels[only], None),
                    attack,
                    asked,
                ).seconds
            )
        mean = sum(alone) / len(alone)
        total = mean * asked.images
        row(
            data,
            "wdlg, L-BFGS 1",
            asked.images,
            f"{whole.seconds:.1f}",
            f"{mean:.2f} (of {len(alone)})",
            f"{total:.0f}",
            f"{total / whole.seconds:.0f}",
        )


def bound(asked: argparse.Namespace) -> None:
    head(
        "data",
        "noise std",
        "predicted MSE",
        "attack",
        "measured MSE",
        "measured / predicted",
        "seconds for the bounds",
    )
    hybrid = InversionAttack(
        "hybrid",
        (
            SearchPhase("norm", "adam", 100, 0.1),
            SearchPhase("squared", "lbfgs-search", asked.steps or 900),
        ),
    )
    for data in asked.data:
        clean = case(data, asked)
        start = time.perf_counter()
        sure = compute_cramer_rao_bound(
            clean.problem, clean.images, clean.labels
        )  # of victim and net alone: one serves every noise
        synchronize(clean.images.device)
        took = time.perf_counter() - start
        for std in asked.std or (1e-3, 3e-3, 1e-2):
            each = case(data, asked, defence=NoiseDefense(std))
            predicted = sure.predict_mse(std)
            searched = run(each, hybrid, asked)
            best = score_reconstruction(
                refine_by_gauss_newton(each.problem, searched.found),
                each.images,
                each.labels,
                asked.threshold,
            )
            for name, measured in (
                ("hybrid", searched.judged.mse[:, 0]),
                ("hybrid, then Gauss-Newton", best.mse[:, 0]),
            ):
                ratio = (measured / predicted).median()
                row(
                    data,
                    f"{std:g}",
                    f"{predicted.median():.3g}",
                    name,
                    f"{measured.median():.3g}",
                    f"{ratio:.2f}",
                    f"{took:.1f}",
                )


PARTS: dict[str, tuple[Callable[[argparse.Namespace], None], Iterable[str]]] = {
    "table2": (table2, SEED),
    "table3": (table3, ("mnist", "cifar10")),
    "table4": (table4, ("cifar10",)),
    "table5": (table5, ("cifar10",)),
    "optimisers": (optimisers, ("fashion-mnist",)),
    "variants": (variants, ("fashion-mnist",)),
    "curve": (curve, ("fashion-mnist", "svhn", "cifar100")),
    "speed": (speed, ("fashion-mnist",)),
    "bound": (bound, ("fashion-mnist",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data", nargs="+", help="else the part's own")
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument(
        "--steps", type=int, help="gradient evaluations at most; else the part's own"
    )
    parser.add_argument("--optimiser", nargs="+", help="of table2: adam, l-bfgs or 'l-bfgs search'")
    parser.add_argument("--clip", type=float, help="of curve: noise is then a multiplier")
    parser.add_argument(
        "--std",
        nargs="+",
        type=float,
        help="of bound and curve: the noise; else the part's own",
    )
    parser.add_argument(
        "--num-checked", type=int, default=16, help="of curve: victims with a Cramér-Rao bound"
    )
    parser.add_argument(
        "--pictures",
        type=Path,
        help="of curve: a folder; true images above, below what is found at each noise",
    )
    parser.add_argument(
        "--alone", type=int, default=3, help="of speed: victims that are attacked one after another"
    )
    parser.add_argument("--threshold", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    function, own = PARTS[asked.part]
    asked.data = asked.data or list(own)
    print(
        f"\n{datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, commit {commit()}, {asked.images} victims",
        flush=True,
    )
    function(asked)


if __name__ == "__main__":
    main()
