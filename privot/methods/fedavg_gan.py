r"""Fed-Avg GAN: every owner trains the present critic on its own records, and a trusted server adds up how far each came.

**Released** in each round the sum over all owners of the change of the critic's weights, with noise. The generator learns from that critic.
**Bound** an owner's change is clipped to ``bound`` in norm; another owner in its place moves the sum by 2 * ``bound`` at most.
**Cost** a full Gaussian answer a round, under client neighbours: all that one owner holds may be replaced by anything else.
**Departs** from DP-FedAvg-GAN: all owners answer in every round (who is asked is known to the server, and amplifies nothing here); the
critic and its loss are those of DP-GAN.
**Notation** critic D of weights w, generator G, l(t) = log(1 + e^t); owner k takes ``lessons`` steps on E l(-D(x, y)) + E l(D(G(z, y), y))
from w to w_k; the server moves w by the mean over owners of clip(w_k - w), with noise of deviation 2 * noise * bound in their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import softplus

from privot.baselines.condensation import at_least_one
from privot.components.dp_sgd import flat
from privot.components.federated_settings import owners_of
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets import NETS, drawing, initialise
from privot.nets.dp_networks import PrivateCritic, critic_work
from privot.nets.ema import Averaged
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.release.artifact import Product
from privot.runtime import Progress, Streams

SHOWN = 32  # generated images of a class that owners learn from in a round
CALLS = 600  # of tensor operators, in a lesson of all owners or a step of the generator
State = dict[str, Tensor]


def judged(weights: Tensor, critic: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Scores [batch] by a critic of these weights [numbers]."""
    own = dict(critic.named_parameters())
    parts = weights.split([each.numel() for each in own.values()])
    named = {
        name: part.view(each.shape) for (name, each), part in zip(own.items(), parts, strict=True)
    }
    return functional_call(critic, named, (images, labels))


def mistaken(
    weights: Tensor, critic: nn.Module, real: Tensor, fake: Tensor, labels: Tensor
) -> Tensor:
    """A critic's loss on records and on generated images of the same labels."""
    return (
        softplus(-judged(weights, critic, real, labels)).mean()
        + softplus(judged(weights, critic, fake, labels)).mean()
    )


def trained(
    images: Tensor,
    labels: Tensor,
    state: State,
    critic: nn.Module,
    start: Tensor,
    fakes: Tensor,
    places: Tensor,
    which: Tensor,
    rate: float,
) -> State:
    """How far an owner comes from the weights ``start`` [numbers], against public ``fakes`` [classes, count, ...].

    ``places`` [lessons, batch] in [0, 1) say which records, ``which`` [lessons, batch] which fakes of the same labels.
    """
    weights = start
    for turn in range(len(places)):
        some = (places[turn] * len(labels)).long()
        slope = grad(mistaken)(
            weights, critic, images[some], fakes[labels[some], which[turn]], labels[some]
        )
        weights = weights - rate * slope
    return {**state, "change": weights - start}


def change(state: State) -> Tensor:
    """What an owner sends: [numbers]."""
    return state["change"]


@dataclass(frozen=True, kw_only=True)
class FederatedAverageGan:
    """Settings of the Fed-Avg GAN. ``noise`` fixes the multiplier of a round; without it the budget does.

    >>> plan = FederatedAverageGan(noise=2.0, rounds=100).plan(Spec((1, 28, 28), 62, owners=300))
    >>> round(plan.cost().epsilon(1.15e-3), 1), str(plan.neighbours)
    (27.0, 'client')
    """

    name: ClassVar[str] = "federated-average-gan"
    title: ClassVar[str] = (
        "Fed-Avg GAN: a generator from a critic whose owners' updates are clipped and summed"
    )
    trusts: ClassVar[str] = "the server, which sees each owner's update before the noise"
    promise: ClassVar[str] = "(epsilon, delta) for all that one owner holds, Gaussian answers"
    stage: ClassVar[str] = "updates"
    citation: ClassVar[str] = """@inproceedings{augenstein2020generative,
  title     = {Generative Models for Effective {ML} on Private, Decentralized Datasets},
  author    = {Augenstein, Sean and McMahan, H. Brendan and Ramage, Daniel and Ramaswamy, Swaroop and Kairouz, Peter and others},
  booktitle = {International Conference on Learning Representations},
  year      = {2020}
}"""

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {"channels": 8, "batch": 64, "rounds": 30}

    noise: float | None = None
    rounds: int = 200
    lessons: int = 8  # steps of an owner's critic in a round
    critic_batch: int = 32  # records of an owner in each
    critic_rate: float = 0.15  # of an owner's steps, which are plain
    bound: float = 0.3  # of an owner's change
    server_rate: float = 1.0  # what the server makes of the mean change; momentum was no help
    records: int = 128  # records of an owner that are laid out for it; of more some are left out, fewer come several times
    turns: int = 8  # steps of the generator in a round
    batch: int = 512  # generated images in each
    width: int = (
        16  # channels of the critic after its first layer; twice as many after each further one
    )
    code: int = 64
    channels: int = 48  # of the generator at full resolution
    rate: float = 5e-4  # of Adam, for the generator
    average: float = 0.99  # of the generator's weights over its steps

    def __post_init__(self) -> None:
        at_least_one(
            self,
            "rounds",
            "lessons",
            "critic_batch",
            "turns",
            "records",
            "width",
            "code",
            "channels",
        )
        if self.batch < 2:
            raise SettingError(f"{self.name}.batch={self.batch}: batch norm needs at least 2")
        for key in ("bound", "server_rate", "critic_rate"):
            if not 0 < getattr(self, key) < math.inf:
                raise SettingError(
                    f"{self.name}.{key}={getattr(self, key)}: a number above 0 is needed"
                )
        if not (0 < self.rate < 1 and 0 <= self.average < 1):
            raise SettingError(f"{self.name}: 0 < rate < 1 and 0 <= average < 1 are needed")
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise SettingError(
                f"{self.name}.noise={self.noise}: a multiplier of 0 or more is needed"
            )

    def plan(self, spec: Spec) -> Plan:
        owners_of(spec, self.name)
        return Plan(
            (Stage(self.stage, "poll", 1.0 if self.noise is None else self.noise, self.rounds),),
            Neighbours.CLIENT,
        )

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        with torch.device("meta"):
            critic = PrivateCritic(spec.shape, spec.classes, self.width)
            net = NETS["DeepConvGenerator"](**self._arguments(spec))
        numbers = _numbers(critic)
        owners = spec.owners or 1
        noise = plan.stages[0].noise
        ratio = 2 * noise * math.sqrt(numbers) / owners  # of the mean change at its longest
        # Forward and back is three passes. An owner's critic learns from a record and a drawn image.
        judged = 2 * critic_work(spec.shape, self.width)
        drawn = drawing("DeepConvGenerator", self._arguments(spec))
        learnt = owners * self.lessons * self.critic_batch * 2 * 3 * judged
        made = self.turns * self.batch * 3 * (drawn + judged) + SHOWN * spec.classes * drawn
        return {
            "noise_to_signal_of_a_round": ratio,
            "floating_point_operations": self.rounds * (learnt + made),
            "operator_calls": self.rounds * CALLS * (self.lessons + self.turns),
            **_bytes(critic, net),
        }

    def _arguments(self, spec: Spec) -> dict[str, Any]:
        return {
            "shape": list(spec.shape),
            "classes": spec.classes,
            "code": self.code,
            "width": self.channels,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        device = streams.runtime.target
        net = initialise(
            NETS["DeepConvGenerator"](**self._arguments(spec)), streams.generator("weights")
        ).to(device)
        critic = initialise(
            PrivateCritic(spec.shape, spec.classes, self.width), streams.generator("critic")
        ).to(device)
        critic.requires_grad_(False)
        pair = Averaged(net.train(), self.rate, (0.0, 0.99), self.average)
        weights = flat(critic.parameters())
        done = self.rounds - gate.left(self.stage)
        # A short run's answers are kept, and come again from the first: then it begins anew.
        if done and (found := streams.stored("game")) is not None and pair.restore(found):
            weights = found["weights"]
        draws = streams.generator(f"draws from {done}", device)  # fresh ones for a run that goes on
        owners = int(spec.owners or 0)
        gate.split(owners, {"change": torch.zeros(owners, len(weights))}, self.records)
        shown = torch.arange(spec.classes, device=device).repeat_interleave(SHOWN)

        def drawn(net: Any, labels: Tensor) -> Tensor:
            return net(torch.randn(len(labels), self.code, generator=draws, device=device), labels)

        for step in range(done, self.rounds):
            with torch.no_grad():
                fakes = drawn(net, shown).unflatten(0, (spec.classes, SHOWN))
            size = (self.lessons, self.critic_batch)
            places = torch.rand(size, generator=draws, device=device)
            which = torch.randint(SHOWN, size, generator=draws, device=device)
            gate.update(
                trained,
                critic,
                weights,
                fakes,
                places,
                which,
                self.critic_rate,
                looks=self.critic_batch,
            )
            # privacy: owners are public in number and all of them are in every sum, so a mean tells no more than the sum.
            mean = gate.poll(self.stage, change, bound=self.bound).float() / owners
            weights = weights + self.server_rate * mean
            for _ in range(self.turns):
                labels = torch.randint(spec.classes, (self.batch,), generator=draws, device=device)
                softplus(-judged(weights, critic, drawn(net, labels), labels)).mean().backward()
                pair.step()
            progress("training the pair", step + 1, self.rounds)
            if streams.due(step, self.rounds):
                streams.store("game", pair.kept() | {"weights": weights})
                streams.show(fakes[:, :10].flatten(0, 1), 10)
        made = pair.settled(lambda mean: drawn(mean, shown))
        return Product.generator(
            "DeepConvGenerator", self._arguments(spec), made, _bytes(critic, net)
        )


def _numbers(net: nn.Module) -> int:
    return sum(each.numel() for each in net.parameters())


def _bytes(critic: nn.Module, net: nn.Module) -> dict[str, int]:
    """What an owner sends and is sent in a round, as float32."""
    return {
        "bytes_per_client_and_round": 4 * _numbers(critic),
        "bytes_to_a_client_in_a_round": 4 * (_numbers(critic) + _numbers(net)),
    }


METHOD = FederatedAverageGan
