"""Samples to files: .npz (x, y), .png (a grid, one row a class), .parquet (encoded images), or a folder of PNGs by class.

Rows of a table: .npz (x, and each column by its name), .csv or .parquet, on the scale of the columns.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from privot.errors import ReleaseError, refusing
from privot.io import writable
from privot.local.channels import Mixed, channel_from
from privot.local.channels.additive import Additive

if TYPE_CHECKING:
    from privot.release import Release

SOUND = re.compile(
    r"[^\W_]([\w ()+-]{0,98}[\w)])?"
)  # a class name that can name a folder: no dots, slashes or blanks at its ends


@dataclass(frozen=True)
class Column:
    """A column of a table: whole numbers 0 to ``categories`` - 1, or numbers from ``low`` to ``high``."""

    name: str
    low: float
    high: float
    categories: int = 0

    def values(self, numbers: np.ndarray) -> np.ndarray:
        """The column as it is written: int64 for categories, float64 for numbers, inside the declared range."""
        if self.categories:
            return np.clip(np.rint(numbers), 0, self.categories - 1).astype(np.int64)
        return np.clip(numbers.astype(np.float64), self.low, self.high)


def table_columns(release: Release) -> tuple[Column, ...] | None:
    """The columns of a release that was made from a privatized table.

    Args:
        release: Any release.

    Returns:
        A column for each number of a record, by the domains that its channel declares; None for a
        release of images. A table is known by its channel: the numbers of a table form a space of
        one dimension, and categories that are no labels are of a table.
    """
    stated = release.facts.get("channel")
    if (
        release.product.net != "RecordGenerator"
        or stated is None
        or release.spec.shape[:2] != (1, 1)
    ):
        return None
    with refusing(ReleaseError, "the channel that the release names is not sound"):
        channel = channel_from(stated)
    parts = channel.parts if isinstance(channel, Mixed) else (channel,)
    if (
        channel.columns != release.spec.pixels
    ):  # the last part is of labels, which a table does not have
        return None
    columns: list[Column] = []
    for part in parts:
        if categories := getattr(part, "categories", 0):
            columns.append(Column(f"column_{len(columns)}", 0.0, categories - 1.0, categories))
            continue
        if not isinstance(part, Additive) or len(part.space.shape) != 1:
            return None
        low, high = part.domain
        columns += [
            Column(f"column_{len(columns) + place}", low, high) for place in range(part.columns)
        ]
    return tuple(columns)


def picture(images: Tensor, columns: int, zoom: int | None = None) -> Image.Image:
    """A grid of images [count, channels, height, width] in [0, 1], ``columns`` to a row, with a light gap between them."""
    pixels = to_bytes(images)  # [count, height, width, channels]
    count, height, width, channels = pixels.shape
    rows = -(-count // columns)
    sheet = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), 235, np.uint8)
    for place, image in enumerate(pixels):
        top = place // columns * (height + 1) + 1
        left = place % columns * (width + 1) + 1
        sheet[top : top + height, left : left + width] = image
    zoom = zoom or max(1, round(900 / sheet.shape[1]))
    result = Image.fromarray(sheet[:, :, 0] if channels == 1 else sheet)
    return result.resize((result.width * zoom, result.height * zoom), Image.Resampling.NEAREST)


def to_bytes(images: Tensor) -> np.ndarray:
    """[count, channels, height, width] in [0, 1] to uint8 [count, height, width, channels]."""
    return (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def ready(out: Path, table: bool = False) -> None:
    """Refuse what `write`, or for a ``table`` `write_table`, could not write; nothing is drawn or made before."""
    if os.path.lexists(out):
        raise ReleaseError(f"{out} is there already: name another, or remove it")
    if table and out.suffix not in (".npz", ".csv", ".parquet"):
        raise ReleaseError(
            f"{out}: this release is of a table, whose rows are no images: name a .csv, .npz or .parquet"
        )
    if not table and out.suffix not in ("", ".npz", ".png", ".parquet"):
        raise ReleaseError(
            f"{out}: samples are written as .npz, .png (a grid), .parquet, or a folder of PNGs"
        )
    if out.suffix == ".parquet":
        _arrow()
    writable(out)


def write(
    images: Tensor, labels: Tensor, out: Path, classes: int, names: tuple[str, ...] | None = None
) -> Path:
    """Write by the ending of ``out``; an existing file or folder is never overwritten. Class folders have the ``names``, or numbers."""
    ready(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.stem}.part{out.suffix}")
    _clear(part)  # what a crashed run left must not end among these samples
    try:
        if out.suffix == ".npz":
            np.savez_compressed(part, x=to_bytes(images), y=labels.numpy().astype(np.int64))
        elif out.suffix == ".png":
            order = labels.argsort(stable=True)
            columns = (
                max(1, min(20, len(labels) // classes)) if classes <= len(labels) else len(labels)
            )
            picture(images[order], columns).save(part)
        elif out.suffix == ".parquet":
            _parquet(images, labels, part)
        else:
            _folder(images, labels, part, _folders(classes, names))
        part.replace(out)
    finally:
        _clear(part)
    return out


def write_table(rows: Tensor, columns: Sequence[Column], out: Path) -> Path:
    """Write rows of a table by the ending of ``out``; an existing file is never overwritten.

    Args:
        rows: The samples, [count, ...], with as many numbers a row as there are columns.
        columns: Names, ranges and kinds of the columns.
        out: .npz has the array ``x`` [count, columns] and each column by its name; .csv has a line
            of names; .parquet has typed columns.

    Returns:
        ``out``.
    """
    ready(out, table=True)
    numbers = rows.flatten(1).cpu().numpy()
    made: dict[str, Any] = {
        each.name: each.values(numbers[:, place]) for place, each in enumerate(columns)
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".{out.stem}.part{out.suffix}")
    _clear(part)
    try:
        if out.suffix == ".npz":
            np.savez_compressed(part, **made, x=np.stack(list(made.values()), 1))
        elif out.suffix == ".csv":
            lines = (
                ",".join(map(repr, row))
                for row in zip(*(each.tolist() for each in made.values()), strict=True)
            )
            part.write_text("\n".join([",".join(made), *lines]) + "\n")
        else:
            arrow, parquet = _arrow()
            parquet.write_table(arrow.table(made), part)
        part.replace(out)
    finally:
        _clear(part)
    return out


def _clear(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part)
    part.unlink(missing_ok=True)


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise ReleaseError(
            "writing parquet needs an extra: pip install 'privot[parquet]'"
        ) from None
    return arrow, parquet


def _parquet(images: Tensor, labels: Tensor, out: Path) -> None:
    arrow, parquet = _arrow()
    encoded = [{"bytes": _png(pixels), "path": None} for pixels in to_bytes(images)]
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    parquet.write_table(
        arrow.table(
            {"image": arrow.array(encoded, kind), "label": labels.numpy().astype(np.int64)}
        ),
        out,
    )


def _folders(classes: int, names: tuple[str, ...] | None) -> list[str]:
    """A name for the folder of each class that no file system takes amiss, and by which the classes keep their order; else numbers."""
    if (
        names
        and all(SOUND.fullmatch(each) for each in names)
        and len({each.casefold() for each in names}) == classes
    ):
        numbered = all(each.isdecimal() for each in names)
        if list(names) == sorted(
            names, key=lambda each: (int(each) if numbered else 0, each)
        ):  # so they are read again
            return list(names)
    return [f"{label:0{len(str(classes - 1))}d}" for label in range(classes)]


def _folder(images: Tensor, labels: Tensor, out: Path, names: list[str]) -> None:
    for place, (pixels, label) in enumerate(zip(to_bytes(images), labels.tolist(), strict=True)):
        folder = out / names[label]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{place:06d}.png").write_bytes(_png(pixels))
