"""Accuracy bought from a ledger: right on average, charged, noisy, publishable, and refused where the wall says so."""

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


def test_without_noise_to_speak_of_it_is_the_plain_accuracy(subject, ledger):
    [paid] = measure_private_accuracy(
        subject, load_dataset("digits", "test"), Budget(1e6), ledger=ledger
    )
    [plain] = measure_downstream(
        subject.images, subject.labels, load_dataset("digits", "test", public=True), ["cnn"]
    )
    assert paid.value == pytest.approx(plain.value, abs=1e-3)
    assert (paid.name, paid.num_samples, paid.reference_size, paid.publishable) == (
        "cnn_accuracy",
        200,
        359,
        True,
    )


def test_it_is_charged_to_the_test_set_and_says_so(subject, ledger):
    [reading] = measure_private_accuracy(
        subject, load_dataset("digits", "test"), Budget(2.0), ledger=ledger
    )
    assert ledger.compute_spent_cost().epsilon(1e-5) == pytest.approx(2.0, rel=1e-6)
    assert "epsilon 2 of the test data, delta 1e-05" in reading.protocol
    noise = (
        2 * 2.021 / 359
    )  # the analytic Gaussian at epsilon 2 has about this multiplier; one network, public size, replace-one
    assert reading.standard_error == pytest.approx(
        math.hypot(noise, math.sqrt(reading.value * (1 - reading.value) / 359)), rel=0.05
    )


def test_the_owner_s_wall_holds(subject, ledger):
    ledger.set_limit(Budget(1.0))
    with pytest.raises(BudgetError, match="does not allow"):
        measure_private_accuracy(
            subject, load_dataset("digits", "test"), Budget(2.0), ledger=ledger
        )


def test_an_undeclared_size_is_counted_with_noise_too(subject, ledger, monkeypatch):
    # the images are the same each time, so one network will do
    nets = []
    real = private_accuracy.train_downstream_network
    monkeypatch.setattr(
        private_accuracy,
        "train_downstream_network",
        lambda *given, **more: nets[0] if nets else nets.append(real(*given, **more)) or nets[0],
    )
    images, labels = load_dataset("digits", "test", public=True).records()
    box = Sensitive(images.numpy(), labels.numpy(), Spec((1, 8, 8), 10), name="own")
    ledgers = [Ledger(ledger.path.with_name(f"{turn}.jsonl")) for turn in range(3)]
    counts = {
        measure_private_accuracy(subject, box, Budget(0.2), ledger=each)[0].reference_size
        for each in ledgers
    }
    assert counts != {359}  # noise that rounds to nothing three times: once in a million and a half
    assert all(abs(count - 359) < 8 * 16.3 * 2 * math.sqrt(2) for count in counts)


def test_a_record_s_part_has_the_norm_that_is_claimed():
    class Net:
        mean = 0.0
        std = 1.0

        def net(self, image):
            return torch.nn.functional.one_hot(torch.tensor([3]), 10).float() + 0 * image.sum()

    image = torch.zeros(1, 8, 8)
    for label, hits in ((3, 1.0), (4, 0.0)):
        assert _score_record(image, torch.tensor(label), [Net()] * 3, True).tolist() == [
            hits
        ] * 3 + [1.0]
        assert _score_record(image, torch.tensor(label), [Net()] * 3, False).tolist() == [hits] * 3


def test_what_is_refused(subject, ledger):
    box = load_dataset("digits", "test")
    for names in (("logistic",), (), ("cnn", "lda")):
        with pytest.raises(SettingError, match="only be measured with networks"):
            measure_private_accuracy(subject, box, Budget(1.0), names, ledger=ledger)
    nameless = Sensitive(np.zeros((2, 1, 8, 8), np.uint8), np.array([0, 1]), Spec((1, 8, 8), 10))
    with pytest.raises(SettingError, match="No ledger counts"):
        measure_private_accuracy(subject, nameless, Budget(1.0))
    assert ledger.entries() == []


def test_seeded_or_free_numbers_are_not_publishable(subject, ledger):
    box = load_dataset("digits", "test")
    assert not measure_private_accuracy(subject, box, Budget(5.0), ledger=ledger, insecure_seed=3)[
        0
    ].publishable
    assert not measure_private_accuracy(subject, box, Budget(math.inf), ledger=ledger)[
        0
    ].publishable


def test_a_sensitive_file_is_not_named(subject, ledger):
    images, labels = load_dataset("digits", "test", public=True).records()
    box = Sensitive(
        images.numpy(), labels.numpy(), Spec((1, 8, 8), 10), name="/home/ann/ward-7/patients.npz"
    )
    [reading] = measure_private_accuracy(subject, box, Budget(1.2349), ledger=ledger)
    assert "patients" not in str(reading)
    assert "epsilon 1.235 of" in reading.protocol  # never less than was charged


def test_numbers_about_unprotected_images_are_not_publishable(ledger):
    images, labels = load_dataset("digits", public=True).records()
    bare = Samples("scans", images[:60], labels[:60], 10)
    assert not measure_private_accuracy(
        bare, load_dataset("digits", "test"), Budget(1.0), ledger=ledger
    )[0].publishable


def test_nothing_is_said_of_the_records_on_the_way(subject, ledger):
    seen = []
    measure_private_accuracy(
        subject,
        load_dataset("digits", "test"),
        Budget(1.0),
        ledger=ledger,
        progress=lambda *step, **more: seen.append((step[0], more)),
    )
    assert {stage for stage, _ in seen} == {"training cnn"}
