"""Wasserstein distances: closed forms, other people's solvers, and a standard error that covers."""

import math
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import wasserstein_distance
from support.noise_data import draw_normal, make_generator

from privot.errors import SettingError
from privot.measures import wasserstein
from privot.measures.wasserstein import exact_wasserstein, sliced_wasserstein


@pytest.mark.parametrize(("n", "m"), [(50, 50), (50, 31), (31, 50), (1, 7), (60, 20)])
def test_on_a_line_any_two_sizes_give_the_exact_distance(n, m):
    """In one dimension every projection is the line itself, and SciPy has W_1."""
    x = draw_normal(n, 1, 1)
    y = draw_normal(m, 1, 2, scale=2, shift=1)
    result = sliced_wasserstein(x, y, 5, make_generator(), p=1)
    exact = wasserstein_distance(x[:, 0].numpy(), y[:, 0].numpy())
    assert result.value == pytest.approx(exact, rel=1e-12)
    assert result.standard_error == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(8, 12), (9, 6)])
def test_unequal_sizes_are_the_equal_sizes_of_repeated_points(n, m):
    """Repeated points change no distribution; at the common multiple sorted clouds are paired."""
    x = draw_normal(n, 3, 1)
    y = draw_normal(m, 3, 2)
    common = math.lcm(n, m)
    repeated = [cloud.repeat_interleave(common // len(cloud), 0) for cloud in (x, y)]
    expected = sliced_wasserstein(*repeated, 20, make_generator())
    assert sliced_wasserstein(x, y, 20, make_generator()) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("dimension", [2, 16])
def test_a_shift_costs_its_length_by_the_root_of_the_dimension(dimension):
    """W_2 of a projection is |<u, t>|, whose mean square is |t|^2 / d."""
    x = draw_normal(40, dimension, 1)
    shift = draw_normal(1, dimension, 2)
    value, error = sliced_wasserstein(x, x + shift, 4000, make_generator())
    assert abs(value - shift.norm().item() / math.sqrt(dimension)) < 4 * error
    assert error < 0.02 * value


def test_the_standard_error_is_that_of_repeated_runs():
    x = draw_normal(30, 5, 1)
    y = draw_normal(30, 5, 2, shift=0.5)
    runs = [sliced_wasserstein(x, y, 50, make_generator(seed)) for seed in range(200)]
    spread = np.std([run.value for run in runs])  # of 200 runs: itself uncertain by 5 %
    assert np.mean([run.standard_error for run in runs]) == pytest.approx(spread, rel=0.2)


def test_chunks_change_nothing(monkeypatch):
    x = draw_normal(30, 4, 1)
    y = draw_normal(20, 4, 2)
    whole = sliced_wasserstein(x, y, 1, make_generator())
    monkeypatch.setattr(wasserstein, "MAX_PROJECTIONS_PER_CHUNK", 30)  # one projection at a time
    parts = sliced_wasserstein(x, y, 3, make_generator())
    generator = make_generator()
    squares = [sliced_wasserstein(x, y, 1, generator).value ** 2 for _ in range(3)]
    assert squares[0] == pytest.approx(whole.value**2, rel=1e-12)
    assert parts.value == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-12)


def test_equal_clouds_are_at_distance_zero_in_any_order():
    x = draw_normal(25, 4, 1)
    assert sliced_wasserstein(x, x.flip(0), 10, make_generator()) == pytest.approx(
        (0, 0), abs=1e-12
    )
    one = sliced_wasserstein(
        x, x + 1, 1, make_generator()
    )  # one projection has no error to estimate
    assert math.isnan(one.standard_error)


def test_the_sliced_distance_never_exceeds_the_exact_one():
    pytest.importorskip("ot")
    x = draw_normal(40, 3, 1)
    y = draw_normal(25, 3, 2, scale=1.5)
    exact = exact_wasserstein(x, y).value
    assert 0.2 * exact < sliced_wasserstein(x, y, 200, make_generator()).value < exact


@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_exact_distance_is_the_best_assignment(p):
    pytest.importorskip("ot")
    x = draw_normal(20, 3, 1)
    y = draw_normal(20, 3, 2)
    costs = np.linalg.norm(x.numpy()[:, None] - y.numpy()[None], axis=2) ** p
    best = costs[linear_sum_assignment(costs)].mean() ** (1 / p)
    assert exact_wasserstein(x, y, p) == pytest.approx((best, 0), rel=1e-9)


def test_an_exact_shift_costs_its_length():
    pytest.importorskip("ot")
    x = draw_normal(30, 4, 1).float()
    shifted = x + torch.tensor([3.0, 0, 4, 0])
    assert exact_wasserstein(x, shifted).value == pytest.approx(5, rel=1e-6)
    assert exact_wasserstein(x, x).value == 0


def test_refuses_what_has_no_distance(monkeypatch):
    x = draw_normal(4, 2, 1)
    for reason, measure in (
        (r"\[4, 2\] and \[4, 3\].*same d", lambda: sliced_wasserstein(x, x[:, [0, 1, 1]], 5, None)),
        ("same d", lambda: exact_wasserstein(x, x[:0])),
        (r"p=0\.5", lambda: exact_wasserstein(x, x, p=0.5)),
        ("num_projections=0", lambda: sliced_wasserstein(x, x, 0, None)),
        ("NaN", lambda: sliced_wasserstein(x, x * math.nan, 5, None)),
        (r"5,001\. Use the sliced", lambda: exact_wasserstein(x, torch.zeros(5001, 2))),
    ):
        with pytest.raises(SettingError, match=reason):
            measure()
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(SettingError, match=r"POT\. Run pip install 'privot\[measures\]'"):
        exact_wasserstein(x, x)
