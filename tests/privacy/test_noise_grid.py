"""Every value that leaves lies on a public grid, so its last bits say nothing: for every verb of the gate, and in runs of every method."""

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


def multiples(values, grid):
    """How many of them are whole multiples of the grid; float64 divides by a power of two without an error."""
    steps = values.double() / grid
    return int((steps == steps.round()).sum())


def box(**facts):
    rng = np.random.default_rng(1)
    images = rng.random((COUNT, *SHAPE), np.float32)
    labels = np.arange(COUNT) % 2
    return Sensitive(images, labels, Spec(SHAPE, 2, COUNT, (COUNT // 2, COUNT // 2), **facts))


def door(verb, relation, noise=1.3, sampling=None, **facts):
    stage = Stage("it", verb, noise, 8, sampling or Full())
    return Gate(box(**facts), Plan((stage,), relation), NullLedger(), Budget(math.inf), method="m")


def part(image, label):
    return image.flatten() * 3.7 - label


def learned(relation, verb, shards, sampling=None, **facts):
    made = door(verb, relation, sampling=sampling, **facts)
    made.split_into_shards(
        shards, {"mean": torch.zeros(shards, 16)}, records_per_shard=5 if facts else 0
    )
    made.update_shards(
        lambda images, labels, state: {"mean": state["mean"] + images.flatten(1).mean(0)}
    )
    return made


def told(state, *row):
    return state["mean"] / 3 + sum(row)


VERBS = {  # (verb, relation, how it is sampled): what comes back
    ("sum", ADD_REMOVE, "all"): lambda: door("sum", ADD_REMOVE).sum("it", part, clip_norm=BOUND),
    ("sum", REPLACE, "all"): lambda: door("sum", REPLACE).sum("it", part, clip_norm=BOUND),
    ("sum", REPLACE, "per class"): lambda: door("sum", REPLACE).sum(
        "it", part, clip_norm=BOUND, per_class=True
    ),
    ("sum", ADD_REMOVE, "Poisson"): lambda: door("sum", ADD_REMOVE, sampling=Poisson(0.3)).sum(
        "it", part, clip_norm=BOUND
    ),
    ("sum", REPLACE, "fixed"): lambda: door("sum", REPLACE, sampling=Fixed(5, COUNT)).sum(
        "it", part, clip_norm=BOUND
    ),
    ("rows", REPLACE, "all"): lambda: door("rows", REPLACE).rows("it", part, clip_norm=BOUND),
    ("rows", LOCAL, "all"): lambda: door("rows", LOCAL).rows("it", part, clip_norm=BOUND),
    ("query_sample", ADD_REMOVE, "all"): lambda: _answer(ADD_REMOVE),
    ("query_sample", REPLACE, "all"): lambda: _answer(REPLACE),
    ("query_random_shards", REPLACE, "shards"): lambda: learned(
        REPLACE, "query_random_shards", 4, Shards(4)
    ).query_random_shards("it", told, torch.rand(8, 16), clip_norm=BOUND),
    ("sum_over_shards", REPLACE, "all"): lambda: learned(
        REPLACE, "sum_over_shards", 4
    ).sum_over_shards("it", told, clip_norm=BOUND),
    ("sum_over_shards", CLIENT, "all"): lambda: learned(
        CLIENT, "sum_over_shards", 3, num_clients=3
    ).sum_over_shards("it", told, clip_norm=BOUND),
    ("query_clients", REPLACE, "shards"): lambda: learned(
        REPLACE, "query_clients", 6, Shards(2), num_clients=3
    ).query_clients("it", told, torch.rand(3, 8, 16), clip_norm=BOUND),
    ("query_clients", CLIENT, "all"): lambda: learned(
        CLIENT, "query_clients", 3, num_clients=3
    ).query_clients("it", told, torch.rand(3, 8, 16), clip_norm=BOUND),
}


def _answer(relation):
    return door("query_sample", relation).query_sample(
        "it", lambda records: records.images.mean(0).flatten() * 9, clip_norm=BOUND, shape=(16,)
    )


@pytest.mark.parametrize("which", VERBS, ids=" ".join)
def test_every_verb_answers_on_its_grid(which, trust):
    values = VERBS[which]()
    std = 1.3 * SENSITIVITY[which[:2]] * BOUND
    on = multiples(values, choose_grid(BOUND, std))
    assert values.dtype == torch.float64
    assert on == values.numel(), "a value has bits below the grid: they may be those of a record"
    assert multiples(values, 4 * choose_grid(BOUND, std)) < values.numel(), (
        "the check would pass on a coarser grid too, so it sees the steps"
    )
    trust("R4", "released values that are multiples of their public grid", on, of=values.numel())


@pytest.mark.parametrize("blocks", [3, 4])
def test_block_means_are_whole_steps_over_a_public_count(blocks, trust):
    frame = torch.eye(16, dtype=torch.float64)
    values = door("sorted_blocks", REPLACE).sorted_blocks(
        "it", part, frame=frame, num_blocks=blocks, clip_norm=BOUND
    )
    run = COUNT // 2 // blocks
    grid = choose_grid(BOUND, BOUND)
    nearest = (values * run / grid).round() * grid  # the sum of a block, before it became a mean
    on = int((nearest / run == values).sum())
    assert on == values.numel(), (
        "a block mean is not a multiple of the grid over the public length of its block"
    )
    trust("R4", "released values that are multiples of their public grid", on, of=values.numel())


@pytest.mark.parametrize(
    "channel",
    [
        Laplace.calibrate(8.0, projection=Projection(shape=SHAPE)),
        Gaussian.calibrate(8.0, 1e-5, projection=Projection(shape=SHAPE)),
    ],
    ids=["laplace", "gaussian"],
)
def test_channels_send_points_of_their_grid(channel, trust):
    gate = Gate(box(), channel.plan(), NullLedger(), Budget(math.inf), method="m")
    # its law is about half a step
    values = gate.privatize(channel)
    shift = 0.5 if channel.name == "laplace" else 0.0
    steps = (
        (values.double() - channel.effective_center) / channel.grid_spacing - shift
    ).round() + shift
    on = int(
        ((steps * channel.grid_spacing + channel.effective_center).float() == values).sum()
    )  # sent as float32 of a point of the grid
    assert on == values.numel()
    trust("R4", "released values that are multiples of their public grid", on, of=values.numel())


@pytest.fixture
def answers(monkeypatch):
    """Of a run: (values, grid) of each answer that it was given."""
    found = []
    ask = Gate._run_query

    def asking(self, stage, bound, mechanism, grid=None, count=1, step=None):
        value = ask(self, stage, bound, mechanism, grid, count, step)
        found.append(
            (
                value,
                grid
                or choose_grid(
                    bound,
                    stage.noise_multiplier
                    * SENSITIVITY[stage.operation, self.plan.neighbours]
                    * bound,
                ),
            )
        )
        return value

    monkeypatch.setattr(Gate, "_run_query", asking)
    return found


def ran(name, folder, answers):
    """A quick run of a method; how many values it was given, and how many lie on their grid."""
    method = make_method(name, choose_tiny_settings(name))
    spec = choose_spec(method)
    synthesize(
        make_method_input(method, *make_records(), spec),
        method,
        choose_epsilon(method),
        ledger=folder / "book.jsonl",
    )
    return sum(multiples(*each) for each in answers), sum(values.numel() for values, _ in answers)


@pytest.mark.usefixtures("one_thread", "coarse_accounting")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "merf" else pytest.mark.slow)
        for name in sorted(list_methods())
    ],
)
def test_every_method_is_given_values_of_a_grid(name, tmp_path, answers, trust):
    on, values = ran(name, tmp_path, answers)
    assert on == values, f"{values - on} values that {name} was given are off the grid"
    if values:  # a local method asks nothing here
        trust("R4", "values given to methods that are multiples of their grid", on, of=values)


def test_noise_that_was_not_rounded_is_seen(monkeypatch):
    """The control: the check is not blind."""
    monkeypatch.setattr(
        secret_side_module,
        "add_noise",
        lambda steps, std, grid, secret: (
            (steps + secret.normal(tuple(steps.shape)) * std / grid) * grid
        ),
    )
    values = VERBS["sum", REPLACE, "all"]()
    assert multiples(values, choose_grid(BOUND, 1.3 * 2 * BOUND)) == 0


def test_the_grid_is_a_function_of_public_numbers(monkeypatch):
    """Other records, even ones that are not finite, and the same grid: it could not be public otherwise."""
    seen = []
    real = secret_side_module.add_noise
    monkeypatch.setattr(
        secret_side_module,
        "add_noise",
        lambda steps, std, grid, secret: (seen.append((std, grid)), real(steps, std, grid, secret))[
            1
        ],
    )
    for scale in (0.0, 1.0, 1e20, math.nan):
        door("sum", REPLACE).sum(
            "it", lambda image, label, scale=scale: image.flatten() * scale, clip_norm=BOUND
        )
    assert len(set(seen)) == 1


def test_plans_with_little_noise_have_a_grid_too():
    for noise in (1e-6, 1e-2, 1e3, 1e9):
        made = door("sum", REPLACE, noise=noise)
        values = made.sum("it", part, clip_norm=BOUND)
        assert multiples(values, choose_grid(BOUND, noise * 2 * BOUND)) == values.numel()
