"""What a server heard from one owner, read off the record of a federated run: terms, images it sent, and answers that came."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from privot.errors import DataError, MessageError
from privot.federated.messages import Answer, Request, Terms, unpack
from privot.federated.transcript import SENT, read
from privot.federated.validation import shape_of

MOST = 1 << 28  # bytes of answers and requests that are held; of a longer record the first rounds


@dataclass(frozen=True)
class Tapped:
    """Of the owner ``name``: ``images`` uint8 [rounds, classes, rows, c, h, w], ``values`` float32 [rounds, classes, rows, c, h', w']."""

    name: str
    terms: Terms
    images: Tensor
    values: Tensor
    bytes: tuple[int, int]  # to the owner, and from it, in all


def tapped(path: Path, name: str | None = None) -> Tapped:
    """All rounds that this owner answered, or the first owner who did. What is no message, or of another run, is passed over."""
    terms: Terms | None = None
    asked: dict[tuple[str, int], Tensor] = {}
    heard: dict[tuple[str, int], Tensor] = {}
    names = set()
    down = 0
    up = 0
    held = 0
    for entry in read(path):
        names.add(entry.name)
        if name not in (None, entry.name):
            continue
        try:
            message = unpack(entry.message)
        except MessageError:
            continue
        down = down + len(entry.message) * (entry.way == SENT)
        up = up + len(entry.message) * (entry.way != SENT)
        if isinstance(message, Terms) and entry.way == SENT:
            terms = message
        elif terms is None or message.run != terms.run or held > MOST:
            continue
        elif isinstance(message, Request) and entry.way == SENT:
            asked[entry.name, message.round] = message.images
        elif (
            isinstance(message, Answer)
            and (entry.name, message.round) in asked
            and _fits(terms, message.values)
        ):
            # An owner says the same again or nothing, so the first word is the word.
            name = entry.name
            heard.setdefault((name, message.round), message.values)
            held += len(entry.message)
    if terms is None or name is None or not heard:
        known = ", ".join(sorted(names)[:5]) or "nobody"
        raise DataError(
            f"{path}: no answer of {name or 'any owner'} is in this record; it has messages of {known}"
        )
    rounds = sorted(number for _, number in heard)
    images, values = (
        torch.stack([each[name, number] for number in rounds]) for each in (asked, heard)
    )
    return Tapped(name, terms, images, values, (down, up))


def _fits(terms: Terms, values: Tensor) -> bool:
    return list(values.shape) == shape_of(terms) and bool(values.isfinite().all())
