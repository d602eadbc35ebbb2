"""A real owner: a SuperNode that keeps the line to the server, and this process, which alone has the data and answers."""

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
from privot.federated.flower.processes import free_port, interceptors, secret_file, start, stop
from privot.federated.flower.superlink import split_address

LOOK = 0.2  # seconds between two looks for a message
AGAIN = 5.0  # seconds before a SuperNode that ended is started again
REFUSED = 2  # times in a row that a SuperNode may end before it has brought a message
LATE = 60.0  # seconds in which a server asks again for an answer that did not arrive
DELIVERED = (
    5.0  # seconds in which a SuperNode has passed on a reply; it looks for one twice a second
)


class UnheardError(SettingError):
    """No message came at all."""


def serve(
    app: ClientApp,
    server: str,
    ca: Path,
    key: Path,
    log: Path,
    *,
    idle: float,
    more: Callable[[], bool] = lambda: True,
) -> None:
    """Answer the server's messages by ``app`` until ``more`` says that nothing is left to answer, or none came for ``idle`` seconds."""
    split_address(server)
    check_key(key)
    if not ca.is_file():
        raise SettingError(
            f"{ca}: no such file; --ca names the certificate of the authority that vouches for the server"
        )
    with contextlib.ExitStack() as stack:
        secret, file = stack.enter_context(secret_file())
        port = free_port()
        words = [
            "--superlink",
            server,
            "--root-certificates",
            str(ca),
            "--auth-supernode-private-key",
            str(key),
            "--isolation",
            "process",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--superexec-auth-secret-file",
            str(file),
        ]
        where = f"127.0.0.1:{port}"
        process = start("supernode", words, log)
        stack.callback(lambda: stop(process))
        client = RuntimeHttpClient.from_server_address(
            where, True, None, interceptors(secret, "SuperExec")
        )
        stack.callback(client.close)
        heard = time.monotonic()
        ended = 0
        silent = True
        working = more()
        while working and time.monotonic() - heard < idle:
            if process.poll() is not None:
                # A server that was started again does not know the line that was kept: a new one is made. One that never knew this
                # node, or is not whom its certificate names, ends each line at once.
                ended += 1
                if ended >= REFUSED:
                    break
                time.sleep(AGAIN)
                process = start("supernode", words, log)
            if token := _claim(client):
                _answer(app, where, secret, token)
                heard = time.monotonic()
                ended = 0
                silent = False
                working = more()
            else:
                time.sleep(LOOK)
        if ended >= REFUSED or (ended and silent):
            raise SettingError(
                f"{server} does not let this node in: is its public key on the server's list, and is the server whom {ca} vouches for? "
                f"Flower's words are in {log}"
            )
        if working and silent:
            raise UnheardError(
                f"{server} has not said a word in {idle:g} seconds: is it running, and can it be reached from here?"
            )
        time.sleep(DELIVERED)


def check_key(file: Path) -> None:
    """A private key as ``ssh-keygen -t ecdsa -b 384`` or `make_keys` writes it, without a passphrase."""
    try:
        sound = isinstance(
            load_ssh_private_key(file.read_bytes(), None), ec.EllipticCurvePrivateKey
        )
    except OSError:
        raise SettingError(
            f"{file}: cannot be read; --key names the private key of this node"
        ) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        sound = False
    if not sound:
        raise SettingError(
            f"{file}: no private key of an elliptic curve without a passphrase (privot federate keys makes one)"
        )


def _claim(client: RuntimeHttpClient) -> str:
    """The token of the next message, if there is one."""
    try:
        return str(
            client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])).token
        )
    except httpx.HTTPError:  # it is starting, or has just ended
        return ""


def _answer(app: ClientApp, where: str, secret: str, token: str) -> None:
    """One message: fetch it, answer it, hand the answer over. The bundle that came with it is not looked at."""
    carried = [*interceptors(secret, "flwr-clientapp"), RuntimeTokenHttpInterceptor(token)]
    client = RuntimeHttpClient.from_server_address(where, True, None, carried)
    beat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    try:
        beat.start()
        message, context, _, _ = pull_task_input(client)
        push_message(client, app(message=message, context=context), context)
        push_task_output(client, context, SubStatus.COMPLETED, "")
    except Exception:
        # The SuperNode ended meanwhile, or a stranger's message is none that Flower or our app knows: no reply, and the next one is heard.
        pass
    finally:
        beat.stop()
        client.close()
