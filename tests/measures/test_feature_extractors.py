"""Extractors: where weights are searched, what they say of themselves, and the network without."""

import hashlib

import pytest
import torch
from safetensors.torch import save_file
from support.noise_data import make_generator, make_noise_data

from privot.data import Public, Sensitive, load_dataset
from privot.errors import DataError
from privot.measures import feature_extractors as features
from privot.measures.feature_extractors import (
    INCEPTION_DIGESTS,
    INCEPTION_WEIGHTS,
    INCEPTION_WEIGHTS_WITH_LOGITS,
    load_inception_extractor,
    train_domain_extractor,
)
from privot.runtime import ignore_progress

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def stub(monkeypatch):
    """In place of the network: pixels, and a last layer where the file holds one."""

    class Stub(torch.nn.Module):
        @classmethod
        def from_weights(cls, weights):
            net = cls()
            if "fc.weight" in weights:
                net.fc = torch.nn.Linear(4, 3)
                net.fc.weight.data = weights["fc.weight"]
                net.fc.bias.data = torch.full((3,), 9.0)
            return net

        def features(self, images):
            return images.flatten(1)

    monkeypatch.setattr(features, "Inception", Stub)


@pytest.fixture
def digits():
    return load_dataset("digits", public=True)


def save_weights(folder, name, **tensors):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors or {"x": torch.zeros(1)}, folder / name)
    return folder / name


def compute_digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_missing_weights_are_asked_for_by_name_and_folder(empty_data_folders):
    with pytest.raises(DataError) as refusal:
        load_inception_extractor(CPU)
    folder = str(empty_data_folders / "data" / "weights")
    for words in (INCEPTION_WEIGHTS, INCEPTION_WEIGHTS_WITH_LOGITS, folder, "--weights"):
        assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_weights_with_logits_come_first_and_a_path_before_all(empty_data_folders, stub):
    logits = {"fc.weight": torch.rand(3, 4)}
    for folder, name, tensors, given in (
        ("data/weights", INCEPTION_WEIGHTS, {}, False),
        ("cache/weights", INCEPTION_WEIGHTS_WITH_LOGITS, logits, False),
        (".", "mine.safetensors", {"x": torch.ones(3)}, True),
    ):
        path = save_weights(empty_data_folders / folder, name, **tensors)
        extractor = load_inception_extractor(CPU, path) if given else load_inception_extractor(CPU)
        assert compute_digest(path)[:8] in extractor.description


def test_a_published_file_is_distinguished_from_others(empty_data_folders, stub, monkeypatch):
    path = save_weights(empty_data_folders, "w.safetensors")
    assert "not among the known files" in load_inception_extractor(CPU, path).description
    monkeypatch.setitem(INCEPTION_DIGESTS, compute_digest(path), "as they should be")
    extractor = load_inception_extractor(CPU, path)
    assert extractor.description.endswith("(as they should be)")
    assert (extractor.metric_prefix, extractor.is_public) == ("", True)
    assert str(empty_data_folders) not in extractor.description


def test_images_go_through_in_chunks_and_progress_counts_them(empty_data_folders, stub):
    path = save_weights(empty_data_folders, "w.safetensors")
    extractor = load_inception_extractor(CPU, path)
    images = torch.rand(45, 1, 2, 2)
    steps = []
    features_ = extractor.extract_features(images, lambda *step: steps.append(step))
    assert torch.equal(features_, images.flatten(1))
    assert steps == [("Inception features", done, 45) for done in (20, 40, 45)]
    assert extractor.predict_probabilities is None


def test_probabilities_leave_the_bias_out(empty_data_folders, stub):
    weight = torch.randn(3, 4, generator=make_generator())
    path = save_weights(empty_data_folders, "w.safetensors", **{"fc.weight": weight})
    images = torch.rand(5, 1, 2, 2)
    probabilities = load_inception_extractor(CPU, path).predict_probabilities
    expected = (images.flatten(1) @ weight.T).softmax(1)
    assert torch.allclose(probabilities(images, ignore_progress), expected, atol=1e-6)


def test_the_domain_network_tells_digits_apart(digits):
    """Its features must mean something: the nearest class mean is that of the digit."""
    extractor = train_domain_extractor(digits, CPU)
    test = load_dataset("digits", "test", public=True).records()
    real = digits.records()
    real_features, test_features = (
        extractor.extract_features(data.images, ignore_progress) for data in (real, test)
    )
    means = torch.stack([real_features[real.labels == label].mean(0) for label in range(10)])
    nearest = torch.cdist(test_features, means).argmin(1)
    assert (nearest == test.labels).double().mean() > 0.9
    assert extractor.metric_prefix == "domain_"


@pytest.mark.parametrize("kind", [Public, Sensitive])
def test_the_domain_network_is_as_public_as_its_records(kind):
    steps = []
    data = make_noise_data(kind, name="/home/ann/x.npz")
    extractor = train_domain_extractor(
        data, CPU, seed=4, progress=lambda *step, **facts: steps.append((*step, facts))
    )
    assert extractor.is_public is (kind is Public)
    assert steps == [("training the domain network", epoch, 8, {}) for epoch in range(9)]
    assert "trained on 60 of these records (8 epochs" in extractor.description
    assert extractor.description.endswith("seed 4")
    assert "ann" not in extractor.description


def test_the_domain_network_replays_by_its_seed():
    images = torch.rand(4, 1, 8, 8, generator=make_generator())
    one, two, other = (
        train_domain_extractor(make_noise_data(), CPU, seed).extract_features(
            images, ignore_progress
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_the_domain_network_sees_every_class_of_a_sorted_file(monkeypatch):
    seen = []
    train = features.train_classifier

    def spy(*args, **more):
        seen.append(args[2])
        return train(*args, **more)

    monkeypatch.setattr(features, "MAX_DOMAIN_RECORDS", 20)
    monkeypatch.setattr(features, "train_classifier", spy)
    train_domain_extractor(make_noise_data(sort=True), CPU)
    assert len(seen[0]) == 20
    assert seen[0].unique().tolist() == [0, 1, 2]
