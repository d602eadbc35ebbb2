"""`make trust`: run the tests of all goals, keep their figures in docs/trust.json, write docs/threats.md and print one table.

python tests/assurance/threats.py            all goals, fast and slow, one after another
python tests/assurance/threats.py G1 B2      these alone; of the others the last result stays
python tests/assurance/threats.py --rest     those that have no result of this source yet: what a broken-off run left
python tests/assurance/threats.py --page     only write the page again
"""

import ast
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
KEPT = ROOT / "docs" / "trust.json"
PAGE = ROOT / "docs" / "threats.md"
GOALS = tomllib.loads((HERE / "goals.toml").read_text())["goal"]
THREATS = tomllib.loads((HERE / "threats.toml").read_text())["threat"]


def of_goal(test, goal):
    """Whether a node id belongs to what shows a goal."""
    return any(
        test == each or test.startswith((f"{each}::", f"{each}[", f"{each}/"))
        for each in goal["tests"]
    )


def results(lines, goals, facts):
    """{goal: how its tests ended, and the sum of what they counted}, of all goals that have a test among the lines."""
    found = {}
    if strange := {line["goal"] for line in lines if "goal" in line} - {
        goal["id"] for goal in GOALS
    }:
        raise SystemExit(f"tests record for goals that goals.toml does not have: {sorted(strange)}")
    for goal in goals:
        ends = {
            line["test"]: line
            for line in lines
            if "outcome" in line and of_goal(line["test"], goal)
        }  # the last counts
        counted = {}
        for line in (line for line in lines if line.get("goal") == goal["id"]):
            counted.setdefault(line["what"], []).append(line)
        if not ends and not counted:
            continue
        found[goal["id"]] = {
            **facts,
            "passed": sum(end["outcome"] == "passed" for end in ends.values()),
            "failed": sorted(test for test, end in ends.items() if end["outcome"] == "failed"),
            "skipped": sum(end["outcome"] == "skipped" for end in ends.values()),
            "seconds": round(sum(end["seconds"] for end in ends.values())),
            "figures": [added(what, each) for what, each in counted.items()],
        }
    return found


def added(what, lines):
    """One figure of all that tests recorded under one name."""
    numbers = [line["figure"] for line in lines]
    figure = sum(numbers) if len(numbers) > 1 else numbers[0]
    whole = [line["of"] for line in lines if line["of"] is not None]
    notes = sorted(line["note"] for line in lines if line.get("note"))
    tests = sorted({line["test"].split("[")[0] for line in lines})
    rounded = round(figure, 4) if isinstance(figure, float) else figure
    return {
        "what": what,
        "figure": rounded,
        "of": sum(whole) if whole else None,
        "tests": tests,
        **({"notes": notes} if notes else {}),
    }


def facts():
    """When, of which source and on what kind of machine."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "privot", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.strip()
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}"
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {gpu}, {versions}"
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit + ("+" if changed else ""),
        "machine": machine,
    }


# The page


def said(figure):
    number = (
        f"{figure['figure']:,}"
        if isinstance(figure["figure"], (int, float))
        else str(figure["figure"])
    )
    return f"{figure['what']}: **{number}**" + (
        f" of {figure['of']:,}" if figure["of"] is not None else ""
    )


def ended(result):
    """In a few words."""
    if result is None:
        return "not run yet"
    words = f"{result['passed']} passed" + (
        f", {result['skipped']} skipped" if result["skipped"] else ""
    )
    return f"**{len(result['failed'])} FAILED**, {words}" if result["failed"] else words


def mark(result):
    return "not run yet" if result is None else "fails" if result["failed"] else "passes"


def linked(test):
    file, _, function = test.partition("::")
    return f"[{function or Path(file).name}](../{file})"


def page(kept):
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
        shown = [
            f"[{goal['id']}](#{goal['id'].lower()}) {mark(kept.get(goal['id']))}"
            for goal in GOALS
            if threat["id"] in goal["answers"]
        ]
        if not threat.get("promised", True):
            shown.append("not promised")
        text.append(
            f"| {threat['id']} | {threat['name']} | {threat['severity']} | {threat['answer']} | {', '.join(shown)} |"
        )
    text += ["", "## What was shown last", ""]
    for goal in GOALS:
        result = kept.get(goal["id"])
        text += [f"### {goal['id']}", "", f"{goal['says']} Asked for: {goal['wanted']}.", ""]
        text += [f"- {said(figure)}" for figure in (result or {}).get("figures", [])]
        text.append(
            f"- Tests: {ended(result)} ({', '.join(linked(test) for test in goal['tests'])}; {PACES[goal['pace']]})"
        )
        text += [f"- Failed: `{test}`" for test in (result or {}).get("failed", [])]
        if result:
            text.append(
                f"- {result['date']}, source {result['commit']}, {result['machine']}, {result['seconds']} s"
            )
        notes = [
            note for figure in (result or {}).get("figures", []) for note in figure.get("notes", [])
        ]
        if notes:
            text += [
                "",
                "<details><summary>One by one</summary>",
                "",
                *(f"- {note}" for note in notes),
                "",
                "</details>",
            ]
        text.append("")
    return "\n".join(text)


PACES = {
    "fast": "in `make test`",
    "slow": "in `make trust` alone",
    "both": "part of them in `make test`, all in `make trust`",
}


def missing(test):
    """What is not there of a test that is named: its file, or the function in it; empty if it is."""
    file, _, function = test.partition("::")
    if not (ROOT / file).exists():
        return file
    if not function:
        return ""
    names = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    return "" if function.split("[")[0] in names else test


def recording():
    """Test files in which something asks for the fixture `trust`."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(text if "trust" in (text := file.read_text()) else "")
        if any(
            isinstance(node, ast.FunctionDef) and "trust" in [each.arg for each in node.args.args]
            for node in ast.walk(tree)
        ):
            yield file.relative_to(ROOT).as_posix()


def table(kept):
    """On the terminal."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title="The trust suite", show_lines=True)
    for head in ("goal", "what it says", "figures", "tests", "seconds"):
        shown.add_column(head, overflow="fold")
    for goal in GOALS:
        result = kept.get(goal["id"])
        figures = "\n".join(
            said(figure).replace("**", "") for figure in (result or {}).get("figures", [])
        )
        style = "red" if result and result["failed"] else "yellow" if result is None else "green"
        seconds = str(result["seconds"] if result else "")
        end = ended(result).replace("**", "")
        shown.add_row(goal["id"], goal["says"], figures, f"[{style}]{end}[/]", seconds)
    Console().print(shown)


def run(goal):
    """Run the tests of one goal: (exit code, lines of its record)."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PRIVOT_TRUST": str(lines)}
        print(f"\n{goal['id']}: {goal['says']}", flush=True)
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-n2", "--dist=worksteal", "--fresh", *goal["tests"]],
            cwd=ROOT,
            env=env,
        ).returncode
        return code, [
            json.loads(line) for line in lines.read_text().splitlines()
        ] if lines.exists() else []


def main(words):
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    code = 0
    now = facts()
    for goal in GOALS:
        mine = words in ([], ["--rest"]) or goal["id"] in words
        if not mine or (
            words == ["--rest"] and kept.get(goal["id"], {}).get("commit") == now["commit"]
        ):
            continue
        failed, lines = run(goal)
        code = code or failed
        kept |= results(lines, [goal], now)
        kept = {goal["id"]: kept[goal["id"]] for goal in GOALS if goal["id"] in kept}
        KEPT.write_text(
            json.dumps(kept, indent=1) + "\n"
        )  # goal by goal: hours of proofs are not lost by a crash
        PAGE.write_text(page(kept))
    PAGE.write_text(page(kept))
    table(kept)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
