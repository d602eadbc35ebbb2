"""The registry of methods. One file holds one method.

A method is found by listing this folder and `privot.baselines`: its module names a frozen dataclass
in ``METHOD``. The fields of the dataclass are the settings of the method.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, Protocol, runtime_checkable

from privot import baselines
from privot.components.method_base import MethodBase
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Artifact
from privot.runtime import Progress, Streams

__all__ = [
    "Method",
    "MethodBase",
    "ResizableMethod",
    "build_method",
    "list_methods",
    "make_method",
]

BOOLEAN_WORDS = {"true": True, "false": False, "1": True, "0": False}


class Method(Protocol):
    """The contract of a method. `MethodBase` has defaults for what is optional.

    ``plan`` reads no data; ``fit`` reaches the data through the gate only.

    Attributes:
        name: The name in files and on the command line.
        title: One line that says what the method is.
        trusted_party: Whom the people in the data must trust.
        guarantee_summary: One line that says what is guaranteed.
        citation: BibTeX of the paper.
        noise_multiplier: The noise, where a setting fixes it; None: the budget decides.
        adjustable_on_resume: Settings that may differ when a run is resumed, because no query
            depends on them.
        cpu_minimums: Settings that may be halved for a run on a CPU, with their least values; see
            `privot.synthesis.cost`.
        last_resort_cpu_minimums: Settings that are halved if this is not enough.
        cpu_accuracy_notes: What is known about accuracy with halved settings, by colour channels.
        releases_real_records: Whether the release holds unchanged records.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    trusted_party: ClassVar[str]
    guarantee_summary: ClassVar[str]
    citation: ClassVar[str]
    adjustable_on_resume: ClassVar[tuple[str, ...]]
    cpu_minimums: ClassVar[Mapping[str, int]]
    last_resort_cpu_minimums: ClassVar[Mapping[str, int]]
    cpu_accuracy_notes: ClassVar[Mapping[int, str]]
    releases_real_records: ClassVar[bool]

    @property
    def noise_multiplier(self) -> float | None: ...

    @property
    def public_source(self) -> str:
        """The public data set whose images the method reads; empty: none."""

    def suggest_settings(self, spec: Spec) -> dict[str, Any]:
        """Suggest settings for data of this shape and size, where the user gave none."""

    def suggest_cpu_settings(self, spec: Spec) -> dict[str, Any]:
        """Suggest settings for a run on a CPU, which replace those of `suggest_settings`."""

    def plan(self, spec: Spec) -> Plan:
        """List the queries in their proportions; `Plan.calibrate` scales their noise."""

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        """Predict quality and work before anything is spent."""

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Artifact:
        """Train on the data behind the gate and build what is released.

        Args:
            gate: The only way to the data.
            streams: Public randomness and the folder of the unfinished run.
            progress: Receives public facts about the run.

        Returns:
            The generator or the set of images.
        """


@runtime_checkable
class ResizableMethod(Method, Protocol):
    """A method that can make a set of another size from a release, without a gate."""

    @property
    def images_per_class(self) -> int: ...

    def regenerate(
        self, artifact: Artifact, spec: Spec, streams: Streams, progress: Progress
    ) -> Artifact:
        """Build a set of ``images_per_class`` images of each class.

        Args:
            artifact: What was released, with its ``resize_state``.
            spec: Shape and classes of the images.
            streams: Public randomness.
            progress: Receives public facts about the work.

        Returns:
            The new set.
        """


@cache
def list_methods() -> dict[str, type[Method]]:
    """List the class of every method by name.

    >>> "merf" in list_methods()
    True
    """
    names = [
        f"{package.__name__}.{module.name}"
        for package in (importlib.import_module(__name__), baselines)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    modules = [importlib.import_module(name) for name in names]
    methods = [module.METHOD for module in modules if hasattr(module, "METHOD")]
    return {method.name: method for method in sorted(methods, key=lambda method: method.name)}


def make_method(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """Build a method from its name and settings.

    >>> make_method("merf", {"num_features": "500"}).num_features
    500

    Args:
        name: The name of the method.
        settings: Values by the name of the setting. A text is read as the type of the setting.

    Returns:
        The method.

    Raises:
        SettingError: If a name is unknown (the message suggests the nearest) or a value has the
            wrong type.
    """
    method_class = list_methods().get(name)
    if method_class is None:
        raise SettingError(f"there is no method {name!r}; {_suggest_nearest(name, list_methods())}")
    return build_method(method_class, settings)


def build_method(method_class: type[Method], settings: Mapping[str, Any] | None = None) -> Method:
    """Build a method from its class and settings, which may be texts.

    Args:
        method_class: The class of the method, from this package or from outside.
        settings: Values by the name of the setting. A text is read as the type of the setting.

    Returns:
        The method.

    Raises:
        SettingError: If a setting is unknown or a value has the wrong type.
    """
    name = method_class.name
    names = [field.name for field in dataclasses.fields(method_class)]  # type: ignore[arg-type]
    hints = _get_type_hints(method_class)
    values = {}
    for key, value in (settings or {}).items():
        if key not in names:
            raise SettingError(f"{name} has no setting {key!r}; {_suggest_nearest(key, names)}")
        values[key] = _parse_setting(f"{name}.{key}", value, hints[key])
    return method_class(**values)


@cache
def _get_type_hints(method_class: type[Method]) -> dict[str, Any]:
    """Give the type of each setting."""
    return typing.get_type_hints(method_class)


def _suggest_nearest(name: str, choices: Iterable[str]) -> str:
    """Suggest the nearest of several names."""
    near = difflib.get_close_matches(name, choices, 1)
    return f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(sorted(choices))}"


def _parse_setting(name: str, value: Any, expected: Any) -> Any:
    """Read a value as the type of its setting.

    Args:
        name: The method and the setting, for error messages.
        value: What the user gave, a text or plain data.
        expected: The type: one of bool, int, float, str and tuple[float, ...], or such a type or
            None.

    Returns:
        The value with the type of the setting.
    """
    options = [expected]
    if isinstance(expected, types.UnionType) or typing.get_origin(expected) is typing.Union:
        options = list(typing.get_args(expected))
    is_none = value is None or (isinstance(value, str) and value.lower() == "none")
    if is_none and types.NoneType in options:
        return None
    for option in options:
        if is_none or option is types.NoneType:
            continue
        try:
            return _convert(value, option)
        except (KeyError, ValueError, TypeError):
            continue
    type_name = " or ".join(_name_type(option) for option in options)
    raise SettingError(f"{name}={value!r}: give a value of type {type_name}.")


def _convert(value: Any, expected: Any) -> Any:
    """Convert a value to a plain type; raise ValueError, KeyError or TypeError if it is not one."""
    if typing.get_origin(expected) is tuple:
        element_type = typing.get_args(expected)[0]
        elements = value.split(",") if isinstance(value, str) else value
        return tuple(_convert(element, element_type) for element in elements)
    if expected is bool:
        return BOOLEAN_WORDS[str(value).lower()]
    if expected is int:
        return int(str(value))
    if expected is float:
        return float(value)
    if expected is str and isinstance(value, str):
        return value
    raise TypeError


def _name_type(expected: Any) -> str:
    """Give the name of a type as a user reads it."""
    if expected is types.NoneType:
        return "none"
    return str(expected) if typing.get_origin(expected) else str(expected.__name__)
