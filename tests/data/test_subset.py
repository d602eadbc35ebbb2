"""Public pictures beside the sensitive ones: fitted to their shape, told by digest, and never the data itself."""

import numpy as np
import pytest
import torch

from privot.data.dataset import Public, Sensitive
from privot.data.loading import load_dataset
from privot.data.public_images import hash_images, load_public_images
from privot.data.spec import Spec
from privot.errors import SettingError

RNG = np.random.default_rng(0)


def box(shape, count=6, kind=Sensitive, name="secret"):
    return kind(
        RNG.random((count, *shape), np.float32), np.arange(count) % 2, Spec(shape, 2), name=name
    )


def saved(path, shape, count=5):
    np.savez(path, x=RNG.integers(0, 256, (count, *shape), np.uint8), y=np.arange(count) % 2)
    return str(path)


@pytest.mark.parametrize("inside", [(8, 8, 1), (16, 12, 3)])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (1, 28, 20)])
def test_pictures_take_the_shape_of_the_sensitive_ones(tmp_path, inside, shape):
    images, facts = load_public_images(saved(tmp_path / "open.npz", inside), box(shape))
    assert images.shape == (5, *shape)
    assert 0 <= images.min() <= images.max() <= 1
    assert facts["count"] == 5
    assert facts["sha256"] == hash_images(load_dataset(tmp_path / "open.npz", public=True))


def test_the_data_itself_is_refused_by_name(tmp_path):
    with pytest.raises(SettingError, match="itself"):
        load_public_images("digits", load_dataset("digits"))
    path = saved(tmp_path / "mine.npz", (8, 8, 1))
    (tmp_path / "link.npz").symlink_to(path)
    for same in (path, str(tmp_path / "link.npz"), str(tmp_path / "x" / ".." / "mine.npz")):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(SettingError, match="itself"):
            load_public_images(same, load_dataset(path))


def test_a_refusal_says_nothing_of_the_records(tmp_path):
    """What is refused depends on names alone: sensitive data equal to the public file, or not, is treated alike."""
    path = saved(tmp_path / "open.npz", (8, 8, 1))
    known = load_dataset(path, public=True).records()
    equal = Sensitive(known.images.numpy(), known.labels.numpy(), Spec((1, 8, 8), 2), name="secret")
    other = Sensitive(
        1 - known.images.numpy(), known.labels.numpy(), Spec((1, 8, 8), 2), name="secret"
    )
    one = load_public_images(path, equal)
    two = load_public_images(path, other)
    assert one[1] == two[1]
    assert one[1]["sha256"] == hash_images(load_dataset(path, public=True))
    assert torch.equal(one[0], two[0])


def test_a_digest_is_of_the_pictures_however_they_are_stored():
    images = RNG.integers(0, 256, (4, 1, 8, 8), np.uint8)
    one, two = (
        Public(each, np.arange(4) % 2, Spec((1, 8, 8), 2))
        for each in (images, images.astype(np.float32) / 255)
    )
    assert hash_images(one) == hash_images(two)
    assert hash_images(one) != hash_images(
        Public(images[::-1].copy(), np.arange(4) % 2, Spec((1, 8, 8), 2))
    )
