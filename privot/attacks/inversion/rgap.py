r"""R-GAP (Zhu and Blaschko 2021): the image behind one update in closed form, from the last layer down to the first.

Of every layer z = W x + b two sets of linear equations in its input x are known: z itself, by undoing the function above, and the
gradient dL/dW, which is linear in x once dL/dz is known. They are solved together by least squares in float64. With biases the start is
exact (dL/db is dL/dz); without, the size of dL/dz is a root of one equation. No start, no label, no luck is needed, and nothing is
optimised; but noise is amplified from layer to layer, so a failure here says nothing of other attacks.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional
from torch.nn.grad import conv2d_input

from privot.attacks.inversion.layer_chain import Layer, chain
from privot.attacks.inversion.problem import Found, Problem, Tensors, gradients
from privot.errors import SettingError

# of the least squares: singular values down to 1e-6 of the largest are resolved after so many corrections
DAMPING = 1e-11
ROUNDS = 8
ALMOST = 1e-3  # mean square outside the box that rounding may cause
# of the search for the size of dL/dz where there is no bias
GRID = 400
HALVINGS = 60


class Reached(NamedTuple):
    """How far down the chain an attack is: the ``x`` [N, d] that entered a layer, ``slope`` dL/dz [N, ...] of it, ``labels`` [N, 1].

    ``left`` [N] is the share of the equations that could not be met on the way, NaN where there is no such start. ``other`` [N]: so many
    times ``x`` fits as well, if not NaN.
    """

    x: Tensor
    slope: Tensor
    labels: Tensor
    left: Tensor
    other: Tensor


def invert(problem: Problem) -> Found:
    """One image [N, 1, c, h, w] for each victim; ``loss`` is the squared residual of the update over its squared size.

    Convolutions are solved victim by victim, each a dense system of the layer's size; all else is one computation for all.
    """
    if problem.batch != 1:
        raise SettingError(
            f"{problem.batch} images are behind an update, and the closed form is for one: use relu_batch, or optimise"
        )
    layers = chain(problem.net, problem.shape)
    exact = doubled(problem)
    weights = {
        name: each.expand(problem.count, *each.shape) if problem.shared else each
        for name, each in exact.weights.items()
    }
    reached = _starts(layers[-1], weights, exact, _homogeneous(layers))
    for above, layer in zip(layers[:0:-1], layers[-2::-1], strict=True):
        # Wrong starts do not fit the first layer under them, so of several one is left after it.
        reached = [_fittest([_down(above, layer, weights, exact.update, each) for each in reached])]
    found = _fittest(reached)
    images = _inside(found, problem.bounds).view(-1, 1, *problem.shape)
    once = torch.ones(len(images), dtype=torch.long, device=images.device)
    return Found(
        images.to(problem.example.dtype), found.labels, once, residual(exact, images, found.labels)
    )


def residual(problem: Problem, images: Tensor, labels: Tensor) -> Tensor:
    """|g(x, y) - g|^2 / |g|^2 of each victim [N]: what anyone who has the update can check."""
    guessed = gradients(problem, images, labels)
    apart = torch.stack(
        [(guessed[name] - each).square().flatten(1).sum(1) for name, each in problem.update.items()]
    ).sum(0)
    return apart / torch.stack(
        [each.square().flatten(1).sum(1) for each in problem.update.values()]
    ).sum(0)


def doubled(problem: Problem) -> Problem:
    """The same in float64."""
    return replace(
        problem,
        net=copy.deepcopy(problem.net).double(),  # buffers have a type, too
        weights={name: each.double() for name, each in problem.weights.items()},
        update={name: each.double() for name, each in problem.update.items()},
    )


def _fittest(reached: list[Reached]) -> Reached:
    """For each victim the start that left least."""
    left = torch.stack([each.left for each in reached]).nan_to_num(nan=torch.inf)  # [starts, N]
    best = left.argmin(0)
    every = torch.arange(left.shape[1], device=left.device)
    return Reached(*(torch.stack(each)[best, every] for each in zip(*reached, strict=True)))


def _homogeneous(layers: list[Layer]) -> bool:
    """Whether c x gives c times the logits for all c > 0: then x with dL/dz and c x with dL/dz / c are told apart by no layer."""
    probe = torch.tensor([-2.0, -1.0, 1.0, 2.0], dtype=torch.float64)
    bent = [layer.undo(probe * 0.4)[0] * 2 - layer.undo(probe * 0.8)[0] for layer in layers]
    return all(layer.module.bias is None for layer in layers) and not torch.stack(bent).any()


def _inside(found: Reached, bounds: tuple[float, float]) -> Tensor:
    """Of two images that fit alike, the brighter of those within the bounds, or the one that is less outside: [N, d]."""
    both = torch.stack([found.x, found.x * found.other[:, None]]).nan_to_num(nan=0.0)  # [2, N, d]
    outside = (both - both.clamp(*bounds)).square().mean(2)
    rank = torch.where(outside < ALMOST, -both.square().mean(2), outside)
    second = (rank[1] < rank[0]) & found.other.isfinite()
    return torch.where(second[:, None], both[1], both[0])


def _starts(layer: Layer, weights: Tensors, problem: Problem, homogeneous: bool) -> list[Reached]:
    """What may have entered the last layer."""
    outer = problem.update[f"{layer.name}.weight"]  # dL/dz x^T [N, classes, d]
    weight = weights[f"{layer.name}.weight"]
    if layer.module.bias is not None:
        slope = problem.update[f"{layer.name}.bias"]
        labels = slope.argmin(1, keepdim=True) if slope.shape[1] > 1 else (slope < 0).long()
        x = _quotient(outer, slope)
        return [Reached(x, slope, labels, x[:, 0] * 0, x[:, 0] * torch.nan)]
    direction = torch.linalg.eigh(outer @ outer.mT).eigenvectors[
        ..., -1
    ]  # of dL/dz, up to sign and size
    content = torch.einsum("nkd,nk->nd", outer, direction)  # x times that size
    logits = torch.einsum("nkd,nd->nk", weight, content)
    likeliest = direction.abs().argmax(
        1, keepdim=True
    )  # with a softmax |dL/dz| is largest at the label
    found = []
    for labels in (
        [torch.full_like(likeliest, each) for each in range(2)]
        if outer.shape[1] <= 2
        else [likeliest]
    ):
        for sign in (1.0, -1.0):
            sizes = _sizes(problem, sign * logits, sign * direction, labels)
            for size in sizes[:1] if homogeneous else sizes:
                other = size / sizes[1] if homogeneous else size * torch.nan
                found.append(
                    Reached(
                        sign * content / size[:, None],
                        sign * size[:, None] * direction,
                        labels,
                        size * 0,
                        other,
                    )
                )
    some = torch.stack([each.left.isfinite().any() for each in found]).tolist()
    return [each for each, there in zip(found, some, strict=True) if there] or found[:1]


def _sizes(problem: Problem, logits: Tensor, direction: Tensor, labels: Tensor) -> Tensor:
    r"""The sizes s > 0 with <dL/dz(logits / s), direction> = s, up to two of them: [2, N], NaN where there is none.

    For the logistic loss it is R-GAP's -m / (1 + exp m) = <dL/dW, W>, which has two roots when the image is classified rightly.
    """
    slope = vmap(vmap(grad(lambda z, y: problem.loss(z[None], y)), in_dims=(0, None)))

    def excess(log_size: Tensor) -> Tensor:  # [N, points] -> [N, points]
        size = log_size.exp()
        return (
            torch.einsum("npk,nk->np", slope(logits[:, None] / size[..., None], labels), direction)
            - size
        )

    grid = torch.linspace(-30.0, 8.0, GRID, dtype=logits.dtype, device=logits.device).expand(
        len(logits), -1
    )
    value = excess(grid)
    crossing = (value[:, 1:] > 0) != (value[:, :-1] > 0)
    rank = torch.where(crossing, torch.arange(GRID - 1, device=grid.device), -1)
    place = rank.topk(2, dim=1).values  # [N, 2]
    low = grid.gather(1, place.clamp(min=0))
    high = grid.gather(1, place.clamp(min=0) + 1)
    rising = value.gather(1, place.clamp(min=0)) < 0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        under = (excess(middle) < 0) == rising
        low = torch.where(under, middle, low)
        high = torch.where(under, high, middle)
    return torch.where(place >= 0, low.exp(), torch.nan).T


def _quotient(outer: Tensor, slope: Tensor) -> Tensor:
    """x [N, d] with slope x^T nearest to ``outer`` [N, k, d]."""
    return torch.einsum("nkd,nk->nd", outer, slope) / slope.square().sum(1, keepdim=True)


def _down(above: Layer, layer: Layer, weights: Tensors, update: Tensors, from_: Reached) -> Reached:
    """Through the function under ``above`` and then through ``layer``."""
    weight = weights[f"{layer.name}.weight"]
    over = weights[f"{above.name}.weight"]
    bias = weights.get(f"{layer.name}.bias")
    seen = update[f"{layer.name}.weight"]
    back = (
        torch.einsum("nkd,nk->nd", over, from_.slope)
        if over.ndim == 3
        else _back(above, over, from_.slope)
    )
    if weight.ndim == 3:
        before, bent, known = layer.undo(from_.x)
        slope = back.flatten(1) * bent if bias is None else update[f"{layer.name}.bias"]
        x = _quotient(seen, slope)
        after = torch.einsum("nkd,nd->nk", weight, x) + (0 if bias is None else bias)
        apart = ((after - before) * known).square().sum(1)
        whole = (before * known).square().sum(1)
        return Reached(x, slope, from_.labels, from_.left + apart / whole, from_.other)
    before, bent, known = layer.undo(from_.x.view(-1, weight.shape[1], *_sides(layer)))
    slope = back.reshape(before.shape) * bent
    # An error of x is one of z divided by the function's slope: an equation where that is flat counts for less.
    trust = known * (bent / bent.flatten(1).amax(1).view(-1, 1, 1, 1)).square()
    before = before if bias is None else before - bias[..., None, None]
    nothing = torch.full_like(weight[0, 0, 0, 0, 0], torch.nan)
    there = from_.left.isfinite().tolist()
    parts = zip(weight, seen, before, slope, trust, strict=True)
    found = [
        _input(layer, *part) if ok else (nothing.expand(layer.shape), nothing)
        for ok, part in zip(there, parts, strict=True)
    ]
    x, left = (torch.stack(each) for each in zip(*found, strict=True))
    return Reached(x.flatten(1), slope, from_.labels, from_.left + left, from_.other)


def _sides(layer: Layer) -> list[int]:
    module: Any = layer.module
    spans = zip(
        layer.shape[1:],
        module.padding,
        module.dilation,
        module.kernel_size,
        module.stride,
        strict=True,
    )
    return [
        (side + 2 * pad - wide * (kernel - 1) - 1) // step + 1
        for side, pad, wide, kernel, step in spans
    ]


def _back(layer: Layer, weight: Tensor, slope: Tensor) -> Tensor:
    """dL/dx [N, c, h, w] of a convolution from its dL/dz [N, o, p, q] and weights [N, o, c, k, k]."""
    module: Any = layer.module
    return torch.stack(
        [
            conv2d_input(
                (1, *layer.shape), each, one[None], module.stride, module.padding, module.dilation
            )[0]
            for each, one in zip(weight, slope, strict=True)
        ]
    )


def _input(
    layer: Layer, weight: Tensor, seen: Tensor, before: Tensor, slope: Tensor, trust: Tensor
) -> tuple[Tensor, Tensor]:
    r"""The input [c, h, w] of one victim's convolution: least squares of conv(x, W) = z, weighted by ``trust``, and of dL/dW = dL/dz * x.

    Both are brought to one scale. The second is the same system D [o k k, h w] for each channel, so the normal matrix is
    M^T M + I_c (x) D^T D with the convolution's M, of which products alone are formed.
    """
    module: Any = layer.module
    channels, *sides = layer.shape
    places = sides[0] * sides[1]
    how: Any = (module.stride, module.padding, module.dilation)
    unit = torch.eye(places, dtype=weight.dtype, device=weight.device).view(places, 1, *sides)
    patches = functional.unfold(
        unit, module.kernel_size, module.dilation, module.padding, module.stride
    )  # [h w, k k, p q]
    rows = torch.einsum("op,qkp->okq", slope.flatten(1), patches).flatten(0, 1)  # D [o k k, h w]
    wanted = seen.permute(0, 2, 3, 1).reshape(-1, channels)  # [o k k, c]
    every = torch.eye(channels * places, dtype=weight.dtype, device=weight.device).view(
        -1, *layer.shape
    )

    def normal(x: Tensor) -> Tensor:  # M^T M x
        return conv2d_input(x.shape, weight, functional.conv2d(x, weight, None, *how) * trust, *how)

    def missed(x: Tensor) -> tuple[Tensor, Tensor]:
        return (
            before - functional.conv2d(x[None], weight, None, *how)[0]
        ) * trust, wanted - rows @ x.flatten(1).T

    whole = normal(every).flatten(1)  # [n, n]
    scale = whole.diagonal().mean() / rows.square().sum(0).mean()
    shared = rows.T @ rows * scale  # [h w, h w]
    whole.view(channels, places, channels, places).diagonal(dim1=0, dim2=2).add_(shared[..., None])
    lean = DAMPING * whole.diagonal().max()
    factor, _ = torch.linalg.cholesky_ex(whole.diagonal_scatter(whole.diagonal() + lean))
    x = torch.zeros(layer.shape, dtype=weight.dtype, device=weight.device)
    for _ in range(
        ROUNDS
    ):  # residuals are taken of the equations themselves, so the normal matrix' rounding does not stay
        apart, wrong = missed(x)
        pull = conv2d_input((1, *layer.shape), weight, apart[None], *how)[0] + (
            rows.T @ wrong * scale
        ).T.reshape(layer.shape)
        x = x + torch.cholesky_solve(pull.reshape(-1, 1), factor).view(layer.shape)
    apart, wrong = missed(x)
    return x, apart.square().sum() / (
        before * trust
    ).square().sum() + wrong.square().sum() / wanted.square().sum()
