"""Verify a release without its data: digests, events, and the guarantee that the events prove."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from privot.errors import ReleaseError, reraise_as
from privot.local.channels import channel_from_json
from privot.privacy.guarantee import Guarantee
from privot.privacy.plan import Plan
from privot.release import INTERNAL_PURPOSES, INVALID_RELEASE_MESSAGE, Release


def verify(folder: str | Path) -> dict[str, Any]:
    """Verify a release without the data.

    Check the digests, then compute epsilon and attack power again from the recorded events.

    Args:
        folder: The folder of the release.

    Returns:
        Plain data: the method, the guarantee, and ``epsilon_from_events`` where there is one.

    Raises:
        ReleaseError: If the release is damaged, or claims what its events do not prove.
    """
    release = Release.load(folder)
    with reraise_as(ReleaseError, INVALID_RELEASE_MESSAGE.format(folder)):
        _, guarantee = recompute_guarantee(release, folder)
        result = {
            "release": str(folder),
            "digests": "ok",
            "method": release.metadata.get("method"),
            "guarantee": asdict(release.guarantee),
        }
        return result | ({"epsilon_from_events": guarantee.epsilon} if guarantee else {})


def recompute_guarantee(
    release: Release, name: Any = "the release"
) -> tuple[Plan, Guarantee | None]:
    """Compute again what the events of a release prove, and compare it with its manifest.

    Args:
        release: The release, as it was loaded.
        name: What an error message calls it.

    Returns:
        The plan, and its guarantee; None where the release claims none.

    Raises:
        ReleaseError: If the manifest claims anything else, or the output must not leave the owner.
    """
    refuse_internal_release(release, name)
    plan = Plan.from_json(release.metadata.get("plan"))
    if str(plan.event()) != release.metadata.get("event"):
        raise ReleaseError(f"{name}: the recorded event does not follow from the recorded plan.")
    if (parameters := release.metadata.get("channel")) is not None:
        with reraise_as(ReleaseError, f"{name}: its channel is not valid"):
            if channel_from_json(parameters).plan() != plan:
                raise ReleaseError(f"{name}: the recorded plan does not follow from its channel.")
    if not isinstance(release.guarantee, Guarantee):
        return plan, None
    guarantee = Guarantee.from_plan(plan, release.guarantee.delta)
    claimed = _flatten_guarantee(release.guarantee)
    proven = _flatten_guarantee(guarantee)
    differing = claimed.keys() ^ proven.keys() or {
        key for key in proven if not _values_agree(claimed[key], proven[key])
    }
    if differing:
        key = min(differing)
        raise ReleaseError(
            f"{name}: claims {key} {claimed.get(key)}, but its events prove {proven.get(key)}."
        )
    return plan, guarantee


def refuse_internal_release(release: Release, name: Any = "the release") -> None:
    """Refuse output that was made for an attack or an audit.

    Such output stays with the data owner, and no ledger has charged it as a release.

    Args:
        release: The release, as it was loaded.
        name: What an error message calls it.

    Raises:
        ReleaseError: If the release has a purpose.
    """
    if purpose := release.metadata.get("purpose"):
        shown = purpose if purpose in INTERNAL_PURPOSES else "another purpose"
        raise ReleaseError(
            f"{name} is not a release: it was made for an attack on the data owner's side "
            f"({shown}) and must stay there."
        )


def refuse_mismatched_release(release: Release, contents: Any, name: Any) -> None:
    """Refuse a file whose field ``release`` names the digest of another release.

    Args:
        release: The release that the file should belong to.
        contents: What the file holds, as plain data.
        name: What an error message calls the file.

    Raises:
        ReleaseError: If the file names another release.
    """
    if isinstance(contents, dict) and contents.get("release", release.digest) != release.digest:
        raise ReleaseError(
            f"{name} belongs to another release. Measure or attack this release, or remove the "
            "file."
        )


def _flatten_guarantee(guarantee: Guarantee) -> dict[str, Any]:
    """List the fields of a guarantee, with one field for each false-positive rate."""
    return {
        **asdict(guarantee),
        "max_tpr": None,
        **{f"max_tpr at {fpr}": tpr for fpr, tpr in guarantee.max_tpr.items()},
    }


def _values_agree(claimed: Any, proven: Any) -> bool:
    """Compare two fields of a guarantee; numbers may differ by rounding."""
    if isinstance(claimed, (int, float)) and isinstance(proven, float):
        return math.isclose(claimed, proven, rel_tol=1e-6, abs_tol=1e-9)
    return bool(claimed == proven)
