"""Shadows: many preparations of one method, each on its own random half of the candidates, for attacks that compare victims.

A preparation is {split, release by the method, a classifier trained on it, an observation of every candidate}. All that comes of it lies
in one folder, which is as secret as the candidates:

    plan.json               all that defines the run, with a digest of the candidates
    members.npz             [shadows, candidates]: whose half each candidate is in
    releases/00007/         what the method made, a folder of `Release.save`
    shadow-00007.npz        what was observed, float64 [candidates] or [candidates, queries]; and a few facts
    candidates.safetensors  the candidates themselves, only while several processes or a cluster are at work; a run that was killed leaves
                            it there until the next, so the folder must be where the records themselves may be

Every file is written beside its place and renamed, so what is there is whole, and a run that was broken off goes on.
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

from privot.attacks.membership.lira import half
from privot.attacks.shadows.observe import OBSERVATIONS, refuse_unknown
from privot.attacks.shadows.store import Prepared, digest, write
from privot.data.dataset import Public, Sensitive
from privot.errors import SettingError
from privot.methods import make
from privot.privacy.ledger_lookup import record_internal
from privot.privacy.plan import Budget, Plan, Wall
from privot.progress import jsonable
from privot.runtime import Progress, Runtime, silent
from privot.synthesis.preflight import prepare

FORMAT = 1
BESIDE = ("distribution-matching", "real-subset")  # methods whose sets are made side by side


@dataclass(frozen=True, kw_only=True)
class Shadows:
    """``count`` shadows of a method, prepared in ``folder``. No field but the folder may differ when a run goes on.

    ``box`` holds the candidates, ``epsilon`` is for a method with a mechanism (at delta 1e-5). ``epochs`` are those of a classifier, by
    the protocol of the condensation papers; a generator is asked for ``samples`` images to train on. ``at_once`` shadows are made side by
    side by methods that can, see BESIDE. Shadow s has the public seed ``seed`` + 1 + s; what shadows share, such as the random networks of
    DM side by side, has ``seed``: an attacker knows both, since a manifest states them.

    >>> import tempfile
    >>> from privot.data import load
    >>> quick = {"method": "real-subset", "settings": {"per_class": 2}, "count": 2, "epochs": 1}
    >>> prepared = Shadows(folder=Path(tempfile.mkdtemp()) / "shadows", box=load("digits", public=True), **quick).prepare()
    >>> prepared.observed("confidence").shape, prepared.publishable
    ((2, 1438), True)
    """

    folder: Path
    box: Sensitive | Public
    method: str = "distribution-matching"
    settings: dict[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    count: int = 256
    seed: int = 0
    observations: tuple[str, ...] = OBSERVATIONS
    epochs: int = 300
    samples: int = 5000
    at_once: int = 128
    sources: tuple[str, ...] | None = (
        None  # names of the sensitive data sets that the candidates are from; if None, that of the box
    )

    def __post_init__(self) -> None:
        refuse_unknown(self.observations)
        for key in ("epochs", "samples", "at_once"):
            if getattr(self, key) < 1:
                raise SettingError(f"{key}={getattr(self, key)}: at least 1 is needed")
        if self.count < 2 or self.count % 2:
            raise SettingError(
                f"shadows={self.count}: an even number is needed, so that each candidate can be in half of them"
            )

    def plan(self) -> dict[str, Any]:
        """All that defines the run, as it stands in plan.json."""
        maker = make(self.method, self.settings)
        self._prepared_plan()
        own = {
            key: getattr(self, key)
            for key in (
                "method",
                "epsilon",
                "count",
                "seed",
                "observations",
                "epochs",
                "samples",
                "at_once",
            )
        }
        settings = dataclasses.asdict(maker)  # type: ignore[call-overload]
        candidates = {
            "size": self.box._count(),
            "digest": digest(self.box),
            "spec": self.box.spec.to_json(),
        }
        whole = {
            "format": FORMAT,
            **own,
            "settings": settings,
            "candidates": candidates,
            "public": isinstance(self.box, Public),
        }
        found: dict[str, Any] = json.loads(json.dumps(jsonable(whole)))
        return found

    def batches(self) -> list[list[int]]:
        """Which shadows are made together; always the same, whoever makes them, so that the results are too."""
        size = self.at_once if self.method in BESIDE else 1
        return [
            list(range(begin, min(begin + size, self.count)))
            for begin in range(0, self.count, size)
        ]

    def members(self) -> NDArray[np.bool_]:
        """[shadows, candidates]."""
        return half(self.box._count(), self.count, torch.Generator().manual_seed(self.seed))

    def prepare(
        self,
        runtime: Runtime | None = None,
        progress: Progress = silent,
        *,
        workers: int = 1,
        ray: bool = False,
    ) -> Prepared:
        """Prepare the shadows that are not there yet: here, in so many processes on this host, or on a Ray cluster."""
        from privot.attacks.shadows import workers as ways

        runtime = runtime or Runtime()
        with self.begun() as prepared:
            todo = [
                number
                for number, batch in enumerate(self.batches())
                if not all(prepared.path(each).exists() for each in batch)
            ]
            progress("shadows", prepared.done(), self.count)
            if not todo:
                return prepared
            self._list_runs(prepared, todo)
            if ray:
                ways.on_ray(self, todo, runtime, progress)
            elif workers > 1:
                ways.in_processes(self, todo, workers, runtime, progress)
            else:
                ways.here(self, todo, runtime, progress)
        return prepared

    def _list_runs(self, prepared: Prepared, todo: list[int]) -> None:
        """List the runs that are still to do in the ledgers of the sensitive data sets, before the first of them begins."""
        own = () if isinstance(self.box, Public) else (self.box.name,)
        names = own if self.sources is None else self.sources
        batches = self.batches()
        runs = sum(not prepared.made(each).exists() for number in todo for each in batches[number])
        if names and runs:
            plan, limit = self._prepared_plan()
            record_internal(names, "shadow", self.method, runs, plan, limit.delta)

    def _prepared_plan(self) -> tuple[Plan, Wall]:
        """The plan of a shadow and its budget; whatever no shadow could do is refused."""
        return prepare(
            self.box.spec,
            make(self.method, self.settings),
            None if self.epsilon is None else Budget(self.epsilon),
        )

    @contextmanager
    def begun(self) -> Iterator[Prepared]:
        """The folder with its plan, for this run alone. Releases that lie in it are taken as they are."""
        plan = self.plan()
        prepared = Prepared(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # as secret as the candidates
        ours = ("lock", "plan.json", "members.npz")
        known = (self.folder / "plan.json").exists()
        if strange := [
            each.name
            for each in self.folder.iterdir()
            if not known and not each.name.startswith(ours)
        ]:
            raise SettingError(
                f"{self.folder} holds something else ({strange[0]}): name another folder"
            )
        with open(self.folder / "lock", "w") as lock:
            try:
                fcntl.flock(
                    lock, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # let go when the process ends, however it ends
            except OSError:
                raise SettingError(f"{self.folder}: another run is at work there") from None
            if not isinstance(self.box, Public):
                self.folder.chmod(0o700)  # it may have been there before
            for left in self.folder.glob("tmp*"):  # of a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            if (self.folder / "plan.json").exists():
                if other := sorted(
                    key
                    for key in plan.keys() | prepared.plan.keys()
                    if plan.get(key) != prepared.plan.get(key)
                ):
                    raise SettingError(
                        f"{self.folder} holds shadows of another plan ({', '.join(other)} differ): name another folder"
                    )
            else:
                write(self.folder / "members.npz", {"members": self.members()})
                write(
                    self.folder / "plan.json", json.dumps(plan, indent=1).encode()
                )  # last: it vouches for the rest
            yield prepared
