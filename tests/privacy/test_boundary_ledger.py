"""What ledgers must see: seeded noise, side ledgers, parts of a data set, shadows and audits."""

import json
import math

import numpy as np
import pytest
from support.gates import flatten_image, list_kinds, make_gate, watch_reads
from support.in_process_federation import TINY_ARGUMENTS, serve_here, simulate_here
from support.tiny_settings import choose_tiny_settings

from privot.attacks.membership.method_shadows import shadows_for_method, shadows_for_release
from privot.attacks.shadows.config import ShadowConfig
from privot.attacks.shadows.runner import prepare_shadows
from privot.audit import runner
from privot.audit.runner import EpsilonAudit
from privot.data import Public, Sensitive, Spec, load_dataset
from privot.errors import BudgetError, LedgerError, ReleaseError, SettingError
from privot.local.privatize import build_image_channel, privatize
from privot.measures import Samples
from privot.measures.private_accuracy import measure_private_accuracy
from privot.privacy.charges import Charge, compute_total_cost
from privot.privacy.ledger import Ledger
from privot.privacy.ledger_lookup import (
    LinkedLedger,
    ledger_path,
    open_ledger,
    open_part_ledger,
    record_internal_runs,
)
from privot.privacy.plan import Budget, Neighbours, Plan, Stage
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
REAL_SUBSET = {"images_per_class": 2}
COUNTED = ("budget", "reserve", "part", "internal")


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The own ledger of the data set, in this test's folder."""
    monkeypatch.setenv("PRIVOT_HOME", str(tmp_path / "home"))
    return Ledger(ledger_path("scans"))


def make_dataset(name="scans", kind=Sensitive, seed=0):
    images = np.random.default_rng(seed).random((47, 1, 8, 8), np.float32)
    return kind(images, np.arange(47) % 3, SPEC, name=name)


def make_plan(noise=5.0, neighbours=REPLACE, verb="sum", **more):
    return Plan((Stage("it", verb, noise, **more),), neighbours)


def list_lines(ledger, *kinds):
    return [line for line in ledger.entries() if line["kind"] in (kinds or COUNTED)]


def count_charges(ledger):
    return list_kinds(ledger).count("reserve")


def compute_spent(ledger):
    return float(ledger.compute_spent_cost().epsilon(1e-5))


def make_release(**more):
    return synthesize(make_dataset(), "merf", 5.0, settings=MERF, runtime=CPU, **more)


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    release = make_release(ledger=tmp_path_factory.mktemp("samples") / "it.jsonl")
    return Samples.from_release(release, "it", 30)


def run_gate(samples, ledger, **more):
    gate = make_gate(make_dataset(), ledger, *make_plan().stages, target=Budget(5.0), **more)
    return gate.sum("it", flatten_image, clip_norm=1.0)


def run_synthesis(samples, ledger, **more):
    make_release(ledger=ledger, **more)


def run_channel(samples, ledger, **more):
    channel = build_image_channel(SPEC, "laplace", 4.0)
    privatize(make_dataset(), channel, ledger=ledger, **more)


def run_measure(samples, ledger, **more):
    budget = Budget(5.0)
    measure_private_accuracy(samples, make_dataset(), budget, ledger=ledger, runtime=CPU, **more)


def run_without_noise(samples, ledger):
    synthesize(make_dataset(), "real-subset", settings=REAL_SUBSET, ledger=ledger, runtime=CPU)


# Seeded noise is no noise


@pytest.mark.parametrize("run", [run_gate, run_synthesis, run_channel, run_measure])
def test_a_seeded_run_is_charged_as_infinite_and_refused_by_a_limit(run, samples, ledger):
    ledger.set_limit(Budget(100.0))
    with pytest.raises(BudgetError, match="total would come to inf"):
        run(samples, ledger, insecure_seed=1)
    assert list_kinds(ledger) == ["budget"]
    run(samples, ledger)
    assert compute_spent(ledger) < 6
    ledger.set_limit(Budget(math.inf))
    run(samples, ledger, insecure_seed=1)
    assert compute_spent(ledger) == math.inf
    assert [line.get("seeded", False) for line in list_lines(ledger, "reserve")] == [False, True]


def test_releases_state_that_the_ledger_is_infinite(ledger):
    seeded = make_release(ledger=ledger, insecure_seed=1)
    later = make_release(ledger=ledger)
    assert later.guarantee.epsilon == pytest.approx(5.0)
    for release in (seeded, later):
        assert float(release.metadata["ledger"]["spent_epsilon"]) == math.inf


def test_a_seeded_run_is_resumed_as_a_seeded_run_alone(ledger, tmp_path):
    for one, other in (({"insecure_seed": 1}, {}), ({}, {"insecure_seed": 1})):
        run = {"folder": tmp_path / f"run{len(one)}", "method": "m"}
        first = run_gate(None, ledger, **run, **one)
        assert (run_gate(None, ledger, **run, **one) == first).all()
        with pytest.raises(LedgerError, match="another plan"):
            run_gate(None, ledger, **run, **other)
    assert count_charges(ledger) == 2


# A side ledger does not escape the limit


def test_the_own_limit_refuses_a_run_under_a_side_ledger(samples, own, tmp_path):
    side = Ledger(tmp_path / "t.jsonl")
    own.set_limit(Budget(1.0))
    for run in (run_synthesis, run_channel, run_measure, run_without_noise):
        with pytest.raises(BudgetError, match="does not allow"):
            run(samples, side.path)
    assert count_charges(side) == 0
    assert list_kinds(own) == ["budget"]


def test_a_side_ledger_is_charged_alone_unless_the_own_one_has_a_limit(own, tmp_path):
    release = make_release(ledger=tmp_path / "alone.jsonl")
    facts = release.metadata["ledger"]
    assert facts["is_dataset_ledger"] is False
    assert facts["neighbours"] == release.guarantee.neighbours
    assert facts["privacy_unit"] == "one record"
    assert own.entries() == []
    own.set_limit(Budget(6.0))
    side = Ledger(tmp_path / "t.jsonl")
    assert make_release(ledger=side).metadata["ledger"]["is_dataset_ledger"] is False
    assert compute_spent(side) == compute_spent(own) == pytest.approx(5.0)
    with pytest.raises(BudgetError):
        make_release(ledger=tmp_path / "other.jsonl")  # twice 5 is more than 6
    assert list_kinds(own, *COUNTED) == ["budget", "reserve"]
    own.set_limit(Budget(60.0))
    assert make_release().metadata["ledger"]["is_dataset_ledger"] is True
    assert count_charges(own) == 2


def test_a_limit_of_the_side_ledger_holds_too_and_then_nothing_is_charged(own, tmp_path):
    own.set_limit(Budget(50.0))
    side = Ledger(tmp_path / "t.jsonl")
    side.set_limit(Budget(1.0))
    with pytest.raises(BudgetError):
        open_ledger("scans", side).reserve(make_plan(0.5), "m")
    assert count_charges(own) == count_charges(side) == 0


def test_which_ledger_a_run_is_charged_to(own, tmp_path, monkeypatch):
    assert open_ledger("scans").path == own.path
    assert type(open_ledger("scans", own.path)) is Ledger
    assert open_ledger("scans", own) is own
    linked = open_ledger("scans", tmp_path / "t.jsonl")
    assert isinstance(linked, LinkedLedger)
    assert open_ledger("scans", linked) is linked
    assert type(open_ledger("", tmp_path / "t.jsonl")) is Ledger
    assert open_ledger(load_dataset("digits").name).path == ledger_path("digits")
    own.path.parent.mkdir(parents=True)
    own.path.touch()
    (tmp_path / "link.jsonl").symlink_to(own.path)
    assert open_ledger("scans", tmp_path / "link.jsonl").path == own.path
    with pytest.raises(SettingError, match="Give it a name"):
        open_ledger("")
    with pytest.raises(SettingError, match="A part needs another file"):
        open_part_ledger("scans", (0, 2), own.path)

    def fail():
        raise RuntimeError

    monkeypatch.delenv("PRIVOT_HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", fail)
    with pytest.raises(SettingError, match="Set PRIVOT_HOME"):
        ledger_path("scans")


def test_a_side_ledger_is_writable_if_every_ledger_that_counts_is(own, tmp_path, monkeypatch):
    linked = open_ledger("scans", tmp_path / "t.jsonl")
    checked = []
    monkeypatch.setattr(Ledger, "require_writable", lambda self: checked.append(self.path))
    linked.require_writable()
    assert checked == [linked.path]
    own.set_limit(Budget(1.0))
    linked.require_writable()
    assert checked == [linked.path, linked.path, own.path]


def test_the_sum_of_a_side_ledger_is_not_called_that_of_the_data_set(own, tmp_path):
    for name, path, is_own in (
        ("scans", None, True),
        ("scans", tmp_path / "t.jsonl", False),
        ("", tmp_path / "u.jsonl", False),
    ):
        ledger = open_ledger(name, path)
        ledger.reserve(make_plan(), "m")
        facts = summarize_spending(name, ledger, 1e-5)
        text = describe_spending(name, ledger, facts)
        assert facts["is_dataset_ledger"] is is_own
        assert ("in all" in text) is is_own
        assert ("own ledger is" in text) is (name == "scans" and not is_own)
        assert "for one record under replace neighbours" in text
    side = Ledger(tmp_path / "t.jsonl")
    assert str(own.path) in describe_spending("scans", side, facts)
    own.set_limit(Budget(1e3))
    linked = open_ledger("scans", side)
    assert describe_spending("scans", linked, facts).endswith("which was charged too")
    empty = open_ledger("empty")
    assert "for" not in describe_spending("empty", empty, summarize_spending("empty", empty, 1e-5))


@pytest.fixture
def scans(tmp_path):
    """The data set as a file, and its own ledger."""
    file = tmp_path / "scans.npz"
    np.savez(file, x=make_dataset()._images[:, 0], y=make_dataset()._labels)
    return Ledger(ledger_path(str(file)))


def test_the_command_line_keeps_to_the_own_limit(privot, scans, tmp_path):
    settings = [
        word for key, value in MERF.items() if value for word in ("--set", f"{key}={value}")
    ]
    words = ("synthesize", "scans.npz", "--method", "merf", "--epsilon", 5, *settings)
    words += ("--ledger", "t.jsonl")
    code, out, _ = privot(*words, "--out", "one")
    assert (code, "in all" in out, "the data set's own ledger is" in out) == (0, False, True)
    _, out, _ = privot("ledger", "scans.npz", "--ledger", "t.jsonl")
    assert "spent in all" not in out
    assert "this ledger counts: epsilon 5" in out
    assert "own ledger is" in out
    assert privot("ledger", "scans.npz", "--limit", 1)[0] == 0
    code, _, err = privot(*words, "--out", "two")
    assert (code, "does not allow this run" in err) == (2, True)
    assert not (tmp_path / "two.run").exists()


# Parts of one data set


@pytest.mark.parametrize(
    ("method", "noise", "part", "num_parts"),
    [("run", 5.0, 0, 3), ("run", 5.0, 1, 4), ("run", 4.0, 1, 3), ("other", 5.0, 1, 3)],
)
def test_what_may_overlap_is_charged_anew(ledger, method, noise, part, num_parts):
    """The same part again, a part of another division, another plan, another run."""
    ledger.reserve_part(make_plan(), "run", 0, 3)
    ledger.reserve_part(make_plan(noise), method, part, num_parts)
    assert count_charges(ledger) == 2
    ledger.reserve_part(make_plan(noise), method, 2, num_parts)  # and this one is covered
    assert count_charges(ledger) == 2


def test_a_run_of_the_whole_covers_no_part(ledger):
    ledger.reserve(make_plan(), "run")
    ledger.reserve_part(make_plan(), "run", 0, 1)
    assert count_charges(ledger) == 2


def test_parts_keep_to_the_limit(own, tmp_path):
    one = float(make_plan().cost().epsilon(1e-5))
    own.set_limit(Budget(one * 1.1))
    parts = [open_part_ledger("scans", (part, 2), tmp_path / f"{part}.jsonl") for part in range(2)]
    for part in parts:
        part.check_limit(make_plan(), method="run")
        part.reserve(make_plan(), "run")
    with pytest.raises(BudgetError):
        parts[0].check_limit(make_plan(), method="next")
    with pytest.raises(BudgetError):
        parts[0].reserve(make_plan(), "next")
    assert [compute_spent(ledger) for ledger in (own, *parts)] == [pytest.approx(one)] * 3


@pytest.fixture
def simulate(privot, scans, monkeypatch):
    """``simulate(*WORDS, rounds=...)`` of three clients at epsilon 20."""
    pytest.importorskip("flwr", reason="the extra federated is not installed")
    words = ("federate", "simulate", "--data", "scans.npz", "--clients", 3, *TINY_ARGUMENTS)

    def run(*more, rounds=None):
        simulate_here(monkeypatch, rounds=rounds)
        return privot(*words, "--device", "cpu", "--epsilon", 20, *more)

    return run


def test_a_simulation_is_charged_once_before_it_reads_and_keeps_to_the_limit(
    privot, simulate, scans, tmp_path, monkeypatch
):
    run = ["reserve", "part", "part", "part"]
    reads = watch_reads(monkeypatch, lambda indices: count_charges(scans))
    assert privot("ledger", "scans.npz", "--limit", 25)[0] == 0
    assert "stopped" in simulate("--out", "release", rounds=1)[2]
    code, out, err = simulate("--out", "release", "--resume", "--json")
    assert code == 0, err
    assert json.loads(out)["guarantee"]["epsilon"] == pytest.approx(20.0)
    assert list_kinds(scans, *COUNTED) == ["budget", *run]
    assert compute_spent(scans) == pytest.approx(20.0)
    assert set(reads) == {1}
    code, _, err = simulate("--out", "second")
    assert (code, "does not allow this run" in err) == (2, True)
    assert not list(tmp_path.glob("second*"))
    assert privot("ledger", "scans.npz", "--limit", 100)[0] == 0
    code, _, err = simulate("--out", "second", "--ledger", "ledgers")
    assert code == 0, err
    assert list_kinds(scans, "reserve", "part") == run * 2


@pytest.fixture
def join(privot, scans, monkeypatch):
    """``join(*WORDS)`` as a client, and the price of the run."""
    pytest.importorskip("flwr", reason="the extra federated is not installed")
    price = float(serve_here(monkeypatch, 2).plan().cost().epsilon(1e-5))
    words = ("federate", "client", "--data", "scans.npz", "--shape", "1x8x8", "--classes", 3)
    words += ("--server", "localhost:1", "--ca", "ca", "--key", "key", "--device", "cpu")
    return lambda *more: privot(*words, "--epsilon", 100, *more), price


def test_parts_of_clients_are_charged_once_to_the_data_set(join, scans, tmp_path):
    run, price = join
    for part in range(2):
        code, out, err = run("--partition", f"{part}/2", "--ledger", f"h{part}.jsonl")
        assert (code, "in all" in out, "which was charged too" in out) == (0, False, True), err
        assert compute_spent(Ledger(tmp_path / f"h{part}.jsonl")) == pytest.approx(price)
    assert list_kinds(scans, *COUNTED) == ["reserve", "part", "part"]
    assert compute_spent(scans) == pytest.approx(price)
    # The same part under another ledger answers the same rounds anew, which is not free.
    code, _, err = run("--partition", "0/2", "--ledger", "again.jsonl")
    assert code == 0, err
    assert count_charges(scans) == 2


@pytest.mark.parametrize("part", [(), ("--partition", "0/2")])
@pytest.mark.parametrize("side", [(), ("--ledger", "h.jsonl")])
def test_a_client_keeps_to_the_limit_of_its_data_set(privot, join, scans, tmp_path, part, side):
    assert privot("ledger", "scans.npz", "--limit", 0.1)[0] == 0
    code, _, err = join[0](*part, *side)
    assert (code, "does not cover the run" in err) == (2, True)
    assert list_kinds(scans) == ["budget"]
    assert Ledger(tmp_path / "h.jsonl").entries() == []


# Shadows and audits are no releases


def make_shadows(folder, method, **more):
    target = {"settings": MERF, "epsilon": 5.0} if method == "merf" else {"settings": REAL_SUBSET}
    sizes = {"num_shadows": 2, "epochs": 1, "num_samples": 30}
    data = {"folder": folder / "shadows", "dataset": make_dataset()}
    return ShadowConfig(**data, method=method, **sizes, **target, **more)


@pytest.mark.parametrize(("method", "epsilon"), [("merf", 5.0), ("real-subset", None)])
def test_a_shadow_is_listed_free_of_charge_and_does_not_verify(
    privot, own, tmp_path, method, epsilon
):
    own.set_limit(Budget(0.1))  # which refuses no run whose output stays
    for _ in range(2):  # the second one has nothing to do
        prepared = prepare_shadows(make_shadows(tmp_path, method), CPU)
        (line,) = list_lines(own, "internal")
        assert (line["purpose"], line["method"], line["runs"]) == ("shadow", method, 2)
        assert line["epsilon"] == (epsilon and pytest.approx(epsilon))
    assert compute_spent(own) == 0
    assert prepared.load_release(0).metadata["purpose"] == "shadow"  # the attack can load it
    folder = prepared.release_path(0)
    for refused in (lambda: verify(folder), lambda: resize(folder, 3)):
        with pytest.raises(ReleaseError, match="made for an attack on the data owner's side"):
            refused()
    for words in (("verify",), ("report",), ("sample",), ("compare", "--test", "digits")):
        code, _, err = privot(*words, folder)
        assert (code, "not a release" in err, err.count("\n")) == (2, True, 1), words
    assert not Samples.from_source(str(folder), 10).publishable
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["purpose"]
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    with pytest.raises(ReleaseError, match="digest"):
        verify(folder)


def test_shadows_are_listed_for_every_sensitive_data_set(own, tmp_path):
    release = make_release(ledger=tmp_path / "t.jsonl")
    subset = ("real-subset", {}, None)
    for others, names in (
        (make_dataset("others", seed=1), ("scans", "others")),
        (make_dataset("others", Public, 1), ("scans",)),
    ):
        data = (make_dataset(), others, tmp_path, 2)
        assert shadows_for_release(release, *data).source_names == names
        assert shadows_for_method(*subset, *data).source_names == names
    prepare_shadows(make_shadows(tmp_path, "real-subset", source_names=("scans", "others")), CPU)
    for name in ("scans", "others"):
        assert [line["epsilon"] for line in list_lines(Ledger(ledger_path(name)))] == [None]
    record_internal_runs(["new", "new"], "shadow", "real-subset", 2, Plan((), REPLACE), 1e-5)
    assert len(list_lines(Ledger(ledger_path("new")))) == 1


def run_audit(folder, dataset):
    more = {"settings": MERF, "epsilon": 5.0, "runs_per_side": 4}
    EpsilonAudit(folder=folder, dataset=dataset, method="merf", **more).run(CPU)


def test_the_runs_of_an_audit_are_listed_and_marked(own, tmp_path, monkeypatch):
    releases = []

    def watch(*arguments, **more):
        releases.append(synthesize(*arguments, **more))
        return releases[-1]

    monkeypatch.setattr(runner, "synthesize", watch)
    folder = tmp_path / "audit"
    folder.mkdir(mode=0o755)
    for _ in range(2):  # the second one has nothing to do
        run_audit(folder, make_dataset())
        assert len(releases) == 8
        (line,) = list_lines(own)
        facts = {"kind": "internal", "purpose": "audit", "method": "merf", "runs": 8}
        assert line | facts | {"epsilon": pytest.approx(5.0)} == line
    assert folder.stat().st_mode & 0o777 == 0o700
    releases[0].save(tmp_path / "kept")
    with pytest.raises(ReleaseError, match=r"\(audit\) and must stay there"):
        verify(tmp_path / "kept")


def test_runs_are_listed_before_the_first_one_unless_data_is_public(own, tmp_path, monkeypatch):
    def interrupt(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "synthesize", interrupt)
    for kind, lines in ((Public, []), (Sensitive, ["internal"])):
        with pytest.raises(KeyboardInterrupt):
            run_audit(tmp_path / kind.__name__, make_dataset(kind=kind))
        assert list_kinds(own) == lines
    with pytest.raises(SettingError, match="Give it a name"):
        run_audit(tmp_path / "other", make_dataset(""))


def test_only_known_purposes_are_marks(tmp_path):
    with pytest.raises(SettingError, match="shadow or audit"):
        make_release(ledger=tmp_path / "t.jsonl", purpose="fun")
    release = make_release(ledger=tmp_path / "t.jsonl", purpose="audit")
    release.metadata["purpose"] = {"strange": "\n"}
    release.save(tmp_path / "odd")
    with pytest.raises(ReleaseError, match=r"\(another purpose\) and must stay there\.$"):
        verify(tmp_path / "odd")
    assert Release.load(tmp_path / "odd").metadata["purpose"] == {"strange": "\n"}


# For whom the sum holds

ADDED = make_plan(neighbours=ADD_REMOVE)
REPLACED = make_plan()
ROWS = make_plan(neighbours=LOCAL, verb="rows")
CLIENTS = make_plan(neighbours=CLIENT, verb="query_clients")


@pytest.mark.parametrize(
    ("plans", "num_clients", "neighbours"),
    [
        ([ADDED], 1, ADD_REMOVE),
        ([ADDED, ADDED], 1, ADD_REMOVE),
        ([ADDED, REPLACED], 1, REPLACE),
        ([ROWS, ROWS], 1, LOCAL),
        ([ROWS, CLIENTS], 1, REPLACE),
        ([CLIENTS], 5, CLIENT),
        ([CLIENTS, CLIENTS], 1, CLIENT),
        ([CLIENTS, CLIENTS], 5, REPLACE),  # nobody can tell whether the clients were the same
        ([CLIENTS, REPLACED], 5, REPLACE),
        ([REPLACED, REPLACED], 5, REPLACE),
        ([make_plan(0.0, ADD_REMOVE), REPLACED], 1, REPLACE),
    ],
)
def test_the_sum_says_for_whom_it_holds(ledger, plans, num_clients, neighbours):
    for plan in plans[:-1]:
        ledger.reserve(plan, "m", num_clients=num_clients)
    before = ledger.compute_spent_cost(extra_plan=plans[-1], num_clients=num_clients)
    ledger.reserve(plans[-1], "m", num_clients=num_clients)
    after = ledger.compute_spent_cost()
    assert before.neighbours is after.neighbours is neighbours
    unit = "all records of one client" if neighbours is CLIENT else "one record"
    assert after.neighbours.privacy_unit == unit
    assert before.epsilon(1e-5) == after.epsilon(1e-5)
    alone = [Charge(plan, False, num_clients).cost() for plan in plans]
    assert [cost.neighbours for cost in alone] == [plan.neighbours for plan in plans]
    assert after.epsilon(1e-5) >= max(cost.epsilon(1e-5) for cost in alone)


def test_a_local_run_beside_others_is_a_replaced_record(ledger):
    """A channel has the same pure epsilon under replace-one: the input of one channel changes."""
    assert ledger.compute_spent_cost().neighbours is None
    assert compute_spent(ledger) == 0
    channel = build_image_channel(SPEC, "laplace", 2.0)
    both = compute_total_cost([Charge(channel.plan()), Charge(REPLACED)])
    assert both.neighbours is REPLACE
    assert both.epsilon(1e-5) == pytest.approx(2.0 + float(REPLACED.cost().epsilon(1e-5)))


@pytest.mark.usefixtures("coarse_accounting")
def test_the_ledger_verb_lists_internal_runs_and_names_relations(privot, scans, tmp_path):
    name = str(tmp_path / "scans.npz")

    def read_facts():
        return json.loads(privot("ledger", name, "--json")[1])

    record_internal_runs([name], "audit", "merf", 8, REPLACED, 1e-5)
    record_internal_runs([name], "shadow", "real-subset", 2, Plan((), REPLACE), 1e-5)
    code, out, _ = privot("ledger", name)
    assert code == 0
    for text in ("8 runs of merf (audit)", "each would cost no guarantee", "in all: epsilon 0"):
        assert text in out
    facts = read_facts()
    assert [line["runs"] for line in facts["internal"]] == [8, 2]
    assert facts | {"runs": [], "spent_epsilon": 0.0, "neighbours": None} == facts
    sampled = make_plan(2.0, ADD_REMOVE, sampling=Poisson(0.1), steps=5)
    scans.reserve(sampled, "one")
    assert compute_spent(scans) == pytest.approx(sampled.cost().epsilon(1e-5))
    facts = read_facts()
    assert facts | {"neighbours": "add-remove", "privacy_unit": "one record"} == facts
    assert facts["is_dataset_ledger"] is True
    scans.reserve(REPLACED, "two")
    scans.reserve(REPLACED, "three", seeded=True)
    facts = read_facts()
    assert facts | {"neighbours": "replace", "spent_epsilon": "inf"} == facts
    runs = [(run["neighbours"], run["epsilon"]) for run in facts["runs"][1:]]
    assert runs == [("replace", pytest.approx(0.726, abs=1e-3)), ("replace", "inf")]
    out = " ".join(privot("ledger", name)[1].split())
    assert "spent in all: epsilon inf at delta 1e-05, no limit set; for one record" in out
    assert "under replace neighbours" in out
    assert "inf (seeded)" in out
