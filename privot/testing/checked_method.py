"""A method under test, and how a check runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privot.data.spec import Spec
from privot.methods import Method
from privot.release import Release
from privot.runtime import Runtime
from privot.synthesis import synthesize
from privot.testing.tiny_data import (
    choose_epsilon,
    choose_spec,
    make_method_input,
    make_records,
)

_CPU = Runtime("cpu")


def require(condition: object, problem: str) -> None:
    """Raise AssertionError with this problem unless the condition holds."""
    if not condition:
        raise AssertionError(problem)


@dataclasses.dataclass(frozen=True)
class CheckedMethod:
    """A method under test.

    Attributes:
        method_class: The class of the method.
        settings: Settings with which it is quick on the tiny dataset.
        audit_settings: Settings that differ for the audit, whose runs are many and tiny.
        folder: An empty folder for the runs of one check.
    """

    method_class: type[Method]
    settings: Mapping[str, Any]
    audit_settings: Mapping[str, Any]
    folder: Path

    def make(self, **changes: Any) -> Method:
        """Make the method with its tiny settings, but for the changes."""
        return self.method_class(**{**self.settings, **changes})

    def make_budgeted(self, **changes: Any) -> Method:
        """Build the method without a fixed noise, so that the budget decides."""
        if "noise_multiplier" in self.settings:
            changes = {"noise_multiplier": None, **changes}
        return self.make(**changes)


def synthesize_tiny(method: Method, spec: Spec | None = None, **options: Any) -> Release:
    """Run a method on the tiny dataset.

    Args:
        method: The method.
        spec: What is declared; the least that the method needs by default.
        options: More arguments of `privot.synthesize`.

    Returns:
        The release.
    """
    dataset = make_method_input(method, *make_records(), spec or choose_spec(method))
    options = {"runtime": _CPU, "on_warning": ignore_warning, **options}
    return synthesize(dataset, method, choose_epsilon(method), **options)


def ignore_warning(text: str) -> None:
    """Ignore warnings about the quality of tiny runs."""
