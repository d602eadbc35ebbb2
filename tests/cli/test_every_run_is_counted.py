"""The table of verbs in docs/promise.md: it names every verb, and each row is run and held against the ledger of the data set."""

import ast
import importlib
import inspect
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.in_process_federation import TINY_ARGUMENTS, serve_here, simulate_here
from support.tiny_settings import choose_tiny_settings

import privot as package
from privot.cli import app, demo
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import ledger_path

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(package.__file__).parents[1]
COUNTED = (
    "budget",
    "reserve",
    "part",
    "internal",
)  # what the table counts; ask and commit lines belong to a reservation
MERF = tuple(
    word
    for key, value in choose_tiny_settings("merf").items()
    if key != "noise_multiplier"
    for word in ("--set", f"{key}={value}")
)
SET = {
    "images_per_class": 2,
    "num_random_nets": 4,
    "nets_per_round": 2,
    "net_width": 4,
    "steps": 4,
    "net_train_epochs": 1,
}
SMALL = tuple(word for key, value in SET.items() for word in ("--set", f"{key}={value}"))


def rows():
    """{command: its other cells} of the table."""
    text = (ROOT / "docs" / "promise.md").read_text()
    table = text.split("<!-- table of verbs: begin -->")[1].split("<!-- table of verbs: end -->")[0]
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in table.strip().splitlines()
    ]
    head, _, *body = cells
    assert head == [
        "command",
        "Python",
        "records read",
        "lines in the data set's own ledger",
        "what leaves",
    ]
    assert len({row[0] for row in body}) == len(body), "two rows have the same command"
    return {row[0]: row[1:] for row in body}


ROWS = rows()


def verb_of(command):
    """The verb of a row, without its options."""
    return re.match(r"`([a-z ]+?)(?: --[a-z-]+)?`", command)[1]


def verbs(typer, before=""):
    """Every verb that the command line has, sub-commands included."""
    for each in typer.registered_commands:
        yield before + (each.name or each.callback.__name__)
    for group in typer.registered_groups:
        yield from verbs(group.typer_instance, f"{before}{group.name} ")


def test_the_table_names_every_verb_and_no_other():
    assert {verb_of(command) for command in ROWS} == set(verbs(app))


def named(command):
    """The Python names of a row."""
    return re.findall(r"`([\w.]+)`", ROWS[command][0])


def resolve(name):
    """The object of a dotted name."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] != "privot":
                pytest.skip(f"{error.name} is not installed")
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize("command", ROWS)
def test_the_python_names_of_the_table_are_there(command):
    assert all(
        callable(resolve(name)) or inspect.ismodule(resolve(name)) for name in named(command)
    )


def test_the_table_names_every_public_function():
    functions = {
        f"privot.{name}" for name in package.__all__ if inspect.isroutine(getattr(package, name))
    }
    assert functions <= {name for command in ROWS for name in named(command)}


def gates():
    """Modules that make a gate to real records."""
    for path in sorted((ROOT / "privot").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        text = path.read_text()
        calls = (
            [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            if "Gate(" in text
            else []
        )
        if any(ast.unparse(call.func).split(".")[-1] == "Gate" for call in calls):
            yield module


def test_whatever_makes_a_gate_is_in_the_table_as_charged():
    charged = [
        resolve(name)
        for command, row in ROWS.items()
        if "reserve" in row[2]
        for name in named(command)
    ]
    made = set(gates())
    assert len(made) >= 4
    assert made <= {each.__module__ for each in charged}


@pytest.fixture
def files(tmp_path):
    """Two tiny data sets of sensitive records."""
    for name, seed in (("scans", 0), ("others", 1)):
        images = np.random.default_rng(seed).random((48, 8, 8), np.float32)
        np.savez(tmp_path / f"{name}.npz", x=images, y=np.arange(48) % 3)
    images = np.random.default_rng(2).random((8, 32, 32), np.float32)
    np.savez(tmp_path / "large.npz", x=images, y=np.arange(8) % 2)
    return tmp_path


@pytest.fixture
def done(privot, files):
    """`privot WORDS`, which must succeed."""

    def run(*words):
        code, out, err = privot(*words)
        assert code == 0, err
        return out

    return run


@pytest.fixture
def release(done):
    """A set made of the scans, charged to a ledger of its own, so that the scans' ledger is empty."""
    words = (
        "--epsilon",
        5,
        *SMALL,
        "--out",
        "release",
        "--ledger",
        "before.jsonl",
        "--device",
        "cpu",
    )
    done("synthesize", "scans.npz", *words)
    return "release"


def lines(files, name):
    """How many lines of each kind the own ledger of a data set has."""
    found = Ledger(ledger_path(str((files / name).resolve()))).entries()
    return Counter(each["kind"] for each in found if each["kind"] in COUNTED)


def claimed(command, parts=1):
    """What the table says of a row: {kind: how many}. Lines of a part come once for each."""
    cell = ROWS[command][2]
    found = {
        kind: int(count) * (parts if each == " a part" else 1)
        for kind, count, each in re.findall(r"(\w+) x (\d+)( a part)?", cell)
    }
    assert found or cell.startswith("none")
    return found


MEASURED = ("--only", "sliced", "--count", 8)
CLIENT = (
    "--server",
    "localhost:1",
    "--ca",
    "ca",
    "--key",
    "key",
    "--epsilon",
    100,
    "--device",
    "cpu",
)
PAID = ("--count", 30, "--accuracy-epsilon", 3, "--device", "cpu")
PLAIN = {  # rows that need nothing but a command: what is called, and the data sets whose ledgers then hold what the table says
    "`attack`": (
        (
            "attack",
            "nearest-pixels",
            "release",
            "--members",
            "scans.npz",
            "--nonmembers",
            "others.npz",
        ),
        ("scans", "others"),
    ),
    "`attack` with shadows": (
        (
            "attack",
            "lira",
            "real-subset",
            "--set",
            "images_per_class=2",
            "--members",
            "scans.npz",
            "--nonmembers",
            "others.npz",
            "--shadows",
            4,
            "--epochs",
            1,
            "--device",
            "cpu",
        ),
        ("scans", "others"),
    ),
    "`attacks`": (("attacks",), ()),
    "`audit`": (
        (
            "audit",
            "merf",
            "--data",
            "scans.npz",
            "--runs",
            4,
            "--epsilon",
            5,
            *MERF,
            "--device",
            "cpu",
        ),
        ("scans",),
    ),
    "`cite`": (("cite", "merf"), ()),
    "`compare`": (
        (
            "compare",
            "release",
            "release",
            "--test",
            "others.npz",
            "--train",
            "scans.npz",
            *MEASURED,
        ),
        ("scans", "others"),
    ),
    "`demo`": (("demo",), ()),
    "`federate keys`": (("federate", "keys", "--out", "keys"), ()),
    "`invert`": (
        (
            "invert",
            "--data",
            "large.npz",
            "--images",
            2,
            "--checked",
            0,
            "--steps",
            2,
            "--device",
            "cpu",
        ),
        ("large",),
    ),
    "`ledger`": (("ledger", "scans.npz"), ("scans",)),
    "`ledger --limit`": (("ledger", "scans.npz", "--limit", 3), ("scans",)),
    "`measure`": (
        ("measure", "release", "--test", "others.npz", "--train", "scans.npz", *MEASURED),
        ("scans", "others"),
    ),
    "`measure --accuracy-epsilon`": (
        ("measure", "release", "--test", "others.npz", *PAID),
        ("others",),
    ),
    "`methods`": (("methods",), ()),
    "`plan`": (
        ("plan", "scans.npz", "--shape", "1x8x8", "--classes", 3, "--epsilon", 1),
        ("scans",),
    ),
    "`privatize`": (
        (
            "privatize",
            "scans.npz",
            "--out",
            "sent.safetensors",
            "--epsilon",
            40,
            "--labels-epsilon",
            5,
        ),
        ("scans",),
    ),
    "`report`": (("report", "release"), ("scans",)),
    "`report --internal`": (("report", "release", "--internal", "--data", "scans.npz"), ("scans",)),
    "`resize`": (
        ("resize", "release", "--images-per-class", 3, "--out", "larger", "--device", "cpu"),
        ("scans",),
    ),
    "`sample`": (("sample", "release", "--count", 4), ("scans",)),
    "`synthesize`": (
        ("synthesize", "scans.npz", "--method", "merf", "--epsilon", 5, *MERF, "--device", "cpu"),
        ("scans",),
    ),
    "`verify`": (("verify", "release"), ("scans",)),
}


@pytest.mark.parametrize("command", PLAIN)
def test_the_ledger_has_the_lines_that_the_table_claims(command, done, files, request, monkeypatch):
    words, charged = PLAIN[command]
    if "release" in words:
        request.getfixturevalue("release")
    if "keys" in words:
        pytest.importorskip("flwr", reason="the extra federated is not installed")
    monkeypatch.setattr(demo, "DEMO_SETTINGS", SET)
    monkeypatch.setattr(demo, "DEMO_CLASSIFIERS", ("logistic",))
    done(*words)
    for name in charged:
        assert lines(files, f"{name}.npz") == claimed(command), name
    written = {path.name for path in (files / "home").glob("ledgers/*.jsonl")}
    own = {
        ledger_path(str((files / f"{name}.npz").resolve())).name
        for name in charged
        if claimed(command)
    }
    assert written == own  # and no other data set's ledger was written


def test_a_privatized_file_charges_nothing_more(done, files):
    done(
        "privatize",
        "scans.npz",
        "--out",
        "sent.safetensors",
        "--epsilon",
        40,
        "--labels-epsilon",
        5,
        "--ledger",
        "client.jsonl",
    )
    sets = tuple(
        word
        for key, value in choose_tiny_settings("entropic-gan").items()
        for word in ("--set", f"{key}={value}")
    )
    done("synthesize", "sent.safetensors", "--method", "entropic-gan", *sets, "--device", "cpu")
    assert claimed("`synthesize` of a privatized file") == {}
    assert not (files / "home").exists()


@pytest.fixture
def federated():
    pytest.importorskip("flwr", reason="the extra federated is not installed")


@pytest.mark.usefixtures("federated")
def test_a_simulation_is_counted_as_the_table_says(done, files, monkeypatch):
    simulate_here(monkeypatch)
    done(
        "federate",
        "simulate",
        "--data",
        "scans.npz",
        "--clients",
        3,
        "--epsilon",
        20,
        *TINY_ARGUMENTS,
        "--device",
        "cpu",
        "--out",
        "made",
    )
    assert lines(files, "scans.npz") == claimed("`federate simulate`", parts=3)


DECLARED = ("--shape", "1x8x8", "--classes", 3)


@pytest.mark.usefixtures("federated")
def test_clients_are_counted_as_the_table_says(done, files, monkeypatch):
    serve_here(monkeypatch, 2)
    done("federate", "client", "--data", "others.npz", *DECLARED, *CLIENT)
    assert lines(files, "others.npz") == claimed("`federate client`")
    for part in ("0/2", "1/2"):
        done("federate", "client", "--data", "scans.npz", "--partition", part, *DECLARED, *CLIENT)
    assert lines(files, "scans.npz") == claimed("`federate client --partition`", parts=2)


APART = {  # rows with tests of their own, above
    "`synthesize` of a privatized file",
    "`federate simulate`",
    "`federate client`",
    "`federate client --partition`",
    "`federate server`",  # it is given no data set at all
}


def test_a_server_is_given_no_records():
    from privot.cli import federate_server

    options = inspect.signature(federate_server._server_command).parameters
    assert not {"data", "ledger"} & set(options)
    assert "client_keys" in options
    assert claimed("`federate server`") == {}


def test_every_row_is_run():
    assert set(ROWS) == set(PLAIN) | APART
