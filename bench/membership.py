"""The membership tables of Dong et al. (2022), "Privacy for Free", with the control that they lack; and LiRA's curves of many shadows.

    python bench/membership.py loss --data fashion-mnist --method distribution-matching real-subset --ratio .002 .01 .02 --folder F
    python bench/membership.py loss --data fashion-mnist --method distribution-matching real-subset --set init=real --ratio .002 --folder F
    python bench/membership.py leaks --data celeba --ways conditional-gan dp-gan@10 sliced-generator@10 --preparations 3 --references 2
    python bench/membership.py roc --out lira.png "DM=F/dm" "random subset=F/subset" "private set, epsilon 1=F/private"
    python bench/membership.py bounds "DM=F/dm" "random subset=F/subset" "private set, epsilon 1=F/private"

*loss* makes 10 preparations (a random half of the training images is condensed, a ConvNet trained on the set) and states the advantage of
the loss attack, 2 (accuracy - 50 %), as mean and deviation over them: the threshold is chosen on 1,000 members and 1,000 others and
judged on as many more (Table 2). Where sets begin from real images, those images are told from as many other members (Table 1). A row
for a random real subset of the same size stands beside: it protects nobody it shows, and only with it can the others be read.
*leaks* is GAN-Leaks on generators: of each way, releases made from a random half of the training images (or --size of them), attacked with
--candidates of its members and as many of the other half. With --references a third of the images is set aside first, and so many
releases of it calibrate the scores, as the paper's shadow models do; with --null one more of it is attacked with the same candidates, of
whom it knows nobody: what is found there is chance. *variety* is how far apart two images of a class are that the generator draws, of
what two of the others are: where it has collapsed nobody can be found, and that protects nobody.
*roc* draws folders of shadows (bench/shadows.py), every shadow once the victim: true against false positives on log axes.
*bounds* is their Table 3 with what was proved from above and what an attack proves from below in columns of their own. From below: LiRA on
one victim (the first), by each of SEEN with its share of the error, threshold chosen on one half of the candidates and Clopper-Pearson on
the other, if candidates of one victim count as independent trials. Beside it what the paper calls an empirical budget, the largest
ln(TPR / FPR) over all thresholds with a false positive, which is no bound at all.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import commit, hardware, select_records

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
from privot.runtime import Runtime
from privot.runtime.preview import render_image_grid

SEEN = (
    "confidence",
    "pixels",
    "features",
)  # of the classifier trained on a release; of the release itself
JUDGED = 1000  # candidates of each side to choose a threshold on, and as many to judge it by (Dong et al., section 5.1)


def shown(stage: str, step: int, of: int, **facts: object) -> None:
    if stage == "shadows":
        print(f"    {step} of {of} preparations", flush=True)


def gains(shadows: ShadowConfig, prepared: ShadowStore, real: bool) -> list[float]:
    """The loss attack's advantage on each victim, in percent."""
    members = prepared.load_membership()
    scores = prepared.load_observation("loss")
    found = []
    for victim, own in enumerate(members):
        rng = np.random.default_rng(victim)
        if real:
            used = find_initial_candidates(shadows, victim)
            unused = rng.permutation(np.setdiff1d(np.flatnonzero(own), used))[: len(used)]
            found.append(
                100 * estimate_advantage(scores[victim, used], scores[victim, unused], victim).value
            )
        else:
            inside, outside = (
                rng.permutation(np.flatnonzero(each))[: 2 * JUDGED] for each in (own, ~own)
            )
            found.append(
                100
                * estimate_advantage(scores[victim, inside], scores[victim, outside], victim).value
            )
    return found


def loss(asked: argparse.Namespace) -> None:
    settings = dict(each.split("=", 1) for each in asked.set)
    runtime = Runtime(asked.device)
    head = (
        "data",
        "method",
        "images a class",
        "settings",
        "preparations",
        "accuracy",
        "attacked",
        "advantage %",
        "seconds",
    )
    print(
        f"\n{datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, commit {commit()}\n"
    )
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|", flush=True)
    for data in asked.data:
        box = privot.load(data, public=True)
        for method in asked.method:
            for ratio in asked.ratio:
                given: dict[str, Any] = {
                    "ratio": ratio,
                    **(settings if method != "real-subset" else {}),
                }
                real = method in PARALLEL_METHODS and make_method(method, given).init == "real"  # type: ignore[attr-defined]
                name = "-".join([Path(data).name, method, f"{ratio:g}", *sorted(settings.values())])
                shadows = ShadowConfig(
                    folder=asked.folder / name,
                    dataset=box,
                    method=method,
                    settings=given,
                    num_shadows=asked.preparations,
                    epochs=asked.epochs,
                    observations=("loss", "confidence"),
                )
                begin = time.perf_counter()
                prepared = prepare_shadows(
                    shadows, runtime, shown if asked.verbose else lambda *given, **more: None
                )
                made = (
                    len(prepared.load_release(0).artifact.tensors["labels"]) // box.spec.num_classes
                )
                accuracy = prepared.load_fact("accuracy_out")
                took = time.perf_counter() - begin
                for what, found in [("all members", gains(shadows, prepared, False))] + (
                    [("what it began from", gains(shadows, prepared, True))] if real else []
                ):
                    row = (data, method, made, " ".join(asked.set) or "default", asked.preparations)
                    figures = (
                        f"{100 * accuracy.mean():.2f} ± {100 * accuracy.std():.2f}",
                        what,
                        f"{np.mean(found):.2f} ± {np.std(found):.2f}",
                    )
                    print(f"| {' | '.join(map(str, (*row, *figures)))} | {took:.0f} |", flush=True)


def released(
    asked: argparse.Namespace,
    box: Public,
    some: np.ndarray,
    way: str,
    given: dict[str, str],
    seed: int,
) -> Release:
    """Of these records of a public box, by METHOD[@EPSILON]; its ledger is thrown away. With --keep, what was made before is taken up."""
    method, _, epsilon = way.partition("@")
    words = [
        Path(asked.data).name,
        way,
        *(f"{key}={value}" for key, value in given.items()),
        str(seed),
    ]
    kept = asked.keep and asked.keep / "-".join(
        [*words, hashlib.sha256(some.tobytes()).hexdigest()[:12]]
    )
    if kept and kept.exists():
        return Release.load(kept)
    with tempfile.TemporaryDirectory() as folder:
        made = privot.synthesize(
            select_records(Sensitive, box, some, "trained on", sizes=True),
            method,
            float(epsilon or "inf"),
            settings=given,
            seed=seed,
            ledger=f"{folder}/ledger.jsonl",
            runtime=Runtime(asked.device),
        )
    if kept:
        made.save(kept)
    return made


def figures(scores: MembershipScores, seed: int) -> tuple[float, ...]:
    """In percent: AUC, advantage, and true positives at 1 % of false ones."""
    [at] = estimate_tpr_at_fpr(*scores, (0.01,), 0.95).points
    return (
        100 * compute_roc(*scores).auc,
        100 * estimate_advantage(*scores, seed).value,
        100 * at.tpr,
    )


def leaks(asked: argparse.Namespace) -> None:
    settings = dict(each.split("=", 1) for each in asked.set)
    runtime = Runtime(asked.device)
    box = privot.load(asked.data, public=True)
    assert isinstance(box, Public)
    order = np.random.default_rng(0).permutation(len(box.records()[1]))
    # References learn from a third that is never a member nor a candidate, and are the same for all preparations.
    aside, rest = np.split(order, [len(order) // 3 if asked.references or asked.null else 0])
    half = len(rest) // 2
    if not 0 < (size := asked.size or half) <= half:
        raise SystemExit(
            f"--size {size}: at most {half} of the training images; as many are the others"
        )
    print(
        f"\n{datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, commit {commit()}\n"
    )
    head = (
        "data",
        "way",
        "members",
        "settings",
        "references",
        "seeds",
        "variety %",
        "attack",
        "AUC %",
        "advantage %",
        "TPR at 1 %",
    )
    print(f"| {' | '.join((*head, 'made, attacked'))} |\n{'|---' * (len(head) + 1)}|", flush=True)
    for way in asked.ways:
        given = {} if "@" in way else settings
        drawn = np.random.default_rng(1)
        references = []
        for number in range(asked.references + asked.null):
            references.append(
                released(asked, box, drawn.permutation(aside)[:size], way, given, 1000 + number)
            )
            print(
                f"{way}: {number + 1} of {asked.references + asked.null} of other records",
                file=sys.stderr,
                flush=True,
            )
        nobody = references.pop() if asked.null else None
        found: defaultdict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
        differ: defaultdict[str, list[float]] = defaultdict(list)
        seeds = range(asked.seed, asked.seed + asked.preparations)
        making = 0.0
        attacking = 0.0
        for seed in seeds:
            rows = np.random.default_rng(seed).permutation(rest)
            inside = rows[:size]
            outside = rows[half:][: asked.candidates]
            begin = time.perf_counter()
            release = released(asked, box, inside, way, given, seed)
            making += time.perf_counter() - begin
            if asked.pictures:
                asked.pictures.mkdir(parents=True, exist_ok=True)
                shown = release.sample(
                    64, torch.arange(64) % box.spec.num_classes, device=runtime.torch_device
                )[0]
                render_image_grid(shown, 8).save(asked.pictures / f"{way}-{seed}.png")
            begin = time.perf_counter()
            sides = (
                select_records(Public, box, inside[: asked.candidates], "members"),
                select_records(Public, box, outside, "others"),
            )
            targets = {str(size): AttackTarget(release, runtime, seed=seed)}
            if nobody:
                targets[f"{size}, none of them asked about"] = AttackTarget(
                    nobody, runtime, seed=seed
                )
            known = [AttackTarget(each, runtime, seed=seed) for each in references]
            for who, target in targets.items():
                differ[who].append(100 * target.measure_diversity(sides[1]))
            for name in asked.attacks:
                check_attack(name, release)  # its controls, or nothing is tried
                without = [
                    np.concatenate(each.score(name, *sides)) for each in known
                ]  # once for all that they calibrate
                for who, target in targets.items():
                    scores = target.score(name, *sides)
                    found[who, name].append(figures(scores, seed))
                    if references:
                        less = calibrate_scores(np.concatenate(scores), np.stack(without))
                        found[who, f"{name}, calibrated"].append(
                            figures(MembershipScores(*np.split(less, [len(scores.members)])), seed)
                        )
            attacking += time.perf_counter() - begin
            each = ", ".join(
                f"{name} ({who}) {said[-1][0]:.2f}" for (who, name), said in found.items()
            )
            spread = ", ".join(f"{said[-1]:.0f} ({who})" for who, said in differ.items())
            spent = f"{making:.0f} s of making and {attacking:.0f} s of attacking so far"
            print(
                f"{way}, seed {seed}: AUC {each}; variety {spread}; {spent}",
                file=sys.stderr,
                flush=True,
            )
        for (who, name), said in found.items():
            told = [
                f"{mean:.2f} ± {spread:.2f}"
                for mean, spread in zip(np.mean(said, 0), np.std(said, 0), strict=True)
            ]
            chosen = " ".join(f"{key}={value}" for key, value in given.items()) or "default"
            seconds = f"{making / len(seeds):.0f} s, {attacking / len(seeds):.0f} s"
            row = (
                asked.data,
                way,
                who,
                chosen,
                len(references),
                len(seeds),
                f"{np.mean(differ[who]):.0f}",
                name,
                *told,
                seconds,
            )
            print(f"| {' | '.join(map(str, row))} |", flush=True)


def curves(asked: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 5))
    levels = np.geomspace(1e-5, 1, 200)
    axes.plot(levels, levels, color="grey", linestyle=":", label="chance")
    print("| shadows | AUC | TPR at 0.1 % | at 1 % | victims |\n|---|---|---|---|---|")
    for each in asked.folders:
        name, folder = each.split("=", 1)
        prepared = ShadowStore(Path(folder))
        members = prepared.load_membership()
        seen = prepared.load_observation(asked.observation)
        scores = lira.lira_leave_one_out(seen, members)
        curve = compute_roc(scores[members], scores[~members])
        at = curve.measured_tpr_at((1e-3, 1e-2))
        axes.plot(
            levels,
            np.maximum(curve.measured_tpr_at(levels), 1e-6),
            label=f"{name} (AUC {curve.auc:.3f})",
        )
        print(
            f"| {name} | {curve.auc:.4f} | {100 * at[0]:.3f} % | {100 * at[1]:.2f} % | {len(members)} |",
            flush=True,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(1e-5, 1),
        ylim=(1e-5, 1),
        xlabel="false positives",
        ylabel="true positives",
    )
    axes.legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(asked.out, dpi=120)


def bounds(asked: argparse.Namespace) -> None:
    head = (
        "way",
        "accuracy",
        "proved: at most",
        "the paper's estimate",
        "measured: at least, 95 %",
        "by",
        "a perfect attack",
    )
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|", flush=True)
    for each in asked.folders:
        name, folder = each.split("=", 1)
        prepared = ShadowStore(Path(folder))
        members = prepared.load_membership()
        accuracy = prepared.load_fact("accuracy_out")
        claim = prepared.load_release(0).guarantee
        delta = claim.delta if isinstance(claim, Guarantee) else 1e-5
        found = {}
        estimates = []
        for what in SEEN:
            scores = lira.lira_leave_one_out(prepared.load_observation(what), members)[0]
            inside = scores[members[0]]
            outside = scores[~members[0]]
            found[what] = audit_many_runs(inside, outside, delta, 1 - 0.05 / len(SEEN))
            curve = compute_roc(inside, outside)
            shown = (curve.fpr > 0) & (curve.tpr > 0)
            estimates.append(np.log(curve.tpr[shown] / curve.fpr[shown]).max())
        best = max(found, key=lambda what: found[what].epsilon)
        proved = (
            f"{claim.epsilon:.2f} ({claim.neighbours})"
            if isinstance(claim, Guarantee)
            else "nothing"
        )
        guessed = f"{100 * accuracy.mean():.1f} ± {100 * accuracy.std():.1f}"
        cells = (name, guessed, proved, f"{max(estimates):.2f}", f"{found[best].epsilon:.2f}")
        print(
            f"| {' | '.join(cells)} | {best if found[best].epsilon else '-'} | {found[best].ceiling:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = parser.add_subparsers(required=True)
    table = ways.add_parser("loss")
    table.add_argument("--data", nargs="+", default=["fashion-mnist"])
    table.add_argument("--method", nargs="+", default=["distribution-matching", "real-subset"])
    table.add_argument("--ratio", nargs="+", type=float, default=[0.002, 0.01, 0.02])
    table.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    table.add_argument("--preparations", type=int, default=10)
    table.add_argument("--epochs", type=int, default=300)
    table.add_argument("--folder", type=Path, required=True)
    table.add_argument("--device", default="auto")
    table.add_argument("--verbose", action="store_true")
    table.set_defaults(way=loss)
    generators = ways.add_parser("leaks")
    generators.add_argument("--data", default="celeba")
    generators.add_argument(
        "--ways", nargs="+", default=["conditional-gan"], metavar="METHOD[@EPSILON]"
    )
    generators.add_argument(
        "--attacks", nargs="+", default=["gan-leaks-full", "gan-leaks-partial", "gan-leaks-white"]
    )
    generators.add_argument("--size", type=int, help="members; else half of the training images")
    generators.add_argument(
        "--references",
        type=int,
        default=0,
        help="releases of yet other records, by which scores are calibrated",
    )
    generators.add_argument(
        "--null",
        action="store_true",
        help="attack one such release, too, with candidates whom it does not know",
    )
    generators.add_argument("--pictures", type=Path, help="a folder for 64 images of each release")
    generators.add_argument(
        "--keep",
        type=Path,
        help="a folder for the releases; those that are there are not made again",
    )
    generators.add_argument("--candidates", type=int, default=1000, help="of each side")
    generators.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="of ways without an epsilon"
    )
    generators.add_argument("--preparations", type=int, default=3)
    generators.add_argument("--seed", type=int, default=0, help="of the first preparation")
    generators.add_argument("--device", default="auto")
    generators.set_defaults(way=leaks)
    drawn = ways.add_parser("roc")
    drawn.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    drawn.add_argument("--observation", default="confidence")
    drawn.add_argument("--out", type=Path, default=Path("lira.png"))
    drawn.set_defaults(way=curves)
    both = ways.add_parser("bounds")
    both.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    both.set_defaults(way=bounds)
    asked = parser.parse_args()
    asked.way(asked)


if __name__ == "__main__":
    main()
