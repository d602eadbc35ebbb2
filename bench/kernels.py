"""The package's Triton kernels against the plain PyTorch form of the same function, on a GPU.

    python bench/kernels.py [--seconds 3]

Each row times one function at a size that default settings use on a GPU, once with the kernels
and once without them, in turns, in the same process. A function is captured into a CUDA graph where
it can be, as training runs capture it, so that the time to launch operators does not count; the
column `graph` says whether it was. A kernel stays in the package if it makes its function at least
1.3 times as fast; `bench/RESULTS.md` has the figures.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from environment import format_environment, make_parser, print_header, print_row
from torch.func import vmap

from privot.components.critic_training import init_state, train_critic
from privot.nets.conv_block import apply_conv_block, autocast_half
from privot.nets.flat_weights import adam_step
from privot.nets.functional_critic import Critic
from privot.nets.tiny_generator import TinyGenerator
from privot.privacy.clipping import sum_clipped_rows
from privot.transport.costs import compute_l1_distances, compute_l1_gradient
from privot.transport.entropic import solve_sinkhorn

DISPATCHERS = {  # modules that choose between a kernel and its plain form
    "adam": "privot.nets.flat_weights",
    "batched_conv": "privot.nets.vmap_conv",
    "conv_block": "privot.nets.conv_block",
    "clipped_sum": "privot.privacy.clipping",
    "l1_cost": "privot.transport.costs",
}
HOST_DECISIONS = "to tolerance"  # the host reads a tensor in between, so there is no graph of it
BATCH = 32
CLASSES = 10


@contextlib.contextmanager
def disable_kernels(*names: str) -> Iterator[None]:
    """Make the modules of these kernels use their plain form."""
    with contextlib.ExitStack() as stack:
        for name in names:
            module = importlib.import_module(DISPATCHERS[name])
            stack.enter_context(mock.patch.object(module, "kernels_available", return_value=False))
        yield


def capture(function: Callable[[], Any]) -> Callable[[], Any]:
    """Warm a function up, capture it into a CUDA graph, and return the replay of the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def measure_seconds_per_call(function: Callable[[], Any], seconds: float) -> float:
    """Return the median time of a call, measured with CUDA events after a warm-up."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    times: list[float] = []
    while time.perf_counter() - start < seconds or len(times) < 5:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def build_conv_block_case(width: int, channels: int, side: int, padding: int) -> Callable[[], Any]:
    """One block of the private set's ConvNets for 500 images, forward and backward."""
    x = torch.rand(500, channels, side, side, device="cuda", requires_grad=True)
    weight = torch.randn(width, channels, 3, 3, device="cuda")
    bias, gain, shift = torch.rand(3, width, device="cuda")

    def run() -> None:
        with autocast_half(x.device):
            maps = apply_conv_block(x, weight, bias, gain, shift, padding)
        torch.autograd.grad(maps.float().square().sum(), x)

    return run


def build_critic_case(num_critics: int, channels: int) -> Callable[[], Any]:
    """One training step of many WGAN-GP critics, as `gs-wgan` runs it."""
    critic = Critic((1, 28, 28), CLASSES, channels)
    tiny = TinyGenerator((1, 28, 28), CLASSES)
    rng = torch.Generator().manual_seed(0)
    state = init_state(critic, tiny, num_critics, rng, identical=False)
    state = {name: values.contiguous().cuda() for name, values in state.items()}
    images = torch.rand(num_critics, 60, 1, 28, 28, device="cuda")
    labels = torch.randint(CLASSES, (num_critics, 60), device="cuda")
    fakes = torch.rand(CLASSES, BATCH, 1, 28, 28, device="cuda")
    step = vmap(train_critic, in_dims=(0, 0, 0, *(None for _ in range(7))))
    fractions, mixing = torch.rand(2, 1, BATCH, device="cuda")
    fake_index = torch.randint(BATCH, (1, BATCH), device="cuda")
    step_number = torch.zeros((), device="cuda")

    def run() -> None:
        for chunk in torch.arange(num_critics, device="cuda").split(66):
            chunk_state = {name: values[chunk] for name, values in state.items()}
            step(
                images[chunk],
                labels[chunk],
                chunk_state,
                critic,
                fakes,
                fractions,
                fake_index,
                mixing,
                step_number,
                1e-4,
            )

    return run


def build_adam_case(num_critics: int, num_weights: int) -> Callable[[], Any]:
    """One Adam step on the weights of many critics."""
    weights, gradient, mean, square = torch.rand(4, num_critics, num_weights, device="cuda")
    step_number = torch.ones((), device="cuda")
    step = vmap(adam_step, in_dims=(0, 0, 0, 0, None, None))
    return lambda: step(weights, gradient, mean, square, step_number, 1e-4)


def build_clipped_sum_case(rows: int, dim: int) -> Callable[[], Any]:
    """The exact sum of clipped parts in the gate."""
    parts = torch.randn(rows, dim, device="cuda")
    return lambda: sum_clipped_rows(parts, 1.0, 2.0**-30)


def build_l1_case(count: int, other: int, dim: int) -> Callable[[], Any]:
    """The l1 cost and its gradient, as `entropic-gan` needs them."""
    x, y = torch.rand(count, dim, device="cuda"), torch.rand(other, dim, device="cuda")
    weights = torch.rand(count, other, device="cuda")

    def run() -> None:
        compute_l1_distances(x, y)
        compute_l1_gradient(x, y, weights)

    return run


def build_sinkhorn_case(count: int, num_iterations: int | None) -> Callable[[], Any]:
    """Entropic transport between two samples."""
    x, y = torch.rand(2, count, 16, device="cuda")
    cost = torch.cdist(x, y).square()
    return lambda: solve_sinkhorn(cost, 0.1, num_iterations=num_iterations)


def list_cases() -> Iterator[tuple[str, str, tuple[str, ...], Callable[[], Callable[[], Any]]]]:
    """Yield the name of each row, its size, its kernels, and a builder of its function."""
    for channels, side, padding in ((1, 28, 3), (3, 32, 1), (128, 16, 1), (128, 8, 1)):
        size = f"500 x {channels} x {side} x {side}, width 128, padding {padding}"
        build = partial(build_conv_block_case, 128, channels, side, padding)
        yield "conv block", size, ("conv_block",), build
    for channels in (32, 64):
        size = f"1,000 critics, {channels} channels"
        yield "critic step", size, ("batched_conv",), partial(build_critic_case, 1000, channels)
    yield "critic Adam", "66 x 100,000 weights", ("adam",), partial(build_adam_case, 66, 100_000)
    yield "critic Adam", "1,000 x 30,000 weights", ("adam",), partial(build_adam_case, 1000, 30_000)
    for dim in (784, 4_096, 20_000, 100_000):
        yield (
            "clipped sum",
            f"4,000 x {dim:,}",
            ("clipped_sum",),
            partial(build_clipped_sum_case, 4000, dim),
        )
    # The plain iteration of Sinkhorn is chosen through the same check as the l1 cost.
    for count, other, dim in ((256, 256, 784), (2000, 2000, 64)):
        size = f"{count:,} x {other:,} x {dim}"
        yield "l1 cost and gradient", size, ("l1_cost",), partial(build_l1_case, count, other, dim)
    for count, steps in ((2000, 100), (2000, None), (256, None)):
        name = f"Sinkhorn, {f'{steps} iterations' if steps else 'to tolerance'}"
        yield (
            name,
            f"{count:,} x {count:,}",
            ("l1_cost",),
            partial(build_sinkhorn_case, count, steps),
        )


def main() -> None:
    """Print one table row for each case."""
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each timing")
    options = parser.parse_args()
    print(f"\n{format_environment()}\n")
    print_header("function", "size", "graph", "kernel, ms", "plain, ms", "gain")
    for name, size, kernels, build in list_cases():
        torch.cuda.empty_cache()
        is_graph = not name.endswith(HOST_DECISIONS)
        try:
            run = build()
            fused = measure_seconds_per_call(capture(run) if is_graph else run, options.seconds)
            with disable_kernels(*kernels):
                plain = measure_seconds_per_call(capture(run) if is_graph else run, options.seconds)
        except Exception as error:
            print_row(name, size, f"{type(error).__name__}: {error}", "", "", "")
            continue
        figures = (f"{1e3 * fused:.3f}", f"{1e3 * plain:.3f}", f"{plain / fused:.2f}")
        print_row(name, size, "yes" if is_graph else "no", *figures)


if __name__ == "__main__":
    main()
