r"""SPEAR (Dimitrov et al. 2024): a whole batch, exactly, from the gradient of a first layer that is linear with a ReLU after it.

dL/dW = D X, with the images X [b, d] and D = dL/dz [m, b], has rank b: factors L R of it are D = L Q, X = Q^{-1} R with an unknown Q. A
ReLU that is off makes an exact 0 in D, so a column q of Q is orthogonal to many rows of L: any b - 1 such rows give it. Random sets of
rows are tried, all at once, and those columns kept whose L q has many zeros. No label, no start, no optimiser; the tries grow like 2^b / b.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from privot.attacks.inversion.labels import recovered
from privot.attacks.inversion.layer_chain import Layer, chain
from privot.attacks.inversion.problem import Found, Problem
from privot.attacks.inversion.rgap import doubled
from privot.errors import SettingError

# sets of rows at a time, and times: good for about 12 images that leave a third of the ReLUs off
TRIES = 8192
ROUNDS = 256
# of the largest entry of a column: rounding in float32 is below, slopes of a net are mostly above
LOOSE = 1e-2
TIGHT = 3e-4
LARGEST = 20  # images


def invert(problem: Problem, *, rounds: int = ROUNDS, seed: int = 0) -> Found:
    """The images [N, batch, c, h, w] of each victim, in some order, and the labels that the update tells of.

    ``loss`` [N] is the share of ReLUs whose state does not fit: 0 proves the batch. Victims are taken one by one, each with thousands of
    tries at once. Images that were not found are mid-grey.
    """
    first = _first(problem)
    exact = doubled(problem)
    images = []
    losses = []
    steps = []
    for place in range(problem.count):
        own = {name: each if exact.shared else each[place] for name, each in exact.weights.items()}
        weight = own[f"{first.name}.weight"]
        bias = own[f"{first.name}.bias"]
        slope, level = (exact.update[f"{first.name}.{part}"][place] for part in ("weight", "bias"))
        generator = torch.Generator().manual_seed(seed + place)
        found, wrong, tried = _batch(slope, level, weight, bias, problem.batch, rounds, generator)
        images.append(found)
        losses.append(wrong)
        steps.append(tried)
    kind = problem.example.dtype
    pixels = torch.stack(images).view(problem.count, problem.batch, *problem.shape).to(kind)
    labels = recovered(problem, seed)
    device = problem.example.device
    return Found(
        pixels,
        labels,
        torch.tensor(steps, device=device),
        torch.tensor(losses, device=device, dtype=kind),
    )


def _first(problem: Problem) -> Layer:
    """The first layer, if it is of the kind."""
    layer = chain(problem.net, problem.shape)[0]
    probe = torch.tensor([-1.0, 1.0])
    if (
        not isinstance(layer.module, torch.nn.Linear)
        or layer.module.bias is None
        or layer.undo(probe)[2].tolist() != [0.0, 1.0]
    ):
        raise SettingError(
            "the batch attack needs a first layer that is linear, with a bias and a ReLU after it: use an optimising attack"
        )
    if not 1 <= problem.batch <= LARGEST:
        raise SettingError(
            f"{problem.batch} images are behind an update: more than {LARGEST} take too many tries"
        )
    return layer


def _batch(
    slope: Tensor,
    level: Tensor,
    weight: Tensor,
    bias: Tensor,
    batch: int,
    rounds: int,
    generator: torch.Generator,
) -> tuple[Tensor, float, int]:
    """Images [batch, d] of one victim from dL/dW ``slope`` [m, d] and dL/db ``level`` [m]; the share of ReLUs that do not fit; tries."""
    left, sizes, right = torch.linalg.svd(slope, full_matrices=False)
    rank = int((sizes > 1e-6 * sizes[0]).sum().clamp(max=batch))
    # L [m, r], of equal rounding in every entry, and R [r, d]
    left = left[:, :rank] * sizes[:rank]
    right = right[:rank]
    live = left[
        left.norm(dim=1) > 1e-6 * left.norm(dim=1).max()
    ]  # neurons that no image wakes say nothing
    columns = left.new_zeros(0, rank)
    counts = left.new_zeros(0)
    best = torch.full((batch, slope.shape[1]), 0.5, dtype=slope.dtype, device=slope.device), 1.0
    tried = 0
    for _ in range(rounds):
        tried += TRIES
        columns, counts = _more(live, columns, counts, generator)
        chosen = _independent(columns, counts, rank)
        if chosen is None:
            continue
        images = _images(left, right, chosen, level)
        on = left @ chosen.T
        wrong = _misfit(on, images @ weight.T + bias)
        if wrong < best[1]:
            whole = best[0].clone()
            whole[:rank] = images
            best = whole, wrong
        if best[1] < 1e-3:
            break
    return *best, tried


def _more(
    live: Tensor, columns: Tensor, counts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """New candidates [k, r] beside the old, sharpened on all rows that they are orthogonal to, most zeros first."""
    rank = live.shape[1]
    if rank == 1:
        return torch.ones_like(live[:1]), live.new_ones(1)
    some = live[
        torch.randint(len(live), (TRIES, rank - 1), generator=generator).to(live.device)
    ]  # [tries, r - 1, r]
    kernel, _ = torch.linalg.solve_ex(
        some[..., :-1], -some[..., -1:]
    )  # the last entry is 1; a row drawn twice gives no number, and no zeros
    kernel = normalize(
        torch.cat([kernel[..., 0], torch.ones_like(kernel[:, :1, 0])], 1), dim=1
    )  # [tries, r]
    zeros = _zeros(live, kernel, LOOSE)  # [tries, m]
    enough = (zeros.sum(1) > rank - 1 + len(live) // 10).nonzero()[:256, 0]
    fresh = kernel[enough]
    zeros = zeros[enough]
    for strict in (
        TIGHT,
        TIGHT,
    ):  # sharpened on all rows that seem to be orthogonal: a few rows alone amplify rounding
        if len(fresh):
            grams = torch.einsum("km,mi,mj->kij", zeros.double(), live, live)
            fresh = torch.linalg.eigh(grams).eigenvectors[..., 0]
            zeros = _zeros(live, fresh, strict)
    every = torch.cat([columns, fresh])
    score = torch.cat([counts, zeros.sum(1).to(counts)])
    order = score.argsort(descending=True)
    every = every[order]
    score = score[order]
    same = ((every @ every.T).abs() > 1 - 1e-6).triu(1).any(0)  # one that stands before it
    return every[~same][: 8 * rank], score[~same][: 8 * rank]


def _zeros(left: Tensor, columns: Tensor, share: float) -> Tensor:
    """Where L q is 0 but for rounding: bool [k, m], for columns q [k, r]."""
    value = (columns @ left.T).abs()
    return value < share * value.amax(1, keepdim=True)


def _independent(columns: Tensor, counts: Tensor, rank: int) -> Tensor | None:
    """The first ``rank`` independent candidates [r, r], sparsest first."""
    chosen = columns[:0]
    for each in columns:
        if torch.linalg.svdvals(torch.cat([chosen, each[None]]))[-1] > 1e-3:
            chosen = torch.cat([chosen, each[None]])
        if len(chosen) == rank:
            return chosen
    return None


def _images(left: Tensor, right: Tensor, chosen: Tensor, level: Tensor) -> Tensor:
    """X = (Q diag c)^{-1} R; the sizes c follow from dL/db = D 1 = L Q c."""
    sizes = torch.linalg.lstsq(left @ chosen.T, level[:, None]).solution[:, 0]
    return torch.linalg.solve(chosen.T * sizes, right)


def _misfit(slopes: Tensor, before: Tensor) -> float:
    """The share of (neuron, image) where the slope D [m, b] is not 0 but the ReLU of ``before`` [b, m] is off, or the other way round."""
    there = ~_zeros(slopes, torch.eye(slopes.shape[1]).to(slopes), TIGHT).T
    return float((there.T ^ (before > 0)).double().mean())
