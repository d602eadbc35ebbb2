"""Sliced and max-sliced Wasserstein distances between two point sets of equal weights."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from privot.transport.sorting import sort_rows

# Gradient steps of a max-sliced distance. Each is a power iteration on a better plan, and the
# first few give most of the gain.
ASCENT_STEPS = 8


def sliced_wasserstein_distance(x: Tensor, y: Tensor, frame: Tensor, p: float = 2) -> Tensor:
    """Compute SW_p of two point sets, exactly for any numbers of points.

    Args:
        x: Points, [..., n, d].
        y: Points, [..., m, d].
        frame: Directions, [k, d].
        p: Exponent of the distance.

    Returns:
        Distances, [...].

    >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    >>> sliced_wasserstein_distance(x, x + torch.tensor([3.0, 4.0]), torch.eye(2))
    tensor(3.5355)
    """
    return safe_root(slice_distances(x, y, frame, p).mean(-1), p)


def max_sliced_wasserstein_distance(
    x: Tensor, y: Tensor, frame: Tensor, p: float = 2, ascent_steps: int = ASCENT_STEPS
) -> Tensor:
    r"""Compute W_p along the worst direction that gradient ascent finds.

    The ascent starts at the worst direction of the frame and iterates
    :math:`\theta \leftarrow \nabla W_p^p(\theta)` at unit length, which for p = 2 is a power
    iteration on the plan's second moments. The best direction of all steps counts. By the envelope
    theorem the gradient in the points is that at this fixed direction.

    Args:
        x: Points, [n, d].
        y: Points, [m, d].
        frame: Directions to start from, [k, d].
        p: Exponent of the distance.
        ascent_steps: Steps of the ascent; 0 gives the maximum over the frame.

    Returns:
        The distance, a scalar.

    >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    >>> y = x + torch.tensor([3.0, 4.0])
    >>> max_sliced_wasserstein_distance(x, y, torch.eye(2)).round(decimals=3)
    tensor(5.)
    """
    fixed_points = x.detach(), y.detach()
    frame = frame.to(x).detach()
    values = slice_distances(*fixed_points, frame, p)
    best_value = values.amax()
    direction = frame[values.argmax(keepdim=True)]  # [1, d]
    trial = direction
    for _ in range(ascent_steps):
        with torch.enable_grad():
            trial = trial.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(slice_distances(*fixed_points, trial, p).sum(), trial)
        trial = torch.nn.functional.normalize(gradient, dim=-1)
        value = slice_distances(*fixed_points, trial, p).sum()
        is_better = value > best_value  # on the device; the host does not wait for it
        best_value = torch.where(is_better, value, best_value)
        direction = torch.where(is_better, trial, direction)
    return safe_root(slice_distances(x, y, direction, p).sum(), p)


def slice_distances(x: Tensor, y: Tensor, frame: Tensor, p: float) -> Tensor:
    """Compute W_p^p of each slice.

    Args:
        x: Points, [..., n, d].
        y: Points, [..., m, d].
        frame: Directions, [k, d].
        p: Exponent of the distance.

    Returns:
        Distances to the power p, [..., k].
    """
    frame = frame.to(x)
    x_sorted = sort_rows(frame @ x.mT)
    y_sorted = sort_rows(frame @ y.to(x).mT)
    n = x_sorted.shape[-1]
    m = y_sorted.shape[-1]
    if n == m:
        return abs_power(x_sorted - y_sorted, p).mean(-1)
    x_index, y_index, widths = interval_overlaps(n, m, x.device, x.dtype)
    differences = x_sorted.index_select(-1, x_index) - y_sorted.index_select(-1, y_index)
    return abs_power(differences, p) @ widths


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # cached tensors must also work under autograd
def interval_overlaps(
    n: int, m: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut [0, 1] where step functions of ``n`` and of ``m`` equal steps change.

    Args:
        n: Steps of the first function.
        m: Steps of the second function.
        device: Device of the results.
        dtype: Precision of the widths.

    Returns:
        For each interval the step of the first function, that of the second, and the width.

    >>> overlaps = interval_overlaps(2, 4, torch.device("cpu"), torch.float64)
    >>> [values.tolist() for values in overlaps]
    [[0, 0, 1, 1], [0, 1, 2, 3], [0.25, 0.25, 0.25, 0.25]]
    """
    # In units of 1 / nm, so that nothing is rounded.
    ends = torch.cat([torch.arange(1, n + 1) * m, torch.arange(1, m + 1) * n]).unique()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    widths = ((ends - starts).double() / (n * m)).to(dtype)
    return (starts // m).to(device), (starts // n).to(device), widths.to(device)


def abs_power(differences: Tensor, p: float) -> Tensor:
    """Return |differences|^p; squares are faster than powers."""
    if p == 2:
        return differences.square()
    return differences.abs() if p == 1 else differences.abs().pow(p)


def safe_root(total: Tensor, p: float) -> Tensor:
    """Return total^(1/p), with gradient 0 at 0, where the root has none."""
    is_zero = total == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, total).pow(1 / p))
