"""Query results of a run: charged and marked before they are computed, then stored."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from privot.errors import BudgetError, LedgerError, PlanError, ReleaseError, reraise_as
from privot.io import write_atomically
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Plan, Stage
from privot.runtime.process_group import SingleProcess

# Results of a stage with at most so many steps are stored, so that a resumed run finds them again.
# A longer stage resumes after the last step that was marked.
MAX_STORED_RESULTS = 64
MARKS_PER_STAGE = 1000  # a longer stage is marked in the ledger in so many strides


class PaidQueries:
    """The queries of one run of one plan: charged, counted, marked and stored.

    Args:
        plan: All that the run may query.
        ledger: Where the plan is charged.
        method: The name of the run in the ledger.
        folder: The folder of the run on the public side; None: nothing is stored.
        insecure: Whether the noise comes from a seed.
        num_clients: Clients that the records are divided among.
        process_group: The processes of the run. Only the first one has the ledger and the folder.

    Raises:
        LedgerError: If an unfinished run in the folder was charged to another ledger or plan.
    """

    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        *,
        method: str,
        folder: Path | None,
        insecure: bool,
        num_clients: int,
        process_group: SingleProcess,
    ):
        ticket = None
        if folder and (folder / "ticket").exists():
            ticket = int((folder / "ticket").read_text())
        if ticket is not None and not ledger.covers(ticket, plan, method, seeded=insecure):
            raise LedgerError(
                f"{ledger.path}: the unfinished run in {folder} was charged to another ledger or "
                "for another plan. Name its ledger, or start a new run in another folder."
            )
        self.plan = plan
        self.ticket = ticket
        self.insecure = insecure
        self._is_resumed = ticket is not None
        self._ledger = ledger
        self._method = method
        self._folder = folder
        self._num_clients = num_clients
        self._process_group = process_group
        self._stages = {stage.name: stage for stage in plan.stages}
        self._count_earlier_steps()

    def _count_earlier_steps(self) -> None:
        """Count the steps of each stage that were marked before a crash."""
        earlier = [
            0 if self.ticket is None else self._ledger.asked_count(self.ticket, name)
            for name in self._stages
        ]
        (marked,) = self._process_group.broadcast(torch.tensor(earlier))
        # Steps that may not be computed again.
        self._consumed_steps = dict(zip(self._stages, marked.tolist(), strict=True))
        # Steps whose results this run gave, or that a resumed run cannot give any more.
        self._completed_steps = {
            name: 0 if stores_results(stage) else self._consumed_steps[name]
            for name, stage in self._stages.items()
        }
        # Steps that are marked in the ledger.
        self._marked_steps = dict(self._consumed_steps)
        # The same as `_completed_steps`, for each client, of stages that query clients in turn.
        self._completed_steps_by_client = {
            stage.name: torch.full((self._num_clients,), self._completed_steps[stage.name])
            for stage in self.plan.stages
            if stage.operation == "query_clients"
        }

    def count_remaining_queries(self, name: str) -> int:
        """Count the queries that a stage has left. Those that a crash lost are used up."""
        return self._stages[name].steps - self._completed_steps[name]

    def _get_stage(
        self, name: str, operation: str, count: int = 1, completed: int | None = None
    ) -> Stage:
        """Find the stage that covers some queries.

        Args:
            name: The name of the stage.
            operation: The operation of the queries.
            count: How many queries.
            completed: Queries of the stage that were given before; None: by the count of this run.

        Returns:
            The stage.

        Raises:
            PlanError: If the plan has no such stage.
            BudgetError: If the stage has fewer queries left.
        """
        stage = self._stages.get(name)
        if stage is None or stage.operation != operation:
            raise PlanError(f"The plan has no stage {name!r} of {operation}.")
        remaining = (
            self.count_remaining_queries(name) if completed is None else stage.steps - completed
        )
        if not 0 < count <= remaining:
            raise BudgetError(f"Stage {name} is used up: its plan has {stage.steps} step(s).")
        return stage

    def _charge(self) -> int:
        """Charge the whole plan, once, before the first record is read. Returns the ticket."""
        if self.ticket is None:
            # privacy: anyone who knows the seed can subtract seeded noise, so such a run is charged
            # as infinite.
            self.ticket = self._ledger.reserve(
                self.plan, self._method, seeded=self.insecure, num_clients=self._num_clients
            )
            if self._folder:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_atomically(self._folder / "ticket", str(self.ticket).encode(), fsync=False)
        return self.ticket

    def _mark_asked(self, ticket: int, stage: Stage, step: int, count: int) -> None:
        """Mark queries in the ledger before they are computed.

        Args:
            ticket: The reservation.
            stage: The stage.
            step: The first of the queries.
            count: How many queries.

        Raises:
            BudgetError: If one of them was marked before. No query is computed twice.
        """
        if step < self._consumed_steps[stage.name]:
            raise BudgetError(
                "A crash lost a query result that is paid for, and none is given twice. "
                "Start a new run, which is charged again."
            )
        is_per_client = stage.operation == "query_clients"  # clients are queried in turn
        if not is_per_client:
            # privacy: a second query after an error gets no second result for the same charge.
            self._consumed_steps[stage.name] = step + count
        marked = self._marked_steps[stage.name]
        if step + count <= marked:
            return
        # The process of a client may end after any message, so its queries are not marked ahead.
        stride = 0 if is_per_client else stage.steps // MARKS_PER_STAGE
        last = min(max(step + count, marked + stride), stage.steps) - 1
        self._ledger.mark_asked(ticket, stage.name, marked, last)
        self._marked_steps[stage.name] = last + 1

    def _result_path(self, stage: Stage, step: int) -> Path | None:
        if self._folder is None or not stores_results(stage):
            return None
        return self._folder / f"{stage.name}-{step}.safetensors"

    def _store_result(self, ticket: int, stage: Stage, step: int, value: Tensor) -> None:
        """Store a query result, which is public, and commit its digest to the ledger.

        Args:
            ticket: The reservation.
            stage: The stage.
            step: The number of the query in the stage.
            value: The result.
        """
        file = self._result_path(stage, step)
        if file:
            write_atomically(file, save({"value": value.contiguous().cpu()}), fsync=False)
        if stores_results(stage):
            self._ledger.commit(ticket, stage.name, step, hash_tensor(value))

    def _load_result(self, stage: Stage, step: int) -> dict[str, Tensor] | None:
        """Load a stored query result.

        Returns:
            The result under the key ``value``; None if there is none.

        Raises:
            ReleaseError: If it does not match the digest in the ledger.
        """
        file = self._result_path(stage, step)
        if self.ticket is None or file is None or not file.exists():
            return None
        message = (
            f"{file}: this stored query result was altered. "
            "Start a new run, which is charged again."
        )
        with reraise_as(ReleaseError, message):
            value = load_file(file)["value"]
        digest = hash_tensor(value)
        if self._ledger.find_digest(self.ticket, stage.name, step) not in (None, digest):
            raise ReleaseError(message)
        self._ledger.commit(self.ticket, stage.name, step, digest)
        return {"value": value}


def stores_results(stage: Stage) -> bool:
    """Whether results are stored. Steps of clients that are queried in turn have no own numbers."""
    return stage.steps <= MAX_STORED_RESULTS and stage.operation != "query_clients"


def hash_tensor(value: Tensor) -> str:
    """Compute the SHA-256 of a tensor's values."""
    return hashlib.sha256(value.contiguous().cpu().numpy().tobytes()).hexdigest()
