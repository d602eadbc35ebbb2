"""One file, one method. A method is found by listing this folder: its module holds one frozen dataclass named in ``METHOD``."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from functools import cache
from typing import Any, ClassVar, Protocol, runtime_checkable

from privot import baselines
from privot.data.spec import Spec
from privot.errors import SettingError
from privot.privacy.gate import Gate
from privot.privacy.plan import Plan
from privot.release.artifact import Product
from privot.runtime import Progress, Streams


class Method(Protocol):
    """The contract. Fields are settings; ``plan`` reads nothing; ``fit`` sees the data through the gate alone."""

    name: ClassVar[str]
    title: ClassVar[str]
    trusts: ClassVar[str]  # whom the data's subjects must trust
    promise: ClassVar[str]
    citation: ClassVar[str]  # BibTeX

    def plan(self, spec: Spec) -> Plan:
        """The asks in their proportions; `Plan.calibrated` scales their noise to a budget."""

    def forecast(self, spec: Spec, plan: Plan) -> dict[str, Any]:
        """What can be said of quality and work before anything is spent."""

    def fit(self, gate: Gate, streams: Streams, progress: Progress) -> Product: ...


@runtime_checkable
class Resizing(Method, Protocol):
    """A method that can make a set of another size of what its release kept; `again` is all that it takes, and it asks no gate."""

    @property
    def per_class(self) -> int: ...

    def again(self, made: Product, spec: Spec, streams: Streams, progress: Progress) -> Product:
        """A set of ``per_class`` images of each class from ``made.kept``."""


@cache
def methods() -> dict[str, type[Method]]:
    """Every method by name.

    >>> "merf" in methods()
    True
    """
    names = [
        f"{package.__name__}.{module.name}"
        for package in (importlib.import_module(__name__), baselines)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    modules = [importlib.import_module(name) for name in names]
    found = [module.METHOD for module in modules if hasattr(module, "METHOD")]
    return {method.name: method for method in sorted(found, key=lambda method: method.name)}


def make(name: str, settings: dict[str, Any] | None = None) -> Method:
    """A method from its name and settings; strings are read as the field's type, unknown names get the nearest one suggested.

    >>> make("merf", {"features": "500"}).features
    500
    """
    kind = methods().get(name)
    if kind is None:
        raise SettingError(f"no method {name!r}{_nearest(name, methods())}")
    fields = {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {}
    for key, value in (settings or {}).items():
        if key not in fields:
            raise SettingError(f"{name} has no setting {key!r}{_nearest(key, fields)}")
        values[key] = _typed(f"{name}.{key}", value, str(fields[key].type))
    return kind(**values)


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(known))}"


def _typed(name: str, value: Any, kind: str) -> Any:
    """Read ``value`` as one of the plain types that settings have."""
    try:
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            if "None" in kind:
                return None
        elif "tuple[float" in kind:
            return tuple(
                float(each) for each in (value.split(",") if isinstance(value, str) else value)
            )
        elif "bool" in kind:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        elif "int" in kind and "float" not in kind:
            return int(str(value))
        elif "float" in kind:
            return float(value)
        elif isinstance(value, str):
            return value
    except (KeyError, ValueError, TypeError):
        pass
    raise SettingError(f"{name}={value!r}: {kind} is needed")
