"""The gate: what it refuses, in which order it does things, and what a crash leaves."""

import math
import multiprocessing
import stat
import sys
import traceback
import types

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from support.fakes import FreePlan, NullLedger
from support.gates import (
    DIM,
    flatten_image,
    learn,
    list_kinds,
    list_marks,
    make_gate,
    make_records,
    watch_reads,
)

from privot.data.dataset import Records, Sensitive
from privot.data.tabular import SensitiveTable
from privot.errors import (
    BudgetError,
    LedgerError,
    PlanError,
    QueryError,
    ReleaseError,
    SettingError,
)
from privot.local.channels import Laplace, Projection
from privot.privacy import answers, clipping, secret_side, shards
from privot.privacy import gate as gate_module
from privot.privacy.answers import MARKS_PER_STAGE
from privot.privacy.client_partition import client_partition, load_client_order
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom, add_noise
from privot.privacy.plan import Budget, Neighbours, Plan, Stage
from privot.privacy.sampling import Fixed, Full, Poisson, Shards
from privot.privacy.shard_checkpoint import (
    describe_leftover_checkpoints,
    list_shard_checkpoints,
    secret_order_path,
)
from privot.runtime import Runtime
from privot.runtime.config import MAX_CHUNK_SIZE
from privot.runtime.process_group import SingleProcess

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
SUM = Stage("it", "sum", 1.0)
SAMPLE = Stage("it", "query_sample", 1.0)
BLOCKS = Stage("it", "sorted_blocks", 1.0)
ROWS = Stage("it", "rows", 0.0, 2)


EYE = torch.eye(4)


def ask(gate, query=flatten_image, name="it"):
    return gate.sum(name, query, clip_norm=1.0)


def ask_sample(gate, query, shape=(1,)):
    return gate.query_sample("it", query, clip_norm=1.0, shape=shape)


def ask_rows(gate):
    return gate.rows("it", flatten_image, clip_norm=9.0)


def ask_blocks(gate, frame=EYE, num_blocks=2, clip_norm=1.0, query=flatten_image, name="it"):
    return gate.sorted_blocks(name, query, frame=frame, num_blocks=num_blocks, clip_norm=clip_norm)


def interrupt(*arguments):
    raise KeyboardInterrupt


# What the plan does not cover


def test_queries_that_the_plan_does_not_cover(dataset, ledger):
    gate = make_gate(dataset, ledger, SUM)
    with pytest.raises(PlanError, match="no stage 'other'"):
        ask(gate, name="other")
    with pytest.raises(PlanError, match="of rows"):
        ask_rows(gate)
    assert ledger.entries() == []


def test_what_must_be_declared_public(ledger):
    channel = Laplace.calibrate(1.0, projection=Projection(shape=(1, 2, 2)))
    gate = make_gate(make_records(3), ledger, *channel.plan().stages, neighbours=LOCAL)
    with pytest.raises(PlanError, match="declared public"):
        gate.privatize(channel)
    with pytest.raises(PlanError, match="declared public"):
        ask_rows(make_gate(make_records(3), ledger, ROWS))
    with pytest.raises(PlanError, match="class sizes"):
        ask_blocks(make_gate(make_records(8, size=8), ledger, BLOCKS))
    assert ledger.entries() == []


@pytest.mark.parametrize(
    ("frame", "num_blocks", "radius", "message"),
    [(EYE, number, 1.0, "class sizes") for number in (0, -1, 5)]
    + [(frame, 2, 1.0, "frame") for frame in (torch.eye(3), torch.ones(4), torch.ones(2, 2, 4))]
    + [(torch.full((2, 4), value), 2, 1.0, None) for value in (math.nan, math.inf)]
    + [(EYE, 2, radius, "radius") for radius in (0.0, -1.0, math.nan, math.inf, 1e-300)],
)
def test_sorted_blocks_refuse(dataset, ledger, frame, num_blocks, radius, message):
    gate = make_gate(dataset, ledger, BLOCKS)
    with pytest.raises((PlanError, RuntimeError), match=message):
        ask_blocks(gate, frame, num_blocks, radius)
    assert ledger.entries() == []


# Values


def test_verbs_give_what_they_say_without_a_graph(dataset, ledger):
    images = torch.from_numpy(dataset._images).flatten(1).double()
    labels = torch.from_numpy(dataset._labels)
    names = ("sum", "rows", "query_sample", "sorted_blocks")
    gate = make_gate(dataset, ledger, *(Stage(name, name, 0.0, 3) for name in names))

    def check(value, expected):
        assert not value.requires_grad
        assert torch.allclose(value, expected, atol=1e-5, rtol=0)  # 8 values, rounded to 2^-21

    check(gate.sum("sum", flatten_image, clip_norm=9.0), images.sum(0))
    by_class = torch.stack([images[labels == label].sum(0) for label in range(2)])
    check(gate.sum("sum", flatten_image, clip_norm=9.0, per_class=True), by_class)
    weights = torch.ones(3, 4, requires_grad=True)

    def weigh(image, label, weights, factor):
        return weights @ image.flatten() * factor

    check(gate.sum("sum", weigh, weights, 0.5, clip_norm=9.0), images.sum().expand(3) / 2)
    ordered = images[gate._get_secret_order()]
    check(gate.rows("rows", flatten_image, clip_norm=9.0), ordered)
    clipped = ordered * (0.5 / ordered.norm(dim=1, keepdim=True)).clamp(max=1)
    check(gate.rows("rows", flatten_image, clip_norm=0.5), clipped)

    def mean(records, weights):
        return records.images.mean(0).flatten() * weights.sum()

    value = gate.query_sample("query_sample", mean, weights, clip_norm=99.0, shape=(4,))
    check(value, 12 * images.mean(0))
    frame = torch.tensor([[1.0, 0, 0, 0], [0.5, -0.5, 0.5, -0.5], [0, 0, 2, 0]])
    blocks = ask_blocks(gate, frame, clip_norm=9.0, name="sorted_blocks")
    for label in range(2):
        order = (images[labels == label] @ frame.T.double()).sort(0).values
        check(blocks[label], order.view(2, 2, 3).mean(1).T)


@pytest.mark.parametrize("neighbours", [REPLACE, ADD_REMOVE])
def test_chunks_and_orders_change_no_bit(ledger, neighbours):
    """Values are multiples of the grid: their sum is the same in any order and grouping."""

    def query(image, label):
        return (image.flatten().double() * 7.3 - label).sin() / 3

    dataset = make_records(37, num_classes=3, size=37, class_sizes=(13, 12, 12))
    verbs = ("sum", "rows", "sorted_blocks") if neighbours is REPLACE else ("sum",)
    stages = [Stage(verb, verb, 0.0, 2) for verb in verbs]
    values = []
    for size in (1, 2, 5, 36, 37, 1000):
        runtime = Runtime("cpu", size)
        gate = make_gate(dataset, ledger, *stages, neighbours=neighbours, runtime=runtime)
        value = [gate.sum("sum", query, clip_norm=0.4, per_class=way) for way in (False, True)]
        if neighbours is REPLACE:
            value.append(gate.rows("rows", query, clip_norm=0.4).sort(0).values)
            value.append(ask_blocks(gate, EYE, 3, 0.4, query, "sorted_blocks"))
        values.append(torch.cat([part.flatten() for part in value]))
    assert all(torch.equal(value, values[0]) for value in values)


@pytest.mark.parametrize(
    ("neighbours", "sampling", "size"),
    [
        (REPLACE, Fixed(20, 41), 16),  # two chunks: the second is filled up
        (REPLACE, Fixed(9, 41), 9),  # one chunk, always as large
        (ADD_REMOVE, Full(), 16),
        (ADD_REMOVE, Poisson(0.4), 16),
    ],
)
def test_all_chunks_of_a_stage_have_one_shape(neighbours, sampling, size, monkeypatch):
    """Values are rounded by the shape of a chunk, which must not say how many records it has."""
    seen = set()
    run = Gate._run_secretly

    def watch(gate, query, *arguments):
        seen.add(tuple(map(len, arguments)))
        return run(gate, query, *arguments)

    monkeypatch.setattr(Gate, "_run_secretly", watch)
    plan = FreePlan((Stage("it", "sum", 0.0, 5, sampling),), neighbours)
    gate = Gate(make_records(41), plan, NullLedger(), NullLedger(), runtime=Runtime("cpu", 16))
    for _ in range(5):
        gate.sum("it", flatten_image, clip_norm=9.0)
    assert seen == {(size, size)}


def test_draws_of_few_records(ledger):
    """A query sees no empty sample, of which it could take no maximum, and no chunk of nobody."""
    dataset = make_records(6)
    one = Runtime("cpu", 1)
    rare = Stage("it", "query_sample", 0.0, 1, Poisson(1e-15))
    gate = make_gate(dataset, ledger, rare, neighbours=ADD_REMOVE, runtime=one)
    assert ask_sample(gate, lambda records: records.images.max()[None]).tolist() == [0.0]
    assert [len(chunk.labels) for chunk in gate._draw_chunks(rare)] == [0]
    stage = Stage("it", "sum", 0.0, 1, Fixed(2, 6))
    gate = make_gate(dataset, ledger, stage, runtime=one)
    assert gate.sum("it", lambda image, label: image.new_ones(1), clip_norm=9.0).item() == 2.0


def test_no_row_is_longer_than_the_bound_to_the_last_bit():
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(203, 30, generator=draw, dtype=torch.float64)
    rows[:200] *= torch.logspace(-2, 3, 200)[:, None]
    rows[200:] = 0
    rows[200:, 0] = torch.tensor([0.7 * (1 + 5e-13), 0.7 * (1 - 5e-13), 0.7])
    norms = clipping.clip_rows(rows, 0.7).norm(dim=1)
    assert norms.max() <= 0.7
    assert torch.allclose(norms, rows.norm(dim=1).clamp(max=0.7), rtol=1e-11)


@pytest.mark.parametrize(("slices", "radius"), [(1, 0.4), (50, 3.0)])
def test_noise_of_blocks_covers_the_frame_and_the_rounding(ledger, monkeypatch, slices, radius):
    """At least 2 R sigma_max(frame) and half a step of the grid per slice, and hardly more."""
    noise = []
    add_noise = secret_side.add_noise

    def watch(steps, std, grid, *more):
        noise.append((std, grid))
        return add_noise(steps, std, grid, *more)

    monkeypatch.setattr(secret_side, "add_noise", watch)
    frame = torch.randn(slices, 4, generator=torch.Generator().manual_seed(1))
    gate = make_gate(make_records(6, size=6, class_sizes=(3, 3)), ledger, BLOCKS, insecure_seed=0)
    ask_blocks(gate, frame, 1, radius)
    ((std, grid),) = noise
    norm = float(torch.linalg.svdvals(frame.double())[0])
    exact = 2 * (radius * norm + grid * math.sqrt(slices) / 2)
    assert exact <= std <= exact * (1 + 3e-9)


# What only a GPU does, on a CPU


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("draw", [slice(1, 4), torch.tensor([5, 0, 2])])
def test_records_in_the_memory_of_a_gpu_are_the_records(ledger, monkeypatch, dtype, draw):
    """They are copied if they fit into a quarter of what is free, and never on a CPU."""
    dataset = make_records(6, size=6, dtype=dtype)
    size = dataset._images.size * (1 if dtype is np.uint8 else 4)
    cpu = torch.device("cpu")
    gate = make_gate(dataset, ledger, Stage("it", "rows", 0.0))
    order = gate._get_secret_order().numpy()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * size - 1, 9 * size))
    assert dataset._copy_to_gpu(cpu, order) == []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * size, 9 * size))
    copies = dataset._copy_to_gpu(cpu, order)
    monkeypatch.setattr(Sensitive, "_copy_to_gpu", None)
    records = gate._load_records(draw)
    gate._cached_records = copies
    copied = gate._load_records(draw)
    assert len(copies) == 2
    assert torch.equal(copied.images, records.images)
    assert torch.equal(copied.labels, records.labels)
    assert copied.images.dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "available", "by_kernel"),
    [(torch.float32, True, True), (torch.float64, True, False), (torch.float32, False, False)],
)
def test_a_gpu_adds_up_float32_by_its_kernel(monkeypatch, dtype, available, by_kernel):
    class OnGpu(torch.Tensor):
        is_cuda = True

    name = "privot.privacy.kernels.clipped_sum"
    kernel = types.SimpleNamespace(sum_truncated_products=lambda *arguments: arguments)
    monkeypatch.setitem(sys.modules, name, kernel)
    monkeypatch.setattr(clipping, "kernels_available", lambda: available)
    rows = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)
    rows[3] = math.nan
    total = clipping.clip_to_grid(rows, 0.7, 2.0**-20).sum(0)
    assert torch.equal(clipping.sum_clipped_rows(rows, 0.7, 2.0**-20), total)
    value = clipping.sum_clipped_rows(rows.as_subclass(OnGpu), 0.7, 2.0**-20)
    if by_kernel:
        flat, factors = (argument.as_subclass(torch.Tensor) for argument in value)
        assert flat.dtype == torch.float32
        value = (flat.nan_to_num() * factors[:, None]).trunc().sum(0)
    assert torch.equal(value.as_subclass(torch.Tensor), total)


def test_cudnn_does_not_choose_by_time_while_records_are_seen(dataset, ledger):
    cudnn = torch.backends.cudnn
    flags = []

    def query(records):
        flags.append((cudnn.enabled, cudnn.benchmark, cudnn.deterministic))
        return records.images.sum()[None]

    with cudnn.flags(enabled=True, benchmark=True):
        ask_sample(make_gate(dataset, ledger, SAMPLE), query)
    assert flags == [(True, False, True)]


# The secret order


def test_rows_come_in_an_order_of_their_own_for_each_run(ledger):
    dataset = make_records(41, size=41)
    one, two = (ask_rows(make_gate(dataset, ledger, ROWS)) for _ in range(2))
    records = torch.from_numpy(dataset._images).flatten(1).double()
    assert not torch.equal(one, two)
    assert not torch.allclose(one, records, atol=1e-4)
    assert torch.equal(one.sort(0).values, two.sort(0).values)
    assert torch.allclose(one.sort(0).values, records.sort(0).values, atol=1e-4)


def test_the_order_is_beside_the_ledger_until_the_run_ends(tmp_path, ledger):
    """Without it, or with that of other records, the run is not resumed."""
    folder = tmp_path / "run"
    gate = make_gate(make_records(9, size=9), ledger, ROWS, folder=folder)
    ask_rows(gate)
    file = secret_order_path(ledger, gate.ticket)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not list(folder.glob("*order*"))
    assert "secret order of the records" in describe_leftover_checkpoints(ledger)[0]
    assert list_shard_checkpoints(ledger) == {}
    again = make_gate(make_records(8, size=8), ledger, ROWS, folder=folder)
    ask_rows(again)  # stored before
    with pytest.raises(ReleaseError, match="altered"):
        ask_rows(again)
    content = file.read_bytes()
    file.unlink()
    again = make_gate(make_records(9, size=9), ledger, ROWS, folder=folder)
    ask_rows(again)
    with pytest.raises(ReleaseError, match="secret order"):
        ask_rows(again)
    file.write_bytes(content)
    gate.delete_shard_states()
    assert not file.exists()
    assert describe_leftover_checkpoints(ledger) == []


def test_shards_of_a_resumed_run_have_the_records_that_their_states_have_seen(tmp_path, ledger):
    def split():
        stage = Stage("it", "query_random_shards", 0.0, 100, Shards(4))
        gate = make_gate(make_records(41), ledger, stage, folder=tmp_path)
        gate.split_into_shards(4, {"it": torch.zeros(4, DIM)})
        return gate

    first = split()
    first.update_shards(learn)
    first.save_shard_states()
    again = split()
    assert torch.equal(first._shards.records.images, again._shards.records.images)
    assert torch.equal(first._shards.states["it"], again._shards.states["it"])
    secret_order_path(ledger, first.ticket).unlink()
    with pytest.raises(ReleaseError, match="secret order"):
        split()


@pytest.mark.parametrize("verb", ["sum", "sorted_blocks"])
def test_no_order_is_stored_if_positions_do_not_matter(dataset, ledger, tmp_path, verb):
    make_gate(dataset, ledger, Stage("it", verb, 0.0), folder=tmp_path)._get_secret_order()
    assert list(tmp_path.glob("*order*")) == []


def list_client_order(path):
    return load_client_order(Ledger(path), 41).tolist()


def test_all_processes_have_one_partition_among_clients(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        orders = pool.map(list_client_order, [tmp_path / "new" / "it.jsonl"] * 8, chunksize=1)
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == list(range(41))


def test_clients_have_disjoint_parts_that_do_not_follow_the_file(ledger):
    dataset = make_records(41, num_clients=3)
    parts = [client_partition(dataset, client, ledger) for client in range(3)]
    sizes = [part._count_records() for part in parts]
    assert max(sizes) - min(sizes) <= 1
    together = np.concatenate([part._images for part in parts])
    assert sorted(together.tolist()) == sorted(dataset._images.tolist())
    assert parts[0]._images.tolist() != dataset._images[::3].tolist()
    order = load_client_order(ledger, 41)
    assert torch.equal(load_client_order(ledger, 41), order)
    assert sorted(load_client_order(ledger, 42).tolist()) == list(range(42))  # drawn anew
    client_ids = np.arange(41) // 20
    dataset = make_records(41, num_clients=3, client_ids=client_ids)
    for client in range(3):
        part = client_partition(dataset, client, ledger)
        assert np.array_equal(part._images, dataset._images[client_ids == client])
        assert (part.spec.size, part.spec.num_clients) == (None, None)


# Sums that float64 could not hold


def test_noise_is_added_to_integers_that_float64_cannot_hold():
    total = 2**53 + torch.arange(1, 200, 2)
    noise = (SecretRandom(1).normal((100,)) * 2.0**20).round().long()
    exact = [int(value + more) * 2.0**-20 for value, more in zip(total, noise, strict=True)]
    assert add_noise(total, 1.0, 2.0**-20, SecretRandom(1)).tolist() == exact
    assert add_noise(total.double(), 1.0, 2.0**-20, SecretRandom(1)).tolist() != exact


def test_a_large_sum_is_the_small_one(dataset, ledger, monkeypatch):
    sums = []
    for max_exact in (clipping.MAX_EXACT_SUM, 0.0):
        monkeypatch.setattr(clipping, "MAX_EXACT_SUM", max_exact)
        gate = make_gate(dataset, ledger, Stage("it", "sum", 0.0))
        sums.append(gate.sum("it", flatten_image, clip_norm=3.0, per_class=True))
    assert torch.equal(*sums)
    assert sums[1].dtype == torch.float64


def test_sums_that_are_not_exact_are_refused(dataset, ledger, monkeypatch):
    monkeypatch.setattr(gate_module, "MAX_SUM_RECORDS", 7)
    with pytest.raises(PlanError, match="not exact"):
        ask(make_gate(dataset, ledger, SUM))
    monkeypatch.setattr(shards, "MAX_SHARDS", 3)
    with pytest.raises(PlanError, match="not exact"):
        make_gate(dataset, ledger).split_into_shards(4, {"it": torch.zeros(4)})
    monkeypatch.setattr(clipping, "MAX_EXACT_SUM", 2.0**20)
    with pytest.raises(PlanError, match="not exact"):
        ask_blocks(make_gate(dataset, ledger, BLOCKS))
    assert ledger.entries() == []
    with pytest.raises(SettingError, match="microbatch"):
        Runtime("cpu", MAX_CHUNK_SIZE + 1)


# Errors


@pytest.mark.parametrize(
    ("run", "error_type", "advice"),
    [
        (ask_sample, ValueError, "Try it on public data"),
        (ask_sample, MemoryError, "fewer records at a time"),
        (ask, KeyError, "Try it on public data"),
    ],
)
def test_errors_are_hidden_and_close_the_gate(dataset, ledger, run, error_type, advice):
    """A failure may depend on the records: it is one bit, given once, and records were read."""
    calls = []

    def fail(*record):
        calls.append(1)
        if run is ask and len(calls) == 1:
            return record[0]  # of the black image that the shape is taken from
        raise error_type("secret 0.123")

    stage = SUM if run is ask else SAMPLE
    gate = make_gate(dataset, ledger, stage, Stage("more", "sum", 1.0))
    message = f"^A query failed on the secret side with {error_type.__name__}\\. .*{advice}"
    with pytest.raises(QueryError, match=message) as caught:
        run(gate, fail)
    assert "secret 0" not in "".join(traceback.format_exception(caught.value, chain=True))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    with pytest.raises(PlanError):
        ask(gate, name="more")
    assert list_kinds(ledger) == ["reserve", "ask"]


def test_errors_on_the_public_image_keep_their_text_and_cost_nothing(dataset, ledger):
    gate = make_gate(dataset, ledger, SUM)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        ask(gate, lambda image, label: torch.ones(2, 3) @ image.flatten())
    assert ledger.entries() == []


@pytest.mark.parametrize("value", [3.5, None, (torch.ones(2),), torch.ones(3), torch.ones(1, 2)])
def test_a_value_of_another_shape_closes_the_gate(dataset, ledger, value):
    """Its shape may depend on the records: it is seen once."""
    gate = make_gate(dataset, ledger, Stage("it", "query_sample", 1.0, 2))
    with pytest.raises(QueryError, match="declared shape"):
        ask_sample(gate, lambda records: value, shape=(2,))
    with pytest.raises(PlanError, match="no stage"):
        ask_sample(gate, lambda records: torch.ones(2), shape=(2,))


def test_records_without_a_guarantee_cost_an_infinite_epsilon(dataset, ledger):
    class TwoProcesses(SingleProcess):
        world_size = 2

    stage = Stage("it", "sum_over_shards", 0.0)
    gate = make_gate(dataset, ledger, stage, process_group=TwoProcesses())
    with pytest.raises(PlanError, match="without torchrun"):
        gate.read_without_guarantee("no proof")
    assert ledger.entries() == []
    ledger.set_limit(Budget(100.0))
    gate = make_gate(dataset, ledger)
    with pytest.raises(BudgetError):
        gate.read_without_guarantee("no proof")
    assert gate.no_guarantee_reason == ""
    ledger.set_limit(Budget(math.inf))
    records = gate.read_without_guarantee("condensation has no proof")
    assert isinstance(records, Records)
    assert records.images.shape == (8, 1, 2, 2)
    assert gate.no_guarantee_reason == "condensation has no proof"
    assert ledger.compute_spent_cost().epsilon(1e-5) == math.inf


# Charges, marks and crashes


def test_the_charge_comes_before_the_records(dataset, ledger, monkeypatch):
    """Charge and mark are on disk when the first record is read; the digest follows the answer."""
    reads = watch_reads(monkeypatch, lambda indices: list_kinds(Ledger(ledger.path)))
    ask(make_gate(dataset, ledger, SUM))
    assert reads == [["reserve", "ask"]]
    assert list_kinds(ledger) == ["reserve", "ask", "commit"]


def test_a_channel_consumes_its_plan(ledger):
    channel = Laplace.calibrate(1.0, projection=Projection(shape=(1, 1, 2)))
    stages = channel.plan().stages
    gate = make_gate(SensitiveTable(np.zeros((3, 2))), ledger, *stages, neighbours=LOCAL)
    assert gate.privatize(channel).shape == (3, 2)
    assert not any(gate.count_remaining_queries(stage.name) for stage in stages)
    with pytest.raises(BudgetError, match="used up"):
        gate.privatize(channel)


def test_a_long_stage_is_marked_in_strides(dataset, ledger):
    gate = make_gate(dataset, ledger, Stage("it", "sum", 0.0, 3 * MARKS_PER_STAGE + 2))
    marks = []
    for _ in range(7):
        ask(gate)
        marks.append(list_marks(ledger))
    strides = [(0, 2), (3, 5), (6, 8)]
    assert marks == [strides[: 1 + step // 3] for step in range(7)]


def test_the_last_stride_ends_with_the_stage(dataset, ledger, monkeypatch):
    monkeypatch.setattr(answers, "MARKS_PER_STAGE", 2)
    monkeypatch.setattr(answers, "MAX_STORED_RESULTS", 0)
    gate = make_gate(dataset, ledger, Stage("it", "sum", 0.0, 7))
    for _ in range(7):
        ask(gate)
    assert list_marks(ledger) == [(0, 2), (3, 5), (6, 6)]


def test_stored_answers_are_replayed_without_a_new_charge(dataset, ledger, tmp_path):
    stages = (Stage("it", "sum", 1.0, 3), Stage("rows", "rows", 1.0))
    first = make_gate(dataset, ledger, *stages, folder=tmp_path / "runs" / "first")
    given = [ask(first) for _ in range(2)]
    again = make_gate(dataset, ledger, *stages, folder=tmp_path / "runs" / "first")
    assert again.ticket == first.ticket
    assert again.count_remaining_queries("it") == 3  # all can be replayed
    before = list_kinds(ledger)
    assert all(torch.equal(ask(again), value) for value in given)
    assert list_kinds(ledger) == before
    assert not torch.equal(ask(again), given[0])
    again.rows("rows", flatten_image, clip_norm=1.0)
    assert list_kinds(ledger).count("reserve") == 1
    with pytest.raises(BudgetError, match="used up"):
        ask(again)


def test_a_crash_before_the_digest_of_an_answer_heals(dataset, ledger, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(make_gate(dataset, ledger, SUM, folder=tmp_path))
    value = ask(make_gate(dataset, ledger, SUM, folder=tmp_path))
    assert torch.equal(value, load_file(tmp_path / "it-0.safetensors")["value"])
    assert list_kinds(ledger) == ["reserve", "ask", "commit"]


ZERO_ANSWER = save({"value": torch.zeros(4, dtype=torch.float64)})


@pytest.mark.parametrize("content", [b"", b"not a tensor file", ZERO_ANSWER, None])
def test_an_altered_or_lost_answer_ends_the_run(dataset, ledger, tmp_path, content):
    ask(make_gate(dataset, ledger, SUM, folder=tmp_path))
    file = tmp_path / "it-0.safetensors"
    file.unlink() if content is None else file.write_bytes(content)
    error = BudgetError if content is None else ReleaseError
    with pytest.raises(error, match="Start a new run"):
        ask(make_gate(dataset, ledger, SUM, folder=tmp_path))


def test_an_answer_without_a_ticket_is_not_given(dataset, ledger, tmp_path):
    """A run that never paid does not get what another one left in its folder."""
    ask(make_gate(dataset, ledger, SUM, folder=tmp_path))
    (tmp_path / "ticket").unlink()
    before = (tmp_path / "it-0.safetensors").read_bytes()
    ask(make_gate(dataset, ledger, SUM, folder=tmp_path))
    assert list_kinds(ledger).count("reserve") == 2
    assert (tmp_path / "it-0.safetensors").read_bytes() != before


def test_a_query_that_was_interrupted_is_not_run_again(dataset, ledger):
    """Else an interrupt that depends on a record would read it for nothing."""
    gate = make_gate(dataset, ledger, Stage("it", "query_sample", 1.0, 2))
    with pytest.raises(KeyboardInterrupt):
        ask_sample(gate, interrupt)
    with pytest.raises(BudgetError, match="none is given twice"):
        ask_sample(gate, interrupt)
    assert list_kinds(ledger) == ["reserve", "ask"]


def test_a_long_stage_keeps_nothing_and_goes_on_after_its_marks(dataset, ledger, tmp_path):
    stage = Stage("it", "sum", 0.0, steps := 3 * MARKS_PER_STAGE)
    ask(make_gate(dataset, ledger, stage, folder=tmp_path))
    assert list(tmp_path.glob("it-*")) == []
    again = make_gate(dataset, ledger, stage, folder=tmp_path)
    # A stride of three was marked and one answer of it was given: two are lost for good.
    assert again.count_remaining_queries("it") == steps - 3
    ask(again)
    assert again.count_remaining_queries("it") == steps - 4
    assert list_kinds(ledger) == ["reserve", "ask", "ask"]
    assert list_marks(ledger) == [(0, 2), (3, 5)]


def test_a_ticket_is_for_its_plan_method_and_ledger_alone(dataset, ledger, tmp_path):
    """Else a run beside another ledger, or under a dearer plan, would be charged to nobody."""
    stage = Stage("it", "sum", 1.0, 2)
    ask(make_gate(dataset, ledger, stage, folder=tmp_path / "run", method="merf"))
    for other, other_ledger, method in (
        (stage, Ledger(tmp_path / "other.jsonl"), "merf"),
        (Stage("it", "sum", 0.5, 2), ledger, "merf"),
        (Stage("it", "sum", 1.0, 3), ledger, "merf"),
        (stage, ledger, "other"),
    ):
        with pytest.raises(LedgerError, match="charged to another ledger"):
            make_gate(dataset, other_ledger, other, folder=tmp_path / "run", method=method)
    make_gate(dataset, ledger, stage, folder=tmp_path / "run", method="merf")


def test_two_gates_pay_twice(dataset, ledger):
    for _ in range(2):
        ask(make_gate(dataset, ledger, SUM))
    assert list_kinds(ledger).count("reserve") == 2
    assert ledger.compute_spent_cost().mu == pytest.approx(math.sqrt(2))


def test_a_plan_above_its_budget_opens_no_gate(dataset, ledger):
    plan = Plan((Stage("means", "sum", 0.5),), Neighbours.REPLACE)
    budget = Budget(plan.cost().epsilon(1e-5) * 0.99, 1e-5)
    with pytest.raises(BudgetError, match="costs more than the budget of this run"):
        Gate(dataset, plan, ledger, budget, runtime=Runtime("cpu"))
    assert ledger.entries() == []
    Gate(dataset, plan, ledger, Budget(budget.epsilon * 1.02, 1e-5), runtime=Runtime("cpu"))
