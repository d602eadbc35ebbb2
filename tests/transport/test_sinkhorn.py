"""Entropic transport against exact solvers and closed forms: values, plans, gradients, and float32 where the blur is small."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment, linprog
from scipy.stats import norm

from privot.transport.sinkhorn import (
    entropic_transport_cost,
    semi_debiased_loss,
    sinkhorn_divergence,
    solve_potentials,
    squared_euclidean_cost,
    transport_plan,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def cloud(count, dim, seed=0, shift=0.0, dtype=torch.float64):
    return (
        torch.randn(
            count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ).to(dtype)
        + shift
    )


def exact(cost, first, second):
    """The least cost of moving weights to weights: a linear programme."""
    n, m = cost.shape
    sides = np.concatenate([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])
    return linprog(
        cost.flatten(), A_eq=sides, b_eq=np.concatenate([first, second]), method="highs"
    ).fun


@pytest.mark.parametrize("absolute", [0.0, 1.0, 3.0])
def test_the_cost_is_that_of_its_formula(absolute):
    x = cloud(5, 7, shift=100.0)
    y = cloud(6, 7, 1, shift=100.0)
    gaps = x[:, None] - y
    wanted = gaps.square().sum(-1) + absolute * gaps.abs().sum(-1)
    torch.testing.assert_close(squared_euclidean_cost(x, y, absolute), wanted)
    single = squared_euclidean_cost(
        x.float(), y.float(), absolute
    )  # far from zero: nothing is lost to large lengths
    torch.testing.assert_close(single.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("absolute", [0.0, 1.0])
def test_at_a_small_blur_it_is_the_best_assignment(absolute):
    cost = squared_euclidean_cost(cloud(20, 5), cloud(20, 5, 1, shift=1.0), absolute)
    best = cost.numpy()[linear_sum_assignment(cost.numpy())].mean()
    blur = 1e-3 * best
    found = float(entropic_transport_cost(cost, blur, num_iterations=2000))
    # the entropy of a plan on a permutation is blur * log(count) away from that of the even one
    assert found == pytest.approx(best + blur * math.log(20), rel=2e-3)
    assert float((transport_plan(cost, blur, num_iterations=2000) * cost).sum()) == pytest.approx(
        best, rel=2e-3
    )


def test_weights_are_kept_and_the_cost_is_that_of_the_linear_programme():
    cost = squared_euclidean_cost(cloud(9, 3), cloud(13, 3, 1, shift=0.5))
    rng = np.random.default_rng(0)
    first = rng.dirichlet(np.ones(9))
    second = rng.dirichlet(np.ones(13))
    a = torch.from_numpy(first)
    b = torch.from_numpy(second)
    found = transport_plan(cost, 0.02, a, b, num_iterations=2000)
    torch.testing.assert_close(found.sum(1), a)
    torch.testing.assert_close(found.sum(0), b, rtol=0, atol=1e-3)
    assert float((found * cost).sum()) == pytest.approx(
        exact(cost.numpy(), first, second), rel=1e-2
    )


def test_duals_are_feasible_as_the_blur_falls():
    """Kantorovich: f + g <= c where there is mass, up to blur times the logarithm of what a plan can hold."""
    cost = squared_euclidean_cost(cloud(15, 4), cloud(15, 4, 1))
    for blur in (1.0, 0.1, 0.01):
        f, g = solve_potentials(cost, blur, num_iterations=1000)
        assert float((f[:, None] + g - cost).max()) <= blur * math.log(15) + 1e-3


@pytest.mark.parametrize(
    ("mean", "std", "blur"), [(0.0, 1.0, 0.5), (2.0, 0.5, 0.5), (-1.0, 2.0, 2.0)]
)
def test_between_gaussians_on_the_line_it_is_the_closed_form(mean, std, blur):
    """Entropic transport of N(0, 1) to N(mean, std²), with cost (x - y)² (Janati et al. 2020, in one dimension).

    Quantiles stand for the Gaussians, so the sums are integrals.
    """
    middle = (np.arange(500) + 0.5) / 500
    x = torch.from_numpy(norm.ppf(middle))[:, None]
    half = blur / 2  # in their notation the cost is |x - y|² and KL has weight 2 sigma²
    root = math.sqrt(4 * std**2 + half**2)
    wanted = (
        mean**2 + 1 + std**2 - root + half * (1 - math.log(2 * half)) + half * math.log(root + half)
    )
    found = float(
        entropic_transport_cost(squared_euclidean_cost(x, mean + std * x), blur, num_iterations=100)
    )
    assert found == pytest.approx(wanted, abs=0.01 * (1 + abs(wanted)))


def test_the_gradient_is_that_of_finite_differences():
    """The envelope: potentials are held fixed, and yet it is the gradient of the value."""
    x = cloud(6, 3)
    y = cloud(7, 3, 1, shift=0.3)
    b = torch.from_numpy(np.random.default_rng(1).dirichlet(np.ones(7)))

    def value(points):
        return entropic_transport_cost(
            squared_euclidean_cost(points, y, 1.0), 3.0, None, b, num_iterations=300
        )

    moving = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(value(moving), moving)
    wanted = torch.zeros_like(x)
    for place in np.ndindex(*x.shape):
        step = torch.zeros_like(x)
        step[place] = 1e-5
        wanted[place] = (value(x + step) - value(x - step)) / 2e-5
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert found.norm() > 0.1


def test_both_sides_carry_a_gradient():
    x = cloud(5, 2).requires_grad_()
    y = cloud(5, 2, 1, shift=2.0).requires_grad_()
    left, right = torch.autograd.grad(
        entropic_transport_cost(squared_euclidean_cost(x, y), 0.1, num_iterations=300), (x, y)
    )
    torch.testing.assert_close(
        left.sum(0), -right.sum(0), rtol=1e-6, atol=1e-6
    )  # moving both alike changes nothing
    assert left.norm() > 1


def test_it_is_symmetric():
    x = cloud(8, 3)
    y = cloud(11, 3, 1, shift=1.0)
    for iterations in (1, 7, 40):  # at every iteration, not only at the end
        one, two = (
            entropic_transport_cost(squared_euclidean_cost(*pair), 0.1, num_iterations=iterations)
            for pair in ((x, y), (y, x))
        )
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_the_divergence_is_zero_on_equals_and_grows_with_the_distance():
    x = cloud(12, 3)
    for blur in (0.01, 1.0, 100.0):
        assert abs(float(sinkhorn_divergence(x, x, blur))) < 1e-9
        values = [
            float(sinkhorn_divergence(x, x + shift, blur, num_iterations=100))
            for shift in (0.5, 1.0, 2.0)
        ]
        assert values == sorted(values)
        # a shift of every point moves nothing else: 2 |shift|² at any blur
        assert values[1] == pytest.approx(2 * 3, rel=0.05)
        assert all(value > 0 for value in values)


def test_without_debiasing_points_shrink_and_with_it_they_keep_their_spread():
    """What the semi-debiased loss is for: points that only go to the others end nearer to their middle."""
    y = cloud(60, 2, 3)
    spread = {}
    for fresh in (None, 0.3, 1.0):
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.Adam([scale], lr=0.05)
        for step in range(50):
            x = scale * cloud(60, 2, 10 + step)
            other = scale * cloud(60, 2, 1000 + step)
            new = round((fresh or 0) * 60)
            if fresh is None:
                loss = entropic_transport_cost(squared_euclidean_cost(x, y), 2.0, num_iterations=12)
            else:
                loss = semi_debiased_loss(
                    x, torch.cat([other[:new], x[new:]]), y, blur=2.0, num_iterations=12
                )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        spread[fresh] = abs(scale.item())
    wanted = float(y.square().mean().sqrt())
    assert spread[1.0] == pytest.approx(wanted, rel=0.1)
    assert spread[None] < 0.7 * wanted
    assert spread[None] < spread[0.3] < spread[1.0]


def test_many_problems_at_once_are_each_of_them():
    x, y = (
        torch.stack([cloud(6, 3, seed, seed / 3) for seed in range(start, start + 4)])
        for start in (0, 10)
    )
    together = entropic_transport_cost(squared_euclidean_cost(x, y, 1.0), 0.3)
    apart = torch.stack(
        [
            entropic_transport_cost(squared_euclidean_cost(*pair, 1.0), 0.3)
            for pair in zip(x, y, strict=True)
        ]
    )
    torch.testing.assert_close(together, apart)


def test_points_of_no_weight_are_not_there():
    x = cloud(6, 3)
    y = cloud(9, 3, 1)
    padded = torch.cat([y, torch.full((4, 3), 2.0, dtype=y.dtype)])
    weights = torch.cat([torch.full((9,), 1 / 9, dtype=y.dtype), torch.zeros(4, dtype=y.dtype)])
    found = transport_plan(
        squared_euclidean_cost(x, padded), 0.1, None, weights, num_iterations=600
    )
    assert (found[:, 9:] == 0).all()
    torch.testing.assert_close(
        found[:, :9],
        transport_plan(squared_euclidean_cost(x, y), 0.1, num_iterations=600),
        rtol=1e-3,
        atol=1e-5,
    )
    moving = x.clone().requires_grad_()
    entropic_transport_cost(
        squared_euclidean_cost(moving, padded, 1.0), 0.1, None, weights
    ).backward()
    assert moving.grad.isfinite().all()


@pytest.mark.parametrize("size", [1.0, 1e3, 1e-3])
def test_single_precision_is_enough_at_a_blur_thousands_of_times_below_the_cost(size):
    """Points of 784 numbers, as images: the cost is some hundreds, the blur 0.05."""
    x = size * cloud(40, 784, 0)
    y = size * cloud(60, 784, 1)
    blur = 0.05 * size**2
    double, single = (
        transport_plan(squared_euclidean_cost(x.to(kind), y.to(kind)), blur, num_iterations=200)
        for kind in (torch.float64, torch.float32)
    )
    assert single.isfinite().all()
    torch.testing.assert_close(single.sum(1), torch.full((40,), 1 / 40))
    assert float((single.sum(0) - double.sum(0)).abs().sum()) < 0.02
    costs = [
        float((each.double() * squared_euclidean_cost(x, y)).sum()) for each in (double, single)
    ]
    assert costs[1] == pytest.approx(costs[0], rel=1e-3)
    assert all(
        part.isfinite().all()
        for part in solve_potentials(squared_euclidean_cost(x.float(), y.float()), 1e-6 * size**2)
    )
