"""Two attacks on noise: guess the seed and subtract it; look at the last bits. Each must win against a twin that deserves it, and not here.

The attacker knows the code, the plan, the bound and the grid, and that the answer is of D or of its neighbour D'; both true answers are
known. A guess is right by chance in one of two trials.
"""

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

# Guessing the seed

SEEDS = 2**16  # a brute force of a second; seeds in the wild had 1,000 values, or 32 bits
LOUD = Plan(
    (Stage("it", "sum", 300.0, 10_000),), Neighbours.REPLACE
)  # so loud that no honest test does better than 50.1 %
STD = 300.0 * 2
GRID = choose_grid(1.0, STD)
TRUE = {
    side: torch.tensor([0.6, 0.8], dtype=torch.float64) * side for side in (1.0, -1.0)
}  # of one record, D or D'


class Known(SecretRandom):
    """A stream of known bytes: the attacker runs our own code on what a seed would give."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def _random_bytes(self, count):
        assert count == len(self.data)
        return bytearray(self.data)


@pytest.fixture(scope="module")
def noise_of_seeds():
    """(noise of the first answer in steps) -> seed, for every seed; two values each."""
    secrets = [SecretRandom(seed) for seed in range(SEEDS)]
    for each in secrets:
        each.permutation(1)  # a gate draws the order of its records first
    drawn = np.frombuffer(
        b"".join(bytes(each._random_bytes(24)) for each in secrets), np.uint64
    ).reshape(SEEDS, 3)
    both = (
        Known(drawn.T.tobytes()).normal((2 * SEEDS,)).view(2, SEEDS)
    )  # Box-Muller of all pairs at once
    steps = (both * (STD / GRID)).round().T.tolist()
    return {tuple(pair): seed for seed, pair in enumerate(steps)}


def door(side, insecure_seed=None):
    image = np.full((1, 1, 1, 1), 0.5 + 0.5 * side, np.float32)
    return Gate(
        Sensitive(image, np.zeros(1, int), Spec((1, 1, 1), 1)),
        LOUD,
        NullLedger(),
        Budget(math.inf),
        insecure_seed=insecure_seed,
    )


def ask(gate):
    return gate.sum(
        "it",
        lambda image, label: (2 * image.flatten() - 1) * torch.tensor([0.6, 0.8]),
        clip_norm=1.0,
    )


def guess(value, noise_of_seeds, coin):
    """The side whose true answer leaves a noise that some seed makes, and whether there was one; else a coin."""
    for side, true in TRUE.items():
        steps = ((value - (true.float().double() / GRID).trunc() * GRID) / GRID).tolist()
        if any(
            (steps[0] + a, steps[1] + b) in noise_of_seeds for a in (-1, 0, 1) for b in (-1, 0, 1)
        ):  # clipping may round a step away
            return side, True
    return (1.0 if coin.integers(2) else -1.0), False


def test_the_seed_attack_wins_where_noise_was_seeded(noise_of_seeds, trust):
    """Subtracted to the last bit, whatever the noise."""
    draw = np.random.default_rng(0)
    right = 0
    for seed in draw.integers(0, SEEDS, trials := 200):
        side = float(draw.choice([-1.0, 1.0]))
        right += guess(ask(door(side, int(seed))), noise_of_seeds, draw) == (side, True)
    assert right == trials, (
        "the attack must find every seed of the insecure twin: it shows that the attack can see"
    )
    trust("R3", "seed attack on insecure_seed: right guesses", right, of=trials)


@pytest.mark.parametrize("trials", [1_000, pytest.param(9_000, marks=pytest.mark.slow)])
def test_the_seed_attack_is_at_chance_on_the_default(trials, noise_of_seeds, trust):
    right = 0
    found = 0
    coin = np.random.default_rng(trials)
    for side in (1.0, -1.0):
        gate = door(side)
        for _ in range(trials // 2):
            said, hit = guess(ask(gate), noise_of_seeds, coin)
            right = right + (said == side)
            found = found + hit
    assert found <= 1, "a seed was found where there is none"
    assert abs(right / trials - 0.5) < 4 * 0.5 / math.sqrt(trials), (
        "the attack does better than a coin"
    )
    trust("R3", "seed attack on the default: right guesses (chance is half)", right, of=trials)
    trust("R3", "seed attack on the default: seeds found", found, of=trials)


# The last bits: which outputs can be reached at all

# numbers of an answer; its true value is 0 everywhere, or 1
DIM = 64
SHIFT = 1.0
TRIALS = 100_000


def reached(values, true, kind):
    """Whether some noise of the floating-point type gives this value from this truth: [trials, DIM] bool.

    The noise would be values - true; only the nearest representable ones can do it.
    """
    noise = (values - true).to(kind)
    found = torch.zeros(values.shape, dtype=torch.bool)
    for near in (noise, torch.nextafter(noise, noise + 1), torch.nextafter(noise, noise - 1)):
        found |= near + torch.tensor(true, dtype=kind) == values
    return found


def seen(answers, reach):
    """From which of the two truths all numbers of an answer can be reached: [trials] in 0 to 3."""
    return 2 * reach(answers, 0.0).all(1) + reach(answers, SHIFT).all(1)


def attacked(answers_of, reach, trials):
    """(share of right guesses, share that was no coin), of as many trials of each truth.

    The attacker has tried it out on answers of its own, and says what was likelier to be seen; where both were as likely, a coin falls.
    """
    tried = [torch.bincount(seen(answers_of(truth, 2_000), reach), minlength=4) for truth in (0, 1)]
    likelier = (tried[1] - tried[0]).sign()
    coin = torch.Generator().manual_seed(0)
    right = 0
    decided = 0
    for truth in (0, 1):
        for part in range(0, trials // 2, 10_000):
            found = likelier[seen(answers_of(truth, min(10_000, trials // 2 - part)), reach)]
            fallen = torch.randint(2, found.shape, generator=coin) * 2 - 1
            right += int((torch.where(found != 0, found, fallen) == 2 * truth - 1).sum())
            decided += int((found != 0).sum())
    return right / trials, decided / trials


def through_the_gate(truth, trials):
    """Noise of standard deviation 1 on every number; one answer of trials * DIM numbers has the same law as as many answers."""
    box = Sensitive(np.full((1, 1, 1, 1), truth, np.float32), np.zeros(1, int), Spec((1, 1, 1), 1))
    size = trials * DIM
    bound = SHIFT * math.sqrt(size) * (1 + 1e-6)  # not clipped
    plan = Plan((Stage("it", "sum", 1 / (2 * bound)),), Neighbours.REPLACE)
    gate = Gate(box, plan, NullLedger(), Budget(math.inf))
    return gate.sum("it", lambda image, label: image.flatten().expand(size), clip_norm=bound).view(
        trials, DIM
    )


def ours(values, true):
    """Reachable here: a multiple of the grid away from the truth, which is on it, and no farther than the noise goes."""
    bound = SHIFT * math.sqrt(values.numel()) * (1 + 1e-6)
    steps = (values - true) / choose_grid(bound, 1.0)
    return (steps == steps.round()) & ((values - true).abs() <= MAX_NORMAL)


def naive(kind):
    generator = torch.Generator().manual_seed(5)
    return lambda truth, trials: (
        torch.randn(trials, DIM, generator=generator, dtype=kind) + truth * SHIFT
    )


def test_the_reachable_set_attack_wins_on_naive_noise(trust):
    for kind in (
        torch.float32,
        torch.float64,
    ):  # as everyone adds it, and with more digits: these alone are no help
        trials = TRIALS if kind == torch.float32 else 4_000
        right, _ = attacked(
            naive(kind), lambda values, true, kind=kind: reached(values, true, kind), trials
        )
        assert right >= 0.9, (
            "the attack must see bits of the truth in naive noise, or it shows nothing"
        )
        if kind == torch.float32:
            trust(
                "R4",
                "reachable-set attack on naive float32 noise: right guesses",
                round(right * trials),
                of=trials,
            )


def test_the_reachable_set_attack_is_at_chance_on_ours(trust):
    right, decided = attacked(through_the_gate, ours, TRIALS)
    assert decided == 0, "some output can be reached from one truth alone"
    assert right <= 0.51
    trust(
        "R4",
        "reachable-set attack on ours: right guesses (chance is half)",
        round(right * TRIALS),
        of=TRIALS,
    )


def test_the_last_bits_are_those_of_a_coin(trust):
    """Learned instead of derived: the last 8 bits of the steps, of both truths, tell a classifier nothing; of naive noise they do."""

    def learned(answers_of, grid):
        low = [
            ((answers_of(truth, 20_000).double() / grid).round().long() & 255).view(2, -1)
            for truth in (0, 1)
        ]
        seen = [torch.bincount(each[0], minlength=256).double() + 1 for each in low]
        likelihood = (seen[1] / seen[0]).log()
        scores = torch.cat([likelihood[each[1]].view(-1, DIM).sum(1) for each in low])
        half = len(scores) // 2
        return float(((scores[:half] < 0).sum() + (scores[half:] > 0).sum()) / len(scores))

    grid = choose_grid(SHIFT * math.sqrt(20_000 * DIM) * (1 + 1e-6), 1.0)
    found = learned(through_the_gate, grid)
    assert abs(found - 0.5) < 5 * 0.5 / math.sqrt(20_000), "the last bits tell the truths apart"
    assert learned(naive(torch.float32), 2.0**-30) > 0.9, "the control: of naive noise they do"
    trust(
        "R4",
        "classifier of the last 8 bits: right guesses (chance is half)",
        round(found * 20_000),
        of=20_000,
    )


# Nothing of the stream is kept


class Tapped:
    """All bytes that the secret stream gave, and the noise made of them."""

    def __init__(self, monkeypatch):
        self.drawn = []
        self.noise = []
        bytes_of = SecretRandom._random_bytes
        normal = SecretRandom.normal

        def tapped(secret, count):
            self.drawn.append(bytes(found := bytes_of(secret, count)))
            return found

        def noisy(secret, *where):
            self.noise.append(found := normal(secret, *where))
            return found

        monkeypatch.setattr(SecretRandom, "_random_bytes", tapped)
        monkeypatch.setattr(SecretRandom, "normal", noisy)

    def words(self):
        """8-byte words that a file must not hold: the bytes themselves, and the noise as float64. Zeros may be anywhere."""
        raw = [np.frombuffer(each[: len(each) // 8 * 8], "<u8") for each in self.drawn]
        return np.unique(
            np.concatenate(
                [*raw, *(each.flatten().numpy().view("<u8") for each in self.noise if each.numel())]
            )
        )


def held(words, data):
    """How many of the words occur anywhere in the data, as they are or in hexadecimal digits."""
    count = 0
    for text in (data, *(bytes.fromhex(found.decode()) for found in _hex(data))):
        if len(text) >= 8:
            windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), 8)
            count += int(np.isin(np.ascontiguousarray(windows).view("<u8"), words).sum())
    return count


def _hex(data):
    return [each[: len(each) // 2 * 2] for each in re.findall(rb"[0-9a-f]{16,}", data)]


class Stopped(Exception):
    """By the progress, in the middle of a run."""


def scanned(name, folder, tap):
    """(words drawn, bytes on disk, words found there) of a run that was stopped in the middle, and then of the whole one."""
    method = make_method(name, choose_tiny_settings(name))
    data = make_method_input(method, *make_records(), choose_spec(method))
    way = {"budget": choose_epsilon(method), "out": folder / "out", "ledger": folder / "book.jsonl"}
    seen = {}

    def stop(stage, step, of, **facts):
        seen[stage] = seen.get(stage, 0) + 1
        if sum(seen.values()) == 3:
            raise Stopped

    def look():
        return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]

    try:
        synthesize(data, method, **way, progress=stop)
        files = look()
    except Stopped:
        files = look()
        if (folder / "out.run").exists():
            synthesize(data, method, **way, resume=True)
        files += look()
    words = tap.words() if tap.drawn else np.zeros(0, "<u8")
    return len(words), sum(map(len, files)), sum(held(words, data) for data in files)


@pytest.mark.usefixtures("one_thread", "coarse_accounting")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "merf" else pytest.mark.slow)
        for name in sorted(list_methods())
    ],
)
def test_nothing_of_the_secret_stream_is_on_disk(name, tmp_path, monkeypatch, trust):
    words, size, found = scanned(name, tmp_path, Tapped(monkeypatch))
    assert size, "nothing was written, so nothing was searched"
    assert found == 0, "a file holds bytes of the secret stream, or the noise itself"
    if words:
        trust("R3", "words of the secret stream found on disk", found, of=words)


def test_a_stream_that_is_kept_is_found(tmp_path, monkeypatch):
    """The control: raw, as float64 noise, in hexadecimal, and at any place in a file."""
    tap = Tapped(monkeypatch)
    noise = SecretRandom().normal((6,))
    for data in (
        b"x" + tap.drawn[0][8:24],
        noise.numpy().tobytes()[8:16],
        f"{{'state': '{tap.drawn[0].hex()}'}}".encode(),
    ):
        assert held(tap.words(), data)
    assert not held(tap.words(), hashlib.shake_256(b"other").digest(100_000))
