"""One message of ours in one message of Flower's: bytes in, the same bytes out."""

from __future__ import annotations

from flwr.app import ConfigRecord, Message, RecordDict

RECORD = "privot"
FIELD = "message"


def wrapped(raw: bytes) -> RecordDict:
    """What Flower carries: a single record with a single field.

    >>> opened(wrapped(b"slopes"))
    b'slopes'
    """
    return RecordDict({RECORD: ConfigRecord({FIELD: raw})})


def opened(content: RecordDict) -> bytes:
    """The bytes of a message; of anything else b"", which is no message of the protocol and is refused as such."""
    if (
        list(content) != [RECORD]
        or not isinstance(record := content[RECORD], ConfigRecord)
        or list(record) != [FIELD]
    ):
        return b""
    return raw if isinstance(raw := record[FIELD], bytes) else b""


def said(message: Message) -> bytes | None:
    """What came back, or None where Flower says that nothing will."""
    return None if message.has_error() else opened(message.content)
