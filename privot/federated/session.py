"""Starts and finishes a run of federated GS-WGAN: from settings to a server, and to a release."""

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
from privot.errors import PlanError, ReleaseError, reraise_as
from privot.federated.messages import Terms, pack_message, unpack_message
from privot.federated.server import Server
from privot.methods import make_method
from privot.methods.federated_gs_wgan import FederatedGSWGAN
from privot.privacy.plan import PrivacyTarget
from privot.release import Release
from privot.runtime import Progress, Runtime, Streams, ignore_progress
from privot.synthesis.preflight import resolve_plan


def build_terms(
    settings: dict[str, Any],
    spec: Spec,
    budget: PrivacyTarget | None,
    allow_large_delta: bool = False,
) -> Terms:
    """Build the terms of a new run, with the noise that keeps one client's plan in the budget.

    Args:
        settings: Settings of the method federated-gs-wgan.
        spec: Public facts about the data of all clients.
        budget: Privacy budget of one client; None if the settings give the noise.
        allow_large_delta: Accept a delta above the usual limit.

    Returns:
        Terms with a new run id and a fixed noise multiplier.

    >>> from privot.privacy.plan import Budget
    >>> terms = build_terms({"rounds": 2}, Spec((1, 8, 8), 10, num_clients=3), Budget(10.0))
    >>> round(terms.plan().cost().epsilon(1e-5), 6)
    10.0
    """
    method = make_method(FederatedGSWGAN.name, settings)
    assert isinstance(method, FederatedGSWGAN)
    plan, _ = resolve_plan(spec, method, budget, allow_large_delta)
    calibrated = dataclasses.replace(method, noise_multiplier=plan.stages[0].noise_multiplier)
    num_clients = spec.num_clients or 1
    terms = Terms(secrets.token_hex(16), calibrated, spec.shape, spec.num_classes, num_clients)
    if terms.plan() != plan:
        raise PlanError("The plan of the terms differs from the calibrated plan.")
    return terms


def open_server(
    terms: Terms,
    client_names: Sequence[str],
    out: Path,
    *,
    seed: int = 0,
    runtime: Runtime | None = None,
    transcript_path: Path | None = None,
    resume: bool = False,
    progress: Progress = ignore_progress,
) -> Server:
    """Start a server for these terms, or resume an unfinished run with the same settings.

    The state of an unfinished run is in the folder ``OUT.run``.

    Args:
        terms: The terms; a resumed run keeps the run id that it started with.
        client_names: The names of the clients, in their public order.
        out: Folder of the release; it must not exist.
        seed: Seed of the public random stream.
        runtime: Where to compute.
        transcript_path: File to which every message is written.
        resume: Resume an unfinished run if there is one.
        progress: Receives the progress of the server's start.

    Returns:
        The server.

    Raises:
        ReleaseError: The folder is in use, or its unfinished run has other settings.
    """
    if os.path.lexists(out):
        raise ReleaseError(f"{out} already exists. Choose another folder or remove it.")
    folder = get_federation_folder(out)
    if (folder / "run.json").exists():
        if not resume:
            raise ReleaseError(
                f"{folder} holds an unfinished run. Resume it with --resume, or remove the folder; "
                "clients stay charged."
            )
        terms = _load_unfinished_terms(folder, terms, client_names, seed)
    elif folder.exists() and any(folder.iterdir()):
        raise ReleaseError(
            f"{folder} holds files of another run. Remove the folder; clients stay charged."
        )
    else:
        if transcript_path is not None and os.path.lexists(transcript_path):
            raise ReleaseError(
                f"{transcript_path} already exists. Choose another file for the transcript."
            )
        _write_run_file(folder, terms, client_names, seed)
    streams = Streams(seed, runtime or Runtime())
    return Server(terms, client_names, streams, folder / "server", transcript_path, progress)


def _load_unfinished_terms(
    folder: Path, terms: Terms, client_names: Sequence[str], seed: int
) -> Terms:
    """Read the terms of an unfinished run, and check that its settings are the given ones.

    Args:
        folder: The folder of the run.
        terms: The terms of the new call; their run id may differ.
        client_names: The clients of the new call.
        seed: The seed of the new call.

    Returns:
        The terms that the run started with.
    """
    file = folder / "run.json"
    unreadable = f"{file} cannot be read. Remove {folder}; clients stay charged."
    with reraise_as(ReleaseError, unreadable):
        run_facts = json.loads(file.read_text())
        stored_terms = unpack_message(bytes.fromhex(run_facts["terms"]))
        if not isinstance(stored_terms, Terms):
            raise ReleaseError(unreadable)
    if (
        _without_run_id(stored_terms) != _without_run_id(terms)
        or run_facts["seed"] != seed
        or run_facts["client_names"] != list(client_names)
    ):
        raise ReleaseError(
            f"{folder} holds a run with other settings. Resume it with the same settings, or "
            "remove the folder; clients stay charged."
        )
    return stored_terms


def _write_run_file(folder: Path, terms: Terms, client_names: Sequence[str], seed: int) -> None:
    """Create the folder of a run, with the facts that a resumed run must match.

    Args:
        folder: The folder.
        terms: The terms.
        client_names: The clients, in their order.
        seed: The seed of the public random stream.
    """
    run_facts = {
        "terms": pack_message(terms).hex(),
        "seed": seed,
        "client_names": list(client_names),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.part").write_text(json.dumps(run_facts))
        (folder / "run.part").replace(folder / "run.json")
    except OSError as error:
        raise ReleaseError(
            f"{folder} cannot be written ({error.strerror}). Choose another folder for the release."
        ) from None


def write_federated_release(server: Server, out: Path, delta: float) -> Release:
    """Write the release of a finished run, then remove the state of the run.

    Args:
        server: The server after its last round.
        out: Folder of the release.
        delta: Delta at which the guarantee is stated.

    Returns:
        The release.
    """
    release = server.build_release(delta)
    release.save(out)
    shutil.rmtree(get_federation_folder(out), ignore_errors=True)
    return release


def get_federation_folder(out: Path) -> Path:
    """Return the folder of an unfinished run whose release will be `out`."""
    return out.with_name(out.name + ".run")


def _without_run_id(terms: Terms) -> Any:
    return dataclasses.asdict(terms.settings), terms.shape, terms.num_classes, terms.num_clients
