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
    book = Ledger(root / "ledger" / "small.jsonl")
    lines = book.entries()  # sound, or LedgerError
    reserved = {each["n"] for each in lines if each["kind"] == "reserve"}
    asked = {}
    digests = {}
    for each in lines:
        if each["kind"] == "ask":
            assert each["ticket"] in reserved
            for step in range(each["first"], each["last"] + 1):
                key = each["ticket"], each["stage"], step
                assert key not in asked, "an ask was marked twice"
                asked[key] = each["n"]
        elif each["kind"] == "commit":
            key = each["ticket"], each["stage"], each["step"]
            assert key not in digests, "an ask has two digests"
            assert key in asked
            digests[key] = each["digest"]
    witness = root / "witness"
    computed = (
        [json.loads(line) for line in witness.read_text().splitlines()] if witness.exists() else []
    )
    values = {}
    for *key, digest in computed:
        assert tuple(key) in asked, "an answer was computed that nobody paid for"
        assert tuple(key) not in values, "an answer was computed twice"
        values[tuple(key)] = digest
        assert digests.get(tuple(key), digest) == digest
    assert digests.keys() <= values.keys()
    for file in root.glob(
        "out.run/*.safetensors"
    ):  # every released value on disk was computed once, and paid for
        assert ".public." in file.name or hash_tensor(load_file(file)["value"]) in values.values()
    if (root / "out").exists():
        verify(root / "out")
        head = Release.load(root / "out").metadata["ledger"]["head"]
        assert head in {*(each["prev"] for each in lines), book.head}
    return len(computed)


def public(root):
    """All that a release says, but for where its ledger stood: of runs with the same answers it is the same to the byte."""
    manifest = json.loads((root / "out" / "manifest.json").read_text())
    return hashlib.sha256((root / "out" / "tensors.safetensors").read_bytes()).hexdigest(), {
        **manifest,
        "ledger": None,
    }


@dataclass(frozen=True)
class Whole:
    """An unbroken run of a method: how long it takes, how often it passes each site, the answers it was given, what it released."""

    seconds: float
    calls: dict[str, int]
    tape: Path
    public: tuple


def unbroken(forks, root, which):
    for name in ("cold", "warm", "tape"):
        (root / name).mkdir()
    forks.do("synthesize", root=root / "cold", which=which)
    codes, seconds = forks.do(
        "synthesize", root=root / "warm", which=which, count=True, tape=root / "tape"
    )
    assert codes == [0]
    calls = json.loads((root / "warm" / "report.json").read_text())["calls"]
    return Whole(seconds, calls, root / "tape", public(root / "warm"))


def resumed(forks, root, which, whole=None, **fault):
    """One fault, one resume; returns (exit code, what a disk's failure was called, how the resume ended: finished, or a clear error).

    With the ``whole`` run, both have its answers, and what is finished must be what it released.
    """
    root.mkdir()
    tape = whole and whole.tape
    (code,), _ = forks.do("synthesize", root=root, which=which, tape=tape, **fault)
    assert code in (KILLED, 0)
    report = root / "report.json"
    failed = json.loads(report.read_text())["error"] if report.exists() else ""
    computed = examine(root)
    done = (root / "out").exists()
    report.unlink(missing_ok=True)
    assert forks.do("synthesize", root=root, which=which, resume=True, tape=tape)[0] == [0]
    said = json.loads(report.read_text())
    after = examine(root)
    if said["error"]:
        assert said["error"] in ("BudgetError", "LedgerError") or done, said
        assert (root / "out").exists() == done, "a resume that stops leaves no release"
        assert after == computed or said["error"] != "BudgetError", "a refusal reads nothing"
    else:
        assert not (root / "out.run").exists()
        assert not list((root / "ledger").glob("*.vault*.safetensors"))
    if whole and (root / "out").exists():
        assert public(root) == whole.public, (
            "given the same answers, a resumed run has made something else than an unbroken one"
        )
    return code, failed, said["error"] or "finished"


LONG = (
    "march",
    "critics",
    "gs-wgan",
    "private-set",
)  # of these the first and last few calls at a site


def states(which, calls, sites=tuple(SITES), ways=("before", "after", "midway")):
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
