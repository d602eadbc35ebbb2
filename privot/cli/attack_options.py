"""Groups of options of membership attacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from privot.cli.options import ConfigFile, NumClients, PublicClassSizes, SettingOverrides


@dataclass(frozen=True)
class CandidateOptions:
    """The records that an attack distinguishes."""

    member_data: Annotated[
        str, typer.Option("--members", help="Records that the release was made from.")
    ]
    nonmember_data: Annotated[
        str,
        typer.Option(
            "--nonmembers",
            help="Records that it was not made from; of a built-in dataset its test split.",
        ),
    ]
    population_data: Annotated[
        str | None,
        typer.Option(
            "--population",
            help="Records that no model was trained on; by default a fifth of the non-members.",
        ),
    ] = None
    reference_releases: Annotated[
        list[str] | None,
        typer.Option(
            "--reference",
            help="A release of other records, to calibrate the attack; may be repeated.",
        ),
    ] = None
    num_candidates: Annotated[
        int | None,
        typer.Option(
            "--candidates", min=1, help="Number of random records of each side; by default all."
        ),
    ] = None


@dataclass(frozen=True)
class ShadowOptions:
    """The shadows that some attacks compare with."""

    num_shadows: Annotated[
        int | None,
        typer.Option("--shadows", min=2, help="Number of shadows, even; 64 if not given."),
    ] = None
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the shadows, TARGET.shadows if not given; existing work is resumed."
        ),
    ] = None
    num_workers: Annotated[
        int,
        typer.Option("--workers", min=1, help="Number of processes that prepare shadows."),
    ] = 1
    use_ray: Annotated[
        bool,
        typer.Option("--ray", help="Prepare shadows on a Ray cluster (RAY_ADDRESS, or this host)."),
    ] = False

    @property
    def is_given(self) -> bool:
        """Whether any of the options is given."""
        return bool(self.num_shadows or self.folder or self.use_ray or self.num_workers > 1)


@dataclass(frozen=True)
class AttackedMethodOptions:
    """How shadows of a method are made; a release states this itself."""

    epsilon: Annotated[
        float | None, typer.Option(help="Epsilon of each shadow, if a method is attacked.")
    ] = None
    overrides: SettingOverrides = None
    config: ConfigFile = None
    public_class_sizes: PublicClassSizes = False
    num_clients: NumClients = None

    @property
    def is_given(self) -> bool:
        """Whether any of the options is given."""
        return self.epsilon is not None or bool(
            self.overrides or self.config or self.public_class_sizes or self.num_clients
        )
