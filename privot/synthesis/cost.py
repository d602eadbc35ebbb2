"""What a run costs in seconds on a device, and which settings cost less.

Everything here is a pure function of the declared data, the settings and the type of the device. No
record and no clock is read, so default settings are the same on every machine of one kind, and the
privacy plan that is computed from them never depends on the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from privot.data.spec import Spec
from privot.errors import PrivotError
from privot.methods import Method, make

# The nominal CPU: two cores of an x86-64 server. `bench/digits.py` compares the model with runs.
ARITHMETIC = 2e10  # floating-point operations a second of convolutions and matrix products
ELEMENTS = 4e8  # elements a second that go through an element-wise function such as a cosine
CALL = 1e-5  # seconds that one call of a tensor operator takes, however small the tensor is

SMALL_SIDE = 24  # pixels; images with a shorter side are small
SMALL_SECONDS = 60.0  # what default settings may take on the nominal CPU for small images
LARGE_SECONDS = 1200.0  # and for others
SHORT = 600.0  # seconds: what a long run is compared with


def seconds_on_cpu(expected: Mapping[str, Any], speed: float = ARITHMETIC) -> float | None:
    """Predict the seconds of a run on a CPU.

    Args:
        expected: The forecast of a method, which counts operations.
        speed: Floating-point operations a second that nets reach on this CPU.

    Returns:
        Seconds, or None where the method does not count its operations.

    >>> seconds_on_cpu({"floating_point_operations": 4e10, "operator_calls": 1e5})
    3.0
    """
    work = expected.get("floating_point_operations")
    if work is None:
        return None
    elements = expected.get("elementwise_operations", 0.0)
    calls = expected.get("operator_calls", 0.0)
    return float(work / speed + elements / (ELEMENTS * speed / ARITHMETIC) + calls * CALL)


def fit_settings(
    method: str | Method, given: Mapping[str, Any] | None, spec: Spec, device: torch.device
) -> Method:
    """Build a method whose settings fit the declared data and the device.

    Settings that are given stay as they are. The others are the method's defaults for data of this
    shape and size. On a CPU, those that the method lists in ``economies`` are halved in turn until
    the nominal CPU needs at most a minute for small images and 20 minutes for others.

    Args:
        method: The name of a method; or a method, all of whose settings count as given but those
            that are None.
        given: The settings that the user chose, where the method is a name. None means automatic.
        spec: What is declared about the data.
        device: Where the method will run; only its type matters.

    Returns:
        The method, with concrete settings.

    >>> spec, cuda = Spec((1, 28, 28), 10), torch.device("cuda")
    >>> fit_settings("merf", {}, spec, cuda) == make("merf")
    True
    """
    fitted = make(method, dict(given or {})) if isinstance(method, str) else method
    chosen = dict(given or {}) if isinstance(method, str) else _settings(method)
    kept = {key for key in chosen if getattr(fitted, key) is not None}
    suitable = fitted.suitable(spec) if hasattr(fitted, "suitable") else {}
    if device.type == "cpu" and hasattr(fitted, "suitable_on_cpu"):
        suitable = {**suitable, **fitted.suitable_on_cpu(spec)}
    missing = {key: value for key, value in suitable.items() if key not in kept}
    if missing:
        fitted = dataclasses.replace(fitted, **missing)  # type: ignore[type-var]
    if device.type != "cpu":
        return fitted
    limit = SMALL_SECONDS if min(spec.shape[1:]) < SMALL_SIDE else LARGE_SECONDS
    return reduce_settings(fitted, spec, limit, keep=kept)


def thread_limit(spec: Spec, device: torch.device) -> int | None:
    """Return the number of threads for the nets of such data on a device; None: as many as there are.

    >>> thread_limit(Spec((1, 8, 8), 10), torch.device("cpu"))
    1
    """
    return 1 if device.type == "cpu" and min(spec.shape[1:]) < SMALL_SIDE else None


def reduce_settings(
    method: Method, spec: Spec, limit: float, *, keep: Iterable[str] = (), speed: float = ARITHMETIC
) -> Method:
    """Halve a method's costly settings in turn until its forecast on a CPU is within a limit.

    Args:
        method: The method, with the settings to start from.
        spec: What is declared about the data.
        limit: Seconds that the run may take.
        keep: Names of settings that must not change.
        speed: Floating-point operations a second that nets reach on this CPU.

    Returns:
        The method with reduced settings. Where all of them are at their least value, the forecast
        can still be above the limit.
    """
    for group in ("economies", "last_economies"):
        method = _halve(method, spec, limit, getattr(method, group, {}), set(keep), speed)
    return method


def _halve(
    method: Method,
    spec: Spec,
    limit: float,
    lowest: Mapping[str, int],
    kept: set[str],
    speed: float,
) -> Method:
    """Halve these settings in turn, down to their least values, until the forecast is within the limit."""
    economies = {key: value for key, value in lowest.items() if key not in kept}
    took = _seconds(method, spec, speed)
    while took > limit and economies:
        for key, least in list(economies.items()):
            value = getattr(method, key)
            smaller = dataclasses.replace(method, **{key: max(least, value // 2)})  # type: ignore[type-var]
            seconds = _seconds(smaller, spec, speed) if value > least else took
            if seconds >= took:  # at its least value, or without a part in this run
                del economies[key]
                continue
            method = smaller
            took = seconds
            if took <= limit:
                break
    return method


def shorter_run(method: Method, spec: Spec, speed: float = ARITHMETIC) -> dict[str, Any] | None:
    """Find settings of a method with which a run on a CPU takes about ten minutes.

    Args:
        method: The method, with settings that take long.
        spec: What is declared about the data.
        speed: Floating-point operations a second that nets reach on this CPU.

    Returns:
        The settings that differ, their predicted seconds, and what is known about their accuracy;
        None where the method has no settings that could be reduced.
    """
    reduced = reduce_settings(
        fit_settings(method, None, spec, torch.device("cpu")), spec, SHORT, speed=speed
    )
    before = _settings(method)
    changed = {key: value for key, value in _settings(reduced).items() if value != before[key]}
    if not changed:
        return None
    known = getattr(method, "economy_accuracy", {}).get(spec.shape[0])
    return {
        "settings": changed,
        "predicted_seconds": _seconds(reduced, spec, speed),
        "accuracy": known or "accuracy not measured",
    }


def _settings(method: Method) -> dict[str, Any]:
    """Return the settings of a method by name."""
    return {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}  # type: ignore[arg-type]


def _seconds(method: Method, spec: Spec, speed: float) -> float:
    """Predict the seconds of a run; 0 where the method cannot say, or refuses the data anyway."""
    try:
        return seconds_on_cpu(method.forecast(spec, method.plan(spec)), speed) or 0.0
    except PrivotError:
        return 0.0
