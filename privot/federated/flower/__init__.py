"""Flower as the transport of messages; none of its privacy wrappers or aggregation is used.

This package needs the extra ``federated``. The rest of Privot imports without Flower. Importing it
switches off the telemetry of Flower and Ray.
"""

import os

from privot.errors import SettingError

# Read by Flower and Ray, in this process and its children: no telemetry, no search for updates and
# no installation at run time.
os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
)
# A proxy is for the connection to the server. Messages between processes of this machine, which
# include secrets, must not go through it.
_no_proxy_hosts = ",".join(
    filter(
        None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1,localhost,::1"]
    )
)
os.environ.update(no_proxy=_no_proxy_hosts, NO_PROXY=_no_proxy_hosts)

try:
    from flwr.supercore import telemetry
except ImportError:
    raise SettingError(
        "Flower 1.41 is not installed. Install it with: pip install 'privot[federated]'"
    ) from None

telemetry.FLWR_TELEMETRY_ENABLED = "0"  # in case Flower was imported before this module
