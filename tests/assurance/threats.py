"""`make trust`: run the tests of all goals, store figures in docs/trust.json, write docs/threats.md.

python tests/assurance/threats.py            all goals, fast and slow, one after another
python tests/assurance/threats.py G1 B2      these alone; of the others the last result stays
python tests/assurance/threats.py --rest     those that have no result of this source yet: what a broken-off run left
python tests/assurance/threats.py --page     only write the page again
"""

import ast
import collections
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "trust.json"
PAGE = ROOT / "docs" / "threats.md"
GOALS = tomllib.loads((HERE / "goals.toml").read_text())["goal"]
THREATS = tomllib.loads((HERE / "threats.toml").read_text())["threat"]


PACES = {
    "fast": "in `make test`",
    "slow": "in `make trust` alone",
    "both": "part of them in `make test`, all in `make trust`",
}


def belongs_to(test, goal):
    """Whether a node id is among the tests of a goal."""
    return any(
        test == name or test.startswith((f"{name}::", f"{name}[", f"{name}/"))
        for name in goal["tests"]
    )


def summarize(lines, goals, facts):
    """{goal: outcomes of its tests, and the sum of their figures}, of all goals that have lines."""
    recorded = {line["goal"] for line in lines if "goal" in line}
    if unknown := recorded - {goal["id"] for goal in GOALS}:
        raise SystemExit(f"tests record for goals that goals.toml does not have: {sorted(unknown)}")
    results = {}
    for goal in goals:
        outcomes = [line for line in lines if "outcome" in line and belongs_to(line["test"], goal)]
        last = {line["test"]: line for line in outcomes}
        figures = {}
        for line in lines:
            if line.get("goal") == goal["id"]:
                figures.setdefault(line["what"], []).append(line)
        if not last and not figures:
            continue
        counts = collections.Counter(line["outcome"] for line in last.values())
        results[goal["id"]] = {
            **facts,
            "passed": counts["passed"],
            "failed": sorted(test for test, line in last.items() if line["outcome"] == "failed"),
            "skipped": counts["skipped"],
            "seconds": round(sum(line["seconds"] for line in last.values())),
            "figures": [add_figures(what, lines) for what, lines in figures.items()],
        }
    return results


def add_figures(what, lines):
    """One figure of all that tests recorded under one name."""
    numbers = [line["figure"] for line in lines]
    figure = sum(numbers) if len(numbers) > 1 else numbers[0]
    totals = [line["of"] for line in lines if line["of"] is not None]
    notes = sorted(line["note"] for line in lines if line.get("note"))
    return {
        "what": what,
        "figure": round(figure, 4) if isinstance(figure, float) else figure,
        "of": sum(totals) if totals else None,
        "tests": sorted({line["test"].split("[")[0] for line in lines}),
        **({"notes": notes} if notes else {}),
    }


def describe_run():
    """When, of which source and on what kind of machine."""
    import torch

    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    is_changed = git("status", "--porcelain", "privot", "tests")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}"
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git("rev-parse", "--short", "HEAD") + ("+" if is_changed else ""),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {gpu}, {versions}",
    }


# The page


def format_figure(figure):
    number = figure["figure"]
    if isinstance(number, (int, float)):
        number = f"{number:,}"
    total = f" of {figure['of']:,}" if figure["of"] is not None else ""
    return f"{figure['what']}: **{number}**{total}"


def format_outcome(result):
    if result is None:
        return "not run yet"
    skipped = f", {result['skipped']} skipped" if result["skipped"] else ""
    failed = f"**{len(result['failed'])} FAILED**, " if result["failed"] else ""
    return f"{failed}{result['passed']} passed{skipped}"


def link_test(test):
    file, _, function = test.partition("::")
    return f"[{function or Path(file).name}](../{file})"


def link_goals(threat, results):
    """The goals that answer a threat, and whether their tests passed."""
    for goal in GOALS:
        if threat["id"] in goal["answers"]:
            result = results.get(goal["id"])
            state = "not run yet" if result is None else "fails" if result["failed"] else "passes"
            yield f"[{goal['id']}](#{goal['id'].lower()}) {state}"
    if not threat.get("promised", True):
        yield "not promised"


def format_goal(goal, result):
    tests = ", ".join(map(link_test, goal["tests"]))
    outcome = f"- Tests: {format_outcome(result)} ({tests}; {PACES[goal['pace']]})"
    yield from (f"### {goal['id']}", "", f"{goal['says']} Asked for: {goal['wanted']}.", "")
    if result is None:
        yield from (outcome, "")
        return
    yield from (f"- {format_figure(figure)}" for figure in result["figures"])
    yield outcome
    yield from (f"- Failed: `{test}`" for test in result["failed"])
    run = f"{result['date']}, source {result['commit']}, {result['machine']}"
    yield f"- {run}, {result['seconds']} s"
    notes = [f"- {note}" for figure in result["figures"] for note in figure.get("notes", [])]
    if notes:
        yield from ("", "<details><summary>One by one</summary>", "", *notes, "", "</details>")
    yield ""


def build_page(results):
    """docs/threats.md, of goals.toml, threats.toml and docs/trust.json alone."""
    text = [
        "# Threats, and what shows our answers",
        "",
        "This page is written by `make trust` from the suite's own record (`docs/trust.json`), and a test holds it to that: it is not",
        "edited by hand. The list of 26 classes comes from published attacks on, and audits of, software of this kind. What we promise,",
        "and against whom, is in [the promise](promise.md).",
        "",
        "Severity: **C**, the claim is false by accident, no attacker needed; **T**, false under a strong attacker; **A**, availability,",
        "or code that runs.",
        "",
        "| | threat | severity | our answer | shown by |",
        "|---|---|---|---|---|",
    ]
    for threat in THREATS:
        cells = [threat[key] for key in ("id", "name", "severity", "answer")]
        cells.append(", ".join(link_goals(threat, results)))
        text.append(f"| {' | '.join(cells)} |")
    text += ["", "## What was shown last", ""]
    for goal in GOALS:
        text += format_goal(goal, results.get(goal["id"]))
    return "\n".join(text)


def find_missing(test):
    """What a named test lacks: its file, or the function in it; empty if it has both."""
    file, _, function = test.partition("::")
    if not (ROOT / file).exists():
        return file
    tree = ast.parse((ROOT / file).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return test if function and function.split("[")[0] not in names else ""


def list_recording_files():
    """Test files in which something asks for the fixture `trust`."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(text if "trust" in (text := file.read_text()) else "")
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        if any(arg.arg == "trust" for function in functions for arg in function.args.args):
            yield file.relative_to(ROOT).as_posix()


def print_table(results):
    from rich.console import Console
    from rich.table import Table

    table = Table(title="The trust suite", show_lines=True)
    for head in ("goal", "what it says", "figures", "tests", "seconds"):
        table.add_column(head, overflow="fold")
    for goal in GOALS:
        result = results.get(goal["id"])
        figures = "\n".join(map(format_figure, result["figures"])) if result else ""
        style = "red" if result and result["failed"] else "yellow" if result is None else "green"
        outcome = f"[{style}]{format_outcome(result)}[/]"
        cells = [goal["says"], figures, outcome, str(result["seconds"] if result else "")]
        table.add_row(goal["id"], *(cell.replace("**", "") for cell in cells))
    Console().print(table)


def run_tests(goal):
    """Run the tests of one goal: (exit code, lines of its record)."""
    command = [sys.executable, "-m", "pytest", "-n2", "--dist=worksteal", "--fresh", *goal["tests"]]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "lines.jsonl"
        record.touch()
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PRIVOT_TRUST": str(record)}
        print(f"\n{goal['id']}: {goal['says']}", flush=True)
        code = subprocess.run(command, cwd=ROOT, env=env).returncode
        return code, list(map(json.loads, record.read_text().splitlines()))


def main(words):
    results = json.loads(STORED.read_text()) if STORED.exists() else {}
    code = 0
    facts = describe_run()
    for goal in GOALS:
        is_current = results.get(goal["id"], {}).get("commit") == facts["commit"]
        if not (not words or goal["id"] in words or (words == ["--rest"] and not is_current)):
            continue
        failed, lines = run_tests(goal)
        code = code or failed
        results |= summarize(lines, [goal], facts)
        results = {goal["id"]: results[goal["id"]] for goal in GOALS if goal["id"] in results}
        # Goal by goal: hours of proofs are not lost by a crash.
        STORED.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(build_page(results))
    PAGE.write_text(build_page(results))
    print_table(results)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
