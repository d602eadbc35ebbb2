"""Configuration of shadows: what defines the releases and classifiers that attacks compare with.

A shadow is {a random half of the candidates, a release of the method for this half, a classifier
trained on the release, an observation of every candidate}. `privot.attacks.shadows.store` describes
the folder, and `privot.attacks.shadows.runner` prepares shadows.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from privot.attacks.membership.lira import balanced_membership
from privot.attacks.shadows.observe import OBSERVATIONS, validate_observations
from privot.attacks.shadows.store import ShadowStore, write_private_arrays
from privot.data.dataset import Public, Sensitive
from privot.data.fingerprint import hash_dataset
from privot.errors import SettingError
from privot.io import to_jsonable, write_atomically
from privot.methods import make_method
from privot.privacy.plan import Budget, Plan, PrivacyTarget
from privot.synthesis.preflight import resolve_plan

PLAN_FORMAT = 1
PARALLEL_METHODS = ("distribution-matching", "real-subset")  # methods that make sets in batches
PLAN_FIELDS = (
    "method",
    "epsilon",
    "num_shadows",
    "seed",
    "observations",
    "epochs",
    "num_samples",
    "shadows_per_batch",
)
OWN_FILES = ("lock", "plan.json", "members.npz")  # what a folder may hold before its plan is whole


@dataclass(frozen=True, kw_only=True)
class ShadowConfig:
    """What defines the shadows of a folder. No field but the folder may change on resuming.

    Shadow s has the public seed ``seed`` + 1 + s. What shadows share, such as the random networks
    of a batch of DM, has the seed ``seed``. An attacker knows both, since a manifest states them.

    Attributes:
        folder: Where the shadows are, or will be.
        dataset: The candidates.
        method: Name of the method.
        settings: Its settings.
        epsilon: Budget of a method with a mechanism, at delta 1e-5.
        num_shadows: Number of shadows, even.
        seed: Seed of the halves and the shadows.
        observations: What is observed of each shadow.
        epochs: Training epochs of a classifier, by the protocol of the condensation papers.
        num_samples: Images that a generator samples to train the classifier.
        shadows_per_batch: Shadows that are made together by one of `PARALLEL_METHODS`.
        source_names: Names of the sensitive data sets that the candidates come from, whose ledgers
            list the runs. None: the name of ``dataset``.

    >>> import tempfile
    >>> from privot.attacks.shadows.runner import prepare_shadows
    >>> from privot.data import load_dataset
    >>> digits = load_dataset("digits", public=True)
    >>> fast = {"method": "real-subset", "settings": {"images_per_class": 2}, "epochs": 1}
    >>> folder = Path(tempfile.mkdtemp()) / "shadows"
    >>> store = prepare_shadows(ShadowConfig(folder=folder, dataset=digits, num_shadows=2, **fast))
    >>> store.load_observation("confidence").shape, store.publishable
    ((2, 1438), True)
    """

    folder: Path
    dataset: Sensitive | Public
    method: str = "distribution-matching"
    settings: dict[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    num_shadows: int = 256
    seed: int = 0
    observations: tuple[str, ...] = OBSERVATIONS
    epochs: int = 300
    num_samples: int = 5000
    shadows_per_batch: int = 128
    source_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        validate_observations(self.observations)
        for key in ("epochs", "num_samples", "shadows_per_batch"):
            if getattr(self, key) < 1:
                raise SettingError(f"{key}={getattr(self, key)}: it must be at least 1")
        if self.num_shadows < 2 or self.num_shadows % 2:
            raise SettingError(
                f"shadows={self.num_shadows}: give an even number, so that each candidate can be "
                "in half of the shadows"
            )

    def describe_plan(self) -> dict[str, Any]:
        """Describe all that defines the run, as it is stored in plan.json."""
        method = make_method(self.method, self.settings)
        self.resolve_plan()
        plan = {
            "format": PLAN_FORMAT,
            **{key: getattr(self, key) for key in PLAN_FIELDS},
            "settings": dataclasses.asdict(method),  # type: ignore[call-overload]
            "candidates": {
                "size": self.dataset._count_records(),
                "digest": hash_dataset(self.dataset),
                "spec": self.dataset.spec.to_json(),
            },
            "public": isinstance(self.dataset, Public),
        }
        plain: dict[str, Any] = json.loads(json.dumps(to_jsonable(plan)))
        return plain

    def split_batches(self) -> list[list[int]]:
        """Divide the shadows into batches that are made together.

        The batches do not depend on who makes them, and so the results do not either.
        """
        size = self.shadows_per_batch if self.method in PARALLEL_METHODS else 1
        return [
            list(range(start, min(start + size, self.num_shadows)))
            for start in range(0, self.num_shadows, size)
        ]

    def draw_membership(self) -> NDArray[np.bool_]:
        """Draw the half of the candidates of each shadow: bool [shadows, candidates]."""
        return balanced_membership(
            self.dataset._count_records(),
            self.num_shadows,
            torch.Generator().manual_seed(self.seed),
        )

    def resolve_plan(self) -> tuple[Plan, PrivacyTarget]:
        """Compute the plan of a shadow and its privacy target.

        Raises:
            SettingError: If no shadow could be made with these settings.
        """
        return resolve_plan(
            self.dataset.spec,
            make_method(self.method, self.settings),
            None if self.epsilon is None else Budget(self.epsilon),
        )

    @contextmanager
    def open_store(self) -> Iterator[ShadowStore]:
        """Lock the folder for this run and write its plan, or check that it has the same plan.

        Releases that are already in the folder are used as they are.

        Raises:
            SettingError: If the folder holds something else, or another run uses it.
        """
        plan = self.describe_plan()
        store = ShadowStore(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # as secret as the candidates
        self._refuse_other_content()
        with open(self.folder / "lock", "w") as lock:
            try:
                # The operating system releases the lock whenever the process ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SettingError(
                    f"{self.folder}: another run uses this folder. Wait until it has ended."
                ) from None
            if not isinstance(self.dataset, Public):
                self.folder.chmod(0o700)  # the folder may have existed before
            for leftover in self.folder.glob("tmp*"):  # of a killed run
                shutil.rmtree(leftover, ignore_errors=True)
            if (self.folder / "plan.json").exists():
                self._refuse_other_plan(plan, store.plan)
            else:
                write_private_arrays(
                    self.folder / "members.npz", {"members": self.draw_membership()}
                )
                # Written last: its presence shows that the folder is complete.
                write_atomically(
                    self.folder / "plan.json", json.dumps(plan, indent=1).encode(), private=True
                )
            yield store

    def _refuse_other_content(self) -> None:
        """Raise if the folder has no plan but files that are not ours."""
        if (self.folder / "plan.json").exists():
            return
        for path in self.folder.iterdir():
            if not path.name.startswith(OWN_FILES):
                raise SettingError(
                    f"{self.folder} holds something else ({path.name}). Choose another folder."
                )

    def _refuse_other_plan(self, plan: dict[str, Any], stored_plan: dict[str, Any]) -> None:
        """Raise if the folder belongs to a run with other settings."""
        keys = plan.keys() | stored_plan.keys()
        if differing := sorted(key for key in keys if plan.get(key) != stored_plan.get(key)):
            raise SettingError(
                f"{self.folder} holds shadows of another plan ({', '.join(differing)} differ). "
                "Choose another folder."
            )
