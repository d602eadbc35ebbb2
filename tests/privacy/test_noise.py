"""The law of the noise, its grid, and where its bits come from."""

import ast
import math
import os
import random
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import kstest, kstwobign
from support.fakes import NullLedger
from support.gate_rig import Rig

import privot.privacy
from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.noise import (
    MAX_NORMAL,
    SecretRandom,
    add_noise,
    bernoulli_bits,
    choose_grid,
    probability_bits,
)
from privot.privacy.plan import Budget, Plan, Stage
from privot.runtime import Runtime

SCALES = [(1.0, 0.01), (3.0, 0.5), (1e-3, 1.07), (40.0, 20.0)]  # (clip norm, noise multiplier)
every_scale = pytest.mark.parametrize(("clip_norm", "noise"), SCALES)
DRAWS = 1_000_000
WIDE = 100_000


@pytest.fixture(autouse=True)
def _from_the_system(monkeypatch):
    """The source itself is tested here, so nothing stands for it."""
    monkeypatch.setattr("privot.privacy.noise.os", os)


def make_gate(noise, pixels=(0.0, 0.0), **more):
    """Records of one pixel."""
    images = np.reshape(pixels, (-1, 1, 1, 1))
    dataset = Sensitive(images, np.zeros(len(images), int), Spec((1, 1, 1), 1))
    plan = Plan((Stage("it", "sum", noise, 300),), Neighbours.REPLACE)
    return Gate(dataset, plan, NullLedger(), Budget(math.inf), **more)


def draw_noise(clip_norm, noise, **more):
    """The noise of 10^6 coordinates, through the gate: every part of the answer is zero."""
    gate = make_gate(noise, **more)
    return gate.sum("it", lambda image, label: image.new_zeros(DRAWS), clip_norm=clip_norm)


def passes_kolmogorov(values, std):
    """scipy's kstest, ten times as fast: D at both sides of every step, and its limit law."""
    expected = ndtr(np.sort(values / std))
    steps = np.arange(len(values) + 1) / len(values)
    distance = max((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    return bool(kstwobign.sf(distance * math.sqrt(len(values))) > 1e-9)


def has_deviation(values, std):
    return bool(abs(values.std() / std - 1) < 0.01)


def check_law_and_grid(values, clip_norm, std, trust):
    assert values.dtype == torch.float64
    assert passes_kolmogorov(values.numpy(), std)
    assert has_deviation(values.numpy(), std)
    steps = values / choose_grid(clip_norm, std)
    assert torch.equal(steps, steps.round())
    assert steps.abs().max() < 2**53
    trust("G1", "settings of 10^6 draws with the declared law", 1, of=1)


@every_scale
def test_law_and_grid(clip_norm, noise, trust):
    check_law_and_grid(draw_noise(clip_norm, noise), clip_norm, 2 * clip_norm * noise, trust)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@every_scale
def test_law_and_grid_on_a_gpu(clip_norm, noise, trust):
    values = draw_noise(clip_norm, noise, runtime=Runtime("cuda")).cpu()
    check_law_and_grid(values, clip_norm, 2 * clip_norm * noise, trust)


@pytest.mark.parametrize("factor", [0.97, 1.03])
@every_scale
def test_twins_are_rejected(monkeypatch, clip_norm, noise, factor, trust):
    """By either half of the check: none of them is for show."""
    honest = SecretRandom.normal
    monkeypatch.setattr(SecretRandom, "normal", lambda self, *where: honest(self, *where) * factor)
    values = draw_noise(clip_norm, noise).numpy()
    assert not passes_kolmogorov(values, 2 * clip_norm * noise)
    assert not has_deviation(values, 2 * clip_norm * noise)
    trust("G1", "twins with 0.97 or 1.03 of the noise rejected", 1, of=1)


OPERATIONS = {  # operation, neighbours, per class, and how many answers share 10^5 numbers
    "sum": ("sum", Neighbours.REPLACE, False, 1),
    "per_class": ("sum", Neighbours.REPLACE, True, 1),
    "added": ("sum", Neighbours.ADD_REMOVE, False, 1),
    "rows": ("rows", Neighbours.REPLACE, False, 200),
    "query_sample": ("query_sample", Neighbours.REPLACE, False, 1),
    "sorted_blocks": ("sorted_blocks", Neighbours.REPLACE, False, 25_000),
    "query_random_shards": ("query_random_shards", Neighbours.REPLACE, False, 40),
    "sum_over_shards": ("sum_over_shards", Neighbours.REPLACE, False, 1),
}


def expand(image, label, size):
    return image.flatten().expand(size)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("count", "fill"), [(200, 1.0), (400, 0.3)])
def test_every_verb_gets_the_noise_of_the_table(name, count, fill):
    """Whatever the records' number and size: the noise is a function of public numbers alone."""
    *case, num_answers = OPERATIONS[name]
    size = WIDE // num_answers
    frame = torch.ones(500, 4) / math.sqrt(2000)  # of norm 1
    blocks = {"frame": frame, "num_blocks": 100} if name == "sorted_blocks" else {}
    answers = []
    for noise in (0.0, 1.5):
        rig = Rig(*case, query=expand, noise=noise, count=count, shape=(1, 1, 1), dim=size)
        rig.gate._chunk_size = 50  # keeps the parts small
        images = np.full((count, 1, 1, 1), fill)
        answers.append(rig.ask(images, scale=size, clip_norm=0.7, **blocks))
    noise = (answers[1] - answers[0]).flatten().numpy()
    std = 1.5 * 0.7 * (1 if name == "added" else 2)
    assert passes_kolmogorov(noise, std)
    assert noise.std() == pytest.approx(std, rel=0.02)  # 7 deviations are 1.6 %


def test_no_step_goes_without_noise():
    gate = make_gate(1.0, np.ones(4))
    answers = torch.stack([gate.sum("it", expand, 400, clip_norm=1.0) for _ in range(300)])
    noise = answers - 4 / 20  # four parts of norm 1 in 400 dimensions
    assert passes_kolmogorov(noise.flatten().numpy(), 2.0)
    assert (noise.std(1) - 2.0).abs().max() < 7 * 2.0 / math.sqrt(800)  # every step on its own
    assert len(answers.unique()) > 0.99 * answers.numel()


def test_coordinates_are_independent():
    """Neither the two values of a Box-Muller pair nor neighbours hang together, in value or size."""
    values = draw_noise(1.0, 0.5)
    for shift in (1, 2, DRAWS // 2):
        for numbers in (values, values.square()):
            pair = torch.stack([numbers[:-shift], numbers[shift:]])
            limit = 7 / math.sqrt(DRAWS - shift)  # 7 deviations: 1e-11
            assert abs(torch.corrcoef(pair)[0, 1]) < limit


def test_no_two_answers_share_noise():
    equal = draw_noise(1.0, 1.0) == draw_noise(1.0, 1.0)
    assert equal.float().mean() < 1e-5  # a grid of 2^-24 makes some meet: about 10^6 * 1e-8
    rng = SecretRandom()
    draws = [rng.normal((10_000,)), rng.normal((10_000,)), SecretRandom().normal((10_000,))]
    assert len(torch.cat(draws).unique()) == 30_000


def test_only_the_insecure_seed_replays():
    first, second = (draw_noise(1.0, 1.0, insecure_seed=5) for _ in range(2))
    assert torch.equal(first, second)
    assert passes_kolmogorov(first.numpy(), 2.0)
    one, same, other = SecretRandom(5), SecretRandom(5), SecretRandom(6)
    assert torch.equal(one.uniform(9), same.uniform(9))
    assert not torch.equal(one.uniform(9), other.uniform(9))
    assert not torch.equal(one.uniform(9), one.uniform(9))
    assert one.insecure
    assert not SecretRandom().insecure


def test_global_seeds_do_not_reach_the_noise():
    noise = []
    orders = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        noise.append(SecretRandom().normal((1000,)))
        orders.append(SecretRandom().permutation(100))
    assert not (noise[0] == noise[1]).any()
    assert not torch.equal(*orders)


def test_the_operating_system_is_the_only_source(monkeypatch):
    """Given bytes make given noise, and no generator of torch, numpy or Python moves."""

    def read_states():
        numpy_state = np.random.get_state()[1].tolist()
        return torch.get_rng_state().tolist(), numpy_state, random.getstate()

    before = read_states()
    counts = []

    def urandom(count):
        counts.append(count)
        return np.arange(count // 8, dtype="<u8").tobytes()

    monkeypatch.setattr(os, "urandom", urandom)
    assert torch.equal(draw_noise(1.0, 1.0), draw_noise(1.0, 1.0))
    # the order of the records; three words of eight bytes for two numbers
    assert counts == [counts[0], 12 * DRAWS] * 2
    assert counts[0] < 100
    assert read_states() == before


GENERATOR_NAMES = """
    rand randn randint randperm rand_like randn_like randint_like multinomial poisson Generator
    default_generator default_rng RandomState random manual_seed seed initial_seed fork_rng dropout
    normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ rvs shuffle
    choice
"""
FORBIDDEN = set(GENERATOR_NAMES.split())


def find_generators(source):
    """Names of pseudo-random generators that a module uses, and its sources of bytes."""
    names = set()
    byte_sources = set()
    unsafe_modules = FORBIDDEN | {"bernoulli", "secrets"}
    unsafe_names = FORBIDDEN | {"bernoulli", "__import__", "eval", "exec"}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                modules = {alias.name for alias in node.names}
                names |= {name for name in modules if name.split(".")[0] in ("random", "secrets")}
            case ast.ImportFrom(module=str(module)):
                imported = {module, *(alias.name for alias in node.names)}
                names |= {name for name in imported if name.split(".")[-1] in unsafe_modules}
            case ast.Attribute():
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if node.attr in FORBIDDEN or (
                    node.attr in ("normal", "uniform", "bernoulli") and owner not in ("self", "rng")
                ):
                    names.add(f"{owner}.{node.attr}")
                if owner == "os" and "random" in node.attr:
                    byte_sources.add(node.attr)
            case ast.Name() if node.id in unsafe_names:
                names.add(node.id)
    return names, byte_sources


def test_no_generator_is_reachable_in_the_trusted_part():
    folder = Path(privot.privacy.__file__).parent
    uses = {
        path.name: find_generators(path.read_text())
        for path in [*folder.rglob("*.py"), folder.parent / "data" / "dataset.py"]
    }
    assert {name: names for name, (names, _) in uses.items() if names} == {}
    sources = {name: byte_sources for name, (_, byte_sources) in uses.items() if byte_sources}
    assert sources == {"noise.py": {"urandom"}}


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
    assert find_generators(planted)[0]


def test_uniform_lattice_has_53_bits(monkeypatch):
    values = SecretRandom().uniform(100_000) * 2.0**53
    assert torch.equal(values, values.round())
    assert 0.49 < (values % 2).mean() < 0.51  # the last of the 53 bits is alive
    assert 1 <= values.min() < values.max() <= 2**53
    monkeypatch.setattr(os, "urandom", lambda count: b"\xff" * count)
    assert SecretRandom().uniform(1).item() == 1.0
    monkeypatch.setattr(os, "urandom", lambda count: b"\0" * count)
    assert SecretRandom().uniform(1).item() == 2.0**-53
    # float32 noise ends at 5.77 deviations; ours reaches 12.1.
    farthest = math.sqrt(2 * 106 * math.log(2))
    assert SecretRandom().normal((2,)).abs().max() == pytest.approx(farthest)


def draw_rare_radii(monkeypatch, count, top, bits):
    """The upper ``bits`` of each radius are 0 (``top=0``) or 1, as happens once in 2^bits."""

    def urandom(size, honest=os.urandom):
        words = np.frombuffer(honest(size), "<u8").reshape(3, count).copy()
        words[0] >>= np.uint64(bits)
        words[0] |= np.uint64((2**bits - 1) << (64 - bits) if top else 0)
        return words.tobytes()

    with monkeypatch.context() as patch:
        patch.setattr(os, "urandom", urandom)
        return torch.hypot(*SecretRandom().normal((2 * count,)).view(2, count))


def is_uniform(values):
    return kstest(values.frac().numpy(), "uniform").pvalue > 1e-9


def test_rare_radii_have_their_law_and_are_no_lattice(monkeypatch):
    """Were they, an answer far out could be reached from one total and not from its neighbour's.

    The position of a radius between two neighbours of the lattice of 53 bits is uniform, for the
    largest radii and the smallest; of radii made of one word it is not, though the grid of an
    answer blurs it.
    """
    radius = draw_rare_radii(monkeypatch, 100_000, 0, 24)
    assert radius.min() > 5.76
    extra = radius.square() / 2 - 24 * math.log(2)  # exponential beyond the threshold
    assert kstest(extra.numpy(), "expon").pvalue > 1e-9

    def locate(radius):
        return (-radius.square() / 2).exp() * 2.0**53

    grid = 2.0**-24
    coarse = (SecretRandom().uniform(100_000) * 2.0**19).ceil() * 2.0**-53  # 34 bits are 0
    coarse_radius = (-2 * coarse.log()).sqrt()
    assert not is_uniform(locate((coarse_radius / grid).round() * grid)), "the control"
    assert is_uniform(locate(draw_rare_radii(monkeypatch, 100_000, 0, 34)))
    small = draw_rare_radii(monkeypatch, 100_000, 1, 34)
    assert is_uniform(small.square() / 2 * 2.0**53)  # nearly the distance of the uniform to 1


def test_shapes_and_orders():
    rng = SecretRandom()
    for shape in [(), (0,), (1,), (3, 5), (2, 0, 4), (7,)]:
        assert rng.normal(shape).shape == shape
        total = torch.zeros(shape, dtype=torch.float64)
        assert add_noise(total, 1.0, 2.0**-24, rng).shape == shape
    assert sorted(rng.permutation(50).tolist()) == list(range(50))
    assert rng.permutation(0).tolist() == []


@pytest.mark.parametrize("clip_norm", [1e-29, 1e-3, 1.0, 3.7, 2.0**20, 1e29])
def test_grid_keeps_every_sum_exact(clip_norm):
    """A power of two: 2^22 parts, and the largest noise, stay under 2^53 steps."""
    for ratio in (0.0, 1e-12, 1e-3, 0.02, 1.0, 5.0, 64.0, 1e3, 1e12, 1e18):
        std = clip_norm * ratio
        grid = choose_grid(clip_norm, std)
        assert math.frexp(grid)[0] == 0.5
        fine = 2.0**-24 * min(clip_norm, std or clip_norm)
        assert grid <= max(fine, 2.0**-30 * max(clip_norm, std))
        assert clip_norm / grid * 2**22 <= 2**53
        assert MAX_NORMAL * std / grid < 2**52
        steps = torch.tensor([math.floor(clip_norm / grid), 0.0, -1.0], dtype=torch.float64)
        noisy = add_noise(steps, std, grid, SecretRandom())
        for value, before in zip(noisy.tolist(), (steps * grid).tolist(), strict=True):
            noise = Fraction(value) - Fraction(before)
            assert (noise / Fraction(grid)).denominator == 1  # no rounding took place


def test_recorded_grids():
    """2^-24 of the smaller scale, but never under 2^-30 of the larger."""
    for clip_norm, std, power in [
        (1.0, 1.0, -24),
        (1.0, 0.3, -26),
        (5.0, 0.0, -22),
        (1.0, 2.0**20, -10),
        (2.0**20, 1.0, -10),
        (1.0, 2.0**6, -24),
    ]:
        assert choose_grid(clip_norm, std) == 2.0**power


def test_rounding_to_the_grid_is_to_the_nearest():
    values = add_noise(torch.zeros(100_000, dtype=torch.float64), 1.0, 1.0, SecretRandom())
    assert values.unique().numel() > 5
    assert abs(values.mean()) < 7 * math.sqrt(13 / 12 / 100_000)  # rounding adds 1/12
    steps = torch.tensor([1.0, -3.0, 2.0**40], dtype=torch.float64)
    assert torch.equal(add_noise(steps, 0.0, 0.25, SecretRandom()), steps / 4)


# Coins and Laplace noise: digits that are compared one after another


@pytest.mark.parametrize("share", ["0." + "3" * 28, "0." + "9" * 31, "1e-40", "0", "0.5"])
def test_digits_are_those_of_the_chance(share):
    byte, *words = probability_bits(Decimal(share))
    whole = Fraction(byte, 2**8) + sum(
        Fraction(word, 2 ** (8 + 63 * index)) for index, word in enumerate(words, 1)
    )
    assert 0 <= Fraction(share) - whole < Fraction(1, 2**197)
    assert byte < 2**8
    assert all(0 <= word < 2**63 for word in words)


@pytest.mark.parametrize("power", [-60, -3, 0, 2, 6])
def test_a_chance_is_that_of_a_binary_digit(power):
    byte, first, *_ = bernoulli_bits(power)
    assert (byte + first / 2**63) / 2**8 == pytest.approx(1 / (1 + math.exp(2.0**power)), rel=1e-14)


class ScriptedRandom(SecretRandom):
    """Bytes that are given beforehand, the same for every coin."""

    def __init__(self, *script):
        super().__init__()
        self._script = list(script)

    def _random_bytes(self, count):
        data = self._script.pop(0)
        return bytearray((data * count)[:count])


def encode(*words):
    return [word.to_bytes(8, "little") for word in words]


def test_digits_are_compared_until_they_differ():
    words = (100, 2**62 + 5, 7, 2**63 - 1)
    top = 2**63 - 1

    def flip(byte, *drawn):
        return ScriptedRandom(bytes([byte]), *encode(*drawn)).bernoulli(words, 2).tolist()

    assert flip(99, 0, 0, 0) == [True] * 2
    assert flip(101, 0, 0, 0) == [False] * 2
    assert flip(100, words[1] - 1, top, top) == [True] * 2
    assert flip(100, words[1] + 1, 0, 0) == [False] * 2
    assert flip(100, words[1], words[2] - 1, top) == [True] * 2
    assert flip(100, words[1], words[2] + 1, 0) == [False] * 2
    assert flip(100, words[1], words[2], words[3] - 1) == [True] * 2
    assert flip(100, *words[1:]) == [False] * 2, "what equals the chance is not below it"
    assert flip(100, words[1] - 1 + 2**63, 2**63, 2**63) == [True] * 2, "the 64th bit is no digit"


def test_laplace_noise_is_made_of_powers_of_two_and_a_fair_side():
    def draw(one_at, side, count=1):
        """Of the digits, heads begin with a byte of 0; no bytes are left to compare after 255."""
        zeros = encode(0, 0, 0)
        digits = [(b"\0" if digit in one_at else b"\xff", *zeros) for digit in range(5 + 7)]
        script = [data for digit in digits for data in digit]
        return ScriptedRandom(*script, side, *encode(0)).discrete_laplace((count,), 5).tolist()

    for digit in range(5 + 3):
        assert draw([digit], b"\0") == [2**digit]
    assert draw(range(12), b"\0") == [2**12 - 1]
    assert draw([], bytes(range(256)), 256) == [0] * 128 + [-1] * 128
