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
from privot.privacy.noise import SecretRandom
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import SAMPLERS, Fixed, Full, Poisson, Shards
from privot.privacy.sensitivity import PROVEN_SAMPLERS
from privot.runtime import Runtime

COUNT = 8
DRAWN = 100_000
FALSE_ALARM = 1e-9


def tabulate(draws, count=COUNT):
    """[draws, units]: who was drawn. A unit is a record, or a shard."""
    chosen = np.zeros((len(draws), count), bool)
    units = [np.asarray(draw) for draw in draws]
    rows = np.arange(len(units)).repeat([len(draw) for draw in units])
    chosen[rows, np.concatenate(units)] = True
    return chosen


def is_lawful(chosen, sampler):
    """Every count is binomial: test each exactly, all together at a false alarm of 1e-9.

    Marginals, pairs of units within a draw, sizes, and pairs over two draws in succession.
    """
    together, sizes = state_law(sampler)
    units = chosen.shape[1]
    inside = np.triu_indices(units)  # the diagonal holds the marginals
    pairs = chosen[: len(chosen) // 2 * 2].reshape(-1, 2, units)  # disjoint, so independent
    first, second = pairs.transpose(1, 0, 2).astype(float)
    independent = np.outer(np.diag(together), np.diag(together)).ravel()
    counts = [
        ((chosen.T.astype(float) @ chosen)[inside], together[inside], len(chosen)),
        (np.bincount(chosen.sum(1), minlength=units + 1), sizes, len(chosen)),
        ((first.T @ second).ravel(), independent, len(first)),
    ]
    pvalues = np.concatenate(
        [2 * np.minimum(binom.cdf(seen, n, p), binom.sf(seen - 1, n, p)) for seen, p, n in counts]
    )
    return bool(pvalues.min() * len(pvalues) > FALSE_ALARM)


def state_law(sampler):
    """(probability that two units are drawn together, law of the size), from the event's numbers."""
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


class BufferedRandom(SecretRandom):
    """The real stream, fetched in large pieces for speed."""

    rest = torch.empty(0)

    def uniform(self, count, device="cpu"):
        if len(self.rest) < count:
            self.rest = super().uniform(1_000_000)
        taken = self.rest[:count]
        self.rest = self.rest[count:]
        return taken


SAMPLES = [
    *(Poisson(rate) for rate in (0.25, 0.03, 1.0)),
    *(Fixed(drawn, COUNT) for drawn in (3, 1, COUNT)),
]


def check_law(sampler, draws, trust):
    rng = BufferedRandom()
    assert is_lawful(tabulate([sampler.draw(COUNT, rng) for _ in range(draws)]), sampler)
    trust("G5", "draws of the stated law", draws, of=draws)


@pytest.mark.parametrize("sampler", SAMPLES, ids=str)
def test_law(sampler, trust):
    check_law(sampler, DRAWN // 10, trust)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Poisson(0.25), Fixed(3, COUNT)], ids=str)
def test_law_of_many_draws(sampler, trust):
    check_law(sampler, DRAWN, trust)


def rows_are_lawful(shards, count, rows):
    """The shards of ``rows`` answers a call are uniform and independent within and between calls."""
    whole = shards[: len(shards) // (2 * rows) * 2 * rows]
    row_by_row = whole.reshape(-1, 2, rows).transpose(0, 2, 1).reshape(-1)
    return all(
        is_lawful(tabulate(order[:, None], count), Shards(count)) for order in (shards, row_by_row)
    )


@pytest.mark.parametrize("count", [1, 3, 4, 11])
@pytest.mark.parametrize("rows", [1, 5])
def test_law_of_shards(count, rows):
    rng = BufferedRandom()
    draws = torch.cat([Shards(count).draw(rows, rng) for _ in range(DRAWN // 10)])
    assert rows_are_lawful(draws.numpy(), count, rows)


# Wrong samplers: each is one draw, or the draws of an epoch, from a generator


def draw_block_of_neighbours(rng):
    """Marginals, sizes and sequence are right; pairs are not."""
    return [(rng.integers(COUNT) + np.arange(2)) % COUNT]


def shuffle_an_epoch(rng):
    return rng.permutation(COUNT).reshape(-1, 2)


def cycle_an_epoch(rng):
    return np.random.default_rng(0).permutation(COUNT).reshape(-1, 2)


def draw_two(rng):
    return [rng.permutation(COUNT)[:2]]


def draw_at_rate(factor):
    return lambda rng: [np.flatnonzero(rng.random(COUNT) < 0.25 * factor)]


def skip_empty(rng):
    return [draw for draw in draw_at_rate(1.0)(rng) if len(draw)]


def repeat_draws(draw, count):
    rng = np.random.default_rng(0)
    draws = itertools.chain.from_iterable(draw(rng) for _ in itertools.count())
    return list(itertools.islice(draws, count))


@pytest.mark.parametrize(
    ("wrong", "sampler"),
    [
        (shuffle_an_epoch, Fixed(2, COUNT)),
        (shuffle_an_epoch, Poisson(0.25)),
        (draw_two, Poisson(0.25)),
        (cycle_an_epoch, Fixed(2, COUNT)),
        (lambda rng: np.arange(4)[:, None], Shards(4)),
        (draw_at_rate(0.9), Poisson(0.25)),
        (draw_at_rate(1.1), Poisson(0.25)),
        (skip_empty, Poisson(0.25)),
        (draw_block_of_neighbours, Fixed(2, COUNT)),
    ],
)
def test_wrong_samplers_are_rejected(wrong, sampler, trust):
    units = getattr(sampler, "num_shards", COUNT)
    assert not is_lawful(tabulate(repeat_draws(wrong, DRAWN // 4), units), sampler)
    trust("G5", "wrong samplers rejected", 1, of=1)


WRONG_ROUTES = {  # of [calls] x [rows]; one draw for a whole batch is common in the literature
    "shared by a call": lambda rng, calls, rows: rng.integers(4, size=calls).repeat(rows),
    "the same in every call": lambda rng, calls, rows: np.tile(rng.integers(4, size=rows), calls),
    "never twice in a call": lambda rng, calls, rows: np.concatenate(
        [rng.permutation(4)[:rows] for _ in range(calls)]
    ),
    "last call again": lambda rng, calls, rows: (
        rng.integers(4, size=(calls // 2, rows)).repeat(2, 0).ravel()
    ),
    "lopsided": lambda rng, calls, rows: rng.choice(
        4, size=calls * rows, p=[0.28, 0.24, 0.24, 0.24]
    ),
}


@pytest.mark.parametrize("name", WRONG_ROUTES)
def test_wrong_routes_are_rejected(name, trust):
    rng = np.random.default_rng(0)
    assert not rows_are_lawful(WRONG_ROUTES[name](rng, 8000, 3), 4, 3)
    assert rows_are_lawful(rng.integers(4, size=24_000), 4, 3)
    trust("G5", "wrong samplers rejected", 1, of=1)


def test_the_right_law_from_another_source_passes():
    for draw, sampler in ((draw_at_rate(1.0), Poisson(0.25)), (draw_two, Fixed(2, COUNT))):
        assert is_lawful(tabulate(repeat_draws(draw, DRAWN // 2)), sampler)


def make_gate(stage, pixels, neighbours=Neighbours.REPLACE):
    dataset = Sensitive(pixels, np.zeros(len(pixels), int), Spec(pixels.shape[1:], 1))
    plan = Plan((stage,), neighbours)
    return Gate(dataset, plan, NullLedger(), Budget(math.inf), runtime=Runtime("cpu", 16))


@pytest.mark.parametrize("sampler", [Poisson(0.25), Fixed(3, COUNT)], ids=str)
def test_the_gate_draws_afresh_for_every_answer(sampler):
    """Record i is one lit pixel, so a sum without noise shows who was drawn."""
    pixels = np.eye(COUNT).reshape(COUNT, 1, 2, 4)
    gate = make_gate(Stage("it", "sum", 0.0, 10**6, sampler), pixels, sampler.neighbours[0])
    answers = [
        gate.sum("it", lambda image, label: image.flatten(), clip_norm=1.0) for _ in range(600)
    ]
    assert is_lawful(torch.stack(answers).round().bool().numpy(), sampler)


def make_shard_gate(num_shards, num_records=COUNT):
    """The state of a shard is its own number, so an answer without noise shows who was drawn."""
    stage = Stage("it", "query_random_shards", 0.0, 10**6, Shards(num_shards))
    gate = make_gate(stage, np.zeros((num_records, 1, 1, 1)))
    gate.split_into_shards(num_shards, {"own": torch.arange(float(num_shards))})
    return gate


def query_rows(gate, rows):
    return gate.query_random_shards(
        "it", lambda state, row: state["own"] + row, torch.zeros(rows), clip_norm=99.0
    )


@pytest.mark.parametrize("learning", [False, True])
def test_the_gate_draws_a_shard_for_every_row(learning):
    """An update in between changes no draw."""
    gate = make_shard_gate(4)
    answers = []
    for _ in range(600):
        if learning:
            gate.update_shards(
                lambda images, labels, state: {"own": state["own"] + images.sum()},
                shard_indices=torch.arange(2),
            )
        answers.append(query_rows(gate, 5))
    assert rows_are_lawful(torch.cat(answers).long().numpy(), 4, 5)


def test_draws_cannot_be_seeded_from_outside():
    makers = [
        lambda: Poisson(0.5).draw(64, SecretRandom()),
        lambda: Fixed(32, 64).draw(64, SecretRandom()),
        lambda: Shards(64).draw(64, SecretRandom()),
        lambda: query_rows(make_shard_gate(64, 64), 32),
    ]
    for draw in makers:
        draws = set()
        for _ in range(5):
            torch.manual_seed(0)
            np.random.seed(0)
            draws.add(tuple(draw().tolist()))
        assert len(draws) == 5


def test_sizes_at_the_edge():
    assert Full().draw(5, SecretRandom()) is None
    with pytest.raises(PlanError, match="another size"):
        Fixed(2, 9).draw(8, SecretRandom())
    for count in range(3):
        assert len(Poisson(1.0).draw(count, SecretRandom())) == count
        assert Poisson(1e-18).draw(count, SecretRandom()).numel() == 0


@pytest.mark.parametrize(
    ("sampler", "uniform", "drawn"),
    [
        (Poisson(0.25), [0.25, 0.25 + 2**-53], [0]),  # the rate, rounded down, is never exceeded
        (Poisson(1.0), [1.0, 1.0], [0, 1]),
        (Shards(7), [2.0**-53, 1.0], [0, 0]),
        (Shards(7), [1 - 2.0**-53, 0.5], [6, 3]),
    ],
)
def test_draws_at_the_edges_of_the_lattice(monkeypatch, sampler, uniform, drawn):
    """Uniforms are k 2^-53, k from 1."""
    numbers = torch.tensor(uniform, dtype=torch.float64)
    monkeypatch.setattr(SecretRandom, "uniform", lambda self, count: numbers)
    assert sampler.draw(2, SecretRandom()).tolist() == drawn


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        *((Poisson, (rate,)) for rate in (0.0, -0.1, 1.1, math.nan)),
        *((Fixed, (drawn, 5)) for drawn in (0, 6, -1)),
        *((Shards, (count,)) for count in (0, -3)),
    ],
)
def test_bad_numbers_are_refused(kind, numbers):
    with pytest.raises(PlanError, match="needed"):
        kind(*numbers)


def test_events():
    noise = dpa.GaussianDpEvent(2.0)
    for sampler, event in {
        Full(): noise,
        Poisson(0.1): dpa.PoissonSampledDpEvent(0.1, noise),
        Fixed(3, 9): dpa.SampledWithoutReplacementDpEvent(9, 3, noise),
        Shards(9): dpa.SampledWithoutReplacementDpEvent(9, 1, noise),
    }.items():
        assert sampler.event(2.0) == event
        without_noise = Stage("a", "query_sample", 0.0, 3, sampler)  # the records themselves
        assert without_noise.event() == dpa.NonPrivateDpEvent()


def test_every_pair_of_verb_and_draw_is_allowed_or_refused():
    """Rows lie further apart than one record can move them, and a sum over all shards has no draw."""
    pixels = np.zeros((COUNT, 1, 1, 1))
    spec = Spec((1, 1, 1), 1, COUNT, (COUNT,))
    dataset = Sensitive(pixels, np.zeros(COUNT, int), spec)
    samplers = [Full(), Poisson(0.5), Fixed(2, COUNT), Shards(2)]
    allowed = {}
    for operation, sampler, neighbours in itertools.product(
        [*PROVEN_SAMPLERS, "shout"], samplers, Neighbours
    ):
        try:
            plan = Plan((Stage("it", operation, 0.0, 1, sampler),), neighbours)
            Gate(dataset, plan, NullLedger(), Budget(math.inf))
        except PlanError:
            continue
        allowed.setdefault(operation, set()).add(f"{type(sampler).__name__} {neighbours}")
    sample = {"Full add-remove", "Full replace", "Poisson add-remove", "Fixed replace"}
    assert allowed == {
        "sum": sample,
        "query_sample": sample,
        "rows": {"Full replace", "Full local"},
        "sorted_blocks": {"Full replace"},
        "query_random_shards": {"Shards replace"},
        "sum_over_shards": {"Full replace", "Full client"},
        "query_clients": {"Full replace", "Full client", "Shards replace"},
        "privatize": {"Full local"},
    }
    assert set(SAMPLERS) == {"full", "poisson", "fixed", "shards"}
