"""Runs of 5,000 steps with a query each hold no more memory at the end than early on."""

import ctypes
import gc
import os
import statistics
from unittest import mock

import pytest
from support.tiny_settings import choose_spec, choose_tiny_settings, make_records, seal_records

from privot.methods import make_method
from privot.privacy import secret_side
from privot.runtime import Runtime
from privot.synthesis import synthesize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.usefixtures("one_thread", "coarse_accounting"),
    pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc"),
]

STEPS = 5_000
QUERIES_PER_READING = 50
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
METHODS = ("dp-gan", "dp-sinkhorn", "gs-wgan")


def read_resident_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # gives back what earlier tests have freed
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def run_and_measure(name, folder, steps=STEPS, leak=None):
    """A whole run: its release and its memory over time. The list ``leak`` keeps each result."""
    settings = {**choose_tiny_settings(name), "steps": steps, "noise_multiplier": 100.0}
    method = make_method(name, settings)
    memory = []
    num_queries = 0
    add_noise = secret_side.add_noise

    def add_noise_counted(*args):
        nonlocal num_queries
        num_queries += 1
        if num_queries % QUERIES_PER_READING == 0:
            memory.append(read_resident_bytes())
        result = add_noise(*args)
        if leak is not None:
            leak.append(result.flatten().repeat(32_768 // result.numel() + 1))
        return result

    dataset = seal_records(*make_records(), choose_spec(method))
    more = {"runtime": Runtime("cpu", 16), "on_warning": lambda text: None}
    with mock.patch.object(secret_side, "add_noise", add_noise_counted):
        ledger = folder / "ledger.jsonl"
        release = synthesize(dataset, method, out=folder / "out", ledger=ledger, **more)
    assert num_queries == steps, "these methods make one query a step"
    return release, memory


def compute_growth(memory):
    """From the second fifth, after all caches are filled, to the last."""
    fifth = len(memory) // 5
    return statistics.median(memory[-fifth:]) / statistics.median(memory[fifth : 2 * fifth]) - 1


@pytest.mark.parametrize("name", METHODS)
def test_memory_does_not_grow(name, tmp_path, trust):
    release, memory = run_and_measure(name, tmp_path)
    images, _ = release.sample(30)
    assert images.isfinite().all(), f"{name}: after {STEPS:,} steps values are not finite"
    growth = compute_growth(memory)
    assert growth <= 0.01, f"{name}: memory grew by {100 * growth:.2f} % over {STEPS:,} steps"
    note = f"{name}: {100 * growth:+.2f} %"
    trust("N3", "steps without growth of memory beyond 1 %", STEPS, of=STEPS, note=note)


def test_a_leak_is_seen(tmp_path, trust):
    """256 kB a step: within 1,000 steps this is more than a hundredth of what a run holds."""
    _, memory = run_and_measure("dp-sinkhorn", tmp_path, 1000, [])
    assert compute_growth(memory) > 0.01
    trust("N3", "planted leaks of memory seen", 1, of=1)
