"""Rulers: where weights are looked for, what a ruler says of itself, and the small network that needs none."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from privot.data import Public, Sensitive, Spec, load_dataset
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


def put(folder, name, **tensors):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors or {"x": torch.zeros(1)}, folder / name)
    return folder / name


def box(kind=Public, count=60, name="box", ordered=False):
    images = np.random.default_rng(0).random((count, 1, 8, 8), np.float32)
    labels = np.arange(count) % 3
    return kind(images, np.sort(labels) if ordered else labels, Spec((1, 8, 8), 3), name=name)


def test_missing_weights_are_asked_for_by_name_and_folder(empty_data_folders):
    with pytest.raises(DataError) as told:
        load_inception_extractor(CPU)
    for words in (
        INCEPTION_WEIGHTS,
        INCEPTION_WEIGHTS_WITH_LOGITS,
        str(empty_data_folders / "data" / "weights"),
        "--weights",
    ):
        assert words in str(told.value)
    assert "\n" not in str(told.value)


def test_weights_with_logits_come_first_and_a_path_before_all(empty_data_folders, stub):
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()[:8]  # noqa: E731
    plain = put(empty_data_folders / "data" / "weights", INCEPTION_WEIGHTS)
    assert digest(plain) in load_inception_extractor(CPU).description
    logits = put(
        empty_data_folders / "cache" / "weights",
        INCEPTION_WEIGHTS_WITH_LOGITS,
        **{"fc.weight": torch.rand(3, 4)},
    )
    assert digest(logits) in load_inception_extractor(CPU).description
    mine = put(empty_data_folders, "mine.safetensors", x=torch.ones(3))
    assert digest(mine) in load_inception_extractor(CPU, mine).description


def test_a_known_file_is_told_from_others(empty_data_folders, stub, monkeypatch):
    path = put(empty_data_folders, "w.safetensors")
    assert "not among the known files" in load_inception_extractor(CPU, path).description
    monkeypatch.setitem(
        INCEPTION_DIGESTS, hashlib.sha256(path.read_bytes()).hexdigest(), "as they should be"
    )
    ruler = load_inception_extractor(CPU, path)
    assert ruler.description.endswith("(as they should be)")
    assert (ruler.metric_prefix, ruler.is_public) == ("", True)
    assert str(Path(empty_data_folders)) not in ruler.description


def test_images_go_through_in_portions_and_whoever_is_told_sees_them_counted(
    empty_data_folders, stub
):
    ruler = load_inception_extractor(CPU, put(empty_data_folders, "w.safetensors"))
    images = torch.rand(45, 1, 2, 2)
    seen = []
    found = ruler.extract_features(images, lambda *step: seen.append(step))
    assert torch.equal(found, images.flatten(1))
    assert seen == [("Inception features", done, 45) for done in (20, 40, 45)]
    assert ruler.predict_probabilities is None


def test_probabilities_leave_the_bias_out(empty_data_folders, stub):
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ruler = load_inception_extractor(
        CPU, put(empty_data_folders, "w.safetensors", **{"fc.weight": weight})
    )
    images = torch.rand(5, 1, 2, 2)
    assert torch.allclose(
        ruler.predict_probabilities(images, ignore_progress),
        (images.flatten(1) @ weight.T).softmax(1),
        atol=1e-6,
    )


def test_the_domain_net_tells_digits_apart():
    """Its features must mean something: the nearest class mean finds the digit."""
    ruler = train_domain_extractor(load_dataset("digits", public=True), CPU)
    test = load_dataset("digits", "test", public=True).records()
    real = load_dataset("digits", public=True).records()
    known = ruler.extract_features(real.images, ignore_progress)
    found = ruler.extract_features(test.images, ignore_progress)
    means = torch.stack([known[real.labels == label].mean(0) for label in range(10)])
    assert (torch.cdist(found, means).argmin(1) == test.labels).double().mean() > 0.9
    assert ruler.metric_prefix == "domain_"


@pytest.mark.parametrize("kind", [Public, Sensitive])
def test_the_domain_net_is_as_public_as_its_records(kind):
    seen = []
    ruler = train_domain_extractor(
        box(kind, name="/home/ann/x.npz"),
        CPU,
        seed=4,
        progress=lambda *step, **facts: seen.append((step, facts)),
    )
    assert ruler.is_public is (kind is Public)
    assert seen == [(("training the domain network", epoch, 8), {}) for epoch in range(9)]
    assert "trained on 60 of these records (8 epochs" in ruler.description
    assert ruler.description.endswith("seed 4")
    assert "ann" not in ruler.description


def test_the_domain_net_replays_by_its_seed():
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    one, two, other = (
        train_domain_extractor(box(), CPU, seed).extract_features(images, ignore_progress)
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_the_domain_net_sees_every_class_of_a_sorted_file(monkeypatch):
    seen = []
    train = features.train_classifier
    monkeypatch.setattr(features, "MAX_DOMAIN_RECORDS", 20)
    monkeypatch.setattr(
        features,
        "train_classifier",
        lambda *args, **more: (seen.append(args[2]), train(*args, **more))[1],
    )
    train_domain_extractor(box(ordered=True), CPU)
    assert len(seen[0]) == 20
    assert seen[0].unique().tolist() == [0, 1, 2]
