"""The gate at the client's end of a cable: owners who trust nobody, and a server that learns from what their gates release."""

from privot.federated.client import Owner
from privot.federated.client_policy import Policy
from privot.federated.messages import Answer, Message, Refusal, Request, Terms, pack, unpack
from privot.federated.server import Offence, Server

__all__ = [
    "Answer",
    "Message",
    "Offence",
    "Owner",
    "Policy",
    "Refusal",
    "Request",
    "Server",
    "Terms",
    "pack",
    "unpack",
]
