"""Who never saw the release: sides that look alike are not told apart, others are."""

import numpy as np
import pytest
import torch

from privot.attacks.membership.blind_baseline import run_blind_baseline
from privot.audit import compute_roc
from privot.data import load_dataset
from privot.data.dataset import Records

pytestmark = pytest.mark.usefixtures("one_thread")


def halves(seed, count=700):
    images, labels = load_dataset("digits", public=True).records()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return [
        Records(images[each], labels[each]) for each in (order[:count], order[count : 2 * count])
    ]


def test_halves_of_one_set_are_not_told_apart():
    """The chance is that of two tests, doubled, so under one in a hundred at most once in a hundred: 4 of 12 have 5e-6."""
    found = [run_blind_baseline(*halves(seed), 10, seed) for seed in range(12)]
    assert sum(each.p_value < 0.01 for each in found) < 4
    assert np.mean(
        [compute_roc(each.members, each.nonmembers).auc for each in found]
    ) == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("change", ["brighter", "moved", "labels"])
def test_sides_that_differ_are(change):
    one, (images, labels) = halves(0)
    other = {
        "brighter": Records((images * 1.2).clamp(max=1), labels),
        "moved": Records(images.roll(1, -1), labels),
        "labels": Records(images, torch.where(labels > 4, labels, labels % 2)),
    }[change]
    found = run_blind_baseline(one, other, 10)
    assert found.p_value < 1e-6
    assert compute_roc(found.members, found.nonmembers).auc > 0.6


def test_a_side_of_one_record_is_not_judged():
    one, other = halves(0, 5)
    assert run_blind_baseline(Records(one.images[:1], one.labels[:1]), other, 10).p_value == 1
