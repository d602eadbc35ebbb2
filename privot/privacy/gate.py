"""The gate: the only way to sensitive records. Queries run inside it, noisy results come out.

A query is a plain function. For `sum`, `rows` and `sorted_blocks` it sees one record,
``query(image, label, *public) -> tensor``, and the gate maps it over the records with ``vmap``, so
that no record can affect the value of another one. For `query_sample` it sees a whole sample,
``query(records, *public)``. For the operations on shards it sees one shard or its state, see
`privot.privacy.shards`. Every operation knows records by their position in a secret uniform order,
never in that of a file. `privot.privacy.sensitivity` has the bound of each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from privot.data.dataset import Records, Sensitive
from privot.errors import BudgetError, PlanError, QueryError
from privot.privacy import clipping
from privot.privacy.ledger import Ledger
from privot.privacy.noise import choose_grid
from privot.privacy.plan import Plan, PrivacyTarget, Stage
from privot.privacy.protocols import RecordChannel
from privot.privacy.sensitivity import require_proof
from privot.privacy.shard_queries import ShardQueries
from privot.privacy.sorted_blocks import bound_block_sums, split_by_class, sum_sorted_blocks
from privot.runtime import Runtime
from privot.runtime.cuda_graphs import GraphCache
from privot.runtime.process_group import SingleProcess

MAX_SUM_RECORDS = 2**32  # the sum of more clipped values could leave the range of int64
DISTRIBUTED_OPERATIONS = ("query_random_shards", "sum_over_shards")  # several processes share these


class Gate(ShardQueries):
    """The only way to the records of a `Sensitive` data set. One gate serves one run of one plan.

    Args:
        dataset: The records.
        plan: All that the run may query.
        ledger: Where the whole plan is charged before the first record is read.
        privacy_target: The limit that the cost of the plan must not exceed.
        method: The name of the run in the ledger.
        runtime: Device and chunk size.
        folder: The folder of the run on the public side. It has the ticket of the reservation and
            the query results, so that a crashed run can be resumed; None: it cannot.
        insecure_seed: Seeds the noise, for tests. The release is then unpublishable.
        process_group: The processes that share the shards. Only the first one has the ledger and
            the folder and draws secret random numbers.

    Attributes:
        spec: What is public about the data set.
        plan: All that the run may query.
        ticket: The reservation in the ledger; None: nothing is charged yet.
        no_guarantee_reason: Why the release has no guarantee; empty if it has one.
        insecure: Whether the noise is seeded.

    Raises:
        PlanError: If a stage of the plan has no privacy argument.
        BudgetError: If the plan costs more than the privacy target allows.
        LedgerError: If an unfinished run in the folder was charged elsewhere.
    """

    def __init__(
        self,
        dataset: Sensitive,
        plan: Plan,
        ledger: Ledger,
        privacy_target: PrivacyTarget,
        *,
        method: str = "",
        runtime: Runtime | None = None,
        folder: Path | None = None,
        insecure_seed: int | None = None,
        process_group: SingleProcess | None = None,
    ):
        process_group = process_group or SingleProcess()
        is_distributable = plan.stages and all(
            stage.operation in DISTRIBUTED_OPERATIONS for stage in plan.stages
        )
        if process_group.world_size > 1 and not is_distributable:
            raise PlanError(
                f"{method or 'This method'} does not query shards alone, and several processes can "
                "share only shards. Run it without torchrun."
            )
        require_proof(plan)
        if plan.stages and not privacy_target.allows(plan.cost()):
            raise BudgetError(
                "The plan costs more than the budget of this run. Calibrate it, or choose a larger "
                "epsilon."
            )
        runtime = runtime or Runtime()
        super().__init__(
            dataset,
            plan,
            ledger,
            runtime=runtime,
            insecure_seed=insecure_seed,
            method=method,
            folder=folder,
            process_group=process_group,
        )
        self.no_guarantee_reason = ""
        self._graph_cache = GraphCache(self._device) if runtime.uses_cuda_graphs else None

    def sum(
        self,
        name: str,
        query: Callable[..., Tensor],
        *public: Any,
        clip_norm: float,
        per_class: bool = False,
    ) -> Tensor:
        r"""Add up the values of all records of a sample: :math:`\sum_i clip(q(x_i,y_i))+noise`.

        Args:
            name: The stage.
            query: Called as ``query(image, label, *public)`` for each record.
            *public: Further arguments, the same for all records.
            clip_norm: The bound on the norm of the value of a record.
            per_class: Whether to add up each class on its own. A record changes one row only, so
                the sensitivity is the same.

        Returns:
            [...], or [classes, ...] if ``per_class``.
        """
        stage = self._get_stage(name, "sum")
        if self._dataset._count_records() > MAX_SUM_RECORDS:
            raise PlanError(
                f"Stage {name}: a sum of so many records is not exact in 64 bits. "
                "Split the data set."
            )
        if not self._completed_steps[name]:  # later queries of a stage have the same shape
            self._infer_query_shape(query, public)
        num_classes = self.spec.num_classes

        def sum_chunks(grid: float) -> Tensor:
            # Sums of integers below 2^53 are exact in any order. Larger ones are added in int64.
            max_sum = self._dataset._count_records() * clip_norm / grid
            dtype = torch.float64 if max_sum < clipping.MAX_EXACT_SUM else torch.int64
            total = torch.zeros((), dtype=dtype, device=self._device)
            for images, labels in self._draw_chunks(stage):
                values = self._map_query(query, images, labels, public, stage)
                if per_class:
                    steps = clipping.clip_to_grid(values, clip_norm, grid)
                    chunk_sum = one_hot(labels, num_classes).double().T @ steps
                else:
                    chunk_sum = clipping.sum_clipped_rows(values, clip_norm, grid)
                total = total + chunk_sum.to(dtype)
            shape = values.shape[1:]
            return total.view((num_classes, *shape) if per_class else shape)

        return self._run_query(stage, clip_norm, sum_chunks)

    def rows(
        self, name: str, query: Callable[..., Tensor], *public: Any, clip_norm: float
    ) -> Tensor:
        """Give the value of every record as a row of its own, in the secret order of this run.

        Args:
            name: The stage.
            query: Called as ``query(image, label, *public)`` for each record.
            *public: Further arguments, the same for all records.
            clip_norm: The bound on the norm of a row.

        Returns:
            [records, ...].
        """
        stage = self._get_stage(name, "rows")
        if self.spec.size is None:
            raise PlanError(
                f"Stage {name}: the result has one row per record, so the number of records must "
                "be declared public."
            )
        shape = self._infer_query_shape(query, public)

        def collect_rows(grid: float) -> Tensor:
            rows = [
                clipping.clip_to_grid(
                    self._map_query(query, *chunk, public, stage), clip_norm, grid
                )
                for chunk in self._draw_chunks(stage)
            ]
            return torch.cat(rows).view(-1, *shape)

        return self._run_query(stage, clip_norm, collect_rows)

    def query_sample(
        self,
        name: str,
        query: Callable[..., Tensor],
        *public: Any,
        clip_norm: float,
        shape: tuple[int, ...],
    ) -> Tensor:
        """Give ``query(records, *public)`` of a whole sample, clipped once.

        Args:
            name: The stage.
            query: The query. It sees all records of the sample at once.
            *public: Further arguments.
            clip_norm: The bound on the norm of the value.
            shape: The shape of the value, which is public. An empty sample gives zeros.

        Returns:
            [*shape].
        """
        stage = self._get_stage(name, "query_sample")

        def query_whole_sample(grid: float) -> Tensor:
            chunks = self._draw_chunks(stage)
            records = Records(*(torch.cat(values) for values in zip(*chunks, strict=True)))
            value = (
                self._run_secretly(query, records, *public)
                if len(records.labels)
                else torch.zeros(shape, device=self._device)
            )
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                self._close()
                raise QueryError(
                    f"Stage {stage.name}: the value of the query does not have its declared shape "
                    f"{list(shape)}."
                )
            return clipping.clip_to_grid(value[None], clip_norm, grid).view(shape)

        return self._run_query(stage, clip_norm, query_whole_sample)

    def sorted_blocks(
        self,
        name: str,
        query: Callable[..., Tensor],
        *public: Any,
        frame: Tensor,
        num_blocks: int,
        clip_norm: float,
    ) -> Tensor:
        r"""Sort the projections of each class on each direction, and average blocks of them.

        The sensitivity of the sum of a block is :math:`2R\,\sigma_{max}(frame)` with R =
        ``clip_norm``, which is :math:`2R\sqrt{k/d}` for a tight frame.

        Args:
            name: The stage.
            query: Maps a record to [dim], as ``query(image, label, *public)``.
            *public: Further arguments, the same for all records.
            frame: Directions, [slices, dim].
            num_blocks: Blocks of order statistics; records beyond a multiple of it are left out.
            clip_norm: The radius of the ball to which mapped records are clipped.

        Returns:
            Means of blocks, [classes, slices, num_blocks].
        """
        stage = self._get_stage(name, "sorted_blocks")
        class_sizes = self.spec.class_sizes or ()
        if not class_sizes or not 0 < num_blocks <= min(class_sizes):
            raise PlanError(
                f"Stage {name}: declare class sizes of at least {num_blocks} records each."
            )
        is_in_range = 1e-30 < clip_norm < 1e30
        if (
            not is_in_range
            or frame.ndim != 2
            or self._infer_query_shape(query, public) != frame.shape[1:]
        ):
            raise PlanError(
                f"Stage {name}: give a radius (clip_norm) above 0, and a frame of shape "
                "[slices, size of the query's value]."
            )
        frame = frame.double().to(self._device)
        grid = choose_grid(clip_norm, clip_norm)
        bound = bound_block_sums(frame, clip_norm, grid)
        if max(class_sizes) * bound / grid >= clipping.MAX_EXACT_SUM:
            raise PlanError(
                f"Stage {name}: blocks of so many records are not exact. Declare smaller classes, "
                "or use a smaller frame."
            )

        def sum_blocks(_: float) -> Tensor:
            points = []
            labels = []
            for chunk in self._draw_chunks(stage):
                values = self._map_query(query, *chunk, public, stage)
                points.append(clipping.clip_rows(values, clip_norm))
                labels.append(chunk.labels)
            by_class = split_by_class(torch.cat(points), torch.cat(labels), len(class_sizes))
            return sum_sorted_blocks(by_class, frame, num_blocks, grid)

        total = self._run_query(stage, bound, sum_blocks, grid)
        block_sizes = [size // num_blocks for size in class_sizes]
        return total / torch.tensor(block_sizes, device=total.device).view(-1, 1, 1)

    def privatize(self, channel: RecordChannel) -> Tensor:
        """Send each record on its own through a local channel. Consumes the whole plan.

        Args:
            channel: Clips a record to its domain and adds noise of its own.

        Returns:
            [records, output_dim], in the secret order of this run.
        """
        stages = [self._get_stage(stage.name, "privatize") for stage in self.plan.stages]
        num_labels = channel.record_dim - self.spec.num_features
        if channel.plan() != self.plan or num_labels not in (0, 1):
            raise PlanError(
                "The plan is not that of this channel, or the channel is for records of another "
                "shape."
            )
        if self.spec.size is None:
            raise PlanError(
                "The result has one row per record, so the number of records must be declared "
                "public."
            )
        ticket = self._charge()
        self._get_secret_order()
        for stage in stages:
            self._mark_asked(ticket, stage, 0, 1)
        chunks = (
            torch.cat([images.flatten(1), labels[:, None]], 1)[:, : channel.record_dim]
            for images, labels in self._draw_chunks(stages[0])
        )
        value = torch.cat(
            [self._run_secretly(channel.privatize, chunk.cpu(), self._rng) for chunk in chunks]
        )
        for stage in stages:
            self._store_result(ticket, stage, 0, value)
            self._completed_steps[stage.name] = 1
        return value

    def read_without_guarantee(self, reason: str) -> Records:
        """Give all records to a method without a mechanism.

        The release then has no guarantee, and the ledger is charged an infinite epsilon, which any
        limit of the data set refuses.

        Args:
            reason: Why, in words that the release repeats.

        Returns:
            All records, in the order of the file.
        """
        if self._process_group.world_size > 1:
            raise PlanError(
                "Records are not sent to several processes. Run this method without torchrun."
            )
        stage = Stage("open", "query_sample", 0.0)
        self._ledger.reserve(Plan((stage,), self.plan.neighbours), self._method)
        self.no_guarantee_reason = reason
        return self._dataset._read_records(slice(None), self._device)
