"""What only a GPU does, watched on a CPU: records that lie near, sums in one pass, lessons that are replayed. And how a query is run."""

import contextlib
import math
import sys
import types

import numpy as np
import pytest
import torch

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PlanError
from privot.privacy import answers as answers_module
from privot.privacy import clipping as clipping_module
from privot.privacy import secret_side as secret_side_module
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import Fixed, Poisson
from privot.runtime import Runtime, cuda_graphs, process_group
from privot.runtime.cuda_graphs import WARMUP_CALLS, GraphCache

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
FREE = Budget(math.inf)


def pixels(image, label):
    return image.flatten()


def box_of(kind, count=6):
    images = np.random.default_rng(0).integers(0, 256, (count, 1, 2, 2))
    images = images.astype(np.uint8) if kind is np.uint8 else (images / 255).astype(kind)
    return Sensitive(images, np.arange(count) % 2, Spec((1, 2, 2), 2, count))


def gate_for(box, ledger, *stages, relation=REPLACE, **more):
    return Gate(box, Plan(stages, relation), ledger, FREE, **more)


@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("draw", [slice(1, 4), torch.tensor([5, 0, 2])])
def test_records_that_lie_near_are_the_records(ledger, monkeypatch, kind, draw):
    box = box_of(kind)
    size = box._images.size * (1 if kind is np.uint8 else 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * size, 9 * size))
    gate = gate_for(box, ledger, Stage("it", "rows", 0.0))
    far = gate._load_records(draw)
    order = gate._get_secret_order().numpy()
    gate._cached_records = box._copy_to_gpu(torch.device("cpu"), order)
    assert len(gate._cached_records) == 2, "they fit into a quarter"
    near = gate._load_records(draw)
    assert torch.equal(near.images, far.images)
    assert torch.equal(near.labels, far.labels)
    assert near.images.dtype == torch.float32
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * size - 1, 9 * size))
    assert box._copy_to_gpu(torch.device("cpu"), order) == [], (
        "a quarter of what is free is the most"
    )


def test_on_a_cpu_nothing_is_copied_nearer(ledger, monkeypatch):
    monkeypatch.setattr(Sensitive, "_copy_to_gpu", None)
    assert gate_for(box_of(np.uint8), ledger, Stage("it", "rows", 0.0)).rows(
        "it", pixels, clip_norm=9.0
    ).shape == (6, 4)


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(
    ("kind", "there", "by_kernel"),
    [(torch.float32, True, True), (torch.float64, True, False), (torch.float32, False, False)],
)
def test_a_gpu_adds_up_float32_in_one_pass(monkeypatch, kind, there, by_kernel):
    """Whichever way, the total is that of the clipped rows."""
    asked = []

    def steps_summed(parts, factor):
        asked.append(parts.dtype)
        parts, factor = (each.as_subclass(torch.Tensor) for each in (parts, factor))
        return (torch.where(factor[:, None] == 0, 0.0, parts) * factor[:, None]).trunc().sum(0)

    monkeypatch.setitem(
        sys.modules,
        "privot.privacy.kernels.clipped_sum",
        types.SimpleNamespace(sum_truncated_products=steps_summed),
    )
    monkeypatch.setattr(clipping_module, "kernels_available", lambda: there)
    parts = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0), dtype=kind)
    parts[3] = math.nan
    whole = clipping_module.clip_to_grid(parts, 0.7, 2.0**-20).sum(0)
    assert torch.equal(clipping_module.sum_clipped_rows(parts, 0.7, 2.0**-20), whole)
    assert asked == []
    assert torch.equal(
        clipping_module.sum_clipped_rows(parts.as_subclass(OnGpu), 0.7, 2.0**-20).as_subclass(
            torch.Tensor
        ),
        whole,
    )
    assert asked == [torch.float32] * by_kernel


def test_what_was_written_down_is_launched_again_on_new_numbers(monkeypatch):
    """As if on a GPU: while a lesson is written down nothing runs, and later launches read what was given last."""
    total = torch.zeros(())
    writing = []
    graphs = []
    pools = []

    class Graph:
        def __init__(self):
            graphs.append(self)

        def replay(self):
            self.deed()

    @contextlib.contextmanager
    def capture(graph, pool, capture_error_mode):
        writing.append(graph)
        pools.append(pool)
        yield
        writing.pop()

    def lesson(step, factor):
        if writing:
            writing[-1].deed = lambda: total.add_(step * factor)
        else:
            total.add_(step * factor)
        return True

    handles = iter(("pool", "another"))
    monkeypatch.setattr(cuda_graphs.torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda_graphs.torch.cuda, "graph", capture)
    monkeypatch.setattr(cuda_graphs.torch.cuda, "graph_pool_handle", lambda: next(handles))
    again = GraphCache(torch.device("cuda"))
    wanted = 0
    for turn in range(WARMUP_CALLS + 4):
        for factor in (1.0, 3.0):
            assert again(lesson, "it", torch.tensor(float(turn)), factor) is True
            wanted += turn * factor
            assert total == wanted
        assert len(graphs) == 2 * (turn >= WARMUP_CALLS), (
            "written down once for each kind, after the first lessons"
        )
    assert pools == ["pool"] * 2


def test_without_a_gpu_nothing_is_written_down(monkeypatch):
    monkeypatch.setattr(cuda_graphs.torch.cuda, "CUDAGraph", None)
    monkeypatch.setattr(cuda_graphs.torch.cuda, "graph_pool_handle", None)
    total = torch.zeros(())
    again = GraphCache(torch.device("cpu"))
    for _ in range(WARMUP_CALLS + 3):
        again(total.add_, "it", torch.tensor(1.0))
    assert total == WARMUP_CALLS + 3


def test_lessons_are_not_kept_unless_asked_for_after_a_split(ledger):
    for compile in (False, True):
        gate = gate_for(
            box_of(np.uint8),
            ledger,
            Stage("it", "sum_over_shards", 0.0),
            runtime=Runtime("cpu", cuda_graphs=compile),
        )
        gate.split_into_shards(2, {"it": torch.zeros(2)})
        assert (gate._graph_cache is not None) == compile


# How a query is run


def test_cudnn_is_held_to_one_way_while_records_are_seen(box, ledger):
    flags = []
    before = torch.backends.cudnn.benchmark

    def query(records):
        flags.append(
            (
                torch.backends.cudnn.enabled,
                torch.backends.cudnn.benchmark,
                torch.backends.cudnn.deterministic,
            )
        )
        return records.images.sum(0)

    torch.backends.cudnn.benchmark = True
    try:
        gate_for(box, ledger, Stage("it", "query_sample", 0.0)).query_sample(
            "it", query, clip_norm=1.0, shape=(1, 2, 2)
        )
    finally:
        torch.backends.cudnn.benchmark = before
    assert flags == [(True, False, True)]


def test_under_add_remove_every_batch_is_as_long_as_a_portion(box, ledger, monkeypatch):
    """The length of a batch rounds its parts, and must not tell how many were drawn."""
    seen = []
    run = Gate._run_secretly
    monkeypatch.setattr(
        Gate,
        "_run_secretly",
        lambda self, query, *given: (
            seen.append([len(each) for each in given]),
            run(self, query, *given),
        )[1],
    )
    gate = gate_for(
        box,
        ledger,
        Stage("all", "sum", 0.0),
        Stage("some", "sum", 0.0, 5, Poisson(0.4)),
        relation=ADD_REMOVE,
        runtime=Runtime("cpu", 5),
    )
    total = gate.sum("all", pixels, clip_norm=9.0)
    assert torch.allclose(
        total, torch.from_numpy(box._images).flatten(1).double().sum(0), atol=1e-5
    )
    for _ in range(5):
        gate.sum("some", pixels, clip_norm=9.0)
    assert len(seen) >= 7
    assert all(each == [5, 5] for each in seen)


def test_an_empty_draw_does_not_reach_the_query(box, ledger):
    gate = gate_for(
        box, ledger, Stage("it", "query_sample", 0.0, 1, Poisson(1e-15)), relation=ADD_REMOVE
    )
    value = gate.query_sample(
        "it", lambda records: records.images.flatten().max()[None], clip_norm=1.0, shape=(1,)
    )  # of none there is no largest
    assert value.tolist() == [0.0]


@pytest.mark.parametrize("relation", [REPLACE, ADD_REMOVE])
def test_no_row_is_longer_than_the_bound_to_the_last_bit(relation):
    draw = torch.Generator().manual_seed(0)
    rows = (
        torch.randn(200, 30, generator=draw, dtype=torch.float64)
        * torch.logspace(-2, 3, 200)[:, None]
    )
    edge = torch.zeros(3, 30, dtype=torch.float64)
    edge[:, 0] = torch.tensor([0.7 * (1 + 5e-13), 0.7 * (1 - 5e-13), 0.7])
    clipped = clipping_module.clip_rows(torch.cat([rows, edge]), 0.7)
    assert clipped.norm(dim=1).max() <= 0.7
    assert torch.allclose(
        clipped.norm(dim=1), torch.cat([rows, edge]).norm(dim=1).clamp(max=0.7), rtol=1e-11
    )


@pytest.mark.parametrize(("slices", "radius"), [(1, 0.4), (50, 3.0)])
def test_blocks_are_bounded_by_the_frame_and_the_rounding_of_each_slice(
    ledger, monkeypatch, slices, radius
):
    """Never under 2 R sigma_max(frame), with half a step of the grid a slice on top, and hardly above it."""
    box = Sensitive(
        np.random.default_rng(0).random((6, 1, 2, 2)),
        np.arange(6) % 2,
        Spec((1, 2, 2), 2, 6, (3, 3)),
    )
    stds = []
    plain = secret_side_module.add_noise
    monkeypatch.setattr(
        secret_side_module,
        "add_noise",
        lambda steps, std, *more: (stds.append((std, more[0])), plain(steps, std, *more))[1],
    )
    frame = torch.randn(slices, 4, generator=torch.Generator().manual_seed(1))
    gate_for(box, ledger, Stage("it", "sorted_blocks", 1.0), insecure_seed=0).sorted_blocks(
        "it", pixels, frame=frame, num_blocks=1, clip_norm=radius
    )
    ((std, grid),) = stds
    exact = 2 * (
        radius * float(torch.linalg.svdvals(frame.double())[0]) + grid * math.sqrt(slices) / 2
    )
    assert exact <= std <= exact * (1 + 3e-9)


def test_a_folder_of_a_run_is_made_and_may_be_there(box, ledger, tmp_path):
    stage = Stage("it", "sum", 1.0)
    gate_for(box, ledger, stage, folder=tmp_path / "runs" / "first").sum(
        "it", pixels, clip_norm=1.0
    )
    (tmp_path / "second").mkdir()
    gate_for(box, ledger, stage, folder=tmp_path / "second").sum("it", pixels, clip_norm=1.0)
    assert (tmp_path / "runs" / "first" / "ticket").read_text() == "0"
    assert (tmp_path / "second" / "it-0.safetensors").exists()


def test_an_answer_without_a_ticket_is_nobody_s(box, ledger, tmp_path):
    """A file that lies where answers are kept, of a run that never paid, is not given out."""
    stage = Stage("it", "sum", 1.0)
    gate_for(box, ledger, stage, folder=tmp_path).sum("it", pixels, clip_norm=1.0)
    (tmp_path / "ticket").unlink()
    before = (tmp_path / "it-0.safetensors").read_bytes()
    gate_for(box, ledger, stage, folder=tmp_path).sum("it", pixels, clip_norm=1.0)
    assert [each["kind"] for each in ledger.entries()].count("reserve") == 2
    assert (tmp_path / "it-0.safetensors").read_bytes() != before


def test_a_stride_is_marked_when_the_one_before_is_used_up(box, ledger):
    gate = gate_for(box, ledger, Stage("it", "sum", 0.0, 3 * answers_module.MARKS_PER_STAGE))
    for _ in range(3):
        gate.sum("it", pixels, clip_norm=1.0)
    assert [(each["first"], each["last"]) for each in ledger.entries()[1:]] == [(0, 2)]


def test_one_shard_and_states_that_nobody_stored(box, ledger):
    gate = gate_for(box, ledger, Stage("it", "sum_over_shards", 0.0))
    gate.split_into_shards(1, {"it": torch.zeros(1, 3)})
    assert (
        gate.sum_over_shards("it", lambda state: state["it"] + 1, clip_norm=9.0).tolist()
        == [1.0] * 3
    )
    gate.delete_shard_states()
    gate.delete_shard_states()  # nothing was stored, and nothing is there to complain of


@pytest.mark.parametrize(
    ("relation", "most", "fine"),
    [(CLIENT, 1, True), (CLIENT, 0, False), (REPLACE, -1, False), (REPLACE, 0, True)],
)
def test_the_number_of_records_that_shards_show(ledger, relation, most, fine):
    box = Sensitive(np.zeros((6, 1, 2, 2)), np.zeros(6, int), Spec((1, 2, 2), 1, num_clients=3))
    gate = gate_for(box, ledger, Stage("it", "query_clients", 0.0), relation=relation)
    if fine:
        gate.split_into_shards(3, {"it": torch.zeros(3)}, most)
    else:
        with pytest.raises(PlanError):
            gate.split_into_shards(3, {"it": torch.zeros(3)}, most)
        assert ledger.entries() == []


def test_a_draw_of_a_declared_number_reads_no_more(ledger):
    gate = gate_for(
        box_of(np.uint8), ledger, Stage("it", "sum", 0.0, 1, Fixed(2, 6)), runtime=Runtime("cpu", 1)
    )
    assert gate.sum("it", lambda image, label: image.new_ones(1), clip_norm=9.0).item() == 2.0


# Processes that find one another


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in (
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "nowhere"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    "error", [RuntimeError("connection to 10.0.0.1 refused"), ValueError("port")]
)
def test_others_that_cannot_be_found_are_told_in_a_line(torchrun, error):
    def fails(*given, **more):
        raise error

    torchrun.setattr(torch.distributed, "is_initialized", lambda: False)
    torchrun.setattr(torch.distributed, "init_process_group", fails)
    with pytest.raises(
        process_group.ProcessGroupError, match=rf"cannot be reached \({type(error).__name__}\)"
    ):
        process_group.join_process_group(torch.device("cpu"), "run")


def test_wires_that_were_there_before_are_left_as_they_are(torchrun):
    """Whoever laid them takes them up again."""
    torchrun.setattr(torch.distributed, "is_initialized", lambda: True)
    torchrun.setattr(torch.distributed, "init_process_group", None)
    torchrun.setattr(torch.distributed, "broadcast", lambda value, source: None)
    torchrun.setattr(torch.distributed, "all_reduce", lambda value, kind: value.zero_())
    torchrun.setattr(torch.distributed, "destroy_process_group", None)
    found = process_group.join_process_group(torch.device("cpu"), "run")
    assert (found.rank, found.world_size, found.is_follower) == (1, 2, True)
    found.close()
