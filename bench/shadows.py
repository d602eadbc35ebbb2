"""Shadows of a method on real data: seconds by part, and what LiRA makes of them, each shadow once the victim of the others.

    python bench/shadows.py --data fashion-mnist --method distribution-matching --shadows 256 --ratio .01 --folder F
    python bench/shadows.py --data digits --shadows 256 --per-class 3 --iterations 100 --epochs 100 --workers 2 --folder F
    python bench/shadows.py --data fashion-mnist --method real-subset --shadows 256 --ratio .01 --folder G   # the baseline of the same size

Prints one Markdown row a run. All training images are candidates, and a shadow has a random half of them; --ratio is of that half. A run
that was broken off goes on in the same folder. With workers the parts overlap, and only the whole is timed.

Work for 256 shadows of Fashion-MNIST at ratio .01 (30 images a class; a ConvNet of width 128 takes 0.097 GFLOP an image): an iteration of
DM takes 2 x 76,800 synthetic and 2 x 5,120 real images through it, 15.8 TFLOP; 300 epochs of all classifiers are 3 x 300 x 76,800 images,
6.7 PFLOP; both queries of all candidates are 256 x 120,000 images, 3.0 PFLOP.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from environment import commit, hardware

import privot
from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.runner import prepare_shadows
from privot.attacks.shadows.store import ShadowStore
from privot.data.dataset import Public
from privot.runtime import Runtime

HEAD = (
    "data",
    "method",
    "epsilon",
    "shadows",
    "images a class",
    "settings",
    "epochs",
    "accuracy",
    "releases",
    "classifiers",
    "observing",
    "whole",
    "memory",
    "LiRA AUC",
    "TPR at 0.1 %",
    "LiRA",
)
RATE = 0.001


def attacked(prepared: ShadowStore) -> tuple[str, str]:
    """AUC and TPR at a low rate of LiRA over all pairs of a victim and a candidate; dashes where the attack is not at hand."""
    with contextlib.suppress(ImportError):
        from privot import audit
        from privot.attacks.membership import lira

        members = prepared.load_membership()
        scores = lira.lira_leave_one_out(prepared.load_observation("confidence"), members)
        inside = scores[members]
        outside = scores[~members]
        point = audit.estimate_tpr_at_fpr(inside, outside, (RATE,)).points[
            0
        ]  # its bounds take pairs as independent, and these are not
        return f"{audit.compute_roc(inside, outside).auc:.4f}", f"{100 * point.tpr:.3f} %"
    return "-", "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--method", default="distribution-matching")
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--shadows", type=int, default=256)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--ratio", type=float)
    size.add_argument("--per-class", type=int)
    parser.add_argument("--iterations", type=int, default=1000, help="of distribution matching")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--at-once", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    settings = dict(each.split("=", 1) for each in asked.set)
    size_settings = {"ratio": asked.ratio, "images_per_class": asked.per_class}
    settings |= {key: value for key, value in size_settings.items() if value is not None}
    if asked.method == "distribution-matching":
        settings.setdefault("steps", asked.iterations)
    box = privot.load(asked.data, public=True)
    runtime = Runtime(asked.device)
    assert isinstance(box, Public)
    if asked.method == "distribution-matching" and box.spec.shape[1] < 24:
        settings.setdefault("net_width", 16)  # images so small need no more
    shadows = ShadowConfig(
        folder=asked.folder,
        dataset=box,
        method=asked.method,
        settings=settings,
        epsilon=asked.epsilon,
        num_shadows=asked.shadows,
        seed=asked.seed,
        epochs=asked.epochs,
        shadows_per_batch=asked.at_once,
    )
    seconds: dict[str, float] = defaultdict(float)
    begin = last = time.perf_counter()

    def told(stage: str, step: int, of: int, **facts: object) -> None:
        nonlocal last
        if step == of and runtime.torch_device.type == "cuda":
            torch.cuda.synchronize()  # or the end of a stage would count as the next one's
        now = time.perf_counter()
        part = {"shadows": "observing", "training classifiers": "classifiers"}.get(
            stage, "releases"
        )
        seconds[part] += now - last
        last = now

    prepared = prepare_shadows(shadows, runtime, told, num_workers=asked.workers, use_ray=asked.ray)
    whole = time.perf_counter() - begin
    memory = (
        torch.cuda.max_memory_allocated() / 2**30 if runtime.torch_device.type == "cuda" else 0.0
    )
    begin = time.perf_counter()
    auc, tpr = attacked(prepared)
    attack = time.perf_counter() - begin
    accuracy = prepared.load_fact("accuracy_out")
    apart = asked.workers == 1 and not asked.ray
    tensors = prepared.load_release(0).artifact.tensors
    made = len(tensors["labels"]) // box.spec.num_classes if "labels" in tensors else "-"
    parts = [
        f"{seconds[part]:.0f} s" if apart else "-"
        for part in ("releases", "classifiers", "observing")
    ]
    guessed = f"{100 * accuracy.mean():.2f} ± {100 * accuracy.std():.2f}"
    row = (
        asked.data,
        asked.method,
        "-" if asked.epsilon is None else f"{asked.epsilon:g}",
        asked.shadows,
        made,
        " ".join(f"{key}={value}" for key, value in settings.items()),
        asked.epochs,
        guessed,
        *parts,
        f"{whole:.0f} s",
        f"{memory:.1f} GiB",
        auc,
        tpr,
        f"{attack:.0f} s",
    )
    print(
        f"\n{datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, commit {commit()}\n"
    )
    print(
        f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|\n| {' | '.join(map(str, row))} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
