"""A number that is not finite, in an answer of any method: the run stops with an error of ours, or what it makes is finite all the same."""

import math

import pytest
import torch
from support.tiny_settings import (
    choose_epsilon,
    choose_spec,
    choose_tiny_settings,
    make_method_input,
    make_records,
)

from privot.errors import PrivotError
from privot.methods import list_methods, make_method
from privot.privacy import secret_side as secret_side_module
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread", "coarse_accounting")
FAST = [("merf", "first", math.nan)]
EVERY = [
    (name, which, bad)
    for name in sorted(list_methods())
    if make_method(name, choose_tiny_settings(name))
    .plan(choose_spec(make_method(name, choose_tiny_settings(name))))
    .stages
    for which, bad in (("first", math.nan), ("last", math.inf))
]


def spoilt(monkeypatch, place, bad):
    """From now on the answer at this place has one such number; returns the count of answers."""
    honest = secret_side_module.add_noise
    asked = []

    def noisy(*args):
        value = honest(*args)
        asked.append(1)
        if len(asked) == place:
            value.view(-1)[0] = bad
        return value

    monkeypatch.setattr(secret_side_module, "add_noise", noisy)
    return asked


def ran(method, folder):
    return synthesize(
        make_method_input(method, *make_records(), choose_spec(method)),
        method,
        choose_epsilon(method),
        ledger=folder / "book.jsonl",
    )


@pytest.mark.parametrize(
    ("name", "which", "bad"),
    [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in EVERY if each not in FAST)],
)
def test_nothing_that_is_not_finite_leaves(name, which, bad, tmp_path, monkeypatch, trust):
    method = make_method(name, choose_tiny_settings(name))
    place = 1
    (tmp_path / "count").mkdir()
    if which == "last":
        with monkeypatch.context() as patch:
            counted = spoilt(patch, 0, bad)
            ran(method, tmp_path / "count")
            place = len(counted)
    asked = spoilt(monkeypatch, place, bad)
    stopped = 0
    try:
        made = ran(method, tmp_path)
        assert all(
            value.isfinite().all()
            for value in made.artifact.tensors.values()
            if value.is_floating_point()
        ), "it was released"
        assert torch.isfinite(made.sample(made.spec.num_classes)[0]).all()
    except PrivotError as error:
        stopped = 1
        assert "\n" not in str(error)  # noqa: PT017 (either end is right)
    assert len(asked) >= place, "the number was never put in"
    trust("N3", "injected NaN and infinity that did not leave", 1, of=1)
    trust(
        "N3",
        "of these, runs that stopped with a typed error (in the others what was made is finite)",
        stopped,
        of=1,
    )
