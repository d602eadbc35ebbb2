"""The folder of prepared shadows, for those who read it and those who fill it."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privot.data.dataset import CHECKED, Public, Sensitive
from privot.errors import ReleaseError, SettingError, refusing
from privot.io import put
from privot.release import Release

FACTS = (
    "records",
    "accuracy_in",
    "accuracy_out",
)  # of a shadow: its members, and how often its classifier is right about them and others


@dataclass(frozen=True)
class Prepared:
    """What `Shadows.prepare` left in a folder."""

    folder: Path

    @cached_property
    def plan(self) -> dict[str, Any]:
        with refusing(
            ReleaseError,
            f"{self.folder}: not a folder of shadows; name one that `Shadows.prepare` filled",
        ):
            return dict(json.loads((self.folder / "plan.json").read_text()))

    @property
    def publishable(self) -> bool:
        """Whether numbers about the shadows may be published: the candidates are public data."""
        return self.plan["public"] is True

    def path(self, shadow: int) -> Path:
        """Where the observations of a shadow are, or will be."""
        return self.folder / f"shadow-{shadow:05d}.npz"

    def made(self, shadow: int) -> Path:
        """Where the release of a shadow is, or will be."""
        return self.folder / "releases" / f"{shadow:05d}"

    def release(self, shadow: int) -> Release:
        """What the method made of the shadow's half."""
        return Release.load(self.made(shadow))

    def done(self) -> int:
        """How many shadows are observed."""
        return sum(1 for _ in self.folder.glob("shadow-*.npz"))

    def members(self) -> NDArray[np.bool_]:
        """[shadows, candidates]: who is in whose half."""
        with np.load(self.folder / "members.npz", allow_pickle=False) as file:
            found: NDArray[np.bool_] = file["members"]
        return found

    def observed(self, name: str) -> NDArray[np.float64]:
        """One observation by all shadows, [shadows, candidates] or [shadows, candidates, queries], mapped from disk.

        It is put together once, a shadow at a time, so memory holds one of them however many there are.
        """
        if name not in self.plan["observations"]:
            raise SettingError(f"{name!r} was not observed: {', '.join(self.plan['observations'])}")
        if (missing := self.plan["count"] - self.done()) > 0:
            raise ReleaseError(
                f"{self.folder}: {missing} of {self.plan['count']} shadows are not prepared yet; run it again to go on"
            )
        if not (path := self.folder / f"{name}.npy").exists():
            part = path.with_suffix(".npy.part")
            for shadow in range(self.plan["count"]):
                row = self._row(shadow, name)
                if shadow == 0:
                    whole = np.lib.format.open_memmap(
                        part, "w+", np.float64, (self.plan["count"], *row.shape)
                    )
                whole[shadow] = row
            whole.flush()
            part.replace(path)
        found: NDArray[np.float64] = np.load(path, mmap_mode="r", allow_pickle=False)
        return found

    def fact(self, name: str) -> NDArray[np.float64]:
        """One of FACTS for each shadow, [shadows]."""
        return np.array([float(self._row(shadow, name)) for shadow in range(self.plan["count"])])

    def _row(self, shadow: int, name: str) -> NDArray[Any]:
        with refusing(
            ReleaseError,
            f"{self.path(shadow)}: not the observations of a shadow; remove it and run again",
        ):
            with np.load(self.path(shadow), allow_pickle=False) as file:
                found: NDArray[Any] = file[name]
        return found


def digest(box: Sensitive | Public) -> str:
    """SHA-256 of the records as a box gives them, in portions."""
    found = hashlib.sha256()
    for begin in range(0, box._count(), CHECKED):
        images, labels = box._take(slice(begin, begin + CHECKED))
        found.update(images.numpy().tobytes() + labels.numpy().tobytes())
    return found.hexdigest()


def write(path: Path, content: bytes | dict[str, NDArray[Any]], mode: int = 0o600) -> None:
    """A file, bytes or arrays as .npz, that is there whole or not at all; its owner's alone unless the ``mode`` says otherwise."""
    if not isinstance(content, bytes):
        np.savez(stream := io.BytesIO(), allow_pickle=False, **content)
        content = stream.getvalue()
    put(path, content, mode)
