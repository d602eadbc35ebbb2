"""The public random stream of a run, and the checkpoints that depend on it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from privot.io import replace_atomically
from privot.runtime.checkpoint import (
    CHECKPOINTS_PER_STAGE,
    CheckpointTimer,
    read_checkpoint,
    write_checkpoint,
)
from privot.runtime.config import Runtime
from privot.runtime.preview import render_image_grid
from privot.runtime.process_group import SingleProcess


@dataclass(frozen=True)
class Streams:
    """Seeded random generators by name; the manifest records the seed, so the public half replays.

    Attributes:
        seed: The public seed.
        runtime: Device and chunk size.
        run_folder: The folder of an unfinished run, on the public side; None: no checkpoints, as in
            every process but the first of several.
        public_images: Images of the public data set that a setting names, [count, ...].
        process_group: The processes of this run.
    """

    seed: int
    runtime: Runtime = field(default_factory=Runtime)
    run_folder: Path | None = None
    public_images: Tensor | None = field(default=None, compare=False, repr=False)
    process_group: SingleProcess = field(default_factory=SingleProcess)
    _checkpoint_timer: CheckpointTimer = field(
        default_factory=CheckpointTimer, init=False, compare=False, repr=False
    )

    def make_rng(self, name: str, device: str | torch.device = "cpu") -> torch.Generator:
        """Make an independent generator for a named purpose.

        Its seed is a digest of the public seed and the name, because the generator of a CPU uses
        only 32 bits of a seed.
        """
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def compute_once(
        self, name: str, compute: Callable[[], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Compute tensors once in a run, also if the run is resumed.

        A GPU would not reproduce them bit for bit, and later queries and their stored results may
        depend on these very tensors.

        >>> Streams(0).compute_once("start", lambda: {"x": torch.zeros(2)})
        {'x': tensor([0., 0.])}
        """
        state = self.load_checkpoint(name)
        if state is None:
            state = compute()
            self.save_checkpoint(name, state)
        return state

    def is_checkpoint_due(self, step: int, num_steps: int) -> bool:
        """Decide whether a long stage saves a checkpoint after this step. Call it once a step.

        A stage saves about 20 checkpoints, or fewer if saving takes more than a tenth of the time.

        Args:
            step: The step that has ended, from 0.
            num_steps: Steps of the stage.

        Returns:
            The decision, which is the same in all processes of the run.
        """
        enough_work = self._checkpoint_timer.record_step()
        if (step + 1) % max(1, num_steps // CHECKPOINTS_PER_STAGE):
            return False
        # The clock of the first process decides for all.
        (decision,) = self.process_group.broadcast(torch.tensor(enough_work))
        self._checkpoint_timer.is_saving = bool(decision)
        return self._checkpoint_timer.is_saving

    def save_checkpoint(self, name: str, state: dict[str, Tensor]) -> None:
        """Save public tensors in place of the last checkpoint of this name."""
        if self.run_folder is not None:
            write_checkpoint(self.run_folder, name, state)

    def load_checkpoint(self, name: str) -> dict[str, Tensor] | None:
        """Load the last checkpoint of this name, on the device of the run; None if there is none.

        Raises:
            ReleaseError: If the checkpoint was altered.
        """
        state = self.process_group.broadcast_optional(self._read_checkpoint(name))
        return state and {key: value.to(self.runtime.torch_device) for key, value in state.items()}

    def _read_checkpoint(self, name: str) -> dict[str, Tensor] | None:
        return None if self.run_folder is None else read_checkpoint(self.run_folder, name)

    def save_preview(self, images: Tensor, columns: int) -> None:
        """Save generated images as ``samples.png`` in the folder of the unfinished run.

        Args:
            images: Public images, [count, channels, height, width].
            columns: Images in a row of the grid.
        """
        if self.run_folder is not None:
            with replace_atomically(self.run_folder / "samples.png") as part:
                render_image_grid(images.detach(), columns).save(part)
