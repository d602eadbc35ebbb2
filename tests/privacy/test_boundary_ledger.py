"""What the ledger must see: seeded noise, side ledgers, simulated owners, shadows and audits, and the relation of its sum."""

import json
import math

import numpy as np
import pytest
from support.in_process_federation import TINY_ARGUMENTS, serve_here, simulate_here
from support.tiny_settings import choose_tiny_settings

from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.runner import prepare_shadows
from privot.audit.runner import EpsilonAudit
from privot.data import Public, Sensitive, Spec, load_dataset
from privot.errors import BudgetError, LedgerError, ReleaseError, SettingError
from privot.local.privatize import build_image_channel, privatize
from privot.measures import Samples
from privot.measures.private_accuracy import measure_private_accuracy
from privot.privacy.accounting import Neighbours
from privot.privacy.charges import Charge, compute_total_cost
from privot.privacy.gate import Gate
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import (
    LinkedLedger,
    ledger_path,
    open_ledger,
    open_part_ledger,
    record_internal_runs,
)
from privot.privacy.plan import Budget, Plan, Stage
from privot.privacy.sampling import Poisson
from privot.release import Release
from privot.release.ledger_summary import describe_spending, summarize_spending
from privot.release.verify import verify
from privot.runtime import Runtime
from privot.synthesis import resize, synthesize

pytestmark = pytest.mark.usefixtures("one_thread")

ADD_REMOVE, REPLACE, LOCAL, CLIENT = Neighbours
SPEC = Spec((1, 8, 8), 3, 47)
CPU = Runtime("cpu")
MERF = choose_tiny_settings("merf") | {"noise_multiplier": None}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Own ledgers of data sets lie in this test's folder."""
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def data(name="scans", kind=Sensitive, seed=0):
    images = np.random.default_rng(seed).random((47, 1, 8, 8), np.float32)
    return kind(images, np.arange(47) % 3, SPEC, name=name)


def plan(noise=5.0, relation=REPLACE, verb="sum", **more):
    return Plan((Stage("it", verb, noise, **more),), relation)


def pixels(image, label):
    return image.flatten()


def lines(name="scans", *kinds):
    """Lines of the own ledger of a data set, but for answers."""
    kinds = kinds or ("budget", "reserve", "part", "internal")
    return [each for each in Ledger(ledger_path(name)).entries() if each["kind"] in kinds]


def spent(ledger, delta=1e-5):
    return float(ledger.compute_spent_cost().epsilon(delta))


def small_release(**more):
    return synthesize(data(), "merf", 5.0, settings=MERF, runtime=CPU, **more)


# Seeded noise is no noise


def test_a_seeded_gate_is_charged_as_infinite(ledger):
    Gate(data(), plan(), ledger, Budget(5.0), insecure_seed=1).sum("it", pixels, clip_norm=1.0)
    assert spent(ledger) == math.inf
    assert [each["seeded"] for each in ledger.entries() if each["kind"] == "reserve"] == [True]


def test_a_seeded_synthesis_is_charged_as_infinite_and_later_releases_say_so(ledger):
    seeded = small_release(ledger=ledger, insecure_seed=1)
    assert float(seeded.metadata["ledger"]["spent_epsilon"]) == math.inf
    honest = small_release(ledger=ledger)
    assert honest.guarantee.epsilon == pytest.approx(5.0)
    assert float(honest.metadata["ledger"]["spent_epsilon"]) == math.inf


def test_seeded_channels_and_paid_accuracies_are_charged_as_infinite(ledger):
    privatize(data(), build_image_channel(SPEC, "laplace", 4.0), ledger=ledger, insecure_seed=1)
    assert spent(ledger) == math.inf
    subject = Samples.from_release(small_release(), "it", 30)
    book = Ledger(ledger.path.with_name("test.jsonl"))
    measure_private_accuracy(
        subject, data("tested"), Budget(5.0), ledger=book, insecure_seed=1, runtime=CPU
    )
    assert spent(book) == math.inf


def test_an_owner_s_limit_refuses_seeded_runs(ledger):
    ledger.set_limit(Budget(100.0))
    subject = Samples.from_release(small_release(), "it", 30)
    for run in (
        lambda: Gate(data(), plan(), ledger, Budget(5.0), insecure_seed=1).sum(
            "it", pixels, clip_norm=1.0
        ),
        lambda: small_release(ledger=ledger, insecure_seed=1),
        lambda: privatize(
            data(), build_image_channel(SPEC, "laplace", 4.0), ledger=ledger, insecure_seed=1
        ),
        lambda: measure_private_accuracy(
            subject, data(), Budget(5.0), ledger=ledger, insecure_seed=1, runtime=CPU
        ),
    ):
        with pytest.raises(BudgetError, match="total would come to inf"):
            run()
    assert [each["kind"] for each in ledger.entries()] == ["budget"]
    small_release(ledger=ledger)  # with secret noise it fits


def test_a_seeded_run_resumes_as_a_seeded_run_alone(ledger, tmp_path):
    run = {"folder": tmp_path / "run", "method": "m"}
    first = Gate(data(), plan(), ledger, Budget(5.0), insecure_seed=1, **run).sum(
        "it", pixels, clip_norm=1.0
    )
    again = Gate(data(), plan(), ledger, Budget(5.0), insecure_seed=1, **run).sum(
        "it", pixels, clip_norm=1.0
    )
    assert (first == again).all()
    assert len([each for each in ledger.entries() if each["kind"] == "reserve"]) == 1
    with pytest.raises(LedgerError, match="another plan"):
        Gate(data(), plan(), ledger, Budget(5.0), **run)
    Gate(data(), plan(), ledger, Budget(5.0), folder=tmp_path / "secret", method="m").sum(
        "it", pixels, clip_norm=1.0
    )
    with pytest.raises(LedgerError, match="another plan"):
        Gate(
            data(),
            plan(),
            ledger,
            Budget(5.0),
            folder=tmp_path / "secret",
            method="m",
            insecure_seed=1,
        )


# A side ledger does not escape the limit


def test_the_own_limit_refuses_a_run_under_a_side_ledger(tmp_path):
    side = tmp_path / "t.jsonl"
    subject = Samples.from_release(small_release(ledger=tmp_path / "before.jsonl"), "it", 30)
    Ledger(ledger_path("scans")).set_limit(Budget(1.0))
    for run in (
        lambda: small_release(ledger=side),
        lambda: privatize(data(), build_image_channel(SPEC, "laplace", 4.0), ledger=side),
        lambda: measure_private_accuracy(subject, data(), Budget(5.0), ledger=side, runtime=CPU),
        lambda: synthesize(
            data(), "real-subset", settings={"images_per_class": 2}, ledger=side, runtime=CPU
        ),  # opens the gate
    ):
        with pytest.raises(BudgetError, match="does not allow"):
            run()
    assert not [each for each in Ledger(side).entries() if each["kind"] == "reserve"]
    assert [each["kind"] for each in lines()] == ["budget"]


def test_within_the_own_limit_both_ledgers_are_charged(tmp_path):
    Ledger(ledger_path("scans")).set_limit(Budget(6.0))
    side = Ledger(tmp_path / "t.jsonl")
    release = small_release(ledger=side)
    assert (spent(side), spent(Ledger(ledger_path("scans")))) == (
        pytest.approx(5.0),
        pytest.approx(5.0),
    )
    assert [each["kind"] for each in lines()] == ["budget", "reserve"]
    assert release.metadata["ledger"]["is_dataset_ledger"] is False
    with pytest.raises(BudgetError):
        small_release(ledger=tmp_path / "other.jsonl")  # twice 5 is more than 6
    assert len(lines("scans", "reserve")) == 1


def test_without_an_own_limit_a_side_ledger_is_charged_alone(tmp_path):
    release = small_release(ledger=tmp_path / "t.jsonl")
    assert lines() == []
    facts = release.metadata["ledger"]
    assert (facts["is_dataset_ledger"], facts["neighbours"], facts["privacy_unit"]) == (
        False,
        release.guarantee.neighbours,
        "one record",
    )
    own = small_release()
    assert own.metadata["ledger"]["is_dataset_ledger"] is True
    assert len(lines()) == 1


def test_a_limit_of_the_side_ledger_holds_too_and_then_nothing_is_charged(tmp_path):
    Ledger(ledger_path("scans")).set_limit(Budget(50.0))
    side = Ledger(tmp_path / "t.jsonl")
    side.set_limit(Budget(1.0))
    with pytest.raises(BudgetError):
        open_ledger("scans", side).reserve(plan(0.5), "m")
    assert lines("scans", "reserve") == []


def test_which_ledger_a_run_is_charged_to(tmp_path, monkeypatch):
    own = ledger_path("scans")
    assert open_ledger("scans").path == own
    assert type(open_ledger("scans", own)) is Ledger
    given = Ledger(own)
    assert open_ledger("scans", given) is given
    linked = open_ledger("scans", tmp_path / "t.jsonl")
    assert isinstance(linked, LinkedLedger)
    assert open_ledger("scans", linked) is linked
    assert type(open_ledger("", tmp_path / "t.jsonl")) is Ledger
    (tmp_path / "home" / "ledgers").mkdir(parents=True)
    own.touch()
    (tmp_path / "link.jsonl").symlink_to(own)
    assert (
        open_ledger("scans", tmp_path / "link.jsonl").path == own
    )  # another name of the same file
    with pytest.raises(SettingError, match="Give it a name"):
        open_ledger("")
    with pytest.raises(SettingError, match="A part needs another file"):
        open_part_ledger("scans", (0, 2), own)
    monkeypatch.delenv("PRIVOT_HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError))
    with pytest.raises(SettingError, match="Set PRIVOT_HOME"):
        ledger_path("scans")


def test_a_side_ledger_is_ready_if_every_ledger_that_counts_is(tmp_path, monkeypatch):
    linked = open_ledger("scans", tmp_path / "t.jsonl")
    asked = []
    monkeypatch.setattr(Ledger, "require_writable", lambda self: asked.append(self.path.name))
    linked.require_writable()
    assert asked == ["t.jsonl"]
    linked.dataset_ledger.set_limit(Budget(1.0))
    linked.require_writable()
    assert asked == ["t.jsonl", "t.jsonl", linked.dataset_ledger.path.name]


def test_no_words_call_a_side_ledger_s_sum_that_of_the_data_set(tmp_path):
    for name, ledger, own in (
        ("scans", None, True),
        ("scans", tmp_path / "t.jsonl", False),
        ("", tmp_path / "u.jsonl", False),
    ):
        book = open_ledger(name, ledger)
        book.reserve(plan(), "m")
        facts = summarize_spending(name, book, 1e-5)
        said = describe_spending(name, book, facts)
        assert facts["is_dataset_ledger"] is own
        assert ("in all" in said) is own
        assert ("own ledger is" in said) is (name == "scans" and not own)
        assert "for one record under replace neighbours" in said
    book = open_ledger("scans", tmp_path / "t.jsonl")
    book.dataset_ledger.set_limit(Budget(1e3))
    assert describe_spending("scans", book, facts).endswith("which was charged too")
    assert "for" not in describe_spending(
        "empty", open_ledger("empty"), summarize_spending("empty", open_ledger("empty"), 1e-5)
    )
    assert str(ledger_path("scans")) in describe_spending(
        "scans", Ledger(tmp_path / "t.jsonl"), facts
    )


def test_the_command_line_keeps_to_the_own_limit(privot, tmp_path):
    np.savez(tmp_path / "scans.npz", x=data()._images[:, 0], y=data()._labels)
    sets = tuple(
        word
        for key, value in MERF.items()
        if value is not None
        for word in ("--set", f"{key}={value}")
    )
    words = (
        "synthesize",
        "scans.npz",
        "--method",
        "merf",
        "--epsilon",
        5,
        *sets,
        "--ledger",
        "t.jsonl",
    )
    code, out, _ = privot(*words, "--out", "one")
    assert (code, "in all" in out, "the data set's own ledger is" in out) == (0, False, True)
    code, out, _ = privot("ledger", "scans.npz", "--ledger", "t.jsonl")
    assert (
        "spent in all" in out,
        "this ledger counts: epsilon 5" in out,
        "own ledger is" in out,
    ) == (False, True, True)
    assert privot("ledger", "scans.npz", "--limit", 1)[0] == 0
    code, _, err = privot(*words, "--out", "two")
    assert (code, "does not allow this run" in err) == (2, True)
    assert not (tmp_path / "two.run").exists()


# Parts of one data set


def test_all_parts_of_a_run_are_one_charge(ledger):
    tickets = [ledger.reserve_part(plan(), "run", part, 3) for part in range(3)]
    assert len(set(tickets)) == 1
    assert spent(ledger) == pytest.approx(float(plan().cost().epsilon(1e-5)))


@pytest.mark.parametrize(
    ("method", "noise", "part", "owners"),
    [("run", 5.0, 0, 3), ("run", 5.0, 1, 4), ("run", 4.0, 1, 3), ("other", 5.0, 1, 3)],
)
def test_what_may_overlap_is_charged_anew(ledger, method, noise, part, owners):
    """The same part again, a part of another division, another plan, another run."""
    ledger.reserve_part(plan(), "run", 0, 3)
    ledger.reserve_part(plan(noise), method, part, owners)
    assert len([each for each in ledger.entries() if each["kind"] == "reserve"]) == 2
    ledger.reserve_part(plan(noise), method, 2, owners)  # and this one is covered
    assert len([each for each in ledger.entries() if each["kind"] == "reserve"]) == 2


def test_a_run_of_the_whole_covers_no_part(ledger):
    ledger.reserve(plan(), "run")
    ledger.reserve_part(plan(), "run", 0, 1)
    assert len([each for each in ledger.entries() if each["kind"] == "reserve"]) == 2


def test_parts_keep_to_the_limit(tmp_path):
    one = float(plan().cost().epsilon(1e-5))
    own = Ledger(ledger_path("scans"))
    own.set_limit(Budget(one * 1.1))
    parts = [
        open_part_ledger("scans", (number, 2), tmp_path / f"{number}.jsonl") for number in range(2)
    ]
    for part in parts:
        part.check_limit(plan(), method="run")
        part.reserve(plan(), "run")
    assert [spent(each) for each in (own, *parts)] == [pytest.approx(one)] * 3
    with pytest.raises(BudgetError):
        parts[0].check_limit(plan(), method="next")
    with pytest.raises(BudgetError):
        parts[0].reserve(plan(), "next")
    assert spent(parts[0]) == pytest.approx(one)


SIMULATE = (
    "federate",
    "simulate",
    "--data",
    "scans.npz",
    "--clients",
    3,
    *TINY_ARGUMENTS,
    "--device",
    "cpu",
)


@pytest.fixture
def scans(tmp_path):
    pytest.importorskip("flwr", reason="the extra federated is not installed")
    np.savez(tmp_path / "scans.npz", x=data()._images[:, 0], y=data()._labels)
    return str(tmp_path / "scans.npz")


@pytest.mark.parametrize("place", [(), ("--ledger", "ledgers")])
def test_a_simulation_is_charged_once_to_the_data_set(privot, scans, tmp_path, monkeypatch, place):
    simulate_here(monkeypatch)
    code, out, err = privot(*SIMULATE, "--epsilon", 20, "--out", "release", *place, "--json")
    assert code == 0, err
    assert json.loads(out)["guarantee"]["epsilon"] == pytest.approx(20.0)
    assert [each["kind"] for each in lines(scans)] == ["reserve", "part", "part", "part"]
    assert spent(Ledger(ledger_path(scans))) == pytest.approx(20.0)
    code, _, err = privot(*SIMULATE, "--epsilon", 20, "--out", "second", *place)
    assert code == 0, err
    assert len(lines(scans, "reserve")) == 2


def test_a_simulation_that_is_resumed_is_charged_once(privot, scans, tmp_path, monkeypatch):
    simulate_here(monkeypatch, rounds=1)
    assert "stopped" in privot(*SIMULATE, "--epsilon", 20, "--out", "release")[2]
    assert len(lines(scans, "reserve")) == 1
    assert privot("ledger", scans, "--limit", 21)[0] == 0
    simulate_here(monkeypatch)
    code, _, err = privot(*SIMULATE, "--epsilon", 20, "--out", "release", "--resume")
    assert code == 0, err
    assert [each["kind"] for each in lines(scans, "reserve", "part")] == [
        "reserve",
        "part",
        "part",
        "part",
    ]


def test_the_data_set_is_charged_before_an_owner_reads(privot, scans, monkeypatch):
    simulate_here(monkeypatch)
    take = Sensitive._read_records
    seen = []
    monkeypatch.setattr(
        Sensitive,
        "_read_records",
        lambda *given: seen.append(len(lines(scans, "reserve"))) or take(*given),
    )
    assert privot(*SIMULATE, "--epsilon", 20, "--out", "release")[0] == 0
    assert set(seen) == {1}


def test_a_simulation_keeps_to_the_limit_of_the_data_set(privot, scans, tmp_path, monkeypatch):
    simulate_here(monkeypatch)
    assert privot("ledger", scans, "--limit", 25)[0] == 0
    assert privot(*SIMULATE, "--epsilon", 20, "--out", "release")[0] == 0
    code, _, err = privot(*SIMULATE, "--epsilon", 20, "--out", "second")
    assert (code, "does not allow this run" in err) == (2, True)
    assert not list(tmp_path.glob("second*"))
    assert len(lines(scans, "reserve")) == 1


DECLARED = ("--shape", "1x8x8", "--classes", 3)
CLIENT_WORDS = (
    "federate",
    "client",
    "--data",
    "scans.npz",
    *DECLARED,
    "--server",
    "localhost:1",
    "--ca",
    "ca",
    "--key",
    "key",
    "--device",
    "cpu",
)


def test_parts_of_clients_are_charged_once_to_the_data_set(privot, scans, tmp_path, monkeypatch):
    terms = serve_here(monkeypatch, 2)
    price = float(terms.plan().cost().epsilon(1e-5))
    for number in range(2):
        words = ("--partition", f"{number}/2", "--epsilon", 100, "--ledger", f"h{number}.jsonl")
        code, out, err = privot(*CLIENT_WORDS, *words)
        assert (code, "in all" in out, "which was charged too" in out) == (0, False, True), err
        assert spent(Ledger(tmp_path / f"h{number}.jsonl")) == pytest.approx(price)
    assert [each["kind"] for each in lines(scans)] == ["reserve", "part", "part"]
    assert spent(Ledger(ledger_path(scans))) == pytest.approx(price)
    # The same part once more under another ledger and folder answers the same rounds anew: that is not free.
    code, _, err = privot(
        *CLIENT_WORDS, "--partition", "0/2", "--epsilon", 100, "--ledger", "again.jsonl"
    )
    assert code == 0, err
    assert len(lines(scans, "reserve")) == 2


def test_a_client_keeps_to_the_limit_of_its_data_set(privot, scans, tmp_path, monkeypatch):
    serve_here(monkeypatch, 2)
    assert privot("ledger", scans, "--limit", 0.1)[0] == 0
    for words in (
        ("--partition", "0/2"),
        (),
        ("--partition", "0/2", "--ledger", "h.jsonl"),
        ("--ledger", "h.jsonl"),
    ):
        code, _, err = privot(
            *CLIENT_WORDS,
            "--epsilon",
            100,
            *words,
            "--folder",
            "-".join(["own", *words]).replace("/", "."),
        )
        assert (code, "does not cover the run" in err) == (2, True)
    assert [each["kind"] for each in lines(scans)] == ["budget"]
    assert not (tmp_path / "h.jsonl").exists() or not Ledger(tmp_path / "h.jsonl").entries()


# Shadows and audits are no releases


def shadows(tmp_path, method, **more):
    settings = MERF if method == "merf" else {"images_per_class": 2}
    given = {"epsilon": 5.0} if method == "merf" else {}
    return ShadowConfig(
        folder=tmp_path / "shadows",
        dataset=data(),
        method=method,
        settings=settings,
        num_shadows=2,
        epochs=1,
        num_samples=30,
        **given,
        **more,
    )


@pytest.mark.parametrize("method", ["merf", "real-subset"])
def test_a_shadow_does_not_verify_as_a_release(privot, tmp_path, method):
    prepared = prepare_shadows(shadows(tmp_path, method), CPU)
    made = prepared.load_release(0)  # the attack itself can load it
    assert made.metadata["purpose"] == "shadow"
    folder = prepared.release_path(0)
    for refused in (lambda: verify(folder), lambda: resize(folder, 3)):
        with pytest.raises(ReleaseError, match="made for an attack on the data owner's side"):
            refused()
    for words in (
        ("verify", folder),
        ("report", folder),
        ("sample", folder),
        ("compare", folder, "--test", "digits"),
    ):
        code, _, err = privot(*words)
        assert (code, "not a release" in err, err.count("\n")) == (2, True, 1), words
    assert not Samples.from_source(str(folder), 10).publishable
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["purpose"]
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    with pytest.raises(ReleaseError, match="digest"):
        verify(folder)


def test_shadows_are_listed_in_the_ledger_and_add_nothing(tmp_path):
    Ledger(ledger_path("scans")).set_limit(Budget(0.1))  # which refuses no run whose output stays
    prepare_shadows(shadows(tmp_path, "merf"), CPU)
    [line] = lines("scans", "internal")
    assert (line["purpose"], line["method"], line["runs"], line["epsilon"]) == (
        "shadow",
        "merf",
        2,
        pytest.approx(5.0),
    )
    assert spent(Ledger(ledger_path("scans"))) == 0
    prepare_shadows(shadows(tmp_path, "merf"), CPU)  # all are there
    assert len(lines("scans", "internal")) == 1


def test_shadows_are_listed_for_every_sensitive_data_set(tmp_path):
    from privot.attacks.membership.method_shadows import shadows_for_method, shadows_for_release

    release = small_release(ledger=tmp_path / "t.jsonl")
    for others, names in (
        (data("others", seed=1), ("scans", "others")),
        (data("others", Public, 1), ("scans",)),
    ):
        assert shadows_for_release(release, data(), others, tmp_path, 2).source_names == names
        assert (
            shadows_for_method("real-subset", {}, None, data(), others, tmp_path, 2).source_names
            == names
        )
    prepare_shadows(shadows(tmp_path, "real-subset", source_names=("scans", "others")), CPU)
    assert [(name, each["epsilon"]) for name in ("scans", "others") for each in lines(name)] == [
        ("scans", None),
        ("others", None),
    ]


def audit(tmp_path, **more):
    given = {"method": "merf", "settings": MERF, "epsilon": 5.0, "runs_per_side": 4, **more}
    return EpsilonAudit(**{"folder": tmp_path / "audit", "dataset": data(), **given})


def test_the_runs_of_an_audit_are_listed_and_marked(tmp_path, monkeypatch):
    from privot.audit import runner

    made = []
    run = runner.synthesize
    monkeypatch.setattr(
        runner, "synthesize", lambda *given, **more: made.append(run(*given, **more)) or made[-1]
    )
    (tmp_path / "audit").mkdir(mode=0o755)
    audit(tmp_path).run(CPU)
    assert len(made) == 8
    made[0].save(tmp_path / "kept")
    with pytest.raises(ReleaseError, match=r"\(audit\) and must stay there"):
        verify(tmp_path / "kept")
    [line] = lines()
    assert (line["kind"], line["purpose"], line["method"], line["runs"]) == (
        "internal",
        "audit",
        "merf",
        8,
    )
    assert line["epsilon"] == pytest.approx(5.0)
    assert (tmp_path / "audit").stat().st_mode & 0o777 == 0o700
    audit(tmp_path).run(CPU)
    assert len(lines()) == 1  # nothing was left to do


def test_public_data_is_not_charged_and_data_without_a_name_is_refused(tmp_path):
    audit(tmp_path, dataset=data(kind=Public)).run(CPU)
    assert lines() == []
    with pytest.raises(SettingError, match="Give it a name"):
        audit(tmp_path / "other", dataset=data("")).run(CPU)


def test_only_known_purposes_are_marks(tmp_path):
    with pytest.raises(SettingError, match="shadow or audit"):
        small_release(ledger=tmp_path / "t.jsonl", purpose="fun")
    release = small_release(ledger=tmp_path / "t.jsonl", purpose="audit")
    release.metadata["purpose"] = {"strange": "\n"}
    release.save(tmp_path / "odd")
    with pytest.raises(ReleaseError, match=r"\(another purpose\) and must stay there\.$"):
        verify(tmp_path / "odd")
    assert Release.load(tmp_path / "odd").metadata["purpose"] == {"strange": "\n"}


def test_a_data_set_that_is_named_twice_is_listed_once():
    record_internal_runs(["scans", "scans"], "shadow", "real-subset", 2, Plan((), REPLACE), 1e-5)
    assert len(lines()) == 1


def test_the_ledger_verb_lists_internal_runs(privot, scans):
    record_internal_runs([scans], "audit", "merf", 8, plan(), 1e-5)
    record_internal_runs([scans], "shadow", "real-subset", 2, Plan((), REPLACE), 1e-5)
    code, out, _ = privot("ledger", scans)
    assert (
        code,
        "8 runs of merf (audit)" in out,
        "each would cost no guarantee" in out,
        "spent in all: epsilon 0" in out,
    ) == (0, True, True, True)
    facts = json.loads(privot("ledger", scans, "--json")[1])
    assert [each["runs"] for each in facts["internal"]] == [8, 2]
    assert (facts["runs"], facts["spent_epsilon"], facts["neighbours"]) == ([], 0.0, None)


# For whom the sum holds

MIXED = [
    ([plan(relation=ADD_REMOVE)], 1, ADD_REMOVE),
    ([plan(relation=ADD_REMOVE)] * 2, 1, ADD_REMOVE),
    ([plan(relation=ADD_REMOVE), plan()], 1, REPLACE),
    ([plan(relation=LOCAL, verb="rows")] * 2, 1, LOCAL),
    ([plan(relation=LOCAL, verb="rows"), plan(relation=CLIENT, verb="query_clients")], 1, REPLACE),
    ([plan(relation=CLIENT, verb="query_clients")], 5, CLIENT),
    ([plan(relation=CLIENT, verb="query_clients")] * 2, 1, CLIENT),
    (
        [plan(relation=CLIENT, verb="query_clients")] * 2,
        5,
        REPLACE,
    ),  # were the owners the same? Nobody knows
    ([plan(relation=CLIENT, verb="query_clients"), plan()], 5, REPLACE),
    ([plan(), plan()], 5, REPLACE),
    ([plan(0.0, ADD_REMOVE), plan()], 1, REPLACE),
]


@pytest.mark.parametrize(("plans", "owners", "relation"), MIXED)
def test_the_sum_says_for_whom_it_holds(ledger, plans, owners, relation):
    for each in plans[:-1]:
        ledger.reserve(each, "m", num_clients=owners)
    before = ledger.compute_spent_cost(extra_plan=plans[-1], num_clients=owners)
    ledger.reserve(plans[-1], "m", num_clients=owners)
    after = ledger.compute_spent_cost()
    assert (before.neighbours, after.neighbours) == (relation, relation)
    unit = "all records of one client" if relation is CLIENT else "one record"
    assert (after.neighbours.privacy_unit, before.epsilon(1e-5)) == (unit, after.epsilon(1e-5))
    alone = [Charge(each, False, owners).cost() for each in plans]
    assert [each.neighbours for each in alone] == [each.neighbours for each in plans]
    assert after.epsilon(1e-5) >= max(each.epsilon(1e-5) for each in alone)


def test_no_run_no_relation(ledger):
    assert ledger.compute_spent_cost().neighbours is None
    assert spent(ledger) == 0


def test_a_local_run_beside_others_is_a_replaced_record(ledger):
    """A channel's pure epsilon under replace-one is the same: one channel's input changes."""
    channel = build_image_channel(SPEC, "laplace", 2.0)
    both = compute_total_cost([Charge(channel.plan()), Charge(plan())])
    assert both.neighbours is REPLACE
    assert both.epsilon(1e-5) == pytest.approx(2.0 + float(plan().cost().epsilon(1e-5)))


@pytest.mark.usefixtures("coarse_accounting")
def test_the_ledger_verb_names_the_relation_of_each_run_and_of_the_sum(privot, scans):
    book = Ledger(ledger_path(scans))
    book.reserve(plan(2.0, ADD_REMOVE, sampling=Poisson(0.1), steps=5), "one")
    facts = json.loads(privot("ledger", scans, "--json")[1])
    assert (facts["neighbours"], facts["privacy_unit"], facts["is_dataset_ledger"]) == (
        "add-remove",
        "one record",
        True,
    )
    book.reserve(plan(), "two")
    book.reserve(plan(), "three", seeded=True)
    facts = json.loads(privot("ledger", scans, "--json")[1])
    assert (facts["neighbours"], facts["spent_epsilon"]) == ("replace", "inf")
    assert [(each["neighbours"], each["epsilon"]) for each in facts["runs"][1:]] == [
        ("replace", pytest.approx(0.726, abs=1e-3)),
        ("replace", "inf"),
    ]
    out = privot("ledger", scans)[1]
    assert (
        "spent in all: epsilon inf at delta 1e-05, no limit set; for one record under replace neighbours"
        in out
    )
    assert "inf (seeded)" in " ".join(out.split())


def test_the_digits_have_an_own_ledger_too():
    assert open_ledger(load_dataset("digits").name).path == ledger_path("digits")
