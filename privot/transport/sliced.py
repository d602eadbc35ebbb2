r"""Sliced flows: project points on many directions and match them in order on each.

For a frame of :math:`k` directions :math:`\theta` in :math:`d` dimensions and point sets
:math:`x, y` with quantile functions :math:`F^{-1}`

.. math::

    SW_p^p(x, y) = \frac1k \sum_\theta
    \int_0^1 |F^{-1}_{\theta x}(t) - F^{-1}_{\theta y}(t)|^p dt

A flow step moves each point toward its targets on all slices,
:math:`x_i + r \frac dk \sum_\theta (q_\theta(i) - \theta x_i) \theta`, where :math:`q_\theta(i)` is
the target quantile at its rank. Projections are [slices, points], so the sorted dimension is last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from privot.transport.sliced_distance import abs_power
from privot.transport.sorting import COARSE_BITS, argsort_rows

FULL_BITS = 32  # of the keys that rank the points; see also COARSE_BITS


def random_orthogonal_frames(dim: int, num_bases: int, generator: torch.Generator) -> Tensor:
    r"""Draw a tight frame: random orthonormal bases, stacked.

    :math:`\sum_\theta (\theta v)^2 = num\_bases \cdot |v|^2` for every :math:`v`, so the frame
    treats all vectors alike.

    Args:
        dim: Dimension.
        num_bases: Number of bases, each uniformly random (Haar).
        generator: Source of the random numbers.

    Returns:
        Directions in float64, [num_bases * dim, dim].

    >>> frame = random_orthogonal_frames(3, 4, torch.Generator().manual_seed(0))
    >>> torch.dist(frame.T @ frame, 4 * torch.eye(3)) < 1e-12
    tensor(True)
    """
    gaussian = torch.randn(
        num_bases, dim, dim, generator=generator, device=generator.device, dtype=torch.float64
    )
    q, r = torch.linalg.qr(gaussian)
    # The signs of q depend on the algorithm of the factorization. With a positive diagonal of r,
    # q is uniformly random.
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return (q * signs[:, None, :]).mT.reshape(num_bases * dim, dim)


def resample_quantiles(targets: Tensor, count: int) -> Tensor:
    """Resample quantiles to another number of equally spaced levels.

    Quantiles belong to the midpoints of m, or ``count``, equal intervals of [0, 1]. Between them
    they are linear. Beyond the first and the last they continue with the gradient next to them;
    constant ends would lose the tails. A flow of many steps may resample its targets once, since
    m = ``count`` costs nothing.

    Args:
        targets: Quantiles, [..., m].
        count: Number of levels of the result.

    Returns:
        Quantiles, [..., count].

    >>> resample_quantiles(torch.tensor([0.0, 4.0]), 4)
    tensor([-1.,  1.,  3.,  5.])
    """
    num_quantiles = targets.shape[-1]
    if num_quantiles in (1, count):
        return targets.expand(*targets.shape[:-1], count)
    low, weight = quantile_interpolation(num_quantiles, count, targets.device, targets.dtype)
    return torch.lerp(targets.index_select(-1, low), targets.index_select(-1, low + 1), weight)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # cached tensors must also work under autograd
def quantile_interpolation(
    num_quantiles: int, count: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute how quantiles are interpolated at the midpoints of ``count`` equal intervals.

    Args:
        num_quantiles: Number of given quantiles.
        count: Number of quantiles to interpolate.
        device: Device of the results.
        dtype: Precision of the weights.

    Returns:
        Indices of the next lower quantile and weights of the next higher one, [count] each.
    """
    position = (torch.arange(count, dtype=torch.float64) + 0.5) * (num_quantiles / count) - 0.5
    low = position.floor().clamp(0, num_quantiles - 2).long()
    return low.to(device), (position - low).to(device, dtype)


def slice_targets(projected: Tensor, targets: Tensor, bits: int = FULL_BITS) -> Tensor:
    """Return each point's target on each slice, by its rank there.

    Args:
        projected: Projections, [..., slices, n].
        targets: Ascending quantiles, [..., slices, m].
        bits: With 16, points nearer than 1/32,767 of a slice's range may exchange their ranks. Each
            target still belongs to one point, and the sort takes a third of the time.

    Returns:
        Targets, [..., slices, n].

    >>> slice_targets(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[10.0, 20.0, 30.0]]))
    tensor([[30., 10., 20.]])
    """
    quantiles = resample_quantiles(targets, projected.shape[-1]).to(projected).expand_as(projected)
    order = argsort_rows(projected.detach(), bits)
    return torch.empty_like(projected).scatter_(-1, order, quantiles)


def sliced_flow_step(
    points: Tensor, frame: Tensor, targets: Tensor, step_size: float = 1.0, bits: int = COARSE_BITS
) -> Tensor:
    """Take one step of the sliced flow.

    Several flows, such as one for each class, may share a frame. On an orthonormal basis (k = d)
    and with step size 1, each coordinate reaches its target. On a GPU, products use TF32.

    Args:
        points: Points, [n, d] or [flows, n, d].
        frame: Directions, [k, d].
        targets: Ascending quantiles, [k, m] or [flows, k, m].
        step_size: Fraction of the displacement.
        bits: Precision of the ranks, see `slice_targets`.

    Returns:
        Moved points of the same shape.

    >>> points = torch.tensor([[0.0, 5.0], [1.0, 4.0]])
    >>> sliced_flow_step(points, torch.eye(2), torch.tensor([[7.0, 8.0], [1.0, 2.0]]))
    tensor([[7., 2.],
            [8., 1.]])
    """
    with allow_tf32(points.device):
        displacements = slice_displacements(points, frame, targets, bits)
        return displace_points(points, displacements, frame, step_size)


def sliced_flow_step_with_error(
    points: Tensor, frame: Tensor, targets: Tensor, step_size: float = 1.0, bits: int = COARSE_BITS
) -> tuple[Tensor, Tensor]:
    """Take one step of the sliced flow and return the error before it.

    Args:
        points: Points, [n, d] or [flows, n, d].
        frame: Directions, [k, d].
        targets: Ascending quantiles, [k, m] or [flows, k, m].
        step_size: Fraction of the displacement.
        bits: Precision of the ranks, see `slice_targets`.

    Returns:
        Moved points of the same shape, and the mean squared displacement, [] or [flows].

    >>> targets = torch.tensor([[1.0], [3.0]])
    >>> sliced_flow_step_with_error(torch.zeros(1, 2), torch.eye(2), targets, step_size=0.5)
    (tensor([[0.5000, 1.5000]]), tensor(5.))
    """
    with allow_tf32(points.device):
        displacements = slice_displacements(points, frame, targets, bits)
        moved = displace_points(points, displacements, frame, step_size)
        return moved, displacements.square().mean((-2, -1))


def slice_displacements(
    points: Tensor, frame: Tensor, targets: Tensor, bits: int = COARSE_BITS
) -> Tensor:
    """Return how far each point is from its target along each slice.

    Args:
        points: Points, [..., n, d].
        frame: Directions, [k, d].
        targets: Ascending quantiles, [..., k, m].
        bits: Precision of the ranks, see `slice_targets`.

    Returns:
        Displacements, [..., k, n].
    """
    projected = frame.to(points) @ points.mT
    return slice_targets(projected, targets, bits).sub_(projected)


def displace_points(
    points: Tensor, displacements: Tensor, frame: Tensor, step_size: float
) -> Tensor:
    """Move points along all directions of a tight frame.

    Args:
        points: Points, [..., n, d].
        displacements: Displacements along each direction, [..., k, n].
        frame: Directions, [k, d].
        step_size: Fraction of the displacement. The factor d/k of a tight frame is added.

    Returns:
        Moved points, [..., n, d].
    """
    scale = step_size * frame.shape[1] / frame.shape[0]
    frame = frame.to(points)
    if points.ndim == 2:
        return torch.addmm(points, displacements.mT, frame, alpha=scale)
    return torch.baddbmm(points, displacements.mT, frame.expand(len(points), -1, -1), alpha=scale)


@contextmanager
def allow_tf32(device: torch.device) -> Iterator[None]:
    """Let float32 products use TF32 on a GPU.

    Ranks and small moves do not need 24 bits, and full products would take most of the time.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def sliced_target_loss(
    points: Tensor, frame: Tensor, targets: Tensor, p: float = 2, bits: int = FULL_BITS
) -> Tensor:
    """Compute the mean of |projection - target|^p over slices and points.

    It is the loss of a generator that is trained on released quantiles. A small change leaves the
    ranks as they are, so the gradient goes through the projections alone.

    Args:
        points: Points, [..., n, d]; may carry a gradient.
        frame: Directions, [k, d].
        targets: Ascending quantiles, [..., k, m].
        p: Exponent of the distance.
        bits: Precision of the ranks, see `slice_targets`.

    Returns:
        The loss, [...].

    >>> points = torch.tensor([[0.0], [5.0]])
    >>> sliced_target_loss(points, torch.ones(1, 1), torch.tensor([[1.0, 2.0]]))
    tensor(5.)
    """
    projected = frame.to(points) @ points.mT
    return abs_power(projected - slice_targets(projected, targets, bits), p).mean((-2, -1))
