"""A real server: a SuperLink with TLS and node keys, and the grid of one run on it."""

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
from privot.federated.flower.grid import NonBlockingGrid
from privot.federated.flower.http_limits import SECRET_HEADER
from privot.federated.flower.processes import (
    build_interceptors,
    create_secret_file,
    start_flower_process,
    stop_flower_process,
)
from privot.federated.flower.server_app import ClientMessenger

SUPERLINK_START_SECONDS = 60.0  # time in which a SuperLink must open its port

# Flower needs an app bundle for each run. This bundle has no app: server and clients run the
# programs that they installed.
EMPTY_APP_BUNDLE = """[project]
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
    """Split ``HOST:PORT`` into host and port.

    >>> split_address("[::1]:8443")
    ('::1', 8443)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingError(
            f"Address {address!r} is invalid. Write it as HOST:PORT, such as 0.0.0.0:8443."
        )
    return host.strip("[]"), int(port)


def find_tls_files(folder: Path) -> dict[str, Path]:
    """Find the three files that a server needs for TLS: file name -> path."""
    files = {
        name: folder / name
        for name in (keys.CA_FILE, keys.SERVER_CERTIFICATE_FILE, keys.SERVER_KEY_FILE)
    }
    for file in files.values():
        if not file.is_file():
            raise SettingError(
                f"{file} is missing. --tls needs a folder with {', '.join(files)}; "
                "`privot federate keys` creates one."
            )
    return files


@contextlib.contextmanager
def open_superlink(
    address: str,
    tls_folder: Path,
    client_keys: dict[str, bytes],
    log_path: Path,
    max_message_bytes: int,
) -> Iterator[ClientMessenger]:
    """Start a SuperLink and a run on it; both end with the context.

    Args:
        address: HOST:PORT to listen on.
        tls_folder: Folder of the certificates and the server's key.
        client_keys: Client name -> public key in PEM format; only these nodes may connect.
        log_path: File for Flower's output.
        max_message_bytes: Length of the longest message that a node may send.

    Yields:
        The messenger to the clients.
    """
    host, port = split_address(address)
    files = find_tls_files(tls_folder)
    # A SuperLink that listens on all addresses is reached from here without leaving the machine.
    local_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    local_address = f"[{local_host}]:{port}" if ":" in local_host else f"{local_host}:{port}"
    with contextlib.ExitStack() as stack:
        secret, secret_file = stack.enter_context(create_secret_file())
        arguments = _build_superlink_arguments(host, port, files, secret_file)
        process = start_flower_process("superlink", arguments, log_path, max_message_bytes)
        stack.callback(stop_flower_process, process)
        ca_file = files[keys.CA_FILE]
        _wait_until_ready(process, f"https://{local_address}", ca_file, secret, log_path)
        root_certificates = ca_file.read_bytes()
        control_client = ControlHttpClient.from_server_address(
            local_address, False, root_certificates, build_interceptors(secret, "privot")
        )
        stack.callback(control_client.close)
        node_ids = {}
        for name, key in client_keys.items():
            request = RegisterNodeRequest(public_key=key, name=name)
            node_ids[name] = int(control_client.RegisterNode(request).node_id)
        grid = stack.enter_context(
            _open_grid(local_address, root_certificates, secret, control_client)
        )
        yield ClientMessenger(grid, node_ids)


def _build_superlink_arguments(
    host: str, port: int, tls_files: dict[str, Path], secret_file: Path
) -> list[str]:
    """Build the command-line arguments of a SuperLink.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        tls_files: The files of `find_tls_files`.
        secret_file: File with the secret of this server.

    Returns:
        The arguments.
    """
    return [
        "--host",
        host,
        "--port",
        str(port),
        "--ssl-ca-certfile",
        str(tls_files[keys.CA_FILE]),
        "--ssl-certfile",
        str(tls_files[keys.SERVER_CERTIFICATE_FILE]),
        "--ssl-keyfile",
        str(tls_files[keys.SERVER_KEY_FILE]),
        "--enable-supernode-auth",
        "--isolation",
        "process",
        "--superexec-auth-secret-file",
        str(secret_file),
        "--disable-runtime-dependency-installation",
    ]


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, ca_certificate: Path, secret: str, log_path: Path
) -> None:
    """Wait until the SuperLink responds.

    Args:
        process: The process of the SuperLink.
        url: Its URL.
        ca_certificate: File of the authority's certificate.
        secret: The secret of this server.
        log_path: File with Flower's output, for the error message.

    Raises:
        SettingError: The SuperLink ended or did not respond in time.
    """
    deadline = time.monotonic() + SUPERLINK_START_SECONDS
    context = ssl.create_default_context(cafile=str(ca_certificate))
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            response = httpx.get(
                f"{url}/health",
                headers={SECRET_HEADER: secret},
                verify=context,
                timeout=5,
                trust_env=False,
            )
            if response.status_code < 500:
                return
        time.sleep(0.2)
    raise SettingError(
        f"The server could not open {url}. Check that the port is free and that the certificates "
        f"are valid and name this host. Flower's output is in {log_path}."
    )


@contextlib.contextmanager
def _open_grid(
    address: str, root_certificates: bytes, secret: str, control_client: ControlHttpClient
) -> Iterator[NonBlockingGrid]:
    """Start a run on a SuperLink and act as its server app.

    Args:
        address: HOST:PORT of the SuperLink.
        root_certificates: Certificate of the authority.
        secret: The secret of this server.
        control_client: Client of the SuperLink's control service.

    Yields:
        The grid of the run.
    """
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as bundle:
        bundle.writestr(zipfile.ZipInfo("pyproject.toml"), EMPTY_APP_BUNDLE)
    control_client.StartRun(StartRunRequest(fab=Fab(content=data.getvalue())))
    task_client = RuntimeHttpClient.from_server_address(
        address, False, root_certificates, build_interceptors(secret, "flwr-serverapp")
    )
    task = task_client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
    task_client.close()
    interceptors = build_interceptors(secret, "flwr-serverapp")
    client = RuntimeHttpClient.from_server_address(
        address, False, root_certificates, [*interceptors, RuntimeTokenHttpInterceptor(task.token)]
    )
    grid = NonBlockingGrid(address, root_certificates, task.token)
    grid._client = client  # the grid's own client does not send the secret
    task_input = client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id = task_input.task_id
    TaskIdentity.run_id = task_input.run.run_id
    TaskIdentity.node_id = task_input.context.node_id
    grid.set_run(run_from_proto(task_input.run))
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    try:
        yield grid
    finally:
        heartbeat.stop()
        with contextlib.suppress(httpx.HTTPError):
            client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed", details=""))
        grid.close()
