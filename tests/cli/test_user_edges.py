"""What a new user meets: nothing is lost, voided or promised without a word."""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from support.command_words import TINY_SET, format_settings

import privot as api
from privot.cli import main
from privot.cli.console import format_guarantee_lines
from privot.data import load_dataset
from privot.data.spec import Spec
from privot.data.tabular import read_table
from privot.errors import BudgetError, PrivotWarning, SettingError
from privot.privacy.guarantee import Guarantee
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import ledger_path
from privot.privacy.plan import Budget
from privot.progress import round_down, round_up
from privot.synthesis.preflight import plan_run

SMALL = {**TINY_SET, "num_random_nets": 2, "steps": 2}
SETS = format_settings(SMALL)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own(tmp_path):
    """A file of one's own: 40 images of two classes."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    np.savez(tmp_path / "own.npz", x=pixels, y=np.arange(40) % 2)
    return tmp_path / "own.npz"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The folder of a release of 20 digits."""
    root = tmp_path_factory.mktemp("set")
    ledger = root / "ledger.jsonl"
    api.synthesize("digits", budget=3.0, settings=SMALL, out=root / "made", ledger=ledger)
    return root / "made"


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """A release of a table: ages from 18 to 95, a balance that may be negative, three categories."""
    rng = np.random.default_rng(0)
    rows = np.c_[rng.uniform(18, 95, 500), rng.uniform(-2, 2, 500), rng.integers(0, 3, 500)]
    root = tmp_path_factory.mktemp("people")
    np.savez(root / "people.npz", x=rows)
    columns = (
        "--column 0=laplace:20:18:95 --column 1=laplace:9:-2:2 --column 2=randomized-response:5:3"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for words in (
            f"privatize people.npz {columns} --out sent.safetensors",
            "synthesize sent.safetensors --method entropic-gan --set steps=30 --out made",
        ):
            patch.setattr(sys, "argv", ["privot", *words.split()])
            main()
    return root / "made"


# Tables


def test_a_table_is_sampled_on_its_own_scale_with_its_types(privot, run_json, people):
    sample = f"sample {people} --count 200 --out"
    assert privot(sample, "a.npz")[:2] == (0, "200 rows of 3 columns in a.npz\n")
    names = [f"column_{number}" for number in range(3)]
    with np.load("a.npz") as arrays:
        columns = [arrays[name] for name in names]
        assert np.array_equal(arrays["x"], np.stack(columns, 1))
    assert [column.dtype for column in columns] == [np.float64, np.float64, np.int64]
    ages, balances, kinds = columns
    assert 18 <= ages.min() < ages.max() <= 95
    assert ages.max() - ages.min() > 10
    assert -2 <= balances.min() < 0 < balances.max() <= 2
    assert set(kinds.tolist()) == {0, 1, 2}
    facts = run_json(sample, "a.parquet")
    assert facts == {"out": "a.parquet", "count": 200, "columns": names}
    types = [str(field.type) for field in parquet.read_schema("a.parquet")]
    assert types == ["double", "double", "int64"]
    assert privot(sample, "a.csv")[0] == 0
    head, *lines = Path("a.csv").read_text().splitlines()
    assert (head, len(lines)) == (",".join(names), 200)
    assert all(line.split(",")[2] in ("0", "1", "2") for line in lines)
    by_parquet = [column.to_numpy() for column in parquet.read_table("a.parquet").columns]
    assert np.array_equal(np.stack(by_parquet, 1), np.stack(columns, 1))
    assert np.array_equal(np.loadtxt("a.csv", delimiter=",", skiprows=1), np.stack(columns, 1))
    assert read_table("a.csv").spec == read_table("a.npz").spec


def test_refuses_a_table_as_images_and_images_as_a_table(expect_refusal, people, digits, home):
    for out in ("a.png", "folder", "a.txt"):
        expect_refusal("is of a table", f"sample {people} --out {out}")
        assert not Path(out).exists()
    expect_refusal("samples can be written as", f"sample {digits} --out a.csv")


def test_the_report_of_a_table_speaks_of_a_table(privot, people):
    assert privot(f"report {people} --out report")[0] == 0
    page = Path("report/report.html").read_text()
    card = Path("report/README.md").read_text()
    assert "Synthetic rows of a table" in page
    assert ">column_2<" in page
    assert "labelled images" not in page + card
    assert '"tabular"' in card


def test_a_csv_without_names_loses_no_row(privot, expect_refusal, tmp_path):
    (tmp_path / "bare.csv").write_text("18,2\n19,1\n20,0\n")
    columns = "--column 0=laplace:5:18:95 --column 1=randomized-response:5:3"
    words = f"privatize bare.csv {columns} --out a.safetensors"
    expect_refusal("first line holds numbers", words)
    assert not list(Path().glob("*.safetensors"))
    assert not Path("home").exists()  # no ledger either
    code, out, _ = privot(words, "--no-header")
    assert (code, "3 records" in out) == (0, True)


# Budgets


def test_a_large_delta_needs_an_option(privot, expect_refusal, own):
    budget = "--epsilon 1 --delta 0.5"
    synthesize = f"synthesize {own} {budget} {SETS} --out made"
    plan = f"plan {own} --shape 1x8x8 --classes 2 {budget}"
    for words in (synthesize, plan):
        expect_refusal("--allow-large-delta", words)
    assert not Path("made").exists()
    for words in (synthesize, plan):
        assert privot(words, "--allow-large-delta")[0] == 0


def test_a_large_delta_in_python_needs_an_argument(home):
    plan_run(Spec((1, 8, 8), 2), api.make_method("merf"), Budget(1.0, 1e-3))
    for delta in (0.5, 1.1e-3):
        with pytest.raises(SettingError, match="allow_large_delta=True"):
            api.synthesize("digits", "private-set", Budget(1.0, delta), settings=SMALL)
    assert not (home / "home").exists()
    made = api.synthesize(
        "digits", budget=Budget(1.0, 0.01), settings=SMALL, allow_large_delta=True
    )
    assert made.guarantee.delta == 0.01


@pytest.mark.parametrize(
    ("method", "size", "budget"),
    [
        (api.make_method("merf"), "size", Budget(1.0, 2e-3)),
        (  # 300 owners, each with all that it holds: as the README shows it
            api.make_method("federated-gs-wgan", {"noise_multiplier": 5.0, "rounds": 2}),
            "num_clients",
            Budget(math.inf, 2e-3),
        ),
    ],
)
def test_delta_is_compared_with_one_over_a_declared_number(method, size, budget):
    def plan(count, **more):
        return plan_run(Spec((1, 8, 8), 2, **{size: count}), method, budget, **more)

    assert plan(400)["guarantee"]["delta"] == 2e-3
    with pytest.raises(SettingError, match="1/600"):
        plan(600)
    warnings = plan(600, allow_large_delta=True)["warnings"]
    assert sum("delta" in warning for warning in warnings) == 1


def test_owners_are_a_lower_bound_of_the_size():
    spec = Spec((1, 8, 8), 2, num_clients=2000)
    for delta, warned in ((1e-3, True), (1e-4, False)):
        facts = plan_run(spec, api.make_method("merf"), Budget(1.0, delta))
        assert ("at least as many records as clients" in " ".join(facts["warnings"])) is warned


@pytest.mark.parametrize(("epsilon", "warned"), [(10, False), (11, True), (1000, True)])
def test_a_large_epsilon_is_a_caution_in_plain_words(privot, epsilon, warned):
    code, _, err = privot(f"plan digits --epsilon {epsilon}")
    assert (code, "is a weak guarantee" in err) == (0, warned)
    if warned:
        power = float(re.search(r"may identify ([\d.]+) % of the", err)[1])
        plan = api.make_method("private-set").plan(load_dataset("digits").spec)
        claim = Guarantee.from_plan(plan.calibrate(Budget(epsilon)), 1e-5)
        assert 100 * claim.max_tpr["0.01"] - 1e-6 <= power <= 100


def test_a_large_epsilon_of_a_channel_is_a_caution(privot):
    code, _, err = privot("privatize digits --epsilon 50 --out a.safetensors")
    assert (code, "is a weak guarantee" in err) == (0, True)


# Python


def test_cautions_reach_python(home):
    words = {"budget": 100.0, "settings": SMALL, "ledger": home / "ledger.jsonl"}
    with pytest.warns(PrivotWarning, match="is a weak guarantee") as caught:
        api.synthesize("digits", **words)
    # of the line that called
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}
    warnings = []
    api.synthesize("digits", **words, on_warning=warnings.append)
    assert any("is a weak guarantee" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("real-subset", {"images_per_class": 1}),
        ("merf", {"noise_multiplier": 0.0, "num_features": 50, "steps": 2}),
    ],
)
def test_a_ledger_is_not_set_to_infinity_without_an_explicit_budget(
    privot, expect_refusal, home, method, settings
):
    def synthesize(*budget, **more):
        return api.synthesize("digits", method, *budget, settings=settings, **more)

    reason = "no guarantee and would set the ledger of digits to infinite for good"
    with pytest.raises(SettingError, match=reason) as refused:
        synthesize()
    assert "--epsilon inf (budget=math.inf)" in str(refused.value)
    with pytest.raises(SettingError, match="for good"):
        synthesize(ledger=ledger_path("digits"))
    words = f"synthesize digits --method {method} {format_settings(settings)}"
    expect_refusal("for good", words, "--out one")
    assert not (home / "home").exists()
    assert privot(words, "--ledger command.jsonl --out one")[0] == 0
    trial = synthesize(ledger=home / "trial.jsonl")
    assert math.isinf(float(trial.metadata["ledger"]["spent_epsilon"]))
    assert Ledger(ledger_path("digits")).entries() == []
    synthesize(math.inf)
    assert math.isinf(Ledger(ledger_path("digits")).compute_spent_cost().epsilon(1e-5))


# Refused runs


def test_a_refused_run_leaves_nothing_and_the_next_one_goes_on(privot, people):
    """Of records that were privatized nothing is charged, so a refused run leaves nothing."""
    sent = people.with_name("sent.safetensors")
    words = f"synthesize {sent} --method entropic-gan --out deep/er/out"
    for _ in range(2):
        code, _, err = privot(words, "--set generator=conv")
        assert (code, "generator=records" in err) == (2, True)
        assert not Path("deep").exists()
    assert privot(words, "--set steps=2")[0] == 0


@pytest.mark.parametrize(
    "error",
    [SettingError("no"), BudgetError("no"), MemoryError(), OSError(28, "No space left on device")],
)
def test_a_run_that_is_refused_before_it_is_charged_leaves_nothing(home, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("privot.methods.private_set.PrivateSet.fit", fail)
    words = {"budget": 1.0, "settings": SMALL, "out": "a/b/out", "ledger": home / "ledger.jsonl"}
    for _ in range(2):  # the second is not refused for an unfinished run
        with pytest.raises(type(error)):
            api.synthesize("digits", **words)
        assert not (home / "a").exists()
    assert Ledger(home / "ledger.jsonl").entries() == []


def test_a_run_past_the_limit_leaves_nothing(privot, own):
    assert privot(f"ledger {own} --limit 1")[0] == 0
    for epsilon in ("5", "inf"):
        for method in (SETS, "--method real-subset --set images_per_class=1"):
            code, _, err = privot(f"synthesize {own} --epsilon {epsilon} --out deep/out", method)
            assert (code, Path("deep").exists(), "unfinished" in err) == (2, False, False), err


def test_a_simulation_whose_terms_are_refused_leaves_nothing(privot, monkeypatch):
    from privot.federated.flower import simulation
    from privot.federated.flower.server_app import NoConsentError

    def refuse(*_, **__):
        raise NoConsentError("No client agreed to the terms.")

    monkeypatch.setattr(simulation, "simulate_federation", refuse)
    federation = "federate simulate --data digits --clients 3 --rounds 2"
    for _ in range(2):
        code, _, err = privot(federation, "--set noise_multiplier=8 --out made")
        assert (code, "No client agreed" in err) == (2, True), err
        assert not Path("made.run").exists()


# Reports, samples and figures


@pytest.mark.parametrize(
    ("method", "settings", "lead", "tags"),
    [
        (
            "real-subset",
            {},
            "Real records, unprotected",
            '["real-records", "images", "no-privacy-guarantee"]',
        ),
        (
            "kernel-points",
            {"steps": 2, "batch_size": 8, "net_width": 4, "num_networks": 2},
            "Synthetic labelled images with no privacy guarantee",
            '["synthetic", "images", "no-privacy-guarantee"]',
        ),
    ],
)
def test_the_report_says_what_is_released_without_protection(
    privot, home, method, settings, lead, tags
):
    settings = {"images_per_class": 1, **settings}
    api.synthesize("digits", method, settings=settings, out="made", ledger=home / "ledger.jsonl")
    assert privot("report made --out report")[0] == 0
    names = ("report.html", "README.md", "registry.yaml")
    page, card, record = (Path("report", name).read_text() for name in names)
    assert f'class="lead">{lead}' in page
    assert f"tags: {tags}" in card
    assert lead in card
    assert f'description: "{lead}' in record
    if method == "real-subset":
        assert "synthetic" not in (page + card + record).lower().replace("synthetic data</a>", "")


def test_the_report_shows_the_noise_that_ran(privot, digits):
    assert privot(f"report {digits} --out report")[0] == 0
    settings = json.loads(Path("report/report.json").read_text())["method"]["settings"]
    noise = settings["noise_multiplier"]
    assert noise.startswith("derived from the budget: means ")
    for stage in api.Release.load(digits).metadata["plan"]["stages"]:
        shown = float(re.search(rf"{stage['name']} ([\d.]+)", noise)[1])
        assert stage["noise_multiplier"] * (1 - 1e-3) < shown <= stage["noise_multiplier"]


def test_a_sample_of_a_set_says_how_many_images_there_are(privot, run_json, digits):
    code, out, _ = privot(f"sample {digits} --count 100 --out a.npz")
    assert (code, out.count("\n")) == (0, 1)
    assert "100 images in a.npz: 20 of the 20 images of the set, with repetitions" in out
    assert run_json(f"sample {digits} --count 100 --out b.npz") == {
        "out": "b.npz",
        "count": 100,
        "distinct": 20,
        "images_in_set": 20,
        "repeated": True,
    }
    with np.load("a.npz") as arrays:
        assert len(np.unique(arrays["x"].reshape(100, -1), axis=0)) == 20
    _, out, _ = privot(f"sample {digits} --count 10 --out c.npz")
    assert "10 of the 20 images of the set, each once" in out


def test_bounds_are_never_rounded_the_wrong_way():
    rng = np.random.default_rng(0)
    for value in (10 ** rng.uniform(-6, 4, 2000)).tolist():
        for digits in (3, 4, 6):
            up = float(round_up(value, digits))
            down = float(round_down(value, digits))
            assert down * (1 - 2e-9) <= value <= up * (1 + 2e-9)
            assert up - down <= value * 10.0 ** (1 - digits) * (1 + 1e-6)
    assert (round_up(0.37225, 3), round_down(0.37279, 3)) == ("0.373", "0.372")
    assert (round_up(5.0), round_up(1e-5)) == ("5", "1e-05")


def test_certified_attack_power_is_rounded_up_on_the_command_line(privot, digits):
    claim = {
        "epsilon": 0.99961,
        "delta": 1.23456e-5,
        "neighbours": "replace",
        "accountant": "x",
        "unit": "one record",
        "max_tpr": {"0.01": 0.37225},
    }
    text = "\n".join(format_guarantee_lines(claim))
    assert "epsilon 0.9997, delta 1.235e-05" in text
    assert "0.373 at 0.01" in text
    _, out, _ = privot("verify", digits)
    for rate, power in api.Release.load(digits).guarantee.max_tpr.items():
        assert float(re.search(rf"([\d.]+) at {re.escape(rate)}\b", out)[1]) >= power
