"""The folder of an audit's runs, which is as secret as the records.

plan.json     all that defines the audit, with a digest of the records
runs.jsonl    a line for each run: which canaries it includes, their scores and the claim
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privot.errors import ReleaseError, SettingError, reraise_as
from privot.io import to_jsonable, write_atomically

OWN_FILES = ("lock", "plan.json")  # what a folder may hold before its plan is written


@dataclass(frozen=True)
class RunStore:
    """Stored runs of an audit.

    Attributes:
        folder: The folder.
    """

    folder: Path

    @contextmanager
    def lock(self, plan: dict[str, Any], private: bool) -> Iterator[int]:
        """Lock the folder for this process and write its plan, or check that it has the same plan.

        Args:
            plan: All that defines the audit.
            private: Whether only the user who runs this process may read the folder.

        Yields:
            The number of complete runs.

        Raises:
            SettingError: If the folder holds something else, or another process uses it.
        """
        path = self.folder / "plan.json"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if private:
            self.folder.chmod(0o700)  # the folder may have existed before
        if not path.exists() and any(
            not each.name.startswith(OWN_FILES) for each in self.folder.iterdir()
        ):
            raise SettingError(f"{self.folder} holds something else. Choose another folder.")
        with open(self.folder / "lock", "w") as lock:
            try:
                # The operating system releases the lock whenever the process ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SettingError(
                    f"{self.folder}: another audit uses this folder. Wait until it has ended."
                ) from None
            if path.exists() and json.loads(path.read_text()) != plan:
                raise SettingError(f"{self.folder} holds another audit. Choose another folder.")
            if not path.exists():
                write_atomically(path, json.dumps(plan, indent=1).encode(), private=True)
            yield len(self.read(repair=True))

    def append(self, **run: Any) -> None:
        """Append the facts of a run to runs.jsonl and wait until the disk has stored them."""
        line = json.dumps(to_jsonable(run)) + "\n"
        path = self.folder / "runs.jsonl"
        with open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def read(self, repair: bool = False) -> list[dict[str, Any]]:
        """Read the stored runs.

        Args:
            repair: Whether to remove a last line that a crash cut off. Otherwise it is ignored.

        Returns:
            The facts of each complete run.

        Raises:
            ReleaseError: If the file holds something else.
        """
        path = self.folder / "runs.jsonl"
        text = path.read_text() if path.exists() else ""
        complete_lines = text[: text.rfind("\n") + 1]
        if repair and complete_lines != text:
            write_atomically(path, complete_lines.encode(), private=True)
        message = f"{path}: these are no runs of an audit. Choose another folder."
        with reraise_as(ReleaseError, message):
            return [json.loads(line) for line in complete_lines.splitlines()]
