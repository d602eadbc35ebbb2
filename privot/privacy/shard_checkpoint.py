"""What shards have learned, on disk while a run may still crash: on the owner's side, for the owner's eyes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from privot.errors import ReleaseError, refusing
from privot.privacy.ledger import Ledger
from privot.privacy.noise import Secret

DIGEST = 32  # bytes of a SHA-256, before the rest
ALTERED = "{}: what a crashed run had stored was altered, or is of another split; start anew, at a new charge"


def place(ledger: Ledger, ticket: int | None) -> Path:
    """Where a run's vault lies, by its ticket: beside the ledger that it was paid from."""
    return ledger.path.with_name(f"{ledger.path.name}.vault{ticket}.safetensors")


def order_file(ledger: Ledger, ticket: int | None) -> Path:
    """Name the file of a run's secret order of the records.

    Args:
        ledger: The ledger that the run was charged to.
        ticket: The number of its reservation there.

    Returns:
        A path beside the ledger.
    """
    return ledger.path.with_name(f"{ledger.path.name}.vault{ticket}-order.safetensors")


def vaults(ledger: Ledger) -> dict[int, Path]:
    """Those of runs that are not over, by the ticket of each. Whoever removes one ends its run."""
    return {ticket: file for ticket, file in _beside(ledger) if file == place(ledger, ticket)}


def _beside(ledger: Ledger) -> list[tuple[int, Path]]:
    """Vaults, and parts of such, by their tickets."""
    named = re.compile(re.escape(ledger.path.name) + r"\.vault(\d+)(-order)?\.(safetensors|part)")
    found = [(named.fullmatch(each.name), each) for each in ledger.path.parent.glob("*.vault*")]
    return sorted((int(match[1]), each) for match, each in found if match)


def notices(ledger: Ledger, but: int | None = None) -> list[str]:
    """What must be said of each, except of the run ``but``: where the folder of a run was removed, its vault still lies here."""
    what = {True: "the secret order of the records", False: "what critics know of the records"}
    told = "holds {}, for a run that is not over; if it is over, remove this file"
    return [
        f"{file} {told.format(what['-order.' in file.name])}"
        for ticket, file in _beside(ledger)
        if ticket != but
    ]


def dealing_order(ledger: Ledger, count: int) -> Tensor:
    """Give the secret order by which a dataset is dealt to simulated clients.

    privacy: all clients, in whatever process, must see one partition, or a record would have several of them; and the partition must not
    depend on the order of a file. So a uniform permutation is drawn once for a dataset, and kept beside the dataset's own ledger.

    Args:
        ledger: The dataset's own ledger.
        count: The number of records. Where it has changed since the last call, a new order is drawn.

    Returns:
        A permutation, int64 [count].
    """
    file = ledger.path.with_name(f"{ledger.path.name}.dealt.safetensors")
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two processes that begin at once, one draws
        if file.exists() and len(order := _checked(file)["order"]) == count:
            return order
        order = Secret().order(count)
        write(file, {"order": order})
    return order


def write(file: Path, state: dict[str, Tensor]) -> None:
    """Whole or not at all, readable by its owner alone, with a digest."""
    with open(
        part := file.with_suffix(".part"),
        "wb",
        opener=lambda path, flags: os.open(path, flags, 0o600),
    ) as out:
        raw = save(dict(state))
        out.write(hashlib.sha256(raw).digest())
        out.write(raw)
        out.flush()
        os.fsync(out.fileno())
    part.replace(file)


def remove(file: Path) -> None:
    """With what a crash in the midst of writing may have left beside it."""
    for each in (file, file.with_suffix(".part")):
        each.unlink(missing_ok=True)


def read(file: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was written, if it is of the names, shapes and kinds of ``state``."""
    kept = _checked(file)
    # privacy: a state of other shards, reshaped, would be of several of these.
    if {name: (each.shape, each.dtype) for name, each in kept.items()} != {
        n: (v.shape, v.dtype) for n, v in state.items()
    }:
        raise ReleaseError(ALTERED.format(file))
    return kept


def _checked(file: Path) -> dict[str, Tensor]:
    """What was written, if its digest is right."""
    with refusing(ReleaseError, altered := ALTERED.format(file)):
        raw = file.read_bytes()
        kept = load(raw[DIGEST:])
        if hashlib.sha256(raw[DIGEST:]).digest() != raw[:DIGEST]:
            raise ReleaseError(altered)
    return kept
