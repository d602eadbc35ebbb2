"""One training loop for every classifier, whether it measures or serves a method: the whole step is one CUDA graph where there is a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privot.nets import augment
from privot.nets.classifiers.convnet import ConvNet
from privot.nets.conv_block import half
from privot.nets.ensemble import Ensemble
from privot.nets.generators.conv import initialise
from privot.runtime.graphed_step import Repeated

AHEAD = 10  # epochs whose random numbers are drawn at once where each net has a generator of its own: many small draws would take long


def unwatched(stage: str, step: int, of: int) -> None:
    """A progress that shows nothing."""


@dataclass(frozen=True)
class Recipe:
    """How a classifier is trained; ``drops`` are the epochs after which the rate is divided by 10."""

    epochs: int
    rate: float
    batch: int = 128
    adam: bool = False
    momentum: float = 0.9
    decay: float = 0.0
    drops: tuple[int, ...] = ()
    shift: int = 0  # random crops out of images padded by so many black pixels
    flip: bool = False
    average: float = 0.0  # of the weights over the steps, as exponential decay
    half: bool = False  # bfloat16 on a GPU; CPUs without it take a hundred times as long
    even: bool = False  # batches of one size, at most ``batch``, that hold every image each epoch; else a rest waits for the next order
    augment: tuple[str, ...] = ()  # of which one is drawn for each image and step, see `augment`
    repeats: int = 1  # trainings side by side, with nothing in common but the images

    def steps(self, count: int) -> int:
        """Steps of an epoch of so many images.

        >>> Recipe(1, 0.1, batch=256).steps(500), Recipe(1, 0.1, batch=256, even=True).steps(500)
        (1, 2)
        """
        return -(-count // self.batch) if self.even else max(1, count // self.batch)

    def __str__(self) -> str:
        how = (
            f"Adam {self.rate:g}" if self.adam else f"SGD {self.rate:g} momentum {self.momentum:g}"
        )
        more = [f"decay {self.decay:g}"] * bool(self.decay) + [
            f"x0.1 after {', '.join(map(str, self.drops))}"
        ] * bool(self.drops)
        more += (
            [f"crops of +-{self.shift}"] * bool(self.shift)
            + ["flips"] * self.flip
            + [f"average {self.average:g}"] * bool(self.average)
        )
        more += [f"augmented by {'/'.join(self.augment)}"] * bool(self.augment) + [
            f"{self.repeats} trainings"
        ] * (self.repeats > 1)
        return ", ".join([f"{self.epochs} epochs", f"batch {self.batch}", how, *more])


class Classifier:
    """A network with the standardisation it was trained under. Images go in as they are, in [0, 1].

    Of an `Ensemble` the answers have one more dimension, [nets, ...].
    """

    def __init__(self, net: nn.Module, mean: float, std: float, device: torch.device):
        self.net = net.eval()
        self.mean = mean
        self.std = std
        self.device = device

    def _portions(self, images: Tensor, function: Callable[[Tensor], Tensor], along: int) -> Tensor:
        parts = []
        with torch.no_grad():
            for part in images.split(1000):
                standard = (part.to(self.device) - self.mean) / self.std
                if isinstance(
                    self.net, Ensemble
                ):  # each as if it had images of its own: one after the other they need less memory
                    standard = standard.expand(self.net.nets, *standard.shape)
                parts.append(function(standard).float().cpu())
        return torch.cat(parts, along)

    def guesses(self, images: Tensor) -> Tensor:
        """The likeliest class of each image [count]."""
        return self._portions(images, lambda part: self.net(part).argmax(-1), -1).long()

    def probabilities(self, images: Tensor) -> Tensor:
        """[count, classes]."""
        return self._portions(images, lambda part: self.net(part).softmax(-1), -2)

    def features(self, images: Tensor) -> Tensor:
        """What lies before the last layer: [count, features]."""
        return self._portions(images, self.net.features, -2)  # type: ignore[arg-type]


def train(
    build: Callable[..., nn.Module],
    images: Tensor,
    labels: Tensor,
    classes: int,
    recipe: Recipe,
    device: torch.device,
    *,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = unwatched,
    stage: str = "training a classifier",
) -> Classifier:
    """Train ``build(shape, classes)`` on images [count, channels, height, width] in [0, 1] and labels [count].

    Labels may be soft: probabilities, [count, classes]. Augmentation sees standardised images, as in the condensation papers: what comes
    from outside an image is the mean grey.

    >>> from privot.nets import LeNet
    >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 2
    >>> train(LeNet, images, labels, 2, Recipe(1, 0.01), torch.device("cpu")).guesses(images).shape
    torch.Size([20])
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (images.shape[1], images.shape[2], images.shape[3])
    mean = images.mean().item()
    std = max(images.std().item(), 1e-3)
    net: nn.Module
    if recipe.repeats > 1:
        if build is not ConvNet:
            raise ValueError("only ConvNets train side by side")
        net = Ensemble(recipe.repeats, shape, classes, generator=generator).to(device)
    else:
        net = initialise(build(shape, classes), generator).to(device)
        if recipe.half:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    run = _Run(
        net.train(), ((images - mean) / std).to(device), labels.to(device), recipe, -mean / std
    )
    run.all(generator, progress, stage)
    return Classifier(net, mean, std, device)


def train_ensemble(
    nets: Ensemble,
    images: Tensor,
    labels: Tensor,
    recipe: Recipe,
    generator: torch.Generator | Sequence[torch.Generator],
    *,
    signed: bool = True,
    progress: Callable[[str, int, int], None] = unwatched,
    stage: str = "training the nets",
) -> None:
    """Train nets in place on images [count, channels, height, width] in [0, 1], each by batches and augmentations of its own.

    Labels are [count], or soft, [count, classes]. Images are augmented as they are, so that black comes from outside, and reach the nets
    as 2x - 1; unless ``signed``, as they are. All lie on one device; the generator is one of the CPU, so that a seed draws the same on
    every device. Images [nets, count, ...] with labels [nets, count, ...] are each net's own. With one generator for each net, a net
    trains as it would alone, whatever nets are beside it.

    >>> nets = Ensemble(2, (1, 8, 8), 3, width=4, generator=torch.Generator().manual_seed(0))
    >>> images, labels, before = torch.rand(9, 1, 8, 8), torch.arange(9) % 3, nets.head.clone()
    >>> train_ensemble(nets, images, labels, Recipe(2, 0.01, augment=("crop", "rotate")), torch.Generator().manual_seed(1))
    >>> torch.equal(nets.head, before)
    False
    """
    _Run(nets, images, labels, recipe, signed=signed).all(generator, progress, stage)


class _Run:
    """One run: static buffers, a step that reads them, and its graph.

    Of an ensemble, each net has rows of its own in the buffers: [nets * batch, ...]. Where each has images of its own too, those of all
    lie one after the other.
    """

    def __init__(
        self,
        net: nn.Module,
        images: Tensor,
        labels: Tensor,
        recipe: Recipe,
        black: float = 0.0,
        signed: bool = False,
    ):
        self.net = net
        self.labels = labels
        self.recipe = recipe
        self.device = images.device
        self.signed = signed
        # size: images of a net
        self.half = recipe.half
        pad = recipe.shift
        self.size = images.shape[-4]
        self.apart = images.ndim == 5
        if self.apart:
            images = images.flatten(0, 1)
            self.labels = labels.flatten(0, 1)
        self.images = (
            nn.functional.pad(images, (pad, pad, pad, pad), value=black) if pad else images
        )
        self.height, self.width = images.shape[2:]
        self.nets = net.nets if isinstance(net, Ensemble) else 1
        # The protocols take what is left of an epoch as a smaller batch, but a graph knows one size: 500 images are 2 x 250, not 256 + 244.
        self.batch = (
            -(-self.size // recipe.steps(self.size))
            if recipe.even
            else min(recipe.batch, self.size)
        )
        self.parameters: list[Any] = list(net.parameters())
        if recipe.adam:
            there = self.device.type == "cuda"
            self.optimiser: Any = torch.optim.Adam(
                self.parameters, lr=recipe.rate, weight_decay=recipe.decay, capturable=there
            )
        else:
            self.optimiser = torch.optim.SGD(
                self.parameters, lr=recipe.rate, momentum=recipe.momentum, weight_decay=recipe.decay
            )
        self.mean = [each.detach().clone() for each in self.parameters] if recipe.average else []
        rows = self.nets * self.batch
        self.draw = torch.zeros(
            rows, 4, dtype=torch.int64, device=self.device
        )  # which image, shift down, shift right, flipped
        self.drawn = (
            augment.draw(rows, 1, torch.Generator(), recipe.augment).to(self.device)
            if recipe.augment
            else ()
        )
        self.keep = torch.zeros((), device=self.device)
        self.count = 0
        self.repeated = Repeated(self.step, self.device)
        self.ahead: list[
            tuple[Tensor, ...]
        ] = []  # the random numbers of the next epochs, where each net has a generator of its own

    def all(
        self,
        generator: torch.Generator | Sequence[torch.Generator],
        progress: Callable[[str, int, int], None],
        stage: str,
    ) -> None:
        """Every epoch of the recipe."""
        recipe = self.recipe
        progress(stage, 0, recipe.epochs)
        for epoch in range(recipe.epochs):
            self.rate(recipe.rate * 0.1 ** sum(epoch >= drop for drop in recipe.drops))
            self.epoch(generator)
            progress(stage, epoch + 1, recipe.epochs)
        self.finish()

    def rate(self, rate: float) -> None:
        if self.optimiser.param_groups[0]["lr"] != rate:
            self.optimiser.param_groups[0]["lr"] = rate
            self.optimiser.zero_grad(
                set_to_none=True
            )  # the rate is part of the graph: gradients of the old one lie in its memory
            self.repeated = Repeated(self.step, self.device)

    def epoch(self, generator: torch.Generator | Sequence[torch.Generator]) -> None:
        """All batches of an epoch, in a fresh order; its random numbers are drawn at once, ahead of the device."""
        if isinstance(generator, torch.Generator):
            numbers = self._draws(self.nets, generator)
        else:
            if not self.ahead:
                alone = [self._draws(1, each, AHEAD) for each in generator]
                self.ahead = list(
                    zip(
                        *(torch.cat(each, 1).chunk(AHEAD) for each in zip(*alone, strict=True)),
                        strict=True,
                    )
                )
            numbers = list(self.ahead.pop(0))
        if self.apart:
            numbers[0][..., 0] += self.size * torch.arange(self.nets)[:, None]
        for parts in zip(
            *(self._sent(each.flatten(0, 2)).split(len(self.draw)) for each in numbers), strict=True
        ):
            for buffer, part in zip((self.draw, *self.drawn), parts, strict=True):
                buffer.copy_(part)
            self.count += 1
            self.keep.fill_(min(self.recipe.average, (1 + self.count) / (10 + self.count)))
            self.repeated()

    def _draws(self, nets: int, generator: torch.Generator, epochs: int = 1) -> list[Tensor]:
        """The random numbers of so many epochs and nets: each [epochs * steps, nets, batch, ...]."""
        each = self.recipe.steps(self.size)
        steps = epochs * each
        draws = torch.empty(steps, nets, self.batch, 4, dtype=torch.int64)
        for part in draws.split(each):
            for net in range(nets):
                order = torch.randperm(self.size, generator=generator)
                filled = torch.cat([order, order])[
                    : each * self.batch
                ]  # the first come again where even batches need a few more
                part[:, net, :, 0] = filled.view(each, self.batch)
        draws[..., 1:3] = torch.randint(
            0, 2 * self.recipe.shift + 1, (steps, nets, self.batch, 2), generator=generator
        )
        draws[..., 3] = torch.randint(
            0, 2 if self.recipe.flip else 1, (steps, nets, self.batch), generator=generator
        )
        if not self.recipe.augment:
            return [draws]
        drawn = augment.draw(
            steps * nets * self.batch, (self.height, self.width), generator, self.recipe.augment
        )
        return [draws, *(part.unflatten(0, (steps, nets, self.batch)) for part in drawn)]

    def _sent(self, numbers: Tensor) -> Tensor:
        """On the device; from pinned memory, so that neither side waits for the other."""
        return (
            numbers.pin_memory().to(self.device, non_blocking=True)
            if self.device.type == "cuda"
            else numbers
        )

    def step(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        images = self._images()
        labels = self.labels[self.draw[:, 0]]
        if isinstance(self.net, Ensemble):
            self._each(self.net, images, labels)
        else:
            with self._precision():
                loss = cross_entropy(self.net(images), labels)
            loss.backward()
        self.optimiser.step()
        if self.mean:
            with torch.no_grad():
                torch._foreach_mul_(self.mean, self.keep)
                torch._foreach_add_(self.mean, torch._foreach_mul(self.parameters, 1 - self.keep))

    def _each(self, nets: Ensemble, images: Tensor, labels: Tensor) -> None:
        """Gradients net by net: dense convolutions, and memory for the maps of one net however many there are."""
        found = []
        for place, (own, wanted) in enumerate(
            zip(images.split(self.batch), labels.split(self.batch), strict=True)
        ):
            weights = {
                name: value.detach()[place : place + 1].requires_grad_()
                for name, value in nets.named_parameters()
            }
            with self._precision():
                loss = cross_entropy(nets(own[None], weights)[0], wanted)
            found.append(torch.autograd.grad(loss, list(weights.values()), materialize_grads=True))
        for parameter, parts in zip(self.parameters, zip(*found, strict=True), strict=True):
            parameter.grad = torch.cat(parts)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return half(self.device) if self.half else contextlib.nullcontext()

    def _images(self) -> Tensor:
        """The images of this step, [nets * batch, channels, height, width], cropped, flipped and augmented by their draws."""
        which, down, right, flipped = self.draw.unbind(1)
        images = (
            self.images[which]
            if not (self.recipe.shift or self.recipe.flip)
            else self._cropped(which, down, right, flipped)
        )
        if self.drawn:
            images = augment.apply(images, augment.Drawn(*self.drawn))
        return 2 * images - 1 if self.signed else images

    def _cropped(self, which: Tensor, down: Tensor, right: Tensor, flipped: Tensor) -> Tensor:
        rows = down[:, None] + torch.arange(self.height, device=self.device)
        across = torch.arange(self.width, device=self.device)
        columns = right[:, None] + torch.where(
            flipped[:, None] > 0, self.width - 1 - across, across
        )
        channels = torch.arange(self.images.shape[1], device=self.device)
        return self.images[
            which[:, None, None, None],
            channels[None, :, None, None],
            rows[:, None, :, None],
            columns[:, None, None, :],
        ]

    def finish(self) -> None:
        if self.mean:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.mean)
