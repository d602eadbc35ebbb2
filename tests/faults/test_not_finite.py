"""A number that is not finite, in an answer of any method: the run stops with an error of ours, or what it makes is finite all the same."""

import math

import pytest
from support.tiny_settings import (
    choose_epsilon,
    choose_spec,
    choose_tiny_settings,
    make_method_input,
    make_records,
)

from privot.errors import PrivotError
from privot.methods import list_methods, make_method
from privot.privacy import secret_side
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")


def make_tiny_method(name):
    return make_method(name, choose_tiny_settings(name))


def list_cases():
    """Every method that queries the gate: (name, which answer, what is put into it)."""
    for name in sorted(list_methods()):
        method = make_tiny_method(name)
        if method.plan(choose_spec(method)).stages:
            for case in ((name, "first", math.nan), (name, "last", math.inf)):
                is_fast = case[:2] == ("merf", "first")
                yield pytest.param(*case, marks=() if is_fast else pytest.mark.slow)


def replace_number(monkeypatch, count, bad):
    """From now on the answer of this count has one such number; returns a list that grows with the answers."""
    add_noise = secret_side.add_noise
    answers = []

    def add_bad_number(*args):
        value = add_noise(*args)
        answers.append(1)
        if len(answers) == count:
            value.view(-1)[0] = bad
        return value

    monkeypatch.setattr(secret_side, "add_noise", add_bad_number)
    return answers


def run(method, folder):
    data = make_method_input(method, *make_records(), choose_spec(method))
    return synthesize(data, method, choose_epsilon(method), ledger=folder / "ledger.jsonl")


@pytest.mark.parametrize(("name", "which", "bad"), list(list_cases()))
def test_nothing_that_is_not_finite_leaves(name, which, bad, tmp_path, monkeypatch, trust):
    method = make_tiny_method(name)
    count = 1
    (tmp_path / "count").mkdir()
    if which == "last":
        with monkeypatch.context() as patch:
            answers = replace_number(patch, 0, bad)
            run(method, tmp_path / "count")
            count = len(answers)
    answers = replace_number(monkeypatch, count, bad)
    stopped = 0
    try:
        release = run(method, tmp_path)
        tensors = release.artifact.tensors.values()
        assert all(x.isfinite().all() for x in tensors if x.is_floating_point()), "it was released"
        assert release.sample(release.spec.num_classes)[0].isfinite().all()
    except PrivotError as error:
        stopped = 1
        assert "\n" not in str(error)  # noqa: PT017 (either end is right)
    assert len(answers) >= count, "the number was never put in"
    trust("N3", "injected NaN and infinity that did not leave", 1, of=1)
    trust(
        "N3",
        "of these, runs that stopped with a typed error (in the others what was made is finite)",
        stopped,
        of=1,
    )
