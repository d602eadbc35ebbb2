"""Sorting of many rows: ranks, differentiable sorted rows, and isotonic regression.

On a CPU, PyTorch's sort compares keys one by one and moves an index with each. NumPy has two faster
sorts: a radix sort for 16-bit keys, and a vectorised sort for plain keys, which can hold an index
in their low bits. Both are several times as fast (bench/sliced.py).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

COARSE_BITS = 16  # bits of coarse keys
INDEX_BITS = 29  # low bits of a double that no float32 uses
# A GPU sorts rows up to this length inside one thread block; computing coarse keys would take
# longer than they save.
MAX_GPU_BLOCK_ROW = 4096
MIN_THREADED_ELEMENTS = 2**18  # elements from which several threads are faster
FLOAT32_MAX = torch.finfo(torch.float32).max


def argsort_rows(values: Tensor, bits: int = 32) -> Tensor:
    """Return the indices that sort the values along the last dimension.

    Args:
        values: Values, [..., n].
        bits: 16 sorts by keys of 16 bits, spread evenly over each row's range, which a radix sort
            does in a fraction of the time. Values with equal keys keep their order on a CPU and
            come in any order on a GPU. More bits sort by the values themselves.

    Returns:
        Indices, [..., n].

    >>> argsort_rows(torch.tensor([0.3, -1.0, 0.1]))
    tensor([1, 2, 0])
    >>> argsort_rows(torch.tensor([0.3, -1.0, 0.1]), bits=16)
    tensor([1, 2, 0])
    """
    if bits <= COARSE_BITS and not (values.is_cuda and values.shape[-1] <= MAX_GPU_BLOCK_ROW):
        keys = quantize_keys(values)
        if not values.is_cpu:
            return torch.sort(keys, dim=-1).indices
        return torch.from_numpy(map_rows(argsort_radix, keys.numpy()))
    if not values.is_cpu or values.dtype != torch.float32:
        return torch.sort(values, dim=-1).indices
    return sort_packed_keys(values).bitwise_and_(2**INDEX_BITS - 1)


def quantize_keys(values: Tensor) -> Tensor:
    """Return int16 keys from -32767 to 32767 that ascend as the values of a row do, [..., n]."""
    # On a CPU two passes are faster than aminmax.
    low = values.amin(-1, keepdim=True)
    high = values.amax(-1, keepdim=True)
    limits = torch.finfo(values.dtype)
    keys_per_unit = (65_534 / (high - low).clamp(min=limits.tiny)).clamp(max=limits.max)
    # Relative to the middle of the row, so that a row far from zero keeps its precision.
    return (values - (low + high) / 2).mul_(keys_per_unit).to(torch.int16)


def sort_packed_keys(values: Tensor) -> Tensor:
    """Sort float32 rows as doubles whose low bits are the index of each value.

    Non-finite values count as the largest float32 or its negative.

    Args:
        values: Values, [..., n].

    Returns:
        The bits of the sorted doubles, int64 [..., n].

    Raises:
        ValueError: A row is too long for its indices.
    """
    if values.shape[-1] > 2**INDEX_BITS:
        raise ValueError(
            f"A row of {values.shape[-1]:,} values is too long to sort. "
            f"Use rows of at most 2^{INDEX_BITS} values."
        )
    # The bits of an index would be lost in a non-finite value, which a diverged run may have.
    finite = values.nan_to_num(FLOAT32_MAX, FLOAT32_MAX, -FLOAT32_MAX)
    bits = finite.double().view(torch.int64).bitwise_or_(torch.arange(values.shape[-1]))
    keys = bits.view(torch.float64).contiguous().numpy()
    map_rows(sort_in_place, keys)
    return torch.from_numpy(keys).view(torch.int64)


def sort_in_place(rows: np.ndarray) -> np.ndarray:
    """Sort each row in place and return the rows."""
    rows.sort(-1)
    return rows


def argsort_radix(rows: np.ndarray) -> np.ndarray:
    """Return the stable order of each row; for 16-bit keys NumPy uses a radix sort."""
    return np.argsort(rows, -1, kind="stable")


def map_rows(function: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Apply a function to the rows, in several threads where that is faster.

    NumPy sorts without holding the interpreter's lock.

    Args:
        function: Maps rows [k, n] to rows of the same shape.
        rows: Rows, [..., n].

    Returns:
        The results, [..., n].
    """
    flat = rows.reshape(-1, rows.shape[-1])
    num_threads = torch.get_num_threads() if flat.size >= MIN_THREADED_ELEMENTS else 1
    if num_threads == 1:
        return function(flat).reshape(rows.shape)
    with ThreadPoolExecutor(num_threads) as pool:
        results = list(pool.map(function, np.array_split(flat, num_threads)))
    return (flat if function is sort_in_place else np.concatenate(results)).reshape(rows.shape)


class _SortRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        if not values.is_cpu or values.dtype != torch.float32:
            result, order = torch.sort(values, dim=-1)
        else:
            keys = sort_packed_keys(values)
            order = keys & (2**INDEX_BITS - 1)
            result = keys.sub_(order).view(torch.float64).float()
        ctx.save_for_backward(order)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grads[0]).scatter(-1, order, grads[0])


def sort_rows(values: Tensor) -> Tensor:
    """Sort values [..., n] in ascending order along the last dimension; differentiable.

    >>> sort_rows(torch.tensor([[2.0, -1.0, 0.5]]))
    tensor([[-1.0000,  0.5000,  2.0000]])
    """
    if torch.is_grad_enabled() and values.requires_grad:
        return _SortRows.apply(values)
    if not values.is_cpu:
        return torch.sort(values, dim=-1).values
    result = values.detach().contiguous().numpy().copy()
    return torch.from_numpy(map_rows(sort_in_place, result))


def isotonic_regression(values: Tensor) -> Tensor:
    r"""Return the ascending rows nearest to the values in least squares.

    .. math:: \arg\min_{u_1 \le \dots \le u_m} |u - v|^2

    The algorithm is pool adjacent violators, vectorised over the rows: each value joins the pools
    before it while their means are larger. The mean of a row does not change. It runs on the CPU in
    float64, in time proportional to the number of values.

    Args:
        values: Values, [..., m].

    Returns:
        Ascending rows of the same shape.

    >>> isotonic_regression(torch.tensor([[1.0, 3.0, 2.0, 5.0]]))
    tensor([[1.0000, 2.5000, 2.5000, 5.0000]])
    """
    rows = values.detach().double().cpu().reshape(-1, values.shape[-1]).numpy()
    # Means and sizes of the pools of each row, in order, and the index of its last pool.
    means = np.zeros_like(rows)
    sizes = np.zeros(rows.shape, np.int64)
    last_pool = np.full(len(rows), -1)
    for column in range(rows.shape[1]):
        last_pool += 1
        active = np.arange(len(rows))
        means[active, last_pool] = rows[:, column]
        sizes[active, last_pool] = 1
        active = active[last_pool > 0]
        while len(active):
            last = last_pool[active]
            active = active[means[active, last - 1] > means[active, last]]
            last = last_pool[active]
            left = sizes[active, last - 1]
            right = sizes[active, last]
            total = left * means[active, last - 1] + right * means[active, last]
            means[active, last - 1] = total / (left + right)
            sizes[active, last - 1] = left + right
            sizes[active, last] = 0
            last_pool[active] -= 1
            active = active[last_pool[active] > 0]
    flat = np.repeat(means.reshape(-1), sizes.reshape(-1))  # merged pools have size 0
    return torch.from_numpy(flat).reshape(values.shape).to(values)
