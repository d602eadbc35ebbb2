"""Accuracy bought from a ledger: right on average, charged, noisy, publishable, and refused."""

import math

import numpy as np
import pytest
import torch

from privot import Budget
from privot.data import Sensitive, Spec, load_dataset
from privot.errors import BudgetError, SettingError
from privot.measures import Samples, measure_downstream, private_accuracy
from privot.measures.private_accuracy import _score_record, measure_private_accuracy
from privot.privacy.ledger import Ledger

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def subject():
    return Samples.from_source("digits", 200)


@pytest.fixture(scope="module")
def test_set():
    return load_dataset("digits", "test")


@pytest.fixture
def one_network(monkeypatch):
    """The network is trained once: the images are the same each time."""
    networks = []
    train = private_accuracy.train_downstream_network

    def train_once(*args, **more):
        if not networks:
            networks.append(train(*args, **more))
        return networks[0]

    monkeypatch.setattr(private_accuracy, "train_downstream_network", train_once)


def test_with_almost_no_noise_it_is_the_plain_accuracy(subject, test_set, ledger):
    steps = []
    [paid] = measure_private_accuracy(
        subject,
        test_set,
        Budget(1e6),
        ledger=ledger,
        progress=lambda *step, **_: steps.append(step[0]),
    )
    public = load_dataset("digits", "test", public=True)
    [plain] = measure_downstream(subject.images, subject.labels, public, ["cnn"])
    assert paid.value == pytest.approx(plain.value, abs=1e-3)
    assert (paid.name, paid.num_samples, paid.reference_size) == ("cnn_accuracy", 200, 359)
    assert paid.publishable
    assert set(steps) == {"training cnn"}  # nothing of the records on the way


@pytest.mark.usefixtures("one_network")
def test_it_is_charged_to_the_test_set_and_publishable_only_if_noisy(subject, test_set, tmp_path):
    def buy(epsilon, data=test_set, samples=subject, **more):
        ledger = Ledger(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl")
        [result] = measure_private_accuracy(samples, data, Budget(epsilon), ledger=ledger, **more)
        return result, ledger

    result, ledger = buy(2.0)
    assert ledger.compute_spent_cost().epsilon(1e-5) == pytest.approx(2.0, rel=1e-6)
    assert "epsilon 2 of the test data, delta 1e-05" in result.protocol
    # The analytic Gaussian at epsilon 2 has this multiplier; one network, public size, replace-one.
    noise = 2 * 2.021 / 359
    sampling = math.sqrt(result.value * (1 - result.value) / 359)
    assert result.standard_error == pytest.approx(math.hypot(noise, sampling), rel=0.05)
    assert result.publishable
    assert not buy(5.0, insecure_seed=3)[0].publishable
    assert not buy(math.inf)[0].publishable
    bare = Samples("scans", subject.images[:60], subject.labels[:60], 10)
    assert not buy(1.0, samples=bare)[0].publishable  # about unprotected images
    images, labels = load_dataset("digits", "test", public=True).records()
    spec = Spec((1, 8, 8), 10)
    named = Sensitive(images.numpy(), labels.numpy(), spec, name="/home/ann/ward-7/patients.npz")
    result, _ = buy(1.2349, named)
    assert "patients" not in str(result)
    assert "epsilon 1.235 of" in result.protocol  # never less than was charged
    counts = [buy(0.2, named)[0].reference_size for _ in range(3)]  # undeclared, so with noise
    assert set(counts) != {359}  # noise that rounds to nothing thrice: once in a million and a half
    assert all(abs(count - 359) < 8 * 16.3 * 2 * math.sqrt(2) for count in counts)


def test_a_record_s_score_has_the_norm_that_is_claimed():
    class Network:
        mean = 0.0
        std = 1.0

        def net(self, image):
            return torch.nn.functional.one_hot(torch.tensor([3]), 10).float() + 0 * image.sum()

    image = torch.zeros(1, 8, 8)
    networks = [Network()] * 3
    for label, hits in ((3, 1.0), (4, 0.0)):
        for counted, count in ((True, [1.0]), (False, [])):
            score = _score_record(image, torch.tensor(label), networks, counted)
            assert score.tolist() == [hits] * 3 + count


def test_refuses_a_budget_over_the_limit_other_classifiers_and_no_ledger(subject, test_set, ledger):
    for names in (("logistic",), (), ("cnn", "lda")):
        with pytest.raises(SettingError, match="only be measured with networks"):
            measure_private_accuracy(subject, test_set, Budget(1.0), names, ledger=ledger)
    nameless = Sensitive(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 1]), Spec((1, 8, 8), 10))
    with pytest.raises(SettingError, match="No ledger counts"):
        measure_private_accuracy(subject, nameless, Budget(1.0))
    assert ledger.entries() == []
    ledger.set_limit(Budget(1.0))
    with pytest.raises(BudgetError, match="does not allow"):
        measure_private_accuracy(subject, test_set, Budget(2.0), ledger=ledger)
