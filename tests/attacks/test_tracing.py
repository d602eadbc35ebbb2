"""Tracing finds those whose mean a set repeats, though the set shows none of them."""

import pytest
import torch
from support.seeding import seed_generator

from privot.attacks.membership.control_data import load_digit_splits
from privot.attacks.membership.tracing import _compute_moments, trace_members
from privot.audit import compute_roc
from privot.errors import SettingError
from privot.nets.ensemble import Ensemble

pytestmark = pytest.mark.usefixtures("one_thread")
CANDIDATES, OTHERS, MORE = load_digit_splits(0)  # members come first
SMALL = {"num_nets": 8, "net_width": 32}


def compute_features(width, seed, *parts):
    net = Ensemble(1, (1, 8, 8), 1, width, generator=seed_generator(seed))
    with torch.no_grad():
        return net, [net.features(2 * part.images - 1)[0].double() for part in parts]


def test_the_score_is_the_product_of_the_two_deviations():
    _, (own, released, rest) = compute_features(16, 3, CANDIDATES, OTHERS, MORE)
    expected = []
    for x, label in zip(own, CANDIDATES.labels, strict=True):
        centre = rest[MORE.labels == label].mean(0)
        moved = released[OTHERS.labels == label].mean(0) - centre
        expected.append(((x - centre) @ moved / len(x)).item())
    how = {"num_nets": 1, "net_width": 16, "ridge": None, "seed": 3}
    scores = trace_members(*CANDIDATES, *OTHERS, *MORE, **how)
    assert scores == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_moments_are_those_of_all_at_once():
    net, [features] = compute_features(8, 0, MORE)
    with torch.no_grad():
        means, covariance = _compute_moments(net, *MORE, 10, True)
    expected = torch.stack([features[MORE.labels == label].mean(0) for label in range(10)])
    torch.testing.assert_close(means, expected)
    apart = features - means[MORE.labels]
    torch.testing.assert_close(covariance, apart.T @ apart / len(apart), rtol=1e-6, atol=1e-9)


def test_a_set_that_only_shares_the_mean_is_traced():
    # A released image is the mean of five members of its class, and shows none of them.
    images = []
    labels = []
    for label in range(10):
        own = CANDIDATES.images[:100][CANDIDATES.labels[:100] == label]
        means = [part.mean(0) for part in own.split(5)]
        images += means
        labels += [label] * len(means)
    released = torch.stack(images), torch.tensor(labels)
    aucs = []
    for ridge in (0.1, None):
        scores = trace_members(*CANDIDATES, *released, *MORE, ridge=ridge, **SMALL)
        aucs.append(compute_roc(scores[:100], scores[100:]).auc)
    whitened, plain = aucs
    assert whitened > 0.7
    assert whitened > plain > 0.55


def test_a_missing_class_is_refused():
    with pytest.raises(SettingError, match="population"):
        trace_members(*CANDIDATES, *OTHERS, MORE.images, torch.zeros_like(MORE.labels))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_traces_the_same():
    scores = [
        torch.from_numpy(
            trace_members(*CANDIDATES, OTHERS.images.to(device), OTHERS.labels, *MORE, **SMALL)
        )
        for device in ("cpu", "cuda")
    ]
    assert torch.corrcoef(torch.stack(scores))[0, 1] > 0.99  # half precision there
