"""What a new user meets: nothing is lost, voided or promised without a word."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

import privot as api
from privot.cli.console import format_guarantee_lines
from privot.data import load_dataset
from privot.data.spec import Spec
from privot.data.tabular import read_table
from privot.errors import BudgetError, PrivotError, PrivotWarning, SettingError
from privot.privacy.guarantee import Guarantee
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import ledger_path
from privot.privacy.plan import Budget
from privot.progress import round_down, round_up
from privot.synthesis.preflight import plan_run

QUICK = tuple(
    word
    for each in (
        "images_per_class=2",
        "num_random_nets=2",
        "nets_per_round=2",
        "net_width=4",
        "steps=2",
        "net_train_epochs=1",
    )
    for word in ("--set", each)
)
SMALL = {
    "images_per_class": 2,
    "num_random_nets": 2,
    "nets_per_round": 2,
    "net_width": 4,
    "steps": 2,
    "net_train_epochs": 1,
}


@pytest.fixture
def said(privot):
    """The one JSON value that `privot WORDS --json` prints."""

    def run(*words):
        code, out, err = privot(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def own(tmp_path):
    """A file of one's own: 40 images of two classes."""
    np.savez(
        tmp_path / "own.npz",
        x=np.random.default_rng(0).integers(0, 256, (40, 8, 8)).astype(np.uint8),
        y=np.arange(40) % 2,
    )
    return tmp_path / "own.npz"


# Tables


@pytest.fixture
def people(privot, tmp_path):
    """A release of a table: ages from 18 to 95, a balance that may be negative, one of three categories."""
    rng = np.random.default_rng(0)
    rows = np.c_[rng.uniform(18, 95, 500), rng.uniform(-2, 2, 500), rng.integers(0, 3, 500)]
    np.savez(tmp_path / "people.npz", x=rows)
    columns = ("0=laplace:20:18:95", "1=laplace:9:-2:2", "2=randomized-response:5:3")
    words = [word for each in columns for word in ("--column", each)]
    assert privot("privatize", "people.npz", *words, "--out", "sent.safetensors")[0] == 0
    assert (
        privot(
            "synthesize",
            "sent.safetensors",
            "--method",
            "entropic-gan",
            "--set",
            "steps=30",
            "--out",
            "made",
        )[0]
        == 0
    )
    return tmp_path / "made"


def test_a_table_is_sampled_on_its_own_scale_with_its_types(privot, said, people):
    code, out, _ = privot("sample", people, "--count", 200, "--out", "a.npz")
    assert (code, out) == (0, "200 rows of 3 columns in a.npz\n")
    with np.load("a.npz") as found:
        columns = [found[f"column_{place}"] for place in range(3)]
        assert np.array_equal(found["x"], np.stack(columns, 1))
    assert [each.dtype for each in columns] == [np.float64, np.float64, np.int64]
    ages, balances, kinds = columns
    assert 18 <= ages.min() < ages.max() <= 95
    assert ages.max() - ages.min() > 10
    assert -2 <= balances.min() < 0 < balances.max() <= 2
    assert set(kinds.tolist()) == {0, 1, 2}
    facts = said("sample", people, "--count", 200, "--out", "a.parquet")
    assert facts == {
        "out": "a.parquet",
        "count": 200,
        "columns": ["column_0", "column_1", "column_2"],
    }
    assert [str(each.type) for each in parquet.read_schema("a.parquet")] == [
        "double",
        "double",
        "int64",
    ]
    assert privot("sample", people, "--count", 200, "--out", "a.csv")[0] == 0
    text = Path("a.csv").read_text().splitlines()
    assert (text[0], len(text)) == ("column_0,column_1,column_2", 201)
    assert all(line.split(",")[2] in ("0", "1", "2") for line in text[1:])
    by_csv = np.loadtxt("a.csv", delimiter=",", skiprows=1)
    by_parquet = np.stack([each.to_numpy() for each in parquet.read_table("a.parquet").columns], 1)
    for other in (by_csv, by_parquet):
        assert np.array_equal(other, np.stack(columns, 1))
    assert read_table("a.csv").spec == read_table("a.npz").spec


@pytest.mark.parametrize("out", ["a.png", "folder", "a.txt"])
def test_a_table_is_no_picture(privot, people, out):
    code, said_out, err = privot("sample", people, "--out", out)
    assert (code, said_out, err.count("\n")) == (2, "", 1)
    assert "is of a table" in err
    assert not Path(out).exists()


def test_images_are_no_csv(privot, home):
    api.synthesize("digits", budget=5.0, settings=SMALL, out="made", ledger="book.jsonl")
    code, _, err = privot("sample", "made", "--out", "a.csv")
    assert (code, "samples can be written as" in err) == (2, True)


def test_the_report_of_a_table_speaks_of_a_table(privot, people):
    assert privot("report", people, "--out", "report")[0] == 0
    page = Path("report/report.html").read_text()
    card = Path("report/README.md").read_text()
    assert "Synthetic rows of a table" in page
    assert ">column_2<" in page
    assert "labelled images" not in page + card
    assert '"tabular"' in card


def test_a_csv_without_names_loses_no_row(privot, tmp_path):
    (tmp_path / "bare.csv").write_text("18,2\n19,1\n20,0\n")
    words = (
        "privatize",
        "bare.csv",
        "--column",
        "0=laplace:5:18:95",
        "--column",
        "1=randomized-response:5:3",
        "--out",
    )
    code, out, err = privot(*words, "a.safetensors")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "first line holds numbers" in err
    assert list(Path().glob("*.safetensors")) == []
    assert not Path("home").exists()  # no ledger either
    code, out, _ = privot(*words, "a.safetensors", "--no-header")
    assert (code, "3 records" in out) == (0, True)


# Budgets


def test_a_large_delta_needs_a_word(privot, own):
    words = ("synthesize", own, "--epsilon", 1, "--delta", 0.5, *QUICK, "--out", "made")
    code, _, err = privot(*words)
    assert (code, err.count("\n"), "--allow-large-delta" in err) == (2, 1, True)
    assert not Path("made").exists()
    assert (
        privot("plan", own, "--shape", "1x8x8", "--classes", 2, "--epsilon", 1, "--delta", 0.5)[0]
        == 2
    )
    assert privot(*words, "--allow-large-delta")[0] == 0
    code, _, err = privot(
        "plan",
        own,
        "--shape",
        "1x8x8",
        "--classes",
        2,
        "--epsilon",
        1,
        "--delta",
        0.5,
        "--allow-large-delta",
    )
    assert code == 0


def test_a_large_delta_in_python(home):
    for delta, allowed in ((0.5, False), (1.1e-3, False), (1e-3, True)):
        wall = Budget(1.0, delta)
        if allowed:
            plan_run(Spec((1, 8, 8), 2), api.make_method("merf"), wall)
        else:
            with pytest.raises(SettingError, match="allow_large_delta=True"):
                api.synthesize(load_dataset("digits"), "private-set", wall, settings=SMALL)
    assert not (home / "home").exists()
    made = api.synthesize(
        "digits", "private-set", Budget(1.0, 0.01), settings=SMALL, allow_large_delta=True
    )
    assert made.guarantee.delta == 0.01


def test_a_delta_below_one_over_a_declared_number_needs_no_word():
    method = api.make_method("merf")
    wall = Budget(1.0, 2e-3)
    assert plan_run(Spec((1, 8, 8), 2, 400), method, wall)["guarantee"]["delta"] == 2e-3
    with pytest.raises(SettingError, match="1/600"):
        plan_run(Spec((1, 8, 8), 2, 600), method, wall)
    [told] = [
        each
        for each in plan_run(Spec((1, 8, 8), 2, 600), method, wall, allow_large_delta=True)[
            "warnings"
        ]
        if "delta" in each
    ]
    assert "1/size" in told
    # 300 owners, each with all that it holds: as the README shows it
    federated = api.make_method("federated-gs-wgan", {"noise_multiplier": 5.0, "rounds": 2})
    assert (
        plan_run(Spec((1, 8, 8), 2, num_clients=300), federated, Budget(math.inf, 1.15e-3))[
            "guarantee"
        ]["delta"]
        == 1.15e-3
    )
    with pytest.raises(SettingError, match="1/1000"):
        plan_run(Spec((1, 8, 8), 2, num_clients=1000), federated, Budget(math.inf, 1.15e-3))


def test_owners_are_a_lower_bound_of_the_size():
    method = api.make_method("merf")
    spec = Spec((1, 8, 8), 2, num_clients=2000)
    assert "at least as many records as clients" in " ".join(
        plan_run(spec, method, Budget(1.0, 1e-3))["warnings"]
    )
    assert "records as clients" not in " ".join(
        plan_run(spec, method, Budget(1.0, 1e-4))["warnings"]
    )


@pytest.mark.parametrize(("epsilon", "warned"), [(10, False), (11, True), (1000, True)])
def test_a_large_epsilon_is_a_caution_in_plain_words(privot, epsilon, warned):
    code, _, err = privot("plan", "digits", "--epsilon", epsilon)
    assert code == 0
    assert ("is a weak guarantee" in err) is warned
    if warned:
        power = float(re.search(r"may identify ([\d.]+) % of the", err)[1])
        claim = Guarantee.from_plan(
            api.make_method("private-set")
            .plan(load_dataset("digits").spec)
            .calibrate(Budget(epsilon)),
            1e-5,
        )
        assert 100 * claim.max_tpr["0.01"] - 1e-6 <= power <= 100


def test_a_large_epsilon_of_a_channel_is_a_caution(privot):
    code, _, err = privot("privatize", "digits", "--epsilon", 50, "--out", "a.safetensors")
    assert (code, "is a weak guarantee" in err) == (0, True)


# Python


def test_cautions_reach_python(home):
    with pytest.warns(PrivotWarning, match="is a weak guarantee") as heard:
        api.synthesize("digits", budget=100.0, settings=SMALL, ledger=home / "book.jsonl")
    assert {Path(each.filename).name for each in heard} == {
        Path(__file__).name
    }  # of the line that called
    told = []
    api.synthesize(
        "digits", budget=100.0, settings=SMALL, ledger=home / "book.jsonl", on_warning=told.append
    )
    assert any("is a weak guarantee" in each for each in told)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("real-subset", {"images_per_class": 1}),
        ("merf", {"noise_multiplier": 0.0, "num_features": 50, "steps": 2}),
    ],
)
def test_a_ledger_is_not_set_to_infinity_without_a_word(home, method, settings):
    with pytest.raises(
        SettingError, match="no guarantee and would set the ledger of digits to infinite for good"
    ) as refused:
        api.synthesize("digits", method, settings=settings)
    assert "--epsilon inf (budget=math.inf)" in str(refused.value)
    with pytest.raises(SettingError, match="for good"):
        api.synthesize("digits", method, settings=settings, ledger=ledger_path("digits"))
    assert not (home / "home").exists()
    trial = api.synthesize(
        "digits",
        method,
        settings=settings,
        ledger=home / "trial.jsonl",
        on_warning=lambda text: None,
    )
    assert math.isinf(float(trial.metadata["ledger"]["spent_epsilon"]))
    assert Ledger(ledger_path("digits")).entries() == []
    api.synthesize("digits", method, math.inf, settings=settings, on_warning=lambda text: None)
    assert math.isinf(Ledger(ledger_path("digits")).compute_spent_cost().epsilon(1e-5))


def test_the_command_line_asks_for_the_same_word(privot):
    words = (
        "synthesize",
        "digits",
        "--method",
        "real-subset",
        "--set",
        "images_per_class=1",
        "--out",
        "one",
    )
    code, _, err = privot(*words)
    assert (code, err.count("\n"), "for good" in err) == (2, 1, True)
    assert not Path("home").exists()
    assert privot(*words, "--ledger", "trial.jsonl")[0] == 0
    assert (
        privot(
            "synthesize",
            "digits",
            "--method",
            "merf",
            "--set",
            "noise_multiplier=0",
            "--out",
            "two",
        )[0]
        == 2
    )


# Refused runs


def test_a_refused_run_leaves_nothing_and_the_next_one_goes_on(privot, people):
    """Of records that were privatized nothing is charged, so nothing of a refused run is worth keeping."""
    words = ("synthesize", "sent.safetensors", "--method", "entropic-gan", "--out", "deep/er/out")
    for _ in range(2):
        code, _, err = privot(*words, "--set", "generator=conv")
        assert (code, "generator=records" in err) == (2, True)
        assert not Path("deep").exists()
    assert privot(*words, "--set", "steps=2")[0] == 0


@pytest.mark.parametrize(
    "error",
    [SettingError("no"), BudgetError("no"), MemoryError(), OSError(28, "No space left on device")],
)
def test_whatever_refuses_a_run_before_it_is_charged_nothing_is_left(home, monkeypatch, error):
    monkeypatch.chdir(home)
    monkeypatch.setattr(
        "privot.methods.private_set.PrivateSet.fit", lambda *_: (_ for _ in ()).throw(error)
    )
    for _ in range(2):  # the second is not told of an unfinished run
        with pytest.raises(type(error)):
            api.synthesize(
                "digits", budget=1.0, settings=SMALL, out="a/b/out", ledger=home / "book.jsonl"
            )
        assert not (home / "a").exists()
    assert Ledger(home / "book.jsonl").entries() == []


def test_a_run_past_the_limit_leaves_nothing(privot, own):
    assert privot("ledger", own, "--limit", 1)[0] == 0
    for epsilon in (5, "inf"):
        for method in ((), ("--method", "real-subset", "--set", "images_per_class=1")):
            code, _, err = privot(
                "synthesize", own, "--epsilon", epsilon, *(method or QUICK), "--out", "deep/out"
            )
            assert (code, Path("deep").exists()) == (2, False), err
            assert "unfinished" not in err


def test_a_simulation_whose_terms_are_refused_leaves_nothing(privot, monkeypatch):
    from privot.federated.flower import simulation
    from privot.federated.flower.server_app import NoConsentError

    def refused(*_, **__):
        raise NoConsentError("No client agreed to the terms.")

    monkeypatch.setattr(simulation, "simulate_federation", refused)
    words = (
        "federate",
        "simulate",
        "--data",
        "digits",
        "--clients",
        3,
        "--set",
        "noise_multiplier=8",
        "--rounds",
        2,
        "--out",
        "made",
    )
    for _ in range(2):
        code, _, err = privot(*words)
        assert (code, "No client agreed" in err) == (2, True), err
        assert not Path("made.run").exists()


# What is said


@pytest.mark.parametrize(
    ("method", "lead", "tags"),
    [
        (
            "real-subset",
            "Real records, unprotected",
            '["real-records", "images", "no-privacy-guarantee"]',
        ),
        (
            "kernel-points",
            "Synthetic labelled images with no privacy guarantee",
            '["synthetic", "images", "no-privacy-guarantee"]',
        ),
    ],
)
def test_the_report_says_what_is_released_without_protection(privot, home, method, lead, tags):
    settings = {"images_per_class": 1} | (
        {}
        if method == "real-subset"
        else {"steps": 2, "batch_size": 8, "net_width": 4, "num_networks": 2}
    )
    api.synthesize(
        "digits",
        method,
        settings=settings,
        out="made",
        ledger=home / "book.jsonl",
        on_warning=lambda text: None,
    )
    assert privot("report", "made", "--out", "report")[0] == 0
    page, card, record = (
        Path(f"report/{name}").read_text() for name in ("report.html", "README.md", "registry.yaml")
    )
    assert f'class="lead">{lead}' in page
    assert f"tags: {tags}" in card
    assert lead in card
    assert f'description: "{lead}' in record
    if method == "real-subset":
        assert "synthetic" not in (page + card + record).lower().replace("synthetic data</a>", "")


def test_the_report_shows_the_noise_that_ran(privot, home):
    made = api.synthesize(
        "digits", budget=3.0, settings=SMALL, out="made", ledger=home / "book.jsonl"
    )
    assert privot("report", "made", "--out", "report")[0] == 0
    shown = json.loads(Path("report/report.json").read_text())["method"]["settings"][
        "noise_multiplier"
    ]
    assert shown.startswith("derived from the budget: means ")
    for stage in made.metadata["plan"]["stages"]:
        told = float(re.search(rf"{stage['name']} ([\d.]+)", shown)[1])
        assert stage["noise_multiplier"] * (1 - 1e-3) < told <= stage["noise_multiplier"]


def test_a_sample_of_a_set_says_how_many_images_there_are(privot, said, home, tmp_path):
    made = api.synthesize(
        "digits", budget=5.0, settings=SMALL, out="made", ledger=home / "book.jsonl"
    )
    assert len(made.artifact.tensors["labels"]) == 20
    code, out, _ = privot("sample", "made", "--count", 100, "--out", "a.npz")
    assert (code, out.count("\n")) == (0, 1)
    assert "100 images in a.npz: 20 of the 20 images of the set, with repetitions" in out
    assert said("sample", "made", "--count", 100, "--out", "b.npz") == {
        "out": "b.npz",
        "count": 100,
        "distinct": 20,
        "images_in_set": 20,
        "repeated": True,
    }
    with np.load("a.npz") as found:
        assert len(np.unique(found["x"].reshape(100, -1), axis=0)) == 20
    assert (
        "10 of the 20 images of the set, each once"
        in privot("sample", "made", "--count", 10, "--out", "c.npz")[1]
    )


def test_bounds_are_never_rounded_the_wrong_way():
    rng = np.random.default_rng(0)
    for value in (10 ** rng.uniform(-6, 4, 2000)).tolist():
        for digits in (3, 4, 6):
            up = float(round_up(value, digits))
            down = float(round_down(value, digits))
            assert down * (1 - 2e-9) <= value <= up * (1 + 2e-9)
            assert up - down <= value * 10.0 ** (1 - digits) * (1 + 1e-6)
    assert (round_up(0.37225, 3), round_down(0.37279, 3), round_up(5.0), round_up(1e-5)) == (
        "0.373",
        "0.372",
        "5",
        "1e-05",
    )


def test_certified_attack_power_is_rounded_up_on_the_command_line(privot, home):
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
    made = api.synthesize(
        "digits", budget=3.0, settings=SMALL, out="made", ledger=home / "book.jsonl"
    )
    _, out, _ = privot("verify", "made")
    for rate, power in made.guarantee.max_tpr.items():
        assert float(re.search(rf"([\d.]+) at {re.escape(rate)}\b", out)[1]) >= power


def test_every_error_here_is_one_a_user_can_mend():
    assert issubclass(PrivotWarning, UserWarning)
    assert not issubclass(PrivotWarning, PrivotError)
    assert api.PrivotWarning is PrivotWarning
