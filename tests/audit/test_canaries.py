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
DIGITS = Spec((1, 8, 8), 10)
all_specs = pytest.mark.parametrize(
    "spec",
    [DIGITS, Spec((1, 28, 28), 10), Spec((3, 32, 32), 2)],
    ids=lambda spec: "x".join(map(str, spec.shape)),
)


def generate(kind, spec=DIGITS, count=40, seed=0, candidates=CANDIDATES):
    candidates = candidates if kind in IN_DISTRIBUTION_KINDS else ()
    return generate_canaries(kind, spec, count, torch.Generator().manual_seed(seed), *candidates)


@pytest.mark.parametrize("kind", CANARY_KINDS)
def test_canaries_follow_from_the_seed(kind):
    one, same, other = (generate(kind, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.images, same.images)
    assert torch.equal(one.labels, same.labels)
    assert not torch.equal(one.images, other.images)


@all_specs
@pytest.mark.parametrize("kind", OUT_OF_DISTRIBUTION_KINDS)
def test_canaries_can_enter_a_dataset_and_no_two_are_alike(kind, spec):
    canaries = generate(kind, spec)
    Sensitive(canaries.images.numpy(), canaries.labels.numpy(), spec)
    assert len(canaries.images.flatten(1).unique(dim=0)) == 40


@pytest.mark.parametrize("kind", IN_DISTRIBUTION_KINDS)
def test_clean_ones_are_records_and_mislabelled_ones_too_but_for_the_label(kind):
    true = {image.numpy().tobytes(): int(label) for image, label in zip(*CANDIDATES, strict=True)}
    canaries = generate(kind)
    is_right = {
        true[image.numpy().tobytes()] == int(label) for image, label in zip(*canaries, strict=True)
    }
    assert is_right == {kind == "clean"}
    assert canaries.labels.max() < 10


def test_mislabelled_ones_go_to_every_other_class():
    candidates = torch.zeros(9000, 1, 8, 8), torch.full((9000,), 3)
    labels = generate("mislabelled", count=9000, candidates=candidates).labels
    expected = [1000, 1000, 1000, 0, *[1000] * 6]
    assert torch.bincount(labels, minlength=10).tolist() == pytest.approx(expected, abs=120)


@all_specs
def test_orthogonal_ones_are_orthogonal_and_large(spec):
    offsets = (generate("orthogonal", spec, 60).images - 0.5).flatten(1).double()
    products = offsets @ offsets.T
    lengths = products.diagonal()
    assert (products - lengths.diag()).abs().max() < 1e-5 * lengths.min()
    assert offsets.abs().amax(1).min() > 0.4999  # to black or white
    # a tenth of what any image can have about mid-grey
    assert lengths.min() > 0.1 * spec.num_features / 4


def test_coins_are_fair_and_independent():
    """Six deviations each: two in a thousand million."""
    coins = flip_fair_coins(40_000)
    for mean in (
        coins.mean(),
        (coins[1:] == coins[:-1]).mean(),
        (flip_fair_coins(40_000) == coins).mean(),  # and others every time
    ):
        assert mean == pytest.approx(0.5, abs=0.015)


@pytest.mark.parametrize(
    ("kind", "spec", "count", "candidates"),
    [
        ("golden", DIGITS, 3, CANDIDATES),
        ("noise", DIGITS, 0, CANDIDATES),
        ("clean", DIGITS, 3, ()),
        ("orthogonal", DIGITS, 65, CANDIDATES),
        ("mislabelled", Spec((1, 8, 8), 1), 3, CANDIDATES),
    ],
)
def test_impossible_canaries_are_refused(kind, spec, count, candidates):
    with pytest.raises(SettingError):
        generate(kind, spec, count, candidates=candidates)
