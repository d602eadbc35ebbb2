"""The owner's end: a Flower ClientApp that hands every message to the owner and carries its reply. It decides nothing and keeps nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from privot.federated.flower.codec import opened, wrapped

FAILED = 1  # any number will do: of an error only that there is one is looked at


class Replies(Protocol):
    """An `Owner`, as far as Flower needs to know it."""

    def reply(self, message: bytes) -> bytes: ...


def client_app(
    owner_of: Callable[[Context], Replies], failed: Callable[[Exception], None] = lambda error: None
) -> ClientApp:
    """An app that asks the owner who sits at this node.

    ``failed`` hears of what keeps the owner from replying (data that cannot be read, say). The server hears only that something did.
    """
    app = ClientApp()

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        try:
            return Message(
                wrapped(owner_of(context).reply(opened(message.content))), reply_to=message
            )
        except Exception as error:
            failed(error)
            # privacy: Flower would send the words of the error, and they may carry data.
            return Message(Error(FAILED, "failed on the owner's side"), reply_to=message)

    @app.query("place")
    def place(message: Message, context: Context) -> Message:
        """Which owner of a simulation sits here; nodes have other numbers each time. A real node has no such number, and says -1."""
        number = context.node_config.get("partition-id", -1)
        return Message(
            RecordDict({"place": ConfigRecord({"number": int(number)})}), reply_to=message
        )

    return app
