r"""DM: a small set whose mean features equal those of the data, class by class, in random networks.

**Released** a set of ``images_per_class`` images of each class.
**Bound** none: the influence of a record is not limited, and nothing is added. In a linear network
the means of set and data become equal.
**Cost** the records are read: ``NoGuarantee``. With ``init="real"`` the set is real images,
slightly altered.
**Departs** from the paper: pixels stay in [0, 1] at each step; public constants standardize them;
the initial images are noise by default; one augmentation for each class; bfloat16 on a GPU; from
noise the learning rates of Dong et al. (2022), lower in long runs.
**Notation** minimize E sum over classes of |mean psi(A(T_c)) - mean psi(A(S_c))|², psi a new random
ConvNet in each step, A one augmentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from privot.baselines.augmentation_buffer import AugmentationBuffer
from privot.baselines.condensation import (
    ClassPool,
    CondensationMethod,
    PixelOptimizer,
    count_images_per_class,
    explain_no_guarantee,
    initialize_images,
    unstandardize_images,
)
from privot.baselines.feature_means import (
    build_random_net,
    choose_dm_learning_rate,
    compute_class_mean_distance,
)
from privot.data.spec import Spec
from privot.nets.augment import apply_augmentations
from privot.nets.conv_shapes import ConvNetShapes
from privot.nets.generators.conv import initialize_weights
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams
from privot.runtime.cuda_graphs import GraphedStep

ELEMENTWISE_PASSES = 2  # passes over the feature maps of an image, for each pass of the network
CALLS_PER_STEP = 400  # tensor operators in a step
STEPS_PER_REPORT = 100


@dataclass(frozen=True, kw_only=True)
class DistributionMatching(CondensationMethod):
    """Settings of DM.

    >>> DistributionMatching().plan(Spec((1, 28, 28), 10)).stages
    ()
    """

    name: ClassVar[str] = "distribution-matching"
    title: ClassVar[str] = "DM: a set that matches mean features (no privacy)"
    citation: ClassVar[str] = """@inproceedings{zhao2023dm,
  title     = {Dataset Condensation with Distribution Matching},
  author    = {Zhao, Bo and Bilen, Hakan},
  booktitle = {IEEE/CVF Winter Conference on Applications of Computer Vision},
  year      = {2023}
}
@inproceedings{dong2022privacy,
  title     = {Privacy for Free: How does Dataset Condensation Help Privacy?},
  author    = {Dong, Tian and Zhao, Bo and Lyu, Lingjuan},
  booktitle = {International Conference on Machine Learning},
  year      = {2022}
}"""

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {"net_width": 16, "steps": 250, "batch_per_class": 64}

    init: str = "random"  # or "real"
    steps: int = 20_000
    learning_rate: float | None = None  # None: see `choose_dm_learning_rate`
    batch_per_class: int = 256  # records of each class in a step
    augment: bool = True
    net_width: int = 128
    net_depth: int = 3

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        if (images_per_class := self.predict_images_per_class(spec)) is None:
            return {"floating_point_operations": None}
        # A record takes a forward pass, an image of the set a backward pass to its pixels, too.
        passes = spec.num_classes * (self.batch_per_class + 2 * images_per_class)
        shapes = ConvNetShapes(spec.shape, self.net_width, self.net_depth)
        return {
            "images": images_per_class * spec.num_classes,
            "floating_point_operations": self.steps * passes * shapes.flops,
            "elementwise_operations": ELEMENTWISE_PASSES
            * self.steps
            * passes
            * shapes.num_activations,
            "operator_calls": self.steps * CALLS_PER_STEP,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Match the class means of random embeddings.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The condensed images.
        """
        spec = gate.spec
        device = streams.runtime.torch_device
        chunk_size = streams.runtime.chunk_size
        records = gate.read_without_guarantee(explain_no_guarantee(self.init))
        images_per_class = count_images_per_class(
            self.images_per_class, self.ratio, len(records.labels), spec.num_classes
        )
        initial_images, labels = initialize_images(
            records, spec, images_per_class, self.init, streams.make_rng("start")
        )
        learning_rate = self.learning_rate or choose_dm_learning_rate(
            self.init, images_per_class, self.steps
        )
        pixels = PixelOptimizer(initial_images, spec, learning_rate)
        pool = ClassPool(records, spec.num_classes)
        rng = streams.make_rng("draws", device)
        net = build_random_net(spec, self.net_width, self.net_depth, device)
        augmentations = None
        if self.augment:
            augmentations = AugmentationBuffer(
                spec.num_classes, spec, streams.make_rng("augment", device), device
            )

        def match_means() -> None:
            initialize_weights(net, rng)
            class_batches, weights = pool.sample(self.batch_per_class, rng)
            real = class_batches.flatten(0, 1)
            images = pixels.pixels
            if augmentations:
                # Real and synthetic images of a class share one augmentation.
                params = augmentations.next_params()
                real_labels = augmentations.row_indices.repeat_interleave(class_batches.shape[1])
                real = apply_augmentations(real, params.select(real_labels))
                images = apply_augmentations(images, params.select(labels))
            distance = compute_class_mean_distance(net, real, weights, images, chunk_size)
            pixels.apply_gradient(*torch.autograd.grad(distance, pixels.pixels))

        graphed_step = GraphedStep(match_means, device, rng)
        for step in range(self.steps):
            if augmentations:
                augmentations.refill_if_empty()
            graphed_step()
            if (step + 1) % STEPS_PER_REPORT == 0 or step + 1 == self.steps:
                progress("matching the means", step + 1, self.steps)
        return Artifact.from_images(unstandardize_images(pixels.pixels), labels)


METHOD = DistributionMatching
