r"""DP-MERF: match a generator to the noisy mean embedding of the data.

**Released** the sum over records of random Fourier features, by class, once, with Gaussian noise; with it a noisy count of each
class where class sizes are not declared.
**Bound** every record's part has norm 1 by construction (cos² + sin² = 1, shared with the count), and the gate clips it to 1.
**Cost** one full-batch Gaussian event. All training of the generator is post-processing.
**Departs** from the paper: counts ride in the same event instead of a second one; the squared norm of the generated embedding is
estimated without its batch bias; several kernel widths share the features; widths come from settings, never from the data.
**Notation** features phi(x) = [cos(Wx), sin(Wx)]/sqrt(features/2), rows of W ~ N(0, I/width²).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from privot.components.random_features import (
    CALLS,
    ELEMENTWISE,
    count_share,
    counted,
    embed,
    frequencies,
    goals,
    match,
)
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets import NETS, initialise
from privot.nets.generators.dense import described
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.release.artifact import Product
from privot.runtime import Progress, Streams


def embedding_and_count(image: Tensor, label: Tensor, frequencies: Tensor, share: float) -> Tensor:
    """One record's part: its features and a constant that counts it, of norm 1 together: [features + 1]."""
    return counted(embed(image.flatten(), frequencies), share)


@dataclass(frozen=True, kw_only=True)
class Merf:
    """Settings of DP-MERF. ``noise`` fixes the multiplier; without it the budget does.

    >>> Merf(noise=5.0).plan(Spec((1, 28, 28), 10)).cost().epsilon(1e-5).__round__(3)
    0.726
    """

    name: ClassVar[str] = "merf"
    title: ClassVar[str] = "DP-MERF: a generator from a noisy mean embedding"
    trusts: ClassVar[str] = "the data owner"
    promise: ClassVar[str] = "(epsilon, delta), one Gaussian release"
    citation: ClassVar[str] = """@inproceedings{harder2021dpmerf,
  title     = {{DP-MERF}: Differentially Private Mean Embeddings with Random Features for Practical Privacy-Preserving Data Generation},
  author    = {Harder, Frederik and Adamczewski, Kamil and Park, Mijung},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year      = {2021}
}"""

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {"portion": 500, "steps": 500}

    noise: float | None = None
    neighbours: str = "replace"
    features: int = 10_000
    widths: tuple[float, ...] = (
        8.0,
        5.0,
        3.0,
    )  # of the kernels, at 784 pixels; the paper has 10.25 alone. How chosen: bench/RESULTS.md
    net: str = "dense"  # or "conv"
    code: int = 5
    hidden: int = 256
    waves: int = 14  # lowest cosines a side in which the dense net draws
    steps: int = 3000
    batch: int = 25  # a class
    portion: int = 4000  # of the features, looked at in one step
    rate: float = 0.01  # of Adam

    def __post_init__(self) -> None:
        if self.neighbours not in ("replace", "add-remove"):
            raise SettingError(f"merf.neighbours={self.neighbours!r}: replace or add-remove")
        if self.net not in ("dense", "conv"):
            raise SettingError(f"merf.net={self.net!r}: dense or conv")
        for key in ("features", "code", "hidden", "waves", "steps", "portion"):
            if getattr(self, key) < 2:
                raise SettingError(f"merf.{key}={getattr(self, key)}: at least 2 is needed")
        if (
            self.batch < 2
            or not 0 < self.rate < 1
            or not self.widths
            or not all(0 < width < math.inf for width in self.widths)
        ):
            raise SettingError("merf: batch >= 2, 0 < rate < 1 and widths > 0 are needed")
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise SettingError(f"merf.noise={self.noise}: a multiplier of 0 or more is needed")

    def plan(self, spec: Spec) -> Plan:
        return Plan(
            (Stage("embedding", "sum", 1.0 if self.noise is None else self.noise),),
            Neighbours(self.neighbours),
        )

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        noise_std = plan.stages[0].noise * (2 if plan.neighbours is Neighbours.REPLACE else 1)
        per_class = (
            min(spec.class_sizes)
            if spec.class_sizes
            else spec.size / spec.classes
            if spec.size
            else None
        )
        seen = min(self.portion, self.features)
        work = (
            self.steps * self.batch * spec.classes * 3 * seen + (spec.size or 0) * self.features
        ) * spec.pixels
        # A rule of thumb: a class's embedding has norm near 0.8 a record (seen on MNIST at width 10.25), and noise is taken to reach
        # the generator in 100 directions, however many features carry it. The 100 is a guess, not a measurement.
        ratio = 0.8 * per_class / (noise_std * math.sqrt(100)) if per_class and noise_std else None
        return {
            "signal_to_noise_per_class": ratio,
            "floating_point_operations": work,
            "elementwise_operations": ELEMENTWISE * self.steps * self.batch * spec.classes * seen,
            "operator_calls": self.steps * CALLS,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        device = streams.runtime.target
        # Widths scale with the side, so that one setting fits all sizes.
        scale = math.sqrt(spec.pixels / 784)
        generator = streams.generator("features")
        known = frequencies(spec.pixels, self.features, self.widths, scale, generator).to(device)
        share = count_share(spec)
        progress("embedding the records", 0, 1)
        answer = gate.sum("embedding", embedding_and_count, known, share, bound=1.0, per_class=True)
        progress("embedding the records", 1, 1)
        drawing = {key: getattr(self, key) for key in ("code", "hidden", "waves")}
        kind, arguments = described(self.net, spec.shape, spec.classes, **drawing)
        net = initialise(NETS[kind](**arguments), streams.generator("weights")).to(device).train()
        how: dict[str, Any] = {
            key: getattr(self, key) for key in ("code", "steps", "batch", "portion", "rate")
        }
        match(
            net,
            net.parameters(),
            *goals(answer, share, spec),
            known,
            **how,
            streams=streams,
            progress=progress,
        )
        return Product.generator(kind, arguments, net.eval())


METHOD = Merf
