"""A disk that fails or is full, at every write of a run: one line, nothing read unpaid, and once the disk is well the run goes on."""

import json
import os

import pytest
import torch
from faults.crash_invariants import WRITES, examine, public, resumed, states
from faults.crash_scenarios import DISK

from privot.io import write_atomically
from privot.privacy import shard_checkpoint
from privot.runtime import Streams

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")

KNOWN = {"LedgerError", "ReleaseError", "OSError"}  # all of which the command line says in one line


KEEPING = {
    "a file": lambda folder: write_atomically(folder / "x", b"some"),
    "what a critic knows": lambda folder: shard_checkpoint.write_shard_checkpoint(
        folder / "x", {"x": torch.zeros(2)}
    ),
    "where a stage has come to": lambda folder: Streams(0, run_folder=folder).save_checkpoint(
        "x", {"x": torch.zeros(2)}
    ),
}


@pytest.mark.usefixtures("real_fsync")
@pytest.mark.parametrize("what", KEEPING)
def test_all_its_bytes_are_on_the_disk_before_a_file_has_its_name(what, tmp_path, monkeypatch):
    """A name that outlives a power failure while its bytes do not is a run that cannot go on."""
    sizes = {}
    sync = os.fsync
    named = []

    def seen(file):
        found = os.fstat(file)
        sizes[found.st_ino] = found.st_size
        named.extend(each for each in tmp_path.iterdir() if not each.name.endswith("part"))
        sync(file)

    monkeypatch.setattr(os, "fsync", seen)
    KEEPING[what](tmp_path)
    (kept,) = tmp_path.iterdir()
    assert sizes.get(kept.stat().st_ino) == kept.stat().st_size > 0
    assert not named


SLOW = [(which, code, 1) for which in ("merf", "walk", "private-set", "gs-wgan") for code in DISK]


@pytest.mark.parametrize(
    ("which", "code", "every"),
    [("merf", "EIO", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
@pytest.mark.timeout(1200)
def test_a_write_that_fails_is_borne(which, code, every, forks, whole, tmp_path, trust):
    run = whole(which)
    ends = []
    for number, (site, fatal, _) in enumerate(
        list(states(which, run.calls, WRITES, (code,)))[::every]
    ):
        _, failed, end = resumed(
            forks, tmp_path / str(number), which, run, site=site, fatal=fatal, when=code
        )
        assert failed in KNOWN or (failed == "" and site == "os:unlink"), (
            f"{code} at {site}, call {fatal}, ended in {failed or 'nothing'}"
        )
        assert end in ("finished", "BudgetError", "LedgerError", "ReleaseError")
        ends.append(end)
    assert "finished" in ends
    trust(
        "B2",
        "EIO or ENOSPC at a write of a whole run: one line, nothing read unpaid, sound afterwards",
        len(ends),
        of=len(ends),
    )


@pytest.mark.parametrize("which", ["walk", pytest.param("critics", marks=pytest.mark.slow)])
def test_a_full_disk_in_earnest(which, forks, whole, tmp_path, trust):
    """No file may grow beyond so many bytes: the system itself refuses, wherever that is, also in libraries that are not Python's."""
    run = whole(which)
    kinds = []
    for room in range(0, 4000, 250):
        root = tmp_path / str(room)
        root.mkdir()
        assert forks.do("synthesize", root=root, which=which, room=room)[0] == [0], (
            f"{room} bytes a file: the run ended in no known error"
        )
        kinds.append(json.loads((root / "report.json").read_text())["error"])
        examine(root)
        assert (root / "out").exists() == (kinds[-1] == "")
        assert not list(root.glob(".out*")), "a release is there whole or not at all"
    assert set(kinds) <= {*KNOWN, ""}
    assert len(set(kinds)) >= 3, "the room must end at several places"
    assert public(tmp_path / "3750")[1]["plan"] == run.public[1]["plan"]
    trust(
        "B2",
        "runs on a disk that is full after so many bytes: one line, or whole",
        len(kinds),
        of=len(kinds),
    )
