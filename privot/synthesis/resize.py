"""From a release of images to a set of another size, without the data and at no cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from privot.errors import ReleaseError, SettingError, reraise_as
from privot.io import check_vacant, to_jsonable
from privot.methods import ResizableMethod, list_methods, make_method
from privot.release import INVALID_RELEASE_MESSAGE, Release
from privot.release.artifact import Artifact
from privot.release.verify import recompute_guarantee
from privot.runtime import Progress, Runtime, Streams, ignore_progress
from privot.runtime.memory import is_out_of_memory
from privot.synthesis.versions import get_package_versions


def resize(
    release: Release | str | Path,
    images_per_class: int,
    *,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    runtime: Runtime | None = None,
    progress: Progress = ignore_progress,
) -> Release:
    """Make a set of another size from the query results that a release holds.

    No data, ledger or gate is used, so it costs nothing: guarantee, plan, seed and ledger facts are
    those of the release, and the manifest names the release that the set was made from.

    Args:
        release: A release, or its folder.
        images_per_class: Number of images of each class.
        settings: Settings that change how the set is made, such as ``steps``. They must not change
            the plan.
        out: The folder to write the new release to; None: none.
        runtime: Where to compute.
        progress: Receives public facts about the work.

    Returns:
        The new release.

    Raises:
        ReleaseError: If the release is invalid or holds no query results.
        SettingError: If the settings change the plan.
    """
    source = release if isinstance(release, Release) else Release.load(release)
    name = "the release" if isinstance(release, Release) else str(release)
    if out is not None:
        check_vacant(Path(out))
    with reraise_as(ReleaseError, INVALID_RELEASE_MESSAGE.format(name)):
        plan, _ = recompute_guarantee(source, name)
        overrides = {**(settings or {}), "images_per_class": images_per_class}
        method = _build_resizing_method(source, overrides, name)
        # The budget decided the noise, so all but the noise must agree.
        if method.plan(source.spec).scale_noise(0.0) != plan.scale_noise(0.0):
            raise ReleaseError(f"{name}: its plan does not follow from its settings.")
    artifact = _regenerate_artifact(method, source, runtime or Runtime(), progress, name)
    metadata = {
        **source.metadata,
        "settings": dataclasses.asdict(method),  # type: ignore[call-overload]
        "versions": get_package_versions(),
        "resized": {"from": source.digest, "cost": "none: no record was queried"},
    }
    resized = Release(artifact, source.guarantee, source.spec, to_jsonable(metadata))
    if out is not None:
        resized.save(out)
    return resized


def _build_resizing_method(
    release: Release, overrides: Mapping[str, Any], name: str
) -> ResizableMethod:
    """Build the method of a release with its own settings and some others.

    Args:
        release: The release.
        overrides: Settings that differ from those of the release.
        name: What an error message calls the release.

    Returns:
        The method.
    """
    method_name = release.metadata.get("method")
    settings = release.metadata.get("settings")
    if not isinstance(method_name, str) or not isinstance(settings, dict):
        raise ReleaseError(f"{name}: its manifest names no method and settings.")
    if not isinstance(make_method(method_name), ResizableMethod):
        resizable = (
            other for other in list_methods() if isinstance(make_method(other), ResizableMethod)
        )
        raise ReleaseError(
            f"{name}: {method_name} cannot make a set of another size. {' or '.join(resizable)} "
            "can."
        )
    if not release.artifact.resize_state:
        raise ReleaseError(
            f"{name}: it was made with keep_answers=false, so it holds no query results for "
            "another set."
        )
    method = make_method(method_name, {**settings, **overrides})
    if method.plan(release.spec) != make_method(method_name, settings).plan(release.spec):
        changed = ", ".join(set(overrides) - {"images_per_class"})
        raise SettingError(
            f"{name}: a set of another size cannot make new queries, but {changed} would change "
            "them. Leave it out."
        )
    assert isinstance(method, ResizableMethod)
    return method


def _regenerate_artifact(
    method: ResizableMethod, release: Release, runtime: Runtime, progress: Progress, name: str
) -> Artifact:
    """Make a new set and check it; the tensors of a release may come from anywhere.

    Args:
        method: The method with the new settings.
        release: The release with the query results.
        runtime: Where to compute.
        progress: Receives public facts about the work.
        name: What an error message calls the release.

    Returns:
        The new set.
    """
    seed = release.metadata.get("seed")
    spec = release.spec
    if type(seed) is not int:
        raise ReleaseError(f"{name}: its seed is not a whole number.")
    try:
        artifact = method.regenerate(release.artifact, spec, Streams(seed, runtime), progress)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):  # the requested set is too large; the release may be valid
            raise
        raise ReleaseError(
            f"{name}: its query results do not fit its settings ({type(error).__name__})."
        ) from None
    images = artifact.tensors["images"]
    class_sizes = artifact.tensors["labels"].bincount(minlength=spec.num_classes).tolist()
    has_equal_classes = class_sizes == [method.images_per_class] * spec.num_classes
    if not (has_equal_classes and artifact.is_consistent_with(spec) and images.isfinite().all()):
        raise ReleaseError(
            f"{name}: its query results give no valid set of {method.images_per_class} images of "
            "each class."
        )
    return artifact
