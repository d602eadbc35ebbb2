"""Checks that an attack can be run, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from privot.attacks.membership.candidates import AnyDataset
from privot.attacks.membership.controls import ControlResult, run_controls
from privot.attacks.membership.registry import ATTACKS
from privot.errors import DataError, PrivotError, SettingError
from privot.measures.samples import check_class_names, refuse_overlap
from privot.release import Release


def check_attack(
    name: str, release: Release | None, population: AnyDataset | None = None
) -> ControlResult:
    """Check before any work that an attack can be run, and run its controls.

    Args:
        name: Name of the attack.
        release: The release; None: a method is attacked through its shadows.
        population: Records that no model was trained on, if given.

    Returns:
        Result of the controls.

    Raises:
        SettingError: If the attack does not exist or does not fit.
        PrivotError: If the attack does not pass its controls.
    """
    if name not in ATTACKS:
        raise SettingError(f"no attack {name!r}. Choose one of {', '.join(ATTACKS)}.")
    needs = ATTACKS[name].needs
    if release is None and "shadows" not in needs:
        raise SettingError(f"{name} attacks a release. Synthesize one first.")
    if release is None and "population" in needs:
        raise SettingError(
            f"{name} needs records that no model was trained on, but without a release every "
            "candidate was trained on. Attack a release, or use lira."
        )
    if release and ("generator" in needs or "weights" in needs) and release.artifact.kind == "set":
        raise SettingError(
            f"{name} needs a generator, and this release is a set. Try nearest-pixels, tracing or "
            "loss."
        )
    if population is not None and "shadows" in needs:
        raise SettingError(
            f"population: {name} takes it from the non-members, which all shadows have observed. "
            "Leave it out."
        )
    if population is not None and "population" not in needs:
        raise SettingError(f"population: {name} needs none. Leave it out.")
    control = run_controls(name)
    if not control.passed:
        raise PrivotError(f"the attack does not pass its controls here: {control.summary}")
    return control


def check_options(name: str, num_candidates: int | None, references: Sequence[Release]) -> None:
    """Raise a SettingError if an option does not fit the attack.

    Args:
        name: Name of the attack.
        num_candidates: Candidates of each side; None: all.
        references: Releases for calibration.
    """
    needs = ATTACKS[name].needs
    if num_candidates is not None and "shadows" in needs:
        raise SettingError(f"candidates: {name} uses those of its shadows. Leave it out.")
    if references and {"shadows", "model", "population"} & {*needs}:
        raise SettingError(
            f"references: {name} needs none. They are for attacks that use released images only."
        )


def check_reference(reference: Release, release: Release) -> None:
    """Raise a SettingError if a reference does not fit the attacked release."""
    spec = (release.spec.shape, release.spec.num_classes)
    reference_spec = (reference.spec.shape, reference.spec.num_classes)
    if reference_spec != spec or reference.digest == release.digest:
        raise SettingError(
            "a reference must be another release than the attacked one, of images of the same "
            "shape and number of classes"
        )


def check_datasets(datasets: dict[str, AnyDataset], release: Release) -> None:
    """Raise a SettingError if records do not fit the release, or a record is on two sides.

    A record on two sides would hide what leaks.
    """
    for name, dataset in datasets.items():
        spec = dataset.spec
        if (spec.shape, spec.num_classes) != (release.spec.shape, release.spec.num_classes):
            given, expected = (
                f"{'x'.join(map(str, each.shape))} with {each.num_classes} classes"
                for each in (spec, release.spec)
            )
            raise SettingError(f"{name}: images of {given}, but the release has {expected}")
        check_class_names(name, spec.class_names, "the release", release.spec.class_names)
    for (first_name, first), (second_name, second) in combinations(datasets.items(), 2):
        try:
            refuse_overlap(second, first, first_name)
        except DataError:
            raise SettingError(
                f"{first_name} and {second_name} share records. Put each record on one side only."
            ) from None
