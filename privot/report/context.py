"""One dictionary from which every file of a report is made. The public one knows the release and publishable numbers, nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from safetensors.torch import save

from privot.audit.result import Attack
from privot.errors import SettingError
from privot.measures.result import Reading
from privot.methods import make, methods
from privot.privacy.plan import Plan
from privot.progress import jsonable
from privot.release import FORMAT, TENSORS, Guarantee, Release
from privot.release.export import table_columns
from privot.report.formatting import block, clean, down
from privot.report.privacy_curves import by_step, curve, recorded, remembering
from privot.report.statement import statement, verdict
from privot.report.utility import utility

REPORT = 1  # of the layout of report.json


@dataclasses.dataclass(frozen=True)
class Known:
    """What is found out once and stands in both faces: all but readings and attacks."""

    release: Release
    facts: dict[str, Any]
    bound: (
        Callable[[float], float] | None
    )  # the certified true-positive rate at a false-positive rate


def known(release: Release, name: str) -> Known:
    """The facts that a release itself carries; accounting is done here, once."""
    claim = release.guarantee
    plan = recorded(release, clean(name))
    facts = release.facts
    bound = None
    drawn = None
    steps = []
    if plan and isinstance(claim, Guarantee):
        cost = remembering(plan.cost())
        bound = cost.tpr
        drawn = curve(cost)
        steps = by_step(plan, claim)
    spec = release.spec
    ledger = facts.get("ledger")
    told = facts.get("diagnostics")
    names = [clean(each, 60) for each in spec.class_names] if spec.class_names else None
    held = {
        "name": clean(name),
        "verdict": {"kind": type(claim).__name__, "line": verdict(claim)},
        "data": {
            **spec.to_json(),
            "class_names": names,
            "name": clean(facts.get("data"), 40) if facts.get("data") else "",
        },
        "product": release.product.kind,
        "content": content(release),
        "method": _method(release, plan),
        "guarantee": dataclasses.asdict(claim)
        if isinstance(claim, Guarantee)
        else {"reason": clean(claim.reason, 300)},
        "statement": statement(claim, spec),
        "diagnosis": clean(told.get("meaning"), 200) if isinstance(told, dict) else "",
        "plan": _stages(plan),
        "epsilon_by_step": steps,
        "curve": drawn,
        "ledger": _ledger(ledger) if isinstance(ledger, dict) else {},
        "provenance": _provenance(release),
    }
    return Known(release, held, bound)


def face(
    base: Known, kind: str, readings: Sequence[Reading], attacks: Sequence[Attack]
) -> dict[str, Any]:
    """The facts of one face (``public`` or ``internal``) with these readings and attacks."""
    claim = base.release.guarantee
    data = base.release.facts.get("data")
    stages = base.facts["plan"].get("stages")
    free = stages and all(stage["noise"] == 0 for stage in stages)  # no plan says nothing of noise
    epsilon = claim.epsilon if isinstance(claim, Guarantee) else math.inf if free else None
    held = [_attack(each, base.bound) for each in attacks]
    return jsonable(
        {
            "privot": {"report": REPORT, "face": kind},
            "broken": any(each["broken"] for each in held),
            **base.facts,
            "attacks": held,
            "utility": utility(readings, data if isinstance(data, str) else "", epsilon),
        }
    )


def public(base: Known, readings: Sequence[Reading], attacks: Sequence[Attack]) -> dict[str, Any]:
    """The public face.

    privacy: a function of the release, its name, and what is marked publishable; the owner's data and ledger cannot get in.
    """
    return face(
        base,
        "public",
        [each for each in readings if each.publishable],
        [each for each in attacks if each.publishable],
    )


def _attack(attack: Attack, bound: Callable[[float], float] | None) -> dict[str, Any]:
    above = attack.over(bound) if bound else (False,) * len(attack.fpr)
    most = [bound(rate) for rate in attack.fpr] if bound else None
    told = {"control": attack.control, "caution": attack.caution, "verdict": attack.verdict}
    said = {
        "name": clean(attack.name),
        **{key: clean(words, 500) if words else "" for key, words in told.items()},
    }
    return {
        **dataclasses.asdict(attack),
        **said,
        "certified": most,
        "above": list(above),
        "broken": attack.refuted or any(above),
    }


def _plain(value: Any) -> Any:
    return value if type(value) in (int, float) else clean(value)


def _ledger(said: dict[str, Any]) -> dict[str, Any]:
    """What the manifest says of the ledger; releases of older versions do not say for whom its sum holds."""
    words = {key: clean(said[key], 40) if said.get(key) else "" for key in ("neighbours", "unit")}
    return {
        "head": _plain(said.get("head")),
        "spent_epsilon": _plain(said.get("spent_epsilon")),
        **words,
        "own": said.get("own") is True,
    }


def _stages(plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {}
    stages = plan.to_json()["stages"]
    return {
        "neighbours": str(plan.neighbours),
        "stages": [
            {**each, "name": clean(each["name"]), "verb": clean(each["verb"], 40)}
            for each in stages
        ],
    }


def content(release: Release) -> dict[str, str]:
    """What the files of a release hold.

    Args:
        release: Any release.

    Returns:
        ``kind``: "real" (records as they were), "table" or "images"; ``line``: the same in words,
        which also say if there is no guarantee.
    """
    name = release.facts.get("method")
    kind = methods().get(name) if isinstance(name, str) else None
    if getattr(kind, "real", False):
        return {"kind": "real", "line": "Real records, unprotected"}
    table = table_columns(release) is not None
    line = "Synthetic rows of a table" if table else "Synthetic labelled images"
    line += "" if isinstance(release.guarantee, Guarantee) else " with no privacy guarantee"
    return {"kind": "table" if table else "images", "line": line}


def _noise(plan: Plan | None) -> str:
    """The noise that ran, where a method derived it from the budget."""
    if plan is None or not plan.stages:
        return ""
    stages = [f"{stage.name} {down(stage.noise)}" for stage in plan.stages[:6]]
    more = f", and {len(plan.stages) - 6} more" if len(plan.stages) > 6 else ""
    return f"derived from the budget: {', '.join(stages)}{more}"


def _method(release: Release, plan: Plan | None) -> dict[str, Any]:
    """The method's card; one that this version does not know has a name and settings alone."""
    name = release.facts.get("method")
    settings = release.facts.get("settings")
    try:
        maker = make(name) if isinstance(name, str) else None
    except SettingError:
        maker = None
    about = {
        key: block(getattr(maker, key)) if maker else ""
        for key in ("title", "trusts", "promise", "citation")
    }
    shown = dict(settings) if isinstance(settings, dict) else {}
    if "noise" in shown and shown["noise"] is None and (ran := _noise(plan)):
        shown["noise"] = ran
    pairs = list(shown.items())[:60]
    return {
        "name": clean(name, 60),
        "known": maker is not None,
        **about,
        "settings": {clean(key, 60): clean(value, 120) for key, value in pairs},
    }


def _provenance(release: Release) -> dict[str, Any]:
    """Versions, seed and digests; the digests are those that stand in the release's own folder."""
    versions = release.facts.get("versions")
    tensors = hashlib.sha256(save(release.product.tensors)).hexdigest()
    text = json.dumps(release.manifest() | {"files": {TENSORS: tensors}}, indent=1).encode()
    return {
        "format": FORMAT,
        "seed": clean(release.facts.get("seed"), 40),
        "event": clean(release.facts.get("event"), 600),
        "versions": {clean(key, 40): clean(value, 40) for key, value in list(versions.items())[:40]}
        if isinstance(versions, dict)
        else {},
        "digests": {"manifest.json": hashlib.sha256(text).hexdigest(), TENSORS: tensors},
        "verify": "privot verify FOLDER",
    }
