"""The report as files: its facts are those of the release, and its public face knows nothing else."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.factories import (
    GAUSSIAN,
    NO_GUARANTEE,
    make_attack_result,
    make_metric_result,
    make_noise_dataset,
    make_release,
    parse_data_card,
    read_json,
    read_visible_text,
)
from support.report_pages import INTERNAL_FILES, PUBLIC_FILES, list_image_sources, write_toy_report

from privot.errors import ReleaseError
from privot.privacy.ledger import Ledger
from privot.privacy.plan import Budget, Neighbours, Plan, Stage
from privot.privacy.sampling import Fixed, Poisson
from privot.release import Release
from privot.release.artifact import Artifact
from privot.report import AttackResult, OwnerInputs
from privot.report.images import encode_data_uri
from privot.synthesis import synthesize

CLAIMS = pytest.mark.parametrize("claim", [None, NO_GUARANTEE], ids=["proved", "none"])
PRICE = "through the gate at epsilon 0.1, delta 1e-05, replace neighbours"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small release of the digits in its folder, and its ledger."""
    root = tmp_path_factory.mktemp("digits")
    settings = {"num_features": 100, "steps": 5}
    paths = {"out": root / "release", "ledger": root / "digits.jsonl"}
    synthesize("digits", "merf", 2.0, settings=settings, **paths)
    return root


def make_one_stage_plan(noise, relation=Neighbours.REPLACE):
    return Plan((Stage("means", "sum", noise),), relation)


def parse_record(folder):
    return parse_data_card((folder / "registry.yaml").read_text())


# What it says


def test_the_facts_are_those_of_the_release(saved, out):
    release = Release.load(saved / "release")
    write_toy_report(out, release, name="digits", results=[make_metric_result()])
    manifest = read_json(saved / "release", "manifest.json")
    facts = read_json(out)
    assert facts["guarantee"].items() <= manifest["guarantee"].items()
    assert manifest["guarantee"].keys() - facts["guarantee"].keys() == {"kind"}
    assert facts["verdict"] == {
        "kind": "Guarantee",
        "line": "(epsilon 2, delta 1e-5)-differential privacy of one record",
    }
    for key in ("plan", "ledger"):
        assert facts[key] == manifest[key]
    assert facts["method"]["settings"].keys() == manifest["settings"].keys()
    assert facts["method"]["citation"].startswith("@inproceedings")
    assert facts["provenance"]["versions"] == manifest["versions"]
    assert facts["data"].items() >= {"name": "digits", "size": 1438, "num_classes": 10}.items()
    digests = facts["provenance"]["digests"]
    assert digests["manifest.json"] == (saved / "release" / "manifest.sha256").read_text().strip()
    assert digests["tensors.safetensors"] == manifest["files"]["tensors.safetensors"]
    power = dict(zip(facts["max_tpr_curve"]["fpr"], facts["max_tpr_curve"]["tpr"], strict=True))
    for rate, claimed in manifest["guarantee"]["max_tpr"].items():
        assert power[float(rate)] == pytest.approx(claimed, rel=1e-5)
    result = {"value": 0.9, "name": "cnn_accuracy", "reference_size": 10000}
    assert facts["utility"]["results"][0].items() >= result.items()


def test_the_page_is_in_order_and_leaves_out_nothing_of_the_promise(saved, out):
    owner = OwnerInputs(make_noise_dataset(0), Ledger(saved / "digits.jsonl"))
    write_toy_report(out, results=[make_metric_result()], owner_inputs=owner)
    page = (out / "report.html").read_text()
    internal = (out.with_name("out-internal") / "internal.html").read_text()
    heads = [re.findall(r"<h2>(.*?)(?:<small>.*)?</h2>", text) for text in (page, internal)]
    start = ["Samples", "What is promised", "Attack power", "Epsilon by step", "Utility"]
    end = ["Method", "Ledger", "Provenance"]
    assert heads == [[*start, *end], [*start, "Nearest real records", *end]]
    assert "data:image/png" in page
    for words in (
        "one record of the first is replaced",
        "Accountant: analytic Gaussian",
        "Renyi",
        "not covered",
        "Signature",
        "privot verify",
    ):
        assert words in read_visible_text(out)
    for words in (
        "memory use and power",
        "ledger and its backups",
        "constants of the promise",
        "several records",
        "after looking at the data",
        "Whether loading succeeded",
        "Metrics on sensitive data",
        "under another name or path",
        "Whether the public data of a method contains sensitive records",
    ):
        for name in ("report.html", "README.md"):
            assert words in read_visible_text(out, name)


@pytest.mark.parametrize(
    ("relation", "words", "model"),
    [
        ("add-remove", "one record more", "Central"),
        ("replace", "one record of the first", "Central"),
        ("local", "on its own", "Local"),
    ],
)
def test_every_relation_is_explained(out, relation, words, model):
    write_toy_report(out, make_release(make_one_stage_plan(4.0, Neighbours(relation))))
    assert words in read_visible_text(out)
    assert parse_record(out)["deployment"]["deployment_model"]["model_name"] == model


def test_no_guarantee_prints_no_promise(out):
    release = make_release(claim=NO_GUARANTEE, ledger={"head": "00", "spent_epsilon": 3.0})
    results = [make_metric_result(), make_metric_result("fid", 50.0)]
    attacks = [make_attack_result(lower=(0.01, 0.12))]
    write_toy_report(out, release, results=results, attacks=attacks)
    assert read_json(out)["max_tpr_curve"] is None
    assert not read_json(out)["guarantee_refuted"]
    assert "No guarantee: no noise was added" in read_visible_text(out)
    assert "This release carries no proof" in read_visible_text(out)
    for name in ("report.html", "README.md", "registry.yaml"):
        assert not re.search(r"epsilon[^a-z]{0,4}\d|Certified", read_visible_text(out, name))
    assert parse_record(out)["deployment"].keys() == {"basic", "administrative"}
    assert "differential-privacy" not in (out / "README.md").read_text()


def test_without_noise_or_a_plan_nothing_is_said_of_noise(out):
    bare = replace(make_release(claim=NO_GUARANTEE), metadata={"data": "mnist"})
    write_toy_report(out, bare, results=[make_metric_result()])
    assert read_json(out)["utility"]["published"] == []
    free = make_release(make_one_stage_plan(0.0), NO_GUARANTEE)
    write_toy_report(out, free, results=[make_metric_result()])
    assert "without noise" in read_visible_text(out)


# Claims that nothing proves


@pytest.mark.parametrize(
    "claim",
    [
        {"epsilon": 0.1},
        {"max_tpr": {"0.01": 0.011}},
        {"unit": "one person"},
        {"accountant": "mine"},
        {"delta": "x"},
        {"max_tpr": 3},
    ],
)
def test_a_claim_that_the_events_do_not_prove_gets_no_page(out, claim):
    release = make_release()
    false = replace(release, guarantee=replace(release.guarantee, **claim))
    with pytest.raises(ReleaseError, match=r"toy: (claims|its guarantee is not valid)"):
        write_toy_report(out, false)
    assert not out.exists()


@CLAIMS
@pytest.mark.parametrize("event", [None, "GaussianDpEvent(noise_multiplier=1.0)", 3])
def test_events_that_are_not_those_of_the_plan_get_no_page(out, claim, event):
    with pytest.raises(ReleaseError, match="toy: the recorded event"):
        write_toy_report(out, make_release(claim=claim, event=event))
    assert not out.exists()


def test_neither_no_plan_nor_an_infinite_epsilon_is_a_guarantee(out):
    with pytest.raises(ReleaseError, match="records no plan"):
        write_toy_report(out, replace(make_release(), metadata={}))
    with pytest.raises(ReleaseError, match=r"toy: .*infinite"):
        write_toy_report(out, make_release(make_one_stage_plan(0.0)))
    assert not out.exists()


@CLAIMS
def test_a_hostile_release_gets_a_page_or_one_line(out, claim):
    huge = 10**400
    stages = (Stage("a\ud800", "sum\udfff", 8.0), Stage("b\ud800", "sum", 20.0, 40))
    ledger = {"head": "\ud800", "spent_epsilon": huge}
    release = make_release(Plan(stages, Neighbours.REPLACE), claim, ledger=ledger, seed=huge)
    release = replace(release, spec=replace(release.spec, size=huge))
    results = [make_metric_result(num_samples=huge, reference_size=huge)]
    write_toy_report(out, release, "a\ud800", results=results, owner_inputs=OwnerInputs())
    assert "more than 1e300" in read_visible_text(out)
    assert [stage["name"] for stage in read_json(out)["plan"]["stages"]] == ["a", "b"]
    sampled = Stage("steps", "sum", 0.0, huge, Fixed(5, huge))
    write_toy_report(out, make_release(Plan((sampled,), Neighbours.REPLACE), NO_GUARANTEE))
    assert "5 of more than 1e300" in read_visible_text(out)
    noisy = Plan((replace(sampled, noise_multiplier=1.0),), Neighbours.REPLACE)
    with pytest.raises(ReleaseError, match="toy: "):
        write_toy_report(out, make_release(noisy, make_release().guarantee))


@pytest.mark.parametrize(
    "junk", [None, True, -1, 1e308, "x", "\x00", [], [[]], {}, {"a": [None]}], ids=repr
)
def test_junk_in_a_manifest_is_shown_or_left_out(out, junk):
    fields = dict.fromkeys(("method", "settings", "data", "seed", "ledger", "versions"), junk)
    write_toy_report(out, make_release(**fields))
    assert "Provenance" in read_visible_text(out)
    metadata = {**fields, "plan": junk, "event": junk}
    write_toy_report(out, replace(make_release(claim=NO_GUARANTEE), metadata=metadata))
    assert "No guarantee" in read_visible_text(out)


# Numbers


def test_prices_protocols_and_warnings_stand_beside_results(out):
    results = [
        make_metric_result(protocol=f"LeNet, {'many words, ' * 20}; {PRICE}"),
        make_metric_result("fid", 50.0, protocol="2015 | network", warning="few samples"),
    ]
    write_toy_report(out, results=results)
    for name in ("report.html", "README.md"):
        seen = read_visible_text(out, name)
        for words in ("measured privately, with an epsilon of its own on the test data", PRICE):
            assert seen.count(words) == 1
        assert "few samples" in seen
    assert r"2015 \| network; **warning**: few samples |" in (out / "README.md").read_text()
    private = [result["privately_measured"] for result in read_json(out)["utility"]["results"]]
    assert private == [True, False]


def test_measured_numbers_are_not_flattered(out):
    release = make_release(delta=1.00001e-5, ledger={"head": "00", "spent_epsilon": 3.0})
    attack = make_attack_result(fpr=(0.5,), tpr=(0.50049,), lower=(0.49999,), confidence=0.9999)
    write_toy_report(out, release, attacks=[attack])
    seen = read_visible_text(out)
    assert "at 99.9 % confidence" in seen
    assert re.search(r"50 %\s*50 %\s*49\.9 %", seen)
    assert "delta 1.001e-5)-differential" in seen
    assert "1e-5" not in seen.replace("1.001e-5", "")
    # of a release that does not say for whom the sum holds
    assert "replace-one if the runs have different neighbours" in seen


@pytest.mark.parametrize("own", [True, False])
def test_a_sum_is_of_the_data_set_only_where_its_own_ledger_made_it(out, own):
    ledger = {"head": "00", "spent_epsilon": 3.0, "is_dataset_ledger": own}
    ledger |= {"neighbours": "replace", "privacy_unit": "one record"}
    write_toy_report(out, make_release(ledger=ledger))
    seen = read_visible_text(out)
    assert "for one record under replace neighbours" in seen
    assert ("Spent in all" in seen, "not the dataset's own ledger" in seen) == (own, not own)


def test_published_figures_of_the_same_data_stand_beside(out):
    write_toy_report(out, results=[make_metric_result(), make_metric_result("is", 5.0)])
    real = read_json(out)["utility"]["results"][0]["real_data"]
    assert real == pytest.approx(0.99, abs=0.005)
    for words in (
        "Published results on the same data, at epsilon 1",
        "SoK: Privacy-Preserving Data Synthesis",
        "not strictly comparable",
    ):
        assert words in read_visible_text(out)
    write_toy_report(out, make_release(data=""), results=[make_metric_result()])
    assert "Published results" not in read_visible_text(out)


# The two faces


def test_the_public_face_is_the_same_for_any_data(tmp_path):
    """privacy: other records, internal numbers and ledgers: not a byte of the public face differs."""
    faces = []
    for seed in (0, 1, 2):
        folder = tmp_path / f"out{seed}"
        results = [make_metric_result()]
        attacks = [make_attack_result()]
        owner = None
        if seed:
            ledger = Ledger(tmp_path / f"{seed}.jsonl")
            ledger.set_limit(Budget(10.0 + seed))
            owner = OwnerInputs(make_noise_dataset(seed, 40 + seed), ledger)
            for name, value in (("fid", 10.0 * seed), ("recall", seed / 7)):
                results.insert(0, make_metric_result(name, value, publishable=False))
            lower = (0.01, 0.12) if seed == 1 else (0.0, 0.0)
            attacks.insert(0, make_attack_result(f"secret {seed}", lower=lower, publishable=False))
        write_toy_report(folder, results=results, attacks=attacks, owner_inputs=owner)
        faces.append([(folder / name).read_bytes() for name in PUBLIC_FILES])
    assert faces[0] == faces[1] == faces[2]
    internal = [
        (tmp_path / f"out{seed}-internal" / "internal.html").read_bytes() for seed in (1, 2)
    ]
    assert internal[0] != internal[1]


def test_the_internal_face_has_what_the_public_one_has_not(tmp_path, out):
    ledger = Ledger(tmp_path / "toy.jsonl")
    ledger.set_limit(Budget(10.0))
    ledger.reserve(GAUSSIAN, "by hand")
    data = make_noise_dataset(3)
    numbers = {
        "results": [make_metric_result("secret_fid", 12.5, publishable=False)],
        "attacks": [make_attack_result("secret attack", publishable=False)],
    }
    done = write_toy_report(out, **numbers, owner_inputs=OwnerInputs(data, ledger))
    inside = out.with_name("out-internal")
    names = [
        *((out / name) for name in PUBLIC_FILES),
        *((inside / name) for name in INTERNAL_FILES),
    ]
    assert ([*done.paths], done.num_left_out) == (names, 0)
    public, internal = (
        "".join(read_visible_text(path.parent, path.name) for path in paths)
        for paths in (done.paths[:4], done.paths[4:])
    )
    for words in (
        "Internal: not for publication",
        "Nearest real records",
        "secret",
        "the owner sets a limit of epsilon 10",
        "real to real",
    ):
        assert words in internal
        assert words not in public
    real = {encode_data_uri(image) for image in data._read_records(slice(None)).images}
    assert not real & list_image_sources(out / "report.html")
    assert real & list_image_sources(inside / "internal.html")
    assert write_toy_report(out, **numbers).num_left_out == 2
    assert sorted(path.name for path in out.iterdir()) == sorted(PUBLIC_FILES)


def test_the_public_face_names_no_path_and_no_time(tmp_path, out):
    results = [make_metric_result(reference=str(tmp_path / "test.npz"), seconds=12.345)]
    write_toy_report(out, results=results)
    for name in PUBLIC_FILES:
        text = (out / name).read_text()
        assert str(tmp_path) not in text
        assert str(Path.home()) not in text
        assert not re.search(r"12\.345|20\d\d-\d\d-\d\d", text)
    assert "test.npz" in read_visible_text(out)


def test_the_internal_face_says_whether_the_release_is_in_the_ledger(saved, tmp_path, out):
    release = Release.load(saved / "release")
    inside = out.with_name("out-internal")
    for path, holds in ((saved / "digits.jsonl", True), (tmp_path / "other.jsonl", False)):
        write_toy_report(out, release, owner_inputs=OwnerInputs(ledger=Ledger(path)))
        assert read_json(inside, "internal.json")["history"]["contains_head"] is holds
    assert "charged to another one" in read_visible_text(inside, "internal.html")


# Attacks


@pytest.mark.usefixtures("coarse_accounting")
@pytest.mark.parametrize(
    "plan",
    [GAUSSIAN, Plan((Stage("steps", "sum", 4.0, 4, Poisson(0.1)),), Neighbours.ADD_REMOVE)],
    ids=["gauss", "pld"],
)
def test_a_lower_bound_above_the_certificate_is_seen(out, plan):
    release = make_release(plan)
    rates = (0.003, 0.2)
    low, high = (plan.cost().max_tpr(rate) for rate in rates)
    for factor, broken in ((0.999, False), (1.001, True)):
        # estimates may lie above, their bounds may not
        attack = make_attack_result(
            fpr=rates, tpr=(low * 2, high * 1.2), lower=(low * 0.5, high * factor)
        )
        assert write_toy_report(out, release, attacks=[attack]).guarantee_refuted is broken
        assert read_json(out)["guarantee_refuted"] is broken
        assert read_json(out)["attacks"][0]["exceeds_max_tpr"] == [False, broken]
        for name in ("report.html", "README.md", "registry.yaml"):
            seen = read_visible_text(out, name).lower()
            assert ("implementation broken" in seen) is broken
        tags = parse_data_card((out / "README.md").read_text().split("---\n")[1])["tags"]
        assert ("differential-privacy" in tags) is not broken
        deployment = parse_record(out)["deployment"]
        assert ("privacy_loss" in deployment) is not broken
        assert ("do not submit" in deployment["administrative"]["notes"]) is broken
        description = deployment["basic"]["description"]
        assert ("differential privacy" in description) is not broken


def test_the_page_shows_whatever_an_attack_reports(out):
    words = {
        "controls_summary": "AUC 0.99 <b>on</b> a control",
        "warning": "class shares differ",
        "verdict": "proves a true-positive rate of 0.1",
    }
    curve = ((0.01, 0.3, 1.0), (0.011, 0.31, 1.0))
    more = {"auc": 0.531, "perfect_attack_tpr_lower": (0.77, 0.88), "roc_curve": curve}
    whole = replace(make_attack_result(), **more, **words)
    done = write_toy_report(out, attacks=[whole, make_attack_result("bare")])
    assert not done.guarantee_refuted
    seen = read_visible_text(out)
    for text in ("0.531", "88 %", "AUC 0.99", "A perfect attack", *list(words.values())[1:]):
        assert text in seen
    assert "<b>on" not in (out / "report.html").read_text()
    assert seen.count("Its controls") == seen.count("Caution") == 1
    assert "none" not in seen[seen.index("A perfect attack") : seen.index("Epsilon by step")]


@pytest.mark.parametrize("refutes", [True, False])
def test_an_audit_that_refutes_the_claim_breaks_the_report(out, refutes):
    words = {"verdict": "proves epsilon of at least 9", "verdict_refutes_guarantee": refutes}
    audit = AttackResult("audit of the whole method: one run", (), (), (), 0.95, True, **words)
    assert write_toy_report(out, attacks=[audit]).guarantee_refuted is refutes
    assert ("Implementation broken" in read_visible_text(out)) is refutes
    assert "proves epsilon of at least 9" in read_visible_text(out)


def test_an_internal_attack_lets_no_clean_page_stand(tmp_path, out):
    strong = make_attack_result(tpr=(0.9, 0.9), lower=(0.8, 0.8), publishable=False)
    for owner in (OwnerInputs(), None):
        write_toy_report(out, attacks=[make_attack_result()])
        done = write_toy_report(out, attacks=[strong, make_attack_result()], owner_inputs=owner)
        assert done.guarantee_refuted
        assert [path.name for path in done.paths] == (list(INTERNAL_FILES) if owner else [])
        assert done.num_left_out == (0 if owner else 1)
        assert [path.name for path in tmp_path.iterdir()] == ["out-internal"]
    assert read_json(tmp_path / "out-internal", "internal.json")["guarantee_refuted"]
    published = [replace(strong, publishable=True), strong]
    assert write_toy_report(out, attacks=published).guarantee_refuted
    assert "Implementation broken" in read_visible_text(out)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "README.md").write_text("mine")
    with pytest.raises(ReleaseError, match="contains other files"):
        write_toy_report(foreign, attacks=[strong])
    assert (foreign / "README.md").read_text() == "mine"


# The snapshots of a flow


def add_snapshots(snapshots):
    release = make_release()
    tensors = release.artifact.tensors
    artifact = Artifact.from_images(
        tensors["images"], tensors["labels"], resize_state={"snapshots": snapshots}
    )
    return replace(release, artifact=artifact)


def test_a_flow_shows_its_particles_on_their_way(out):
    snapshots = torch.linspace(0, 1, 8).view(8, 1, 1, 1, 1).expand(8, 2, 1, 8, 8).half()
    write_toy_report(out, add_snapshots(snapshots))
    page = (out / "report.html").read_text()
    assert "Particles of the flow" in read_visible_text(out)
    assert page.count('of the flow">') == 16
    assert encode_data_uri(torch.ones(1, 8, 8)) in page


@pytest.mark.parametrize(
    "shape",
    [
        None,
        (8, 2, 8, 8),
        (8, 2, 3, 8, 8),
        (1, 2, 1, 8, 8),
        (500, 2, 1, 8, 8),
        (0, 2, 1, 8, 8),
        (8, 0, 1, 8, 8),
    ],
)
def test_leaves_out_what_is_no_series_of_snapshots(out, shape):
    write_toy_report(out, add_snapshots(torch.zeros(shape)) if shape else make_release())
    assert "Particles of the flow" not in read_visible_text(out)
