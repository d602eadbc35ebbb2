r"""DC and DSA: a small set on which a network's gradients are those of the data, class by class, while it learns.

**Released** a set of ``per_class`` images a class.
**Bound** none: the gradients of real images are used as they are.
**Cost** the records are opened: ``NoGuarantee``. With ``init="real"`` the set is real images, slightly altered.
**Departs** from the papers: pixels stay in [0, 1] at each step; public constants standardise them; 1,000 restarts, not 1,001; noise is
the start unless told otherwise; inner batches are of equal size; with ``augment`` each image of an inner batch draws its own operation.
**Notation** minimise sum over classes, layers and output rows of 1 - cos(grad of T_c, grad of S_c); ``outer`` steps a network, ``inner``
epochs between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privot.baselines.condensation import (
    Augmentations,
    Condensed,
    Pixels,
    Pool,
    counted,
    finished,
    reason,
    start,
)
from privot.data.spec import Spec
from privot.nets.augment import Drawn, apply
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.conv_block import half
from privot.nets.conv_shapes import Outline
from privot.nets.generators.conv import initialise
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Product
from privot.runtime import Progress, Streams
from privot.runtime.graphed_step import Repeated

LOOPS = {
    1: (1, 1),
    10: (10, 50),
    20: (20, 25),
    30: (30, 20),
    40: (40, 15),
    50: (50, 10),
    100: (50, 10),
}  # (outer, inner), the papers'
LEARNING = 0.01  # rate of the network's plain gradient steps
BATCH = 256  # most images in one of them
CALLS = 500  # of tensor operators, in a step of the network; of matching a class it is four times as many


def loops(per_class: int) -> tuple[int, int]:
    """Outer and inner loops by the images of a class. The papers have a table; between, outer * inner = 500 as at 10, 20 and 50.

    >>> loops(10), loops(5), loops(60)
    ((10, 50), (5, 100), (50, 10))
    """
    outer = min(per_class, 50)
    return LOOPS.get(per_class, (outer, round(500 / outer)))


def row_distance(real: list[Tensor], synthetic: list[Tensor]) -> Tensor:
    """One minus the cosine of each output row, added up over rows and weights."""
    total = torch.zeros((), device=real[0].device)
    for one, other in zip(real, synthetic, strict=True):
        one = one.flatten(1)
        other = other.flatten(1)
        # 1e-6 as in the papers' code, for rows that are 0
        cosine = (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1) + 1e-6)
        total = total + (1 - cosine).sum()
    return total


def class_gradient(
    net: nn.Module, known: Tensor, weight: Tensor, shown: Tensor, label: Tensor
) -> Tensor:
    """What moves the synthetic images of one class: the gradient of `row_distance` with respect to ``shown``.

    ``known`` [batch, ...] are real images with weights [batch] that add up to 1, ``shown`` [per_class, ...] is what the network sees
    of the synthetic ones, and ``label`` is the class, a scalar. Biases and norms, of one dimension, are not compared.
    """
    compared = [each for each in net.parameters() if each.ndim > 1]
    with half(known.device):
        losses = cross_entropy(net(known), label.expand(len(known)), reduction="none")
    real = torch.autograd.grad(
        losses.float() @ weight, compared
    )  # out of autocast, which would round the losses to half precision
    loss = cross_entropy(net(shown), label.expand(len(shown)))
    synthetic = torch.autograd.grad(loss, compared, create_graph=True)
    return torch.autograd.grad(row_distance(list(real), list(synthetic)), shown)[0]


@dataclass(frozen=True, kw_only=True)
class GradientMatching(Condensed):
    """Settings of DSA, or of DC with ``augment=False``. ``outer`` and ``inner`` follow the papers' table unless given.

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
    economies: ClassVar[dict[str, int]] = {"width": 16, "iterations": 2, "batch": 64}

    init: str = "random"  # or "real"
    iterations: int = 1000  # networks
    outer: int | None = None
    inner: int | None = None
    rate: float | None = None  # None: 0.1, the papers' for every size
    batch: int = 256  # real images of a class
    augment: bool = True  # DSA
    width: int = 128
    depth: int = 3

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        if (images := self.images(spec)) is None:
            return {"floating_point_operations": None}
        outer, inner = self._loops(images)
        # forward and back is 3 passes; back again through those is 5 more
        passes = outer * (3 * self.batch + 8 * images) + (outer - 1) * inner * 3 * images
        work_done = (
            self.iterations
            * spec.classes
            * passes
            * Outline(spec.shape, self.width, self.depth).work
        )
        learnt = (outer - 1) * inner * math.ceil(images * spec.classes / BATCH)
        calls = self.iterations * CALLS * (4 * outer * spec.classes + learnt)
        return {
            "images": images * spec.classes,
            "floating_point_operations": work_done,
            "operator_calls": calls,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        records = gate.open(reason(self.init))
        per_class = counted(self.per_class, self.ratio, len(records.labels), spec.classes)
        begun, labels = start(records, spec, per_class, self.init, streams.generator("start"))
        run = _Run(
            self,
            spec,
            Pool(records, spec.classes),
            Pixels(begun, spec, self.rate or 0.1),
            labels,
            streams,
        )
        outer, inner = self._loops(per_class)
        for iteration in range(self.iterations):
            run.renew()
            for turn in range(outer):
                run.match()
                for _ in range(inner if turn + 1 < outer else 0):
                    run.learn()
            progress("matching the gradients", iteration + 1, self.iterations)
        return Product.set(finished(run.pixels.free), labels)

    def _loops(self, per_class: int) -> tuple[int, int]:
        outer, inner = loops(per_class)
        return self.outer or outer, self.inner or inner


class _Run:
    """One network after another, the set, and the two steps that alternate; each step is one CUDA graph where there is a GPU."""

    def __init__(
        self,
        method: GradientMatching,
        spec: Spec,
        pool: Pool,
        pixels: Pixels,
        labels: Tensor,
        streams: Streams,
    ):
        device = streams.runtime.target
        self.pool = pool
        self.pixels = pixels
        self.labels = labels
        self.batch = method.batch
        self.classes = torch.arange(spec.classes, device=device)
        self.draws = streams.generator("draws", device)
        self.net = ConvNet(spec.shape, spec.classes, method.width, method.depth).to(device)
        self.siamese = self.single = None  # type: Augmentations | None
        if method.augment:
            self.siamese = Augmentations(
                spec.classes, spec, streams.generator("siamese", device), device
            )
            self.single = Augmentations(
                len(labels), spec, streams.generator("augment", device), device
            )
        self.parts = math.ceil(
            len(labels) / BATCH
        )  # of an epoch: 500 images are two batches of 250
        self._match, self._learn = (
            Repeated(each, device, self.draws) for each in (self._matching, self._learning)
        )

    def renew(self) -> None:
        """A fresh random network in the place of the old."""
        initialise(self.net, self.draws)
        for module in self.net.modules():
            if isinstance(module, nn.GroupNorm):
                module.reset_parameters()

    def match(self) -> None:
        """One step of the set toward the data's gradients."""
        if self.siamese:
            self.siamese.ready()
        self._match()

    def learn(self) -> None:
        """One epoch of the network on the set as it is."""
        if self.single:
            self.single.ready()
        self._learn()

    def _matching(self) -> None:
        real, weight = self.pool.draw(self.batch, self.draws)
        drawn = self.siamese.take() if self.siamese else None
        each = self.pixels.free.detach().unflatten(0, (len(self.classes), -1))
        # class by class, with plain convolutions: a batch of one class is work enough for a GPU, and in one graph launches are cheap
        parts = zip(real, weight, each, self.classes, strict=True)
        self.pixels.descend(torch.cat([self._class_gradient(*part, drawn) for part in parts]))

    def _class_gradient(
        self, real: Tensor, weight: Tensor, images: Tensor, label: Tensor, drawn: Drawn | None
    ) -> Tensor:
        """The gradient of one class's pixels: through the augmentation that real and synthetic images share."""
        images = images.clone().requires_grad_()
        if drawn is None:
            return class_gradient(self.net, real, weight, images, label)
        known, shown = (
            apply(part, drawn.chosen(label.expand(len(part)))) for part in (real, images)
        )
        (gradient,) = torch.autograd.grad(
            shown, images, class_gradient(self.net, known, weight, shown, label)
        )
        return gradient

    def _learning(self) -> None:
        images = self.pixels.free.detach()
        if self.single:
            images = apply(images, self.single.take())
        order = torch.rand(len(images), generator=self.draws, device=images.device).argsort()
        size = len(images) // self.parts
        parameters = list(self.net.parameters())
        for chosen in order[: size * self.parts].split(size):
            with half(images.device):
                loss = cross_entropy(self.net(images[chosen]), self.labels[chosen])
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=LEARNING)


METHOD = GradientMatching
