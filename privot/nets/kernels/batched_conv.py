"""Convolutions of many small networks in one launch: as products of tiles whose rows are gathered on the way, nothing unfolded in memory.

cuDNN's grouped convolutions leave a GPU idle at these sizes. Maps lie channels last, so that a row of a tile is one stretch of memory. No
sum is split over programs and tiles never depend on the number of networks: each gets the same bits alone or among others. Imported only
where there is Triton.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """At most so many rows and columns of a product for one program, which adds up ``depth`` terms at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = {
    "output": Tile(128, 128, 32, 4, 3),
    "input": Tile(128, 64, 32, 4, 3),
    "weights": Tile(32, 128, 32, 4, 4),
}
TURN = 8  # from so many maps on, weights are laid by outputs first, for the way to the input: a pass over them, but tiles need no turning
# a sum over so many maps that one program would have for itself is made in parts, whatever the number of networks
LONG = 32
PARTS = 4


@triton.jit
def _to_output(
    x,
    w,
    y,
    x_net,
    w_net,
    n,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    outs: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    side: tl.constexpr,
    stride: tl.constexpr,
    padding: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
):
    """y [n * high * wide, outs] of x [n, height, width, channels] and w [outs, side, side, channels]."""
    places: tl.constexpr = high * wide
    terms: tl.constexpr = side * side * channels
    across: tl.constexpr = (outs + columns - 1) // columns
    tiles = tl.cdiv(n * places, rows) * across
    net = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = tile // across * rows + tl.arange(0, rows)
    column = tile % across * columns + tl.arange(0, columns)
    known = row < n * places
    top = row % places // wide * stride - padding
    left = row % wide * stride - padding
    corner = row // places * (height * width * channels) + (top * width + left) * channels
    top = tl.where(known, top, -1000000)  # outside, like all beyond an edge
    x = x + net * x_net
    w = w + net * w_net
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, terms, depth):
        term = start + tl.arange(0, depth)
        if (
            channels % depth == 0
        ):  # one tap at a time: whether it falls beyond an edge is a matter of the row alone
            tap = start // channels
            down = tap // side
            right = tap % side
            inside = (
                (top + down >= 0)
                & (top + down < height)
                & (left + right >= 0)
                & (left + right < width)
            )[:, None]
            at = (
                corner[:, None]
                + ((down * width + right) * channels + start % channels + tl.arange(0, depth))[
                    None, :
                ]
            )
            there = (column < outs)[:, None]
        else:
            tap = term // channels
            down = (tap // side)[None, :]
            right = (tap % side)[None, :]
            inside = (
                (top[:, None] + down >= 0)
                & (top[:, None] + down < height)
                & (term < terms)[None, :]
            )
            inside = inside & (left[:, None] + right >= 0) & (left[:, None] + right < width)
            at = (
                corner[:, None]
                + ((tap // side * width + tap % side) * channels + term % channels)[None, :]
            )
            there = (column < outs)[:, None] & (term < terms)[None, :]
        a = tl.load(x + at, mask=inside, other=0.0)
        b = tl.load(w + column[:, None] * terms + term[None, :], mask=there, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=precision)
    y += net * n * (places * outs)
    tl.store(
        y + row[:, None] * outs + column[None, :],
        total,
        mask=known[:, None] & (column < outs)[None, :],
    )


@triton.jit
def _to_input(
    dy,
    w,
    dx,
    dy_net,
    w_net,
    n,
    w_out: tl.constexpr,
    w_tap: tl.constexpr,
    w_channel: tl.constexpr,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    outs: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    side: tl.constexpr,
    stride: tl.constexpr,
    padding: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
):
    """dx [n, height, width, channels] of dy [n, high, wide, outs] and w, whose steps are given.

    Places of the input fall into stride^2 kinds, by which taps ever hit them; a program has places of one kind and just its taps.
    """
    kinds: tl.constexpr = stride * stride
    most: tl.constexpr = ((height + stride - 1) // stride) * ((width + stride - 1) // stride)
    across: tl.constexpr = (channels + columns - 1) // columns
    tiles = tl.cdiv(n * most, rows) * across
    net = (tl.program_id(0) // (tiles * kinds)).to(tl.int64)
    tile = tl.program_id(0) % (tiles * kinds)
    kind = tile // tiles
    tile = tile % tiles
    # of this kind: places with (place + padding) % stride == low, and near sideways
    low = kind // stride
    near = kind % stride
    first = (padding - low + stride - 1) // stride
    begin = (padding - near + stride - 1) // stride
    tall = (height - 1 + padding - low + stride) // stride - first
    broad = (width - 1 + padding - near + stride) // stride - begin
    beside = (side - near + stride - 1) // stride
    terms = (side - low + stride - 1) // stride * beside * outs
    row = tile // across * rows + tl.arange(0, rows)
    column = tile % across * columns + tl.arange(0, columns)
    known = row < n * tall * broad
    spread = tl.maximum(tall * broad, 1)  # a kind may be empty
    image = row // spread
    top = row % spread // tl.maximum(broad, 1) + first
    left = row % tl.maximum(broad, 1) + begin
    place = (image * height + top * stride + low - padding) * width + left * stride + near - padding
    corner = ((image * high + top) * wide + left) * outs
    top = tl.where(known, top, -1000000)
    dy = dy + net * dy_net
    w = w + net * w_net
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, terms, depth):
        term = start + tl.arange(0, depth)
        if outs % depth == 0:
            tap = start // outs
            up = tap // beside
            back = tap % beside
            inside = (
                (top - up >= 0) & (top - up < high) & (left - back >= 0) & (left - back < wide)
            )[:, None]
            out = start % outs + tl.arange(0, depth)
            there = (column < channels)[:, None]
        else:
            tap = term // outs
            out = term % outs
            up = tap // beside
            back = tap % beside
            inside = (
                (top[:, None] - up[None, :] >= 0)
                & (top[:, None] - up[None, :] < high)
                & (term < terms)[None, :]
            )
            inside = (
                inside
                & (left[:, None] - back[None, :] >= 0)
                & (left[:, None] - back[None, :] < wide)
            )
            there = (column < channels)[:, None] & (term < terms)[None, :]
        at = corner[:, None] + (out - (up * wide + back) * outs)[None, :]
        weight = ((low + stride * up) * side + near + stride * back) * w_tap + out * w_out
        a = tl.load(dy + at, mask=inside, other=0.0)
        b = tl.load(w + column[:, None] * w_channel + weight[None, :], mask=there, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=precision)
    dx += net * n * (height * width * channels)
    tl.store(
        dx + place[:, None] * channels + column[None, :],
        total,
        mask=known[:, None] & (column < channels)[None, :],
    )


@triton.jit
def _to_weights(
    x,
    dy,
    dw,
    x_net,
    dy_net,
    n,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    outs: tl.constexpr,
    high: tl.constexpr,
    wide: tl.constexpr,
    side: tl.constexpr,
    stride: tl.constexpr,
    padding: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    precision: tl.constexpr,
):
    """dw [outs, side * side * channels] of x [n, height, width, channels] and dy [n, high, wide, outs]."""
    places: tl.constexpr = high * wide
    size: tl.constexpr = side * side * channels
    across: tl.constexpr = (size + columns - 1) // columns
    tiles: tl.constexpr = ((outs + rows - 1) // rows) * across
    net = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    row = tile // across * rows + tl.arange(0, rows)
    column = tile % across * columns + tl.arange(0, columns)
    tap = column // channels
    down = (tap // side)[None, :]
    right = (tap % side)[None, :]
    shift = ((tap // side * width + tap % side) * channels + column % channels)[None, :]
    if channels % columns == 0:  # one tap for all columns
        down = tile % across * columns // channels // side
        right = tile % across * columns // channels % side
    x = x + net * x_net
    dy = dy + net * dy_net
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, n * places, depth):
        term = start + tl.arange(0, depth)
        top = (term % places // wide * stride - padding)[:, None]
        left = (term % wide * stride - padding)[:, None]
        corner = (term // places * (height * width * channels))[:, None] + (
            top * width + left
        ) * channels
        inside = (
            (top + down >= 0)
            & (top + down < height)
            & (left + right >= 0)
            & (left + right < width)
            & (term < n * places)[:, None]
        )
        if size % columns != 0:
            inside = inside & (column < size)[None, :]
        a = tl.load(
            dy + term[:, None] * outs + row[None, :],
            mask=(term < n * places)[:, None] & (row < outs)[None, :],
            other=0.0,
        )
        b = tl.load(x + corner + shift, mask=inside, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=precision)
    dw += net * (outs * size)
    tl.store(
        dw + row[:, None] * size + column[None, :],
        total,
        mask=(row < outs)[:, None] & (column < size)[None, :],
    )


def _fit(tile: Tile, rows: int, columns: int, depth: int) -> dict[str, Any]:
    """The tile, no larger than the product, and not under the 16 that tensor cores take."""
    r, c, d = (
        min(most, max(16, 1 << (size - 1).bit_length()))
        for most, size in zip(tile[:3], (rows, columns, depth), strict=True)
    )
    precision = "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    return {
        "rows": r,
        "columns": c,
        "depth": d,
        "precision": precision,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _laid(x: Tensor) -> Tensor:
    """[nets, n, channels, height, width] as [nets, n, height, width, channels], each net in one stretch; nets may share one."""
    x = x.permute(0, 1, 3, 4, 2)
    if x.stride(0) == 0:
        return x[:1].contiguous().expand(x.shape)
    return x if x[0].is_contiguous() else x.contiguous()


def to_output(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """[nets, n, outs, high, wide]."""
    x = _laid(x)
    weight = _laid(weight)
    (nets, n, height, width, channels) = x.shape
    (_, outs, side, _, _) = weight.shape
    high, wide = ((each + 2 * padding - side) // stride + 1 for each in (height, width))
    y = x.new_empty(nets, n, high, wide, outs)
    how = _fit(TILES["output"], n * high * wide, outs, side * side * channels)
    grid = nets * math.ceil(n * high * wide / how["rows"]) * math.ceil(outs / how["columns"])
    steps = x.stride(0), weight.stride(0), n
    _to_output[(grid,)](
        x,
        weight,
        y,
        *steps,
        channels,
        height,
        width,
        outs,
        high,
        wide,
        side,
        stride,
        padding,
        **how,
    )
    return y.permute(0, 1, 4, 2, 3)


def to_input(
    dy: Tensor, weight: Tensor, height: int, width: int, stride: int, padding: int
) -> Tensor:
    """[nets, n, channels, height, width]."""
    dy = _laid(dy)
    weight = _laid(weight)
    (nets, n, high, wide, outs) = dy.shape
    (_, _, side, _, channels) = weight.shape
    steps = side * side * channels, channels, 1
    if n >= TURN and outs > 1:
        weight = weight.permute(0, 4, 2, 3, 1).contiguous()
        steps = (1, outs, side * side * outs)
    dx = dy.new_empty(nets, n, height, width, channels)
    most = n * math.ceil(height / stride) * math.ceil(width / stride)
    how = _fit(TILES["input"], most, channels, math.ceil(side / stride) ** 2 * outs)
    grid = nets * stride**2 * math.ceil(most / how["rows"]) * math.ceil(channels / how["columns"])
    sizes = channels, height, width, outs, high, wide, side, stride, padding
    _to_input[(grid,)](dy, weight, dx, dy.stride(0), weight.stride(0), n, *steps, *sizes, **how)
    return dx.permute(0, 1, 4, 2, 3)


def to_weights(x: Tensor, dy: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """[nets, outs, channels, side, side]."""
    n = x.shape[1]
    alone = (
        dy.shape[2] <= TILES["weights"].rows
        and side * side * x.shape[2] <= TILES["weights"].columns
    )
    if alone and n >= LONG and n % PARTS == 0:
        x, dy = (each.unflatten(1, (PARTS, -1)).flatten(0, 1) for each in (x, dy))
        some = to_weights(x, dy, side, stride, padding)
        return functools.reduce(
            torch.add, some.unflatten(0, (-1, PARTS)).unbind(1)
        )  # always in this order, so that bits stay
    x = _laid(x)
    dy = _laid(dy)
    (nets, n, height, width, channels) = x.shape
    (_, _, high, wide, outs) = dy.shape
    dw = x.new_empty(nets, outs, side, side, channels)
    how = _fit(TILES["weights"], outs, side * side * channels, n * high * wide)
    grid = nets * math.ceil(outs / how["rows"]) * math.ceil(side * side * channels / how["columns"])
    steps = x.stride(0), dy.stride(0), n
    _to_weights[(grid,)](
        x, dy, dw, *steps, channels, height, width, outs, high, wide, side, stride, padding, **how
    )
    return dw.permute(0, 1, 4, 2, 3)
