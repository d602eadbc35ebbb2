"""Canaries: each kind is what it says, and deterministic; planting keeps the records."""

import pytest
import torch

from privot.attacks.membership.control_data import load_digit_splits
from privot.audit.canaries import (
    CANARY_KINDS,
    IN_DISTRIBUTION_KINDS,
    OUT_OF_DISTRIBUTION_KINDS,
    flip_fair_coins,
    generate_canaries,
)
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import SettingError

CANDIDATES = load_digit_splits(0)[0]
SPECS = [Spec((1, 8, 8), 10), Spec((1, 28, 28), 10), Spec((3, 32, 32), 2)]


def made(kind, spec=SPECS[0], count=40, seed=0):
    return generate_canaries(
        kind,
        spec,
        count,
        torch.Generator().manual_seed(seed),
        *(CANDIDATES if kind in IN_DISTRIBUTION_KINDS else ()),
    )


@pytest.mark.parametrize("kind", CANARY_KINDS)
def test_canaries_are_by_the_seed(kind):
    one = made(kind)
    two = made(kind)
    other = made(kind, seed=1)
    assert torch.equal(one.images, two.images)
    assert torch.equal(one.labels, two.labels)
    assert not torch.equal(one.images, other.images)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "x".join(map(str, spec.shape)))
@pytest.mark.parametrize("kind", OUT_OF_DISTRIBUTION_KINDS)
def test_what_is_made_can_enter_a_box_and_no_two_are_alike(kind, spec):
    found = made(kind, spec)
    Sensitive(found.images.numpy(), found.labels.numpy(), spec)
    assert len(found.images.flatten(1).unique(dim=0)) == 40


def test_clean_ones_are_records_and_mislabelled_ones_too_but_for_the_label():
    known = {image.numpy().tobytes(): int(label) for image, label in zip(*CANDIDATES, strict=True)}
    for kind in IN_DISTRIBUTION_KINDS:
        found = made(kind)
        right = [
            known[image.numpy().tobytes()] == int(label)
            for image, label in zip(*found, strict=True)
        ]
        assert all(right) if kind == "clean" else not any(right)
        assert found.labels.max() < 10


def test_mislabelled_ones_go_to_every_other_class():
    images = torch.zeros(9000, 1, 8, 8)
    labels = torch.full((9000,), 3)
    found = generate_canaries(
        "mislabelled", SPECS[0], 9000, torch.Generator().manual_seed(0), images, labels
    )
    assert torch.bincount(found.labels, minlength=10).tolist() == pytest.approx(
        [1000, 1000, 1000, 0, *[1000] * 6], abs=120
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "x".join(map(str, spec.shape)))
def test_orthogonal_ones_are_orthogonal_and_large(spec):
    apart = (made("orthogonal", spec, 60).images - 0.5).flatten(1).double()
    products = apart @ apart.T
    lengths = products.diagonal()
    assert (products - lengths.diag()).abs().max() < 1e-5 * lengths.min()
    assert apart.abs().amax(1).min() > 0.4999  # to black or white
    assert (
        lengths.min() > 0.1 * spec.num_features / 4
    )  # a tenth of what any image can have about mid-grey


def test_coins_are_fair_and_independent():
    """Six deviations each: two in a thousand million."""
    thrown = flip_fair_coins(40_000)
    assert thrown.mean() == pytest.approx(0.5, abs=0.015)
    assert (thrown[1:] == thrown[:-1]).mean() == pytest.approx(0.5, abs=0.015)
    assert (flip_fair_coins(40_000) == thrown).mean() == pytest.approx(
        0.5, abs=0.015
    )  # and others every time


def test_what_cannot_be_is_refused():
    for kind, count in (("golden", 3), ("noise", 0), ("clean", 3), ("orthogonal", 65)):
        with pytest.raises(SettingError):
            generate_canaries(kind, SPECS[0], count, torch.Generator())
    with pytest.raises(SettingError, match="2 classes"):
        generate_canaries("mislabelled", Spec((1, 8, 8), 1), 3, torch.Generator(), *CANDIDATES)
