"""Image distances: by hand on small images, against other implementations, and in the order that people would say."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
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


def random(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def smooth(count, channels, side, seed=0):
    """Blobs, more like a photograph than noise is."""
    return functional.interpolate(
        random(count, channels, 6, 6, seed=seed), size=(side, side), mode="bicubic"
    ).clamp(0, 1)


def naive_ssim(x, y, side):
    """One image, [channels, height, width] in NumPy, window by window."""
    steps = np.arange(side) - side // 2
    window = np.exp(-(steps[:, None] ** 2 + steps[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    found = []
    for a, b in zip(x, y, strict=True):
        for top in range(a.shape[0] - side + 1):
            for left in range(a.shape[1] - side + 1):
                p, q = (each[top : top + side, left : left + side] for each in (a, b))
                mp = (window * p).sum()
                mq = (window * q).sum()
                vp = (window * (p - mp) ** 2).sum()
                vq = (window * (q - mq) ** 2).sum()
                cov = (window * (p - mp) * (q - mq)).sum()
                found.append(
                    (2 * mp * mq + 1e-4)
                    * (2 * cov + 9e-4)
                    / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4))
                )
    return np.mean(found)


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
    x = random(2, *shape)
    y = random(2, *shape, seed=1)
    wanted = [
        naive_ssim(a, b, side) for a, b in zip(x.double().numpy(), y.double().numpy(), strict=True)
    ]
    assert ssim(x, y).tolist() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("channels", [1, 3])
def test_ssim_is_that_of_torchmetrics(channels):
    metrics = pytest.importorskip("torchmetrics.functional.image")
    x = smooth(6, channels, 28).double()
    y = (smooth(6, channels, 28) + 0.1 * random(6, channels, 28, 28)).clamp(0, 1).double()
    _, places = metrics.structural_similarity_index_measure(
        x, y, data_range=1.0, reduction="none", return_full_image=True
    )
    inside = places[..., 5:-5, 5:-5]  # theirs goes on over the rim, on a mirrored image
    torch.testing.assert_close(ssim(x, y), inside.flatten(1).mean(1), rtol=1e-9, atol=1e-9)


def test_lpips_is_the_papers_formula(weights):
    """Again from the weights, functional and one place after another."""
    alexnet, heads = weights
    x = smooth(2, 3, 64)
    y = smooth(2, 3, 64, seed=1)

    def maps(images):
        images = (
            images * 2 - 1 - torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1)
        ) / torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1)
        for layer, stride, padding in ((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1)):
            if layer in (3, 6):
                images = functional.max_pool2d(images, 3, 2)
            kernel, bias = (
                alexnet[f"features.{layer}.{part}"].float() for part in ("weight", "bias")
            )
            images = functional.conv2d(images, kernel, bias, stride, padding).relu()
            yield images.double().numpy()

    wanted = np.zeros(2)
    for level, (a, b) in enumerate(zip(maps(x), maps(y), strict=True)):
        head = heads[f"lin{level}.weight"].double().numpy().ravel()
        for image in range(2):
            columns = [each[image].reshape(len(head), -1).T for each in (a, b)]
            gaps = [
                head @ (u / np.linalg.norm(u) - v / np.linalg.norm(v)) ** 2
                for u, v in zip(*columns, strict=True)
            ]
            wanted[image] += np.mean(gaps)
    assert lpips(x, y).tolist() == pytest.approx(wanted.tolist(), rel=1e-4)
    assert (wanted > 0.05).all()


def test_lpips_grows_with_damage_and_sees_blur_where_pixels_do_not(weights):
    """The reason to have it (Zhang et al. 2018, figure 1): a blur is nearer in pixels than a slightly shifted image, and looks worse."""
    x = smooth(8, 1, 28) * 0.5 + 0.5 * (smooth(8, 1, 28, seed=3) > 0.5)
    noise = random(8, 1, 28, 28, seed=5) - 0.5
    steps = torch.stack([lpips(x, (x + size * noise).clamp(0, 1)) for size in (0, 0.1, 0.4, 1.0)])
    assert (steps[0] == 0).all()
    assert (steps.diff(dim=0) > 0).all()
    blurred = functional.avg_pool2d(functional.pad(x, (3, 3, 3, 3), mode="replicate"), 7, 1)
    shifted = functional.pad(x, (1, 0, 0, 0), mode="replicate")[..., :28]
    assert (lpips(x, blurred) > lpips(x, shifted)).all()


def test_lpips_takes_grey_as_three_channels_and_small_images_as_upscaled(weights):
    x = smooth(2, 1, 28)
    y = smooth(2, 1, 28, seed=1)
    grown = [
        functional.interpolate(each, size=(64, 64), mode="bilinear", align_corners=False)
        for each in (x, y)
    ]
    torch.testing.assert_close(lpips(x, y), lpips(*grown), rtol=1e-4, atol=1e-5)
    assert torch.equal(lpips(x, y), lpips(x.repeat(1, 3, 1, 1), y.repeat(1, 3, 1, 1)))
    assert lpips(random(1, 1, 20, 40), random(1, 1, 20, 40, seed=1)).shape == (1,)


@pytest.mark.parametrize("name", ALL)
def test_each_is_symmetric_by_image_and_best_when_equal(name, request):
    if name == "lpips":
        request.getfixturevalue("weights")
    x = random(3, 3, 16, 16)
    y = random(3, 3, 16, 16, seed=1)
    found = ALL[name](x, y)
    assert found.dtype == torch.float64
    assert found.shape == (3,)
    torch.testing.assert_close(found, ALL[name](y, x))
    torch.testing.assert_close(found[1:], ALL[name](x[1:], y[1:]), rtol=1e-5, atol=1e-6)
    best = {"psnr": math.inf, "ssim": 1.0}.get(name, 0.0)
    assert ALL[name](x, x).tolist() == pytest.approx([best] * 3, abs=1e-12)
    assert name in SIMILARITY_PROTOCOLS


def test_heads_without_weight_measure_nothing_and_each_head_adds():
    net = initialize_weights(Lpips(), torch.Generator().manual_seed(0))
    x = random(2, 3, 64, 64)
    y = random(2, 3, 64, 64, seed=1)
    with torch.no_grad():
        assert net(x, y).tolist() == [0, 0]
        parts = []
        for head in net.heads:
            head.fill_(1)
            parts.append(net(x, y))
            head.zero_()
        for head in net.heads:
            head.fill_(1)
        torch.testing.assert_close(net(x, y), torch.stack(parts).sum(0))
        assert (torch.stack(parts) > 0).all()
        assert (
            torch.stack(parts) <= 2
        ).all()  # unit vectors without negative entries are at most sqrt(2) apart


def test_what_is_refused(monkeypatch, tmp_path):
    x = random(2, 1, 8, 8)
    for each in ALL.values():
        with pytest.raises(SettingError, match=r"\[2, 1, 8, 8\] and \[1, 1, 8, 8\]"):
            each(x, x[:1])
    with pytest.raises(SettingError, match=r"2 channels\. LPIPS needs 1 or 3"):
        lpips(random(1, 2, 8, 8), random(1, 2, 8, 8))
    monkeypatch.setenv("PRIVOT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        DataError,
        match=f"{LPIPS_WEIGHTS[0]} and {LPIPS_WEIGHTS[1]}. Put them into {tmp_path / 'weights'}",
    ):
        lpips(x, x)
    (tmp_path / "weights").mkdir()
    for name in LPIPS_WEIGHTS:
        (tmp_path / "weights" / name).write_bytes(b"no tensors")
    with pytest.raises(DataError, match="not the weights of LPIPS"):
        lpips(x, x)
