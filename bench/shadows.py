"""Shadows of a method on real data: seconds of each part, and the result of LiRA.

    python bench/shadows.py --data fashion-mnist --method distribution-matching --shadows 256 \\
        --ratio .01 --folder F
    python bench/shadows.py --data digits --shadows 256 --per-class 3 --steps 100 --epochs 100 \\
        --workers 2 --folder F
    python bench/shadows.py --data fashion-mnist --method real-subset --shadows 256 --ratio .01 \\
        --folder G     # the baseline of the same size

Prints one Markdown row for each run. All training images are candidates, and a shadow has a random
half of them; --ratio is of that half. In LiRA each shadow is once the victim of the others. An
interrupted run resumes in the same folder. With workers the parts overlap, so only the total is
timed.

Work for 256 shadows of Fashion-MNIST at ratio .01 (30 images a class; a ConvNet of width 128 takes
0.097 GFLOP an image): a step of DM takes 2 x 76,800 synthetic and 2 x 5,120 real images through the
network, 15.8 TFLOP; 300 epochs of all classifiers are 3 x 300 x 76,800 images, 6.7 PFLOP; both
observations of all candidates are 256 x 120,000 images, 3.0 PFLOP.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import torch
from environment import (
    format_environment,
    load_public,
    make_parser,
    parse_settings,
    print_header,
    print_row,
)

from privot.attacks.membership.lira import lira_leave_one_out
from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.runner import prepare_shadows
from privot.attacks.shadows.store import ShadowStore
from privot.audit import compute_roc
from privot.runtime import Runtime

COLUMNS = (
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
    "observations",
    "total",
    "memory",
    "LiRA AUC",
    "TPR at 0.1 %",
    "LiRA",
)
FPR = 0.001
PARTS = ("releases", "classifiers", "observations")
PART_OF_STAGE = {"shadows": "observations", "training classifiers": "classifiers"}


class PartClock:
    """Measures the seconds of each part from the progress reports."""

    def __init__(self, device: torch.device):
        self.is_cuda = device.type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self.last = time.perf_counter()

    def __call__(self, stage: str, step: int, total: int, **facts: object) -> None:
        if step == total and self.is_cuda:
            torch.cuda.synchronize()  # otherwise the end of a stage would count for the next one
        now = time.perf_counter()
        self.seconds[PART_OF_STAGE.get(stage, "releases")] += now - self.last
        self.last = now


def attack(store: ShadowStore) -> tuple[float, float]:
    """Compute AUC and TPR at a low FPR of LiRA, over all pairs of a victim and a candidate."""
    members = store.load_membership()
    scores = lira_leave_one_out(store.load_observation("confidence"), members)
    curve = compute_roc(scores[members], scores[~members])
    return curve.auc, float(curve.measured_tpr_at((FPR,))[0])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--method", default="distribution-matching")
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--shadows", type=int, default=256, help="number of shadows")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--ratio", type=float, help="released images over a shadow's records")
    size.add_argument("--per-class", type=int, help="released images of each class")
    parser.add_argument("--steps", type=int, default=1000, help="steps of distribution matching")
    parser.add_argument("--epochs", type=int, default=300, help="epochs of a classifier")
    parser.add_argument("--shadows-per-batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the shadows")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--ray", action="store_true", help="run on a Ray cluster")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    dataset = load_public(options.data)
    settings: dict[str, object] = dict(parse_settings(options.set))
    if options.ratio is not None:
        settings["ratio"] = options.ratio
    if options.per_class is not None:
        settings["images_per_class"] = options.per_class
    if options.method == "distribution-matching":
        settings.setdefault("steps", options.steps)
        if dataset.spec.shape[1] < 24:
            settings.setdefault("net_width", 16)  # enough for such small images
    config = ShadowConfig(
        folder=options.folder,
        dataset=dataset,
        method=options.method,
        settings=settings,
        epsilon=options.epsilon,
        num_shadows=options.shadows,
        seed=options.seed,
        epochs=options.epochs,
        shadows_per_batch=options.shadows_per_batch,
    )
    runtime = Runtime(options.device)
    device = runtime.torch_device
    clock = PartClock(device)
    start = time.perf_counter()
    store = prepare_shadows(
        config, runtime, clock, num_workers=options.workers, use_ray=options.ray
    )
    total_seconds = time.perf_counter() - start
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    start = time.perf_counter()
    auc, tpr = attack(store)
    attack_seconds = time.perf_counter() - start
    accuracy = store.load_fact("accuracy_out")
    tensors = store.load_release(0).artifact.tensors
    is_sequential = options.workers == 1 and not options.ray
    print(f"\n{format_environment()}\n")
    print_header(*COLUMNS)
    print_row(
        options.data,
        options.method,
        "-" if options.epsilon is None else f"{options.epsilon:g}",
        options.shadows,
        len(tensors["labels"]) // dataset.spec.num_classes if "labels" in tensors else "-",
        " ".join(f"{key}={value}" for key, value in settings.items()),
        options.epochs,
        f"{100 * accuracy.mean():.2f} ± {100 * accuracy.std():.2f}",
        *(f"{clock.seconds[part]:.0f} s" if is_sequential else "-" for part in PARTS),
        f"{total_seconds:.0f} s",
        f"{memory:.1f} GiB",
        f"{auc:.4f}",
        f"{100 * tpr:.3f} %",
        f"{attack_seconds:.0f} s",
    )


if __name__ == "__main__":
    main()
