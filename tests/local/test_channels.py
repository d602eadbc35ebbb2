"""A channel's law against its claim: exact ratios on worst pairs, draws against the law, planted bugs, and an estimator of the textbook."""

import itertools
import json
import math

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
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
from privot.privacy.accounting import Neighbours, compute_privacy_cost
from privot.privacy.noise import EXTRA_DIGITS, SecretRandom, bernoulli_bits
from privot.privacy.plan import Plan

SQUARE = Projection(shape=(2,))
IMAGE = (1, 8, 8)
SPACES = {
    "identity": Projection(shape=IMAGE),
    "pooled": Projection(kind="pooled", shape=IMAGE, side=4),
    "dct": Projection(kind="dct", shape=IMAGE, side=3),
    "one frequency": Projection(kind="dct", shape=IMAGE, side=1),
}
DISCRETE = [
    kind.calibrate(epsilon, num_categories=5)
    for kind in (RandomizedResponse, UnaryEncoding, OptimizedUnaryEncoding)
    for epsilon in (0.5, 1.0, 3.0)
]


class Still(SecretRandom):
    """No noise: what a channel would have added it to."""

    def discrete_laplace(self, shape, log2_scale):
        return torch.zeros(shape, dtype=torch.int64)

    def normal(self, shape, device="cpu"):
        return torch.zeros(shape, dtype=torch.float64)


def digit_odds(digits):
    """Probability of each binary digit, from the words that the coins are compared with."""
    scale = np.array([2.0**-8, 2.0**-71, 2.0**-134, 2.0**-197])
    return [
        float(np.dot(np.array(bernoulli_bits(power - digits), float), scale))
        for power in range(digits + EXTRA_DIGITS)
    ]


def magnitude_law(digits, most):
    """log P(G = 0), ..., log P(G = most - 1) of the magnitude, digit by digit."""
    places = np.arange(most)
    law = np.zeros(most)
    for place, odds in enumerate(digit_odds(digits)):
        law += np.where(places >> place & 1, math.log(odds), math.log1p(-odds))
    return law


def steepest(digits, shift):
    """The largest |log P(z) - log P(z + shift)| of the two-sided law, looked at out to 64 scales."""
    one = magnitude_law(digits, 64 << digits)
    both = np.concatenate([one[::-1], one]) - math.log(2)  # z = -1 - G or G
    return np.abs(both[: len(both) - shift] - both[shift:]).max() if shift else 0.0


def moved(channel, *records):
    """By how many grid steps two records lie apart, value by value."""
    here, there = (
        channel.privatize(torch.tensor(each)[None], Still()).double() for each in records
    )
    return ((here - there) / channel.grid_spacing).round().abs().long()[0]


def corners(channel):
    return [channel.low - 5.0] * channel.record_dim, [
        channel.high + 5.0
    ] * channel.record_dim  # out of the domain: they are clipped


# The exact law of Laplace noise


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0, 50.0])
@pytest.mark.parametrize(
    "projection",
    [SQUARE, SPACES["identity"], SPACES["pooled"], SPACES["one frequency"]],
    ids=lambda projection: projection.kind,
)
def test_laplace_on_the_worst_pair(projection, epsilon):
    channel = Laplace.calibrate(epsilon, projection=projection, low=-1.0, high=1.0)
    shifts, counts = moved(channel, *corners(channel)).unique(return_counts=True)
    digits = min(
        channel.grid_bits, 13
    )  # the law of a finer grid is the same at the same distance, and no larger table is needed
    coarser = 2 ** (channel.grid_bits - digits)
    found = sum(
        int(count) * steepest(digits, math.ceil(int(shift) / coarser))
        for shift, count in zip(shifts, counts, strict=True)
    )
    slack = 2.0**-digits * channel.output_dim if coarser > 1 else 0.0
    assert found <= epsilon * (1 + 1e-9) + slack
    assert found > 0.99 * epsilon
    assert channel.epsilon == pytest.approx(epsilon, rel=1e-12)


@pytest.mark.parametrize("projection", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("kind", [Laplace, Gaussian])
def test_no_pair_is_farther_apart_than_stated(projection, kind):
    """Random records, corners, NaN and infinities, with and without a ball: on the grid, in the channel's norm."""
    rng = np.random.default_rng(3)
    for radius, center in itertools.product((None, 0.7, 5.0), (None, 0.0)):
        channel = kind.calibrate(1.0, 1e-5, projection=projection, radius=radius, center=center)
        records = np.concatenate(
            [
                rng.random((40, 64)),
                rng.integers(0, 2, (40, 64)),
                rng.normal(0, 1e6, (4, 64)),
                np.eye(64)[:4],
            ]
        )
        records = np.concatenate(
            [
                records,
                [
                    np.zeros(64),
                    np.ones(64),
                    np.full(64, np.nan),
                    np.full(64, np.inf),
                    np.full(64, -np.inf),
                ],
            ]
        )
        sent = channel.privatize(torch.from_numpy(records), Still()).double()
        apart = torch.cdist(sent, sent, p=float(channel.norm_order)).max()
        assert apart <= channel.sensitivity * (1 + 1e-6)
        if channel.norm_order == 2 and radius is None and center is None:
            assert apart > 0.99 * channel.sensitivity


def test_a_ball_is_reached_and_kept():
    channel = Laplace.calibrate(2.0, projection=Projection(shape=(2,)), radius=0.25, center=0.0)
    shifts = moved(channel, (1.0, 0.0), (0.0, 1.0))
    assert channel.sensitivity == 0.5
    assert 0.99 < float(shifts.sum()) * channel.grid_spacing / 0.5 <= 1


def test_a_ball_of_many_values_is_kept_though_norms_are_rounded():
    """A sum of many values is off in its last digits; a record still has no step too many."""
    count = 200_000
    channel = Laplace.calibrate(
        2.0, projection=Projection(shape=(count,)), radius=1000.0, center=0.0
    )
    records = torch.rand(
        2, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).sqrt()
    for row in channel._project_relative_to_center(records).numpy():
        assert math.fsum(abs(row)) <= channel.radius


@pytest.mark.parametrize(
    "make",
    [
        lambda: Laplace.calibrate(140.0, projection=SQUARE),
        lambda: Laplace.calibrate(64.1, projection=Projection(shape=(1,)), low=-7.0, high=3.0),
        lambda: Laplace.calibrate(70.0, projection=SPACES["one frequency"]),
        lambda: Laplace.calibrate(70.0, projection=SPACES["identity"], radius=0.4),
        lambda: Gaussian.calibrate(150.0, 1e-5, projection=SQUARE),
        lambda: Gaussian.calibrate(150.0, 1e-5, projection=SPACES["one frequency"]),
        lambda: RandomizedResponse.calibrate(100.0, num_categories=3),
        lambda: UnaryEncoding.calibrate(200.0, num_categories=3),
        lambda: OptimizedUnaryEncoding.calibrate(100.0, num_categories=3),
    ],
)
def test_noise_so_faint_that_its_drawn_law_ends_is_refused(make):
    """Noise that is drawn has an end, and coins have a last digit: where that would tell records apart there is no proof, so no channel."""
    with pytest.raises(SettingError):
        make()


@pytest.mark.parametrize(
    "projection", [SPACES["identity"], SPACES["pooled"]], ids=lambda projection: projection.kind
)
def test_what_one_record_alone_can_send_is_nothing(projection):
    """At the faintest noise that is allowed: answers of one record that the other cannot give, by the exact law."""
    channel = Laplace.calibrate(63.0 * projection.output_dim, projection=projection)
    far = int(moved(channel, *corners(channel)).max())
    digits = channel.grid_bits
    left = (
        1 << digits + EXTRA_DIGITS
    ) - far  # steps from a record to where the other's answers end
    alone = sum(math.exp(-left * 2.0**-digits) / 2 for _ in range(projection.output_dim))
    assert 0 < alone < 1e-25


def test_draws_follow_the_law():
    digits = 2
    count = 400_000
    drawn = SecretRandom(insecure_seed=5).discrete_laplace((count,), digits).numpy()
    law = np.exp(magnitude_law(digits, 24)) / 2
    shares = np.concatenate([law[::-1], law])  # z from -24 to 23
    seen = np.bincount(np.clip(drawn, -25, 24) + 25, minlength=50)
    expected = count * np.concatenate([[(1 - shares.sum()) / 2], shares, [(1 - shares.sum()) / 2]])
    assert stats.chisquare(seen, expected).pvalue > 1e-4
    exact = (1 - math.exp(-0.25)) * np.exp(-0.25 * np.arange(24)) / 2  # the geometric law itself
    assert np.allclose(law, exact, rtol=1e-12)


def test_coins_compare_to_the_last_digit():
    """A probability under 2^-8 is decided after the first byte; one of 0 and nearly 1 never errs."""
    secret = SecretRandom(insecure_seed=1)
    count = 200_000
    small = secret.bernoulli(bernoulli_bits(3), count).double().mean()  # 1/(1+e^8) = 0.000335
    assert abs(float(small) - 1 / (1 + math.exp(8))) < 5 * math.sqrt(0.000335 / count)
    assert not secret.bernoulli((0, 0, 0, 0), count).any()
    assert secret.bernoulli((255, (1 << 63) - 1, (1 << 63) - 1), count).all()
    assert secret.bernoulli((128, 0), 0).shape == (0,)


# Gaussian noise


@pytest.mark.parametrize(
    ("epsilon", "delta", "wanted"),
    [
        (0.5, 1e-4, 5.894),
        (1, 1e-4, 3.186),
        (5, 1e-4, 0.796),
        (50, 1e-4, 0.142),
        (1, 1e-5, 3.731),
        (10, 1e-5, 0.500),
    ],
)
def test_gaussian_calibration(epsilon, delta, wanted):
    channel = Gaussian.calibrate(epsilon, delta, projection=SPACES["identity"])
    noise = channel.noise_std / channel.sensitivity
    assert noise == pytest.approx(wanted, abs=6e-4)
    shift = 1 / noise
    log_tail = stats.norm.logcdf(-shift / 2 - epsilon / shift)
    reached = stats.norm.cdf(shift / 2 - epsilon / shift) - math.exp(epsilon + log_tail)
    assert reached == pytest.approx(delta, rel=1e-9)
    assert channel.epsilon == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize("projection", SPACES.values(), ids=SPACES)
def test_gaussian_on_the_worst_pair(projection):
    channel = Gaussian.calibrate(1.0, 1e-5, projection=projection)
    apart = (
        moved(channel, *corners(channel)).double().norm().item()
        * channel.grid_spacing
        / channel.noise_std
    )
    reached = stats.norm.cdf(apart / 2 - 1 / apart) - math.exp(
        1 + stats.norm.logcdf(-apart / 2 - 1 / apart)
    )
    assert 0.99e-5 < reached <= 1e-5 * (1 + 1e-6)


def test_gaussian_draws():
    channel = Gaussian.calibrate(3.0, 1e-4, projection=SQUARE)
    noise = (
        (
            channel.privatize(torch.zeros(50_000, 2), SecretRandom(insecure_seed=4))
            / channel.noise_std
        )
        .flatten()
        .numpy()
    )
    assert stats.kstest(noise, "norm").pvalue > 1e-4


# Categories


def table(channel):
    """K(y|x): [categories, answers], from the cost; and the answers, all of them."""
    k = channel.num_categories
    answers = (
        torch.arange(k)[:, None]
        if channel.output_dim == 1
        else torch.tensor(list(itertools.product((0, 1), repeat=k)))
    )
    points = channel.to_points(torch.arange(k)[:, None].float()).double()
    return (-channel.compute_cost_matrix(points, answers.double())).exp(), answers


def code(sent):
    """The place of each answer in `table`."""
    return (
        sent[:, 0].long()
        if sent.shape[1] == 1
        else sent.long() @ 2 ** torch.arange(sent.shape[1] - 1, -1, -1)
    )


@pytest.mark.parametrize(
    "channel", DISCRETE, ids=lambda channel: f"{channel.name}-{channel.epsilon:.1f}"
)
def test_categories_by_their_exact_law(channel):
    law, answers = table(channel)
    assert torch.allclose(law.sum(1), torch.ones(5, dtype=torch.float64), atol=1e-12)
    ratios = (law[:, None] / law[None]).log().amax()
    assert float(ratios) == pytest.approx(channel.epsilon, rel=1e-9)
    drawn = channel.privatize(torch.full((40_000, 1), 2.0), SecretRandom(insecure_seed=4))
    seen = np.bincount(code(drawn).numpy(), minlength=len(answers))
    assert stats.chisquare(seen, 40_000 * law[2].numpy()).pvalue > 1e-5
    entropy = -float((law[2] * law[2].log()).sum())
    assert channel.compute_expected_cost() == pytest.approx(entropy, rel=1e-9)


def test_symmetric_costs_are_what_the_papers_say():
    respond = RandomizedResponse.calibrate(2.0, num_categories=4)
    rappor = UnaryEncoding.calibrate(2.0, num_categories=4)
    law, answers = table(respond)
    assert torch.allclose(
        -law.log() + law.log()[0, 0], 2.0 * (torch.arange(4)[:, None] != answers.T).double()
    )
    law, answers = table(rappor)
    hamming = (torch.eye(4)[:, None] != answers[None]).sum(-1).double()
    found = -law.log()
    assert torch.allclose(found - found.min(), 1.0 * hamming)


@pytest.mark.parametrize("kind", [RandomizedResponse, UnaryEncoding, OptimizedUnaryEncoding])
def test_shares_agree_with_the_textbook_estimator(kind):
    """The likelihood by our cost, climbed by Bayes' rule, against the unbiased estimate from counts."""
    channel = kind.calibrate(1.0, num_categories=8)
    count = 200_000
    shares = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02], dtype=torch.float64)
    records = torch.repeat_interleave(torch.arange(8), (shares * count).round().long())[
        :, None
    ].float()
    sent = channel.privatize(records, SecretRandom(insecure_seed=11))
    if kind is RandomizedResponse:
        p = math.e / (math.e + 7)
        q = 1 / (math.e + 7)
        seen = torch.bincount(sent[:, 0].long(), minlength=8) / len(sent)
    else:
        p, q = (
            (math.sqrt(math.e) / (1 + math.sqrt(math.e)), 1 / (1 + math.sqrt(math.e)))
            if kind is UnaryEncoding
            else (0.5, 1 / (1 + math.e))
        )
        seen = sent.mean(0)
    unbiased = (seen.double() - q) / (p - q)
    law = table(channel)[0]
    guess = torch.full((8,), 1 / 8, dtype=torch.float64)
    times = torch.bincount(code(sent), minlength=law.shape[1]) / len(sent)
    for _ in range(1000):
        guess = guess * (law @ (times / (guess @ law)))
    error = math.sqrt(q * (1 - q) / count) / (p - q)
    assert (unbiased - shares).abs().max() < 5 * error
    assert (guess - unbiased).abs().max() < 3 * error
    assert (guess - shares).abs().sum() / 2 < 0.02


# Costs


@pytest.mark.parametrize("projection", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("kind", [Laplace, Gaussian])
def test_the_cost_is_the_log_density_of_the_noise(kind, projection):
    channel = kind.calibrate(2.0, 1e-5, projection=projection)
    x = torch.rand(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = channel.privatize(x[:2]).double()
    rest = y[None] - channel.clip_and_project(x)[:, None]
    law = (
        stats.laplace(scale=channel.scale)
        if kind is Laplace
        else stats.norm(scale=channel.noise_std)
    )
    density = torch.from_numpy(law.logpdf(rest.numpy())).sum(-1)
    both = channel.compute_cost_matrix(x, y) / channel.temperature + density
    assert torch.allclose(both, both[0, 0].expand_as(both), rtol=1e-9)


@pytest.mark.parametrize("radius", [None, 0.8])
def test_the_cost_has_a_gradient_through_space_and_ball(radius):
    channel = Gaussian.calibrate(
        5.0, 1e-5, projection=Projection(kind="dct", shape=(1, 4, 4), side=3), radius=radius
    )
    x = torch.rand(
        2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    y = channel.privatize(x.detach()).double()
    assert torch.autograd.gradcheck(lambda at: channel.compute_cost_matrix(at, y), (x,))


@pytest.mark.parametrize(
    "channel",
    [
        Laplace.calibrate(4.0, projection=SQUARE),
        Gaussian.calibrate(4.0, 1e-5, projection=SQUARE),
        DISCRETE[1],
        DISCRETE[4],
    ],
)
def test_the_average_cost_of_an_answer(channel):
    records = torch.zeros(20_000, channel.record_dim)
    sent = channel.privatize(records, SecretRandom(insecure_seed=4))
    found = channel.compute_cost_matrix(channel.to_points(records[:1]), sent)[0]
    base = float(found.std()) / math.sqrt(len(sent))
    assert abs(float(found.mean()) - channel.compute_expected_cost()) < 5 * base


def test_mixed_costs_and_epsilons_add():
    values = Gaussian.calibrate(2.0, 1e-5, projection=SQUARE)
    label = RandomizedResponse.calibrate(1.5, num_categories=3)
    mixed = Composite(parts=(values, label))
    records = torch.tensor([[0.2, 0.7, 1.0], [0.9, 0.1, 2.0]])
    sent = mixed.privatize(records)
    points = mixed.to_points(records)
    assert (
        mixed.record_dim,
        mixed.point_dim,
        mixed.output_dim,
        mixed.temperature,
        mixed.delta,
    ) == (
        3,
        5,
        3,
        1.0,
        1e-5,
    )
    parts = values.compute_cost_matrix(
        points[:, :2], sent[:, :2]
    ) / values.temperature + label.compute_cost_matrix(points[:, 2:], sent[:, 2:])
    assert torch.allclose(mixed.compute_cost_matrix(points, sent), parts)
    assert mixed.epsilon == pytest.approx(3.5, rel=1e-9)
    assert mixed.is_possible_output(sent)
    assert not mixed.is_possible_output(sent + torch.tensor([0.0, 0.0, 0.5]))
    with pytest.raises(SettingError):
        Composite(parts=(mixed,))


# An audit that can see


def refuted(channel, first, second, count=20_000, privatize=None):
    """A lower bound on epsilon (99.9 %) from the likelihood ratio of answers to two records."""
    pair = torch.tensor([first, second])
    run = privatize or channel.privatize
    secret = SecretRandom(insecure_seed=9)
    scores = []
    for record in pair:
        sent = run(record.expand(count, -1), secret)
        near = channel.compute_cost_matrix(
            channel.to_points(pair), sent.double() if sent.is_floating_point() else sent
        )
        scores.append((near[1] - near[0]).numpy())
    cut = np.quantile(np.concatenate(scores), np.linspace(0.02, 0.98, 25))
    hits, alarms = ((each[:, None] >= cut - 1e-9).sum(0) for each in scores)
    return max(
        compute_refuted_epsilon(hits, alarms, count, count, channel.delta, 1e-3 / 25).max(), 0.0
    )


AUDITED = [
    (Laplace.calibrate(1.0, projection=Projection(shape=(1,))), (0.0,), (1.0,)),
    (Gaussian.calibrate(1.0, 1e-5, projection=Projection(shape=(1,))), (0.0,), (1.0,)),
    (RandomizedResponse.calibrate(1.0, num_categories=3), (0.0,), (1.0,)),
    (UnaryEncoding.calibrate(1.0, num_categories=3), (0.0,), (1.0,)),
    (OptimizedUnaryEncoding.calibrate(1.0, num_categories=3), (0.0,), (1.0,)),
    (
        Composite(
            parts=(
                Laplace.calibrate(0.5, projection=Projection(shape=(1,))),
                RandomizedResponse.calibrate(0.5, num_categories=2),
            )
        ),
        (0, 0.0),
        (1, 1.0),
    ),
]


@pytest.mark.parametrize(
    ("channel", "first", "second"), AUDITED, ids=lambda value: getattr(value, "name", "")
)
def test_an_honest_channel_is_not_refuted(channel, first, second):
    assert refuted(channel, first, second) <= channel.epsilon + 1e-9


def test_half_the_noise_is_caught():
    channel, _, _ = AUDITED[0]
    hasty = Laplace(projection=channel.projection, scale=channel.scale / 2)
    assert refuted(channel, (0.0,), (1.0,), privatize=hasty.privatize) > 1.3
    respond = AUDITED[2][0]
    assert refuted(respond, (0.0,), (1.0,), privatize=respond.with_epsilon(2.0).privatize) > 1.3


def test_a_forgotten_clip_is_caught():
    channel, _, _ = AUDITED[0]
    open_wide = Laplace(
        projection=channel.projection, scale=channel.scale, low=-30.0, high=30.0
    )  # the same noise, and nobody clips
    wide = torch.tensor([[0.0], [4.0]])
    secret = SecretRandom(insecure_seed=9)
    sent = [open_wide.privatize(each.expand(20_000, -1), secret) for each in wide]
    hits, alarms = ((each > 2.0).sum().item() for each in sent[::-1])
    assert float(compute_refuted_epsilon(hits, alarms, 20_000, 20_000, 0.0, 1e-3)) > 1.3
    assert refuted(channel, (0.0,), (4.0,)) <= 1.0


def test_labels_left_clear_are_caught():
    channel, first, second = AUDITED[-1]

    def forgets(records, secret):
        return torch.cat([channel.parts[0].privatize(records[:, :1], secret), records[:, 1:]], 1)

    assert refuted(channel, first, second, privatize=forgets) > 3.0


# Accounting


def test_pure_epsilons_are_never_under_the_exact_price():
    events = [
        dpa.LaplaceDpEvent(1.0),
        dpa.LaplaceDpEvent(0.5),
        dpa.RandomizedResponseDpEvent(0.5, 4),
    ]
    ours = compute_privacy_cost(dpa.ComposedDpEvent(events), Neighbours.LOCAL)
    total = 1 + 2 + math.log((0.5 + 0.125) / 0.125)
    assert ours.epsilon(0) == ours.epsilon(1e-5) == pytest.approx(total, rel=1e-12)
    exact = (
        pld.from_laplace_mechanism(1.0)
        .compose(pld.from_laplace_mechanism(0.5))
        .compose(pld.from_randomized_response(0.5, 4))
    )
    for epsilon in (0.0, 1.0, 3.0, 4.5):
        assert (
            ours.delta(epsilon) >= exact.get_delta_for_epsilon(epsilon) - 1e-4
        )  # its grid is pessimistic by so much
    assert ours.max_tpr(0.01) == pytest.approx(
        min(math.exp(total) * 0.01, 1 - math.exp(-total) * 0.99), rel=1e-6
    )


def test_pure_epsilons_on_top_of_gaussians():
    both = compute_privacy_cost(
        dpa.ComposedDpEvent([dpa.GaussianDpEvent(2.0), dpa.LaplaceDpEvent(0.5)]), Neighbours.LOCAL
    )
    alone = compute_privacy_cost(dpa.GaussianDpEvent(2.0), Neighbours.LOCAL)
    assert both.epsilon(1e-5) == pytest.approx(alone.epsilon(1e-5) + 2.0)
    exact = pld.from_gaussian_mechanism(2.0).compose(pld.from_laplace_mechanism(0.5))
    assert both.delta(2.5) >= exact.get_delta_for_epsilon(2.5) - 1e-6
    assert both.max_tpr(0.1) >= alone.max_tpr(0.1)


def test_the_certificate_of_a_channel():
    claim = compute_channel_guarantee(AUDITED[-1][0])
    assert (claim.neighbours, claim.unit, claim.delta) == ("local", "one record", 0.0)
    assert claim.epsilon == pytest.approx(1.0)
    assert claim.renyi_epsilon == pytest.approx(1.0)
    gaussian = compute_channel_guarantee(AUDITED[1][0])
    assert gaussian.delta == 1e-5
    assert gaussian.epsilon == pytest.approx(1.0)


# Descriptions and words


@pytest.mark.parametrize(
    "channel",
    [each for each, _, _ in AUDITED]
    + [Laplace.calibrate(9.0, projection=SPACES["dct"], radius=1.0, center=0.0)],
)
def test_parameters_there_and_back(channel):
    plain = json.loads(json.dumps(channel.to_json()))
    assert "epsilon" not in json.dumps(plain)
    assert channel_from_json(plain) == channel
    assert Plan.from_json(json.loads(json.dumps(channel.plan().to_json()))) == channel.plan()
    assert channel.with_epsilon(2 * channel.epsilon).epsilon == pytest.approx(
        2 * channel.epsilon, rel=1e-6
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"channel": "laplace"},
        {"channel": "laplac"},
        {"channel": "composite", "parts": []},
        {"channel": "composite", "parts": 3},
        {"channel": "randomized-response", "num_categories": 3, "wrong_category_probability": 0.5},
        {"channel": "randomized-response", "num_categories": 1, "wrong_category_probability": 0.1},
        {
            "channel": "unary",
            "num_categories": 10**9,
            "false_negative_rate": 0.1,
            "false_positive_rate": 0.1,
        },
        {
            "channel": "unary",
            "num_categories": 3,
            "false_negative_rate": 0.9,
            "false_positive_rate": 0.2,
        },
        {
            "channel": "laplace",
            "scale": -1.0,
            "projection": {"kind": "identity", "shape": [2], "side": 0},
        },
        {
            "channel": "laplace",
            "scale": math.nan,
            "projection": {"kind": "identity", "shape": [2], "side": 0},
        },
        {
            "channel": "laplace",
            "scale": 1.0,
            "low": 1.0,
            "high": 0.0,
            "projection": {"kind": "identity", "shape": [2], "side": 0},
        },
        {
            "channel": "laplace",
            "scale": 1.0,
            "epsilon": 0.1,
            "projection": {"kind": "identity", "shape": [2], "side": 0},
        },
        {
            "channel": "laplace",
            "scale": 1.0,
            "projection": {"kind": "identity", "shape": [10**9, 10**9], "side": 0},
        },
        {
            "channel": "gaussian",
            "noise_std": 1.0,
            "delta": 2.0,
            "projection": {"kind": "identity", "shape": [2], "side": 0},
        },
        {
            "channel": "laplace",
            "scale": 1.0,
            "projection": {"kind": "pooled", "shape": [1, 8, 8], "side": 3},
        },
        {
            "channel": "laplace",
            "scale": 1.0,
            "projection": {"kind": "odd", "shape": [1, 8, 8], "side": 3},
        },
    ],
)
def test_broken_descriptions_are_refused_in_one_line(value):
    with pytest.raises(PrivotError) as refused:
        channel_from_json(value)
    assert "\n" not in str(refused.value)


def test_what_cannot_be_told_is_said_with_what_would_do():
    for channel in (
        Laplace.calibrate(0.05, projection=SQUARE),
        AUDITED[2][0].with_epsilon(0.01),
        Gaussian.calibrate(0.02, 1e-5, projection=SQUARE),
    ):
        text = warn_if_too_noisy(channel, 100)
        assert text is not None
        sufficient = text.partition("Use at least ")[2]
        records = int(sufficient.split()[0].replace(",", ""))
        epsilon = float(sufficient.rsplit(" ", 1)[1].removesuffix("."))
        assert channel.predict_signal_to_noise(records) >= 1
        assert channel.with_epsilon(epsilon * 1.01).predict_signal_to_noise(100) >= 1
        assert channel.with_epsilon(epsilon * 0.9).predict_signal_to_noise(100) < 1
    assert warn_if_too_noisy(Laplace.calibrate(5.0, projection=SQUARE), 10_000) is None


# The ledger


def test_twice_privatized_is_twice_paid(ledger):
    table_of = SensitiveTable(np.random.default_rng(0).random((50, 2)), name="people")
    channel = Laplace.calibrate(1.5, projection=SQUARE)
    first, second = (privatize(table_of, channel, ledger=ledger) for _ in range(2))
    assert not torch.equal(first.values, second.values)
    assert ledger.compute_spent_cost().epsilon(1e-9) == pytest.approx(3.0)
    other = Gaussian.calibrate(1.0, 1e-6, projection=SQUARE)
    privatize(table_of, other, ledger=ledger)
    assert ledger.compute_spent_cost().epsilon(1e-6) == pytest.approx(4.0, rel=1e-6)
    assert [each["method"] for each in ledger.entries() if each["kind"] == "reserve"] == [
        "privatize laplace"
    ] * 2 + ["privatize gaussian"]
