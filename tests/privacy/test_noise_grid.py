"""Every value that leaves lies on a public grid, so its last bits say nothing."""

import math

import numpy as np
import pytest
import torch
from support.fakes import NullLedger
from support.gate_rig import ADD_REMOVE, CASES, REPLACE, Rig
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
from privot.privacy.gate import Gate
from privot.privacy.noise import choose_grid
from privot.privacy.plan import Budget
from privot.privacy.sampling import Fixed, Poisson, Shards
from privot.privacy.sensitivity import SENSITIVITY
from privot.synthesis import synthesize

BOUND = 0.7
CLIP = {"clip_norm": BOUND}
ON_GRID = "released values that are multiples of their public grid"
IMAGES = np.random.default_rng(1).random((24, 1, 4, 4), np.float32)
SHAPES = {"count": 24, "shape": (1, 4, 4), "dim": 16}


def count_multiples(values, grid):
    """How many are whole multiples; float64 divides by a power of two without an error."""
    steps = values.double() / grid
    return int((steps == steps.round()).sum())


def transform(image, label, scale):
    return (image.flatten() * 3.7 - label) * scale


def ask(operation, neighbours, per_class=False, noise=1.3, scale=1.0, **more):
    rig = Rig(operation, neighbours, per_class, query=transform, noise=noise, **SHAPES, **more)
    return rig.ask(IMAGES, scale=scale, **CLIP)


@pytest.mark.parametrize(
    ("operation", "neighbours", "per_class", "sampling"),
    [
        *((*case, None) for case in CASES if case[0] != "sorted_blocks"),
        ("sum", ADD_REMOVE, False, Poisson(0.3)),
        ("sum", REPLACE, False, Fixed(5, 24)),
        ("query_clients", REPLACE, False, Shards(2)),
    ],
)
def test_every_verb_answers_on_its_grid(operation, neighbours, per_class, sampling, trust):
    values = ask(operation, neighbours, per_class, sampling=sampling)
    grid = choose_grid(BOUND, 1.3 * SENSITIVITY[operation, neighbours] * BOUND)
    on = count_multiples(values, grid)
    assert values.dtype == torch.float64
    assert on == values.numel(), "a value has bits below the grid: they may be those of a record"
    assert count_multiples(values, 4 * grid) < values.numel(), "the check sees the steps"
    trust("R4", ON_GRID, on, of=values.numel())


def make_dataset(spec):
    return Sensitive(IMAGES, np.arange(len(IMAGES)) % 2, spec)


@pytest.mark.parametrize("blocks", [3, 4])
def test_block_means_are_whole_steps_over_a_public_count(blocks, trust):
    gate = Rig("sorted_blocks", REPLACE, noise=1.3, **SHAPES).gate
    gate._dataset = make_dataset(gate._dataset.spec)
    frame = torch.eye(16, dtype=torch.float64)
    values = gate.sorted_blocks("it", transform, 1.0, frame=frame, num_blocks=blocks, **CLIP)
    length = 24 // 2 // blocks
    grid = choose_grid(BOUND, BOUND)
    sums = (values * length / grid).round() * grid  # of blocks, before they became means
    on = int((sums / length == values).sum())
    assert on == values.numel(), "a mean is off the grid over the public length of its block"
    trust("R4", ON_GRID, on, of=values.numel())


@pytest.mark.parametrize("kind", [Laplace, Gaussian])
def test_channels_send_points_of_their_grid(kind, trust):
    """As float32 of a point; the law of Laplace noise is about half a step."""
    channel = kind.calibrate(8.0, 1e-5, projection=Projection(shape=(1, 4, 4)))
    dataset = make_dataset(Spec((1, 4, 4), 2, 24))
    gate = Gate(dataset, channel.plan(), NullLedger(), Budget(math.inf), method="m")
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
    assert count_multiples(ask("sum", REPLACE), choose_grid(BOUND, 1.3 * 2 * BOUND)) == 0


def test_the_grid_is_a_function_of_public_numbers(monkeypatch):
    """Other records, even ones that are not finite, have the same grid, or it could not be public."""
    grids = set()
    add_noise = secret_side_module.add_noise

    def record(steps, std, grid, rng):
        grids.add((std, grid))
        return add_noise(steps, std, grid, rng)

    monkeypatch.setattr(secret_side_module, "add_noise", record)
    for scale in (0.0, 1.0, 1e20, math.nan):
        ask("sum", REPLACE, scale=scale)
    assert len(grids) == 1
    for noise in (1e-6, 1e-2, 1e3, 1e9):
        values = ask("sum", REPLACE, noise=noise)
        assert count_multiples(values, choose_grid(BOUND, noise * 2 * BOUND)) == values.numel()
