r"""The best test there is of which of two neighbouring datasets lies behind the results of a run.

The adversary sees every result y of the gate. It knows all other records, which of them were drawn,
and the public half of the run. So it knows three true values of each query: without the canary,
with it, and where the canary was not drawn (which has probability 1 - q). By Neyman and Pearson no
test is better than the logarithm of the likelihood ratio, summed over the queries:

.. math::
    \sum \log\frac{(1-q)\,N(y; f_{out}) + q\,N(y; f_{with})}
    {(1-q)\,N(y; f_{out}) + q\,N(y; f_{without})}

The true values come from shadow gates, which are queried as the gate is, on their own datasets and
with the same draws.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PrivotError
from privot.methods import Method
from privot.privacy import secret_side
from privot.privacy.gate import Gate
from privot.privacy.plan import Budget, Neighbours, Plan
from privot.privacy.sampling import Full, Poisson, Shards
from privot.runtime import Runtime, Streams, ignore_progress
from privot.synthesis.preflight import resolve_plan
from privot.testing.fakes import FreePlan, NullLedger
from privot.testing.tiny_data import SHAPE

NUM_CLASSES = 2
NUM_CLIENTS = 4
NUM_OTHER_RECORDS = 8  # an added canary has this index
DELTA = 1e-5
_RUNTIME = Runtime("cpu", 8)
_OPERATIONS = (
    "sum",
    "rows",
    "query_sample",
    "sorted_blocks",
    "split_into_shards",
    "update_shards",
    "query_random_shards",
    "query_clients",
    "sum_over_shards",
)
_add_noise = secret_side.add_noise
_draw_poisson = Poisson.draw
_draw_shards = Shards.draw


class _AllQueriesDoneError(Exception):
    """The last query was answered; what the method makes of it tells nothing more."""


class ShadowRandom:
    """Random numbers of a shadow gate: the draws of the real gate, but for the canary; no noise.

    Attributes:
        role: ``with`` the canary, ``without`` it, or ``out``: it exists and was not drawn.
        real: The random numbers of the real gate.
        true_value: The last true value of the shadow gate.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.real: Any = None
        self.true_value = torch.zeros(0)


def make_neighbours(method: Method) -> tuple[Spec, Sensitive, Sensitive]:
    """Make the worst neighbours that we know of.

    Eight records are black and white by turns. The canary is white: it is added, or replaces a
    black record. Where clients are the unit, the first has all black or all white records.

    Args:
        method: The method, which chooses the neighbouring relation.

    Returns:
        What is declared, the dataset without the canary and the one with it.
    """
    colours = np.arange(NUM_OTHER_RECORDS) // 2 % 2
    images = np.tile(colours[:, None, None, None], (1, *SHAPE)).astype(np.float32)
    labels = np.arange(NUM_OTHER_RECORDS) % NUM_CLASSES
    client_ids = None
    for spec in (
        Spec(SHAPE, NUM_CLASSES),
        Spec(SHAPE, NUM_CLASSES, NUM_OTHER_RECORDS, (4, 4)),
        Spec(SHAPE, NUM_CLASSES, num_clients=NUM_CLIENTS),
    ):
        with contextlib.suppress(PrivotError):
            plan = method.plan(spec)
            if spec.size or all(stage.operation != "sorted_blocks" for stage in plan.stages):
                break
    other_images = images.copy()
    other_labels = labels.copy()
    if plan.neighbours is Neighbours.ADD_REMOVE:
        other_images = np.concatenate([images, np.ones((1, *SHAPE), np.float32)])
        other_labels = np.append(labels, 1)
    elif plan.neighbours is Neighbours.CLIENT:
        client_ids = np.arange(NUM_OTHER_RECORDS) % NUM_CLIENTS
        images[client_ids == 0] = 0
        other_images[client_ids == 0] = 1
    else:
        other_images[0] = 1
    undeclared = dataclasses.replace(spec, size=None, class_sizes=None)
    without = Sensitive(images, labels, undeclared, client_ids=client_ids)
    with_canary = Sensitive(other_images, other_labels, undeclared, client_ids=client_ids)
    # A size that is declared under add-remove is one that either dataset may have.
    without.spec = spec
    with_canary.spec = spec
    return spec, without, with_canary


class ScoringGate:
    """A gate whose queries also go to its shadows.

    Attributes:
        score: The log likelihood ratio of the results so far.
    """

    def __init__(self, gate: Gate, shadows: dict[str, Gate]) -> None:
        """Keep the gate and its shadows, by role."""
        self._gate = gate
        self._shadows = shadows
        self.score = 0.0

    def __getattr__(self, name: str) -> Any:
        """Give the operation of that name, or a fact of the real gate."""
        if name in _OPERATIONS:
            return lambda *args, **options: self._query(name, args, options)
        return getattr(self._gate, name)

    def count_open_queries(self) -> int:
        """Count the queries of the plan that were not made yet."""
        return sum(self._gate.count_remaining_queries(name) for name in self._gate._stages)

    def _query(self, operation: str, args: tuple, options: dict[str, Any]) -> Any:
        """Query the gate and its shadows, and score the result.

        Args:
            operation: The operation of the gate.
            args: Its arguments.
            options: Its named arguments.

        Returns:
            The result of the gate.
        """
        rng: Any = self._gate._rng
        rng.last_result = None
        result = getattr(self._gate, operation)(*args, **options)
        for shadow in self._shadows.values():
            shadow._rng.real = rng  # type: ignore[attr-defined]
            getattr(shadow, operation)(*args, **options)
        if rng.last_result is not None:
            self._score_result(operation, args[0], *rng.last_result)
            if not self.count_open_queries():
                raise _AllQueriesDoneError
        return result

    def _score_result(self, operation: str, stage: str, result: Tensor, noise_std: float) -> None:
        """Add the log likelihood ratio of one result.

        Args:
            operation: The operation of the gate.
            stage: The name of the stage.
            result: The result with noise.
            noise_std: The standard deviation of the noise that the adversary assumes.
        """
        sampling = self._gate._stages[stage].sampling
        probability = 1.0
        if isinstance(sampling, Poisson):
            probability = sampling.sample_rate
        elif isinstance(sampling, Shards):
            probability = 1 / sampling.num_shards
        # Each row of a query to random shards has a draw of its own.
        has_rows = operation == "query_random_shards"
        rows = result.flatten(1) if has_rows else result.flatten()[None]
        log_density = {}
        for role, shadow in self._shadows.items():
            true_value = shadow._rng.true_value.view_as(rows)  # type: ignore[attr-defined]
            log_density[role] = -(rows - true_value).square().sum(1) / (2 * noise_std**2)
        if probability == 1:
            ratio = log_density["with"] - log_density["without"]
        else:
            out = log_density["out"] + math.log1p(-probability)
            drawn = math.log(probability)
            ratio = torch.logaddexp(out, log_density["with"] + drawn)
            ratio -= torch.logaddexp(out, log_density["without"] + drawn)
        self.score += float(ratio.sum())


def _draw_poisson_noted(sampling: Poisson, count: int, rng: Any) -> Tensor:
    """Draw a Poisson sample; a shadow draws that of the real gate, with or without the canary.

    Args:
        sampling: The sampling of the stage.
        count: The number of records.
        rng: The random numbers of the real gate or of a shadow.

    Returns:
        The indices of the records.
    """
    if not isinstance(rng, ShadowRandom):
        rng.last_draw = _draw_poisson(sampling, count, rng)
        return rng.last_draw
    others = rng.real.last_draw[rng.real.last_draw < NUM_OTHER_RECORDS]
    if rng.role == "with":
        return torch.cat([others, torch.tensor([NUM_OTHER_RECORDS])])
    return others


def _draw_shards_noted(sampling: Shards, count: int, rng: Any) -> Tensor:
    """Draw a shard for each row; a shadow draws the shard of the canary, or another one.

    Args:
        sampling: The sampling of the stage.
        count: The number of rows.
        rng: The random numbers of the real gate or of a shadow.

    Returns:
        The index of the shard of each row.
    """
    if not isinstance(rng, ShadowRandom):
        rng.last_draw = _draw_shards(sampling, count, rng)
        return rng.last_draw
    if rng.role != "out":
        return torch.zeros(count, dtype=torch.int64)  # the shard of the canary
    others = 1 + torch.randint(sampling.num_shards - 1, (count,))
    return torch.where(rng.real.last_draw == 0, others, rng.real.last_draw)


@contextlib.contextmanager
def _expose_true_values(noise_share: float = 1.0) -> Iterator[None]:
    """Give true values, draws and the secret order to the adversary.

    Args:
        noise_share: How much of the noise is really added; below 1 it plants a bug, which the
            adversary knows.
    """

    def add_noise(total: Tensor, noise_std: float, grid: float, rng: Any) -> Tensor:
        """Add the share of the noise, and expose the true value to a shadow.

        Args:
            total: The true value in steps of the grid.
            noise_std: The standard deviation of the noise.
            grid: The size of a step.
            rng: The random numbers of the gate, or of a shadow.

        Returns:
            The result of the query.
        """
        if isinstance(rng, ShadowRandom):
            rng.true_value = total * grid
            return rng.true_value
        result = _add_noise(total, noise_std * noise_share, grid, rng)
        rng.last_result = result, noise_std * max(noise_share, 1e-3)
        return result

    def get_array_order(gate: Gate) -> Tensor:
        return torch.arange(gate._dataset._count_records())

    with (
        mock.patch.object(secret_side, "add_noise", add_noise),
        mock.patch.object(Gate, "_get_secret_order", get_array_order),
        mock.patch.object(Poisson, "draw", _draw_poisson_noted),
        mock.patch.object(Shards, "draw", _draw_shards_noted),
    ):
        yield


def _open_gate(dataset: Sensitive, plan: Plan) -> Gate:
    """Open a gate that charges no ledger."""
    ledger: Any = NullLedger()
    return Gate(dataset, plan, ledger, ledger, runtime=_RUNTIME)


def _score_run(method: Method, plan: Plan, real: Sensitive, pair: tuple[Sensitive, ...]) -> float:
    """Run a method until its last query and give the log likelihood ratio of all results.

    Args:
        method: The method.
        plan: Its plan.
        real: The dataset behind the gate.
        pair: The dataset without the canary and the one with it.

    Returns:
        The ratio; above 0 the adversary decides for the canary.

    Raises:
        AssertionError: If the method ended before all queries of the plan were made.
    """
    free_plan = FreePlan(plan.stages, plan.neighbours)
    is_sampled = any(not isinstance(stage.sampling, Full) for stage in plan.stages)
    shadows = {}
    for role in ("without", "with", *["out"] * is_sampled):
        shadows[role] = _open_gate(pair[role == "with"], free_plan)
        shadows[role]._rng = ShadowRandom(role)  # type: ignore[assignment]
    gate: Any = ScoringGate(_open_gate(real, free_plan), shadows)
    with contextlib.suppress(_AllQueriesDoneError):
        method.fit(gate, Streams(0, _RUNTIME), ignore_progress)
    if gate.count_open_queries():
        raise AssertionError("the run made fewer queries than its plan has")
    return gate.score


def _plan_audit(method: Method, epsilon: float | None) -> tuple[Plan, tuple[Sensitive, Sensitive]]:
    """Plan an audit of a method on the worst neighbours.

    Args:
        method: The method.
        epsilon: The budget at `DELTA`; None: its settings fix the noise.

    Returns:
        The plan, and the dataset without the canary and the one with it.
    """
    spec, *pair = make_neighbours(method)
    if epsilon is None:
        return method.plan(spec), (pair[0], pair[1])
    return resolve_plan(spec, method, Budget(epsilon, DELTA))[0], (pair[0], pair[1])


def score_runs(
    method: Method, num_runs: int, noise_share: float = 1.0, epsilon: float | None = 4.0
) -> tuple[np.ndarray, np.ndarray, Plan]:
    """Score runs with the canary and runs without it.

    Args:
        method: The method, with settings so small that a run takes milliseconds.
        num_runs: The number of runs on each side.
        noise_share: How much of the noise is really added.
        epsilon: The budget at `DELTA`; None: its settings fix the noise.

    Returns:
        Scores with the canary [num_runs], scores without it [num_runs], and the plan.
    """
    plan, pair = _plan_audit(method, epsilon)
    with _expose_true_values(noise_share):
        scores = [
            np.array([_score_run(method, plan, real, pair) for _ in range(num_runs)])
            for real in (pair[1], pair[0])
        ]
    return scores[0], scores[1], plan
