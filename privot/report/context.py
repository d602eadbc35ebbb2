"""The facts of a report, as one dictionary from which every file is rendered.

The public view depends only on the release and publishable results.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

from safetensors.torch import save

from privot.audit.result import AttackResult
from privot.errors import SettingError
from privot.io import to_jsonable
from privot.measures.result import MetricResult
from privot.methods import list_methods, make_method
from privot.privacy.guarantee import Guarantee
from privot.privacy.plan import Plan
from privot.release import RELEASE_FORMAT, TENSORS_FILE, Release
from privot.release.table_columns import infer_table_columns
from privot.report.formatting import clean_lines, clean_text, format_rounded_down
from privot.report.privacy_curves import (
    cache_cost,
    compute_epsilon_by_step,
    compute_max_tpr_curve,
    verify_recorded_plan,
)
from privot.report.statement import build_statement, format_guarantee
from privot.report.utility import summarize_utility

REPORT_FORMAT = 1  # version of the layout of report.json
MAX_SHOWN_SETTINGS = 60
MAX_SHOWN_VERSIONS = 40
MAX_NAMED_STAGES = 6  # stages whose derived noise multiplier is named

RateBound = Callable[[float], float]


@dataclasses.dataclass(frozen=True)
class BaseContext:
    """What the public and the internal report share: everything but metrics and attacks.

    Attributes:
        release: The release.
        values: The shared facts.
        max_tpr: The certified true-positive rate at a false-positive rate; None without a
            guarantee.
    """

    release: Release
    values: dict[str, Any]
    max_tpr: RateBound | None


def base_context(release: Release, name: str) -> BaseContext:
    """Collect the facts that follow from the release alone, with the privacy accounting.

    Args:
        release: The release.
        name: Its name.

    Returns:
        The facts.

    Raises:
        ReleaseError: The recorded plan does not prove the guarantee.
    """
    guarantee = release.guarantee
    plan = verify_recorded_plan(release, clean_text(name))
    metadata = release.metadata
    max_tpr = None
    max_tpr_curve = None
    epsilon_by_step = []
    if plan and isinstance(guarantee, Guarantee):
        cost = cache_cost(plan.cost())
        max_tpr = cost.max_tpr
        max_tpr_curve = compute_max_tpr_curve(cost)
        epsilon_by_step = compute_epsilon_by_step(plan, guarantee)
    spec = release.spec
    ledger_facts = metadata.get("ledger")
    diagnostics = metadata.get("diagnostics")
    class_names = None
    if spec.class_names:
        class_names = [clean_text(class_name, 60) for class_name in spec.class_names]
    if isinstance(guarantee, Guarantee):
        guarantee_facts = dataclasses.asdict(guarantee)
    else:
        guarantee_facts = {"reason": clean_text(guarantee.reason, 300)}
    values = {
        "name": clean_text(name),
        "verdict": {"kind": type(guarantee).__name__, "line": format_guarantee(guarantee)},
        "data": {
            **spec.to_json(),
            "class_names": class_names,
            "name": clean_text(metadata.get("data"), 40) if metadata.get("data") else "",
        },
        "artifact": release.artifact.kind,
        "content": describe_content(release),
        "method": _describe_method(release, plan),
        "guarantee": guarantee_facts,
        "statement": build_statement(guarantee, spec),
        "diagnosis": (
            clean_text(diagnostics.get("meaning"), 200) if isinstance(diagnostics, dict) else ""
        ),
        "plan": _describe_plan(plan),
        "epsilon_by_step": epsilon_by_step,
        "max_tpr_curve": max_tpr_curve,
        "ledger": _describe_ledger(ledger_facts) if isinstance(ledger_facts, dict) else {},
        "provenance": _describe_provenance(release),
    }
    return BaseContext(release, values, max_tpr)


def view(
    base: BaseContext,
    audience: str,
    results: Sequence[MetricResult],
    attacks: Sequence[AttackResult],
) -> dict[str, Any]:
    """Add metrics and attacks to the shared facts.

    Args:
        base: The shared facts.
        audience: "public" or "internal".
        results: Results of metrics.
        attacks: Results of attacks.

    Returns:
        The facts of the public or the internal report, as JSON types.
    """
    guarantee = base.release.guarantee
    dataset_name = base.release.metadata.get("data")
    stages = base.values["plan"].get("stages")
    # Without a plan, nothing is known about noise.
    has_no_noise = stages and all(stage["noise_multiplier"] == 0 for stage in stages)
    epsilon = math.inf if has_no_noise else None
    if isinstance(guarantee, Guarantee):
        epsilon = guarantee.epsilon
    described_attacks = [_describe_attack(attack, base.max_tpr) for attack in attacks]
    return to_jsonable(
        {
            "privot": {"report": REPORT_FORMAT, "view": audience},
            "guarantee_refuted": any(attack["guarantee_refuted"] for attack in described_attacks),
            **base.values,
            "attacks": described_attacks,
            "utility": summarize_utility(
                results, dataset_name if isinstance(dataset_name, str) else "", epsilon
            ),
        }
    )


def public_view(
    base: BaseContext, results: Sequence[MetricResult], attacks: Sequence[AttackResult]
) -> dict[str, Any]:
    """Collect the facts of the public report.

    privacy: they are a function of the release, its name, and the results that are marked
    publishable. The owner's data and ledger are not among the inputs.

    Args:
        base: The shared facts.
        results: Results of metrics, of which the publishable ones are used.
        attacks: Results of attacks, of which the publishable ones are used.

    Returns:
        The facts.
    """
    return view(
        base,
        "public",
        [result for result in results if result.publishable],
        [attack for attack in attacks if attack.publishable],
    )


def _describe_attack(attack: AttackResult, max_tpr: RateBound | None) -> dict[str, Any]:
    """Compare an attack with the certified rates, and clean its texts."""
    exceeds_max_tpr = attack.exceeds_bound(max_tpr) if max_tpr else (False,) * len(attack.fpr)
    texts = {
        key: clean_text(text, 500) if text else ""
        for key, text in (
            ("controls_summary", attack.controls_summary),
            ("warning", attack.warning),
            ("verdict", attack.verdict),
        )
    }
    return {
        **dataclasses.asdict(attack),
        "name": clean_text(attack.name),
        **texts,
        "max_tpr": [max_tpr(fpr) for fpr in attack.fpr] if max_tpr else None,
        "exceeds_max_tpr": list(exceeds_max_tpr),
        "guarantee_refuted": attack.verdict_refutes_guarantee or any(exceeds_max_tpr),
    }


def _clean_scalar(value: Any) -> Any:
    return value if type(value) in (int, float) else clean_text(value)


def _describe_ledger(ledger_facts: dict[str, Any]) -> dict[str, Any]:
    """Describe what the manifest says about the ledger. Some manifests lack the privacy unit."""
    return {
        "head": _clean_scalar(ledger_facts.get("head")),
        "spent_epsilon": _clean_scalar(ledger_facts.get("spent_epsilon")),
        **{
            key: clean_text(ledger_facts[key], 40) if ledger_facts.get(key) else ""
            for key in ("neighbours", "privacy_unit")
        },
        "is_dataset_ledger": ledger_facts.get("is_dataset_ledger") is True,
    }


def _describe_plan(plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    return {
        "neighbours": str(plan.neighbours),
        "stages": [
            {
                **stage,
                "name": clean_text(stage["name"]),
                "operation": clean_text(stage["operation"], 40),
            }
            for stage in plan.to_json()["stages"]
        ],
    }


def describe_content(release: Release) -> dict[str, str]:
    """Describe what a release contains.

    Returns:
        ``kind``: "real" (real records), "table" or "images"; ``line``: the same as a phrase, which
        also says if there is no guarantee.
    """
    name = release.metadata.get("method")
    method = list_methods().get(name) if isinstance(name, str) else None
    if method is not None and method.releases_real_records:
        return {"kind": "real", "line": "Real records, unprotected"}
    is_table = infer_table_columns(release) is not None
    line = "Synthetic rows of a table" if is_table else "Synthetic labelled images"
    if not isinstance(release.guarantee, Guarantee):
        line += " with no privacy guarantee"
    return {"kind": "table" if is_table else "images", "line": line}


def _describe_derived_noise(plan: Plan | None) -> str:
    """Name the noise multipliers that a method derived from the budget."""
    if plan is None or not plan.stages:
        return ""
    stages = ", ".join(
        f"{stage.name} {format_rounded_down(stage.noise_multiplier)}"
        for stage in plan.stages[:MAX_NAMED_STAGES]
    )
    num_others = len(plan.stages) - MAX_NAMED_STAGES
    others = f", and {num_others} more" if num_others > 0 else ""
    return f"derived from the budget: {stages}{others}"


def _describe_method(release: Release, plan: Plan | None) -> dict[str, Any]:
    """Describe the method and its settings. An unknown method has a name and settings only."""
    name = release.metadata.get("method")
    settings = release.metadata.get("settings")
    try:
        method = make_method(name) if isinstance(name, str) else None
    except SettingError:
        method = None
    shown_settings = dict(settings) if isinstance(settings, dict) else {}
    if "noise_multiplier" in shown_settings and shown_settings["noise_multiplier"] is None:
        derived_noise = _describe_derived_noise(plan)
        if derived_noise:
            shown_settings["noise_multiplier"] = derived_noise
    return {
        "name": clean_text(name, 60),
        "is_known": method is not None,
        **{
            key: clean_lines(getattr(method, key)) if method else ""
            for key in ("title", "trusted_party", "guarantee_summary", "citation")
        },
        "settings": {
            clean_text(key, 60): clean_text(value, 120)
            for key, value in list(shown_settings.items())[:MAX_SHOWN_SETTINGS]
        },
    }


def _describe_provenance(release: Release) -> dict[str, Any]:
    """Collect versions, seed and digests. The digests are those of the release folder."""
    versions = release.metadata.get("versions")
    if not isinstance(versions, dict):
        versions = {}
    tensors_digest = hashlib.sha256(save(release.artifact.tensors)).hexdigest()
    return {
        "format": RELEASE_FORMAT,
        "seed": clean_text(release.metadata.get("seed"), 40),
        "event": clean_text(release.metadata.get("event"), 600),
        "versions": {
            clean_text(key, 40): clean_text(value, 40)
            for key, value in list(versions.items())[:MAX_SHOWN_VERSIONS]
        },
        "digests": {"manifest.json": release.digest, TENSORS_FILE: tensors_digest},
        "verify": "privot verify FOLDER",
    }
