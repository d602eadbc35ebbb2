r"""G-PATE: a generator trained by the noisy sum of the gradients of critics on shards.

**Released** at each step: the sum over all critics of their input gradients at generated images, or
of their votes, with noise.
**Bound** a critic's gradient is clipped to norm 1 for each image. Replacing a record changes one
critic, so the sum changes by 2 at most.
**Cost** full-batch Gaussian queries: all steps together are one Gaussian, whatever the critics
return.
**Departs** from the paper: the paper's epsilon depends on the votes, so it is itself secret; ours
does not and may be published. Gradients are added, and counted in bins only with ``votes``; they
have low frequencies only; critics are WGAN-GP critics, trained on a public schedule.
**Notation** the noise multiplier is that of all steps together; that of one step is larger by the
root of their number.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.components.critic_gradients import compute_clipped_gradients
from privot.components.sharded_critics import ShardedCritics
from privot.components.sharded_gan import ShardedGan
from privot.components.validation import require_range
from privot.data.spec import Spec
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage

BIN_RANGE_STD = 3.0  # range of the bins, in standard deviations of a projected gradient of norm 1


def vote_for_bins(
    state: dict[str, Tensor],
    images: Tensor,
    labels: Tensor,
    frame: Tensor,
    num_bins: int,
    **gradient_kwargs: Any,
) -> Tensor:
    """Vote, for each image and direction, for the bin of the projected input gradient.

    Args:
        state: State of the critic.
        images: Generated images [rows, channels, height, width].
        labels: Their labels [rows].
        frame: Directions as orthonormal columns [gradient_dim, directions].
        num_bins: Number of bins.
        gradient_kwargs: Further arguments of `input_gradient`.

    Returns:
        One-hot votes over sqrt(directions) [rows, directions, bins], of norm sqrt(rows) together.
    """
    gradients = compute_clipped_gradients(state, images, labels, **gradient_kwargs)
    # The projection of a random gradient of norm 1 has standard deviation 1 / sqrt(gradient_dim).
    projections = gradients.flatten(1) @ frame
    bin_index = (
        ((projections * math.sqrt(len(frame)) / BIN_RANGE_STD + 1) / 2 * num_bins)
        .nan_to_num(0)
        .floor()
        .clamp(0, num_bins - 1)
        .long()
    )
    return torch.eye(num_bins, device=images.device)[bin_index] / math.sqrt(frame.shape[1])


@dataclass(frozen=True, kw_only=True)
class GPATE(ShardedGan):
    """Settings of G-PATE. `noise_multiplier` is that of all steps together.

    >>> plan = GPATE(noise_multiplier=0.49989).plan(Spec((1, 28, 28), 10))
    >>> round(plan.cost().epsilon(1e-5), 2)
    10.0
    """

    name: ClassVar[str] = "g-pate"
    title: ClassVar[str] = "G-PATE: a generator from the noisy sum of many critics' gradients"
    guarantee_summary: ClassVar[str] = "(epsilon, delta), all queries together one Gaussian"
    stage: ClassVar[str] = "sum_over_shards"
    citation: ClassVar[str] = """@inproceedings{long2021gpate,
  title     = {{G-PATE}: Scalable Differentially Private Data Generator via Private Aggregation of
               Teacher Discriminators},
  author    = {Long, Yunhui and Wang, Boxin and Yang, Zhuolin and Kailkhura, Bhavya and
               Zhang, Aston and Gunter, Carl A. and Li, Bo},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2021}
}"""

    steps: int = 2000  # generator steps
    batch_size: int = 64  # generated images in a generator step
    critics_per_step: int = 250  # critics trained before each generator step, in turn
    critic_steps: int = 1  # training steps of each of these critics
    generator_learning_rate: float = 2e-4  # learning rate of the generator's Adam
    ema_decay: float = 0.999  # decay per step of the generator's averaged weights
    votes: bool = False  # count gradients in bins along random directions, as published
    num_directions: int = 10  # random directions of each image, with votes; the paper's on MNIST
    num_bins: int = 10  # bins of each direction, with votes

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range(self, "num_directions", minimum=1)
        require_range(self, "num_bins", minimum=2)

    def plan(self, spec: Spec) -> Plan:
        self.validate(spec)
        noise_multiplier = 1.0 if self.noise_multiplier is None else self.noise_multiplier
        stage = Stage(
            self.stage, "sum_over_shards", noise_multiplier * math.sqrt(self.steps), self.steps
        )
        return Plan((stage,), Neighbours.REPLACE)

    def count_gradients(self) -> int:
        return self.steps * self.batch_size * self.num_critics

    def query_gradients(
        self,
        gate: Gate,
        critics: ShardedCritics,
        images: Tensor,
        labels: Tensor,
        rng: torch.Generator,
    ) -> Tensor:
        """Query the sum of the critics' gradients, or of their votes.

        Args:
            gate: Answers the queries.
            critics: The critics of all shards.
            images: Generated images, [batch, channels, height, width].
            labels: Their labels, [batch].
            rng: Public random numbers.

        Returns:
            Noisy gradients by the images, of the shape of ``images``.
        """
        clip_norm = math.sqrt(self.batch_size)
        if not self.votes:
            query = functools.partial(compute_clipped_gradients, **critics.gradient_kwargs)
            gradient_sum = gate.sum_over_shards(
                self.stage, query, images, labels, clip_norm=clip_norm
            )
            return gradient_sum / self.num_critics
        gradient_shape = (
            gate.spec.shape[0],
            critics.gradient_kwargs["row_basis"].shape[1],
            critics.gradient_kwargs["column_basis"].shape[1],
        )
        frame = torch.randn(
            math.prod(gradient_shape), self.num_directions, generator=rng, device=images.device
        )
        frame = torch.linalg.qr(frame).Q
        counts = gate.sum_over_shards(
            self.stage,
            functools.partial(vote_for_bins, num_bins=self.num_bins, **critics.gradient_kwargs),
            images,
            labels,
            frame,
            clip_norm=clip_norm,
        )
        # The middle of the bin with most votes, in [-1, 1].
        winner = (counts.argmax(2) + 0.5) / self.num_bins * 2 - 1
        projections = winner * BIN_RANGE_STD / math.sqrt(len(frame))
        return (projections @ frame.T.to(winner.dtype)).view(-1, *gradient_shape)


METHOD = GPATE
