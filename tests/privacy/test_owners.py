"""Clients behind one gate: what one of them has, and how much, moves nothing of any other."""

import math

import numpy as np
import pytest
import torch
from support.fakes import NullLedger
from support.gates import (
    DIM,
    LEARNERS,
    learn,
    list_marks,
    make_gate,
    make_records,
    mix_all,
    view_bits,
)

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import BudgetError, DataError, PlanError, QueryError
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Budget, Neighbours, Plan, Stage
from privot.privacy.sampling import Full, Shards
from privot.runtime import Runtime

pytestmark = pytest.mark.usefixtures("array_order")

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
CLIENTS = 4
SHAPE = (1, 2, 2)
SHOWN = 6  # records that a shard shows
SIZES = (3, 9, 1, 6)  # fewer, more, one, as many


def draw_records(seed=0, sizes=SIZES):
    """Images, labels and clients. The number of records of one client moves no other record."""
    images = [
        np.random.default_rng((seed, client)).random((size, *SHAPE), np.float32)
        for client, size in enumerate(sizes)
    ]
    labels = np.concatenate([np.arange(size) % 2 for size in sizes])
    return np.concatenate(images), labels, np.repeat(np.arange(len(sizes)), sizes)


def open_gate(ledger, records=None, neighbours=CLIENT, critics=2, steps=10**6, noise=0.0, **more):
    images, labels, clients = records or draw_records()
    dataset = Sensitive(images, labels, Spec(SHAPE, 2, num_clients=CLIENTS), client_ids=clients)
    sampling = Shards(critics) if neighbours is REPLACE else Full()
    stage = Stage("it", "query_clients", noise, steps, sampling)
    return make_gate(
        dataset, ledger, stage, neighbours=neighbours, **{"runtime": Runtime("cpu"), **more}
    )


def make_state(count=CLIENTS):
    return {"it": torch.zeros(count, DIM)}


def split_gate(ledger, records=None, **more):
    gate = open_gate(ledger, records, **more)
    gate.split_into_shards(CLIENTS, make_state(), SHOWN)
    return gate


def get_state(gate):
    return gate._shards.states["it"]


def query_clients(gate, rows=1, count=CLIENTS, clip_norm=99.0, clients=None):
    return gate.query_clients(
        "it",
        lambda state, row: state["it"] + row,
        torch.zeros(count, rows),
        clip_norm=clip_norm,
        client_indices=None if clients is None else torch.tensor(clients, dtype=torch.int64),
    )


# Which record is in which shard


def list_rows(images):
    return [tuple(row) for row in images.reshape(-1, DIM).tolist()]


def test_shards_show_what_their_clients_have_and_no_more(ledger):
    images, labels, clients = draw_records()
    order = np.random.default_rng(1).permutation(len(labels))
    gate = split_gate(ledger, (images[order], labels[order], clients[order]))
    shown = gate._shards.records.images
    assert shown.shape == (CLIENTS, SHOWN, *SHAPE)
    for client, size in enumerate(SIZES):
        rows = list_rows(shown[client])
        assert set(rows) <= set(list_rows(images[clients == client]))
        assert len(set(rows)) == min(size, SHOWN)
        counts = [rows.count(row) for row in set(rows)]
        assert max(counts) - min(counts) <= 1  # evenly


@pytest.mark.parametrize("critics", [1, 2, 3])
def test_shards_of_a_client_divide_its_records_and_no_other_s(ledger, critics):
    images, labels, clients = draw_records(sizes=(3, 9, 4, 6))
    gate = open_gate(ledger, (images, labels, clients), neighbours=REPLACE, critics=critics)
    gate.split_into_shards(CLIENTS * critics, make_state(CLIENTS * critics), 12)
    seen = set()
    for shard, shown in enumerate(gate._shards.records.images):
        own = images[clients == shard // critics][shard % critics :: critics]
        assert set(list_rows(shown)) == set(list_rows(own))
        seen |= set(list_rows(shown))
    assert len(seen) == len(images)


def test_a_client_with_fewer_records_than_shards_does_not_show_it(ledger):
    """Its second shard has black images, and no record of another shard."""
    spec = Spec((1, 1, 1), 1, num_clients=2)
    dataset = Sensitive(np.ones((5, 1, 1, 1)), np.zeros(5, int), spec, client_ids=[0, 0, 0, 0, 1])
    gate = make_gate(dataset, ledger, Stage("it", "query_clients", 0.0))
    gate.split_into_shards(4, {"it": torch.zeros(4)}, 3)
    assert gate._shards.records.images.flatten(1).tolist() == [[1.0] * 3] * 3 + [[0.0] * 3]


def test_records_without_clients_are_assigned_by_the_order():
    order = np.array([3, 1, 0, 2, 6, 5, 4])
    assigned = make_records(7, num_clients=3)._assign_clients(order)
    assert assigned[order].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert make_records(7)._assign_clients(order).tolist() == [0] * 7
    with_clients = make_records(3, num_clients=2, client_ids=[1, 1, 0])
    assert with_clients._assign_clients(order[-3:]).tolist() == [1, 1, 0]


def test_clients_must_be_declared_and_fit():
    wrong = [[0, 1, 2], [0, 1, 1, 0], [0, 0, 2, 2], [0, 1, 2, 3], [0, 1, 2, -1]]
    for clients in (*wrong, [0.0, 1, 2, 2], [[0, 1, 2, 2]], ["a", "b", "c", "c"]):
        with pytest.raises(DataError, match="clients"):
            make_records(4, num_clients=3, client_ids=clients)
    with pytest.raises(DataError, match="the number of clients"):
        make_records(4, client_ids=[0, 0, 0, 0])
    for number in (0, -1, 5):
        with pytest.raises(DataError, match="clients"):
            Spec(SHAPE, 1, 4, num_clients=number)


# The records of one client are replaced


def count_moves(query, client=1, seeds=6, choose_shown=lambda clients: SHOWN):
    """How often values of others moved when all records of a client did, and their number; and how
    often its own did."""
    others = 0
    own = 0
    for seed in range(seeds):
        images, labels, clients = records = draw_records(seed)
        values = []
        for size in (SIZES[client], 1, 2, 9, 40):  # as they were, then others, and as many
            if values:
                drawn = draw_records(seed + 100, [size] * CLIENTS)
                new = drawn[2] == client
                old = clients != client
                records = [
                    np.concatenate([theirs[new], ours[old]])
                    for theirs, ours in zip(drawn, (images, labels, clients), strict=True)
                ]
            gate = open_gate(NullLedger(), records)
            gate.split_into_shards(CLIENTS, make_state(), choose_shown(records[2]))
            gate.update_shards(query)
            gate.update_shards(query, shard_indices=torch.tensor([client, 2]))
            answer = query_clients(gate, 3, clip_norm=1.0).flatten(1)
            values.append(torch.cat([view_bits(get_state(gate)), view_bits(answer)], 1))
        for value in values[1:]:
            moved = (value != values[0]).any(1)
            own += bool(moved[client])
            moved[client] = False
            others += bool(moved.any())
    return others, own


@pytest.mark.parametrize("query", LEARNERS)
def test_another_owner_s_records_and_their_number_move_nothing(query):
    others, own = count_moves(query)
    assert others == 0
    assert own > 10


def test_planted_padding_to_the_longest_is_caught():
    """Were shards as long as those of the largest client, its size would be in all shapes."""
    assert count_moves(mix_all, seeds=2, choose_shown=lambda c: int(np.bincount(c).max()))[0] > 0


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 50.0])
def test_any_two_states_of_a_client_stay_within_the_bound(ledger, clip_norm):
    gate = split_gate(ledger)
    get_state(gate).copy_(torch.randn(CLIENTS, DIM, generator=torch.Generator().manual_seed(0)))
    answers = []
    for value in (0.0, 1.0, -1.0, 3e38, -3e38, math.inf, math.nan):
        get_state(gate)[2] = value
        answers.append(query_clients(gate, 5, clip_norm=clip_norm))
    answers = torch.stack(answers)
    distances = (answers[:, None] - answers).norm(dim=4)  # [states, states, clients, rows]
    assert not distances[:, :, [0, 1, 3]].any()
    assert 0.999 * 2 * clip_norm < distances.max() <= 2 * clip_norm


def test_a_record_reaches_only_rows_that_drew_its_critic(ledger):
    """One of three critics of one client changes."""
    gate = open_gate(ledger, draw_records(sizes=(3, 9, 4, 6)), neighbours=REPLACE, critics=3)
    gate.split_into_shards(CLIENTS * 3, make_state(CLIENTS * 3), SHOWN)
    rows = 30
    answers = []
    for value in (0.0, 1.0):
        get_state(gate)[3 * 1 + 2] = value  # critic 2 of client 1
        gate._rng = SecretRandom(7)
        answers.append(query_clients(gate, rows))
    drew = Shards(3).draw(CLIENTS * rows, SecretRandom(7)).view(CLIENTS, rows) == 2
    drew[[0, 2, 3]] = False
    assert 0 < drew.sum() < rows
    assert torch.equal((answers[0] != answers[1]).any(2), drew)


def test_every_row_has_noise_of_its_own(ledger):
    gate = split_gate(ledger, noise=1.0, target=Budget(1e12))
    rows = query_clients(gate, 500, clip_norm=3.0).flatten(0, 1)
    assert rows.std().item() == pytest.approx(6.0, rel=0.1)
    assert rows.flatten().unique().numel() >= 0.999 * rows.numel()
    assert torch.corrcoef(rows.T).fill_diagonal_(0).abs().max() < 0.15


# Some are queried, and the steps of each are counted


def test_a_cohort_answers_in_its_order_and_no_other_client_pays(ledger):
    gate = split_gate(ledger, steps=6)
    get_state(gate).copy_(torch.arange(4.0)[:, None])
    answer = query_clients(gate, 3, 2, clients=[3, 1])
    assert answer.shape == (2, 3, DIM)
    assert answer[:, 0, 0].tolist() == [3.0, 1.0]
    assert gate.count_remaining_queries("it") == 3
    query_clients(gate, 3, 2, clients=[0, 2])
    assert gate.count_remaining_queries("it") == 3  # of the client that has least
    query_clients(gate, 3)
    for clients in ([0], [1, 2], [3]):
        with pytest.raises(BudgetError, match="used up"):
            query_clients(gate, 1, len(clients), clients=clients)
    assert list_marks(ledger) == [(0, 2), (3, 5)]


def test_a_client_without_steps_is_refused_though_others_have_some(ledger):
    gate = split_gate(ledger, steps=4)
    query_clients(gate, 4, 1, clients=[2])
    lines = ledger.entries()
    with pytest.raises(BudgetError, match="used up"):
        query_clients(gate)
    assert ledger.entries() == lines
    query_clients(gate, 4, 3, clients=[0, 1, 3])


@pytest.mark.parametrize(
    ("clients", "count"),
    [([0, 0], 2), ([0, 1], 3), ([0, -1], 2), ([-1, 3], 2), ([0, 4], 2), ([], 0), (None, 3)],
)
def test_an_impossible_cohort_is_refused(ledger, clients, count):
    """A client that is named twice would answer twice and be counted once."""
    gate = split_gate(ledger)
    with pytest.raises(PlanError, match="once each"):
        query_clients(gate, 1, count, clients=clients)
    assert gate.count_remaining_queries("it") == 10**6


@pytest.mark.parametrize("stop", [1, 3])
def test_a_process_that_ends_after_an_answer_goes_on_with_the_next(tmp_path, stop):
    """Every query is marked by itself, and no answer is stored, as few as the steps may be."""
    run = {"steps": 2 * stop, "folder": tmp_path / "run"}
    for turn in range(stop):
        gate = split_gate(Ledger(tmp_path / "l"), **run)
        assert gate.count_remaining_queries("it") == 2 * stop - 2 * turn
        assert (get_state(gate) == turn).all()
        query_clients(gate, 2)
        gate.update_shards(lambda images, labels, state: {"it": state["it"] + 1})
        gate.save_shard_states()
    gate = split_gate(Ledger(tmp_path / "l"), **run)
    with pytest.raises(BudgetError, match="used up"):
        query_clients(gate)
    assert not list((tmp_path / "run").glob("*.safetensors"))
    kinds = [line["kind"] for line in Ledger(tmp_path / "l").entries()]
    assert kinds.count("reserve") == 1


def test_chunks_change_no_answer(ledger):
    answers = []
    for chunk_size in (1, 5, 1000):
        gate = split_gate(ledger, runtime=Runtime("cpu", chunk_size))
        gate.update_shards(learn)
        answers.append(query_clients(gate, 4))
    assert torch.allclose(answers[0], answers[1], atol=1e-6)
    assert torch.allclose(answers[0], answers[2], atol=1e-6)


# Refused


@pytest.mark.parametrize(
    ("neighbours", "count", "shown", "message"),
    [
        (CLIENT, CLIENTS, 0, "no proof"),  # a shard must be all that one client has
        (CLIENT, CLIENTS, -1, "no proof"),
        (CLIENT, 2 * CLIENTS, SHOWN, "no proof"),
        (CLIENT, 3, SHOWN, "no proof"),
        (CLIENT, 1, SHOWN, "no proof"),
        (REPLACE, 7, SHOWN, "same number"),
        (REPLACE, CLIENTS, -1, "same number"),
    ],
)
def test_splits_without_a_proof_are_refused(ledger, neighbours, count, shown, message):
    gate = open_gate(ledger, neighbours=neighbours)
    with pytest.raises(PlanError, match=message):
        gate.split_into_shards(count, make_state(count), shown)
    assert ledger.entries() == []


@pytest.mark.parametrize(
    ("neighbours", "count", "shown"), [(CLIENT, CLIENTS, 1), (REPLACE, 3, 0), (REPLACE, 1, 0)]
)
def test_the_smallest_splits_with_a_proof(ledger, neighbours, count, shown):
    gate = open_gate(ledger, neighbours=neighbours)
    gate.split_into_shards(count, make_state(count), shown)
    assert len(gate._shards.records.images) == count


def test_plans_for_other_shards_or_other_noise_are_refused(ledger):
    gate = open_gate(ledger, draw_records(sizes=(3, 9, 4, 6)), neighbours=REPLACE, critics=1000)
    gate.split_into_shards(CLIENTS * 3, make_state(CLIENTS * 3), SHOWN)
    with pytest.raises(PlanError, match="another number of shards"):
        query_clients(gate)
    with pytest.raises(PlanError, match="no proof"):  # a pure epsilon, though noise is Gaussian
        make_gate(make_records(4), ledger, Stage("it", "sum", 1.0, mechanism="laplace"))


def test_a_query_that_fails_closes_the_gate(ledger):
    gate = split_gate(ledger)
    with pytest.raises(QueryError):
        gate.query_clients(
            "it", lambda state, row: state["none"], torch.zeros(CLIENTS, 1), clip_norm=1.0
        )
    with pytest.raises(PlanError):
        query_clients(gate)


# What it costs


def test_answers_of_a_client_are_one_gaussian_and_runs_of_both_units_add_up_for_a_record(ledger):
    """To replace a record is one way to replace what its client has."""
    cost = Plan((Stage("it", "query_clients", 20.0, 400),), CLIENT).cost()
    assert cost.mu == pytest.approx(1.0)
    assert cost.epsilon(1e-5) == Plan((Stage("it", "sum", 1.0),), REPLACE).cost().epsilon(1e-5)
    ledger.reserve(Plan((Stage("it", "query_clients", 2.0),), CLIENT), "first")
    assert ledger.compute_spent_cost().mu == pytest.approx(0.5)
    other = Plan((Stage("it", "sum", 2.0),), REPLACE)
    assert ledger.compute_spent_cost(extra_plan=other).mu == pytest.approx(math.sqrt(0.5))
