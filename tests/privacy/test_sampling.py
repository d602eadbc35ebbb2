"""The draws have the law that their event claims; samplers that are nearly right are rejected."""

import itertools
import math

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from scipy.stats import binom

from privot.data.records import Sensitive
from privot.data.spec import Spec
from privot.errors import PlanError
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import DRAWS, Gate
from privot.privacy.ledger import Ledger
from privot.privacy.noise import Secret
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import SAMPLERS, Fixed, Full, Poisson, Shards
from privot.runtime import Runtime

COUNT, DRAWN = 8, 100_000
FALSE_ALARM = 1e-9


def table(draws):
    """[draws, records]: who was drawn."""
    chosen = np.zeros((len(draws), COUNT), bool)
    for row, each in enumerate(draws):
        chosen[row, np.asarray(each)] = True
    return chosen


def lawful(chosen, sampler):
    """Every count of interest is binomial: test each exactly, all together at a false alarm of 1e-9.

    Marginals, pairs of records within a draw, sizes, and pairs of records over two draws that follow each other.
    """
    together, sizes = claimed(sampler)
    inside = np.triu_indices(COUNT)  # the diagonal holds the marginals
    counts = [((chosen.T.astype(float) @ chosen)[inside], together[inside], len(chosen))]
    counts.append((np.bincount(chosen.sum(1), minlength=COUNT + 1), sizes, len(chosen)))
    first, second = chosen[: len(chosen) // 2 * 2].reshape(-1, 2, COUNT).transpose(1, 0, 2).astype(float)  # disjoint, so independent
    counts.append(((first.T @ second).ravel(), np.outer(np.diag(together), np.diag(together)).ravel(), len(first)))
    pvalues = np.concatenate([2 * np.minimum(binom.cdf(seen, n, p), binom.sf(seen - 1, n, p)) for seen, p, n in counts])
    return bool(pvalues.min() * len(pvalues) > FALSE_ALARM)


def claimed(sampler):
    """(probability that two records are drawn together, law of the size), from the event's own numbers."""
    same = np.eye(COUNT, dtype=bool)
    match sampler.event(1.0):
        case dpa.PoissonSampledDpEvent(sampling_probability=rate):
            return np.where(same, rate, rate**2), binom.pmf(np.arange(COUNT + 1), COUNT, rate)
        case dpa.SampledWithoutReplacementDpEvent(source_dataset_size=size, sample_size=drawn) if isinstance(sampler, Fixed):
            pair = drawn * (drawn - 1) / (size * (size - 1))
            return np.where(same, drawn / size, pair), (np.arange(COUNT + 1) == drawn).astype(float)
        case dpa.SampledWithoutReplacementDpEvent(source_dataset_size=shards, sample_size=1):
            mates = np.arange(COUNT)[:, None] % shards == np.arange(COUNT) % shards
            own = np.bincount(np.bincount(np.arange(COUNT) % shards, minlength=shards), minlength=COUNT + 1)  # shards of each size
            return mates / shards, own / shards
    raise AssertionError


class Buffered(Secret):
    """The real stream, fetched in large pieces for speed."""

    rest = torch.empty(0)

    def uniform(self, count):
        if len(self.rest) < count:
            self.rest = super().uniform(1_000_000)
        taken, self.rest = self.rest[:count], self.rest[count:]
        return taken


SAMPLES = [Poisson(rate) for rate in (0.25, 0.03, 1.0)] + [Fixed(drawn, COUNT) for drawn in (3, 1, COUNT)]
SAMPLES += [Shards(count) for count in (4, 3, 11)]  # unequal shards; more shards than records


@pytest.mark.parametrize("sampler", SAMPLES, ids=str)
def test_law(sampler):
    secret, draws = Buffered(), DRAWN if sampler in (Poisson(0.25), Fixed(3, COUNT), Shards(4)) else DRAWN // 10
    assert lawful(table([sampler.draw(COUNT, secret) for _ in range(draws)]), sampler)


# Five wrong samplers: generators of draws, each beside the sampler that it pretends to be


def shuffled_epochs():
    rng = np.random.default_rng(0)
    while True:
        yield from rng.permutation(COUNT).reshape(-1, 2)


def fixed_size():
    rng = np.random.default_rng(0)
    while True:
        yield rng.permutation(COUNT)[:2]


def cycled():
    return itertools.cycle(np.random.default_rng(0).permutation(COUNT).reshape(-1, 2))


def cycled_shards():
    return itertools.cycle(np.arange(COUNT).reshape(2, 4).T)


def other_rate(factor):
    rng = np.random.default_rng(0)
    while True:
        yield np.flatnonzero(rng.random(COUNT) < 0.25 * factor)


def empty_skipped():
    return (draw for draw in other_rate(1.0) if len(draw))


def block_of_neighbours():
    rng = np.random.default_rng(0)
    while True:
        yield (rng.integers(COUNT) + np.arange(2)) % COUNT  # marginals, sizes and sequence are right; pairs are not


@pytest.mark.parametrize(
    ("wrong", "sampler"),
    [
        (shuffled_epochs(), Fixed(2, COUNT)),
        (shuffled_epochs(), Poisson(0.25)),
        (fixed_size(), Poisson(0.25)),
        (cycled(), Fixed(2, COUNT)),
        (cycled_shards(), Shards(4)),
        (other_rate(0.9), Poisson(0.25)),
        (other_rate(1.1), Poisson(0.25)),
        (empty_skipped(), Poisson(0.25)),
        (block_of_neighbours(), Fixed(2, COUNT)),
    ],
    ids=["epochs", "epochs as Poisson", "fixed size", "cycle", "cycled shards", "rate -10 %", "rate +10 %", "empty skipped", "blocks"],
)
def test_wrong_samplers_are_rejected(wrong, sampler):
    assert not lawful(table(list(itertools.islice(wrong, DRAWN // 4))), sampler)


def test_the_right_law_from_another_source_passes():
    assert lawful(table(list(itertools.islice(other_rate(1.0), DRAWN))), Poisson(0.25))
    assert lawful(table(list(itertools.islice(fixed_size(), DRAWN))), Fixed(2, COUNT))


@pytest.mark.parametrize("sampler", [Poisson(0.25), Fixed(3, COUNT)], ids=str)
def test_the_gate_draws_afresh_for_every_answer(ledger, sampler):
    """Record i is one lit pixel, so a sum without noise tells who was drawn."""
    relation = sampler.neighbours[0]
    box = Sensitive(np.eye(COUNT).reshape(COUNT, 1, 2, 4), np.zeros(COUNT, int), Spec((1, 2, 4), 1))
    gate = Gate(box, Plan((Stage("it", "sum", 0.0, 10**6, sampler),), relation), ledger, Budget(math.inf), runtime=Runtime("cpu", 16))
    chosen = torch.stack([gate.sum("it", lambda image, label: image.flatten(), bound=1.0) for _ in range(1500)]).round().bool()
    assert lawful(chosen.numpy(), sampler)


def test_the_gate_draws_shards_afresh(ledger):
    box = Sensitive(np.eye(COUNT).reshape(COUNT, 1, 2, 4), np.zeros(COUNT, int), Spec((1, 2, 4), 1))
    plan = Plan((Stage("it", "answer", 0.0, 10**6, Shards(4)),), Neighbours.REPLACE)
    gate = Gate(box, plan, ledger, Budget(math.inf))
    seen = [gate.answer("it", lambda records, vault: records.images.sum((0, 1)), bound=9.0, shape=(2, 4)) for _ in range(1500)]
    assert lawful(torch.stack(seen).flatten(1).round().bool().numpy(), Shards(4))


def test_draws_cannot_be_seeded_from_outside():
    for sampler in (Poisson(0.5), Fixed(32, 64), Shards(64)):
        draws = []
        for _ in range(20):
            torch.manual_seed(0)
            np.random.seed(0)
            draws.append(tuple(sampler.draw(64, Secret()).tolist()))
        assert len(set(draws)) > 1


def test_full_takes_everything():
    assert Full().draw(5, Secret()) is None


def test_fixed_knows_its_size():
    with pytest.raises(PlanError, match="another size"):
        Fixed(2, 9).draw(8, Secret())


@pytest.mark.parametrize("count", [0, 1, 2])
def test_poisson_of_few(count):
    assert len(Poisson(1.0).draw(count, Secret())) == count
    assert Poisson(1e-18).draw(count, Secret()).numel() == 0


def test_rate_is_never_exceeded(monkeypatch):
    """Uniforms lie on the lattice k 2^-53, k from 1: the chance of k 2^-53 <= rate is the rate, rounded down."""
    monkeypatch.setattr(Secret, "uniform", lambda self, count: torch.tensor([0.25, 0.25 + 2**-53], dtype=torch.float64))
    assert Poisson(0.25).draw(2, Secret()).tolist() == [0]


def test_shards_at_the_edge_of_the_lattice(monkeypatch):
    for value, shard in ((2.0**-53, 0), (1.0, 0), (1 - 2.0**-53, 6), (0.5, 3)):
        monkeypatch.setattr(Secret, "uniform", lambda self, count, value=value: torch.full((count,), value, dtype=torch.float64))
        assert Shards(7).draw(14, Secret()).tolist() == [shard, shard + 7]


@pytest.mark.parametrize("make", [
    lambda: Poisson(0.0), lambda: Poisson(-0.1), lambda: Poisson(1.1), lambda: Poisson(math.nan), lambda: Fixed(0, 5), lambda: Fixed(6, 5),
    lambda: Fixed(-1, 5), lambda: Shards(0), lambda: Shards(-3),
])  # fmt: skip
def test_bad_numbers_are_refused(make):
    with pytest.raises(PlanError, match="needed"):
        make()


def test_events():
    noise = dpa.GaussianDpEvent(2.0)
    assert Full().event(2.0) == noise
    assert Poisson(0.1).event(2.0) == dpa.PoissonSampledDpEvent(0.1, noise)
    assert Fixed(3, 9).event(2.0) == dpa.SampledWithoutReplacementDpEvent(9, 3, noise)
    assert Shards(9).event(2.0) == dpa.SampledWithoutReplacementDpEvent(9, 1, noise)
    for sampler in (Full(), Poisson(0.1), Fixed(3, 9), Shards(9)):
        assert Stage("a", "answer", 0.0, 3, sampler).event() == dpa.NonPrivateDpEvent()  # a sample without noise is the records themselves


def test_every_pair_of_verb_and_draw_is_allowed_or_refused(tmp_path):
    """Sums of two shards and rows in order of position lie further apart than one record can move them: no amplification there."""
    box = Sensitive(np.zeros((COUNT, 1, 1, 1)), np.zeros(COUNT, int), Spec((1, 1, 1), 1, COUNT, (COUNT,)))
    allowed = set()
    for verb, sampler, relation in itertools.product([*DRAWS, "shout"], [Full(), Poisson(0.5), Fixed(2, COUNT), Shards(2)], Neighbours):
        try:
            Gate(box, Plan((Stage("it", verb, 0.0, 1, sampler),), relation), Ledger(tmp_path / "none.jsonl"), Budget(math.inf))
        except PlanError:
            continue
        allowed.add((verb, type(sampler).__name__, str(relation)))
    assert allowed == {
        ("sum", "Full", "add-remove"), ("sum", "Full", "replace"), ("sum", "Poisson", "add-remove"), ("sum", "Fixed", "replace"),
        ("rows", "Full", "replace"), ("rows", "Full", "local"), ("answer", "Full", "add-remove"), ("answer", "Full", "replace"),
        ("answer", "Poisson", "add-remove"), ("answer", "Fixed", "replace"), ("answer", "Shards", "replace"),
        ("sorted_blocks", "Full", "replace"),
    }  # fmt: skip
    assert set(SAMPLERS) == {"full", "poisson", "fixed", "shards"}
