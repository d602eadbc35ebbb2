"""Augmentations are what the papers say, each by its own numbers, and gradients pass through them."""

import math

import pytest
import torch
from torch.testing import assert_close

from privot.nets.augment import (
    AUGMENTATIONS,
    AugmentParams,
    apply_augmentations,
    sample_augment_params,
)

SIDE = 16
NEAR = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture
def images():
    return torch.rand(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def make_identity(count=4):
    affine = torch.eye(2, 3).repeat(count, 1, 1)
    color = torch.tensor([0.0, 1.0, 1.0]).repeat(count, 1)
    return AugmentParams(affine, torch.zeros(count, 4), color)


def sample(*names, count=4, seed=0, side=SIDE):
    return sample_augment_params(count, side, torch.Generator().manual_seed(seed), names)


def assert_is_rotation(matrix):
    assert_close(matrix @ matrix.T, torch.eye(2), rtol=1e-5, atol=1e-5)


def test_the_identity_changes_nothing(images):
    assert_close(apply_augmentations(images, make_identity()), images, rtol=1e-4, atol=1e-4)


def test_a_crop_is_a_shift_by_whole_pixels_with_black_from_outside(images):
    for seed in range(8):
        params = sample("crop", seed=seed)
        results = apply_augmentations(images, params)
        for image, result, affine in zip(images, results, params.affine, strict=True):
            right, down = (round(float(shift) * SIDE / 2) for shift in affine[:, 2])
            assert max(abs(right), abs(down)) <= 2
            padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
            expected = padded[:, 2 + down :, 2 + right :][:, :SIDE, :SIDE]
            assert_close(result, expected, **NEAR)


def test_a_flip_is_a_mirror_or_nothing(images):
    kinds = set()
    for seed in range(6):
        results = apply_augmentations(images, sample("flip", seed=seed))
        for image, result in zip(images, results, strict=True):
            kind = [torch.allclose(result, other, atol=1e-3) for other in (image, image.flip(2))]
            assert any(kind)
            kinds.add(kind.index(True))
    assert kinds == {0, 1}


def test_a_cutout_is_a_black_square_of_half_a_side(images):
    images = images + 1
    for seed in range(6):
        params = sample("cutout", seed=seed)
        results = apply_augmentations(images, params)
        for image, result, square in zip(
            images, results, params.cutout.int().tolist(), strict=True
        ):
            top, left, bottom, right = square
            assert bottom - top <= SIDE // 2 >= right - left
            mask = torch.zeros(SIDE, SIDE, dtype=torch.bool)
            mask[top:bottom, left:right] = True
            assert (result[:, mask] == 0).all()
            assert_close(result[:, ~mask], image[:, ~mask], **NEAR)


def test_colours_are_brightness_then_saturation_then_contrast(images):
    params = sample("colour")
    results = apply_augmentations(images, params)
    for image, result, numbers in zip(images, results, params.color.tolist(), strict=True):
        brightness, saturation, contrast = numbers
        assert -0.5 <= brightness <= 0.5
        assert 0 <= saturation <= 2
        assert 0.5 <= contrast <= 1.5
        expected = image + brightness
        expected = (expected - expected.mean(0)) * saturation + expected.mean(0)
        expected = (expected - expected.mean()) * contrast + expected.mean()
        assert_close(result, expected, **NEAR)


def test_scales_and_rotations_stay_in_their_range():
    scales = sample("scale", count=500).affine
    diagonal = scales[:, [0, 1], [0, 1]]
    assert 1 / 1.2 <= diagonal.min() <= diagonal.max() <= 1.2
    assert (scales[:, [0, 1], [1, 0]] == 0).all()
    for affine in sample("rotate", count=500).affine:
        assert_is_rotation(affine[:, :2])
        assert abs(math.asin(affine[1, 0])) <= math.pi / 12 + 1e-6


def test_every_image_gets_one_operation_and_all_are_drawn_alike():
    params = sample_augment_params(6000, SIDE, torch.Generator().manual_seed(0))
    identity = make_identity(6000)
    moved = ~(params.affine == identity.affine).all(2).all(1)
    cut = params.cutout[:, 2] > 0
    coloured = ~(params.color == identity.color).all(1)
    assert not ((moved & cut) | (moved & coloured) | (cut & coloured)).any()
    for drawn in (coloured, cut):
        assert drawn.double().mean().item() == pytest.approx(1 / len(AUGMENTATIONS), abs=0.02)


def test_every_image_has_its_own_and_gradients_pass(images):
    images.requires_grad_()
    params = sample_augment_params(4, SIDE, torch.Generator().manual_seed(3))
    results = apply_augmentations(images, params)
    for index in range(4):
        own = params.select(torch.tensor([index]))
        assert_close(results[index], apply_augmentations(images[index : index + 1], own)[0])
    results.sum().backward()
    assert images.grad.abs().sum() > 0


def test_an_oblong_image_is_moved_by_whole_pixels_and_turned_without_shear():
    side = (8, 24)
    images = torch.rand(40, 1, *side, generator=torch.Generator().manual_seed(0))
    params = sample("crop", count=40, side=side)
    moves = params.affine[:, :, 2] * torch.tensor([24, 8]) / 2  # right and down, in pixels
    assert_close(moves, moves.round(), rtol=0, atol=1e-4)
    assert moves.abs().amax(0).round().tolist() == [3, 1]
    assert apply_augmentations(images, params).shape == images.shape
    pixels = torch.diag(torch.tensor([24.0, 8.0]))  # the same map in pixels
    for affine in sample("rotate", count=40, side=side).affine:
        assert_is_rotation(pixels @ affine[:, :2] @ pixels.inverse())
    top, left, bottom, right = sample("cutout", count=400, side=side).cutout.unbind(1)
    assert ((bottom - top).max().item(), (right - left).max().item()) == (4, 12)
    assert (bottom.max().item(), right.max().item()) == (8, 24)


def test_half_precision_around_it_moves_no_pixel(images):
    params = sample("rotate", seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        half = apply_augmentations(images, params)
    assert_close(half, apply_augmentations(images, params), rtol=1e-5, atol=1e-5)
