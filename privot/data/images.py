"""Decoding and stacking of images, and the arrays that every reader gives."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from privot.data.spec import MAX_IMAGE_SIDE
from privot.errors import DataError, reraise_as

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif")
# Scanners of 12 bits write files of 16 bits whose 8 upper bits stay below this value.
MIN_16_BIT_PEAK = 16


class DatasetArrays(NamedTuple):
    """What a reader read.

    Attributes:
        images: uint8 or float [count, channels, height, width].
        labels: The labels, [count].
        class_names: The names of the classes, if the source has any.
        client_ids: The client of each record, numbered from 0, if the source has any, [count].
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...] | None = None
    client_ids: np.ndarray | None = None


def decode_image(
    source: Any, name: Any, resize: int | None = None, peaks: list[int] | None = None
) -> np.ndarray:
    """Decode a PNG or JPEG. Its size is checked before it is decoded.

    Args:
        source: The encoded bytes, or a file that is open for reading.
        name: The name of the image, for errors.
        resize: Height and width to resize to; None: the size of the image.
        peaks: The largest value of an image of 16 bits is appended to it.

    Returns:
        uint8 [channels, height, width].

    Raises:
        DataError: If it is not an image, or too large.
    """
    with reraise_as(DataError, f"{name}: cannot be read as PNG or JPEG; is the file whole?"):
        stream = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(stream, formats=("PNG", "JPEG")) as image:
            if max(image.size) > MAX_IMAGE_SIDE:
                raise DataError(
                    f"{name}: {image.size[0]}x{image.size[1]} pixels. The limit is "
                    f"{MAX_IMAGE_SIDE} pixels per side."
                )
            is_16_bit = "16B" in str(image.tile)
            # Pillow takes the upper 8 bits of 16, except of gray images, whose values it clips.
            if image.mode.startswith("I"):
                gray = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            else:
                gray = image
            plain = gray.convert("L" if gray.mode in ("1", "L", "LA") else "RGB")
            if is_16_bit and peaks is not None:
                peaks.append(int(np.asarray(plain).max()))
            if resize:
                plain = plain.resize((resize, resize), Image.Resampling.BILINEAR)
            pixels = np.asarray(plain)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def stack_images(images: list[np.ndarray], name: Any, peaks: list[int]) -> np.ndarray:
    """Stack images of one shape.

    Args:
        images: uint8 [channels, height, width] each.
        name: Their source, for errors.
        peaks: The largest value of each image that had 16 bits.

    Returns:
        uint8 [count, channels, height, width].

    Raises:
        DataError: If there are none, they have several shapes, or all of them are nearly black.
    """
    if 0 < len(images) == len(peaks) and max(peaks) < MIN_16_BIT_PEAK:
        raise DataError(
            f"{name}: images of 16 bits whose values all lie below {MIN_16_BIT_PEAK << 8} would be "
            "nearly black. Multiply all by one factor, such as 16."
        )
    if not images:
        raise DataError(f"{name}: there are no images in it.")
    shapes = {image.shape for image in images}
    if len(shapes) != 1:
        differ_in_colour = len({shape[1:] for shape in shapes}) == 1
        advice = (
            "Some are gray and some in colour: convert all to one of these."
            if differ_in_colour
            else "Give one size with --resize."
        )
        raise DataError(
            f"{name}: images of {len(shapes)} different shapes, such as {sorted(shapes)[:2]}. "
            f"{advice}"
        )
    return np.stack(images)


def to_channels_first(images: np.ndarray, name: Any) -> np.ndarray:
    """Bring images to [count, channels, height, width].

    Args:
        images: [count, height, width], with or without channels, which may come last.
        name: Their source, for errors.

    Returns:
        A view of the images.

    Raises:
        DataError: If they have another number of dimensions.
    """
    if images.ndim not in (3, 4):
        raise DataError(
            f"{name}: images of shape {list(images.shape)}. [count, height, width], with or "
            "without channels, is needed."
        )
    if images.ndim == 3:
        return images[:, None]
    has_channels_last = images.shape[1] not in (1, 3) and images.shape[3] in (1, 3)
    return images.transpose(0, 3, 1, 2) if has_channels_last else images
