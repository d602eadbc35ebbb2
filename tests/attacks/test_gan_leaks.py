"""GAN-Leaks: what a generator can give is given back, what it cannot is not; a reference takes away what is easy for all."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from privot.attacks.membership import gan_leaks, latent_search
from privot.attacks.membership.control_data import load_digit_splits
from privot.attacks.membership.gan_leaks import (
    score_full_black_box,
    score_partial_black_box,
    score_white_box,
)
from privot.attacks.membership.nearest import calibrate_scores
from privot.attacks.membership.target import AttackTarget
from privot.audit import compute_roc
from privot.data import Public
from privot.data.spec import Spec
from privot.errors import DataError, ReleaseError, SettingError
from privot.measures.image_similarity import LPIPS_WEIGHTS
from privot.nets import DenseGenerator, initialize_weights
from privot.privacy.guarantee import NoGuarantee
from privot.release import Release
from privot.release.artifact import Artifact
from privot.runtime import Runtime

SPEC = Spec((1, 8, 8), 10)
COUNT = 20
SIZES = {"shape": (1, 8, 8), "classes": 10, "latent_dim": 5, "hidden_dim": 64}
LABELS = torch.arange(COUNT) % 10


@pytest.fixture(scope="module")
def product():
    net = initialize_weights(DenseGenerator(**SIZES), torch.Generator().manual_seed(0)).eval()
    return Artifact.from_generator("DenseGenerator", SIZES, net)


@pytest.fixture(scope="module")
def its_own(product):
    codes = torch.randn(COUNT, 5, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return product.build_generator()(codes, LABELS)


def test_white_box_finds_the_code_of_a_generated_image(product, its_own, one_thread):
    begun = (
        -(score_full_black_box(its_own, *pair(product)) ** 2) * 4 / 64
    )  # in the same unit: what a thousand draws alone come to
    found = score_white_box(product, its_own, LABELS, lpips_weight=0)
    print(f"squared error {-found.mean():.2g}, of draws alone {-begun.mean():.2g}")
    assert found.min() > -1e-4
    assert found.mean() > begun.mean() / 1000


def pair(product):
    images, _ = product.sample(SPEC, 1000, LABELS.repeat(50), seed=0)
    return (images,)


def test_partial_black_box_finds_it_without_gradients(product, its_own, one_thread):
    class Asked(nn.Module):
        """Refuses to be differentiated."""

        latent_dim = 5
        net = product.build_generator()

        def forward(self, codes, labels):
            assert not codes.requires_grad
            assert not torch.is_grad_enabled()
            return self.net(codes, labels)

    assert score_partial_black_box(Asked(), its_own, LABELS, num_rounds=100).min() > -1e-3


@pytest.mark.parametrize("attack", [score_white_box, score_partial_black_box])
def test_what_the_generator_cannot_give_stays_far(product, attack, one_thread):
    noise = torch.rand(COUNT, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    settings = {"steps": 30, "lpips_weight": 0} if attack is score_white_box else {"num_rounds": 30}
    assert attack(product, noise, LABELS, **settings).max() < -0.1


def test_portions_and_other_candidates_change_nothing(product, its_own, monkeypatch, one_thread):
    how = {"steps": 40, "restarts": 2, "lpips_weight": 0}
    together = score_white_box(product, its_own, LABELS, **how)
    monkeypatch.setattr(latent_search, "SEARCHES_PER_BATCH", 6)
    np.testing.assert_allclose(
        score_white_box(product, its_own, LABELS, **how), together, rtol=0.05, atol=1e-6
    )


def test_more_restarts_never_hurt(product, its_own, one_thread):
    how = {"steps": 30, "lpips_weight": 0}
    one, three = (
        score_white_box(product, its_own, LABELS, restarts=each, **how) for each in (1, 3)
    )
    assert (three >= one - 1e-6).all()
    assert three.mean() > one.mean()


def test_lpips_joins_where_its_weights_are(product, its_own, empty_data_folders, one_thread):
    assert gan_leaks._resolve_lpips_weight(None) == 0  # the folders are empty
    with pytest.raises(DataError, match="LPIPS"):
        score_white_box(product, its_own, LABELS, lpips_weight=0.2)


def test_lpips_is_part_of_the_search(product, its_own, one_thread, data_file):
    for name in LPIPS_WEIGHTS:
        data_file("weights", name)
    assert gan_leaks._resolve_lpips_weight(None) == gan_leaks.LPIPS_WEIGHT
    how = {"steps": 8, "restarts": 1}
    alone, both = (
        score_white_box(product, its_own[:4], LABELS[:4], lpips_weight=each, **how)
        for each in (0, 0.2)
    )
    assert (both < alone).all()  # a term more in the distance


def test_calibration_takes_away_what_is_easy_for_every_generator(one_thread):
    # Candidates differ in contrast: the faint ones are near anything grey. Full black box against memories of members and of others.
    candidates, others, _ = load_digit_splits(0)
    contrast = torch.rand(200, 1, 1, 1, generator=torch.Generator().manual_seed(2))
    images = candidates.images * contrast
    memories = [images[:100] * 0.8, others.images * contrast[:100]]  # what it gives is no copy
    own, reference = (score_full_black_box(images, each) for each in memories)
    better = calibrate_scores(own, reference[None])
    before, after = (compute_roc(each[:100], each[100:]).auc for each in (own, better))
    print(f"AUC {before:.3f}, calibrated {after:.3f}")
    assert after > before + 0.02
    with pytest.raises(SettingError, match="shadows"):
        calibrate_scores(own, reference[None, 1:])


@pytest.mark.parametrize("attack", [score_white_box, score_partial_black_box])
def test_a_generator_that_diverged_is_refused(product, its_own, attack):
    broken = copy.deepcopy(product)
    next(each for each in broken.tensors.values() if each.is_floating_point()).fill_(math.nan)
    with pytest.raises(ReleaseError, match="not finite"):
        attack(broken, its_own, LABELS)


def test_a_search_asks_for_no_samples(product, its_own, monkeypatch, one_thread):
    """They take longer than the search where there is no GPU to draw them."""
    drawn = []
    sample = Release.sample
    monkeypatch.setattr(
        Release, "sample", lambda *given, **more: drawn.append(1) or sample(*given, **more)
    )
    target = AttackTarget(
        Release(product, NoGuarantee("a test"), SPEC, {}),
        Runtime("cpu"),
        num_samples=40,
        lpips_weight=0,
    )
    sides = [
        Public(each.numpy(), own.numpy(), SPEC)
        for each, own in zip(its_own.split(10), LABELS.split(10), strict=True)
    ]
    target.score("gan-leaks-white", *sides)
    assert not drawn
    for _ in range(2):
        target.score("gan-leaks-full", *sides)
    assert len(drawn) == 1


def test_a_set_is_no_generator():
    made = Artifact.from_images(torch.zeros(2, 1, 8, 8), torch.zeros(2))
    with pytest.raises(SettingError, match="set"):
        score_white_box(
            made, torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64), lpips_weight=0
        )


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: this compares one with the CPU"
)
def test_a_gpu_finds_the_code_too(product, its_own):
    for perceptual in (0, None):
        assert (
            score_white_box(product, its_own, LABELS, lpips_weight=perceptual, device="cuda").min()
            > -1e-2
        )
    assert score_partial_black_box(product, its_own, LABELS, device="cuda").min() > -1e-3
