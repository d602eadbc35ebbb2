r"""KIP (Kernel Inducing Points): a small set from which kernel regression predicts the records.

**Released** a set of ``images_per_class`` images of each class, with learned labels if
``learn_labels`` is set.
**Bound** none: the influence of a record is not limited, and nothing is added.
**Cost** the records are read: ``NoGuarantee``. With ``init="real"`` the set is real images,
altered.
**Departs** from the papers: the kernel is that of random ConvNets sampled again in each step
(``features``), or of a dense network (``dense``); pixels stay in [0, 1] and learned labels stay
probabilities in each step; the initial images are noise by default; whitening does not change the
norm of single images.
**Notation** set (X, y), records (T, z): minimize mean |K(T,X) (K(X,X) + ridge*tr/n)^-1 y - z|² / 2,
y and z one-hot minus 1/classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.baselines.augmentation_buffer import AugmentationBuffer
from privot.baselines.condensation import (
    ClassPool,
    CondensationMethod,
    Records,
    count_images_per_class,
    explain_no_guarantee,
    initialize_images,
    standardize_images,
    unstandardize_images,
)
from privot.baselines.kernel_ridge import ConvFeatureRegression, DenseNtkRegression
from privot.baselines.kip_run import KipRun, project_to_simplex
from privot.baselines.zca import ZcaWhitening
from privot.components.validation import require_choice, require_range
from privot.data.spec import Spec
from privot.errors import ReleaseError
from privot.nets.conv_shapes import ConvNetShapes
from privot.nets.ensemble import Ensemble
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

ELEMENTWISE_PASSES = 6  # passes over the feature maps of an image, for each pass of the networks
CALLS_PER_STEP = 400  # tensor operators in a step
LARGE_SET = 50  # images per class from which the learning rate is larger


def choose_kip_learning_rate(images_per_class: int) -> float:
    """Choose 0.04 as in the code of KIP, or 0.1 from 50 images per class, as Dong et al. do."""
    return 0.04 if images_per_class < LARGE_SET else 0.1


@dataclass(frozen=True, kw_only=True)
class KernelInducingPoints(CondensationMethod):
    """Settings of KIP.

    >>> KernelInducingPoints().plan(Spec((1, 28, 28), 10)).stages
    ()
    """

    name: ClassVar[str] = "kernel-points"
    title: ClassVar[str] = "KIP: a set for kernel ridge regression (no privacy)"
    citation: ClassVar[str] = """@inproceedings{nguyen2021kip,
  title     = {Dataset Meta-Learning from Kernel Ridge-Regression},
  author    = {Nguyen, Timothy and Chen, Zhourong and Lee, Jaehoon},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}
@inproceedings{nguyen2021infinitely,
  title     = {Dataset Distillation with Infinitely Wide Convolutional Networks},
  author    = {Nguyen, Timothy and Novak, Roman and Xiao, Lechao and Lee, Jaehoon},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2021}
}
@inproceedings{loo2022rfad,
  title     = {Efficient Dataset Distillation using Random Feature Approximation},
  author    = {Loo, Noel and Hasani, Ramin and Amini, Alexander and Rus, Daniela},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2022}
}"""

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    cpu_minimums: ClassVar[dict[str, int]] = {
        "net_width": 16,
        "num_networks": 1,
        "steps": 100,
        "batch_size": 500,
    }

    init: str = "random"  # or "real"
    kernel: str = (
        "features"  # of random ConvNets; or "dense", the tangent kernel of a dense network
    )
    steps: int = 1000  # the code of KIP shows 300 steps, but it needs 1,000 to converge
    # of Adam, for standardized or whitened pixels and for labels; None: `choose_kip_learning_rate`
    learning_rate: float | None = None
    batch_size: int = 5000  # records in a step, as many of each class
    ridge: float = 1e-6  # times the mean of the kernel's diagonal
    zca: bool = False
    learn_labels: bool = False
    augment: bool = True  # one random operation (DSA) for all images of a step, as Dong et al. do
    num_networks: int = 8  # random ConvNets in a step (Loo et al.)
    net_width: int = 128  # of each
    net_depth: int = 3  # blocks of a ConvNet, or hidden layers of the dense network

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "kernel", ("features", "dense"))
        require_range(self, "ridge", minimum=1e-10, below=10)  # a smaller ridge is below rounding

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        if (images_per_class := self.predict_images_per_class(spec)) is None:
            return {"floating_point_operations": None}
        num_images = images_per_class * spec.num_classes
        num_records = min(self.batch_size, spec.size or self.batch_size)
        shapes = ConvNetShapes(spec.shape, self.net_width, self.net_depth)
        # Records take a forward pass, the set a backward pass to its pixels, too.
        passes = self.num_networks * (num_records + 2 * num_images)
        if self.kernel == "features":
            kernel_flops = passes * shapes.flops
            num_activations = shapes.num_activations
        else:
            # The matrix product below the kernel, forward, and backward to the set on either side.
            kernel_flops = num_images * (4 * num_records + 6 * num_images) * spec.num_features
            num_activations = 0
        return {
            "images": num_images,
            "floating_point_operations": self.steps * (kernel_flops + num_images**3),
            "elementwise_operations": ELEMENTWISE_PASSES * self.steps * passes * num_activations,
            "operator_calls": self.steps * CALLS_PER_STEP,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Minimize the loss of kernel ridge regression on the records.

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
        whitening = ZcaWhitening(standardize_images(records.images)) if self.zca else None
        initial_images, labels = self._initialize_set(
            records, whitening, images_per_class, spec, streams
        )
        pool = ClassPool(records, spec.num_classes)
        images, soft_labels = self._optimize_set(
            initial_images, labels, pool, whitening, spec, streams, progress
        )
        if not (images.isfinite().all() and soft_labels.isfinite().all()):
            raise ReleaseError(
                "The optimization of the set diverged: some values are not finite. Use a lower "
                "learning_rate."
            )
        # Each image remains in its initial class for any learned label, so no class loses images.
        return Artifact.from_images(
            images,
            labels,
            soft_labels=project_to_simplex(soft_labels) if self.learn_labels else None,
        )

    def _initialize_set(
        self,
        records: Records,
        whitening: ZcaWhitening | None,
        images_per_class: int,
        spec: Spec,
        streams: Streams,
    ) -> tuple[Tensor, Tensor]:
        """Choose the initial set.

        Args:
            records: The records.
            whitening: Whitening of the pixels, or None.
            images_per_class: Images of each class.
            spec: Shape and number of classes.
            streams: Public random streams.

        Returns:
            Images in [0, 1] [count, ...] and labels [count].
        """
        images, labels = initialize_images(
            records, spec, images_per_class, self.init, streams.make_rng("start")
        )
        if whitening and self.init == "random":
            # Whitened noise would be largest in the directions in which images hardly vary, so the
            # noise is N(0, 1) in the space in which steps are made.
            noise = torch.randn(images.shape, generator=streams.make_rng("start"))
            images = unstandardize_images(whitening.inverse_transform(noise.to(images.device)))
        return images, labels

    def _optimize_set(
        self,
        images: Tensor,
        labels: Tensor,
        pool: ClassPool,
        whitening: ZcaWhitening | None,
        spec: Spec,
        streams: Streams,
        progress: Progress,
    ) -> tuple[Tensor, Tensor]:
        """Optimize the set.

        Args:
            images: Initial images in [0, 1] [count, ...].
            labels: Their labels [count].
            pool: The records.
            whitening: Whitening of the pixels, or None.
            spec: Shape and number of classes.
            streams: Public random streams.
            progress: Shows the progress.

        Returns:
            Images in [0, 1] [count, ...] and regression labels [count, classes].
        """
        device = images.device
        augmentations = None
        if self.augment:
            augmentations = AugmentationBuffer(1, spec, streams.make_rng("augment"), device)
        run = KipRun(
            images,
            labels,
            pool,
            self._build_regression(spec, streams),
            whitening,
            augmentations,
            learning_rate=self.learning_rate
            or choose_kip_learning_rate(len(labels) // spec.num_classes),
            batch_per_class=max(1, self.batch_size // spec.num_classes),
            ridge=self.ridge,
            learn_labels=self.learn_labels,
        )
        return run.run(self.steps, streams.make_rng("draws", device), progress)

    def _build_regression(
        self, spec: Spec, streams: Streams
    ) -> DenseNtkRegression | ConvFeatureRegression:
        if self.kernel == "dense":
            return DenseNtkRegression(self.net_depth)
        nets = Ensemble(
            self.num_networks,
            spec.shape,
            spec.num_classes,
            self.net_width,
            self.net_depth,
            generator=streams.make_rng("nets"),
        )
        return ConvFeatureRegression(
            nets.to(streams.runtime.torch_device), streams.runtime.chunk_size
        )


METHOD = KernelInducingPoints
