"""A disk that fails or is full, at every write of a run: one line, nothing read unpaid, and once the disk is well the run goes on."""

import json
import os

import pytest
import torch
from faults.crash_invariants import WRITES, examine, kill_and_resume, list_deaths, read_public
from faults.crash_scenarios import DISK

from privot.io import write_atomically
from privot.privacy import shard_checkpoint
from privot.runtime import Streams

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")

ERRORS = {"LedgerError", "ReleaseError", "OSError"}  # which the command line says in one line
TENSORS = {"x": torch.zeros(2)}


@pytest.mark.usefixtures("real_fsync")
@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_atomically(folder / "x", b"some"),
        lambda folder: shard_checkpoint.write_shard_checkpoint(folder / "x", TENSORS),
        lambda folder: Streams(0, run_folder=folder).save_checkpoint("x", TENSORS),
    ],
    ids=["a file", "the states of critics", "the state of a stage"],
)
def test_all_its_bytes_are_on_the_disk_before_a_file_has_its_name(write, tmp_path, monkeypatch):
    """A name that outlives a power failure while its bytes do not is a run that cannot go on."""
    sizes = {}
    named = []
    fsync = os.fsync

    def watch(file):
        status = os.fstat(file)
        sizes[status.st_ino] = status.st_size
        named.extend(path for path in tmp_path.iterdir() if not path.name.endswith("part"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", watch)
    write(tmp_path)
    (path,) = tmp_path.iterdir()
    assert sizes.get(path.stat().st_ino) == path.stat().st_size > 0
    assert not named


@pytest.mark.parametrize(
    ("which", "code", "stride"),
    [
        ("walk", "EIO", 16),
        *(
            pytest.param(which, code, 1, marks=pytest.mark.slow)
            for which in ("merf", "walk", "private-set", "gs-wgan")
            for code in DISK
        ),
    ],
)
@pytest.mark.timeout(1200)
def test_a_write_that_fails_is_borne(which, code, stride, forks, unbroken, tmp_path, trust):
    run = unbroken(which)
    ends = []
    deaths = list(list_deaths(which, run.calls, WRITES, (code,)))[::stride]
    for number, (site, fatal, _) in enumerate(deaths):
        fault = {"site": site, "fatal": fatal, "when": code}
        _, failure, end = kill_and_resume(forks, tmp_path / str(number), which, run, **fault)
        assert failure in ERRORS or (failure == "" and site == "os:unlink"), fault
        assert end in ("finished", "BudgetError", "LedgerError", "ReleaseError")
        ends.append(end)
    assert "finished" in ends
    trust(
        "B2",
        "EIO or ENOSPC at a write of a whole run: one line, nothing read unpaid, sound afterwards",
        len(ends),
        of=len(ends),
    )


@pytest.mark.parametrize(
    ("which", "stride"),
    [
        ("walk", 750),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("walk", 250), ("critics", 250))
        ),
    ],
)
def test_a_full_disk_in_earnest(which, stride, forks, unbroken, tmp_path, trust):
    """No file may grow beyond so many bytes: the system itself refuses, wherever that is, also in libraries that are not Python's."""
    run = unbroken(which)
    errors = []
    for room in range(0, 4000, stride):
        root = tmp_path / str(room)
        root.mkdir()
        codes, _ = forks.do("synthesize", root=root, which=which, room=room)
        assert codes == [0], f"{room} bytes a file: the run ended in another error"
        errors.append(json.loads((root / "report.json").read_text())["error"])
        examine(root)
        assert (root / "out").exists() == (errors[-1] == "")
        assert not list(root.glob(".out*")), "a release is written whole or not at all"
    assert set(errors) <= {*ERRORS, ""}
    assert len(set(errors)) >= 3, "the disk must be full at several writes"
    assert read_public(tmp_path / "3750")[1]["plan"] == run.public[1]["plan"]
    trust(
        "B2",
        "runs on a disk that is full after so many bytes: one line, or whole",
        len(errors),
        of=len(errors),
    )
