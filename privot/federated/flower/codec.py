"""Wraps one packed message in one Flower message, and unwraps it."""

from __future__ import annotations

from flwr.app import ConfigRecord, Message, RecordDict

RECORD_NAME = "privot"
FIELD_NAME = "message"


def wrap_message(raw: bytes) -> RecordDict:
    """Wrap a packed message: one Flower record with one field.

    >>> unwrap_message(wrap_message(b"gradients"))
    b'gradients'
    """
    return RecordDict({RECORD_NAME: ConfigRecord({FIELD_NAME: raw})})


def unwrap_message(content: RecordDict) -> bytes:
    """Unwrap a packed message.

    Content of any other form gives b"", which the protocol refuses as invalid.
    """
    if (
        list(content) != [RECORD_NAME]
        or not isinstance(record := content[RECORD_NAME], ConfigRecord)
        or list(record) != [FIELD_NAME]
    ):
        return b""
    return raw if isinstance(raw := record[FIELD_NAME], bytes) else b""


def unwrap_reply(message: Message) -> bytes | None:
    """Unwrap a reply, or return None if Flower reports an error instead of a reply."""
    return None if message.has_error() else unwrap_message(message.content)
