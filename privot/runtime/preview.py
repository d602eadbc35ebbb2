"""Images as pixels: uint8 arrays and a grid, for files and for the preview of a run."""

from __future__ import annotations

import numpy as np
from PIL import Image
from torch import Tensor

GAP_GRAY_LEVEL = 235  # of the lines between the images of a grid, 0 to 255
GRID_WIDTH = 900  # pixels that a grid is enlarged to, about


def render_image_grid(images: Tensor, images_per_row: int, zoom: int | None = None) -> Image.Image:
    """Render images as a grid with a light gap of one pixel between them.

    Args:
        images: Values in [0, 1], [count, channels, height, width].
        images_per_row: Number of images in a row of the grid.
        zoom: Integer factor of enlargement; None: to about 900 pixels.

    Returns:
        The grid, in gray levels for one channel, else in colours.
    """
    pixels = to_uint8_images(images)  # [count, height, width, channels]
    count, height, width, channels = pixels.shape
    num_rows = -(-count // images_per_row)
    grid_shape = (num_rows * (height + 1) + 1, images_per_row * (width + 1) + 1, channels)
    grid = np.full(grid_shape, GAP_GRAY_LEVEL, np.uint8)
    for index, image in enumerate(pixels):
        top = index // images_per_row * (height + 1) + 1
        left = index % images_per_row * (width + 1) + 1
        grid[top : top + height, left : left + width] = image
    zoom = zoom or max(1, round(GRID_WIDTH / grid.shape[1]))
    result = Image.fromarray(grid[:, :, 0] if channels == 1 else grid)
    return result.resize((result.width * zoom, result.height * zoom), Image.Resampling.NEAREST)


def to_uint8_images(images: Tensor) -> np.ndarray:
    """Convert images in [0, 1] to bytes.

    Args:
        images: [count, channels, height, width].

    Returns:
        uint8, [count, height, width, channels].
    """
    return (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
