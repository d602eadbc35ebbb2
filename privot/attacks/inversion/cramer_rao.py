r"""How well the best attack can do, without running one: from the Jacobian J = d(update)/d(image) at the true image, which its owner has.

Of an update u(x) + N(0, s^2) an unbiased estimate of the image has covariance at least s^2 H^{-1}, H = J^T J (Cramer-Rao), and for small s the
least-squares attack reaches it: a mean squared error of s^2 mean(1 / l_i) over the eigenvalues l_i of H. An attacker who knows that pixels lie in a box
does better, by least squares within it (`boxed`). H is made of products J^T (J v); J itself is never stored. Labels count as known.
A prior over images (a generator, smoothness) can beat both: this is no proof of privacy, which only the accountant gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap

from privot.attacks.inversion.box_least_squares import boxed
from privot.attacks.inversion.conv_as_matmul import Patches
from privot.attacks.inversion.problem import Problem, Tensors
from privot.attacks.inversion.rgap import doubled
from privot.errors import DataError, SettingError

BLIND = 1e-12  # eigenvalues under this share of the largest are rounding: the update does not change in that direction
DRAWS = 16_000  # of the noise, for the error within the box: so many values in all, since larger images need fewer draws


@dataclass(frozen=True)
class Certificate:
    """Of N victims with n values each, ``images`` [N, n] within ``bounds``: ``information`` H [N, n, n], its ``eigenvalues`` [N, n].

    ``variance`` [N, n] is the least variance of each value at noise 1, in the directions that the update tells of; ``hidden`` [N, n] how
    much of the value it does not tell (0 to 1). A map of either over the pixels shows where the leak is. ``errors`` [N, n, draws] are
    what noise of 1 does to the estimate, ``offset`` [N, n] its error in what is hidden, where mid-grey is guessed.
    """

    images: Tensor
    information: Tensor
    eigenvalues: Tensor
    variance: Tensor
    hidden: Tensor
    errors: Tensor
    offset: Tensor
    bounds: tuple[float, float] = (0.0, 1.0)

    @property
    def rank(self) -> Tensor:
        """[N], of n: in how many directions the image moves the update."""
        return (self.eigenvalues > BLIND * self.eigenvalues[:, -1:]).sum(1)

    def unbiased(self, noise_std: float | Tensor) -> Tensor:
        """[N], the Cramer-Rao bound s^2 mean(1 / l_i); infinite where a direction is hidden. ``noise_std`` is one, or one for each [N]."""
        return torch.where(
            self.hidden.sum(1) < 0.5, noise_std**2 * self.variance.mean(1), torch.inf
        )

    def mse(self, noise_std: float | Tensor) -> Tensor:
        """[N], the error to expect of least squares within the box, or a guess of mid-grey where that is better.

        Whoever knows more of images than the box does better.
        """
        noise_std = torch.as_tensor(
            noise_std, dtype=self.images.dtype, device=self.images.device
        ).view(-1, 1, 1)
        truth = self.images[..., None]
        aim = truth + noise_std * self.errors + self.offset[..., None]
        guess = boxed(
            self.information.float(), aim.float(), self.bounds, variance=self.variance
        )  # an error is wanted to two digits, not an image
        return torch.minimum((guess - truth).square().mean((1, 2)), self._grey())

    def _grey(self) -> Tensor:
        return (self.images - sum(self.bounds) / 2).square().mean(1)

    def psnr(self, noise_std: float | Tensor) -> Tensor:
        """[N], decibels of `mse`, with the width of the box for the peak."""
        return decibels(self.mse(noise_std) / (self.bounds[1] - self.bounds[0]) ** 2)

    def noise_for(self, psnr: float) -> Tensor:
        """[N], the noise that brings that attack down to ``psnr``, give or take half a decibel; the largest is enough for all.

        0 where the update tells too little anyway; infinite where a guess of mid-grey is as good.
        """
        width = (self.bounds[1] - self.bounds[0]) ** 2
        found = (
            10 ** (-psnr / 10) * width / self.variance.mean(1)
        ).sqrt()  # at the Cramer-Rao bound; the box asks for more
        for _ in range(
            4
        ):  # the error grows like s^2 at first and less later, so this climbs to the root
            found = found * 10 ** ((self.psnr(found) - psnr).clamp(-20, 20) / 20)
        blind = decibels(self.offset.square().mean(1) / width) <= psnr
        return torch.where(
            blind, 0.0, torch.where(decibels(self._grey() / width) >= psnr, torch.inf, found)
        )


def certify(
    problem: Problem,
    images: Tensor,
    labels: Tensor,
    defence: Any = None,
    *,
    spread: Tensors | None = None,
    portion: int = 0,
    seed: int = 0,
) -> Certificate:
    """Of the updates that ``images`` [N, batch, c, h, w] with ``labels`` [N, batch] give through what ``defence`` does besides its noise.

    All images behind one update are unknown together: n = batch * c * h * w. ``spread`` {name: [N]} says how noisy each tensor is, where
    they are not alike; noise is then counted in units of it. ``portion``: products at a time. In float64, since H squares the condition.
    """
    if images.shape[:2] != (problem.count, problem.batch) or labels.shape[:2] != images.shape[:2]:
        raise DataError(
            f"images {list(images.shape)}: give the {problem.count} x {problem.batch} images behind the updates, and labels"
        )
    flat = images.double().flatten(1)
    found = [
        (rows, *_summary(rows, some, problem.bounds, seed + place))
        for place, (rows, some) in enumerate(
            zip(
                information(problem, images, labels, defence, spread=spread, portion=portion).split(
                    1
                ),
                flat.split(1),
                strict=True,
            )
        )
    ]
    whole, values, variance, hidden, errors, offset = (
        torch.cat(each) for each in zip(*found, strict=True)
    )
    return Certificate(flat, whole, values, variance, hidden, errors, offset, problem.bounds)


def information(
    problem: Problem,
    images: Tensor,
    labels: Tensor,
    defence: Any = None,
    *,
    spread: Tensors | None = None,
    portion: int = 0,
) -> Tensor:
    """H = J^T J [N, n, n] at ``images`` [N, batch, c, h, w], in float64; the rest as for `certify`."""
    exact = doubled(problem)
    images = images.double()
    size = images[0].numel()
    portion = portion or (4096 if images.is_cuda else 128)
    unit = torch.eye(size, dtype=images.dtype, device=images.device)
    scale = spread or {name: images.new_ones(problem.count) for name in problem.update}

    def products(
        weights: Tensors, image: Tensor, label: Tensor, scale: Tensors, tangents: Tensor
    ) -> Tensor:
        sent = _sent(exact, weights, label, defence, scale)

        def product(tangent: Tensor) -> Tensor:  # H v
            moved: Any = jvp(sent, (image,), (tangent.view(image.shape),))
            back: Any = vjp(sent, image)
            return back[1](moved[1])[0].flatten()

        return vmap(product)(tangents)

    one = vmap(products, in_dims=(None if exact.shared else 0, 0, 0, 0, None))
    # victims at a time
    many = max(1, portion // size)
    found = []
    for place in range(0, problem.count, many):
        which = slice(place, place + many)
        weights = (
            exact.weights
            if exact.shared
            else {name: each[which] for name, each in exact.weights.items()}
        )
        some = {name: each[which].double() for name, each in scale.items()}
        with Patches():
            rows = [
                one(weights, images[which], labels[which], some, part)
                for part in unit.split(max(1, portion // many))
            ]
        found.append(torch.cat(rows, 1))
    whole = torch.cat(found)
    return (whole + whole.mT) / 2


def _sent(
    problem: Problem, weights: Tensors, labels: Tensor, defence: Any, scale: Tensors
) -> Callable[[Tensor], Tensor]:
    """The update of one victim, in one vector, as a function of its images [batch, c, h, w]."""
    if defence is not None and not hasattr(defence, "expected"):
        raise SettingError(
            f"{type(defence).__name__} does not say what it sends without noise (expected): no certificate"
        )

    def gradient(image: Tensor, label: Tensor) -> Tensors:
        return grad(
            lambda own: problem.loss(functional_call(problem.net, own, (image[None],)), label[None])
        )(weights)

    def sent(images: Tensor) -> Tensor:
        each = vmap(gradient)(images, labels)  # [batch, ...]
        if defence is None:
            update = {name: found.mean(0) for name, found in each.items()}
        else:
            update = {
                name: found[0]
                for name, found in defence.expected(
                    {name: found[None] for name, found in each.items()}
                ).items()
            }
        return torch.cat([(update[name] / scale[name]).flatten() for name in problem.update])

    return sent


def _summary(
    information: Tensor, images: Tensor, bounds: tuple[float, float], seed: int
) -> tuple[Tensor, ...]:
    """Eigenvalues of H [N, n, n], diagonals of its inverse and of what is hidden, errors and offset: see `Certificate`."""
    values, vectors = torch.linalg.eigh(information)
    told = values > BLIND * values[:, -1:]
    root = torch.where(told, values, 1.0).rsqrt() * told  # [N, n]
    variance, hidden = (
        torch.einsum("nij,nj->ni", vectors.square(), each)
        for each in (root.square(), (~told).to(values))
    )
    generator = torch.Generator().manual_seed(seed)
    draws = min(max(DRAWS // images.shape[1], 4), 32)
    drawn = torch.randn(*images.shape, draws, dtype=torch.float64, generator=generator).to(
        images.device
    )
    errors = vectors @ (root[..., None] * drawn)
    errors = (
        errors * (variance.sum(1) / errors.square().sum(1).mean(1)).sqrt()[:, None, None]
    )  # their size is known exactly
    away = torch.einsum("nji,nj->ni", vectors, sum(bounds) / 2 - images) * ~told
    return values, variance, hidden, errors, torch.einsum("nij,nj->ni", vectors, away)


def decibels(error: Tensor) -> Tensor:
    """The PSNR of a mean squared error, peak 1.

    >>> decibels(torch.tensor(0.01))
    tensor(20.)
    """
    return -10 * error.log10()
