"""Stand-ins for a ledger, a wall and a price: they are tested elsewhere, and thousands of asks need not wait for them."""

from privot.privacy.plan import Plan


class Unwritten:
    """A ledger that keeps nothing, and a wall that lets all through."""

    def allows(self, cost):
        return True

    def reserve(self, plan, method):
        return 0

    def ask(self, *given):
        """Marked by nobody."""

    commit = ask


class Unpriced(Plan):
    """Prices of sampled answers take seconds, and nobody asks."""

    def cost(self):
        return None
