"""Image distances: by hand on small images, against other implementations, and in the order that people would say."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.noise_data import make_generator
from torch.nn import functional

from privot.errors import DataError, SettingError
from privot.measures.image_similarity import (
    LPIPS_WEIGHTS,
    SIMILARITY_PROTOCOLS,
    l2,
    lpips,
    mse,
    psnr,
    ssim,
)
from privot.measures.networks.lpips import Lpips
from privot.nets.generators.conv import initialize_weights

ALL = {"l2": l2, "mse": mse, "psnr": psnr, "ssim": ssim, "lpips": lpips}


@pytest.fixture
def weights(data_file):
    return [load_file(data_file("weights", name)) for name in LPIPS_WEIGHTS]


def draw_noise(*shape, seed=0):
    return torch.rand(shape, generator=make_generator(seed))


def draw_blobs(count, channels, side, seed=0):
    """More like a photograph than noise is."""
    coarse = draw_noise(count, channels, 6, 6, seed=seed)
    return functional.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1)


def compute_ssim_naively(x, y, side):
    """One image, [channels, height, width] in NumPy, window by window."""
    steps = np.arange(side) - side // 2
    window = np.exp(-(steps[:, None] ** 2 + steps[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    values = []
    for channel, top, left in np.ndindex(len(x), *(size - side + 1 for size in x.shape[1:])):
        area = (channel, slice(top, top + side), slice(left, left + side))
        p = x[area]
        q = y[area]
        mp = (window * p).sum()
        mq = (window * q).sum()
        vp = (window * (p - mp) ** 2).sum()
        vq = (window * (q - mq) ** 2).sum()
        covariance = (window * (p - mp) * (q - mq)).sum()
        luminance = (2 * mp * mq + 1e-4) / (mp**2 + mq**2 + 1e-4)
        values.append(luminance * (2 * covariance + 9e-4) / (vp + vq + 9e-4))
    return np.mean(values)


def test_pixel_distances_by_hand():
    x = torch.zeros(2, 3, 4, 4)
    y = torch.zeros(2, 3, 4, 4)
    y[0, 0, 0, :2] = torch.tensor([0.3, 0.4])
    assert l2(x, y).tolist() == pytest.approx([0.5, 0], abs=1e-7)
    assert mse(x, y).tolist() == pytest.approx([0.25 / 48, 0], abs=1e-8)
    assert psnr(x, y).tolist() == pytest.approx([10 * math.log10(48 / 0.25), math.inf], rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "side"),
    [
        ((1, 11, 11), 11),
        ((3, 14, 12), 11),
        ((1, 8, 8), 7),
        ((1, 9, 30), 9),
        ((2, 10, 10), 9),
        ((1, 1, 5), 1),
    ],
)
def test_ssim_is_the_loop_over_windows(shape, side):
    x = draw_noise(2, *shape)
    y = draw_noise(2, *shape, seed=1)
    pairs = zip(x.double().numpy(), y.double().numpy(), strict=True)
    expected = [compute_ssim_naively(*pair, side) for pair in pairs]
    assert ssim(x, y).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("channels", [1, 3])
def test_ssim_is_that_of_torchmetrics(channels):
    metrics = pytest.importorskip("torchmetrics.functional.image")
    x = draw_blobs(6, channels, 28).double()
    y = (x + 0.1 * draw_noise(6, channels, 28, 28)).clamp(0, 1)
    _, values = metrics.structural_similarity_index_measure(
        x, y, data_range=1.0, reduction="none", return_full_image=True
    )
    inside = values[..., 5:-5, 5:-5]  # theirs goes on over the rim, on a mirrored image
    torch.testing.assert_close(ssim(x, y), inside.flatten(1).mean(1), rtol=1e-9, atol=1e-9)


def test_lpips_is_the_papers_formula(weights):
    """Again from the weights, functional and one position after another."""
    alexnet, heads = weights
    x = draw_blobs(2, 3, 64)
    y = draw_blobs(2, 3, 64, seed=1)
    mean = torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1)
    std = torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1)

    def compute_maps(images):
        images = (images * 2 - 1 - mean) / std
        for layer, stride, padding in ((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1)):
            if layer in (3, 6):
                images = functional.max_pool2d(images, 3, 2)
            kernel = alexnet[f"features.{layer}.weight"].float()
            bias = alexnet[f"features.{layer}.bias"].float()
            images = functional.conv2d(images, kernel, bias, stride, padding).relu()
            yield images.double().numpy()

    wanted = np.zeros(2)
    for level, (a, b) in enumerate(zip(compute_maps(x), compute_maps(y), strict=True)):
        head = heads[f"lin{level}.weight"].double().numpy().ravel()
        for image in range(2):
            columns = [maps[image].reshape(len(head), -1).T for maps in (a, b)]
            gaps = [
                head @ (u / np.linalg.norm(u) - v / np.linalg.norm(v)) ** 2
                for u, v in zip(*columns, strict=True)
            ]
            wanted[image] += np.mean(gaps)
    assert lpips(x, y).tolist() == pytest.approx(wanted.tolist(), rel=1e-4)
    assert (wanted > 0.05).all()


def test_lpips_grows_with_damage_and_sees_blur_where_pixels_do_not(weights):
    """As in figure 1 of Zhang et al. 2018: a blur is nearer in pixels than a shift, and looks worse."""
    x = draw_blobs(8, 1, 28) * 0.5 + 0.5 * (draw_blobs(8, 1, 28, seed=3) > 0.5)
    noise = draw_noise(8, 1, 28, 28, seed=5) - 0.5
    steps = torch.stack([lpips(x, (x + size * noise).clamp(0, 1)) for size in (0, 0.1, 0.4, 1.0)])
    assert (steps[0] == 0).all()
    assert (steps.diff(dim=0) > 0).all()
    blurred = functional.avg_pool2d(functional.pad(x, (3, 3, 3, 3), mode="replicate"), 7, 1)
    shifted = functional.pad(x, (1, 0, 0, 0), mode="replicate")[..., :28]
    assert (lpips(x, blurred) > lpips(x, shifted)).all()


def test_lpips_takes_grey_as_three_channels_and_small_images_as_upscaled(weights):
    x = draw_blobs(2, 1, 28)
    y = draw_blobs(2, 1, 28, seed=1)
    scaling = {"size": (64, 64), "mode": "bilinear", "align_corners": False}
    grown = [functional.interpolate(images, **scaling) for images in (x, y)]
    torch.testing.assert_close(lpips(x, y), lpips(*grown), rtol=1e-4, atol=1e-5)
    assert torch.equal(lpips(x, y), lpips(x.repeat(1, 3, 1, 1), y.repeat(1, 3, 1, 1)))
    assert lpips(draw_noise(1, 1, 20, 40), draw_noise(1, 1, 20, 40, seed=1)).shape == (1,)


@pytest.mark.parametrize("name", ALL)
def test_each_is_symmetric_by_image_and_best_when_equal(name, request):
    if name == "lpips":
        request.getfixturevalue("weights")
    distance = ALL[name]
    x = draw_noise(3, 3, 16, 16)
    y = draw_noise(3, 3, 16, 16, seed=1)
    values = distance(x, y)
    assert (values.dtype, values.shape) == (torch.float64, (3,))
    torch.testing.assert_close(values, distance(y, x))
    torch.testing.assert_close(values[1:], distance(x[1:], y[1:]), rtol=1e-5, atol=1e-6)
    best = {"psnr": math.inf, "ssim": 1.0}.get(name, 0.0)
    assert distance(x, x).tolist() == pytest.approx([best] * 3, abs=1e-12)
    assert name in SIMILARITY_PROTOCOLS


@torch.no_grad()
def test_heads_without_weight_measure_nothing_and_each_head_adds():
    net = initialize_weights(Lpips(), make_generator())
    x = draw_noise(2, 3, 64, 64)
    y = draw_noise(2, 3, 64, 64, seed=1)
    assert net(x, y).tolist() == [0, 0]
    parts = []
    for head in net.heads:
        head.fill_(1)
        parts.append(net(x, y))
        head.zero_()
    for head in net.heads:
        head.fill_(1)
    parts = torch.stack(parts)
    torch.testing.assert_close(net(x, y), parts.sum(0))
    # unit vectors without negative entries are at most sqrt(2) apart
    assert ((parts > 0) & (parts <= 2)).all()


def test_refuses_unlike_shapes_two_channels_and_missing_or_damaged_weights(monkeypatch, tmp_path):
    x = draw_noise(2, 1, 8, 8)
    for distance in ALL.values():
        with pytest.raises(SettingError, match=r"\[2, 1, 8, 8\] and \[1, 1, 8, 8\]"):
            distance(x, x[:1])
    with pytest.raises(SettingError, match=r"2 channels\. LPIPS needs 1 or 3"):
        lpips(x.repeat(1, 2, 1, 1), x.repeat(1, 2, 1, 1))
    monkeypatch.setenv("PRIVOT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "weights"
    missing = f"{' and '.join(LPIPS_WEIGHTS)}. Put them into {folder}"
    with pytest.raises(DataError, match=missing):
        lpips(x, x)
    folder.mkdir()
    for name in LPIPS_WEIGHTS:
        (folder / name).write_bytes(b"no tensors")
    with pytest.raises(DataError, match="not the weights of LPIPS"):
        lpips(x, x)
