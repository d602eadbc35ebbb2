"""The network of LPIPS: AlexNet's features and a weight for each channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTHS = (64, 192, 384, 256, 256)


class AlexFeatures(nn.Module):
    """AlexNet's five convolutions; the maps after each ReLU, [n, width, ., .]. Inputs [n, 3, height, width] from 31 pixels a side on.

    Keys of the weights are torchvision's, ``features.N``.

    >>> [tuple(each.shape) for each in AlexFeatures()(torch.zeros(1, 3, 64, 64))]
    [(1, 64, 15, 15), (1, 192, 7, 7), (1, 384, 3, 3), (1, 256, 3, 3), (1, 256, 3, 3)]
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
        )

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = []
        for layer in self.features:
            images = layer(images)
            if isinstance(layer, nn.ReLU):
                maps.append(images)
        return maps


class Lpips(nn.Module):
    r"""LPIPS of Zhang et al. (2018), version 0.1: [n, 3, h, w] twice, in [-1, 1], to distances [n].

    d(x, y) = \sum_l mean_{hw} \sum_c w_lc (f_lc(x) - f_lc(y))^2, with the features f_l of each place scaled to length 1.

    The heads w are ``lin0`` to ``lin4``, [1, channels, 1, 1].

    >>> x = torch.ones(2, 3, 64, 64)
    >>> Lpips()(x, x).tolist()
    [0.0, 0.0]
    """

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = AlexFeatures()
        self.heads = nn.ParameterList([torch.zeros(1, width, 1, 1) for width in WIDTHS])
        self.register_buffer(
            "shift", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1), persistent=False
        )
        self.register_buffer(
            "scale", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1), persistent=False
        )

    def load(self, features: dict[str, Tensor], heads: dict[str, Tensor]) -> Lpips:
        """Weights of AlexNet and of the heads, by the keys above; half precision is widened."""
        self.net.load_state_dict(features)
        self.heads.load_state_dict(
            {str(level): heads[f"lin{level}.weight"] for level in range(len(WIDTHS))}
        )
        return self.eval().requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, two = (self.net((each - self.shift) / self.scale) for each in (x, y))
        gaps = ((_unit(a) - _unit(b)).square().double() for a, b in zip(one, two, strict=True))
        return torch.stack(
            [(gap * head).sum(1).mean((1, 2)) for gap, head in zip(gaps, self.heads, strict=True)]
        ).sum(0)


def _unit(maps: Tensor) -> Tensor:
    return maps / (maps.norm(dim=1, keepdim=True) + 1e-10)
