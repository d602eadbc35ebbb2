r"""DM: a small set whose mean features match those of the data, class by class, in random networks.

**Released** a set of ``per_class`` images a class.
**Bound** none: no record's influence is limited, and nothing is added. In a linear network the means of set and data become equal.
**Cost** the records are opened: ``NoGuarantee``. With ``init="real"`` the set is real images, slightly altered.
**Departs** from the paper: pixels stay in [0, 1] at each step; public constants standardise them; starts from noise unless told otherwise;
one augmentation a class; bfloat16 on a GPU; from noise the rates of Dong et al. (2022), in long runs less.
**Notation** minimise E sum over classes of |mean psi(A(T_c)) - mean psi(A(S_c))|², psi a fresh random ConvNet, A one augmentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

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
from privot.baselines.parallel_matching import distance, random_net, usual_rate
from privot.data.spec import Spec
from privot.nets.augment import apply
from privot.nets.conv_shapes import Outline
from privot.nets.generators.conv import initialise
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Product
from privot.runtime import Progress, Streams
from privot.runtime.graphed_step import Repeated

ELEMENTWISE = 2  # passes over the maps of an image, for each way through the net
CALLS = 400  # of tensor operators, in an iteration


@dataclass(frozen=True, kw_only=True)
class DistributionMatching(Condensed):
    """Settings of DM. ``ratio`` sets the images of a class as a part of its records, in place of ``per_class``.

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
    economies: ClassVar[dict[str, int]] = {"width": 16, "iterations": 250, "batch": 64}

    init: str = "random"  # or "real"
    iterations: int = 20_000
    rate: float | None = None  # None: see `usual_rate`
    batch: int = 256  # real images of a class
    augment: bool = True
    width: int = 128
    depth: int = 3

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        if (images := self.images(spec)) is None:
            return {"floating_point_operations": None}
        # a real image goes forward, a synthetic one also back, to its pixels
        passes = spec.classes * (self.batch + 2 * images)
        outline = Outline(spec.shape, self.width, self.depth)
        return {
            "images": images * spec.classes,
            "floating_point_operations": self.iterations * passes * outline.work,
            "elementwise_operations": ELEMENTWISE * self.iterations * passes * outline.elements,
            "operator_calls": self.iterations * CALLS,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        device = streams.runtime.target
        portion = streams.runtime.portion
        records = gate.open(reason(self.init))
        per_class = counted(self.per_class, self.ratio, len(records.labels), spec.classes)
        begun, labels = start(records, spec, per_class, self.init, streams.generator("start"))
        pixels = Pixels(begun, spec, self.rate or usual_rate(self.init, per_class, self.iterations))
        pool = Pool(records, spec.classes)
        draws = streams.generator("draws", device)
        net = random_net(spec, self.width, self.depth, device)
        ahead = (
            Augmentations(spec.classes, spec, streams.generator("augment", device), device)
            if self.augment
            else None
        )

        def step() -> None:
            initialise(net, draws)
            real, weight = pool.draw(self.batch, draws)
            known = real.flatten(0, 1)
            shown = pixels.free
            if ahead:
                drawn = ahead.take()  # one for each class, real and synthetic alike
                known = apply(known, drawn.chosen(ahead.row.repeat_interleave(real.shape[1])))
                shown = apply(shown, drawn.chosen(labels))
            pixels.descend(
                *torch.autograd.grad(distance(net, known, weight, shown, portion), pixels.free)
            )

        repeated = Repeated(step, device, draws)
        for iteration in range(self.iterations):
            if ahead:
                ahead.ready()
            repeated()
            if iteration % 100 == 99 or iteration + 1 == self.iterations:
                progress("matching the means", iteration + 1, self.iterations)
        return Product.set(finished(pixels.free), labels)


METHOD = DistributionMatching
