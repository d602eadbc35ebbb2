"""Verbs of a federation: federate simulate, server, client, keys."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privot.cli.client_progress import Watched
from privot.cli.options import (
    AllowLargeDelta,
    Classes,
    Config,
    Delta,
    Device,
    Epsilon,
    Json,
    Label,
    LedgerFile,
    Repair,
    Resize,
    Seed,
    Sets,
    Shape,
    app,
    emit,
    err_console,
    say,
    say_caution,
    say_guarantee,
    to_settings,
    to_shape,
    to_wall,
)
from privot.errors import SettingError
from privot.progress import Progress, progress_bar, seconds

if TYPE_CHECKING:
    from privot.federated.flower.server_app import Traffic
    from privot.federated.server import Server
    from privot.privacy.ledger import Ledger

verbs = typer.Typer(
    help="GS-WGAN across owners who trust nobody, carried by Flower.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
app.add_typer(verbs, name="federate")

Rounds = Annotated[
    int | None, typer.Option(min=1, help="How often owners are asked; the same as --set rounds=.")
]
ClassNames = Annotated[
    str | None,
    typer.Option(
        help="Names of all class folders in the order agreed on; this owner may lack some."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder of the release; while the run lasts, FOLDER.run.")]
Record = Annotated[
    Path | None,
    typer.Option(help="Write down every message that the server sent or saw, for attacks on it."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that stopped.")]


@verbs.command()
def simulate(
    data: Annotated[
        str,
        typer.Option(
            help="femnist (its writers), digits, ..., or a path; records are dealt in a secret order."
        ),
    ],
    out: Out,
    clients: Annotated[int, typer.Option(min=1, help="How many owners.")] = 5,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    rounds: Rounds = None,
    sets: Sets = None,
    config: Config = None,
    record: Record = None,
    resume: Resume = False,
    seed: Seed = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Owners that work at a time; up to one for each core if not given."
        ),
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="A folder for the owners' ledgers.")] = None,
    device: Device = "auto",
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """A whole federation on this machine: each owner has its own gate, ledger and critic."""
    from privot.federated.flower.simulation import Cast, dealt, names
    from privot.federated.flower.simulation import simulate as play
    from privot.federated.session import begin, terms_for, traces
    from privot.privacy.ledger_lookup import open_ledger
    from privot.privacy.plan import Budget
    from privot.runtime import Runtime

    settings = _settings(config, sets, rounds)
    runtime = Runtime(device)
    wall = to_wall(epsilon, delta, None, _method(settings))
    source = (
        str(Path(data).resolve()) if Path(data).exists() else data
    )  # workers start in other folders
    box = dealt(source, clients)
    spec = _spec(box.spec, clients)
    terms = terms_for(settings, spec, wall, allow_large_delta)
    _say_cautions(spec, terms, delta)
    if not (
        resume and (traces(out) / "run.json").exists()
    ):  # a run that goes on was charged when it began
        open_ledger(box.name).check(terms.plan(), owners=box.spec.owners or 1)
    # Each simulated owner allows what the terms ask of it, where rounding may not come between; its ledger may still say no.
    own = Budget(float(terms.plan().cost().epsilon(delta)) * (1 + 1e-9), delta)
    cast = Cast(
        source,
        clients,
        own,
        traces(out).resolve() / "owners",
        ledger and ledger.resolve(),
        device,
        terms.settings.unit,
    )

    def run(progress: Progress) -> tuple[Server, Traffic]:
        server = begin(
            terms,
            names(clients),
            out,
            seed=seed,
            runtime=runtime,
            record=record,
            resume=resume,
            progress=progress,
        )
        return server, play(cast, server, workers=workers, progress=progress)

    with _nothing_left(out):
        _run(run, out, delta, as_json)


@verbs.command("server")
def serve(
    address: Annotated[str, typer.Option(help="HOST:PORT to listen on, such as 0.0.0.0:8443.")],
    tls: Annotated[Path, typer.Option(help="Folder with ca.crt, server.crt and server.key.")],
    nodes: Annotated[
        Path, typer.Option(help="Public keys of the owners' nodes, a line each: type, key, name.")
    ],
    out: Out,
    like: Annotated[
        str | None,
        typer.Option(help="A built-in data set of the same shape and classes; or declare both."),
    ] = None,
    shape: Shape = None,
    classes: Classes = None,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    rounds: Rounds = None,
    sets: Sets = None,
    config: Config = None,
    record: Record = None,
    resume: Resume = False,
    seed: Seed = 0,
    join: Annotated[
        float, typer.Option(min=1, help="Seconds that owners have to come and agree.")
    ] = 600.0,
    patience: Annotated[
        float, typer.Option(min=1, help="Seconds that they have to answer in a round.")
    ] = 300.0,
    device: Device = "auto",
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """The server of a real federation: it has the generator, and never a record."""
    from privot.data import catalogue, describe
    from privot.data.spec import Spec
    from privot.federated.flower.keys import read_nodes
    from privot.federated.flower.server_app import conduct
    from privot.federated.flower.superlink import opened, split_address, tls_files
    from privot.federated.session import begin, terms_for, traces
    from privot.federated.validation import longest_message
    from privot.runtime import Runtime

    settings = _settings(config, sets, rounds)
    runtime = Runtime(device)
    known = read_nodes(nodes)
    split_address(address)
    tls_files(tls)
    if like is not None and like not in catalogue():
        raise SettingError(
            f"--like {like}: a built-in data set ({', '.join(catalogue())}), or declare --shape and --classes"
        )
    if like is None and (shape is None or classes is None):
        raise SettingError(
            "declare what the owners hold: --shape (such as 1x28x28) and --classes, or --like a built-in data set"
        )
    spec = (
        describe(like, shape=to_shape(shape), classes=classes)
        if like
        else Spec(to_shape(shape), classes)  # type: ignore[arg-type]
    )
    terms = terms_for(
        settings,
        _spec(spec, len(known)),
        to_wall(epsilon, delta, None, _method(settings)),
        allow_large_delta,
    )
    _say_cautions(_spec(spec, len(known)), terms, delta)

    def run(progress: Progress) -> tuple[Server, Traffic]:
        server = begin(
            terms,
            list(known),
            out,
            seed=seed,
            runtime=runtime,
            record=record,
            resume=resume,
            progress=progress,
        )
        with opened(
            address, tls, known, traces(out) / "superlink.log", longest_message(terms)
        ) as post:
            say(f"open       {address} for {len(known)} owners: {', '.join(known)}", err_console)
            return server, conduct(server, post, join=join, patience=patience, progress=progress)

    _run(run, out, delta, as_json)


@verbs.command()
def client(
    data: Annotated[
        str,
        typer.Option(
            help="What this owner holds: .npz, .parquet, IDX or a folder of class folders."
        ),
    ],
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    ca: Annotated[
        Path, typer.Option(help="Certificate of the authority that vouches for the server.")
    ],
    key: Annotated[Path, typer.Option(help="Private key of this node.")],
    epsilon: Annotated[float, typer.Option(help="The most that a run may cost this owner.")],
    delta: Delta = 1e-5,
    part: Annotated[
        str | None, typer.Option(help="For trials: only part I of N of the data, such as 0/5.")
    ] = None,
    unit: Annotated[
        str,
        typer.Option(
            help="Whom terms must protect: client (all that it holds), or record, which is less."
        ),
    ] = "client",
    ledger: LedgerFile = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where this run leaves its traces, one for each; LEDGER.run if not given."
        ),
    ] = None,
    idle: Annotated[
        float, typer.Option(min=1, help="End after so many seconds without a message.")
    ] = 3600.0,
    shape: Shape = None,
    classes: Classes = None,
    class_names: ClassNames = None,
    label: Label = "label",
    resize: Resize = None,
    repair: Repair = False,
    device: Device = "auto",
    allow_large_delta: AllowLargeDelta = False,
    as_json: Json = False,
) -> None:
    """An owner of a real federation: data, gate, ledger and critic stay here; sanitized slopes leave. Ends when the run does."""
    from privot.data.partition import held_by, load_own
    from privot.federated.client import Owner, Policy
    from privot.federated.flower.client_app import client_app
    from privot.federated.flower.supernode import LATE, UnheardError
    from privot.federated.flower.supernode import serve as answer
    from privot.privacy.ledger_lookup import (
        ledger_path,
        open_ledger,
        open_part_ledger,
        spending,
        spending_sentence,
    )
    from privot.privacy.plan import Budget
    from privot.privacy.shard_checkpoint import notices, vaults
    from privot.runtime import Runtime
    from privot.synthesis.preflight import check_delta

    if unit not in ("client", "record"):
        raise SettingError(f"--unit {unit}: client or record")
    check_delta(delta, allowed=allow_large_delta)
    declared: dict[str, Any] = {
        "shape": to_shape(shape),
        "classes": classes,
        "label": label,
        "resize": resize,
        "repair": repair,
    }
    names = None if class_names is None else tuple(each.strip() for each in class_names.split(","))
    if names and (len({*names}) < len(names) or "" in names):
        raise SettingError(
            "--class-names: a name for each class, no two alike, with commas between them"
        )
    if part is not None and names:
        raise SettingError("--class-names: only without --part, whose data is read as a whole")
    if part is not None:
        whole, number = _divided(data, part, declared)
        box = held_by(whole, number, open_ledger(whole.name))
        source = whole.name
        book: Ledger = open_part_ledger(
            source, (number, whole.spec.owners), ledger or ledger_path(box.name)
        )
    else:
        box = load_own(data, class_names=names, **declared)
        source = box.name
        book = open_ledger(source, ledger)
    place = folder or book.path.with_name(book.path.name + ".run")
    place.mkdir(parents=True, exist_ok=True)
    refused: list[str] = []

    def notice(text: str) -> None:
        refused.append(text)
        say_caution(text)

    owner = Owner(
        box, Budget(epsilon, delta), book, place, Runtime(device), Policy(unit=unit), notice=notice
    )
    with progress_bar(err_console) as progress:
        watched = Watched(owner, progress, delta)
        app_ = client_app(
            lambda context: watched,
            lambda error: notice(f"an answer failed ({type(error).__name__})"),
        )
        over = watched.waits
        with contextlib.suppress(UnheardError) if over else contextlib.nullcontext():
            answer(
                app_,
                server,
                ca,
                key,
                place / "supernode.log",
                idle=min(idle, LATE) if over else idle,
                more=watched.more,
            )
    if watched.ended:
        raise SettingError(watched.ended)
    counted = spending(source, book, delta)
    agreed = owner.terms
    kept = [str(file) for file in vaults(book).values()]
    facts = {
        "run": agreed.run if agreed else None,
        "rounds": watched.rounds,
        "refused": refused,
        "ledger": str(book.path),
        "spent": counted["spent_epsilon"],
        **counted,
        "vaults": kept,
    }
    if as_json:
        return emit(facts)
    say(
        f"answered   {watched.rounds} of {agreed.settings.rounds} rounds"
        if agreed
        else "answered   nothing: no terms were agreed to"
    )
    say(f"ledger     {spending_sentence(source, book, counted)}, at delta {delta:g}")
    for text in notices(book):
        say_caution(text)


@verbs.command()
def keys(
    out: Annotated[Path, typer.Option(help="A new folder for them.")],
    node: Annotated[
        list[str] | None, typer.Option(help="A name for each owner; five hospitals if not given.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Names and addresses of the server; this machine if not given."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Certificates and node keys for a trial. In earnest each party makes its own, and only public halves travel."""
    from privot.federated.flower.keys import make_keys

    made = make_keys(
        out,
        node or [f"hospital-{number}" for number in range(1, 6)],
        host or ["localhost", "127.0.0.1", "::1"],
    )
    if as_json:
        return emit({name: str(path) for name, path in made.items()})
    say(f"server     --tls {out} --nodes {out / 'nodes'}")
    for name in made:
        if name.endswith(".key") and name != "server.key":
            say(f"client     --ca {out / 'ca.crt'} --key {out / name}")


def _settings(config: Path | None, sets: list[str] | None, rounds: int | None) -> dict[str, Any]:
    settings = to_settings(config, sets)
    if rounds is not None and str(settings.get("rounds", rounds)) != str(rounds):
        raise SettingError("give --rounds or --set rounds=, not both")
    return settings | ({} if rounds is None else {"rounds": rounds})


def _method(settings: dict[str, Any]) -> Any:
    from privot.methods import make

    return make("federated-gs-wgan", settings)


def _spec(spec: Any, owners: int) -> Any:
    """What all know of what these owners hold."""
    from privot.data.spec import Spec

    return Spec(spec.shape, spec.classes, owners=owners)


def _say_cautions(spec: Any, terms: Any, delta: float) -> None:
    """Say what a careful colleague would say of the terms, before anybody is asked."""
    from privot.synthesis.preflight import cautions

    for text in cautions(spec, terms.plan(), delta, {}):
        say_caution(text)


@contextlib.contextmanager
def _nothing_left(out: Path) -> Iterator[None]:
    """Remove the traces of a simulated run whose terms every owner refused: nothing was charged."""
    from privot.federated.flower.server_app import NotAgreedError
    from privot.federated.session import traces

    try:
        yield
    except NotAgreedError:
        shutil.rmtree(traces(out), ignore_errors=True)
        raise


def _divided(data: str, part: str, declared: dict[str, Any]) -> tuple[Any, int]:
    """The whole data set, divided among as many owners as ``part`` says, and the number of the part."""
    from privot.data import catalogue, load

    if data not in catalogue() and (declared["shape"] is None or declared["classes"] is None):
        raise SettingError(
            f"{data}: declare --shape (such as 1x28x28) and --classes, as all owners agreed"
        )
    place, _, count = part.partition("/")
    if not (place.isdecimal() and count.isdecimal() and int(place) < int(count)):
        raise SettingError(f"--part {part!r}: write it as I/N with I from 0, such as 0/5")
    return load(data, owners=int(count), **declared), int(place)


def _run(
    run: Callable[[Progress], tuple[Server, Traffic]], out: Path, delta: float, as_json: bool
) -> None:
    """The run with its progress, and what came of it."""
    import time
    from dataclasses import asdict

    from privot.federated.session import finish

    begun = time.perf_counter()
    with progress_bar(err_console) as progress:
        server, traffic = run(progress)
    release = finish(server, out, delta)
    took = time.perf_counter() - begun
    found = Counter((each.name, each.reason, each.lie) for each in server.offences)
    offences = [
        {"owner": name, "reason": reason, "lie": lie, "times": times}
        for (name, reason, lie), times in found.items()
    ]
    facts = {
        "release": str(out),
        "guarantee": asdict(release.guarantee),
        "rounds": server.round,
        "owners": len(server.living),
        "answers": server.taken,
        "bytes_each": traffic.each,
        "offences": offences,
        "seconds": took,
    }
    if as_json:
        return emit(facts)
    say(
        f"release    {out}: {server.round} rounds, {server.taken} answers of {len(server.names)} owners  ({seconds(took)})"
    )
    say(f"wire       {traffic.each:,.0f} bytes for an owner and round, both ways")
    say_guarantee(asdict(release.guarantee))
    for each in offences[:20]:
        say_caution(f"{each['owner']}: {each['reason']} ({each['times']} times)")
