"""Execute a prepared run: open the gate, train the method, and assemble the release."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor
from torch.linalg import LinAlgError

from privot.data import Sensitive
from privot.data.public_images import load_public_images
from privot.errors import PrivotError, ReleaseError
from privot.io import to_jsonable
from privot.local.dataset import PrivatizedDataset
from privot.local.server_gate import ServerGate
from privot.privacy.gate import Gate
from privot.privacy.guarantee import Guarantee, NoGuarantee
from privot.privacy.plan import Plan
from privot.privacy.protocols import GateProtocol
from privot.privacy.shard_checkpoint import describe_leftover_checkpoints
from privot.release import Release
from privot.release.artifact import Artifact
from privot.release.ledger_summary import summarize_spending
from privot.runtime import Progress, Streams, use_threads
from privot.runtime.process_group import SingleProcess, join_process_group
from privot.synthesis.cost import choose_thread_limit
from privot.synthesis.prepare import PreparedRun
from privot.synthesis.run_folder import RunFolder
from privot.synthesis.versions import get_package_versions


def execute_run(run: PreparedRun) -> Release:
    """Execute a run and write its release.

    Args:
        run: The run, from `prepare_run`.

    Returns:
        The release.

    Raises:
        BudgetError: If the ledger does not allow the run.
        ReleaseError: If the folder cannot be written, or training diverged.
    """
    options = run.options
    facts = run.describe()
    public_images = None
    if run.method.public_source and isinstance(run.dataset, Sensitive):
        public_images, facts["public_data"] = load_public_images(
            run.method.public_source, run.dataset
        )
    identity = run.identify(facts)
    process_group = join_process_group(
        options.runtime.torch_device,
        json.dumps([to_jsonable(identity), get_package_versions()]),
    )
    folder = None
    if options.out and not process_group.is_follower:
        folder = RunFolder.locate(
            options.out, identity, options.resume, run.method.adjustable_on_resume
        )
    gate = _build_gate(run, folder, process_group)
    for text in _check_ledger(run, gate, folder, process_group):
        options.on_warning(text)
    if folder:
        folder.write_facts(identity)
    artifact = _fit_method(run, gate, folder, public_images, process_group)
    release = _assemble_release(run, gate, artifact, facts, process_group)
    if options.out and folder:
        release.save(options.out)
        folder.remove()
    gate.delete_shard_states()
    process_group.close()
    return release


def _build_gate(
    run: PreparedRun, folder: RunFolder | None, process_group: SingleProcess
) -> GateProtocol:
    """Build the gate of a run: to the records, or to what clients privatized.

    Args:
        run: The run.
        folder: The folder of the run, in the first process.
        process_group: The processes that share the run.

    Returns:
        The gate. Nothing was charged.
    """
    if isinstance(run.dataset, PrivatizedDataset):
        return ServerGate(run.dataset)
    assert run.ledger is not None
    return Gate(
        run.dataset,
        run.plan,
        run.ledger,
        run.target,
        method=run.method.name,
        runtime=run.options.runtime,
        folder=folder.path if folder else None,
        insecure_seed=run.options.insecure_seed,
        process_group=process_group,
    )


def _check_ledger(
    run: PreparedRun, gate: GateProtocol, folder: RunFolder | None, process_group: SingleProcess
) -> list[str]:
    """Refuse a run that its ledger does not allow, before anything is written.

    Args:
        run: The run.
        gate: The gate of the run.
        folder: The folder of the run, in the first process.
        process_group: The processes that share the run; only the first one checks.

    Returns:
        Warnings about files that other runs left.
    """
    if run.ledger is None or process_group.is_follower:
        return []
    if run.plan.stages and gate.ticket is None:
        run.ledger.check_limit(
            run.plan,
            method=run.method.name,
            seeded=gate.insecure,
            num_clients=run.spec.num_clients or 1,
        )
    if folder:
        run.ledger.require_writable()
    return describe_leftover_checkpoints(run.ledger, except_ticket=gate.ticket)


def _fit_method(
    run: PreparedRun,
    gate: GateProtocol,
    folder: RunFolder | None,
    public_images: Tensor | None,
    process_group: SingleProcess,
) -> Artifact:
    """Train the method through the gate.

    Args:
        run: The run.
        gate: The gate of the run.
        folder: The folder of the run, in the first process.
        public_images: Images of public data that the method reads, [count, channels, height,
            width].
        process_group: The processes that share the run.

    Returns:
        What the method releases.

    Raises:
        ReleaseError: If training diverged.
    """
    adjustable = ", ".join(run.method.adjustable_on_resume) or "none can change"
    diverged = "The result has values that are not finite, because training diverged."
    if folder:
        diverged += (
            " The query results are stored: resume with --resume and other settings "
            f"({adjustable})."
        )
    run_folder = folder.path if folder else None
    streams = Streams(
        run.options.seed,
        run.options.runtime,
        run_folder,
        public_images,
        process_group=process_group,
    )
    num_threads = choose_thread_limit(run.spec, run.options.runtime.torch_device)
    with _clean_up_after_failure(run, gate, folder, diverged), use_threads(num_threads):
        # A server's gate refuses all queries, so it may stand in for a gate to records.
        artifact = run.method.fit(cast(Gate, gate), streams, _report_cost(run, gate, process_group))
    if not process_group.is_follower and not artifact.is_consistent_with(run.spec):
        raise ReleaseError(diverged)
    return artifact


def _report_cost(run: PreparedRun, gate: GateProtocol, process_group: SingleProcess) -> Progress:
    """Add the epsilon that the run has cost so far to every progress report.

    Args:
        run: The run.
        gate: The gate of the run.
        process_group: The processes that share the run; only the first one reports.

    Returns:
        The progress to give to the method.
    """
    epsilon = run.epsilon

    def report_progress(stage: str, step: int, total: int, **facts: Any) -> None:
        """Report progress, unless another process reports it.

        Args:
            stage: What the run is doing.
            step: The number of finished steps.
            total: The number of steps.
            facts: More public facts.
        """
        if process_group.is_follower:
            return
        is_charged = gate.ticket is not None or gate.no_guarantee_reason or run.local_dataset
        run.options.progress(stage, step, total, epsilon=epsilon if is_charged else 0.0, **facts)

    return report_progress


@contextmanager
def _clean_up_after_failure(
    run: PreparedRun, gate: GateProtocol, folder: RunFolder | None, diverged: str
) -> Iterator[None]:
    """Remove the folder of a run that failed before it was charged, and explain the failure.

    Args:
        run: The run.
        gate: The gate of the run.
        folder: The folder of the run, in the first process.
        diverged: The error message for a matrix with values that are not finite.
    """
    try:
        yield
    except Exception as error:
        # A run that was refused before any charge leaves nothing that could be resumed.
        may_have_progress = run.local_dataset or not isinstance(error, PrivotError)
        if folder and gate.ticket is None and not (may_have_progress and folder.has_progress()):
            folder.undo()
        if isinstance(error, LinAlgError):  # on the secret side it would be a QueryError
            raise ReleaseError(diverged) from None
        raise
    except KeyboardInterrupt as interrupt:
        if (gate.ticket is not None or gate.no_guarantee_reason) and not interrupt.args:
            # A resumed run without a guarantee would read, and charge, all records again.
            can_resume = folder and not gate.no_guarantee_reason
            note = "the queries so far stay charged"
            interrupt.add_note(f"{note}; --resume continues from here" if can_resume else note)
        raise


def _assemble_release(
    run: PreparedRun,
    gate: GateProtocol,
    artifact: Artifact,
    facts: dict[str, Any],
    process_group: SingleProcess,
) -> Release:
    """Assemble the release with its guarantee and its manifest.

    Args:
        run: The run.
        gate: The gate of the run.
        artifact: What the method releases.
        facts: The facts of the run.
        process_group: The processes that share the run; all get the tensors of the first, because
            another GPU may round in its own way.

    Returns:
        The release.
    """
    ledger_facts = {}
    if run.ledger and not process_group.is_follower:
        spending = summarize_spending(run.dataset.name, run.ledger, run.target.delta)
        ledger_facts = {"head": run.ledger.head, **spending}
    metadata = {
        **artifact.metadata,
        **facts,
        "ledger": json.loads(process_group.broadcast_text(json.dumps(ledger_facts))),
        "versions": get_package_versions(),
    }
    tensors = process_group.broadcast_optional(artifact.tensors) or {}
    delta = run.local_dataset.channel.delta if run.local_dataset else run.target.delta
    return Release(
        dataclasses.replace(artifact, tensors=tensors),
        _certify(gate, run.plan, delta),
        run.spec,
        to_jsonable(metadata),
    )


def _certify(gate: GateProtocol, plan: Plan, delta: float) -> Guarantee | NoGuarantee:
    """State what the run guarantees at ``delta``, or why it guarantees nothing."""
    if gate.no_guarantee_reason:
        return NoGuarantee(gate.no_guarantee_reason)
    if gate.insecure:
        return NoGuarantee("the noise was seeded, so anyone can subtract it: for tests only")
    if any(stage.noise_multiplier == 0 for stage in plan.stages):
        return NoGuarantee("no noise was added, because the budget was infinite")
    return Guarantee.from_plan(plan, delta)
