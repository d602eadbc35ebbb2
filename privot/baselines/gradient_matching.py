r"""DC and DSA: a small set on which a network's gradients equal those of the data, class by class.

**Released** a set of ``images_per_class`` images of each class.
**Bound** none: the gradients of real images are used as they are.
**Cost** the records are read: ``NoGuarantee``. With ``init="real"`` the set is real images,
slightly altered.
**Departs** from the papers: pixels stay in [0, 1] at each step; public constants standardize them;
1,000 networks, not 1,001; the initial images are noise by default; batches of an epoch are of equal
size; with ``augment`` each image of such a batch gets its own operation.
**Notation** minimize the sum over classes, layers and output rows of 1 - cos(grad of T_c, grad of
S_c); ``outer_steps`` steps for each network, with ``inner_steps`` epochs between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from privot.baselines.condensation import (
    ClassPool,
    CondensationMethod,
    PixelOptimizer,
    count_images_per_class,
    explain_no_guarantee,
    initialize_images,
    unstandardize_images,
)
from privot.baselines.gradient_matching_run import NET_BATCH_SIZE, MatchingRun
from privot.data.spec import Spec
from privot.nets.conv_shapes import ConvNetShapes
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

# images per class -> (outer steps, inner steps), from the papers
PAPER_LOOP_COUNTS = {
    1: (1, 1),
    10: (10, 50),
    20: (20, 25),
    30: (30, 20),
    40: (40, 15),
    50: (50, 10),
    100: (50, 10),
}
MAX_OUTER_STEPS = 50
TOTAL_INNER_STEPS = 500  # outer * inner steps, as in the papers at 10, 20 and 50 images per class
DEFAULT_LEARNING_RATE = 0.1  # of the pixels, the papers' for every size
CALLS_PER_STEP = 500  # tensor operators in a training step of the network
MATCHING_CALLS_FACTOR = 4  # matching one class takes this many times as many


def choose_loop_counts(images_per_class: int) -> tuple[int, int]:
    """Choose outer and inner steps: those of the papers, or else outer * inner = 500.

    >>> choose_loop_counts(10), choose_loop_counts(5), choose_loop_counts(60)
    ((10, 50), (5, 100), (50, 10))
    """
    outer_steps = min(images_per_class, MAX_OUTER_STEPS)
    inner_steps = round(TOTAL_INNER_STEPS / outer_steps)
    return PAPER_LOOP_COUNTS.get(images_per_class, (outer_steps, inner_steps))


@dataclass(frozen=True, kw_only=True)
class GradientMatching(CondensationMethod):
    """Settings of DSA, or of DC with ``augment=False``.

    >>> GradientMatching().plan(Spec((1, 28, 28), 10)).stages
    ()
    """

    name: ClassVar[str] = "gradient-matching"
    title: ClassVar[str] = "DC and DSA: a set that matches gradients (no privacy)"
    citation: ClassVar[str] = """@inproceedings{zhao2021dc,
  title     = {Dataset Condensation with Gradient Matching},
  author    = {Zhao, Bo and Mopuri, Konda Reddy and Bilen, Hakan},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}
@inproceedings{zhao2021dsa,
  title     = {Dataset Condensation with Differentiable Siamese Augmentation},
  author    = {Zhao, Bo and Bilen, Hakan},
  booktitle = {International Conference on Machine Learning},
  year      = {2021}
}"""

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {
        "net_width": 16,
        "num_networks": 2,
        "batch_per_class": 64,
    }

    init: str = "random"  # or "real"
    num_networks: int = 1000  # random networks, one after another
    outer_steps: int | None = None  # of the set for each network; None: see `choose_loop_counts`
    inner_steps: int | None = None  # epochs of the network between two of them
    learning_rate: float | None = None  # of the pixels; None: 0.1
    batch_per_class: int = 256  # records of each class in a step
    augment: bool = True  # DSA
    net_width: int = 128
    net_depth: int = 3

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        if (images_per_class := self.predict_images_per_class(spec)) is None:
            return {"floating_point_operations": None}
        num_images = images_per_class * spec.num_classes
        outer_steps, inner_steps = self._get_loop_counts(images_per_class)
        num_epochs = (outer_steps - 1) * inner_steps
        # Forward and backward are 3 passes; backward through both is 5 more.
        passes = (
            outer_steps * (3 * self.batch_per_class + 8 * images_per_class)
            + num_epochs * 3 * images_per_class
        )
        flops = ConvNetShapes(spec.shape, self.net_width, self.net_depth).flops
        training_steps = num_epochs * math.ceil(num_images / NET_BATCH_SIZE)
        matching_steps = MATCHING_CALLS_FACTOR * outer_steps * spec.num_classes
        return {
            "images": num_images,
            "floating_point_operations": self.num_networks * spec.num_classes * passes * flops,
            "operator_calls": self.num_networks
            * CALLS_PER_STEP
            * (matching_steps + training_steps),
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Match the gradients of networks on records and on condensed images.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The condensed images.
        """
        spec = gate.spec
        records = gate.read_without_guarantee(explain_no_guarantee(self.init))
        images_per_class = count_images_per_class(
            self.images_per_class, self.ratio, len(records.labels), spec.num_classes
        )
        initial_images, labels = initialize_images(
            records, spec, images_per_class, self.init, streams.make_rng("start")
        )
        run = MatchingRun(
            spec,
            ClassPool(records, spec.num_classes),
            PixelOptimizer(initial_images, spec, self.learning_rate or DEFAULT_LEARNING_RATE),
            labels,
            streams,
            batch_per_class=self.batch_per_class,
            augment=self.augment,
            net_width=self.net_width,
            net_depth=self.net_depth,
        )
        outer_steps, inner_steps = self._get_loop_counts(images_per_class)
        for network in range(self.num_networks):
            run.reset_net()
            for outer_step in range(outer_steps):
                run.match_gradients()
                for _ in range(inner_steps if outer_step + 1 < outer_steps else 0):
                    run.train_net()
            progress("matching the gradients", network + 1, self.num_networks)
        return Artifact.from_images(unstandardize_images(run.pixels.pixels), labels)

    def _get_loop_counts(self, images_per_class: int) -> tuple[int, int]:
        outer_steps, inner_steps = choose_loop_counts(images_per_class)
        return self.outer_steps or outer_steps, self.inner_steps or inner_steps


METHOD = GradientMatching
