"""The audit of owners: a server that knows whom it asks, and an owner who holds one thing or quite another, stay under the claim.

The state of an owner says which it holds; each of its answers is one end of the ball or the other. Runs are done side by side: one call
of the gate holds a round of all of them, which rows with noise of their own cannot tell from single runs.
"""

import math

import numpy as np
import pytest
import torch
from support.fakes import NullLedger

from privot.audit.many_runs import compute_refuted_epsilon
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import BudgetError
from privot.privacy import secret_side as secret_side_module
from privot.privacy.gate import Gate
from privot.privacy.plan import Budget, Neighbours, Plan, Stage

# 64 answers of deviation 8: one of deviation 1
OWNERS = 4
WHO = 2
ROUNDS = 4
ROWS = 16
NOISE = 8.0
DELTA = 1e-3
RUNS = 2000
CONFIDENCE = 0.95


def holds_white(images, labels, state):
    return {"side": images.amax() * 2 - 1}


SIGNS = torch.tensor([1.0, -1.0]).repeat(
    ROWS // 2
)  # rows ask for either side in turn, so that what they share would cancel


def side(state, row):
    return state["side"] * 1e9 * row  # far beyond the bound, to be clipped to it


def sums(present, steps=None):
    """What a server makes of all that one owner said in each of RUNS runs, in units of the sensitivity: [runs], about 0 if it is absent."""
    sizes = (3, 1, 7 if present else 2, 5)  # the owner has another number of records, too
    owners = np.repeat(np.arange(OWNERS), sizes)
    images = np.where(owners == WHO, float(present), 0.0)[:, None, None, None]
    box = Sensitive(
        images,
        np.zeros(len(owners), int),
        Spec((1, 1, 1), 1, num_clients=OWNERS),
        client_ids=owners,
    )
    plan = Plan(
        (Stage("it", "query_clients", NOISE, steps or RUNS * ROUNDS * ROWS),), Neighbours.CLIENT
    )
    gate = Gate(box, plan, NullLedger(), Budget(1e12))
    gate.split_into_shards(OWNERS, {"side": torch.zeros(OWNERS)}, 4)
    gate.update_shards(holds_white)
    found = [
        gate.query_clients("it", side, SIGNS.repeat(OWNERS, RUNS), clip_norm=3.0)[WHO]
        for _ in range(ROUNDS)
    ]
    return (
        (torch.stack(found).view(ROUNDS, RUNS, ROWS) * SIGNS).sum((0, 2)).numpy() / 6
    ) + 0.5 * ROUNDS * ROWS


def measured(**more):
    """The largest epsilon that is refuted, by the best test there is: a threshold on the sum, fixed before anything is seen."""
    level = ROUNDS * ROWS * 0.9
    hits, alarms = (int((sums(present, **more) > level).sum()) for present in (1, 0))
    return float(compute_refuted_epsilon(hits, alarms, RUNS, RUNS, DELTA, 1 - CONFIDENCE))


def claim(steps=ROUNDS * ROWS):
    return (
        Plan((Stage("it", "query_clients", NOISE, steps),), Neighbours.CLIENT).cost().epsilon(DELTA)
    )


def test_an_owner_keeps_the_claim():
    found = measured()
    assert 2 < claim() < 4
    assert 0.15 * claim() < found < claim()  # the attack is not blind


def test_an_owner_without_noise_breaks_it(monkeypatch):
    """As where the noise of one was forgotten, and the others' is thought to hide it."""
    noisy = secret_side_module.add_noise

    def forgotten(steps, noise_std, grid, secret):
        value = noisy(steps, noise_std, grid, secret)
        value[WHO] = steps[WHO] * grid
        return value

    monkeypatch.setattr(secret_side_module, "add_noise", forgotten)
    assert measured() > claim()


def test_noise_that_a_round_shares_breaks_it(monkeypatch):
    """One draw for all rows of an owner and a run: the difference of two has none."""
    noisy = secret_side_module.add_noise

    def shared(steps, noise_std, grid, secret):
        rows = steps.view(OWNERS, RUNS, ROWS)
        return (rows * grid + noisy(torch.zeros(OWNERS, RUNS, 1), noise_std, grid, secret)).view(
            steps.shape
        )

    monkeypatch.setattr(secret_side_module, "add_noise", shared)
    assert measured() > claim()


def test_answers_counted_once_for_a_round_break_it(monkeypatch):
    """A gate that counted a cohort's round as one answer would give as many as there are rows, for the price of one."""
    with pytest.raises(BudgetError):
        sums(1, steps=ROUNDS)
    counted = Gate._get_stage
    monkeypatch.setattr(
        Gate,
        "_get_stage",
        lambda gate, name, verb, count=1, done=None: counted(gate, name, verb, 1, 0),
    )
    assert measured(steps=ROUNDS) > claim(ROUNDS)


def test_the_choice_of_an_owner_is_worth_nothing():
    """A plan for one owner is the same however many there are, and however few of them a round asks."""
    from privot.methods.federated_gs_wgan import FederatedGSWGAN

    few, many = (
        FederatedGSWGAN(noise_multiplier=5.0, rounds=10).plan(Spec((1, 8, 8), 10, num_clients=each))
        for each in (2, 3000)
    )
    assert few == many
    turns = FederatedGSWGAN(noise_multiplier=5.0, rounds=100, clients_per_round=300).plan(
        Spec((1, 8, 8), 10, num_clients=3000)
    )
    assert turns == few  # ten turns each
    assert math.isclose(few.cost().mu, math.sqrt(100) / 5)
