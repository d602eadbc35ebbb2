"""The folder of an unfinished run, which lies beside the release that the run will write.

It holds ``run.json``, the facts of the run, and what is needed to resume the run: the ticket of its
reservation, query results and checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privot.errors import ReleaseError

FACTS_FILE = "run.json"
UNFINISHED_FACTS_FILE = "run.part"


@dataclass(frozen=True)
class RunFolder:
    """The folder of an unfinished run.

    Attributes:
        path: The folder.
        missing_folders: The folder and those above it that did not exist before the run.
    """

    path: Path
    missing_folders: tuple[Path, ...]

    @classmethod
    def locate(
        cls, out: Path, facts: dict[str, Any], resume: bool, adjustable_settings: tuple[str, ...]
    ) -> RunFolder:
        """Find the folder of a run, and refuse it unless the run may use it.

        Args:
            out: The folder of the release that the run will write.
            facts: What defines the run; plain data.
            resume: Whether to resume the run in the folder.
            adjustable_settings: Settings that a resumed run may change.

        Returns:
            The folder. It need not exist yet.

        Raises:
            ReleaseError: If the release exists, or the folder holds another run, or a run that is
                not to be resumed.
        """
        if out.exists():
            raise ReleaseError(f"{out} already exists. Choose another folder or remove it.")
        path = _locate_path(out)
        folder = cls(path, tuple(above for above in (path, *path.parents) if not above.exists()))
        try:
            stored_facts = json.loads((path / FACTS_FILE).read_text())
        except (FileNotFoundError, NotADirectoryError):
            if path.exists() and any(file.name != UNFINISHED_FACTS_FILE for file in path.iterdir()):
                # Query results without a run.json may belong to another plan. They must not get
                # into the release of this plan.
                raise ReleaseError(
                    f"{path} holds files of another run. Remove it (any charge stays)."
                ) from None
            return folder
        except (OSError, ValueError) as error:
            raise ReleaseError(
                f"{path / FACTS_FILE} cannot be read ({type(error).__name__}). Remove {path} (any "
                "charge stays)."
            ) from None
        if not resume:
            raise ReleaseError(
                f"{path} holds an unfinished run. Resume it with --resume, or remove it (any "
                "charge stays)."
            )
        plain_facts = json.loads(json.dumps(facts))
        if _drop_settings(stored_facts, adjustable_settings) != _drop_settings(
            plain_facts, adjustable_settings
        ):
            raise ReleaseError(
                f"{path} holds a run with other settings. Resume it with the same settings, or "
                "remove it (any charge stays)."
            )
        return folder

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Write what defines the run, before the folder holds anything else."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            part = self.path / UNFINISHED_FACTS_FILE
            part.write_text(json.dumps(facts))
            part.replace(self.path / FACTS_FILE)
        except OSError as error:
            raise ReleaseError(
                f"{self.path} cannot be written ({error.strerror}). Choose another folder for the "
                "release."
            ) from None

    def has_progress(self) -> bool:
        """Whether the folder holds more than the facts of the run."""
        return any(
            file.name not in (FACTS_FILE, UNFINISHED_FACTS_FILE) for file in self.path.iterdir()
        )

    def remove(self) -> None:
        """Remove the folder after the release was written."""
        shutil.rmtree(self.path)

    def undo(self) -> None:
        """Remove the folder of a refused run, and the empty folders above that were made for it."""
        shutil.rmtree(self.path, ignore_errors=True)
        for above in self.missing_folders[1:]:
            with contextlib.suppress(OSError):
                above.rmdir()


def read_run_settings(out: Path, method_name: str) -> dict[str, Any]:
    """Read the settings of an unfinished run, so that defaults of another device change nothing.

    Args:
        out: The folder of the release that the run will write.
        method_name: The name of the method.

    Returns:
        All settings of the run; none where there is no readable run of this method. `RunFolder`
        reports what is wrong with the folder.
    """
    try:
        facts = json.loads((_locate_path(out) / FACTS_FILE).read_text())
        return dict(facts["settings"]) if facts["method"] == method_name else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _locate_path(out: Path) -> Path:
    """Give the path of the run folder beside a release."""
    return out.with_name(out.name + ".run")


def _drop_settings(facts: Any, names: tuple[str, ...]) -> Any:
    """Give the facts of a run without some settings."""
    if not (isinstance(facts, dict) and isinstance(facts.get("settings"), dict)):
        return facts
    settings = {key: value for key, value in facts["settings"].items() if key not in names}
    return {**facts, "settings": settings}
