"""Parses option values that are more than a number or a path."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privot.errors import SettingError

if TYPE_CHECKING:
    from privot.data.spec import Spec
    from privot.measures.samples import Samples
    from privot.privacy.plan import PrivacyTarget


def parse_budget(
    epsilon: float | None, delta: float, max_tpr: str | None, method: Any
) -> PrivacyTarget | None:
    """Parse a privacy budget.

    Args:
        epsilon: The value of --epsilon.
        delta: The value of --delta.
        max_tpr: The value of --max-tpr, such as "0.05@0.01".
        method: The method; its own noise needs no budget.

    Returns:
        The budget, or None if it is missing: then the method must not need one.

    Raises:
        SettingError: Two budgets are given, or --max-tpr is malformed.
    """
    from privot.privacy.plan import AttackPowerTarget, Budget

    if epsilon is not None and max_tpr is not None:
        raise SettingError("Give --epsilon or --max-tpr, not both.")
    if max_tpr is not None:
        try:
            tpr, fpr = map(float, max_tpr.split("@"))
        except ValueError:
            raise SettingError(
                f"--max-tpr {max_tpr!r} is invalid. Write it as 0.05@0.01: the true-positive rate, "
                "then the false-positive rate."
            ) from None
        return AttackPowerTarget(tpr, fpr, delta)
    if epsilon is not None:
        return Budget(epsilon, delta)
    # A noise multiplier of 0 does not count: the user must state that there is no guarantee.
    return Budget(math.inf, delta) if method is not None and method.noise_multiplier else None


def parse_settings(config: Path | None, overrides: list[str] | None) -> dict[str, Any]:
    """Parse the settings of a method.

    Args:
        config: A TOML file with settings.
        overrides: ``key=value`` words, which win over the file.

    Returns:
        The settings; values from words are texts.

    Raises:
        SettingError: The file cannot be read, or a word is malformed.
    """
    settings: dict[str, Any] = {}
    if config:
        try:
            settings = tomllib.loads(config.read_text())
        except (OSError, ValueError, RecursionError) as error:  # deeply nested brackets
            raise SettingError(
                f"{config} is no readable TOML file ({type(error).__name__})."
            ) from None
    for word in overrides or []:
        key, equals, value = word.partition("=")
        if not equals:
            raise SettingError(f"--set {word!r} is invalid. Write it as key=value.")
        settings[key.strip()] = value.strip()
    return settings


def parse_shape(text: str | None) -> tuple[int, int, int] | None:
    """Parse an image shape.

    >>> parse_shape("1x28x28")
    (1, 28, 28)
    """
    if text is None:
        return None
    try:
        channels, height, width = map(int, text.split("x"))
    except ValueError:
        raise SettingError(
            f"--shape {text!r} is invalid. Write it as channels x height x width, such as 1x28x28."
        ) from None
    return channels, height, width


def parse_class_sizes(text: str | None) -> tuple[int, ...] | None:
    """Parse the number of records of each class.

    >>> parse_class_sizes("200,150,3")
    (200, 150, 3)
    """
    if text is None:
        return None
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise SettingError(
            f"--class-sizes {text!r} is invalid. Write a number for each class, such as 200,150,3."
        )
    return sizes


def parse_class_names(text: str | None) -> tuple[str, ...] | None:
    """Parse the names of classes.

    >>> parse_class_names("cat, dog")
    ('cat', 'dog')
    """
    if text is None:
        return None
    names = split_words(text)
    if len(set(names)) < len(names) or "" in names:
        raise SettingError("--class-names needs a different name for each class, with commas.")
    return names


def parse_partition(text: str) -> tuple[int, int]:
    """Parse the index of a partition and the number of partitions.

    >>> parse_partition("0/5")
    (0, 5)
    """
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise SettingError(
            f"--partition {text!r} is invalid. Write it as I/N with I from 0, such as 0/5."
        )
    return int(index), int(count)


def split_words(text: str) -> tuple[str, ...]:
    """Split a list with commas into words without white space around them."""
    return tuple(word.strip() for word in text.split(","))


def reuse_declarations(source: str, spec: Spec | Samples | None) -> dict[str, Any]:
    """Apply the declarations about released data to a file of real data.

    Args:
        source: Name or path of the real data; a built-in dataset has its own declarations.
        spec: What was declared about the released data.

    Returns:
        Keyword arguments for `load_dataset`.
    """
    from privot.data import load_catalog

    if source in load_catalog() or not spec:
        return {}
    return {
        "num_classes": spec.num_classes,
        "flip_invariant": spec.flip_invariant,
        "class_names": spec.class_names or (),
    }
