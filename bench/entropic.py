"""Entropic transport and the l1 cost compared with POT and torch, in one process.

    python bench/entropic.py                   the CPU: batch 1,000, d = 784
    python bench/entropic.py --device cuda     a GPU

Points are images in [0, 1] and images with Laplace noise; the scale of the noise is printed with
its epsilon. The row of POT is `ot.solve(cost, reg, reg_type="KL", grad="envelope")`. All rows of a
table compute the value and its gradient with respect to x from the same points. With a tolerance,
ours stops when the weights are right to 1e-5. POT runs once with its default number of iterations
(1,000) and tolerance (1e-9, which single precision never reaches here), and once with our
tolerance; both in single and in double precision. Times are the least of several rounds in turn. On
one thread of a CPU they are processor time, which other programs disturb little.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from environment import import_pot, make_parser, print_header, print_row
from torch import Tensor

from privot.transport.costs import compute_l1_distances, compute_l1_gradient, l1_cost
from privot.transport.entropic import entropic_loss, likelihood_loss, solve_sinkhorn
from privot.transport.sinkhorn import squared_euclidean_cost

TOLERANCE = 1e-5
NOISE_SCALE = 2.25
Functions = dict[str, Callable[[], Any]]
Loss = Callable[[Tensor], Tensor]


def measure_seconds(functions: Functions, device: str, rounds: int) -> dict[str, float]:
    """Measure the least time of each function; the first round warms up."""
    is_single_thread = device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if is_single_thread else time.perf_counter
    least = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds + 1):
        for name, function in functions.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            least[name] = min(least[name], clock() - start)
    return least


def print_times(title: str, seconds: dict[str, float]) -> None:
    """Print a table of times, with ratios to the first."""
    first = next(iter(seconds.values()))
    print(f"\n{title}\n")
    print_header("function", "ms", "times as fast")
    for name, value in seconds.items():
        print_row(name, f"{1e3 * value:.3g}", f"{first / value:.1f}")


def sample_points(batch_size: int, dim: int, scale: float, device: str) -> tuple[Tensor, Tensor]:
    """Sample images in [0, 1], and other images with Laplace noise."""
    rng = torch.Generator().manual_seed(0)
    x, y, u, v = torch.rand(4, batch_size, dim, generator=rng)
    return x.to(device), (y + scale * (v.log() - u.log())).to(device)


def compare_l1_costs(epsilon: float, batch_size: int, dim: int, device: str, rounds: int) -> None:
    """Compare the l1 cost with `torch.cdist`, without and with the gradient."""
    scale = dim / epsilon
    x, y = sample_points(batch_size, dim, scale, device)
    weights = torch.rand(batch_size, batch_size, device=device)

    def compute_cdist(x: Tensor, y: Tensor) -> Tensor:
        return torch.cdist(x, y, p=1)

    def run_with_gradient(cost: Callable[[Tensor, Tensor], Tensor]) -> None:
        leaf = x.clone().requires_grad_()
        cost(leaf, y).backward(weights)

    inside = float(((y > x.amin(0)) & (y < x.amax(0))).float().mean())
    title = (
        f"l1 cost, epsilon {epsilon:g} (scale {scale:.3g}; {inside:.0%} of the values of y are in "
        "the range of x)"
    )
    forward: Functions = {
        "torch.cdist(p=1)": lambda: compute_cdist(x, y),
        "distances": capture(lambda: compute_l1_distances(x, y), device),
    }
    print_times(title, measure_seconds(forward, device, rounds))
    both: Functions = {
        "cdist, forward and backward": lambda: run_with_gradient(compute_cdist),
        "l1_cost, forward and backward": lambda: run_with_gradient(l1_cost),
        "gradient alone": capture(lambda: compute_l1_gradient(x, y, weights), device),
    }
    print_times(f"{title}, with the gradient", measure_seconds(both, device, rounds))


def capture(function: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Capture a function into a CUDA graph on a GPU, and return the replay of the graph."""
    if device != "cuda":
        return function
    for _ in range(3):
        function()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    replay: Callable[[], Any] = graph.replay
    return replay


def compute_value_and_gradient(loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a loss of squared distances, and its gradient with respect to x."""
    leaf = x.clone().requires_grad_()
    value = loss(squared_euclidean_cost(leaf, y))
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def compute_pot_loss(ot: Any, temperature: float, cost: Tensor, **options: Any) -> Any:
    """Compute the entropic loss by POT."""
    return ot.solve(cost, reg=temperature, reg_type="KL", grad="envelope", **options).value


def compare_solvers(
    batch_size: int, dim: int, scale: float, device: str, rounds: int, iterations: int
) -> None:
    """Compare a fixed number of iterations; the temperature is that of noise with this scale."""
    ot = import_pot()
    x, y = sample_points(batch_size, dim, scale, device)
    temperature = 2 * 2 * scale**2  # twice the variance
    peer = functools.partial(compute_pot_loss, ot, temperature)

    def run(loss: Loss) -> Any:
        return compute_value_and_gradient(loss, x, y)

    with_gradient: Functions = {}
    if ot:
        with_gradient["POT, envelope"] = lambda: run(
            lambda cost: peer(cost, max_iter=iterations, tol=0.0)
        )
    with_gradient["entropic"] = capture(
        lambda: run(lambda cost: entropic_loss(cost, temperature, iterations)), device
    )
    print_times(
        f"{iterations} iterations, value and gradient, {batch_size} x {batch_size}, d = {dim}",
        measure_seconds(with_gradient, device, rounds),
    )
    cost = squared_euclidean_cost(x, y)
    solvers: Functions = {}
    if ot:
        solvers["POT, the solver alone"] = lambda: peer(cost, max_iter=iterations, tol=0.0)
    solvers["entropic, the solver alone"] = capture(
        lambda: solve_sinkhorn(cost, temperature, iterations), device
    )
    solvers["entropic, the solver alone, to tolerance"] = lambda: solve_sinkhorn(
        cost, temperature, tolerance=TOLERANCE
    )
    print_times(
        f"The solver without the cost, {iterations} iterations",
        measure_seconds(solvers, device, rounds),
    )


def compare_converged(
    batch_size: int, dim: int, scale: float, device: str, rounds: int, dtype: torch.dtype
) -> None:
    """Compare value and gradient where each solver has converged, and print their difference."""
    ot = import_pot()
    x, y = (points.to(dtype) for points in sample_points(batch_size, dim, scale, device))
    temperature = 2 * 2 * scale**2
    peer = functools.partial(compute_pot_loss, ot, temperature)

    def run(loss: Loss) -> tuple[Tensor, Tensor]:
        return compute_value_and_gradient(loss, x, y)

    functions: Functions = {}
    if ot:
        # POT's error is the norm of the absolute errors of one side: at most this where all
        # relative errors are 1e-5.
        pot_tolerance = TOLERANCE / batch_size**0.5
        functions["POT, envelope"] = lambda: run(peer)
        functions["POT, envelope, tolerance 1e-5"] = lambda: run(
            lambda cost: peer(cost, tol=pot_tolerance)
        )
    functions["entropic, to tolerance"] = lambda: run(
        lambda cost: entropic_loss(cost, temperature, tolerance=TOLERANCE)
    )
    functions["likelihood"] = capture(
        lambda: run(lambda cost: likelihood_loss(cost, temperature)), device
    )
    solution = solve_sinkhorn(squared_euclidean_cost(x, y), temperature, tolerance=TOLERANCE)
    name = str(dtype).removeprefix("torch.")
    print_times(
        f"Converged, {name}: ours after {solution.num_iterations} iterations, weights within "
        f"{float(solution.marginal_error):.1g}",
        measure_seconds(functions, device, rounds),
    )
    if ot:
        value, gradient = run(lambda cost: entropic_loss(cost, temperature))
        pot_value, pot_gradient = run(peer)
        value_error = float((value - pot_value).abs() / pot_value.abs())
        gradient_error = float((gradient - pot_gradient).norm() / pot_gradient.norm())
        print(
            "\nRelative difference of ours (to 1e-6) and POT (its default tolerance): "
            f"value {value_error:.1g}, gradient {gradient_error:.1g}."
        )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=784)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--only", choices=("solvers", "costs"))
    options = parser.parse_args()
    device = options.device
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False  # costs are differences of large numbers
        machine = torch.cuda.get_device_name()
    else:
        machine = f"{platform.machine()}, {torch.get_num_threads()} thread(s)"
    print(f"{machine}, torch {torch.__version__}, batch {options.batch_size}, d = {options.dim}")
    sizes = (options.batch_size, options.dim)
    if options.only != "costs":
        compare_solvers(*sizes, NOISE_SCALE, device, options.rounds, options.iterations)
        for dtype in (torch.float32, torch.float64):
            compare_converged(*sizes, NOISE_SCALE, device, options.rounds, dtype)
    if options.only != "solvers":
        for epsilon in (348.0, 80.0, 20.0):
            compare_l1_costs(epsilon, *sizes, device, options.rounds)


if __name__ == "__main__":
    main()
