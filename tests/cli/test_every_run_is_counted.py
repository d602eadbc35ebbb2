"""The table of verbs in docs/promise.md: it names every verb, and each row is run and held against the ledger of the data set."""

import ast
import inspect
import pkgutil
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.command_words import TINY_SET, format_settings
from support.in_process_federation import TINY_ARGUMENTS, serve_here, simulate_here
from support.tiny_settings import choose_tiny_settings

import privot as package
from privot.cli import app, demo
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import ledger_path
from privot.testing import score_runs

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(package.__file__).parents[1]
MADE_UP_RECORDS = "privot.testing.distinguisher"
COUNTED = ("budget", "reserve", "part", "internal")  # ask and commit lines belong to a reservation
MERF = format_settings(
    {key: value for key, value in choose_tiny_settings("merf").items() if key != "noise_multiplier"}
)


def read_table():
    """{command: its other cells} of the table."""
    text = (ROOT / "docs" / "promise.md").read_text()
    table = text.split("<!-- table of verbs: begin -->")[1].split("<!-- table of verbs: end -->")[0]
    lines = [line.strip().strip("|").split("|") for line in table.strip().splitlines()]
    head, _, *body = [[cell.strip() for cell in line] for line in lines]
    ledger = "lines in the data set's own ledger"
    assert head == ["command", "Python", "records read", ledger, "what leaves"]
    assert len({row[0] for row in body}) == len(body), "two rows have the same command"
    return {row[0]: row[1:] for row in body}


ROWS = read_table()


def list_verbs(typer, before=""):
    """Every verb that the command line has, sub-commands included."""
    for command in typer.registered_commands:
        yield before + (command.name or command.callback.__name__)
    for group in typer.registered_groups:
        yield from list_verbs(group.typer_instance, f"{before}{group.name} ")


def list_names(command):
    """The Python names of a row."""
    return re.findall(r"`([\w.]+)`", ROWS[command][0])


def resolve(name):
    """The object of a dotted name."""
    if "federated" in name:
        pytest.importorskip("flwr", reason="the extra federated is not installed")
    return pkgutil.resolve_name(name)


def test_the_table_names_every_verb_and_every_public_function():
    verbs = {re.match(r"`([a-z ]+?)(?: --[a-z-]+)?`", command)[1] for command in ROWS}
    assert verbs == set(list_verbs(app))
    functions = [name for name in package.__all__ if inspect.isroutine(getattr(package, name))]
    names = {name for command in ROWS for name in list_names(command)}
    assert {f"privot.{name}" for name in functions} <= names


@pytest.mark.parametrize("command", ROWS)
def test_the_python_names_of_the_table_exist(command):
    values = [resolve(name) for name in list_names(command)]
    assert all(callable(value) or inspect.ismodule(value) for value in values)


def test_whatever_makes_a_gate_is_in_the_table_as_charged():
    modules = set()  # those that make a gate to real records
    for path in (ROOT / "privot").rglob("*.py"):
        if "Gate(" not in (text := path.read_text()):
            continue
        calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        if any(ast.unparse(function).split(".")[-1] == "Gate" for function in calls):
            modules.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    modules.remove(MADE_UP_RECORDS)
    signature = inspect.signature(score_runs)  # it takes no dataset
    assert list(signature.parameters) == ["method", "num_runs", "noise_share", "epsilon"]
    charged = [command for command, row in ROWS.items() if "reserve" in row[2]]
    assert len(modules) >= 4
    assert modules <= {resolve(name).__module__ for row in charged for name in list_names(row)}


@pytest.fixture
def files(tmp_path):
    """Tiny data sets of sensitive records."""
    for seed, (name, count, side, classes) in enumerate(
        (("scans", 48, 8, 3), ("others", 48, 8, 3), ("owners", 48, 8, 3), ("large", 8, 32, 2))
    ):
        images = np.random.default_rng(seed).random((count, side, side), np.float32)
        np.savez(tmp_path / f"{name}.npz", x=images, y=np.arange(count) % classes)
    return tmp_path


@pytest.fixture
def run_verb(privot, files):
    """`privot WORDS`, which must succeed."""

    def run(*words):
        code, _, err = privot(*words)
        assert code == 0, err

    return run


def count_lines(files, name):
    """How many lines of each kind the own ledger of a data set has."""
    lines = Ledger(ledger_path(str((files / name).resolve()))).entries()
    return Counter(line["kind"] for line in lines if line["kind"] in COUNTED)


def claimed_lines(command, parts=1):
    """What the table says of a row: {kind: how many}. Lines of a part come once per part."""
    cell = ROWS[command][2]
    claims = {
        kind: int(count) * (parts if per_part else 1)
        for kind, count, per_part in re.findall(r"(\w+) x (\d+)( a part)?", cell)
    }
    assert claims or cell.startswith("none")
    return claims


SIDES = "--members scans.npz --nonmembers others.npz"
SHADOWS = "--shadows 4 --epochs 1 --device cpu"
MEASURED = "--test others.npz --train scans.npz --only sliced --count 8"
CLIENT = (
    "--shape 1x8x8 --classes 3 --server localhost:1 --ca ca --key key --epsilon 100 --device cpu"
)
# Rows that need nothing but a command: the command, and the data sets whose ledgers are charged.
PLAIN = {
    "`attack`": (f"attack nearest-pixels release {SIDES}", "scans others"),
    "`attack` with shadows": (
        f"attack lira-pixels real-subset --set images_per_class=2 {SIDES} {SHADOWS}",
        "scans others",
    ),
    "`attacks`": ("attacks", ""),
    "`audit`": (f"audit merf --data scans.npz --runs 4 --epsilon 5 {MERF} --device cpu", "scans"),
    "`cite`": ("cite merf", ""),
    "`compare`": (f"compare release release {MEASURED}", "scans others"),
    "`demo`": ("demo", ""),
    "`federate keys`": ("federate keys --out keys", ""),
    "`invert`": ("invert --data large.npz --images 2 --checked 0 --steps 2 --device cpu", "large"),
    "`ledger`": ("ledger scans.npz", "scans"),
    "`ledger --limit`": ("ledger scans.npz --limit 3", "scans"),
    "`measure`": (f"measure release {MEASURED}", "scans others"),
    "`measure --accuracy-epsilon`": (
        "measure release --test others.npz --count 30 --accuracy-epsilon 3 --device cpu",
        "others",
    ),
    "`methods`": ("methods", ""),
    "`plan`": ("plan scans.npz --shape 1x8x8 --classes 3 --epsilon 1", "scans"),
    "`privatize`": (
        "privatize scans.npz --out sent.safetensors --epsilon 40 --labels-epsilon 5",
        "scans",
    ),
    "`report`": ("report release", "scans"),
    "`report --internal`": ("report release --internal --data scans.npz", "scans"),
    "`resize`": ("resize release --images-per-class 3 --out larger --device cpu", "scans"),
    "`sample`": ("sample release --count 4", "scans"),
    "`synthesize`": (
        f"synthesize scans.npz --method merf --epsilon 5 {MERF} --device cpu",
        "scans",
    ),
    "`verify`": ("verify release", "scans"),
}
APART = {  # rows with tests of their own, below
    "`synthesize` of a privatized file",
    "`federate simulate`",
    "`federate client`",
    "`federate client --partition`",
    "`federate server`",
}


def test_every_row_is_run():
    assert set(ROWS) == set(PLAIN) | APART


@pytest.mark.parametrize("command", PLAIN)
def test_the_ledger_has_the_lines_that_the_table_claims(command, run_verb, files, monkeypatch):
    words, charged = PLAIN[command]
    if "release" in words:  # charged to another ledger, so that the scans' own is empty
        release = "--out release --ledger before.jsonl --device cpu"
        run_verb("synthesize scans.npz --epsilon 5", format_settings(TINY_SET), release)
    if "keys" in words:
        pytest.importorskip("flwr", reason="the extra federated is not installed")
    monkeypatch.setattr(demo, "DEMO_SETTINGS", TINY_SET)
    monkeypatch.setattr(demo, "DEMO_CLASSIFIERS", ("logistic",))
    run_verb(words)
    for name in charged.split():
        assert count_lines(files, f"{name}.npz") == claimed_lines(command), name
    written = {path.name for path in (files / "home").glob("ledgers/*.jsonl")}
    own = [ledger_path(str((files / f"{name}.npz").resolve())).name for name in charged.split()]
    assert written == (set(own) if claimed_lines(command) else set())  # and no other ledger


def test_a_privatized_file_charges_nothing_more(run_verb, files):
    sent = "--out sent.safetensors --epsilon 40 --labels-epsilon 5 --ledger client.jsonl"
    run_verb("privatize scans.npz", sent)
    sets = format_settings(choose_tiny_settings("entropic-gan"))
    run_verb("synthesize sent.safetensors --method entropic-gan --device cpu", sets)
    assert claimed_lines("`synthesize` of a privatized file") == {}
    assert not (files / "home").exists()


def test_federations_are_counted_as_the_table_says(run_verb, files, monkeypatch):
    pytest.importorskip("flwr", reason="the extra federated is not installed")
    with monkeypatch.context() as patch:
        simulate_here(patch)
        words = (
            "federate simulate --data owners.npz --clients 3 --epsilon 20 --device cpu --out made"
        )
        run_verb(words, *TINY_ARGUMENTS)
    assert count_lines(files, "owners.npz") == claimed_lines("`federate simulate`", parts=3)
    serve_here(monkeypatch, 2)
    run_verb("federate client --data others.npz", CLIENT)
    assert count_lines(files, "others.npz") == claimed_lines("`federate client`")
    for part in ("0/2", "1/2"):
        run_verb("federate client --data scans.npz --partition", part, CLIENT)
    claims = claimed_lines("`federate client --partition`", parts=2)
    assert count_lines(files, "scans.npz") == claims


def test_a_server_is_given_no_records():
    from privot.cli import federate_server

    options = inspect.signature(federate_server._server_command).parameters
    assert not {"data", "ledger"} & set(options)
    assert "client_keys" in options
    assert claimed_lines("`federate server`") == {}
