"""Before and after a run: from settings and a budget to a server with its terms, and from a finished server to a release on disk."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from privot.data.spec import Spec
from privot.errors import PlanError, ReleaseError, refusing
from privot.federated.messages import Terms, pack, unpack
from privot.federated.server import Server
from privot.methods import make
from privot.methods.federated_gs_wgan import FederatedGsWgan
from privot.privacy.plan import Wall
from privot.release import Release
from privot.runtime import Progress, Runtime, Streams, silent
from privot.synthesis.preflight import prepare


def terms_for(
    settings: dict[str, Any], spec: Spec, wall: Wall | None, allow_large_delta: bool = False
) -> Terms:
    """Terms of a new run: the noise that one owner's plan needs to stay within the budget, fixed for all to see.

    >>> from privot.privacy.plan import Budget
    >>> terms = terms_for({"rounds": 2}, Spec((1, 8, 8), 10, owners=3), Budget(10.0))
    >>> round(terms.plan().cost().epsilon(1e-5), 6)
    10.0
    """
    maker = make(FederatedGsWgan.name, settings)
    assert isinstance(maker, FederatedGsWgan)
    plan, _ = prepare(spec, maker, wall, allow_large_delta)
    fixed = dataclasses.replace(maker, noise=plan.stages[0].noise)
    terms = Terms(secrets.token_hex(16), fixed, spec.shape, spec.classes, spec.owners or 1)
    if terms.plan() != plan:
        raise PlanError("the terms do not give the plan that was calibrated")
    return terms


def begin(
    terms: Terms,
    names: Sequence[str],
    out: Path,
    *,
    seed: int = 0,
    runtime: Runtime | None = None,
    record: Path | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> Server:
    """A server for these terms, or the one that stopped under the same settings; its traces lie in ``OUT.run`` until it has finished."""
    if os.path.lexists(out):
        raise ReleaseError(f"{out} is there already: name another folder, or remove it")
    folder = traces(out)
    file = folder / "run.json"
    if file.exists():
        if not resume:
            raise ReleaseError(
                f"{folder} holds an unfinished run: go on with --resume, or remove it (any charge stays)"
            )
        with refusing(ReleaseError, f"{file} cannot be read: remove {folder} (any charge stays)"):
            known = json.loads(file.read_text())
            kept = unpack(bytes.fromhex(known["terms"]))
        if (
            not isinstance(kept, Terms)
            or _same(kept) != _same(terms)
            or known["seed"] != seed
            or known["names"] != list(names)
        ):
            raise ReleaseError(
                f"{folder} holds a run with other settings: resume with the same ones, or remove it (any charge stays)"
            )
        terms = kept
    elif folder.exists() and any(folder.iterdir()):
        raise ReleaseError(f"{folder} holds the rest of another run: remove it (any charge stays)")
    else:
        if record is not None and os.path.lexists(record):
            raise ReleaseError(f"{record} is there already: name another file for the wire record")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "run.part").write_text(
                json.dumps({"terms": pack(terms).hex(), "seed": seed, "names": list(names)})
            )
            (folder / "run.part").replace(file)
        except OSError as error:
            raise ReleaseError(
                f"{folder} cannot be written ({error.strerror}): name another place for the release"
            ) from None
    return Server(
        terms, names, Streams(seed, runtime or Runtime()), folder / "server", record, progress
    )


def finish(server: Server, out: Path, delta: float) -> Release:
    """Write the release, then forget what the run had kept."""
    release = server.finish(delta)
    release.save(out)
    shutil.rmtree(traces(out), ignore_errors=True)
    return release


def traces(out: Path) -> Path:
    """Where an unfinished run lies."""
    return out.with_name(out.name + ".run")


def _same(terms: Terms) -> Any:
    """All but the name of the run."""
    return dataclasses.asdict(terms.settings), terms.shape, terms.classes, terms.owners
