"""Fed-Avg GAN: what clients are asked is plain training, it has the price of clients, it learns."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from support.method_inputs import make_blobs, make_gate, make_rng, measure_agreement
from torch.nn.functional import softplus

from privot.components.dp_sgd import flatten_tensors
from privot.data.spec import Spec
from privot.errors import PlanError
from privot.methods.fedavg_gan import FedAvgGAN, get_weight_change, train_client_critic
from privot.nets import initialize_weights
from privot.nets.dp_critic import PrivateCritic
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.runtime import Runtime, Streams, ignore_progress

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 8, 8)
CLIENTS = 5
SPEC = Spec(SHAPE, 2, num_clients=CLIENTS)


def make_client_blobs(count=100):
    """Clients take turns, and every one has both classes."""
    return make_blobs(count, labels_from=np.arange(count) // CLIENTS)


def make_critic():
    return initialize_weights(PrivateCritic(SHAPE, 2, 2), make_rng()).requires_grad_(False)


@pytest.mark.usefixtures("array_order")
def test_without_noise_and_clip_the_sum_is_that_of_plain_training():
    images, labels = map(torch.from_numpy, make_client_blobs(30))
    critic = make_critic()
    start = flatten_tensors(critic.parameters())
    fakes = torch.rand(2, 4, *SHAPE, generator=make_rng(5))
    fractions = torch.rand(2, 3, generator=make_rng(6))
    fake_indices = torch.randint(4, (2, 3), generator=make_rng(7))
    plan = Plan((Stage("updates", "sum_over_shards", 0.0),), Neighbours.CLIENT)
    gate = make_gate(plan, images, labels, SPEC)
    gate.split_into_shards(CLIENTS, {"weight_change": torch.zeros(CLIENTS, len(start))}, 6)
    gate.update_shards(train_client_critic, critic, start, fakes, fractions, fake_indices, 0.05)
    answer = gate.sum_over_shards("updates", get_weight_change, clip_norm=5.0)
    expected = 0.0
    for client in range(CLIENTS):
        net = make_critic().requires_grad_(True)
        optimizer = torch.optim.SGD(net.parameters(), 0.05)
        own_images = images[client::CLIENTS]
        own_labels = labels[client::CLIENTS]
        for step_fractions, indices in zip(fractions, fake_indices, strict=True):
            chosen = (step_fractions * 6).long()
            marks = own_labels[chosen]
            optimizer.zero_grad()
            real_loss = softplus(-net(own_images[chosen], marks)).mean()
            (real_loss + softplus(net(fakes[marks, indices], marks)).mean()).backward()
            optimizer.step()
        expected = expected + flatten_tensors(net.parameters()).detach() - start
    torch.testing.assert_close(answer.float(), expected, rtol=1e-3, atol=1e-5)


def test_samples_follow_their_label():
    method = FedAvgGAN(
        rounds=20,
        critic_steps=4,
        critic_batch_size=8,
        critic_learning_rate=0.1,
        clip_norm=2.0,
        generator_steps=4,
        batch_size=32,
        critic_channels=8,
        latent_dim=8,
        generator_channels=8,
        generator_learning_rate=2e-3,
        ema_decay=0.9,
        records_per_client=20,
        noise_multiplier=0.01,
    )
    gate = make_gate(method.plan(SPEC), *make_client_blobs(), SPEC)
    artifact = method.fit(gate, Streams(0, Runtime("cpu")), ignore_progress)
    assert gate.count_remaining_queries(method.stage) == 0
    assert measure_agreement(*artifact.sample(SPEC, 200)) > 0.9
    num_weights = sum(parameter.numel() for parameter in PrivateCritic(SHAPE, 2, 8).parameters())
    assert artifact.metadata["bytes_per_client_and_round"] == 4 * num_weights


def test_the_price_is_that_of_one_client_in_every_round():
    plan = FedAvgGAN(rounds=200, noise_multiplier=3.0).plan(Spec((1, 28, 28), 62, num_clients=300))
    assert plan.event() == dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(3.0), 200)
    assert plan.neighbours is Neighbours.CLIENT
    once = Plan((Stage("once", "sum_over_shards", 3.0 / math.sqrt(200)),), Neighbours.CLIENT)
    assert plan.cost().epsilon(1.15e-3) == pytest.approx(once.cost().epsilon(1.15e-3))


def test_rejects_shards_that_are_not_the_clients():
    plan = FedAvgGAN(noise_multiplier=1.0).plan(SPEC)
    with pytest.raises(PlanError, match="client"):
        make_gate(plan, *make_client_blobs(40), SPEC).split_into_shards(
            CLIENTS - 1, {"weight_change": torch.zeros(CLIENTS - 1, 3)}, 4
        )
