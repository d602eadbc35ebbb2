"""What a forked child does: runs that die at a chosen point, writers of one ledger, a disk that is full."""

import contextlib
import errno
import functools
import hashlib
import importlib
import json
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from support.tiny_settings import choose_tiny_settings

from privot import synthesis
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotError
from privot.io import partial_path
from privot.methods import MethodBase, make_method
from privot.privacy import accounting, answers, gate, ledger, secret_side
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.privacy.sampling import Shards
from privot.release.artifact import Artifact
from privot.runtime import Runtime
from privot.synthesis import preflight


def warm():
    """Have everything imported that a run imports late; no backward pass, which a fork would not survive."""
    accounting.GRID_STEPS = accounting.GRID_STEPS[-1:]  # both sides prove the same
    accounting.compute_privacy_cost = compute_cost_once
    Critics().plan(None).cost()
    METHODS["merf"]()  # the first to be made by name has all methods imported
    torch.set_num_threads(1)
    for count in (None, 1):  # measured once for all forks
        preflight._measure_flops_per_second(torch.device("cpu"), count)
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()


COSTS: dict = {}


def compute_cost_once(event, relation, coarse=False, compute=accounting.compute_privacy_cost):
    """What an event costs; a fork inherits it."""
    key = (str(event), relation, coarse)
    if key not in COSTS:
        COSTS[key] = compute(event, relation, coarse)
    return COSTS[key]


def plan(noise=5.0, steps=1):
    return Plan((Stage("walk", "sum", noise, steps),), Neighbours.REPLACE)


def subtract_point(image, label, point):
    return image.flatten() - point


def subtract_row(state, row):
    return state["mean"] - row


def update_critic(images, labels, state):
    return {"mean": (state["mean"] + images.flatten(1).mean(0)) / 2, "age": state["age"] + 1}


def make_artifact(spec, point):
    """One image of every class, by the last point."""
    images = point.sigmoid().view(1, *spec.shape).expand(spec.num_classes, -1, -1, -1)
    return Artifact.from_images(images, torch.arange(spec.num_classes))


@dataclass(frozen=True)
class Walk(MethodBase):
    """Several answers, each query depending on those before: the state that a crash can tear is larger than with one answer."""

    noise_multiplier: float = 20.0
    steps: int = 6
    name: ClassVar[str] = "walk"

    def plan(self, spec):
        return plan(self.noise_multiplier, self.steps)

    def forecast(self, spec, plan):
        return {}

    def fit(self, gate, streams, progress):
        point = torch.rand(gate.spec.num_features, generator=streams.make_rng("start"))
        for step in range(self.steps - gate.count_remaining_queries("walk"), self.steps):
            answer = gate.sum("walk", subtract_point, point, clip_norm=1.0)
            point = point + answer.float() / 100
            progress("walking", step + 1, self.steps)
        return make_artifact(gate.spec, point)


@dataclass(frozen=True)
class Critics(MethodBase):
    """Four critics behind the gate, and rows assigned to them; their state is stored now and then."""

    noise_multiplier: float = 20.0
    steps: int = 20
    rows: int = 5
    name: ClassVar[str] = "critics"

    def plan(self, spec):
        count = self.steps * self.rows
        stage = Stage("rows", "query_random_shards", self.noise_multiplier, count, Shards(4))
        return Plan((stage,), Neighbours.REPLACE)

    def forecast(self, spec, plan):
        return {}

    def fit(self, gate, streams, progress):
        num_features = gate.spec.num_features
        gate.split_into_shards(4, {"mean": torch.zeros(4, num_features), "age": torch.zeros(4)})
        point = torch.rand(num_features, generator=streams.make_rng("start"))
        if stored := streams.load_checkpoint("point"):
            point = stored["point"]
        first = self.steps - gate.count_remaining_queries("rows") // self.rows
        for step in range(first, self.steps):
            gate.update_shards(update_critic, shard_indices=torch.tensor([step % 4]))
            rows = point.expand(self.rows, -1)
            answers = gate.query_random_shards("rows", subtract_row, rows, clip_norm=1.0)
            point = point + answers.float().mean(0) / 100
            if step % 4 == 3:
                gate.save_shard_states()
                streams.save_checkpoint("point", {"point": point})
            progress("walking", step + 1, self.steps)
        return make_artifact(gate.spec, point)


METHODS = {
    "merf": lambda: make_method("merf", choose_tiny_settings("merf")),
    "walk": Walk,
    # Too many answers to store: a crashed run goes on after those that were marked.
    "march": lambda: Walk(steps=answers.MAX_STORED_RESULTS + 6),
    "critics": Critics,
    "private-set": lambda: make_method("private-set", choose_tiny_settings("private-set")),
    "gs-wgan": lambda: make_method("gs-wgan", choose_tiny_settings("gs-wgan")),
}


def make_dataset(name="small"):
    images = np.random.default_rng(3).random((40, 1, 8, 8), np.float32)
    return Sensitive(images, np.arange(40) % 4, Spec((1, 8, 8), 4), name=name)


def raise_if_read(*args):
    """In the place of `Sensitive._read_records`."""
    raise AssertionError("a record was read")


# Where to die


def write_half(file, data):
    file.write(data[: len(data) // 2])


def write_half_file(path, data, *_):
    path.open("wb").write(data[: len(data) // 2])


def write_torn_checkpoint(gate):
    partial_path(gate._checkpoint_path()).write_bytes(b"torn")


SITES = {  # where: what an interrupted call leaves behind, if that is more than nothing
    "privot.privacy.ledger:Ledger._append": None,
    "privot.privacy.ledger_file:_write_synced": write_half,
    "privot.privacy.gate:Gate._run_query": None,
    "privot.privacy.gate:Gate._store_result": None,
    "privot.privacy.gate:Gate.save_shard_states": write_torn_checkpoint,
    "privot.io:_write_file": write_half_file,
    "pathlib:Path.write_bytes": write_half_file,
    "pathlib:Path.write_text": lambda path, text: open(path, "w").close(),
    "pathlib:Path.replace": None,
    "os:unlink": None,
}
ALSO = {"pathlib:Path.mkdir": None, "os:fsync": None}  # where a disk can fail, too


DISK = {name: getattr(errno, name) for name in ("EIO", "ENOSPC")}


def _find_function(site):
    module, _, path = site.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def _make_deadly(site, fatal, when):
    """From now on the call number ``fatal`` at the site is the last thing this process does; returns the count of calls.

    ``when`` it dies: before, midway or after the call. Or it is the disk that fails, with the error of that name, half way through.
    """
    owner, name = _find_function(site)
    real = getattr(owner, name)
    calls = []

    def call(*args, **more):
        calls.append(1)
        if len(calls) - 1 != fatal:
            return real(*args, **more)
        if (when in DISK or when == "midway") and (midway := SITES.get(site)):
            midway(*args)
        if when in DISK:
            raise OSError(DISK[when], os.strerror(DISK[when]))
        if when == "after":
            with contextlib.suppress(FileNotFoundError):  # a checkpoint that never was
                real(*args, **more)
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, call)
    return calls


def _record_answers(path, tape=None):
    """Note each answer that was ever computed, where no crash of the run can take it back.

    With a ``tape``, a folder, what was answered first to an ask of this stage and step is the answer in every later run too.
    """
    run_query = gate.Gate._run_query
    add_noise = secret_side.add_noise
    current = []

    def watch_query(self, stage, *more, **others):
        current[:] = [self, stage.name]
        return run_query(self, stage, *more, **others)

    def watch_noise(*args):
        value = add_noise(*args)
        current_gate, name = current
        step = current_gate._completed_steps[name]
        if tape:
            file = Path(tape) / f"{name}-{step}.npy"
            if not file.exists():
                np.save(file, value.numpy())
            value = torch.from_numpy(np.load(file))
        digest = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        line = json.dumps([current_gate.ticket, name, step, digest]) + "\n"
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, limit[1]))
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        return value

    gate.Gate._run_query = watch_query
    secret_side.add_noise = watch_noise


def _limit_files(num_bytes=resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def synthesize(
    root,
    which,
    resume=False,
    site=None,
    fatal=0,
    when="before",
    count=False,
    tape=None,
    room=None,
    number=0,
):
    """One run in ``root``. What became of it is in report.json, unless it was killed. ``room``: bytes that a file may have."""
    root = Path(root)
    _record_answers(root / "witness", tape)
    calls = {name: _make_deadly(name, -1, "never") for name in (*SITES, *ALSO)} if count else {}
    if site:
        _make_deadly(site, fatal, when)
    try:
        if room is not None:
            _limit_files(room)
        synthesis.synthesize(
            make_dataset(),
            METHODS[which](),
            out=root / "out",
            ledger=root / "ledger" / "small.jsonl",
            resume=resume,
            runtime=Runtime("cpu"),
        )
        report = {"error": "", "calls": {name: len(made) for name, made in calls.items()}}
    except (PrivotError, OSError) as error:  # what the command line says in one line
        report = {"error": type(error).__name__, "text": str(error)}
    _limit_files()
    with open(root / "report.json", "w") as file:
        json.dump(report, file)


# Writers of one ledger


def reserve(path, count, start=0.0, number=0):
    """One of several writers: reservations, and for every tenth an ask and a commit. All begin at ``start`` of the system's clock."""
    own = Ledger(path)
    time.sleep(max(0.0, start - time.monotonic()))
    for step in range(count):
        ticket = own.reserve(plan(), f"writer {number}")
        if step % 10 == 0:
            own.mark_asked(ticket, "walk", 0, 0)
            own.commit(ticket, "walk", 0, f"{number}/{step}")


def fill_up(path, report, number=0):
    """A disk that takes only so many more bytes, by a limit on the size of files: EFBIG after a short write, as ENOSPC would come."""
    own = Ledger(path)
    own.reserve(plan(), "before")
    full = len(Path(path).read_bytes())  # of one line: the next is as long
    errors = []
    for room in (0, 1, 50, full // 2, full - 1):
        size = Path(path).stat().st_size
        _limit_files(size + room)
        try:
            own.reserve(plan(), "during")
            errors.append("none")
        except ledger.LedgerError as error:
            errors.append(str(error))
        _limit_files()
        assert Path(path).stat().st_size == size
        assert len(Ledger(path).entries()) == len(own.entries())
        own.reserve(plan(), "after!")  # the same instance goes on
    Path(report).write_text(json.dumps(errors))
