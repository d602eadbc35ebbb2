"""States of shards and the secret order of the records, stored until a run has ended.

The files are beside the ledger, on the secret side, and only their owner may read them.
"""

from __future__ import annotations

import glob
import hashlib
import re
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from privot.errors import ReleaseError, reraise_as
from privot.io import write_atomically
from privot.privacy.ledger import Ledger

DIGEST_BYTES = 32  # a file begins with the SHA-256 of its rest
CHECKPOINT_ALTERED = (
    "{}: what an unfinished run stored was altered, or belongs to another split of the records. "
    "Start a new run, which is charged again."
)


def shard_checkpoint_path(ledger: Ledger, ticket: int | None) -> Path:
    """Name the file of a run's shard states, beside the ledger, by the ticket of the run."""
    return ledger.path.with_name(f"{ledger.path.name}.vault{ticket}.safetensors")


def secret_order_path(ledger: Ledger, ticket: int | None) -> Path:
    """Name the file of a run's secret order, beside the ledger, by the ticket of the run."""
    return ledger.path.with_name(f"{ledger.path.name}.vault{ticket}-order.safetensors")


def list_shard_checkpoints(ledger: Ledger) -> dict[int, Path]:
    """List the shard states of unfinished runs by ticket. Whoever removes a file ends its run."""
    return {
        ticket: file
        for ticket, file in _find_checkpoint_files(ledger)
        if file == shard_checkpoint_path(ledger, ticket)
    }


def _find_checkpoint_files(ledger: Ledger) -> list[tuple[int, Path]]:
    """Find the files of all unfinished runs, partly written ones included, with their tickets."""
    pattern = re.compile(
        re.escape(ledger.path.name) + r"\.vault(\d+)(-order)?\.safetensors(\.\d+\.part)?"
    )
    files = ledger.path.parent.glob("*.vault*")
    matches = [(pattern.fullmatch(file.name), file) for file in files]
    return sorted((int(match[1]), file) for match, file in matches if match)


def describe_leftover_checkpoints(ledger: Ledger, except_ticket: int | None = None) -> list[str]:
    """Describe files of runs that are not finished, or whose folder was removed.

    Args:
        ledger: The ledger that the runs were charged to.
        except_ticket: A run that is left out.

    Returns:
        One sentence per file.
    """
    return [
        f"{file} holds "
        f"{'the secret order of the records' if '-order.' in file.name else 'shard states'} "
        "of a run that is not finished. If the run will not be resumed, remove this file."
        for ticket, file in _find_checkpoint_files(ledger)
        if ticket != except_ticket
    ]


def write_shard_checkpoint(file: Path, state: dict[str, Tensor]) -> None:
    """Write tensors atomically, with a digest, so that only their owner can read them."""
    content = save(dict(state))
    write_atomically(file, hashlib.sha256(content).digest() + content, private=True)


def remove_shard_checkpoint(file: Path) -> None:
    """Remove a file, and what a crash during a write may have left beside it."""
    for leftover in (file, *file.parent.glob(f"{glob.escape(file.name)}.*.part")):
        leftover.unlink(missing_ok=True)


def read_shard_checkpoint(file: Path, expected_state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors and check them.

    Args:
        file: The file.
        expected_state: Tensors of the names, shapes and types that the file must have.

    Returns:
        The tensors by name.

    Raises:
        ReleaseError: If the file was altered or has other names, shapes or types.
    """
    state = read_verified(file)
    # privacy: a state of other shards, if it were reshaped, would mix several of these.
    if {name: (value.shape, value.dtype) for name, value in state.items()} != {
        name: (value.shape, value.dtype) for name, value in expected_state.items()
    }:
        raise ReleaseError(CHECKPOINT_ALTERED.format(file))
    return state


def read_verified(file: Path) -> dict[str, Tensor]:
    """Read tensors whose digest is right; see `read_shard_checkpoint`."""
    message = CHECKPOINT_ALTERED.format(file)
    with reraise_as(ReleaseError, message):
        content = file.read_bytes()
        digest = content[:DIGEST_BYTES]
        tensors = content[DIGEST_BYTES:]
        state = load(tensors)
        if hashlib.sha256(tensors).digest() != digest:
            raise ReleaseError(message)
    return state
