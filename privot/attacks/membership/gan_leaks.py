r"""GAN-Leaks (Chen et al. 2020): how well can a generator give back the candidate?

    full black box     R(x) = the nearest of the images that it gave;
    partial black box  R(x) = G(z) by an evolution strategy on the code z, which asks G for images and for nothing else;
    white box          R(x) = G(z) by the gradient of  |x - G(z)|² + perceptual * LPIPS(x, G(z)) + penalty * (|z|²/code - 1)².

The squared distance is the mean over pixels in [-1, 1], as in the paper. Scores are minus the distance of R(x), less that of reference
generators which never saw the candidate, where there are some (`nearest.calibrated`). A generator is a `Product` or a net (codes, labels)
-> images with its ``code`` length, which is moved to the device and frozen, and which there asks nothing of the host; the attacker knows
the candidates' labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from privot.attacks.membership.nearest import Ruler, nearest, neighbours
from privot.attacks.membership.nearest import perceptual as perceptual_ruler
from privot.errors import DataError, ReleaseError, SettingError
from privot.measures.image_similarity import weights
from privot.nets.conv_block import half
from privot.release.artifact import Product
from privot.runtime import Progress, silent
from privot.runtime.graphed_step import Repeated

# the paper's weights of LPIPS and of the code's norm
PERCEPTUAL = 0.2
PENALTY = 0.001
DRAWS = 1000  # codes of each class among which a search begins
ROWS = 512  # searches at a time
ASKED = 4096  # images asked of a generator at a time


def full_black_box(
    candidates: Tensor,
    generated: Tensor,
    *,
    labels: Tensor | None = None,
    released_labels: Tensor | None = None,
) -> np.ndarray:
    """Scores [candidates]: minus the L2 distance to the nearest generated image, of the same class where labels are given.

    >>> full_black_box(torch.zeros(1, 1, 2, 2), torch.ones(3, 1, 2, 2)).tolist()
    [-2.0]
    """
    return nearest(candidates, generated, "pixels", labels=labels, released_labels=released_labels)


def partial_black_box(
    generator: Product | nn.Module,
    candidates: Tensor,
    labels: Tensor,
    *,
    rounds: int = 200,
    children: int = 8,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> np.ndarray:
    """Scores [candidates] by a (1 + children) evolution strategy for each candidate, all side by side.

    It begins at the best of ``DRAWS`` random codes; children spread by a step that grows when one of them is better and shrinks when none
    is. No gradient is taken. The generator is asked for DRAWS images a class and rounds * children images a candidate.
    """
    net = _net(generator, device)
    draw = torch.Generator(device).manual_seed(seed)
    found: list[Tensor] = []
    with torch.no_grad():
        for goal, own, codes in _portions(net, candidates, labels, 1, seed, device):
            progress("searching codes", sum(map(len, found)), len(labels))
            best = _squared(_asked(net, codes, own), goal)
            step = torch.full_like(best, 0.5)
            for _ in range(rounds):
                tried = codes[:, None] + step[:, None, None] * torch.randn(
                    len(own), children, net.code, generator=draw, device=device
                )
                images = _asked(net, tried.flatten(0, 1), own.repeat_interleave(children))
                value, which = (
                    _squared(images, goal.repeat_interleave(children, 0)).view(-1, children).min(1)
                )
                better = value < best
                codes = torch.where(
                    better[:, None],
                    tried.gather(1, which[:, None, None].expand(-1, 1, net.code))[:, 0],
                    codes,
                )
                best = torch.where(better, value, best)
                step = step * torch.where(better, math.exp(0.4), math.exp(-0.1)).to(
                    step
                )  # success in a fifth of the rounds keeps it
            found.append(-best.double().cpu())
    progress("searching codes", len(labels), len(labels))
    return torch.cat(found).numpy()


def white_box(
    generator: Product | nn.Module,
    candidates: Tensor,
    labels: Tensor,
    *,
    steps: int = 200,
    restarts: int = 3,
    rate: float = 0.05,
    perceptual: float | None = None,
    penalty: float = PENALTY,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> np.ndarray:
    """Scores [candidates] by Adam on the codes, ``restarts`` for each candidate from the nearest of ``DRAWS`` images, the best counts.

    ``perceptual`` is the weight of LPIPS; None takes 0.2 where its weights are at hand and 0 where not. A cosine takes the rate to 0, and
    the penalty with it: it guides the search and is no part of the score. On a GPU the search is in half precision, the score is not.
    """
    net = _net(generator, device)
    share = _share(perceptual)
    see = perceptual_ruler(torch.device(device)) if share else None
    found: list[Tensor] = []
    for goal, own, starts in _portions(net, candidates, labels, restarts, seed, device):
        progress("searching codes", sum(map(len, found)), len(labels))
        goals = goal.repeat_interleave(restarts, 0)
        owns = own.repeat_interleave(restarts)
        with torch.no_grad():
            seen = see(goals) if see else None
        apart = partial(_apart, goals=goals, see=see, seen=seen, share=share)
        codes = _searched(net, starts, owns, apart, steps, rate, penalty)
        with torch.no_grad():
            found.append(-apart(net(codes, owns)).view(-1, restarts).min(1).values.double().cpu())
    progress("searching codes", len(labels), len(labels))
    return torch.cat(found).numpy()


def _searched(
    net: Any,
    starts: Tensor,
    labels: Tensor,
    apart: Callable[[Tensor], Tensor],
    steps: int,
    rate: float,
    penalty: float,
) -> Tensor:
    """Codes [searches, code] after so many steps of Adam; on a GPU a step is one CUDA graph."""
    codes = starts.clone().requires_grad_()
    fade = torch.ones((), device=starts.device)
    on_gpu = starts.is_cuda
    adam = torch.optim.Adam([codes], lr=rate * fade, capturable=on_gpu, fused=on_gpu)

    def step() -> None:
        adam.zero_grad(set_to_none=True)
        with half(codes.device):
            lost = apart(net(codes, labels))
        # A sum over searches: each has the gradient that it would have alone.
        (lost + penalty * fade * (codes.square().mean(1) - 1).square()).sum().backward()
        adam.step()

    again = Repeated(step, codes.device)
    for each in range(steps):
        fade.fill_(0.5 * (1 + math.cos(math.pi * each / steps)))
        adam.param_groups[0]["lr"].copy_(rate * fade)
        again()
    return codes.detach()


def _share(perceptual: float | None) -> float:
    if perceptual is not None:
        return perceptual
    try:
        weights()
    except DataError:
        return 0.0
    return PERCEPTUAL


def _net(generator: Product | nn.Module, device: torch.device | str) -> Any:
    net: Any = generator
    if isinstance(generator, Product):
        if generator.kind != "generator":
            raise SettingError("the release is a set: attack it with nearest or tracing")
        net = generator.build()
        net.to(memory_format=torch.channels_last)  # as the matrix units of a GPU read it
    return net.to(device).eval().requires_grad_(False)


def _portions(
    net: Any, candidates: Tensor, labels: Tensor, count: int, seed: int, device: torch.device | str
) -> Any:
    """Candidates, labels and the ``count`` best codes for each [candidates * count, code], some candidates at a time."""
    if len(candidates) != len(labels) or not len(labels):
        raise SettingError(
            f"{len(candidates)} candidates and {len(labels)} labels: as many of each are needed, and at least one"
        )
    draw = torch.Generator(device).manual_seed(seed)
    codes = torch.randn(DRAWS, net.code, generator=draw, device=device)
    drawn = {
        int(label): _asked(net, codes, torch.full((DRAWS,), int(label), device=device))
        for label in labels.unique()
    }
    if not all(each.isfinite().all() for each in drawn.values()):
        raise ReleaseError(
            "the generator gives values that are not finite: there is nothing to search"
        )
    for part, own in zip(
        candidates.split(max(1, ROWS // count)), labels.split(max(1, ROWS // count)), strict=True
    ):
        part = part.to(device).float()
        own = own.to(device)
        starts = torch.zeros(len(own), count, net.code, device=device)
        for label in own.unique():
            here = own == label
            starts[here] = codes[neighbours(part[here], drawn[int(label)], count).places.to(device)]
        yield part, own, starts.flatten(0, 1)


@torch.no_grad()
def _asked(net: Any, codes: Tensor, labels: Tensor) -> Tensor:
    return torch.cat(
        [net(*each) for each in zip(codes.split(ASKED), labels.split(ASKED), strict=True)]
    )


def _squared(images: Tensor, goals: Tensor) -> Tensor:
    """Mean squared error over pixels in [-1, 1]: [count]."""
    return 4 * (images - goals).flatten(1).square().mean(1)


def _apart(
    images: Tensor, goals: Tensor, see: Ruler | None, seen: Tensor | None, share: float
) -> Tensor:
    squared = _squared(images, goals)
    return (
        squared
        if see is None or seen is None
        else squared + share * (see(images) - seen).square().sum(1)
    )
