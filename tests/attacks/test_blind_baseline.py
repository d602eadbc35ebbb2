"""Who never saw the release: sides that look alike are not separated, others are."""

import numpy as np
import pytest
import torch
from support.seeding import seed_generator

from privot.attacks.membership.blind_baseline import run_blind_baseline
from privot.audit import compute_roc
from privot.data import load_dataset
from privot.data.dataset import Records

pytestmark = pytest.mark.usefixtures("one_thread")


def draw_halves(seed, count=700):
    images, labels = load_dataset("digits", public=True).records()
    order = torch.randperm(len(labels), generator=seed_generator(seed))
    return [Records(images[which], labels[which]) for which in order[: 2 * count].split(count)]


def test_halves_of_one_set_are_not_separated():
    """At most one in a hundred is below 0.01: 4 of 12 have a chance of 5e-6."""
    results = [run_blind_baseline(*draw_halves(seed), 10, seed) for seed in range(12)]
    assert sum(result.p_value < 0.01 for result in results) < 4
    aucs = [compute_roc(result.members, result.nonmembers).auc for result in results]
    assert np.mean(aucs) == pytest.approx(0.5, abs=0.04)
    (images, labels), other = draw_halves(0, 5)
    assert run_blind_baseline(Records(images[:1], labels[:1]), other, 10).p_value == 1


@pytest.mark.parametrize("change", ["brighter", "moved", "labels"])
def test_sides_that_differ_are(change):
    one, (images, labels) = draw_halves(0)
    other = {
        "brighter": Records((images * 1.2).clamp(max=1), labels),
        "moved": Records(images.roll(1, -1), labels),
        "labels": Records(images, torch.where(labels > 4, labels, labels % 2)),
    }[change]
    result = run_blind_baseline(one, other, 10)
    assert result.p_value < 1e-6
    assert compute_roc(result.members, result.nonmembers).auc > 0.6
