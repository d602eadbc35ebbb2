"""Shards in several processes: where torchrun starts more than one, each keeps some of the shards, on a GPU of its own.

All of them run the same method on the same public stream, and all stand on the owner's side of the gate. The first one leads: it alone has
the ledger, draws, adds the noise and writes files, and whatever the others take for public is what it tells them. What goes between them,
states and the parts of an answer before its noise, is secret: they trust one another and the wires between them. Only plain numbers go
there, nothing that could be run.
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

WAIT = timedelta(minutes=30)  # for another process: it may have records to read
ENDED = "another process of this run has ended, or cannot be reached: what was asked stays charged, and --resume goes on from there"
ASKED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them all


class RankError(PrivotError):
    """One of several processes is gone; without its shards no answer can be given."""


def place() -> tuple[int, int, int]:
    """Which process this is, of how many, and which of those on this machine: (0, 1, 0) without torchrun."""
    if any(not os.environ.get(name) for name in ASKED):
        return 0, 1, 0
    try:
        rank, count, local = (int(os.environ[name]) for name in ASKED[:3])
    except ValueError:
        raise SettingError(
            "RANK, WORLD_SIZE and LOCAL_RANK are not whole numbers: leave them to torchrun"
        ) from None
    return (rank, count, local) if count > 1 else (0, 1, 0)


class Alone:
    """One process that has all shards: whatever it tells, deals or adds up stays as it is.

    >>> Alone().total(torch.ones(2))
    tensor([1., 1.])
    """

    rank = 0
    count = 1
    follows = False

    def told(self, *values: Any) -> tuple[Any, ...]:
        """What the leader has in the place of these: tensors are as the leader's, to the bit, and of a shape known to all."""
        return values

    def shared(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
        """What the leader has, if anything; only the leader knows beforehand."""
        return tensors

    def said(self, text: str) -> str:
        """What the leader says."""
        return text

    def mine(self, shards: Tensor) -> Tensor:
        """Those of the shards that lie here, by their places here. Shard k lies in process k mod count, at place k // count."""
        return shards

    def dealt(self, state: Tensor) -> Tensor:
        """Of the leader's [shards, ...] those that lie here: [own shards, ...]."""
        return state

    def gathered(self, state: Tensor, shards: int) -> Tensor:
        """All states at the leader, [shards, ...], from those that lie here."""
        return state

    def asked(self, shards: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows that ask these shards [rows]: where to look here, and 1 for each row whose shard lies here, else 0 (None: all do)."""
        return shards, None

    def total(self, part: Tensor) -> Tensor:
        """The sum of all processes' parts, at the leader."""
        return part

    def failed(self, here: bool = False) -> bool:
        """Whether anything failed in any process; all must ask."""
        return here

    def leave(self) -> None:
        """When all is done."""


class Several(Alone):
    """One of ``count`` processes; those with ``follows`` do as the leader does, and write nothing."""

    def __init__(self, rank: int, count: int, ours: bool):
        import torch.distributed

        self.rank = rank
        self.count = count
        self.follows = rank > 0
        self._ours = ours
        self._wires = torch.distributed

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # of the wires; what they say of addresses helps nobody
            gone = True
        else:
            gone = False
        if gone:
            raise RankError(ENDED)

    def told(self, *values: Any) -> tuple[Any, ...]:
        return tuple(self._told(value) if isinstance(value, Tensor) else value for value in values)

    def _told(self, value: Tensor) -> Tensor:
        value = (
            torch.empty_like(value, memory_format=torch.contiguous_format)
            if self.follows
            else value.detach().contiguous()
        )
        with self._alive():
            self._wires.broadcast(value, 0)
        return value

    def shared(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
        raw = (
            b""
            if tensors is None or self.follows
            else save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
        )
        if not (length := int(self._told(torch.tensor(len(raw))))):
            return None
        known = self._told(
            torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            if raw
            else torch.empty(length, dtype=torch.uint8)
        )
        return load(known.numpy().tobytes()) if self.follows else tensors

    def said(self, text: str) -> str:
        heard = self.shared({"text": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)})
        return (heard or {})["text"].numpy().tobytes().decode()

    def mine(self, shards: Tensor) -> Tensor:
        own = shards[shards % self.count == self.rank] // self.count
        return (
            own.repeat(2) if len(own) == 1 else own
        )  # one alone may be rounded in another way than one of several: it goes twice

    def _own(self, shards: int) -> int:
        return len(range(self.rank, shards, self.count))

    def dealt(self, state: Tensor) -> Tensor:
        state = state.detach()
        most = -(-len(state) // self.count)
        here = state.new_empty(most, *state.shape[1:])
        hands = None
        if not self.follows:
            room = state.new_zeros(most * self.count - len(state), *state.shape[1:])
            hands = [
                each.contiguous()
                for each in torch.cat([state, room]).unflatten(0, (most, self.count)).unbind(1)
            ]
        with self._alive():
            self._wires.scatter(here, hands, 0)
        return here[: self._own(len(state))]

    def gathered(self, state: Tensor, shards: int) -> Tensor:
        most = -(-shards // self.count)
        here = torch.cat([state, state.new_zeros(most - len(state), *state.shape[1:])])
        hands = None if self.follows else [torch.empty_like(here) for _ in range(self.count)]
        with self._alive():
            self._wires.gather(here, hands, 0)
        return state if hands is None else torch.stack(hands, 1).flatten(0, 1)[:shards]

    def asked(self, shards: Tensor) -> tuple[Tensor, Tensor | None]:
        # privacy: every process goes through all rows, so that neither its shapes, and so its rounding, nor its time tell who was drawn.
        here = shards % self.count == self.rank
        return torch.where(here, shards // self.count, 0), here.double()

    def total(self, part: Tensor) -> Tensor:
        # Parts are whole numbers below 2^53: their sum is exact in any order.
        part = part.contiguous()
        with self._alive():
            self._wires.reduce(part, 0)
        return part

    def failed(self, here: bool = False) -> bool:
        worst = torch.tensor(int(here))
        with self._alive():
            self._wires.all_reduce(worst, self._wires.ReduceOp.MAX)
        return bool(worst)

    def leave(self) -> None:
        # Not after an error: communicators of a GPU would wait for the dead.
        if self._ours:
            self._wires.destroy_process_group()


def join(device: torch.device, run: str) -> Alone:
    """Find the other processes, if torchrun started any. ``run`` says what is run: all must say the same."""
    rank, count, _ = place()
    if count == 1:
        return Alone()
    import torch.distributed as wires

    if ours := not wires.is_initialized():
        try:
            wires.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=WAIT
            )
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"the other processes of this run cannot be found ({type(error).__name__})"
            ) from None
    found = Several(rank, count, ours)
    digest = torch.frombuffer(bytearray(hashlib.sha256(run.encode()).digest()), dtype=torch.uint8)
    if found.failed(not torch.equal(found.told(digest)[0], digest)):
        raise RankError(
            "the processes of this run were started with different settings, data or versions"
        )
    return found
