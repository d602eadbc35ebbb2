"""Public images beside the sensitive ones: fitted to their shape, identified by digest, and never the data itself."""

import numpy as np
import pytest
import torch

from privot.data.dataset import Public, Sensitive
from privot.data.loading import load_dataset
from privot.data.public_images import hash_images, load_public_images
from privot.data.spec import Spec
from privot.errors import SettingError


@pytest.fixture
def save_images(tmp_path):
    def save(images, name="public.npz"):
        np.savez(tmp_path / name, x=images, y=np.arange(len(images)) % 2)
        return str(tmp_path / name)

    return save


def make_dataset(images, kind=Sensitive):
    return kind(images, np.arange(len(images)) % 2, Spec(images.shape[1:], 2), name="secret")


@pytest.mark.parametrize("inside", [(8, 8, 1), (16, 12, 3)])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (1, 28, 20)])
def test_images_take_the_shape_of_the_sensitive_ones(save_images, inside, shape):
    path = save_images(np.random.default_rng(0).integers(0, 256, (5, *inside), np.uint8))
    images, facts = load_public_images(path, make_dataset(np.zeros((2, *shape))))
    assert images.shape == (5, *shape)
    assert 0 <= images.min() <= images.max() <= 1
    assert facts["count"] == 5
    assert facts["sha256"] == hash_images(load_dataset(path, public=True))


def test_resized_images_keep_values_and_are_means(save_images):
    """One column of four is white: a point between the others would be black."""
    path = save_images(np.full((2, 1, 4, 4), 0.25, np.float32))
    images, _ = load_public_images(path, make_dataset(np.zeros((2, 1, 8, 6))))
    assert torch.allclose(images, torch.tensor(0.25))
    columns = np.zeros((2, 1, 32, 32), np.float32)
    columns[..., ::4] = 1
    path = save_images(columns)
    images, _ = load_public_images(path, make_dataset(np.zeros((2, 1, 8, 8))))
    assert torch.allclose(images[..., 1:-1], torch.tensor(0.25), atol=0.05)


def test_the_data_itself_is_refused_by_name(save_images, tmp_path):
    with pytest.raises(SettingError, match="itself"):
        load_public_images("digits", load_dataset("digits"))
    path = save_images(np.zeros((2, 8, 8), np.uint8))
    (tmp_path / "link.npz").symlink_to(path)
    (tmp_path / "x").mkdir()
    for same in (path, str(tmp_path / "link.npz"), str(tmp_path / "x" / ".." / "public.npz")):
        with pytest.raises(SettingError, match="itself"):
            load_public_images(same, load_dataset(path))


def test_a_refusal_says_nothing_of_the_records(save_images):
    """What is refused depends on names alone: sensitive data equal to the public file, or not, is treated alike."""
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 8, 8), np.uint8)
    path = save_images(images)
    equal, other = (
        load_public_images(path, make_dataset(secret)) for secret in (images, 255 - images)
    )
    assert equal[1] == other[1]
    assert torch.equal(equal[0], other[0])


def test_a_digest_is_of_every_record_however_it_is_stored():
    images = (np.arange(2001) % 251).astype(np.uint8)[:, None, None, None]
    digest = hash_images(make_dataset(images, Public))
    assert hash_images(make_dataset((images / 255).astype(np.float32), Public)) == digest
    assert hash_images(make_dataset(images[::-1].copy(), Public)) != digest
    for index in (0, 999, 1000, 1001, 2000):
        other = images.copy()
        other[index] += 1
        assert hash_images(make_dataset(other, Public)) != digest
