"""A channel's law against its claim: exact ratios on worst pairs, draws, and planted bugs."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from privot.audit.many_runs import compute_refuted_epsilon
from privot.data.tabular import SensitiveTable
from privot.errors import PrivotError, SettingError
from privot.local.channels import (
    Composite,
    Gaussian,
    Laplace,
    OptimizedUnaryEncoding,
    Projection,
    RandomizedResponse,
    UnaryEncoding,
    channel_from_json,
)
from privot.local.privatize import compute_channel_guarantee, privatize
from privot.local.signal_check import warn_if_too_noisy
from privot.privacy.noise import EXTRA_DIGITS, SecretRandom, bernoulli_bits
from privot.privacy.plan import Plan

ONE = Projection(shape=(1,))
PAIR = Projection(shape=(2,))
IMAGE = (1, 8, 8)
PROJECTIONS = {
    "identity": Projection(shape=IMAGE),
    "pooled": Projection(kind="pooled", shape=IMAGE, side=4),
    "dct": Projection(kind="dct", shape=IMAGE, side=3),
    "one frequency": Projection(kind="dct", shape=IMAGE, side=1),
}
CATEGORICAL = (RandomizedResponse, UnaryEncoding, OptimizedUnaryEncoding)
every_projection = pytest.mark.parametrize("projection", PROJECTIONS.values(), ids=PROJECTIONS)
both_kinds = pytest.mark.parametrize("kind", [Laplace, Gaussian])


def make_random(seed=4):
    return SecretRandom(insecure_seed=seed)


class SilentRandom(SecretRandom):
    """No noise: what a channel would have added it to."""

    def discrete_laplace(self, shape, log2_scale):
        return torch.zeros(shape, dtype=torch.int64)

    def normal(self, shape, device="cpu"):
        return torch.zeros(shape, dtype=torch.float64)


def compute_magnitude_law(digits, count):
    """log P(G = 0), ..., log P(G = count - 1), digit by digit, from the words of the coins."""
    scale = np.array([2.0**-8, 2.0**-71, 2.0**-134, 2.0**-197])
    numbers = np.arange(count)
    law = np.zeros(count)
    for digit in range(digits + EXTRA_DIGITS):
        one = float(np.dot(np.array(bernoulli_bits(digit - digits), float), scale))
        law += np.where(numbers >> digit & 1, math.log(one), math.log1p(-one))
    return law


def compute_largest_ratio(digits, shift):
    """The largest |log P(z) - log P(z + shift)| of the two-sided law, out to 64 scales."""
    one_side = compute_magnitude_law(digits, 64 << digits)
    law = np.concatenate([one_side[::-1], one_side])  # z = -1 - G or G
    return np.abs(law[: len(law) - shift] - law[shift:]).max() if shift else 0.0


def count_steps_apart(channel, *records):
    """By how many grid steps two records lie apart, value by value."""
    one, other = (
        channel.privatize(torch.tensor(record)[None], SilentRandom()).double() for record in records
    )
    return ((one - other) / channel.grid_spacing).round().abs().long()[0]


def list_corners(channel):
    """Out of the domain, so that they are clipped."""
    return [channel.low - 5.0] * channel.record_dim, [channel.high + 5.0] * channel.record_dim


# The exact law of Laplace noise


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("name", ["pair", "identity", "pooled", "one frequency"])
def test_laplace_on_the_worst_pair(name, epsilon):
    projection = PROJECTIONS.get(name, PAIR)
    channel = Laplace.calibrate(epsilon, projection=projection, low=-1.0, high=1.0)
    shifts, counts = count_steps_apart(channel, *list_corners(channel)).unique(return_counts=True)
    digits = min(channel.grid_bits, 13)  # a finer grid has the same law at the same distance
    coarser = 2 ** (channel.grid_bits - digits)
    ratio = sum(
        count * compute_largest_ratio(digits, math.ceil(shift / coarser))
        for shift, count in zip(shifts.tolist(), counts.tolist(), strict=True)
    )
    slack = 2.0**-digits * channel.output_dim if coarser > 1 else 0.0
    assert 0.99 * epsilon < ratio <= epsilon * (1 + 1e-9) + slack
    assert channel.epsilon == pytest.approx(epsilon, rel=1e-12)


@every_projection
@both_kinds
def test_no_pair_is_farther_apart_than_stated(projection, kind):
    """Random records, corners, NaN and infinities, with and without a ball, on the grid."""
    rng = np.random.default_rng(3)
    extremes = [np.full(64, value) for value in (0.0, 1.0, np.nan, np.inf, -np.inf)]
    random = [rng.random((40, 64)), rng.integers(0, 2, (40, 64)), rng.normal(0, 1e6, (4, 64))]
    records = torch.from_numpy(np.concatenate([*random, np.eye(64)[:4], extremes]))
    for radius, center in itertools.product((None, 0.7, 5.0), (None, 0.0)):
        channel = kind.calibrate(1.0, 1e-5, projection=projection, radius=radius, center=center)
        sent = channel.privatize(records, SilentRandom()).double()
        distance = torch.cdist(sent, sent, p=float(channel.norm_order)).max()
        assert distance <= channel.sensitivity * (1 + 1e-6)
        if kind is Gaussian and radius is None and center is None:
            assert distance > 0.99 * channel.sensitivity


def test_a_ball_is_reached_and_kept_though_norms_of_many_values_are_rounded():
    channel = Laplace.calibrate(2.0, projection=PAIR, radius=0.25, center=0.0)
    steps = float(count_steps_apart(channel, (1.0, 0.0), (0.0, 1.0)).sum())
    assert channel.sensitivity == 0.5
    assert 0.99 < steps * channel.grid_spacing / 0.5 <= 1
    wide = Laplace.calibrate(2.0, projection=Projection(shape=(200_000,)), radius=1e3, center=0.0)
    draw = torch.Generator().manual_seed(0)
    records = torch.rand(2, 200_000, dtype=torch.float64, generator=draw).sqrt()
    for row in wide._project_relative_to_center(records).numpy():
        assert math.fsum(abs(row)) <= wide.radius


@pytest.mark.parametrize(
    ("kind", "epsilon", "how"),
    [
        (Laplace, 140.0, {"projection": PAIR}),
        (Laplace, 64.1, {"projection": ONE, "low": -7.0, "high": 3.0}),
        (Laplace, 70.0, {"projection": PROJECTIONS["one frequency"]}),
        (Laplace, 70.0, {"projection": PROJECTIONS["identity"], "radius": 0.4}),
        (Gaussian, 150.0, {"delta": 1e-5, "projection": PAIR}),
        (Gaussian, 150.0, {"delta": 1e-5, "projection": PROJECTIONS["one frequency"]}),
        (RandomizedResponse, 100.0, {"num_categories": 3}),
        (UnaryEncoding, 200.0, {"num_categories": 3}),
        (OptimizedUnaryEncoding, 100.0, {"num_categories": 3}),
    ],
)
def test_noise_so_faint_that_its_drawn_law_ends_is_refused(kind, epsilon, how):
    """Drawn noise has an end, and coins a last digit: where that tells records apart is no proof."""
    with pytest.raises(SettingError):
        kind.calibrate(epsilon, **how)


@pytest.mark.parametrize("name", ["identity", "pooled"])
def test_what_one_record_alone_can_send_is_nothing(name):
    """At the faintest noise that is allowed: answers that the other record cannot give."""
    projection = PROJECTIONS[name]
    channel = Laplace.calibrate(63.0 * projection.output_dim, projection=projection)
    distance = int(count_steps_apart(channel, *list_corners(channel)).max())
    digits = channel.grid_bits
    left = (1 << digits + EXTRA_DIGITS) - distance  # steps to where the other's answers end
    assert 0 < projection.output_dim * math.exp(-left * 2.0**-digits) / 2 < 1e-25


def test_laplace_draws_follow_the_law():
    count = 400_000
    drawn = make_random(5).discrete_laplace((count,), 2).numpy()
    law = np.exp(compute_magnitude_law(2, 24)) / 2
    shares = np.concatenate([law[::-1], law])  # z from -24 to 23
    tail = (1 - shares.sum()) / 2
    seen = np.bincount(np.clip(drawn, -25, 24) + 25, minlength=50)
    assert stats.chisquare(seen, count * np.concatenate([[tail], shares, [tail]])).pvalue > 1e-4
    geometric = (1 - math.exp(-0.25)) * np.exp(-0.25 * np.arange(24)) / 2
    assert np.allclose(law, geometric, rtol=1e-12)


# Gaussian noise


@pytest.mark.parametrize(
    ("epsilon", "delta", "expected"),
    [
        (0.5, 1e-4, 5.894),
        (1, 1e-4, 3.186),
        (5, 1e-4, 0.796),
        (50, 1e-4, 0.142),
        (1, 1e-5, 3.731),
        (10, 1e-5, 0.500),
    ],
)
def test_gaussian_calibration(epsilon, delta, expected):
    channel = Gaussian.calibrate(epsilon, delta, projection=PROJECTIONS["identity"])
    noise = channel.noise_std / channel.sensitivity
    assert noise == pytest.approx(expected, abs=6e-4)
    assert compute_gaussian_delta(1 / noise, epsilon) == pytest.approx(delta, rel=1e-9)
    assert channel.epsilon == pytest.approx(epsilon, rel=1e-9)


def compute_gaussian_delta(shift, epsilon):
    tail = math.exp(epsilon + stats.norm.logcdf(-shift / 2 - epsilon / shift))
    return stats.norm.cdf(shift / 2 - epsilon / shift) - tail


@every_projection
def test_gaussian_on_the_worst_pair(projection):
    channel = Gaussian.calibrate(1.0, 1e-5, projection=projection)
    steps = count_steps_apart(channel, *list_corners(channel)).double().norm().item()
    delta = compute_gaussian_delta(steps * channel.grid_spacing / channel.noise_std, 1.0)
    assert 0.99e-5 < delta <= 1e-5 * (1 + 1e-6)


def test_gaussian_draws():
    channel = Gaussian.calibrate(3.0, 1e-4, projection=PAIR)
    noise = channel.privatize(torch.zeros(50_000, 2), make_random()) / channel.noise_std
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-4


# Categories


def tabulate_law(channel):
    """K(y|x): [categories, answers], from the cost; and the answers, all of them."""
    count = channel.num_categories
    answers = torch.arange(count)[:, None]
    points = channel.to_points(answers.float()).double()
    if channel.output_dim > 1:
        answers = torch.tensor(list(itertools.product((0, 1), repeat=count)))
    return (-channel.compute_cost_matrix(points, answers.double())).exp(), answers


def find_answers(sent):
    """The index of every answer in the law."""
    if sent.shape[1] == 1:
        return sent[:, 0].long()
    return sent.long() @ 2 ** torch.arange(sent.shape[1] - 1, -1, -1)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("kind", CATEGORICAL)
def test_categories_by_their_exact_law(kind, epsilon):
    channel = kind.calibrate(epsilon, num_categories=5)
    law, answers = tabulate_law(channel)
    assert torch.allclose(law.sum(1), torch.ones(5, dtype=torch.float64), atol=1e-12)
    ratio = float((law[:, None] / law[None]).log().amax())
    assert ratio == pytest.approx(channel.epsilon, rel=1e-9)
    drawn = channel.privatize(torch.full((40_000, 1), 2.0), make_random())
    seen = np.bincount(find_answers(drawn).numpy(), minlength=len(answers))
    assert stats.chisquare(seen, 40_000 * law[2].numpy()).pvalue > 1e-5
    entropy = -float((law[2] * law[2].log()).sum())
    assert channel.compute_expected_cost() == pytest.approx(entropy, rel=1e-9)


def test_symmetric_costs_are_what_the_papers_say():
    law, answers = tabulate_law(RandomizedResponse.calibrate(2.0, num_categories=4))
    differs = (torch.arange(4)[:, None] != answers.T).double()
    assert torch.allclose(-law.log() + law.log()[0, 0], 2.0 * differs)
    law, answers = tabulate_law(UnaryEncoding.calibrate(2.0, num_categories=4))
    hamming = (torch.eye(4)[:, None] != answers[None]).sum(-1).double()
    assert torch.allclose(-law.log() + law.log().max(), hamming)


@pytest.mark.parametrize(
    ("kind", "p", "q"),
    [
        (RandomizedResponse, math.e / (math.e + 7), 1 / (math.e + 7)),
        (UnaryEncoding, 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(0.5))),
        (OptimizedUnaryEncoding, 0.5, 1 / (1 + math.e)),
    ],
)
def test_shares_agree_with_the_textbook_estimator(kind, p, q):
    """The likelihood by our cost, climbed by Bayes' rule, against the unbiased one from counts."""
    channel = kind.calibrate(1.0, num_categories=8)
    count = 200_000
    shares = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02], dtype=torch.float64)
    records = torch.repeat_interleave(torch.arange(8), (shares * count).round().long())
    sent = channel.privatize(records[:, None].float(), make_random(11))
    one_hot = sent if sent.shape[1] > 1 else torch.nn.functional.one_hot(sent[:, 0].long(), 8)
    unbiased = (one_hot.double().mean(0) - q) / (p - q)
    law = tabulate_law(channel)[0]
    estimate = torch.full((8,), 1 / 8, dtype=torch.float64)
    frequencies = torch.bincount(find_answers(sent), minlength=law.shape[1]) / len(sent)
    for _ in range(1000):
        estimate = estimate * (law @ (frequencies / (estimate @ law)))
    error = math.sqrt(q * (1 - q) / count) / (p - q)
    assert (unbiased - shares).abs().max() < 5 * error
    assert (estimate - unbiased).abs().max() < 3 * error
    assert (estimate - shares).abs().sum() / 2 < 0.02


# Costs


@every_projection
@both_kinds
def test_the_cost_is_the_log_density_of_the_noise(kind, projection):
    channel = kind.calibrate(2.0, 1e-5, projection=projection)
    x = torch.rand(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = channel.privatize(x[:2]).double()
    rest = y[None] - channel.clip_and_project(x)[:, None]
    laplace = kind is Laplace
    law = stats.laplace(scale=channel.scale) if laplace else stats.norm(scale=channel.noise_std)
    density = torch.from_numpy(law.logpdf(rest.numpy())).sum(-1)
    both = channel.compute_cost_matrix(x, y) / channel.temperature + density
    assert torch.allclose(both, both[0, 0].expand_as(both), rtol=1e-9)


@pytest.mark.parametrize("radius", [None, 0.8])
def test_the_cost_has_a_gradient_through_projection_and_ball(radius):
    projection = Projection(kind="dct", shape=(1, 4, 4), side=3)
    channel = Gaussian.calibrate(5.0, 1e-5, projection=projection, radius=radius)
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(2, 16, dtype=torch.float64, generator=draw)
    y = channel.privatize(x).double()
    assert torch.autograd.gradcheck(
        lambda at: channel.compute_cost_matrix(at, y), (x.requires_grad_(),)
    )


@pytest.mark.parametrize(
    "channel",
    [
        Laplace.calibrate(4.0, projection=PAIR),
        Gaussian.calibrate(4.0, 1e-5, projection=PAIR),
        RandomizedResponse.calibrate(1.0, num_categories=5),
        UnaryEncoding.calibrate(1.0, num_categories=5),
    ],
)
def test_the_average_cost_of_an_answer(channel):
    records = torch.zeros(20_000, channel.record_dim)
    sent = channel.privatize(records, make_random())
    costs = channel.compute_cost_matrix(channel.to_points(records[:1]), sent)[0]
    error = float(costs.std()) / math.sqrt(len(sent))
    assert abs(float(costs.mean()) - channel.compute_expected_cost()) < 5 * error


def test_mixed_costs_and_epsilons_add():
    values = Gaussian.calibrate(2.0, 1e-5, projection=PAIR)
    label = RandomizedResponse.calibrate(1.5, num_categories=3)
    mixed = Composite(parts=(values, label))
    records = torch.tensor([[0.2, 0.7, 1.0], [0.9, 0.1, 2.0]])
    sent = mixed.privatize(records)
    points = mixed.to_points(records)
    assert (mixed.record_dim, mixed.point_dim, mixed.output_dim) == (3, 5, 3)
    assert (mixed.temperature, mixed.delta) == (1.0, 1e-5)
    value_cost = values.compute_cost_matrix(points[:, :2], sent[:, :2]) / values.temperature
    label_cost = label.compute_cost_matrix(points[:, 2:], sent[:, 2:])
    assert torch.allclose(mixed.compute_cost_matrix(points, sent), value_cost + label_cost)
    assert mixed.epsilon == pytest.approx(3.5, rel=1e-9)
    assert mixed.is_possible_output(sent)
    assert not mixed.is_possible_output(sent + torch.tensor([0.0, 0.0, 0.5]))
    with pytest.raises(SettingError):
        Composite(parts=(mixed,))


# An audit that can see


def refute(channel, first=(0.0,), second=(1.0,), count=20_000, privatize=None):
    """A lower bound on epsilon (99.9 %) from the likelihood ratio of answers to two records."""
    pair = torch.tensor([first, second], dtype=torch.float32)
    rng = make_random(9)
    scores = []
    for record in pair:
        sent = (privatize or channel.privatize)(record.expand(count, -1), rng)
        sent = sent.double() if sent.is_floating_point() else sent
        costs = channel.compute_cost_matrix(channel.to_points(pair), sent)
        scores.append((costs[1] - costs[0]).numpy())
    cuts = np.quantile(np.concatenate(scores), np.linspace(0.02, 0.98, 25))
    hits, alarms = ((score[:, None] >= cuts - 1e-9).sum(0) for score in scores)
    bounds = compute_refuted_epsilon(hits, alarms, count, count, channel.delta, 1e-3 / 25)
    return max(bounds.max(), 0.0)


LAPLACE = Laplace.calibrate(1.0, projection=ONE)
GAUSSIAN = Gaussian.calibrate(1.0, 1e-5, projection=ONE)
RESPONSE = RandomizedResponse.calibrate(1.0, num_categories=3)
MIXED = Composite(
    parts=(
        Laplace.calibrate(0.5, projection=ONE),
        RandomizedResponse.calibrate(0.5, num_categories=2),
    )
)
MIXED_PAIR = ((0.0, 0.0), (1.0, 1.0))
ENCODINGS = [kind.calibrate(1.0, num_categories=3) for kind in CATEGORICAL[1:]]
CHANNELS = [LAPLACE, GAUSSIAN, RESPONSE, *ENCODINGS, MIXED]


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
def test_an_honest_channel_is_not_refuted(channel):
    pair = MIXED_PAIR if channel is MIXED else ()
    assert refute(channel, *pair) <= channel.epsilon + 1e-9


def test_planted_channels_are_refuted():
    """Half the noise; noise of epsilon 2; nobody clips; labels left as they are."""
    loud = Laplace(projection=ONE, scale=LAPLACE.scale / 2)
    assert refute(LAPLACE, privatize=loud.privatize) > 1.3
    assert refute(RESPONSE, privatize=RESPONSE.with_epsilon(2.0).privatize) > 1.3
    unclipped = Laplace(projection=ONE, scale=LAPLACE.scale, low=-30.0, high=30.0)
    rng = make_random(9)
    alarms, hits = (
        (unclipped.privatize(torch.full((20_000, 1), value), rng) > 2.0).sum().item()
        for value in (0.0, 4.0)
    )
    assert float(compute_refuted_epsilon(hits, alarms, 20_000, 20_000, 0.0, 1e-3)) > 1.3
    assert refute(LAPLACE, (0.0,), (4.0,)) <= 1.0

    def forget_labels(records, rng):
        return torch.cat([MIXED.parts[0].privatize(records[:, :1], rng), records[:, 1:]], 1)

    assert refute(MIXED, *MIXED_PAIR, privatize=forget_labels) > 3.0


# Guarantees, descriptions and warnings


def test_the_certificate_of_a_channel():
    claim = compute_channel_guarantee(MIXED)
    assert (claim.neighbours, claim.unit, claim.delta) == ("local", "one record", 0.0)
    assert (claim.epsilon, claim.renyi_epsilon) == pytest.approx((1.0, 1.0))
    gaussian = compute_channel_guarantee(GAUSSIAN)
    assert gaussian.delta == 1e-5
    assert gaussian.epsilon == pytest.approx(1.0)


BALL = Laplace.calibrate(9.0, projection=PROJECTIONS["dct"], radius=1.0, center=0.0)


@pytest.mark.parametrize("channel", [*CHANNELS, BALL], ids=lambda channel: channel.name)
def test_parameters_survive_a_round_trip(channel):
    parameters = json.loads(json.dumps(channel.to_json()))
    assert "epsilon" not in json.dumps(parameters)
    assert channel_from_json(parameters) == channel
    assert Plan.from_json(json.loads(json.dumps(channel.plan().to_json()))) == channel.plan()
    doubled = channel.with_epsilon(2 * channel.epsilon)
    assert doubled.epsilon == pytest.approx(2 * channel.epsilon, rel=1e-6)


def describe_laplace(kind="identity", shape=(2,), side=0, **fields):
    projection = {"kind": kind, "shape": list(shape), "side": side}
    return {"channel": "laplace", "scale": 1.0, "projection": projection, **fields}


def describe_response(count, wrong):
    fields = {"num_categories": count, "wrong_category_probability": wrong}
    return {"channel": "randomized-response", **fields}


def describe_unary(count, negative, positive):
    rates = {"false_negative_rate": negative, "false_positive_rate": positive}
    return {"channel": "unary", "num_categories": count, **rates}


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"channel": "laplace"},
        {"channel": "laplac"},
        {"channel": "composite", "parts": []},
        {"channel": "composite", "parts": 3},
        {"channel": "composite", "parts": [{"channel": "composite", "parts": []}]},
        describe_response(3, 0.5),
        describe_response(1, 0.1),
        describe_unary(10**9, 0.1, 0.1),
        describe_unary(3, 0.9, 0.2),
        describe_laplace(scale=-1.0),
        describe_laplace(scale=math.nan),
        describe_laplace(low=1.0, high=0.0),
        describe_laplace(epsilon=0.1),
        describe_laplace(shape=[10**9, 10**9]),
        describe_laplace("pooled", IMAGE, 3),
        describe_laplace("odd", IMAGE, 3),
        {
            "channel": "gaussian",
            "noise_std": 1.0,
            "delta": 2.0,
            "projection": describe_laplace()["projection"],
        },
    ],
)
def test_broken_descriptions_are_refused_in_one_line(value):
    with pytest.raises(PrivotError) as refused:
        channel_from_json(value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "channel",
    [
        Laplace.calibrate(0.05, projection=PAIR),
        RESPONSE.with_epsilon(0.01),
        Gaussian.calibrate(0.02, 1e-5, projection=PAIR),
    ],
)
def test_the_warning_of_too_much_noise_names_what_would_do(channel):
    sufficient = warn_if_too_noisy(channel, 100).partition("Use at least ")[2]
    records = int(sufficient.split()[0].replace(",", ""))
    epsilon = float(sufficient.rsplit(" ", 1)[1].removesuffix("."))
    assert channel.predict_signal_to_noise(records) >= 1
    assert channel.with_epsilon(epsilon * 1.01).predict_signal_to_noise(100) >= 1
    assert channel.with_epsilon(epsilon * 0.9).predict_signal_to_noise(100) < 1
    assert warn_if_too_noisy(Laplace.calibrate(5.0, projection=PAIR), 10_000) is None


def test_a_dataset_privatized_twice_is_charged_twice(ledger):
    table = SensitiveTable(np.random.default_rng(0).random((50, 2)), name="people")
    laplace = Laplace.calibrate(1.5, projection=PAIR)
    first, second = (privatize(table, laplace, ledger=ledger) for _ in range(2))
    assert not torch.equal(first.values, second.values)
    assert ledger.compute_spent_cost().epsilon(1e-9) == pytest.approx(3.0)
    privatize(table, Gaussian.calibrate(1.0, 1e-6, projection=PAIR), ledger=ledger)
    assert ledger.compute_spent_cost().epsilon(1e-6) == pytest.approx(4.0, rel=1e-6)
    methods = [entry["method"] for entry in ledger.entries() if entry["kind"] == "reserve"]
    assert methods == ["privatize laplace"] * 2 + ["privatize gaussian"]
