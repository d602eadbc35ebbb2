"""Starts Flower's two programs as child processes: a SuperLink and a SuperNode.

Both end with their parent and run with ``--isolation process``. Otherwise a SuperNode would fetch
the app that the server names and run it beside the data, so a server could send code that reads
records. Here the app is the one that the client installed, and nothing that arrives is run.
`superlink_firewall` limits what a SuperLink accepts. `supernode_patches` limits what a SuperNode
accepts from its server and reports to it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

from privot.federated.flower.http_limits import SECRET_HEADER

ACQUIRE_TASK_METHODS = frozenset({"/flwr.proto.Runtime/AcquireTask"})
SHUTDOWN_GRACE_SECONDS = 10.0  # time in which a process may end by itself


class SecretInterceptor:
    """Adds the secret to every call of a Flower client."""

    def __init__(self, secret: str):
        self.secret = secret

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Add the secret's header, then make the call."""
        context.request.headers[SECRET_HEADER] = self.secret
        return call_next(context)


def build_interceptors(secret: str, component: str) -> list[Any]:
    """Build the interceptors for calls to a SuperLink or SuperNode.

    Args:
        secret: The secret of this server or client.
        component: The name of the calling component in Flower's terms.

    Returns:
        Interceptors that add the version, the claims and the secret.
    """
    return [
        RuntimeVersionHttpInterceptor(component_name=component),
        SuperExecAuthHttpInterceptor(
            master_secret=secret.encode(), protected_methods=ACQUIRE_TASK_METHODS
        ),
        SecretInterceptor(secret),
    ]


@contextlib.contextmanager
def create_secret_file() -> Iterator[tuple[str, Path]]:
    """Create a random secret and a temporary file with it that only this user can read."""
    with tempfile.TemporaryDirectory(prefix="privot-") as folder:  # of mode 0700
        secret = secrets.token_hex(32)
        file = Path(folder) / "secret"
        file.write_text(secret)
        yield secret, file


def start_flower_process(
    program: str, arguments: list[str], log_path: Path, max_message_bytes: int = 0
) -> subprocess.Popen[bytes]:
    """Start a SuperLink or SuperNode.

    Args:
        program: "superlink" or "supernode".
        arguments: Command-line arguments of the program.
        log_path: File for the program's output.
        max_message_bytes: Longest message that a SuperLink accepts from a node.

    Returns:
        The process.
    """
    with open(log_path, "ab") as log_file:
        command = [
            sys.executable,
            "-m",
            "privot.federated.flower.processes",
            program,
            str(os.getpid()),
            str(max_message_bytes),
            *arguments,
        ]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )


def stop_flower_process(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill it if it does not end in time."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SHUTDOWN_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def find_free_port() -> int:
    """Return a port of this machine that is not in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_flower_program(
    program: str, parent_pid: str, max_message_bytes: str, *arguments: str
) -> None:
    """Run a SuperLink or SuperNode in this process until it ends.

    Args:
        program: "superlink" or "supernode".
        parent_pid: Process id of the parent; this process ends with it.
        max_message_bytes: Longest message that a SuperLink accepts from a node.
        arguments: Command-line arguments of the program.
    """
    from flwr.supercore.app_utils import start_parent_process_monitor

    start_parent_process_monitor(int(parent_pid))
    sys.argv = [f"flower-{program}", *arguments]
    if program == "supernode":
        _run_supernode()
    else:
        _run_superlink(int(max_message_bytes))


def _run_supernode() -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

    from privot.federated.flower.supernode_patches import patch_supernode

    patch_supernode()
    flower_supernode()


def _run_superlink(max_message_bytes: int) -> None:
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.superlink.cli.flower_superlink import (
        SuperLinkLifespan,
        _parse_superlink_lifespan_config,
    )
    from flwr.superlink.main import create_app

    from privot.federated.flower.superlink_firewall import SuperLinkFirewall

    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    # The middleware that is added last runs first.
    app.add_middleware(
        SuperLinkFirewall,
        secret=(config.superexec_auth_secret or b"").decode(),
        max_message_bytes=max_message_bytes,
    )
    uvicorn.run(
        app,
        host=config.host,
        port=config.port,
        log_config=get_uvicorn_log_config(20),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        workers=1,
    )


if __name__ == "__main__":
    run_flower_program(*sys.argv[1:])
