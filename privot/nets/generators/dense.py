"""A conditional image generator of matrix products alone: fast on a CPU, smooth by construction."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def generator_config(
    generator: str,
    shape: tuple[int, int, int],
    classes: int,
    *,
    latent_dim: int,
    hidden_dim: int,
    num_frequencies: int,
) -> tuple[str, dict[str, Any]]:
    """Return the class name and the arguments of a generator, as a release stores them.

    Args:
        generator: Architecture: "dense" (matrix products alone, fast on a CPU) or "conv" (for a
            GPU).
        shape: Channels, height and width of an image.
        classes: Number of classes.
        latent_dim: Dimension of the latents.
        hidden_dim: Units of the hidden dense layers.
        num_frequencies: DCT frequencies per side of a dense generator.

    Returns:
        A name in `privot.nets.GENERATORS` and the arguments of that class.

    >>> sizes = {"latent_dim": 5, "hidden_dim": 64, "num_frequencies": 8}
    >>> name, arguments = generator_config("dense", (3, 32, 32), 10, **sizes)
    >>> name, arguments["smooth"]
    ('DenseGenerator', True)
    """
    shared = {
        "shape": list(shape),
        "classes": classes,
        "latent_dim": latent_dim,
        "hidden_dim": hidden_dim,
    }
    if generator == "conv":
        return "ConvGenerator", {**shared, "channels": 32}
    # Smooth generators showed no gain on grey digits and clothes.
    smooth = shape[0] == 3
    return "DenseGenerator", {**shared, "num_frequencies": num_frequencies, "smooth": smooth}


class DenseGenerator(nn.Module):
    """Map a latent and a label to an image in [0, 1] through its lowest DCT coefficients.

    Three dense layers give the coefficients of each channel. A fixed orthogonal 2-D DCT basis
    turns them into pixels. Neighbouring pixels therefore share what the network learns, and the
    network cannot produce fine-grained noise.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of classes.
        latent_dim: Dimension of the standard Gaussian latents [batch, latent_dim].
        hidden_dim: Units of both hidden layers.
        num_frequencies: Frequencies per side, at most the side.
        smooth: Divide the coefficient of frequency f by 1 + |f|^2. Images are then smooth at the
            start of training and get fine detail last. Without it, hundreds of cosines add up to
            black and white pixels, where the gradient of the sigmoid vanishes, and some images
            stay so.

    >>> net = DenseGenerator((1, 28, 28), classes=10)
    >>> net(torch.zeros(2, net.latent_dim), torch.tensor([3, 7])).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        latent_dim: int = 5,
        hidden_dim: int = 256,
        num_frequencies: int = 20,
        smooth: bool = False,
    ):
        super().__init__()
        self.shape = (shape[0], shape[1], shape[2])
        self.classes = classes
        self.latent_dim = latent_dim
        rows = min(num_frequencies, shape[1])
        columns = min(num_frequencies, shape[2])
        self.num_frequencies = (rows, columns)
        self.layers = nn.Sequential(
            nn.Linear(latent_dim + classes, hidden_dim),
            nn.BatchNorm1d(hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.BatchNorm1d(hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, shape[0] * rows * columns),
        )
        self.row_basis: Tensor
        self.column_basis: Tensor
        self.frequency_decay: Tensor
        self.register_buffer("row_basis", scaled_dct_basis(shape[1], rows), persistent=False)
        self.register_buffer("column_basis", scaled_dct_basis(shape[2], columns), persistent=False)
        squared = torch.arange(rows)[:, None].square() + torch.arange(columns).square()
        decay = 1 / (1.0 + squared * bool(smooth))
        self.register_buffer("frequency_decay", decay, persistent=False)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(labels, self.classes).to(latents.dtype)
        coefficients = self.layers(torch.cat([latents, one_hot], 1))
        coefficients = coefficients.view(-1, self.shape[0], *self.num_frequencies)
        logits = self.row_basis @ (coefficients * self.frequency_decay) @ self.column_basis.T
        return logits.sigmoid()


def scaled_dct_basis(side: int, num_frequencies: int) -> Tensor:
    """Compute the lowest DCT basis vectors, scaled so that their entries have mean square 1.

    Up to rounding this is sqrt(side) times `privot.components.dct.dct_basis`. Generators of
    published releases rely on the rounding of this one.

    Returns:
        The vectors as columns, [side, num_frequencies].
    """
    angles = (torch.arange(side) + 0.5) * math.pi / side
    basis = (angles[:, None] * torch.arange(num_frequencies)).cos() * math.sqrt(2)
    basis[:, 0] = 1
    return basis
