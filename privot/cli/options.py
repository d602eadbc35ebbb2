"""What every verb shares: how the command line reads its options, speaks and refuses."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core
from rich.console import Console

from privot import __version__
from privot.errors import PrivotError, SettingError
from privot.progress import jsonable, round_up

if TYPE_CHECKING:
    from privot.data.spec import Spec
    from privot.measures.samples import Subject
    from privot.privacy.plan import Wall


class Stopped(PrivotError):  # noqa: N818
    """Somebody pressed Ctrl-C."""


class Verbs(typer.core.TyperGroup):
    """All verbs; what an interrupt says of itself is not lost on the way."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Stopped(
                "; ".join(["stopped", *map(str, stop.args), *getattr(stop, "__notes__", [])])
            ) from None


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """An interrupt tells where what is done is kept."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"what is done is kept in {folder}: the same command goes on there"
        ) from None


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
DEFAULT = "private-set"  # the method, where none is named
Usage: Any = typer.BadParameter.__mro__[1]  # UsageError, whether typer brings its own click or not

# One of several processes that torchrun started, and not the first: it is silent.
FOLLOWS = os.environ.get("RANK", "0") != "0" and "LOCAL_RANK" in os.environ

# Names of files come from outside: neither markup nor emoji codes in them are obeyed, and no line of ours is folded in a pipe.
out_console, err_console = (
    Console(stderr=err, markup=False, emoji=False, highlight=False, soft_wrap=True, quiet=FOLLOWS)
    for err in (False, True)
)

Data = Annotated[
    str,
    typer.Argument(
        help="A built-in name (digits, mnist, ...) or a path: IDX, .npz, .parquet, folder of class folders."
    ),
]
MethodName = Annotated[str, typer.Option("--method", help="See `privot methods`.")]
Epsilon = Annotated[float | None, typer.Option(help="Privacy budget; inf for none.")]
Delta = Annotated[float, typer.Option(help="Probability outside the guarantee; well under 1/size.")]
AllowLargeDelta = Annotated[
    bool,
    typer.Option(
        "--allow-large-delta",
        help="Accept a delta above 0.001, which permits to publish whole records.",
    ),
]
MaxTpr = Annotated[str | None, typer.Option(help="The budget as attack power, such as 0.05@0.01.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the method, key=value; may be repeated."),
]
Config = Annotated[Path | None, typer.Option(help="Settings in a TOML file; --set wins over it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Microbatch = Annotated[
    int | None, typer.Option(min=1, help="Records at a time: fewer need less memory.")
]
LedgerFile = Annotated[
    Path | None, typer.Option("--ledger", help="The ledger that counts this data set.")
]
Shape = Annotated[str | None, typer.Option(help="Declared image shape, such as 1x28x28.")]
Classes = Annotated[int | None, typer.Option(help="Declared number of classes.")]
Size = Annotated[int | None, typer.Option(min=1, help="Declared number of records.")]
ClassSizes = Annotated[
    str | None, typer.Option(help="Declared records of each class, such as 200,150,3.")
]
Spread = Annotated[
    float, typer.Option(help="Of a generator's codes: below 1 images are cleaner and less varied.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the public random stream.")]
Label = Annotated[str, typer.Option(help="Label column of a parquet file.")]
Resize = Annotated[int | None, typer.Option(help="Bring images to this many pixels a side.")]
Repair = Annotated[
    bool, typer.Option("--repair", help="Mend bad records (black, clipped) instead of refusing.")
]
Mirror = Annotated[
    bool | None,
    typer.Option(
        "--mirror/--no-mirror",
        help="Mirrored images are of the same class, or are not. Colour: yes, grey: no.",
    ),
]
PublicSize = Annotated[
    bool, typer.Option("--public-size", help="Declare the number of records public.")
]
PublicClasses = Annotated[
    bool,
    typer.Option("--public-classes", help="Declare the number of records of each class public."),
]
Dealt = Annotated[
    int | None,
    typer.Option("--owners", min=1, help="Deal the records to so many owners, in a secret order."),
]
IsPublic = Annotated[
    bool,
    typer.Option(
        "--public", help="All data named here is public, so the numbers may be published."
    ),
]
Download = Annotated[
    bool, typer.Option("--download", help="Fetch a built-in data set that is not at hand.")
]


def refuse(text: str, code: int = 2) -> NoReturn:
    """One line in red, in JSON too where that was asked for, and an exit code."""
    err_console.quiet = False  # errors that the first process cannot know of
    say(f"privot: {text}", err_console, "red")
    if "--json" in sys.argv:
        emit({"error": text})
    sys.exit(code)


def say(text: str, console: Console = out_console, style: str | None = None) -> None:
    """One line of text."""
    console.print(plain(text), style=style)


def _version(asked: bool) -> None:
    if asked:
        say(f"privot {__version__}")
        raise typer.Exit


@app.callback()
def _whole(
    version: Annotated[
        bool,
        typer.Option("--version", help="Which Privot this is.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Private synthetic data: train or condense, certify, measure, verify."""


def plain(text: Any) -> str:
    """One line without control characters, so that the name of a file can neither break nor style it."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(text))


def emit(value: Any) -> None:
    """One JSON object."""
    if FOLLOWS:
        return
    sys.stdout.write(json.dumps(jsonable(value)) + "\n")


def to_wall(epsilon: float | None, delta: float, max_tpr: str | None, method: Any) -> Wall | None:
    """The budget as it was said: an epsilon, an attack power, or none where the method's noise is fixed."""
    from privot.privacy.plan import Budget, Risk

    if epsilon is not None and max_tpr is not None:
        raise SettingError("give --epsilon or --max-tpr, not both")
    if max_tpr is not None:
        try:
            tpr, fpr = map(float, max_tpr.split("@"))
        except ValueError:
            raise SettingError(
                f"max-tpr {max_tpr!r}: write it as 0.05@0.01 (true-positive rate at false-positive rate)"
            ) from None
        return Risk(tpr, fpr, delta)
    if epsilon is not None:
        return Budget(epsilon, delta)
    return (
        Budget(math.inf, delta) if getattr(method, "noise", None) else None
    )  # none for a noise of 0: that must be said


def to_settings(config: Path | None, sets: list[str] | None) -> dict[str, Any]:
    """Settings of a method from a TOML file and ``key=value`` words."""
    import tomllib

    settings: dict[str, Any] = {}
    if config:
        try:
            settings = tomllib.loads(config.read_text())
        except (OSError, ValueError, RecursionError) as error:  # brackets by the thousand
            raise SettingError(
                f"{config}: not a readable TOML file ({type(error).__name__})"
            ) from None
    for each in sets or []:
        key, equals, value = each.partition("=")
        if not equals:
            raise SettingError(f"--set {each!r}: write it as key=value")
        settings[key.strip()] = value.strip()
    return settings


def to_shape(text: str | None) -> tuple[int, int, int] | None:
    """``1x28x28`` as numbers."""
    if text is None:
        return None
    try:
        channels, height, width = map(int, text.split("x"))
    except ValueError:
        raise SettingError(
            f"--shape {text!r}: write it as channels x height x width, such as 1x28x28"
        ) from None
    return channels, height, width


def to_sizes(text: str | None) -> tuple[int, ...] | None:
    """``200,150,3`` as numbers."""
    if text is None:
        return None
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise SettingError(
            f"--class-sizes {text!r}: write a number for each class, such as 200,150,3"
        )
    return sizes


def say_caution(text: str) -> None:
    """One line in yellow, on the error stream."""
    say(f"caution: {text}", err_console, "yellow")


def guarantee_lines(claim: dict[str, Any]) -> list[str]:
    """A certificate for people."""
    if "reason" in claim:
        return [f"none: {claim['reason']}"]
    power = ", ".join(f"{round_up(value, 3)} at {rate}" for rate, value in claim["max_tpr"].items())
    sort = f"{claim['unit']}, {claim['neighbours']} neighbours ({claim['accountant']})"
    tests = {
        "local": "test whether a given record was sent",
        "client": "test whether an owner holds given records",
    }
    attack = tests.get(claim["neighbours"], "membership attack")
    return [
        f"epsilon {round_up(claim['epsilon'])}, delta {round_up(claim['delta'])}, {sort}",
        f"no {attack} exceeds a true-positive rate of {power} (false-positive rate)",
    ]


def say_guarantee(claim: dict[str, Any]) -> None:
    """A certificate for people, printed."""
    for place, line in enumerate(guarantee_lines(claim)):
        say(f"{'' if place else 'guarantee':<10} {line}")


def declared(source: str, known: Spec | Subject | None) -> dict[str, Any]:
    """What was declared of the released data holds for a file of real data too."""
    from privot.data import catalogue

    if source in catalogue() or not known:
        return {}
    return {
        "classes": known.classes,
        "mirror": known.mirror,
        "class_names": known.class_names or (),
    }
