"""Noise, sampling, accounting, ledger and gate; channels of local privacy; datasets."""

import json
import math
from decimal import Decimal

import numpy as np
import torch
from golden.core import CPU, golden, numbers
from golden.inputs import coarse_accounting, digits, sensitive_digits, uniform
from golden.method_runs import release_tiny_data
from support.tiny_settings import make_records, seal_records

from privot.data import Sensitive, Spec, load_dataset
from privot.local import channels
from privot.local.dataset import PrivatizedDataset
from privot.local.privatize import (
    build_image_channel,
    compute_channel_guarantee,
    privatize,
    verify_privatized,
)
from privot.local.schema import parse_table_channel
from privot.privacy import accounting, noise
from privot.privacy.accounting import Neighbours
from privot.privacy.charges import compute_total_cost
from privot.privacy.client_partition import client_partition
from privot.privacy.gate import Gate
from privot.privacy.guarantee import Guarantee
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom, add_noise
from privot.privacy.plan import AttackPowerTarget, Budget, Plan, Stage
from privot.privacy.sampling import Fixed, Full, Poisson, Shards

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
RESPONSE = Stage("a", "privatize", 0.7, mechanism="randomized_response")
DRAWN = Stage("a", "sum", 1.0, 20, Poisson(0.1))
SHARDED = Stage("a", "query_random_shards", 0.8, 30, Shards(10))
PLANS = {
    "gaussian": Plan((Stage("a", "sum", 2.0), Stage("b", "sum", 5.0, 10)), REPLACE),
    "client": Plan((Stage("a", "sum_over_shards", 3.0, 4),), CLIENT),
    "laplace": Plan((Stage("a", "privatize", 0.5, mechanism="laplace"),), LOCAL),
    "response": Plan((RESPONSE, Stage("b", "privatize", 2.0)), LOCAL),
    "poisson": Plan((DRAWN, Stage("b", "sum", 6.0)), ADD_REMOVE),
    "fixed": Plan((Stage("a", "sum", 1.5, 10, Fixed(20, 100)),), REPLACE),
    "shards": Plan((SHARDED,), REPLACE),
}


@golden("privacy/noise")
def run_noise(folder):
    secret = SecretRandom(7)
    yield "uniform", secret.uniform(11)
    yield "normal", secret.normal((3, 5))
    yield "order", secret.permutation(13)
    bits = [noise.bernoulli_bits(power) for power in (-3, 0, 3)]
    yield "coins", [secret.bernoulli(chance, 50) for chance in bits]
    yield "laplace", [secret.discrete_laplace((4, 6), places) for places in (0, 5, 12)]
    yield "chance", [list(noise.bernoulli_bits(power)) for power in (-60, 0, 6)]
    yield "digits", list(noise.probability_bits(Decimal("0.3")))
    pairs = ((1.0, 1.0), (0.5, 40.0), (3.0, 0.0))
    yield "grids", [noise.choose_grid(*pair) for pair in pairs]
    yield "noisy", add_noise(torch.arange(8).double() * 1000, 2.0, 2.0**-20, secret)
    yield "whole", add_noise(torch.arange(8) * 2**40, 2.0, 2.0**-20, secret)
    yield "from the system", SecretRandom().normal((2, 2))


@golden("privacy/sampling")
def run_sampling(folder):
    secret = SecretRandom(3)
    yield "all", Full().draw(20, secret)
    yield "poisson", [Poisson(rate).draw(40, secret) for rate in (0.1, 0.5, 1.0)]
    yield "fixed", [Fixed(count, 20).draw(20, secret) for count in (1, 7, 20)]
    yield "shards", [Shards(count).draw(30, secret) for count in (1, 4)]


@golden("privacy/accounting", PLANS)
def run_accounting(name, folder):
    plan = PLANS[name]
    with coarse_accounting():
        cost = plan.cost()
        other = Plan.from_json(json.loads(json.dumps(plan.to_json()))).under_replace_one().cost()
    renyi = accounting.compute_renyi_cost(plan.event(), plan.neighbours)
    yield "epsilon", [cost.epsilon(delta) for delta in (1e-3, 1e-5, 1e-8)]
    yield "delta", cost.delta(np.array([0.1, 1.0, 3.0]))
    yield "power", [cost.max_tpr(rate) for rate in (0.001, 0.01, 0.1)]
    yield "renyi", renyi.epsilon(1e-5)
    yield "replaced", other.epsilon(1e-5)
    yield "mu", cost.mu


@golden("privacy/grids")
def run_grids(folder):
    """Sampled plans on the grids that runs of the package take."""
    plan = PLANS["poisson"]
    return {"epsilon": [plan.cost(roughly).epsilon(1e-5) for roughly in (False, True)]}


@golden("privacy/calibration")
def run_calibration(folder):
    small = Budget(6.0, 1e-4)
    every = [Budget(1.0), small, AttackPowerTarget(tpr=0.05, fpr=0.01), Budget(math.inf)]
    cases = {"gaussian": every, "client": every, "poisson": [small], "fixed": [small]}
    with coarse_accounting():
        for name, budgets in cases.items():
            plans = [PLANS[name].calibrate(budget) for budget in budgets]
            yield name, [[stage.noise_multiplier for stage in plan.stages] for plan in plans]


@golden("privacy/ledger")
def run_ledger(folder):
    """The entries that two runs leave, without times, and what they sum up to."""
    with coarse_accounting():
        for name in ("merf", "gs-wgan", "federated-average-gan"):
            release_tiny_data(name, folder, {})
        entries = Ledger(folder / "ledger.jsonl").entries()
        ledger = Ledger(folder / "other.jsonl")
        tickets = [ledger.reserve(PLANS[name], name) for name in ("gaussian", "poisson")]
        tickets += [ledger.reserve_part(PLANS["client"], "parts", part, 3) for part in (0, 1)]
        total = ledger.compute_spent_cost()
        nothing = compute_total_cost([])
        ledger.set_limit(Budget(50.0))
    yield "numbers", numbers(entries)
    yield "answers", [bytes.fromhex(entry["digest"]) for entry in entries if "digest" in entry]
    yield "tickets", tickets
    yield "others", numbers(ledger.entries())
    yield "spent", [total.epsilon(delta) for delta in (1e-4, 1e-6)]
    yield "nothing", nothing.epsilon(1e-5)


@golden("privacy/guarantee")
def run_guarantee(folder):
    with coarse_accounting():
        for name in ("gaussian", "client", "response", "poisson"):
            yield name, numbers(Guarantee.from_plan(PLANS[name], 1e-6))


@golden("privacy/gate")
def run_gate(folder):
    """Sums of a sealed dataset through the gate, with seeded noise, by classes and on draws."""
    stages = (Stage("sums", "sum", 2.0, 2), Stage("drawn", "sum", 2.0, 2, Poisson(0.3)))
    dataset = seal_records(*make_records(), Spec((1, 8, 8), 3))
    with coarse_accounting():
        ledger = Ledger(folder / "a.jsonl")
        more = {"runtime": CPU, "insecure_seed": 2}
        gate = Gate(dataset, Plan(stages, ADD_REMOVE), ledger, Budget(1000.0), **more)
        row = {"clip_norm": 3.0, "per_class": False}
        sums = [gate.sum("sums", lambda image, _: image[0], **row)]
        sums.append(gate.sum("sums", lambda image, _: image[0], **row | {"per_class": True}))
        for _ in range(2):
            sums.append(gate.sum("drawn", lambda image, _: image[0, 0], clip_norm=1.0))
    return {"sums": sums}


@golden("privacy/dealing")
def run_client_partition(folder):
    ledger = Ledger(folder / "digits.jsonl")
    dataset = load_dataset("digits", num_clients=400)
    parts = [client_partition(dataset, owner, ledger) for owner in (0, 7, 399)]
    return {"parts": [list(part._read_records(slice(None))) for part in parts]}


# Channels

SPACES = {
    "pooled": channels.Projection(kind="pooled", shape=(1, 8, 8), side=4),
    "waves": channels.Projection(kind="dct", shape=(1, 8, 8), side=3),
}
VARIANTS = [f"{name}-{way}" for name in ("laplace", "gaussian") for way in ("ball", *SPACES)]


def make_channel(label):
    name, _, way = label.partition("-")
    if name in ("laplace", "gaussian"):
        space = SPACES.get(way, channels.Projection(shape=(1, 8, 8)))
        ball = {"radius": 2.0, "center": 0.25} if way == "ball" else {}
        return channels.get_channel_class(name).calibrate(4.0, 1e-5, projection=space, **ball)
    if label == "composite":
        parts = ("laplace-pooled", "gaussian-waves", "randomized-response")
        return channels.Composite(parts=tuple(map(make_channel, parts)))
    if label == "table":
        words = ["0-1=gaussian:4:-1:1", "2=optimized-unary:1:5", "3=laplace:2:0:9"]
        return parse_table_channel(words, 4)
    return channels.get_channel_class(label).calibrate(1.5, num_categories=10)


@golden("channel", [*channels.CHANNELS, *VARIANTS, "table"])
def run_channel(label, folder):
    channel = make_channel(label)
    images, labels = digits(9)
    flat = images.flatten(1)
    column = labels[:, None].float()
    records = {
        1: column,
        64: flat,
        129: torch.cat([flat, flat.flip(1), column], 1),
        4: torch.cat([2 * uniform(9, 2) - 1, column % 5, 9 * uniform(9, 1)], 1),
    }[channel.record_dim]
    sent = channel.privatize(records, SecretRandom(11))
    points = channel.to_points(records).double().requires_grad_()
    cost = channel.compute_cost_matrix(points, sent)
    yield "sent", sent
    yield "points", points
    yield "cost", cost
    yield "slope", torch.autograd.grad(cost.sum(), points)[0]
    expected = [channel.compute_expected_cost(), channel.predict_signal_to_noise(1000)]
    yield "stated", [channel.epsilon, channel.delta, channel.temperature, *expected]
    read = channels.channel_from_json(json.loads(json.dumps(channel.to_json())))
    other = read.with_epsilon(2.0)
    is_possible = read.is_possible_output(sent)
    yield "again", [read.epsilon, other.epsilon, other.temperature, is_possible]
    yield "plan", [stage.noise_multiplier for stage in channel.plan().stages]


@golden("channel/privatize")
def run_privatize(folder):
    """Whole datasets through channels, as a client does it, and what the files prove."""
    space = {"labels_epsilon": 3.0, "projection_kind": "pooled", "projection_side": 4}
    dataset = sensitive_digits(30, 30)
    for name in ("laplace", "gaussian"):
        channel = build_image_channel(dataset.spec, name, 20.0, 1e-5, **space)
        more = {"ledger": folder / f"{name}.jsonl"}
        yield f"{name} seeded", privatize(dataset, channel, **more, insecure_seed=4).values
        file = folder / f"{name}.safetensors"
        privatize(dataset, channel, **more, out=file)
        yield f"{name} file", PrivatizedDataset.load(file).values
        yield f"{name} certificate", numbers(compute_channel_guarantee(channel))
        yield f"{name} verified", verify_privatized(file)["epsilon_from_events"]


# Data


@golden("data")
def run_data(folder):
    images, labels = digits(6)
    x = (images * 255).byte().permute(0, 2, 3, 1).numpy()
    np.savez(folder / "some.npz", x=x, y=labels.numpy() % 3)
    broken = np.array(images)
    broken[0, 0, 0, 0] = np.nan
    broken[1, 0, 0, 0] = 7.0
    mended = Sensitive(broken, labels.numpy(), Spec((1, 8, 8), 10), repair=True)
    owned = Sensitive(images.numpy(), labels.numpy(), Spec((1, 8, 8), 10, num_clients=4))
    order = np.array([3, 1, 5, 0, 2, 4])
    splits = [load_dataset("digits", split, public=True) for split in ("train", "test")]
    yield "digits", [list(split.records()) for split in splits]
    yield "file", list(load_dataset(folder / "some.npz", public=True).records())
    yield "mended", list(mended._read_records(slice(None)))
    yield "laid", owned._shard_record_indices(torch.arange(4), 1, 3, order)
