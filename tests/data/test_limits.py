"""The first number that is refused, and the last that is not: of specs, sizes, sides and files that were cut."""

import numpy as np
import pytest
import torch

from privot.data.dataset import CHECK_CHUNK_SIZE, Public, Sensitive
from privot.data.images import decode_image, to_channels_first
from privot.data.public_images import hash_images, load_public_images
from privot.data.spec import MAX_IMAGE_SIDE, Spec
from privot.data.tabular import SensitiveTable
from privot.errors import DataError
from privot.local.channels import Laplace, Projection
from privot.local.dataset import PrivatizedDataset, concatenate_privatized
from privot.local.privatize import privatize


@pytest.mark.parametrize(
    "facts",
    [
        ((1, 1, MAX_IMAGE_SIDE), 1),
        ((3, MAX_IMAGE_SIDE, 1), 1),
        ((1, 1, 1), 100_000),
        ((1, 1, 1), 1, 1),
        ((1, 1, 1), 2, None, (0, 3)),
        ((1, 1, 1), 1, 4, None, None, None, 4),
        ((1, 1, 1), 1, None, None, None, None, 10**9),
        ((1, 1, 1), 1, None, None, None, None, 1),
    ],
)
def test_the_last_that_is_taken(facts):
    spec = Spec(*facts)
    assert Spec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    "facts",
    [
        ((1, 1, MAX_IMAGE_SIDE + 1), 1),
        ((3, MAX_IMAGE_SIDE + 1, 1), 1),
        ((1, 0, 1), 1),
        ((1, 1, 0), 1),
        ((2, 1, 1), 1),
        ((4, 1, 1), 1),
        ((0, 1, 1), 1),
        ((1, 1, 1), 100_001),
        ((1, 1, 1), 0),
        ((1, 1, 1), 1, 0),
        ((1, 1, 1), 1, -1),
        ((1, 1, 1), 2, None, (4, -1)),
        ((1, 1, 1), 2, None, (4,)),
        ((1, 1, 1), 2, None, None, ("a",)),
        ((1, 1, 1), 1, 4, None, None, None, 5),
        ((1, 1, 1), 1, None, None, None, None, 10**9 + 1),
        ((1, 1, 1), 1, None, None, None, None, 0),
        ((1, 1), 1),
        ((1, 1, 1.5), 1),
    ],
)
def test_the_first_that_is_refused(facts):
    with pytest.raises(DataError):
        Spec(*facts)


def test_pictures_with_colours_may_be_mirrored_unless_told():
    said = [
        Spec((channels, 1, 1), 1, flip_invariant=mirror).is_flip_invariant
        for channels in (1, 3)
        for mirror in (None, True, False)
    ]
    assert said == [False, True, False, True, True, False]


@pytest.mark.parametrize(
    ("value", "fine"),
    [(0.0, True), (1.0, True), (-1e-6, False), (1 + 1e-6, False), (np.nan, False)],
)
@pytest.mark.parametrize("place", [0, CHECK_CHUNK_SIZE, CHECK_CHUNK_SIZE + 2])
def test_every_record_is_looked_at(value, fine, place):
    images = np.full((CHECK_CHUNK_SIZE + 3, 1, 1, 1), 0.5)
    images[place] = value
    spec = Spec((1, 1, 1), 1)
    if fine:
        Sensitive(images, np.zeros(len(images), int), spec)
    else:
        with pytest.raises(DataError):
            Sensitive(images, np.zeros(len(images), int), spec)
    mended = (
        Public(images, np.zeros(len(images), int), spec, repair=True).records().images.flatten()
    )
    assert mended[place] == (0 if np.isnan(value) else min(max(value, 0), 1))
    assert (mended == 0.5).sum() == CHECK_CHUNK_SIZE + 2


# Public pictures


def beside(tmp_path, pictures, shape):
    np.savez(tmp_path / "public.npz", x=pictures, y=np.arange(len(pictures)) % 2)
    box = Sensitive(np.zeros((2, *shape)), np.arange(2), Spec(shape, 2), name="box")
    return load_public_images(str(tmp_path / "public.npz"), box)[0]


def test_sides_are_fitted_and_values_stay(tmp_path):
    images = beside(tmp_path, np.full((2, 1, 4, 4), 0.25, np.float32), (1, 8, 6))
    assert images.shape == (2, 1, 8, 6)
    assert torch.allclose(images, torch.tensor(0.25))


def test_small_pictures_are_means_of_large_ones(tmp_path):
    """One column of four is white: a point between the others would be black."""
    pictures = np.zeros((2, 1, 32, 32), np.float32)
    pictures[..., ::4] = 1
    assert torch.allclose(
        beside(tmp_path, pictures, (1, 8, 8))[..., 1:-1], torch.tensor(0.25), atol=0.05
    )


def test_a_digest_is_of_every_record_however_it_is_stored():
    images = (np.arange(2001) % 251).astype(np.uint8)[:, None, None, None]
    box = Public(images, np.zeros(2001, int), Spec((1, 1, 1), 1))
    assert hash_images(box) == hash_images(
        Public((images / 255).astype(np.float32), np.zeros(2001, int), box.spec)
    )
    for place in (0, 999, 1000, 1001, 2000):
        other = images.copy()
        other[place] += 1
        assert hash_images(Public(other, np.zeros(2001, int), box.spec)) != hash_images(box)


# Files


@pytest.mark.parametrize("lost", [1, 7, 16])
def test_a_header_that_was_cut_is_said_to_be_cut(tmp_path, lost):
    box = privatize(
        SensitiveTable(np.zeros((3, 2))),
        Laplace.calibrate(1.0, projection=Projection(shape=(1, 1, 2))),
        ledger=tmp_path / "book.jsonl",
    )
    raw = box.save(tmp_path / "sent.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(raw[: 8 + int.from_bytes(raw[:8], "little") - lost])
    with pytest.raises(DataError, match="is truncated"):
        PrivatizedDataset.load(tmp_path / "cut.safetensors")


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((2, 5, 4), (2, 1, 5, 4)),
        ((2, 5, 4, 3), (2, 3, 5, 4)),
        ((2, 5, 4, 1), (2, 1, 5, 4)),
        ((2, 3, 5, 4), (2, 3, 5, 4)),
        ((2, 1, 5, 3), (2, 1, 5, 3)),
        ((2, 5, 4, 2), (2, 5, 4, 2)),
    ],
)
def test_where_the_channels_are(shape, wanted):
    assert to_channels_first(np.zeros(shape), "x").shape == wanted


@pytest.mark.parametrize("shape", [(2, 5), (1, 2, 3, 4, 5)])
def test_arrays_that_are_no_images(shape):
    with pytest.raises(DataError, match="of shape"):
        to_channels_first(np.zeros(shape), "x")


def test_sixteen_bits_become_the_upper_eight(tmp_path):
    from PIL import Image

    Image.fromarray(np.array([[0, 255], [256, 65535]], np.uint16)).save(tmp_path / "deep.png")
    assert decode_image(tmp_path / "deep.png", "deep").tolist() == [[[0, 0], [1, 255]]]


@pytest.mark.parametrize("place", [1, 2])
def test_files_of_another_channel_or_twice_the_same_are_not_joined(tmp_path, place):
    def sent(epsilon, name):
        channel = Laplace.calibrate(epsilon, projection=Projection(shape=(1, 1, 2)))
        return privatize(
            SensitiveTable(np.zeros((3, 2))), channel, ledger=tmp_path / f"{name}.jsonl"
        )

    boxes = [sent(1.0, each) for each in range(3)]
    assert len(concatenate_privatized(boxes)) == 9
    with pytest.raises(DataError, match="another channel"):
        concatenate_privatized(
            [sent(2.0, "other") if each == place else box for each, box in enumerate(boxes)]
        )
    with pytest.raises(DataError, match="same contents"):
        concatenate_privatized([*boxes, boxes[place]])


def test_a_table_is_images_of_one_row_and_one_class():
    assert SensitiveTable(np.zeros((5, 3))).spec == Spec((1, 1, 3), 1, 5)
