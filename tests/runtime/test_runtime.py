"""What surrounds a method: its public random streams, and how often a long run keeps where it has come to."""

import pytest
import torch

from privot.runtime import Streams, checkpoint
from privot.runtime.process_group import SingleProcess


def kept(monkeypatch, steps: int, step: float, keeping: float) -> tuple[list[int], float]:
    """The steps after which a run keeps, and the part of its time that goes into it."""
    clock = [0.0]
    spent = 0.0
    found = []
    monkeypatch.setattr(checkpoint, "CHEAP_SAVE_SECONDS", 1.0)
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: clock[0])
    streams = Streams(0)
    for each in range(steps):
        clock[0] += step
        if streams.is_checkpoint_due(each, steps):
            found.append(each)
            clock[0] += keeping
            spent += keeping
    return found, spent / clock[0]


def test_a_cheap_keeping_is_done_twenty_times(monkeypatch):
    found, part = kept(monkeypatch, 1000, 0.1, 0.05)
    assert found == list(range(49, 1000, 50))
    assert part < 0.02


@pytest.mark.parametrize(("step", "keeping"), [(0.07, 17.0), (0.15, 35.0), (1.0, 60.0)])
def test_a_dear_one_takes_a_tenth_of_the_time_beyond_the_first(monkeypatch, step, keeping):
    found, _ = kept(monkeypatch, 1000, step, keeping)
    whole = 1000 * step
    assert 1 <= len(found) <= 2 + 0.1 * whole / keeping
    assert found[0] == 49, "the first tells what it takes"


def test_a_run_of_a_few_steps_keeps_after_each(monkeypatch):
    assert kept(monkeypatch, 5, 1.0, 30.0)[0] == [0, 1, 2, 3, 4]


def test_several_processes_keep_when_the_first_says_so(monkeypatch):
    class Follower(SingleProcess):
        def broadcast(self, *values):
            return tuple(torch.zeros_like(each) for each in values)

    streams = Streams(0, process_group=Follower())
    assert not any(streams.is_checkpoint_due(each, 100) for each in range(100))


def test_names_and_seeds_that_are_alike_draw_differently():
    names = [
        "step",
        "step 1",
        "step 2",
        "stepping",
        "draws 1000",
        "draws 1001",
        "codes 64",
        "codes 65",
    ]
    first = {
        torch.rand(1, generator=Streams(seed).make_rng(name)).item()
        for name in names
        for seed in (0, 1, 2**32, 2**40)
    }
    assert len(first) == 4 * len(names), "a CPU's generator looks at 32 bits of its seed alone"
    again = Streams(7).make_rng("step 1")
    assert torch.equal(
        torch.rand(5, generator=again), torch.rand(5, generator=Streams(7).make_rng("step 1"))
    )
