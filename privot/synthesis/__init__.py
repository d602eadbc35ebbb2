"""The top: from a box, a method and a budget to a release, or from a release to a set of another size."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import platform
import shutil
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch.linalg import LinAlgError

from privot.data import Public, Sensitive, catalogue
from privot.data.public_images import aside
from privot.data.tabular import Table
from privot.errors import PrivotError, PrivotWarning, ReleaseError, SettingError, refusing
from privot.io import vacant
from privot.local.dataset import Privatized
from privot.local.server_gate import ServerGate
from privot.methods import Method, Resizing, make, methods
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import is_own_ledger, open_ledger, spending
from privot.privacy.ledger_lookup import ledger_path as ledger_path
from privot.privacy.plan import Budget, Plan, Wall
from privot.privacy.shard_checkpoint import notices
from privot.progress import jsonable
from privot.release import BROKEN, PURPOSES, Guarantee, NoGuarantee, Release, proved
from privot.release.artifact import Product
from privot.runtime import Progress, Runtime, Streams, silent, threads
from privot.runtime.process_group import join
from privot.synthesis.cost import fit_settings, thread_limit
from privot.synthesis.inputs import load
from privot.synthesis.preflight import cautions, forecast, prepare, received

PACKAGES = (
    "privot",
    "torch",
    "numpy",
    "scipy",
    "dp-accounting",
    "safetensors",
)  # whose versions a result depends on


def synthesize(
    data: Sensitive | Privatized | str | Path,
    method: str | Method = "private-set",
    budget: Wall | float | None = None,
    *,
    settings: dict[str, Any] | None = None,
    out: str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    seed: int = 0,
    runtime: Runtime | None = None,
    progress: Progress = silent,
    resume: bool = False,
    notice: Callable[[str], None] | None = None,
    allow_large_delta: bool = False,
    insecure_seed: int | None = None,
    purpose: str = "",
) -> Release:
    """Make a private release of a data set.

    ``budget`` is a `Budget`, a `Risk`, or an epsilon at delta 1e-5. With ``out`` the release is written there, and a run that
    crashed goes on with ``resume``. ``seed`` is of the public stream; the noise cannot be seeded (``insecure_seed`` voids the guarantee,
    and the run is charged as infinite). The limit of the data set's own ledger binds, whatever ``ledger`` is named. A ``purpose``
    (``shadow`` or ``audit``) marks output that stays with the data owner: `verify` refuses it.
    ``notice`` hears cautions; without it they are issued as `PrivotWarning`. A delta above 1e-3 that no declared number of records or
    owners covers is refused unless ``allow_large_delta``. A method without a guarantee sets the ledger of the data to infinite for good:
    say ``budget=math.inf`` to accept that, or name another ``ledger`` for a trial.

    >>> import tempfile
    >>> quick = {"per_class": 2, "nets": 4, "trained": 2, "width": 4, "steps": 4, "lessons": 1}
    >>> release = synthesize("digits", budget=5.0, settings=quick, ledger=tempfile.mkdtemp() + "/digits.jsonl")
    >>> release.product.tensors["images"].shape, round(release.guarantee.epsilon, 3)
    (torch.Size([20, 1, 8, 8]), 5.0)
    >>> larger = resize(release, 3)
    >>> larger.product.tensors["images"].shape, larger.guarantee == release.guarantee
    (torch.Size([30, 1, 8, 8]), True)
    """
    if purpose and purpose not in PURPOSES:
        raise SettingError(
            f"purpose={purpose!r}: {' or '.join(PURPOSES)}, or nothing for a release"
        )
    box = data if isinstance(data, (Sensitive, Privatized)) else load(data)
    if isinstance(box, Public):
        raise SettingError("synthesize takes Sensitive data; public data needs no privacy")
    if isinstance(box, Table):
        raise SettingError(
            "a table leaves through channels alone: privatize it first, then give the file"
        )
    runtime = runtime or Runtime()
    begun = (
        _settings_of_run(Path(out), method) if out and resume and isinstance(method, str) else {}
    )
    maker = fit_settings(method, {**begun, **(settings or {})}, box.spec, runtime.target)
    wall = Budget(budget) if isinstance(budget, (int, float)) else budget
    sent = (
        box if isinstance(box, Privatized) else None
    )  # then all was paid for by the clients, and nothing is charged here
    plan, wall = (
        received(sent, maker, wall) if sent else prepare(box.spec, maker, wall, allow_large_delta)
    )
    book = None if sent else open_ledger("" if purpose else box.name, ledger)
    if (
        budget is None
        and book
        and not purpose
        and _is_infinite(plan)
        and is_own_ledger(box.name, book)
    ):
        raise SettingError(
            f"{maker.name} gives no guarantee and would set the ledger of {box.name} to infinite for good: "
            "say --epsilon inf (budget=math.inf) to accept that, or name another ledger for a trial (--ledger)"
        )
    notice = notice or _warn
    for text in cautions(
        box.spec, plan, wall.delta, forecast(box.spec, maker, plan, runtime.target), sent
    ):
        notice(text)
    facts: dict[str, Any] = {
        "method": maker.name,
        "settings": dataclasses.asdict(maker),  # type: ignore[call-overload]
        "plan": plan.to_json(),
        "event": str(plan.event()),
        "data": box.name if box.name in catalogue() else "",
        "seed": seed,
    }
    if sent:
        facts["channel"] = sent.channel.parameters()
    if purpose:
        facts["purpose"] = purpose
    pictures = None
    if (source := getattr(maker, "aside", "")) and isinstance(box, Sensitive):
        pictures, facts["public_data"] = aside(source, box)
    # An unfinished run goes on with the same data only, and never as a secret one if its noise was seeded.
    which = sent.digest if sent else hashlib.sha256(box.name.encode()).hexdigest()
    run = {**facts, "insecure": insecure_seed is not None, "box": which}
    ranks = join(
        runtime.target, json.dumps([jsonable(run), versions()])
    )  # where torchrun started several processes, the first leads
    leads = not ranks.follows
    folder = (
        _run_folder(Path(out), run, resume, getattr(maker, "free", ())) if out and leads else None
    )
    if isinstance(box, Privatized) or book is None:
        assert isinstance(box, Privatized)
        gate: Gate = ServerGate(box, runtime)
    else:
        gate = Gate(
            box,
            plan,
            book,
            wall,
            method=maker.name,
            runtime=runtime,
            folder=folder,
            insecure_seed=insecure_seed,
            ranks=ranks,
        )
    if book and leads:
        if plan.stages and gate.ticket is None:
            book.check(plan, method=maker.name, seeded=gate.insecure, owners=box.spec.owners or 1)
        if folder:
            book.ready()  # a ledger that cannot be written is noticed before anything else is
        for text in notices(book, but=gate.ticket):
            notice(text)
    fresh = [each for each in (folder, *folder.parents) if not each.exists()] if folder else []
    if folder:
        _begin(folder, run)
    price = float(plan.cost().epsilon(wall.delta)) if plan.stages else math.inf

    def watched(stage: str, step: int, of: int, **more: Any) -> None:
        if leads:
            progress(
                stage,
                step,
                of,
                epsilon=0.0 if gate.ticket is None and not gate.opened and not sent else price,
                **more,
            )

    free = ", ".join(getattr(maker, "free", ())) or "none are free"
    diverged = "what was made has values that are not finite: its training diverged"
    diverged += (
        f"; the answers are kept: go on with --resume and other settings ({free})" if folder else ""
    )
    try:
        with threads(thread_limit(box.spec, runtime.target)):
            product = maker.fit(
                gate, Streams(seed, runtime, folder, pictures, ranks=ranks), watched
            )
    except Exception as error:
        keeps = sent or not isinstance(error, PrivotError)
        if folder and gate.ticket is None and not (keeps and _holds_progress(folder)):
            _discard(
                folder, fresh
            )  # refused before anything was charged, or opened: there is nothing to go on from
        if isinstance(
            error, LinAlgError
        ):  # of a matrix with such values; on the secret side it would be a QueryError
            raise ReleaseError(diverged) from None
        raise
    except KeyboardInterrupt as stop:
        if (gate.ticket is not None or gate.opened) and not stop.args:
            goes_on = (
                folder and not gate.opened
            )  # else all records would be opened, and charged, again
            stop.add_note(
                f"what was asked stays charged{', and --resume goes on from here' if goes_on else ''}"
            )
        raise
    if leads and not product.fits(box.spec):
        raise ReleaseError(diverged)
    book_facts = (
        {"head": book.head, **spending(box.name, book, wall.delta)} if book and leads else {}
    )
    facts = {
        **product.facts,
        **facts,
        "ledger": json.loads(ranks.said(json.dumps(book_facts))),
        "versions": versions(),
    }
    product = dataclasses.replace(
        product, tensors=ranks.shared(product.tensors) or {}
    )  # the leader's; another GPU may round its own way
    release = Release(
        product,
        _guarantee(gate, plan, sent.channel.delta if sent else wall.delta),
        box.spec,
        jsonable(facts),
    )
    if out and folder:
        release.save(out)
        shutil.rmtree(folder)
    gate.forget()
    ranks.leave()
    return release


def resize(
    release: Release | str | Path,
    per_class: int,
    *,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    runtime: Runtime | None = None,
    progress: Progress = silent,
) -> Release:
    """A set of ``per_class`` images of each class from what a release kept; with ``out`` it is written there.

    ``settings`` may change how it is made (steps, detail), not what was asked: a plan that differs is refused. No data, ledger or gate
    has a part in it, so it costs nothing: the guarantee, plan, seed and ledger facts are those of the release, and the manifest says of
    which one it was made.
    """
    made, name = (
        (release, "the release")
        if isinstance(release, Release)
        else (Release.load(release), str(release))
    )
    if out is not None:
        vacant(Path(out))
    with refusing(ReleaseError, BROKEN.format(name)):
        plan, _ = proved(made, name)
        maker = _maker_of(made, {**(settings or {}), "per_class": per_class}, name)
        if maker.plan(made.spec).scaled(0.0) != plan.scaled(
            0.0
        ):  # all but the noise: that came of the budget
            raise ReleaseError(f"{name}: its settings are not those of its plan")
    product = _again(maker, made, runtime or Runtime(), progress, name)
    facts = {
        **made.facts,
        "settings": dataclasses.asdict(maker),  # type: ignore[call-overload]
        "versions": versions(),
        "resized": {"from": made.digest, "cost": "none: no record was asked"},
    }
    resized = Release(product, made.guarantee, made.spec, jsonable(facts))
    if out is not None:
        resized.save(out)
    return resized


def _maker_of(made: Release, other: Mapping[str, Any], name: str) -> Resizing:
    """The method of a release by its own settings, but for the ``other`` ones."""
    method = made.facts.get("method")
    settings = made.facts.get("settings")
    if not isinstance(method, str) or not isinstance(settings, dict):
        raise ReleaseError(f"{name}: its manifest does not say how it was made")
    if not isinstance(make(method), Resizing):
        able = " or ".join(each for each, kind in methods().items() if hasattr(kind, "again"))
        raise ReleaseError(f"{name}: {method} makes no sets of another size; {able} does")
    if not made.product.kept:
        raise ReleaseError(
            f"{name}: it holds nothing to make another set of, since it was made with keep=false"
        )
    maker = make(method, {**settings, **other})
    if maker.plan(made.spec) != make(method, settings).plan(made.spec):
        raise SettingError(
            f"{name}: a set of another size cannot ask anew; {', '.join(set(other) - {'per_class'})} would"
        )
    assert isinstance(maker, Resizing)
    return maker


def _again(
    maker: Resizing, made: Release, runtime: Runtime, progress: Progress, name: str
) -> Product:
    """What the method makes of what was kept; tensors come from outside, so whatever does not fit is refused."""
    seed = made.facts.get("seed")
    spec = made.spec
    if type(seed) is not int:
        raise ReleaseError(f"{name}: its seed is not a whole number")
    try:
        product = maker.again(made.product, spec, Streams(seed, runtime), progress)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        if "memory" in str(error):  # then the wish was too large, not the release unsound
            raise
        raise ReleaseError(
            f"{name}: what it kept does not fit its settings ({type(error).__name__})"
        ) from None
    images = product.tensors["images"]
    labels = product.tensors["labels"]
    even = labels.bincount(minlength=spec.classes).tolist() == [maker.per_class] * spec.classes
    if not (even and product.fits(spec) and images.isfinite().all()):
        raise ReleaseError(
            f"{name}: what it kept gives no sound set of {maker.per_class} images of each class"
        )
    return product


def _guarantee(gate: Gate, plan: Plan, delta: float) -> Guarantee | NoGuarantee:
    if gate.opened:
        return NoGuarantee(gate.opened)
    if gate.insecure:
        return NoGuarantee("the noise was seeded, so anyone can subtract it: for tests only")
    if any(stage.noise == 0 for stage in plan.stages):
        return NoGuarantee("no noise was added: the budget was infinite")
    return Guarantee.of(plan, delta)


def _settings_of_run(out: Path, method: str) -> dict[str, Any]:
    """Read the settings of the unfinished run of a method, so that defaults of another device do not replace them.

    Args:
        out: The folder of the release that the run will write.
        method: The name of the method.

    Returns:
        All settings of the run; none where there is no run of this method.
    """
    try:
        run = json.loads((out.with_name(out.name + ".run") / "run.json").read_text())
        return dict(run["settings"]) if run["method"] == method else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}  # what is wrong there is said when the run is taken up


def _run_folder(out: Path, run: dict[str, Any], resume: bool, free: tuple[str, ...]) -> Path:
    """The folder of an unfinished run, beside its release-to-be; it must be the same run if we go on with it, but for ``free`` settings."""
    if out.exists():
        raise ReleaseError(f"{out} is there already: name another folder, or remove it")
    folder = out.with_name(out.name + ".run")
    try:
        known = json.loads((folder / "run.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        if folder.exists() and any(each.name != "run.part" for each in folder.iterdir()):
            # Answers that no run.json vouches for may be of another plan: they must not end in this one's release.
            raise ReleaseError(
                f"{folder} holds the rest of another run: remove it (any charge stays)"
            ) from None
        return folder
    except (OSError, ValueError) as error:
        raise ReleaseError(
            f"{folder / 'run.json'} cannot be read ({type(error).__name__}): remove {folder} (any charge stays)"
        ) from None
    if not resume:
        raise ReleaseError(
            f"{folder} holds an unfinished run: go on with --resume, or remove it (any charge stays)"
        )
    if _bound(known, free) != _bound(json.loads(json.dumps(run)), free):
        raise ReleaseError(
            f"{folder} holds a run with other settings: resume with the same ones, or remove it (any charge stays)"
        )
    return folder


def _bound(run: Any, free: tuple[str, ...]) -> Any:
    """A run without the settings that nothing asked so far depends on."""
    if not (isinstance(run, dict) and isinstance(run.get("settings"), dict)):
        return run
    return {
        **run,
        "settings": {key: value for key, value in run["settings"].items() if key not in free},
    }


def _begin(folder: Path, run: dict[str, Any]) -> None:
    """Say which run the folder is of, before it holds anything else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.part").write_text(json.dumps(run))
        (folder / "run.part").replace(folder / "run.json")
    except OSError as error:
        raise ReleaseError(
            f"{folder} cannot be written ({error.strerror}): name another place for the release"
        ) from None


def _is_infinite(plan: Plan) -> bool:
    """Whether a run of this plan costs an infinite epsilon: its records are opened, or get no noise."""
    return not plan.stages or any(stage.noise == 0 for stage in plan.stages)


def _warn(text: str) -> None:
    """Issue a caution to the caller of `synthesize`."""
    warnings.warn(text, PrivotWarning, stacklevel=3)


def _holds_progress(folder: Path) -> bool:
    """Whether the folder of a run holds more than the facts that it began with."""
    return any(each.name not in ("run.json", "run.part") for each in folder.iterdir())


def _discard(folder: Path, fresh: list[Path]) -> None:
    """Remove the folder of a run that was refused, and the empty folders above it that were made for it."""
    shutil.rmtree(folder, ignore_errors=True)
    for each in fresh[1:]:
        with contextlib.suppress(OSError):
            each.rmdir()


def versions() -> dict[str, str]:
    """Of the packages that a result depends on."""
    return {"python": platform.python_version()} | {name: _installed(name) for name in PACKAGES}


@functools.cache
def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
