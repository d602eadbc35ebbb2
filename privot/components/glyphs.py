"""Synthetic characters: images of public fonts' characters, drawn with a pen along their skeletons.

A generator can be pretrained on them before any query. The fonts come with matplotlib; they are
public, and pretraining on them costs no privacy. A latent vector determines the style of a
character (see `STYLE_FEATURES`), so a generator learns by plain regression, without a critic, and
one latent vector gives all classes the same pen.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, grid_sample, interpolate

from privot.errors import SettingError

# Characters by number of classes. The order of the 62 is that of FEMNIST.
ALPHABETS = {
    10: string.digits,
    62: string.digits + string.ascii_uppercase + string.ascii_lowercase,
}
CANVAS_SIDE = 64  # pixels of a printed character's canvas
CAPITAL_HEIGHT = 36  # pixels of a printed capital
FONT_FILES = ("DejaVuSans.ttf", "cmti10.ttf", "cmss10.ttf", "STIXGeneralItalic.ttf")
# People often write these characters as a plain bar, so every second font prints them as a bar.
BAR_CHARACTERS = "1Il"
BAR_GLYPH = "I"
BAR_FONT_FILE = "DejaVuSans.ttf"
# By number of classes: height of a capital and width of the pen, as fractions of the image's side.
# MNIST digits fill 20 of 28 pixels; FEMNIST characters are small and centered. FEMNIST's values
# were set by eye and by medians over the 240 of its writers that no experiment queries.
GLYPH_SIZES = {62: (9.3 / 28, 1.35 / 28), 10: (20 / 28, 2.6 / 28)}
# Meaning of the first latent dimensions.
STYLE_FEATURES = ("hand", "height", "width", "pen", "slant", "turn", "right", "down")
NUM_BEND_FEATURES = 8  # further latent dimensions: x and y displacement of the four corners


def _thin(masks: np.ndarray) -> np.ndarray:
    """Thin shapes [count, height, width] to one-pixel skeletons, by Zhang and Suen (1984)."""
    masks = np.pad(masks, ((0, 0), (1, 1), (1, 1)))
    previous_count = -1
    while (pixel_count := int(masks.sum())) != previous_count:
        previous_count = pixel_count
        for half_step in (0, 1):
            # The eight neighbors in a ring, from the one above.
            moves = ((1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1), (0, 1), (1, 1))
            ring = np.stack([np.roll(masks, move, (1, 2)) for move in moves])
            num_neighbors = ring.sum(0)
            num_transitions = (~ring & np.roll(ring, -1, 0)).sum(0)
            above = ring[0]
            right = ring[2]
            below = ring[4]
            left = ring[6]
            removable = (
                ~(above & right & below) & ~(right & below & left)
                if half_step == 0
                else ~(above & right & left) & ~(above & below & left)
            )
            masks = masks & ~(
                (num_neighbors >= 2) & (num_neighbors <= 6) & (num_transitions == 1) & removable
            )
    return masks[:, 1:-1, 1:-1]


@functools.cache
def compute_glyph_distances(classes: int) -> Tensor:
    """Compute the distance of each pixel from the skeleton of each printed character.

    Returns:
        Distances in heights of a capital: [fonts, classes, CANVAS_SIDE, CANVAS_SIDE].

    Raises:
        SettingError: matplotlib lacks its fonts.

    >>> distances = compute_glyph_distances(10)
    >>> distances.shape[1:], bool((distances >= 0).all())
    (torch.Size([10, 64, 64]), True)
    """
    import matplotlib
    from scipy.ndimage import distance_transform_edt

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font_paths = [folder / name for name in FONT_FILES if (folder / name).exists()]
    if not font_paths:
        raise SettingError(
            f"{folder} has none of the fonts {', '.join(FONT_FILES)}. Reinstall matplotlib."
        )
    bar_font = folder / BAR_FONT_FILE
    masks = []
    for index, path in enumerate(font_paths):
        for character in ALPHABETS[classes]:
            is_bar = index % 2 == 0 and character in BAR_CHARACTERS and bar_font.exists()
            masks.append(_print(BAR_GLYPH, bar_font) if is_bar else _print(character, path))
    distances = np.stack(
        [distance_transform_edt(~skeleton) for skeleton in _thin(np.stack(masks))]
    ).astype(np.float32)
    return torch.from_numpy(distances / CAPITAL_HEIGHT).view(
        len(font_paths), classes, CANVAS_SIDE, CANVAS_SIDE
    )


def _print(character: str, font_path: Path) -> np.ndarray:
    """Print a character in the middle of a canvas: a mask [CANVAS_SIDE, CANVAS_SIDE]."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(str(font_path), 100)
    _, top, _, bottom = font.getbbox("H")
    font = ImageFont.truetype(str(font_path), round(100 * CAPITAL_HEIGHT / (bottom - top)))
    left, top, right, bottom = font.getbbox(character)
    canvas = Image.new("L", (CANVAS_SIDE, CANVAS_SIDE))
    corner = ((CANVAS_SIDE - left - right) / 2, (CANVAS_SIDE - top - bottom) / 2)
    ImageDraw.Draw(canvas).text(corner, character, fill=255, font=font)
    return np.asarray(canvas) > 127


@functools.cache
def _load_glyph_distances(classes: int, device: torch.device) -> Tensor:
    """Return `compute_glyph_distances` on a device, copied there once."""
    return compute_glyph_distances(classes).to(device)


def render_glyphs(
    latents: Tensor, labels: Tensor, shape: tuple[int, int, int], classes: int
) -> Tensor:
    """Render characters, white on black, in the style that latent vectors describe.

    Args:
        latents: Standard Gaussian latent vectors [count, latent_dim]. Missing dimensions count as
            0; dimensions beyond the style and bend features are ignored.
        labels: Classes of the characters [count].
        shape: Channels, height and width of an image.
        classes: Number of classes: 10 or 62.

    Returns:
        Images [count, *shape] in [0, 1].

    >>> render_glyphs(torch.zeros(2, 16), torch.tensor([3, 7]), (1, 28, 28), 10).shape
    torch.Size([2, 1, 28, 28])
    """
    distances = _load_glyph_distances(classes, latents.device)
    device = latents.device
    capital_height, pen_width = GLYPH_SIZES[classes]
    features = torch.zeros(len(latents), len(STYLE_FEATURES) + NUM_BEND_FEATURES, device=device)
    features[:, : latents.shape[1]] = latents[:, : features.shape[1]]
    hand, height, width, pen, slant, turn, right, down = (
        features[:, index].view(-1, 1, 1) for index in range(len(STYLE_FEATURES))
    )
    font_index = (torch.special.ndtr(hand.flatten()) * len(distances)).long()
    font_index = font_index.clamp(max=len(distances) - 1)
    # Height and width of a character, as fractions of the image's side.
    glyph_height = capital_height * (0.22 * height).exp()
    glyph_width = glyph_height * (0.15 * width).exp()
    rows, columns = ((torch.arange(side, device=device) + 0.5) / side - 0.5 for side in shape[1:])
    # Coordinates from the middle, in heights of a capital.
    y = (rows.view(1, -1, 1) - 0.012 * down) / glyph_height
    x = (columns.view(1, 1, -1) - 0.012 * right) / glyph_width
    sheared_x = x + (0.1 + 0.18 * slant) * y
    sheared_y = y + 0.08 * turn * x
    grid = torch.stack([sheared_x, sheared_y], 3)
    bend = interpolate(
        0.1 * features[:, len(STYLE_FEATURES) :].view(-1, 2, 2, 2),
        (9, 9),
        mode="bilinear",
        align_corners=True,
    )
    displacement = grid_sample(bend, grid / 0.8, padding_mode="border", align_corners=True)
    grid = grid + displacement.movedim(1, 3)
    skeleton_distance = grid_sample(
        distances[font_index, labels][:, None],
        grid * (2 * CAPITAL_HEIGHT / CANVAS_SIDE),
        padding_mode="border",
        align_corners=False,
    )[:, 0]
    # How far a pixel lies inside the stroke, as a fraction of the image's side.
    depth = (
        pen_width * (0.25 * pen).exp() / 2 - skeleton_distance * (glyph_height * glyph_width).sqrt()
    )
    return (0.5 + depth * min(shape[1:])).clamp(0, 1)[:, None].expand(-1, *shape).contiguous()


def pretrain_on_glyphs(
    net: nn.Module,
    latent_dim: int,
    shape: tuple[int, int, int],
    classes: int,
    steps: int,
    batch_size: int,
    generator: torch.Generator,
    progress: Callable[[int, int], None] = lambda step, steps: None,
    learning_rate: float = 5e-3,
) -> None:
    """Train a generator in place to draw the characters of `render_glyphs`, by regression.

    Args:
        net: The generator, a function of latents and labels.
        latent_dim: Dimension of its latent vectors.
        shape: Channels, height and width of an image.
        classes: Number of classes: 10 or 62.
        steps: Number of training steps.
        batch_size: Images in a step.
        generator: Random generator on the device of the network.
        progress: Called with (step, steps) after each step.
        learning_rate: Largest learning rate of Adam; it rises over 20 steps and then falls.
    """
    device = next(net.parameters()).device
    on_gpu = device.type == "cuda"
    current_rate = torch.zeros((), device=device)
    optimizer = torch.optim.Adam(
        net.parameters(), lr=current_rate, betas=(0.9, 0.99), foreach=on_gpu, capturable=on_gpu
    )
    for step in range(steps):
        current_rate.fill_(
            learning_rate * min(1.0, (step + 1) / 20, 1.5 * (1 - step / steps) + 0.01)
        )
        latents = torch.randn(batch_size, latent_dim, generator=generator, device=device)
        labels = torch.randint(classes, (batch_size,), generator=generator, device=device)
        with torch.no_grad():
            targets = render_glyphs(latents, labels, shape, classes)
        binary_cross_entropy(net(latents, labels), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress(step + 1, steps)
