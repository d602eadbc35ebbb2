"""The ledger under tampering, several writers and failing disks: no ask is forgotten, and no record is read before its line is on disk."""

import builtins
import errno
import fcntl
import functools
import hashlib
import json
import math
import os
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
from faults.crash_scenarios import make_dataset, plan

from privot.data.dataset import Sensitive
from privot.errors import BudgetError, LedgerError, ReleaseError
from privot.privacy import ledger_file
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_file import GENESIS_DIGEST
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import Fixed, Full, Poisson

ADD_REMOVE = Neighbours.ADD_REMOVE
REPLACE = Neighbours.REPLACE
LIMIT = Budget(50.0)


def make_plan(relation, noise=5.0, steps=1, sampling=None, verb="sum"):
    return Plan((Stage("walk", verb, noise, steps, sampling or Full()),), relation)


def write_ledger(path):
    """A ledger with a line of every kind and more than one run."""
    ledger = Ledger(path, clock=lambda: 0.0)
    ledger.set_limit(LIMIT)
    for number in range(3):
        ticket = ledger.reserve(plan(steps=2), f"method {number}")
        ledger.mark_asked(ticket, "walk", 0, 0)
        ledger.commit(ticket, "walk", 0, hashlib.sha256(b"query_sample").hexdigest())
    ledger.mark_asked(ticket, "walk", 1, 1)
    return ledger


def head_of(path):
    return path.with_name(path.name + ".head")


def epsilon_of(ledger):
    return ledger.compute_spent_cost().epsilon(1e-5)


def fail_with(number):
    def fail(*args):
        raise OSError(number, os.strerror(number))

    return fail


# The chain


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_who_may_not_write_may_read(tmp_path, monkeypatch, number):
    path = tmp_path / "x.jsonl"
    lines = write_ledger(path).entries()
    plain_open = builtins.open

    def open_(path, *args, **kwargs):
        if str(path).endswith(".lock"):
            raise OSError(number, os.strerror(number))
        return plain_open(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", open_)
    ledger = Ledger(path)
    assert (ledger.entries(), ledger.limit()) == (lines, LIMIT)
    before = path.read_bytes()
    for write in (
        lambda: ledger.set_limit(Budget(60.0)),
        lambda: ledger.reserve(plan(), "method"),
        lambda: ledger.mark_asked(1, "walk", 1, 1),
        ledger.require_writable,
    ):
        with pytest.raises(LedgerError, match="can be read here, but not written"):
            write()
    assert path.read_bytes() == before
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger(tmp_path / "y.jsonl").set_limit(Budget(1.0))


def test_who_reads_without_the_lock_beside_a_writer_is_not_alarmed(tmp_path, monkeypatch):
    """A line may be written between two reads; the ledger is sound all the same."""
    ledger = write_ledger(tmp_path / "x.jsonl")
    reader = Ledger(tmp_path / "x.jsonl")
    lock = Ledger._acquire_file_lock
    read = Path.read_text
    monkeypatch.setattr(
        Ledger, "_acquire_file_lock", lambda self, stack: self is not reader and lock(self, stack)
    )

    def read_slowly(path, *args, **kwargs):
        text = read(path, *args, **kwargs)
        monkeypatch.setattr(Path, "read_text", read)
        ledger.set_limit(Budget(60.0))
        return text

    monkeypatch.setattr(Path, "read_text", read_slowly)
    assert reader.limit() == Budget(60.0)
    assert reader.entries() == ledger.entries()


def test_a_ledger_that_does_not_exist_has_no_lines_and_is_not_created(tmp_path):
    ledger = Ledger(tmp_path / "far" / "x.jsonl")
    assert (ledger.entries(), ledger.limit(), epsilon_of(ledger)) == ([], None, 0)
    assert list(tmp_path.iterdir()) == []
    assert ledger.head == GENESIS_DIGEST
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="--ledger"):
        Ledger(tmp_path / "file" / "x.jsonl").reserve(plan(), "m")
    for path in (".", "/", ""):
        with pytest.raises(LedgerError, match="Name a file"):
            Ledger(path)


def test_lines_are_chained_and_the_head_is_stored(ledger):
    writer = write_ledger(ledger.path)
    lines = ledger.path.read_bytes().splitlines()
    digests = [GENESIS_DIGEST, *(hashlib.sha256(line).hexdigest() for line in lines)]
    for number, line in enumerate(lines):
        entry = json.loads(line)
        assert (entry["n"], entry["prev"]) == (number, digests[number])
        assert entry.get("time", "1970-01-01T00:00:00Z") == "1970-01-01T00:00:00Z"
    assert head_of(ledger.path).read_text() == f"{len(lines)} {digests[-1]}\n"
    assert writer.head == Ledger(ledger.path).head == ledger.head == digests[-1]
    kinds = [entry["kind"] for entry in ledger.entries()]
    assert kinds[:4] == ["budget", "reserve", "ask", "commit"]


def test_two_instances_see_each_other(ledger):
    other = Ledger(ledger.path)
    assert [ledger.reserve(plan(), "one"), other.reserve(plan(), "two")] == [0, 1]
    assert [entry["method"] for entry in ledger.entries()] == ["one", "two"]
    other.mark_asked(0, "walk", 0, 0)
    assert ledger.asked_count(0, "walk") == 1
    other.commit(0, "walk", 0, "d")
    assert Ledger(ledger.path).find_digest(0, "walk", 0) == "d"  # without any call before it
    assert ledger.find_digest(0, "walk", 1) is None


# Asks and commits


def test_no_answer_is_given_twice(ledger):
    ticket = ledger.reserve(plan(steps=9), "m")
    ledger.mark_asked(ticket, "walk", 0, 4)
    for first in (0, 4):
        with pytest.raises(LedgerError, match="used before"):
            ledger.mark_asked(ticket, "walk", first, 8)
    ledger.mark_asked(ticket, "walk", 5, 8)
    assert ledger.asked_count(ticket, "walk") == 9
    assert ledger.asked_count(ticket, "another") == 0


def test_a_second_digest_is_refused(ledger):
    ticket = ledger.reserve(plan(steps=2), "m")
    ledger.mark_asked(ticket, "walk", 0, 0)
    ledger.commit(ticket, "walk", 0, "one")
    ledger.commit(ticket, "walk", 0, "one")  # the same again says nothing new
    lines = ledger.entries()
    with pytest.raises(LedgerError, match="another digest"):
        ledger.commit(ticket, "walk", 0, "two")
    with pytest.raises(LedgerError, match="never marked"):
        ledger.commit(ticket, "walk", 1, "one")
    assert ledger.entries() == lines
    assert sum(entry["kind"] == "commit" for entry in lines) == 1


def test_a_ticket_is_of_a_reservation_here(ledger, tmp_path):
    # A run folder that was charged to another ledger must not be read under this one.
    ledger.set_limit(Budget(9.0))
    mine = ledger.reserve(plan(), "m")
    for ticket in (0, mine + 1, -1):
        with pytest.raises(LedgerError, match="another ledger"):
            ledger.mark_asked(ticket, "walk", 0, 0)
        with pytest.raises(LedgerError, match="another ledger"):
            ledger.asked_count(ticket, "walk")
        assert not ledger.covers(ticket, plan(), "m")
    assert ledger.covers(mine, plan(), "m")
    assert not ledger.covers(mine, plan(), "another method")
    assert not ledger.covers(mine, plan(noise=6.0), "m")
    assert not ledger.covers(mine, make_plan(ADD_REMOVE), "m")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "ticket").write_text(str(mine))
    other = Ledger(tmp_path / "another.jsonl")
    with pytest.raises((LedgerError, ReleaseError)):
        Gate(make_dataset(), plan(), other, Budget(9.0), method="m", folder=folder)


# The owner's limit


def test_the_limit_refuses_and_leaves_no_line(ledger):
    one = plan().cost().epsilon(1e-5)
    ledger.set_limit(Budget(one * 1.3))  # two cost 1.46 of one
    ledger.reserve(plan(), "first")  # and crashes before its first ask
    assert epsilon_of(Ledger(ledger.path)) == pytest.approx(one)
    lines = ledger.path.read_bytes()
    with pytest.raises(BudgetError, match="would come to"):
        ledger.reserve(plan(), "second")
    assert ledger.path.read_bytes() == lines
    ledger.set_limit(Budget(one * 2.5, 1e-4))  # the newest limit counts
    assert ledger.limit() == Budget(one * 2.5, 1e-4)
    ledger.reserve(plan(), "second")
    ledger.set_limit(Budget(one))
    with pytest.raises(BudgetError):
        ledger.reserve(plan(noise=1e6), "third")
    ledger.set_limit(Budget(math.inf))
    ledger.reserve(plan(noise=0.0), "without noise")
    assert epsilon_of(Ledger(ledger.path)) == math.inf


# Several relations


def test_relations_are_summed_where_there_is_a_proof(ledger):
    # Remove, then add: an add/remove Gaussian at noise z is a replace-one Gaussian at z/2.
    ledger.reserve(make_plan(ADD_REMOVE, 10.0, 3), "a")
    assert ledger.compute_spent_cost().mu == pytest.approx((3 / 10**2) ** 0.5)
    ledger.reserve(make_plan(REPLACE, 4.0), "b")
    ledger.reserve(make_plan(Neighbours.LOCAL, 8.0, verb="rows"), "c")
    square = 3 / 5**2 + 1 / 4**2 + 1 / 8**2
    assert ledger.compute_spent_cost().mu == pytest.approx(square**0.5)
    composed = Plan((Stage("x", "sum", 10.0), Stage("y", "sum", 20.0)), ADD_REMOVE)
    square += 1 / 5**2 + 1 / 10**2
    assert ledger.compute_spent_cost(extra_plan=composed).mu == pytest.approx(square**0.5)
    ledger.reserve(make_plan(ADD_REMOVE, 0.0), "d")
    assert epsilon_of(ledger) == math.inf


@pytest.mark.usefixtures("coarse_accounting")  # both sides of each comparison
@pytest.mark.parametrize("first", [0, 1])
def test_sampled_runs_of_two_relations_are_added_up_for_replace(ledger, first):
    replace = make_plan(REPLACE, 2.0, 3, Fixed(4, 40))
    runs = [replace, make_plan(ADD_REMOVE, 2.0, 5, Poisson(0.1))]
    alone = [float(run.under_replace_one().cost().epsilon(1e-5)) for run in runs]
    ledger.reserve(runs[first], "one")
    ledger.reserve(runs[1 - first], "other")
    more = Stage("more", "sum", 1.0, 5, Fixed(math.ceil(0.1 * 2**30), 2**30))
    spent = epsilon_of(ledger)
    together = Plan((*replace.stages, more), REPLACE).cost().epsilon(1e-5)
    assert spent == pytest.approx(together, rel=1e-9)
    assert max(alone) < spent < sum(alone)
    ledger.set_limit(Budget(spent + 0.01))
    with pytest.raises(BudgetError):
        ledger.reserve(runs[1], "too much")


# A torn tail


@pytest.mark.parametrize("content", [b"[[", b"ages of my patients", b'{"name": 1}'])
def test_another_file_is_refused_and_not_changed(tmp_path, content):
    path = tmp_path / "notes.json"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="is not a ledger"):
        Ledger(path).reserve(plan(), "run")
    assert path.read_bytes() == content


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_any_torn_tail_is_dropped(tmp_path, stride):
    # A crash in the middle of a line, at every byte: that call never returned, so nothing was read for it.
    whole = write_ledger(tmp_path / "whole.jsonl")
    data = whole.path.read_bytes()
    head = head_of(whole.path).read_text()
    whole.reserve(plan(), "torn")
    line = whole.path.read_bytes()[len(data) :]
    count = len(data.splitlines())
    path = tmp_path / "torn.jsonl"
    for length in (*range(0, len(line), stride), len(line) - 1, len(line)):
        path.write_bytes(data + line[:length])
        head_of(path).write_text(head)
        expected = count + (length == len(line))  # a whole line counts, though its head is missing
        assert len(Ledger(path).entries()) == expected
        if length % 55 == 0 or length == len(line):
            assert Ledger(path).reserve(plan(), "next") == expected
            assert len(Ledger(path).entries()) == expected + 1


def test_the_first_line_may_be_older_than_the_head_file(tmp_path):
    ledger = Ledger(tmp_path / "x.jsonl")
    ledger.reserve(plan(), "first")
    head_of(ledger.path).unlink()
    assert len(Ledger(ledger.path).entries()) == 1
    assert Ledger(ledger.path).reserve(plan(), "second") == 1
    head_of(ledger.path).unlink()
    with pytest.raises(LedgerError, match="is missing"):
        Ledger(ledger.path).entries()


# Tampering


def edit_lines(change):
    def tamper(path):
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return tamper


def dump(entry):
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def set_field(number, key, value):
    def change(lines):
        entry = json.loads(lines[number])
        assert entry[key] != value
        return [*lines[:number], dump({**entry, key: value}), *lines[number + 1 :]]

    return edit_lines(change)


def rechain(lines, renumber=True):
    """As one would who knows the format: all digests anew, but the head file forgotten."""
    previous = GENESIS_DIGEST
    chained = []
    for number, line in enumerate(lines):
        entry = json.loads(line)
        chained.append(dump({**entry, "n": number if renumber else entry["n"], "prev": previous}))
        previous = hashlib.sha256(chained[-1][:-1]).hexdigest()
    return chained


def remove_run_with_head(path):
    """Every digest is right again, that of the head too: the numbers of the lines tell."""
    lines = path.read_bytes().splitlines()
    lines = rechain(lines[:1] + lines[4:], renumber=False)
    path.write_bytes(b"".join(lines))
    digest = hashlib.sha256(lines[-1][:-1]).hexdigest()
    head_of(path).write_text(f"{len(lines)} {digest}\n")


def write_head(text):
    """The head file becomes this text, with the digest of the true head in the place of DIGEST."""

    def tamper(path):
        old = head_of(path).read_text()
        head_of(path).write_text(text.replace("OLD", old).replace("DIGEST", old.split()[1]))

    return tamper


def point_head_at(count):
    """The head as it was when the ledger had so many lines."""

    def tamper(path):
        digest = json.loads(path.read_bytes().splitlines()[count])["prev"]
        head_of(path).write_text(f"{count} {digest}")

    return tamper


def swap(left, right):
    def change(lines):
        lines[left], lines[right] = lines[right], lines[left]
        return lines

    return edit_lines(change)


def replace_each(old, new):
    return edit_lines(lambda lines: [line.replace(old, new) for line in lines])


def append(line):
    return edit_lines(lambda lines: [*lines, line])


def replace_by_folder(suffix=""):
    def tamper(path):
        file = path.with_name(path.name + suffix)
        file.unlink()
        file.mkdir()

    return tamper


def put_another_ledger(path):
    Ledger(path.with_name("other.jsonl")).reserve(plan(), "first of another")
    shutil.copy(write_ledger(path.with_name("other.jsonl")).path, path)


UNCHAINED = b'{"n":11,"kind":"budget","epsilon":999,"delta":0.1,"prev":""}'
QUIET = Plan((Stage("means", "sum", 500.0),), REPLACE).to_json()
EDITS = {  # by line: a field and its new value
    0: [("epsilon", 500.0), ("delta", 0.5), ("kind", "note")],
    1: [
        ("kind", "ask"),
        ("method", "other"),
        ("plan", {}),
        ("plan", QUIET),
        ("plan", {**QUIET, "neighbours": "add-remove"}),
        ("time", "2030-01-01T00:00:00Z"),
        ("n", 7),
        ("n", "1"),
        ("prev", GENESIS_DIGEST[::-1]),
    ],
    2: [("ticket", 4), ("stage", "walks"), ("first", 1), ("last", 5), ("last", -1)],
    3: [("digest", "0" * 64), ("step", 1), ("kind", 3)],
    4: [("plan", QUIET)],
    7: [("plan", QUIET)],
    10: [("last", 0), ("ticket", 1), ("prev", "0" * 64)],
}
LINES = range(11)
DETECTED = {
    **{f"line {n}: {key}={new}": set_field(n, key, new) for n in EDITS for key, new in EDITS[n]},
    **{f"line {n} removed": edit_lines(lambda ls, n=n: ls[:n] + ls[n + 1 :]) for n in LINES},
    **{f"line {n} doubled": edit_lines(lambda ls, n=n: ls[: n + 1] + ls[n:]) for n in LINES},
    **{f"cut to {n} lines": edit_lines(lambda ls, n=n: ls[:n]) for n in LINES},
    **{f"lines {pair} swapped": swap(*pair) for pair in ((0, 1), (1, 4), (5, 6), (9, 10))},
    "a key added to the last line": edit_lines(
        lambda lines: [*lines[:-1], lines[-1].replace(b"}", b',"extra":1}')]
    ),
    "all lines reversed": edit_lines(lambda lines: lines[::-1]),
    "the last newline cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "half of the last line cut": lambda path: path.write_bytes(path.read_bytes()[:-60]),
    "an empty line inside": edit_lines(lambda lines: [*lines[:5], b"\n", *lines[5:]]),
    **{
        f"{name} at the end": append(line + b"\n")
        for name, line in (
            ("an empty line", b""),
            ("an unchained line", UNCHAINED),
            ("not JSON", b"hello"),
            ("not UTF-8", b"\xff\xfe"),
            ("a list", b"[1,2]"),
            ("a number", b"3"),
            ("a deep nest", b"[" * 100_000),
        )
    },
    "DOS line ends": replace_each(b"\n", b"\r\n"),
    "a byte-order mark": lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
    "spaces after a line": edit_lines(lambda ls: [ls[0].replace(b"\n", b" \n"), *ls[1:]]),
    "spaces after the last line": edit_lines(lambda ls: [*ls[:-1], ls[-1].replace(b"\n", b" \n")]),
    "other separators": edit_lines(
        lambda lines: [json.dumps(json.loads(line)).encode() + b"\n" for line in lines]
    ),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
    "filled with zeros": lambda path: path.write_bytes(bytes(len(path.read_bytes()))),
    "made cheaper, chained anew": edit_lines(
        lambda lines: rechain(
            [line.replace(b'multiplier":5.0', b'multiplier":5e3') for line in lines]
        )
    ),
    "a run taken out, chained anew": edit_lines(lambda lines: rechain(lines[:4] + lines[7:])),
    "the limit taken out, chained anew": edit_lines(lambda lines: rechain(lines[1:])),
    "a run taken out, chained anew with its head": remove_run_with_head,
    "another ledger put there": put_another_ledger,
    "head deleted": lambda path: head_of(path).unlink(),
    **{
        f"head {text!r}": write_head(text)
        for text in (
            "",
            "hello",
            "OLD more",
            "xOLD",
            "12 DIGEST",
            "1200000 DIGEST",
            "3 DIGEST",
            "-99 DIGEST",
            "11 " + "0" * 64,
        )
    },
    "head not UTF-8": lambda path: head_of(path).write_bytes(b"\xff 1"),
    "head turned into a folder": replace_by_folder(".head"),
    "ledger turned into a folder": replace_by_folder(),
    "lock turned into a folder": replace_by_folder(".lock"),
}
HARMLESS = {  # by design: every line still counts
    "a torn tail": lambda path: path.write_bytes(path.read_bytes() + b'{"n":11,"ki'),
    "zeros after the last line": lambda path: path.write_bytes(path.read_bytes() + bytes(512)),
    "head older than the ledger": point_head_at(3),
    "head of the beginning": write_head(f"0 {GENESIS_DIGEST}"),
    "head counted from the end": point_head_at(-1),
    "an old .head.new": lambda path: path.with_name(path.name + ".head.new").write_text("rubbish"),
    "the lock deleted": lambda path: path.with_name(path.name + ".lock").unlink(),
}


@pytest.mark.parametrize("how", DETECTED)
def test_tampering_is_detected(how, tmp_path, trust):
    assert len(DETECTED) >= 50
    path = write_ledger(tmp_path / "x.jsonl").path
    DETECTED[how](path)

    def read_files():
        return {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}

    files = read_files()
    for access in (
        Ledger.entries,
        Ledger.compute_spent_cost,
        lambda ledger: ledger.reserve(plan(), "m"),
        lambda ledger: ledger.set_limit(Budget(1.0)),
        lambda ledger: ledger.head,
    ):
        with pytest.raises(LedgerError):
            access(Ledger(path))
    assert {name: data for name, data in read_files().items() if name in files} == files
    trust("B2", "tamperings detected", 1, of=1)


@pytest.mark.parametrize("how", HARMLESS)
def test_tampering_that_loses_nothing_is_accepted(how, tmp_path):
    path = write_ledger(tmp_path / "x.jsonl").path
    lines = Ledger(path).entries()
    HARMLESS[how](path)
    assert Ledger(path).entries() == lines
    assert Ledger(path).reserve(plan(), "m") == len(lines)
    assert Ledger(path).entries()[:-1] == lines


def test_any_flipped_bit_is_detected(tmp_path, trust):
    path = write_ledger(tmp_path / "x.jsonl").path
    data = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        position = rng.randrange(len(data))
        flipped = data[position] ^ 1 << rng.randrange(8)
        path.write_bytes(data[:position] + bytes([flipped]) + data[position + 1 :])
        with pytest.raises(LedgerError):
            Ledger(path).entries()
    trust("B2", "flipped bits detected", 300, of=300)


@pytest.mark.parametrize("how", ["cut", "deleted", "both deleted", "both put back"])
def test_a_process_that_saw_later_lines_sees_a_rollback(how, tmp_path):
    # Ledger and head put back together look like an old ledger to anyone new: only the heads in the releases tell.
    ledger = Ledger(tmp_path / "x.jsonl")
    ledger.reserve(plan(), "first")
    old = ledger.path.read_bytes()
    old_head = head_of(ledger.path).read_bytes()
    ledger.reserve(plan(), "second")
    if how in ("cut", "both put back"):
        ledger.path.write_bytes(old)
    if how == "both put back":
        head_of(ledger.path).write_bytes(old_head)
        assert len(Ledger(ledger.path).entries()) == 1
    if "deleted" in how:
        ledger.path.unlink()
    if how == "both deleted":
        head_of(ledger.path).unlink()
        assert Ledger(ledger.path).entries() == []
    for access in (
        Ledger.entries,
        Ledger.compute_spent_cost,
        Ledger.limit,
        lambda ledger: ledger.reserve(plan(), "m"),
    ):
        with pytest.raises(LedgerError):
            access(ledger)


# Several writers


@pytest.mark.parametrize(
    ("writers", "count"), [(16, 5), pytest.param(16, 300, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(1200)
def test_sixteen_processes(writers, count, forks, tmp_path, trust):
    path = tmp_path / "x.jsonl"
    start = time.monotonic() + 0.5
    codes, _ = forks.do("reserve", times=writers, path=path, count=count, start=start)
    assert codes == [0] * writers
    entries = Ledger(path).entries()
    assert [entry["n"] for entry in entries] == list(range(len(entries)))
    methods = [entry["method"] for entry in entries if entry["kind"] == "reserve"]
    assert sorted(methods) == sorted([f"writer {number}" for number in range(writers)] * count)
    marks = [
        (entry["kind"], entry["ticket"]) for entry in entries if entry["kind"] in ("ask", "commit")
    ]
    assert len(set(marks)) == len(marks) == 2 * writers * -(-count // 10)
    trust(
        "B2",
        "reservations of 16 writers at once kept, none twice",
        len(methods),
        of=writers * count,
    )


@pytest.mark.parametrize("kills", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_writers_that_are_killed(kills, forks, tmp_path):
    for number in range(kills):
        seconds = 0.02 * (5 - number)
        path = tmp_path / "x.jsonl"
        forks.do("reserve", times=3, kill_after=seconds, path=path, count=10_000)
        entries = Ledger(path).entries()
        assert [entry["n"] for entry in entries] == list(range(len(entries)))
    assert entries


def test_threads_that_share_one_instance(ledger):
    with ThreadPoolExecutor(4) as pool:
        tickets = list(pool.map(lambda _: ledger.reserve(plan(), "m"), range(60)))
    assert sorted(tickets) == list(range(60))
    assert len(Ledger(ledger.path).entries()) == 60


# A disk that fails


class FailingDisk:
    """Every call by which the ledger touches the disk, counted; one of them can be made to fail.

    ``fatal``: (its name, the number of the call, the error, whether all later ones fail, too).
    """

    CALLS: ClassVar = {
        "mkdir": (Path, "mkdir"),
        "flock": (fcntl, "flock"),
        "stat": (Path, "stat"),
        "fsync": (os, "fsync"),
        "replace": (Path, "replace"),
        "read head": (Path, "read_text"),
    }
    MODES: ClassVar = {"a": "lock", "rb": "open to read", "ab": "open to write", "wb": "open head"}
    NAMES = (*CALLS, *MODES.values(), "read", "truncate", "write", "short write")

    def __init__(self, monkeypatch, path, fatal=None):
        self.calls = []
        self.reads = []
        self.path = path
        self.fatal = fatal
        read_records = Sensitive._read_records

        def watch_records(dataset, *args):
            # privacy: by the time a record is read, its charge and its mark are in the file, not in some buffer
            kinds = [json.loads(line)["kind"] for line in path.read_bytes().splitlines()]
            self.reads.append(kinds)
            return read_records(dataset, *args)

        def open_(path, mode="r", **more):
            self.touch(self.MODES[mode])
            wrap = (lambda file: file) if mode == "a" else functools.partial(FailingFile, disk=self)
            return wrap(builtins.open(path, mode, **more))

        monkeypatch.setattr(ledger_file, "open", open_, raising=False)
        monkeypatch.setattr(Sensitive, "_read_records", watch_records)
        for name, (owner, attribute) in self.CALLS.items():
            call = functools.partial(self.call, name, getattr(owner, attribute))
            monkeypatch.setattr(
                owner, attribute, lambda *args, call=call, **more: call(*args, **more)
            )

    def call(self, name, function, *args, **more):
        if not isinstance(args[0], Path) or str(args[0]).startswith(str(self.path.parent)):
            self.touch(name)
        return function(*args, **more)

    def is_failing(self, name):
        """Note a call; whether it is to fail."""
        self.calls.append(name)
        if self.fatal is None or self.fatal[0] != name:
            return False
        later = self.calls.count(name) - 1 - self.fatal[1]
        return later == 0 or (later > 0 and self.fatal[3])

    def touch(self, name):
        if self.is_failing(name):
            self.fail()

    def fail(self):
        raise OSError(self.fatal[2], os.strerror(self.fatal[2]))


class FailingFile:
    """An unbuffered file on a failing disk."""

    def __init__(self, file, disk):
        self.file = file
        self.disk = disk

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def truncate(self, size):
        self.disk.touch("truncate")
        return self.file.truncate(size)

    def write(self, data):
        if self.disk.is_failing("short write"):
            return self.file.write(data[: len(data) // 3])
        if self.disk.is_failing("write"):
            self.file.write(data[: len(data) // 2])
            self.disk.fail()
        return self.file.write(data)

    def read(self):
        self.disk.touch("read")
        return self.file.read()


def ask_once(path):
    if not os.path.lexists(path):
        Ledger(path).set_limit(LIMIT)  # by another instance, so that this one has lines to read
    gate = Gate(make_dataset(), plan(), Ledger(path), Budget(9.0), method="m")
    return gate.sum("walk", lambda image, label: image.flatten(), clip_norm=1.0)


@pytest.mark.usefixtures("real_fsync")
def test_every_call_is_passed(monkeypatch, tmp_path):
    disk = FailingDisk(monkeypatch, tmp_path / "ledger" / "x.jsonl")
    ask_once(disk.path)
    assert set(disk.NAMES) == set(disk.calls)
    assert disk.reads == [["budget", "reserve", "ask"]]
    durable = [name for name in disk.calls if name in ("write", "fsync", "replace")]
    line = ["write", "fsync", "write", "fsync", "replace"]
    first = ["write", "fsync", "fsync", "write", "fsync", "replace"]
    assert durable == [*first, *line * 3]  # the first line has its folder made durable too


@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.EIO, True), (errno.ENOSPC, False)],
    ids=["EIO for good", "ENOSPC once"],
)
@pytest.mark.parametrize("name", FailingDisk.NAMES)
def test_a_failing_disk_stops_before_a_record_is_read(
    name, code, lasting, monkeypatch, tmp_path, trust
):
    with monkeypatch.context() as patch:
        disk = FailingDisk(patch, tmp_path / "count" / "x.jsonl")
        ask_once(disk.path)
        count = disk.calls.count(name)
    for number in range(0 if name == "stat" and not lasting else count):  # it is asked again
        path = tmp_path / str(number) / "x.jsonl"
        with monkeypatch.context() as patch:
            disk = FailingDisk(patch, path, (name, number, code, lasting))
            with pytest.raises(LedgerError) as caught:
                ask_once(path)
        assert "\n" not in str(caught.value)
        # A record is read only when charge and mark are on disk; then only the commit was left to fail, which costs nobody privacy.
        whole = ["budget", "reserve", "ask"]
        assert all(kinds == whole for kinds in disk.reads)
        kinds = [entry["kind"] for entry in Ledger(path).entries()]
        assert kinds == whole[: len(kinds)]
        assert not disk.reads or kinds == whole
        ask_once(path)  # the disk is well again, and the ledger goes on
        after = [entry["kind"] for entry in Ledger(path).entries()]
        assert after[-3:] == ["reserve", "ask", "commit"]
        assert after[: len(kinds)] == kinds
        trust("B2", "EIO or ENOSPC in the ledger after which no record was read unpaid", 1, of=1)


@pytest.mark.usefixtures("real_fsync")
def test_a_disk_that_stays_broken_after_a_write_and_a_head_that_never_can_be_written(
    monkeypatch, ledger
):
    # The line cannot be taken back either: it counts then, since an over-charge is safe, and the ledger stays sound.
    ledger.reserve(plan(), "one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_with(errno.EIO))
        patch.setattr(os, "ftruncate", fail_with(errno.EIO))
        with pytest.raises(LedgerError, match="cannot be written"):
            ledger.reserve(plan(), "two")
    # A full disk may take a line into a block's slack and no new file: however often one tries, the ledger must open afterwards.
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail_with(errno.ENOSPC))
        for _ in range(3):
            with pytest.raises(LedgerError):
                ledger.reserve(plan(), "again")
    assert [entry["method"] for entry in Ledger(ledger.path).entries()] == ["one", "two"]
    assert ledger.reserve(plan(), "three") == 2


def test_a_full_disk(forks, tmp_path):
    path = tmp_path / "x.jsonl"
    codes, _ = forks.do("fill_up", path=path, report=tmp_path / "report.json")
    assert codes == [0]
    errors = json.loads((tmp_path / "report.json").read_text())
    assert len(errors) == 5
    assert all("cannot be written" in error for error in errors)
    methods = [entry["method"] for entry in Ledger(path).entries()]
    assert methods == ["before", *["after!"] * 5]
