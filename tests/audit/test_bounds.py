"""The statistics of an audit: figures known by hand, bounds that fail no more often than they say, and scans that fail more often."""

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


def may_fail(error, times):
    """The most failures among so many that a rate of ``error`` explains, but for once in a thousand."""
    return binom.ppf(0.999, times, error)


def laplace(rng, epsilon, size):
    """Scores of a mechanism that is exactly epsilon-private, the tails of which have the ratio e^epsilon at every threshold."""
    return 1 + rng.laplace(0, 1 / epsilon, size), rng.laplace(0, 1 / epsilon, size)


# The curve and its area


def test_the_area_counts_ties_half():
    rng = np.random.default_rng(0)
    for high in (2, 5, 1000):
        members = rng.integers(0, high, 90) + 1
        others = rng.integers(0, high, 70)
        wins = (members[:, None] > others).mean() + (members[:, None] == others).mean() / 2
        labels = np.repeat([1, 0], [90, 70])
        assert compute_roc(members, others).auc == pytest.approx(wins, abs=1e-12)
        assert compute_roc(members, others).auc == pytest.approx(
            roc_auc_score(labels, np.concatenate([members, others])), abs=1e-12
        )
    assert compute_roc([1.0] * 9, [1.0] * 4).auc == 0.5
    assert compute_roc([math.inf, 1], [-math.inf, 0]).auc == 1


def test_the_curve_is_that_of_its_thresholds():
    rng = np.random.default_rng(1)
    members = rng.normal(1, 1, 300).round(1)
    others = rng.normal(0, 1, 400).round(1)
    curve = compute_roc(members, others)
    assert (curve.fpr[0], curve.tpr[0], curve.fpr[-1], curve.tpr[-1]) == (0, 0, 1, 1)
    points = {
        ((others > level).mean(), (members > level).mean())
        for level in np.concatenate([members, others])
    } | {(1.0, 1.0)}
    assert set(zip(curve.fpr, curve.tpr, strict=True)) == points
    assert curve.measured_tpr_at([0.01, 1.0]).tolist() == [
        (members > np.sort(others)[-5]).mean(),
        1.0,
    ]
    levels, power = curve.sample_log_spaced(50)
    assert len(levels) == 50
    assert (np.diff(power) >= 0).all()


@pytest.mark.parametrize(
    ("members", "others"), [([], [1.0]), ([1.0], []), ([[1.0]], [1.0]), ([math.nan], [1.0])]
)
def test_scores_that_mean_nothing_are_refused(members, others):
    for measure in (
        compute_roc,
        estimate_tpr_at_fpr,
        estimate_advantage,
        functools.partial(audit_many_runs, delta=0),
    ):
        with pytest.raises(DataError):
            measure(members, others)


def test_the_best_threshold_flatters_and_the_split_does_not():
    rng = np.random.default_rng(2)
    draws = rng.normal(size=(400, 2, 100))
    honest = [estimate_advantage(*each, seed=turn) for turn, each in enumerate(draws)]
    values = np.array([each.value for each in honest])
    assert abs(values.mean()) < 3 * values.std() / 20
    assert np.mean([compute_roc(*each).max_advantage() for each in draws]) > 0.06
    assert np.mean([each.standard_error for each in honest]) == pytest.approx(
        values.std(), rel=0.15
    )
    assert honest[0] == estimate_advantage(*draws[0], seed=0)


def test_the_advantage_of_a_known_law():
    rng = np.random.default_rng(3)
    found = estimate_advantage(rng.normal(1, 1, 20_000), rng.normal(0, 1, 20_000))
    assert found.value == pytest.approx(2 * norm.cdf(0.5) - 1, abs=3 * found.standard_error)
    assert found.num_candidates == 20_000
    assert not found.publishable


def test_the_mean_area_over_models_is_covered():
    """Candidates of a model share its luck, so an interval over candidates would be far too short."""
    rng = np.random.default_rng(4)
    covered = []
    for turn in range(300):
        luck = rng.normal(0, 0.3, 10)
        found = bootstrap_mean_auc(
            [(rng.normal(each, 1, 80), rng.normal(0, 1, 80)) for each in luck],
            seed=turn,
            num_resamples=1000,
        )
        covered.append(found.low <= 0.5 <= found.high)
    assert 300 - sum(covered) <= may_fail(0.065, 300)
    with pytest.raises(DataError, match="two"):
        bootstrap_mean_auc([([1], [0])])


# Rates


def test_clopper_pearson_inverts_the_binomial():
    for hits, trials, error in (
        (3, 20, 0.05),
        (10, 100, 0.025),
        (999, 1000, 1e-3),
        (7, 100_000, 1e-6),
    ):
        assert binom.sf(
            hits - 1, trials, float(clopper_pearson_lower(hits, trials, error))
        ) == pytest.approx(error, rel=1e-6)
        assert binom.cdf(
            hits, trials, float(clopper_pearson_upper(hits, trials, error))
        ) == pytest.approx(error, rel=1e-6)
    assert clopper_pearson_lower([0, 10], 10, 0.05).tolist() == pytest.approx([0, 0.05**0.1])
    assert clopper_pearson_upper([0, 10], 10, 0.05).tolist() == pytest.approx([1 - 0.05**0.1, 1])


def test_rates_at_fixed_levels():
    found = estimate_tpr_at_fpr(np.arange(5000) + 3000, np.arange(5000))
    assert [each.num_false_positives for each in found.points] == [0, 5, 50]
    assert [each.tpr for each in found.points] == [0.6, 0.601, 0.61]
    assert [each.has_few_false_positives for each in found.points] == [True, True, False]
    assert all(
        each.tpr_lower_bound < each.tpr < each.tpr_upper_bound and each.fpr < each.fpr_upper_bound
        for each in found.points
    )
    tied = estimate_tpr_at_fpr(np.ones(100), np.ones(100), fprs=(0.29,)).points[0]
    assert (tied.num_false_positives, tied.tpr) == (
        0,
        0,
    )  # ties cannot be cut, so nobody is flagged


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("digits", [9, 0])  # digits 0: hundreds of ties
def test_all_bounds_of_all_points_hold_together(digits, certain):
    rng = np.random.default_rng(5)
    fails = 0
    passed = 0
    for _ in range(600):
        members = rng.normal(1, 1, 400).round(digits)
        others = rng.normal(0, 1, 400).round(digits)
        found = estimate_tpr_at_fpr(
            members, others, fprs=(0.01, 0.05, 0.3), certify_fpr=certain, confidence=0.9
        )
        for each in found.points:
            allowed = int(each.target_fpr * 400 + 1e-9)
            if certain:
                assert each.fpr_upper_bound <= each.target_fpr
                allowed = max(
                    k
                    for k in range(-1, allowed + 1)
                    if k < 0 or clopper_pearson_upper(k, 400, 0.1 / 9) <= each.target_fpr
                )
            threshold = (
                np.sort(others)[-1 - allowed] + (0.5 if digits == 0 else 0)
                if allowed >= 0
                else math.inf
            )
            truth = norm.sf(threshold - 1)
            passed += norm.sf(threshold) > each.fpr_upper_bound
            fails += (
                norm.sf(threshold) > each.fpr_upper_bound
                or not each.tpr_lower_bound <= truth <= each.tpr_upper_bound
            )
    assert fails <= may_fail(0.1, 600)
    if digits == 9 and not certain:
        assert (
            passed >= 1800 * 0.1 / 9 / 2
        )  # the bound of the FPR is exact here, not merely safe: about 20 of 1800


def test_rates_become_an_attack_that_the_report_can_hold_against_a_certificate():
    rng = np.random.default_rng(6)
    members = rng.normal(1, 1, 20_000)
    others = rng.normal(0, 1, 20_000)
    attack = estimate_tpr_at_fpr(members, others).to_attack_result("lira")
    assert attack.exceeds_bound(lambda fpr: float(norm.cdf(norm.ppf(fpr) + 1))) == (
        False,
        False,
        False,
    )
    assert attack.exceeds_bound(lambda fpr: fpr) == (True, True, True)
    assert (attack.confidence, attack.publishable) == (0.95, False)
    for certain in (False, True):  # so few that nothing can be said, which is no reason to fail
        assert (
            estimate_tpr_at_fpr([1.0], [0.0], certify_fpr=certain)
            .to_attack_result("a")
            .exceeds_bound(lambda fpr: fpr)
            == (False,) * 3
        )


# Many runs


def test_ceilings_of_many_runs():
    """Of a perfect attack at 95 %, threshold known: the figures of the literature and, at half of the runs, of a chosen threshold."""
    for count, ceiling in (
        (100, 3.28),
        (256, 4.23),
        (500, 4.91),
        (1000, 5.60),
        (10_000, 7.90),
        (100_000, 10.21),
    ):
        found = audit_many_runs(np.ones(count), np.zeros(count), 0, threshold=0.5)
        assert found.epsilon == found.ceiling == pytest.approx(ceiling, abs=0.006)
        split = audit_many_runs(np.ones(2 * count), np.zeros(2 * count), 0)
        assert split.epsilon == split.ceiling == found.ceiling
        assert split.num_trials == count
    blind = audit_many_runs(np.zeros(1000), np.zeros(1000), 0, threshold=0.5)
    assert (blind.epsilon, blind.ceiling) == (0, pytest.approx(5.60, abs=0.006))


def test_both_directions_count():
    """A rare sure sign of absence proves as much as one of presence."""
    rare = (np.arange(1000) < 300) * 1.0
    common = np.zeros(1000)
    assert audit_many_runs(rare, common, 0, threshold=0.5).epsilon == pytest.approx(
        audit_many_runs(-common, -rare, 0, threshold=-0.5).epsilon
    )
    assert audit_many_runs(rare, common, 0, threshold=0.5).epsilon > 4


@pytest.mark.parametrize("threshold", [0.5, None])
def test_a_null_attack_proves_nothing(threshold):
    rng = np.random.default_rng(7)
    found = [
        audit_many_runs(*rng.normal(0.5, 1, (2, 120)), 0, threshold=threshold, seed=turn).epsilon
        for turn in range(1000)
    ]
    assert sum(each > 0 for each in found) <= may_fail(0.05, 1000)


def scanned(inside, outside):
    """What must not be done: the best of all thresholds, as if there had been one."""
    levels = np.sort(np.concatenate([inside, outside]))
    hits = count_above(inside, levels)
    alarms = count_above(outside, levels)
    return float(compute_refuted_epsilon(hits, alarms, len(inside), len(outside), 0, 0.05).max())


@pytest.mark.parametrize("count", [100, 1000])
def test_randomised_response_is_not_accused(count):
    """Exactly epsilon-private, so the claim is passed in at most 5 of 100 audits; by table, since only the counts matter."""
    rng = np.random.default_rng(8)
    epsilon = 1.0
    honest = 1 / (1 + math.exp(-epsilon))
    hits = rng.binomial(count, honest, 2000)
    alarms = rng.binomial(count, 1 - honest, 2000)
    found = np.maximum(compute_refuted_epsilon(hits, alarms, count, count, 0, 0.05), 0)
    one = audit_many_runs(
        np.arange(count) < hits[0], np.arange(count) < alarms[0], 0, threshold=0.5
    )
    assert one.epsilon == pytest.approx(found[0])
    assert (found > epsilon).sum() <= 2000 * 0.05
    assert np.median(found) > (0.3 if count == 100 else 0.75)  # nor is the bound idle


def test_a_threshold_chosen_on_other_runs_does_not_accuse_but_a_scan_does():
    rng = np.random.default_rng(9)
    epsilon = 3.0
    draws = [laplace(rng, epsilon, 1000) for _ in range(600)]
    found = np.array(
        [audit_many_runs(*each, 0, seed=turn).epsilon for turn, each in enumerate(draws)]
    )
    assert (found > epsilon).sum() <= 600 * 0.05
    assert np.median(found) > 1.9
    assert sum(scanned(*each) > epsilon for each in draws) > may_fail(
        0.05, 600
    )  # about 70 where 30 are allowed


def test_delta_is_taken_off():
    """A mechanism that tells all once in twenty times and nothing else is (0, 1/20)-private."""
    rng = np.random.default_rng(10)
    told = [(rng.random(2000) < 0.05) * 1.0 for _ in range(300)]
    assert sum(
        audit_many_runs(each, np.zeros(2000), 0.05, threshold=0.5).epsilon > 0 for each in told
    ) <= may_fail(0.05, 300)
    assert all(
        audit_many_runs(each, np.zeros(2000), 0.0, threshold=0.5).epsilon > 2 for each in told
    )


# The Gaussian mechanism: what audits prove of claims 1, 4 and 10 at delta 1e-5


@functools.cache
def mu_of(epsilon):
    return 1 / dpa.get_sigma_gaussian(epsilon, DELTA)


def proved(epsilon, trials, error, seeds, noise=1.0):
    """Bounds by the best threshold that the claim knows of, mu/2, fixed beforehand; read as Gaussian."""
    rng = np.random.default_rng(11)
    mu = mu_of(epsilon)
    draws = (rng.normal([[mu / noise], [0.0]], 1, (2, trials)) for _ in range(seeds))
    return np.array(
        [
            audit_many_runs(
                *each, DELTA, 1 - error, threshold=mu / noise / 2, assume_gaussian=True
            ).epsilon
            for each in draws
        ]
    )


TABLE = {(1000, 1e-3): (0.00, 2.69, 8.12), (10_000, 1e-3): (0.67, 3.58, 9.39)}
LONG = {(100_000, 1e-6): (0.84, 3.80, 9.71), (1_000_000, 1e-6): (0.95, 3.94, 9.91)}


@pytest.mark.parametrize(("trials", "error"), TABLE)
def test_the_gaussian_mechanism_is_seen_as_tightly_as_the_table_says(trials, error):
    for epsilon, typical in zip((1, 4, 10), TABLE[trials, error], strict=True):
        found = proved(epsilon, trials, error, 41)
        assert np.median(found) == pytest.approx(typical, abs=0.25)
        assert (found <= epsilon).all()


@pytest.mark.slow
@pytest.mark.parametrize(("trials", "error"), LONG)
def test_the_gaussian_mechanism_with_many_trials(trials, error, trust):
    for epsilon, typical in zip((1, 4, 10), LONG[trials, error], strict=True):
        found = proved(epsilon, trials, error, 21)
        assert np.median(found) == pytest.approx(typical, abs=0.03)
        assert (found <= epsilon).all()
        told = f"{np.median(found):.2f} of {epsilon} by {trials:,} a side"
        trust(
            "G6",
            "audits of a Gaussian answer under its claim",
            len(found),
            of=len(found),
            note=told,
        )


def test_a_gaussian_claim_is_passed_no_more_often_than_stated():
    for epsilon in (1, 4, 10):
        assert (proved(epsilon, 400, 0.05, 600) > epsilon).sum() <= may_fail(0.05, 600)


@pytest.mark.parametrize(("epsilon", "noise"), [(1, 0.45), (4, 0.72), (10, 0.82)])
def test_too_little_noise_is_flagged(epsilon, noise):
    """A little less than what the table says is still caught by 1,000 trials a side: 0.50, 0.77, 0.86."""
    assert np.median(proved(epsilon, 1000, 1e-3, 21, noise)) > epsilon


def test_without_the_gaussian_reading_the_table_is_out_of_reach():
    """1,000 trials cannot prove 8.12 of just any mechanism: their ceiling is 5.6."""
    mu = mu_of(10)
    draws = np.random.default_rng(12).normal([[mu], [0.0]], 1, (2, 1000))
    plain = audit_many_runs(*draws, DELTA, 1 - 1e-3, threshold=mu * 0.9)
    assert 1.5 < plain.epsilon < plain.ceiling < 5.6
    assert plain.mu is None
    assert "not valid for others" in audit_many_runs(*draws, DELTA, assume_gaussian=True).procedure
    with pytest.raises(SettingError, match="delta"):
        audit_many_runs(*draws, 0, assume_gaussian=True)


# One run


def test_ceilings_and_figures_of_one_run():
    for guesses, ceiling in ((300, 4.60), (1000, 5.81), (10_000, 8.11)):
        assert _search_epsilon(guesses, guesses, guesses, 0.05, 0.0) == pytest.approx(
            ceiling, abs=0.006
        )
    shares = (1, 0.9, 0.75, 0.6)
    assert [
        _search_epsilon(1000, 1000, round(1000 * each), 0.05, DELTA) for each in shares
    ] == pytest.approx([5.78, 2.02, 0.98, 0.30], abs=0.006)
    assert [
        _search_epsilon(5000, 500, round(500 * each), 0.05, DELTA) for each in shares
    ] == pytest.approx([4.98, 1.94, 0.92, 0.25], abs=0.006)


def test_the_chance_of_right_guesses_is_that_of_the_theorem():
    for canaries, guesses, correct, epsilon, delta in (
        (50, 20, 17, 0.7, 1e-3),
        (9, 9, 9, 0.0, 1e-4),
        (40, 30, 1, 2.0, 0.01),
    ):
        right = binom(guesses, 1 / (1 + math.exp(-epsilon)))
        rest = max(
            sum(right.pmf(correct - back) for back in range(1, i + 1)) / i
            for i in range(1, correct + 1)
        )
        wanted = min(1, right.sf(correct - 1) + 2 * canaries * delta * rest)
        assert compute_guess_p_value(correct, guesses, canaries, epsilon, delta) == pytest.approx(
            wanted
        )


def answered(rng, epsilon, delta=0.0, canaries=200):
    """Coins and independent randomised responses, each of which tells the truth for sure with probability delta."""
    coins = rng.random(canaries) < 0.5
    lies = rng.random(canaries) >= delta + (1 - delta) / (1 + math.exp(-epsilon))
    return (coins ^ lies) + rng.random(canaries) / 2, coins  # the rest of the score is noise


PAIRS = [(20, 20), (40, 40), (80, 80)]


@pytest.mark.parametrize(
    ("guesses", "delta"), [(80, 0.0), ((60, 20), 0.0), (PAIRS, 0.0), (80, 0.01)]
)
def test_one_run_of_randomised_response_is_not_accused(guesses, delta):
    rng = np.random.default_rng(13)
    epsilon = 1.0
    found = np.array(
        [audit_one_run(*answered(rng, epsilon, delta), delta, guesses).epsilon for _ in range(2000)]
    )
    assert (found > epsilon).sum() <= may_fail(0.05, 2000)
    if guesses == 80 and not delta:
        assert (
            found > epsilon
        ).sum() > 2000 * 0.02  # the binomial is exact here, so the bound is as sharp as it can be


def test_one_run_scanned_for_the_best_guesses_accuses():
    rng = np.random.default_rng(14)
    epsilon = 1.0
    draws = [answered(rng, epsilon) for _ in range(500)]
    pairs = [(guesses, guesses) for guesses in range(4, 81, 4)]
    naive = sum(
        max(audit_one_run(*each, 0, pair).epsilon for pair in pairs) > epsilon for each in draws
    )
    fair = sum(audit_one_run(*each, 0, pairs).epsilon > epsilon for each in draws)
    assert fair <= may_fail(0.05, 500)
    assert naive > 2 * 500 * 0.05


def test_ties_do_not_tell_who_was_in():
    coins = np.arange(400) < 200
    found = [audit_one_run(np.zeros(400), coins, 0, 400, seed=seed) for seed in range(50)]
    assert sum(each.epsilon > 0 for each in found) <= may_fail(0.05, 50)
    assert audit_one_run(coins * 1.0, coins, 0, 400).epsilon == found[0].ceiling


@pytest.mark.parametrize("guesses", [0, 5, (-1, 3), [], [(2, 2), (3, 3)]])
def test_impossible_guesses_are_refused(guesses):
    with pytest.raises(SettingError, match="guesses"):
        audit_one_run(np.arange(4), np.arange(4) < 2, 0, guesses)
    with pytest.raises(DataError, match="included"):
        audit_one_run(np.arange(4), np.arange(4), 0, 2)


def test_one_run_by_trade_off_curve_agrees_with_the_binomial_where_both_apply():
    """The recursion for pure epsilon refutes nearly what the exact theorem does, and no more."""

    def private(epsilon):
        return lambda tpr: np.maximum(tpr * np.exp(-epsilon), 1 - np.exp(epsilon) * (1 - tpr))

    for guesses, correct in ((300, 300), (300, 270), (1000, 750)):
        exact = _search_epsilon(guesses, guesses, correct, 0.05, 0.0)
        assert is_tradeoff_refuted(guesses, guesses, correct, private(0.9 * exact), 0.05)
        assert not is_tradeoff_refuted(guesses, guesses, correct, private(exact + 1e-3), 0.05)


def test_one_run_of_gaussians_is_not_accused():
    rng = np.random.default_rng(15)
    mu = 1.0
    found = []
    for _ in range(500):
        coins = rng.random(400) < 0.5
        found.append(audit_one_run_gaussian(rng.normal(coins * mu, 1), coins, DELTA, (40, 40)).mu)
    assert sum(each > mu for each in found) <= may_fail(0.05, 500)
    assert np.median(found) > 0.4


def test_the_gaussian_reading_of_one_run_is_tighter():
    rng = np.random.default_rng(16)
    mu = 2.0
    coins = rng.random(4000) < 0.5
    scores = rng.normal(coins * mu, 1)
    plain = audit_one_run(scores, coins, DELTA, 400)
    read = audit_one_run_gaussian(scores, coins, DELTA, 400)
    assert plain.epsilon < read.epsilon < 9.997  # epsilon of mu 2
    assert plain.mu is None
    assert 1 < read.mu < mu
    assert _search_mu(100, 100, 50, 0.05) == 0
    for low, high in ((80, 90), (90, 100)):
        assert _search_mu(100, 100, low, 0.05) < _search_mu(100, 100, high, 0.05)


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
    sound = {
        "epsilon": 1,
        "confidence": 0.95,
        "ceiling": 5.6,
        "procedure": "x",
        "num_trials": 10,
        "mu": None,
    }
    assert EpsilonBound.from_json(sound).epsilon == 1.0
    with pytest.raises(ReleaseError, match="not a valid EpsilonBound"):
        EpsilonBound.from_json(sound | change)
