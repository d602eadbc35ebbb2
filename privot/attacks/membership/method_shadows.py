"""Shadows for an attack: configured by the attacked release or by a method."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from privot.attacks.membership.candidates import AnyDataset, concatenate
from privot.attacks.shadows.config import ShadowConfig
from privot.data.dataset import Public
from privot.errors import SettingError
from privot.privacy.guarantee import Guarantee
from privot.release import Release


def shadows_for_release(
    release: Release,
    members: AnyDataset,
    nonmembers: AnyDataset,
    folder: Path,
    num_shadows: int,
    **options: Any,
) -> ShadowConfig:
    """Configure shadows that are made as a release was: with its method, settings and epsilon.

    Args:
        release: The release.
        members: Members.
        nonmembers: Non-members.
        folder: Where the shadows are, or will be.
        num_shadows: Number of shadows, even. Each is made from a random half of all candidates.
        **options: Further fields of `ShadowConfig`.

    Returns:
        The configuration.

    Raises:
        SettingError: If the release does not name its method.
    """
    method = release.metadata.get("method")
    settings = dict(release.metadata.get("settings") or {})
    if not isinstance(method, str):
        raise SettingError(
            "the release does not name the method that made it, so no shadow of it can be made"
        )
    epsilon = None
    has_mechanism = (release.metadata.get("plan") or {}).get("stages")
    if settings.get("noise_multiplier") is None and has_mechanism:  # a budget set the noise
        guarantee = release.guarantee
        epsilon = guarantee.epsilon if isinstance(guarantee, Guarantee) else math.inf
    candidates = concatenate(
        members, nonmembers, release.spec.class_sizes is not None, release.spec.num_clients
    )
    return ShadowConfig(
        folder=folder,
        dataset=candidates,
        method=method,
        settings=settings,
        epsilon=epsilon,
        num_shadows=num_shadows,
        source_names=_collect_sensitive_names(members, nonmembers),
        **options,
    )


def shadows_for_method(
    method: str,
    settings: dict[str, Any],
    epsilon: float | None,
    members: AnyDataset,
    nonmembers: AnyDataset,
    folder: Path,
    num_shadows: int,
    **options: Any,
) -> ShadowConfig:
    """Configure shadows of a method, where no release is attacked (`leave_one_out_attack`).

    Args:
        method: Name of the method.
        settings: Its settings.
        epsilon: Budget of a method with a mechanism.
        members: One part of the candidates.
        nonmembers: The other part.
        folder: Where the shadows are, or will be.
        num_shadows: Number of shadows, even. Each is made from a random half of all candidates.
        **options: Further fields of `ShadowConfig`.

    Returns:
        The configuration.
    """
    candidates = concatenate(
        members, nonmembers, members.spec.class_sizes is not None, members.spec.num_clients
    )
    return ShadowConfig(
        folder=folder,
        dataset=candidates,
        method=method,
        settings=settings,
        epsilon=epsilon,
        num_shadows=num_shadows,
        source_names=_collect_sensitive_names(members, nonmembers),
        **options,
    )


def _collect_sensitive_names(*datasets: AnyDataset) -> tuple[str, ...]:
    """Collect the names of the sensitive data sets, whose ledgers list the shadows."""
    return tuple(dataset.name for dataset in datasets if not isinstance(dataset, Public))
