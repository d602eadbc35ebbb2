"""The classifier's statistic: right, stable, and the same attack as the loss."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from privot.attacks.membership.loss import logit_scaled_confidence, negative_loss
from privot.errors import SettingError


@pytest.fixture
def logits():
    return 3 * torch.randn(
        4, 30, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


LABELS = torch.arange(30) % 10


def test_confidence_is_the_logit_of_the_probability(logits):
    p = logits.softmax(-1).gather(-1, LABELS.expand(4, 30)[..., None])[..., 0]
    torch.testing.assert_close(logit_scaled_confidence(logits, LABELS), (p / (1 - p)).log())


def test_negative_loss_is_minus_the_cross_entropy(logits):
    wanted = torch.stack([-cross_entropy(each, LABELS, reduction="none") for each in logits])
    torch.testing.assert_close(negative_loss(logits, LABELS), wanted)


def test_a_sure_answer_keeps_its_digits():
    # Probabilities of single precision are 1 for both: the statistic by p / (1 - p) would be infinite twice.
    found = logit_scaled_confidence(
        torch.tensor([[40.0, 0.0, 0.0], [60.0, 0.0, -5.0]]), torch.tensor([0, 0])
    )
    assert found.tolist() == pytest.approx(
        [40 - math.log(2), 60 - math.log1p(math.exp(-5))], rel=1e-12
    )
    assert found.dtype == torch.float64


def test_one_threshold_on_either_is_the_same_attack(logits):
    surer = logit_scaled_confidence(logits, LABELS).flatten()
    likelier = negative_loss(logits, LABELS).flatten()
    np.testing.assert_array_equal(surer.argsort(), likelier.argsort())


def test_a_shift_of_all_logits_changes_nothing(logits):
    torch.testing.assert_close(
        logit_scaled_confidence(logits + 100, LABELS), logit_scaled_confidence(logits, LABELS)
    )


def test_log_probabilities_are_logits(logits):
    torch.testing.assert_close(
        logit_scaled_confidence(logits.log_softmax(-1), LABELS),
        logit_scaled_confidence(logits, LABELS),
    )


@pytest.mark.parametrize("shape", [(30, 1), (29, 10), (30,)])
def test_wrong_shapes_are_refused(shape):
    with pytest.raises(SettingError, match="logits"):
        logit_scaled_confidence(torch.zeros(shape), LABELS)
