"""Fréchet and kernel distance: the formulas computed another way, closed forms, and errors that say what fresh samples would."""

import math
import sys

import numpy as np
import pytest
import scipy.linalg
import torch

from privot.errors import SettingError
from privot.measures.fid_kid import frechet_distance, kernel_distance

pytestmark = pytest.mark.usefixtures("one_thread")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(count, size, seed, scale=1.0, shift=0.0):
    return torch.randn(count, size, generator=seeded(seed), dtype=torch.float64) * scale + shift


def features(count, size, seed):
    """Correlated, skewed and not negative, as pooled features are."""
    return (gaussian(count, size, seed) @ gaussian(size, size, 99) / size**0.5 + 0.3).relu().float()


def naive(real, fake):
    """||m1 - m2||^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)), by a matrix square root."""
    (m1, s1), (m2, s2) = (
        (each.mean(0), np.cov(each, rowvar=False))
        for each in (real.double().numpy(), fake.double().numpy())
    )
    return (
        ((m1 - m2) ** 2).sum() + np.trace(s1 + s2) - 2 * np.trace(scipy.linalg.sqrtm(s1 @ s2).real)
    )


def naive_kernel(x, y):
    """The unbiased squared MMD of the kernel (x.y / d + 1)^3, pair by pair."""
    value = lambda a, b: (float(a @ b) / len(a) + 1) ** 3  # noqa: E731
    inner = sum(
        np.mean([value(a, b) for i, a in enumerate(each) for j, b in enumerate(each) if i != j])
        for each in (x, y)
    )
    return inner - 2 * np.mean([value(a, b) for a in x for b in y])


@pytest.mark.parametrize(
    ("n", "m", "d"), [(50, 40, 3), (300, 500, 20), (200, 130, 64), (60, 45, 100), (20, 300, 100)]
)
def test_the_value_is_that_of_a_matrix_square_root(n, m, d):
    real = features(n, d, 1)
    fake = features(m, d, 2) * 1.2 + 0.1
    assert frechet_distance(real, fake, seeded()).value == pytest.approx(
        naive(real, fake), rel=1e-3
    )


def test_the_order_of_the_sides_does_not_matter_and_a_set_is_at_no_distance_from_itself():
    real = features(90, 12, 1)
    fake = features(70, 12, 2)
    assert frechet_distance(real, fake, seeded()).value == pytest.approx(
        frechet_distance(fake, real, seeded()).value, rel=1e-6
    )
    assert frechet_distance(real, real, seeded()).value == pytest.approx(0, abs=1e-6)


def test_shifted_and_scaled_gaussians_have_a_closed_form():
    points = gaussian(400, 5, 0)
    size = 5
    spread = np.trace(np.cov(points.numpy(), rowvar=False))
    assert frechet_distance(points, points + 2, seeded()).value == pytest.approx(4 * size, rel=1e-6)
    centred = points - points.mean(0)
    assert frechet_distance(centred, 3 * centred, seeded()).value == pytest.approx(
        (3 - 1) ** 2 * spread, rel=1e-6
    )
    assert frechet_distance(centred, 3 * centred + 2, seeded()).value == pytest.approx(
        4 * spread + 4 * size, rel=1e-6
    )
    many = gaussian(200_000, 2, 1), gaussian(200_000, 2, 2, scale=2.0, shift=1.0)
    assert frechet_distance(*many, seeded()).value == pytest.approx(2 * (2 - 1) ** 2 + 2, rel=0.02)


def test_more_features_than_one_portion_are_all_counted():
    real = features(10_001, 4, 1)
    fake = features(10_000, 4, 2)
    assert frechet_distance(real, fake, seeded()).value == pytest.approx(
        naive(real, fake), rel=1e-3
    )


def test_the_error_is_the_spread_over_fresh_samples():
    real = gaussian(3000, 8, 0)
    found = [
        frechet_distance(real, gaussian(200, 8, 100 + seed, shift=0.3), seeded(seed))
        for seed in range(60)
    ]
    spread = np.std([each.value for each in found], ddof=1)
    said = math.sqrt(np.mean([each.standard_error**2 for each in found]))
    assert spread / 1.5 < said < spread * 1.5


def test_the_bias_is_what_a_large_sample_does_not_have():
    real = gaussian(20_000, 10, 0)
    truth = frechet_distance(real, gaussian(200_000, 10, 1, shift=0.2), seeded()).value
    found = [
        frechet_distance(real, gaussian(150, 10, 100 + seed, shift=0.2), seeded(seed))
        for seed in range(25)
    ]
    excess = np.mean([each.value for each in found]) - truth
    said = np.mean([each.bias for each in found])
    assert excess > 0
    assert excess / 2 < said < excess * 2


def test_the_generator_decides_error_and_bias_alone():
    real = features(100, 6, 1)
    fake = features(80, 6, 2)
    one, two, other = (frechet_distance(real, fake, seeded(seed)) for seed in (5, 5, 6))
    assert one == two
    assert (one.value, one.standard_error == other.standard_error) == (other.value, False)


@pytest.mark.parametrize(("n", "m"), [(1, 50), (50, 1)])
def test_one_image_has_no_spread(n, m):
    with pytest.raises(SettingError, match="at least two real"):
        frechet_distance(features(n, 3, 1), features(m, 3, 2), seeded())


def test_the_kernel_distance_is_that_of_all_pairs():
    real = features(24, 6, 1)
    fake = features(24, 6, 2) + 0.2
    value, error = kernel_distance(real, fake, seeded(), num_subsets=400)
    assert value == pytest.approx(
        naive_kernel(real.double().numpy(), fake.double().numpy()), abs=4 * error / 20
    )
    for seed in range(3):  # of two images each there is but one subset
        real = features(2, 6, seed)
        fake = features(2, 6, 50 + seed)
        assert kernel_distance(real, fake, seeded())[0] == pytest.approx(
            naive_kernel(real.double().numpy(), fake.double().numpy()), rel=1e-6
        )


def test_equal_laws_are_at_no_kernel_distance_within_the_error_and_others_are():
    same = [
        kernel_distance(
            gaussian(300, 8, seed), gaussian(300, 8, 1000 + seed), seeded(seed), num_subsets=30
        )
        for seed in range(20)
    ]
    assert np.mean([abs(value) < 3 * error for value, error in same]) > 0.9
    assert min(error for _, error in same) > 1e-4  # full sets would not spread at all
    value, error = kernel_distance(
        gaussian(300, 8, 0), gaussian(300, 8, 1, shift=0.5), seeded(), num_subsets=30
    )
    assert value > 5 * error


@pytest.mark.parametrize("count", [120, 400])  # subsets of half the set; subsets of 100 out of 400
def test_the_error_of_the_kernel_distance_is_the_spread_over_fresh_samples(count):
    sets = [
        (gaussian(count, 6, seed), gaussian(count, 6, 500 + seed, shift=0.5)) for seed in range(50)
    ]
    found = [
        kernel_distance(*each, seeded(seed), num_subsets=30, subset_size=100)
        for seed, each in enumerate(sets)
    ]
    spread = np.std([value for value, _ in found], ddof=1)
    said = math.sqrt(np.mean([error**2 for _, error in found]))
    assert spread / 1.5 < said < spread * 1.5


def test_so_few_images_that_no_half_is_left_have_no_kernel_error():
    value, error = kernel_distance(features(2, 3, 1), features(2, 3, 2), seeded())
    assert math.isfinite(value)
    assert math.isnan(error)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    for name in ("fid", "kid"):
        monkeypatch.setitem(sys.modules, f"torchmetrics.image.{name}", None)
    for function in (frechet_distance, kernel_distance):
        with pytest.raises(SettingError, match=r"privot\[measures\]"):
            function(features(5, 3, 1), features(5, 3, 2), seeded())
