"""Entropic transport as a loss: values and gradients against POT, finite differences and closed forms; the L1 cost; the kernels."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch
from support.make_points import make_points

from privot.transport.anderson import AndersonAcceleration
from privot.transport.convergence import run_iterations
from privot.transport.costs import compute_l1_distances, compute_l1_gradient, l1_cost
from privot.transport.entropic import (
    count_sufficient_iterations,
    entropic_loss,
    likelihood_loss,
    solve_sinkhorn,
)
from privot.transport.sinkhorn import entropic_transport_cost, squared_euclidean_cost
from privot.transport.sinkhorn_iterations import INNER_ITERATIONS, KernelIteration, LogIteration

pytestmark = pytest.mark.usefixtures("one_thread")
assert_close = torch.testing.assert_close
both_costs = pytest.mark.parametrize("cost", [squared_euclidean_cost, l1_cost])
both_iterations = pytest.mark.parametrize("iteration", [KernelIteration, LogIteration])


def make_uniform(*shape, seed=0, dtype=torch.float64):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@both_costs
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0, 20.0])
def test_values_and_gradients_are_those_of_pots_envelope_solver(cost, temperature):
    ot = pytest.importorskip("ot", reason="POT is not installed: pip install 'privot[measures]'")
    x = make_points(60, 4).requires_grad_()
    y = make_points(80, 4, seed=1, scale=2.0)
    found = entropic_loss(cost(x, y), temperature, tolerance=1e-11)
    gaps = x[:, None] - y
    table = gaps.abs().sum(-1) if cost is l1_cost else gaps.square().sum(-1)
    options = {"reg_type": "KL", "grad": "envelope", "max_iter": 5000, "tol": 1e-10}
    expected = ot.solve(table, reg=temperature, **options).value
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    gradients = (torch.autograd.grad(value, x)[0] for value in (found, expected))
    assert_close(*gradients, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "loss",
    [
        lambda cost: entropic_loss(cost, 1.5, tolerance=1e-13),
        lambda cost: likelihood_loss(cost, 1.5),
    ],
    ids=["eot", "nll"],
)
@both_costs
def test_gradients_are_those_of_finite_differences(loss, cost):
    x = make_points(5, 3).requires_grad_()
    y = make_points(7, 3, seed=1)
    assert torch.autograd.gradcheck(lambda x: loss(cost(x, y)), x, eps=1e-6, atol=1e-7)


def test_a_batch_of_problems_is_solved_one_by_one():
    x, y = (
        torch.stack([make_points(count, 2, seed=seed) for seed in range(first, first + 3)])
        for count, first in ((9, 0), (11, 5))
    )
    cost = squared_euclidean_cost(x, y).requires_grad_()

    def compute_loss(cost):
        return entropic_loss(cost, 0.7, tolerance=1e-12)

    together = compute_loss(cost)
    assert_close(together, torch.stack([compute_loss(each) for each in cost]))
    apart = [likelihood_loss(each, 0.7) for each in cost]
    assert_close(likelihood_loss(cost, 0.7), torch.stack(apart))
    together.sum().backward()
    assert_close(cost.grad.sum(-1), torch.full((3, 9), 1 / 9, dtype=torch.float64))
    assert_close(cost.grad.sum(-2), torch.full((3, 11), 1 / 11, dtype=torch.float64))


@pytest.mark.parametrize("ratio", [1.0, 100.0, 3000.0, 100_000.0])
def test_single_precision_holds_however_the_cost_compares_with_the_temperature(ratio):
    x, y = (make_points(50, 3, seed=seed, dtype=torch.float32) for seed in (0, 1))
    cost = squared_euclidean_cost(x, y)
    cost = cost * (ratio / cost.max())
    found = solve_sinkhorn(cost, 1.0, tolerance=1e-4, max_iterations=2000)
    assert found.f.isfinite().all()
    plan = found.compute_plan(cost)
    assert_close(plan.sum(0), torch.full((50,), 1 / 50), rtol=1e-3, atol=0)
    if ratio <= 100:
        assert float(found.marginal_error) <= 1e-4
        assert_close(plan.sum(1), torch.full((50,), 1 / 50), rtol=1e-3, atol=0)
        expected = float(entropic_transport_cost(cost.double(), 1.0, num_iterations=400))
        assert float(entropic_loss(cost, 1.0)) == pytest.approx(expected, rel=1e-3)


def test_beyond_the_range_of_the_numbers_logarithms_are_used():
    cost = torch.tensor([[0.0, 1.0, 5000.0], [5000.0, 5000.0, 0.0], [5000.0, 4000.0, 1.0]])
    found = solve_sinkhorn(cost, 1.0, tolerance=1e-4, max_iterations=2000)
    assert found.f.isfinite().all()
    assert float(found.compute_plan(cost)[0, 0]) > 0.2


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0])
def test_the_number_of_iterations_follows_from_epsilon_alone(epsilon):
    """The worst that a pure epsilon allows: costs whose columns change by epsilon from row to row, in any pattern."""
    count = count_sufficient_iterations(epsilon, max_iterations=10_000)
    for seed in range(20):
        cost = epsilon * make_uniform(30, 30, seed=seed).round()
        cost = cost + 5 * make_uniform(30, seed=100 + seed)
        assert float(solve_sinkhorn(cost, 1.0, count).marginal_error) < 2e-6


def test_a_fixed_count_and_a_check_agree():
    cost = squared_euclidean_cost(make_points(40, 3), make_points(30, 3, seed=1))
    exact = solve_sinkhorn(cost, 2.0, tolerance=1e-12)
    fixed = solve_sinkhorn(cost, 2.0, exact.num_iterations)
    assert_close(exact.compute_plan(cost / 2), fixed.compute_plan(cost / 2))
    assert fixed.num_iterations == exact.num_iterations
    assert solve_sinkhorn(cost, 2.0, 3).num_iterations == 3


# Anderson acceleration


@pytest.fixture
def disable_extrapolation(monkeypatch):
    return lambda: monkeypatch.setattr(AndersonAcceleration, "extrapolate", lambda self: None)


def make_slow_problem(number):
    """Problems of many shapes whose temperature is a large to a small part of the cost."""
    generator = torch.Generator().manual_seed(number)
    n, m = torch.randint(10, 80, (2,), generator=generator).tolist()
    x = make_points(n, 1 + number % 3, seed=number)
    y = make_points(m, 1 + number % 3, seed=100 + number, scale=1.5, shift=0.5)
    cost = (squared_euclidean_cost if number % 4 else l1_cost)(x, y)
    return cost / cost.mean() / (1.0, 0.3, 0.1, 0.03, 0.01)[number % 5]


@pytest.mark.parametrize(
    ("dtype", "tolerance", "gap"), [(torch.float64, 1e-9, 1e-8), (torch.float32, 1e-4, 1e-3)]
)
def test_extrapolated_iterations_end_where_plain_ones_do_and_are_never_more(
    dtype, tolerance, gap, disable_extrapolation
):
    costs = [make_slow_problem(number).to(dtype) for number in range(20)]

    def solve_all():
        return [
            solve_sinkhorn(cost, 1.0, tolerance=tolerance, max_iterations=20_000) for cost in costs
        ]

    fast = solve_all()
    disable_extrapolation()
    plain = solve_all()
    for cost, one, other in zip(costs, fast, plain, strict=True):
        assert one.num_iterations <= other.num_iterations
        rounding = 1e-6 * float(cost.max()) if dtype == torch.float32 else 0
        assert float(one.marginal_error) <= max(tolerance, rounding)
        values = (float(each.f.mean() + each.g.mean()) for each in (one, other))
        assert next(values) == pytest.approx(next(values), abs=gap)
    total, plain_total = (sum(each.num_iterations for each in done) for done in (fast, plain))
    assert total < 0.4 * plain_total


@pytest.mark.parametrize(
    "mislead",
    [lambda end: end + 1000 * torch.randn_like(end), lambda end: end / 0, lambda end: 1.5 * end],
)
@both_iterations
def test_a_wrong_extrapolation_is_reverted_and_costs_little(
    mislead, iteration, monkeypatch, disable_extrapolation
):
    cost = make_slow_problem(3)
    reduced = cost - cost.amin(1, keepdim=True)

    def run():
        start = torch.zeros_like(reduced[0])
        return run_iterations(iteration(reduced), start, None, 1e-8, 20_000)

    def extrapolate_wrongly(self):
        newest = self.iterates[(self.num_stored - 1) % len(self.iterates)]
        return mislead(newest) if self.num_stored > 1 else None

    monkeypatch.setattr(AndersonAcceleration, "extrapolate", extrapolate_wrongly)
    misled, count = run()
    disable_extrapolation()
    plain, least = run()
    assert float(misled.marginal_error) <= 1e-8
    assert float(misled.dual_value) == pytest.approx(float(plain.dual_value), abs=1e-8)
    assert least < count <= least + INNER_ITERATIONS * (2 + math.log2(least / INNER_ITERATIONS))


def test_linear_steps_lead_to_their_end_at_once():
    step = torch.diag(torch.tensor([0.9, 0.6, -0.5], dtype=torch.float64))
    end = make_points(3)
    steps = AndersonAcceleration(end)
    x = torch.zeros(3, dtype=torch.float64)
    assert steps.extrapolate() is None
    for _ in range(4):
        before = x
        x = end + step @ (x - end)
        (scalar,) = steps.record(before, x, x.sum())
        assert scalar == pytest.approx(float(x.sum()))
    assert_close(steps.extrapolate(), end, rtol=1e-5, atol=1e-5)
    steps.reset()
    assert steps.extrapolate() is None


@both_iterations
def test_costs_of_hundreds_of_temperatures_are_solved_in_single_precision(iteration):
    """Potentials as large as such costs would be rounded by 3e-5, and a check at 1e-5 never be passed."""
    x, y, one, two = make_uniform(4, 100, 784, dtype=torch.float32)
    scaled = squared_euclidean_cost(x, y + 2.25 * (two.log() - one.log())) / 20.25
    assert float(scaled.min()) > 250
    found = solve_sinkhorn(scaled, 1.0, tolerance=1e-5)
    assert float(found.marginal_error) <= 1e-5
    assert found.num_iterations <= 25
    rows = 100 * found.compute_plan(scaled).double().sum(1)
    assert_close(rows, torch.ones_like(rows), rtol=1e-5, atol=0)
    reduced = scaled - found.offsets[0][:, None] - found.offsets[1]
    result, _ = run_iterations(iteration(reduced), torch.zeros(100), None, 1e-5, 50)
    assert float(result.marginal_error) <= 1e-5
    # what it would be without
    assert float(LogIteration(scaled).run(torch.zeros(100), 100).marginal_error) > 1e-5


# What the losses find


def test_the_likelihood_is_a_lower_bound():
    for seed in range(5):
        x, y = make_points(20, 2, seed=seed), make_points(25, 2, seed=seed + 9)
        cost = squared_euclidean_cost(x, y)
        bound = float(entropic_loss(cost, 0.8, tolerance=1e-10))
        assert float(likelihood_loss(cost, 0.8)) <= bound + 1e-9


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_a_gaussian_shrinks_by_half_the_temperature(ratio):
    """One dimension, noise and clean data of variance 1: the best variance is 2 - lambda / 2, which is the clean one if lambda is 2."""
    shape = torch.special.ndtri((torch.arange(200, dtype=torch.float64) + 0.5) / 200)[:, None]
    best = 2.0 - ratio

    def differentiate(variance):
        scale = torch.tensor(math.sqrt(variance), dtype=torch.float64, requires_grad=True)
        cost = squared_euclidean_cost(scale * shape, math.sqrt(2) * shape)
        entropic_loss(cost, 2 * ratio, tolerance=1e-8).backward()
        return float(scale.grad)

    assert differentiate(best + 0.05) > 0
    if best:
        assert differentiate(best - 0.05) < 0


def compute_quantiles(law, values, count):
    """Equally likely numbers of a law [n] on values [n]: [count]."""
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return values[torch.searchsorted(law.cumsum(0) / law.sum(), levels)]


@pytest.mark.parametrize(
    ("cost", "temperature", "least"),
    [(squared_euclidean_cost, 2 * 0.3**2, 0.012), (l1_cost, 0.2, 0.002)],
    ids=["gaussian", "laplace"],
)
def test_two_bumps_come_back_from_their_noise_at_its_temperature_and_no_other(
    cost, temperature, least
):
    """Free weights on a line: the row sums of the gradient are the next weights, which is expectation and maximization."""
    line = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)
    fine = torch.linspace(-4, 4, 8001, dtype=torch.float64)
    clean = (((line + 0.6) / 0.15) ** 2 / -2).exp() + 0.6 * (((line - 0.5) / 0.2) ** 2 / -2).exp()
    clean /= clean.sum()
    noise = torch.exp(-cost(line[:, None], fine[:, None]) / temperature)
    sent = compute_quantiles(clean @ (noise / noise.sum(1, keepdim=True)), fine, 500)
    table = cost(line[:, None], sent[:, None])

    def recover(ratio, steps=100):
        """The distance W1 from the clean law."""
        weights = torch.full_like(clean, 1 / 31)
        t = ratio * temperature
        for _ in range(steps):
            # weights p are a part of the cost: sum p exp(-c/t) = mean exp(-(c - t log(31 p))/t)
            logarithms = (31 * weights).clamp(min=1e-300).log()
            shifted = (table - t * logarithms[:, None]).requires_grad_()
            (gradient,) = torch.autograd.grad(likelihood_loss(shifted, t), shifted)
            weights = gradient.sum(1)
        return float((weights.cumsum(0) - clean.cumsum(0)).abs().sum() * (line[1] - line[0]))

    noisy = float((sent - compute_quantiles(clean, line, 500)).abs().mean())
    assert noisy == pytest.approx(0.115, abs=0.015)
    assert recover(1.0, 600) < least
    assert recover(0.5) > 0.06
    assert recover(2.0) > 0.06


# The L1 cost


@pytest.mark.parametrize("dim", [1, 2, 16, 17, 60])
@pytest.mark.parametrize("noise", [0.0, 0.3, 5.0])
def test_the_l1_cost_is_that_of_its_formula(dim, noise):
    x = make_uniform(23, dim).requires_grad_()
    y = x.detach()[torch.arange(31) % 23] + make_points(31, dim, seed=2, scale=noise)
    y.requires_grad_()
    weights = make_points(23, 31, seed=3)
    expected = torch.cdist(x, y, p=1)
    assert_close(l1_cost(x, y), expected)
    assert_close(
        torch.autograd.grad(l1_cost(x, y), (x, y), weights),
        torch.autograd.grad(expected, (x, y), weights),
    )
    single = compute_l1_distances(x.detach().float(), y.detach().float())
    assert_close(single.double(), expected.detach(), rtol=1e-5, atol=1e-5)


def test_equal_coordinates_have_no_gradient_and_ranges_may_be_points():
    x = torch.zeros(5, 40)
    y = make_points(6, 40, seed=1, dtype=torch.float32)
    x[:, ::2] = make_uniform(5, 20, dtype=torch.float32)
    y[0] = x[2]
    y[1, :3] = 0.0
    weights = make_uniform(5, 6, seed=1, dtype=torch.float32)
    assert_close(compute_l1_distances(x, y), torch.cdist(x, y, p=1))
    expected = ((x[:, None] - y).sign() * weights[..., None]).sum(1)
    assert_close(compute_l1_gradient(x, y, weights), expected)
    batches = make_points(2, 5, 20)
    points = make_points(7, 20, seed=1)
    assert_close(l1_cost(batches, points), torch.cdist(batches, points, p=1))


# Kernels


INTERPRETED = """
import contextlib
import types
import torch
import privot.transport.entropic as solver
import privot.transport.kernels.sinkhorn as fused
from privot.transport.entropic import solve_sinkhorn
from privot.transport.kernels.l1_cost import fused_l1_cost, fused_l1_gradient
fused.BLOCK_COLUMNS = 16  # so that a row is several of them
draws = torch.Generator().manual_seed(0)
sizes = (70, 3), (35, 3), (70, 35)
x, y, weights = (torch.randn(*size, generator=draws) for size in sizes)
x[3, 2] = y[5, 2]
torch.testing.assert_close(fused_l1_cost(x, y), torch.cdist(x, y, p=1))
wanted = ((x[:, None] - y).sign() * weights[..., None]).sum(1)
torch.testing.assert_close(fused_l1_gradient(x, y, weights), wanted, rtol=1e-4, atol=1e-4)
cost = 2 * torch.rand(13, 35, generator=draws)
state = fused.FusedIteration(cost)
state.iterate(6)
found = (state.f[:, None] + state.g - cost).exp() / (13 * 35)
torch.testing.assert_close(found.sum(0), torch.full((35,), 1 / 35))
error = float((13 * found.sum(1) - 1).abs().max())
assert abs(float(state.compute_marginal_error()) - error) < 1e-5
wanted = solve_sinkhorn(cost.double(), 1.0).compute_plan(cost.double())
torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-7)

# with a convergence check: graphs that do again what was done while they were captured
torch.cuda.CUDAGraph = types.SimpleNamespace
torch.cuda.graph = lambda graph: contextlib.nullcontext()
torch.cuda.synchronize = lambda device: None
cost = 400 + 10 * torch.rand(4, 12, generator=draws)
graphed = fused.GraphedIteration.for_shape(cost.shape, cost.device, 5)

def replay():
    again = graphed.iteration.run(graphed.initial_g, 5)
    for captured, computed in zip(graphed.result, again, strict=True):
        captured.copy_(computed)

graphed.graph.replay = replay
solver.has_kernels_for = lambda x: x.dtype == torch.float32
found = solve_sinkhorn(cost, 1.0, tolerance=1e-5)
wanted = solve_sinkhorn(cost.double(), 1.0, tolerance=1e-5)
counts = found.num_iterations, wanted.num_iterations
assert 15 < counts[0] == counts[1], counts
assert float(found.marginal_error) <= 1e-5
plans = found.compute_plan(cost).double(), wanted.compute_plan(cost.double())
torch.testing.assert_close(*plans, rtol=1e-4, atol=1e-8)
short = solve_sinkhorn(cost, 1.0, tolerance=1e-5, max_iterations=7)
counted = solve_sinkhorn(cost, 1.0, 7)
assert short.num_iterations == 7
torch.testing.assert_close(short.compute_plan(cost), counted.compute_plan(cost))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no Triton here to interpret the kernels"
)
def test_the_kernels_are_right_in_the_interpreter_of_triton():
    command = [sys.executable, "-c", INTERPRETED]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@both_costs
def test_a_gpu_gives_what_a_cpu_does(cost):
    x = torch.rand(100, 30)
    y = make_points(120, 30, seed=1, scale=2.0, dtype=torch.float32)
    values = []
    gradients = []
    for device, count in (("cpu", None), ("cuda", None), ("cuda", 60)):
        moving = x.clone().to(device).requires_grad_()
        loss = entropic_loss(cost(moving, y.to(device)), 4.0, count)
        loss.backward()
        values.append(float(loss.detach()))
        gradients.append(moving.grad.cpu())
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert values[2] == pytest.approx(values[0], rel=1e-4)
    for gradient in gradients[1:]:
        assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-5)
