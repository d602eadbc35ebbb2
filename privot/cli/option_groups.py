"""Lets commands share groups of options: a frozen dataclass whose fields are options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, get_type_hints


def expand_option_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a command from a function with groups of options.

    Every parameter whose type is a dataclass is replaced by one option for each of its fields.
    Typer reads the signature of the returned function, and the function builds the dataclasses
    from the values of their fields.

    Args:
        function: The function of a command.

    Returns:
        A function with one keyword-only parameter for each option.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Size:
    ...     height: int
    ...     width: int = 3
    >>> @expand_option_groups
    ... def area(name: str, size: Size) -> int:
    ...     return size.height * size.width
    >>> list(inspect.signature(area).parameters), area(name="a", height=2, width=4)
    (['name', 'height', 'width'], 8)
    """
    type_hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if dataclasses.is_dataclass(type_hints[name]):
            groups[name] = type_hints[name]
            parameters += _list_parameters(groups[name])
        else:
            parameters.append(
                parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=type_hints[name])
            )

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        for name, group in groups.items():
            field_names = [field.name for field in dataclasses.fields(group)]
            values[name] = group(**{field: values.pop(field) for field in field_names})
        return function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _list_parameters(group: Any) -> list[Parameter]:
    """List the fields of a dataclass as parameters of a function."""
    type_hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=type_hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]
