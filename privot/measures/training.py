"""One training loop for every classifier that measures: the whole step is one CUDA graph where there is a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from privot.nets.convolutional import initialise
from privot.runtime import Progress, silent

WARM = 3  # eager steps before a capture: they fill caches and optimiser state, and are steps of the run like any other


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

    def __str__(self) -> str:
        how = f"Adam {self.rate:g}" if self.adam else f"SGD {self.rate:g} momentum {self.momentum:g}"
        more = [f"decay {self.decay:g}"] * bool(self.decay) + [f"x0.1 after {', '.join(map(str, self.drops))}"] * bool(self.drops)
        more += [f"crops of +-{self.shift}"] * bool(self.shift) + ["flips"] * self.flip + [f"average {self.average:g}"] * bool(self.average)
        return ", ".join([f"{self.epochs} epochs", f"batch {self.batch}", how, *more])


class Classifier:
    """A network with the standardisation it was trained under. Images go in as they are, in [0, 1]."""

    def __init__(self, net: nn.Module, mean: float, std: float, device: torch.device):
        self.net, self.mean, self.std, self.device = net.eval(), mean, std, device

    def _portions(self, images: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.cat([function((part.to(self.device) - self.mean) / self.std).float().cpu() for part in images.split(1000)])

    def guesses(self, images: Tensor) -> Tensor:
        """The likeliest class of each image [count]."""
        return self._portions(images, lambda part: self.net(part).argmax(1)).long()

    def probabilities(self, images: Tensor) -> Tensor:
        """[count, classes]."""
        return self._portions(images, lambda part: self.net(part).softmax(1))

    def features(self, images: Tensor) -> Tensor:
        """What lies before the last layer: [count, features]."""
        return self._portions(images, self.net.features)  # type: ignore[arg-type]


def train(
    build: Callable[..., nn.Module], images: Tensor, labels: Tensor, classes: int, recipe: Recipe, device: torch.device, *, seed: int = 0,
    progress: Progress = silent, stage: str = "training a classifier",
) -> Classifier:  # fmt: skip
    """Train ``build(shape, classes)`` on images [count, channels, height, width] in [0, 1] and labels [count].

    >>> from privot.nets import LeNet
    >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 2
    >>> train(LeNet, images, labels, 2, Recipe(1, 0.01), torch.device("cpu")).guesses(images).shape
    torch.Size([20])
    """
    generator = torch.Generator().manual_seed(seed)
    mean, std = images.mean().item(), max(images.std().item(), 1e-3)
    net = initialise(build(tuple(images.shape[1:]), classes), generator).to(device)
    if recipe.half:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    run = _Run(net.train(), ((images - mean) / std).to(device), labels.to(device), recipe, -mean / std)
    for epoch in range(recipe.epochs):
        run.rate(recipe.rate * 0.1 ** sum(epoch >= drop for drop in recipe.drops))
        run.epoch(generator)
        progress(stage, epoch + 1, recipe.epochs)
    run.finish()
    return Classifier(net, mean, std, device)


class _Run:
    """One run: static buffers, a step that reads them, and its graph."""

    def __init__(self, net: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe, black: float):
        self.net, self.labels, self.recipe, self.device = net, labels, recipe, images.device
        self.half, pad = recipe.half and self.device.type == "cuda", recipe.shift
        self.images = nn.functional.pad(images, (pad, pad, pad, pad), value=black) if pad else images
        self.height, self.width = images.shape[2:]
        self.batch = min(recipe.batch, len(labels))
        parameters: list[Any] = list(net.parameters())
        if recipe.adam:
            there = self.device.type == "cuda"
            self.optimiser: Any = torch.optim.Adam(parameters, lr=recipe.rate, weight_decay=recipe.decay, capturable=there)
        else:
            self.optimiser = torch.optim.SGD(parameters, lr=recipe.rate, momentum=recipe.momentum, weight_decay=recipe.decay)
        self.parameters, self.mean = parameters, [each.detach().clone() for each in parameters] if recipe.average else []
        self.draw = torch.zeros(self.batch, 4, dtype=torch.int64, device=self.device)  # which image, shift down, shift right, flipped
        self.keep = torch.zeros((), device=self.device)
        self.steps, self.graph = 0, None  # type: tuple[int, Any]

    def rate(self, rate: float) -> None:
        if self.optimiser.param_groups[0]["lr"] != rate:
            self.optimiser.param_groups[0]["lr"] = rate
            self.graph = None  # the rate is part of the graph

    def epoch(self, generator: torch.Generator) -> None:
        """As many whole batches as there are, in a fresh order."""
        count = len(self.labels) // self.batch * self.batch
        draws = torch.empty(count, 4, dtype=torch.int64)
        draws[:, 0] = torch.randperm(len(self.labels), generator=generator)[:count]
        draws[:, 1:3] = torch.randint(0, 2 * self.recipe.shift + 1, (count, 2), generator=generator)
        draws[:, 3] = torch.randint(0, 2 if self.recipe.flip else 1, (count,), generator=generator)
        for draw in draws.to(self.device).split(self.batch):
            self.draw.copy_(draw)
            self.steps += 1
            self.keep.fill_(min(self.recipe.average, (1 + self.steps) / (10 + self.steps)))
            if self.device.type != "cuda" or self.steps <= WARM:
                self.step()
            else:
                self._replay()

    def _replay(self) -> None:
        if self.graph is None:
            self.optimiser.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()
        self.graph.replay()

    def step(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        half = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False) if self.half else contextlib.nullcontext()
        with half:
            loss = nn.functional.cross_entropy(self.net(self._images()), self.labels[self.draw[:, 0]])
        loss.backward()
        self.optimiser.step()
        if self.mean:
            with torch.no_grad():
                torch._foreach_mul_(self.mean, self.keep)
                torch._foreach_add_(self.mean, torch._foreach_mul(self.parameters, 1 - self.keep))

    def _images(self) -> Tensor:
        which, down, right, flipped = self.draw.unbind(1)
        if not (self.recipe.shift or self.recipe.flip):
            return self.images[which]
        rows = down[:, None] + torch.arange(self.height, device=self.device)
        across = torch.arange(self.width, device=self.device)
        columns = right[:, None] + torch.where(flipped[:, None] > 0, self.width - 1 - across, across)
        channels = torch.arange(self.images.shape[1], device=self.device)
        return self.images[which[:, None, None, None], channels[None, :, None, None], rows[:, None, :, None], columns[:, None, None, :]]

    def finish(self) -> None:
        if self.mean:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.mean)
