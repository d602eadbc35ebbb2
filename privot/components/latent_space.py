"""Learned spaces: an auto-encoder taught by public pictures, or by private gradient steps, and records as its codes.

Codes lie on a sphere of radius sqrt(dim) by the encoder's last layer; that is for the decoder's sake. The bound of an answer is the
gate's own cut, whatever an encoder gives.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits

from privot.components.dead_leaves import scenes
from privot.components.dp_sgd import descend, weights
from privot.nets.dp_networks import on_sphere
from privot.nets.ema import kept, take_up
from privot.privacy.gate import Gate
from privot.privacy.plan import Stage
from privot.privacy.sampling import Fixed
from privot.runtime import Progress, Streams

STAGE = "autoencoder"
WOBBLE = 0.3  # noise on codes while a decoder learns in public, each number of a code being about 1: particles lie between codes
# of scenes: 2,000 pictures at a time, so that memory stays small
KINDS = 100
EACH = 20
ROUNDS = 10
PORTION = 1000  # codes or pictures that are looked at in one go


class Coded(NamedTuple):
    """A space whose points are an encoder's codes: ``weights`` are the encoder's own, so that a query is a plain function of tensors."""

    encoder: nn.Module
    weights: dict[str, Tensor]
    decoder: nn.Module
    code: int

    @classmethod
    def of(cls, autoencoder: Any, code: int) -> Coded:
        net = autoencoder.requires_grad_(False)
        return cls(net.encoder, weights(net.encoder), net.decoder, code)

    def dim(self, channels: int) -> int:
        """Numbers of a point."""
        return self.code

    def point(self, image: Tensor) -> Tensor:
        """[..., channels, height, width] to [..., code]."""
        codes = functional_call(self.encoder, self.weights, (image.reshape(-1, *image.shape[-3:]),))
        return codes.view(*image.shape[:-3], self.code)

    def image(self, point: Tensor, channels: int) -> Tensor:
        """[..., code] to [..., channels, height, width] in [0, 1]; a point is seen on the sphere, where the decoder learned."""
        with torch.no_grad():
            drawn = [
                self.decoder(on_sphere(part)).sigmoid()
                for part in point.reshape(-1, self.code).split(PORTION)
            ]
        return torch.cat(drawn).view(*point.shape[:-1], *drawn[0].shape[1:])

    def to(self, device: torch.device) -> Coded:
        return Coded(
            self.encoder.to(device),
            {name: each.to(device) for name, each in self.weights.items()},
            self.decoder.to(device),
            self.code,
        )


def redrawn(autoencoder: Any, image: Tensor, label: Tensor) -> Tensor:
    """The auto-encoder's loss on a record: the mean cross-entropy of its pixels."""
    return binary_cross_entropy_with_logits(autoencoder(image), image)


# On private records


def sampled_noise(noise: float, steps: int, rate: float) -> float:
    r"""The multiplier of ``steps`` sampled answers that together cost about as one of multiplier ``noise``; the price is exact anyway.

    So many have :math:`\mu^2` near :math:`q^2 T (e^{1/\sigma^2} - 1)`, at sampling rate q.

    >>> round(sampled_noise(2.0, 100, 0.1), 3)
    2.117
    """
    return 1 / math.sqrt(math.log1p(1 / (rate**2 * steps * noise**2))) if noise else 0.0


def lesson_stage(noise: float, share: float, lessons: int, drawn: int, size: int) -> Stage:
    """The lessons of an auto-encoder, on draws of fixed size, at about ``share`` of what one answer of multiplier ``noise`` costs, as mu².

    >>> round(lesson_stage(2.0, 0.7, 100, 6000, 60_000).noise, 3)
    2.49
    """
    return Stage(
        STAGE,
        "sum",
        sampled_noise(noise / math.sqrt(share), lessons, drawn / size),
        lessons,
        Fixed(drawn, size),
    )


def taught(
    gate: Gate,
    net: Any,
    *,
    lessons: int,
    rate: float,
    bound: float,
    streams: Streams,
    progress: Progress,
) -> Any:
    """The net after all lessons that can still be had, each an answer of the gate. It goes on after a crash.

    What was kept is behind, unless a few answers are kept too and come again from the first. One that has learned all is taken as it
    is: answers about its codes may be kept.
    """
    net.to(streams.runtime.target)
    optimiser = torch.optim.Adam(net.parameters(), lr=rate)
    begin = lessons - gate.left(STAGE)
    if (found := streams.stored(STAGE)) is not None and (
        (at := int(found["step"])) <= begin or at == lessons
    ):
        take_up(found, net=net, optimiser=optimiser)
        begin = max(begin, at)
    for step in range(begin, lessons):
        optimiser.param_groups[0]["lr"] = falling(rate, step, lessons)
        descend(gate, STAGE, net, redrawn, optimiser, bound=bound)
        if step % 25 == 24 or step + 1 == lessons:
            progress("training the autoencoder", step + 1, lessons)
        if streams.due(step, lessons) or step + 1 == lessons:
            streams.store(STAGE, kept(net=net, optimiser=optimiser, step=step + 1))
    return net.requires_grad_(False)


# On public pictures


def taught_in_public(
    net: Any,
    images: Tensor,
    *,
    lessons: int,
    batch: int,
    rate: float,
    streams: Streams,
    progress: Progress,
) -> Any:
    """The net after plain steps on public images [count, ...]; a run that goes on finds the very weights its answers belong to."""
    device = streams.runtime.target

    def learned() -> dict[str, Tensor]:
        shown = images.to(device)
        draws = streams.generator("lessons", device)
        net.to(device).encoder.spread(
            shown[torch.randint(len(shown), (PORTION,), generator=draws, device=device)]
        )
        optimiser = torch.optim.Adam(net.parameters(), lr=rate)
        for step in range(lessons):
            optimiser.param_groups[0]["lr"] = falling(rate, step, lessons)
            some = shown[torch.randint(len(shown), (batch,), generator=draws, device=device)]
            codes = net.encoder(some)
            wobble = WOBBLE * torch.randn(codes.shape, generator=draws, device=device)
            optimiser.zero_grad(set_to_none=True)
            binary_cross_entropy_with_logits(
                net.decoder(on_sphere(codes + wobble)), some
            ).backward()
            optimiser.step()
            if step % 25 == 24 or step + 1 == lessons:
                progress("training the autoencoder on public pictures", step + 1, lessons)
        return {name: value.detach() for name, value in net.state_dict().items()}

    net.to(device).load_state_dict(streams.once(STAGE, learned))
    return net.requires_grad_(False)


def drawn_scenes(shape: tuple[int, int, int], most: int, streams: Streams) -> Tensor:
    """Pictures drawn by code, at most about ``most``: [count, *shape]."""
    draws = streams.generator("scenes")
    rounds = min(ROUNDS, max(1, most // (KINDS * EACH)))
    return torch.cat(
        [scenes(KINDS, EACH, shape, draws, streams.runtime.target)[0] for _ in range(rounds)]
    )


def falling(rate: float, step: int, steps: int) -> float:
    """Half a cosine, from ``rate`` to 0."""
    return rate * (1 + math.cos(math.pi * step / steps)) / 2
