"""The server's line to its own SuperLink: it fetches what owners sent, and waits for none of them.

A reply comes in two steps: a node announces it with the digests of its parts, then pushes these. Flower's own grid waits up to two hours
for parts that were announced and never came, and ends with an error where they make no message: one node could so stop everybody.
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


class Line(HttpGrid):
    """A grid whose `pull_messages` gives what is there whole; what is no message of Flower's comes as one without content."""

    def __init__(self, address: str, root: bytes, token: str):
        super().__init__(address, False, root, token=token)
        self._announced: dict[
            str, tuple[str, list[str]]
        ] = {}  # by the message they answer: number of the reply, and of its parts

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        waiting = list(message_ids)
        if new := [each for each in waiting if each not in self._announced]:
            told = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=new))
            for message, tree in zip(told.messages_list, told.message_object_trees, strict=True):
                parts = [part.object_id for part in iterate_object_tree(tree)]
                self._announced[message.metadata.reply_to_message_id] = (
                    message.metadata.message_id,
                    parts,
                )
        found = []
        for asked in [each for each in waiting if each in self._announced]:
            try:
                message = self._fetched(asked, *self._announced[asked])
            except ObjectUnavailableError:
                continue  # the rest may come
            except httpx.HTTPError:
                raise  # the SuperLink is gone
            except Exception:
                message = self._empty(asked)
            del self._announced[asked]
            found.append(message)
        return found

    def _fetched(self, asked: str, number: str, parts: list[str]) -> Message:
        fetch = make_pull_object_fn_protobuf(
            self._runtime_client.PullObject, self.node, self.run.run_id
        )
        contents = {part: fetch(part) for part in parts}
        self._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.node, run_id=self.run.run_id, message_object_id=number
            )
        )
        message = inflate_object_from_contents(number, contents)
        if not isinstance(message, Message) or message.metadata.reply_to_message_id != asked:
            raise MessageError("this is no reply to what was asked")
        return message

    def _empty(self, asked: str) -> Message:
        here = self.node.node_id
        about = Metadata(self.run.run_id, "", here, here, asked, "", 0.0, 0.0, SYSTEM_MESSAGE_TYPE)
        return make_message(metadata=about, content=RecordDict())
