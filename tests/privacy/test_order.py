"""The secret order of the records: drawn once a run, kept on the secret side while the run can be resumed, and gone at its end."""

import math
import multiprocessing
import stat

import numpy as np
import pytest
import torch
from support.fakes import FreePlan, NullLedger

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PlanError, ReleaseError, SettingError
from privot.privacy import clipping as clipping_module
from privot.privacy import gate as gate_module
from privot.privacy import shards as shards_module
from privot.privacy.accounting import Neighbours
from privot.privacy.client_partition import client_partition, load_client_order
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom, add_noise
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import Fixed, Full, Shards
from privot.privacy.shard_checkpoint import (
    describe_leftover_checkpoints,
    list_shard_checkpoints,
    secret_order_path,
)
from privot.runtime import Runtime
from privot.runtime.config import MAX_CHUNK_SIZE

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
COUNT = 41
SHARDS = 4
IMAGES = np.random.default_rng(0).random((COUNT, 1, 2, 2), np.float32)


def box_of(count=COUNT):
    return Sensitive(IMAGES[:count], np.arange(count) % 2, Spec((1, 2, 2), 2, count), name="box")


def gate_for(ledger, folder, verb="rows", box=None, steps=1, sampling=None):
    plan = Plan((Stage("it", verb, 0.0, steps, sampling or Full()),), REPLACE)
    return Gate(
        box_of() if box is None else box,
        plan,
        ledger,
        Budget(math.inf),
        runtime=Runtime("cpu", 16),
        folder=folder,
    )


def pixels(image, label):
    return image.flatten()


def learn(images, labels, state):
    return {"it": state["it"] + images.flatten(1).sum(0)}


def test_rows_come_in_an_order_of_their_own_for_each_run(tmp_path):
    found = [
        gate_for(Ledger(tmp_path / f"{run}.jsonl"), None).rows("it", pixels, clip_norm=9.0)
        for run in range(3)
    ]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], torch.from_numpy(IMAGES).flatten(1).double())
    assert all(torch.equal(each.sort(0).values, found[0].sort(0).values) for each in found)


def test_a_resumed_run_sees_the_order_it_began_with(tmp_path, ledger):
    first = gate_for(
        ledger, tmp_path / "run", "query_random_shards", steps=100, sampling=Shards(SHARDS)
    )
    first.split_into_shards(SHARDS, {"it": torch.zeros(SHARDS, 4)})
    first.update_shards(learn)
    first.save_shard_states()
    again = gate_for(
        ledger, tmp_path / "run", "query_random_shards", steps=100, sampling=Shards(SHARDS)
    )
    again.split_into_shards(SHARDS, {"it": torch.zeros(SHARDS, 4)})
    assert torch.equal(first._shards[0].images, again._shards[0].images), (
        "records must stay in the shards whose states know them"
    )
    assert torch.equal(first._shards[1]["it"], again._shards[1]["it"])


def test_it_lies_with_the_ledger_for_the_owner_s_eyes_and_goes_with_the_run(tmp_path, ledger):
    gate = gate_for(ledger, tmp_path / "run")
    gate.rows("it", pixels, clip_norm=9.0)
    file = secret_order_path(ledger, gate.ticket)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each for each in (tmp_path / "run").iterdir() if "order" in each.name] == []
    assert "secret order of the records" in describe_leftover_checkpoints(ledger)[0]
    assert list_shard_checkpoints(ledger) == {}
    gate.delete_shard_states()
    assert not file.exists()
    assert describe_leftover_checkpoints(ledger) == []


@pytest.mark.parametrize("verb", ["sum", "sorted_blocks"])
def test_nothing_is_kept_where_positions_do_not_matter(tmp_path, ledger, verb):
    gate = gate_for(ledger, tmp_path / "run", verb)
    gate._get_secret_order()
    assert list(tmp_path.glob("*order*")) == []


@pytest.mark.parametrize("after", ["an answer", "a stored state"])
def test_a_run_whose_order_is_gone_is_not_resumed(tmp_path, ledger, after):
    """Records would lie in other shards than those whose states know them: two of them would know one record."""
    how = {"steps": 100, "sampling": Shards(SHARDS)} if after == "a stored state" else {}
    verb = "query_random_shards" if how else "rows"
    gate = gate_for(ledger, tmp_path / "run", verb, **how)
    if how:
        gate.split_into_shards(SHARDS, {"it": torch.zeros(SHARDS, 4)})
        gate.save_shard_states()
    else:
        gate.rows("it", pixels, clip_norm=9.0)
        next((tmp_path / "run").glob("it-*")).unlink()
    secret_order_path(ledger, gate.ticket).unlink()
    again = gate_for(ledger, tmp_path / "run", verb, **how)
    with pytest.raises(ReleaseError, match="secret order"):
        again.split_into_shards(SHARDS, {"it": torch.zeros(SHARDS, 4)}) if how else again.rows(
            "it", pixels, clip_norm=9.0
        )


def test_an_order_of_another_number_of_records_is_refused(tmp_path, ledger):
    gate_for(ledger, tmp_path / "run", steps=2).rows("it", pixels, clip_norm=9.0)
    plan = Plan((Stage("it", "rows", 0.0, 2),), REPLACE)
    smaller = Sensitive(
        IMAGES[:-1], np.arange(COUNT - 1) % 2, Spec((1, 2, 2), 2, COUNT - 1), name="box"
    )
    again = Gate(
        smaller, plan, ledger, Budget(math.inf), runtime=Runtime("cpu", 16), folder=tmp_path / "run"
    )
    again.rows("it", pixels, clip_norm=9.0)  # kept before
    with pytest.raises(ReleaseError, match="altered"):
        again.rows("it", pixels, clip_norm=9.0)


# The division among simulated clients


def _drawn(path):
    return load_client_order(Ledger(path), COUNT).tolist()


def test_all_processes_see_one_division(tmp_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(_drawn, [tmp_path / "box.jsonl"] * 6)
    assert all(each == found[0] for each in found)
    assert sorted(found[0]) == list(range(COUNT))


def test_clients_hold_disjoint_parts_that_do_not_follow_the_file(ledger):
    box = Sensitive(
        IMAGES, np.arange(COUNT) % 2, Spec((1, 2, 2), 2, COUNT, num_clients=3), name="box"
    )
    parts = [
        client_partition(box, client, ledger)._images.reshape(-1, 4).tolist() for client in range(3)
    ]
    assert sorted(sum(parts, [])) == sorted(IMAGES.reshape(-1, 4).tolist())  # noqa: RUF017 (three lists)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts[0] != IMAGES[::3].reshape(-1, 4).tolist()


def test_a_division_is_drawn_anew_for_another_number_of_records(ledger):
    one = load_client_order(ledger, COUNT)
    assert torch.equal(load_client_order(ledger, COUNT), one)
    assert sorted(load_client_order(ledger, COUNT + 1).tolist()) == list(range(COUNT + 1))


# Sums that float64 could not hold, and portions of one shape


def test_noise_is_added_to_whole_numbers_that_float64_cannot_hold():
    total = 2**53 + torch.arange(1, 200, 2)
    noise = (SecretRandom(1).normal((100,)) * 2.0**20).round().long()
    exact = [int(each) + int(more) for each, more in zip(total, noise, strict=True)]
    assert add_noise(total, 1.0, 2.0**-20, SecretRandom(1)).tolist() == [
        float(each) * 2.0**-20 for each in exact
    ]
    assert add_noise(total.double(), 1.0, 2.0**-20, SecretRandom(1)).tolist() != [
        float(each) * 2.0**-20 for each in exact
    ], "float64 would not do"


def test_a_large_sum_is_the_small_one(tmp_path, monkeypatch):
    sums = [
        gate_for(Ledger(tmp_path / "small.jsonl"), None, "sum").sum(
            "it", pixels, clip_norm=3.0, per_class=True
        )
    ]
    monkeypatch.setattr(clipping_module, "MAX_EXACT_SUM", 0.0)
    sums.append(
        gate_for(Ledger(tmp_path / "large.jsonl"), None, "sum").sum(
            "it", pixels, clip_norm=3.0, per_class=True
        )
    )
    assert torch.equal(*sums)
    assert sums[1].dtype == torch.float64


def test_what_64_bits_cannot_add_up_is_refused(ledger, monkeypatch):
    monkeypatch.setattr(gate_module, "MAX_SUM_RECORDS", COUNT - 1)
    with pytest.raises(PlanError, match="not exact"):
        gate_for(ledger, None, "sum").sum("it", pixels, clip_norm=3.0)
    monkeypatch.setattr(shards_module, "MAX_SHARDS", SHARDS - 1)
    with pytest.raises(PlanError, match="not exact"):
        gate_for(ledger, None, "query_random_shards", sampling=Shards(SHARDS)).split_into_shards(
            SHARDS, {"it": torch.zeros(SHARDS, 4)}
        )
    box = Sensitive(IMAGES[:40], np.arange(40) % 2, Spec((1, 2, 2), 2, 40, (20, 20)))
    monkeypatch.setattr(clipping_module, "MAX_EXACT_SUM", 2.0**20)
    with pytest.raises(PlanError, match="not exact"):
        gate_for(ledger, None, "sorted_blocks", box=box).sorted_blocks(
            "it", pixels, frame=torch.eye(4), num_blocks=2, clip_norm=1.0
        )
    assert ledger.entries() == []
    with pytest.raises(SettingError, match="microbatch"):
        Runtime("cpu", MAX_CHUNK_SIZE + 1)


@pytest.mark.parametrize(
    ("relation", "sampling", "shapes"),
    [
        (REPLACE, Fixed(20, COUNT), {16}),  # two portions: the second is filled up
        (REPLACE, Fixed(9, COUNT), {9}),  # one portion, always as large
        (ADD_REMOVE, Full(), {16}),
    ],
)
def test_a_record_meets_one_shape_of_a_portion(relation, sampling, shapes, monkeypatch):
    seen = set()
    secretly = Gate._run_secretly
    monkeypatch.setattr(
        Gate,
        "_run_secretly",
        lambda gate, query, images, *more: (
            seen.add(len(images)),
            secretly(gate, query, images, *more),
        )[1],
    )
    plan = FreePlan((Stage("it", "sum", 0.0, 5, sampling),), relation)
    gate = Gate(box_of(), plan, NullLedger(), NullLedger(), runtime=Runtime("cpu", 16))
    for _ in range(5):
        gate.sum("it", pixels, clip_norm=9.0)
    assert seen == shapes
