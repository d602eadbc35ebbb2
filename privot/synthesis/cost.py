"""What a run costs in seconds on a device, and which settings cost less.

Everything here is a pure function of the declared data, the settings and the type of the device. No
record and no clock is read, so default settings are the same on every machine of one kind, and the
privacy plan that follows from them never depends on the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from privot.data.spec import Spec
from privot.errors import PrivotError
from privot.methods import Method, make_method

# The nominal CPU: two cores of an x86-64 server. `bench/digits.py` compares the model with runs.
NOMINAL_FLOPS_PER_SECOND = 2e10  # of convolutions and matrix products
NOMINAL_ELEMENTS_PER_SECOND = 4e8  # through an element-wise function such as a cosine
SECONDS_PER_OPERATOR_CALL = 1e-5  # of a tensor operator, however small the tensor is

SMALL_IMAGE_SIDE = 24  # pixels; images with a shorter side are small
SMALL_IMAGE_SECONDS = 60.0  # what default settings may take on the nominal CPU for small images
LARGE_IMAGE_SECONDS = 1200.0  # and for others
SHORTER_RUN_SECONDS = 600.0  # what a long run is compared with


def predict_cpu_seconds(
    cost_forecast: Mapping[str, Any], flops_per_second: float = NOMINAL_FLOPS_PER_SECOND
) -> float | None:
    """Predict the seconds of a run on a CPU.

    Args:
        cost_forecast: The forecast of a method, which counts operations.
        flops_per_second: Floating-point operations a second that networks reach on this CPU.

    Returns:
        Seconds, or None where the method does not count its operations.

    >>> predict_cpu_seconds({"floating_point_operations": 4e10, "operator_calls": 1e5})
    3.0
    """
    flops = cost_forecast.get("floating_point_operations")
    if flops is None:
        return None
    elements = cost_forecast.get("elementwise_operations", 0.0)
    calls = cost_forecast.get("operator_calls", 0.0)
    return float(
        flops / flops_per_second
        + elements / (NOMINAL_ELEMENTS_PER_SECOND * flops_per_second / NOMINAL_FLOPS_PER_SECOND)
        + calls * SECONDS_PER_OPERATOR_CALL
    )


def configure_method(
    method: str | Method, user_settings: Mapping[str, Any] | None, spec: Spec, device: torch.device
) -> Method:
    """Build a method whose settings fit the declared data and the device.

    Settings that the user chose stay as they are. The others are the method's suggestions for data
    of this shape and size. On a CPU, those in ``cpu_minimums`` are halved in turn until the nominal
    CPU needs at most a minute for small images and 20 minutes for others.

    Args:
        method: The name of a method; or a method, all of whose settings count as chosen except
            those that are None.
        user_settings: The settings that the user chose, where ``method`` is a name. None means
            automatic.
        spec: What is declared about the data.
        device: Where the method will run; only its type matters.

    Returns:
        The method, with concrete settings.

    >>> spec = Spec((1, 28, 28), 10)
    >>> configure_method("merf", {}, spec, torch.device("cuda")) == make_method("merf")
    True
    """
    if isinstance(method, str):
        chosen = dict(user_settings or {})
        configured = make_method(method, chosen)
    else:
        chosen = _get_settings(method)
        configured = method
    fixed = {key for key in chosen if getattr(configured, key) is not None}
    suggested = configured.suggest_settings(spec)
    if device.type == "cpu":
        suggested = {**suggested, **configured.suggest_cpu_settings(spec)}
    missing = {key: value for key, value in suggested.items() if key not in fixed}
    if missing:
        configured = _replace_settings(configured, missing)
    if device.type != "cpu":
        return configured
    is_small = min(spec.shape[1:]) < SMALL_IMAGE_SIDE
    max_seconds = SMALL_IMAGE_SECONDS if is_small else LARGE_IMAGE_SECONDS
    return reduce_settings(configured, spec, max_seconds, fixed_settings=fixed)


def choose_thread_limit(spec: Spec, device: torch.device) -> int | None:
    """Choose the number of threads for such data on a device; None: as many as there are.

    >>> choose_thread_limit(Spec((1, 8, 8), 10), torch.device("cpu"))
    1
    """
    return 1 if device.type == "cpu" and min(spec.shape[1:]) < SMALL_IMAGE_SIDE else None


def reduce_settings(
    method: Method,
    spec: Spec,
    max_seconds: float,
    *,
    fixed_settings: Iterable[str] = (),
    flops_per_second: float = NOMINAL_FLOPS_PER_SECOND,
) -> Method:
    """Halve a method's costly settings in turn until its forecast on a CPU is within a limit.

    Args:
        method: The method, with the settings to start from.
        spec: What is declared about the data.
        max_seconds: Seconds that the run may take.
        fixed_settings: Names of settings that must not change.
        flops_per_second: Floating-point operations a second that networks reach on this CPU.

    Returns:
        The method with reduced settings. Where all of them are at their least value, the forecast
        can still be above the limit.
    """
    fixed = set(fixed_settings)
    for min_values in (method.cpu_minimums, method.last_resort_cpu_minimums):
        reducible = {key: value for key, value in min_values.items() if key not in fixed}
        method = _halve_settings(method, spec, max_seconds, reducible, flops_per_second)
    return method


def _halve_settings(
    method: Method,
    spec: Spec,
    max_seconds: float,
    min_values: Mapping[str, int],
    flops_per_second: float,
) -> Method:
    """Halve settings in turn until the forecast is within a limit.

    Args:
        method: The method, with the settings to start from.
        spec: What is declared about the data.
        max_seconds: Seconds that the run may take.
        min_values: The settings to halve, with their least values.
        flops_per_second: Floating-point operations a second that networks reach on this CPU.

    Returns:
        The method with reduced settings.
    """
    reducible = dict(min_values)
    seconds = _predict_seconds(method, spec, flops_per_second)
    while seconds > max_seconds and reducible:
        for key, min_value in list(reducible.items()):
            value = getattr(method, key)
            halved = _replace_settings(method, {key: max(min_value, value // 2)})
            halved_seconds = seconds
            if value > min_value:
                halved_seconds = _predict_seconds(halved, spec, flops_per_second)
            if halved_seconds >= seconds:  # at its least value, or without effect on this run
                del reducible[key]
                continue
            method = halved
            seconds = halved_seconds
            if seconds <= max_seconds:
                break
    return method


def find_shorter_run(
    method: Method, spec: Spec, flops_per_second: float = NOMINAL_FLOPS_PER_SECOND
) -> dict[str, Any] | None:
    """Find settings of a method with which a run on a CPU takes about ten minutes.

    Args:
        method: The method, with settings that take long.
        spec: What is declared about the data.
        flops_per_second: Floating-point operations a second that networks reach on this CPU.

    Returns:
        The settings that differ, their predicted seconds, and what is known about their accuracy;
        None where the method has no settings that can be reduced.
    """
    reduced = reduce_settings(
        configure_method(method, None, spec, torch.device("cpu")),
        spec,
        SHORTER_RUN_SECONDS,
        flops_per_second=flops_per_second,
    )
    before = _get_settings(method)
    changed = {key: value for key, value in _get_settings(reduced).items() if value != before[key]}
    if not changed:
        return None
    return {
        "settings": changed,
        "predicted_seconds": _predict_seconds(reduced, spec, flops_per_second),
        "accuracy": method.cpu_accuracy_notes.get(spec.shape[0]) or "accuracy not measured",
    }


def _get_settings(method: Method) -> dict[str, Any]:
    """Give the settings of a method by name."""
    fields = dataclasses.fields(method)  # type: ignore[arg-type]
    return {field.name: getattr(method, field.name) for field in fields}


def _replace_settings(method: Method, settings: Mapping[str, Any]) -> Method:
    """Build the same method with some other settings."""
    replaced: Method = dataclasses.replace(method, **settings)  # type: ignore[type-var]
    return replaced


def _predict_seconds(method: Method, spec: Spec, flops_per_second: float) -> float:
    """Predict the seconds of a run; 0 where the method cannot say, or refuses the data anyway."""
    try:
        cost_forecast = method.forecast(spec, method.plan(spec))
    except PrivotError:
        return 0.0
    return predict_cpu_seconds(cost_forecast, flops_per_second) or 0.0
