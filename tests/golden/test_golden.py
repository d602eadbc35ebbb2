"""Every run of `runs` still gives the results whose digests are stored in `digests.json`."""

import json

import pytest
from golden.core import RUNS, compute, fingerprint
from golden.runs import STORED, list_changes

CONTENT = json.loads(STORED.read_text())


@pytest.fixture(scope="module")
def same_machine():
    """Skip where the digests were taken with another CPU or other versions of libraries."""
    if other := list_changes(fingerprint(), CONTENT["fingerprint"]):
        pytest.skip(f"the digests were taken elsewhere: {', '.join(other)} differ")


@pytest.mark.parametrize("label", RUNS)
def test_digests_are_those_stored(label, same_machine):
    assert list_changes(compute(label), CONTENT["digests"][label]) == []


def test_everything_that_the_package_lists_has_a_stored_digest_and_a_run():
    assert CONTENT["digests"].keys() == RUNS.keys()
