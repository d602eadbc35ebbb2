"""The command line: one verb a job, ``--json`` on every one, errors of one line with exit code 2."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from privot.errors import PrivotError, SettingError
from privot.show import jsonable, progress_bar, seconds

if TYPE_CHECKING:
    from privot.privacy.plan import Allowance

app = typer.Typer(
    help="Private synthetic data: train or condense, certify, measure, verify.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Usage: Any = typer.BadParameter.__mro__[1]  # UsageError, whether typer brings its own click or not
# Names of files come from outside: neither markup nor emoji codes in them are obeyed, and no line of ours is folded in a pipe.
out_console, err_console = (Console(stderr=err, markup=False, emoji=False, highlight=False, soft_wrap=True) for err in (False, True))

Data = Annotated[str, typer.Argument(help="A built-in name (digits, mnist, ...) or a path: IDX, .npz, .parquet, folder of class folders.")]
MethodName = Annotated[str, typer.Option("--method", help="See `privot methods`.")]
Epsilon = Annotated[float | None, typer.Option(help="Privacy budget; inf for none.")]
Delta = Annotated[float, typer.Option(help="Probability outside the guarantee; well under 1/size.")]
MaxTpr = Annotated[str | None, typer.Option(help="The budget as attack power, such as 0.05@0.01.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="A setting of the method, key=value; may be repeated.")]
Config = Annotated[Path | None, typer.Option(help="Settings in a TOML file; --set wins over it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
LedgerFile = Annotated[Path | None, typer.Option("--ledger", help="The ledger that counts this data set.")]
Shape = Annotated[str | None, typer.Option(help="Declared image shape, such as 1x28x28.")]
Classes = Annotated[int | None, typer.Option(help="Declared number of classes.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the public random stream.")]
Label = Annotated[str, typer.Option(help="Label column of a parquet file.")]
Resize = Annotated[int | None, typer.Option(help="Bring images to this many pixels a side.")]
Repair = Annotated[bool, typer.Option("--repair", help="Mend bad records (black, clipped) instead of refusing.")]
PublicSize = Annotated[bool, typer.Option("--public-size", help="Declare the number of records public.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch a built-in data set that is not at hand.")]


def main() -> None:
    """Run the command line; what a user can mend ends in one line and exit code 2."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # Python's warnings are for developers
    try:
        code = app(standalone_mode=False, prog_name="privot")
    except PrivotError as error:
        _refuse(str(error))
    except Usage as error:
        _refuse(f"{' '.join(error.format_message().split())} (see {error.ctx.command_path if error.ctx else 'privot'} --help)")
    except OSError as error:
        _refuse(f"{error.filename or 'a file'}: {error.strerror or type(error).__name__}; check the path, its rights and the free space")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        _refuse("not enough memory for these settings: ask for fewer samples or a smaller model")
    if code:
        _say("privot: stopped; what was asked stays charged, and --resume goes on from here", err_console)
        sys.exit(code)


def _refuse(text: str) -> NoReturn:
    _say(f"privot: {text}", err_console, "red")
    if "--json" in sys.argv:
        _emit({"error": text})
    sys.exit(2)


def _say(text: str, console: Console = out_console, style: str | None = None) -> None:
    console.print(_plain(text), style=style)


def _plain(text: Any) -> str:
    """One line without control characters, so that the name of a file can neither break nor style it."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in str(text))


def _emit(value: Any) -> None:
    sys.stdout.write(json.dumps(jsonable(value)) + "\n")


def _wall(epsilon: float | None, delta: float, max_tpr: str | None, method: Any) -> Allowance | None:
    from privot.privacy.plan import Budget, Risk

    if epsilon is not None and max_tpr is not None:
        raise SettingError("give --epsilon or --max-tpr, not both")
    if max_tpr is not None:
        return Risk.parse(max_tpr, delta)
    if epsilon is not None:
        return Budget(epsilon, delta)
    return Budget(math.inf, delta) if getattr(method, "noise", None) is not None else None


def _settings(config: Path | None, sets: list[str] | None) -> dict[str, Any]:
    import tomllib

    settings: dict[str, Any] = {}
    if config:
        try:
            settings = tomllib.loads(config.read_text())
        except (OSError, ValueError) as error:
            raise SettingError(f"{config}: not a readable TOML file ({type(error).__name__})") from None
    for each in sets or []:
        key, equals, value = each.partition("=")
        if not equals:
            raise SettingError(f"--set {each!r}: write it as key=value")
        settings[key.strip()] = value.strip()
    return settings


def _shape(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    try:
        channels, height, width = map(int, text.split("x"))
    except ValueError:
        raise SettingError(f"--shape {text!r}: write it as channels x height x width, such as 1x28x28") from None
    return channels, height, width


@app.command()
def methods(as_json: Json = False) -> None:
    """What there is, whom it trusts, what it promises."""
    from privot.methods import methods as found

    rows = [{"name": name, "title": kind.title, "trusts": kind.trusts, "promise": kind.promise} for name, kind in found().items()]
    if as_json:
        return _emit(rows)
    table = Table("method", "what it is", "trusts", "promises")
    for row in rows:
        table.add_row(*row.values())
    out_console.print(table, soft_wrap=False)


@app.command()
def plan(
    data: Data, method: MethodName = "merf", epsilon: Epsilon = None, delta: Delta = 1e-5, max_tpr: MaxTpr = None,
    sets: Sets = None, config: Config = None, device: Device = "auto", shape: Shape = None, classes: Classes = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Preflight: plan, events, epsilon, predicted quality and time. Reads no record, spends nothing."""
    from privot.data import describe
    from privot.methods import make
    from privot.synthesis import preflight

    maker = make(method, _settings(config, sets))
    spec = describe(data, shape=_shape(shape), classes=classes)
    facts = preflight(spec, maker, _wall(epsilon, delta, max_tpr, maker), device)
    if as_json:
        return _emit(facts)
    table = Table(show_header=False)
    table.add_row("data", f"{_plain(data)}: {spec.classes} classes, {'x'.join(map(str, spec.shape))}, size {spec.size or 'not public'}")
    for stage in facts["plan"]["stages"]:
        table.add_row(f"stage {stage['name']}", f"{stage['verb']}, {stage['steps']} step(s), noise {stage['noise']:.4g}")
    table.add_row("guarantee", "\n".join(_guarantee_lines(facts["guarantee"])))
    for key, value in facts["forecast"].items():
        if value is not None:
            table.add_row(key.replace("_", " "), f"{value:.3g}" if isinstance(value, (int, float)) else str(value))
    out_console.print(table, soft_wrap=False)
    for caution in facts["cautions"]:
        _caution(caution)


def _caution(text: str) -> None:
    _say(f"caution: {text}", err_console, "yellow")


def _guarantee_lines(claim: dict[str, Any]) -> list[str]:
    if "reason" in claim:
        return [f"none: {claim['reason']}"]
    power = ", ".join(f"{value:.3g} at {rate}" for rate, value in claim["max_tpr"].items())
    sort = f"{claim['unit']}, {claim['neighbours']} neighbours ({claim['accountant']})"
    return [
        f"epsilon {claim['epsilon']:.4g}, delta {claim['delta']:g}, {sort}",
        f"no membership attack exceeds a true-positive rate of {power} (false-positive rate)",
    ]


def _say_guarantee(claim: dict[str, Any]) -> None:
    for place, line in enumerate(_guarantee_lines(claim)):
        _say(f"{'' if place else 'guarantee':<10} {line}")


@app.command()
def synthesize(
    data: Data, out: Annotated[Path, typer.Option(help="Folder of the release.")] = Path("release"), method: MethodName = "merf",
    epsilon: Epsilon = None, delta: Delta = 1e-5, max_tpr: MaxTpr = None, sets: Sets = None, config: Config = None,
    device: Device = "auto", seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that stopped.")] = False, ledger: LedgerFile = None,
    shape: Shape = None, classes: Classes = None, label: Label = "label", resize: Resize = None, repair: Repair = False,
    public_size: PublicSize = False, download: Download = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Train on sensitive data and write a release with its certificate."""
    import time
    from dataclasses import asdict

    from privot.data import load
    from privot.methods import make
    from privot.runtime import Runtime
    from privot.synthesis import synthesize as run

    maker = make(method, _settings(config, sets))
    wall, runtime = _wall(epsilon, delta, max_tpr, maker), Runtime(device)
    if os.path.lexists(out):
        raise SettingError(f"--out {out} is there already: name another folder, or remove it")
    box = load(
        data, shape=_shape(shape), classes=classes, label=label, resize=resize, repair=repair, public_size=public_size, download=download
    )  # fmt: skip
    start = time.perf_counter()
    with progress_bar(err_console) as progress:
        release = run(
            box, maker, wall, out=out, ledger=ledger, seed=seed, runtime=runtime, progress=progress, resume=resume,  # type: ignore[arg-type]
            notice=_caution,
        )  # fmt: skip
    took = time.perf_counter() - start
    result = {"release": str(out), "guarantee": asdict(release.guarantee), "ledger": release.facts["ledger"], "seconds": took}
    if as_json:
        return _emit(result)
    _say(f"release    {out}  ({seconds(took)})")
    _say_guarantee(asdict(release.guarantee))
    _say(f"ledger     this data set has spent epsilon {float(release.facts['ledger']['spent_epsilon']):.4g} in all")


@app.command()
def sample(
    release: Annotated[Path, typer.Argument(help="Folder of a release.")],
    count: Annotated[int, typer.Option(help="How many images.")] = 100,
    out: Annotated[Path, typer.Option(help=".npz, .png (a grid), .parquet, or a folder of PNGs by class.")] = Path("samples.npz"),
    seed: Seed = 0, as_json: Json = False,
) -> None:  # fmt: skip
    """Draw samples from a release; costs nothing."""
    from privot.export import write
    from privot.release import Release

    loaded = Release.load(release)
    images, labels = loaded.sample(count, seed=seed)
    write(images, labels, out, loaded.spec.classes)
    if as_json:
        return _emit({"out": str(out), "count": count})
    _say(f"{count} samples in {out}")


@app.command()
def measure(
    release: Annotated[Path, typer.Argument(help="Folder of a release.")],
    test: Annotated[str, typer.Option(help="Real data to test on; of a built-in name its test split.")],
    only: Annotated[str, typer.Option(help="Of logistic, mlp, cnn.")] = "logistic,mlp,cnn",
    count: Annotated[int, typer.Option(help="Samples to train on.")] = 60_000,
    public_test: Annotated[bool, typer.Option("--public-test", help="The test data is public, so the numbers may be published.")] = False,
    device: Device = "auto", seed: Seed = 0, label: Label = "label", resize: Resize = None,
    download: Download = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Train classifiers on samples, test them on real data."""
    from dataclasses import asdict

    from privot.data import load
    from privot.measures import downstream
    from privot.release import Release
    from privot.runtime import Runtime

    loaded, names = Release.load(release), tuple(each.strip() for each in only.split(","))
    box = load(test, "test", public=public_test, classes=loaded.spec.classes, label=label, resize=resize, download=download)
    images, labels = loaded.sample(count, seed=seed)
    with progress_bar(err_console) as progress:
        readings = downstream(images, labels, box, names, runtime=Runtime(device), seed=seed, progress=progress)
    if as_json:
        return _emit([asdict(each) for each in readings])
    table = Table("measure", "value", "error", "test images", "publishable", "time")
    for each in readings:
        row = (each.name, f"{each.value:.4f}", f"±{each.error:.4f}", f"{each.count}")
        table.add_row(*row, "yes" if each.publishable else "no: internal", seconds(each.seconds))
    out_console.print(table, soft_wrap=False)


@app.command()
def verify(release: Annotated[Path, typer.Argument(help="Folder of a release.")], as_json: Json = False) -> None:
    """Recompute epsilon from the recorded events and check every digest; needs no data."""
    from privot.release import verify as check

    result = check(release)
    if as_json:
        return _emit(result)
    _say("digests    ok")
    _say_guarantee(result["guarantee"])
    if "epsilon_from_events" in result:
        _say(f"recomputed epsilon {result['epsilon_from_events']:.6g} from the recorded events: agrees")


@app.command()
def ledger(
    data: Data,
    limit: Annotated[float | None, typer.Option(help="Set the owner's budget of the whole data set.")] = None,
    delta: Delta = 1e-5, file: LedgerFile = None, as_json: Json = False,
) -> None:  # fmt: skip
    """What this data set has spent, ever."""
    from privot.data import catalogue
    from privot.data.load import existing
    from privot.privacy.ledger import Ledger
    from privot.privacy.plan import Budget
    from privot.synthesis import ledger_path

    budget = Budget(math.inf if limit is None else limit, delta)
    book = Ledger(file or ledger_path(data if data in catalogue() else str(Path(data).resolve())))
    if data not in catalogue() and not book.path.exists():
        existing(data)  # or a slip of the pen would read as a data set that has spent nothing
    if limit is not None:
        book.limit(budget)
    wall = book.wall()
    runs = [each for each in book.entries() if each["kind"] == "reserve"]
    spent = float(book.spent().epsilon(delta))
    if as_json:
        return _emit(
            {"ledger": str(book.path), "limit": wall.epsilon if wall else None, "spent_epsilon": spent, "delta": delta, "runs": runs}
        )
    table = Table("run", "when", "method", "neighbours", "events")
    for each in runs:
        table.add_row(*(_plain(each[key]) for key in ("n", "time", "method", "neighbours")), json.dumps(each["event"]))
    out_console.print(table, soft_wrap=False)
    _say(f"spent in all: epsilon {spent:.4g} at delta {delta:g}" + (f" of {wall.epsilon:g}" if wall else ", no limit set"))
    _say(f"{book.path}")


@app.command()
def cite(method: Annotated[str, typer.Argument(help="Name of a method.")], as_json: Json = False) -> None:
    """The BibTeX entry of a method's paper."""
    from privot.methods import make

    text = make(method).citation
    _emit({"method": method, "citation": text}) if as_json else sys.stdout.write(text + "\n")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="A folder for the results; made anew.")] = Path("privot-demo"),
    epsilon: Annotated[float, typer.Option()] = 5.0, as_json: Json = False,
) -> None:  # fmt: skip
    """The whole story on the embedded data set, in about a minute."""
    from privot.demo import run

    with progress_bar(err_console) as progress:
        result = run(out, epsilon, progress)
    if as_json:
        return _emit(result)
    _say_guarantee(result["guarantee"])
    for each in result["readings"]:
        _say(f"{each['name']:<20} {each['value']:.3f} ± {each['error']:.3f} on {each['count']} real test images")
    if result["verified_epsilon"] is not None:
        _say(f"verified   epsilon {result['verified_epsilon']:.4g} recomputed from the events")
    for what, where in result["files"].items():
        _say(f"{what:<10} {where}")
