"""Several processes as threads of this one: what a process tells, deals and adds up, where a changed gate can be watched."""

import threading

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

SHARDS = 5
SIZE = 2
PLAN = FreePlan(
    (
        Stage("query_random_shards", "query_random_shards", 0.7, 200, Shards(SHARDS)),
        Stage("sum_over_shards", "sum_over_shards", 0.7, 3),
    ),
    Neighbours.REPLACE,
)


class Wires:
    """What `Several` asks of torch.distributed, between threads."""

    class ReduceOp:
        MAX = "max"

    def __init__(self, count):
        self._gate = threading.Barrier(count, timeout=20)
        self._there = [None] * count
        self._own = threading.local()

    def sit(self, rank):
        self._own.rank = rank

    def _all(self, value):
        self._there[self._own.rank] = value
        self._gate.wait()
        seen = list(self._there)
        self._gate.wait()
        return seen

    def broadcast(self, value, source):
        seen = self._all(value.clone())
        value.copy_(seen[source])

    def scatter(self, here, hands, source):
        here.copy_(self._all(hands)[source][self._own.rank])

    def gather(self, here, hands, goal):
        seen = self._all(here.clone())
        for place, value in zip(hands or [], seen, strict=False):
            place.copy_(value)

    def reduce(self, part, goal):
        seen = self._all(part.clone())
        if self._own.rank == goal:
            part.copy_(sum(seen))

    def all_reduce(self, worst, kind):
        assert kind == "max"
        worst.copy_(torch.stack(self._all(worst.clone())).max())


def box_of(count):
    images = np.random.default_rng(1).random((count, 1, 2, 2), np.float32)
    return Sensitive(images, np.arange(count) % 2, Spec((1, 2, 2), 2))


def together(count, deed):
    """``deed(rank, ranks)`` in so many threads: what each gives back, or the error that it ends with."""
    wires = Wires(count)
    found = [None] * count

    def one(rank):
        wires.sit(rank)
        ranks = ProcessGroup(rank, count, False)
        ranks._distributed = wires
        try:
            found[rank] = deed(rank, ranks)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return found


def gate_for(folder, rank, ranks, run=None, records=SHARDS * SIZE + 1):
    """With the leader's seed alone: a follower's noise would not be the leader's."""
    own = folder / run if run and not rank else None
    return Gate(
        box_of(records),
        PLAN,
        Ledger(folder / f"{rank}.jsonl"),
        NullLedger(),
        runtime=Runtime("cpu", 7),
        insecure_seed=rank,
        process_group=ranks,
        folder=own,
    )


def start():
    return {"it": torch.arange(SHARDS * 4.0).view(SHARDS, 4), "seen": torch.zeros(SHARDS)}


def learn(images, labels, state, step):
    return {"it": state["it"] + step * images.flatten(1).mean(0), "seen": state["seen"] + 1}


def tell(state, row):
    return state["it"] * row


def worked(folder, rank, ranks, run=None):
    """All verbs of shards, once or more; what is public of it, and what each has learned, at the leader."""
    gate = gate_for(folder, rank, ranks, run)
    gate.split_into_shards(SHARDS, start())
    gate.update_shards(learn, torch.tensor(1.0 + rank))  # a public number is the leader's
    gate.update_shards(learn, torch.tensor(2.0), shard_indices=torch.tensor([1, 4, 3]))
    gate.update_shards(
        learn, torch.tensor(3.0), shard_indices=torch.tensor([3])
    )  # some have nothing to do
    rows = torch.linspace(1, 2, 12) + rank
    public = [
        gate.query_random_shards("query_random_shards", tell, rows, clip_norm=5.0) for _ in range(2)
    ]
    public += [
        gate.sum_over_shards(
            "sum_over_shards",
            lambda state, factor: state["it"] * factor,
            torch.tensor(0.1 + rank),
            clip_norm=2.0,
        )
        for _ in range(2)
    ]
    gate.save_shard_states()
    states = {name: ranks.gather(value, SHARDS) for name, value in gate._shards[1].items()}
    return (
        public,
        states,
        (
            gate.count_remaining_queries("query_random_shards"),
            gate.count_remaining_queries("sum_over_shards"),
        ),
    )


@pytest.mark.parametrize("count", [2, 3])
def test_threads_that_share_the_shards_give_the_answers_of_one(tmp_path, count):
    alone, states, left = worked(tmp_path, 0, SingleProcess())
    (tmp_path / "here").mkdir()
    found = together(count, lambda rank, ranks: worked(tmp_path / "here", rank, ranks, "run"))
    assert left == (200 - 24, 1)
    for each in found:
        assert all(torch.equal(here, there) for here, there in zip(alone, each[0], strict=True)), (
            "everyone has the leader's answers"
        )
        assert each[2] == left
    assert all(torch.equal(value, found[0][1][name]) for name, value in states.items())
    assert states["seen"].tolist() == [1, 2, 1, 3, 2]
    written = sorted(
        path.name
        for path in (tmp_path / "here").iterdir()
        if path.is_file() and not path.name.endswith(".lock")
    )
    secret = ["0.jsonl.vault0-order.safetensors", "0.jsonl.vault0.safetensors"]
    assert written == ["0.jsonl", "0.jsonl.head", *secret], "the leader alone pays and stores"


def test_what_was_kept_comes_again_to_all_threads(tmp_path):
    """And states go on from what was stored, each in the process that has it now."""
    before = together(2, lambda rank, ranks: worked(tmp_path, rank, ranks, "run"))
    paid = Ledger(tmp_path / "0.jsonl").entries()

    def go_on(rank, ranks):
        gate = gate_for(tmp_path, rank, ranks, "run")
        gate.split_into_shards(SHARDS, start())
        states = {name: ranks.gather(value, SHARDS) for name, value in gate._shards[1].items()}
        return (
            [
                gate.sum_over_shards("sum_over_shards", lambda state: state["it"], clip_norm=2.0)
                for _ in range(2)
            ],
            states,
            gate.count_remaining_queries("query_random_shards"),
        )

    after = together(3, go_on)
    for each in after:
        assert all(
            torch.equal(here, there) for here, there in zip(before[0][0][2:], each[0], strict=True)
        )
        assert each[2] == 200 - 24, "rows that were asked before are gone for all"
    assert all(torch.equal(value, after[0][1][name]) for name, value in before[0][1].items())
    assert Ledger(tmp_path / "0.jsonl").entries() == paid


def test_followers_without_a_folder_know_that_the_leader_stores_nothing(tmp_path):
    assert [each[2] for each in together(2, lambda rank, ranks: worked(tmp_path, rank, ranks))] == [
        (200 - 24, 1)
    ] * 2
    assert not list(tmp_path.glob("*.vault*"))


def test_one_that_fails_ends_it_for_all(tmp_path):
    def failing(images, labels, state):
        raise ValueError("secret 0.123")

    gates = [None, None]

    def deed(rank, ranks):
        gate = gates[rank] = gate_for(tmp_path, rank, ranks)
        gate.split_into_shards(SHARDS, start())
        gate.update_shards(failing if rank else lambda images, labels, state: state)

    found = together(2, deed)
    assert all(isinstance(each, QueryError) for each in found)
    assert "of another process" in str(found[0])
    assert not any("0.123" in str(each) for each in found)
    for gate in gates:
        with pytest.raises(PlanError, match="no stage"):
            gate.sum_over_shards("sum_over_shards", lambda state: state["it"], clip_norm=1.0)


@pytest.mark.parametrize(
    ("shards", "records", "said"), [(1, 11, "Start fewer"), (SHARDS, 12, "the same records")]
)
def test_what_does_not_fit_is_refused_by_all_threads(tmp_path, shards, records, said):
    def deed(rank, ranks):
        here = records if rank else 11
        gate_for(tmp_path, rank, ranks, records=here).split_into_shards(
            shards, {"it": torch.zeros(shards)}
        )

    found = together(2, deed)
    assert all(isinstance(each, PrivotError) and said in str(each) for each in found)


def test_as_many_shards_as_processes_are_enough(tmp_path):
    def deed(rank, ranks):
        gate = gate_for(tmp_path, rank, ranks)
        gate.split_into_shards(3, {"it": torch.arange(3.0)})
        return gate._shards[1]["it"].tolist()

    assert together(3, deed) == [[0.0], [1.0], [2.0]]
