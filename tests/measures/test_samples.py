"""What is measured, from wherever it comes; and no test on what was trained on."""

import contextlib
import dataclasses
import hashlib
import json
from pathlib import Path

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

TWO = {"labels": torch.arange(2), "num_classes": 3}


@pytest.fixture
def saved(tmp_path):
    """The path of a release."""
    return str(make_release(data="digits").save(tmp_path / "merf-eps1.0"))


def draw_noise(count, seed=0):
    return np.random.default_rng(seed).random((count, 1, 8, 8), np.float32)


def make_data(images, kind=Public, classes=4, names=None):
    spec = Spec(images.shape[1:], classes, class_names=names)
    return kind(images, np.arange(len(images)) % classes, spec, name="noise")


# Sources


def test_a_release_gives_its_samples(saved):
    samples = Samples.from_source(saved, 9, seed=3)
    images, labels = samples.release.sample(9, seed=3)
    assert torch.equal(samples.images, images)
    assert torch.equal(samples.labels, labels)
    assert (samples.name, samples.num_classes) == ("merf-eps1.0", 3)
    assert samples.class_names == ("cat", "dog", "ship")
    assert samples.guarantee == samples.release.guarantee
    assert samples.guarantee.epsilon > 0
    assert samples.soft_labels is None


def test_an_npz_is_foreign_output(tmp_path):
    pixels = (draw_noise(20) * 255).astype(np.uint8)[:, 0]
    np.savez(tmp_path / "theirs.npz", x=pixels, y=np.arange(20) % 4)
    samples = Samples.from_source(str(tmp_path / "theirs.npz"), 100)
    assert (samples.name, samples.num_classes) == ("theirs", 4)
    assert (samples.release, samples.guarantee) == (None, None)
    assert torch.equal((samples.images * 255).round().byte()[:, 0], torch.from_numpy(pixels))
    assert samples.labels.tolist() == [number % 4 for number in range(20)]


def test_a_folder_of_class_folders_is_foreign_output(tmp_path):
    for name in ("cat", "dog"):
        folder = tmp_path / "gan-1.5" / name
        folder.mkdir(parents=True)
        for number in range(3):
            pixels = np.full((8, 8), 40 * number, np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    samples = Samples.from_source(str(tmp_path / "gan-1.5"), 100)
    assert (samples.name, samples.num_classes) == ("gan-1.5", 2)  # gan-1.0 stays another
    assert samples.class_names == ("cat", "dog")
    assert samples.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_built_in_is_its_train_split_cut_by_the_seed():
    whole = Samples.from_source("digits", 10_000)
    real = load_dataset("digits", public=True).records()
    assert (whole.name, whole.num_classes) == ("digits", 10)
    assert (whole.guarantee, whole.soft_labels) == (None, None)
    assert torch.equal(whole.images, real.images)
    one, two, other = (Samples.from_source("digits", 50, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.images, two.images)
    assert not torch.equal(one.images, other.images)
    for image, label in zip(one.images, one.labels, strict=True):
        assert label in real.labels[(real.images == image).flatten(1).all(1)]
    assert len(one.images.unique(dim=0)) == 50


def test_refuses_missing_sources_and_a_damaged_release(saved):
    for source in ("digit", "nothing.npz", "", "\0"):
        with pytest.raises(PrivotError):
            Samples.from_source(source, 5)
    Path(saved, "manifest.json").write_text("{}")
    with pytest.raises(PrivotError, match="digest"):
        Samples.from_source(saved, 5)


@pytest.mark.parametrize(
    ("classes", "names", "shape", "reason"),
    [
        (2, None, (1, 8, 8), ""),
        (3, None, (1, 8, 8), ""),
        (2, ("cat", "dog"), (1, 8, 8), ""),
        (3, ("cat", "dog", "wolf"), (1, 8, 8), ""),
        (3, ("ant", "cat", "dog"), (1, 8, 8), "Class 0 is 'cat' in ours, but 'ant' in the test"),
        (1, None, (1, 8, 8), "ours has images of 1x8x8 and 2 classes, but .* 1x8x8 and 1 classes"),
        (2, None, (3, 8, 8), "of 3x8x8 and 2 classes"),
    ],
)
def test_the_same_number_must_be_the_same_class_of_the_same_shape(classes, names, shape, reason):
    labels = torch.arange(4) % 2
    ours = Samples("ours", torch.rand(4, 1, 8, 8), labels, 2, names and ("cat", "dog"))
    data = make_data(np.zeros((6, *shape), np.float32), classes=classes, names=names)
    with pytest.raises(SettingError, match=reason) if reason else contextlib.nullcontext():
        check_matching_spec(ours, data)


# No test on what was trained on


@pytest.mark.parametrize("kind", [Sensitive, Public])
def test_a_test_on_the_training_data_is_refused(kind):
    noise = draw_noise(200)
    train = make_data(noise, kind)
    halves = np.concatenate([noise[:100], draw_noise(100, seed=9)])
    bytes_ = (noise * 255).round().astype(np.uint8)  # an 8-bit copy is a copy
    for images in (noise, noise[::-1], halves, noise[:30], bytes_):
        with pytest.raises(DataError, match="The test data overlaps the training data"):
            refuse_overlap(make_data(images, kind), train, "the training data")
    refuse_overlap(make_data(draw_noise(200, seed=1), kind), train, "the training data")


@pytest.mark.parametrize("twins", [0, 3, 4, 5])
def test_a_few_twins_are_allowed(twins):
    """Benchmarks hold some; one in a hundred is the limit."""
    train = draw_noise(400)
    test = make_data(np.concatenate([train[:twins], draw_noise(400, seed=1)[twins:]]))
    refused = pytest.raises(DataError, match="overlaps")
    with refused if twins > MAX_TEST_OVERLAP * 400 else contextlib.nullcontext():
        refuse_overlap(test, torch.from_numpy(train), "x")


def test_overlap_is_refused_before_anything_is_measured(tmp_path):
    digits = load_dataset("digits", public=True)
    test = load_dataset("digits", "test", public=True)
    real = Samples.from_source("digits", 100)
    # of a release nobody names the training data; the manifest does
    path = make_release(data="digits", classes=10, names=None).save(tmp_path / "release")
    released = Samples.from_source(str(path), 30)
    for samples, wrong, train, words in (
        (real, digits, digits, "the training data"),
        (real, digits, None, "the released images"),
        (real, test, test, "the training data"),
        (released, digits, None, "the training data"),
    ):
        with pytest.raises(DataError, match=f"overlaps {words}"):
            measure(samples, wrong, ["logistic"], training_data=train)
    assert measure(released, test, ["gaussian_nb"])


def test_the_data_of_a_release_is_loaded_by_its_name(saved, monkeypatch, tmp_path):
    data = load_training_data(Samples.from_source(saved, 3))
    assert isinstance(data, Sensitive)
    assert data.name == "digits"
    foreign = Samples("digits", torch.rand(2, 1, 8, 8), **TWO)
    assert load_training_data(foreign) is None
    monkeypatch.setattr(io, "list_data_folders", lambda: [tmp_path])
    # a built-in whose files are missing, and what is no built-in
    for name in ("mnist", "/home/ann/scans.npz", "nothing", "", None, 3, [], ["digits"], {}):
        release = make_release(data=name)
        samples = Samples("x", torch.rand(2, 1, 8, 8), **TWO, release=release)
        assert load_training_data(samples) is None


# Sets


def make_set(soft=True):
    """7 images: 4 of class 0, 1 of class 1, 2 of class 2, with soft labels or without."""
    labels = torch.tensor([0, 0, 2, 1, 0, 2, 0])
    soft_labels = torch.rand(7, 3).softmax(1) if soft else None
    artifact = Artifact.from_images(torch.rand(7, 1, 8, 8), labels, soft_labels)
    return dataclasses.replace(make_release(), artifact=artifact)


def test_a_set_is_measured_as_it_is_and_no_image_twice():
    release = make_set()
    own = release.artifact.tensors
    for count in (7, 100):
        samples = Samples.from_release(release, "x", count, seed=count)
        for name in ("images", "labels", "soft_labels"):
            assert torch.equal(getattr(samples, name), own[name])
    assert Samples.from_release(make_set(soft=False), "x", 100).soft_labels is None


def test_soft_labels_stay_beside_their_images_when_a_set_is_cut():
    release = make_set()
    samples = Samples.from_release(release, "x", 6)
    own = release.artifact.tensors
    assert samples.labels.tolist() == [0, 1, 2, 0, 1, 2]
    for image, soft in zip(samples.images, samples.soft_labels, strict=True):
        position = (own["images"] == image).flatten(1).all(1).nonzero().item()
        assert torch.equal(soft, own["soft_labels"][position])


def test_soft_labels_go_to_disk_and_back_and_reach_the_networks(tmp_path):
    release = make_set()
    release.save(tmp_path / "set")
    samples = Samples.from_source(str(tmp_path / "set"), 100)
    assert torch.equal(samples.soft_labels, release.artifact.tensors["soft_labels"])
    results = measure(samples, make_data(draw_noise(20), classes=3), ["cnn", "gaussian_nb"])
    assert ["soft labels" in result.protocol for result in results] == [True, False]


@pytest.mark.parametrize(
    "damage",
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
def test_soft_labels_that_are_no_probabilities_are_refused(tmp_path, damage):
    release = make_set()
    assert release.artifact.is_consistent_with(release.spec)
    folder = Path(release.save(tmp_path / "set"))
    path = folder / "tensors.safetensors"
    soft = damage(release.artifact.tensors["soft_labels"]).contiguous()
    save_file({**release.artifact.tensors, "soft_labels": soft}, path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.sha256").write_text(f"{digest}\n")
    with pytest.raises(ReleaseError, match="its tensors do not match its manifest"):
        Release.load(folder)
