"""Record and replay: run a method on D, keep every answer of the gate, run it on D' with those answers; whatever differs has leaked.

The queries do run on D', so a leak through a closure, a shard's state, a file or an exception happens as it would in life. For pairs
that differ in one record, or in all that one owner holds, the distance between the two true values, before any noise, is held against the
declared sensitivity; of rows, each of which is an answer, those of other owners or of another shard than the record's may not move at all.
A local method has no gate of its own: there the clients' gate is watched, and what their channel made of D is kept.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import logging
import os
import shutil
import sys
import tempfile
import warnings
from unittest import mock

import numpy as np
import torch
from support.neighbour_files import (
    CHANGES,
    coupled_orders,
    make_entries,
    read_entries,
    write_entries,
)
from support.tiny_settings import (
    NUM_CLASSES,
    NUM_CLIENTS,
    NUM_RECORDS,
    SHAPE,
    is_local,
    seal_records,
)

from privot.data.spec import Spec
from privot.local import privatize
from privot.local.channels import Composite
from privot.privacy import accounting, secret_side
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.guarantee import Guarantee
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom
from privot.privacy.sampling import Shards
from privot.privacy.sensitivity import SENSITIVITY
from privot.runtime import Runtime
from privot.synthesis import execution, synthesize

RUNTIME = Runtime("cpu", 16)  # portions of 16, of which no data set here is a whole number

# The pairs


def _fresh(count):
    rng = np.random.default_rng(11)
    return rng.random((count, *SHAPE), np.float32), rng.integers(0, NUM_CLASSES, count)


def _with(images, labels, where, new_images, new_labels):
    images = images.copy()
    labels = labels.copy()
    images[where] = new_images
    labels[where] = new_labels
    return images, labels


# A removed record is the last one, so that a sampler that draws in the records' order draws the others alike; a replaced one is the first,
# since the last may be left over by a split into shards.
KINDS = {
    "one replaced": lambda images, labels: _with(
        images, labels, 0, 1.0, (labels[0] + 1) % NUM_CLASSES
    ),
    "one removed": lambda images, labels: (images[:-1], labels[:-1]),
    "half replaced": lambda images, labels: _with(
        images, labels, slice(0, len(labels) // 2), *_fresh(len(labels) // 2)
    ),
    "all replaced": lambda images, labels: _fresh(len(labels)),
    "sign flipped": lambda images, labels: (1 - images, labels),
    "scaled": lambda images, labels: (images * np.float32(1e6), labels),
    "constant": lambda images, labels: (np.full_like(images, 0.5), labels),
    "duplicates": lambda images, labels: (
        images.repeat(2, 0),
        labels.repeat(2),
    ),  # the size doubles: one removed moves no threshold
    "one class empty": lambda images, labels: (
        np.where((labels == 2)[:, None, None, None], 0, images),
        np.where(labels == 2, 0, labels),
    ),
    "labels permuted": lambda images, labels: (
        images,
        np.roll(labels, len(labels) // 2) * 2 % NUM_CLASSES,
    ),
    "one NaN": lambda images, labels: _with(images, labels, 0, np.nan, labels[0]),
    "reordered": lambda images, labels: (images[::-1].copy(), labels[::-1].copy()),
}
SAME = "the same"  # the control: D itself


def _held(images, labels, count):
    """The first owner holds other records, and so many of them; whose they all are is said."""
    rest = (owners := np.arange(len(labels)) % NUM_CLIENTS) > 0
    (new, marks) = _fresh(count)
    return (
        np.concatenate([images[rest], new]),
        np.concatenate([labels[rest], marks]),
        np.concatenate([owners[rest], np.zeros(count, int)]),
    )


OWNED = {  # where a whole owner is the unit
    "an owner replaced": lambda images, labels: _held(images, labels, len(labels[::NUM_CLIENTS])),
    "an owner with one record": lambda images, labels: _held(images, labels, 1),
    "an owner with many more": lambda images, labels: _held(images, labels, 40),
}
NEIGHBOURS = {  # the kinds whose true values must be within the declared sensitivity, by relation
    Neighbours.REPLACE: ("one replaced", "one NaN"),
    Neighbours.LOCAL: ("one replaced", "one NaN"),
    Neighbours.ADD_REMOVE: ("one removed",),
    Neighbours.CLIENT: ("one replaced", "one NaN", *OWNED),
}


def pair(kind, images, labels, spec):
    """D', brought back to what the owner declared: only data sets that agree with the declaration can be mistaken for one another."""
    if kind in OWNED:
        return OWNED[kind](images, labels)
    other, marks = KINDS[kind](images, labels) if kind != SAME else (images, labels)
    if spec.size and len(marks) < spec.size:
        other = np.concatenate([other, np.zeros_like(images[:1])])
        marks = np.concatenate([marks, labels[-1:]])
    other, marks = (other[: spec.size], marks[: spec.size]) if spec.size else (other, marks)
    if spec.class_sizes and not np.array_equal(
        np.bincount(marks, minlength=spec.num_classes), spec.class_sizes
    ):
        marks = labels
    return other, marks


# What can be seen from outside

_events = None  # while a run is watched: what it opened for writing, sent or started


def _hook(event, args):
    if _events is None:
        return
    if event == "open":
        path, mode, flags = args
        writes = (
            any(letter in mode for letter in "wax+")
            if isinstance(mode, str)
            else flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if (
            writes
            and isinstance(path, (str, bytes, os.PathLike))
            and "__pycache__" not in os.fsdecode(path)
        ):
            _events.append(("write", os.path.abspath(os.fsdecode(path))))
    elif event in (
        "socket.connect",
        "socket.sendto",
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
    ):
        _events.append((event, ""))


sys.addaudithook(_hook)


@contextlib.contextmanager
def watched():
    """Collect what is written to files, sent or started, by path."""
    global _events
    _events = events = []
    try:
        yield events
    finally:
        _events = None


@contextlib.contextmanager
def captured(seen):
    """All that goes to the standard streams (from Python or below), to loggers and to warnings."""

    class Keep(logging.Handler):
        def emit(self, record):
            seen.append(("log", record.getMessage()))

    root = logging.getLogger()
    text = io.StringIO()
    handler = Keep()
    level = root.level
    with tempfile.TemporaryFile() as file, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        saved = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in saved:
            os.dup2(file.fileno(), number)
        root.addHandler(handler)
        root.setLevel(0)
        try:
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                yield
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
            for stream in (sys.__stdout__, sys.__stderr__):
                stream.flush()
            for number, copy in saved:
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            seen.append(("printed", text.getvalue(), file.read()))
            seen.extend(("warned", str(each.message)) for each in warned)


def tree(root):
    """Every file under a folder by name, with the digest of its bytes; of a vault, which is secret, only that it lies with the ledger."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    vaults = {
        path
        for path in files
        if ".vault" in path.name
        and path.parent == root / "ledger"
        and not path.stat().st_mode & 0o077
    }
    return tuple(
        (
            str(path.relative_to(root)),
            "" if path in vaults else hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in files
    )


@dataclasses.dataclass
class Trace:
    """One run: ``seen`` is everything that must not depend on the data; ``results`` and ``true`` are of each query."""

    seen: list
    results: list
    true: list
    reach: list  # the declared sensitivity of each ask
    drawn: list  # the shards that its rows drew, or None
    dealt: list  # the owners whose rows they are, or None
    shards: list  # how many shards there are, of each owner where it has several
    release: bytes = b""


# Prices depend on plans alone, and a sampled plan takes seconds to price: each is priced once.
_cost = accounting.compute_privacy_cost
_of = Guarantee.from_plan


_prices: dict = {}


def _priced(event, relation, roughly=False):
    if (key := (str(event), relation, roughly)) not in _prices:
        cost = _cost(event, relation, roughly)
        _prices[key] = dataclasses.replace(cost, epsilon=functools.cache(cost.epsilon))
    return _prices[key]


@functools.cache
def _guaranteed(plan, delta):
    return _of(plan, delta)


def _seeded(insecure_seed=None):
    return SecretRandom(5)


CLIENTS = Spec(
    SHAPE, NUM_CLASSES, NUM_RECORDS
)  # how many there are is public where each sends a record
CHANNEL = privatize.build_image_channel(CLIENTS, "laplace", 40.0, labels_epsilon=5.0)


def run(method, images, labels, spec, root, results=None, coupled=False, owners=None, order=None):
    """`watch` a run on arrays."""
    return watch(
        method, seal_records(images, labels, spec, owners), spec, root, results, coupled, order
    )


def watch(method, box, spec, root, results=None, coupled=False, order=None):
    """Run ``method`` in the folder ``root``, with the gate's results replaced by ``results``; ``coupled`` runs draw the same records.

    Their secret order is ``order``, or that of the arrays, so that neighbours differ at one position; all other runs have orders of
    their own.
    """
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    trace = Trace([], [], [], [], [], [], [])
    from_clients = spec is CLIENTS
    here = os.getcwd()
    add_noise = secret_side.add_noise
    rmtree = shutil.rmtree
    draw = Shards.draw
    through = Composite.privatize

    def look():
        trace.seen.append(("files", tree(root)))

    class Watching(Gate):
        def _run_query(self, stage, clip_norm, *more, **others):
            trace.seen.append(("ask", stage.name, float(clip_norm)))
            trace.reach.append(SENSITIVITY[stage.operation, self.plan.neighbours] * clip_norm)
            trace.drawn.append(None)
            trace.shards.append(getattr(stage.sampling, "num_shards", 1))
            trace.dealt.append(self.asked if stage.operation == "query_clients" else None)
            look()
            return super()._run_query(stage, clip_norm, *more, **others)

        def query_clients(self, *given, client_indices=None, **more):
            everyone = range(spec.num_clients)
            self.asked = list(everyone) if client_indices is None else client_indices.tolist()
            trace.seen.append(("deal", self.asked))  # so is whom a server asks
            return super().query_clients(*given, client_indices=client_indices, **more)

        def update_shards(self, query, *public, shard_indices=None, **more):
            trace.seen.append(
                ("update", None if shard_indices is None else shard_indices.tolist())
            )  # the schedule is public
            super().update_shards(query, *public, shard_indices=shard_indices, **more)

    def drawing(self, count, secret):
        trace.drawn[-1] = draw(self, count, secret)
        return trace.drawn[-1]

    def answer(steps, noise_std, grid, secret):
        # drawn in any case, so that the streams stay in step
        value = add_noise(steps, noise_std, grid, secret)
        number = len(trace.true)
        trace.seen.append(
            ("noise", tuple(steps.shape), str(steps.dtype), float(noise_std), float(grid))
        )
        trace.true.append(steps * grid)
        trace.results.append(
            value if results is None or number >= len(results) else results[number].clone()
        )
        return trace.results[-1].clone()

    def sent(channel, parts, secret):
        value = through(channel, parts, secret)
        number = len(trace.results)
        trace.seen.append(("sent", tuple(value.shape), str(value.dtype)))
        trace.results.append(value if results is None else results[number].clone())
        return trace.results[-1].clone()

    def progress(stage, step, of, **facts):
        trace.seen.append(("progress", repr((stage, step, of, sorted(facts.items())))))
        look()

    def removed(path, *more, **others):
        look()
        rmtree(path, *more, **others)

    patches = [
        mock.patch.object(execution, "Gate", Watching),
        mock.patch.object(Composite, "privatize", sent),
        mock.patch.object(secret_side, "add_noise", answer),
        mock.patch.object(Shards, "draw", drawing),
        mock.patch.object(shutil, "rmtree", removed),
        mock.patch.object(accounting, "compute_privacy_cost", _priced),
        mock.patch.object(Guarantee, "from_plan", _guaranteed),
    ]
    if coupled:
        patches.append(mock.patch.object(secret_side, "SecretRandom", _seeded))
        given = np.arange(box._count_records()) if order is None else order
        patches.append(
            mock.patch.object(Gate, "_get_secret_order", return_value=torch.from_numpy(given))
        )
    environment = dict(os.environ)
    os.chdir(root)
    try:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            stack.enter_context(captured(trace.seen))
            events = stack.enter_context(watched())
            ledger = Ledger(root / "ledger" / "tiny.jsonl", clock=lambda: 0.0)
            notice = functools.partial(lambda text: trace.seen.append(("notice", text)))
            budget = (
                None
                if method.noise_multiplier is not None or not method.plan(box.spec).stages
                else 5.0
            )
            try:
                if from_clients:
                    box = privatize.privatize(
                        box, CHANNEL, out=root / "sent.safetensors", ledger=ledger
                    )
                made = synthesize(
                    box,
                    method,
                    budget,
                    out=root / "out",
                    ledger=ledger,
                    seed=3,
                    runtime=RUNTIME,
                    progress=progress,
                    on_warning=notice,
                )
                trace.seen.append(("release", repr(made.guarantee), made.artifact.kind))
            except Exception as error:
                trace.seen.append(
                    ("error", type(error).__name__, str(error), repr(error.__cause__))
                )
    finally:
        os.chdir(here)
    changed = {
        key for key in {*environment, *os.environ} if environment.get(key) != os.environ.get(key)
    }
    for key in changed:
        os.environ.pop(key)
        os.environ.update({key: environment[key]} if key in environment else {})
    look()
    inside = str(root) + os.sep
    trace.seen.append(("environment", sorted(changed)))
    trace.seen.append(("written", [(event, path.removeprefix(inside)) for event, path in events]))
    outside = [(event, path) for event, path in events if not path.startswith((inside, os.devnull))]
    trace.seen.append(
        ("outside", outside)
    )  # its content is not compared, so `leaks` lets none pass
    trace.release = b"".join(
        path.read_bytes() for path in sorted((root / "out").rglob("*")) if path.is_file()
    )
    return trace


def leaks(method, records, spec, root, kinds=KINDS):
    """Each (kind, what) by which the outside could tell D' from D, lazily; none for an honest method."""
    spec = CLIENTS if is_local(method) else spec
    run(
        method, *records, spec, root
    )  # what a library does on its first use (imports, caches) is not of the data
    first = {}  # of each way to draw: D is run once
    whole = OWNED if kinds is KINDS and method.plan(spec).neighbours is Neighbours.CLIENT else {}
    for kind in (*kinds, *whole):
        near = kind in (
            SAME,
            *NEIGHBOURS[method.plan(spec).neighbours],
        )  # what is the same is so in one order
        if near not in first:
            first[near] = run(method, *records, spec, root, coupled=near)
        one = first[near]
        images, labels, *owners = pair(kind, *records, spec)
        two = run(
            method,
            images,
            labels,
            spec,
            root,
            results=one.results,
            coupled=near,
            owners=owners[0] if owners else None,
        )
        outside = next(each for each in two.seen if each[0] == "outside")
        if outside[1]:
            yield kind, outside
        yield from ((kind, what) for what in _differences(one, two, near))


def file_leaks(method, records, spec, root, reader, kinds=CHANGES):
    """As `leaks`, of data sets that are files: one renamed, moved to another class, added, removed. Yields (kind, what).

    Runs have coupled secret orders, and the distance between true values is held against the declared sensitivity; the first pair is also
    run in orders of its own.
    """
    images, labels = records
    spec = CLIENTS if is_local(method) else spec
    entries = make_entries((np.clip(images[:, 0], 0, 1) * 255).astype(np.uint8), labels)
    folder = root.with_name("files")
    relation = method.plan(spec).neighbours
    run(method, images, labels, spec, root)  # what a library does on its first use
    for kind in kinds:
        way, change = kinds[kind]
        shutil.rmtree(folder, ignore_errors=True)
        boxes = [
            read_entries(
                write_entries(reader, folder / name, each),
                dataclasses.replace(spec, size=None, class_sizes=None),
                "tiny",
            )
            for name, each in (("here", entries), ("there", change(entries)))
        ]
        if not all(consistent(box, spec) for box in boxes):
            continue  # what is declared tells them apart
        for box in boxes:
            box.spec = spec
        first_order, second_order = coupled_orders(*boxes)
        for near in (True, False)[: 2 if kind == next(iter(kinds)) else 1]:
            one = watch(method, boxes[0], spec, root, coupled=near, order=first_order)
            two = watch(
                method, boxes[1], spec, root, results=one.results, coupled=near, order=second_order
            )
            close = near and way in (
                "same",
                *(
                    ["replace"]
                    if relation in (Neighbours.REPLACE, Neighbours.LOCAL)
                    else [str(relation)]
                ),
            )
            yield from (
                (kind, what)
                for what in _differences(
                    one, two, close, int(np.argmax(_changed(boxes, first_order, second_order)))
                )
            )


def consistent(box, spec):
    """Whether records are as many as declared, of each class too."""
    sizes = tuple(np.bincount(box._labels, minlength=spec.num_classes).tolist())
    return spec.size in (None, box._count_records()) and spec.class_sizes in (None, sizes)


def _changed(boxes, first, second):
    """Whether the records at a position differ, [positions]; beyond the shorter data set all do."""
    same = min(len(first), len(second))
    images = [
        box._images[order[:same]].reshape(same, -1)
        for box, order in zip(boxes, (first, second), strict=True)
    ]
    labels = [box._labels[order[:same]] for box, order in zip(boxes, (first, second), strict=True)]
    return np.append((images[0] != images[1]).any(1) | (labels[0] != labels[1]), True)


def _differences(one, two, near, place=0):
    """What tells two runs apart, in words; of neighbours also answers that move too far. The record at ``place`` was replaced."""
    if one.seen != two.seen:
        yield next(
            (each for each in zip(one.seen, two.seen, strict=False) if each[0] != each[1]),
            "one run shows more",
        )
    elif one.release != two.release:
        yield "release"
    if near:
        for number, pair_of in enumerate(
            zip(one.true, two.true, one.reach, one.drawn, one.dealt, one.shards, strict=False)
        ):
            if told := _too_far(*pair_of, place):
                yield f"ask {number} {told}"


def _too_far(left, right, reach, drawn, dealt, shards, place):
    """How an answer moves that should not, in words. What was replaced is the record at ``place``, or all of the owner who has it."""
    if left.shape != right.shape:
        return ""  # seen otherwise
    if dealt is not None:
        others = torch.tensor(dealt) != place % NUM_CLIENTS
        if (left != right)[others].any():
            return "moves in rows of another owner"
        drawn = (
            torch.zeros(left.shape[:2], dtype=torch.int64)
            if drawn is None
            else drawn.view(left.shape[:2])
        )
        left = left[~others].flatten(0, 1)
        right = right[~others].flatten(0, 1)
        drawn = drawn[~others].flatten()
        if not len(left):
            return ""
    elif drawn is None:
        left = left.flatten()[None]
        right = right.flatten()[None]
    gaps = torch.linalg.vector_norm((left - right).flatten(1), dim=1)
    own = place // NUM_CLIENTS % shards if dealt is not None else place % shards
    if drawn is not None and gaps[drawn != own].any():
        return "moves in rows that drew another shard"
    return (
        f"moves by {gaps.max():.3g}, its declared sensitivity is {reach:.3g}"
        if gaps.max() > reach * (1 + 1e-9)
        else ""
    )
