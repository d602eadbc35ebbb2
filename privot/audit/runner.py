"""Audits of a whole method: many runs with and without one planted record, or one run with many of them.

Each run is a whole release, as an owner would make it, with a ledger of its own that is thrown away; it is marked as made for an audit,
so that it does not verify as a release, and the ledger of a sensitive data set lists the runs. An adversary who knows the planted
records looks at what was released; how often the two worlds are told apart bounds epsilon from below (`privot.audit`). What is planted,
how it is scored and how many runs there are is fixed before the first, and nothing is judged before the last. Every run has the same
public seed, which the adversary knows: runs of one world differ by secret randomness alone, no seed can pass for a record, and noise that
came of the public seed would be seen. The folder is as secret as the records:

    plan.json     all that defines the audit, with a digest of the records
    runs.jsonl    a line for each run: its world and its scores
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from privot.attacks.shadows.store import digest, write
from privot.attacks.shadows.train import half_spec
from privot.audit import Bound, Verdict, judge, many_runs, one_run, one_run_gaussian
from privot.audit.canaries import GIVEN, KINDS, canaries, coins
from privot.audit.result import Attack
from privot.audit.roc import chance
from privot.data.dataset import Public, Records, Sensitive
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError, refusing
from privot.methods import make
from privot.privacy.ledger_lookup import record_internal
from privot.privacy.plan import Budget, Neighbours, Plan, Wall
from privot.progress import jsonable
from privot.release import Guarantee, NoGuarantee, Release
from privot.runtime import Progress, Runtime, silent
from privot.synthesis import synthesize
from privot.synthesis.preflight import prepare

SAMPLES = 500  # of a generator, for each canary's class
DELTA = 1e-5  # where nothing is claimed
GAUSSIAN = "analytic Gaussian"  # the accountant whose certificates a Gaussian reading can judge


def along(images: Tensor, canary: Tensor, usual: Tensor) -> float:
    """How far the mean of released images [count, ...] lies from the ``usual`` one towards a canary: all that mean matching can tell."""
    way = (canary - usual).flatten().double()
    return float((images.double().mean(0) - usual).flatten() @ way / way.norm().clamp(min=1e-9))


def near(images: Tensor, canary: Tensor, usual: Tensor) -> float:
    """Minus the distance of the nearest released image; what is usual has no part in it."""
    return -float((images - canary).flatten(1).double().norm(dim=1).min())


SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], float]] = {"mean": along, "nearest": near}


class Kept(NamedTuple):
    """Records that every run has, as they are stored, and whose each is."""

    images: np.ndarray
    labels: np.ndarray
    owners: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Audit:
    """``runs`` with and as many without one canary; or, with ``canaries``, one run in which each of so many is included by a fair coin.

    The two worlds differ as the method's own neighbours do: a record more, or another in its place, or in the place of all that one owner
    has of its class. Declared counts would tell the worlds apart under add-remove, so there they are not declared. ``kind`` is one of
    `privot.audit.canaries`; ``score`` of SCORES.

    >>> from privot.data import load
    >>> quick = {"settings": {"features": 20, "steps": 2}, "epsilon": 5.0, "runs": 4}
    >>> audit = Audit(folder=Path(tempfile.mkdtemp()) / "audit", box=load("digits", public=True), method="merf", **quick)
    >>> audit.run().status
    'holds'
    """

    folder: Path
    box: Sensitive | Public
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    runs: int = 100
    canaries: int = 0
    kind: str = "blank"
    score: str = "mean"
    confidence: float = 0.95
    gaussian: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        chance(self.confidence, "confidence")
        if self.score not in SCORES or self.kind not in KINDS:
            raise SettingError(
                f"score={self.score!r}, kind={self.kind!r}: there are {', '.join(SCORES)}; and {', '.join(KINDS)}"
            )
        if self.runs < 4 or self.canaries < 0 or self.canaries == 1:
            raise SettingError(
                f"runs={self.runs}, canaries={self.canaries}: at least 4 runs a side; or none, or 2 and more, canaries"
            )
        if self.canaries and self._neighbours() is not Neighbours.ADD_REMOVE:
            raise SettingError(
                f"{self.method} is private as to {self._neighbours()}: one run needs records that come and go; leave out canaries"
            )

    @property
    def total(self) -> int:
        """Of runs."""
        return 1 if self.canaries else 2 * self.runs

    def run(self, runtime: Runtime | None = None, progress: Progress = silent) -> Verdict:
        """All runs that are not there yet, then the verdict."""
        runtime = runtime or Runtime()
        (records, planted) = self._parts()
        with self._begun() as done:
            progress("audit runs", done, self.total)
            self._list_runs(records, self.total - done)
            for number in range(done, self.total):
                included = self._included(number)
                with tempfile.TemporaryDirectory() as folder:
                    release = synthesize(
                        self._world(records, planted, included),
                        make(self.method, self.settings),
                        self.epsilon,
                        ledger=f"{folder}/ledger.jsonl",
                        seed=self.seed,
                        runtime=runtime,
                        purpose="audit",
                        notice=lambda text: None,
                    )
                line = {
                    "included": included.tolist(),
                    "scores": self._scores(release, records, planted, runtime),
                }
                with open(
                    self.folder / "runs.jsonl",
                    "a",
                    opener=lambda name, flags: os.open(name, flags, 0o600),
                ) as file:
                    file.write(
                        json.dumps(jsonable({**line, "guarantee": asdict(release.guarantee)}))
                        + "\n"
                    )
                    file.flush()
                    os.fsync(file.fileno())
                progress("audit runs", number + 1, self.total)
        return self.verdict()

    def _list_runs(self, records: Kept, runs: int) -> None:
        """List the runs that are still to do in the ledger of a sensitive data set, before the first of them begins."""
        if runs and not isinstance(self.box, Public):
            plan, limit = self._prepared_plan(self._declared(records.labels))
            record_internal((self.box.name,), "audit", self.method, runs, plan, limit.delta)

    def _prepared_plan(self, spec: Spec) -> tuple[Plan, Wall]:
        return prepare(
            spec,
            make(self.method, self.settings),
            None if self.epsilon is None else Budget(self.epsilon),
        )

    def verdict(self) -> Verdict:
        """What the runs prove, against what was claimed; not before the last, since who may stop at will proves anything."""
        return self._judged()[1]

    def to_json(self) -> dict[str, Any]:
        """The verdict, what was ``audited``, and ``attacks`` as the report reads them: the rates that the verdict was read off."""
        bound, verdict = self._judged()
        fpr, tpr, lower = (
            () if each is None else (each,)
            for each in (bound.highest_fpr, bound.tpr, bound.lowest_tpr)
        )
        name = "audit of the whole method"
        said = f"{bound.how}: {verdict.sentence}"
        public = verdict.publishable
        attack = Attack(
            name, fpr, tpr, lower, bound.confidence, public, verdict=said, refuted=verdict.broken
        )
        plan = self.plan()
        audited = {
            "method": plan["method"],
            "settings": plan["settings"],
            "claimed": verdict.claimed,
        }
        return {"audited": audited, "attacks": [asdict(attack)], **asdict(verdict)}

    def _judged(self) -> tuple[Bound, Verdict]:
        done = self._done()
        if len(done) != self.total:
            raise ReleaseError(
                f"{self.folder}: {len(done)} of {self.total} runs are there; run it again to go on"
            )
        claim = done[0]["guarantee"]
        if any(each["guarantee"] != claim for each in done):
            raise ReleaseError(
                f"{self.folder}: its runs do not all claim the same, so there is no one claim to judge"
            )
        guarantee = Guarantee(**claim) if "epsilon" in claim else NoGuarantee(**claim)
        bound = self.bound(done, guarantee)
        return bound, replace(judge(bound, guarantee), publishable=isinstance(self.box, Public))

    def bound(self, done: list[dict[str, Any]], guarantee: Guarantee | NoGuarantee) -> Bound:
        """The lower bound on epsilon of these runs, at the claim's delta."""
        delta = guarantee.delta if isinstance(guarantee, Guarantee) else DELTA
        included, scores = (
            np.array([each[key] for each in done]) for key in ("included", "scores")
        )
        if self.canaries:
            # Half of them are guessed, a quarter as in and a quarter as out: fixed beforehand.
            way = one_run_gaussian if self.gaussian else one_run
            return way(
                scores[0],
                included[0].astype(bool),
                delta,
                max(2, self.canaries // 2),
                self.confidence,
            )
        inside, outside = (scores[included[:, 0] == world, 0] for world in (True, False))
        return many_runs(inside, outside, delta, self.confidence, gaussian=self.gaussian)

    def _neighbours(self) -> Neighbours:
        """The method's own; of one that claims nothing, records come and go."""
        plan = make(self.method, self.settings).plan(self.box.spec)
        return plan.neighbours if plan.stages else Neighbours.ADD_REMOVE

    def _parts(self) -> tuple[Kept, Records]:
        """The records that every run has (one of which may have to make room), and the canaries. Canaries made of records leave them."""
        count = self.canaries or 1
        generator = torch.Generator().manual_seed(self.seed)
        given = {}
        images = self.box._images
        labels = self.box._labels
        owners = self.box._owners_by(
            np.arange(len(labels))
        )  # the adversary knows whose the other records are
        if self.kind in GIVEN:
            if count >= len(labels):
                raise SettingError(
                    f"canaries={count}: {self.kind} ones are taken from the records, and there are no more of these"
                )
            order = torch.randperm(len(labels), generator=generator)
            taken = self.box._take(order[:count])
            rest = order[count:].sort().values.numpy()
            given = {"images": taken.images, "labels": taken.labels}
            images = images[rest]
            labels = labels[rest]
            owners = owners[rest]
        return Kept(images, labels, owners), canaries(
            self.kind, self.box.spec, count, generator, **given
        )

    def _included(self, number: int) -> np.ndarray:
        """Who is planted in a run: by coins, or the one canary in every other run."""
        if self.canaries:
            return coins(self.canaries)
        return np.array([number % 2 == 1])

    def _world(self, records: Kept, planted: Records, included: np.ndarray) -> Sensitive:
        """The data set of one run."""
        images, labels, owners = records
        scale = 255 if images.dtype == np.uint8 else 1
        more = (
            (planted.images.numpy()[included] * scale)
            .round(0 if scale > 1 else 7)
            .astype(images.dtype)
        )
        if self._neighbours() is Neighbours.ADD_REMOVE:
            images = np.concatenate([images, more])
            labels = np.concatenate([labels, planted.labels.numpy()[included]])
            owners = np.concatenate(
                [owners, np.zeros(len(more), owners.dtype)]
            )  # of the first, if there are several
        elif included.any():
            images = np.array(images)
            place = self._place(records, int(planted.labels[0]))
            images[place] = more[0]
        known = None if self.box.spec.owners is None else owners
        return Sensitive(images, labels, self._declared(labels), name="a world", owners=known)

    def _place(self, records: Kept, label: int) -> np.ndarray:
        """Whose place a canary takes: the first record of its class, so that classes stay as large as declared; or all that one owner has
        of that class, where an owner is what is protected."""
        own = np.flatnonzero(records.labels == label)
        if not len(own):
            raise SettingError(f"class {label} has no record in whose place a canary could stand")
        return (
            own[records.owners[own] == records.owners[own[0]]]
            if self._neighbours() is Neighbours.CLIENT
            else own[:1]
        )

    def _declared(self, labels: np.ndarray) -> Spec:
        """What is declared of a world."""
        if self._neighbours() is Neighbours.ADD_REMOVE:
            return replace(self.box.spec, size=None, class_sizes=None)
        return half_spec(self.box.spec, labels)

    def _scores(
        self, release: Release, records: Kept, planted: Records, runtime: Runtime
    ) -> list[float]:
        """For each canary, how much a release looks as if it was there."""
        scored = SCORES[self.score]
        known = {label: self._usual(records, label) for label in set(planted.labels.tolist())}
        shown = {label: self._shown(release, label, runtime) for label in known}
        return [
            scored(shown[label], image, known[label])
            for image, label in zip(planted.images, planted.labels.tolist(), strict=True)
        ]

    def _shown(self, release: Release, label: int, runtime: Runtime) -> Tensor:
        """Images of one class, of a set all."""
        if release.product.kind == "set":
            return release.product.tensors["images"][release.product.tensors["labels"] == label]
        return release.sample(SAMPLES, torch.full((SAMPLES,), label), device=runtime.target)[0]

    def _usual(self, records: Kept, label: int) -> Tensor:
        """The mean image of a class without canaries, which the adversary knows: [channels, height, width]."""
        own = records.images[records.labels == label]
        mean = (
            own.mean(0, np.float64) / (255 if own.dtype == np.uint8 else 1)
            if len(own)
            else np.full(records.images.shape[1:], 0.5)
        )
        return torch.from_numpy(np.asarray(mean, np.float64))

    def plan(self) -> dict[str, Any]:
        """All that defines the audit, as it stands in plan.json; the confidence may change later. What no run could do is refused."""
        maker = make(self.method, self.settings)
        (records, _) = self._parts()
        spec = self._declared(records.labels)
        try:
            maker.plan(spec)
        except SettingError as error:
            raise SettingError(
                f"{self.method}: the worlds have not one size, so none is declared, and then: {error}"
            ) from None
        plan, _ = self._prepared_plan(spec)
        if (
            self.gaussian
            and any(stage.noise for stage in plan.stages)
            and (accountant := plan.cost().method) != GAUSSIAN
        ):
            raise SettingError(
                f"gaussian: the certificate of {self.method} is by {accountant}, which a Gaussian reading cannot judge"
            )
        keys = ("method", "epsilon", "runs", "canaries", "kind", "score", "gaussian", "seed")
        whole = {
            **{key: getattr(self, key) for key in keys},
            "settings": asdict(maker),  # type: ignore[call-overload]
            "digest": digest(self.box),
        }
        found: dict[str, Any] = json.loads(json.dumps(jsonable(whole)))
        return found

    @contextmanager
    def _begun(self) -> Iterator[int]:
        """The folder, for this process alone, and how many runs of this audit are there."""
        plan = self.plan()
        path = self.folder / "plan.json"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not isinstance(self.box, Public):
            self.folder.chmod(0o700)  # it may have been there before
        if not path.exists() and any(
            not each.name.startswith(("lock", "plan.json")) for each in self.folder.iterdir()
        ):
            raise SettingError(f"{self.folder} holds something else: name another folder")
        with open(self.folder / "lock", "w") as lock:
            try:
                fcntl.flock(
                    lock, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # let go when the process ends, however it ends
            except OSError:
                raise SettingError(f"{self.folder}: another audit is at work there") from None
            if path.exists() and json.loads(path.read_text()) != plan:
                raise SettingError(f"{self.folder} holds another audit: name another folder")
            if not path.exists():
                write(path, json.dumps(plan, indent=1).encode())
            yield len(self._done(mend=True))

    def _done(self, mend: bool = False) -> list[dict[str, Any]]:
        """Runs on disk; a last line that a crash cut off is left out, and with ``mend`` removed."""
        path = self.folder / "runs.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if mend and whole != text:
            write(path, whole.encode())
        with refusing(ReleaseError, f"{path}: not the runs of an audit; name another folder"):
            return [json.loads(line) for line in whole.splitlines()]
