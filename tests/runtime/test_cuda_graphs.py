"""Lessons on buffers that stay, and as CUDA graphs where there is a GPU: the same states to the bit."""

import math

import numpy as np
import pytest
import torch

from privot.components.sharded_critics import ShardedCritics
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import QueryError
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.plan import Budget, Plan, Stage
from privot.runtime import Runtime, cuda_graphs, ignore_progress
from privot.runtime.cuda_graphs import MAX_GRAPHS, WARMUP_CALLS, GraphCache

pytestmark = pytest.mark.usefixtures("one_thread", "array_order")

SHAPE = (1, 8, 8)
CLASSES = 2
SHARDS = 6


def gate_for(ledger, compile, device="cpu"):
    images = np.random.default_rng(0).random((SHARDS * 7, *SHAPE), np.float32)
    box = Sensitive(images, np.arange(len(images)) // SHARDS % CLASSES, Spec(SHAPE, CLASSES))
    plan = Plan((Stage("sum_over_shards", "sum_over_shards", 0.0, 1),), Neighbours.REPLACE)
    return Gate(
        box,
        plan,
        ledger,
        Budget(math.inf),
        runtime=Runtime(device, microbatch_size=16, cuda_graphs=compile),
    )


def lessons(gate, turns=WARMUP_CALLS + 4):
    """States after so many lessons, each with other fakes and for other critics."""
    device = gate._device
    draws = torch.Generator(device).manual_seed(1)
    team = ShardedCritics(gate, torch.Generator().manual_seed(0), draws, SHARDS, 2, 4, 1e-3, 1.0)
    team.initialize(2, ignore_progress)
    for turn in range(turns):
        some = (2 * turn + torch.arange(5)) % SHARDS  # in portions of 4 and 1
        team.train(
            torch.rand(CLASSES, 3, *SHAPE, generator=draws, device=device), some, 2, 10 + turn
        )
    return {name: value.clone() for name, value in gate._shards[1].items()}


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_buffers_change_no_state(ledger):
    plain, kept = (lessons(gate_for(ledger, way)) for way in (False, True))
    assert same(plain, kept)
    assert plain["adam_mean"].any()


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: a captured lesson has nothing to be compared with",
)
def test_a_captured_lesson_changes_no_state(ledger):
    gate = gate_for(ledger, True, "cuda")
    assert same(lessons(gate_for(ledger, False, "cuda")), lessons(gate))
    assert any(each._graph is not None for each in gate._graph_cache._graphs.values())


def test_off_unless_asked_for(ledger):
    assert gate_for(ledger, False)._graph_cache is None
    assert not Runtime("cpu").cuda_graphs


def test_a_new_split_forgets_the_old_one(ledger):
    gate = gate_for(ledger, True)
    lessons(gate)
    old = gate._graph_cache
    assert same(lessons(gate), lessons(gate_for(ledger, False)))
    assert gate._graph_cache is not old


def test_kinds_are_told_apart_by_shapes_and_numbers_and_are_not_many():
    seen = []
    again = GraphCache(torch.device("cpu"))

    def lesson(x, factor):
        seen.append((x.clone(), factor))
        return True

    for size in range(1, MAX_GRAPHS + 3):
        for factor in (1.0, 2.0):
            assert again(lesson, "it", torch.full((size,), factor), factor)
            assert seen[-1][0].tolist() == [factor] * size
            assert seen[-1][1] == factor
    assert len(again._graphs) == MAX_GRAPHS
    assert again(lesson, "it", torch.ones(1), [3])  # lists cannot be compared for good
    assert len(again._graphs) == MAX_GRAPHS


def test_what_cannot_be_captured_is_done_the_plain_way(monkeypatch):
    """As if on a GPU whose capture fails: every lesson is done once, neither lost nor doubled."""

    class Graph:
        def replay(self):
            raise AssertionError

    def capture(*args, **more):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs.torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda_graphs.torch.cuda, "graph", capture)
    monkeypatch.setattr(cuda_graphs.torch.cuda, "graph_pool_handle", lambda: None)
    total = torch.zeros(())
    again = GraphCache(torch.device("cuda"))
    for turn in range(WARMUP_CALLS + 5):
        again(total.add_, "it", torch.tensor(1.0))
        assert total == turn + 1


def test_a_lesson_that_fails_or_does_not_fit_is_refused(ledger):
    gate = gate_for(ledger, True)
    gate.split_into_shards(SHARDS, {"it": torch.zeros(SHARDS, 3)})
    with pytest.raises(QueryError, match="names and shapes"):
        gate.update_shards(lambda images, labels, state: {"it": images.sum()})

    def fails(images, labels, state):
        raise ValueError("secret 0.123")

    gate = gate_for(ledger, True)  # the other is closed
    gate.split_into_shards(SHARDS, {"it": torch.zeros(SHARDS, 3)})
    with pytest.raises(QueryError, match="with ValueError") as caught:
        gate.update_shards(fails)
    assert "0.123" not in str(caught.value)
    assert caught.value.__context__ is None
