"""A random subset of the real images: the baseline with which any condensed set must be compared.

**Released** ``images_per_class`` records of each class, as they are.
**Bound** none: a chosen record is published whole.
**Cost** the records are read: ``NoGuarantee``. Of the other records only the fact is published that
they were not chosen.
**Departs** from nothing: Dong et al. (2022) attack the same baseline, but only on its own images.
**Notation** none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from privot.baselines.condensation import (
    CondensationMethod,
    count_images_per_class,
    initialize_images,
)
from privot.data.spec import Spec
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams


@dataclass(frozen=True, kw_only=True)
class RandomSubset(CondensationMethod):
    """``images_per_class`` real images of each class, or ``ratio`` of the mean class size.

    >>> method, spec = RandomSubset(images_per_class=10), Spec((1, 28, 28), 10)
    >>> method.forecast(spec, method.plan(spec))
    {'images': 100, 'floating_point_operations': 0}
    """

    name: ClassVar[str] = "real-subset"
    title: ClassVar[str] = "random real images: the simplest baseline (no privacy)"
    guarantee_summary: ClassVar[str] = "none: these are real records"
    init: ClassVar[str] = "real"
    releases_real_records: ClassVar[bool] = True
    citation: ClassVar[str] = """@inproceedings{dong2022privacy,
  title     = {Privacy for Free: How does Dataset Condensation Help Privacy?},
  author    = {Dong, Tian and Zhao, Bo and Lyu, Lingjuan},
  booktitle = {International Conference on Machine Learning},
  year      = {2022}
}"""

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        images_per_class = self.predict_images_per_class(spec)
        return {
            "images": images_per_class and images_per_class * spec.num_classes,
            "floating_point_operations": 0,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Choose random records of each class.

        Args:
            gate: Answers the queries of the plan.
            streams: Public random numbers and checkpoints.
            progress: Called with public facts of the run.

        Returns:
            The chosen records, unchanged.
        """
        progress("choosing records", 0, 1)
        records = gate.read_without_guarantee("these are real records")
        images_per_class = count_images_per_class(
            self.images_per_class, self.ratio, len(records.labels), gate.spec.num_classes
        )
        images, labels = initialize_images(
            records, gate.spec, images_per_class, self.init, streams.make_rng("start")
        )
        progress("choosing records", 1, 1)
        return Artifact.from_images(images, labels)


METHOD = RandomSubset
