"""Fréchet and kernel distance: the formulas computed another way, closed forms, and errors that say what fresh samples would."""

import math
import sys

import numpy as np
import pytest
import scipy.linalg
from support.noise_data import draw_normal, make_generator

from privot.errors import SettingError
from privot.measures.fid_kid import frechet_distance, kernel_distance

pytestmark = pytest.mark.usefixtures("one_thread")


def draw_features(count, size, seed):
    """Correlated, skewed and not negative, as pooled features are."""
    mixed = draw_normal(count, size, seed) @ draw_normal(size, size, 99) / size**0.5
    return (mixed + 0.3).relu().float()


def compute_frechet_naively(real, fake):
    """||m1 - m2||^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)), by a matrix square root."""
    sides = [side.double().numpy() for side in (real, fake)]
    gap = sides[0].mean(0) - sides[1].mean(0)
    s1, s2 = (np.cov(side, rowvar=False) for side in sides)
    return (gap**2).sum() + np.trace(s1 + s2 - 2 * scipy.linalg.sqrtm(s1 @ s2).real)


def compute_kernel_naively(real, fake):
    """The unbiased squared MMD of the kernel (x.y / d + 1)^3, over all pairs."""
    cross, *inner = (
        (a.double().numpy() @ b.double().numpy().T / a.shape[1] + 1) ** 3
        for a, b in ((real, fake), (real, real), (fake, fake))
    )
    within = sum(kernel[~np.eye(len(kernel), dtype=bool)].mean() for kernel in inner)
    return within - 2 * cross.mean()


@pytest.mark.parametrize(
    ("n", "m", "d"),
    [
        (50, 40, 3),
        (300, 500, 20),
        (200, 130, 64),
        (60, 45, 100),
        (20, 300, 100),
        (10_001, 10_000, 4),  # more than one chunk
    ],
)
def test_the_value_is_that_of_a_matrix_square_root(n, m, d):
    real = draw_features(n, d, 1)
    fake = draw_features(m, d, 2) * 1.2 + 0.1
    expected = compute_frechet_naively(real, fake)
    assert frechet_distance(real, fake, make_generator()).value == pytest.approx(expected, rel=1e-3)


def test_the_order_of_the_sides_does_not_matter_and_the_generator_decides_the_error_alone():
    real = draw_features(90, 12, 1)
    fake = draw_features(70, 12, 2)
    one, two, other = (frechet_distance(real, fake, make_generator(seed)) for seed in (5, 5, 6))
    assert one == two
    assert (one.value, one.standard_error == other.standard_error) == (other.value, False)
    assert frechet_distance(fake, real, make_generator()).value == pytest.approx(
        one.value, rel=1e-6
    )
    assert frechet_distance(real, real, make_generator()).value == pytest.approx(0, abs=1e-6)


def test_shifted_and_scaled_gaussians_have_a_closed_form():
    size = 5
    points = draw_normal(400, size, 0)
    points = points - points.mean(0)
    spread = np.trace(np.cov(points.numpy(), rowvar=False))
    for fake, expected in (
        (points + 2, 4 * size),
        (3 * points, (3 - 1) ** 2 * spread),
        (3 * points + 2, 4 * spread + 4 * size),
    ):
        value = frechet_distance(points, fake, make_generator()).value
        assert value == pytest.approx(expected, rel=1e-6)
    many = draw_normal(200_000, 2, 1), draw_normal(200_000, 2, 2, scale=2.0, shift=1.0)
    assert frechet_distance(*many, make_generator()).value == pytest.approx(
        2 * (2 - 1) ** 2 + 2, rel=0.02
    )


def check_spread(results):
    """The stated errors of (value, error) are the spread of the values, within 1.5 times."""
    values, errors = np.transpose([result[:2] for result in results])
    stated = math.sqrt(np.mean(errors**2))
    assert np.std(values, ddof=1) / 1.5 < stated < np.std(values, ddof=1) * 1.5


def test_the_error_is_the_spread_over_fresh_samples():
    real = draw_normal(3000, 8, 0)
    fakes = [draw_normal(200, 8, 100 + seed, shift=0.3) for seed in range(60)]
    results = [
        frechet_distance(real, fake, make_generator(seed)) for seed, fake in enumerate(fakes)
    ]
    check_spread([(result.value, result.standard_error) for result in results])


def test_the_bias_is_what_a_large_sample_does_not_have():
    real = draw_normal(20_000, 10, 0)
    truth = frechet_distance(real, draw_normal(200_000, 10, 1, shift=0.2), make_generator()).value
    fakes = [draw_normal(150, 10, 100 + seed, shift=0.2) for seed in range(25)]
    results = [
        frechet_distance(real, fake, make_generator(seed)) for seed, fake in enumerate(fakes)
    ]
    excess = np.mean([result.value for result in results]) - truth
    stated = np.mean([result.bias for result in results])
    assert excess > 0
    assert excess / 2 < stated < excess * 2


@pytest.mark.parametrize(("n", "m"), [(1, 50), (50, 1)])
def test_one_image_has_no_spread(n, m):
    with pytest.raises(SettingError, match="at least two real"):
        frechet_distance(draw_features(n, 3, 1), draw_features(m, 3, 2), make_generator())


def test_the_kernel_distance_is_that_of_all_pairs():
    real = draw_features(24, 6, 1)
    fake = draw_features(24, 6, 2) + 0.2
    value, error = kernel_distance(real, fake, make_generator(), num_subsets=400)
    assert value == pytest.approx(compute_kernel_naively(real, fake), abs=4 * error / 20)
    for seed in range(3):  # of two images each there is but one subset, and no half of it
        real = draw_features(2, 6, seed)
        fake = draw_features(2, 6, 50 + seed)
        value, error = kernel_distance(real, fake, make_generator())
        assert value == pytest.approx(compute_kernel_naively(real, fake), rel=1e-6)
        assert math.isnan(error)


def test_equal_laws_are_at_no_kernel_distance_within_the_error_and_others_are():
    def measure(seed, other, shift=0.0):
        sides = draw_normal(300, 8, seed), draw_normal(300, 8, other, shift=shift)
        return kernel_distance(*sides, make_generator(seed), num_subsets=30)

    same = [measure(seed, 1000 + seed) for seed in range(20)]
    assert np.mean([abs(value) < 3 * error for value, error in same]) > 0.9
    assert min(error for _, error in same) > 1e-4  # full sets would not spread at all
    value, error = measure(0, 1, shift=0.5)
    assert value > 5 * error


@pytest.mark.parametrize("count", [120, 400])  # subsets of half the set; subsets of 100 out of 400
def test_the_error_of_the_kernel_distance_is_the_spread_over_fresh_samples(count):
    results = []
    for seed in range(50):
        sides = draw_normal(count, 6, seed), draw_normal(count, 6, 500 + seed, shift=0.5)
        results.append(
            kernel_distance(*sides, make_generator(seed), num_subsets=30, subset_size=100)
        )
    check_spread(results)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    for name in ("fid", "kid"):
        monkeypatch.setitem(sys.modules, f"torchmetrics.image.{name}", None)
    for function in (frechet_distance, kernel_distance):
        with pytest.raises(SettingError, match=r"privot\[measures\]"):
            function(draw_features(5, 3, 1), draw_features(5, 3, 2), make_generator())
