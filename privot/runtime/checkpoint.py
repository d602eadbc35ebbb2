"""When a long stage saves a checkpoint, and the public checkpoint files of a run."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from privot.errors import ReleaseError
from privot.io import write_atomically

CHECKPOINTS_PER_STAGE = 20  # a crash then loses little of what the budget was spent on
CHEAP_SAVE_SECONDS = 1.0  # a checkpoint that takes less time is saved whenever it is due
# Work between two expensive checkpoints, relative to the time that one takes to save: the states
# of a thousand critics have gigabytes.
WORK_TO_SAVE_RATIO = 9
DIGEST_LENGTH = 16  # hexadecimal digits of the SHA-256 in the name of a checkpoint file


@dataclass
class CheckpointTimer:
    """Measures how long a checkpoint takes: a step that saves one minus a step that does not."""

    last_step_time: float | None = None  # seconds, at the last call of `record_step`
    step_seconds: float | None = None  # between the last two calls without a checkpoint
    save_seconds: float = 0.0
    last_save_time: float = -math.inf
    is_saving: bool = False

    def record_step(self) -> bool:
        """Record that a step has ended.

        Returns:
            Whether enough work was done since the last checkpoint for another one.
        """
        now = time.monotonic()
        if self.last_step_time is not None:
            elapsed = now - self.last_step_time
            if not self.is_saving:
                self.step_seconds = elapsed
            elif self.step_seconds is not None:
                self.save_seconds = elapsed - self.step_seconds
                self.last_save_time = now
        self.last_step_time = now
        self.is_saving = False
        return (
            self.save_seconds < CHEAP_SAVE_SECONDS
            or now - self.last_save_time >= WORK_TO_SAVE_RATIO * self.save_seconds
        )


def write_checkpoint(folder: Path, name: str, state: dict[str, Tensor]) -> None:
    """Replace the checkpoint of this name in a folder.

    Args:
        folder: The folder of the run.
        name: The name of the checkpoint.
        state: Public tensors by name.
    """
    old_files = _list_checkpoint_files(folder, name)
    content = save({key: value.detach().cpu().contiguous() for key, value in state.items()})
    new_file = folder / f"{_checkpoint_prefix(name)}{_digest(content)}.safetensors"
    write_atomically(new_file, content)
    for file in old_files:
        if file != new_file:
            file.unlink()


def read_checkpoint(folder: Path, name: str) -> dict[str, Tensor] | None:
    """Read the newest checkpoint of this name; None if there is none.

    Raises:
        ReleaseError: If its content does not match the digest in its name.
    """
    files = _list_checkpoint_files(folder, name)
    if not files:
        return None
    # A crash between writing the new file and removing the old one leaves both.
    file = max(files, key=lambda candidate: candidate.stat().st_mtime_ns)
    content = file.read_bytes()
    if _digest(content) != file.name[len(_checkpoint_prefix(name)) : -len(".safetensors")]:
        raise ReleaseError(
            f"{file}: this checkpoint of an unfinished run was altered. Start a new run, "
            "which is charged again."
        )
    return load(content)


def _list_checkpoint_files(folder: Path, name: str) -> list[Path]:
    return list(folder.glob(f"{_checkpoint_prefix(name)}*.safetensors"))


def _checkpoint_prefix(name: str) -> str:
    return f"{name.replace(' ', '-')}.public."


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]
