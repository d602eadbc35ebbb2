"""The trusted part is counted, and every branch of it is run by its own tests."""

import ast
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from assurance.mutate import ROOT

import privot

TESTS = [
    "tests/privacy",
    "tests/data",
    "tests/release",
    "tests/hostile",
    "tests/faults/test_ledger.py",
    "tests/faults/test_budget.py",
    "tests/cli/test_privatize.py",
    "tests/federated/test_client.py",
]
# A kernel of Triton, which compiles it: test_fused_sum.py compares it with the plain sum.
UNCOUNTED = ["privot/privacy/kernels/clipped_sum.py"]
RULES = """
[run]
branch = true
data_file = {folder}/data
parallel = true
patch = subprocess, _exit
[report]
omit = {uncounted}
exclude_also =
    \\.\\.\\.$
    if TYPE_CHECKING:
"""


def count_code_lines(path):
    """The number of lines that hold code: not blank, no comment, no docstring."""
    tree = ast.parse(text := path.read_text())
    docstrings = set()
    for node in ast.walk(tree):
        has_text = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if has_text and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    is_code = [line and line[0] != "#" and number not in docstrings for number, line in lines]
    return sum(map(bool, is_code))


def test_the_trusted_part_is_counted(trust):
    home = Path(privot.__file__).parent
    lines = [count_code_lines(path) for path in (home / "privacy").glob("*.py")]
    readers = [path for name in ("data", "release") for path in (home / name).glob("*.py")]
    trust("T1", "lines of code of the trusted part (privacy)", sum(lines))
    num_lines = sum(map(count_code_lines, readers))
    trust("T1", "lines of code of readers and releases (data, release)", num_lines)
    # Both limits are what is there now, rounded up. Raise one only with a reason.
    assert max(lines) < 300, "a file has become too long to be read twice"
    assert sum(lines) < 2200, "the trusted part has grown: take something out"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of coverage of the trusted part by its own tests."""
    if "PRIVOT_MEASURED" in os.environ:
        folder = Path(os.environ["PRIVOT_MEASURED"])
    elif "PYTEST_XDIST_WORKER" in os.environ:  # all workers share one measurement
        folder = tmp_path_factory.getbasetemp().parent / "covered"
    else:
        folder = tmp_path_factory.mktemp("covered")
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "covered.json").exists():
            measure_coverage(folder)
    return json.loads((folder / "covered.json").read_text())


def measure_coverage(folder):
    """Run the tests, and leave the report of coverage in a folder."""
    omitted = ",".join(f"*/{name}" for name in UNCOUNTED)
    (folder / "rules").write_text(RULES.format(folder=folder, uncounted=omitted))
    words = ["-m", "not slow", "-q", "-n2", "--dist=worksteal", "-p", "no:cacheprovider"]
    words += [f"--cov-config={folder}/rules", f"--cov-report=json:{folder}/covered.json"]
    words += ["--cov=privot.privacy", "--cov=privot.data", "--cov=privot.release"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env.pop("PRIVOT_TRUST", None)
    env["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "pytest", *words, *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        (folder / "covered.json").unlink(missing_ok=True)
    assert done.returncode == 0, f"the tests of the trusted part do not pass: {done.stdout[-3000:]}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_branch_of_the_trusted_part_is_run(report, trust):
    total = report["totals"]
    branches = total["covered_branches"]
    what = "branches of the trusted part that its tests run"
    trust("T1", what, branches, of=total["num_branches"])
    what = "lines of the trusted part that its tests run"
    trust("T1", what, total["covered_lines"], of=total["num_statements"])
    missed = {
        name: file["missing_lines"] + file["missing_branches"]
        for name, file in report["files"].items()
        if file["missing_lines"] or file["missing_branches"]
    }
    assert branches == total["num_branches"], f"not run: {missed}"
