"""DM, matching mean features in random networks: what one set needs, and many sets side by side, each of some of the same records.

Side by side, all sets share the random network, the augmentations and the draws of an iteration; a set sees those of the drawn records
that are its own. So the records are embedded once for all of them, and the sets go through the network as one batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from privot.baselines.condensation import Augmentations, Pixels, Pool, finished, standardised
from privot.data.spec import Spec
from privot.errors import DataError
from privot.nets.augment import apply
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.conv_block import precision
from privot.nets.generators.conv import initialise
from privot.runtime import Progress, Streams
from privot.runtime.graphed_step import Repeated

LEGS = 20  # parts of a long run; where it stands is kept after each, so a crash loses a twentieth
FAR = 2500  # iterations after which a start from noise goes no further for being moved longer: the rate falls instead


def class_means(net: ConvNet, images: Tensor, weight: Tensor, portion: int) -> Tensor:
    """Weighted mean features of each class: images [classes * batch, ...], weight [classes, batch], to [classes, numbers]."""
    return (weight[:, None] @ embedded(net, images, portion).view(*weight.shape, -1)).squeeze(1)


def embedded(net: ConvNet, images: Tensor, portion: int) -> Tensor:
    """Features [count, numbers] of standardised images [count, ...], in float32 whatever the network computes with."""
    images = images.to(net.head.weight.dtype)
    return torch.cat([net.features(part) for part in images.split(portion)]).float()


def distance(net: ConvNet, real: Tensor, weight: Tensor, images: Tensor, portion: int) -> Tensor:
    """Squared distance of the class means, added up over classes; ``real`` [classes * batch, ...] is a constant."""
    with torch.no_grad():
        goal = class_means(net, real, weight, portion)
    even = weight.new_full((len(weight), len(images) // len(weight)), len(weight) / len(images))
    return (goal - class_means(net, images, even, len(images))).square().sum()


def usual_rate(init: str, per_class: int, iterations: int) -> float:
    """From real images 1, or 10 above 50 a class (Zhao and Bilen). From noise the images of a class (Dong et al.), less in a long run.

    >>> usual_rate("random", 40, 1000), usual_rate("random", 40, 20_000), usual_rate("real", 50, 20_000), usual_rate("real", 100, 20_000)
    (40.0, 5.0, 1.0, 10.0)
    """
    if init == "random":
        return per_class * min(1.0, FAR / iterations)
    return 1.0 if per_class <= 50 else 10.0


def random_net(spec: Spec, width: int, depth: int, device: torch.device) -> ConvNet:
    """Random and never trained; on a GPU all of it is in bfloat16."""
    net: nn.Module = (
        ConvNet(spec.shape, spec.classes, width, depth).to(device).requires_grad_(False)
    )
    if precision(device) is torch.bfloat16:
        net = net.to(dtype=torch.bfloat16, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net  # type: ignore[return-value]


class SideBySide:
    r"""DM of many sets. ``pool`` holds all records, ``members`` [sets, records] says which are whose, ``begun`` is in [0, 1].

    With m the members of set s among the drawn records T_c of a class, each iteration steps on
    :math:`\sum_s \sum_c |\mathrm{mean}_{T_c \cap m}\, \psi(A(x)) - \mathrm{mean}\, \psi(A(S_{s,c}))|^2`, for one set the method's own.
    ``begun`` is [sets, classes * per_class, ...], classes in order. ``batch`` records of a class are each set's on average where members
    are half: twice as many are drawn.
    """

    def __init__(
        self,
        pool: Pool,
        members: Tensor,
        begun: Tensor,
        spec: Spec,
        streams: Streams,
        *,
        rate: float,
        batch: int,
        augment: bool,
        width: int,
        depth: int,
    ):
        device = begun.device
        self.streams = streams
        self.portion = streams.runtime.portion
        self.pool = pool
        self.members = members
        self.classes = spec.classes
        self.drawn = 2 * batch
        self.sets = len(begun)
        self.per_class = begun.shape[1] // spec.classes
        for label, (row, there) in enumerate(zip(pool.places, pool.there, strict=True)):
            if not (members[:, row] & there).any(1).all():
                raise DataError(
                    f"class {label} has no member in one of the halves: fewer classes or more records are needed"
                )
        self.pixels = Pixels(begun.flatten(0, 1), spec, rate)
        self.net = random_net(spec, width, depth, device)
        self.draws = torch.Generator(device)
        self.ahead = (
            Augmentations(spec.classes, spec, torch.Generator(device), device) if augment else None
        )
        self.row = torch.arange(spec.classes, device=device)
        self.repeated = Repeated(self.step, device, self.draws)

    def run(
        self,
        iterations: int,
        progress: Progress,
        kept: dict[str, Tensor] | None = None,
        keep: Callable[[dict[str, Tensor]], None] = lambda state: None,
    ) -> Tensor:
        """All iterations; the sets in [0, 1], [sets, classes * per_class, ...]. ``keep`` gets the state after each leg, to go on from.

        The random numbers of a leg depend on its number alone, so that a run that goes on is the run that was never broken off.
        """
        first = 0
        if kept is not None:
            first = int(kept["leg"])
            self.pixels.free.data.copy_(kept["free"])
            self.pixels.speed.copy_(kept["speed"])
        for leg in range(first, LEGS):
            self._seed(leg)
            begin, end = (iterations * each // LEGS for each in (leg, leg + 1))
            for iteration in range(begin, end):
                if self.ahead:
                    self.ahead.ready()
                self.repeated()
                if iteration % 100 == 99 or iteration + 1 == end:
                    progress("matching the means", iteration + 1, iterations)
            if end > begin and leg + 1 < LEGS:
                keep(
                    {
                        "leg": torch.tensor(leg + 1),
                        "free": self.pixels.free.detach(),
                        "speed": self.pixels.speed,
                    }
                )
        return finished(self.pixels.free).unflatten(0, (self.sets, -1))

    def _seed(self, leg: int) -> None:
        self.draws.manual_seed(self.streams.generator(f"draws {leg}").initial_seed())
        if self.ahead:
            self.ahead.generator.manual_seed(
                self.streams.generator(f"augment {leg}").initial_seed()
            )
            self.ahead.used = self.ahead.rounds  # what was drawn ahead is of the leg before

    def step(self) -> None:
        """One iteration: a fresh network, a draw, one gradient step of every set."""
        initialise(self.net, self.draws)
        real, weight = self.draw()
        drawn = self.ahead.take() if self.ahead else None
        if drawn:
            real = apply(real, drawn.chosen(self.row.repeat_interleave(weight.shape[2])))
        goal = self.goals(real, weight)
        size = self.classes * self.per_class
        some = max(1, self.portion // size)
        known = (
            weight.sum(2) > 0
        )  # [classes, sets]; a set without a member in this draw of a class has nothing to match there
        parts: list[Tensor] = []
        for begin in range(0, self.sets, some):
            free = self.pixels.free.detach()[begin * size : (begin + some) * size].requires_grad_()
            shown = (
                apply(
                    free,
                    drawn.chosen(
                        self.row.repeat_interleave(self.per_class).repeat(len(free) // size)
                    ),
                )
                if drawn
                else free
            )
            here = slice(begin, begin + some)
            parts += torch.autograd.grad(
                self.distances(shown, goal[:, here], known[:, here]).sum(), free
            )
        self.pixels.descend(torch.cat(parts))

    def draw(self) -> tuple[Tensor, Tensor]:
        """Standardised records [classes * drawn, ...], and each set's weights of its own among them [classes, sets, drawn]."""
        there = self.pool.there
        keys = torch.rand(there.shape, generator=self.draws, device=there.device).masked_fill(
            ~there, -1
        )
        first = keys.topk(min(self.drawn, keys.shape[1]), sorted=False).indices
        places = self.pool.places.gather(1, first)  # [classes, drawn]
        own = (self.members[:, places] & there.gather(1, first)).transpose(0, 1).float()
        return standardised(self.pool.images[places.flatten()]), own / own.sum(
            2, keepdim=True
        ).clamp(min=1)

    def goals(self, real: Tensor, weight: Tensor) -> Tensor:
        """Class means of every set's own records: [classes, sets, numbers]."""
        with torch.no_grad():
            return weight @ embedded(self.net, real, self.portion).view(
                self.classes, weight.shape[2], -1
            )

    def distances(self, shown: Tensor, goal: Tensor, known: Tensor) -> Tensor:
        """Squared distances to the class means of some sets [some * classes * per_class, ...]: [classes, some]."""
        features = embedded(self.net, shown, len(shown)).view(
            -1, self.classes, self.per_class, goal.shape[2]
        )
        return (goal - features.mean(2).transpose(0, 1)).square().sum(2) * known
