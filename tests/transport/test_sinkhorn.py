"""Entropic transport against exact solvers and closed forms: values, plans, gradients, and float32 where the blur is small."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment, linprog
from scipy.stats import norm
from support.make_points import make_points

from privot.transport.sinkhorn import (
    entropic_transport_cost,
    semi_debiased_loss,
    sinkhorn_divergence,
    solve_potentials,
    squared_euclidean_cost,
    transport_plan,
)

pytestmark = pytest.mark.usefixtures("one_thread")
assert_close = torch.testing.assert_close


@pytest.mark.parametrize("l1_weight", [0.0, 1.0, 3.0])
def test_the_cost_is_that_of_its_formula(l1_weight):
    x = make_points(5, 7, shift=100.0)
    y = make_points(6, 7, seed=1, shift=100.0)
    gaps = x[:, None] - y
    expected = gaps.square().sum(-1) + l1_weight * gaps.abs().sum(-1)
    assert_close(squared_euclidean_cost(x, y, l1_weight), expected)
    # far from zero: nothing is lost to large lengths
    single = squared_euclidean_cost(x.float(), y.float(), l1_weight)
    assert_close(single.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("l1_weight", [0.0, 1.0])
def test_at_a_small_blur_it_is_the_best_assignment(l1_weight):
    x = make_points(20, 5)
    cost = squared_euclidean_cost(x, make_points(20, 5, seed=1, shift=1.0), l1_weight)
    best = cost.numpy()[linear_sum_assignment(cost.numpy())].mean()
    blur = 1e-3 * best
    value = float(entropic_transport_cost(cost, blur, num_iterations=1000))
    # the entropy of a plan on a permutation is blur * log(count) away from that of the even one
    assert value == pytest.approx(best + blur * math.log(20), rel=2e-3)
    plan = transport_plan(cost, blur, num_iterations=1000)
    assert float((plan * cost).sum()) == pytest.approx(best, rel=2e-3)


def test_weights_are_kept_and_the_cost_is_that_of_the_linear_program():
    cost = squared_euclidean_cost(make_points(9, 3), make_points(13, 3, seed=1, shift=0.5))
    rng = np.random.default_rng(0)
    first = rng.dirichlet(np.ones(9))
    second = rng.dirichlet(np.ones(13))
    plan = transport_plan(
        cost, 0.02, torch.from_numpy(first), torch.from_numpy(second), num_iterations=2000
    )
    assert_close(plan.sum(1).numpy(), first)
    assert_close(plan.sum(0).numpy(), second, rtol=0, atol=1e-3)
    sides = [np.kron(np.eye(9), np.ones(13)), np.kron(np.ones(9), np.eye(13))]
    sums = np.concatenate([first, second])
    exact = linprog(
        cost.flatten().numpy(), A_eq=np.concatenate(sides), b_eq=sums, method="highs"
    ).fun
    assert float((plan * cost).sum()) == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize("blur", [1.0, 0.1, 0.01])
def test_duals_are_feasible_as_the_blur_falls(blur):
    """Kantorovich: f + g <= c where there is mass, up to blur times the logarithm of what a plan can hold."""
    cost = squared_euclidean_cost(make_points(15, 4), make_points(15, 4, seed=1))
    f, g = solve_potentials(cost, blur, num_iterations=1000)
    assert float((f[:, None] + g - cost).max()) <= blur * math.log(15) + 1e-3


@pytest.mark.parametrize(
    ("mean", "std", "blur"), [(0.0, 1.0, 0.5), (2.0, 0.5, 0.5), (-1.0, 2.0, 2.0)]
)
def test_between_gaussians_on_the_line_it_is_the_closed_form(mean, std, blur):
    """Entropic transport of N(0, 1) to N(mean, std²), with cost (x - y)² (Janati et al. 2020, in one dimension).

    Quantiles stand for the Gaussians, so the sums are integrals.
    """
    x = torch.from_numpy(norm.ppf((np.arange(500) + 0.5) / 500))[:, None]
    half = blur / 2  # in their notation the cost is |x - y|² and KL has weight 2 sigma²
    root = math.sqrt(4 * std**2 + half**2)
    entropy = half * (1 - math.log(2 * half)) + half * math.log(root + half)
    expected = mean**2 + 1 + std**2 - root + entropy
    cost = squared_euclidean_cost(x, mean + std * x)
    found = float(entropic_transport_cost(cost, blur, num_iterations=100))
    assert found == pytest.approx(expected, abs=0.01 * (1 + abs(expected)))


def test_the_gradient_is_that_of_finite_differences():
    """The envelope: potentials are held fixed, and yet it is the gradient of the value, on both sides."""
    x = make_points(5, 2).requires_grad_()
    y = make_points(6, 2, seed=1, shift=0.3).requires_grad_()
    b = torch.from_numpy(np.random.default_rng(1).dirichlet(np.ones(6)))

    def compute_cost(x, y):
        cost = squared_euclidean_cost(x, y, 1.0)
        return entropic_transport_cost(cost, 3.0, None, b, num_iterations=100)

    assert torch.autograd.gradcheck(compute_cost, (x, y), eps=1e-5, atol=1e-6, rtol=1e-4)
    left, right = torch.autograd.grad(compute_cost(x, y), (x, y))
    # moving both alike changes nothing
    assert_close(left.sum(0), -right.sum(0), rtol=1e-6, atol=1e-6)
    assert left.norm() > 0.1


@pytest.mark.parametrize("num_iterations", [1, 7, 40])
def test_it_is_symmetric_at_every_iteration(num_iterations):
    x = make_points(8, 3)
    y = make_points(11, 3, seed=1, shift=1.0)
    one, two = (
        entropic_transport_cost(squared_euclidean_cost(*pair), 0.1, num_iterations=num_iterations)
        for pair in ((x, y), (y, x))
    )
    assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("blur", [0.01, 1.0, 100.0])
def test_the_divergence_is_zero_on_equals_and_grows_with_the_distance(blur):
    x = make_points(12, 3)
    assert abs(float(sinkhorn_divergence(x, x, blur))) < 1e-9
    values = [
        float(sinkhorn_divergence(x, x + shift, blur, num_iterations=100))
        for shift in (0.5, 1.0, 2.0)
    ]
    assert 0 < values[0] < values[1] < values[2]
    # a shift of every point moves nothing else: 2 |shift|² at any blur
    assert values[1] == pytest.approx(2 * 3, rel=0.05)


def test_without_debiasing_points_shrink_and_with_it_they_keep_their_spread():
    """What the semi-debiased loss is for: points that only go to the others end nearer to their middle."""
    y = make_points(60, 2, seed=3)

    def fit_scale(fresh):
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([scale], lr=0.05)
        for step in range(50):
            x = scale * make_points(60, 2, seed=10 + step)
            if fresh is None:
                loss = entropic_transport_cost(squared_euclidean_cost(x, y), 2.0, num_iterations=12)
            else:
                new = round(fresh * 60)
                other = scale * make_points(60, 2, seed=1000 + step)
                other = torch.cat([other[:new], x[new:]])
                loss = semi_debiased_loss(x, other, y, blur=2.0, num_iterations=12)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return abs(scale.item())

    expected = float(y.square().mean().sqrt())
    biased, partly, debiased = map(fit_scale, (None, 0.3, 1.0))
    assert debiased == pytest.approx(expected, rel=0.1)
    assert biased < 0.7 * expected
    assert biased < partly < debiased


def test_a_batch_of_problems_is_solved_one_by_one():
    x, y = (
        torch.stack(
            [make_points(6, 3, seed=seed, shift=seed / 3) for seed in range(start, start + 4)]
        )
        for start in (0, 10)
    )
    cost = squared_euclidean_cost(x, y, 1.0)
    apart = [entropic_transport_cost(each, 0.3) for each in cost]
    assert_close(entropic_transport_cost(cost, 0.3), torch.stack(apart))


def test_points_of_no_weight_are_ignored():
    x = make_points(6, 3).requires_grad_()
    y = make_points(9, 3, seed=1)
    padded = torch.cat([y, torch.full((4, 3), 2.0, dtype=y.dtype)])
    weights = torch.zeros(13, dtype=y.dtype)
    weights[:9] = 1 / 9
    plan = transport_plan(squared_euclidean_cost(x, padded), 0.1, None, weights, num_iterations=600)
    assert (plan[:, 9:] == 0).all()
    expected = transport_plan(squared_euclidean_cost(x, y), 0.1, num_iterations=600)
    assert_close(plan[:, :9], expected, rtol=1e-3, atol=1e-5)
    cost = squared_euclidean_cost(x, padded, 1.0)
    entropic_transport_cost(cost, 0.1, None, weights).backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("size", [1.0, 1e3, 1e-3])
def test_single_precision_is_enough_at_a_blur_thousands_of_times_below_the_cost(size):
    """Points of 784 numbers, as images: the cost is some hundreds, the blur 0.05."""
    x = size * make_points(40, 784)
    y = size * make_points(60, 784, seed=1)
    cost = squared_euclidean_cost(x, y)
    single_cost = squared_euclidean_cost(x.float(), y.float())
    double, single = (
        transport_plan(each, 0.05 * size**2, num_iterations=200) for each in (cost, single_cost)
    )
    assert single.isfinite().all()
    assert_close(single.sum(1), torch.full((40,), 1 / 40))
    assert float((single.sum(0) - double.sum(0)).abs().sum()) < 0.02
    total = float((double * cost).sum())
    assert float((single.double() * cost).sum()) == pytest.approx(total, rel=1e-3)
    for part in solve_potentials(single_cost, 1e-6 * size**2):
        assert part.isfinite().all()
