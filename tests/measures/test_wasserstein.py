"""Wasserstein distances: closed forms, other people's solvers, and a standard error that covers."""

import math
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import wasserstein_distance

from privot.errors import SettingError
from privot.measures import wasserstein
from privot.measures.wasserstein import exact_wasserstein, sliced_wasserstein


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def cloud(count, dimension, seed):
    return torch.randn(count, dimension, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize(("n", "m"), [(50, 50), (50, 31), (31, 50), (1, 7), (60, 20)])
def test_on_a_line_any_two_sizes_give_the_exact_distance(n, m):
    """In one dimension every slice is the line itself, and SciPy knows W_1."""
    x = cloud(n, 1, 1)
    y = 2 * cloud(m, 1, 2) + 1
    found = sliced_wasserstein(x, y, 5, seeded(), p=1)
    assert found.value == pytest.approx(
        wasserstein_distance(x[:, 0].numpy(), y[:, 0].numpy()), rel=1e-12
    )
    assert found.standard_error == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(8, 12), (9, 6)])
def test_unequal_sizes_are_the_equal_sizes_of_repeated_points(n, m):
    """Repeating each point changes no distribution; at the common multiple both clouds are sorted and paired."""
    x = cloud(n, 3, 1)
    y = cloud(m, 3, 2)
    common = math.lcm(n, m)
    repeated = [each.repeat_interleave(common // len(each), 0) for each in (x, y)]
    assert sliced_wasserstein(x, y, 20, seeded()) == pytest.approx(
        sliced_wasserstein(*repeated, 20, seeded()), rel=1e-10
    )


@pytest.mark.parametrize("dimension", [2, 16])
def test_a_shift_costs_its_length_by_the_root_of_the_dimension(dimension):
    """W_2 of a slice is |<u, t>|, whose mean square is |t|^2 / d."""
    x = cloud(40, dimension, 1)
    shift = cloud(1, dimension, 2)
    found = sliced_wasserstein(x, x + shift, 4000, seeded())
    assert abs(found.value - shift.norm().item() / math.sqrt(dimension)) < 4 * found.standard_error
    assert found.standard_error < 0.02 * found.value


def test_the_standard_error_is_that_of_repeated_runs():
    x = cloud(30, 5, 1)
    y = cloud(30, 5, 2) + 0.5
    runs = [sliced_wasserstein(x, y, 50, seeded(seed)) for seed in range(200)]
    spread = np.std([each.value for each in runs])
    assert np.mean([each.standard_error for each in runs]) == pytest.approx(
        spread, rel=0.2
    )  # the spread of 200 runs is itself known to 5 %


def test_portions_change_nothing(monkeypatch):
    x = cloud(30, 4, 1)
    y = cloud(20, 4, 2)
    whole = sliced_wasserstein(x, y, 1, seeded())
    monkeypatch.setattr(wasserstein, "MAX_PROJECTIONS_PER_CHUNK", 30)  # one slice at a time
    parts = [sliced_wasserstein(x, y, 3, seeded())]
    generator = seeded()
    each = [sliced_wasserstein(x, y, 1, generator).value ** 2 for _ in range(3)]
    assert each[0] == pytest.approx(whole.value**2, rel=1e-12)
    assert parts[0].value == pytest.approx(math.sqrt(np.mean(each)), rel=1e-12)


def test_equal_clouds_are_at_distance_zero_in_any_order():
    x = cloud(25, 4, 1)
    assert sliced_wasserstein(x, x.flip(0), 10, seeded()) == pytest.approx((0, 0), abs=1e-12)
    assert math.isnan(
        sliced_wasserstein(x, x + 1, 1, seeded()).standard_error
    )  # one slice tells nothing of its error


def test_the_sliced_distance_never_exceeds_the_exact_one():
    pytest.importorskip("ot")
    x = cloud(40, 3, 1)
    y = 1.5 * cloud(25, 3, 2)
    exact = exact_wasserstein(x, y).value
    assert 0.2 * exact < sliced_wasserstein(x, y, 200, seeded()).value < exact


@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_exact_distance_is_the_best_assignment(p):
    pytest.importorskip("ot")
    x = cloud(20, 3, 1)
    y = cloud(20, 3, 2)
    costs = np.linalg.norm(x.numpy()[:, None] - y.numpy()[None], axis=2) ** p
    best = costs[linear_sum_assignment(costs)].mean() ** (1 / p)
    assert exact_wasserstein(x, y, p) == pytest.approx((best, 0), rel=1e-9)


def test_an_exact_shift_costs_its_length():
    pytest.importorskip("ot")
    x = cloud(30, 4, 1).float()
    assert exact_wasserstein(x, x + torch.tensor([3.0, 0, 4, 0])).value == pytest.approx(
        5, rel=1e-6
    )
    assert exact_wasserstein(x, x).value == 0


def test_what_is_refused(monkeypatch):
    x = cloud(4, 2, 1)
    with pytest.raises(SettingError, match=r"\[4, 2\] and \[4, 3\].*same d"):
        sliced_wasserstein(x, cloud(4, 3, 1), 5, seeded())
    with pytest.raises(SettingError, match="same d"):
        exact_wasserstein(x, x[:0])
    with pytest.raises(SettingError, match=r"p=0\.5"):
        exact_wasserstein(x, x, p=0.5)
    with pytest.raises(SettingError, match="num_projections=0"):
        sliced_wasserstein(x, x, 0, seeded())
    with pytest.raises(SettingError, match="NaN"):
        sliced_wasserstein(x, x * math.nan, 5, seeded())
    with pytest.raises(SettingError, match=r"5,001\. Use the sliced"):
        exact_wasserstein(x, torch.zeros(5001, 2))
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(SettingError, match=r"POT\. Run pip install 'privot\[measures\]'"):
        exact_wasserstein(x, x)
