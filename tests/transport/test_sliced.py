"""Sliced transport against POT, against plans written out, and against scikit-learn's isotonic regression; gradients by differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest
from sklearn.isotonic import IsotonicRegression
from support.make_points import make_points
from torch.autograd import gradcheck, gradgradcheck

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
assert_close = torch.testing.assert_close
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
both_precisions = pytest.mark.parametrize("bits", [16, 32])


def make_targets(*shape, seed=0, dtype=torch.float64):
    return make_points(*shape, seed=seed, dtype=dtype).sort(-1).values


def make_directions(count, dim, seed=0, dtype=torch.float64):
    points = make_points(count, dim, seed=1000 + seed, dtype=dtype)
    return torch.nn.functional.normalize(points, dim=1)


def make_frames(dim, bases):
    return random_orthogonal_frames(dim, bases, torch.Generator().manual_seed(0))


def mean_square(values):
    return float(values.square().mean())


# Frames


@pytest.mark.parametrize(("dim", "bases"), [(1, 3), (2, 1), (7, 5), (64, 2)])
def test_a_stack_of_bases_is_a_tight_frame(dim, bases):
    frame = make_frames(dim, bases)
    assert frame.shape == (bases * dim, dim)
    identity = torch.eye(dim, dtype=torch.float64)
    assert_close(frame.T @ frame, bases * identity)
    stack = frame.view(bases, dim, dim)
    assert_close(stack @ stack.mT, identity.expand(bases, -1, -1))


def test_bases_are_uniform_over_rotations_and_reflections():
    """In 3 dimensions each entry is uniform on [-1, 1] (Archimedes), the trace has mean 0 and variance 1, both determinants are alike."""
    bases = make_frames(3, 4000).view(-1, 3, 3)
    for entries in bases.flatten(1).T.numpy():
        assert kstest(entries, "uniform", args=(-1, 2)).pvalue > 1e-4
    traces = bases.diagonal(dim1=1, dim2=2).sum(1)
    assert abs(float(traces.mean())) < 0.08  # 5 standard errors
    assert float(traces.var()) == pytest.approx(1, abs=0.12)
    assert abs(float((torch.linalg.det(bases) > 0).double().mean()) - 0.5) < 0.04


# The step


def step_by_formula(points, frame, targets, rate):
    """The step, one direction and one point at a time; targets as many as points."""
    moves = torch.zeros_like(points)
    for direction, sorted_targets in zip(frame, targets, strict=True):
        projected = points @ direction
        order = sorted(range(len(points)), key=projected.tolist().__getitem__)
        for target, index in zip(sorted_targets, order, strict=True):
            moves[index] += (target - projected[index]) * direction
    return points + rate * points.shape[1] / len(frame) * moves


@both_precisions
@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_that_of_its_formula(dtype, device, bits):
    points = make_points(23, 5)
    frame = make_directions(11, 5)
    targets = make_targets(11, 23, seed=2)
    found = sliced_flow_step(
        points.to(device, dtype), frame.to(device), targets.to(device), 0.7, bits
    )
    assert found.dtype == dtype
    expected = step_by_formula(points, frame, targets, 0.7)
    if device == "cuda" and dtype == torch.float32:
        # TF32 moves a projection by some 1e-3, and a pair nearer than that changes its order
        error = mean_square(found.double().cpu() - expected)
        assert error < 0.01 * mean_square(expected - points)
    else:
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@both_precisions
def test_on_a_basis_every_coordinate_lands_on_its_quantile_and_stays(bits):
    points = make_points(501, 6, dtype=torch.float32)
    basis = make_frames(6, 1).float()
    targets = make_targets(6, 501, seed=3, dtype=torch.float32)
    moved = sliced_flow_step(points, basis, targets, 1.0, bits)
    assert_close((basis @ moved.T).sort(-1).values, targets, rtol=1e-4, atol=1e-4)
    again, error = sliced_flow_step_with_error(moved, basis, targets, 1.0, bits)
    assert float(error) < 1e-8
    assert_close(again, moved, rtol=1e-4, atol=1e-4)


@on_devices
@pytest.mark.parametrize("blocks", [40, 8])
def test_a_batch_of_classes_is_moved_one_by_one(blocks, device):
    points = make_points(3, 40, 4).to(device)
    frame = make_frames(4, 2).to(device)
    targets = make_targets(3, 8, blocks, seed=4).to(device)
    together, errors = sliced_flow_step_with_error(points, frame, targets, 0.5)
    assert_close(together, sliced_flow_step(points, frame, targets, 0.5))
    for label in range(3):
        alone, error = sliced_flow_step_with_error(points[label], frame, targets[label], 0.5)
        assert_close(together[label], alone)
        assert_close(errors[label], error)


def test_sixteen_bits_use_every_target_and_cost_next_to_nothing():
    values = make_points(7, 3000, dtype=torch.float32)
    targets = make_targets(7, 3000, seed=5, dtype=torch.float32)
    exact, quick = (slice_targets(values, targets, bits) for bits in (32, 16))
    assert (quick.sort(-1).values == targets).all()
    # some ties, else this says nothing
    assert 0 < int((exact != quick).sum()) < 0.2 * exact.numel()
    steps = values.gather(-1, argsort_rows(values, 16)).diff()
    assert float((-steps).max() / (values.amax() - values.amin())) < 1 / 32_767
    assert mean_square(values - quick) == pytest.approx(mean_square(values - exact), rel=1e-5)


@both_precisions
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
    values = make_points(130, 2100, dtype=torch.float32)

    def sort_all():
        return [argsort_rows(values), argsort_rows(values, 16), sort_rows(values)]

    alone = sort_all()
    with use_threads(3):
        together = sort_all()
    assert all(map(torch.equal, alone, together))


def test_quantiles_are_interpolated_between_blocks():
    # block means of the points 0 ... 10 spread evenly
    line = torch.arange(5, dtype=torch.float64) * 2 + 1
    expected = (torch.arange(50, dtype=torch.float64) + 0.5) / 5
    assert_close(resample_quantiles(line, 50), expected)
    assert resample_quantiles(line, 2).tolist() == pytest.approx([2.5, 7.5])
    assert resample_quantiles(line, 5).data_ptr() == line.data_ptr()
    assert resample_quantiles(torch.tensor([[2.0], [3.0]]), 4).tolist() == [[2.0] * 4, [3.0] * 4]
    assert (resample_quantiles(make_targets(6, 30, seed=6), 1000).diff() >= 0).all()


def test_a_flow_finds_a_law_from_its_blocks():
    """Two far lumps, seen through block means alone; what is left is the block that straddles the gap between them."""
    rng = torch.Generator().manual_seed(0)
    side = torch.where(torch.rand(4000, 1, generator=rng) < 0.5, -2.0, 2.0)
    law = torch.randn(4000, 3, generator=rng) * 0.3 + side
    frame = random_orthogonal_frames(3, 12, rng).float()
    targets = sort_rows(frame @ law.T).view(len(frame), 50, 80).mean(-1)
    points = start = torch.randn(1000, 3, generator=rng)
    for turn in range(60):
        basis = slice(turn % 12 * 3, turn % 12 * 3 + 3)
        points = sliced_flow_step(points, frame[basis], targets[basis], 0.5)
    directions = make_directions(200, 3, dtype=torch.float32)
    first, last = (
        float(sliced_wasserstein_distance(each, law, directions)) for each in (start, points)
    )
    assert last < first / 8  # 1.42 and 0.12 to 0.15 in four draws
    centers = torch.tensor([[-2.0], [2.0]]).expand(2, 3)
    nearest = (points[:, None] - centers).norm(dim=-1).amin(1)
    assert float((nearest < 1.5).float().mean()) > 0.95


def test_a_step_leaves_the_precision_of_products_alone():
    before = torch.get_float32_matmul_precision()
    points = make_points(4, 2)
    sliced_flow_step(points, torch.eye(2).double(), make_targets(2, 4))
    with pytest.raises(RuntimeError):
        sliced_flow_step(points, torch.eye(3).double(), make_targets(3, 4))
    assert torch.get_float32_matmul_precision() == before


# Counting instead of sorting


@on_devices
def test_twelve_bits_step_as_sixteen_do(device):
    points = make_points(2, 6000, 5, dtype=torch.float32).to(device)
    frame = make_frames(5, 3).to(device)
    targets = make_targets(2, 15, 40, seed=7, dtype=torch.float32).to(device)
    few, more = (sliced_flow_step(points, frame, targets, 0.7, bits) for bits in (12, 16))
    assert mean_square(few - more) < 1e-4 * mean_square(more - points)


# Distances


def make_problem(seed):
    rng = np.random.default_rng(seed)
    n, dim, num_directions = (int(rng.integers(1, top)) for top in (60, 12, 20))
    m = n if rng.random() < 0.3 else int(rng.integers(1, 60))
    scale = 10 ** rng.uniform(-2, 2)
    x = make_points(n, dim, seed=2 * seed, scale=scale)
    y = make_points(m, dim, seed=2 * seed + 1, scale=scale, shift=rng.normal())
    return x, y, make_directions(num_directions, dim, seed), float(rng.choice([1, 1.5, 2, 3]))


def test_distances_are_those_of_pot(trust):
    ot = pytest.importorskip("ot", reason="POT is not installed: pip install 'privot[measures]'")
    for seed in range(200):
        x, y, frame, p = make_problem(seed)
        arguments = {"projections": frame.T.numpy(), "p": p}
        for found, peer in (
            (sliced_wasserstein_distance(x, y, frame, p), ot.sliced_wasserstein_distance),
            (
                max_sliced_wasserstein_distance(x, y, frame, p, ascent_steps=0),
                ot.max_sliced_wasserstein_distance,
            ),
        ):
            expected = float(peer(x.numpy(), y.numpy(), **arguments))
            assert float(found) == pytest.approx(expected, rel=1e-6, abs=1e-9), (seed, peer)
    trust("N1", "random problems whose sliced distances are those of POT to 1e-6", 200, of=200)


def test_float32_is_as_good_as_it_can_be():
    for seed in range(20):
        x, y, frame, p = make_problem(seed)
        found = sliced_wasserstein_distance(x.float(), y.float(), frame, p)
        assert found.dtype == torch.float32
        expected = float(sliced_wasserstein_distance(x, y, frame, p))
        assert float(found) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_batch_of_distances_is_computed_one_by_one():
    x = make_points(3, 10, 4)
    y = make_points(3, 15, 4, seed=1)
    frame = make_directions(6, 4)
    apart = [sliced_wasserstein_distance(*pair, frame) for pair in zip(x, y, strict=True)]
    assert_close(sliced_wasserstein_distance(x, y, frame), torch.stack(apart))


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("count", [6, 9])
def test_gradients_of_distances(count, p):
    x = make_points(6, 3).requires_grad_()
    y = make_points(count, 3, seed=1).requires_grad_()
    frame = make_directions(4, 3)
    assert gradcheck(lambda x, y: sliced_wasserstein_distance(x, y, frame, p), (x, y))
    assert gradcheck(
        lambda x, y: max_sliced_wasserstein_distance(x, y, frame, p, ascent_steps=0), (x, y)
    )
    fixed = y.detach()
    assert gradgradcheck(lambda x: sliced_wasserstein_distance(x, fixed, frame, p).pow(p), (x,))


def test_gradient_at_the_worst_direction_of_all():
    """At the maximum the direction itself adds nothing: the gradient with it held is that of differences."""
    x = make_points(6, 2).requires_grad_()
    y = make_points(6, 2, seed=1, shift=1.0).requires_grad_()
    angles = torch.linspace(0, math.pi, 40).double()
    frame = torch.stack([angles.cos(), angles.sin()], 1)

    def compute_distance(x, y):
        return max_sliced_wasserstein_distance(x, y, frame, ascent_steps=30)

    assert gradcheck(compute_distance, (x, y), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("blocks", [7, 3])
@pytest.mark.parametrize("p", [1, 2])
def test_gradient_of_the_loss_to_targets(p, blocks):
    points = make_points(2, 7, 3).requires_grad_()
    frame = make_directions(5, 3)
    targets = make_targets(2, 5, blocks, seed=1)
    assert gradcheck(lambda x: sliced_target_loss(x, frame, targets, p), (points,))
    if blocks == 7:
        loss = sliced_target_loss(points[0], frame, targets[0], p)
        expected = (sort_rows(frame @ points[0].T) - targets[0]).abs().pow(p).mean()
        assert_close(loss, expected)


def test_gradient_in_float32_is_that_in_float64():
    x = make_points(300, 5)
    y = make_points(200, 5, seed=1)
    frame = make_directions(8, 5)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype).requires_grad_()
        sliced_wasserstein_distance(leaf, y.to(dtype), frame.to(dtype)).backward()
        gradients.append(leaf.grad.double())
    assert_close(*gradients, rtol=1e-3, atol=1e-6)


def test_equal_points_have_no_distance_and_no_gradient():
    x = make_points(5, 2).requires_grad_()
    distance = sliced_wasserstein_distance(x, x.detach(), make_directions(3, 2))
    distance.backward()
    assert float(distance.detach()) == 0
    assert (x.grad == 0).all()


def test_ascents_find_a_direction_that_the_frame_lacks():
    """A shift along one of 20 axes, seen by 5 random directions; never lower than the frame's own best."""
    distances = []
    for seed in range(10):
        x = make_points(200, 20, seed=seed)
        y = make_points(200, 20, seed=50 + seed)
        y[:, 3] += 4
        frame = make_directions(5, 20, seed)
        least, most = (
            float(max_sliced_wasserstein_distance(x, y, frame, ascent_steps=count))
            for count in (0, 20)
        )
        assert most >= least
        distances.append((least, most))
    assert min(most for _, most in distances) > 3.9 > 1.2 * max(least for least, _ in distances)


def test_overlaps_of_intervals_are_computed_once():
    sliced_distance.interval_overlaps.cache_clear()
    for _ in range(3):
        sliced_wasserstein_distance(make_points(5, 2), make_points(7, 2), make_directions(3, 2))
    assert sliced_distance.interval_overlaps.cache_info().misses == 1
    left, right, widths = sliced_distance.interval_overlaps(
        60_000, 9_999, torch.device("cpu"), torch.float64
    )
    assert (int(left[-1]), int(right[-1])) == (59_999, 9_998)
    assert float(widths.sum()) == pytest.approx(1, abs=1e-12)


# Ascending rows


@settings(max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.booleans(),
)
def test_the_nearest_ascending_row_is_that_of_scikit_learn(length, rows, seed, trend, coarse):
    values = make_points(rows, length, seed=seed) + trend * torch.arange(length)
    values = values.round() if coarse else values  # many ties
    found = isotonic_regression(values)
    indices = np.arange(length)
    expected = [IsotonicRegression().fit_transform(indices, row) for row in values.numpy()]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)
    assert (found.diff() >= -1e-12).all()
    assert_close(found.mean(-1), values.mean(-1))


def test_ascending_rows_keep_their_shape_and_what_is_right():
    values = make_points(2, 3, 4, 50, dtype=torch.float32)
    found = isotonic_regression(values)
    assert (found.shape, found.dtype) == (values.shape, values.dtype)
    assert_close(isotonic_regression(found), found)
    right = values.sort(-1).values
    assert torch.equal(isotonic_regression(right), right)
    assert (isotonic_regression(torch.arange(10, 0, -1).float()) == 5.5).all()
