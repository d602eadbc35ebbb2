"""DP-MERF+AE: both answers keep to their bounds, the price is that of both, and a crash costs no answer twice."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta, norm
from support.fakes import FreePlan, NullLedger

from privot.components.dp_sgd import compute_per_example_gradient, detach_weights, flatten_tensors
from privot.components.latent_space import reconstruction_loss
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.methods import dp_merf_ae, make_method
from privot.methods.dp_merf_ae import DPMERFAutoencoder, compute_fourier_features, embed_latent
from privot.nets import GENERATORS, initialize_weights
from privot.nets.dp_autoencoder import Autoencoder, Encoder
from privot.privacy import accounting
from privot.privacy import secret_side as secret_side_module
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Neighbours, Plan
from privot.runtime import Runtime, Streams, ignore_progress
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 8, 8)
CLASSES = 2
SPEC = Spec(SHAPE, CLASSES)
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


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def extremes(count):
    rng = np.random.default_rng(3)
    kinds = [
        lambda: np.zeros(SHAPE),
        lambda: np.ones(SHAPE),
        lambda: rng.integers(2, size=SHAPE),
        lambda: rng.random(SHAPE),
        lambda: np.eye(1, 64, rng.integers(64)).reshape(SHAPE),
        lambda: np.full(SHAPE, 0.5),
    ]
    return np.stack([kinds[turn % len(kinds)]() for turn in range(count)]).astype(np.float32)


def blobs(count=400):
    """A bright square of 3 x 3 somewhere in the left half for label 0, in the right one for label 1."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) % 2
    images = np.zeros((count, 1, 8, 8), np.float32)
    for image, label in zip(images, labels, strict=True):
        top = rng.integers(1, 4)
        left = rng.integers(0, 2) + 4 * label
        image[0, top : top + 3, left : left + 3] = rng.uniform(0.6, 1)
    return images, labels


def gate_for(method, images, labels, spec=SPEC, portion=16):
    plan = method.plan(spec)
    plan = FreePlan(plan.stages, plan.neighbours)
    return Gate(
        Sensitive(images, labels, spec),
        plan,
        NullLedger(),
        NullLedger(),
        runtime=Runtime("cpu", microbatch_size=portion),
    )


def encoder(seed=0):
    return initialize_weights(Encoder(SHAPE, 3, 8, 4), seeded(seed)).requires_grad_(False)


def asked(share=0.1):
    """What `embedded_code` is given beside a record."""
    net = encoder()
    return net, detach_weights(net), torch.randn(3, 16, generator=seeded(1)), share


# The answers


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_code_embedded_has_norm_one(share):
    images = torch.from_numpy(extremes(60))
    parts = torch.func.vmap(embed_latent, in_dims=(0, 0, *(None,) * 4))(
        images, torch.zeros(60, dtype=torch.int64), *asked(share)
    )
    assert parts.norm(dim=1).max() <= 1 + 1e-6
    assert parts.norm(dim=1).min() > 1 - 1e-5  # the clip is a guard, not a loss
    assert parts[:, -1].tolist() == pytest.approx([share] * 60)


@pytest.mark.parametrize("which", ["embedding", "autoencoder"])
def test_neighbours_answers_are_no_farther_apart_than_the_bound(which):
    rng = np.random.default_rng(4)
    largest = 0.0
    method = DPMERFAutoencoder(
        **{**TINY, "sample_rate": 1.0}, noise_multiplier=0.0, autoencoder_steps=100
    )
    net: torch.nn.Module = initialize_weights(Autoencoder(SHAPE, 3, 8, 4), seeded())
    with torch.no_grad():
        for each in net.parameters():
            each *= 20  # gradients far over the bound
    for turn, odd in enumerate(extremes(20)):
        images = extremes(12)
        labels = np.arange(12) % CLASSES
        where = int(rng.integers(12))
        images[where] = odd
        labels[where] = turn % CLASSES
        answers = []
        for some in (np.arange(12), np.delete(np.arange(12), where)):
            gate = gate_for(method, images[some], labels[some])
            if which == "embedding":
                answers.append(
                    gate.sum("embedding", embed_latent, *asked(), clip_norm=1.0, per_class=True)
                )
            else:
                answers.append(
                    gate.sum(
                        "autoencoder",
                        compute_per_example_gradient,
                        net,
                        detach_weights(net),
                        reconstruction_loss,
                        None,
                        clip_norm=1.0,
                    )
                )
        largest = max(largest, float((answers[0] - answers[1]).norm()))
    assert largest <= 1 + 1e-6
    assert largest > 0.99


def test_a_lesson_is_the_gradient_of_cross_entropy():
    net = initialize_weights(Autoencoder(SHAPE, 3, 8, 4), seeded())
    images = torch.rand(3, *SHAPE, generator=seeded(1))
    labels = torch.zeros(3, dtype=torch.int64)
    parts = torch.func.vmap(compute_per_example_gradient, in_dims=(0, 0, *(None,) * 4))(
        images, labels, net, detach_weights(net), reconstruction_loss, None
    )
    for image, part in zip(images, parts, strict=True):
        shown = net(image[None]).sigmoid()
        loss = -(image * shown.log() + (1 - image) * (1 - shown).log()).mean()
        torch.testing.assert_close(
            part,
            flatten_tensors(torch.autograd.grad(loss, list(net.parameters()))),
            rtol=1e-3,
            atol=1e-5,
        )


def audited(noise=1.0, asks=300):
    """Low TPR and high FPR of the attacker who looks along the record's own part, in the row of its class."""
    method = DPMERFAutoencoder(
        **TINY, noise_multiplier=noise, embedding_share=0.5, autoencoder_steps=1
    )
    images = extremes(8)
    given = asked()
    seen = []
    part = embed_latent(torch.from_numpy(images[3]), torch.tensor(1), *given).double()
    others = [0, 1, 2, 4, 5, 6, 7]
    rest = sum(
        embed_latent(torch.from_numpy(images[each]), torch.tensor(1), *given).double()
        for each in others
        if each % 2
    )
    multiplier = method.plan(SPEC).stages[1].noise_multiplier
    for there in (np.arange(8), np.array(others)):
        answers = []
        for _ in range(asks):
            gate = gate_for(method, images[there], there % 2)
            gate._infer_query_shape = lambda *given: part.shape
            answers.append(
                gate.sum("embedding", embed_latent, *given, clip_norm=1.0, per_class=True)[1]
            )
        seen.append(int(((torch.stack(answers) - rest) @ part > 0.5).sum()))
    low = beta.ppf(1e-4, seen[0], asks - seen[0] + 1)
    high = beta.ppf(1 - 1e-4, seen[1] + 1, asks - seen[1])
    return low, norm.cdf(norm.ppf(high) + 1 / multiplier)


@pytest.mark.slow
def test_an_audit_finds_what_is_claimed_and_half_the_noise(monkeypatch):
    found, allowed = audited(noise=0.5)
    assert found <= allowed
    honest = secret_side_module.add_noise
    monkeypatch.setattr(
        secret_side_module,
        "add_noise",
        lambda total, noise_std, *more: honest(total, noise_std / 2, *more),
    )
    found, allowed = audited(noise=0.5)
    assert found > allowed


# The price


def test_the_price_is_that_of_both_and_shares_are_parts_of_it():
    for share in (0.1, 0.3, 0.8):
        plan = DPMERFAutoencoder(
            noise_multiplier=4.0, autoencoder_steps=50, sample_rate=0.5, embedding_share=share
        ).plan(SPEC)
        assert plan.neighbours is Neighbours.ADD_REMOVE
        lessons, embedding = plan.stages
        assert 1 / embedding.noise_multiplier**2 == pytest.approx(share / 16)
        # exact: mu² of sampled answers is near rate² * steps * (exp(1 / noise²) - 1)
        assert 0.25 * 50 * math.expm1(1 / lessons.noise_multiplier**2) == pytest.approx(
            (1 - share) / 16, rel=0.05
        )
    whole = plan.cost().epsilon(1e-5)
    assert whole == pytest.approx(accounting._gaussian_cost(1 / 4).epsilon(1e-5), rel=0.05)
    assert all(
        Plan((stage,), plan.neighbours).cost().epsilon(1e-5) < whole for stage in plan.stages
    )


# What comes of it


def test_samples_follow_their_label_and_look_like_the_records():
    method = DPMERFAutoencoder(
        noise_multiplier=0.1,
        autoencoder_steps=250,
        sample_rate=0.2,
        autoencoder_dim=4,
        autoencoder_hidden_dim=32,
        num_frequencies=8,
        num_features=400,
        feature_batch_size=400,
        hidden_dim=32,
        steps=150,
        batch_per_class=20,
        autoencoder_learning_rate=1e-2,
    )
    gate = gate_for(method, *blobs(), portion=100)
    made = method.fit(gate, Streams(0, Runtime("cpu")), ignore_progress)
    assert (
        gate.count_remaining_queries("autoencoder")
        == gate.count_remaining_queries("embedding")
        == 0
    )
    images, labels = made.sample(SPEC, 200)
    right = images[..., 4:].sum((1, 2, 3))
    left = images[..., :4].sum((1, 2, 3))
    assert ((right > left).long() == labels).float().mean() > 0.9
    assert images.sum((1, 2, 3)).mean().item() == pytest.approx(
        blobs()[0].sum((1, 2, 3)).mean(), rel=0.3
    )
    assert made.is_consistent_with(SPEC)


def test_without_noise_the_target_is_the_mean_embedding(monkeypatch):
    """Of each class, by the encoder that was taught: what `match` gets."""
    images, labels = blobs(30)
    labels = (np.arange(30) % 3 == 0).astype(int)
    for spec in (SPEC, Spec(SHAPE, 2, 30, (20, 10))):
        method = DPMERFAutoencoder(**TINY, noise_multiplier=0.0, autoencoder_steps=3)
        got = []
        monkeypatch.setattr(
            dp_merf_ae,
            "fit_generator",
            lambda draw, parameters, *given, got=got, **more: got.append(given),
        )
        taught = []
        monkeypatch.setattr(
            DPMERFAutoencoder,
            "_train_autoencoder",
            lambda self, *given, taught=taught: (
                taught.append(initialize_weights(Autoencoder(SHAPE, 3, 8, 4), seeded()))
                or taught[0]
            ),
        )
        method.fit(
            gate_for(method, images, labels, spec), Streams(0, Runtime("cpu")), ignore_progress
        )
        target, weight, frequencies = got[0][:3]
        codes = compute_fourier_features(taught[0].encoder(torch.from_numpy(images)), frequencies)
        for label in range(2):
            wanted = codes[torch.from_numpy(labels) == label].mean(0) * weight[label]
            torch.testing.assert_close(target[label], wanted.detach(), rtol=1e-3, atol=1e-4)
        assert weight.tolist() == pytest.approx([20 / 15, 10 / 15], rel=1e-4)


def test_the_release_draws_with_the_decoder_that_was_taught(monkeypatch):
    method = DPMERFAutoencoder(**TINY, noise_multiplier=1.0, autoencoder_steps=2, steps=3)
    kept = []
    real = DPMERFAutoencoder._train_autoencoder
    monkeypatch.setattr(
        DPMERFAutoencoder,
        "_train_autoencoder",
        lambda self, *given: kept.append(real(self, *given)) or kept[0],
    )
    made = method.fit(gate_for(method, *blobs(20)), Streams(0, Runtime("cpu")), ignore_progress)
    for name, value in kept[0].decoder.state_dict().items():
        assert torch.equal(made.tensors[f"decoder.{name}"], value)
    net = GENERATORS[made.generator_class](**made.generator_config)
    assert net.generate_latents(torch.randn(5, 2, generator=seeded()), torch.arange(5) % 2).norm(
        dim=1
    ).tolist() == pytest.approx([math.sqrt(3)] * 5)


@pytest.mark.parametrize(
    ("lessons", "stage"),
    [
        (80, "training the autoencoder"),
        (80, "training the generator"),
        (30, "training the generator"),
    ],
)
def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch, lessons, stage):
    box = Sensitive(*blobs(40), SPEC, name="blobs")
    ledger = Ledger(tmp_path / "blobs.jsonl")
    method = DPMERFAutoencoder(**TINY, noise_multiplier=3.0, autoencoder_steps=lessons, steps=25)
    fresh = []
    real = secret_side_module.add_noise
    encoders = []
    monkeypatch.setattr(
        accounting,
        "compute_privacy_cost",
        lambda event, neighbours, roughly=False: accounting._gaussian_cost(1.0),
    )
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda *given: fresh.append(1) or real(*given)
    )
    taught = DPMERFAutoencoder._train_autoencoder
    monkeypatch.setattr(
        DPMERFAutoencoder,
        "_train_autoencoder",
        lambda self, *given: encoders.append(taught(self, *given)) or encoders[-1],
    )

    def kill(shown, step, of, **facts):
        if shown == stage and step == 25:
            raise KeyboardInterrupt

    given = {"out": tmp_path / "out", "ledger": ledger, "runtime": Runtime("cpu", 32)}
    with pytest.raises(KeyboardInterrupt):
        synthesize(box, method, **given, progress=kill)
    assert len(fresh) == (25 if stage == "training the autoencoder" else lessons + 1)
    release = synthesize(box, method, **given, resume=True)
    assert len(fresh) == lessons + 1
    if stage == "training the generator":  # the embedding that was kept is of this very encoder
        assert torch.equal(
            flatten_tensors(encoders[0].parameters()), flatten_tensors(encoders[1].parameters())
        )
    assert [each["kind"] for each in ledger.entries()].count("reserve") == 1
    assert release.sample(4)[0].isfinite().all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"embedding_share": 0},
        {"embedding_share": 1},
        {"sample_rate": 0},
        {"autoencoder_dim": 1},
        {"autoencoder_steps": 0},
        {"bandwidths": (0.0,)},
        {"batch_per_class": 1},
        {"noise_multiplier": -1.0},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        make_method("merf-ae", wrong)
