"""The law of the noise, its grid, and where its bits come from."""

import ast
import math
import os
import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import kstest, kstwobign

import privot.privacy
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.noise import MAX_NORMAL, SecretRandom, add_noise, choose_grid
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import Shards
from privot.runtime import Runtime

SCALES = [(1.0, 0.01), (3.0, 0.5), (1e-3, 1.07), (40.0, 20.0)]  # (bound, noise multiplier)
DRAWS = 1_000_000


@pytest.fixture(autouse=True)
def _from_the_system(monkeypatch):
    """The source itself is tested here, so nothing stands for it."""
    monkeypatch.setattr("privot.privacy.noise.os", os)


def nothing(image, label):
    return image.new_zeros(DRAWS)


def drawn(ledger, bound, noise, **more):
    """The noise of 10^6 coordinates, through the gate: every part of the answer is zero."""
    box = Sensitive(np.zeros((2, 1, 1, 1), np.uint8), np.zeros(2, int), Spec((1, 1, 1), 1))
    gate = Gate(
        box, Plan((Stage("all", "sum", noise),), Neighbours.REPLACE), ledger, Budget(1e9), **more
    )
    return gate.sum("all", nothing, clip_norm=bound)


def kolmogorov(values, std):
    """scipy's kstest, ten times as fast at this length: D at both sides of every step, and its limit law."""
    expected = ndtr(np.sort(values / std))
    places = np.arange(len(values) + 1) / len(values)
    distance = max((places[1:] - expected).max(), (expected - places[:-1]).max())
    return kstwobign.sf(distance * math.sqrt(len(values))) > 1e-9


def spread(values, std):
    return abs(values.std() / std - 1) < 0.01


def lawful(values, std):
    values = values.numpy()
    return bool(kolmogorov(values, std) and spread(values, std))


@pytest.mark.parametrize(("bound", "noise"), SCALES)
def test_law_and_grid(ledger, bound, noise, trust):
    values = drawn(ledger, bound, noise)
    std = 2 * bound * noise
    assert values.dtype == torch.float64
    assert lawful(values, std)
    steps = values / choose_grid(bound, std)
    assert torch.equal(steps, steps.round())
    assert steps.abs().max() < 2**53
    trust("G1", "settings of 10^6 draws with the declared law", 1, of=1)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: the noise of a GPU is not tested"
)
@pytest.mark.parametrize(("bound", "noise"), SCALES)
def test_law_and_grid_on_a_gpu(ledger, bound, noise, trust):
    values = drawn(ledger, bound, noise, runtime=Runtime("cuda")).cpu()
    std = 2 * bound * noise
    assert lawful(values, std)
    steps = values / choose_grid(bound, std)
    assert torch.equal(steps, steps.round())
    trust("G1", "settings of 10^6 draws with the declared law", 1, of=1)


@pytest.mark.parametrize("factor", [0.97, 1.03])
@pytest.mark.parametrize(("bound", "noise"), SCALES)
def test_twins_are_rejected(ledger, monkeypatch, bound, noise, factor, trust):
    honest = SecretRandom.normal
    monkeypatch.setattr(SecretRandom, "normal", lambda self, *where: honest(self, *where) * factor)
    values = drawn(ledger, bound, noise)
    std = 2 * bound * noise
    assert not lawful(values, std)
    # Either half of the check would do: none of them is there for show.
    assert not kolmogorov(values.numpy(), std)
    assert not spread(values.numpy(), std)
    trust("G1", "twins with 0.97 or 1.03 of the noise rejected", 1, of=1)


@pytest.mark.parametrize(
    "verb",
    [
        "sum",
        "per_class",
        "added",
        "rows",
        "query_sample",
        "sorted_blocks",
        "query_random_shards",
        "sum_over_shards",
    ],
)
@pytest.mark.parametrize(("count", "fill"), [(200, 1.0), (400, 0.3)])
def test_every_verb_gets_the_noise_of_the_table(tmp_path, verb, count, fill):
    """10^5 coordinates, whatever the number of records and their size: the noise is a function of public numbers alone."""
    box = Sensitive(
        np.full((count, 1, 1, 1), fill),
        np.arange(count) % 2,
        Spec((1, 1, 1), 2, count, (count // 2, count // 2)),
    )
    relation = Neighbours.ADD_REMOVE if verb == "added" else Neighbours.REPLACE
    found = []
    wide = 100_000

    def query(image, label, size):
        return image.flatten().expand(size)

    for noise in (0.0, 1.5):
        name = {"per_class": "sum", "added": "sum"}.get(verb, verb)
        stage = (
            Stage("it", "query_random_shards", noise, 50, Shards(4))
            if verb == "query_random_shards"
            else Stage("it", name, noise)
        )
        gate = Gate(
            box, Plan((stage,), relation), Ledger(tmp_path / f"{noise}.jsonl"), Budget(math.inf)
        )
        if name == "sum":
            gate._chunk_size = 50  # keeps the parts small
            found.append(gate.sum("it", query, wide, clip_norm=0.7, per_class=verb == "per_class"))
        elif verb == "rows":
            found.append(gate.rows("it", query, wide // 200, clip_norm=0.7))
        elif verb == "query_sample":
            found.append(
                gate.query_sample(
                    "it", lambda records: torch.ones(wide), clip_norm=0.7, shape=(wide,)
                )
            )
        elif verb in ("query_random_shards", "sum_over_shards"):
            gate.split_into_shards(4, {"mean": torch.zeros(4)})
            gate.update_shards(lambda images, labels, state: {"mean": images.mean()})
            if verb == "sum_over_shards":
                found.append(
                    gate.sum_over_shards(
                        "it", lambda state: state["mean"].expand(wide), clip_norm=0.7
                    )
                )
            else:  # every shard has the same mean here, so the draws do not show
                found.append(
                    gate.query_random_shards(
                        "it",
                        lambda state, row: state["mean"].expand(wide // 50) + row,
                        torch.zeros(50),
                        clip_norm=0.7,
                    )
                )
        else:
            frame = torch.ones(500, 4) / math.sqrt(2000)  # of norm 1
            means = gate.sorted_blocks("it", query, 4, frame=frame, num_blocks=100, clip_norm=0.7)
            found.append(means * (count // 200))
    noise = (found[1] - found[0]).flatten().numpy()
    std = 1.5 * 0.7 * (1 if verb == "added" else 2)
    assert kolmogorov(noise, std)
    assert noise.std() == pytest.approx(std, rel=0.02)  # 7 deviations are 1.6 %


def test_no_step_goes_without_noise(ledger):
    box = Sensitive(np.ones((4, 1, 1, 1)), np.zeros(4, int), Spec((1, 1, 1), 1))
    gate = Gate(box, Plan((Stage("it", "sum", 1.0, 300),), Neighbours.REPLACE), ledger, Budget(1e9))
    answers = torch.stack(
        [
            gate.sum("it", lambda image, label: image.flatten().expand(400), clip_norm=1.0)
            for _ in range(300)
        ]
    )
    noise = answers - 4 / 20  # four parts of norm 1 in 400 dimensions
    assert kolmogorov(noise.flatten().numpy(), 2.0)
    assert (noise.std(1) - 2.0).abs().max() < 7 * 2.0 / math.sqrt(800)  # every step on its own
    assert len(answers.unique()) > 0.99 * answers.numel()


def test_coordinates_are_independent(ledger):
    """Box-Muller makes two values of one pair; neither they nor neighbours may hang together, in value or in size."""
    values = drawn(ledger, 1.0, 0.5)
    for shift in (1, 2, DRAWS // 2):
        for seen in (values, values.square()):
            pair = torch.stack([seen[:-shift], seen[shift:]])
            assert abs(torch.corrcoef(pair)[0, 1]) < 7 / math.sqrt(
                DRAWS - shift
            )  # 7 deviations: 1e-11


def test_no_two_answers_share_noise(tmp_path):
    first, again = (drawn(Ledger(tmp_path / f"{each}.jsonl"), 1.0, 1.0) for each in range(2))
    assert (
        first == again
    ).float().mean() < 1e-5  # a grid of 2^-24 makes some meet: about 10^6 * 1e-8
    stream = SecretRandom()
    other = SecretRandom()
    a = stream.normal((10_000,))
    b = stream.normal((10_000,))
    c = other.normal((10_000,))
    assert not any(bool((x == y).any()) for x, y in ((a, b), (a, c), (b, c)))


def test_rows_of_one_answer_differ():
    values = SecretRandom().normal((100, 50))
    assert len(values.unique()) == values.numel()


def test_only_the_insecure_seed_replays(tmp_path):
    runs = [
        drawn(Ledger(tmp_path / f"{each}.jsonl"), 1.0, 1.0, insecure_seed=5) for each in range(2)
    ]
    assert torch.equal(*runs)
    assert lawful(runs[0], 2.0)
    a = SecretRandom(5)
    b = SecretRandom(5)
    other = SecretRandom(6)
    assert torch.equal(a.uniform(9), b.uniform(9))
    assert not torch.equal(a.uniform(9), other.uniform(9))
    assert not torch.equal(a.uniform(9), a.uniform(9))
    assert a.insecure
    assert not SecretRandom().insecure


def test_global_seeds_do_not_reach_the_noise():
    seen = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        seen.append((SecretRandom().normal((1000,)), SecretRandom().permutation(100)))
    assert not (seen[0][0] == seen[1][0]).any()
    assert not torch.equal(seen[0][1], seen[1][1])


def test_the_operating_system_is_the_only_source(ledger, monkeypatch, tmp_path):
    """Known bytes make known noise, and the generators of torch, numpy and Python stand where they stood."""
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    asked = []
    monkeypatch.setattr(
        os,
        "urandom",
        lambda count: (asked.append(count), np.arange(count // 8, dtype="<u8").tobytes())[1],
    )
    first, again = (drawn(Ledger(tmp_path / f"{each}.jsonl"), 1.0, 1.0) for each in range(2))
    assert torch.equal(first, again)
    assert (
        asked == [asked[0], 12 * DRAWS] * 2
    )  # the order of the records; three words of eight bytes for two numbers
    assert asked[0] < 100
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()


FORBIDDEN = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "multinomial",
    "poisson",
} | {
    "Generator",
    "default_generator",
    "default_rng",
    "RandomState",
    "random",
    "manual_seed",
    "seed",
    "initial_seed",
    "fork_rng",
    "dropout",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
    "rvs",
    "shuffle",
    "choice",
}


def generators(source):
    """Names of pseudo-random generators that a module uses, and its sources of bytes."""
    found = set()
    bytes_from = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {
                alias.name
                for alias in node.names
                if alias.name.split(".")[0] in ("random", "secrets")
            }
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module, *(alias.name for alias in node.names)}
            unsafe = FORBIDDEN | {"bernoulli", "secrets"}
            found |= {name for name in names if name.split(".")[-1] in unsafe}
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in FORBIDDEN or (
                node.attr in ("normal", "uniform", "bernoulli") and owner not in ("self", "rng")
            ):
                found.add(f"{owner}.{node.attr}")
            if owner == "os" and "random" in node.attr:
                bytes_from.add(node.attr)
        unsafe_names = FORBIDDEN | {"bernoulli", "__import__", "eval", "exec"}
        if isinstance(node, ast.Name) and node.id in unsafe_names:
            found.add(node.id)
    return found, bytes_from


def test_no_generator_is_reachable_in_the_trusted_part():
    folder = Path(privot.privacy.__file__).parent
    seen = {
        path.relative_to(folder.parent).as_posix(): generators(path.read_text())
        for path in [*folder.rglob("*.py"), folder.parent / "data" / "dataset.py"]
    }
    assert {name: found for name, (found, _) in seen.items() if found} == {}
    assert {name for name, (_, source) in seen.items() if source} == {"privacy/noise.py"}
    assert seen["privacy/noise.py"][1] == {"urandom"}


@pytest.mark.parametrize(
    "planted",
    [
        "import random",
        "from numpy.random import default_rng",
        "x = torch.randn(3)",
        "x = torch.normal(0.0, 1.0, (3,))",
        "x.normal_()",
        "np.random.seed(0)",
        "g = torch.Generator()",
        "from numpy import random as r",
        "x = norm.rvs(3)",
        "import secrets",
        "x = torch.bernoulli(p)",
        "from torch import bernoulli",
    ],
)
def test_planted_generators_are_seen(planted):
    assert generators(planted)[0]


def test_uniform_lattice_has_53_bits(monkeypatch):
    values = SecretRandom().uniform(100_000) * 2.0**53
    assert torch.equal(values, values.round())
    assert 0.49 < (values % 2).mean() < 0.51  # the last of the 53 bits is alive
    assert values.min() >= 1
    assert values.max() <= 2**53
    monkeypatch.setattr(os, "urandom", lambda count: b"\xff" * count)
    assert SecretRandom().uniform(1).item() == 1.0
    monkeypatch.setattr(os, "urandom", lambda count: b"\0" * count)
    assert SecretRandom().uniform(1).item() == 2.0**-53
    # float32 noise ends at 5.77 deviations; ours reaches 12.1.
    assert SecretRandom().normal((2,)).abs().max() == pytest.approx(
        math.sqrt(2 * 106 * math.log(2))
    )


def forced(monkeypatch, half, top, bits):
    """The upper ``bits`` of the word of each radius are 0 (``top=0``) or 1, as happens once in 2^bits."""

    def rare(count, honest=os.urandom):
        words = np.frombuffer(honest(count), "<u8").reshape(3, half).copy()
        words[0] >>= np.uint64(bits)
        words[0] |= np.uint64((2**bits - 1) << (64 - bits) if top else 0)
        return words.tobytes()

    with monkeypatch.context() as patched:
        patched.setattr(os, "urandom", rare)
        return torch.hypot(*SecretRandom().normal((2 * half,)).view(2, half))


def test_tails_are_populated(monkeypatch):
    """Bytes that force the uniform of the radius under 2^-24 give noise beyond 5.77 deviations, with the right conditional law."""
    radius = forced(monkeypatch, 100_000, 0, 24)
    assert radius.min() > 5.76
    extra = radius.square() / 2 - 24 * math.log(2)  # exponential beyond the threshold
    assert kstest(extra.numpy(), "expon").pvalue > 1e-9


def coarse(half):
    """Uniforms of 53 bits, of which the upper 34 are 0, and their radii: what a radius of one word would be."""
    uniform = SecretRandom().uniform(half) * 2.0**-34
    uniform = (uniform * 2.0**53).ceil() * 2.0**-53
    return (-2 * uniform.log()).sqrt()


def test_rare_radii_are_no_lattice(monkeypatch):
    """Were they, an answer far out could be reached from one total and not from its neighbour's, whatever the grid.

    The place of a radius between two neighbours of the lattice of 53 bits is uniform, for the largest radii and the smallest; of radii
    made of one word it is not, though the grid of an answer blurs it.
    """
    grid = 2.0**-24

    def place(radius):
        return ((-radius.square() / 2).exp() * 2.0**53).frac().numpy()

    assert kstest(place((coarse(100_000) / grid).round() * grid), "uniform").pvalue < 1e-100, (
        "the control"
    )
    assert kstest(place(forced(monkeypatch, 100_000, 0, 34)), "uniform").pvalue > 1e-9
    small = (
        forced(monkeypatch, 100_000, 1, 34).square() / 2
    )  # nearly the distance of the uniform to 1
    assert kstest((small * 2.0**53).frac().numpy(), "uniform").pvalue > 1e-9


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4), (7,)])
def test_shapes(shape):
    assert SecretRandom().normal(shape).shape == shape
    assert (
        add_noise(torch.zeros(shape, dtype=torch.float64), 1.0, 2.0**-24, SecretRandom()).shape
        == shape
    )


def test_order_is_a_permutation():
    assert sorted(SecretRandom().permutation(50).tolist()) == list(range(50))
    assert SecretRandom().permutation(0).tolist() == []


@pytest.mark.parametrize("bound", [1e-29, 1e-3, 1.0, 3.7, 2.0**20, 1e29])
@pytest.mark.parametrize("ratio", [0.0, 1e-12, 1e-3, 0.02, 1.0, 5.0, 64.0, 1e3, 1e12, 1e18])
def test_grid_keeps_every_sum_exact(bound, ratio):
    """A power of two, at most 2^-24 of the smaller scale while 2^22 parts, and the largest noise, stay under 2^53 steps."""
    std = bound * ratio
    grid = choose_grid(bound, std)
    assert math.frexp(grid)[0] == 0.5
    assert grid <= 2.0**-24 * min(bound, std or bound) or grid <= 2.0**-30 * max(bound, std)
    assert bound / grid * 2**22 <= 2**53
    assert MAX_NORMAL * std / grid < 2**52
    steps = torch.tensor([math.floor(bound / grid), 0.0, -1.0], dtype=torch.float64)
    for value, before in zip(
        add_noise(steps, std, grid, SecretRandom()), steps * grid, strict=True
    ):
        noise = Fraction(value.item()) - Fraction(before.item())
        assert (noise / Fraction(grid)).denominator == 1  # no rounding took place


def test_rounding_to_the_grid_is_to_the_nearest():
    values = add_noise(torch.zeros(100_000, dtype=torch.float64), 1.0, 1.0, SecretRandom())
    assert values.unique().numel() > 5
    assert abs(values.mean()) < 7 * math.sqrt(
        13 / 12 / 100_000
    )  # rounding adds 1/12 to the variance


def test_no_noise_is_no_noise():
    steps = torch.tensor([1.0, -3.0, 2.0**40], dtype=torch.float64)
    assert torch.equal(add_noise(steps, 0.0, 0.25, SecretRandom()), steps / 4)
