r"""DP-Sinkhorn: a generator that follows noisy transport gradients, without a critic.

**Released** at each step the gradient of the transport cost between a fixed number of generated images and a Poisson draw of records,
with respect to the generated images, in their low frequencies, with Gaussian noise.
**Bound** ``clip=record``: it is a sum over records, each part clipped, so one record moves it by the bound. ``clip=batch`` (the paper): all
of it is clipped to one ball, so whatever a record does moves it by twice the bound.
**Cost** ``steps`` Poisson-sampled Gaussian events, add or remove one record. What drives generated images apart touches no record and is
added outside, without noise.
**Departs** from the paper: records are clipped one by one, against public potentials; the number of generated images is fixed; classes have
equal mass; high frequencies are left out; far fewer steps. Reasons, and the paper's own way: docs/methods/dp-sinkhorn.md.
**Notation** generated points X with labels, records Y, X' = X with a part ``fresh`` drawn anew; loss 2 W(X, Y) - W(X, X').
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets import NETS, initialise
from privot.nets.averaged import Averaged
from privot.nets.repeated import Repeated
from privot.nets.waves import cosines
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.product import Product
from privot.runtime import Progress, Streams
from privot.transport.sinkhorn import plan as transport_plan
from privot.transport.sinkhorn import potentials, squared_euclidean, transport


def points(images: Tensor, labels: Tensor, classes: int, label: float) -> Tensor:
    """Images in [0, 1] as points: pixels in [-1, 1], then ``label`` at the place of the class: [count, pixels + classes]."""
    return torch.cat([(2 * images - 1).flatten(1), label * one_hot(labels, classes).to(images.dtype)], 1)


def pull(
    records: Any, images: Tensor, labels: Tensor, waves: tuple[Tensor, Tensor], classes: int, room: int, label: float, absolute: float,
    blur: float, iterations: int,
) -> Tensor:  # fmt: skip
    r"""The gradient of :math:`\sqrt{n} W(X, Y)` in the pixels of n generated images X, low frequencies alone: [n, channels, down, across].

    Of n images' gradients this is the root mean square, whatever n is. Each class of the drawn records Y has the same mass.
    """
    count = len(records.labels)
    # privacy: which records are looked at, and how they are weighted, may depend on the draw in any way: the gate clips the whole answer,
    # and the bound of `answer` asks for nothing else. Above `room` an even choice is taken, since records come in their own order.
    chosen = torch.arange(min(count, room), device=labels.device) * count // min(count, room)
    drawn, marks = records.images[chosen], records.labels[chosen]
    kinds = one_hot(marks, classes).to(drawn.dtype)
    sizes = kinds.sum(0)
    weights = (kinds @ (1 / sizes.clamp(min=1))) / (sizes > 0).sum()
    # One shape whatever was drawn: the rest is black images that weigh nothing.
    missing = room - len(chosen)
    drawn, marks, weights = pad(drawn, (0, 0, 0, 0, 0, 0, 0, missing)), pad(marks, (0, missing)), pad(weights, (0, missing))
    there, here = points(drawn, marks, classes, label), points(images, labels, classes, label).requires_grad_()
    with torch.enable_grad():
        cost = squared_euclidean(here, there, absolute)
        moved = transport_plan(cost, blur, None, weights, iterations)
        (gradient,) = torch.autograd.grad((moved * cost).sum(), here)
    pixels = gradient[:, : images[0].numel()].view_as(images) * math.sqrt(len(images))
    down, across = waves
    return down.T @ pixels @ across


def part(image: Tensor, label: Tensor, images: Tensor, dual: Tensor, waves: tuple[Tensor, Tensor], absolute: float, blur: float) -> Tensor:
    """One record's part of the gradient of W in the generated ``images`` of its class, [classes, count, ...], at public potentials.

    With the potentials ``dual`` [classes, count] given, a record goes to the images of its class on its own, whatever the other records
    are; low frequencies alone: [count, channels, down, across].
    """
    mine, reach = (each.index_select(0, label[None])[0] for each in (images, dual))
    gaps = 2 * (mine - image)  # pixels in [-1, 1]
    cost = gaps.square().flatten(1).sum(1) + absolute * gaps.abs().flatten(1).sum(1)
    shares = ((reach - cost) / blur).softmax(0)[:, None, None, None]
    down, across = waves
    return down.T @ (shares * (2 * gaps + absolute * gaps.sign())) @ across


@dataclass(frozen=True, kw_only=True)
class DPSinkhorn:
    """Settings of DP-Sinkhorn. ``noise`` fixes the multiplier; without it the budget does.

    >>> DPSinkhorn(noise=1.1, clip="batch", rate=0.01).plan(Spec((1, 28, 28), 10)).stages[0].sampling
    Poisson(rate=0.01)
    """

    name: ClassVar[str] = "dp-sinkhorn"
    title: ClassVar[str] = "DP-Sinkhorn: a generator from noisy transport gradients"
    trusts: ClassVar[str] = "the data owner"
    promise: ClassVar[str] = "(epsilon, delta), many Gaussian releases on Poisson draws"
    citation: ClassVar[str] = """@inproceedings{cao2021dpsinkhorn,
  title     = {Don't Generate Me: Training Differentially Private Generative Models with {Sinkhorn} Divergence},
  author    = {Cao, Tianshi and Bie, Alex and Vahdat, Arash and Fidler, Sanja and Kreis, Karsten},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2021}
}"""

    noise: float | None = None
    clip: str = "record"  # or "batch", the paper's
    rate: float = 0.05  # with which a record is drawn: 3,000 of 60,000. With clip=batch 0.005 is better; the paper has 50 of 60,000
    steps: int = 5000  # with clip=batch 40,000 or more; the paper has millions
    batch: int = 200  # generated images a step, rounded up to as many of each class
    room: int = 400  # of the drawn records so many are looked at; clip=batch alone
    bound: float = 20.0  # at 784 pixels: on a record's part, or (batch) on the root mean square of the images' gradients
    detail: float = 0.5  # part of the frequencies of each side that is asked for
    blur: float = 50.0  # in units of the cost, at 784 pixels, where images of a class are some hundreds apart
    iterations: int = 20
    absolute: float = 0.0  # weight of |.|_1 beside |.|_2^2; the paper has 1 or 3
    label: float = 15.0  # distance that a label makes, over sqrt(2), as in the paper
    fresh: float = 0.2  # part of X' that is drawn anew, as in the paper; 1 removes the whole bias
    code: int = 16
    width: int = 32  # channels of the generator at full resolution
    learning: float = 5e-4  # rate of Adam, after a warm-up; falls to zero
    average: float = 0.999  # of the generator's weights over the steps

    def __post_init__(self) -> None:
        if self.clip not in ("record", "batch"):
            raise SettingError(f"dp-sinkhorn.clip={self.clip!r}: record or batch")
        for key in ("steps", "room", "code", "width", "iterations"):
            if getattr(self, key) < 1:
                raise SettingError(f"dp-sinkhorn.{key}={getattr(self, key)}: at least 1 is needed")
        if self.batch < 2:
            raise SettingError(f"dp-sinkhorn.batch={self.batch}: batch norm needs at least 2")
        if not all(0 < getattr(self, key) <= 1 for key in ("rate", "detail", "learning")):
            raise SettingError("dp-sinkhorn: rate, detail and learning above 0 and at most 1 are needed")
        if not all(0 < getattr(self, key) < math.inf for key in ("bound", "blur")):
            raise SettingError("dp-sinkhorn: bound and blur above 0 are needed")
        if not all(0 <= getattr(self, key) < math.inf for key in ("absolute", "label")) or not 0 <= self.fresh <= 1:
            raise SettingError("dp-sinkhorn: absolute and label of 0 or more, and fresh in [0, 1], are needed")
        if not 0 <= self.average < 1 or (self.noise is not None and not 0 <= self.noise < math.inf):
            raise SettingError("dp-sinkhorn: 0 <= average < 1 and a noise of 0 or more are needed")

    def plan(self, spec: Spec) -> Plan:
        if self.clip == "record" and not spec.size:
            raise SettingError(
                "dp-sinkhorn with clip=record divides by the number of records, so it must be declared; clip=batch needs none"
            )
        verb, noise = "sum" if self.clip == "record" else "answer", 1.0 if self.noise is None else self.noise
        return Plan((Stage("pull", verb, noise, self.steps, Poisson(self.rate)),), Neighbours.ADD_REMOVE)

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        noise, numbers = plan.stages[0].noise, spec.classes * self._reach(spec) ** 2 * spec.pixels
        # If every record pulled the same way: the length of all answers over the noise in the directions of the class means.
        each = self.rate * (spec.size or 0) if self.clip == "record" else 0.5
        ratio = math.sqrt(self.steps) * each / (noise * math.sqrt(numbers)) if noise else None
        looked = self.rate * (spec.size or 0) / spec.classes if self.clip == "record" else self.room
        pairs = looked * self.batch * (spec.pixels + spec.classes) * (3 + 3 * bool(self.absolute))
        return {"signal_to_noise_of_class_means": ratio, "floating_point_operations": 2 * self.steps * pairs}

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec, device = gate.spec, streams.runtime.target
        arguments = {"shape": list(spec.shape), "classes": spec.classes, "code": self.code, "width": self.width}
        net = initialise(NETS["DeepConvGenerator"](**arguments), streams.generator("weights")).to(device)
        training = Training(self, net, spec, streams)
        for step in range(self.steps - gate.left("pull"), self.steps):
            training.learn(step, self._of_records(gate, training) if self.clip == "record" else self._of_the_batch(gate, training))
            if streams.due(step, self.steps):
                streams.store("training", training.pair.kept())
                streams.show(training.images[: 10 * spec.classes], spec.classes)
            if step % 25 == 24 or step + 1 == self.steps:
                progress("following the records", step + 1, self.steps)
        return Product.generator("DeepConvGenerator", arguments, training.settled())

    def scaled(self, spec: Spec) -> tuple[float, float]:
        """``bound`` and ``blur`` for images of this size: one is a length, the other a squared one."""
        return self.bound * math.sqrt(spec.pixels / 784), self.blur * spec.pixels / 784

    def _of_the_batch(self, gate: Gate, training: Training) -> Tensor:
        bound, blur = self.scaled(gate.spec)
        public = (training.waves, gate.spec.classes, self.room, self.label, self.absolute, blur, self.iterations)
        shape = tuple(training.answer.shape)
        return gate.answer("pull", pull, training.images, training.labels, *public, bound=bound, shape=shape)

    def _of_records(self, gate: Gate, training: Training) -> Tensor:
        """The same gradient as a sum over records: class by class, over what a class has in a draw on average."""
        spec, count = gate.spec, len(training.labels)
        images = training.images.unflatten(0, (-1, spec.classes)).transpose(0, 1).contiguous()  # [classes, count, ...]
        bound, blur = self.scaled(spec)
        sums = gate.sum("pull", part, images, training.dual, training.waves, self.absolute, blur, bound=bound, per_class=True)
        sizes = spec.class_sizes or (spec.size / spec.classes,) * spec.classes  # type: ignore[operator]
        drawn = torch.tensor([max(1.0, self.rate * size) for size in sizes], dtype=sums.dtype, device=sums.device)
        means = sums / drawn.view(-1, 1, 1, 1, 1)
        return means.transpose(0, 1).flatten(0, 1) * (math.sqrt(count) / spec.classes)

    def _reach(self, spec: Spec) -> float:
        """Part of the frequencies of a side, after rounding; both sides alike."""
        return math.sqrt(math.prod(max(1, round(self.detail * side)) / side for side in spec.shape[1:]))


class Training:
    """The public half: a generator, its running mean and Adam. It holds ``images`` to ask about, and learns from the answer.

    On a GPU a step is one CUDA graph: what changes from step to step lies in buffers.
    """

    def __init__(self, method: DPSinkhorn, net: nn.Module, spec: Spec, streams: Streams):
        device = streams.runtime.target
        self.method, self.classes, self.blur = method, spec.classes, method.scaled(spec)[1]
        self.pair = Averaged(net, method.learning, (0.9, 0.999), method.average)
        self.waves = tuple(cosines(side, max(1, round(method.detail * side))).to(device) for side in spec.shape[1:])
        count = spec.classes * -(-method.batch // spec.classes)
        self.labels = torch.arange(count, device=device) % spec.classes
        self.fresh = round(method.fresh * count)
        # X and, after it, what is new in X'; potentials want as many others as there are in X
        self.drawn = torch.cat([self.labels, self.labels[: self.fresh if method.clip == "batch" else None]])
        self.pair.restore(streams.stored("training"))
        # Codes of their own for a run that goes on: those of its first steps have been seen.
        self.draws = streams.generator(f"codes {self.pair.steps}", device)
        self.codes = torch.empty(len(self.drawn), method.code, device=device)
        self.images = torch.empty(count, *spec.shape, device=device)
        self.dual = torch.zeros(spec.classes, count // spec.classes, device=device)
        self.answer = torch.zeros(count, spec.shape[0], *(each.shape[1] for each in self.waves), device=device)
        net.train()
        self._draw()
        self._again = Repeated(self._follow, device, self.draws)

    def learn(self, step: int, answer: Tensor) -> None:
        """One step of Adam, on the answer about ``images``; then there are new ones."""
        self.answer.copy_(answer)
        self.pair.ahead(self.method.learning * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * step / self.method.steps)) / 2)
        self._again()

    def _follow(self) -> None:
        method, count = self.method, len(self.labels)
        drawn = points(self.pair.net(self.codes, self.drawn), self.drawn, self.classes, method.label)
        here, fresh = drawn[:count], drawn[count : count + self.fresh]
        down, across = self.waves
        pulled = (down @ self.answer @ across.T).flatten(1)
        loss = 2 / math.sqrt(count) * (here[:, : pulled.shape[1]] * pulled).sum()
        if len(fresh):
            cost = squared_euclidean(here, torch.cat([fresh, here[len(fresh) :]]), method.absolute)
            loss = loss - transport(cost, self.blur, iterations=method.iterations)
        loss.backward()
        self.pair.follow()
        self._draw()

    def _draw(self) -> None:
        """New codes and their images, as batch norm sees them in training, and their potentials against others of their class.

        Those are the potentials against the records too, once the generator draws as the records are; until then they are near.
        """
        self.codes.normal_(generator=self.draws)
        with torch.no_grad():
            drawn = self.pair.net(self.codes, self.drawn)
            self.images.copy_(drawn[: len(self.labels)])
            if self.method.clip == "record":
                here, there = ((2 * each - 1).flatten(1).unflatten(0, (-1, self.classes)).transpose(0, 1) for each in drawn.chunk(2))
                cost = squared_euclidean(here, there, self.method.absolute)
                self.dual.copy_(potentials(cost, self.blur, iterations=self.method.iterations).first)

    def settled(self) -> nn.Module:
        return self.pair.settled(lambda mean: mean(self.codes.normal_(generator=self.draws), self.drawn))


METHOD = DPSinkhorn
