"""The record itself: a figure is kept if and only if its test passed."""

import importlib.util
import json
import os
import sys
from pathlib import Path

from assurance.mutate import trial

PLUGIN = "conftest_of_all"  # by a name of its own: several folders of tests have a conftest

SOME = """
def test_good(trust):
    trust('X1', 'good', 3, of=3)

def test_other():
    pass

def test_bad(trust):
    trust('X1', 'bad', 2, of=3)
    assert False
"""


def loaded():
    """In the child: the suite's own conftest, as a plugin."""
    spec = importlib.util.spec_from_file_location(PLUGIN, Path(__file__).parents[1] / "conftest.py")
    sys.modules[PLUGIN] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PLUGIN])


def test_only_what_a_passing_test_counted_is_kept(tmp_path):
    (tmp_path / "test_some.py").write_text(SOME)
    kept = tmp_path / "kept.jsonl"

    def ready():
        os.environ["PRIVOT_TRUST"] = str(kept)
        loaded()

    seen = trial(["-p", PLUGIN, "-m", "trust", str(tmp_path)], ready)
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    said = [
        (line["goal"], line["what"], line["figure"], line["of"]) for line in lines if "goal" in line
    ]
    ends = {line["test"].split("::")[-1]: line["outcome"] for line in lines if "outcome" in line}
    assert (seen["code"], seen["passed"]) == (1, 1), (
        f"a test that passes and one that fails: {seen}"
    )
    assert said == [("X1", "good", 3, 3)], (
        "a figure of a failed test was kept, or one of a passed test was lost"
    )
    assert ends == {"test_good": "passed", "test_bad": "failed"}, (
        "`-m trust` takes tests that record, and how each ended is kept"
    )


def test_without_the_variable_nothing_is_kept(tmp_path):
    (tmp_path / "test_some.py").write_text(SOME)
    trial(["-p", PLUGIN, str(tmp_path)], loaded)
    assert not list(tmp_path.glob("*.jsonl"))
