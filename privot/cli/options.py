"""Options that several commands share, as types and as groups."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privot.cli.parsing import parse_budget, parse_settings, parse_shape

if TYPE_CHECKING:
    from privot.privacy.plan import PrivacyTarget
    from privot.runtime import Runtime

DEFAULT_METHOD = "private-set"
MAX_SEED = 2**32 - 1

Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A built-in name (digits, mnist, ...) or a path: IDX, .npz, .parquet, or a folder "
        "with a folder for each class.",
    ),
]
ReleaseFolder = Annotated[Path, typer.Argument(help="Folder of a release.")]
MethodName = Annotated[
    str, typer.Option("--method", help="Name of the method; `privot methods` lists all.")
]
Epsilon = Annotated[
    float | None, typer.Option(help="Epsilon of the privacy budget; inf for no guarantee.")
]
Delta = Annotated[
    float, typer.Option(help="Delta of the privacy budget; far below 1 / number of records.")
]
AllowLargeDelta = Annotated[
    bool,
    typer.Option(
        "--allow-large-delta",
        help="Accept a delta above 0.001, which allows whole records to be published.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the public random stream.")]
LedgerFile = Annotated[
    Path | None, typer.Option("--ledger", help="The ledger file that counts this dataset.")
]
Shape = Annotated[
    str | None,
    typer.Option(help="Declared image shape: channels x height x width, such as 1x28x28."),
]
NumClasses = Annotated[int | None, typer.Option("--classes", help="Declared number of classes.")]
NumClients = Annotated[
    int | None,
    typer.Option(
        "--clients", min=1, help="Partition the records among this many clients, at random."
    ),
]
LabelColumn = Annotated[str, typer.Option("--label", help="Label column of a .parquet file.")]
Resize = Annotated[
    int | None, typer.Option(help="Resize images to this many pixels in height and width.")
]
Repair = Annotated[
    bool, typer.Option("--repair", help="Repair bad images (black, clipped); else refuse them.")
]
Download = Annotated[
    bool, typer.Option("--download", help="Download a built-in dataset that is missing.")
]
PublicClassSizes = Annotated[
    bool, typer.Option("--public-classes", help="Declare the size of each class as public.")
]
IsPublic = Annotated[
    bool,
    typer.Option("--public", help="All named data is public, so results may be published."),
]
Confidence = Annotated[float, typer.Option(help="Confidence level of every bound.")]


SettingOverrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the method as key=value; may be repeated."),
]
ConfigFile = Annotated[
    Path | None, typer.Option(help="A TOML file with settings; --set wins over it.")
]


@dataclass(frozen=True)
class SettingsOptions:
    """Settings of a method."""

    overrides: SettingOverrides = None
    config: ConfigFile = None

    def parse(self) -> dict[str, Any]:
        """Parse the settings."""
        return parse_settings(self.config, self.overrides)


@dataclass(frozen=True)
class EpsilonOptions:
    """A privacy budget."""

    epsilon: Epsilon = None
    delta: Delta = 1e-5
    allow_large_delta: AllowLargeDelta = False

    def parse(self, method: Any) -> PrivacyTarget | None:
        """Parse the budget; None if it is missing."""
        return parse_budget(self.epsilon, self.delta, None, method)


@dataclass(frozen=True)
class BudgetOptions:
    """A privacy budget, or a limit of the attack power instead."""

    epsilon: Epsilon = None
    delta: Delta = 1e-5
    max_tpr: Annotated[
        str | None,
        typer.Option(
            help="The budget as attack power: true-positive rate @ false-positive rate, such as "
            "0.05@0.01."
        ),
    ] = None
    allow_large_delta: AllowLargeDelta = False

    def parse(self, method: Any) -> PrivacyTarget | None:
        """Parse the budget; None if it is missing."""
        return parse_budget(self.epsilon, self.delta, self.max_tpr, method)


@dataclass(frozen=True)
class ComputeOptions:
    """Where to compute, and how many records at a time."""

    device: Device = "auto"
    microbatch: Annotated[
        int | None,
        typer.Option(min=1, help="Records per chunk of computation; fewer need less memory."),
    ] = None

    def build_runtime(self) -> Runtime:
        """Build the runtime."""
        from privot.runtime import Runtime

        return Runtime(self.device, self.microbatch)


@dataclass(frozen=True)
class ReadOptions:
    """How to read a dataset."""

    label_column: LabelColumn = "label"
    resize: Resize = None
    download: Download = False

    def to_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for `load_dataset`."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class DatasetOptions:
    """How to read a dataset whose shape and classes may be declared."""

    shape: Shape = None
    num_classes: NumClasses = None
    label_column: LabelColumn = "label"
    resize: Resize = None
    repair: Repair = False
    download: Download = False

    def to_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for `load_dataset`."""
        return dataclasses.asdict(self) | {"shape": parse_shape(self.shape)}


@dataclass(frozen=True)
class PublicFactOptions:
    """Which facts about a dataset are declared public."""

    public_size: Annotated[
        bool, typer.Option("--public-size", help="Declare the number of records as public.")
    ] = False
    public_class_sizes: PublicClassSizes = False
    flip_invariant: Annotated[
        bool | None,
        typer.Option(
            "--flip-invariant/--no-flip-invariant",
            help="A mirrored image has the same class; by default true for colour images only.",
        ),
    ] = None
    num_clients: NumClients = None

    def to_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for `load_dataset`."""
        return {
            "public_size": self.public_size,
            "public_classes": self.public_class_sizes,
            "flip_invariant": self.flip_invariant,
            "num_clients": self.num_clients,
        }


@dataclass(frozen=True)
class AttackDataOptions:
    """Facts about data that an attack or an audit reads."""

    is_public: IsPublic = False
    public_class_sizes: PublicClassSizes = False
    num_clients: NumClients = None
