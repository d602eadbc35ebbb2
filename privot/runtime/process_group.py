"""Several processes that share the shards of a run, one GPU each, started by torchrun.

All processes run the same method on the same public stream, and all of them are on the secret side
of the gate. The first process leads: it alone has the ledger, draws secret random numbers, adds the
noise and writes files, and it broadcasts every value that the other processes treat as public.
States of shards and sums before their noise are sent between processes. They are secret, so the
processes must trust one another and the network between them. Only tensors are sent, nothing that
could be executed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from privot.errors import PrivotError, SettingError

TIMEOUT = timedelta(minutes=30)  # for another process, which may have to read records
PROCESS_LOST = (
    "Another process of this run has ended or cannot be reached. Queries so far stay charged; "
    "continue with --resume."
)
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class ProcessGroupError(PrivotError):
    """A process of the run is lost. Without its shards no query can be computed."""


def read_torchrun_rank() -> tuple[int, int, int]:
    """Read the rank of this process from the environment variables of torchrun.

    Returns:
        The rank, the number of processes, and the rank on this machine; (0, 1, 0) without torchrun.

    Raises:
        SettingError: If a variable is not an integer.
    """
    if any(not os.environ.get(name) for name in TORCHRUN_VARIABLES):
        return 0, 1, 0
    try:
        rank, world_size, local_rank = (int(os.environ[name]) for name in TORCHRUN_VARIABLES[:3])
    except ValueError:
        raise SettingError(
            "RANK, WORLD_SIZE and LOCAL_RANK are not integers. Let torchrun set them."
        ) from None
    return (rank, world_size, local_rank) if world_size > 1 else (0, 1, 0)


class SingleProcess:
    """A run in one process, which has all shards. Every collective operation is the identity.

    Attributes:
        rank: The number of this process, from 0.
        world_size: The number of processes.
        is_follower: Whether another process leads.

    >>> SingleProcess().reduce_sum(torch.ones(2))
    tensor([1., 1.])
    """

    rank = 0
    world_size = 1
    is_follower = False

    def broadcast(self, *values: Any) -> tuple[Any, ...]:
        """Replace tensors by those of the leader, bit for bit; shapes must agree beforehand."""
        return values

    def broadcast_optional(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
        """Give the leader's tensors, or None if it has none; shapes need not agree beforehand."""
        return tensors

    def broadcast_text(self, text: str) -> str:
        """Give the leader's text."""
        return text

    def select_local(self, shard_indices: Tensor) -> Tensor:
        """Select the shards of this process; shard k is in process k mod count, at k // count.

        Args:
            shard_indices: Indices among all shards, int64 [shards].

        Returns:
            Indices among the shards of this process, int64 [local shards].
        """
        return shard_indices

    def scatter(self, state: Tensor) -> Tensor:
        """Give the rows of this process out of the leader's [shards, ...]: [local shards, ...]."""
        return state

    def gather(self, state: Tensor, num_shards: int) -> Tensor:
        """Collect the states of all shards at the leader.

        Args:
            state: States of the shards of this process, [local shards, ...].
            num_shards: Shards of all processes together.

        Returns:
            At the leader, [shards, ...].
        """
        return state

    def locate_shards(self, shard_indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Locate the shard of each row in this process.

        Args:
            shard_indices: The shard of each row, int64 [rows].

        Returns:
            The index to read in this process for each row, int64 [rows]; and a float64 mask [rows]
            that is 1 where the shard is in this process and 0 elsewhere, or None if all are.
        """
        return shard_indices, None

    def reduce_sum(self, local_sum: Tensor) -> Tensor:
        """Add up the tensors of all processes at the leader."""
        return local_sum

    def any_failed(self, failed_here: bool = False) -> bool:
        """Whether any process failed. All processes must call this together."""
        return failed_here

    def close(self) -> None:
        """Leave the group when the run has ended."""


class ProcessGroup(SingleProcess):
    """One of several processes.

    Args:
        rank: The number of this process, from 0; process 0 leads.
        world_size: The number of processes.
        owns_group: Whether this run initialised ``torch.distributed`` and so destroys it.
    """

    def __init__(self, rank: int, world_size: int, owns_group: bool):
        import torch.distributed

        self.rank = rank
        self.world_size = world_size
        self.is_follower = rank > 0
        self._owns_group = owns_group
        self._distributed = torch.distributed

    @contextmanager
    def _detect_lost_process(self) -> Iterator[None]:
        """Turn an error of the network into one line; its text has addresses and is dropped."""
        try:
            yield
        except RuntimeError:
            is_lost = True
        else:
            is_lost = False
        if is_lost:
            raise ProcessGroupError(PROCESS_LOST)

    def broadcast(self, *values: Any) -> tuple[Any, ...]:
        return tuple(
            self._broadcast_tensor(value) if isinstance(value, Tensor) else value
            for value in values
        )

    def _broadcast_tensor(self, value: Tensor) -> Tensor:
        value = (
            torch.empty_like(value, memory_format=torch.contiguous_format)
            if self.is_follower
            else value.detach().contiguous()
        )
        with self._detect_lost_process():
            self._distributed.broadcast(value, 0)
        return value

    def broadcast_optional(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
        content = b""
        if tensors is not None and not self.is_follower:
            content = save(
                {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
            )
        length = int(self._broadcast_tensor(torch.tensor(len(content))))
        if not length:
            return None
        received = self._broadcast_tensor(
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if content
            else torch.empty(length, dtype=torch.uint8)
        )
        return load(received.numpy().tobytes()) if self.is_follower else tensors

    def broadcast_text(self, text: str) -> str:
        received = self.broadcast_optional(
            {"text": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}
        )
        return (received or {})["text"].numpy().tobytes().decode()

    def select_local(self, shard_indices: Tensor) -> Tensor:
        local_indices = (
            shard_indices[shard_indices % self.world_size == self.rank] // self.world_size
        )
        # A batch of one may be rounded differently from a larger batch, so one shard comes twice.
        return local_indices.repeat(2) if len(local_indices) == 1 else local_indices

    def _count_local(self, num_shards: int) -> int:
        return len(range(self.rank, num_shards, self.world_size))

    def scatter(self, state: Tensor) -> Tensor:
        state = state.detach()
        max_local = -(-len(state) // self.world_size)
        received = state.new_empty(max_local, *state.shape[1:])
        by_rank = None
        if not self.is_follower:
            padding = state.new_zeros(max_local * self.world_size - len(state), *state.shape[1:])
            padded = torch.cat([state, padding]).unflatten(0, (max_local, self.world_size))
            by_rank = [rows.contiguous() for rows in padded.unbind(1)]
        with self._detect_lost_process():
            self._distributed.scatter(received, by_rank, 0)
        return received[: self._count_local(len(state))]

    def gather(self, state: Tensor, num_shards: int) -> Tensor:
        max_local = -(-num_shards // self.world_size)
        sent = torch.cat([state, state.new_zeros(max_local - len(state), *state.shape[1:])])
        by_rank = None
        if not self.is_follower:
            by_rank = [torch.empty_like(sent) for _ in range(self.world_size)]
        with self._detect_lost_process():
            self._distributed.gather(sent, by_rank, 0)
        return state if by_rank is None else torch.stack(by_rank, 1).flatten(0, 1)[:num_shards]

    def locate_shards(self, shard_indices: Tensor) -> tuple[Tensor, Tensor | None]:
        # privacy: every process computes all rows, also those whose shard is elsewhere. Otherwise
        # the shapes, and so the rounding, and the time would depend on the secret choice of shards.
        is_local = shard_indices % self.world_size == self.rank
        return torch.where(is_local, shard_indices // self.world_size, 0), is_local.double()

    def reduce_sum(self, local_sum: Tensor) -> Tensor:
        # The values are integers below 2^53, so their sum is exact in any order.
        local_sum = local_sum.contiguous()
        with self._detect_lost_process():
            self._distributed.reduce(local_sum, 0)
        return local_sum

    def any_failed(self, failed_here: bool = False) -> bool:
        flag = torch.tensor(int(failed_here))
        with self._detect_lost_process():
            self._distributed.all_reduce(flag, self._distributed.ReduceOp.MAX)
        return bool(flag)

    def close(self) -> None:
        # Not called after an error: communicators of a GPU would wait for lost processes.
        if self._owns_group:
            self._distributed.destroy_process_group()


def join_process_group(device: torch.device, run_description: str) -> SingleProcess:
    """Connect to the other processes that torchrun started, if any.

    Args:
        device: The device of this process.
        run_description: Everything that must be equal in all processes, as text.

    Returns:
        The group of processes.

    Raises:
        ProcessGroupError: If the others cannot be reached or have another description.
    """
    rank, world_size, _ = read_torchrun_rank()
    if world_size == 1:
        return SingleProcess()
    import torch.distributed

    owns_group = not torch.distributed.is_initialized()
    if owns_group:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            torch.distributed.init_process_group(backend, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise ProcessGroupError(
                f"The other processes of this run cannot be reached ({type(error).__name__})."
            ) from None
    group = ProcessGroup(rank, world_size, owns_group)
    digest = torch.frombuffer(
        bytearray(hashlib.sha256(run_description.encode()).digest()), dtype=torch.uint8
    )
    if group.any_failed(not torch.equal(group.broadcast(digest)[0], digest)):
        raise ProcessGroupError(
            "The processes of this run were started with different settings, data or versions."
        )
    return group
