"""The verbs attack, attacks and audit: what they print and write, for people and for programs, and their exit codes."""

import json

import numpy as np
import pytest

import privot.privacy.secret_side as secret_side_module
from privot.attacks.membership.registry import ATTACKS
from privot.audit import Verdict
from privot.audit.result import load_attack_results
from privot.data import load_dataset
from privot.data.spec import Spec
from privot.privacy.guarantee import Guarantee
from privot.privacy.plan import Neighbours, Plan, Stage
from privot.release import Release
from privot.release.artifact import Artifact
from privot.synthesis import synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {
    "images_per_class": 2,
    "num_random_nets": 4,
    "nets_per_round": 2,
    "net_width": 4,
    "steps": 4,
    "net_train_epochs": 1,
}
SETS = tuple(word for key, value in TINY.items() for word in ("--set", f"{key}={value}"))
SIDES = ("--members", "digits", "--nonmembers", "digits")


@pytest.fixture
def private(tmp_path):
    synthesize(
        "digits",
        budget=1.0,
        settings=TINY,
        out=tmp_path / "private",
        ledger=tmp_path / "book.jsonl",
    )
    return tmp_path / "private"


@pytest.fixture
def leaky(tmp_path):
    """Real images under a certificate of epsilon 0.1, as a broken program would publish them."""
    images, labels = load_dataset("digits", public=True).records()
    plan = Plan((Stage("all", "sum", 37.0),), Neighbours.ADD_REMOVE)
    facts = {
        "method": "real-subset",
        "settings": {"images_per_class": 100},
        "plan": plan.to_json(),
        "event": str(plan.event()),
        "seed": 0,
    }
    release = Release(
        Artifact.from_images(images[:1000], labels[:1000]),
        Guarantee.from_plan(plan, 1e-5),
        Spec((1, 8, 8), 10),
        facts,
    )
    return release.save(tmp_path / "leaky")


def parsed(out):
    assert out.count("\n") == 1
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_attacks(privot):
    code, out, err = privot("attacks")
    assert (code, err) == (0, "")
    assert all(name.split("-")[0] in out for name in ATTACKS)
    rows = parsed(privot("attacks", "--json")[1])
    assert {row["name"]: tuple(row["needs"]) for row in rows} == {
        name: each.needs for name, each in ATTACKS.items()
    }


def test_an_attack_on_sensitive_data_is_the_owner_s_own(privot, private):
    code, out, err = privot("attack", "nearest-pixels", "private", *SIDES)
    assert code == 0
    for words in (
        "on a release that leaks",
        "AUC",
        "advantage",
        "verdict",
        "claimed",
        "private.attacks/nearest-pixels.json",
    ):
        assert words in out
    assert "controls" in err
    assert "blind baseline" in err
    assert "controls" not in out
    assert "warning: These results depend on sensitive records" in err
    assert "warning: class shares differ" in err  # of the digits' own split, by a chi-squared test
    folder = private.with_name("private.attacks")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in folder.iterdir()] == ["nearest-pixels.json"]
    assert not (private / "attacks").exists()
    [found] = load_attack_results(folder / "nearest-pixels.json")
    assert (found.name, found.publishable, found.confidence) == (
        ATTACKS["nearest-pixels"].title,
        False,
        0.95,
    )
    code, out, err = privot("report", "private", "--internal", "--out", "page")
    assert code == 0
    assert found.name in (private.parent / "page-internal" / "internal.html").read_text()
    assert found.name not in (private.parent / "page" / "report.html").read_text()


def test_an_attack_on_public_data_is_for_the_public_page(privot, private):
    # The split of the digits tells sides apart a little whatever is released, so the claim is judged with more confidence than usual.
    code, out, err = privot(
        "attack", "tracing", "private", *SIDES, "--public", "--json", "--confidence", 0.9999
    )
    assert code == 0
    facts = parsed(out)
    assert facts["publishable"] is True
    assert facts["verdict"]["status"] == "holds"
    assert facts["control"]["passed"] is True
    [found] = load_attack_results(private / "attacks" / "tracing.json")
    assert found.publishable
    assert "sensitive records" not in err
    assert not private.with_name("private.attacks").exists()
    assert json.loads((private / "attacks" / "tracing.json").read_text())["auc"] == facts["auc"]
    assert privot("verify", "private")[0] == 0  # it is still the same release
    assert privot("report", "private", "--out", "page")[0] == 0
    assert found.name in (private.parent / "page" / "report.html").read_text()


@pytest.mark.parametrize("public", [(), ("--public",)])
def test_a_false_certificate_ends_with_three(privot, leaky, public):
    code, out, err = privot("attack", "nearest-pixels", "leaky", *SIDES, *public)
    assert code == 3
    assert "the claim is broken" in out
    assert err.splitlines()[-1].startswith("privot: implementation broken")
    folder = leaky / "attacks" if public else leaky.with_name("leaky.attacks")
    assert load_attack_results(folder / "nearest-pixels.json")
    assert privot("report", "leaky", "--out", "page")[0] == 3
    code, out, _ = privot("attack", "nearest-pixels", "leaky", *SIDES, *public, "--json")
    assert code == 3
    assert parsed(out)["verdict"]["status"] == "broken"


def test_where_nothing_can_be_written_no_attack_begins(privot, leaky, monkeypatch):
    monkeypatch.setattr(
        "privot.attacks.membership.runner.run_attack",
        lambda *_, **__: pytest.fail("the work began"),
    )
    (leaky / "attacks").touch()
    code, _, err = privot("attack", "nearest-pixels", "leaky", *SIDES, "--public")
    assert (code, "cannot be written" in err, err.count("\n")) == (2, True, 1)


def test_from_inside_the_release_too(privot, leaky, monkeypatch):
    monkeypatch.chdir(leaky)
    assert privot("attack", "nearest-pixels", ".", *SIDES)[0] == 3
    assert (leaky.with_name("leaky.attacks") / "nearest-pixels.json").exists()


@pytest.fixture
def sides(tmp_path):
    """A hundred members and as many others."""
    rng = np.random.default_rng(0)
    (images, labels) = load_dataset("digits", public=True).records()
    order = rng.permutation(len(labels))[:200]
    for name, part in (("in.npz", order[:100]), ("out.npz", order[100:])):
        np.savez(tmp_path / name, x=images[part].numpy(), y=labels[part].numpy())
    return ("--members", "in.npz", "--nonmembers", "out.npz")


def test_a_method_is_attacked_by_its_shadows(privot, sides, tmp_path):
    words = ("attack", "lira", "real-subset", "--set", "images_per_class=2", *sides)
    words += ("--shadows", 4, "--epochs", 5, "--folder", "shadows", "--json")
    code, out, err = privot(*words)
    assert code == 0, err
    assert "shadows" in err
    facts = parsed(out)
    assert facts["verdict"]["status"] == "no claim"
    assert (
        facts["operating_points"]["num_members"] + facts["operating_points"]["num_nonmembers"]
        == 200
    )
    assert load_attack_results(tmp_path / "shadows" / "lira.json")[0].name == "LiRA, online"
    again = parsed(privot(*words)[1])
    assert again == facts
    code, _, err = privot(*words[:-1], "--seed", 1)
    assert (code, err.count("\n")) == (2, 1)
    assert "another plan" in err


def test_a_private_method_is_held_to_its_claim(privot, sides, tmp_path):
    """One that must know the sizes of classes, too."""
    words = (
        "attack",
        "lira-pixels",
        "sliced-flow",
        "--epsilon",
        5,
        "--set",
        "steps=2",
        "--set",
        "num_blocks=2",
        *sides,
        "--shadows",
        4,
        "--epochs",
        1,
        "--json",
    )
    code, _, err = privot(*words)
    assert code == 2
    assert "--public-classes" in err
    code, out, err = privot(*words, "--public-classes")
    assert code == 0, err
    facts = parsed(out)
    assert facts["verdict"]["status"] == "holds"
    assert "with 4 shadows" in facts["warning"]
    assert facts["file"] == "sliced-flow.shadows/lira-pixels.json"
    assert (tmp_path / "sliced-flow.shadows").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("guess", "leaky", *SIDES), "There is no attack 'guess'"),
        (("loss", "nowhere", *SIDES), "nowhere is no release"),
        (
            ("lira", "nowhere", *SIDES, "--folder", "x"),
            "There is no method 'nowhere' either",
        ),
        (("lira", "leaky", *SIDES, "--candidates", 5), "Leave the budget out"),
        (("nearest-pixels", "leaky", *SIDES, "--shadows", 4), "uses no shadows"),
        (("nearest-pixels", "leaky", *SIDES, "--reference", "leaky"), "another release"),
        (
            ("nearest-pixels", "leaky", *SIDES, "--reference", "nowhere"),
            "nowhere",
        ),
        (("loss", "leaky", *SIDES, "--reference", "leaky"), "needs none"),
        (("lira", "leaky", *SIDES, "--confidence", 95), "confidence"),
        (("rmia", "real-subset", *SIDES, "--folder", "x"), "Attack a release"),
        (("lira", "leaky", *SIDES, "--folder", "x", "--shadows", 7), "an even number"),
        (("rmia", "leaky", *SIDES, "--folder", "x", "--population", "digits"), "Leave it out"),
        (("loss", "leaky", *SIDES, "--epsilon", 1), "a release states how it was made"),
        (("gan-leaks-white", "leaky", *SIDES), "is a set"),
        (
            ("nearest-pixels", "leaky", "--members", "small.npz", "--nonmembers", "digits"),
            "members: images of 1x4x4",
        ),
        (
            ("tracing", "leaky", *SIDES, "--population", "digits"),
            "non-members and the population share records",
        ),
        (("loss", "leaky", "--members", "digits"), "nonmembers"),
        (("loss", "leaky", *SIDES, "--confidence", 2), "confidence"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(privot, leaky, tmp_path, words, said):
    np.savez(tmp_path / "small.npz", x=np.zeros((20, 1, 4, 4), np.float32), y=np.arange(20) % 10)
    code, out, err = privot("attack", *words, "--epochs", 1)
    assert code == 2
    assert said in err.splitlines()[-1]
    assert out == ""
    assert sum(line.startswith("privot: ") for line in err.splitlines()) == 1
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "leaky.attacks").exists()


# audit

AUDIT = ("audit", "private-set", "--data", "digits", "--folder", "here", "--runs", 4, *SETS)


def test_an_audit_for_people_and_programs(privot, tmp_path):
    code, out, err = privot(*AUDIT, "--epsilon", 5)
    assert code == 0
    assert out.startswith("holds: proves epsilon of at least 0")
    assert out.count("\n") == 2
    assert "audit runs" in err
    assert "warning: These results depend on sensitive records" in err
    code, again, err = privot(*AUDIT, "--epsilon", 5, "--json")  # all runs are there
    facts = parsed(again)
    assert code == 0
    assert facts.pop("folder") == "here"
    assert facts == json.loads((tmp_path / "here" / "verdict.json").read_text())
    assert (
        Verdict.from_json({key: facts[key] for key in Verdict.__dataclass_fields__}).status
        == "holds"
    )
    assert (tmp_path / "here").stat().st_mode & 0o777 == 0o700
    assert parsed(privot(*AUDIT, "--epsilon", 5, "--public", "--json")[1])["publishable"] is True
    # beside a release made likewise, and no other
    for name, epsilon in (("same", 5.0), ("other", 4.0)):
        synthesize(
            "digits",
            budget=epsilon,
            settings=TINY,
            out=tmp_path / name,
            ledger=tmp_path / "book.jsonl",
        )
    code, _, err = privot("report", "same", "--attacks", "here/verdict.json")
    assert (code, "warning" in err) == (0, False)
    assert (
        "2 runs with the record and 2 without" in (tmp_path / "report" / "report.html").read_text()
    )
    code, _, err = privot("report", "other", "--attacks", "here/verdict.json", "--out", "page")
    assert code == 2
    assert "another epsilon than the release" in err


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (AUDIT, "here"),
        (("attack", "lira", "private-set", *SIDES, *SETS, "--shadows", 4), "private-set.shadows"),
    ],
)
def test_an_interrupt_says_where_the_work_goes_on(privot, monkeypatch, words, kept):
    def stopped(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("privot.audit.runner.EpsilonAudit.run", stopped)
    monkeypatch.setattr("privot.attacks.shadows.runner.prepare_shadows", stopped)
    monkeypatch.setattr("privot.attacks.membership.runner.check_attack", lambda *given: None)
    code, _, err = privot(*words, "--epsilon", 5)
    assert code == 130
    assert f"Stopped. The completed work is in {kept}. Run the same command again to resume." in err


def test_an_audit_that_refutes_the_claim_ends_with_three(privot, monkeypatch):
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda total, std, grid, secret: total * grid
    )
    code, out, err = privot(
        *AUDIT,
        "--set",
        "noise_multiplier=60",
        "--runs",
        8,
        "--kind",
        "orthogonal",
        "--confidence",
        0.8,
    )  # claims epsilon 0.04
    assert code == 3
    assert out.startswith("broken: ")
    assert "implementation broken" in err.splitlines()[-1]


def test_an_audit_of_what_claims_nothing_ends_well(privot):
    code, out, _ = privot(
        "audit",
        "real-subset",
        "--data",
        "digits",
        "--folder",
        "one",
        "--canaries",
        40,
        "--score",
        "nearest",
        "--json",
    )
    assert code == 0
    assert parsed(out)["status"] == "no claim"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("merf", "--data", "digits", "--folder", "x", "--epsilon", 1, "--canaries", 10),
            "private for replace neighbours",
        ),
        (("merf", "--data", "digits", "--folder", "x"), "no budget"),
        (("merf", "--data", "digits", "--epsilon", 1, "--confidence", 95), "confidence"),
        (("merff", "--data", "digits", "--folder", "x", "--epsilon", 1), "did you mean 'merf'"),
        (("merf", "--data", "digitts", "--folder", "x", "--epsilon", 1), "did you mean 'digits'"),
        (("merf", "--data", "digits", "--folder", "x", "--epsilon", 1, "--runs", 3), "runs"),
        (
            ("merf", "--data", "digits", "--folder", "x", "--epsilon", 1, "--kind", "yellow"),
            "yellow",
        ),
        (
            ("merf", "--data", "digits", "--folder", "x", "--epsilon", 1, "--score", "guess"),
            "guess",
        ),
    ],
    ids=str,
)
def test_bad_audits_are_one_line(privot, tmp_path, words, said):
    code, out, err = privot("audit", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not (tmp_path / "x").exists()
    assert parsed(privot("audit", *words, "--json")[1])["error"]
