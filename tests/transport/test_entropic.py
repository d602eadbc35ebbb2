"""Entropic transport as a loss: values and gradients against POT, finite differences and closed forms; the L1 cost; the kernels."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

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


def cloud(count, dim, seed=0, scale=1.0, dtype=torch.float64):
    return (
        scale
        * torch.randn(
            count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
    ).to(dtype)


@pytest.mark.parametrize(
    ("cost", "peer"), [(squared_euclidean_cost, "sqeuclidean"), (l1_cost, "cityblock")]
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0, 20.0])
def test_values_and_gradients_are_those_of_pots_envelope_solver(cost, peer, temperature):
    ot = pytest.importorskip("ot", reason="POT is not installed: pip install 'privot[measures]'")
    x = cloud(60, 4).requires_grad_()
    y = cloud(80, 4, 1, 2.0)
    found = entropic_loss(cost(x, y), temperature, tolerance=1e-11)
    (mine,) = torch.autograd.grad(found, x)
    gaps = x[:, None] - y
    table = gaps.square().sum(-1) if peer == "sqeuclidean" else gaps.abs().sum(-1)
    theirs = ot.solve(
        table, reg=temperature, reg_type="KL", grad="envelope", max_iter=5000, tol=1e-10
    ).value
    (wanted,) = torch.autograd.grad(theirs, x)
    assert float(found.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
    torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "loss",
    [
        lambda cost: entropic_loss(cost, 1.5, tolerance=1e-13),
        lambda cost: likelihood_loss(cost, 1.5),
    ],
    ids=["eot", "nll"],
)
@pytest.mark.parametrize("cost", [squared_euclidean_cost, l1_cost])
def test_gradients_are_those_of_finite_differences(loss, cost):
    y = cloud(7, 3, 1)
    assert torch.autograd.gradcheck(
        lambda x: loss(cost(x, y)), cloud(5, 3).requires_grad_(), eps=1e-6, atol=1e-7
    )


def test_many_problems_at_once_are_each_alone():
    cost = torch.stack(
        [squared_euclidean_cost(cloud(9, 2, seed), cloud(11, 2, seed + 5)) for seed in range(3)]
    ).requires_grad_()
    together = entropic_loss(cost, 0.7, tolerance=1e-12)
    torch.testing.assert_close(
        together, torch.stack([entropic_loss(each, 0.7, tolerance=1e-12) for each in cost])
    )
    torch.testing.assert_close(
        likelihood_loss(cost, 0.7), torch.stack([likelihood_loss(each, 0.7) for each in cost])
    )
    together.sum().backward()
    torch.testing.assert_close(cost.grad.sum(-1), torch.full((3, 9), 1 / 9, dtype=torch.float64))
    torch.testing.assert_close(cost.grad.sum(-2), torch.full((3, 11), 1 / 11, dtype=torch.float64))


@pytest.mark.parametrize("spread", [1.0, 100.0, 3000.0, 100_000.0])
def test_single_precision_holds_however_the_cost_compares_with_the_temperature(spread):
    x = cloud(50, 3, dtype=torch.float32)
    y = cloud(50, 3, 1, dtype=torch.float32)
    cost = squared_euclidean_cost(x, y)
    cost = cost * (spread / cost.max())
    found = solve_sinkhorn(cost, 1.0, tolerance=1e-4, max_iterations=4000)
    assert found.f.isfinite().all()
    plan = found.compute_plan(cost)
    torch.testing.assert_close(plan.sum(0), torch.full((50,), 1 / 50), rtol=1e-3, atol=0)
    if spread <= 100:
        assert float(found.marginal_error) <= 1e-4
        torch.testing.assert_close(plan.sum(1), torch.full((50,), 1 / 50), rtol=1e-3, atol=0)
        assert float(entropic_loss(cost, 1.0)) == pytest.approx(
            float(entropic_transport_cost(cost.double(), 1.0, num_iterations=400)), rel=1e-3
        )


def test_what_passes_the_range_of_the_numbers_goes_on_by_logarithms():
    cost = torch.tensor([[0.0, 1.0, 5000.0], [5000.0, 5000.0, 0.0], [5000.0, 4000.0, 1.0]])
    found = solve_sinkhorn(cost, 1.0, tolerance=1e-4, max_iterations=4000)
    assert found.f.isfinite().all()
    assert float(found.compute_plan(cost)[0, 0]) > 0.2


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0])
def test_the_number_of_sweeps_follows_from_epsilon_alone(epsilon):
    """The worst that a pure epsilon allows: costs whose columns change by epsilon from row to row, in any pattern."""
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        cost = (
            epsilon * torch.randint(2, (30, 30), generator=draws).double()
            + 5 * torch.rand(30, generator=draws).double()
        )
        assert (
            float(
                solve_sinkhorn(
                    cost, 1.0, count_sufficient_iterations(epsilon, max_iterations=10_000)
                ).marginal_error
            )
            < 2e-6
        )


def test_a_fixed_count_and_a_check_agree():
    cost = squared_euclidean_cost(cloud(40, 3), cloud(30, 3, 1))
    exact = solve_sinkhorn(cost, 2.0, tolerance=1e-12)
    fixed = solve_sinkhorn(cost, 2.0, exact.num_iterations)
    torch.testing.assert_close(exact.compute_plan(cost / 2), fixed.compute_plan(cost / 2))
    assert fixed.num_iterations == exact.num_iterations
    assert solve_sinkhorn(cost, 2.0, 3).num_iterations == 3


def plain(monkeypatch):
    monkeypatch.setattr(AndersonAcceleration, "extrapolate", lambda self: None)


def slow(number):
    """Problems of many shapes whose temperature is a large to a small part of the cost."""
    draws = torch.Generator().manual_seed(number)
    n, m = (int(each) for each in torch.randint(10, 80, (2,), generator=draws))
    x = cloud(n, 1 + number % 3, number)
    y = cloud(m, 1 + number % 3, 100 + number, 1.5) + 0.5
    cost = (squared_euclidean_cost if number % 4 else l1_cost)(x, y)
    return cost / cost.mean() / (1.0, 0.3, 0.1, 0.03, 0.01)[number % 5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extrapolated_sweeps_end_where_plain_ones_do_and_are_never_more(dtype, monkeypatch):
    costs = [slow(number).to(dtype) for number in range(20)]
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    mine = [solve_sinkhorn(cost, 1.0, tolerance=tolerance, max_iterations=20_000) for cost in costs]
    plain(monkeypatch)
    wanted = [
        solve_sinkhorn(cost, 1.0, tolerance=tolerance, max_iterations=20_000) for cost in costs
    ]
    for cost, one, other in zip(costs, mine, wanted, strict=True):
        assert one.num_iterations <= other.num_iterations
        assert float(one.marginal_error) <= max(
            tolerance, 1e-6 * float(cost.max()) if dtype == torch.float32 else 0
        )
        gap = (one.f.mean() + one.g.mean()) - (other.f.mean() + other.g.mean())
        assert abs(float(gap)) <= (1e-8 if dtype == torch.float64 else 1e-3)
    assert sum(one.num_iterations for one in mine) < 0.4 * sum(
        other.num_iterations for other in wanted
    )


@pytest.mark.parametrize(
    "astray",
    [lambda end: end + 1000 * torch.randn_like(end), lambda end: end / 0, lambda end: 1.5 * end],
)
@pytest.mark.parametrize("way", [KernelIteration, LogIteration])
def test_a_wrong_extrapolation_is_taken_back_and_costs_little(astray, way, monkeypatch):
    cost = slow(3)
    reduced = cost - cost.amin(1, keepdim=True)
    start = torch.zeros_like(reduced[0])
    torch.manual_seed(0)

    def planted(self):
        newest = self.iterates[(self.num_stored - 1) % len(self.iterates)]
        return astray(newest) if self.num_stored > 1 else None

    monkeypatch.setattr(AndersonAcceleration, "extrapolate", planted)
    mine, done = run_iterations(way(reduced), start, None, 1e-8, 20_000)
    plain(monkeypatch)
    wanted, least = run_iterations(way(reduced), start, None, 1e-8, 20_000)
    assert float(mine.marginal_error) <= 1e-8
    assert float(mine.dual_value) == pytest.approx(float(wanted.dual_value), abs=1e-8)
    assert least < done <= least + INNER_ITERATIONS * (2 + math.log2(least / INNER_ITERATIONS))


@pytest.mark.parametrize("way", [KernelIteration, LogIteration])
def test_costs_of_hundreds_of_temperatures_are_settled_in_single_precision(way):
    """Potentials as large as such costs would be rounded by 3e-5, and a check at 1e-5 never be passed."""
    draws = torch.Generator().manual_seed(0)
    x, y, one, two = torch.rand(4, 100, 784, generator=draws)
    scaled = squared_euclidean_cost(x, y + 2.25 * (two.log() - one.log())) / 20.25
    assert float(scaled.min()) > 250
    found = solve_sinkhorn(scaled, 1.0, tolerance=1e-5)
    assert float(found.marginal_error) <= 1e-5
    assert found.num_iterations <= 25
    rows = 100 * found.compute_plan(scaled).double().sum(1)
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=1e-5, atol=0)
    reduced = scaled - found.offsets[0][:, None] - found.offsets[1]
    assert (
        float(run_iterations(way(reduced), torch.zeros(100), None, 1e-5, 50)[0].marginal_error)
        <= 1e-5
    )
    assert (
        float(LogIteration(scaled).run(torch.zeros(100), 100).marginal_error) > 1e-5
    )  # what it would be without


def test_steps_that_are_linear_lead_to_their_end_at_once():
    step = torch.diag(torch.tensor([0.9, 0.6, -0.5], dtype=torch.float64))
    end = cloud(3, 1)[:, 0]
    steps = AndersonAcceleration(end)
    x = torch.zeros(3, dtype=torch.float64)
    assert steps.extrapolate() is None
    for _ in range(4):
        before = x
        x = end + step @ (x - end)
        (told,) = steps.record(before, x, x.sum())
        assert told == pytest.approx(float(x.sum()))
    torch.testing.assert_close(steps.extrapolate(), end, rtol=1e-5, atol=1e-5)
    steps.reset()
    assert steps.extrapolate() is None


def test_the_likelihood_is_a_lower_bound():
    for seed in range(5):
        cost = squared_euclidean_cost(cloud(20, 2, seed), cloud(25, 2, seed + 9))
        assert (
            float(likelihood_loss(cost, 0.8))
            <= float(entropic_loss(cost, 0.8, tolerance=1e-10)) + 1e-9
        )


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_a_gaussian_shrinks_by_half_the_temperature(times):
    """One dimension: the best variance is t^2 - lambda / 2, which is the clean one if lambda is twice the noise's variance."""
    noise = 1.0
    clean = 1.0
    ranks = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    shape = torch.special.ndtri(ranks)[:, None]
    y = math.sqrt(clean + noise) * shape
    best = max(0.0, clean + noise - times * noise)

    def slope(variance):
        scale = torch.tensor(math.sqrt(variance), dtype=torch.float64, requires_grad=True)
        entropic_loss(
            squared_euclidean_cost(scale * shape, y), times * 2 * noise, tolerance=1e-8
        ).backward()
        return float(scale.grad)

    assert slope(best + 0.05) > 0
    if best:
        assert slope(best - 0.05) < 0


def quantiles(law, places, count):
    """Equally likely numbers of a law [n] on places [n]: [count]."""
    at = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return places[torch.searchsorted(law.cumsum(0) / law.sum(), at)]


@pytest.mark.parametrize(
    ("cost", "temperature", "least"),
    [(squared_euclidean_cost, 2 * 0.3**2, 0.012), (l1_cost, 0.2, 0.002)],
    ids=["gaussian", "laplace"],
)
def test_two_bumps_come_back_from_their_noise_at_its_temperature_and_no_other(
    cost, temperature, least
):
    """Free weights on a line: the row sums of the gradient are the next weights, which is expectation and maximisation."""
    line = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)
    fine = torch.linspace(-4, 4, 8001, dtype=torch.float64)
    clean = torch.exp(-(((line + 0.6) / 0.15) ** 2) / 2) + 0.6 * torch.exp(
        -(((line - 0.5) / 0.2) ** 2) / 2
    )
    clean /= clean.sum()
    noise = torch.exp(-cost(line[:, None], fine[:, None]) / temperature)
    sent = quantiles(clean @ (noise / noise.sum(1, keepdim=True)), fine, 500)
    table = cost(line[:, None], sent[:, None])

    def found(times, steps=100):
        weights = torch.full_like(clean, 1 / 31)
        for _ in range(steps):
            # weights p are a part of the cost: sum p exp(-c/t) = mean exp(-(c - t log(31 p))/t)
            shifted = (
                table - times * temperature * (31 * weights).clamp(min=1e-300).log()[:, None]
            ).requires_grad_()
            (gradient,) = torch.autograd.grad(
                likelihood_loss(shifted, times * temperature), shifted
            )
            weights = gradient.sum(1)
        return float((weights.cumsum(0) - clean.cumsum(0)).abs().sum() * (line[1] - line[0]))  # W1

    noisy = float((sent - quantiles(clean, line, 500)).abs().mean())
    assert noisy == pytest.approx(0.115, abs=0.015)
    assert found(1.0, 600) < least
    assert found(0.5) > 0.06
    assert found(2.0) > 0.06


@pytest.mark.parametrize("dim", [1, 2, 16, 17, 60])
@pytest.mark.parametrize("noise", [0.0, 0.3, 5.0])
def test_the_city_block_cost_is_that_of_its_formula(dim, noise):
    x = torch.rand(
        23, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    y = (x.detach()[torch.arange(31) % 23] + cloud(31, dim, 2, noise)).requires_grad_()
    weights = cloud(23, 31, 3)
    wanted = torch.cdist(x, y, p=1)
    torch.testing.assert_close(l1_cost(x, y), wanted)
    for one, other in zip(
        torch.autograd.grad(l1_cost(x, y), (x, y), weights),
        torch.autograd.grad(wanted, (x, y), weights),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    single = compute_l1_distances(x.detach().float(), y.detach().float())
    torch.testing.assert_close(single.double(), wanted.detach(), rtol=1e-5, atol=1e-5)


def test_equal_coordinates_pull_nowhere_and_ranges_may_be_points():
    x = torch.zeros(5, 40)
    y = cloud(6, 40, 1, dtype=torch.float32)
    x[:, ::2] = torch.rand(5, 20, generator=torch.Generator().manual_seed(0))
    y[0] = x[2]
    y[1, :3] = 0.0
    weights = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(compute_l1_distances(x, y), torch.cdist(x, y, p=1))
    torch.testing.assert_close(
        compute_l1_gradient(x, y, weights), ((x[:, None] - y).sign() * weights[..., None]).sum(1)
    )


def test_batches_of_points_have_batches_of_costs():
    x = cloud(2 * 5, 20).view(2, 5, 20)
    y = cloud(7, 20, 1)
    torch.testing.assert_close(l1_cost(x, y), torch.cdist(x, y, p=1))


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
def test_the_kernels_are_right_in_tritons_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_what_a_cpu_does():
    x = torch.rand(100, 30)
    y = 2 * cloud(120, 30, 1, dtype=torch.float32)
    for cost in (squared_euclidean_cost, l1_cost):
        values = []
        gradients = []
        for device, count in (("cpu", None), ("cuda", None), ("cuda", 60)):
            moving = x.detach().clone().to(device).requires_grad_()
            lost = entropic_loss(cost(moving, y.to(device)), 4.0, count)
            lost.backward()
            values.append(float(lost))
            gradients.append(moving.grad.cpu())
        assert values[1] == pytest.approx(values[0], rel=1e-5)
        assert values[2] == pytest.approx(values[0], rel=1e-4)
        for each in gradients[1:]:
            torch.testing.assert_close(each, gradients[0], rtol=1e-3, atol=1e-5)
