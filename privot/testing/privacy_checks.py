"""What a run of a method shows: leaks around the gate, the control of an audit, devices."""

from __future__ import annotations

from typing import Any

from privot.synthesis import synthesize
from privot.testing.checked_method import CheckedMethod, ignore_warning, require
from privot.testing.distinguisher import score_runs
from privot.testing.fake_device import FAKE_DEVICE, simulate_second_device
from privot.testing.neighbours import find_leaks
from privot.testing.tiny_data import (
    SHAPE,
    choose_epsilon,
    choose_spec,
    has_no_mechanism,
    make_method_input,
    make_records,
)

_NUM_AUDIT_RUNS = 4


def check_neighbours(case: CheckedMethod) -> None:
    """Nothing around the gate depends on the records; true values keep to their sensitivity."""
    method = case.make()
    if has_no_mechanism(method):
        return
    leaks = find_leaks(method, make_records(), choose_spec(method), case.folder / "run")
    leak = next(leaks, None)
    require(leak is None, f"the run shows more than its query results: {leak}")


def check_audit(case: CheckedMethod) -> None:
    """Without its noise the best adversary recognises every run: the audit can see the records.

    This is the control of an audit, and takes a few runs. `privot.testing.score_runs` with many
    runs and the full noise gives the scores for `privot.audit.audit_many_runs`.
    """
    method = case.make()
    if not method.plan(choose_spec(method)).stages:
        return
    method = case.make(**{**case.audit_settings, "noise_multiplier": 2.0})
    inside, outside, plan = score_runs(method, _NUM_AUDIT_RUNS, noise_share=0.0, epsilon=None)
    is_sampled = any(type(stage.sampling).__name__ != "Full" for stage in plan.stages)
    # A run in which the canary is never drawn tells nothing. Two of four are no chance.
    num_allowed = 2 if is_sampled else 0
    require((inside <= 0).sum() <= num_allowed, "runs with the canary are not recognised")
    require((outside >= 0).sum() <= num_allowed, "runs without the canary are not recognised")
    require((outside <= 0).all(), "a run without the canary is taken for one with it")


def check_devices(case: CheckedMethod) -> None:
    """No tensor of a GPU meets one of the CPU, on a second device that the CPU simulates."""
    method = case.make()
    dataset = make_method_input(method, *make_records(), choose_spec(method))
    options: dict[str, Any] = {
        "ledger": case.folder / "ledger.jsonl",
        "on_warning": ignore_warning,
    }
    with simulate_second_device():
        release = synthesize(dataset, method, choose_epsilon(method), **options)
        images, _ = release.sample(6, device=FAKE_DEVICE)
    require(images.shape == (6, *SHAPE), "samples have another shape")
