"""GAN-Leaks: what a generator can generate is recovered, what it cannot is not."""

import copy
import math

import numpy as np
import pytest
import torch
from support.seeding import seed_generator
from torch import nn

from privot.attacks.membership import gan_leaks, latent_search
from privot.attacks.membership.gan_leaks import (
    score_full_black_box,
    score_partial_black_box,
    score_white_box,
)
from privot.attacks.membership.target import AttackTarget
from privot.data import Public
from privot.data.spec import Spec
from privot.errors import DataError, ReleaseError, SettingError
from privot.measures.image_similarity import LPIPS_WEIGHTS
from privot.nets import DenseGenerator, initialize_weights
from privot.privacy.guarantee import NoGuarantee
from privot.release import Release
from privot.release.artifact import Artifact
from privot.runtime import Runtime

pytestmark = pytest.mark.usefixtures("one_thread")
SPEC = Spec((1, 8, 8), 10)
COUNT = 20
SIZES = {"shape": (1, 8, 8), "classes": 10, "latent_dim": 5, "hidden_dim": 64}
LABELS = torch.arange(COUNT) % 10


@pytest.fixture(scope="module")
def artifact():
    net = initialize_weights(DenseGenerator(**SIZES), seed_generator()).eval()
    return Artifact.from_generator("DenseGenerator", SIZES, net)


@pytest.fixture(scope="module")
def generated(artifact):
    with torch.no_grad():
        return artifact.build_generator()(
            torch.randn(COUNT, 5, generator=seed_generator(9)), LABELS
        )


def test_white_box_finds_the_code_of_a_generated_image(artifact, generated):
    samples, _ = artifact.sample(SPEC, 1000, LABELS.repeat(50), seed=0)
    draws = -(score_full_black_box(generated, samples) ** 2) * 4 / 64  # in the same unit
    scores = score_white_box(artifact, generated, LABELS, lpips_weight=0)
    assert scores.min() > -1e-4
    assert scores.mean() > draws.mean() / 1000


def test_partial_black_box_finds_it_without_gradients(artifact, generated):
    class Asked(nn.Module):
        """Refuses to be differentiated."""

        latent_dim = 5
        net = artifact.build_generator()

        def forward(self, codes, labels):
            assert not codes.requires_grad
            assert not torch.is_grad_enabled()
            return self.net(codes, labels)

    assert score_partial_black_box(Asked(), generated, LABELS, num_rounds=100).min() > -1e-3


QUICK = {
    score_white_box: {"steps": 30, "lpips_weight": 0},
    score_partial_black_box: {"num_rounds": 30},
}


@pytest.mark.parametrize("attack", QUICK)
def test_noise_stays_far_and_a_generator_that_diverged_is_refused(artifact, generated, attack):
    noise = torch.rand(COUNT, 1, 8, 8, generator=seed_generator(1))
    assert attack(artifact, noise, LABELS, **QUICK[attack]).max() < -0.1
    broken = copy.deepcopy(artifact)
    weights = [tensor for tensor in broken.tensors.values() if tensor.is_floating_point()]
    weights[0].fill_(math.nan)
    with pytest.raises(ReleaseError, match="not finite"):
        attack(broken, generated, LABELS)


def test_more_restarts_never_hurt_and_batches_change_nothing(artifact, generated, monkeypatch):
    def search(restarts):
        return score_white_box(
            artifact, generated, LABELS, restarts=restarts, steps=30, lpips_weight=0
        )

    one = search(1)
    three = search(3)
    assert (three >= one - 1e-6).all()
    assert three.mean() > one.mean()
    monkeypatch.setattr(latent_search, "SEARCHES_PER_BATCH", 6)
    np.testing.assert_allclose(search(3), three, rtol=0.05, atol=1e-6)


def test_lpips_joins_where_its_weights_are(artifact, generated, empty_data_folders):
    assert gan_leaks._resolve_lpips_weight(None) == 0  # the folders are empty
    with pytest.raises(DataError, match="LPIPS"):
        score_white_box(artifact, generated, LABELS, lpips_weight=0.2)


def test_lpips_is_part_of_the_search(artifact, generated, data_file):
    for name in LPIPS_WEIGHTS:
        data_file("weights", name)
    assert gan_leaks._resolve_lpips_weight(None) == gan_leaks.LPIPS_WEIGHT
    few = (artifact, generated[:4], LABELS[:4])
    alone, both = (
        score_white_box(*few, lpips_weight=weight, steps=8, restarts=1) for weight in (0, 0.2)
    )
    assert (both < alone).all()  # a term more in the distance


def test_a_search_asks_for_no_samples(artifact, generated, monkeypatch):
    """They take longer than the search where there is no GPU to draw them."""
    calls = []
    sample = Release.sample

    def spy(*given, **more):
        calls.append(1)
        return sample(*given, **more)

    monkeypatch.setattr(Release, "sample", spy)
    release = Release(artifact, NoGuarantee("a test"), SPEC, {})
    target = AttackTarget(release, Runtime("cpu"), num_samples=40, lpips_weight=0)
    sides = [
        Public(images.numpy(), labels.numpy(), SPEC)
        for images, labels in zip(generated.split(10), LABELS.split(10), strict=True)
    ]
    target.score("gan-leaks-white", *sides)
    assert not calls
    for _ in range(2):
        target.score("gan-leaks-full", *sides)
    assert len(calls) == 1


def test_a_set_is_no_generator():
    images = Artifact.from_images(torch.zeros(2, 1, 8, 8), torch.zeros(2))
    with pytest.raises(SettingError, match="set"):
        score_white_box(images, torch.zeros(1, 1, 8, 8), LABELS[:1], lpips_weight=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_finds_the_code_too(artifact, generated):
    given = (artifact, generated, LABELS)
    for weight in (0, None):
        assert score_white_box(*given, lpips_weight=weight, device="cuda").min() > -1e-2
    assert score_partial_black_box(*given, device="cuda").min() > -1e-3
