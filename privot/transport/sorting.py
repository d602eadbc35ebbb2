"""Sorting many rows: orders, sorted rows that can be differentiated, and the nearest ascending ones.

On a CPU torch's sort compares keys one by one and carries an index along. numpy has sorts that do neither: a radix sort for 16 bits, and a
vectorised one for plain keys, which takes an index hidden in the low bits of a key. Both are several times as fast (bench/sliced.py).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

HALF = 16  # bits of coarse keys
SPARE = 29  # bits of a double that no float uses
SHORT = 4096  # a row that a GPU sorts in one go, inside a block; making keys would take longer than it saves
MANY = 2**18  # numbers from which threads pay
LARGEST = torch.finfo(torch.float32).max


def rank(values: Tensor, bits: int = 32) -> Tensor:
    """Which place comes first, second, ... along the last dimension: indices [..., n].

    ``bits`` = 16: by keys of 16 bits, spread evenly over each row's range, which a radix sort handles in a fraction of the time; values
    with the same key come in any order on a GPU, in their own on a CPU.

    >>> rank(torch.tensor([0.3, -1.0, 0.1]))
    tensor([1, 2, 0])
    >>> rank(torch.tensor([0.3, -1.0, 0.1]), bits=16)
    tensor([1, 2, 0])
    """
    if bits <= HALF and not (values.is_cuda and values.shape[-1] <= SHORT):
        keys = coarse(values)
        if not values.is_cpu:
            return torch.sort(keys, dim=-1).indices
        return torch.from_numpy(by_rows(by_radix, keys.numpy()))
    if not values.is_cpu or values.dtype != torch.float32:
        return torch.sort(values, dim=-1).indices
    return packed(values).bitwise_and_(2**SPARE - 1)


def coarse(values: Tensor) -> Tensor:
    """Keys from -32767 to 32767 that ascend as the values of a row do: int16 [..., n]."""
    # on a CPU faster than both at once
    low = values.amin(-1, keepdim=True)
    high = values.amax(-1, keepdim=True)
    limits = torch.finfo(values.dtype)
    steps = (65_534 / (high - low).clamp(min=limits.tiny)).clamp(max=limits.max)
    # from the middle of the row: one that lies far from zero keeps its digits
    return (values - (low + high) / 2).mul_(steps).to(torch.int16)


def packed(values: Tensor) -> Tensor:
    """Float32 rows sorted as doubles whose lowest bits are the place each came from: int64 [..., n].

    Values that are not finite count as the largest one, or its negative.
    """
    if values.shape[-1] > 2**SPARE:
        raise ValueError(f"{values.shape[-1]:,} values in a row; at most 2^{SPARE} can be ranked")
    sound = values.nan_to_num(
        LARGEST, LARGEST, -LARGEST
    )  # in others the bits of a place would be lost: a run that diverged has such
    keys = (
        sound.double()
        .view(torch.int64)
        .bitwise_or_(torch.arange(values.shape[-1]))
        .view(torch.float64)
        .contiguous()
        .numpy()
    )
    by_rows(in_place, keys)
    return torch.from_numpy(keys).view(torch.int64)


def in_place(rows: np.ndarray) -> np.ndarray:
    """Sorts each row where it lies."""
    rows.sort(-1)
    return rows


def by_radix(rows: np.ndarray) -> np.ndarray:
    """The order of each row; of 16 bits numpy's stable sort counts instead of comparing."""
    return np.argsort(rows, -1, kind="stable")


def by_rows(work: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> np.ndarray:
    """``work`` on parts of the rows, side by side where there are threads; numpy sorts without the interpreter's lock."""
    flat = rows.reshape(-1, rows.shape[-1])
    threads = torch.get_num_threads() if flat.size >= MANY else 1
    if threads == 1:
        return work(flat).reshape(rows.shape)
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(work, np.array_split(flat, threads)))
    return (flat if work is in_place else np.concatenate(parts)).reshape(rows.shape)


class _Ordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        if not values.is_cpu or values.dtype != torch.float32:
            result, order = torch.sort(values, dim=-1)
        else:
            keys = packed(values)
            order = keys & (2**SPARE - 1)
            result = keys.sub_(order).view(torch.float64).float()
        ctx.save_for_backward(order)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grads[0]).scatter(-1, order, grads[0])


def ordered(values: Tensor) -> Tensor:
    """Sorted along the last dimension, ascending: [..., n]. A gradient goes back to where each value stood.

    >>> ordered(torch.tensor([[2.0, -1.0, 0.5]]))
    tensor([[-1.0000,  0.5000,  2.0000]])
    """
    if torch.is_grad_enabled() and values.requires_grad:
        return _Ordered.apply(values)
    if not values.is_cpu:
        return torch.sort(values, dim=-1).values
    result = values.detach().contiguous().numpy().copy()
    return torch.from_numpy(by_rows(in_place, result))


def monotone(values: Tensor) -> Tensor:
    r"""The ascending rows nearest to ``values`` [..., m] in least squares: :math:`\arg\min_{u_1 \le \dots \le u_m} |u - v|^2`.

    Pool adjacent violators, all rows side by side: each value joins the pools before it for as long as these lie above. The mean of a
    row does not change. It works on the CPU, in float64, in time that grows with the size of ``values``.

    >>> monotone(torch.tensor([[1.0, 3.0, 2.0, 5.0]]))
    tensor([[1.0000, 2.5000, 2.5000, 5.0000]])
    """
    rows = values.detach().double().cpu().reshape(-1, values.shape[-1]).numpy()
    # of the pools of each row, in order
    means = np.zeros_like(rows)
    sizes = np.zeros(rows.shape, np.int64)
    top = np.full(len(rows), -1)  # each row's last pool
    for place in range(rows.shape[1]):
        top += 1
        who = np.arange(len(rows))
        means[who, top] = rows[:, place]
        sizes[who, top] = 1
        who = who[top > 0]
        while len(who):
            last = top[who]
            who = who[means[who, last - 1] > means[who, last]]
            last = top[who]
            left = sizes[who, last - 1]
            right = sizes[who, last]
            means[who, last - 1] = (left * means[who, last - 1] + right * means[who, last]) / (
                left + right
            )
            sizes[who, last - 1] = left + right
            sizes[who, last] = 0
            top[who] -= 1
            who = who[top[who] > 0]
    flat = np.repeat(means.reshape(-1), sizes.reshape(-1))  # a pool that is no more has size 0
    return torch.from_numpy(flat).reshape(values.shape).to(values)
