"""The audit of clients: a server that chooses whom it asks, and a client who holds one thing or quite another, stay under the claim.

The state of a client says which it holds; each of its answers is one end of the ball or the other. Runs are done side by side: one call
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
from privot.methods import make_method
from privot.privacy import secret_side as secret_side_module
from privot.privacy.gate import Gate
from privot.privacy.plan import Budget, Neighbours, Plan, Stage

# 64 answers of deviation 8: one of deviation 1
CLIENTS = 4
TARGET = 2
ROUNDS = 4
ROWS = 16
NOISE = 8.0
DELTA = 1e-3
RUNS = 2000
CONFIDENCE = 0.95
# rows ask for either side in turn, so that what they share would cancel
SIGNS = torch.tensor([1.0, -1.0]).repeat(ROWS // 2)


def make_plan(steps):
    return Plan((Stage("it", "query_clients", NOISE, steps),), Neighbours.CLIENT)


def find_white(images, labels, state):
    return {"side": images.amax() * 2 - 1}


def answer_side(state, row):
    return state["side"] * 1e9 * row  # far beyond the bound, to be clipped to it


def sum_answers(present, steps=RUNS * ROUNDS * ROWS):
    """What a server makes of all that one client said in each of RUNS runs, in units of the sensitivity: [runs], about 0 if it is absent."""
    sizes = (3, 1, 7 if present else 2, 5)  # the client has another number of records, too
    clients = np.repeat(np.arange(CLIENTS), sizes)
    images = np.where(clients == TARGET, float(present), 0.0)[:, None, None, None]
    spec = Spec((1, 1, 1), 1, num_clients=CLIENTS)
    dataset = Sensitive(images, np.zeros(len(clients), int), spec, client_ids=clients)
    gate = Gate(dataset, make_plan(steps), NullLedger(), Budget(1e12))
    gate.split_into_shards(CLIENTS, {"side": torch.zeros(CLIENTS)}, 4)
    gate.update_shards(find_white)
    rows = SIGNS.repeat(CLIENTS, RUNS)
    answers = [
        gate.query_clients("it", answer_side, rows, clip_norm=3.0)[TARGET] for _ in range(ROUNDS)
    ]
    sums = (torch.stack(answers).view(ROUNDS, RUNS, ROWS) * SIGNS).sum((0, 2)).numpy()
    return sums / 6 + 0.5 * ROUNDS * ROWS


def refute_epsilon(**options):
    """The largest refuted epsilon, by the best test there is: a threshold on the sum, fixed before anything is seen."""
    level = ROUNDS * ROWS * 0.9
    hits, alarms = (int((sum_answers(present, **options) > level).sum()) for present in (1, 0))
    return float(compute_refuted_epsilon(hits, alarms, RUNS, RUNS, DELTA, 1 - CONFIDENCE))


CLAIM = make_plan(ROUNDS * ROWS).cost().epsilon(DELTA)


def test_a_client_keeps_the_claim():
    assert 2 < CLAIM < 4
    assert 0.15 * CLAIM < refute_epsilon() < CLAIM  # the attack is not blind


def skip_one_client(steps, noise_std, grid, secret, add_noise):
    """As where the noise of one was forgotten, and the others' is thought to hide it."""
    value = add_noise(steps, noise_std, grid, secret)
    value[TARGET] = steps[TARGET] * grid
    return value


def share_in_a_round(steps, noise_std, grid, secret, add_noise):
    """One draw for all rows of a client and a run: the difference of two has none."""
    rows = steps.view(CLIENTS, RUNS, ROWS)
    shared = add_noise(torch.zeros(CLIENTS, RUNS, 1), noise_std, grid, secret)
    return (rows * grid + shared).view(steps.shape)


@pytest.mark.parametrize("bug", [skip_one_client, share_in_a_round])
def test_wrong_noise_breaks_it(bug, monkeypatch):
    add_noise = secret_side_module.add_noise
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda *arguments: bug(*arguments, add_noise)
    )
    assert refute_epsilon() > CLAIM


def test_answers_counted_once_for_a_round_break_it(monkeypatch):
    """A gate that counted a cohort's round as one answer would give as many as there are rows, for the price of one."""
    with pytest.raises(BudgetError):
        sum_answers(1, steps=ROUNDS)
    real = Gate._get_stage
    monkeypatch.setattr(
        Gate,
        "_get_stage",
        lambda gate, name, verb, count=1, done=None: real(gate, name, verb, 1, 0),
    )
    assert refute_epsilon(steps=ROUNDS) > make_plan(ROUNDS).cost().epsilon(DELTA)


def test_the_choice_of_a_client_is_worth_nothing():
    """A plan for one client is the same however many there are, and however few of them a round asks."""
    few, many, in_turns = (
        make_method("federated-gs-wgan", {"noise_multiplier": 5.0, **settings}).plan(
            Spec((1, 8, 8), 10, num_clients=clients)
        )
        for clients, settings in (
            (2, {"rounds": 10}),
            (3000, {"rounds": 10}),
            (3000, {"rounds": 100, "clients_per_round": 300}),  # ten turns each
        )
    )
    assert few == many == in_turns
    assert math.isclose(few.cost().mu, math.sqrt(100) / 5)
