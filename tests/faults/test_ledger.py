"""The ledger under tampering, several writers and failing disks: no ask is forgotten, and no record is read before its line is on disk."""

import builtins
import errno
import fcntl
import hashlib
import json
import math
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
from faults.crash_scenarios import box, plan

from privot.data.dataset import Sensitive
from privot.errors import BudgetError, LedgerError, ReleaseError
from privot.privacy import ledger_file as module
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_file import GENESIS_DIGEST
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import Fixed, Full, Poisson

ADD_REMOVE = Neighbours.ADD_REMOVE
REPLACE = Neighbours.REPLACE
LOCAL = Neighbours.LOCAL


def of(relation, noise=5.0, steps=1, sampling=None, verb="sum"):
    return Plan((Stage("walk", verb, noise, steps, sampling or Full()),), relation)


def written(path):
    """A ledger with a line of each kind and more than one run."""
    book = Ledger(path, clock=lambda: 0.0)
    book.set_limit(Budget(50.0))
    for number in range(3):
        ticket = book.reserve(plan(steps=2), f"method {number}")
        book.mark_asked(ticket, "walk", 0, 0)
        book.commit(ticket, "walk", 0, hashlib.sha256(b"query_sample").hexdigest())
    book.mark_asked(ticket, "walk", 1, 1)
    return book


def head_of(path):
    return path.with_name(path.name + ".head")


# The chain


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_who_may_not_write_may_read(tmp_path, monkeypatch, number):
    lines = written(tmp_path / "x.jsonl").entries()
    opened = builtins.open

    def sealed(path, *args, **kwargs):
        if str(path).endswith(".lock"):
            raise OSError(number, os.strerror(number))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", sealed)
    book = Ledger(tmp_path / "x.jsonl")
    assert (book.entries(), book.limit()) == (lines, Budget(50.0))
    before = (tmp_path / "x.jsonl").read_bytes()
    for write in (
        lambda: book.set_limit(Budget(60.0)),
        lambda: book.reserve(plan(), "method"),
        lambda: book.mark_asked(1, "walk", 1, 1),
    ):
        with pytest.raises(
            LedgerError, match="can be read here, but not written"
        ):  # nobody would keep another from writing the same line
            write()
    with pytest.raises(LedgerError, match="can be read here, but not written"):
        book.require_writable()
    assert (tmp_path / "x.jsonl").read_bytes() == before
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger(tmp_path / "y.jsonl").set_limit(Budget(1.0))


def test_who_reads_beside_a_writer_is_not_alarmed(tmp_path, monkeypatch):
    """Without the lock a line may be written between two looks; the ledger is sound all the same."""
    book = written(tmp_path / "x.jsonl")
    reader = Ledger(tmp_path / "x.jsonl")
    lock = Ledger._acquire_file_lock
    look = Path.read_text
    monkeypatch.setattr(
        Ledger, "_acquire_file_lock", lambda self, stack: self is not reader and lock(self, stack)
    )

    def slow(path, *args, **kwargs):
        text = look(path, *args, **kwargs)
        monkeypatch.setattr(Path, "read_text", look)
        book.set_limit(Budget(60.0))
        return text

    monkeypatch.setattr(Path, "read_text", slow)
    assert reader.limit() == Budget(60.0)
    assert reader.entries() == book.entries()


def test_a_ledger_that_is_not_there_has_no_lines_and_is_not_made(tmp_path):
    book = Ledger(tmp_path / "far" / "x.jsonl")
    assert book.entries() == []
    assert book.limit() is None
    assert book.compute_spent_cost().epsilon(1e-5) == 0
    assert list(tmp_path.iterdir()) == []
    assert book.head == GENESIS_DIGEST


def test_lines_are_chained_and_the_head_is_kept(ledger):
    book = written(ledger.path)
    lines = ledger.path.read_bytes().splitlines()
    digests = [GENESIS_DIGEST, *(hashlib.sha256(line).hexdigest() for line in lines)]
    for number, line in enumerate(lines):
        entry = json.loads(line)
        assert entry["n"] == number
        assert entry["prev"] == digests[number]
    assert head_of(ledger.path).read_text() == f"{len(lines)} {digests[-1]}\n"
    assert book.head == Ledger(ledger.path).head == ledger.head == digests[-1]
    assert [each["kind"] for each in ledger.entries()][:4] == ["budget", "reserve", "ask", "commit"]


def test_two_instances_see_each_other(ledger):
    other = Ledger(ledger.path)
    first = ledger.reserve(plan(), "one")
    second = other.reserve(plan(), "two")
    assert [first, second] == [0, 1]
    assert [each["method"] for each in ledger.entries()] == ["one", "two"]
    other.mark_asked(first, "walk", 0, 0)
    assert ledger.asked_count(first, "walk") == 1
    other.commit(first, "walk", 0, "d")
    assert Ledger(ledger.path).find_digest(first, "walk", 0) == "d"  # without any call before it
    assert ledger.find_digest(first, "walk", 1) is None


def test_time_is_written_as_the_clock_says(tmp_path):
    book = Ledger(tmp_path / "x.jsonl", clock=lambda: 86400.0)
    book.reserve(plan(), "m")
    assert book.entries()[0]["time"] == "1970-01-02T00:00:00Z"


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
    assert sum(each["kind"] == "commit" for each in lines) == 1


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
    assert not ledger.covers(mine, of(ADD_REMOVE), "m")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "ticket").write_text(str(mine))
    with pytest.raises((LedgerError, ReleaseError)):
        Gate(
            box(),
            plan(),
            Ledger(tmp_path / "another.jsonl"),
            Budget(9.0),
            method="m",
            folder=folder,
        )


# The owner's wall


def test_the_wall_refuses_and_leaves_no_line(ledger):
    one = plan().cost().epsilon(1e-5)
    ledger.set_limit(Budget(one * 1.3))  # two cost 1.46 of one
    ledger.reserve(plan(), "first")
    lines = ledger.path.read_bytes()
    with pytest.raises(BudgetError, match="would come to"):
        ledger.reserve(plan(), "second")
    assert ledger.path.read_bytes() == lines
    ledger.set_limit(Budget(one * 2.5, 1e-4))  # the newest wall counts
    assert ledger.limit() == Budget(one * 2.5, 1e-4)
    ledger.reserve(plan(), "second")
    ledger.set_limit(Budget(one))
    with pytest.raises(BudgetError):
        ledger.reserve(plan(noise=1e6), "third")


def test_an_infinite_wall_is_a_wall(ledger):
    ledger.set_limit(Budget(float("inf")))
    ledger.reserve(plan(noise=0.0), "open")
    assert Ledger(ledger.path).compute_spent_cost().epsilon(1e-5) == float("inf")


def test_a_crashed_run_stays_charged(ledger):
    ledger.reserve(plan(), "crashed before its first ask")
    assert Ledger(ledger.path).compute_spent_cost().epsilon(1e-5) == pytest.approx(
        plan().cost().epsilon(1e-5)
    )


# Several relations


def test_relations_are_summed_where_there_is_a_proof(ledger):
    # Remove, then add: an add/remove Gaussian at noise z is a replace-one Gaussian at z/2.
    ledger.reserve(of(ADD_REMOVE, 10.0, 3), "a")
    assert ledger.compute_spent_cost().mu == pytest.approx((3 / 10**2) ** 0.5)
    ledger.reserve(of(REPLACE, 4.0), "b")
    ledger.reserve(of(LOCAL, 8.0, verb="rows"), "c")
    assert ledger.compute_spent_cost().mu == pytest.approx((3 / 5**2 + 1 / 4**2 + 1 / 8**2) ** 0.5)
    composed = Plan((Stage("x", "sum", 10.0), Stage("y", "sum", 20.0)), ADD_REMOVE)
    assert ledger.compute_spent_cost(extra_plan=composed).mu == pytest.approx(
        (3 / 5**2 + 1 / 4**2 + 1 / 8**2 + 1 / 5**2 + 1 / 10**2) ** 0.5
    )
    ledger.reserve(of(ADD_REMOVE, 0.0), "d")
    assert ledger.compute_spent_cost().epsilon(1e-5) == float("inf")


@pytest.mark.usefixtures("coarse_accounting")  # both sides of each comparison
@pytest.mark.parametrize("first", [0, 1])
def test_sampled_runs_of_two_relations_are_added_up_for_replace(ledger, first):
    runs = [of(REPLACE, 2.0, 3, Fixed(4, 40)), of(ADD_REMOVE, 2.0, 5, Poisson(0.1))]
    alone = [float(each.under_replace_one().cost().epsilon(1e-5)) for each in runs]
    ledger.reserve(runs[first], "one")
    ledger.reserve(runs[1 - first], "other")
    both = (
        of(REPLACE, 2.0, 3, Fixed(4, 40)).stages[0],
        Stage("more", "sum", 1.0, 5, Fixed(math.ceil(0.1 * 2**30), 2**30)),
    )
    spent = ledger.compute_spent_cost().epsilon(1e-5)
    assert spent == pytest.approx(Plan(both, REPLACE).cost().epsilon(1e-5), rel=1e-9)
    assert max(alone) < spent < sum(alone)
    ledger.set_limit(Budget(spent + 0.01))
    with pytest.raises(BudgetError):
        ledger.reserve(runs[1], "too much")


# A torn tail


def test_any_torn_tail_is_dropped(tmp_path):
    # A crash in the middle of a line, at every byte: that call never returned, so nothing was read for it.
    whole = written(tmp_path / "whole.jsonl")
    data = whole.path.read_bytes()
    head = head_of(whole.path).read_text()
    whole.reserve(plan(), "torn")
    line = whole.path.read_bytes()[len(data) :]
    count = len(data.splitlines())
    for length in range(len(line)):
        path = tmp_path / "torn.jsonl"
        path.write_bytes(data + line[:length])
        head_of(path).write_text(head)
        book = Ledger(path)
        assert len(book.entries()) == count
        if length % 50 == 0:
            assert book.reserve(plan(), "next") == count
            assert len(Ledger(path).entries()) == count + 1
    path.write_bytes(data + line)  # whole, but its head was not written any more: it counts
    head_of(path).write_text(head)
    assert len(Ledger(path).entries()) == count + 1
    assert Ledger(path).reserve(plan(), "next") == count + 1


def test_the_first_line_may_be_older_than_the_head_file(tmp_path):
    book = Ledger(tmp_path / "x.jsonl")
    book.reserve(plan(), "first")
    head_of(book.path).unlink()
    assert len(Ledger(book.path).entries()) == 1
    assert Ledger(book.path).reserve(plan(), "second") == 1
    head_of(book.path).unlink()
    with pytest.raises(LedgerError, match="is missing"):
        Ledger(book.path).entries()


# Tampering


def _lines(change):
    def tamper(path):
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return tamper


def _edit(number, key, value):
    def change(lines):
        entry = json.loads(lines[number])
        assert entry[key] != value
        lines[number] = json.dumps({**entry, key: value}, separators=(",", ":")).encode() + b"\n"
        return lines

    return _lines(change)


def _rechain(lines):
    """As one would who knows the format: all digests anew, but the head file forgotten."""
    prev = GENESIS_DIGEST
    out = []
    for number, line in enumerate(lines):
        entry = {**json.loads(line), "n": number, "prev": prev}
        out.append(json.dumps(entry, separators=(",", ":")).encode())
        prev = hashlib.sha256(out[-1]).hexdigest()
    return [line + b"\n" for line in out]


def _misnumbered(path):
    """The first run taken out, with every digest right again, that of the head too: the numbers of the lines tell."""
    lines = path.read_bytes().splitlines()
    prev = GENESIS_DIGEST
    out = []
    for line in lines[:1] + lines[4:]:
        out.append(json.dumps({**json.loads(line), "prev": prev}, separators=(",", ":")).encode())
        prev = hashlib.sha256(out[-1]).hexdigest()
    path.write_bytes(b"\n".join(out) + b"\n")
    head_of(path).write_text(f"{len(out)} {prev}\n")


def _cheaper(lines):
    return _rechain(
        [line.replace(b'"noise_multiplier":5.0', b'"noise_multiplier":5000.0') for line in lines]
    )


def _head(text):
    return lambda path: head_of(path).write_text(text(path) if callable(text) else text)


def _swap(left, right):
    def change(lines):
        lines[left], lines[right] = lines[right], lines[left]
        return lines

    return _lines(change)


QUIET = Plan((Stage("means", "sum", 500.0),), REPLACE).to_json()
EDITS = [
    (0, "epsilon", 500.0),
    (0, "delta", 0.5),
    (0, "kind", "note"),
    (1, "kind", "ask"),
    (1, "method", "other"),
    (1, "plan", {}),
    (1, "plan", QUIET),
    (1, "plan", {**QUIET, "neighbours": "add-remove"}),
    (1, "time", "2030-01-01T00:00:00Z"),
    (1, "n", 7),
    (1, "n", "1"),
    (1, "prev", GENESIS_DIGEST[::-1]),
    (2, "ticket", 4),
    (2, "stage", "walks"),
    (2, "first", 1),
    (2, "last", 5),
    (2, "last", -1),
    (3, "digest", "0" * 64),
    (3, "step", 1),
    (3, "kind", 3),
    (4, "plan", QUIET),
    (7, "plan", QUIET),
    (10, "last", 0),
    (10, "ticket", 1),
    (10, "prev", "0" * 64),
]
DETECTED = {
    **{f"line {number}: {key}={value}": _edit(number, key, value) for number, key, value in EDITS},
    "a key added to the last line": _lines(
        lambda lines: [*lines[:-1], lines[-1].replace(b"}", b',"extra":1}')]
    ),
    **{
        f"line {number} removed": _lines(
            lambda lines, number=number: lines[:number] + lines[number + 1 :]
        )
        for number in range(11)
    },
    **{
        f"line {number} doubled": _lines(
            lambda lines, number=number: lines[: number + 1] + lines[number:]
        )
        for number in range(11)
    },
    **{
        f"cut to {number} lines": _lines(lambda lines, number=number: lines[:number])
        for number in range(11)
    },
    **{f"lines {pair} swapped": _swap(*pair) for pair in ((0, 1), (1, 4), (5, 6), (9, 10))},
    "all lines reversed": _lines(lambda lines: lines[::-1]),
    "the last newline cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "half of the last line cut": lambda path: path.write_bytes(path.read_bytes()[:-60]),
    "an empty line inside": _lines(lambda lines: [*lines[:5], b"\n", *lines[5:]]),
    "an empty line at the end": _lines(lambda lines: [*lines, b"\n"]),
    "an unchained line at the end": _lines(
        lambda lines: [*lines, b'{"n":11,"kind":"budget","epsilon":999,"delta":0.1,"prev":""}\n']
    ),
    "not JSON at the end": _lines(lambda lines: [*lines, b"hello\n"]),
    "not UTF-8 at the end": _lines(lambda lines: [*lines, b"\xff\xfe\n"]),
    "a list at the end": _lines(lambda lines: [*lines, b"[1,2]\n"]),
    "a number at the end": _lines(lambda lines: [*lines, b"3\n"]),
    "a deep nest at the end": _lines(lambda lines: [*lines, b"[" * 100_000 + b"\n"]),
    "DOS line ends": _lines(lambda lines: [line.replace(b"\n", b"\r\n") for line in lines]),
    "a byte-order mark": lambda path: path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes()),
    "spaces after a line": _lines(lambda lines: [lines[0].replace(b"\n", b" \n"), *lines[1:]]),
    "spaces after the last line": _lines(
        lambda lines: [*lines[:-1], lines[-1].replace(b"\n", b" \n")]
    ),
    "written prettily": _lines(
        lambda lines: [json.dumps(json.loads(line)).encode() + b"\n" for line in lines]
    ),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
    "filled with zeros": lambda path: path.write_bytes(bytes(len(path.read_bytes()))),
    "made cheaper, chained anew": _lines(_cheaper),
    "a run taken out, chained anew": _lines(lambda lines: _rechain(lines[:4] + lines[7:])),
    "the wall taken out, chained anew": _lines(lambda lines: _rechain(lines[1:])),
    "a run taken out, chained anew with its head": _misnumbered,
    "another ledger put there": lambda path: shutil.copy(
        written(path.with_name("other.jsonl")).path, path
    ),
    "head deleted": lambda path: head_of(path).unlink(),
    "head emptied": _head(""),
    "head not a head": _head("hello"),
    "head of three words": _head(lambda path: head_of(path).read_text() + " more"),
    "head not a number": _head(lambda path: "x" + head_of(path).read_text()),
    "head not UTF-8": lambda path: head_of(path).write_bytes(b"\xff 1"),
    "head ahead": _head(lambda path: "12 " + head_of(path).read_text().split()[1]),
    "head far ahead": _head(lambda path: "1200000 " + head_of(path).read_text().split()[1]),
    "head behind with its old digest": _head(
        lambda path: "3 " + head_of(path).read_text().split()[1]
    ),
    "head of another digest": _head("11 " + "0" * 64),
    "head far below zero": _head(lambda path: "-99 " + head_of(path).read_text().split()[1]),
    "head turned into a folder": lambda path: (head_of(path).unlink(), head_of(path).mkdir()),
    "ledger turned into a folder": lambda path: (path.unlink(), path.mkdir()),
    "lock turned into a folder": lambda path: (
        path.with_name(path.name + ".lock").unlink(),
        path.with_name(path.name + ".lock").mkdir(),
    ),
}
HARMLESS = {  # by design: every line still counts
    "a torn tail": lambda path: path.write_bytes(path.read_bytes() + b'{"n":11,"ki'),
    "zeros after the last line": lambda path: path.write_bytes(path.read_bytes() + bytes(512)),
    "head older than the ledger": _head(
        lambda path: f"3 {json.loads(path.read_bytes().splitlines()[3])['prev']}"
    ),
    "head of the beginning": _head(f"0 {GENESIS_DIGEST}"),
    "head counted from the end": _head(
        lambda path: f"-1 {json.loads(path.read_bytes().splitlines()[-1])['prev']}"
    ),
    "an old .head.new": lambda path: path.with_name(path.name + ".head.new").write_text("rubbish"),
    "the lock deleted": lambda path: path.with_name(path.name + ".lock").unlink(),
}


def test_there_are_fifty_tamperings():
    assert len(DETECTED) >= 50


@pytest.mark.parametrize("how", DETECTED)
def test_tampering_is_detected(how, tmp_path, trust):
    path = written(tmp_path / "x.jsonl").path
    if how == "another ledger put there":
        Ledger(tmp_path / "other.jsonl").reserve(plan(), "first of another")
    DETECTED[how](path)
    files = {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()}
    for deed in (
        Ledger.entries,
        Ledger.compute_spent_cost,
        lambda book: book.reserve(plan(), "m"),
        lambda book: book.set_limit(Budget(1.0)),
        lambda book: book.head,
    ):
        with pytest.raises(LedgerError):
            deed(Ledger(path))
    assert {
        each.name: each.read_bytes()
        for each in tmp_path.iterdir()
        if each.is_file() and each.name in files
    } == files
    trust("B2", "tamperings detected", 1, of=1)


@pytest.mark.parametrize("how", HARMLESS)
def test_tampering_that_loses_nothing_is_borne(how, tmp_path):
    path = written(tmp_path / "x.jsonl").path
    lines = Ledger(path).entries()
    HARMLESS[how](path)
    assert Ledger(path).entries() == lines
    assert Ledger(path).reserve(plan(), "m") == len(lines)
    assert Ledger(path).entries()[:-1] == lines


def test_any_flipped_bit_is_detected(tmp_path, trust):
    path = written(tmp_path / "x.jsonl").path
    data = path.read_bytes()
    draw = random.Random(0)
    for _ in range(300):
        place = draw.randrange(len(data))
        bit = draw.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        with pytest.raises(LedgerError):
            Ledger(path).entries()
    trust("B2", "flipped bits detected", 300, of=300)


@pytest.mark.parametrize("how", ["cut", "deleted", "both deleted", "both put back"])
def test_who_holds_it_sees_a_rollback_that_files_cannot_show(how, tmp_path):
    # Ledger and head put back together look like an old ledger to anyone new: only the heads in the releases tell. A process that
    # has seen the later lines does notice.
    book = Ledger(tmp_path / "x.jsonl")
    book.reserve(plan(), "first")
    old = book.path.read_bytes()
    old_head = head_of(book.path).read_bytes()
    book.reserve(plan(), "second")
    if how in ("cut", "both put back"):
        book.path.write_bytes(old)
    if how == "both put back":
        head_of(book.path).write_bytes(old_head)
        assert len(Ledger(book.path).entries()) == 1
    if "deleted" in how:
        book.path.unlink()
    if how == "both deleted":
        head_of(book.path).unlink()
        assert Ledger(book.path).entries() == []
    for deed in (
        Ledger.entries,
        Ledger.compute_spent_cost,
        Ledger.limit,
        lambda book: book.reserve(plan(), "m"),
    ):
        with pytest.raises(LedgerError):
            deed(book)


# Several writers


def check_writers(path, writers, each):
    entries = Ledger(path).entries()
    reserved = [line for line in entries if line["kind"] == "reserve"]
    assert len(reserved) == writers * each
    for number in range(writers):
        assert sum(line["method"] == f"writer {number}" for line in reserved) == each
    assert [line["n"] for line in entries] == list(range(len(entries)))
    marks = [
        (line["kind"], line["ticket"]) for line in entries if line["kind"] in ("ask", "commit")
    ]
    assert len(set(marks)) == len(marks) == 2 * writers * -(-each // 10)
    return len(reserved)


@pytest.mark.parametrize(
    ("writers", "each"), [(16, 20), pytest.param(16, 1000, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(1200)
def test_sixteen_processes(writers, each, forks, tmp_path, trust):
    codes, _ = forks.do(
        "reserve",
        times=writers,
        path=tmp_path / "x.jsonl",
        count=each,
        start=time.monotonic() + 0.5,
    )
    assert codes == [0] * writers
    kept = check_writers(tmp_path / "x.jsonl", writers, each)
    trust("B2", "reservations of 16 writers at once kept, none twice", kept, of=writers * each)


def test_writers_that_are_killed(forks, tmp_path):
    for number in range(5):
        forks.do(
            "reserve",
            times=3,
            kill_after=0.02 * (number + 1),
            path=tmp_path / "x.jsonl",
            count=10_000,
        )
        entries = Ledger(tmp_path / "x.jsonl").entries()
        assert [line["n"] for line in entries] == list(range(len(entries)))
    assert entries


def test_threads_that_share_one_instance(ledger):
    tickets = []

    def reserve():
        for _ in range(30):
            tickets.append(ledger.reserve(plan(), "m"))

    threads = [threading.Thread(target=reserve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tickets) == list(range(120))
    assert len(Ledger(ledger.path).entries()) == 120


# A disk that fails


class Sites:
    """Every call by which the ledger touches the disk, counted; one of them can be made to fail."""

    NAMES = (
        "mkdir",
        "lock",
        "flock",
        "stat",
        "open to read",
        "read",
        "open to write",
        "open head",
        "truncate",
        "write",
        "short write",
        "fsync",
        "replace",
        "read head",
    )

    def __init__(self, monkeypatch, path):
        self.calls = []
        self.reads = []
        self.path = path
        self.fatal = None
        self.code = errno.EIO
        self.lasting = False
        opened = builtins.open
        take = Sensitive._read_records

        class File:
            """An unbuffered file whose calls can fail."""

            def __init__(file, real):
                file.real = real

            def __enter__(file):
                return file

            def __exit__(file, *_):
                file.real.close()

            def __getattr__(file, name):
                return getattr(file.real, name)

            def truncate(file, size):
                self.touch("truncate")
                return file.real.truncate(size)

            def write(file, data):
                if self.touch("short write", fails=False):
                    return file.real.write(data[: len(data) // 3])
                if self.touch("write", fails=False):
                    file.real.write(data[: len(data) // 2])
                    raise OSError(self.code, os.strerror(self.code))
                return file.real.write(data)

            def read(file):
                self.touch("read")
                return file.real.read()

        def open_(path, mode="r", **more):
            self.touch(
                {"a": "lock", "rb": "open to read", "ab": "open to write", "wb": "open head"}[mode]
            )
            return File(opened(path, mode, **more)) if mode != "a" else opened(path, mode, **more)

        def site(name, owner, attribute):
            real = getattr(owner, attribute)

            def call(*args, **more):
                if isinstance(args[0], Path) and not str(args[0]).startswith(str(path.parent)):
                    return real(*args, **more)
                self.touch(name)
                return real(*args, **more)

            monkeypatch.setattr(owner, attribute, call)

        def taking(box, *args):
            # privacy's whole point: by the time a record is read, its charge and its mark are in the file, not in some buffer
            kinds = [json.loads(line)["kind"] for line in path.read_bytes().splitlines()]
            self.reads.append(kinds)
            return take(box, *args)

        monkeypatch.setattr(module, "open", open_, raising=False)
        monkeypatch.setattr(Sensitive, "_read_records", taking)
        for name, owner, attribute in (
            ("mkdir", Path, "mkdir"),
            ("flock", fcntl, "flock"),
            ("stat", Path, "stat"),
            ("fsync", os, "fsync"),
            ("replace", Path, "replace"),
            ("read head", Path, "read_text"),
        ):
            site(name, owner, attribute)

    def touch(self, name, fails=True):
        self.calls.append(name)
        over = (
            self.calls.count(name) - 1 - self.fatal[1]
            if self.fatal and self.fatal[0] == name
            else -1
        )
        dead = over == 0 or (over > 0 and self.lasting)
        if dead and fails:
            raise OSError(self.code, os.strerror(self.code))
        return dead


def ask_once(path):
    if not os.path.lexists(path):
        Ledger(path).set_limit(
            Budget(50.0)
        )  # by another instance, so that this one has something to read
    door = Gate(box(), plan(), Ledger(path), Budget(9.0), method="m")
    return door.sum("walk", lambda image, label: image.flatten(), clip_norm=1.0)


@pytest.mark.usefixtures("real_fsync")
def test_every_site_is_passed(monkeypatch, tmp_path):
    sites = Sites(monkeypatch, tmp_path / "ledger" / "x.jsonl")
    ask_once(sites.path)
    assert set(Sites.NAMES) == set(sites.calls)
    assert sites.reads == [["budget", "reserve", "ask"]]
    durable = [name for name in sites.calls if name in ("write", "fsync", "replace")]
    line = ["write", "fsync", "write", "fsync", "replace"]
    first = ["write", "fsync", "fsync", "write", "fsync", "replace"]
    assert durable == [*first, *line * 3]  # the first line has its folder made durable too


@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.EIO, True), (errno.ENOSPC, False)],
    ids=["EIO for good", "ENOSPC once"],
)
@pytest.mark.parametrize("name", Sites.NAMES)
def test_a_failing_disk_stops_before_a_record_is_read(
    name, code, lasting, monkeypatch, tmp_path, trust
):
    with monkeypatch.context() as patch:
        sites = Sites(patch, tmp_path / "count" / "x.jsonl")
        ask_once(sites.path)
        count = sites.calls.count(name)
    for number in range(count):
        path = tmp_path / str(number) / "x.jsonl"
        with monkeypatch.context() as patch:
            sites = Sites(patch, path)
            sites.fatal = (name, number)
            sites.code = code
            sites.lasting = lasting
            if name == "stat" and not lasting:
                continue  # asked again at once, and then answered
            with pytest.raises(LedgerError) as caught:
                ask_once(path)
        assert "\n" not in str(caught.value)
        # A record is read only when charge and mark are on disk; then only the commit was left to fail, which costs nobody privacy.
        whole = ["budget", "reserve", "ask"]
        assert all(kinds == whole for kinds in sites.reads)
        kinds = [each["kind"] for each in Ledger(path).entries()]
        assert kinds == whole[: len(kinds)]
        assert not sites.reads or kinds == whole
        ask_once(path)  # the disk is well again, and the ledger goes on
        after = [each["kind"] for each in Ledger(path).entries()]
        assert after[-3:] == ["reserve", "ask", "commit"]
        assert after[: len(kinds)] == kinds
        trust("B2", "EIO or ENOSPC in the ledger after which no record was read unpaid", 1, of=1)


@pytest.mark.usefixtures("real_fsync")
def test_a_disk_that_stays_broken_after_a_write(monkeypatch, ledger):
    # The line cannot be taken back either: it counts then, since an over-charge is safe, and the ledger stays sound.
    ledger.reserve(plan(), "one")

    def fails(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        patch.setattr(os, "ftruncate", fails)
        with pytest.raises(LedgerError, match="cannot be written"):
            ledger.reserve(plan(), "two")
    assert [each["method"] for each in Ledger(ledger.path).entries()] == ["one", "two"]
    assert ledger.reserve(plan(), "three") == 2


def test_a_head_that_never_can_be_written(monkeypatch, ledger):
    # A full disk may take a line into a block's slack and no new file: however often one tries, the ledger must open afterwards.
    def fails(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        for _ in range(3):
            with pytest.raises(LedgerError):
                ledger.reserve(plan(), "again")
    assert Ledger(ledger.path).entries() == []
    assert ledger.reserve(plan(), "at last") == 0


def test_a_full_disk_in_earnest(forks, tmp_path):
    codes, _ = forks.do("fill_up", path=tmp_path / "x.jsonl", report=tmp_path / "report.json")
    assert codes == [0]
    said = json.loads((tmp_path / "report.json").read_text())
    assert len(said) == 5
    assert all("cannot be written" in each for each in said)
    assert [each["method"] for each in Ledger(tmp_path / "x.jsonl").entries()] == [
        "before",
        *["after!"] * 5,
    ]


@pytest.mark.parametrize("path", [".", "/", ""])
def test_a_folder_is_no_ledger(path):
    with pytest.raises(LedgerError, match="Name a file"):
        Ledger(path)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="--ledger"):
        Ledger(tmp_path / "file" / "x.jsonl").reserve(plan(), "m")
