"""The audit of shards: the strongest attack on the worst critic stays under the claim, unless the rows of a step share a draw.

A state says whether the canary lies in its shard; its answer is one end of the ball or the other. A run is STEPS steps of ROWS rows. Runs
are done side by side: one call of the gate holds a step of all of them, which rows with draws of their own cannot tell from single runs.
"""

import functools
import math

import numpy as np
import pytest
import torch
from support.fakes import NullLedger

from privot.audit.many_runs import compute_refuted_epsilon
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.privacy.gate import Gate
from privot.privacy.plan import Budget, Neighbours, Plan, Stage
from privot.privacy.sampling import Shards

# the rows of a drawn step lie sqrt(64)/2 = 4 deviations off
SHARDS = 16
STEPS = 4
ROWS = 64
NOISE = 2.0
DELTA = 1e-3
RUNS = 1000
PILOT = 10_000
CONFIDENCE = 0.95


def make_plan(noise, steps):
    stage = Stage("it", "query_random_shards", noise, steps, Shards(SHARDS))
    return Plan((stage,), Neighbours.REPLACE)


def find_canary(images, labels, state):
    """+1 where the one white record lies, -1 elsewhere."""
    return {"side": images.amax() * 2 - 1}


def answer_side(state, row):
    return state["side"] * 1e9 + row  # far beyond the bound, to be clipped to it


def query_runs(present, noise):
    """What an attacker sees of RUNS runs, in units of the sensitivity, 0 for absent: [runs, steps, rows]."""
    images = np.zeros((SHARDS * 2, 1, 1, 1))
    images[SHARDS + 5] = present
    dataset = Sensitive(images, np.zeros(SHARDS * 2, int), Spec((1, 1, 1), 1))
    gate = Gate(dataset, make_plan(0.0, 1), NullLedger(), Budget(math.inf))
    # priced below for one run; a price for a thousand would take a minute
    gate.plan = make_plan(noise, RUNS * STEPS * ROWS)
    gate._stages = {"it": gate.plan.stages[0]}
    gate.split_into_shards(SHARDS, {"side": torch.zeros(SHARDS)})
    gate.update_shards(find_canary)
    rows = torch.zeros(RUNS * ROWS)
    answers = [
        gate.query_random_shards("it", answer_side, rows, clip_norm=3.0) for _ in range(STEPS)
    ]
    return torch.stack(answers, 1).view(RUNS, ROWS, STEPS).transpose(1, 2).numpy() / 6 + 0.5


# The attacks: likelihood ratios of the two worlds, by the law of each way to draw


def score_rows(answers, noise):
    """Every row may have been drawn: [runs, steps, rows] to [runs]."""
    return np.log1p((np.exp((2 * answers - 1) / (2 * noise**2)) - 1) / SHARDS).sum((1, 2))


def score_steps(answers, noise):
    """All rows of a step were drawn, or none."""
    sums = (2 * answers.sum(2) - ROWS) / (2 * noise**2)
    return np.log1p((np.exp(sums) - 1) / SHARDS).sum(1)


def bound_epsilon(hits, alarms):
    """The largest epsilon that is refuted at the confidence: Clopper and Pearson for both rates, and both directions of the claim."""
    return float(compute_refuted_epsilon(hits, alarms, RUNS, RUNS, DELTA, 1 - CONFIDENCE))


@functools.cache
def choose_threshold(attack, noise):
    """The best of a hundred on an imitation of both worlds without the gate, before any answer is looked at."""
    rng = np.random.default_rng(0)
    draws = (PILOT, STEPS, 1 if attack is score_steps else ROWS)
    present, absent = (
        np.sort(
            attack((rng.random(draws) < chance) + rng.normal(0, noise, (PILOT, STEPS, ROWS)), noise)
        )
        for chance in (1 / SHARDS, 0)
    )

    def predict_bound(level):
        counts = (
            int(RUNS * (PILOT - np.searchsorted(scores, level)) // PILOT)
            for scores in (present, absent)
        )
        return bound_epsilon(*counts)

    return max(np.quantile(present, np.linspace(0.01, 0.99, 99)), key=predict_bound)


def attack_gate(attack, noise=NOISE):
    level = choose_threshold(attack, noise)
    return bound_epsilon(
        *(int((attack(query_runs(present, noise), noise) > level).sum()) for present in (1, 0))
    )


@pytest.fixture(scope="module")
def claim():
    epsilon = make_plan(NOISE, STEPS * ROWS).cost().epsilon(DELTA)
    assert 1 < epsilon < 2
    return epsilon


@pytest.mark.parametrize("attack", [score_rows, score_steps])
def test_rows_with_draws_of_their_own_keep_the_claim(claim, attack):
    assert attack_gate(attack) < claim


def test_rows_that_share_a_draw_break_the_claim(claim, monkeypatch):
    """The literature's way: a step has one draw for all its rows, yet is counted as so many."""

    def share_draws(self, count, secret):
        shards = (secret.uniform(count // ROWS) * self.num_shards).long() % self.num_shards
        return shards.repeat_interleave(ROWS)

    monkeypatch.setattr(Shards, "draw", share_draws)
    assert attack_gate(score_steps) > claim


def test_too_little_noise_breaks_the_claim(claim):
    """So the attack on rows with draws of their own is not a blind one."""
    assert attack_gate(score_rows, NOISE / 3) > claim
