"""A real client: a SuperNode connects to the server, and this process alone reads the data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.clientapp import ClientApp
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from privot.errors import SettingError
from privot.federated.flower.processes import (
    build_interceptors,
    create_secret_file,
    find_free_port,
    start_flower_process,
    stop_flower_process,
)
from privot.federated.flower.superlink import split_address

TASK_POLL_SECONDS = 0.2  # time between two polls for a message
RESTART_DELAY_SECONDS = 5.0  # time before a SuperNode that ended is started again
MAX_FAILED_STARTS = 2  # starts in a row without a message after which the client gives up
RESEND_WINDOW_SECONDS = 60.0  # time in which a server repeats the request for a lost answer
DELIVERY_SECONDS = 5.0  # time in which a SuperNode delivers a reply; it polls twice a second


class NoMessageError(SettingError):
    """No message arrived at all."""


def run_client_node(
    app: ClientApp,
    server_address: str,
    ca_certificate: Path,
    private_key: Path,
    log_path: Path,
    *,
    idle_timeout: float,
    is_needed: Callable[[], bool] = lambda: True,
) -> None:
    """Answer the server's messages until the client is no longer needed.

    Args:
        app: Answers a message.
        server_address: HOST:PORT of the server.
        ca_certificate: File of the certificate of the authority that signed the server's one.
        private_key: File of this node's private key.
        log_path: File for Flower's output.
        idle_timeout: Seconds without a message after which the client ends.
        is_needed: Returns whether the server may still send a request.

    Raises:
        NoMessageError: No message arrived.
        SettingError: The server refuses the connection, or a file is invalid.
    """
    split_address(server_address)
    check_private_key(private_key)
    if not ca_certificate.is_file():
        raise SettingError(
            f"{ca_certificate} does not exist. --ca needs the certificate of the authority that "
            "signed the server's certificate."
        )
    with contextlib.ExitStack() as stack:
        secret, secret_file = stack.enter_context(create_secret_file())
        node_address = f"127.0.0.1:{find_free_port()}"
        arguments = _build_supernode_arguments(
            server_address, ca_certificate, private_key, node_address, secret_file
        )
        supernode = _SuperNode(arguments, log_path)
        stack.callback(supernode.stop)
        client = RuntimeHttpClient.from_server_address(
            node_address, True, None, build_interceptors(secret, "SuperExec")
        )
        stack.callback(client.close)
        last_message = time.monotonic()
        has_message = False
        continues = is_needed()
        while continues and time.monotonic() - last_message < idle_timeout:
            if not supernode.restart_if_ended():
                break
            if token := _acquire_task(client):
                _answer_message(app, node_address, secret, token)
                last_message = time.monotonic()
                supernode.num_failed_starts = 0
                has_message = True
                continues = is_needed()
            else:
                time.sleep(TASK_POLL_SECONDS)
        if supernode.is_refused or (supernode.num_failed_starts and not has_message):
            raise SettingError(
                f"{server_address} refuses this node. Check that the server lists the node's "
                f"public key and that {ca_certificate} signed the server's certificate. "
                f"Flower's output is in {log_path}."
            )
        if continues and not has_message:
            raise NoMessageError(
                f"{server_address} sent no message in {idle_timeout:g} seconds. Check that the "
                "server runs and can be reached from here."
            )
        time.sleep(DELIVERY_SECONDS)


class _SuperNode:
    """A SuperNode process that is started again when it ends.

    A restarted server does not know the old connection, so the SuperNode makes a new one. A server
    that does not list this node, or that has another certificate, ends every connection at once.

    Args:
        arguments: Command-line arguments of the SuperNode.
        log_path: File for its output.
    """

    def __init__(self, arguments: list[str], log_path: Path):
        self.arguments = arguments
        self.log_path = log_path
        self.num_failed_starts = 0  # in a row, without a message
        self.process = start_flower_process("supernode", arguments, log_path)

    @property
    def is_refused(self) -> bool:
        """Whether the SuperNode ended too often without a message."""
        return self.num_failed_starts >= MAX_FAILED_STARTS

    def restart_if_ended(self) -> bool:
        """Start the process again if it has ended, and return whether it runs."""
        if self.process.poll() is not None:
            self.num_failed_starts += 1
            if self.is_refused:
                return False
            time.sleep(RESTART_DELAY_SECONDS)
            self.process = start_flower_process("supernode", self.arguments, self.log_path)
        return True

    def stop(self) -> None:
        """End the process."""
        stop_flower_process(self.process)


def _build_supernode_arguments(
    server_address: str,
    ca_certificate: Path,
    private_key: Path,
    node_address: str,
    secret_file: Path,
) -> list[str]:
    """Build the command-line arguments of a SuperNode.

    Args:
        server_address: HOST:PORT of the server.
        ca_certificate: File of the authority's certificate.
        private_key: File of this node's private key.
        node_address: HOST:PORT on which the SuperNode listens for this process.
        secret_file: File with the secret of this client.

    Returns:
        The arguments.
    """
    host, port = split_address(node_address)
    return [
        "--superlink",
        server_address,
        "--root-certificates",
        str(ca_certificate),
        "--auth-supernode-private-key",
        str(private_key),
        "--isolation",
        "process",
        "--host",
        host,
        "--port",
        str(port),
        "--superexec-auth-secret-file",
        str(secret_file),
    ]


def check_private_key(file: Path) -> None:
    """Raise unless a file holds a private key on an elliptic curve without a passphrase.

    ``ssh-keygen -t ecdsa -b 384`` and `make_keys` write such keys.
    """
    try:
        key = load_ssh_private_key(file.read_bytes(), None)
    except OSError:
        raise SettingError(
            f"{file} cannot be read. --key needs the private key of this node."
        ) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SettingError(
            f"{file} is no private key on an elliptic curve without a passphrase. "
            "`privot federate keys` creates one."
        )


def _acquire_task(client: RuntimeHttpClient) -> str:
    """Return the token of the next message, or an empty text if there is none."""
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    try:
        return str(client.AcquireTask(request).token)
    except httpx.HTTPError:  # the SuperNode is starting or has just ended
        return ""


def _answer_message(app: ClientApp, address: str, secret: str, token: str) -> None:
    """Fetch one message, answer it and hand over the reply.

    The bundle that comes with the message is ignored.

    Args:
        app: Answers the message.
        address: HOST:PORT of the SuperNode.
        secret: The secret of this client.
        token: The token of the message.
    """
    interceptors = build_interceptors(secret, "flwr-clientapp")
    client = RuntimeHttpClient.from_server_address(
        address, True, None, [*interceptors, RuntimeTokenHttpInterceptor(token)]
    )
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    try:
        heartbeat.start()
        message, context, _, _ = pull_task_input(client)
        push_message(client, app(message=message, context=context), context)
        push_task_output(client, context, SubStatus.COMPLETED, "")
    except Exception:
        # The SuperNode has ended, or the message is one that neither Flower nor the app knows. It
        # gets no reply, and the next message is processed.
        pass
    finally:
        heartbeat.stop()
        client.close()
