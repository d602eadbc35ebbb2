"""Samples to files: .npz (x, y), .png (a grid, one row a class), .parquet (encoded images), or a folder of PNGs by class."""

from __future__ import annotations

import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from privot.errors import ReleaseError
from privot.files import writable

SOUND = re.compile(r"[^\W_]([\w ()+-]{0,98}[\w)])?")  # a class name that can name a folder: no dots, slashes or blanks at its ends


def picture(images: Tensor, columns: int, zoom: int | None = None) -> Image.Image:
    """A grid of images [count, channels, height, width] in [0, 1], ``columns`` to a row, with a light gap between them."""
    pixels = to_bytes(images)  # [count, height, width, channels]
    count, height, width, channels = pixels.shape
    rows = -(-count // columns)
    sheet = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), 235, np.uint8)
    for place, image in enumerate(pixels):
        top, left = place // columns * (height + 1) + 1, place % columns * (width + 1) + 1
        sheet[top : top + height, left : left + width] = image
    zoom = zoom or max(1, round(900 / sheet.shape[1]))
    result = Image.fromarray(sheet[:, :, 0] if channels == 1 else sheet)
    return result.resize((result.width * zoom, result.height * zoom), Image.Resampling.NEAREST)


def to_bytes(images: Tensor) -> np.ndarray:
    """[count, channels, height, width] in [0, 1] to uint8 [count, height, width, channels]."""
    return (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def ready(out: Path) -> None:
    """Refuse what `write` could not write, before images are drawn for it; nothing is made."""
    if os.path.lexists(out):
        raise ReleaseError(f"{out} is there already: name another, or remove it")
    if out.suffix not in ("", ".npz", ".png", ".parquet"):
        raise ReleaseError(f"{out}: samples are written as .npz, .png (a grid), .parquet, or a folder of PNGs")
    if out.suffix == ".parquet":
        _arrow()
    writable(out)


def write(images: Tensor, labels: Tensor, out: Path, classes: int, names: tuple[str, ...] | None = None) -> Path:
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
            columns = max(1, min(20, len(labels) // classes)) if classes <= len(labels) else len(labels)
            picture(images[order], columns).save(part)
        elif out.suffix == ".parquet":
            _parquet(images, labels, part)
        else:
            _folder(images, labels, part, _folders(classes, names))
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
        raise ReleaseError("writing parquet needs an extra: pip install 'privot[parquet]'") from None
    return arrow, parquet


def _parquet(images: Tensor, labels: Tensor, out: Path) -> None:
    arrow, parquet = _arrow()
    encoded = [{"bytes": _png(pixels), "path": None} for pixels in to_bytes(images)]
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    parquet.write_table(arrow.table({"image": arrow.array(encoded, kind), "label": labels.numpy().astype(np.int64)}), out)


def _folders(classes: int, names: tuple[str, ...] | None) -> list[str]:
    """A name for the folder of each class that no file system takes amiss, and by which the classes keep their order; else numbers."""
    if names and all(SOUND.fullmatch(each) for each in names) and len({each.casefold() for each in names}) == classes:
        numbered = all(each.isdecimal() for each in names)
        if list(names) == sorted(names, key=lambda each: (int(each) if numbered else 0, each)):  # so they are read again
            return list(names)
    return [f"{label:0{len(str(classes - 1))}d}" for label in range(classes)]


def _folder(images: Tensor, labels: Tensor, out: Path, names: list[str]) -> None:
    for place, (pixels, label) in enumerate(zip(to_bytes(images), labels.tolist(), strict=True)):
        folder = out / names[label]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{place:06d}.png").write_bytes(_png(pixels))
