"""Audits of a whole method: many runs with and without one planted record, or one run with many of them.

Each run is a whole release, as an owner would make it, with a ledger of its own that is thrown away. An adversary who knows the planted
records looks at what was released; how often the two worlds are told apart bounds epsilon from below (`privot.audit`). What is planted,
how it is scored and how many runs there are is fixed before the first. The folder is as secret as the records:

    plan.json     all that defines the audit, with a digest of the records
    runs.jsonl    a line for each run: its world and its scores
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from privot.attacks.membership.canaries import GIVEN, canaries, coins
from privot.attacks.prepared import digest, write
from privot.audit import Bound, Verdict, judge, many_runs, one_run
from privot.data.records import Public, Records, Sensitive
from privot.errors import ReleaseError, SettingError, refusing
from privot.methods import make
from privot.privacy.plan import Neighbours
from privot.release import Guarantee, NoGuarantee, Release
from privot.runtime import Progress, Runtime, silent
from privot.show import jsonable
from privot.synthesis import synthesize

SAMPLES = 500  # of a generator, for each canary's class


def along(images: Tensor, canary: Tensor) -> float:
    """How far the mean of released images [count, ...] lies toward a canary, seen from mid-grey: all that mean matching can tell."""
    way = (canary - 0.5).flatten().double()
    return float((images.double().mean(0).flatten() - 0.5) @ way / way.norm().clamp(min=1e-9))


def near(images: Tensor, canary: Tensor) -> float:
    """Minus the distance of the nearest released image."""
    return -float((images - canary).flatten(1).double().norm(dim=1).min())


SCORES: dict[str, Callable[[Tensor, Tensor], float]] = {"mean": along, "nearest": near}


@dataclass(frozen=True, kw_only=True)
class Audit:
    """``runs`` with and as many without one canary; or, with ``canaries``, one run in which each of so many is included by a fair coin.

    The two worlds differ as the method's own neighbours do: a record more, or another in its place. Declared counts would tell the worlds
    apart under add-remove, so there they are not declared. ``kind`` is one of `privot.attacks.membership.canaries`; ``score`` of SCORES.

    >>> from privot.data import load
    >>> quick = {"settings": {"per_class": 2, "nets": 4, "trained": 2, "width": 4, "steps": 4, "lessons": 1}, "epsilon": 5.0, "runs": 4}
    >>> audit = Audit(folder=Path(tempfile.mkdtemp()) / "audit", box=load("digits", public=True), method="private-set", **quick)
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
        if self.score not in SCORES:
            raise SettingError(f"score={self.score!r}: there are {', '.join(SCORES)}")
        if self.runs < 4 or self.canaries < 0:
            raise SettingError(f"runs={self.runs}, canaries={self.canaries}: at least 4 runs a side, and no fewer than 0 canaries")
        if self.canaries and self._neighbours() is not Neighbours.ADD_REMOVE:
            raise SettingError(
                f"{self.method} is private as to {self._neighbours()}: one run needs records that come and go; leave out canaries"
            )
        if self.gaussian and self.canaries:
            raise SettingError("gaussian: of many runs alone")

    def run(self, runtime: Runtime | None = None, progress: Progress = silent) -> Verdict:
        """All runs that are not there yet, then the verdict."""
        done, total = self._begun(), 1 if self.canaries else 2 * self.runs
        planted, runtime = self._planted(), runtime or Runtime()
        progress("audit runs", len(done), total)
        for number in range(len(done), total):
            included = self._included(number)
            with tempfile.TemporaryDirectory() as folder:
                release = synthesize(
                    self._world(planted, included), self.method, self.epsilon, settings=self.settings, ledger=f"{folder}/ledger.jsonl",
                    seed=self.seed + number, runtime=runtime,
                )  # fmt: skip
            scores = [self._scored(release, *each) for each in zip(*planted, strict=True)]
            line = {"included": included.tolist(), "scores": scores, "guarantee": asdict(release.guarantee)}
            with open(self.folder / "runs.jsonl", "a") as file:
                file.write(json.dumps(jsonable(line)) + "\n")
                file.flush()
                os.fsync(file.fileno())
            progress("audit runs", number + 1, total)
        return self.verdict()

    def verdict(self) -> Verdict:
        """What the runs prove, against what was claimed."""
        done = self._done()
        claim = done[-1]["guarantee"]
        guarantee = Guarantee(**claim) if "epsilon" in claim else NoGuarantee(**claim)
        return replace(judge(self.bound(done, guarantee), guarantee), publishable=isinstance(self.box, Public))

    def bound(self, done: list[dict[str, Any]], guarantee: Guarantee | NoGuarantee) -> Bound:
        """The lower bound on epsilon of these runs, at the claim's delta."""
        delta = guarantee.delta if isinstance(guarantee, Guarantee) else 0.0
        included, scores = (np.array([each[key] for each in done]) for key in ("included", "scores"))
        if self.canaries:
            # Half of them are guessed, a quarter as in and a quarter as out: fixed beforehand.
            return one_run(scores[0], included[0].astype(bool), delta, max(2, self.canaries // 2), self.confidence)
        inside, outside = (scores[included[:, 0] == world, 0] for world in (True, False))
        return many_runs(inside, outside, delta, self.confidence, gaussian=self.gaussian)

    def _neighbours(self) -> Neighbours:
        return make(self.method, self.settings).plan(self.box.spec).neighbours

    def _planted(self) -> Records:
        """The canaries, the same in every run."""
        generator, given = torch.Generator().manual_seed(self.seed), {}
        if self.kind in GIVEN:
            images, labels = self.box._take(slice(None))
            given = {"images": images, "labels": labels}
        return canaries(self.kind, self.box.spec, self.canaries or 1, generator, **given)

    def _included(self, number: int) -> np.ndarray:
        """Who is planted in a run: by coins, or the one canary in every other run."""
        if self.canaries:
            return coins(self.canaries, torch.Generator().manual_seed(self.seed + 1))
        return np.array([number % 2 == 1])

    def _world(self, planted: Records, included: np.ndarray) -> Sensitive:
        """The data set of one run."""
        box, spec = self.box, self.box.spec
        images, labels = (np.array(each) for each in (box._images, box._labels))
        scale = 255 if images.dtype == np.uint8 else 1
        more = (planted.images.numpy()[included] * scale).round(0 if scale > 1 else 7).astype(images.dtype)
        if self._neighbours() is Neighbours.ADD_REMOVE:
            images, labels = np.concatenate([images, more]), np.concatenate([labels, planted.labels.numpy()[included]])
            return Sensitive(images, labels, replace(spec, size=None, class_sizes=None), name="a world")
        if included.any():  # in the place of the first record of its class, so that classes stay as large as declared
            place = int(np.argmax(labels == int(planted.labels[0])))
            images[place] = more[0]
        return Sensitive(images, labels, spec, name="a world")

    def _scored(self, release: Release, image: Tensor, label: Tensor) -> float:
        """How much a release looks as if the canary was there."""
        if release.product.kind == "set":
            own = release.product.tensors["images"][release.product.tensors["labels"] == label]
        else:
            own, _ = release.sample(SAMPLES, label.expand(SAMPLES))
        return SCORES[self.score](own, image)

    def plan(self) -> dict[str, Any]:
        """All that defines the audit, as it stands in plan.json; the confidence and the reading may change later."""
        own = {key: getattr(self, key) for key in ("method", "epsilon", "runs", "canaries", "kind", "score", "seed")}
        settings = asdict(make(self.method, self.settings))  # type: ignore[call-overload]
        found: dict[str, Any] = json.loads(json.dumps(jsonable({**own, "settings": settings, "digest": digest(self.box)})))
        return found

    def _begun(self) -> list[dict[str, Any]]:
        """The runs of this audit that are there already."""
        plan, path = self.plan(), self.folder / "plan.json"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists():
            if json.loads(path.read_text()) != plan:
                raise SettingError(f"{self.folder} holds another audit: name another folder")
        else:
            write(path, json.dumps(plan, indent=1).encode())
        return self._done(mend=True)

    def _done(self, mend: bool = False) -> list[dict[str, Any]]:
        """Runs on disk; a last line that a crash cut off is left out, and with ``mend`` removed."""
        path = self.folder / "runs.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if mend and whole != text:
            write(path, whole.encode())
        with refusing(ReleaseError, f"{path}: not the runs of an audit; name another folder"):
            return [json.loads(line) for line in whole.splitlines()]
