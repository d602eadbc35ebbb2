r"""The sliced generator (DPSWgen): a network trained until its quantiles along many directions are the noisy ones of the data.

**Released** what the sliced flow releases in the same mode. Blocks (ours): per class its moments and, per direction of a tight frame, sums
of sorted runs of projections, once. Records: every record's point, once. In space private, before that, noisy sums of an auto-encoder's
gradients.
**Bound** blocks: parts of norm 1 for the moments; 2 radius sqrt(bases) for the blocks: a replaced record moves a sorted vector by
|theta v| in L1, and a tight frame sees every v alike; records: one row changes, 2 bound; gradients: each clipped.
**Cost** blocks: two full-batch Gaussian answers, together one; records: one; and an event for each lesson of a private auto-encoder.
All training of the generator is post-processing.
**Departs** from the paper: one release, asked once, in place of noisy projections of every batch; sorting before the noise; classes; fixed
transforms, or auto-encoders that learn in public or pay; no failure probability.
**Notation** as in sliced-flow; the loss is the mean over classes, directions of one basis and ranks of (theta G(code) - target quantile)².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from privot.components.latent_space import Coded
from privot.components.noisy_projections import Noisy, corners
from privot.components.sliced_settings import DRAWING, WAVES, Sliced
from privot.components.sliced_statistics import Asked, counted
from privot.components.transforms import Space
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets import NETS, initialise
from privot.nets.ema import Averaged, faded
from privot.nets.generators.dense import described
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan
from privot.release.artifact import Product
from privot.runtime import Progress, Streams
from privot.transport.sliced import target_loss

CALLS = 1200  # of tensor operators, in a step of the generator
SORTING = 50  # element-wise passes that sorting a projection is worth


@dataclass(frozen=True, kw_only=True)
class SlicedGenerator(Sliced):
    """Settings of the sliced generator. ``noise`` fixes the multiplier; without it the budget does.

    >>> spec = Spec((1, 28, 28), 10, 60_000, (6000,) * 10)
    >>> SlicedGenerator(noise=3.7306).plan(spec).cost().epsilon(1e-5).__round__(3)
    1.0
    """

    name: ClassVar[str] = "sliced-generator"
    title: ClassVar[str] = (
        "Sliced-Wasserstein generator: a network fitted to noisy quantiles (DPSWgen)"
    )
    promise: ClassVar[str] = "(epsilon, delta), all answers together one Gaussian"
    citation: ClassVar[str] = """@inproceedings{rakotomamonjy2021dpswd,
  title     = {Differentially Private Sliced {Wasserstein} Distance},
  author    = {Rakotomamonjy, Alain and Ralaivola, Liva},
  booktitle = {International Conference on Machine Learning},
  year      = {2021}
}
@article{sebag2025dpswflow,
  title   = {Differentially Private Gradient Flow based on the Sliced {Wasserstein} Distance},
  author  = {Sebag, I. and Pydi, M. S. and Franceschi, J.-Y. and Rakotomamonjy, A. and Gartrell, M. and Atif, J. and Allauzen, A.},
  journal = {Transactions on Machine Learning Research},
  year    = {2025}
}"""

    # Settings that may change when a crashed run goes on: nothing asked so far depends on them.
    free: ClassVar[tuple[str, ...]] = ("net", "code", "hidden", "steps", "batch", "rate", "average")

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {"batch": 50, "steps": 500}

    net: str = "dense"  # or "conv"; in a learned space always dense, before the decoder
    code: int = 16
    hidden: int = 256
    steps: int = 2000
    batch: int = 100  # a class: the sorted batch stands for the quantiles
    rate: float = 3e-3  # of Adam
    average: float = 0.99  # of the running mean of the weights, which is released

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.net not in ("dense", "conv"):
            raise SettingError(f"sliced-generator.net={self.net!r}: dense or conv")
        counted(self, "code", "hidden", "steps")
        if self.batch < 2 or not (0 < self.rate < 1 and 0 <= self.average < 1):
            raise SettingError(
                "sliced-generator: batch >= 2, 0 < rate < 1 and 0 <= average < 1 are needed"
            )

    def plan(self, spec: Spec) -> Plan:
        return Plan(self.questions(spec), Neighbours.REPLACE)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        dim = self.dim(spec)
        drawn = self.steps * self.batch * spec.classes
        work = 4 * drawn * dim * (dim + spec.pixels + self.hidden) + self.opening_work(spec)
        return {
            "signal_to_noise_per_class": self.signal(spec, plan),
            "floating_point_operations": work,
            "elementwise_operations": SORTING * drawn * dim,
            "operator_calls": CALLS * self.steps + self.opening_calls(),
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        device = streams.runtime.target
        here = self.placed(gate, streams, progress)
        asked = self.asked if self.mode == "blocks" else self.noisy_points
        made = asked(gate, here, streams, progress)
        kind, arguments = self._net(spec)
        net: Any = (
            initialise(NETS[kind](**arguments), streams.generator("weights")).to(device).train()
        )
        if isinstance(here, Coded):
            net.decoder.load_state_dict(here.decoder.state_dict())
            net.decoder.requires_grad_(False)
        pair = Averaged(net, self.rate, (0.9, 0.99), self.average)
        self._fit(pair, made, here, spec, streams, progress)
        draws = streams.generator("settling", device)
        labels = torch.arange(spec.classes, device=device).repeat_interleave(self.batch)
        mean = pair.settled(
            lambda drawn: drawn(
                torch.randn(len(labels), self.code, generator=draws, device=device), labels
            )
        )
        return Product.generator(kind, arguments, mean)

    def _fit(
        self,
        pair: Averaged,
        made: Asked | Noisy,
        here: Space | Coded,
        spec: Spec,
        streams: Streams,
        progress: Progress,
    ) -> None:
        """One basis a step, in an order that takes each equally often."""
        device, bases, net = made.frame.device, len(made.frame), pair.net  # type: tuple[torch.device, int, Any]
        labels = torch.arange(spec.classes, device=device).repeat_interleave(self.batch)
        codes = streams.generator("codes", device)
        turns = streams.generator("turns")
        noise = streams.generator("smoothing", device)
        beside = corners(labels, self.held(spec), spec.classes)
        order = torch.cat(
            [torch.randperm(bases, generator=turns) for _ in range(-(-self.steps // bases))]
        ).tolist()
        for step, basis in enumerate(order[: self.steps]):
            drawn = torch.randn(len(labels), self.code, generator=codes, device=device)
            # In a learned space the net's codes are the points; nothing need be drawn and encoded again.
            points = (
                net.coded(drawn, labels)
                if isinstance(here, Coded)
                else here.point(net(drawn, labels))
            )
            if isinstance(made, Asked):
                points = points.unflatten(0, (spec.classes, self.batch))
                targets = made.targets[:, basis]
            else:  # all classes at once, each point beside its label
                points = made.smoothed(torch.cat([points, beside], 1), noise)
                targets = made.targets[basis]
            target_loss(points, made.frame[basis], targets).sum().backward()
            pair.ahead(faded(self.rate, step, self.steps))
            pair.follow()
            if step % 25 == 24 or step + 1 == self.steps:
                progress("training the generator", step + 1, self.steps)

    def _net(self, spec: Spec) -> tuple[str, dict[str, Any]]:
        shared = {"code": self.code, "hidden": self.hidden}
        if not self.learned:
            return described(self.net, spec.shape, spec.classes, **shared, waves=self.waves)
        private = {"drawing": DRAWING, "waves": WAVES} if self.space == "private" else {}
        arguments = {
            "shape": list(spec.shape),
            "classes": spec.classes,
            **shared,
            "inner": self.inner,
            **private,
        }
        return "DecodedGenerator" if private else "ConvDecodedGenerator", arguments


METHOD = SlicedGenerator
