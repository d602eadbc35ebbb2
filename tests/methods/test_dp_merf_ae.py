"""DP-MERF+AE: what both queries ask, the shares of their price, and what the generator learns."""

import math

import numpy as np
import pytest
import torch
from support.method_inputs import make_blobs, make_gate, make_rng, measure_agreement

from privot.components.dp_sgd import compute_per_example_gradient, detach_weights, flatten_tensors
from privot.components.latent_space import reconstruction_loss
from privot.data.spec import Spec
from privot.methods import dp_merf_ae
from privot.methods.dp_merf_ae import DPMERFAutoencoder, compute_fourier_features, embed_latent
from privot.nets import initialize_weights
from privot.nets.dp_autoencoder import Autoencoder
from privot.privacy import accounting
from privot.privacy.plan import Neighbours, Plan
from privot.runtime import Runtime, Streams, ignore_progress

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 8, 8)
SPEC = Spec(SHAPE, 2)
TINY = {
    "autoencoder_dim": 3,
    "autoencoder_hidden_dim": 8,
    "num_frequencies": 4,
    "num_features": 32,
    "feature_batch_size": 16,
    "hidden_dim": 8,
    "latent_dim": 2,
    "batch_per_class": 4,
    "sample_rate": 0.3,
}


def make_autoencoder():
    return initialize_weights(Autoencoder(SHAPE, 3, 8, 4), make_rng())


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_an_embedded_latent_vector_has_norm_one(share):
    """Whatever the record is, so that the clip loses nothing."""
    rng = np.random.default_rng(3)
    extremes = [np.zeros(SHAPE), np.ones(SHAPE), np.eye(1, 64, 9).reshape(SHAPE)]
    images = np.stack([*extremes, *rng.integers(2, size=(10, *SHAPE)), *rng.random((10, *SHAPE))])
    encoder = make_autoencoder().encoder.requires_grad_(False)
    frequencies = torch.randn(3, 16, generator=make_rng(1))
    parts = torch.func.vmap(embed_latent, in_dims=(0, 0, *(None,) * 4))(
        torch.from_numpy(images).float(),
        torch.zeros(23, dtype=torch.int64),
        encoder,
        detach_weights(encoder),
        frequencies,
        share,
    )
    assert parts.norm(dim=1).max() <= 1 + 1e-6
    assert parts.norm(dim=1).min() > 1 - 1e-5
    assert parts[:, -1].tolist() == pytest.approx([share] * 23)


def test_a_part_of_the_autoencoder_is_the_gradient_of_cross_entropy():
    net = make_autoencoder()
    images = torch.rand(3, *SHAPE, generator=make_rng(1))
    parts = torch.func.vmap(compute_per_example_gradient, in_dims=(0, 0, *(None,) * 4))(
        images,
        torch.zeros(3, dtype=torch.int64),
        net,
        detach_weights(net),
        reconstruction_loss,
        None,
    )
    for image, part in zip(images, parts, strict=True):
        shown = net(image[None]).sigmoid()
        loss = -(image * shown.log() + (1 - image) * (1 - shown).log()).mean()
        gradient = flatten_tensors(torch.autograd.grad(loss, list(net.parameters())))
        torch.testing.assert_close(part, gradient, rtol=1e-3, atol=1e-5)


def test_the_price_is_that_of_both_and_shares_are_parts_of_it():
    for share in (0.1, 0.3, 0.8):
        plan = DPMERFAutoencoder(
            noise_multiplier=4.0, autoencoder_steps=50, sample_rate=0.5, embedding_share=share
        ).plan(SPEC)
        assert plan.neighbours is Neighbours.ADD_REMOVE
        training, embedding = plan.stages
        assert 1 / embedding.noise_multiplier**2 == pytest.approx(share / 16)
        # exact: mu² of sampled answers is near rate² * steps * (exp(1 / noise²) - 1)
        assert 0.25 * 50 * math.expm1(1 / training.noise_multiplier**2) == pytest.approx(
            (1 - share) / 16, rel=0.05
        )
    whole = plan.cost().epsilon(1e-5)
    assert whole == pytest.approx(accounting._gaussian_cost(1 / 4).epsilon(1e-5), rel=0.05)
    assert all(
        Plan((stage,), plan.neighbours).cost().epsilon(1e-5) < whole for stage in plan.stages
    )


def test_samples_follow_their_label_and_look_like_the_records():
    method = DPMERFAutoencoder(
        noise_multiplier=0.1,
        autoencoder_steps=100,
        sample_rate=0.2,
        autoencoder_dim=4,
        autoencoder_hidden_dim=32,
        num_frequencies=8,
        num_features=200,
        feature_batch_size=200,
        hidden_dim=32,
        steps=150,
        batch_per_class=20,
        autoencoder_learning_rate=1e-2,
    )
    gate = make_gate(method.plan(SPEC), *make_blobs(), SPEC, chunk=100)
    artifact = method.fit(gate, Streams(0, Runtime("cpu")), ignore_progress)
    assert gate.count_remaining_queries("autoencoder") == 0
    assert gate.count_remaining_queries("embedding") == 0
    images, labels = artifact.sample(SPEC, 200)
    assert measure_agreement(images, labels) > 0.9
    brightness = make_blobs()[0].sum((1, 2, 3)).mean()
    assert images.sum((1, 2, 3)).mean().item() == pytest.approx(brightness, rel=0.3)
    assert artifact.is_consistent_with(SPEC)


@pytest.mark.parametrize("spec", [SPEC, Spec(SHAPE, 2, 30, (20, 10))], ids=["counted", "declared"])
def test_without_noise_the_target_is_the_mean_embedding(monkeypatch, spec):
    """Of each class, by the trained encoder."""
    images = torch.from_numpy(make_blobs(30)[0])
    labels = (torch.arange(30) % 3 == 0).long()
    autoencoder = make_autoencoder()
    targets = []
    monkeypatch.setattr(
        dp_merf_ae, "fit_generator", lambda draw, net, *given, **more: targets.append(given)
    )
    monkeypatch.setattr(DPMERFAutoencoder, "_train_autoencoder", lambda *given: autoencoder)
    method = DPMERFAutoencoder(**TINY, noise_multiplier=0.0, autoencoder_steps=3)
    method.fit(
        make_gate(method.plan(spec), images, labels, spec),
        Streams(0, Runtime("cpu")),
        ignore_progress,
    )
    target, weight, frequencies = targets[0][:3]
    features = compute_fourier_features(autoencoder.encoder(images), frequencies)
    for label in range(2):
        expected = features[labels == label].mean(0) * weight[label]
        torch.testing.assert_close(target[label], expected.detach(), rtol=1e-3, atol=1e-4)
    assert weight.tolist() == pytest.approx([20 / 15, 10 / 15], rel=1e-4)
