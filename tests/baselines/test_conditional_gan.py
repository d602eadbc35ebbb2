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
from privot.nets import initialize_weights
from privot.nets.generators.dcgan import (
    ConditionalBatchNorm,
    DcganGenerator,
    ProjectionCritic,
    gradient_penalty,
)
from privot.release import Release
from privot.runtime import Runtime
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")


def make_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make_squares(count=200):
    """A bright square of 3 x 3, in the left half for label 0 and in the right one for label 1."""
    rng = np.random.default_rng(0)
    labels = (np.arange(count) % 4 == 3).astype(np.int64)
    images = np.zeros((count, 1, 8, 8), np.float32)
    for image, label in zip(images, labels, strict=True):
        top = rng.integers(1, 4)
        left = rng.integers(0, 2) + 4 * label
        image[0, top : top + 3, left : left + 3] = rng.uniform(0.6, 1)
    return images, labels


def train(folder, device="cpu", learning_rate=2e-3, **settings):
    method = ConditionalGAN(base_channels=4, latent_dim=8, learning_rate=learning_rate, **settings)
    dataset = Sensitive(*make_squares(), Spec((1, 8, 8), 2), name="squares")
    return synthesize(
        dataset, method, out=folder / "out", ledger=folder / "ledger.jsonl", runtime=Runtime(device)
    )


def sample_with_sides(release):
    """Images, labels, and the label that the brighter half of each image stands for."""
    images, labels = release.sample(200)
    sides = images[..., 4:].sum((1, 2, 3)) > images[..., :4].sum((1, 2, 3))
    return images, labels, sides.long()


def test_samples_follow_their_label_and_nothing_is_promised(tmp_path):
    release = train(tmp_path, learning_rate=4e-3, steps=80, batch_size=32, ema_decay=0.9)
    _, labels, sides = sample_with_sides(release)
    assert (sides == labels).float().mean() > 0.9
    assert "trained on the records themselves" in release.guarantee.reason
    assert Release.load(tmp_path / "out").guarantee == release.guarantee


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_samples_look_like_the_records(device, tmp_path):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here: a step is captured on one alone")
    release = train(tmp_path, device, steps=250, batch_size=32, ema_decay=0.9)
    images, labels, sides = sample_with_sides(release)
    assert (sides == labels).float().mean() > 0.95
    # As bright as the data, a square of 9 pixels and black elsewhere, and not one image for all.
    brightness = make_squares()[0].sum((1, 2, 3)).mean()
    assert images.sum((1, 2, 3)).mean().item() == pytest.approx(brightness, rel=0.2)
    assert images.flatten(1).topk(9).values.mean() > 0.5
    assert images[labels == 0].std(0).max() > 0.15


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 6, 6), (3, 8, 12), (1, 28, 28), (3, 32, 32), (3, 64, 64)]
)
def test_any_size_and_color_and_the_label_reaches_both_networks(shape):
    net = initialize_weights(
        DcganGenerator(shape, 3, latent_dim=4, channels=2), make_generator()
    ).eval()
    critic = initialize_weights(ProjectionCritic(shape, 3, channels=2), make_generator()).eval()
    latents = torch.randn(4, 4, generator=make_generator())
    zeros = torch.zeros(4, dtype=torch.int64)
    images, others = (net(latents, labels) for labels in (zeros, zeros + 1))
    assert images.shape == (4, *shape)
    assert 0 <= images.min() <= images.max() <= 1
    assert not torch.allclose(images, others)
    assert critic(images, zeros).shape == (4,)
    assert not torch.allclose(critic(images, zeros), critic(images, zeros + 1))


def test_half_precision_stays_half_and_near():
    """Gains in float32 would widen the maps, which a GPU spends its time on."""
    norm = ConditionalBatchNorm(4, 2)
    x = torch.randn(6, 4, 5, 5, generator=make_generator())
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    torch.nn.init.normal_(norm.gain, generator=make_generator(1))
    torch.nn.init.normal_(norm.shift, generator=make_generator(2))
    gain, shift = (table[labels][:, :, None, None] for table in (norm.gain, norm.shift))
    expected = torch.nn.functional.batch_norm(x, None, None, training=True) * (1 + gain) + shift
    assert torch.allclose(norm(x, labels), expected, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        half = norm(x.bfloat16(), labels)
    assert half.dtype is torch.bfloat16
    assert torch.allclose(half.float(), expected, atol=0.05, rtol=0.05)


def test_penalty_is_the_squared_input_gradient_and_can_be_minimized():
    critic = initialize_weights(ProjectionCritic((3, 8, 8), 2, channels=4), make_generator())
    critic = critic.double()
    images = torch.rand(3, 3, 8, 8, generator=make_generator(1), dtype=torch.float64)
    images.requires_grad_()
    labels = torch.tensor([0, 1, 1])
    penalty = gradient_penalty(critic(images, labels), images)
    step = 1e-6  # pixels in [0, 1] move by half of what they move in [-1, 1]
    with torch.no_grad():
        moved = images[:, None] + step / 2 * torch.eye(192, dtype=torch.float64).view(192, 3, 8, 8)
        scores = critic(moved.flatten(0, 1), labels.repeat_interleave(192)).view(3, 192)
        differences = (scores - critic(images, labels)[:, None]) / step
    assert penalty.item() == pytest.approx(differences.square().sum(1).mean().item(), rel=1e-4)
    penalty.backward()
    with torch.no_grad():
        for parameter in critic.parameters():
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad / parameter.grad.norm().clamp(min=1e-9)
    assert gradient_penalty(critic(images, labels), images) < penalty


@pytest.mark.parametrize("penalty", [0.0, 300.0])
def test_the_penalty_flattens_the_critic(penalty, monkeypatch, tmp_path):
    """Without it scores of records and of samples part as far as they like."""
    critics = []

    class Recorded(ProjectionCritic):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            critics.append(self)

    monkeypatch.setattr(conditional_gan, "ProjectionCritic", Recorded)
    train(tmp_path, steps=30, batch_size=16, learning_rate=4e-3, gradient_penalty=penalty)
    images, labels = (torch.from_numpy(array) for array in make_squares())
    scores = critics[0](images.requires_grad_(), labels)
    steepness = gradient_penalty(scores, images).item()
    print(steepness)
    assert steepness < 0.02 if penalty else steepness > 0.1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 0),
        ("base_channels", 0),
        ("critic_steps", 0),
        ("latent_dim", 0),
        ("batch_size", 1),
        ("gradient_penalty", -1.0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("ema_decay", 1.0),
    ],
)
def test_bad_settings_are_errors(key, value):
    with pytest.raises(SettingError, match=f"conditional-gan.{key}"):
        make_method("conditional-gan", {key: value})
