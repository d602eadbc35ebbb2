"""An ASGI filter in front of a SuperLink.

A SuperLink offers three services on one port, and node keys protect only the one for nodes. Whoever
reaches the others can register a node or start a run. The filter lets calls to these services pass
only with a secret that this server alone has. It also limits the size of calls from nodes: Flower
reads a call of up to 2 GiB before it checks the key, and stores everything that a node announces.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

from privot.federated.flower.http_limits import (
    FLEET_PATH,
    MAX_MESSAGE_OBJECTS,
    PUSH_MESSAGES_PATH,
    PUSH_OBJECT_PATH,
    REQUEST_OVERHEAD_BYTES,
    SECRET_HEADER,
)

AsgiApp = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class SuperLinkFirewall:
    """Lets calls of nodes, whose keys Flower checks, and calls with the secret pass.

    The body of a node's call may not be longer than an honest one. A node may announce one reply of
    few parts to each message, so the SuperLink stores at most
    ``MAX_MESSAGE_OBJECTS * (max_message_bytes + REQUEST_OVERHEAD_BYTES)`` bytes for each message.

    Args:
        app: The application behind the filter.
        secret: The secret; an empty secret lets no call pass.
        max_message_bytes: Length of the longest message of the protocol.
    """

    def __init__(self, app: AsgiApp, secret: str, max_message_bytes: int):
        self.app = app
        self.secret = secret.encode()
        self.max_message_bytes = max_message_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Handle one call of the ASGI protocol.

        Args:
            scope: Facts about the call.
            receive: Returns the next event of the call.
            send: Sends an event of the response.
        """
        header = dict(scope.get("headers", ())).get(SECRET_HEADER.encode(), b"")
        has_secret = bool(self.secret) and hmac.compare_digest(header, self.secret)
        if scope["type"] == "lifespan" or has_secret:
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None
        status = 404
        path = scope["path"]
        if path.startswith(FLEET_PATH):
            message_bytes = self.max_message_bytes if path == PUSH_OBJECT_PATH else 0
            body = await _read_body(receive, REQUEST_OVERHEAD_BYTES + message_bytes)
            if body is not None and (path != PUSH_MESSAGES_PATH or _is_valid_announcement(body)):
                return await self.app(scope, _replay_body(body, receive), send)
            status = 413
        headers = [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


async def _read_body(receive: Any, max_bytes: int) -> bytes | None:
    """Read the body of a call, or return None if it is longer than allowed or the caller leaves."""
    body = bytearray()
    has_more = True
    while has_more:
        event = await receive()
        body += event.get("body", b"")
        has_more = event.get("more_body", False)
        if len(body) > max_bytes or event["type"] == "http.disconnect":
            return None
    return bytes(body)


def _replay_body(body: bytes, receive: Any) -> Any:
    """Return a `receive` function that first gives a body that was read already."""
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Any:
        return events.pop() if events else await receive()

    return receive_again


def _is_valid_announcement(body: bytes) -> bool:
    """Return whether a node announces only replies with as many parts as an honest reply.

    A node never starts a message of its own.
    """
    try:
        announcement = PushMessagesRequest.FromString(body)
    except Exception:
        return False
    are_replies = all(
        message.metadata.reply_to_message_id for message in announcement.messages_list
    )
    num_objects = sum(
        1 for tree in announcement.message_object_trees for _ in iterate_object_tree(tree)
    )
    return are_replies and num_objects <= MAX_MESSAGE_OBJECTS
