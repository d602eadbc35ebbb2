"""The gate of a server, which has nothing secret behind it: answers that clients privatized, and no way to a record."""

from __future__ import annotations

from typing import NoReturn

from privot.errors import PlanError
from privot.local.dataset import Privatized
from privot.privacy.gate import Gate
from privot.runtime import Runtime


class ServerGate(Gate):
    """Gives `privatized` and refuses every other verb: its plan was spent by the clients, so it has no stage left, ledger or ticket."""

    def __init__(self, box: Privatized, runtime: Runtime | None = None):
        self.spec = box.spec
        self.plan = box.channel.plan()
        self.ticket = None
        self.opened = ""
        self.insecure = box.insecure
        self._device = (runtime or Runtime()).target
        self._box = box
        self._stages = {}
        self._shards = None
        self._owners = 1
        self._dealt = {}

    def privatized(self) -> Privatized:
        """What the clients sent. It is public."""
        return self._box

    def open(self, reason: str) -> NoReturn:
        raise PlanError("a server has no records to open")
