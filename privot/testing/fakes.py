"""Stand-ins for a ledger and for a price, for many queries on records that are made up."""

from __future__ import annotations

from typing import Any

from privot.privacy.plan import Plan


class NullLedger:
    """A ledger that stores nothing, and a limit that allows everything."""

    def allows(self, cost: Any) -> bool:
        """Allow any cost."""
        return True

    def reserve(self, plan: Any, method: Any, **options: Any) -> int:
        """Store nothing."""
        return 0

    def mark_asked(self, *args: Any) -> None:
        """Store nothing."""

    commit = mark_asked


class FreePlan(Plan):
    """A plan whose cost nobody needs: that of sampled queries takes seconds."""

    def cost(self, coarse: bool = False) -> Any:
        """Compute nothing."""
        return None
