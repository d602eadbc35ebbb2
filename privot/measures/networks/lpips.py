"""The LPIPS network: AlexNet's features and one weight per channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LAYER_CHANNELS = (64, 192, 384, 256, 256)


class AlexNetFeatures(nn.Module):
    """The five convolutions of AlexNet.

    Maps images [n, 3, height, width] with sides of at least 31 pixels to the five maps after each
    ReLU, [n, channels, ., .]. The keys of the weights are torchvision's, ``features.N``.

    >>> [tuple(maps.shape) for maps in AlexNetFeatures()(torch.zeros(1, 3, 64, 64))]
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
    r"""LPIPS of Zhang et al. (2018), version 0.1.

    Maps two batches of images [n, 3, h, w] in [-1, 1] to distances [n]:

    d(x, y) = \sum_l mean_{hw} \sum_c w_lc (f_lc(x) - f_lc(y))^2

    The features f_l are scaled to length 1 at each position. The heads w are ``lin0`` to ``lin4``,
    [1, channels, 1, 1].

    >>> x = torch.ones(2, 3, 64, 64)
    >>> Lpips()(x, x).tolist()
    [0.0, 0.0]
    """

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = AlexNetFeatures()
        self.heads = nn.ParameterList(
            [torch.zeros(1, channels, 1, 1) for channels in LAYER_CHANNELS]
        )
        self.register_buffer(
            "shift", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1), persistent=False
        )
        self.register_buffer(
            "scale", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1), persistent=False
        )

    def load_weights(self, features: dict[str, Tensor], head_weights: dict[str, Tensor]) -> Lpips:
        """Load weights of AlexNet and of the heads, and freeze them. They may be float16."""
        self.net.load_state_dict(features)
        self.heads.load_state_dict(
            {str(layer): head_weights[f"lin{layer}.weight"] for layer in range(len(LAYER_CHANNELS))}
        )
        return self.eval().requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x_maps, y_maps = (self.net((images - self.shift) / self.scale) for images in (x, y))
        differences = (
            (_normalize_channels(x_map) - _normalize_channels(y_map)).square().double()
            for x_map, y_map in zip(x_maps, y_maps, strict=True)
        )
        distances = [
            (difference * head).sum(1).mean((1, 2))
            for difference, head in zip(differences, self.heads, strict=True)
        ]
        return torch.stack(distances).sum(0)


def _normalize_channels(maps: Tensor) -> Tensor:
    return maps / (maps.norm(dim=1, keepdim=True) + 1e-10)
