import functools

import pytest
from faults.crash_invariants import run_unbroken
from support.fork_server import Forks


@pytest.fixture(scope="session")
def forks():
    warm = Forks("faults.crash_scenarios")
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def unbroken(forks, tmp_path_factory):
    """Of a method by name, run once: an unbroken run."""
    return functools.cache(lambda which: run_unbroken(forks, tmp_path_factory.mktemp(which), which))
