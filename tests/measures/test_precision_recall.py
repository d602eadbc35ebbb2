"""Precision, recall, density and coverage: a double loop, closed forms, and the two ways to be bad told apart."""

import math

import numpy as np
import pytest
import torch
from support.noise_data import make_generator

from privot.errors import SettingError
from privot.measures import precision_recall as module
from privot.measures.precision_recall import precision_recall


def draw_points(count, dimension, seed, shift=0.0):
    return torch.randn(count, dimension, generator=make_generator(seed)) + shift


def measure_naively(real, fake, k):
    """The definitions, word for word."""

    def distance(a, b):
        return math.sqrt(sum((float(u) - float(v)) ** 2 for u, v in zip(a, b, strict=True)))

    def reach(cloud):
        return [
            sorted(distance(a, b) for j, b in enumerate(cloud) if j != i)[k - 1]
            for i, a in enumerate(cloud)
        ]

    real_reach = reach(real)
    fake_reach = reach(fake)
    held = [[distance(f, r) <= real_reach[i] for i, r in enumerate(real)] for f in fake]
    recalled = [any(distance(f, r) <= fake_reach[j] for j, f in enumerate(fake)) for r in real]
    balls = [sum(row) for row in held]
    covered = [any(row[i] for row in held) for i in range(len(real))]
    precision = np.mean([count > 0 for count in balls])
    return precision, np.mean(recalled), np.mean(balls) / k, np.mean(covered), balls


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize(("n", "m", "shift"), [(30, 20, 0.0), (15, 40, 1.0), (25, 25, 2.5)])
def test_it_is_the_double_loop(n, m, shift, k, monkeypatch):
    # several chunks, the last one shorter
    monkeypatch.setattr(module, "MAX_DISTANCES_PER_CHUNK", 100)
    real = draw_points(n, 3, 1)
    fake = draw_points(m, 3, 2, shift)
    precision, recall, density, coverage, balls = measure_naively(real, fake, k)

    def error(share, count):
        return math.sqrt(share * (1 - share) / count)

    density_error = np.std(balls) / k / math.sqrt(m)
    errors = (error(precision, m), error(recall, n), density_error, error(coverage, n))
    expected = (precision, recall, density, coverage, *errors)
    assert tuple(precision_recall(real, fake, k)) == pytest.approx(expected, abs=1e-12)


def test_equal_sets_are_perfect_even_with_repeated_points_and_far_from_the_origin():
    """Repeated points have balls of radius 0, where rounding could lose them."""
    for real in (
        draw_points(50, 20, 1),
        draw_points(10, 20, 1).repeat(6, 1),
        draw_points(50, 20, 1, shift=1000),
    ):
        result = precision_recall(real, real.flip(0))
        assert (result.precision, result.recall, result.coverage) == (1, 1, 1)
        assert result.density >= 1


def test_sets_far_apart_share_nothing():
    assert precision_recall(draw_points(40, 5, 1), draw_points(30, 5, 2, shift=100)) == (0,) * 8


def test_a_collapsed_generator_is_precise_and_covers_little():
    """And a scattered one recalls all, with little precision: the numbers say which way it fails."""
    real = draw_points(200, 2, 1)
    collapsed = precision_recall(real, draw_points(200, 2, 2) * 0.05)
    assert collapsed.precision > 0.95
    assert collapsed.recall < 0.1
    assert collapsed.coverage < 0.2
    scattered = precision_recall(real, draw_points(200, 2, 2) * 20)
    assert scattered.recall > 0.9
    assert scattered.precision < 0.2
    assert scattered.density < 0.1


def test_on_a_line_of_whole_numbers():
    """k = 1: real balls reach 1 to each side, and a point on the rim is in. Fakes at 4.5 + 2 i are in two balls each."""
    real = torch.arange(20.0)[:, None]
    fake = torch.tensor([4.5, 6.5, 8.5, 30.0, 31.0])[:, None]
    result = precision_recall(real, fake, k=1)
    assert result.precision == 3 / 5
    assert result.density == 6 / 5
    assert result.coverage == 6 / 20
    assert result.recall == 8 / 20  # fake balls reach 2: real 3 to 10
    assert precision_recall(real, real + 1, k=1)[:4] == (1, 1, (18 * 3 + 2 + 1) / 20, 1)


def test_of_one_law_density_is_one_and_coverage_as_published():
    """E density = 1 and E coverage = 1 - (m - 1)...(m - k) / ((2m - 1)...(2m - k)) for n = m (Naeem et al. 2020, section 3.3)."""
    n = 400
    k = 3
    runs = [
        precision_recall(draw_points(n, 8, seed), draw_points(n, 8, 1000 + seed), k)
        for seed in range(10)
    ]
    coverage = 1 - math.prod((n - j) / (2 * n - j) for j in range(1, k + 1))
    assert np.mean([run.density for run in runs]) == pytest.approx(1, abs=0.05)
    assert np.mean([run.coverage for run in runs]) == pytest.approx(coverage, abs=0.03)


def test_what_is_refused():
    x = draw_points(5, 2, 1)
    with pytest.raises(SettingError, match=r"\[5, 2\] and \[5, 3\]"):
        precision_recall(x, draw_points(5, 3, 1))
    for k in (0, 5):
        with pytest.raises(SettingError, match=f"k={k} must .*smaller than the number of points"):
            precision_recall(x, draw_points(9, 2, 1), k)
    with pytest.raises(SettingError, match="NaN"):
        precision_recall(x, x / 0)
