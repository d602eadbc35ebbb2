"""Entropic transport as a loss: values and gradients against POT, finite differences and closed forms; the city-block cost; the kernels."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

import privot.transport.entropic as solver
from privot.transport.anderson import Extrapolation
from privot.transport.costs import city_block, distances, signs
from privot.transport.entropic import entropic, likelihood, settle, sweeps
from privot.transport.sinkhorn import squared_euclidean, transport
from privot.transport.sinkhorn_iterations import STRIDE, Logarithms, Products

pytestmark = pytest.mark.usefixtures("one_thread")


def cloud(count, dim, seed=0, scale=1.0, dtype=torch.float64):
    return (
        scale
        * torch.randn(
            count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
    ).to(dtype)


@pytest.mark.parametrize(
    ("cost", "peer"), [(squared_euclidean, "sqeuclidean"), (city_block, "cityblock")]
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0, 20.0])
def test_values_and_gradients_are_those_of_pots_envelope_solver(cost, peer, temperature):
    ot = pytest.importorskip("ot", reason="POT is not installed: pip install 'privot[measures]'")
    x = cloud(60, 4).requires_grad_()
    y = cloud(80, 4, 1, 2.0)
    found = entropic(cost(x, y), temperature, tolerance=1e-11)
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
    [lambda cost: entropic(cost, 1.5, tolerance=1e-13), lambda cost: likelihood(cost, 1.5)],
    ids=["eot", "nll"],
)
@pytest.mark.parametrize("cost", [squared_euclidean, city_block])
def test_gradients_are_those_of_finite_differences(loss, cost):
    y = cloud(7, 3, 1)
    assert torch.autograd.gradcheck(
        lambda x: loss(cost(x, y)), cloud(5, 3).requires_grad_(), eps=1e-6, atol=1e-7
    )


def test_many_problems_at_once_are_each_alone():
    cost = torch.stack(
        [squared_euclidean(cloud(9, 2, seed), cloud(11, 2, seed + 5)) for seed in range(3)]
    ).requires_grad_()
    together = entropic(cost, 0.7, tolerance=1e-12)
    torch.testing.assert_close(
        together, torch.stack([entropic(each, 0.7, tolerance=1e-12) for each in cost])
    )
    torch.testing.assert_close(
        likelihood(cost, 0.7), torch.stack([likelihood(each, 0.7) for each in cost])
    )
    together.sum().backward()
    torch.testing.assert_close(cost.grad.sum(-1), torch.full((3, 9), 1 / 9, dtype=torch.float64))
    torch.testing.assert_close(cost.grad.sum(-2), torch.full((3, 11), 1 / 11, dtype=torch.float64))


@pytest.mark.parametrize("spread", [1.0, 100.0, 3000.0, 100_000.0])
def test_single_precision_holds_however_the_cost_compares_with_the_temperature(spread):
    x = cloud(50, 3, dtype=torch.float32)
    y = cloud(50, 3, 1, dtype=torch.float32)
    cost = squared_euclidean(x, y)
    cost = cost * (spread / cost.max())
    found = settle(cost, 1.0, tolerance=1e-4, most=4000)
    assert found.first.isfinite().all()
    plan = found.plan(cost)
    torch.testing.assert_close(plan.sum(0), torch.full((50,), 1 / 50), rtol=1e-3, atol=0)
    if spread <= 100:
        assert float(found.error) <= 1e-4
        torch.testing.assert_close(plan.sum(1), torch.full((50,), 1 / 50), rtol=1e-3, atol=0)
        assert float(entropic(cost, 1.0)) == pytest.approx(
            float(transport(cost.double(), 1.0, iterations=400)), rel=1e-3
        )


def test_what_passes_the_range_of_the_numbers_goes_on_by_logarithms():
    cost = torch.tensor([[0.0, 1.0, 5000.0], [5000.0, 5000.0, 0.0], [5000.0, 4000.0, 1.0]])
    found = settle(cost, 1.0, tolerance=1e-4, most=4000)
    assert found.first.isfinite().all()
    assert float(found.plan(cost)[0, 0]) > 0.2


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0])
def test_the_number_of_sweeps_follows_from_epsilon_alone(epsilon):
    """The worst that a pure epsilon allows: costs whose columns change by epsilon from row to row, in any pattern."""
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        cost = (
            epsilon * torch.randint(2, (30, 30), generator=draws).double()
            + 5 * torch.rand(30, generator=draws).double()
        )
        assert float(settle(cost, 1.0, sweeps(epsilon, most=10_000)).error) < 2e-6


def test_a_fixed_count_and_a_check_agree():
    cost = squared_euclidean(cloud(40, 3), cloud(30, 3, 1))
    exact = settle(cost, 2.0, tolerance=1e-12)
    fixed = settle(cost, 2.0, exact.sweeps)
    torch.testing.assert_close(exact.plan(cost / 2), fixed.plan(cost / 2))
    assert fixed.sweeps == exact.sweeps
    assert settle(cost, 2.0, 3).sweeps == 3


def plain(monkeypatch):
    monkeypatch.setattr(Extrapolation, "ahead", lambda self: None)


def slow(number):
    """Problems of many shapes whose temperature is a large to a small part of the cost."""
    draws = torch.Generator().manual_seed(number)
    n, m = (int(each) for each in torch.randint(10, 80, (2,), generator=draws))
    x = cloud(n, 1 + number % 3, number)
    y = cloud(m, 1 + number % 3, 100 + number, 1.5) + 0.5
    cost = (squared_euclidean if number % 4 else city_block)(x, y)
    return cost / cost.mean() / (1.0, 0.3, 0.1, 0.03, 0.01)[number % 5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extrapolated_sweeps_end_where_plain_ones_do_and_are_never_more(dtype, monkeypatch):
    costs = [slow(number).to(dtype) for number in range(20)]
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    mine = [settle(cost, 1.0, tolerance=tolerance, most=20_000) for cost in costs]
    plain(monkeypatch)
    wanted = [settle(cost, 1.0, tolerance=tolerance, most=20_000) for cost in costs]
    for cost, one, other in zip(costs, mine, wanted, strict=True):
        assert one.sweeps <= other.sweeps
        assert float(one.error) <= max(
            tolerance, 1e-6 * float(cost.max()) if dtype == torch.float32 else 0
        )
        gap = (one.first.mean() + one.second.mean()) - (other.first.mean() + other.second.mean())
        assert abs(float(gap)) <= (1e-8 if dtype == torch.float64 else 1e-3)
    assert sum(one.sweeps for one in mine) < 0.4 * sum(other.sweeps for other in wanted)


@pytest.mark.parametrize(
    "astray",
    [lambda end: end + 1000 * torch.randn_like(end), lambda end: end / 0, lambda end: 1.5 * end],
)
@pytest.mark.parametrize("way", [Products, Logarithms])
def test_a_wrong_extrapolation_is_taken_back_and_costs_little(astray, way, monkeypatch):
    cost = slow(3)
    reduced = cost - cost.amin(1, keepdim=True)
    start = torch.zeros_like(reduced[0])
    torch.manual_seed(0)

    def planted(self):
        return astray(self.ends[(self.kept - 1) % len(self.ends)]) if self.kept > 1 else None

    monkeypatch.setattr(Extrapolation, "ahead", planted)
    mine, done = solver._swept(way(reduced), start, None, 1e-8, 20_000)
    plain(monkeypatch)
    wanted, least = solver._swept(way(reduced), start, None, 1e-8, 20_000)
    assert float(mine.error) <= 1e-8
    assert float(mine.value) == pytest.approx(float(wanted.value), abs=1e-8)
    assert least < done <= least + STRIDE * (2 + math.log2(least / STRIDE))


@pytest.mark.parametrize("way", [Products, Logarithms])
def test_costs_of_hundreds_of_temperatures_are_settled_in_single_precision(way):
    """Potentials as large as such costs would be rounded by 3e-5, and a check at 1e-5 never be passed."""
    draws = torch.Generator().manual_seed(0)
    x, y, one, two = torch.rand(4, 100, 784, generator=draws)
    scaled = squared_euclidean(x, y + 2.25 * (two.log() - one.log())) / 20.25
    assert float(scaled.min()) > 250
    found = settle(scaled, 1.0, tolerance=1e-5)
    assert float(found.error) <= 1e-5
    assert found.sweeps <= 25
    rows = 100 * found.plan(scaled).double().sum(1)
    torch.testing.assert_close(rows, torch.ones_like(rows), rtol=1e-5, atol=0)
    reduced = scaled - found.taken[0][:, None] - found.taken[1]
    assert float(solver._swept(way(reduced), torch.zeros(100), None, 1e-5, 50)[0].error) <= 1e-5
    assert (
        float(Logarithms(scaled).stride(torch.zeros(100), 100).error) > 1e-5
    )  # what it would be without


def test_steps_that_are_linear_lead_to_their_end_at_once():
    step = torch.diag(torch.tensor([0.9, 0.6, -0.5], dtype=torch.float64))
    end = cloud(3, 1)[:, 0]
    steps = Extrapolation(end)
    x = torch.zeros(3, dtype=torch.float64)
    assert steps.ahead() is None
    for _ in range(4):
        before = x
        x = end + step @ (x - end)
        (told,) = steps.look(before, x, x.sum())
        assert told == pytest.approx(float(x.sum()))
    torch.testing.assert_close(steps.ahead(), end, rtol=1e-5, atol=1e-5)
    steps.forget()
    assert steps.ahead() is None


def test_the_likelihood_is_a_lower_bound():
    for seed in range(5):
        cost = squared_euclidean(cloud(20, 2, seed), cloud(25, 2, seed + 9))
        assert float(likelihood(cost, 0.8)) <= float(entropic(cost, 0.8, tolerance=1e-10)) + 1e-9


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
        entropic(squared_euclidean(scale * shape, y), times * 2 * noise, tolerance=1e-8).backward()
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
    [(squared_euclidean, 2 * 0.3**2, 0.012), (city_block, 0.2, 0.002)],
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
            (gradient,) = torch.autograd.grad(likelihood(shifted, times * temperature), shifted)
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
    torch.testing.assert_close(city_block(x, y), wanted)
    for one, other in zip(
        torch.autograd.grad(city_block(x, y), (x, y), weights),
        torch.autograd.grad(wanted, (x, y), weights),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    single = distances(x.detach().float(), y.detach().float())
    torch.testing.assert_close(single.double(), wanted.detach(), rtol=1e-5, atol=1e-5)


def test_equal_coordinates_pull_nowhere_and_ranges_may_be_points():
    x = torch.zeros(5, 40)
    y = cloud(6, 40, 1, dtype=torch.float32)
    x[:, ::2] = torch.rand(5, 20, generator=torch.Generator().manual_seed(0))
    y[0] = x[2]
    y[1, :3] = 0.0
    weights = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(distances(x, y), torch.cdist(x, y, p=1))
    torch.testing.assert_close(
        signs(x, y, weights), ((x[:, None] - y).sign() * weights[..., None]).sum(1)
    )


def test_batches_of_points_have_batches_of_costs():
    x = cloud(2 * 5, 20).view(2, 5, 20)
    y = cloud(7, 20, 1)
    torch.testing.assert_close(city_block(x, y), torch.cdist(x, y, p=1))


INTERPRETED = """
import contextlib
import types
import torch
import privot.transport.entropic as solver
import privot.transport.fused_sinkhorn as fused
from privot.transport.entropic import settle
from privot.transport.fused_absolute import summed_distances, summed_signs
fused.BLOCK = 16  # so that a row is several of them
draws = torch.Generator().manual_seed(0)
x, y, weights = (torch.randn(*size, generator=draws) for size in ((70, 3), (35, 3), (70, 35)))
x[3, 2] = y[5, 2]
torch.testing.assert_close(summed_distances(x, y), torch.cdist(x, y, p=1))
torch.testing.assert_close(summed_signs(x, y, weights), ((x[:, None] - y).sign() * weights[..., None]).sum(1), rtol=1e-4, atol=1e-4)
cost = 2 * torch.rand(13, 35, generator=draws)
state = fused.Sweeping(cost)
state.sweep(6)
found = (state.first[:, None] + state.second - cost).exp() / (13 * 35)
torch.testing.assert_close(found.sum(0), torch.full((35,), 1 / 35))
assert abs(float(state.error()) - float((13 * found.sum(1) - 1).abs().max())) < 1e-5
torch.testing.assert_close(found.double(), settle(cost.double(), 1.0).plan(cost.double()), rtol=1e-4, atol=1e-7)

# the checked way, with graphs that do again what was done while they were made
torch.cuda.CUDAGraph, torch.cuda.graph = types.SimpleNamespace, lambda graph: contextlib.nullcontext()
torch.cuda.synchronize = lambda device: None
cost = 400 + 10 * torch.rand(4, 12, generator=draws)
strides = fused.Strides.of(cost.shape, cost.device, 5)
strides.graph.replay = lambda: [
    kept.copy_(made) for kept, made in zip(strides.end, strides.state.stride(strides.start, 5), strict=True)
]
solver.fused = lambda x: x.dtype == torch.float32
found, wanted = settle(cost, 1.0, tolerance=1e-5), settle(cost.double(), 1.0, tolerance=1e-5)
assert 15 < found.sweeps == wanted.sweeps, (found.sweeps, wanted.sweeps)
assert float(found.error) <= 1e-5
torch.testing.assert_close(found.plan(cost).double(), wanted.plan(cost.double()), rtol=1e-4, atol=1e-8)
short, counted = settle(cost, 1.0, tolerance=1e-5, most=7), settle(cost, 1.0, 7)
assert short.sweeps == 7
torch.testing.assert_close(short.plan(cost), counted.plan(cost))
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
    for cost in (squared_euclidean, city_block):
        values = []
        gradients = []
        for device, count in (("cpu", None), ("cuda", None), ("cuda", 60)):
            moving = x.detach().clone().to(device).requires_grad_()
            lost = entropic(cost(moving, y.to(device)), 4.0, count)
            lost.backward()
            values.append(float(lost))
            gradients.append(moving.grad.cpu())
        assert values[1] == pytest.approx(values[0], rel=1e-5)
        assert values[2] == pytest.approx(values[0], rel=1e-4)
        for each in gradients[1:]:
            torch.testing.assert_close(each, gradients[0], rtol=1e-3, atol=1e-5)
