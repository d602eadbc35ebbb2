"""Owners behind one gate: one of them may hold anything, also another number of records, and nothing of any other owner moves."""

import math

import numpy as np
import pytest
import torch

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import BudgetError, DataError, PlanError, QueryError
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import Full, Shards
from privot.runtime import Runtime

pytestmark = pytest.mark.usefixtures("array_order")

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
OWNERS = 4
SHAPE = (1, 2, 2)
DIM = 4
MOST = 6
SIZES = (3, 9, 1, 6)  # fewer than are laid out, more, one, as many
SPEC = Spec(SHAPE, 2, num_clients=OWNERS)


def held(seed=0, sizes=SIZES):
    """Images, labels and owners: each owner's records come from a stream of its own, so that another's number moves none of them."""
    images = [
        np.random.default_rng((seed, owner)).random((size, *SHAPE), np.float32)
        for owner, size in enumerate(sizes)
    ]
    labels = [np.arange(size) % 2 for size in sizes]
    return np.concatenate(images), np.concatenate(labels), np.repeat(np.arange(len(sizes)), sizes)


def box_of(images, labels, owners, spec=SPEC):
    return Sensitive(images, labels, spec, client_ids=owners)


def door(box, ledger, noise=0.0, steps=10**6, unit=CLIENT, critics=2, verb="query_clients", **more):
    stage = Stage(
        "it",
        verb,
        noise,
        steps,
        Shards(critics) if unit is REPLACE and verb == "query_clients" else Full(),
    )
    return Gate(
        box,
        Plan((stage,), unit),
        ledger,
        more.pop("wall", Budget(math.inf)),
        runtime=more.pop("runtime", Runtime("cpu")),
        **more,
    )


def zeros(count=OWNERS):
    return {"it": torch.zeros(count, DIM)}


def learn(images, labels, state):
    return {"it": state["it"] + images.flatten(1).mean(0)}


def tell(state, row):
    return state["it"] + row


def ask(gate, rows=1, owners=OWNERS, query=tell, bound=99.0, some=None):
    return gate.query_clients(
        "it", query, torch.zeros(owners, rows), clip_norm=bound, client_indices=some
    )


def states(gate):
    return gate._shards[1]


# Which record lies where


def test_shards_hold_what_their_owners_hold_and_no_more(ledger):
    images, labels, owners = held()
    order = np.random.default_rng(1).permutation(len(labels))  # as they come
    gate = door(box_of(images[order], labels[order], owners[order]), ledger)
    gate.split_into_shards(OWNERS, zeros(), MOST)
    shown = gate._shards[0].images.flatten(2)
    assert shown.shape == (OWNERS, MOST, DIM)
    for owner, size in enumerate(SIZES):
        own = {tuple(each) for each in images[owners == owner].reshape(-1, DIM).tolist()}
        rows, counts = np.unique(shown[owner].numpy(), axis=0, return_counts=True)
        assert {tuple(each) for each in rows.tolist()} <= own
        assert len(rows) == min(size, MOST)
        assert counts.max() - counts.min() <= 1  # evenly


@pytest.mark.parametrize("critics", [1, 2, 3])
def test_parts_of_an_owner_share_its_records_and_no_other_s(ledger, critics):
    images, labels, owners = held(sizes=(3, 9, 4, 6))
    gate = door(box_of(images, labels, owners), ledger, unit=REPLACE, critics=critics)
    gate.split_into_shards(OWNERS * critics, zeros(OWNERS * critics), 12)
    shown = gate._shards[0].images.flatten(2).numpy()
    seen = set()
    for shard, rows in enumerate(shown):
        own = images[owners == shard // critics].reshape(-1, DIM)[shard % critics :: critics]
        assert {tuple(each) for each in rows.tolist()} == {tuple(each) for each in own.tolist()}
        seen |= {tuple(each) for each in rows.tolist()}
    assert len(seen) == len(images)


def test_records_are_dealt_by_the_order_where_nobody_says_whose_they_are():
    box = Sensitive(np.zeros((7, *SHAPE)), np.zeros(7, int), Spec(SHAPE, 1, num_clients=3))
    order = np.array([3, 1, 0, 2, 6, 5, 4])
    assert box._assign_clients(order)[order].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert (
        Sensitive(np.zeros((7, *SHAPE)), np.zeros(7, int), Spec(SHAPE, 1))
        ._assign_clients(order)
        .tolist()
        == [0] * 7
    )
    known = Sensitive(
        np.zeros((3, *SHAPE)), np.zeros(3, int), Spec(SHAPE, 1, num_clients=2), client_ids=[1, 1, 0]
    )
    assert known._assign_clients(np.array([2, 0, 1])).tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    "owners",
    [
        [0, 1, 2],
        [0, 1, 1, 0],
        [0, 1, 2, 3],
        [0, 1, 2, -1],
        [0.0, 1, 2, 2],
        [[0, 1, 2, 2]],
        ["a", "b", "c", "c"],
        [0, 0, 2, 2],
    ],
)
def test_owners_that_do_not_fit_are_refused(owners):
    with pytest.raises(DataError, match="clients"):
        Sensitive(
            np.zeros((4, *SHAPE)),
            np.zeros(4, int),
            Spec(SHAPE, 1, num_clients=3),
            client_ids=owners,
        )


def test_owners_must_be_declared():
    with pytest.raises(DataError, match="the number of clients"):
        Sensitive(np.zeros((4, *SHAPE)), np.zeros(4, int), Spec(SHAPE, 1), client_ids=[0, 0, 0, 0])
    for wrong in (0, -1, 5):
        with pytest.raises(DataError, match="clients"):
            Spec(SHAPE, 1, 4, num_clients=wrong)


# One owner is replaced: what no other may notice


def normalised(images, labels, state):
    """A batch norm, whose batch is all that is shown of this owner."""
    return {
        "it": torch.nn.functional.batch_norm(images, None, None, training=True).flatten(1).sum(0)
    }


def all_together(images, labels, state):
    """Over every axis, with the number of records that are shown."""
    return {
        "it": torch.softmax(images.flatten().sort().values, 0)[-DIM:] * images.sum() / len(labels)
        + labels.sum()
    }


def by_places(images, labels, state):
    """As critics draw theirs."""
    return {"it": images[(torch.tensor([0.1, 0.5, 0.99]) * len(labels)).long()].mean(0).flatten()}


def exploded(images, labels, state):
    return {"it": images.flatten(1).sum(0) * 1e37 / images.amin() - state["it"]}


LEARNERS = [learn, normalised, all_together, by_places, exploded]


def bits(value):
    return value.contiguous().view(torch.int64 if value.dtype == torch.float64 else torch.int32)


def moved(ledger, query, owner=1, seeds=6, most=lambda owners: MOST):
    """Answers of others that moved when all of one owner's records did, and their number; and whether the owner's own did."""
    others = 0
    own = 0
    for seed in range(seeds):
        images, labels, owners = held(seed)
        found = []
        for size in (
            SIZES[owner],
            1,
            2,
            9,
            40,
        ):  # its own, then other records, and other numbers of them
            mine = held(seed + 100, [size] * OWNERS)
            keep = owners != owner
            at = mine[2] == owner
            given = (
                [images, labels, owners]
                if not found
                else [
                    np.concatenate([mine[part][at], each[keep]])
                    for part, each in enumerate((images, labels, owners))
                ]
            )
            gate = door(box_of(*given), ledger)
            gate.split_into_shards(OWNERS, zeros(), most(given[2]))
            gate.update_shards(query)
            gate.update_shards(query, shard_indices=torch.tensor([owner, 2]))
            found.append((bits(states(gate)["it"]), bits(ask(gate, 3, bound=1.0))))
        for state, said in found[1:]:
            changed = (state != found[0][0]).any(1) | (said != found[0][1]).flatten(1).any(1)
            own += bool(changed[owner])
            changed[owner] = False
            others += bool(changed.any())
    return others, own


@pytest.mark.parametrize("query", LEARNERS)
def test_another_owner_s_records_and_their_number_move_nothing(ledger, query):
    others, own = moved(ledger, query)
    assert others == 0
    assert own > 10


def test_planted_padding_to_the_longest_is_caught(ledger):
    """Were shards as long as the largest owner's, its number of records would be in everybody's shapes, and in their sums."""
    assert (
        moved(ledger, all_together, seeds=2, most=lambda owners: int(np.bincount(owners).max()))[0]
        > 0
    )


@pytest.mark.parametrize("bound", [1e-3, 1.0, 50.0])
def test_any_two_states_of_an_owner_stay_within_the_bound(ledger, bound):
    gate = door(box_of(*held()), ledger)
    reached = 0.0
    gate.split_into_shards(
        OWNERS, {"it": torch.randn(OWNERS, DIM, generator=torch.Generator().manual_seed(0))}, MOST
    )
    ends = [
        torch.full((DIM,), value) for value in (0.0, 1.0, -1.0, 3e38, -3e38, math.inf, math.nan)
    ]
    for one in ends:
        for other in ends:
            found = []
            for state in (one, other):
                states(gate)["it"][2] = state
                found.append(ask(gate, 5, bound=bound))
            gaps = (found[0] - found[1]).norm(dim=2)  # [owners, rows]
            assert gaps[2].max() <= 2 * bound
            assert not gaps[[0, 1, 3]].any()
            reached = max(reached, float(gaps.max()) / (2 * bound))
    assert reached > 0.999


def test_a_record_reaches_rows_that_drew_its_critic_alone(ledger):
    """The record unit: one of three critics of one owner changes."""
    gate = door(box_of(*held(sizes=(3, 9, 4, 6))), ledger, unit=REPLACE, critics=3)
    rows = 30
    gate.split_into_shards(OWNERS * 3, zeros(OWNERS * 3), MOST)
    found = []
    for turn in range(2):
        states(gate)["it"][3 * 1 + 2] = float(turn)  # owner 1's critic 2
        gate._rng = SecretRandom(7)
        found.append(ask(gate, rows))
    drew = Shards(3).draw(OWNERS * rows, SecretRandom(7)).view(OWNERS, rows) == 2
    drew[[0, 2, 3]] = False
    assert 0 < drew.sum() < rows
    assert torch.equal((found[0] != found[1]).any(2), drew)


def test_each_row_has_noise_of_its_own(ledger):
    gate = door(box_of(*held()), ledger, noise=1.0, wall=Budget(1e12))
    gate.split_into_shards(OWNERS, zeros(), MOST)
    said = ask(gate, 500, bound=3.0).flatten(0, 1)
    assert said.std().item() == pytest.approx(6.0, rel=0.1)
    assert said.flatten().unique().numel() >= 0.999 * said.numel()
    assert abs(float(torch.corrcoef(said.T).fill_diagonal_(0).abs().max())) < 0.15


# Some are asked, and each has an account of its own


def test_a_cohort_answers_in_its_order_and_no_other_owner_pays(ledger):
    gate = door(box_of(*held()), ledger, steps=6)
    gate.split_into_shards(OWNERS, {"it": torch.arange(4.0)[:, None].expand(4, DIM).clone()}, MOST)
    said = ask(gate, 3, 2, some=torch.tensor([3, 1]))
    assert said.shape == (2, 3, DIM)
    assert said[:, 0, 0].tolist() == [3.0, 1.0]
    assert gate.count_remaining_queries("it") == 3
    ask(gate, 3, 2, some=torch.tensor([0, 2]))
    assert gate.count_remaining_queries("it") == 3  # of whoever has least
    ask(gate, 3)
    for some in ([0], [1, 2], [3]):
        with pytest.raises(BudgetError, match="used up"):
            ask(gate, 1, len(some), some=torch.tensor(some))
    assert [
        (each["first"], each["last"]) for each in ledger.entries() if each["kind"] == "ask"
    ] == [(0, 2), (3, 5)]


def test_one_owner_too_many_times_is_refused_though_others_have_answers_left(ledger):
    gate = door(box_of(*held()), ledger, steps=4)
    gate.split_into_shards(OWNERS, zeros(), MOST)
    ask(gate, 4, 1, some=torch.tensor([2]))
    lines = ledger.entries()
    with pytest.raises(BudgetError, match="used up"):
        ask(gate, 1)
    assert ledger.entries() == lines
    ask(gate, 4, 3, some=torch.tensor([0, 1, 3]))


@pytest.mark.parametrize(
    ("some", "given"),
    [([0, 0], 2), ([0, 1], 3), ([0, -1], 2), ([-1, 3], 2), ([0, 4], 2), ([], 0), (None, 3)],
)
def test_a_cohort_that_is_none_is_refused(ledger, some, given):
    """Twice the same owner, by whatever name, would be answered twice and counted once."""
    gate = door(box_of(*held()), ledger)
    gate.split_into_shards(OWNERS, zeros(), MOST)
    with pytest.raises(PlanError, match="once each"):
        ask(gate, 1, given, some=None if some is None else torch.tensor(some, dtype=torch.int64))
    assert gate.count_remaining_queries("it") == 10**6


@pytest.mark.parametrize("stop", [1, 3])
def test_a_process_that_ends_after_an_answer_goes_on_with_the_next(tmp_path, stop):
    """Each deal is marked by itself, and no answer is given twice: also where few steps are planned, which other verbs keep."""
    for turn in range(stop):
        gate = door(
            box_of(*held()), Ledger(tmp_path / "l"), steps=2 * stop, folder=tmp_path / "run"
        )
        assert gate.count_remaining_queries("it") == 2 * stop - 2 * turn
        gate.split_into_shards(OWNERS, zeros(), MOST)
        assert torch.equal(states(gate)["it"], zeros()["it"] + turn)
        ask(gate, 2)
        gate.update_shards(lambda images, labels, state: {"it": state["it"] + 1})
        gate.save_shard_states()
    gate = door(box_of(*held()), Ledger(tmp_path / "l"), steps=2 * stop, folder=tmp_path / "run")
    gate.split_into_shards(OWNERS, zeros(), MOST)
    with pytest.raises(BudgetError, match="used up"):
        ask(gate, 1)
    assert not list((tmp_path / "run").glob("*.safetensors"))
    assert sum(each["kind"] == "reserve" for each in Ledger(tmp_path / "l").entries()) == 1


def test_portions_change_no_answer(ledger):
    found = []
    for portion in (1, 5, 1000):
        gate = door(box_of(*held()), ledger, runtime=Runtime("cpu", portion))
        gate.split_into_shards(OWNERS, zeros(), MOST)
        gate.update_shards(learn)
        found.append(ask(gate, 4))
    assert torch.allclose(found[0], found[1], atol=1e-6)
    assert torch.allclose(found[0], found[2], atol=1e-6)


# Refused


@pytest.mark.parametrize(
    ("count", "most"), [(OWNERS, 0), (OWNERS, -1), (2 * OWNERS, MOST), (3, MOST), (1, MOST)]
)
def test_under_client_a_shard_is_all_that_one_owner_holds(ledger, count, most):
    gate = door(box_of(*held()), ledger)
    with pytest.raises(PlanError, match="no proof"):
        gate.split_into_shards(count, zeros(count), most)
    assert ledger.entries() == []


def test_owners_have_as_many_shards_each(ledger):
    gate = door(box_of(*held()), ledger, unit=REPLACE)
    with pytest.raises(PlanError, match="same number"):
        gate.split_into_shards(7, zeros(7), MOST)


def test_the_plan_must_be_for_these_shards(ledger):
    gate = door(box_of(*held(sizes=(3, 9, 4, 6))), ledger, unit=REPLACE, critics=1000)
    gate.split_into_shards(OWNERS * 3, zeros(OWNERS * 3), MOST)
    with pytest.raises(PlanError, match="another number of shards"):
        ask(gate)


def test_draws_of_shards_prove_nothing_for_a_whole_owner():
    with pytest.raises(PlanError, match="no proof"):
        Plan((Stage("it", "query_clients", 1.0, 1, Shards(10)),), CLIENT)


def test_an_owner_s_query_that_fails_closes_the_gate(ledger):
    gate = door(box_of(*held()), ledger)
    gate.split_into_shards(OWNERS, zeros(), MOST)
    with pytest.raises(QueryError):
        ask(gate, query=lambda state, row: state["none"])
    with pytest.raises(PlanError):
        ask(gate)


def test_noise_of_another_law_than_is_added_has_no_proof(ledger):
    """The gate's own noise is Gaussian; a plan that says Laplace would claim a pure epsilon for it."""
    box = box_of(*held())
    with pytest.raises(PlanError, match="no proof"):
        Gate(
            box, Plan((Stage("it", "sum", 1.0, mechanism="laplace"),), REPLACE), ledger, Budget(1e9)
        )


# What it costs


def test_an_owner_s_answers_are_one_gaussian():
    cost = Plan((Stage("it", "query_clients", 20.0, 400),), CLIENT).cost()
    assert cost.mu == pytest.approx(1.0)
    assert cost.epsilon(1e-5) == Plan((Stage("it", "sum", 1.0),), REPLACE).cost().epsilon(1e-5)


def test_runs_of_both_units_are_added_up_for_a_record(ledger):
    """To replace a record is one way to replace what its owner holds."""
    one = Plan((Stage("it", "query_clients", 2.0),), CLIENT)
    other = Plan((Stage("it", "sum", 2.0),), REPLACE)
    ledger.reserve(one, "first")
    assert ledger.compute_spent_cost().mu == pytest.approx(0.5)
    assert ledger.compute_spent_cost(extra_plan=other).mu == pytest.approx(math.sqrt(0.5))
