"""Fed-Avg GAN: an owner moves an answer by twice the bound and no more, whatever it holds; what is sent is plain training; it learns."""

import itertools
import math

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from scipy.stats import beta
from support.fakes import FreePlan, NullLedger, planted_clip
from torch.nn.functional import softplus

from privot.components.dp_sgd import flatten_tensors
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PlanError, SettingError
from privot.methods import make_method
from privot.methods.fedavg_gan import FedAvgGAN, get_weight_change, train_client_critic
from privot.nets import initialize_weights
from privot.nets.dp_critic import PrivateCritic
from privot.privacy import clipping as clipping_module
from privot.privacy import secret_side as secret_side_module
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.runtime import Runtime, Streams, ignore_progress
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 8, 8)
CLASSES = 2
OWNERS = 5
SPEC = Spec(SHAPE, CLASSES, num_clients=OWNERS)
TINY = {
    "critic_steps": 2,
    "critic_batch_size": 3,
    "generator_steps": 1,
    "records_per_client": 4,
    "batch_size": 4,
    "critic_channels": 2,
    "latent_dim": 3,
    "generator_channels": 2,
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def blobs(count=100):
    """A bright square somewhere in the left half for label 0, in the right one for label 1."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) // OWNERS % 2
    images = np.zeros((count, *SHAPE), np.float32)
    for image, label in zip(images, labels, strict=True):
        top = rng.integers(1, 4)
        left = rng.integers(0, 2) + 4 * label
        image[0, top : top + 3, left : left + 3] = rng.uniform(0.6, 1)
    return images, labels


def gate_for(box, noise=0.0, rounds=10**6):
    plan = FreePlan((Stage("updates", "sum_over_shards", noise, rounds),), Neighbours.CLIENT)
    return Gate(box, plan, NullLedger(), NullLedger(), runtime=Runtime("cpu"))


def given(critic, lessons=2, batch=3, scale=1.0, rate=0.1):
    """What owners are sent in a round."""
    start = scale * flatten_tensors(critic.parameters()).detach()
    fakes = torch.rand(CLASSES, 4, *SHAPE, generator=seeded(5))
    places = torch.rand(lessons, batch, generator=seeded(6))
    which = torch.randint(4, (lessons, batch), generator=seeded(7))
    return critic, start, fakes, places, which, rate


def critic(width=2):
    return initialize_weights(PrivateCritic(SHAPE, CLASSES, width), seeded()).requires_grad_(False)


def asked(box, sent, bound, noise=0.0, times=1):
    """Sums over the owners' changes: [times, numbers]."""
    gate = gate_for(box, noise)
    gate.split_into_shards(OWNERS, {"weight_change": torch.zeros(OWNERS, len(sent[1]))}, 6)
    gate.update_shards(train_client_critic, *sent)
    return torch.stack(
        [gate.sum_over_shards("updates", get_weight_change, clip_norm=bound) for _ in range(times)]
    )


# What is sent


@pytest.mark.usefixtures("array_order")
def test_without_noise_and_clip_the_sum_is_that_of_plain_training():
    images, labels = blobs(30)  # six for each owner, in turn
    sent = given(critic(), rate=0.05)
    found = asked(Sensitive(images, labels, SPEC), sent, bound=5.0)[0]
    wanted = 0.0
    for owner in range(OWNERS):
        net = critic()
        net.requires_grad_(True)
        optimiser = torch.optim.SGD(net.parameters(), 0.05)
        own = torch.from_numpy(images[owner::OWNERS])
        marks = torch.from_numpy(labels[owner::OWNERS])
        for places, which in zip(sent[3], sent[4], strict=True):
            some = (places * 6).long()
            optimiser.zero_grad()
            (
                softplus(-net(own[some], marks[some])).mean()
                + softplus(net(sent[2][marks[some], which], marks[some])).mean()
            ).backward()
            optimiser.step()
        wanted = wanted + flatten_tensors(net.parameters()).detach() - sent[1]
    torch.testing.assert_close(found.float(), wanted, rtol=1e-3, atol=1e-5)


# The bound


@pytest.mark.parametrize(("scale", "bound"), [(1.0, 0.1), (1.0, 1e-3), (30.0, 1.0), (1e6, 1.0)])
@pytest.mark.usefixtures("array_order")
def test_another_owner_moves_the_sum_by_twice_the_bound_and_no_more(scale, bound):
    """Other records, more of them and fewer; weights of any size, and steps so long that they burst."""
    rng = np.random.default_rng(1)
    largest = 0.0
    (images, labels) = blobs(40)
    held = np.arange(40) % OWNERS
    here = Sensitive(images, labels, SPEC, client_ids=held)
    for turn in range(8):
        count = int(rng.integers(1, 20))
        kinds = (np.zeros, np.ones, rng.random)
        fresh = kinds[turn % 3]((count, *SHAPE)).astype(np.float32)
        marks = np.full(count, turn % 2)
        others = held != 2
        there = Sensitive(
            np.concatenate([images[others], fresh]),
            np.concatenate([labels[others], marks]),
            SPEC,
            client_ids=np.concatenate([held[others], np.full(count, 2)]),
        )
        sent = given(critic(), scale=scale, rate=(0.1, 1e3)[turn % 2])
        largest = max(largest, float((asked(here, sent, bound) - asked(there, sent, bound)).norm()))
    assert largest <= 2 * bound * (1 + 1e-9)
    assert (
        largest > bound or scale > 1
    )  # clipped parts point apart: less noise than for more than once the bound would not do


def spied_on(threshold, noise=0.3, asks=400):
    """What the best attacker sees along the way in which the sums of neighbours differ, brought to 2 * bound: low TPR, high FPR."""
    images = np.concatenate([np.zeros((4, *SHAPE)), np.ones((1, *SHAPE))]).astype(np.float32)
    seen = []
    bound = 1e-3
    sent = given(critic(), lessons=1)
    boxes = [Sensitive(images, np.array([*(0,) * 4, label]), SPEC) for label in (0, 1)]
    sums = [asked(box, sent, bound)[0] for box in boxes]
    way = (sums[1] - sums[0]) / (sums[1] - sums[0]).norm()
    for box in boxes:
        seen.append(
            int(((asked(box, sent, bound, noise, asks) - sums[0]) @ way > threshold * bound).sum())
        )
    reach = float((sums[1] - sums[0]).norm()) / (2 * bound)
    return (
        beta.ppf(1e-4, seen[1], asks - seen[1] + 1),
        beta.ppf(1 - 1e-4, seen[0] + 1, asks - seen[0]),
        reach,
    )


def claimed(fpr, noise=0.3):
    return (
        Plan((Stage("updates", "sum_over_shards", noise),), Neighbours.CLIENT).cost().max_tpr(fpr)
    )


def test_an_audit_finds_no_more_than_is_claimed():
    tpr, fpr, reach = spied_on(0.7)
    assert reach > 0.5  # the pair is a hard one
    assert tpr <= claimed(fpr)


@pytest.mark.parametrize("bug", ["a third of the noise", "no clip"])
def test_the_audit_catches_a_planted_bug(monkeypatch, bug):
    if bug == "no clip":
        monkeypatch.setattr(clipping_module, "clip_rows", planted_clip())
        tpr, fpr, _ = spied_on(50.0)
    else:
        honest = secret_side_module.add_noise
        monkeypatch.setattr(
            secret_side_module,
            "add_noise",
            lambda total, noise_std, *more: honest(total, noise_std / 3, *more),
        )
        tpr, fpr, _ = spied_on(0.7)
    assert tpr > claimed(fpr)


# The game


def test_samples_follow_their_label():
    method = FedAvgGAN(
        rounds=40,
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
    gate = gate_for(Sensitive(*blobs(), SPEC), 0.01, method.rounds)
    made = method.fit(gate, Streams(0, Runtime("cpu")), ignore_progress)
    images, labels = made.sample(SPEC, 200)
    assert gate.count_remaining_queries("updates") == 0
    right = images[..., 4:].sum((1, 2, 3))
    left = images[..., :4].sum((1, 2, 3))
    assert ((right > left).long() == labels).float().mean() > 0.9
    numbers = sum(each.numel() for each in PrivateCritic(SHAPE, CLASSES, 8).parameters())
    assert made.metadata["bytes_per_client_and_round"] == 4 * numbers


@pytest.mark.parametrize(
    "rounds", [80, 30]
)  # answers of up to 64 rounds are kept; of more, the state now and then
def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch, rounds):
    box = Sensitive(*blobs(40), SPEC, name="blobs")
    ledger = Ledger(tmp_path / "blobs.jsonl")
    fresh = []
    real = secret_side_module.add_noise
    method = FedAvgGAN(**TINY, noise_multiplier=3.0, rounds=rounds)
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda *given: fresh.append(1) or real(*given)
    )

    def kill(stage, step, of, **facts):
        if step == 25:
            raise KeyboardInterrupt

    ways = {"out": tmp_path / "out", "ledger": ledger, "runtime": Runtime("cpu")}
    with pytest.raises(KeyboardInterrupt):
        synthesize(box, method, **ways, progress=kill)
    release = synthesize(box, method, **ways, resume=True)
    assert len(fresh) == rounds
    lines = ledger.entries()
    assert [each["kind"] for each in lines].count("reserve") == 1
    marks = [(each["first"], each["last"]) for each in lines if each["kind"] == "ask"]
    assert all(later[0] > before[1] for before, later in itertools.pairwise(marks))
    assert (
        list(tmp_path.glob("*.vault*")) == []
    )  # every round begins anew from public weights: nothing secret is kept
    assert release.guarantee.neighbours == "client"
    assert release.sample(4)[0].isfinite().all()


# Settings and price


def test_the_price_is_that_of_one_owner_in_every_round():
    plan = FedAvgGAN(rounds=200, noise_multiplier=3.0).plan(Spec((1, 28, 28), 62, num_clients=300))
    assert plan.event() == dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(3.0), 200)
    assert plan.neighbours is Neighbours.CLIENT
    alone = Plan((Stage("once", "sum_over_shards", 3.0 / math.sqrt(200)),), Neighbours.CLIENT)
    assert plan.cost().epsilon(1.15e-3) == pytest.approx(alone.cost().epsilon(1.15e-3))


def test_data_without_owners_and_other_relations_are_refused():
    with pytest.raises(SettingError, match="clients"):
        FedAvgGAN(noise_multiplier=1.0).plan(Spec(SHAPE, CLASSES))
    box = Sensitive(*blobs(40), SPEC)
    gate = gate_for(box)
    with pytest.raises(PlanError, match="client"):
        gate.split_into_shards(OWNERS - 1, {"weight_change": torch.zeros(OWNERS - 1, 3)}, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": 0},
        {"clip_norm": 0},
        {"batch_size": 1},
        {"noise_multiplier": -1.0},
        {"ema_decay": 1},
        {"critic_learning_rate": 0},
        {"records_per_client": 0},
        {"generator_learning_rate": 1},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        make_method("federated-average-gan", wrong)
