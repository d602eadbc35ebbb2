"""The secret order: drawn once a run, stored on the secret side until the run ends."""

import multiprocessing
import stat

import numpy as np
import pytest
import torch
from support.gates import flatten_image, learn, make_gate

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PlanError, ReleaseError, SettingError
from privot.privacy import clipping, shards
from privot.privacy import gate as gate_module
from privot.privacy.client_partition import client_partition, load_client_order
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom, add_noise
from privot.privacy.plan import Stage
from privot.privacy.sampling import Full, Shards
from privot.privacy.shard_checkpoint import (
    describe_leftover_checkpoints,
    list_shard_checkpoints,
    secret_order_path,
)
from privot.runtime import Runtime
from privot.runtime.config import MAX_CHUNK_SIZE

COUNT = 41
SHARDS = 4
IMAGES = np.random.default_rng(0).random((COUNT, 1, 2, 2), np.float32)
STATE = {"it": torch.zeros(SHARDS, 4)}


def make_dataset(count=COUNT, class_sizes=None, **more):
    spec = Spec((1, 2, 2), 2, count, class_sizes, num_clients=more.pop("num_clients", None))
    return Sensitive(IMAGES[:count], np.arange(count) % 2, spec, name="it", **more)


def open_gate(ledger, folder=None, verb="rows", dataset=None, steps=1):
    sampling = Shards(SHARDS) if verb == "query_random_shards" else Full()
    stage = Stage("it", verb, 0.0, steps, sampling)
    return make_gate(
        make_dataset() if dataset is None else dataset,
        ledger,
        stage,
        folder=folder,
        runtime=Runtime("cpu", 16),
    )


def open_shards(ledger, folder=None):
    return open_gate(ledger, folder, "query_random_shards", steps=100)


def ask_rows(gate):
    return gate.rows("it", flatten_image, clip_norm=9.0)


def test_rows_come_in_an_order_of_their_own_for_each_run(tmp_path):
    one, two = (ask_rows(open_gate(Ledger(tmp_path / f"{run}.jsonl"))) for run in range(2))
    records = torch.from_numpy(IMAGES).flatten(1).double()
    assert not torch.equal(one, two)
    assert not torch.allclose(one, records, atol=1e-4)
    assert torch.equal(one.sort(0).values, two.sort(0).values)
    assert torch.allclose(one.sort(0).values, records.sort(0).values, atol=1e-4)


def test_a_resumed_run_has_the_order_it_began_with(tmp_path, ledger):
    """Records must stay in the shards whose states have seen them."""
    first = open_shards(ledger, tmp_path / "run")
    first.split_into_shards(SHARDS, STATE)
    first.update_shards(learn)
    first.save_shard_states()
    again = open_shards(ledger, tmp_path / "run")
    again.split_into_shards(SHARDS, STATE)
    assert torch.equal(first._shards.records.images, again._shards.records.images)
    assert torch.equal(first._shards.states["it"], again._shards.states["it"])


def test_it_is_beside_the_ledger_for_its_owner_alone_until_the_run_ends(tmp_path, ledger):
    gate = open_gate(ledger, tmp_path / "run")
    ask_rows(gate)
    file = secret_order_path(ledger, gate.ticket)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not list((tmp_path / "run").glob("*order*"))
    assert "secret order of the records" in describe_leftover_checkpoints(ledger)[0]
    assert list_shard_checkpoints(ledger) == {}
    gate.delete_shard_states()
    assert not file.exists()
    assert describe_leftover_checkpoints(ledger) == []


@pytest.mark.parametrize("verb", ["sum", "sorted_blocks"])
def test_nothing_is_stored_if_positions_do_not_matter(tmp_path, ledger, verb):
    open_gate(ledger, tmp_path / "run", verb)._get_secret_order()
    assert list(tmp_path.glob("*order*")) == []


def test_a_run_whose_order_is_lost_is_not_resumed_after_an_answer(tmp_path, ledger):
    gate = open_gate(ledger, tmp_path / "run")
    ask_rows(gate)
    next((tmp_path / "run").glob("it-*")).unlink()
    secret_order_path(ledger, gate.ticket).unlink()
    with pytest.raises(ReleaseError, match="secret order"):
        ask_rows(open_gate(ledger, tmp_path / "run"))


def test_a_run_whose_order_is_lost_is_not_resumed_after_a_stored_state(tmp_path, ledger):
    """Records would be in other shards, and two states would have seen one record."""
    gate = open_shards(ledger, tmp_path / "run")
    gate.split_into_shards(SHARDS, STATE)
    gate.save_shard_states()
    secret_order_path(ledger, gate.ticket).unlink()
    with pytest.raises(ReleaseError, match="secret order"):
        open_shards(ledger, tmp_path / "run").split_into_shards(SHARDS, STATE)


def test_an_order_of_another_number_of_records_is_refused(tmp_path, ledger):
    ask_rows(open_gate(ledger, tmp_path / "run", steps=2))
    again = open_gate(ledger, tmp_path / "run", dataset=make_dataset(COUNT - 1), steps=2)
    ask_rows(again)  # stored before
    with pytest.raises(ReleaseError, match="altered"):
        ask_rows(again)


# The partition among simulated clients


def list_order(path):
    return load_client_order(Ledger(path), COUNT).tolist()


def test_all_processes_have_one_partition(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        orders = pool.map(list_order, [tmp_path / "it.jsonl"] * 8, chunksize=1)
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == list(range(COUNT))


def test_clients_have_disjoint_parts_that_do_not_follow_the_file(ledger):
    dataset = make_dataset(num_clients=3)
    parts = [
        client_partition(dataset, client, ledger)._images.reshape(-1, 4).tolist()
        for client in range(3)
    ]
    assert sorted(parts[0] + parts[1] + parts[2]) == sorted(IMAGES.reshape(-1, 4).tolist())
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts[0] != IMAGES[::3].reshape(-1, 4).tolist()


def test_a_client_has_its_own_records_and_their_number_is_not_declared(ledger):
    whose = np.array([0, 1, 0, 1, 0])
    dataset = make_dataset(5, num_clients=2, client_ids=whose)
    for client in range(2):
        part = client_partition(dataset, client, ledger)
        assert np.array_equal(part._images, IMAGES[:5][whose == client])
        assert (part.spec.size, part.spec.num_clients) == (None, None)


def test_a_partition_is_drawn_anew_for_another_number_of_records(ledger):
    order = load_client_order(ledger, COUNT)
    assert torch.equal(load_client_order(ledger, COUNT), order)
    assert sorted(load_client_order(ledger, COUNT + 1).tolist()) == list(range(COUNT + 1))


# Sums that float64 could not hold


def test_noise_is_added_to_integers_that_float64_cannot_hold():
    total = 2**53 + torch.arange(1, 200, 2)
    noise = (SecretRandom(1).normal((100,)) * 2.0**20).round().long()
    exact = [int(value + more) * 2.0**-20 for value, more in zip(total, noise, strict=True)]
    assert add_noise(total, 1.0, 2.0**-20, SecretRandom(1)).tolist() == exact
    assert add_noise(total.double(), 1.0, 2.0**-20, SecretRandom(1)).tolist() != exact


def test_a_large_sum_is_the_small_one(ledger, monkeypatch):
    sums = []
    for max_exact in (clipping.MAX_EXACT_SUM, 0.0):
        monkeypatch.setattr(clipping, "MAX_EXACT_SUM", max_exact)
        gate = open_gate(ledger, verb="sum")
        sums.append(gate.sum("it", flatten_image, clip_norm=3.0, per_class=True))
    assert torch.equal(*sums)
    assert sums[1].dtype == torch.float64


def test_sums_that_are_not_exact_are_refused(ledger, monkeypatch):
    monkeypatch.setattr(gate_module, "MAX_SUM_RECORDS", COUNT - 1)
    with pytest.raises(PlanError, match="not exact"):
        open_gate(ledger, verb="sum").sum("it", flatten_image, clip_norm=3.0)
    monkeypatch.setattr(shards, "MAX_SHARDS", SHARDS - 1)
    with pytest.raises(PlanError, match="not exact"):
        open_shards(ledger).split_into_shards(SHARDS, STATE)
    monkeypatch.setattr(clipping, "MAX_EXACT_SUM", 2.0**20)
    gate = open_gate(ledger, verb="sorted_blocks", dataset=make_dataset(40, (20, 20)))
    with pytest.raises(PlanError, match="not exact"):
        gate.sorted_blocks("it", flatten_image, frame=torch.eye(4), num_blocks=2, clip_norm=1.0)
    assert ledger.entries() == []
    with pytest.raises(SettingError, match="microbatch"):
        Runtime("cpu", MAX_CHUNK_SIZE + 1)
