"""Versions of the packages that a result depends on, for the manifest."""

from __future__ import annotations

import functools
import platform
from importlib.metadata import PackageNotFoundError, version

RECORDED_PACKAGES = ("privot", "torch", "numpy", "scipy", "dp-accounting", "safetensors")


def get_package_versions() -> dict[str, str]:
    """Give the versions of Python and of the packages that a result depends on."""
    versions = {"python": platform.python_version()}
    return versions | {name: _get_package_version(name) for name in RECORDED_PACKAGES}


@functools.cache
def _get_package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
