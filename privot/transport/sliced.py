r"""Sliced transport: points are projected on many directions, and along a direction the best plan pairs them in order.

For a frame of :math:`k` directions :math:`\theta` in :math:`d` dimensions and clouds :math:`x, y` with quantile functions :math:`F^{-1}`

.. math:: SW_p^p(x, y) = \frac1k \sum_\theta \int_0^1 |F^{-1}_{\theta x}(t) - F^{-1}_{\theta y}(t)|^p dt

A flow step moves each point by what its slices ask of it, :math:`x_i + r \frac dk \sum_\theta (q_\theta(i) - \theta x_i) \theta`,
with :math:`q_\theta(i)` the target quantile at its rank. Projections lie as [slices, points]: the sorted dimension is the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from privot.transport.sorting import HALF, ordered, rank

ASCENTS = 8  # of a max-sliced distance; power iterations on an ever better plan, most of the gain is in the first few
# bits of the keys that points are ranked by, see also HALF
COUNTED = 12
WHOLE = 32


def haar(dim: int, bases: int, generator: torch.Generator) -> Tensor:
    r"""A tight frame: ``bases`` random orthonormal bases of ``dim`` directions each, stacked: [bases * dim, dim], in float64.

    :math:`\sum_\theta (\theta v)^2 = bases \cdot |v|^2` for every :math:`v`: no vector hides from it, none is seen better than another.

    >>> frame = haar(3, 4, torch.Generator().manual_seed(0))
    >>> torch.dist(frame.T @ frame, 4 * torch.eye(3)) < 1e-12
    tensor(True)
    """
    draws = torch.randn(
        bases, dim, dim, generator=generator, device=generator.device, dtype=torch.float64
    )
    q, r = torch.linalg.qr(draws)
    # without the signs of r's diagonal the factor q depends on how the factorisation chose them, and is not uniform
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return (q * signs[:, None, :]).mT.reshape(bases * dim, dim)


def stretch(targets: Tensor, count: int) -> Tensor:
    """Quantiles [..., m] at the middles of m equal parts, read at the middles of ``count`` equal parts: [..., count].

    Linear between them, and as steep beyond the first and the last as next to them; a flow that stopped there would lose its tails.
    A flow of many steps may stretch its targets once, since m = ``count`` costs nothing.

    >>> stretch(torch.tensor([0.0, 4.0]), 4)
    tensor([-1.,  1.,  3.,  5.])
    """
    parts = targets.shape[-1]
    if parts in (1, count):
        return targets.expand(*targets.shape[:-1], count)
    low, share = between(parts, count, targets.device, targets.dtype)
    return torch.lerp(targets.index_select(-1, low), targets.index_select(-1, low + 1), share)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # what is kept must serve under autograd too
def between(
    parts: int, count: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """For each middle of ``count`` equal parts of [0, 1]: which middle of ``parts`` is next below, and how far on it lies."""
    place = (torch.arange(count, dtype=torch.float64) + 0.5) * (parts / count) - 0.5
    low = place.floor().clamp(0, parts - 2).long()
    return low.to(device), (place - low).to(device, dtype)


def assigned(projected: Tensor, targets: Tensor, bits: int = WHOLE) -> Tensor:
    """Each point's target along each slice, by its rank there: [..., slices, n] with ascending ``targets`` [..., slices, m].

    With ``bits`` = 16 points nearer than 1/32,767 of a slice's range may count as equal and change places: every target is still given
    out once, and the sort takes a third of the time.

    >>> assigned(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[10.0, 20.0, 30.0]]))
    tensor([[30., 10., 20.]])
    """
    wanted = stretch(targets, projected.shape[-1]).to(projected).expand_as(projected)
    return torch.empty_like(projected).scatter_(-1, rank(projected.detach(), bits), wanted)


def step(
    points: Tensor, frame: Tensor, targets: Tensor, rate: float = 1.0, bits: int = HALF
) -> Tensor:
    """One step of the flow: ``points`` [n, d] with ``frame`` [k, d] and ascending ``targets`` [k, m] to points [n, d].

    Many flows at once, one for each class: points [classes, n, d], targets [classes, k, m], one frame. On an orthonormal basis (k = d)
    and at ``rate`` 1 each coordinate lands on its target. ``bits``: see ``remaining`` and ``assigned``. Float32 is multiplied as TF32 where
    a GPU can.

    >>> step(torch.tensor([[0.0, 5.0], [1.0, 4.0]]), torch.eye(2), torch.tensor([[7.0, 8.0], [1.0, 2.0]]))
    tensor([[7., 2.],
            [8., 1.]])
    """
    with tensor_cores(points.device):
        return pushed(points, remaining(points, frame, targets, bits), frame, rate)


def measured_step(
    points: Tensor, frame: Tensor, targets: Tensor, rate: float = 1.0, bits: int = HALF
) -> tuple[Tensor, Tensor]:
    """A ``step``, and the mean square of what was left to go before it: [n, d] and [], or [classes, n, d] and [classes].

    >>> measured_step(torch.zeros(1, 2), torch.eye(2), torch.tensor([[1.0], [3.0]]), rate=0.5)
    (tensor([[0.5000, 1.5000]]), tensor(5.))
    """
    with tensor_cores(points.device):
        gaps = remaining(points, frame, targets, bits)
        return pushed(points, gaps, frame, rate), gaps.square().mean((-2, -1))


def remaining(points: Tensor, frame: Tensor, targets: Tensor, bits: int = HALF) -> Tensor:
    """How far each point is from its target along each slice: [..., slices, n].

    ``bits`` = 12: on a GPU points are counted in 4,096 bins instead of sorted (``fused_sliced``), and targets are read at the ranks that
    follow; elsewhere it is 16.
    """
    projected = frame.to(points) @ points.mT
    if (
        bits == COUNTED
        and projected.is_cuda
        and projected.dtype == torch.float32
        and find_spec("triton")
    ):
        from privot.transport.kernels.sliced import counted

        return counted(projected, targets)
    return assigned(projected, targets, bits).sub_(projected)


def pushed(points: Tensor, gaps: Tensor, frame: Tensor, rate: float) -> Tensor:
    """Points [..., n, d] moved by ``gaps`` [..., slices, n], each along its direction; d/k makes a tight frame's moves add up to one."""
    scale = rate * frame.shape[1] / frame.shape[0]
    frame = frame.to(points)
    if points.ndim == 2:
        return torch.addmm(points, gaps.mT, frame, alpha=scale)
    return torch.baddbmm(points, gaps.mT, frame.expand(len(points), -1, -1), alpha=scale)


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """Products of float32 as TF32 on a GPU: ranks and small moves need no 24 bits, and full products would take longest of all."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def target_loss(
    points: Tensor, frame: Tensor, targets: Tensor, p: float = 2, bits: int = WHOLE
) -> Tensor:
    """Mean over slices and points of |projection - its target|^p, differentiable in ``points`` [..., n, d]: [...].

    What a generator is trained by on quantiles ``targets`` [..., k, m] of a release. A small change leaves ranks as they are, so that
    the gradient goes through the projections alone.

    >>> target_loss(torch.tensor([[0.0], [5.0]]), torch.ones(1, 1), torch.tensor([[1.0, 2.0]]))
    tensor(5.)
    """
    projected = frame.to(points) @ points.mT
    return power(projected - assigned(projected, targets, bits), p).mean((-2, -1))


def sliced_distance(x: Tensor, y: Tensor, frame: Tensor, p: float = 2) -> Tensor:
    """SW_p of evenly weighted points ``x`` [..., n, d] and ``y`` [..., m, d] on ``frame`` [k, d]: [...], exact for any two counts.

    >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    >>> sliced_distance(x, x + torch.tensor([3.0, 4.0]), torch.eye(2))
    tensor(3.5355)
    """
    return root(slices(x, y, frame, p).mean(-1), p)


def max_sliced_distance(
    x: Tensor, y: Tensor, frame: Tensor, p: float = 2, ascents: int = ASCENTS
) -> Tensor:
    r"""W_p along the worst direction found: ``x`` [n, d], ``y`` [m, d], ``frame`` [k, d] to [].

    From the worst of the frame it climbs ``ascents`` times, :math:`\theta \leftarrow \nabla W_p^p(\theta)` at unit length (for p = 2 a
    power iteration on the plan's second moments), and keeps the best it saw; 0 ascents: the maximum over the frame. By the envelope
    theorem the gradient is that at the direction, held fixed.

    >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    >>> max_sliced_distance(x, x + torch.tensor([3.0, 4.0]), torch.eye(2)).round(decimals=3)
    tensor(5.)
    """
    still = x.detach(), y.detach()
    frame = frame.to(x).detach()
    values = slices(*still, frame, p)
    # [1, d]
    best = values.amax()
    direction = frame[values.argmax(keepdim=True)]
    trial = direction
    for _ in range(ascents):
        with torch.enable_grad():
            trial = trial.detach().requires_grad_()
            (uphill,) = torch.autograd.grad(slices(*still, trial, p).sum(), trial)
        trial = torch.nn.functional.normalize(uphill, dim=-1)
        value = slices(*still, trial, p).sum()
        better = value > best  # decided on the device; the host is not asked
        best = torch.where(better, value, best)
        direction = torch.where(better, trial, direction)
    return root(slices(x, y, direction, p).sum(), p)


def slices(x: Tensor, y: Tensor, frame: Tensor, p: float) -> Tensor:
    """W_p^p of each slice: [..., k]."""
    frame = frame.to(x)
    one = ordered(frame @ x.mT)
    two = ordered(frame @ y.to(x).mT)
    n = one.shape[-1]
    m = two.shape[-1]
    if n == m:
        return power(one - two, p).mean(-1)
    left, right, widths = overlaps(n, m, x.device, x.dtype)
    return power(one.index_select(-1, left) - two.index_select(-1, right), p) @ widths


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def overlaps(
    n: int, m: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The intervals of [0, 1] on which both of two step functions, of ``n`` and of ``m`` steps, stay: which steps, and how wide.

    >>> [each.tolist() for each in overlaps(2, 4, torch.device("cpu"), torch.float64)]
    [[0, 0, 1, 1], [0, 1, 2, 3], [0.25, 0.25, 0.25, 0.25]]
    """
    # counted in parts of 1 / nm, so that nothing is rounded
    ends = torch.cat([torch.arange(1, n + 1) * m, torch.arange(1, m + 1) * n]).unique()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    widths = ((ends - starts).double() / (n * m)).to(dtype)
    return (starts // m).to(device), (starts // n).to(device), widths.to(device)


def power(gaps: Tensor, p: float) -> Tensor:
    """|gaps|^p; squares are quicker than powers."""
    return gaps.square() if p == 2 else gaps.abs() if p == 1 else gaps.abs().pow(p)


def root(total: Tensor, p: float) -> Tensor:
    """total^(1/p), with gradient 0 at 0, where it has none."""
    nothing = total == 0
    return torch.where(nothing, 0.0, torch.where(nothing, 1.0, total).pow(1 / p))
