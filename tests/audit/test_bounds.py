"""The statistics of an audit: figures computed by hand, bounds that fail no more often than they say, and scans that fail more often."""

import functools
import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy.stats import binom, norm
from sklearn.metrics import roc_auc_score

from privot.audit import (
    audit_many_runs,
    audit_one_run,
    audit_one_run_gaussian,
    bootstrap_mean_auc,
    clopper_pearson_lower,
    clopper_pearson_upper,
    compute_roc,
    estimate_advantage,
    estimate_tpr_at_fpr,
)
from privot.audit.many_runs import EpsilonBound, compute_refuted_epsilon
from privot.audit.one_run import (
    _search_epsilon,
    _search_mu,
    compute_guess_p_value,
    is_tradeoff_refuted,
)
from privot.audit.roc import count_above
from privot.errors import DataError, ReleaseError, SettingError

DELTA = 1e-5


def max_failures(error, times):
    """The most failures among so many that a rate of ``error`` explains, but for once in a thousand."""
    return binom.ppf(0.999, times, error)


def repeat(quick, full):
    """Fewer repetitions in every run of the tests, all of them in the slow one."""
    return pytest.mark.parametrize("times", [quick, pytest.param(full, marks=pytest.mark.slow)])


# The curve and its area


@pytest.mark.parametrize("high", [2, 5, 1000])
def test_the_area_counts_ties_half(high):
    rng = np.random.default_rng(0)
    members = rng.integers(0, high, 90) + 1
    others = rng.integers(0, high, 70)
    auc = compute_roc(members, others).auc
    wins = (members[:, None] > others).mean() + (members[:, None] == others).mean() / 2
    assert auc == pytest.approx(wins, abs=1e-12)
    labels = np.repeat([1, 0], [90, 70])
    expected = roc_auc_score(labels, np.concatenate([members, others]))
    assert auc == pytest.approx(expected, abs=1e-12)


def test_the_curve_is_that_of_its_thresholds():
    rng = np.random.default_rng(1)
    members = rng.normal(1, 1, 300).round(1)
    others = rng.normal(0, 1, 400).round(1)
    curve = compute_roc(members, others)
    assert (curve.fpr[0], curve.tpr[0], curve.fpr[-1], curve.tpr[-1]) == (0, 0, 1, 1)
    levels = np.concatenate([members, others])
    points = {((others > level).mean(), (members > level).mean()) for level in levels}
    assert set(zip(curve.fpr, curve.tpr, strict=True)) == points | {(1.0, 1.0)}
    expected = [(members > np.sort(others)[-5]).mean(), 1.0]
    assert curve.measured_tpr_at([0.01, 1.0]).tolist() == expected
    levels, power = curve.sample_log_spaced(50)
    assert len(levels) == 50
    assert (np.diff(power) >= 0).all()
    assert compute_roc([1.0] * 9, [1.0] * 4).auc == 0.5
    assert compute_roc([math.inf, 1], [-math.inf, 0]).auc == 1


@pytest.mark.parametrize(
    ("members", "others"), [([], [1.0]), ([1.0], []), ([[1.0]], [1.0]), ([math.nan], [1.0])]
)
def test_scores_that_mean_nothing_are_refused(members, others):
    many_runs = functools.partial(audit_many_runs, delta=0)
    for measure in (compute_roc, estimate_tpr_at_fpr, estimate_advantage, many_runs):
        with pytest.raises(DataError):
            measure(members, others)


def test_the_best_threshold_flatters_and_the_split_does_not():
    scores = np.random.default_rng(2).normal(size=(400, 2, 100))
    honest = [estimate_advantage(*pair, seed=turn) for turn, pair in enumerate(scores)]
    values = np.array([advantage.value for advantage in honest])
    assert abs(values.mean()) < 3 * values.std() / 20
    assert np.mean([compute_roc(*pair).max_advantage() for pair in scores]) > 0.06
    errors = np.mean([advantage.standard_error for advantage in honest])
    assert errors == pytest.approx(values.std(), rel=0.15)
    assert honest[0] == estimate_advantage(*scores[0], seed=0)


def test_the_advantage_of_a_gaussian_law():
    rng = np.random.default_rng(3)
    found = estimate_advantage(rng.normal(1, 1, 20_000), rng.normal(0, 1, 20_000))
    assert found.value == pytest.approx(2 * norm.cdf(0.5) - 1, abs=3 * found.standard_error)
    assert found.num_candidates == 20_000
    assert not found.publishable


@repeat(100, 300)
def test_the_mean_area_over_models_is_covered(times):
    """Candidates of a model share its luck, so an interval over candidates would be far too short."""
    rng = np.random.default_rng(4)
    missed = 0
    for turn in range(times):
        pairs = [(rng.normal(luck, 1, 80), rng.normal(0, 1, 80)) for luck in rng.normal(0, 0.3, 10)]
        found = bootstrap_mean_auc(pairs, seed=turn, num_resamples=1000)
        missed += not found.low <= 0.5 <= found.high
    assert missed <= max_failures(0.065, times)
    with pytest.raises(DataError, match="two"):
        bootstrap_mean_auc([([1], [0])])


# Rates


@pytest.mark.parametrize(
    ("hits", "trials", "error"),
    [(3, 20, 0.05), (10, 100, 0.025), (999, 1000, 1e-3), (7, 100_000, 1e-6)],
)
def test_clopper_pearson_inverts_the_binomial(hits, trials, error):
    lower, upper = (
        float(bound(hits, trials, error))
        for bound in (clopper_pearson_lower, clopper_pearson_upper)
    )
    assert binom.sf(hits - 1, trials, lower) == pytest.approx(error, rel=1e-6)
    assert binom.cdf(hits, trials, upper) == pytest.approx(error, rel=1e-6)
    ends = [0, trials]
    power = error ** (1 / trials)
    assert clopper_pearson_lower(ends, trials, error) == pytest.approx([0, power])
    assert clopper_pearson_upper(ends, trials, error) == pytest.approx([1 - power, 1])


def test_rates_at_fixed_levels():
    points = estimate_tpr_at_fpr(np.arange(5000) + 3000, np.arange(5000)).points
    assert [point.num_false_positives for point in points] == [0, 5, 50]
    assert [point.tpr for point in points] == [0.6, 0.601, 0.61]
    assert [point.has_few_false_positives for point in points] == [True, True, False]
    for point in points:
        assert point.tpr_lower_bound < point.tpr < point.tpr_upper_bound
        assert point.fpr < point.fpr_upper_bound
    tied = estimate_tpr_at_fpr(np.ones(100), np.ones(100), fprs=(0.29,)).points[0]
    # ties cannot be cut, so nobody is flagged
    assert (tied.num_false_positives, tied.tpr) == (0, 0)


@repeat(60, 600)
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("digits", [9, 0])  # digits 0: hundreds of ties
def test_all_bounds_of_all_points_hold_together(digits, certain, times):
    rng = np.random.default_rng(5)
    fails = 0
    passed = 0
    uppers = [clopper_pearson_upper(count, 400, 0.1 / 9) for count in range(121)]
    for _ in range(times):
        members = rng.normal(1, 1, 400).round(digits)
        others = rng.normal(0, 1, 400).round(digits)
        found = estimate_tpr_at_fpr(
            members, others, fprs=(0.01, 0.05, 0.3), certify_fpr=certain, confidence=0.9
        )
        for point in found.points:
            allowed = int(point.target_fpr * 400 + 1e-9)
            if certain:
                assert point.fpr_upper_bound <= point.target_fpr
                allowed = sum(upper <= point.target_fpr for upper in uppers[: allowed + 1]) - 1
            threshold = math.inf
            if allowed >= 0:
                threshold = np.sort(others)[-1 - allowed] + (0.5 if digits == 0 else 0)
            passed += norm.sf(threshold) > point.fpr_upper_bound
            fails += (
                norm.sf(threshold) > point.fpr_upper_bound
                or not point.tpr_lower_bound <= norm.sf(threshold - 1) <= point.tpr_upper_bound
            )
    assert fails <= max_failures(0.1, times)
    if digits == 9 and not certain and times == 600:
        # the bound of the FPR is exact here, not merely safe: about 20 of 1800
        assert passed >= 1800 * 0.1 / 9 / 2


def test_rates_become_an_attack_that_the_report_can_hold_against_a_certificate():
    rng = np.random.default_rng(6)
    rates = estimate_tpr_at_fpr(rng.normal(1, 1, 20_000), rng.normal(0, 1, 20_000))
    attack = rates.to_attack_result("lira")
    exceeded = attack.exceeds_bound(lambda fpr: float(norm.cdf(norm.ppf(fpr) + 1)))
    assert exceeded == (False, False, False)
    assert attack.exceeds_bound(lambda fpr: fpr) == (True, True, True)
    assert (attack.confidence, attack.publishable) == (0.95, False)
    for certain in (False, True):  # so few that nothing can be said, which is no reason to fail
        few = estimate_tpr_at_fpr([1.0], [0.0], certify_fpr=certain).to_attack_result("a")
        assert few.exceeds_bound(lambda fpr: fpr) == (False,) * 3


# Many runs


@pytest.mark.parametrize(
    ("count", "ceiling"),
    [(100, 3.28), (256, 4.23), (500, 4.91), (1000, 5.60), (10_000, 7.90), (100_000, 10.21)],
)
def test_ceilings_of_many_runs(count, ceiling):
    """Of a perfect attack at 95 %, threshold given: the figures of the literature and, at half of the runs, of a chosen threshold."""
    found = audit_many_runs(np.ones(count), np.zeros(count), 0, threshold=0.5)
    assert found.epsilon == found.ceiling == pytest.approx(ceiling, abs=0.006)
    split = audit_many_runs(np.ones(2 * count), np.zeros(2 * count), 0)
    assert split.epsilon == split.ceiling == found.ceiling
    assert split.num_trials == count
    blind = audit_many_runs(np.zeros(count), np.zeros(count), 0, threshold=0.5)
    assert (blind.epsilon, blind.ceiling) == (0, found.ceiling)


def test_both_directions_count():
    """A rare sure sign of absence proves as much as one of presence."""
    rare = (np.arange(1000) < 300) * 1.0
    common = np.zeros(1000)
    presence = audit_many_runs(rare, common, 0, threshold=0.5).epsilon
    assert presence > 4
    absence = audit_many_runs(-common, -rare, 0, threshold=-0.5).epsilon
    assert presence == pytest.approx(absence)


@pytest.mark.parametrize("threshold", [0.5, None])
@repeat(300, 1000)
def test_a_null_attack_proves_nothing(threshold, times):
    scores = np.random.default_rng(7).normal(0.5, 1, (times, 2, 120))
    found = [
        audit_many_runs(*pair, 0, threshold=threshold, seed=turn).epsilon
        for turn, pair in enumerate(scores)
    ]
    assert np.count_nonzero(found) <= max_failures(0.05, times)


@pytest.mark.parametrize(("count", "least"), [(100, 0.3), (1000, 0.75)])
def test_randomized_response_is_not_accused(count, least):
    """Exactly epsilon-private, so the claim is passed in at most 5 of 100 audits; by table, since only the counts matter."""
    rng = np.random.default_rng(8)
    honest = 1 / (1 + math.exp(-1.0))
    hits = rng.binomial(count, honest, 2000)
    alarms = rng.binomial(count, 1 - honest, 2000)
    found = np.maximum(compute_refuted_epsilon(hits, alarms, count, count, 0, 0.05), 0)
    scores = (np.arange(count) < hits[0], np.arange(count) < alarms[0])
    assert audit_many_runs(*scores, 0, threshold=0.5).epsilon == pytest.approx(found[0])
    assert (found > 1.0).sum() <= 2000 * 0.05
    assert np.median(found) > least  # nor is the bound idle


@repeat(40, 600)
def test_a_threshold_chosen_on_other_runs_does_not_accuse_but_a_scan_does(times):
    """Laplace noise of epsilon 3: the tails have the ratio e^epsilon at every threshold."""
    rng = np.random.default_rng(9)
    noise = rng.laplace(0, 1 / 3, (times, 2, 1000))
    scores = noise + np.array([1.0, 0.0])[:, None]
    found = [audit_many_runs(*pair, 0, seed=turn).epsilon for turn, pair in enumerate(scores)]
    assert np.median(found) > 1.9
    assert (np.array(found) > 3).sum() <= max_failures(0.05, times)

    def scan(inside, outside):
        """What must not be done: the best of all thresholds, as if there had been one."""
        levels = np.sort(np.concatenate([inside, outside]))
        counts = (count_above(inside, levels), count_above(outside, levels))
        return compute_refuted_epsilon(*counts, 1000, 1000, 0, 0.05).max()

    if times == 600:
        assert (np.array(found) > 3).sum() <= 600 * 0.05
        # about 70 where 30 are allowed
        assert sum(scan(*pair) > 3 for pair in scores) > max_failures(0.05, 600)


def test_delta_is_taken_off():
    """A mechanism that tells all once in twenty times and nothing else is (0, 1/20)-private."""
    told = (np.random.default_rng(10).random((300, 2000)) < 0.05) * 1.0

    def audit(delta):
        nothing = np.zeros(2000)
        return np.array(
            [audit_many_runs(row, nothing, delta, threshold=0.5).epsilon for row in told]
        )

    assert np.count_nonzero(audit(0.05)) <= max_failures(0.05, 300)
    assert (audit(0.0) > 2).all()


# The Gaussian mechanism: what audits prove of claims 1, 4 and 10 at delta 1e-5


@functools.cache
def compute_mu(epsilon):
    return 1 / dpa.get_sigma_gaussian(epsilon, DELTA)


def audit_gaussians(epsilon, trials, error, seeds, noise=1.0):
    """Bounds by the best threshold that the claim implies, mu/2, fixed beforehand; read as Gaussian."""
    rng = np.random.default_rng(11)
    mu = compute_mu(epsilon) / noise
    scores = (rng.normal([[mu], [0.0]], 1, (2, trials)) for _ in range(seeds))
    options = {"threshold": mu / 2, "assume_gaussian": True}
    return np.array(
        [audit_many_runs(*pair, DELTA, 1 - error, **options).epsilon for pair in scores]
    )


@pytest.mark.parametrize(
    ("trials", "error", "seeds", "tolerance", "expected"),
    [
        (1000, 1e-3, 41, 0.25, (0.00, 2.69, 8.12)),
        (10_000, 1e-3, 41, 0.25, (0.67, 3.58, 9.39)),
        pytest.param(100_000, 1e-6, 21, 0.03, (0.84, 3.80, 9.71), marks=pytest.mark.slow),
        pytest.param(1_000_000, 1e-6, 21, 0.03, (0.95, 3.94, 9.91), marks=pytest.mark.slow),
    ],
)
def test_the_gaussian_mechanism_is_seen_as_tightly_as_the_table_says(
    trials, error, seeds, tolerance, expected, trust
):
    for epsilon, median in zip((1, 4, 10), expected, strict=True):
        found = audit_gaussians(epsilon, trials, error, seeds)
        assert np.median(found) == pytest.approx(median, abs=tolerance)
        assert (found <= epsilon).all()
        if seeds == 21:
            note = f"{np.median(found):.2f} of {epsilon} by {trials:,} a side"
            trust("G6", "audits of a Gaussian answer under its claim", 21, of=21, note=note)


@repeat(100, 600)
@pytest.mark.parametrize("epsilon", [1, 4, 10])
def test_a_gaussian_claim_is_passed_no_more_often_than_stated(epsilon, times):
    failures = (audit_gaussians(epsilon, 400, 0.05, times) > epsilon).sum()
    assert failures <= max_failures(0.05, times)


@pytest.mark.parametrize(("epsilon", "noise"), [(1, 0.45), (4, 0.72), (10, 0.82)])
def test_too_little_noise_is_flagged(epsilon, noise):
    """A little less than what the table says is still caught by 1,000 trials a side: 0.50, 0.77, 0.86."""
    assert np.median(audit_gaussians(epsilon, 1000, 1e-3, 21, noise)) > epsilon


def test_without_the_gaussian_reading_the_table_is_out_of_reach():
    """1,000 trials cannot prove 8.12 of just any mechanism: their ceiling is 5.6."""
    mu = compute_mu(10)
    scores = np.random.default_rng(12).normal([[mu], [0.0]], 1, (2, 1000))
    plain = audit_many_runs(*scores, DELTA, 1 - 1e-3, threshold=mu * 0.9)
    assert 1.5 < plain.epsilon < plain.ceiling < 5.6
    assert plain.mu is None
    gaussian = audit_many_runs(*scores, DELTA, assume_gaussian=True)
    assert "not valid for others" in gaussian.procedure
    with pytest.raises(SettingError, match="delta"):
        audit_many_runs(*scores, 0, assume_gaussian=True)


# One run


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "expected"),
    [
        (300, 300, 300, 0.0, 4.60),
        (1000, 1000, 1000, 0.0, 5.81),
        (10_000, 10_000, 10_000, 0.0, 8.11),
        *[
            (1000, 1000, correct, DELTA, expected)
            for correct, expected in ((1000, 5.78), (900, 2.02), (750, 0.98), (600, 0.30))
        ],
        *[
            (5000, 500, correct, DELTA, expected)
            for correct, expected in ((500, 4.98), (450, 1.94), (375, 0.92), (300, 0.25))
        ],
    ],
)
def test_ceilings_and_figures_of_one_run(canaries, guesses, correct, delta, expected):
    found = _search_epsilon(canaries, guesses, correct, 0.05, delta)
    assert found == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "epsilon", "delta"),
    [(50, 20, 17, 0.7, 1e-3), (9, 9, 9, 0.0, 1e-4), (40, 30, 1, 2.0, 0.01)],
)
def test_the_chance_of_right_guesses_is_that_of_the_theorem(
    canaries, guesses, correct, epsilon, delta
):
    right = binom(guesses, 1 / (1 + math.exp(-epsilon)))
    rest = max(
        sum(right.pmf(correct - back) for back in range(1, i + 1)) / i
        for i in range(1, correct + 1)
    )
    expected = min(1, right.sf(correct - 1) + 2 * canaries * delta * rest)
    found = compute_guess_p_value(correct, guesses, canaries, epsilon, delta)
    assert found == pytest.approx(expected)


def respond_randomly(rng, delta=0.0):
    """200 coins and randomized responses of epsilon 1, each of which tells the truth for sure with probability delta."""
    coins = rng.random(200) < 0.5
    lies = rng.random(200) >= delta + (1 - delta) / (1 + math.exp(-1.0))
    return (coins ^ lies) + rng.random(200) / 2, coins  # the rest of the score is noise


@pytest.mark.parametrize(
    ("guesses", "delta"),
    [(80, 0.0), ((60, 20), 0.0), ([(20, 20), (40, 40), (80, 80)], 0.0), (80, 0.01)],
)
@repeat(500, 2000)
def test_one_run_of_randomized_response_is_not_accused(guesses, delta, times):
    rng = np.random.default_rng(13)
    accused = sum(
        audit_one_run(*respond_randomly(rng, delta), delta, guesses).epsilon > 1.0
        for _ in range(times)
    )
    assert accused <= max_failures(0.05, times)
    if guesses == 80 and not delta:
        # the binomial is exact here, so the bound is as sharp as it can be
        assert accused > times * 0.02


@repeat(100, 500)
def test_one_run_scanned_for_the_best_guesses_accuses(times):
    rng = np.random.default_rng(14)
    runs = [respond_randomly(rng) for _ in range(times)]
    pairs = [(guesses, guesses) for guesses in range(4, 81, 4)]
    naive = sum(max(audit_one_run(*run, 0, pair).epsilon for pair in pairs) > 1 for run in runs)
    fair = sum(audit_one_run(*run, 0, pairs).epsilon > 1 for run in runs)
    assert fair <= max_failures(0.05, times)
    assert naive > 2 * times * 0.05


def test_ties_do_not_tell_who_was_in():
    coins = np.arange(400) < 200
    found = [audit_one_run(np.zeros(400), coins, 0, 400, seed=seed) for seed in range(50)]
    assert sum(bound.epsilon > 0 for bound in found) <= max_failures(0.05, 50)
    assert audit_one_run(coins * 1.0, coins, 0, 400).epsilon == found[0].ceiling


@pytest.mark.parametrize("guesses", [0, 5, (-1, 3), [], [(2, 2), (3, 3)]])
def test_impossible_guesses_are_refused(guesses):
    with pytest.raises(SettingError, match="guesses"):
        audit_one_run(np.arange(4), np.arange(4) < 2, 0, guesses)
    with pytest.raises(DataError, match="included"):
        audit_one_run(np.arange(4), np.arange(4), 0, 2)


@pytest.mark.parametrize(("guesses", "correct"), [(300, 300), (300, 270), (1000, 750)])
def test_one_run_by_trade_off_curve_agrees_with_the_binomial_where_both_apply(guesses, correct):
    """The recursion for pure epsilon refutes nearly what the exact theorem does, and no more."""
    exact = _search_epsilon(guesses, guesses, correct, 0.05, 0.0)

    def is_refuted(epsilon):
        def trade_off(tpr):
            return np.maximum(tpr * np.exp(-epsilon), 1 - np.exp(epsilon) * (1 - tpr))

        return is_tradeoff_refuted(guesses, guesses, correct, trade_off, 0.05)

    assert is_refuted(0.9 * exact)
    assert not is_refuted(exact + 1e-3)


@repeat(100, 500)
def test_one_run_of_gaussians_is_not_accused(times):
    rng = np.random.default_rng(15)
    found = []
    for _ in range(times):
        coins = rng.random(400) < 0.5
        found.append(audit_one_run_gaussian(rng.normal(coins, 1), coins, DELTA, (40, 40)).mu)
    assert sum(mu > 1 for mu in found) <= max_failures(0.05, times)
    assert np.median(found) > 0.4


def test_the_gaussian_reading_of_one_run_is_tighter():
    rng = np.random.default_rng(16)
    coins = rng.random(4000) < 0.5
    scores = rng.normal(coins * 2.0, 1)
    plain = audit_one_run(scores, coins, DELTA, 400)
    gaussian = audit_one_run_gaussian(scores, coins, DELTA, 400)
    assert plain.epsilon < gaussian.epsilon < 9.997  # epsilon of mu 2
    assert plain.mu is None
    assert 1 < gaussian.mu < 2
    bounds = [_search_mu(100, 100, correct, 0.05) for correct in (50, 80, 90, 100)]
    assert bounds[0] == 0
    assert bounds == sorted(set(bounds))


# Settings and files


@pytest.mark.parametrize(
    ("delta", "confidence"),
    [(1.0, 0.95), (-0.1, 0.95), (math.nan, 0.95), (0.0, 1.0), (0.0, 0.0), (0.0, math.nan)],
)
def test_bad_settings_are_errors(delta, confidence):
    with pytest.raises(SettingError, match=r"delta|confidence"):
        audit_many_runs([1, 2], [0, 1], delta, confidence)
    with pytest.raises(SettingError, match=r"delta|confidence"):
        audit_one_run([1, 2], np.array([True, False]), delta, 2, confidence)


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": "1"},
        {"num_trials": 1.5},
        {"publishable": 1},
        {"ceiling": math.inf},
        {"more": 1},
        {"procedure": None},
    ],
)
def test_a_damaged_bound_is_refused(change):
    sound = {"epsilon": 1, "confidence": 0.95, "ceiling": 5.6, "procedure": "x", "num_trials": 10}
    assert EpsilonBound.from_json({**sound, "mu": None}).epsilon == 1.0
    with pytest.raises(ReleaseError, match="not a valid EpsilonBound"):
        EpsilonBound.from_json(sound | change)
