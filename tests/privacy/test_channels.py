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

from privot.audit.many_runs import ratio
from privot.data.tabular import Table
from privot.errors import PrivotError, SettingError
from privot.local.channels import (
    Gaussian,
    Laplace,
    Mixed,
    OptimizedUnary,
    RandomizedResponse,
    Space,
    Unary,
    channel_from,
)
from privot.local.privatize import certificate, privatize
from privot.local.signal_check import too_little
from privot.privacy.accounting import Neighbours, cost
from privot.privacy.noise import BEYOND, Secret, chance
from privot.privacy.plan import Plan

SQUARE = Space(shape=(2,))
IMAGE = (1, 8, 8)
SPACES = {
    "plain": Space(shape=IMAGE),
    "pooled": Space(kind="pooled", shape=IMAGE, size=4),
    "waves": Space(kind="waves", shape=IMAGE, size=3),
    "one wave": Space(kind="waves", shape=IMAGE, size=1),
}
DISCRETE = [
    kind.calibrated(epsilon, categories=5)
    for kind in (RandomizedResponse, Unary, OptimizedUnary)
    for epsilon in (0.5, 1.0, 3.0)
]


class Still(Secret):
    """No noise: what a channel would have added it to."""

    def laplace(self, shape, digits):
        return torch.zeros(shape, dtype=torch.int64)

    def normal(self, shape, device="cpu"):
        return torch.zeros(shape, dtype=torch.float64)


def digit_odds(digits):
    """Probability of each binary digit, from the words that the coins are compared with."""
    scale = np.array([2.0**-8, 2.0**-71, 2.0**-134, 2.0**-197])
    return [
        float(np.dot(np.array(chance(power - digits), float), scale))
        for power in range(digits + BEYOND)
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
    return ((here - there) / channel.grid).round().abs().long()[0]


def corners(channel):
    return [channel.low - 5.0] * channel.columns, [
        channel.high + 5.0
    ] * channel.columns  # out of the domain: they are clipped


# The exact law of Laplace noise


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0, 50.0])
@pytest.mark.parametrize(
    "space",
    [SQUARE, SPACES["plain"], SPACES["pooled"], SPACES["one wave"]],
    ids=lambda space: space.kind,
)
def test_laplace_on_the_worst_pair(space, epsilon):
    channel = Laplace.calibrated(epsilon, space=space, low=-1.0, high=1.0)
    shifts, counts = moved(channel, *corners(channel)).unique(return_counts=True)
    digits = min(
        channel.digits, 13
    )  # the law of a finer grid is the same at the same distance, and no larger table is needed
    coarser = 2 ** (channel.digits - digits)
    found = sum(
        int(count) * steepest(digits, math.ceil(int(shift) / coarser))
        for shift, count in zip(shifts, counts, strict=True)
    )
    slack = 2.0**-digits * channel.width if coarser > 1 else 0.0
    assert found <= epsilon * (1 + 1e-9) + slack
    assert found > 0.99 * epsilon
    assert channel.epsilon == pytest.approx(epsilon, rel=1e-12)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("kind", [Laplace, Gaussian])
def test_no_pair_is_farther_apart_than_stated(space, kind):
    """Random records, corners, NaN and infinities, with and without a ball: on the grid, in the channel's norm."""
    rng = np.random.default_rng(3)
    for radius, centre in itertools.product((None, 0.7, 5.0), (None, 0.0)):
        channel = kind.calibrated(1.0, 1e-5, space=space, radius=radius, centre=centre)
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
        apart = torch.cdist(sent, sent, p=float(channel.norm)).max()
        assert apart <= channel.sensitivity * (1 + 1e-6)
        if channel.norm == 2 and radius is None and centre is None:
            assert apart > 0.99 * channel.sensitivity


def test_a_ball_is_reached_and_kept():
    channel = Laplace.calibrated(2.0, space=Space(shape=(2,)), radius=0.25, centre=0.0)
    shifts = moved(channel, (1.0, 0.0), (0.0, 1.0))
    assert channel.sensitivity == 0.5
    assert 0.99 < float(shifts.sum()) * channel.grid / 0.5 <= 1


def test_a_ball_of_many_values_is_kept_though_norms_are_rounded():
    """A sum of many values is off in its last digits; a record still has no step too many."""
    count = 200_000
    channel = Laplace.calibrated(2.0, space=Space(shape=(count,)), radius=1000.0, centre=0.0)
    records = torch.rand(
        2, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).sqrt()
    for row in channel._offset(records).numpy():
        assert math.fsum(abs(row)) <= channel.radius


@pytest.mark.parametrize(
    "make",
    [
        lambda: Laplace.calibrated(140.0, space=SQUARE),
        lambda: Laplace.calibrated(64.1, space=Space(shape=(1,)), low=-7.0, high=3.0),
        lambda: Laplace.calibrated(70.0, space=SPACES["one wave"]),
        lambda: Laplace.calibrated(70.0, space=SPACES["plain"], radius=0.4),
        lambda: Gaussian.calibrated(150.0, 1e-5, space=SQUARE),
        lambda: Gaussian.calibrated(150.0, 1e-5, space=SPACES["one wave"]),
        lambda: RandomizedResponse.calibrated(100.0, categories=3),
        lambda: Unary.calibrated(200.0, categories=3),
        lambda: OptimizedUnary.calibrated(100.0, categories=3),
    ],
)
def test_noise_so_faint_that_its_drawn_law_ends_is_refused(make):
    """Noise that is drawn has an end, and coins have a last digit: where that would tell records apart there is no proof, so no channel."""
    with pytest.raises(SettingError):
        make()


@pytest.mark.parametrize("space", [SPACES["plain"], SPACES["pooled"]], ids=lambda space: space.kind)
def test_what_one_record_alone_can_send_is_nothing(space):
    """At the faintest noise that is allowed: answers of one record that the other cannot give, by the exact law."""
    channel = Laplace.calibrated(63.0 * space.width, space=space)
    far = int(moved(channel, *corners(channel)).max())
    digits = channel.digits
    left = (1 << digits + BEYOND) - far  # steps from a record to where the other's answers end
    alone = sum(math.exp(-left * 2.0**-digits) / 2 for _ in range(space.width))
    assert 0 < alone < 1e-25


def test_draws_follow_the_law():
    digits = 2
    count = 400_000
    drawn = Secret(insecure_seed=5).laplace((count,), digits).numpy()
    law = np.exp(magnitude_law(digits, 24)) / 2
    shares = np.concatenate([law[::-1], law])  # z from -24 to 23
    seen = np.bincount(np.clip(drawn, -25, 24) + 25, minlength=50)
    expected = count * np.concatenate([[(1 - shares.sum()) / 2], shares, [(1 - shares.sum()) / 2]])
    assert stats.chisquare(seen, expected).pvalue > 1e-4
    exact = (1 - math.exp(-0.25)) * np.exp(-0.25 * np.arange(24)) / 2  # the geometric law itself
    assert np.allclose(law, exact, rtol=1e-12)


def test_coins_compare_to_the_last_digit():
    """A probability under 2^-8 is decided after the first byte; one of 0 and nearly 1 never errs."""
    secret = Secret(insecure_seed=1)
    count = 200_000
    small = secret.coins(chance(3), count).double().mean()  # 1/(1+e^8) = 0.000335
    assert abs(float(small) - 1 / (1 + math.exp(8))) < 5 * math.sqrt(0.000335 / count)
    assert not secret.coins((0, 0, 0, 0), count).any()
    assert secret.coins((255, (1 << 63) - 1, (1 << 63) - 1), count).all()
    assert secret.coins((128, 0), 0).shape == (0,)


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
    channel = Gaussian.calibrated(epsilon, delta, space=SPACES["plain"])
    noise = channel.noise_std / channel.sensitivity
    assert noise == pytest.approx(wanted, abs=6e-4)
    shift = 1 / noise
    log_tail = stats.norm.logcdf(-shift / 2 - epsilon / shift)
    reached = stats.norm.cdf(shift / 2 - epsilon / shift) - math.exp(epsilon + log_tail)
    assert reached == pytest.approx(delta, rel=1e-9)
    assert channel.epsilon == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_gaussian_on_the_worst_pair(space):
    channel = Gaussian.calibrated(1.0, 1e-5, space=space)
    apart = (
        moved(channel, *corners(channel)).double().norm().item() * channel.grid / channel.noise_std
    )
    reached = stats.norm.cdf(apart / 2 - 1 / apart) - math.exp(
        1 + stats.norm.logcdf(-apart / 2 - 1 / apart)
    )
    assert 0.99e-5 < reached <= 1e-5 * (1 + 1e-6)


def test_gaussian_draws():
    channel = Gaussian.calibrated(3.0, 1e-4, space=SQUARE)
    noise = (
        (channel.privatize(torch.zeros(50_000, 2), Secret(insecure_seed=4)) / channel.noise_std)
        .flatten()
        .numpy()
    )
    assert stats.kstest(noise, "norm").pvalue > 1e-4


# Categories


def table(channel):
    """K(y|x): [categories, answers], from the cost; and the answers, all of them."""
    k = channel.categories
    answers = (
        torch.arange(k)[:, None]
        if channel.width == 1
        else torch.tensor(list(itertools.product((0, 1), repeat=k)))
    )
    points = channel.points(torch.arange(k)[:, None].float()).double()
    return (-channel.cost(points, answers.double())).exp(), answers


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
    drawn = channel.privatize(torch.full((40_000, 1), 2.0), Secret(insecure_seed=4))
    seen = np.bincount(code(drawn).numpy(), minlength=len(answers))
    assert stats.chisquare(seen, 40_000 * law[2].numpy()).pvalue > 1e-5
    entropy = -float((law[2] * law[2].log()).sum())
    assert channel.residual() == pytest.approx(entropy, rel=1e-9)


def test_symmetric_costs_are_what_the_papers_say():
    respond = RandomizedResponse.calibrated(2.0, categories=4)
    rappor = Unary.calibrated(2.0, categories=4)
    law, answers = table(respond)
    assert torch.allclose(
        -law.log() + law.log()[0, 0], 2.0 * (torch.arange(4)[:, None] != answers.T).double()
    )
    law, answers = table(rappor)
    hamming = (torch.eye(4)[:, None] != answers[None]).sum(-1).double()
    found = -law.log()
    assert torch.allclose(found - found.min(), 1.0 * hamming)


@pytest.mark.parametrize("kind", [RandomizedResponse, Unary, OptimizedUnary])
def test_shares_agree_with_the_textbook_estimator(kind):
    """The likelihood by our cost, climbed by Bayes' rule, against the unbiased estimate from counts."""
    channel = kind.calibrated(1.0, categories=8)
    count = 200_000
    shares = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02], dtype=torch.float64)
    records = torch.repeat_interleave(torch.arange(8), (shares * count).round().long())[
        :, None
    ].float()
    sent = channel.privatize(records, Secret(insecure_seed=11))
    if kind is RandomizedResponse:
        p = math.e / (math.e + 7)
        q = 1 / (math.e + 7)
        seen = torch.bincount(sent[:, 0].long(), minlength=8) / len(sent)
    else:
        p, q = (
            (math.sqrt(math.e) / (1 + math.sqrt(math.e)), 1 / (1 + math.sqrt(math.e)))
            if kind is Unary
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


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("kind", [Laplace, Gaussian])
def test_the_cost_is_the_log_density_of_the_noise(kind, space):
    channel = kind.calibrated(2.0, 1e-5, space=space)
    x = torch.rand(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = channel.privatize(x[:2]).double()
    rest = y[None] - channel.seen(x)[:, None]
    law = (
        stats.laplace(scale=channel.scale)
        if kind is Laplace
        else stats.norm(scale=channel.noise_std)
    )
    density = torch.from_numpy(law.logpdf(rest.numpy())).sum(-1)
    both = channel.cost(x, y) / channel.temperature + density
    assert torch.allclose(both, both[0, 0].expand_as(both), rtol=1e-9)


@pytest.mark.parametrize("radius", [None, 0.8])
def test_the_cost_has_a_gradient_through_space_and_ball(radius):
    channel = Gaussian.calibrated(
        5.0, 1e-5, space=Space(kind="waves", shape=(1, 4, 4), size=3), radius=radius
    )
    x = torch.rand(
        2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    y = channel.privatize(x.detach()).double()
    assert torch.autograd.gradcheck(lambda at: channel.cost(at, y), (x,))


@pytest.mark.parametrize(
    "channel",
    [
        Laplace.calibrated(4.0, space=SQUARE),
        Gaussian.calibrated(4.0, 1e-5, space=SQUARE),
        DISCRETE[1],
        DISCRETE[4],
    ],
)
def test_the_average_cost_of_an_answer(channel):
    records = torch.zeros(20_000, channel.columns)
    sent = channel.privatize(records, Secret(insecure_seed=4))
    found = channel.cost(channel.points(records[:1]), sent)[0]
    base = float(found.std()) / math.sqrt(len(sent))
    assert abs(float(found.mean()) - channel.residual()) < 5 * base


def test_mixed_costs_and_epsilons_add():
    values = Gaussian.calibrated(2.0, 1e-5, space=SQUARE)
    label = RandomizedResponse.calibrated(1.5, categories=3)
    mixed = Mixed(parts=(values, label))
    records = torch.tensor([[0.2, 0.7, 1.0], [0.9, 0.1, 2.0]])
    sent = mixed.privatize(records)
    points = mixed.points(records)
    assert (mixed.columns, mixed.dim, mixed.width, mixed.temperature, mixed.delta) == (
        3,
        5,
        3,
        1.0,
        1e-5,
    )
    parts = values.cost(points[:, :2], sent[:, :2]) / values.temperature + label.cost(
        points[:, 2:], sent[:, 2:]
    )
    assert torch.allclose(mixed.cost(points, sent), parts)
    assert mixed.epsilon == pytest.approx(3.5, rel=1e-9)
    assert mixed.holds(sent)
    assert not mixed.holds(sent + torch.tensor([0.0, 0.0, 0.5]))
    with pytest.raises(SettingError):
        Mixed(parts=(mixed,))


# An audit that can see


def refuted(channel, first, second, count=20_000, privatize=None):
    """A lower bound on epsilon (99.9 %) from the likelihood ratio of answers to two records."""
    pair = torch.tensor([first, second])
    run = privatize or channel.privatize
    secret = Secret(insecure_seed=9)
    scores = []
    for record in pair:
        sent = run(record.expand(count, -1), secret)
        near = channel.cost(
            channel.points(pair), sent.double() if sent.is_floating_point() else sent
        )
        scores.append((near[1] - near[0]).numpy())
    cut = np.quantile(np.concatenate(scores), np.linspace(0.02, 0.98, 25))
    hits, alarms = ((each[:, None] >= cut - 1e-9).sum(0) for each in scores)
    return max(ratio(hits, alarms, count, count, channel.delta, 1e-3 / 25).max(), 0.0)


AUDITED = [
    (Laplace.calibrated(1.0, space=Space(shape=(1,))), (0.0,), (1.0,)),
    (Gaussian.calibrated(1.0, 1e-5, space=Space(shape=(1,))), (0.0,), (1.0,)),
    (RandomizedResponse.calibrated(1.0, categories=3), (0.0,), (1.0,)),
    (Unary.calibrated(1.0, categories=3), (0.0,), (1.0,)),
    (OptimizedUnary.calibrated(1.0, categories=3), (0.0,), (1.0,)),
    (
        Mixed(
            parts=(
                Laplace.calibrated(0.5, space=Space(shape=(1,))),
                RandomizedResponse.calibrated(0.5, categories=2),
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
    hasty = Laplace(space=channel.space, scale=channel.scale / 2)
    assert refuted(channel, (0.0,), (1.0,), privatize=hasty.privatize) > 1.3
    respond = AUDITED[2][0]
    assert refuted(respond, (0.0,), (1.0,), privatize=respond.at(2.0).privatize) > 1.3


def test_a_forgotten_clip_is_caught():
    channel, _, _ = AUDITED[0]
    open_wide = Laplace(
        space=channel.space, scale=channel.scale, low=-30.0, high=30.0
    )  # the same noise, and nobody clips
    wide = torch.tensor([[0.0], [4.0]])
    secret = Secret(insecure_seed=9)
    sent = [open_wide.privatize(each.expand(20_000, -1), secret) for each in wide]
    hits, alarms = ((each > 2.0).sum().item() for each in sent[::-1])
    assert float(ratio(hits, alarms, 20_000, 20_000, 0.0, 1e-3)) > 1.3
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
    ours = cost(dpa.ComposedDpEvent(events), Neighbours.LOCAL)
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
    assert ours.tpr(0.01) == pytest.approx(
        min(math.exp(total) * 0.01, 1 - math.exp(-total) * 0.99), rel=1e-6
    )


def test_pure_epsilons_on_top_of_gaussians():
    both = cost(
        dpa.ComposedDpEvent([dpa.GaussianDpEvent(2.0), dpa.LaplaceDpEvent(0.5)]), Neighbours.LOCAL
    )
    alone = cost(dpa.GaussianDpEvent(2.0), Neighbours.LOCAL)
    assert both.epsilon(1e-5) == pytest.approx(alone.epsilon(1e-5) + 2.0)
    exact = pld.from_gaussian_mechanism(2.0).compose(pld.from_laplace_mechanism(0.5))
    assert both.delta(2.5) >= exact.get_delta_for_epsilon(2.5) - 1e-6
    assert both.tpr(0.1) >= alone.tpr(0.1)


def test_the_certificate_of_a_channel():
    claim = certificate(AUDITED[-1][0])
    assert (claim.neighbours, claim.unit, claim.delta) == ("local", "one record", 0.0)
    assert claim.epsilon == pytest.approx(1.0)
    assert claim.renyi_epsilon == pytest.approx(1.0)
    gaussian = certificate(AUDITED[1][0])
    assert gaussian.delta == 1e-5
    assert gaussian.epsilon == pytest.approx(1.0)


# Descriptions and words


@pytest.mark.parametrize(
    "channel",
    [each for each, _, _ in AUDITED]
    + [Laplace.calibrated(9.0, space=SPACES["waves"], radius=1.0, centre=0.0)],
)
def test_parameters_there_and_back(channel):
    plain = json.loads(json.dumps(channel.parameters()))
    assert "epsilon" not in json.dumps(plain)
    assert channel_from(plain) == channel
    assert Plan.from_json(json.loads(json.dumps(channel.plan().to_json()))) == channel.plan()
    assert channel.at(2 * channel.epsilon).epsilon == pytest.approx(2 * channel.epsilon, rel=1e-6)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"channel": "laplace"},
        {"channel": "laplac"},
        {"channel": "mixed", "parts": []},
        {"channel": "mixed", "parts": 3},
        {"channel": "randomized-response", "categories": 3, "lie": 0.5},
        {"channel": "randomized-response", "categories": 1, "lie": 0.1},
        {"channel": "unary", "categories": 10**9, "miss": 0.1, "false": 0.1},
        {"channel": "unary", "categories": 3, "miss": 0.9, "false": 0.2},
        {"channel": "laplace", "scale": -1.0, "space": {"kind": "plain", "shape": [2], "size": 0}},
        {
            "channel": "laplace",
            "scale": math.nan,
            "space": {"kind": "plain", "shape": [2], "size": 0},
        },
        {
            "channel": "laplace",
            "scale": 1.0,
            "low": 1.0,
            "high": 0.0,
            "space": {"kind": "plain", "shape": [2], "size": 0},
        },
        {
            "channel": "laplace",
            "scale": 1.0,
            "epsilon": 0.1,
            "space": {"kind": "plain", "shape": [2], "size": 0},
        },
        {
            "channel": "laplace",
            "scale": 1.0,
            "space": {"kind": "plain", "shape": [10**9, 10**9], "size": 0},
        },
        {
            "channel": "gaussian",
            "noise_std": 1.0,
            "delta": 2.0,
            "space": {"kind": "plain", "shape": [2], "size": 0},
        },
        {
            "channel": "laplace",
            "scale": 1.0,
            "space": {"kind": "pooled", "shape": [1, 8, 8], "size": 3},
        },
        {
            "channel": "laplace",
            "scale": 1.0,
            "space": {"kind": "odd", "shape": [1, 8, 8], "size": 3},
        },
    ],
)
def test_broken_descriptions_are_refused_in_one_line(value):
    with pytest.raises(PrivotError) as refused:
        channel_from(value)
    assert "\n" not in str(refused.value)


def test_what_cannot_be_told_is_said_with_what_would_do():
    for channel in (
        Laplace.calibrated(0.05, space=SQUARE),
        AUDITED[2][0].at(0.01),
        Gaussian.calibrated(0.02, 1e-5, space=SQUARE),
    ):
        text = too_little(channel, 100)
        assert text is not None
        records = int(text.split(";")[1].split()[0].replace(",", ""))
        epsilon = float(text.rsplit(" ", 1)[1])
        assert channel.signal(records) >= 1
        assert channel.at(epsilon * 1.01).signal(100) >= 1
        assert channel.at(epsilon * 0.9).signal(100) < 1
    assert too_little(Laplace.calibrated(5.0, space=SQUARE), 10_000) is None


# The ledger


def test_twice_privatized_is_twice_paid(ledger):
    table_of = Table(np.random.default_rng(0).random((50, 2)), name="people")
    channel = Laplace.calibrated(1.5, space=SQUARE)
    first, second = (privatize(table_of, channel, ledger=ledger) for _ in range(2))
    assert not torch.equal(first.values, second.values)
    assert ledger.spent().epsilon(1e-9) == pytest.approx(3.0)
    other = Gaussian.calibrated(1.0, 1e-6, space=SQUARE)
    privatize(table_of, other, ledger=ledger)
    assert ledger.spent().epsilon(1e-6) == pytest.approx(4.0, rel=1e-6)
    assert [each["method"] for each in ledger.entries() if each["kind"] == "reserve"] == [
        "privatize laplace"
    ] * 2 + ["privatize gaussian"]
