"""Shards: what is learned from one stays its own, what comes out is counted row by row, and a crash can only over-charge."""

import itertools
import math
import stat

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import BudgetError, LedgerError, PlanError, QueryError, ReleaseError
from privot.io import partial_path
from privot.privacy.accounting import Neighbours
from privot.privacy.answers import MARKS_PER_STAGE, MAX_STORED_RESULTS
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import Shards
from privot.runtime import Runtime

pytestmark = pytest.mark.usefixtures("array_order")

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
# 4 shards of 3 records, and 2 records left over
SHARDS = 4
SIZE = 3
OVER = 2
COUNT = SHARDS * SIZE + OVER
SHAPE = (1, 2, 2)
DIM = 4
SPEC = Spec(SHAPE, 2, COUNT)


def box_of(images):
    return Sensitive(images, np.arange(COUNT) % 2, SPEC)


@pytest.fixture
def images():
    return np.random.default_rng(0).random((COUNT, *SHAPE), np.float32)


@pytest.fixture
def box(images):
    return box_of(images)


def door(
    box, ledger, steps=10**6, noise=0.0, shards=SHARDS, polls=MAX_STORED_RESULTS, wall=None, **more
):
    """A gate with one stage of routes and one of polls, without noise unless told."""
    stages = (
        Stage("query_random_shards", "query_random_shards", noise, steps, Shards(shards)),
        Stage("sum_over_shards", "sum_over_shards", noise or 0.0, polls),
    )
    return Gate(
        box, Plan(stages, REPLACE), ledger, wall or Budget(math.inf), runtime=Runtime("cpu"), **more
    )


def zeros(count=SHARDS, dim=DIM):
    return {"it": torch.zeros(count, dim)}


def learn(images, labels, state):
    return {"it": state["it"] + images.flatten(1).mean(0)}


def tell(state, row):
    return state["it"] + row


def ask(gate, rows=1, query=tell, bound=99.0):
    return gate.query_random_shards(
        "query_random_shards", query, torch.zeros(rows), clip_norm=bound
    )


def kinds(ledger):
    return [each["kind"] for each in ledger.entries()]


def marks(ledger):
    return [
        (each["first"], each["last"])
        for each in ledger.entries()
        if each["kind"] == "ask" and each["stage"] == "query_random_shards"
    ]


# Which record lies where


def states(gate):
    return gate._shards[1]


def test_record_i_lies_in_shard_i_mod_count_and_the_rest_in_none(images, ledger):
    gate = door(box_of(images), ledger)
    gate.split_into_shards(
        SHARDS,
        {
            "seen": torch.zeros(SHARDS, SIZE, *SHAPE),
            "labels": torch.zeros(SHARDS, SIZE, dtype=torch.int64),
        },
    )
    gate.update_shards(lambda images, labels, state: {"seen": images, "labels": labels})
    for shard in range(SHARDS):
        own = torch.arange(shard, SHARDS * SIZE, SHARDS)
        assert torch.equal(states(gate)["seen"][shard], torch.from_numpy(images)[own])
        assert torch.equal(states(gate)["labels"][shard], own % 2)


@pytest.mark.parametrize("where", range(SHARDS * SIZE, COUNT))
def test_records_left_over_are_never_read(images, ledger, monkeypatch, where):
    read = []
    take = Sensitive._read_records
    monkeypatch.setattr(
        Sensitive,
        "_read_records",
        lambda self, which, *more: (read.append(which), take(self, which, *more))[1],
    )
    gate = door(box_of(images), ledger)
    gate.split_into_shards(SHARDS, zeros())
    gate.update_shards(learn)
    ask(gate, 5)
    assert len(read) == 1  # once, and into the shards
    assert sorted(read[0].tolist()) == list(range(SHARDS * SIZE))
    assert where not in read[0]


# One shard's state is its own


def normalised(images, labels, state):
    """A batch norm in a critic: the batch is this shard."""
    return {
        "it": torch.nn.functional.batch_norm(images, None, None, training=True).flatten(1).sum(0)
    }


def all_together(images, labels, state):
    """Sums, sorts and softmaxes over every axis there is."""
    return {
        "it": torch.softmax(images.flatten().sort().values, 0)[:DIM] * images.sum() + labels.sum()
    }


def descended(images, labels, state):
    """A gradient step."""

    def loss(weights):
        return torch.nn.functional.softplus(images.flatten(1) @ weights).sum()

    return {"it": state["it"] - 0.1 * torch.func.grad(loss)(state["it"])}


def exploded(images, labels, state):
    """Too large for float32, or NaN, or neither, by the records."""
    return {"it": images.flatten(1).sum(0) * 1e37 / images.amin() - state["it"]}


LEARNERS = [learn, normalised, all_together, descended, exploded]


def bits(value):
    """NaN equals itself here."""
    return value.contiguous().view(torch.int32)


def states_that_moved(ledger, query, trials=30):
    """For each pair of data sets that differ in one record: whether any state but that of its shard moved, and whether that one did."""
    rng = np.random.default_rng(3)
    others = 0
    own = 0
    for turn in range(trials):
        images = rng.random((COUNT, *SHAPE), np.float32)
        changed = images.copy()
        where = int(rng.integers(SHARDS * SIZE))
        changed[where] = (rng.random(SHAPE), 1, 0, np.nextafter(np.float32(0), np.float32(1)))[
            turn % 4
        ]
        found = []
        for each in (images, changed):
            gate = door(box_of(each), ledger)
            gate.split_into_shards(SHARDS, zeros())
            gate.update_shards(query)
            gate.update_shards(
                query, shard_indices=torch.tensor([where % SHARDS, (where + 1) % SHARDS])
            )
            found.append(bits(states(gate)["it"]))
        moved = (found[0] != found[1]).any(1)
        own += bool(moved[where % SHARDS])
        moved[where % SHARDS] = False
        others += bool(moved.any())
    return others, own


@pytest.mark.parametrize("query", LEARNERS)
def test_a_record_changes_the_state_of_its_shard_alone(ledger, query):
    others, own = states_that_moved(ledger, query)
    assert others == 0
    assert own > 10


def test_planted_mixing_is_caught(monkeypatch, ledger):
    """A gate that ran the query on all shards at once would let a batch norm reach across them."""

    def whole(query, in_dims=0, chunk_size=None):
        def run(images, labels, state):
            flat = torch.nn.functional.batch_norm(images.flatten(0, 1), None, None, training=True)
            return {"it": flat.view(len(images), -1, DIM).sum(1)}

        return run

    monkeypatch.setattr(torch.func, "vmap", whole)
    assert states_that_moved(ledger, normalised, 8)[0] > 0


@pytest.mark.parametrize(
    "query",
    [
        lambda images, labels, state: {
            "it": images[:, None].expand(SHARDS, SIZE, *SHAPE).mean((0, 1)).flatten()
        },
        lambda images, labels, state: {
            "it": images.view(SHARDS, SIZE, *SHAPE).mean((0, 1)).flatten()
        },
        lambda images, labels, state: {"it": torch.zeros(SHARDS, DIM)},
        lambda images, labels, state: {
            "it": images.mean()
        },  # of 4 shards, and 4 is also the length of a state: broadcast, it would mix them
        lambda images, labels, state: {"it": images.flatten(1).mean(0)[:1]},
    ],
)
def test_there_is_no_axis_of_shards_in_a_query(box, ledger, query):
    """One that thinks there is fails, or sees one shard's numbers in another order."""
    gate = door(box, ledger)
    gate.split_into_shards(SHARDS, zeros())
    with pytest.raises((QueryError, RuntimeError)):
        gate.update_shards(query)


def test_some_are_updated_and_the_others_stay(images, ledger):
    gate = door(box_of(images), ledger)
    gate.split_into_shards(SHARDS, zeros())
    gate.update_shards(learn, shard_indices=torch.tensor([2, 0]))
    means = torch.from_numpy(images[: SHARDS * SIZE]).view(SIZE, SHARDS, DIM).mean(0)
    assert torch.allclose(states(gate)["it"][[0, 2]], means[[0, 2]])
    assert torch.equal(states(gate)["it"][[1, 3]], torch.zeros(2, DIM))
    gate.update_shards(learn, shard_indices=torch.tensor([], dtype=torch.int64))
    assert torch.equal(states(gate)["it"][[1, 3]], torch.zeros(2, DIM))


@pytest.mark.parametrize("portion", [1, 4, 7, 1000])
def test_portions_change_no_state(images, ledger, portion):
    """Shards go through a query a few at a time, by the room there is."""
    gate = door(box_of(images), ledger)
    calls = []
    gate._chunk_size = portion
    gate.split_into_shards(SHARDS, zeros())
    gate.update_shards(lambda *of: (calls.append(1), learn(*of))[1])
    assert len(calls) == math.ceil(SHARDS / max(1, portion // SIZE))
    assert torch.allclose(
        states(gate)["it"],
        torch.from_numpy(images[: SHARDS * SIZE]).view(SIZE, SHARDS, DIM).mean(0),
    )
    gate._rng = SecretRandom(7)
    assert torch.allclose(
        ask(gate, 9),
        states(gate)["it"][Shards(SHARDS).draw(9, SecretRandom(7))].double(),
        atol=1e-4,
    )


def test_public_arguments_and_states_are_the_caller_s_own(box, ledger):
    """What the caller handed in does not change with the secret."""
    gate = door(box, ledger)
    given = zeros()
    gate.split_into_shards(SHARDS, given)
    assert (
        gate.update_shards(
            lambda images, labels, state, factor: {"it": images.flatten(1).sum(0) * factor},
            torch.tensor(2.0),
        )
        is None
    )
    assert torch.equal(given["it"], zeros()["it"])
    assert (states(gate)["it"] > 0).all()


def test_answers_carry_no_graph(box, ledger):
    gate = door(box, ledger)
    gate.split_into_shards(SHARDS, {"it": torch.zeros(SHARDS, DIM, requires_grad=True)})
    factor = torch.ones(3, requires_grad=True)
    gate.update_shards(
        lambda images, labels, state, factor: {"it": state["it"] + factor.sum()}, factor
    )
    assert not states(gate)["it"].requires_grad
    assert not gate.query_random_shards(
        "query_random_shards", lambda state, row: state["it"] * row, factor, clip_norm=9.0
    ).requires_grad
    assert not gate.sum_over_shards(
        "sum_over_shards", lambda state, factor: state["it"] * factor.sum(), factor, clip_norm=9.0
    ).requires_grad


# What comes out


def worst_states(rng):
    """Two states of one shard, as far from each other as anything can be."""
    ends = [
        torch.full((DIM,), value)
        for value in (0.0, 1e-30, 1.0, -1.0, 3e38, -3e38, math.inf, -math.inf, math.nan)
    ]
    mixed = [torch.tensor([math.nan, 1.0, 0.0, 0.0]), torch.tensor([math.inf, -math.inf, 1.0, 0.0])]
    yield from itertools.product(
        [*ends, *mixed, torch.from_numpy(rng.normal(size=DIM)).float()], repeat=2
    )


@pytest.mark.parametrize("bound", [1e-3, 1.0, 50.0])
def test_any_two_states_of_one_shard_stay_within_the_bound(box, ledger, bound):
    """Every row that drew the shard moves by at most 2 bound, no other moves at all; a sum over shards moves by at most 2 bound."""
    rng = np.random.default_rng(0)
    gate = door(box, ledger, polls=10**6)
    gate.split_into_shards(SHARDS, {"it": torch.from_numpy(rng.normal(size=(SHARDS, DIM))).float()})
    rows = 24
    shard = 1
    reached = 0.0
    drew = Shards(SHARDS).draw(rows, SecretRandom(7)) == shard
    assert 0 < drew.sum() < rows
    for pair in worst_states(rng):
        routed = []
        polled = []
        for state in pair:
            states(gate)["it"][shard] = state
            gate._rng = SecretRandom(7)  # the same draws
            routed.append(ask(gate, rows, bound=bound))
            polled.append(
                gate.sum_over_shards("sum_over_shards", lambda state: state["it"], clip_norm=bound)
            )
        moved = (routed[0] - routed[1]).norm(dim=1)
        assert moved.max() <= 2 * bound
        assert (moved[~drew] == 0).all()
        assert (polled[0] - polled[1]).norm() <= 2 * bound * (1 + 1e-12)
        reached = max(reached, float(moved.max()) / (2 * bound))
    assert reached > 0.999


def test_poll_adds_up_all_shards(images, ledger):
    gate = door(box_of(images), ledger)
    gate.split_into_shards(SHARDS, zeros())
    gate.update_shards(learn)
    parts = torch.from_numpy(images[: SHARDS * SIZE]).view(SIZE, SHARDS, DIM).mean(0).double()
    assert torch.allclose(
        gate.sum_over_shards(
            "sum_over_shards", lambda state, factor: state["it"] * factor, 2.0, clip_norm=99.0
        ),
        2 * parts.sum(0),
        atol=1e-4,
    )
    short = parts * (0.5 / parts.norm(dim=1, keepdim=True)).clamp(max=1)
    assert torch.allclose(
        gate.sum_over_shards("sum_over_shards", lambda state: state["it"], clip_norm=0.5),
        short.sum(0),
        atol=1e-5,
    )


def test_rows_and_shapes(box, ledger):
    gate = door(box, ledger)
    gate.split_into_shards(SHARDS, {"own": torch.arange(4.0), "net": torch.ones(SHARDS, 3, DIM)})
    points = torch.rand(7, DIM)
    found = gate.query_random_shards(
        "query_random_shards",
        lambda state, point, factor: state["net"] @ point * factor,
        points,
        torch.arange(7.0),
        clip_norm=99.0,
    )
    assert found.shape == (7, 3)
    assert torch.allclose(
        found, (points.sum(1) * torch.arange(7.0))[:, None].expand(7, 3).double(), atol=1e-4
    )
    assert gate.query_random_shards(
        "query_random_shards", lambda state, row: state["own"].sum(), torch.zeros(2), clip_norm=9.0
    ).shape == (2,)
    assert (
        gate.sum_over_shards("sum_over_shards", lambda state: state["own"], clip_norm=9.0).item()
        == 6.0
    )


# Refused


def nothing_charged(ledger):
    return ledger.entries() == []


@pytest.mark.parametrize("relation", [ADD_REMOVE, LOCAL])
def test_shards_are_for_replaced_records_only(box, ledger, relation):
    """Where records come and go, one of them would move all that follow to another shard."""
    stage = Stage("it", "rows" if relation is LOCAL else "sum", 0.0)
    gate = Gate(box, Plan((stage,), relation), ledger, Budget(math.inf))
    with pytest.raises(PlanError, match="no proof"):
        gate.split_into_shards(SHARDS, zeros())
    assert nothing_charged(ledger)


@pytest.mark.parametrize(
    ("count", "given"), [(0, 0), (-1, 1), (COUNT + 1, COUNT + 1), (4, 3), (3, 4), (4, 5)]
)
def test_a_wrong_count_is_refused(box, ledger, count, given):
    with pytest.raises(PlanError, match="a state each"):
        door(box, ledger).split_into_shards(count, zeros(given))
    assert nothing_charged(ledger)


def test_before_the_split_there_is_nothing(box, ledger):
    gate = door(box, ledger)
    for verb in (
        lambda: ask(gate),
        lambda: gate.sum_over_shards("sum_over_shards", learn, clip_norm=1.0),
        lambda: gate.update_shards(learn),
        gate.save_shard_states,
    ):
        with pytest.raises(PlanError, match="not split"):
            verb()
    gate.delete_shard_states()  # nothing to forget, and no ticket to look for it
    assert nothing_charged(ledger)


def test_the_stage_must_be_for_as_many_shards(box, ledger):
    """Otherwise 4 shards would be answered for at the price of 1 in 1000."""
    gate = door(box, ledger, shards=1000)
    gate.split_into_shards(SHARDS, zeros())
    with pytest.raises(PlanError, match="another number of shards"):
        ask(gate)
    assert kinds(ledger) == ["reserve"]


@pytest.mark.parametrize(("taken", "rows"), [(0, 0), (0, 11), (7, 4), (10, 1), (10, 0)])
def test_no_more_rows_than_are_left(box, ledger, taken, rows):
    gate = door(box, ledger, steps=10)
    gate.split_into_shards(SHARDS, zeros())
    if taken:
        ask(gate, taken)
    lines = ledger.entries()
    with pytest.raises(BudgetError, match="used up"):
        ask(gate, rows)
    assert ledger.entries() == lines
    assert gate.count_remaining_queries("query_random_shards") == 10 - taken


def test_other_verbs_cannot_use_the_stage(box, ledger):
    gate = door(box, ledger)
    gate.split_into_shards(SHARDS, zeros())
    with pytest.raises(PlanError, match="of sum_over_shards"):
        gate.sum_over_shards("query_random_shards", lambda state: state["it"], clip_norm=1.0)
    with pytest.raises(PlanError, match="of query_random_shards"):
        gate.query_random_shards("sum_over_shards", tell, torch.zeros(1), clip_norm=1.0)


@pytest.mark.parametrize("bound", [0.0, math.inf, math.nan])
def test_bounds_are_checked(box, ledger, bound):
    gate = door(box, ledger)
    gate.split_into_shards(SHARDS, zeros())
    with pytest.raises(PlanError, match="bound"):
        ask(gate, bound=bound)
    with pytest.raises(PlanError, match="bound"):
        gate.sum_over_shards("sum_over_shards", lambda state: state["it"], clip_norm=bound)
    assert kinds(ledger) == ["reserve"]


def test_a_query_that_draws_is_refused(box, ledger):
    gate = door(box, ledger)
    gate.split_into_shards(SHARDS, zeros())
    with pytest.raises(QueryError, match="RuntimeError"):
        gate.update_shards(lambda images, labels, state: {"it": torch.randn(DIM)})


@pytest.mark.parametrize("verb", ["update", "query_random_shards", "sum_over_shards"])
def test_errors_do_not_speak_and_close_the_gate(box, ledger, verb):
    def fails(*args):
        raise ValueError("secret 0.123")

    gate = door(box, ledger)
    gate.split_into_shards(SHARDS, zeros())
    with pytest.raises(QueryError, match="with ValueError") as caught:
        gate.update_shards(fails) if verb == "update" else ask(
            gate, query=fails
        ) if verb == "query_random_shards" else gate.sum_over_shards(
            "sum_over_shards", fails, clip_norm=1.0
        )
    assert "0.123" not in str(caught.value)
    assert caught.value.__context__ is None
    with pytest.raises(PlanError):
        ask(gate)


# Counting


def test_a_call_uses_up_as_many_answers_as_it_has_rows(box, ledger):
    gate = door(box, ledger, steps=100)
    gate.split_into_shards(SHARDS, zeros())
    for rows, left in ((1, 99), (30, 69), (5, 64), (64, 0)):
        assert ask(gate, rows).shape == (rows, DIM)
        assert gate.count_remaining_queries("query_random_shards") == left
    assert gate.count_remaining_queries("sum_over_shards") == MAX_STORED_RESULTS
    assert marks(ledger) == [(0, 0), (1, 30), (31, 35), (36, 99)]


@pytest.mark.parametrize("steps", [MAX_STORED_RESULTS, 100, 7 * MARKS_PER_STAGE + 3])
def test_marks_cover_the_rows_before_a_state_is_read(box, ledger, steps):
    """Whatever the stride and the number of rows: when the query runs, the ledger on disk holds the charge and the marks."""
    gate = door(box, ledger, steps=steps)
    gaps = []
    gate.split_into_shards(SHARDS, zeros())

    def query(state, row):
        gaps.append(
            marks(Ledger(ledger.path))[-1][1]
            + 1
            - (steps - gate.count_remaining_queries("query_random_shards") + rows)
        )
        return state["it"] + row

    for rows in (1, 5, 2, 9, 3, 3, 3, 7):
        ask(gate, rows, query)
    assert min(gaps) >= 0
    covered = marks(ledger)
    assert covered[0][0] == 0
    assert all(
        after[0] == before[1] + 1 for before, after in itertools.pairwise(covered)
    )  # none twice, none left out


def test_the_charge_comes_before_the_split(box, ledger, monkeypatch):
    seen = []
    take = Sensitive._read_records
    monkeypatch.setattr(
        Sensitive,
        "_read_records",
        lambda self, *args: (seen.append(kinds(Ledger(ledger.path))), take(self, *args))[1],
    )
    door(box, ledger).split_into_shards(SHARDS, zeros())
    assert seen == [["reserve"]]


def test_a_crash_in_the_query_has_paid_for_its_rows(box, ledger, tmp_path):
    gate = door(box, ledger, steps=100, folder=tmp_path / "run")
    gate.split_into_shards(SHARDS, zeros())
    ask(gate, 10)

    def dies(state, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(gate, 20, dies)
    again = door(box, ledger, steps=100, folder=tmp_path / "run")
    assert again.count_remaining_queries("query_random_shards") == 70
    again.split_into_shards(SHARDS, zeros())
    ask(again, 70)
    with pytest.raises(BudgetError):
        ask(again)
    assert marks(ledger) == [(0, 9), (10, 29), (30, 99)]
    assert kinds(ledger).count("reserve") == 1


def test_a_short_stage_replays_its_rows(box, ledger, tmp_path):
    first = door(
        box, ledger, steps=MAX_STORED_RESULTS, noise=50.0, wall=Budget(1e9), folder=tmp_path / "run"
    )
    first.split_into_shards(SHARDS, zeros())
    known = [ask(first, 4), ask(first, 2)]
    again = door(
        box, ledger, steps=MAX_STORED_RESULTS, noise=50.0, wall=Budget(1e9), folder=tmp_path / "run"
    )
    again.split_into_shards(SHARDS, zeros())
    lines = ledger.entries()
    assert torch.equal(ask(again, 4), known[0])
    assert torch.equal(ask(again, 2), known[1])
    assert ledger.entries() == lines
    assert not torch.equal(ask(again, 2), known[1])
    assert again.count_remaining_queries("query_random_shards") == MAX_STORED_RESULTS - 8


def test_two_gates_of_one_ticket_never_have_the_same_answer(box, ledger, tmp_path):
    one = door(box, ledger, steps=1000, folder=tmp_path / "run")
    one.split_into_shards(SHARDS, zeros())
    two = door(box, ledger, steps=1000, folder=tmp_path / "run")
    two.split_into_shards(SHARDS, zeros())
    ask(one, 5)
    with pytest.raises(LedgerError, match="no query result is given twice"):
        ask(two, 5)


# What is stored of the secret side


@pytest.fixture
def stored(box, ledger, tmp_path):
    """A run that learned, asked, stored and fell over: (its states, the vault's file)."""
    gate = door(box, ledger, folder=tmp_path / "run")
    gate.split_into_shards(
        SHARDS, {"it": torch.zeros(SHARDS, DIM), "age": torch.zeros(SHARDS, dtype=torch.int64)}
    )
    gate.update_shards(
        lambda images, labels, state: {
            "it": learn(images, labels, state)["it"] / 3,
            "age": state["age"] + labels.sum(),
        }
    )
    ask(gate, 3)
    gate.save_shard_states()
    (file,) = ledger.path.parent.glob("*.vault*")
    return {name: value.clone() for name, value in states(gate).items()}, file


def fresh():
    return {"it": torch.zeros(SHARDS, DIM), "age": torch.zeros(SHARDS, dtype=torch.int64)}


def test_states_come_back_to_the_bit(box, ledger, tmp_path, stored):
    gate = door(box, ledger, folder=tmp_path / "run")
    gate.split_into_shards(SHARDS, fresh())
    assert all(
        torch.equal(bits(states(gate)[name]), bits(value)) for name, value in stored[0].items()
    )
    assert states(gate)["age"].dtype == torch.int64
    assert stored[0]["it"].any()
    assert kinds(ledger).count("reserve") == 1


def test_the_last_store_counts(box, ledger, tmp_path, stored):
    gate = door(box, ledger, folder=tmp_path / "run")
    gate.split_into_shards(SHARDS, fresh())
    gate.update_shards(
        lambda images, labels, state: {"it": state["it"] * math.inf, "age": state["age"] + 1}
    )
    gate.save_shard_states()
    again = door(box, ledger, folder=tmp_path / "run")
    again.split_into_shards(SHARDS, fresh())
    assert torch.equal(states(again)["age"], stored[0]["age"] + 1)
    assert torch.equal(
        bits(states(again)["it"]), bits(stored[0]["it"] * math.inf)
    )  # what exploded comes back as it was


def test_a_failed_update_closes_the_gate(box, ledger):
    """That it failed may say something of the records; a second failure would say more."""

    def fails(images, labels, state):
        raise ValueError("secret")

    gate = door(box, ledger)
    gate.split_into_shards(SHARDS, zeros())
    with pytest.raises(QueryError):
        gate.update_shards(fails)
    for query in (fails, learn):
        with pytest.raises(PlanError, match="closed"):
            gate.update_shards(query)


def test_the_vault_lies_with_the_ledger_for_the_owner_s_eyes(ledger, tmp_path, stored):
    file = stored[1]
    assert file.parent == ledger.path.parent
    assert file.name.startswith(ledger.path.name)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.name for each in (tmp_path / "run").rglob("*")] == ["ticket"]
    assert not list(ledger.path.parent.glob("*.part"))


def test_a_vault_belongs_to_its_ticket(box, ledger, stored):
    """Another run of the same data starts anew."""
    gate = door(box, ledger)
    gate.split_into_shards(SHARDS, fresh())
    assert not states(gate)["it"].any()
    assert kinds(ledger).count("reserve") == 2


def test_forgetting_removes_it(box, ledger, tmp_path, stored):
    gate = door(box, ledger, folder=tmp_path / "run")
    gate.split_into_shards(SHARDS, fresh())
    half = partial_path(stored[1])
    half.write_bytes(b"what a crash in the midst of writing left")
    gate.delete_shard_states()
    assert not stored[1].exists()
    assert not half.exists()
    with pytest.raises(PlanError, match="not split"):
        ask(gate)
    gate.delete_shard_states()
    gate.split_into_shards(SHARDS, fresh())
    assert not states(gate)["it"].any()


def test_a_crash_while_storing_leaves_the_last_whole_one(
    box, ledger, tmp_path, stored, monkeypatch
):
    gate = door(box, ledger, folder=tmp_path / "run")
    gate.split_into_shards(SHARDS, fresh())
    gate.update_shards(lambda images, labels, state: {"it": state["it"] + 1, "age": state["age"]})
    with monkeypatch.context() as patch:
        patch.setattr(
            type(stored[1]), "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            gate.save_shard_states()
    again = door(box, ledger, folder=tmp_path / "run")
    again.split_into_shards(SHARDS, fresh())
    assert torch.equal(bits(states(again)["it"]), bits(stored[0]["it"]))


def cut(file):
    file.write_bytes(file.read_bytes()[:-5])


def emptied(file):
    file.write_bytes(b"")


def scribbled(file):
    file.write_bytes(b"not a tensor file")


def flipped(file):
    raw = bytearray(file.read_bytes())
    raw[-9] ^= 64
    file.write_bytes(raw)


def another_shape(file):
    save_file(
        {"it": torch.zeros(SHARDS, DIM + 1), "age": torch.zeros(SHARDS, dtype=torch.int64)}, file
    )


def another_name(file):
    save_file({"they": torch.zeros(SHARDS, DIM)}, file)


@pytest.mark.parametrize("damage", [cut, emptied, scribbled, flipped, another_shape, another_name])
def test_a_damaged_vault_is_refused_in_words(box, ledger, tmp_path, stored, damage):
    damage(stored[1])
    with pytest.raises(ReleaseError, match="Start a new run") as caught:
        door(box, ledger, folder=tmp_path / "run").split_into_shards(SHARDS, fresh())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("crashed", [False, True])
def test_states_of_another_split_are_not_taken_up(box, ledger, tmp_path, crashed):
    """Four states of two numbers are no two states of four: a record would then have a part in two shards."""
    gate = door(box, ledger, folder=tmp_path / "run")
    gate.split_into_shards(4, {"it": torch.zeros(4, 2)})
    gate.update_shards(lambda images, labels, state: {"it": images.flatten(1).mean(0)[:2]})
    gate.save_shard_states()
    gate = door(box, ledger, folder=tmp_path / "run") if crashed else gate
    try:
        gate.split_into_shards(2, {"it": torch.zeros(2, 4)})
    except (PlanError, ReleaseError):
        return
    assert not crashed
    assert not states(gate)["it"].any()


def test_a_run_that_did_not_crash_takes_up_nothing(box, tmp_path):
    """As when a ledger was begun anew where another had lain: the ticket's number is the same, the run is not."""
    old = door(box, Ledger(tmp_path / "box.jsonl"))
    old.split_into_shards(SHARDS, zeros())
    old.update_shards(learn)
    old.save_shard_states()
    for each in ("box.jsonl", "box.jsonl.head"):
        (tmp_path / each).unlink()
    new = door(box, Ledger(tmp_path / "box.jsonl"))
    new.split_into_shards(SHARDS, zeros())
    assert not states(new)["it"].any()


def test_any_layout_can_be_stored(box, ledger, tmp_path):
    """Weights that a caller stacked and turned."""
    gate = door(box, ledger, folder=tmp_path / "run")
    gate.split_into_shards(
        SHARDS,
        {
            "it": torch.rand(DIM, SHARDS).T,
            "net": torch.rand(SHARDS, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        },
    )
    gate.save_shard_states()
    again = door(box, ledger, folder=tmp_path / "run")
    again.split_into_shards(
        SHARDS, {"it": torch.zeros(SHARDS, DIM), "net": torch.zeros(SHARDS, 3, 2, 2)}
    )
    assert all(torch.equal(states(again)[name], states(gate)[name]) for name in ("it", "net"))
