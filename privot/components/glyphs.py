"""Characters drawn by code with a pen along the middle of printed ones: what a generator may know of writing before it asks anybody.

The fonts are those that matplotlib ships: they are public, and what is learned from them costs no privacy. A code says how a character
is written (see `WORDS`), so a generator learns to draw it by plain regression, without a critic, and a code is one pen in all classes.
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

ALPHABETS = {
    10: string.digits,
    62: string.digits + string.ascii_uppercase + string.ascii_lowercase,
}  # FEMNIST's order
# pixels of a printed character's canvas, and of its capitals
SIDE = 64
TALL = 36
PEN = ("DejaVuSans.ttf", "cmti10.ttf", "cmss10.ttf", "STIXGeneralItalic.ttf")
BAR = (
    "DejaVuSans.ttf",
    "1Il",
    "I",
)  # people write these three as a bar as often as not: every other font has one
# Height of a capital and width of the pen, of the side. MNIST's digits fill 20 of 28 pixels; FEMNIST's characters lie small in the middle:
# its two numbers were set by eye and by medians over the 240 of its writers whom nobody asks.
SIZES = {62: (9.3 / 28, 1.35 / 28), 10: (20 / 28, 2.6 / 28)}
WORDS = (
    "hand",
    "height",
    "width",
    "pen",
    "slant",
    "turn",
    "right",
    "down",
)  # what the first numbers of a code say
BENDS = 8  # more of them, that bend the character: how far its four corners go in each direction


def _thinned(ink: np.ndarray) -> np.ndarray:
    """The middle lines of shapes [count, height, width], by Zhang and Suen (1984): edges go until one pixel is left."""
    ink = np.pad(ink, ((0, 0), (1, 1), (1, 1)))
    before = -1
    while (left := int(ink.sum())) != before:
        before = left
        for turn in (0, 1):
            # The eight neighbours in a ring, from the one above.
            moves = ((1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1), (0, 1), (1, 1))
            ring = np.stack([np.roll(ink, move, (1, 2)) for move in moves])
            many = ring.sum(0)
            starts = (~ring & np.roll(ring, -1, 0)).sum(0)
            up = ring[0]
            right = ring[2]
            low = ring[4]
            far = ring[6]
            free = (
                ~(up & right & low) & ~(right & low & far)
                if turn == 0
                else ~(up & right & far) & ~(up & low & far)
            )
            ink = ink & ~((many >= 2) & (many <= 6) & (starts == 1) & free)
    return ink[:, 1:-1, 1:-1]


@functools.cache
def printed(classes: int) -> Tensor:
    """How far each place is from the middle line of each character, in heights of a capital: [hands, classes, 64, 64].

    >>> printed(10).shape[1:], bool((printed(10) >= 0).all())
    (torch.Size([10, 64, 64]), True)
    """
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont
    from scipy.ndimage import distance_transform_edt

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    found = [folder / name for name in PEN if (folder / name).exists()]
    if not found:
        raise ValueError(
            f"none of the fonts {', '.join(PEN)} is in {folder}: matplotlib should have brought them"
        )
    shapes = []
    for place, path in enumerate(found):
        for letter in ALPHABETS[classes]:
            bar = place % 2 == 0 and letter in BAR[1] and (folder / BAR[0]).exists()
            face, text = (folder / BAR[0], BAR[2]) if bar else (path, letter)
            font = ImageFont.truetype(str(face), 100)
            left, top, right, low = font.getbbox("H")
            font = ImageFont.truetype(str(face), round(100 * TALL / (low - top)))
            left, top, right, low = font.getbbox(text)
            canvas = Image.new("L", (SIDE, SIDE))
            ImageDraw.Draw(canvas).text(
                ((SIDE - left - right) / 2, (SIDE - top - low) / 2), text, fill=255, font=font
            )
            shapes.append(np.asarray(canvas) > 127)
    lines = _thinned(np.stack(shapes))
    away = np.stack([distance_transform_edt(~line) for line in lines]).astype(np.float32) / TALL
    return torch.from_numpy(away).view(len(found), classes, SIDE, SIDE)


@functools.cache
def _there(classes: int, device: torch.device) -> Tensor:
    """`printed` on a device, brought there once."""
    return printed(classes).to(device)


def glyphs(codes: Tensor, labels: Tensor, shape: tuple[int, int, int], classes: int) -> Tensor:
    """Characters [count, *shape], white on black, as codes [count, numbers] say; numbers that a code lacks are 0, more are not read.

    >>> glyphs(torch.zeros(2, 16), torch.tensor([3, 7]), (1, 28, 28), 10).shape
    torch.Size([2, 1, 28, 28])
    """
    away = _there(classes, codes.device)
    device = codes.device
    (capital, ink) = SIZES[classes]
    said = torch.zeros(len(codes), len(WORDS) + BENDS, device=device)
    said[:, : codes.shape[1]] = codes[:, : said.shape[1]]
    hand, height, width, pen, slant, turn, right, down = (
        said[:, place].view(-1, 1, 1) for place in range(len(WORDS))
    )
    which = (torch.special.ndtr(hand.flatten()) * len(away)).long().clamp(max=len(away) - 1)
    tall = capital * (0.22 * height).exp()  # of the side of the picture
    wide = tall * (0.15 * width).exp()
    rows, columns = ((torch.arange(side, device=device) + 0.5) / side - 0.5 for side in shape[1:])
    y = (rows.view(1, -1, 1) - 0.012 * down) / tall  # in heights of a capital, from the middle
    x = (columns.view(1, 1, -1) - 0.012 * right) / wide
    x, y = x + (0.1 + 0.18 * slant) * y, y + 0.08 * turn * x
    grid = torch.stack([x, y], 3)
    bend = interpolate(
        0.1 * said[:, len(WORDS) :].view(-1, 2, 2, 2), (9, 9), mode="bilinear", align_corners=True
    )
    grid = grid + grid_sample(bend, grid / 0.8, padding_mode="border", align_corners=True).movedim(
        1, 3
    )
    far = grid_sample(
        away[which, labels][:, None],
        grid * (2 * TALL / SIDE),
        padding_mode="border",
        align_corners=False,
    )[:, 0]
    edge = (
        ink * (0.25 * pen).exp() / 2 - far * (tall * wide).sqrt()
    )  # how deep a place lies in the stroke, of the side
    return (0.5 + edge * min(shape[1:])).clamp(0, 1)[:, None].expand(-1, *shape).contiguous()


def teach(
    net: nn.Module,
    code: int,
    shape: tuple[int, int, int],
    classes: int,
    steps: int,
    batch: int,
    generator: torch.Generator,
    told: Callable[[int, int], None] = lambda step, of: None,
    rate: float = 5e-3,
) -> None:
    """Teach a generator to draw what a code and a label say, in place; ``generator`` is of its device. The rate goes down to the end."""
    device = next(net.parameters()).device
    fast = device.type == "cuda"
    pace = torch.zeros((), device=device)
    adam = torch.optim.Adam(
        net.parameters(), lr=pace, betas=(0.9, 0.99), foreach=fast, capturable=fast
    )
    for step in range(steps):
        pace.fill_(rate * min(1.0, (step + 1) / 20, 1.5 * (1 - step / steps) + 0.01))
        codes = torch.randn(batch, code, generator=generator, device=device)
        labels = torch.randint(classes, (batch,), generator=generator, device=device)
        with torch.no_grad():
            wanted = glyphs(codes, labels, shape, classes)
        binary_cross_entropy(net(codes, labels), wanted).backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        told(step + 1, steps)
