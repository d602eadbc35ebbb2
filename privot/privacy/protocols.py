"""Interfaces between the gate and what surrounds it, so that privacy imports none of it."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from privot.data.spec import Spec
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Plan


class GateProtocol(Protocol):
    """What the pipeline needs of a gate, be it a `Gate` to records or a server's gate to none.

    Attributes:
        spec: What is public about the data set.
        plan: All that the run may query.
        ticket: The reservation in the ledger that the run is charged to; None: nothing is charged.
        no_guarantee_reason: Why the release has no guarantee; empty if it has one.
        insecure: Whether the noise came from a seed.
    """

    spec: Spec
    plan: Plan
    ticket: int | None
    no_guarantee_reason: str
    insecure: bool

    def delete_shard_states(self) -> None:
        """Delete what the run stored on the secret side."""


@runtime_checkable
class PrivatizedSource(Protocol):
    """A gate that gives records which clients privatized themselves."""

    def get_privatized_dataset(self) -> Any:
        """Give the privatized records. They are public."""


class RecordChannel(Protocol):
    """What the gate needs of a local channel (`privot.local.channels.Channel`)."""

    @property
    def record_dim(self) -> int:
        """Numbers in a record."""

    def plan(self) -> Plan:
        """The events of privatizing one record, under ``local`` neighbours."""

    def privatize(self, records: Tensor, secret_random: SecretRandom | None = None) -> Tensor:
        """Privatize records [count, record_dim]; returns [count, output_dim]."""
