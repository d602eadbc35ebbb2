"""What a method declares: facts, settings and plan."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import typing
from collections.abc import Iterator
from typing import Any
from unittest import mock

from privot.data.dataset import Sensitive
from privot.errors import PrivotError, SettingError
from privot.methods import build_method
from privot.privacy.plan import Budget, Plan
from privot.synthesis.preflight import resolve_plan
from privot.testing.checked_method import CheckedMethod, require
from privot.testing.outside_view import watch_system_calls
from privot.testing.tiny_data import (
    choose_spec,
    has_no_mechanism,
    is_local,
)

HEADINGS = ("Released", "Bound", "Cost", "Departs", "Notation")
_TEXT_FACTS = ("name", "title", "trusted_party", "guarantee_summary")


def check_declaration(case: CheckedMethod) -> None:
    """The class is frozen, keyword-only, and says what it is, whom to trust and whom to cite."""
    method_class = case.method_class
    require(dataclasses.is_dataclass(method_class), "the class is no dataclass")
    parameters: Any = method_class.__dataclass_params__  # type: ignore[attr-defined]
    require(parameters.frozen, "the dataclass is not frozen")
    fields = dataclasses.fields(method_class)  # type: ignore[arg-type]
    require(all(field.kw_only for field in fields), "settings must be keyword-only")
    for fact in _TEXT_FACTS:
        text = getattr(method_class, fact, None)
        is_line = isinstance(text, str) and text and "\n" not in text
        require(is_line, f"{fact} must be one line of text")
        require(fact not in {field.name for field in fields}, f"{fact} must be no setting")
    for function, names in (("plan", ["self", "spec"]), ("fit", ["self", "gate", "streams"])):
        given = list(inspect.signature(getattr(method_class, function)).parameters)
        require(given[: len(names)] == names, f"{function} has other parameters: {given}")
    docstring = inspect.getmodule(method_class).__doc__ or ""
    parts = re.split(r"^\*\*(\w+)\*\*", docstring, flags=re.MULTILINE)[1:]
    require(tuple(parts[::2]) == HEADINGS, f"the module docstring needs {', '.join(HEADINGS)}")
    require(all(text.strip() for text in parts[1::2]), "a heading of the docstring has no text")
    _check_citation(method_class.citation)


def _check_citation(citation: str) -> None:
    """Require BibTeX entries with title, author and year."""
    for entry in re.split(r"\n(?=@)", citation.strip()):
        is_entry = re.match(r"@\w+\{[^\s,{}]+,\n", entry) and entry.endswith("}")
        require(is_entry, "the citation is no BibTeX")
        require(entry.count("{") == entry.count("}"), "the citation has an open brace")
        for field in ("title", "author", "year"):
            line = rf"^\s*{field}\s*=\s*\{{[^=]+\}},?$"
            require(re.search(line, entry, re.MULTILINE), f"the citation has no {field}")


def check_settings(case: CheckedMethod) -> None:
    """Settings survive a manifest and a command line, and unusable values are SettingErrors."""
    for method in (case.method_class(), case.make()):
        settings = dataclasses.asdict(method)  # type: ignore[call-overload]
        words = {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for name, value in settings.items()
        }
        for source in (json.loads(json.dumps(settings)), words):
            is_same = build_method(case.method_class, source) == method
            require(is_same, "settings do not survive as text")
    spec = choose_spec(case.make())
    for name, value, is_unusable in _list_bad_values(case):
        try:
            method = case.make(**{name: value})
            method.plan(spec)
        except PrivotError:
            continue
        except Exception as error:
            problem = f"{name}={value} raises {type(error).__name__}, not SettingError: {error}"
            raise AssertionError(problem) from error
        require(not is_unusable, f"{name}={value} is accepted")


def _list_bad_values(case: CheckedMethod) -> Iterator[tuple[str, Any, bool]]:
    """List values out of range for each numeric setting: (name, value, whether it must fail)."""
    hints = typing.get_type_hints(case.method_class)
    for field in dataclasses.fields(case.method_class):  # type: ignore[arg-type]
        hint = hints[field.name]
        if hint in (int, int | None):
            yield field.name, -1, True
            yield field.name, 0, False
        elif hint in (float, float | None):
            yield field.name, math.nan, True
            yield field.name, -1.0, True
            yield field.name, math.inf, False
            yield field.name, 0.0, False


def check_plan(case: CheckedMethod) -> None:
    """Planning reads nothing, gives the same plan each time, and keeps to the budget."""
    method = case.make()
    spec = choose_spec(method)
    first = method.plan(spec)
    method.forecast(spec, first)  # imports of the first use

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("planning touched a record or a file")

    with (
        mock.patch.object(Sensitive, "_read_records", refuse),
        mock.patch.object(Sensitive, "_count_records", refuse),
        mock.patch.object(Sensitive, "_shard_record_indices", refuse),
        mock.patch("builtins.open", refuse),
        mock.patch("io.open", refuse),
        watch_system_calls() as system_calls,
    ):
        plan = method.plan(spec)
        forecast = method.forecast(spec, plan)
    require(not system_calls, f"planning opened files or connections: {system_calls}")
    require(plan == first, "two plans of one method differ")
    require(Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan, "no JSON of the plan")
    json.dumps(forecast)
    method = case.make_budgeted()
    if has_no_mechanism(method):
        try:
            resolve_plan(spec, method, Budget(2.0))
        except SettingError:
            return
        raise AssertionError("a method without noise accepts a budget")
    if not is_local(method):
        plan, budget = resolve_plan(choose_spec(method), method, Budget(2.0))
        epsilon = plan.cost().epsilon(budget.delta)
        require(1.98 < epsilon <= 2.0, f"a budget of 2 gives a plan of {epsilon}")
