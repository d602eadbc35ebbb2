r"""DP-MERF+AE: DP-MERF in the code space of an autoencoder that was itself trained by private gradient steps.

**Released** noisy sums of the autoencoder's gradients, of the records that chance drew; then, once, the sum over records of random Fourier
features of their codes, by class, with noise; with it a noisy count of each class where class sizes are not declared.
**Bound** each gradient is clipped to ``bound``; the features of a code, with the count, have norm 1, and the gate clips them to 1.
**Cost** ``lessons`` Gaussian answers on Poisson draws and one on all records, under add-remove, composed. The rest is post-processing.
**Departs** from the paper, which left no code: codes lie on a sphere, so that kernel widths need no look at the data; counts ride along.
**Notation** encoder E, decoder D, features phi(c) = [cos(Wc), sin(Wc)]/sqrt(features/2) of a code c = E(x). A share is a part of mu².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.func import functional_call

from privot.baselines.condensation import at_least_one
from privot.components.dp_sgd import weights
from privot.components.latent_space import taught
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
from privot.nets.dp_networks import Autoencoder, Encoder
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release.artifact import Product
from privot.runtime import Progress, Streams

LESSON_CALLS = 8000  # of tensor operators that a lesson is worth: records are clipped one by one


def embedded_code(
    image: Tensor,
    label: Tensor,
    encoder: Encoder,
    weights: dict[str, Tensor],
    frequencies: Tensor,
    share: float,
) -> Tensor:
    """One record's part: the features of its code and a constant that counts it, of norm 1 together: [features + 1]."""
    return counted(embed(functional_call(encoder, weights, (image[None],))[0], frequencies), share)


@dataclass(frozen=True, kw_only=True)
class MerfAe:
    """Settings of DP-MERF+AE. ``noise`` fixes the multiplier of the whole (about 1/mu); without it the budget does.

    >>> plan = MerfAe(noise=2.0, lessons=100, drawn=0.1, share=0.5).plan(Spec((1, 28, 28), 10))
    >>> [(stage.name, round(stage.noise, 3)) for stage in plan.stages]
    [('autoencoder', 2.914), ('embedding', 2.828)]
    """

    name: ClassVar[str] = "merf-ae"
    title: ClassVar[str] = "DP-MERF+AE: a noisy mean embedding of an autoencoder's codes"
    trusts: ClassVar[str] = "the data owner"
    promise: ClassVar[str] = "(epsilon, delta), sampled Gaussian answers and one of all records"
    citation: ClassVar[str] = """@article{harder2020dpmerf,
  title   = {{DP-MERF}: Differentially Private Mean Embeddings with Random Features for Practical Privacy-Preserving Data Generation},
  author  = {Harder, Frederik and Adamczewski, Kamil and Park, Mijung},
  journal = {arXiv preprint arXiv:2002.11603},
  year    = {2020}
}"""

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {"portion": 500, "steps": 500, "lessons": 250}

    noise: float | None = None
    share: float = 0.3  # of mu², for the embedding; the rest goes to the autoencoder
    drawn: float = 0.06  # chance of a record to be in a lesson
    lessons: int = 2000  # steps of the autoencoder: one answer each
    bound: float = 1.0  # of a record's gradient
    inner: int = 16  # numbers of a code
    drawing: int = 128  # hidden numbers of encoder and decoder
    waves: int = 14  # lowest cosines a side that they see and draw
    lesson_rate: float = 5e-3  # of Adam, falling to zero
    features: int = 4000
    widths: tuple[float, ...] = (
        1.1,
        0.7,
        0.42,
    )  # of the kernels, in units of a code's norm: DP-MERF's 8, 5, 3 where images lie 10 apart
    code: int = 5
    hidden: int = 256
    steps: int = 3000  # of the generator
    batch: int = 50  # a class
    portion: int = 2000  # of the features, looked at in one step
    rate: float = 0.01  # of Adam, for the generator

    def __post_init__(self) -> None:
        at_least_one(self, "lessons", "inner", "drawing", "waves", "code", "hidden", "steps")
        for key in ("features", "portion", "batch", "inner"):
            if getattr(self, key) < 2:
                raise SettingError(f"merf-ae.{key}={getattr(self, key)}: at least 2 is needed")
        if not 0 < self.drawn <= 1 or not 0 < self.share < 1 or not 0 < self.bound < math.inf:
            raise SettingError("merf-ae: 0 < drawn <= 1, 0 < share < 1 and bound > 0 are needed")
        if (
            not (0 < self.rate < 1 and 0 < self.lesson_rate < 1)
            or not self.widths
            or not all(0 < width < math.inf for width in self.widths)
        ):
            raise SettingError(
                "merf-ae: 0 < rate < 1, 0 < lesson_rate < 1 and widths > 0 are needed"
            )
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise SettingError(f"merf-ae.noise={self.noise}: a multiplier of 0 or more is needed")

    def plan(self, spec: Spec) -> Plan:
        scale = 1.0 if self.noise is None else self.noise
        # So many sampled answers have mu² near drawn² * lessons * (exp(1/noise²) - 1): the noise of their share. The price is exact anyway.
        each = (1 - self.share) / (self.drawn**2 * self.lessons)
        lesson = 1 / math.sqrt(math.log1p(each / scale**2)) if scale else 0.0
        stages = (
            Stage("autoencoder", "sum", lesson, self.lessons, Poisson(self.drawn)),
            Stage("embedding", "sum", scale / math.sqrt(self.share)),
        )
        return Plan(stages, Neighbours.ADD_REMOVE)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        waves = spec.shape[0] * math.prod(min(self.waves, side) for side in spec.shape[1:])
        numbers = (
            (2 * waves + 2 + 2 * self.inner) * self.drawing + waves + self.inner
        )  # of encoder and decoder
        size = spec.size or 0
        noise_std = plan.stages[0].noise * self.bound
        ratio = (
            self.bound * self.drawn * size / (noise_std * math.sqrt(numbers))
            if size and noise_std
            else None
        )
        taught = 6 * numbers * self.lessons * self.drawn * size
        made = (
            6
            * self.steps
            * self.batch
            * spec.classes
            * (self.hidden * (self.hidden + 20) + self.portion * self.inner)
        )
        seen = min(self.portion, self.features)
        return {
            "signal_to_noise_of_a_lesson": ratio,
            "floating_point_operations": taught + 2 * size * self.features * self.inner + made,
            "elementwise_operations": ELEMENTWISE * self.steps * self.batch * spec.classes * seen,
            "operator_calls": self.steps * CALLS + self.lessons * LESSON_CALLS,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        device = streams.runtime.target
        autoencoder = self._taught(gate, streams, progress)
        encoder = autoencoder.encoder
        share = count_share(spec)
        # Codes have norm sqrt(inner), and widths are in units of it.
        known = frequencies(
            self.inner,
            self.features,
            self.widths,
            math.sqrt(self.inner),
            streams.generator("features"),
        ).to(device)
        progress("embedding the codes", 0, 1)
        answer = gate.sum(
            "embedding",
            embedded_code,
            encoder,
            weights(encoder),
            known,
            share,
            bound=1.0,
            per_class=True,
        )
        progress("embedding the codes", 1, 1)
        arguments = {
            "shape": list(spec.shape),
            "classes": spec.classes,
            "code": self.code,
            "hidden": self.hidden,
            "inner": self.inner,
            "drawing": self.drawing,
            "waves": self.waves,
        }
        net: Any = initialise(
            NETS["DecodedGenerator"](**arguments), streams.generator("weights")
        ).to(device)
        net.decoder.load_state_dict(autoencoder.decoder.state_dict())
        net.train()
        how: dict[str, Any] = {
            key: getattr(self, key) for key in ("code", "steps", "batch", "portion", "rate")
        }
        match(
            net.coded,
            net.layers.parameters(),
            *goals(answer, share, spec),
            known,
            **how,
            streams=streams,
            progress=progress,
        )
        return Product.generator("DecodedGenerator", arguments, net.eval())

    def _taught(self, gate: Gate, streams: Streams, progress: Progress) -> Autoencoder:
        """The autoencoder: each answer that can still be had is one lesson."""
        net: Any = initialise(
            Autoencoder(gate.spec.shape, self.inner, self.drawing, self.waves),
            streams.generator("autoencoder"),
        )
        how: dict[str, Any] = {
            "lessons": self.lessons,
            "rate": self.lesson_rate,
            "bound": self.bound,
        }
        return taught(gate, net, **how, streams=streams, progress=progress)


METHOD = MerfAe
