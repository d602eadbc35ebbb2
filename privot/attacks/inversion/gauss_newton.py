r"""The last steps of an attack on a noisy update: Gauss-Newton within the box, from where a search ended.

At a guess x the update is u(x) + J (x' - x), so least squares in x' is a quadratic with H = J^T J, minimised over the box (`boxed`). For
Gaussian noise that is the likeliest image, and what the certificate predicts the error of. Needs no truth: J is taken at the guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from privot.attacks.inversion.box_least_squares import boxed, inverses
from privot.attacks.inversion.cramer_rao import information
from privot.attacks.inversion.problem import Found, Problem, gradients
from privot.attacks.inversion.rgap import doubled

HALVINGS = 5  # of a step that does not help


def _looked(sent: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Any]:
    found: Any = vjp(sent, x)
    return found[0], found[1]


def refine(problem: Problem, found: Found, rounds: int = 3) -> Found:
    """``found`` after so many steps, with images [N, batch, c, h, w] in the box and ``loss`` [N], the squared residual of the update."""
    exact, low, high = doubled(problem), *problem.bounds
    seen = torch.cat([each.flatten(1) for each in exact.update.values()], 1)

    def sent(images: Tensor) -> Tensor:
        each = gradients(exact, images, found.labels)
        return torch.cat([each[name].flatten(1) for name in exact.update], 1)

    x = found.images.double().clamp(low, high)
    value, pull = _looked(sent, x)
    for _ in range(rounds):
        curve = information(exact, x, found.labels)
        slope = pull(seen - value)[0].flatten(1)[..., None]
        lean = (
            1e-12
            * curve.diagonal(dim1=1, dim2=2).amax(1)[:, None, None]
            * torch.eye(curve.shape[1]).to(curve)
        )
        inverse = inverses(curve + lean)
        aim = x.flatten(1)[..., None] + inverse @ slope
        step = (
            boxed(curve, aim, problem.bounds, variance=inverse.diagonal(dim1=1, dim2=2))[
                ..., 0
            ].view(x.shape)
            - x
        )
        left = (seen - value).square().sum(1)
        size = torch.ones_like(left)
        for _ in range(HALVINGS):
            worse = ~((seen - sent(x + size.view(-1, 1, 1, 1, 1) * step)).square().sum(1) < left)
            size = torch.where(worse, size / 2, size)
        fresh = x + size.view(-1, 1, 1, 1, 1) * step
        better = (seen - sent(fresh)).square().sum(1) < left
        x = torch.where(better.view(-1, 1, 1, 1, 1), fresh, x)
        value, pull = _looked(sent, x)
    return replace(
        found,
        images=x.to(found.images.dtype),
        steps=found.steps + rounds,
        loss=(seen - value).square().sum(1).to(found.loss.dtype),
    )
