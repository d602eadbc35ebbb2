"""Warnings before a run: what a careful colleague would say."""

from __future__ import annotations

import math
from typing import Any

from privot.data.spec import Spec
from privot.local.dataset import PrivatizedDataset
from privot.local.signal_check import warn_if_too_noisy
from privot.privacy.guarantee import warn_if_weak_guarantee
from privot.privacy.plan import Plan
from privot.privacy.sampling import CLIENT
from privot.progress import format_duration

MIN_RECORDS_PER_CRITIC = 10  # fewer records train a critic poorly
LONG_RUN_SECONDS = 1800.0  # a longer run causes a warning


def collect_warnings(
    spec: Spec,
    plan: Plan,
    delta: float,
    cost_forecast: dict[str, Any],
    dataset: PrivatizedDataset | None = None,
) -> list[str]:
    """Collect the warnings about a run.

    Args:
        spec: What is declared about the data.
        plan: The plan that will run.
        delta: The delta of the budget.
        cost_forecast: The forecast of the run.
        dataset: What the clients sent, where they privatized the records.

    Returns:
        One text for each warning.
    """
    found: list[str | None] = []
    if dataset:
        found.append(warn_if_too_noisy(dataset.channel, len(dataset)))
    is_pure = dataset is not None and not dataset.channel.delta
    found.append(_warn_if_large_delta(spec, plan, delta, is_pure))
    if not dataset:
        found.append(warn_if_weak_guarantee(plan, delta))
    found += _warn_about_class_sizes(spec, plan, delta, cost_forecast)
    found += _warn_about_missing_noise(plan, is_charged=dataset is None)
    found.append(_warn_if_guarantee_is_for_records(spec, plan))
    found.append(_warn_if_few_records_per_critic(cost_forecast))
    seconds = cost_forecast.get("predicted_seconds", 0)
    if seconds > LONG_RUN_SECONDS:
        found.append(_describe_long_run(seconds, cost_forecast.get("shorter_run")))
    return [text for text in found if text]


def count_privacy_units(spec: Spec, plan: Plan) -> tuple[int | None, str]:
    """Count the declared units of privacy.

    Returns:
        Their number, None if it is not public; and ``clients`` or ``size``.
    """
    if plan.neighbours is CLIENT:
        return spec.num_clients, "clients"
    return spec.size or (sum(spec.class_sizes) if spec.class_sizes else None), "size"


def _has_noise(plan: Plan) -> bool:
    """Whether no query of the plan is without noise."""
    return all(stage.noise_multiplier for stage in plan.stages)


def _warn_if_large_delta(spec: Spec, plan: Plan, delta: float, is_pure: bool) -> str | None:
    """Warn if delta is not below one over the number of units of privacy.

    Args:
        spec: What is declared about the data.
        plan: The plan that will run.
        delta: The delta of the budget.
        is_pure: Whether a channel of delta 0 made the data.

    Returns:
        The warning, if there is one.
    """
    num_units, unit_name = count_privacy_units(spec, plan)
    if num_units and delta >= 1 / num_units and not is_pure:
        content = "all records of a client" if unit_name == "clients" else "a whole record"
        return (
            f"delta {delta:g} is not below 1/{unit_name} = {1 / num_units:.2g}: it would allow "
            f"{content} to be published."
        )
    # Every client has at least one record.
    counts_records = num_units is None and unit_name == "size"
    if counts_records and spec.num_clients and delta >= 1 / spec.num_clients:
        return (
            f"delta {delta:g} is not below 1/clients = {1 / spec.num_clients:.2g}, and there are "
            "at least as many records as clients."
        )
    return None


def _warn_about_class_sizes(
    spec: Spec, plan: Plan, delta: float, cost_forecast: dict[str, Any]
) -> list[str]:
    """Warn about empty classes and classes below the noise.

    Args:
        spec: What is declared about the data.
        plan: The plan that will run.
        delta: The delta of the budget.
        cost_forecast: The forecast of the run.

    Returns:
        One text for each warning.
    """
    texts = []
    if spec.class_sizes and not min(spec.class_sizes):
        name, _ = _find_smallest_class(spec)
        texts.append(
            f"class {name} is declared to have no records: what is released of it is noise only."
        )
    ratio = cost_forecast.get("signal_to_noise_per_class")
    has_forecast = "signal_to_noise_per_class" in cost_forecast
    if has_forecast and spec.size is None and _has_noise(plan):
        texts.append(
            "no sizes are declared (--public-size, --public-classes), so nothing can be predicted "
            "about the noise on each class."
        )
    elif ratio is not None and ratio < 1:
        texts.append(_describe_noisy_classes(spec, plan, delta, ratio))
    return texts


def _warn_about_missing_noise(plan: Plan, is_charged: bool) -> list[str]:
    """Warn about a run without noise, and about what it does to the ledger if it is charged."""
    texts = []
    if not _has_noise(plan):
        texts.append("no noise is added: the release will have no guarantee.")
    if is_charged and (not plan.stages or not _has_noise(plan)):
        texts.append(
            "the ledger of the data set will state an infinite epsilon for good. For a trial, name "
            "another ledger with --ledger."
        )
    return texts


def _warn_if_guarantee_is_for_records(spec: Spec, plan: Plan) -> str | None:
    """Warn if clients hold several records each, and the guarantee is for one record."""
    has_clients = (spec.num_clients or 1) > 1
    if has_clients and plan.neighbours is not CLIENT and plan.stages and _has_noise(plan):
        return (
            f"the guarantee is for one record, not for all records of one of the "
            f"{spec.num_clients} clients."
        )
    return None


def _warn_if_few_records_per_critic(cost_forecast: dict[str, Any]) -> str | None:
    """Warn if the records of a critic are too few to train it."""
    num_records = cost_forecast.get("records_per_critic")
    if num_records is None or num_records >= MIN_RECORDS_PER_CRITIC:
        return None
    return (
        f"each critic would have {num_records} records, but fewer than {MIN_RECORDS_PER_CRITIC} "
        "train it poorly. Use fewer critics."
    )


def _describe_long_run(seconds: float, shorter_run: dict[str, Any] | None) -> str:
    """Say how long a run takes, which settings take about ten minutes, and what they cost.

    Args:
        seconds: The predicted seconds of the run.
        shorter_run: The result of `privot.synthesis.cost.find_shorter_run`.

    Returns:
        One or two sentences.
    """
    text = f"the run is predicted to take about {format_duration(seconds)} on this machine"
    if shorter_run is None:
        return f"{text}. Use a GPU, or fewer records."
    settings = " ".join(f"--set {key}={value}" for key, value in shorter_run["settings"].items())
    return (
        f"{text}; about {format_duration(shorter_run['predicted_seconds'])} with {settings} "
        f"({shorter_run['accuracy']})."
    )


def _describe_noisy_classes(spec: Spec, plan: Plan, delta: float, signal_to_noise: float) -> str:
    """Say that classes are below the noise, and which epsilon or class size would be enough.

    The signal grows with the number of records of a class; the noise is that of the plan.

    Args:
        spec: What is declared about the data.
        plan: The plan that will run.
        delta: The delta of the budget.
        signal_to_noise: The predicted ratio for the smallest class, below 1.

    Returns:
        Two sentences.
    """
    name, num_records = _find_smallest_class(spec)
    if name:
        which = f"class {name} is the smallest, with {num_records:g} records"
    else:
        which = f"a class has about {num_records:.0f} records"
    epsilon = float(plan.scale_noise(signal_to_noise).cost().epsilon(delta))
    return (
        f"the predicted signal-to-noise ratio per class is {signal_to_noise:.2g}, below 1 "
        f"({which}). Expect poor images, or use epsilon {_format_two_digits_up(epsilon)} or "
        f"classes of {math.ceil(num_records / signal_to_noise):,} records."
    )


def _find_smallest_class(spec: Spec) -> tuple[str, float]:
    """Find the smallest class.

    Returns:
        Its name or index, and its number of records; where sizes are not declared, an empty name
        and the mean size.
    """
    if not spec.class_sizes:
        return "", (spec.size or 0) / spec.num_classes
    index = spec.class_sizes.index(min(spec.class_sizes))
    return spec.class_names[index] if spec.class_names else str(index), spec.class_sizes[index]


def _format_two_digits_up(value: float) -> str:
    """Round up to two significant digits, so that the stated epsilon is enough."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit - 1e-9) * unit:.4g}"
