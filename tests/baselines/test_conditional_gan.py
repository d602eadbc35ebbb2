"""The conditional GAN: it learns what belongs to which label, and says that it protects nobody."""

import numpy as np
import pytest
import torch

from privot.baselines import conditional_gan
from privot.baselines.conditional_gan import ConditionalGAN
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.methods import make_method
from privot.nets import GENERATORS, initialize_weights
from privot.nets.generators.dcgan import (
    ConditionalBatchNorm,
    DcganGenerator,
    ProjectionCritic,
    gradient_penalty,
)
from privot.privacy.guarantee import NoGuarantee
from privot.release import Release
from privot.runtime import Runtime
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def blobs(count=200):
    """A bright square of 3 x 3 somewhere in the left half for label 0, in the right one for label 1; three times as many of label 0."""
    rng = np.random.default_rng(0)
    labels = (np.arange(count) % 4 == 3).astype(np.int64)
    images = np.zeros((count, 1, 8, 8), np.float32)
    for image, label in zip(images, labels, strict=True):
        top = rng.integers(1, 4)
        left = rng.integers(0, 2) + 4 * label
        image[0, top : top + 3, left : left + 3] = rng.uniform(0.6, 1)
    return images, labels


def learned(folder, device):
    method = ConditionalGAN(
        base_channels=8, latent_dim=8, steps=250, batch_size=32, learning_rate=2e-3, ema_decay=0.9
    )
    box = Sensitive(*blobs(), Spec((1, 8, 8), 2), name="blobs")
    return synthesize(
        box, method, out=folder / "out", ledger=folder / "blobs.jsonl", runtime=Runtime(device)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gan")
    return learned(folder, "cpu"), folder / "out"


def check_samples(release):
    images, labels = release.sample(200)
    right = images[..., 4:].sum((1, 2, 3))
    left = images[..., :4].sum((1, 2, 3))
    assert ((right > left).long() == labels).float().mean() > 0.95
    # As bright as the data, a square of 9 pixels and black elsewhere, and not one image for all.
    assert images.sum((1, 2, 3)).mean().item() == pytest.approx(
        blobs()[0].sum((1, 2, 3)).mean(), rel=0.2
    )
    assert images.flatten(1).topk(9).values.mean() > 0.5
    assert images[labels == 0].std(0).max() > 0.15


def test_samples_follow_their_label(trained):
    check_samples(trained[0])


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: a step is captured on one alone"
)
def test_captured_steps_learn_the_same(tmp_path):
    check_samples(learned(tmp_path, "cuda"))


def test_it_promises_nothing(trained):
    release, folder = trained
    assert isinstance(release.guarantee, NoGuarantee)
    assert "trained on the records themselves" in release.guarantee.reason
    assert Release.load(folder).guarantee == release.guarantee


def test_the_same_seed_gives_the_same_generator(tmp_path):
    box = Sensitive(*blobs(20), Spec((1, 8, 8), 2), name="blobs")
    tiny = ConditionalGAN(base_channels=4, latent_dim=4, steps=3, batch_size=4)
    made = [
        synthesize(
            box, tiny, ledger=tmp_path / "b.jsonl", seed=seed, runtime=Runtime("cpu")
        ).sample(4)[0]
        for seed in (3, 3, 4)
    ]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 6, 6), (3, 8, 12), (1, 28, 28), (3, 32, 32), (3, 64, 64)]
)
def test_any_size_and_colour(shape):
    net = DcganGenerator(shape, 3, latent_dim=4, channels=2)
    critic = ProjectionCritic(shape, 3, channels=2)
    labels = torch.arange(4) % 3
    images = net(torch.randn(4, 4, generator=seeded()), labels)
    assert images.shape == (4, *shape)
    assert 0 <= images.min() <= images.max() <= 1
    assert critic(images, labels).shape == (4,)


def test_the_label_reaches_generator_and_critic():
    net = initialize_weights(
        GENERATORS["DcganGenerator"]((1, 8, 8), 2, latent_dim=4, channels=4), seeded()
    ).eval()
    critic = initialize_weights(ProjectionCritic((1, 8, 8), 2, channels=4), seeded()).eval()
    codes = torch.randn(3, 4, generator=seeded())
    zero = torch.zeros(3, dtype=torch.int64)
    one = torch.ones(3, dtype=torch.int64)
    assert not torch.allclose(net(codes, zero), net(codes, one))
    images = net(codes, zero)
    assert not torch.allclose(critic(images, zero), critic(images, one))


def test_half_precision_stays_half_and_near():
    """Gains in float32 would widen the maps, which a GPU spends its time on."""
    norm = ConditionalBatchNorm(4, 2)
    x = torch.randn(6, 4, 5, 5, generator=seeded())
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    torch.nn.init.normal_(norm.gain, generator=seeded(1))
    torch.nn.init.normal_(norm.shift, generator=seeded(2))
    plain = torch.nn.functional.batch_norm(x, None, None, training=True)
    wanted = (
        plain * (1 + norm.gain[labels])[:, :, None, None] + norm.shift[labels][:, :, None, None]
    )
    assert torch.allclose(norm(x, labels), wanted, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x.bfloat16(), labels)
    assert found.dtype is torch.bfloat16
    assert torch.allclose(found.float(), wanted, atol=0.05, rtol=0.05)


def test_steepness_is_the_slope_of_the_scores_and_can_be_learned_from():
    critic = initialize_weights(ProjectionCritic((3, 8, 8), 2, channels=4), seeded()).double()
    images = torch.rand(3, 3, 8, 8, generator=seeded(1), dtype=torch.float64).requires_grad_()
    labels = torch.tensor([0, 1, 1])
    found = gradient_penalty(critic(images, labels), images)
    step = 1e-6  # pixels in [0, 1] move by half of what they move in [-1, 1]
    with torch.no_grad():
        moved = images[:, None] + step / 2 * torch.eye(192, dtype=torch.float64).view(192, 3, 8, 8)
        scores = (
            critic(moved.flatten(0, 1), labels.repeat_interleave(192)).view(3, 192)
            - critic(images, labels)[:, None]
        )
    assert found.item() == pytest.approx((scores / step).square().sum(1).mean().item(), rel=1e-4)
    found.backward()
    with torch.no_grad():
        for each in critic.parameters():
            if each.grad is not None:
                each -= 1e-3 * each.grad / each.grad.norm().clamp(min=1e-9)
    assert gradient_penalty(critic(images, labels), images) < found


@pytest.mark.parametrize("penalty", [0.0, 300.0])
def test_the_penalty_flattens_the_critic(penalty, monkeypatch, tmp_path):
    """Without it scores of records and of drawings part as far as they like."""
    critics = []

    class Seen(ProjectionCritic):
        def __init__(self, *given):
            super().__init__(*given)
            critics.append(self)

    monkeypatch.setattr(conditional_gan, "ProjectionCritic", Seen)
    method = ConditionalGAN(
        base_channels=4,
        latent_dim=4,
        steps=60,
        batch_size=16,
        learning_rate=2e-3,
        gradient_penalty=penalty,
    )
    images, labels = blobs()
    box = Sensitive(images, labels, Spec((1, 8, 8), 2), name="blobs")
    synthesize(box, method, ledger=tmp_path / "blobs.jsonl", runtime=Runtime("cpu"))
    shown = torch.from_numpy(images).requires_grad_()
    slope = gradient_penalty(critics[0](shown, torch.from_numpy(labels)), shown).item()
    print(f"penalty {penalty}: slope {slope:.2g}")
    assert slope < 0.02 if penalty else slope > 0.1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        ("base_channels", 0),
        ("critic_steps", 0),
        ("latent_dim", 0),
        ("batch_size", 1),
        ("gradient_penalty", -1.0),
    ],
)
def test_bad_settings_are_errors(key, value):
    with pytest.raises(SettingError, match=f"conditional-gan.{key}"):
        make_method("conditional-gan", {key: value})


def test_rates_are_checked():
    for settings in ({"learning_rate": 0.0}, {"ema_decay": 1.0}, {"learning_rate": float("nan")}):
        with pytest.raises(SettingError):
            ConditionalGAN(**settings)
