"""Flower's own two processes, started from here and ending with their parent: a SuperLink on the server, a SuperNode beside each owner.

Both run with ``--isolation process``. Otherwise a SuperNode fetches the app that the server names and runs it beside the data, so a server
could send code that reads them. Here the app is the one that the owner installed, and nothing that came over the wire is ever run. What
else a SuperNode would take from its server, and tell it, is bounded by `guarded`.

A SuperLink has three doors on one port, and only the one for nodes is locked by node keys: whoever reaches the others can register a node
of its own or start a run. `OnlyNodes` locks them with a secret that this server alone knows. It also bounds what comes in by the door for
nodes: Flower reads a call whole, up to 2 GiB of it, before it looks at the key, and keeps all that a node announced.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import httpx
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

HEADER = "x-privot-secret"
NODES = "/v1/fleet/"
ANNOUNCE = f"{NODES}push-messages"
PUSH = f"{NODES}push-object"
LITTLE = (
    1 << 14
)  # bytes of a call that carries no part of a message, and of what Flower puts around one that does
PARTS = 3  # of an honest message or reply: Flower's own, its content, our record in it
CLAIM = frozenset({"/flwr.proto.Runtime/AcquireTask"})
GRACE = 10.0  # seconds that a process has to end by itself

App = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class OnlyNodes:
    """Lets through calls of nodes, which Flower authenticates by their keys, and calls that carry the secret.

    Of a node's call no more is read than an honest one can have, ``room`` bytes being the longest message of ours. A node may announce one
    reply of few parts to each message that it was sent, so at most ``PARTS * (room + LITTLE)`` bytes are kept of it for each.
    """

    def __init__(self, app: App, secret: str, room: int):
        self.app = app
        self.secret = secret.encode()
        self.room = room

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        shown = dict(scope.get("headers", ())).get(HEADER.encode(), b"")
        ours = scope["type"] == "lifespan" or (
            bool(self.secret) and hmac.compare_digest(shown, self.secret)
        )  # no secret opens nothing
        if ours:
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None
        status = 404
        path = scope["path"]
        if path.startswith(NODES):
            body = await _read(receive, LITTLE + self.room * (path == PUSH))
            if body is not None and (path != ANNOUNCE or _modest(body)):
                return await self.app(scope, _replayed(body, receive), send)
            status = 413
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"connection", b"close")],
            }
        )
        await send({"type": "http.response.body", "body": b""})


async def _read(receive: Any, most: int) -> bytes | None:
    """The body of a call, or None as soon as it is longer."""
    body = bytearray()
    more = True
    while more:
        part = await receive()
        body += part.get("body", b"")
        more = part.get("more_body", False)
        if len(body) > most or part["type"] == "http.disconnect":
            return None
    return bytes(body)


def _replayed(body: bytes, receive: Any) -> Any:
    """Gives a body that was read once more, then what else comes."""
    said = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return said.pop() if said else await receive()

    return again


def _modest(body: bytes) -> bool:
    """Whether a node announces replies, of as many parts as an honest one has; it has no message of its own to send."""
    try:
        said = PushMessagesRequest.FromString(body)
    except Exception:
        return False
    replies = all(each.metadata.reply_to_message_id for each in said.messages_list)
    return (
        replies
        and sum(1 for tree in said.message_object_trees for _ in iterate_object_tree(tree)) <= PARTS
    )


class Secret:
    """Puts the secret on each call of a client of Flower's."""

    def __init__(self, secret: str):
        self.secret = secret

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers[HEADER] = self.secret
        return call_next(context)


def interceptors(secret: str, component: str) -> list[Any]:
    """What every call of ours to a SuperLink or SuperNode carries."""
    claims = SuperExecAuthHttpInterceptor(master_secret=secret.encode(), protected_methods=CLAIM)
    return [RuntimeVersionHttpInterceptor(component_name=component), claims, Secret(secret)]


@contextlib.contextmanager
def secret_file() -> Iterator[tuple[str, Path]]:
    """A fresh secret, and a file of it that only this user can read, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="privot-") as folder:  # of mode 0700
        secret = secrets.token_hex(32)
        file = Path(folder) / "secret"
        file.write_text(secret)
        yield secret, file


def start(kind: str, words: list[str], log: Path, room: int = 0) -> subprocess.Popen[bytes]:
    """A ``superlink``, which hears messages of ``room`` bytes, or a ``supernode``; what it says goes into the log."""
    with open(log, "ab") as file:
        command = [
            sys.executable,
            "-m",
            "privot.federated.flower.processes",
            kind,
            str(os.getpid()),
            str(room),
            *words,
        ]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then make it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port on this machine that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main(kind: str, parent: str, room: str, *words: str) -> None:
    """Run one of the two in this process."""
    from flwr.supercore.app_utils import start_parent_process_monitor

    start_parent_process_monitor(int(parent))
    sys.argv = [f"flower-{kind}", *words]
    if kind == "supernode":
        from flwr.supernode.cli.flower_supernode import flower_supernode

        from privot.federated.flower.supernode_patches import guard

        guard()
        return flower_supernode()
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.superlink.cli.flower_superlink import (
        SuperLinkLifespan,
        _parse_superlink_lifespan_config,
    )
    from flwr.superlink.main import create_app

    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    # The last one added is met first.
    app.add_middleware(
        OnlyNodes, secret=(config.superexec_auth_secret or b"").decode(), room=int(room)
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
    main(*sys.argv[1:])
