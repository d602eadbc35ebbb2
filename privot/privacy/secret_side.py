"""The secret side of the gate: records in their secret order, and how a query on them is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from privot.data.dataset import Records, Sensitive
from privot.errors import PlanError, QueryError, ReleaseError
from privot.privacy import shard_checkpoint
from privot.privacy.answers import PaidQueries
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom, add_noise, choose_grid, to_device
from privot.privacy.plan import Plan, Stage
from privot.privacy.sampling import ADD_REMOVE, Fixed
from privot.privacy.sensitivity import SENSITIVITY
from privot.runtime import Runtime
from privot.runtime.interrupts import defer_sigint
from privot.runtime.process_group import SingleProcess

# Operations whose results depend on which record has which position: a resumed run needs the
# positions that it began with.
ORDER_DEPENDENT_OPERATIONS = (
    "rows",
    "query_sample",
    "privatize",
    "query_random_shards",
    "sum_over_shards",
    "query_clients",
)


class SecretSide(PaidQueries):
    """Runs queries on the records of one data set and adds noise to what they compute.

    Args:
        dataset: The records.
        plan: All that the run may query.
        ledger: Where the plan is charged.
        runtime: Device and chunk size.
        insecure_seed: The seed of the noise, for tests; None: randomness of the operating system.
        method: See `PaidQueries`.
        folder: See `PaidQueries`.
        process_group: See `PaidQueries`.
    """

    def __init__(
        self,
        dataset: Sensitive,
        plan: Plan,
        ledger: Ledger,
        *,
        runtime: Runtime,
        insecure_seed: int | None,
        method: str,
        folder: Path | None,
        process_group: SingleProcess,
    ):
        super().__init__(
            plan,
            ledger,
            method=method,
            folder=folder,
            insecure=insecure_seed is not None,
            num_clients=dataset.spec.num_clients or 1,
            process_group=process_group,
        )
        self.spec = dataset.spec
        self._dataset = dataset
        self._device = runtime.torch_device
        self._chunk_size = runtime.chunk_size
        self._rng = SecretRandom(insecure_seed)
        self._cached_records: list[Tensor] | None = None
        self._secret_order: Tensor | None = None

    # How a query result is computed

    def _run_query(
        self,
        stage: Stage,
        clip_norm: float,
        compute: Callable[[float], Tensor],
        grid: float | None = None,
        count: int = 1,
        step: int | None = None,
    ) -> Tensor:
        """Give a query result: mark it, compute it, add noise, store it and commit its digest.

        A crash at any point of this order can only charge too much.

        Args:
            stage: The stage that covers the query.
            clip_norm: The bound on the norm of a value, of which `SENSITIVITY` is a multiple.
            compute: Gives the result without noise, in integer steps of the grid it is called with.
            grid: The grid step; None: chosen by the clip norm and the noise.
            count: Steps of the stage that the query consumes.
            step: The first of these steps; None: the next one.

        Returns:
            The noisy result, float64.
        """
        if not 1e-30 < clip_norm < 1e30:  # squares of values must neither vanish nor overflow
            raise PlanError(
                f"Stage {stage.name}: clip_norm={clip_norm} (the bound of a norm) is out of range. "
                "Give a finite number above 0."
            )
        step = self._completed_steps[stage.name] if step is None else step
        stored = self._process_group.broadcast_optional(self._load_result(stage, step))
        if stored:
            value = stored["value"].to(self._device)
        else:
            noise_std = (
                stage.noise_multiplier
                * SENSITIVITY[stage.operation, self.plan.neighbours]
                * clip_norm
            )
            grid = grid or choose_grid(clip_norm, noise_std)
            if self._process_group.is_follower:
                value = self._reduce_sum(compute(grid))
            else:
                ticket = self._charge()
                self._get_secret_order()  # on disk before anything depends on it
                with defer_sigint():
                    self._mark_asked(ticket, stage, step, count)
                    value = add_noise(self._reduce_sum(compute(grid)), noise_std, grid, self._rng)
                    self._store_result(ticket, stage, step, value)
            (value,) = self._process_group.broadcast(value)
        self._completed_steps[stage.name] = max(self._completed_steps[stage.name], step + count)
        return value

    def _reduce_sum(self, local_sum: Tensor) -> Tensor:
        """Add up the sums of all processes at the leader, unless one of them failed."""
        self._stop_if_any_failed()
        return self._process_group.reduce_sum(local_sum)

    def _map_query(
        self,
        query: Callable[..., Tensor],
        images: Tensor,
        labels: Tensor,
        public: tuple[Any, ...],
        stage: Stage,
    ) -> Tensor:
        """Apply a query to each record on its own, with ``vmap``.

        Args:
            query: Called as ``query(image, label, *public)``.
            images: [records, channels, height, width].
            labels: [records].
            public: Further arguments, the same for all records.
            stage: The stage of the query.

        Returns:
            [records, ...].
        """
        count = len(labels)
        if self.plan.neighbours is ADD_REMOVE or (
            isinstance(stage.sampling, Fixed) and stage.sampling.sample_size > self._chunk_size
        ):
            # privacy: float32 rounding depends on the shape of a batch, so each chunk is padded
            # with black images to one size. No record may change how the others are rounded:
            # neither by its presence, nor by moving another record into the last, shorter chunk.
            padding = self._chunk_size - count
            images, labels = (
                torch.cat([values, values.new_zeros(padding, *values.shape[1:])])
                for values in (images, labels)
            )
        mapped_query = torch.func.vmap(query, in_dims=(0, 0, *(None for _ in public)))
        values: Tensor = self._run_secretly(mapped_query, images, labels, *public)
        return values[:count]

    def _infer_query_shape(
        self, query: Callable[..., Tensor], public: tuple[Any, ...]
    ) -> tuple[int, ...]:
        """Find the shape of a query's value on one record, from a black image.

        The image is public, so an error of the query keeps its text and comes before any charge.
        """
        image = torch.zeros(1, *self.spec.shape, device=self._device)
        label = torch.zeros(1, dtype=torch.int64, device=self._device)
        mapped_query = torch.func.vmap(query, in_dims=(0, 0, *(None for _ in public)))
        return tuple(mapped_query(image, label, *public).shape[1:])

    # Records

    def _get_secret_order(self) -> Tensor:
        """Give the secret order: record ``order[p]`` has position p throughout this run.

        privacy: the order in which a reader finds records depends on their content (class folders,
        file names). A uniform permutation that is independent of everything makes the records
        exchangeable: see docs/methods/gate.md. It is drawn once in a run. Where the run can be
        resumed and positions matter to its results, it is stored beside the ledger before anything
        depends on it.

        Returns:
            int64 [records].

        Raises:
            ReleaseError: If the stored order of a resumed run is missing or was altered.
        """
        if self._secret_order is None:
            self._secret_order = self._load_or_draw_order()
        return self._secret_order

    def _load_or_draw_order(self) -> Tensor:
        count = self._dataset._count_records()
        is_stored = self._folder is not None and any(
            stage.operation in ORDER_DEPENDENT_OPERATIONS for stage in self.plan.stages
        )
        if not is_stored:
            return self._rng.permutation(count)
        file = shard_checkpoint.secret_order_path(self._ledger, self.ticket)
        if self._is_resumed and file.exists():
            expected = {"order": torch.empty(count, dtype=torch.int64)}
            return shard_checkpoint.read_shard_checkpoint(file, expected)["order"]
        if self._is_resumed and (
            any(self._consumed_steps.values()) or self._checkpoint_path().exists()
        ):
            raise ReleaseError(
                f"{file}: the secret order of the records of this unfinished run is missing. "
                "Start a new run, which is charged again."
            )
        order = self._rng.permutation(count)
        shard_checkpoint.write_shard_checkpoint(file, {"order": order})
        return order

    def _checkpoint_path(self) -> Path:
        return shard_checkpoint.shard_checkpoint_path(self._ledger, self.ticket)

    def _draw_chunks(self, stage: Stage) -> Iterator[Records]:
        """Draw the sample of a query and give it in chunks: at least one, which may be empty."""
        count = self._dataset._count_records()
        positions = stage.sampling.draw(count, self._rng)
        total = count if positions is None else len(positions)
        for start in range(0, max(total, 1), self._chunk_size):
            chunk = slice(start, min(start + self._chunk_size, total))
            yield self._load_records(chunk if positions is None else positions[chunk])

    def _load_records(self, positions: slice | Tensor) -> Records:
        """Load records by their positions in the secret order.

        All records stay in the memory of a GPU if they fit into a quarter of it.
        """
        if self._cached_records is None:
            self._cached_records = []
            if self._device.type == "cuda":
                order = self._get_secret_order().numpy()
                self._cached_records = self._dataset._copy_to_gpu(self._device, order)
        if not self._cached_records:
            return self._dataset._read_records(self._get_secret_order()[positions], self._device)
        if isinstance(positions, Tensor):
            positions = to_device(positions, self._device)
        images, labels = (values[positions] for values in self._cached_records)
        return Records(images / 255 if images.dtype == torch.uint8 else images, labels)

    # Errors

    def _run_secretly(self, query: Callable[..., Any], *args: Any) -> Any:
        """Call a function on secret values; if it fails, close the gate and hide its message.

        Raises:
            QueryError: If the function raises anything. Only the type of its error is named.
        """
        if self.plan.stages and not self._stages:
            raise PlanError("The gate is closed, because a query has failed.")
        try:
            # privacy: cuDNN must neither choose an algorithm by timing it on records nor sum in an
            # order that varies: the value of a record depends on that record alone.
            with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
                return query(*args)
        except Exception as error:
            error_type = type(error).__name__
        self._close()
        # privacy: the text of an error can hold records, so the error is not even the context of
        # the one that is raised here. Its type follows from the code, which is public.
        is_out_of_memory = error_type in ("OutOfMemoryError", "MemoryError")
        advice = (
            "Process fewer records at a time (microbatch)."
            if is_out_of_memory
            else "Try it on public data."
        )
        raise QueryError(f"A query failed on the secret side with {error_type}. {advice}")

    def _stop_if_any_failed(
        self,
        failed: bool = False,
        message: str = (
            "A query failed on the secret side of another process. Try it on public data."
        ),
    ) -> None:
        """Stop in all processes if one of them failed.

        Args:
            failed: Whether this process failed.
            message: What the error says.
        """
        if self._process_group.any_failed(failed):
            self._close(peers_notified=True)
            raise QueryError(message)

    def _close(self, peers_notified: bool = False) -> None:
        """Close the gate after a failure; tell the other processes unless they know of it."""
        # privacy: a failure may depend on the records. It is reported once, then no query runs.
        self._stages.clear()
        if not peers_notified:
            self._process_group.any_failed(True)
