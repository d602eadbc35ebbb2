r"""DP-Sinkhorn: a generator that follows noisy transport gradients, without a critic.

**Released** at each step the gradient of the transport cost between a fixed number of generated images and a Poisson draw of records,
with respect to the low frequencies of the generated images, with Gaussian noise.
**Bound** ``clip=record``: it is a sum over records, each part clipped, so one record moves it by the bound. ``clip=batch`` (the paper): all
of it is clipped to one ball, so whatever a record does moves it by twice the bound.
**Cost** ``steps`` Poisson-sampled Gaussian events, add or remove one record. What drives generated images apart touches no record and is
added outside, without noise.
**Departs** from the paper: records are clipped one by one, against public potentials, and their cost is the distance, not its square; the
number of generated images is fixed; classes have equal mass; high frequencies are unseen and held at zero; far fewer steps. Reasons, and
the paper's own way: docs/methods/dp-sinkhorn.md.
**Notation** generated points X with labels, records Y, X' = X with a part ``fresh`` drawn anew; loss 2 W(X, Y) - W(X, X').
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from privot.components.dct import cosines
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.nets import NETS, drawing, initialise
from privot.nets.ema import Averaged, faded
from privot.privacy.gate import Gate
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release.artifact import Product
from privot.runtime import Progress, Streams
from privot.runtime.graphed_step import Repeated
from privot.transport.sinkhorn import plan as transport_plan
from privot.transport.sinkhorn import potentials, squared_euclidean, transport

TINY = 1e-6  # under a root, so that nothing is divided by zero
APART = 16.0  # so far are images of 784 pixels in [-1, 1] from others of their class, on MNIST and alike

CALLS = 4000  # of tensor operators, in a step


def lowest(images: Tensor, basis: Tensor) -> Tensor:
    """Images in [0, 1] as their lowest frequencies, of pixels in [-1, 1]: [..., channels, height, width] to [..., frequencies].

    ``basis`` [pixels, frequencies of a channel] is orthonormal, so distances are those between images without their high frequencies.
    """
    return ((2 * images - 1).flatten(-2) @ basis).flatten(-2)


def pull(
    records: Any,
    here: Tensor,
    labels: Tensor,
    basis: Tensor,
    classes: int,
    room: int,
    label: float,
    absolute: float,
    blur: float,
    iterations: int,
) -> Tensor:
    r"""The gradient of :math:`\sqrt{n} W(X, Y)` in the frequencies ``here`` [n, frequencies] of generated images X: as large as they are.

    Of n images' gradients this is the root mean square, whatever n is. Each class of the drawn records Y has the same mass.
    """
    count = len(records.labels)
    # privacy: which records are looked at, and how they are weighted, may depend on the draw in any way: the gate clips the whole answer,
    # and the bound of `answer` asks for nothing else. Above `room` an even choice is taken, since records come in their own order.
    chosen = torch.arange(min(count, room), device=labels.device) * count // min(count, room)
    drawn = records.images[chosen]
    marks = records.labels[chosen]
    kinds = one_hot(marks, classes).to(drawn.dtype)
    sizes = kinds.sum(0)
    weights = (kinds @ (1 / sizes.clamp(min=1))) / (sizes > 0).sum()
    # One shape whatever was drawn: the rest is black images that weigh nothing.
    missing = room - len(chosen)
    drawn = pad(drawn, (0, 0, 0, 0, 0, 0, 0, missing))
    marks = pad(marks, (0, missing))
    weights = pad(weights, (0, missing))
    with torch.enable_grad():
        cost = labelled(
            here := here.detach().requires_grad_(),
            lowest(drawn, basis),
            labels,
            marks,
            basis,
            label,
            absolute,
        )
        moved = transport_plan(cost, blur, None, weights, iterations)
        (gradient,) = torch.autograd.grad((moved * cost).sum(), here)
    return gradient * math.sqrt(len(here))


def labelled(
    here: Tensor,
    there: Tensor,
    labels: Tensor,
    marks: Tensor,
    basis: Tensor,
    label: float,
    absolute: float,
) -> Tensor:
    """The paper's cost, with ``label`` at the place of the class beside the pixels: [n, frequencies], [m, frequencies] to [n, m].

    The 1-norm is that of images without their high frequencies, which are frequencies once more turned into pixels.
    """
    cost = squared_euclidean(here, there)
    if absolute:
        shown, there_shown = (
            (each.unflatten(1, (-1, basis.shape[1])) @ basis.T).flatten(1) for each in (here, there)
        )
        cost = cost + absolute * torch.cdist(shown, there_shown, p=1)
    return cost + (2 * label**2 + absolute * 2 * label) * (labels[:, None] != marks)


def part(
    image: Tensor, label: Tensor, here: Tensor, dual: Tensor, basis: Tensor, blur: float
) -> Tensor:
    """One record's part of the gradient of W in the images of its class, of frequencies ``here`` [classes, count, frequencies].

    With the potentials ``dual`` [classes, count] given, a record goes to the images of its class on its own, whatever the other records
    are: [count, frequencies]. Its length is at most 1.
    """
    mine, reach = (each.index_select(0, label[None])[0] for each in (here, dual))
    return drawn_to(lowest(image, basis), mine, reach, blur)


def drawn_to(point: Tensor, here: Tensor, dual: Tensor, blur: float) -> Tensor:
    """What ``point`` [..., frequencies] asks of the images ``here`` [..., count, frequencies], at their potentials: as large as they."""
    gaps = here - point[..., None, :]
    far = (gaps.square().sum(-1) + TINY).sqrt()
    return (((dual - far) / blur).softmax(-1) / far)[..., None] * gaps


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

    # Reduced in turn on a CPU, down to these values; see `privot.synthesis.cost`.
    economies: ClassVar[dict[str, int]] = {"steps": 300}
    last_economies: ClassVar[dict[str, int]] = {"width": 8, "batch": 50}  # where that is not enough

    noise: float | None = None
    clip: str = "record"  # or "batch", the paper's
    rate: float = 0.05  # with which a record is drawn: 3,000 of 60,000. With clip=batch 0.005 is better; the paper has 50 of 60,000
    steps: int = 5000  # with clip=batch 40,000 or more; the paper has millions
    batch: int = 200  # generated images a step, rounded up to as many of each class
    room: int = 400  # of the drawn records so many are looked at; clip=batch alone
    bound: float | None = (
        None  # record: 1, which no part exceeds; batch: 20 at 784 pixels, on the root mean square of images' gradients
    )
    detail: float = 0.5  # part of the frequencies of each side that is asked for
    blur: float = 5.0  # a distance, at 784 pixels, where images of a class are some 16 apart; its square for the paper's cost
    iterations: int = 20
    absolute: float = 0.0  # weight of |.|_1 beside |.|_2^2, clip=batch alone; the paper has 1 or 3
    label: float = (
        15.0  # distance that a label makes, over sqrt(2), as in the paper; clip=batch alone
    )
    fresh: float = 1.0  # part of X' that is drawn anew: 1 removes the whole bias; the paper has 0.2
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
            raise SettingError(
                "dp-sinkhorn: rate, detail and learning above 0 and at most 1 are needed"
            )
        if not 0 < self.blur < math.inf or (
            self.bound is not None and not 0 < self.bound < math.inf
        ):
            raise SettingError("dp-sinkhorn: bound and blur above 0 are needed")
        if self.clip == "record" and self.absolute:
            raise SettingError(
                f"dp-sinkhorn.absolute={self.absolute}: with clip=record the cost is the distance alone; clip=batch has it"
            )
        if (
            not all(0 <= getattr(self, key) < math.inf for key in ("absolute", "label"))
            or not 0 <= self.fresh <= 1
        ):
            raise SettingError(
                "dp-sinkhorn: absolute and label of 0 or more, and fresh in [0, 1], are needed"
            )
        if not 0 <= self.average < 1 or (self.noise is not None and not 0 <= self.noise < math.inf):
            raise SettingError("dp-sinkhorn: 0 <= average < 1 and a noise of 0 or more are needed")

    def plan(self, spec: Spec) -> Plan:
        if self.clip == "record" and not spec.size:
            raise SettingError(
                "dp-sinkhorn with clip=record divides by the number of records, so it must be declared; clip=batch needs none"
            )
        verb = "sum" if self.clip == "record" else "answer"
        noise = 1.0 if self.noise is None else self.noise
        return Plan(
            (Stage("pull", verb, noise, self.steps, Poisson(self.rate)),), Neighbours.ADD_REMOVE
        )

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        noise = plan.stages[0].noise
        low = spec.shape[0] * math.prod(self.frequencies(spec))
        # If every record pulled the same way: the length of all answers over the noise in the directions of the class means.
        each = self.rate * (spec.size or 0) if self.clip == "record" else 0.5
        ratio = (
            math.sqrt(self.steps) * each / (noise * math.sqrt(spec.classes * low))
            if noise
            else None
        )
        looked = self.rate * (spec.size or 0) / spec.classes if self.clip == "record" else self.room
        pairs = looked * self.batch * low * (3 + 3 * bool(self.absolute))
        # A step learns from a batch, three passes, and draws the next; others of the class are drawn to be compared with.
        drawn = self.batch * (4 + 2) * drawing("DeepConvGenerator", self._arguments(spec))
        work = self.steps * (2 * pairs + drawn)
        return {
            "signal_to_noise_of_class_means": ratio,
            "floating_point_operations": work,
            "operator_calls": self.steps * CALLS,
        }

    def _arguments(self, spec: Spec) -> dict[str, Any]:
        return {
            "shape": list(spec.shape),
            "classes": spec.classes,
            "code": self.code,
            "width": self.width,
        }

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product:
        spec = gate.spec
        device = streams.runtime.target
        arguments = self._arguments(spec)
        net = initialise(NETS["DeepConvGenerator"](**arguments), streams.generator("weights")).to(
            device
        )
        # A short run's answers are kept, and come again from the first: then it begins anew.
        training = Training(self, net, spec, streams, resumed=gate.left("pull") < self.steps)
        for step in range(self.steps - gate.left("pull"), self.steps):
            training.learn(
                step,
                self._of_records(gate, training)
                if self.clip == "record"
                else self._of_the_batch(gate, training),
            )
            if streams.due(step, self.steps):
                streams.store("training", training.pair.kept())
                streams.show(training.images[: 10 * spec.classes], spec.classes)
            if step % 25 == 24 or step + 1 == self.steps:
                progress("following the records", step + 1, self.steps)
        return Product.generator("DeepConvGenerator", arguments, training.settled())

    def scaled(self, spec: Spec) -> tuple[float, float]:
        """``bound`` and ``blur`` for images of this size: lengths grow with the side. In the paper's cost, which is squared, so is blur."""
        size = math.sqrt(spec.pixels / 784)
        if self.clip == "record":
            return self.bound or 1.0, self.blur * size
        return (self.bound or 20.0) * size, (self.blur * size) ** 2

    def _of_the_batch(self, gate: Gate, training: Training) -> Tensor:
        bound, blur = self.scaled(gate.spec)
        public = (
            training.basis,
            gate.spec.classes,
            self.room,
            self.label,
            self.absolute,
            blur,
            self.iterations,
        )
        return gate.answer(
            "pull",
            pull,
            training.here,
            training.labels,
            *public,
            bound=bound,
            shape=tuple(training.here.shape),
        )

    def _of_records(self, gate: Gate, training: Training) -> Tensor:
        """The same gradient as a sum over records: class by class, over what a class has in a draw on average."""
        spec = gate.spec
        count = len(training.labels)
        bound, blur = self.scaled(spec)
        here = by_class(training.here, spec.classes)
        sums = gate.sum(
            "pull", part, here, training.dual, training.basis, blur, bound=bound, per_class=True
        )
        sizes = spec.class_sizes or (spec.size / spec.classes,) * spec.classes  # type: ignore[operator]
        drawn = torch.tensor(
            [max(1.0, self.rate * size) for size in sizes], dtype=sums.dtype, device=sums.device
        )
        means = sums / drawn.view(-1, 1, 1)
        return means.transpose(0, 1).flatten(0, 1) * (math.sqrt(count) / spec.classes)

    def frequencies(self, spec: Spec) -> tuple[int, int]:
        """How many of each side are asked for."""
        height, width = (max(1, round(self.detail * side)) for side in spec.shape[1:])
        return height, width


def by_class(rows: Tensor, classes: int) -> Tensor:
    """Rows whose classes take turns: [classes * count, ...] to [classes, count, ...]."""
    return rows.unflatten(0, (-1, classes)).transpose(0, 1).contiguous()


class Training:
    """The public half: a generator, its running mean and Adam. It holds ``images`` to ask about, and learns from the answer.

    ``here`` are their lowest frequencies, [count, frequencies], and so are answer and push.

    On a GPU a step is one CUDA graph: what changes from step to step lies in buffers.
    """

    def __init__(
        self,
        method: DPSinkhorn,
        net: nn.Module,
        spec: Spec,
        streams: Streams,
        resumed: bool = False,
    ):
        device = streams.runtime.target
        self.method = method
        self.classes = spec.classes
        (self.bound, self.blur) = method.scaled(spec)
        # of 2 |x - y| in frequencies where y is zero, near |x - y| = APART; of 2 |x - y|^2 for the paper's cost
        self.calm = 1 / (APART * math.sqrt(spec.pixels / 784)) if method.clip == "record" else 2.0
        self.pair = Averaged(net, method.learning, (0.9, 0.999), method.average)
        waves = (
            cosines(side, count)
            for side, count in zip(spec.shape[1:], method.frequencies(spec), strict=True)
        )
        self.basis = torch.kron(*waves).to(device)
        count = spec.classes * -(-method.batch // spec.classes)
        self.labels = torch.arange(count, device=device) % spec.classes
        self.fresh = round(method.fresh * count)
        if resumed:
            self.pair.restore(streams.stored("training"))
        # Codes of their own for a run that goes on: those of its first steps have been seen.
        self.draws = streams.generator(f"codes {self.pair.steps}", device)
        self.codes = torch.empty(count, method.code, device=device)
        self.others = torch.empty(
            2 if method.clip == "record" else 1, count, method.code, device=device
        )
        self.images = torch.empty(count, *spec.shape, device=device)
        self.here = torch.zeros(count, spec.shape[0] * self.basis.shape[1], device=device)
        self.answer = torch.zeros_like(self.here)
        self.push = torch.zeros_like(self.here)
        self.dual = torch.zeros(spec.classes, count // spec.classes, device=device)
        net.train()
        self._draw()
        self._again = Repeated(self._follow, device, self.draws)

    def learn(self, step: int, answer: Tensor) -> None:
        """One step of Adam, on the answer about ``here``; then there are new images."""
        self.answer.copy_(answer)
        self.pair.ahead(faded(self.method.learning, step, self.method.steps))
        self._again()

    def _follow(self) -> None:
        method = self.method
        count = len(self.labels)
        images = self.pair.net(self.codes, self.labels)
        here = lowest(images, self.basis)
        loss = 2 / math.sqrt(count) * (here * (self.answer - self.push)).sum()
        if method.clip == "batch" and self.fresh:
            fresh = lowest(self.pair.net(self.others[0], self.labels)[: self.fresh], self.basis)
            other = torch.cat([fresh, here[self.fresh :]])
            cost = labelled(
                here, other, self.labels, self.labels, self.basis, method.label, method.absolute
            )
            loss = loss - transport(cost, self.blur, iterations=method.iterations)
        # What is not asked for is drawn to zero, as by records that have no such frequencies: nothing else would hold it.
        loss = loss + self.calm / count * ((2 * images - 1).square().sum() - here.square().sum())
        loss.backward()
        self.pair.follow()
        self._draw()

    def _draw(self) -> None:
        """New codes and their images, as batch norm sees them in training; for ``clip=record`` potentials and what drives them apart.

        Potentials are those against others of their class. They are those against the records too, once the generator draws as the
        records are; until then they are near. What drives apart is what records would ask that the generator itself had drawn, clipped
        alike: whatever the potentials are, it cancels the records' pull on average where those are drawn alike. For that these must be
        others than the potentials were fitted to.
        """
        for codes in (self.codes, self.others):
            codes.normal_(generator=self.draws)
        with torch.no_grad():
            self.images.copy_(self.pair.net(self.codes, self.labels))
            self.here.copy_(lowest(self.images, self.basis))
            if self.method.clip == "batch":
                return
            here, fitted, other = (
                by_class(each, self.classes)
                for each in (
                    self.here,
                    *(
                        lowest(self.pair.net(codes, self.labels), self.basis)
                        for codes in self.others
                    ),
                )
            )
            cost = (squared_euclidean(here, fitted) + TINY).sqrt()
            self.dual.copy_(potentials(cost, self.blur, iterations=self.method.iterations).first)
            parts = drawn_to(
                other, here[:, None], self.dual[:, None], self.blur
            )  # [classes, others, count, frequencies]
            lengths = torch.linalg.vector_norm(parts, dim=(2, 3), keepdim=True)
            means = (parts * (self.bound / lengths.clamp(min=self.bound))).mean(1)
            self.push.copy_(
                means.transpose(0, 1).flatten(0, 1)
                * (self.method.fresh * math.sqrt(len(self.labels)) / self.classes)
            )

    def settled(self) -> nn.Module:
        return self.pair.settled(
            lambda mean: mean(self.codes.normal_(generator=self.draws), self.labels)
        )


METHOD = DPSinkhorn
