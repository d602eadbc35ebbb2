"""Ctrl-C while an answer is computed: the first waits until it is kept, the second gives it up; what is said afterwards is true."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from privot.cli import treat_sigterm_as_sigint
from privot.runtime.interrupts import RESULT_LOST, defer_sigint
from privot.synthesis import synthesize


@pytest.fixture(autouse=True)
def listening():
    """Interrupts are heard, also where a shell started the tests in its background and they are not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def worked(interrupts, done, number=signal.SIGINT):
    with defer_sigint():
        for _ in range(interrupts):
            interrupt(number)
        done.append("kept")


def test_the_first_interrupt_waits_for_the_end(capfd):
    done = []
    with pytest.raises(KeyboardInterrupt) as stop:
        worked(1, done)
    assert (done, stop.value.args) == (["kept"], ())
    assert "Ctrl-C again" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_does_not():
    done = []
    with pytest.raises(KeyboardInterrupt) as stop:
        worked(2, done)
    assert (done, stop.value.args) == ([], (RESULT_LOST,))


def test_nobody_elses_handler_is_touched():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        with defer_sigint():
            interrupt()
        assert seen == [1]
    finally:
        signal.signal(signal.SIGINT, before)
    done = []
    other = threading.Thread(
        target=worked, args=(0, done)
    )  # only the main thread may have handlers
    other.start()
    other.join()
    assert done == ["kept"]


def test_an_error_within_is_the_one_that_is_seen():
    with pytest.raises(ValueError, match="no"), defer_sigint():
        raise ValueError("no")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("ignored", [False, True])
def test_a_request_to_end_is_heard_as_an_interrupt(ignored):
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if ignored:  # then it ends the process at once, as ever: nothing is put in its place
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        treat_sigterm_as_sigint()
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) is ignored
        if not ignored:
            done = []
            with pytest.raises(KeyboardInterrupt):
                worked(1, done, signal.SIGTERM)
            assert done == ["kept"]
            with pytest.raises(KeyboardInterrupt):
                interrupt(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


RUN = """
import json, os, signal, sys
import privot.methods.dp_merf, privot.synthesis, torch._dynamo  # once for all forks
from privot.privacy import secret_side
from privot.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
real = secret_side.add_noise
for times, folder, words in json.loads(sys.argv[1]):
    if not (fork := os.fork()):
        os.chdir(folder)
        out = os.open(f"{times}{len(words)}.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(out, 1), os.dup2(out, 2)
        def noisy(*given):
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            return real(*given)
        secret_side.add_noise, sys.argv[1:] = noisy if times else real, words
        main()
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""
WORDS = [
    "synthesize",
    "digits",
    "--method",
    "merf",
    "--epsilon",
    "5",
    "--out",
    "made",
    "--ledger",
    "book.jsonl",
    "--json",
]
WORDS += ["--set", "num_features=64", "--set", "steps=5", "--set", "hidden_dim=8"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By the number of interrupts that a run hears in its answer: (its folder, its code and words, those of a run that goes on with it).

    All of one process, which forks.
    """
    folders = {times: tmp_path_factory.mktemp(f"heard{times}") for times in (1, 2)}
    orders = [
        order
        for times, at in folders.items()
        for order in ((times, str(at), WORDS), (0, str(at), [*WORDS, "--resume"]))
    ]
    surroundings = {**os.environ, "PRIVOT_HOME": str(folders[1] / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(orders)],
        capture_output=True,
        text=True,
        env=surroundings,
        check=True,
    )
    said = [Path(at, f"{times}{len(words)}.txt").read_text() for times, at, words in orders]
    first, resumed, second, again = zip(map(int, done.stdout.split()), said, strict=True)
    return {1: (folders[1], first, resumed), 2: (folders[2], second, again)}


def test_a_run_that_was_stopped_in_an_answer_goes_on(runs):
    folder, (code, text), (after, then) = runs[1]
    assert code == 130
    assert re.search(
        r'{"error": "Stopped.*he queries so far stay charged; --resume continues from here', text
    )
    assert after == 0, then
    assert (folder / "made" / "manifest.json").exists()


def test_a_run_that_opened_all_records_is_not_said_to_go_on(tmp_path):
    def stop(stage, step, of, **facts):
        if step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        synthesize(
            "digits",
            "real-subset",
            math.inf,
            out=tmp_path / "made",
            ledger=tmp_path / "book.jsonl",
            progress=stop,
        )
    assert stopped.value.__notes__ == ["the queries so far stay charged"]


def test_a_run_whose_answer_was_given_up_says_so(runs):
    _, (code, text), (after, then) = runs[2]
    assert (code, RESULT_LOST in text, "--resume" in text) == (130, True, False)
    assert (after, "lost a query result" in then) == (2, True)
