"""Entropic transport and the city-block cost beside POT and torch, in one process, on this machine: Markdown rows for bench/RESULTS.md.

python bench/entropic.py                   the CPU: b = 1,000, d = 784
python bench/entropic.py --device cuda     a GPU

Points are images in [0, 1] and Laplace answers about such images; the scale of the noise is stated with its epsilon. POT's row is
`ot.solve(cost, reg, reg_type="KL", grad="envelope")`; all rows of a table make value and gradient in x from the same points. With the
check ours stops where weights are right to 1e-5; POT once with its own defaults of sweeps (1,000) and tolerance (1e-9, which single
precision never meets here), and once with the tolerance of ours; so in single and in double precision. Times are the least of several
rounds, all taken in turn; on one thread of a CPU they are processor time, which other programs disturb little.
"""

from __future__ import annotations

import argparse
import functools
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from environment import import_pot
from torch import Tensor

from privot.transport.costs import compute_l1_distances, compute_l1_gradient, l1_cost
from privot.transport.entropic import entropic_loss, likelihood_loss, solve_sinkhorn
from privot.transport.sinkhorn import squared_euclidean_cost

CHECKED = 1e-5


def seconds(ways: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """The least time of each way."""
    alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds + 1):  # the first is for warming up, and can only be slower
        for name, way in ways.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            way()
            if device == "cuda":
                torch.cuda.synchronize()
            best[name] = min(best[name], clock() - start)
    return best


def table(title: str, took: dict[str, float]) -> None:
    first = next(iter(took.values()))
    print(f"\n{title}\n\n| way | ms | times as fast |\n|---|---|---|")
    for name, one in took.items():
        print(f"| {name} | {1e3 * one:.3g} | {first / one:.1f} |", flush=True)


def points(batch: int, dim: int, scale: float, device: str) -> tuple[Tensor, Tensor]:
    """Images in [0, 1], and others with Laplace noise."""
    draws = torch.Generator().manual_seed(0)
    x, y, one, two = torch.rand(4, batch, dim, generator=draws)
    return x.to(device), (y + scale * (two.log() - one.log())).to(device)


def city_blocks(batch: int, dim: int, device: str, rounds: int) -> None:
    for epsilon in (348.0, 80.0, 20.0):
        city_blocks_at(epsilon, batch, dim, device, rounds)


def city_blocks_at(epsilon: float, batch: int, dim: int, device: str, rounds: int) -> None:
    x, y = points(batch, dim, dim / epsilon, device)
    weights = torch.rand(batch, batch, device=device)

    def plain(x: Tensor, y: Tensor) -> Tensor:
        return torch.cdist(x, y, p=1)

    def both(make: Callable[[Tensor, Tensor], Tensor]) -> None:
        moving = x.clone().requires_grad_()
        make(moving, y).backward(weights)

    inside = float(((y > x.amin(0)) & (y < x.amax(0))).float().mean())
    title = f"City-block cost, epsilon {epsilon:g} (scale {dim / epsilon:.3g}; {inside:.0%} of the values of y are in the range of x)"
    forward = {
        "torch.cdist(p=1)": lambda: plain(x, y),
        "distances": captured(lambda: compute_l1_distances(x, y), device),
    }
    table(title, seconds(forward, device, rounds))
    there = {
        "cdist, and back": lambda: both(plain),
        "city_block, and back": lambda: both(l1_cost),
    }
    there["signs alone"] = captured(lambda: compute_l1_gradient(x, y, weights), device)
    table(f"{title}, with the gradient", seconds(there, device, rounds))


def captured(way: Callable[[], Any], device: str) -> Callable[[], Any]:
    """On a GPU as one CUDA graph."""
    if device != "cuda":
        return way
    for _ in range(3):
        way()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    return graph.replay  # type: ignore[no-any-return]


def with_gradient(loss: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    moving = x.clone().requires_grad_()
    value = loss(squared_euclidean_cost(moving, y))
    return value.detach(), torch.autograd.grad(value, moving)[0]


def envelope(ot: Any, temperature: float, cost: Tensor, **given: Any) -> Any:
    return ot.solve(cost, reg=temperature, reg_type="KL", grad="envelope", **given).value


def solvers(batch: int, dim: int, scale: float, device: str, rounds: int, sweeps: int) -> None:
    """Value and gradient in x; squared distances, at the temperature of noise with this scale."""
    ot = import_pot()
    (x, y) = points(batch, dim, scale, device)
    temperature = 2 * 2 * scale**2  # twice the variance

    def both(loss: Callable[[Tensor], Tensor]) -> Any:
        return with_gradient(loss, x, y)

    peer = functools.partial(envelope, ot, temperature)
    same = (
        {"POT, envelope": lambda: both(lambda cost: peer(cost, max_iter=sweeps, tol=0.0))}
        if ot
        else {}
    )
    same["entropic"] = captured(
        lambda: both(lambda cost: entropic_loss(cost, temperature, sweeps)), device
    )
    table(
        f"{sweeps} sweeps, value and gradient, {batch} x {batch}, d = {dim}",
        seconds(same, device, rounds),
    )
    cost = squared_euclidean_cost(x, y)
    alone: dict[str, Callable[[], Any]] = (
        {"POT, the solver alone": lambda: peer(cost, max_iter=sweeps, tol=0.0)} if ot else {}
    )
    alone["entropic, the solver alone"] = captured(
        lambda: solve_sinkhorn(cost, temperature, sweeps), device
    )
    alone["entropic, the solver alone, checked"] = lambda: solve_sinkhorn(
        cost, temperature, tolerance=CHECKED
    )
    table(f"The solver without the cost, {sweeps} sweeps", seconds(alone, device, rounds))


def to_the_end(
    batch: int, dim: int, scale: float, device: str, rounds: int, dtype: torch.dtype
) -> None:
    """Value and gradient in x where each solver stops by itself, and how far they are apart."""
    ot = import_pot()
    (x, y) = (each.to(dtype) for each in points(batch, dim, scale, device))
    temperature = 2 * 2 * scale**2

    def both(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        return with_gradient(loss, x, y)

    peer = functools.partial(envelope, ot, temperature)
    free: dict[str, Callable[[], Any]] = {}
    if ot:
        # POT's error is the length of the vector of a side's absolute errors: at most this where all relative ones are 1e-5
        free["POT, envelope"] = lambda: both(peer)
        free["POT, envelope, stops at 1e-5 too"] = lambda: both(
            lambda cost: peer(cost, tol=CHECKED / batch**0.5)
        )
    free["entropic, checked"] = lambda: both(
        lambda cost: entropic_loss(cost, temperature, tolerance=CHECKED)
    )
    free["likelihood"] = captured(
        lambda: both(lambda cost: likelihood_loss(cost, temperature)), device
    )
    done = solve_sinkhorn(squared_euclidean_cost(x, y), temperature, tolerance=CHECKED)
    name = str(dtype).removeprefix("torch.")
    table(
        f"To the end, {name}: ours after {done.num_iterations} sweeps, weights within {float(done.marginal_error):.1g}",
        seconds(free, device, rounds),
    )
    if ot:
        (value, gradient) = both(lambda cost: entropic_loss(cost, temperature))
        (wanted, theirs) = both(peer)
        apart = (
            float((value - wanted).abs() / wanted.abs()),
            float((gradient - theirs).norm() / theirs.norm()),
        )
        print(
            f"\nValue and gradient (ours to 1e-6, POT to its default) are apart by {apart[0]:.1g} and {apart[1]:.1g}, relatively."
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=784)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweeps", type=int, default=100)
    parser.add_argument("--only", choices=("solvers", "costs"))
    given = parser.parse_args()
    if given.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False  # costs are differences of large numbers
    where = (
        torch.cuda.get_device_name()
        if given.device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} thread(s)"
    )
    print(f"{where}, torch {torch.__version__}, batch {given.batch}, d = {given.dim}")
    if given.only != "costs":
        solvers(given.batch, given.dim, 2.25, given.device, given.rounds, given.sweeps)
        for dtype in (torch.float32, torch.float64):
            to_the_end(given.batch, given.dim, 2.25, given.device, given.rounds, dtype)
    if given.only != "solvers":
        city_blocks(given.batch, given.dim, given.device, given.rounds)


if __name__ == "__main__":
    main()
