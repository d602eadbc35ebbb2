"""How far apart two images are, pair by pair: ``x`` and ``y`` [n, channels, height, width] in [0, 1] to float64 [n]."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from privot.errors import DataError, SettingError, refusing
from privot.io import find, home
from privot.measures.networks.lpips import Lpips

SIDE = 64  # LPIPS: the shorter side of smaller images is brought to this
WEIGHTS = ("alexnet-features.fp16.safetensors", "lpips-alex-heads.safetensors")
RULERS = {
    "l2": "pixels in [0, 1]",
    "mse": "pixels in [0, 1]",
    "psnr": "peak 1, decibels",
    "ssim": "Wang et al. 2004: Gaussian window 11 (or the largest odd one that fits), sigma 1.5, K 0.01 and 0.03, valid region",
    "lpips": f"LPIPS 0.1, AlexNet in half precision, images under {SIDE} pixels upscaled bilinearly to {SIDE}",
}


def mse(x: Tensor, y: Tensor) -> Tensor:
    r"""Mean squared error, 1/d \sum_i (x_i - y_i)^2 over the d values of an image.

    >>> mse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5))
    tensor([0.2500], dtype=torch.float64)
    """
    _check(x, y)
    return (x.double() - y.double()).square().flatten(1).mean(1)


def l2(x: Tensor, y: Tensor) -> Tensor:
    r"""Euclidean distance, (\sum_i (x_i - y_i)^2)^(1/2).

    >>> l2(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5))
    tensor([1.], dtype=torch.float64)
    """
    _check(x, y)
    return (x.double() - y.double()).flatten(1).norm(dim=1)


def psnr(x: Tensor, y: Tensor) -> Tensor:
    """Peak signal-to-noise ratio, 10 log10(1 / MSE) decibels; infinite for equal images.

    >>> psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1))
    tensor([20.0000], dtype=torch.float64)
    """
    return -10 * mse(x, y).log10()


def ssim(x: Tensor, y: Tensor) -> Tensor:
    r"""Structural similarity (Wang et al. 2004), the mean over places and channels; 1 for equal images.

    SSIM = (2 m_x m_y + C_1)(2 s_xy + C_2) / ((m_x^2 + m_y^2 + C_1)(s_x^2 + s_y^2 + C_2)), C_1 = 0.01^2, C_2 = 0.03^2, with means and
    (co)variances under a Gaussian window of 11 pixels, sigma 1.5, where it fits wholly. An image smaller than 11 pixels takes the
    largest odd window that fits.

    >>> ssim(torch.ones(1, 1, 16, 16), torch.ones(1, 1, 16, 16))
    tensor([1.], dtype=torch.float64)
    """
    _check(x, y)
    side = min(11, (min(x.shape[2:]) + 1) // 2 * 2 - 1)
    bell = torch.exp(
        -((torch.arange(side, dtype=torch.float64, device=x.device) - side // 2) ** 2)
        / (2 * 1.5**2)
    )
    bell = bell / bell.sum()

    def blur(images: Tensor) -> Tensor:
        rows = functional.conv2d(images.flatten(0, 1)[:, None], bell.view(1, 1, -1, 1))
        return functional.conv2d(rows, bell.view(1, 1, 1, -1)).view(
            *images.shape[:2], *rows.shape[2:3], -1
        )

    found = []
    for a, b in zip(x.split(500), y.split(500), strict=True):
        one = a.double()
        two = b.double()
        mean_x = blur(one)
        mean_y = blur(two)
        var_x = blur(one * one) - mean_x**2
        var_y = blur(two * two) - mean_y**2
        cov = blur(one * two) - mean_x * mean_y
        bright = (2 * mean_x * mean_y + 0.01**2) / (mean_x**2 + mean_y**2 + 0.01**2)
        found.append((bright * (2 * cov + 0.03**2) / (var_x + var_y + 0.03**2)).flatten(1).mean(1))
    return torch.cat(found)


def lpips(x: Tensor, y: Tensor) -> Tensor:
    """Learned perceptual distance (Zhang et al. 2018) through AlexNet; 0 for equal images. Computed where ``x`` lies.

    Grey images are taken as three equal channels. The network is made for larger images: those whose shorter side is under 64
    pixels are first upscaled bilinearly to 64, so that their numbers compare with one another, not with those of large photographs.
    The weights are two files in the folder ``weights`` of the data; see `RULERS`.
    """
    _check(x, y)
    prepared(x[:1])  # too many channels are refused before weights are looked for
    net = network(x.device)
    with torch.no_grad():
        return torch.cat(
            [net(prepared(a), prepared(b)) for a, b in zip(x.split(250), y.split(250), strict=True)]
        )


def prepared(images: Tensor) -> Tensor:
    """Images [n, 1 or 3, height, width] in [0, 1] as the network of LPIPS takes them: [n, 3, ., .] in [-1, 1], 64 pixels a side or more.

    >>> prepared(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 3, 64, 64])
    """
    if images.shape[1] not in (1, 3):
        raise SettingError(f"images have {images.shape[1]} channels: LPIPS takes 1 or 3")
    # In one layout of memory: kernels of another one round differently, and a copy would not be at distance 0.
    images = (images.float().expand(-1, 3, -1, -1) * 2 - 1).contiguous()
    if (small := min(images.shape[2:])) < SIDE:
        size = [round(side * SIDE / small) for side in images.shape[2:]]
        images = functional.interpolate(images, size=size, mode="bilinear", align_corners=False)
    return images


def weights() -> tuple[Path, Path]:
    """The files of AlexNet's features and of the heads; a `DataError` says where they belong when they are not there."""
    found = [find("weights", name) for name in WEIGHTS]
    if missing := [name for name, path in zip(WEIGHTS, found, strict=True) if path is None]:
        raise DataError(
            f"LPIPS needs the weights {' and '.join(missing)}: put them into {home('weights')}"
        )
    return found[0], found[1]  # type: ignore[return-value]


def network(device: torch.device) -> Lpips:
    """The network of LPIPS with its weights, frozen, on the device; it is read from disk once."""
    return _loaded(*weights(), device)


@cache
def _loaded(features: Path, heads: Path, device: torch.device) -> Lpips:
    with refusing(DataError, f"{features} and {heads}: not the weights of LPIPS"):
        return Lpips().load(load_file(features), load_file(heads)).to(device)


def _check(x: Tensor, y: Tensor) -> None:
    if x.ndim != 4 or x.shape != y.shape or not x.numel():
        raise SettingError(
            f"images are {list(x.shape)} and {list(y.shape)}: two sets [n, channels, height, width] of one shape are needed"
        )
