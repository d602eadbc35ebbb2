"""Rulers: where weights are looked for, what a ruler says of itself, and the small network that needs none."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from privot.data import Public, Sensitive, Spec, load
from privot.errors import DataError
from privot.measures import feature_extractors as features
from privot.measures.feature_extractors import KNOWN, STANDARD, WITH_LOGITS, domain, inception
from privot.runtime import silent

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


def test_missing_weights_are_asked_for_by_name_and_folder(nowhere):
    with pytest.raises(DataError) as told:
        inception(CPU)
    for words in (STANDARD, WITH_LOGITS, str(nowhere / "data" / "weights"), "--weights"):
        assert words in str(told.value)
    assert "\n" not in str(told.value)


def test_weights_with_logits_come_first_and_a_path_before_all(nowhere, stub):
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()[:8]  # noqa: E731
    plain = put(nowhere / "data" / "weights", STANDARD)
    assert digest(plain) in inception(CPU).text
    logits = put(nowhere / "cache" / "weights", WITH_LOGITS, **{"fc.weight": torch.rand(3, 4)})
    assert digest(logits) in inception(CPU).text
    mine = put(nowhere, "mine.safetensors", x=torch.ones(3))
    assert digest(mine) in inception(CPU, mine).text


def test_a_known_file_is_told_from_others(nowhere, stub, monkeypatch):
    path = put(nowhere, "w.safetensors")
    assert "not among the known files" in inception(CPU, path).text
    monkeypatch.setitem(KNOWN, hashlib.sha256(path.read_bytes()).hexdigest(), "as they should be")
    ruler = inception(CPU, path)
    assert ruler.text.endswith("(as they should be)")
    assert (ruler.prefix, ruler.public) == ("", True)
    assert str(Path(nowhere)) not in ruler.text


def test_images_go_through_in_portions_and_whoever_is_told_sees_them_counted(nowhere, stub):
    ruler = inception(CPU, put(nowhere, "w.safetensors"))
    images = torch.rand(45, 1, 2, 2)
    seen = []
    found = ruler.features(images, lambda *step: seen.append(step))
    assert torch.equal(found, images.flatten(1))
    assert seen == [("Inception features", done, 45) for done in (20, 40, 45)]
    assert ruler.probabilities is None


def test_probabilities_leave_the_bias_out(nowhere, stub):
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ruler = inception(CPU, put(nowhere, "w.safetensors", **{"fc.weight": weight}))
    images = torch.rand(5, 1, 2, 2)
    assert torch.allclose(
        ruler.probabilities(images, silent), (images.flatten(1) @ weight.T).softmax(1), atol=1e-6
    )


def test_the_domain_net_tells_digits_apart():
    """Its features must mean something: the nearest class mean finds the digit."""
    ruler = domain(load("digits", public=True), CPU)
    test = load("digits", "test", public=True).records()
    real = load("digits", public=True).records()
    known = ruler.features(real.images, silent)
    found = ruler.features(test.images, silent)
    means = torch.stack([known[real.labels == label].mean(0) for label in range(10)])
    assert (torch.cdist(found, means).argmin(1) == test.labels).double().mean() > 0.9
    assert ruler.prefix == "domain_"


@pytest.mark.parametrize("kind", [Public, Sensitive])
def test_the_domain_net_is_as_public_as_its_records(kind):
    seen = []
    ruler = domain(
        box(kind, name="/home/ann/x.npz"),
        CPU,
        seed=4,
        progress=lambda *step, **facts: seen.append((step, facts)),
    )
    assert ruler.public is (kind is Public)
    assert seen == [(("training the domain net", epoch, 8), {}) for epoch in range(9)]
    assert "trained on 60 of these records (8 epochs" in ruler.text
    assert ruler.text.endswith("seed 4")
    assert "ann" not in ruler.text


def test_the_domain_net_replays_by_its_seed():
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    one, two, other = (domain(box(), CPU, seed).features(images, silent) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_the_domain_net_sees_every_class_of_a_sorted_file(monkeypatch):
    seen = []
    train = features.train
    monkeypatch.setattr(features, "RECORDS", 20)
    monkeypatch.setattr(
        features, "train", lambda *args, **more: (seen.append(args[2]), train(*args, **more))[1]
    )
    domain(box(ordered=True), CPU)
    assert len(seen[0]) == 20
    assert seen[0].unique().tolist() == [0, 1, 2]
