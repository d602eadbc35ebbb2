"""Patches private names of Flower 1.41 so that a SuperNode trusts its server less.

Without the patches a SuperNode unpacks the bundle that the server sends, follows redirects of the
server to any address, also inside the client's network, reads responses of any length, and reports
how long the client worked on each message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from privot.federated.flower.http_limits import (
    MAX_MESSAGE_OBJECTS,
    PULL_OBJECT_PATH,
    RESPONSE_OVERHEAD_BYTES,
)
from privot.federated.messages import MAX_PACKED_MESSAGE_BYTES


class OversizedResponseError(ValueError):
    """A response that no honest server sends. It is no connection error, so nobody retries."""


class _BoundedStream(httpx.SyncByteStream):
    """The bytes of a response, up to a limit."""

    def __init__(self, stream: Any, max_bytes: int):
        self.stream = stream
        self.max_bytes = max_bytes

    def __iter__(self) -> Iterator[bytes]:
        remaining_bytes = self.max_bytes
        for chunk in self.stream:
            remaining_bytes -= len(chunk)
            if remaining_bytes < 0:
                raise OversizedResponseError(f"The response has more than {self.max_bytes} bytes.")
            yield chunk

    def close(self) -> None:
        """Close the response."""
        self.stream.close()


def limit_response_size(response: httpx.Response) -> None:
    """Limit the body of a response; httpx calls this before it reads the body."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise OversizedResponseError("The response is compressed, so its length is unknown.")
    has_message = response.request.url.path == PULL_OBJECT_PATH
    message_bytes = MAX_PACKED_MESSAGE_BYTES if has_message else 0
    response.stream = _BoundedStream(response.stream, RESPONSE_OVERHEAD_BYTES + message_bytes)


def patch_supernode() -> None:
    """Patch Flower in this process, for every SuperNode that it starts."""
    original_init = ProtobufClient.__init__
    original_pull_objects = start_client_internal.pull_objects

    def initialize_client(self: ProtobufClient, base_url: str, **options: Any) -> None:
        original_init(self, base_url, **options)
        self._client.follow_redirects = False
        self._client.headers["accept-encoding"] = "identity"
        self._client.event_hooks = {"response": [limit_response_size]}

    def pull_objects(object_ids: list[str], pull_object_fn: Any) -> dict[str, bytes]:
        if len(object_ids) > MAX_MESSAGE_OBJECTS:
            raise OversizedResponseError(f"The message has {len(object_ids)} parts.")
        return original_pull_objects(object_ids, pull_object_fn=pull_object_fn)

    ProtobufClient.__init__ = initialize_client
    start_client_internal.pull_objects = pull_objects
    start_client_internal.get_fused_config_from_fab = lambda *_: {}
    InMemoryNodeState.get_message_processing_duration = lambda *_, **__: 0.0
