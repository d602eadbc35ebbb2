"""Stand-ins for a ledger, a price and a clip, which are tested elsewhere."""

import math

from privot.testing.fakes import FreePlan, NullLedger  # noqa: F401


def planted_clip(planted=lambda rows, bound: rows):
    """A planted clip in the place of the gate's own, of rows [rows, numbers] in float64; without one, rows stay as long as they are."""

    def clip(parts, bound, unit=1.0):
        rows = parts.detach().double().reshape(len(parts), math.prod(parts.shape[1:]))
        return planted(rows, bound) / unit

    return clip
