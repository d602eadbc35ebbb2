"""Tracing finds those whose mean a set repeats, though the set shows none of them."""

import pytest
import torch

from privot.attacks.membership.control_data import load_digit_splits
from privot.attacks.membership.controls import compute_null_p_value
from privot.attacks.membership.tracing import _compute_moments, trace_members
from privot.audit import compute_roc
from privot.errors import SettingError
from privot.nets.ensemble import Ensemble

CANDIDATES, OTHERS, MORE = load_digit_splits(0)
SMALL = {"num_nets": 8, "net_width": 32}


def parted(scores):
    return scores[:100], scores[100:]


def test_the_score_is_the_product_of_the_two_deviations(one_thread):
    net = Ensemble(1, (1, 8, 8), 1, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        psi = [net.features(2 * each.images - 1)[0].double() for each in (CANDIDATES, OTHERS, MORE)]
    wanted = []
    for x, label in zip(psi[0], CANDIDATES.labels, strict=True):
        centre = psi[2][MORE.labels == label].mean(0)
        wanted.append(
            ((x - centre) @ (psi[1][OTHERS.labels == label].mean(0) - centre) / len(x)).item()
        )
    found = trace_members(*CANDIDATES, *OTHERS, *MORE, num_nets=1, net_width=16, ridge=None, seed=3)
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_moments_are_those_of_all_at_once(one_thread):
    net = Ensemble(1, (1, 8, 8), 1, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        means, spread = _compute_moments(net, *MORE, 10, True)
        psi = net.features(2 * MORE.images - 1)[0].double()
    torch.testing.assert_close(
        means, torch.stack([psi[MORE.labels == label].mean(0) for label in range(10)])
    )
    apart = psi - means[MORE.labels]
    torch.testing.assert_close(spread, apart.T @ apart / len(apart), rtol=1e-6, atol=1e-9)


def test_a_set_that_only_shares_the_mean_is_traced(one_thread):
    # Each released image is the mean of five members of its class: no member is in the set, and all are in its mean.
    images = []
    labels = []
    for label in range(10):
        own = CANDIDATES.images[:100][CANDIDATES.labels[:100] == label]
        for part in own.split(5):
            images.append(part.mean(0))
            labels.append(label)
    released = torch.stack(images), torch.tensor(labels)
    whitened, plain = (
        compute_roc(*parted(trace_members(*CANDIDATES, *released, *MORE, ridge=ridge, **SMALL))).auc
        for ridge in (0.1, None)
    )
    print(f"AUC {whitened:.3f}, without whitening {plain:.3f}")
    assert whitened > 0.7
    assert plain > 0.55
    assert whitened > plain


def test_nothing_is_traced_in_a_set_of_others(one_thread):
    assert compute_null_p_value(*parted(trace_members(*CANDIDATES, *OTHERS, *MORE, **SMALL))) > 0.01


def test_a_missing_class_is_refused():
    with pytest.raises(SettingError, match="population"):
        trace_members(*CANDIDATES, *OTHERS, MORE.images, torch.zeros_like(MORE.labels))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: this compares one with the CPU"
)
def test_a_gpu_traces_the_same():
    here, there = (
        trace_members(*CANDIDATES, OTHERS.images.to(where), OTHERS.labels, *MORE, **SMALL)
        for where in ("cpu", "cuda")
    )
    assert (
        torch.corrcoef(torch.stack([torch.from_numpy(here), torch.from_numpy(there)]))[0, 1] > 0.99
    )  # half precision there
