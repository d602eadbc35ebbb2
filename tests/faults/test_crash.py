"""kill -9 at any time and at every state of the ledger: a crash can only over-charge, no answer is given twice, a resume ends well."""

import shutil

import pytest
from faults.crash_invariants import KILLED, examine, kill_and_resume, list_deaths
from faults.crash_scenarios import METHODS, Critics, Walk, make_dataset, raise_if_read

from privot.data.dataset import Sensitive
from privot.errors import LedgerError, ReleaseError
from privot.privacy.answers import MAX_STORED_RESULTS
from privot.privacy.gate import Gate
from privot.privacy.guarantee import NoGuarantee
from privot.privacy.ledger import Ledger
from privot.release.artifact import Artifact
from privot.release.verify import verify
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")

RUN_QUERY = "privot.privacy.gate:Gate._run_query"
STORE_RESULT = "privot.privacy.gate:Gate._store_result"
SAVE_SHARDS = "privot.privacy.gate:Gate.save_shard_states"
APPEND = "privot.privacy.ledger:Ledger._append"
WRITE = "privot.privacy.ledger_file:_write_synced"
# and the small files beside the ledger: the ticket and the name of the run
LEDGER_SITES = (APPEND, WRITE, STORE_RESULT, "privot.io:_write_file", "pathlib:Path.write_text")
# Methods that store all answers, so that a crash loses at most one, and then they say so.
STORING = ("merf", "walk", "private-set", "gs-wgan")


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def kill_at_states(forks, folder, which, unbroken, deaths):
    """The ends of runs that were killed at these states; each of them is reached."""
    ends = []
    for number, (site, fatal, when) in enumerate(deaths):
        code, _, end = kill_and_resume(
            forks,
            folder / f"state {number}",
            which,
            unbroken if which in STORING else None,
            site=site,
            fatal=fatal,
            when=when,
        )
        assert code == KILLED
        ends.append(end)
    return ends


def kill_over_time(forks, folder, which, unbroken, wanted):
    """The ends of so many runs that were killed at times spread evenly over a run."""
    ends = []
    tries = 0
    seconds = unbroken.seconds
    while len(ends) < wanted:
        code, _, end = kill_and_resume(
            forks,
            folder / f"time {tries}",
            which,
            unbroken if which in STORING else None,
            kill_after=seconds * (tries * 0.6180339887 % 1),  # the golden section spreads them
        )
        tries += 1
        assert tries < 5 * wanted
        if code == KILLED:
            ends.append(end)
        else:
            seconds *= 0.9  # the machine is faster now than when it was measured
    return ends


def record_kills(trust, ends, which):
    count = len(ends)
    finished = ends.count("finished")
    trust(
        "B1",
        "kill -9 survived: nothing unpaid, no answer twice, a resume that ends",
        count,
        of=count,
    )
    trust(
        "B1",
        "resumed runs that finished (the others had lost an answer, and said so)",
        finished,
        of=count,
    )
    if which in STORING:
        trust(
            "B1",
            "finished runs equal to an unbroken one to the byte, given the same answers",
            finished,
            of=finished,
        )


@pytest.mark.parametrize("which", [slow("merf"), slow("walk")])
def test_killed_at_any_time(which, forks, unbroken, tmp_path, trust):
    ends = kill_over_time(forks, tmp_path, which, unbroken(which), 5)
    assert "finished" in ends
    record_kills(trust, ends, which)


@pytest.mark.parametrize(
    ("which", "some", "count"), [("walk", slice(5, None, 16), 3), slow("merf", slice(None), 20)]
)
def test_killed_at_every_state_of_the_ledger(which, some, count, forks, unbroken, tmp_path, trust):
    run = unbroken(which)
    deaths = list(list_deaths(which, run.calls, LEDGER_SITES))[some]
    ends = kill_at_states(forks, tmp_path, which, run, deaths)
    assert len(ends) >= count
    assert {"finished", "BudgetError"} <= set(ends)
    record_kills(trust, ends, which)


@pytest.mark.slow
@pytest.mark.parametrize("which", METHODS)
@pytest.mark.timeout(1200)
def test_killed_at_a_hundred_points(which, forks, unbroken, tmp_path, trust):
    run = unbroken(which)
    ends = kill_at_states(forks, tmp_path, which, run, list_deaths(which, run.calls))
    ends += kill_over_time(forks, tmp_path, which, run, max(20, 100 - len(ends)))
    assert len(ends) >= 100
    assert {"finished"} <= set(ends) <= {"finished", "BudgetError", "LedgerError", "ReleaseError"}
    if which in STORING:  # a short run cannot do without an answer that is lost
        assert "BudgetError" in ends
    record_kills(trust, ends, which)


@pytest.mark.parametrize(
    ("which", "site", "fatal", "when", "lost"),
    [
        ("walk", STORE_RESULT, 3, "after", 0),  # four of six answers are on disk
        slow("march", RUN_QUERY, 30, "before", 0),
        slow("march", RUN_QUERY, 30, "after", 0),
        slow("march", STORE_RESULT, 30, "before", 0),
        slow("march", APPEND, 30, "after", 1),
        slow("critics", RUN_QUERY, 0, "after", None),
        slow("critics", RUN_QUERY, 9, "after", None),
        slow("critics", RUN_QUERY, 19, "after", None),
        slow("critics", APPEND, 6, "after", None),
        slow("critics", WRITE, 12, "midway", None),
        ("critics", SAVE_SHARDS, 0, "midway", None),
        slow("critics", SAVE_SHARDS, 1, "before", None),
        slow("critics", SAVE_SHARDS, 2, "after", None),
    ],
)
def test_a_killed_run_goes_on_where_it_was(forks, tmp_path, which, site, fatal, when, lost):
    """Under the same charge. Nothing of a long stage lies on disk: it goes on after the last mark, and an answer that was marked and
    not computed is gone; critics go on with what they learned."""
    assert METHODS["march"]().steps > MAX_STORED_RESULTS
    root = tmp_path / "run"
    code, _, end = kill_and_resume(forks, root, which, site=site, fatal=fatal, when=when)
    assert (code, end) == (KILLED, "finished")
    computed = examine(root)
    assert lost is None or computed == METHODS[which]().steps - lost
    entries = Ledger(root / "ledger" / "small.jsonl").entries()
    assert sum(entry["kind"] == "reserve" for entry in entries) == 1


@pytest.mark.parametrize("at", [slow(2), 9, slow(20)])
def test_critics_are_resumed_as_they_were_stored(tmp_path, ledger, monkeypatch, at):
    way = {"method": Critics(), "out": tmp_path / "out", "ledger": ledger}
    ages = []
    split = Gate.split_into_shards

    def interrupt(stage, step, of, **facts):
        if step == at:
            raise KeyboardInterrupt

    def watch(self, *args):
        split(self, *args)
        ages.append(self._shards[1]["age"].tolist())

    with pytest.raises(KeyboardInterrupt):
        synthesize(make_dataset(), **way, progress=interrupt)
    assert len(list(tmp_path.glob("*.vault?.*"))) == (at >= 4)
    monkeypatch.setattr(Gate, "split_into_shards", watch)
    synthesize(make_dataset(), **way, resume=True)
    # Stored after every fourth step, when each of the four has had one more update.
    assert ages == [[float(at // 4)] * 4]
    assert not list(tmp_path.glob("*.vault*"))
    entries = ledger.entries()
    asked = [(entry["first"], entry["last"]) for entry in entries if entry["kind"] == "ask"]
    rows = Critics().rows
    assert asked == [(first, first + rows - 1) for first in range(0, Critics().steps * rows, rows)]
    assert [entry["kind"] for entry in entries].count("reserve") == 1
    verify(way["out"])


def test_without_a_crash_nothing_secret_is_left(tmp_path, ledger):
    for out in (tmp_path / "out", None):
        synthesize(make_dataset(), Critics(steps=4), out=out, ledger=ledger)
        assert not list(tmp_path.rglob("*.vault*"))


def test_two_resumes_at_once(forks, tmp_path):
    # Both hold the same ticket: the ledger lets one of them have each answer.
    root = tmp_path / "run"
    root.mkdir()
    forks.do("synthesize", root=root, which="walk", site=STORE_RESULT, fatal=1, when="after")
    assert forks.do("synthesize", times=2, root=root, which="walk", resume=True)[0] == [0, 0]
    examine(root)


# What lies in the folder of an unfinished run


@pytest.fixture
def unfinished(tmp_path, ledger, monkeypatch):
    """The arguments of a run that failed after all its answers were paid for and stored."""
    way = {"method": Walk(), "out": tmp_path / "out", "ledger": ledger}

    def fail(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Artifact, "from_images", fail)
        with pytest.raises(RuntimeError):
            synthesize(make_dataset(), **way)
    assert len(list((tmp_path / "out.run").glob("walk-*.safetensors"))) == Walk().steps
    monkeypatch.setattr(Sensitive, "_read_records", raise_if_read)  # no test may need one
    return way


def resume(way, dataset=None, resume=True, **other):
    dataset = make_dataset() if dataset is None else dataset
    return synthesize(dataset, **{**way, **other}, resume=resume)


def test_an_unfinished_run_is_finished_without_another_look_at_the_data(unfinished, ledger):
    lines = ledger.entries()
    with pytest.raises(ReleaseError, match="--resume"):
        resume(unfinished, resume=False)
    resume(unfinished)
    assert ledger.entries() == lines
    assert not unfinished["out"].with_name("out.run").exists()
    verify(unfinished["out"])


def test_an_unfinished_run_is_resumed_as_the_same_run_only(unfinished, tmp_path):
    for other in (
        {"method": Walk(noise_multiplier=30.0)},
        {"method": Walk(steps=5)},
        {"seed": 1},
        {"insecure_seed": 1},
        {"dataset": make_dataset("another")},
    ):
        with pytest.raises(ReleaseError, match="other settings"):
            resume(unfinished, **other)
    charged = Ledger(tmp_path / "other.jsonl")
    charged.reserve(Walk(noise_multiplier=99.0).plan(None), "walk")
    for ledger in (Ledger(tmp_path / "empty.jsonl"), charged):
        with pytest.raises(LedgerError, match="charged to another ledger"):
            resume(unfinished, ledger=ledger)


def test_a_seeded_run_never_becomes_a_secret_one(tmp_path, ledger, monkeypatch):
    # Its answers lie on disk with noise that anyone can subtract: the release must not carry a guarantee.
    way = {"method": Walk(), "out": tmp_path / "out", "ledger": ledger}
    with monkeypatch.context() as patch:
        patch.setattr(Artifact, "from_images", None)
        with pytest.raises(TypeError):
            synthesize(make_dataset(), **way, insecure_seed=1)
    with pytest.raises(ReleaseError, match="other settings"):
        resume(way)
    assert isinstance(resume(way, insecure_seed=1).guarantee, NoGuarantee)


def test_answers_without_their_run_are_not_used(unfinished, tmp_path):
    # As when the folder of a finished run was removed only in part, and another run, at another noise, takes the name.
    (tmp_path / "out.run" / "run.json").unlink()
    for is_resumed in (False, True):
        with pytest.raises(ReleaseError, match="files of another run"):
            resume(unfinished, method=Walk(noise_multiplier=300.0), resume=is_resumed)


def test_a_damaged_run_is_refused(unfinished, tmp_path):
    folder = tmp_path / "out.run"
    text = (folder / "run.json").read_text()
    for damaged in ("", "{", "[]", "null"):
        (folder / "run.json").write_text(damaged)
        with pytest.raises(ReleaseError):
            resume(unfinished)
    (folder / "run.json").write_text(text)
    shutil.copy(folder / "walk-1.safetensors", folder / "walk-0.safetensors")
    with pytest.raises(ReleaseError, match="altered"):
        resume(unfinished)


def test_a_path_that_cannot_be_written_costs_nothing(tmp_path, ledger):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReleaseError, match="cannot be written"):
        synthesize(make_dataset(), Walk(), out=tmp_path / "file" / "out", ledger=ledger)
    with pytest.raises(ReleaseError, match="already exists"):
        synthesize(make_dataset(), Walk(), out=".", ledger=ledger)
    assert ledger.entries() == []


def test_a_crash_before_run_json_is_no_run(tmp_path, ledger):
    (tmp_path / "out.run").mkdir()
    (tmp_path / "out.run" / "run.part").write_text("{")
    synthesize(make_dataset(), Walk(), out=tmp_path / "out", ledger=ledger)
    assert not (tmp_path / "out.run").exists()
