r"""G-PATE: a generator that learns from what all critics say together, each of which knows one shard of the records.

**Released** at each step the sum over all critics of their slopes at generated images, or of their votes, with noise.
**Bound** a critic's part is clipped to norm 1 for each image; replacing a record changes one critic, so the sum moves by 2 at most.
**Cost** full-batch Gaussian answers: all steps together are one Gaussian, whatever the critics say.
**Departs** from the paper: its epsilon depends on the votes, so it is itself a secret; ours does not, and may be published. Slopes are
added instead of counted in bins unless ``votes``; they are asked in low frequencies; critics are WGAN-GP and learn on a public schedule.
**Notation** noise is the multiplier of all steps together; a step's is larger by the root of their number.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from privot.components.sharded_critics import Critics, clipped_slopes
from privot.components.sharded_gan import Adversarial
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage

REACH = 3.0  # deviations of a projected slope of norm 1 that the bins cover


def ballots(
    state: dict[str, Tensor], images: Tensor, labels: Tensor, frame: Tensor, bins: int, **how: Any
) -> Tensor:
    """One vote for each image and direction of ``frame`` [numbers, directions]: [rows, directions, bins], of norm sqrt(rows) together."""
    along = (
        clipped_slopes(state, images, labels, **how).flatten(1) @ frame
    )  # of deviation 1 / sqrt(numbers), were slopes random
    place = (
        ((along * math.sqrt(len(frame)) / REACH + 1) / 2 * bins)
        .nan_to_num(0)
        .floor()
        .clamp(0, bins - 1)
        .long()
    )
    return torch.eye(bins, device=images.device)[place] / math.sqrt(frame.shape[1])


@dataclass(frozen=True, kw_only=True)
class GPate(Adversarial):
    """Settings of G-PATE. ``votes`` counts slopes in bins along random directions, as published; else they are added as they are.

    >>> round(GPate(noise=0.49989).plan(Spec((1, 28, 28), 10)).cost().epsilon(1e-5), 2)
    10.0
    """

    name: ClassVar[str] = "g-pate"
    title: ClassVar[str] = "G-PATE: a generator from the sum of what many critics say"
    promise: ClassVar[str] = "(epsilon, delta), all answers together one Gaussian"
    stage: ClassVar[str] = "poll"
    citation: ClassVar[str] = """@inproceedings{long2021gpate,
  title     = {{G-PATE}: Scalable Differentially Private Data Generator via Private Aggregation of Teacher Discriminators},
  author    = {Long, Yunhui and Wang, Boxin and Yang, Zhuolin and Kailkhura, Bhavya and Zhang, Aston and Gunter, Carl A. and Li, Bo},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2021}
}"""

    steps: int = 2000
    batch: int = 64
    block: int = 250
    lessons: int = 1
    rate: float = 2e-4
    average: float = 0.999
    votes: bool = False
    directions: int = 10  # for each image, where there are votes (the paper's, on MNIST)
    bins: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.directions < 1 or self.bins < 2:
            raise SettingError("g-pate: directions >= 1 and bins >= 2 are needed")

    def plan(self, spec: Spec) -> Plan:
        self.suited(spec)
        noise = 1.0 if self.noise is None else self.noise
        return Plan(
            (Stage(self.stage, "poll", noise * math.sqrt(self.steps), self.steps),),
            Neighbours.REPLACE,
        )

    def rows(self) -> int:
        return self.steps * self.batch * self.critics

    def ask(
        self, gate: Gate, team: Critics, images: Tensor, labels: Tensor, draws: torch.Generator
    ) -> Tensor:
        bound = math.sqrt(self.batch)
        if not self.votes:
            query = functools.partial(clipped_slopes, **team.how)
            return gate.poll(self.stage, query, images, labels, bound=bound) / self.critics
        asked = (gate.spec.shape[0], team.how["down"].shape[1], team.how["across"].shape[1])
        frame = torch.randn(
            math.prod(asked), self.directions, generator=draws, device=images.device
        )
        frame = torch.linalg.qr(frame).Q
        counts = gate.poll(
            self.stage,
            functools.partial(ballots, bins=self.bins, **team.how),
            images,
            labels,
            frame,
            bound=bound,
        )
        won = (counts.argmax(2) + 0.5) / self.bins * 2 - 1  # the middle of the bin with most votes
        return (won * REACH / math.sqrt(len(frame)) @ frame.T.to(won.dtype)).view(-1, *asked)


METHOD = GPate
