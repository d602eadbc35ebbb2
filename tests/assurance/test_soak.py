"""Long runs: 10,000 steps of three methods, each of which asks the gate at every step, hold no more memory at the end than early on."""

import gc
import os
import statistics
from unittest import mock

import pytest
from support.tiny_settings import choose_spec, choose_tiny_settings, make_records, seal_records

from privot.methods import make_method
from privot.privacy import gate as gate_module
from privot.privacy import secret_side as secret_side_module
from privot.runtime import Runtime
from privot.synthesis import synthesize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.usefixtures("one_thread", "coarse_accounting"),
]

STEPS = 10_000
EVERY = 50
PAGE = os.sysconf("SC_PAGE_SIZE")
METHODS = ("dp-gan", "dp-sinkhorn", "gs-wgan")


def resident():
    """Bytes of memory that this process holds."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def soaked(name, folder, steps=STEPS, held=None):
    """A whole run: its release, and the memory held after every so many answers. ``held`` gets each answer, as in a leak."""
    method = make_method(
        name, {**choose_tiny_settings(name), "steps": steps, "noise_multiplier": 100.0}
    )
    seen = []
    asked = 0
    noisy = secret_side_module.add_noise

    def counted(*given):
        nonlocal asked
        asked += 1
        if asked % EVERY == 0:
            seen.append(resident())
        value = noisy(*given)
        if held is not None:
            held.append(value.flatten().repeat(4096 // value.numel() + 1))
        return value

    with mock.patch.object(gate_module, "noisy", counted):
        ways = {
            "out": folder / "out",
            "ledger": folder / "book.jsonl",
            "runtime": Runtime("cpu", 16),
        }
        release = synthesize(
            seal_records(*make_records(), choose_spec(method)), method, None, **ways
        )
    assert asked == steps, "a step is an answer in these methods"
    return release, seen


def growth(seen):
    """From the second fifth, when all is warm, to the last."""
    fifth = len(seen) // 5
    return statistics.median(seen[-fifth:]) / statistics.median(seen[fifth : 2 * fifth]) - 1


@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="memory is read off Linux's /proc"
)
@pytest.mark.parametrize("name", METHODS)
def test_memory_stays(name, tmp_path, trust):
    release, seen = soaked(name, tmp_path)
    images, _ = release.sample(30)
    assert images.isfinite().all(), f"{name}: after {STEPS:,} steps values are not finite"
    assert growth(seen) <= 0.01, (
        f"{name}: memory grew by {100 * growth(seen):.2f} % over three fifths of {STEPS:,} steps"
    )
    trust(
        "N3",
        "steps without growth of memory beyond 1 %",
        STEPS,
        of=STEPS,
        note=f"{name}: {100 * growth(seen):+.2f} %",
    )


@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="memory is read off Linux's /proc"
)
def test_a_leak_is_seen(tmp_path, trust):
    """32 kB a step that nobody lets go of: a hundredth of what a run holds is passed within 1,000 steps."""
    held = []
    _, seen = soaked("dp-sinkhorn", tmp_path, 1000, held)
    assert growth(seen) > 0.01
    trust("N3", "planted leaks of memory seen", 1, of=1)
