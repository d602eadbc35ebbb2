"""What many tests begin with: an empty ledger, a small sealed box, the command line."""

import functools
import math
import os
import posix
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import typer.main
from assurance import record
from support import deterministic_chance as steady

from privot import io
from privot.cli import main
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.privacy import accounting
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.runtime import Runtime, checkpoint, use_threads


def pytest_addoption(parser):
    parser.addoption(
        "--fresh", action="store_true", help="chance from the system, not the same at every run"
    )


def pytest_configure(config):
    config.chance = steady.begin(config.getoption("fresh"))
    config.addinivalue_line(
        "markers",
        "data: needs files of PRIVOT_DATA; every test that asks for the fixture `data_file` has it",
    )
    config.addinivalue_line(
        "filterwarnings", "ignore::privot.errors.PrivotWarning"
    )  # cautions of runs: `pytest.warns` still sees them
    config.addinivalue_line(
        "markers",
        "trust: records a figure for docs/threats.md; every test that asks for the fixture `trust` has it",
    )


def read_slow_tests():
    """The node ids in slow_tests.txt."""
    node_ids = set()
    file = ""
    for line in Path(__file__).with_name("slow_tests.txt").read_text().splitlines():
        if line.startswith("    "):
            node_ids.add(f"{file}::{line.strip()}")
        else:
            file = line
    return node_ids


def pytest_collection_modifyitems(items):
    slow_tests = read_slow_tests()
    for item in items:
        if not slow_tests.isdisjoint((item.nodeid, item.nodeid.split("[")[0])):
            item.add_marker("slow")
        for fixture, marker in (("trust", "trust"), ("data_file", "data")):
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with item.config.chance(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share must not depend on which of them comes first."""
    with request.config.chance(f"{fixturedef.baseid} {fixturedef.argname} {request.param_index}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    record.ended(item, call, report)
    return report


@pytest.fixture
def trust(request):
    """``trust("G9", "planted bugs killed", 30, of=30)``: a figure that this test counted, kept by `make trust`."""
    return record.Recorder(request.node.nodeid)


@pytest.fixture(scope="module")
def one_thread():
    """Networks as small as these are slower on two, the more so when the machine is busy."""
    with use_threads(1):
        yield


@pytest.fixture(autouse=True, scope="session")
def ledgers_in_temporary_folder(tmp_path_factory):
    """Own ledgers of data sets lie in a folder of this session, not in the state folder of the account that runs the tests."""
    with mock.patch.dict(os.environ, PRIVOT_HOME=str(tmp_path_factory.mktemp("home"))):
        yield


@pytest.fixture(autouse=True, scope="session")
def fixed_checkpoint_count():
    """How often a run keeps where it has come to does not depend on how busy the machine is."""
    with mock.patch.object(checkpoint, "CHEAP_SAVE_SECONDS", math.inf):
        yield


@pytest.fixture(autouse=True, scope="session")
def no_fsync():
    """No test cuts the power: `os.fsync` only looks at its descriptor here. Not in children, nor where `real_fsync` is asked for."""
    with mock.patch.object(os, "fsync", lambda file: os.fstat(file) and None):
        yield


@pytest.fixture(autouse=True, scope="session")
def cpu_by_default():
    """The device "auto" is the CPU, also where there is a GPU: tests of a GPU name it."""
    get_device = Runtime.torch_device.fget

    def get_cpu_unless_named(runtime):
        if runtime.device == "auto" and "RANK" not in os.environ:
            return torch.device("cpu")
        return get_device(runtime)

    with mock.patch.object(Runtime, "torch_device", property(get_cpu_unless_named)):
        yield


@pytest.fixture
def real_fsync(monkeypatch):
    """For tests of what is made durable."""
    monkeypatch.setattr(os, "fsync", posix.fsync)


@pytest.fixture(autouse=True, scope="session")
def cached_commands():
    """Typer makes all verbs anew for each command line, which takes longer than most of them do."""
    with mock.patch.object(typer.main, "get_command", functools.cache(typer.main.get_command)):
        yield


@pytest.fixture
def coarse_accounting(monkeypatch):
    """Sampled plans are priced on the coarsest grid: never optimistic, near the finest for a hundred steps, 30 times as quick."""
    monkeypatch.setattr(accounting, "GRID_STEPS", accounting.GRID_STEPS[-1:])


@pytest.fixture(scope="session")
def data_file():
    """``data_file("weights", NAME)``: the path of a file that PRIVOT_DATA names, or the test is skipped and says what is missing."""

    def path_of(*names):
        if (path := io.find_data_file(*names)) is None:
            pytest.skip(f"{'/'.join(names)} is not there: PRIVOT_DATA names the folder")
        return path

    return path_of


@pytest.fixture
def empty_data_folders(tmp_path, monkeypatch):
    """An empty PRIVOT_DATA, cache and system folder."""
    monkeypatch.setattr(io, "list_data_folders", lambda: [tmp_path / "data", tmp_path / "cache"])
    return tmp_path


@pytest.fixture
def array_order(monkeypatch):
    """Positions are those of the arrays: neighbours are compared given one order, which is a coupling of the secret orders of both."""
    monkeypatch.setattr(
        Gate, "_get_secret_order", lambda gate: torch.arange(gate._dataset._count_records())
    )


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "box.jsonl")


@pytest.fixture
def dataset():
    """8 records of 1x2x2 pixels in 2 classes of 4, sizes declared."""
    images = np.random.default_rng(0).random((8, 1, 2, 2), np.float32)
    return Sensitive(images, np.arange(8) % 2, Spec((1, 2, 2), 2, 8, (4, 4)), name="box")


@pytest.fixture
def box(dataset):
    """The same as `dataset`. Use that name; this one goes once no test asks for it."""
    return dataset


@pytest.fixture
def privot(monkeypatch, capsys, tmp_path):
    """`privot WORDS`, in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["privot", *map(str, words)])
        code = 0
        with warnings.catch_warnings(
            record=True
        ) as warned:  # pytest would hide what a terminal shows
            warnings.simplefilter("default")
            try:
                main()
            except SystemExit as stop:
                code = stop.code
        out, err = capsys.readouterr()
        return code, out, err + "".join(f"{each.message}\n" for each in warned)

    return run
