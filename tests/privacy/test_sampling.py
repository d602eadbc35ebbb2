"""The draws have the law that their event claims; samplers that are nearly right are rejected."""

import itertools
import math

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from scipy.stats import binom
from support.fakes import NullLedger

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.errors import PlanError
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import SAMPLERS, Fixed, Full, Poisson, Shards
from privot.privacy.sensitivity import PROVEN_SAMPLERS
from privot.runtime import Runtime

COUNT = 8
DRAWN = 100_000
FALSE_ALARM = 1e-9


def table(draws, count=COUNT):
    """[draws, units]: who was drawn. A unit is a record, or a shard."""
    chosen = np.zeros((len(draws), count), bool)
    units = [np.asarray(each) for each in draws]
    chosen[np.arange(len(units)).repeat([len(each) for each in units]), np.concatenate(units)] = (
        True
    )
    return chosen


def lawful(chosen, sampler):
    """Every count of interest is binomial: test each exactly, all together at a false alarm of 1e-9.

    Marginals, pairs of units within a draw, sizes, and pairs of units over two draws that follow each other.
    """
    together, sizes = claimed(sampler)
    units = chosen.shape[1]
    inside = np.triu_indices(units)  # the diagonal holds the marginals
    counts = [((chosen.T.astype(float) @ chosen)[inside], together[inside], len(chosen))]
    counts.append((np.bincount(chosen.sum(1), minlength=units + 1), sizes, len(chosen)))
    first, second = (
        chosen[: len(chosen) // 2 * 2].reshape(-1, 2, units).transpose(1, 0, 2).astype(float)
    )  # disjoint, so independent
    counts.append(
        (
            (first.T @ second).ravel(),
            np.outer(np.diag(together), np.diag(together)).ravel(),
            len(first),
        )
    )
    pvalues = np.concatenate(
        [2 * np.minimum(binom.cdf(seen, n, p), binom.sf(seen - 1, n, p)) for seen, p, n in counts]
    )
    return bool(pvalues.min() * len(pvalues) > FALSE_ALARM)


def claimed(sampler):
    """(probability that two units are drawn together, law of the size), from the event's own numbers."""
    same = np.eye(COUNT, dtype=bool)
    match sampler.event(1.0):
        case dpa.PoissonSampledDpEvent(sampling_probability=rate):
            return np.where(same, rate, rate**2), binom.pmf(np.arange(COUNT + 1), COUNT, rate)
        case dpa.SampledWithoutReplacementDpEvent(source_dataset_size=size, sample_size=drawn) if (
            isinstance(sampler, Fixed)
        ):
            pair = drawn * (drawn - 1) / (size * (size - 1))
            return np.where(same, drawn / size, pair), (np.arange(COUNT + 1) == drawn).astype(float)
        case dpa.SampledWithoutReplacementDpEvent(source_dataset_size=shards, sample_size=1):
            return np.eye(shards) / shards, (np.arange(shards + 1) == 1).astype(float)
    raise AssertionError


class Buffered(SecretRandom):
    """The real stream, fetched in large pieces for speed."""

    rest = torch.empty(0)

    def uniform(self, count, device="cpu"):
        if len(self.rest) < count:
            self.rest = super().uniform(1_000_000)
        taken = self.rest[:count]
        self.rest = self.rest[count:]
        return taken


SAMPLES = [Poisson(rate) for rate in (0.25, 0.03, 1.0)] + [
    Fixed(drawn, COUNT) for drawn in (3, 1, COUNT)
]


@pytest.mark.parametrize("sampler", SAMPLES, ids=str)
def test_law(sampler, trust):
    secret = Buffered()
    draws = DRAWN if sampler in (Poisson(0.25), Fixed(3, COUNT)) else DRAWN // 10
    assert lawful(table([sampler.draw(COUNT, secret) for _ in range(draws)]), sampler)
    trust("G5", "draws of the stated law", draws, of=draws)


def by_turns(shards, rows):
    """Each row of a call beside the same row of the next call: [draws, units], for pairs that `lawful` would not look at."""
    whole = shards[: len(shards) // (2 * rows) * 2 * rows]
    return whole.reshape(-1, 2, rows).transpose(0, 2, 1).reshape(-1)


def rows_lawful(shards, count, rows):
    """The shards drawn for ``rows`` answers a call, one call after another, are uniform and independent within and between the calls."""
    return all(
        lawful(table(each[:, None], count), Shards(count))
        for each in (shards, by_turns(shards, rows))
    )


@pytest.mark.parametrize("count", [1, 3, 4, 11])
@pytest.mark.parametrize("rows", [1, 5])
def test_law_of_shards(count, rows):
    secret = Buffered()
    assert rows_lawful(
        torch.cat([Shards(count).draw(rows, secret) for _ in range(DRAWN // 2 // rows)]).numpy(),
        count,
        rows,
    )


# Wrong samplers: generators of draws, each beside the sampler that it pretends to be


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
    return itertools.cycle(np.arange(4)[:, None])


def other_rate(factor):
    rng = np.random.default_rng(0)
    while True:
        yield np.flatnonzero(rng.random(COUNT) < 0.25 * factor)


def empty_skipped():
    return (draw for draw in other_rate(1.0) if len(draw))


def block_of_neighbours():
    rng = np.random.default_rng(0)
    while True:
        yield (
            rng.integers(COUNT) + np.arange(2)
        ) % COUNT  # marginals, sizes and sequence are right; pairs are not


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
    ids=[
        "epochs",
        "epochs as Poisson",
        "fixed size",
        "cycle",
        "cycled shards",
        "rate -10 %",
        "rate +10 %",
        "empty skipped",
        "blocks",
    ],
)
def test_wrong_samplers_are_rejected(wrong, sampler, trust):
    assert not lawful(
        table(list(itertools.islice(wrong, DRAWN // 4)), getattr(sampler, "num_shards", COUNT)),
        sampler,
    )
    trust("G5", "wrong samplers rejected", 1, of=1)


def shared_by_a_call(rng, calls, rows):
    return rng.integers(4, size=calls).repeat(rows)


def the_same_in_every_call(rng, calls, rows):
    return np.tile(rng.integers(4, size=rows), calls)


def never_twice_in_a_call(rng, calls, rows):
    return np.concatenate([rng.permutation(4)[:rows] for _ in range(calls)])


def last_call_again(rng, calls, rows):
    return rng.integers(4, size=(calls // 2, rows)).repeat(2, 0).ravel()


def lopsided(rng, calls, rows):
    return rng.choice(4, size=calls * rows, p=[0.28, 0.24, 0.24, 0.24])


@pytest.mark.parametrize(
    "wrong",
    [shared_by_a_call, the_same_in_every_call, never_twice_in_a_call, last_call_again, lopsided],
)
def test_wrong_routes_are_rejected(wrong, trust):
    """One draw for a whole batch, as in the literature, is the first of them."""
    rng = np.random.default_rng(0)
    assert not rows_lawful(wrong(rng, 8000, 3), 4, 3)
    assert rows_lawful(rng.integers(4, size=24_000), 4, 3)
    trust("G5", "wrong samplers rejected", 1, of=1)


def test_the_right_law_from_another_source_passes():
    assert lawful(table(list(itertools.islice(other_rate(1.0), DRAWN))), Poisson(0.25))
    assert lawful(table(list(itertools.islice(fixed_size(), DRAWN))), Fixed(2, COUNT))


@pytest.mark.parametrize("sampler", [Poisson(0.25), Fixed(3, COUNT)], ids=str)
def test_the_gate_draws_afresh_for_every_answer(sampler):
    """Record i is one lit pixel, so a sum without noise tells who was drawn."""
    relation = sampler.neighbours[0]
    box = Sensitive(np.eye(COUNT).reshape(COUNT, 1, 2, 4), np.zeros(COUNT, int), Spec((1, 2, 4), 1))
    gate = Gate(
        box,
        Plan((Stage("it", "sum", 0.0, 10**6, sampler),), relation),
        NullLedger(),
        NullLedger(),
        runtime=Runtime("cpu", 16),
    )
    chosen = (
        torch.stack(
            [
                gate.sum("it", lambda image, label: image.flatten(), clip_norm=1.0)
                for _ in range(1500)
            ]
        )
        .round()
        .bool()
    )
    assert lawful(chosen.numpy(), sampler)


@pytest.mark.parametrize("learning", [False, True])
def test_the_gate_draws_a_shard_for_every_row(learning):
    """Each state is its shard's own number, so an answer without noise tells who was drawn; learning in between changes no draw."""
    box = Sensitive(np.zeros((COUNT, 1, 1, 1)), np.zeros(COUNT, int), Spec((1, 1, 1), 1))
    plan = Plan((Stage("it", "query_random_shards", 0.0, 10**6, Shards(4)),), Neighbours.REPLACE)
    gate = Gate(box, plan, NullLedger(), NullLedger())
    seen = []
    gate.split_into_shards(4, {"own": torch.arange(4.0)})
    for _ in range(1500):
        if learning:
            gate.update_shards(
                lambda images, labels, state: {"own": state["own"] + images.sum()},
                shard_indices=torch.arange(2),
            )
        seen.append(
            gate.query_random_shards(
                "it", lambda state, row: state["own"] + row, torch.zeros(5), clip_norm=9.0
            )
        )
    assert rows_lawful(torch.cat(seen).long().numpy(), 4, 5)


def test_draws_cannot_be_seeded_from_outside():
    for sampler in (Poisson(0.5), Fixed(32, 64), Shards(64)):
        draws = []
        for _ in range(20):
            torch.manual_seed(0)
            np.random.seed(0)
            draws.append(tuple(sampler.draw(64, SecretRandom()).tolist()))
        assert len(set(draws)) > 1


def test_routes_cannot_be_seeded_from_outside(tmp_path):
    box = Sensitive(np.zeros((64, 1, 1, 1)), np.zeros(64, int), Spec((1, 1, 1), 1))
    plan = Plan((Stage("it", "query_random_shards", 0.0, 32, Shards(64)),), Neighbours.REPLACE)
    draws = []
    for turn in range(5):
        torch.manual_seed(0)
        np.random.seed(0)
        gate = Gate(box, plan, Ledger(tmp_path / f"{turn}.jsonl"), Budget(math.inf))
        gate.split_into_shards(64, {"own": torch.arange(64.0)})
        draws.append(
            tuple(
                gate.query_random_shards(
                    "it", lambda state, row: state["own"] + row, torch.zeros(32), clip_norm=99.0
                ).tolist()
            )
        )
    assert len(set(draws)) == 5


def test_full_takes_everything():
    assert Full().draw(5, SecretRandom()) is None


def test_fixed_knows_its_size():
    with pytest.raises(PlanError, match="another size"):
        Fixed(2, 9).draw(8, SecretRandom())


@pytest.mark.parametrize("count", [0, 1, 2])
def test_poisson_of_few(count):
    assert len(Poisson(1.0).draw(count, SecretRandom())) == count
    assert Poisson(1e-18).draw(count, SecretRandom()).numel() == 0


def test_rate_is_never_exceeded(monkeypatch):
    """Uniforms lie on the lattice k 2^-53, k from 1: the chance of k 2^-53 <= rate is the rate, rounded down."""
    monkeypatch.setattr(
        SecretRandom,
        "uniform",
        lambda self, count: torch.tensor([0.25, 0.25 + 2**-53], dtype=torch.float64),
    )
    assert Poisson(0.25).draw(2, SecretRandom()).tolist() == [0]


def test_shards_at_the_edge_of_the_lattice(monkeypatch):
    for value, shard in ((2.0**-53, 0), (1.0, 0), (1 - 2.0**-53, 6), (0.5, 3)):
        monkeypatch.setattr(
            SecretRandom,
            "uniform",
            lambda self, count, value=value: torch.full((count,), value, dtype=torch.float64),
        )
        assert Shards(7).draw(2, SecretRandom()).tolist() == [shard, shard]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Poisson(0.0),
        lambda: Poisson(-0.1),
        lambda: Poisson(1.1),
        lambda: Poisson(math.nan),
        lambda: Fixed(0, 5),
        lambda: Fixed(6, 5),
        lambda: Fixed(-1, 5),
        lambda: Shards(0),
        lambda: Shards(-3),
    ],
)
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
        assert (
            Stage("a", "query_sample", 0.0, 3, sampler).event() == dpa.NonPrivateDpEvent()
        )  # a sample without noise is the records themselves


def test_every_pair_of_verb_and_draw_is_allowed_or_refused(tmp_path):
    """Rows in order of position lie further apart than one record can move them, and a sum over all shards has no draw at all."""
    box = Sensitive(
        np.zeros((COUNT, 1, 1, 1)), np.zeros(COUNT, int), Spec((1, 1, 1), 1, COUNT, (COUNT,))
    )
    allowed = set()
    for verb, sampler, relation in itertools.product(
        [*PROVEN_SAMPLERS, "shout"], [Full(), Poisson(0.5), Fixed(2, COUNT), Shards(2)], Neighbours
    ):
        try:
            Gate(
                box,
                Plan((Stage("it", verb, 0.0, 1, sampler),), relation),
                Ledger(tmp_path / "none.jsonl"),
                Budget(math.inf),
            )
        except PlanError:
            continue
        allowed.add((verb, type(sampler).__name__, str(relation)))
    assert allowed == {
        ("sum", "Full", "add-remove"),
        ("sum", "Full", "replace"),
        ("sum", "Poisson", "add-remove"),
        ("sum", "Fixed", "replace"),
        ("rows", "Full", "replace"),
        ("rows", "Full", "local"),
        ("query_sample", "Full", "add-remove"),
        ("query_sample", "Full", "replace"),
        ("query_sample", "Poisson", "add-remove"),
        ("query_sample", "Fixed", "replace"),
        ("sorted_blocks", "Full", "replace"),
        ("query_random_shards", "Shards", "replace"),
        ("sum_over_shards", "Full", "replace"),
        ("sum_over_shards", "Full", "client"),
        ("query_clients", "Full", "replace"),
        ("query_clients", "Full", "client"),
        ("query_clients", "Shards", "replace"),
        ("privatize", "Full", "local"),
    }
    assert set(SAMPLERS) == {"full", "poisson", "fixed", "shards"}
