"""Every value that leaves lies on a public grid, so its last bits say nothing."""

import math

import numpy as np
import pytest
import torch
from support.fakes import NullLedger
from support.tiny_settings import (
    choose_epsilon,
    choose_spec,
    choose_tiny_settings,
    make_method_input,
    make_records,
)

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.local.channels import Gaussian, Laplace, Projection
from privot.methods import list_methods, make_method
from privot.privacy import secret_side as secret_side_module
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.noise import choose_grid
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import Fixed, Full, Poisson, Shards
from privot.privacy.sensitivity import SENSITIVITY
from privot.synthesis import synthesize

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
SHAPE = (1, 4, 4)
COUNT = 24
BOUND = 0.7
CLIP = {"clip_norm": BOUND}
ON_GRID = "released values that are multiples of their public grid"


def count_multiples(values, grid):
    """How many are whole multiples; float64 divides by a power of two without an error."""
    steps = values.double() / grid
    return int((steps == steps.round()).sum())


def make_dataset(**facts):
    images = np.random.default_rng(1).random((COUNT, *SHAPE), np.float32)
    spec = Spec(SHAPE, 2, COUNT, (COUNT // 2, COUNT // 2), **facts)
    return Sensitive(images, np.arange(COUNT) % 2, spec)


def make_gate(operation, neighbours, noise=1.3, sampling=None, **facts):
    plan = Plan((Stage("it", operation, noise, 8, sampling or Full()),), neighbours)
    return Gate(make_dataset(**facts), plan, NullLedger(), Budget(math.inf), method="m")


def make_shard_gate(operation, neighbours, shards, sampling=None, **facts):
    gate = make_gate(operation, neighbours, sampling=sampling, **facts)
    state = {"mean": torch.zeros(shards, 16)}
    gate.split_into_shards(shards, state, records_per_shard=5 if facts else 0)
    gate.update_shards(
        lambda images, labels, state: {"mean": state["mean"] + images.flatten(1).mean(0)}
    )
    return gate


def transform(image, label):
    return image.flatten() * 3.7 - label


def average(records):
    return records.images.mean(0).flatten() * 9


def read_state(state, *row):
    return state["mean"] / 3 + sum(row)


def sum_up(neighbours, sampling=None, **how):
    gate = make_gate("sum", neighbours, sampling=sampling)
    return gate.sum("it", transform, **how, **CLIP)


def query_sample(neighbours):
    gate = make_gate("query_sample", neighbours)
    return gate.query_sample("it", average, shape=(16,), **CLIP)


def query_shards(operation, neighbours, shards, *rows, **how):
    gate = make_shard_gate(operation, neighbours, shards, **how)
    return getattr(gate, operation)("it", read_state, *rows, **CLIP)


CLIENTS = {"num_clients": 3}
ROWS = torch.linspace(0, 1, 3 * 8 * 16).view(3, 8, 16)
ANSWERS = {  # (operation, relation, how it is sampled)
    ("sum", ADD_REMOVE, "all"): lambda: sum_up(ADD_REMOVE),
    ("sum", REPLACE, "all"): lambda: sum_up(REPLACE),
    ("sum", REPLACE, "per class"): lambda: sum_up(REPLACE, per_class=True),
    ("sum", ADD_REMOVE, "Poisson"): lambda: sum_up(ADD_REMOVE, Poisson(0.3)),
    ("sum", REPLACE, "fixed"): lambda: sum_up(REPLACE, Fixed(5, COUNT)),
    ("rows", REPLACE, "all"): lambda: make_gate("rows", REPLACE).rows("it", transform, **CLIP),
    ("rows", LOCAL, "all"): lambda: make_gate("rows", LOCAL).rows("it", transform, **CLIP),
    ("query_sample", ADD_REMOVE, "all"): lambda: query_sample(ADD_REMOVE),
    ("query_sample", REPLACE, "all"): lambda: query_sample(REPLACE),
    ("query_random_shards", REPLACE, "shards"): lambda: query_shards(
        "query_random_shards", REPLACE, 4, ROWS[0], sampling=Shards(4)
    ),
    ("sum_over_shards", REPLACE, "all"): lambda: query_shards("sum_over_shards", REPLACE, 4),
    ("sum_over_shards", CLIENT, "all"): lambda: query_shards(
        "sum_over_shards", CLIENT, 3, **CLIENTS
    ),
    ("query_clients", REPLACE, "shards"): lambda: query_shards(
        "query_clients", REPLACE, 6, ROWS, sampling=Shards(2), **CLIENTS
    ),
    ("query_clients", CLIENT, "all"): lambda: query_shards(
        "query_clients", CLIENT, 3, ROWS, **CLIENTS
    ),
}


@pytest.mark.parametrize("which", ANSWERS, ids=" ".join)
def test_every_verb_answers_on_its_grid(which, trust):
    values = ANSWERS[which]()
    grid = choose_grid(BOUND, 1.3 * SENSITIVITY[which[:2]] * BOUND)
    on = count_multiples(values, grid)
    assert values.dtype == torch.float64
    assert on == values.numel(), "a value has bits below the grid: they may be those of a record"
    assert count_multiples(values, 4 * grid) < values.numel(), "the check sees the steps"
    trust("R4", ON_GRID, on, of=values.numel())


@pytest.mark.parametrize("blocks", [3, 4])
def test_block_means_are_whole_steps_over_a_public_count(blocks, trust):
    values = make_gate("sorted_blocks", REPLACE).sorted_blocks(
        "it", transform, frame=torch.eye(16, dtype=torch.float64), num_blocks=blocks, **CLIP
    )
    length = COUNT // 2 // blocks
    grid = choose_grid(BOUND, BOUND)
    sums = (values * length / grid).round() * grid  # of blocks, before they became means
    on = int((sums / length == values).sum())
    assert on == values.numel(), "a mean is off the grid over the public length of its block"
    trust("R4", ON_GRID, on, of=values.numel())


@pytest.mark.parametrize("kind", [Laplace, Gaussian])
def test_channels_send_points_of_their_grid(kind, trust):
    """As float32 of a point; the law of Laplace noise is about half a step."""
    channel = kind.calibrate(8.0, 1e-5, projection=Projection(shape=SHAPE))
    gate = Gate(make_dataset(), channel.plan(), NullLedger(), Budget(math.inf), method="m")
    values = gate.privatize(channel)
    shift = 0.5 if kind is Laplace else 0.0
    steps = (values.double() - channel.effective_center) / channel.grid_spacing - shift
    points = (steps.round() + shift) * channel.grid_spacing + channel.effective_center
    on = int((points.float() == values).sum())
    assert on == values.numel()
    trust("R4", ON_GRID, on, of=values.numel())


@pytest.mark.usefixtures("one_thread", "coarse_accounting")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "merf" else pytest.mark.slow)
        for name in sorted(list_methods())
    ],
)
def test_every_method_is_given_values_of_a_grid(name, tmp_path, monkeypatch, trust):
    answers = []
    run_query = Gate._run_query

    def record(gate, stage, clip_norm, mechanism, grid=None, count=1, step=None):
        value = run_query(gate, stage, clip_norm, mechanism, grid, count, step)
        sensitivity = SENSITIVITY[stage.operation, gate.plan.neighbours]
        std = stage.noise_multiplier * sensitivity * clip_norm
        answers.append((value, grid or choose_grid(clip_norm, std)))
        return value

    monkeypatch.setattr(Gate, "_run_query", record)
    method = make_method(name, choose_tiny_settings(name))
    data = make_method_input(method, *make_records(), choose_spec(method))
    synthesize(data, method, choose_epsilon(method), ledger=tmp_path / "ledger.jsonl")
    on = sum(count_multiples(*answer) for answer in answers)
    total = sum(values.numel() for values, _ in answers)
    assert on == total, f"{total - on} values that {name} was given are off the grid"
    if total:  # a local method asks nothing here
        trust("R4", "values given to methods that are multiples of their grid", on, of=total)


def test_noise_that_was_not_rounded_is_seen(monkeypatch):
    """The control: the check is not blind."""

    def add_continuous_noise(steps, std, grid, rng):
        return steps * grid + rng.normal(tuple(steps.shape)) * std

    monkeypatch.setattr(secret_side_module, "add_noise", add_continuous_noise)
    assert count_multiples(sum_up(REPLACE), choose_grid(BOUND, 1.3 * 2 * BOUND)) == 0


def test_the_grid_is_a_function_of_public_numbers(monkeypatch):
    """Other records, even ones that are not finite, have the same grid, or it could not be public."""
    grids = set()
    add_noise = secret_side_module.add_noise

    def record(steps, std, grid, rng):
        grids.add((std, grid))
        return add_noise(steps, std, grid, rng)

    monkeypatch.setattr(secret_side_module, "add_noise", record)
    for scale in (0.0, 1.0, 1e20, math.nan):
        make_gate("sum", REPLACE).sum("it", lambda image, label, s=scale: image * s, **CLIP)
    assert len(grids) == 1
    for noise in (1e-6, 1e-2, 1e3, 1e9):
        values = make_gate("sum", REPLACE, noise).sum("it", transform, **CLIP)
        assert count_multiples(values, choose_grid(BOUND, noise * 2 * BOUND)) == values.numel()
