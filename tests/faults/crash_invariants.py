"""What must hold after any crash or failure of a disk, and after any resume."""

import hashlib
import json
import signal
from dataclasses import dataclass
from pathlib import Path

from faults.crash_scenarios import ALSO, SITES
from safetensors.torch import load_file

from privot.privacy.answers import hash_tensor
from privot.privacy.ledger import Ledger
from privot.release import Release
from privot.release.verify import verify

KILLED = -signal.SIGKILL


def examine(root):
    """What must hold after any crash and any resume; returns the number of answers that were ever computed."""
    ledger = Ledger(root / "ledger" / "small.jsonl")
    entries = ledger.entries()  # sound, or LedgerError
    reserved = {entry["n"] for entry in entries if entry["kind"] == "reserve"}
    asked = set()
    digests = {}
    for entry in entries:
        if entry["kind"] == "ask":
            assert entry["ticket"] in reserved
            for step in range(entry["first"], entry["last"] + 1):
                key = entry["ticket"], entry["stage"], step
                assert key not in asked, "an ask was marked twice"
                asked.add(key)
        elif entry["kind"] == "commit":
            key = entry["ticket"], entry["stage"], entry["step"]
            assert key not in digests, "an ask has two digests"
            assert key in asked
            digests[key] = entry["digest"]
    witness = root / "witness"
    lines = witness.read_text().splitlines() if witness.exists() else []
    values = {}
    for *key, digest in map(json.loads, lines):
        assert tuple(key) in asked, "an answer was computed that nobody paid for"
        assert tuple(key) not in values, "an answer was computed twice"
        values[tuple(key)] = digest
        assert digests.get(tuple(key), digest) == digest
    assert digests.keys() <= values.keys()
    for file in root.glob("out.run/*.safetensors"):  # every stored value was computed and paid for
        assert ".public." in file.name or hash_tensor(load_file(file)["value"]) in values.values()
    if (root / "out").exists():
        verify(root / "out")
        head = Release.load(root / "out").metadata["ledger"]["head"]
        assert head in {*(entry["prev"] for entry in entries), ledger.head}
    return len(lines)


def read_public(root):
    """All that a release says, but for where its ledger stood: of runs with the same answers it is the same to the byte."""
    manifest = json.loads((root / "out" / "manifest.json").read_text())
    return hashlib.sha256((root / "out" / "tensors.safetensors").read_bytes()).hexdigest(), {
        **manifest,
        "ledger": None,
    }


@dataclass(frozen=True)
class UnbrokenRun:
    """An unbroken run of a method: how long it takes, how often it passes each site, the answers it was given, what it released."""

    seconds: float
    calls: dict[str, int]
    tape: Path
    public: tuple


def run_unbroken(forks, root, which):
    for name in ("cold", "warm", "tape"):
        (root / name).mkdir()
    forks.do("synthesize", root=root / "cold", which=which)
    warm = root / "warm"
    order = {"root": warm, "which": which, "count": True, "tape": root / "tape"}
    codes, seconds = forks.do("synthesize", **order)
    assert codes == [0]
    calls = json.loads((warm / "report.json").read_text())["calls"]
    return UnbrokenRun(seconds, calls, root / "tape", read_public(warm))


def kill_and_resume(forks, root, which, unbroken=None, **fault):
    """One fault, one resume; returns (exit code, what a disk's failure was called, how the resume ended: finished, or a clear error).

    With the ``unbroken`` run, both have its answers, and what is finished must be what it released.
    """
    root.mkdir()
    tape = unbroken and unbroken.tape
    (code,), _ = forks.do("synthesize", root=root, which=which, tape=tape, **fault)
    assert code in (KILLED, 0)
    report = root / "report.json"
    failure = json.loads(report.read_text())["error"] if report.exists() else ""
    computed = examine(root)
    was_released = (root / "out").exists()
    report.unlink(missing_ok=True)
    assert forks.do("synthesize", root=root, which=which, resume=True, tape=tape)[0] == [0]
    error = json.loads(report.read_text())["error"]
    after = examine(root)
    if error:
        assert error in ("BudgetError", "LedgerError") or was_released, report.read_text()
        assert (root / "out").exists() == was_released, "a resume that stops leaves no release"
        assert after == computed or error != "BudgetError", "a refusal reads nothing"
    else:
        assert not (root / "out.run").exists()
        assert not list((root / "ledger").glob("*.vault*.safetensors"))
    if unbroken and (root / "out").exists():
        assert read_public(root) == unbroken.public, "given the same answers, another release"
    return code, failure, error or "finished"


LONG = ("march", "critics", "gs-wgan", "private-set")  # the first and last few calls at a site


def list_deaths(which, calls, sites=tuple(SITES), ways=("before", "after", "midway")):
    """Every (site, call, way) of a run."""
    for site in sites:
        count = calls.get(site, 0)
        for fatal in range(count):
            if which not in LONG or fatal < 3 or fatal >= count - 2:
                yield from ((site, fatal, way) for way in ways if way != "midway" or SITES[site])


# Every call by which a run writes; a ledger's own are looked at one by one in test_ledger.py.
WRITES = (
    "privot.privacy.ledger_file:_write_synced",
    "privot.io:_write_file",
    "pathlib:Path.write_bytes",
    "pathlib:Path.write_text",
    "pathlib:Path.replace",
    *ALSO,
    "os:unlink",
)
