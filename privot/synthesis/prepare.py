"""Resolve what a run will do before anything is charged: data, method, plan, budget and ledger."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from privot.data import Public, Sensitive, load_catalog
from privot.data.spec import Spec
from privot.data.tabular import SensitiveTable
from privot.errors import SettingError
from privot.local.dataset import PrivatizedDataset
from privot.methods import Method
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import is_dataset_ledger, open_ledger
from privot.privacy.plan import Budget, Plan, PrivacyTarget
from privot.release import INTERNAL_PURPOSES
from privot.runtime import Progress, Runtime
from privot.synthesis.cost import configure_method
from privot.synthesis.inputs import load
from privot.synthesis.preflight import (
    collect_warnings,
    forecast_run,
    resolve_local_plan,
    resolve_plan,
)
from privot.synthesis.run_folder import read_run_settings


class InternalOptions(TypedDict, total=False):
    """Options of `synthesize` for tests, attacks and audits.

    Attributes:
        insecure_seed: Seed of the noise. Seeded noise can be subtracted, so the release has no
            guarantee and the run is charged as infinite.
        purpose: ``shadow`` or ``audit``, for output that stays with the data owner: `verify`
            refuses it.
    """

    insecure_seed: int | None
    purpose: str


@dataclass(frozen=True)
class RunOptions:
    """The options of `synthesize`, which explains them."""

    settings: dict[str, Any] | None
    out: Path | None
    ledger: Ledger | str | Path | None
    seed: int
    runtime: Runtime
    progress: Progress
    resume: bool
    on_warning: Callable[[str], None]
    allow_large_delta: bool
    insecure_seed: int | None = None
    purpose: str = ""


@dataclass(frozen=True)
class PreparedRun:
    """A run whose data, method, plan, budget and ledger are known.

    Attributes:
        dataset: Records, or what clients privatized.
        method: The method with concrete settings.
        plan: The calibrated plan; of privatized records, the plan that the clients ran.
        target: The budget of the run.
        ledger: The ledger that is charged; None if the clients paid.
        options: The options of `synthesize`.
    """

    dataset: Sensitive | PrivatizedDataset
    method: Method
    plan: Plan
    target: PrivacyTarget
    ledger: Ledger | None
    options: RunOptions

    @property
    def spec(self) -> Spec:
        """Shape and classes of the images."""
        return self.dataset.spec

    @property
    def local_dataset(self) -> PrivatizedDataset | None:
        """The data set, where clients privatized it."""
        return self.dataset if isinstance(self.dataset, PrivatizedDataset) else None

    @property
    def epsilon(self) -> float:
        """Epsilon of the plan at the delta of the budget."""
        if not self.plan.stages:
            return math.inf
        return float(self.plan.cost().epsilon(self.target.delta))

    def list_warnings(self) -> list[str]:
        """List what a careful colleague would say before the run."""
        forecast = forecast_run(
            self.spec, self.method, self.plan, self.options.runtime.torch_device
        )
        return collect_warnings(
            self.spec, self.plan, self.target.delta, forecast, self.local_dataset
        )

    def describe(self) -> dict[str, Any]:
        """State the facts of the run for the manifest, as plain data."""
        facts: dict[str, Any] = {
            "method": self.method.name,
            "settings": dataclasses.asdict(self.method),  # type: ignore[call-overload]
            "plan": self.plan.to_json(),
            "event": str(self.plan.event()),
            "data": self.dataset.name if self.dataset.name in load_catalog() else "",
            "seed": self.options.seed,
        }
        if self.local_dataset:
            facts["channel"] = self.local_dataset.channel.to_json()
        if self.options.purpose:
            facts["purpose"] = self.options.purpose
        return facts

    def identify(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Add to the facts of a run what a resumed run must have in common with it.

        A run is resumed with the same data only, and never as a private one if its noise was
        seeded.
        """
        if self.local_dataset:
            dataset_digest = self.local_dataset.digest
        else:
            dataset_digest = hashlib.sha256(self.dataset.name.encode()).hexdigest()
        is_insecure = self.options.insecure_seed is not None
        return {**facts, "insecure": is_insecure, "dataset": dataset_digest}


def prepare_run(
    data: Sensitive | PrivatizedDataset | str | Path,
    method: str | Method,
    budget: PrivacyTarget | float | None,
    options: RunOptions,
) -> PreparedRun:
    """Resolve data, method, plan, budget and ledger of a run.

    Args:
        data: The data set, or its name or path.
        method: A method, or its name.
        budget: The budget, or an epsilon at delta 1e-5.
        options: The options of `synthesize`.

    Returns:
        The run. Nothing was charged and no record was read.

    Raises:
        SettingError: If data, method, budget and ledger do not fit together.
    """
    if options.purpose and options.purpose not in INTERNAL_PURPOSES:
        raise SettingError(
            f"purpose={options.purpose!r}: give {' or '.join(INTERNAL_PURPOSES)}, or nothing for a "
            "release."
        )
    dataset = data if isinstance(data, (Sensitive, PrivatizedDataset)) else load(data)
    if isinstance(dataset, Public):
        raise SettingError("synthesize takes Sensitive data. Public data needs no privacy.")
    if isinstance(dataset, SensitiveTable):
        raise SettingError(
            "A table can only be privatized: run privot privatize first, then give its file."
        )
    device = options.runtime.torch_device
    stored_settings = {}
    if options.out and options.resume and isinstance(method, str):
        stored_settings = read_run_settings(options.out, method)
    settings = {**stored_settings, **(options.settings or {})}
    configured = configure_method(method, settings, dataset.spec, device)
    target = Budget(budget) if isinstance(budget, (int, float)) else budget
    if isinstance(dataset, PrivatizedDataset):  # the clients paid: nothing is charged here
        plan, target = resolve_local_plan(dataset, configured, target)
        return PreparedRun(dataset, configured, plan, target, None, options)
    plan, target = resolve_plan(dataset.spec, configured, target, options.allow_large_delta)
    ledger = open_ledger("" if options.purpose else dataset.name, options.ledger)
    if (
        budget is None
        and not options.purpose
        and _has_infinite_epsilon(plan)
        and is_dataset_ledger(dataset.name, ledger)
    ):
        raise SettingError(
            f"{configured.name} gives no guarantee and would set the ledger of {dataset.name} to "
            "infinite for good. Accept this with --epsilon inf (budget=math.inf), or name another "
            "ledger for a trial (--ledger)."
        )
    return PreparedRun(dataset, configured, plan, target, ledger, options)


def _has_infinite_epsilon(plan: Plan) -> bool:
    """Whether a run of this plan costs an infinite epsilon: no query, or a query without noise."""
    return not plan.stages or any(stage.noise_multiplier == 0 for stage in plan.stages)
