"""Two attacks on noise: guess the seed and subtract it; look at the last bits.

Both must win against a twin that deserves it, and not here. The attacker knows the code, the plan,
the clip norm and the grid, and that the answer is of D or of its neighbour D'; both true answers
are public. A guess is right by chance in one of two trials.
"""

import contextlib
import hashlib
import math
import re

import numpy as np
import pytest
import torch
from support.fakes import NullLedger
from support.tiny_settings import (
    choose_epsilon,
    choose_spec,
    choose_tiny_settings,
    make_method_input,
    make_records,
)

from privot.data.dataset import Sensitive
from privot.data.spec import Spec
from privot.methods import list_methods, make_method
from privot.privacy.accounting import Neighbours
from privot.privacy.gate import Gate
from privot.privacy.noise import MAX_NORMAL, SecretRandom, choose_grid
from privot.privacy.plan import Budget, Plan, Stage
from privot.synthesis import synthesize


def make_gate(pixel, multiplier, **more):
    pixels = np.full((1, 1, 1, 1), pixel, np.float32)
    dataset = Sensitive(pixels, np.zeros(1, int), Spec((1, 1, 1), 1))
    plan = Plan((Stage("it", "sum", multiplier, 10_000),), Neighbours.REPLACE)
    return Gate(dataset, plan, NullLedger(), Budget(math.inf), **more)


# Guessing the seed

SEEDS = 2**14  # seeds in the wild had 1,000 values, or 32 bits
MULTIPLIER = 300.0  # so loud that no honest test does better than 50.1 %
STD = MULTIPLIER * 2
GRID = choose_grid(1.0, STD)
ANSWER = torch.tensor([0.6, 0.8])  # of D; of D' it is the opposite


class ReplayedRandom(SecretRandom):
    """A stream of given bytes: the attacker runs our own code on what a seed would give."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def _random_bytes(self, count):
        assert count == len(self.data)
        return bytearray(self.data)


@pytest.fixture(scope="module")
def seeds_by_noise():
    """(two values of the first answer's noise, in steps) -> seed, for every seed."""
    streams = [SecretRandom(seed) for seed in range(SEEDS)]
    for stream in streams:
        stream.permutation(1)  # a gate draws the order of its records first
    data = b"".join(bytes(stream._random_bytes(24)) for stream in streams)
    words = np.frombuffer(data, np.uint64).reshape(SEEDS, 3)
    normals = ReplayedRandom(words.T.tobytes()).normal((2 * SEEDS,)).view(2, SEEDS)
    steps = (normals * (STD / GRID)).round().T.tolist()
    return {tuple(pair): seed for seed, pair in enumerate(steps)}


def make_side(side, **more):
    return make_gate(0.5 + 0.5 * side, MULTIPLIER, **more)


def ask(gate):
    return gate.sum("it", lambda image, label: (2 * image.flatten() - 1) * ANSWER, clip_norm=1.0)


def guess_side(value, seeds_by_noise, coin):
    """The side whose true answer leaves the noise of a seed, and whether there was one."""
    for side in (1.0, -1.0):
        total = (ANSWER.double() * side / GRID).trunc() * GRID
        steps = ((value - total) / GRID).tolist()
        nearest = [(steps[0] + a, steps[1] + b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
        if any(pair in seeds_by_noise for pair in nearest):  # clipping may round a step away
            return side, True
    return (1.0 if coin.integers(2) else -1.0), False


def test_the_seed_attack_wins_where_noise_was_seeded(seeds_by_noise, trust):
    """Subtracted to the last bit, whatever the noise."""
    draw = np.random.default_rng(0)
    trials = 200
    right = 0
    for seed in draw.integers(0, SEEDS, trials):
        side = float(draw.choice([-1.0, 1.0]))
        answer = ask(make_side(side, insecure_seed=int(seed)))
        right += guess_side(answer, seeds_by_noise, draw) == (side, True)
    assert right == trials, "the attack must see every seed of the insecure twin"
    trust("R3", "seed attack on insecure_seed: right guesses", right, of=trials)


@pytest.mark.parametrize("trials", [500, pytest.param(9_500, marks=pytest.mark.slow)])
def test_the_seed_attack_is_at_chance_on_the_default(trials, seeds_by_noise, trust):
    right = 0
    num_seeds = 0
    coin = np.random.default_rng(trials)
    for side in (1.0, -1.0):
        gate = make_side(side)
        for _ in range(trials // 2):
            guess, hit = guess_side(ask(gate), seeds_by_noise, coin)
            right += guess == side
            num_seeds += hit
    assert num_seeds <= 1, "the attack sees a seed, and there is none"
    assert abs(right / trials - 0.5) < 4 * 0.5 / math.sqrt(trials), "better than a coin"
    trust("R3", "seed attack on the default: right guesses (chance is half)", right, of=trials)
    trust("R3", "seed attack on the default: seeds found", num_seeds, of=trials)


# The last bits: which outputs can be reached at all

DIM = 64  # numbers of an answer; its true value is 0 everywhere, or SHIFT
SHIFT = 1.0


def reaches_naive(values, truth):
    """Whether some floating-point noise gives this value: only those nearest to the difference can."""
    noise = values - truth
    near = (noise, torch.nextafter(noise, noise + 1), torch.nextafter(noise, noise - 1))
    return torch.stack([number + truth == values for number in near]).any(0)


def bound_of(count):
    return SHIFT * math.sqrt(count) * (1 + 1e-6)  # not clipped


def reaches_ours(values, truth):
    """A multiple of the grid away from the truth, and no farther than the noise goes."""
    steps = (values - truth) / choose_grid(bound_of(values.numel()), 1.0)
    return (steps == steps.round()) & ((values - truth).abs() <= MAX_NORMAL)


def make_naive_noise(dtype):
    generator = torch.Generator().manual_seed(5)
    return lambda truth, trials: (
        torch.randn(trials, DIM, generator=generator, dtype=dtype) + truth * SHIFT
    )


def ask_gate(truth, trials):
    """One answer of trials * DIM numbers, of noise of deviation 1, for as many answers."""
    size = trials * DIM
    clip_norm = bound_of(size)
    gate = make_gate(truth, 1 / (2 * clip_norm))
    query = {"clip_norm": clip_norm}
    return gate.sum("it", lambda image, label: image.flatten().expand(size), **query).view(-1, DIM)


def attack(answer, reaches, trials):
    """(share of right guesses, share that was no coin), of as many trials of both truths.

    The attacker has tried it out on answers of its own, and guesses what was likelier; else a coin.
    """

    def classify(answers):
        """From which of the two truths all numbers of an answer can be reached: 0 to 3."""
        return 2 * reaches(answers, 0.0).all(1) + reaches(answers, SHIFT).all(1)

    counts = [torch.bincount(classify(answer(truth, 2_000)), minlength=4) for truth in (0, 1)]
    likelier = (counts[1] - counts[0]).sign()
    coin = torch.Generator().manual_seed(0)
    right = 0
    decided = 0
    for truth in (0, 1):
        for _ in range(trials // 20_000):
            guess = likelier[classify(answer(truth, 10_000))]
            toss = torch.randint(2, guess.shape, generator=coin) * 2 - 1
            right += int((torch.where(guess != 0, guess, toss) == 2 * truth - 1).sum())
            decided += int((guess != 0).sum())
    return right / trials, decided / trials


sizes = pytest.mark.parametrize("trials", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])


@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reachable_set_attack_wins_on_naive_noise(dtype, trials, trust):
    """As everyone adds it, and with more digits: these alone are no help."""
    right, _ = attack(make_naive_noise(dtype), reaches_naive, trials)
    assert right >= 0.9, "the attack must see bits of the truth in naive noise"
    if dtype == torch.float32:
        what = "reachable-set attack on naive float32 noise: right guesses"
        trust("R4", what, round(right * trials), of=trials)


@sizes
def test_the_reachable_set_attack_is_at_chance_on_ours(trials, trust):
    right, decided = attack(ask_gate, reaches_ours, trials)
    assert decided == 0, "some output can be reached from one truth alone"
    assert right <= 0.51
    what = "reachable-set attack on ours: right guesses (chance is half)"
    trust("R4", what, round(right * trials), of=trials)


def classify_last_bits(answer, grid):
    """Learned instead of derived: how often the last 8 bits of the steps give the truth away."""
    low = [
        ((answer(truth, 20_000).double() / grid).round().long() & 255).view(2, -1)
        for truth in (0, 1)
    ]
    counts = [torch.bincount(train, minlength=256).double() + 1 for train, _ in low]
    likelihood = (counts[1] / counts[0]).log()
    zero, one = (likelihood[test].view(-1, DIM).sum(1) for _, test in low)
    return float(((zero < 0).sum() + (one > 0).sum()) / (2 * len(zero)))


def test_the_last_bits_are_those_of_a_coin(trust):
    share = classify_last_bits(ask_gate, choose_grid(bound_of(20_000 * DIM), 1.0))
    assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(20_000), "the last bits tell the truths apart"
    control = classify_last_bits(make_naive_noise(torch.float32), 2.0**-30)
    assert control > 0.9, "the control: of naive noise they do"
    what = "classifier of the last 8 bits: right guesses (chance is half)"
    trust("R4", what, round(share * 20_000), of=20_000)


# Nothing of the stream is kept


class Tap:
    """All bytes that the secret stream gave, and the noise made of them."""

    def __init__(self, monkeypatch):
        self.data = []
        random_bytes = SecretRandom._random_bytes
        normal = SecretRandom.normal

        def record_bytes(rng, count):
            drawn = random_bytes(rng, count)
            self.data.append(bytes(drawn))
            return drawn

        def record_noise(rng, *where):
            noise = normal(rng, *where)
            self.data.append(noise.numpy().tobytes())
            return noise

        monkeypatch.setattr(SecretRandom, "_random_bytes", record_bytes)
        monkeypatch.setattr(SecretRandom, "normal", record_noise)

    def words(self):
        """8-byte words that a file must not hold: the bytes themselves, and the noise as float64."""
        whole = b"".join(data[: len(data) // 8 * 8] for data in self.data)
        return np.unique(np.frombuffer(whole, "<u8"))


def count_words(words, data):
    """How many of the words occur anywhere in the data, as they are or in hexadecimal digits."""
    digits = [run[: len(run) // 2 * 2] for run in re.findall(rb"[0-9a-f]{16,}", data)]
    count = 0
    for text in (data, *(bytes.fromhex(run.decode()) for run in digits)):
        if len(text) >= 8:
            windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), 8)
            count += int(np.isin(np.ascontiguousarray(windows).view("<u8"), words).sum())
    return count


class StoppedError(Exception):
    """By the progress, in the middle of a run."""


@pytest.mark.usefixtures("one_thread", "coarse_accounting")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "merf" else pytest.mark.slow)
        for name in sorted(list_methods())
    ],
)
def test_nothing_of_the_secret_stream_is_on_disk(name, tmp_path, monkeypatch, trust):
    """In a run that was stopped in the middle, and then the whole of it."""
    tap = Tap(monkeypatch)
    method = make_method(name, choose_tiny_settings(name))
    data = make_method_input(method, *make_records(), choose_spec(method))
    how = {"ledger": tmp_path / "ledger.jsonl", "out": tmp_path / "out"}
    reports = []

    def stop(*_, **__):
        reports.append(1)
        if len(reports) == 3:
            raise StoppedError

    def read_files():
        return [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]

    with contextlib.suppress(StoppedError):
        synthesize(data, method, choose_epsilon(method), **how, progress=stop)
    files = read_files()
    if (tmp_path / "out.run").exists():
        synthesize(data, method, choose_epsilon(method), **how, resume=True)
        files += read_files()
    assert any(files), "nothing was written, so nothing was searched"
    words = tap.words()
    count = sum(count_words(words, file) for file in files)
    assert count == 0, "a file holds bytes of the secret stream, or the noise itself"
    if len(words):
        trust("R3", "words of the secret stream found on disk", count, of=len(words))


def test_a_stream_that_is_kept_is_found(monkeypatch):
    """The control: raw, as float64 noise, in hexadecimal, and anywhere in a file."""
    tap = Tap(monkeypatch)
    noise = SecretRandom().normal((6,)).numpy()
    drawn = tap.data[0]
    state = f"{{'state': '{drawn.hex()}'}}".encode()
    for data in (b"x" + drawn[8:24], noise.tobytes()[8:16], state):
        assert count_words(tap.words(), data)
    assert not count_words(tap.words(), hashlib.shake_256(b"other").digest(100_000))
