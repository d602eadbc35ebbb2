r"""Conditional GAN without privacy: the baseline to which private and condensed data are compared.

**Released** a generator trained on the records themselves.
**Bound** none: the critic sees every record as often as it likes, and tells the generator.
**Cost** infinite. The gate is opened, and the release says `NoGuarantee`.
**Departs** from the papers, which leave the networks open: a critic with label projection and a penalty on its slope at the records (R1,
Mescheder et al. 2018), and the released generator is the running mean of the trained one. None of it was tuned on a test set.
**Notation** critic D(x, y), generator G(z, y), z ~ N(0, I), s(t) = log(1 + e^t); D minimises E s(-D(x, y)) + E s(D(G(z, y), y)) +
penalty/2 E |\nabla_x D(x, y)|^2, G minimises E s(-D(G(z, y), y)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from privot.baselines.condensation import at_least_one
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets import NETS, initialise
from privot.nets.conv_block import half
from privot.nets.ema import SETTLING, Averaged
from privot.nets.generators.dcgan import ProjectionCritic, doublings, steepness
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan
from privot.release.artifact import Product
from privot.runtime import Progress, Streams
from privot.runtime.graphed_step import Repeated

CALLS = 700  # of tensor operators, in a step of one of the two networks
REASON = "no mechanism: the generator was trained on the records themselves, without clipping or noise, and can reproduce some of them"


@dataclass(frozen=True, kw_only=True)
class ConditionalGan:
    """Settings of the conditional GAN. It promises nothing: every record may be visible in what it draws.

    >>> ConditionalGan().plan(Spec((1, 28, 28), 10)).stages
    ()
    """

    name: ClassVar[str] = "conditional-gan"
    title: ClassVar[str] = "Conditional GAN, a baseline (no privacy)"
    trusts: ClassVar[str] = "everyone who sees the generator"
    promise: ClassVar[str] = (
        "none: no mechanism, the generator was trained on the records themselves"
    )
    citation: ClassVar[str] = """@article{mirza2014conditional,
  title   = {Conditional Generative Adversarial Nets},
  author  = {Mirza, Mehdi and Osindero, Simon},
  journal = {arXiv preprint arXiv:1411.1784},
  year    = {2014}
}
@inproceedings{miyato2018projection,
  title     = {{cGANs} with Projection Discriminator},
  author    = {Miyato, Takeru and Koyama, Masanori},
  booktitle = {International Conference on Learning Representations},
  year      = {2018}
}
@inproceedings{mescheder2018which,
  title     = {Which Training Methods for {GANs} do actually Converge?},
  author    = {Mescheder, Lars and Geiger, Andreas and Nowozin, Sebastian},
  booktitle = {International Conference on Machine Learning},
  year      = {2018}
}"""

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {"width": 8, "steps": 500, "batch": 32}

    code: int = 64
    width: int = 64  # channels at full resolution, of both networks; twice as many at each halving
    steps: int = 20_000  # of the generator
    critic_steps: int = 1  # for each of them
    batch: int = 128
    rate: float = 2e-4  # of Adam, for both
    penalty: float = 10.0  # on the critic's slope at the records
    average: float = 0.999  # of the generator's weights over the steps

    def __post_init__(self) -> None:
        at_least_one(self, "code", "width", "steps", "critic_steps")
        if self.batch < 2:
            raise SettingError(f"conditional-gan.batch={self.batch}: batch norm needs at least 2")
        if not 0 < self.rate < 1 or not 0 <= self.average < 1:
            raise SettingError("conditional-gan: 0 < rate < 1 and 0 <= average < 1 are needed")
        if not 0 <= self.penalty < math.inf:
            raise SettingError(f"conditional-gan.penalty={self.penalty}: 0 or more is needed")

    def plan(self, spec: Spec) -> Plan:
        return Plan((), Neighbours.REPLACE)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        # Every round has as many places times pairs of channels as any other: places fall by 4 where channels double. The generator has a
        # 3x3 convolution from twice as many channels, the critic a 3x3 of its own channels and, a quarter of the places, a 4x4 to twice
        # as many.
        rounds = doublings(*spec.shape[1:])
        places = spec.shape[1] * spec.shape[2]
        ends = 9 * self.width * spec.pixels  # the layer at the image
        judge = 2 * (17 * rounds * self.width**2 * places + ends)
        draw = 2 * (
            18 * rounds * self.width**2 * places
            + ends
            + (self.code + spec.classes) * self.width * places / 2**rounds
        )
        # Forward and back is 3 passes. The critic learns from two images, one of them drawn, and from its slope at the other (1 pass to the
        # image, 2 back from there); then the generator learns through the critic, which is gone through forward and back to the image.
        step = (
            self.critic_steps * ((6 + 3 * (self.penalty > 0)) * judge + draw) + 3 * draw + 2 * judge
        )
        work = self.batch * (self.steps * step + SETTLING * draw)
        calls = self.steps * (self.critic_steps + 1) * CALLS
        return {"floating_point_operations": work, "operator_calls": calls}

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        device = streams.runtime.target
        records = gate.open(REASON)
        arguments = {
            "shape": list(spec.shape),
            "classes": spec.classes,
            "code": self.code,
            "width": self.width,
        }
        net = initialise(NETS["DeepConvGenerator"](**arguments), streams.generator("weights")).to(
            device
        )
        critic = initialise(
            ProjectionCritic(spec.shape, spec.classes, self.width), streams.generator("critic")
        ).to(device)
        for each in (net, critic):  # as the matrix units of a GPU read them
            each.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        mean = self._train(net, critic, records.images, records.labels, streams, progress)
        return Product.generator("DeepConvGenerator", arguments, mean)

    def _train(
        self,
        net: nn.Module,
        critic: nn.Module,
        images: Tensor,
        labels: Tensor,
        streams: Streams,
        progress: Progress,
    ) -> nn.Module:
        """The running mean of the generator. On a GPU a step of the pair, draws included, is one CUDA graph."""
        device = images.device
        draws = streams.generator("draws", images.device)
        # momentum makes the pair circle
        betas = (0.0, 0.99)
        on_gpu = device.type == "cuda"
        pair = Averaged(net, self.rate, betas, self.average)
        optimiser = torch.optim.Adam(
            critic.parameters(), lr=self.rate, betas=betas, capturable=on_gpu, fused=on_gpu
        )

        def some() -> Tensor:
            return torch.randint(len(labels), (self.batch,), generator=draws, device=device)

        def made(generator: nn.Module, wanted: Tensor) -> Tensor:
            return generator(
                torch.randn(self.batch, self.code, generator=draws, device=device), wanted
            )

        def both() -> None:
            for _ in range(self.critic_steps):
                which = some()
                real = images[which].requires_grad_(self.penalty > 0)
                wanted = labels[some()]  # labels as frequent as among the records
                with half(device):
                    with torch.no_grad():
                        fake = made(net, wanted)
                    known = critic(real, labels[which]).float()
                    drawn = critic(fake, wanted).float()
                loss = softplus(-known).mean() + softplus(drawn).mean()
                if self.penalty:
                    loss = loss + self.penalty / 2 * steepness(known, real)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
            wanted = labels[some()]
            critic.requires_grad_(False)
            with half(device):
                scores = critic(made(net, wanted), wanted).float()
            softplus(-scores).mean().backward()
            pair.follow()
            critic.requires_grad_(True)

        net.train()
        critic.train()
        again = Repeated(both, device, draws)
        for step in range(self.steps):
            pair.ahead()
            again()
            if step % 25 == 24 or step + 1 == self.steps:
                progress("training the pair", step + 1, self.steps)
        return pair.settled(lambda mean: made(mean, labels[some()]))


METHOD = ConditionalGan
