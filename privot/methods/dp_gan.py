r"""DP-GAN: a conditional GAN whose critic learns by private gradient steps; the generator learns from the critic alone.

**Released** at each step one noisy sum of the critic's gradients, of the records that chance drew. Critic and generator are made of it.
**Bound** each record's gradient, with the public gradient of the drawn images added, is clipped to ``bound`` in norm by the gate.
**Cost** ``steps`` Gaussian answers on Poisson draws, under add-remove. The generator's steps are post-processing, as many as one likes.
**Departs** from the paper: few steps on large draws instead of many on small ones, a small critic, and the gradient of the drawn images is
added to each record's before the clip, so that what is clipped is their difference and no batch size has to be known.
**Notation** critic D(x, y), generator G(z, y), softplus loss l(t) = log(1 + e^t); D minimises E l(-D(x, y)) + E l(D(G(z, y), y)), G
minimises E l(-D(G(z, y), y)). The pace is how many steps the critic takes for one of the generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from privot.baselines.condensation import at_least_one
from privot.components.dp_sgd import descend, flat
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets import NETS, initialise
from privot.nets.dp_networks import PrivateCritic, critic_work
from privot.nets.ema import Averaged, kept, take_up
from privot.nets.generators.dcgan import doublings
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release.artifact import Product
from privot.runtime import Progress, Streams

CALLS = 7000  # of tensor operators that a step of the pair is worth: records are clipped one by one


def mistaken(critic: Any, image: Tensor, label: Tensor) -> Tensor:
    """The critic's loss on a record."""
    return softplus(-critic(image, label)).sum()


@dataclass(frozen=True, kw_only=True)
class DpGan:
    """Settings of the DP-GAN. ``noise`` fixes the multiplier; without it the budget does.

    >>> plan = DpGan(noise=3.0, steps=10).plan(Spec((1, 28, 28), 10))
    >>> plan.stages[0].sampling, plan.stages[0].steps
    (Poisson(rate=0.06), 10)
    """

    name: ClassVar[str] = "dp-gan"
    title: ClassVar[str] = "DP-GAN: a generator from a critic trained by private gradient steps"
    trusts: ClassVar[str] = "the data owner"
    promise: ClassVar[str] = "(epsilon, delta), sampled Gaussian answers"
    citation: ClassVar[str] = """@article{bie2023private,
  title   = {Private {GANs}, Revisited},
  author  = {Bie, Alex and Kamath, Gautam and Zhang, Guojun},
  journal = {Transactions on Machine Learning Research},
  year    = {2023}
}
@article{xie2018dpgan,
  title   = {Differentially Private Generative Adversarial Network},
  author  = {Xie, Liyang and Lin, Kaixiang and Wang, Shu and Wang, Fei and Zhou, Jiayu},
  journal = {arXiv preprint arXiv:1802.06739},
  year    = {2018}
}"""

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {"depicting": 16, "steps": 250, "batch": 64, "width": 8}

    noise: float | None = None
    drawn: float = (
        0.06  # chance of a record to be in a step; 3,600 of 60,000, which a portion of 4,000 holds
    )
    steps: int = 10_000  # of the critic: one answer each
    bound: float = 1.0  # of a record's part; at the start their norms are 1 to 2
    pace: int = 1  # steps of the critic for one of the generator, at first
    patience: int = 100  # steps of the generator between two looks at who is ahead
    beaten: float = (
        0.6  # the pace doubles when the critic knows no more of the drawn images than this part
    )
    width: int = (
        32  # channels of the critic after its first layer; twice as many after each further one
    )
    depicting: int = 48  # channels of the generator at full resolution
    code: int = 64
    batch: int = 512  # drawn images in a step of either
    critic_rate: float = 1e-3  # of Adam; the critic should be the faster one
    generator_rate: float = 5e-4
    average: float = 0.998  # of the generator's weights over its steps

    def __post_init__(self) -> None:
        at_least_one(self, "steps", "pace", "patience", "width", "depicting", "code")
        if self.batch < 2:
            raise SettingError(f"dp-gan.batch={self.batch}: batch norm needs at least 2")
        if not 0 < self.drawn <= 1 or not 0 < self.bound < math.inf:
            raise SettingError("dp-gan: 0 < drawn <= 1 and bound > 0 are needed")
        if not (
            0 < self.critic_rate < 1
            and 0 < self.generator_rate < 1
            and 0 <= self.average < 1
            and 0 <= self.beaten <= 1
        ):
            raise SettingError(
                "dp-gan: rates between 0 and 1, 0 <= average < 1 and 0 <= beaten <= 1 are needed"
            )
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise SettingError(f"dp-gan.noise={self.noise}: a multiplier of 0 or more is needed")

    def plan(self, spec: Spec) -> Plan:
        stage = Stage(
            "critic",
            "sum",
            1.0 if self.noise is None else self.noise,
            self.steps,
            Poisson(self.drawn),
        )
        return Plan((stage,), Neighbours.ADD_REMOVE)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        with torch.device("meta"):
            critic = PrivateCritic(spec.shape, spec.classes, self.width)
        numbers = sum(each.numel() for each in critic.parameters())
        places = spec.pixels / spec.shape[0]
        drawn = self.drawn * spec.size if spec.size else None
        seen = 2 * critic_work(spec.shape, self.width)
        rounds = doublings(*spec.shape[1:])
        picture = 2 * 9 * 2 * rounds * self.depicting**2 * places
        steps = plan.stages[0].steps
        work = steps * (
            3 * seen * ((drawn or 0) + self.batch) + self.batch * picture * (1 + 3 / self.pace)
        )
        noise_std = plan.stages[0].noise * self.bound
        ratio = (
            self.bound * drawn / (noise_std * math.sqrt(numbers)) if drawn and noise_std else None
        )
        return {
            "numbers_of_the_critic": numbers,
            "signal_to_noise_of_a_step": ratio,
            "floating_point_operations": work,
            "operator_calls": steps * CALLS,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        device = streams.runtime.target
        arguments = {
            "shape": list(spec.shape),
            "classes": spec.classes,
            "code": self.code,
            "width": self.depicting,
        }
        net = initialise(NETS["DeepConvGenerator"](**arguments), streams.generator("weights")).to(
            device
        )
        critic = initialise(
            PrivateCritic(spec.shape, spec.classes, self.width), streams.generator("critic")
        ).to(device)
        game = _Game(self, net, critic, spec, device)
        game.play(gate, streams, progress)
        return Product.generator("DeepConvGenerator", arguments, game.settled(streams))


class _Game:
    """The two networks at play. All of it is public: what the critic learned of the records came through the gate."""

    def __init__(
        self, method: DpGan, net: nn.Module, critic: nn.Module, spec: Spec, device: torch.device
    ):
        self.method = method
        self.critic = critic.train()
        self.device = device
        self.classes = spec.classes
        sizes = torch.tensor(spec.class_sizes or (1,) * spec.classes, dtype=torch.float64)
        self.upto = (sizes.cumsum(0) / sizes.sum()).to(
            device
        )  # labels are drawn as often as is declared, or evenly
        betas = (
            0.0,
            0.99,
        )  # momentum makes the pair circle; the second moment is that of the noise, which stays the same
        self.pair = Averaged(net.train(), method.generator_rate, betas, method.average)
        self.optimiser = torch.optim.Adam(critic.parameters(), lr=method.critic_rate, betas=betas)
        # steps of the critic since the generator's last
        self.pace = method.pace
        self.waited = 0
        self.known = torch.zeros(
            (), device=device
        )  # drawn images that the critic knew, as a part, added up since the last look

    def play(self, gate: Gate, streams: Streams, progress: Progress) -> None:
        """Every answer that can still be had is one step of the critic."""
        steps = self.method.steps
        done = steps - gate.left("critic")
        # A short run's answers are kept, and come again from the first: then it begins anew.
        if (found := streams.stored("game")) is not None and int(found["step"]) <= done:
            self._take_up(found)
        self.draws = streams.generator(
            f"codes from {done}", self.device
        )  # fresh ones for a run that goes on
        for step in range(done, steps):
            descend(
                gate,
                "critic",
                self.critic,
                mistaken,
                self.optimiser,
                bound=self.method.bound,
                also=self._drawn_images_gradient(),
            )
            self.waited += 1
            if self.waited >= self.pace:
                self._generator_step()
            if step % 25 == 24 or step + 1 == steps:
                progress(
                    "training the pair",
                    step + 1,
                    steps,
                    critic_steps_for_one_of_the_generator=self.pace,
                )
            if streams.due(step, steps):
                streams.store("game", self._kept(step + 1))
                self._show(streams)

    def _drawn(self, net: nn.Module) -> tuple[Tensor, Tensor]:
        """Images of the generator and their labels: [batch, ...], [batch]."""
        count = self.method.batch
        device = self.device
        chances = torch.rand(count, generator=self.draws, device=device, dtype=torch.float64)
        labels = torch.searchsorted(self.upto, chances, right=True).clamp(max=self.classes - 1)
        return net(
            torch.randn(count, self.method.code, generator=self.draws, device=device), labels
        ), labels

    def _drawn_images_gradient(self) -> Tensor:
        """Of the critic's mean loss on drawn images; it is added to each record's own: [numbers]."""
        with torch.no_grad():
            drawn = self._drawn(self.pair.net)
        return flat(
            torch.autograd.grad(
                softplus(self.critic(*drawn)).mean(), list(self.critic.parameters())
            )
        )

    def _generator_step(self) -> None:
        images, labels = self._drawn(self.pair.net)
        self.critic.requires_grad_(False)
        scores = self.critic(images, labels)
        softplus(-scores).mean().backward()
        self.pair.step()
        self.critic.requires_grad_(True)
        self.known += (scores.detach() < 0).float().mean()
        self.waited = 0
        if self.pair.steps % self.method.patience == 0:
            # privacy: the critic is judged by drawn images alone. How well it knows the records would be one more answer.
            if float(self.known) <= self.method.beaten * self.method.patience:
                self.pace *= 2
            self.known.zero_()

    def _show(self, streams: Streams) -> None:
        """Ten images of each class, as the mean draws them now."""
        labels = torch.arange(self.classes, device=self.device).repeat_interleave(10)
        # A stream of its own: when it is shown depends on the clock, and what is released must not.
        codes = torch.randn(
            len(labels),
            self.method.code,
            generator=streams.generator("shown", self.device),
            device=self.device,
        )
        with torch.no_grad():
            streams.show(self.pair.mean(codes, labels), 10)

    def settled(self, streams: Streams) -> nn.Module:
        """The mean generator."""
        self.draws = streams.generator("settling", self.device)
        return self.pair.settled(self._drawn)

    def _kept(self, step: int) -> dict[str, Tensor]:
        counts = {"step": step, "pace": self.pace, "waited": self.waited, "known": self.known}
        return self.pair.kept() | kept(critic=self.critic, optimiser=self.optimiser, **counts)

    def _take_up(self, found: dict[str, Tensor]) -> None:
        self.pair.restore(found)
        take_up(found, critic=self.critic, optimiser=self.optimiser)
        self.pace = int(found["pace"])
        self.waited = int(found["waited"])
        self.known = found["known"].clone()


METHOD = DpGan
