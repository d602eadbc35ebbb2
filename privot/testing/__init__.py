"""Checks for methods: `check_method` runs them on any method, also from outside the package."""

from __future__ import annotations

from privot.testing.distinguisher import score_runs
from privot.testing.fake_device import simulate_second_device
from privot.testing.method_checks import METHOD_CHECKS, check_method
from privot.testing.neighbours import find_leaks
from privot.testing.tiny_data import choose_tiny_settings

__all__ = [
    "METHOD_CHECKS",
    "check_method",
    "choose_tiny_settings",
    "find_leaks",
    "score_runs",
    "simulate_second_device",
]
