"""The command line of these tests: a word with spaces in it is several words."""

import json
import shlex

import pytest


@pytest.fixture
def privot(privot):
    def run(*words):
        return privot(*(part for word in words for part in shlex.split(str(word))))

    return run


@pytest.fixture
def run_json(privot):
    """The one JSON value that `privot WORDS --json` prints."""

    def run(*words, code=0):
        exit_code, out, err = privot(*words, "--json")
        assert exit_code == code, err
        assert out.count("\n") == 1
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return run


@pytest.fixture
def expect_refusal(privot):
    """`privot WORDS` ends with 2, prints nothing, and gives the reason in one line."""

    def run(reason, *words):
        code, out, err = privot(*words)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("privot: ")
        assert reason in err
        return err

    return run
