"""Every run of `runs` still gives the results whose digests are stored in `digests.json`."""

import json

import pytest
from golden import runs

STORED = json.loads(runs.STORED.read_text())


@pytest.fixture(scope="module")
def here():
    """Skip where the digests were taken with another CPU or other versions of libraries."""
    found = runs.fingerprint()
    names = {**STORED["fingerprint"], **found}
    if other := [name for name in names if found.get(name) != STORED["fingerprint"].get(name)]:
        pytest.skip(f"the digests were taken elsewhere: {', '.join(other)} differ")


@pytest.mark.parametrize("label", runs.RUNS)
def test_a_run_gives_what_it_gave(label, here):
    assert runs.changes(runs.compute(label), STORED["digests"][label]) == []


def test_every_stored_digest_has_a_run():
    assert STORED["digests"].keys() == runs.RUNS.keys()


@pytest.mark.parametrize("name", runs.LISTED)
def test_everything_that_is_listed_has_a_run(name):
    assert runs.not_covered(name) == set()
