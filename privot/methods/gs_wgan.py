r"""GS-WGAN: a generator that learns from the noisy slopes of many critics, each of which knows one shard of the records.

**Released** for each generated image ("row") where one critic, drawn secretly for this row alone, would like it to go, with noise.
**Bound** a slope is clipped to norm 1; replacing a record changes one critic altogether, so an answer moves by 2 at most.
**Cost** a row is a Gaussian answer on one shard of ``critics``, drawn anew: rows and steps compose. With ``routing="step"``, as published,
all rows of a step share a draw and are one answer, whose multiplier is smaller by the root of their number.
**Departs** from the paper: rows draw for themselves; critics learn on a public schedule and not when they are drawn; slopes are asked in
low frequencies alone (``detail``); codes are Gaussian; the generator has no spectral norm; critics have leaky slopes and learn quicker,
from images that are moved about (``shift``).
**Notation** noise is the multiplier of one row: its deviation is 2 * noise in each number asked.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.components.sharded_critics import GS_WGAN, Critics, clipped_slopes, slope, whole_slope
from privot.components.sharded_gan import Adversarial
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets.functional_critic import Critic
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Shards

GATHERED = 20  # passes over the weights of a critic that a row drew


@dataclass(frozen=True, kw_only=True)
class GsWgan(Adversarial):
    """Settings of GS-WGAN. ``noise`` fixes the multiplier of a row; without it the budget does.

    >>> published = {"critics": 1000, "steps": 20_000, "batch": 32, "noise": 1.07}
    >>> round(GsWgan(**published).plan(Spec((1, 28, 28), 10)).cost().epsilon(1e-5), 1)
    5.5
    """

    name: ClassVar[str] = "gs-wgan"
    title: ClassVar[str] = "GS-WGAN: a generator from the noisy slopes of many critics"
    promise: ClassVar[str] = "(epsilon, delta), one draw of a critic for each generated image"
    stage: ClassVar[str] = "slopes"
    citation: ClassVar[str] = GS_WGAN

    critic_rate: float = 5e-4
    shift: int = 2
    routing: str = "row"  # or "step", as published
    full: bool = False  # slopes brought to norm 1, where clipping leaves shorter ones as they are; in rows that draw for themselves

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.routing not in ("row", "step"):
            raise SettingError(f"gs-wgan.routing={self.routing!r}: row or step")
        if self.full and self.routing == "step":
            raise SettingError("gs-wgan.full: only with routing=row")

    def plan(self, spec: Spec) -> Plan:
        self.suited(spec)
        noise = 1.0 if self.noise is None else self.noise
        # privacy: rows that share a draw are one answer, of norm sqrt(batch)
        each, steps = (
            (noise / math.sqrt(self.batch), self.steps)
            if self.routing == "step"
            else (noise, self.steps * self.batch)
        )
        return Plan(
            (Stage(self.stage, "route", each, steps, Shards(self.critics)),), Neighbours.REPLACE
        )

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        expected = super().forecast(spec, plan)
        if self.routing == "row":  # every row takes along the weights of the critic that it drew
            weights = sum(
                math.prod(shape)
                for shape in Critic(spec.shape, spec.classes, self.width).shapes.values()
            )
            expected["elementwise_operations"] += GATHERED * self.rows() * weights
        return expected

    def ask(
        self, gate: Gate, team: Critics, images: Tensor, labels: Tensor, draws: torch.Generator
    ) -> Tensor:
        if self.routing == "row":
            asked = functools.partial(whole_slope if self.full else slope, **team.how)
            return gate.route(self.stage, asked, images, labels, bound=1.0)
        joint = functools.partial(clipped_slopes, **team.how)
        return gate.route(
            self.stage, joint, images[None], labels[None], bound=math.sqrt(self.batch)
        )[0]


METHOD = GsWgan
