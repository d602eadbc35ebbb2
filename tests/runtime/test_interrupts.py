"""Ctrl-C while an answer is computed: the first waits until it is stored, the second gives it up."""

import math
import os
import re
import signal
import threading

import pytest

from privot.cli import treat_sigterm_as_sigint
from privot.privacy import secret_side
from privot.runtime.interrupts import RESULT_LOST, defer_sigint
from privot.synthesis import synthesize


@pytest.fixture(autouse=True)
def default_handler():
    """Also where a shell started the tests in its background, without one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def work(interrupts, done, number=signal.SIGINT):
    with defer_sigint():
        for _ in range(interrupts):
            interrupt(number)
        done.append("stored")


@pytest.mark.parametrize(
    ("interrupts", "done", "args"), [(1, ["stored"], ()), (2, [], (RESULT_LOST,))]
)
def test_the_first_interrupt_waits_for_the_end_and_the_second_does_not(
    capfd, interrupts, done, args
):
    worked = []
    with pytest.raises(KeyboardInterrupt) as stop:
        work(interrupts, worked)
    assert (worked, stop.value.args) == (done, args)
    assert "Ctrl-C again" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
    other = threading.Thread(target=work, args=(0, done))  # which may not have handlers
    other.start()
    other.join()
    assert done == ["stored"]


def test_an_error_within_is_the_one_that_is_seen():
    with pytest.raises(ValueError, match="no"), defer_sigint():
        raise ValueError("no")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("ignored", [False, True])
def test_a_request_to_end_is_heard_as_an_interrupt(ignored):
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if ignored:  # then it ends the process at once, as ever: no handler replaces it
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        treat_sigterm_as_sigint()
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) is ignored
        if not ignored:
            done = []
            with pytest.raises(KeyboardInterrupt):
                work(1, done, signal.SIGTERM)
            assert done == ["stored"]
            with pytest.raises(KeyboardInterrupt):
                interrupt(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


SYNTHESIZE = (
    "synthesize digits --method merf --epsilon 5 --out made --ledger ledger.jsonl --json"
    " --set num_features=64 --set steps=5 --set hidden_dim=8"
)


@pytest.mark.parametrize("times", [1, 2])
def test_what_a_stopped_run_says_of_its_answer_is_true(privot, tmp_path, monkeypatch, times):
    add_noise = secret_side.add_noise

    def interrupt_and_add_noise(*given):
        for _ in range(times):
            interrupt()
        return add_noise(*given)

    with monkeypatch.context() as patch:
        patch.setattr(secret_side, "add_noise", interrupt_and_add_noise)
        code, out, err = privot(*SYNTHESIZE.split())
    assert code == 130
    resumed, out_resumed, err_resumed = privot(*SYNTHESIZE.split(), "--resume")
    if times == 1:
        assert re.search(
            r'{"error": "Stopped.*he queries so far stay charged; --resume continues from here',
            out + err,
        )
        assert resumed == 0, err_resumed
        assert (tmp_path / "made" / "manifest.json").exists()
    else:
        assert (RESULT_LOST in out + err, "--resume" in out + err) == (True, False)
        assert (resumed, "lost a query result" in out_resumed + err_resumed) == (2, True)


def test_a_run_that_opened_all_records_is_not_said_to_go_on(tmp_path):
    def stop(stage, step, of, **facts):
        if step:
            raise KeyboardInterrupt

    paths = {"out": tmp_path / "made", "ledger": tmp_path / "ledger.jsonl"}
    with pytest.raises(KeyboardInterrupt) as stopped:
        synthesize("digits", "real-subset", math.inf, **paths, progress=stop)
    assert stopped.value.__notes__ == ["the queries so far stay charged"]
