"""The release of a federated run."""

from __future__ import annotations

import dataclasses
from typing import Any

from privot.errors import ReleaseError
from privot.federated.messages import Terms
from privot.io import to_jsonable
from privot.release import Guarantee, NoGuarantee, Release
from privot.release.artifact import Artifact
from privot.synthesis.versions import get_package_versions


def build_federated_release(
    artifact: Artifact, terms: Terms, delta: float, run_facts: dict[str, Any]
) -> Release:
    """Build the release of a run: the generator with the guarantee that holds for each client.

    Args:
        artifact: The trained generator.
        terms: The terms of the run.
        delta: Delta at which the guarantee is stated.
        run_facts: Further public facts about the run, for the metadata.

    Returns:
        The release.

    Raises:
        ReleaseError: The training diverged.
    """
    if not artifact.is_consistent_with(terms.spec):
        raise ReleaseError("The training diverged: the generator has values that are not finite.")
    plan = terms.plan()
    metadata = {
        **artifact.metadata,
        "method": terms.settings.name,
        "settings": dataclasses.asdict(terms.settings),
        "plan": plan.to_json(),
        "event": str(plan.event()),
        "data": "",
        "run_id": terms.run_id,
        **run_facts,
        "versions": get_package_versions(),
    }
    has_noise = min(stage.noise_multiplier for stage in plan.stages) > 0
    guarantee = Guarantee.from_plan(plan, delta) if has_noise else NoGuarantee("no noise was added")
    return Release(artifact, guarantee, terms.spec, to_jsonable(metadata))
