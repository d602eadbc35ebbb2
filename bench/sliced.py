"""The flow step and the sliced distance compared with POT, in one process.

    python bench/sliced.py                     the CPU: n = 4,096, k = 128, d = 8 and 784
    python bench/sliced.py --device cuda       a GPU: n = 10,000, k = 1,000, d = 784

The row of POT is the loss that a flow would minimize (`ot.sliced_wasserstein_distance`, forward and
backward, same points and directions). Ours are one step of the flow on presorted targets, with keys
of 16 and 32 bits, and the distance, forward and backward. Times are the least of several rounds in
turn. On one thread of a CPU they are processor time, which other programs disturb little.

The lower bound on a GPU is the memory traffic of a radix sort of 32-bit keys with 32-bit indices,
68 bytes an element at the measured speed of a copy, with the two products in TF32 and 16 bytes an
element for the interpolation. Prints Markdown rows for bench/RESULTS.md.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from environment import import_pot, make_parser, print_header, print_row
from torch import Tensor

from privot.transport.sliced import sliced_flow_step, sliced_target_loss
from privot.transport.sliced_distance import sliced_wasserstein_distance
from privot.transport.sorting import argsort_rows, isotonic_regression

ot = import_pot()
Functions = dict[str, Callable[[], object]]


def time_call(function: Callable[[], object], device: torch.device) -> float:
    """Measure milliseconds of one call: by events on a GPU, of the processor for one thread."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start_time = clock()
    function()
    return 1e3 * (clock() - start_time)


def measure_times(functions: Functions, device: torch.device, rounds: int) -> dict[str, float]:
    """Measure the least milliseconds of each function; a first round warms up."""
    times = [
        {name: time_call(function, device) for name, function in functions.items()}
        for _ in range(rounds + 1)
    ][1:]
    return {name: min(measured[name] for measured in times) for name in functions}


def make_backward(distance: Callable[[Tensor], Tensor], points: Tensor) -> Callable[[], object]:
    """Build a function that runs a distance forward and backward, to the points."""
    leaf = points.clone().requires_grad_()
    return lambda: torch.autograd.grad(distance(leaf), leaf)


def compare(n: int, dim: int, slices: int, device: torch.device, rounds: int) -> None:
    """Print the times of n points of a dimension, with a number of slices."""
    rng = torch.Generator(device).manual_seed(0)
    x, y, frame = (torch.randn(size, dim, generator=rng, device=device) for size in (n, n, slices))
    y = y * 0.5 + 1
    frame = torch.nn.functional.normalize(frame, dim=1)
    targets = (frame @ y.T).sort(-1).values
    columns = frame.T.contiguous()
    projected = frame @ x.T
    functions: Functions = {
        "flow step, 16 bits": lambda: sliced_flow_step(x, frame, targets, bits=16),
        "flow step, 32 bits": lambda: sliced_flow_step(x, frame, targets, bits=32),
        "loss to targets, forward and backward": make_backward(
            lambda points: sliced_target_loss(points, frame, targets), x
        ),
        "distance, forward and backward": make_backward(
            lambda points: sliced_wasserstein_distance(points, y, frame), x
        ),
        "  of which: ranks, 16 bits": lambda: argsort_rows(projected, 16),
        "  of which: ranks, 32 bits": lambda: argsort_rows(projected, 32),
        "  for comparison: torch.sort": lambda: torch.sort(projected, -1),
    }
    if ot is not None:
        functions["POT, distance, forward"] = lambda: ot.sliced_wasserstein_distance(
            x, y, projections=columns
        )
        functions["POT, distance, forward and backward"] = make_backward(
            lambda points: ot.sliced_wasserstein_distance(points, y, projections=columns), x
        )
    times = measure_times(functions, device, rounds)
    peer = times.get("POT, distance, forward and backward")
    print(f"\nn = {n:,}, k = {slices:,}, d = {dim}\n")
    print_header("function", "ms", "times as fast as POT, forward and backward")
    for name, value in times.items():
        ratio = f"{peer / value:.1f}" if peer else "POT is not installed"
        print_row(name, f"{value:.3g}", "" if name.startswith(" ") else ratio)
    if device.type == "cuda":
        print_lower_bound(n, dim, slices, times, device, rounds)


def print_lower_bound(
    n: int, dim: int, slices: int, step_times: dict[str, float], device: torch.device, rounds: int
) -> None:
    """Print the least time of a step with a radix sort, from the times of a copy and products."""
    source, copy = (torch.empty(2**28, device=device) for _ in range(2))  # 1 GiB each
    a = torch.randn(slices, dim, device=device)
    b = torch.randn(dim, n, device=device)
    c = torch.randn(n, slices, device=device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    functions: Functions = {
        "copy": lambda: copy.copy_(source),
        "project": lambda: a @ b,
        "project back": lambda: c @ a,
    }
    times = measure_times(functions, device, rounds)
    torch.set_float32_matmul_precision(before)
    speed = 2 * source.numel() * 4 / times["copy"]  # bytes per millisecond
    sort = n * slices * 68 / speed
    interpolation = n * slices * 16 / speed
    products = times["project"] + times["project back"]
    total = sort + interpolation + products
    print(
        f"\ncopy {speed / 1e9:.2f} TB/s; lower bound: sort {sort:.3f} ms, interpolation "
        f"{interpolation:.3f} ms, products {products:.3f} ms,"
    )
    ratios = ", ".join(
        f"{step_times[f'flow step, {bits} bits'] / total:.2f} at {bits} bits" for bits in (16, 32)
    )
    print(f"together {total:.3f} ms; time of a step over this bound: {ratios}")


def time_isotonic_regression(num_rows: int, row_length: int, rounds: int) -> None:
    """Time the isotonic regression of a release: 10 classes, 16 bases of 144 directions."""
    noise = np.random.default_rng(0).normal(size=(num_rows, row_length))
    values = torch.from_numpy(noise + 0.1 * np.arange(row_length))
    name = "isotonic regression"
    functions: Functions = {name: lambda: isotonic_regression(values)}
    milliseconds = measure_times(functions, torch.device("cpu"), rounds)[name]
    print(f"\n{name} of {num_rows:,} rows of {row_length}, CPU: {milliseconds:.0f} ms")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
        sizes = [(10_000, 784, 1_000)]
    else:
        load = f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
        machine = f"{platform.machine()} CPU, {options.threads} thread(s), {load}"
        sizes = [(4_096, dim, 128) for dim in (8, 784)]
    print(
        f"{machine}, torch {torch.__version__}, numpy {np.__version__}, "
        f"POT {ot.__version__ if ot else 'none'}, float32"
    )
    for n, dim, slices in sizes:
        compare(n, dim, slices, device, options.rounds)
    if device.type != "cuda":
        time_isotonic_regression(23_040, 50, options.rounds)


if __name__ == "__main__":
    main()
