"""What the suite has counted: JSON lines in the file that PRIVOT_TRUST names, if any.

There are two kinds of lines. ``{test, outcome, seconds}``: each test that ended. ``{goal, what,
figure, of, note, test, seconds}``: what a test counted and handed to the fixture ``trust``, if the
test passed. Figures of one goal with the same ``what`` are added up, those of a test with many
parameters too; what must not be added up has a ``what`` of its own.
"""

import json
import os
import time


class Recorder:
    """``trust(goal, what, figure, of=..., note=...)`` of one test: a count, and of how many."""

    def __init__(self, test):
        self.test = test
        self.start = time.perf_counter()
        self.lines = []

    def __call__(self, goal, what, figure, of=None, note=""):
        line = {"goal": goal, "what": what, "figure": figure, "of": of, "note": note}
        seconds = round(time.perf_counter() - self.start, 1)
        self.lines.append(line | {"test": self.test, "seconds": seconds})


def ended(item, call, report):
    """A phase of a test is over: write its outcome, and what it counted if it passed."""
    path = os.environ.get("PRIVOT_TRUST")
    if not path or not (call.when == "call" or report.outcome != "passed"):
        return
    recorder = getattr(item, "funcargs", {}).get("trust")
    lines = recorder.lines if isinstance(recorder, Recorder) and report.passed else []
    seconds = round(call.duration, 1)
    lines = [*lines, {"test": item.nodeid, "outcome": report.outcome, "seconds": seconds}]
    # One write: lines of several processes do not mix.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    finally:
        os.close(file)
