"""Shards: disjoint parts of the records, each with a state that is trained on the secret side.

An update sees the records and the state of one shard. It is mapped over the shards with ``vmap``,
so no shard can reach into another one. `privot.privacy.shard_queries` gives noisy values of states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from privot.data.dataset import NO_RECORD, Records
from privot.errors import PlanError, QueryError
from privot.privacy import shard_checkpoint
from privot.privacy.noise import to_device
from privot.privacy.sampling import CLIENT, REPLACE
from privot.privacy.secret_side import SecretSide
from privot.runtime.cuda_graphs import GraphCache

MAX_SHARDS = 2**22  # more clipped values could leave the range of an exact float64 sum


class ShardData(NamedTuple):
    """The shards of this process.

    Attributes:
        records: Images [shards, records, channels, height, width] and labels [shards, records].
        states: Tensors [shards, ...] by name.
    """

    records: Records
    states: dict[str, Tensor]


class ShardStates(SecretSide):
    """Splits the records into shards, and trains, saves and restores their states."""

    _shards: ShardData | None = None
    _num_shards = 0  # of all processes together
    _graph_cache: GraphCache | None = None

    def split_into_shards(
        self, num_shards: int, initial_state: dict[str, Tensor], records_per_shard: int = 0
    ) -> None:
        """Split the records into shards of equal size. A resumed run restores their stored states.

        The record at position p of the secret order is in shard p mod ``num_shards``; up to
        ``num_shards`` - 1 records are left out. If ``records_per_shard`` is given, every shard
        belongs to one client, and every client has the same number of shards.

        Args:
            num_shards: The number of shards.
            initial_state: Public tensors [num_shards, ...] by name.
            records_per_shard: Records that a shard of a client shows, a public number; 0: shards
                are not of clients.

        Raises:
            PlanError: If the split has no privacy argument or does not fit the records.
        """
        self._check_split(num_shards, initial_state, records_per_shard)
        if not self._process_group.is_follower:
            self._charge()
            if self._is_resumed and (file := self._checkpoint_path()).exists():
                initial_state = shard_checkpoint.read_shard_checkpoint(file, initial_state)
        # privacy: no process goes past this line before the leader has paid. In the order of names,
        # because a stored state has an order of its own.
        states = {
            name: self._process_group.scatter(initial_state[name]) for name in sorted(initial_state)
        }
        states = {
            name: value.detach().to(self._device).clone(memory_format=torch.contiguous_format)
            for name, value in states.items()
        }
        self._shards = ShardData(self._load_shard_records(num_shards, records_per_shard), states)
        self._num_shards = num_shards
        if self._graph_cache is not None:  # graphs have the addresses of the old states
            self._graph_cache = GraphCache(self._device)

    def _check_split(
        self, num_shards: int, initial_state: dict[str, Tensor], records_per_shard: int
    ) -> None:
        """Check a split before anything is charged; see `split_into_shards` for the arguments."""
        num_clients = self._num_clients
        is_one_shard_per_client = records_per_shard > 0 and num_shards == num_clients
        # privacy: positions are a uniform permutation, so replacing a record changes the shard of
        # its position and no other. One record more changes the size of the shards or the number
        # of records left out, so none may be added or removed, except among the records of a
        # client who has one shard.
        if self.plan.neighbours is not REPLACE and not (
            self.plan.neighbours is CLIENT and is_one_shard_per_client
        ):
            raise PlanError(
                f"Shards have no proof under {self.plan.neighbours} neighbours, unless each shard "
                "has all records of one client."
            )
        if records_per_shard < 0 or (records_per_shard and num_shards % num_clients):
            raise PlanError(
                f"{num_shards} shards cannot be divided among {num_clients} clients: every client "
                "needs the same number."
            )
        if num_shards > MAX_SHARDS:
            raise PlanError(
                f"{num_shards} shards: the sum of more than {MAX_SHARDS} of them is not exact."
            )
        if (
            any(len(value) != num_shards for value in initial_state.values())
            or not 0 < num_shards <= self._dataset._count_records()
        ):
            raise PlanError(
                f"{num_shards} shards need a state each and at least one record each. "
                "Set fewer critics."
            )
        if num_shards < self._process_group.world_size:
            raise PlanError(
                f"{num_shards} shards are fewer than the processes of this run. "
                "Start fewer processes."
            )

    def _load_shard_records(self, num_shards: int, records_per_shard: int) -> Records:
        """Load the records of this process's shards; see `split_into_shards` for the arguments.

        Returns:
            Images [local shards, records, ...] and labels [local shards, records].
        """
        count = self._dataset._count_records()
        (leader_count,) = self._process_group.broadcast(torch.tensor(count))
        self._stop_if_any_failed(
            int(leader_count) != count, "The processes of this run do not read the same records."
        )
        (order,) = self._process_group.broadcast(
            torch.empty(count, dtype=torch.int64)
            if self._process_group.is_follower
            else self._get_secret_order()
        )
        local_shards = torch.arange(
            self._process_group.rank, num_shards, self._process_group.world_size
        )
        if records_per_shard:
            indices = self._dataset._shard_record_indices(
                local_shards, num_shards // self._num_clients, records_per_shard, order.numpy()
            )
        else:
            positions = local_shards[:, None] + num_shards * torch.arange(count // num_shards)
            indices = order[positions]
        records = self._dataset._read_records(indices.flatten().clamp(min=0), self._device)
        is_empty = to_device(indices.flatten() == NO_RECORD, self._device)
        images = records.images.masked_fill(is_empty.view(-1, 1, 1, 1), 0.0)  # black
        labels = records.labels.masked_fill(is_empty, 0)
        return Records(images.unflatten(0, tuple(indices.shape)), labels.view(indices.shape))

    def update_shards(
        self,
        query: Callable[..., dict[str, Tensor]],
        *public: Any,
        shard_indices: Tensor | None = None,
        records_per_step: int | None = None,
    ) -> None:
        """Replace the state of each shard by ``query(images, labels, state, *public)``.

        Nothing leaves the secret side, so this costs nothing beyond the plan.

        Args:
            query: Gives the new state, of the same names and shapes.
            *public: Further arguments, the same for all shards.
            shard_indices: The shards to update, by a public schedule; None: all.
            records_per_step: Records of a shard that the query processes at a time, if not all. It
                bounds the memory and nothing else.

        Raises:
            QueryError: If the query fails or gives another shape.
        """
        (images, labels), states = self._require_shards()
        if shard_indices is None:
            shard_indices = torch.arange(self._num_shards)
        local_shards = to_device(self._process_group.select_local(shard_indices), self._device)
        public = self._process_group.broadcast(*public)
        mapped_query = torch.func.vmap(query, in_dims=(0, 0, 0, *(None for _ in public)))

        def update_chunk(chunk: Tensor, *public: Any) -> bool:
            old = {name: value[chunk] for name, value in states.items()}
            new = mapped_query(images[chunk], labels[chunk], old, *public)
            # privacy: a state of another shape would be broadcast, also from shard to shard.
            if {name: value.shape for name, value in new.items()} != {
                name: value.shape for name, value in old.items()
            }:
                return False
            for name, value in states.items():
                value[chunk] = new[name].detach().to(value.dtype)
            return True

        step = (
            update_chunk
            if self._graph_cache is None
            else partial(self._graph_cache, update_chunk, query)
        )
        chunk_size = max(1, self._chunk_size // (records_per_step or labels.shape[1]))
        for chunk in local_shards.split(chunk_size) if len(local_shards) else ():
            if not self._run_secretly(step, chunk, *public):
                self._close()
                raise QueryError("An update must give a state of the same names and shapes.")
        self._stop_if_any_failed()

    def save_shard_states(self) -> None:
        """Store the states beside the ledger, on the secret side, for a resumed run."""
        states = self._require_shards().states
        (can_resume,) = self._process_group.broadcast(torch.tensor(self._folder is not None))
        if not can_resume:
            return
        all_states = {
            name: self._process_group.gather(value, self._num_shards)
            for name, value in states.items()
        }
        if not self._process_group.is_follower:
            shard_checkpoint.write_shard_checkpoint(self._checkpoint_path(), all_states)

    def delete_shard_states(self) -> None:
        """Delete the stored states and the stored secret order of the records."""
        if self.ticket is not None:
            shard_checkpoint.remove_shard_checkpoint(self._checkpoint_path())
            shard_checkpoint.remove_shard_checkpoint(
                shard_checkpoint.secret_order_path(self._ledger, self.ticket)
            )
        self._shards = None

    def _require_shards(self) -> ShardData:
        if self._shards is None:
            raise PlanError("The records are not split into shards.")
        return self._shards
