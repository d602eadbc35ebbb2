"""Federated training: every client answers through its own privacy gate, and trusts nobody.

The server holds the generator. It sends generated images to clients and receives gradients that
the clients' gates have made private. It never receives records.
"""

from privot.federated.client import Client
from privot.federated.client_policy import ClientPolicy
from privot.federated.messages import (
    Answer,
    Message,
    Refusal,
    Request,
    Terms,
    pack_message,
    unpack_message,
)
from privot.federated.server import Offense, Server

__all__ = [
    "Answer",
    "Client",
    "ClientPolicy",
    "Message",
    "Offense",
    "Refusal",
    "Request",
    "Server",
    "Terms",
    "pack_message",
    "unpack_message",
]
