"""Audits of a whole method: a lower bound on its true epsilon, from runs with planted records.

There are many runs with and without one canary, or one run with many canaries. Each run is a
complete release, as a data owner would make it. An adversary who knows the canaries looks at what
was released. How often the two cases are distinguished bounds epsilon from below (`privot.audit`).

The canaries, their score and the number of runs are fixed before the first run, and nothing is
evaluated before the last. Every run has the same public seed, which the adversary knows. So runs
with the same records differ by secret randomness only, no seed can be mistaken for a record, and
noise that depends on the public seed would be detected.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from privot.audit import (
    EpsilonBound,
    Verdict,
    audit_many_runs,
    audit_one_run,
    audit_one_run_gaussian,
    judge,
)
from privot.audit.canaries import CANARY_KINDS, flip_fair_coins
from privot.audit.canary_scores import CANARY_SCORES, score_canaries
from privot.audit.neighbouring import (
    CommonRecords,
    build_run_dataset,
    declare_run_spec,
    split_records,
)
from privot.audit.result import AttackResult
from privot.audit.roc import check_probability
from privot.audit.run_store import RunStore
from privot.data.dataset import Public, Records, Sensitive
from privot.data.fingerprint import hash_dataset
from privot.data.spec import Spec
from privot.errors import ReleaseError, SettingError
from privot.io import to_jsonable
from privot.methods import make_method
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.privacy.ledger_lookup import record_internal_runs
from privot.privacy.plan import Budget, Neighbours, Plan, PrivacyTarget
from privot.release import Release
from privot.runtime import Progress, Runtime, ignore_progress
from privot.synthesis import synthesize
from privot.synthesis.preflight import resolve_plan

DEFAULT_DELTA = 1e-5  # if nothing is claimed
MIN_RUNS_PER_SIDE = 4
# A bound that assumes a Gaussian mechanism can judge only the certificates of this accountant.
GAUSSIAN_ACCOUNTANT = "analytic Gaussian"
PLAN_FIELDS = (
    "method",
    "epsilon",
    "runs_per_side",
    "num_canaries",
    "canary_kind",
    "canary_score",
    "assume_gaussian",
    "seed",
)


@dataclass(frozen=True, kw_only=True)
class EpsilonAudit:
    """Audit of the epsilon that a method claims.

    Data sets with and without a canary differ as the method's own neighbours do: by an additional
    record, by a replaced record, or by all records of one client and class.

    Attributes:
        folder: Where the runs are stored; an interrupted audit is resumed there.
        dataset: The records of the runs.
        method: Name of the method.
        settings: Its settings.
        epsilon: Budget of each run; None if the settings fix the noise.
        runs_per_side: Runs with the canary, and as many without it.
        num_canaries: With 2 or more, there is one run instead, which includes each of so many
            canaries by a fair coin.
        canary_kind: One of `privot.audit.canaries.CANARY_KINDS`.
        canary_score: One of `privot.audit.canary_scores.CANARY_SCORES`.
        confidence: Confidence level of the bound.
        assume_gaussian: Whether to read the runs as those of a Gaussian mechanism, which gives a
            much tighter bound that is valid for Gaussian mechanisms only.
        seed: Public seed of all runs.

    >>> from privot.data import load_dataset
    >>> settings = {"num_features": 20, "steps": 2}
    >>> audit = EpsilonAudit(
    ...     folder=Path(tempfile.mkdtemp()) / "audit",
    ...     dataset=load_dataset("digits", public=True),
    ...     method="merf",
    ...     settings=settings,
    ...     epsilon=5.0,
    ...     runs_per_side=4,
    ... )
    >>> audit.run().status
    'holds'
    """

    folder: Path
    dataset: Sensitive | Public
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    epsilon: float | None = None
    runs_per_side: int = 100
    num_canaries: int = 0
    canary_kind: str = "blank"
    canary_score: str = "mean"
    confidence: float = 0.95
    assume_gaussian: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_probability(self.confidence, "confidence")
        if self.canary_score not in CANARY_SCORES:
            raise SettingError(
                f"score={self.canary_score!r}: choose one of {', '.join(CANARY_SCORES)}"
            )
        if self.canary_kind not in CANARY_KINDS:
            raise SettingError(
                f"kind={self.canary_kind!r}: choose one of {', '.join(CANARY_KINDS)}"
            )
        if self.runs_per_side < MIN_RUNS_PER_SIDE:
            raise SettingError(
                f"runs={self.runs_per_side}: give at least {MIN_RUNS_PER_SIDE} runs a side"
            )
        if self.num_canaries < 0 or self.num_canaries == 1:
            raise SettingError(f"canaries={self.num_canaries}: give 0, or 2 or more, canaries")
        neighbours = self._resolve_neighbours()
        if self.num_canaries and neighbours is not Neighbours.ADD_REMOVE:
            raise SettingError(
                f"{self.method} is private for {neighbours} neighbours. An audit in one run needs "
                "add-remove neighbours. Leave out canaries."
            )

    @property
    def total_runs(self) -> int:
        """Number of runs."""
        return 1 if self.num_canaries else 2 * self.runs_per_side

    def run(self, runtime: Runtime | None = None, progress: Progress = ignore_progress) -> Verdict:
        """Do all runs that are missing and compare what they prove with what is claimed.

        privacy: runs are internal. Each has a temporary ledger, and its release is marked with the
        purpose ``audit``, so that it does not verify as a release. The ledger of a sensitive data
        set lists the missing runs before the first of them begins.

        Args:
            runtime: Device and chunk sizes.
            progress: Called with the number of complete runs.

        Returns:
            The verdict. It may be published only if the records are public.

        Raises:
            SettingError: If the folder belongs to another audit, or no run is possible.
            PrivotError: If a run fails.
        """
        runtime = runtime or Runtime()
        records, canary_records = self._split_records()
        run_store = RunStore(self.folder)
        is_public = isinstance(self.dataset, Public)
        with run_store.lock(self.describe_plan(), private=not is_public) as num_complete:
            progress("audit runs", num_complete, self.total_runs)
            self._record_runs(records, self.total_runs - num_complete)
            for run_index in range(num_complete, self.total_runs):
                included = self._draw_inclusion(run_index)
                dataset = self._build_dataset(records, canary_records, included)
                release = self._synthesize_release(dataset, runtime)
                run_store.append(
                    included=included.tolist(),
                    scores=self._score_canaries(release, records, canary_records, runtime),
                    guarantee=asdict(release.guarantee),
                )
                progress("audit runs", run_index + 1, self.total_runs)
        return self.compute_verdict()

    def compute_verdict(self) -> Verdict:
        """Compare what the runs prove with what is claimed.

        Raises:
            ReleaseError: If runs are missing: who could stop at any time would prove anything.
        """
        return self._evaluate_runs()[1]

    def to_json(self) -> dict[str, Any]:
        """Convert the result to plain data.

        Returns:
            The fields of the verdict; ``audited``: method, settings and claimed epsilon; and
            ``attacks``: the rates behind the verdict, as reports read them.
        """
        bound, verdict = self._evaluate_runs()
        fpr, tpr, tpr_lower = (
            () if rate is None else (rate,)
            for rate in (bound.fpr_upper_bound, bound.tpr, bound.tpr_lower_bound)
        )
        attack = AttackResult(
            "audit of the whole method",
            fpr,
            tpr,
            tpr_lower,
            bound.confidence,
            verdict.publishable,
            verdict=f"{bound.procedure}: {verdict.summary}",
            verdict_refutes_guarantee=verdict.is_broken,
        )
        plan = self.describe_plan()
        audited = {
            "method": plan["method"],
            "settings": plan["settings"],
            "claimed": verdict.claimed,
        }
        return {"audited": audited, "attacks": [asdict(attack)], **asdict(verdict)}

    def describe_plan(self) -> dict[str, Any]:
        """Describe all that defines the audit, as it is stored in plan.json.

        The confidence is not part of it and may change later.

        Raises:
            SettingError: If no run is possible with these settings.
        """
        method = make_method(self.method, self.settings)
        records, _ = self._split_records()
        spec = self._declare_spec(records.labels)
        try:
            method.plan(spec)
        except SettingError as error:
            raise SettingError(
                f"{self.method}: runs with and without a canary differ in size, so no size is "
                f"declared, and then: {error}"
            ) from None
        plan, _ = self._resolve_plan(spec)
        if self.assume_gaussian and any(stage.noise_multiplier for stage in plan.stages):
            accountant = plan.cost().accountant
            if accountant != GAUSSIAN_ACCOUNTANT:
                raise SettingError(
                    f"gaussian: the certificate of {self.method} is by {accountant}, which a bound "
                    "for Gaussian mechanisms cannot judge. Leave it out."
                )
        description = {
            **{key: getattr(self, key) for key in PLAN_FIELDS},
            "settings": asdict(method),  # type: ignore[call-overload]
            "digest": hash_dataset(self.dataset),
        }
        plain: dict[str, Any] = json.loads(json.dumps(to_jsonable(description)))
        return plain

    def compute_bound(
        self, runs: list[dict[str, Any]], guarantee: Guarantee | NoGuarantee
    ) -> EpsilonBound:
        """Compute the lower bound on epsilon of stored runs, at the delta of the claim."""
        delta = guarantee.delta if isinstance(guarantee, Guarantee) else DEFAULT_DELTA
        included = np.array([run["included"] for run in runs])
        scores = np.array([run["scores"] for run in runs])
        if self.num_canaries:
            compute = audit_one_run_gaussian if self.assume_gaussian else audit_one_run
            # Half of the canaries are guessed, a quarter as included and a quarter as excluded.
            # This number is fixed before the run.
            num_guesses = max(2, self.num_canaries // 2)
            return compute(scores[0], included[0].astype(bool), delta, num_guesses, self.confidence)
        is_included = included[:, 0].astype(bool)
        return audit_many_runs(
            scores[is_included, 0],
            scores[~is_included, 0],
            delta,
            self.confidence,
            assume_gaussian=self.assume_gaussian,
        )

    def _evaluate_runs(self) -> tuple[EpsilonBound, Verdict]:
        """Compute bound and verdict of all stored runs."""
        runs = RunStore(self.folder).read()
        if len(runs) != self.total_runs:
            raise ReleaseError(
                f"{self.folder}: {len(runs)} of {self.total_runs} runs are complete. Run it again "
                "to resume."
            )
        claim = runs[0]["guarantee"]
        if any(run["guarantee"] != claim for run in runs):
            raise ReleaseError(
                f"{self.folder}: its runs do not all claim the same, so no claim can be judged. "
                "Choose another folder."
            )
        guarantee = Guarantee(**claim) if "epsilon" in claim else NoGuarantee(**claim)
        bound = self.compute_bound(runs, guarantee)
        verdict = judge(bound, guarantee)
        return bound, replace(verdict, publishable=isinstance(self.dataset, Public))

    def _synthesize_release(self, dataset: Sensitive, runtime: Runtime) -> Release:
        """Run the method once, with a temporary ledger."""
        with tempfile.TemporaryDirectory() as folder:
            return synthesize(
                dataset,
                make_method(self.method, self.settings),
                self.epsilon,
                ledger=f"{folder}/ledger.jsonl",
                seed=self.seed,
                runtime=runtime,
                purpose="audit",
                on_warning=lambda text: None,
            )

    def _record_runs(self, records: CommonRecords, num_runs: int) -> None:
        """List the missing runs in the ledger of a sensitive data set."""
        if num_runs and not isinstance(self.dataset, Public):
            plan, target = self._resolve_plan(self._declare_spec(records.labels))
            record_internal_runs(
                (self.dataset.name,), "audit", self.method, num_runs, plan, target.delta
            )

    def _resolve_plan(self, spec: Spec) -> tuple[Plan, PrivacyTarget]:
        """Compute the plan of a run and its privacy target."""
        return resolve_plan(
            spec,
            make_method(self.method, self.settings),
            None if self.epsilon is None else Budget(self.epsilon),
        )

    def _resolve_neighbours(self) -> Neighbours:
        """Get the method's relation between neighbours; add-remove if it claims nothing."""
        plan = make_method(self.method, self.settings).plan(self.dataset.spec)
        return plan.neighbours if plan.stages else Neighbours.ADD_REMOVE

    def _split_records(self) -> tuple[CommonRecords, Records]:
        """Divide the data set into records that every run has and canaries."""
        return split_records(self.dataset, self.canary_kind, self.num_canaries or 1, self.seed)

    def _draw_inclusion(self, run_index: int) -> np.ndarray:
        """Decide which canaries a run includes: by coins, or the one canary in every other run."""
        if self.num_canaries:
            return flip_fair_coins(self.num_canaries)
        return np.array([run_index % 2 == 1])

    def _build_dataset(
        self, records: CommonRecords, canary_records: Records, included: np.ndarray
    ) -> Sensitive:
        """Build the data set of one run; see `build_run_dataset`.

        Args:
            records: Records that every run has.
            canary_records: The canaries.
            included: Which of them the run includes, bool [canaries].

        Returns:
            The data set.
        """
        return build_run_dataset(
            self.dataset.spec, self._resolve_neighbours(), records, canary_records, included
        )

    def _declare_spec(self, labels: np.ndarray) -> Spec:
        """Declare the facts about the data set of a run with these labels."""
        return declare_run_spec(self.dataset.spec, self._resolve_neighbours(), labels)

    def _score_canaries(
        self, release: Release, records: CommonRecords, canary_records: Records, runtime: Runtime
    ) -> list[float]:
        """Score all canaries under a release; see `score_canaries`.

        Args:
            release: The release of a run.
            records: Records that every run has.
            canary_records: The canaries.
            runtime: Where a generator runs.

        Returns:
            One score for each canary.
        """
        return score_canaries(
            self.canary_score, release, records, canary_records, runtime.torch_device
        )
