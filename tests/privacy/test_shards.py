"""Shards: a record reaches the state of one shard, rows are counted, a crash only over-charges."""

import itertools
import math
import stat
from functools import partial

import numpy as np
import pytest
import torch
from support.fakes import NullLedger
from support.gates import (
    DIM,
    LEARNERS,
    learn,
    list_kinds,
    list_marks,
    make_gate,
    normalise,
    view_bits,
    watch_reads,
)

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import BudgetError, LedgerError, PlanError, QueryError, ReleaseError
from privot.io import partial_path
from privot.privacy.answers import MARKS_PER_STAGE, MAX_STORED_RESULTS
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Budget, Neighbours, Stage
from privot.privacy.sampling import Shards
from privot.privacy.shard_checkpoint import list_shard_checkpoints, write_shard_checkpoint
from privot.runtime import Runtime

pytestmark = pytest.mark.usefixtures("array_order")

ROUTE = "query_random_shards"
POLL = "sum_over_shards"
SHARDS = 4
SIZE = 3
USED = SHARDS * SIZE
COUNT = USED + 2  # the last two are in no shard
SHAPE = (1, 2, 2)
IMAGES = np.random.default_rng(0).random((COUNT, *SHAPE), np.float32)
BY_SHARD = torch.from_numpy(IMAGES[:USED]).unflatten(0, (SIZE, SHARDS)).transpose(0, 1)
MEANS = BY_SHARD.mean(1).flatten(1)


def open_gate(
    ledger, images=IMAGES, steps=10**6, noise=0.0, shards=SHARDS, polls=MAX_STORED_RESULTS, **more
):
    stages = (
        Stage(ROUTE, ROUTE, noise, steps, Shards(shards)),
        Stage(POLL, POLL, noise, polls),
    )
    dataset = Sensitive(images, np.arange(COUNT) % 2, Spec(SHAPE, 2, COUNT))
    return make_gate(dataset, ledger, *stages, runtime=Runtime("cpu"), **more)


def split_gate(ledger, state=None, **more):
    gate = open_gate(ledger, **more)
    gate.split_into_shards(SHARDS, state or make_state())
    return gate


def make_state(*shape):
    return {"it": torch.zeros(shape or (SHARDS, DIM))}


def get_state(gate, name="it"):
    return gate._shards.states[name]


def interrupt(*arguments):
    raise KeyboardInterrupt


def add_row(state, row):
    return state["it"] + row


def route(gate, rows=1, query=add_row, clip_norm=99.0):
    return gate.query_random_shards(ROUTE, query, torch.zeros(rows), clip_norm=clip_norm)


def poll(gate, *public, query=lambda state: state["it"], clip_norm=99.0):
    return gate.sum_over_shards(POLL, query, *public, clip_norm=clip_norm)


def count_remaining(gate):
    return gate.count_remaining_queries(ROUTE)


# Which record is in which shard


def test_record_i_is_in_shard_i_mod_count_and_the_rest_in_none(ledger, monkeypatch):
    """Records are read once, after the charge, and those of no shard are not read."""
    reads = watch_reads(monkeypatch, lambda indices: (indices.tolist(), list_kinds(ledger)))
    labels = torch.zeros(SHARDS, SIZE, dtype=torch.int64)
    gate = split_gate(ledger, {"seen": torch.zeros(SHARDS, SIZE, *SHAPE), "labels": labels})
    gate.update_shards(lambda images, labels, state: {"seen": images, "labels": labels})
    assert torch.equal(get_state(gate, "seen"), BY_SHARD)
    assert torch.equal(get_state(gate, "labels"), torch.arange(USED).view(SIZE, SHARDS).T % 2)
    route(gate, 5, lambda state, row: state["seen"].flatten())
    ((indices, kinds),) = reads
    assert sorted(indices) == list(range(USED))
    assert kinds == ["reserve"]


# The state of a shard is its own


def count_changed_states(query, trials=30):
    """Over pairs of data sets that differ in one record: how often any state but that of its shard
    changed, and how often that one did."""
    rng = np.random.default_rng(3)
    others = 0
    own = 0
    for trial in range(trials):
        images = rng.random((COUNT, *SHAPE), np.float32)
        changed = images.copy()
        index = int(rng.integers(USED))
        tiny = np.nextafter(np.float32(0), np.float32(1))
        changed[index] = (rng.random(SHAPE), 1, 0, tiny)[trial % 4]
        states = []
        for records in (images, changed):
            gate = split_gate(NullLedger(), images=records)
            gate.update_shards(query)
            gate.update_shards(query, shard_indices=torch.tensor([index, index + 1]) % SHARDS)
            states.append(view_bits(get_state(gate)))
        moved = (states[0] != states[1]).any(1)
        own += bool(moved[index % SHARDS])
        moved[index % SHARDS] = False
        others += bool(moved.any())
    return others, own


@pytest.mark.parametrize("query", LEARNERS)
def test_a_record_changes_the_state_of_its_shard_alone(query):
    others, own = count_changed_states(query)
    assert others == 0
    assert own > 10


def test_planted_mixing_is_caught(monkeypatch):
    """A gate that ran the query on all shards at once would let a batch norm reach across them."""

    def run(images, labels, state):
        flat = torch.nn.functional.batch_norm(images.flatten(0, 1), None, None, training=True)
        return {"it": flat.view(len(images), -1, DIM).sum(1)}

    monkeypatch.setattr(torch.func, "vmap", lambda query, in_dims=0, chunk_size=None: run)
    assert count_changed_states(normalise, 8)[0] > 0


@pytest.mark.parametrize(
    "query",
    [
        lambda images: images[:, None].expand(SHARDS, SIZE, *SHAPE).mean((0, 1)).flatten(),
        lambda images: images.view(SHARDS, SIZE, *SHAPE).mean((0, 1)).flatten(),
        lambda images: torch.zeros(SHARDS, DIM),
        lambda images: images.mean(),  # broadcast over a state of as many numbers, it would mix
        lambda images: images.flatten(1).mean(0)[:1],
        lambda images: torch.randn(DIM),
    ],
)
def test_an_update_of_several_shards_of_another_shape_or_at_random_is_refused(ledger, query):
    gate = split_gate(ledger)
    with pytest.raises(QueryError):
        gate.update_shards(lambda images, labels, state: {"it": query(images)})


def test_some_shards_are_updated_and_the_others_stay(ledger):
    gate = split_gate(ledger)
    gate.update_shards(learn, shard_indices=torch.tensor([2, 0]))
    gate.update_shards(learn, shard_indices=torch.tensor([], dtype=torch.int64))
    assert torch.allclose(get_state(gate)[[0, 2]], MEANS[[0, 2]])
    assert not get_state(gate)[[1, 3]].any()


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 1000])
def test_chunks_change_no_state(ledger, chunk_size):
    gate = split_gate(ledger)
    gate._chunk_size = chunk_size
    calls = []
    gate.update_shards(lambda *shard: calls.append(1) or learn(*shard))
    assert len(calls) == math.ceil(SHARDS / max(1, chunk_size // SIZE))
    assert torch.allclose(get_state(gate), MEANS)
    gate._rng = SecretRandom(7)
    drawn = Shards(SHARDS).draw(9, SecretRandom(7))
    assert torch.allclose(route(gate, 9), get_state(gate)[drawn].double(), atol=1e-4)


def test_the_caller_s_state_stays_and_values_carry_no_graph(ledger):
    state = {"it": torch.zeros(SHARDS, DIM, requires_grad=True)}
    gate = split_gate(ledger, state)
    factor = torch.full((3,), 2.0, requires_grad=True)

    def scale(images, labels, state, factor):
        return {"it": state["it"] + images.flatten(1).mean(0) * factor[0]}

    assert gate.update_shards(scale, factor) is None
    assert torch.allclose(get_state(gate), 2 * MEANS)
    assert not state["it"].any()
    rows = gate.query_random_shards(
        ROUTE, lambda *row: row[0]["it"] * row[1], factor, clip_norm=9.0
    )
    total = poll(gate, factor, query=lambda state, factor: state["it"] * factor.sum())
    assert not any(value.requires_grad for value in (get_state(gate), rows, total))


# What comes out


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 50.0])
def test_any_two_states_of_one_shard_stay_within_the_bound(ledger, clip_norm):
    """Rows that drew the shard and sums over shards move by at most 2 bounds, other rows not."""
    rng = np.random.default_rng(0)
    normal = torch.from_numpy(rng.normal(size=(SHARDS + 1, DIM))).float()
    gate = split_gate(ledger, {"it": normal[1:]}, polls=10**6)
    ends = (0.0, 1e-30, 1.0, -1.0, 3e38, -3e38, math.inf, -math.inf, math.nan)
    worst = [torch.full((DIM,), value) for value in ends]
    worst += [torch.tensor([math.nan, 1.0, 0, 0]), torch.tensor([math.inf, -math.inf, 1.0, 0])]
    rows = 24
    shard = 1
    routed = []
    polled = []
    for state in (*worst, normal[0]):
        get_state(gate)[shard] = state
        gate._rng = SecretRandom(7)  # the same draws
        routed.append(route(gate, rows, clip_norm=clip_norm))
        polled.append(poll(gate, clip_norm=clip_norm))
    drew = Shards(SHARDS).draw(rows, SecretRandom(7)) == shard
    assert 0 < drew.sum() < rows
    routed = torch.stack(routed)
    polled = torch.stack(polled)
    distances = (routed[:, None] - routed).norm(dim=3)
    assert not distances[..., ~drew].any()
    assert 0.999 * 2 * clip_norm < distances.max() <= 2 * clip_norm
    assert (polled[:, None] - polled).norm(dim=2).max() <= 2 * clip_norm * (1 + 1e-12)


def test_a_poll_adds_up_all_shards(ledger):
    gate = split_gate(ledger, {"it": MEANS, "own": torch.arange(4.0)})
    means = MEANS.double()
    total = poll(gate, 2.0, query=lambda state, factor: state["it"] * factor)
    assert torch.allclose(total, 2 * means.sum(0), atol=1e-4)
    clipped = means * (0.5 / means.norm(dim=1, keepdim=True)).clamp(max=1)
    assert torch.allclose(poll(gate, clip_norm=0.5), clipped.sum(0), atol=1e-5)
    assert poll(gate, query=lambda state: state["own"]).item() == 6.0
    assert route(gate, 2, lambda state, row: state["own"].sum()).shape == (2,)


def test_a_row_has_the_values_of_its_arguments(ledger):
    gate = split_gate(ledger, {"it": torch.ones(SHARDS, 3, DIM)})
    points = torch.rand(7, DIM)
    factors = torch.arange(7.0)

    def query(state, point, factor):
        return state["it"] @ point * factor

    rows = gate.query_random_shards(ROUTE, query, points, factors, clip_norm=99.0)
    expected = (points.sum(1) * factors)[:, None].expand(7, 3).double()
    assert torch.allclose(rows, expected, atol=1e-4)


# Refused


@pytest.mark.parametrize(("verb", "neighbours"), [("sum", "add-remove"), ("rows", "local")])
def test_shards_are_for_replaced_records_only(dataset, ledger, verb, neighbours):
    """If records came and went, one of them would move all that follow to another shard."""
    gate = make_gate(dataset, ledger, Stage("it", verb, 0.0), neighbours=Neighbours(neighbours))
    with pytest.raises(PlanError, match="no proof"):
        gate.split_into_shards(SHARDS, make_state())
    assert ledger.entries() == []


@pytest.mark.parametrize(
    ("count", "num_states"), [(0, 0), (-1, 1), (COUNT + 1, COUNT + 1), (4, 3), (3, 4), (4, 5)]
)
def test_a_wrong_count_is_refused(ledger, count, num_states):
    with pytest.raises(PlanError, match="a state each"):
        open_gate(ledger).split_into_shards(count, make_state(num_states, DIM))
    assert ledger.entries() == []


def test_nothing_is_queried_before_the_split(ledger):
    gate = open_gate(ledger)
    for verb in (route, poll, lambda gate: gate.update_shards(learn), type(gate).save_shard_states):
        with pytest.raises(PlanError, match="not split"):
            verb(gate)
    gate.delete_shard_states()  # nothing to delete, and no ticket to look for it
    assert ledger.entries() == []


def test_queries_that_the_plan_does_not_cover_are_refused(ledger):
    gate = split_gate(ledger, shards=1000)
    with pytest.raises(PlanError, match="another number of shards"):  # at the price of 1 in 1000
        route(gate)
    with pytest.raises(PlanError, match="of sum_over_shards"):
        gate.sum_over_shards(ROUTE, lambda state: state["it"], clip_norm=1.0)
    with pytest.raises(PlanError, match="of query_random_shards"):
        gate.query_random_shards(POLL, add_row, torch.zeros(1), clip_norm=1.0)
    gate = split_gate(ledger)
    for clip_norm in (0.0, math.inf, math.nan):
        for verb in (route, poll):
            with pytest.raises(PlanError, match="bound"):
                verb(gate, clip_norm=clip_norm)
    assert list_kinds(ledger) == ["reserve", "reserve"]


@pytest.mark.parametrize("verb", ["update_shards", ROUTE, POLL])
def test_errors_are_hidden_and_close_the_gate(ledger, verb):
    """That it failed may depend on the records; a second failure would say more of them."""

    def fail(*arguments):
        raise ValueError("secret 0.123")

    gate = split_gate(ledger)
    run = {
        "update_shards": gate.update_shards,
        ROUTE: partial(route, gate),
        POLL: partial(poll, gate),
    }
    with pytest.raises(QueryError, match="with ValueError") as caught:
        run[verb](query=fail)
    assert "0.123" not in str(caught.value)
    assert caught.value.__context__ is None
    with pytest.raises(PlanError):
        route(gate)
    for query in (fail, learn):
        with pytest.raises(PlanError, match="closed"):
            gate.update_shards(query)


# Counting


def test_a_call_uses_up_as_many_queries_as_it_has_rows_and_no_more_than_are_left(ledger):
    gate = split_gate(ledger, steps=100)
    for rows, left in ((1, 99), (30, 69), (5, 64), (64, 0)):
        assert route(gate, rows).shape == (rows, DIM)
        lines = ledger.entries()
        for refused in (0, left + 1):
            with pytest.raises(BudgetError, match="used up"):
                route(gate, refused)
        assert ledger.entries() == lines
        assert count_remaining(gate) == left
    assert gate.count_remaining_queries(POLL) == MAX_STORED_RESULTS
    assert list_marks(ledger, ROUTE) == [(0, 0), (1, 30), (31, 35), (36, 99)]


@pytest.mark.parametrize("steps", [MAX_STORED_RESULTS, 100, 7 * MARKS_PER_STAGE + 3])
def test_marks_cover_the_rows_before_a_state_is_read(ledger, steps):
    """Whatever the stride and the number of rows: the ledger on disk is ahead of the query."""
    gate = split_gate(ledger, steps=steps)
    gaps = []

    def query(state, row):
        marked = list_marks(Ledger(ledger.path), ROUTE)[-1][1] + 1
        gaps.append(marked - (steps - count_remaining(gate) + rows))
        return add_row(state, row)

    for rows in (1, 5, 2, 9, 3, 3, 3, 7):
        route(gate, rows, query)
    assert len(gaps) == 8
    assert min(gaps) >= 0
    marks = list_marks(ledger, ROUTE)
    assert marks[0][0] == 0
    assert all(after[0] == before[1] + 1 for before, after in itertools.pairwise(marks))


def test_a_crash_in_the_query_has_paid_for_its_rows(ledger, tmp_path):
    gate = split_gate(ledger, steps=100, folder=tmp_path / "run")
    route(gate, 10)
    with pytest.raises(KeyboardInterrupt):
        route(gate, 20, interrupt)
    again = split_gate(ledger, steps=100, folder=tmp_path / "run")
    assert count_remaining(again) == 70
    route(again, 70)
    with pytest.raises(BudgetError):
        route(again)
    assert list_marks(ledger, ROUTE) == [(0, 9), (10, 29), (30, 99)]
    assert list_kinds(ledger).count("reserve") == 1


@pytest.mark.usefixtures("coarse_accounting")
def test_a_short_stage_replays_its_rows(ledger, tmp_path):
    run = {"steps": MAX_STORED_RESULTS, "noise": 50.0, "target": Budget(1e9), "folder": tmp_path}
    first = split_gate(ledger, **run)
    answers = [route(first, 4), route(first, 2)]
    again = split_gate(ledger, **run)
    lines = ledger.entries()
    assert torch.equal(route(again, 4), answers[0])
    assert torch.equal(route(again, 2), answers[1])
    assert ledger.entries() == lines
    assert not torch.equal(route(again, 2), answers[1])
    assert count_remaining(again) == MAX_STORED_RESULTS - 8


def test_two_gates_of_one_ticket_never_give_the_same_result(ledger, tmp_path):
    one, two = (split_gate(ledger, steps=1000, folder=tmp_path / "run") for _ in range(2))
    route(one, 5)
    with pytest.raises(LedgerError, match="no query result is given twice"):
        route(two, 5)


# What is stored of the secret side


def make_aged_state():
    return {"age": torch.zeros(SHARDS, dtype=torch.int64), **make_state()}


@pytest.fixture
def resume(ledger, tmp_path):
    return lambda: split_gate(ledger, make_aged_state(), folder=tmp_path / "run")


@pytest.fixture
def stored(resume, ledger):
    """The states of a run that stored them and crashed, and their file."""
    gate = resume()

    def update(images, labels, state):
        return {"it": learn(images, labels, state)["it"] / 3, "age": state["age"] + labels.sum()}

    gate.update_shards(update)
    route(gate, 3)
    gate.save_shard_states()
    (file,) = ledger.path.parent.glob("*.vault*")
    return {name: value.clone() for name, value in gate._shards.states.items()}, file


def test_states_are_restored_to_the_bit_by_their_run_alone(resume, ledger, tmp_path, stored):
    states, file = stored
    assert file.parent == ledger.path.parent
    assert file.name.startswith(ledger.path.name)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["ticket"]
    assert not list(ledger.path.parent.glob("*.part"))
    gate = resume()
    assert torch.equal(view_bits(get_state(gate)), view_bits(states["it"]))
    assert torch.equal(get_state(gate, "age"), states["age"])
    assert get_state(gate, "age").dtype == torch.int64
    assert states["it"].any()
    assert list_kinds(ledger).count("reserve") == 1
    other = split_gate(ledger, make_aged_state())
    assert not get_state(other).any()
    other.save_shard_states()  # it cannot be resumed, so nothing is stored
    assert list_kinds(ledger).count("reserve") == 2
    assert list_shard_checkpoints(ledger) == {0: file}


def test_the_last_store_counts_and_a_crash_during_one_leaves_it(resume, stored, monkeypatch):
    gate = resume()
    gate.update_shards(
        lambda images, labels, state: {"it": state["it"] * math.inf, "age": state["age"] + 1}
    )
    gate.save_shard_states()
    gate.update_shards(lambda images, labels, state: {"it": state["it"] * 0, "age": state["age"]})
    with monkeypatch.context() as patch:
        patch.setattr(type(stored[1]), "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            gate.save_shard_states()
    again = resume()
    assert torch.equal(get_state(again, "age"), stored[0]["age"] + 1)
    assert torch.equal(view_bits(get_state(again)), view_bits(stored[0]["it"] * math.inf))


def test_states_are_deleted_with_what_a_crash_left(resume, stored):
    gate = resume()
    half = partial_path(stored[1])
    half.write_bytes(b"what a crash during a write left")
    gate.delete_shard_states()
    assert not stored[1].exists()
    assert not half.exists()
    with pytest.raises(PlanError, match="not split"):
        route(gate)
    gate.delete_shard_states()
    gate.split_into_shards(SHARDS, make_aged_state())
    assert not get_state(gate).any()


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "flipped"])
def test_a_damaged_file_is_refused_in_a_line(resume, stored, damage):
    content = stored[1].read_bytes()
    flipped = content[:-9] + bytes([content[-9] ^ 64]) + content[-8:]
    damaged = {"cut": content[:-5], "empty": b"", "text": b"not a tensor file", "flipped": flipped}
    stored[1].write_bytes(damaged[damage])
    with pytest.raises(ReleaseError, match="Start a new run") as caught:
        resume()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["it", "other"])
def test_states_of_another_shape_or_name_are_refused(resume, stored, name):
    write_shard_checkpoint(stored[1], {**make_aged_state(), name: torch.zeros(SHARDS, DIM + 1)})
    with pytest.raises(ReleaseError, match="Start a new run"):
        resume()


def test_a_resumed_run_is_not_split_in_another_way(ledger, tmp_path):
    """Four states of two numbers are not two of four: a record would be in two shards."""
    gate = split_gate(ledger, make_state(4, 2), folder=tmp_path)
    gate.update_shards(lambda images, labels, state: {"it": images.flatten(1).mean(0)[:2]})
    gate.save_shard_states()
    gate.split_into_shards(2, make_state(2, 4))  # it has not crashed
    assert not get_state(gate).any()
    with pytest.raises(ReleaseError, match="another split"):
        open_gate(ledger, folder=tmp_path).split_into_shards(2, make_state(2, 4))


def test_a_run_that_did_not_crash_restores_nothing(tmp_path):
    """Such as beside a new ledger where another had been: the number of the ticket is the same."""
    old = split_gate(Ledger(tmp_path / "it.jsonl"), folder=tmp_path / "old")
    old.update_shards(learn)
    old.save_shard_states()
    for name in ("it.jsonl", "it.jsonl.head"):
        (tmp_path / name).unlink()
    new = split_gate(Ledger(tmp_path / "it.jsonl"), folder=tmp_path / "new")
    assert new.ticket == old.ticket
    assert list(tmp_path.glob("*.vault0.safetensors"))
    assert not get_state(new).any()


def test_any_memory_layout_can_be_stored(ledger, tmp_path):
    net = torch.rand(SHARDS, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    state = {"it": torch.rand(DIM, SHARDS).T, "net": net}
    split_gate(ledger, state, folder=tmp_path).save_shard_states()
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    again = split_gate(ledger, zeros, folder=tmp_path)
    assert all(torch.equal(get_state(again, name), value) for name, value in state.items())
