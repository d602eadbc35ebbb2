"""The four kinds of messages of the protocol and their byte format.

A message is a file in the safetensors format: eight bytes of length, a JSON header with the kind,
the version, the run and the round, then at most one tensor. Reading a message runs no code and
allocates no more memory than the message has bytes. Every message has exactly one encoding: a
header with an additional field, other white space or another order of keys is refused. So a message
cannot carry anything beyond its fields.
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
from privot.methods import make_method
from privot.methods.federated_gs_wgan import FederatedGSWGAN
from privot.privacy.plan import Plan

MESSAGE_FORMAT = "privot federated 3"
MAX_PACKED_MESSAGE_BYTES = 1 << 26  # bytes of a message
MAX_MESSAGE_HEADER_BYTES = 1 << 14  # bytes of its header
MAX_ROUND = 10**9
RUN_ID_PATTERN = re.compile(r"[0-9a-f]{32}")
# People read a reason on a terminal, so it has no control characters.
REASON_PATTERN = re.compile(r"[ -~]{1,200}")
HEADER_METADATA_KEY = "__metadata__"
TENSOR_DTYPES = {"U8": torch.uint8, "F32": torch.float32}
NOT_A_MESSAGE = "This is no message of the protocol"


@dataclass(frozen=True, eq=False)
class Terms:
    """Describes a run before a client agrees to it.

    The settings fix the noise multiplier, so every client can compute its own plan from the terms.
    A client that agrees sends back the same bytes.

    Attributes:
        run_id: 32 hexadecimal digits, random for each run.
        settings: The method with its settings; the noise multiplier is set.
        shape: Channels, height and width of an image.
        num_classes: Number of classes.
        num_clients: Number of clients that are invited.
    """

    kind: ClassVar[str] = "terms"

    run_id: str
    settings: FederatedGSWGAN
    shape: tuple[int, int, int]
    num_classes: int
    num_clients: int

    def __post_init__(self) -> None:
        _check_run_id(self.run_id)
        if self.settings.noise_multiplier is None:
            raise MessageError("The terms have no noise multiplier. Set it before the run starts.")
        counts = (*self.shape, self.num_classes, self.num_clients)
        if any(type(count) is not int for count in counts):  # a bool is an instance of int
            raise MessageError("The shape and the numbers of classes and clients must be integers.")
        with _reraise_as_message_error("These terms are invalid"):
            self.plan()

    @cached_property
    def spec(self) -> Spec:
        """Public facts about the data of all clients together."""
        return Spec(self.shape, self.num_classes, num_clients=self.num_clients)

    def plan(self) -> Plan:
        """Compute the plan of one client: all queries that it answers in this run."""
        return self.settings.plan(self.spec)


@dataclass(frozen=True, eq=False)
class Request:
    """Carries generated images to a client."""

    kind: ClassVar[str] = "request"
    tensor_field: ClassVar[tuple[str, str]] = ("images", "U8")

    run_id: str
    round: int  # from 0
    images: Tensor  # uint8 [classes, batch, channels, height, width]; the first axis is the label

    def __post_init__(self) -> None:
        _check_tensor_message(self.run_id, self.round, self.images, torch.uint8)


@dataclass(frozen=True, eq=False)
class Answer:
    """Carries the private gradients of a client's critic with respect to the requested images."""

    kind: ClassVar[str] = "answer"
    tensor_field: ClassVar[tuple[str, str]] = ("gradients", "F32")

    run_id: str
    round: int  # from 0
    gradients: Tensor  # float32 [classes, batch, channels, rows, columns], low DCT coefficients

    def __post_init__(self) -> None:
        _check_tensor_message(self.run_id, self.round, self.gradients, torch.float32)


@dataclass(frozen=True, eq=False)
class Refusal:
    """States that a client does not answer, and why; the reason says nothing about its records.

    Attributes:
        run_id: The run, or 32 zeros if the message could not be read.
        round: The round; -1 for a refusal of terms or of something that is no message.
        reason: At most 200 printable ASCII characters.
    """

    kind: ClassVar[str] = "refusal"

    run_id: str
    round: int
    reason: str

    def __post_init__(self) -> None:
        _check_run_id(self.run_id)
        if (
            type(self.round) is not int
            or not -1 <= self.round < MAX_ROUND
            or not REASON_PATTERN.fullmatch(self.reason)
        ):
            raise MessageError(
                "A refusal needs a round and a reason of at most 200 printable ASCII characters."
            )


Message = Terms | Request | Answer | Refusal


def _check_run_id(run_id: str) -> None:
    if not isinstance(run_id, str) or not RUN_ID_PATTERN.fullmatch(run_id):
        raise MessageError("A run id must have 32 hexadecimal digits.")


def _check_tensor_message(
    run_id: str, round_number: int, tensor: Tensor, dtype: torch.dtype
) -> None:
    _check_run_id(run_id)
    if type(round_number) is not int or not 0 <= round_number < MAX_ROUND:
        raise MessageError(f"A round must be an integer from 0 to {MAX_ROUND - 1}.")
    if tensor.dtype != dtype or tensor.ndim != 5 or not tensor.numel():
        raise MessageError(
            f"A non-empty tensor of {dtype} with five axes is needed, "
            f"not {tensor.dtype} {list(tensor.shape)}."
        )


def pack_message(message: Message) -> bytes:
    """Encode a message as bytes. Every message has exactly one encoding.

    >>> refusal = Refusal("0" * 32, 3, "the plan is used up")
    >>> unpack_message(pack_message(refusal)).reason
    'the plan is used up'
    """
    metadata = {"format": MESSAGE_FORMAT, "kind": message.kind, "run_id": message.run_id}
    header: dict[str, Any] = {HEADER_METADATA_KEY: metadata}
    data = b""
    if isinstance(message, Terms):
        facts = {key: getattr(message, key) for key in ("shape", "num_classes", "num_clients")}
        metadata["terms"] = _dump_json({"settings": dataclasses.asdict(message.settings), **facts})
    else:
        metadata["round"] = str(message.round)
    if isinstance(message, Refusal):
        metadata["reason"] = message.reason
    elif not isinstance(message, Terms):
        name, dtype = message.tensor_field
        values: Tensor = getattr(message, name).detach().cpu().contiguous()
        data = values.numpy().tobytes()
        shape = list(values.shape)
        header[name] = {"data_offsets": [0, len(data)], "dtype": dtype, "shape": shape}
    header_bytes = _dump_json(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    return len(header_bytes).to_bytes(8, "little") + header_bytes + data


def unpack_message(raw: bytes, max_bytes: int = MAX_PACKED_MESSAGE_BYTES) -> Message:
    """Decode a message. The length is checked before anything else.

    Args:
        raw: The bytes that arrived.
        max_bytes: The largest length that is accepted.

    Returns:
        The message whose encoding is `raw`.

    Raises:
        MessageError: The bytes are not the encoding of a valid message.
    """
    if not isinstance(raw, bytes):
        raise MessageError(f"A message must be bytes, not {type(raw).__name__}.")
    if len(raw) > max_bytes:
        raise MessageError(f"The message has {len(raw)} bytes; at most {max_bytes} are allowed.")
    with _reraise_as_message_error(NOT_A_MESSAGE):
        header_bytes = int.from_bytes(raw[:8], "little")
        if not 0 < header_bytes <= min(MAX_MESSAGE_HEADER_BYTES, len(raw) - 8):
            raise MessageError(f"{NOT_A_MESSAGE}: it is cut short or its header is too long.")
        header = _load_json(raw[8 : 8 + header_bytes])
        metadata = header[HEADER_METADATA_KEY]
        if metadata["format"] != MESSAGE_FORMAT:
            raise MessageError("The message has another version of the protocol.")
        message = _parse_message(metadata, header, raw[8 + header_bytes :])
        # Additional fields, another order of keys and trailing bytes do not survive the encoding.
        if pack_message(message) != raw:
            raise MessageError(
                f"This {message.kind} does not have the one allowed encoding: "
                "it has additional content or another form."
            )
        return message


def _parse_message(metadata: dict[str, str], header: dict[str, Any], data: bytes) -> Message:
    """Build the message from its decoded header.

    Args:
        metadata: The text fields of the header.
        header: The whole header, with the description of the tensor.
        data: The bytes of the tensor.

    Returns:
        The message.
    """
    kind = metadata["kind"]
    run_id = metadata["run_id"]
    if kind == Terms.kind:
        facts = _load_json(metadata["terms"])
        settings = make_method(FederatedGSWGAN.name, facts["settings"])
        assert isinstance(settings, FederatedGSWGAN)
        (channels, height, width) = facts["shape"]
        shape = (channels, height, width)
        return Terms(run_id, settings, shape, facts["num_classes"], facts["num_clients"])
    round_number = int(metadata["round"])
    if kind == Refusal.kind:
        return Refusal(run_id, round_number, metadata["reason"])
    if kind not in (Request.kind, Answer.kind):
        raise MessageError("The message has an unknown kind.")
    message_type = Request if kind == Request.kind else Answer
    name, dtype_name = message_type.tensor_field
    sizes = header[name]["shape"]
    dtype = TENSOR_DTYPES[dtype_name]
    if (
        header[name]["dtype"] != dtype_name
        or any(type(size) is not int or size < 1 for size in sizes)
        or len(sizes) != 5
    ):
        raise MessageError(f"The {name} of this {kind} must be {dtype_name} with five axes.")
    if math.prod(sizes) * dtype.itemsize != len(data):
        raise MessageError(f"The {name} of this {kind} do not have as many values as their shape.")
    values = torch.frombuffer(bytearray(data), dtype=dtype).view(sizes)
    return message_type(run_id, round_number, values)


@contextmanager
def _reraise_as_message_error(prefix: str) -> Iterator[None]:
    """Turn every error into a `MessageError`; of its text only printable characters remain."""
    try:
        yield
    except MessageError:
        raise
    except PrivotError as error:
        printable = "".join(re.findall("[ -~]", str(error)))
        raise MessageError(f"{prefix}: {printable[:150]}") from None
    except Exception as error:
        raise MessageError(f"{prefix} ({type(error).__name__})") from None


def _dump_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False)


def _load_json(text: bytes | str) -> Any:
    def reject_constant(constant: str) -> NoReturn:
        raise MessageError(f"{NOT_A_MESSAGE}: NaN and infinity are not allowed.")

    return json.loads(text, parse_constant=reject_constant)
