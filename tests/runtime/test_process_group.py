"""Shards in several processes: the same answers to the bit, one ledger, one who writes, and an end in one line when one of them dies.

A warm process imports this file and forks: each fork is one process of a run, as torchrun would start it, on CPUs.
"""

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fakes import FreePlan, NullLedger
from support.fork_server import TORCHRUN, Forks

from privot.components.sharded_critics import ShardedCritics
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PlanError, PrivotError, SettingError
from privot.methods import make_method
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.release.verify import verify
from privot.runtime import Runtime, Streams, ignore_progress
from privot.runtime.process_group import (
    ProcessGroup,
    SingleProcess,
    join_process_group,
    read_torchrun_rank,
)
from privot.synthesis import synthesize

# 7 shards of 8 records: no number of processes divides them
CLASSES = 2
COUNT = 60
CRITICS = 7
TINY = {
    "num_critics": CRITICS,
    "steps": 4,
    "batch_size": 5,
    "critics_per_step": 3,
    "critic_steps": 2,
    "warmup_rounds": 1,
    "critic_batch_size": 4,
    "critic_channels": 2,
    "latent_dim": 3,
    "generator_channels": 2,
}
CHANGED = 9  # a record of shard 2


# One process of a run: what a fork does, given its folder


def make_records(side=8):
    images = np.random.default_rng(0).random((COUNT, 1, side, side), np.float32)
    return images, np.arange(COUNT) // CRITICS % CLASSES


def seal_records(images, labels):
    return Sensitive(images, labels, Spec(images.shape[1:], CLASSES), name="records")


def make_gate(folder, method, noise=2.0, records=None, **settings):
    """A method and a gate with seeded noise: then one process and several can be compared."""
    made = make_method(method, {**TINY, "noise_multiplier": noise, **settings})
    dataset = seal_records(*(records or make_records()))
    plan = made.plan(dataset.spec)
    gate = Gate(
        dataset,
        FreePlan(plan.stages, plan.neighbours),
        Ledger(folder / "x.jsonl"),
        NullLedger(),
        runtime=Runtime("cpu"),
        insecure_seed=5,
        process_group=join_process_group(torch.device("cpu"), method),
    )
    return made, gate


def get_rank():
    return int(os.environ.get("RANK", 0))


def save(folder, name, tensors):
    """For the test to read; the only thing that a follower writes, and by its own hand."""
    copies = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    save_file(copies, folder / f"{name}-{get_rank()}.safetensors")


def fit(folder, method, side=8, **settings):
    """A whole run behind a seeded gate: all answers, what was made, and what the shards came to. Images of 14 pixels a side are moved."""
    method, gate = make_gate(folder, method, records=make_records(side), **settings)
    answers = []
    operation = gate.plan.stages[0].operation
    query = getattr(gate, operation)

    def watch(*args, **more):
        answers.append(query(*args, **more))
        return answers[-1]

    setattr(gate, operation, watch)
    group = gate._process_group
    streams = Streams(0, Runtime("cpu"), process_group=group)
    made = method.fit(gate, streams, ignore_progress)
    states = {name: group.gather(value, CRITICS) for name, value in gate._shards[1].items()}
    named = {f"answer {number}": answer for number, answer in enumerate(answers)}
    save(folder, "made", {**named, **made.tensors})
    save(folder, "states", states)


def train(folder, is_changed=False):
    """What every process holds after updates, with a record replaced or without."""
    images, labels = make_records(side=14)
    if is_changed:
        images[CHANGED] = 1 - images[CHANGED]
    _, gate = make_gate(folder, "gs-wgan", records=(images, labels))
    gate._get_secret_order = lambda: torch.arange(len(labels))  # neighbours have one order
    rng = torch.Generator().manual_seed(1)
    first = torch.Generator().manual_seed(0)
    team = ShardedCritics(gate, first, rng, CRITICS, 2, 4, 1e-3, 1.0, max_shift=1)
    team.initialize(1, ignore_progress)
    team.train(torch.rand(CLASSES, 3, 1, 14, 14, generator=rng), torch.tensor([2, 5, 6]), 2, 5)
    save(folder, "held", gate._shards[1] | {"images": gate._shards[0].images})


def get_large_row(state, row):
    return state["it"] * 100 + row


def query_rows(folder, planted=False):
    """Rows without noise, each the answer of one critic, clipped to 1; with a planted bug every process answers for all rows."""
    if planted:
        locate = ProcessGroup.locate_shards
        ProcessGroup.locate_shards = lambda self, shards: (
            locate(self, shards)[0],
            torch.ones(len(shards)),
        )
    _, gate = make_gate(folder, "gs-wgan", noise=0.0)
    gate.split_into_shards(CRITICS, {"it": torch.eye(CRITICS)})
    rows = gate.query_random_shards("gradients", get_large_row, torch.zeros(20), clip_norm=1.0)
    save(folder, "rows", {"rows": rows})


def run_whole(folder, killed_at=None, resume=False):
    """A run with a release; ``killed_at`` ends the last process there."""
    updates = []
    steps = []
    update = Gate.update_shards

    def count_updates(self, *given, **more):
        updates.append(1)
        if killed_at == len(updates) and get_rank() == int(os.environ["WORLD_SIZE"]) - 1:
            os._exit(9)
        return update(self, *given, **more)

    def progress(stage, step, of, **more):
        if stage.startswith("training"):
            steps.append(step)

    Gate.update_shards = count_updates
    release = synthesize(
        seal_records(*make_records()),
        make_method("gs-wgan", TINY | {"steps": 20, "batch_size": 4, "noise_multiplier": 0.0}),
        out=folder / "out",
        ledger=folder / "x.jsonl",
        runtime=Runtime("cpu"),
        resume=resume,
        progress=progress,
    )
    save(folder, "release", {**release.artifact.tensors, "steps": torch.tensor(steps or [0])})


def join_as_another_run(folder):
    join_process_group(torch.device("cpu"), f"run {get_rank()}")


# In the warm process


def run_scene(number, scene, count, folder, port, given):
    """One process of a run: what it writes, by path, and the one line it ends with, are in end-NUMBER.json."""
    folder = Path(folder)
    written = []
    line = ""

    def watch(event, given):
        if event == "open" and isinstance(given[1], str) and set("wax+") & set(given[1]):
            written.append(str(given[0]))

    if count > 1:
        values = (number, count, number, "127.0.0.1", port)
        os.environ |= dict(zip(TORCHRUN, map(str, values), strict=True))
    sys.addaudithook(watch)
    try:
        globals()[scene](folder, **given)
    except PrivotError as error:
        line = f"{type(error).__name__}: {error}"
    written = [path for path in written if not path.endswith(f"-{number}")]
    (folder / f"end-{number}.json").write_text(json.dumps({"line": line, "written": written}))


def warm():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fit(Path(folder), "gs-wgan")  # what is imported late is imported here


# The tests


@pytest.fixture(scope="module")
def forks():
    forks = Forks("runtime.test_process_group")
    yield forks
    forks.close()


@pytest.fixture
def run(forks, tmp_path):
    """``run(scene, count)``: (its folder, the last line of each process); what dies without a line has None."""
    number = itertools.count()

    def run(scene, count, folder=None, **given):
        folder = folder or tmp_path / f"{next(number)}"
        folder.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        forks.do(
            "run_scene",
            times=count,
            scene=scene.__name__,
            count=count,
            folder=folder,
            port=port,
            given=given,
        )
        lines = []
        for rank in range(count):
            file = folder / f"end-{rank}.json"
            end = json.loads(file.read_text()) if file.exists() else {"line": None, "written": []}
            file.unlink(missing_ok=True)
            lines.append(end["line"])
            assert rank == 0 or not end["written"], "followers write nothing"
        return folder, lines

    return run


def load(folder, name, rank=0):
    return load_file(folder / f"{name}-{rank}.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("method", "settings", "count"),
    [
        ("gs-wgan", {"side": 14}, 3),
        pytest.param("gs-wgan", {"routing": "step"}, 2, marks=pytest.mark.slow),
        pytest.param("g-pate", {}, 3, marks=pytest.mark.slow),
    ],
)
def test_several_processes_give_the_answers_of_one_to_the_bit(run, method, settings, count):
    alone, lines = run(fit, 1, method=method, **settings)
    made = load(alone, "made")
    assert lines == [""]
    assert sum(name.startswith("answer") for name in made) == TINY["steps"]
    folder, lines = run(fit, count, method=method, **settings)
    assert lines == [""] * count
    assert same(load(alone, "states"), load(folder, "states"))
    for rank in range(count):  # what the others take for public is the leader's
        assert same(made, load(folder, "made", rank))


def test_a_record_reaches_one_shard_in_one_process(run):
    """Neighbours: of all that the processes hold, one state and one record differ."""
    whole = load(run(train, 1)[0], "held")
    before, after = (run(train, 3, is_changed=is_changed)[0] for is_changed in (False, True))
    for rank in range(3):
        changed = load(after, "held", rank)
        for name, value in load(before, "held", rank).items():
            assert torch.equal(value, whole[name][rank::3])
            differs = (value != changed[name]).flatten(1).any(1).tolist()
            shards = range(rank, rank + 3 * len(value), 3)
            assert differs == [shard == CHANGED % CRITICS for shard in shards], name


def test_a_row_is_the_answer_of_one_critic_whoever_holds_it(run):
    """If all processes answered, a row would have the words of three critics, and a bound of 1 were no bound."""
    rows = [load(run(query_rows, count)[0], "rows")["rows"] for count in (1, 3)]
    assert torch.equal(*rows)
    torch.testing.assert_close(rows[1].norm(dim=1), torch.ones(20, dtype=torch.float64))
    assert (rows[1].count_nonzero(1) == 1).all()
    planted = load(run(query_rows, 3, planted=True)[0], "rows")["rows"]
    assert planted.norm(dim=1).max() > 1.1


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_dead_process_ends_the_run_in_a_line_and_the_charge_stays(run, count):
    """And another number of processes, or one alone, goes on from there."""

    def read_entries(kind):
        entries = map(json.loads, (folder / "x.jsonl").read_text().splitlines())
        return [entry for entry in entries if entry["kind"] == kind]

    folder, lines = run(run_whole, count, killed_at=12)
    assert lines[-1] is None  # it is dead
    for line in lines[:-1]:
        assert line.startswith("ProcessGroupError: Another process of this run has ended")
        assert "\n" not in line
    assert len(read_entries("reserve")) == 1
    # Of 11 updates the first warmed up.
    assert max(entry["last"] for entry in read_entries("ask")) >= 4 * 10 - 1
    assert not (folder / "out").exists()
    count = 5 - count
    folder, lines = run(run_whole, count, folder, resume=True)
    assert lines == [""] * count
    assert len(read_entries("reserve")) == 1
    asked = [(entry["first"], entry["last"]) for entry in read_entries("ask")]
    assert all(later[0] > before[1] for before, later in itertools.pairwise(asked))
    leader, *followers = (load(folder, "release", rank) for rank in range(count))
    assert leader.pop("steps")[0] > 10  # it went on, and did not warm up anew
    for follower in followers:
        assert follower.pop("steps").tolist() == [0]  # no progress
        assert same(leader, follower)
    assert (folder / "out" / "manifest.json").exists()
    assert not list(folder.glob("*.vault*"))


def test_processes_of_different_runs_are_refused(run):
    _, lines = run(join_as_another_run, 2)
    assert all("different settings" in line for line in lines)


@pytest.mark.parametrize("stages", [(), ("sum",), ("sum_over_shards", "sum")])
def test_other_answers_than_of_shards_are_refused(dataset, ledger, stages):
    """And so are methods that read all records."""
    plan = Plan(tuple(Stage(verb, verb, 0.0) for verb in stages), Neighbours.REPLACE)
    with pytest.raises(PlanError, match="without torchrun"):
        Gate(dataset, plan, ledger, NullLedger(), process_group=ProcessGroup(1, 2, False))
    assert not ledger.path.exists()


def set_torchrun(monkeypatch, *values):
    for name, value in zip(TORCHRUN, (*values, "x", "1"), strict=True):
        monkeypatch.setenv(name, value)


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    set_torchrun(monkeypatch, "6", "8", "2")
    assert Runtime().torch_device == torch.device("cuda:2")
    assert chosen == [torch.device("cuda:2")]
    assert Runtime("cpu").torch_device == torch.device("cpu")
    with pytest.raises(SettingError, match="assigns a GPU to each process"):
        Runtime("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SettingError, match="as it has GPUs"):
        Runtime()


def test_without_torchrun_there_is_one(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    assert read_torchrun_rank() == (0, 1, 0)
    assert type(join_process_group(torch.device("cpu"), "run")) is SingleProcess
    set_torchrun(monkeypatch, "0", "1", "0")
    assert read_torchrun_rank() == (0, 1, 0)


@pytest.mark.slow
def test_torchrun_makes_one_release_and_speaks_once(tmp_path):
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2"
    words = "-m privot synthesize digits --method gs-wgan --out out --device cpu"
    settings = TINY | {"steps": 20, "noise_multiplier": 3.0}
    options = [word for item in settings.items() for word in ("--set", "{}={}".format(*item))]
    done = subprocess.run(
        [sys.executable, *torchrun.split(), *words.split(), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "PRIVOT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("guarantee ") == 1
    assert done.stderr.count("training the generator: 20 of 20") == 1
    (ledger,) = (tmp_path / "home" / "ledgers").glob("*.jsonl")
    kinds = [json.loads(line)["kind"] for line in ledger.read_text().splitlines()]
    assert kinds.count("reserve") == 1
    assert verify(tmp_path / "out")["digests"] == "ok"
