"""What clients sent: answers of a channel in a file that describes itself, and the box they make on the server.

The file is a ``.safetensors`` with one tensor, ``values`` [count, width], and a JSON text in its header: format, channel with its
parameters, spec, and a digest over all of it. An epsilon is never written: whoever reads the file computes it from the parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from privot.data.spec import Spec
from privot.errors import DataError, refusing
from privot.local.channels import Channel, channel_from
from privot.progress import round_up

FORMAT = 1
ENDING = ".safetensors"
KEY = "privot"
LONGEST = 1 << 22  # bytes of a header
UNKNOWN = (
    "{}: it does not say by which channel it was made; name a file that privot privatize wrote"
)


@dataclass(frozen=True, eq=False)
class Privatized:
    """Answers [count, width] of clients, and the channel they came through. All of it is public.

    ``spec`` says what a record was: its shape, and its classes if labels were sent. A record's numbers are its values, then its label if
    the channel has a column for it.
    """

    values: Tensor
    channel: Channel
    spec: Spec
    name: str = ""
    insecure: bool = False  # its noise was seeded, for a test: there is no guarantee, and no file

    def __post_init__(self) -> None:
        if (
            self.values.ndim != 2
            or self.values.shape[1] != self.channel.width
            or not len(self.values)
        ):
            raise DataError(
                f"answers have shape {list(self.values.shape)}, but this channel gives [count, {self.channel.width}]"
            )
        if self.channel.columns not in (self.spec.pixels, self.spec.pixels + 1):
            raise DataError(
                f"a channel for {self.channel.columns} numbers does not fit records of {self.spec.pixels} values"
            )
        last = getattr(self.channel, "parts", (self.channel,))[-1]
        if self.labelled and getattr(last, "categories", 0) != self.spec.classes:
            raise DataError(
                f"labels of {self.spec.classes} classes were sent, and the last part of the channel is not for so many categories"
            )
        if self.spec.size not in (None, len(self.values)):
            raise DataError(
                f"{self.spec.size} records are declared, and there are {len(self.values)} answers"
            )
        if not self.channel.holds(self.values):
            raise DataError(
                "values lie outside what the channel can give for its declared domain: the file was not made by this channel"
            )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def labelled(self) -> bool:
        """Whether a label was privatized with each record."""
        return self.channel.columns > self.spec.pixels

    @property
    def digest(self) -> str:
        return _digest(_head(self), self.values)

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all; an existing one is never overwritten."""
        path = fresh(path)
        if self.insecure:
            raise DataError("seeded noise can be subtracted by anyone: a file of it is not written")
        head = {**_head(self), "digest": self.digest}
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_bytes(save({"values": self.values.contiguous()}, {KEY: json.dumps(head)}))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Privatized:
        """Read a file, or all of a folder, which must be of one channel; digests and every value are checked."""
        path = Path(path)
        if not path.is_dir():
            return _read(path)
        files = sorted(
            each
            for each in path.iterdir()
            if each.suffix == ENDING and not each.name.startswith(".")
        )
        return joined([_read(each) for each in files], str(path.resolve()))


def joined(boxes: Sequence[Privatized], name: str = "") -> Privatized:
    """Several files of one channel as one box."""
    first = boxes[0]
    for each in boxes[1:]:
        if (
            each.channel != first.channel
            or each.spec.shape != first.spec.shape
            or each.spec.classes != first.spec.classes
        ):
            raise DataError(
                f"{each.name}: made by another channel than {first.name} ({_said(each)}; {_said(first)}): use one at a time"
            )
    if len({each.digest for each in boxes}) < len(boxes):
        raise DataError(
            f"{name or first.name}: the same answers are there twice; each file counts once"
        )
    values = torch.cat([each.values for each in boxes])
    spec = Spec.from_json({**first.spec.to_json(), "size": len(values)})
    return Privatized(
        values, first.channel, spec, name or first.name, any(each.insecure for each in boxes)
    )


def is_privatized(source: str | Path) -> bool:
    """Whether a path is a file of answers, or a folder of such."""
    path = Path(source)
    if os.path.isdir(path):
        names = {each.name for each in path.iterdir()}  # a release has tensors in such a file, too
        return "manifest.json" not in names and any(
            each.endswith(ENDING) and not each.startswith(".") for each in names
        )
    return path.suffix == ENDING and os.path.isfile(path)


def fresh(path: str | Path) -> Path:
    """A place for such a file, or a refusal; nothing is charged for a file that cannot be written."""
    path = Path(path)
    if path.suffix != ENDING:
        raise DataError(f"{path}: the name must end in {ENDING}")
    if os.path.lexists(path):
        raise DataError(f"{path} is there already: name another file, or remove it")
    if not os.path.isdir(path.parent) or not os.access(path.parent, os.W_OK):
        raise DataError(f"{path}: its folder is not there, or cannot be written")
    return path


def _read(path: Path) -> Privatized:
    with refusing(DataError, f"{path}: cannot be read as privatized records; is it whole?"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        if not 0 < length <= min(LONGEST, len(raw) - 8):
            raise DataError(f"{path}: cut short, or no {ENDING} file")
        head = json.loads(raw[8 : 8 + length]).get("__metadata__", {}).get(KEY)
        if head is None:
            raise DataError(UNKNOWN.format(path))
        head = json.loads(head)
        if not isinstance(head, dict) or "channel" not in head:
            raise DataError(UNKNOWN.format(path))
        if head.get("format") != FORMAT:
            raise DataError(f"{path}: format {head.get('format')} is not known to this version")
        values = load(raw)["values"]
        if values.dtype != torch.float32 or head.pop("digest", None) != _digest(head, values):
            raise DataError(
                f"{path}: its digest does not match: it was damaged or altered; fetch it again"
            )
        try:
            return Privatized(
                values,
                channel_from(head["channel"]),
                Spec.from_json(head["spec"]),
                str(path.resolve()),
            )
        except DataError as error:
            raise DataError(f"{path}: {error}") from None


def _head(box: Privatized) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "channel": box.channel.parameters(),
        "spec": box.spec.to_json(),
        "count": len(box.values),
    }


def _digest(head: dict[str, Any], values: Tensor) -> str:
    made = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    made.update(values.contiguous().numpy().tobytes())
    return made.hexdigest()


def _said(box: Privatized) -> str:
    """A channel in a few words."""
    return f"{box.channel.name}, epsilon {round_up(box.channel.epsilon)}"
