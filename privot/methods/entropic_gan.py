r"""The entropic GAN: a generator of clean records from records that were noised before they left their owners.

**Released** a generator, made from what the clients sent and nothing else: no record is asked for here, and the gate of a server has none.
**Bound** that of the channel on the client: a clipped domain, and noise that fits it (docs/methods/channels.md).
**Cost** that of the channel, once for each record and paid by the client. All of the training is post-processing.
**Departs** from the paper: transport is solved until it is exact, sums of its gradient come from the plan and not from unrolled sweeps;
any channel with a density, not additive noise alone; a one-sided likelihood as a second loss; labels through a channel of their own.
**Notation** y: answers of the clients, x = G(z): generated records, K(y|x) the channel, c = -t log K + const, t its temperature;
the loss is :math:`\min_P E_P c + t\,KL(P\|P_x P_y)`, which is least where the x are what the noise was added to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from privot.data.spec import Spec
from privot.errors import SettingError
from privot.local.frequency_estimation import apportioned, meaning, shares
from privot.nets import NETS, initialise
from privot.nets.ema import Averaged, faded
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan
from privot.release.artifact import Product
from privot.runtime import Progress, Streams
from privot.runtime.graphed_step import Repeated
from privot.transport.entropic import entropic, likelihood, settle, sweeps

SIDE = 8  # pixels; smaller records are taken as numbers, not pictures
# rates of Adam
RECORDS = 2e-3
IMAGES = 5e-4
WAVES = 20  # a side, of the dense net
ENOUGH = 1e-4  # relative error of the plan's weights with which a step of Adam is content
PATIENCE = 100  # sweeps of a step at most, where faint noise makes them many; the residual is taken with all it needs
ROUNDS = 8  # batches over which the residual is taken
CALLS = 1500  # of tensor operators, in a step
SWEEPING = 200  # element-wise passes over the cost, in the sweeps of a step
BIASED = (
    "entropic-gan.debias=true: the debiased divergence is least where generated records are as noisy as the answers, so it would learn the "
    "noise; the bias of entropic transport is what takes the noise away"
)


@dataclass(frozen=True, kw_only=True)
class EntropicGAN:
    """Settings of the entropic GAN.

    >>> EntropicGAN(debias=True)
    Traceback (most recent call last):
    privot.errors.SettingError: entropic-gan.debias=true: the debiased divergence is least where generated records ...
    """

    name: ClassVar[str] = "entropic-gan"
    title: ClassVar[str] = (
        "Entropic GAN: a generator of clean records from records noised by their owners"
    )
    trusts: ClassVar[str] = "nobody: records are noised before they leave"
    promise: ClassVar[str] = "local epsilon of the channel, paid by each client once"
    citation: ClassVar[str] = """@article{reshetova2024training,
  title   = {Training Generative Models from Privatized Data via Entropic Optimal Transport},
  author  = {Reshetova, Daria and Chen, Wei-Ning and {\\"O}zg{\\"u}r, Ayfer},
  journal = {IEEE Journal on Selected Areas in Information Theory},
  year    = {2024}
}
@article{rigollet2018entropic,
  title   = {Entropic optimal transport is maximum-likelihood deconvolution},
  author  = {Rigollet, Philippe and Weed, Jonathan},
  journal = {Comptes Rendus Math{\\'e}matique},
  year    = {2018}
}"""
    free: ClassVar[tuple[str, ...]] = ("steps", "learning", "average")  # when a crashed run goes on

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {"width": 8, "steps": 500, "batch": 64}

    loss: str = "eot"  # or "nll": one side of it, quicker, and as good where noise is strong
    batch: int = 256  # generated records, and answers, a step; heavy noise wants more
    steps: int = 3000
    net: str = "auto"  # "records" for numbers and categories; "dense" or "conv" for images, of which auto takes conv
    code: int = 16
    hidden: int = 128
    waves: int | None = (
        None  # a side, of which the dense net draws; None: as many numbers a side as were sent, 20 where all were
    )
    width: int = 32  # channels of the convolutional net at full resolution
    learning: float | None = (
        None  # rate of Adam, after a warm-up, falling to zero; None: 2e-3, or 5e-4 for images
    )
    average: float = 0.995  # of the generator's weights over the steps
    strength: float = 1.0  # of the regularisation, in units of the channel's; any other learns another law, as docs/local.md shows
    debias: bool = False  # refused: it would learn the noise

    def __post_init__(self) -> None:
        if self.debias:
            raise SettingError(BIASED)
        if self.loss not in ("eot", "nll"):
            raise SettingError(f"entropic-gan.loss={self.loss!r}: eot or nll")
        if self.net not in ("auto", "records", "dense", "conv"):
            raise SettingError(f"entropic-gan.net={self.net!r}: auto, records, dense or conv")
        for key in ("steps", "code", "hidden", "width", "waves"):
            if (given := getattr(self, key)) is not None and given < 1:
                raise SettingError(f"entropic-gan.{key}={given}: at least 1 is needed")
        if self.batch < 2:
            raise SettingError(f"entropic-gan.batch={self.batch}: at least 2 are needed")
        rate = RECORDS if self.learning is None else self.learning
        if not (0 < rate < 1 and 0 <= self.average < 1 and 0 < self.strength < math.inf):
            raise SettingError(
                "entropic-gan: 0 < learning < 1, 0 <= average < 1 and a strength above 0 are needed"
            )

    def plan(self, spec: Spec) -> Plan:
        return Plan((), Neighbours.LOCAL)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        images = self.kind(spec) == "conv"
        net = (
            18 * self.width**2 * spec.pixels
            if images
            else self.hidden * (self.hidden + spec.pixels)
        )
        work = 3 * self.steps * self.batch * (2 * net + 2 * self.batch * spec.pixels)
        return {
            "floating_point_operations": work,
            "elementwise_operations": SWEEPING * self.steps * self.batch**2,
            "operator_calls": self.steps * CALLS,
        }

    def kind(self, spec: Spec) -> str:
        """Which net, by the shape of a record."""
        if self.net != "auto":
            return self.net
        return "conv" if min(spec.shape[1:]) >= SIDE else "records"

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        box = gate.privatized()
        training = Training(self, box, streams)
        for step in range(training.pair.steps, self.steps):
            training.learn(step)
            if streams.due(step, self.steps) or step + 1 == self.steps:
                streams.store("training", training.pair.kept())
                found = training.residual(1)
                progress(
                    "learning from what was sent",
                    step + 1,
                    self.steps,
                    residual=found["over_noise"],
                )
            elif step % 25 == 24:
                progress("learning from what was sent", step + 1, self.steps)
        net = training.settled()
        return Product.generator(
            training.net, training.arguments, net, {"diagnostics": training.residual(ROUNDS)}
        )


class Training:
    """The generator, its running mean and Adam, and the answers of the clients. All of it is public.

    On a GPU a step, draws included, is one CUDA graph, with a number of sweeps that follows from epsilon alone; on a CPU the sweeps stop
    where the plan is exact.
    """

    def __init__(self, method: EntropicGAN, box: Any, streams: Streams):
        device = streams.runtime.target
        self.method = method
        self.channel = box.channel
        self.labelled = box.labelled
        self.device = device
        self.values = box.values.to(device)
        self.temperature = method.strength * box.channel.temperature
        self.net, self.arguments = described(method, box.spec, box.channel, box.labelled)
        net = (
            initialise(NETS[self.net](**self.arguments), streams.generator("weights"))
            .to(device)
            .train()
        )
        self.rate = method.learning or (RECORDS if self.net == "RecordGenerator" else IMAGES)
        self.pair = Averaged(net, self.rate, (0.5, 0.999), method.average)
        self.pair.restore(streams.stored("training"))
        classes = box.spec.classes
        if self.labelled:  # how many of each class there are comes from the answers, too
            label = box.channel.parts[-1]
            share = shares(label, self.values[:, -label.width :])
        else:
            share = torch.full((classes,), 1 / classes)
        self.labels = apportioned(share, method.batch).to(device)
        self.classes = classes
        # Codes of their own for a run that goes on: those of its first steps have been seen.
        self.draws = streams.generator(f"codes {self.pair.steps}", device)
        self.count = sweeps(box.channel.epsilon) if device.type == "cuda" else None
        self._again = Repeated(self._follow, device, self.draws)

    def learn(self, step: int) -> None:
        self.pair.ahead(faded(self.rate, step, self.method.steps))
        self._again()

    def cost(self, net: Any) -> Tensor:
        """Between fresh generated records and fresh answers: [batch, batch]."""
        size = self.method.batch
        codes = torch.randn(size, net.code, generator=self.draws, device=self.device)
        places = torch.randint(len(self.values), (size,), generator=self.draws, device=self.device)
        points = (
            net.points(codes, self.labels)
            if self.net == "RecordGenerator"
            else net(codes, self.labels).flatten(1)
        )
        if self.labelled:
            points = torch.cat([points, one_hot(self.labels, self.classes).to(points)], 1)
        cost: Tensor = self.channel.cost(points, self.values[places])
        return cost

    def _follow(self) -> None:
        cost = self.cost(self.pair.net)
        whole = self.method.loss == "eot"
        lost = (
            entropic(cost, self.temperature, self.count, ENOUGH, PATIENCE)
            if whole
            else likelihood(cost, self.temperature)
        )
        lost.backward()
        self.pair.follow()

    def residual(self, rounds: int) -> dict[str, Any]:
        """How far answers are from what they are matched with, beside how far the channel carries a record; no clean record is needed."""
        rows = []
        off = 0.0
        with torch.no_grad():
            for _ in range(rounds):
                cost = self.cost(self.pair.mean)
                found = settle(cost, self.temperature, tolerance=ENOUGH)
                plan = found.plan(cost / self.temperature)
                rows.append((plan * cost).sum(0) / plan.sum(0))
                off = max(off, float(found.error))
        each = torch.cat(rows).double()
        return meaning(
            float(each.mean()),
            self.channel.residual(),
            float(each.std() / math.sqrt(len(each))),
            off,
        )

    def settled(self) -> Any:
        return self.pair.settled(lambda mean: self.cost(mean))


def described(
    method: EntropicGAN, spec: Spec, channel: Any, labelled: bool
) -> tuple[str, dict[str, Any]]:
    """The net for such records, and its arguments; a label that was sent is what the net is told, not what it makes."""
    kind = method.kind(spec)
    shared = {"shape": list(spec.shape), "classes": spec.classes, "code": method.code}
    parts = list(getattr(channel, "parts", (channel,)))[: -1 if labelled else None]
    if kind != "records" and (
        len(parts) > 1 or parts[0].domain != (0.0, 1.0) or parts[0].columns != spec.pixels
    ):
        raise SettingError(
            f"entropic-gan.net={kind}: images have values in 0 to 1 and one channel; use net=records for these"
        )
    if kind == "conv":
        return "DeepConvGenerator", {**shared, "width": method.width}
    if kind == "dense":
        # What was not sent has no say in the loss: finer waves than that would be noise.
        sent = parts[0].space
        waves = method.waves or (WAVES if sent.kind == "plain" else max(sent.small[1:]))
        return "DenseGenerator", {**shared, "hidden": method.hidden, "waves": waves}
    columns = [
        [each.categories] if hasattr(each, "categories") else [each.columns, *each.domain]
        for each in parts
    ]
    return "RecordGenerator", {**shared, "hidden": method.hidden, "columns": columns}


METHOD = EntropicGAN
