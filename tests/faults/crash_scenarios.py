"""What a forked child does: runs that die at a chosen point, writers of one ledger, a disk that is full."""

import contextlib
import errno
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
    accounting.GRID_STEPS = accounting.GRID_STEPS[
        -1:
    ]  # as `coarse_accounting` has it, so that both sides prove the same
    accounting.compute_privacy_cost = priced
    Critics().plan(None).cost()
    METHODS["merf"]()  # the first to be made by name has all methods imported
    torch.set_num_threads(1)
    for count in (None, 1):
        preflight._measure_flops_per_second(
            torch.device("cpu"), count
        )  # of the machine: a fork need not find it out again
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()


def priced(event, relation, coarse=False, cost=accounting.compute_privacy_cost, known={}):  # noqa: B006 (meant to be shared)
    """What an event costs, worked out once; a fork inherits it."""
    if (key := (str(event), relation, coarse)) not in known:
        known[key] = cost(event, relation, coarse)
    return known[key]


def plan(noise=5.0, steps=1):
    return Plan((Stage("walk", "sum", noise, steps),), Neighbours.REPLACE)


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
            point = (
                point
                + gate.sum(
                    "walk",
                    lambda image, label, point: image.flatten() - point,
                    point,
                    clip_norm=1.0,
                ).float()
                / 100
            )
            progress("walking", step + 1, self.steps)
        images = point.sigmoid().view(1, *gate.spec.shape).expand(gate.spec.num_classes, -1, -1, -1)
        return Artifact.from_images(images, torch.arange(gate.spec.num_classes))


@dataclass(frozen=True)
class Critics(MethodBase):
    """Four critics that stay inside, and rows routed to them; all that a long run must keep is kept now and then."""

    noise_multiplier: float = 20.0
    steps: int = 20
    rows: int = 5
    name: ClassVar[str] = "critics"

    def plan(self, spec):
        return Plan(
            (
                Stage(
                    "rows",
                    "query_random_shards",
                    self.noise_multiplier,
                    self.steps * self.rows,
                    Shards(4),
                ),
            ),
            Neighbours.REPLACE,
        )

    def forecast(self, spec, plan):
        return {}

    def fit(self, gate, streams, progress):
        gate.split_into_shards(
            4, {"mean": torch.zeros(4, gate.spec.num_features), "age": torch.zeros(4)}
        )
        kept = streams.load_checkpoint("point")
        point = (
            kept["point"]
            if kept
            else torch.rand(gate.spec.num_features, generator=streams.make_rng("start"))
        )
        for step in range(
            self.steps - gate.count_remaining_queries("rows") // self.rows, self.steps
        ):
            gate.update_shards(lesson, shard_indices=torch.tensor([step % 4]))
            toward = gate.query_random_shards(
                "rows",
                lambda state, row: state["mean"] - row,
                point.expand(self.rows, -1),
                clip_norm=1.0,
            )
            point = point + toward.float().mean(0) / 100
            if step % 4 == 3:
                gate.save_shard_states()
                streams.save_checkpoint("point", {"point": point})
            progress("walking", step + 1, self.steps)
        images = point.sigmoid().view(1, *gate.spec.shape).expand(gate.spec.num_classes, -1, -1, -1)
        return Artifact.from_images(images, torch.arange(gate.spec.num_classes))


def lesson(images, labels, state):
    return {"mean": (state["mean"] + images.flatten(1).mean(0)) / 2, "age": state["age"] + 1}


METHODS = {
    "merf": lambda: make_method("merf", choose_tiny_settings("merf")),
    "walk": Walk,
    "march": lambda: Walk(
        steps=answers.MAX_STORED_RESULTS + 6
    ),  # too many answers to keep: a crashed run goes on after those that were marked
    "critics": Critics,
    "private-set": lambda: make_method("private-set", choose_tiny_settings("private-set")),
    "gs-wgan": lambda: make_method("gs-wgan", choose_tiny_settings("gs-wgan")),
}


def make_dataset():
    rng = np.random.default_rng(3)
    return Sensitive(
        rng.random((40, 1, 8, 8), np.float32), np.arange(40) % 4, Spec((1, 8, 8), 4), name="small"
    )


# Where to die


SITES = {  # where: what an interrupted call leaves behind, if that is more than nothing
    "privot.privacy.ledger:Ledger._append": None,
    "privot.privacy.ledger_file:_write_synced": lambda file, data: file.write(
        data[: len(data) // 2]
    ),
    "privot.privacy.gate:Gate._run_query": None,
    "privot.privacy.gate:Gate._store_result": None,
    "privot.privacy.gate:Gate.save_shard_states": lambda gate: partial_path(
        gate._checkpoint_path()
    ).write_bytes(b"torn"),
    "privot.io:_write_file": lambda path, content, *_: path.open("wb").write(
        content[: len(content) // 2]
    ),
    "pathlib:Path.write_bytes": lambda path, data: path.open("wb").write(data[: len(data) // 2]),
    "pathlib:Path.write_text": lambda path, text: open(path, "w").close(),
    "pathlib:Path.replace": None,
    "os:unlink": None,
}
ALSO = {"pathlib:Path.mkdir": None, "os:fsync": None}  # where a disk can fail, too


DISK = {name: getattr(errno, name) for name in ("EIO", "ENOSPC")}


def _place(site):
    module, _, path = site.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    return owner, name


def _deadly(site, fatal, when):
    """From now on the call number ``fatal`` at the site is the last thing this process does; returns the count of calls.

    ``when`` it dies: before, midway or after the call. Or it is the disk that fails, with the error of that name, half way through.
    """
    owner, name = _place(site)
    real = getattr(owner, name)
    calls = []

    def wrapped(*args, **more):
        calls.append(1)
        if len(calls) - 1 != fatal:
            return real(*args, **more)
        if when in DISK:
            if midway := SITES.get(site):
                midway(*args)
            raise OSError(DISK[when], os.strerror(DISK[when]))
        if when == "midway":
            SITES[site](*args)
        elif when == "after":
            with contextlib.suppress(FileNotFoundError):  # a vault that never was
                real(*args, **more)
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, wrapped)
    return calls


def _witnessed(path, tape=None):
    """Note each answer that was ever computed, where no crash of the run can take it back.

    With a ``tape``, a folder, what was answered first to an ask of this stage and step is the answer in every later run too.
    """
    ask = gate.Gate._run_query
    noisy = secret_side.add_noise
    current = []

    def asking(self, stage, *more, **others):
        current[:] = [self, stage]
        return ask(self, stage, *more, **others)

    def answering(*args):
        value = noisy(*args)
        (door, stage) = current
        if tape:
            file = Path(tape) / f"{stage.name}-{door._completed_steps[stage.name]}.npy"
            if not file.exists():
                np.save(file, value.numpy())
            value = torch.from_numpy(np.load(file))
        digest = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
        line = (
            json.dumps([door.ticket, stage.name, door._completed_steps[stage.name], digest]) + "\n"
        )
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, limit[1])
        )  # the witness has all the room it needs
        place = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(place, line.encode())
        os.close(place)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        return value

    gate.Gate._run_query = asking
    secret_side.add_noise = answering


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
    _witnessed(root / "witness", tape)
    calls = {each: _deadly(each, -1, "never") for each in (*SITES, *ALSO)} if count else {}
    if site:
        _deadly(site, fatal, when)
    try:
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        ways = {
            "out": root / "out",
            "ledger": root / "ledger" / "small.jsonl",
            "resume": resume,
            "runtime": Runtime("cpu"),
        }
        synthesis.synthesize(make_dataset(), METHODS[which](), **ways)
        said = {"error": "", "calls": {each: len(found) for each, found in calls.items()}}
    except (PrivotError, OSError) as error:  # what the command line says in one line
        said = {"error": type(error).__name__, "text": str(error)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with open(root / "report.json", "w") as file:
        json.dump(said, file)


# Writers of one ledger


def reserve(path, count, start=0.0, number=0):
    """One of several writers: reservations, and for every tenth an ask and a commit. All begin at ``start`` of the system's clock."""
    book = Ledger(path)
    time.sleep(max(0.0, start - time.monotonic()))
    for step in range(count):
        ticket = book.reserve(plan(), f"writer {number}")
        if step % 10 == 0:
            book.mark_asked(ticket, "walk", 0, 0)
            book.commit(ticket, "walk", 0, f"{number}/{step}")


def fill_up(path, report, number=0):
    """A disk that takes only so many more bytes, by a limit on the size of files: EFBIG after a short write, as ENOSPC would come."""
    book = Ledger(path)
    book.reserve(plan(), "before")
    full = len(Path(path).read_bytes())  # of one line: the next is as long
    said = []
    for room in (0, 1, 50, full // 2, full - 1):
        size = Path(path).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))
        try:
            book.reserve(plan(), "during")
            said.append("written")
        except ledger.LedgerError as error:
            said.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert Path(path).stat().st_size == size
        assert len(Ledger(path).entries()) == len(book.entries())
        book.reserve(plan(), "after!")  # the same instance goes on
    Path(report).write_text(json.dumps(said))
