"""What is known before a run: its plan and price, what it will take, and what a careful colleague would say. Nothing is read or spent."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import torch

from privot.data.spec import Spec
from privot.errors import SettingError
from privot.local.dataset import Privatized
from privot.local.signal_check import too_little
from privot.methods import Method
from privot.privacy.plan import Budget, Plan, Risk, Wall
from privot.privacy.sampling import CLIENT, LOCAL
from privot.progress import round_up, seconds
from privot.release import Guarantee, NoGuarantee
from privot.runtime import Runtime, threads
from privot.synthesis.cost import seconds_on_cpu, shorter_run, thread_limit

FEW = 10  # records of a critic
USED = 0.3  # of what a CPU can do in a large matrix product: the part that nets reach
LARGE_DELTA = 1e-3  # a larger one is refused unless the caller accepts it
LARGE_EPSILON = 10.0  # a larger one promises little, and the caller is told so
LONG = 1800.0  # seconds; a longer run is announced before it begins


def check_delta(delta: float, units: int | None = None, allowed: bool = False) -> None:
    """Refuse a delta so large that it allows whole records to be published.

    Args:
        delta: Probability outside the guarantee.
        units: The declared number of records, or of owners where all that one holds is protected.
            A delta below one over this number is never refused. None: the number is secret.
        allowed: Whether the caller has accepted a large delta in so many words.

    Raises:
        SettingError: If the delta is above 1e-3 and neither ``units`` nor ``allowed`` covers it.
    """
    if delta <= LARGE_DELTA or allowed or (units and delta < 1 / units):
        return
    under = f"1/{units} = {1 / units:.2g}" if units else "one over the number of records"
    raise SettingError(
        f"delta={delta:g}: above {LARGE_DELTA:g} it permits to publish whole records: give one well under {under}, such as 1e-5, "
        "or pass --allow-large-delta (allow_large_delta=True)"
    )


def _units(spec: Spec, plan: Plan) -> tuple[int | None, str]:
    """How many units of privacy are declared, and what they are."""
    if plan.neighbours is CLIENT:
        return spec.owners, "owners"
    return spec.size or (sum(spec.class_sizes) if spec.class_sizes else None), "size"


def prepare(
    spec: Spec, method: Method, wall: Wall | None, allow_large_delta: bool = False
) -> tuple[Plan, Wall]:
    """The plan that will run and the wall it keeps to: calibrated to the budget, or priced from a given noise."""
    plan, wall = _prepare(spec, method, wall)
    if plan.stages and all(
        stage.noise for stage in plan.stages
    ):  # else nothing is claimed at any delta
        check_delta(wall.delta, _units(spec, plan)[0], allow_large_delta)
    return plan, wall


def _prepare(spec: Spec, method: Method, wall: Wall | None) -> tuple[Plan, Wall]:
    plan = method.plan(spec)
    fixed = getattr(method, "noise", None) is not None
    if fixed and (isinstance(wall, Risk) or (isinstance(wall, Budget) and wall.epsilon < math.inf)):
        raise SettingError("give either a budget or the noise, not both")
    if not plan.stages and plan.neighbours is LOCAL:
        raise SettingError(
            f"{method.name} learns from privatized records alone: make them with privot privatize, then give it that file"
        )
    if not plan.stages:
        if wall and not (isinstance(wall, Budget) and wall.epsilon == math.inf):
            raise SettingError(
                f"{method.name} adds no noise, so it keeps to no budget: leave it out, or say --epsilon inf"
            )
        return plan, wall or Budget(math.inf)
    if fixed:
        delta = wall.delta if wall else 1e-5
        return plan, Budget(max(float(plan.cost().epsilon(delta)), 1e-12), delta)
    if wall is None:
        raise SettingError(
            "no budget: give --epsilon, or set the noise; synthesize and plan take --max-tpr, too"
        )
    return plan.calibrated(wall), wall


def received(box: Privatized, method: Method, wall: Wall | None) -> tuple[Plan, Wall]:
    """The plan that the clients ran, for a method that asks nothing more; no budget can change what they spent."""
    own = method.plan(box.spec)
    price = box.channel.epsilon
    if own.stages or own.neighbours is not LOCAL:
        raise SettingError(
            f"{method.name} asks records, and these were privatized by their owners: use --method entropic-gan"
        )
    if wall is not None:
        raise SettingError(
            f"these records were privatized at epsilon {round_up(price)}, which no budget changes: leave it out"
        )
    return box.channel.plan(), Budget(max(price, 1e-12), box.channel.delta or 1e-5)


def cautions(
    spec: Spec, plan: Plan, delta: float, expected: dict[str, Any], box: Privatized | None = None
) -> list[str]:
    """What a careful colleague would say before the run."""
    said = []
    if box and (told := too_little(box.channel, len(box))):
        said.append(told)
    units, what = _units(spec, plan)
    if (
        units is None and what == "size" and spec.owners and delta >= 1 / spec.owners
    ):  # each has a record at least
        said.append(
            f"delta {delta:g} is not below 1/owners = {1 / spec.owners:.2g}, and there are no fewer records than owners"
        )
    if units and delta >= 1 / units and not (box and not box.channel.delta):
        whole = "all that an owner holds" if what == "owners" else "a whole record"
        said.append(
            f"delta {delta:g} is not below 1/{what} = {1 / units:.2g}: it would allow {whole} to be published"
        )
    if not box and (told := weak_promise(plan, delta)):
        said.append(told)
    if spec.class_sizes and not min(spec.class_sizes):
        said.append(
            f"class {_smallest(spec)[0]} is declared to have no records: all that is released of it is noise"
        )
    ratio = expected.get("signal_to_noise_per_class")
    if (
        "signal_to_noise_per_class" in expected
        and spec.size is None
        and all(stage.noise for stage in plan.stages)
    ):
        said.append(
            "whether the noise drowns the classes cannot be foretold: no sizes are declared (--public-size, --public-classes)"
        )
    elif ratio is not None and ratio < 1:
        said.append(_too_little(spec, plan, delta, ratio))
    if any(stage.noise == 0 for stage in plan.stages):
        said.append("no noise: the release will carry NoGuarantee")
    if not box and (not plan.stages or any(stage.noise == 0 for stage in plan.stages)):
        said.append(
            "the data set's ledger will say epsilon inf from now on, for good: name another with --ledger if this is but a trial"
        )
    if (
        (spec.owners or 1) > 1
        and plan.neighbours is not CLIENT
        and plan.stages
        and all(stage.noise for stage in plan.stages)
    ):
        said.append(
            f"the promise is for one record, not for all that one of the {spec.owners} owners holds"
        )
    if (few := expected.get("records_of_a_critic")) is not None and few < FEW:
        said.append(
            f"a critic would know {few} records, and fewer than {FEW} teach it little: set fewer critics"
        )
    if (took := expected.get("predicted_seconds", 0)) > LONG:
        said.append(_describe_long_run(took, expected.get("shorter_run")))
    return said


def weak_promise(plan: Plan, delta: float) -> str:
    """What a large epsilon permits.

    Args:
        plan: The plan that will run.
        delta: At which its epsilon is stated.

    Returns:
        One sentence if epsilon is above 10 and finite, else an empty text.
    """
    if not plan.stages or any(stage.noise == 0 for stage in plan.stages):
        return ""
    cost = plan.cost()
    epsilon = float(cost.epsilon(delta))
    if not LARGE_EPSILON < epsilon < math.inf:
        return ""
    power = round_up(100 * cost.tpr(0.01), 3)
    return (
        f"epsilon {round_up(epsilon)} promises little: an attack with 1 % false alarms may find {power} % of those "
        f"who are in the data; epsilon 1 to {LARGE_EPSILON:g} is usual"
    )


def _describe_long_run(took: float, shorter: dict[str, Any] | None) -> str:
    """Say how long a run takes, which settings take about ten minutes, and what they cost.

    Args:
        took: The predicted seconds of the run.
        shorter: What `privot.synthesis.cost.shorter_run` found.

    Returns:
        One sentence.
    """
    text = f"about {seconds(took)} are predicted on this machine"
    if shorter is None:
        return f"{text}: use a GPU, or fewer records"
    chosen = " ".join(f"--set {key}={value}" for key, value in shorter["settings"].items())
    return f"{text}; about {seconds(shorter['predicted_seconds'])} with {chosen} ({shorter['accuracy']})"


def _too_little(spec: Spec, plan: Plan, delta: float, ratio: float) -> str:
    """That the noise drowns the classes, and what would not: the signal grows with a class, and the noise is the plan's own."""
    name, records = _smallest(spec)
    who = (
        f"class {name} is the smallest, with {records:g} records"
        if name
        else f"a class has about {records:.0f} records"
    )
    epsilon = _up(float(plan.scaled(ratio).cost().epsilon(delta)))
    return (
        f"signal to noise per class is predicted at {ratio:.2g}, under 1 ({who}): expect poor images; "
        f"epsilon {epsilon} would do, or classes of {math.ceil(records / ratio):,} records"
    )


def _smallest(spec: Spec) -> tuple[str, float]:
    """The smallest class by name or number, and its records; where sizes are not declared, no name and the mean size."""
    if not spec.class_sizes:
        return "", (spec.size or 0) / spec.classes
    place = spec.class_sizes.index(min(spec.class_sizes))
    return spec.class_names[place] if spec.class_names else str(place), spec.class_sizes[place]


def _up(value: float) -> str:
    """Two digits, rounded up: what is said to do must do."""
    if not 0 < value < math.inf:
        return f"{value:g}"
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / step - 1e-9) * step:.4g}"


def preflight(
    data: Spec | Privatized,
    method: Method,
    wall: Wall | None,
    device: str = "auto",
    allow_large_delta: bool = False,
) -> dict[str, Any]:
    """All that can be said before anything is read or spent."""
    box, spec = (data, data.spec) if isinstance(data, Privatized) else (None, data)
    plan, wall = (
        received(box, method, wall) if box else prepare(spec, method, wall, allow_large_delta)
    )
    delta = box.channel.delta if box else wall.delta
    expected = forecast(spec, method, plan, Runtime(device).target)
    private = plan.stages and all(stage.noise > 0 for stage in plan.stages)
    claim = Guarantee.of(plan, delta) if private else NoGuarantee("no noise is added")
    return {
        "method": method.name,
        "settings": dataclasses.asdict(method),  # type: ignore[call-overload]
        "spec": spec.to_json(),
        "plan": plan.to_json(),
        "event": str(plan.event()),
        "guarantee": dataclasses.asdict(claim),
        "forecast": expected,
        "cautions": cautions(spec, plan, wall.delta, expected, box),
    }


def forecast(spec: Spec, method: Method, plan: Plan, device: torch.device) -> dict[str, Any]:
    """The method's own, and what it means in seconds on this machine; of a long run on a CPU also how it could be shorter."""
    own = method.forecast(spec, plan)
    if not (work := own.get("floating_point_operations")):
        return own
    if device.type != "cpu":
        return {**own, "predicted_seconds": work / _speed(device)}
    speed = _speed(device, thread_limit(spec, device))
    took = seconds_on_cpu(own, speed) or 0.0
    found = {**own, "predicted_seconds": took}
    return {**found, "shorter_run": shorter_run(method, spec, speed)} if took > LONG else found


@functools.cache
def _speed(device: torch.device, count: int | None = None) -> float:
    """Floating-point operations a second of this machine, by a short matrix product, of which a CPU reaches a part; taken once.

    Args:
        device: The device.
        count: The number of threads on a CPU; None: as many as there are.

    Returns:
        Floating-point operations a second.
    """
    with threads(count):
        one = torch.ones(1000, 1000, device=device)
        (one @ one).sum().item()
        start = time.perf_counter()
        for _ in range(5):
            product = one @ one
        product.sum().item()
        took = time.perf_counter() - start
    return (USED if device.type == "cpu" else 1.0) * 5 * 2e9 / took
