"""A Flower ClientApp that passes every message to a client and returns its reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from privot.federated.flower.codec import unwrap_message, wrap_message

CLIENT_ERROR_CODE = 1  # the server only checks whether there is an error, so the number is free


class MessageResponder(Protocol):
    """Replies to packed messages, as `Client` does."""

    def reply(self, message: bytes) -> bytes:
        """Return the packed reply to a message."""
        ...


def build_client_app(
    get_client: Callable[[Context], MessageResponder],
    on_error: Callable[[Exception], None] = lambda error: None,
) -> ClientApp:
    """Build an app that passes messages to the client of a node.

    Args:
        get_client: Returns the client of a Flower node from the node's context.
        on_error: Receives, on the client's side, an error that prevents a reply, such as data that
            cannot be read. The server learns only that there was an error.

    Returns:
        The app.
    """
    app = ClientApp()

    @app.query()
    def answer_query(message: Message, context: Context) -> Message:
        try:
            reply = get_client(context).reply(unwrap_message(message.content))
            return Message(wrap_message(reply), reply_to=message)
        except Exception as error:
            on_error(error)
            # privacy: Flower would send the text of the error, which can contain data.
            failure = Error(CLIENT_ERROR_CODE, "The client failed.")
            return Message(failure, reply_to=message)

    @app.query("partition_id")
    def send_partition_id(message: Message, context: Context) -> Message:
        """Send the index of the simulated client at this node, or -1 from a real node.

        Flower gives the nodes of a simulation new ids at every start.
        """
        partition_id = int(context.node_config.get("partition-id", -1))
        content = RecordDict({"partition_id": ConfigRecord({"number": partition_id})})
        return Message(content, reply_to=message)

    return app
