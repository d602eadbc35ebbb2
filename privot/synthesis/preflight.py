"""What is known before a run: plan, cost, duration and warnings. Nothing is read or spent."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import torch

from privot.data.spec import Spec
from privot.errors import SettingError
from privot.local.dataset import PrivatizedDataset
from privot.methods import Method
from privot.privacy.guarantee import Guarantee, NoGuarantee, check_delta
from privot.privacy.plan import AttackPowerTarget, Budget, Plan, PrivacyTarget
from privot.privacy.sampling import LOCAL
from privot.progress import round_up
from privot.runtime import Runtime, use_threads
from privot.synthesis.cost import choose_thread_limit, find_shorter_run, predict_cpu_seconds
from privot.synthesis.run_warnings import (
    LONG_RUN_SECONDS,
    collect_warnings,
    count_privacy_units,
)

CPU_EFFICIENCY = 0.3  # what networks reach of the speed of a large matrix product on a CPU
MATRIX_SIDE = 1000  # of the product that measures the speed of this machine
NUM_PRODUCTS = 5
DEFAULT_DELTA = 1e-5
MIN_EPSILON = 1e-12  # a budget needs an epsilon above 0


def plan_run(
    data: Spec | PrivatizedDataset,
    method: Method,
    budget: PrivacyTarget | None,
    device: str = "auto",
    allow_large_delta: bool = False,
) -> dict[str, Any]:
    """Plan a run: its queries, guarantee, forecast and warnings. No record is read.

    Args:
        data: What is declared about the data; or what clients privatized.
        method: The method with its settings.
        budget: The budget; None where the method or the clients fix the noise.
        device: Where the run will compute.
        allow_large_delta: Accept a delta above 1e-3 that is not below 1 / number of records.

    Returns:
        Plain data.

    Raises:
        SettingError: If data, method and budget do not fit together.
    """
    if isinstance(data, PrivatizedDataset):
        privatized = data
        spec = data.spec
        plan, target = resolve_local_plan(data, method, budget)
        delta = data.channel.delta
    else:
        privatized = None
        spec = data
        plan, target = resolve_plan(spec, method, budget, allow_large_delta)
        delta = target.delta
    forecast = forecast_run(spec, method, plan, Runtime(device).torch_device)
    has_noise = plan.stages and all(stage.noise_multiplier > 0 for stage in plan.stages)
    certificate = (
        Guarantee.from_plan(plan, delta) if has_noise else NoGuarantee("no noise is added")
    )
    return {
        "method": method.name,
        "settings": dataclasses.asdict(method),  # type: ignore[call-overload]
        "spec": spec.to_json(),
        "plan": plan.to_json(),
        "event": str(plan.event()),
        "guarantee": dataclasses.asdict(certificate),
        "forecast": forecast,
        "warnings": collect_warnings(spec, plan, target.delta, forecast, privatized),
    }


def resolve_plan(
    spec: Spec, method: Method, budget: PrivacyTarget | None, allow_large_delta: bool = False
) -> tuple[Plan, PrivacyTarget]:
    """Find the plan that will run, and the budget that it must stay within.

    Args:
        spec: What is declared about the data.
        method: The method with its settings.
        budget: The budget; None where the method fixes the noise.
        allow_large_delta: Accept a delta above 1e-3 that is not below 1 / number of records.

    Returns:
        The plan, calibrated to the budget or with the given noise; and the budget, or the cost of
        the given noise.

    Raises:
        SettingError: If method and budget do not fit together, or the delta is too large.
    """
    plan, target = _calibrate_plan(spec, method, budget)
    # A plan without noise claims nothing, at any delta.
    if plan.stages and all(stage.noise_multiplier for stage in plan.stages):
        check_delta(target.delta, count_privacy_units(spec, plan)[0], allow_large_delta)
    return plan, target


def _calibrate_plan(
    spec: Spec, method: Method, budget: PrivacyTarget | None
) -> tuple[Plan, PrivacyTarget]:
    """Calibrate the plan of a method to a budget.

    Args:
        spec: What is declared about the data.
        method: The method with its settings.
        budget: The budget; None where the method fixes the noise.

    Returns:
        The plan and the budget that it must stay within.
    """
    plan = method.plan(spec)
    has_fixed_noise = method.noise_multiplier is not None
    is_infinite = isinstance(budget, Budget) and budget.epsilon == math.inf
    if has_fixed_noise and (
        isinstance(budget, AttackPowerTarget) or (budget is not None and not is_infinite)
    ):
        raise SettingError("Give either a budget or the setting noise_multiplier, not both.")
    if not plan.stages and plan.neighbours is LOCAL:
        raise SettingError(
            f"{method.name} learns from privatized records only. Make them with privot privatize, "
            "then give their file."
        )
    if not plan.stages:
        if budget and not is_infinite:
            raise SettingError(
                f"{method.name} adds no noise, so it cannot stay within a budget. Leave the budget "
                "out, or give --epsilon inf."
            )
        return plan, budget or Budget(math.inf)
    if has_fixed_noise:
        delta = budget.delta if budget else DEFAULT_DELTA
        return plan, Budget(max(float(plan.cost().epsilon(delta)), MIN_EPSILON), delta)
    if budget is None:
        raise SettingError(
            "There is no budget. Give --epsilon, --max-tpr (synthesize and plan) or the setting "
            "noise_multiplier."
        )
    return plan.calibrate(budget), budget


def resolve_local_plan(
    dataset: PrivatizedDataset, method: Method, budget: PrivacyTarget | None
) -> tuple[Plan, PrivacyTarget]:
    """Find the plan that the clients ran.

    Args:
        dataset: What the clients sent.
        method: A method that makes no query of its own.
        budget: None: no budget can change what the clients spent.

    Returns:
        The plan of the channel and its cost.

    Raises:
        SettingError: If the method needs records, or a budget is given.
    """
    method_plan = method.plan(dataset.spec)
    epsilon = dataset.channel.epsilon
    if method_plan.stages or method_plan.neighbours is not LOCAL:
        raise SettingError(
            f"{method.name} queries records, but the clients privatized these. Use --method "
            "entropic-gan."
        )
    if budget is not None:
        raise SettingError(
            f"These records were privatized at epsilon {round_up(epsilon)}, which no budget can "
            "change. Leave the budget out."
        )
    target = Budget(max(epsilon, MIN_EPSILON), dataset.channel.delta or DEFAULT_DELTA)
    return dataset.channel.plan(), target


def forecast_run(spec: Spec, method: Method, plan: Plan, device: torch.device) -> dict[str, Any]:
    """Forecast quality, work and duration of a run.

    Args:
        spec: What is declared about the data.
        method: The method with its settings.
        plan: The plan that will run.
        device: Where the run will compute.

    Returns:
        The method's own forecast, with the seconds on this machine if the method counts its work;
        for a long run on a CPU also settings with which the run is shorter.
    """
    forecast = method.forecast(spec, plan)
    flops = forecast.get("floating_point_operations")
    if not flops:
        return forecast
    if device.type != "cpu":
        return {**forecast, "predicted_seconds": flops / _measure_flops_per_second(device)}
    flops_per_second = _measure_flops_per_second(device, choose_thread_limit(spec, device))
    seconds = predict_cpu_seconds(forecast, flops_per_second) or 0.0
    forecast = {**forecast, "predicted_seconds": seconds}
    if seconds > LONG_RUN_SECONDS:
        forecast["shorter_run"] = find_shorter_run(method, spec, flops_per_second)
    return forecast


@functools.cache
def _measure_flops_per_second(device: torch.device, num_threads: int | None = None) -> float:
    """Measure the speed of this machine once, by a short matrix product.

    Args:
        device: The device.
        num_threads: The number of threads on a CPU; None: as many as there are.

    Returns:
        Floating-point operations a second that networks reach.
    """
    with use_threads(num_threads):
        matrix = torch.ones(MATRIX_SIDE, MATRIX_SIDE, device=device)
        (matrix @ matrix).sum().item()
        start = time.perf_counter()
        for _ in range(NUM_PRODUCTS):
            product = matrix @ matrix
        product.sum().item()
        seconds = time.perf_counter() - start
    efficiency = CPU_EFFICIENCY if device.type == "cpu" else 1.0
    return efficiency * NUM_PRODUCTS * 2 * MATRIX_SIDE**3 / seconds
