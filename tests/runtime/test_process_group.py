"""Shards in several processes: the same answers to the bit, one ledger, one who writes, and an end in one line when one of them dies.

Run as a script this file is a warm process that forks: each fork is one process of a run, as torchrun would start it, on CPUs.
"""

import contextlib
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

TESTS = Path(__file__).parents[1]
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
MOVED = 9  # a record of shard 2


# One process of a run: what a fork does, given its folder


def records(count=COUNT, side=8):
    rng = np.random.default_rng(0)
    return rng.random((count, 1, side, side), np.float32), np.arange(count) // CRITICS % CLASSES


def box_of(images, labels):
    from privot.data.dataset import Sensitive
    from privot.data.spec import Spec

    return Sensitive(images, labels, Spec(images.shape[1:], CLASSES), name="box")


def gate_for(folder, method, noise=2.0, critics=CRITICS, given=None, run=None, **settings):
    """A gate with seeded noise: then one process and several can be compared."""
    from support.fakes import FreePlan, NullLedger

    from privot.methods import make_method
    from privot.privacy.gate import Gate
    from privot.privacy.ledger import Ledger
    from privot.runtime import Runtime
    from privot.runtime.process_group import join_process_group

    maker = make_method(
        method, {**TINY, "num_critics": critics, "noise_multiplier": noise, **settings}
    )
    box = box_of(*(given or records()))
    plan = maker.plan(box.spec)
    how = {
        "runtime": Runtime("cpu"),
        "insecure_seed": 5,
        "process_group": join_process_group(torch.device("cpu"), method),
    }
    how["folder"] = None if run is None or how["process_group"].is_follower else folder / run
    return maker, Gate(
        box, FreePlan(plan.stages, plan.neighbours), Ledger(folder / "x.jsonl"), NullLedger(), **how
    )


def kept(folder, name, tensors):
    """For the test to read; the only thing that a follower writes, and by its own hand."""
    save_file(
        {key: value.detach().contiguous().clone() for key, value in tensors.items()},
        folder / f"{name}-{rank()}.safetensors",
    )


def rank():
    return int(os.environ.get("RANK", 0))


def fitted(folder, method, side=8, **settings):
    """A whole run behind a seeded gate: all answers, what was made, and what the shards came to. Images of 14 pixels a side are moved."""
    from privot.runtime import Runtime, Streams, ignore_progress

    maker, gate = gate_for(folder, method, given=records(side=side), **settings)
    answers = []
    verb = "sum_over_shards" if method == "g-pate" else "query_random_shards"
    ask = getattr(gate, verb)
    setattr(
        gate, verb, lambda *given, **more: (answers.append(ask(*given, **more)), answers[-1])[1]
    )
    made = maker.fit(
        gate, Streams(0, Runtime("cpu"), process_group=gate._process_group), ignore_progress
    )
    states = {
        name: gate._process_group.gather(value, CRITICS) for name, value in gate._shards[1].items()
    }
    kept(
        folder, "made", {**{f"answer {n}": each for n, each in enumerate(answers)}, **made.tensors}
    )
    kept(folder, "states", states)


def taught(folder, moved=False):
    """What every process holds after lessons, with a record replaced or without."""
    from privot.components.sharded_critics import ShardedCritics
    from privot.runtime import ignore_progress

    images, labels = records(side=14)
    if moved:
        images[MOVED] = 1 - images[MOVED]
    _, gate = gate_for(folder, "gs-wgan", given=(images, labels))
    gate._get_secret_order = lambda: torch.arange(
        len(labels)
    )  # neighbours are compared given one order
    draws = torch.Generator().manual_seed(1)
    team = ShardedCritics(
        gate, torch.Generator().manual_seed(0), draws, CRITICS, 2, 4, 1e-3, 1.0, max_shift=1
    )
    team.initialize(1, ignore_progress)
    team.train(torch.rand(CLASSES, 3, 1, 14, 14, generator=draws), torch.tensor([2, 5, 6]), 2, 5)
    kept(folder, "held", gate._shards[1] | {"images": gate._shards[0].images})


def big(state, row):
    return state["it"] * 100 + row


def routed(folder, planted=False):
    """Rows without noise, each the word of one critic, clipped to 1; with a planted bug every process answers for all rows."""
    from privot.runtime.process_group import ProcessGroup

    if planted:
        asked = ProcessGroup.locate_shards
        ProcessGroup.locate_shards = lambda self, shards: (
            asked(self, shards)[0],
            torch.ones(len(shards)),
        )
    _, gate = gate_for(folder, "gs-wgan", noise=0.0)
    gate.split_into_shards(CRITICS, {"it": torch.eye(CRITICS)})
    kept(
        folder,
        "rows",
        {"rows": gate.query_random_shards("gradients", big, torch.zeros(20), clip_norm=1.0)},
    )


def polled(folder, times):
    """A short stage, whose answers are kept for a run that goes on."""
    _, gate = gate_for(folder, "g-pate", run="run")
    gate.split_into_shards(CRITICS, {"it": torch.eye(CRITICS)})
    kept(
        folder,
        "polled",
        {
            str(turn): gate.sum_over_shards(
                "sum_over_shards", lambda state: state["it"], clip_norm=1.0
            )
            for turn in range(times)
        },
    )


def synthesized(folder, killed_at=None, resume=False, noise=0.0, method="gs-wgan"):
    """The top, with a release; ``killed_at`` ends the last process there."""
    from privot.methods import make_method
    from privot.privacy.gate import Gate
    from privot.runtime import Runtime
    from privot.synthesis import synthesize

    seen = []
    update = Gate.update_shards

    def counted(self, *given, **more):
        seen.append(1)
        if killed_at == len(seen) and rank() == int(os.environ["WORLD_SIZE"]) - 1:
            os._exit(9)
        return update(self, *given, **more)

    Gate.update_shards = counted
    steps = []
    release = synthesize(
        box_of(*records()),
        make_method(method, {**TINY, "steps": 20, "batch_size": 4, "noise_multiplier": noise}),
        out=folder / "out",
        ledger=folder / "x.jsonl",
        runtime=Runtime("cpu"),
        resume=resume,
        progress=lambda stage, step, of, **more: steps.append((stage, step)),
    )
    tensors = dict(sorted(release.artifact.tensors.items()))
    kept(
        folder,
        "release",
        tensors
        | {
            "steps": torch.tensor(
                [step for stage, step in steps if stage.startswith("training")] or [0]
            )
        },
    )


def failing(images, labels, state):
    if rank() == 1:
        raise ValueError("secret 0.123")
    return state


def failed(folder):
    """A query that fails on the shards of one process alone."""
    _, gate = gate_for(folder, "gs-wgan")
    gate.split_into_shards(CRITICS, {"it": torch.zeros(CRITICS)})
    try:
        gate.update_shards(failing)
    finally:
        (folder / f"closed-{rank()}").write_text(str(len(gate._stages)))


def refused(folder, why):
    """What is refused before anything is charged."""
    from privot.runtime.process_group import join_process_group

    if why == "settings":
        join_process_group(torch.device("cpu"), f"run {rank()}")
    elif why == "shards":
        gate_for(folder, "gs-wgan", critics=1)[1].split_into_shards(1, {"it": torch.zeros(1)})
    elif why == "records":
        gate_for(folder, "gs-wgan", given=records(COUNT + rank()))[1].split_into_shards(
            CRITICS, {"it": torch.zeros(CRITICS)}
        )


# The warm process


def child(order, number):
    """One fork: what it writes, by path, and the one line it ends with."""
    folder = Path(order["folder"])
    written = []
    line = ""

    def hook(event, given):
        if (
            event == "open"
            and isinstance(given[1], str)
            and any(letter in given[1] for letter in "wax+")
        ):
            written.append(str(given[0]))

    os.dup2(2, 1)
    if order["count"] > 1:
        os.environ |= {
            "RANK": str(number),
            "WORLD_SIZE": str(order["count"]),
            "LOCAL_RANK": str(number),
        }
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(order["port"])}
    sys.addaudithook(hook)
    from privot.errors import PrivotError

    try:
        globals()[order["scene"]](folder, **order["given"])
    except PrivotError as error:
        line = f"{type(error).__name__}: {error}"
    own = [each for each in written if not each.endswith(f"-{number}")]
    (folder / f"end-{number}.json").write_text(json.dumps({"line": line, "written": own}))


def serve():
    import privot.components.sharded_critics
    import privot.synthesis  # noqa: F401 (imported once, for all forks)

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fitted(Path(folder), "gs-wgan")  # what is imported late is imported here
    for line in sys.stdin:
        order = json.loads(line)
        children = []
        for number in range(order["count"]):
            if not (fork := os.fork()):
                code = 1
                try:
                    child(order, number)
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(fork)
        codes = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    serve()


# The tests


@pytest.fixture(scope="module")
def forks():
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
    )
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


@pytest.fixture
def run(forks, tmp_path):
    """``run(scene, count)``: (its folder, the last line of each process); what dies without a line has None."""
    number = itertools.count()

    def go(scene, count, folder=None, **given):
        folder = folder or tmp_path / f"{scene}-{next(number)}"
        folder.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        forks.stdin.write(
            json.dumps(
                {
                    "scene": scene,
                    "count": count,
                    "folder": str(folder),
                    "given": given,
                    "port": port,
                }
            )
            + "\n"
        )
        forks.stdin.flush()
        json.loads(forks.stdout.readline())
        ends = []
        for each in range(count):
            with contextlib.suppress(FileNotFoundError):
                ends.append(json.loads((file := folder / f"end-{each}.json").read_text()))
                file.unlink()
                assert each == 0 or not ends[-1]["written"]  # followers write nothing
                continue
            ends.append({"line": None})
        return folder, [each["line"] for each in ends]

    return go


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


@pytest.mark.parametrize(
    ("method", "settings", "counts"),
    [("gs-wgan", {"side": 14}, (3,)), ("gs-wgan", {"routing": "step"}, (2,)), ("g-pate", {}, (3,))],
)
def test_several_processes_give_the_answers_of_one_to_the_bit(run, method, settings, counts):
    folder, lines = run("fitted", 1, method=method, **settings)
    made, states = (load_file(folder / f"{name}-0.safetensors") for name in ("made", "states"))
    assert lines == [""]
    assert sum(name.startswith("answer") for name in made) == TINY["steps"]
    for count in counts:
        folder, lines = run("fitted", count, method=method, **settings)
        assert lines == [""] * count
        assert same(states, load_file(folder / "states-0.safetensors"))
        for each in range(count):  # what the others take for public is the leader's
            assert same(made, load_file(folder / f"made-{each}.safetensors"))


def test_a_record_reaches_one_shard_in_one_process(run):
    """Neighbours: of all that the processes hold, one state and one record differ."""
    folders = [run("taught", 3, moved=moved)[0] for moved in (False, True)]
    held = [
        [load_file(folder / f"held-{each}.safetensors") for each in range(3)] for folder in folders
    ]
    whole = load_file(run("taught", 1)[0] / "held-0.safetensors")
    for each in range(3):
        for name, value in held[0][each].items():
            assert torch.equal(value, whole[name][each::3])
            moved = (value != held[1][each][name]).flatten(1).any(1).tolist()
            assert moved == [
                each == MOVED % CRITICS % 3 and place == MOVED % CRITICS // 3
                for place in range(len(value))
            ], name


def test_a_row_is_the_word_of_one_critic_whoever_holds_it(run):
    rows = [load_file(run("routed", count)[0] / "rows-0.safetensors")["rows"] for count in (1, 3)]
    assert torch.equal(*rows)
    torch.testing.assert_close(rows[1].norm(dim=1), torch.ones(20, dtype=torch.float64))
    assert (rows[1].count_nonzero(1) == 1).all()


def test_planted_answers_of_all_processes_are_caught(run):
    """Then a row has the words of three critics, and a bound of 1 is no bound."""
    rows = load_file(run("routed", 3, planted=True)[0] / "rows-0.safetensors")["rows"]
    assert rows.norm(dim=1).max() > 1.1


def entries(folder):
    return [json.loads(line) for line in (folder / "x.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_dead_process_ends_the_run_in_a_line_and_the_charge_stays(run, count):
    """And another number of processes, or one alone, goes on from there."""
    folder, lines = run("synthesized", count, killed_at=12)
    assert lines[-1] is None  # it is dead
    for line in lines[:-1]:
        assert line.startswith("ProcessGroupError: Another process of this run has ended")
        assert "\n" not in line
    kinds = [each["kind"] for each in entries(folder)]
    assert kinds.count("reserve") == 1
    taken = max(each["last"] for each in entries(folder) if each["kind"] == "ask")
    assert taken >= 4 * 10 - 1  # of 11 updates the first warmed up
    assert not (folder / "out").exists()
    folder, lines = run("synthesized", 5 - count, folder, resume=True)
    assert lines == [""] * (5 - count)
    asked = [(each["first"], each["last"]) for each in entries(folder) if each["kind"] == "ask"]
    assert [each["kind"] for each in entries(folder)].count("reserve") == 1
    assert all(later[0] > before[1] for before, later in itertools.pairwise(asked))
    made = [load_file(folder / f"release-{each}.safetensors") for each in range(5 - count)]
    assert made[0].pop("steps")[0] > 10  # it went on, and did not warm up anew
    assert all(
        other.pop("steps").tolist() == [0] for other in made[1:]
    )  # followers show no progress
    assert all(same(made[0], other) for other in made)
    assert (folder / "out" / "manifest.json").exists()
    assert not list(folder.glob("*.vault*"))


def test_kept_answers_come_again_to_all(run):
    """A run of two processes that goes on with three: the first answer is not asked anew, and nobody is left behind."""
    folder, lines = run("polled", 2, times=1)
    first = load_file(folder / "polled-0.safetensors")
    before = entries(folder)
    assert lines == [""] * 2
    again, lines = run("polled", 3, folder, times=2)
    assert lines == [""] * 3
    found = [load_file(again / f"polled-{each}.safetensors") for each in range(3)]
    assert all(same(found[0], other) for other in found)
    assert torch.equal(found[0]["0"], first["0"])
    assert entries(folder)[: len(before)] == before
    assert [each["kind"] for each in entries(folder)[len(before) :]] == ["ask", "commit"]


def test_a_query_that_fails_in_one_process_closes_the_gate_of_all(run):
    folder, lines = run("failed", 3)
    assert all(line.startswith("QueryError: A query failed on the secret side") for line in lines)
    assert not any("0.123" in line for line in lines)
    assert [(folder / f"closed-{each}").read_text() for each in range(3)] == ["0"] * 3


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("settings", "different settings"),
        ("shards", "Start fewer"),
        ("records", "the same records"),
    ],
)
def test_what_does_not_fit_is_refused_by_all(run, why, said):
    _, lines = run("refused", 2, why=why)
    assert all(said in line for line in lines)


@pytest.mark.parametrize("stages", [(), ("sum",), ("sum_over_shards", "sum")])
def test_other_answers_than_of_shards_are_refused(box, ledger, stages):
    """And so are methods that open the box."""
    from support.fakes import NullLedger

    from privot.errors import PlanError
    from privot.privacy.gate import Gate
    from privot.privacy.plan import Neighbours, Plan, Stage
    from privot.runtime.process_group import ProcessGroup

    plan = Plan(tuple(Stage(verb, verb, 0.0) for verb in stages), Neighbours.REPLACE)
    with pytest.raises(PlanError, match="without torchrun"):
        Gate(box, plan, ledger, NullLedger(), process_group=ProcessGroup(1, 2, False))
    assert not ledger.path.exists()


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    from privot.errors import SettingError
    from privot.runtime import Runtime

    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name, value in (
        ("RANK", "6"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "2"),
        ("MASTER_ADDR", "x"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert Runtime().torch_device == torch.device("cuda:2")
    assert chosen == [torch.device("cuda:2")]
    assert Runtime("cpu").torch_device == torch.device("cpu")
    with pytest.raises(SettingError, match="assigns a GPU to each process"):
        Runtime("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SettingError, match="as it has GPUs"):
        Runtime()


def test_without_torchrun_there_is_one(monkeypatch):
    from privot.runtime.process_group import SingleProcess, join_process_group, read_torchrun_rank

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    assert read_torchrun_rank() == (0, 1, 0)
    assert type(join_process_group(torch.device("cpu"), "run")) is SingleProcess
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "x"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert read_torchrun_rank() == (0, 1, 0)


@pytest.mark.slow
def test_torchrun_makes_one_release_and_speaks_once(tmp_path):
    settings = [
        word
        for key, value in {**TINY, "steps": 20, "noise_multiplier": 3.0}.items()
        for word in ("--set", f"{key}={value}")
    ]
    words = [
        "-m",
        "privot",
        "synthesize",
        "digits",
        "--method",
        "gs-wgan",
        "--out",
        tmp_path / "out",
        "--device",
        "cpu",
        *settings,
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *words,
    ]
    environment = {**os.environ, "PRIVOT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("guarantee ") == 1
    assert done.stderr.count("training the generator: 20 of 20") == 1
    (ledger,) = (tmp_path / "home" / "ledgers").glob("*.jsonl")
    assert [json.loads(line)["kind"] for line in ledger.read_text().splitlines()].count(
        "reserve"
    ) == 1
    from privot.release.verify import verify

    assert verify(tmp_path / "out")["digests"] == "ok"
