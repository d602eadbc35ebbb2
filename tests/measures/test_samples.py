"""What is measured, from wherever it comes; and no test on what was trained on."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from support.factories import make_release

from privot import io
from privot.data import Public, Sensitive, Spec, load_dataset
from privot.errors import DataError, PrivotError, ReleaseError, SettingError
from privot.measures import Samples, measure
from privot.measures.samples import (
    MAX_TEST_OVERLAP,
    check_matching_spec,
    load_training_data,
    refuse_overlap,
)
from privot.release import Release
from privot.release.artifact import Artifact


@pytest.fixture
def release(tmp_path):
    return make_release(data="digits").save(tmp_path / "merf-eps1.0")


def box(kind, images, classes=4, labels=None):
    images = np.asarray(images)
    return kind(
        images,
        np.arange(len(images)) % classes if labels is None else labels,
        Spec(images.shape[1:], classes),
        name="box",
    )


def noise(count, seed=0):
    return np.random.default_rng(seed).random((count, 1, 8, 8), np.float32)


def test_a_release_gives_its_samples(release):
    found = Samples.from_source(str(release), 9, seed=3)
    images, labels = found.release.sample(9, seed=3)
    assert torch.equal(found.images, images)
    assert torch.equal(found.labels, labels)
    assert (found.name, found.num_classes, found.class_names) == (
        "merf-eps1.0",
        3,
        ("cat", "dog", "ship"),
    )
    assert found.guarantee == found.release.guarantee
    assert found.guarantee.epsilon > 0


def test_an_npz_is_foreign_output(tmp_path):
    pixels = (noise(20) * 255).astype(np.uint8)[:, 0]
    np.savez(tmp_path / "theirs.npz", x=pixels, y=np.arange(20) % 4)
    found = Samples.from_source(str(tmp_path / "theirs.npz"), 100)
    assert (found.name, found.num_classes, found.release, found.guarantee) == (
        "theirs",
        4,
        None,
        None,
    )
    assert torch.equal((found.images * 255).round().byte()[:, 0], torch.from_numpy(pixels))
    assert found.labels.tolist() == [each % 4 for each in range(20)]


def test_a_folder_of_class_folders_is_foreign_output(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "gan-1.5" / name).mkdir(parents=True)
        for place in range(3):
            Image.fromarray(np.full((8, 8), 40 * place, np.uint8)).save(
                tmp_path / "gan-1.5" / name / f"{place}.png"
            )
    found = Samples.from_source(str(tmp_path / "gan-1.5"), 100)
    assert (found.name, found.num_classes, found.class_names) == (
        "gan-1.5",
        2,
        ("cat", "dog"),
    )  # gan-1.0 beside it stays another
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_the_same_number_must_be_the_same_class():
    named = Samples("ours", torch.rand(4, 1, 8, 8), torch.arange(4) % 2, 2, ("cat", "dog"))
    for names in (None, ("cat", "dog"), ("cat", "dog", "wolf")):
        check_matching_spec(
            named,
            Public(
                noise(6),
                np.arange(6) % 3,
                Spec((1, 8, 8), 3, class_names=names and (*names, "yak")[:3]),
            ),
        )
    with pytest.raises(SettingError, match="Class 0 is 'cat' in ours, but 'ant' in the test data"):
        check_matching_spec(
            named,
            Public(
                noise(6), np.arange(6) % 3, Spec((1, 8, 8), 3, class_names=("ant", "cat", "dog"))
            ),
        )


def test_a_built_in_is_its_train_split():
    found = Samples.from_source("digits", 10_000)
    real = load_dataset("digits", public=True).records()
    assert (found.name, found.num_classes, found.guarantee) == ("digits", 10, None)
    assert torch.equal(found.images, real.images)


def test_a_cut_is_drawn_by_the_seed_with_labels_beside_images():
    one, two, other = (Samples.from_source("digits", 50, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.images, two.images)
    assert not torch.equal(one.images, other.images)
    real = load_dataset("digits", public=True).records()
    for image, label in zip(one.images, one.labels, strict=True):
        assert label in real.labels[(real.images == image).flatten(1).all(1)]
    assert len({tuple(image.flatten().tolist()) for image in one.images}) == 50


@pytest.mark.parametrize("source", ["digit", "nothing.npz", "", "\0"])
def test_what_is_not_there_is_refused(source):
    with pytest.raises(PrivotError):
        Samples.from_source(source, 5)


def test_a_damaged_release_is_refused(release):
    (release / "manifest.json").write_text("{}")
    with pytest.raises(PrivotError, match="digest"):
        Samples.from_source(str(release), 5)


@pytest.mark.parametrize("kind", [Sensitive, Public])
def test_a_test_on_the_training_data_is_refused(kind):
    train = box(kind, noise(200))
    halves = np.concatenate([noise(200)[:100], noise(100, seed=9)])
    for test in (train, box(kind, noise(200)[::-1]), box(kind, halves), box(kind, noise(200)[:30])):
        with pytest.raises(DataError, match="The test data overlaps the training data"):
            refuse_overlap(test, train, "the training data")
    refuse_overlap(box(kind, noise(200, seed=1)), train, "the training data")


def test_a_few_twins_are_allowed():
    """Benchmarks hold some; one in a hundred is the limit."""
    train = noise(400)
    fresh = noise(400, seed=1)
    for twins in (0, 3, 4, 5):
        test = box(Public, np.concatenate([train[:twins], fresh[twins:]]))
        if twins > MAX_TEST_OVERLAP * 400:
            with pytest.raises(DataError, match="overlaps"):
                refuse_overlap(test, torch.from_numpy(train), "x")
        else:
            refuse_overlap(test, torch.from_numpy(train), "x")


def test_an_8_bit_copy_is_a_copy():
    train = noise(50)
    with pytest.raises(DataError, match="overlaps"):
        refuse_overlap(box(Public, (train * 255).round().astype(np.uint8)), box(Public, train), "x")


def test_overlap_is_refused_before_anything_is_measured(release):
    digits = load_dataset("digits", public=True)
    test = load_dataset("digits", "test", public=True)
    subject = Samples.from_source("digits", 100)
    for wrong, train, words in (
        (digits, digits, "the training data"),
        (digits, None, "the released images"),
        (test, test, "the training data"),
    ):
        with pytest.raises(DataError, match=f"overlaps {words}"):
            measure(subject, wrong, ["logistic"], training_data=train)


def test_the_data_of_a_release_is_found_by_its_name(release):
    found = load_training_data(Samples.from_source(str(release), 3))
    assert isinstance(found, Sensitive)
    assert found.name == "digits"


def test_a_release_of_the_digits_is_not_tested_on_what_it_was_trained_on(tmp_path):
    """Nobody names the training data here; the manifest does."""
    path = make_release(data="digits", classes=10, names=None).save(tmp_path / "release")
    with pytest.raises(DataError, match="overlaps the training data"):
        measure(
            Samples.from_source(str(path), 30), load_dataset("digits", public=True), ["logistic"]
        )
    assert measure(
        Samples.from_source(str(path), 30),
        load_dataset("digits", "test", public=True),
        ["gaussian_nb"],
    )


@pytest.mark.parametrize(
    "data", ["/home/ann/scans.npz", "nothing", "", None, 3, [], ["digits"], {}]
)
def test_other_data_is_not_looked_for(data):
    subject = Samples(
        "x", torch.rand(2, 1, 8, 8), torch.arange(2), 3, release=make_release(data=data)
    )
    assert load_training_data(subject) is None
    assert load_training_data(Samples("digits", torch.rand(2, 1, 8, 8), torch.arange(2), 3)) is None


def test_a_built_in_that_is_not_at_hand_is_no_obstacle(monkeypatch, tmp_path):
    monkeypatch.setattr(io, "list_data_folders", lambda: [tmp_path])
    assert (
        load_training_data(
            Samples(
                "x", torch.rand(2, 1, 8, 8), torch.arange(2), 3, release=make_release(data="mnist")
            )
        )
        is None
    )


def test_other_shapes_and_more_classes_are_refused():
    subject = Samples("x", torch.rand(4, 1, 8, 8), torch.arange(4), 4)
    check_matching_spec(subject, box(Public, noise(10), classes=4))
    check_matching_spec(subject, box(Public, noise(10), classes=5))
    with pytest.raises(
        SettingError,
        match="x has images of 1x8x8 and 4 classes, but the test data has images of 1x8x8 and 3 classes",
    ):
        check_matching_spec(subject, box(Public, noise(10), classes=3))
    with pytest.raises(SettingError, match="of 3x8x8 and 4 classes"):
        check_matching_spec(subject, box(Public, noise(12).reshape(4, 3, 8, 8), classes=4))


# Sets


def softened(soft="drawn"):
    """A set of 7 images, 4 of class 0, 1 of class 1, 2 of class 2, with soft labels unless ``soft`` is something else."""
    images = torch.rand(7, 1, 8, 8)
    labels = torch.tensor([0, 0, 2, 1, 0, 2, 0])
    soft = torch.rand(7, 3).softmax(1) if isinstance(soft, str) else soft
    return dataclasses.replace(make_release(), artifact=Artifact.from_images(images, labels, soft))


def test_a_set_is_measured_as_it_is_and_no_image_twice():
    release = softened()
    own = release.artifact.tensors
    for count in (7, 100):
        found = Samples.from_release(release, "x", count, seed=count)
        assert all(
            torch.equal(getattr(found, name), own[name])
            for name in ("images", "labels", "soft_labels")
        )


def test_soft_labels_stay_beside_their_images_when_a_set_is_cut():
    release = softened()
    found = Samples.from_release(release, "x", 6)
    own = release.artifact.tensors
    assert found.labels.tolist() == [0, 1, 2, 0, 1, 2]
    for image, soft in zip(found.images, found.soft_labels, strict=True):
        place = (own["images"] == image).flatten(1).all(1).nonzero().item()
        assert torch.equal(soft, own["soft_labels"][place])


def test_what_has_no_soft_labels_has_none(release, tmp_path):
    assert Samples.from_source(str(release), 5).soft_labels is None
    assert Samples.from_release(softened(None), "x", 100).soft_labels is None
    assert Samples.from_source("digits", 10).soft_labels is None


def test_soft_labels_go_to_disk_and_back_and_reach_the_networks(tmp_path):
    release = softened()
    release.save(tmp_path / "set")
    found = Samples.from_source(str(tmp_path / "set"), 100)
    assert torch.equal(found.soft_labels, release.artifact.tensors["soft_labels"])
    readings = measure(found, box(Public, noise(20), classes=3), ["cnn", "gaussian_nb"])
    assert ["soft labels" in each.protocol for each in readings] == [True, False]


@pytest.mark.parametrize(
    "harm",
    [
        lambda soft: soft[:6],
        lambda soft: soft[:, :2],
        lambda soft: soft.double(),
        lambda soft: soft * 1.01,
        lambda soft: soft.index_fill(0, torch.tensor([3]), float("nan")),
        lambda soft: soft.index_fill(0, torch.tensor([3]), float("inf")),
        lambda soft: soft + torch.tensor([2.0, -2.0, 0.0]),
    ],
    ids=["rows", "columns", "precision", "sum", "nan", "inf", "negative"],
)
def test_soft_labels_that_are_no_probabilities_are_refused(tmp_path, harm):
    folder = tmp_path / "set"
    release = softened()
    assert release.artifact.is_consistent_with(release.spec)
    release.save(folder)
    save_file(
        {
            **release.artifact.tensors,
            "soft_labels": harm(release.artifact.tensors["soft_labels"]).contiguous(),
        },
        folder / "tensors.safetensors",
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {
        "tensors.safetensors": hashlib.sha256(
            (folder / "tensors.safetensors").read_bytes()
        ).hexdigest()
    }
    (folder / "manifest.json").write_text(text := json.dumps(manifest))
    (folder / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest() + "\n")
    with pytest.raises(ReleaseError, match="its tensors do not match its manifest"):
        Release.load(folder)
