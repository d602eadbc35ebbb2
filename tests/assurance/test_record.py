"""A figure is recorded if and only if its test passed."""

import importlib.util
import json
import os
import sys
from pathlib import Path

from assurance.mutate import run_in_child

PLUGIN = "conftest_of_all"  # by a name of its own: several folders of tests have a conftest

SOURCE = """
def test_good(trust):
    trust('X1', 'good', 3, of=3)

def test_other():
    pass

def test_bad(trust):
    trust('X1', 'bad', 2, of=3)
    assert False
"""


def load_plugin():
    """In the child: the suite's own conftest, as a plugin."""
    spec = importlib.util.spec_from_file_location(PLUGIN, Path(__file__).parents[1] / "conftest.py")
    sys.modules[PLUGIN] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PLUGIN])


def test_only_what_a_passing_test_counted_is_recorded(tmp_path):
    (tmp_path / "test_some.py").write_text(SOURCE)
    record = tmp_path / "record.jsonl"

    def prepare():
        os.environ["PRIVOT_TRUST"] = str(record)
        load_plugin()

    result = run_in_child(["-p", PLUGIN, "-m", "trust", str(tmp_path)], prepare)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    figures = [line for line in lines if "goal" in line]
    outcomes = {
        line["test"].split("::")[-1]: line["outcome"] for line in lines if "outcome" in line
    }
    assert (result["code"], result["passed"]) == (1, 1), result
    assert [figure["what"] for figure in figures] == ["good"]
    assert {"goal": "X1", "figure": 3, "of": 3}.items() <= figures[0].items()
    assert outcomes == {"test_good": "passed", "test_bad": "failed"}, "`-m trust` takes recorders"


def test_without_the_variable_nothing_is_recorded(tmp_path):
    (tmp_path / "test_some.py").write_text(SOURCE)
    assert run_in_child(["-p", PLUGIN, str(tmp_path)], load_plugin)["passed"] == 2
    assert not list(tmp_path.glob("*.jsonl"))
