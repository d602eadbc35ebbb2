"""A SuperNode that takes little from its server, and tells it nothing but replies.

As Flower ships it, a SuperNode unpacks the bundle that the server sends, follows the server to whatever address it names, inside the
owner's network too, reads answers of any length, and reports how long the owner worked on each message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from privot.federated.flower.processes import NODES, PARTS
from privot.federated.messages import MOST

PULL = f"{NODES}pull-object"
LITTLE = (
    1 << 18
)  # bytes of an answer that carries no part of a message, and of what Flower puts around one that does


class TooMuchError(ValueError):
    """An answer that no honest server gives. It is no fault of the line, so nobody tries again."""


class _Bounded(httpx.SyncByteStream):
    """The bytes of an answer, up to so many."""

    def __init__(self, stream: Any, most: int):
        self.stream = stream
        self.most = most

    def __iter__(self) -> Iterator[bytes]:
        left = self.most
        for part in self.stream:
            left -= len(part)
            if left < 0:
                raise TooMuchError(f"an answer of more than {self.most} bytes")
            yield part

    def close(self) -> None:
        self.stream.close()


def bound(response: httpx.Response) -> None:
    """What is called with each answer of the server, before its body is read."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise TooMuchError("an answer that is packed, and may be of any length")
    response.stream = _Bounded(response.stream, LITTLE + MOST * (response.request.url.path == PULL))


def guard() -> None:
    """Make every SuperNode that this process starts such a one."""
    begin = ProtobufClient.__init__
    pull = start_client_internal.pull_objects

    def begun(self: ProtobufClient, base_url: str, **given: Any) -> None:
        begin(self, base_url, **given)
        self._client.follow_redirects = False
        self._client.headers["accept-encoding"] = "identity"
        self._client.event_hooks = {"response": [bound]}

    def pulled(object_ids: list[str], pull_object_fn: Any) -> dict[str, bytes]:
        if len(object_ids) > PARTS:
            raise TooMuchError(f"a message of {len(object_ids)} parts")
        return pull(object_ids, pull_object_fn=pull_object_fn)

    ProtobufClient.__init__ = begun
    start_client_internal.pull_objects = pulled
    start_client_internal.get_fused_config_from_fab = lambda *_: {}
    InMemoryNodeState.get_message_processing_duration = lambda *_, **__: 0.0
