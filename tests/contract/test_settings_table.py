"""`docs/settings.md` lists every setting: one name, one meaning, one type in all methods."""

import collections
import dataclasses
import types
import typing
from pathlib import Path

from privot.methods import list_methods

TABLE = Path(__file__).parents[2] / "docs" / "settings.md"


def read_table():
    """(name, meaning, methods) of every row."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    return [(row[0].strip("`"), row[1], row[2].split(", ")) for row in rows]


def test_every_setting_is_listed_once_with_its_methods():
    methods = collections.defaultdict(list)
    for name, method_class in sorted(list_methods().items()):
        for field in dataclasses.fields(method_class):
            methods[field.name].append(name)
    rows = read_table()
    assert [name for name, _, _ in rows] == sorted(methods)
    assert {name: users for name, _, users in rows} == methods
    meanings = [meaning for _, meaning, _ in rows]
    assert all(meaning.endswith(".") for meaning in meanings)
    assert len(set(meanings)) == len(meanings), "two settings have one meaning"


def test_a_setting_has_one_type_in_all_methods():
    """A setting may be None in one method and not in another."""
    kinds = collections.defaultdict(set)
    for method_class in list_methods().values():
        hints = typing.get_type_hints(method_class)
        for field in dataclasses.fields(method_class):
            hint = hints[field.name]
            is_union = isinstance(hint, types.UnionType)
            kinds[field.name] |= set(typing.get_args(hint)) if is_union else {hint}
    assert {name for name, kind in kinds.items() if len(kind - {types.NoneType}) > 1} == set()
