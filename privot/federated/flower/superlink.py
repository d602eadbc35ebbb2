"""A real server: a SuperLink with TLS and node keys, and the grid of a run on it."""

from __future__ import annotations

import contextlib
import io
import ssl
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
from flwr.common.serde import run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from privot.errors import SettingError
from privot.federated.flower import keys
from privot.federated.flower.grid import Line
from privot.federated.flower.processes import HEADER, interceptors, secret_file, start, stop
from privot.federated.flower.server_app import Post

READY = 60.0  # seconds that a SuperLink has to open its port

# Flower wants an app bundle for each run. Ours has no app in it: server and owners run what they installed.
BUNDLE = """[project]
name = "privot"
version = "1.0.0"
description = "an empty bundle"
[tool.flwr.app]
publisher = "privot"
[tool.flwr.app.components]
serverapp = "none:none"
clientapp = "none:none"
[tool.flwr.app.config]
"""


def split_address(address: str) -> tuple[str, int]:
    """``HOST:PORT`` as two.

    >>> split_address("[::1]:8443")
    ('::1', 8443)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingError(f"address {address!r}: write it as HOST:PORT, such as 0.0.0.0:8443")
    return host.strip("[]"), int(port)


def tls_files(folder: Path) -> dict[str, Path]:
    """The three that a server needs."""
    files = {name: folder / name for name in (keys.CA, keys.CERTIFICATE, keys.KEY)}
    if missing := [file for file in files.values() if not file.is_file()]:
        raise SettingError(
            f"{missing[0]} is missing: --tls names a folder with {', '.join(files)} (privot federate keys makes one)"
        )
    return files


@contextlib.contextmanager
def opened(
    address: str, tls: Path, nodes: dict[str, bytes], log: Path, room: int
) -> Iterator[Post]:
    """Open the port to the nodes whose public keys (PEM) are listed, start a run, and give the way to them; all ends with the block.

    ``room``: bytes of the longest message that a node may send.
    """
    (host, port) = split_address(address)
    files = tls_files(tls)
    # Calls from here to the own SuperLink stay on this machine where it listens to all.
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    where = f"[{near}]:{port}" if ":" in near else f"{near}:{port}"
    with contextlib.ExitStack() as stack:
        secret, file = stack.enter_context(secret_file())
        words = [
            "--host",
            host,
            "--port",
            str(port),
            "--ssl-ca-certfile",
            str(files[keys.CA]),
            "--ssl-certfile",
            str(files[keys.CERTIFICATE]),
            "--ssl-keyfile",
            str(files[keys.KEY]),
            "--enable-supernode-auth",
            "--isolation",
            "process",
            "--superexec-auth-secret-file",
            str(file),
            "--disable-runtime-dependency-installation",
        ]
        process = start("superlink", words, log, room)
        stack.callback(stop, process)
        root = files[keys.CA].read_bytes()
        _wait(process, f"https://{where}", files[keys.CA], secret, log)
        control = ControlHttpClient.from_server_address(
            where, False, root, interceptors(secret, "privot")
        )
        stack.callback(control.close)
        numbers = {
            name: int(control.RegisterNode(RegisterNodeRequest(public_key=key, name=name)).node_id)
            for name, key in nodes.items()
        }
        yield Post(stack.enter_context(_grid(where, root, secret, control)), numbers)


def _wait(process: subprocess.Popen[bytes], url: str, ca: Path, secret: str, log: Path) -> None:
    """Until the SuperLink answers."""
    end = time.monotonic() + READY
    context = ssl.create_default_context(cafile=str(ca))
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if (
                httpx.get(
                    f"{url}/health",
                    headers={HEADER: secret},
                    verify=context,
                    timeout=5,
                    trust_env=False,
                ).status_code
                < 500
            ):
                return
        time.sleep(0.2)
    raise SettingError(
        f"the server could not open {url}: is the port taken, and do the certificates name this host and last? Flower's words are in {log}"
    )


@contextlib.contextmanager
def _grid(where: str, root: bytes, secret: str, control: ControlHttpClient) -> Iterator[Line]:
    """Start a run and take its server's side."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as bundle:
        bundle.writestr(zipfile.ZipInfo("pyproject.toml"), BUNDLE)
    control.StartRun(StartRunRequest(fab=Fab(content=data.getvalue())))
    first = RuntimeHttpClient.from_server_address(
        where, False, root, interceptors(secret, "flwr-serverapp")
    )
    claimed = first.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
    first.close()
    token = RuntimeTokenHttpInterceptor(claimed.token)
    client = RuntimeHttpClient.from_server_address(
        where, False, root, [*interceptors(secret, "flwr-serverapp"), token]
    )
    grid = Line(where, root, claimed.token)
    grid._client = client  # its own would not carry the secret
    begun = client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id = begun.task_id
    TaskIdentity.run_id = begun.run.run_id
    TaskIdentity.node_id = begun.context.node_id
    grid.set_run(run_from_proto(begun.run))
    beat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    beat.start()
    try:
        yield grid
    finally:
        beat.stop()
        with contextlib.suppress(httpx.HTTPError):
            client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed", details=""))
        grid.close()
