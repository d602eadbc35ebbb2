"""Distances to a released set: exact, in portions, by class, calibrated; and the real start that a cosine betrays."""

import numpy as np
import pytest
import torch

from privot.attacks.membership import controls
from privot.attacks.membership.control_data import load_digit_splits
from privot.attacks.membership.lira import balanced_membership
from privot.attacks.membership.nearest import (
    calibrate_scores,
    score_largest_cosine,
    score_nearest_distance,
)
from privot.audit import compute_roc
from privot.errors import DataError, SettingError
from privot.measures import nearest as module
from privot.measures.image_similarity import find_lpips_weights, lpips
from privot.measures.nearest import (
    DISTANCE_METRICS,
    build_embedding,
    search_nearest_neighbours,
)

CANDIDATES, OTHERS, MORE = load_digit_splits(0)


def weighed():
    try:
        find_lpips_weights()
    except DataError:
        return False
    return True


LPIPS = pytest.mark.skipif(
    not weighed(), reason="the weights of LPIPS are not there: PRIVOT_DATA names their folder"
)
EACH = [
    pytest.param(name, marks=[LPIPS, pytest.mark.data] if name == "lpips" else [])
    for name in DISTANCE_METRICS
]


def test_neighbours_are_those_of_all_pairs(monkeypatch):
    images = CANDIDATES.images[:30]
    reference = MORE.images
    apart, places = torch.cdist(images.flatten(1).double(), reference.flatten(1).double()).sort()
    monkeypatch.setattr(module, "QUERY_BATCH_SIZE", 7)
    monkeypatch.setattr(module, "REFERENCE_BATCH_SIZE", 64)
    found = search_nearest_neighbours(images, reference, 5)
    torch.testing.assert_close(found.distances, apart[:, :5])
    assert torch.equal(found.indices, places[:, :5])
    monkeypatch.setattr(
        module, "MAX_CACHED_ELEMENTS", 0
    )  # the reference is measured anew for each portion
    assert torch.equal(search_nearest_neighbours(images, reference, 5).indices, found.indices)


@LPIPS
@pytest.mark.data
def test_lpips_by_matrix_products_is_lpips(one_thread):
    images = CANDIDATES.images[:4]
    reference = OTHERS.images[:20]
    wanted = torch.stack([lpips(each.expand(20, -1, -1, -1), reference) for each in images])
    values, places = wanted.sort()
    found = search_nearest_neighbours(images, reference, 3, "lpips")
    torch.testing.assert_close(found.distances, values[:, :3], rtol=1e-4, atol=1e-6)
    assert torch.equal(found.indices, places[:, :3])


@pytest.mark.parametrize("metric", EACH)
def test_a_copy_has_distance_zero(metric, one_thread):
    released = torch.cat([OTHERS.images[:20], CANDIDATES.images[:5]])
    found = search_nearest_neighbours(CANDIDATES.images[:10], released, 1, metric)
    assert found.indices[:5, 0].tolist() == [20, 21, 22, 23, 24]
    assert found.distances[:5].max() < 1e-3 * found.distances[5:].min()


def test_a_copy_is_told_from_a_near_copy_far_from_the_origin():
    # By |a|² + |b|² - 2ab alone both would be at a distance of rounding.
    bright = torch.full((1, 1, 64, 64), 0.999)
    near = bright.clone()
    near[0, 0, 0, 0] -= 1e-3
    assert search_nearest_neighbours(
        bright, torch.cat([near, near]), 1
    ).distances.item() == pytest.approx(1e-3, rel=1e-3)


def test_classes_are_kept_apart():
    found = search_nearest_neighbours(
        CANDIDATES.images,
        OTHERS.images,
        2,
        labels=CANDIDATES.labels,
        reference_labels=OTHERS.labels,
    )
    assert torch.equal(OTHERS.labels[found.indices], CANDIDATES.labels[:, None].expand(-1, 2))
    for place in (0, 50):
        own = (OTHERS.labels == CANDIDATES.labels[place]).nonzero().flatten()
        apart = (CANDIDATES.images[place] - OTHERS.images[own]).flatten(1).norm(dim=1).sort()
        assert found.indices[place].tolist() == own[apart.indices[:2]].tolist()
    with pytest.raises(SettingError, match="class"):
        score_nearest_distance(
            CANDIDATES.images,
            OTHERS.images,
            labels=CANDIDATES.labels,
            released_labels=torch.zeros_like(OTHERS.labels),
        )


def test_calibration_takes_away_what_is_near_every_set():
    # Sets of faded records of all contrasts: faint ones lie near anything, unless shadows tell how near they usually lie.
    generator = torch.Generator().manual_seed(0)
    images = torch.cat([CANDIDATES.images, MORE.images]) * torch.rand(
        600, 1, 1, 1, generator=generator
    )
    members = balanced_membership(len(images), 10, generator)

    scores = np.stack(
        [
            score_nearest_distance(images, 0.8 * images[torch.from_numpy(inside)])
            for inside in members
        ]
    )
    plain = scores[0]
    better = calibrate_scores(scores[0], scores[1:], members[1:])
    before, after = (
        compute_roc(each[members[0]], each[~members[0]]).auc for each in (plain, better)
    )
    print(f"AUC {before:.3f}, calibrated {after:.3f}")
    assert after > before + 0.05
    everyone = np.ones((9, len(images)), bool)
    with pytest.raises(SettingError, match="made without it"):
        calibrate_scores(scores[0], scores[1:], everyone)


def test_a_real_start_is_found_although_all_images_moved():
    start = CANDIDATES.images[:100]
    rest = CANDIDATES.images[100:]
    moved = (
        start
        + 0.5 * torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        - start.mean(0)
    )
    assert (
        compute_roc(score_largest_cosine(start, moved), score_largest_cosine(rest, moved)).auc
        > 0.99
    )
    by_class = score_largest_cosine(
        CANDIDATES.images, moved, labels=CANDIDATES.labels, released_labels=CANDIDATES.labels[:100]
    )
    assert compute_roc(by_class[:100], by_class[100:]).auc > 0.9
    noise = torch.rand(100, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    assert (
        controls.compute_null_p_value(
            score_largest_cosine(start, noise), score_largest_cosine(rest, noise)
        )
        > 0.01
    )


def test_rulers_are_by_the_seed_and_unknown_ones_are_refused():
    measure = [
        build_embedding("features", (1, 8, 8), torch.device("cpu"), seed)(CANDIDATES.images[:3])
        for seed in (0, 0, 1)
    ]
    assert torch.equal(measure[0], measure[1])
    assert not torch.equal(measure[0], measure[2])
    with pytest.raises(SettingError, match="metric='l3'"):
        search_nearest_neighbours(CANDIDATES.images, OTHERS.images, 1, "l3")
    with pytest.raises(SettingError, match="num_neighbours"):
        search_nearest_neighbours(CANDIDATES.images, OTHERS.images, 101)
    with pytest.raises(SettingError, match="one shape"):
        search_nearest_neighbours(CANDIDATES.images, torch.zeros(3, 3, 8, 8))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: this compares one with the CPU"
)
@pytest.mark.parametrize("metric", EACH)
def test_a_gpu_finds_the_same(metric):
    here, there = (
        search_nearest_neighbours(CANDIDATES.images, OTHERS.images.to(device), 2, metric)
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(there.distances, here.distances, rtol=1e-3, atol=1e-4)
    assert (there.indices == here.indices).float().mean() > 0.98  # near ties may fall the other way
    by_class = score_largest_cosine(
        CANDIDATES.images,
        OTHERS.images.cuda(),
        labels=CANDIDATES.labels,
        released_labels=OTHERS.labels,
    )
    wanted = score_largest_cosine(
        CANDIDATES.images, OTHERS.images, labels=CANDIDATES.labels, released_labels=OTHERS.labels
    )
    np.testing.assert_allclose(by_class, wanted, atol=1e-4)
