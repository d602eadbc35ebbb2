"""Record all that a run shows, and replay it on other records with the same query results.

A run on dataset D is recorded with every query result. The same run on D' gets the results of D:
whatever then differs between the two recordings reached the outside around the gate. The queries
do run on D', so a leak through a closure, the state of a shard, a file or an exception happens as
in a real run. Of neighbouring datasets the true values are kept too, so that their distance can be
compared with the declared sensitivity. A local method has no gate to records; there the gate of the
clients is recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.local.channels import Channel, Composite
from privot.local.dataset import PrivatizedDataset
from privot.local.privatize import build_image_channel, privatize
from privot.methods import Method
from privot.privacy import accounting, secret_side
from privot.privacy.gate import Gate
from privot.privacy.guarantee import Guarantee
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Plan
from privot.privacy.sampling import Shards
from privot.privacy.sensitivity import SENSITIVITY
from privot.runtime import Runtime
from privot.synthesis import execution, synthesize
from privot.testing.outside_view import (
    capture_output,
    digest_files,
    restore_environment,
    watch_system_calls,
)
from privot.testing.tiny_data import NUM_CLASSES, NUM_RECORDS, SHAPE, is_local

# The number of records is public where each client sends one.
LOCAL_SPEC = Spec(SHAPE, NUM_CLASSES, NUM_RECORDS)
RUNTIME = Runtime("cpu", 16)  # chunks of 16: no dataset here is a multiple of it

_draw_shards = Shards.draw
_privatize_records = Composite.privatize
_compute_privacy_cost = accounting.compute_privacy_cost
_build_guarantee = Guarantee.from_plan


@dataclasses.dataclass
class Recording:
    """One run. The lists after ``events`` have one entry for each query.

    Attributes:
        events: Everything that must not depend on the records, in order.
        results: What the gate returned.
        true_values: The same before noise.
        sensitivities: The declared sensitivity.
        drawn_shards: The shard that was drawn for each row, or None.
        queried_clients: The clients whose rows they are, or None.
        shards_per_client: The number of shards, of each client where there are clients.
        release: The bytes of all files of the release.
    """

    events: list[Any] = dataclasses.field(default_factory=list)
    results: list[Tensor] = dataclasses.field(default_factory=list)
    true_values: list[Tensor] = dataclasses.field(default_factory=list)
    sensitivities: list[float] = dataclasses.field(default_factory=list)
    drawn_shards: list[Tensor | None] = dataclasses.field(default_factory=list)
    queried_clients: list[list[int] | None] = dataclasses.field(default_factory=list)
    shards_per_client: list[int] = dataclasses.field(default_factory=list)
    release: bytes = b""


@functools.cache
def build_local_channel() -> Channel:
    """Build the channel through which the clients of a local method send their records."""
    return build_image_channel(LOCAL_SPEC, "laplace", 40.0, labels_epsilon=5.0)


_costs: dict[tuple, Any] = {}


def _cache_privacy_cost(event: Any, neighbours: Any, coarse: bool = False) -> Any:
    """Compute a privacy cost once: it depends on the plan alone, and a sampled plan takes seconds.

    Args:
        event: The event of the plan.
        neighbours: The neighbouring relation.
        coarse: Whether a coarse grid is enough.

    Returns:
        The cost.
    """
    key = (str(event), neighbours, coarse)
    if key not in _costs:
        cost = _compute_privacy_cost(event, neighbours, coarse)
        _costs[key] = dataclasses.replace(cost, epsilon=functools.cache(cost.epsilon))
    return _costs[key]


@functools.cache
def _cache_guarantee(plan: Plan, delta: float) -> Guarantee:
    """Certify a plan once."""
    return _build_guarantee(plan, delta)


class RunRecorder:
    """Replace the noise and watch the outside while one run goes on."""

    def __init__(self, folder: Path, results: list[Tensor] | None) -> None:
        """Prepare an empty recording.

        Args:
            folder: The folder of the run, in which it may write.
            results: Query results that replace those of the gate, in order; None: its own.
        """
        self.recording = Recording()
        self._folder = folder
        self._results = results
        self._add_noise = secret_side.add_noise
        self._remove_tree = shutil.rmtree

    def note_files(self) -> None:
        """Note the files that are there now."""
        files = digest_files(self._folder, self._folder / "ledger")
        self.recording.events.append(("files", files))

    def report_progress(self, stage: str, step: int, total: int, **facts: Any) -> None:
        """Note a progress report.

        Args:
            stage: What the run is doing.
            step: The number of finished steps.
            total: The number of steps.
            facts: More facts of the report.
        """
        report = repr((stage, step, total, sorted(facts.items())))
        self.recording.events.append(("progress", report))
        self.note_files()

    def _choose_result(self, own_result: Tensor) -> Tensor:
        """Choose the result of a query, the given one if there is one, and note it."""
        index = len(self.recording.results)
        if self._results is not None and index < len(self._results):
            own_result = self._results[index].clone()
        self.recording.results.append(own_result)
        return own_result.clone()

    def _add_recorded_noise(
        self, total: Tensor, noise_std: float, grid: float, rng: SecretRandom
    ) -> Tensor:
        """Stand in for `privot.privacy.noise.add_noise`.

        Args:
            total: The true value in steps of the grid.
            noise_std: The standard deviation of the noise.
            grid: The size of a step.
            rng: The secret random numbers.

        Returns:
            The result of the query.
        """
        noisy = self._add_noise(total, noise_std, grid, rng)  # always, so that streams agree
        event = ("noise", tuple(total.shape), str(total.dtype), float(noise_std), float(grid))
        self.recording.events.append(event)
        self.recording.true_values.append(total * grid)
        return self._choose_result(noisy)

    def _record_privatized(self, channel: Composite, records: Tensor, rng: SecretRandom) -> Tensor:
        """Stand in for the channel of the clients.

        Args:
            channel: The channel.
            records: The values of the records.
            rng: The secret random numbers.

        Returns:
            What the clients send.
        """
        sent = _privatize_records(channel, records, rng)
        self.recording.events.append(("sent", tuple(sent.shape), str(sent.dtype)))
        return self._choose_result(sent)

    def _record_draw(self, sampling: Shards, count: int, rng: SecretRandom) -> Tensor:
        """Stand in for the draw of a shard for each row.

        Args:
            sampling: The sampling of the stage.
            count: The number of rows.
            rng: The secret random numbers.

        Returns:
            The index of the shard of each row.
        """
        drawn = _draw_shards(sampling, count, rng)
        self.recording.drawn_shards[-1] = drawn
        return drawn

    def _remove_recorded_tree(self, path: Any, *args: Any, **options: Any) -> None:
        """Note the files before a folder is removed."""
        self.note_files()
        self._remove_tree(path, *args, **options)

    def replace_parts(self, order: np.ndarray | None) -> contextlib.ExitStack:
        """Replace the noise, the draws and the slow accounting.

        Args:
            order: The secret order of the records, which also makes the secret random numbers the
                same in every run; None: orders and random numbers are fresh.

        Returns:
            A context that restores everything.
        """
        recorder = self
        stack = contextlib.ExitStack()
        replacements: list[tuple[Any, str, Any]] = [
            (execution, "Gate", build_recording_gate(self)),
            (secret_side, "add_noise", self._add_recorded_noise),
            (shutil, "rmtree", self._remove_recorded_tree),
            (accounting, "compute_privacy_cost", _cache_privacy_cost),
            (Guarantee, "from_plan", _cache_guarantee),
            (Composite, "privatize", lambda *args: recorder._record_privatized(*args)),
            (Shards, "draw", lambda *args: recorder._record_draw(*args)),
        ]
        if order is not None:
            secret_order = torch.from_numpy(order)
            replacements += [
                (secret_side, "SecretRandom", lambda insecure_seed=None: SecretRandom(5)),
                (Gate, "_get_secret_order", lambda gate: secret_order),
            ]
        for owner, name, value in replacements:
            stack.enter_context(mock.patch.object(owner, name, value))
        return stack


def build_recording_gate(recorder: RunRecorder) -> type[Gate]:
    """Build a gate that notes which queries are made, of which clients, and on which schedule."""
    recording = recorder.recording

    class RecordingGate(Gate):
        _clients_of_query: list[int]

        def _run_query(self, stage: Any, clip_norm: float, *args: Any, **options: Any) -> Any:
            recording.events.append(("query", stage.name, float(clip_norm)))
            sensitivity = SENSITIVITY[stage.operation, self.plan.neighbours]
            is_to_clients = stage.operation == "query_clients"
            recording.sensitivities.append(sensitivity * clip_norm)
            recording.drawn_shards.append(None)
            recording.shards_per_client.append(getattr(stage.sampling, "num_shards", 1))
            recording.queried_clients.append(self._clients_of_query if is_to_clients else None)
            recorder.note_files()
            return super()._run_query(stage, clip_norm, *args, **options)

        def query_clients(
            self, *args: Any, client_indices: Tensor | None = None, **options: Any
        ) -> Tensor:
            everyone = list(range(self.spec.num_clients or 0))
            self._clients_of_query = everyone if client_indices is None else client_indices.tolist()
            recording.events.append(("clients", self._clients_of_query))
            return super().query_clients(*args, client_indices=client_indices, **options)

        def update_shards(
            self, *args: Any, shard_indices: Tensor | None = None, **options: Any
        ) -> None:
            schedule = None if shard_indices is None else shard_indices.tolist()
            recording.events.append(("update", schedule))
            super().update_shards(*args, shard_indices=shard_indices, **options)

    return RecordingGate


def record_run(
    method: Method,
    dataset: Sensitive,
    folder: Path,
    *,
    results: list[Tensor] | None = None,
    order: np.ndarray | None = None,
    runtime: Runtime | None = None,
) -> Recording:
    """Run a method in a folder and record everything that it shows.

    Args:
        method: The method.
        dataset: The sensitive records. For a local method they are privatized first.
        folder: The folder; what lies in it is deleted.
        results: Query results that replace those of the gate; None: its own.
        order: The secret order of the records; then secret random numbers are the same in every
            run, so that neighbours draw the same records. None: both are fresh.
        runtime: The device; the CPU with chunks of 16 records by default.

    Returns:
        The recording.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    recorder = RunRecorder(folder, results)
    events = recorder.recording.events
    with (
        contextlib.chdir(folder),
        restore_environment(events),
        recorder.replace_parts(order),
        capture_output(events),
        watch_system_calls() as system_calls,
    ):
        _run_to_the_end(method, dataset, folder, recorder, runtime or RUNTIME)
    recorder.note_files()
    inside = str(folder) + os.sep
    written = [(event, path.removeprefix(inside)) for event, path in system_calls]
    events.append(("written", written))
    # The content of files outside of the folder is not compared, so there may be none.
    outside = [call for call in system_calls if not call[1].startswith((inside, os.devnull))]
    events.append(("outside", outside))
    files = sorted(path for path in (folder / "out").rglob("*") if path.is_file())
    recorder.recording.release = b"".join(path.read_bytes() for path in files)
    return recorder.recording


def _run_to_the_end(
    method: Method, dataset: Sensitive, folder: Path, recorder: RunRecorder, runtime: Runtime
) -> None:
    """Run a method and note its guarantee or its error.

    Args:
        method: The method.
        dataset: The sensitive records.
        folder: The folder of the run.
        recorder: Records the run.
        runtime: The device.
    """
    events = recorder.recording.events
    ledger = Ledger(folder / "ledger" / "tiny.jsonl", clock=lambda: 0.0)
    needs_budget = method.noise_multiplier is None and method.plan(dataset.spec).stages
    source: Sensitive | PrivatizedDataset = dataset
    try:
        if is_local(method):
            sent_path = folder / "sent.safetensors"
            source = privatize(dataset, build_local_channel(), out=sent_path, ledger=ledger)
        release = synthesize(
            source,
            method,
            5.0 if needs_budget else None,
            out=folder / "out",
            ledger=ledger,
            seed=3,
            runtime=runtime,
            progress=recorder.report_progress,
            on_warning=lambda text: events.append(("notice", text)),
        )
        events.append(("release", repr(release.guarantee), release.artifact.kind))
    except Exception as error:
        events.append(("error", type(error).__name__, str(error), repr(error.__cause__)))


@contextlib.contextmanager
def pin_results(results: dict[tuple[str, int], Tensor]) -> Iterator[None]:
    """Give every query the result that it had first, so that an interrupted run can be compared.

    Args:
        results: By stage and step; results that are not there yet are added.
    """
    add_noise = secret_side.add_noise
    run_query = Gate._run_query
    current: list[tuple[str, int]] = []

    def run_noted_query(gate: Gate, stage: Any, *args: Any, **options: Any) -> Any:
        current[:] = [(stage.name, gate._completed_steps[stage.name])]
        return run_query(gate, stage, *args, **options)

    def add_pinned_noise(*args: Any) -> Tensor:
        return results.setdefault(current[0], add_noise(*args)).clone()

    with (
        mock.patch.object(Gate, "_run_query", run_noted_query),
        mock.patch.object(secret_side, "add_noise", add_pinned_noise),
    ):
        yield


def get_array_order(dataset: Sensitive) -> np.ndarray:
    """Give the order of the arrays as the secret order, so that neighbours differ at one index."""
    return np.arange(dataset._count_records())
