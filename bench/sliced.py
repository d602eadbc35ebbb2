"""The flow step and the sliced distance beside POT, in one process, on this machine: Markdown rows for bench/RESULTS.md.

python bench/sliced.py                     the CPU: n = 4,096, k = 128, d = 8 and 784
python bench/sliced.py --device cuda       a GPU: n = 10,000, k = 1,000, d = 784

POT's row is the loss that a flow would descend (`ot.sliced_wasserstein_distance`, forward and backward, same points and directions). Ours
are one step of the flow on presorted targets, with keys of 12, 16 and 32 bits, and the distance, forward and backward. Times are the least
of several rounds, all taken in turn; on one thread of a CPU they are processor time, which other programs disturb little.
The floor on a GPU is the traffic of a radix sort of 32-bit keys with 32-bit indices, 68 bytes an element at the speed of a copy measured
here, with the two products in TF32 and 16 bytes an element for the interpolation.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from environment import import_pot
from torch import Tensor

from privot.transport.sliced import (
    sliced_flow_step,
    sliced_target_loss,
)
from privot.transport.sliced_distance import sliced_wasserstein_distance
from privot.transport.sorting import argsort_rows, isotonic_regression

ot = import_pot()


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call: by events on a GPU; on a CPU of the processor for one thread, else by the clock."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start_time = now()
    work()
    return 1e3 * (now() - start_time)


def least(
    works: dict[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, float]:
    """The best time of each, all taken in turn; a first round warms up."""
    times = [
        {name: clock(work, device) for name, work in works.items()} for _ in range(rounds + 1)
    ][1:]
    return {name: min(each[name] for each in times) for name in works}


def descent(distance: Callable[[Tensor], Tensor], points: Tensor) -> Callable[[], object]:
    """Forward and backward of a distance, to the points."""
    leaf = points.clone().requires_grad_()
    return lambda: torch.autograd.grad(distance(leaf), leaf)


def compare(n: int, dim: int, slices: int, device: torch.device, rounds: int) -> None:
    draw = torch.Generator(device).manual_seed(0)
    x, y, frame = (torch.randn(size, dim, generator=draw, device=device) for size in (n, n, slices))
    y = y * 0.5 + 1
    frame = torch.nn.functional.normalize(frame, dim=1)
    targets = (frame @ y.T).sort(-1).values
    columns = frame.T.contiguous()
    projected = frame @ x.T
    works: dict[str, Callable[[], object]] = {
        "flow step, 16 bits": lambda: sliced_flow_step(x, frame, targets, bits=16),
        "flow step, 32 bits": lambda: sliced_flow_step(x, frame, targets, bits=32),
        "loss to targets, forward and backward": descent(
            lambda each: sliced_target_loss(each, frame, targets), x
        ),
        "distance, forward and backward": descent(
            lambda each: sliced_wasserstein_distance(each, y, frame), x
        ),
        "  of which: ranks, 16 bits": lambda: argsort_rows(projected, 16),
        "  of which: ranks, 32 bits": lambda: argsort_rows(projected, 32),
        "  beside: torch.sort": lambda: torch.sort(projected, -1),
    }
    if ot is not None:
        works["POT, distance, forward"] = lambda: ot.sliced_wasserstein_distance(
            x, y, projections=columns
        )
        works["POT, distance, forward and backward"] = descent(
            lambda each: ot.sliced_wasserstein_distance(each, y, projections=columns), x
        )
    found = least(works, device, rounds)
    peer = found.get("POT, distance, forward and backward")
    print(
        f"\nn = {n:,}, k = {slices:,}, d = {dim}\n\n| | ms | times POT, forward and backward |\n|---|---|---|"
    )
    for name, value in found.items():
        times = (
            ""
            if name.startswith(" ")
            else f"{peer / value:.1f}"
            if peer
            else "POT is not installed"
        )
        print(f"| {name} | {value:.3g} | {times} |")
    if device.type == "cuda":
        floor(n, dim, slices, found, device, rounds)


def floor(
    n: int, dim: int, slices: int, found: dict[str, float], device: torch.device, rounds: int
) -> None:
    """What the step cannot be faster than with a radix sort, from a copy and products timed here."""
    source, copy = (torch.empty(2**28, device=device) for _ in range(2))  # 1 GiB each
    a = torch.randn(slices, dim, device=device)
    b = torch.randn(dim, n, device=device)
    c = torch.randn(n, slices, device=device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    times = least(
        {"copy": lambda: copy.copy_(source), "there": lambda: a @ b, "back": lambda: c @ a},
        device,
        rounds,
    )
    torch.set_float32_matmul_precision(before)
    speed = 2 * source.numel() * 4 / times["copy"]  # bytes a millisecond
    sort = n * slices * 68 / speed
    rest = n * slices * 16 / speed
    total = sort + rest + times["there"] + times["back"]
    print(
        f"\ncopy {speed / 1e9:.2f} TB/s; floor: sort {sort:.3f} ms, interpolation {rest:.3f}, products {total - sort - rest:.3f},"
    )
    ratios = ", ".join(
        f"{found[f'flow step, {bits} bits'] / total:.2f} at {bits} bits" for bits in (12, 16, 32)
    )
    print(f"together {total:.3f} ms; a step takes so many times that: {ratios}")


def repair(rows: int, parts: int, rounds: int) -> None:
    """The isotonic repair of a release of 10 classes, 16 bases of 144 directions, 50 blocks."""
    values = torch.from_numpy(
        np.random.default_rng(0).normal(size=(rows, parts)) + 0.1 * np.arange(parts)
    )
    taken = least({"monotone": lambda: isotonic_regression(values)}, torch.device("cpu"), rounds)[
        "monotone"
    ]
    print(f"\nisotonic repair of {rows:,} rows of {parts}, CPU: {taken:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    torch.set_num_threads(asked.threads)
    gpu = device.type == "cuda"
    what = (
        torch.cuda.get_device_name(device)
        if gpu
        else f"{platform.machine()} CPU, {asked.threads} thread(s)"
    )
    load = "" if gpu else f", load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    print(
        f"{what}{load}, torch {torch.__version__}, numpy {np.__version__}, POT {ot.__version__ if ot else 'none'}, float32"
    )
    for dim in (784,) if gpu else (8, 784):
        compare(*((10_000, dim, 1_000) if gpu else (4_096, dim, 128)), device, asked.rounds)
    if not gpu:
        repair(23_040, 50, asked.rounds)


if __name__ == "__main__":
    main()
