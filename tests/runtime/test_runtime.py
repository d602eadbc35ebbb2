"""What surrounds a method: its public random streams, and how often a long run stores its state."""

import pytest
import torch

from privot.runtime import Streams, checkpoint
from privot.runtime.process_group import SingleProcess


def list_checkpoints(monkeypatch, steps, step_seconds, save_seconds):
    """The steps after which a run stores its state."""
    clock = [0.0]
    saved = []
    monkeypatch.setattr(checkpoint, "CHEAP_SAVE_SECONDS", 1.0)
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: clock[0])
    streams = Streams(0)
    for step in range(steps):
        clock[0] += step_seconds
        if streams.is_checkpoint_due(step, steps):
            saved.append(step)
            clock[0] += save_seconds
    return saved


def test_cheap_checkpoints_are_saved_twenty_times_and_a_short_run_s_after_each_step(monkeypatch):
    assert list_checkpoints(monkeypatch, 1000, 0.1, 0.05) == list(range(49, 1000, 50))
    assert list_checkpoints(monkeypatch, 5, 1.0, 30.0) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("step", "save"), [(0.07, 17.0), (0.15, 35.0), (1.0, 60.0)])
def test_dear_checkpoints_take_a_tenth_of_the_time_beyond_the_first(monkeypatch, step, save):
    saved = list_checkpoints(monkeypatch, 1000, step, save)
    assert 1 <= len(saved) <= 2 + 0.1 * 1000 * step / save
    assert saved[0] == 49, "the first tells what it takes"


def test_several_processes_save_when_the_leader_says_so(monkeypatch):
    class Follower(SingleProcess):
        def broadcast(self, *values):
            return tuple(torch.zeros_like(value) for value in values)

    streams = Streams(0, process_group=Follower())
    assert not any(streams.is_checkpoint_due(step, 100) for step in range(100))


def test_names_and_seeds_that_are_alike_draw_differently():
    names = ("step", "step 1", "step 2", "stepping", "draws 1000", "draws 1001", "codes 64")
    first = {
        torch.rand(1, generator=Streams(seed).make_rng(name)).item()
        for name in names
        for seed in (0, 1, 2**32, 2**40)
    }
    assert len(first) == 4 * len(names), "a CPU's generator looks at 32 bits of its seed alone"
    one, two = (torch.rand(5, generator=Streams(7).make_rng("step 1")) for _ in range(2))
    assert torch.equal(one, two)
