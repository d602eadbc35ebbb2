"""The membership tables of Dong et al. (2022), "Privacy for Free", with controls, and LiRA curves.

    python bench/membership.py loss --data fashion-mnist --ratio .002 .01 .02 --folder F
    python bench/membership.py loss --data fashion-mnist --set init=real --ratio .002 --folder F
    python bench/membership.py leaks --data celeba --preparations 3 --references 2 \\
        --methods conditional-gan dp-gan@10 sliced-generator@10
    python bench/membership.py roc --out lira.png "DM=F/dm" "random subset=F/subset"
    python bench/membership.py bounds "DM=F/dm" "private set, epsilon 1=F/private"

*loss* makes 10 preparations (a random half of the training images is condensed, and a ConvNet is
trained on the set). It states the advantage of the loss attack, 2 (accuracy - 50 %), as mean and
deviation over them (Table 2): the threshold is chosen on 1,000 members and 1,000 nonmembers and
evaluated on as many others. If sets start from real images, these images are also compared with as
many other members (Table 1). The baseline is a random real subset of the same size, which protects
none of the images in it.

*leaks* runs GAN-Leaks on generators. Each method makes releases from a random half of the training
images (or --size of them), which are attacked with --candidates of its members and as many of the
other half. With --references a third of the images is set aside first, and that many releases of it
calibrate the scores, like the shadow models of the paper. With --null one more release of that
third is attacked with the same candidates, none of whom it has: a null control. *variety* is the
mean distance of two generated images of a class over that of two nonmembers: a collapsed generator
reveals no member, and that is no protection.

*roc* draws the ROC curves of folders of shadows (bench/shadows.py) on log axes; every shadow is
once the victim.

*bounds* is Table 3 with the proved upper bound and the measured lower bound in separate columns.
The lower bound is of LiRA on one victim (the first), by each of OBSERVATIONS with its share of the
error: the threshold is chosen on one half of the candidates, Clopper-Pearson is on the other half,
if candidates of one victim count as independent trials. The paper's empirical budget is the largest
ln(TPR / FPR) over all thresholds with a false positive, which is no bound.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import (
    format_environment,
    load_public,
    make_parser,
    parse_settings,
    print_header,
    print_row,
    select_records,
)

import privot
from privot.attacks.membership import lira
from privot.attacks.membership.checks import check_attack
from privot.attacks.membership.nearest import calibrate_scores
from privot.attacks.membership.target import AttackTarget, MembershipScores
from privot.attacks.shadows.config import PARALLEL_METHODS, ShadowConfig
from privot.attacks.shadows.releases import find_initial_candidates
from privot.attacks.shadows.runner import prepare_shadows
from privot.attacks.shadows.store import ShadowStore
from privot.audit import audit_many_runs, compute_roc, estimate_advantage, estimate_tpr_at_fpr
from privot.data import Public, Sensitive
from privot.methods import make_method
from privot.privacy.guarantee import Guarantee
from privot.release import Release
from privot.runtime import Runtime, ignore_progress
from privot.runtime.preview import render_image_grid

# Of the classifier trained on a release, and of the release itself (pixels and features).
OBSERVATIONS = ("confidence", "pixels", "features")
# Candidates of each side on which the threshold is chosen; it is evaluated on as many others
# (Dong et al., section 5.1).
CANDIDATES_PER_SIDE = 1000


def print_preparations(stage: str, step: int, total: int, **facts: object) -> None:
    """Print the number of finished preparations."""
    if stage == "shadows":
        print(f"    {step} of {total} preparations", flush=True)


def format_deviation(values: Any, digits: int = 2) -> str:
    """Format the mean and the standard deviation of some values."""
    return f"{np.mean(values):.{digits}f} ± {np.std(values):.{digits}f}"


def compute_loss_advantages(
    config: ShadowConfig, store: ShadowStore, use_initial_images: bool
) -> list[float]:
    """Compute the advantage of the loss attack on each victim, in percent.

    Args:
        config: Configuration of the shadows.
        store: The shadows.
        use_initial_images: Whether to attack the real images that sets started from, compared with
            other members.

    Returns:
        The advantages.
    """
    members = store.load_membership()
    scores = store.load_observation("loss")
    advantages = []
    for victim, is_member in enumerate(members):
        rng = np.random.default_rng(victim)
        if use_initial_images:
            inside = find_initial_candidates(config, victim)
            others = np.setdiff1d(np.flatnonzero(is_member), inside)
            outside = rng.permutation(others)[: len(inside)]
        else:
            inside, outside = (
                rng.permutation(np.flatnonzero(mask))[: 2 * CANDIDATES_PER_SIDE]
                for mask in (is_member, ~is_member)
            )
        victim_scores = scores[victim]
        advantage = estimate_advantage(victim_scores[inside], victim_scores[outside], victim)
        advantages.append(100 * advantage.value)
    return advantages


def run_loss(options: argparse.Namespace) -> None:
    """Print the advantage of the loss attack for each dataset, method and ratio."""
    runtime = Runtime(options.device)
    print(f"\n{format_environment()}\n")
    print_header(
        "data",
        "method",
        "images a class",
        "settings",
        "preparations",
        "accuracy",
        "attacked images",
        "advantage %",
        "seconds",
    )
    progress = print_preparations if options.verbose else ignore_progress
    runs = [
        (data, method, ratio)
        for data in options.data
        for method in options.method
        for ratio in options.ratio
    ]
    for data, method, ratio in runs:
        dataset = load_public(data)
        settings: dict[str, Any] = {"ratio": ratio}
        if method != "real-subset":
            settings |= parse_settings(options.set)
        init = getattr(make_method(method, settings), "init", None)
        starts_real = method in PARALLEL_METHODS and init == "real"
        chosen = sorted(parse_settings(options.set).values())
        name = "-".join([Path(data).name, method, f"{ratio:g}", *chosen])
        config = ShadowConfig(
            folder=options.folder / name,
            dataset=dataset,
            method=method,
            settings=settings,
            num_shadows=options.preparations,
            epochs=options.epochs,
            observations=("loss", "confidence"),
        )
        start = time.perf_counter()
        store = prepare_shadows(config, runtime, progress)
        num_images = len(store.load_release(0).artifact.tensors["labels"])
        accuracy = store.load_fact("accuracy_out")
        seconds = time.perf_counter() - start
        targets = {"all members": False}
        if starts_real:
            targets["images of the initialization"] = True
        for target, use_initial_images in targets.items():
            print_row(
                data,
                method,
                num_images // dataset.spec.num_classes,
                " ".join(options.set) or "default",
                options.preparations,
                format_deviation(100 * accuracy),
                target,
                format_deviation(compute_loss_advantages(config, store, use_initial_images)),
                f"{seconds:.0f}",
            )


def load_or_synthesize(
    options: argparse.Namespace,
    dataset: Public,
    records: np.ndarray,
    run: str,
    settings: dict[str, str],
    seed: int,
) -> Release:
    """Synthesize a release of some records, or load it from --release-folder.

    Args:
        options: The command line.
        dataset: All records.
        records: Indices of the records of the release.
        run: METHOD or METHOD@EPSILON.
        settings: Settings of the method.
        seed: Seed of the synthesis.

    Returns:
        The release. Its ledger is thrown away.
    """
    method, _, epsilon = run.partition("@")
    path = None
    if options.release_folder:
        pairs = [f"{key}={value}" for key, value in settings.items()]
        digest = hashlib.sha256(records.tobytes()).hexdigest()[:12]
        parts = [Path(options.data).name, run, *pairs, str(seed), digest]
        path = options.release_folder / "-".join(parts)
        if path.exists():
            return Release.load(path)
    with tempfile.TemporaryDirectory() as folder:
        release = privot.synthesize(
            select_records(Sensitive, dataset, records, "trained on", sizes=True),
            method,
            float(epsilon or "inf"),
            settings=settings,
            seed=seed,
            ledger=f"{folder}/ledger.jsonl",
            runtime=Runtime(options.device),
        )
    if path:
        release.save(path)
    return release


def compute_figures(scores: MembershipScores, seed: int) -> tuple[float, ...]:
    """Compute AUC, advantage, and the TPR at 1 % FPR, in percent."""
    [point] = estimate_tpr_at_fpr(*scores, (0.01,), 0.95).points
    return (
        100 * compute_roc(*scores).auc,
        100 * estimate_advantage(*scores, seed).value,
        100 * point.tpr,
    )


class LeaksRun:
    """GAN-Leaks on the releases of one method, over several splits of the records.

    Args:
        options: The command line.
        dataset: All records.
        run: METHOD or METHOD@EPSILON.
    """

    def __init__(self, options: argparse.Namespace, dataset: Public, run: str):
        self.options = options
        self.dataset = dataset
        self.run = run
        self.settings = {} if "@" in run else parse_settings(options.set)
        self.runtime = Runtime(options.device)
        order = np.random.default_rng(0).permutation(len(dataset))
        # References never have a member or a candidate, and are the same for all splits.
        self.num_references = options.references + options.null
        num_aside = len(order) // 3 if self.num_references else 0
        self.aside, self.remaining = np.split(order, [num_aside])
        self.half = len(self.remaining) // 2
        self.size = options.size or self.half
        if not 0 < self.size <= self.half:
            raise SystemExit(
                f"--size {self.size}: give at most {self.half}, half of the available training "
                "images. The other half has the nonmembers."
            )
        self.figures: defaultdict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
        self.varieties: defaultdict[str, list[float]] = defaultdict(list)
        self.synthesis_seconds = 0.0
        self.attack_seconds = 0.0

    def synthesize(self, records: np.ndarray, seed: int) -> Release:
        """Synthesize a release of some records."""
        return load_or_synthesize(
            self.options, self.dataset, records, self.run, self.settings, seed
        )

    def synthesize_references(self) -> list[Release]:
        """Synthesize the references, and last the release of the null control."""
        rng = np.random.default_rng(1)
        references = []
        for index in range(self.num_references):
            references.append(
                self.synthesize(rng.permutation(self.aside)[: self.size], 1000 + index)
            )
            print(
                f"{self.run}: {index + 1} of {self.num_references} references",
                file=sys.stderr,
                flush=True,
            )
        return references

    def attack_split(self, seed: int, references: list[Release], control: Release | None) -> None:
        """Attack a release of one split, and the null control with the same candidates."""
        records = np.random.default_rng(seed).permutation(self.remaining)
        inside = records[: self.size]
        num_candidates = self.options.candidates
        start = time.perf_counter()
        release = self.synthesize(inside, seed)
        self.synthesis_seconds += time.perf_counter() - start
        self.save_images(release, seed)
        start = time.perf_counter()
        sides = (
            select_records(Public, self.dataset, inside[:num_candidates], "members"),
            select_records(
                Public, self.dataset, records[self.half :][:num_candidates], "nonmembers"
            ),
        )
        targets = {str(self.size): AttackTarget(release, self.runtime, seed=seed)}
        if control:
            targets[f"{self.size}, null control"] = AttackTarget(control, self.runtime, seed=seed)
        reference_targets = [
            AttackTarget(reference, self.runtime, seed=seed) for reference in references
        ]
        for members, target in targets.items():
            self.varieties[members].append(100 * target.measure_diversity(sides[1]))
        for name in self.options.attacks:
            check_attack(name, release)  # an attack that fails its controls is not run
            reference_scores = [
                np.concatenate(target.score(name, *sides)) for target in reference_targets
            ]
            for members, target in targets.items():
                scores = target.score(name, *sides)
                self.figures[members, name].append(compute_figures(scores, seed))
                if references:
                    calibrated = calibrate_scores(
                        np.concatenate(scores), np.stack(reference_scores)
                    )
                    split_scores = np.split(calibrated, [len(scores.members)])
                    self.figures[members, f"{name}, calibrated"].append(
                        compute_figures(MembershipScores(*split_scores), seed)
                    )
        self.attack_seconds += time.perf_counter() - start
        self.print_split(seed)

    def save_images(self, release: Release, seed: int) -> None:
        """Save 64 images of a release in --image-folder."""
        folder = self.options.image_folder
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            labels = torch.arange(64) % self.dataset.spec.num_classes
            images = release.sample(64, labels, device=self.runtime.torch_device)[0]
            render_image_grid(images, 8).save(folder / f"{self.run}-{seed}.png")

    def print_split(self, seed: int) -> None:
        """Print the figures of the last split on standard error."""
        aucs = ", ".join(
            f"{name} ({members}) {figures[-1][0]:.2f}"
            for (members, name), figures in self.figures.items()
        )
        varieties = ", ".join(
            f"{values[-1]:.0f} ({members})" for members, values in self.varieties.items()
        )
        print(
            f"{self.run}, seed {seed}: AUC {aucs}; variety {varieties}; "
            f"synthesis {self.synthesis_seconds:.0f} s, attacks {self.attack_seconds:.0f} s so far",
            file=sys.stderr,
            flush=True,
        )

    def print_rows(self) -> None:
        """Print one row for each attack: means and deviations over the splits."""
        count = self.options.preparations
        for (members, name), figures in self.figures.items():
            print_row(
                self.options.data,
                self.run,
                members,
                " ".join(f"{key}={value}" for key, value in self.settings.items()) or "default",
                self.options.references,
                count,
                f"{np.mean(self.varieties[members]):.0f}",
                name,
                *(format_deviation(column) for column in zip(*figures, strict=True)),
                f"{self.synthesis_seconds / count:.0f} s, {self.attack_seconds / count:.0f} s",
            )


def run_leaks(options: argparse.Namespace) -> None:
    """Print the figures of GAN-Leaks for each method."""
    dataset = load_public(options.data)
    print(f"\n{format_environment()}\n")
    print_header(
        "data",
        "method",
        "members",
        "settings",
        "references",
        "splits",
        "variety %",
        "attack",
        "AUC %",
        "advantage %",
        "TPR at 1 %",
        "synthesis, attacks",
    )
    for method in options.methods:
        run = LeaksRun(options, dataset, method)
        references = run.synthesize_references()
        control = references.pop() if options.null else None
        for seed in range(options.seed, options.seed + options.preparations):
            run.attack_split(seed, references, control)
        run.print_rows()


def draw_roc_curves(options: argparse.Namespace) -> None:
    """Draw the ROC curves of LiRA on log axes, and print AUC and TPR."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5))
    levels = np.geomspace(1e-5, 1, 200)
    axes.plot(levels, levels, color="grey", linestyle=":", label="chance")
    print_header("shadows", "AUC", "TPR at 0.1 %", "at 1 %", "victims")
    for named_folder in options.folders:
        name, folder = named_folder.split("=", 1)
        store = ShadowStore(Path(folder))
        members = store.load_membership()
        scores = lira.lira_leave_one_out(store.load_observation(options.observation), members)
        curve = compute_roc(scores[members], scores[~members])
        low, high = curve.measured_tpr_at((1e-3, 1e-2))
        tpr = np.maximum(curve.measured_tpr_at(levels), 1e-6)
        axes.plot(levels, tpr, label=f"{name} (AUC {curve.auc:.3f})")
        print_row(
            name, f"{curve.auc:.4f}", f"{100 * low:.3f} %", f"{100 * high:.2f} %", len(members)
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(1e-5, 1),
        ylim=(1e-5, 1),
        xlabel="false-positive rate",
        ylabel="true-positive rate",
    )
    axes.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out, dpi=120)


def run_bounds(options: argparse.Namespace) -> None:
    """Print proved upper bounds and measured lower bounds of epsilon."""
    print_header(
        "shadows",
        "accuracy",
        "proved upper bound",
        "the paper's estimate",
        "measured lower bound, 95 %",
        "observation",
        "a perfect attack",
    )
    for named_folder in options.folders:
        name, folder = named_folder.split("=", 1)
        store = ShadowStore(Path(folder))
        members = store.load_membership()
        accuracy = store.load_fact("accuracy_out")
        guarantee = store.load_release(0).guarantee
        delta = 1e-5
        proved = "none"
        if isinstance(guarantee, Guarantee):
            delta = guarantee.delta
            proved = f"{guarantee.epsilon:.2f} ({guarantee.neighbours})"
        bounds = {}
        estimates = []
        for observation in OBSERVATIONS:
            scores = lira.lira_leave_one_out(store.load_observation(observation), members)[0]
            inside = scores[members[0]]
            outside = scores[~members[0]]
            confidence = 1 - 0.05 / len(OBSERVATIONS)
            bounds[observation] = audit_many_runs(inside, outside, delta, confidence)
            curve = compute_roc(inside, outside)
            is_finite = (curve.fpr > 0) & (curve.tpr > 0)
            estimates.append(np.log(curve.tpr[is_finite] / curve.fpr[is_finite]).max())
        best = max(bounds, key=lambda observation: bounds[observation].epsilon)
        print_row(
            name,
            format_deviation(100 * accuracy, 1),
            proved,
            f"{max(estimates):.2f}",
            f"{bounds[best].epsilon:.2f}",
            best if bounds[best].epsilon else "-",
            f"{bounds[best].ceiling:.2f}",
        )


def main() -> None:
    parser = make_parser(__doc__)
    parts = parser.add_subparsers(required=True, metavar="{loss,leaks,roc,bounds}")
    loss = parts.add_parser("loss", help="the loss attack on condensed sets")
    loss.add_argument("--data", nargs="+", default=["fashion-mnist"])
    loss.add_argument("--method", nargs="+", default=["distribution-matching", "real-subset"])
    loss.add_argument(
        "--ratio",
        nargs="+",
        type=float,
        default=[0.002, 0.01, 0.02],
        help="released images over records",
    )
    loss.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings")
    loss.add_argument("--preparations", type=int, default=10, help="number of victims")
    loss.add_argument("--epochs", type=int, default=300, help="epochs of a classifier")
    loss.add_argument("--folder", type=Path, required=True, help="folder of the shadows")
    loss.add_argument("--device", default="auto")
    loss.add_argument("--verbose", action="store_true", help="print finished preparations")
    loss.set_defaults(function=run_loss)
    leaks = parts.add_parser("leaks", help="GAN-Leaks on generators")
    leaks.add_argument("--data", default="celeba")
    leaks.add_argument(
        "--methods", nargs="+", default=["conditional-gan"], metavar="METHOD[@EPSILON]"
    )
    leaks.add_argument(
        "--attacks", nargs="+", default=["gan-leaks-full", "gan-leaks-partial", "gan-leaks-white"]
    )
    leaks.add_argument(
        "--size", type=int, help="number of members; default: half of the training images"
    )
    leaks.add_argument(
        "--references",
        type=int,
        default=0,
        help="number of releases of other records that calibrate the scores",
    )
    leaks.add_argument(
        "--null",
        action="store_true",
        help="also attack a release that has none of the candidates",
    )
    leaks.add_argument("--image-folder", type=Path, help="folder for 64 images of each release")
    leaks.add_argument(
        "--release-folder", type=Path, help="folder of the releases; stored ones are loaded"
    )
    leaks.add_argument("--candidates", type=int, default=1000, help="candidates of each side")
    leaks.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the methods without an epsilon",
    )
    leaks.add_argument("--preparations", type=int, default=3, help="number of splits")
    leaks.add_argument("--seed", type=int, default=0, help="seed of the first split")
    leaks.add_argument("--device", default="auto")
    leaks.set_defaults(function=run_leaks)
    roc = parts.add_parser("roc", help="ROC curves of LiRA")
    roc.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    roc.add_argument("--observation", default="confidence")
    roc.add_argument("--out", type=Path, default=Path("lira.png"))
    roc.set_defaults(function=draw_roc_curves)
    bounds = parts.add_parser("bounds", help="bounds of epsilon")
    bounds.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    bounds.set_defaults(function=run_bounds)
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
