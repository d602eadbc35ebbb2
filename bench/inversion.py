"""Gradient inversion: the tables of Wang et al. (2023, "WDLG"), noise, speed, and the bound.

Prints Markdown rows; "bound" is the Cramér-Rao bound, compared with attacks.

    python bench/inversion.py table2 --data mnist fashion-mnist svhn cifar100 --images 300
    python bench/inversion.py table3 --images 20     (also table4, table5)
    python bench/inversion.py variants --images 20
    python bench/inversion.py curve --data fashion-mnist svhn cifar100 --images 50 [--clip 1]
    python bench/inversion.py speed --images 300 --sequential 3
    python bench/inversion.py bound --images 50
    python bench/inversion.py optimizers --images 100

Each part runs alone; on one CPU thread use --images 8. Records are of the test split (of SVHN the
training split), sampled by the seed; each victim has its own network. Success is a pixel MSE below
--threshold after clamping, with its Clopper-Pearson interval (95 %). "To threshold" counts gradient
evaluations until the true error is first below it, which an attacker cannot observe; "paired" are
medians of ratios over victims that both attacks solved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import format_environment, load_public, make_parser, print_header, print_row
from torch import Tensor

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

TABLE2 = {  # success of DLG and WDLG in Table 2 of Wang et al.
    "mnist": (0.82, 0.86),
    "fashion-mnist": (0.84, 0.88),
    "svhn": (0.79, 0.86),
    "cifar100": (0.76, 0.81),
}
TABLE3 = {  # MSE of DLG, R-GAP and WDLG in Table 3
    ("lenet", "mnist"): (0.0037, 0.0012, 0.0014),
    ("cnn6", "mnist"): (0.015, 0.0068, 0.0057),
    ("lenet", "cifar10"): (0.013, 0.0048, 0.0045),
    ("cnn6", "cifar10"): (0.0513, 0.0258, 0.028),
}
# The subset of SVHN has only training images. The networks are untrained, so any split will do.
SPLIT = {"svhn": "train"}
NEVER = 10**9
SHOWN_VICTIMS = 6  # victims in an image grid
NOISE_LEVELS = [1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0, 2.0, 4.0, 10.0]  # of the curve


@dataclass
class Case:
    """Victims with their true images and labels.

    Attributes:
        problem: What the attacker sees.
        images: The true images.
        labels: The true labels.
        known_labels: Labels that the attacker has; one logit does not reveal them.
    """

    problem: Problem
    images: Tensor
    labels: Tensor
    known_labels: Tensor | None


def make_case(
    data: str,
    options: argparse.Namespace,
    net: str = "lenet",
    batch_size: int = 1,
    defense: Any = None,
) -> Case:
    """Sample victims and compute their updates.

    Args:
        data: Name of the dataset.
        options: The command line.
        net: Name of the network.
        batch_size: Records of a victim.
        defense: Defense of the updates.

    Returns:
        The victims.
    """
    dataset = load_public(data, SPLIT.get(data, "test"))
    count = options.images
    generator = torch.Generator().manual_seed(options.seed)
    images, labels = dataset.records()
    order = torch.randperm(len(labels), generator=generator)[: count * batch_size]
    if batch_size > 1:  # distinct labels in a batch, as in the papers
        order = torch.cat([sample_distinct(labels, batch_size, generator) for _ in range(count)])
    device = Runtime(options.device).torch_device
    is_binary = net == "cnn6"
    images, labels = (
        values[order].unflatten(0, (count, batch_size)).to(device)
        for values in (images, labels % 2 if is_binary else labels)
    )
    build_model, loss, weight_range = INVERSION_MODELS[net]
    num_outputs = 1 if is_binary else dataset.spec.num_classes
    model = build_model(dataset.spec.shape, num_outputs).to(device)
    initial_weights = sample_initial_weights(model, count, generator, weight_range)
    weights = {name: values.to(device) for name, values in initial_weights.items()}
    problem = Problem.from_images(
        model, loss, images, labels, weights, defense, generator=generator
    )
    return Case(problem, images, labels, labels if is_binary else None)


def sample_distinct(labels: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
    """Sample the indices of records with distinct labels."""
    classes = torch.randperm(int(labels.max()) + 1, generator=generator)[:batch_size]
    candidates = [(labels == label).nonzero()[:, 0] for label in classes]
    return torch.stack(
        [indices[torch.randint(len(indices), (), generator=generator)] for indices in candidates]
    )


@dataclass
class Run:
    """An attack on all victims of a case.

    Attributes:
        reconstruction: The reconstructions.
        scores: Their scores.
        first_success: Evaluations until the error is below the threshold: [victims].
        seconds: Wall time.
    """

    reconstruction: Reconstruction
    scores: ReconstructionScores
    first_success: Tensor
    seconds: float

    def format_cells(self) -> list[str]:
        """Format the cells of `COLUMNS`."""
        scores = self.scores
        solved = self.first_success[self.first_success < NEVER].double()
        return [
            f"{scores.leak_rate:.2f} ({scores.leak_rate_low:.2f} to {scores.leak_rate_high:.2f})",
            f"{float(scores.label_accuracy.mean()):.2f}",
            f"{solved.median():.0f}" if len(solved) else "–",
            f"{self.reconstruction.steps.double().mean():.0f}",
            f"{scores.mse.median():.2g}",
            f"{self.seconds:.1f}",
        ]


COLUMNS = ("success", "labels", "to threshold", "steps", "median MSE", "seconds")


def run_attack(
    case: Case, attack: InversionAttack, options: argparse.Namespace, restarts: int = 0
) -> Run:
    """Run an attack on all victims together."""
    first = torch.full((len(case.images),), NEVER, device=case.images.device)

    def watch(step: int, victims: Tensor, images: Tensor) -> None:
        errors = (images.clamp(0, 1) - case.images[victims]).square().flatten(1).mean(1)
        steps = first[victims]
        first[victims] = torch.where(errors < options.threshold, steps.clamp(max=step), steps)

    synchronize(case.images.device)
    start = time.perf_counter()
    reconstruction = invert(
        case.problem,
        attack,
        labels=case.known_labels,
        restarts=restarts,
        seed=options.seed,
        callback=watch,
    )
    synchronize(case.images.device)
    seconds = time.perf_counter() - start
    scores = score_reconstruction(reconstruction, case.images, case.labels, options.threshold)
    return Run(reconstruction, scores, first, seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_table(*columns: str) -> None:
    """Print an empty line and the header of a table."""
    print()
    print_header(*columns)


def compare_pairs(run: Run, other: Run) -> str:
    """Format the median ratio of evaluations over the victims that both attacks solved."""
    both = (run.first_success < NEVER) & (other.first_success < NEVER)
    if not both.any():
        return "–"
    ratio = (run.first_success[both] / other.first_success[both]).median()
    return f"{ratio:.2f} ({int(both.sum())} pairs)"


def list_optimizers(is_color: bool) -> dict[str, tuple[str, int, float, int]]:
    """List optimizer, evaluations, learning rate and restarts.

    These are of the paper, of the published code, and the best of our search.
    """
    many = 4000 if is_color else 1000
    short = {} if is_color else {"L-BFGS 0.1": ("lbfgs", many, 0.1, 0)}  # too slow for color
    published = {"Adam 0.1": ("adam", 500, 0.1, 0), "L-BFGS 1": ("lbfgs", many, 1.0, 0)}
    return published | short | {"L-BFGS search": ("lbfgs-search", many, 1.0, 2)}


def table2(options: argparse.Namespace) -> None:
    """Success of DLG, iDLG and WDLG."""
    start_table("data", "optimizer", "attack", *COLUMNS, "paper")
    for data in options.data:
        case = make_case(data, options)
        for name, (optimizer, steps, rate, restarts) in list_optimizers(
            case.images.shape[2] == 3
        ).items():
            if options.optimizer and not name.lower().startswith(tuple(options.optimizer)):
                continue
            runs = {}
            for attack in ("dlg", "idlg", "wdlg"):
                runs[attack] = run_attack(
                    case,
                    INVERSION_ATTACKS[attack].replace_optimizer(
                        optimizer, options.steps or steps, rate
                    ),
                    options,
                    restarts,
                )
                theirs = dict(zip(("dlg", "wdlg"), TABLE2.get(data, ()), strict=False)).get(
                    attack, "–"
                )
                print_row(
                    data,
                    f"{name}, {restarts} restarts" if restarts else name,
                    attack,
                    *runs[attack].format_cells(),
                    theirs,
                )
            dlg_ratio, idlg_ratio = (
                compare_pairs(runs[attack], runs["wdlg"]) for attack in ("dlg", "idlg")
            )
            gains = f"DLG/WDLG {dlg_ratio}, iDLG/WDLG {idlg_ratio}"
            print_row(data, name, "paired", gains, *("" for _ in range(len(COLUMNS))))


def optimizers(options: argparse.Namespace) -> None:
    """DLG, iDLG and WDLG under each optimizer, and the hybrid."""
    start_table("data", "optimizer", "attack", *COLUMNS)
    for data in options.data:
        case = make_case(data, options)
        for optimizer, steps, rate in (
            ("lbfgs", 1000, 1.0),
            ("lbfgs", 1000, 0.1),
            ("lbfgs-search", 1000, 1.0),
            ("adam", 500, 0.1),
        ):
            for attack in ("dlg", "idlg", "wdlg"):
                print_row(
                    data,
                    f"{optimizer} {rate:g}",
                    attack,
                    *run_attack(
                        case,
                        INVERSION_ATTACKS[attack].replace_optimizer(optimizer, steps, rate),
                        options,
                    ).format_cells(),
                )
        print_row(
            data,
            "Adam, then L-BFGS",
            "hybrid",
            *run_attack(case, INVERSION_ATTACKS["hybrid"], options).format_cells(),
        )


def variants(options: argparse.Namespace) -> None:
    """Which interpretations of WDLG reconstruct images."""
    start_table("data", "attack", "what it is", *COLUMNS)
    for data in options.data:
        case = make_case(data, options)
        for name, attack in INVERSION_ATTACKS.items():
            if name.startswith("wdlg") or name == "cosine":
                shown = attack.replace_optimizer(attack.phases[0].optimizer, options.steps)
                print_row(
                    data, name, attack.title, *run_attack(case, shown, options).format_cells()
                )


def table3(options: argparse.Namespace) -> None:
    """MSE of DLG, R-GAP and WDLG."""
    start_table("net", "data", "attack", "mean MSE", "median MSE", "worst MSE", "seconds", "paper")
    for (net, data), theirs in TABLE3.items():
        if data not in options.data:
            continue
        case = make_case(data, options, net)
        steps = options.steps or (1000 if case.images.shape[2] == 1 else 4000)
        is_lenet = net == "lenet"
        dlg = partial(search_images, case, "dlg" if is_lenet else "idlg", steps, options)
        attacks: dict[str, Callable[[], tuple[ReconstructionScores, float]]] = {
            "DLG" if is_lenet else "DLG with known label": dlg,
            "R-GAP": partial(solve_by_rgap, case, options),
            "WDLG": partial(search_images, case, "wdlg", steps, options),
        }
        for (name, attack), figure in zip(attacks.items(), theirs, strict=True):
            scores, seconds = attack()
            print_row(
                net,
                data,
                name,
                f"{scores.mse.mean():.2g}",
                f"{scores.mse.median():.2g}",
                f"{scores.mse.max():.2g}",
                f"{seconds:.1f}",
                figure,
            )


def search_images(
    case: Case, attack: str, steps: int, options: argparse.Namespace
) -> tuple[ReconstructionScores, float]:
    """Run an attack by L-BFGS with backtracking."""
    run = run_attack(
        case, INVERSION_ATTACKS[attack].replace_optimizer("lbfgs-search", steps), options
    )
    return run.scores, run.seconds


def solve_by_rgap(case: Case, options: argparse.Namespace) -> tuple[ReconstructionScores, float]:
    """Reconstruct by R-GAP, which solves linear equations."""
    start = time.perf_counter()
    reconstruction = rgap.reconstruct_by_rgap(case.problem)
    synchronize(case.images.device)
    seconds = time.perf_counter() - start
    scores = score_reconstruction(reconstruction, case.images, case.labels, options.threshold)
    return scores, seconds


def table4(options: argparse.Namespace) -> None:
    """The objectives for batches of images."""
    start_table(
        "data",
        "objective",
        "batch",
        "labels",
        "loss",
        "mean MSE",
        "median MSE",
        "images under threshold",
    )
    for data in options.data:
        for batch in (1, 4):
            case = make_case(data, options, batch_size=batch)
            for name, attack in (("D_DLG", "idlg"), ("D_EM", "wdlg")):
                run = run_attack(
                    case,
                    INVERSION_ATTACKS[attack].replace_optimizer(
                        "lbfgs-search", options.steps or 4000
                    ),
                    options,
                )
                cells = (
                    f"{run.reconstruction.residual.median():.2g}",
                    f"{run.scores.mse.mean():.2g}",
                    f"{run.scores.mse.median():.2g}",
                )
                share = (run.scores.mse < options.threshold).double().mean()
                print_row(
                    data,
                    name,
                    batch,
                    f"{float(run.scores.label_accuracy.mean()):.2f}",
                    *cells,
                    f"{share:.2f}",
                )


def table5(options: argparse.Namespace) -> None:
    """The ablation of WDLG."""
    start_table("data", "attack", "loss", *COLUMNS)
    for data in options.data:
        case = make_case(data, options)
        for name, attack in (("DLG", "dlg"), ("+ label", "idlg"), ("+ Wasserstein", "wdlg")):
            run = run_attack(
                case,
                INVERSION_ATTACKS[attack].replace_optimizer("lbfgs", options.steps or 4000),
                options,
            )
            print_row(
                data, name, f"{run.reconstruction.residual.median():.2g}", *run.format_cells()
            )


def curve(options: argparse.Namespace) -> None:
    """Section 4.5: reconstruction against noise, with the epsilon of a training run of that noise.

    The victims are the same at every noise, in one batch. The Cramér-Rao bound is of the first.
    """
    training = DpSgdRun(60_000, 256, 1000)
    sampling = (
        f"Poisson samples of {training.batch_size} of {training.dataset_size}, delta "
        f"{training.delta:g}, one record more or less"
    )
    print(f"\nepsilon: {training.steps} steps of DP-SGD, {sampling}")
    start_table(
        "data",
        "clip",
        "noise",
        "std of an entry",
        "rms of an entry",
        "PSNR",
        "SSIM",
        "success",
        "labels",
        f"PSNR, the first {options.num_checked}",
        "Cramér-Rao bound of these",
        "epsilon",
    )
    levels = [level / 10 for level in NOISE_LEVELS[:2]] if options.clip else []
    levels += NOISE_LEVELS
    defenses = [
        ClippingDefense(options.clip, level) if options.clip else NoiseDefense(level)
        for level in options.std or levels
    ]
    for data in options.data:
        cases = [make_case(data, options, defense=defense) for defense in defenses]
        first = cases[0]
        plain = make_case(data, options)
        steps = options.steps or (4000 if options.clip or first.images.shape[2] == 3 else 1000)
        everyone = torch.arange(options.images, device=first.images.device).repeat(len(cases))
        update = {
            name: torch.cat([case.problem.update[name] for case in cases])
            for name in first.problem.update
        }
        whole = Case(
            replace(first.problem.select(everyone), update=update),
            first.images[everyone],
            first.labels[everyone],
            None,
        )
        objective = "cosine" if options.clip else "squared"
        run = run_attack(
            whole,
            InversionAttack(objective, (SearchPhase(objective, "lbfgs-search", steps),)),
            options,
            restarts=1,
        )
        label_accuracy = (
            (recover_labels(whole.problem) == whole.labels).double().view(len(cases), -1)
        )
        some = torch.arange(min(options.num_checked, options.images), device=first.images.device)
        bound_result = compute_cramer_rao_bound(
            plain.problem.select(some), first.images[some], first.labels[some], defenses[0]
        )
        psnr, ssim, mse = (
            values.double().view(len(cases), -1)
            for values in (run.scores.psnr, run.scores.ssim, run.scores.mse)
        )
        for index, defense in enumerate(defenses):
            sent = torch.cat([value.flatten() for value in cases[index].problem.update.values()])
            guarantee = derive_defense_guarantee(defense, training)
            print_row(
                data,
                options.clip or "none",
                f"{getattr(defense, 'noise_multiplier', defense.noise_std):g}",
                f"{defense.noise_std:g}",
                f"{sent.square().mean().sqrt():.2g}",
                f"{psnr[index].mean():.1f}",
                f"{ssim[index].mean():.3f}",
                f"{(mse[index] < options.threshold).double().mean():.2f}",
                f"{label_accuracy[index].mean():.2f}",
                f"{psnr[index][: len(some)].median():.1f}",
                f"{bound_result.predict_psnr(defense.noise_std).median():.1f}",
                f"{guarantee.epsilon:.3g}" if isinstance(guarantee, Guarantee) else "none",
            )
        print(f"{len(everyone)} searches in one batch: {run.seconds:.0f} s", flush=True)
        if options.image_folder:
            few = min(SHOWN_VICTIMS, options.images)
            strips = [
                first.images[:few],
                *run.reconstruction.images.view(len(cases), -1, *first.images.shape[1:])[:, :few],
            ]
            options.image_folder.mkdir(parents=True, exist_ok=True)
            render_image_grid(torch.cat(strips).flatten(0, 1).clamp(0, 1).cpu(), few).save(
                options.image_folder / f"{data}.png"
            )


def speed(options: argparse.Namespace) -> None:
    """Time all victims in one batch, and some one after another."""
    start_table(
        "data",
        "attack",
        "victims",
        "in one batch, s",
        "alone, s per victim",
        "one after another, s (extrapolated)",
        "times as fast",
    )
    for data in options.data:
        case = make_case(data, options)
        attack = INVERSION_ATTACKS["wdlg"].replace_optimizer("lbfgs", options.steps or 1000)
        run_attack(
            Case(
                case.problem.select(torch.arange(2, device=case.images.device)),
                case.images[:2],
                case.labels[:2],
                None,
            ),
            attack.replace_optimizer("lbfgs", 20),
            options,
        )
        whole = run_attack(case, attack, options)
        alone = []
        for index in range(options.sequential):
            only = torch.tensor([index], device=case.images.device)
            alone.append(
                run_attack(
                    Case(case.problem.select(only), case.images[only], case.labels[only], None),
                    attack,
                    options,
                ).seconds
            )
        mean = sum(alone) / len(alone)
        total = mean * options.images
        print_row(
            data,
            "wdlg, L-BFGS 1",
            options.images,
            f"{whole.seconds:.1f}",
            f"{mean:.2f} (of {len(alone)})",
            f"{total:.0f}",
            f"{total / whole.seconds:.0f}",
        )


def bound(options: argparse.Namespace) -> None:
    """Compare the Cramér-Rao bound with attacks."""
    start_table(
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
            SearchPhase("squared", "lbfgs-search", options.steps or 900),
        ),
    )
    for data in options.data:
        clean = make_case(data, options)
        start = time.perf_counter()
        bound_result = compute_cramer_rao_bound(
            clean.problem, clean.images, clean.labels
        )  # it depends only on victim and network, so one serves every noise
        synchronize(clean.images.device)
        seconds = time.perf_counter() - start
        for std in options.std or (1e-3, 3e-3, 1e-2):
            case = make_case(data, options, defense=NoiseDefense(std))
            predicted = bound_result.predict_mse(std)
            searched = run_attack(case, hybrid, options)
            best = score_reconstruction(
                refine_by_gauss_newton(case.problem, searched.reconstruction),
                case.images,
                case.labels,
                options.threshold,
            )
            for name, measured in (
                ("hybrid", searched.scores.mse[:, 0]),
                ("hybrid, then Gauss-Newton", best.mse[:, 0]),
            ):
                ratio = (measured / predicted).median()
                print_row(
                    data,
                    f"{std:g}",
                    f"{predicted.median():.3g}",
                    name,
                    f"{measured.median():.3g}",
                    f"{ratio:.2f}",
                    f"{seconds:.1f}",
                )


PARTS: dict[str, tuple[Callable[[argparse.Namespace], None], Iterable[str]]] = {
    "table2": (table2, TABLE2),
    "table3": (table3, ("mnist", "cifar10")),
    "table4": (table4, ("cifar10",)),
    "table5": (table5, ("cifar10",)),
    "optimizers": (optimizers, ("fashion-mnist",)),
    "variants": (variants, ("fashion-mnist",)),
    "curve": (curve, ("fashion-mnist", "svhn", "cifar100")),
    "speed": (speed, ("fashion-mnist",)),
    "bound": (bound, ("fashion-mnist",)),
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--data", nargs="+", help="datasets; default: those of the part")
    parser.add_argument("--images", type=int, default=300, help="number of victims")
    parser.add_argument(
        "--steps",
        type=int,
        help="largest number of gradient evaluations; default: that of the part",
    )
    parser.add_argument("--optimizer", nargs="+", help="table2: adam, l-bfgs or 'l-bfgs search'")
    parser.add_argument("--clip", type=float, help="curve: clip norm; noise is then a multiplier")
    parser.add_argument(
        "--std",
        nargs="+",
        type=float,
        help="bound and curve: noise levels; default: those of the part",
    )
    parser.add_argument(
        "--num-checked", type=int, default=16, help="curve: victims with a Cramér-Rao bound"
    )
    parser.add_argument(
        "--image-folder",
        type=Path,
        help="curve: folder of image grids: true images, then the reconstructions at each noise",
    )
    parser.add_argument(
        "--sequential", type=int, default=3, help="speed: victims attacked one after another"
    )
    parser.add_argument("--threshold", type=float, default=1e-2, help="MSE of a success")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    function, datasets = PARTS[options.part]
    options.data = options.data or list(datasets)
    print(f"\n{format_environment()}, {options.images} victims", flush=True)
    function(options)


if __name__ == "__main__":
    main()
