"""The record itself: a figure is kept if and only if its test passed."""

import json
import os

from planting import trial

SOME = """
def test_good(trust):
    trust('X1', 'good', 3, of=3)

def test_other():
    pass

def test_bad(trust):
    trust('X1', 'bad', 2, of=3)
    assert False
"""


def test_only_what_a_passing_test_counted_is_kept(tmp_path):
    (tmp_path / "test_some.py").write_text(SOME)
    kept = tmp_path / "kept.jsonl"
    seen = trial(["-p", "conftest", "-m", "trust", str(tmp_path)], lambda: os.environ.update(PRIVOT_TRUST=str(kept)))
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    said = [(line["goal"], line["what"], line["figure"], line["of"]) for line in lines if "goal" in line]
    ends = {line["test"].split("::")[-1]: line["outcome"] for line in lines if "outcome" in line}
    assert (seen["code"], seen["passed"]) == (1, 1), f"a test that passes and one that fails: {seen}"
    assert said == [("X1", "good", 3, 3)], "a figure of a failed test was kept, or one of a passed test was lost"
    assert ends == {"test_good": "passed", "test_bad": "failed"}, "`-m trust` takes tests that record, and how each ended is kept"


def test_without_the_variable_nothing_is_kept(tmp_path):
    (tmp_path / "test_some.py").write_text(SOME)
    trial(["-p", "conftest", str(tmp_path)])
    assert not list(tmp_path.glob("*.jsonl"))
