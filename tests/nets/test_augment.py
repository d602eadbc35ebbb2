"""Augmentations are what the papers say, each by its own numbers, and gradients pass through them."""

import math

import pytest
import torch

from privot.nets.augment import (
    AUGMENTATIONS,
    AugmentParams,
    apply_augmentations,
    sample_augment_params,
)

SIDE = 16


@pytest.fixture
def images():
    return torch.rand(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def still(count=4):
    return AugmentParams(
        torch.eye(2, 3).repeat(count, 1, 1),
        torch.zeros(count, 4),
        torch.tensor([0.0, 1.0, 1.0]).repeat(count, 1),
    )


def only(name, count=4, seed=0):
    return sample_augment_params(count, SIDE, torch.Generator().manual_seed(seed), (name,))


def test_nothing_drawn_changes_nothing(images):
    torch.testing.assert_close(apply_augmentations(images, still()), images, rtol=1e-4, atol=1e-4)


def test_a_crop_is_a_shift_by_whole_pixels_with_black_from_outside(images):
    for seed in range(8):
        drawn = only("crop", seed=seed)
        moved = apply_augmentations(images, drawn)
        for image, result, plane in zip(images, moved, drawn.affine, strict=True):
            right, down = (round(float(each) * SIDE / 2) for each in plane[:, 2])
            assert max(abs(right), abs(down)) <= 2
            wanted = torch.zeros_like(image)
            rows = range(max(0, -down), min(SIDE, SIDE - down))
            columns = range(max(0, -right), min(SIDE, SIDE - right))
            for row in rows:
                for column in columns:
                    wanted[:, row, column] = image[:, row + down, column + right]
            torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3)


def test_a_flip_is_a_mirror_or_nothing(images):
    found = set()
    for seed in range(6):
        for image, result in zip(
            images, apply_augmentations(images, only("flip", seed=seed)), strict=True
        ):
            kind = [torch.allclose(result, each, atol=1e-3) for each in (image, image.flip(2))]
            assert any(kind)
            found.add(kind.index(True))
    assert found == {0, 1}


def test_a_cutout_is_a_black_square_of_half_a_side(images):
    for seed in range(6):
        drawn = only("cutout", seed=seed)
        for image, result, (top, left, bottom, right) in zip(
            images + 1,
            apply_augmentations(images + 1, drawn),
            drawn.cutout.int().tolist(),
            strict=True,
        ):
            assert bottom - top <= SIDE // 2 >= right - left
            mask = torch.zeros(SIDE, SIDE, dtype=torch.bool)
            mask[top:bottom, left:right] = True
            assert (result[:, mask] == 0).all()
            torch.testing.assert_close(result[:, ~mask], image[:, ~mask], rtol=1e-3, atol=1e-3)


def test_colours_are_brightness_then_saturation_then_contrast(images):
    drawn = only("colour")
    for image, result, (bright, vivid, sharp) in zip(
        images, apply_augmentations(images, drawn), drawn.color.tolist(), strict=True
    ):
        assert -0.5 <= bright <= 0.5
        assert 0 <= vivid <= 2
        assert 0.5 <= sharp <= 1.5
        wanted = image + bright
        wanted = (wanted - wanted.mean(0)) * vivid + wanted.mean(0)
        wanted = (wanted - wanted.mean()) * sharp + wanted.mean()
        torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3)


def test_scales_and_turns_stay_in_their_range():
    for plane in sample_augment_params(
        500, SIDE, torch.Generator().manual_seed(0), ("scale",)
    ).affine:
        assert 1 / 1.2 <= plane[0, 0] <= 1.2
        assert 1 / 1.2 <= plane[1, 1] <= 1.2
        assert plane[0, 1] == plane[1, 0] == 0
    for plane in sample_augment_params(
        500, SIDE, torch.Generator().manual_seed(0), ("rotate",)
    ).affine:
        turn = plane[:, :2]
        torch.testing.assert_close(turn @ turn.T, torch.eye(2), rtol=1e-5, atol=1e-5)
        assert abs(math.asin(turn[1, 0])) <= math.pi / 12 + 1e-6


def test_one_operation_is_drawn_for_each_and_all_are_drawn_alike():
    drawn = sample_augment_params(6000, SIDE, torch.Generator().manual_seed(0))
    plain = still(6000)
    moved = ~(drawn.affine == plain.affine).all(2).all(1)
    holed = drawn.cutout[:, 2] > 0
    coloured = ~(drawn.color == plain.color).all(1)
    assert not (moved & holed).any()
    assert not (moved & coloured).any()
    assert not (holed & coloured).any()
    assert coloured.double().mean().item() == pytest.approx(1 / len(AUGMENTATIONS), abs=0.02)
    assert drawn.cutout[:, 2].gt(0).double().mean().item() == pytest.approx(
        1 / len(AUGMENTATIONS), abs=0.02
    )


def test_each_image_has_its_own_and_gradients_pass(images):
    images.requires_grad_()
    drawn = sample_augment_params(4, SIDE, torch.Generator().manual_seed(3))
    result = apply_augmentations(images, drawn)
    for place in range(4):
        torch.testing.assert_close(
            result[place],
            apply_augmentations(images[place : place + 1], drawn.select(torch.tensor([place])))[0],
        )
    result.sum().backward()
    assert images.grad.abs().sum() > 0


def test_an_oblong_image_is_moved_by_whole_pixels_and_turned_without_shear():
    images = torch.rand(40, 1, 8, 24, generator=torch.Generator().manual_seed(0))
    drawn = sample_augment_params(40, (8, 24), torch.Generator().manual_seed(0), ("crop",))
    moves = drawn.affine[:, :, 2] * torch.tensor([24, 8]) / 2  # right and down, in pixels
    torch.testing.assert_close(moves, moves.round(), rtol=0, atol=1e-4)
    assert moves.abs().amax(0).round().tolist() == [3, 1]
    assert apply_augmentations(images, drawn).shape == images.shape
    pixels = torch.diag(torch.tensor([24.0, 8.0]))  # the same map between places in pixels
    for plane in sample_augment_params(
        40, (8, 24), torch.Generator().manual_seed(0), ("rotate",)
    ).affine:
        turn = pixels @ plane[:, :2] @ pixels.inverse()
        torch.testing.assert_close(turn @ turn.T, torch.eye(2), rtol=1e-5, atol=1e-5)
    top, left, bottom, right = sample_augment_params(
        400, (8, 24), torch.Generator().manual_seed(0), ("cutout",)
    ).cutout.unbind(1)
    assert ((bottom - top).max().item(), (right - left).max().item()) == (4, 12)
    assert (bottom.max().item(), right.max().item()) == (8, 24)


def test_half_precision_around_it_moves_no_pixel(images):
    drawn = sample_augment_params(4, SIDE, torch.Generator().manual_seed(2), ("rotate",))
    with torch.autocast("cpu", torch.bfloat16):
        found = apply_augmentations(images, drawn)
    torch.testing.assert_close(found, apply_augmentations(images, drawn), rtol=1e-5, atol=1e-5)
