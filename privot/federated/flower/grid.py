"""A Flower grid that fetches replies from the server's own SuperLink without waiting for any.

A reply arrives in two steps: a node announces it with the digests of its parts, then pushes the
parts. Flower's own grid waits up to two hours for announced parts that never arrive, and raises an
error if they form no message. A single node could stop the whole run that way.
"""

from __future__ import annotations

from collections.abc import Iterable

import httpx
from flwr.app import Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.superlink.grid import HttpGrid

from privot.errors import MessageError


class NonBlockingGrid(HttpGrid):
    """A grid whose `pull_messages` returns the replies that are complete.

    Parts that form no Flower message give a message without content.

    Args:
        address: HOST:PORT of the SuperLink.
        root_certificates: Certificate of the authority that signed the SuperLink's certificate.
        token: Token of the run.
    """

    def __init__(self, address: str, root_certificates: bytes, token: str):
        super().__init__(address, False, root_certificates, token=token)
        # Id of a request -> id of the reply, ids of the reply's parts.
        self._announced_replies: dict[str, tuple[str, list[str]]] = {}

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Fetch the complete replies to these messages."""
        waiting = list(message_ids)
        self._update_announced_replies([id_ for id_ in waiting if not self._is_announced(id_)])
        replies = []
        for request_id in filter(self._is_announced, waiting):
            try:
                reply = self._fetch_reply(request_id, *self._announced_replies[request_id])
            except ObjectUnavailableError:
                continue  # the other parts may still arrive
            except httpx.HTTPError:
                raise  # the SuperLink has ended
            except Exception:
                reply = self._build_empty_reply(request_id)
            del self._announced_replies[request_id]
            replies.append(reply)
        return replies

    def _is_announced(self, request_id: str) -> bool:
        return request_id in self._announced_replies

    def _update_announced_replies(self, request_ids: list[str]) -> None:
        """Ask the SuperLink which of these requests have an announced reply."""
        if not request_ids:
            return
        response = self._runtime_client.PullMessages(
            PullAppMessagesRequest(message_ids=request_ids)
        )
        for message, tree in zip(
            response.messages_list, response.message_object_trees, strict=True
        ):
            object_ids = [part.object_id for part in iterate_object_tree(tree)]
            self._announced_replies[message.metadata.reply_to_message_id] = (
                message.metadata.message_id,
                object_ids,
            )

    def _fetch_reply(self, request_id: str, reply_id: str, object_ids: list[str]) -> Message:
        """Fetch an announced reply.

        Args:
            request_id: Id of the request.
            reply_id: Id of the reply.
            object_ids: Ids of the reply's parts.

        Returns:
            The reply.
        """
        pull_object = make_pull_object_fn_protobuf(
            self._runtime_client.PullObject, self.node, self.run.run_id
        )
        contents = {object_id: pull_object(object_id) for object_id in object_ids}
        self._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.node, run_id=self.run.run_id, message_object_id=reply_id
            )
        )
        message = inflate_object_from_contents(reply_id, contents)
        if not isinstance(message, Message) or message.metadata.reply_to_message_id != request_id:
            raise MessageError("This is no reply to the request.")
        return message

    def _build_empty_reply(self, request_id: str) -> Message:
        node_id = self.node.node_id
        metadata = Metadata(
            run_id=self.run.run_id,
            message_id="",
            src_node_id=node_id,
            dst_node_id=node_id,
            reply_to_message_id=request_id,
            group_id="",
            created_at=0.0,
            ttl=0.0,
            message_type=SYSTEM_MESSAGE_TYPE,
        )
        return make_message(metadata=metadata, content=RecordDict())
