"""Defaults of the optional parts of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from privot.data.spec import Spec


class MethodBase:
    """The base class of every method: defaults for what a method need not have.

    See `privot.methods.Method` for the meaning of each attribute.
    """

    noise_multiplier: float | None = None
    adjustable_on_resume: ClassVar[tuple[str, ...]] = ()
    cpu_minimums: ClassVar[Mapping[str, int]] = {}
    last_resort_cpu_minimums: ClassVar[Mapping[str, int]] = {}
    cpu_accuracy_notes: ClassVar[Mapping[int, str]] = {}
    releases_real_records: ClassVar[bool] = False

    @property
    def public_source(self) -> str:
        """The public data set whose images the method reads; empty: none."""
        return ""

    @classmethod
    def suggest_settings(cls, spec: Spec) -> dict[str, Any]:
        """Suggest settings for data of this shape and size, where the user gave none."""
        return {}

    @classmethod
    def suggest_cpu_settings(cls, spec: Spec) -> dict[str, Any]:
        """Suggest settings for a run on a CPU, which replace those of `suggest_settings`."""
        return {}
