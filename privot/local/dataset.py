"""What clients sent: the outputs of a channel, in a file that describes itself.

The file is a ``.safetensors`` with one tensor, ``values`` [count, output_dim], and a JSON text in
its header: format, channel with its parameters, spec, and a digest over all of it. An epsilon is
never written: whoever reads the file computes it from the parameters.
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
from privot.errors import DataError, reraise_as
from privot.local.channels import Channel, Composite, channel_from_json
from privot.local.channels.categorical import CategoricalChannel
from privot.progress import round_up

FILE_FORMAT = 2
FILE_SUFFIX = ".safetensors"
METADATA_KEY = "privot"
MAX_HEADER_BYTES = 1 << 22
UNKNOWN_CHANNEL = (
    "{}: the file does not say which channel made it. Name a file that privot privatize wrote."
)


@dataclass(frozen=True, eq=False)
class PrivatizedDataset:
    """Outputs of clients and the channel they came through. All of it is public.

    Attributes:
        values: What the clients sent, float32 [count, output_dim].
        channel: The channel. Its record is the values of an image, and its label if there is one.
        spec: Shape of a record before the channel, and classes if labels were sent.
        name: The name of the data set, or the path of the file.
        insecure: Whether the noise was seeded, for a test: no guarantee, and no file.
    """

    values: Tensor
    channel: Channel
    spec: Spec
    name: str = ""
    insecure: bool = False

    def __post_init__(self) -> None:
        output_dim = self.channel.output_dim
        if self.values.ndim != 2 or self.values.shape[1] != output_dim or not len(self.values):
            raise DataError(
                f"The values have shape {list(self.values.shape)}, but this channel gives "
                f"[count, {output_dim}]."
            )
        num_features = self.spec.num_features
        if self.channel.record_dim not in (num_features, num_features + 1):
            raise DataError(
                f"A channel for {self.channel.record_dim} values does not fit records of "
                f"{num_features} values."
            )
        if self.has_labels and self._num_label_categories() != self.spec.num_classes:
            raise DataError(
                f"The spec has {self.spec.num_classes} classes, but the last part of the channel "
                "is for another number of categories."
            )
        if self.spec.size not in (None, len(self.values)):
            raise DataError(
                f"The spec declares {self.spec.size} records, but there are {len(self.values)}."
            )
        if not self.channel.is_possible_output(self.values):
            raise DataError(
                "The channel cannot give some of the values for its declared domain. Name a file "
                "that this channel made."
            )

    def _num_label_categories(self) -> int:
        """Give the number of categories of the channel's last part; 0 if it has none."""
        parts = self.channel.parts if isinstance(self.channel, Composite) else (self.channel,)
        last = parts[-1]
        return last.num_categories if isinstance(last, CategoricalChannel) else 0

    def __len__(self) -> int:
        return len(self.values)

    @property
    def has_labels(self) -> bool:
        """Whether a label was privatized with each record."""
        return self.channel.record_dim > self.spec.num_features

    @property
    def digest(self) -> str:
        """SHA-256 of the channel, the spec and the values."""
        return _hash_contents(_build_header(self), self.values)

    def save(self, path: str | Path) -> Path:
        """Write the file, completely or not at all. Never overwrite a file.

        Raises:
            DataError: If the file cannot be written, or the noise was seeded.
        """
        path = check_new_privatized_path(path)
        if self.insecure:
            raise DataError(
                "The noise was seeded, so anyone can subtract it. Privatize without insecure_seed "
                "to write a file."
            )
        header = {**_build_header(self), "digest": self.digest}
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_bytes(
                save({"values": self.values.contiguous()}, {METADATA_KEY: json.dumps(header)})
            )
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> PrivatizedDataset:
        """Read a file, or all files of a folder, which must be of one channel.

        Raises:
            DataError: If a digest does not match, or a value cannot come from the channel.
        """
        path = Path(path)
        if not path.is_dir():
            return _read_file(path)
        files = sorted(
            file
            for file in path.iterdir()
            if file.suffix == FILE_SUFFIX and not file.name.startswith(".")
        )
        return concatenate_privatized([_read_file(file) for file in files], str(path.resolve()))


def concatenate_privatized(
    datasets: Sequence[PrivatizedDataset], name: str = ""
) -> PrivatizedDataset:
    """Concatenate privatized data sets of one channel.

    Args:
        datasets: At least one data set.
        name: The name of the result; empty: that of the first.

    Returns:
        One data set with all records.

    Raises:
        DataError: If the channels differ, or a data set comes twice.
    """
    first = datasets[0]
    for other in datasets[1:]:
        if (
            other.channel != first.channel
            or other.spec.shape != first.spec.shape
            or other.spec.num_classes != first.spec.num_classes
        ):
            raise DataError(
                f"{other.name} ({_describe_channel(other)}) was made by another channel than "
                f"{first.name} ({_describe_channel(first)}). Use one of them at a time."
            )
    if len({dataset.digest for dataset in datasets}) < len(datasets):
        raise DataError(
            f"{name or first.name}: two files have the same contents. Remove one of them."
        )
    values = torch.cat([dataset.values for dataset in datasets])
    spec = Spec.from_json({**first.spec.to_json(), "size": len(values)})
    insecure = any(dataset.insecure for dataset in datasets)
    return PrivatizedDataset(values, first.channel, spec, name or first.name, insecure)


def is_privatized(source: str | Path) -> bool:
    """Whether a path is a privatized file, or a folder of such files."""
    path = Path(source)
    if os.path.isdir(path):
        names = {entry.name for entry in path.iterdir()}
        return "manifest.json" not in names and any(  # a release has such a file, too
            name.endswith(FILE_SUFFIX) and not name.startswith(".") for name in names
        )
    return path.suffix == FILE_SUFFIX and os.path.isfile(path)


def check_new_privatized_path(path: str | Path) -> Path:
    """Refuse a path that `PrivatizedDataset.save` could not write, before anything is charged.

    Returns:
        The path.

    Raises:
        DataError: If the name has another ending, exists, or cannot be written.
    """
    path = Path(path)
    if path.suffix != FILE_SUFFIX:
        raise DataError(f"{path}: choose a name that ends in {FILE_SUFFIX}.")
    if os.path.lexists(path):
        raise DataError(f"{path} already exists. Choose another file or remove it.")
    if not os.path.isdir(path.parent) or not os.access(path.parent, os.W_OK):
        raise DataError(f"{path}: its folder does not exist or cannot be written.")
    return path


def _read_file(path: Path) -> PrivatizedDataset:
    """Read and check a privatized file."""
    with reraise_as(DataError, f"{path} cannot be read as privatized records"):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, len(content) - 8):
            raise DataError(f"{path} is truncated, or not a {FILE_SUFFIX} file.")
        header_text = json.loads(content[8 : 8 + length]).get("__metadata__", {}).get(METADATA_KEY)
        if header_text is None:
            raise DataError(UNKNOWN_CHANNEL.format(path))
        header = json.loads(header_text)
        if not isinstance(header, dict) or "channel" not in header:
            raise DataError(UNKNOWN_CHANNEL.format(path))
        if header.get("format") != FILE_FORMAT:
            raise DataError(f"{path}: this version cannot read format {header.get('format')}.")
        values = load(content)["values"]
        digest = header.pop("digest", None)
        if values.dtype != torch.float32 or digest != _hash_contents(header, values):
            raise DataError(
                f"{path}: its digest does not match, so it was damaged or altered. Get the file "
                "again."
            )
        try:
            channel = channel_from_json(header["channel"])
            spec = Spec.from_json(header["spec"])
            return PrivatizedDataset(values, channel, spec, str(path.resolve()))
        except DataError as error:
            raise DataError(f"{path}: {error}") from None


def _build_header(dataset: PrivatizedDataset) -> dict[str, Any]:
    """Describe the channel and the records as plain data, without the digest."""
    return {
        "format": FILE_FORMAT,
        "channel": dataset.channel.to_json(),
        "spec": dataset.spec.to_json(),
        "count": len(dataset.values),
    }


def _hash_contents(header: dict[str, Any], values: Tensor) -> str:
    """Compute the SHA-256 of a header and the values."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _describe_channel(dataset: PrivatizedDataset) -> str:
    """Name the channel and its epsilon."""
    return f"{dataset.channel.name}, epsilon {round_up(dataset.channel.epsilon)}"
