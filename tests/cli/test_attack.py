"""The verbs attack, attacks and audit: what they print and write, and their exit codes."""

import json

import numpy as np
import pytest
from support.command_words import TINY_SET, format_settings

import privot.privacy.secret_side as secret_side_module
from privot.attacks.membership.controls import ControlResult
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

SETTINGS = {**TINY_SET, "num_random_nets": 2, "nets_per_round": 1, "steps": 2}
SETS = format_settings(SETTINGS)
SIDES = "--members digits --nonmembers digits"
SMALL_SIDES = "--members in.npz --nonmembers out.npz"


def make_private(out, epsilon=1.0):
    ledger = out.with_suffix(".jsonl")
    synthesize("digits", budget=epsilon, settings=SETTINGS, out=out, ledger=ledger)
    return out


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
    artifact = Artifact.from_images(images[:1000], labels[:1000])
    release = Release(artifact, Guarantee.from_plan(plan, 1e-5), Spec((1, 8, 8), 10), facts)
    return release.save(tmp_path / "leaky")


@pytest.fixture
def small_sides(tmp_path):
    """A hundred members and as many others."""
    images, labels = load_dataset("digits", public=True).records()
    order = np.random.default_rng(0).permutation(len(labels))
    for name, part in (("in.npz", order[:100]), ("out.npz", order[100:200])):
        np.savez(tmp_path / name, x=images[part].numpy(), y=labels[part].numpy())


def test_lists_the_attacks(privot, run_json):
    code, out, err = privot("attacks")
    assert (code, err) == (0, "")
    assert all(name.split("-")[0] in out for name in ATTACKS)
    rows = run_json("attacks")
    needs = {name: attack.needs for name, attack in ATTACKS.items()}
    assert {row["name"]: tuple(row["needs"]) for row in rows} == needs


@pytest.mark.usefixtures("small_sides")
def test_results_of_an_attack_are_published_only_if_its_data_are(privot, run_json, tmp_path):
    private = make_private(tmp_path / "private")
    code, out, err = privot("attack nearest-pixels private", SIDES)
    assert code == 0
    shown = "on a release that leaks,AUC,advantage,verdict,claimed"
    for words in (*shown.split(","), "private.attacks/nearest-pixels.json"):
        assert words in out
    assert "controls" not in out
    for words in ("controls", "blind baseline", "warning: class shares differ"):
        assert words in err
    assert "warning: These results depend on sensitive records" in err
    folder = tmp_path / "private.attacks"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == ["nearest-pixels.json"]
    assert not (private / "attacks").exists()
    [internal] = load_attack_results(folder / "nearest-pixels.json")
    title = ATTACKS["nearest-pixels"].title
    assert (internal.name, internal.publishable, internal.confidence) == (title, False, 0.95)
    assert privot("report private --internal --out page")[0] == 0
    assert internal.name in (tmp_path / "page-internal" / "internal.html").read_text()
    assert internal.name not in (tmp_path / "page" / "report.html").read_text()

    words = f"attack nearest-pixels private {SMALL_SIDES} --public"
    code, out, err = privot(words, "--confidence 0.9999 --json")
    facts = json.loads(out)
    assert (code, facts["publishable"], facts["control"]["passed"]) == (0, True, True)
    assert facts["verdict"]["status"] == "holds"
    assert "sensitive records" not in err
    path = private / "attacks" / "nearest-pixels.json"
    [public] = load_attack_results(path)
    assert public.publishable
    assert [path.name for path in folder.iterdir()] == ["nearest-pixels.json"]
    assert json.loads(path.read_text())["auc"] == facts["auc"]
    assert privot("verify private")[0] == 0  # it is still the same release
    assert privot("report private --out page")[0] == 0
    assert public.name in (tmp_path / "page" / "report.html").read_text()


@pytest.mark.parametrize("public", ["", "--public"])
def test_a_false_certificate_ends_with_three(privot, run_json, leaky, public):
    code, out, err = privot("attack nearest-pixels leaky", SIDES, public)
    assert code == 3
    assert "the claim is broken" in out
    assert err.splitlines()[-1].startswith("privot: implementation broken")
    folder = leaky / "attacks" if public else leaky.with_name("leaky.attacks")
    assert load_attack_results(folder / "nearest-pixels.json")
    assert privot("report leaky --out page")[0] == 3
    facts = run_json("attack nearest-pixels leaky", SIDES, public, code=3)
    assert facts["verdict"]["status"] == "broken"


def test_no_attack_begins_if_its_results_cannot_be_written(expect_refusal, leaky, monkeypatch):
    runner = "privot.attacks.membership.runner.run_attack"
    monkeypatch.setattr(runner, lambda *_, **__: pytest.fail("the work began"))
    (leaky / "attacks").touch()
    expect_refusal("cannot be written", "attack nearest-pixels leaky", SIDES, "--public")


def test_attacks_from_inside_the_release_too(privot, leaky, monkeypatch):
    monkeypatch.chdir(leaky)
    assert privot("attack nearest-pixels .", SIDES)[0] == 3
    assert (leaky.with_name("leaky.attacks") / "nearest-pixels.json").exists()


@pytest.mark.usefixtures("small_sides")
def test_a_method_is_attacked_by_its_shadows(privot, run_json, tmp_path):
    words = f"attack lira-pixels real-subset --set images_per_class=2 {SMALL_SIDES}"
    words += " --shadows 4 --epochs 1 --folder shadows"
    code, out, err = privot(words, "--json")
    assert code == 0, err
    assert "shadows" in err
    facts = json.loads(out)
    assert facts["verdict"]["status"] == "no claim"
    points = facts["operating_points"]
    assert points["num_members"] + points["num_nonmembers"] == 200
    [result] = load_attack_results(tmp_path / "shadows" / "lira-pixels.json")
    assert result.name == ATTACKS["lira-pixels"].title
    assert run_json(words) == facts
    code, _, err = privot(words, "--seed 1")
    assert (code, err.count("\n"), "another plan" in err) == (2, 1, True)


@pytest.mark.slow
@pytest.mark.usefixtures("small_sides")
def test_a_private_method_is_held_to_its_claim(privot, tmp_path):
    """One that must know the sizes of classes, too."""
    words = (
        f"attack lira-pixels sliced-flow --epsilon 5 --set steps=2 --set num_blocks=2 {SMALL_SIDES}"
    )
    code, out, err = privot(words, "--shadows 4 --epochs 1 --public-classes --json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["verdict"]["status"] == "holds"
    assert "with 4 shadows" in facts["warning"]
    assert facts["file"] == "sliced-flow.shadows/lira-pixels.json"
    assert (tmp_path / "sliced-flow.shadows").stat().st_mode & 0o777 == 0o700


REFUSED_ATTACKS = [
    (f"guess leaky {SIDES}", "There is no attack 'guess'"),
    (f"loss nowhere {SIDES}", "nowhere is no release"),
    (f"lira nowhere {SIDES} --folder x", "There is no method 'nowhere' either"),
    (f"lira-pixels leaky {SIDES} --candidates 5", "Leave the budget out"),
    (f"nearest-pixels leaky {SIDES} --shadows 4", "uses no shadows"),
    (f"nearest-pixels leaky {SIDES} --reference leaky", "another release"),
    (f"nearest-pixels leaky {SIDES} --reference nowhere", "nowhere"),
    (f"loss leaky {SIDES} --reference leaky", "needs none"),
    (f"lira leaky {SIDES} --confidence 95", "confidence"),
    (f"rmia real-subset {SIDES} --folder x", "Attack a release"),
    (f"lira-pixels leaky {SIDES} --folder x --shadows 7", "an even number"),
    (f"rmia leaky {SIDES} --folder x --population digits", "Leave it out"),
    (f"loss leaky {SIDES} --epsilon 1", "a release states how it was made"),
    (f"gan-leaks-white leaky {SIDES}", "is a set"),
    ("nearest-pixels leaky --members small.npz --nonmembers digits", "members: images of 1x4x4"),
    (f"tracing leaky {SIDES} --population digits", "non-members and the population share records"),
    ("loss leaky --members digits", "nonmembers"),
    (f"lira-pixels sliced-flow --epsilon 5 {SIDES}", "--public-classes"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED_ATTACKS)
def test_refuses_a_wrong_attack_in_one_line(privot, leaky, tmp_path, monkeypatch, words, reason):
    passed = ControlResult("control", 1.0, 0.5, 0.5, 0.9, True, "")
    monkeypatch.setattr("privot.attacks.membership.checks.run_controls", lambda *_: passed)
    np.savez(tmp_path / "small.npz", x=np.zeros((20, 1, 4, 4), np.float32), y=np.arange(20) % 10)
    code, out, err = privot("attack", words, "--epochs 1")
    assert (code, out) == (2, "")
    assert reason in err.splitlines()[-1]
    assert sum(line.startswith("privot: ") for line in err.splitlines()) == 1
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "leaky.attacks").exists()


# audit

AUDIT = f"audit private-set --data in.npz --folder here --runs 4 {SETS}"


@pytest.mark.usefixtures("small_sides")
def test_an_audit_proves_what_a_report_of_the_same_run_shows(privot, run_json, tmp_path):
    code, out, err = privot(AUDIT, "--epsilon 5")
    assert (code, out.count("\n")) == (0, 2)
    assert out.startswith("holds: proves epsilon of at least 0")
    assert "audit runs" in err
    assert "warning: These results depend on sensitive records" in err
    facts = run_json(AUDIT, "--epsilon 5")  # all runs exist already
    assert facts.pop("folder") == "here"
    assert facts == json.loads((tmp_path / "here" / "verdict.json").read_text())
    verdict = Verdict.from_json({key: facts[key] for key in Verdict.__dataclass_fields__})
    assert verdict.status == "holds"
    assert (tmp_path / "here").stat().st_mode & 0o777 == 0o700
    assert run_json(AUDIT, "--epsilon 5 --public")["publishable"] is True
    make_private(tmp_path / "same", 5.0)
    make_private(tmp_path / "other", 4.0)
    code, _, err = privot("report same --attacks here/verdict.json")
    assert (code, "warning" in err) == (0, False)
    page = (tmp_path / "report" / "report.html").read_text()
    assert "2 runs with the record and 2 without" in page
    code, _, err = privot("report other --attacks here/verdict.json --out page")
    assert (code, "another epsilon than the release" in err) == (2, True)


@pytest.mark.usefixtures("small_sides")
@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (AUDIT, "here"),
        (f"attack lira private-set {SIDES} {SETS} --shadows 4", "private-set.shadows"),
    ],
)
def test_an_interrupt_says_how_to_resume(privot, monkeypatch, words, kept):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("privot.audit.runner.EpsilonAudit.run", stop)
    monkeypatch.setattr("privot.attacks.shadows.runner.prepare_shadows", stop)
    monkeypatch.setattr("privot.attacks.membership.runner.check_attack", lambda *_: None)
    code, _, err = privot(words, "--epsilon 5")
    assert code == 130
    assert f"Stopped. The completed work is in {kept}. Run the same command again to resume." in err


@pytest.mark.usefixtures("small_sides")
def test_an_audit_that_refutes_the_claim_ends_with_three(privot, monkeypatch):
    monkeypatch.setattr(
        secret_side_module, "add_noise", lambda total, std, grid, secret: total * grid
    )
    words = "--set noise_multiplier=60 --runs 8 --kind orthogonal --confidence 0.8"
    code, out, err = privot(AUDIT, words)  # claims epsilon 0.04
    assert code == 3
    assert out.startswith("broken: ")
    assert "implementation broken" in err.splitlines()[-1]


def test_an_audit_of_what_claims_nothing_ends_well(run_json):
    words = "audit real-subset --data digits --folder one --canaries 40 --score nearest"
    assert run_json(words)["status"] == "no claim"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("merf --data digits --epsilon 1 --canaries 10", "private for replace neighbours"),
        ("merf --data digits", "no budget"),
        ("merf --data digits --epsilon 1 --confidence 95", "confidence"),
        ("merff --data digits --epsilon 1", "did you mean 'merf'"),
        ("merf --data digitts --epsilon 1", "did you mean 'digits'"),
        ("merf --data digits --epsilon 1 --runs 3", "runs"),
        ("merf --data digits --epsilon 1 --kind yellow", "yellow"),
        ("merf --data digits --epsilon 1 --score guess", "guess"),
    ],
)
def test_refuses_a_wrong_audit_in_one_line(expect_refusal, run_json, tmp_path, words, reason):
    expect_refusal(reason, "audit", words, "--folder x")
    assert run_json("audit", words, "--folder x", code=2)["error"]
    assert not (tmp_path / "x").exists()
