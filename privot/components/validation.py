"""Checks of settings. Each error names the setting, its value and the allowed range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from privot.errors import SettingError

MAX_COUNT = 100_000  # largest value of settings that count something, such as steps or bases


def require_range(
    settings: Any,
    *setting_names: str,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raise an error unless each setting lies in the given range. Missing settings and None pass.

    Args:
        settings: A method with a `name` and the settings as attributes.
        setting_names: Names of the settings to check.
        minimum: Smallest allowed value.
        maximum: Largest allowed value.
        above: The value must be larger than this.
        below: The value must be smaller than this; infinity means that it must be finite.

    Raises:
        SettingError: A setting is out of range or not a number.

    >>> from types import SimpleNamespace
    >>> require_range(SimpleNamespace(name="gs-wgan", num_critics=0), "num_critics", minimum=1)
    Traceback (most recent call last):
    privot.errors.SettingError: gs-wgan.num_critics=0 is out of range. Choose a value of at least 1.
    """
    for setting_name in setting_names:
        value = getattr(settings, setting_name, None)
        if value is None:
            continue
        if not (
            (minimum is None or value >= minimum)
            and (maximum is None or value <= maximum)
            and (above is None or value > above)
            and (below is None or value < below)
        ):
            raise SettingError(
                f"{settings.name}.{setting_name}={value} is out of range. "
                f"Choose a value {describe_range(minimum, maximum, above, below)}."
            )


def describe_range(
    minimum: float | None, maximum: float | None, above: float | None, below: float | None
) -> str:
    """Describe a range in words.

    Args:
        minimum: Smallest allowed value, or None.
        maximum: Largest allowed value, or None.
        above: Excluded lower limit, or None.
        below: Excluded upper limit, or None.

    Returns:
        Words that follow "a value".

    >>> describe_range(1, 100_000, None, None), describe_range(None, None, 0, math.inf)
    ('of at least 1 and at most 100,000', 'above 0 and below infinity')
    """
    conditions = []
    if minimum is not None:
        conditions.append(f"of at least {minimum:,}")
    if above is not None:
        conditions.append(f"above {above:,}")
    if maximum is not None:
        conditions.append(f"at most {maximum:,}")
    if below is not None:
        conditions.append("below infinity" if below == math.inf else f"below {below:,}")
    return " and ".join(conditions)


def require_positive(settings: Any, *setting_names: str) -> None:
    """Raise an error unless each of these whole-number settings is at least 1. None passes."""
    require_range(settings, *setting_names, minimum=1)


def require_count(settings: Any, *setting_names: str) -> None:
    """Raise an error unless each of these whole-number settings is 1 to 100,000. None passes."""
    require_range(settings, *setting_names, minimum=1, maximum=MAX_COUNT)


def require_choice(settings: Any, setting_name: str, choices: Sequence[str]) -> None:
    """Raise an error unless a setting has one of the given values.

    Args:
        settings: A method with a `name` and the setting as an attribute.
        setting_name: Name of the setting to check.
        choices: The allowed values.

    Raises:
        SettingError: The value is none of the choices.

    >>> from types import SimpleNamespace
    >>> settings = SimpleNamespace(name="merf", generator="vae")
    >>> require_choice(settings, "generator", ("dense", "conv"))
    Traceback (most recent call last):
    privot.errors.SettingError: merf.generator='vae' is unknown. Choose dense or conv.
    """
    value = getattr(settings, setting_name)
    if value not in choices:
        *others, last = choices
        listed = f"{', '.join(others)} or {last}" if others else last
        raise SettingError(f"{settings.name}.{setting_name}={value!r} is unknown. Choose {listed}.")


def require_noise_multiplier(settings: Any) -> None:
    """Raise an error unless `noise_multiplier` is None or at least 0 and below 1e30."""
    require_range(settings, "noise_multiplier", minimum=0, below=1e30)
