"""What every method must keep to, as checks that any method can run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from privot.errors import SettingError
from privot.methods import Method
from privot.privacy import accounting
from privot.runtime import use_threads
from privot.testing.checked_method import CheckedMethod
from privot.testing.declaration_checks import check_declaration, check_plan, check_settings
from privot.testing.privacy_checks import check_audit, check_devices, check_neighbours
from privot.testing.run_checks import (
    check_declared_sizes,
    check_release,
    check_replay,
    check_resume,
)
from privot.testing.tiny_data import (
    choose_tiny_settings,
)

METHOD_CHECKS: dict[str, Callable[[CheckedMethod], None]] = {
    "declaration": check_declaration,
    "settings": check_settings,
    "plan": check_plan,
    "release": check_release,
    "declared-sizes": check_declared_sizes,
    "replay": check_replay,
    "resume": check_resume,
    "neighbours": check_neighbours,
    "audit": check_audit,
    "devices": check_devices,
}


@contextmanager
def _use_coarse_accounting() -> Iterator[None]:
    """Price sampled plans on the coarsest grid: never optimistic, and 30 times as quick."""
    with mock.patch.object(accounting, "GRID_STEPS", accounting.GRID_STEPS[-1:]):
        yield


def check_method(
    method_class: type[Method],
    settings: Mapping[str, Any] | None = None,
    *,
    audit_settings: Mapping[str, Any] | None = None,
    only: Iterable[str] | None = None,
) -> list[str]:
    """Check a method, from this package or from outside, on a tiny dataset.

    The checks need a CPU and some seconds to a minute. They cover what the class declares, unusable
    settings, the plan and its budget, the release and its charge, replay, resume after an
    interruption, leaks around the gate on a dozen other datasets, the control of an audit, and
    tensors of two devices in one operation.

    >>> from privot import list_methods
    >>> from privot.testing import check_method
    >>> check_method(list_methods()["merf"], only=["declaration", "settings"])
    ['declaration', 'settings']

    Args:
        method_class: The class of the method.
        settings: Settings with which it is quick on 47 images of 8x8 pixels, beside those that
            `privot.testing.choose_tiny_settings` chooses.
        audit_settings: Settings that differ for the audit, on eight images.
        only: Names of `METHOD_CHECKS`; all by default.

    Returns:
        The names of the checks that passed.

    Raises:
        AssertionError: If the method fails a check. The message names the check and the problem.
        SettingError: If a setting or a check is unknown.
    """
    names = list(only or METHOD_CHECKS)
    for name in names:
        if name not in METHOD_CHECKS:
            raise SettingError(
                f"There is no check {name!r}. Choose from {', '.join(METHOD_CHECKS)}."
            )
    tiny_settings = {**choose_tiny_settings(method_class), **(settings or {})}
    for name in names:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict("os.environ", PRIVOT_HOME=folder),
            _use_coarse_accounting(),
            use_threads(1),
        ):
            path = Path(folder).resolve()
            case = CheckedMethod(method_class, tiny_settings, audit_settings or {}, path)
            try:
                METHOD_CHECKS[name](case)
            except AssertionError as error:
                raise AssertionError(f"{method_class.name}, check {name!r}: {error}") from error
    return names
