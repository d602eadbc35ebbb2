"""Updates of critics on buffers that stay, and as CUDA graphs where there is a GPU: the same states to the bit."""

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


def make_gate(ledger, cuda_graphs, device="cpu"):
    images = np.random.default_rng(0).random((SHARDS * 7, *SHAPE), np.float32)
    labels = np.arange(len(images)) // SHARDS % CLASSES
    return Gate(
        Sensitive(images, labels, Spec(SHAPE, CLASSES)),
        Plan((Stage("sum_over_shards", "sum_over_shards", 0.0, 1),), Neighbours.REPLACE),
        ledger,
        Budget(math.inf),
        runtime=Runtime(device, microbatch_size=16, cuda_graphs=cuda_graphs),
    )


def train(gate, turns=WARMUP_CALLS + 4):
    """States after so many updates, each with other fakes and for other critics."""
    device = gate._device
    rng = torch.Generator(device).manual_seed(1)
    team = ShardedCritics(gate, torch.Generator().manual_seed(0), rng, SHARDS, 2, 4, 1e-3, 1.0)
    team.initialize(2, ignore_progress)
    for turn in range(turns):
        shards = (2 * turn + torch.arange(5)) % SHARDS  # in chunks of 4 and 1
        fakes = torch.rand(CLASSES, 3, *SHAPE, generator=rng, device=device)
        team.train(fakes, shards, 2, 10 + turn)
    return {name: value.clone() for name, value in gate._shards[1].items()}


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU here: a captured update has nothing to be compared with",
)
def test_a_captured_update_changes_no_state(ledger):
    gate = make_gate(ledger, True, "cuda")
    assert same(train(make_gate(ledger, False, "cuda")), train(gate))
    assert any(graph._graph is not None for graph in gate._graph_cache._graphs.values())


def test_buffers_change_no_state_and_a_new_split_forgets_the_old_one(ledger):
    gate = make_gate(ledger, False)
    assert gate._graph_cache is None
    plain = train(gate)
    assert plain["adam_mean"].any()
    gate = make_gate(ledger, True)
    assert same(train(gate), plain)
    old = gate._graph_cache
    assert same(train(gate), plain)
    assert gate._graph_cache is not old


def test_updates_are_distinguished_by_shapes_and_numbers_and_are_not_many():
    calls = []
    cache = GraphCache(torch.device("cpu"))

    def update(x, factor):
        calls.append((x.tolist(), factor))
        return True

    for size in range(1, MAX_GRAPHS + 3):
        for factor in (1.0, 2.0):
            assert cache(update, "it", torch.full((size,), factor), factor)
            assert calls[-1] == ([factor] * size, factor)
    assert len(cache._graphs) == MAX_GRAPHS
    assert cache(update, "it", torch.ones(1), [3])  # lists cannot be compared for good
    assert len(cache._graphs) == MAX_GRAPHS


def test_what_cannot_be_captured_is_done_the_plain_way(monkeypatch):
    """As if on a GPU whose capture fails: every update is done once, neither lost nor doubled."""

    class Graph:
        def replay(self):
            raise AssertionError

    def capture(*args, **more):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs.torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda_graphs.torch.cuda, "graph", capture)
    monkeypatch.setattr(cuda_graphs.torch.cuda, "graph_pool_handle", lambda: None)
    total = torch.zeros(())
    cache = GraphCache(torch.device("cuda"))
    for turn in range(WARMUP_CALLS + 5):
        cache(total.add_, "it", torch.tensor(1.0))
        assert total == turn + 1


def test_an_update_that_fails_or_does_not_fit_is_refused(ledger):
    def fail(images, labels, state):
        raise ValueError("secret 0.123")

    for update, words in (
        (lambda images, labels, state: {"it": images.sum()}, "names and shapes"),
        (fail, "with ValueError"),
    ):
        gate = make_gate(ledger, True)
        gate.split_into_shards(SHARDS, {"it": torch.zeros(SHARDS, 3)})
        with pytest.raises(QueryError, match=words) as caught:
            gate.update_shards(update)
    assert "0.123" not in str(caught.value)
    assert caught.value.__context__ is None
