"""Sliced transport against POT, against plans written out, and against scikit-learn's isotonic regression; gradients by differences."""

import importlib.util
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest
from sklearn.isotonic import IsotonicRegression

from privot.runtime import use_threads
from privot.transport import sliced_distance
from privot.transport.sliced import (
    random_orthogonal_frames,
    resample_quantiles,
    slice_targets,
    sliced_flow_step,
    sliced_flow_step_with_error,
    sliced_target_loss,
)
from privot.transport.sliced_distance import (
    max_sliced_wasserstein_distance,
    sliced_wasserstein_distance,
)
from privot.transport.sorting import argsort_rows, isotonic_regression, sort_rows

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
    ),
]


def cloud(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def directions(count, dim, seed=0, dtype=torch.float64):
    return torch.nn.functional.normalize(cloud(count, dim, seed=1000 + seed), dim=1).to(dtype)


def frames(dim, bases, seed=0):
    return random_orthogonal_frames(dim, bases, torch.Generator().manual_seed(seed))


# frames


@pytest.mark.parametrize(("dim", "bases"), [(1, 3), (2, 1), (7, 5), (64, 2)])
def test_a_stack_of_bases_is_a_tight_frame(dim, bases):
    frame = frames(dim, bases)
    assert frame.shape == (bases * dim, dim)
    torch.testing.assert_close(frame.T @ frame, bases * torch.eye(dim, dtype=torch.float64))
    torch.testing.assert_close(
        frame.view(bases, dim, dim) @ frame.view(bases, dim, dim).mT,
        torch.eye(dim).double().expand(bases, -1, -1),
    )


def test_bases_are_uniform_over_rotations_and_reflections():
    """In 3 dimensions each entry is uniform on [-1, 1] (Archimedes), the trace has mean 0 and variance 1, both determinants are alike."""
    bases = frames(3, 4000).view(-1, 3, 3)
    for row in range(3):
        for column in range(3):
            assert kstest(bases[:, row, column].numpy(), "uniform", args=(-1, 2)).pvalue > 1e-4
    traces = bases.diagonal(dim1=1, dim2=2).sum(1)
    assert abs(float(traces.mean())) < 0.08  # 5 standard errors
    assert float(traces.var()) == pytest.approx(1, abs=0.12)
    assert abs(float((torch.linalg.det(bases) > 0).double().mean()) - 0.5) < 0.04


# the step


def written_out(points, frame, targets, rate):
    """The step, one direction and one point at a time; targets as many as points."""
    moves = torch.zeros_like(points)
    for direction, wanted in zip(frame, targets, strict=True):
        projected = points @ direction
        for place, point in enumerate(
            sorted(range(len(points)), key=lambda each: float(projected[each]))
        ):
            moves[point] += (wanted[place] - projected[point]) * direction
    return points + rate * points.shape[1] / len(frame) * moves


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_that_of_its_formula(dtype, device, bits):
    points = cloud(23, 5)
    frame = directions(11, 5)
    targets = cloud(11, 23, seed=2).sort(-1).values
    found = sliced_flow_step(
        points.to(device, dtype), frame.to(device), targets.to(device), 0.7, bits
    )
    assert found.dtype == dtype
    wanted = written_out(points, frame, targets, 0.7)
    if (
        device == "cuda" and dtype == torch.float32
    ):  # TF32 moves a projection by some 1e-3, and a pair nearer than that changes places
        assert float((found.double().cpu() - wanted).square().mean()) < 0.01 * float(
            (wanted - points).square().mean()
        )
    else:
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bits", [16, 32])
def test_on_a_basis_each_coordinate_lands_on_its_quantile(bits):
    points = cloud(501, 6, dtype=torch.float32)
    basis = frames(6, 1).float()
    targets = cloud(6, 501, seed=3, dtype=torch.float32).sort(-1).values
    moved = sliced_flow_step(points, basis, targets, 1.0, bits)
    torch.testing.assert_close((basis @ moved.T).sort(-1).values, targets, rtol=1e-4, atol=1e-4)
    assert float(sliced_flow_step_with_error(moved, basis, targets, 1.0, bits)[1]) < 1e-8
    torch.testing.assert_close(
        sliced_flow_step(moved, basis, targets, 1.0, bits), moved, rtol=1e-4, atol=1e-4
    )  # and stays there


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [40, 8])
def test_many_classes_at_once_are_each_on_its_own(parts, device):
    points = cloud(3, 40, 4).to(device)
    frame = frames(4, 2).to(device)
    targets = cloud(3, 8, parts, seed=4).sort(-1).values.to(device)
    together, left = sliced_flow_step_with_error(points, frame, targets, 0.5)
    torch.testing.assert_close(together, sliced_flow_step(points, frame, targets, 0.5))
    for label in range(3):
        alone, square = sliced_flow_step_with_error(points[label], frame, targets[label], 0.5)
        torch.testing.assert_close(together[label], alone)
        torch.testing.assert_close(left[label], square)


def test_sixteen_bits_give_every_target_out_and_cost_next_to_nothing():
    values = cloud(7, 3000, dtype=torch.float32)
    targets = cloud(7, 3000, seed=5, dtype=torch.float32).sort(-1).values
    exact, quick = (slice_targets(values, targets, bits) for bits in (32, 16))
    assert (quick.sort(-1).values == targets).all()
    assert (
        0 < int((exact != quick).sum()) < 0.2 * exact.numel()
    )  # some ties, else this says nothing
    spread = values.gather(-1, argsort_rows(values, 16)).diff()
    assert float((-spread).max() / (values.amax() - values.amin())) < 1 / 32_767
    costs = [float((values - each).square().mean()) for each in (exact, quick)]
    assert costs[1] == pytest.approx(costs[0], rel=1e-5)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize(
    "row",
    [
        [0.0, 0.0, 0.0],
        [1e30, -1e30, 0.0],
        [1e-40, 0.0, -1e-40],
        [1e6, 1e6 + 1, 1e6 - 1],
        [-0.0, 0.0, -1.0],
        [3.0],
    ],
)
def test_ranks_of_awkward_rows(row, bits):
    values = torch.tensor([row])
    order = argsort_rows(values, bits)
    assert sorted(order[0].tolist()) == list(range(len(row)))
    if bits == 32 or max(map(abs, row)) > 1e-30:
        assert (values.gather(-1, order) == values.sort(-1).values).all()


def test_threads_change_nothing():
    values = cloud(130, 2100, dtype=torch.float32)
    alone = [argsort_rows(values), argsort_rows(values, 16), sort_rows(values)]
    with use_threads(3):
        together = [argsort_rows(values), argsort_rows(values, 16), sort_rows(values)]
    for one, three in zip(alone, together, strict=True):
        assert (one == three).all()


def test_quantiles_are_read_between_blocks():
    line = (
        torch.arange(5, dtype=torch.float64) * 2 + 1
    )  # block means of the points 0 ... 10 spread evenly
    torch.testing.assert_close(
        resample_quantiles(line, 50), (torch.arange(50, dtype=torch.float64) + 0.5) / 5
    )
    torch.testing.assert_close(
        resample_quantiles(line, 2), torch.tensor([2.5, 7.5], dtype=torch.float64)
    )
    assert resample_quantiles(line, 5).data_ptr() == line.data_ptr()
    assert resample_quantiles(torch.tensor([[2.0], [3.0]]), 4).tolist() == [[2.0] * 4, [3.0] * 4]
    bent = cloud(6, 30, seed=6).sort(-1).values
    assert (resample_quantiles(bent, 1000).diff() >= 0).all()


def test_a_flow_finds_a_law_from_its_blocks():
    """Two far lumps, seen through block means alone; what is left is the block that straddles the gap between them."""
    dim = 3
    draw = torch.Generator().manual_seed(0)
    law = torch.randn(4000, dim, generator=draw) * 0.3 + torch.where(
        torch.rand(4000, 1, generator=draw) < 0.5, -2.0, 2.0
    )
    frame = random_orthogonal_frames(dim, 12, draw).float()
    targets = sort_rows(frame @ law.T).view(len(frame), 50, 80).mean(-1)
    points = torch.randn(1000, dim, generator=draw)
    start = points
    judge = directions(200, dim, dtype=torch.float32)
    for turn in range(60):
        basis = turn % 12 * dim
        points = sliced_flow_step(
            points, frame[basis : basis + dim], targets[basis : basis + dim], 0.5
        )
    first, last = (float(sliced_wasserstein_distance(each, law, judge)) for each in (start, points))
    assert last < first / 8  # 1.42 and 0.12 to 0.15 in four draws
    near = (points[:, None] - torch.tensor([[-2.0], [2.0]]).expand(2, dim)).norm(dim=-1).amin(1)
    assert float((near < 1.5).float().mean()) > 0.95


def test_a_step_leaves_the_precision_of_products_alone():
    before = torch.get_float32_matmul_precision()
    sliced_flow_step(cloud(4, 2), torch.eye(2).double(), cloud(2, 4).sort(-1).values)
    with pytest.raises(RuntimeError):
        sliced_flow_step(cloud(4, 2), torch.eye(3).double(), cloud(3, 4).sort(-1).values)
    assert torch.get_float32_matmul_precision() == before


# counting instead of sorting

TRITON = importlib.util.find_spec("triton") and (
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
)
counting = pytest.mark.skipif(not TRITON, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
PLACE = "cuda" if torch.cuda.is_available() else "cpu"


def by_counting(values, targets, bins):
    """The formula of kernels.sliced, a row at a time, in float32 where the bin of a value depends on it."""
    gaps = np.empty_like(values)
    for row, (value, wanted) in enumerate(zip(values, targets, strict=True)):
        least = value.min()
        most = value.max()
        where = (value - least) * (
            np.float32(bins - 1) / np.maximum(most - least, np.float32(1e-30))
        ) + np.float32(0.5)
        own = where.astype(np.int64).clip(0, bins - 1)
        counts = np.bincount(own, minlength=bins)
        at = (
            counts.cumsum()[own] - counts[own] + (where - own).clip(0, 1) * (counts[own] - 1) + 0.5
        ) * len(wanted) / len(value) - 0.5
        first = at.astype(np.int64).clip(0, max(len(wanted) - 2, 0))
        one = wanted[first]
        two = wanted[np.minimum(first + 1, len(wanted) - 1)]
        gaps[row] = one + (at - first) * (two - one) - value
    return gaps


@counting
@pytest.mark.parametrize(
    ("count", "parts"),
    [(300, 300), (3000, 50), (5000, 5000), (3000, 1), (10, 20), (1, 1), (2, 1), (1, 7)],
)
def test_counted_gaps_are_those_of_the_formula_and_nearly_those_of_ranks(count, parts):
    from privot.transport.kernels.sliced import NUM_BINS, binned_displacements

    values = cloud(2, 3, count, dtype=torch.float32)
    targets = cloud(2, 3, parts, seed=1, dtype=torch.float32).sort(-1).values
    found = binned_displacements(values.to(PLACE), targets.to(PLACE)).cpu()
    assert (found == binned_displacements(values.to(PLACE), targets.to(PLACE)).cpu()).all()
    wanted = by_counting(values.view(6, -1).numpy(), targets.view(6, -1).numpy(), NUM_BINS)
    far = int(((found.view(6, -1) - torch.from_numpy(wanted)).abs() > 1e-3).sum())
    assert far <= max(
        2, 0.005 * found.numel()
    )  # a value on the edge of two bins, which another rounding puts in the other
    by_rank = slice_targets(values, targets) - values
    assert float((found - by_rank).square().mean()) <= (0.05 if count > 10 else 0.001) ** 2 * float(
        by_rank.square().mean()
    )


@counting
def test_equal_values_are_counted_in_the_middle():
    from privot.transport.kernels.sliced import binned_displacements

    values = torch.full((1, 100), 2.0, device=PLACE)
    torch.testing.assert_close(
        binned_displacements(values, torch.tensor([[1.0, 3.0]], device=PLACE)),
        torch.zeros_like(values),
        rtol=0,
        atol=1e-5,
    )
    binned_displacements(
        values * math.nan, torch.tensor([[1.0, 3.0]], device=PLACE)
    )  # writes nowhere else


@pytest.mark.parametrize("device", DEVICES)
def test_twelve_bits_step_as_sixteen_do(device):
    points = cloud(2, 6000, 5, dtype=torch.float32).to(device)
    frame = frames(5, 3).to(device)
    targets = cloud(2, 15, 40, seed=7, dtype=torch.float32).sort(-1).values.to(device)
    few, more = (sliced_flow_step(points, frame, targets, 0.7, bits) for bits in (12, 16))
    assert float((few - more).square().mean()) < 1e-4 * float((more - points).square().mean())


# distances


def problem(seed):
    rng = np.random.default_rng(seed)
    n, dim, slices = (int(rng.integers(1, top)) for top in (60, 12, 20))
    m = n if rng.random() < 0.3 else int(rng.integers(1, 60))
    scale = 10 ** rng.uniform(-2, 2)
    x = cloud(n, dim, seed=2 * seed) * scale
    y = cloud(m, dim, seed=2 * seed + 1) * scale + rng.normal()
    return x, y, directions(slices, dim, seed), float(rng.choice([1, 1.5, 2, 3]))


def test_distances_are_those_of_pot(trust):
    ot = pytest.importorskip("ot", reason="POT is not installed: pip install 'privot[measures]'")
    for seed in range(200):
        x, y, frame, p = problem(seed)
        for mine, name in (
            (sliced_wasserstein_distance(x, y, frame, p), "sliced"),
            (max_sliced_wasserstein_distance(x, y, frame, p, ascent_steps=0), "max_sliced"),
        ):
            theirs = getattr(ot, f"{name}_wasserstein_distance")(
                x.numpy(), y.numpy(), projections=frame.T.numpy(), p=p
            )
            assert float(mine) == pytest.approx(float(theirs), rel=1e-6, abs=1e-9), (seed, name)
    trust("N1", "random problems whose sliced distances are those of POT to 1e-6", 200, of=200)


def test_float32_is_as_good_as_it_can_be():
    for seed in range(20):
        x, y, frame, p = problem(seed)
        found = sliced_wasserstein_distance(x.float(), y.float(), frame, p)
        assert found.dtype == torch.float32
        assert float(found) == pytest.approx(
            float(sliced_wasserstein_distance(x, y, frame, p)), rel=1e-4, abs=1e-5
        )


def test_batches_of_clouds():
    x = cloud(3, 10, 4)
    y = cloud(3, 15, 4, seed=1)
    frame = directions(6, 4)
    found = sliced_wasserstein_distance(x, y, frame)
    torch.testing.assert_close(
        found,
        torch.stack([sliced_wasserstein_distance(*pair, frame) for pair in zip(x, y, strict=True)]),
    )


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("count", [6, 9])
def test_gradients_of_distances(count, p):
    x = cloud(6, 3).requires_grad_()
    y = cloud(count, 3, seed=1).requires_grad_()
    frame = directions(4, 3)
    assert torch.autograd.gradcheck(
        lambda x, y: sliced_wasserstein_distance(x, y, frame, p), (x, y)
    )
    assert torch.autograd.gradcheck(
        lambda x, y: max_sliced_wasserstein_distance(x, y, frame, p, ascent_steps=0), (x, y)
    )
    assert torch.autograd.gradgradcheck(
        lambda x: sliced_wasserstein_distance(x, y.detach(), frame, p).pow(p), (x,)
    )


def test_gradient_at_the_worst_direction_of_all():
    """Climbed to the top the direction itself adds nothing: the gradient with it held is that of differences."""
    x = cloud(6, 2).requires_grad_()
    y = (cloud(6, 2, seed=1) + 1).requires_grad_()
    fan = torch.linspace(0, math.pi, 100).double()
    frame = torch.stack([fan.cos(), fan.sin()], 1)
    assert torch.autograd.gradcheck(
        lambda x, y: max_sliced_wasserstein_distance(x, y, frame, ascent_steps=40),
        (x, y),
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("parts", [7, 3])
@pytest.mark.parametrize("p", [1, 2])
def test_gradient_of_the_loss_to_targets(p, parts):
    points = cloud(2, 7, 3).requires_grad_()
    frame = directions(5, 3)
    targets = cloud(2, 5, parts, seed=1).sort(-1).values
    assert torch.autograd.gradcheck(lambda x: sliced_target_loss(x, frame, targets, p), (points,))
    if parts == 7:
        loss = sliced_target_loss(points[0], frame, targets[0], p)
        wanted = (sort_rows(frame @ points[0].T) - targets[0]).abs().pow(p).mean()
        torch.testing.assert_close(loss, wanted)


def test_gradient_in_float32_is_that_in_float64():
    x = cloud(300, 5)
    y = cloud(200, 5, seed=1)
    frame = directions(8, 5)
    slopes = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype).requires_grad_()
        sliced_wasserstein_distance(leaf, y.to(dtype), frame.to(dtype)).backward()
        slopes.append(leaf.grad.double())
    torch.testing.assert_close(*slopes, rtol=1e-3, atol=1e-6)


def test_no_distance_no_slope():
    x = cloud(5, 2).requires_grad_()
    value = sliced_wasserstein_distance(x, x.detach(), directions(3, 2))
    value.backward()
    assert float(value.detach()) == 0
    assert (x.grad == 0).all()


def test_ascents_find_a_direction_that_the_frame_lacks():
    """A shift along one of 20 axes, seen by 5 random directions; never lower than the frame's own best."""
    found = []
    for seed in range(10):
        x = cloud(200, 20, seed=seed)
        frame = directions(5, 20, seed)
        y = cloud(200, 20, seed=50 + seed)
        y[:, 3] += 4
        least, most = (
            float(max_sliced_wasserstein_distance(x, y, frame, ascent_steps=count))
            for count in (0, 20)
        )
        assert most >= least
        found.append((least, most))
    assert min(most for _, most in found) > 3.9 > 1.2 * max(least for least, _ in found)


def test_the_host_is_not_asked_for_sizes_twice():
    sliced_distance.interval_overlaps.cache_clear()
    for _ in range(3):
        sliced_wasserstein_distance(cloud(5, 2), cloud(7, 2), directions(3, 2))
    assert sliced_distance.interval_overlaps.cache_info().misses == 1
    left, right, widths = sliced_distance.interval_overlaps(
        60_000, 9_999, torch.device("cpu"), torch.float64
    )
    assert (int(left[-1]), int(right[-1])) == (59_999, 9_998)
    assert float(widths.sum()) == pytest.approx(1, abs=1e-12)


# ascending rows


@settings(max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.booleans(),
)
def test_the_nearest_ascending_row_is_that_of_scikit_learn(length, rows, seed, slope, coarse):
    values = cloud(rows, length, seed=seed) + slope * torch.arange(length)
    values = values.round() if coarse else values  # many ties
    found = isotonic_regression(values)
    places = np.arange(length)
    wanted = np.stack([IsotonicRegression().fit_transform(places, each) for each in values.numpy()])
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-9)
    assert (found.diff() >= -1e-12).all()
    torch.testing.assert_close(found.mean(-1), values.mean(-1))


def test_ascending_rows_keep_their_shape_and_what_is_right():
    values = cloud(2, 3, 4, 50, dtype=torch.float32)
    found = isotonic_regression(values)
    assert (found.shape, found.dtype) == (values.shape, values.dtype)
    torch.testing.assert_close(isotonic_regression(found), found)
    right = values.sort(-1).values
    assert (isotonic_regression(right) == right).all()
    down = torch.arange(10, 0, -1).float()
    assert (isotonic_regression(down) == 5.5).all()
