"""What crosses the wire: four kinds of messages, each with one way to write it as bytes; anything else is refused.

A message is a file of the safetensors format: eight bytes of length, a JSON header with the kind, the version, the run and the round, then
at most one tensor. Reading runs no code, and bounds what it allocates by what came. There is one writing of each message, to the byte: a
header with one more field, other blanks or another order of keys is no message, so nothing can be said beside what the kinds say.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from privot.data.spec import Spec
from privot.errors import MessageError, PrivotError
from privot.methods import make
from privot.methods.federated_gs_wgan import FederatedGsWgan
from privot.privacy.plan import Plan

FORMAT = "privot federated 2"
MOST = 1 << 26  # bytes of a message
LONGEST = 1 << 14  # bytes of its header
# a reason is shown to people: no control characters
RUN = re.compile(r"[0-9a-f]{32}")
SAID = re.compile(r"[ -~]{1,200}")
KEY = "__metadata__"
DTYPES = {"U8": torch.uint8, "F32": torch.float32}


@dataclass(frozen=True, eq=False)
class Terms:
    """What a run would be, before anyone agrees to it. Settings have their noise fixed, so the plan of one owner follows from the terms.

    An owner that agrees sends the very bytes back.
    """

    kind: ClassVar[str] = "terms"

    run: str  # 32 hexadecimal digits, drawn anew for each run
    settings: FederatedGsWgan
    shape: tuple[int, int, int]
    classes: int
    owners: int  # how many are asked to take part

    def __post_init__(self) -> None:
        _check_run(self.run)
        if self.settings.noise is None:
            raise MessageError("terms without a noise: it must be fixed before anybody is asked")
        if any(
            type(each) is not int for each in (*self.shape, self.classes, self.owners)
        ):  # a truth value would pass for one
            raise MessageError("terms have whole numbers for the shape, the classes and the owners")
        with _refusing("terms that cannot be"):
            self.plan()

    @cached_property
    def spec(self) -> Spec:
        """Of the data of all owners."""
        return Spec(self.shape, self.classes, owners=self.owners)

    def plan(self) -> Plan:
        """All that one owner is asked in this run."""
        return self.settings.plan(self.spec)


@dataclass(frozen=True, eq=False)
class Request:
    """Generated images uint8 [classes, per, channels, height, width]; their labels are the first axis."""

    kind: ClassVar[str] = "request"
    tensor: ClassVar[tuple[str, str]] = ("images", "U8")

    run: str
    round: int  # from 0
    images: Tensor

    def __post_init__(self) -> None:
        _check(self.run, self.round, self.images, torch.uint8)


@dataclass(frozen=True, eq=False)
class Answer:
    """Where an owner would like these images to go: sanitized, float32 [classes, per, channels, rows, columns], in low frequencies."""

    kind: ClassVar[str] = "answer"
    tensor: ClassVar[tuple[str, str]] = ("values", "F32")

    run: str
    round: int
    values: Tensor

    def __post_init__(self) -> None:
        _check(self.run, self.round, self.values, torch.float32)


@dataclass(frozen=True, eq=False)
class Refusal:
    """An owner says no, and why, in words that tell nothing of its records. Round -1: to the terms, or to what is no message."""

    kind: ClassVar[str] = "refusal"

    run: str
    round: int
    reason: str

    def __post_init__(self) -> None:
        _check_run(self.run)
        if (
            type(self.round) is not int
            or not -1 <= self.round < 10**9
            or not SAID.fullmatch(self.reason)
        ):
            raise MessageError("a refusal has a round and a reason of at most 200 plain letters")


Message = Terms | Request | Answer | Refusal


def _check_run(run: str) -> None:
    if not isinstance(run, str) or not RUN.fullmatch(run):
        raise MessageError("a run is named by 32 hexadecimal digits")


def _check(run: str, number: int, tensor: Tensor, dtype: torch.dtype) -> None:
    _check_run(run)
    if type(number) is not int or not 0 <= number < 10**9:
        raise MessageError("rounds are counted from 0")
    if tensor.dtype != dtype or tensor.ndim != 5 or not tensor.numel():
        raise MessageError(
            f"{dtype} of five axes is needed, not {tensor.dtype} {list(tensor.shape)}"
        )


def pack(message: Message) -> bytes:
    """A message as bytes, in the one way there is.

    >>> sent = Refusal("0" * 32, 3, "the plan is used up")
    >>> unpack(pack(sent)).reason
    'the plan is used up'
    """
    facts = {"format": FORMAT, "kind": message.kind, "run": message.run}
    head: dict[str, Any] = {KEY: facts}
    data = b""
    if isinstance(message, Terms):
        said = {key: getattr(message, key) for key in ("shape", "classes", "owners")}
        facts["terms"] = _json({"settings": dataclasses.asdict(message.settings), **said})
    else:
        facts["round"] = str(message.round)
    if isinstance(message, Refusal):
        facts["reason"] = message.reason
    elif not isinstance(message, Terms):
        name, code = message.tensor
        values: Tensor = getattr(message, name).detach().cpu().contiguous()
        data = values.numpy().tobytes()
        head[name] = {"data_offsets": [0, len(data)], "dtype": code, "shape": list(values.shape)}
    text = _json(head).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def unpack(raw: bytes, most: int = MOST) -> Message:
    """The message that these bytes are, or `MessageError`; its length is looked at before anything else."""
    if not isinstance(raw, bytes):
        raise MessageError(f"a message is bytes, not {type(raw).__name__}")
    if len(raw) > most:
        raise MessageError(f"a message of {len(raw)} bytes, and {most} are the most here")
    with _refusing("this is no message of the protocol"):
        length = int.from_bytes(raw[:8], "little")
        if not 0 < length <= min(LONGEST, len(raw) - 8):
            raise MessageError(
                "this is no message of the protocol: cut short, or its header is too long"
            )
        head = _parsed(raw[8 : 8 + length])
        facts = head[KEY]
        if facts["format"] != FORMAT:
            raise MessageError("a message of another version of the protocol")
        message = _read(facts, head, raw[8 + length :])
        # Whatever was said beside the fields, or in another order, or after the end, is lost in writing it again.
        if pack(message) != raw:
            raise MessageError(
                f"this {message.kind} is not written in the one way there is: something more is said, or otherwise"
            )
        return message


def _read(facts: dict[str, str], head: dict[str, Any], data: bytes) -> Message:
    kind = facts["kind"]
    run = facts["run"]
    if kind == Terms.kind:
        said = _parsed(facts["terms"])
        settings = make(FederatedGsWgan.name, said["settings"])
        (channels, height, width) = said["shape"]
        assert isinstance(settings, FederatedGsWgan)
        return Terms(run, settings, (channels, height, width), said["classes"], said["owners"])
    number = int(facts["round"])
    if kind == Refusal.kind:
        return Refusal(run, number, facts["reason"])
    if kind not in (Request.kind, Answer.kind):
        raise MessageError("a message of a kind that is not known")
    made = Request if kind == Request.kind else Answer
    name, code = made.tensor
    shape = head[name]["shape"]
    dtype = DTYPES[code]
    if (
        head[name]["dtype"] != code
        or any(type(each) is not int or each < 1 for each in shape)
        or len(shape) != 5
    ):
        raise MessageError(f"the {name} of this {kind} are not {code} of five axes")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise MessageError(f"the {name} of this {kind} are not as many as its shape says")
    return made(run, number, torch.frombuffer(bytearray(data), dtype=dtype).view(shape))


@contextmanager
def _refusing(text: str) -> Iterator[None]:
    """Whatever a stranger's words provoke is a `MessageError`; of the words themselves nothing is repeated but printable letters."""
    try:
        yield
    except MessageError:
        raise
    except PrivotError as error:
        raise MessageError(f"{text}: {''.join(re.findall('[ -~]', str(error)))[:150]}") from None
    except Exception as error:
        raise MessageError(f"{text} ({type(error).__name__})") from None


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False)


def _parsed(text: bytes | str) -> Any:
    def refused(word: str) -> NoReturn:
        raise MessageError("this is no message of the protocol: a number that is none")

    return json.loads(text, parse_constant=refused)
