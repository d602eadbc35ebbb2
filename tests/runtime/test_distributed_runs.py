"""Several processes as threads of this one: what a process sends, receives and adds up, where a changed gate can be watched."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.fakes import FreePlan, NullLedger

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PlanError, PrivotError, QueryError
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Stage
from privot.privacy.sampling import Shards
from privot.runtime import Runtime
from privot.runtime.process_group import ProcessGroup, SingleProcess

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = "query_random_shards"
SUM = "sum_over_shards"
SHARDS = 5
SIZE = 2
PLAN = FreePlan(
    (Stage(ROWS, ROWS, 0.7, 200, Shards(SHARDS)), Stage(SUM, SUM, 0.7, 3)), Neighbours.REPLACE
)


class Wires:
    """What `ProcessGroup` asks of torch.distributed, between threads."""

    class ReduceOp:
        MAX = "max"

    def __init__(self, count):
        self._barrier = threading.Barrier(count, timeout=20)
        self._values = [None] * count
        self._own = threading.local()

    def set_rank(self, rank):
        self._own.rank = rank

    def _exchange(self, value):
        self._values[self._own.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def broadcast(self, value, source):
        values = self._exchange(value.clone())
        value.copy_(values[source])

    def scatter(self, own, parts, source):
        own.copy_(self._exchange(parts)[source][self._own.rank])

    def gather(self, own, parts, goal):
        values = self._exchange(own.clone())
        for part, value in zip(parts or [], values, strict=False):
            part.copy_(value)

    def reduce(self, part, goal):
        values = self._exchange(part.clone())
        if self._own.rank == goal:
            part.copy_(sum(values))

    def all_reduce(self, worst, operation):
        assert operation == "max"
        worst.copy_(torch.stack(self._exchange(worst.clone())).max())


def run_together(count, work):
    """``work(rank, group)`` in so many threads: what each gives back, or the error that it ends with."""
    wires = Wires(count)

    def run(rank):
        wires.set_rank(rank)
        group = ProcessGroup(rank, count, False)
        group._distributed = wires
        try:
            return work(rank, group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def make_gate(folder, rank, group, run=None, records=SHARDS * SIZE + 1):
    """With the leader's seed alone: a follower's noise would not be the leader's."""
    images = np.random.default_rng(1).random((records, 1, 2, 2), np.float32)
    return Gate(
        Sensitive(images, np.arange(records) % 2, Spec((1, 2, 2), 2)),
        PLAN,
        Ledger(folder / f"{rank}.jsonl"),
        NullLedger(),
        runtime=Runtime("cpu", 7),
        insecure_seed=rank,
        process_group=group,
        folder=folder / run if run and not rank else None,
    )


def make_states():
    return {"it": torch.arange(SHARDS * 4.0).view(SHARDS, 4), "seen": torch.zeros(SHARDS)}


def gather_states(gate, group):
    return {name: group.gather(value, SHARDS) for name, value in gate._shards[1].items()}


def update(images, labels, state, step):
    return {"it": state["it"] + step * images.flatten(1).mean(0), "seen": state["seen"] + 1}


def scale(state, row):
    return state["it"] * row


def use_shards(folder, rank, group, run=None):
    """All verbs of shards, once or more: the public answers, the states at the leader, and how many queries remain."""
    gate = make_gate(folder, rank, group, run)
    gate.split_into_shards(SHARDS, make_states())
    gate.update_shards(update, torch.tensor(1.0 + rank))  # a public number is the leader's
    gate.update_shards(update, torch.tensor(2.0), shard_indices=torch.tensor([1, 4, 3]))
    gate.update_shards(update, torch.tensor(3.0), shard_indices=torch.tensor([3]))  # one of them
    rows = torch.linspace(1, 2, 12) + rank
    factor = torch.tensor(0.1 + rank)
    answers = [
        *(gate.query_random_shards(ROWS, scale, rows, clip_norm=5.0) for _ in range(2)),
        *(gate.sum_over_shards(SUM, scale, factor, clip_norm=2.0) for _ in range(2)),
    ]
    gate.save_shard_states()
    remaining = gate.count_remaining_queries(ROWS), gate.count_remaining_queries(SUM)
    return answers, gather_states(gate, group), remaining


def all_equal(one, two):
    return all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


@pytest.mark.parametrize("count", [2, 3])
def test_threads_that_share_the_shards_give_the_answers_of_one(tmp_path, count):
    alone, states, remaining = use_shards(tmp_path, 0, SingleProcess())
    assert remaining == (200 - 24, 1)
    assert states["seen"].tolist() == [1, 2, 1, 3, 2]
    folder = tmp_path / "several"
    folder.mkdir()
    results = run_together(count, lambda rank, group: use_shards(folder, rank, group, "run"))
    for result in results:
        assert all_equal(alone, result[0]), "everyone has the leader's answers"
        assert result[2] == remaining
    assert all(torch.equal(value, results[0][1][name]) for name, value in states.items())
    files = {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".lock"}
    secret = {"0.jsonl.vault0-order.safetensors", "0.jsonl.vault0.safetensors"}
    assert files == {"0.jsonl", "0.jsonl.head", *secret}, "the leader alone pays and stores"


def test_stored_answers_come_again_to_all_threads(tmp_path):
    """And states go on from what was stored, each in the process that has it now."""
    before = run_together(2, lambda rank, group: use_shards(tmp_path, rank, group, "run"))
    paid = Ledger(tmp_path / "0.jsonl").entries()

    def resume(rank, group):
        gate = make_gate(tmp_path, rank, group, "run")
        gate.split_into_shards(SHARDS, make_states())
        states = gather_states(gate, group)
        answers = [
            gate.sum_over_shards(SUM, lambda state: state["it"], clip_norm=2.0) for _ in range(2)
        ]
        return answers, states, gate.count_remaining_queries(ROWS)

    after = run_together(3, resume)
    for result in after:
        assert all_equal(before[0][0][2:], result[0])
        assert result[2] == 200 - 24, "rows that were asked before are gone for all"
    assert all(torch.equal(value, after[0][1][name]) for name, value in before[0][1].items())
    assert Ledger(tmp_path / "0.jsonl").entries() == paid


def test_followers_without_a_folder_know_that_the_leader_stores_nothing(tmp_path):
    results = run_together(2, lambda rank, group: use_shards(tmp_path, rank, group))
    assert [result[2] for result in results] == [(200 - 24, 1)] * 2
    assert not list(tmp_path.glob("*.vault*"))


def test_a_query_that_fails_in_one_process_closes_the_gate_of_all(tmp_path):
    def fail(images, labels, state):
        raise ValueError("secret 0.123")

    gates = [None, None]

    def work(rank, group):
        gate = gates[rank] = make_gate(tmp_path, rank, group)
        gate.split_into_shards(SHARDS, make_states())
        gate.update_shards(fail if rank else lambda images, labels, state: state)

    errors = run_together(2, work)
    assert all(isinstance(error, QueryError) for error in errors)
    assert "of another process" in str(errors[0])
    assert not any("0.123" in str(error) for error in errors)
    for gate in gates:
        with pytest.raises(PlanError, match="no stage"):
            gate.sum_over_shards(SUM, lambda state: state["it"], clip_norm=1.0)


@pytest.mark.parametrize(
    ("shards", "records", "words"), [(1, 11, "Start fewer"), (SHARDS, 12, "the same records")]
)
def test_what_does_not_fit_is_refused_by_all_threads(tmp_path, shards, records, words):
    def work(rank, group):
        gate = make_gate(tmp_path, rank, group, records=records if rank else 11)
        gate.split_into_shards(shards, {"it": torch.zeros(shards)})

    errors = run_together(2, work)
    assert all(isinstance(error, PrivotError) and words in str(error) for error in errors)


def test_as_many_shards_as_processes_are_enough(tmp_path):
    def work(rank, group):
        gate = make_gate(tmp_path, rank, group)
        gate.split_into_shards(3, {"it": torch.arange(3.0)})
        return gate._shards[1]["it"].tolist()

    assert run_together(3, work) == [[0.0], [1.0], [2.0]]
