"""The classifier's statistic: right, stable, and the same attack as the loss."""

import math

import numpy as np
import pytest
import torch
from support.seeding import seed_generator
from torch.nn.functional import cross_entropy

from privot.attacks.membership.loss import logit_scaled_confidence, negative_loss
from privot.errors import SettingError

GENERATOR = seed_generator()
LOGITS = 3 * torch.randn(4, 30, 10, dtype=torch.float64, generator=GENERATOR)
LABELS = torch.arange(30) % 10


def test_confidence_is_the_logit_of_the_probability_and_orders_as_the_loss():
    confidence = logit_scaled_confidence(LOGITS, LABELS)
    p = LOGITS.softmax(-1).gather(-1, LABELS.expand(4, 30)[..., None])[..., 0]
    torch.testing.assert_close(confidence, (p / (1 - p)).log())
    for same in (LOGITS + 100, LOGITS.log_softmax(-1)):
        torch.testing.assert_close(logit_scaled_confidence(same, LABELS), confidence)
    negative = negative_loss(LOGITS, LABELS)
    losses = torch.stack([-cross_entropy(rows, LABELS, reduction="none") for rows in LOGITS])
    torch.testing.assert_close(negative, losses)
    np.testing.assert_array_equal(confidence.flatten().argsort(), negative.flatten().argsort())


def test_a_sure_answer_keeps_its_digits():
    # Single precision has probabilities of 1 for the first two: p / (1 - p) would be infinite.
    logits = torch.tensor([[40.0, 0.0, 0.0], [60.0, 0.0, -5.0], [-60.0, 0.0, 1.0]])
    confidence = logit_scaled_confidence(logits, torch.zeros(3, dtype=torch.int64))
    expected = [40 - math.log(2), 60 - math.log1p(math.exp(-5)), -60 - np.logaddexp(0, 1)]
    assert confidence.tolist() == pytest.approx(expected, rel=1e-12)
    assert confidence.dtype == torch.float64


@pytest.mark.parametrize("shape", [(30, 1), (29, 10), (30,)])
def test_wrong_shapes_are_refused(shape):
    with pytest.raises(SettingError, match="logits"):
        logit_scaled_confidence(torch.zeros(shape), LABELS)
