"""Noisy values of the states of shards: of random shards, of clients, and of all shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from privot.errors import PlanError
from privot.privacy import clipping
from privot.privacy.noise import to_device
from privot.privacy.sampling import Shards
from privot.privacy.shards import ShardStates


class ShardQueries(ShardStates):
    """Queries on the states of shards. A query sees the state of one shard, through ``vmap``."""

    def query_random_shards(
        self, name: str, query: Callable[..., Tensor], *public: Tensor, clip_norm: float
    ) -> Tensor:
        """Query one random shard for each row of public arguments.

        For each row, a shard is drawn secretly and independently, and gives
        ``query(state, *row)``. Consumes one query of the stage per row.

        Args:
            name: The stage.
            query: The query.
            *public: Arguments with one row per query, [rows, ...] each.
            clip_norm: The bound on the norm of the value of a row.

        Returns:
            [rows, ...].
        """
        num_rows = len(public[0])
        stage = self._get_stage(name, "query_random_shards", num_rows)
        states = self._require_shards().states
        sampling = stage.sampling
        if not isinstance(sampling, Shards) or sampling.num_shards != self._num_shards:
            raise PlanError(f"Stage {name}: the plan is for another number of shards.")

        def query_drawn_shards(grid: float) -> Tensor:
            drawn, *rows = self._process_group.broadcast(
                sampling.draw(num_rows, self._rng), *public
            )
            local_indices, is_local = (
                None if values is None else to_device(values, self._device)
                for values in self._process_group.locate_shards(drawn)
            )
            drawn_states = {key: value[local_indices] for key, value in states.items()}
            mapped_query = torch.func.vmap(query, chunk_size=self._chunk_size)
            values = self._run_secretly(mapped_query, drawn_states, *rows)
            steps = clipping.clip_to_grid(values, clip_norm, grid)
            return (steps if is_local is None else steps * is_local[:, None]).view(values.shape)

        return self._run_query(stage, clip_norm, query_drawn_shards, count=num_rows)

    def query_clients(
        self,
        name: str,
        query: Callable[..., Tensor],
        *public: Tensor,
        clip_norm: float,
        client_indices: Tensor | None = None,
    ) -> Tensor:
        """Query each client with public arguments of its own.

        A row gives ``query(state, *row)`` of the client's shard, or of one of its shards that is
        drawn secretly for this row. Consumes one query of the stage per row and client: the plan is
        that of one client.

        Args:
            name: The stage.
            query: The query.
            *public: Arguments, [clients, rows, ...] each.
            clip_norm: The bound on the norm of the value of a row.
            client_indices: The clients to query, by a public schedule; None: all.

        Returns:
            [clients, rows, ...].
        """
        num_clients, num_rows = public[0].shape[:2]
        all_clients = torch.arange(self._num_clients)
        queried = all_clients if client_indices is None else client_indices.cpu()
        self._check_queried_clients(name, queried, num_clients)
        completed_by_client = self._completed_steps_by_client.get(name, all_clients)
        completed = int(completed_by_client[queried].max())
        stage = self._get_stage(name, "query_clients", num_rows, completed)
        states = self._require_shards().states
        sampling = stage.sampling if isinstance(stage.sampling, Shards) else None
        shards_per_client = sampling.num_shards if sampling else 1
        if self._num_shards != shards_per_client * len(all_clients):
            raise PlanError(f"Stage {name}: the plan is for another number of shards.")

        def query_each_client(grid: float) -> Tensor:
            client_states = states
            arguments = public
            client_query = query
            if sampling:
                drawn = sampling.draw(num_clients * num_rows, self._rng)
                drawn = to_device(drawn.view(num_clients, num_rows), self._device)
                arguments = (drawn, *public)
                client_states = {
                    key: value.unflatten(0, (-1, shards_per_client))
                    for key, value in states.items()
                }
                client_query = partial(_query_one_shard, query)
            if client_indices is not None:
                selected = to_device(queried, self._device)
                client_states = {key: value[selected] for key, value in client_states.items()}
            values = self._map_over_clients(client_query, client_states, arguments, num_rows)
            return clipping.clip_to_grid(values.flatten(0, 1), clip_norm, grid).view(values.shape)

        value = self._run_query(stage, clip_norm, query_each_client, count=num_rows, step=completed)
        completed_by_client[queried] += num_rows
        return value

    def _check_queried_clients(self, name: str, queried: Tensor, num_with_rows: int) -> None:
        """Check that there are rows for each client that is queried.

        Args:
            name: The stage.
            queried: The clients, int64 [clients].
            num_with_rows: The number of clients for which there are rows.
        """
        if (
            not num_with_rows
            or len(queried.unique()) != num_with_rows
            or not 0 <= queried.min() <= queried.max() < self._num_clients
        ):
            raise PlanError(f"Stage {name}: give rows for each client that is queried, once each.")

    def _map_over_clients(
        self,
        query: Callable[..., Tensor],
        client_states: dict[str, Tensor],
        arguments: tuple[Tensor, ...],
        num_rows: int,
    ) -> Tensor:
        """Apply a query to each row of each client.

        Args:
            query: Called as ``query(state, *row)``.
            client_states: [clients, ...] by name.
            arguments: [clients, rows, ...] each.
            num_rows: Rows of a client.

        Returns:
            [clients, rows, ...].
        """
        over_rows = torch.func.vmap(query, in_dims=(None, *(0 for _ in arguments)))
        chunk_size = max(1, self._chunk_size // num_rows)
        over_clients = torch.func.vmap(over_rows, chunk_size=chunk_size)
        values: Tensor = self._run_secretly(over_clients, client_states, *arguments)
        return values

    def sum_over_shards(
        self, name: str, query: Callable[..., Tensor], *public: Any, clip_norm: float
    ) -> Tensor:
        """Add up ``query(state, *public)`` over all shards.

        Args:
            name: The stage.
            query: The query.
            *public: Further arguments, the same for all shards.
            clip_norm: The bound on the norm of the value of a shard.

        Returns:
            [...].
        """
        stage = self._get_stage(name, "sum_over_shards")
        states = self._require_shards().states

        def sum_values(grid: float) -> Tensor:
            mapped_query = torch.func.vmap(
                query, in_dims=(0, *(None for _ in public)), chunk_size=self._chunk_size
            )
            arguments = self._process_group.broadcast(*public)
            values = self._run_secretly(mapped_query, states, *arguments)
            return clipping.clip_to_grid(values, clip_norm, grid).sum(0).view(values.shape[1:])

        return self._run_query(stage, clip_norm, sum_values)


def _query_one_shard(
    query: Callable[..., Tensor],
    client_states: dict[str, Tensor],
    shard_index: Tensor,
    *row: Tensor,
) -> Tensor:
    """Apply a query to one shard of a client.

    Args:
        query: Called as ``query(state, *row)``.
        client_states: The states of the client's shards, [shards, ...] by name.
        shard_index: The shard, [].
        *row: Further arguments.

    Returns:
        [...].
    """
    state = {key: value[shard_index[None]][0] for key, value in client_states.items()}
    return query(state, *row)
