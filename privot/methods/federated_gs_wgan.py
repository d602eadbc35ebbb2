r"""Federated GS-WGAN: a generator that learns from the noisy slopes of critics, each of which stays with the owner of its records.

**Released** by each owner that is asked, for each generated image it was sent, where its critic would like the image to go, with noise.
**Bound** a slope is clipped to norm 1. ``unit="client"``: all that an owner holds may change, and with it each of its slopes, by 2 at
most. ``unit="record"``: an owner has ``critics`` critics, one drawn secretly for each image, and a replaced record changes one of them.
**Cost** of one owner: its slopes compose, as Gaussians (client) or on one shard of ``critics`` each (record). Other owners hold other
records, so theirs are not added. Nothing is claimed for the choice of an owner: the server knows whom it asks.
**Departs** from the paper as `gs-wgan` does; every slope that an owner says is counted; owners are asked in turn, equally often.
**Notation** noise is the multiplier of one slope: its deviation is 2 * noise in each number asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from privot.components.client_critics import Owners
from privot.components.federated_settings import Federation, owners_of
from privot.components.pretraining import fits
from privot.components.server_generator import Drawing
from privot.components.sharded_critics import GS_WGAN
from privot.components.sharded_gan import CALLS, KINDS, MAPPED
from privot.data.spec import Spec
from privot.nets import drawing
from privot.nets.functional_critic import Critic
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Full, Shards
from privot.release.artifact import Product
from privot.runtime import Progress, Streams


@dataclass(frozen=True, kw_only=True)
class FederatedGsWgan(Federation):
    """Owners whose critics answer a server's generator.

    >>> spec, settings = Spec((1, 28, 28), 62, owners=300), FederatedGsWgan(noise=10.0, rounds=100)
    >>> settings.plan(spec).stages[0].steps, round(settings.plan(spec).cost().epsilon(1.15e-3), 1)
    (6200, 54.2)
    """

    name: ClassVar[str] = "federated-gs-wgan"
    title: ClassVar[str] = (
        "GS-WGAN across owners: critics stay with their data, and only noisy slopes cross the wire"
    )
    trusts: ClassVar[str] = "nobody: every owner has its own gate and adds its own noise"
    promise: ClassVar[str] = "(epsilon, delta) for all that one owner holds, or for one record"
    citation: ClassVar[str] = GS_WGAN

    def plan(self, spec: Spec) -> Plan:
        """What one owner is asked."""
        fits(self.name, self.start, spec)
        turns = math.ceil(self.rounds / self.groups(owners_of(spec, self.name)))
        noise = 1.0 if self.noise is None else self.noise
        steps = turns * self.rows * spec.classes
        if self.unit == "record":
            return Plan(
                (Stage(self.stage, "deal", noise, steps, Shards(self.critics)),), Neighbours.REPLACE
            )
        return Plan((Stage(self.stage, "deal", noise, steps, Full()),), Neighbours.CLIENT)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        critic = Critic(spec.shape, spec.classes, self.width)
        owners = spec.owners or 1
        steps = plan.stages[0].steps
        learnt = (
            (steps // (self.rows * spec.classes) * self.lessons + 5 * self.warm)
            * owners
            * self.parts
        )
        per_round = self.rows * spec.classes
        passes = 3.0 * owners * steps + 14.0 * learnt * self.critic_batch
        arguments = {
            "shape": list(spec.shape),
            "classes": spec.classes,
            "code": self.code,
            "width": self.channels,
        }
        drawn = (
            3.0
            * self.rounds
            * min(self.cohort or owners, owners)
            * per_round
            * drawing(KINDS[self.kind], arguments)
        )
        return {
            "floating_point_operations": critic.work * passes + drawn,
            "elementwise_operations": critic.work * passes / MAPPED,
            "operator_calls": CALLS
            * (steps // (self.rows * spec.classes) * (1 + self.lessons) + 5 * self.warm),
            # Of one owner in a round: bytes of the pixels that it is sent, and float32 slopes that it sends.
            "bytes_down": per_round * spec.pixels,
            "bytes_up": 4 * per_round * math.prod(self.numbers(spec)),
            "memory_of_an_owner": round(self.memory(spec)),  # bytes, on its own machine
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        """The whole federation in one process: all owners behind one gate, side by side."""
        count = gate.spec.owners or 1
        each = self.rows * gate.spec.classes
        groups = self.groups(count)
        turns = (gate.plan.stages[0].steps - gate.left(self.stage)) // each
        drawing = Drawing(self, gate.spec, streams, progress)
        owners = Owners(
            gate,
            self,
            streams,
            progress,
            begun=turns > 0 and drawing.restore(streams.stored("generator")),
        )
        for number in range(
            turns * groups, self.rounds
        ):  # after a crash, from the next turn of the first group
            places = self.asked(number, count)
            drawing.take(
                owners.answers(places, drawing.draw(number, places), number // groups).float()
            )
            progress("training the generator", number + 1, self.rounds)
            if streams.due(number, self.rounds):
                gate.store()  # before the generator: a run that finds one does not warm up its critics again
                streams.store("generator", drawing.kept())
                streams.show(drawing.shown(10), 10)
        return drawing.product()


METHOD = FederatedGsWgan
