"""Flower carries the messages, and nothing else of it is used: neither its wrappers for privacy nor its aggregation. It tells nobody.

The rest of the package imports without Flower; this part needs the extra ``federated``.
"""

import os

from privot.errors import SettingError

# Read by Flower and Ray, in this process and in those it starts: no telemetry, no look for newer versions, nothing installed at run time.
os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
)
# A proxy is for the way to the server; what processes of one machine tell each other, secrets among it, does not leave that machine.
_near = ",".join(
    filter(
        None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1,localhost,::1"]
    )
)
os.environ.update(no_proxy=_near, NO_PROXY=_near)

try:
    from flwr.supercore import telemetry
except ImportError:
    raise SettingError("Flower 1.41 is not installed: pip install 'privot[federated]'") from None

telemetry.FLWR_TELEMETRY_ENABLED = "0"  # where Flower was imported before this line
