"""Distances to a released set: exact, by class, calibrated; and the cosine to a real start."""

import numpy as np
import pytest
import torch
from support.seeding import seed_generator

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
from privot.measures.nearest import DISTANCE_METRICS, build_embedding, search_nearest_neighbours

pytestmark = pytest.mark.usefixtures("one_thread")
CANDIDATES, OTHERS, MORE = load_digit_splits(0)


def is_lpips_missing():
    try:
        find_lpips_weights()
    except DataError:
        return True
    return False


LPIPS = pytest.mark.skipif(is_lpips_missing(), reason="PRIVOT_DATA has no weights of LPIPS")
METRICS = [
    pytest.param(name, marks=[LPIPS, pytest.mark.data] if name == "lpips" else [])
    for name in DISTANCE_METRICS
]


def test_neighbours_are_those_of_all_pairs(monkeypatch):
    images = CANDIDATES.images[:30]
    rows = [part.flatten(1).double() for part in (images, MORE.images)]
    distances, indices = torch.cdist(*rows).sort()
    monkeypatch.setattr(module, "QUERY_BATCH_SIZE", 7)
    monkeypatch.setattr(module, "REFERENCE_BATCH_SIZE", 64)
    for cached in (module.MAX_CACHED_ELEMENTS, 0):  # 0: the reference is embedded for each batch
        monkeypatch.setattr(module, "MAX_CACHED_ELEMENTS", cached)
        nearest = search_nearest_neighbours(images, MORE.images, 5)
        torch.testing.assert_close(nearest.distances, distances[:, :5])
        assert torch.equal(nearest.indices, indices[:, :5])


@LPIPS
@pytest.mark.data
def test_lpips_by_matrix_products_is_lpips():
    images = CANDIDATES.images[:4]
    reference = OTHERS.images[:20]
    pairs = torch.stack([lpips(image.expand(20, -1, -1, -1), reference) for image in images])
    distances, indices = pairs.sort()
    nearest = search_nearest_neighbours(images, reference, 3, "lpips")
    torch.testing.assert_close(nearest.distances, distances[:, :3], rtol=1e-4, atol=1e-6)
    assert torch.equal(nearest.indices, indices[:, :3])


@pytest.mark.parametrize("metric", METRICS)
def test_a_copy_has_distance_zero(metric):
    released = torch.cat([OTHERS.images[:20], CANDIDATES.images[:5]])
    nearest = search_nearest_neighbours(CANDIDATES.images[:10], released, 1, metric)
    assert nearest.indices[:5, 0].tolist() == [20, 21, 22, 23, 24]
    assert nearest.distances[:5].max() < 1e-3 * nearest.distances[5:].min()


def test_a_copy_differs_from_a_near_copy_far_from_the_origin():
    # By |a|² + |b|² - 2ab alone both would be at a distance of rounding.
    bright = torch.full((1, 1, 64, 64), 0.999)
    near = bright.clone()
    near[0, 0, 0, 0] -= 1e-3
    nearest = search_nearest_neighbours(bright, torch.cat([near, near]), 1)
    assert nearest.distances.item() == pytest.approx(1e-3, rel=1e-3)


def test_classes_are_separate():
    sides = (CANDIDATES.images, OTHERS.images)
    classes = {"labels": CANDIDATES.labels, "reference_labels": OTHERS.labels}
    indices = search_nearest_neighbours(*sides, 2, **classes).indices
    assert torch.equal(OTHERS.labels[indices], CANDIDATES.labels[:, None].expand(-1, 2))
    for candidate in (0, 50):
        own = (OTHERS.labels == CANDIDATES.labels[candidate]).nonzero().flatten()
        gaps = (CANDIDATES.images[candidate] - OTHERS.images[own]).flatten(1).norm(dim=1)
        assert indices[candidate].tolist() == own[gaps.argsort()[:2]].tolist()
    nobody = torch.zeros_like(OTHERS.labels)
    with pytest.raises(SettingError, match="class"):
        score_nearest_distance(*sides, labels=CANDIDATES.labels, released_labels=nobody)


def test_calibration_removes_what_is_near_every_set():
    # Faint records lie near any set, unless shadows show how near they usually lie.
    generator = seed_generator()
    images = torch.cat([CANDIDATES.images, MORE.images])
    images = images * torch.rand(600, 1, 1, 1, generator=generator)
    members = balanced_membership(len(images), 10, generator)
    own, *rest = (
        score_nearest_distance(images, 0.8 * images[torch.from_numpy(inside)]) for inside in members
    )
    rest = np.stack(rest)
    better = calibrate_scores(own, rest, members[1:])
    before, after = (
        compute_roc(scores[members[0]], scores[~members[0]]).auc for scores in (own, better)
    )
    assert after > before + 0.05
    with pytest.raises(SettingError, match="shadows"):
        calibrate_scores(own, rest[:, 1:])
    with pytest.raises(SettingError, match="made without it"):
        calibrate_scores(own, rest, np.ones_like(members[1:]))


def test_a_real_start_is_found_although_all_images_moved():
    images, labels = CANDIDATES
    start, rest = images.split(100)
    moved = start + 0.5 * torch.rand(1, 1, 8, 8, generator=seed_generator()) - start.mean(0)
    assert compute_roc(*(score_largest_cosine(side, moved) for side in (start, rest))).auc > 0.99
    by_class = score_largest_cosine(images, moved, labels=labels, released_labels=labels[:100])
    assert compute_roc(by_class[:100], by_class[100:]).auc > 0.9


def test_embeddings_follow_from_the_seed_and_wrong_searches_are_refused():
    one, same, other = (
        build_embedding("features", (1, 8, 8), torch.device("cpu"), seed)(CANDIDATES.images[:3])
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    for words, wrong in {
        "metric='l3'": (OTHERS.images, 1, "l3"),
        "num_neighbours": (OTHERS.images, 101),
        "one shape": (torch.zeros(3, 3, 8, 8),),
    }.items():
        with pytest.raises(SettingError, match=words):
            search_nearest_neighbours(CANDIDATES.images, *wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("metric", METRICS)
def test_a_gpu_finds_the_same(metric):
    images, labels = CANDIDATES
    classes = {"labels": labels, "released_labels": OTHERS.labels}
    results = []
    cosines = []
    for device in ("cpu", "cuda"):
        released = OTHERS.images.to(device)
        results.append(search_nearest_neighbours(images, released, 2, metric))
        cosines.append(score_largest_cosine(images, released, **classes))
    here, gpu = results
    torch.testing.assert_close(gpu.distances, here.distances, rtol=1e-3, atol=1e-4)
    assert (gpu.indices == here.indices).float().mean() > 0.98  # near ties may fall the other way
    np.testing.assert_allclose(*cosines, atol=1e-4)
