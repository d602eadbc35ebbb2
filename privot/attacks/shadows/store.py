"""The folder of prepared shadows.

All that is prepared is in one folder, which is as secret as the candidates:

    plan.json               all that defines the run, with a digest of the candidates
    members.npz             [shadows, candidates]: the half of the candidates of each shadow
    releases/00007/         what the method generated, a folder of `Release.save`
    shadow-00007.npz        observations, float64 [candidates] or [candidates, queries], and facts
    candidates.safetensors  the candidates, only while several processes or a cluster are at work. A
                            killed run leaves it there until the next run, so the folder must be
                            where the records themselves may be.

Every file is written under another name and renamed. So a file that exists is complete, and an
interrupted run can be resumed.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privot.errors import ReleaseError, SettingError, reraise_as
from privot.io import write_atomically
from privot.release import Release

# Facts of each shadow: the number of its members, and the accuracy of its classifier on members
# and on non-members.
SHADOW_FACTS = ("records", "accuracy_in", "accuracy_out")


@dataclass(frozen=True)
class ShadowStore:
    """A folder that `prepare_shadows` fills.

    Attributes:
        folder: The folder.
    """

    folder: Path

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Content of ``plan.json``."""
        message = (
            f"{self.folder}: this is no folder of shadows. Name one that shadows were prepared in."
        )
        with reraise_as(ReleaseError, message):
            return dict(json.loads((self.folder / "plan.json").read_text()))

    @property
    def publishable(self) -> bool:
        """Whether numbers about the shadows may be published, since the candidates are public."""
        return self.plan["public"] is True

    def observation_path(self, shadow_index: int) -> Path:
        """Name the file of a shadow's observations."""
        return self.folder / f"shadow-{shadow_index:05d}.npz"

    def release_path(self, shadow_index: int) -> Path:
        """Name the folder of a shadow's release."""
        return self.folder / "releases" / f"{shadow_index:05d}"

    def load_release(self, shadow_index: int) -> Release:
        """Load what the method generated from a shadow's half."""
        return Release.load(self.release_path(shadow_index))

    def count_completed(self) -> int:
        """Count the shadows whose observations are stored."""
        return sum(1 for _ in self.folder.glob("shadow-*.npz"))

    def load_membership(self) -> NDArray[np.bool_]:
        """Load which candidate is in which shadow's half: bool [shadows, candidates]."""
        with np.load(self.folder / "members.npz", allow_pickle=False) as file:
            membership: NDArray[np.bool_] = file["members"]
        return membership

    def load_observation(self, name: str) -> NDArray[np.float64]:
        """Load one observation of all shadows as a memory-mapped array.

        The array is assembled once, a shadow at a time, so memory holds one shadow only.

        Args:
            name: One of `OBSERVATIONS`.

        Returns:
            Float64 [shadows, candidates] or [shadows, candidates, queries].

        Raises:
            SettingError: If this was not observed.
            ReleaseError: If shadows are missing.
        """
        num_shadows = self.plan["num_shadows"]
        if name not in self.plan["observations"]:
            raise SettingError(
                f"{name!r} was not observed. Choose one of {', '.join(self.plan['observations'])}."
            )
        if (missing := num_shadows - self.count_completed()) > 0:
            raise ReleaseError(
                f"{self.folder}: {missing} of {num_shadows} shadows are missing. Run it again to "
                "resume."
            )
        path = self.folder / f"{name}.npy"
        if not path.exists():
            part = path.with_suffix(".npy.part")
            for shadow_index in range(num_shadows):
                row = self._load_array(shadow_index, name)
                if shadow_index == 0:
                    whole = np.lib.format.open_memmap(
                        part, "w+", np.float64, (num_shadows, *row.shape)
                    )
                whole[shadow_index] = row
            whole.flush()
            part.replace(path)
        observation: NDArray[np.float64] = np.load(path, mmap_mode="r", allow_pickle=False)
        return observation

    def load_fact(self, name: str) -> NDArray[np.float64]:
        """Load one of `SHADOW_FACTS` for each shadow: [shadows]."""
        return np.array(
            [float(self._load_array(index, name)) for index in range(self.plan["num_shadows"])]
        )

    def _load_array(self, shadow_index: int, name: str) -> NDArray[Any]:
        """Load one array of a shadow's file."""
        path = self.observation_path(shadow_index)
        message = f"{path}: these are no observations of a shadow. Remove the file and run again."
        with reraise_as(ReleaseError, message), np.load(path, allow_pickle=False) as file:
            array: NDArray[Any] = file[name]
        return array


def write_private_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write arrays as .npz atomically, readable by the user of this process only."""
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **arrays)
    write_atomically(path, stream.getvalue(), private=True)
