"""kill -9 at any time and at every state of the ledger: a crash can only over-charge, no answer is given twice, a resume ends well."""

import shutil

import pytest
from faults.crash_invariants import KILLED, examine, resumed, states
from faults.crash_scenarios import METHODS, Critics, Walk, make_dataset

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

LEDGER = (  # and the small files beside it: the ticket and the name of the run
    "privot.privacy.ledger:Ledger._append",
    "privot.privacy.ledger_file:_write_synced",
    "privot.privacy.gate:Gate._store_result",
    "privot.io:_write_file",
    "pathlib:Path.write_text",
)


KEEPING = (
    "merf",
    "walk",
    "private-set",
    "gs-wgan",
)  # all their answers, so that a crash loses at most one, and then they say so


def killed_and_resumed(forks, root, which, run=None, **death):
    code, _, end = resumed(forks, root, which, run, **death)
    return code, end


def killed_at_states(forks, folder, which, run, deaths):
    """The ends of runs that were killed at these states; each of them is reached."""
    ends = []
    for number, (site, fatal, when) in enumerate(deaths):
        known = run if which in KEEPING else None
        code, end = killed_and_resumed(
            forks, folder / f"state {number}", which, known, site=site, fatal=fatal, when=when
        )
        assert code == KILLED
        ends.append(end)
    return ends


def killed_over_time(forks, folder, which, run, wanted):
    """The ends of so many runs that were killed at times spread evenly over a run."""
    ends = []
    tries = 0
    seconds = run.seconds
    while len(ends) < wanted:
        moment = seconds * (
            tries * 0.6180339887 % 1
        )  # the golden section spreads any number of points
        code, end = killed_and_resumed(
            forks,
            folder / f"time {tries}",
            which,
            run if which in KEEPING else None,
            kill_after=moment,
        )
        tries += 1
        assert tries < 5 * wanted
        if code == KILLED:
            ends.append(end)
        else:
            seconds *= 0.9  # the machine is faster now than when it was measured
    return ends


def told(trust, ends, which):
    trust(
        "B1",
        "kill -9 survived: nothing unpaid, no answer twice, a resume that ends",
        len(ends),
        of=len(ends),
    )
    trust(
        "B1",
        "resumed runs that finished (the others had lost an answer, and said so)",
        ends.count("finished"),
        of=len(ends),
    )
    if which in KEEPING:
        trust(
            "B1",
            "finished runs equal to an unbroken one to the byte, given the same answers",
            ends.count("finished"),
            of=ends.count("finished"),
        )


@pytest.mark.parametrize("which", [pytest.param("merf", marks=pytest.mark.slow), "walk"])
def test_killed_at_any_time(which, forks, whole, tmp_path, trust):
    ends = killed_over_time(forks, tmp_path, which, whole(which), 5)
    assert "finished" in ends
    told(trust, ends, which)


def test_killed_at_every_state_of_the_ledger(forks, whole, tmp_path, trust):
    run = whole("merf")
    ends = killed_at_states(forks, tmp_path, "merf", run, list(states("merf", run.calls, LEDGER)))
    assert len(ends) >= 20
    assert {"finished", "BudgetError"} <= set(ends)
    told(trust, ends, "merf")


def reservations(root):
    return sum(
        each["kind"] == "reserve" for each in Ledger(root / "ledger" / "small.jsonl").entries()
    )


@pytest.mark.parametrize(
    ("site", "when", "lost"),
    [
        ("privot.privacy.gate:Gate._run_query", "before", 0),
        ("privot.privacy.gate:Gate._run_query", "after", 0),
        ("privot.privacy.gate:Gate._store_result", "before", 0),
        ("privot.privacy.ledger:Ledger._append", "after", 1),
    ],
)
def test_too_many_answers_to_keep(forks, tmp_path, site, when, lost):
    # Nothing of a long stage lies on disk: it goes on after the last mark, and an answer that was marked and not computed is gone.
    steps = METHODS["march"]().steps
    assert steps > MAX_STORED_RESULTS
    root = tmp_path / "run"
    assert killed_and_resumed(forks, root, "march", site=site, fatal=30, when=when) == (
        KILLED,
        "finished",
    )
    assert examine(root) == steps - lost
    assert reservations(root) == 1


@pytest.mark.parametrize(
    ("site", "fatal", "when"),
    [
        ("privot.privacy.gate:Gate._run_query", 0, "after"),
        ("privot.privacy.gate:Gate._run_query", 9, "after"),
        ("privot.privacy.gate:Gate._run_query", 19, "after"),
        ("privot.privacy.ledger:Ledger._append", 6, "after"),
        ("privot.privacy.ledger_file:_write_synced", 12, "midway"),
        ("privot.privacy.gate:Gate.save_shard_states", 0, "midway"),
        ("privot.privacy.gate:Gate.save_shard_states", 1, "before"),
        ("privot.privacy.gate:Gate.save_shard_states", 2, "after"),
    ],
)
def test_critics_go_on_with_what_they_learned(forks, tmp_path, site, fatal, when):
    root = tmp_path / "run"
    assert killed_and_resumed(forks, root, "critics", site=site, fatal=fatal, when=when) == (
        KILLED,
        "finished",
    )
    assert reservations(root) == 1


def interrupted(at):
    def progress(stage, step, of, **facts):
        if step == at:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("at", [2, 9, 20])
def test_critics_are_taken_up_as_they_were_stored(tmp_path, ledger, monkeypatch, at):
    way = {"method": Critics(), "out": tmp_path / "out", "ledger": ledger}
    ages = []
    split = Gate.split_into_shards
    with pytest.raises(KeyboardInterrupt):
        synthesize(make_dataset(), **way, progress=interrupted(at))
    assert len(list(tmp_path.glob("*.vault?.*"))) == (at >= 4)
    monkeypatch.setattr(
        Gate,
        "split_into_shards",
        lambda self, *rest: (split(self, *rest), ages.append(self._shards[1]["age"].tolist()))[0],
    )
    synthesize(make_dataset(), **way, resume=True)
    assert ages == [
        [float(at // 4)] * 4
    ]  # stored after every fourth step, when each of the four has had one more lesson
    assert not list(tmp_path.glob("*.vault*"))
    marked = [(each["first"], each["last"]) for each in ledger.entries() if each["kind"] == "ask"]
    rows = Critics().rows
    assert marked == [
        (first, first + rows - 1) for first in range(0, Critics().steps * rows, rows)
    ]  # none twice
    assert [each["kind"] for each in ledger.entries()].count("reserve") == 1
    verify(way["out"])


def test_without_a_crash_nothing_secret_is_left(tmp_path, ledger):
    for out in (tmp_path / "out", None):
        synthesize(make_dataset(), Critics(), out=out, ledger=ledger)
        assert not list(tmp_path.rglob("*.vault*"))


def test_a_kept_run_goes_on_where_it_was(forks, tmp_path):
    # Four of six answers are on disk: the resume computes two, under the same ticket.
    root = tmp_path / "run"
    steps = Walk().steps
    death = {"site": "privot.privacy.gate:Gate._store_result", "fatal": 3, "when": "after"}
    assert killed_and_resumed(forks, root, "walk", **death) == (KILLED, "finished")
    assert examine(root) == steps
    assert (
        sum(each["kind"] == "reserve" for each in Ledger(root / "ledger" / "small.jsonl").entries())
        == 1
    )


def test_two_resumes_at_once(forks, tmp_path):
    # Both hold the same ticket: the ledger lets one of them have each answer.
    root = tmp_path / "run"
    root.mkdir()
    forks.do(
        "synthesize",
        root=root,
        which="walk",
        site="privot.privacy.gate:Gate._store_result",
        fatal=1,
        when="after",
    )
    assert forks.do("synthesize", times=2, root=root, which="walk", resume=True)[0] == [0, 0]
    examine(root)


@pytest.mark.slow
@pytest.mark.parametrize("which", METHODS)
@pytest.mark.timeout(1200)
def test_killed_at_a_hundred_points(which, forks, whole, tmp_path, trust):
    run = whole(which)
    ends = killed_at_states(forks, tmp_path, which, run, list(states(which, run.calls)))
    ends += killed_over_time(forks, tmp_path, which, run, max(20, 100 - len(ends)))
    assert len(ends) >= 100
    assert {"finished"} <= set(ends) <= {"finished", "BudgetError", "LedgerError", "ReleaseError"}
    assert (
        which not in KEEPING or "BudgetError" in ends
    )  # a short run cannot do without an answer that is lost
    told(trust, ends, which)


# What lies in the folder of an unfinished run


@pytest.fixture
def unfinished(tmp_path, ledger, monkeypatch):
    """A run whose answers are all paid for and kept, and that fell over afterwards; returns its arguments."""
    way = {"method": Walk(), "out": tmp_path / "out", "ledger": ledger}

    def falls(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Artifact, "from_images", falls)
        with pytest.raises(RuntimeError):
            synthesize(make_dataset(), **way)
    assert len(list((tmp_path / "out.run").glob("walk-*.safetensors"))) == Walk().steps

    def never(*args):
        raise AssertionError("a record was read")

    monkeypatch.setattr(Sensitive, "_read_records", never)  # nothing below may need one
    return way


def test_it_goes_on_without_another_look_at_the_data(unfinished, ledger):
    lines = ledger.entries()
    synthesize(make_dataset(), **unfinished, resume=True)
    assert ledger.entries() == lines
    assert not unfinished["out"].with_name("out.run").exists()
    verify(unfinished["out"])


def test_it_is_not_gone_on_with_unasked(unfinished):
    with pytest.raises(ReleaseError, match="--resume"):
        synthesize(make_dataset(), **unfinished)


@pytest.mark.parametrize(
    "other",
    [
        {"method": Walk(noise_multiplier=30.0)},
        {"method": Walk(steps=5)},
        {"seed": 1},
        {"insecure_seed": 1},
    ],
)
def test_it_goes_on_as_the_same_run_only(unfinished, other):
    with pytest.raises(ReleaseError, match="other settings"):
        synthesize(make_dataset(), **{**unfinished, **other}, resume=True)


def test_a_seeded_run_never_becomes_a_secret_one(tmp_path, ledger, monkeypatch):
    # Its answers lie on disk with noise that anyone can subtract: the release must not carry a guarantee.
    way = {"method": Walk(), "out": tmp_path / "out", "ledger": ledger}
    with monkeypatch.context() as patch:
        patch.setattr(Artifact, "from_images", None)
        with pytest.raises(TypeError):
            synthesize(make_dataset(), **way, insecure_seed=1)
    with pytest.raises(ReleaseError, match="other settings"):
        synthesize(make_dataset(), **way, resume=True)
    made = synthesize(make_dataset(), **way, insecure_seed=1, resume=True)
    assert isinstance(made.guarantee, NoGuarantee)


def test_it_goes_on_with_the_same_data_only(unfinished):
    other = make_dataset()
    other.name = "another"
    with pytest.raises(ReleaseError, match="other settings"):
        synthesize(other, **unfinished, resume=True)


def test_it_goes_on_with_the_same_ledger_only(unfinished, tmp_path):
    empty = Ledger(tmp_path / "empty.jsonl")
    other = Ledger(tmp_path / "other.jsonl")
    other.reserve(Walk(noise_multiplier=99.0).plan(None), "walk")
    for book in (empty, other):
        with pytest.raises(LedgerError, match="charged to another ledger"):
            synthesize(make_dataset(), **{**unfinished, "ledger": book}, resume=True)


def test_answers_without_their_run_are_not_taken_up(unfinished, tmp_path):
    # As when the folder of a finished run was removed only in part, and another run, at another noise, takes the name.
    (tmp_path / "out.run" / "run.json").unlink()
    for resume in (False, True):
        with pytest.raises(ReleaseError, match="files of another run"):
            synthesize(
                make_dataset(),
                **{**unfinished, "method": Walk(noise_multiplier=300.0)},
                resume=resume,
            )


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_damaged_run_is_refused(unfinished, tmp_path, text):
    (tmp_path / "out.run" / "run.json").write_text(text)
    with pytest.raises(ReleaseError):
        synthesize(make_dataset(), **unfinished, resume=True)


def test_an_altered_answer_is_refused(unfinished, tmp_path):
    first, second = (tmp_path / "out.run" / f"walk-{step}.safetensors" for step in (0, 1))
    shutil.copy(second, first)
    with pytest.raises(ReleaseError, match="altered"):
        synthesize(make_dataset(), **unfinished, resume=True)


def test_a_place_that_cannot_be_written_costs_nothing(tmp_path, ledger):
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
