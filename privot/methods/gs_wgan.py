r"""GS-WGAN: a generator trained by noisy gradients of many critics, each trained on one shard.

**Released** for each generated image ("row"): the input gradient of one critic, drawn secretly for
this row alone, with noise.
**Bound** a gradient is clipped to norm 1. Replacing a record changes one critic arbitrarily, so a
query result changes by 2 at most.
**Cost** a row is a Gaussian query on one of ``num_critics`` shards, drawn anew for each row; rows
and steps compose. With ``routing="step"``, as published, all rows of a step share a draw and are
one query, whose noise multiplier is smaller by the root of their number.
**Departs** from the paper: each row draws its own critic; critics are trained on a public schedule
and not when they are drawn; gradients have low frequencies only (``frequency_fraction``); latent
vectors are Gaussian; the generator has no spectral norm; critics use leaky ReLU, a higher learning
rate and randomly shifted images (``max_shift``).
**Notation** the noise multiplier is that of one row: each coefficient has noise of standard
deviation 2 * noise_multiplier.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.components.critic_gradients import (
    compute_clipped_gradients,
    input_gradient,
    unit_input_gradient,
)
from privot.components.sharded_critics import GS_WGAN_CITATION, ShardedCritics
from privot.components.sharded_gan import ShardedGan
from privot.components.validation import require_choice
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets.functional_critic import Critic
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Shards

WEIGHT_PASSES_PER_ROW = 20  # passes over the weights of the critic that a row drew


@dataclass(frozen=True, kw_only=True)
class GSWGAN(ShardedGan):
    """Settings of GS-WGAN. `noise_multiplier` is that of one row.

    >>> published = {"num_critics": 1000, "steps": 20_000, "batch_size": 32}
    >>> plan = GSWGAN(**published, noise_multiplier=1.07).plan(Spec((1, 28, 28), 10))
    >>> round(plan.cost().epsilon(1e-5), 1)
    5.5
    """

    name: ClassVar[str] = "gs-wgan"
    title: ClassVar[str] = "GS-WGAN: a generator from the noisy gradients of many critics"
    guarantee_summary: ClassVar[str] = (
        "(epsilon, delta), one draw of a critic for each generated image"
    )
    stage: ClassVar[str] = "gradients"
    citation: ClassVar[str] = GS_WGAN_CITATION

    critic_learning_rate: float = 5e-4  # learning rate of the critics' Adam
    max_shift: int = 2  # largest random shift of the critics' inputs, in pixels; at most side / 14
    routing: str = "row"  # one critic is drawn for each "row" or, as published, each "step"
    normalize_gradients: bool = False  # scale gradients to norm 1 (routing=row only), not only clip

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "routing", ("row", "step"))
        if self.normalize_gradients and self.routing == "step":
            raise SettingError(
                "gs-wgan.normalize_gradients=true needs gs-wgan.routing=row. Change one of the two."
            )

    def plan(self, spec: Spec) -> Plan:
        self.validate(spec)
        row_noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        # privacy: rows that share a draw are one query, whose result has norm sqrt(batch_size) at
        # most.
        noise_multiplier, queries = (
            (row_noise_multiplier / math.sqrt(self.batch_size), self.steps)
            if self.routing == "step"
            else (row_noise_multiplier, self.steps * self.batch_size)
        )
        stage = Stage(
            self.stage, "query_random_shards", noise_multiplier, queries, Shards(self.num_critics)
        )
        return Plan((stage,), Neighbours.REPLACE)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        expected = super().forecast(spec, plan)
        if self.routing == "row":  # every row copies the weights of the critic that it drew
            critic = Critic(spec.shape, spec.num_classes, self.critic_channels)
            num_weights = sum(math.prod(shape) for shape in critic.parameter_shapes.values())
            expected["elementwise_operations"] += (
                WEIGHT_PASSES_PER_ROW * self.count_gradients() * num_weights
            )
        return expected

    def query_gradients(
        self,
        gate: Gate,
        critics: ShardedCritics,
        images: Tensor,
        labels: Tensor,
        rng: torch.Generator,
    ) -> Tensor:
        """Query the input gradients of critics that are drawn at random.

        Args:
            gate: Answers the queries.
            critics: The critics of all shards.
            images: Generated images, [batch, channels, height, width].
            labels: Their labels, [batch].
            rng: Public random numbers.

        Returns:
            Noisy gradients by the images, of the shape of ``images``.
        """
        if self.routing == "row":
            query = functools.partial(
                unit_input_gradient if self.normalize_gradients else input_gradient,
                **critics.gradient_kwargs,
            )
            return gate.query_random_shards(self.stage, query, images, labels, clip_norm=1.0)
        joint_query = functools.partial(compute_clipped_gradients, **critics.gradient_kwargs)
        return gate.query_random_shards(
            self.stage,
            joint_query,
            images[None],
            labels[None],
            clip_norm=math.sqrt(self.batch_size),
        )[0]


METHOD = GSWGAN
