"""Similarity of pairs of images.

Each function takes ``x`` and ``y`` [n, channels, height, width] in [0, 1] and returns one float64
value per pair, [n].
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from privot.errors import DataError, SettingError, reraise_as
from privot.io import default_data_folder, find_data_file
from privot.measures.networks.lpips import Lpips

LPIPS_MIN_SIDE = 64  # pixels; images with a shorter side are upscaled for LPIPS
LPIPS_BATCH_SIZE = 250
LPIPS_WEIGHTS = ("alexnet-features.fp16.safetensors", "lpips-alex-heads.safetensors")
SSIM_BATCH_SIZE = 500
SSIM_WINDOW = 11  # pixels
SSIM_SIGMA = 1.5  # pixels
SSIM_C1 = 0.01**2
SSIM_C2 = 0.03**2
SIMILARITY_PROTOCOLS = {
    "l2": "pixels in [0, 1]",
    "mse": "pixels in [0, 1]",
    "psnr": "peak 1, decibels",
    "ssim": (
        "Wang et al. 2004: Gaussian window 11 (or the largest odd one that fits), sigma 1.5, "
        "K 0.01 and 0.03, valid region"
    ),
    "lpips": (
        f"LPIPS 0.1, AlexNet in half precision, images under {LPIPS_MIN_SIDE} pixels upscaled "
        f"bilinearly to {LPIPS_MIN_SIDE}"
    ),
}


def mse(x: Tensor, y: Tensor) -> Tensor:
    r"""Compute the mean squared error, 1/d \sum_i (x_i - y_i)^2 over the d values of an image.

    >>> mse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5))
    tensor([0.2500], dtype=torch.float64)
    """
    _check_image_pairs(x, y)
    return (x.double() - y.double()).square().flatten(1).mean(1)


def l2(x: Tensor, y: Tensor) -> Tensor:
    r"""Compute the Euclidean distance, (\sum_i (x_i - y_i)^2)^(1/2).

    >>> l2(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5))
    tensor([1.], dtype=torch.float64)
    """
    _check_image_pairs(x, y)
    return (x.double() - y.double()).flatten(1).norm(dim=1)


def psnr(x: Tensor, y: Tensor) -> Tensor:
    """Compute the peak signal-to-noise ratio, 10 log10(1 / MSE) decibels; inf for equal images.

    >>> psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1))
    tensor([20.0000], dtype=torch.float64)
    """
    return -10 * mse(x, y).log10()


def ssim(x: Tensor, y: Tensor) -> Tensor:
    r"""Compute the structural similarity (Wang et al. 2004); 1 for equal images.

    SSIM = (2 m_x m_y + C_1)(2 s_xy + C_2) / ((m_x^2 + m_y^2 + C_1)(s_x^2 + s_y^2 + C_2)), with
    C_1 = 0.01^2, C_2 = 0.03^2, and means and (co)variances under a Gaussian window of 11 pixels,
    sigma 1.5. The result is the mean over channels and over all positions where the window fits.
    An image smaller than 11 pixels takes the largest odd window that fits.

    >>> ssim(torch.ones(1, 1, 16, 16), torch.ones(1, 1, 16, 16))
    tensor([1.], dtype=torch.float64)
    """
    _check_image_pairs(x, y)
    side = min(SSIM_WINDOW, (min(x.shape[2:]) + 1) // 2 * 2 - 1)
    offsets = torch.arange(side, dtype=torch.float64, device=x.device) - side // 2
    window = torch.exp(-(offsets**2) / (2 * SSIM_SIGMA**2))
    window = window / window.sum()
    return torch.cat(
        [
            _ssim_batch(x_batch.double(), y_batch.double(), window)
            for x_batch, y_batch in zip(
                x.split(SSIM_BATCH_SIZE), y.split(SSIM_BATCH_SIZE), strict=True
            )
        ]
    )


def _ssim_batch(x: Tensor, y: Tensor, window: Tensor) -> Tensor:
    """Compute SSIM [n] of float64 images under a separable window [side]."""

    def blur(images: Tensor) -> Tensor:
        rows = functional.conv2d(images.flatten(0, 1)[:, None], window.view(1, 1, -1, 1))
        blurred = functional.conv2d(rows, window.view(1, 1, 1, -1))
        return blurred.view(*images.shape[:2], *rows.shape[2:3], -1)

    mean_x = blur(x)
    mean_y = blur(y)
    var_x = blur(x * x) - mean_x**2
    var_y = blur(y * y) - mean_y**2
    covariance = blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + SSIM_C1) / (mean_x**2 + mean_y**2 + SSIM_C1)
    similarity = luminance * (2 * covariance + SSIM_C2) / (var_x + var_y + SSIM_C2)
    return similarity.flatten(1).mean(1)


def lpips(x: Tensor, y: Tensor) -> Tensor:
    """Compute the learned perceptual distance (Zhang et al. 2018) by AlexNet; 0 for equal images.

    Runs on the device of ``x``. A grey image becomes three equal channels. The network is made for
    larger images, so images whose shorter side is under 64 pixels are first upscaled bilinearly to
    64. Their values are comparable with one another, not with those of large photographs.

    Raises:
        SettingError: The images do not have 1 or 3 channels, or the shapes differ.
        DataError: The weights are missing; they are two files in the folder ``weights``.
    """
    _check_image_pairs(x, y)
    prepare_for_lpips(x[:1])  # refuses a wrong number of channels before the weights are loaded
    net = load_lpips_network(x.device)
    with torch.no_grad():
        return torch.cat(
            [
                net(prepare_for_lpips(x_batch), prepare_for_lpips(y_batch))
                for x_batch, y_batch in zip(
                    x.split(LPIPS_BATCH_SIZE), y.split(LPIPS_BATCH_SIZE), strict=True
                )
            ]
        )


def prepare_for_lpips(images: Tensor) -> Tensor:
    """Convert images [n, 1 or 3, height, width] in [0, 1] to the input of the LPIPS network.

    Returns:
        Images [n, 3, height', width'] in [-1, 1], with sides of 64 pixels or more.

    >>> prepare_for_lpips(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 3, 64, 64])
    """
    if images.shape[1] not in (1, 3):
        raise SettingError(f"The images have {images.shape[1]} channels. LPIPS needs 1 or 3.")
    # One memory layout for all: the kernels of another layout round differently, and a copy would
    # not have distance 0.
    images = (images.float().expand(-1, 3, -1, -1) * 2 - 1).contiguous()
    min_side = min(images.shape[2:])
    if min_side < LPIPS_MIN_SIDE:
        size = [round(side * LPIPS_MIN_SIDE / min_side) for side in images.shape[2:]]
        images = functional.interpolate(images, size=size, mode="bilinear", align_corners=False)
    return images


def find_lpips_weights() -> tuple[Path, Path]:
    """Find the weight files of AlexNet's features and of the LPIPS heads.

    Raises:
        DataError: A file is missing. The message says which file and in which folder it belongs.
    """
    paths = [find_data_file("weights", name) for name in LPIPS_WEIGHTS]
    missing = [name for name, path in zip(LPIPS_WEIGHTS, paths, strict=True) if path is None]
    if missing:
        raise DataError(
            f"LPIPS needs the weights {' and '.join(missing)}. Put them into "
            f"{default_data_folder('weights')}."
        )
    return paths[0], paths[1]  # type: ignore[return-value]


def load_lpips_network(device: torch.device) -> Lpips:
    """Load the LPIPS network with frozen weights on a device. The files are read only once."""
    return _load_lpips_files(*find_lpips_weights(), device)


@cache
def _load_lpips_files(features_path: Path, heads_path: Path, device: torch.device) -> Lpips:
    """Load the LPIPS network from the files of AlexNet's features and of the heads."""
    with reraise_as(DataError, f"{features_path} and {heads_path}: not the weights of LPIPS"):
        return Lpips().load_weights(load_file(features_path), load_file(heads_path)).to(device)


def _check_image_pairs(x: Tensor, y: Tensor) -> None:
    if x.ndim != 4 or x.shape != y.shape or not x.numel():
        raise SettingError(
            f"The images are {list(x.shape)} and {list(y.shape)}. Both need the same shape "
            "[n, channels, height, width], which must not be empty."
        )
