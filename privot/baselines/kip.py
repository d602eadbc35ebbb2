r"""KIP: a small set from which kernel ridge regression predicts the records (Kernel Inducing Points). No privacy.

**Released** a set of ``per_class`` images a class, with learned labels if asked for.
**Bound** none: no record's influence is limited, and nothing is added.
**Cost** the records are opened: ``NoGuarantee``. With ``init="real"`` the set is real images, altered.
**Departs** from the papers: the kernel is that of random ConvNets drawn anew at each step (``features``) or of a dense network
(``dense``); pixels stay in [0, 1] and learned labels probabilities at each step; starts from noise unless told otherwise; whitening
keeps the norm of single images.
**Notation** set (X, y), records (T, z): minimise mean |K(T,X) (K(X,X) + ridge·tr/n)^-1 y - z|² / 2, y and z one-hot minus 1/classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from privot.baselines.condensation import (
    STANDARD,
    Augmentations,
    Condensed,
    Pool,
    counted,
    finished,
    reason,
    standardised,
    start,
)
from privot.baselines.kernel_ridge import DenseKernel, FeatureKernel
from privot.baselines.zca import Whitening
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.nets.augment import Drawn, apply
from privot.nets.conv_shapes import Outline
from privot.nets.ensemble import Ensemble
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Product
from privot.runtime import Progress, Streams

ELEMENTWISE = 6  # passes over the maps of an image, for each way through the nets
CALLS = 400  # of tensor operators, in a step


def centred(labels: Tensor, classes: int) -> Tensor:
    """One-hot minus 1/classes, what the regression is to give: [count, classes]."""
    return one_hot(labels, classes).float() - 1 / classes


def probabilities(labels: Tensor) -> Tensor:
    """The probability vectors nearest (in Euclidean distance) to regression labels plus 1/classes: [count, classes].

    >>> probabilities(torch.tensor([[0.5, -0.5], [1.5, -0.5], [0.1, -0.1]]))
    tensor([[1.0000, 0.0000],
            [1.0000, 0.0000],
            [0.6000, 0.4000]])
    """
    rows = labels + 1 / labels.shape[1]
    ordered = rows.sort(1, descending=True).values
    ranks = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    surplus = (
        ordered.cumsum(1) - 1
    ) / ranks  # to be taken off each of the largest, for every number of them
    kept = (ordered > surplus).sum(1, keepdim=True)
    nearest = (rows - surplus.gather(1, kept - 1)).clamp(min=0)
    return nearest / nearest.sum(1, keepdim=True)  # rounding of labels far outside


def usual_rate(per_class: int) -> float:
    """0.04 as in the KIP code, and 0.1 from 50 images of a class: Dong et al. have it at their larger ratio."""
    return 0.04 if per_class < 50 else 0.1


@dataclass(frozen=True, kw_only=True)
class KernelPoints(Condensed):
    """Settings of KIP. ``ratio`` sets the images of a class as a part of its records, in place of ``per_class``.

    >>> KernelPoints().plan(Spec((1, 28, 28), 10)).stages
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
    economies: ClassVar[dict[str, int]] = {"width": 16, "nets": 1, "steps": 100, "batch": 500}

    init: str = "random"  # or "real"
    kernel: str = (
        "features"  # of random ConvNets; or "dense": the tangent kernel of a dense network, exact
    )
    steps: int = 1000  # the KIP code shows 300, and takes 1,000 to converge
    rate: float | None = (
        None  # of Adam, on standardised or whitened pixels and on labels. None: see `usual_rate`
    )
    batch: int = 5000  # records a step, as many of each class
    ridge: float = 1e-6  # times the mean of the kernel's diagonal
    zca: bool = False
    learned_labels: bool = False
    augment: bool = True  # one random change (DSA) for all images of a step, as Dong et al. did
    nets: int = 8  # random ConvNets a step (Loo et al.)
    width: int = 128  # of each
    depth: int = 3  # blocks of a ConvNet, or hidden layers of the dense network

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel not in ("features", "dense"):
            raise SettingError(f"{self.name}.kernel={self.kernel!r}: features or dense")
        if not 1e-10 <= self.ridge < 10:
            raise SettingError(
                f"{self.name}.ridge={self.ridge}: at least 1e-10, under which it drowns in rounding, and under 10 is needed"
            )

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        if (each_class := self.images(spec)) is None:
            return {"floating_point_operations": None}
        images = each_class * spec.classes
        seen = min(self.batch, spec.size or self.batch)
        # Records go forward, the set also back to its pixels. A dense kernel is the matrix product below it: forward, and back to the set
        # on whichever side that is.
        features = (
            self.nets * (seen + 2 * images) * Outline(spec.shape, self.width, self.depth).work
        )
        each = (
            features
            if self.kernel == "features"
            else images * (4 * seen + 6 * images) * spec.pixels
        )
        maps = (
            Outline(spec.shape, self.width, self.depth).elements if self.kernel == "features" else 0
        )
        return {
            "images": images,
            "floating_point_operations": self.steps * (each + images**3),
            "elementwise_operations": ELEMENTWISE
            * self.steps
            * self.nets
            * (seen + 2 * images)
            * maps,
            "operator_calls": self.steps * CALLS,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        records = gate.open(reason(self.init))
        per_class = counted(self.per_class, self.ratio, len(records.labels), spec.classes)
        white = Whitening(standardised(records.images)) if self.zca else None
        begun, labels = self._begin(records, white, per_class, spec, streams)
        images, soft = self._descend(
            begun, labels, Pool(records, spec.classes), white, spec, streams, progress
        )
        if not (images.isfinite().all() and soft.isfinite().all()):
            raise ReleaseError(
                "the set has values that are not finite: its optimisation diverged; try a lower rate"
            )
        # The class of an image stays the one it began in, whatever its learned label: every class keeps its images.
        return Product.set(
            images, labels, soft=probabilities(soft) if self.learned_labels else None
        )

    def _begin(
        self, records: Any, white: Whitening | None, per_class: int, spec: Spec, streams: Streams
    ) -> tuple[Tensor, Tensor]:
        """Where the set starts, in [0, 1], and its labels."""
        begun, labels = start(records, spec, per_class, self.init, streams.generator("start"))
        if white and self.init == "random":
            # Noise in pixels would, whitened, be loudest in the directions that images hardly use: noise is N(0, 1) where steps are made.
            begun = finished(
                white.back(
                    torch.randn(begun.shape, generator=streams.generator("start")).to(begun.device)
                )
            )
        return begun, labels

    def _descend(
        self,
        images: Tensor,
        labels: Tensor,
        pool: Pool,
        white: Whitening | None,
        spec: Spec,
        streams: Streams,
        progress: Progress,
    ) -> tuple[Tensor, Tensor]:
        """The set that predicts best, in [0, 1], and its regression labels. Nothing in the loop waits for the device."""
        device = images.device
        (mean, std) = STANDARD[spec.shape[0]]
        draws = streams.generator("draws", device)
        kernel = self._kernel(spec, streams)
        ahead = (
            Augmentations(1, spec, streams.generator("augment"), device) if self.augment else None
        )
        moved = white(standardised(images)) if white else standardised(images)
        soft = centred(labels, spec.classes)
        learned = [moved.requires_grad_(), soft.requires_grad_()][: 2 if self.learned_labels else 1]
        optimiser = torch.optim.Adam(
            learned, lr=self.rate or usual_rate(len(labels) // spec.classes)
        )
        for step in range(self.steps):
            kernel.renew(draws)
            real, weight = pool.draw(
                max(1, self.batch // spec.classes), draws
            )  # [classes, batch, ...] and [classes, batch]
            wanted = centred(
                torch.arange(spec.classes, device=device).repeat_interleave(weight.shape[1]),
                spec.classes,
            )
            seen = moved
            known = white(real.flatten(0, 1)) if white else real.flatten(0, 1)
            if ahead:
                ahead.ready()
                drawn = ahead.take()
                seen, known = (
                    apply(each, Drawn(*(part.expand(len(each), *part.shape[1:]) for part in drawn)))
                    for each in (seen, known)
                )
            errors = (kernel.predict(seen, soft, known, self.ridge) - wanted).square().mean(1)
            loss = (errors * weight.flatten()).sum() / spec.classes / 2
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            with (
                torch.no_grad()
            ):  # held at each step to what can be released, so nothing is cut off at the end
                images = ((white.back(moved) if white else moved) * std + mean).clamp(0, 1)
                moved.copy_(white(standardised(images)) if white else standardised(images))
                if self.learned_labels:
                    soft.copy_(probabilities(soft) - 1 / spec.classes)
            if step % 25 == 24 or step + 1 == self.steps:
                progress("moving the set", step + 1, self.steps)
        return images, soft.detach()

    def _kernel(self, spec: Spec, streams: Streams) -> DenseKernel | FeatureKernel:
        if self.kernel == "dense":
            return DenseKernel(self.depth)
        nets = Ensemble(
            self.nets,
            spec.shape,
            spec.classes,
            self.width,
            self.depth,
            generator=streams.generator("nets"),
        )
        return FeatureKernel(nets.to(streams.runtime.target), streams.runtime.portion)


METHOD = KernelPoints
