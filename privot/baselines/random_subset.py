"""A random subset of the real images: the baseline that any condensed set must be held against.

**Released** ``per_class`` records of each class, as they are.
**Bound** none: a chosen record is published whole.
**Cost** the records are opened: ``NoGuarantee``. Of those that are not chosen nothing is said but that.
**Departs** from nothing: Dong et al. (2022) attack the same baseline, but on its own images alone.
**Notation** none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from privot.baselines.condensation import Condensed, counted, start
from privot.data.spec import Spec
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Product
from privot.runtime import Progress, Streams


@dataclass(frozen=True, kw_only=True)
class RealSubset(Condensed):
    """``per_class`` real images of each class, or ``ratio`` of the mean class size.

    >>> RealSubset(per_class=10).forecast(Spec((1, 28, 28), 10), RealSubset().plan(Spec((1, 28, 28), 10)))
    {'images': 100, 'floating_point_operations': 0}
    """

    name: ClassVar[str] = "real-subset"
    title: ClassVar[str] = "random real images: the naive baseline (no privacy)"
    promise: ClassVar[str] = "none: these are real records"
    init: ClassVar[str] = "real"
    real: ClassVar[bool] = True  # what is released are records as they were
    citation: ClassVar[str] = """@inproceedings{dong2022privacy,
  title     = {Privacy for Free: How does Dataset Condensation Help Privacy?},
  author    = {Dong, Tian and Zhao, Bo and Lyu, Lingjuan},
  booktitle = {International Conference on Machine Learning},
  year      = {2022}
}"""

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        each_class = self.images(spec)
        return {"images": each_class and each_class * spec.classes, "floating_point_operations": 0}

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        progress("choosing records", 0, 1)
        records = gate.open("these are real records")
        per_class = counted(self.per_class, self.ratio, len(records.labels), gate.spec.classes)
        chosen = start(records, gate.spec, per_class, self.init, streams.generator("start"))
        progress("choosing records", 1, 1)
        return Product.set(*chosen)


METHOD = RealSubset
