"""The gate of a server: it has privatized records, and no way to an original record."""

from __future__ import annotations

from typing import Any, NoReturn

from privot.errors import PlanError
from privot.local.dataset import PrivatizedDataset


class ServerGate:
    """Gives the privatized records and refuses every query.

    Its plan was spent by the clients, so it has no stage left, no ledger and no ticket.

    Args:
        dataset: What the clients sent.
    """

    def __init__(self, dataset: PrivatizedDataset):
        self.spec = dataset.spec
        self.plan = dataset.channel.plan()
        self.ticket: int | None = None
        self.no_guarantee_reason = ""
        self.insecure = dataset.insecure
        self._dataset = dataset

    def get_privatized_dataset(self) -> PrivatizedDataset:
        """Give what the clients sent. It is public."""
        return self._dataset

    def delete_shard_states(self) -> None:
        """Do nothing: a server stores nothing secret."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PlanError("A server has only privatized records, so its gate answers no query.")

    sum = rows = query_sample = sorted_blocks = privatize = _refuse
    split_into_shards = update_shards = save_shard_states = _refuse
    query_random_shards = query_clients = sum_over_shards = _refuse
    count_remaining_queries = read_without_guarantee = _refuse
