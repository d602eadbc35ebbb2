"""The generator's half of learning from slopes that come by any cable: it draws images for those who are asked, and takes what they say.

It sees sanitized answers alone, so all of it is public and may be kept, sent or looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from privot.components.federated_settings import Federation
from privot.components.pretraining import begun
from privot.components.sharded_critics import waves
from privot.components.sharded_gan import KINDS, SHOWN
from privot.data.spec import Spec
from privot.nets import NETS, initialise
from privot.nets.ema import Averaged
from privot.release.artifact import Product
from privot.runtime import Progress, Streams, silent

LOT = 1024  # images drawn at a time: a batch of the generator's norms, and a bound on its memory
SETTLED = 320  # images over which batch norm settles at a time


class Drawing:
    """A generator with its optimiser. A round is `draw`, then `take`; what is drawn depends on the seed, the round and the answers so far.

    Pixels are bytes, since that is what the wire carries; slopes go through the rounding as if it were not there.
    """

    def __init__(
        self, settings: Federation, spec: Spec, streams: Streams, progress: Progress = silent
    ):
        self.settings = settings
        self.spec = spec
        self.streams = streams
        self.device = streams.runtime.target
        self.arguments = {
            "shape": list(spec.shape),
            "classes": spec.classes,
            "code": settings.code,
            "width": settings.channels,
        }
        net = initialise(
            NETS[KINDS[settings.kind]](**self.arguments), streams.generator("weights")
        ).to(self.device)
        begun(net, settings.start, settings.practice, spec, streams, progress)
        self.pair = Averaged(net, settings.rate, (0.5, 0.9), settings.average)
        self.down, self.across = (
            waves(side, settings.detail, settings.window).to(self.device) for side in spec.shape[1:]
        )
        self._margin = ~(
            (self.down != 0).any(1)[:, None] & (self.across != 0).any(1)
        )  # pixels that no slope can move
        self._labels = torch.arange(spec.classes, device=self.device).repeat_interleave(
            settings.rows
        )
        self._codes = torch.empty(0)  # of the open round

    def draw(self, number: int, places: Sequence[int]) -> Tensor:
        """Images for the owners in these places in round ``number``: uint8 [asked, classes, rows, channels, height, width]."""
        shape = (self.spec.owners or 1, len(self._labels), self.settings.code)
        every = torch.randn(
            shape,
            generator=self.streams.generator(f"codes of round {number}", self.device),
            device=self.device,
        )
        self._codes = (
            every
            if list(places) == list(range(len(every)))
            else every[torch.tensor(places, device=self.device)]
        )
        with torch.no_grad():
            images = torch.cat([(255 * images).round().byte() for images, _ in self._lots()])
        return images.view(len(places), self.spec.classes, self.settings.rows, *self.spec.shape)

    def _lots(self) -> Iterable[tuple[Tensor, slice]]:
        """The images of the open round, a lot at a time, and where they lie."""
        codes = self._codes.flatten(0, 1)
        labels = self._labels.repeat(len(self._codes))
        for start in range(0, len(codes), LOT):
            part = slice(start, start + LOT)
            yield self.pair.net(codes[part], labels[part]), part

    def take(self, values: Tensor, answered: Tensor | None = None) -> None:
        """One step by slopes [asked, classes, rows, channels, h, w], in frequencies, of those who ``answered`` [asked], or of all.

        Owners weigh the same; of those who did not answer, whatever stands there is not looked at.
        """
        count = len(values) if answered is None else int(answered.sum())
        if answered is not None:
            values = torch.where(answered.to(values.device).view(-1, 1, 1, 1, 1, 1), values, 0)
        slopes = (
            self.down
            @ values.flatten(0, 2).float()
            @ self.across.T
            / (max(count, 1) * len(self._labels))
        )
        for images, part in self._lots():
            images.backward(self._fading(images.detach()) / len(slopes) - slopes[part])
        self.pair.step()

    def _fading(self, images: Tensor) -> Tensor | float:
        """Away from a black margin, of length 1 at most: no slope comes from there, and who begins with nothing would draw anything.

        It is public, as the images are; a generator with a prior knows what belongs there, and is left alone.
        """
        if self.settings.start != "nothing":
            return 0.0
        margin = images * self._margin
        return margin / margin.flatten(1).norm(dim=1).clamp(min=1).view(-1, 1, 1, 1)

    def kept(self) -> dict[str, Tensor]:
        """All of it between two rounds, as tensors by name."""
        return self.pair.kept()

    def restore(self, found: dict[str, Tensor] | None) -> bool:
        """Take up what `kept` gave, if there is anything."""
        return self.pair.restore(found)

    def shown(self, count: int = SHOWN) -> Tensor:
        """Some images of each class by the running mean, of the same codes every time: [classes * count, ...]."""
        # A stream of its own: when they are shown depends on the clock, and what is released must not.
        return self._each(self.pair.mean, count, self.streams.generator("shown", self.device))

    def product(self) -> Product:
        """The running mean of the generator."""
        count = -(-SETTLED // self.spec.classes)
        draws = self.streams.generator("settling", self.device)
        settled = self.pair.settled(lambda mean: self._each(mean, count, draws))
        return Product.generator(KINDS[self.settings.kind], self.arguments, settled)

    def _each(self, net: torch.nn.Module, count: int, draws: torch.Generator) -> Tensor:
        """So many images of each class: [classes * count, ...]."""
        labels = torch.arange(self.spec.classes, device=self.device).repeat_interleave(count)
        codes = torch.randn(len(labels), self.settings.code, generator=draws, device=self.device)
        with torch.no_grad():
            return net(codes, labels)
